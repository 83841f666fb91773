"""``atlas.py``: a checkpoint, a run's folder or a file of sentences."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitx.cli.atlas import dates_structure, known_structure
from minitx.data.tokenizers import train_tokenizer

FEW = Path(__file__).parents[1] / "analysis" / "data"


@pytest.fixture
def table(cli):
    """``table(ckpt_path=…)``: the lines that ``atlas.py`` writes."""

    def run(*arguments):
        said = cli(*arguments, program="atlas")
        assert (said.code, said.err) == (0, "")
        return said.out.splitlines()

    return run


def count(lines, start):
    return sum(line.startswith(start) for line in lines)


def test_a_checkpoint_alone_gives_the_table_and_the_files(table, last, place):
    lines = table(last("text"), "output=found", "num_rows=5")
    assert lines[0].startswith("5 validation rows of ")
    assert count(lines, "blocks.0.attention.core") == count(lines, "blocks.1.attention.core") == 3
    assert sorted(path.name for path in (place / "found").iterdir()) == ["atlas.csv", "atlas.json", "atlas.png"]
    found = json.loads((place / "found" / "atlas.json").read_text(encoding="utf-8"))
    with (place / "found" / "atlas.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["heads"])
    assert {row["sentences"] for row in rows if row["score"] == "previous"} == {"5"}


def test_an_encoder_decoder_is_compared_with_what_is_known_of_dates(table, last):
    lines = table(last("dates"), "batch_size=5")
    for kind in ("encoder.blocks.0.attention.core", "blocks.0.attention.core", "blocks.0.cross_attention.core"):
        assert count(lines, kind) == 3
    assert any("agree with the structure" in line for line in lines)


def test_a_run_folder_gives_its_last_checkpoint_and_its_steps(table, runs, place):
    lines = table(f"ckpt_path={runs / 'lookup'}", "output=found")
    assert lines[0].startswith("29 validation rows")
    assert sum("since step" in line for line in lines) == 6  # heads
    names = {path.name for path in (place / "found").iterdir()}
    assert names > {"atlas_steps.csv", "atlas_steps.json", "atlas_steps_classes.png", "atlas_steps_scores.png"}
    steps = json.loads((place / "found" / "atlas_steps.json").read_text(encoding="utf-8"))["heads"]
    assert {row["step"] for row in steps} == {0, 1, 2}
    assert any(row["score"] == "agreement" for row in steps), "where the answer stands is known of the task"


@pytest.mark.parametrize("run", ["text", "dates"])
@pytest.mark.parametrize(("name", "number"), [("few.conllu", 4), ("few.brackets", 3)])
def test_sentences_of_a_file_can_be_looked_at(table, last, run, name, number):
    lines = table(last(run), f"structure={FEW / name}")
    assert lines[0].startswith(f"{number} sentences of {FEW / name}; unknown to the model: ")
    assert (any("cross" in line for line in lines), any("encoder" in line for line in lines)) == (False, run == "dates")


def test_target_digits_point_at_the_characters_that_they_come_from():
    tokenizer = train_tokenizer("char", ["de: 7. März 1999", "-03"], marks=("pad", "bos", "eos"))
    source, target = (tokenizer.encode(text).tolist() for text in ("de: 7. März 1999", "1999-03-07"))
    ids = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([[tokenizer.mark_ids["bos"], *target]])}
    real = {axis: torch.ones_like(tensor).bool() for axis, tensor in ids.items()}
    (row,) = dates_structure(ids, real, tokenizer).rows
    named = {part: {(i, j) for i, j, name in row.arcs if name == part} for part in ("year", "month", "day")}
    assert named["year"] == {(0, 12), (1, 13), (2, 14), (3, 15)}  # the mark at 0 is followed by the first digit
    assert named["month"] == {(i, j) for i in (5, 6) for j in range(7, 11)}
    assert named["day"] == {(8, 4), (9, 4)}


@pytest.mark.parametrize(
    ("data", "arcs"),
    [
        ({"name": "kv_lookup"}, [(6, 1)]),
        ({"name": "multi_query_recall", "num_queries": 3}, [(4, 3), (5, 1), (6, 2)]),
        ({"name": "induction"}, [(4, 3), (5, 1), (6, 2)]),
    ],
)
def test_where_the_answers_of_the_recall_tasks_stand(data, arcs):
    ids = {"input_ids": torch.tensor([[7, 1, 8, 2, 8, 7, 1]])}
    run = SimpleNamespace(data=SimpleNamespace(**data))
    assert [(i, j) for i, j, _ in known_structure(run, ids, {}, None).rows[0].arcs] == arcs


@pytest.mark.parametrize(
    ("typed", "part"),
    [
        ("ckpt_path={runs}", "checkpoints/last.ckpt"),
        ("ckpt_path={here}", "step_00000001.safetensors"),
        ("{text} output={runs}/text.txt", "output="),
        ("{text} structure={runs}/text.txt", "line 1"),
        ("{lookup} structure={runs}/text.txt", "structure="),
        ("{text} structure=long", "max_len"),
    ],
)
def test_a_mistake_is_one_sentence(assert_refused, last, runs, place, typed, part):
    (place / "long").write_text("[[" + "cat " * 40 + "] sat]", encoding="utf-8")
    (place / "attention").mkdir()
    (place / "attention" / "step_00000001.safetensors").write_text("?", encoding="utf-8")
    names = {"runs": runs, "here": place, **{name: last(name) for name in ("text", "lookup")}}
    assert_refused(part, *typed.format(**names).split(), program="atlas")
