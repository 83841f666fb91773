"""What the efficient cores share: the call of ``DotProductAttention``, its checks, refusals, and the measured error."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from minitx.nn.bias import Bias
from minitx.nn.functional import AttentionCall, check_settings, full_precision, make_call, reference_attention
from minitx.nn.masks import Causal, Mask, Padding
from minitx.nn.modes import evaluating


class EfficientAttention(nn.Module):
    """A core of ``MultiHeadAttention`` with mathematics of its own; subclasses define ``attend``.

    It takes the arguments of ``DotProductAttention``, in the constructor and in the call, and honours or refuses each:
    ``refusals`` says, for every option that the mathematics leaves no place for, why. Everything is computed in at least
    float32, under autocast too, on the same path in training and evaluation; the output has the value's dtype.

    ``minitx.analysis.capture`` records those that have weights and so an ``effective_mask`` (windows, sparse blocks); of the
    others there is the ``approximation_error`` to look at.

    Args:
        dropout: on the weights, in training only; refused where there are no weights.
        softcap: t in t · tanh(z / t), or None for off; refused where there are no scores.

    Raises:
        ValueError: a refused option, or a number out of range.
    """

    refusals: ClassVar[dict[str, str]] = {}

    def __init__(self, *, dropout: float = 0.0, softcap: float | None = None) -> None:
        super().__init__()
        check_settings(softcap, dropout)
        self.dropout, self.softcap = dropout, softcap
        self._refuse(dropout=dropout > 0.0, softcap=softcap is not None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        attn_bias: Tensor | Bias | None = None,
        sinks: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv) -> (B, H, L, Dv)[, weights (B, H, L, S)].

        Args:
            mask: symbolic, True = may attend; None hides nothing. Which masks are served is the subclass's matter.
            scale: multiplier on q·k; None = 1/√D, 1.0 = unscaled.
            attn_bias, sinks, need_weights: as in ``DotProductAttention``, where they are not refused.

        Raises:
            ValueError: a refused option or mask, shapes that do not fit. TypeError: dtypes or kinds that do not fit.
        """
        self._refuse(attn_bias=attn_bias is not None, sinks=sinks is not None, need_weights=need_weights)
        options = {"scale": scale, "attn_bias": attn_bias, "softcap": self.softcap, "sinks": sinks}
        call = make_call(query, key, value, mask, self.dropout if self.training else 0.0, False, **options)  # type: ignore[arg-type]
        dtype = torch.promote_types(query.dtype, torch.float32)
        with full_precision(query.device):
            wide = replace(call, query=query.to(dtype), key=key.to(dtype), value=value.to(dtype))
            out = self.attend(wide).to(value.dtype)
            return (out, self.attend_weights(call).to(query.dtype)) if need_weights else out

    def attend(self, call: AttentionCall) -> Tensor:
        """The mathematics, on checked tensors in at least float32: (B, H, L, Dv)."""
        raise NotImplementedError(f"{type(self).__name__} defines no attend")

    def attend_weights(self, call: AttentionCall) -> Tensor:
        """The weights (B, H, L, S), computed beside the output; only where ``need_weights`` is not refused."""
        raise NotImplementedError(f"{type(self).__name__} defines no weights")

    def _refuse(self, **asked: bool) -> None:
        for option, wanted in asked.items():
            if wanted and option in self.refusals:
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

    def extra_repr(self) -> str:
        given = {"dropout": self.dropout, "softcap": self.softcap}
        return ", ".join(f"{name}={setting}" for name, setting in given.items() if name not in self.refusals)


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

    Exact is ``reference_attention`` in float64 under the same ``mask`` and ``scale``, L × S cells held at once; for
    ``SlidingWindowAttention`` and no mask the error is therefore what the window leaves out. The core runs in
    evaluation mode (its mode is restored), so that dropout is no error.

    Args:
        core: an efficient core, or anything called alike.
        query: (B, H, L, D). key: (B, Hkv, S, D). value: (B, Hkv, S, Dv).
        mask: what both may see; None hides nothing.
        scale: multiplier on q·k in both; None = 1/√D.

    Returns:
        ``relative_error`` and ``max_abs_error`` (floats), ``relative_error_per_head`` and ``max_abs_error_per_head``
        (H,) in float64. Where exact attention is zero throughout, the relative error is 0 if the core is too, else inf.

    >>> from minitx.nn.efficient import SlidingWindowAttention
    >>> q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    >>> error = approximation_error(SlidingWindowAttention(window=9), q, k, v)
    >>> error["relative_error"] < 1e-6, error["relative_error_per_head"].shape
    (True, torch.Size([2]))
    """
    with evaluating(core):
        got = core(query, key, value, mask=mask, scale=scale)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    exact = reference_attention(query.double(), key.double(), value.double(), mask=mask, scale=factor)
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
