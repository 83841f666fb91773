"""The base class of the efficient cores, and ``approximation_error``."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from minitx.nn.functional import AttentionCall, full_precision, make_call, reference_attention
from minitx.nn.masks import Causal, Mask, Padding
from minitx.nn.modes import evaluating


class EfficientAttention(nn.Module):
    """The base of cores that do not compute softmax attention. Subclasses define ``attend``.

    A core takes an ``AttentionCall``, as ``DotProductAttention`` does. ``refusals`` lists the options that it does not support, with
    the reason. The computation is in at least float32, under autocast too. The output has the dtype of the value.

    ``minitx.analysis.capture`` skips these cores, because they have no weights over keys.
    """

    refusals: ClassVar[dict[str, str]] = {"need_weights": "it computes no weights over keys"}

    def forward(self, call: AttentionCall) -> Tensor:
        """Return the output (B, H, L, Dv).

        Raises:
            ValueError: an option or a mask that the core does not support.
        """
        given = {"attn_bias": call.attn_bias, "softcap": call.softcap, "sinks": call.sinks}
        self.refuse(
            **{name: option is not None for name, option in given.items()},
            dropout=call.dropout_p > 0.0,
            need_weights=call.need_weights,
        )
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        with full_precision(call.query.device):
            wide = replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))
            return self.attend(wide).to(call.value.dtype)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw what the core holds. Most cores hold nothing. ``init_weights`` passes its generator."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Compute the output (B, H, L, Dv) from tensors in at least float32."""
        raise NotImplementedError(f"{type(self).__name__} must define attend()")

    def refuse(self, **wanted: bool) -> None:
        """Raise a ValueError if one of the wanted options is not supported. ``MultiHeadAttention`` calls this in its constructor."""
        for option, is_wanted in wanted.items():
            if is_wanted and option in self.refusals:
                raise ValueError(f"{type(self).__name__} does not support {option}: {self.refusals[option]}")

    def causal_and_padding(self, mask: Mask | None) -> tuple[bool, Tensor | None]:
        """Split ``mask`` into (whether it is causal, key_mask (B, S) or None). Any other mask raises a ValueError."""
        causal, key_mask = False, None
        for part in mask.parts() if mask is not None else ():
            if isinstance(part, Padding):
                key_mask = part.key_mask if key_mask is None else key_mask & part.key_mask
            elif isinstance(part, Causal):
                causal = True
            else:
                raise ValueError(
                    f"{type(self).__name__} does not support the mask {type(part).__name__}: it sums over keys before it uses the "
                    f"queries, so it can hide a key from all queries (Padding), but not from some of them"
                )
        return causal, key_mask


@torch.no_grad()
def approximation_error(
    core: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
) -> dict[str, float | Tensor]:
    """Measure the error of ``core`` against exact softmax attention on these inputs.

    The relative error is ‖core − exact‖_F / ‖exact‖_F. The exact output is computed by ``reference_attention`` in float64, which
    stores L × S scores. The core runs in evaluation mode.

    Args:
        core: the attention core to measure.
        query: (B, H, L, D).
        key: (B, Hkv, S, D).
        value: (B, Hkv, S, Dv).
        mask: the mask of both computations. None hides nothing.
        scale: the multiplier on q·k in both computations. None: 1/√D.

    Returns:
        ``relative_error`` and ``max_abs_error`` as floats, ``relative_error_per_head`` and ``max_abs_error_per_head`` as float64
        tensors (H,). If the exact output is zero, the relative error is 0 for a zero output and infinite for any other.

    >>> from minitx.nn.efficient import LinearAttention
    >>> q, k, v = torch.zeros(3, 1, 2, 9, 4).unbind()  # equal scores: both give the mean of the values
    >>> error = approximation_error(LinearAttention(), q, k, v + 1.0)
    >>> error["relative_error"] < 1e-6, error["relative_error_per_head"].shape
    (True, torch.Size([2]))
    """
    call = make_call(query, key, value, mask, scale=scale)
    with evaluating(core):
        got = core(call)
    exact = reference_attention(replace(call, query=query.double(), key=key.double(), value=value.double()))
    gap = got.double() - exact
    gaps, sizes = (tensor.square().sum((0, 2, 3)) for tensor in (gap, exact))  # (H,)
    worst = gap.abs().amax((0, 2, 3))
    return {
        "relative_error": _ratio(gaps.sum(), sizes.sum()).item(),
        "max_abs_error": worst.max().item(),
        "relative_error_per_head": _ratio(gaps, sizes),
        "max_abs_error_per_head": worst,
    }


def _ratio(gap: Tensor, size: Tensor) -> Tensor:
    return torch.where(gap == 0, 0.0, gap / size).sqrt()
