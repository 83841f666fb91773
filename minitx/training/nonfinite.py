"""Losses and gradients that are not finite: the errors, and the latch that skips updates from the first such step on."""

from __future__ import annotations

import torch
from torch import Tensor

from minitx.config.failures import FailedRunError
from minitx.training.optimizers import skips_on_device


class NonFiniteError(FailedRunError):
    """The loss or the gradient was not finite in step ``step``, counted from 0. The update of this step was skipped."""

    phase = "training"

    def __init__(self, step: int, loss: float, grad_norm: float) -> None:
        super().__init__(step, loss, grad_norm)  # unchanged arguments, so that the error can be pickled
        self.step, self.loss, self.grad_norm = step, loss, grad_norm

    def __str__(self) -> str:
        return (
            f"loss or gradient is not finite in step {self.step + 1} (loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}); "
            "the update was skipped. Lower optimizer.lr, set trainer.clip, or set on_nonfinite=record"
        )


class NonFiniteValidationError(NonFiniteError):
    """The validation loss after ``step`` updates is not finite."""

    phase = "validation"

    def __str__(self) -> str:
        return (
            f"the validation loss after step {self.step} is not finite ({self.loss:.4g}). Lower optimizer.lr, or set "
            "on_nonfinite=record"
        )


class Latch:
    """Store the first non-finite step on the device, and skip all updates from this step on.

    ``step`` is the first non-finite step, counted from 0, or -1. It is copied from the device at most once after each
    ``check``.

    Fused optimizers skip an update if ``optimizer.found_inf`` is 1, so neither the check nor the skip waits for the host. For
    an optimizer without ``found_inf`` (most optimizers that are not fused), the host checks at every step.
    """

    def __init__(self) -> None:
        self.step: Tensor | int = -1
        self._read: int | None = None  # the value of ``step`` on the host, if it was read since the last check

    def check(self, optimizer: torch.optim.Optimizer, value: Tensor, step: int) -> None:
        """Set the latch if ``value`` is not finite."""
        bad_now = ~torch.isfinite(value.detach())
        if not isinstance(self.step, Tensor):
            self.step = torch.full_like(bad_now, -1, dtype=torch.long)
        self.step, self._read = torch.where(bad_now & (self.step < 0), step, self.step), None
        if skips_on_device(optimizer):  # other optimizers do not support it, and the host checks before their update
            optimizer.found_inf = (self.step >= 0).float()  # type: ignore[attr-defined]

    def note(self, step: int) -> None:
        """Set the value on the host, if a caller has read ``step`` together with other numbers."""
        self._read = step

    def first_bad_step(self) -> int | None:
        """Return the first non-finite step (counted from 0), or None. This waits for the device unless the value is known."""
        self._read = int(self.step) if self._read is None else self._read
        return None if self._read < 0 else self._read
