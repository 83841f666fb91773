"""What ``generate`` and ``beam_search`` start from: checked arguments, and the logits after the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitx.generation.reader import Reader, eos_ids, has_source, of_config
from minitx.nn import KVCache


class Begun(NamedTuple):
    """A prompt that was read."""

    reader: Reader
    logits: Tensor  # (B, V), of the first new id
    seen: Tensor  # bool (B, V), the ids of the prompt's real tokens
    stop: frozenset[int]  # ids that end an answer
    max_new_tokens: int


def begin(
    model: nn.Module,
    input_ids: Tensor,
    *,
    key_mask: Tensor | None,
    decoder_input_ids: Tensor | None,
    max_new_tokens: int | None,
    stop: Iterable[int] | None,
    context: int | None,
    use_cache: bool,
    start: Callable[[KVCache], Callable[[Tensor], Tensor]] | None = None,
) -> Begun:
    """Check the arguments, which are those of ``generate``, and read the prompt; ``start`` as in ``Reader``."""
    kind = of_config(model, "architecture")
    if kind not in (None, "decoder", "encoder_decoder"):
        raise ValueError(
            f"model is a {type(model).__name__} (architecture={kind}), which writes no text: give a decoder or encoder-decoder"
        )
    if model.training:
        raise ValueError("model is in training mode, where dropout is active: call model.eval() first")
    prompt, prompt_mask = _prompt(model, input_ids, key_mask, decoder_input_ids)
    max_new_tokens = _fitting(model, prompt.shape[1], max_new_tokens, context)
    reader = Reader(model, input_ids, key_mask, prompt.shape[1] + max_new_tokens - 1 if use_cache else None, context, start)
    logits = reader.read(prompt, prompt_mask)
    real = torch.ones_like(prompt) if prompt_mask is None else prompt_mask.long()
    seen = torch.zeros(logits.shape, dtype=torch.long, device=logits.device).scatter_add(1, prompt.long(), real) > 0
    return Begun(reader, logits, seen, _stop_ids(model, stop, logits.shape[-1]), max_new_tokens)


def check_count(name: str, number: int | None) -> None:
    """Refuse what is neither None nor a positive whole number."""
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ValueError(f"{name}={number} must be a positive whole number")


def _prompt(
    model: nn.Module, input_ids: Tensor, key_mask: Tensor | None, decoder_input_ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What the answers continue, and its padding."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids must have shape (B, L) with a row and a token at least, got {tuple(input_ids.shape)}")
    if key_mask is not None and (key_mask.shape != input_ids.shape or key_mask.dtype != torch.bool):
        wanted = f"bool of the shape of input_ids, {tuple(input_ids.shape)}"
        raise ValueError(f"key_mask must be {wanted}, got {key_mask.dtype} {tuple(key_mask.shape)}")
    if not has_source(model):
        if decoder_input_ids is not None:
            raise ValueError("decoder_input_ids belong to an encoder-decoder, and this model has no encode()")
        if key_mask is not None and not bool(key_mask[:, -1].all()):
            raise ValueError("key_mask must be True in the last column: generation continues it, so pad prompts on the left")
        return input_ids, key_mask
    rows, bos_id = len(input_ids), of_config(model, "bos_id")
    if decoder_input_ids is None:
        if bos_id is None:
            raise ValueError("decoder_input_ids=None: the config has no bos_id with which an answer could begin")
        return input_ids.new_full((rows, 1), bos_id), None
    if decoder_input_ids.dim() != 2 or len(decoder_input_ids) != rows or not decoder_input_ids.shape[1]:
        raise ValueError(f"decoder_input_ids must have shape (B, T) = ({rows}, T), got {tuple(decoder_input_ids.shape)}")
    return decoder_input_ids, None


def _fitting(model: nn.Module, length: int, max_new_tokens: int | None, context: int | None) -> int:
    """``max_new_tokens`` if it fits behind ``length`` tokens, or its default; the last new token is never read."""
    check_count("max_new_tokens", max_new_tokens)
    check_count("context", context)
    if context is not None and has_source(model):
        raise ValueError(f"context={context} is for causal models: an encoder-decoder forgets nothing")
    if of_config(model, "position") != "learned":
        return max_new_tokens or 256
    max_len = of_config(model, "max_len")
    end = f"the position table ends at max_len={max_len}"
    if context is not None:
        if context > max_len:
            raise ValueError(f"context={context}: {end}")
        return max_new_tokens or 256
    room = max_len - length + 1
    if room < 1:
        name = "decoder_input_ids" if has_source(model) else "input_ids"
        raise ValueError(f"{name} has {length} tokens a row, but {end}")
    if max_new_tokens is not None and max_new_tokens > room:
        raise ValueError(f"max_new_tokens={max_new_tokens} after {length} tokens: {end}, which leaves room for {room}")
    return max_new_tokens or min(room, 256)


def _stop_ids(model: nn.Module, stop: Iterable[int] | None, V: int) -> frozenset[int]:
    ids = list(eos_ids(model) if stop is None else stop)
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < V:
            raise ValueError(f"stop must be ids in [0, {V}), got {id!r}")
    return frozenset(ids)
