"""The rows of ``metrics.csv``, the end of a run by a metric, and the checkpoints at the end."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from extra import last, train_with
from omegaconf import OmegaConf

from minitx.analysis.wandb_files import WandbFiles
from minitx.config import ConfigError, Part, TransformerConfig, node
from minitx.config.part import find_target
from minitx.config.training import StopAtConfig
from minitx.nn.counting import train_flops
from minitx.training import metrics_rows
from minitx.training.checkpoint_files import read_checkpoint
from minitx.training.metrics_csv import read_metrics
from minitx.training.metrics_rows import StepLog, batch_flops
from minitx.training.module import TrainingModule
from minitx.training.nonfinite import Latch
from minitx.training.processes import sum_over_processes
from minitx.training.run import train
from minitx.training.schedules import constant
from minitx.training.stop_at_value import StopAt

CONFIGS = Path(__file__).parents[2] / "configs"


def preset(name):
    """The callbacks of a preset of the configs, made."""
    nodes = OmegaConf.to_container(OmegaConf.load(CONFIGS / "callbacks" / f"{name}.yaml"))
    return [Part.of(node, name).build() for name, node in nodes.items()]


def test_presets_name_classes_that_exist():
    files = [*CONFIGS.glob("callbacks/*.yaml"), *CONFIGS.glob("logger/*.yaml")]
    names = [name for file in files for name in re.findall(r"_target_: (\S+)", file.read_text())]
    assert len(names) > 6 and all(isinstance(find_target(name, "callbacks"), type) for name in names)


@pytest.fixture
def answers(monkeypatch):
    """``answers(step -> number of right answers on this rank)``, from 1."""

    def count(right):
        plain = TrainingModule.training_step

        def training_step(self, batch, batch_idx):
            loss = plain(self, batch, batch_idx)
            self.step_sums = {"correct": torch.tensor(right(self.global_step + 1))}
            return loss

        monkeypatch.setattr(TrainingModule, "training_step", training_step)

    return count


def made_up(**changes):
    """A trainer and a module as far as a StepCallback asks."""
    trainer = {"max_steps": 100, "world_size": 1, "global_step": 1, "should_stop": False, "loggers": [], "accumulate_grad_batches": 1, "sanity_checking": False}  # fmt: skip
    module = {"device": torch.device("cpu"), "step_loss": torch.tensor(1.0), "grad_norm": 1.0}
    module |= {"latch": Latch(), "step_sums": {}, "step_targets": torch.tensor(10), "log_dict": lambda values, **options: None}
    own = {name: changes.pop(name) for name in list(changes) if name in module}
    return SimpleNamespace(**{**trainer, **changes}), SimpleNamespace(**{**module, **own})


# --- rows


def test_a_row_says_what_the_step_came_to(make_config, tmp_path, answers):
    answers(lambda step: 21 * (step % 2))
    rates = {"optimizer__lr": 0.4, "optimizer__rules": [{"match": "embeddings", "lr": 0.5}]}  # the first parameters
    config = make_config(schedule=node(constant, warmup_steps=4), **rates, trainer__val_every=3)
    train(config, tmp_path)
    rows = read_metrics(tmp_path / "metrics.csv")
    names = ["step", "train_loss", "val_loss", "val_accuracy", "lr", "grad_norm", "tokens", "seconds"]
    assert list(rows[0]) == [*names, "train_accuracy", "tokens_per_second", "memory_mb", "mfu"]
    assert [row["tokens"] for row in rows] == [12 * 7 * step for step in range(1, 7)]
    assert [row["lr"] for row in rows] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert [row["train_accuracy"] for row in rows] == [0.25, 0.0] * 3
    assert all(row["tokens_per_second"] > 0 and row["memory_mb"] > 10 for row in rows)
    assert [row["mfu"] for row in rows] == [None] * 6


def test_speed_and_utilisation_cover_the_steps_since_the_last_row_without_validation(monkeypatch):
    """By a clock of the test: three steps of two seconds, and a validation of a hundred."""
    clock, rows = [5.0], []
    monkeypatch.setattr(metrics_rows.time, "perf_counter", lambda: clock[0])
    model = TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)
    log, logger = StepLog(3, model, peak=0.25), SimpleNamespace(log_metrics=lambda row, step: rows.append(row))
    trainer, module = made_up(callback_metrics={"val_loss": torch.tensor(2.0)}, loggers=[logger], step_targets=torch.tensor(35))
    batch = {"input_ids": torch.zeros(5, 7).long(), "num_targets": torch.tensor(35), "labels": torch.zeros(5, 7).long()}
    log.on_train_start(trainer, module)
    for step in range(1, 7):
        trainer.global_step = step - 1
        log.on_train_batch_start(trainer, module, batch, step - 1)
        clock[0] += 2.0
        trainer.global_step = step
        log.on_train_batch_end(trainer, module, None, batch, step - 1)
        if step == 4:
            log.on_validation_start(trainer, module)
            clock[0] += 100.0
            log.on_validation_end(trainer, module)
    first, third, validation, sixth = rows
    assert [row["tokens_per_second"] for row in (first, third, sixth)] == [17.5] * 3
    mfu = pytest.approx(train_flops(model, 7) * 5 / 2 / 0.25e12, rel=1e-12)
    assert [row["mfu"] for row in (first, third, sixth)] == [mfu] * 3
    assert (validation, sixth["seconds"]) == ({"val_loss": 2.0}, 112.0)


def test_padding_counts_in_the_flops_of_a_batch():
    config = TransformerConfig(architecture="encoder_decoder", vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)
    ids = {"input_ids": torch.zeros(5, 7), "decoder_input_ids": torch.zeros(5, 3)}
    assert batch_flops(config, ids) == 5 * train_flops(config, 7, 3)


def test_means_of_several_processes_are_means_over_all_targets(monkeypatch):
    """Four equal processes. A batch knows the targets of all."""
    monkeypatch.setattr(metrics_rows, "sum_over_processes", lambda trainer, values: 4 * values)
    sums = {"step_loss": torch.tensor(0.5), "step_sums": {"correct": torch.tensor(3)}}
    trainer, module = made_up(world_size=4, **sums, step_targets=torch.tensor(40))
    batch, log = {"labels": torch.zeros(5, 2).long(), "num_targets": torch.tensor(40)}, StepLog(5)
    assert metrics_rows.step_means(trainer, module) == {"train_loss": 2.0, "train_accuracy": 0.3}
    log.on_step(trainer, module, 2, batch)
    assert log.state_dict() == {"tokens": 40}


def test_a_sum_over_processes_leaves_what_is_summed_and_does_not_wait_for_the_device(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value: value.mul_(4))  # and no barrier, in no group
    own = torch.tensor([1.0, 2.0])
    assert sum_over_processes(SimpleNamespace(world_size=4), own).tolist() == [4.0, 8.0]
    assert sum_over_processes(SimpleNamespace(world_size=1), own).tolist() == [1.0, 2.0]


class Own(L.Callback):
    """Logs a metric of the user's at every step, as Lightning has it."""

    def on_train_batch_end(self, trainer, module, *arguments):
        module.log("my_metric", 1.0 + trainer.global_step)


def test_other_metrics_make_no_row_and_stand_in_columns_of_their_own(make_config, tmp_path):
    config = make_config(trainer__log_every=3, trainer__val_every=3, schedule=node(constant))
    train_with(config, tmp_path, Own(), *preset("lr_monitor"))
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [(row["step"], row["tokens"]) for row in rows] == [(1, 84), (3, 3 * 84), (6, 6 * 84)]
    assert all(row["train_loss"] is not None for row in rows)
    assert [row["my_metric"] for row in rows[1:]] == [4.0, 7.0]  # the latest when the row was complete
    assert [row["lr-AdamW"] for row in rows] == [1e-3] * 3


# --- the end of a run by a metric


def follow(stop, values, first=1):
    """The step at which ``stop`` ends the run that has these losses, or right answers of 10, or None."""
    for step, value in enumerate(values, start=first):
        number = torch.tensor(value)
        trainer, module = made_up(global_step=step, step_loss=number, step_sums={"correct": number})
        stop.on_step(trainer, module, step, {"num_targets": torch.tensor(10)})
        if trainer.should_stop:
            return step
    return None


# what to stop at, losses or right answers of 10 in each step, the step that reaches the value, the last step
ENDS = [
    (("train_accuracy", 0.9, 1, 2), [3, 7, 9, 5, 5, 5], 3, 5), (("train_accuracy", 0.9, 3), [10, 8, 8, 9, 10, 0], 5, 5),
    (("train_accuracy", 0.9, 5), [10, 10, 10, 10], None, None), (("train_accuracy", 0.9, 2), [8, 9, 8, 9], None, None),
    (("train_loss", 0.5, 2), [0.875, 0.625, 0.375, 0.125], 3, 3), (("train_loss", 0.5), [math.nan, 0.6], None, None),
]  # fmt: skip


@pytest.mark.parametrize(("stop_at", "values", "reached", "end"), ENDS)
def test_a_run_ends_when_the_mean_over_the_window_reaches_the_value(stop_at, values, reached, end):
    stop = StopAt(*stop_at)
    assert (follow(stop, values), stop.reached) == (end, reached)


def test_the_window_goes_on_where_the_checkpoint_was_written():
    first, second = StopAt("train_accuracy", 0.9, 3, 2), StopAt("train_accuracy", 0.9, 3, 2)
    assert follow(first, [9, 9]) is None
    second.load_state_dict(first.state_dict())
    assert follow(second, [9, 0, 0], first=3) == 5


def test_a_metric_or_a_checkpoint_that_does_not_exist_is_refused_from_python_too(tmp_path):
    with pytest.raises(ConfigError, match=r"^metric=val_loss is not allowed: one of train_accuracy, train_loss"):
        StopAt("val_loss", 0.5)
    with pytest.raises(ConfigError, match=r"^checkpoint=newest is not allowed: one of last, best"):
        WandbFiles(folder=tmp_path, checkpoint="newest")


def test_an_objective_without_right_answers_has_no_accuracy_to_stop_at():
    trainer, module = made_up()
    with pytest.raises(ConfigError, match=r"trainer\.stop_at\.metric=train_accuracy"):
        StopAt("train_accuracy", 0.9).on_step(trainer, module, 1, {"num_targets": 10})


def test_a_stopped_run_is_validated_saved_and_not_trained_any_further(make_config, tmp_path, answers):
    answers(lambda step: 84 if step >= 3 else 0)
    options = {f"trainer__{name}_every": 50 for name in ("log", "ckpt", "val")}
    options["trainer__stop_at"] = StopAtConfig(metric="train_accuracy", value=1.0, window=2, extra_steps=3)
    result = train(make_config(trainer__max_steps=50, **options), tmp_path)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [(row["step"], row["val_loss"] is not None) for row in rows] == [(1, False), (7, True)]
    assert last(tmp_path)["global_step"] == last(tmp_path, "best")["global_step"] == 7
    assert [result[name] for name in ("steps", "train_loss", "val_loss")] == [7, rows[-1]["train_loss"], rows[-1]["val_loss"]]
    train(make_config(trainer__max_steps=50, ckpt_path="last", **options), tmp_path)
    assert last(tmp_path)["global_step"] == 7


# --- checkpoints at the end


@pytest.fixture
def chosen(monkeypatch):
    """``chosen(losses)``: what validations give, in their order."""

    def choose(*left):
        given = iter(left)

        def log_the_next(self):
            self.log_dict({"val_loss": next(given), "val_accuracy": 0.5}, logger=False)

        monkeypatch.setattr(TrainingModule, "on_validation_epoch_end", log_the_next)

    return choose


@pytest.mark.parametrize(("losses", "best"), [([3.0, 2.0, 1.0], 5), ([3.0, 1.0, 2.0], 4)])
def test_the_best_checkpoint_is_that_of_all_validations_the_last_one_included(make_config, tmp_path, chosen, losses, best):
    chosen(*losses)
    train(make_config(trainer__max_steps=5, trainer__val_every=2, trainer__ckpt_every=100), tmp_path)
    assert (last(tmp_path, "best")["global_step"], last(tmp_path)["global_step"]) == (best, 5)


def test_a_run_that_stops_early_is_saved_where_it_stopped_and_the_best_k_stand_beside_it(make_config, tmp_path, chosen, caplog):
    chosen(5.0, 1.0, 3.0, 2.0, *(4.0,) * 11)
    config = make_config(trainer__max_steps=99, trainer__val_every=1, trainer__ckpt_every=98)
    train_with(config, tmp_path, *preset("early_stopping"), *preset("top_k"))
    found = {path.name: read_checkpoint(path)["global_step"] for path in (tmp_path / "checkpoints").iterdir()}
    kept = {f"step={step}-val_loss={loss:.4f}.ckpt": step for step, loss in ((2, 1), (3, 3), (4, 2))}
    assert found == {"best.ckpt": 2, "last.ckpt": 7, **kept}
    again = dataclasses.replace(config, ckpt_path="last")
    train_with(again, tmp_path, *preset("early_stopping"), *preset("top_k"))
    assert last(tmp_path)["global_step"] == 7 and "raise its patience or remove it to resume. Monitored metric" in caplog.text
    (stop,) = preset("early_stopping")
    stop.patience = 7
    train_with(again, tmp_path, stop, *preset("top_k"))
    assert last(tmp_path)["global_step"] == 9 and (stop.patience, stop.wait_count) == (7, 7)
    with pytest.warns(UserWarning, match="EarlyStopping"):
        train(dataclasses.replace(again, trainer=dataclasses.replace(again.trainer, max_steps=11)), tmp_path)
    assert last(tmp_path)["global_step"] == 11


def test_a_run_that_ended_at_a_threshold_is_not_told_of_patience(make_config, tmp_path, chosen, caplog):
    chosen(*(1.0,) * 4)
    config = make_config(trainer__max_steps=9, trainer__val_every=1, trainer__ckpt_every=98)
    for ckpt_path in (None, "last"):
        (stop,) = preset("early_stopping")
        stop.stopping_threshold = 2.0
        train_with(dataclasses.replace(config, ckpt_path=ckpt_path), tmp_path, stop)
    assert (
        last(tmp_path)["global_step"] == 1 and "already ended this run: remove it to resume. Stopping threshold" in caplog.text
    )
