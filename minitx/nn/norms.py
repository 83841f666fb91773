"""Norms of the residual stream, and QK-norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def make_norm(kind: str, width: int, eps: float = 1e-5) -> nn.Module:
    """torch's norm of that name.

    Args:
        kind: ``layer``: LayerNorm (Ba et al. 2016, arXiv:1607.06450); ``rms``: RMSNorm (Zhang & Sennrich 2019,
            arXiv:1910.07467).
        width: of the last axis.
        eps: added to variance or mean square.

    Raises:
        ValueError: another kind.

    >>> make_norm("rms", 4)(torch.full((1, 4), 3.0)).round(decimals=3).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    if kind == "layer":
        return nn.LayerNorm(width, eps=eps)
    if kind == "rms":
        return nn.RMSNorm(width, eps=eps)
    raise ValueError(f"norm={kind!r} must be 'layer' or 'rms'")


class QKNorm(nn.Module):
    """Normalise queries and keys per head, before rotary and scale, which bounds |q·k|.

    * ``rms``, ``layer``: a norm over D with its own gain for queries and for keys (Dehghani et al. 2023, arXiv:2302.05442).
    * ``l2``: q/‖q‖ and g · k/‖k‖ with one learned g per key head, initially D, so that the default scale 1/√D gives
      logits √D · cos(q, k) (Henry et al. 2020, arXiv:2010.04245, with g learned).

    Shapes: query (B, H, L, D), key (B, Hkv, S, D), unchanged.

    Args:
        kind: ``rms``, ``layer`` or ``l2``.
        head_dim: D.
        num_kv_heads: Hkv; only ``l2`` needs it.
        eps: under the root, or (``l2``) the smallest norm to divide by.

    Raises:
        ValueError: another kind, or ``l2`` without ``num_kv_heads``.

    >>> query, key = QKNorm("rms", 4)(torch.full((1, 2, 3, 4), 5.0), torch.full((1, 1, 3, 4), 7.0))
    >>> query.mean().item(), key.mean().item()
    (1.0, 1.0)
    """

    def __init__(self, kind: str, head_dim: int, *, num_kv_heads: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        self.kind, self.head_dim, self.eps = kind, head_dim, eps
        if kind == "l2":
            if num_kv_heads is None:
                raise ValueError("QKNorm('l2') learns one gain per key head and needs num_kv_heads")
            self.gain = nn.Parameter(torch.empty(num_kv_heads))
        elif kind in ("rms", "layer"):
            self.query_norm = make_norm(kind, head_dim, eps)
            self.key_norm = make_norm(kind, head_dim, eps)
        else:
            raise ValueError(f"qk_norm={kind!r} must be 'rms', 'layer' or 'l2'")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gains to their start: 1 for the norms (biases 0), D for ``l2``."""
        if self.kind == "l2":
            nn.init.constant_(self.gain, float(self.head_dim))

    def forward(self, query: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Both, or the query alone (``key=None``) where the keys come from a cache."""
        if self.kind == "l2":
            unit_query = F.normalize(query, dim=-1, eps=self.eps).to(query.dtype)
            if key is None:
                return unit_query, None
            return unit_query, (F.normalize(key, dim=-1, eps=self.eps) * self.gain.view(1, -1, 1, 1)).to(key.dtype)
        # under autocast the gains are float32 and q, k are not: normalise in the gains' dtype, return q's and k's
        high = next(self.query_norm.parameters()).dtype
        normed_query = self.query_norm(query.to(high)).to(query.dtype)
        return normed_query, None if key is None else self.key_norm(key.to(high)).to(key.dtype)
