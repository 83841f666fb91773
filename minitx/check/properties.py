"""Properties that every correct model has, checked by calling it.

A model is given as a function ``answer`` from a mapping of arguments to one tensor, such as logits (B, L, V). A property is checked
with changes that must not matter. The result is a ``Gap``: the largest difference, and the difference that rounding explains. The
effect of rounding is measured in the model (``rounding``), because no fixed tolerance suits all models.

    >>> embedding = torch.nn.Embedding(11, 4)
    >>> def answer(inputs):  # each token sees itself and the tokens before it
    ...     return embedding(inputs["input_ids"]).cumsum(1)
    >>> rows = {"input_ids": torch.tensor([[3, 5, 7], [2, 6, 8]])}
    >>> with torch.no_grad():
    ...     gap = later_tokens(rows).moved(answer, rounding(answer, embedding, rows))
    >>> gap.is_rounding
    True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Any]
Caller = Callable[[Inputs], Tensor]

FACTOR = 4.0
"""The largest difference as a multiple of the measured rounding. In 62 families and three dtypes, kernels differ by at most 1."""

PRODUCTS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
"""The relative rounding error of float32 matrix products, by torch's names of their precision."""


@dataclass(frozen=True)
class Gap:
    """A difference where there should be none.

    Attributes:
        size: the difference at ``place``.
        allowed: the difference that rounding explains there.
        place: the index of the element with the largest excess, size - allowed.
    """

    size: float
    allowed: float
    place: tuple[int, ...]

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the difference."""
        return self.size <= self.allowed


def unit(dtype: torch.dtype) -> float:
    """Return ε, the relative rounding error of a dtype.

    ε is at least float32's, because float64 models compute some steps in float32. float32 products may be computed in TF32 or bfloat16
    (``torch.set_float32_matmul_precision``). ε is then at least the error of these.
    """
    products = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps, *(PRODUCTS.get(word, 0.0) for word in products))


def compare(output: Tensor, expected: Tensor, noise: float, where: Tensor | None = None) -> Gap:
    """Return the gap between two outputs.

    Rounding explains a difference of up to ``FACTOR`` · (``noise`` + ε · |expected|), with ε = ``unit`` of the dtype. NaN and infinity
    differ from everything but themselves.

    Args:
        output, expected: (B, L, ...), or any shape without ``where``.
        noise: the result of ``rounding``.
        where: bool (B, L): compare these positions only.

    Raises:
        ValueError: the shapes differ, or ``where`` hides every position.

    >>> compare(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), noise=0.01).place
    (1,)
    """
    if output.shape != expected.shape:
        raise ValueError(f"output and expected must have the same shape, got {tuple(output.shape)} and {tuple(expected.shape)}")
    epsilon = max(unit(output.dtype), unit(expected.dtype))
    dtype = torch.promote_types(torch.promote_types(output.dtype, expected.dtype), torch.float32)
    output, expected = output.to(dtype), expected.to(dtype)
    size = (output - expected).abs_()
    if not size.isfinite().all():
        is_equal = (output == expected) | (output.isnan() & expected.isnan())
        size = size.nan_to_num_(torch.inf, torch.inf).masked_fill_(is_equal, 0.0)
        expected = expected.nan_to_num(0.0, 0.0, 0.0)
    allowed = expected.abs().mul_(epsilon).add_(noise).mul_(FACTOR)
    excess = size - allowed
    if where is not None:
        hidden = ~where.to(excess.device)
        excess.masked_fill_(hidden.view(*hidden.shape, *[1] * (excess.dim() - 2)), -torch.inf)
    worst = int(excess.argmax())
    if excess.flatten()[worst] == -torch.inf:
        raise ValueError("nothing to compare: ``where`` hides every position")
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(worst), excess.shape))
    return Gap(float(size.flatten()[worst]), float(allowed.flatten()[worst]), place)


def rounding(
    answer: Caller, model: nn.Module, inputs: Inputs, expected: Tensor | None = None, where: Tensor | None = None, seed: int = 0
) -> float:
    """Return the effect of rounding on the answer: the largest difference if each step is rounded differently.

    The inputs of the model, and the results of each module that has parameters or no children, are multiplied by 1 ± ε, with ε = ``unit``
    of their dtype and random signs. Another kernel changes the output about as much.

    Args:
        model: the module that ``answer`` calls.
        expected: ``answer(inputs)``, if it is known.
        where: as in ``compare``. seed: the seed of the signs. The global random state is not used.
    """
    generator = torch.Generator().manual_seed(seed)

    def rounded(value: Any) -> Any:
        if type(value) in (tuple, list):  # of a recurrent layer
            return type(value)(rounded(part) for part in value)
        if type(value) is dict:
            return {name: rounded(part) for name, part in value.items()}
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        is_up = torch.randint(2, value.shape, generator=generator, dtype=torch.bool).to(value.device)
        step = unit(value.dtype)
        return value * torch.where(is_up, 1 + step, 1 - step).to(value.dtype)

    def enter(module: nn.Module, args: Any, options: Any) -> Any:
        return rounded(args), rounded(options)

    with ExitStack() as hooks:
        hooks.enter_context(model.register_forward_pre_hook(enter, with_kwargs=True))
        for module in model.modules():
            if not any(module.children()) or any(True for _ in module.parameters(recurse=False)):
                hooks.enter_context(module.register_forward_hook(lambda module, args, result: rounded(result)))
        moved = answer(inputs)
    return compare(moved, answer(inputs) if expected is None else expected, 0.0, where).size


@dataclass(frozen=True, eq=False)
class Twins:
    """Rows, followed by copies of the rows with changes that must not matter.

    Attributes:
        inputs: the arguments of a call, 2B rows.
        still: bool (B, L): the positions at which the answers for a row and its twin must be equal.
    """

    inputs: dict[str, Any]
    still: Tensor

    def moved(self, answer: Caller, noise: float) -> Gap:
        """Return the gap between the answers (B, L, ...) for the rows and for their twins."""
        rows, twins = answer(self.inputs).chunk(2)
        return compare(twins, rows, noise, self.still)


def later_tokens(inputs: Inputs, ids: str = "input_ids", mask: str | None = None) -> Twins:
    """Return twins with other tokens in their second half. In a causal model, they change nothing in the first half.

    Args:
        inputs: the arguments of a call for B rows. Each tensor has B rows.
        ids: the name of the tokens, int (B, L).
        mask: also change the tokens that this argument (B, L) hides, as ``hidden_tokens`` does.

    Raises:
        ValueError: a row has no other token, or tensors have different numbers of rows.
    """
    changed = torch.zeros_like(inputs[ids], dtype=torch.bool)
    changed[:, changed.shape[1] // 2 :] = True
    return _twins(inputs, ids, changed if mask is None else changed | (inputs[mask] == 0))


def hidden_tokens(inputs: Inputs, ids: str = "input_ids", mask: str = "attention_mask") -> Twins:
    """Return twins with other tokens where ``mask`` (B, L) is 0. They change nothing elsewhere."""
    return _twins(inputs, ids, inputs[mask] == 0)


def _twins(inputs: Inputs, ids: str, changed: Tensor) -> Twins:
    """Twins with another token of the same row at each place of ``changed``."""
    tokens = inputs[ids]
    if any(value.shape[:1] != tokens.shape[:1] for value in inputs.values() if isinstance(value, Tensor)):
        raise ValueError(f"every tensor must have the {len(tokens)} rows of {ids}")
    differs = tokens[:, None, :] != tokens[:, :, None]  # (B, place, other place)
    if not differs.any(-1)[changed].all():
        raise ValueError(f"a row of {ids} has only one distinct token, so no other token can replace it")
    others = tokens.gather(1, differs.int().argmax(-1))  # the first token of the row that differs
    twins = dict(inputs) | {ids: torch.where(changed, others, tokens)}
    both = {name: torch.cat((value, twins[name])) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return Twins(both, ~changed)
