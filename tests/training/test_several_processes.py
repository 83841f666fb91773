"""What one process refuses or serves, several do: mistakes that a rehearsal finds, and parameters without a gradient."""

import functools
import logging
import math
import os
import time
import warnings
from unittest import mock

import lightning.pytorch as L
import pytest
import torch
from extra import fit, losses_of, train_with
from ranks import run_ranks
from torch import nn

from minitx.config import ConfigError, RunConfig, TrainerConfig, node
from minitx.data.task import Task
from minitx.training import rank
from minitx.training.metrics_csv import read_metrics
from minitx.training.nonfinite import NonFiniteError
from minitx.training.unused_parameters import FIND_UNUSED, UnusedParametersError, prepare_for_unused

ROWS = [{"input": torch.tensor([float(i % 7), float(i % 5), 1.0]) / 7, "labels": i % 2} for i in range(32)]
PLACES = {"ddp": {"strategy": "ddp"}, "sharded": {"strategy": "sharded", "shard": ("Linear",)}}


class Pooled(nn.Module):
    """A model with a layer that its output does not depend on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.pooler = nn.Linear(3, 2), nn.Linear(3, 3)

    def forward(self, input):
        return self.head(input)


class Routed(nn.Module):
    """A mixture: each row goes through one of two layers, and a layer without rows is not called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(2))

    def forward(self, input):
        chosen = (input[:, 0] > 0.4).long()
        output = input.new_zeros(len(input), 2)
        for number, expert in enumerate(self.experts):
            if (rows := chosen == number).any():
                output = output.index_put((rows.nonzero()[:, 0],), expert(input[rows]))
        return output


def broken_on_one_rank(logits, batch):
    """A loss that is NaN in one process, with a gradient that is finite."""
    is_broken = torch.is_grad_enabled() and os.environ.get("RANK") == "1"
    return total(logits, batch) + (float("nan") if is_broken else 0.0)


class OfOneProcess(L.Callback):
    """Logs a metric that is not reduced over the processes.

    Args:
        ranks: the processes that log it.
    """

    def __init__(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.ranks = ranks

    def on_validation_epoch_end(self, trainer, module):
        if trainer.global_rank in self.ranks:
            module.log("val_place", (-1.0) ** trainer.global_rank * trainer.global_step, rank_zero_only=len(self.ranks) == 1)


class Late(nn.Module):
    """A model that leaves out its second layer after two steps of training, which no rehearsal can know.

    Args:
        ranks: the processes that do so.
        instead: whether another layer of the same shape takes its place.
    """

    def __init__(self, ranks, instead):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.calls, self.ranks = Layers(instead), 0, ranks

    def forward(self, input):
        self.calls += self.training
        return self.layers(input, self.calls > 2 and int(os.environ["RANK"]) in self.ranks)


class Layers(nn.Module):
    def __init__(self, instead):
        super().__init__()
        self.head, self.second = nn.Linear(3, 2), nn.Linear(3, 3)
        self.third = nn.Linear(3, 3) if instead else nn.Identity()

    def forward(self, input, is_late):
        return self.head((self.third if is_late else self.second)(input))


def total(logits, batch):
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")


def mean(logits, batch):
    return nn.functional.cross_entropy(logits, batch["labels"])


def outcome(folder, network, objective, **options):
    """The losses of a run, or its error's name and message."""
    data = Task(name="mine", train=ROWS, val=ROWS[:6])
    options = {"rehearse": True, "max_steps": 3, "val_every": 0, "val_batch_size": 4, **options}
    try:
        fit(folder, data, model=network(), objective=objective, batch_size=8, **options)
    except (ConfigError, NonFiniteError, UnusedParametersError) as error:
        return type(error).__name__, str(error)
    return losses_of(folder)


def outcomes(root, cases):
    return {name: outcome(root / name, network, objective, **options) for name, (network, objective, options) in cases.items()}


CASES = {
    f"{name}-{place}": (network, objective, {"devices": 2, **options})
    for place, options in PLACES.items()
    for name, network, objective in (("pooled", Pooled, total), ("mean", Pooled, mean), ("routed", Routed, total))
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """``found(place)``: what each of two processes makes of the cases there, in one process group, and what one process makes of them."""

    @functools.cache
    def of(place):
        root = tmp_path_factory.mktemp(place)
        cases = {name.partition("-")[0]: case for name, case in CASES.items() if name.endswith(place)}
        alone = {name: outcome(root / f"alone-{name}", *case[:2]) for name, case in cases.items()}
        return *run_ranks(2, outcomes, root, cases), alone

    return of


PLACED = ["ddp", pytest.param("sharded", marks=pytest.mark.slow)]


@pytest.mark.parametrize("place", PLACED)
def test_every_process_refuses_a_mean_as_one_does(found, place):
    for result in (each["mean"] for each in found(place)):
        assert result == found(place)[-1]["mean"]
        assert result[0] == "ConfigError"
        assert result[1].startswith("objective: loss of two rows in one batch")


@pytest.mark.parametrize("place", PLACED)
def test_a_parameter_without_a_gradient_does_not_stop_several_processes(found, place):
    first, second, alone = found(place)
    for name in ("pooled", "routed") if place == "ddp" else ("pooled",):
        assert first[name] == second[name] == pytest.approx(alone[name], rel=1e-5)


def test_a_row_without_targets_makes_no_parameter_unused():
    network, options = Pooled(), TrainerConfig(devices=2, strategy="ddp")
    assert prepare_for_unused(network, options, [{*network.parameters()}, set()]) == options
    changed = prepare_for_unused(network, options, [{*network.head.parameters()}, {*network.parameters()}])
    assert changed.strategy == "ddp_find_unused_parameters_true"


@pytest.mark.slow
def test_every_process_refuses_a_folder_that_it_cannot_create(tmp_path):
    (tmp_path / "file").touch()
    for kind, message in run_ranks(2, outcome, tmp_path / "file" / "run", Pooled, total, devices=2, strategy="ddp"):
        assert kind == "ConfigError"
        assert message.endswith("file/run cannot be written: Not a directory")


def of_one_process(folder, **options):
    """The outcome of a run with ``OfOneProcess``, and the warnings of Lightning about metrics."""
    options = {"devices": 2, "val_every": 1, "schedule": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau"}, **options}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = outcome(folder, Pooled, total, rehearse=False, **options)
    return result, [str(warning.message) for warning in caught if "sync_dist" in str(warning.message)]


@pytest.mark.parametrize("ranks", [(0, 1), pytest.param((0,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("place", PLACED)
def test_a_monitored_metric_of_one_process_ends_all_processes(tmp_path, ranks, place):
    """Otherwise they train with different rates, or one waits for the others to write best.ckpt."""
    callbacks = {"mine": node(OfOneProcess, ranks=[*ranks])}
    options = {**PLACES[place], "strategy": FIND_UNUSED if place == "ddp" else "sharded"}
    results = run_ranks(2, of_one_process, tmp_path / "run", callbacks=callbacks, monitor="val_place", **options)
    for (kind, message), _ in results:
        assert kind == "ConfigError"
        assert message.startswith("trainer.monitor=val_place differs between the processes")


@pytest.mark.slow
def test_lightning_warns_of_a_metric_of_one_process_but_not_of_ours(tmp_path):
    options = {"strategy": FIND_UNUSED, "callbacks": {"mine": node(OfOneProcess)}}
    (losses, caught), (of_second, _) = run_ranks(2, of_one_process, tmp_path / "run", **options)
    assert losses == of_second
    assert len(losses) == 3
    assert len(caught) == 1
    assert "self.log('val_place', ..., sync_dist=True)" in caught[0]


def in_detail(folder):
    """What torch says with ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` if the second process leaves out a layer."""
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    torch.distributed.set_debug_level_from_env()
    late, place = functools.partial(Late, (1,), instead=False), {"strategy": "sharded", "shard": ("Linear",)}
    with pytest.raises(RuntimeError) as caught:
        outcome(folder, late, total, devices=2, max_steps=5, **place)
    return str(caught.value)


@pytest.mark.slow
def test_torch_names_the_operations_of_processes_that_leave_out_different_layers(tmp_path):
    for message in run_ranks(2, in_detail, tmp_path / "run"):
        assert message.startswith("Detected mismatch between collectives on ranks")


def of_two_machines(folder):
    """What a run says if the second process has a processor without bfloat16."""
    with mock.patch("minitx.training.trainer.cpu_precision", return_value="32-true" if rank() else "bf16-mixed"):
        return outcome(folder, Pooled, total, devices=2, strategy="ddp_find_unused_parameters_true", rehearse=False)


@pytest.mark.slow
def test_processes_with_two_precisions_refuse_to_train_together(tmp_path):
    for kind, message in run_ranks(2, of_two_machines, tmp_path / "run"):
        assert kind == "ConfigError"
        assert "differs between the processes: set trainer.precision=32-true" in message


class Jump(L.Callback):
    """In step 3 the clock of the machine goes two hours back, and in step 5 four hours ahead. Notes the steps of checkpoints."""

    def __init__(self):
        self.saved = []

    def on_train_batch_start(self, trainer, *_):
        now, hours = time.time, {2: -2, 4: 4}.get(trainer.global_step, 0)
        time.time = lambda: now() + 3600 * hours

    def on_save_checkpoint(self, trainer, *_):
        self.saved.append(trainer.global_step)


def over_a_jump(folder, devices):
    """The rows of ``metrics.csv``, the log, the steps of checkpoints and the seconds of a run whose clock jumps."""
    lines, jump, clock, start = [], Jump(), time.time, time.perf_counter()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("minitx").addHandler(handler)
    logging.getLogger("minitx").setLevel(logging.INFO)
    options = {"max_steps": 6, "val_every": 3, "ckpt_every": 100, "ckpt_minutes": 30, "log_every": 1, "rehearse": False}
    if devices > 1:
        options |= {"devices": devices, "strategy": "ddp_find_unused_parameters_true"}
    progress = {"progress": {"_target_": "minitx.training.progress.progress"}}
    config = RunConfig(trainer=TrainerConfig(accelerator="cpu", **options), callbacks=progress)
    try:
        train_with(config, folder, jump, data=Task(name="mine", train=ROWS, val=ROWS[:6]), model=Pooled(), objective=total)
    finally:
        time.time = clock
        logging.getLogger("minitx").removeHandler(handler)
    return read_metrics(folder / "metrics.csv"), lines, jump.saved, time.perf_counter() - start


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_clock_that_jumps_changes_no_column_no_checkpoint_and_no_remaining_time(tmp_path, devices):
    (rows, lines, saved, elapsed), *_ = run_ranks(devices, over_a_jump, tmp_path / "run", devices)
    seconds = [row["seconds"] for row in rows]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert seconds == sorted(seconds) and seconds[0] >= 0 and seconds[-1] <= elapsed
    assert all(0 < row["tokens_per_second"] < math.inf for row in rows)
    assert sorted(set(saved)) == [3, 6]  # best.ckpt after a validation, and last.ckpt
    [rate] = [line.split()[-4] for line in lines if line.startswith("step 6/6") and line.endswith("steps/s  0:00:00 left")]
    assert float(rate) > 6 / elapsed - 0.1


@pytest.mark.slow
def test_fsdp_refuses_a_parameter_that_some_rows_do_not_reach(found):
    for result in found("sharded")[:2]:
        kind, message = result["routed"]
        assert kind == "ConfigError"
        assert message.startswith("model: experts.0.weight, experts.1.weight get no gradient from some rows")


@pytest.mark.slow
def test_ddp_names_a_parameter_that_loses_its_gradient_during_training(tmp_path):
    late = functools.partial(Late, (0, 1), instead=False)
    for kind, message in run_ranks(2, outcome, tmp_path / "run", late, total, devices=2, max_steps=5):
        assert kind == "UnusedParametersError"
        assert message.startswith("model: layers.second.weight, layers.second.bias get no gradient from step 3")


@pytest.mark.slow
def test_fsdp_adds_no_gradient_of_one_parameter_to_that_of_another(tmp_path):
    late, place = functools.partial(Late, (1,), instead=True), {"strategy": "sharded", "shard": ("Layers",)}
    for kind, message in run_ranks(2, outcome, tmp_path / "run", late, total, devices=2, max_steps=5, **place):
        assert kind == "UnusedParametersError"
        assert "get no gradient from step 3 in some processes only" in message


@pytest.mark.slow
def test_ddp_that_looks_for_unused_parameters_trains_a_model_that_leaves_them_out_late(tmp_path):
    late, options = functools.partial(Late, (0, 1), instead=False), {"strategy": "ddp_find_unused_parameters_true"}
    first, second = run_ranks(2, outcome, tmp_path / "run", late, total, devices=2, max_steps=5, **options)
    assert first == second
    assert len(first) == 5


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_loss_that_is_not_finite_in_one_process_ends_all_before_the_update(tmp_path, place):
    options = {"devices": 2, "log_every": 10, "rehearse": False, **PLACES[place]}
    if place == "ddp":
        options["strategy"] = "ddp_find_unused_parameters_true"
    for kind, message in run_ranks(2, outcome, tmp_path / "run", Pooled, broken_on_one_rank, **options):
        assert kind == "NonFiniteError"
        assert "step 1" in message
