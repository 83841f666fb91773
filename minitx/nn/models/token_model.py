"""What the models of token ids share: embeddings, a stack of blocks, one mask a forward pass, and what a cache adds."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.bias import as_bias
from minitx.nn.cache import KVCache
from minitx.nn.masks import Causal, Documents, Mask, Padding, SlidingWindow, intersect
from minitx.nn.models.base import HeadMask, Routing, Stack, TransformerModel
from minitx.nn.models.parts import Embeddings, build_bias
from minitx.nn.positions import position_ids_from


class TokenModel(TransformerModel):
    """Token ids in, hidden states out: an encoder, a decoder, or the half of an encoder–decoder.

    Args:
        config: ``vocab_size`` must be set.
        decoder: whether blocks are causal. cross: whether they attend to a memory, too.
        token: a table of token embeddings to share; default one of its own.
    """

    def __init__(
        self, config: TransformerConfig, *, decoder: bool, cross: bool = False, token: nn.Embedding | None = None
    ) -> None:
        super().__init__(config)
        if config.vocab_size is None:
            raise ValueError(f"vocab_size=None: {type(self).__name__} needs the number of token ids")
        num_layers = config.decoder_layers if decoder else config.num_layers
        self.is_causal = decoder
        self.embeddings = Embeddings(config, token)
        self.blocks = Stack(config, num_layers, decoder=decoder, cross=cross)
        self.attn_bias = build_bias(config, decoder=decoder)
        self.final_norm = self._final_norm()

    def _hidden(
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
        memory: Tensor | None = None,
        memory_mask: Mask | None = None,
        name: str = "input_ids",
    ) -> tuple[Tensor, Routing]:
        """Hidden states (B, L, E) before the head, and what the routers chose."""
        past, L = 0 if cache is None else cache.length, input_ids.shape[-1]
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ValueError(f"cache has {len(cache.layers)} layers, but the model has num_layers={len(self.blocks)}")
        self._check_ids(input_ids, position_ids, past, name)
        if cache is not None:
            key_mask, document_ids = cache.joined(input_ids, key_mask, document_ids)  # (B, S)
        full_mask = self._mask((input_ids.shape[0], L, past + L), key_mask, document_ids, mask)
        if position_ids is None:
            position_ids = position_ids_from(key_mask, document_ids, past + L, input_ids.device)[:, past:]
        routing: Routing = []
        x = self.blocks(
            self.embeddings(input_ids, position_ids, token_type_ids),  # (B, L, E)
            attn_mask=full_mask,
            position_ids=position_ids,
            attn_bias=None if self.attn_bias is None else as_bias(self.attn_bias),
            head_masks=self._head_masks(head_mask, len(self.blocks)),
            cache=cache,
            routing=routing if self.config.num_experts else None,
            **({} if memory is None else {"memory": memory, "memory_mask": memory_mask}),
        )
        if cache is not None:
            cache.key_mask, cache.document_ids = key_mask, document_ids
        return self.final_norm(x), routing

    def _mask(
        self, shape: tuple[int, int, int], key_mask: Tensor | None, document_ids: Tensor | None, mask: Mask | None
    ) -> Mask | None:
        """Everything that hides keys from (B, L, S), symbolic; built once and shared by all layers."""
        B, L, S = shape
        full_mask = intersect(
            Causal() if self.is_causal else None,
            SlidingWindow(self.config.window) if self.config.window is not None else None,
            Padding(key_mask) if key_mask is not None else None,
            Documents(document_ids) if document_ids is not None else None,
            mask,
        )
        if full_mask is not None:
            full_mask.check(B, self.config.num_heads, L, S)
        return full_mask

    def _check_ids(self, input_ids: Tensor, position_ids: Tensor | None, past: int, name: str) -> None:
        if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise ValueError(f"{name} must be whole numbers of shape (B, L), got {input_ids.dtype} {tuple(input_ids.shape)}")
        if 0 in input_ids.shape:
            raise ValueError(f"{name} must have at least one row and one token, got shape {tuple(input_ids.shape)}")
        config, L = self.config, input_ids.shape[1]
        if position_ids is not None and config.position in ("alibi", "t5", "none"):
            raise ValueError(f"position_ids were given, but position={config.position} does not read them")
        if config.position == "learned" and position_ids is None and config.max_len < past + L:
            before = f" after {past} in the cache" if past else ""
            raise ValueError(f"{name} has {L} tokens a row{before}, but the position table ends at max_len={config.max_len}")
