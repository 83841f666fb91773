"""The command line in this process: arguments in, exit code and output out. And a few tiny runs to look at."""

import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from minitx.cli import evaluate, export, generate, train, view
from minitx.cli.compose import compose_config
from minitx.cli.launch import run_training
from minitx.training.metrics_csv import read_metrics
from tests.cli.processes import ROOT

PROGRAMS = {"train": train, "evaluate": evaluate, "generate": generate, "view": view, "export": export}
TEXT = "In the beginning God created the heaven and the earth.\n你好世界 🎉\n"
SHORT = (
    *("model.embed_dim=12", "model.num_heads=3", "model.num_layers=2", "model.max_len=64", "data.batch_size=4"),
    *(
        "trainer.accelerator=cpu",
        "trainer.threads=1",
        "trainer.val_batches=1",
        "trainer.val_every=0",
        "trainer.max_steps=2",
        "trainer.rehearse=false",
    ),
    *("schedule.warmup_steps=1", "callbacks.progress=false", "evaluation.at_end=true"),
)
TINY = ("data=kv_lookup", "data.val_size=16", "data.batch_size=8", "model.embed_dim=8", "model.num_heads=2", "model.num_layers=1",
        "trainer.accelerator=cpu", "trainer.threads=1", "trainer.log_every=1", "trainer.rehearse=false", "callbacks.progress=false")  # fmt: skip
"""A smaller one, which a test makes for itself."""
RESULT = {
    "steps": 1,
    "nonfinite_step": None,
    "nonfinite_phase": None,
    "val_loss": None,
    "val_accuracy": None,
    "floors": {},
    "metrics": {},
}
"""Of a run that is not run."""
LEARNS = "trainer.max_steps=20 optimizer.lr=1e-2 "
RUNS = {
    "text": LEARNS + "data=text data.context_len=24",
    "bytes": LEARNS + "data=text data.context_len=24 data.tokenizer=bpe data.bpe_vocab_size=270",
    "unscaled": "data=text data.context_len=24 model.scale=unscaled",
    "dates": "data=dates data.locales=[en,de] data.train_size=53 data.val_size=17 model.architecture=encoder_decoder",
    "lookup": "data=kv_lookup data.num_keys=11 data.num_pairs=7 data.val_size=29 "
    "callbacks.probe.every=1 callbacks.probe.batch_size=13 callbacks.probe.weights_every=1 callbacks.probe.weights_rows=13",
    "digits": "data=digits model=vit_small model.patch_size=4",
}
"""Runs of two steps, or of enough to write the same again and again, by the name of their folder."""


class Said(NamedTuple):
    code: int
    out: str
    err: str


def settings() -> dict[str, str]:
    """The environment, without what scikit-learn and threadpoolctl set when they are imported."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KMP_")}


@pytest.fixture(scope="session")
def shared_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    """A folder with the runs of ``RUNS``, and the text that some of them read."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT * 60, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minitx.data.token_cache.data_dir", lambda: shared_data)
        for name, words in RUNS.items():
            path = [f"data.path={folder / 'text.txt'}"] if "data=text" in words else []
            run_training(compose_config([*SHORT, *words.split(), *path]), folder / name, "a test")
    return folder


@pytest.fixture
def last(runs: Path) -> Callable[[str], str]:
    """The argument ``ckpt_path=…`` for the last checkpoint of a run."""
    return lambda name: f"ckpt_path={runs / name / 'checkpoints' / 'last.ckpt'}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_data: Path) -> Iterator[Path]:
    """An empty current folder; data caches lie elsewhere. Modules of the user's that are found there are forgotten again."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("minitx.data.token_cache.data_dir", lambda: shared_data)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("minitx.analysis.film.LAST_FRAMES", 2)  # each is drawn
    yield folder
    sys.modules.pop("own", None)  # of examples/own_project


@pytest.fixture
def cli(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """``cli("model.scale=inv", ...)`` runs ``train.py``, or another ``program``, in this process, whose environment it must leave as it was."""

    def run(*arguments: str, program: str = "train", stdin: str | bytes = "") -> Said:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [f"{program}.py", *arguments])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), newline="\n"))
            environment = settings()
            code = PROGRAMS[program].main()
            assert settings() == environment
        out, err = capfd.readouterr()
        return Said(code, out, err)

    return run


def put(path: Path, text: str) -> None:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def copy_example(name: str, folder: Path) -> None:
    """Copy ``examples/NAME`` into ``folder``, without what Python compiled there."""
    shutil.copytree(ROOT / "examples" / name, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def losses(folder: str | Path) -> list[float | None]:
    """The training loss of each row of ``metrics.csv``."""
    return [row["train_loss"] for row in read_metrics(Path(folder) / "metrics.csv")]


def assert_named(said: Said, part: str, code: int = 2) -> None:
    """That exit code, and at most three lines that name ``part``."""
    assert said.code == code, said
    assert part in said.err, (part, said.err)
    assert len(said.err.strip().splitlines()) <= 3, said.err
    assert "Traceback" not in said.out + said.err and "Error executing job" not in said.err


@pytest.fixture
def output(cli: Callable[..., Said]) -> Callable[..., str]:
    """``output("view", "ckpt_path=...")``: what the program writes when nothing is wrong."""

    def run(program: str, *arguments: str, **options: str) -> str:
        said = cli(*arguments, program=program, **options)
        assert (said.code, said.err) == (0, "")
        return said.out

    return run


@pytest.fixture
def assert_refused(cli: Callable[..., Said]) -> Callable[..., None]:
    """``assert_refused(part, *arguments)``: exit code 2, nothing done, and a sentence that names ``part``."""

    def check(part: str, *arguments: str, program: str = "train") -> None:
        said = cli(*arguments, program=program)
        assert said.out == ""
        assert_named(said, part)

    return check
