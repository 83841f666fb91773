"""The definition of attention in plain loops, and the tolerance for rounding."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``float32``."""
    return str(dtype).removeprefix("torch.")


def naive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    attn_bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention in plain loops, one query at a time. It shares no code with the rest of the package.

    In float64 it is the reference. In half precision it rounds like a good kernel: the scores and the softmax are in float32, the
    weights and the output in the dtype of the inputs.

    Args:
        query, key, value: (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv).
        attn_mask: a bool tensor that broadcasts to (B, H, L, S), True = may attend. Default: nothing is hidden.
        is_causal: hide later keys. The last query sees all keys.
        scale: the factor on q·k. Default: 1/√D.
        attn_bias: a float tensor that broadcasts to (B, H, L, S), added to the scores; -inf hides a key. Default: none.
        softcap: t in t · tanh(score / t). Default: none.
        sinks: (H,), an extra logit in the softmax of each head. Default: none.

    Returns:
        ``(output (B, H, L, Dv), weights (B, H, L, S))``.

    >>> query, key, value = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
    >>> output, weights = naive_attention(query, key, value)
    >>> output.item(), weights.tolist()
    (2.0, [[[[0.5, 0.5]]]])
    """
    (B, H, L, D), (Hkv, S) = query.shape, key.shape[1:3]
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    scale = D**-0.5 if scale is None else scale
    mask = torch.ones(B, H, L, S, dtype=torch.bool) if attn_mask is None else attn_mask.expand(B, H, L, S)
    bias = None if attn_bias is None else attn_bias.to(wide).expand(B, H, L, S)
    allowed = (mask if bias is None else mask & (bias != -torch.inf)).tolist()
    queries = iter(query.to(wide).flatten(0, 2).unbind())
    outputs, weights = [], []
    for b, h in product(range(B), range(H)):
        keys, values = key[b, h // (H // Hkv)].to(wide), value[b, h // (H // Hkv)].to(wide)
        for i in range(L):
            end = i + S - L + 1 if is_causal else S  # the last query sees the last key
            visible = torch.tensor([j for j in range(end) if allowed[b][h][i][j]], dtype=torch.long)
            logits = keys[visible] @ next(queries) * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if bias is not None:
                logits = logits + bias[b, h, i, visible]
            if sinks is not None:
                logits = torch.cat((logits, sinks[h : h + 1].to(wide)))
            largest = logits.detach().max() if len(logits) else 0.0  # without a visible key, the sums below are zero
            exponentials = torch.exp(logits - largest)
            p = exponentials / exponentials.sum()
            p = (p if sinks is None else p[:-1]).to(dtype)
            outputs.append((p.to(wide) @ values[visible]).to(dtype))
            weights.append(p if len(p) == S else p.new_zeros(S).index_put((visible,), p))
    return torch.stack(outputs).view(B, H, L, -1), torch.stack(weights).view(B, H, L, S)


def tolerance(want: Tensor, low: Tensor, dtype: torch.dtype, size: float = 0.0) -> float:
    """Return the largest error that a result in ``dtype`` may have: twice the error of ``low`` plus four rounding errors.

    Args:
        want: the exact result, in float64.
        low: the result of ``naive_attention`` in ``dtype``. If ``dtype`` is float64, its result in float32, whose error is scaled.
        dtype: the dtype of the result.
        size: the largest summand of the result, for results in which large summands cancel.
    """
    error = (low.double() - want).abs().max().item()
    if dtype == torch.float64:
        error *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return 2 * error + 4 * torch.finfo(dtype).eps * max(size, want.abs().max().item())


def gradient_sizes(
    query: Tensor, key: Tensor, value: Tensor, cotangent: Tensor, weights: Tensor, scale: float
) -> dict[str, float]:
    """Return the ``size`` in ``tolerance`` for each gradient.

    The gradient of a score is p (dp - Σ p dp) with dp = cotangent · value. For a query with one key the gradient is zero although dp is
    not. A fused kernel recomputes p from the score and the logsumexp. Both are rounded, so larger scores give larger errors.
    """
    key, value = key.double().nan_to_num(), value.double().nan_to_num()
    dp = cotangent.double() @ value.repeat_interleave(cotangent.shape[1] // value.shape[1], dim=1).mT
    largest_dp = (dp.abs() * weights.double()).sum(-1).max().item()
    largest_query, largest_key = query.abs().max().item(), key.abs().max().item()
    return {
        "gradient of query": abs(scale) * largest_dp * largest_key,
        "gradient of key": abs(scale) * largest_dp * largest_query,
        "gradient of value": abs(scale) * query.norm(dim=-1).max().item() * key.norm(dim=-1).max().item(),
    }
