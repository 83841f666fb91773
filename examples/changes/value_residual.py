"""Value residual: the first layer's values are mixed into the values of the other layers.

    V_l ← (1 − λ_l) V_l + λ_l V_1

λ_l is learned and starts at 1/2 (Zhou et al. 2024, "ResFormer", arXiv:2410.17897). It works with a cache. The first layer keeps its values
until the next call, so activation checkpointing is not supported.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.config.schema import takes_fields_of
from minitx.nn import AttentionCall, DotProductAttention, build_model
from minitx.nn.models import TransformerModel


class ValueResidual(DotProductAttention):
    """The core of one layer.

    Args:
        first: the core of the first layer; None: this is the first.
    """

    def __init__(self, first: "ValueResidual | None" = None) -> None:
        super().__init__()
        self.first = [first]  # in a list, so that it is not registered as a submodule
        self.share = None if first is None else nn.Parameter(torch.tensor(0.5))

    def reset_parameters(self) -> None:
        """Set λ to 1/2."""
        if self.share is not None:
            nn.init.constant_(self.share, 0.5)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the values out of a copy."""
        return {name: value for name, value in vars(self).items() if name != "value"}

    def forward(self, call: AttentionCall) -> Tensor | tuple[Tensor, Tensor]:
        """Return (B, H, L, Dv)."""
        self.value = call.value  # (B, Hkv, S, Dv), for the layers above
        if self.share is not None and self.first[0] is not None:
            call = replace(call, value=torch.lerp(call.value, self.first[0].value, self.share))
        return super().forward(call)


@takes_fields_of(TransformerConfig)
def value_residual(config: TransformerConfig) -> TransformerModel:
    """Build a model with value residuals. The keys are the keys of ``build_model``."""
    model = build_model(config)
    first = ValueResidual()
    for layer, block in enumerate(model.blocks):
        block.attention.core = ValueResidual(first) if layer else first
    return model
