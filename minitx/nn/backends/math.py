"""``math``: the reference in plain operations. Serves every call, twice differentiable, holds the L × S matrix."""

from __future__ import annotations

from minitx.nn.backends.base import Backend
from minitx.nn.functional import AttentionCall, reference_attention


def falls_back(call: AttentionCall) -> str:
    """Always a reason: it has no fused kernel."""
    return "it holds the whole L x S matrix"


BACKEND = Backend("math", reference_attention, falls_back=falls_back)
