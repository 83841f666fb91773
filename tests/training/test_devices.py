"""What several processes do with a model of one's own, and what is refused. On the CPU, over gloo.

That they train, stop and resume as one process does: ``tests/lattice/runs.py``.
"""

import pytest
import torch
from extra import QUIET, last
from ranks import run_ranks, train_as

from minitx.config import ConfigError
from minitx.training.metrics_csv import read_metrics

WIDTHS = ["model.embed_dim=8", "model.num_heads=2", "model.num_layers=1"]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


def losses(folder):
    rows = read_metrics(folder / "metrics.csv")
    return {(row["step"], name): row[name] for row in rows for name in ("train_loss", "val_loss", "grad_norm") if row[name] is not None}  # fmt: skip


OWN = [
    *QUIET, "model._target_=extra.Layered", "data=kjv", "data.context_len=13", "data.batch_size=24", "trainer.precision=64-true",
    "trainer.accumulate=2", "trainer.max_steps=4", "trainer.val_every=2", "trainer.val_batch_size=8", "trainer.val_batches=2",
    "trainer.ckpt_every=4", "trainer.clip=0.5", "evaluation.num_rows=16", "evaluation.at_end=true",
]  # fmt: skip


@pytest.mark.slow
def test_a_model_of_ones_own_is_cut_at_the_classes_that_are_named_and_trains_as_whole(cache, tmp_path):
    own, cut = OWN, ["trainer.devices=2", "trainer.strategy=sharded", "trainer.shard=[Layer]"]
    run_ranks(1, train_as, own, tmp_path / "one", cache)
    run_ranks(2, train_as, [*own, *cut], tmp_path / "two", cache)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)
    weights = [last(tmp_path / name)["state_dict"] for name in ("one", "two")]
    torch.testing.assert_close(*weights, rtol=0, atol=1e-9)
    with pytest.raises(AssertionError, match=r"does not know the layers of Layered: set trainer\.shard"):
        run_ranks(2, train_as, [*own, *cut[:2]], tmp_path / "refused", cache)


LINFORMER = ["model=encoder_small", "model.attention=linformer", "model.num_slots=4", "model.position=none"]


@pytest.mark.slow
def test_every_parameter_of_a_linformer_gets_a_gradient_under_ddp(tmp_path, cache):
    """DDP finds a parameter without one when the second forward begins."""
    (tmp_path / "classes.tsv").write_text("text\tlabel\n" + "".join(f"word {n}\t{n % 3}\n" for n in range(53)))
    words = [*QUIET, *WIDTHS, *LINFORMER, "trainer.devices=2", "trainer.strategy=ddp", "trainer.max_steps=2"]
    words += [
        "data=classify",
        "data.tokenizer=char",
        f"data.path={tmp_path / 'classes.tsv'}",
        "data.batch_size=4",
        "model.max_len=128",
    ]
    assert [result["steps"] for result in run_ranks(2, train_as, words, tmp_path / "run", cache)] == [2, 2]


PAIRS = [*QUIET, *WIDTHS, "data=kv_lookup", "data.batch_size=24", "data.val_size=12", "trainer.val_batches=1", "trainer.val_every=0", "trainer.ckpt_every=0"]  # fmt: skip


# --- what is refused

REFUSED = {
    "trainer.devices=7": "divisible by trainer.accumulate=1 x trainer.devices=7",
    "trainer.devices=2 trainer.strategy=sharded callbacks.probe.every=5": "callbacks.probe needs whole weights",
    "model.max_len=7": "model.max_len=7 is smaller than the longest row of the data",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_what_does_not_fit_together_is_named_before_anything_is_written(typed, tmp_path, cache):
    with pytest.raises(ConfigError, match=REFUSED[typed]):
        train_as([*PAIRS, *typed.split(), "data.batch_size=32"], tmp_path / "run", cache)
    assert not (tmp_path / "run").exists()
