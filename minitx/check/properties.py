"""Properties that every right model has, tried by calling it.

A model comes as a function ``answer``: a mapping of arguments in, one tensor out, such as logits (B, L, V). A property is tried by
changing what must not matter. The result is a ``Gap``: the largest difference, and how much rounding explains. That is measured in
the model (``rounding``), because a fixed tolerance is wrong for some model.

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

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Inputs = Mapping[str, Any]
Answer = Callable[[Inputs], Tensor]

FACTOR = 4.0
"""How many times the measured rounding a difference may be. Kernels differ by at most 1 in 62 families and three dtypes."""

PRODUCTS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
"""The relative rounding error of products of float32, by torch's words for their precision."""


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

    It is at least float32's, because models of float64 compute some steps in float32. Products of float32 may be computed in TF32 or
    bfloat16 (``torch.set_float32_matmul_precision``); ε is at least theirs.
    """
    products = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    return max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps, *(PRODUCTS.get(word, 0.0) for word in products))


def compare(found: Tensor, wanted: Tensor, noise: float, where: Tensor | None = None) -> Gap:
    """Return the gap between two answers. A difference of ``FACTOR`` · (``noise`` + ε · |wanted|) is rounding, with ε = ``unit`` of the dtype.

    NaN and infinity differ from everything but themselves.

    Args:
        found, wanted: (B, L, ...), or any shape without ``where``.
        noise: what ``rounding`` returns.
        where: bool (B, L): compare these positions only.

    Raises:
        ValueError: the shapes differ, or ``where`` hides every position.

    >>> compare(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), noise=0.01).place
    (1,)
    """
    if found.shape != wanted.shape:
        raise ValueError(f"the answers have the shapes {tuple(found.shape)} and {tuple(wanted.shape)}")
    epsilon = max(unit(found.dtype), unit(wanted.dtype))
    dtype = torch.promote_types(torch.promote_types(found.dtype, wanted.dtype), torch.float32)
    found, wanted = found.to(dtype), wanted.to(dtype)
    size = (found - wanted).abs_()
    if not size.isfinite().all():
        is_equal = (found == wanted) | (found.isnan() & wanted.isnan())
        size = size.nan_to_num_(torch.inf, torch.inf).masked_fill_(is_equal, 0.0)
        wanted = wanted.nan_to_num(0.0, 0.0, 0.0)
    allowed = wanted.abs().mul_(epsilon).add_(noise).mul_(FACTOR)
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
    answer: Answer, model: nn.Module, inputs: Inputs, wanted: Tensor | None = None, where: Tensor | None = None, seed: int = 0
) -> float:
    """Return how far the answer moves by rounding alone: the largest difference if each step is rounded otherwise.

    Each module without children answers with (1 ± ε) times its output, with ε = ``unit`` of the dtype of the output and random signs. This is as
    much as another kernel changes.

    Args:
        model: the module that ``answer`` calls.
        wanted: ``answer(inputs)``, if it is known.
        where: as in ``compare``. seed: of the signs. No global random number is drawn.
    """
    with _rounded_otherwise(model, seed):
        moved = answer(inputs)
    return compare(moved, answer(inputs) if wanted is None else wanted, 0.0, where).size


@contextmanager
def _rounded_otherwise(model: nn.Module, seed: int) -> Iterator[None]:
    generator = torch.Generator().manual_seed(seed)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        is_up = torch.randint(2, output.shape, generator=generator, dtype=torch.bool).to(output.device)
        step = unit(output.dtype)
        return output * torch.where(is_up, 1 + step, 1 - step).to(output.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            if not any(module.children()):
                hooks.enter_context(module.register_forward_hook(leave))
        yield


@dataclass(frozen=True, eq=False)
class Twins:
    """Rows, and after them the same rows with changes that must not show.

    Attributes:
        inputs: the arguments of a call, 2B rows.
        still: bool (B, L): where the answers for a row and its twin must be equal.
    """

    inputs: dict[str, Any]
    still: Tensor

    def moved(self, answer: Answer, noise: float) -> Gap:
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
    """Twins that have, at each place of ``changed``, another token from the same row."""
    tokens = inputs[ids]
    if any(value.shape[:1] != tokens.shape[:1] for value in inputs.values() if isinstance(value, Tensor)):
        raise ValueError(f"the tensors have not all the {len(tokens)} rows of {ids}")
    differs = tokens[:, None, :] != tokens[:, :, None]  # (B, place, other place)
    if not differs.any(-1)[changed].all():
        raise ValueError(f"a row of {ids} has one token only, so no other can take its place")
    others = tokens.gather(1, differs.int().argmax(-1))  # the first token of the row that is another
    twins = dict(inputs) | {ids: torch.where(changed, others, tokens)}
    both = {name: torch.cat((value, twins[name])) if isinstance(value, Tensor) else value for name, value in inputs.items()}
    return Twins(both, ~changed)


def linear_gap(output: Tensor, cotangent: Tensor, value: Tensor, gradient: Tensor) -> Gap:
    """Return the difference of ⟨cotangent, output⟩ and ⟨value, gradient⟩. They are equal if the output is linear in ``value``.

    Attention is linear in its values. If the backward pass of dropout drops other weights than the forward pass, the two differ.

    Args:
        output: a function of ``value``. cotangent: of the same shape.
        value: the argument. gradient: of ⟨cotangent, output⟩ with respect to it.

    >>> value = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> output, cotangent = 3 * value, torch.tensor([1.0, -1.0])
    >>> linear_gap(output, cotangent, value, torch.autograd.grad(output, value, cotangent)[0]).is_rounding
    True
    """
    sides = [
        (one.detach().double() * other.detach().double()).flatten() for one, other in ((cotangent, output), (value, gradient))
    ]
    epsilon = torch.finfo(output.dtype).eps
    size = abs(float(sides[0].sum() - sides[1].sum()))
    return Gap(size, 2 * FACTOR * epsilon * sum(float(side.norm()) for side in sides), ())


def slope_gap(function: Callable[[float], float], slope: float, step: float = 1e-4) -> Gap:
    """Return the difference of ``slope`` and the derivative of ``function`` at 0, computed in float64 by differences.

    The error of a central difference falls to a quarter when the step is halved. What is allowed is measured by this.

    >>> slope_gap(lambda x: 2 * x + x**3, 2.0).is_rounding, slope_gap(lambda x: 2 * x + x**3, 2.001).is_rounding
    (True, False)
    """
    ends = [(function(length), function(-length)) for length in (step, step / 2)]
    long, short = ((right - left) / (2 * length) for (right, left), length in zip(ends, (step, step / 2), strict=True))
    noise = torch.finfo(torch.float64).eps * max(1.0, *(abs(value) for pair in ends for value in pair)) / step
    return Gap(abs(short - slope), abs(long - short) + FACTOR * noise, ())
