"""``generate``: what a model writes, over any causal or encoder–decoder model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minitx.generation.compiled import CompiledDecoder
from minitx.generation.filters import (
    apply_temperature,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repeats,
    row_uniforms,
)
from minitx.generation.reader import Reader, eos_ids, has_source, of_config
from minitx.generation.search import beam_search, token_by_token
from minitx.nn import KVCache


@torch.no_grad()
def generate(
    model: nn.Module | CompiledDecoder,
    input_ids: Tensor,
    *,
    key_mask: Tensor | None = None,
    decoder_input_ids: Tensor | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    num_beams: int = 1,
    length_penalty: float = 0.6,
    stop: Iterable[int] | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    context: int | None = None,
    on_token: Callable[[int, int], object] | None = None,
) -> list[Tensor]:
    """The ids that ``model`` writes after each row: greedy, sampled (``temperature`` > 0) or by beam search.

    Beam search keeps the ``num_beams`` likeliest continuations and returns the answer with the largest
    log P(Y) / lp(Y) (``length_norm``; |Y| counts the stop token) among those that were stopped or cut; it ends where
    nothing still open could become better.

    Args:
        model: in eval mode; a causal model as ``DecoderLM``, or one with ``encode`` as ``EncoderDecoder``; for one text a row
            with a cache also a ``CompiledDecoder``.
        input_ids: int (B, L): the prompts, or the sources of an encoder–decoder.
        key_mask: bool (B, L), True = real token; prompts are padded on the left.
        decoder_input_ids: int (B, T), how an encoder–decoder's answers begin; default ``config.bos_id``.
        max_new_tokens: the longest answer; default 256, or what a table of positions leaves room for.
        temperature: 0 takes the likeliest id, else logits are divided by it and an id is drawn.
        top_k, top_p, min_p: filters of sampling, None for off.
        repetition_penalty: on ids of the prompt and the answer (an encoder–decoder: of the answer), 1 for off.
        num_beams: 1 for no beam search. length_penalty: α of beam search; 0.6 as in Vaswani et al. 2017, §6.1.
        stop: ids that end an answer; default ``config.eos_id``, if there is one.
        generator: seeds one stream of draws a row: a row's answer does not depend on the others. Default torch's global one.
        context: the most tokens of a causal model's text to look back on; where it grows longer, the older half is forgotten
            and the rest read anew, in positions that the model was trained on. None: everything is kept.
        use_cache: keep keys and values, else the whole text is read again for each token; the same ids.
        on_token: called with (row, id) for each id of the answers at once; with beams, when the search is done.

    Returns:
        B tensors of new ids, without the stop token: shorter than ``max_new_tokens`` exactly where a row was stopped.

    Raises:
        ValueError: an argument out of range, one that would have no effect, or inputs that the model has no room for.
        FloatingPointError: logits that are NaN or infinite.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)).eval()
    >>> [answer.shape for answer in generate(model, torch.tensor([[1, 2, 3], [5, 7, 2]]), max_new_tokens=4)]
    [torch.Size([4]), torch.Size([4])]
    """
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    model, start = _opened(model, num_beams, use_cache)
    _check_choice(model, max_new_tokens, temperature, filters, num_beams, length_penalty)
    prompt, prompt_mask = _prompt(model, input_ids, key_mask, decoder_input_ids)
    max_new_tokens = _fitting(model, prompt.shape[1], max_new_tokens, context)
    capacity = prompt.shape[1] + max_new_tokens - 1
    reader = Reader(model, input_ids, key_mask, capacity if use_cache else None, context, start)
    logits = reader.read(prompt, prompt_mask)
    seen = None if repetition_penalty == 1.0 else _seen(prompt, prompt_mask, logits)
    stop_ids = _stop_ids(model, stop, logits)

    def penalised(logits: Tensor, seen: Tensor | None) -> Tensor:
        return logits if seen is None else penalise_repeats(logits, seen, repetition_penalty)

    if num_beams > 1:
        answers = beam_search(reader, logits, seen, penalised, stop_ids, max_new_tokens, num_beams, length_penalty)
        for row, answer in enumerate(answers):
            for token in answer.tolist() if on_token is not None else ():
                on_token(row, token)  # type: ignore[misc]
        return answers
    uniforms = row_uniforms(len(prompt), max_new_tokens, generator) if temperature > 0.0 else None

    def choose(logits: Tensor, step: int) -> Tensor:
        logits = penalised(logits, seen)
        return logits.argmax(-1) if uniforms is None else draw(_filtered(logits, temperature, **filters), uniforms[:, step])  # type: ignore[arg-type]

    return token_by_token(reader, logits, seen, choose, stop_ids, max_new_tokens, on_token)


def _opened(
    model: nn.Module | CompiledDecoder, num_beams: int, use_cache: bool
) -> tuple[nn.Module, Callable[[KVCache], Callable[[Tensor], Tensor]] | None]:
    """The model itself, and what reads its tokens after the prompt if it is compiled."""
    if not isinstance(model, CompiledDecoder):
        return model, None
    if num_beams != 1 or not use_cache:
        raise ValueError(f"a CompiledDecoder writes one text a row from a cache, got {num_beams=}, {use_cache=}")
    return model.model, model.start


def _filtered(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> Tensor:
    logits = apply_temperature(logits, temperature)
    logits = logits if top_k is None else keep_top_k(logits, top_k)
    logits = logits if top_p is None else keep_top_p(logits, top_p)
    return logits if min_p is None else keep_min_p(logits, min_p)


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
    if decoder_input_ids is None:
        bos_id = of_config(model, "bos_id")
        if bos_id is None:
            raise ValueError("decoder_input_ids=None: the config has no bos_id with which an answer could begin")
        return input_ids.new_full((len(input_ids), 1), bos_id), None
    if decoder_input_ids.dim() != 2 or len(decoder_input_ids) != len(input_ids) or not decoder_input_ids.shape[1]:
        raise ValueError(
            f"decoder_input_ids must have shape (B, T) = ({len(input_ids)}, T), got {tuple(decoder_input_ids.shape)}"
        )
    return decoder_input_ids, None


def _fitting(model: nn.Module, length: int, max_new_tokens: int | None, context: int | None) -> int:
    """``max_new_tokens`` if it fits behind ``length`` tokens, or its default; the last new token is never read."""
    is_table, max_len = of_config(model, "position") == "learned", of_config(model, "max_len")
    if context is not None:
        if has_source(model):
            raise ValueError(f"context={context} is for causal models: an encoder-decoder forgets nothing")
        if isinstance(context, bool) or not isinstance(context, int) or context < 1:
            raise ValueError(f"context={context} must be a positive whole number")
        if is_table and context > max_len:
            raise ValueError(f"context={context}: the position table ends at max_len={max_len}")
    if context is not None or not is_table:
        return max_new_tokens or 256
    room, end = max_len - length + 1, f"the position table ends at max_len={max_len}"
    if room < 1:
        name = "decoder_input_ids" if has_source(model) else "input_ids"
        raise ValueError(f"{name} has {length} tokens a row, but {end}")
    if max_new_tokens is not None and max_new_tokens > room:
        raise ValueError(f"max_new_tokens={max_new_tokens} after {length} tokens: {end}, which leaves room for {room}")
    return max_new_tokens or min(room, 256)


def _check_choice(
    model: nn.Module,
    max_new_tokens: int | None,
    temperature: float,
    filters: dict[str, Any],
    num_beams: int,
    length_penalty: float,
) -> None:
    if model.training:
        raise ValueError("model is in training mode, where dropout is active: call model.eval() first")
    for name, number in (("max_new_tokens", max_new_tokens), ("num_beams", num_beams)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number} must be a positive whole number")
    if not 0.0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature} must be zero (greedy) or a positive number")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty} must be a finite number")
    if num_beams > 1 and temperature > 0.0:
        raise ValueError(f"num_beams={num_beams} with temperature={temperature}: beam search draws nothing; set temperature=0")
    for name, value in filters.items():
        if value is not None and temperature == 0.0:
            raise ValueError(f"{name}={value} has no effect without sampling: set temperature above 0")


def _seen(prompt: Tensor, prompt_mask: Tensor | None, logits: Tensor) -> Tensor:
    """bool (B, V): the ids of the prompt's real tokens."""
    counts = torch.zeros(logits.shape, dtype=torch.long, device=logits.device)
    real = torch.ones_like(prompt) if prompt_mask is None else prompt_mask.long()
    return counts.scatter_add(1, prompt.long(), real) > 0


def _stop_ids(model: nn.Module, stop: Iterable[int] | None, logits: Tensor) -> Tensor:
    if stop is None:
        stop = eos_ids(model)
    ids, V = list(stop), logits.shape[-1]
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or not 0 <= id < V:
            raise ValueError(f"stop must be ids in [0, {V}), got {id!r}")
    return torch.tensor(ids, dtype=torch.long, device=logits.device)
