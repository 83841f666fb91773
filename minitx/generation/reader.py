"""``Reader``: feed tokens to a model, with or without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minitx.nn.models import TransformerModel


class Reader:
    """Feed the next ids to a model and return its logits.

    Earlier ids are kept in a cache. They are read again if ``capacity`` is None or the model has no ``make_cache``. When a text becomes longer than ``context``, only the
    newer half is kept and read again.
    """

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        key_mask: Tensor | None,
        capacity: int | None,
        context: int | None = None,
    ) -> None:
        self.model, self.capacity, self.context = model, capacity, context
        self.memory = model.encode(input_ids, key_mask=key_mask) if has_source(model) else None  # type: ignore[operator]
        self.source_mask = key_mask if has_source(model) else None
        self.cache: Any = None
        self.ids: Tensor | None = None  # the ids that the model sees, and their key mask
        self.key_mask: Tensor | None = None

    def read(self, ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Read ids (B, L) and return the logits (B, V) of the next token, in at least float32. ``key_mask``: of the prompt."""
        view, view_mask, kept = ids, key_mask, self.context or 0
        if self.ids is not None:
            view, kept = torch.cat((self.ids, ids), dim=1), max(kept // 2, 1)
            view_mask = None if self.key_mask is None else F.pad(self.key_mask, (0, ids.shape[1]), value=True)
        forgets = self.context is not None and view.shape[1] > self.context
        if forgets:
            view, view_mask = view[:, -kept:], None if view_mask is None else view_mask[:, -kept:]
        self.ids, self.key_mask = view, view_mask
        if self.cache is None or forgets:
            ids, key_mask, self.cache = view, view_mask, self._new_cache()
        last = self._forward(ids, key_mask)
        last = last.to(torch.promote_types(last.dtype, torch.float32))
        if not bool(torch.isfinite(last.amax(dim=-1)).all()):
            raise FloatingPointError("the model's logits are not finite")
        return last

    def _forward(self, ids: Tensor, key_mask: Tensor | None) -> Tensor:
        options: dict[str, Any] = {} if self.cache is None else {"cache": self.cache}
        if self.memory is not None:
            return last_logits(self.model, None, ids, key_mask=self.source_mask, memory=self.memory, **options)
        if key_mask is not None:
            options["key_mask"] = key_mask
        return last_logits(self.model, ids, **options)

    def _new_cache(self) -> Any:
        make: Any = getattr(self.model, "make_cache", None)
        if self.capacity is None or make is None:
            return None
        return make(min(self.capacity, self.context or self.capacity))

    def reorder(self, rows: Tensor) -> None:
        """Replace each row i by the row ``rows[i]``."""
        if self.cache is not None:
            self.cache.reorder(rows)
        for name in ("memory", "source_mask", "ids", "key_mask"):
            kept = getattr(self, name)
            setattr(self, name, None if kept is None else kept.index_select(0, rows))


def last_logits(model: nn.Module, *args: Any, **options: Any) -> Tensor:
    """Return the logits (B, V) of the last position. The head is computed for this position only."""
    if not isinstance(model, TransformerModel):
        logits = model(*args, **options)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != args[-1].shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(f"model must return logits (B, L, V) for input_ids {tuple(args[-1].shape)}, got {got}")
        return logits[:, -1]
    hidden = model(*args, **options, return_hidden=True)
    return model.head(hidden[:, -1])  # type: ignore[operator]


def of_config(model: nn.Module, name: str) -> Any:
    """Return a field of the model's config, or None if it does not exist."""
    return getattr(getattr(model, "config", None), name, None)


def eos_ids(model: nn.Module) -> tuple[int, ...]:
    """Return the ids that end a text according to the model's config."""
    found = of_config(model, "eos_id")
    return tuple(found) if isinstance(found, list | tuple) else (() if found is None else (found,))


def has_source(model: nn.Module) -> bool:
    """Return whether the model is an encoder–decoder."""
    return hasattr(model, "encode")
