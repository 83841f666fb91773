"""An encoder–decoder: one side reads the source, the other writes the target. Vaswani and T5 shapes by config."""

from __future__ import annotations

import torch
from torch import Tensor

from minitx.config import TransformerConfig
from minitx.nn.cache import KVCache
from minitx.nn.init import init_weights
from minitx.nn.masks import Mask, Padding
from minitx.nn.models.base import Routing, TransformerModel, router_loss
from minitx.nn.models.parts import Core, Embeddings, build_lm_head, init_gains


class EncoderDecoder(TransformerModel):
    """An encoder over the source, and a decoder that attends to what it says: Vaswani's and T5's shapes by config.

    Source and target share one vocabulary and, as in both papers, one table of token embeddings; positions, relative
    biases and everything else are each side's own. Cross-attention has no positions (Vaswani et al. 2017,
    arXiv:1706.03762, §3; Raffel et al. 2020, arXiv:1910.10683, §2.1).

    Args:
        config: ``vocab_size`` must be set; ``num_layers`` is the encoder's depth and ``num_decoder_layers`` the decoder's.
        core: makes the attention core of a layer, in place of ``config.attention``.
        generator: for the initial weights; default torch's global one.

    Raises:
        ValueError: no ``vocab_size``; inputs that do not fit.

    >>> options = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2}
    >>> model = EncoderDecoder(TransformerConfig(architecture="encoder_decoder", **options))
    >>> model(torch.tensor([[1, 2, 3, 5, 7]]), torch.tensor([[2, 3]])).shape
    torch.Size([1, 2, 11])
    """

    def __init__(
        self, config: TransformerConfig, *, core: Core | None = None, generator: torch.Generator | None = None
    ) -> None:
        source = Embeddings(config)
        encoder = TransformerModel(config, source, core=core)
        super().__init__(config, Embeddings(config, source.token), causal=True, cross=True, core=core)
        self.head = build_lm_head(config, self.embeddings)
        self.encoder = encoder
        self._init_weights(generator)
        # depths and DeepNorm's gains are each side's own
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
        return_extras: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Logits of the target's next token.

        Args:
            input_ids: int (B, S), the source; not read (and may be None) where ``memory`` is given.
            decoder_input_ids: int (B, L), the target so far, from its begin mark on.
            key_mask: bool (B, S), True = real source token. decoder_key_mask: bool (B, L), the target's.
            memory: (B, S, E) from ``encode``: spares encoding the source at each decoding step.
            mask: intersects with the mask of the decoder's self-attention.
            cache: of the decoder, as in ``DecoderLM``; the memory's keys and values are computed at its first use only.
            return_extras: return ``(hidden, extras)`` before ``self.head``.

        Returns:
            (B, L, V), or ``(hidden (B, L, E), extras)``.

        Raises:
            ValueError: neither ``input_ids`` nor ``memory``; inputs that do not fit.
        """
        routing: Routing = []
        if memory is None:
            if input_ids is None:
                raise ValueError("input_ids=None: an encoder-decoder needs the source, or memory from encode()")
            memory, routing = self.encoder(input_ids, key_mask=key_mask)
        if memory.dim() != 3 or memory.shape[0] != decoder_input_ids.shape[0]:
            wanted = f"(B, S, E) = ({decoder_input_ids.shape[0]}, S, {self.config.embed_dim})"
            raise ValueError(f"memory must have the target's rows, {wanted}, got {tuple(memory.shape)}")
        options = {"key_mask": decoder_key_mask, "mask": mask, "cache": cache, "name": "decoder_input_ids"}
        x, shared = self._embed(decoder_input_ids, **options)  # type: ignore[arg-type]
        memory_mask = None if key_mask is None else Padding(key_mask)
        hidden, decoded = self._run(x, shared, cache=cache, memory=memory, memory_mask=memory_mask)
        if self.config.scale_logits:
            hidden = hidden * self.config.embed_dim**-0.5
        if not return_extras:
            return self.head(hidden)
        losses = [*router_loss(routing, key_mask).values(), *router_loss(decoded, decoder_key_mask).values()]
        return hidden, {"router_loss": torch.stack(losses).mean()} if losses else {}

    def encode(self, input_ids: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """The source's hidden states (B, S, E), for ``memory``."""
        return self.encoder(input_ids, key_mask=key_mask)[0]
