"""A resumed run has the optimizer state of the run that was never stopped, bit for bit, with any optimizer and precision."""

import dataclasses
import json

import pytest
import torch
from extra import last
from torch.optim import Optimizer

from minitx.config import node
from minitx.training import optimizers
from minitx.training.metrics_csv import read_metrics
from minitx.training.run import train
from minitx.training.schedules import constant


def muon_of_torch(network):
    """It takes matrices only."""
    return torch.optim.Muon([parameter for parameter in network.parameters() if parameter.ndim == 2])


class Wide(Optimizer):
    """Keeps its average in float32 and its count in int64, whatever the dtype of a parameter is."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(average=torch.zeros_like(p, dtype=torch.float32), count=torch.zeros(1, dtype=torch.int64))
                state["count"] += 1
                state["average"].lerp_(p.grad.float(), 0.1)
                p.sub_((group["lr"] * state["average"] / state["count"]).to(p.dtype))
        return loss


OF_TORCH = {f"torch.optim.{name}": kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
NODES = {name: {"_target_": name} for name, kind in OF_TORCH.items() if issubclass(kind, Optimizer) and kind is not Optimizer}
del NODES["torch.optim.SparseAdam"]  # for sparse gradients, which no model of ours has
NODES["torch.optim.Muon"] = node(muon_of_torch)
NODES["Wide"] = node(Wide)
NODES |= {name: node(getattr(optimizers, name)) for name in ("adamw", "sgd", "muon")}
NODES |= {f"{name} foreach": {"_target_": f"torch.optim.{name}", "foreach": True} for name in ("NAdam", "ASGD")}
NODES |= {f"{name} fused": {"_target_": f"torch.optim.{name}", "fused": True} for name in ("Adam", "Adagrad")}
QUICK = ("torch.optim.NAdam", "torch.optim.ASGD", "torch.optim.Muon", "Wide", "adamw", "muon")
CASES = [
    pytest.param(name, precision, marks=() if precision == "bf16-true" and name in QUICK else pytest.mark.slow)
    for precision in ("bf16-true", "64-true", "32-true", "bf16-mixed")
    for name in NODES
]


def left_by(folder):
    """Weights, optimizer state with its dtypes, and the rows of training."""
    checkpoint, rows = last(folder), read_metrics(folder / "metrics.csv")
    found = [checkpoint["state_dict"], checkpoint["optimizer_states"], [(row["train_loss"], row["grad_norm"]) for row in rows]]
    return json.dumps(found, default=lambda tensor: [str(tensor.dtype), tensor.tolist()])


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_resumed_run_is_the_run_that_was_never_stopped_with_any_optimizer(
    make_config, tmp_path, monkeypatch, name, precision
):
    monkeypatch.setattr("minitx.training.trainer.cpu_precision", str)  # as on a CPU with instructions for bfloat16
    options = {"optimizer": NODES[name], "schedule": node(constant), "trainer__precision": precision}
    config = make_config(**options, trainer__max_steps=4, trainer__ckpt_every=100, trainer__val_batches=1)
    train(config, tmp_path / "whole")
    train(dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, max_steps=2)), tmp_path / "cut")
    train(dataclasses.replace(config, ckpt_path="last"), tmp_path / "cut")
    assert left_by(tmp_path / "cut") == left_by(tmp_path / "whole")


def test_optimizer_state_follows_the_precision_of_a_resumed_run(make_config, tmp_path):
    """Only state that had another dtype than its parameter keeps it."""
    options = {"optimizer": node(optimizers.adamw), "schedule": node(constant), "trainer__ckpt_every": 100}
    train(make_config(**options, trainer__max_steps=1), tmp_path)
    train(make_config(**options, trainer__max_steps=2, trainer__precision="64-true", ckpt_path="last"), tmp_path)
    (state,) = last(tmp_path)["optimizer_states"]
    assert {state["state"][0][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.float64}
