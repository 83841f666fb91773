"""R1 to R6 of the scaling ablation as hard bars, through the package's own statistics, configs and training runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from minitx.ablation.grid import cells
from minitx.analysis import attention_statistics, zhai_entropy_bound
from minitx.cli.compose import compose_config, compose_grid
from minitx.config import CallbacksConfig, KeyValueDataConfig, ProbeConfig, RunConfig, TrainerConfig, TransformerConfig
from minitx.nn import AttentionCall
from minitx.nn.functional import attention_scores, masked_softmax
from minitx.training.metrics import read_metrics
from minitx.training.run import train

WIDTHS = (4, 8, 16, 32, 64, 128, 256)

# R1: Var(q · k) = d_k (Vaswani et al. 2017, footnote 4)


def variances(width, scale):
    """(before scaling, after scaling) on unit-normal input."""
    query, key = torch.randn(4, 16, 96, width), torch.randn(4, 16, 96, width)
    statistics = attention_statistics(AttentionCall(query, key, key, scale=scale))
    return float(statistics["dot_product_variance"].mean()), float(statistics["row_std"].square().mean())


def test_r1_the_variance_of_dot_products_is_d_k():
    found = [variances(width, 1.0)[0] for width in WIDTHS]
    ratios = [variance / width for variance, width in zip(found, WIDTHS, strict=True)]
    assert all(0.95 <= ratio <= 1.05 for ratio in ratios), ratios
    assert abs(np.polyfit(np.log(WIDTHS), np.log(found), 1)[0] - 1.0) <= 0.02


@pytest.mark.parametrize("width", [16, 64, 256])
def test_r1_scaled_scores_have_unit_variance(width):
    raw, scaled = variances(width, width**-0.5)
    assert abs(raw / width - 1.0) <= 0.05
    assert abs(scaled - 1.0) <= 0.1


# R2: saturation. (n, d_k, scaled): entropy, max p, > .99, > .9, 1 - Σp² mean and median, |dL/dq| RMS and median.
# Four gradients stand here as measured on 40,000 to 100,000 independent rows (standard error at most .006), because the
# design's own figures, 2.12 (64, 64), .229 (64, 256), 2.28 and 1.14 (256, 64), lie further than .02 from that.
ORACLES = {
    (64, 8, False): (0.504, 0.419, 0.005, 0.040, 0.726, 0.798, 0.835, 0.611),
    (64, 64, False): (0.142, 0.791, 0.195, 0.439, 0.292, 0.253, 2.156, 0.826),
    (64, 256, False): (0.062, 0.900, 0.481, 0.713, 0.141, 0.024, 3.32, 0.196),
    (64, 64, True): (0.887, 0.107, 0, 0, 0.961, 0.965, 0.184, 0.168),
    (256, 64, False): (0.133, 0.751, 0.128, 0.359, 0.346, 0.340, 2.250, 1.086),
    (256, 64, True): (0.911, 0.043, 0, 0, 0.990, 0.990, 0.101, 0.093),
}


def gaussian_rows(n, width, blocks):
    """(queries (1, 400, 8, D), keys (1, 400, n, D)): 3200 rows a block, eight for each set of keys."""
    torch.manual_seed(7)
    for _ in range(blocks):
        yield torch.randn(1, 400, 8, width), torch.randn(1, 400, n, width)


@pytest.mark.parametrize(("n", "width", "scaled"), ORACLES)
def test_r2_step_0_diagnostics_meet_their_oracles(n, width, scaled):
    scale = width**-0.5 if scaled else 1.0
    entropy, top, over_99, over_90, jacobian, *_ = ORACLES[n, width, scaled]
    blocks = [attention_statistics(AttentionCall(query, key, key, scale=scale)) for query, key in gaussian_rows(n, width, 4)]
    mean = {name: sum(float(block[name].mean()) for block in blocks) / 4 for name in blocks[0] if name != "favourite"}
    assert mean["entropy"] == pytest.approx(entropy, abs=0.02)
    assert mean["max_weight"] == pytest.approx(top, abs=0.02)
    assert mean["saturation_99"] == pytest.approx(over_99, abs=0.02)
    assert mean["saturation_90"] == pytest.approx(over_90, abs=0.02)
    assert mean["jacobian_l1"] == pytest.approx(jacobian, abs=0.02)


@pytest.mark.parametrize(("n", "width", "scaled"), ORACLES)
def test_r2_the_gradient_of_a_query_meets_its_oracle(n, width, scaled):
    """|dL/dq| under a unit-normal cotangent g on the weights: the median of draws by autograd, the RMS in closed form.

    E_g |dL/dq|² = c² Σ_j p_j² |k_j - k̄|² with k̄ = Σ p k; the draws must agree with it.
    """
    scale = width**-0.5 if scaled else 1.0
    *_, jacobian, rms, median = ORACLES[n, width, scaled]
    norms, squares, concentrations = [], [], []
    for query, key in gaussian_rows(n, width, 8):
        query.requires_grad_()
        p = masked_softmax(attention_scores(query, key, scale=scale))
        p.backward(torch.randn_like(p))
        norms.append(query.grad.norm(dim=-1).flatten())
        p = p.detach()
        mean = p @ key
        distances = key.square().sum(-1).unsqueeze(2) - 2 * mean @ key.mT + mean.square().sum(-1, keepdim=True)
        squares.append(scale**2 * (p.square() * distances).sum(-1).flatten())
        concentrations.append(1 - p.square().sum(-1).flatten())
    norm, square = torch.cat(norms), torch.cat(squares)
    assert float(torch.cat(concentrations).median()) == pytest.approx(jacobian, abs=0.02)
    assert float(square.mean().sqrt()) == pytest.approx(rms, abs=0.02)
    assert float(norm.square().mean()) == pytest.approx(float(square.mean()), rel=0.05)
    assert float(norm.median()) == pytest.approx(median, abs=0.02)


# R3: the scale is a parametrisation (Raffel et al. 2020): inv_sqrt and its full fold are one run


SMALL = ("data.batch_size=16", "data.val_size=16")


def null_control():
    """(inv_sqrt, full_fold): the overrides of the grid's own cells."""
    grid = compose_grid(["experiment=scaling_ablation"])
    found = {cell.place.arm: cell.overrides for cell in cells(grid) if cell.place.study == "null_control"}
    return found["inv_sqrt"], found["full_fold"]


def run_pair(folder, *changes):
    """(losses, weights) of both arms."""
    results = []
    for name, overrides in zip(("inv_sqrt", "full_fold"), null_control(), strict=True):
        config = compose_config([*overrides, "callbacks.progress=false", "trainer.ckpt_every=1000000", *changes])
        train(config, folder / name)
        losses = [row["train_loss"] for row in read_metrics(folder / name / "metrics.csv")]
        weights = torch.load(folder / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        results.append((losses, weights))
    return results


def test_r3_the_null_control_is_bitwise_equal_at_d_k_16(tmp_path):
    (losses, weights), (folded_losses, folded) = run_pair(tmp_path)
    assert len(losses) >= 50
    assert losses[-1] < losses[0]
    assert losses == folded_losses
    for name, weight in weights.items():
        factor = 16**-0.25 if "q_proj" in name or "k_proj" in name else 1.0
        assert torch.equal(folded[name], weight * factor), name


@pytest.mark.parametrize(("width", "heads"), [(8, 16), (64, 2)])
@pytest.mark.slow
def test_r3_the_null_control_holds_at_other_widths_in_float64(tmp_path, width, heads):
    changes = (
        f"model.num_heads={heads}",
        "trainer.max_steps=20",
        "trainer.precision=64-true",
        "optimizer.weight_decay=0.1",
        *SMALL,
    )
    torch.set_default_dtype(torch.float64)  # or the initial weights, and the fold with them, are rounded to float32
    try:
        (losses, weights), (folded_losses, folded) = run_pair(tmp_path, *changes)
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(losses) == 20
    np.testing.assert_allclose(folded_losses, losses, rtol=1e-9)
    for name, weight in weights.items():
        factor = width**-0.25 if "q_proj" in name or "k_proj" in name else 1.0
        torch.testing.assert_close(folded[name], weight * factor, rtol=1e-6, atol=1e-9)


def test_r3_without_the_learning_rates_of_the_fold_it_is_another_run(tmp_path):
    """The control can fail: its first loss is that of the scaled run, its second is not."""
    (losses, _), (folded_losses, _) = run_pair(tmp_path, "trainer.max_steps=3", "optimizer.rules=[]", *SMALL)
    assert losses[0] == folded_losses[0]
    assert losses[2] != folded_losses[2]


# R4: condensation (Random Energy Model)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 0.217), (1.5, 0.433), (3.0, 0.698)])
def test_r4_the_ipr_follows_the_random_energy_model(factor, expected):
    torch.manual_seed(13)
    n = 4096
    sigma = factor * math.sqrt(2 * math.log(n))
    total = 0.0
    for _ in range(16):  # energies σ · N(0, 1) as q · k with d_k = 1 and q = σ
        statistics = attention_statistics(
            AttentionCall(torch.full((1, 250, 1, 1), sigma), torch.randn(1, 250, n, 1), torch.randn(1, 250, n, 1), scale=1.0)
        )
        total += float(statistics["ipr"].mean()) / 16
    assert total == pytest.approx(expected, abs=0.02)


# R5: the entropy bound of Zhai et al. 2023, Theorem 3.1


def entropies(scores):
    log_p = scores.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def test_r5_no_row_violates_the_entropy_bound():
    rows = 0
    for size in (2, 3, 17, 64, 256):
        for spread in (0.01, 0.3, 1.0, 3.0, 10.0, 40.0):
            scores = spread * torch.randn(4000, size, dtype=torch.float64)
            scores[:2000, 0] += 5 * spread * torch.rand(2000, dtype=torch.float64)  # towards the extremal vector
            assert float((entropies(scores) - zhai_entropy_bound(scores)).min()) >= -1e-9, (size, spread)
            rows += len(scores)
    assert rows >= 100_000


@pytest.mark.parametrize("size", [2, 3, 16, 256])
def test_r5_the_extremal_vector_attains_the_bound(size):
    scores = torch.zeros(5, size, dtype=torch.float64)
    scores[:, size // 2] = torch.tensor([0.0, 0.5, 2.0, 6.0, 20.0], dtype=torch.float64)
    assert float((entropies(scores) - zhai_entropy_bound(scores)).abs().max()) < 1e-6
    assert float(zhai_entropy_bound(scores)[0]) == pytest.approx(math.log(size))


# R6: a smaller scale, smaller gradients of Q and K (Noci et al. 2022)


@pytest.mark.parametrize(("width", "heads"), [(16, 8), (128, 1)])
@pytest.mark.parametrize("init", ["lecun", "gpt2"])
def test_r6_the_gradients_of_q_and_k_grow_with_the_scale_at_step_0(tmp_path, init, width, heads):
    layers = {}
    for scale in ("inv", "inv_sqrt", "unscaled"):
        config = RunConfig(
            model=TransformerConfig(embed_dim=128, num_heads=heads, num_layers=2, max_len=32, scale=scale, init=init),
            data=KeyValueDataConfig(batch_size=32, val_size=8),
            trainer=TrainerConfig(max_steps=1, accelerator="cpu", val_batches=1, ckpt_every=0),
            callbacks=CallbacksConfig(progress=False, probe=ProbeConfig(every=1, batch_size=4)),
        )
        layers[scale] = train(config, tmp_path / scale)["probes"][0]["layers"]
    for layer in range(2):
        for name in ("grad_q", "grad_k"):
            inv, inv_sqrt, unscaled = (layers[scale][layer][name] for scale in ("inv", "inv_sqrt", "unscaled"))
            assert 0 < inv < inv_sqrt < unscaled, (layer, name, inv, inv_sqrt, unscaled)
