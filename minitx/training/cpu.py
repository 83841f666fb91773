"""Training on a CPU: faster matrix products on processors of AMD, and memory that is kept for the next step."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

LARGE = 2**21
"""Products of at least so many multiplications go to oneDNN; the call of a smaller one costs more than it saves."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

_setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
_library = torch.library.Library("aten", "IMPL")
_active = False


@contextmanager
def onednn_products(wanted: bool = True) -> Iterator[bool]:
    """While this lasts, oneDNN computes large float32 matrix products on AMD processors with AVX-512. Yields whether it does.

    torch computes float32 products on a CPU with Intel's MKL, which uses only AVX2 on a processor of AMD. oneDNN, which is part of
    torch as well, uses AVX-512. It is about twice as fast on Zen 5, and a tenth faster on Zen 4, which computes 512 bits in two halves
    (``docs/dev/decisions.md`` has the figures). The results differ from MKL's by rounding. Nothing changes on other processors, for other types, after the block, or where
    ``torch.backends.mkldnn.matmul.fp32_precision`` was set.

    torch calls oneDNN for float32 products only while that setting is ``bf16``, which *allows* it to round to bfloat16. No processor
    without AMX does so; one product is compared with float64 before the first use. The setting holds for one product at a time,
    because attention on a CPU is slower under it.

    Args:
        wanted: False to use torch's own kernels while this lasts, inside a run, say.

    >>> with onednn_products() as faster:
    ...     product = torch.randn(128, 128) @ torch.randn(128, 128)
    """
    global _active
    before, _active = _active, wanted and _is_faster() and _setting.fp32_precision == "none"
    if _active:
        _replace_kernels()
    try:
        yield _active
    finally:
        _active = before


@cache
def keep_freed_memory() -> bool:
    """Let glibc keep up to 1 GiB of freed memory in this process, and return whether it will.

    By default glibc gives large blocks back to the system as soon as they are free. A training step frees and takes the same blocks
    again, and the system has to clear each page of them: a sixth of a small model's step. Blocks of 32 MiB and more are given
    back as before. Nothing changes where the C library is another one. ``man 3 mallopt`` describes both settings.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_TRIM_THRESHOLD, 2**30) and mallopt(_M_MMAP_THRESHOLD, 2**25))


@cache
def _is_faster() -> bool:
    """Whether MKL is slow on this processor, and oneDNN is as exact."""
    cpuinfo = Path("/proc/cpuinfo")
    is_amd = cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text(errors="replace")
    has_parts = torch.backends.mkldnn.is_available() and hasattr(torch.library, "get_kernel")
    return is_amd and has_parts and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_exact()


def _is_exact() -> bool:
    """Whether oneDNN keeps float32 where it is allowed to use bfloat16."""
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


@cache
def _replace_kernels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
        for name, first in {"mm": 0, "mm.out": 0, "addmm": 1, "addmm.out": 1}.items():
            _replace_kernel(name, first)


def _replace_kernel(name: str, first: int) -> None:
    """Put a function around torch's kernel, the factors of which are the arguments ``first`` and ``first + 1``."""
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

    _library.impl(name, product, "CPU", with_keyset=True)
