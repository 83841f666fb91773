"""Attention residuals: the input of a sublayer is a weighted mean of the outputs of all sublayers before it, not their sum.

    h_l = Σ_{i<l} α_i v_i,    α = softmax over i of w_l · RMSNorm(v_i),    v_0 = embedding,  v_l = f_l(norm(h_l))

w_l is a learned vector of each sublayer (attention or feed-forward), and one more is before the head. All start at 0, so that the weights
start equal (Kimi Team 2026, "Attention Residuals", arXiv:2603.15031, §3; the full form, without blocks).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.config.schema import takes_fields_of
from minitx.nn import DecoderLM


@takes_fields_of(TransformerConfig)
class AttentionResiduals(DecoderLM):
    """A pre-norm decoder with attention residuals. It has no padding masks and no cache.

    Args:
        config: the model's config.
        generator: for the initial weights. Default: torch's global generator.
    """

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config, generator=generator)
        self.depth_queries = nn.Parameter(torch.zeros(2 * config.num_layers + 1, config.embed_dim))

    def mean(self, outputs: list[tuple[Tensor, Tensor]], query: Tensor) -> Tensor:
        """Return the weighted mean (B, L, E) of the first of each pair of ``outputs``. The second is its RMSNorm."""
        weights = torch.stack([normed @ query for _, normed in outputs]).softmax(dim=0)  # (n, B, L)
        return sum(weight.unsqueeze(-1) * out for weight, (out, _) in zip(weights, outputs, strict=True))  # type: ignore[return-value]

    def forward(self, input_ids: Tensor, *, return_hidden: bool = False) -> Tensor:  # type: ignore[override]
        """Return logits (B, L, V) for ids (B, L), or hidden states (B, L, E)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        outputs, queries = list[tuple[Tensor, Tensor]](), iter(self.depth_queries)

        def add(out: Tensor) -> None:
            outputs.append((out, F.rms_norm(out, out.shape[-1:])))

        add(self.embeddings(input_ids, positions))
        for block in self.blocks:
            residual = block.attention_residual
            h = residual.norm(self.mean(outputs, next(queries)))
            add(residual.finish(block.attention(h, is_causal=True, position_ids=positions)))
            residual = block.feedforward_residual
            h = residual.norm(self.mean(outputs, next(queries)))
            add(residual.finish(block.feedforward(h)))
        hidden = self.final_norm(self.mean(outputs, next(queries)))
        return hidden if return_hidden else self.head(hidden)
