"""A run that was stopped and goes on is the run that was never stopped."""

from __future__ import annotations

import csv
import dataclasses
import json

import lightning.pytorch as L
import pytest
import torch

from minitx.config import ConfigError, to_dict
from minitx.training.callbacks import StoppedError
from minitx.training.metrics import read_metrics
from minitx.training.run import train


class StopAfter(L.Callback):
    """What a signal does, at a step of the test's choice."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step - 1:
            guard = next(c for c in trainer.callbacks if type(c).__name__ == "LastCheckpoint")
            guard._received = 15


class Crash(L.Callback):
    """A power cut at the start of a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise OSError("the power is gone")


def rows_without_time(folder):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(folder / "metrics.csv")]


def same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def resumed(config, folder):
    return dataclasses.replace(config, ckpt_path=str(folder / "checkpoints" / "last.ckpt"))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("stop", "val_every"), [(3, 0), (4, 2), (3, 2), (1, 1)])
def test_a_stopped_run_that_goes_on_equals_the_run_that_was_never_stopped(
    make_config, weights_of, tmp_path, accumulate, stop, val_every
):
    config = make_config(
        trainer__ckpt_every=100, trainer__accumulate=accumulate, trainer__val_every=val_every, model__dropout=0.1,
        optimizer__clip=0.7, schedule__warmup_steps=2, optimizer__weight_decay=0.1,
    )  # fmt: skip
    whole = train(config, tmp_path / "whole")
    with pytest.raises(StoppedError, match=f"after step {stop}"):
        train(config, tmp_path / "cut", extras=lambda: ([], [StopAfter(stop)]))
    result = train(resumed(config, tmp_path / "cut"), tmp_path / "cut")
    assert rows_without_time(tmp_path / "cut") == rows_without_time(tmp_path / "whole")
    same_weights(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole"))
    assert (result["loss_digest"], result["val_loss"]) == (whole["loss_digest"], whole["val_loss"])


@pytest.mark.parametrize("stop", [2, 3])
def test_the_best_checkpoint_of_a_resumed_run_is_that_of_the_whole_run(make_config, tmp_path, stop):
    config = make_config(trainer__ckpt_every=100, trainer__val_every=2, optimizer__lr=3.0, schedule__name="constant")
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_steps=4))
    train(config, tmp_path / "whole")
    with pytest.raises(StoppedError):
        train(config, tmp_path / "cut", extras=lambda: ([], [StopAfter(stop)]))
    assert (tmp_path / "cut" / "checkpoints" / "best.ckpt").exists()
    train(resumed(config, tmp_path / "cut"), tmp_path / "cut")
    best = [torch.load(tmp_path / name / "checkpoints" / "best.ckpt", weights_only=True) for name in ("whole", "cut")]
    losses = [row["val_loss"] for row in read_metrics(tmp_path / "whole" / "metrics.csv") if row["val_loss"]]
    assert losses[0] < losses[1]  # the best one came early, before the stop
    assert best[0]["global_step"] == best[1]["global_step"] == 2
    same_weights(best[0]["state_dict"], best[1]["state_dict"])


@pytest.mark.parametrize("val_every", [0, 2])
@pytest.mark.parametrize("crash", [3, 5])
def test_a_crash_costs_only_what_came_after_the_last_checkpoint(make_config, weights_of, tmp_path, val_every, crash):
    config = make_config(trainer__ckpt_every=2, trainer__val_every=val_every, model__dropout=0.1)
    train(config, tmp_path / "whole")
    with pytest.raises(OSError, match="power"):
        train(config, tmp_path / "cut", extras=lambda: ([], [Crash(crash)]))
    train(resumed(config, tmp_path / "cut"), tmp_path / "cut")
    assert rows_without_time(tmp_path / "cut") == rows_without_time(tmp_path / "whole")
    same_weights(weights_of(tmp_path / "cut"), weights_of(tmp_path / "whole"))


def test_the_probes_of_a_resumed_run_are_those_of_the_whole_run(make_config, tmp_path):
    config = make_config(trainer__ckpt_every=100, probe__every=3)
    whole = train(config, tmp_path / "whole")["probes"]
    with pytest.raises(StoppedError):
        train(config, tmp_path / "cut", extras=lambda: ([], [StopAfter(4)]))
    cut = train(resumed(config, tmp_path / "cut"), tmp_path / "cut")["probes"]
    assert [p["step"] for p in whole] == [0, 1, 2, 3, 4, 6]
    assert cut == whole


def test_probes_after_the_checkpoint_are_not_told_twice(make_config, tmp_path):
    config = make_config(trainer__ckpt_every=2, probe__every=1)
    whole = train(config, tmp_path / "whole")["probes"]
    with pytest.raises(OSError, match="power"):
        train(config, tmp_path / "cut", extras=lambda: ([], [Crash(3)]))
    with (tmp_path / "cut" / "probes.jsonl").open("a") as file:
        file.write('{"step": 3, "laye')  # the power went while a line was written
    cut = train(resumed(config, tmp_path / "cut"), tmp_path / "cut")["probes"]
    assert cut == whole


def test_a_run_continues_into_a_new_folder_without_a_word_of_warning(make_config, tmp_path, weights_of):
    config = make_config(trainer__ckpt_every=2, trainer__val_every=2)
    train(config, tmp_path / "first")
    longer = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_steps=9))
    train(resumed(longer, tmp_path / "first"), tmp_path / "second")
    assert [row["step"] for row in read_metrics(tmp_path / "second" / "metrics.csv")] == [7, 8, 9]
    assert len(weights_of(tmp_path / "second")) > 0


def test_a_checkpoint_holds_plain_data_only(make_config, tmp_path):
    config = make_config(trainer__ckpt_every=3, trainer__val_every=3, probe__every=3)
    train(config, tmp_path)
    for name in ("last.ckpt", "best.ckpt"):
        loaded = torch.load(tmp_path / "checkpoints" / name, weights_only=True)
        json.dumps(loaded["minitx"])
        assert_plain(loaded)
    assert loaded["minitx"]["model"]["scale"] == "inv_sqrt"
    assert loaded["minitx"]["config"] == to_dict(config)


def assert_plain(value, path=""):
    if isinstance(value, dict):
        for key, child in value.items():
            assert type(key) in (str, int), path
            assert_plain(child, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            assert_plain(child, f"{path}[{i}]")
    else:
        assert value is None or type(value) in (str, int, float, bool, torch.Tensor), (path, type(value))


@pytest.mark.parametrize(
    ("field", "value"),
    [("scale", "unscaled"), ("scale", 0.5), ("num_heads", 1), ("num_layers", 2), ("scale_factor", 2.0), ("softcap", 5.0)],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_field_named(make_config, tmp_path, field, value):
    config = make_config(trainer__ckpt_every=6)
    train(config, tmp_path / "first")
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, **{field: value}))
    with pytest.raises(ConfigError, match=rf"holds another model.*{field} \S+ != {value}"):
        train(resumed(other, tmp_path / "first"), tmp_path / "second")
    assert not (tmp_path / "second").exists()


def _truncate(path):
    path.write_bytes(path.read_bytes()[:2000])


def _empty(path):
    path.write_bytes(b"")


def _foreign(path):
    torch.save({"state_dict": {"weight": torch.ones(3)}}, path)


def _no_mapping(path):
    torch.save([1, 2, 3], path)


def _other_minitx(path):
    torch.save({"minitx": {"model": None}}, path)


def _dangerous(path):
    import os

    class Evil:
        def __reduce__(self):
            return os.system, ("echo owned > " + str(path) + ".owned",)

    torch.save({"minitx": Evil()}, path)


@pytest.mark.parametrize("damage", [_truncate, _empty, _foreign, _no_mapping, _other_minitx, _dangerous])
def test_a_damaged_or_foreign_checkpoint_gets_one_sentence_and_no_folder(make_config, tmp_path, damage):
    config = make_config(trainer__ckpt_every=6)
    train(config, tmp_path / "first")
    path = tmp_path / "first" / "checkpoints" / "last.ckpt"
    damage(path)
    with pytest.raises(ConfigError, match=r"ckpt_path=.* cannot be read as a checkpoint of minitx") as caught:
        train(resumed(config, tmp_path / "first"), tmp_path / "second")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "second").exists()
    assert not path.with_name(path.name + ".owned").exists()


def test_a_checkpoint_beyond_the_end_of_the_run_changes_nothing_but_is_no_error(make_config, tmp_path, weights_of):
    config = make_config(trainer__ckpt_every=6)
    train(config, tmp_path)
    before, rows = weights_of(tmp_path), rows_without_time(tmp_path)
    train(resumed(config, tmp_path), tmp_path)
    same_weights(weights_of(tmp_path), before)
    assert rows_without_time(tmp_path) == rows


def test_every_row_of_the_metrics_file_is_one_step(make_config, tmp_path):
    config = make_config(trainer__ckpt_every=3, trainer__val_every=2)
    train(config, tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [bool(row["val_loss"]) for row in rows] == [False, True, False, True, False, True]
