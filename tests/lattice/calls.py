"""Every backend of attention, under every option and in every surrounding.

    python tests/lattice/calls.py                                 # the points of today's seed
    python tests/lattice/calls.py 'backend=sdpa mask=empty'       # one point
    DEVICE=cuda python tests/lattice/calls.py                     # the calls on a GPU, the judges on the CPU
    DEVICE=pretend python tests/lattice/calls.py                  # the calls on the pretended accelerator, tests/pretend.py

The judge is ``naive_attention`` in float64, and identities where there are some. The loops get each mask as the tensor that the mask
itself makes, so they cannot judge a mask: ``tests/nn/test_masks.py`` does. The errors that are allowed are measured in the loops at
the same precision.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2]))

from minitx import nn as mx
from minitx.check.reference import gradient_sizes, naive_attention, tolerance
from minitx.nn import backends
from minitx.nn.backends import chunked, flex
from minitx.nn.bias import as_bias
from minitx.nn.rules import tensors_of
from tests import pretend
from tests.lattice.engine import Lattice, Oracle, Point, Refusal, Where, run
from tests.lattice.gaps import linear_gap, slope_gap

DTYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}
SHAPES = {  # B, L, S; the plain one tells the two ends of a sequence apart
    "5x7": (2, 5, 7),
    "5x5": (2, 5, 5),
    "1x7": (2, 1, 7),
    "3x271": (1, 3, 271),
    "40x40": (1, 40, 40),
    "7x5": (2, 7, 5),
    "1x1": (2, 1, 1),
    "0x5x5": (0, 5, 5),
}
HEADS = {"4/4": (4, 4), "4/2": (4, 2), "4/1": (4, 1)}
SCALES = {"default": None, "0": 0.0, "-.5": -0.5, "9": 9.0}
SOFTCAPS = {"off": None, "1.5": 1.5}
DEVICE = os.environ.get("DEVICE", "cpu")
"""The device of the calls. What a call gets is moved there, and what it returns is moved back."""
if DEVICE == pretend.NAME:
    pretend.register()
WIDTH = 8 if DEVICE == "cpu" else 16  # of FlexAttention's kernel on CUDA the smallest
WIDTHS = {"same": WIDTH, "wide_values": WIDTH + 3}
NOT_IN_MINITX = "lowered"
"""The backend that shows what ``flex`` hands over: torch's flex_attention, uncompiled. The compiled kernel runs on CUDA only."""


# ---- Masks and biases: functions of a call's sizes


def cells(call: Call) -> Tensor:
    return torch.rand(call.B, call.H, call.L, call.S, generator=torch.Generator().manual_seed(5)) < 0.6


def some_rows_empty(call: Call) -> Tensor:
    return cells(call) & (torch.arange(call.L) % 3 > 0).view(-1, 1)


def a_key_of_one_head(call: Call) -> Tensor:
    """The query heads of the first key head do not see the last key."""
    visible = torch.ones(1, call.H, call.L, call.S, dtype=torch.bool)
    visible[:, : call.H // call.Hkv, :, -1] = False
    return visible


def left_padding(call: Call) -> Tensor:
    """(B, S): the first sequence of the batch is padded, the second is not."""
    return torch.arange(call.S) >= torch.tensor([[call.S // 2], [0]])[: call.B]


def documents(call: Call) -> mx.Documents:
    return mx.Documents((torch.arange(call.S) * 3 // call.S).expand(call.B, -1))


def blocks(call: Call) -> mx.BlockSparse:
    count = -(-call.S // 4)
    return mx.BlockSparse(torch.arange(call.H * count * count).view(call.H, count, count) % 3 > 0, block_size=4)


class EveryOther(mx.Mask):
    """A mask of a user: it tells nothing about tiles."""

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return (row + offset - key) % 2 == 0


@dataclass(frozen=True)
class Marked(mx.Mask):
    """A dataclass of a user with ``==``, which fails for tensors of several numbers."""

    marks: Tensor  # (S,)

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return self.marks[key]


def of_a_user(call: Call) -> mx.Mask:
    places = torch.arange(call.S)
    return EveryOther() & Marked(places % 3 > 0) & Marked(places != 4)


MASKS: dict[str, Callable[[Call], mx.Mask | Tensor | None]] = {
    "none": lambda call: None,
    "cells": cells,
    "empty": some_rows_empty,
    "nothing": lambda call: torch.zeros(call.L, call.S, dtype=torch.bool),
    "padding": lambda call: mx.Padding(left_padding(call)),
    "padding_tensor": lambda call: left_padding(call)[:, None, None],
    "key_head": a_key_of_one_head,
    "padding_and_cells": lambda call: mx.Padding(left_padding(call)) & cells(call),
    "window": lambda call: mx.SlidingWindow(2),
    "prefix": lambda call: mx.PrefixLM(2),
    "prefixes": lambda call: mx.PrefixLM(torch.tensor([3, 1])[: call.B]),
    "documents": documents,
    "blocks": blocks,
    "window_and_documents": lambda call: mx.SlidingWindow(3) & documents(call),
    "window_or_prefix": lambda call: mx.SlidingWindow(2) | mx.PrefixLM(1),
    "many": lambda call: mx.Causal() & mx.Padding(left_padding(call)) & (mx.SlidingWindow(3) | mx.Dense(cells(call))),
    "of_a_user": of_a_user,
}


def numbers(call: Call, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers that are the same in each dtype, but for the rounding to the dtype of the call."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return drawn.to(call.dtype).to(dtype)


def infinities(call: Call, dtype: torch.dtype) -> Tensor:
    """A bias that hides cells, and the first key from all queries."""
    hidden = torch.rand(1, call.H, call.L, call.S, generator=torch.Generator().manual_seed(4)) < 0.4
    hidden[..., : call.S // 2 > 0] = True
    return numbers(call, dtype, 1, call.H, call.L, call.S).masked_fill(hidden, -math.inf)


def lowest(call: Call, dtype: torch.dtype) -> Tensor:
    """The smallest number of the call's dtype, as in additive masks: for the first keys, and for all keys of each third query."""
    masked = (torch.arange(call.S) < call.S // 2) | (torch.arange(call.L) % 3 == 0).view(-1, 1)
    smallest = max(torch.finfo(call.dtype).min, torch.finfo(dtype).min)
    return torch.zeros(call.L, call.S, dtype=dtype).masked_fill(masked, smallest)


def t5(call: Call, dtype: torch.dtype, bidirectional: bool = True) -> mx.T5RelativeBias:
    rule = mx.T5RelativeBias(call.H, num_buckets=8, max_distance=20, bidirectional=bidirectional)
    with torch.no_grad():
        rule.weight.copy_(numbers(call, torch.float32, *rule.weight.shape))
    return rule.to(dtype)


@dataclass(frozen=True, eq=False)
class Wave(mx.Bias):
    """A bias of a user: an amplitude for each row of the batch and each head, and a rule inside of a rule."""

    amplitude: Tensor
    frequency: float
    inner: mx.Bias

    def value(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        distance = (row + offset - key).double()  # an integer times a number would have the default dtype
        wave = self.amplitude[batch, head] * torch.sin(self.frequency * distance)
        return wave + self.inner.value(batch, head, row, key, offset)


BIASES: dict[str, Callable[[Call, torch.dtype], Tensor | mx.Bias | None]] = {
    "none": lambda call, dtype: None,
    "fixed": lambda call, dtype: numbers(call, dtype, 1, call.H, call.L, call.S),
    "f32": lambda call, dtype: numbers(call, torch.promote_types(dtype, torch.float32), call.L, call.S),
    "-inf": infinities,
    "lowest": lowest,
    "learned": lambda call, dtype: numbers(call, dtype, call.B, call.H, call.L, call.S).requires_grad_(),
    "row": lambda call, dtype: numbers(call, dtype, 1, call.H, 1, call.S).requires_grad_(),
    "rule": lambda call, dtype: mx.TensorBias(numbers(call, dtype, call.L, call.S).requires_grad_()),
    "alibi": lambda call, dtype: mx.ALiBi(call.H),
    "slopes": lambda call, dtype: mx.ALiBi(slopes=numbers(call, dtype, call.H).requires_grad_()),
    "t5": t5,
    "t5_backward": functools.partial(t5, bidirectional=False),
    "of_a_user": lambda call, dtype: Wave(numbers(call, dtype, call.B, call.H).requires_grad_(), 0.7, mx.ALiBi(call.H)),
}
LEARNED = "learned|row|rule|slopes|t5|t5_backward|of_a_user"


def bias_tensors(bias: Tensor | mx.Bias | None) -> list[Tensor]:
    return [] if bias is None else tensors_of(as_bias(bias))


def learned(bias: Tensor | mx.Bias | None) -> dict[str, Tensor]:
    """The tensor of a bias that learns, by name. No bias has two."""
    return dict(zip(("bias",), (tensor for tensor in bias_tensors(bias) if tensor.requires_grad), strict=False))


def there(given: Any) -> Any:
    """A tensor or a rule on the device of the calls."""
    if DEVICE == "cpu" or given is None:
        return given
    if isinstance(given, torch.nn.Module):  # a bias with a parameter
        given = as_bias(given)
    return copy.deepcopy(given, {id(tensor): tensor.to(DEVICE) for tensor in tensors_of(given)})


# ---- Surroundings


def plainly(call: Call, attend: Callable[..., Any], inputs: list[Tensor]) -> Any:
    return attend(*inputs)


def within(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[..., Any]:
    def around(call: Call, attend: Callable[..., Any], inputs: list[Tensor]) -> Any:
        with context():
            return attend(*inputs)

    return around


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def checkpointed(call: Call, attend: Callable[..., Any], inputs: list[Tensor]) -> Any:
    return torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False)


def with_tangents(call: Call, attend: Callable[..., Any], inputs: list[Tensor]) -> Any:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, tangent) for x, tangent in zip(inputs, call.tangents(), strict=True)]
        output, call.tangent = forward_ad.unpack_dual(attend(*duals))
        return output


def pulled_back(call: Call, attend: Callable[..., Any], inputs: list[Tensor]) -> Any:
    output, call.pullback = torch.func.vjp(attend, *inputs)
    return output


def mapped(call: Call, attend: Callable[..., Any], inputs: list[Tensor]) -> Any:
    """One of two calls: the other one has other numbers."""
    return torch.vmap(attend)(*(torch.stack((-x, x)) for x in inputs))[1]


def compiled(compiler: str) -> Callable[..., Any]:
    def around(call: Call, attend: Callable[..., Any], inputs: list[Tensor]) -> Any:
        torch._dynamo.reset()
        return torch.compile(attend, backend=compiler, dynamic=False)(*inputs)

    return around


AROUND: dict[str, Callable[..., Any]] = {
    "plain": plainly,
    "no_grad": within(torch.no_grad),
    "inference_mode": within(torch.inference_mode),
    "autocast": within(functools.partial(torch.autocast, DEVICE, torch.bfloat16)),
    "default_f64": within(functools.partial(default_dtype, torch.float64)),
    "default_bf16": within(functools.partial(default_dtype, torch.bfloat16)),
    "checkpoint": checkpointed,
    "jvp": with_tangents,
    "func.vjp": pulled_back,
    "vmap": mapped,
    "compile_eager": compiled("eager"),
    "compile_aot_eager": compiled("aot_eager"),
}
WITHOUT_GRADIENTS = "no_grad|inference_mode"
COMPILED = "compile_eager|compile_aot_eager"
CONTEXTS = "plain|no_grad|autocast|default_f64|default_bf16"


@contextlib.contextmanager
def seeded(seed: int = 7) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# ---- The subject


class Call:
    """The arguments of one call, and the ways to make it.

    Args:
        point: the values.
        hidden: the number in keys and values that no query sees.
        moved: what is added to the leaves that are named.
    """

    def __init__(self, point: Point, hidden: float | None = None, moved: Mapping[str, Tensor] | None = None) -> None:
        self.point, self.dtype = point, DTYPES[point["dtype"]]
        (self.B, self.L, self.S), (self.H, self.Hkv) = SHAPES[point["shape"]], HEADS[point["heads"]]
        self.dropout, self.backend, self.is_causal = float(point["dropout"]), point["backend"], point["causal"] == "yes"
        self.scale, self.softcap = SCALES[point["scale"]], SOFTCAPS[point["softcap"]]
        self.mask, self.bias = MASKS[point["mask"]](self), BIASES[point["bias"]](self, self.dtype)
        self.tangent: Tensor | None = None
        self.pullback: Callable[..., Any] | None = None
        moved = moved or {}
        self.leaves = self.drawn(hidden, moved)
        if point["sinks"] != "none":
            self.leaves["sinks"] = torch.arange(-1.0, self.H - 1.0).to(torch.float32 if point["sinks"] == "f32" else self.dtype)
        self.leaves |= learned(self.bias)
        for name in ("sinks", "bias"):
            if name in moved:
                self.leaves[name].detach().add_(moved[name])
        for leaf in self.leaves.values():
            leaf.requires_grad_(self.backend != NOT_IN_MINITX)
        # before the surroundings, as a user's are
        self.options = {"scale": self.scale, "softcap": self.softcap, "attn_mask": there(self.mask)}
        self.options |= {"attn_bias": there(self.bias), "sinks": there(self.leaves.get("sinks"))}
        shape = self.B, self.H, self.L, WIDTHS[point["width"]]
        self.cotangent = torch.randn(shape, generator=torch.Generator().manual_seed(12), dtype=torch.float64)

    @property
    def around(self) -> str:
        return self.point["around"]

    @property
    def factor(self) -> float:
        return WIDTH**-0.5 if self.scale is None else self.scale

    def shapes(self) -> dict[str, tuple[int, ...]]:
        B, Hkv, S = self.B, self.Hkv, self.S
        width = WIDTHS[self.point["width"]]
        return {"query": (B, self.H, self.L, WIDTH), "key": (B, Hkv, S, WIDTH), "value": (B, Hkv, S, width)}

    def drawn(self, hidden: float | None, moved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        draw, found = torch.Generator().manual_seed(11), {}
        for name, shape in self.shapes().items():
            x = torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype)
            if name in moved:
                x = x + moved[name]
            if hidden is not None and name != "query":
                x = x.masked_fill(self.unseen(), hidden)
            found[name] = self.laid_out(x)
        return found

    def tangents(self) -> list[Tensor]:
        draw = torch.Generator().manual_seed(13)
        return [self.laid_out(torch.randn(shape, generator=draw).to(self.dtype)) for shape in self.shapes().values()]

    def laid_out(self, x: Tensor) -> Tensor:
        layout = self.point["layout"]
        if layout == "BLHD":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "strided":  # the last axis is not contiguous
            return x.mT.contiguous().mT
        if layout == "expanded":  # the heads share their memory
            return x[:, :1].expand(x.shape)
        if layout == "sliced":
            return torch.cat((x, x), -1)[..., : x.shape[-1]]
        return x

    def visible(self) -> Tensor:
        """Which keys each query sees, (B, H, L, S)."""
        visible = torch.ones(self.B, self.H, self.L, self.S, dtype=torch.bool)
        if self.is_causal:
            visible = visible.tril(self.S - self.L)
        if self.mask is not None:
            visible = visible & self.dense(self.mask)
        return visible if self.bias is None else visible & (self.dense(self.bias) != -math.inf)

    def unseen(self) -> Tensor:
        """The keys that no query sees, (B, Hkv, S, 1). Heads that share their memory count as one."""
        seen = self.visible().any(2).unflatten(1, (self.Hkv, -1)).any(2)
        if self.point["layout"] == "expanded":
            seen = seen.any(1, keepdim=True).expand(seen.shape)
        return ~seen.unsqueeze(-1)

    def dense(self, rule: Tensor | mx.Mask | mx.Bias) -> Tensor:
        return rule if isinstance(rule, Tensor) else rule.dense(self.L, self.S, batch_size=self.B, num_heads=self.H)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, backend: str | None = None, weights: bool = False) -> Any:
        result = mx.scaled_dot_product_attention(
            *self.placed(query, key, value),
            dropout_p=self.dropout,
            is_causal=self.is_causal,
            need_weights=weights,
            backend=backend or self.backend,
            **self.options,
        )
        return tuple(each.cpu() for each in result) if weights else result.cpu()

    def placed(self, *inputs: Tensor) -> list[Tensor]:
        """The inputs on the device of the calls, in their layout: heads that share their memory get one of their own there."""
        if DEVICE == "cpu":
            return [*inputs]
        return [there(x) if self.point["layout"] == "expanded" else self.laid_out(there(x)) for x in inputs]

    @property
    def inputs(self) -> list[Tensor]:
        return [self.leaves[name] for name in ("query", "key", "value")]

    def output(self, **options: Any) -> Any:
        """The result of the call in its surroundings. Dropout draws the same numbers each time."""
        with seeded():
            return AROUND[self.around](self, functools.partial(self.attend, **options), self.inputs)

    def gradients(self, output: Tensor) -> dict[str, Tensor]:
        cotangent, leaves = self.cotangent.to(output.dtype), list(self.leaves.values())
        found = torch.autograd.grad(output, leaves, cotangent, materialize_grads=True)
        pulled = () if self.pullback is None else self.pullback(cotangent)
        return dict(zip(self.leaves, found, strict=True)) | dict(zip(self.leaves, pulled, strict=False))

    def by_loops(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Output, weights and gradients of the loops in float64, or in another dtype."""
        return _by_loops(dtype or torch.float64, tuple(self.point[axis] for axis in AXES if axis not in UNKNOWN_TO_LOOPS))

    def by_rounded_loops(self) -> dict[str, Tensor]:
        """The loops in the precision of the call; for float64, in float32."""
        return self.by_loops(torch.float32 if self.dtype == torch.float64 else self.dtype)

    def largest_score(self) -> float:
        """The largest sum of summands without their signs."""
        query, key = self.leaves["query"].detach().double().abs(), self.leaves["key"].detach().double().abs()
        largest = float((query @ key.repeat_interleave(self.H // self.Hkv, 1).mT).max()) * abs(self.factor)
        return largest if self.softcap is None else min(largest, self.softcap)

    def rounding_of_scores(self) -> float:
        """The error of the scores in roundings of the call's dtype, as in ``near``."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.finfo(wide).eps / torch.finfo(self.dtype).eps * (self.largest_score() + math.sqrt(self.S))

    def summands(self) -> dict[str, float]:
        """The largest summand of each result."""
        weights, value = self.by_loops()["weights"], float(self.leaves["value"].detach().abs().max())
        sizes = gradient_sizes(*(x.detach() for x in self.inputs), self.cotangent, weights, self.factor)
        found = {name.removeprefix("gradient of "): size for name, size in sizes.items()}
        of_score = value * float(self.cotangent.abs().sum(-1).max()) * math.sqrt(self.L)
        far = 1.0
        if self.point["bias"] == "slopes":  # the gradient of a slope is a sum over gradients of scores times distances
            distances = (torch.arange(self.S) - torch.arange(self.S - self.L, self.S)[:, None]).abs()
            far = max(1.0, float((weights * distances).sum(-1).max()))
        return {"output": value, "weights": 1.0, "sinks": of_score, "bias": of_score * far, **found}

    def loops(self, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Leaves, output and weights of the loops."""
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in self.leaves.items() if name != "bias"}
        given = BIASES[self.point["bias"]](self, dtype)
        leaves |= learned(given)
        mask = None if self.mask is None else self.dense(self.mask)
        bias = None if given is None else self.dense(given)
        inputs = [leaves[name] for name in ("query", "key", "value")]
        options = {"scale": self.scale, "softcap": self.softcap, "attn_bias": bias, "sinks": leaves.get("sinks")}
        return leaves, *naive_attention(*inputs, mask, is_causal=self.is_causal, **options)


@functools.lru_cache(maxsize=64)
def _by_loops(dtype: torch.dtype, values: tuple[str, ...]) -> dict[str, Tensor]:
    point = CALLS.plain | dict(zip((axis for axis in AXES if axis not in UNKNOWN_TO_LOOPS), values, strict=True))
    call = Call(point)
    leaves, output, weights = call.loops(dtype)
    gradients = torch.autograd.grad(output, list(leaves.values()), call.cotangent.to(dtype), materialize_grads=True)
    return {"output": output.detach(), "weights": weights.detach(), **dict(zip(leaves, gradients, strict=True))}


UNKNOWN_TO_LOOPS = ("backend", "tiles", "dropout", "around")


def but_for_the_device(call: mx.AttentionCall) -> str | None:
    reason = flex.why_not(call)
    return None if reason is None or "CUDA" in reason else reason


@contextlib.contextmanager
def settings(call: Call) -> Iterator[None]:
    """What holds for the backward pass, too: small tiles, and the backend that is registered for these tests."""
    with contextlib.ExitStack() as stack:
        if call.point["tiles"] == "2x2":
            for name in ("LARGEST", "SMALLEST"):
                stack.enter_context(mock.patch.object(chunked, name, 2))
            for name, value in {"CHUNKED_FROM": 1, "CHUNKED_FROM_OVER_PLAIN": 1, "FEW_TILES": 1.0}.items():
                stack.enter_context(mock.patch.object(backends, name, value))
        if call.backend == NOT_IN_MINITX:
            from torch.nn.attention.flex_attention import flex_attention

            stack.enter_context(mock.patch.object(flex, "_kernel", return_value=flex_attention))
            mx.register_backend(NOT_IN_MINITX, flex.run, why_not=but_for_the_device)
            stack.callback(mx.unregister_backend, NOT_IN_MINITX)
        yield


def near(call: Call, name: str, got: Tensor, want: Tensor | None = None) -> None:
    """Raise AssertionError unless a result is that of the loops, or ``want``.

    The error may be ``tolerance``, and as much as the largest summand of the result changes by the rounding of the scores, and of a sum
    of S numbers: √S roundings (Higham 2002, "Accuracy and Stability of Numerical Algorithms", §2.8).
    """
    dtype = call.leaves[name].dtype if name in call.leaves else call.dtype
    want = call.by_loops()[name] if want is None else want
    assert got.shape == want.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert got.dtype == dtype, f"{name} is {got.dtype}, not {dtype}"
    size, wide = call.summands()[name], torch.promote_types(dtype, torch.float32)
    is_half = dtype != wide  # there the rounding of the result is larger than the one of the summands
    # a gradient in float32 is made of numbers of the call
    coarser = max(dtype, call.dtype, key=lambda other: torch.finfo(other).eps)
    allowed = tolerance(call.by_loops()[name], call.by_rounded_loops()[name], coarser, 1.0 if is_half else size)
    allowed += max(1.0, size) * torch.finfo(wide).eps * (call.largest_score() + math.sqrt(call.S))
    error = (got.detach().double() - want).abs().max().item()
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


# ---- The oracles


def the_output_is_that_of_loops(call: Call) -> None:
    near(call, "output", call.output())


def the_gradients_are_those_of_loops(call: Call) -> None:
    for name, got in call.gradients(call.output()).items():
        near(call, name, got)


def the_weights_are_those_of_loops(call: Call) -> None:
    """They are the weights before dropout."""
    _, weights = call.output(weights=True)
    near(call, "weights", weights)
    assert weights.requires_grad == (call.around not in WITHOUT_GRADIENTS.split("|")), "the weights are detached"


def asking_for_weights_changes_no_bit(call: Call) -> None:
    output, _ = call.output(weights=True)
    assert torch.equal(output, call.output()), "the output changes"


def the_output_is_weights_times_values(call: Call) -> None:
    values = call.leaves["value"].detach().double().repeat_interleave(call.H // call.Hkv, 1)
    output, weights = call.output(weights=True)
    near(call, "output", output, weights.detach().double() @ values)


def generator_state() -> Tensor:
    """The state of the host's generator, which seeds the dropout of ``chunked``, and of the device's."""
    on_host = torch.get_rng_state()
    return on_host if DEVICE == "cpu" else torch.cat([on_host, torch.get_device_module(DEVICE).get_rng_state()])


def a_call_writes_nothing_and_draws_nothing(call: Call) -> None:
    given = [*call.leaves.values(), *tensors_of(tuple(call.options.values()))]
    before, state = [tensor.detach().clone() for tensor in given], generator_state()
    output = AROUND[call.around](call, call.attend, call.inputs)
    if output.requires_grad:
        call.gradients(output)
    same = [torch.equal(tensor, kept) for tensor, kept in zip(given, before, strict=True)]
    assert all(same), f"tensor {same.index(False)} is written to"
    assert torch.equal(state, generator_state()) == (call.dropout == 0.0 or call.B == 0), "random numbers are drawn"
    assert output.shape == call.cotangent.shape and output.dtype == call.dtype, f"{output.dtype} {tuple(output.shape)}"


def what_no_query_sees_changes_no_bit(call: Call) -> None:
    assert call.unseen().any(), "every key is seen: the oracle is asked at the wrong point"
    results = []
    words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "the largest number": torch.finfo(call.dtype).max}
    for hidden in (None, *words.values()):
        other = Call(call.point, hidden)
        output = other.output()
        results.append({"output": output} | (other.gradients(output) if output.requires_grad else {}))
    clean, *others = results
    for word, other in zip(words, others, strict=True):
        for name, got in other.items():
            assert torch.equal(got, clean[name]), f"{word} changes {name}"


def the_gradient_of_the_values_is_of_the_same_weights(call: Call) -> None:
    """The output is linear in the values, so ⟨c, output⟩ = ⟨value, its gradient⟩, whatever dropout has dropped."""
    want, low = call.by_loops(), call.by_rounded_loops()
    output = call.output()
    values, gradient = call.leaves["value"], call.gradients(output)["value"]
    gap = linear_gap(output, call.cotangent.to(output.dtype), values, gradient)
    noise = sum(((low[a] - want[a]) * b).double().norm().item() for a, b in (("output", call.cotangent), ("value", values)))
    if call.dtype == torch.float64:
        noise *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    allowed = gap.allowed * (1 + call.rounding_of_scores() / 8) + 4 * noise / (1 - call.dropout)
    assert gap.size <= allowed, f"⟨c, output⟩ and ⟨value, gradient⟩ differ by {gap.size:.2e}, allowed {allowed:.2e}"


def the_gradients_are_slopes(call: Call) -> None:
    """All gradients together, with the same dropout, against differences."""
    gradients = {name: g.detach() for name, g in call.gradients(call.output()).items() if g.dtype == torch.float64}
    draw = torch.Generator().manual_seed(3)
    steps = {name: torch.randn(g.shape, generator=draw, dtype=torch.float64) for name, g in gradients.items()}
    slope = 0.0
    for name, step in steps.items():
        slope += float((gradients[name].detach() * (call.laid_out(step) if name in call.shapes() else step)).sum())

    def total(length: float) -> float:
        other = Call(call.point, moved={name: length * step for name, step in steps.items()})
        return float((other.output().detach() * call.cotangent).sum())

    gap = slope_gap(total, slope)
    assert gap.is_rounding, f"{slope:.8f} by the backward pass differs from the difference by {gap.size:.1e}"


def the_forward_derivative_is_that_of_the_backward_pass(call: Call) -> None:
    output = call.output()
    gradients = call.gradients(output)
    assert call.tangent is not None
    parts = [gradients[name].detach().double() * t.double() for name, t in zip(call.shapes(), call.tangents(), strict=True)]
    forward = call.tangent.detach().double() * call.cotangent
    size = sum(float(part.abs().sum()) for part in (*parts, forward))
    error = abs(float(forward.sum()) - sum(float(part.sum()) for part in parts))
    allowed = torch.finfo(call.dtype).eps * size * (1 + call.rounding_of_scores() / 8)
    assert error <= allowed, f"the derivatives differ by {error:.1e} of {size:.1e}"


def second_derivatives(output: Tensor, inputs: list[Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """Of the gradient of the queries."""
    (first,) = torch.autograd.grad(output, inputs[0], cotangent, create_graph=True)
    return torch.autograd.grad(first.square().sum(), inputs, materialize_grads=True)


def second_derivatives_are_those_of_loops_or_refused(call: Call) -> None:
    output, refusal = call.output(), ""
    try:
        found = second_derivatives(output, call.inputs, call.cotangent)
    except RuntimeError as error:
        refusal = str(error)
    if refusal:
        assert call.backend != "math" and re.search("derivative|differentiable", refusal), refusal
        return
    leaves, output, _ = call.loops(torch.float64)
    wanted = second_derivatives(output, [leaves[name] for name in call.shapes()], call.cotangent)
    size = max(float(want.abs().max()) for want in wanted)
    for name, got, want in zip(call.shapes(), found, wanted, strict=True):
        error = float((got - want).abs().max())
        assert error <= 1e-12 * max(1.0, size), f"second derivative, {name}: error {error:.1e} of {size:.1e}"


KERNELS = {f"_scaled_dot_product_{name}" for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention")}
KERNELS.add("_scaled_dot_product_cudnn_attention")


class KernelNames(TorchDispatchMode):
    """Notes whether torch's fused kernel runs. In inference mode torch shows the public function instead."""

    fused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused |= func.overloadpacket.__name__ in KERNELS
        return func(*args, **(kwargs or {}))


def an_explanation_is_what_happens(call: Call) -> None:
    """Of each backend: whether it can. Of the one that runs: that it runs, and whether with torch's fused kernel."""
    options = {**call.options, "dropout_p": call.dropout, "is_causal": call.is_causal}

    def explain(*inputs: Tensor) -> Any:
        return mx.explain_backends(*call.placed(*inputs), **options, backend=call.backend)

    reports = AROUND[call.around](call, explain, call.inputs)
    (running,) = [report.name for report in reports if report.runs]
    for report in reports:
        if report.name == "flex" and report.can and call.backend != "flex":
            continue  # the compiler takes seconds
        output = None
        with KernelNames() as kernels, contextlib.suppress(NotImplementedError):
            output = call.output(backend=report.name)
        assert (output is not None) == report.can, f"{report}: it {'refuses' if report.can else 'computes'}"
        assert kernels.fused == (report.fused and report.name == "sdpa"), f"{report}: the fused kernel runs is {kernels.fused}"
        if output is not None and report.name == running:
            assert torch.equal(output, call.output()), f"{report}: the output is another one"


def asked(check: Callable[[Call], None], where: tuple[Where, ...] = (), unless: tuple[Where, ...] = ()) -> Oracle:
    @functools.wraps(check)
    def inside(call: Call) -> None:
        with settings(call):
            check(call)

    return Oracle(inside, where, unless)


UNNAMED: list[Where] = [] if DEVICE in ("cpu", "cuda") else [{}]  # a device whose kernels have other names
NO_ROWS: Where = {"shape": "0x5x5"}
DROPS: Where = {"dropout": ".3"}
NO_GRADIENTS: Where = {"around": WITHOUT_GRADIENTS}
COMPILES: Where = {"around": COMPILED}  # where an oracle that makes the call twice takes seconds
TRANSFORMED: Where = {"around": "jvp|func.vjp|vmap"}
# torch's kernels store the log-sum-exp, and lose the sum beside such a bias, if its values cannot be read before
LOST_SUM: Where = {"backend": "sdpa|auto", "bias": "lowest", "around": f"func.vjp|vmap|{COMPILED}"}
if DEVICE != "cpu":
    LOST_SUM = {"backend": "sdpa|auto|flex", "bias": "lowest"}
ORACLES = (
    asked(the_output_is_that_of_loops, unless=(NO_ROWS, DROPS)),
    asked(the_gradients_are_those_of_loops, unless=(NO_ROWS, DROPS, NO_GRADIENTS, LOST_SUM)),
    asked(the_weights_are_those_of_loops, unless=(NO_ROWS, TRANSFORMED)),
    asked(asking_for_weights_changes_no_bit, unless=(TRANSFORMED, COMPILES)),
    asked(the_output_is_weights_times_values, unless=(NO_ROWS, DROPS, TRANSFORMED, COMPILES)),
    asked(a_call_writes_nothing_and_draws_nothing),
    asked(
        what_no_query_sees_changes_no_bit,
        where=(
            {"mask": "nothing", "shape": "!0x5x5"},
            {"mask": "padding|padding_tensor|padding_and_cells|many", "shape": "!0x5x5|1x1"},
            {"mask": "window", "shape": "1x7|5x7|3x271"},
            {"mask": "window_and_documents", "shape": "1x7|3x271"},
            {"mask": "key_head", "shape": "!0x5x5", "layout": "!expanded"},
            {"bias": "-inf", "shape": "!0x5x5|1x1"},
        ),
    ),
    asked(the_gradient_of_the_values_is_of_the_same_weights, unless=(NO_ROWS, NO_GRADIENTS, LOST_SUM)),
    asked(  # beside the lowest number, rounding hides the change of a score
        the_gradients_are_slopes, where=({"dtype": "f64"},), unless=(NO_ROWS, NO_GRADIENTS, COMPILES, {"bias": "lowest"})
    ),
    asked(the_forward_derivative_is_that_of_the_backward_pass, where=({"around": "jvp"},), unless=(NO_ROWS,)),
    asked(
        second_derivatives_are_those_of_loops_or_refused,
        where=({"dtype": "f64", "around": "plain|autocast|default_f64|default_bf16|checkpoint|func.vjp"},),
        unless=(NO_ROWS, DROPS),
    ),
    asked(an_explanation_is_what_happens, where=({"around": CONTEXTS},), unless=({"backend": NOT_IN_MINITX}, *UNNAMED)),
)


# ---- The table


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


AXES = {
    "backend": tuple(dict.fromkeys(("math", *mx.backend_names(), NOT_IN_MINITX))),
    "dtype": tuple(DTYPES),
    "mask": tuple(MASKS),
    "causal": words("no yes"),
    "bias": tuple(BIASES),
    "heads": tuple(HEADS),
    "shape": tuple(SHAPES),
    "softcap": tuple(SOFTCAPS),
    "sinks": words("none own f32"),
    "scale": tuple(SCALES),
    "width": tuple(WIDTHS),
    "layout": words("plain BLHD strided expanded sliced"),
    "dropout": words("0 .3"),
    "tiles": words("usual 2x2"),
    "around": tuple(AROUND),
}
FLEX = {"dropout": (".3", "no dropout"), "dtype": ("f64", "float32"), "shape": ("0x5x5", "empty batch")}
FLEX["around"] = ("jvp|func.vjp|vmap", "torch.func")
OF_FLEX = [Refusal({"backend": "flex", axis: value}, message) for axis, (value, message) in FLEX.items()]
if DEVICE != "cuda":
    OF_FLEX = [Refusal({"backend": "flex"}, "CUDA|float32|no dropout|empty batch")]
REFUSALS = (
    *OF_FLEX,
    Refusal({"backend": NOT_IN_MINITX, "dropout": ".3"}, "no dropout"),
    Refusal({"backend": NOT_IN_MINITX, "dtype": "f64"}, "float32"),
    Refusal({"backend": NOT_IN_MINITX, "shape": "0x5x5"}, "empty batch"),
    Refusal({"causal": "yes", "shape": "7x5"}, "at least as many keys as queries"),
    Refusal({"mask": "prefix|prefixes|window_or_prefix|many", "shape": "7x5"}, "at least as many keys as queries"),
    Refusal({"mask": "documents|window_and_documents|blocks", "shape": "7x5"}, "L <= S"),
    Refusal({"backend": "sdpa", "softcap": "1.5"}, "soft-cap"),
    Refusal({"backend": "sdpa", "sinks": "own|f32"}, "sinks"),
    Refusal({"backend": "sdpa", "around": "jvp"}, "forward derivatives"),
    Refusal({"backend": "sdpa", "around": "func.vjp|vmap", "bias": LEARNED}, "no derivative of a bias"),
    Refusal({"backend": "chunked", "around": "jvp|func.vjp|vmap"}, "torch.func"),
)
MEANINGLESS: tuple[Where, ...] = (
    # a checkpoint keeps the generators of the devices of its inputs
    *([] if DEVICE == "cpu" else [{"around": "checkpoint", "dropout": ".3"}]),
    {"around": "vmap", "dropout": ".3"},  # vmap wants to know whether the numbers differ
    {"around": "jvp", "layout": "expanded"},  # torch has no tangents of shared memory
    *([{"around": COMPILED}] if UNNAMED else []),  # the compiler does not know such a device
    {"tiles": "2x2", "backend": "!chunked|auto"},
    {"tiles": "2x2", "shape": "3x271|40x40"},  # thousands of tiles
    {"backend": NOT_IN_MINITX, "around": f"!{WITHOUT_GRADIENTS}"},  # on CPU it has no backward pass
    *([{"backend": NOT_IN_MINITX}] if UNNAMED else []),  # torch refuses all devices but a few
)
CALLS = Lattice(
    "tests/lattice/calls.py",
    AXES,
    Call,
    ORACLES,
    REFUSALS,
    meaningless=MEANINGLESS,
    strong=("backend", "dtype", "around"),
)
WARNINGS = (  # torch's, which tell nothing about the call
    "There is a performance drop",  # no batching rule of the CPU kernel
    ".*torch.jit.script",  # forward derivatives use it
    "The .grad attribute",  # dynamo asks for it where a graph goes on after a break
    ".*flex_attention called without",
)


def main(arguments: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch._dynamo.config.recompile_limit = 64  # each kind of call has a kernel of FlexAttention
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message)
    return run(CALLS, arguments)


if __name__ == "__main__":
    sys.exit(main())
