"""Counts what a computation costs: operations and bytes, never seconds.

Operations are those of matrix products, two for each multiplication with its addition; softmax, norms, activations and
other elementwise work count nothing, and neither does an embedding look-up. The shapes of every product that runs are
read, inside our own operators too (the tiles of ``chunked``, the rows of each expert). torch's fused attention is opaque:
it counts as torch's own formula has it, all L × S scores forward and five products of that size (one of them again)
backward, whatever a kernel skips under a causal mask.

Bytes are those of tensors: everything that an operation allocates, until nothing refers to it. ``allocations`` asks
torch's allocator instead, which also sees what a kernel needs for itself.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten, _KEYS = torch.ops.aten, torch._C.DispatchKey
# torch hides these from whatever a dispatch mode calls, but the backward pass of ``chunked`` asks torch.func for a bias
_TORCH_FUNC = (_KEYS.FuncTorchDynamicLayerFrontMode, _KEYS.FuncTorchDynamicLayerBackMode, _KEYS.FuncTorchGradWrapper)
_FORMULAS = {  # torch has none for the CPU's fused attention: that of its CUDA twin, which takes the same tensors first
    **flop_registry,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


class Meter(TorchDispatchMode):
    """A context that counts; the module's docstring says what.

    Attributes:
        flops: operations of matrix products.
        cells: elements written by all kernels. largest: elements of the largest tensor.
        live, peak: bytes alive now, and the most that were at once; what was there before the context is not counted.
        flops_of, live_of: ``flops`` and ``live`` by module, of a model that is watched.

    >>> with Meter() as meter:
    ...     out = torch.ones(3, 5) @ torch.ones(5, 7)
    >>> meter.flops, meter.live  # 2 · 3 · 5 · 7 operations; of 15, 35 and 21 numbers the 21 are still needed
    (210, 84)
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.cells = self.peak = self.live = self.largest = 0
        self.flops_of: Counter[str] = Counter()
        self.live_of: Counter[str] = Counter()
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._running: list[str] = []  # names of the modules whose forward runs, innermost last
        self._backward = ""  # the module that made the autograd node which runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is None:
            with self:
                out = self._opened(func, args, kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=out)
            self.flops += flops
            self.flops_of[self._module] += flops
        self._remember(out, (args, kwargs))
        return out

    def _opened(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func`` by the operations that it consists of, or NotImplemented where it is one by itself."""
        if func.namespace != "minitx":
            return func.decompose(*args, **kwargs)
        hidden = torch._C._dispatch_tls_local_exclude_set()
        for key in _TORCH_FUNC:
            hidden = hidden.remove(key)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden):
            return func._op_dk(_KEYS.CompositeExplicitAutograd, *args, **kwargs)

    def _remember(self, out: Any, given: Any) -> None:
        old = {leaf.untyped_storage() for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor) or leaf.untyped_storage() in old:  # a view, or in place
                continue
            storage, module = leaf.untyped_storage(), self._module
            self.cells += leaf.numel()
            self.largest = max(self.largest, leaf.numel())
            if storage not in self._known:
                self._known.add(storage)
                self._count(module, storage.nbytes())
                weakref.finalize(storage, self._count, module, -storage.nbytes())
        self.peak = max(self.peak, self.live)

    def _count(self, module: str, nbytes: int) -> None:
        self.live += nbytes
        self.live_of[module] += nbytes

    @property
    def _module(self) -> str:
        return self._running[-1] if self._running else self._backward

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Attribute what runs to the modules of ``model``, by their names ("" is the model's own forward, and the rest).

        In the backward pass an operation belongs to the module whose forward made the node that runs.
        """
        with ExitStack() as hooks:
            for name, module in model.named_modules():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
            yield

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._claim((args, kwargs))
        self._running.append(name)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._claim(out)
        self._running.pop()

    def _claim(self, tree: Any) -> None:
        """The nodes behind these tensors that no module has yet are those of the module that runs."""
        found: list[Any] = [leaf.grad_fn for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        while found:
            node = found.pop()
            if node is not None and "minitx.module" not in node.metadata:
                node.metadata["minitx.module"] = self._module
                node.register_prehook(partial(self._resume, self._module))
                found += [earlier for earlier, _ in node.next_functions]

    def _resume(self, module: str, grads: Any) -> None:
        self._backward = module


def measure(run: Callable[[], Any]) -> dict[str, int]:
    """The cost of ``run()``: ``flops`` of matrix products, ``cells`` written, ``peak`` bytes, ``largest`` tensor (elements).

    >>> measure(lambda: torch.ones(2, 3) @ torch.ones(3, 5))["flops"]
    60
    """
    with Meter() as meter:
        run()
    return {name: getattr(meter, name) for name in ("flops", "cells", "peak", "largest")}


def allocations(run: Callable[[], Any]) -> tuple[int, int]:
    """(largest single allocation, most bytes allocated at once) of ``run()`` on the CPU, inside kernels too.

    From the events of torch's profiler; memory that was there before does not count.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(sizes, default=0), max(itertools.accumulate(sizes), default=0)


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The p of cost ∝ sizeᵖ: the least-squares slope of ln cost over ln size. 1 is linear, 2 quadratic.

    Raises:
        ValueError: not two sizes at least, another number of costs, or a number that has no logarithm.

    >>> round(fit_exponent((1, 10, 100), (3, 300, 30000)), 12)
    2.0
    """
    if len(sizes) != len(costs) or len(set(sizes)) < 2:
        raise ValueError(f"sizes and costs must be as many, of two sizes at least, got {list(sizes)} and {list(costs)}")
    if min(*sizes, *costs) <= 0:
        raise ValueError(f"sizes and costs must be positive, got {list(sizes)} and {list(costs)}")
    x, y = ([math.log(number) for number in numbers] for numbers in (sizes, costs))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)
