"""Normalisation layers: LayerNorm, RMSNorm and QK-norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def make_norm(kind: str, width: int, eps: float = 1e-5) -> nn.Module:
    """Return a normalisation layer of torch.

    Args:
        kind: ``layer`` for LayerNorm (Ba et al. 2016, arXiv:1607.06450), ``rms`` for RMSNorm (Zhang & Sennrich 2019,
            arXiv:1910.07467).
        width: the size of the last axis.
        eps: added to the variance or the mean square.

    Raises:
        ValueError: an unknown kind.

    >>> make_norm("rms", 4)(torch.full((1, 4), 3.0)).round(decimals=3).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    norms = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
    if kind not in norms:
        raise ValueError(f"norm={kind!r} must be 'layer' or 'rms'")
    return norms[kind](width, eps=eps)


class QKNorm(nn.Module):
    """Normalise queries and keys in each head, before rotary positions and the scale. This bounds |q·k|.

    * ``rms``, ``layer``: a norm over D, with one gain for queries and one for keys (Dehghani et al. 2023, arXiv:2302.05442).
    * ``l2``: q/‖q‖ and g · k/‖k‖, with one learned g for each key head (Henry et al. 2020, arXiv:2010.04245). g starts at D, so
      that the default scale 1/√D gives the logits √D · cos(q, k).

    Shapes: query (B, H, L, D), key (B, Hkv, S, D). They do not change.

    Args:
        kind: ``rms``, ``layer`` or ``l2``.
        head_dim: D.
        num_kv_heads: Hkv. Only ``l2`` needs it.
        eps: for ``rms`` and ``layer``, added under the square root. For ``l2``, the smallest norm to divide by.

    Raises:
        ValueError: an unknown kind, or ``l2`` without ``num_kv_heads``.

    >>> query, key = QKNorm("rms", 4)(torch.full((1, 2, 3, 4), 5.0), torch.full((1, 1, 3, 4), 7.0))
    >>> query.mean().item(), key.mean().item()
    (1.0, 1.0)
    """

    def __init__(self, kind: str, head_dim: int, *, num_kv_heads: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        self.kind, self.head_dim, self.num_kv_heads, self.eps = kind, head_dim, num_kv_heads, eps
        if kind == "l2":
            if num_kv_heads is None:
                raise ValueError("QKNorm('l2') needs num_kv_heads: it has one gain for each key head")
            self.gain = nn.Parameter(torch.empty(num_kv_heads))
        elif kind in ("rms", "layer"):
            self.query_norm = make_norm(kind, head_dim, eps)
            self.key_norm = make_norm(kind, head_dim, eps)
        else:
            raise ValueError(f"qk_norm={kind!r} must be 'rms', 'layer' or 'l2'")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gain of ``l2`` to D. The norms of the other kinds reset themselves."""
        if self.kind == "l2":
            nn.init.constant_(self.gain, float(self.head_dim))

    def forward(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the normalised query and key. ``key`` is None if the keys come from a cache."""
        if self.kind == "l2":
            unit_query = F.normalize(query, dim=-1, eps=self.eps).to(query.dtype)
            if key is None:
                return unit_query, None
            return unit_query, (F.normalize(key, dim=-1, eps=self.eps) * self.gain.view(1, -1, 1, 1)).to(key.dtype)
        # under autocast the gains are float32, but q and k are not: compute in the gains' dtype and convert back
        high = next(self.query_norm.parameters()).dtype
        normed_query = self.query_norm(query.to(high)).to(query.dtype)
        return normed_query, None if key is None else self.key_norm(key.to(high)).to(key.dtype)
