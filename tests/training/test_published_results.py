"""R3 and R5 of the scaling ablation as hard bars; R1 and R2: examples/why_scale.py."""

import math

import pytest
import torch
from extra import last, losses_of

from minitx.ablation.grid import cells
from minitx.analysis import zhai_entropy_bound
from minitx.cli.compose import compose_config, compose_grid
from minitx.training.run import train

# R3: the scale is a parametrisation (Raffel et al. 2020): inv_sqrt and its full fold are one run


def test_r3_the_null_control_is_bitwise_equal_at_d_k_16(tmp_path):
    """Of the grid's own cells."""
    found = [cell for cell in cells(compose_grid(["experiment=scaling_ablation"])) if cell.place.study == "null_control"]
    overrides = {cell.place.arm: cell.overrides for cell in found}
    short = ["data.batch_size=16", "data.val_size=16", "callbacks.progress=false", "trainer.ckpt_every=1000000"]
    for arm in ("inv_sqrt", "full_fold"):
        train(compose_config([*overrides[arm], *short, "trainer.max_steps=20", "schedule.warmup_steps=3"]), tmp_path / arm)
    scaled, folded = (losses_of(tmp_path / arm) for arm in ("inv_sqrt", "full_fold"))
    assert scaled == folded and len(scaled) == 20 and scaled[-1] < scaled[0]
    for name, weight in last(tmp_path / "inv_sqrt")["state_dict"].items():
        factor = 16**-0.25 if "q_proj" in name or "k_proj" in name else 1.0
        assert torch.equal(last(tmp_path / "full_fold")["state_dict"][name], weight * factor), name


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
