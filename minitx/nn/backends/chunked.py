"""``chunked``: exact attention in plain torch that never stores an L × S matrix, forward or backward.

Queries and keys are cut into tiles of at most 256 × 256 scores per head. The softmax runs online (Milakov & Gimelshein 2018,
arXiv:1805.02867; Rabe & Staats 2021, arXiv:2112.05682): for every query it keeps the largest logit so far ``top``, the
sum ``total`` of exp(logit − top), and the output so far, all rescaled when ``top`` grows. The backward pass computes
each tile again from ``top`` and 1/``total`` (Dao et al. 2022, arXiv:2205.14135, algorithm 4):

    P = exp(Z − top) / total    dV = (P∘R)ᵀ dO    dP = (dO Vᵀ)∘R    dZ = P∘(dP − Σ dO∘O)    dQ = c·dZ K    dK = c·dZᵀ Q

where R holds the dropout factors, 0 or 1/(1 − p). Both passes draw R from the same seed. Tiles that the mask hides entirely are
skipped: a causal call costs half, a window costs length × window. The remaining tiles are found once and stored with the mask,
so the layers of a model share them. On an accelerator, only positions decide which tiles are skipped (``Causal``,
``SlidingWindow``, ``PrefixLM``): reading padding, documents or a pattern would make the host wait in every layer.

Each pass is a ``torch.autograd.Function``. ``torch.compile`` does not enter it, so a compiled graph breaks there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minitx.nn.bias import Bias, TensorBias, as_bias
from minitx.nn.functional import AttentionCall, hide_unseen, reference_attention
from minitx.nn.masks import Mask, simplify
from minitx.nn.precision import full_precision
from minitx.nn.rules import builder_of, tensors_of, unknown_in

TILE = 2**19  # the scores of a tile over all heads: two megabytes fit into a CPU's cache
LARGEST, SMALLEST = 256, 64  # the sides of a tile for one head, and for very many heads
TilePlan = list[tuple[slice, list[tuple[slice, bool]]]]


class Settings(NamedTuple):
    """The arguments of a call, without tensors that may need a gradient."""

    mask: Mask | None
    make_bias: Callable[[Iterator[Tensor]], Bias | None]  # from the tensors of the bias
    seed: int
    scale: float
    softcap: float | None
    dropout_p: float
    plan: TilePlan

    @staticmethod
    def of(call: AttentionCall, seed: int) -> Settings:
        """Return the settings of a call. ``seed`` is for dropout."""
        bias = None if call.attn_bias is None else as_bias(call.attn_bias)
        call = replace(call, mask=simplify(call.mask, *call.shape[2:]))
        plan = tiles(call.mask, call.shape, _states_of_call(call))
        return Settings(call.mask, builder_of(bias), seed, call.scale, call.softcap, call.dropout_p, plan)


class Problem:
    """One call with tensors in the dtype of the sums. ``tile`` computes any tile of it."""

    def __init__(
        self,
        settings: Settings,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bias_tensors: Sequence[Tensor],
    ) -> None:
        dtype = torch.promote_types(query.dtype, torch.float32)
        self.settings = settings
        self.bias = settings.make_bias(iter(bias_tensors))
        self.query, self.key, self.value = query.to(dtype) * settings.scale, key.to(dtype), value.to(dtype)
        self.sinks = None if sinks is None else sinks.to(dtype).view(-1, 1, 1)  # (H, 1, 1)

    def tile(self, rows: slice, keys: slice, is_whole: bool) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return the logits (B, H, l, s) with -inf where hidden, the soft-capped scores, and the keys and values of a tile."""
        options: dict[str, Any] = {"batch_size": self.query.shape[0], "num_heads": self.query.shape[1]}
        options |= {"device": self.query.device, "rows": rows, "keys": keys}
        L, S = self.query.shape[2], self.key.shape[2]
        visible = None
        if self.settings.mask is not None and not is_whole:
            visible = self.settings.mask.dense(L, S, **options)
        bias = None if self.bias is None else self.bias.dense(L, S, **options).to(self.query.dtype)
        if bias is not None:
            visible = bias != -torch.inf if visible is None else visible & (bias != -torch.inf)
        key, value = hide_unseen(self.key[:, :, keys], visible), hide_unseen(self.value[:, :, keys], visible)
        logits = by_group(self.query[:, :, rows], key.mT)
        capped = None
        softcap = self.settings.softcap
        if softcap is not None:
            capped = logits = logits.div_(softcap).tanh_().mul_(softcap)
        if bias is not None:
            logits = logits + bias
        if visible is not None:
            logits = logits.masked_fill(~visible, -torch.inf)
        return logits, capped, key, value

    def dropout(self, rows: slice, keys: slice) -> Tensor | None:
        """Return the dropout factors of a tile, 0 or 1/(1 − p). They are the same in every call."""
        dropout_p = self.settings.dropout_p
        if dropout_p == 0.0:
            return None
        place = rows.start * self.key.shape[2] + keys.start
        generator = torch.Generator(self.query.device).manual_seed((self.settings.seed + 0x9E3779B1 * place) % 2**32)
        shape = (*self.query.shape[:2], rows.stop - rows.start, keys.stop - keys.start)
        drawn = torch.rand(shape, generator=generator, device=self.query.device, dtype=torch.float32)
        return (drawn >= dropout_p).to(self.query.dtype).div_(1.0 - dropout_p)


class TileSizes(NamedTuple):
    """The height and the width of a tile, and the largest width of neighbours that are computed as one product."""

    height: int  # in queries
    width: int  # in keys
    merged_width: int  # in keys


def tile_sizes(mask: Mask | None, shape: tuple[int, int, int, int]) -> TileSizes:
    """Return the tile sizes for ``shape`` = (B, H, L, S).

    A square of ``largest`` × ``largest`` scores fits into the cache. A mask with a fine grain gets smaller tiles, because more of
    them are empty. Merged neighbours again have as many scores as the square.
    """
    B, H, L, S = shape
    largest = min(max(math.isqrt(TILE // (B * H)) // 32 * 32, SMALLEST), LARGEST)
    grain = None if mask is None else mask.grain()
    side = largest if grain is None else min(largest, max(-(-grain // 32) * 32, SMALLEST))
    height = min(side, L)
    merged_width = min(largest * largest // height, S)
    if side == largest:  # the mask has no fine grain: begin with wide tiles
        return TileSizes(height, merged_width, merged_width)
    return TileSizes(height, min(side, S), merged_width)


def tile_states(mask: Mask | None, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """Return the state of each tile, int8 (R, C) on the CPU: 0 if all of it is hidden, 2 if all of it is visible, else 1."""
    _, _, L, S = shape
    sizes = tile_sizes(mask, shape)
    rows, keys = (
        torch.tensor([*range(0, length, size), length], device="cpu") for length, size in ((L, sizes.height), (S, sizes.width))
    )
    if mask is None:
        return torch.full((len(rows) - 1, len(keys) - 1), 2, dtype=torch.int8, device="cpu")
    # on an accelerator, use ``verdict``: it does not read the tensors of a mask
    tile_map = mask.tile_map if device.type == "cpu" else partial(Mask.tile_map, mask)
    whole, empty = tile_map(rows, keys, S - L)
    return (1 + whole.to(torch.int8)).masked_fill(empty, 0)


def tiles(mask: Mask | None, shape: tuple[int, int, int, int], states: Tensor) -> TilePlan:
    """Return the tiles to compute: slices of rows, each with slices of keys and whether the whole tile is visible."""
    _, _, L, S = shape
    height, width, merged_width = tile_sizes(mask, shape)
    whole = (states == 2).numpy()
    plan: TilePlan = [(slice(row, min(row + height, L)), []) for row in range(0, L, height)]
    for row, column in states.nonzero().tolist():
        strip = plan[row][1]
        is_whole = bool(whole[row][column])
        start, stop = column * width, min((column + 1) * width, S)
        # one product for neighbours
        if strip and strip[-1][0].stop == start and stop - strip[-1][0].start <= merged_width:
            strip[-1] = slice(strip[-1][0].start, stop), strip[-1][1] and is_whole
        else:
            strip.append((slice(start, stop), is_whole))
    return plan


def share_of_tiles(call: AttentionCall) -> float:
    """Return the share of a call's scores that are in computed tiles."""
    return (_states_of_call(call) > 0).float().mean().item()


def _states_of_call(call: AttentionCall) -> Tensor:
    shape = call.shape
    device = call.query.device
    if call.mask is None:
        return tile_states(None, shape, device)
    kept_for = shape, device, tile_sizes(call.mask, shape)
    return call.mask.remember("tiles", kept_for, tile_states, call.mask, shape, device)


def by_group(left: Tensor, right: Tensor) -> Tensor:
    """(B, H, L, m) @ (B, Hkv, m, n) -> (B, H, L, n): query head h uses key head h // (H / Hkv)."""
    B, H, L, m = left.shape
    # the heads of a group are rows of one product
    return (left.reshape(B, right.shape[1], -1, m) @ right).view(B, H, L, right.shape[-1])


def over_group(left: Tensor, right: Tensor, num_kv_heads: int) -> Tensor:
    """(B, H, L, m)ᵀ @ (B, H, L, n) -> (B, Hkv, m, n), summed over the query heads of each key head."""
    left, right = (t.reshape(t.shape[0], num_kv_heads, -1, t.shape[-1]) for t in (left, right))
    return left.mT @ right


class Chunked(torch.autograd.Function):
    """The output (B, H, L, Dv) in the dtype of the sums, because dZ needs it unrounded."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *bias_tensors: Tensor
    ) -> Tensor:
        with full_precision(query.device):
            problem = Problem(settings, query, key, value, sinks, bias_tensors)
            rows = problem.query.shape[:3]
            output = problem.query.new_zeros((*rows, value.shape[-1]))
            total = problem.query.new_zeros((*rows, 1))
            top = torch.full_like(total, torch.finfo(total.dtype).min)
            if problem.sinks is not None:  # the sums start with the sink, a logit without a value
                top.copy_(problem.sinks.clamp(min=torch.finfo(top.dtype).min))
                total.copy_((problem.sinks - top).exp())
            for strip_rows, strip in settings.plan:
                out, largest, summed = output[:, :, strip_rows], top[:, :, strip_rows], total[:, :, strip_rows]
                for keys, is_whole in strip:
                    logits, _, _, seen_value = problem.tile(strip_rows, keys, is_whole)
                    larger = torch.maximum(largest, logits.amax(-1, keepdim=True))
                    weights = logits.sub_(larger).exp_()  # exactly 0 where hidden: `larger` is finite, the logit is not
                    shrink = (largest - larger).exp_()
                    summed.mul_(shrink).add_(weights.sum(-1, keepdim=True))
                    factors = problem.dropout(strip_rows, keys)
                    out.mul_(shrink).add_(by_group(weights if factors is None else weights.mul_(factors), seen_value))
                    largest.copy_(larger)
            inverse = total.reciprocal().masked_fill_(total == 0, 0.0)  # a row without a visible key
            output.mul_(inverse)
        ctx.settings = settings
        # the backward pass reads the mask again; because it is saved, torch raises if it was changed in between
        seen = [tensor for tensor in tensors_of(settings.mask) if not tensor.is_inference()]
        ctx.save_for_backward(output, top, inverse, query, key, value, sinks, *bias_tensors, *seen)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *Gradients.apply(ctx.settings, ctx.needs_input_grad[4:], grad, *ctx.saved_tensors)  # type: ignore[no-untyped-call]


class Gradients(torch.autograd.Function):
    """The gradients of the inputs of ``Chunked``. As a ``Function`` it raises only if they are differentiated again."""

    @staticmethod
    def forward(
        ctx: Any, settings: Settings, needs_grad: tuple[bool, ...], grad: Tensor, *saved: Tensor
    ) -> tuple[Tensor | None, ...]:
        # ``needs_grad``: for the sinks and for each tensor of the bias
        output, top, inverse, query, key, value, sinks, *more = saved
        bias_tensors = more[: len(needs_grad) - 1]  # the others belong to the mask
        with full_precision(query.device):
            problem = Problem(settings, query, key, value, sinks, bias_tensors)
            d_query, d_key, d_value = (t.new_zeros(t.shape) for t in (problem.query, problem.key, problem.value))
            bias_gradient = BiasGradientSum(problem, bias_tensors, needs_grad[1:])
            delta = (grad * output).sum(-1, keepdim=True)
            for rows, strip in settings.plan:
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
                    if capped is not None and settings.softcap is not None:
                        d_logits = d_logits * (1.0 - (capped / settings.softcap).square_())
                    d_query[:, :, rows] += by_group(d_logits, seen_key)
                    d_key[:, :, keys] += over_group(d_logits, q, key.shape[1])
            d_sinks = None
            if problem.sinks is not None and needs_grad[0]:
                d_sinks = -((problem.sinks - top).exp() * inverse * delta).sum((0, 2, 3))
            gradients = d_query.mul_(settings.scale), d_key, d_value, d_sinks, *bias_gradient.sums
            inputs = query, key, value, sinks, *bias_tensors
            return tuple(None if g is None else g.to(t.dtype) for g, t in zip(gradients, inputs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError("backend 'chunked' is not twice differentiable (create_graph=True); backend='math' is")


class BiasGradientSum:
    """Sums the gradients of a bias over the tiles, into ``sums``: one sum for each tensor, None if it needs no gradient."""

    def __init__(self, problem: Problem, tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> None:
        self.shape = (*problem.query.shape[:3], problem.key.shape[2])
        dtype = problem.query.dtype
        self.sums = [torch.zeros_like(t, dtype=dtype) if needs else None for t, needs in zip(tensors, needs_grad, strict=True)]
        leaves = [t.detach().to(dtype).requires_grad_(needs) for t, needs in zip(tensors, needs_grad, strict=True)]
        self.trainable = [leaf for leaf in leaves if leaf.requires_grad]
        self.bias = problem.settings.make_bias(iter(leaves))

    def add(self, d_logits: Tensor, rows: slice, keys: slice) -> None:
        """Add the contribution of the tile ``rows`` × ``keys``, given the gradient of its logits."""
        if self.bias is None or not self.trainable:
            return
        B, H, L, S = self.shape
        sums = [total for total in self.sums if total is not None]
        if isinstance(self.bias, TensorBias):  # a tile is a slice of the tensor, and so is its gradient
            part = TensorBias(sums[0]).dense(L, S, rows=rows, keys=keys)
            part += d_logits.sum_to_size(part.shape)
            return
        with torch.enable_grad():
            tile = self.bias.dense(L, S, batch_size=B, num_heads=H, device=d_logits.device, rows=rows, keys=keys)
        d_tile = d_logits.sum_to_size(tile.shape).to(tile.dtype)
        for total, part in zip(sums, torch.autograd.grad(tile, self.trainable, d_tile, materialize_grads=True), strict=True):
            total += part


def run(call: AttentionCall) -> Tensor:
    """Compute attention tile by tile. Memory grows with L + S."""
    if torch.compiler.is_compiling():  # ``disable`` imports the compiler, which takes seconds
        return torch.compiler.disable(attend_by_tiles, reason="backend 'chunked' chooses its tiles by values")(call)
    return attend_by_tiles(call)


def attend_by_tiles(call: AttentionCall) -> Tensor:
    """Compute attention tile by tile, outside of compiled graphs."""
    has_values = not (call.query.is_meta or hasattr(call.query, "fake_mode"))  # an attribute of FakeTensor
    if not has_values or not call.query.shape[0]:
        return reference_attention(call)  # without values, tiles cannot be chosen
    settings = Settings.of(call, int(torch.randint(2**31, (), device="cpu")) if call.dropout_p > 0.0 else 0)
    bias_tensors = [] if call.attn_bias is None else tensors_of(as_bias(call.attn_bias))
    return Chunked.apply(settings, call.query, call.key, call.value, call.sinks, *bias_tensors).to(call.value.dtype)  # type: ignore[no-untyped-call]


def why_not(call: AttentionCall) -> str | None:
    """Return the reason why the call is not supported, or None: a transform around it, or a bias that may hide tensors."""
    if call.transforms():
        return "it has no rules for torch.func and forward derivatives"
    fields = "attn_bias must be a frozen dataclass of tensors, numbers, strings and rules"
    return next((f"{fields}, got a {type(odd).__name__} in it" for odd in unknown_in(call.attn_bias)), None)


def falls_back(call: AttentionCall) -> str:
    """Return the reason. There always is one, because many small kernels run."""
    return "it works tile by tile in plain torch, and breaks a graph of torch.compile"
