"""Statistics of attention: against brute force, in tiles."""

import math

import pytest
import torch

from minitx.analysis import attention_statistics, statistics
from minitx.analysis.counting import allocations, flop_counter
from minitx.nn import AttentionCall, Causal, Padding, SlidingWindow, attention_weights

B, H, HKV, L, S, D = 2, 6, 3, 7, 11, 5


def inputs(queries=L, keys=S, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(B, H, queries, D, generator=generator, dtype=torch.float64) * 2
    return query, torch.randn(B, HKV, keys, D, generator=generator, dtype=torch.float64)


def statistics_of(query, key, scale, mask=None):
    return attention_statistics(AttentionCall(query, key, key, scale=scale, mask=mask))


def of_row(dots, scale):
    """The statistics of one row, in plain Python numbers."""
    z = [scale * x for x in dots]
    p = torch.softmax(torch.tensor(z, dtype=torch.float64), 0).tolist()
    n, ipr, every = len(z), sum(x * x for x in p), range(len(z))
    return {
        "row_std": math.sqrt(variance(z)),
        "entropy": -sum(x * math.log(x) for x in p) / math.log(n),
        "max_weight": max(p),
        "saturation_90": float(max(p) > 0.9),
        "ipr": ipr,
        "jacobian_l1": 1 - ipr,
        "jacobian_fro": sum(((a == c) * p[a] - p[a] * p[c]) ** 2 for a in every for c in every),  # ‖diag(p) - p pᵀ‖_F²
        "dot_product_variance": variance(dots),
    }


def variance(values):
    mean = sum(values) / len(values)
    return sum((x - mean) ** 2 for x in values) / (len(values) - 1)


def brute_force(query, key, scale, visible, real_query):
    """The same statistics by loops over rows, per head."""
    rows, scores = [[] for _ in range(H)], [[] for _ in range(H)]
    for b in range(B):
        for h in range(H):
            for i in range(query.shape[2]):
                dots = [float(query[b, h, i] @ key[b, h // (H // HKV), j]) for j in range(key.shape[2]) if visible(b, i, j)]
                if len(dots) > 1 and real_query(b, i):
                    rows[h].append(of_row(dots, scale))
                    scores[h] += [scale * x for x in dots]
    means = {name: [sum(row[name] for row in of_head) / len(of_head) for of_head in rows] for name in rows[0][0]}
    pooled = [torch.tensor(z, dtype=torch.float64) for z in scores]
    return means | {"logit_std": [z.std(correction=0) for z in pooled], "max_logit": [z.abs().max() for z in pooled]}


KEY_MASK = torch.tensor([[True] * 5 + [False] * 2, [False] * 3 + [True] * 4])
CASES = {
    "no mask": (None, S, lambda b, i, j: True, lambda b, i: True),
    "causal": (Causal(), S, lambda b, i, j: j <= i + S - L, lambda b, i: True),
    "window and causal": (Causal() & SlidingWindow(2), S, lambda b, i, j: 0 <= i + S - L - j < 2, lambda b, i: True),
    "padding": (Causal() & Padding(KEY_MASK), L, lambda b, i, j: KEY_MASK[b, j] and j <= i, lambda b, i: KEY_MASK[b, i]),
}


@pytest.mark.parametrize("name", CASES)
def test_statistics_equal_brute_force_over_visible_pairs_without_padded_queries(name):
    mask, keys, visible, real = CASES[name]
    query, key = inputs(keys=keys)
    found = statistics_of(query, key, 0.7, mask)
    for statistic, values in brute_force(query, key, 0.7, visible, real).items():
        torch.testing.assert_close(found[statistic], torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-12)


HIDES = torch.zeros(L, S).masked_fill(torch.arange(S) > torch.arange(L)[:, None], -torch.inf)
CALLS = {
    "causal": {"mask": Causal()},
    "hidden rows": {"mask": SlidingWindow(2) & Padding(torch.arange(S).expand(B, S) > 5)},
    "a bias that hides": {"attn_bias": HIDES, "softcap": 3.0, "sinks": torch.linspace(-1, 1, H)},
    "no scale": {"mask": Causal(), "scale": 0.0},
    "scores that were set": {"mask": Causal(), "scores": inputs()[0] @ torch.randn(D, S, dtype=torch.float64)},
    "weights that were set, also at hidden keys": {
        "mask": Causal(),
        "weights": torch.linspace(0, 1, L * S, dtype=torch.float64).view(L, S).expand(B, H, L, S),
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_streaming_in_tiles_changes_nothing(name, monkeypatch):
    query, key = inputs()
    call = AttentionCall(query, key, key, **{"scale": 0.5, **CALLS[name]})
    counted = torch.ones(B, L, dtype=torch.bool)
    whole = attention_statistics(call, query_mask=counted)
    monkeypatch.setattr(statistics, "_TILE", 1)
    for statistic, value in attention_statistics(call, query_mask=counted).items():
        torch.testing.assert_close(value, whole[statistic], rtol=1e-12, atol=1e-14, msg=statistic)


@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 40.0}, {"sinks": torch.linspace(-3, 3, H)}, {"sinks": torch.full((H,), 300.0)}, {"attn_bias": HIDES}],
    ids=["scores", "almost one key", "sinks", "sinks that take everything", "a bias that hides"],
)
def test_the_entropy_is_that_of_the_weights_in_float64(options):
    query, key = inputs()
    wide = AttentionCall(query, key, key, mask=Causal(), **{"scale": 0.7, **options})
    p = attention_weights(wide)
    expected = -torch.xlogy(p, p).sum(-1) / wide.visible().expand_as(p).sum(-1).log()
    narrow = AttentionCall(query.float(), key.float(), key.float(), mask=Causal(), **{"scale": 0.7, **options})
    counted = wide.visible().expand_as(p).sum(-1) > 1
    expected = torch.where(counted, expected, 0.0).sum((0, 2)) / counted.sum((0, 2))
    found = attention_statistics(narrow)["entropy"]
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-7)  # 6e-8 is the rounding of a weight


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_at_padding_change_no_statistic(value):
    query, key = inputs(keys=L)
    mask = Causal() & Padding(KEY_MASK)
    expected = statistics_of(query, key, 0.7, mask)
    for statistic, values in statistics_of(query, key.masked_fill(~KEY_MASK[:, None, :, None], value), 0.7, mask).items():
        assert torch.equal(values, expected[statistic]), statistic


def test_statistics_of_half_precision_are_those_of_the_same_numbers_in_float32():
    query, key = (tensor.bfloat16() for tensor in inputs())
    wide = statistics_of(query.float(), key.float(), 0.7)
    for statistic, value in statistics_of(query, key, 0.7).items():
        torch.testing.assert_close(value, wide[statistic], rtol=1e-6, atol=1e-8, msg=statistic)


def test_keys_that_no_row_of_a_tile_sees_yet_are_not_computed(monkeypatch):
    monkeypatch.setattr(statistics, "_TILE", 1)
    query, _ = inputs(31)
    with flop_counter() as counter:
        statistics_of(query, query, 1.0, Causal())
    assert counter.get_total_flops() == B * H * 2 * D * 31 * 32 // 2  # q · k


def test_statistics_never_hold_a_matrix_of_queries_times_keys(monkeypatch):
    monkeypatch.setattr(statistics, "_TILE", 2**12)
    query, mask = torch.randn(1, 2, 211, 3), Causal() & Padding(torch.arange(211)[None] < 199)
    assert 4 * 2 * 211 < allocations(lambda: statistics_of(query, query, 1.0, mask))[0] <= 4 * 2**12


def test_the_favourite_key_is_the_one_with_the_largest_weight_and_excluded_rows_have_none():
    query, key = inputs(4, 4)
    favourites = statistics_of(query, key, -0.5, Causal())["favourite"]
    assert (favourites[:, :, 0] == -1).all()  # the first row sees one key
    scores = -0.5 * query @ key.repeat_interleave(H // HKV, 1).transpose(-1, -2)
    for i in range(1, 4):
        assert torch.equal(favourites[:, :, i], scores[:, :, i, : i + 1].argmax(-1))
