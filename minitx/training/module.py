"""The LightningModule of a run: a network, an objective, an optimizer and a schedule.

``training_step`` returns Σ · world · accumulate / tokens to Lightning, where Σ is the objective's sum over a micro-batch, and
``tokens`` is the number of targets of the whole optimizer step, known before its first backward pass. Lightning divides by
``accumulate``, and DDP and FSDP average over the ``world`` processes. The gradient of a step is therefore the gradient of Σ /
tokens, however the step is split.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from minitx.config import IGNORED, ConfigError, Part, TrainerConfig
from minitx.config.schema import require
from minitx.data.datamodule import DataModule
from minitx.data.seeding import seed_device
from minitx.data.task import Batch, Task
from minitx.nn.precision import widest_float
from minitx.nn.transfer import to_host
from minitx.training.checkpoint_files import network_weights
from minitx.training.lightning_private import set_micro_batches
from minitx.training.net import MASK_NAMES, Net
from minitx.training.nonfinite import Latch, NonFiniteError, NonFiniteValidationError
from minitx.training.objectives import (
    CrossEntropy,
    Objective,
    Sums,
    build_objective,
    check_same_names,
    checked_sums,
    validation_sums,
)
from minitx.training.optimizers import build_optimizer, check_strategy, freeze, keep_dtypes, skips_on_device
from minitx.training.processes import is_sharded, local_parts, set_gradient_sync, sum_over_processes, total_norm

log = logging.getLogger(__name__)


class TrainingModule(L.LightningModule):
    """Train ``network`` on batches of tensors.

    Args:
        network: a module that returns logits, or an object with ``logits``. It is called with those keys of the batch that are
            parameters of its ``forward``.
        objective: a function of (logits, batch) that returns a sum over the targets, or several sums by name.
        make_optimizer: a function from the network to the optimizer.
        make_schedule: a function from (optimizer, number of steps) to the schedule. The schedule is stepped once per update,
            or, if it is a ``ReduceLROnPlateau``, after each validation with the value of ``options.monitor``.
        options: options of the trainer: ``clip``, ``compile``, ``shard`` and ``monitor``. The module clips gradients itself,
            because Lightning does not support clipping with bf16 and a fused optimizer. Network and objective are compiled as
            one function, and ``network`` itself stays uncompiled, for probes and checkpoints.
        seed: the seed of random draws. In each step, the generators are seeded with (seed, step, micro-batch, rank).

    Attributes:
        step_loss: the contribution of this process to the mean loss of the step.
        step_sums: the other sums of the objective in this step.
        step_targets: the number of targets of the step, on all processes.
        grad_norm: the gradient norm of the whole model, before clipping.
        reached: the parameters that have a gradient from the current micro-batch, or None where nothing reads them.
    """

    def __init__(
        self,
        network: nn.Module,
        objective: Objective,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        make_schedule: Callable[[torch.optim.Optimizer, int], Any],
        options: TrainerConfig | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.network, self.net = network, Net.of(network)
        self.objective, self.make_optimizer, self.make_schedule = objective, make_optimizer, make_schedule
        self.options, self.seed = options or TrainerConfig(), seed
        net = self.net
        maybe_compiled = torch.compile if self.options.compile else lambda function: function
        self._sums_of = maybe_compiled(lambda batch: self.objective(net(batch), batch))
        self._hidden_of = maybe_compiled(lambda inputs: network(**inputs, return_hidden=True))
        self.latch = Latch()
        self.step_loss: Tensor | float = 0.0
        self.step_sums: Sums = {}
        self.step_targets: Tensor | int = 0
        self.grad_norm: Tensor | float = 0.0
        self.reached: set[nn.Parameter] | None = None
        self._micro = 0  # number of micro-batches of this step so far
        self._validation: Sums = {}
        self._has_reported_dropped = False
        self._resumed: dict[str, Any] | None = None  # the checkpoint, until training starts

    def configure_model(self) -> None:
        if self.device_mesh is not None and not any(map(is_sharded, self.network.parameters())):
            from minitx.training.sharding import layers_to_shard, parallelize

            parallelize(self.network, self.device_mesh["data_parallel"], layers_to_shard(self.network, self.options.shard))

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.network)
        schedule = self.make_schedule(optimizer, self.trainer.max_steps)
        if isinstance(schedule, ReduceLROnPlateau):
            # never stepped by Lightning: on_validation_epoch_end does it, before the checkpoint of this step is written
            never = {"interval": "epoch", "frequency": sys.maxsize, "monitor": self.options.monitor}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **never}}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch."""
        return self.net(batch)

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.net.check(batch)  # before the transfer, so that reading a mask does not wait for the device
        return batch

    def on_train_start(self) -> None:
        # a resumed run may have another number of steps, but the optimizer was loaded with a rate of the old schedule
        for schedule in [entry.scheduler for entry in self.trainer.lr_scheduler_configs]:
            if isinstance(schedule, LambdaLR):
                for group, base, factor in zip(
                    schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
                ):
                    group["lr"] = base * factor(schedule.last_epoch)
        if self._resumed is not None:
            # with averaging, state_dict contains the average, in float32 even with bf16-true
            weights = self._resumed.get("current_model_state", self._resumed["state_dict"])
            saved = {name: weight.dtype for name, weight in network_weights({"state_dict": weights}).items()}
            dtypes = {parameter: saved.get(name) for name, parameter in self.network.named_parameters()}
            for optimizer, state in zip(self.trainer.optimizers, self._resumed["optimizer_states"], strict=True):
                keep_dtypes(optimizer, state, dtypes)
            self._resumed = None
        for optimizer in self.trainer.optimizers:  # a checkpoint from another device may name another kernel
            for group in optimizer.param_groups if "fused" in optimizer.defaults else ():
                group["fused"] = optimizer.defaults["fused"]
        if self.trainer.world_size > 2:
            from minitx.training.sharding import fix_buckets

            fix_buckets(self.trainer.strategy.model)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if self._has_reported_dropped:
            return
        # not masks: ``check`` refuses a mask that hides tokens and is not passed
        dropped = [name for name in self.net.dropped(batch) if name not in (*MASK_NAMES, *MASK_NAMES.values())]
        if dropped:
            log.info("model: %s.forward does not use %s of the batch", self.net.kind, ", ".join(dropped))
        self._has_reported_dropped = True

    def sums(self, batch: Batch) -> Sums:
        """Return the objective's sums over a batch."""
        if not isinstance(self.objective, CrossEntropy) or self.objective.chunk_tokens is None:
            return checked_sums(self._sums_of(batch))
        head = self.net.head
        if head is None:
            values = [
                f"model.{key}={getattr(self.net.config, key, None)}" for key in ("head", "head_transform", "logit_softcap")
            ]
            actual = ", ".join(values) if self.net.config is not None else self.net.kind
            raise ConfigError(
                f"objective.chunk_tokens={self.objective.chunk_tokens} needs model.head=lm with a single linear map, got {actual}: "
                "set it to null"
            )
        hidden = self._hidden_of(self.net.inputs(batch))
        weight, *bias = head.parameters()
        require(
            not is_sharded(weight),
            f"objective.chunk_tokens: trainer.shard={[*self.options.shard]} shards the head: set it to null",
        )
        return self.objective.of_hidden(hidden, weight, bias[0] if bias else None, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        accumulate, rank, world = self.trainer.accumulate_grad_batches, self.trainer.global_rank, self.trainer.world_size
        micro, self._micro = self._micro, self._micro + 1
        if not micro:
            self._share_buffers()
        if self.reached is not None:
            self.reached.clear()
        set_gradient_sync(self.network, (batch_idx + 1) % accumulate == 0)
        seed_device(hash_seed(self.seed, self.global_step, micro, rank), self.device)
        sums = self.sums(batch)
        targets = batch["num_targets"]  # number of targets of the step, over all micro-batches and processes
        share = sums["loss"] / targets.clamp(min=1)  # the contribution of this micro-batch to the mean loss
        others = {name: value.detach() for name, value in sums.items() if name not in ("loss", "nll")}
        if micro:
            check_same_names(["loss", *others], ["loss", *self.step_sums])
            self.step_loss = self.step_loss + share.detach()
            self.step_sums = {name: value + self.step_sums[name] for name, value in others.items()}
        else:
            self.step_loss, self.step_sums, self.step_targets = share.detach(), others, targets
        if world > 1:
            # its factor is 1, or NaN if the loss is not finite: then the gradient is NaN in every process, whatever the loss's own gradient
            share = share * (1 + 0 * share.detach())
        return share * world * accumulate

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._micro = 0
        if self.reached is not None or self.options.strategy == "sharded":
            from minitx.training.unused_parameters import check_reached

            check_reached(self.network, self.reached, self.options, self.trainer)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.grad_norm = total_norm(gradients)
        # all ranks must agree, but step_loss is local: with several ranks, check only the global gradient norm
        alone = self.trainer.world_size == 1
        self.latch.check(optimizer, self.grad_norm + self.step_loss if alone else self.grad_norm, self.global_step)
        if self.options.clip is not None:
            factor = (self.options.clip / (self.grad_norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(local_parts(gradients), factor)
        if self.device.type == "cpu" or not skips_on_device(optimizer):
            self.raise_if_nonfinite()

    def raise_if_nonfinite(self) -> None:
        """Raise ``NonFiniteError`` if the latch is set.

        On accelerators, with an optimizer that supports ``found_inf``, the latch is read only at log points, before validations
        and checkpoints, and by callbacks that report on a step; all updates after the first bad step are skipped. Otherwise it
        is read at every step.
        """
        step = self.latch.first_bad_step()
        if step is not None:
            raise NonFiniteError(step, float(self.step_loss), float(self.grad_norm))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.raise_if_nonfinite()  # keep the previous checkpoint

    def on_validation_start(self) -> None:
        self.raise_if_nonfinite()

    def _share_buffers(self) -> None:
        """Give all processes the buffers of the first. Before a validation, averages have taken the place of the weights already."""
        if self.trainer.world_size > 1:
            from minitx.training.sharding import share_buffers

            share_buffers(self)

    on_validation_epoch_start = on_test_epoch_start = _share_buffers

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        sums = validation_sums(self.sums(batch), batch["labels"])
        if self._validation:
            check_same_names(sums, self._validation)
        for name, value in sums.items():  # the filler row of a process without rows must not count
            counted = torch.where(sums["count"] > 0, value, 0).to(widest_float(self.device))
            self._validation[name] = counted + self._validation.get(name, 0)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        means = self._log_means("val")
        monitor = self.options.monitor
        logged = {**self.trainer.callback_metrics, **means}
        if self.trainer.world_size > 1:
            from minitx.training.sharding import check_same

            check_same(self.trainer, f"trainer.monitor={monitor}", logged.get(monitor), "log it in each, with sync_dist=True")
        for schedule in [entry.scheduler for entry in self.trainer.lr_scheduler_configs]:
            if not isinstance(schedule, ReduceLROnPlateau) or self.trainer.sanity_checking:
                continue
            require(
                monitor in logged,
                f"trainer.monitor={monitor} is not logged, but the schedule needs it; logged are: {', '.join(logged)}",
            )
            schedule.step(float(logged[monitor]))

    def on_test_epoch_end(self) -> None:
        self._log_means("test")

    def _log_means(self, split: str) -> Sums:
        """Log the means over the rows of a split on all processes, and return them."""
        # on the host, because callbacks read them one by one
        totals = to_host({name: sum_over_processes(self.trainer, value) for name, value in self._validation.items()})
        self._validation = {}
        count = totals.pop("count")
        if not count:
            log.warning("the %s rows have no loss: none of their labels counts", split)
        means = {f"{split}_{'accuracy' if name == 'correct' else name}": value / count for name, value in totals.items()}
        if split == "val" and count and not math.isfinite(means["val_loss"]):
            raise NonFiniteValidationError(self.global_step, float(means["val_loss"]), float(self.grad_norm))
        # StepLog logs the validation metrics, at the right step. They are sums over the processes: with rank_zero_only, nothing is reduced
        self.log_dict(means, rank_zero_only=True, sync_dist=True, logger=split == "test")
        return means

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Recompute the number of past micro-batches, because ``trainer.accumulate`` may have changed."""
        self._resumed = checkpoint
        set_micro_batches(checkpoint, checkpoint["global_step"] * self.trainer.accumulate_grad_batches)


def hash_seed(*numbers: int) -> int:
    """Return a 63-bit seed for several whole numbers. Neighbouring steps get unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:8], "little") >> 1


# --- building the module


def build_module(
    network: nn.Module,
    data: DataModule,
    objective: Part,
    optimizer: Part,
    schedule: Part,
    options: TrainerConfig,
    seed: int = 0,
) -> TrainingModule:
    """Return a ``TrainingModule`` with network, objective, optimizer and schedule.

    Raises:
        ConfigError: the model cannot be called with the data, or the objective or an optimizer rule does not match the model.
    """
    seed_device(seed)
    net = Net.of(network)
    sums = build_objective(objective)
    row = data.probe_batch(1)
    if isinstance(sums, CrossEntropy):
        check_labels(data.task)
    make_optimizer = partial(build_optimizer, optimizer, head_dim=net.head_dim)

    def make_schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
        return schedule.build(optimizer, max_steps=steps)

    freeze(network, optimizer)  # before the summary and DDP count the trained weights
    check_strategy(make_optimizer(network), options.strategy)  # only a check: training builds its own
    net.check(row, data.task.key_masks.values())
    net.check_documents(row)
    return TrainingModule(network, sums, make_optimizer, make_schedule, options, seed)


def check_labels(task: Task) -> None:
    """Check the labels of data in lists before training. torch would report a wrong label only when it is used, and not by name on a GPU.

    Raises:
        ConfigError: a label is not a class of the task.
    """
    classes = task.model_fields.get("num_labels") if task.kind == "classify" else None
    if classes is None:
        return
    for rows in (task.train, task.val, task.test):
        labels: list[Any] = [row.get("labels") for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []
        for label in labels:
            number = label.item() if getattr(label, "ndim", None) == 0 else label
            is_wrong = isinstance(number, bool | float) or (isinstance(number, int) and not 0 <= number < classes)
            if is_wrong and number != IGNORED:
                raise ConfigError(
                    f"{task.name}: labels must be classes from 0 to {classes - 1}, or {IGNORED} where they do not count, got {number}"
                )
