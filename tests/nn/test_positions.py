"""Positions: by hand, and as what they are for."""

import math

import pytest
import torch

from minitx.nn import Rotary, RotaryScaling, SinusoidalPositions
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


def linear(i, D, base, s, length):
    return base ** (-2 * i / D) / s


def ntk(i, D, base, s, length):
    return (base * s ** (D / (D - 2))) ** (-2 * i / D)


def llama3(i, D, base, s, length):
    """As in meta-llama's apply_scaling, wavelength by wavelength."""
    frequency = base ** (-2 * i / D)
    wavelength = 2 * math.pi / frequency
    if wavelength < length / 4.0:
        return frequency
    if wavelength > length / 1.0:
        return frequency / s
    smooth = (length / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * frequency / s + smooth * frequency


def yarn(i, D, base, s, length):
    """As in jquesnelle/yarn: a ramp over the channel index between the pairs that turn 32 times and once."""

    def dimension(rotations):
        return D * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(dimension(32)), 0), min(math.ceil(dimension(1)), D - 1)
    high = high + 0.001 if low == high else high
    ramp = min(max((i - low) / (high - low), 0.0), 1.0)
    frequency = base ** (-2 * i / D)
    return frequency / s * ramp + frequency * (1 - ramp)


@pytest.mark.parametrize("formula", [linear, ntk, llama3, yarn])
@pytest.mark.parametrize(
    ("D", "base", "factor", "length"), [(128, 500000.0, 8.0, 8192), (64, 10000.0, 4.0, 2048), (6, 10000.0, 1.5, 16)]
)
def test_stretched_frequencies_equal_a_loop_over_the_channels(formula, D, base, factor, length):
    rotary = Rotary(D, base=base, scaling=RotaryScaling(formula.__name__, factor, length))
    got = rotary.frequencies(torch.float64)
    want = torch.tensor([formula(i, D, base, factor, length) for i in range(D // 2)], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3"])
def test_yarn_alone_sharpens_the_scores_by_its_temperature(kind):
    x, positions = torch.randn(1, 1, 5, 8, dtype=torch.float64), torch.arange(5)[None]
    turned = Rotary(8, scaling=RotaryScaling(kind, 4.0, 64))(x, positions)
    temperature = 0.1 * math.log(4.0) + 1.0 if kind == "yarn" else 1.0
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1) * temperature, rtol=1e-13, atol=0)
