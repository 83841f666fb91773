"""Positions: by hand, and as what they are for."""

import math

import pytest
import torch

from minitx.nn import LearnedPositions, Rotary, SinusoidalPositions
from minitx.nn.positions import position_ids_from, sinusoids

CPU = torch.device("cpu")


def test_sinusoids_by_hand():
    row = sinusoids(torch.tensor([3]), 4, dtype=torch.float64)[0].tolist()
    assert row == pytest.approx([math.sin(3), math.cos(3), math.sin(3 / 100), math.cos(3 / 100)], rel=1e-14)


def test_sinusoids_of_an_odd_width_are_cut():
    full, odd = sinusoids(torch.arange(5), 8, dtype=torch.float64), sinusoids(torch.arange(5), 7, dtype=torch.float64)
    assert odd.shape == (5, 7)
    assert torch.equal(odd[:, :2], full[:, :2])  # the first wavelength does not depend on the width
    angle = 4 / 10000 ** (6 / 7)
    assert odd[4, 6].item() == pytest.approx(math.sin(angle), rel=1e-13)


def test_sinusoids_in_half_precision_are_rounded_once():
    positions = torch.arange(2000)
    exact = SinusoidalPositions(16)(positions, torch.float64)
    got = SinusoidalPositions(16)(positions, torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).abs().max() <= 2**-8  # angles in bfloat16 would be lost altogether


def test_rotary_by_hand():
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.float64)
    turned = Rotary(4)(x, torch.tensor([[5]]))[0, 0, 0].tolist()
    (c, s), (c2, s2) = ((math.cos(a), math.sin(a)) for a in (5.0, 5.0 / 100))
    assert turned == pytest.approx([1 * c - 3 * s, 2 * c2 - 4 * s2, 3 * c + 1 * s, 4 * c2 + 2 * s2], rel=1e-14)


def test_rotary_scores_depend_on_the_distance_alone():
    rotary = Rotary(6)
    q, k = (torch.randn(1, 1, 1, 6, dtype=torch.float64) for _ in range(2))

    def score(i, j):
        return (rotary(q, torch.tensor([[i]])) * rotary(k, torch.tensor([[j]]))).sum().item()

    assert score(9, 2) == pytest.approx(score(107, 100), rel=1e-12)
    assert score(9, 2) != pytest.approx(score(9, 3), rel=1e-3)
    assert score(9, 2) != pytest.approx(score(2, 9), rel=1e-3)  # and on its sign


def test_rotary_keeps_lengths_dtype_and_every_head_alike():
    x = torch.randn(2, 1, 5, 6, dtype=torch.float64).expand(2, 3, 5, 6)
    turned = Rotary(6)(x, torch.arange(5)[None])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)
    assert torch.equal(turned[:, 0], turned[:, 2])
    assert Rotary(6)(x.bfloat16(), torch.arange(5)[None]).dtype == torch.bfloat16


def test_rotary_angles_of_far_positions_are_not_rounded_to_half_precision():
    x = torch.randn(1, 1, 1, 6).bfloat16()
    position = torch.tensor([[4001]])
    exact = Rotary(6)(x.double(), position)
    assert (Rotary(6)(x, position).double() - exact).abs().max() <= 4 * 2**-8 * x.abs().max()


def test_a_larger_base_turns_more_slowly():
    x = torch.tensor([[[[1.0, 1.0, 0.0, 0.0]]]], dtype=torch.float64)
    slow = Rotary(4, base=1e6)(x, torch.tensor([[1]]))[0, 0, 0]
    assert slow[3].item() == pytest.approx(math.sin(1e-3), rel=1e-12)


def test_learned_positions_are_rows_of_a_table():
    table = LearnedPositions(7, 5)
    assert torch.equal(table(torch.tensor([[3, 0]]))[0, 0], table.table.weight[3])
    assert table(torch.tensor([[3]]), torch.float64).dtype == torch.float64
    with pytest.raises(IndexError):
        table(torch.tensor([[7]]))


@pytest.mark.parametrize(
    ("key_mask", "documents", "wanted"),
    [
        (None, None, [[0, 1, 2, 3, 4]]),
        ("..xxx", None, [[0, 0, 0, 1, 2]]),
        ("xxx..", None, [[0, 1, 2, 2, 2]]),
        ("x.x.x", None, [[0, 0, 1, 1, 2]]),
        (None, [7, 7, 8, 8, 7], [[0, 1, 0, 1, 0]]),
        ("..xxx", [7, 7, 7, 7, 7], [[0, 0, 0, 1, 2]]),
        (".xx.x", [7, 7, 7, 8, 8], [[0, 0, 1, 0, 0]]),
        ("xxx..", [7, 8, 8, 0, 0], [[0, 0, 1, 0, 0]]),
    ],
)
def test_positions_count_real_tokens_from_zero_in_every_document(key_mask, documents, wanted):
    mask = None if key_mask is None else torch.tensor([[c == "x" for c in key_mask]])
    ids = None if documents is None else torch.tensor([documents])
    assert position_ids_from(mask, ids, 5, CPU).tolist() == wanted
