"""``math``: the reference in plain operations. Serves every call, twice differentiable, holds the L × S matrix."""

from __future__ import annotations

from torch import Tensor

from minitx.nn.backends.base import AttentionCall, Backend
from minitx.nn.functional import reference_attention


def run(call: AttentionCall) -> Tensor:
    """The definition of correct: see ``minitx.nn.functional``."""
    return reference_attention(
        call.query,
        call.key,
        call.value,
        mask=call.mask,
        scale=call.scale,
        attn_bias=call.attn_bias,
        softcap=call.softcap,
        sinks=call.sinks,
        dropout_p=call.dropout_p,
    )


def falls_back(call: AttentionCall) -> str:
    """Always: there is no fused kernel here."""
    return "it holds the whole L x S matrix"


BACKEND = Backend("math", run, falls_back=falls_back)
