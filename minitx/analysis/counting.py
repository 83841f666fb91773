"""Count the operations and the bytes of a computation.

**Operations** are counted by torch's ``FlopCounterMode``: matrix products, two operations for each multiplication with its
addition. Softmax, norms, activations and look-ups count nothing. ``flop_counter`` also counts the CPU's fused attention
(all L × S scores, hidden or not), which torch does not count. **Bytes** are the most that torch's allocator gave out at any time, as
torch's profiler reports them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula


@cache
def _register_formulas() -> None:
    """Tell torch's counter about the CPU's fused attention, which it does not know."""

    def fused(query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> int:
        B, H, L, D = query.shape
        return 2 * B * H * L * value.shape[2] * (D + value.shape[3])

    def fused_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> int:
        B, H, L, D = query.shape
        return 2 * B * H * L * value.shape[2] * (3 * D + 2 * value.shape[3])  # QKᵀ again, dP and dV, dQ and dK

    formulas = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: fused_backward,
    }
    for operator, formula in formulas.items():
        if operator not in flop_registry:
            register_flop_formula(operator, get_raw=True)(formula)  # type: ignore[arg-type]


def flop_counter() -> FlopCounterMode:
    """Return a ``FlopCounterMode`` that also counts the CPU's fused attention.

    >>> with flop_counter() as counter:
    ...     out = torch.ones(3, 5) @ torch.ones(5, 7)
    >>> counter.get_total_flops()
    210
    """
    _register_formulas()
    return FlopCounterMode(display=False)


def count_flops(run: Callable[[], Any]) -> int:
    """Return the number of operations of the matrix products in ``run()``.

    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
    60
    """
    with flop_counter() as counter:
        run()
    return counter.get_total_flops()


def allocations(run: Callable[[], Any]) -> tuple[int, int]:
    """Return (largest single allocation, peak of allocated bytes) of ``run()`` on the CPU, including memory inside kernels.

    They come from the memory events of ``torch.profiler``. Memory that was allocated before does not count.

    >>> allocations(lambda: torch.ones(10) + torch.ones(10))
    (40, 120)
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    sizes = [event["args"]["Bytes"] for event in memory]
    return max(sizes, default=0), max(itertools.accumulate(sizes), default=0)


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return p in cost ∝ sizeᵖ: the least-squares slope of ln cost over ln size. 1 is linear, 2 is quadratic.

    Raises:
        ValueError: fewer than two different sizes, a different number of costs, or a number that is not positive.

    >>> round(fit_exponent((1, 10, 100), (3, 300, 30000)), 12)
    2.0
    """
    if len(sizes) != len(costs) or len(set(sizes)) < 2 or min(*sizes, *costs) <= 0:
        raise ValueError(f"sizes and costs must be positive, as many, two sizes at least; got {list(sizes)} and {list(costs)}")
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])
