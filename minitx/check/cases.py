"""The cases of ``check_attention``: inputs, a mask, options, large numbers. Each case reveals some mistakes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from minitx.check.calling import NotTriedError
from minitx.check.reference import DTYPES, naive_attention
from minitx.check.results import stable_id

BATCH, HEADS, WIDTH = 2, 4, 8


@dataclass(frozen=True)
class Case:
    """One call of attention, or a part of it.

    Attributes:
        name: the name in plain words.
        stage: the stage of the graded exercise that it belongs to. 0: none.
        rows, keys: the numbers of queries and of keys. batch: the number of sequences.
        heads, kv_heads, width, value_width: numbers of heads, and widths. 0: as the way of calling allows, and as the query.
        mask: "" (none), "cells" (random), "keys" (hides the same keys from all queries) or "nothing" (a query sees no key).
        is_causal: whether the causal option is used.
        spread: a factor on the scores. small: a factor on the values.
        low: the score of visible keys, approximately, or exactly with a mask. None: random scores.
        hidden: a number that is added to hidden values, or to all values with the mask "nothing". NaN: hidden keys are NaN, too.
        other: the part that has other numbers than in the plain case: "sequence", "head", "token" or "" (none).
        is_reused: whether the same tensors are passed twice, with other numbers in the first call.
        is_extreme: whether a function that is correct in theory may fail.
        dtypes: the dtypes of the inputs. Default: the dtype of the whole check.
        allowed: a mask that broadcasts to (B, H, L, S), instead of a drawn one. options: further arguments of a kernel.
        judged: the results of a kernel to compare. Default: all, including gradients of learned options.
    """

    name: str
    stage: int = 0
    rows: int = 5
    keys: int = 5
    heads: int = 0
    kv_heads: int = 0
    batch: int = BATCH
    width: int = 0
    value_width: int = 0
    mask: str = ""
    is_causal: bool = False
    spread: float = 1.0
    low: float | None = None
    hidden: float = 0.0
    small: float = 1.0
    other: str = ""
    is_reused: bool = False
    is_extreme: bool = False
    dtypes: tuple[torch.dtype, ...] = ()
    allowed: Tensor | None = field(default=None, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    judged: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Return the stable id."""
        return stable_id(self.name)


SIMPLE = Case("plain", 1)
BLIND = Case("a query that sees nothing", 3, mask="nothing", is_extreme=True)
BLIND_MOVED = Case("other hidden values where a query sees nothing", 3, mask="nothing", hidden=100.0, is_extreme=True)
CAUSAL = Case("causal", 4, is_causal=True)
OTHERS = {
    part: Case(f"{place} {part}", other=part) for part, place in {"sequence": "second", "head": "last", "token": "last"}.items()
}
HALF = tuple(
    Case(f"{name}{' with a mask' if mask else ''}", 5, mask=mask, is_extreme=True, dtypes=(dtype,))
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16))
    for mask in ("", "cells")
)
CASES = (
    SIMPLE,
    Case("more keys than queries", 1, keys=7),
    Case("mask", 2, mask="cells"),
    Case("mask that hides keys", 2, mask="keys"),
    Case("large hidden values", 2, mask="keys", hidden=1e7),
    BLIND,
    BLIND_MOVED,
    Case("wide values", 4, value_width=11),
    CAUSAL,
    Case("causal with a cache", 4, rows=3, keys=7, is_causal=True),
    Case("mask and causal", mask="cells", is_causal=True),
    Case("grouped heads", kv_heads=2),
    Case("large scores", 5, spread=300.0, is_extreme=True),
    Case("low scores", 5, low=-42.0, is_extreme=True),
    Case("low scores beside a mask", 5, mask="keys", low=-1e5, is_extreme=True),
    Case("very low scores beside a mask", 5, mask="keys", low=-3e10, is_extreme=True),
    *HALF,
)
"""The cases that find the way of calling and the mistakes, in the order to fix mistakes."""

DRAWS = (
    Case("one sequence", batch=1),
    Case("mask of one sequence", mask="keys", batch=1),
    Case("grouped heads, three sequences", kv_heads=2, batch=3),
    Case("65 queries, 130 keys", rows=65, keys=130, batch=1),
    Case("130 tokens, mask and causal", rows=130, keys=130, batch=1, mask="cells", is_causal=True),
    Case("small values", small=1e-8),
    Case("the same tensors with other numbers", is_reused=True),
)
"""Other sizes and numbers. They are run once, in the way of calling that was found."""


@cache
def kernel_cases() -> tuple[Case, ...]:
    """Return the cases of ``strict``: two heads of keys, every option, and the dtypes of each case."""
    case = partial(Case, kv_heads=2, dtypes=DTYPES)
    not_float16 = tuple(dtype for dtype in DTYPES if dtype != torch.float16)  # small values and low scores leave its range
    generator = torch.Generator().manual_seed(7)
    cells = torch.rand(2, 4, 5, 5, generator=generator) < 0.6
    empty = cells & (torch.arange(5) % 3 > 0).view(5, 1)  # queries 0 and 3 see nothing
    padding = (torch.arange(5) >= torch.tensor([[2], [0]]))[:, None, None]  # left padding in the first sequence of the batch
    bias = torch.randn(1, 4, 5, 5, generator=generator)
    learned_bias = (4 * bias).round().div(4).requires_grad_()  # the same number in each dtype
    sinks = torch.linspace(-2, 2, 4)
    return (
        case("plain"),
        case("as many key heads", keys=130, kv_heads=4),
        case("multi-query", batch=1, kv_heads=1),
        case("wide values", value_width=11),
        case("wide queries and keys", width=19, value_width=8),
        case("one key", keys=1),
        case("small values", kv_heads=4, small=2.0**-30, dtypes=not_float16),
        *(case(f"scale {scale:g}", options={"scale": scale}) for scale in (1.0, 0.0, -0.5, 1e-3)),
        # fails a kernel that multiplies -inf by the scale
        *(case(f"scale {scale:g} and causal", is_causal=True, options={"scale": scale}) for scale in (0.0, -0.5)),
        case("causal", is_causal=True),
        case("causal, decoding one", is_causal=True, rows=1),
        case("causal, decoding three", is_causal=True, rows=3),
        case("causal, several tiles", is_causal=True, rows=3, keys=271),
        case("causal, several tiles of queries", is_causal=True, rows=131, keys=131, batch=1, heads=1, kv_heads=1),
        case("as many key heads, mask and causal", allowed=cells, is_causal=True, kv_heads=4),
        case("mask (L, S)", allowed=cells[0, 0]),
        case("mask per batch", allowed=cells[:, :1]),
        case("mask per head", allowed=cells[:1]),
        case("padding (B, 1, 1, S)", allowed=padding),
        case("mask and causal", allowed=cells, is_causal=True),
        case("padding and causal, decoding", allowed=padding, is_causal=True, rows=3),
        case("empty rows", allowed=empty),
        case("empty rows of left padding", allowed=padding, is_causal=True),
        case("nothing visible", allowed=torch.zeros(5, 5, dtype=torch.bool)),
        case("NaN where no query looks", mask="keys", hidden=torch.nan),
        # fails a kernel that replaces hidden scores by a large negative number
        case("low scores beside the mask", allowed=cells, options={"attn_bias": torch.full((5, 5), -2e9)}, judged=("output",)),
        case("low scores beside the mask, without a bias", mask="keys", low=-3e10, judged=("output",), dtypes=not_float16),
        case("bias", options={"attn_bias": bias}),
        case("bias per batch", options={"attn_bias": torch.cat((bias, -bias))}),
        case("bias of -inf", options={"attn_bias": bias.masked_fill(~empty, -torch.inf)}),
        case("bias with a gradient", options={"attn_bias": learned_bias}),
        case("bias and mask", allowed=empty, options={"attn_bias": bias}),
        case("soft-cap", options={"softcap": 1.5}, spread=3.0),
        case("soft-cap and mask", allowed=empty, options={"softcap": 1.5}),
        case("soft-cap and bias", options={"softcap": 1.5, "attn_bias": 3 * bias}),
        case("sinks", options={"sinks": sinks}),
        case("sinks with a gradient", options={"sinks": torch.arange(-1.0, 3.0).requires_grad_()}),
        case("sinks and mask", allowed=empty, options={"sinks": sinks}),
        case("large scores", keys=67, spread=12.0),
        case("weights and mask", allowed=empty, options={"need_weights": True}),
        case("dropout", options={"dropout_p": 0.25}, rows=67, keys=67, heads=2, kv_heads=1, judged=("spread",)),
        case("weights before dropout", options={"need_weights": True, "dropout_p": 0.5}, judged=("weights",)),
    )


@dataclass(frozen=True, eq=False)
class Operands:
    """The inputs of attention in one case.

    Attributes:
        query, key, value: (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv), in float64.
        cotangent: the gradient of the output, (B, H, L, Dv).
        allowed: bool (B, 1, L, S), True = may attend. None: no mask.
        is_causal: whether the causal option is used.
        options: further arguments of a kernel.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    cotangent: Tensor
    allowed: Tensor | None = None
    is_causal: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value."""
        return self.query, self.key, self.value

    @cached_property
    def through_mask(self) -> Operands:
        """The same with the causal mask inside ``allowed``, for functions without a causal option."""
        L, S = self.query.shape[2], self.key.shape[2]
        triangle = torch.ones(len(self.query), 1, L, S, dtype=torch.bool).tril(S - L)
        return replace(self, allowed=triangle if self.allowed is None else self.allowed & triangle, is_causal=False)

    @cached_property
    def always_causal(self) -> Operands:
        """The same for attention that is causal without an option."""
        return replace(self, is_causal=True)


@lru_cache(maxsize=4096)
def drawn(case: Case, heads: int = HEADS, width: int = WIDTH, kind: str = "cells", seed: int = 0) -> Operands:
    """Return the inputs of a case. The same arguments give the same object.

    Args:
        heads, width: the sizes, if the case has none.
        kind: the masks that can be expressed: "cells", "shared" (by the batch) or "keys" (the same for all queries).
    """
    generator = torch.Generator().manual_seed(seed)
    B, H, D, L, S = case.batch, case.heads or heads, case.width or width, case.rows, case.keys
    kv_heads, value_width = case.kv_heads or H, case.value_width or D
    shapes = (B, H, L, D), (B, kv_heads, S, D), (B, kv_heads, S, value_width)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    query, value = query * case.spread, value * case.small
    for tensor in (query, key, value) if case.other else ():
        part = {"sequence": tensor[1], "head": tensor[:, -1], "token": tensor[:, :, -1]}[case.other]
        part.copy_(part.flip(-1) + 1.5)
    allowed = _mask(case, kind, generator) if case.mask else case.allowed
    hidden = ~allowed.any(2)[..., None] if allowed is not None and case.mask else torch.zeros(B, 1, S, 1, dtype=torch.bool)
    if case.low is not None:  # the last coordinate sets the score
        query[..., -1] = 1.0
        if case.mask:  # equal visible scores, because float32 cannot represent their differences
            query[..., :-1] = 0.0
        key[..., -1:] = torch.where(hidden, 0.0, case.low * D**0.5)
    # with "nothing", only the blind query is compared
    moved = torch.ones_like(hidden) if case.mask == "nothing" else hidden
    value = torch.where(moved, value + case.hidden * torch.arange(1.0, S + 1)[:, None], value)
    key = key.masked_fill(hidden, torch.nan) if case.hidden != case.hidden else key
    value = torch.ones_like(value) if case.judged == ("spread",) else value
    cotangent = torch.randn(B, H, L, value_width, generator=generator, dtype=torch.float64)
    return Operands(query, key, value, cotangent, allowed, case.is_causal, case.options)


def _mask(case: Case, kind: str, generator: torch.Generator) -> Tensor:
    """A mask (B, 1, L, S). In every ordinary case, each query sees the first key, and at least one key is hidden."""
    B, L, S = case.batch, case.rows, case.keys
    allowed = torch.rand(B, 1, L, S, generator=generator) < 0.6
    allowed[..., 0], allowed[:, :, 1, -1] = True, False
    if case.mask == "keys" or kind == "keys":
        lengths = S - 2 + torch.arange(B) % 2 * (kind != "shared")
        allowed = (torch.arange(S) < lengths[:, None])[:, None, None].expand(B, 1, L, S).clone()
    if kind == "shared":
        allowed[:] = allowed[:1].clone()
    if case.mask == "nothing":
        blind = (slice(None), 0, 2) if kind == "shared" else (1,)
        allowed[blind] = False
    return allowed


@lru_cache(maxsize=1024)
def by_definition(inputs: Operands, drawn_in: torch.dtype, dtype: torch.dtype, is_graded: bool = False) -> dict[str, Tensor]:
    """Return the results of ``naive_attention`` in ``dtype`` for inputs that are rounded to ``drawn_in``, as ``results_of`` does."""
    options = {name: option for name, option in inputs.options.items() if name not in ("dropout_p", "need_weights")}
    learned = {name: option for name, option in options.items() if isinstance(option, Tensor) and option.requires_grad}
    tensors = dict(zip(("query", "key", "value"), inputs.heads, strict=True)) | learned
    leaves = {name: x.detach().to(drawn_in).to(dtype).requires_grad_(is_graded) for name, x in tensors.items()}
    result = naive_attention(**{**options, **leaves}, attn_mask=inputs.allowed, is_causal=inputs.is_causal)
    return results_of(result, leaves, inputs.cotangent.to(drawn_in))


def results_of(result: Any, leaves: Mapping[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    """Return the output, the weights if there are any, and the gradients of the leaves if there are any, on the CPU."""
    results = dict(zip(("output", "weights"), result if isinstance(result, tuple) else (result,), strict=False))
    output = results["output"]
    if output.requires_grad and output.shape == cotangent.shape:
        loss = (output * cotangent.to(output.device, output.dtype)).sum()  # given a cotangent, torch imports sympy, for 0.3 s
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
        results |= zip((f"gradient of {name}" for name in leaves), gradients, strict=True)
    return {name: tensor.detach().cpu() for name, tensor in results.items() if tensor is not None}


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a case.

    Attributes:
        inputs: the inputs of attention; for a layer, the projected queries, keys and values.
        output: (B, H, L, Dv). None: the call raised, or the output has another shape.
        weights: the second tensor that was returned, if any.
        gradients: the gradients of query, key and value for the cotangent, or of the inputs of a layer. Empty: there are none.
        has_inner_gradients: whether ``gradients`` are for query, key and value.
        fault: the reason why there is no output. refusal: the same if the case was not run.
        changed: the arguments that the call changed in place.
    """

    case: Case
    inputs: Operands
    output: Tensor | None = None
    weights: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()
    has_inner_gradients: bool = False
    fault: str = ""
    refusal: NotTriedError | None = None
    changed: tuple[str, ...] = ()

    @property
    def is_finite(self) -> bool:
        """Return whether there is an output, and all of it is finite."""
        return self.output is not None and bool(self.output.isfinite().all())

    @property
    def is_loose(self) -> bool:
        """Return whether rounding may be large: in extreme cases, and in float32."""
        return self.case.is_extreme or (self.output is not None and self.output.dtype != torch.float64)
