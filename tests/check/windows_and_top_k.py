"""Functions of attention with a window or top-k: right ones in several conventions, and wrong ones that differ in few rows."""

import math

import torch


def _scores(q, k, mask, is_causal, hidden=None):
    """Scores with -inf where a key is hidden."""
    L, S = q.shape[-2], k.shape[-2]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(L, S, dtype=torch.bool).tril(S - L), -math.inf)
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _distance(q, k):
    """The distance from a key to its query, (L, S)."""
    L, S = q.shape[-2], k.shape[-2]
    return torch.arange(S - L, S)[:, None] - torch.arange(S)


def window_with_itself(q, k, v, window=None, mask=None, is_causal=False):
    hidden = None if window is None else _distance(q, k) >= window
    return _scores(q, k, mask, is_causal, hidden).softmax(-1) @ v


def window_before_itself(query, key, value, attn_mask=None, is_causal=False, lookback=0):
    """No window: 0."""
    hidden = _distance(query, key) > lookback if lookback else None
    return _scores(query, key, attn_mask, is_causal, hidden).softmax(-1) @ value


def window_on_both_sides(q, k, v, w, mask=None):
    return _scores(q, k, mask, False, _distance(q, k).abs() > w // 2).softmax(-1) @ v


def window_in_the_middle_unless_causal(q, k, v, is_causal=False, window=None):
    distance = _distance(q, k)
    hidden = None if window is None else distance >= window if is_causal else distance.abs() > window // 2
    return _scores(q, k, None, is_causal, hidden).softmax(-1) @ v


def causal_window_by_default(q, k, v, sliding=2, mask=None):
    """It is always causal, and the default is shorter than every row."""
    return _scores(q, k, mask, True, _distance(q, k) >= sliding).softmax(-1) @ v


def window_if_causal(q, k, v, mask=None, causal=False, window=None):
    hidden = _distance(q, k) >= window if causal and window is not None else None
    return _scores(q, k, mask, causal, hidden).softmax(-1) @ v


def window_of_flash_attention(q, k, v, causal=False, window_size=(-1, -1)):
    """(B, L, H, D), and (left, right), where -1 is no limit."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    left, right = window_size
    distance = _distance(q, k)
    hidden = (distance > left) & (left >= 0) | (distance < -right) & (right >= 0)
    return (_scores(q, k, None, causal, hidden).softmax(-1) @ v).transpose(1, 2)


def top_k(q, k, v, mask=None, is_causal=False, topk=None):
    scores = _scores(q, k, mask, is_causal)
    if topk is not None:
        scores = scores.masked_fill(scores < scores.topk(min(topk, scores.shape[-1])).values[..., -1:], -math.inf)
    return scores.softmax(-1) @ v


def top_k_required(q, k, v, count, mask=None):
    scores = _scores(q, k, mask, False)
    top = scores.topk(count)
    return torch.full_like(scores, -math.inf).scatter(-1, top.indices, top.values).softmax(-1) @ v


def top_k_by_itself(q, k, v):
    scores = _scores(q, k, None, False)
    return scores.masked_fill(scores < scores.topk(2).values[..., -1:], -math.inf).softmax(-1) @ v


RIGHT = {
    window_with_itself: "with window=3, a query sees its own key, 2 before it and all after it",
    window_before_itself: "with lookback=3, a query sees its own key, 3 before it and all after it",
    window_on_both_sides: "with w=3, a query sees its own key, 1 before it and 1 after it",
    window_in_the_middle_unless_causal: "with window=3, a query sees its own key, 1 before it and 1 after it",
    causal_window_by_default: "with sliding=3, a query sees its own key, 2 before it and 0 after it",
    window_if_causal: "with window=3, a query sees its own key, 2 before it and 0 after it",
    window_of_flash_attention: "with window_size=(3, 1), a query sees its own key, 3 before it and 1 after it",
    top_k: "with topk=3, a query sees the 3 keys with its largest scores",
    top_k_required: "with count=3, a query sees the 3 keys with its largest scores",
}
"""What is found in each."""


# --- wrong in few rows


def window_one_shorter_in_longer_rows(q, k, v, window=None, mask=None, is_causal=False):
    width = window if window is None or k.shape[-2] <= window else window - 1
    return window_with_itself(q, k, v, width, mask, is_causal)


def window_one_longer_beyond_a_block(q, k, v, window=None, mask=None, is_causal=False):
    width = window if window is None or k.shape[-2] <= 64 else window + 1
    return window_with_itself(q, k, v, width, mask, is_causal)


def window_in_place_of_the_mask(q, k, v, window=None, mask=None, is_causal=False):
    return window_with_itself(q, k, v, window, mask if window is None else None, is_causal)


def window_ignored_when_causal(q, k, v, window=None, mask=None, is_causal=False):
    return window_with_itself(q, k, v, None if is_causal else window, mask, is_causal)


def window_from_the_upper_left(q, k, v, window=None, mask=None, is_causal=False):
    hidden = None if window is None else torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2]) >= window
    return _scores(q, k, mask, is_causal, hidden).softmax(-1) @ v


def top_k_counts_hidden_keys(q, k, v, mask=None, is_causal=False, topk=None):
    scores = _scores(q, k, None, False)
    hidden = None if topk is None else scores < scores.topk(min(topk, scores.shape[-1])).values[..., -1:]
    return _scores(q, k, mask, is_causal, hidden).softmax(-1).nan_to_num() @ v


def top_k_of_the_whole_batch(q, k, v, topk=None):
    scores = _scores(q, k, None, False)
    if topk is not None:
        least = scores.topk(min(topk, scores.shape[-1])).values[..., -1:].amin(0)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores.softmax(-1) @ v


def top_k_of_all_scores(q, k, v, topk=None):
    scores = _scores(q, k, None, False)
    if topk is not None:
        count = min(topk * scores[..., 0].numel(), scores.numel())
        scores = scores.masked_fill(scores < scores.flatten().topk(count).values[-1], torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ v


BROKEN = {
    window_one_shorter_in_longer_rows: "as many tokens",
    window_one_longer_beyond_a_block: "130 tokens",
    window_in_place_of_the_mask: "mask",
    window_ignored_when_causal: "causal",
    window_from_the_upper_left: "more keys than queries",
    top_k_counts_hidden_keys: "mask",
    top_k_of_the_whole_batch: "the second sequence changes the output of the first sequence",
    top_k_of_all_scores: "the second sequence changes the output of the first sequence",
}
"""Where each is wrong."""


# --- what is neither


def blocks(q, k, v, size=None):
    """Each block of tokens sees itself alone."""
    L, S = q.shape[-2], k.shape[-2]
    hidden = None if size is None else (torch.arange(S - L, S)[:, None] // size) != torch.arange(S) // size
    return _scores(q, k, None, False, hidden).softmax(-1) @ v


def top_k_of_all_heads(q, k, v, topk=None):
    """All heads see the keys with the largest sums of their scores."""
    scores = _scores(q, k, None, False)
    sums = scores.sum(1, keepdim=True)
    if topk is not None:
        scores = scores.masked_fill(sums < sums.topk(min(topk, sums.shape[-1])).values[..., -1:], -math.inf)
    return scores.softmax(-1) @ v


def divided(q, k, v, temperature=1):
    return (_scores(q, k, None, False) / temperature).softmax(-1) @ v


def computed_in_pieces(q, k, v, piece=2):
    return torch.cat([_scores(part, k, None, False).softmax(-1) @ v for part in q.split(piece, -2)], -2)


NEITHER = {blocks: "neither", top_k_of_all_heads: "neither", divided: "neither", computed_in_pieces: "no case uses it"}
"""The reason why the argument is not tried."""
