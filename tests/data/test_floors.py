import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minitx.data import floors
from minitx.data.floors import ngram_floors


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


def test_counting_in_blocks_changes_nothing(monkeypatch):
    train, val = np.random.default_rng(0).integers(0, 7, size=(2, 211)).astype(np.uint16)
    whole = ngram_floors(train, val, 7)
    monkeypatch.setattr(floors, "_BLOCK", 13)
    assert ngram_floors(train, val, 7) == whole


@pytest.mark.parametrize(("vocab_size", "num_val"), [(1025, 10), (7, 1)])
def test_no_floors_for_large_vocabularies_or_without_targets(vocab_size, num_val):
    assert ngram_floors(np.zeros(10, np.uint16), np.zeros(num_val, np.uint16), vocab_size) is None
