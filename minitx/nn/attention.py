"""Multi-head attention: projections around a core without parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minitx.nn.backends import backend_names, run_attention
from minitx.nn.bias import Bias
from minitx.nn.cache import LayerCache
from minitx.nn.functional import check_settings, make_call
from minitx.nn.masks import Causal, Mask, Padding, as_mask, intersect, real_key_counts
from minitx.nn.norms import QKNorm
from minitx.nn.positions import Rotary
from minitx.nn.scale import ScoreScale


class DotProductAttention(nn.Module):
    """The core: scaled dot-product attention through a backend. No parameters; what capture hooks.

    Args:
        dropout: on the weights, in training only.
        softcap: t in t · tanh(z / t), or None.
        backend: ``auto``, ``math``, ``sdpa`` or a registered name. Register a backend of your own before you build
            the module that names it: a typo is answered here, not at the first call.
        strict: raise instead of leaving a fused kernel.

    Raises:
        ValueError: dropout outside [0, 1); a soft-cap that is not positive; a backend that nobody registered.

    >>> q = torch.randn(1, 2, 5, 8)
    >>> DotProductAttention(backend="math")(q, q, q, scale=0.5).shape
    torch.Size([1, 2, 5, 8])
    """

    def __init__(
        self, *, dropout: float = 0.0, softcap: float | None = None, backend: str = "auto", strict: bool = False
    ) -> None:
        super().__init__()
        check_settings(softcap, dropout)
        if backend not in backend_names():
            raise ValueError(f"backend={backend!r} is not known; one of {', '.join(backend_names())}")
        self.dropout, self.softcap, self.backend, self.strict = dropout, softcap, backend, strict

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        attn_bias: Tensor | Bias | None = None,
        sinks: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv) -> (B, H, L, Dv)[, weights (B, H, L, S)]."""
        dropout_p = self.dropout if self.training else 0.0
        call = make_call(
            query, key, value, mask, dropout_p, False, scale=scale, attn_bias=attn_bias, softcap=self.softcap, sinks=sinks
        )
        return run_attention(call, backend=self.backend, strict=self.strict, need_weights=need_weights)

    def effective_mask(self, mask: Mask | None) -> Mask | None:
        """What is visible under the mask of a call: here nothing less. What ``capture`` knows a core with weights by."""
        return mask

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}, softcap={self.softcap}, backend={self.backend!r}"


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with H query heads and Hkv key/value heads.

    head_h = softmax(c · Q_h K_hᵀ) V_h with Q = x W_Q, K = y W_K, V = y W_V; output = concat(heads) W_O. The order is
    projections → heads → QK-norm → rotary → cache → scale → core → head mask → ``out_proj`` (Vaswani et al. 2017,
    arXiv:1706.03762, §3.2.2; grouped heads: Ainslie et al. 2023, arXiv:2305.13245).

    Args:
        embed_dim: E, the width of queries and of the output.
        num_heads: H.
        num_kv_heads: Hkv, dividing H; default H.
        head_dim: D; default E // H, which must then divide.
        kdim, vdim: widths of ``key`` and ``value`` inputs; default E.
        bias: whether the four projections have biases. out_bias: whether ``out_proj`` has one; default as ``bias``.
        scale: a word or number as in ``ScoreScale``, or a ``ScoreScale``; ``inv_sqrt`` is 1/√D, ``unscaled`` 1.
        qk_norm: a ``QKNorm``, or None.
        rotary: a ``Rotary`` for self-attention, or None.
        sinks: learn one extra logit per head without a value (initially 0).
        value_residual: mixes the first layer's values into this layer's, (V, V₁) -> V, for example a ``LearnedMix`` (Zhou et al.
            2024, arXiv:2410.17897); ``forward`` then needs ``first_value``.
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
        out_bias: bool | None = None,
        scale: str | float | ScoreScale = "inv_sqrt",
        qk_norm: QKNorm | None = None,
        rotary: Rotary | None = None,
        sinks: bool = False,
        value_residual: nn.Module | None = None,
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
        self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias=bias if out_bias is None else out_bias)
        if not isinstance(scale, ScoreScale):
            scale = ScoreScale(scale, head_dim=self.head_dim, num_heads=num_heads)
        self.scale, self.qk_norm, self.rotary, self.value_residual = scale, qk_norm, rotary, value_residual
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
        attn_bias: Tensor | Bias | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        cache: LayerCache | None = None,
        first_value: Tensor | None = None,
        need_weights: bool = False,
        need_value: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend. All constraints that are given intersect.

        Args:
            query: (B, L, E).
            key: (B, S, kdim); default ``query`` (self-attention).
            value: (B, S, vdim); default ``key``.
            attn_mask: bool (L, S) or broadcastable to (B, H, L, S), True = may attend, or a ``Mask``.
            key_mask: bool (B, S), True = real token.
            is_causal: the last query sees the last key.
            attn_bias: float, broadcastable to (B, H, L, S), or a ``Bias``; added to the scaled scores.
            position_ids: int (B or 1, L) for rotary; default 0 … L - 1, counted on from the cache's length.
            head_mask: (H,) or (B, H), multiplies each head's output: 0 ablates a head.
            cache: for self-attention, the earlier keys and values, to which these are appended: S counts them all, in
                masks and biases too. For cross-attention, keys and values are computed at its first use only.
            first_value: (B, Hkv, L, D), the first layer's values of these positions, for ``value_residual``.
            need_weights: also return the weights (B, H, L, S), before dropout.
            need_value: also return the values (B, Hkv, L, D) of these positions (of self-attention), for later layers.

        Returns:
            (B, L, E), or ``(output, weights)``, or ``(output, values)``.
        """
        self._check_inputs(query, key, value)
        if (first_value is None) != (self.value_residual is None) or (need_weights and need_value):
            raise ValueError(
                "first_value belongs to a layer with value_residual, which needs it; need_weights and need_value exclude each other"
            )
        mask = intersect(
            as_mask(attn_mask), Padding(key_mask) if key_mask is not None else None, Causal() if is_causal else None
        )
        q, k, v = self._project(query, key, value, position_ids, cache, first_value)
        counts = None
        if self.scale.needs_counts:
            if mask is not None:
                mask.check(q.shape[0], self.num_heads, q.shape[2], k.shape[2])
            counts = real_key_counts(mask, q.shape[2], k.shape[2], q.device)
        q, multiplier = self.scale(q, counts)
        out = self.core(q, k, v, mask=mask, scale=multiplier, attn_bias=attn_bias, sinks=self.sinks, need_weights=need_weights)
        out, weights = out if isinstance(out, tuple) else (out, None)
        if head_mask is not None:
            out = out * self._per_head(head_mask, out)
        out = self.out_proj(out.transpose(1, 2).flatten(2))  # (B, H, L, D) -> (B, L, H * D) -> (B, L, E)
        if need_value:
            return out, v[:, :, -query.shape[1] :]  # without those that a cache put before them
        return out if weights is None else (out, weights)

    def _project(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        position_ids: Tensor | None,
        cache: LayerCache | None,
        first_value: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projections, heads, value residual, QK-norm, rotary and cache: q (B, H, L, D), k and v (B, Hkv, S, D)."""
        is_self = key is None or key is query
        q = self._split(self.q_proj(query), self.num_heads)
        if cache is not None and cache.memory is not None and not is_self:
            _check_memory(cache.memory[0], query if key is None else key)
            return q if self.qk_norm is None else self.qk_norm(q, None)[0], *cache.memory
        key = query if key is None else key
        k = self._split(self.k_proj(key), self.num_kv_heads)
        v = self._split(self.v_proj(key if value is None else value), self.num_kv_heads)
        if self.value_residual is not None:
            v = self.value_residual(v, first_value)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if self.rotary is not None:
            if position_ids is None:
                start = 0 if cache is None else cache.length
                position_ids = torch.arange(start, start + q.shape[2], device=q.device).unsqueeze(0)
            q, k = self.rotary(q, position_ids), self.rotary(k, position_ids)
        if cache is None:
            return q, k, v
        return q, *(cache.append(k, v) if is_self else cache.remember(k, v))

    def _split(self, x: Tensor, num_heads: int) -> Tensor:
        """(B, L, heads * D) -> (B, heads, L, D)."""
        return x.unflatten(-1, (num_heads, self.head_dim)).transpose(1, 2)

    def _per_head(self, head_mask: Tensor, out: Tensor) -> Tensor:
        """(H,) or (B, H) as (1 or B, H, 1, 1) in the dtype of ``out``."""
        shapes = (self.num_heads,), (out.shape[0], self.num_heads)
        if tuple(head_mask.shape) not in shapes:
            raise ValueError(
                f"head_mask must have shape (H,) or (B, H) = {shapes[0]} or {shapes[1]}, got {tuple(head_mask.shape)}"
            )
        return head_mask.to(out.dtype).view(-1, self.num_heads, 1, 1)

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

    @classmethod
    @torch.no_grad()
    def from_torch(cls, theirs: nn.MultiheadAttention, *, backend: str = "auto") -> MultiHeadAttention:
        """The layer with the weights of ``torch.nn.MultiheadAttention``, copied; equal outputs, in its dtype and device.

        What is called differently here: tensors are batch-first whatever ``batch_first`` says; ``key_padding_mask`` and
        bool ``attn_mask`` are True = *hidden* there and True = may attend here (``masks.from_key_padding_mask``); float
        masks are ``attn_bias``. What is answered differently: weights are per head and before dropout (torch averages
        heads and returns them after dropout); a row without a visible key is zero before ``out_proj`` (torch: NaN).

        Raises:
            ValueError: ``add_bias_kv`` or ``add_zero_attn``, which append keys that nobody sent.
        """
        if theirs.bias_k is not None or theirs.add_zero_attn:
            option = "add_bias_kv" if theirs.bias_k is not None else "add_zero_attn"
            raise ValueError(f"{option}=True appends a key to every sequence, which MultiHeadAttention does not have")
        has_bias = theirs.in_proj_bias is not None
        core = DotProductAttention(dropout=theirs.dropout, backend=backend)
        sizes = {"kdim": theirs.kdim, "vdim": theirs.vdim, "bias": has_bias, "core": core}
        ours = cls(theirs.embed_dim, theirs.num_heads, **sizes).to(theirs.out_proj.weight).train(theirs.training)
        for ours_part, theirs_part in _torch_parts(ours, theirs):
            ours_part.copy_(theirs_part)
        return ours

    @torch.no_grad()
    def to_torch(self) -> nn.MultiheadAttention:
        """A ``torch.nn.MultiheadAttention(batch_first=True)`` with copies of these weights; see ``from_torch``.

        Raises:
            ValueError: something that torch's layer does not have, named.
        """
        E, H = self.embed_dim, self.num_heads
        lacking = {
            f"num_kv_heads={self.num_kv_heads}": self.num_kv_heads != H,
            f"head_dim={self.head_dim}": self.head_dim * H != E,
            f"scale={self.scale.scale} times {self.scale.factor}": (self.scale.scale, self.scale.factor) != ("inv_sqrt", 1.0),
            f"out_bias={self.out_proj.bias is not None}": (self.out_proj.bias is None) != (self.q_proj.bias is None),
            "qk_norm": self.qk_norm is not None,
            "rotary": self.rotary is not None,
            "sinks": self.sinks is not None,
            "value_residual": self.value_residual is not None,
            "softcap": getattr(self.core, "softcap", None) is not None,
            type(self.core).__name__: not isinstance(self.core, DotProductAttention),
        }
        if any(lacking.values()):
            names = ", ".join(name for name, given in lacking.items() if given)
            raise ValueError(f"torch.nn.MultiheadAttention has no {names}")
        sizes = {"kdim": self.k_proj.in_features, "vdim": self.v_proj.in_features, "bias": self.q_proj.bias is not None}
        theirs = nn.MultiheadAttention(E, H, dropout=self.core.dropout, batch_first=True, **sizes)
        theirs = theirs.to(self.q_proj.weight).train(self.training)
        for ours_part, theirs_part in _torch_parts(self, theirs):
            theirs_part.copy_(ours_part)
        return theirs

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def _torch_parts(ours: MultiHeadAttention, theirs: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor]]:
    """Which parameter is which: pairs of (ours, theirs), views where torch stacks its three projections."""
    projections = (ours.q_proj, ours.k_proj, ours.v_proj)
    weights = (
        theirs.in_proj_weight.chunk(3)
        if theirs.in_proj_weight is not None
        else (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
    )
    pairs = [(projection.weight, weight) for projection, weight in zip(projections, weights, strict=True)]
    pairs.append((ours.out_proj.weight, theirs.out_proj.weight))
    if theirs.in_proj_bias is not None:
        biases = (*theirs.in_proj_bias.chunk(3), theirs.out_proj.bias)
        pairs += [(p.bias, bias) for p, bias in zip((*projections, ours.out_proj), biases, strict=True)]
    return pairs


def _check_memory(keys: Tensor, memory: Tensor) -> None:
    if (keys.shape[0], keys.shape[2]) != tuple(memory.shape[:2]):
        kept = keys.shape[0], keys.shape[2]
        raise ValueError(
            f"key must be the memory that the cache was filled from, (B, S) = {kept}, got {tuple(memory.shape[:2])}"
        )
