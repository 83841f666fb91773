"""A causal language model, such as GPT-2 or Llama."""

from __future__ import annotations

import torch
from torch import Tensor

from minitx.config import TransformerConfig
from minitx.nn.cache import KVCache
from minitx.nn.masks import Mask
from minitx.nn.models.base import TransformerModel
from minitx.nn.models.parts import Core, Embeddings, build_lm_head


class DecoderLM(TransformerModel):
    """A decoder-only Transformer: token ids in, logits of the next token out.

    All options are fields of ``TransformerConfig``.

    Args:
        config: the model's config. ``vocab_size`` must be set.
        core: a function that builds the attention core of a layer, instead of ``config.attention``.
        generator: for the initial weights. Default: torch's global generator.

    Raises:
        ValueError: ``vocab_size`` is missing, or ``architecture`` is another.

    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> model(torch.tensor([[1, 2, 3, 5, 7]])).shape
    torch.Size([1, 5, 11])
    """

    architecture = "decoder"

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
        return_hidden: bool = False,
    ) -> Tensor:
        """Return the logits of the next token at each position.

        Args:
            input_ids: int (B, L).
            key_mask: bool (B, L), True = real token. Padding may be on the left or on the right. Padding *between* real tokens
                increases the distances of ``alibi``, ``t5`` and ``window``, but not the ``position_ids``.
            token_type_ids: int (B, L), for a model with ``type_vocab_size``. Default: 0.
            position_ids: int (B or 1, L). Default: real tokens are counted from 0 in each document.
            document_ids: int (B, L). Tokens of different documents do not see each other.
            mask: a ``Mask``, or a bool tensor as in ``MultiHeadAttention``. It is intersected with the model's own mask (causal,
                window, padding, documents). A rule such as ``PrefixLM`` replaces the causal part.
            cache: the keys and values of earlier tokens. ``input_ids`` continue them, and the other arguments describe the new
                tokens only, except ``mask``, which covers all keys.
            return_hidden: return the hidden states (B, L, E) before ``self.head`` instead of logits.

        Returns:
            Logits (B, L, V), or hidden states (B, L, E).

        Raises:
            ValueError: inputs whose shapes do not fit, ids outside a table, or more tokens than the cache or ``max_len`` allows.
        """
        options = {"key_mask": key_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        x, shared = self._embed(input_ids, document_ids=document_ids, mask=mask, cache=cache, **options)  # type: ignore[arg-type]
        hidden = self._run(x, shared, cache=cache)
        if self.config.scale_logits:
            hidden = hidden * self.config.embed_dim**-0.5
        return hidden if return_hidden else self.head(hidden)
