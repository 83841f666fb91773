"""The run axis: R training runs of one arm trained at once, as a batch of models on one device.

Small runs leave a GPU idle: a step of one is a few hundred short kernels, and a grid makes it for one run after another.
Here the parameters of R runs are the rows of one matrix, ``torch.func`` maps the network over its rows, and a step of all
runs has about as many kernels as a step of one. Each run keeps its own seed (initial weights and batches), rates, schedule,
clipping and latch, so that run r is what ``minitx.training.run.train`` makes of the same config, up to rounding.

All stacks attend through ``math``. It is the one backend that serves every arm (torch's kernels have no soft-cap), so no
arm differs from another by its kernel; at the lengths of the recall tasks (17 to 40 keys) a fused kernel has nothing to
save; and cuDNN, whose backward can be NaN under very negative scores, is never met.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from minitx.ablation.stackable import check_configs
from minitx.config import ConfigError, RunConfig, TrainerConfig
from minitx.data.addressing import Address, Batch
from minitx.data.module import DataModule
from minitx.data.sources import ValSource
from minitx.training.devices import check_devices
from minitx.training.hardware import runs_on_cpu
from minitx.training.module import TrainingModule, network_inputs
from minitx.training.optimizers import parameter_groups
from minitx.training.outcome import summarise_rows
from minitx.training.run import build_module, fit_model_config, prepare_data, quiet_lightning

BACKEND = "math"
DTYPES = {"32-true": torch.float32, "64-true": torch.float64}


def train_stack(configs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """Train R runs at once; the results in their order, as ``outcome.summarise`` gives them, with ``probes: []``.

    The runs may differ in ``seed``, in ``optimizer`` but for its betas (rules, weight decay, eps and clipping included),
    in ``schedule`` and in how the same model is initialised. A run whose loss or gradient is not finite stops there and is
    NONFINITE; the others go on. Nothing is written: no folder, no checkpoint, no probes, no progress.

    Raises:
        ConfigError: configs that differ in more, ask for what no stack serves (``stackable.SERVED``), or whose
            batches differ in shape.
        ValueError: no config.
    """
    check_configs(configs)
    options = configs[0].trainer
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with quiet_lightning():
        check_devices(options)
    place = torch.device("cpu" if runs_on_cpu(options) else "cuda")
    data = {seed: prepare_data(config) for seed, config in {config.seed: config for config in configs}.items()}
    runs = [_build(config, data[config.seed]) for config in configs]
    with _default_dtype(DTYPES[options.precision]):
        stack = Stack(runs, configs, place)
        for step, batch in enumerate(_batches(configs, data, place)):
            stack.update(batch, step)
        some = data[configs[0].seed]
        task = some.task
        final = stack.validate(some.val_source(), options.val_batches)
    return stack.results(final, options, floors=task.floors, recall=task.recall, chance=task.chance)


class Stack:
    """R runs in training. ``weights`` (R, P) holds a run a row, P the trainable parameters of one network, in its order.

    Args:
        runs: what ``build_module`` made of the configs; the first one's network computes for all.
    """

    def __init__(self, runs: Sequence[TrainingModule], configs: Sequence[RunConfig], device: torch.device) -> None:
        dtype, optimizers = torch.get_default_dtype(), [config.optimizer for config in configs]
        rates, frozen = zip(*map(_rates, runs, configs), strict=True)
        if any(names != frozen[0] for names in frozen):
            raise ConfigError("optimizer.rules freeze other parameters in one run than in another, which cannot be stacked")
        parameters = [dict(run.network.named_parameters()) for run in runs]
        self.shapes = {name: p.shape for name, p in parameters[0].items() if name not in frozen[0]}
        rows = [torch.cat([named[name].detach().flatten() for name in self.shapes]) for named in parameters]
        self.weights = torch.stack(rows).to(device, dtype)  # (R, P)
        self.frozen = {name: torch.stack([p[name].detach() for p in parameters]).to(device, dtype) for name in frozen[0]}
        self.mean, self.square = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        sizes = torch.tensor([shape.numel() for shape in self.shapes.values()])
        self.rates = {key: _spread([of[key] for of in rates], sizes).to(device, dtype) for key in rates[0]}
        self.betas = optimizers[0].betas
        clips = [torch.inf if optimizer.clip is None else optimizer.clip for optimizer in optimizers]
        factors = [[run.lr_factor(step) for run in runs] for step in range(configs[0].trainer.max_steps)]
        self.clip = torch.tensor(clips, device=device)
        self.lr_factors = torch.tensor(factors, device=device).unsqueeze(-1)  # (steps, R, 1)
        self.num_parameters = sum(p.numel() for p in parameters[0].values())
        self.network, self.objective = runs[0].network.to(device, dtype), runs[0].objective
        self.bad_step = torch.full((len(runs),), -1, device=device)  # the first one, from 0; -1: none so far
        self.losses: list[Tensor] = []
        self.grad_norms: list[Tensor] = []

    def update(self, batch: Batch, step: int) -> None:
        """Update ``step`` (from 0) of every run that is still finite; ``batch`` has a run axis before its own."""
        weights = self.weights.requires_grad_()
        losses = vmap(self._loss)(weights, self.frozen, batch)  # (R,)
        (gradient,) = torch.autograd.grad(losses.sum(), weights)  # a run's loss depends on its own row alone
        with torch.no_grad():
            norms = gradient.norm(dim=1)
            finite = torch.isfinite(norms + losses)
            self.bad_step = torch.where(~finite & (self.bad_step < 0), step, self.bad_step)
            gradient = gradient * (self.clip / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1)
            rates = {**self.rates, "lr": self.rates["lr"] * self.lr_factors[step]}
            state = (weights, gradient, self.mean, self.square)
            updated, self.mean, self.square = adamw(*state, step=step + 1, betas=self.betas, **rates)
            self.weights = torch.where((self.bad_step < 0).unsqueeze(1), updated, weights)
        self.losses.append(losses.detach())
        self.grad_norms.append(norms)

    @torch.no_grad()
    def validate(self, source: ValSource, num_batches: int | None) -> tuple[list[float], list[float]]:
        """Loss (nats) and accuracy of every run on at most ``num_batches`` batches, the same for all."""
        totals: Tensor | float = 0.0
        for step in range(min(num_batches or len(source), len(source))):
            batch = {name: part.to(self.weights.device) for name, part in source[Address(step, split="val")].items()}
            totals = totals + torch.stack(vmap(self._scores, in_dims=(0, 0, None))(self.weights, self.frozen, batch))
        nll, correct, count = torch.as_tensor(totals)  # (R,) each
        return (nll / count.clamp(min=1)).tolist(), (correct / count.clamp(min=1)).float().tolist()  # as Lightning keeps it

    def results(
        self, final: tuple[Sequence[float], Sequence[float]], options: TrainerConfig, **facts: Any
    ) -> list[dict[str, Any]]:
        """What ``summarise`` says of each run, from the rows that its ``metrics.csv`` would have."""
        steps = range(1, options.max_steps + 1)
        columns = torch.stack(self.losses, 1).tolist(), torch.stack(self.grad_norms, 1).tolist()
        results = []
        for losses, norms, val_loss, accuracy, bad in zip(*columns, *final, self.bad_step.tolist(), strict=True):
            made = [row for row in zip(steps, losses, norms, strict=True) if bad < 0 or row[0] <= bad]
            logged = [row for row in made if row[0] % options.log_every == 0 or row[0] in (1, options.max_steps)]
            rows = [{"step": s, "train_loss": x, "grad_norm": norm, "val_loss": None} for s, x, norm in logged]
            if bad < 0:
                rows[-1] |= {"val_loss": val_loss, "val_accuracy": accuracy}
            stopped = None if bad < 0 else bad + 1
            results.append(summarise_rows(rows, nonfinite_step=stopped, num_parameters=self.num_parameters, **facts))
        return results

    def _loss(self, row: Tensor, frozen: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return self.objective(self._logits(row, frozen, batch), batch["labels"]).loss / batch["num_targets"]

    def _scores(self, row: Tensor, frozen: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        sums = self.objective(self._logits(row, frozen, batch), batch["labels"])
        return sums.nll.double(), sums.correct.double(), sums.count.double()

    def _logits(self, row: Tensor, frozen: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The logits of one run, whose parameters are ``row`` (P,)."""
        parts = row.split([shape.numel() for shape in self.shapes.values()])
        own = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        logits: Tensor = functional_call(self.network, {**own, **frozen}, kwargs=network_inputs(batch))
        return logits


def adamw(
    weights: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    *,
    step: int,
    lr: Tensor,
    weight_decay: Tensor,
    eps: Tensor,
    betas: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor]:
    """One update of AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, Alg. 2), with rates that may differ by element.

    m ← β1 m + (1 − β1) g        v ← β2 v + (1 − β2) g²        with t the step, from 1:
    θ ← (1 − lr λ) θ − lr / (1 − β1ᵗ) · m / (√v / √(1 − β2ᵗ) + eps)

    Args:
        weights, gradient, mean, square: θ, g, m, v, all (R, P).
        lr, weight_decay, eps: lr, λ and eps, (R, 1) or (R, P).

    Returns:
        The new θ, m and v; the arguments are left as they are.

    >>> zero, one = torch.zeros(2, 1), torch.ones(2, 1)
    >>> rates = {"lr": torch.tensor([[0.1], [0.2]]), "weight_decay": 0 * one, "eps": 0 * one, "betas": (0.9, 0.95)}
    >>> adamw(one, 3 * one, zero, zero, step=1, **rates)[0].flatten().tolist()  # the first step is lr long
    [0.8999999761581421, 0.800000011920929]
    """
    beta1, beta2 = betas
    mean = torch.lerp(mean, gradient, 1.0 - beta1)
    square = (square * beta2).addcmul(gradient, gradient, value=1.0 - beta2)
    denominator = square.sqrt() / (1.0 - beta2**step) ** 0.5 + eps
    return weights * (1.0 - lr * weight_decay) - lr / (1.0 - beta1**step) * mean / denominator, mean, square


def _build(config: RunConfig, data: DataModule) -> TrainingModule:
    model = dataclasses.replace(config.model, backend=BACKEND)
    return build_module(config, fit_model_config(model, data), data)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What Lightning does under ``64-true``: tables and slopes that are made in a forward pass have the run's dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _batches(configs: Sequence[RunConfig], data: Mapping[int, DataModule], device: torch.device) -> Iterator[Batch]:
    """The batch of every run in each step, (R, B, ...); runs of one seed share theirs, so that it is drawn once."""
    sources = [module.train_source() for module in data.values()]
    order = list(data)
    owner = torch.tensor([order.index(config.seed) for config in configs], device=device)
    for step in range(configs[0].trainer.max_steps):
        drawn = [source[Address(step)] for source in sources]
        shapes = [{name: tuple(part.shape) for name, part in batch.items()} for batch in drawn]
        other = next((shape for shape in shapes if shape != shapes[0]), None)
        if other is not None:
            raise ConfigError(f"data={configs[0].data.name}: batches of two seeds differ in shape, {shapes[0]} and {other}")
        yield {name: torch.stack([batch[name] for batch in drawn]).to(device)[owner] for name in shapes[0]}


def _rates(run: TrainingModule, config: RunConfig) -> tuple[dict[str, list[float]], list[str]]:
    """lr, weight_decay and eps of each trainable parameter in the network's order, and the names of the frozen ones."""
    groups: list[Any] = parameter_groups(run.network, config.optimizer, head_dim=config.model.width_per_head)
    group_of = {id(p): group for group in groups for p in group["params"]}
    named = dict(run.network.named_parameters())
    mine = [group_of[id(p)] for p in named.values() if id(p) in group_of]
    rates = {key: [float(group[key]) for group in mine] for key in ("lr", "weight_decay", "eps")}
    return rates, [name for name, p in named.items() if id(p) not in group_of]


def _spread(rates: Sequence[Sequence[float]], sizes: Tensor) -> Tensor:
    """Rates a parameter tensor, R × n, as rates an element, (R, P); (R, 1) where every run has one rate for all."""
    table = torch.tensor(rates)
    same = bool((table == table[:, :1]).all())
    return table[:, :1] if same else table.repeat_interleave(sizes, dim=1)
