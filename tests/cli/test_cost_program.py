"""``cost.py``: tables, a figure and JSON from a model's name."""

from __future__ import annotations

import json

import pytest

from minitx.analysis.cost import GROWTHS

TINY = ("model.embed_dim=12", "model.num_heads=3", "model.num_layers=1", "lengths=8,16")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")


@pytest.mark.parametrize("model", ["vaswani_small", "vit_small"])
def test_every_kind_of_model_gets_its_tables(output, place, model):
    out = output("cost", f"model={model}", *TINY, "model.max_len=20", "model.patch_size=8", "output_dir=found")
    found = json.loads((place / "found" / "cost.json").read_text(encoding="utf-8"))
    assert found["command"].startswith(f"python scripts/cost.py model={model} model.embed_dim=12")
    assert [curve["kind"] for curve in found["growth"]] == list(GROWTHS)
    assert found["growth"][0]["exponents"][0] == pytest.approx(2.0)
    assert (place / "found" / "cost.png").read_bytes().startswith(b"\x89PNG")
    total = next(line for line in out.splitlines() if line.startswith("all"))
    assert f"{sum(part['parameters'] for part in found['parts']):,}" in total.split()
    assert f"{sum(part['kept'] for part in found['parts']):,}" in total.split()
    assert "assumed" in out


def test_a_switch_of_the_model_reaches_the_tables_and_what_was_given_is_not_assumed(output, place):
    given = ("model.vocab_size=67", "model.num_labels=5", "length=7", "batch_size=2", "model.backend=math")
    out = output("cost", "model=encoder_small", *TINY, *given)
    assert max(map(len, out.splitlines())) <= 110
    assert "assumed" not in out and "(2, 7)" in out
    core = {part["name"]: part for part in json.loads((place / "runs/cost/cost.json").read_text())["parts"]}["core"]
    assert (core["forward"], core["backward"]) == (4 * 2 * 7 * 7 * 12, 8 * 2 * 7 * 7 * 12)


def test_without_arguments_the_keys_are_shown(cli):
    said = cli(program="cost")
    assert (said.code, said.out) == (2, cli("--help", program="cost").out)
    assert "model" in said.err
