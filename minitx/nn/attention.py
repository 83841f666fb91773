"""Multi-head attention: projections, and a core that computes attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minitx.nn.backends import backend_for, backend_names
from minitx.nn.bias import Bias, as_bias
from minitx.nn.cache import LayerCache, StateCache
from minitx.nn.functional import AttentionCall, check_settings, require_tensor, with_weights
from minitx.nn.masks import Causal, Mask, Padding, intersect, real_key_counts
from minitx.nn.norms import QKNorm
from minitx.nn.positions import Rotary, Rotation
from minitx.nn.scale import ScoreScale
from minitx.nn.torch_layer import as_torch_layer, check_torch_layer, copy_weights


class DotProductAttention(nn.Module):
    """The core: scaled dot-product attention through a backend. It has no parameters.

    A core is any module that maps an ``AttentionCall`` to (B, H, L, Dv), or to ``(output, weights)`` if the call needs weights. A core
    of your own has up to four optional parts:

    * ``softmax_weights = True`` (class attribute): its weights are the softmax that the call describes, so
      ``minitx.analysis.recorder`` records them. With False, ``capture`` records only its outputs, also outside of
      ``MultiHeadAttention``.
    * ``has_dot_products = True`` (class attribute): it uses query and key only in scale · q·k, so ``fold_scale`` may change them.
    * ``refuse(**options)``: the constructor of ``MultiHeadAttention`` calls it with the options that are used, as in
      ``EfficientAttention``.
    * ``make_cache(capacity)``: makes its cache.

    Args:
        backend: ``auto``, ``math``, ``sdpa``, ``chunked``, ``flex`` or a registered name. Register your own backend
            before you build the module.
        strict: raise an error if torch would not use a fused kernel.

    Raises:
        ValueError: the backend is not registered.

    >>> q = torch.randn(1, 2, 5, 8)
    >>> DotProductAttention(backend="math")(AttentionCall(q, q, q, scale=0.5)).shape
    torch.Size([1, 2, 5, 8])
    """

    softmax_weights = has_dot_products = True

    def __init__(self, *, backend: str = "auto", strict: bool = False) -> None:
        super().__init__()
        if backend not in backend_names():
            raise ValueError(f"backend={backend!r} must be one of {', '.join(backend_names())}")
        self.backend, self.strict = backend, strict

    def forward(self, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output (B, H, L, Dv) of a checked call, or ``(output, weights (B, H, L, S))``."""
        output = backend_for(call, self.backend, strict=self.strict).run(call)
        return with_weights(call, output) if call.need_weights else output

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}"


def attention_cores(model: nn.Module) -> dict[str, nn.Module]:
    """Return, by name, the cores of ``model`` whose weights are the softmax of their call (``softmax_weights``).

    A core that is used in several places has one name. The attribute is the class's, because instances of wrappers, such as PEFT's,
    forward the attributes of the wrapped module.
    """
    return {name: module for name, module in model.named_modules() if getattr(type(module), "softmax_weights", False)}


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention with H query heads and Hkv key/value heads.

    head_h = softmax(c · Q_h K_hᵀ) V_h with Q = x W_Q, K = y W_K, V = y W_V; output = concat(heads) W_O. The order is
    projections → heads → QK-norm → rotary → cache → scale → core → ``out_proj`` (Vaswani et al. 2017,
    arXiv:1706.03762, §3.2.2; grouped heads: Ainslie et al. 2023, arXiv:2305.13245).

    Args:
        embed_dim: E, the width of queries and of the output.
        num_heads: H.
        num_kv_heads: Hkv, a divisor of H. Query head h uses key head ⌊h / (H / Hkv)⌋, as in Llama. Default: H.
        head_dim: D. Default: E / H, if it is a whole number.
        kdim, vdim: the widths of the ``key`` and ``value`` inputs. Default: E.
        bias: whether the four projections have biases. out_bias: whether ``out_proj`` has one. Default: as ``bias``.
        dropout: the dropout probability on the weights, in training only.
        softcap: t in t · tanh(z / t) on the scores, or None.
        scale: a word or a number as in ``ScoreScale``, or a ``ScoreScale``. ``inv_sqrt`` is 1/√D, ``unscaled`` is 1.
        max_len: the longest sequence. Only ``scale="log_length"`` needs it.
        qk_norm: a ``QKNorm``, or None.
        rotary: a ``Rotary`` for self-attention, or None.
        sinks: learn one extra logit per head without a value (initially 0).
        core: the module that computes attention from an ``AttentionCall``. Default: ``DotProductAttention()``.

    Raises:
        ValueError: widths that do not match. The message names the argument.

    >>> attention = MultiHeadAttention(12, 3, dropout=0.1, core=DotProductAttention(backend="sdpa"))
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
        dropout: float = 0.0,
        softcap: float | None = None,
        scale: str | float | ScoreScale = "inv_sqrt",
        max_len: int | None = None,
        qk_norm: QKNorm | None = None,
        rotary: Rotary | None = None,
        sinks: bool = False,
        core: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if embed_dim < 1 or num_heads < 1:
            raise ValueError(f"embed_dim and num_heads must be positive, got {embed_dim} and {num_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}; set head_dim")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={num_kv_heads} must divide num_heads={num_heads}")
        self.head_dim = D = embed_dim // num_heads if head_dim is None else head_dim
        self.kdim, self.vdim = kdim, vdim = embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim
        if min(D, kdim, vdim) < 1:
            raise ValueError(f"head_dim, kdim and vdim must be positive, got {D}, {kdim} and {vdim}")
        check_settings(softcap, dropout)
        self.dropout, self.softcap = dropout, softcap
        self.q_proj = nn.Linear(embed_dim, num_heads * D, bias=bias)
        self.k_proj = nn.Linear(kdim, self.num_kv_heads * D, bias=bias)
        self.v_proj = nn.Linear(vdim, self.num_kv_heads * D, bias=bias)
        self.out_proj = nn.Linear(num_heads * D, embed_dim, bias=bias if out_bias is None else out_bias)
        if not isinstance(scale, ScoreScale):
            scale = ScoreScale(scale, head_dim=D, num_heads=num_heads, max_len=max_len)
        self.scale, self.qk_norm, self.rotary = scale, qk_norm, rotary
        self._check_parts()
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        self.core = DotProductAttention() if core is None else core
        if refuse := getattr(self.core, "refuse", None):
            refuse(dropout=dropout > 0.0, softcap=softcap is not None, sinks=sinks)

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
        position_ids: Tensor | Rotation | None = None,
        cache: LayerCache | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention. A query sees a key only if causality, ``key_mask`` and ``attn_mask`` all allow it.

        Args:
            query: (B, L, E).
            key: (B, S, kdim). Default: ``query`` (self-attention).
            value: (B, S, vdim). Default: ``key``.
            attn_mask: bool (L, S) or broadcastable to (B, H, L, S), True = may attend, or a ``Mask``.
            key_mask: bool (B, S), True = real token.
            is_causal: hide later positions. The last query sees the last key.
            attn_bias: float, broadcastable to (B, H, L, S), or a ``Bias``; added to the scaled scores.
            position_ids: int (B or 1, L), for rotary positions. Default: 0 … L - 1, or from the cache's length on. Pass a
                ``Rotation`` (the angles of these positions) to compute the angles once for all layers.
            cache: for self-attention, the keys and values of earlier positions. The new ones are appended, and S counts all of
                them, in masks and biases too. For cross-attention, the cache stores the keys and values at its first use.
            need_weights: also return the weights (B, H, L, S), before dropout.

        Returns:
            (B, L, E), or ``(output, weights)``.
        """
        is_cross = key is not None and key is not query
        self._check_inputs(query, key, value)
        if not (cache is None or (hasattr(cache, "append") and hasattr(cache, "advance"))):  # other classes may have both
            kind = type(cache).__name__
            raise TypeError(f"cache must be the LayerCache of one layer (layers[i] of a KVCache), got {kind}")
        mask = attn_mask
        if key_mask is not None or is_causal or not (mask is None or isinstance(mask, Mask)):
            mask = intersect(mask, Padding(key_mask) if key_mask is not None else None, Causal() if is_causal else None)
        if isinstance(attn_bias, nn.Module):
            attn_bias = as_bias(attn_bias)  # the rule with the current table
        source = query if key is None else key
        memory = cache.recall(source) if is_cross and cache is not None else None
        rotation = position_ids
        if self.rotary is not None and not isinstance(position_ids, Rotation):
            if position_ids is None:
                start = 0 if cache is None else cache.length
                position_ids = torch.arange(start, start + query.shape[1], device=query.device).unsqueeze(0)
            rotation = self.rotary.rotation(position_ids, query.shape[0], query.shape[1], query.dtype)
        q, k, v = self.project(query, source if memory is None else None, value, rotation)
        if memory is not None:
            k, v = memory
        elif cache is not None and not is_cross:
            k, v = cache.append(k, v)
        q, multiplier = self._scaled(q, k.shape[2], mask)
        call = AttentionCall(
            *(q, k, v, mask, attn_bias, multiplier, self.softcap, self.sinks),
            dropout_p=self.dropout if self.training else 0.0,
            need_weights=need_weights,
            is_cross=is_cross,
            state=cache if isinstance(cache, StateCache) and not is_cross else None,
        )
        out = self.core(call.check_rules())
        if cache is not None and is_cross:
            cache.remember(k, v, source)
        elif cache is not None:
            cache.advance(query.shape[1])
        out, weights = out if isinstance(out, tuple) else (out, None)
        out = self.merge(out, query)
        return out if weights is None else (out, weights)

    def project(self, query: Tensor, key: Tensor | None, value: Tensor | None, rotation: Any) -> tuple[Tensor, Any, Any]:
        """Return q (B, H, L, D), k and v (B, Hkv, S, D): projections, heads, QK-norm, rotary positions. A subclass may compute others.

        Args:
            query: (B, L, E).
            key: (B, S, kdim), or None for q alone, if a cache has the keys and values of cross-attention. k and v are then None.
            value: (B, S, vdim), or None: ``key``.
            rotation: the ``Rotation`` of a layer with ``rotary``. Other layers ignore it.
        """
        B, L, D = query.shape[0], query.shape[1], self.head_dim
        q = self.q_proj(query).view(B, L, self.num_heads, D).transpose(1, 2)  # (B, L, H * D) -> (B, H, L, D)
        if key is None:
            return q if self.qk_norm is None else self.qk_norm(q, None)[0], None, None
        S = key.shape[1]
        k = self.k_proj(key).view(B, S, self.num_kv_heads, D).transpose(1, 2)  # (B, Hkv, S, D)
        v = self.v_proj(key if value is None else value).view(B, S, self.num_kv_heads, D).transpose(1, 2)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        if self.rotary is not None:
            q, k = self.rotary(q, rotation), self.rotary(k, rotation)
        return q, k, v

    def merge(self, heads: Tensor, query: Tensor) -> Tensor:
        """Return the output (B, L, E) from the outputs of the heads (B, H, L, D). A subclass may also use the input (B, L, E)."""
        return self.out_proj(heads.transpose(1, 2).flatten(2))  # (B, H, L, D) -> (B, L, H * D) -> (B, L, E)

    def _scaled(self, q: Tensor, num_keys: int, mask: Mask | None) -> tuple[Tensor, float]:
        """The query and the multiplier of q·k. A scale that depends on the head or on the query's position multiplies the query."""
        if (multiplier := self.scale.multiplier) is not None:
            return q, multiplier
        counts = None
        if self.scale.needs_counts:
            shape = q.shape[0], self.num_heads, q.shape[2], num_keys
            if mask is not None:
                mask.check(*shape)
            counts = real_key_counts(mask, *shape, q.device)
        return self.scale(q, counts)

    def make_cache(self, capacity: int, window: int | None = None) -> LayerCache:
        """Return the smallest cache for ``capacity`` positions if a query sees the last ``window`` keys (None: all).

        A core with a method ``make_cache(capacity)`` makes its own cache. With ``scale="log_length"`` the cache keeps all keys,
        because the scale depends on their number.
        """
        if self.scale.needs_counts:
            return LayerCache(capacity)
        make = getattr(self.core, "make_cache", None)
        return LayerCache(capacity, window) if make is None else make(capacity)

    def _check_parts(self) -> None:
        for name in ("scale", "qk_norm", "rotary"):
            for size in ("head_dim", "num_heads", "num_kv_heads"):
                theirs, ours = getattr(getattr(self, name), size, None), getattr(self, size)
                if theirs not in (None, ours):
                    raise ValueError(f"{name} has {size}={theirs}, but the layer has {size}={ours}")

    def _check_inputs(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        if value is not None and key is None:
            raise ValueError("value needs key: pass both, or neither for self-attention")
        if self.rotary is not None and key is not None and key is not query:
            raise ValueError("rotary positions are for self-attention: queries and keys need one position axis")
        key = query if key is None else key
        tensors = [("query", query, self.embed_dim)]
        if key is not query or self.kdim != self.embed_dim:  # otherwise it is the query
            tensors.append(("key", key, self.kdim))
        if value is not None or self.vdim != self.kdim:
            tensors.append(("value", key if value is None else value, self.vdim))
        for name, tensor, width in tensors:
            require_tensor(name, tensor)
            if tensor.dim() != 3 or tensor.shape[-1] != width or tensor.shape[0] != query.shape[0] or not tensor.shape[1]:
                expected = f"(batch, length, {width}) with the query's batch size and a length of at least 1"
                raise ValueError(f"{name} must have shape {expected}, got {tuple(tensor.shape)}")
        if value is not None and value.shape[1] != key.shape[1]:
            raise ValueError(f"value must have the key's length {key.shape[1]}, got {tuple(value.shape)}")

    @classmethod
    def from_torch(cls, theirs: nn.MultiheadAttention, *, backend: str = "auto") -> MultiHeadAttention:
        """Return a layer with copies of the weights of a ``torch.nn.MultiheadAttention``. Its outputs are equal.

        The arguments differ: tensors are always batch-first. In ``key_padding_mask`` and a bool ``attn_mask``, True means
        *hidden* in torch and "may attend" here (``masks.from_key_padding_mask`` converts). A float mask is an ``attn_bias``.
        Two results differ: weights are per head and before dropout (torch averages the heads after dropout), and a row without
        a visible key is zero before ``out_proj`` (torch: NaN).

        Raises:
            TypeError: ``theirs`` is not a ``torch.nn.MultiheadAttention``.
            ValueError: ``add_bias_kv`` or ``add_zero_attn`` (they append a key to every sequence), or a layer that may compute
                something else: a subclass with its own ``forward``, a pruned or parametrised layer, or a layer with hooks.
        """
        check_torch_layer(theirs)
        options = {"kdim": theirs.kdim, "vdim": theirs.vdim, "bias": theirs.in_proj_bias is not None, "dropout": theirs.dropout}
        ours = cls(theirs.embed_dim, theirs.num_heads, **options, core=DotProductAttention(backend=backend))
        ours = ours.to(theirs.out_proj.weight).train(theirs.training)
        copy_weights(theirs, ours)
        return ours

    def to_torch(self, *, batch_first: bool = True) -> nn.MultiheadAttention:
        """Return a ``torch.nn.MultiheadAttention`` with copies of these weights, frozen where these are. See ``from_torch``.

        Args:
            batch_first: the option of torch's layer.

        Raises:
            ValueError: an option that torch's layer does not have (the message names it); a subclass with its own steps; a projection
                whose result may depend on more than its weight and bias (LoRA, pruned, parametrised, with hooks); or query, key and
                value projections when only some are frozen, because torch joins them in one parameter.
        """
        return as_torch_layer(self, MultiHeadAttention, DotProductAttention, batch_first)

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
