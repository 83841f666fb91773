"""cost.py: a table, a figure and JSON from a model's name, and a plain mistake is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minitx.cli.arguments import help_text
from minitx.cli.cost import USAGE, CostConfig, main

SCRIPT = Path(__file__).parents[2] / "scripts" / "cost.py"
TINY = ["model.embed_dim=12", "model.num_heads=3", "model.num_layers=1", "lengths=8,16"]


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path):
    """``cli("model=…")`` runs ``cost.py`` in this process, in an empty folder."""

    def run(*arguments):
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "argv", ["cost.py", *arguments])
            patch.setenv("MINITX_TRACEBACK", "0")
            patch.setenv("KINETO_LOG_LEVEL", "99")
            code = main()
        return SimpleNamespace(code=code, **dict(zip(("out", "err"), capsys.readouterr(), strict=True)))

    return run


@pytest.mark.parametrize("model", ["char_small", "vaswani_small", "vit_small"])
def test_every_kind_of_model_gets_its_table(cli, tmp_path, model):
    said = cli(f"model={model}", *TINY, "model.max_len=20", "model.patch_size=8", "compare=math,chunked", "output_dir=found")
    assert (said.code, said.err) == (0, "")
    found = json.loads((tmp_path / "found" / "cost.json").read_text(encoding="utf-8"))
    assert found["command"].startswith(f"python scripts/cost.py model={model} model.embed_dim=12")
    for part in found["parts"]:
        assert {name: part[name] for name in ("parameters", "flops")} == {
            name: part["measured"][name] for name in ("parameters", "flops")
        }
    assert [curve["attention"] for curve in found["growth"]] == ["math", "chunked"]
    assert found["growth"][0]["flops_exponent"] == pytest.approx(2.0)
    assert (tmp_path / "found" / "cost.png").read_bytes().startswith(b"\x89PNG")
    total = next(line for line in said.out.splitlines() if line.startswith("all"))
    assert f"{sum(part['flops'] for part in found['parts']):,}" in total.split()
    assert "assumed, since the data decide it in training" in said.out
    assert "n^2.00" in said.out and "T_eff" in said.out


def test_what_was_given_is_not_assumed_and_nothing_is_written_unasked(cli, tmp_path):
    said = cli("model=char_small", *TINY, "model.vocab_size=67", "length=7", "batch_size=2", "backward=false", "compare=sdpa", "save=false")  # fmt: skip
    assert (said.code, said.err) == (0, "")
    assert "assumed" not in said.out
    assert "2 rows of 7 tokens, forward pass, self-attention by sdpa" in said.out
    assert "bytes   measured" not in said.out
    assert not list(tmp_path.iterdir())


def test_a_switch_of_the_model_reaches_the_table_and_what_it_cannot_do_is_left_out(cli):
    switches = ["model.max_len=16", "model.attention=linformer", "model.num_slots=3", "backward=false", "save=false"]
    said = cli("model=encoder_small", *TINY, *switches)
    assert (said.code, said.err) == (0, "")
    assert "self-attention by linformer" in said.out
    assert sum(line.startswith("linformer") for line in said.out.splitlines()) == 2
    said = cli("model=char_small", *TINY, "model.max_len=16", "backward=false", "save=false")
    assert "not measured: linformer: is not causal" in said.out


def test_a_picture_has_the_tokens_that_it_has_whatever_attends(cli):
    switches = ["model.attention=linformer", "model.num_slots=3", "backward=false", "save=false", "compare=math"]
    said = cli("model=vit_small", *TINY, "model.image_size=8", "model.patch_size=2", "model.max_len=31", *switches)
    assert (said.code, said.err) == (0, "")
    assert "1 row of 16 tokens, forward pass, self-attention by linformer" in said.out
    said = cli("model=vit_small", *TINY, "model.image_size=8", "model.patch_size=2", "model.max_len=15", *switches)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: length=16 exceeds model.max_len=15")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["model=char_smal"], "model=char_smal is not an option; model is one of: bert_small, char_small"),
        (["mode=char_small"], "mode is not a key; did you mean model?"),
        (["model=char_small", "model.embed_dm=3"], "model.embed_dm is not a key; did you mean model.embed_dim?"),
        (["model=char_small", "model.embed_dim=130"], "model.embed_dim=130 is not divisible by num_heads=4"),
        (["model=char_small", "model.pretrained=gpt2"], "model.pretrained=gpt2: a cost is that of a shape"),
        (["model=char_small", "model.backend=sdpaa"], "model.backend='sdpaa' is not known; one of auto, sdpa"),
        (["model=char_small", "model.backend=sdpa", "model.softcap=3"], "model.backend=sdpa cannot serve this call"),
        (["model=char_small", "length=257"], "length=257 exceeds model.max_len=256"),
        (["model=char_small", "length=0"], "length=0 must be positive"),
        (["model=vit_small", "model.pooling=first", "length=1"], "length=1 must be 2 at least"),
        (["model=char_small", "lengths=5"], "lengths=5 must be two different positive numbers at least"),
        (["model=char_small", "compare=maths"], "compare=maths: attention='maths' is not known; one of math, sdpa"),
        (["model=char_small", "compare=linformer"], "compare=linformer: attention=linformer is not causal"),
        (["model=char_small", "backward=maybe"], "backward=maybe must be true or false"),
        (["model=char_small", "model=gpt2"], "model is given twice"),
        (["char_small"], "char_small is not key=value; --help shows the keys"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(cli, arguments, sentence):
    said = cli(*arguments)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {sentence}")
    assert said.err.count("\n") == 1


def test_without_arguments_the_keys_are_shown(cli):
    said = cli()
    assert (said.code, said.out, said.err) == (2, help_text(CostConfig, USAGE), "error: model is missing\n")
    asked = cli("--help")
    assert (asked.code, asked.out) == (0, said.out)
    assert "lengths=256,512,1024,2048" in said.out and "backward=true" in said.out


def test_the_script_answers_a_typo_before_torch_is_loaded():
    code = (
        "import sys\n"
        "from minitx.cli.cost import main\n"
        "sys.argv = ['cost.py', 'model=char_small', 'model.embed_dm=1']\n"
        "assert main() == 2\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    assert SCRIPT.is_file()
