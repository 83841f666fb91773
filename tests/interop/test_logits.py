"""Other people's weights answer here what they answer there: every family, shape and side of padding, in two precisions."""

import pytest
import torch
from foreign import CASES, UNPADDED, answers, batch, build, in_float64, save, widen, worst

from minitx.interop import load_hf

GRID = [(name, padding) for name in CASES for padding in (("none",) if name in UNPADDED else ("none", "left", "right"))]


def inputs(name, padding):
    return (torch.randn(3, 2, 12, 12), None) if name.startswith("vit") else batch(padding)


def test_there_are_at_least_thirty_cases():
    assert len(GRID) >= 90


@pytest.mark.parametrize(("name", "padding"), GRID)
def test_logits_are_theirs_in_float32_and_float64(name, padding, tmp_path, monkeypatch):
    theirs = build(name)
    ours = load_hf(save(theirs, tmp_path))
    given = inputs(name, padding)
    pairs = answers(theirs, ours, given)
    assert worst(pairs) < 1e-5
    assert all(one.std() > 0.05 for one, _ in pairs)  # there is something to compare
    with in_float64(monkeypatch):
        wide = given[0].double() if given[0].is_floating_point() else given[0]
        assert worst(answers(widen(theirs), ours.double(), (wide, given[1]))) < 1e-10
