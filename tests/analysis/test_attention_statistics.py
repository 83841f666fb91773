"""Statistics of attention: against brute force, in tiles."""

import math

import pytest
import torch

from minitx.analysis import attention_statistics, statistics
from minitx.nn import AttentionCall, Causal, Dense, Padding, SlidingWindow, attention_weights
from minitx.nn.counting import allocations, flop_counter

B, H, HKV, L, S, D = 2, 6, 3, 7, 11, 5


def inputs(queries=L, keys=S, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(B, H, queries, D, generator=generator, dtype=torch.float64) * 2
    return query, torch.randn(B, HKV, keys, D, generator=generator, dtype=torch.float64)


def statistics_of(query, key, scale, mask=None):
    return attention_statistics(AttentionCall(query, key, key, scale=scale, mask=mask))


def softmax(z, sink=-math.inf):
    return torch.softmax(torch.tensor([*z, sink], dtype=torch.float64), 0).tolist()[:-1]


def of_row(dots, z, p, scale):
    """The statistics of one row, in plain Python numbers, from q·k, the scores and the weights of the keys that it sees."""
    n, ipr, every = len(z), sum(x * x for x in p), range(len(z))
    jacobian = [[(a == c) * p[a] - p[a] * p[c] for a in every] for c in every]  # diag(p) - p pᵀ
    return {
        "row_std": math.sqrt(variance(z)),
        "entropy": -sum(x * math.log(x) for x in p) / math.log(n),
        "max_weight": max(p),
        "saturation_90": float(max(p) > 0.9),
        "saturation_99": float(max(p) > 0.99),
        "ipr": ipr,
        "jacobian_l1": 1 - ipr,
        "jacobian_fro": sum(x**2 for row in jacobian for x in row),
        "scaled_jacobian_l1": abs(scale) * (1 - ipr),
        "scaled_jacobian_fro": sum((scale * x) ** 2 for row in jacobian for x in row),
        "dot_product_variance": variance(dots),
    }


def variance(values):
    mean = sum(values) / len(values)
    return sum((x - mean) ** 2 for x in values) / (len(values) - 1)


def brute_force(query, key, scale, visible, real_query, real_key, score, weigh):
    """The same statistics by loops over rows, per head."""
    rows, scores, cosines = [[] for _ in range(H)], [[] for _ in range(H)], [[] for _ in range(H)]
    favourite = torch.full(query.shape[:3], -1)
    for b in range(B):
        for h in range(H):
            keys = key[b, h // (H // HKV)]
            for i in range(query.shape[2]):
                seen, q = [j for j in range(len(keys)) if visible(b, h, i, j)], query[b, h, i]
                if len(seen) > 1 and real_query(b, i):
                    dots = [float(q @ keys[j]) for j in seen]
                    z = [score(scale * x, h, i, j) for x, j in zip(dots, seen, strict=True)]
                    weights = weigh(z, b, h, i)
                    favourite[b, h, i] = seen[max(range(len(seen)), key=(weights if scale else dots).__getitem__)]
                    rows[h].append({**of_row(dots, z, weights, scale), "query_norm": float(q.norm())})
                    scores[h] += z
                    cosines[h] += [float(torch.cosine_similarity(q, keys[j], dim=0)) for j in seen]
    means = {name: [sum(row[name] for row in of_head) / len(of_head) for of_head in rows] for name in rows[0][0]}
    pooled = [torch.tensor(z, dtype=torch.float64) for z in scores]
    real = torch.tensor([[real_key(b, j) for j in range(key.shape[2])] for b in range(B)])
    of_keys = {
        "key_norm": [float(key[:, h // (H // HKV)][real].norm(dim=-1).mean()) for h in range(H)],
        "cosine": [sum(values) / len(values) for values in cosines],
        "favourite": favourite,
    }
    return means | of_keys | {"logit_std": [z.std(correction=0) for z in pooled], "max_logit": [z.abs().max() for z in pooled]}


KEY_MASK = torch.tensor([[True] * 5 + [False] * 2, [False] * 3 + [True] * 4])
BIAS = torch.linspace(-2, 1, H * L * S, dtype=torch.float64).view(H, L, S)
BIAS[sum(torch.meshgrid(*map(torch.arange, BIAS.shape), indexing="ij")) % 3 == 0] = -torch.inf
WEIGHTS = torch.linspace(0.1, 2.0, B * H * L * S, dtype=torch.float64).sin().view(B, H, L, S).softmax(-1)
SINKS = torch.linspace(-1, 3, H, dtype=torch.float64)
CASES = {
    "no mask": (S, {"scale": 0.7}, lambda b, h, i, j: True),
    "causal": (S, {"scale": -0.7, "mask": Causal()}, lambda b, h, i, j: j <= i + S - L),
    "window and causal": (S, {"scale": 0.7, "mask": Causal() & SlidingWindow(2)}, lambda b, h, i, j: 0 <= i + S - L - j < 2),
    "padding": (L, {"scale": 0.7, "mask": Causal() & Padding(KEY_MASK)}, lambda b, h, i, j: bool(KEY_MASK[b, j]) and j <= i),
    "no scale": (S, {"scale": 0.0, "mask": Causal()}, lambda b, h, i, j: j <= i + S - L),
    "weights that were set": (S, {"scale": 0.7, "weights": WEIGHTS}, lambda b, h, i, j: True),
    "bias, softcap and sinks": (
        S,
        {"scale": 0.7, "attn_bias": BIAS[None], "softcap": 3.0, "sinks": SINKS},
        lambda b, h, i, j: (h + i + j) % 3 > 0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_statistics_equal_brute_force_over_visible_pairs_without_padded_queries(name):
    keys, options, visible = CASES[name]
    query, key = inputs(keys=keys)

    def is_real(b, i):
        return name != "padding" or bool(KEY_MASK[b, i])

    def score(z, h, i, j):
        return 3.0 * math.tanh(z / 3.0) + float(BIAS[h, i, j]) if "softcap" in options else z

    def weigh(z, b, h, i):
        return WEIGHTS[b, h, i].tolist() if "weights" in options else softmax(z, *options.get("sinks", ())[h : h + 1])

    found = attention_statistics(AttentionCall(query, key, key, **options))
    want = brute_force(query, key, options["scale"], visible, is_real, is_real, score, weigh)
    assert torch.equal(found.pop("favourite"), want.pop("favourite")) and found.keys() == want.keys()
    for statistic, values in want.items():
        expected = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(found[statistic], expected, rtol=1e-9, atol=1e-12, msg=statistic)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_of_the_dtypes_minimum_counts_as_it_does_in_the_weights(dtype, sinks):
    query, key = (tensor.to(dtype) for tensor in inputs(queries=S))
    bias = torch.zeros(S, S, dtype=dtype)
    bias[:, :3] = bias[5] = torch.finfo(dtype).min  # the first rows, and one more, see such keys only
    call = AttentionCall(query, key, key, mask=Causal(), attn_bias=bias, scale=0.7, sinks=sinks)
    p, found = attention_weights(call)[:, :, 1:], attention_statistics(call)
    entropy = -torch.xlogy(p, p).sum(-1) / torch.arange(2, S + 1).log()
    for name, want in {"max_weight": p.amax(-1), "ipr": p.square().sum(-1), "entropy": entropy}.items():
        torch.testing.assert_close(found[name], want.double().mean((0, 2)), rtol=1e-5, atol=1e-6, msg=name)
    assert torch.equal(found["favourite"][:, :, 1:], p.argmax(-1))


def test_one_row_is_its_mean_one_key_is_its_norm_and_nothing_to_count_gives_zeros():
    query, key = (tensor[:1] for tensor in inputs(queries=1, keys=2))
    found = attention_statistics(AttentionCall(query, key, key, scale=0.7))
    want = {name: [] for name in found.keys() - {"favourite", "cosine", "key_norm", "logit_std", "max_logit"}}
    for h in range(H):
        dots = (key[0, h // (H // HKV)] @ query[0, h, 0]).tolist()
        z = [0.7 * x for x in dots]
        row = {**of_row(dots, z, softmax(z), 0.7), "query_norm": float(query[0, h].norm())}
        for name, values in want.items():
            values.append(row[name])
    for name, values in want.items():
        torch.testing.assert_close(found[name], torch.tensor(values, dtype=torch.float64), rtol=1e-12, atol=1e-14, msg=name)
    single = attention_statistics(AttentionCall(query, key[:, :, :1], None, scale=0.7))
    torch.testing.assert_close(single.pop("key_norm"), key[0, :, 0].norm(dim=-1).repeat_interleave(H // HKV))
    assert (single.pop("favourite") == -1).all() and all((value == 0).all() for value in single.values())
    padding = attention_statistics(
        AttentionCall(query, key, None, scale=0.7, mask=Padding(torch.zeros(1, 2, dtype=torch.bool)))
    )
    assert (padding.pop("favourite") == -1).all() and all((value == 0).all() for value in padding.values())


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


@pytest.mark.parametrize(("queries", "keys"), [(7, 11), (5, 5), (11, 7)])
def test_where_values_cannot_be_read_keys_are_left_out_by_their_position_alone(queries, keys):
    query, key = inputs(queries, keys)
    tensor = Dense(torch.eye(queries, keys) > 0)
    end = max(1, 4 + keys - queries)  # the first key after the last query
    for mask, want in ((Causal(), end), (Causal() & tensor, end), (SlidingWindow(3), keys), (tensor, keys), (None, keys)):
        call, rows = AttentionCall(query, key, key, mask=mask), slice(2, 4)
        visible = (mask or Dense(torch.ones(queries, keys) > 0)).dense(queries, keys, rows=rows, batch_size=B, num_heads=H)
        read, unread = (statistics._num_seen(call, rows, values) for values in (visible, visible.to("meta")))
        assert 1 <= read <= unread == want


def test_statistics_never_hold_a_matrix_of_queries_times_keys(monkeypatch):
    monkeypatch.setattr(statistics, "_TILE", 2**12)
    query, mask = torch.randn(1, 2, 211, 3), Causal() & Padding(torch.arange(211)[None] < 199)
    assert 4 * 2 * 211 < allocations(lambda: statistics_of(query, query, 1.0, mask))[0] <= 4 * 2**12


# --- changes of logits, cosines of tokens, and the bound on the entropy


def test_the_logit_step_is_the_root_mean_square_over_visible_pairs_of_counted_rows_in_tiles_of_any_size(monkeypatch):
    keys, options, visible = CASES["padding"]
    before, after = (AttentionCall(*inputs(keys=keys, seed=seed), None, **options) for seed in (0, 1))
    old, new = (0.7 * call.query @ call.key.repeat_interleave(H // HKV, 1).mT for call in (before, after))
    for counted in (KEY_MASK, torch.arange(L)[None].expand(B, L) % 3 > 0):
        pairs = [(b, i, j) for b in range(B) for i in range(L) for j in range(L) if counted[b, i] and visible(b, 0, i, j)]
        pairs = [pair for pair in pairs if sum(pair[:2] == other[:2] for other in pairs) > 1]  # one key is no choice
        changes = torch.stack([(new - old)[b, :, i, j] for b, i, j in pairs])
        for size in (statistics._TILE, 1):
            monkeypatch.setattr(statistics, "_TILE", size)
            found = statistics.logit_step_of(
                statistics.logit_step_sums(before, after, None if counted is KEY_MASK else counted)
            )
            torch.testing.assert_close(found, changes.square().mean(0).sqrt(), rtol=1e-12, atol=0.0)
        monkeypatch.undo()
    nothing = torch.zeros(B, L, dtype=torch.bool)
    assert statistics.logit_step_of(statistics.logit_step_sums(before, after, nothing)).tolist() == [0.0] * H


def test_the_token_cosine_is_the_mean_over_pairs_of_different_tokens_in_each_row_of_at_least_two():
    hidden = torch.randn(5, L, D, dtype=torch.float64)
    real = torch.arange(L) < torch.tensor([7, 5, 2, 1, 0])[:, None]
    for mask in (None, real):
        means = []
        for row in hidden if mask is None else [row[kept] for row, kept in zip(hidden, mask, strict=True)]:
            pairs = [(a, b) for i, a in enumerate(row) for j, b in enumerate(row) if i != j]
            means += [sum(torch.cosine_similarity(a, b, dim=0) for a, b in pairs) / len(pairs)] if pairs else []
        assert float(statistics.token_cosine_of(statistics.token_cosine_sums(hidden, mask))) == pytest.approx(
            float(sum(means)) / len(means), rel=1e-12
        )


def test_no_row_has_less_entropy_than_its_bound_which_one_high_logit_attains():
    rows = torch.randn(31, 7, dtype=torch.float64) * torch.linspace(0.1, 9, 31, dtype=torch.float64)[:, None]
    attaining = torch.zeros(5, 7, dtype=torch.float64)
    attaining[:, 3] = torch.arange(5)
    for size in (2, 3, 7):
        scores = torch.cat((rows, attaining))[:, -size:]
        gap = torch.special.entr(scores.softmax(-1)).sum(-1) - statistics.zhai_entropy_bound(scores)
        assert float(gap.min()) > -1e-12 and float(gap.max()) > 0.01 * (size > 2)
    scores = attaining[:, 1:4]
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1)
    torch.testing.assert_close(statistics.zhai_entropy_bound(scores), entropy, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="at least two scores, got 1"):
        statistics.zhai_entropy_bound(rows[:, :1])
