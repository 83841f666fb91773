"""``generate``: one token after another, greedy or sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minitx.generation.begin import begin
from minitx.generation.compiled import CompiledDecoder
from minitx.generation.sampler import Sampler, row_uniforms


@torch.no_grad()
def generate(
    model: nn.Module | CompiledDecoder,
    input_ids: Tensor,
    *,
    sampler: Sampler | None = None,
    key_mask: Tensor | None = None,
    decoder_input_ids: Tensor | None = None,
    max_new_tokens: int | None = None,
    stop: Iterable[int] | None = None,
    context: int | None = None,
    generator: torch.Generator | None = None,
    use_cache: bool = True,
    on_token: Callable[[int, int], object] | None = None,
) -> list[Tensor]:
    """The ids that ``model`` writes after each row, greedy or sampled.

    Args:
        model: in eval mode; a causal model as ``DecoderLM``, or one with ``encode`` as ``EncoderDecoder``; with a cache also a
            ``CompiledDecoder``.
        input_ids: int (B, L): the prompts, or the sources of an encoder–decoder.
        sampler: how an id is chosen; default ``Sampler()``, the likeliest one.
        key_mask: bool (B, L), True = real token; prompts are padded on the left.
        decoder_input_ids: int (B, T), how an encoder–decoder's answers begin; default ``config.bos_id``.
        max_new_tokens: the longest answer; default 256, or what a table of positions leaves room for.
        stop: ids that end an answer; default ``config.eos_id``, if there is one.
        context: the most tokens of a causal model's text to look back on; where it grows longer, the older half is forgotten
            and the rest read anew, in positions that the model was trained on. None: everything is kept.
        generator: seeds one stream of draws a row: a row's answer does not depend on the others. Default torch's global one.
        use_cache: keep keys and values, else the whole text is read again for each token; the same ids.
        on_token: called with (row, id) for each id of the answers at once.

    Returns:
        B tensors of new ids, without the stop token: shorter than ``max_new_tokens`` exactly where a row was stopped.

    Raises:
        ValueError: an argument out of range, a model that writes no text, or inputs that the model has no room for.
        FloatingPointError: logits that are NaN or infinite.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)).eval()
    >>> prompts = torch.tensor([[1, 2, 3], [5, 7, 2]])
    >>> [answer.shape for answer in generate(model, prompts, sampler=Sampler(temperature=0.8), max_new_tokens=4)]
    [torch.Size([4]), torch.Size([4])]
    """
    sampler = Sampler() if sampler is None else sampler
    prompt: dict[str, Any] = {"key_mask": key_mask, "decoder_input_ids": decoder_input_ids, "context": context}
    if isinstance(model, CompiledDecoder):
        if not use_cache:
            raise ValueError("use_cache=False: a CompiledDecoder reads its tokens from a cache")
        prompt["start"], model = model.start, model.model
    reader, logits, seen, stop_ids, max_new_tokens = begin(
        model, input_ids, **prompt, max_new_tokens=max_new_tokens, stop=stop, use_cache=use_cache
    )
    uniforms = row_uniforms(len(logits), max_new_tokens, generator) if sampler.temperature > 0.0 else None
    answers: list[list[int]] = [[] for _ in logits]
    is_open = [True] * len(logits)
    for step in range(max_new_tokens):
        tokens = sampler.choose(logits, seen, None if uniforms is None else uniforms[:, step])  # (B,)
        for row, token in enumerate(tokens.tolist()):
            is_open[row] = is_open[row] and token not in stop_ids
            if is_open[row]:  # a row that was stopped is read on with the others, and what follows is dropped
                answers[row].append(token)
                if on_token is not None:
                    on_token(row, token)
        if step + 1 == max_new_tokens or not any(is_open):
            break
        seen.scatter_(1, tokens.unsqueeze(1), True)
        logits = reader.read(tokens.unsqueeze(1))
    return [torch.tensor(answer, dtype=torch.long, device=logits.device) for answer in answers]
