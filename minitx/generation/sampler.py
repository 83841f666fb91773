"""Choose the next token: ``Sampler`` and its filters. A filter sets the logits of excluded ids to −inf."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minitx.nn.transfer import to_device, to_host


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The rule by which ``generate`` chooses the next id: the most probable id, or a random id.

    The steps are applied in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        temperature: 0 takes the most probable id. Otherwise logits are divided by it and an id is drawn.
        top_k: draw from the k most probable ids. See ``keep_top_k``. None: all.
        top_p: draw from the most probable ids whose probabilities sum to at least p. See ``keep_top_p``. None: all.
        min_p: draw from ids with at least this share of the largest probability. See ``keep_min_p``. None: all.
        repetition_penalty: a penalty on ids that are already in the text. See ``penalise_repeats``. 1: none.

    Raises:
        ValueError: a number out of range, or ``top_k``, ``top_p`` or ``min_p`` with ``temperature=0``.

    >>> logits, nothing = torch.tensor([[2.0, 5.0, 3.0]]), torch.zeros(1, 3, dtype=torch.bool)
    >>> Sampler().choose(logits, nothing, None, logits.isfinite().all())
    (tensor([1]), tensor([1]), tensor(True))
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
        """Apply the penalty, the temperature and the filters to logits (B, V). ``seen`` is bool (B, V), True = in the text."""
        if self.repetition_penalty != 1.0:
            logits = penalise_repeats(logits, seen, self.repetition_penalty)
        if self.temperature == 0.0:
            return logits
        logits = apply_temperature(logits, self.temperature)
        logits = logits if self.top_k is None else keep_top_k(logits, self.top_k)
        logits = logits if self.top_p is None else keep_top_p(logits, self.top_p)
        return logits if self.min_p is None else keep_min_p(logits, self.min_p)

    def choose(self, logits: Tensor, seen: Tensor, uniforms: Tensor | None, is_finite: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose one id for each row: the most probable, or with ``uniforms`` (B,) a random one (``draw``).

        Return the ids on the device, the ids on the host, and ``is_finite``, a bool on the device, on the host: the host waits
        for the device only once.
        """
        logits = self.filtered(logits, seen)
        if uniforms is None:
            ids = logits.argmax(-1)
            return ids, *to_host((ids, is_finite))
        probs, is_finite = to_host((logits.softmax(dim=-1), is_finite))
        ids = draw(probs, uniforms)
        return to_device(ids, logits.device), ids, is_finite


def penalise_repeats(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Lower the logits of ids that are already in the text: x / θ for x > 0, else x · θ.

    Keskar et al. 2019, "CTRL", arXiv:1909.05858, §4.1. The paper always divides, but this would raise negative logits.
    ``transformers`` also multiplies them.

    Args:
        logits: (B, V).
        seen: bool (B, V), True = in the text.
        penalty: θ > 0. 1 changes nothing. The paper uses 1.2.

    >>> penalise_repeats(torch.tensor([[3.0, -1.0, 3.0]]), torch.tensor([[True, True, False]]), 2.0).tolist()
    [[1.5, -2.0, 3.0]]
    """
    if not 0.0 < penalty < math.inf:
        raise ValueError(f"repetition_penalty={penalty} must be a positive number (1 for none)")
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Return (x − max x) / T. It has the same softmax as x / T, and does not overflow for a small T.

    Ackley et al. 1985, "A learning algorithm for Boltzmann machines".
    """
    least = torch.finfo(logits.dtype).tiny  # a temperature below it may be rounded to 0
    return (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, least)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k largest logits. Among equal logits, lower ids are kept. Fan et al. 2018, arXiv:1805.04833, §5.1.

    >>> keep_top_k(torch.tensor([[2.0, 5.0, 3.0]]), 2).tolist()
    [[-inf, 5.0, 3.0]]
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"top_k={k} must be a positive integer")
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return logits.scatter(-1, order[..., k:], -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of most probable ids whose probabilities sum to at least p (the nucleus).

    Holtzman et al. 2020, arXiv:1904.09751, §3.1.

    >>> keep_top_p(torch.tensor([[0.5, 0.125, 0.375]]).log(), 0.6).exp().tolist()
    [[0.5, 0.0, 0.375]]
    """
    if not 0.0 < p <= 1.0:
        raise ValueError(f"top_p={p} must be above 0 and at most 1 (1 keeps all ids)")
    if p == 1.0:  # because of rounding, the sum may reach 1 before the last id
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = ranked.softmax(dim=-1)
    dropped = probs.cumsum(dim=-1) - probs >= p  # the sum before the id; 0 for the first, so it is always kept
    return logits.scatter(-1, order, ranked.masked_fill(dropped, -math.inf))


def keep_min_p(logits: Tensor, ratio: float) -> Tensor:
    """Keep the ids with p_i ≥ ratio · max p. Nguyen et al. 2024, arXiv:2407.01082, §3.

    >>> keep_min_p(torch.tensor([[0.5, 0.125, 0.375]]).log(), 0.5).exp().tolist()
    [[0.5, 0.0, 0.375]]
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"min_p={ratio} must be between 0 and 1 (0 keeps all ids)")
    probs = logits.softmax(dim=-1)
    return logits.masked_fill(probs < ratio * probs.amax(dim=-1, keepdim=True), -math.inf)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one id for each row: the first i with p_0 + … + p_i > u.

    The sum is computed on the CPU in float64, so that all devices draw alike: CUDA's cumulative sum is not deterministic, and Apple's
    GPU has no float64.

    Args:
        probs: (B, V), on the CPU.
        uniforms: float64 (B,) in [0, 1), on the CPU. One number for each row.

    >>> draw(torch.tensor([[0.5, 0.0, 0.5]]).repeat(2, 1), torch.tensor([0.4, 0.5], dtype=torch.float64)).tolist()
    [0, 2]
    """
    mass = probs.double().cumsum(dim=-1)
    return torch.searchsorted(mass, (uniforms * mass[:, -1]).unsqueeze(1), right=True).squeeze(1)


def row_uniforms(num_rows: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Return random numbers in [0, 1), float64 (num_rows, length).

    Row i has its own generator, whose seed is the i-th draw from ``generator``. Row i is therefore the same for any ``num_rows``, and
    a longer row begins with the numbers of a shorter one.
    """
    device = "cpu" if generator is None else generator.device
    seeds = torch.randint(2**63 - 1, (num_rows,), generator=generator, device=device)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
    return torch.stack([torch.rand(length, dtype=torch.float64, generator=each, device="cpu") for each in generators])
