"""A run that was stopped and goes on. That it is the run that was never stopped, bit for bit, the lattice of runs holds."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from extra import last, train_with
from killing import blows, hit_and_go_on, length_of, result_of, run

from minitx.config import ConfigError, Part, node, to_dict
from minitx.training import StoppedError
from minitx.training.checkpoint_files import CheckpointError
from minitx.training.metrics_csv import read_metrics
from minitx.training.optimizers import sgd
from minitx.training.resume_checks import check_resumed
from minitx.training.run import train
from minitx.training.schedules import constant


class Before(L.Callback):
    """Calls ``do(trainer, module, batch)`` before an update, counted from 1."""

    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step - 1:
            self.do(trainer, module, batch)


def stop(trainer, module, batch):
    """What a signal does."""
    next(c for c in trainer.callbacks if type(c).__name__ == "LastCheckpoint")._received = 15


def assert_same_state(folder, reference):
    """Rows, weights, moments, steps and schedules, bit for bit."""
    assert result_of(folder) == result_of(reference), folder


def resumed(config, folder):
    return dataclasses.replace(config, ckpt_path=str(folder / "checkpoints" / "last.ckpt"))


# --- a run that was stopped


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 3), (3, 2)])
def test_a_run_that_goes_on_with_other_micro_batches_reads_each_step_once(make_config, tmp_path, first, then):
    """Steps, batches and validations are those of the whole run, also where the checkpoint is that of a finished run."""
    options = {"trainer__ckpt_every": 100, "trainer__val_every": 4, "trainer__precision": "64-true", "schedule": node(constant)}
    train(make_config(trainer__max_steps=11, **options), tmp_path / "whole")
    whole = read_metrics(tmp_path / "whole" / "metrics.csv")
    for steps in (5, 11):
        config = make_config(trainer__max_steps=steps, trainer__accumulate=first, **options)
        more = [] if steps == 5 else [Before(5, stop)]
        with contextlib.nullcontext() if steps == 5 else pytest.raises(StoppedError):
            train_with(config, tmp_path / f"cut {steps}", *more)
        longer = make_config(trainer__max_steps=11, trainer__accumulate=then, **options)
        train(resumed(longer, tmp_path / f"cut {steps}"), tmp_path / f"cut {steps}")
        rows = read_metrics(tmp_path / f"cut {steps}" / "metrics.csv")
        assert [row["step"] for row in rows] == list(range(1, 12))
        for name in ("train_loss", "tokens"):
            assert [row[name] for row in rows] == pytest.approx([row[name] for row in whole], rel=1e-9)
        # a run of 5 steps validates at its end
        validated = [
            {row["step"]: row["val_loss"] for row in run if row["val_loss"] and row["step"] != 5} for run in (rows, whole)
        ]
        assert validated[0] == pytest.approx(validated[1], rel=1e-9)


OTHERS = [
    ({"optimizer__lr": 0.25}, r"optimizer\.lr 0\.001 != 0\.25"),
    ({"optimizer": node(sgd)}, r"optimizer\._target_ \S+adamw != \S+sgd"),
    ({"trainer__max_steps": 5}, r"is at step 6, beyond trainer\.max_steps=5"),
    ({"callbacks": {"early": {"_target_": "lightning.pytorch.callbacks.EarlyStopping"}}}, r"callbacks\.early"),
    *(
        ({f"model__{name}": value}, rf"contains another model.*model\.{name} \S+ != {value}")
        for name, value in {"scale": "unscaled", "num_heads": 1, "softcap": 5.0}.items()
    ),
]


def test_a_checkpoint_holds_plain_data_and_what_a_resumed_run_would_not_do_is_refused_before_anything_is_written(
    make_config, tmp_path
):
    config, folder = make_config(trainer__ckpt_every=6, probe__every=3), tmp_path / "run"
    train(config, folder, files={"config.yaml": "good"})
    stored = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["minitx"]["config"]
    assert json.loads(json.dumps(stored)) == json.loads(json.dumps(to_dict(config)))
    for changes, said in OTHERS:
        for place in (folder, tmp_path / "new"):
            with pytest.raises(ConfigError, match=said):
                train(resumed(make_config(**changes), folder), place, files={"config.yaml": "bad"})
    assert (folder / "config.yaml").read_text(encoding="utf-8") == "good" and not (tmp_path / "new").exists()


def test_a_run_of_sgd_on_shards_goes_on_with_the_fused_kernel_of_whole_weights(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr("minitx.training.optimizers.is_sharded", lambda parameter: True)
    options = {"optimizer": node(sgd), "schedule": node(constant), "trainer__ckpt_every": 100}
    for steps, path in ((2, None), (3, "last")):
        train(make_config(**options, trainer__max_steps=steps, ckpt_path=path), tmp_path)
        monkeypatch.undo()
    assert all(group["fused"] for group in last(tmp_path)["optimizer_states"][0]["param_groups"])


def test_a_run_that_goes_on_with_another_seed_or_batch_size_says_that_its_rows_are_others(make_config, tmp_path, caplog):
    config = make_config(trainer__ckpt_every=100, trainer__max_steps=2)
    train(config, tmp_path / "run")
    for changes in ({}, {"seed": 3, "data": config.data.with_(batch_size=6)}):
        caplog.clear()
        train(dataclasses.replace(resumed(config, tmp_path / "run"), **changes), tmp_path / f"then{len(changes)}")
        assert ("so rows may be repeated or skipped: seed 0 != 3; data.batch_size 12 != 6" in caplog.text) == bool(changes)


def test_a_run_that_goes_on_with_another_objective_says_so(make_config, tmp_path, caplog):
    config = make_config(trainer__ckpt_every=100, trainer__max_steps=1)
    train(config, tmp_path / "run")
    then, state = resumed(config, tmp_path / "run"), last(tmp_path / "run")["minitx"]
    for objective, change in (
        (config.objective, ""),
        (config.objective.with_(chunk_tokens=5, count_correct=False), ""),
        (config.objective.with_(label_smoothing=0.5), "objective.label_smoothing 0.0 != 0.5"),
        (Part.of_object(torch.nn.CrossEntropyLoss(), "objective"), "CrossEntropy != given to train() from Python"),
    ):
        caplog.clear()
        changed = dataclasses.replace(then, objective=objective)
        parts = {name: getattr(changed, name) for name in ("data", "objective", "optimizer", "schedule")}
        check_resumed(changed.ckpt_path, parts, {**state, "config": to_dict(changed)})
        assert ("resumes with another objective" in caplog.text) == bool(change) and change in caplog.text


def test_a_run_stops_by_the_first_of_two_signals_and_the_other_does_not_hurry_it(make_config, tmp_path):
    def send(*_):
        for number in (signal.SIGUSR2, signal.SIGHUP):
            os.kill(os.getpid(), number)

    with pytest.raises(StoppedError, match="SIGUSR2 after step 3"):
        train_with(make_config(trainer__ckpt_every=100), tmp_path / "run", Before(3, send))
    assert last(tmp_path / "run")["global_step"] == 3


def test_a_run_whose_folder_disappears_ends_with_its_path_and_goes_on_from_what_it_wrote(make_config, tmp_path):
    config = make_config(trainer__ckpt_every=2)
    train(config, tmp_path / "whole")
    with pytest.raises((OSError, CheckpointError), match=re.escape(str(tmp_path / "run"))):
        train_with(config, tmp_path / "run", Before(4, lambda *_: (tmp_path / "run").rename(tmp_path / "moved")))
    assert not (tmp_path / "run" / "metrics.csv").exists()
    train(resumed(config, tmp_path / "moved"), tmp_path / "moved")
    assert_same_state(tmp_path / "moved", tmp_path / "whole")


def test_a_run_does_not_go_on_where_the_same_ids_are_other_characters(make_config, tmp_path):
    """Another text with as many characters fits the model, and its rows would mean something else."""
    config = make_config(trainer__ckpt_every=100, trainer__max_steps=2)
    train(config, tmp_path / "run")
    other = tmp_path / "other.txt"
    for letter, said in (("é", "was trained with another tokenizer"), ("e", None)):
        other.write_text(Path(config.data.get("path")).read_text(encoding="utf-8").replace("e", letter), encoding="utf-8")
        again = dataclasses.replace(resumed(config, tmp_path / "run"), data=config.data.with_(path=str(other)))
        with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
            train(again, tmp_path / f"then {letter}")


def test_a_run_does_not_resume_where_another_text_is_in_the_same_file(make_config, tmp_path):
    """The other text has as many characters, of the same kinds."""
    config = make_config(trainer__ckpt_every=100, trainer__max_steps=2)
    train(config, tmp_path / "run")
    path, last_path = Path(config.data.get("path")), tmp_path / "run" / "checkpoints" / "last.ckpt"
    text = path.read_text(encoding="utf-8")
    again = dataclasses.replace(resumed(config, tmp_path / "run"), trainer=dataclasses.replace(config.trainer, max_steps=3))
    shutil.rmtree(tmp_path / "data")  # the cache
    os.utime(path, (1, 1))
    train(again, tmp_path / "same")
    path.write_text(text[::-1], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"last\.ckpt was trained on other data: rows or labels have changed\."):
        train(again, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    stored = torch.load(last_path, weights_only=True)
    parts = {name: getattr(config, name) for name in ("data", "objective", "optimizer", "schedule")}
    for labels in (["a", "b"], []):
        stored["minitx"]["labels"] = labels
        torch.save(stored, last_path)
        with pytest.raises(ConfigError, match="rows or labels have changed") if labels else contextlib.nullcontext():
            check_resumed(str(last_path), parts, {**stored["minitx"], "labels": ["b", "a"]})
    del stored["minitx"]["data_checksum"]  # as before 0.2
    torch.save(stored, last_path)
    train(again, tmp_path / "before")


def test_the_best_checkpoint_of_a_resumed_run_is_that_of_the_whole_run_also_where_its_folder_was_moved(make_config, tmp_path):
    options = {"trainer__ckpt_every": 100, "trainer__val_every": 2, "trainer__max_steps": 4, "optimizer__lr": 3.0}
    config = make_config(**options, schedule=node(constant))
    train(config, tmp_path / "whole")
    with pytest.raises(StoppedError):
        train_with(config, tmp_path / "cut", Before(3, stop))
    (tmp_path / "cut").rename(tmp_path / "moved")
    train(resumed(config, tmp_path / "moved"), tmp_path / "moved")
    best = [last(tmp_path / name, "best") for name in ("whole", "moved")]
    losses = [row["val_loss"] for row in read_metrics(tmp_path / "whole" / "metrics.csv") if row["val_loss"]]
    assert losses[0] < losses[1]  # the best one came early, before the stop
    assert best[0]["global_step"] == best[1]["global_step"] == 2
    torch.testing.assert_close(best[0]["state_dict"], best[1]["state_dict"], rtol=0, atol=0)


def test_a_run_that_is_over_changes_nothing_and_a_longer_one_goes_on_in_a_new_folder(make_config, tmp_path):
    options = {"trainer__ckpt_every": 2, "trainer__val_every": 2}
    config = make_config(**options)
    train(config, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "again")
    train(resumed(config, tmp_path / "again"), tmp_path / "again")
    assert_same_state(tmp_path / "again", tmp_path / "first")
    train(resumed(make_config(trainer__max_steps=9, **options), tmp_path / "first"), tmp_path / "second")
    assert [row["step"] for row in read_metrics(tmp_path / "second" / "metrics.csv")] == [7, 8, 9]
    with pytest.raises(
        ConfigError, match=r"second already contains a run, and ckpt_path=\S+first\S+ is not a checkpoint of that run: resume"
    ):
        train(resumed(config, tmp_path / "first"), tmp_path / "second")


def test_a_run_goes_on_where_its_checkpoints_are_a_link_to_another_disk(make_config, tmp_path, caplog):
    caplog.set_level("INFO")
    folder, disk = tmp_path / "run", tmp_path / "disk"
    train(make_config(trainer__max_steps=2, trainer__ckpt_every=2), folder)
    (folder / "checkpoints").rename(disk)
    (folder / "checkpoints").symlink_to(disk)
    (tmp_path / "link.ckpt").symlink_to(disk / "last.ckpt")
    paths = ["last", str(folder / "checkpoints" / "last.ckpt"), str(disk / "last.ckpt"), str(tmp_path / "link.ckpt")]
    for steps, path in enumerate(paths, 3):
        train(make_config(trainer__max_steps=steps, trainer__ckpt_every=1, ckpt_path=path), folder)
    (folder / "checkpoints" / "last.ckpt").rename(tmp_path / "other.ckpt")
    (folder / "checkpoints" / "last.ckpt").symlink_to(tmp_path / "other.ckpt")
    train(make_config(trainer__max_steps=7, trainer__ckpt_every=1, ckpt_path="last"), folder)
    assert [row["step"] for row in read_metrics(folder / "metrics.csv")] == [1, 2, 3, 4, 5, 6, 7]
    lines = [line for message in caplog.messages for line in message.splitlines() if line.startswith("steps ")]
    assert [line.split()[1:4] for line in lines[1:]] == [[str(steps), f"({steps - 1}", "done),"] for steps in range(3, 8)]


def test_a_run_that_goes_on_to_more_steps_has_the_rates_of_the_longer_schedule_from_its_first_step_on(make_config, tmp_path):
    """The optimizer in the checkpoint has the next rate of the old schedule, which ends at the tenth of the peak."""
    rates = {}
    for name, lengths in {"whole": [8], "cut": [4, 8]}.items():
        for steps in lengths:
            config = make_config(trainer__ckpt_every=100, trainer__max_steps=steps)
            train(config if steps == lengths[0] else resumed(config, tmp_path / name), tmp_path / name)
        rates[name] = [row["lr"] for row in read_metrics(tmp_path / name / "metrics.csv")]
    assert rates["cut"][4:] == rates["whole"][4:] and len(rates["cut"]) == 8


def annealed(optimizer, max_steps):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max_steps)


def later(optimizer, max_steps):
    return annealed(optimizer, max_steps)


def test_a_schedule_whose_state_has_the_number_of_steps_does_not_go_on_to_another(make_config, tmp_path):
    options = {"trainer__ckpt_every": 2, "schedule": node(annealed)}
    train(make_config(trainer__max_steps=4, **options), tmp_path)
    train(resumed(make_config(trainer__max_steps=4, **options), tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=r"was trained with a schedule for trainer\.max_steps=4\. Resume"):
        train(resumed(make_config(trainer__max_steps=8, **options), tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=r"was trained with another schedule: schedule\._target_"):
        train(resumed(make_config(trainer__max_steps=8, schedule=node(later)), tmp_path), tmp_path)
    assert len(read_metrics(tmp_path / "metrics.csv")) == 4


# --- a run that was killed or stopped at any moment

STEPS = 48
BLOWS = blows(seed=1, kills=4, terms=1, interrupts=1, tmpdirs=[None])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """The result of the run that was left alone."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(length_of(STEPS), folder, cache) == 0
    assert run([*length_of(STEPS), "seed=1"], folder.parent / "other", cache) == 0
    assert result_of(folder.parent / "other") != result_of(folder)  # the digest sees a difference
    return result_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("blow", BLOWS, ids=lambda blow: f"{signal.Signals(blow.number).name}-{blow.after:.2f}-{blow.save}")
def test_a_run_that_was_hit_comes_to_the_same_end(blow, whole, cache, tmp_path):
    found = hit_and_go_on(STEPS, tmp_path / "run", cache, blow)
    assert found["result"] == whole
    assert found["left"] == ["best.ckpt", "last.ckpt"]  # and no half of one
    assert found["code"] in (0, -blow.number, 128 + blow.number)
