"""What a model must beat, against other ways to compute it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minitx.data.baselines import bag_of_words_accuracy, ngram_floors, unigram_nll


def test_unigrams_by_hand():
    nll = unigram_nll(np.array([0, 0, 1]), np.array([0, 2, 2]), vocab_size=4)
    assert nll == pytest.approx(-(math.log(3 / 7) + 2 * math.log(1 / 7)) / 3)


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


def test_floors_by_hand():
    # train a b a a: c(a)=3, c(b)=1, p(a)=4/6, p(b)=2/6; after a: b 1, a 1, T=2; after b: a 1, T=1
    values = ngram_floors(np.array([0, 1, 0, 0]), np.array([1, 0, 1]), vocab_size=2)
    after_b, after_a = (1 + 1 * 4 / 6) / 2, (1 + 2 * 2 / 6) / 4  # p(a|b), p(b|a)
    assert values["unigram"] == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2)
    assert values["bigram"] == pytest.approx(-(math.log(after_b) + math.log(after_a)) / 2)


@given(train=arrays(np.uint16, st.integers(0, 99), elements=st.integers(0, 4)))
def test_the_bigram_model_is_a_distribution(train):
    """Cross-entropies of the five continuations of a token turn back into probabilities that sum to 1."""
    for a in range(5):
        losses = [ngram_floors(train, np.array([a, b]), vocab_size=5) for b in range(5)]
        assert sum(math.exp(-loss["bigram"]) for loss in losses) == pytest.approx(1)
        assert sum(math.exp(-loss["unigram"]) for loss in losses) == pytest.approx(1)


@pytest.mark.parametrize(("vocab_size", "num_val"), [(1025, 10), (7, 1)])
def test_no_floors_for_large_vocabularies_or_without_targets(vocab_size, num_val):
    assert ngram_floors(np.zeros(10, np.uint16), np.zeros(num_val, np.uint16), vocab_size) is None
