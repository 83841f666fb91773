"""A causal language model: embeddings, decoder blocks, a head. GPT-2 and Llama shapes by config."""

from __future__ import annotations

import torch
from torch import Tensor

from minitx.config import TransformerConfig
from minitx.nn.cache import KVCache
from minitx.nn.masks import Mask
from minitx.nn.models.base import TransformerModel, router_loss
from minitx.nn.models.parts import Core, Embeddings, build_lm_head


class DecoderLM(TransformerModel):
    """Decoder-only Transformer over token ids: logits out, never a loss.

    Every option is a field of ``TransformerConfig``. The mask is built once per forward and handed down symbolically.

    Args:
        config: ``vocab_size`` must be set.
        core: makes the attention core of a layer, in place of ``config.attention``.
        generator: for the initial weights; default torch's global one.

    Raises:
        ValueError: no ``vocab_size``; inputs that do not fit.

    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> model(torch.tensor([[1, 2, 3, 5, 7]])).shape
    torch.Size([1, 5, 11])
    """

    def __init__(
        self, config: TransformerConfig, *, core: Core | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(config, Embeddings(config), causal=True, core=core)
        self.head = build_lm_head(config, self.embeddings)
        self._init_weights(generator)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        cache: KVCache | None = None,
        return_extras: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Next-token logits.

        Args:
            input_ids: int (B, L). token_type_ids: int (B, L), summed into the embeddings; default 0 where the model has a table.
            key_mask: bool (B, L), True = real token; left and right padding are both fine. Padding *between* real tokens
                counts in the distances of ``alibi``, ``t5`` and ``window``, though not in ``position_ids``.
            position_ids: int (B or 1, L); default counts the real tokens, from 0 in every document.
            document_ids: int (B, L); packed documents never see each other.
            mask: a ``Mask``, or a bool tensor as in ``MultiHeadAttention``. It intersects with the model's own (causal, window,
                padding, documents). A rule that decides about the future by itself, such as ``PrefixLM``, takes the place of the
                causal one.
            cache: what was read before; ``input_ids`` continue it, and everything above describes the new tokens only,
                but for ``mask``, whose keys count from the beginning.
            return_extras: return ``(hidden, extras)`` before ``self.head`` instead of logits; ``extras["router_loss"]``
                is the mean ``load_balancing_loss`` of the layers where the model has experts.

        Returns:
            (B, L, V), or ``(hidden (B, L, E), extras)``.

        Raises:
            ValueError: inputs that do not fit each other, the cache, or the tables of the model.
        """
        options = {"key_mask": key_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        x, shared = self._embed(input_ids, document_ids=document_ids, mask=mask, cache=cache, **options)  # type: ignore[arg-type]
        hidden, routing = self._run(x, shared, cache=cache)
        if self.config.scale_logits:
            hidden = hidden * self.config.embed_dim**-0.5
        return (hidden, router_loss(routing, key_mask)) if return_extras else self.head(hidden)
