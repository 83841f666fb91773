"""What the efficient cores share: their refusals, their precision, and the measured error."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from minitx.nn.functional import AttentionCall, full_precision, make_call, reference_attention
from minitx.nn.masks import Causal, Mask, Padding
from minitx.nn.modes import evaluating


class EfficientAttention(nn.Module):
    """A core of ``MultiHeadAttention`` with mathematics of its own; subclasses define ``attend``.

    It takes an ``AttentionCall``, as ``DotProductAttention`` does, and honours or refuses each of its options: ``refusals`` says, for
    every option that the mathematics leaves no place for, why. Everything is computed in at least float32, under autocast too, on
    the same path in training and evaluation; the output has the value's dtype.

    ``minitx.analysis.capture`` passes these cores over, because they have no weights over keys; ``approximation_error`` says how far
    they are from exact attention.
    """

    refusals: ClassVar[dict[str, str]] = {"need_weights": "it forms no weights over keys"}

    def forward(self, call: AttentionCall) -> Tensor:
        """A checked call -> (B, H, L, Dv).

        Raises:
            ValueError: an option or a mask that the core refuses.
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

    def attend(self, call: AttentionCall) -> Tensor:
        """The mathematics, on checked tensors in at least float32: (B, H, L, Dv)."""
        raise NotImplementedError(f"{type(self).__name__} defines no attend")

    def refuse(self, **wanted: bool) -> None:
        """Raise a ValueError if one of the wanted options is refused; ``MultiHeadAttention`` asks when it is built, too."""
        for option, is_wanted in wanted.items():
            if is_wanted and option in self.refusals:
                raise ValueError(f"{type(self).__name__} cannot honour {option}: {self.refusals[option]}")

    def causal_and_padding(self, mask: Mask | None) -> tuple[bool, Tensor | None]:
        """``mask`` as (is it causal, key_mask (B, S) or None), or a ValueError if it is more than that."""
        causal, key_mask = False, None
        for part in mask.parts() if mask is not None else ():
            if isinstance(part, Padding):
                key_mask = part.key_mask if key_mask is None else key_mask & part.key_mask
            elif isinstance(part, Causal):
                causal = True
            else:
                raise ValueError(
                    f"{type(self).__name__} cannot honour the mask {type(part).__name__}: it sums keys up before a query "
                    f"meets them, so it can hide a key from every query (Padding) but not from chosen ones"
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
    """How far ``core`` is from exact softmax attention on these inputs: ‖core − exact‖_F / ‖exact‖_F, and the largest gap.

    Exact is ``reference_attention`` in float64 under the same ``mask`` and ``scale``, L × S cells held at once. The core runs in
    evaluation mode (its mode is restored).

    Args:
        core: a core.
        query: (B, H, L, D). key: (B, Hkv, S, D). value: (B, Hkv, S, Dv).
        mask: what both may see; None hides nothing.
        scale: multiplier on q·k in both; None = 1/√D.

    Returns:
        ``relative_error`` and ``max_abs_error`` (floats), ``relative_error_per_head`` and ``max_abs_error_per_head``
        (H,) in float64. Where exact attention is zero throughout, the relative error is 0 if the core is too, else inf.

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
