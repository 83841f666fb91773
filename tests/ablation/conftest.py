"""What several files of this folder look at."""

import pytest
from pretended_runs import SMALL

from minitx.ablation.execution import CellJob
from minitx.cli.ablate import run_cell
from tests.ablation import made_up


@pytest.fixture(scope="session")
def whole():
    """The findings of the whole fabricated grid."""
    return made_up.of_the_scale(truth=made_up.Truth(spread=1.02))


@pytest.fixture(scope="session")
def first(tmp_path_factory):
    """The checkpoint of a model that has learned a little."""
    folder = tmp_path_factory.mktemp("first")
    words = [*SMALL, "trainer.max_steps=40", "optimizer.lr=0.01", "trainer.ckpt_every=100000", "seed=3"]
    run_cell(CellJob(words, folder, 40, keeps_weights=True))
    return folder / "checkpoints" / "last.ckpt"
