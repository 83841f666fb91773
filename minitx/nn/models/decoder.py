"""A causal language model: embeddings, decoder blocks, a head. GPT-2 and Llama shapes by config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.cache import KVCache
from minitx.nn.masks import Mask
from minitx.nn.models.base import HeadMask, Routing, mean_visible, router_loss
from minitx.nn.models.parts import build_lm_head
from minitx.nn.models.token_model import TokenModel


class CausalModel(TokenModel):
    """Decoder blocks and a head over the vocabulary: a language model, and the half of an encoder–decoder."""

    def __init__(self, config: TransformerConfig, *, cross: bool = False, token: nn.Embedding | None = None) -> None:
        super().__init__(config, decoder=True, cross=cross, token=token)
        self.head = build_lm_head(config)
        if config.tie_embeddings:
            self.head.weight = self.embeddings.token.weight

    def _decode(self, input_ids: Tensor, **options: Any) -> tuple[Tensor, Routing]:
        """Hidden states (B, L, E) before the head, and what the routers chose; ``options`` as in ``TokenModel``."""
        hidden, routing = self._hidden(input_ids, **options)
        return hidden * self.config.embed_dim**-0.5 if self.config.scale_logits else hidden, routing


class DecoderLM(CausalModel):
    """Decoder-only Transformer over token ids: logits out, never a loss.

    Every option is a field of ``TransformerConfig``. The mask is built once per forward and handed down symbolically.

    Args:
        config: ``vocab_size`` must be set.
        generator: for the initial weights; default torch's global one.

    Raises:
        ValueError: no ``vocab_size``; inputs that do not fit.

    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> model(torch.tensor([[1, 2, 3, 5, 7]])).shape
    torch.Size([1, 5, 11])
    """

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config)
        self._init_weights(generator)

    def forward(
        self,
        input_ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        mask: Mask | None = None,
        head_mask: HeadMask = None,
        cache: KVCache | None = None,
        return_extras: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Next-token logits.

        Args:
            input_ids: int (B, L). token_type_ids: int (B, L), summed into the embeddings.
            key_mask: bool (B, L), True = real token; left and right padding are both fine. Padding *between* real tokens
                counts in the distances of ``alibi``, ``t5`` and ``window``, though not in ``position_ids``.
            position_ids: int (B or 1, L); default counts the real tokens, from 0 in every document.
            document_ids: int (B, L); packed documents never see each other.
            mask: intersects with the model's own (causal, window, padding, documents).
            head_mask: (num_layers, H), or for some layers (H,) or (B, H); multiplies each head's output.
            cache: what was read before; ``input_ids`` continue it, and everything above describes the new tokens only,
                but for ``mask``, whose keys count from the beginning.
            return_extras: return ``(hidden, extras)`` before ``self.head`` instead of logits; ``extras["router_loss"]``
                is the mean ``load_balancing_loss`` of the layers where the model has experts.

        Returns:
            (B, L, V), or ``(hidden (B, L, E), extras)``.

        Raises:
            ValueError: inputs that do not fit each other, the cache, or the tables of the model.
        """
        hidden, routing = self._decode(
            input_ids,
            key_mask=key_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            document_ids=document_ids,
            mask=mask,
            head_mask=head_mask,
            cache=cache,
        )
        return (hidden, router_loss(routing, key_mask)) if return_extras else self.head(hidden)

    def flops_per_token(self, length: int) -> float:
        """Training FLOPs per token at ``length`` tokens a row, causal and exact: 3 · (2·N_mm + 4·layers·H·D·T_eff).

        N_mm are the matrix parameters that a token meets; T_eff = (T + 1) / 2, or the mean number of visible keys under a
        window.
        """
        return self._training_flops(self.config.num_layers * mean_visible(length, self.config.window, causal=True))
