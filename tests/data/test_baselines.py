"""What a model must beat, against other ways to compute it."""

import bz2
import lzma
import math

import numpy as np
import pytest

from minitx.data.baselines import bag_of_words_accuracy, compressed_bits, majority_accuracy, unigram_nll


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_compressed_bits_are_those_of_the_whole_text_however_it_is_cut(size):
    text = " ".join(map(str, range(2003))).encode()
    chunks = [text[i : i + size] for i in range(0, len(text), size)]
    assert compressed_bits(chunks) == {"xz": 8 * len(lzma.compress(text, preset=9)), "bzip2": 8 * len(bz2.compress(text, 9))}


def test_unigrams_by_hand():
    nll = unigram_nll(np.array([0, 0, 1]), np.array([0, 2, 2]), vocab_size=4)
    assert nll == pytest.approx(-(math.log(3 / 7) + 2 * math.log(1 / 7)) / 3)


def test_the_majority_is_that_of_training():
    assert majority_accuracy(np.array([0, 1, 1]), np.array([0, 1, 0, 0, 2])) == 0.2


def test_naive_bayes_agrees_with_scikit_learn():
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.naive_bayes import MultinomialNB

    random = np.random.default_rng(0)
    labels = random.integers(5, size=307)
    texts = [" ".join(f"W{w}" for w in random.poisson(3 + 2 * label, size=random.integers(1, 6))) for label in labels]
    cut = 211
    vectors = CountVectorizer(token_pattern=r"\w+").fit(texts[:cut])
    judge = MultinomialNB(alpha=1.0).fit(vectors.transform(texts[:cut]), labels[:cut])
    wanted = judge.score(vectors.transform(texts[cut:]), labels[cut:])
    assert bag_of_words_accuracy(texts[:cut], labels[:cut], texts[cut:], labels[cut:]) == pytest.approx(wanted)
    assert 0.25 < wanted < 0.9
