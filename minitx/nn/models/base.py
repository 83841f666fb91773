"""The base class of all models: embeddings, a stack of blocks, and weight initialisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.bias import as_bias
from minitx.nn.blocks import run_checkpointed
from minitx.nn.cache import KVCache, LayerCache, hiding_rules
from minitx.nn.functional import refuse_nested
from minitx.nn.init import init_weights
from minitx.nn.masks import Causal, Mask, as_mask, intersect
from minitx.nn.models.parts import Core, build_bias, build_block, init_gains
from minitx.nn.norms import make_norm
from minitx.nn.positions import Rotation, position_ids_from


class Shared(NamedTuple):
    """The masks and the positions (or rotary angles) of one forward pass, for each layer."""

    masks: Sequence[Mask | None]
    positions: Sequence[Tensor | Rotation | None]


class TransformerModel(nn.Module):
    """Embeddings, blocks and a final norm: the base of every model, and the encoder of an encoder–decoder.

    Args:
        config: the model's config.
        embeddings: the module that computes the input of the first block.
        causal: whether the blocks are causal, as in a decoder.
        cross: whether the blocks have cross-attention.
        core: a function that builds the attention core of a layer, instead of ``config.attention``.

    Raises:
        ValueError: a model of another architecture than ``config.architecture``.
    """

    embeddings: Any  # a module whose type depends on the model
    architecture: ClassVar[str | None] = None
    """The ``config.architecture`` that a model needs, by which ``build_model`` finds it. None: any."""

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
        if self.architecture not in (None, config.architecture):
            name, wanted = type(self).__name__, self.architecture
            raise ValueError(f"{name} needs a config with architecture={wanted!r}, got {config.architecture!r}")
        self.config, self.causal, self.embeddings = config, causal, embeddings
        self.has_own_core = core is not None  # a config cannot say which
        num_layers = config.decoder_layers if causal else config.num_layers
        self.blocks = nn.ModuleList(
            build_block(config, layer, num_layers, causal=causal, cross=cross, core=core) for layer in range(num_layers)
        )
        self.windows = tuple(config.window_of(layer) for layer in range(num_layers))
        self.attn_bias = build_bias(config, decoder=causal)
        ends_in_norm = config.norm_position in ("post", "deepnorm")
        self.final_norm = nn.Identity() if ends_in_norm else make_norm(config.norm, config.embed_dim, config.norm_eps)

    def num_parameters(self) -> int:
        """Return the number of trainable parameters. A tied head counts once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def make_cache(self, capacity: int) -> KVCache:
        """Return the smallest cache for ``capacity`` positions per row.

        Layers with a window keep only the keys in the window. Kernelised layers keep a sum instead of keys.

        >>> from minitx.nn import DecoderLM
        >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2, window=(3, None)))
        >>> [layer.window for layer in model.make_cache(8).layers]
        [3, None]
        """
        layers = []
        for block, window in zip(self.blocks, self.windows, strict=True):
            make = getattr(block.attention, "make_cache", None)  # a user's attention may lack it
            layers.append(LayerCache(capacity) if make is None else make(capacity, window))
        cache = KVCache(capacity, len(layers))
        cache.layers = tuple(layers)
        return cache

    def _init_weights(self, generator: torch.Generator | None) -> None:
        config = self.config
        options = {"fold": config.init_fold, "num_layers": config.decoder_layers, "gains": init_gains(config)}
        init_weights(self, config.init, **options, generator=generator)  # type: ignore[arg-type]

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        """Return hidden states (B, L, E) for token ids (B, L). ``options`` are those of ``_embed``."""
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
        """Return the input of the first block, x (B, L, E), and the masks and positions of all blocks."""
        refuse_nested(name, input_ids)
        if isinstance(cache, LayerCache):
            kind = type(cache).__name__
            raise TypeError(
                f"cache must be a KVCache, with one LayerCache for each layer, got a {kind}: use model.make_cache(capacity)"
            )
        past, L = 0 if cache is None else cache.length, input_ids.shape[-1]
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ValueError(f"cache has {len(cache.layers)} layers, but the model has num_layers={len(self.blocks)}")
        padded = key_mask is not None or (cache is not None and cache.key_mask is not None)
        counted = position_ids is None and document_ids is None and not padded
        self._check_ids(input_ids, position_ids, past, counted, name)
        if cache is not None:
            key_mask, document_ids = cache.join(input_ids, key_mask, document_ids)  # (B, S)
        key_mask, document_ids = _counted(key_mask), _counted(document_ids)
        if cache is not None and mask is not None and not cache.keeps_all:
            raise ValueError("mask needs a cache that keeps all keys: use KVCache(capacity, num_layers)")
        masks = self._masks(as_mask(mask), key_mask, document_ids, cache, L)
        if masks[0] is not None and cache is None:  # before key_mask and document_ids are used for positions
            masks[0].check(input_ids.shape[0], self.config.num_heads, L, L)
        if position_ids is None:
            position_ids = position_ids_from(key_mask, document_ids, past + L, input_ids.device)[:, past:]
        x = self.embeddings(input_ids, position_ids, token_type_ids)  # (B, L, E)
        return x, Shared(masks, self._positions(position_ids, x))

    def _masks(
        self, mask: Mask | None, key_mask: Tensor | None, document_ids: Tensor | None, cache: KVCache | None, num_new: int
    ) -> list[Mask | None]:
        """Return each layer's complete mask. Layers with the same window and the same kind of cache share one object."""
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
        """Return each layer's positions. Rotary layers with the same base and scaling share their angles."""
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

    def _run(self, x: Tensor, shared: Shared | None = None, *, cache: KVCache | None = None, **cross: Any) -> Tensor:
        """Apply the blocks and the final norm. Returns hidden states (B, L, E). ``cross``: memory and its mask."""
        attn_bias = None if self.attn_bias is None else as_bias(self.attn_bias)
        checkpointing = self.config.checkpointing and torch.is_grad_enabled()
        options: dict[str, Any] = {"attn_bias": attn_bias, **cross}
        try:
            for layer, block in enumerate(self.blocks):
                if shared is not None:
                    options |= {"attn_mask": shared.masks[layer], "position_ids": shared.positions[layer]}
                if cache is not None:
                    options["cache"] = cache.layers[layer]
                x = run_checkpointed(block, x, **options) if checkpointing else block(x, **options)
        except BaseException:
            if cache is not None:
                cache.rewind()  # so that all layers have the same length again
            raise
        if cache is not None:
            cache.keep()
        return self.final_norm(x)

    def _check_ids(self, input_ids: Tensor, position_ids: Tensor | None, past: int, counted: bool, name: str) -> None:
        if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise ValueError(f"{name} must be integers of shape (B, L), got {input_ids.dtype} {tuple(input_ids.shape)}")
        if 0 in input_ids.shape:
            raise ValueError(f"{name} must have at least one row and one token, got shape {tuple(input_ids.shape)}")
        config, L = self.config, input_ids.shape[1]
        if position_ids is not None and config.position in ("alibi", "t5", "none"):
            raise ValueError(f"position_ids have no effect with position={config.position}")
        if config.position == "learned" and counted and config.max_len < past + L:
            before = f" after {past} in the cache" if past else ""
            raise ValueError(f"{name} has {L} tokens per row{before}, but max_len={config.max_len} with position=learned")


def _counted(tensor: Tensor | None) -> Tensor | None:
    """A copy of an inference tensor, of which torch counts the changes, so that the layers can share what a mask remembers."""
    if tensor is None or torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()
