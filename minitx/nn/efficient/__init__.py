"""Attention by other mathematics than scaled dot products; each core says what it cannot do.

Every module here is a core: ``MultiHeadAttention(E, H, core=LinearAttention())``. Linear attention, Performer and Linformer cost less
than L × S; additive attention costs more and is the older baseline. ``approximation_error`` says how far it is from
exact attention. Windows and block-sparse patterns are exact attention under a mask (``SlidingWindow``, ``BlockSparse``), of which the
``chunked`` backend computes only the tiles that are not empty.
"""

from __future__ import annotations

from minitx.nn.efficient.additive import AdditiveAttention
from minitx.nn.efficient.base import EfficientAttention, approximation_error
from minitx.nn.efficient.kernelised import LinearAttention, PerformerAttention
from minitx.nn.efficient.linformer import LinformerAttention

__all__ = [
    "CORE_KINDS",
    "AdditiveAttention",
    "EfficientAttention",
    "LinearAttention",
    "LinformerAttention",
    "PerformerAttention",
    "approximation_error",
    "build_core",
]

CORE_KINDS = ("additive", "linear", "performer", "linformer")


def build_core(
    kind: str, *, head_dim: int, max_len: int, num_features: int | None = None, num_slots: int | None = None
) -> AdditiveAttention | EfficientAttention:
    """The core of that kind, as a config names it.

    Args:
        kind: one of ``CORE_KINDS``.
        head_dim: D. max_len: the longest sequence.
        num_features: of ``performer``; None: its default. num_slots: of ``linformer``, which needs it.

    Raises:
        ValueError: another kind; an option that the kind needs and lacks, or does not take; numbers out of range.

    >>> build_core("performer", head_dim=4, max_len=8, num_features=32)
    PerformerAttention(4, num_features=32, orthogonal=True, chunk_size=64)
    """
    for name, given, taker in (("num_features", num_features, "performer"), ("num_slots", num_slots, "linformer")):
        if given is not None and kind != taker:
            raise ValueError(f"attention={kind!r} does not take {name}, got {name}={given}")
    if kind == "additive":
        return AdditiveAttention(head_dim)
    if kind == "linear":
        return LinearAttention()
    if kind == "performer":
        return PerformerAttention(head_dim, num_features=num_features)
    if kind != "linformer":
        raise ValueError(f"attention={kind!r} is not known; one of {', '.join(CORE_KINDS)}")
    if num_slots is None:
        raise ValueError("attention='linformer' needs num_slots, got num_slots=None")
    return LinformerAttention(max_len, num_slots)
