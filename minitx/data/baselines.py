"""Simple methods whose results a model should beat: compression, counts of tokens, the most frequent label, a bag of words."""

from __future__ import annotations

import bz2
import lzma
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minitx.data.token_cache import Ids

LARGEST_VOCABULARY = 1024
_BLOCK = 1 << 22


def compressed_bits(text: Iterable[bytes]) -> dict[str, int]:
    """Return the number of bits of a text, given in pieces, compressed with ``xz -9`` and ``bzip2 -9``.

    >>> compressed_bits([b"a" * 500, b"a" * 500])["bzip2"] < 8 * 1000
    True
    """
    compressors: dict[str, Any] = {"xz": lzma.LZMACompressor(preset=9), "bzip2": bz2.BZ2Compressor(9)}
    sizes = dict.fromkeys(compressors, 0)
    for piece in text:
        for name, compressor in compressors.items():
            sizes[name] += len(compressor.compress(piece))
    return {name: 8 * (size + len(compressors[name].flush())) for name, size in sizes.items()}


def unigram_nll(train: np.ndarray, val: np.ndarray, vocab_size: int) -> float:
    """Return the mean negative log-likelihood (nats) of ``val`` under add-one counts of ``train``. Both are 1-D ids."""
    counts, targets = (np.bincount(ids, minlength=vocab_size) for ids in (train, val))
    return float(-(targets * np.log((counts + 1) / (counts.sum() + vocab_size))).sum() / targets.sum())


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


def majority_accuracy(train_labels: np.ndarray, val_labels: np.ndarray) -> float:
    """Return the accuracy of always answering with the most frequent training label."""
    return float(np.mean(val_labels == np.bincount(train_labels).argmax()))


def bag_of_words_accuracy(
    train_texts: Sequence[str], train_labels: np.ndarray, val_texts: Sequence[str], val_labels: np.ndarray
) -> float:
    """Return the accuracy of multinomial naive Bayes over words with add-one smoothing: argmax_c ln p(c) + Σ_w ln (n(w, c) + 1) / (n(c) + W).

    Unknown words do not count. Manning et al. 2008, "Introduction to Information Retrieval", §13.2.

    >>> labels = np.array([0, 0, 1])
    >>> bag_of_words_accuracy(["the sea", "a sea", "the hill"], labels, ["sea", "hill"], np.array([0, 1]))
    1.0
    """
    words: dict[str, int] = {}
    rows = [[words.setdefault(word, len(words)) for word in _words(text)] for text in train_texts]
    counts = np.ones((int(train_labels.max()) + 1, len(words)))  # (classes, W), add-one
    labels_of_words = np.repeat(train_labels, [len(row) for row in rows])
    np.add.at(counts, (labels_of_words, np.concatenate([np.array(row, np.int64) for row in rows])), 1)
    log_likelihood = np.log(counts / counts.sum(axis=1, keepdims=True))
    with np.errstate(divide="ignore"):  # a class without training rows has prior 0
        log_prior = np.log(np.bincount(train_labels, minlength=len(counts)) / len(train_labels))
    guesses = [
        int((log_prior + log_likelihood[:, [words[word] for word in _words(text) if word in words]].sum(axis=1)).argmax())
        for text in val_texts
    ]
    return float(np.mean(np.array(guesses) == val_labels))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
