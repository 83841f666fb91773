"""Positions: by hand, and as what they are for."""

import math

import pytest
import torch

from minitx.nn import LearnedPositions, Rotary, RotaryScaling, SinusoidalPositions
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
    for outside, message in (([[3, 7]], "got 3 to 7"), ([[-1, 2]], "got -1 to 2")):
        with pytest.raises(ValueError, match=f"position_ids must lie between 0 and 6, the end of the table; {message}"):
            table(torch.tensor(outside))


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


def test_interleaved_rotary_by_hand():
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.float64)
    turned = Rotary(4, interleaved=True)(x, torch.tensor([[5]]))[0, 0, 0].tolist()
    (c, s), (c2, s2) = ((math.cos(a), math.sin(a)) for a in (5.0, 5.0 / 100))
    assert turned == pytest.approx([1 * c - 2 * s, 2 * c + 1 * s, 3 * c2 - 4 * s2, 4 * c2 + 3 * s2], rel=1e-14)


@pytest.mark.parametrize("scaling", [None, RotaryScaling("yarn", 4.0, 32)])
def test_interleaved_rotary_is_half_split_rotary_of_reordered_channels(scaling):
    x, positions = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randint(99, (2, 5))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    split = Rotary(8, scaling=scaling)(x[..., order], positions)
    together = Rotary(8, interleaved=True, scaling=scaling)(x, positions)
    torch.testing.assert_close(together[..., order], split, rtol=0, atol=1e-14)


def test_rotary_is_a_complex_multiplication():
    x, positions = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randint(99, (2, 5))
    turns = torch.polar(torch.ones(4).double(), torch.tensor([10000.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64))
    want = torch.view_as_complex(x.unflatten(-1, (4, 2))) * turns ** positions[:, None, :, None]
    torch.testing.assert_close(
        Rotary(8, interleaved=True)(x, positions), torch.view_as_real(want).flatten(-2), rtol=0, atol=1e-11
    )


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
    got = rotary.frequencies(torch.zeros(1, dtype=torch.float64))
    want = torch.tensor([formula(i, D, base, factor, length) for i in range(D // 2)], dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=0)


def test_llama3_leaves_fast_pairs_and_divides_slow_ones():
    got = Rotary(128, base=500000.0, scaling=RotaryScaling("llama3", 8.0, 8192)).frequencies(
        torch.zeros(1, dtype=torch.float64)
    )
    plain = Rotary(128, base=500000.0).frequencies(torch.zeros(1, dtype=torch.float64))
    ratio = plain / got
    assert (ratio[:29] == 1.0).all()  # pair 28 turns 4.2 times over 8192 positions
    assert torch.allclose(ratio[35:], torch.tensor(8.0).double(), rtol=1e-14)  # pair 35 turns 0.998 times
    assert (ratio[29:35].diff() > 0).all()


def test_ntk_interpolates_the_slowest_pair_by_the_factor_and_leaves_the_fastest():
    got = Rotary(8, scaling=RotaryScaling("ntk", 4.0)).frequencies(torch.zeros(1, dtype=torch.float64))
    plain = Rotary(8).frequencies(torch.zeros(1, dtype=torch.float64))
    assert (plain / got)[[0, 3]].tolist() == pytest.approx([1.0, 4.0], rel=1e-13)


def test_yarn_sharpens_the_scores_by_its_temperature():
    x, positions = torch.randn(1, 1, 5, 8, dtype=torch.float64), torch.arange(5)[None]
    turned = Rotary(8, scaling=RotaryScaling("yarn", 4.0, 64))(x, positions)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1) * (0.1 * math.log(4.0) + 1.0), rtol=1e-13, atol=0)
    for kind in ("linear", "ntk", "llama3"):
        turned = Rotary(8, scaling=RotaryScaling(kind, 4.0, 64))(x, positions)
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3"])
def test_a_factor_of_one_changes_nothing(kind):
    x, positions = torch.randn(1, 1, 5, 8, dtype=torch.float64), torch.arange(5)[None]
    torch.testing.assert_close(
        Rotary(8, scaling=RotaryScaling(kind, 1.0, 64))(x, positions), Rotary(8)(x, positions), rtol=0, atol=1e-14
    )


def test_linear_scaling_is_rotary_at_a_fraction_of_the_position():
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    stretched = Rotary(8, scaling=RotaryScaling("linear", 4.0))(x, torch.tensor([[20]]))
    torch.testing.assert_close(stretched, Rotary(8)(x, torch.tensor([[5]])), rtol=0, atol=1e-14)
