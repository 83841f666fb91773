"""What reaches Weights & Biases, in an offline run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from minitx.config import ConfigError, Part
from minitx.config.part import Takes
from minitx.training import StoppedError
from minitx.training.trackers import finish_wandb, git_commit, resuming

PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace
from lightning.pytorch.loggers import WandbLogger
from minitx.cli.compose import compose_config
from extra import QUIET, AddLoggers, train_with
from minitx.analysis.wandb_files import WandbFiles
from minitx.training.trackers import finish_wandb, send_facts

folder = Path("run")
words = "data=text data.path=text.txt data.batch_size=12 data.context_len=7 model.embed_dim=8 model.num_heads=2 model.num_layers=1"
words += " trainer.max_steps=4 trainer.val_every=2 trainer.val_batches=2 callbacks.probe.every=2 callbacks.probe.weights_every=4"
config = compose_config([*words.split(), *QUIET, "callbacks.probe.batch_size=3", "callbacks.probe.weights_rows=2"])
logger = WandbLogger(save_dir="run", project="minitx", offline=True)
files = WandbFiles(folder=folder, viewer=True, checkpoint="best")
with finish_wandb():
    send_facts(SimpleNamespace(loggers=[logger]), {"model": {"width": 7919}}, "python scripts/train.py seed=104729")
    train_with(config, folder, AddLoggers(logger), files)
assert "wandb" in sys.modules and sys.modules["wandb"].run is None
"""


@pytest.mark.release
def test_an_offline_run_has_config_command_curves_figures_page_and_checkpoint(tmp_path, request):
    (tmp_path / "text.txt").write_text("Once upon a midnight dreary, while I pondered, weak and weary,\n" * 9)
    root = request.config.rootpath
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # of another test's folder
    environment |= {"PYTHONPATH": f"{root}:{root / 'tests' / 'training'}", "HOME": str(tmp_path), "WANDB_API_KEY": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [place] = (tmp_path / "run" / "wandb").glob("offline-run-*")
    [file] = place.glob("*.wandb")
    sent = file.read_bytes()
    for word in (b'{"width":7919}', b"seed=104729", b"tokens_per_second", b"val_loss", b"/entropy", b"best", b"model-"):
        assert word in sent, word
    kinds = {path.parent.name for path in (place / "files" / "media").rglob("*") if path.is_file()}
    assert kinds == {"images", "html"}
    assert len(list((place / "files" / "media").rglob("heads_*.png"))) == 2  # at steps 0 and 4
    [page] = (place / "files" / "media" / "html").iterdir()
    assert "</html>" in page.read_text()


CODES = {
    2: ConfigError("a=1"),
    3: RuntimeError("broken"),
    130: KeyboardInterrupt(),
    143: StoppedError(15, " after step 7"),
    0: None,
}


@pytest.mark.parametrize("code", CODES)
def test_a_run_ends_with_the_exit_code_of_the_program(monkeypatch, code):
    error, finished = CODES[code], []
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


def test_a_resumed_run_has_the_id_of_the_last_run_in_its_folder(tmp_path):
    target = "lightning.pytorch.loggers.WandbLogger"
    loggers = {"wandb": Part.of({"_target_": target}, "logger.wandb", Takes(offers=None)), "mine": None}
    assert resuming(loggers, tmp_path) == loggers
    (tmp_path / "wandb" / "offline-run-1-fw93").mkdir(parents=True)
    (tmp_path / "wandb" / "offline-run-1-fw93" / "run-fw93.wandb").touch()
    (tmp_path / "wandb" / "latest-run").symlink_to("offline-run-1-fw93")
    resumed = resuming(loggers, tmp_path)
    assert (resumed["wandb"].arguments, resumed["mine"]) == ({"id": "fw93"}, None)
