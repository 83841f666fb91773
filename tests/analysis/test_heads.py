"""Hand-made heads have known scores; each label is reached, and each control refuses what it is there for."""

import pytest
import torch

from minitx.analysis import Snapshot, head_scores, take_snapshot
from minitx.analysis.heads import PATTERNS
from minitx.analysis.snapshot import AttentionMap
from minitx.config import TransformerConfig
from minitx.nn import Encoder

N, L, TOKENS = 13, 23, 7  # few tokens, so that every row repeats some
PLACE = torch.arange(L)
BEHIND = PLACE - PLACE[:, None]  # j − i


def snapshot_of(weights, ids, kind="causal", hidden=None):
    """A snapshot of heads (N, H, L, S) with their weight where ``weights`` is, or on all visible keys where that is nowhere."""
    visible = torch.ones_like(weights, dtype=torch.bool)
    if kind == "causal":
        visible = visible.tril()
    if hidden is not None:
        visible = visible & ~hidden
    weights = (weights * visible).double()
    weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, visible.double())
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    queries, keys = ("decoder_input_ids", "input_ids") if kind == "cross" else ("input_ids", "input_ids")
    layer = AttentionMap("blocks.0.attention.core", kind, queries, keys, weights, visible, weights.amax(-1))
    axes = {queries: weights.shape[2], keys: weights.shape[3]}
    real = {axis: torch.ones(len(weights), size, dtype=torch.bool) for axis, size in axes.items()}
    texts = {axis: [["?"] * size] * len(weights) for axis, size in axes.items()}
    return Snapshot((layer,), texts, {"input_ids": ids[:, : weights.shape[3]]}, real)


def same(ids):
    return (ids[:, :, None] == ids[:, None]) & (BEHIND != 0)


def after(keys):
    """The key behind each, never the query itself."""
    return torch.nn.functional.pad(keys[..., :-1], (1, 0)) & (BEHIND != 0)


def everywhere(keys):
    return keys.expand(N, L, L)


IDS = torch.randint(0, TOKENS, (N, L), generator=torch.Generator().manual_seed(0))
MADE = {
    "previous": everywhere(BEHIND == -1),
    "duplicate": same(IDS),
    "induction": after(same(IDS)),
    "offset": everywhere(BEHIND == -3),
    "global": (2 + torch.arange(N) % 3)[:, None, None].expand(N, L, 1) == PLACE,  # another key in each sentence
    "local": everywhere(BEHIND.abs() <= 4),
    "broad": everywhere(BEHIND < L),
}


@pytest.mark.parametrize("kind", ["causal", "self"])
@pytest.mark.parametrize("name", MADE)
def test_a_hand_made_head_of_each_kind_gets_its_label(name, kind):
    (head,) = head_scores(snapshot_of(MADE[name][:, None], IDS, kind)).heads
    assert head.label == name
    if name in PATTERNS:
        score = head.scores[name]
        assert score.excess.mean == pytest.approx(1.0, abs=1e-9 if name in ("previous", "offset", "local") else 0.25)
        assert score.excess.n == (N // 2 if name == "offset" else N)
        assert name in ("offset", "global") or score.gain.n == N // 2  # the sentences on which no position was chosen
    if name == "offset":
        assert head.scores["offset"].at == "-3"


@pytest.mark.parametrize("kind", ["causal", "self", "cross"])
def test_uniform_attention_scores_zero_under_any_mask(kind):
    hidden = None if kind == "cross" else BEHIND < -5
    (head,) = head_scores(snapshot_of(torch.zeros(N, 1, L, 17 if kind == "cross" else L), IDS, kind, hidden)).heads
    for name, score in head.scores.items():
        assert score.excess.mean == pytest.approx(0.0, abs=1e-9), name
    assert set(head.scores) == ({"global"} if kind == "cross" else set(PATTERNS))
    assert head.label == "broad"


def test_random_attention_is_nothing():
    weights = torch.randn(N, 3, L, L, generator=torch.Generator().manual_seed(1)).mul(3).exp()
    assert {head.label for head in head_scores(snapshot_of(weights, IDS)).heads} == {"none"}


def test_wrong_heads_do_not_pass_for_right_ones():
    the_next, of_another_sentence = everywhere(BEHIND == 1), after(same(IDS)).roll(1, 0)
    before_the_equal = torch.nn.functional.pad(same(IDS)[..., 1:], (0, 1))
    heads = head_scores(snapshot_of(torch.stack([the_next, of_another_sentence, before_the_equal], 1), IDS, "self")).heads
    assert heads[0].label == "offset" and heads[0].scores["offset"].at == "+1"
    assert not {head.label for head in heads} & {"previous", "duplicate", "induction"}


def test_a_fixed_distance_is_no_induction_where_tokens_always_repeat_at_it():
    ids = torch.stack([torch.randperm(60)[:12].repeat(2)[:L] for _ in range(N)])
    (head,) = head_scores(snapshot_of(after(same(ids))[:, None], ids)).heads
    score = head.scores["induction"]
    assert score.value > 0.9 and score.position == 1.0
    assert head.label != "induction"


def test_a_row_of_padding_alone_changes_no_score_of_the_others():
    torch.manual_seed(0)
    model = Encoder(TransformerConfig(architecture="encoder", vocab_size=11, embed_dim=12, num_heads=2, num_layers=1)).eval()
    ids = torch.tensor([[1, 2, 3, 1], [2, 2, 5, 4], [0, 0, 0, 0]])
    both, alone = (
        head_scores(take_snapshot(model, {"input_ids": ids[:rows], "key_mask": ids[:rows] > 0})).heads for rows in (3, 2)
    )
    for head, other in zip(both, alone, strict=True):
        for name, score in head.scores.items():
            assert score.value == pytest.approx(other.scores[name].value, nan_ok=True), name
