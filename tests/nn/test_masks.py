"""Masks: the rule, how rules combine, tiles, what is remembered, and pictures."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sizes import grids
from torch._subclasses.fake_tensor import FakeTensorMode

from minitx.nn import (
    BlockSparse,
    Causal,
    Dense,
    Documents,
    Mask,
    Padding,
    PrefixLM,
    SlidingWindow,
    intersect,
    scaled_dot_product_attention,
)
from minitx.nn.masks import And, real_key_counts, simplify

CPU, META = torch.device("cpu"), torch.device("meta")
REAL = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])  # left and right padding
IDS = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 2]])
LENGTHS = torch.tensor([2, 4])
CELLS = grids(lambda b, h, t, j, i: (3 * b + 2 * h + t + j) % 4 != 1, (2, 3, 5, 5))
ITSELF = Dense(torch.eye(5, dtype=torch.bool))
BLOCKS = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
RULES = {
    "causal": (Causal(), lambda b, h, t, j, i: j <= t),
    "window": (SlidingWindow(2), lambda b, h, t, j, i: abs(t - j) < 2),
    "padding": (Padding(REAL), lambda b, h, t, j, i: bool(REAL[b, j])),
    "documents": (Documents(IDS), lambda b, h, t, j, i: bool(IDS[b, t] == IDS[b, j])),
    "prefix": (PrefixLM(3), lambda b, h, t, j, i: j <= t or j < 3),
    "prefix per row": (PrefixLM(LENGTHS), lambda b, h, t, j, i: j <= t or j < int(LENGTHS[b])),
    "dense 2-D": (Dense(CELLS[0, 0]), lambda b, h, t, j, i: bool(CELLS[0, 0, i, j])),
    "dense 4-D": (Dense(CELLS), lambda b, h, t, j, i: bool(CELLS[b, h, i, j])),
    "dense per head": (Dense(CELLS[:1]), lambda b, h, t, j, i: bool(CELLS[0, h, i, j])),
    "blocks": (BlockSparse(BLOCKS, 2), lambda b, h, t, j, i: bool(BLOCKS[t // 2, j // 2])),
    "blocks per head": (BlockSparse(CELLS[0, :, :3, :3], 2), lambda b, h, t, j, i: bool(CELLS[0, h, t // 2, j // 2])),
    "blocks of one": (BlockSparse(CELLS[0, 0], 1), lambda b, h, t, j, i: bool(CELLS[0, 0, t, j])),
    "dense by key": (Dense(CELLS[:, :1, :1]), lambda b, h, t, j, i: bool(CELLS[b, 0, 0, j])),
}
EXACT = [name for name in RULES if name != "prefix per row"]  # that one does not look at its lengths
SYMBOLIC = [name for name in RULES if "dense" not in name]


def whole(mask, shape=(2, 3, 5, 5), **tile):
    B, H, L, S = shape
    return mask.dense(L, S, batch_size=B, num_heads=H, **tile)


@pytest.mark.parametrize("name", RULES)
def test_dense_form_says_what_the_rule_says(name):
    mask, rule = RULES[name]
    for length in (1, 2, 5) if name in SYMBOLIC else (5,):  # fewer queries are the last rows
        shape = (2, 3, length, 5)
        assert torch.equal(whole(mask, shape).expand(shape), grids(rule, shape))


@pytest.mark.parametrize("first", RULES)
@pytest.mark.parametrize("second", ["causal", "padding", "dense per head"])
def test_and_is_intersection_and_or_is_union(first, second):
    (one, rule_one), (two, rule_two) = RULES[first], RULES[second]
    both = grids(lambda *at: rule_one(*at) and rule_two(*at), (2, 3, 5, 5))
    either = grids(lambda *at: rule_one(*at) or rule_two(*at), (2, 3, 5, 5))
    assert torch.equal(whole(one & two).expand(2, 3, 5, 5), both)
    assert torch.equal(whole(one | two).expand(2, 3, 5, 5), either)
    assert torch.equal(whole(intersect(one, two)).expand(2, 3, 5, 5), both)


@dataclass(frozen=True)
class OwnKeys(Mask):
    marks: torch.Tensor

    def visible(self, batch, head, row, key, offset):
        return self.marks[key]


def test_masks_that_define_equality_combine_and_only_the_same_object_is_dropped():
    first, second = OwnKeys(REAL[0]), OwnKeys(REAL[1])
    both = intersect(first, second, first, Causal(), Causal())
    assert len([*both.parts()]) == 3
    x = torch.randn(1, 2, 5, 4)
    want = scaled_dot_product_attention(x, x, x, REAL.all(0)[None], is_causal=True)
    torch.testing.assert_close(scaled_dot_product_attention(x, x, x, first & second, is_causal=True), want)


@pytest.mark.parametrize("name", ["causal", "padding", "dense 4-D"])
def test_a_bool_tensor_combines_with_a_mask_on_either_side(name):
    mask, cells = RULES[name][0], CELLS[:1]
    for both in (mask & cells, cells & mask):
        assert torch.equal(whole(both).expand(2, 3, 5, 5), (whole(mask) & cells).expand(2, 3, 5, 5))
    for either in (mask | cells, cells | mask):
        assert torch.equal(whole(either).expand(2, 3, 5, 5), (whole(mask) | cells).expand(2, 3, 5, 5))
    for combine in (lambda: mask & 3, lambda: mask | 3):
        with pytest.raises(TypeError, match="unsupported operand"):
            combine()


masks = st.recursive(
    st.sampled_from([mask for mask, _ in RULES.values()]),
    lambda inner: st.one_of(st.builds(lambda a, b: a & b, inner, inner), st.builds(lambda a, b: a | b, inner, inner)),
    max_leaves=5,
)


@settings(max_examples=50)
@given(mask=masks, cut=st.tuples(*[st.integers(0, 5)] * 4))
def test_tiles_are_slices_of_the_whole(mask, cut):
    rows, keys = slice(min(cut[:2]), max(cut[:2])), slice(min(cut[2:]), max(cut[2:]))
    tile = whole(mask, rows=rows, keys=keys)
    wanted = whole(mask).expand(2, 3, 5, 5)[:, :, rows, keys]
    assert torch.equal(tile.expand(wanted.shape), wanted)


def tiles_of(mask, length, height, width):
    """The two verdicts of a mask on tiles, and what the cells of each tile say: all visible, none visible."""
    rows, keys = [*range(0, length, height), length], [*range(0, 5, width), 5]
    cells = whole(mask, (2, 3, length, 5)).expand(2, 3, length, 5)
    tiles = [[cells[:, :, a:b, c:d] for c, d in pairwise(keys)] for a, b in pairwise(rows)]
    truth = torch.tensor([[[bool(tile.all()), not tile.any()] for tile in row] for row in tiles]).unbind(-1)
    return mask.tile_map(torch.tensor(rows), torch.tensor(keys), 5 - length), truth


SIDES = st.integers(1, 5)


@settings(max_examples=100)
@given(mask=masks, length=SIDES, height=SIDES, width=SIDES)
def test_a_tile_is_called_whole_or_empty_only_if_it_is(mask, length, height, width):
    assume(length == 5 or "Dense" not in repr(mask))  # a dense mask has one size
    verdicts, truth = tiles_of(mask, length, min(height, length), width)
    for said, true in zip(verdicts, truth, strict=True):
        assert said.shape == true.shape and not (said & ~true).any()


@pytest.mark.parametrize("name", EXACT)
def test_one_rule_knows_each_of_its_tiles(name):
    for length, height, width in product((1, 2, 5) if name in SYMBOLIC else (5,), (1, 2, 3), (1, 2, 3, 5)):
        verdicts, truth = tiles_of(RULES[name][0], length, min(height, length), width)
        for said, true in zip(verdicts, truth, strict=True):
            assert torch.equal(said, true), (length, height, width)


@settings(max_examples=50)
@given(mask=masks, others=st.lists(masks, max_size=3))
def test_intersect_never_drops_a_constraint(mask, others):
    wanted = whole(mask).expand(2, 3, 5, 5)
    for other in others:
        wanted = wanted & whole(other)
    assert torch.equal(whole(intersect(mask, None, *others)).expand(2, 3, 5, 5), wanted)


@settings(max_examples=50)
@given(mask=masks, shape=st.sampled_from([(5, 5), (1, 5), (3, 5)]))
def test_simplify_changes_no_answer(mask, shape):
    assume(shape[0] == 5 or "Dense" not in repr(mask))  # a dense mask has one size
    simple = simplify(mask, *shape)
    wanted = whole(mask, (2, 3, *shape)).expand(2, 3, *shape)
    got = torch.ones_like(wanted) if simple is None else whole(simple, (2, 3, *shape))
    assert torch.equal(got.expand_as(wanted), wanted)


def test_simplify_drops_only_what_hides_nothing():
    assert simplify(Causal(), 1, 7) is None
    assert simplify(SlidingWindow(7), 5, 7) is None
    kept = SlidingWindow(6)
    assert simplify(kept, 5, 7) is kept
    padding = Padding(torch.ones(2, 7, dtype=torch.bool))  # all true, but values are not looked at
    assert simplify(Causal() & padding, 1, 7) is padding
    both = Causal() & padding & kept
    assert simplify(both, 1, 7) is simplify(both, 1, 7)  # layers share what is left


def test_an_axis_that_a_rule_does_not_use_has_size_one():
    assert whole(Padding(REAL)).shape == (2, 1, 1, 5)
    assert whole(Causal()).shape == (1, 1, 5, 5)
    assert whole(Causal() & Padding(REAL)).shape == (2, 1, 5, 5)


@pytest.mark.parametrize(
    ("mask", "queries", "wanted"),
    [
        (None, 5, [[5, 5, 5, 5, 5]]),
        (Causal(), 2, [[4, 5]]),
        (Causal() & Padding(REAL) & SlidingWindow(1), 5, [[0, 0, 1, 2, 3], [1, 2, 3, 4, 4]]),
        (Causal() & Documents(IDS) & Padding(REAL), 5, [[0, 0, 1, 2, 3], [1, 2, 3, 4, 0]]),
        (PrefixLM(3), 5, [[3, 3, 3, 4, 5]]),
        (PrefixLM(LENGTHS) & Padding(REAL), 5, [[0, 0, 1, 2, 3], [4, 4, 4, 4, 4]]),
        (Causal() | SlidingWindow(2), 5, [[2, 3, 4, 5, 5]]),
        ((Causal() & Padding(REAL) & SlidingWindow(1)) | ITSELF, 5, [[1, 1, 1, 2, 3], [1, 2, 3, 4, 5]]),
        (And((And((Causal(), SlidingWindow(1))), Padding(REAL))), 5, [[0, 0, 1, 2, 3], [1, 2, 3, 4, 4]]),
        (SlidingWindow(2) | ITSELF, 5, [[5, 5, 5, 5, 5]]),
    ],
)
def test_real_key_counts_by_hand(mask, queries, wanted):
    assert real_key_counts(mask, 2, 3, queries, 5, CPU).squeeze(1).squeeze(-1).tolist() == wanted


def test_a_union_with_a_mask_for_each_head_has_a_length_for_each_head():
    counts = real_key_counts((Causal() & Padding(REAL)) | Dense(CELLS[:1]), 2, 3, 5, 5, CPU)
    wanted = (whole(Causal() & Padding(REAL)) | CELLS[:1]).sum(-1, keepdim=True)
    assert torch.equal(counts, wanted)


def test_an_intersection_is_sparse_where_a_member_is_and_a_union_where_all_are():
    assert (Causal() & SlidingWindow(2)).is_sparse and (Documents(IDS) | SlidingWindow(2)).is_sparse
    assert not (Causal() | SlidingWindow(2)).is_sparse and not (Causal() & Padding(REAL)).is_sparse


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(2), PrefixLM(2), Causal() & SlidingWindow(2)], ids=repr)
def test_a_rule_is_lowered_and_counted_on_the_device_that_is_asked_for(mask):
    assert mask.dense(3, 5, batch_size=2, num_heads=3, device="meta").device == META
    assert real_key_counts(mask, 2, 3, 3, 5, META).device == META


def test_a_mask_keeps_one_dense_form_and_not_one_for_every_length():
    mask = Causal() & SlidingWindow(2)
    kept = [mask.dense(length, length) for length in (3, 4, 5)]
    assert [tensor.shape[-1] for tensor in kept] == [3, 4, 5]
    assert mask.dense(5, 5) is kept[-1]
    assert mask.dense(3, 3) is not kept[0] and torch.equal(mask.dense(3, 3), kept[0])


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_a_mask_that_was_used_with_tensors_without_values_serves_others_afterwards(backend):
    (used, fresh), x = (Causal() & SlidingWindow(2) for _ in range(2)), torch.randn(2, 3, 5, 4)
    with FakeTensorMode() as mode:
        scaled_dot_product_attention(*(mode.from_tensor(x),) * 3, used, backend=backend)
    got, want = (scaled_dot_product_attention(x, x, x, each, backend=backend) for each in (used, fresh))
    assert torch.equal(got, want)


def test_a_mask_lowered_in_inference_mode_serves_training_afterwards():
    mask = Causal() & Padding(REAL)
    with torch.inference_mode():
        whole(mask)
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    x.masked_fill(~whole(mask), 0.0).sum().backward()  # an inference tensor could not be saved
    assert torch.equal(x.grad != 0.0, whole(mask).expand_as(x))


def test_in_a_graph_a_window_stays_causal_goes_where_it_hides_nothing_and_nothing_is_kept(monkeypatch):
    mask, wide = Causal() & Padding(REAL), SlidingWindow(9) & Causal()
    kept = whole(Causal() & Padding(REAL))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert repr(simplify(wide, 1, 5)) == "SlidingWindow(window=9)"
    assert simplify(wide, 3, 5) is wide
    first, second = whole(mask), whole(mask)
    assert torch.equal(first, kept) and torch.equal(second, kept) and first is not second


@pytest.mark.parametrize("backend", ["sdpa", "chunked", "math"])
def test_a_used_mask_is_copied_without_what_it_remembers(backend):
    size = 512
    x, real = torch.randn(1, 1, size, 8), torch.ones(1, size, dtype=torch.bool)
    for build in (lambda: Padding(real) & Causal() & SlidingWindow(5), lambda: SlidingWindow(5), lambda: PrefixLM(3)):
        mask = build()
        want = scaled_dot_product_attention(x, x, x, mask, backend=backend)
        assert len(pickle.dumps(mask)) == len(pickle.dumps(build())) < 4096
        for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
            assert vars(other).keys() == vars(build()).keys() and repr(other) == repr(mask)
            assert torch.equal(scaled_dot_product_attention(x, x, x, other, backend=backend), want)


@pytest.mark.parametrize("mask", [Causal(), Padding(REAL), Causal() & Padding(REAL)], ids=repr)
def test_a_mask_cannot_be_written_to_and_equals_itself_alone(mask):
    other = replace(mask)
    assert mask == mask and mask != other and len({mask, other}) == 2  # tensors have no truth value to compare by
    for name in [field.name for field in fields(mask)] or ["anything"]:
        with pytest.raises(FrozenInstanceError):
            setattr(mask, name, None)


def test_pictures():
    assert str(Causal()).splitlines()[1] == "x x . . . ."
    assert Causal().grid(2, 4) == "x x x .\nx x x x"
    assert str(Padding(REAL)).splitlines() == [". . x x x"] * 5
    with torch.device("meta"):  # indices are made where the mask's tensors are
        assert str(Padding(REAL) & Causal()).splitlines()[3] == ". . x x ."
    assert str(Causal() & Documents(IDS)).splitlines()[3] == ". . x x ."
    assert str(BlockSparse(torch.eye(2, dtype=torch.bool), 2) & Causal()) == "x . . .\nx x . .\n. . x .\n. . x x"
    assert BlockSparse(torch.eye(2, dtype=torch.bool), 1).grid(2) == "x .\n. x"
    assert len(str(BlockSparse(CELLS[:1, :, :3, :3][0], 2)).splitlines()) == 6
    oblong = Dense(torch.ones(2, 5, dtype=torch.bool)) & SlidingWindow(2)
    assert str(oblong) == ". . x x x\n. . . x x"
    assert [c == "x" for c in Dense(CELLS).grid(5, batch=1, head=2) if c in "x."] == CELLS[1, 2].flatten().tolist()
    assert repr((Causal() | PrefixLM(2)) & SlidingWindow(3)) == "(Causal() | PrefixLM(length=2)) & SlidingWindow(window=3)"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["math", "sdpa", "chunked"])
def test_a_mask_follows_its_tensor_when_the_tensor_is_changed_in_place(mode, backend):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("real", torch.ones(2, 7, dtype=torch.bool))
            self.mask = Padding(self.real) & Causal()

        def forward(self, x):
            return scaled_dot_product_attention(x, x, x, self.mask, backend=backend)

    with mode():
        layer, x, real = Layer(), torch.randn(2, 3, 7, 5), torch.rand(2, 7) < 0.5
        before = layer(x)
        layer.load_state_dict({"real": real})
        assert not torch.equal(layer(x), before)
        torch.testing.assert_close(layer(x), scaled_dot_product_attention(x, x, x, Padding(real) & Causal(), backend="math"))
