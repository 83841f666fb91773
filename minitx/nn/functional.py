"""Reference attention: it defines the correct result. The steps are in the order of the papers.

    scores  z = c · q·k                      (then soft-cap: t · tanh(z / t), then + bias)
    weights p = softmax over visible keys    (exact zero elsewhere; with sinks the row sums below 1)
    output  o = dropout(p) · v

A query that sees no key gets the output zero. A key that no query sees is set to zero before the products (``hide_unseen``), because
its weight is zero, and 0 · NaN would be NaN. The backends do the same, each where its kernel allows it.

Everything is computed in at least float32. Shapes: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv). Query head h
uses key head h // (H / Hkv). An ``AttentionCall`` holds the arguments of one call. It is built and checked once and then passed
to the core and the backend.

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, §3.2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.autograd import forward_ad

from minitx.nn.bias import Bias, as_bias
from minitx.nn.cache import StateCache
from minitx.nn.masks import Causal, Mask, intersect
from minitx.nn.precision import full_precision
from minitx.nn.rules import tensors_of
from minitx.nn.tracing import transforms_around


def attention_scores(
    query: Tensor, key: Tensor, *, scale: float, softcap: float | None = None, attn_bias: Tensor | None = None
) -> Tensor:
    """Return the scaled scores before mask and softmax, (B, H, L, S), in at least float32.

    Args:
        query: (B, H, L, D). key: (B, Hkv, S, D), Hkv dividing H.
        scale: the factor on q·k. softcap: t. Scores become t · tanh(score / t).
        attn_bias: added last, broadcastable to (B, H, L, S).

    >>> attention_scores(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4), scale=0.5).item()
    2.0
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    B, H, L, D = query.shape
    Hkv, S = key.shape[1], key.shape[2]
    grouped = query.to(dtype).reshape(B, Hkv, H // Hkv, L, D)  # query head h = (key head, member of its group)
    scores = grouped @ key.to(dtype).unsqueeze(2).transpose(-1, -2)  # (B, Hkv, H/Hkv, L, S)
    scores = scores.reshape(B, H, L, S) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores if attn_bias is None else scores + attn_bias.to(dtype)


def masked_softmax(scores: Tensor, visible: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """Return the softmax over the visible keys of the last axis. A row without a visible key is zero, and so is its gradient.

    p_ij = exp(z_ij) / (Σ_visible exp(z_ij) + exp(sink_h)). Hidden scores are set to -inf: the dtype's minimum would equal visible
    scores with a bias of the minimum. In a row without a visible key they are set to 0, because softmax would give NaN, and the
    weights are then set to zero. ``torch.softmax`` subtracts the row's largest logit first.

    Args:
        scores: (B, H, L, S), at least float32.
        visible: bool, broadcastable to scores; True = may attend; None = all.
        sinks: (H,) extra logits without a value (Xiao et al. 2023, arXiv:2309.17453; gpt-oss), or None.

    >>> masked_softmax(torch.tensor([[0.0, 0.0, 9.0]]), torch.tensor([[True, True, False]])).tolist()
    [[0.5, 0.5, 0.0]]
    """
    num_keys = scores.shape[-1]
    if visible is not None:
        hidden = ~visible
        fill = torch.where(visible.any(-1, keepdim=True), -inf, 0.0).to(scores.dtype)
        scores = torch.where(hidden, fill, scores)  # on a CPU faster than masked_fill
    if sinks is not None:
        sink_logits = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink_logits], dim=-1)
    weights = scores.softmax(-1)[..., :num_keys]
    return weights if visible is None else torch.where(hidden, 0.0, weights)


def hide_unseen(tensor: Tensor, visible: Tensor | None) -> Tensor:
    """Set keys or values (B, Hkv, S, D) that no query may see to zero. Otherwise a NaN there would reach the output: 0 · NaN is NaN."""
    if visible is None:
        return tensor
    return tensor.masked_fill(~visible_keys(visible, tensor.shape[1]), 0.0)


def visible_keys(visible: Tensor, num_kv_heads: int) -> Tensor:
    """Return which keys at least one query sees, (B or 1, Hkv or 1, S or 1, 1). One query head of a group is enough."""
    seen = visible.any(dim=-2)  # (B or 1, H or 1, S or 1)
    if seen.shape[1] not in (1, num_kv_heads):
        seen = seen.unflatten(1, (num_kv_heads, -1)).any(dim=2)
    return seen.unsqueeze(-1)


@dataclass(frozen=True, eq=False, slots=True)
class AttentionCall:
    """The arguments of one attention call. Every core and every backend takes an ``AttentionCall``.

    The order of operations is scale → soft-cap → + bias → mask → sinks → softmax → dropout → · value.

    Args:
        query: (B, H, L, D). key: (B, Hkv, S, D), Hkv dividing H. value: (B, Hkv, S, Dv).
        mask: a ``Mask`` that says which keys each query may see. None: all.
        attn_bias: float, (L, S) or broadcastable to (B, H, L, S), or a ``Bias``; −inf in it hides a key.
        scale: multiplies q·k.
        softcap: t in t · tanh(z / t), or None.
        sinks: (H,) extra logits without a value, or None.
        dropout_p: the probability of dropping a weight. 0.0 outside of training.
        need_weights: whether to return ``(output, weights)`` instead of the output.
        is_cross: whether the keys belong to another sequence. The result does not depend on it.
        state: for cores that keep a sum instead of keys: the cache with the sum over earlier positions. ``key`` and ``value``
            then hold only the new positions. Otherwise None.
        scores, weights: (B, H, L, S), values that replace the scores before the softmax, or the weights. None: no replacement.
            ``minitx.analysis.interventions`` sets them, and ``math`` then computes the call.

    >>> q = torch.zeros(1, 2, 3, 4)
    >>> call = AttentionCall(q, q, q, mask=Causal(), scale=0.5).check()
    >>> call.shape, call.visible()[0, 0].tolist()
    ((1, 2, 3, 3), [[True, False, False], [True, True, False], [True, True, True]])
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    attn_bias: Tensor | Bias | None = None
    scale: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    need_weights: bool = False
    is_cross: bool = False
    state: StateCache | None = None
    scores: Tensor | None = None
    weights: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, L, S)."""
        return (*self.query.shape[:3], self.key.shape[2])

    def dense_bias(self) -> Tensor | None:
        """Return the bias as a tensor that broadcasts to (B, H, L, S), or None."""
        if self.attn_bias is None or isinstance(self.attn_bias, Tensor):
            return self.attn_bias
        B, H, L, S = self.shape
        return as_bias(self.attn_bias).dense(L, S, batch_size=B, num_heads=H, device=self.query.device)

    def visible(self, attn_bias: Tensor | None = None) -> Tensor | None:
        """Return which keys each query may see: bool, broadcastable to (B, H, L, S), or None for all.

        Args:
            attn_bias: the result of ``dense_bias``, if it was called. −inf in it hides a key.
        """
        B, H, L, S = self.shape
        visible = None
        if self.mask is not None:
            visible = self.mask.dense(L, S, batch_size=B, num_heads=H, device=self.query.device)
        attn_bias = self.dense_bias() if attn_bias is None else attn_bias
        if attn_bias is not None:
            allowed = (attn_bias if attn_bias.dim() == 4 else attn_bias[None, None]) != -inf
            visible = allowed if visible is None else visible & allowed
        return visible

    def transforms(self) -> list[str]:
        """Return the transforms around the call: ``transforms_around``, and ``Jvp`` for dual tensors. The list is empty in a graph."""
        if torch.compiler.is_compiling():
            return []
        names = transforms_around()
        # outside of forward derivatives, the primal is the tensor itself, else a view
        if forward_ad.unpack_dual(self.query).primal is self.query:
            return names
        more = () if self.sinks is self.attn_bias is None else tensors_of((self.sinks, self.attn_bias))
        inputs = (self.query, self.key, self.value, *more)
        return [*names, "Jvp"] if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in inputs) else names

    def check_rules(self) -> AttentionCall:
        """Check that mask and bias fit the shape, and return the call. Query, key and value are not checked.

        Raises:
            ValueError: the mask or the bias is made for another shape.
        """
        if self.mask is not None:
            self.mask.check(*self.shape)
        if self.attn_bias is not None:
            as_bias(self.attn_bias).check(*self.shape)
        return self

    def check(self) -> AttentionCall:
        """Check that all arguments fit each other, and return the call.

        Raises:
            ValueError: shapes or numbers that do not fit. TypeError: dtypes or kinds that do not fit. Both name the argument.
        """
        query, key, value, sinks = self.query, self.key, self.value, self.sinks
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require_tensor(name, tensor)
            if tensor.dim() != 4 or 0 in tensor.shape[1:]:
                raise ValueError(
                    f"{name} must have shape (batch, heads, length, width), and only batch may be 0, got {tuple(tensor.shape)}"
                )
            if not tensor.is_floating_point() or tensor.dtype != query.dtype or tensor.device != query.device:
                raise TypeError(
                    f"{name} must be floating-point, {query.dtype} on {query.device} like query, got {tensor.dtype} on {tensor.device}"
                )
        (B, H, _, D), (_, Hkv, S, _) = query.shape, key.shape
        if key.shape[0] != B or key.shape[-1] != D or H % Hkv:
            expected = f"(B, Hkv, S, D) with B = {B}, D = {D} and Hkv dividing {H}"
            raise ValueError(f"key must have shape {expected}, as query has, got {tuple(key.shape)}")
        if value.shape[:3] != key.shape[:3]:
            raise ValueError(f"value must have the key's (B, Hkv, S) = {(B, Hkv, S)}, got {tuple(value.shape)}")
        if sinks is not None:
            require_tensor("sinks", sinks)
        if sinks is not None and (not sinks.is_floating_point() or tuple(sinks.shape) != (H,)):
            raise ValueError(f"sinks must be floating-point of shape (H,) = ({H},), got {sinks.dtype} {tuple(sinks.shape)}")
        return self.check_rules()


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    attn_bias: Tensor | Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    need_weights: bool = False,
) -> AttentionCall:
    """Build and check a call from the arguments of ``scaled_dot_product_attention``.

    Raises:
        ValueError: shapes, devices or numbers that do not fit. TypeError: dtypes or kinds that do not fit.
    """
    require_tensor("query", query)
    if scale is not None:
        require_number("scale", scale, " or None (1/sqrt(D); words belong to modules and configs)")
    if scale is not None and not -inf < scale < inf:
        raise ValueError(f"scale must be finite, got {scale}")
    check_settings(softcap, dropout_p, "dropout_p")
    return AttentionCall(
        *(query, key, value),
        mask=intersect(attn_mask, Causal() if is_causal else None),
        attn_bias=as_bias(attn_bias) if isinstance(attn_bias, Bias) else attn_bias,
        scale=max(query.shape[-1], 1) ** -0.5 if scale is None else float(scale),
        softcap=softcap,
        sinks=sinks,
        dropout_p=float(dropout_p),
        need_weights=need_weights,
    ).check()


def require_tensor(name: str, tensor: Tensor) -> None:
    """Raise a TypeError for anything but a tensor, and for a nested tensor, whose rows have different lengths."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.is_nested:
        raise TypeError(f"{name} must not be a nested tensor: pad it with torch.nested.to_padded_tensor, and give a key_mask")


def require_number(name: str, value: float, alternative: str = "") -> None:
    """Raise a TypeError for anything but a number. ``alternative`` says what else is allowed."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number{alternative}, got {value!r}")


def check_settings(softcap: float | None, dropout: float, name: str = "dropout") -> None:
    """Check the soft-cap and the dropout. ``name`` is the argument name of the dropout.

    Raises:
        TypeError: not a number. ValueError: out of range.
    """
    if softcap is not None:
        require_number("softcap", softcap, " or None (off)")
        if not 0 < softcap < inf:
            raise ValueError(f"softcap must be positive and finite (or None for off), got {softcap}")
    require_number(name, dropout)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), got {dropout}")


def scores_of(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Return the scores before the softmax, (B, H, L, S), and which of them are visible (see ``AttentionCall.visible``)."""
    with full_precision(call.query.device):
        attn_bias = call.dense_bias()
        visible = call.visible(attn_bias)
        if call.scores is not None:  # -inf hides a key, as in a bias
            seen = call.scores != -inf
            return call.scores, seen if visible is None else visible & seen
        key = hide_unseen(call.key, visible)
        scale, softcap = call.scale, call.softcap
        return attention_scores(call.query, key, scale=scale, softcap=softcap, attn_bias=attn_bias), visible


def attention_weights(call: AttentionCall) -> Tensor:
    """Return the weights of a call before dropout, (B, H, L, S), in at least float32.

    >>> query, keys = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 2, 4)
    >>> attention_weights(AttentionCall(query, keys, keys)).tolist()
    [[[[0.5, 0.5]]]]
    """
    if call.weights is not None:
        return call.weights
    with full_precision(call.query.device):
        return masked_softmax(*scores_of(call), call.sinks)


def reference_attention(call: AttentionCall) -> Tensor:
    """Compute a ``call`` by the definition above: (B, H, L, Dv) in the value's dtype. It is twice differentiable.

    >>> query, keys, value = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
    >>> reference_attention(AttentionCall(query, keys, value)).item()
    2.0
    """
    weights = attention_weights(call)
    if call.dropout_p > 0.0:
        weights = torch.nn.functional.dropout(weights, call.dropout_p)
    B, H, L, S = call.shape
    Hkv, Dv = call.value.shape[1], call.value.shape[3]
    with full_precision(call.query.device):
        visible = call.visible()
        if call.weights is not None and visible is not None:  # they may see hidden keys; a weight of 0 still has a gradient
            visible = visible | (weights != 0)
        value = hide_unseen(call.value, visible).to(weights.dtype).unsqueeze(2)  # (B, Hkv, 1, S, Dv)
        output = weights.reshape(B, Hkv, H // Hkv, L, S) @ value
    return output.reshape(B, H, L, Dv).to(call.value.dtype)


def with_weights(call: AttentionCall, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(output, weights)``: a kernel's output, and the weights before dropout, computed beside it, in the query's dtype."""
    return output, attention_weights(call).to(call.query.dtype)
