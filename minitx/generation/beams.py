"""``beam_search``: find the most probable continuation."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minitx.generation.begin import begin, check_count
from minitx.generation.sampler import Sampler


def length_norm(length: int, penalty: float) -> float:
    """Return lp(Y) = ((5 + |Y|) / 6)^α, by which beam search divides log P(Y).

    Wu et al. 2016, arXiv:1609.08144, eq. 14. With α = 0, beam search compares log P itself, which favours short texts.

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
        length_penalty: α in ``length_norm``. The default is that of Vaswani et al. 2017, §6.1.
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
    check_count("num_beams", num_beams)
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty} must be a finite number")
    sampler = Sampler(repetition_penalty=repetition_penalty)
    prompt: dict[str, Any] = {"key_mask": key_mask, "decoder_input_ids": decoder_input_ids, "context": context}
    reader, logits, seen, stop_ids, max_new_tokens = begin(
        model, input_ids, **prompt, max_new_tokens=max_new_tokens, stop=stop, use_cache=use_cache
    )
    B, V = logits.shape
    stops = torch.tensor([*stop_ids], dtype=torch.long, device=logits.device)
    scores = logits.new_zeros(B, 1)  # log P of the k texts of each row; k is 1 at first
    texts = torch.zeros(B, 1, 0, dtype=torch.long, device=logits.device)
    best_score, best = logits.new_full((B,), -math.inf), list(texts[:, 0])
    for length in range(1, max_new_tokens + 1):
        k = scores.shape[1]
        log_probs = sampler.filtered(logits, seen).log_softmax(dim=-1).view(B, k, V)
        scores, chosen = (scores.unsqueeze(-1) + log_probs).flatten(1).topk(min(num_beams, k * V))  # (B, k')
        parents, tokens = chosen // V, chosen % V
        texts = texts.gather(1, parents.unsqueeze(-1).expand(-1, -1, length - 1))
        texts = torch.cat((texts, tokens.unsqueeze(-1)), dim=-1)  # (B, k', length)
        ends = torch.isin(tokens, stops) | (length == max_new_tokens)
        score, beam = (scores / length_norm(length, length_penalty)).masked_fill(~ends, -math.inf).max(dim=1)
        for row in (score > best_score).nonzero().flatten().tolist():
            best_score[row], best[row] = score[row], texts[row, beam[row]]
        scores = scores.masked_fill(ends, -math.inf)  # finished texts are not continued
        # log P never rises, so a text cannot reach more than its present log P, divided by the largest norm of later steps
        ahead = max(length_norm(length + 1, length_penalty), length_norm(max_new_tokens, length_penalty))
        if bool((best_score >= scores.amax(dim=1) / ahead).all()):
            break
        rows = (parents + k * torch.arange(B, device=parents.device).unsqueeze(1)).flatten()  # (B * k',)
        reader.reorder(rows)
        seen = seen.index_select(0, rows).scatter(1, tokens.view(-1, 1), True)
        logits = reader.read(tokens.view(-1, 1))
    return [answer[:-1] if int(answer[-1]) in stop_ids else answer for answer in best]
