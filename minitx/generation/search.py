"""One token after another: greedy or sampled, and beam search."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from minitx.generation.reader import Reader


def length_norm(length: int, penalty: float) -> float:
    """lp(Y) = ((5 + |Y|) / 6)^α, by which beam search divides log P(Y).

    Wu et al. 2016, arXiv:1609.08144, eq. 14. α = 0 compares log P itself, which favours short answers.

    >>> length_norm(1, 0.6), length_norm(7, 1.0)
    (1.0, 2.0)
    """
    return ((5 + length) / 6) ** penalty


def token_by_token(
    reader: Reader,
    logits: Tensor,
    seen: Tensor | None,
    choose: Callable[[Tensor, int], Tensor],
    stop: Tensor,
    max_new_tokens: int,
    on_token: Callable[[int, int], object] | None,
) -> list[Tensor]:
    """Greedy or sampled answers; a row that was stopped is read on with the others, and what follows is dropped."""
    answers: list[list[int]] = [[] for _ in logits]
    done = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    for step in range(max_new_tokens):
        tokens = choose(logits, step)  # (B,)
        done |= torch.isin(tokens, stop)
        for row, (token, is_done) in enumerate(zip(tokens.tolist(), done.tolist(), strict=True)):
            if not is_done:
                answers[row].append(token)
                if on_token is not None:
                    on_token(row, token)
        if step + 1 == max_new_tokens or bool(done.all()):
            break
        if seen is not None:
            seen.scatter_(1, tokens.unsqueeze(1), True)
        logits = reader.read(tokens.unsqueeze(1))
    return [torch.tensor(answer, dtype=torch.long, device=logits.device) for answer in answers]


def beam_search(
    reader: Reader,
    logits: Tensor,
    seen: Tensor | None,
    penalised: Callable[[Tensor, Tensor | None], Tensor],
    stop: Tensor,
    max_new_tokens: int,
    num_beams: int,
    penalty: float,
) -> list[Tensor]:
    """The best answer of each row. Of each step's ``num_beams`` likeliest texts, those that end leave the beam.

    Sutskever et al. 2014, arXiv:1409.3215, §3.2. The beam begins with one text, the prompt; a place that an ended text
    left has the score −inf until another takes it.
    """
    B, V = logits.shape
    scores = logits.new_zeros(B, 1)  # log P of k texts a row
    texts = torch.zeros(B, 1, 0, dtype=torch.long, device=logits.device)
    best_score, best = logits.new_full((B,), -math.inf), list(texts[:, 0])
    for length in range(1, max_new_tokens + 1):
        k = scores.shape[1]
        log_probs = penalised(logits, seen).log_softmax(dim=-1).view(B, k, V)
        scores, chosen = (scores.unsqueeze(-1) + log_probs).flatten(1).topk(min(num_beams, k * V))  # (B, k')
        parents, tokens = chosen // V, chosen % V
        texts = texts.gather(1, parents.unsqueeze(-1).expand(-1, -1, length - 1))
        texts = torch.cat((texts, tokens.unsqueeze(-1)), dim=-1)  # (B, k', length)
        ends = torch.isin(tokens, stop) | (length == max_new_tokens)
        score, beam = (scores / length_norm(length, penalty)).masked_fill(~ends, -math.inf).max(dim=1)
        for row in (score > best_score).nonzero().flatten().tolist():
            best_score[row], best[row] = score[row], texts[row, beam[row]]
        scores = scores.masked_fill(ends, -math.inf)
        # log P only falls, so no open text can come to more than it has now, divided by the largest norm ahead
        ahead = max(length_norm(length + 1, penalty), length_norm(max_new_tokens, penalty))
        if bool((best_score >= scores.amax(dim=1) / ahead).all()):
            break
        rows = (parents + k * torch.arange(B, device=parents.device).unsqueeze(1)).flatten()  # (B * k',)
        reader.reorder(rows)
        if seen is not None:
            seen = seen.index_select(0, rows).scatter(1, tokens.view(-1, 1), True)
        logits = reader.read(tokens.view(-1, 1))
    return [answer[:-1] if bool(torch.isin(answer[-1:], stop)) else answer for answer in best]
