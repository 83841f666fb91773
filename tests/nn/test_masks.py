"""Masks: the rule, how rules combine, tiles, and pictures."""

from dataclasses import FrozenInstanceError, dataclass, fields, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sizes import grids

from minitx.nn import Causal, Documents, Padding, PrefixLM, SlidingWindow, from_key_padding_mask, intersect
from minitx.nn.masks import And, Dense, Mask, Or, as_mask, real_key_counts, simplify

CPU = torch.device("cpu")
REAL = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])  # left and right padding
IDS = torch.tensor([[0, 0, 1, 1, 1], [4, 4, 4, 4, 2]])
LENGTHS = torch.tensor([2, 4])
CELLS = grids(lambda b, h, t, j, i: (3 * b + 2 * h + t + j) % 4 != 1, (2, 3, 5, 5))
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
}


def whole(mask, shape=(2, 3, 5, 5), **tile):
    B, H, L, S = shape
    return mask.dense(L, S, batch_size=B, num_heads=H, **tile)


@pytest.mark.parametrize("name", RULES)
def test_dense_form_says_what_the_rule_says(name):
    mask, rule = RULES[name]
    assert torch.equal(whole(mask).expand(2, 3, 5, 5), grids(rule, (2, 3, 5, 5)))


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("name", ["causal", "window", "padding", "documents", "prefix", "prefix per row"])
def test_fewer_queries_are_the_last_rows_of_the_square(name, length):
    mask, _ = RULES[name]
    square = whole(mask).expand(2, 3, 5, 5)
    assert torch.equal(whole(mask, (2, 3, length, 5)).expand(2, 3, length, 5), square[:, :, -length:])


@pytest.mark.parametrize("first", RULES)
@pytest.mark.parametrize("second", RULES)
def test_and_is_intersection_and_or_is_union(first, second):
    (one, rule_one), (two, rule_two) = RULES[first], RULES[second]
    both = grids(lambda *at: rule_one(*at) and rule_two(*at), (2, 3, 5, 5))
    either = grids(lambda *at: rule_one(*at) or rule_two(*at), (2, 3, 5, 5))
    assert torch.equal(whole(one & two).expand(2, 3, 5, 5), both)
    assert torch.equal(whole(one | two).expand(2, 3, 5, 5), either)
    assert torch.equal(whole(intersect(one, two)).expand(2, 3, 5, 5), both)


masks = st.recursive(
    st.sampled_from([mask for mask, _ in RULES.values()]),
    lambda inner: st.one_of(st.builds(lambda a, b: a & b, inner, inner), st.builds(lambda a, b: a | b, inner, inner)),
    max_leaves=5,
)


@given(mask=masks, cut=st.tuples(*[st.integers(0, 5)] * 4))
def test_tiles_are_slices_of_the_whole(mask, cut):
    rows, keys = slice(min(cut[:2]), max(cut[:2])), slice(min(cut[2:]), max(cut[2:]))
    tile = whole(mask, rows=rows, keys=keys)
    wanted = whole(mask).expand(2, 3, 5, 5)[:, :, rows, keys]
    assert torch.equal(tile.expand(wanted.shape), wanted)


@given(mask=masks, others=st.lists(masks, max_size=3))
def test_intersect_never_drops_a_constraint(mask, others):
    wanted = whole(mask).expand(2, 3, 5, 5)
    for other in others:
        wanted = wanted & whole(other)
    assert torch.equal(whole(intersect(mask, None, *others)).expand(2, 3, 5, 5), wanted)


@given(mask=masks, shape=st.sampled_from([(5, 5), (1, 5), (3, 5)]))
def test_simplify_changes_no_answer(mask, shape):
    assume(shape[0] == 5 or "Dense" not in repr(mask))  # a dense mask has one size
    simple = simplify(mask, *shape)
    wanted = whole(mask, (2, 3, *shape)).expand(2, 3, *shape)
    got = torch.ones_like(wanted) if simple is None else whole(simple, (2, 3, *shape))
    assert torch.equal(got.expand_as(wanted), wanted)


@given(mask=masks)
def test_and_with_itself_and_or_with_itself_change_nothing(mask):
    assert torch.equal(whole(mask & mask), whole(mask).expand_as(whole(mask & mask)))
    assert torch.equal(whole(mask | mask), whole(mask).expand_as(whole(mask | mask)))


def test_repeated_parts_do_not_hide_another_constraint():
    repeated = (Causal() & SlidingWindow(2)) & Causal()
    padded = intersect(repeated, Padding(REAL))
    assert torch.equal(whole(padded), whole(repeated) & whole(Padding(REAL)))


def test_intersect_shares_a_mask_that_holds_the_others():
    padding = Padding(REAL)
    mask = Causal() & padding
    assert intersect(mask, Causal()) is mask
    assert intersect(mask, padding, None) is mask
    assert intersect(None, None) is None
    assert intersect(padding) is padding


@pytest.mark.parametrize("mask", [Causal() & Padding(REAL), SlidingWindow(1) | Padding(REAL)], ids=["and", "or"])
def test_a_combined_mask_builds_its_dense_form_once(mask):
    assert whole(mask) is whole(mask)


def test_simplify_drops_only_what_hides_nothing():
    assert simplify(Causal(), 1, 7) is None
    assert simplify(SlidingWindow(7), 5, 7) is None
    assert simplify(None, 5, 7) is None
    kept = SlidingWindow(6)
    assert simplify(kept, 5, 7) is kept
    padding = Padding(torch.ones(2, 7, dtype=torch.bool))  # all true, but values are not looked at
    assert simplify(padding, 5, 7) is padding
    assert simplify(Causal() & padding, 1, 7) is padding


def test_an_axis_that_a_rule_does_not_use_has_size_one():
    assert whole(Padding(REAL)).shape == (2, 1, 1, 5)
    assert whole(Causal()).shape == (1, 1, 5, 5)
    assert whole(Causal() & Padding(REAL)).shape == (2, 1, 5, 5)


def test_window_counts_the_query_itself():
    mask = Causal() & SlidingWindow(3)
    assert whole(mask)[0, 0].sum(-1).tolist() == [1, 2, 3, 3, 3]


def test_padding_true_means_real_and_torch_polarity_is_inverted_once():
    torch_style = ~REAL  # nn.MultiheadAttention: True = hidden
    assert torch.equal(from_key_padding_mask(torch_style), REAL)
    assert whole(Padding(REAL))[0, 0, 0].tolist() == [False, False, True, True, True]


def test_real_key_counts_by_hand():
    def counts(mask, queries=5):
        return real_key_counts(mask, queries, 5, CPU).squeeze(1).squeeze(-1).tolist()

    assert counts(None) == [[5, 5, 5, 5, 5]]
    assert counts(Causal()) == [[1, 2, 3, 4, 5]]
    assert counts(Causal(), 2) == [[4, 5]]
    assert counts(Padding(REAL)) == [[3] * 5, [4] * 5]
    assert counts(Causal() & Padding(REAL)) == [[0, 0, 1, 2, 3], [1, 2, 3, 4, 4]]
    assert counts(Causal() & Padding(REAL) & SlidingWindow(1)) == [[0, 0, 1, 2, 3], [1, 2, 3, 4, 4]]
    assert counts(Causal() & Documents(IDS)) == [[1, 2, 1, 2, 3], [1, 2, 3, 4, 1]]
    assert counts(Causal() & Documents(IDS) & Padding(REAL)) == [[0, 0, 1, 2, 3], [1, 2, 3, 4, 0]]


def test_pictures():
    assert str(Causal()).splitlines()[1] == "x x . . . ."
    assert Causal().grid(2, 4) == "x x x .\nx x x x"
    assert SlidingWindow(1).grid(3) == "x . .\n. x .\n. . x"
    assert PrefixLM(2).grid(3) == "x x .\nx x .\nx x x"
    assert str(Padding(REAL)).splitlines() == [". . x x x"] * 5
    assert Padding(REAL).grid(1, 5, batch=1) == "x x x x ."
    assert str(Causal() & Documents(IDS)).splitlines()[3] == ". . x x ."
    assert str(Causal() | PrefixLM(2)).splitlines()[0] == "x x . . . ."


def test_a_dense_mask_over_a_batch_prints_its_first_grid():
    assert str(Dense(CELLS)).splitlines()[0] == " ".join("x" if cell else "." for cell in CELLS[0, 0, 0])
    assert Dense(CELLS).grid(5, batch=1, head=2).splitlines()[4] == " ".join("x" if c else "." for c in CELLS[1, 2, 4])
    oblong = Dense(torch.ones(2, 5, dtype=torch.bool)) & SlidingWindow(2)
    assert str(oblong) == ". . x x x\n. . . x x"


def test_representation_names_the_parts():
    assert repr(Causal() & SlidingWindow(3)) == "Causal() & SlidingWindow(window=3)"
    assert repr((Causal() | PrefixLM(2)) & SlidingWindow(3)) == "(Causal() | PrefixLM(length=2)) & SlidingWindow(window=3)"


@pytest.mark.parametrize("name", RULES)
def test_a_bool_tensor_combines_with_a_mask_on_either_side(name):
    mask, _ = RULES[name]
    cells = CELLS[:1]
    for both in (mask & cells, cells & mask):
        assert torch.equal(whole(both).expand(2, 3, 5, 5), (whole(mask) & cells).expand(2, 3, 5, 5))
    for either in (mask | cells, cells | mask):
        assert torch.equal(whole(either).expand(2, 3, 5, 5), (whole(mask) | cells).expand(2, 3, 5, 5))


def test_a_tensor_that_is_no_mask_does_not_combine():
    for combine in (lambda: Causal() & torch.zeros(3, 3), lambda: torch.zeros(3, 3) | Causal()):
        with pytest.raises(TypeError, match="additive values belong in attn_bias"):
            combine()
    with pytest.raises(ValueError, match="is ambiguous"):
        Causal() & torch.ones(2, 3, 3, dtype=torch.bool)


def test_layers_share_what_is_left_of_a_mask_and_its_dense_form():
    mask = Causal() & Padding(REAL) & SlidingWindow(3)
    one = simplify(mask, 1, 5)
    assert one is simplify(mask, 1, 5)  # without Causal, for one query
    assert one.dense(1, 5, batch_size=2) is simplify(mask, 1, 5).dense(1, 5, batch_size=2)


def test_a_mask_keeps_one_dense_form_and_not_one_for_every_length():
    mask = Causal() & SlidingWindow(2)
    kept = [mask.dense(length, length) for length in (3, 4, 5)]
    assert [tensor.shape[-1] for tensor in kept] == [3, 4, 5]
    assert mask.dense(5, 5) is kept[-1]
    assert mask.dense(3, 3) is not kept[0] and torch.equal(mask.dense(3, 3), kept[0])


def test_a_mask_lowered_in_inference_mode_serves_training_afterwards():
    mask = Causal() & Padding(REAL)
    with torch.inference_mode():
        whole(mask)
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    x.masked_fill(~whole(mask), 0.0).sum().backward()  # an inference tensor could not be saved
    assert not whole(mask).is_inference()


def test_and_with_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="unsupported operand"):
        Causal() & 3
    with pytest.raises(TypeError, match="unsupported operand"):
        Causal() | 3


def test_a_tensor_becomes_a_dense_mask_and_a_mask_stays_itself():
    cells = torch.ones(3, 3, dtype=torch.bool)
    mask = Causal()
    assert isinstance(as_mask(cells), Dense)
    assert as_mask(mask) is mask
    assert as_mask(None) is None
    assert isinstance(intersect(cells, mask), And)


SLICES = [slice(i, j) for i in range(5) for j in range(i + 1, 6)]


@pytest.mark.parametrize("num_queries", [1, 3, 5])
@pytest.mark.parametrize(
    "mask", [Causal(), *map(SlidingWindow, (1, 2, 4, 5, 7)), *map(PrefixLM, (0, 1, 3, 5))], ids=lambda mask: repr(mask)
)
def test_a_tile_counts_as_visible_or_hidden_just_where_all_of_it_is(mask, num_queries):
    cells = mask.dense(num_queries, 5)[0, 0].tolist()
    for rows in (s for s in SLICES if s.stop <= num_queries):
        for keys in SLICES:
            tile = [cell for line in cells[rows] for cell in line[keys]]
            wanted = True if all(tile) else None if any(tile) else False
            assert mask.covers(rows, keys, 5 - num_queries) is wanted, (rows, keys)


def test_what_only_the_values_know_is_said_of_no_tile():
    one = slice(0, 1), slice(4, 5), 0
    assert Padding(REAL).covers(*one) is Documents(IDS).covers(*one) is Dense(CELLS).covers(*one) is None
    assert PrefixLM(LENGTHS).covers(*one) is None  # the future of a row, or its prefix
    assert PrefixLM(LENGTHS).covers(slice(4, 5), slice(0, 5), 0) is True


@pytest.mark.parametrize(
    ("verdicts", "both", "either"),
    [((True, True), True, True), ((True, False), False, True), ((True, None), None, True), ((False, None), False, None),
     ((None, None), None, None), ((False, False), False, False)],
)  # fmt: skip
def test_the_verdict_on_a_tile_of_two_masks_follows_from_theirs(verdicts, both, either):
    tile = slice(2, 3), slice(2, 4), 0
    members = [
        {True: SlidingWindow(9), False: SlidingWindow(9) & PrefixLM(0) & _Nothing(), None: Causal()}[v] for v in verdicts
    ]
    assert [member.covers(*tile) for member in members] == list(verdicts)
    for order in (members, members[::-1]):
        assert And(tuple(order)).covers(*tile) is both
        assert Or(tuple(order)).covers(*tile) is either


@dataclass(frozen=True, eq=False)
class _Nothing(Mask):
    def visible(self, batch, head, row, key, offset):
        return (row < 0) & (key < 0)

    def covers(self, rows, keys, offset):
        return False


@pytest.mark.parametrize("shape", [(5, 5), (2, 3, 5, 5), (2, 1, 1, 5), (1, 3, 5, 1), (1, 1, 1, 1)])
def test_a_tile_of_a_tensor_is_a_slice_of_its_axes_that_are_not_one(shape):
    tensor = torch.rand(shape) < 0.5
    tile = Dense(tensor).dense(5, 5, rows=slice(1, 3), keys=slice(2, 5))
    assert torch.equal(tile.expand(tile.shape[0], tile.shape[1], 2, 3), torch.broadcast_to(tensor, (*tile.shape[:2], 5, 5))[:, :, 1:3, 2:5])  # fmt: skip
    assert tile.shape[2:] == (2 if tile.shape[2] > 1 else 1, 3 if tile.shape[3] > 1 else 1)
    two = Dense(torch.tensor([[True, False], [False, True]]))  # the smallest that there is something to cut from
    assert two.dense(2, 2, rows=slice(0, 1), keys=slice(1, 2)).tolist() == [[[[False]]]]
    rule = Dense(tensor).visible(*(torch.arange(n).view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate((2, 3, 5, 5))), 0)  # fmt: skip
    assert torch.equal(rule.expand(2, 3, 5, 5), torch.broadcast_to(tensor, (2, 3, 5, 5)))


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(2), PrefixLM(2), Causal() & SlidingWindow(2)], ids=repr)
def test_a_rule_is_lowered_on_the_device_that_is_asked_for(mask):
    assert mask.dense(3, 5, batch_size=2, num_heads=3, device="meta").device.type == "meta"


def test_a_rule_by_head_gets_every_head():
    class Distance(Mask):
        def visible(self, batch, head, row, key, offset):
            return row + offset - key <= head + batch

    cells = Distance().dense(5, 5, batch_size=2, num_heads=3)
    assert torch.equal(cells, grids(lambda b, h, t, j, i: t - j <= h + b, (2, 3, 5, 5)))
    assert Distance().grid(2, batch=1, head=0) == "x x\nx x" and Distance().grid(2) == "x x\n. x"


def test_a_prefix_of_nothing_is_causal_and_none_takes_more_queries_than_keys():
    assert torch.equal(PrefixLM(0).dense(3, 5), Causal().dense(3, 5))
    with pytest.raises(ValueError, match="at least as many keys as queries"):
        PrefixLM(2).check(1, 1, 5, 4)


def test_a_tile_neither_comes_from_the_kept_dense_form_nor_replaces_it():
    mask = Causal() & Padding(REAL)
    kept = whole(mask)
    for tile in ({"rows": slice(1, 3)}, {"keys": slice(2, 4)}, {"rows": slice(1, 3), "keys": slice(2, 4)}):
        rows, keys = tile.get("rows", slice(None)), tile.get("keys", slice(None))
        assert torch.equal(whole(mask, **tile), kept[:, :, rows, keys])
        assert whole(mask) is kept


def test_a_combined_mask_has_the_size_of_the_member_that_knows_fewer_queries():
    square, wide, row = Padding(REAL), Dense(torch.ones(3, 5, dtype=torch.bool)), Dense(torch.ones(1, 5, dtype=torch.bool))
    assert (square & wide).size() == (wide & square).size() == (3, 5)
    assert (row & square).size() == (row & Causal()).size() == (5, 5)  # one row stands for any number of queries
    assert (Causal() & SlidingWindow(2)).size() is None


def test_only_attn_mask_is_told_where_additive_values_belong():
    with pytest.raises(TypeError, match=r"attn_mask must be a bool tensor .* additive values belong in attn_bias"):
        Dense(torch.zeros(2, 2))
    with pytest.raises(TypeError, match=r"key_mask must be a bool tensor \(True = may attend\), got torch.float32$"):
        Padding(torch.zeros(2, 2))


def test_in_a_graph_a_window_stays_whatever_it_covers_and_causal_goes_where_it_hides_nothing(monkeypatch):
    mask = SlidingWindow(9) & Causal()
    assert simplify(mask, 1, 5) is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert repr(simplify(mask, 1, 5)) == "SlidingWindow(window=9)"
    assert simplify(mask, 3, 5) is mask


def test_a_window_shortens_no_packed_document():
    packed = Documents(IDS) & Causal() & Padding(REAL)
    assert torch.equal(real_key_counts(packed & SlidingWindow(1), 5, 5, CPU), real_key_counts(packed, 5, 5, CPU))


def test_real_keys_are_counted_on_the_device_that_is_asked_for():
    meta = torch.device("meta")
    assert real_key_counts(Causal(), 3, 5, meta).device.type == real_key_counts(None, 3, 5, meta).device.type == "meta"
    assert real_key_counts(Documents(IDS.to("meta")) & Causal(), 3, 5, meta).device.type == "meta"


@pytest.mark.parametrize("name", [*RULES, "and", "or"])
def test_a_mask_cannot_be_written_to_and_equals_itself_alone(name):
    combined = {"and": lambda: Causal() & Padding(REAL), "or": lambda: Causal() | Padding(REAL)}
    mask, other = (combined[name]() if name in combined else replace(RULES[name][0]) for _ in range(2))
    assert mask == mask and mask != other and len({mask, other}) == 2  # tensors have no truth value to compare by
    for name in [field.name for field in fields(mask)] or ["anything"]:
        with pytest.raises(FrozenInstanceError):
            setattr(mask, name, None)


def test_a_picture_is_of_the_first_head_of_the_first_row_unless_another_is_asked_for():
    mask = Dense(CELLS)
    pictures = {(b, h): "\n".join(" ".join("x" if c else "." for c in line) for line in CELLS[b, h].tolist()) for b in range(2) for h in range(3)}  # fmt: skip
    assert mask.grid(5) == pictures[0, 0] and mask.grid(5, batch=1, head=2) == pictures[1, 2]
    assert len(set(pictures.values())) > 1


def test_a_rule_that_knows_neither_batch_nor_heads_is_lowered_for_one_of_each():
    class Everywhere(Mask):
        def visible(self, batch, head, row, key, offset):
            return (batch >= 0) & (head >= 0) & (row >= 0) & (key >= 0)

    assert Everywhere().dense(3, 5).shape == (1, 1, 3, 5)


def test_a_mask_without_a_rule_says_so():
    with pytest.raises(NotImplementedError, match="Mask defines no rule"):
        Mask().dense(2, 3)


def test_in_a_graph_a_combined_mask_is_lowered_anew_and_keeps_nothing(monkeypatch):
    mask = Causal() & Padding(REAL)
    kept = whole(Causal() & Padding(REAL))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    first, second = whole(mask), whole(mask)
    assert torch.equal(first, kept) and torch.equal(second, kept) and first is not second


def test_every_index_of_a_rule_lies_on_the_device_that_is_asked_for():
    class Asks(Mask):
        def visible(self, *indices):
            assert [index.device.type for index in indices[:4]] == ["meta"] * 4
            return indices[3] <= indices[2]

    assert Asks().dense(3, 5, batch_size=2, num_heads=3, device="meta").shape == (1, 1, 3, 5)
