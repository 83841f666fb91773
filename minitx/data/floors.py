"""Losses of simple language models, which are computed with the tokens of a text (``Task.floors``)."""

from __future__ import annotations

import numpy as np

from minitx.data.token_cache import Ids

LARGEST_VOCABULARY = 1024
_BLOCK = 1 << 22


def ngram_floors(train: Ids, val: Ids, vocab_size: int) -> dict[str, float] | None:
    """Return the mean cross-entropy (nats) over ``val[1:]`` of a unigram and a bigram model counted on ``train``.

    A model with a loss at or above ``unigram`` has learnt only frequencies. At or above ``bigram`` it uses no context beyond
    the current token. With counts c, N = Σ c and T(a) the number of distinct tokens seen after a:

        unigram  p(b)   = (c(b) + 1) / (N + V)                      add-one
        bigram   p(b|a) = (c(ab) + T(a)·p(b)) / (c(a·) + T(a))      Witten–Bell interpolation; p(b) if a is new

    (Witten and Bell 1991, "The zero-frequency problem", method C.)

    Args:
        train, val: ids, 1-D, each below ``vocab_size``.
        vocab_size: V. Memory is V² counts.

    Returns:
        ``{"unigram": ..., "bigram": ...}``, or ``None`` for V above 1024 or fewer than two validation tokens.

    >>> floors = ngram_floors(np.array([0, 1] * 500), np.array([0, 1, 0, 1]), vocab_size=2)
    >>> round(floors["unigram"], 2), round(floors["bigram"], 2)
    (0.69, 0.0)
    """
    if vocab_size > LARGEST_VOCABULARY or len(val) < 2:
        return None
    pairs, targets = _count_pairs(train, vocab_size), _count_pairs(val, vocab_size)
    followers = (pairs > 0).sum(axis=1, keepdims=True)  # T(a), (V, 1)
    seen = pairs.sum(axis=1, keepdims=True)  # c(a·), (V, 1): all tokens but the last
    unigrams = seen[:, 0] + np.bincount(train[-1:], minlength=vocab_size)
    p = (unigrams + 1) / (len(train) + vocab_size)  # (V,)
    interpolated = (pairs + followers * p) / np.maximum(seen + followers, 1)
    conditional = np.where(seen > 0, interpolated, p)  # (V, V)
    total = targets.sum()
    return {
        "unigram": float(-(targets.sum(axis=0) * np.log(p)).sum() / total),
        "bigram": float(-(targets * np.log(conditional)).sum() / total),
    }


def _count_pairs(ids: Ids, vocab_size: int) -> np.ndarray:
    """Count how often each token follows each token, (V, V), block by block."""
    counts = np.zeros(vocab_size**2, dtype=np.int64)
    for start in range(0, max(len(ids) - 1, 0), _BLOCK):
        block = ids[start : start + _BLOCK + 1].astype(np.int64)
        counts += np.bincount(block[:-1] * vocab_size + block[1:], minlength=counts.size)
    return counts.reshape(vocab_size, vocab_size)
