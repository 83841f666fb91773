"""``heads.py``: a checkpoint, a run's folder, a text, or a treebank."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

FEW = Path(__file__).parents[1] / "analysis" / "data" / "few.conllu"


def test_a_checkpoint_alone_gives_the_table_and_the_files(output, last, place):
    lines = output("heads", last("text"), "num_rows=5").splitlines()
    assert len(lines) == 2 + 6  # heads
    assert sorted(path.name for path in (place / "heads").iterdir()) == ["heads.csv", "heads.json", "heads.png"]
    found = json.loads((place / "heads" / "heads.json").read_text(encoding="utf-8"))
    with (place / "heads" / "heads.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["heads"])
    assert {row["excess_n"] for row in rows if row["score"] == "previous"} == {"5"}


def test_a_run_folder_gives_its_last_checkpoint_and_the_labels_over_steps(output, runs):
    lines = output("heads", f"ckpt_path={runs / 'lookup'}", "output=found").splitlines()
    assert sum("from step 0" in line for line in lines) == 6  # heads


@pytest.mark.parametrize("run", ["dates", "digits"])
def test_any_kind_of_model_can_be_looked_at(output, last, run):
    assert output("heads", last(run), "num_rows=5").count("\n") == 2 + {"dates": 3 * 2 * 3, "digits": 6}[run]


def test_one_text_can_be_looked_at(output, last):
    assert "one text" in output("heads", last("text"), "text=In the beginning").splitlines()[0]


@pytest.mark.parametrize("run", ["bytes", "dates"])
def test_a_treebank_can_be_looked_at_of_a_pair_by_its_encoder(output, last, place, run):
    (place / "many.conllu").write_text(FEW.read_text(encoding="utf-8") * 5, encoding="utf-8")
    lines = output("heads", last(run), "conllu=many.conllu").splitlines()
    assert lines[0].endswith(" sentences") and len(lines) == 2 + 6
    found = json.loads((place / "heads" / "heads.json").read_text(encoding="utf-8"))["heads"]
    assert sum(row["score"] == "syntactic" for row in found) == 6
