"""Models and data of the user's own from Python: what is promised to a ``Task``, and what to a ``LightningDataModule``."""

from __future__ import annotations

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from minitx.config import CallbacksConfig, ConfigError, ProbeConfig, RunConfig, TrainerConfig, TransformerConfig
from minitx.data.task import Task
from minitx.training.metrics import read_metrics
from minitx.training.run import train


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Squares(L.LightningDataModule):
    """Seven rows in batches of 3, 3 and 1; ``labels`` are numbers."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        x, y = (torch.randn(7, width, generator=draw, dtype=torch.float64) for width in (3, 2))
        self.rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=3)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, batch_size=2)


def squared(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (logits - batch["labels"]).square().sum()


def config(**trainer):
    options = {"max_steps": 4, "accelerator": "cpu", "log_every": 1, "val_every": 0, "precision": "64-true", **trainer}
    return RunConfig(
        trainer=TrainerConfig(**options),
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.05},
        schedule={"_target_": "torch.optim.lr_scheduler.ConstantLR", "factor": 1.0},
        callbacks=CallbacksConfig(progress=False),
    )


def by_hand(batches, steps, rate=0.05):
    """SGD on the mean of the micro-batches' means, each list of ``batches`` one update."""
    weight, losses = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True), []
    for step in range(steps):
        parts = batches[step % len(batches)]
        means = [squared(torch.stack([row["x"] for row in part]) @ weight, {"labels": torch.stack([row["labels"] for row in part])}) / len(part) for part in parts]  # fmt: skip
        loss = sum(means) / len(parts)
        losses.append(loss.item())
        (grad,) = torch.autograd.grad(loss, weight)
        weight = (weight - rate * grad).detach().requires_grad_()
    return weight.detach(), losses


def weights_of(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]["network.weight"]


def test_a_loader_of_ones_own_gets_the_mean_of_each_batch(tmp_path):
    data = Squares()
    train(config(), tmp_path, model=Linear(), data=data, objective=squared)
    rows = data.rows
    weight, losses = by_hand([[rows[:3]], [rows[3:6]], [rows[6:]]], steps=4)
    torch.testing.assert_close(weights_of(tmp_path), weight, rtol=1e-12, atol=0)
    assert [row["train_loss"] for row in read_metrics(tmp_path / "metrics.csv")] == pytest.approx(losses, rel=1e-12)


def test_an_incomplete_accumulation_is_one_update_and_validation_uses_the_objective_of_the_run(tmp_path):
    data = Squares()
    result = train(config(accumulate=2), tmp_path, model=Linear(), data=data, objective=squared)
    assert result["steps"] == 4
    x, y = (torch.stack([row[name] for row in data.rows]) for name in ("x", "labels"))
    assert result["val_loss"] == pytest.approx(float((x @ weights_of(tmp_path) - y).square().sum()) / 7, rel=1e-12)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["tokens"] == 14  # two epochs


def test_a_batch_that_is_no_mapping_with_labels_is_named(tmp_path):
    class Tuples(Squares):
        def train_dataloader(self) -> DataLoader:
            return DataLoader([(row["x"], row["labels"]) for row in self.rows], batch_size=3)

    with pytest.raises(ConfigError, match=r"^data: a batch must be a mapping"):
        train(config(), tmp_path / "run", model=Linear(), data=Tuples(), objective=squared)
    assert not (tmp_path / "run").exists()


def test_a_head_at_every_token_is_trained_by_a_task_of_ones_own(tmp_path):
    rows = [{"input_ids": [i % 5, (i + 2) % 5, 3], "labels": [i % 2, -100, 1]} for i in range(16)]
    task = Task(name="tags", train=rows, val=rows[:5], model_fields={"vocab_size": 5, "num_labels": 2})
    shape = TransformerConfig(architecture="encoder", head="token", embed_dim=8, num_heads=2, num_layers=1, max_len=4)
    trainer = TrainerConfig(max_steps=20, accelerator="cpu", log_every=1, val_every=0)
    chosen = RunConfig(model=shape, data={}, trainer=trainer, callbacks=CallbacksConfig(progress=False))
    train(chosen, tmp_path, data=task, batch_size=8)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert rows[-1]["train_loss"] < rows[0]["train_loss"]
    assert rows[-1]["tokens"] == 20 * 8 * 2


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"trainer": TrainerConfig(strategy="sharded", accelerator="cpu")}, "trainer.strategy=sharded"),
        ({"callbacks": CallbacksConfig(probe=ProbeConfig(every=1))}, "callbacks.probe.every"),
    ],
)
def test_what_needs_our_blocks_or_our_data_is_refused_by_name(tmp_path, changes, key):
    chosen = RunConfig(**{**vars(config()), **changes})
    with pytest.raises(ConfigError, match=f"^{key}"):
        train(chosen, tmp_path / "run", model=Linear(), data=Squares(), objective=squared)


def test_an_optimizer_without_found_inf_is_checked_at_every_step(tmp_path, caplog):
    caplog.set_level("INFO")

    class Breaks(Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) / (0.0 if self.calls == 3 else 1.0)

    chosen = RunConfig(**{**vars(config()), "on_nonfinite": "record"})
    result = train(chosen, tmp_path, model=Breaks(), data=Squares(), objective=squared)
    assert result["nonfinite_step"] == 3
    assert "not finite" in caplog.text  # the summary says how it is checked
