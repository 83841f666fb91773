"""``heads.py``: a checkpoint, a run's folder, a text, or a treebank."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

FEW = Path(__file__).parents[1] / "analysis" / "data" / "few.conllu"


@pytest.fixture
def table(cli):
    """``table(ckpt_path=…)``: the lines that ``heads.py`` writes."""

    def run(*arguments):
        said = cli(*arguments, program="heads")
        assert (said.code, said.err) == (0, "")
        return said.out.splitlines()

    return run


def test_a_checkpoint_alone_gives_the_table_and_the_files(table, last, place):
    lines = table(last("text"), "num_rows=5")
    assert len(lines) == 2 + 6  # heads
    assert sorted(path.name for path in (place / "heads").iterdir()) == ["heads.csv", "heads.json", "heads.png"]
    found = json.loads((place / "heads" / "heads.json").read_text(encoding="utf-8"))
    with (place / "heads" / "heads.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["heads"])
    assert {row["excess_n"] for row in rows if row["score"] == "previous"} == {"5"}


def test_a_run_folder_gives_its_last_checkpoint_and_the_labels_over_steps(table, runs):
    lines = table(f"ckpt_path={runs / 'lookup'}", "output=found")
    assert sum("from step 0" in line for line in lines) == 6  # heads


@pytest.mark.parametrize("run", ["dates", "digits"])
def test_any_kind_of_model_can_be_looked_at(table, last, run):
    assert len(table(last(run), "num_rows=5")) == 2 + {"dates": 3 * 2 * 3, "digits": 6}[run]


def test_one_text_can_be_looked_at(table, last):
    assert "one text" in table(last("text"), "text=In the beginning")[0]


@pytest.mark.parametrize(("run", "heads"), [("text", 6), ("bytes", 6), ("dates", 6)])
def test_a_treebank_can_be_looked_at_of_a_pair_by_its_encoder(table, last, place, run, heads):
    (place / "many.conllu").write_text(FEW.read_text(encoding="utf-8") * 5, encoding="utf-8")
    lines = table(last(run), "conllu=many.conllu")
    assert lines[0].endswith(" sentences") and len(lines) == 2 + heads
    found = json.loads((place / "heads" / "heads.json").read_text(encoding="utf-8"))["heads"]
    assert sum(row["score"] == "syntactic" for row in found) == heads


@pytest.mark.parametrize(
    ("typed", "part"),
    [
        ("ckpt_path={runs}", "checkpoints/last.ckpt"),
        ("{text} output={runs}/text.txt", "output="),
        ("{text} conllu={runs}/text.txt", "conllu="),
        ("{text} conllu=missing", "missing"),
        ("{lookup} conllu={few}", "conllu="),
        ("{text} conllu=long", "max_len"),
        ("{text} conllu={few} text=a", "conllu"),
        ("{text} windw=3", "window"),
    ],
)
def test_a_mistake_is_one_sentence(assert_refused, last, runs, place, typed, part):
    (place / "long").write_text(f"1\t{'cat' * 40}\t_\t_\t_\t_\t0\troot\t_\t_\n\n", encoding="utf-8")
    names = {"runs": runs, "few": FEW, **{name: last(name) for name in ("text", "lookup")}}
    assert_refused(part, *typed.format(**names).split(), program="heads")
