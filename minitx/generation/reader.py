"""``Reader``: what ``generate`` and ``beam_search`` know of the model, its prompts and its cache."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minitx.config.schema import stated
from minitx.nn.functional import require_tensor
from minitx.nn.masks import require_bool
from minitx.nn.models import TransformerModel
from minitx.nn.rules import MASKS_PAGE


class Reader:
    """The texts that a model continues, and its logits for their next tokens.

    Earlier ids are kept in a cache. They are read again without ``use_cache``, or if the model has no ``make_cache``. When a text
    becomes longer than ``context``, only the newer half is kept and read again.

    Args:
        See ``generate``.

    Attributes:
        logits: (B, V), of the next token, in at least float32.
        is_finite: a bool on the device: whether all logits are finite. The caller reads it together with the ids.
        seen: bool (B, V), True for the ids of a text's real tokens.
        stop: the ids that end a text.
        max_new_tokens: the argument, or its default.
    """

    def __init__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        *,
        key_mask: Tensor | None,
        decoder_input_ids: Tensor | None,
        max_new_tokens: int | None,
        stop: Iterable[int] | None,
        context: int | None,
        use_cache: bool,
    ) -> None:
        _check_model(model)
        prompt, prompt_mask = _prompt(model, input_ids, key_mask, decoder_input_ids)
        self.model, self.context, length = model, context, prompt.shape[1]
        self.max_new_tokens = _fitting(model, length, max_new_tokens, context)
        self.make_cache: Any = getattr(model, "make_cache", None) if use_cache else None
        self.capacity = min(length + self.max_new_tokens - 1, context or sys.maxsize)
        self.memory = model.encode(input_ids, key_mask=key_mask) if has_source(model) else None  # type: ignore[operator]
        self.source_mask = key_mask if has_source(model) else None
        self.ids, self.key_mask = prompt, prompt_mask  # the context of the model
        self.logits = self._read_all(context or length)
        real = torch.ones_like(prompt, dtype=torch.long) if prompt_mask is None else prompt_mask.long()
        counts = torch.zeros(self.logits.shape, dtype=torch.long, device=self.logits.device)
        self.seen = counts.scatter_add(1, prompt.long(), real) > 0
        self.stop = _stop_ids(model, stop, self.logits.shape[-1])

    def read(self, tokens: Tensor) -> None:
        """Continue each text with one of ``tokens`` (B,)."""
        ids = tokens.unsqueeze(1)
        self.seen.scatter_(1, ids, True)
        self.ids = torch.cat((self.ids, ids), dim=1)
        if self.key_mask is not None:
            self.key_mask = F.pad(self.key_mask, (0, 1), value=True)
        if self.context is not None and self.ids.shape[1] > self.context:
            self.logits = self._read_all(max(self.context // 2, 1))
        elif self.cache is None:
            self.logits = self._read_all(self.ids.shape[1])
        else:
            self.logits = self._logits(ids, None)

    def _read_all(self, kept: int) -> Tensor:
        """Read the last ``kept`` ids of each text, and forget the others. Return the logits."""
        self.ids, self.key_mask = self.ids[:, -kept:], None if self.key_mask is None else self.key_mask[:, -kept:]
        self.cache = None if self.make_cache is None else self.make_cache(self.capacity)
        return self._logits(self.ids, self.key_mask)

    def _logits(self, ids: Tensor, key_mask: Tensor | None) -> Tensor:
        """The logits (B, V) of the last position. In our models, the head is computed for this position only."""
        args: tuple[Tensor | None, ...] = (ids,)
        model, options = self.model, {"cache": self.cache, "key_mask": key_mask}
        if self.memory is not None:
            args, options = (None, ids), {**options, "key_mask": self.source_mask, "memory": self.memory}
        arguments = {name: value for name, value in options.items() if value is not None}
        if isinstance(model, TransformerModel):
            last = model.head(model(*args, **arguments, return_hidden=True)[:, -1])  # type: ignore[operator]
        else:
            logits = model(*args, **arguments)
            if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
                got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                raise TypeError(f"model must return logits (B, L, V) for input_ids {tuple(ids.shape)}, got {got}")
            last = logits[:, -1]
        last = last.to(torch.promote_types(last.dtype, torch.float32))
        self.is_finite = torch.isfinite(last.amax(dim=-1)).all()
        return last

    def reorder(self, rows: Tensor) -> None:
        """Replace each row i by the row ``rows[i]``."""
        if self.cache is not None:
            self.cache.reorder(rows)
        for name in ("memory", "source_mask", "ids", "key_mask", "seen"):
            kept = getattr(self, name)
            setattr(self, name, None if kept is None else kept.index_select(0, rows))


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if hasattr(model, "prepare_inputs_for_generation"):
        raise TypeError(f"model is a Hugging Face model, {type(model).__name__}: call its own generate()")
    kind = of_config(model, "architecture")
    if kind not in (None, "decoder", "encoder_decoder"):
        raise ValueError(f"model must be a decoder or an encoder-decoder, got {type(model).__name__} with architecture={kind}")
    if model.training:
        raise ValueError("model is in training mode, with dropout active: call model.eval() first")


def check_positive(name: str, number: int | None) -> None:
    """Raise a ValueError unless ``number`` is None or a positive integer."""
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ValueError(f"{name}={number} must be a positive integer")


def _prompt(
    model: nn.Module, input_ids: Tensor, key_mask: Tensor | None, decoder_input_ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the ids to continue, and their key mask."""
    require_tensor("input_ids", input_ids)
    if decoder_input_ids is not None:
        require_tensor("decoder_input_ids", decoder_input_ids)
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids must have shape (B, L) with B >= 1 and L >= 1, got {tuple(input_ids.shape)}")
    if key_mask is not None:
        require_bool("key_mask", key_mask)
        if key_mask.shape != input_ids.shape:
            expected = f"the shape of input_ids, {tuple(input_ids.shape)}"
            raise ValueError(f"key_mask must have {expected}, got {tuple(key_mask.shape)} ({MASKS_PAGE})")
    if not has_source(model):
        if decoder_input_ids is not None:
            raise ValueError("decoder_input_ids can only be used with an encoder-decoder; this model has no encode()")
        if key_mask is not None and not bool(key_mask[:, -1].all()):
            raise ValueError(f"key_mask must be True in the last column: pad prompts on the left ({MASKS_PAGE})")
        return input_ids, key_mask
    rows, bos_id = len(input_ids), of_config(model, "bos_id")
    if decoder_input_ids is None:
        if bos_id is None:
            raise ValueError("decoder_input_ids=None needs bos_id in the config, the first token of the text")
        return input_ids.new_full((rows, 1), bos_id), None
    if decoder_input_ids.dim() != 2 or len(decoder_input_ids) != rows or not decoder_input_ids.shape[1]:
        raise ValueError(f"decoder_input_ids must have shape (B, T) = ({rows}, T), got {tuple(decoder_input_ids.shape)}")
    return decoder_input_ids, None


def _fitting(model: nn.Module, length: int, max_new_tokens: int | None, context: int | None) -> int:
    """Return ``max_new_tokens`` or its default. Raise a ValueError if the position table is too short.

    The last new token needs no position, because the model does not read it.
    """
    check_positive("max_new_tokens", max_new_tokens)
    check_positive("context", context)
    if context is not None and has_source(model):
        raise ValueError(f"context={context} cannot be used with an encoder-decoder, only with a causal model")
    max_len = longest_of(model)
    if context is not None:
        if context > max_len:
            raise ValueError(f"context={context} must be at most max_len={max_len}")
        return max_new_tokens or 256
    most = max_len - length + 1
    if most < (max_new_tokens or 1):
        name = "decoder_input_ids" if has_source(model) else "input_ids"
        raise ValueError(f"{name} of {length} tokens and max_new_tokens={max_new_tokens} do not fit into max_len={max_len}")
    return max_new_tokens or min(most, 256)


def _stop_ids(model: nn.Module, stop: Iterable[int] | None, V: int) -> frozenset[int]:
    if stop is None:  # GPT-2's config names 50256 for every vocabulary
        return frozenset(id for id in eos_ids(model) if id < V)
    if not isinstance(stop, Iterable):
        raise TypeError(f"stop must be a list of ids, got {stop!r}")
    ids = list(stop)
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < V:
            raise ValueError(f"stop must contain ids from 0 to {V - 1}, got {id!r}")
    return frozenset(ids)


def of_config(model: nn.Module, name: str) -> Any:
    """Return a field of the model's config, or None if it does not exist."""
    return stated(getattr(model, "config", None), name)


def longest_of(model: nn.Module) -> int:
    """Return the number of tokens that the model's learned positions allow, or ``sys.maxsize`` without learned positions."""
    max_len = of_config(model, "max_len") if of_config(model, "position") == "learned" else None
    return sys.maxsize if max_len is None else max_len


def eos_ids(model: nn.Module) -> tuple[int, ...]:
    """Return the ids that end a text according to the model's config."""
    ids = of_config(model, "eos_id")
    return tuple(ids) if isinstance(ids, list | tuple) else (() if ids is None else (ids,))


def has_source(model: nn.Module) -> bool:
    """Return whether the model is an encoder–decoder."""
    return hasattr(model, "encode")
