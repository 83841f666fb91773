"""Two processes, or four, train as one does; and what happens between them is counted. On the CPU, over gloo, in float64."""

import os
import random
import signal

import pytest
import torch
from extra import QUIET, Layered, fit, last
from ranks import run_ranks, train_as
from torch import nn

from minitx.config import ConfigError
from minitx.data.task import Task
from minitx.training import StoppedError
from minitx.training.metrics_csv import read_metrics
from minitx.training.module import TrainingModule

WIDTHS = ["model.embed_dim=8", "model.num_heads=2", "model.num_layers=1"]
# sources and targets of unequal length, two micro-batches a step, 31 validation rows, two groups of parameters
BASE = [
    *QUIET, *WIDTHS, "data=pairs", "data.tokenizer=char", "data.bucket=false", "data.batch_size=24", "model=vaswani_small",
    "model.dropout=0.0", "trainer.precision=64-true", "trainer.accumulate=2", "trainer.max_steps=8", "trainer.val_every=3",
    "trainer.val_batch_size=8", "trainer.val_batches=null", "trainer.ckpt_every=4", "trainer.clip=0.5",
    "optimizer.weight_decay=0.1", "schedule=constant", "schedule.warmup_steps=3",
]  # fmt: skip
PLACES = {
    "ddp": (2, ["trainer.devices=2", "trainer.strategy=ddp"]),
    "fsdp": (2, ["trainer.devices=2", "trainer.strategy=sharded"]),
    "fsdp_of_4": (4, ["trainer.devices=4", "trainer.strategy=sharded"]),
    "ddp_of_4": (4, ["trainer.devices=4", "trainer.strategy=ddp"]),
    "one": (1, []),
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """``BASE`` on words and their letters doubled: from one letter to twenty, in no order."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = random.Random(0)
    words = ["".join(draw.choices("abcde", k=draw.randint(1, 10))) for _ in range(128)]
    lines = [f"{word}\t{''.join(2 * letter for letter in word)}" for word in words]
    for name, part in (("train", lines[:97]), ("val", lines[97:])):
        (folder / f"{name}.tsv").write_text("\n".join(part), encoding="utf-8")
    return [*BASE, f"data.path={folder / 'train.tsv'}", f"data.val_path={folder / 'val.tsv'}"]


@pytest.fixture(scope="session")
def ran(tmp_path_factory, cache, base):
    """``ran(place, steps)``: the folder of the run of ``base`` there, made once."""
    root, done = tmp_path_factory.mktemp("runs"), {}

    def run(place, steps=8, start=None):
        key = place, steps, start
        if key not in done:
            processes, overrides = PLACES[place]
            folder = root / f"{place}-{steps}-{len(done)}"
            more = [f"trainer.max_steps={steps}", *([f"ckpt_path={start}"] if start else [])]
            results = run_ranks(processes, train_as, [*base, *overrides, *more], folder, cache)
            assert all(result == results[0] for result in results)
            done[key] = folder
        return done[key]

    return run


def losses(folder):
    rows = read_metrics(folder / "metrics.csv")
    return {(row["step"], name): row[name] for row in rows for name in ("train_loss", "val_loss", "grad_norm") if row[name] is not None}  # fmt: skip


def assert_same_run(folder, reference):
    assert losses(folder) == pytest.approx({key: losses(reference)[key] for key in losses(folder)}, rel=1e-12)
    ours, theirs = last(folder), last(reference)
    torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], rtol=0, atol=1e-9)
    moments = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (ours, theirs))
    torch.testing.assert_close(*moments, rtol=0, atol=1e-9)


@pytest.mark.parametrize("place", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_processes_train_as_one(ran, place):
    assert losses(ran(place)).keys() == losses(ran("one")).keys()
    assert len(read_metrics(ran(place) / "metrics.csv")) == 8
    assert_same_run(ran(place), ran("one"))


@pytest.mark.slow
def test_sgd_and_a_chunked_loss_train_on_several_devices_as_sgd_and_the_plain_loss_on_one(cache, base, tmp_path):
    for place, more in (("one", []), ("ddp", ["objective.chunk_tokens=7"]), ("fsdp", ["objective.chunk_tokens=7"])):
        processes, overrides = PLACES[place]
        words = [*base, *overrides, "optimizer=sgd", "optimizer.lr=0.1", *more]
        run_ranks(processes, train_as, words, tmp_path / place, cache)
        assert_same_run(tmp_path / place, tmp_path / "one")


@pytest.mark.slow
def test_a_model_of_ones_own_is_cut_at_the_classes_that_are_named_and_trains_as_whole(cache, base, tmp_path):
    own = [word for word in base if not word.startswith(("model", "data"))]
    own += ["model._target_=extra.Layered", "data=kjv", "data.context_len=13", "data.batch_size=24"]
    own += ["trainer.val_batches=2", "evaluation.num_rows=16", "evaluation.at_end=true"]
    cut = ["trainer.devices=2", "trainer.strategy=sharded", "trainer.shard=[Layer]"]
    run_ranks(1, train_as, own, tmp_path / "one", cache)
    run_ranks(2, train_as, [*own, *cut], tmp_path / "two", cache)
    assert_same_run(tmp_path / "two", tmp_path / "one")
    with pytest.raises(AssertionError, match=r"does not know the layers of Layered: set trainer\.shard"):
        run_ranks(2, train_as, [*own, *cut[:2]], tmp_path / "refused", cache)


class Normed(Layered):
    """``Layered`` with running statistics, which each process has of its own rows."""

    def __init__(self):
        super().__init__(7)
        self.norm = nn.BatchNorm1d(8, momentum=1.0)

    def forward(self, input_ids):
        return self.head(self.norm(self.layers(self.embed(input_ids))[:, 0]))


def normed_run(folder, strategy):
    rows = [{"input_ids": torch.tensor([i % 7]), "labels": i % 3} for i in range(8)]
    options = {"devices": 2, "strategy": strategy, "shard": ["Layer"] if strategy == "sharded" else []}
    data = Task(name="mine", train=rows, val=rows)
    torch.manual_seed(1)
    return fit(folder, data, model=Normed(), batch_size=4, val_batch_size=4, max_steps=3, **options)["val_loss"]


@pytest.mark.slow
def test_every_process_validates_with_the_statistics_that_the_checkpoint_has(tmp_path):
    losses = [run_ranks(2, normed_run, tmp_path / strategy, strategy)[0] for strategy in ("ddp", "sharded")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


ROADS = [
    ("ddp one, one fsdp", pytest.mark.slow),
    ("one ddp, fsdp one, ddp ddp_of_4", pytest.mark.release),
    ("fsdp fsdp_of_4, fsdp ddp", pytest.mark.long),
]
MARKED = [pytest.param(*road.split(), marks=mark) for roads, mark in ROADS for road in roads.split(", ")]


@pytest.mark.parametrize(("first", "then"), MARKED)
def test_a_run_goes_on_elsewhere(ran, first, then):
    """Four steps in one place, four in another, are eight in one: weights, moments and schedule have all come along."""
    start = ran(first, 4) / "checkpoints" / "last.ckpt"
    folder = ran(then, 8, start)
    assert [row["step"] for row in read_metrics(folder / "metrics.csv")] == list(range(5, 9))
    assert_same_run(folder, ran("one"))


# --- what DDP may find unused, or twice

LINFORMER = ["model=encoder_small", "model.attention=linformer", "model.num_slots=4", "model.position=none"]
UNUSUAL = {
    "checkpointing": ["data=kv_lookup", "model=recall", "model.checkpointing=true"],
    "linformer": ["data=classify", "data.tokenizer=char", *LINFORMER],
    "frozen": ["data=kv_lookup", "model=recall", "optimizer.rules=[{match: '(q|k)_proj', trainable: false}]"],
    "pictures": ["data=digits", "model=vit_small", "optimizer=muon"],
}


def each_of(runs, folder, cache):
    return {name: train_as(overrides, folder / name, cache)["steps"] for name, overrides in runs.items()}


@pytest.mark.slow
def test_unusual_models_make_two_updates_under_ddp(tmp_path, cache):
    """It finds a parameter without a gradient when the second forward begins."""
    two = [*QUIET, *WIDTHS, *PLACES["ddp"][1], "data.batch_size=4", "model.max_len=128"]
    two += ["trainer.max_steps=2", "trainer.val_batches=1"]
    (tmp_path / "classes.tsv").write_text("text\tlabel\n" + "".join(f"word {n}\t{n % 3}\n" for n in range(53)))
    runs = {name: [*overrides, *two] for name, overrides in UNUSUAL.items()}
    runs["linformer"].append(f"data.path={tmp_path / 'classes.tsv'}")
    assert run_ranks(2, each_of, runs, tmp_path, cache) == [dict.fromkeys(runs, 2)] * 2


# --- what happens between processes

PAIRS = [*QUIET, *WIDTHS, "data=kv_lookup", "data.batch_size=24", "data.val_size=12", "trainer.val_batches=1", "trainer.val_every=0", "trainer.ckpt_every=0"]  # fmt: skip


def stopped(overrides, folder, cache, rank):
    """A SIGTERM that reaches one process alone, in its third step."""
    step = TrainingModule.training_step

    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and self.global_rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    TrainingModule.training_step = training_step
    try:
        train_as(overrides, folder, cache)
    except StoppedError as error:
        return str(error)
    return "not stopped"


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path, cache):
    more = ["trainer.max_steps=40", "trainer.log_every=4", "trainer.ckpt_every=100", "model.dropout=0.1"]
    found = run_ranks(2, stopped, [*PAIRS, *PLACES["ddp"][1], *more], tmp_path / "run", cache, 1)
    assert found == ["stopped by SIGTERM after step 4"] * 2
    assert last(tmp_path / "run")["global_step"] == 4


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
