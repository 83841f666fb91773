"""The training step: whole-step losses, clipping, accumulation, seeds, and what happens when numbers stop being finite."""

import functools
import itertools
import math
import random

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from extra import last, losses_of, train_with
from torch import nn

from minitx.config import ConfigError, RunConfig, TrainerConfig, node
from minitx.data.batches import Address, ValSource
from minitx.data.splits import as_split
from minitx.data.task import Task
from minitx.training.metrics_csv import read_metrics
from minitx.training.module import TrainingModule, hash_seed
from minitx.training.nonfinite import Latch, NonFiniteError
from minitx.training.objectives import CrossEntropy
from minitx.training.run import train
from minitx.training.schedules import constant
from minitx.training.trainer import quiet_lightning


class Table(nn.Module):
    """Logits of token t are row t of a table: gradients can be worked out by hand."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 7, dtype=torch.float64))
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids):
        return self.dropout(self.table[input_ids])


def batches(rows, accumulate):
    """Micro-batches of steps of 12 rows, whose label counts differ widely, with the step's own total."""
    for ids, labels in zip(*(part.split(12) for part in rows), strict=True):
        for part, counted in zip(ids.split(12 // accumulate), labels.split(12 // accumulate), strict=True):
            yield {"input_ids": part, "labels": counted, "num_targets": (labels != -100).sum()}


def uneven_rows(steps=3, length=5):
    ids = torch.randint(7, (12 * steps, length))
    labels = torch.randint(7, (12 * steps, length))
    labels[torch.rand(labels.shape) < torch.linspace(0, 0.95, 12).repeat(steps)[:, None]] = -100
    return ids, labels


class Recorder(L.Callback):
    def __init__(self):
        self.losses, self.gradients, self.norms = [], [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):  # before the module's own hook: not clipped yet
        self.losses.append(float(module.step_loss))
        self.gradients.append(module.network.table.grad.clone())

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.norms.append(float(module.grad_norm))


def fit(rows, accumulate, *, network=None, clip=None):
    torch.manual_seed(5)
    module = TrainingModule(
        network or Table(),
        CrossEntropy(),
        lambda network: torch.optim.SGD(network.parameters(), lr=0.3),
        lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        TrainerConfig(clip=clip),
    )
    seen = Recorder()
    loader = torch.utils.data.DataLoader(list(batches(rows, accumulate)), batch_size=None)
    with quiet_lightning():
        trainer = L.Trainer(
            accelerator="cpu", max_steps=len(rows[0]) // 12, accumulate_grad_batches=accumulate, callbacks=[seen],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(module, loader, loader)
    return module, seen


def test_the_row_that_fills_up_a_process_without_rows_does_not_count_also_where_an_objective_knows_no_ignored_label():
    rows = [{"input": torch.full((1,), float(i)), "labels": i} for i in range(3)]
    task = Task(name="ages", train=rows, val=rows)
    totals = []
    for ranks in (1, 2):
        source = ValSource(as_split(task, "val"), batch_size=2, world=ranks)
        module = TrainingModule(nn.Identity(), lambda x, batch: (x[:, 0] + 1 - batch["labels"]).square().sum(), None, None)
        for step, rank in itertools.product(range(len(source)), range(ranks)):
            module.validation_step(source[Address(step, rank=rank)], step)
        totals.append({name: float(value) for name, value in module._validation.items()})
    assert totals == [{"loss": 3.0, "count": 3.0}] * 2


def test_every_split_of_a_step_gives_the_loss_over_its_tokens_and_its_gradient():
    ids, labels = rows = uneven_rows()
    whole, seen = fit(rows, 1)
    torch.manual_seed(5)
    first = nn.functional.cross_entropy(Table().table.detach()[ids[:12]].mT, labels[:12])
    assert seen.losses[0] == pytest.approx(float(first), rel=1e-12)
    for accumulate in (3, 4, 12):
        split, other = fit(rows, accumulate)
        assert other.losses == pytest.approx(seen.losses, rel=1e-12)
        torch.testing.assert_close(other.gradients, seen.gradients, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(split.network.table, whole.network.table, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_clipping_is_by_the_norm_of_the_whole_accumulated_gradient(clip):
    rows = uneven_rows(steps=1)
    (plain, before), (clipped, seen) = fit(rows, 4), fit(rows, 4, clip=clip)
    (gradient,) = before.gradients
    assert seen.norms == [pytest.approx(float(gradient.norm()))]  # the norm that is reported is the one before clipping
    factor = min(1.0, clip / (float(gradient.norm()) + 1e-6))  # as torch's clip_grad_norm_
    start = plain.network.table.detach() + 0.3 * gradient
    torch.testing.assert_close(clipped.network.table.detach(), start - 0.3 * factor * gradient, rtol=1e-12, atol=1e-15)


def test_clipping_goes_together_with_bf16_and_a_fused_optimizer(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr("minitx.training.trainer.cpu_precision", lambda precision: precision)  # as on a CPU with AMX
    train(make_config(trainer__precision="bf16-mixed", trainer__clip=0.01, trainer__max_steps=3), tmp_path)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert all(row["grad_norm"] > 0.01 and math.isfinite(row["train_loss"]) for row in rows)


def test_the_latch_skips_every_update_from_the_first_bad_one_on_and_remembers_it():
    parameter = nn.Parameter(torch.ones(3))
    optimizer, latch = torch.optim.AdamW([parameter], lr=0.1, fused=True), Latch()
    seen = []
    for step, value in enumerate([1.0, 2.0, float("nan"), 3.0, float("inf")]):
        parameter.grad = torch.ones(3)
        latch.check(optimizer, torch.tensor(value), step)
        optimizer.step()
        seen.append(parameter.detach().clone())
    assert [torch.equal(weights, seen[1]) for weights in seen] == [False, True, True, True, True]
    assert latch.first_bad_step() == 2
    assert int(optimizer.state[parameter]["step"]) == 2


def test_no_checkpoint_is_written_of_steps_that_made_no_update(make_config, tmp_path):
    """On an accelerator the latch is read at rows only: here it is set after the fourth update, as if it had not been read then."""

    class Late(L.Callback):
        def on_train_batch_end(self, trainer, module, *arguments):
            if trainer.global_step == 4:
                module.latch.check(trainer.optimizers[0], torch.tensor(torch.nan), 3)

    with pytest.raises(NonFiniteError, match="in step 4"):
        train_with(make_config(trainer__ckpt_every=1, trainer__log_every=10), tmp_path, Late())
    assert last(tmp_path)["global_step"] == 3


def test_every_step_micro_batch_and_rank_draws_from_a_stream_of_its_own():
    network, masks = Table(dropout=0.5), []
    network.dropout.register_forward_hook(
        lambda part, _, out: masks.append((out == 0).numpy().tobytes()) if part.training else None
    )
    fit(uneven_rows(), 2, network=network)
    assert len(masks) == len(set(masks)) == 6
    seeds = {hash_seed(*place) for place in itertools.product(range(5), range(7), range(4), range(4))}
    assert len(seeds) == 5 * 7 * 4 * 4 and all(0 <= seed < 2**63 for seed in seeds)


class Noisy(Table):
    def __init__(self):
        super().__init__()
        self.start = random.random()

    def forward(self, input_ids):  # some models of transformers draw with NumPy
        return super().forward(input_ids) * (self.start + np.random.random() + random.random())


def noisy_rows():
    rows = [{"input_ids": [i], "labels": [np.random.randint(7)]} for i in range(7)]
    return Task(name="noise", train=rows, val=rows)


def test_draws_of_python_and_numpy_depend_on_the_seed_alone_also_resumed(tmp_path):
    options = {"model": node(Noisy), "data": node(noisy_rows, batch_size=7), "schedule": node(constant)}
    for name, steps, path in (("a", 4, None), ("b", 2, None), ("b", 4, "last")):
        trainer = TrainerConfig(max_steps=steps, accelerator="cpu", log_every=1)
        train(RunConfig(trainer=trainer, **options, ckpt_path=path), tmp_path / name)
    assert losses_of(tmp_path / "a") == losses_of(tmp_path / "b")


def test_two_runs_of_one_seed_are_equal_also_with_workers_and_of_two_seeds_are_not(make_config, tmp_path):
    for seed, name, num_workers in ((0, "a", 0), (0, "b", 2), (1, "c", 0)):
        options = {"model__dropout": 0.1, "trainer__max_steps": 3, "data__num_workers": num_workers}
        train(make_config(seed=seed, **options), tmp_path / name)
    assert losses_of(tmp_path / "a") == losses_of(tmp_path / "b") != losses_of(tmp_path / "c")


def test_an_objective_from_python_meets_the_same_checks(make_config, tmp_path):
    capped = make_config(model__logit_softcap=3.0)
    with pytest.raises(ConfigError, match=r"objective\.chunk_tokens=5 .* model\.logit_softcap=3"):
        train(capped, tmp_path / "capped", objective=CrossEntropy(chunk_tokens=5))


@pytest.mark.slow
def test_a_compiled_run_learns_as_a_plain_one(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # which needs no C++
    for name in ("plain", "compiled"):
        train(make_config(trainer__max_steps=3, trainer__compile=name == "compiled"), tmp_path / name)
    assert losses_of(tmp_path / "compiled") == pytest.approx(losses_of(tmp_path / "plain"), rel=1e-5)
    torch.compiler.reset()
