"""How an id is chosen: filters, pure functions of logits (B, V) that set what they leave out to −inf, and the draw itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How ``generate`` chooses the next id: the likeliest one, or a draw from what the filters leave.

    The filters follow one another in the order of the arguments, the repetition penalty first.

    Args:
        temperature: 0 takes the likeliest id, else logits are divided by it and an id is drawn.
        top_k, top_p, min_p: filters of draws, None for off; see ``keep_top_k``, ``keep_top_p`` and ``keep_min_p``.
        repetition_penalty: on ids that are in the text already, 1 for off; see ``penalise_repeats``.

    Raises:
        ValueError: a number out of range, or a filter of draws where nothing is drawn.

    >>> logits, nothing = torch.tensor([[2.0, 5.0, 3.0]]), torch.zeros(1, 3, dtype=torch.bool)
    >>> Sampler().choose(logits, nothing).tolist()
    [1]
    >>> Sampler(temperature=0.5, top_k=2).filtered(logits, nothing).tolist()
    [[-inf, 0.0, -4.0]]
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be zero (greedy) or a positive number")
        for name in ("top_k", "top_p", "min_p"):
            if getattr(self, name) is not None and self.temperature == 0.0:
                raise ValueError(f"{name}={getattr(self, name)} has no effect without sampling: set temperature above 0")
        self.filtered(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool))  # each filter checks its own number

    def filtered(self, logits: Tensor, seen: Tensor) -> Tensor:
        """logits (B, V) -> those that are chosen from; ``seen`` is bool (B, V), True = in the row's text."""
        if self.repetition_penalty != 1.0:
            logits = penalise_repeats(logits, seen, self.repetition_penalty)
        if self.temperature == 0.0:
            return logits
        logits = apply_temperature(logits, self.temperature)
        logits = logits if self.top_k is None else keep_top_k(logits, self.top_k)
        logits = logits if self.top_p is None else keep_top_p(logits, self.top_p)
        return logits if self.min_p is None else keep_min_p(logits, self.min_p)

    def choose(self, logits: Tensor, seen: Tensor, uniforms: Tensor | None = None) -> Tensor:
        """One id a row: the likeliest, or with ``uniforms`` (B,) a draw, as in ``draw``."""
        logits = self.filtered(logits, seen)
        return logits.argmax(-1) if uniforms is None else draw(logits, uniforms)


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """x / θ where x > 0 and x · θ elsewhere, for the ids that are in the text already.

    Keskar et al. 2019, "CTRL", arXiv:1909.05858, §4.1, who divide by θ throughout, which makes an id with a negative
    logit *likelier*; multiplying there is what ``transformers`` does.

    Args:
        logits: (B, V). seen: bool (B, V), True = in the row's text. penalty: θ > 0; 1 changes nothing, the paper has 1.2.

    >>> penalise_repeats(torch.tensor([[3.0, -1.0, 3.0]]), torch.tensor([[True, True, False]]), 2.0).tolist()
    [[1.5, -2.0, 3.0]]
    """
    if not 0.0 < penalty < math.inf:
        raise ValueError(f"repetition_penalty={penalty} must be a positive number (1 for none)")
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """(x − max x) / T: the softmax of x / T, with nothing that overflows where T is tiny.

    Ackley et al. 1985, "A learning algorithm for Boltzmann machines".
    """
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be a positive number (0 for greedy, in Sampler)")
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k largest logits; among equals, the lower ids. Fan et al. 2018, arXiv:1805.04833, §5.1.

    >>> keep_top_k(torch.tensor([[2.0, 5.0, 3.0]]), 2).tolist()
    [[-inf, 5.0, 3.0]]
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"top_k={k} must be a positive whole number")
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.scatter(-1, order[..., k:], -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The nucleus: the fewest ids, likeliest first, whose probabilities sum to p or more; never none.

    An id stays if the mass of those before it is below p. Holtzman et al. 2020, arXiv:1904.09751, §3.1.

    >>> keep_top_p(torch.tensor([[0.5, 0.125, 0.375]]).log(), 0.6).exp().tolist()
    [[0.5, 0.0, 0.375]]
    """
    if not 0.0 < p <= 1.0:
        raise ValueError(f"top_p={p} must lie in (0, 1] (1 keeps everything)")
    if p == 1.0:  # rounding may bring the mass to 1 before the last id
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ranked.softmax(dim=-1)
    dropped = probs.cumsum(dim=-1) - probs >= p  # never the first, before which there is 0
    return logits.scatter(-1, order, ranked.masked_fill(dropped, -math.inf))


def keep_min_p(logits: Tensor, ratio: float) -> Tensor:
    """The ids with p_i ≥ ratio · max p. Nguyen et al. 2024, arXiv:2407.01082, §3.

    >>> keep_min_p(torch.tensor([[0.5, 0.125, 0.375]]).log(), 0.5).exp().tolist()
    [[0.5, 0.0, 0.375]]
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"min_p={ratio} must lie in [0, 1] (0 keeps everything)")
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < ratio * probs.amax(dim=-1, keepdim=True), -math.inf)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """One id a row from softmax(logits): the first i with p_0 + … + p_i > u. On the CPU, in float64, on every device.

    Args:
        logits: (B, V). uniforms: float64 (B,) in [0, 1), on the CPU: one number a row and step, so that a row draws
            alike whatever stands beside it.

    >>> draw(torch.tensor([[0.5, 0.0, 0.5]]).log().repeat(2, 1), torch.tensor([0.4, 0.5], dtype=torch.float64)).tolist()
    [0, 2]
    """
    mass = logits.softmax(dim=-1).cpu().double().cumsum(dim=-1)
    ids = torch.searchsorted(mass, (uniforms * mass[:, -1]).unsqueeze(1), right=True)
    return ids.squeeze(1).to(logits.device)


def row_uniforms(num_rows: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """float64 (num_rows, length) in [0, 1): row i has a generator of its own, seeded by the i-th draw from ``generator``.

    So row i is the same whatever ``num_rows`` is, and a longer row begins like a shorter one.
    """
    device = "cpu" if generator is None else generator.device
    seeds = torch.randint(2**63 - 1, (num_rows,), generator=generator, device=device)
    own = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
    return torch.stack([torch.rand(length, dtype=torch.float64, generator=each) for each in own])
