"""Trace one call of a model: tensors, attention, and the output after changes of some steps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from minitx.check.calling import Watch, tensors_of
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
            step, the name of a tensor of all attentions (``Site``), or "": the output of the model. The owner is the module, the ``Site``,
            or the ``Trace``.
    """

    id: str
    text: str
    outputs: Mapping[Any, Function]


@dataclass(eq=False)
class Step:
    """A tensor of the call.

    Attributes:
        path: the module whose code computes the tensor, or that calls the module which takes it.
        kind: "in" and "out" of a module, or the name of ATen's function.
        key: the module that takes the tensor, or the place of its module or function in all layers.
        value: (B, L, F): the tensor with all other axes as features.
        marks: (3, F): random sums over the tokens.
        args: the arguments of the function. inner: for the output of a module, its inputs.
    """

    path: str
    kind: str
    key: str
    value: Tensor
    marks: Tensor
    args: tuple
    inner: list[Step]


class Site(SimpleNamespace):
    """One attention, or the output of the model. Each tensor is the one after changes.

    Attributes:
        number: the place among all attentions. start: the number of steps before the product of queries and keys.
        query, key, value, merged: (B, H, L, D).
        raw: (B, H, L, L), the product of queries and keys. scores: the argument of the softmax. whole: the last scores without a
            hidden one. Of the model: the output of the last module, such as logits before a soft-cap, and the output.
    """


class Wide(TorchFunctionMode):
    """Keep the steps of a float64 model in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:  # copies are found by id, and a wide argument is freed: another may get its id
            return _widened(func(*args))
        func = torch.Tensor.double if getattr(func, "__name__", "") in ("float", "half", "bfloat16") else func
        return func(*map(_widened, args), **{key: _widened(value) for key, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in NARROW else value
    return value.double() if isinstance(value, Tensor) and value.dtype in NARROW else value


class Trace(Watch):
    """The steps of one call.

    Args:
        call: runs the model and returns its output (B, L, V).
        ids: the tokens (B, L). L should be no other size of the model.
    """

    def __init__(self, model: nn.Module, call: Callable[[], Tensor], ids: Tensor, changes: Sequence[Change] = ()) -> None:
        super().__init__()
        self.B, self.L = ids.shape
        self.changes, self.steps, self.sites = changes, list[Step](), list[Site]()
        self._stack, self._is_recording = [("", Counter[str](), list[Step]())], False
        generator = torch.Generator().manual_seed(0)
        self._sums = torch.randn(3, ids.numel(), generator=generator, dtype=torch.float64).to(ids.device)
        with ExitStack() as stack:
            for path, module in model.named_modules():
                if path:
                    self._watch(path, module, stack)
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # in products of matrices
            stack.enter_context(self)
            output = call()
        last = next((step.value for step in reversed(self.steps) if step.kind == "out" and step.path), output)
        self.head = Site(raw=last, scores=output)
        self.output: Tensor = self._changed("", self.head, (), output)
        self.head.scores = self.output
        self._record("", "out", "output", self.output)

    def _watch(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append((path, Counter(), self._record(self._stack[-1][0], "in", path, (args, kwargs))))

        def end(module: nn.Module, args: Any, out: Any) -> Any:
            first = next(tensors_of(out), None)
            changed = self._changed(module, module, args, first)
            out = out if changed is first else changed if first is out else type(out)([changed, *out[1:]])
            self._record(path, "out", pattern(path), out, args, self._stack.pop()[2])
            return out

        stack.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
        stack.enter_context(module.register_forward_hook(end))

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the output of a function of ATen after changes."""
        if self._is_recording:
            return func(*args, **kwargs)
        (path, counts, _), name = self._stack[-1], func.overloadpacket.__name__.strip("_")
        counts[name] += 1
        key, is_in_place = f"{pattern(path)} {name} {counts[name]}", func.overloadpacket.__name__.endswith("_")
        given = (args[0].clone(), *args[1:]) if is_in_place else args
        is_softmax = name in ("softmax", "safe_softmax") or (
            name == "exp" and self.sites and not hasattr(self.sites[-1], "scores")
        )
        if is_softmax and self.sites and args[0].numel() == self.sites[-1].raw.numel():
            args = self._attend("scores", args[0]), *args[1:]
        out = self._product(func, *args) if name == "bmm" else func(*args, **kwargs)
        changed = self._changed(key, self, given, out)
        out = args[0].copy_(changed) if is_in_place and changed is not out else changed
        self._record(path, name, key, out, given)
        if self.sites and getattr(out, "shape", None) == self.sites[-1].raw.shape and bool((out > LOW).all()):
            self.sites[-1].whole = out.clone()
        return out

    def _product(self, func: Any, left: Tensor, right: Tensor) -> Tensor:
        if left.shape[-2] == right.shape[-1] == self.L != left.shape[-1]:
            self.sites.append(Site(number=len(self.sites), start=len(self.steps)))
            query, key = self._attend("query", left), self._attend("key", right.mT)
            out, sizes = func(query, key.mT), [tensor.square().mean().sqrt() for tensor in (left, right)]
            scaled = query / sizes[0], key / sizes[1], out / sizes[0] / sizes[1]
            self._record(self._stack[-1][0], "raw", "", scaled)  # without scales before the product
            return self._attend("raw", out)
        if left.shape[-1] == right.shape[-2] == self.L and self.sites and not hasattr(self.sites[-1], "value"):
            return self._attend("merged", func(left, self._attend("value", right)))
        return func(left, right)

    def _attend(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the last attention, (B, ..., L, D) or (B · H, L, D), after changes."""
        heads = self._changed(name, self.sites[-1], (), tensor.reshape(self.B, -1, *tensor.shape[-2:]))
        setattr(self.sites[-1], name, heads.clone())  # the model may change the tensor in place
        return heads.reshape(tensor.shape)

    def _changed(self, key: Any, owner: Any, args: tuple, out: Any) -> Any:
        for function in [change.outputs[key] for change in self.changes if key in change.outputs]:
            before, out = out, function(owner, args, out)
            self._record(self._stack[-1][0], "changed", str(key), (before, out))  # the port may have both
        return out

    def _record(self, path: str, kind: str, key: str, result: Any, args: tuple = (), inner: Sequence[Step] = ()) -> list[Step]:
        self._is_recording, start = True, len(self.steps)
        for value in map(self.flat, tensors_of(result)):
            if value is not None and not torch.equal(value[0], value[-1]):  # positions and masks are
                numbers = value.flatten(0, 1).double()
                marks = self._sums @ numbers.where(numbers.abs() < -LOW, 0.0)  # hidden scores differ: -inf, -1e9
                self.steps.append(Step(path, kind, key, value, marks, args, list(inner)))
        self._is_recording = False
        return self.steps[start:]

    def flat(self, tensor: Tensor) -> Tensor | None:
        """Return (B, L, F) for a tensor of tokens in any layout, or None."""
        tensor, B, L = torch.view_as_real(tensor) if tensor.is_complex() else tensor, self.B, self.L
        tensor = tensor.transpose(0, 1) if tensor.shape[:2] == (L, B) else tensor
        if tensor.dim() < 2 or not tensor.numel() or not tensor.is_floating_point() or tensor.shape[0] % B:
            return None
        tensor = tensor.reshape(B, -1, *tensor.shape[1:])  # (B · H, L, D) and (B · L, F), too
        axis = next((axis for axis in range(1, tensor.dim()) if tensor.shape[axis] == L), None)
        return None if axis is None else tensor.movedim(axis, 1).flatten(2)


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
