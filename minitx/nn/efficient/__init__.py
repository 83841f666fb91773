"""Attention that costs less than L × S: other mathematics, or the same on fewer cells; each says what it cannot do.

Every module here is a core: ``MultiHeadAttention(E, H, core=LinearAttention())``. ``SlidingWindowAttention`` and
``BlockSparseAttention`` are exact on what they compute; ``LinearAttention``, ``PerformerAttention`` and
``LinformerAttention`` compute something else, and ``approximation_error`` says how far it is from exact attention.
``build_core`` makes any of them from a word and numbers, as a config has them.
"""

from __future__ import annotations

from collections.abc import Callable

from minitx.nn.efficient.base import EfficientAttention, approximation_error
from minitx.nn.efficient.kernelised import LinearAttention, PerformerAttention
from minitx.nn.efficient.linformer import LinformerAttention
from minitx.nn.efficient.sparse import BlockSparseAttention, SlidingWindowAttention

__all__ = [
    "CORE_KINDS",
    "BlockSparseAttention",
    "EfficientAttention",
    "LinearAttention",
    "LinformerAttention",
    "PerformerAttention",
    "SlidingWindowAttention",
    "approximation_error",
    "build_core",
]

# kind: (what makes it, the options that it needs, the options that it takes)
_CORES: dict[str, tuple[Callable[..., EfficientAttention], tuple[str, ...], tuple[str, ...]]] = {
    "sliding_window": (SlidingWindowAttention, ("window",), ("block_size",)),
    "block_sparse": (BlockSparseAttention, (), ("block_size",)),
    "linear": (LinearAttention, (), ()),
    "performer": (PerformerAttention, ("head_dim",), ("num_features",)),
    "linformer": (LinformerAttention, ("max_len", "num_slots"), ()),
}
CORE_KINDS = tuple(_CORES)


def build_core(
    kind: str,
    *,
    head_dim: int | None = None,
    max_len: int | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    num_features: int | None = None,
    num_slots: int | None = None,
    block_size: int | None = None,
) -> EfficientAttention:
    """The core of that kind; None leaves an option to the core's own default.

    Args:
        kind: one of ``CORE_KINDS``.
        head_dim, max_len: facts of the model, which every kind may be told: D (needed by ``performer``) and the longest
            sequence (needed by ``linformer``).
        window: keys that a query sees, its own included; ``sliding_window`` needs it, and no other kind takes it: there
            a window is a mask.
        dropout, softcap: as in the core, which refuses them where its mathematics has no place for them.
        num_features: of ``performer``. num_slots: of ``linformer``, which needs it.
        block_size: of ``sliding_window`` and ``block_sparse``.

    Raises:
        ValueError: another kind; an option that the kind needs and lacks, or does not take; numbers out of range.

    >>> build_core("performer", head_dim=4, num_features=32)
    PerformerAttention(4, num_features=32, orthogonal=True, chunk_size=64)
    """
    if kind not in _CORES:
        raise ValueError(f"attention={kind!r} is not known; one of {', '.join(CORE_KINDS)}")
    build, needed, taken = _CORES[kind]
    facts = {"head_dim": head_dim, "max_len": max_len}
    choices = {"window": window, "num_features": num_features, "num_slots": num_slots, "block_size": block_size}
    for name in needed:
        if (facts | choices)[name] is None:
            raise ValueError(f"attention={kind!r} needs {name}, got {name}=None")
    for name, given in choices.items():
        if given is not None and name not in needed + taken:
            raise ValueError(f"attention={kind!r} does not take {name}, got {name}={given}")
    options = {name: given for name, given in (facts | choices).items() if given is not None and name in needed + taken}
    return build(**options, dropout=dropout, softcap=softcap)
