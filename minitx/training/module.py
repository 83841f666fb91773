"""The one LightningModule: a network, an objective and an optimizer factory.

The loss handed to Lightning is Σ · world · accumulate / tokens, with the tokens of the *whole* optimizer step known
before its first backward; Lightning divides by ``accumulate``, and DDP and FSDP average over the ``world`` processes that
see different rows, so every split of a step gives the gradient of Σ / tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from minitx.data.addressing import Batch
from minitx.training.checkpoint import FORMAT
from minitx.training.objectives import HeadObjective, Objective, Sums
from minitx.training.parallel import local_parts, parallelize, replicas, set_gradient_sync, sum_over_rows, total_norm

NOT_FOR_THE_NETWORK = ("labels", "num_targets")


def network_inputs(batch: Batch) -> Batch:
    """What of a batch the network is called with."""
    return {name: tensor for name, tensor in batch.items() if name not in NOT_FOR_THE_NETWORK}


class NonFiniteError(RuntimeError):
    """Loss or gradient stopped being finite in update ``step`` (from 0), which was not made."""

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        super().__init__(
            f"loss or gradient is not finite in step {step + 1} (loss {loss:.4g}, gradient norm {grad_norm:.4g}); the "
            "update was not made. Lower optimizer.lr, set optimizer.clip, or let on_nonfinite=record end such runs"
        )
        self.step = step


class TrainingModule(L.LightningModule):
    """Trains ``network`` on batches of tensors.

    Args:
        network: called as ``network(**inputs)`` with the batch's keys other than labels; returns logits.
        objective: (logits, labels) -> ``Sums``.
        make_optimizer: network -> optimizer. lr_factor: step -> factor of the learning rate.
        head_objective: (hidden, the head's weight and bias, labels) -> ``Sums``, in place of ``objective``, for a network whose
            ``head`` is one linear map: no tensor of all logits.
        router_loss: weight of the experts' load-balancing loss; 0 where the network has none. A mean over a micro-batch, so
            that its gradient (unlike that of the objective) depends on how a step is split.
        clip: largest global gradient norm, or None. Clipping is done here, because Lightning refuses it together with
            bf16 and a fused optimizer.
        compile: run the network through ``torch.compile``; ``network`` itself stays plain, for probes and checkpoints.
        seed: random draws in a step come from a generator seeded by (seed, step, micro-batch, rank).
        state: plain data that every checkpoint carries (config, tokenizer).
    """

    def __init__(
        self,
        network: nn.Module,
        objective: Objective,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        lr_factor: Callable[[int], float],
        *,
        head_objective: HeadObjective | None = None,
        router_loss: float = 0.0,
        clip: float | None = None,
        compile: bool = False,
        seed: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.objective, self.make_optimizer, self.lr_factor = objective, make_optimizer, lr_factor
        self.head_objective = head_objective
        self.router_loss, self.clip, self.seed = router_loss, clip, seed
        self.run: Callable[..., Any] = torch.compile(lambda **inputs: network(**inputs)) if compile else network.__call__
        self.state = dict(state or {})
        self.latch = Latch()
        self.step_loss: Tensor | float = 0.0
        self.grad_norm: Tensor | float = 0.0
        self._validation: dict[str, Tensor] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """As in ``nn.Module``."""
        if name == "_current_fx_name":  # Lightning notes the running hook some 40 times a step: 0.07 ms in nn.Module
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def configure_model(self) -> None:
        if self.device_mesh is not None and not any(isinstance(p, DTensor) for p in self.network.parameters()):
            parallelize(self.network, self.device_mesh)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.network)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def forward(self, batch: Batch) -> Tensor:
        """Logits of a batch."""
        return self.run(**network_inputs(batch))

    def sums(self, batch: Batch) -> tuple[Sums, dict[str, Tensor]]:
        """The objective's sums over a batch, and the network's extras where one of them counts."""
        labels = batch["labels"]
        if self.head_objective is None and not self.router_loss:
            return self.objective(self(batch), labels), {}
        hidden, extras = self.run(**network_inputs(batch), return_extras=True)
        head = self.network.get_submodule("head")
        if self.head_objective is None:
            return self.objective(head(hidden), labels), extras
        weight, *bias = local_parts(list(head.parameters()))
        return self.head_objective(hidden, weight, bias[0] if bias else None, labels), extras

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        accumulate, (rank, world) = self.trainer.accumulate_grad_batches, replicas(self.trainer)
        micro = batch_idx % accumulate
        set_gradient_sync(self.network, micro == accumulate - 1)
        seed_device(self.device, hash_seed(self.seed, self.global_step, micro, rank))
        sums, extras = self.sums(batch)
        balance = self.router_loss * extras["router_loss"] if self.router_loss else 0.0
        share = sums.loss / batch["num_targets"]  # this micro-batch's part of the mean loss
        self.step_loss = share.detach() + (self.step_loss if micro else 0.0)
        return share * (world * accumulate) + balance

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.grad_norm = total_norm(gradients)
        # the loss of several ranks is theirs alone: all must come to the same answer, so it is looked at where it is summed
        alone = self.trainer.world_size == 1
        self.latch.check(optimizer, self.grad_norm + self.step_loss if alone else self.grad_norm, self.global_step)
        if self.clip is not None:
            factor = (self.clip / (self.grad_norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(local_parts(gradients), factor)
        if self.device.type == "cpu":
            self.raise_if_nonfinite()

    def raise_if_nonfinite(self) -> None:
        """Read the latch: on CPU before every update, on accelerators (a device sync) at log points only."""
        step = self.latch.first_bad_step()
        if step is not None:
            raise NonFiniteError(step, float(self.step_loss), float(self.grad_norm))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        sums, _ = self.sums(batch)
        for name, value in (("nll", sums.nll.double()), ("correct", sums.correct), ("count", sums.count)):
            self._validation[name] = value + self._validation.get(name, 0)

    def on_validation_epoch_end(self) -> None:
        totals = {name: sum_over_rows(self.trainer, value) for name, value in self._validation.items()}
        self._validation = {}
        count = totals["count"].clamp(min=1)
        means = {"val_loss": totals["nll"] / count, "val_accuracy": totals["correct"] / count}
        self.log_dict(means, rank_zero_only=True, logger=False)  # StepLog writes them, at the right step

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["minitx"] = {**self.state, "format": FORMAT}


class Latch:
    """Remembers the first non-finite step on the device, and skips every update from then on.

    Fused optimizers do nothing where ``optimizer.found_inf`` is 1, so neither check nor skip needs the host.
    """

    def __init__(self) -> None:
        self._step: Tensor | None = None  # -1 as long as all is finite

    def check(self, optimizer: torch.optim.Optimizer, value: Tensor, step: int) -> None:
        """Latch if ``value`` is not finite."""
        bad_now = ~torch.isfinite(value.detach())
        if self._step is None:
            self._step = torch.full_like(bad_now, -1, dtype=torch.long)
        self._step = torch.where(bad_now & (self._step < 0), step, self._step)
        if optimizer.defaults.get("fused"):  # others refuse it; on a CPU the host stops them in time
            optimizer.found_inf = (self._step >= 0).float()  # type: ignore[attr-defined]

    def first_bad_step(self) -> int | None:
        """The first bad step (counted from 0), or None; reads the device."""
        step = -1 if self._step is None else int(self._step)
        return None if step < 0 else step


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generators that this device draws from.

    Not ``torch.manual_seed``: where CUDA is not initialised, each call queues a reseeding with a formatted stack trace.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def hash_seed(*numbers: int) -> int:
    """One 63-bit seed from several whole numbers (a splitmix64 chain): nearby steps get unrelated streams."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1
