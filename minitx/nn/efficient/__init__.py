"""Other kinds of attention than scaled dot-product attention.

Each class is a core of ``MultiHeadAttention``: ``MultiHeadAttention(E, H, core=LinearAttention())``. Linear attention, Performer and
Linformer cost less than L × S. ``approximation_error`` measures how far they are from exact attention. Additive attention costs more
and is an older baseline.

Sliding windows and block-sparse patterns are masks (``SlidingWindow``, ``BlockSparse``). The ``chunked`` backend skips the tiles that
they hide.
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
    """Build an attention core by its name in a config.

    Args:
        kind: ``additive``, ``linear``, ``performer`` or ``linformer``.
        head_dim: D.
        max_len: the longest sequence, for ``linformer``.
        num_features: m of ``performer``. None: D · ln D, rounded up.
        num_slots: k of ``linformer``, which needs it.

    Raises:
        ValueError: an unknown kind, a missing option, an option of another kind, or a number out of range.

    >>> build_core("performer", head_dim=4, max_len=8, num_features=32)
    PerformerAttention(4, num_features=32, orthogonal=True, chunk_size=64)
    """
    for name, given, taker in (("num_features", num_features, "performer"), ("num_slots", num_slots, "linformer")):
        if given is not None and kind != taker:
            raise ValueError(f"{name}={given} is an option of attention={taker!r} only, got attention={kind!r}")
    if kind == "additive":
        return AdditiveAttention(head_dim)
    if kind == "linear":
        return LinearAttention()
    if kind == "performer":
        return PerformerAttention(head_dim, num_features=num_features)
    if kind != "linformer":
        raise ValueError(f"attention={kind!r} must be one of {', '.join(CORE_KINDS)}")
    if num_slots is None:
        raise ValueError("attention='linformer' needs num_slots, got num_slots=None")
    return LinformerAttention(max_len, num_slots)
