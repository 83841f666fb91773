"""``generate``: greedy decoding and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minitx.generation.begin import begin
from minitx.generation.sampler import Sampler, row_uniforms


@torch.no_grad()
def generate(
    model: nn.Module,
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
    """Generate a continuation of each prompt, token by token.

    Args:
        model: a causal model such as ``DecoderLM``, or an encoder–decoder such as ``EncoderDecoder``, in evaluation mode. Your own
            causal model is called as ``model(input_ids)`` and returns logits (B, L, V). It is called with ``key_mask=`` only if
            ``key_mask`` was given. If it has a method ``make_cache(capacity)``, it is also called with the result, ``cache=``, and
            then gets the new ids only. Beam search calls ``cache.reorder(rows)``, as in ``KVCache``.
        input_ids: int (B, L), the prompts, or the sources of an encoder–decoder.
        sampler: how the next id is chosen. Default: ``Sampler()``, which takes the most probable id.
        key_mask: bool (B, L), True = real token. Pad prompts on the left.
        decoder_input_ids: int (B, T), the first tokens of the target, for an encoder–decoder. Default: ``config.bos_id``.
        max_new_tokens: the largest number of new tokens. Default: 256, or fewer if a learned position table ends earlier.
        stop: ids that end a text. Default: ``config.eos_id``, if there is one.
        context: for a causal model, the largest number of tokens that it sees. When the text becomes longer, only the newer half is
            kept and read again from position 0. Padding counts: a row that is padded forgets earlier than it would alone. Default: no
            limit.
        generator: for sampling. Each row has its own random numbers, so that it does not depend on the other rows. Default: torch's
            global generator.
        use_cache: keep keys and values, if the model has ``make_cache``. Without a cache, the whole text is read again for each
            token, with the same result.
        on_token: a function that is called with (row, id) for each new token.

    Returns:
        B tensors of new ids, without the stop token.

    Raises:
        TypeError: a model of Hugging Face, which has its own ``generate``, or a model that does not return logits (B, L, V).
        ValueError: an argument that does not fit the model or is out of range.
        FloatingPointError: the logits are NaN or infinite.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)).eval()
    >>> prompts = torch.tensor([[1, 2, 3], [5, 7, 2]])
    >>> [answer.shape for answer in generate(model, prompts, sampler=Sampler(temperature=0.8), max_new_tokens=4)]
    [torch.Size([4]), torch.Size([4])]
    """
    sampler = Sampler() if sampler is None else sampler
    prompt: dict[str, Any] = {"key_mask": key_mask, "decoder_input_ids": decoder_input_ids, "context": context}
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
            if is_open[row]:  # a finished row stays in the batch, but its tokens are not used
                answers[row].append(token)
                if on_token is not None:
                    on_token(row, token)
        if step + 1 == max_new_tokens or not any(is_open):
            break
        seen.scatter_(1, tokens.unsqueeze(1), True)
        logits = reader.read(tokens.unsqueeze(1))
    return [torch.tensor(answer, dtype=torch.long, device=logits.device) for answer in answers]
