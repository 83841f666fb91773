"""Models and data of the user's own from Python: what is promised to a ``Task``, and what to a ``LightningDataModule``."""

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from minitx.config import CallbacksConfig, ConfigError, ProbeConfig, RunConfig, TrainerConfig
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


def by_hand(batches, rate=0.05):
    """SGD on the mean of each batch."""
    weight, losses = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True), []
    for batch in batches:
        loss = squared(batch["x"] @ weight, batch) / len(batch["x"])
        losses.append(loss.item())
        (grad,) = torch.autograd.grad(loss, weight)
        weight = (weight - rate * grad).detach().requires_grad_()
    return weight.detach(), losses


def weights_of(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]["network.weight"]


def test_a_loader_of_ones_own_gets_the_mean_of_each_batch(tmp_path):
    data = Squares()
    train(config(), tmp_path, model=Linear(), data=data, objective=squared)
    weight, losses = by_hand([*data.train_dataloader(), next(iter(data.train_dataloader()))])
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


def test_what_needs_our_blocks_or_our_data_is_refused_by_name(tmp_path):
    probe = {"callbacks": CallbacksConfig(probe=ProbeConfig(every=1))}
    for key, changes in {
        "trainer.strategy": {"trainer": TrainerConfig(strategy="sharded", accelerator="cpu")},
        "callbacks.probe.every": probe,
    }.items():
        with pytest.raises(ConfigError, match=f"^{key}"):
            train(
                RunConfig(**{**vars(config()), **changes}), tmp_path / "run", model=Linear(), data=Squares(), objective=squared
            )


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
