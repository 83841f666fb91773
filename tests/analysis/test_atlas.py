"""A hand-made head of each kind lands in its class; what is not there is not found."""

import math

import pytest
import torch
from torch import nn

from minitx.analysis.atlas import atlas_over_steps, head_atlas, head_scores, turning_points
from minitx.analysis.atlas_figures import atlas_figure, classes_figure, scores_figure
from minitx.analysis.canvas import png
from minitx.analysis.intervals import mean_interval, t_quantile
from minitx.analysis.patterns import BEST, CONTENT, SEARCHED, sentence_scores
from minitx.analysis.snapshot import AttentionMap, Snapshot, take_snapshot
from minitx.analysis.structure import Links, Structure
from minitx.nn import MultiHeadAttention

SELF, CAUSAL, CROSS = "self", "causal", "cross"
B, L, S = 11, 23, 17
TOKENS = 7  # few, so that every row repeats some


def snapshot_of(scores, *, kind=SELF, ids=None, key_ids=None, real=None, key_real=None, step=None):
    """A snapshot of softmax(scores), scores (B, H, L, S); ``real`` hides padding."""
    B, H, L, S = scores.shape
    visible = torch.ones(B, H, L, S, dtype=torch.bool)
    if kind == CAUSAL:
        visible = visible.tril(S - L)
    real = torch.ones(B, L, dtype=torch.bool) if real is None else real
    queries, keys = ("decoder_input_ids", "input_ids") if kind == CROSS else ("input_ids", "input_ids")
    if key_real is None:
        key_real = torch.ones(B, S, dtype=torch.bool) if kind == CROSS else real
    visible &= key_real[:, None, None]
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    held = {keys: key_ids if kind == CROSS else ids, queries: ids}
    held = {axis: tensor for axis, tensor in held.items() if tensor is not None}
    masks = {keys: key_real, queries: real}
    texts = {axis: [["?"] * mask.shape[1]] * B for axis, mask in masks.items()}
    layer = AttentionMap("core", kind, queries, keys, weights, visible, scores.amax(-1))
    return Snapshot((layer,), texts, held, masks, step)


def repeating_ids(num_rows=B, length=L):
    return torch.randint(0, TOKENS, (num_rows, length))


def place(length):
    return torch.arange(length)


def same(ids):
    """bool (B, L, L): another position has the query's token."""
    return (ids[:, :, None] == ids[:, None]) & ~torch.eye(ids.shape[1], dtype=torch.bool)


def shifted(keys, n):
    """``n`` keys further; never the query itself."""
    keys = torch.nn.functional.pad(keys[..., :-n], (n, 0))
    return keys & ~torch.eye(keys.shape[1], dtype=torch.bool)


def behind(keys):
    return shifted(keys, 1)


def offset(n, length=L):
    return (place(length) == place(length)[:, None] + n).expand(B, length, length)


def named_keys(name, ids):
    """bool (B, L, L): where a head of the kind looks."""
    columns = torch.randint(3, 9, (B, 1, 1))  # another one in each sentence
    return {
        "previous": offset(-1),
        "next": offset(1),
        "duplicate": same(ids),
        "induction": behind(same(ids)),
        "offset": offset(-3),
        "shifted": shifted(same(ids), 3),
        "first": (place(L) == 0).expand(B, L, L),
        "column": (place(L) == columns).expand(B, L, L),
        "band": ((place(L) - place(L)[:, None]).abs() <= 2).expand(B, L, L),
        "itself": offset(0),
    }[name]


def noise(*shape):
    return torch.randn(*shape)


@pytest.mark.parametrize("kind", [SELF, CAUSAL])
@pytest.mark.parametrize(
    ("name", "label"),
    [
        *(("previous", "previous"), ("next", "next"), ("duplicate", "duplicate"), ("induction", "induction")),
        *(
            ("offset", "offset"),
            ("shifted", "shifted"),
            ("first", "global"),
            ("column", "global"),
            ("band", "local"),
            ("itself", "local"),
        ),
    ],
)
def test_a_hand_made_head_of_each_kind_lands_in_its_class(kind, name, label):
    ids = repeating_ids()
    scores = noise(B, 1, L, L) + 7.0 * named_keys(name, ids)[:, None]
    (head,) = head_scores(snapshot_of(scores, kind=kind, ids=ids)).heads
    if (kind, name) == (CAUSAL, "next"):  # is never visible
        label = "none"
        assert math.isnan(head.scores["next"].excess.mean)
    assert head.label == label
    if label in BEST:
        assert head.leading == label
        assert 0.8 < head.scores[label].excess.mean <= 1.1
        assert head.scores[label].at == {"offset": -3, "shifted": 3}.get(label)


@pytest.mark.parametrize("kind", [SELF, CAUSAL])
def test_a_head_that_does_half_of_two_things_is_mixed(kind):
    scores = noise(B, 1, L, L) + 6.0 * (offset(-1) | (place(L) == 0))[:, None]
    (head,) = head_scores(snapshot_of(scores, kind=kind, ids=repeating_ids())).heads
    assert head.label == "mixed"


def test_wrong_heads_do_not_pass_for_right_ones():
    ids = repeating_ids()
    rules = {
        "transposed": named_keys("previous", ids).transpose(1, 2),
        "one too far": offset(-2),
        "the same token itself": same(ids),
        "two behind it": shifted(same(ids), 2),
        "another row's": behind(same(ids)).roll(1, 0),
    }
    scores = noise(B, len(rules), L, L) + 9.0 * torch.stack(list(rules.values()), 1)
    heads = dict(zip(rules, head_scores(snapshot_of(scores, ids=ids)).heads, strict=True))
    assert heads["transposed"].label == "next"
    assert (heads["one too far"].label, heads["one too far"].scores["offset"].at) == ("offset", -2)
    assert heads["the same token itself"].label == "duplicate"
    assert (heads["two behind it"].label, heads["two behind it"].scores["shifted"].at) == ("shifted", 2)
    assert heads["another row's"].label == "none"


def copied_ids(num_rows=B, length=L, segment=6):
    """Different tokens, but for a segment that comes again after a gap of another length in each row."""
    rows = []
    for _ in range(num_rows):
        tokens, gap = torch.randperm(60)[:length], int(torch.randint(length - 2 * segment, (1,)))
        first = int(torch.randint(length - 2 * segment - gap + 1, (1,)))
        second = first + segment + gap
        tokens[second : second + segment] = tokens[first : first + segment].clone()
        rows.append(tokens)
    return torch.stack(rows)


def test_an_induction_head_that_rests_on_the_first_token_is_an_induction_head():
    ids = copied_ids()
    scores = 6.0 * named_keys("first", ids) + 20.0 * behind(same(ids))
    (head,) = head_scores(snapshot_of(scores[:, None], kind=CAUSAL, ids=ids)).heads
    assert head.scores["first"].excess.low > 0.5
    assert head.label == "induction"


def test_what_position_explains_is_no_comparison_of_tokens():
    ids = torch.stack([torch.randperm(60)[:12].repeat(2)[:L] for _ in range(B)])  # the copy always comes 12 further
    scores = noise(B, 2, L, L)
    scores[:, 0] += 9.0 * behind(same(ids))
    scores[:, 1] += 9.0 * offset(-11)
    for head in head_scores(snapshot_of(scores, kind=CAUSAL, ids=ids)).heads:
        assert head.scores["induction"].value > 0.9
        assert head.scores["induction"].excess.high < 0.1
        assert head.label == "none"


# --- what uniform and random attention score


def windowed(snapshot, window):
    (layer,) = snapshot.maps
    visible = layer.visible & (place(L)[:, None] - place(L) < window)
    weights = (layer.weights * visible) / (layer.weights * visible).sum(-1, keepdim=True)
    return Snapshot(
        (AttentionMap("core", layer.kind, layer.queries, layer.keys, weights, visible, layer.max_logit),),
        *(snapshot.tokens, snapshot.ids, snapshot.real),
    )


@pytest.mark.parametrize("window", [L, 5])
@pytest.mark.parametrize("kind", [SELF, CAUSAL, CROSS])
def test_uniform_attention_scores_zero_whatever_is_visible(kind, window):
    ids, keys = repeating_ids(), L if kind != CROSS or window < L else S
    snapshot = snapshot_of(torch.zeros(B, 2, L, keys).double(), kind=kind, ids=ids, key_ids=repeating_ids(B, keys))
    if window < L:
        snapshot = windowed(snapshot, window)
    for head in head_scores(snapshot).heads:
        for name, score in head.scores.items():
            assert math.isnan(score.excess.mean) or abs(score.excess.mean) < 1e-12, name
        assert head.label == "none"
    assert math.isnan(head.scores["previous"].excess.mean) == (kind == CROSS)


@pytest.mark.parametrize("sharpness", [1.0, 6.0])
@pytest.mark.parametrize("kind", [SELF, CAUSAL, CROSS])
def test_random_attention_has_no_class(kind, sharpness):
    for seed in range(2):
        torch.manual_seed(seed)
        ids, keys = repeating_ids(), S if kind == CROSS else L
        scores = sharpness * noise(B, 32, L, keys)
        atlas = head_scores(snapshot_of(scores, kind=kind, ids=ids, key_ids=repeating_ids(B, keys)))
        assert {head.label for head in atlas.heads} == {"none"}


def test_intervals_cover_better_than_percentiles_of_a_bootstrap():
    torch.manual_seed(1)

    def share(low, high):
        return float(((low < 2 / 7) & (high > 2 / 7)).double().mean())

    for n in (5, 16, 64):
        drawn = torch.distributions.Beta(2.0, 5.0).sample((n, 20_000)).double()
        _, low, high, count = mean_interval(drawn)
        assert (count == n).all()
        covered = share(low, high)
        assert 0.935 < covered < 0.96, n
        means = torch.stack([drawn[torch.randint(n, (n,)), :1000].mean(0) for _ in range(300)])
        assert covered > share(*means.quantile(torch.tensor([0.025, 0.975]).double(), dim=0)), n


def test_the_quantile_is_students():
    table = {1: 12.7062, 2: 4.30265, 3: 3.18245, 7: 2.36462, 30: 2.04227, 1000: 1.96234}  # of any textbook
    for degrees, point in table.items():
        assert t_quantile(degrees) == pytest.approx(point, rel=1e-5)


# --- scores by hand


def by_hand(weights, kind=CAUSAL, ids=None, key_ids=None):
    weights = torch.tensor(weights, dtype=torch.float64)[None, None]
    snapshot = snapshot_of(weights.clamp(min=1e-300).log(), kind=kind, ids=ids, key_ids=key_ids)
    found = sentence_scores(snapshot.maps[0], snapshot.ids)
    return {name: (value[0].tolist(), uniform[0].tolist()) for name, (value, uniform, _) in found.items()}


def test_scores_worked_out_by_hand():
    found = by_hand(
        [[1, 0, 0, 0], [0.6, 0.4, 0, 0], [0.2, 0.7, 0.1, 0], [0.1, 0.2, 0.3, 0.4]], ids=torch.tensor([[5, 6, 5, 5]])
    )
    approx = pytest.approx
    assert found["previous"] == approx(((0.6 + 0.7 + 0.3) / 3, (1 / 2 + 1 / 3 + 1 / 4) / 3))
    assert found["first"] == approx(((0.6 + 0.2 + 0.1) / 3, (1 / 2 + 1 / 3 + 1 / 4) / 3))
    assert found["duplicate"] == approx(((0.2 + 0.1 + 0.3) / 2, (1 / 3 + 2 / 4) / 2))  # 2 -> 0; 3 -> 0, 2
    assert found["induction"] == approx(((0.7 + 0.2) / 2, (1 / 3 + 1 / 4) / 2))  # 2 -> 1; 3 -> 1, not itself
    assert found["diagonal"] == approx(((1 + 1 + 0.9) / 3, (1 + 1 + 3 / 4) / 3))
    assert found["nearness"] == approx(((0.6 + (0.4 + 0.7) + (0.3 + 0.4 + 0.3)) / 3, (1 / 2 + 1 + 6 / 4) / 3))
    offsets = dict(zip(SEARCHED["offset"], zip(*found["offset"], strict=True), strict=True))
    assert offsets[-3] == approx((0.1, 1 / 4))
    assert offsets[-2] == approx(((0.2 + 0.2) / 2, (1 / 3 + 1 / 4) / 2))
    assert all(math.isnan(offsets[k][0]) for k in (-4, 2, 3))
    shifts = dict(zip(SEARCHED["shifted"], zip(*found["shifted"], strict=True), strict=True))
    assert shifts[-1] == approx((0.2, 1 / 4))  # 3 -> 1, before 2
    assert shifts[-2] == approx((0.1, 1 / 4))  # 3 -> 0, before 2; that 2 stands before 3 is hidden from 2
    assert shifts[2] == approx((0.3, 1 / 4))  # 3 -> 2, two behind 0; two behind 0 is itself for 2
    # even rows (row 0 sees one key): 2, whose favourite is key 1; odd rows: 1 and 3, whose favourite is key 0
    assert found["column"] == approx(((0.4 + 0.2 + 0.2) / 3, (1 / 2 + 1 / 3 + 1 / 4) / 3))


def test_cross_attention_has_a_stretched_diagonal_and_copies_but_no_previous_token():
    keys, queries = 9, 5
    scores = torch.full((B, 2, queries, keys), -9.0)
    scores[:, 0, place(queries), 2 * place(queries)] = 0.0  # query i at key i · 8/4
    ids, key_ids = (torch.stack([torch.randperm(keys) for _ in range(B)]) for _ in range(2))
    ids = ids[:, :queries]
    scores[:, 1].masked_fill_(ids[:, :, None] == key_ids[:, None], 0.0)
    local, copy = head_scores(snapshot_of(scores, kind=CROSS, ids=ids, key_ids=key_ids)).heads
    assert (local.label, local.scores["nearness"].value) == ("local", pytest.approx(0.0, abs=1e-2))
    assert copy.label == "duplicate"
    assert all(math.isnan(local.scores[name].excess.mean) for name in ("previous", "next"))


@pytest.mark.parametrize("left", [True, False])
def test_padding_does_not_count(left):
    lengths = torch.randint(7, L, (B,))
    real = place(L) < lengths[:, None]
    real = real.flip(1) if left else real
    ids = repeating_ids()
    scores = noise(B, 3, L, L)
    padded = head_scores(snapshot_of(scores, kind=CAUSAL, ids=ids, real=real))
    other = scores + 9.0 * noise(B, 3, L, L) * ~(real[:, None, :, None] & real[:, None, None])
    again = head_scores(snapshot_of(other, kind=CAUSAL, ids=ids.where(real, 1 - ids), real=real))
    assert padded.rows() == again.rows(), "what stands in the padding makes no difference"
    alone = [
        head_scores(snapshot_of(scores[i : i + 1][:, :, r][..., r], kind=CAUSAL, ids=ids[i : i + 1, r]))
        for i, r in enumerate(real)
    ]
    for h, head in enumerate(padded.heads):
        for name in BEST.keys() - set(CONTENT) - {"offset"}:  # these need more than one sentence
            each = torch.tensor([one.heads[h].scores[name].excess.mean for one in alone])
            assert head.scores[name].excess.mean == pytest.approx(float(each.nanmean()), abs=1e-6, nan_ok=True), name


def test_without_ids_there_are_no_duplicates_and_one_sentence_has_no_interval():
    (head,) = head_scores(snapshot_of(50.0 * offset(-1)[:1, None].float())).heads
    assert math.isnan(head.scores["duplicate"].excess.mean)
    assert head.scores["previous"].excess.mean == pytest.approx(1.0)
    assert math.isnan(head.scores["previous"].excess.low)
    assert head.label == "none"  # a class needs an interval


def test_four_sentences_give_no_class():
    scores = noise(5, 1, L, L) + 9.0 * offset(-1)[:5, None]
    assert [head_scores(snapshot_of(scores[:n])).heads[0].label for n in (4, 5)] == ["none", "previous"]


def test_a_distance_is_chosen_on_the_even_sentences_and_judged_on_the_odd_ones():
    scores = noise(B, 1, L, L)
    scores[0::2] += 9.0 * offset(-3)[0::2, None]
    scores[1::2] += 9.0 * offset(-5)[1::2, None]
    (head,) = head_scores(snapshot_of(scores, kind=CAUSAL)).heads
    found = head.scores["offset"]
    assert (found.at, found.excess.sentences) == (-3, B // 2)
    assert abs(found.excess.mean) < 0.1
    assert head.label != "offset"


# --- hand-made models


class TwoLayers(nn.Module):
    """The circuit of Elhage et al. 2021: a previous-token head writes into what an induction head reads.

    The stream holds the token, the position, and the previous token, each one-hot.
    """

    def __init__(self, num_tokens, length):
        super().__init__()
        self.num_tokens, self.length = num_tokens, length
        E = num_tokens + length + num_tokens
        self.layers = nn.ModuleList(MultiHeadAttention(E, 1, bias=False, scale=1.0) for _ in range(2))
        token, position, before = slice(0, num_tokens), slice(num_tokens, E - num_tokens), slice(E - num_tokens, E)
        for weight in self.parameters():
            nn.init.zeros_(weight)
        first, second = self.layers
        first.q_proj.weight.data[position, position] = 40 * torch.eye(length).roll(-1, 0)  # i asks for i − 1
        first.k_proj.weight.data[position, position] = torch.eye(length)
        first.v_proj.weight.data[before, token] = torch.eye(num_tokens)
        first.out_proj.weight.data[before, before] = torch.eye(num_tokens)
        second.q_proj.weight.data[before, token] = 40 * torch.eye(num_tokens)  # asks for keys behind its token
        second.k_proj.weight.data[before, before] = torch.eye(num_tokens)

    def forward(self, input_ids):
        x = torch.cat(
            [nn.functional.one_hot(input_ids, self.num_tokens), torch.eye(self.length).expand(len(input_ids), -1, -1)], 2
        )
        x = nn.functional.pad(x.float(), (0, self.num_tokens))
        for layer in self.layers:
            x = x + layer(x, is_causal=True)
        return x


def test_a_hand_made_model_has_a_previous_token_head_and_an_induction_head():
    model = TwoLayers(num_tokens=60, length=22)
    ids = copied_ids(13, 22)
    atlas = head_atlas(model, [({"input_ids": ids[:7]}, None), ({"input_ids": ids[7:]}, None)])
    assert [(head.layer, head.kind, head.label) for head in atlas.heads] == [
        ("layers.0.core", "causal", "previous"),
        ("layers.1.core", "causal", "induction"),
    ]
    assert atlas.heads[1].scores["induction"].excess.sentences == 13
    at_once = head_scores(take_snapshot(model, {"input_ids": ids}))
    assert atlas.rows() == at_once.rows(), "batches make no difference"
    model.layers[0].v_proj.weight.data.zero_()  # what the first head says is gone: the second has nothing to find
    assert [head.label for head in head_scores(take_snapshot(model, {"input_ids": ids})).heads] == ["previous", "none"]


def test_no_batch_is_refused():
    with pytest.raises(ValueError, match="batches must hold at least one batch"):
        head_atlas(nn.Identity(), [])


# --- steps, tables and figures


def few_atlases():
    ids = repeating_ids()
    steps = []
    for step, strength in ((0, 0.0), (4, 1.0), (16, 9.0), (64, 9.0)):
        scores = noise(B, 3, L, L)
        scores[:, 1] += strength * named_keys("previous", ids)
        steps.append(snapshot_of(scores, kind=CAUSAL, ids=ids, step=step))
    words = tuple((i, i + 1) for i in range(L))
    links = Links(words, words, tuple((i, i - 1, "x") for i in range(1, L)))
    return atlas_over_steps(steps, Structure("input_ids", "input_ids", (links,) * B))


def test_over_steps_a_class_is_told_from_the_step_on_at_which_it_stays():
    found = turning_points(few_atlases())
    assert [(head.label, since) for head, since in found] == [("none", 0), ("previous", 16), ("none", 0)]
    (agreed,) = {head.agreement.verdict for head, _ in found[1:2]}
    assert agreed == "no better than position"


def test_the_table_holds_every_number_and_the_lines_every_head():
    atlas = few_atlases()[-1]
    rows = atlas.rows()
    assert len(rows) == 3 * (len(BEST) + 2)  # all arcs and relation x, forward: what is behind is hidden
    assert sum(bool(row.get("chosen")) for row in rows) == 3
    row = next(row for row in rows if row["head"] == 1 and row["score"] == "previous")
    score = atlas.heads[1].scores["previous"]
    assert (row["step"], row["class"], row["sentences"]) == (64, "previous", B)
    assert (row["excess"], row["low"], row["value"]) == (score.excess.mean, score.excess.low, score.value)
    assert next(row for row in rows if row["score"] == "next")["excess"] is None
    lines = atlas.lines()
    assert len(lines) == 1 + 3 + 1
    assert " previous " in lines[2] and " none " in lines[1]
    assert lines[4] == "3 of 3 heads agree with the structure no better than position alone"


def test_figures_are_pictures():
    atlases = few_atlases()
    assert png(atlas_figure(atlases[-1])).startswith(b"\x89PNG")
    assert len(classes_figure(atlases).axes[0].patches) == 3 * 4
    named = [ax.get_title() for ax in scores_figure(atlases).axes]
    assert named == [*(name for name in BEST if name != "next"), "agreement − position"]
