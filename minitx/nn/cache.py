"""Caches of keys and values: decoding reads every token once.

The order in attention is projections → QK-norm → rotary → *cache* → backend, so a cache holds normed and rotated keys. The caller
owns the cache; modules keep none. ``model.make_cache(capacity)`` makes the smallest cache for a model.

Every write goes to the positions after ``length``, and ``length`` grows only when the forward pass is done. After a pass that failed,
the next pass writes to the same positions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

KeyAndValue = tuple[Tensor, Tensor]


class LayerCache:
    """The keys and values of one layer: keys (B, Hkv, slots, D) and values (B, Hkv, slots, Dv).

    Self-attention appends to it. Cross-attention writes the keys and values of its ``memory`` once and reads them in later calls with the
    same tensor. Another tensor is projected again. Without a window the tensors are allocated once, at the first ``append``, with its shape, dtype and device. With a window w they hold only the
    newest positions: at most 2w - 1 slots, or enough for the longest piece and the w - 1 positions before it. Every token is
    written once. When the slots are used up, the w - 1 newest positions are moved to new tensors.

    Args:
        capacity: the largest number of positions.
        window: the number of keys that a query sees, including its own. None: all.

    Raises:
        ValueError: a capacity or window below 1; more positions than ``capacity``; a change of batch size, number of heads,
            width, dtype or device; a ``length`` that was set back so far that earlier keys are gone.
        RuntimeError: keys or values that require grad (the tensors are overwritten in place).

    >>> cache = LayerCache(capacity=8)
    >>> for length in (3, 1):
    ...     keys, values = cache.append(torch.ones(2, 1, length, 4), torch.ones(2, 1, length, 4))
    ...     cache.advance(length)
    >>> cache.length, keys.shape
    (4, torch.Size([2, 1, 4, 4]))
    """

    def __init__(self, capacity: int, window: int | None = None) -> None:
        _check_count("capacity", capacity, "positions")
        _check_count("window", 1 if window is None else window, "positions")
        self.capacity, self.window, self.length = capacity, window, 0
        self.memory: KeyAndValue | None = None
        self._source: Tensor | None = None  # the tensor (B, S, E) that the memory was projected from
        self._pair: KeyAndValue | None = None
        self._start = 0  # the position in the first slot

    @property
    def num_kept(self) -> int:
        """The number of earlier positions that the next query can see."""
        return self.length if self.window is None else min(self.length, self.window - 1)

    @property
    def held(self) -> KeyAndValue:
        """The keys and values of the newest positions, (B, Hkv, n, D) and (B, Hkv, n, Dv), as views."""
        return self._read(self.length - self.num_kept, self.length)

    def append(self, key: Tensor, value: Tensor) -> KeyAndValue:
        """Write key (B, Hkv, L, D) and value (B, Hkv, L, Dv) of the next L positions. Return the last ``num_kept + L`` as views.

        ``advance`` counts the positions. Until then, another ``append`` overwrites them.
        """
        L = key.shape[2]
        kept = self.num_kept
        pair = self._pair if self.length else None  # a first pass that failed may have left tensors of another shape
        check_room(self.length, L, self.capacity)
        for name, new, old in zip(("key", "value"), (key, value), pair or (key, value), strict=True):
            _check_like(name, new, old)
        if pair is not None and self.length - kept < self._start:
            raise ValueError(f"cache cannot go back to length {self.length}: window={self.window} has dropped earlier keys")
        if pair is None or self.length + L - self._start > pair[0].shape[2]:
            self._make_room(key, value, kept + max(L, self.window or self.capacity))
        keys, values = self._read(self.length - kept, self.length + L)
        keys[:, :, kept:], values[:, :, kept:] = key, value
        return keys, values

    def advance(self, num_new: int) -> None:
        """Count the positions that were appended. Attention calls this at the end of its forward pass."""
        self.length += num_new

    def remember(self, key: Tensor, value: Tensor, source: Tensor) -> None:
        """Store the keys and values of a memory, for cross-attention, and the tensor (B, S, E) that they were projected from."""
        _check_like("key", key, key)
        self.memory, self._source = (key, value), source.detach()  # no graph is kept alive

    def recall(self, source: Tensor) -> KeyAndValue | None:
        """Return the keys and values of the memory, or None if they have to be projected from ``source``.

        They are kept for the same tensor, and after ``reorder`` for any tensor with their (B, S). The values of tensors are not read.
        """
        if self.memory is None or source.shape[:2] != (self.memory[0].shape[0], self.memory[0].shape[2]):
            return None
        is_known = self._source is None or torch.compiler.is_compiling() or source.is_set_to(self._source)
        return self.memory if is_known else None

    def forget(self) -> None:
        """Drop the memory."""
        self.memory = self._source = None

    def reorder(self, rows: Tensor) -> None:
        """Replace each row i by the row ``rows[i]``, for beam search. ``rows`` is int (B',)."""
        self._pair, self.memory = _rows(self._pair, rows), _rows(self.memory, rows)
        self._source = None

    def _read(self, start: int, stop: int) -> KeyAndValue:
        """The keys and values of the positions from ``start`` to ``stop``."""
        assert self._pair is not None
        slots = slice(start - self._start, stop - self._start)
        return self._pair[0][:, :, slots], self._pair[1][:, :, slots]

    def _make_room(self, key: Tensor, value: Tensor, size: int) -> None:
        """Allocate ``size`` slots and copy the ``num_kept`` newest positions to the first of them."""
        kept = self.num_kept
        shape = (*key.shape[:2], min(size, self.capacity))
        new = key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3])
        if kept:
            new[0][:, :, :kept], new[1][:, :, :kept] = self.held
        self._pair, self._start = new, self.length - kept


class StateCache(LayerCache):
    """The cache of a kernelised core: a sum over all positions. Its size does not grow.

    ``append`` returns only the new keys and values. The core adds them to ``state`` and gives the sum to ``write``.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, window=1)
        self._states: dict[int, KeyAndValue | None] = {}  # by the number of positions in the sum: the present and the next

    @property
    def state(self) -> KeyAndValue | None:
        """The pair (s, top), of shapes (B, Hkv, m, Dv + 1) and (B, Hkv, 1), with s = Σ_j φ(k_j) (v_jᵀ, 1) / exp(top). None before the first position."""
        return self._states.get(self.length)

    def append(self, key: Tensor, value: Tensor) -> KeyAndValue:
        """Return key (B, Hkv, L, D) and value (B, Hkv, L, Dv) of the next L positions, after checking that they fit."""
        check_room(self.length, key.shape[2], self.capacity)
        _check_like("key", key, key)
        if self.length and self.state is None:
            raise ValueError(f"cache cannot go back to length {self.length}: it holds the sum over later positions, too")
        if self.state is not None and self.state[0].shape[:2] != key.shape[:2]:
            raise ValueError(
                f"key must have the (B, Hkv) = {tuple(self.state[0].shape[:2])} of the cache, got {tuple(key.shape[:2])}"
            )
        return key, value

    def write(self, num_new: int, state: KeyAndValue) -> None:
        """Store the sum over the positions that ``advance(num_new)`` will count."""
        self._states = {self.length: self.state, self.length + num_new: state}

    def reorder(self, rows: Tensor) -> None:
        """Replace each row i by the row ``rows[i]``, for beam search. ``rows`` is int (B',)."""
        super().reorder(rows)
        self._states = {self.length: _rows(self.state, rows)}


class KVCache:
    """One ``LayerCache`` for each layer, and the padding and documents of the tokens that were read.

    Pass it to a model with each new piece of the input. ``key_mask`` and ``document_ids`` then describe the new tokens only,
    because the cache stores them for the earlier tokens. ``position_ids``, if given at all, must be given with each piece. The
    result equals one forward pass over the whole input, for left-padded prompts, pieces of any length and single tokens.

    Args:
        capacity: the largest number of tokens in a row, padding included.
        num_layers: the number of layers of the model.
        layers: their caches. Default: ``LayerCache(capacity)`` for each.

    Attributes:
        length: the number of positions that were read, padding included. It may be set back, to drop the newest positions.

    Raises:
        ValueError: as in ``LayerCache``, or document ids or position ids that are given for some tokens only.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)).eval()
    >>> ids, cache = torch.tensor([[1, 2, 3, 5, 7]]), KVCache(capacity=8, num_layers=2)
    >>> with torch.no_grad():
    ...     pieces = [model(piece, cache=cache) for piece in ids.split([3, 1, 1], dim=1)]
    ...     bool(torch.allclose(torch.cat(pieces, dim=1), model(ids), atol=1e-5))
    True
    """

    def __init__(self, capacity: int, num_layers: int, layers: Iterable[LayerCache] = ()) -> None:
        _check_count("num_layers", num_layers, "layers")
        self.layers = tuple(layers) or tuple(LayerCache(capacity) for _ in range(num_layers))
        self.capacity, self.length = capacity, 0
        self.key_mask: Tensor | None = None  # (B, length), or longer after a failed pass; None without padding
        self.document_ids: Tensor | None = None
        self._has_positions = False  # whether ``position_ids`` were given for the earlier tokens

    def join(
        self, ids: Tensor, key_mask: Tensor | None, document_ids: Tensor | None, position_ids: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return ``key_mask`` and ``document_ids`` of the earlier and the new tokens: (B, length + L) each, or None.

        A model calls this before its blocks read the new tokens ``ids`` (B, L), and ``advance`` afterwards.
        """
        if isinstance(self.length, Tensor):  # set back by the caller; each layer would advance a shared tensor in place
            self.length = int(self.length)
        check_room(self.length, ids.shape[1], self.capacity)
        for layer in self.layers:
            layer.length = self.length  # a failed pass may have advanced some layers
            if not self.length:
                layer.forget()
        for name, tensor in (("key_mask", key_mask), ("document_ids", document_ids)):
            if tensor is not None and tensor.shape != ids.shape:
                raise ValueError(f"{name} must describe the new tokens, (B, L) = {tuple(ids.shape)}, got {tuple(tensor.shape)}")
        if self.length and (document_ids is None) != (self.document_ids is None):
            raise ValueError(
                "document_ids must be given for all tokens or for none; the earlier tokens in the cache differ from these"
            )
        if self.length and (position_ids is not None) != self._has_positions:
            raise ValueError("position_ids must be given with each piece or with none; the earlier tokens in the cache differ")
        self._has_positions = position_ids is not None
        if self.length and (key_mask is not None or self.key_mask is not None):
            old = ids.new_ones(ids.shape[0], self.length, dtype=torch.bool) if self.key_mask is None else self.key_mask
            new = torch.ones_like(ids, dtype=torch.bool) if key_mask is None else key_mask
            key_mask = torch.cat((old[:, : self.length], new), dim=1)
        if self.length and document_ids is not None and self.document_ids is not None:
            document_ids = torch.cat((self.document_ids[:, : self.length], document_ids), dim=1)
        self.key_mask, self.document_ids = key_mask, document_ids
        return key_mask, document_ids

    def advance(self, num_new: int) -> None:
        """Count the new tokens, after all layers have read them."""
        self.length += num_new

    def reorder(self, rows: Tensor) -> None:
        """Replace each row i by the row ``rows[i]`` in every layer, for beam search. ``rows`` is int (B',)."""
        for layer in self.layers:
            layer.length = self.length  # as in ``join``
            layer.reorder(rows)
        self.key_mask = None if self.key_mask is None else self.key_mask.index_select(0, rows)
        self.document_ids = None if self.document_ids is None else self.document_ids.index_select(0, rows)


def _rows(pair: KeyAndValue | None, rows: Tensor) -> KeyAndValue | None:
    return None if pair is None else (pair[0].index_select(0, rows), pair[1].index_select(0, rows))


def _check_count(name: str, number: int, unit: str) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name} must be a positive whole number of {unit}, got {number!r}")


def check_room(length: int, num_new: int, capacity: int) -> None:
    """Raise a ValueError if the new positions do not fit, before anything is written."""
    if length + num_new > capacity:
        raise ValueError(f"cache has capacity for {capacity} positions: {length} are taken, {num_new} more do not fit")


def _check_like(name: str, new: Tensor, old: Tensor) -> None:
    if new.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires grad, but a cache is for inference: call under torch.no_grad()")
    expected = (*old.shape[:2], old.shape[3])
    got = (*new.shape[:2], new.shape[3])
    if got != expected or new.dtype != old.dtype or new.device != old.device:
        raise ValueError(
            f"{name} must fit the cache, (B, Hkv, D) = {expected} {old.dtype} on {old.device}, got {got} {new.dtype} on {new.device}"
        )
