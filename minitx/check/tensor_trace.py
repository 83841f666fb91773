"""Trace one call of a model: tensors, attention, and the output after changes of some steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minitx.check.calling import parts_of
from minitx.check.properties import unit

LOW = -1e4
"""Scores below this number are hidden, whether by -inf, -1e9 or the dtype's minimum."""

NARROW = {torch.float16, torch.bfloat16, torch.float32}
Function = Callable[..., Any]


def pattern(path: str) -> str:
    """Return the path of a module without the number of its layer."""
    return re.sub(r"\d+", "*", path, count=1)


@dataclass
class Change:
    """A change of a model.

    Attributes:
        outputs: functions of (owner, arguments, output) that return another output, by the place of the output: a module, the key of a
            step, "query", "key", "raw", "scores", "value" and "merged" of all attentions, or "": the output of the model. The owner is the
            module, the ``Site`` of an attention, or the ``Trace``.
    """

    id: str
    text: str
    outputs: Mapping[Any, Function]


@dataclass(eq=False)
class Step:
    """A tensor of the call.

    Attributes:
        path: the module whose code computes the tensor, or that calls the module which takes it.
        kind: "in" and "out" of a module, or the name of torch's function.
        key: the module, or the place of the function in all layers.
        value: (B, L, F): the tensor with all other axes as features.
        marks: (3, F): random sums over the tokens.
        args: the arguments of the function.
    """

    path: str
    kind: str
    key: str
    value: Tensor
    marks: Tensor
    args: tuple


@dataclass(eq=False)
class Site:
    """One attention: query, key and value (B, H, L, D), their product and the scores (B, H, L, L).

    Attributes:
        start: the number of steps before the product of queries and keys.
        raw: the product of queries and keys. scores: the argument of the softmax. whole: the last scores of which none is hidden.
    """

    number: int
    start: int
    query: Tensor
    key: Tensor
    raw: Tensor = field(default_factory=lambda: torch.empty(0))
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    whole: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor | None = None

    @property
    def visible(self) -> Tensor:
        """Return which keys have a weight in any head and row, bool (L, L)."""
        return (self.scores > LOW).flatten(0, -3).any(0)


class Wide(TorchFunctionMode):
    """Keep the steps of a float64 model in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if getattr(func, "__name__", "") in ("float", "half", "bfloat16") else func
        return func(*map(_widened, args), **{key: _widened(value) for key, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in NARROW else value
    return value.double() if isinstance(value, Tensor) and value.dtype in NARROW else value


class Trace(TorchFunctionMode):
    """The steps of one call.

    Args:
        call: runs the model and returns its output (B, L, V).
        ids: the tokens (B, L). L should be no other size of the model.
    """

    def __init__(self, model: nn.Module, call: Callable[[], Tensor], ids: Tensor, changes: Sequence[Change] = ()) -> None:
        super().__init__()
        self.B, self.L = ids.shape
        self.changes, self.steps, self.sites = changes, list[Step](), list[Site]()
        self._paths, self._counts, self._is_recording = [""], [Counter[str]()], False
        generator = torch.Generator().manual_seed(0)
        self._sums = torch.randn(3, ids.numel(), generator=generator, dtype=torch.float64).to(ids.device)
        with ExitStack() as stack:
            for path, module in model.named_modules():
                self._watch(path, module, stack)
            with self:
                self.output = call()
        self.output = self._changed("", self, (), self.output)
        self._record("", "out", "output", self.output, ())

    @property
    def raw(self) -> Tensor:
        """Return the output of the last module, such as logits before a soft-cap."""
        return next((step.value for step in reversed(self.steps) if step.kind == "out" and step.path), self.output)

    def _watch(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._paths.append(path)
            self._counts.append(Counter())
            self._record(self._paths[-2], "in", path, (args, kwargs), ())

        def end(module: nn.Module, args: Any, out: Any) -> Any:
            first = out if isinstance(out, Tensor) else next(_tensors(out), None)
            changed = self._changed(module, module, args, first)
            out = out if changed is first else changed if first is out else type(out)([changed, *out[1:]])
            del self._paths[-1], self._counts[-1]
            self._record(path, "out", path, out, args)
            return out

        if path:
            stack.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(end))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, L = kwargs or {}, getattr(func, "__name__", ""), self.L
        if self._is_recording:
            return func(*args, **kwargs)
        if name in ("scaled_dot_product_attention", "einsum"):
            with self:  # in products of matrices
                out = _einsum(*args) if name == "einsum" else _attention(*args, **kwargs)
            if out is not None:
                return out
        self._counts[-1][name] += 1
        path = self._paths[-1]
        key, start = f"{pattern(path)} {name} {self._counts[-1][name]}", len(self.steps)
        is_changed = any(key in change.outputs for change in self.changes)
        before = args[0].clone() if is_changed and isinstance(args[0], Tensor) else None  # a function may change it in place
        if name in ("matmul", "__matmul__", "bmm") and args[0].dim() == args[1].dim() > 2 and args[0].shape[-2] == L:
            out = self._product(start, func, *args[:2])
        elif name == "softmax" and self.sites and args[0].shape[-1] == L and args[0].numel() == self.sites[-1].raw.numel():
            self.sites[-1].scores = scores = self._changed("scores", self.sites[-1], (), self._heads(args[0]))
            out = func(scores.reshape(args[0].shape), *args[1:], **kwargs)
        else:
            out = func(*args, **kwargs)
        out = self._changed(key, self, (before, *args[1:]), out)
        self._record(path, name, key, out, tuple(args))
        if self.sites and getattr(out, "shape", None) == self.sites[-1].raw.shape and bool((out > LOW).all()):
            self.sites[-1].whole = out
        return out

    def _product(self, start: int, func: Any, left: Tensor, right: Tensor) -> Tensor:
        if right.shape[-1] == self.L != left.shape[-1]:
            self.sites.append(site := Site(len(self.sites), start, self._heads(left), self._heads(right.mT)))
            query, key = (self._changed(name, site, (), getattr(site, name)) for name in ("query", "key"))
            out = func(query.reshape(left.shape), key.reshape(right.mT.shape).mT)
            site.raw = self._changed("raw", site, (), self._heads(out))
            return site.raw.reshape(out.shape)
        if left.shape[-1] == right.shape[-2] == self.L and self.sites and (site := self.sites[-1]).value is None:
            site.value = value = self._heads(right)
            out = func(left, self._changed("value", site, (), value).reshape(right.shape))
            return self._changed("merged", site, (), self._heads(out)).reshape(out.shape)
        return func(left, right)

    def _changed(self, key: Any, owner: Any, args: tuple, out: Any) -> Any:
        for function in [change.outputs[key] for change in self.changes if key in change.outputs]:
            before, out = out, function(owner, args, out)
            self._record(self._paths[-1], "changed", str(key), (before, out), ())  # the port may have both
        return out

    def _heads(self, tensor: Tensor) -> Tensor:
        """Return (B, H, L, D) for (B, ..., L, D) or (B · H, L, D)."""
        return tensor.reshape(self.B, -1, *tensor.shape[-2:])

    def _record(self, path: str, kind: str, key: str, result: Any, args: tuple) -> None:
        self._is_recording = True
        for tensor in _tensors(result):
            value = self.flat(tensor)
            if value is not None and value.numel() and not torch.equal(value[0], value[-1]):  # positions and masks are
                numbers = value.flatten(0, 1).double()
                marks = self._sums @ numbers.where(numbers.abs() < -LOW, 0.0)  # hidden scores differ: -inf, -1e9
                self.steps.append(Step(path, kind, key, value, marks, args))
        self._is_recording = False

    def flat(self, tensor: Any) -> Tensor | None:
        """Return (B, L, F) for a tensor of tokens in any layout, or None."""
        if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dim() < 2:
            return None
        tensor, B, L = torch.view_as_real(tensor) if tensor.is_complex() else tensor, self.B, self.L
        if tensor.shape[0] == B * L:
            return tensor.reshape(B, L, -1)
        if tensor.shape[:2] == (L, B):
            tensor = tensor.transpose(0, 1)
        elif tensor.shape[0] != B and tensor.dim() == 3 and tensor.shape[1] == L and tensor.shape[0] % B == 0:  # (B · H, L, D)
            tensor = tensor.reshape(B, -1, L, tensor.shape[2])
        axis = next((axis for axis in range(1, tensor.dim()) if tensor.shape[axis] == L), None)
        return None if axis is None or tensor.dim() < 3 or tensor.shape[0] != B else tensor.movedim(axis, 1).flatten(2)


def matched(steps: Sequence[Step], among: Sequence[Step]) -> Tensor:
    """Return for each step whether each of its features is a feature of the others to rounding, in any order and layout."""
    pool, marks = torch.cat([step.marks for step in among], 1), torch.cat([step.marks for step in steps], 1)
    pool = pool[:, pool[0].argsort()]
    owner = torch.repeat_interleave(torch.tensor([step.marks.shape[1] for step in steps]).to(pool.device))
    allowed = 16 * unit(torch.float32) * torch.stack([step.marks.abs().max() for step in steps])[owner]
    place, is_there = torch.searchsorted(pool[0].contiguous(), marks[0].contiguous()), torch.zeros_like(owner, dtype=torch.bool)
    for offset in range(-4, 4):
        near = pool[:, (place + offset).clamp(0, pool.shape[1] - 1)]
        is_there |= (near - marks).abs().amax(0) <= allowed
    return torch.zeros(len(steps), device=pool.device).index_add_(0, owner, (~is_there).float()) == 0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for part in parts_of(value):
        yield from _tensors(part)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``scaled_dot_product_attention`` in steps."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = torch.matmul(query, key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1).nan_to_num(), value)


def _einsum(equation: Any, *operands: Any) -> Tensor | None:
    """Compute a product of two tensors by ``matmul`` if each has exactly one axis that the other lacks, or return None."""
    if not isinstance(equation, str) or not re.fullmatch(r"\w+,\w+->\w+", equation.replace(" ", "")):
        return None
    left, right, out = re.split(",|->", equation.replace(" ", ""))
    batch, sums = [a for a in out if a in left and a in right], [a for a in left if a in right and a not in out]
    rows, columns = ([a for a in out if a in one and a not in two] for one, two in ((left, right), (right, left)))
    if not len(rows) == len(columns) == len(sums) == len(left) - len(batch) - 1 == len(right) - len(batch) - 1 == 1:
        return None
    first = operands[0].permute([left.index(a) for a in batch + rows + sums])
    second = operands[1].permute([right.index(a) for a in batch + sums + columns])
    return torch.matmul(first, second).permute([(batch + rows + columns).index(a) for a in out])
