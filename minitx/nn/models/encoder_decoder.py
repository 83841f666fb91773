"""An encoder–decoder, such as T5."""

from __future__ import annotations

import torch
from torch import Tensor

from minitx.config import TransformerConfig
from minitx.nn.cache import KVCache
from minitx.nn.init import init_weights
from minitx.nn.masks import Mask, Padding
from minitx.nn.models.base import TransformerModel
from minitx.nn.models.parts import Core, Embeddings, build_lm_head, init_gains


class EncoderDecoder(TransformerModel):
    """An encoder reads the source, and a decoder with cross-attention to it predicts the target.

    Vaswani et al. 2017, arXiv:1706.03762, §3; Raffel et al. 2020 (T5), arXiv:1910.10683, §2.1. Source and target share one table of
    token embeddings. They share no other parameters. Cross-attention has no positions.

    Args:
        config: the model's config. ``vocab_size`` must be set. ``num_layers`` is the depth of the encoder, ``num_decoder_layers``
            that of the decoder.
        core: a function that builds the attention core of a layer, instead of ``config.attention``.
        generator: for the initial weights. Default: torch's global generator.

    Raises:
        ValueError: ``vocab_size`` is missing, or ``architecture`` is another.

    >>> options = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2}
    >>> model = EncoderDecoder(TransformerConfig(architecture="encoder_decoder", **options))
    >>> model(torch.tensor([[1, 2, 3, 5, 7]]), torch.tensor([[2, 3]])).shape
    torch.Size([1, 2, 11])
    """

    architecture = "encoder_decoder"

    def __init__(
        self, config: TransformerConfig, *, core: Core | None = None, generator: torch.Generator | None = None
    ) -> None:
        source = Embeddings(config)
        encoder = TransformerModel(config, source, core=core)
        super().__init__(config, Embeddings(config, source.token), causal=True, cross=True, core=core)
        self.head = build_lm_head(config, self.embeddings)
        self.encoder = encoder
        self._init_weights(generator)
        # the encoder has another depth and other gains of DeepNorm
        options = {"fold": config.init_fold, "num_layers": config.num_layers, "gains": init_gains(config, decoder=False)}
        init_weights(encoder.blocks, config.init, **options, generator=generator)  # type: ignore[arg-type]

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None,
        decoder_input_ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        decoder_key_mask: Tensor | None = None,
        memory: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        cache: KVCache | None = None,
        return_hidden: bool = False,
    ) -> Tensor:
        """Return the logits of the target's next token at each position.

        Args:
            input_ids: int (B, S), the source. Not used, and may be None, if ``memory`` is given.
            decoder_input_ids: int (B, L), the target, beginning with the start token.
            key_mask: bool (B, S), True = real token of the source.
            decoder_key_mask: bool (B, L), True = real token of the target.
            memory: (B, S, E), the result of ``encode``. With it, the source is not encoded again at each decoding step.
            mask: a mask of the decoder's self-attention, intersected with the causal one, as in ``DecoderLM``.
            cache: the decoder's cache, as in ``DecoderLM``. It also keeps the keys and values of the memory.
            return_hidden: return the hidden states (B, L, E) before ``self.head`` instead of logits.

        Returns:
            Logits (B, L, V), or hidden states (B, L, E).

        Raises:
            ValueError: both ``input_ids`` and ``memory`` are missing, or as in ``DecoderLM``.
        """
        if memory is None:
            if input_ids is None:
                raise ValueError("input_ids=None: an encoder-decoder needs input_ids, or memory from encode()")
            memory = self.encoder(input_ids, key_mask=key_mask)
        if memory.dim() != 3 or memory.shape[0] != decoder_input_ids.shape[0]:
            wanted = f"(B, S, E) = ({decoder_input_ids.shape[0]}, S, {self.config.embed_dim})"
            raise ValueError(f"memory must have shape {wanted}, got {tuple(memory.shape)}")
        options = {"key_mask": decoder_key_mask, "mask": mask, "cache": cache, "name": "decoder_input_ids"}
        x, shared = self._embed(decoder_input_ids, **options)  # type: ignore[arg-type]
        memory_mask = None if key_mask is None else Padding(key_mask)
        hidden = self._run(x, shared, cache=cache, memory=memory, memory_mask=memory_mask)
        if self.config.scale_logits:
            hidden = hidden * self.config.embed_dim**-0.5
        return hidden if return_hidden else self.head(hidden)

    def encode(self, input_ids: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Return the encoder's hidden states (B, S, E), for the argument ``memory``."""
        return self.encoder(input_ids, key_mask=key_mask)
