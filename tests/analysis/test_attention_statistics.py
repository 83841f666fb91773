"""Statistics of attention: by hand, against brute force, in tiles."""

import math

import pytest
import torch

from minitx.analysis import attention_statistics, statistics
from minitx.nn import AttentionCall, Causal, Padding, SlidingWindow

B, H, HKV, L, S, D = 2, 6, 3, 7, 11, 5
PER_ROW = ("row_std", "entropy", "max_weight", "saturation_90", "ipr", "jacobian_l1", "jacobian_fro", "dot_product_variance")


def inputs(queries=L, keys=S, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(B, H, queries, D, generator=generator, dtype=torch.float64) * 2
    return query, torch.randn(B, HKV, keys, D, generator=generator, dtype=torch.float64)


def brute_force(query, key, scale, visible, real_query):
    """The same statistics by loops over rows, per head, in plain Python numbers."""
    found = {name: [[] for _ in range(H)] for name in (*PER_ROW, "scores")}
    for b in range(B):
        for h in range(H):
            for i in range(query.shape[2]):
                keys = [j for j in range(key.shape[2]) if visible[b, i, j]]
                if len(keys) < 2 or not real_query[b][i]:
                    continue
                dots = [float(query[b, h, i] @ key[b, h // (H // HKV), j]) for j in keys]
                z = [scale * x for x in dots]
                p = torch.softmax(torch.tensor(z, dtype=torch.float64), 0).tolist()
                n, ipr = len(keys), sum(x * x for x in p)
                values = {
                    "row_std": math.sqrt(variance(z)),
                    "entropy": -sum(x * math.log(x) for x in p) / math.log(n),
                    "max_weight": max(p),
                    "saturation_90": float(max(p) > 0.9),
                    "ipr": ipr,
                    "jacobian_l1": 1 - ipr,
                    "jacobian_fro": sum(
                        ((p[a] if a == c else 0.0) - p[a] * p[c]) ** 2 for a in range(n) for c in range(n)
                    ),  # ‖diag(p) - p pᵀ‖_F², not the closed form
                    "dot_product_variance": variance(dots),
                }
                for name, value in values.items():
                    found[name][h].append(value)
                found["scores"][h] += z
    means = {name: [sum(rows) / len(rows) for rows in found[name]] for name in PER_ROW}
    pooled = [torch.tensor(z, dtype=torch.float64) for z in found["scores"]]
    means["logit_std"] = [float(z.std(correction=0)) for z in pooled]
    means["max_logit"] = [float(z.abs().max()) for z in pooled]
    return means


def variance(values):
    mean = sum(values) / len(values)
    return sum((x - mean) ** 2 for x in values) / (len(values) - 1)


CASES = {
    "no mask": (None, lambda b, i, j: True, lambda b, i: True),
    "causal": (Causal(), lambda b, i, j: j <= i + S - L, lambda b, i: True),
    "window and causal": (Causal() & SlidingWindow(2), lambda b, i, j: 0 <= i + S - L - j < 2, lambda b, i: True),
}


@pytest.mark.parametrize("name", CASES)
def test_statistics_equal_brute_force_over_visible_pairs(name):
    mask, visible, real = CASES[name]
    query, key = inputs()
    rows = torch.tensor([[[visible(b, i, j) for j in range(S)] for i in range(L)] for b in range(B)])
    wanted = brute_force(query, key, 0.7, rows, [[real(b, i) for i in range(L)] for b in range(B)])
    found = attention_statistics(AttentionCall(query, key, key, scale=0.7, mask=mask))
    for statistic, values in wanted.items():
        torch.testing.assert_close(found[statistic], torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_padded_queries_and_rows_with_one_key_are_left_out():
    key_mask = torch.tensor([[True] * 5 + [False] * 2, [False] * 3 + [True] * 4])
    query, key = inputs(7, 7)
    visible = torch.tensor([[[bool(key_mask[b, j]) and j <= i for j in range(7)] for i in range(7)] for b in range(B)])
    wanted = brute_force(query, key, 0.3, visible, key_mask.tolist())
    found = attention_statistics(AttentionCall(query, key, key, scale=0.3, mask=Causal() & Padding(key_mask)))
    for statistic, values in wanted.items():
        torch.testing.assert_close(found[statistic], torch.tensor(values, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_one_row_of_two_keys_by_hand():
    query = torch.tensor([[[[1.0]]]])
    key = torch.tensor([[[[0.0], [math.log(3.0)]]]])  # weights 1/4 and 3/4
    found = {name: float(value) for name, value in attention_statistics(AttentionCall(query, key, key, scale=1.0)).items()}
    assert found["max_weight"] == pytest.approx(0.75)
    assert found["ipr"] == pytest.approx(0.625)
    assert found["jacobian_l1"] == pytest.approx(0.375)
    assert found["jacobian_fro"] == pytest.approx(4 * 0.1875**2)  # every entry of J is ±3/16
    assert found["entropy"] == pytest.approx((0.25 * math.log(4) + 0.75 * math.log(4 / 3)) / math.log(2))
    assert found["logit_std"] == pytest.approx(math.log(3) / 2)
    assert found["dot_product_variance"] == pytest.approx(math.log(3) ** 2 / 2)


def test_streaming_in_tiles_changes_nothing(monkeypatch):
    query, key = inputs()
    whole = attention_statistics(AttentionCall(query, key, key, scale=0.5, mask=Causal()))
    favourites = attention_statistics(AttentionCall(query, key, key, scale=0.5, mask=Causal()))["favourite"]
    monkeypatch.setattr(statistics, "_TILE", 1)
    tiled = attention_statistics(AttentionCall(query, key, key, scale=0.5, mask=Causal()))
    for name, value in whole.items():
        torch.testing.assert_close(tiled[name], value, rtol=1e-12, atol=1e-14)
    assert torch.equal(attention_statistics(AttentionCall(query, key, key, scale=0.5, mask=Causal()))["favourite"], favourites)


def test_no_tensor_of_all_pairs_is_held(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    length = 257
    monkeypatch.setattr(statistics, "_TILE", 4 * length)
    query = torch.randn(1, 1, length, 3)
    with Largest() as largest:
        attention_statistics(
            AttentionCall(query, query, query, scale=1.0, mask=Causal() & Padding(torch.ones(1, length, dtype=torch.bool)))
        )
    assert largest.elements <= 4 * length


def test_a_constant_added_to_a_row_moves_no_statistic_of_the_weights():
    query, key = inputs(5, 5, seed=3)
    base = attention_statistics(AttentionCall(query, key, key, scale=1.0))
    shifted_key = key + 10.0 * torch.ones(D, dtype=torch.float64)  # adds q_i · 10 to row i
    shifted = attention_statistics(AttentionCall(query, shifted_key, shifted_key, scale=1.0))
    for name in ("row_std", "entropy", "ipr", "max_weight"):
        torch.testing.assert_close(shifted[name], base[name], rtol=1e-9, atol=1e-12)
    assert bool((shifted["logit_std"] > 2 * base["logit_std"]).all())


def test_the_favourite_key_is_the_one_with_the_largest_weight_and_excluded_rows_have_none():
    query, key = inputs(4, 4)
    favourites = attention_statistics(AttentionCall(query, key, key, scale=-0.5, mask=Causal()))["favourite"]
    assert (favourites[:, :, 0] == -1).all()  # the first row sees one key
    scores = -0.5 * query @ key.repeat_interleave(H // HKV, 1).transpose(-1, -2)
    for i in range(1, 4):
        assert torch.equal(favourites[:, :, i], scores[:, :, i, : i + 1].argmax(-1))


def test_the_entropy_bound_wants_two_scores():
    with pytest.raises(ValueError, match="at least two scores, got 1"):
        statistics.zhai_entropy_bound(torch.zeros(3, 1))
