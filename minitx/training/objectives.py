"""What is minimised: functions from logits and labels to *sums*, so that the caller divides by the whole step's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from minitx.config import ObjectiveConfig

IGNORED = -100
"""The label of a position that does not count."""


@dataclass(frozen=True)
class Sums:
    """Sums over the labels that count: what is minimised, the plain negative log-likelihood (nats), hits, and how many."""

    loss: Tensor
    nll: Tensor
    correct: Tensor
    count: Tensor


Objective = Callable[[Tensor, Tensor], Sums]


def cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Sums:
    """-Σ ln softmax(logits)[label] over labels that are not -100, in at least float32.

    Args:
        logits: (..., V). labels: int (...), -100 where a position does not count.
        label_smoothing: ε of the uniform share in the target (Szegedy et al. 2016, arXiv:1512.00567, §7).

    >>> sums = cross_entropy(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]]))
    >>> int(sums.count), round(float(sums.loss) / 2, 4)  # ln 4
    (2, 1.3863)
    """
    flat, targets = logits.flatten(0, -2), labels.flatten()
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    nll = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    loss = nll
    if label_smoothing:
        loss = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=label_smoothing)
    with torch.no_grad():
        counted = targets != IGNORED
        correct = ((flat.argmax(-1) == targets) & counted).sum()
    return Sums(loss, nll.detach(), correct, counted.sum())


def build_objective(config: ObjectiveConfig) -> Objective:
    """The function that ``config.name`` names, with its options bound."""
    return partial({"cross_entropy": cross_entropy}[config.name], label_smoothing=config.label_smoothing)
