"""How a model reads on: its cache, its memory of a source, and what it forgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minitx.nn import KVCache
from minitx.nn.models import TransformerModel


class Reader:
    """Hands a model the next ids of each row and remembers what it has read: in a cache, or (``capacity=None``) as ids.

    With more than ``context`` ids, the older half is forgotten and what is left is read anew. ``start`` makes of the cache
    of a prompt what reads the tokens after it, one a row; default the model itself.
    """

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        key_mask: Tensor | None,
        capacity: int | None,
        context: int | None = None,
        start: Callable[[KVCache], Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self.model, self.capacity, self.context, self.start = model, capacity, context, start
        self.memory = model.encode(input_ids, key_mask=key_mask) if has_source(model) else None  # type: ignore[operator]
        self.source_mask = key_mask if has_source(model) else None
        self.cache: KVCache | None = None
        self.step: Callable[[Tensor], Tensor] | None = None
        self.ids: Tensor | None = None  # what the model has in view, and its padding
        self.key_mask: Tensor | None = None

    def read(self, ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """ids (B, L) -> logits (B, V) of what follows the last, in float32 at least; ``key_mask`` is the prompt's."""
        view, view_mask, kept = ids, key_mask, self.context or 0
        if self.ids is not None:
            view, kept = torch.cat((self.ids, ids), dim=1), max(kept // 2, 1)
            view_mask = None if self.key_mask is None else F.pad(self.key_mask, (0, ids.shape[1]), value=True)
        forgets = self.context is not None and view.shape[1] > self.context
        if forgets:
            view, view_mask = view[:, -kept:], None if view_mask is None else view_mask[:, -kept:]
        self.ids, self.key_mask = view, view_mask
        if self.cache is None or forgets:
            ids, key_mask, self.cache, self.step = view, view_mask, self._new_cache(), None
        elif self.start is not None and self.step is None:
            self.step = self.start(self.cache)
        last = self._forward(ids, key_mask) if self.step is None else self.step(ids)
        last = last.to(torch.promote_types(last.dtype, torch.float32))
        if not bool(torch.isfinite(last.amax(dim=-1)).all()):
            raise FloatingPointError("the model's logits are not finite")
        return last

    def _forward(self, ids: Tensor, key_mask: Tensor | None) -> Tensor:
        options = {} if self.cache is None else {"cache": self.cache}
        if self.memory is None:
            return last_logits(self.model, ids, key_mask=key_mask, **options)
        return last_logits(self.model, None, ids, key_mask=self.source_mask, memory=self.memory, **options)

    def _new_cache(self) -> KVCache | None:
        if self.capacity is None:
            return None
        capacity = min(self.capacity, self.context or self.capacity)
        if self.start is None and isinstance(self.model, TransformerModel):
            return self.model.make_cache(capacity)
        return KVCache(capacity, num_cached_layers(self.model))  # a static cache is filled from one that keeps all keys

    def reorder(self, rows: Tensor) -> None:
        """Row i becomes the old row ``rows[i]``."""
        if self.cache is not None:
            self.cache.reorder(rows)
        for name in ("memory", "source_mask", "ids", "key_mask"):
            kept = getattr(self, name)
            setattr(self, name, None if kept is None else kept.index_select(0, rows))


def last_logits(model: nn.Module, *args: Any, **options: Any) -> Tensor:
    """(B, V) after the last position; of a prompt, the head, often the largest matrix, need not see the others."""
    if not isinstance(model, TransformerModel):
        return model(*args, **options)[:, -1]
    hidden, _ = model(*args, **options, return_extras=True)
    return model.head(hidden[:, -1])  # type: ignore[operator]


def num_cached_layers(model: nn.Module) -> int:
    """The decoder's layers."""
    config: Any = model.config
    return getattr(config, "decoder_layers", config.num_layers)


def of_config(model: nn.Module, name: str) -> Any:
    """A field of the model's config, or None where there is none."""
    return getattr(getattr(model, "config", None), name, None)


def eos_ids(model: nn.Module) -> tuple[int, ...]:
    """The ids that end a text, as the model's config has them: none, one or several."""
    found = of_config(model, "eos_id")
    return tuple(found) if isinstance(found, list | tuple) else (() if found is None else (found,))


def has_source(model: nn.Module) -> bool:
    """Whether the model is an encoder–decoder, whose answers are to a source."""
    return hasattr(model, "encode")
