"""The score scale: the factor on q·k."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from minitx.config.scale_words import check_scale, evaluate_factor
from minitx.nn.functional import require_number


def scale_multiplier(scale: str | float, head_dim: int) -> float:
    """Return the number that a fixed ``scale`` stands for.

    Args:
        scale: ``inv_sqrt`` is 1/√D (Vaswani et al. 2017, arXiv:1706.03762, §3.2.1). ``inv`` is 1/D (μP; Yang et al. 2022,
            arXiv:2203.03466, §4). ``unscaled`` is 1. ``head_dim^p`` is D to the power p. A number is returned unchanged.
        head_dim: D.

    >>> scale_multiplier("inv_sqrt", 16), scale_multiplier("unscaled", 16), scale_multiplier("inv", 16)
    (0.25, 1.0, 0.0625)
    >>> scale_multiplier("head_dim^-0.75", 16)
    0.125

    Raises:
        ValueError: an unknown word, or ``learned`` or ``log_length``: they are not fixed numbers.
    """
    check_scale(scale)
    if not isinstance(scale, str) or scale.startswith("head_dim"):
        return evaluate_factor(scale, head_dim=head_dim)
    if scale not in ("inv_sqrt", "unscaled", "inv"):
        raise ValueError(f"scale={scale} has no fixed multiplier; use ScoreScale")
    return {"inv_sqrt": head_dim**-0.5, "unscaled": 1.0, "inv": 1.0 / head_dim}[scale]


def check_factor(factor: float) -> None:
    """Raise a TypeError unless ``factor`` is a number, and a ValueError unless it is finite."""
    require_number("factor", factor)
    if not math.isfinite(factor):
        raise ValueError(f"factor={factor} must be finite")


class ScoreScale(nn.Module):
    """The scale c of one attention layer, in the scores c · q·k.

    ``forward(query, counts)`` returns ``(query, multiplier)``. A fixed scale is the multiplier, and the backend applies it. The other
    two scales multiply the query and return 1.0, so that they work with every backend:

    * ``learned``: exp(s_h), with one parameter s_h for each head. It starts at 1/√D.
    * ``log_length``: ln(n_i) / ln(max_len) / √D, where n_i is the number of real keys up to query i. It keeps the entropy of the
      weights from growing with the length (Chiang & Cholak 2022, arXiv:2202.12172; Su 2021).

    Args:
        scale: ``inv_sqrt``, ``unscaled``, ``inv``, ``head_dim^p``, ``learned``, ``log_length`` or a number. ``None`` is an error: it
            could mean 1/√D, as in torch, or no scale.
        head_dim: D.
        num_heads: H. Only ``learned`` needs it.
        max_len: the length at which ``log_length`` equals 1/√D. Only ``log_length`` needs it.
        factor: multiplies the scale.

    Attributes:
        multiplier: the number that a fixed scale stands for, times ``factor``; None for the other scales.

    Raises:
        ValueError: an unknown scale, a factor that is not finite, or a missing ``num_heads`` or ``max_len``.

    >>> query, multiplier = ScoreScale("inv_sqrt", head_dim=16)(torch.ones(1, 1, 1, 16))
    >>> multiplier
    0.25
    """

    def __init__(
        self,
        scale: str | float = "inv_sqrt",
        *,
        head_dim: int,
        num_heads: int | None = None,
        max_len: int | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale, self.head_dim, self.num_heads, self.max_len = scale, head_dim, num_heads, max_len
        check_factor(factor)
        self.factor = float(factor)
        self._fixed = None if scale in ("learned", "log_length") else scale_multiplier(scale, head_dim)
        if scale == "learned":
            if num_heads is None:
                raise ValueError("scale=learned has one scale for each head and needs num_heads, got num_heads=None")
            self.log_scale = nn.Parameter(torch.empty(num_heads))
            self.reset_parameters()
        if scale == "log_length" and (max_len is None or max_len < 2):
            raise ValueError(f"scale=log_length divides by ln(max_len) and needs max_len > 1, got max_len={max_len}")

    def reset_parameters(self) -> None:
        """Set the learned scales to 1/√D."""
        if self.scale == "learned":
            nn.init.constant_(self.log_scale, -0.5 * math.log(self.head_dim))

    @property
    def multiplier(self) -> float | None:
        """The number that multiplies q·k, or None if it depends on the head or the query."""
        is_overridden = type(self).forward is not ScoreScale.forward  # a subclass may compute another scale
        return None if self._fixed is None or is_overridden else self._fixed * self.factor

    @property
    def needs_counts(self) -> bool:
        """Whether ``forward`` needs the number of real keys up to each query."""
        return self.scale == "log_length"

    def forward(self, query: Tensor, counts: Tensor | None = None) -> tuple[Tensor, float]:
        """Return ``(query, multiplier)`` for query (B, H, L, D). ``log_length`` needs counts (B or 1, H or 1, L, 1)."""
        if self.scale == "learned":
            return query * (self.log_scale.exp() * self.factor).to(query.dtype).view(1, -1, 1, 1), 1.0
        if self.scale == "log_length":
            assert counts is not None and self.max_len is not None
            lengths = counts.clamp(min=1).to(torch.promote_types(query.dtype, torch.float32))
            multiplier = lengths.log() * (self.factor / math.log(self.max_len) / math.sqrt(self.head_dim))
            return query * multiplier.to(query.dtype), 1.0
        assert self._fixed is not None
        return query, self._fixed * self.factor

    def extra_repr(self) -> str:
        return f"{self.scale!r}, head_dim={self.head_dim}" + (f", factor={self.factor}" if self.factor != 1.0 else "")
