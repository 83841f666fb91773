"""The bases of cores other than ``DotProductAttention``: without a softmax over keys, and under attention that is not ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minitx.nn.functional import AttentionCall
from minitx.nn.masks import Causal, Mask, Padding
from minitx.nn.precision import full_precision
from minitx.nn.rules import MASKS_PAGE
from minitx.nn.scale import scale_multiplier


class EfficientAttention(nn.Module):
    """The base of the cores in ``minitx.nn.efficient``, for attention without a softmax of q·k over all keys. Subclasses define ``attend``.

    A core takes an ``AttentionCall``, as ``DotProductAttention`` does. ``refusals`` lists the options that it does not support, with
    the reason. The computation is in at least float32, under autocast too. The output has the dtype of the value.

    ``minitx.analysis.recorder`` skips these cores, because they have no weights over keys.
    """

    refusals: ClassVar[dict[str, str]] = {"need_weights": "it computes no weights over keys"}

    def forward(self, call: AttentionCall) -> Tensor:
        """Return the output (B, H, L, Dv).

        Raises:
            ValueError: an option or a mask that the core does not support.
        """
        options = {name: getattr(call, name) is not None for name in ("attn_bias", "softcap", "sinks")}
        self.refuse(**options, dropout=call.dropout_p > 0.0, need_weights=call.need_weights)
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        with full_precision(call.query.device):
            wide = replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))
            return self.attend(wide).to(call.value.dtype)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the random state of the core. Most cores have none. ``init_weights`` passes its generator."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Compute the output (B, H, L, Dv) from tensors in at least float32."""
        raise NotImplementedError(f"{type(self).__name__} must define attend()")

    def refuse(self, **options: bool) -> None:
        """Raise a ValueError if an option is True and not supported. ``MultiHeadAttention`` calls this in its constructor."""
        for option, is_used in options.items():
            if is_used and option in self.refusals:
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
                    f"queries, so it can hide a key from all queries (Padding), but not from some of them ({MASKS_PAGE})"
                )
        return causal, key_mask


class OtherScale:
    """The base class of cores under attention that is not ours (``minitx.interop.adopt_hf``). Its scale can be changed.

    Attributes:
        scale: None for the scale of the model, or the arguments of ``set_scale``.
        folds: the weights that ``fold_scale`` has multiplied, as ``minitx.nn.folding.Fold``.
    """

    scale: tuple[str | float, float] | None
    folds: list[Any]

    def set_scale(self, to: str | float, factor: float) -> None:
        """Replace the model's own scale by ``factor`` times a fixed scale. ``own`` restores it."""
        if to != "own":
            scale_multiplier(to, 1)  # raises if the scale is not a fixed number
        self.scale = None if to == "own" else (to, factor)

    def fold(
        self, model: nn.Module, layers: Mapping[str, Any], to: str | float, factor: float, inputs: Mapping[str, Any] | None
    ) -> None:
        """Change the scale of all ``layers`` of ``model`` with such a core, and compensate in their weights (``fold_scale``).

        Args:
            inputs: the arguments of a call of the model, or None.

        Raises:
            ValueError: the weights cannot compensate. The model is then unchanged.
        """
        raise NotImplementedError
