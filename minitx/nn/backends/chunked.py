"""``chunked``: exact attention in plain torch that never holds an L × S matrix, forward or backward.

Queries and keys are cut into tiles of at most 256 × 256 scores a head. The softmax runs online (Milakov & Gimelshein 2018,
arXiv:1805.02867; Rabe & Staats 2021, arXiv:2112.05682): for every query it keeps the largest logit so far ``top``, the
sum ``total`` of exp(logit − top), and the output so far, all rescaled when ``top`` grows. The backward pass computes
each tile again from ``top`` and 1/``total`` (Dao et al. 2022, arXiv:2205.14135, algorithm 4):

    P = exp(Z − top) / total    dV = (P∘R)ᵀ dO    dP = (dO Vᵀ)∘R    dZ = P∘(dP − Σ dO∘O)    dQ = c·dZ K    dK = c·dZᵀ Q

with R the dropout factors, 0 or 1/(1 − p), drawn anew from a seed of their own in both passes. Tiles that the mask hides
entirely are skipped: a causal call costs half, a window costs length × window. The remaining tiles are found once and stored
with the mask, so the layers of a model share them.

Both passes are ``torch.library`` operators, so each is one node of a compiled graph. An operator takes tensors and plain values
only. Bias, sinks, mask and seed are therefore passed as a program and its tensors (``programs.py``), and scale, soft-cap (0 for
none) and dropout as ``numbers``. The operator returns the output in the precision of the sums, because dZ needs it unrounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minitx.nn.backends.base import Backend
from minitx.nn.backends.programs import can_pack, cannot_pack, pack, unpack
from minitx.nn.bias import Bias, TensorBias, as_bias
from minitx.nn.functional import AttentionCall, full_precision, hide_unseen
from minitx.nn.masks import Mask, simplify

TILE = 2**19  # scores of a tile, all heads together: two megabytes, which a cache may hold
LARGEST, SMALLEST = 256, 64  # sides of a tile, for one head and for very many
Plan = list[tuple[slice, list[tuple[slice, bool]]]]


@dataclass
class Problem:
    """One call with tensors in the dtype of the sums. ``tile`` computes any tile of it."""

    query: Tensor  # (B, H, L, D), already scaled
    key: Tensor
    value: Tensor
    bias: Bias | None
    sinks: Tensor | None  # (H, 1, 1)
    mask: Mask | None
    seed: int
    scale: float
    softcap: float  # 0 for none
    dropout_p: float
    plan: Plan

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], program: str, numbers: list[float]) -> Problem:
        bias, sinks, mask, seed, states = unpack(program, tensors)  # as ``run`` packs them
        scale, softcap, dropout_p = numbers
        dtype = _sum_dtype(query)
        query, key, value = query.to(dtype) * scale, key.to(dtype), value.to(dtype)
        sinks, seed = None if sinks is None else sinks.to(dtype).view(-1, 1, 1), 0 if seed is None else int(seed)
        shape = (*query.shape[:3], key.shape[2])
        plan = tiles(mask, shape, tile_states(mask, shape, query.device) if states is None else states)
        return Problem(query, key, value, bias, sinks, mask, seed, scale, softcap, dropout_p, plan)

    def tile(self, rows: slice, keys: slice, is_whole: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return the logits (B, H, l, s) with -inf where hidden, the soft-capped scores, and the keys and values of a tile."""
        options: dict[str, Any] = {"batch_size": self.query.shape[0], "num_heads": self.query.shape[1]}
        options |= {"device": self.query.device, "rows": rows, "keys": keys}
        L, S = self.query.shape[2], self.key.shape[2]
        visible = None
        if self.mask is not None and not is_whole:
            visible = self.mask.dense(L, S, **options)
        bias = None if self.bias is None else self.bias.dense(L, S, **options).to(self.query.dtype)
        if bias is not None:
            visible = bias != -torch.inf if visible is None else visible & (bias != -torch.inf)
        key, value = hide_unseen(self.key[:, :, keys], visible), hide_unseen(self.value[:, :, keys], visible)
        logits = by_group(self.query[:, :, rows], key.mT)
        capped = None
        if self.softcap > 0.0:
            capped = logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if bias is not None:
            logits = logits + bias
        if visible is not None:
            logits = logits.masked_fill(~visible, -torch.inf)
        return logits, capped, key, value

    def dropout(self, rows: slice, keys: slice) -> Tensor | None:
        """Return the dropout factors of a tile, 0 or 1/(1 − p). They are the same in every call."""
        if self.dropout_p == 0.0:
            return None
        place = rows.start * self.key.shape[2] + keys.start
        generator = torch.Generator(self.query.device).manual_seed((self.seed + 0x9E3779B1 * place) % 2**32)
        shape = (*self.query.shape[:2], rows.stop - rows.start, keys.stop - keys.start)
        drawn = torch.rand(shape, generator=generator, device=self.query.device)
        return (drawn >= self.dropout_p).to(self.query.dtype).div_(1.0 - self.dropout_p)


def tile_sizes(mask: Mask | None, shape: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """Return the rows and keys of a tile, and the largest number of keys of merged neighbours, for ``shape`` = (B, H, L, S)."""
    B, H, L, S = shape
    side = min(max(math.isqrt(TILE // (B * H)) // 32 * 32, SMALLEST), LARGEST)
    grain = None if mask is None else mask.grain()
    fine = side if grain is None else min(side, max(-(-grain // 32) * 32, SMALLEST))
    height = min(fine, L)
    most = min(side * side // height, S)
    return height, most if fine == side else min(fine, S), most


def tile_states(mask: Mask | None, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Return the state of each tile, int8 (R, C): 0 if all of it is hidden, 2 if all of it is visible, else 1."""
    _, _, L, S = shape
    height, width, _ = tile_sizes(mask, shape)
    rows, keys = (
        torch.cat((torch.arange(0, length, size, device=device), torch.tensor([length], device=device)))
        for length, size in ((L, height), (S, width))
    )
    if mask is None:
        return torch.full((len(rows) - 1, len(keys) - 1), 2, dtype=torch.int8, device=device)
    whole, empty = mask.tile_map(rows, keys, S - L)
    return (1 + whole.to(torch.int8)).masked_fill(empty, 0)


def tiles(mask: Mask | None, shape: tuple[int, int, int, int], states: Tensor) -> Plan:
    """Yield the tiles to compute: slices of the rows, each with slices of the keys and whether all of it is visible."""
    _, _, L, S = shape
    height, width, most = tile_sizes(mask, shape)
    plan: Plan
    whole = (states == 2).numpy(force=True)
    plan = [(slice(row, min(row + height, L)), []) for row in range(0, L, height)]
    for row, column in states.nonzero().tolist():
        strip, is_whole = plan[row][1], bool(whole[row][column])
        start, stop = column * width, min((column + 1) * width, S)
        if strip and strip[-1][0].stop == start and stop - strip[-1][0].start <= most:  # one product for neighbours
            strip[-1] = slice(strip[-1][0].start, stop), strip[-1][1] and is_whole
        else:
            strip.append((slice(start, stop), is_whole))
    return plan


def share_of_tiles(call: AttentionCall) -> float:
    """Return the share of a call's scores that are in computed tiles."""
    if call.mask is None:
        return 1.0
    states = _states(call)
    return (states > 0).float().mean().item()


def _states(call: AttentionCall) -> Tensor:
    assert call.mask is not None
    shape, device = call.shape, call.query.device
    kept_for = shape, device, tile_sizes(call.mask, shape)
    return call.mask.remember("tiles", kept_for, tile_states, call.mask, shape, device)


def by_group(left: Tensor, right: Tensor) -> Tensor:
    """(B, H, L, m) @ (B, Hkv, m, n) -> (B, H, L, n): query head h uses key head h // (H / Hkv)."""
    B, H, L, m = left.shape
    folded = left.reshape(B, right.shape[1], -1, m)  # the heads of a group are rows of one product
    return (folded @ right).view(B, H, L, right.shape[-1])


def over_group(left: Tensor, right: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, L, m)ᵀ @ (B, H, L, n) -> (B, Hkv, m, n), summed over the query heads of each key head."""
    left, right = (t.reshape(t.shape[0], num_kv_heads, -1, t.shape[-1]) for t in (left, right))
    return left.mT @ right


def forward_by_tiles(
    query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], program: str, numbers: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output (B, H, L, Dv), top (B, H, L, 1), 1/total (B, H, L, 1)) in the dtype of the sums."""
    with full_precision(query.device):
        problem = Problem.of(query, key, value, tensors, program, numbers)
        output, top, total = _outputs(problem.query, value)
        output.zero_(), top.fill_(torch.finfo(top.dtype).min), total.zero_()
        if problem.sinks is not None:  # the sums start with the sink, a logit without a value
            top.copy_(problem.sinks.clamp(min=torch.finfo(top.dtype).min))
            total.copy_((problem.sinks - top).exp())
        for rows, strip in problem.plan:
            out, largest, summed = output[:, :, rows], top[:, :, rows], total[:, :, rows]
            for keys, is_whole in strip:
                logits, _, _, seen_value = problem.tile(rows, keys, is_whole)
                larger = torch.maximum(largest, logits.amax(-1, keepdim=True))
                weights = logits.sub_(larger).exp_()  # exactly 0 where hidden: `larger` is finite, the logit is not
                shrink = (largest - larger).exp_()
                summed.mul_(shrink).add_(weights.sum(-1, keepdim=True))
                factors = problem.dropout(rows, keys)
                out.mul_(shrink).add_(by_group(weights if factors is None else weights.mul_(factors), seen_value))
                largest.copy_(larger)
        inverse = total.reciprocal().masked_fill_(total == 0, 0.0)  # a row that sees nothing
        return output.mul_(inverse), top, inverse


def backward_by_tiles(
    grad: Tensor,
    outputs: list[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    program: str,
    numbers: list[float],
    wanted: list[bool],
) -> list[Tensor]:
    """Return the gradients of query, key, value and the ``tensors`` that need one (else empty). ``outputs`` is as above."""
    with full_precision(query.device):
        problem, (output, top, inverse) = Problem.of(query, key, value, tensors, program, numbers), outputs
        d_query, d_key, d_value = (t.new_zeros(t.shape) for t in (problem.query, problem.key, problem.value))
        d_tensors = [_like(t, want, dtype=top.dtype).zero_() for t, want in zip(tensors, wanted, strict=True)]
        bias_gradient = BiasGradient(problem, d_tensors, wanted)
        delta = (grad * output).sum(-1, keepdim=True)
        for rows, strip in problem.plan:
            d_out, q = grad[:, :, rows], problem.query[:, :, rows]
            for keys, is_whole in strip:
                logits, capped, seen_key, seen_value = problem.tile(rows, keys, is_whole)
                weights = torch.exp(logits - top[:, :, rows]).mul_(inverse[:, :, rows])
                d_weights = by_group(d_out, seen_value.mT)
                factors = problem.dropout(rows, keys)
                if factors is not None:
                    d_weights.mul_(factors)
                d_value[:, :, keys] += over_group(weights if factors is None else weights * factors, d_out, key.shape[1])
                d_logits = d_weights.sub_(delta[:, :, rows]).mul_(weights)
                bias_gradient.add(d_logits, rows, keys)
                if capped is not None:
                    d_logits = d_logits * (1.0 - (capped / problem.softcap).square_())
                d_query[:, :, rows] += by_group(d_logits, seen_key)
                d_key[:, :, keys] += over_group(d_logits, q, key.shape[1])
        if problem.sinks is not None and wanted[bias_gradient.count]:  # sinks come right after the bias
            d_tensors[bias_gradient.count] -= ((problem.sinks - top).exp() * inverse * delta).sum((0, 2, 3))
        pairs = zip([d_query.mul_(problem.scale), d_key, d_value, *d_tensors], [query, key, value, *tensors], strict=True)
        return [gradient.to(tensor.dtype) for gradient, tensor in pairs]


# the operators: `minitx.analysis.counting` counts what the functions do, which nobody sees inside an operator
chunked_attention = torch.library.custom_op("minitx::chunked_attention", forward_by_tiles, mutates_args=())
chunked_attention_backward = torch.library.custom_op("minitx::chunked_attention_backward", backward_by_tiles, mutates_args=())


class BiasGradient:
    """Sums the gradient of a bias's tensors over the tiles, into the first of ``sums``."""

    def __init__(self, problem: Problem, sums: list[Tensor], wanted: list[bool]) -> None:
        self.problem = problem
        self.program, self.tensors = pack(problem.bias)
        self.count = len(self.tensors)
        self.chosen = [i for i in range(self.count) if wanted[i]]
        self.sums = [sums[i] for i in self.chosen]

    def add(self, d_logits: Tensor, rows: slice, keys: slice) -> None:
        """Add the contribution of the tile ``rows`` × ``keys``, given the gradient of its logits."""
        if not self.chosen:
            return
        B, H, L, _ = self.problem.query.shape
        S = self.problem.key.shape[2]
        if isinstance(self.problem.bias, TensorBias):  # its tile is a slice of it, and so is its gradient's
            part = TensorBias(self.sums[0]).dense(L, S, rows=rows, keys=keys)
            part += d_logits.sum_to_size(part.shape)
            return

        def tile(*chosen: Tensor) -> Tensor:
            tensors = list(self.tensors)
            for place, tensor in zip(self.chosen, chosen, strict=True):
                tensors[place] = tensor
            bias = unpack(self.program, tensors)
            return bias.dense(L, S, batch_size=B, num_heads=H, device=d_logits.device, rows=rows, keys=keys)

        values, pull = torch.func.vjp(tile, *(self.tensors[i].to(d_logits.dtype) for i in self.chosen))  # type: ignore[misc]
        for total, part in zip(self.sums, pull(d_logits.sum_to_size(values.shape).to(values.dtype)), strict=True):
            total += part


def _sum_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)


def _outputs(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for output, top and total."""
    rows, dtype = query.shape[:3], _sum_dtype(query)
    output = query.new_empty((*rows, value.shape[-1]), dtype=dtype)
    return output, query.new_empty((*rows, 1), dtype=dtype), query.new_empty((*rows, 1), dtype=dtype)


@chunked_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(query, value)


def _like(tensor: Tensor, want: bool, **options: Any) -> Tensor:
    """An empty tensor for a gradient; without elements where the gradient is not wanted."""
    return torch.empty_like(tensor, **options) if want else tensor.new_empty(0, **options)


@chunked_attention_backward.register_fake
def _(
    grad: Tensor, outputs: Any, query: Tensor, key: Tensor, value: Tensor, tensors: Any, program: str, numbers: Any, wanted: Any
) -> list[Tensor]:
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (query, key, value)]
    return [*grads, *(_like(t, want) for t, want in zip(tensors, wanted, strict=True))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, tensors, *ctx.plain = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output, query, key, value, *tensors)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    output, top, inverse, query, key, value, *tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[3])
    d_query, d_key, d_value, *d_tensors = chunked_attention_backward(
        grad, [output, top, inverse], query, key, value, tensors, *ctx.plain, wanted
    )
    d_tensors = [part if want else None for part, want in zip(d_tensors, wanted, strict=True)]
    return d_query, d_key, d_value, d_tensors, None, None


def _no_second(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("backend 'chunked' is not twice differentiable; backend='math' is")


chunked_attention.register_autograd(_backward, setup_context=_save)
chunked_attention_backward.register_autograd(_no_second)


def run(call: AttentionCall) -> Tensor:
    """Compute attention tile by tile. Memory grows with L + S."""
    _, _, L, S = call.shape
    bias = None if call.attn_bias is None else as_bias(call.attn_bias)
    seed = torch.randint(2**31, ()) if call.dropout_p > 0.0 else None
    mask = simplify(call.mask, L, S)
    has_values = (
        type(call.query) in (Tensor, torch.nn.Parameter) and not call.query.is_meta and not torch.compiler.is_compiling()
    )
    states = _states(replace(call, mask=mask)) if mask is not None and has_values else None
    program, tensors = pack((bias, call.sinks, mask, seed, states))
    numbers = [call.scale, call.softcap or 0.0, call.dropout_p]
    output, _, _ = chunked_attention(call.query, call.key, call.value, tensors, program, numbers)
    return output.to(call.value.dtype)


def why_not(call: AttentionCall) -> str | None:
    """Return the reason why ``pack`` cannot translate the mask or the bias, or None."""
    return None if can_pack((call.mask, call.attn_bias)) else cannot_pack((call.mask, call.attn_bias))


def falls_back(call: AttentionCall) -> str:
    """Return the reason, always: it runs many small kernels."""
    return "it works tile by tile in plain torch"


BACKEND = Backend("chunked", run, why_not=why_not, falls_back=falls_back)
