"""Fabricated records of a grid, so that the truth behind a report is known."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitx.config import AblationConfig, ComparisonConfig, PredictionConfig, StudyConfig

Record = dict[str, Any]

WIDTHS = ("4", "8", "16", "32", "64", "128", "256")
INITS = {"lecun": 1.0, "xavier": 1.0, "torch_mha": 0.5, "torch_linear": 1 / 3, "gpt2": 0.0512}
RUNGS = ("S0", "S1", "S2", "S3", "S4", "S5a", "S5b", "S5c")
RATES = ("1e-3", "3e-3", "1e-2")
PREDICTIONS = {f"P{i}": PredictionConfig(statement=f"statement {i}") for i in range(1, 8)}
ARMS = ("inv_sqrt", "unscaled", "init_fold", "uniform", "full_fold")


COMPARISONS = (
    ComparisonConfig(study="recall", arms=ARMS[:2], primary=({"init": "lecun", "head_dim": "128"},)),
    ComparisonConfig(study="recall", arms=("init_fold", "unscaled")),
    ComparisonConfig(study="recall", arms=("inv_sqrt", "init_fold")),
)


def levels(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names, ())


def quick_grid(seeds: int = 6, **changes: Any) -> AblationConfig:
    """A grid of the shape of ``quick``."""
    everyone = tuple(range(seeds))
    recall = {"head_dim": levels(("8", "128")), "init": levels(("lecun", "gpt2")), "lr": levels(RATES)}
    studies = {
        "recall": StudyConfig(arms=ARMS[:4], factors=recall, seeds=everyone, score="accuracy"),
        "text": StudyConfig(arms=ARMS[:2], factors={"lr": levels(RATES[:2])}, seeds=(0, 1), score="loss"),
        "ladder": StudyConfig(arms=ARMS[:2], factors={"rung": levels(RUNGS)}, seeds=(0,)),
        "init_sweep": StudyConfig(arms=ARMS[:2], factors={"head_dim": levels(WIDTHS), "init": levels(tuple(INITS))}),
        "null_control": StudyConfig(arms=("inv_sqrt", "full_fold"), factors={"head_dim": levels(("16",))}),
    }
    whole = {"arms": dict.fromkeys(ARMS, ()), "studies": studies, "predictions": PREDICTIONS, **changes}
    return AblationConfig(**{"comparisons": COMPARISONS if "recall" in whole["studies"] else (), **whole})


def expected_cells(grid: AblationConfig) -> list[Record]:
    """Every cell of the grid; ``uniform`` runs at one rate, ``init_fold`` under LeCun init alone."""
    cells = []
    for study, config in grid.studies.items():
        combinations = [dict(zip(config.factors, c, strict=True)) for c in itertools.product(*config.factors.values())]
        for seed, arm, factors in itertools.product(config.seeds, config.arms, combinations):
            skipped = arm == "uniform" and factors["lr"] != "3e-3"
            skipped |= arm in ("uniform", "init_fold") and factors.get("init", "lecun") != "lecun"
            if not skipped:
                cells.append({"study": study, "arm": arm, "factors": factors, "seed": seed})
    return cells


def recall_accuracy(arm: str, factors: Record, seed: int, rng: np.random.Generator) -> float:
    """What the pilot saw: harm under LeCun at a large d_k, none at the best rate under the small init."""
    wide, rate = factors["head_dim"] == "128", RATES.index(factors["lr"])
    solved = 1.0 - 0.002 * rng.random()
    if arm == "uniform":
        return 0.19 + 0.02 * rng.random()
    if factors["init"] == "gpt2":
        return 0.08 if arm == "unscaled" and wide and rate == 2 else solved
    if not wide:
        return 0.6 + 0.2 * rng.random() if rate == 0 else solved
    if arm == "unscaled":
        return (0.6, 0.45, 0.08)[rate] + 0.1 * rng.normal()
    if arm == "init_fold":
        return (solved, 0.97 + 0.02 * rng.random(), 0.1)[rate]
    return solved


def layer(std: float, step: int, unscaled: bool) -> Record:
    frozen = 1 - math.exp(-std / 3)
    return {
        "logit_std": 1.05 * std,
        "row_std": std * (1 + 0.02 * math.log1p(step)),
        "max_logit": 4.5 * std,
        "entropy": 1 - 0.9 * frozen,
        "saturation_99": 0.3 * frozen,
        "saturation_90": 0.6 * frozen,
        "ipr": frozen,
        "dot_product_variance": std**2,
        "argmax_retention": 1.0 if step == 0 else 0.8 if unscaled else 0.2,
        "grad_q": 0.2 * std**0.7 / (1 + step),
        "grad_k": 0.2 * std**0.7 / (1 + step),
        "grad_v": 0.3,
        "grad_query_histogram": {"zero": 1, "-2.00": 5, "-1.75": 9} if unscaled else {"-2.25": 8, "-2.00": 7},
        **({"logit_step": 0.1 * std} if step else {}),
    }


def fabricated_result(cell: Record, accuracy: Callable[..., float]) -> Record:
    """A plausible result of a cell, drawn from its own seed."""
    text = repr(sorted((k, str(v)) for k, v in cell.items()))
    rng = np.random.default_rng(int(hashlib.sha256(text.encode()).hexdigest()[:8], 16))
    study, arm, factors = cell["study"], cell["arm"], cell["factors"]
    unscaled = arm == "unscaled"
    width = float(factors.get("head_dim", 128))
    raw = math.sqrt(width) * INITS.get(factors.get("init", "lecun"), 1.0) * (1 + 0.02 * rng.normal())
    steps = {"init_sweep": 1, "null_control": 50, "ladder": 250}.get(study, 300)
    probes = []
    for step in (0,) if study == "init_sweep" else (0, 1, 2, 4, 8, 16, 32, 64, 128, 250):
        layers = [layer(raw if unscaled else raw / math.sqrt(width), step, unscaled) for _ in range(2)]
        for one in layers:
            one["dot_product_variance"] = raw**2
        probes.append({"step": step, "layers": layers})
    result = {
        "outcome": "OK",
        "val_loss": 2.1 + 0.02 * rng.random() + (0.3 if unscaled else 0.0),
        "accuracy": None,
        "initial_loss": 4.3,
        "floors": {"unigram": 3.05, "bigram": 2.4},
        "steps": steps,
        "nonfinite_step": None,
        "grad_norm_median": 1.1 + 0.1 * rng.random(),
        "grad_norm_max": 2.0,
        "spike_share": 0.0,
        "loss_digest": hashlib.sha256(repr((study, factors, cell["seed"])).encode()).hexdigest(),
        "curve": [[s, 2.2 + 2.1 * math.exp(-s / 60) + 0.02 * rng.normal(), 1.0 + rng.random()] for s in range(0, 250, 5)],
        "num_parameters": 800_000,
        "probes": probes,
    }
    if study in ("recall", "floor"):
        found = min(1.0, max(0.0, accuracy(arm, factors, cell["seed"], rng)))
        result |= {"accuracy": found, "outcome": "SOLVED" if found >= 0.99 else "FAILED", "floors": {}}
        result |= {"val_loss": 2.7 * (1 - found), "initial_loss": 2.9}
    if study == "ladder":
        ladder_result(result, factors["rung"], unscaled)
    return result


def ladder_result(result: Record, rung: str, unscaled: bool) -> None:
    """Apart from S2 on, unstable at S3 and S5c, both arms collapsed at S4."""
    if rung in ("S0", "S1") and unscaled:
        result["val_loss"] -= 0.25
    if rung == "S4":
        result |= {"outcome": "COLLAPSED", "val_loss": 3.1}
    if rung in ("S3", "S5a") and unscaled:
        result |= {"outcome": "NO-CONTEXT", "val_loss": 2.9, "grad_norm_median": 11.0, "grad_norm_max": 62.0}
        result["curve"] = [[s, loss + 0.7, 11 * norm] for s, loss, norm in result["curve"]]
    if rung == "S5c" and unscaled:
        result |= {"outcome": "NONFINITE", "val_loss": float("nan"), "nonfinite_step": 120, "spike_share": 0.03}
        result["curve"] = [[s, float("nan") if s > 120 else 3 + s / 80, 5.0 + s] for s, _, _ in result["curve"]]


@pytest.fixture(scope="session")
def fabricate() -> Callable[..., tuple[list[Record], AblationConfig, list[Record]]]:
    """Factory of (records, grid, expected); ``accuracy`` sets the truth of the recall study."""

    def make(
        grid: AblationConfig | None = None, accuracy: Callable[..., float] = recall_accuracy
    ) -> tuple[list[Record], AblationConfig, list[Record]]:
        grid = grid or quick_grid()
        expected = expected_cells(grid)
        records = [
            {
                **cell,
                "cell": hashlib.sha256(repr(cell).encode()).hexdigest()[:12],
                "overrides": ["data=kv_lookup"] if cell["study"] == "recall" else ["data.context_len=64"],
                "command": f"python scripts/train.py seed={cell['seed']}",
                "status": "done",
                "error": None,
                "seconds": 2.0,
                "result": fabricated_result(cell, accuracy),
            }
            for cell in expected
        ]
        return records, grid, expected

    return make


@pytest.fixture(scope="session")
def make_grid() -> Callable[..., AblationConfig]:
    return quick_grid
