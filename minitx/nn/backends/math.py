"""``math``: the reference in plain operations. Serves every call, twice differentiable, holds the L × S matrix."""

from __future__ import annotations

from torch import Tensor

from minitx.nn.backends.base import Backend
from minitx.nn.functional import AttentionCall, reference_attention


def run(call: AttentionCall) -> Tensor:
    """The definition of correct: see ``minitx.nn.functional``."""
    return reference_attention(call.query, call.key, call.value, **call.terms, dropout_p=call.dropout_p)


def falls_back(call: AttentionCall) -> str:
    """Always: there is no fused kernel here."""
    return "it holds the whole L x S matrix"


BACKEND = Backend("math", run, falls_back=falls_back)
