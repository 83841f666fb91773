"""Multi-head attention: projections around a core without parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minitx.nn.backends import make_call, run_attention
from minitx.nn.masks import Causal, Mask, Padding, as_mask, intersect, real_key_counts
from minitx.nn.norms import QKNorm
from minitx.nn.positions import Rotary
from minitx.nn.scale import ScoreScale


class DotProductAttention(nn.Module):
    """The core: scaled dot-product attention through a backend. No parameters; what capture hooks.

    Args:
        dropout: on the weights, in training only.
        softcap: t in t · tanh(z / t), or None.
        backend: ``auto``, ``math``, ``sdpa`` or a registered name.
        strict: raise instead of leaving a fused kernel.
    """

    def __init__(
        self, *, dropout: float = 0.0, softcap: float | None = None, backend: str = "auto", strict: bool = False
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
        self.dropout, self.softcap, self.backend, self.strict = dropout, softcap, backend, strict

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        attn_bias: Tensor | None = None,
        sinks: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv) -> (B, H, L, Dv)[, weights (B, H, L, S)]."""
        dropout_p = self.dropout if self.training else 0.0
        call = make_call(
            query,
            key,
            value,
            mask,
            dropout_p,
            False,
            scale=scale,
            attn_bias=attn_bias,
            softcap=self.softcap,
            sinks=sinks,
        )
        return run_attention(call, backend=self.backend, strict=self.strict, need_weights=need_weights)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, softcap={self.softcap}, backend={self.backend!r}"


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with H query heads and Hkv key/value heads.

    head_h = softmax(c · Q_h K_hᵀ) V_h with Q = x W_Q, K = y W_K, V = y W_V; output = concat(heads) W_O. The order is
    projections → heads → QK-norm → rotary → scale → core → ``out_proj`` (Vaswani et al. 2017, arXiv:1706.03762, §3.2.2;
    grouped heads: Ainslie et al. 2023, arXiv:2305.13245).

    Args:
        embed_dim: E, the width of queries and of the output.
        num_heads: H.
        num_kv_heads: Hkv, dividing H; default H.
        head_dim: D; default E // H, which must then divide.
        kdim, vdim: widths of ``key`` and ``value`` inputs; default E.
        bias: whether the four projections have biases.
        scale: a word or number as in ``ScoreScale``, or a ``ScoreScale``; ``inv_sqrt`` is 1/√D, ``unscaled`` 1.
        qk_norm: a ``QKNorm``, or None.
        rotary: a ``Rotary`` for self-attention, or None.
        sinks: learn one extra logit per head without a value (initially 0).
        core: what computes attention; default ``DotProductAttention()``. Dropout, soft-cap and backend are its own.

    Raises:
        ValueError: widths that do not fit; each message names the argument.

    >>> attention = MultiHeadAttention(12, 3, core=DotProductAttention(dropout=0.1, backend="sdpa"))
    >>> attention(torch.randn(2, 5, 12), is_causal=True).shape
    torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        scale: str | float | ScoreScale = "inv_sqrt",
        qk_norm: QKNorm | None = None,
        rotary: Rotary | None = None,
        sinks: bool = False,
        core: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1:
            raise ValueError(f"embed_dim and num_heads must be positive, got {embed_dim} and {num_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; give head_dim")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        if min(self.head_dim, kdim, vdim) < 1:
            raise ValueError(f"head_dim, kdim and vdim must be positive, got {self.head_dim}, {kdim} and {vdim}")
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(kdim, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(vdim, self.num_kv_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=bias)
        if not isinstance(scale, ScoreScale):
            scale = ScoreScale(scale, head_dim=self.head_dim, num_heads=num_heads)
        self.scale, self.qk_norm, self.rotary = scale, qk_norm, rotary
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.core = DotProductAttention() if core is None else core

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        attn_mask: Tensor | Mask | None = None,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        attn_bias: Tensor | None = None,
        position_ids: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend. All constraints that are given intersect.

        Args:
            query: (B, L, E).
            key: (B, S, kdim); default ``query`` (self-attention).
            value: (B, S, vdim); default ``key``.
            attn_mask: bool (L, S) or broadcastable to (B, H, L, S), True = may attend, or a ``Mask``.
            key_mask: bool (B, S), True = real token.
            is_causal: the last query sees the last key.
            attn_bias: float, broadcastable to (B, H, L, S), added to the scaled scores.
            position_ids: (B or 1, L) for rotary; default 0 … L - 1.
            need_weights: also return the weights (B, H, L, S), before dropout.

        Returns:
            (B, L, E), or ``(output, weights)``.
        """
        self._check_inputs(query, key, value)
        key = query if key is None else key
        value = key if value is None else value
        mask = intersect(
            as_mask(attn_mask), Padding(key_mask) if key_mask is not None else None, Causal() if is_causal else None
        )
        q = self._split(self.q_proj(query), self.num_heads)  # (B, H, L, D)
        k = self._split(self.k_proj(key), self.num_kv_heads)  # (B, Hkv, S, D)
        v = self._split(self.v_proj(value), self.num_kv_heads)  # (B, Hkv, S, D)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if self.rotary is not None:
            if position_ids is None:
                position_ids = torch.arange(q.shape[2], device=q.device).unsqueeze(0)
            q, k = self.rotary(q, position_ids), self.rotary(k, position_ids)
        counts = None
        if self.scale.needs_counts:
            if mask is not None:
                mask.check(q.shape[0], self.num_heads, q.shape[2], k.shape[2])
            counts = real_key_counts(mask, q.shape[2], k.shape[2], q.device)
        q, multiplier = self.scale(q, counts)
        out = self.core(q, k, v, mask=mask, scale=multiplier, attn_bias=attn_bias, sinks=self.sinks, need_weights=need_weights)
        out, weights = out if isinstance(out, tuple) else (out, None)
        out = self.out_proj(out.transpose(1, 2).flatten(2))  # (B, H, L, D) -> (B, L, H * D) -> (B, L, E)
        return out if weights is None else (out, weights)

    def _split(self, x: Tensor, num_heads: int) -> Tensor:
        """(B, L, heads * D) -> (B, heads, L, D)."""
        return x.unflatten(-1, (num_heads, self.head_dim)).transpose(1, 2)

    def _check_inputs(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        if value is not None and key is None:
            raise ValueError("value was given without key; give both, or neither for self-attention")
        if self.rotary is not None and key is not None and key is not query:
            raise ValueError("rotary positions are for self-attention: queries and keys need one position axis")
        key = query if key is None else key
        value = key if value is None else value
        for name, tensor, projection in (
            ("query", query, self.q_proj),
            ("key", key, self.k_proj),
            ("value", value, self.v_proj),
        ):
            if tensor.dim() != 3 or tensor.shape[-1] != projection.in_features:
                raise ValueError(f"{name} must have shape (batch, length, {projection.in_features}), got {tuple(tensor.shape)}")

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
