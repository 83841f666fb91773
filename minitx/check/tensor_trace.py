"""Trace one call of a model: every tensor of it, the attention inside it, and what it computes if steps are changed."""

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
CASTS = {"float", "half", "bfloat16"}


def pattern(path: str) -> str:
    """Return the path of a module without the number of its layer."""
    return re.sub(r"\d+", "*", path, count=1)


@dataclass
class Change:
    """A change of a model.

    Attributes:
        steps: functions of (the arguments, the output) that return another output, by the ``key`` of a step.
        modules: functions of (the arguments, the output) that return another output, by module.
        inputs: functions of the arguments that return others, by module.
        tensors: other values, by parameter.
        query_key, scores, value, merged: functions of (number, site, tensors) that return other tensors of an attention.
        output: a function of the output of the model.
    """

    id: str
    text: str
    steps: Mapping[str, Callable[[tuple, Any], Any]] = field(default_factory=dict)
    modules: Mapping[nn.Module, Callable[[tuple, Any], Any]] = field(default_factory=dict)
    inputs: Mapping[nn.Module, Callable[[tuple], tuple]] = field(default_factory=dict)
    tensors: Mapping[Tensor, Tensor] = field(default_factory=dict)
    query_key: Callable[[int, Site, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    scores: Callable[[int, Site, Tensor], Tensor] | None = None
    value: Callable[[int, Site, Tensor], Tensor] | None = None
    merged: Callable[[int, Site, Tensor], Tensor] | None = None
    output: Callable[[Tensor], Tensor] | None = None


@dataclass(eq=False)
class Step:
    """A tensor of the call.

    Attributes:
        path: the module whose code computes the tensor, or that calls the module which takes it.
        kind: "in" and "out" of a module, or the name of torch's function.
        key: the module, or the place of the function in all layers.
        value: (B, L, F): the tensor with all other axes as features.
        marks: (3, F): three random sums over the tokens of each feature.
        args: the arguments of the function or module.
    """

    path: str
    kind: str
    key: str
    value: Tensor
    marks: Tensor
    args: tuple

    @property
    def is_module(self) -> bool:
        return self.kind in ("in", "out")


@dataclass(eq=False)
class Site:
    """One attention: query (B, H, L, D), key and value (B, H, L, D), scores and weights (B, H, L, L).

    Attributes:
        start: the number of steps before the product of queries and keys.
        chain: (name, argument, result) of the functions from the product to the softmax.
    """

    path: str
    start: int
    query: Tensor
    key: Tensor
    shape: torch.Size
    chain: list[tuple[str, Any, Tensor]] = field(default_factory=list)
    scores: Tensor | None = None
    weights: Tensor | None = None
    value: Tensor | None = None

    @property
    def visible(self) -> Tensor:
        """Return which keys have a weight in any head and row, bool (L, L)."""
        assert self.weights is not None
        return (self.weights > 0).flatten(0, -3).any(0)

    @property
    def unmasked(self) -> Tensor:
        """Return the scores before keys are hidden."""
        assert self.scores is not None
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
                cap = float((self.unmasked / result).median())
                return argument * cap, cap
        return self.unmasked, torch.inf


class Wide(TorchFunctionMode):
    """Compute in float64 what a float64 model computes in lower precision."""

    def __enter__(self) -> Wide:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in CASTS:
            func = torch.Tensor.double
        return func(*map(_widened, args), **{key: _widened(value) for key, value in (kwargs or {}).items()})


class Trace(TorchFunctionMode):
    """The steps of one call.

    Args:
        call: runs the model and returns its output (B, L, V).
        ids: the tokens (B, L). L should be no other size of the model.
        changes: changes of the model for this call.
    """

    def __init__(self, model: nn.Module, call: Callable[[], Tensor], ids: Tensor, changes: Sequence[Change] = ()) -> None:
        super().__init__()
        self.B, self.L = ids.shape
        self.changes = changes
        self.steps: list[Step] = []
        self.sites: list[Site] = []
        self._paths, self._counts = [""], [0]
        generator = torch.Generator().manual_seed(0)
        self._sums = torch.randn(3, ids.numel(), generator=generator, dtype=torch.float64).to(ids.device)
        with ExitStack() as stack:
            for change in changes:
                self._begin(change, stack)
            for path, module in model.named_modules():
                self._watch(path, module, stack)
            with self:
                output = call()
        for change in changes:
            output = change.output(output) if change.output else output
        self.output = output
        self._record("", "out", "output", output, (output,))

    def _begin(self, change: Change, stack: ExitStack) -> None:
        for parameter, value in change.tensors.items():
            stack.callback(parameter.data.copy_, parameter.data.clone())
            parameter.data.copy_(value)
        for module, function in change.modules.items():
            stack.enter_context(
                module.register_forward_hook(lambda m, args, out, f=function: _like(out, f(args, _first(out))))  # type: ignore[misc]
            )
        for module, new in change.inputs.items():
            stack.enter_context(module.register_forward_pre_hook(lambda m, args, f=new: f(args)))  # type: ignore[misc]

    def _watch(self, path: str, module: nn.Module, stack: ExitStack) -> None:
        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._paths.append(path)
            self._counts.append(0)
            for tensor in _tensors((args, list(kwargs.values()))):
                self._record(self._paths[-2], "in", path, tensor, ())

        def end(module: nn.Module, args: Any, out: Any) -> None:
            del self._paths[-1], self._counts[-1]
            for tensor in _tensors(out):
                self._record(path, "out", path, tensor, args)

        if path:
            stack.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(end))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in ("scaled_dot_product_attention", "einsum"):
            with self:  # as products of matrices
                out = _attention(*args, **kwargs) if name != "einsum" else _einsum(*args)
            if out is not None:
                return out
        self._counts[-1] += 1
        path, key = self._paths[-1], f"{pattern(self._paths[-1])} {name} {self._counts[-1]}"
        replaced = [change.steps[key] for change in self.changes if key in change.steps]
        if name in ("matmul", "__matmul__", "bmm") and args[0].dim() > 2 and args[1].shape[:-2] == args[0].shape[:-2]:
            out = self._product(path, func, args[0], args[1])
        elif name == "softmax" and args[0].shape[-2:] == (self.L, self.L) and self.sites:
            out = self._softmax(func, args, kwargs)
        elif replaced:
            out = replaced[-1](args, func(args[0].clone(), *args[1:], **kwargs))
        else:
            out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._record(path, name, key, tensor, tuple(args))
            if self.sites and self.sites[-1].weights is None and tensor.shape == self.sites[-1].shape:
                self.sites[-1].chain.append((name, args[0], tensor))
        return out

    def _product(self, path: str, func: Any, left: Tensor, right: Tensor) -> Tensor:
        L = self.L
        if left.shape[-2] == L != left.shape[-1] and right.shape[-1] == L:
            site = Site(path, len(self.steps), self._heads(left), self._heads(right.mT), left.shape[:-1] + right.shape[-1:])
            query, key, number = site.query, site.key, len(self.sites)
            for change in self.changes:
                query, key = change.query_key(number, site, query, key) if change.query_key else (query, key)
            self.sites.append(site)
            return func(query.reshape(left.shape), key.reshape(right.mT.shape).mT)
        if left.shape[-2:] == (L, L) and right.shape[-2] == L and self.sites and self.sites[-1].value is None:
            site, number = self.sites[-1], len(self.sites) - 1
            site.value = value = self._heads(right)
            for change in self.changes:
                value = change.value(number, site, value) if change.value else value
            out = func(left, value.reshape(right.shape))
            for change in self.changes:
                out = change.merged(number, site, self._heads(out)).reshape(out.shape) if change.merged else out
            return out
        return func(left, right)

    def _softmax(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        site, number = self.sites[-1], len(self.sites) - 1
        site.scores = scores = args[0]
        for change in self.changes:
            scores = change.scores(number, site, scores) if change.scores else scores
        site.weights = func(scores, *args[1:], **kwargs)
        return site.weights

    def _heads(self, tensor: Tensor) -> Tensor:
        """Return (B, H, L, D) for (B, ..., L, D) or (B · H, L, D)."""
        return tensor.reshape(self.B, -1, *tensor.shape[-2:])

    def _record(self, path: str, kind: str, key: str, tensor: Tensor, args: tuple) -> None:
        value = self._flat(tensor)
        if value is None or not value.numel() or torch.equal(value[0], value[-1]):
            return  # the same for all tokens: positions, masks
        marks = self._sums @ value.flatten(0, 1).double().nan_to_num(0.0, -LOW, LOW).clamp(LOW, -LOW)
        self.steps.append(Step(path, kind, key, value, marks, args))

    def _flat(self, tensor: Tensor) -> Tensor | None:
        """Return (B, L, F), or None."""
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        B, L, shape = self.B, self.L, tensor.shape
        if not tensor.is_floating_point() or tensor.dim() < 2:
            return None
        if shape[0] == B * L:
            return tensor.reshape(B, L, -1)
        if shape[0] == L and shape[1] == B and tensor.dim() > 2:
            return tensor.transpose(0, 1).flatten(2)
        if shape[0] != B:
            is_split = tensor.dim() == 3 and shape[1] == L and shape[0] % B == 0  # (B · H, L, D)
            return tensor.reshape(B, -1, L, shape[2]).transpose(1, 2).flatten(2) if is_split else None
        axis = next((axis for axis in range(1, tensor.dim()) if shape[axis] == L), None)
        return None if axis is None or tensor.dim() < 3 else tensor.movedim(axis, 1).flatten(2)


def matched(steps: Sequence[Step], among: Sequence[Step], tolerance: float | None = None) -> Tensor:
    """Return for each step whether each of its features is a feature of the others to rounding, in any order and layout."""
    device = steps[0].marks.device
    pool, wanted = torch.cat([s.marks for s in among], 1), torch.cat([s.marks for s in steps], 1)
    pool = pool[:, pool[0].argsort()].contiguous()
    owner = torch.repeat_interleave(torch.tensor([s.marks.shape[1] for s in steps], device=device))
    sizes = torch.stack([s.marks.abs().max() for s in steps])
    allowed = ((16 * unit(torch.float32) if tolerance is None else tolerance) * sizes)[owner]
    place, is_there = torch.searchsorted(pool[0], wanted[0]), torch.zeros_like(allowed, dtype=torch.bool)
    for offset in range(-4, 4):
        near = pool[:, (place + offset).clamp(0, pool.shape[1] - 1)]
        is_there |= (near - wanted).abs().amax(0) <= allowed
    return torch.zeros(len(steps), device=device).index_add_(0, owner, (~is_there).float()) == 0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)


def _first(value: Any) -> Any:
    return next(_tensors(value), value)


def _like(value: Any, tensor: Tensor) -> Any:
    """Return the result of a module with another tensor in the first place."""
    return tensor if isinstance(value, Tensor) else type(value)([tensor, *value[1:]])


def _widened(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in NARROW else value
    return value.double() if isinstance(value, Tensor) and value.dtype in NARROW else value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` in steps."""
    if key.dim() > 3 and key.shape[-3] != query.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = torch.matmul(query, key.mT) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = torch.where(attn_mask, scores, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.matmul(torch.softmax(scores, -1).nan_to_num(), value)


def _einsum(equation: Any, *operands: Any) -> Tensor | None:
    """Compute a product of two tensors by ``matmul`` if each side has one axis of its own, else return None."""
    if not isinstance(equation, str) or len(operands) != 2 or "->" not in equation or "." in equation:
        return None
    left, right, out = re.split(",|->", equation.replace(" ", ""))
    batch = [axis for axis in out if axis in left and axis in right]
    rows, columns = ([axis for axis in out if axis in a and axis not in b] for a, b in ((left, right), (right, left)))
    sums = [axis for axis in left if axis in right and axis not in out]
    if not (len(rows) == len(columns) == len(sums) == 1) or len(left) != len(batch) + 2 or len(right) != len(batch) + 2:
        return None
    a = operands[0].permute([left.index(axis) for axis in batch + rows + sums])
    b = operands[1].permute([right.index(axis) for axis in batch + sums + columns])
    order = batch + rows + columns
    return torch.matmul(a, b).permute([order.index(axis) for axis in out])
