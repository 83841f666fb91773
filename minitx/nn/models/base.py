"""What all models share: embeddings, a stack of blocks, initial weights. One mask, one bias and one set of angles a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.bias import as_bias
from minitx.nn.blocks import run_checkpointed
from minitx.nn.cache import KVCache, LayerCache, hiding_rules
from minitx.nn.feedforward import load_balancing_loss
from minitx.nn.init import init_weights
from minitx.nn.masks import Causal, Mask, as_mask, intersect
from minitx.nn.models.parts import Core, build_bias, build_block, init_gains
from minitx.nn.norms import make_norm
from minitx.nn.positions import Rotation, position_ids_from

Routing = list[dict[str, Tensor]]


class Shared(NamedTuple):
    """What all blocks of one forward pass get beside x: by layer, the mask and the positions or their angles."""

    masks: Sequence[Mask | None]
    positions: Sequence[Tensor | Rotation | None]


class TransformerModel(nn.Module):
    """Embeddings, blocks, a final norm: the base of every model, and the source's side of an encoder–decoder.

    Args:
        config: of the model.
        embeddings: the first module.
        causal: whether the blocks are those of a decoder. cross: whether they attend to a memory, too.
        core: makes the attention core of a layer, where ``config.attention`` names none of ours.
    """

    embeddings: Any  # a module; each model has its own

    def __init__(
        self,
        config: TransformerConfig,
        embeddings: nn.Module,
        *,
        causal: bool = False,
        cross: bool = False,
        core: Core | None = None,
    ) -> None:
        super().__init__()
        self.config, self.causal, self.embeddings = config, causal, embeddings
        num_layers = config.decoder_layers if causal else config.num_layers
        self.blocks = nn.ModuleList(
            build_block(config, layer, num_layers, causal=causal, cross=cross, core=core) for layer in range(num_layers)
        )
        self.windows = tuple(config.window_of(layer) for layer in range(num_layers))
        self.attn_bias = build_bias(config, decoder=causal)
        ends_normed = config.norm_position in ("post", "deepnorm")  # their blocks end in a norm
        self.final_norm = nn.Identity() if ends_normed else make_norm(config.norm, config.embed_dim, config.norm_eps)

    def num_parameters(self) -> int:
        """Number of trainable scalars; a tied head counts once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def make_cache(self, capacity: int) -> KVCache:
        """The smallest cache for ``capacity`` positions a row: layers with a window keep its keys, kernelised ones a sum.

        >>> from minitx.nn import DecoderLM
        >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2, window=(3, None)))
        >>> [layer.window for layer in model.make_cache(8).layers]
        [3, None]
        """
        layers = []
        for block, window in zip(self.blocks, self.windows, strict=True):
            make = getattr(block.attention, "make_cache", None)  # an attention of the user's may have none
            layers.append(LayerCache(capacity) if make is None else make(capacity, window))
        cache = KVCache(capacity, len(layers))
        cache.layers = tuple(layers)
        return cache

    def _init_weights(self, generator: torch.Generator | None) -> None:
        config = self.config
        options = {"fold": config.init_fold, "num_layers": config.decoder_layers, "gains": init_gains(config)}
        init_weights(self, config.init, **options, generator=generator)  # type: ignore[arg-type]

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        """Token ids (B, L) -> hidden states (B, L, E) and what the routers chose; ``options`` as in ``_embed``."""
        return self._run(*self._embed(input_ids, **options))

    def _embed(
        self,
        input_ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        cache: KVCache | None = None,
        name: str = "input_ids",
    ) -> tuple[Tensor, Shared]:
        """What enters the blocks: x (B, L, E), and what all of them share."""
        past, L = 0 if cache is None else cache.length, input_ids.shape[-1]
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ValueError(f"cache has {len(cache.layers)} layers, but the model has num_layers={len(self.blocks)}")
        counted = position_ids is None and key_mask is None and document_ids is None
        self._check_ids(input_ids, position_ids, past, counted, name)
        if cache is not None:
            key_mask, document_ids = cache.join(input_ids, key_mask, document_ids)  # (B, S)
        if cache is not None and mask is not None and not cache.keeps_all:
            raise ValueError("mask counts keys from the beginning: give KVCache(capacity, num_layers), which keeps all of them")
        masks = self._masks(as_mask(mask), key_mask, document_ids, cache, L)
        if masks[0] is not None and cache is None:  # before positions are counted from what does not fit
            masks[0].check(input_ids.shape[0], self.config.num_heads, L, L)
        if position_ids is None:
            position_ids = position_ids_from(key_mask, document_ids, past + L, input_ids.device)[:, past:]
        x = self.embeddings(input_ids, position_ids, token_type_ids)  # (B, L, E)
        return x, Shared(masks, self._positions(position_ids, x))

    def _masks(
        self, mask: Mask | None, key_mask: Tensor | None, document_ids: Tensor | None, cache: KVCache | None, num_new: int
    ) -> list[Mask | None]:
        """Each layer's mask, everything that hides keys; layers with one window and one kind of cache share one mask."""
        causal = Causal() if self.causal and not (mask is not None and mask.is_causality) else None
        found: dict[Any, Mask | None] = {}
        masks = []
        for layer, window in enumerate(self.windows):
            kind: object = window
            if cache is not None:
                kind = window, type(cache.layers[layer]), cache.layers[layer].window
            if kind not in found:
                described = key_mask, document_ids
                rules = hiding_rules(window, *described) if cache is None else cache.rules(layer, window, *described, num_new)
                found[kind] = intersect(causal, *rules, mask)
            masks.append(found[kind])
        return masks

    def _positions(self, position_ids: Tensor, x: Tensor) -> list[Tensor | Rotation | None]:
        """Each layer's positions: angles where it rotates, made once for all layers with the same base."""
        if self.config.position != "rotary":
            return [position_ids] * len(self.blocks)
        found: dict[Any, Rotation] = {}
        positions: list[Tensor | Rotation | None] = []
        for block in self.blocks:
            rotary = getattr(block.attention, "rotary", None)
            if rotary is None:
                positions.append(position_ids)
                continue
            kind = rotary.base, rotary.scaling
            if kind not in found:
                found[kind] = rotary.rotation(position_ids, x.shape[0], x.shape[1], x.dtype)
            positions.append(found[kind])
        return positions

    def _run(
        self, x: Tensor, shared: Shared | None = None, *, cache: KVCache | None = None, **cross: Any
    ) -> tuple[Tensor, Routing]:
        """The blocks and the final norm: hidden states (B, L, E), and what the routers chose. ``cross``: memory and its mask."""
        routing: Routing = []
        attn_bias = None if self.attn_bias is None else as_bias(self.attn_bias)
        if attn_bias is not None and cache is not None:
            attn_bias = cache.place(attn_bias)
        checkpointing, routes = self.config.checkpointing and torch.is_grad_enabled(), self.config.num_experts is not None
        options: dict[str, Any] = {"attn_bias": attn_bias, "return_extras": routes, **cross}
        try:
            for layer, block in enumerate(self.blocks):
                if shared is not None:
                    options |= {"attn_mask": shared.masks[layer], "position_ids": shared.positions[layer]}
                if cache is not None:
                    options["cache"] = cache.layers[layer]
                x = run_checkpointed(block, x, **options) if checkpointing else block(x, **options)
                if routes:
                    x, extras = x
                    routing.append(extras)
        except BaseException:
            if cache is not None:
                cache.rewind()  # to where all layers agree
            raise
        if cache is not None:
            cache.keep()
        return self.final_norm(x), routing

    def _check_ids(self, input_ids: Tensor, position_ids: Tensor | None, past: int, counted: bool, name: str) -> None:
        if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise ValueError(f"{name} must be whole numbers of shape (B, L), got {input_ids.dtype} {tuple(input_ids.shape)}")
        if 0 in input_ids.shape:
            raise ValueError(f"{name} must have at least one row and one token, got shape {tuple(input_ids.shape)}")
        config, L = self.config, input_ids.shape[1]
        if position_ids is not None and config.position in ("alibi", "t5", "none"):
            raise ValueError(f"position_ids were given, but position={config.position} does not read them")
        if config.position == "learned" and counted and config.max_len < past + L:
            before = f" after {past} in the cache" if past else ""
            raise ValueError(f"{name} has {L} tokens a row{before}, but the position table ends at max_len={config.max_len}")


def router_loss(routing: Routing, key_mask: Tensor | None = None) -> dict[str, Tensor]:
    """``router_loss``: the mean load-balancing loss of the layers that route, over real tokens; or nothing."""
    losses = [load_balancing_loss(r["router_probs"], r["router_choice"], key_mask) for r in routing if r]
    return {"router_loss": torch.stack(losses).mean()} if losses else {}
