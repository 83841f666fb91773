"""``generate`` and ``beam_search``: continue a text token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minitx.generation.reader import Reader, check_positive
from minitx.generation.sampler import Sampler, row_uniforms
from minitx.nn.transfer import to_device, to_host


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
            causal model is called as ``model(input_ids)`` and returns logits (B, L, V). ``key_mask=`` is passed only if it is not None.
            If the model has a method ``make_cache(capacity)``, its result is passed as ``cache=``, and later calls get the new ids
            only. Beam search calls ``cache.reorder(rows)``, as in ``KVCache``.
        input_ids: int (B, L), the prompts, or the sources of an encoder–decoder.
        sampler: chooses the next id. Default: ``Sampler()``: the most probable id.
        key_mask: bool (B, L), True = real token. Pad prompts on the left.
        decoder_input_ids: int (B, T), the first tokens of the target, for an encoder–decoder. Default: ``config.bos_id``.
        max_new_tokens: the largest number of new tokens. Default: 256, or fewer if a learned position table ends earlier.
        stop: ids that end a text. Default: ``config.eos_id``, if there is one.
        context: for a causal model, the largest number of tokens that it sees. When the text becomes longer, only the newer half is
            kept and read again from position 0. Padding counts, so a padded row loses tokens earlier than it would alone. Default: no
            limit.
        generator: for sampling. Each row has its own random numbers, so that it does not depend on the other rows. Default: torch's
            global generator.
        use_cache: keep keys and values, if the model has ``make_cache``. Without a cache, the whole text is read again for each
            token, with the same result.
        on_token: a function that is called with (row, id) for each new token.

    Returns:
        B tensors of new ids, without the stop token.

    Raises:
        TypeError: a Hugging Face model (use its ``generate``), a model that does not return logits (B, L, V), or a
            ``key_mask`` that is not bool.
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
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "context": context, "use_cache": use_cache}
    reader = Reader(model, input_ids, key_mask=key_mask, decoder_input_ids=decoder_input_ids, **options)
    max_new_tokens = reader.max_new_tokens
    uniforms = row_uniforms(len(input_ids), max_new_tokens, generator) if sampler.temperature > 0.0 else None
    answers: list[list[int]] = [[] for _ in input_ids]
    is_open = [True] * len(input_ids)
    for step in range(max_new_tokens):
        numbers = None if uniforms is None else uniforms[:, step]
        tokens, ids, is_finite = sampler.choose(reader.logits, reader.seen, numbers, reader.is_finite)
        check_finite(bool(is_finite))
        for row, token in enumerate(ids.tolist()):
            is_open[row] = is_open[row] and token not in reader.stop
            if is_open[row]:  # a finished row stays in the batch, but its tokens are not used
                answers[row].append(token)
                if on_token is not None:
                    on_token(row, token)
        if step + 1 == max_new_tokens or not any(is_open):
            break
        reader.read(tokens)
    return [to_device(torch.tensor(answer, dtype=torch.long, device="cpu"), reader.logits.device) for answer in answers]


def length_norm(length: int, penalty: float) -> float:
    """Return lp(Y) = ((5 + |Y|) / 6)^α. Beam search divides log P(Y) by it.

    Wu et al. 2016, arXiv:1609.08144, eq. 14. With α = 0, beam search compares log P itself and favours short texts.

    >>> length_norm(1, 0.6), length_norm(7, 1.0)
    (1.0, 2.0)
    """
    return ((5 + length) / 6) ** penalty


@torch.no_grad()
def beam_search(
    model: nn.Module,
    input_ids: Tensor,
    *,
    num_beams: int = 4,
    length_penalty: float = 0.6,
    repetition_penalty: float = 1.0,
    key_mask: Tensor | None = None,
    decoder_input_ids: Tensor | None = None,
    max_new_tokens: int | None = None,
    stop: Iterable[int] | None = None,
    context: int | None = None,
    use_cache: bool = True,
) -> list[Tensor]:
    """Return the best continuation of each prompt that beam search finds.

    At each step, the search keeps the ``num_beams`` most probable texts. A text is finished at a stop token or after
    ``max_new_tokens``, and is then no longer continued. The result is the finished text with the largest log P(Y) / lp(Y), where lp
    is ``length_norm`` and |Y| counts the stop token. The search ends when no unfinished text can become better. Sutskever et al.
    2014, arXiv:1409.3215, §3.2.

    Args:
        model: a causal model such as ``DecoderLM``, or an encoder–decoder such as ``EncoderDecoder``, in evaluation mode.
        input_ids, key_mask, decoder_input_ids, max_new_tokens, stop, context, use_cache: as in ``generate``.
        num_beams: the number of texts that are kept. 1 gives the same ids as greedy ``generate``.
        length_penalty: α in ``length_norm``. The default comes from Vaswani et al. 2017, §6.1.
        repetition_penalty: as in ``Sampler``.

    Returns:
        B tensors of new ids, without the stop token.

    Raises:
        TypeError, ValueError, FloatingPointError: as in ``generate``.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)).eval()
    >>> [answer.shape for answer in beam_search(model, torch.tensor([[1, 2, 3]]), max_new_tokens=4)]
    [torch.Size([4])]
    """
    check_positive("num_beams", num_beams)
    if not -10 <= length_penalty <= 10:  # beyond, float32 cannot hold the norm of a long text
        raise ValueError(f"length_penalty={length_penalty} must be a number from -10 to 10")
    sampler = Sampler(repetition_penalty=repetition_penalty)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop, "context": context, "use_cache": use_cache}
    reader = Reader(model, input_ids, key_mask=key_mask, decoder_input_ids=decoder_input_ids, **options)
    (B, V), max_new_tokens = reader.logits.shape, reader.max_new_tokens
    stops = torch.tensor([*reader.stop], dtype=torch.long, device=reader.logits.device)
    scores = reader.logits.new_zeros(B, 1)  # log P of the k texts of each row; k is 1 at first
    texts = torch.zeros(B, 1, 0, dtype=torch.long, device=stops.device)
    best_score, best = scores.new_full((B,), -math.inf), stops.new_zeros(B, max_new_tokens)
    best_length = stops.new_zeros(B)
    for length in range(1, max_new_tokens + 1):
        k = scores.shape[1]
        log_probs = sampler.filtered(reader.logits, reader.seen).log_softmax(dim=-1).view(B, k, V)
        scores, chosen = (scores.unsqueeze(-1) + log_probs).flatten(1).topk(min(num_beams, k * V))  # (B, k')
        parents, tokens = chosen // V, chosen % V
        texts = texts.gather(1, parents.unsqueeze(-1).expand(-1, -1, length - 1))
        texts = torch.cat((texts, tokens.unsqueeze(-1)), dim=-1)  # (B, k', length)
        ends = torch.isin(tokens, stops) | (length == max_new_tokens)
        score, beam = (scores / length_norm(length, length_penalty)).masked_fill(~ends, -math.inf).max(dim=1)
        is_better = score > best_score
        ending = texts.gather(1, beam.view(-1, 1, 1).expand(-1, -1, length)).squeeze(1)  # (B, length)
        best[:, :length] = torch.where(is_better.unsqueeze(1), ending, best[:, :length])
        best_score, best_length = torch.where(is_better, score, best_score), best_length.masked_fill(is_better, length)
        scores = scores.masked_fill(ends, -math.inf)  # finished texts are not continued
        # log P never increases, so the best possible score of a text is its current log P divided by the largest later norm
        ahead = max(length_norm(length + 1, length_penalty), length_norm(max_new_tokens, length_penalty))
        is_over, is_finite = to_host(((best_score >= scores.amax(dim=1) / ahead).all(), reader.is_finite))
        check_finite(bool(is_finite))
        if bool(is_over):
            break
        rows = (parents + k * torch.arange(B, device=parents.device).unsqueeze(1)).flatten()  # (B * k',)
        reader.reorder(rows)
        reader.read(tokens.flatten())
    answers, lengths = to_host((best, best_length))
    ends_at = [
        length - (ids[length - 1] in reader.stop) for ids, length in zip(answers.tolist(), lengths.tolist(), strict=True)
    ]
    return [answer[:end] for answer, end in zip(best, ends_at, strict=True)]


def check_finite(is_finite: bool) -> None:
    """Raise a FloatingPointError for logits that are not finite."""
    if not is_finite:
        raise FloatingPointError("the model's logits are not finite")
