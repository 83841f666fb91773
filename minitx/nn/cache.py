"""Caches of keys and values: decoding reads every token once.

The order in attention is projections → QK-norm → rotary → *cache* → backend, so a cache holds normed and rotated keys. The caller
owns the cache; modules keep none. ``model.make_cache(capacity)`` makes the smallest cache for a model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minitx.nn.masks import Documents, Mask, Padding, SlidingWindow


class LayerCache:
    """The keys and values of one layer: keys (B, Hkv, slots, D) and values (B, Hkv, slots, Dv).

    Self-attention appends to it. Cross-attention writes ``memory`` once and reads it in later calls. Without a window the
    tensors are allocated once, at the first ``append``, with its shape, dtype and device. With a window w they hold only the
    newest positions: at most 2w - 1 slots, or enough for the longest piece and the w - 1 positions before it. Every token is
    written once. When the slots are used up, the w - 1 newest positions are moved to new tensors.

    Args:
        capacity: the largest number of positions.
        window: how many keys a query sees, its own included. None: all.

    Raises:
        ValueError: a capacity or window below 1; more positions than ``capacity``; a change of batch size, number of heads,
            width, dtype or device. RuntimeError: keys or values that require grad (the tensors are overwritten in place).

    >>> cache = LayerCache(capacity=8)
    >>> for length in (3, 1):
    ...     keys, values = cache.append(torch.ones(2, 1, length, 4), torch.ones(2, 1, length, 4))
    >>> cache.length, keys.shape
    (4, torch.Size([2, 1, 4, 4]))
    """

    def __init__(self, capacity: int, window: int | None = None) -> None:
        for name, number in (("capacity", capacity), ("window", 1 if window is None else window)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a positive whole number of positions, got {number!r}")
        self.capacity, self.window, self.length = capacity, window, 0
        self.memory: tuple[Tensor, Tensor] | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._slots = 0  # of the tensors
        self._end = 0  # the slot after the newest position

    @property
    def num_rows(self) -> int:
        """B, or 0 if nothing was read yet."""
        return 0 if self._keys is None else self._keys.shape[0]

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The keys and values of the newest positions, (B, Hkv, n, D) and (B, Hkv, n, Dv), as views."""
        assert self._keys is not None
        assert self._values is not None
        start = self._end - self.num_kept
        return self._keys[:, :, start : self._end], self._values[:, :, start : self._end]

    @property
    def num_kept(self) -> int:
        """How many of the earlier positions the next query can see."""
        return self.length if self.window is None else min(self.length, self.window - 1)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append key (B, Hkv, L, D) and value (B, Hkv, L, Dv) of L positions. Return the last ``num_kept + L`` as views."""
        kept, L = self.num_kept, key.shape[2]
        check_room(self.length, L, self.capacity)
        if self._end + L > self._slots:
            self._make_room(key, value, kept + max(L, self.window or self.capacity))
        assert self._keys is not None
        assert self._values is not None
        _check_like("key", key, self._keys)
        _check_like("value", value, self._values)
        start, stop = self._end, self._end + L
        self._keys[:, :, start:stop] = key
        self._values[:, :, start:stop] = value
        self._end, self.length = stop, self.length + L
        return self._keys[:, :, start - kept : stop], self._values[:, :, start - kept : stop]

    def _make_room(self, key: Tensor, value: Tensor, size: int) -> None:
        """Allocate ``size`` slots and copy the ``num_kept`` newest positions to the first of them."""
        B, Hkv, slots, kept = key.shape[0], key.shape[1], min(size, self.capacity), self.num_kept
        keys, values = key.new_zeros(B, Hkv, slots, key.shape[3]), value.new_zeros(B, Hkv, slots, value.shape[3])
        if kept:
            old_keys, old_values = self.held
            _check_like("key", key, old_keys)
            _check_like("value", value, old_values)
            keys[:, :, :kept], values[:, :, :kept] = old_keys, old_values
        self._keys, self._values, self._slots, self._end = keys, values, slots, kept

    def rewind(self, length: int) -> None:
        """Forget the last ``append``; ``length`` is the number of positions before it."""
        self._end, self.length = self._end - (self.length - length), length

    def remember(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of a memory, for cross-attention, and return them."""
        _check_like("key", key, key)
        self.memory = (key, value)
        return self.memory

    def reorder(self, rows: Tensor) -> None:
        """Replace each row i by the row ``rows[i]``, for beam search. ``rows`` is int (B',)."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        if self.memory is not None:
            self.memory = (self.memory[0].index_select(0, rows), self.memory[1].index_select(0, rows))


class StateCache(LayerCache):
    """The cache of a kernelised core: a sum over all positions. Its size does not grow.

    ``append`` returns only the new keys and values. The core adds them to ``state``: Σ_j φ(k_j) (v_jᵀ, 1) relative to exp(top),
    as (B, Hkv, m, Dv + 1) and (B, Hkv, 1), or None before the first position.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.state: tuple[Tensor, Tensor] | None = None
        self._before: tuple[Tensor, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        """B, or 0 if nothing was read yet."""
        return 0 if self.state is None else self.state[0].shape[0]

    @property
    def num_kept(self) -> int:
        """0: no key is kept."""
        return 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Count the next L positions. Return their key (B, Hkv, L, D) and value (B, Hkv, L, Dv)."""
        check_room(self.length, key.shape[2], self.capacity)
        _check_like("key", key, key)
        if self.state is not None and self.state[0].shape[:2] != key.shape[:2]:
            raise ValueError(
                f"key must have the (B, Hkv) = {tuple(self.state[0].shape[:2])} of the cache, got {tuple(key.shape[:2])}"
            )
        self._before, self.length = self.state, self.length + key.shape[2]
        return key, value

    def rewind(self, length: int) -> None:
        """Forget the last ``append``; ``length`` is the number of positions before it."""
        if self.length > length:
            self.state, self.length = self._before, length

    def reorder(self, rows: Tensor) -> None:
        """Replace each row i by the row ``rows[i]``, for beam search. ``rows`` is int (B',)."""
        super().reorder(rows)
        if self.state is not None:
            self.state = self.state[0].index_select(0, rows), self.state[1].index_select(0, rows)


class KVCache:
    """One ``LayerCache`` for each layer, and the padding and documents of the tokens that were read.

    Pass it to a model with each new piece of the input. ``key_mask`` and ``document_ids`` then describe the new tokens only,
    because the cache stores those of the earlier tokens. ``position_ids``, if given at all, must be given with each piece. The result equals one forward pass over the whole input, for
    left-padded prompts, pieces of any length and single tokens.

    Args:
        capacity: the largest number of tokens in a row, padding included.
        num_layers: the number of layers of the model.

    Raises:
        ValueError: as in ``LayerCache``, or document ids that are given for some tokens only.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)).eval()
    >>> ids, cache = torch.tensor([[1, 2, 3, 5, 7]]), KVCache(capacity=8, num_layers=2)
    >>> with torch.no_grad():
    ...     pieces = [model(piece, cache=cache) for piece in ids.split([3, 1, 1], dim=1)]
    ...     bool(torch.allclose(torch.cat(pieces, dim=1), model(ids), atol=1e-5))
    True
    """

    def __init__(self, capacity: int, num_layers: int) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers must be positive, got {num_layers}")
        self.layers: tuple[LayerCache, ...] = tuple(LayerCache(capacity) for _ in range(num_layers))
        self.capacity = capacity
        self.key_mask: Tensor | None = None  # (B, length), None where nothing is padding
        self.document_ids: Tensor | None = None  # (B, length)
        self._kept = 0  # how many positions all layers have read
        self._joined: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def length(self) -> int:
        """The number of positions that were read, padding included."""
        return self.layers[0].length

    def join(
        self, input_ids: Tensor, key_mask: Tensor | None, document_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return ``key_mask`` and ``document_ids`` of the earlier and the new tokens: (B, length + L) each, or None.

        A model calls this before its blocks read the new tokens, and ``keep`` or ``rewind`` afterwards.
        """
        check_room(self.length, input_ids.shape[1], self.capacity)
        for name, given in (("key_mask", key_mask), ("document_ids", document_ids)):
            if given is not None and given.shape != input_ids.shape:
                raise ValueError(
                    f"{name} must describe the new tokens, (B, L) = {tuple(input_ids.shape)}, got {tuple(given.shape)}"
                )
        if self.length == 0:
            self._joined = key_mask, document_ids
            return self._joined
        if (document_ids is None) != (self.document_ids is None):
            raise ValueError(
                "document_ids must be given for all tokens or for none; the earlier tokens in the cache differ from these"
            )
        if document_ids is not None and self.document_ids is not None:
            document_ids = torch.cat((self.document_ids, document_ids), dim=1)
        if key_mask is not None or self.key_mask is not None:
            B, L = input_ids.shape
            old = input_ids.new_ones(B, self.length, dtype=torch.bool) if self.key_mask is None else self.key_mask
            new = input_ids.new_ones(B, L, dtype=torch.bool) if key_mask is None else key_mask
            key_mask = torch.cat((old, new), dim=1)
        self._joined = key_mask, document_ids
        return self._joined

    def rules(
        self, layer: int, window: int | None, key_mask: Tensor | None, document_ids: Tensor | None, num_new: int
    ) -> list[Mask]:
        """Return the masks of one layer: its window, and the padding and documents (B, length + num_new) from ``join``."""
        newest = slice(-self.layers[layer].num_kept - num_new, None)
        key_mask = None if key_mask is None else key_mask[:, newest]
        return hiding_rules(window, key_mask, None if document_ids is None else document_ids[:, newest])

    @property
    def keeps_all(self) -> bool:
        """Whether all keys of all layers are kept in order, so that masks of the caller may refer to their positions."""
        return all(type(layer) is LayerCache and layer.window is None for layer in self.layers)

    def keep(self) -> None:
        """Count the new tokens, after all layers have read them."""
        self._kept, (self.key_mask, self.document_ids) = self.length, self._joined

    def rewind(self) -> None:
        """Forget the new tokens after a failed forward pass, in which only some layers have read them."""
        for layer in self.layers:
            layer.rewind(self._kept)

    def reorder(self, rows: Tensor) -> None:
        """Replace each row i by the row ``rows[i]`` in every layer, for beam search. ``rows`` is int (B',)."""
        for layer in self.layers:
            layer.reorder(rows)
        self.key_mask = None if self.key_mask is None else self.key_mask.index_select(0, rows)
        self.document_ids = None if self.document_ids is None else self.document_ids.index_select(0, rows)


def hiding_rules(window: int | None, key_mask: Tensor | None, document_ids: Tensor | None) -> list[Mask]:
    """Return one mask for each argument that is not None. ``key_mask`` and ``document_ids`` are (B, S)."""
    rules: list[Mask] = [] if window is None else [SlidingWindow(window)]
    if key_mask is not None:
        rules.append(Padding(key_mask))
    if document_ids is not None:
        rules.append(Documents(document_ids))
    return rules


def check_room(length: int, num_new: int, capacity: int) -> None:
    """Raise a ValueError if there is no room for the new positions, before anything is written."""
    if length + num_new > capacity:
        raise ValueError(f"cache has capacity for {capacity} positions: {length} are taken, {num_new} more do not fit")


def _check_like(name: str, new: Tensor, old: Tensor) -> None:
    if new.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires grad, but a cache is for inference: call under torch.no_grad()")
    (B, Hkv, _, D), shape = old.shape, new.shape
    if shape[0] != B or shape[1] != Hkv or shape[3] != D or new.dtype != old.dtype or new.device != old.device:
        raise ValueError(
            f"{name} must fit what the cache holds, (B, Hkv, D) = {(B, Hkv, D)} {old.dtype} on {old.device}, "
            f"got {(shape[0], shape[1], shape[3])} {new.dtype} on {new.device}"
        )
