"""R3 to R6 of the scaling ablation as hard bars, through the package's own configs and runs; R1 and R2: examples/why_scale.py."""

import math

import pytest
import torch
from extra import last, losses_of

from minitx.ablation.grid import cells
from minitx.analysis import attention_statistics, zhai_entropy_bound
from minitx.cli.compose import compose_config, compose_grid
from minitx.config import node
from minitx.nn import AttentionCall, build_model
from minitx.training.json_lines import read_probes
from minitx.training.run import train

pytestmark = pytest.mark.slow

# R3: the scale is a parametrisation (Raffel et al. 2020): inv_sqrt and its full fold are one run


SMALL = ("data.batch_size=16", "data.val_size=16")


def test_r3_the_null_control_is_bitwise_equal_at_d_k_16(tmp_path):
    """Of the grid's own cells."""
    found = [cell for cell in cells(compose_grid(["experiment=scaling_ablation"])) if cell.place.study == "null_control"]
    overrides = {cell.place.arm: cell.overrides for cell in found}
    short = [*SMALL, "callbacks.progress=false", "trainer.ckpt_every=1000000"]
    short += ["trainer.max_steps=20", "schedule.warmup_steps=3"]
    for arm in ("inv_sqrt", "full_fold"):
        train(compose_config([*overrides[arm], *short]), tmp_path / arm)
    scaled, folded = (losses_of(tmp_path / arm) for arm in ("inv_sqrt", "full_fold"))
    assert scaled == folded and len(scaled) == 20 and scaled[-1] < scaled[0]
    for name, weight in last(tmp_path / "inv_sqrt")["state_dict"].items():
        factor = 16**-0.25 if "q_proj" in name or "k_proj" in name else 1.0
        assert torch.equal(last(tmp_path / "full_fold")["state_dict"][name], weight * factor), name


# R4: condensation (Random Energy Model)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 0.217), (3.0, 0.698)])
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


def test_r5_no_row_violates_the_entropy_bound_and_the_extremal_vector_attains_it():
    for size in (2, 3, 17, 256):
        for spread in (0.01, 0.3, 1.0, 3.0, 10.0, 40.0):
            scores = spread * torch.randn(4000, size, dtype=torch.float64)
            scores[:2000, 0] += 5 * spread * torch.rand(2000, dtype=torch.float64)  # towards the extremal vector
            assert float((entropies(scores) - zhai_entropy_bound(scores)).min()) >= -1e-9, (size, spread)
        scores = torch.zeros(5, size, dtype=torch.float64)
        scores[:, size // 2] = torch.tensor([0.0, 0.5, 2.0, 6.0, 20.0], dtype=torch.float64)
        assert float((entropies(scores) - zhai_entropy_bound(scores)).abs().max()) < 1e-6
        assert float(zhai_entropy_bound(scores)[0]) == pytest.approx(math.log(size))


# R6: a smaller scale, smaller gradients of Q and K (Noci et al. 2022)


@pytest.mark.parametrize(("init", "width", "heads"), [("lecun", 16, 8), ("gpt2", 128, 1)])
def test_r6_the_gradients_of_q_and_k_grow_with_the_scale_at_step_0(make_config, tmp_path, init, width, heads):
    layers, data = {}, {"_target_": "minitx.data.kv_lookup", "batch_size": 32, "val_size": 8}
    for scale in ("inv", "inv_sqrt", "unscaled"):
        model = node(build_model, embed_dim=128, num_heads=heads, num_layers=2, max_len=32, scale=scale, init=init)
        train(make_config(model=model, data=data, trainer__max_steps=1, probe__every=1, probe__batch_size=4), tmp_path / scale)
        layers[scale] = read_probes(str(tmp_path / scale / "probes.jsonl"))[0]["layers"]
    for layer in range(2):
        for name in ("grad_q", "grad_k"):
            inv, inv_sqrt, unscaled = (layers[scale][layer][name] for scale in ("inv", "inv_sqrt", "unscaled"))
            assert 0 < inv < inv_sqrt < unscaled, (layer, name, inv, inv_sqrt, unscaled)
