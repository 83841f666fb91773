"""The rehearsal: what is wrong with a run is said before it has a folder, and a right run is as it is without."""

import dataclasses
import json
import logging
import os
from typing import ClassVar

import pytest
import torch
from torch import nn

from minitx.config import ConfigError, RunConfig
from minitx.training.checkpoint_files import read_checkpoint
from minitx.training.metrics_csv import OF_THE_MACHINE, read_metrics
from minitx.training.module import TrainingModule
from minitx.training.rehearse import ShapesOnly, TwoRows, compare_rows, known_callbacks
from minitx.training.run import train
from tests.training.wrong_runs import RIGHT, SGD, VECTORS, WRONG, Own


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_run_ends_with_one_sentence_before_it_has_a_folder(name, tmp_path):
    start, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as caught:
        start(tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_run_is_not_refused_and_has_the_digits_of_a_run_without_rehearsal(name, tmp_path):
    run = RIGHT[name]
    run(tmp_path / "with")
    dataclasses.replace(run, trainer={**run.trainer, "rehearse": False})(tmp_path / "without")
    one, other = (read_checkpoint(tmp_path / place / "checkpoints" / "last.ckpt") for place in ("with", "without"))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(one[key], other[key], rtol=0, atol=0)
    for key in ("lr_schedulers", "global_step"):
        assert one[key] == other[key]
    rows = [read_metrics(tmp_path / place / "metrics.csv") for place in ("with", "without")]
    one, other = ([{k: v for k, v in row.items() if k not in OF_THE_MACHINE} for row in table] for table in rows)
    assert json.dumps(one) == json.dumps(other)


def test_a_text_model_has_the_digits_of_a_run_without_rehearsal(make_config, tmp_path):  # with all else: tests/lattice/runs.py
    config = make_config(
        trainer__ckpt_every=6, trainer__clip=0.5, model__dropout=0.1, samples__every=3, samples__max_new_tokens=9
    )
    weights = []
    for rehearse in (True, False):
        torch.manual_seed(5)
        options = dataclasses.replace(config.trainer, rehearse=rehearse)
        train(dataclasses.replace(config, trainer=options), tmp_path / str(rehearse))
        weights.append(read_checkpoint(tmp_path / str(rehearse) / "checkpoints" / "last.ckpt")["state_dict"])
    torch.testing.assert_close(*weights, rtol=0, atol=0)


class Remembers(nn.Linear):
    """A network with everything that a step can change: a buffer, a list, a plain tensor, a number, a hook, its mode."""

    def __init__(self):
        super().__init__(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.seen, self.plain, self.calls = [], torch.zeros(2), 0

    def forward(self, input):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * input.detach().mean(0))
            self.plain += 1
        self.seen.append(len(input))
        self.calls += 1
        self.late = torch.rand(1)
        return super().forward(input)


def test_everything_that_a_step_changes_is_put_back(tmp_path, monkeypatch):
    import minitx.training.run as run_module

    network, states = Remembers(), []

    def state():
        return {
            "weights": {name: value.clone() for name, value in network.state_dict().items()},
            "attributes": ([*network.seen], network.plain.clone(), network.calls, hasattr(network, "late"), network.training),
            "gradients": [parameter.grad for parameter in network.parameters()],
            "random": torch.get_rng_state(),
        }

    def rehearse(*arguments):
        states.append(state())
        original(*arguments)
        states.append(state())

    original = run_module.rehearse
    monkeypatch.setattr(run_module, "rehearse", rehearse)
    Own(VECTORS, lambda: network)(tmp_path / "run")
    before, after = states
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert network.calls > 0


def test_the_rehearsal_writes_and_logs_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    run = Own(VECTORS)
    run(tmp_path / "with")
    with_it = [record.getMessage().replace("with", "") for record in caplog.records]
    caplog.clear()
    dataclasses.replace(run, trainer={"rehearse": False})(tmp_path / "out")
    assert [line.split("  ")[0] for line in with_it] == [
        r.getMessage().replace("out", "").split("  ")[0] for r in caplog.records
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"with", "out"}


def test_callbacks_of_the_user_take_no_part_and_those_of_minitx_are_short():
    parts = {
        "own": {"_target_": "tests.training.wrong_runs.LogsAMetric"},
        "lr": {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor"},
        "samples": {"_target_": "minitx.training.samples.Samples", "every": 250, "max_new_tokens": 99},
        "progress": True,
    }
    known = known_callbacks(RunConfig(callbacks=parts).callbacks)
    assert [*known] == ["lr", "samples"]
    assert (known["samples"].get("every"), known["samples"].get("max_new_tokens")) == (1, 4)


def test_a_large_checkpoint_of_the_rehearsal_has_shapes_alone(tmp_path, monkeypatch):
    class Watched(ShapesOnly):
        sizes: ClassVar = []

        def save_checkpoint(self, checkpoint, path, storage_options=None):
            super().save_checkpoint(checkpoint, path, storage_options)
            self.sizes.append(os.path.getsize(path))

    monkeypatch.setattr("minitx.training.rehearse.SHAPES_ONLY_ABOVE", 1000)
    monkeypatch.setattr("minitx.training.rehearse.ShapesOnly", Watched)
    Own(VECTORS, lambda: nn.Sequential(nn.Linear(3, 40_000), nn.Linear(40_000, 2)), more={"optimizer": {**SGD, "lr": 1e-6}})(
        tmp_path / "run"
    )
    assert Watched.sizes
    assert max(Watched.sizes) < 20_000


class Halves(torch.nn.Module):
    """Logits (B, L) that are all zero at first, as those of an output layer that starts at zero."""

    def __init__(self, start=0.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((), start, dtype=torch.float64))

    def forward(self, input):
        return self.weight * input


def squares(logits, batch):
    return (logits - batch["labels"]).square()


def rowwise(logits, batch):
    return squares(logits, batch).sum(1)


SUMS = {
    "a sum": lambda logits, batch: squares(logits, batch).sum(),
    "some sums": lambda logits, batch: {"loss": squares(logits, batch).sum(), "zero": 0 * logits.sum()},
    "a sum with noise": lambda logits, batch: (squares(logits, batch) * torch.rand_like(logits)).sum(),
    "rows that weigh differently": lambda logits, batch: (rowwise(logits, batch) * batch["weight"]).sum(),
}
OTHERS = {
    "a mean": lambda logits, batch: squares(logits, batch).mean(),
    "a sum over the targets of the step": lambda logits, batch: squares(logits, batch).sum() / batch["num_targets"],
    "a root": lambda logits, batch: squares(logits, batch).sum().sqrt(),
    "the worst row": lambda logits, batch: rowwise(logits, batch).amax(),
    "columns against rows": lambda logits, batch: (logits[:, :1] - batch["labels"][:, 0]).square().sum(),
    "a mean beside a sum": lambda logits, batch: {"loss": rowwise(logits, batch).sum(), "nll": rowwise(logits, batch).mean()},
}


def numbers(labels):
    weight = torch.linspace(1, 2, len(labels), dtype=torch.float64)
    input = torch.linspace(-1, 1, labels.numel(), dtype=torch.float64).view_as(labels)
    return {"input": input, "labels": labels, "weight": weight, "num_targets": torch.tensor(labels.numel())}


LABELS = {"different": torch.arange(15.0).view(5, 3), "zero": torch.zeros(5, 3), "one row": torch.ones(1, 3)}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("start", [0.0, 0.7])
@pytest.mark.parametrize("name", [*SUMS, *OTHERS])
def test_an_objective_that_does_not_add_up_over_rows_is_refused_even_if_its_loss_begins_at_zero(name, start, labels):
    batch = numbers(LABELS[labels].double())
    module = TrainingModule(Halves(start), {**SUMS, **OTHERS}[name], None, None)
    weight = module.network.weight.detach().clone()
    if name in SUMS:
        compare_rows(module, TwoRows(batch).batch, torch.device("cpu"))
    else:
        with pytest.raises(ConfigError, match="must return sums"):
            compare_rows(module, TwoRows(batch).batch, torch.device("cpu"))
    assert torch.equal(module.network.weight, weight)


def test_two_rows_are_one_with_few_labels_and_one_with_others():
    labels = torch.tensor([[1, 2, 3], [-100, -100, -100], [4, -100, -100], [5, 6, -100]])
    rows = TwoRows({"input_ids": torch.arange(4), "labels": labels, "num_targets": torch.tensor(6)})
    assert rows.batch["input_ids"].tolist() == [2, 0]
    assert "num_targets" not in rows.batch


class DoesNotFit(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(4, 2)

    def forward(self, input):
        return self.second(self.first(input))


def test_an_error_of_the_users_model_is_placed_in_the_users_file(tmp_path):
    """The frames below it are kernels of torch, some of which minitx wraps."""
    line = DoesNotFit.forward.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=rf"^model: fails .* \(test_rehearse\.py:{line}\)$"):
        Own(VECTORS, DoesNotFit)(tmp_path / "run")
