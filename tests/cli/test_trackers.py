"""``logger=trackio`` and ``logger=mlflow``: curves and config reach the tracker, and a package that is missing is one sentence."""

import sqlite3
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from minitx.training.loggers import TrackioLogger
from tests.cli.conftest import TINY, assert_named

RUN = (*TINY, "trainer.max_steps=2", "schedule.warmup_steps=0", "trainer.val_every=2", "output_dir=run")


def rows(path, query):
    with sqlite3.connect(path) as opened:
        return opened.execute(query).fetchall()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.release
def test_a_run_with_mlflow_has_its_curves_and_its_config_in_a_file_beside_it(cli, place, monkeypatch):
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli(*RUN, "logger=mlflow").code == 0
    metrics = {name for (name,) in rows(place / "mlflow.db", "select key from metrics")}
    assert {"train_loss", "val_loss"} <= metrics
    assert ("model/embed_dim", "8") in rows(place / "mlflow.db", "select key, value from params")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.release
def test_a_run_with_trackio_has_its_curves_and_its_config_on_this_machine(cli, place, tmp_path, monkeypatch):
    utils = pytest.importorskip("trackio.utils", reason="trackio is not installed: pip install trackio")
    assert cli(*RUN, "logger=trackio").code == 0
    stored = b"".join(value for (value,) in rows(utils.TRACKIO_DIR / "minitx.db", "select metrics from metrics"))
    assert b"train_loss" in stored and b"val_loss" in stored
    assert any(b'"embed_dim":8' in value for (value,) in rows(utils.TRACKIO_DIR / "minitx.db", "select config from configs"))


@pytest.mark.parametrize("package", ["trackio", "mlflow"])
@pytest.mark.skipif(find_spec("trackio") is not None or find_spec("mlflow") is not None, reason="the packages are installed")
def test_a_tracker_that_is_not_installed_is_named_and_leaves_no_folder(cli, place, package):
    assert_named(cli(*RUN, f"logger={package}"), package)
    assert list(place.iterdir()) == []


def test_a_trackio_run_opens_with_the_config_and_is_continued_after_it_was_finished(monkeypatch, tmp_path):
    calls = []

    def init(project, **options):
        calls.append(("init", project, options["name"], options["config"], options["resume"]))
        log = lambda values, step: calls.append(("log", values, step))  # noqa: E731
        return SimpleNamespace(log=log, finish=lambda: calls.append(("finish",)))

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    logger = TrackioLogger("mine", save_dir=str(tmp_path / "char_lm" / "seven"))
    logger.log_hyperparams({"seed": 7})
    logger.log_metrics({"train_loss": 0.5}, 3)
    logger.finalize("success")
    logger.log_metrics({"val_loss": 0.25}, 3)
    opened = ("init", "mine", "char_lm/seven", {"seed": 7}, "allow")
    assert calls == [opened, ("log", {"train_loss": 0.5}, 3), ("finish",), opened, ("log", {"val_loss": 0.25}, 3)]
