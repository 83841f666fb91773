"""The exercise notebook: it is what its source makes, and it judges right and wrong solutions."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from make_notebook import EXAMPLES, EXERCISES, cells

SOURCE = (EXAMPLES / "exercise.py").read_text("utf-8")
RIGHT = """
def attention(query, key, value, mask=None):
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).mT
    scores = scores / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    return (weights @ value.to(dtype)).to(query.dtype)
"""
SOLUTIONS = {  # what the notebook says of each
    "none": (None, "it raises the same error in every call"),
    "right": (RIGHT, "points     3 of 3 in stage 3"),
    "NaN": (
        RIGHT.replace("torch.finfo(scores.dtype).min", "-torch.inf").replace("weights.masked_fill(~mask, 0.0)", "weights"),
        "wrong      NaN where a query sees nothing",
    ),
}
ANSWERS = ("puzzle 1: scale by d_k.", "puzzle 2: causal mask from the upper left.", "puzzle 3: softmax over the queries.")


def shown(solution, capsys):
    """What all code cells print, with a solution in place of the line that raises."""
    names = {"__name__": "__main__"}
    for kind, text in cells(SOURCE, "en"):
        if kind == "code":
            exec(solution if solution and text.startswith("def attention") else text, names)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SOLUTIONS)
def test_the_exercise_judges_a_solution_and_solves_its_puzzles(name, capsys):
    solution, verdict = SOLUTIONS[name]
    said = shown(solution, capsys)
    assert verdict in said
    assert all(answer in said for answer in ANSWERS), said
    assert ("wrong" in said) == (name != "right")


@pytest.mark.parametrize("language", EXERCISES)
def test_the_stored_exercise_has_the_cells_of_its_source_and_no_errors(language):
    text = EXERCISES[language].read_text("utf-8")
    assert [(c["cell_type"], "".join(c["source"])) for c in json.loads(text)["cells"]] == cells(SOURCE, language)
    assert '"output_type": "error"' not in text and '"name": "stderr"' not in text
