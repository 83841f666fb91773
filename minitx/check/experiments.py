"""The experiments of ``check_attention``: inputs, a mask, a causal option, large numbers. Each experiment reveals some mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from minitx.check.results import stable_id

BATCH, HEADS, WIDTH = 2, 4, 8


@dataclass(frozen=True)
class Experiment:
    """One call of attention, or a part of it.

    Attributes:
        name: the name in plain words.
        stage: the stage of the graded exercise that it belongs to. 0: none.
        rows, keys: the numbers of queries and of keys.
        kv_heads: the number of heads of keys and values. 0: as many as the query.
        batch: the number of sequences.
        value_width: the width of the values. 0: the width of the query.
        mask: "" (none), "cells" (random), "keys" (hides the same keys from all queries) or "nothing" (a query sees no key).
        is_causal: whether the causal option is used.
        spread: a factor on the scores.
        low: the score of visible keys, approximately, or exactly with a mask. None: random scores.
        hidden: a number that is added to hidden values, or to all values with the mask "nothing".
        small: a factor on the values.
        other: the part that has other numbers than in the plain experiment: "sequence", "head" or "" (none).
        is_reused: whether the same tensors are passed twice, with other numbers in the first call.
        is_extreme: whether a function that is correct in theory may fail.
        dtype: the dtype of the inputs. None: the dtype of the whole check.
    """

    name: str
    stage: int = 0
    rows: int = 5
    keys: int = 5
    kv_heads: int = 0
    batch: int = BATCH
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
    dtype: torch.dtype | None = None

    @property
    def id(self) -> str:
        """Return the stable id."""
        return stable_id(self.name)


SIMPLE = Experiment("plain", 1)
MASKED = Experiment("mask", 2, mask="cells")
BLIND = Experiment("a query that sees nothing", 3, mask="nothing", is_extreme=True)
BLIND_MOVED = Experiment("other hidden values where a query sees nothing", 3, mask="nothing", hidden=100.0, is_extreme=True)
CAUSAL = Experiment("causal", 4, is_causal=True)
WIDE = Experiment("wide values", 4, value_width=11)
OTHERS = {"sequence": Experiment("second sequence", other="sequence"), "head": Experiment("last head", other="head")}
HALF = tuple(
    Experiment(f"{name}{' with a mask' if mask else ''}", 5, mask=mask, is_extreme=True, dtype=dtype)
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16))
    for mask in ("", "cells")
)
EXPERIMENTS = (
    SIMPLE,
    Experiment("more keys than queries", 1, keys=7),
    MASKED,
    Experiment("mask that hides keys", 2, mask="keys"),
    Experiment("large hidden values", 2, mask="keys", hidden=1e7),
    BLIND,
    BLIND_MOVED,
    WIDE,
    CAUSAL,
    Experiment("causal with a cache", 4, rows=3, keys=7, is_causal=True),
    Experiment("mask and causal", mask="cells", is_causal=True),
    Experiment("grouped heads", kv_heads=2),
    Experiment("large scores", 5, spread=300.0, is_extreme=True),
    Experiment("low scores", 5, low=-42.0, is_extreme=True),
    Experiment("low scores beside a mask", 5, mask="keys", low=-1e5, is_extreme=True),
    Experiment("very low scores beside a mask", 5, mask="keys", low=-3e10, is_extreme=True),
    *HALF,
)
"""The experiments that find the way of calling and the mistakes, in the order in which mistakes should be mended."""

DRAWS = (
    Experiment("one sequence", batch=1),
    Experiment("mask of one sequence", mask="keys", batch=1),
    Experiment("grouped heads, three sequences", kv_heads=2, batch=3),
    Experiment("65 queries, 130 keys", rows=65, keys=130, batch=1),
    Experiment("130 tokens, mask and causal", rows=130, keys=130, batch=1, mask="cells", is_causal=True),
    Experiment("small values", small=1e-8),
    Experiment("the same tensors with other numbers", is_reused=True),
)
"""Other sizes and numbers. They are run once, in the way of calling that was found."""


@dataclass(frozen=True, eq=False)
class Operands:
    """The inputs of attention in one experiment.

    Attributes:
        query, key, value: (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv), in float64.
        allowed: bool (B, 1, L, S), True = may attend. None: no mask.
        is_causal: whether the causal option is used.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    allowed: Tensor | None = None
    is_causal: bool = False

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value."""
        return self.query, self.key, self.value


@dataclass(frozen=True)
class HeadSizes:
    """The sizes that a way of calling allows. ``mask`` is "cells", "shared" (by the batch) or "keys" (the same for all queries)."""

    heads: int = HEADS
    width: int = WIDTH
    mask: str = "cells"


@lru_cache(maxsize=4096)
def drawn(experiment: Experiment, sizes: HeadSizes = HeadSizes(), seed: int = 0) -> Operands:
    """Return the inputs of an experiment. The same arguments give the same object."""
    generator = torch.Generator().manual_seed(seed)
    B, H, D, L, S = experiment.batch, sizes.heads, sizes.width, experiment.rows, experiment.keys
    kv_heads, value_width = experiment.kv_heads or H, experiment.value_width or D
    shapes = (B, H, L, D), (B, kv_heads, S, D), (B, kv_heads, S, value_width)
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    query, value = query * experiment.spread, value * experiment.small
    for tensor in (query, key, value) if experiment.other else ():
        tensor[(slice(None), -1) if experiment.other == "head" else 1] += 1.5
    allowed = _mask(experiment, sizes.mask, generator) if experiment.mask else None
    hidden = torch.zeros(B, 1, S, 1, dtype=torch.bool) if allowed is None else ~allowed.any(2)[..., None]
    if experiment.low is not None:  # the last coordinate sets the score
        query[..., -1] = 1.0
        if experiment.mask:  # equal visible scores, because float32 cannot represent their differences
            query[..., :-1] = 0.0
        key[..., -1:] = torch.where(hidden, 0.0, experiment.low * D**0.5)
    # with "nothing", only the blind query is compared
    moved = torch.ones_like(hidden) if experiment.mask == "nothing" else hidden
    value = value + experiment.hidden * torch.arange(1.0, S + 1)[:, None] * moved
    return Operands(query, key, value, allowed, experiment.is_causal)


def _mask(experiment: Experiment, kind: str, generator: torch.Generator) -> Tensor:
    """A mask (B, 1, L, S). In every ordinary experiment, each query sees the first key, and at least one key is hidden."""
    B, L, S = experiment.batch, experiment.rows, experiment.keys
    allowed = torch.rand(B, 1, L, S, generator=generator) < 0.6
    allowed[..., 0], allowed[:, :, 1, -1] = True, False
    if experiment.mask == "keys" or kind == "keys":
        lengths = S - 2 + torch.arange(B) % 2 * (kind != "shared")
        allowed = (torch.arange(S) < lengths[:, None])[:, None, None].expand(B, 1, L, S).clone()
    if kind == "shared":
        allowed[:] = allowed[:1].clone()
    if experiment.mask == "nothing":
        blind = (slice(None), 0, 2) if kind == "shared" else (1,)
        allowed[blind] = False
    return allowed


@lru_cache(maxsize=4096)
def through_mask(inputs: Operands) -> Operands:
    """Return the inputs with the causal mask inside ``allowed``, for functions without a causal option.

    Equal inputs return the same object.
    """
    L, S = inputs.query.shape[2], inputs.key.shape[2]
    triangle = torch.ones(len(inputs.query), 1, L, S, dtype=torch.bool).tril(S - L)
    allowed = triangle if inputs.allowed is None else inputs.allowed & triangle
    return Operands(*inputs.heads, allowed)


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of an experiment.

    Attributes:
        inputs: the inputs of attention; for a layer, the projected queries, keys and values.
        output: (B, H, L, Dv). None: the call raised, or the output has another shape.
        weights: the second tensor that was returned, if any.
        gradients: the gradients of the sum of the squared output for query, key and value, or for the inputs of a layer.
        has_inner_gradients: whether ``gradients`` are for query, key and value.
        fault: the reason why there is no output.
        changed: the arguments that the call changed in place.
    """

    experiment: Experiment
    inputs: Operands
    output: Tensor | None = None
    weights: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()
    has_inner_gradients: bool = False
    fault: str = ""
    changed: tuple[str, ...] = ()
