"""The rehearsal: before a run creates its folder, it tries every stage on two of its rows.

1. The losses and the gradient of the two rows in one batch must equal the sums over the single rows. This holds if the
   objective returns sums and rows do not influence each other.
2. The run is performed on these rows in a temporary folder: one step with clipping, optimizer and schedule, a validation, a
   probe, samples, a checkpoint that is loaded again, and the evaluation at the end.

Afterwards, weights, buffers, attributes and random generators are restored. A rehearsal does not change any number of the run.

Each process of a run rehearses alone, on its own device and with the whole model. All have the same rows and seeds, so they come to
the same result, and none waits for another.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from minitx.config import ConfigError, Part
from minitx.config.schema import first_line
from minitx.data.datamodule import DataModule
from minitx.data.seeding import Draw, kept_generators
from minitx.data.splits import Split
from minitx.data.task import Batch, counting, num_targets, select_rows
from minitx.nn.modes import evaluating, restored
from minitx.training import StoppedError
from minitx.training.checkpoint_files import load_weights, network_weights, read_checkpoint
from minitx.training.devices import device_of
from minitx.training.fit import Run
from minitx.training.module import TrainingModule
from minitx.training.nonfinite import NonFiniteError
from minitx.training.processes import as_one_process
from minitx.training.trainer import AtomicCheckpointIO

log = logging.getLogger(__name__)

TOLERANCE = 0.02
"""The largest relative difference between two rows in one batch and in two. bfloat16 has a precision of eight bits."""

NOISE = 0.02
"""The standard deviation of noise that is added to the weights, because a head that starts at zero would hide faults of the objective."""

ROWS = 16
"""The two rows are chosen from this number of training rows."""

SHAPES_ONLY_ABOVE = 50_000_000
"""Number of bytes of weights above which a checkpoint of the rehearsal stores only shapes."""

KNOWN = ("lightning.", "minitx.")
"""Packages whose callbacks take part in the rehearsal."""


def rehearse(run: Run) -> None:
    """Rehearse a run. If a row of data leaves a parameter without a gradient, prepare a run of several processes for it.

    Raises:
        ConfigError: a step, a validation, a checkpoint or another stage of the run fails, or the results of two rows in one
            batch are not the sums over the single rows. The message begins with the path of the faulty part.
    """
    module, options = run.module, run.module.options
    rows = run.data.first_rows(ROWS)
    two, is_alone = TwoRows(rows), options.world_size == 1
    with as_one_process() as number:
        device = device_of(options.accelerator, number)
        try:
            with restored_afterwards(module, device), naming_faulty_part(module, run.callbacks):
                compare_rows(module, two.batch, device)
                reached = [] if is_alone else reached_by_each(module, rows, device)
                with tempfile.TemporaryDirectory() as folder, _noting_gradients(module, is_alone) as reached_in_training:
                    _fit_and_load(shortened(run, two, device), Path(folder))
        except ConfigError as error:
            if options.strategy != "sharded" or not isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            log.info("trainer.rehearse: the run is not rehearsed, because %s cannot hold the whole model", device)
            return
    if not is_alone:
        from minitx.training.unused_parameters import prepare_for_unused

        module.options = prepare_for_unused(module.network, options, [*reached, reached_in_training])


def _noting_gradients(module: TrainingModule, is_alone: bool) -> AbstractContextManager[set[nn.Parameter]]:
    """A context for the set of parameters that get a gradient in it. A run of one process does not need it."""
    if is_alone:
        return nullcontext(set())
    from minitx.training.unused_parameters import reached_by_gradients

    return reached_by_gradients(module.network)


def _fit_and_load(run: Run, folder: Path) -> None:
    """Fit the run, and load its checkpoint."""
    network = run.module.network
    size = sum(tensor.nbytes for tensor in (*network.parameters(), *network.buffers()))
    try:
        run.fit(folder, checkpoints=ShapesOnly() if size > SHAPES_ONLY_ABOVE else None)
    except NonFiniteError:
        return  # the run itself reports it, or records it with on_nonfinite=record
    if run.module.options.ckpt_every:
        _load_saved(network, folder / "checkpoints" / "last.ckpt")


def _load_saved(network: nn.Module, path: Path) -> None:
    try:
        checkpoint = read_checkpoint(path)
    except ConfigError as error:
        raise ConfigError(
            "model: a checkpoint of this run cannot be loaded, because it contains objects other than tensors and plain data, for "
            "example the result of get_extra_state"
        ) from error
    load_weights(network, network_weights(checkpoint))


class ShapesOnly(AtomicCheckpointIO):
    """Write checkpoints with an expanded zero for each tensor, so that the file is small for any model."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(_shapes(checkpoint), path)


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    if isinstance(value, Mapping):
        return {key: _shapes(entry) for key, entry in value.items()}
    return type(value)(map(_shapes, value)) if type(value) in (list, tuple) else value


class TwoRows(Split):
    """Two rows of a padded batch: the row with the fewest counted labels (at least one), and a row with different labels."""

    def __init__(self, batch: Batch) -> None:
        labels = batch["labels"].flatten(1) if batch["labels"].dim() > 1 else batch["labels"][:, None]
        counts = counting(labels).sum(1)
        rows = [row for row in counts.argsort(stable=True).tolist() if counts[row]] or [0]
        other = next((row for row in reversed(rows) if not labels[row].equal(labels[rows[0]])), rows[-1])
        chosen = select_rows(batch, [rows[0], other])
        self.batch = {name: value for name, value in chosen.items() if name != "num_targets"}

    def __len__(self) -> int:
        return 2

    def collate(self, items: Any, draw: Draw) -> Batch:
        return select_rows(self.batch, items.tolist())


# --- two rows in one batch and in two


def compare_rows(module: TrainingModule, batch: Batch, device: torch.device) -> None:
    """Check that the results of two rows in one batch are the sums over the single rows. Noise is added to the weights.

    Raises:
        ConfigError: the sums differ, for example because the objective returns a mean, or because one row influences the other.
    """
    network = module.network.to(device)
    batch = {name: value.to(device) for name, value in batch.items()}
    rows = [select_rows(batch, [row]) for row in range(len(batch["labels"]))]
    with evaluating(network), torch.enable_grad(), restored(network):
        _add_noise(network)
        together, again, apart = (_sums_over(module, batches) for batches in ([batch], [batch], rows))
    for name, value in together.items():
        sum_apart, is_random = apart[name], not math.isclose(value, again[name], rel_tol=1e-3, abs_tol=1e-12)
        if not math.isfinite(value) or is_random:
            continue  # results are random, or overflow: the run reports the latter
        if abs(value - sum_apart) > TOLERANCE * max(abs(value), abs(sum_apart)):
            raise ConfigError(
                f"objective: {name} of two rows in one batch is {value:.4g}, but {sum_apart:.4g} in two batches: it must return sums "
                "over the targets, and rows must not influence each other (a contrastive loss, which needs this, trains with "
                "trainer.rehearse=false)"
            )


def reached_by_each(module: TrainingModule, batch: Batch, device: torch.device) -> list[set[nn.Parameter]]:
    """Return the parameters that get a gradient from each row of a batch."""
    reached = []
    with evaluating(module.network), torch.enable_grad():
        for row in range(len(batch["labels"])):
            with _noting_gradients(module, is_alone=False) as reached_now:
                _sums_over(module, [{name: value.to(device) for name, value in select_rows(batch, [row]).items()}])
            reached.append(reached_now)
    return reached


def _sums_over(module: TrainingModule, batches: Iterable[Batch]) -> dict[str, float]:
    """Return the sums of the objective over batches, and the norm of the gradient."""
    known = set(module.network.parameters())
    weights = [weight for weight in module.network.parameters() if weight.requires_grad]
    module.network.zero_grad(set_to_none=True)
    totals: dict[str, float] = {}
    for batch in batches:
        module.net.check(batch)
        sums = module.sums({**batch, "num_targets": num_targets(batch["labels"])})
        if sums["loss"].requires_grad:
            for leaf in _leaves(sums["loss"]):
                if leaf not in known:
                    raise ConfigError(
                        f"objective: the loss depends on a weight of shape {tuple(leaf.shape)} outside of the model, but no optimizer trains "
                        "it: move it into the model, or set its requires_grad to False"
                    )
            sums["loss"].backward()
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + float(value.detach())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return {**totals, "the gradient": float(nn.utils.get_total_norm(gradients))}


def _leaves(loss: Tensor) -> Iterator[nn.Parameter]:
    """The parameters that a loss depends on, from its graph."""
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
                yield leaf


@torch.no_grad()
def _add_noise(network: nn.Module) -> None:
    draw = torch.Generator().manual_seed(0)
    for weight in network.parameters():
        if weight.requires_grad:
            weight.add_(NOISE * torch.randn(weight.shape, generator=draw).to(weight))


# --- the run, shortened


def shortened(run: Run, two: TwoRows, device: torch.device) -> Run:
    """Return the run of the rehearsal: every stage once, on two rows and one device, without the loggers and callbacks of the user.

    Those may send or write something.
    """
    module, options = run.module, run.module.options
    steps = options.max_steps
    callbacks = known_callbacks(run.callbacks)
    changes: dict[str, Any] = {
        "max_steps": 1,
        "accumulate": 1,
        "val_every": 0,
        "val_batches": 1,
        "val_batch_size": 2,
        "log_every": 1,
    }
    changes |= {"ckpt_every": int(options.ckpt_every > 0), "compile": False, "profiler": None}
    changes |= {"devices": 1, "num_nodes": 1, "strategy": "auto", "shard": ()}
    if _has_own(run.callbacks):
        changes["monitor"] = "val_loss"  # only a callback of the user may log another metric

    def make_schedule(optimizer: torch.optim.Optimizer, max_steps: int) -> Any:
        return module.make_schedule(optimizer, steps or max_steps)

    parts = module.network, module.objective, module.make_optimizer, make_schedule
    one_device = {"strategy": SingleDeviceStrategy(device), "devices": [device.index] if device.index else 1}
    short = dataclasses.replace(options, **changes, extra={**options.extra, **one_device, "limit_test_batches": 1})
    data = DataModule(
        dataclasses.replace(run.data.task, train=two, bucket=False, baselines=dict),
        batch_size=min(len(two), max(1, run.data.batch_size // (options.accumulate * options.world_size))),
        seed=module.seed,
        val_batch_size=2,
    )
    return dataclasses.replace(
        run,
        module=TrainingModule(*parts, short, module.seed),
        data=data,
        callbacks=callbacks,
        loggers={},
        evaluation=dataclasses.replace(run.evaluation, num_rows=2),
        on_nonfinite="stop",
        ckpt_path=None,
        resumed_step=0,
    )


SHORT = {"every": 1, "weights_every": 1, "max_new_tokens": 4}
"""The largest values of some arguments of callbacks in a rehearsal."""


def known_callbacks(parts: Mapping[str, Part | None]) -> dict[str, Part]:
    """Return the callbacks of Lightning and minitx that write only to the run's folder, with the values of ``SHORT``.

    The user's callbacks may log any metric. If there are any, callbacks that monitor a metric are left out.
    """
    has_own = _has_own(parts)
    known = {
        name: part
        for name, part in parts.items()
        if part is not None
        and name != "progress"
        and part.name.startswith(KNOWN)
        and part.get("dirpath") is None
        and not (has_own and part.get("monitor") is not None)
    }
    limits = {name: {key: most for key, most in SHORT.items() if (part.get(key) or 0) > most} for name, part in known.items()}
    return {name: part.with_(**limits[name]) if limits[name] else part for name, part in known.items()}


def _has_own(parts: Mapping[str, Part | None]) -> bool:
    """Whether one of the callbacks is the user's."""
    return any(part is not None and not part.name.startswith(KNOWN) for part in parts.values())


# --- naming errors, and restoring state


@contextmanager
def naming_faulty_part(module: TrainingModule, callbacks: Mapping[str, Part | None]) -> Iterator[None]:
    """A context that turns any error but ``StoppedError`` into a ConfigError whose message begins with the path of the faulty part."""
    try:
        yield
    except (ConfigError, StoppedError):
        raise
    except Exception as error:
        places = [*traceback.walk_tb(error.__traceback__)]
        path = next(filter(None, (_path_of(frame, module, callbacks) for frame, _ in reversed(places))), "a step of this run")
        frame, number = _place_to_name(places)
        line = f"{Path(frame.f_code.co_filename).name}:{number}"
        message = f"{path}: fails in the rehearsal of this run: {type(error).__name__}: {first_line(error)} ({line})"
        raise ConfigError(message) from error


def _place_to_name(places: Sequence[tuple[FrameType, int]]) -> tuple[FrameType, int]:
    """Return the innermost line of the user's code that minitx called, or else the innermost line of minitx."""

    def is_ours(place: tuple[FrameType, int]) -> bool:
        return str(place[0].f_globals.get("__name__", "")).partition(".")[0] == "minitx"

    called = list(itertools.dropwhile(lambda place: not is_ours(place), places))
    ours = [place for place in called if is_ours(place)]
    users = [place for place in called if not is_ours(place) and "site-packages" not in place[0].f_code.co_filename]
    return (users or ours or list(places))[-1]


def _path_of(frame: FrameType, module: TrainingModule, callbacks: Mapping[str, Part | None]) -> str:
    """Return the path of the part whose method or function a frame executes, or an empty string."""
    owner = frame.f_locals.get("self")
    if owner is module.objective or frame.f_code is getattr(module.objective, "__code__", None):
        return "objective"
    if isinstance(owner, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(owner, torch.optim.lr_scheduler.LRScheduler):
        return "schedule"
    if isinstance(owner, nn.Module) and any(part is owner for part in module.network.modules()):
        return "model"
    if isinstance(owner, L.Callback):
        names = [name for name, part in callbacks.items() if part is not None and part.target is type(owner)]
        return f"callbacks.{(names or [type(owner).__name__.lower()])[0]}"
    return ""


@contextmanager
def restored_afterwards(module: TrainingModule, device: torch.device) -> Iterator[None]:
    """A context that restores the network, the objective and the random generators, and logs only errors."""
    level = logging.root.manager.disable
    with kept_generators(device), restored(module.network, module.objective):
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(level)
