"""Matrix products of AMD processors by oneDNN.

torch's kernels belong to the whole process, and so does the state of this file: whether a context is active, and the functions around
torch's kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

LARGE = 2**21
"""Products with at least this number of multiplications use oneDNN. For smaller products, the overhead exceeds the gain."""

_setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]

_active = False

_library: torch.library.Library | None = None
"""The functions around torch's kernels, while there are any. Each costs a small product 2 µs."""


@contextmanager
def onednn_products(enabled: bool = True) -> Iterator[bool]:
    """A context that lets oneDNN compute large float32 matrix products on AMD processors with AVX-512. Yields whether it does.

    On a CPU, torch computes float32 products with Intel's MKL. On AMD processors, MKL uses only AVX2. oneDNN is also part of
    torch, and uses AVX-512. It is about twice as fast on Zen 5, and a tenth faster on Zen 4 (``docs/dev/decisions.md`` has the
    numbers). The results differ from MKL's by rounding. On other processors, for other dtypes, or if
    ``torch.backends.mkldnn.matmul.fp32_precision`` is set, this context has no effect.

    torch calls oneDNN for float32 products only if this setting is ``bf16``. This *allows* rounding to bfloat16. Processors
    without AMX do not round; one product is compared with float64 before the first use. The setting is changed for one product
    at a time, because it slows down attention on a CPU.

    Args:
        enabled: whether to use oneDNN. False restores torch's own kernels within another such context.

    >>> with onednn_products() as faster:
    ...     product = torch.randn(128, 128) @ torch.randn(128, 128)
    """
    global _active, _library
    before, _active = _active, enabled and _is_faster() and _setting.fp32_precision == "none"
    replaces = _active and _library is None
    if replaces:
        _library = _replaced_kernels()
    try:
        yield _active
    finally:
        _active = before
        if replaces:
            _library = None  # the last reference: torch's own kernels are back


@cache
def _is_faster() -> bool:
    """Whether MKL is slow on this processor, and oneDNN is equally accurate."""
    cpuinfo = Path("/proc/cpuinfo")
    is_amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(errors="replace")
    has_parts = torch.backends.mkldnn.is_available() and hasattr(torch.library, "get_kernel")
    return is_amd and has_parts and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_exact()


def _is_exact() -> bool:
    """Whether oneDNN computes in float32 even if it is allowed to use bfloat16."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(128, 128, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    error = (left @ right - exact).abs().max()
    with _onednn():
        return bool((left @ right - exact).abs().max() <= 4 * error)


@contextmanager
def _onednn() -> Iterator[None]:
    _setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        _setting.fp32_precision = "none"


def _replaced_kernels() -> torch.library.Library:
    """Replace torch's kernels for as long as the result is referred to."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that a kernel is replaced
        for name, first in {"mm": 0, "mm.out": 0, "addmm": 1, "addmm.out": 1}.items():
            _replace_kernel(library, name, first)
    return library


def _replace_kernel(library: torch.library.Library, name: str, first: int) -> None:
    """Wrap a kernel of torch. ``first`` and ``first + 1`` are the indices of the two factors among its arguments."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: Any, *args: Any, **options: Any) -> Any:
        left, right = args[first], args[first + 1]
        rows = left.shape[0]
        if not _active or left.dtype is not torch.float32 or rows == 1 or rows * left.shape[1] * right.shape[1] < LARGE:
            return kernel.call_boxed(keys, *args, **options)
        _setting.fp32_precision = "bf16"
        try:
            return kernel.call_boxed(keys, *args, **options)
        finally:
            _setting.fp32_precision = "none"

    library.impl(name, product, "CPU", with_keyset=True)
