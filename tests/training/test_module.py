"""The training step: whole-step losses, clipping, accumulation, seeds, and what happens when numbers stop being finite."""

from __future__ import annotations

import math

import lightning.pytorch as L
import pytest
import torch
from extra import losses_of
from torch import nn

from minitx.config import ConfigError, ObjectiveConfig, TransformerConfig
from minitx.nn.models import build_model
from minitx.training.metrics import read_metrics
from minitx.training.module import Latch, TrainingModule, hash_seed
from minitx.training.objectives import build_objective, check_head
from minitx.training.probes import read_probes
from minitx.training.run import quiet_lightning, train


class Table(nn.Module):
    """Logits of token t are row t of a table: gradients can be worked out by hand."""

    def __init__(self, vocab_size: int = 7, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocab_size, vocab_size, dtype=torch.float64))
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids):
        return self.dropout(self.table[input_ids])


class Batches(torch.utils.data.Dataset):
    """Micro-batches whose label counts differ widely, with the step's own total."""

    def __init__(self, rows, accumulate):
        ids, labels = rows
        self.batches = []
        step_rows = 12
        for start in range(0, len(ids), step_rows):
            total = (labels[start : start + step_rows] != -100).sum()
            size = step_rows // accumulate
            for first in range(start, start + step_rows, size):
                part = slice(first, first + size)
                self.batches.append({"input_ids": ids[part], "labels": labels[part], "num_targets": total})

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


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


def fit(rows, accumulate, *, network=None, clip=None, make_optimizer=None, objective=None, seed=0, **options):
    torch.manual_seed(5)
    network = network or Table()
    module = TrainingModule(
        network,
        objective or build_objective(ObjectiveConfig()),
        make_optimizer or (lambda net: torch.optim.SGD(net.parameters(), lr=0.3)),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        clip=clip,
        seed=seed,
        **options,
    )
    seen = Recorder()
    loader = torch.utils.data.DataLoader(Batches(rows, accumulate), batch_size=None)
    with quiet_lightning():
        trainer = L.Trainer(
            accelerator="cpu", max_steps=len(rows[0]) // 12, accumulate_grad_batches=accumulate, callbacks=[seen],
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        trainer.fit(module, loader, loader)
    return module, seen


def test_every_split_of_a_step_gives_the_same_loss_and_gradient():
    rows = uneven_rows()
    whole, seen = fit(rows, 1)
    for accumulate in (3, 4, 12):
        split, other = fit(rows, accumulate)
        assert other.losses == pytest.approx(seen.losses, rel=1e-12)
        for a, b in zip(seen.gradients, other.gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(split.network.table, whole.network.table, rtol=1e-12, atol=1e-14)


def test_the_loss_of_a_step_is_the_mean_over_its_tokens_and_not_a_mean_of_means():
    ids, labels = rows = uneven_rows(steps=1)
    torch.manual_seed(5)
    logits = Table().table.detach()[ids]
    nll = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
    nll = nll.view(labels.shape)
    count = (labels != -100).sum()
    parts = [nll[i : i + 3].sum() / (labels[i : i + 3] != -100).sum() for i in range(0, 12, 3)]
    naive = float(sum(parts) / 4)
    loss = fit(rows, 4)[1].losses[0]
    assert loss == pytest.approx(float(nll.sum() / count), rel=1e-12)
    assert abs(loss - naive) > 1e-3


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_clipping_equals_torchs_on_the_whole_accumulated_gradient(clip):
    rows = uneven_rows(steps=1)
    _, plain = fit(rows, 4)
    parameter = nn.Parameter(torch.zeros(7, 7, dtype=torch.float64))
    parameter.grad = plain.gradients[0].clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], clip)
    torch.manual_seed(5)
    start = Table().table.detach().clone()
    module, seen = fit(rows, 4, clip=clip)
    assert seen.norms == [pytest.approx(float(norm))]  # the norm that is reported is the one before clipping
    assert 0.05 < float(norm) < 1e6
    torch.testing.assert_close(module.network.table.detach(), start - 0.3 * parameter.grad, rtol=1e-12, atol=1e-15)


def test_clipping_goes_together_with_bf16_and_a_fused_optimizer(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr("minitx.training.devices.cpu_precision", lambda precision: precision)  # as on a CPU with AMX
    rows = {}
    for clip in (0.01, None):
        config = make_config(trainer__precision="bf16-mixed", trainer__clip=clip, optimizer__lr=0.01, trainer__max_steps=3)
        train(config, tmp_path / str(clip))
        rows[clip] = read_metrics(tmp_path / str(clip) / "metrics.csv")
    assert rows[0.01][0]["train_loss"] == rows[None][0]["train_loss"]
    assert rows[0.01][0]["grad_norm"] == rows[None][0]["grad_norm"] > 0.01
    assert all(math.isfinite(row["train_loss"]) for row in rows[0.01])


def test_the_latch_skips_every_update_from_the_first_bad_one_on_and_remembers_it():
    parameter = nn.Parameter(torch.ones(3))
    optimizer, latch = torch.optim.AdamW([parameter], lr=0.1, fused=True), Latch()
    seen = []
    for step, value in enumerate([1.0, 2.0, float("nan"), 3.0, float("inf")]):
        parameter.grad = torch.ones(3)
        latch.check(optimizer, torch.tensor(value), step)
        optimizer.step()
        seen.append(parameter.detach().clone())
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[1])
    assert torch.equal(seen[4], seen[1])
    assert latch.first_bad_step() == 2
    assert int(optimizer.state[parameter]["step"]) == 2


def test_on_accelerators_the_loss_is_read_at_log_points_only(make_config, tmp_path, monkeypatch):
    """Simulated: the module believes that it is not on a CPU, so only the log point may read the latch."""
    reads = []
    real = TrainingModule.raise_if_nonfinite
    monkeypatch.setattr(TrainingModule, "raise_if_nonfinite", lambda self: (reads.append(self.global_step), real(self))[1])
    monkeypatch.setattr(TrainingModule, "device", property(lambda self: torch.device("meta")))
    config = make_config(trainer__log_every=3, trainer__max_steps=6)
    train(config, tmp_path)
    assert reads == [1, 3, 6]


def test_draws_in_a_step_depend_on_seed_and_step_alone():
    rows = uneven_rows()
    runs = []
    for noise in (0, 3):
        torch.manual_seed(5)
        network = Table(dropout=0.5)
        torch.rand(noise)  # what was drawn before does not matter
        runs.append(fit(rows, 1, network=network)[1].losses)
    torch.manual_seed(5)
    other = fit(rows, 1, network=Table(dropout=0.5), seed=1)[1].losses
    assert runs[0] == runs[1]
    assert runs[0][0] != other[0]


def test_every_step_micro_batch_and_rank_draws_from_a_stream_of_its_own():
    masks = []

    class Watched(Table):
        def forward(self, input_ids):
            out = super().forward(input_ids)
            if self.training:
                masks.append(tuple((out == 0).flatten().tolist()))
            return out

    fit(uneven_rows(), 2, network=Watched(dropout=0.5))
    assert len(masks) == len(set(masks)) == 6
    seeds = {hash_seed(s, step, micro, rank) for s in range(5) for step in range(7) for micro in range(4) for rank in range(4)}
    assert len(seeds) == 5 * 7 * 4 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_probing_and_validating_leave_the_trajectory_bit_equal(make_config, tmp_path, weights_of):
    changes = {"model__dropout": 0.1, "trainer__ckpt_every": 6}
    off = train(make_config(**changes), tmp_path / "off")
    on = train(make_config(**changes, trainer__val_every=2, probe__every=1), tmp_path / "on")
    assert losses_of(tmp_path / "on") == losses_of(tmp_path / "off")
    assert on["val_loss"] == off["val_loss"]
    for name, weight in weights_of(tmp_path / "off").items():
        assert torch.equal(weight, weights_of(tmp_path / "on")[name]), name
    assert [probe["step"] for probe in read_probes(tmp_path / "on" / "probes.jsonl")] == [0, 1, 2, 3, 4, 5, 6]
    assert read_probes(tmp_path / "off" / "probes.jsonl") == []


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(make_config, tmp_path):
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        train(make_config(seed=seed, model__dropout=0.1, trainer__max_steps=3), tmp_path / name)
    assert losses_of(tmp_path / "a") == losses_of(tmp_path / "b") != losses_of(tmp_path / "c")


def test_the_validation_loss_is_the_mean_over_every_validation_token(make_config, tmp_path):
    """The last batch is shorter: a mean of batch means would differ."""
    losses = {}
    for size in (5, 7, 1000):
        config = make_config(trainer__max_steps=1, trainer__val_batches=None, trainer__val_batch_size=size)
        losses[size] = train(config, tmp_path / str(size))["val_loss"]
    assert losses[5] == pytest.approx(losses[7], rel=1e-6)
    assert losses[5] == pytest.approx(losses[1000], rel=1e-6)


def test_a_run_with_a_chunked_loss_is_the_plain_run(make_config, tmp_path):
    curves = {}
    for chunk_tokens in (None, 5):
        config = make_config(
            trainer__precision="64-true", objective__chunk_tokens=chunk_tokens, trainer__accumulate=2, trainer__max_steps=3,
            model__num_experts=2, model__tie_embeddings=False,
        )  # fmt: skip
        result = train(config, tmp_path / str(chunk_tokens))
        rows = read_metrics(tmp_path / str(chunk_tokens) / "metrics.csv")
        curves[chunk_tokens] = [*(row[name] for row in rows for name in ("train_loss", "grad_norm")), result["val_loss"]]
    assert curves[5] == pytest.approx(curves[None], rel=1e-10)


HEADS = [
    {"architecture": "encoder", "head_transform": True},
    {"architecture": "encoder", "head": "token"},
    {"logit_softcap": 30.0},
]


@pytest.mark.parametrize("changes", HEADS)
def test_a_chunked_loss_is_refused_where_the_head_is_more_than_one_linear_map(changes):
    config = TransformerConfig(vocab_size=11, embed_dim=8, num_heads=2, num_layers=1, num_labels=3, **changes)
    network = build_model(config)
    check_head(ObjectiveConfig(), network, config.head)
    with pytest.raises(ConfigError, match=f"objective.chunk_tokens=5 needs model.head=lm .* got model.head={config.head}"):
        check_head(ObjectiveConfig(chunk_tokens=5), network, config.head)


class Routed(Table):
    """A table whose router loss is the sum of its first row."""

    head = nn.Identity()

    def forward(self, input_ids, return_extras=False):
        logits = super().forward(input_ids)
        return (logits, {"router_loss": self.table[0].sum()}) if return_extras else logits


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_router_loss_is_added_once_a_step_with_its_weight(accumulate):
    rows, gradients = uneven_rows(steps=1), {}
    for weight in (0.0, 0.25):
        torch.manual_seed(7)
        _, seen = fit(rows, accumulate, network=Routed(), router_loss=weight)
        gradients[weight] = seen.gradients[0]
    added = gradients[0.25] - gradients[0.0]
    torch.testing.assert_close(added[0], torch.full_like(added[0], 0.25), rtol=0, atol=1e-12)
    assert not added[1:].any()
