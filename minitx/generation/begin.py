"""The common first step of ``generate`` and ``beam_search``: check the arguments and read the prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minitx.generation.reader import Reader, eos_ids, has_source, of_config


class Begun(NamedTuple):
    """The state after the prompt has been read."""

    reader: Reader
    logits: Tensor  # (B, V), for the first new id
    seen: Tensor  # bool (B, V), True for the ids of the prompt's real tokens
    stop: frozenset[int]  # ids that end a text
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
) -> Begun:
    """Check the arguments of ``generate`` and read the prompt."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {type(model).__name__}")
    if hasattr(model, "prepare_inputs_for_generation"):
        raise TypeError(f"model is a Hugging Face model, {type(model).__name__}: call its own generate()")
    kind = of_config(model, "architecture")
    if kind not in (None, "decoder", "encoder_decoder"):
        raise ValueError(f"model must be a decoder or an encoder-decoder, got {type(model).__name__} with architecture={kind}")
    if model.training:
        raise ValueError("model is in training mode, in which dropout is active: call model.eval() first")
    prompt, prompt_mask = _prompt(model, input_ids, key_mask, decoder_input_ids)
    max_new_tokens = _fitting(model, prompt.shape[1], max_new_tokens, context)
    reader = Reader(model, input_ids, key_mask, prompt.shape[1] + max_new_tokens - 1 if use_cache else None, context)
    logits = reader.read(prompt, prompt_mask)
    real = torch.ones_like(prompt, dtype=torch.long) if prompt_mask is None else prompt_mask.long()
    seen = torch.zeros(logits.shape, dtype=torch.long, device=logits.device).scatter_add(1, prompt.long(), real) > 0
    return Begun(reader, logits, seen, _stop_ids(model, stop, logits.shape[-1]), max_new_tokens)


def check_count(name: str, number: int | None) -> None:
    """Raise a ValueError unless ``number`` is None or a positive integer."""
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise ValueError(f"{name}={number} must be a positive integer")


def _prompt(
    model: nn.Module, input_ids: Tensor, key_mask: Tensor | None, decoder_input_ids: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the ids to continue, and their key mask."""
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise ValueError(f"input_ids must have shape (B, L) with B >= 1 and L >= 1, got {tuple(input_ids.shape)}")
    if key_mask is not None and (key_mask.shape != input_ids.shape or key_mask.dtype != torch.bool):
        wanted = f"bool with the shape of input_ids, {tuple(input_ids.shape)}"
        raise ValueError(f"key_mask must be {wanted}, got {key_mask.dtype} {tuple(key_mask.shape)}")
    if not has_source(model):
        if decoder_input_ids is not None:
            raise ValueError("decoder_input_ids can only be used with an encoder-decoder; this model has no encode()")
        if key_mask is not None and not bool(key_mask[:, -1].all()):
            raise ValueError("key_mask must be True in the last column: pad prompts on the left")
        return input_ids, key_mask
    rows, bos_id = len(input_ids), of_config(model, "bos_id")
    if decoder_input_ids is None:
        if bos_id is None:
            raise ValueError("decoder_input_ids=None needs a bos_id in the config, as the first token of the text")
        return input_ids.new_full((rows, 1), bos_id), None
    if decoder_input_ids.dim() != 2 or len(decoder_input_ids) != rows or not decoder_input_ids.shape[1]:
        raise ValueError(f"decoder_input_ids must have shape (B, T) = ({rows}, T), got {tuple(decoder_input_ids.shape)}")
    return decoder_input_ids, None


def _fitting(model: nn.Module, length: int, max_new_tokens: int | None, context: int | None) -> int:
    """Return ``max_new_tokens`` or its default. Raise a ValueError if the position table is too short for it.

    The last new token needs no position, because the model does not read it.
    """
    check_count("max_new_tokens", max_new_tokens)
    check_count("context", context)
    if context is not None and has_source(model):
        raise ValueError(f"context={context} can only be used with a causal model, not with an encoder-decoder")
    if of_config(model, "position") != "learned":
        return max_new_tokens or 256
    max_len = of_config(model, "max_len")
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
    ids = list(stop)
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < V:
            raise ValueError(f"stop must contain ids from 0 to {V - 1}, got {id!r}")
    return frozenset(ids)
