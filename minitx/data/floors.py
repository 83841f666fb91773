"""What a language model must beat: the cross-entropy of counting single tokens and pairs."""

from __future__ import annotations

import numpy as np

LARGEST_VOCABULARY = 1024
_BLOCK = 1 << 22


def ngram_floors(train: np.ndarray, val: np.ndarray, vocab_size: int) -> dict[str, float] | None:
    """Mean cross-entropy in nats of a unigram and a bigram model counted on ``train``, over ``val[1:]``.

    A loss at or above ``unigram`` has learnt nothing but frequencies; at or above ``bigram`` it uses no context beyond
    the current token. With counts c, N = Σ c and T(a) the number of distinct tokens seen after a:

        unigram  p(b)   = (c(b) + 1) / (N + V)                      add-one
        bigram   p(b|a) = (c(ab) + T(a)·p(b)) / (c(a·) + T(a))      Witten–Bell interpolation; p(b) if a is new

    (Witten and Bell 1991, "The zero-frequency problem", method C.)

    Args:
        train, val: ids, 1-D, each below ``vocab_size``.
        vocab_size: V; memory is V² counts.

    Returns:
        ``{"unigram": ..., "bigram": ...}``, or ``None`` for V above 1024 or fewer than two validation tokens.

    >>> floors = ngram_floors(np.array([0, 1] * 500), np.array([0, 1, 0, 1]), vocab_size=2)
    >>> round(floors["unigram"], 2), round(floors["bigram"], 2)
    (0.69, 0.0)
    """
    if vocab_size > LARGEST_VOCABULARY or len(val) < 2:
        return None
    unigrams = _counts(train, vocab_size, 1)
    pairs = _counts(train, vocab_size, 2).reshape(vocab_size, vocab_size)  # (a, b)
    wanted = _counts(val, vocab_size, 2).reshape(vocab_size, vocab_size)
    p = (unigrams + 1) / (unigrams.sum() + vocab_size)  # (V,)
    followers = (pairs > 0).sum(axis=1, keepdims=True)  # T(a), (V, 1)
    seen = pairs.sum(axis=1, keepdims=True)  # c(a·), (V, 1)
    interpolated = (pairs + followers * p) / np.maximum(seen + followers, 1)
    conditional = np.where(seen > 0, interpolated, p)  # (V, V)
    total = wanted.sum()
    return {
        "unigram": float(-(wanted.sum(axis=0) * np.log(p)).sum() / total),
        "bigram": float(-(wanted * np.log(conditional)).sum() / total),
    }


def _counts(ids: np.ndarray, vocab_size: int, order: int) -> np.ndarray:
    """How often every token (order 1) or pair a·V + b (order 2) occurs, (V^order,), block by block."""
    counts = np.zeros(vocab_size**order, dtype=np.int64)
    for start in range(0, max(len(ids) - order + 1, 0), _BLOCK):
        block = ids[start : start + _BLOCK + order - 1].astype(np.int64)
        index = block if order == 1 else block[:-1] * vocab_size + block[1:]
        counts += np.bincount(index, minlength=counts.size)
    return counts
