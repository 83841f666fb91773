"""Positions: by hand, and as what they are for."""

import math

import pytest
import torch

from minitx.nn import Rotary, RotaryScaling, SinusoidalPositions
from minitx.nn.positions import position_ids_from

CPU = torch.device("cpu")


def test_sinusoids_by_hand():
    row = SinusoidalPositions(4)(torch.tensor([3]), torch.float64)[0].tolist()
    assert row == pytest.approx([math.sin(3), math.cos(3), math.sin(3 / 100), math.cos(3 / 100)], rel=1e-14)


def test_sinusoids_of_an_odd_width_are_cut():
    full, odd = (SinusoidalPositions(width)(torch.arange(5), torch.float64) for width in (8, 7))
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


def test_rotary_turns_neighbours_or_halves_as_complex_numbers_are_multiplied():
    x, positions = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randint(99, (2, 5))
    turns = torch.polar(torch.ones(4).double(), torch.tensor([500.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64))
    want = torch.view_as_complex(x.unflatten(-1, (4, 2))) * turns ** positions[:, None, :, None]
    want = torch.view_as_real(want).flatten(-2)
    interleaved = Rotary(8, base=500.0, interleaved=True)(x, positions)
    torch.testing.assert_close(interleaved, want, rtol=0, atol=1e-11)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    split = Rotary(8, base=500.0)(x[..., order], positions)
    torch.testing.assert_close(split, want[..., order], rtol=0, atol=1e-11)


def test_rotary_angles_of_far_positions_are_not_rounded_to_half_precision():
    x, position = torch.randn(1, 1, 1, 6).bfloat16(), torch.tensor([[4001]])
    turned, exact = Rotary(6)(x, position), Rotary(6)(x.double(), position)
    assert turned.dtype == torch.bfloat16
    assert (turned.double() - exact).abs().max() <= 4 * 2**-8 * x.abs().max()


@pytest.mark.parametrize(
    ("key_mask", "documents", "wanted"),
    [
        (None, None, [[0, 1, 2, 3, 4]]),
        ("..xxx", None, [[0, 0, 0, 1, 2]]),
        ("x.x.x", None, [[0, 0, 1, 1, 2]]),
        (None, [7, 7, 8, 8, 7], [[0, 1, 0, 1, 0]]),
        (".xx.x", [7, 7, 7, 8, 8], [[0, 0, 1, 0, 0]]),
        ("xxx..", [7, 8, 8, 0, 0], [[0, 0, 1, 0, 0]]),
    ],
)
def test_positions_count_real_tokens_from_zero_in_every_document(key_mask, documents, wanted):
    mask = None if key_mask is None else torch.tensor([[c == "x" for c in key_mask]])
    ids = None if documents is None else torch.tensor([documents])
    assert position_ids_from(mask, ids, 5, CPU).tolist() == wanted


@pytest.mark.parametrize("kind", ["ntk", "llama3", "yarn"])
def test_a_long_context_keeps_the_shortest_wavelength_and_stretches_the_longest_by_its_factor(kind):
    scalings = None, RotaryScaling(kind, 4.0, 2048)
    plain, stretched = (Rotary(64, scaling=scaling).frequencies(torch.float64) for scaling in scalings)
    torch.testing.assert_close(stretched[[0, -1]], plain[[0, -1]] / torch.tensor([1.0, 4.0]))
    assert (stretched <= plain).all() and (4 * stretched >= plain * (1 - 1e-12)).all()
    if kind == "ntk":  # a geometric row
        torch.testing.assert_close(stretched.log().diff(n=2), torch.zeros(30, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_two_bounds_that_are_one_number_part_the_channel_pairs_in_two(kind):
    one, near = (Rotary(64, scaling=RotaryScaling(kind, 4.0, 2048, low=2.0, high=high)) for high in (2.0, 2.0 + 1e-6))
    torch.testing.assert_close(one.frequencies(torch.float64), near.frequencies(torch.float64))
