"""Attention that costs less than L × S: other mathematics, or the same on fewer cells; each says what it cannot do.

Every module here is a core: ``MultiHeadAttention(E, H, core=LinearAttention())``. ``SlidingWindowAttention`` and
``BlockSparseAttention`` are exact on what they compute; ``LinearAttention``, ``PerformerAttention`` and
``LinformerAttention`` compute something else, and ``approximation_error`` says how far it is from exact attention.
"""

from minitx.nn.efficient.base import EfficientAttention, approximation_error
from minitx.nn.efficient.kernelised import LinearAttention, PerformerAttention
from minitx.nn.efficient.linformer import LinformerAttention
from minitx.nn.efficient.sparse import BlockSparseAttention, SlidingWindowAttention

__all__ = [
    "BlockSparseAttention",
    "EfficientAttention",
    "LinearAttention",
    "LinformerAttention",
    "PerformerAttention",
    "SlidingWindowAttention",
    "approximation_error",
]
