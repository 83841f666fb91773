"""Transformer models that are built from a ``TransformerConfig``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.config.schema import takes_fields_of
from minitx.nn.bias import as_bias
from minitx.nn.blocks import run_checkpointed
from minitx.nn.cache import KVCache, LayerCache
from minitx.nn.functional import require_tensor
from minitx.nn.init import init_weights
from minitx.nn.masks import Causal, Documents, Mask, Padding, SlidingWindow, as_mask, intersect, require_bool
from minitx.nn.model_parts import POSITIONS, Embeddings, PatchEmbeddings, Pool, build_bias, build_block, build_head, init_gains
from minitx.nn.norms import make_norm
from minitx.nn.positions import ID_DTYPES, Rotary, Rotation, position_ids_from

__all__ = ["MODELS", "DecoderLM", "Encoder", "EncoderDecoder", "TransformerModel", "VisionTransformer", "build_model"]


def _equal(first: Tensor, second: Tensor) -> bool:
    return first is second or (first.device == second.device and not first.is_meta and torch.equal(first, second))


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

    Raises:
        ValueError: ``config.architecture`` is not the architecture of the class.
    """

    embeddings: Any  # a module whose type depends on the model
    architecture: ClassVar[str | None] = None
    """The ``config.architecture`` that a model needs; ``build_model`` finds the class by it. None: any."""

    def __init__(self, config: TransformerConfig, embeddings: nn.Module, *, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        if self.architecture not in (None, config.architecture):
            name = type(self).__name__
            raise ValueError(f"{name} needs a config with architecture={self.architecture!r}, got {config.architecture!r}")
        self.config, self.causal, self.embeddings = config, causal, embeddings
        num_layers = config.decoder_layers if causal else config.num_layers
        self.blocks = nn.ModuleList(
            build_block(config, layer, num_layers, causal=causal, cross=cross) for layer in range(num_layers)
        )
        self.windows = tuple(config.window_of(layer) for layer in range(num_layers))
        self.attn_bias = build_bias(config, decoder=causal)
        ends_in_norm = config.norm_position in ("post", "deepnorm")
        self.final_norm = nn.Identity() if ends_in_norm else make_norm(config.norm, config.embed_dim, config.norm_eps)

    def num_parameters(self) -> int:
        """Return the number of trainable parameters. A tied head counts once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def _ties(self) -> list[list[str]]:
        """The names of each parameter that has several names: a tied head, or a table that two stacks share."""
        names = defaultdict(list)
        for name, parameter in self.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        return [shared for shared in names.values() if len(shared) > 1]

    # torch calls only these private methods when a module around this one is moved or loaded

    def _apply(self, *args: Any, **options: Any) -> Any:
        """Keep parameters tied if torch makes a new parameter for each name, as ``to_empty`` does."""
        ties = self._ties()
        super()._apply(*args, **options)  # type: ignore[no-untyped-call]
        for first, *others in ties:
            for place, _, name in (other.rpartition(".") for other in others):
                setattr(self.get_submodule(place), name, self.get_parameter(first))
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """Keep parameters tied after ``load_state_dict(assign=True)``, unless the names have different values."""
        for shared in self._ties() if local_metadata.get("assign_to_params_buffers") else ():
            names = [prefix + name for name in shared]
            values = [state_dict[name] for name in names if name in state_dict]
            if values and all(_equal(values[0], other) for other in values[1:]):
                # torch then copies requires_grad from the model's parameter
                state_dict.update(dict.fromkeys(names, nn.Parameter(values[0], requires_grad=False)))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

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
        return KVCache(capacity, len(layers), layers)

    def _init_weights(self, generator: torch.Generator | None, part: nn.Module | None = None) -> None:
        """Initialise ``part``, by default the whole model, for the depth of this stack of blocks."""
        config = self.config
        gains = init_gains(self.config, decoder=self.causal)
        options = {"fold": config.init_fold, "num_layers": len(self.blocks), "gains": gains}
        init_weights(self if part is None else part, config.init, **options, generator=generator)  # type: ignore[arg-type]

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        """Return hidden states (B, L, E) for token ids (B, L). The ``options`` go to ``_embed``."""
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
        require_tensor(name, input_ids)
        by_name = {"token_type_ids": token_type_ids, "position_ids": position_ids, "document_ids": document_ids}
        for argument, ids in by_name.items():
            if ids is not None:
                require_tensor(argument, ids)
        if not (cache is None or isinstance(cache, KVCache)):
            raise TypeError(f"cache must be a KVCache, from model.make_cache(capacity), got {type(cache).__name__}")
        if key_mask is not None:  # before a cache stores it
            require_bool(name.replace("input_ids", "key_mask"), key_mask)
        past = 0 if cache is None else cache.length
        L = input_ids.shape[-1]
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ValueError(f"cache has {len(cache.layers)} layers, but the model has num_layers={len(self.blocks)}")
        padded = key_mask is not None or (cache is not None and cache.key_mask is not None)
        counted = position_ids is None and document_ids is None and not padded
        self._check_ids(input_ids, position_ids, past, counted, name)
        if cache is not None:
            key_mask, document_ids = cache.join(input_ids, key_mask, document_ids, position_ids)  # (B, S)
        key_mask, document_ids = _with_version(key_mask), _with_version(document_ids)
        if cache is not None and mask is not None and any(layer.window is not None for layer in cache.layers):
            raise ValueError("mask needs a cache that keeps all keys: use KVCache(capacity, num_layers)")
        masks = self._masks(as_mask(mask, "mask"), key_mask, document_ids, cache, L)
        if masks[0] is not None and cache is None:  # before positions are computed from key_mask and document_ids
            masks[0].check(input_ids.shape[0], self.config.num_heads, L, L)
        if position_ids is None:
            position_ids = position_ids_from(key_mask, document_ids, past + L, input_ids.device)[:, past:]
        x = self.embeddings(input_ids, position_ids, token_type_ids)  # (B, L, E)
        return x, Shared(masks, self._positions(position_ids, x))

    def _masks(
        self, mask: Mask | None, key_mask: Tensor | None, document_ids: Tensor | None, cache: KVCache | None, num_new: int
    ) -> list[Mask | None]:
        """Return each layer's complete mask. Layers with the same window, and with caches of the same window, share one object."""
        causal = Causal() if self.causal and not (mask is not None and mask.is_causality) else None
        by_kind: dict[tuple[int | None, int | None], Mask | None] = {}
        masks = []
        for layer, window in enumerate(self.windows):
            kind = window, None if cache is None else cache.layers[layer].window  # no length: a graph would fix it
            if kind not in by_kind:
                rules: list[Mask | None] = [causal, None if window is None else SlidingWindow(window)]
                for rule, tensor in ((Padding, key_mask), (Documents, document_ids)):
                    if tensor is not None and cache is not None:  # only the keys that the layer reads
                        tensor = tensor[:, tensor.shape[1] - cache.layers[layer].num_kept - num_new :]
                    rules.append(None if tensor is None else rule(tensor))
                by_kind[kind] = intersect(*rules, mask)
            masks.append(by_kind[kind])
        return masks

    def _positions(self, position_ids: Tensor, x: Tensor) -> list[Tensor | Rotation | None]:
        """Return each layer's positions. Rotary layers of the same sizes share their angles; layers of a subclass do not."""
        by_kind: dict[Any, Rotation] = {}
        positions: list[Tensor | Rotation | None] = []
        for block in self.blocks:
            rotary = getattr(getattr(block, "attention", None), "rotary", None)  # a block may be a wrapper of the user's
            if rotary is None:
                positions.append(position_ids)
                continue
            kind = (rotary.head_dim, rotary.base, rotary.scaling) if type(rotary) is Rotary else rotary
            if kind not in by_kind:
                by_kind[kind] = rotary.rotation(position_ids, x.shape[0], x.shape[1], x.dtype)
            positions.append(by_kind[kind])
        return positions

    def _run(self, x: Tensor, shared: Shared | None = None, *, cache: KVCache | None = None, **cross: Any) -> Tensor:
        """Apply the blocks and the final norm. Returns hidden states (B, L, E). ``cross``: memory and its mask."""
        attn_bias = None if self.attn_bias is None else as_bias(self.attn_bias)
        checkpointing = self.config.checkpointing and torch.is_grad_enabled()
        options: dict[str, Any] = {"attn_bias": attn_bias, **cross}
        for layer, block in enumerate(self.blocks):
            if shared is not None:
                options |= {"attn_mask": shared.masks[layer], "position_ids": shared.positions[layer]}
            if cache is not None:
                options["cache"] = cache.layers[layer]
            x = run_checkpointed(block, x, **options) if checkpointing else block(x, **options)
        if cache is not None:
            cache.advance(x.shape[1])
        x = self.final_norm(x)
        return x * self.config.embed_dim**-0.5 if self.config.scale_logits and self.causal else x

    def _check_ids(self, input_ids: Tensor, position_ids: Tensor | None, past: int, counted: bool, name: str) -> None:
        if input_ids.dim() != 2 or input_ids.dtype not in ID_DTYPES:
            raise ValueError(f"{name} must be int32 or int64 of shape (B, L), got {input_ids.dtype} {tuple(input_ids.shape)}")
        if 0 in input_ids.shape:
            raise ValueError(f"{name} must have at least one row and one token, got shape {tuple(input_ids.shape)}")
        config = self.config
        L = input_ids.shape[1]
        if position_ids is not None and not POSITIONS[config.position].reads_ids:
            raise ValueError(f"position_ids have no effect with position={config.position}")
        if config.position == "learned" and counted and config.max_len < past + L:
            before = f" after {past} in the cache" if past else ""
            raise ValueError(f"{name} has {L} tokens per row{before}, but max_len={config.max_len} with position=learned")


def _with_version(tensor: Tensor | None) -> Tensor | None:
    """Copy an inference tensor. torch counts the changes of the copy, so that a mask can remember results for all layers."""
    if tensor is None or torch.compiler.is_compiling() or not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


class DecoderLM(TransformerModel):
    """A decoder-only Transformer: token ids in, logits of the next token out.

    All options are fields of ``TransformerConfig``.

    Args:
        config: the model's config. ``vocab_size`` must be set.
        generator: for the initial weights. Default: torch's global generator.

    Raises:
        ValueError: ``vocab_size`` is missing, or ``architecture`` is not ``decoder``.

    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> model(torch.tensor([[1, 2, 3, 5, 7]])).shape
    torch.Size([1, 5, 11])
    """

    architecture = "decoder"

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config, Embeddings(config), causal=True)
        self.head = build_head(config, self.embeddings.token)
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
                tokens only, except ``mask``: it covers all keys.
            return_hidden: return the input of ``self.head`` (B, L, E) instead of logits, with the factor of ``scale_logits``.

        Returns:
            Logits (B, L, V), or hidden states (B, L, E).

        Raises:
            ValueError: inputs whose shapes do not fit, ids outside a table, or more tokens than the cache or ``max_len`` allows.
        """
        ids: dict[str, Any] = {"token_type_ids": token_type_ids, "position_ids": position_ids, "document_ids": document_ids}
        x, shared = self._embed(input_ids, **ids, key_mask=key_mask, mask=mask, cache=cache)
        hidden = self._run(x, shared, cache=cache)
        return hidden if return_hidden else self.head(hidden)


class Encoder(TransformerModel):
    """A bidirectional Transformer: each token sees all others (Devlin et al. 2019, "BERT", arXiv:1810.04805, §3).

    ``config.head`` decides the result of the model:

    * ``lm``: logits over the vocabulary for masked language modelling, (B, L, V);
    * ``sequence``: logits over labels for each row, (B, num_labels);
    * ``token``: logits over labels for each token, (B, L, num_labels);
    * ``none``: hidden states, (B, L, E).

    Args:
        config: the model's config. ``vocab_size`` must be set, and ``num_labels`` for ``sequence`` and ``token``.
        generator: for the initial weights. Default: torch's global generator.

    Raises:
        ValueError: ``vocab_size`` or ``num_labels`` is missing, or ``architecture`` is not ``encoder``.

    >>> options = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2}
    >>> model = Encoder(TransformerConfig(architecture="encoder", head="sequence", num_labels=5, **options))
    >>> model(torch.tensor([[1, 2, 3, 5, 7], [1, 4, 0, 0, 0]]), key_mask=torch.tensor([[True] * 5, [True] * 2 + [False] * 3])).shape
    torch.Size([2, 5])
    """

    architecture = "encoder"

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config, Embeddings(config))
        self.pool = Pool(config) if config.head == "sequence" or config.has_pooler else None
        self.head = build_head(config, self.embeddings.token)
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
        return_hidden: bool = False,
    ) -> Tensor:
        """Return the logits of ``config.head``. For the arguments, see ``DecoderLM.forward``.

        With ``return_hidden``, return the input of ``self.head``: (B, E) for ``head=sequence``, else (B, L, E). With ``head=none``
        and a pooler, ``model.pool(hidden, key_mask)`` (B, E) is the pooled vector.
        """
        ids: dict[str, Any] = {"token_type_ids": token_type_ids, "position_ids": position_ids, "document_ids": document_ids}
        x, shared = self._embed(input_ids, **ids, key_mask=key_mask, mask=mask)
        hidden = self._run(x, shared)
        if self.config.head == "sequence":
            hidden = self.pool(hidden, key_mask)  # type: ignore[misc]
        return hidden if return_hidden else self.head(hidden)


class VisionTransformer(TransformerModel):
    """An image classifier: images in, ``num_labels`` logits out (Dosovitskiy et al. 2021, arXiv:2010.11929, §3.1).

    An image (C, h, w) is cut into h/P · w/P patches of P × P pixels. A linear map of the C · P² numbers of a patch gives its token.
    With ``pooling=first`` a learned class token comes first, and the head reads its last hidden state. With ``pooling=mean`` the
    head reads the mean of the patches. The position table is for images of ``image_size`` and is interpolated for other sizes (§3.2).

    Args:
        config: the model's config. ``image_size``, ``num_channels`` and, with ``head=sequence``, ``num_labels`` must be set.
            ``patch_size`` is P, in pixels.
        generator: for the initial weights. Default: torch's global generator.

    Raises:
        ValueError: ``image_size``, ``num_channels`` or ``num_labels`` is missing, or ``architecture`` is not ``vision``.

    >>> sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    >>> config = TransformerConfig(architecture="vision", head="sequence", embed_dim=12, num_heads=3, num_layers=2, **sizes)
    >>> model = VisionTransformer(config)
    >>> model(torch.randn(5, 1, 8, 8)).shape, model(torch.randn(5, 1, 12, 6)).shape
    (torch.Size([5, 10]), torch.Size([5, 10]))
    """

    architecture = "vision"

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__(config, PatchEmbeddings(config))
        self.pool = Pool(config) if config.head == "sequence" or config.has_pooler else None
        self.head = build_head(config)
        self._init_weights(generator)

    def forward(self, pixel_values: Tensor, *, return_hidden: bool = False) -> Tensor:  # type: ignore[override]
        """Return logits (B, num_labels), or hidden states (B, tokens, E) with ``head=none``.

        Args:
            pixel_values: float (B, C, h, w). h and w are multiples of ``patch_size``.
            return_hidden: return the input of ``self.head`` instead of logits, as in ``Encoder``.

        Raises:
            ValueError: images of another shape.
            TypeError: images that are not floating-point.
        """
        hidden = self._run(self.embeddings(pixel_values))
        if self.config.head == "sequence":
            hidden = self.pool(hidden)  # type: ignore[misc]
        return hidden if return_hidden else self.head(hidden)


class EncoderDecoder(TransformerModel):
    """An encoder reads the source, and a decoder with cross-attention to it predicts the target.

    Vaswani et al. 2017, arXiv:1706.03762, §3; Raffel et al. 2020 (T5), arXiv:1910.10683, §2.1. Source and target share one table of
    token embeddings. They share no other parameters. Cross-attention has no positions.

    Args:
        config: the model's config. ``vocab_size`` must be set. ``num_layers`` is the depth of the encoder, ``num_decoder_layers``
            the depth of the decoder.
        generator: for the initial weights. Default: torch's global generator.

    Raises:
        ValueError: ``vocab_size`` is missing, or ``architecture`` is not ``encoder_decoder``.

    >>> options = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2}
    >>> model = EncoderDecoder(TransformerConfig(architecture="encoder_decoder", **options))
    >>> model(torch.tensor([[1, 2, 3, 5, 7]]), torch.tensor([[2, 3]])).shape
    torch.Size([1, 2, 11])
    """

    architecture = "encoder_decoder"

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None) -> None:
        source = Embeddings(config)
        encoder = TransformerModel(config, source)
        super().__init__(config, Embeddings(config, source.token), causal=True, cross=True)
        self.head = build_head(config, source.token)
        self.encoder = encoder
        self._init_weights(generator)
        encoder._init_weights(generator, encoder.blocks)  # the encoder has its own depth and gains (DeepNorm)

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
            cache: the decoder's cache, as in ``DecoderLM``. It also keeps the keys and values of ``memory`` for the next call with the same
                tensor. Another source needs another cache, because the earlier tokens have read this one.
            return_hidden: return the input of ``self.head`` (B, L, E) instead of logits, with the factor of ``scale_logits``.

        Returns:
            Logits (B, L, V), or hidden states (B, L, E).

        Raises:
            ValueError: ``input_ids`` and ``memory`` are both None, or as in ``DecoderLM``.
        """
        if memory is None:
            if input_ids is None:
                raise ValueError("input_ids=None: an encoder-decoder needs input_ids, or memory from encode()")
            memory = self.encoder(input_ids, key_mask=key_mask)
        require_tensor("memory", memory)
        require_tensor("decoder_input_ids", decoder_input_ids)
        if memory.dim() != 3 or memory.shape[0] != decoder_input_ids.shape[0]:
            expected = f"(B, S, E) = ({decoder_input_ids.shape[0]}, S, {self.config.embed_dim})"
            raise ValueError(f"memory must have shape {expected}, got {tuple(memory.shape)}")
        x, shared = self._embed(decoder_input_ids, key_mask=decoder_key_mask, mask=mask, cache=cache, name="decoder_input_ids")
        memory_mask = None if key_mask is None else Padding(key_mask)
        hidden = self._run(x, shared, cache=cache, memory=memory, memory_mask=memory_mask)
        return hidden if return_hidden else self.head(hidden)

    def encode(self, input_ids: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Return the encoder's hidden states (B, S, E), for the argument ``memory``."""
        return self.encoder(input_ids, key_mask=key_mask)


MODELS = {model.architecture: model for model in (DecoderLM, Encoder, EncoderDecoder, VisionTransformer)}


@takes_fields_of(TransformerConfig)
def build_model(config: TransformerConfig) -> TransformerModel:
    """Build the model of ``config.architecture``.

    >>> from minitx.config import TransformerConfig
    >>> type(build_model(TransformerConfig(architecture="encoder", vocab_size=11))).__name__
    'Encoder'
    """
    return MODELS[config.architecture](config)
