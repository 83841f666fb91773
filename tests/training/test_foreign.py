"""Models and data of the user's own from Python: what is promised to a ``LightningDataModule``."""

import copy
import math

import lightning.pytorch as L
import pytest
import torch
from extra import last, losses_of
from torch import nn
from torch.utils.data import DataLoader, default_collate

from minitx.config import CallbacksConfig, ConfigError, ProbeConfig, RunConfig, TrainerConfig, TransformerConfig
from minitx.config.training import StopAtConfig
from minitx.training.building import build_network
from minitx.training.metrics import read_metrics
from minitx.training.run import train


class Squares(L.LightningDataModule):
    """Seven rows in batches of 3, 3 and 1; ``labels`` are numbers."""

    def __init__(self, keys=("input", "labels")):
        super().__init__()
        columns = (torch.randn(7, width, dtype=torch.float64) for width in (3, 2))
        self.rows = [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=3)

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=2)


def squared(logits, batch):
    return (logits - batch["labels"]).square().sum()


def fit(folder, data, *, model=None, callbacks=None, on_nonfinite="stop", **trainer):
    options = {"max_steps": 4, "accelerator": "cpu", "log_every": 1, "val_every": 0, "precision": "64-true", **trainer}
    config = RunConfig(
        trainer=TrainerConfig(**options),
        optimizer={"_target_": "torch.optim.SGD", "lr": 0.05},
        schedule={"_target_": "torch.optim.lr_scheduler.ConstantLR", "factor": 1.0},
        callbacks=callbacks or CallbacksConfig(progress=False),
        on_nonfinite=on_nonfinite,
    )
    return train(config, folder, model=model or nn.Linear(3, 2), data=data, objective=squared)


def test_a_loader_of_ones_own_gets_the_mean_of_each_batch(tmp_path):
    data, model = Squares(), nn.Linear(3, 2).double()
    ours, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    for batch in [*data.train_dataloader(), default_collate(data.rows[:3])]:
        loss = squared(ours(batch["input"]), batch) / batch["labels"].numel()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fit(tmp_path, data, model=model)
    assert losses_of(tmp_path) == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(last(tmp_path)["state_dict"]["network.weight"], ours.weight.detach(), rtol=1e-12, atol=0)


def test_an_incomplete_accumulation_is_one_update_and_validation_uses_the_objective_of_the_run(tmp_path):
    data, model = Squares(), nn.Linear(3, 2)
    result, batch = fit(tmp_path, data, model=model, accumulate=2), default_collate(data.rows)
    assert result["val_loss"] == pytest.approx(squared(model(batch["input"]), batch).item() / 14, rel=1e-12)
    assert [row["tokens"] for row in read_metrics(tmp_path / "metrics.csv")] == [12, 14, 26, 28]  # two epochs


def test_the_loss_and_gradient_of_an_incomplete_accumulation_are_the_mean_over_its_micro_batches(tmp_path):
    data, model, wanted = Squares(), nn.Linear(3, 2), []
    ours = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    first, second, third = data.train_dataloader()
    for step in ((first, second), (third,)):
        loss = sum(squared(ours(batch["input"]), batch) / batch["labels"].numel() for batch in step) / len(step)
        optimizer.zero_grad()
        loss.backward()
        wanted.append((loss.item(), torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()]).item()))
        optimizer.step()
    fit(tmp_path, data, model=model, accumulate=2, max_steps=2)
    found = [(row["train_loss"], row["grad_norm"]) for row in read_metrics(tmp_path / "metrics.csv")]
    assert found == [pytest.approx(pair, rel=1e-12) for pair in wanted]


def test_the_last_step_of_a_run_that_stops_early_has_a_row_and_is_counted(tmp_path):
    stop_at = {"metric": "train_loss", "value": 1e9, "window": 3, "extra_steps": 1}
    result = fit(tmp_path, Squares(), max_steps=20, log_every=10, stop_at=StopAtConfig(**stop_at))
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == [1, 4] and rows[-1]["val_loss"] == result["val_loss"]
    assert (result["steps"], result["train_loss"]) == (4, rows[-1]["train_loss"])


def test_rows_that_are_given_are_not_held_against_those_of_the_config(tmp_path):
    accumulated = RunConfig(trainer=TrainerConfig(accumulate=5, max_steps=1))  # 12 rows of the default data, 64 tokens each
    short = RunConfig(model=TransformerConfig(max_len=7))
    for config, key in ((accumulated, "data.batch_size=12"), (short, "model.max_len=7")):
        with pytest.raises(ConfigError, match=key):
            train(config, tmp_path / "config")
    assert fit(tmp_path / "given", Squares(), accumulate=5, max_steps=1)["steps"] == 1


def test_a_micro_batch_without_a_label_adds_nothing(tmp_path):
    data = Squares()
    ids = torch.tensor([[1, -100], [-100, -100], [0, 1], [1, 0]])
    data.rows = [{"input": torch.randn(2, 3, dtype=torch.float64), "labels": labels} for labels in ids]
    data.train_dataloader = lambda: DataLoader(data.rows, batch_size=1)
    config = RunConfig(
        trainer=TrainerConfig(max_steps=2, accelerator="cpu", log_every=1, val_every=0, precision="64-true", accumulate=2),
        callbacks=CallbacksConfig(progress=False),
    )
    train(config, tmp_path, model=nn.Linear(3, 2), data=data)
    assert all(math.isfinite(loss) for loss in losses_of(tmp_path))
    assert [row["tokens"] for row in read_metrics(tmp_path / "metrics.csv")] == [1, 5]


def test_fields_that_the_data_decide_are_fields_of_the_model(tmp_path):
    data = Squares()
    for fields, said in (({"num_class": 3}, "model.num_class=3, but a model has no such field"), ({"num_classes": 3}, "")):
        data.model_fields = fields
        model = TransformerConfig(architecture="encoder", head="sequence", vocab_size=5, embed_dim=8, num_heads=2, num_layers=1)
        config = RunConfig(model=model)
        if said:
            with pytest.raises(ConfigError, match=said):
                build_network(config, data)
        else:
            assert build_network(config, data).config.num_labels == 3


def test_what_needs_labels_our_blocks_or_our_data_is_refused_by_name(tmp_path):
    probe = CallbacksConfig(probe=ProbeConfig(every=1))
    nameless = Squares(keys=("input", "target"))
    for key, data, changes in (
        ("data: a batch must be a mapping", nameless, {}),
        ("trainer.strategy", Squares(), {"strategy": "sharded"}),
        ("callbacks.probe.every", Squares(), {"callbacks": probe}),
    ):
        with pytest.raises(ConfigError, match=f"^{key}"):
            fit(tmp_path / "run", data, **changes)
        assert not (tmp_path / "run").exists()


def test_an_optimizer_without_found_inf_is_checked_at_every_step(tmp_path):
    class Breaks(nn.Linear):
        calls = 0

        def forward(self, input):
            self.calls += self.training
            return super().forward(input) / (0.0 if self.training and self.calls == 3 else 1.0)

    result = fit(tmp_path, Squares(), model=Breaks(3, 2), on_nonfinite="record", log_every=10)
    assert (result["nonfinite_step"], result["steps"]) == (3, 2)
