"""evaluate.py: a checkpoint alone is enough, and a plain mistake is one sentence."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from minitx.cli.arguments import help_text
from minitx.cli.evaluate import USAGE, EvaluateConfig, main
from minitx.config import (
    CallbacksConfig,
    DatesDataConfig,
    EvaluationConfig,
    RunConfig,
    TextDataConfig,
    TrainerConfig,
    TransformerConfig,
)
from minitx.training.run import train

SCRIPT = Path(__file__).parents[2] / "scripts" / "evaluate.py"
SMALL = {"embed_dim": 12, "num_heads": 3, "num_layers": 1, "max_len": 64}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of two tiny runs that evaluated themselves at the end."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("In the beginning was the Word. " * 60, encoding="utf-8")
    dates = DatesDataConfig(locales=("en", "de"), train_size=53, val_size=17, batch_size=6)
    runs = {
        "text": (TextDataConfig(name="text", path=str(folder / "text.txt"), context_len=24), {}),
        "dates": (dates, {"architecture": "encoder_decoder"}),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minitx.data.load.data_dir", lambda: folder)
        for name, (data, model) in runs.items():
            config = RunConfig(
                model=TransformerConfig(**SMALL, **model),
                data=data,
                trainer=TrainerConfig(max_steps=3, accelerator="cpu", threads=1),
                callbacks=CallbacksConfig(progress=False),
                evaluation=EvaluationConfig(at_end=True),
            )
            train(config, folder / name)
    return folder


@pytest.fixture
def cli(monkeypatch, capsys, trained):
    """``cli("ckpt_path=…")`` runs ``evaluate.py`` in this process."""

    def run(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments)])
            patch.setattr("minitx.data.load.data_dir", lambda: trained)
            patch.setenv("MINITX_TRACEBACK", "0")
            code = main()
        return SimpleNamespace(code=code, **dict(zip(("out", "err"), capsys.readouterr(), strict=True)))

    return run


@pytest.mark.parametrize("run", ["text", "dates"])
def test_a_checkpoint_alone_gives_the_numbers_that_the_run_gave(cli, trained, tmp_path, run):
    said = cli(f"ckpt_path={trained / run / 'checkpoints' / 'last.ckpt'}", f"output={tmp_path / 'found.json'}")
    assert (said.code, said.err) == (0, "")
    at_end = json.loads((trained / run / "evaluation.json").read_text(encoding="utf-8"))
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["baselines"] == at_end["baselines"]
    assert list(found["metrics"]) == list(at_end["metrics"])
    for name, metric in at_end["metrics"].items():
        assert found["metrics"][name] == pytest.approx(metric, rel=1e-6), name
        assert f"{name} " in said.out
    assert found["examples"] == at_end["examples"]


def test_rows_beams_and_shown_answers_can_be_chosen(cli, trained):
    checkpoint = f"ckpt_path={trained / 'dates' / 'checkpoints' / 'last.ckpt'}"
    said = cli(checkpoint, "num_rows=5", "num_beams=3", "num_shown=1", "batch_size=2")
    assert said.code == 0
    assert "5 rows" in said.out
    assert said.out.count("source ") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "ckpt_path is missing"),
        (["ckpt_path=nowhere.ckpt"], "ckpt_path=nowhere.ckpt is not a file"),
        (["ckpt_path={text}"], "ckpt_path={text} cannot be read as a checkpoint of minitx"),
        (["ckpt_path={last}", "num_row=3"], "num_row is not a key; did you mean num_rows?"),
        (["ckpt_path={last}", "num_rows=0"], "num_rows=0 must be positive"),
        (["ckpt_path={last}", "batch_size=x"], "batch_size=x must be a whole number"),
        (["ckpt_path={last}", "batch_size=-1"], "batch_size=-1 must be positive"),
        (["ckpt_path={last}", "output=no/such/found.json"], "output=no/such/found.json is in a folder that does not exist"),
        (["ckpt_path={last}", "output=."], "output=. is a folder, but must name a file"),
        (["ckpt_path={last}", "device=toaster"], "device=toaster cannot be used"),
        (["ckpt_path={last}", "fast"], "fast is not key=value; --help shows the keys"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(cli, trained, arguments, sentence):
    names = {"text": trained / "text.txt", "last": trained / "text" / "checkpoints" / "last.ckpt"}
    said = cli(*(argument.format(**names) for argument in arguments))
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {sentence.format(**names)}")
    assert said.err.count("\n") == 1


def test_help_names_every_key(cli):
    said = cli("--help")
    assert (said.code, said.out) == (0, help_text(EvaluateConfig, USAGE))
    assert all(f"{field.name}=" in said.out for field in dataclasses.fields(EvaluateConfig))


def test_the_script_answers_a_typo_before_torch_is_loaded():
    code = (
        "import sys\n"
        "from minitx.cli.evaluate import main\n"
        "sys.argv = ['evaluate.py', 'ckpt=1']\n"
        "assert main() == 2\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    assert SCRIPT.is_file()
