"""examples/syntax_heads.py: hand-made heads have known scores, and a treebank is read as its words stand in the text."""

from pathlib import Path

import numpy as np
import pytest
import torch

from minitx.analysis import AttentionMap, Snapshot


@pytest.fixture
def syntax(example):
    return example("syntax_heads")


def sentences(syntax, count, random):
    """Each of seven words belongs to one other; distances and words are random."""
    out = []
    for _ in range(count):
        words = tuple(chr(97 + i) for i in random.permutation(20)[:7])
        out.append(syntax.Sentence(words, tuple((i, int((i + 1 + random.integers(6)) % 7), "of") for i in range(7))))
    return out


def encode(text):
    return [ord(character) for character in text]


def score_of(syntax, rule, given):
    """The score of one head: ``rule(ids)`` is where each position looks."""

    def attend(ids):
        weights = torch.nn.functional.one_hot(torch.tensor(rule(ids[0].tolist())), ids.shape[1]).double()[None, None]
        layer = AttentionMap("core", "self", "input_ids", "input_ids", weights, weights.bool() | True, weights.amax(-1))
        return Snapshot((layer,), {}, {"input_ids": ids}, {})

    ((_, score),) = syntax.syntax_scores(attend, given, encode).items()
    return score


def test_a_head_that_knows_the_structure_is_syntactic(syntax):
    given = sentences(syntax, 40, np.random.default_rng(0))
    known = {one.encode(encode)[0].numpy().tobytes(): [j for _, j, _ in one.arcs] for one in given}
    score = score_of(syntax, lambda ids: known.get(np.array(ids).tobytes(), [0] * 7), given)  # shuffled words it does not know
    assert (score.value, score.at, score.is_syntactic) == (1.0, "of →", True)
    assert score.position < 0.4 and score.shuffled < 0.4 and score.uniform == pytest.approx(1 / 6)


def test_a_head_that_follows_position_is_not_syntactic_where_structure_does_too(syntax):
    arcs = tuple((i, i - 2, "of") for i in range(2, 7))
    given = [syntax.Sentence(one.words, arcs) for one in sentences(syntax, 40, np.random.default_rng(1))]
    score = score_of(syntax, lambda ids: [max(0, i - 2) for i in range(7)], given)
    assert (score.value, score.position, score.gain.mean) == (1.0, 1.0, 0.0)
    assert not score.is_syntactic


def test_a_treebank_is_read_as_its_words_stand_in_the_text(syntax):
    first, second, third, *_ = syntax.read_conllu(Path(__file__).parent / "data" / "few.conllu")
    assert (first.words, first.spaced) == (("The", "old", "cat", "slept", "."), (False, True, True, True, False))
    assert first.arcs == ((0, 2, "det"), (1, 2, "amod"), (2, 3, "nsubj"), (4, 3, "punct"))
    assert second.words[1] == "don't" and (1, 2, "aux") in second.arcs and (1, 2, "advmod") in second.arcs
    assert third.words == ("Ann", "drinks", "tea", "and", "Tom", "milk")  # without the empty node
