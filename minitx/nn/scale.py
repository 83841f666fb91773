"""The score scale: what multiplies q·k, and what the words in a config mean."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig, check_scale, evaluate_factor


def scale_multiplier(scale: str | float, head_dim: int) -> float:
    """The multiplier that a fixed ``scale`` stands for.

    ``inv_sqrt`` is 1/√D (Vaswani et al. 2017, arXiv:1706.03762, §3.2.1), ``inv`` 1/D (μP; Yang et al. 2022,
    arXiv:2203.03466, §4), ``unscaled`` 1; ``head_dim^p`` is D to the power p, and a number stands for itself. ``head_dim`` is D.

    >>> scale_multiplier("inv_sqrt", 16), scale_multiplier("unscaled", 16), scale_multiplier("inv", 16)
    (0.25, 1.0, 0.0625)
    >>> scale_multiplier("head_dim^-0.75", 16)
    0.125

    Raises:
        ValueError: a word that needs parameters or lengths (``learned``, ``log_length``), or no word at all.
    """
    check_scale(scale)
    if not isinstance(scale, str) or scale.startswith("head_dim"):
        return evaluate_factor(scale, head_dim=head_dim)
    if scale not in ("inv_sqrt", "unscaled", "inv"):
        raise ValueError(f"scale={scale} has no fixed multiplier; use ScoreScale")
    return {"inv_sqrt": head_dim**-0.5, "unscaled": 1.0, "inv": 1.0 / head_dim}[scale]


class ScoreScale(nn.Module):
    """The scale of one attention layer: ``c`` in c · q·k.

    ``multiplier`` is the number that a fixed scale hands to the backend, else None. ``forward(query, counts)`` returns ``(query,
    multiplier)``: ``learned`` and ``log_length`` multiply the query, and the backend gets 1.0, so that every backend serves them.

    * ``learned``: exp(s_h), one log-scale per head, a parameter initialised to ln(1/√D).
    * ``log_length``: ln(n_i) / ln(max_len) / √D, with n_i the real keys up to query i, which keeps the entropy from
      growing with length (Chiang & Cholak 2022, arXiv:2202.12172; Su 2021).

    Args:
        scale: a word of ``minitx.config.SCALE_WORDS``, ``head_dim^p`` or a number (1 and 1.0 alike). ``None`` is refused: in torch it
            means 1/√D, and a reader would take it for "none".
        head_dim: D.
        num_heads: H; only ``learned`` needs it.
        max_len: only ``log_length`` needs it; longer sequences get a scale above 1/√D.
        factor: multiplies whatever ``scale`` means (dose-response experiments).

    Raises:
        ValueError: another word, a missing ``num_heads`` or ``max_len``.

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
        check_scale(scale)
        self.scale, self.head_dim, self.num_heads, self.factor = scale, head_dim, num_heads, float(factor)
        self.max_len = max_len
        self._fixed = None if scale in ("learned", "log_length") else scale_multiplier(scale, head_dim)
        if scale == "learned":
            if num_heads is None:
                raise ValueError("scale=learned keeps one scale per head and needs num_heads, got num_heads=None")
            self.log_scale = nn.Parameter(torch.empty(num_heads))
            self.reset_parameters()
        if scale == "log_length" and (max_len is None or max_len < 2):
            raise ValueError(f"scale=log_length divides by ln(max_len) and needs max_len > 1, got max_len={max_len}")

    def reset_parameters(self) -> None:
        """The learned log-scales to ln(1/√D); nothing else here has state."""
        if self.scale == "learned":
            nn.init.constant_(self.log_scale, -0.5 * math.log(self.head_dim))

    @property
    def multiplier(self) -> float | None:
        """What a fixed scale multiplies q·k by; None where it depends on the head or the query."""
        is_own = type(self).forward is not ScoreScale.forward  # a subclass multiplies as it likes
        return None if self._fixed is None or is_own else self._fixed * self.factor

    @property
    def needs_counts(self) -> bool:
        """Whether ``forward`` wants the number of real keys up to each query."""
        return self.scale == "log_length"

    def forward(self, query: Tensor, counts: Tensor | None = None) -> tuple[Tensor, float]:
        """query (B, H, L, D); counts (B or 1, 1, L, 1), for ``log_length``."""
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
        factor = f", factor={self.factor}" if self.factor != 1.0 else ""
        return f"{self.scale!r}, head_dim={self.head_dim}{factor}"


@torch.no_grad()
def fold_scale(model: nn.Module, to: str | float = "unscaled", *, factor: float = 1.0) -> nn.Module:
    """Change the score scale of every attention in ``model`` and its weights so that the model stays the same function.

    With c the present multiplier and c' the new one, W_Q and its bias are multiplied by sign(c/c') √|c/c'| and W_K and its bias by
    √|c/c'|: c' (a q)·(b k) = c q·k. Rotary positions, biases, soft-caps and masks are not touched, because they act on what stays
    the same. The model's config is updated.

    Args:
        model: any module that holds ``MultiHeadAttention``; changed in place and returned.
        to: the new ``scale``, a word or a number with a fixed multiplier. factor: the new ``scale_factor``.

    Raises:
        ValueError: no attention in the model; a scale without one multiplier (``learned``, ``log_length``), or of 0; QK-norm, which
            takes the size of q and k away; a core that forms no dot products. Nothing is changed then.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention, x = MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    >>> before = attention(x)
    >>> bool(torch.allclose(fold_scale(attention)(x), before, atol=1e-6)), attention.scale
    (True, ScoreScale('unscaled', head_dim=4))
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(getattr(layer, "scale", None), ScoreScale)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention whose scale could be folded")
    new = {
        name: ScoreScale(to, head_dim=layer.head_dim, num_heads=layer.num_heads, factor=factor)
        for name, layer in layers.items()
    }
    for name, layer in layers.items():
        reasons = {
            f"scale={layer.scale.scale} has no fixed multiplier": layer.scale.multiplier is None,
            f"to={to} has no fixed multiplier": new[name].multiplier is None,
            "a scale of 0 keeps nothing of q and k": 0.0 in (layer.scale.multiplier, new[name].multiplier),
            "qk_norm takes the size of q and k away": layer.qk_norm is not None,
            f"{type(layer.core).__name__} forms no dot products": not getattr(layer.core, "has_dot_products", False),
        }
        for reason, holds in reasons.items():
            if holds:
                raise ValueError(f"cannot fold the scale of {name or type(layer).__name__}: {reason}")
    for name, layer in layers.items():
        ratio = layer.scale.multiplier / new[name].multiplier
        for projection, share in (
            (layer.q_proj, math.copysign(math.sqrt(abs(ratio)), ratio)),
            (layer.k_proj, math.sqrt(abs(ratio))),
        ):
            for parameter in projection.parameters():
                parameter.mul_(share)
        layer.scale = new[name]
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, TransformerConfig):
            module.config = replace(config, scale=to, scale_factor=factor)  # type: ignore[assignment]
    return model
