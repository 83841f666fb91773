"""``math``: the reference in plain operations. It supports every call, is twice differentiable and stores the L × S matrix."""

from __future__ import annotations

from minitx.nn.backends.base import Backend
from minitx.nn.functional import AttentionCall, reference_attention


def falls_back(call: AttentionCall) -> str:
    """Return the reason, always: it has no fused kernel."""
    return "it holds the whole L x S matrix"


BACKEND = Backend("math", reference_attention, falls_back=falls_back)
