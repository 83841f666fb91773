"""What a model must beat, against other ways to compute it."""

import math

import numpy as np
import pytest

from minitx.data.classification import bag_of_words_accuracy
from minitx.data.corpus import ngram_floors


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


@pytest.mark.parametrize(("vocab_size", "num_val"), [(1025, 10), (7, 1)])
def test_no_floors_for_large_vocabularies_or_without_targets(vocab_size, num_val):
    assert ngram_floors(np.zeros(10, np.uint16), np.zeros(num_val, np.uint16), vocab_size) is None
