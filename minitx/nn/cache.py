"""Keys and values kept between calls, so that decoding reads every token once.

The order in attention is projections → QK-norm → rotary → *cache* → backend: what lies in the cache is ready to be attended
to. A cache belongs to the caller, never to a module.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LayerCache:
    """What one layer has computed so far: keys (B, Hkv, capacity, D) and values (B, Hkv, capacity, Dv).

    Self-attention appends to it; cross-attention writes ``memory`` once and reads it ever after. The tensors are
    allocated at the first ``append``, in the shape, dtype and device of what arrives, and never again.

    Args:
        capacity: the largest number of positions.

    Raises:
        ValueError: a capacity below 1; more positions than ``capacity``; another batch, number of heads, width, dtype or
            device than before. RuntimeError: keys or values that require grad (the tensors are overwritten in place).

    >>> cache = LayerCache(capacity=8)
    >>> for length in (3, 1):
    ...     keys, values = cache.append(torch.ones(2, 1, length, 4), torch.ones(2, 1, length, 4))
    >>> cache.length, keys.shape
    (4, torch.Size([2, 1, 4, 4]))
    """

    def __init__(self, capacity: int) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"capacity must be a positive whole number of positions, got {capacity!r}")
        self.capacity, self.length = capacity, 0
        self.memory: tuple[Tensor, Tensor] | None = None
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """B, or 0 where nothing was read yet."""
        return 0 if self._keys is None else self._keys.shape[0]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key (B, Hkv, L, D) and value (B, Hkv, L, Dv) of the next L positions; returns all so far, as views."""
        if self._keys is None or self._values is None:
            room = (key.shape[0], key.shape[1], self.capacity)
            self._keys, self._values = key.new_zeros(*room, key.shape[-1]), value.new_zeros(*room, value.shape[-1])
        check_room(self.length, key.shape[2], self.capacity)
        for name, new, old in (("key", key, self._keys), ("value", value, self._values)):
            _check_like(name, new, old)
        start, self.length = self.length, self.length + key.shape[2]
        self._keys[:, :, start : self.length] = key
        self._values[:, :, start : self.length] = value
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    def remember(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of a memory, for cross-attention; returns them."""
        _check_like("key", key, key)
        self.memory = (key, value)
        return self.memory

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row ``rows[i]``, for beam search; ``rows`` is int (B',)."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        if self.memory is not None:
            self.memory = (self.memory[0].index_select(0, rows), self.memory[1].index_select(0, rows))


class KVCache:
    """One ``LayerCache`` a layer, with the padding and documents of what was read.

    Handed to a model with each new piece of the input. ``key_mask``, ``document_ids`` and ``position_ids`` then describe
    the new tokens alone; the cache remembers the earlier ones, so that left-padded prompts, uneven pieces of a prompt
    and single tokens all give what one whole forward gives.

    Args:
        capacity: the largest number of tokens in a row, padding included.
        num_layers: that of the model.

    Raises:
        ValueError: as in ``LayerCache``; documents that are given for some tokens only.

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
        """How many positions were read, padding included."""
        return self.layers[0].length

    def join(
        self, input_ids: Tensor, key_mask: Tensor | None, document_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """``key_mask`` and ``document_ids`` of the earlier and the new tokens together: (B, length + L) each, or None.

        A model calls this before its blocks read the new tokens, and ``keep`` or ``rewind`` after it.
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
            raise ValueError("document_ids must be given for all tokens or for none, and the cache was filled otherwise")
        if document_ids is not None and self.document_ids is not None:
            document_ids = torch.cat((self.document_ids, document_ids), dim=1)
        if key_mask is not None or self.key_mask is not None:
            B, L = input_ids.shape
            old = input_ids.new_ones(B, self.length, dtype=torch.bool) if self.key_mask is None else self.key_mask
            new = input_ids.new_ones(B, L, dtype=torch.bool) if key_mask is None else key_mask
            key_mask = torch.cat((old, new), dim=1)
        self._joined = key_mask, document_ids
        return self._joined

    def keep(self) -> None:
        """All layers have read the new tokens."""
        self._kept, (self.key_mask, self.document_ids) = self.length, self._joined

    def rewind(self) -> None:
        """Forget what some layers have read of new tokens, after a forward pass that failed."""
        for layer in self.layers:
            layer.length = self._kept

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row ``rows[i]``, in every layer: what beam search needs. ``rows`` is int (B',)."""
        for layer in self.layers:
            layer.reorder(rows)
        self.key_mask = None if self.key_mask is None else self.key_mask.index_select(0, rows)
        self.document_ids = None if self.document_ids is None else self.document_ids.index_select(0, rows)


class StaticCache(KVCache):
    """A cache whose tensors keep their shape and their place from token to token, as a CUDA graph wants them.

    What was read lies at the right end and moves one place to the left with each token; before it stands padding. So
    masks, windows, biases and positions count as they do for any left-padded text, with no case of their own. The price is
    one more reading and writing of the cache a token.

    ``fill`` takes over what an ordinary cache read of a prompt; then tokens come one at a time.

    Raises:
        ValueError: as in ``KVCache``; a capacity below 2; several tokens at once; documents; a token beyond ``capacity``
            (not noticed on a GPU or in a compiled step, where looking would stop the host: count before).

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)).eval()
    >>> prompt, static = KVCache(capacity=3, num_layers=2), StaticCache(capacity=8, num_layers=2)
    >>> with torch.no_grad():
    ...     _ = model(torch.tensor([[1, 2, 3]]), cache=prompt)
    ...     static.fill(prompt)
    ...     last = model(torch.tensor([[5]]), cache=static)
    ...     bool(torch.allclose(last, model(torch.tensor([[1, 2, 3, 5]]))[:, -1:], atol=1e-5))
    True
    """

    def __init__(self, capacity: int, num_layers: int) -> None:
        super().__init__(capacity, num_layers)
        if capacity < 2:
            raise ValueError(f"capacity of a static cache must be 2 at least, got {capacity}")
        self.layers = tuple(_StaticLayer(capacity) for _ in range(num_layers))

    def fill(self, cache: KVCache) -> None:
        """Take over what ``cache`` holds, into the tensors that are there already after the first time."""
        if cache.document_ids is not None:
            raise ValueError("a static cache holds no documents")
        check_room(cache.length, 0, self.capacity)
        for mine, theirs in zip(self.layers, cache.layers, strict=True):
            assert isinstance(mine, _StaticLayer)
            keys = mine.fill(theirs)
        real = keys.new_zeros(keys.shape[0], self.capacity, dtype=torch.bool)
        real[:, self.capacity - cache.length :] = True if cache.key_mask is None else cache.key_mask
        self.key_mask = real if self.key_mask is None else self.key_mask.copy_(real)

    def join(
        self, input_ids: Tensor, key_mask: Tensor | None, document_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """The padding of what is kept and of the new token, (B, capacity)."""
        if self.key_mask is None or input_ids.shape[1] != 1 or document_ids is not None:
            raise ValueError(
                "a static cache is filled from another first, then takes one token a row at a time, without documents"
            )
        if not (self.key_mask.is_cuda or torch.compiler.is_compiling()) and bool(self.key_mask[:, 0].any()):
            check_room(self.capacity, 1, self.capacity)
        new = torch.ones_like(self.key_mask[:, :1]) if key_mask is None else key_mask
        return self.key_mask.copy_(torch.cat((self.key_mask[:, 1:], new), dim=1)), None

    def keep(self) -> None:
        """Nothing changes: every token takes the place of another."""

    def rewind(self) -> None:
        """What was overwritten is lost: fill the cache again."""


class _StaticLayer(LayerCache):
    """Keys and values of the last ``capacity`` positions; masks see ``capacity - 1`` of them before each new one."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.length = capacity - 1

    def fill(self, other: LayerCache) -> Tensor:
        """Copy ``other`` to the right end; returns the keys."""
        if other._keys is None or other._values is None:
            raise ValueError("a static cache is filled from one that has read something")
        start = self.capacity - other.length
        for name in ("_keys", "_values"):
            theirs, mine = getattr(other, name), getattr(self, name)
            if mine is None:
                mine = theirs.new_zeros(*theirs.shape[:2], self.capacity, theirs.shape[3])
                setattr(self, name, mine)
            _check_like(name.removeprefix("_"), theirs, mine)
            mine[:, :, start:] = theirs[:, :, : other.length]
        assert self._keys is not None
        return self._keys

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """key (B, Hkv, 1, D) and value (B, Hkv, 1, Dv) of the next position; returns all, (B, Hkv, capacity, ·)."""
        assert self._keys is not None
        assert self._values is not None
        for name, new, kept in (("key", key, self._keys), ("value", value, self._values)):
            _check_like(name, new, kept)
            kept.copy_(torch.cat((kept[:, :, 1:], new), dim=2))
        return self._keys, self._values


def check_room(length: int, num_new: int, capacity: int) -> None:
    """Refuse more positions than there is room for, before anything was written."""
    if length + num_new > capacity:
        raise ValueError(f"cache has capacity for {capacity} positions: {length} are taken, {num_new} more do not fit")


def _check_like(name: str, new: Tensor, old: Tensor) -> None:
    if torch.is_grad_enabled() and new.requires_grad:
        raise RuntimeError(f"{name} requires grad, but a cache is for inference: call under torch.no_grad()")
    kept, got = ((t.shape[0], t.shape[1], t.shape[3]) for t in (old, new))
    if kept != got or (old.dtype, old.device) != (new.dtype, new.device):
        raise ValueError(
            f"{name} must fit what the cache holds, (B, Hkv, D) = {kept} {old.dtype} on {old.device}, "
            f"got {got} {new.dtype} on {new.device}"
        )
