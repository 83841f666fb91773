"""What attention does, in numbers: logits, entropy, saturation, concentration.

Every statistic is taken per head over the visible (query, key) pairs; rows that see fewer than two keys and padded
queries are left out. Rows are streamed in chunks, so that no L × S matrix is ever held.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from minitx.nn.bias import Bias, as_bias
from minitx.nn.functional import attention_scores, hide_unseen, masked_softmax
from minitx.nn.masks import Mask, Padding

_TILE = 2**20  # scores held at a time


def attention_statistics(
    query: Tensor,
    key: Tensor,
    *,
    scale: float,
    mask: Mask | None = None,
    attn_bias: Tensor | Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> dict[str, Tensor]:
    """Statistics of one attention call, each (H,) in float64, averaged over batch and rows.

    With z the scaled scores and p the weights (before dropout), per row i over its n_i visible keys:

    =====================  ================================================================================
    ``logit_std``          std of z over all visible pairs
    ``row_std``            mean_i std_j z_ij: what softmax sees, which a constant added to a row does not change
    ``max_logit``          max |z|
    ``dot_product_variance``       mean_i var_j (q_i · k_j), before scaling, row-centred (R1: equals D on unit-normal input)
    ``entropy``            mean_i H_i / ln n_i with H_i = -Σ p ln p; 1 is uniform, 0 is one key
    ``max_weight``         mean_i max_j p_ij
    ``saturation_99``      share of rows with max p > 0.99; ``saturation_90`` likewise
    ``ipr``                mean_i Σ_j p², the inverse participation ratio: 1 / the effective number of keys
    ``jacobian_l1``        mean_i (1 - Σ p²) = ½ ‖J‖₁ of softmax's Jacobian J = diag(p) - p pᵀ
    ``jacobian_fro``       mean_i (Σp² - 2 Σp³ + (Σp²)²) = ‖J‖_F²
    ``query_norm``         mean ‖q‖, ``key_norm`` mean ‖k‖ over keys that are no padding, ``cosine`` mean_ij cos(q_i, k_j)
    =====================  ================================================================================

    Args:
        query: (B, H, L, D), as the core gets it. key: (B, Hkv, S, D).
        scale, mask, attn_bias, softcap, sinks: as in ``scaled_dot_product_attention``.

    >>> q = torch.zeros(1, 2, 5, 3)
    >>> round(float(attention_statistics(q, q, scale=1.0)["entropy"][0]), 6)  # equal scores: uniform weights
    1.0
    """
    totals: dict[str, Tensor] = {}
    maximum = torch.zeros(query.shape[1], dtype=torch.float64)
    for tile in _tiles(query, key, mask, attn_bias):
        sums, top = _tile_sums(*tile, scale=scale, softcap=softcap, sinks=sinks)
        maximum = torch.maximum(maximum, top.cpu())
        for name, value in sums.items():
            totals[name] = totals[name] + value.cpu() if name in totals else value.cpu()
    rows, pairs = totals.pop("rows").clamp(min=1), totals.pop("pairs").clamp(min=1)
    mean, square = totals.pop("logit") / pairs, totals.pop("logit_square") / pairs
    result = {name: value / (pairs if name == "cosine" else rows) for name, value in totals.items()}
    result["logit_std"] = (square - mean**2).clamp(min=0).sqrt()
    result["max_logit"] = maximum
    real_key = _real(mask, key.shape[0], key.shape[2], key.device)[:, None]  # (B, 1, S)
    norms = key.double().norm(dim=-1).masked_fill(~real_key, 0.0).sum(dim=(0, 2)) / real_key.sum().clamp(min=1)
    result["key_norm"] = norms.repeat_interleave(query.shape[1] // key.shape[1]).cpu()
    return result


def favourite_keys(
    query: Tensor, key: Tensor, *, scale: float, mask: Mask | None = None, attn_bias: Tensor | Bias | None = None
) -> Tensor:
    """The key with the largest weight, per row: int (B, H, L); -1 for rows that see fewer than two keys.

    Sinks keep the order of the keys, and so does a soft-cap where there is no bias; they are not asked for.
    """
    chunks = []
    for q, k, visible, counted, bias in _tiles(query, key, mask, attn_bias):
        scores = attention_scores(q, k, scale=1.0 if scale == 0 else scale, attn_bias=bias)
        best = scores.masked_fill(~visible, -torch.inf).argmax(-1)
        chunks.append(torch.where(counted, best, -1))
    return torch.cat(chunks, dim=2)


Tile = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]


def _tiles(query: Tensor, key: Tensor, mask: Mask | None, attn_bias: Tensor | Bias | None) -> Iterator[Tile]:
    """(query rows, key, visible (B, H, rows, S), counted (B, H, rows), bias of the rows) for each chunk of rows."""
    B, H, L, _ = query.shape
    S = key.shape[2]
    rows = max(1, _TILE // (B * H * S))
    real = _real(mask, B, S, query.device)
    real_query = real[:, S - L :] if L <= S else real.new_ones(B, L)  # the last L of the S positions
    for start in range(0, L, rows):
        chunk = slice(start, min(start + rows, L))
        size = chunk.stop - chunk.start
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=query.device)
        if mask is not None:
            visible = mask.dense(L, S, batch_size=B, num_heads=H, device=query.device, rows=chunk, keys=slice(None))
        bias = None
        if attn_bias is not None:
            place: dict[str, Any] = {
                "batch_size": B,
                "num_heads": H,
                "device": query.device,
                "rows": chunk,
                "keys": slice(None),
            }
            bias = as_bias(attn_bias).dense(L, S, **place).detach()
            visible = visible & (bias != -torch.inf)
        visible = visible.expand(B, H, size, S)
        counted = (visible.sum(-1) > 1) & real_query[:, None, chunk]
        yield query[:, :, chunk], hide_unseen(key, visible), visible, counted, bias


def _real(mask: Mask | None, B: int, S: int, device: torch.device) -> Tensor:
    """Positions that are no padding, (B, S)."""
    real = torch.ones(B, S, dtype=torch.bool, device=device)
    for part in mask.parts() if mask is not None else ():
        if isinstance(part, Padding):
            real = real & part.key_mask
    return real


def _tile_sums(
    query: Tensor,
    key: Tensor,
    visible: Tensor,
    counted: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Sums over the counted rows of one tile, each (H,), and the largest |z|."""
    dots = attention_scores(query, key, scale=1.0)
    z = attention_scores(query, key, scale=scale, softcap=softcap, attn_bias=bias)
    p = masked_softmax(z, visible, sinks)
    seen = visible & counted.unsqueeze(-1)  # (B, H, rows, S)
    n = seen.sum(-1)
    z_seen = z.masked_fill(~seen, 0.0).double()
    top = p.amax(-1)
    squares = p.double().square()
    ipr, cubes = squares.sum(-1), (squares * p).sum(-1)
    entropy = -torch.special.xlogy(p, p).sum(-1).double()
    cosines = dots / (query.float().norm(dim=-1, keepdim=True) * _grouped(key, query).float().norm(dim=-1).unsqueeze(2))
    per_row = {
        "rows": torch.ones_like(ipr),
        "pairs": n.double(),
        "logit": z_seen.sum(-1),
        "logit_square": z_seen.square().sum(-1),
        "row_std": _row_variance(z, seen, n).sqrt(),
        "dot_product_variance": _row_variance(dots, seen, n),
        "entropy": entropy / n.clamp(min=2).double().log(),
        "max_weight": top.double(),
        "saturation_99": (top > 0.99).double(),
        "saturation_90": (top > 0.9).double(),
        "ipr": ipr,
        "jacobian_l1": 1.0 - ipr,
        "jacobian_fro": ipr - 2.0 * cubes + ipr.square(),
        "query_norm": query.double().norm(dim=-1),
        "cosine": cosines.masked_fill(~seen, 0.0).nan_to_num().sum(-1).double(),
    }
    sums = {name: value.masked_fill(~counted, 0.0).sum(dim=(0, 2)) for name, value in per_row.items()}
    return sums, z_seen.abs().amax(dim=(0, 2, 3))


def _grouped(key: Tensor, query: Tensor) -> Tensor:
    """Keys repeated for the query heads of their group."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _row_variance(x: Tensor, seen: Tensor, n: Tensor) -> Tensor:
    """Unbiased variance of each row over the keys it sees, (B, H, rows)."""
    x = x.masked_fill(~seen, 0.0).double()
    mean = x.sum(-1, keepdim=True) / n.clamp(min=1).unsqueeze(-1)
    return (x - mean).masked_fill(~seen, 0.0).square().sum(-1) / (n - 1).clamp(min=1)


def zhai_entropy_bound(scores: Tensor) -> Tensor:
    """A lower bound on the entropy of softmax(z) for rows z (..., T), T ≥ 2 (Zhai et al. 2023, arXiv:2303.06296, Th. 3.1).

    Ent ≥ ln(1 + (T-1)β) + s √(T(T-1)) β / (1 + (T-1)β), with β = exp(-s √(T/(T-1))) and s = ‖z - mean(z)‖₂. Attained by
    one logit that stands above T - 1 equal ones.

    Raises:
        ValueError: rows of fewer than two scores.
    """
    T = scores.shape[-1]
    if T < 2:
        raise ValueError(f"the bound is for rows of at least two scores, got {T}")
    spread = (scores - scores.mean(-1, keepdim=True)).norm(dim=-1)
    beta = torch.exp(-spread * math.sqrt(T / (T - 1)))
    others = 1.0 + (T - 1) * beta
    return others.log() + spread * math.sqrt(T * (T - 1)) * beta / others
