"""Simple methods whose results an evaluation prints beside the model's (``Task.baselines``)."""

from __future__ import annotations

import bz2
import lzma
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


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
