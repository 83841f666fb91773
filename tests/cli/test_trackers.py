"""``logger=mlflow``: curves and config reach the tracker, and a missing package is reported in one sentence."""

import sqlite3
from importlib.util import find_spec

import pytest

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


@pytest.mark.skipif(find_spec("mlflow") is not None, reason="mlflow is installed")
def test_a_tracker_that_is_not_installed_is_named_and_leaves_no_folder(cli, place):
    assert_named(cli(*RUN, "logger=mlflow"), "mlflow")
    assert list(place.iterdir()) == []
