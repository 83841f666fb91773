"""``cost.py``: a table, a figure and JSON from a model's name."""

from __future__ import annotations

import json

import pytest

TINY = ("model.embed_dim=12", "model.num_heads=3", "model.num_layers=1", "lengths=8,16")


@pytest.fixture
def table(cli, monkeypatch):
    """``table("model=…")``: what ``cost.py`` writes."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")

    def run(*arguments):
        said = cli(*arguments, program="cost")
        assert (said.code, said.err) == (0, "")
        return said.out

    return run


@pytest.mark.parametrize("model", ["char_small", "vaswani_small", "vit_small"])
def test_every_kind_of_model_gets_its_table(table, place, model):
    out = table(f"model={model}", *TINY, "model.max_len=20", "model.patch_size=8", "compare=math,chunked", "output_dir=found")
    found = json.loads((place / "found" / "cost.json").read_text(encoding="utf-8"))
    assert found["command"].startswith(f"python scripts/cost.py model={model} model.embed_dim=12")
    for part in found["parts"]:
        assert [part[name] for name in ("parameters", "flops")] == [part["measured"][name] for name in ("parameters", "flops")]
    assert [curve["attention"] for curve in found["growth"]] == ["math", "chunked"]
    assert found["growth"][0]["flops_exponent"] == pytest.approx(2.0)
    assert (place / "found" / "cost.png").read_bytes().startswith(b"\x89PNG")
    total = next(line for line in out.splitlines() if line.startswith("all"))
    assert f"{sum(part['flops'] for part in found['parts']):,}" in total.split()
    assert "assumed" in out


def test_what_was_given_is_not_assumed_and_nothing_is_written_unasked(table, place):
    given = "model.vocab_size=67", "length=7", "batch_size=2", "backward=false", "compare=sdpa", "save=false"
    out = table("model=char_small", *TINY, *given)
    assert "assumed" not in out
    assert "2 rows of 7 tokens, forward pass, self-attention by sdpa" in out
    assert not list(place.iterdir())


def test_a_switch_of_the_model_reaches_the_table_and_what_it_cannot_do_is_left_out(table):
    quick = *TINY, "model.max_len=16", "backward=false", "save=false"
    out = table("model=encoder_small", *quick, "model.attention=linformer", "model.num_slots=3")
    assert "self-attention by linformer" in out
    assert "not measured: linformer" in table("model=char_small", *quick)


def test_a_picture_has_the_tokens_that_it_has(table, assert_refused):
    picture = "model=vit_small", *TINY, "model.image_size=8", "model.patch_size=2", "backward=false", "save=false"
    assert "1 row of 16 tokens" in table(*picture, "compare=math", "model.max_len=31")
    linformer = "model.attention=linformer", "model.num_slots=3", "model.max_len=15"
    assert_refused("model.max_len=15", *picture, *linformer, program="cost")


@pytest.mark.parametrize(
    ("typed", "part"),
    [
        ("model=char_small model.embed_dim=130", "model.embed_dim=130"),
        ("model=char_small model.backend=sdpa model.softcap=3", "model.backend=sdpa"),
        ("model=char_small length=257", "length=257"),
        ("model=vit_small model.pooling=first length=1", "length=1"),
        ("model=char_small compare=maths", "compare=maths"),
        ("model=char_small compare=linformer", "compare=linformer"),
        ("model=char_small model=gpt2", "model"),
    ],
)
def test_a_mistake_is_one_sentence(assert_refused, typed, part):
    assert_refused(part, *typed.split(), program="cost")


def test_without_arguments_the_keys_are_shown(cli):
    said = cli(program="cost")
    assert (said.code, said.out) == (2, cli("--help", program="cost").out)
    assert "model" in said.err
