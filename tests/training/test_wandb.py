"""What reaches Weights & Biases, in an offline run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minitx.config import ConfigError
from minitx.training.callbacks import StoppedError
from minitx.training.loggers import finish_wandb, git_commit

PROGRAM = """
import dataclasses, sys
from pathlib import Path
from lightning.pytorch.loggers import WandbLogger
from minitx.config import CallbacksConfig, ProbeConfig, RunConfig, TrainerConfig, node
from minitx.nn import build_model
from extra import AddLoggers, train_with
from minitx.training.loggers import WandbExtras, finish_wandb

folder = Path("run")
config = RunConfig(
    model=node(build_model, embed_dim=8, num_heads=2, num_layers=1, ffn_dim=16, max_len=16),
    data={"_target_": "minitx.data.text", "path": "text.txt", "batch_size": 12, "context_len": 7},
    trainer=TrainerConfig(max_steps=4, accelerator="cpu", val_every=2, log_every=1, ckpt_every=4, val_batches=2),
    callbacks=CallbacksConfig(progress=False, probe=ProbeConfig(every=2, weights_every=4, batch_size=3, weights_rows=2)),
)
logger = WandbLogger(save_dir="run", project="minitx", offline=True)
extras = WandbExtras({"model": {"width": 7919}}, folder, viewer=True, checkpoint="best")
with finish_wandb():
    train_with(config, folder, AddLoggers(logger), extras, files={"command.txt": "python scripts/train.py seed=104729"})
assert "wandb" in sys.modules and sys.modules["wandb"].run is None
"""


@pytest.mark.release
def test_an_offline_run_has_config_command_curves_figures_page_and_checkpoint(tmp_path, request):
    (tmp_path / "text.txt").write_text("Once upon a midnight dreary, while I pondered, weak and weary,\n" * 9)
    root = request.config.rootpath
    environment = {
        **{name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},  # of another test, in another folder
        "PYTHONPATH": f"{root}:{root / 'tests' / 'training'}",
        "HOME": str(tmp_path),
        "WANDB_API_KEY": "",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [place] = (tmp_path / "run" / "wandb").glob("offline-run-*")
    [file] = place.glob("*.wandb")
    sent = file.read_bytes()
    for word in (b'{"width":7919}', b"seed=104729", b"tokens_per_second", b"val_loss", b"/entropy", b"best", b"model-"):
        assert word in sent, word
    kinds = {path.parent.name for path in (place / "files" / "media").rglob("*") if path.is_file()}
    assert kinds == {"images", "html"}
    maps = [path.name for path in (place / "files" / "media").rglob("heads_*.png")]
    assert len(maps) == 2  # at steps 0 and 4
    [page] = (place / "files" / "media" / "html").iterdir()
    assert "</html>" in page.read_text()


CODES = [
    (ConfigError("a=1"), 2),
    (RuntimeError("broken"), 3),
    (KeyboardInterrupt(), 130),
    (StoppedError(15, 7), 143),
    (None, 0),
]


@pytest.mark.parametrize(("error", "code"), CODES)
def test_a_run_ends_with_the_exit_code_of_the_program(monkeypatch, error, code):
    finished = []
    for before, begun in ((None, "ours"), (None, None), ("the caller's", "the caller's")):
        logger = SimpleNamespace(run=before)
        logger.finish = lambda exit_code, logger=logger: finished.append((exit_code, logger.run))
        monkeypatch.setitem(sys.modules, "wandb", logger)
        with pytest.raises(type(error)) if error else contextlib.nullcontext(), finish_wandb():
            logger.run = begun
            if error:
                raise error
    assert finished == [(code, "ours")]


def test_the_commit_is_that_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert git_commit() is None
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "one"], ["tag", "v7"]):
        subprocess.run(["git", *words], check=True, capture_output=True)
    assert git_commit() == "v7"
