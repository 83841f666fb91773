"""Trace one call of a model: tensors, attention, and the output after changes of some steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
        outputs: functions of (arguments, output) that return another output, by module or by the key of a step; "": of the model.
        inputs: functions of the positional arguments that return others, by module.
        tensors: other values, by parameter. attributes: other values, by module and name.
        attention: functions of (site, tensor) that return another query, key, value, scores or merged.
    """

    id: str
    text: str
    outputs: Mapping[Any, Function] = field(default_factory=dict)
    inputs: Mapping[nn.Module, Function] = field(default_factory=dict)
    tensors: Mapping[Any, Tensor] = field(default_factory=dict)
    attributes: Mapping[tuple[nn.Module, str], Any] = field(default_factory=dict)
    attention: Mapping[str, Function] = field(default_factory=dict)


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
    """One attention: query, key and value (B, H, L, D), scores and weights (B, H, L, L).

    Attributes:
        start: the number of steps before the product of queries and keys.
        chain: (name, argument, result) of the functions from the product to the softmax.
    """

    number: int
    path: str
    start: int
    query: Tensor
    key: Tensor
    shape: torch.Size
    chain: list[tuple[str, Any, Tensor]] = field(default_factory=list)
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: Tensor | None = None
    value: Tensor | None = None

    @property
    def visible(self) -> Tensor:
        """Return which keys have a weight in any head and row, bool (L, L)."""
        return (self.scores > LOW).flatten(0, -3).any(0)

    @property
    def unmasked(self) -> Tensor:
        """Return the scores before keys are hidden."""
        seen = self.scores > LOW
        for _, _, tensor in reversed(self.chain):
            if (tensor > LOW).all() and torch.allclose(tensor[seen], self.scores[seen], rtol=1e-6):
                return tensor
        raise ValueError("the scores before the mask are not known")

    @property
    def uncapped(self) -> tuple[Tensor, float]:
        """Return the scores before keys are hidden and capped, and the cap."""
        for name, argument, result in self.chain:
            if name == "tanh":
                cap = float((self.unmasked / result).nanmedian())
                return argument * cap, cap
        return self.unmasked, torch.inf


class Wide(TorchFunctionMode):
    """Keep the steps of a float64 model in float64."""

    def __enter__(self) -> Wide:
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.default)

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
        self._paths, self._counts, self._is_recording = [""], [0], False
        generator = torch.Generator().manual_seed(0)
        self._sums = torch.randn(3, ids.numel(), generator=generator, dtype=torch.float64).to(ids.device)
        with ExitStack() as stack:
            for change in changes:
                for parameter, value in [(parameter, value.clone()) for parameter, value in change.tensors.items()]:
                    stack.callback(parameter.data.copy_, parameter.data.clone())
                    parameter.data.copy_(value)
                for (module, name), value in change.attributes.items():
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, value)
                for module, function in change.outputs.items():
                    if isinstance(module, nn.Module):
                        stack.enter_context(module.register_forward_hook(_output_hook(function)))
                for module, function in change.inputs.items():
                    stack.enter_context(module.register_forward_pre_hook(lambda module, args, f=function: f(args)))  # type: ignore[misc]
            for path, module in model.named_modules():
                self._watch(path, module, stack)
            with self:
                self.output = call()
        for change in changes:
            self.output = change.outputs[""]((), self.output) if "" in change.outputs else self.output
        self._record("", "out", "output", self.output, ())

    def _watch(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._paths.append(path)
            self._counts.append(0)
            self._record(self._paths[-2], "in", path, (args, kwargs), ())

        def end(module: nn.Module, args: Any, out: Any) -> None:
            del self._paths[-1], self._counts[-1]
            self._record(path, "out", path, out, args)

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
        self._counts[-1] += 1
        path = self._paths[-1]
        key, start = f"{pattern(path)} {name} {self._counts[-1]}", len(self.steps)
        replaced = [change.outputs[key] for change in self.changes if key in change.outputs]
        before = args[0].clone() if replaced and isinstance(args[0], Tensor) else None  # a function may change it in place
        if name in ("matmul", "__matmul__", "bmm") and args[0].dim() == args[1].dim() > 2 and args[0].shape[-2] == L:
            out = self._product(path, start, func, *args[:2])
        elif name == "softmax" and self.sites and args[0].shape == self.sites[-1].shape:
            site = self.sites[-1]
            site.scores = args[0]
            for change in self.changes:
                if "scores" in change.attention:
                    site.scores = change.attention["scores"](site, site.scores)
                    self._record(path, name, key, (site.scores, site.chain[-1][2]), ())
            site.weights = out = func(site.scores, *args[1:], **kwargs)
        else:
            out = func(*args, **kwargs)
        for function in replaced:
            out = function((before, *args[1:]), out)
        self._record(path, name, key, out, tuple(args))
        if self.sites and self.sites[-1].weights is None and getattr(out, "shape", None) == self.sites[-1].shape:
            self.sites[-1].chain.append((name, args[0], out))
        return out

    def _product(self, path: str, start: int, func: Any, left: Tensor, right: Tensor) -> Tensor:
        if right.shape[-1] == self.L != left.shape[-1]:
            query, key = self._heads(left), self._heads(right.mT)
            self.sites.append(Site(len(self.sites), path, start, query, key, left.shape[:-1] + right.shape[-1:]))
            query, key = self._changed("query", query), self._changed("key", key)
            return func(query.reshape(left.shape), key.reshape(right.mT.shape).mT)
        if left.shape[-1] == right.shape[-2] == self.L and self.sites and self.sites[-1].value is None:
            self.sites[-1].value = value = self._heads(right)
            out = func(left, self._changed("value", value).reshape(right.shape))
            return self._changed("merged", self._heads(out)).reshape(out.shape)
        return func(left, right)

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        for function in [change.attention[name] for change in self.changes if name in change.attention]:
            tensor = function(self.sites[-1], tensor)
            self._record(self.sites[-1].path, name, name, tensor, ())
        return tensor

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
        shape = tensor.shape
        if shape[0] == B * L:
            return tensor.reshape(B, L, -1)
        if shape[:2] == (L, B):
            return tensor.transpose(0, 1).flatten(2) if tensor.dim() > 2 else None
        if shape[0] != B and tensor.dim() == 3 and shape[1] == L and shape[0] % B == 0:  # (B · H, L, D)
            tensor = tensor.reshape(B, -1, L, shape[2])
        axis = next((axis for axis in range(1, tensor.dim()) if tensor.shape[axis] == L), None)
        return None if axis is None or tensor.dim() < 3 or tensor.shape[0] != B else tensor.movedim(axis, 1).flatten(2)


def _output_hook(function: Function) -> Function:
    def hook(module: nn.Module, args: tuple, out: Any) -> Any:
        return function(args, out) if isinstance(out, Tensor) else type(out)([function(args, out[0]), *out[1:]])

    return hook


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
    elif isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
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
