"""Biases: the papers' numbers, and tiles. Gradients through every backend: ``tests/lattice/calls.py``."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sizes import B, H, L, S
from torch import Tensor

from minitx.nn import ALiBi, Bias, T5RelativeBias, TensorBias
from minitx.nn.bias import RelativeBuckets, as_bias

GENERATOR = torch.Generator().manual_seed(3)


def press_slopes(heads):
    """get_slopes of ofirpress/attention_with_linear_biases, in plain Python."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + press_slopes(2 * power)[0::2][: heads - power] if heads > power else slopes


def t5_bucket(distance, bidirectional, num_buckets, max_distance):
    """_relative_position_bucket of mesh_tensorflow's T5, for one whole number j - i."""
    if bidirectional:
        return num_buckets // 2 * (distance > 0) + t5_bucket(-abs(distance), False, num_buckets // 2, max_distance)
    n, exact = max(-distance, 0), num_buckets // 2
    if n < exact:
        return n
    ratio = torch.log(torch.tensor(n / exact, dtype=torch.float32)) / math.log(max_distance / exact)
    return min(exact + int(ratio * (num_buckets - exact)), num_buckets - 1)


@dataclass(frozen=True, eq=False)
class Wave(Bias):
    """A bias of a user's own: an amplitude per row of the batch and head, and a rule inside a rule."""

    amplitude: Tensor
    frequency: float
    inner: Bias | None = None

    def value(self, batch, head, row, key, offset):
        wave = self.amplitude[batch, head] * torch.sin(self.frequency * (row + offset - key))
        return wave if self.inner is None else wave + self.inner.value(batch, head, row, key, offset)


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


def t5(bidirectional=True, dtype=torch.float64):
    module = T5RelativeBias(H, num_buckets=8, max_distance=6, bidirectional=bidirectional).to(dtype)
    with torch.no_grad():
        module.weight.copy_(normal(8, H))
    return module


BIASES = {
    "alibi with learned slopes": lambda: ALiBi(slopes=normal(H).requires_grad_()),
    "t5, one direction": lambda: t5(False),
    "a tensor as a rule": lambda: TensorBias(normal(1, H, 1, S).requires_grad_()),
    "a rule of a user": lambda: Wave(normal(B, H).requires_grad_(), 0.7, ALiBi(H)),
}


@pytest.mark.usefixtures("default_bfloat16")
@pytest.mark.parametrize("heads", [1, 3, 8, 12, 20])
def test_alibi_slopes_are_those_of_the_paper(heads):
    bias = ALiBi(heads).dense(3, 3, num_heads=heads)[0]
    assert (-bias[:, 0, 1]).tolist() == pytest.approx(press_slopes(heads), rel=1e-6)
    distances = torch.tensor([[0, 1, 2], [1, 0, 1], [2, 1, 0]])  # either way
    assert torch.equal(bias, bias[:, :1, 1:2] * distances)


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (6, 5), (64, 1000)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_exactly_those_of_t5(buckets, farthest, bidirectional):
    distances = range(-1100, 1101)
    rule = RelativeBuckets(torch.zeros(buckets, 1), farthest, bidirectional)
    wanted = [t5_bucket(d, bidirectional, buckets, farthest) for d in distances]
    assert rule.bucket(torch.tensor(distances)).tolist() == wanted
    assert max(wanted) == buckets - 1 and min(wanted) == 0


@pytest.mark.parametrize("name", BIASES)
@settings(max_examples=20)
@given(cut=st.tuples(*[st.integers(0, 5)] * 4))
def test_tiles_are_slices_of_the_whole(name, cut):
    bias = as_bias(BIASES[name]())
    rows, keys = slice(min(cut[:2]), max(cut[:2])), slice(min(cut[2:]), max(cut[2:]))
    tile = bias.dense(L, S, rows=rows, keys=keys, batch_size=B, num_heads=H)
    wanted = bias.dense(L, S, batch_size=B, num_heads=H).expand(B, H, L, S)[:, :, rows, keys]
    assert torch.equal(tile.expand(wanted.shape), wanted)
