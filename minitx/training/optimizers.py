"""Build optimizers and schedules: ours, with parameter groups from rules, or any other"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from minitx.config import ConfigError, OptimizerConfig, ParameterRule, Part, ScheduleConfig, evaluate_factor
from minitx.training.nodes import call, factory


def parameter_groups(network: nn.Module, config: OptimizerConfig, *, head_dim: int) -> list[dict[str, object]]:
    """Return groups of parameters with the same lr, weight decay and eps, and for ``name=muon`` the same update rule (``matrix``).

    Weight decay is not applied to vectors (biases, norms, gains). Matrices for Muon use ``matrix_lr``, all other parameters use
    ``lr``. The first of ``config.rules`` whose ``match`` is found in a parameter's name applies to it. ``trainable: false``
    freezes it (``requires_grad`` becomes False).

    Args:
        head_dim: d_k, for factors such as ``head_dim^p``.

    Raises:
        ConfigError: a rule matches no parameter, a factor is negative, or no parameter is trainable.
    """
    groups: dict[tuple[float, float, float, bool], list[nn.Parameter]] = defaultdict(list)
    matrices = matrix_names(network) if config.name == "muon" else set()
    unused = set(range(len(config.rules)))
    for name, parameter in network.named_parameters():
        index = next((i for i, rule in enumerate(config.rules) if re.search(rule.match, name)), None)
        rule = ParameterRule(match="") if index is None else config.rules[index]
        unused.discard(-1 if index is None else index)
        if not rule.trainable:
            parameter.requires_grad_(False)
            continue
        lr, decay, eps = (_factor(rule, key, f"optimizer.rules[{index}]", head_dim) for key in ("lr", "weight_decay", "eps"))
        decay = decay if parameter.dim() > 1 else 0.0
        rate = (config.matrix_lr if name in matrices else config.lr) * lr
        groups[rate, config.weight_decay * decay, config.eps * eps, name in matrices].append(parameter)
    if unused:
        raise ConfigError(f"optimizer.rules[{min(unused)}].match={config.rules[min(unused)].match} matches no parameter name")
    if not groups:
        raise ConfigError("optimizer.rules freeze every parameter: nothing is left to train")
    return [
        {"params": params, "lr": lr, "weight_decay": decay, "eps": eps, **({"matrix": True} if matrix else {})}
        for (lr, decay, eps, matrix), params in groups.items()
    ]


def _factor(rule: ParameterRule, key: str, path: str, head_dim: int) -> float:
    try:
        factor = evaluate_factor(getattr(rule, key), head_dim=head_dim)
    except OverflowError:
        factor = math.inf
    if not 0.0 <= factor < math.inf:
        raise ConfigError(f"{path}.{key}={getattr(rule, key)} must be a finite factor of zero or more")
    return factor


def build_optimizer(network: nn.Module, node: OptimizerConfig | Part, head_dim: int = 1) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters: fused AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) or SGD with
    ``parameter_groups``, ``Muon``, or the ``_target_`` of a node.

    Raises:
        ConfigError: the target cannot be built, or does not return a ``torch.optim.Optimizer``.
    """
    if not isinstance(node, OptimizerConfig):
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        found = call(factory(node, "optimizer", positional=1), "optimizer", node, parameters)
        if not isinstance(found, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer._target_={node['_target_']} must give a torch.optim.Optimizer, got {type(found).__name__}"
            )
        return found
    groups = parameter_groups(network, node, head_dim=head_dim)
    if node.name == "sgd":
        groups = [{name: value for name, value in group.items() if name != "eps"} for group in groups]
        is_cut = any(
            isinstance(parameter, DTensor) for parameter in network.parameters()
        )  # the fused kernel takes none of these
        return torch.optim.SGD(groups, momentum=node.momentum, fused=not is_cut)
    if node.name == "muon":
        return Muon(groups, betas=node.betas, momentum=node.momentum, steps=node.ns_steps)
    return torch.optim.AdamW(groups, betas=node.betas, eps=node.eps, fused=True)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` supports ``found_inf``, which skips updates after a non-finite step without waiting for the host."""
    return bool(optimizer.defaults.get("fused"))


# --- schedules


def build_schedule(optimizer: torch.optim.Optimizer, node: ScheduleConfig | Part, max_steps: int) -> Any:
    """Build the schedule of ``optimizer``, which is stepped once per update: ours (``lr_factor``), or the ``_target_`` of a node.

    Raises:
        ConfigError: the target cannot be built.
    """
    if isinstance(node, ScheduleConfig):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(node, max_steps))
    return call(factory(node, "schedule", positional=1), "schedule", node, optimizer)


def lr_factor(config: ScheduleConfig, max_steps: int) -> Callable[[int], float]:
    """Return a function from ``step`` = 0, 1, …, max_steps - 1 to the factor on the learning rate.

    After a linear warm-up (step + 1) / warmup_steps, t runs from 0 to 1:

    * ``constant``: 1
    * ``linear``: 1 - (1 - f) t; ``cosine``: f + (1 - f) (1 + cos πt) / 2 (Loshchilov & Hutter 2017, arXiv:1608.03983)
    * ``trapezoid``: 1, then linearly to f over the last ``decay_fraction`` of the run (WSD; Hu et al. 2024, arXiv:2404.06395)

    with f = ``final_lr``.

    >>> factor = lr_factor(ScheduleConfig(name="linear", warmup_steps=2, final_lr=0.0), max_steps=6)
    >>> [factor(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup, final = config.warmup_steps, config.final_lr
    decay_start = {"trapezoid": max(warmup, max_steps - round(config.decay_fraction * max_steps))}.get(config.name, warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        t = min(1.0, max(0.0, (step - decay_start) / max(1, max_steps - decay_start)))
        if config.name == "constant":
            return 1.0
        if config.name == "cosine":
            return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * t))
        return 1.0 - (1.0 - final) * t

    return factor


# --- Muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def matrix_names(network: nn.Module) -> set[str]:
    """Return the parameters for Muon: weights of linear maps between hidden states. AdamW updates embeddings, heads and vectors."""
    names = set()
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("head"):
            names.add(f"{name}.weight")
    return names


def orthogonalise(matrices: Sequence[Tensor], steps: int = 5) -> list[Tensor]:
    """Return approximately U Vᵀ for each matrix U S Vᵀ, or for each matrix of a stack (N, rows, cols), by Newton–Schulz iteration.

    X ← aX + b(XXᵀ)X + c(XXᵀ)²X, ``steps`` times. The singular values are then between about 0.7 and 1.2, which trains as well
    as 1 (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"). Matrices of the same shape, or of its
    transpose, are stacked, which saves time for small matrices. The computation is in bfloat16 on a GPU, and in the matrices'
    dtype elsewhere.

    >>> matrices = torch.randn(2, 30, 7, generator=torch.Generator().manual_seed(0))
    >>> values = torch.linalg.svdvals(orthogonalise([matrices])[0])
    >>> bool((values > 0.5).all() and (values < 1.3).all())
    True
    """
    wide = [m.mT if m.shape[-2] > m.shape[-1] else m for m in matrices]
    by_shape: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, matrix in enumerate(wide):
        by_shape[tuple(matrix.shape[-2:])].append(i)
    done = list(matrices)
    for shape, members in by_shape.items():
        stacks = [wide[i].reshape(-1, *shape) for i in members]
        parts = _newton_schulz(torch.cat(stacks), steps).split([len(stack) for stack in stacks])
        for i, part in zip(members, parts, strict=True):
            result = part.reshape(wide[i].shape)
            done[i] = result if wide[i] is matrices[i] else result.mT
    return done


def _newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """``orthogonalise`` of a stack (N, rows, cols) with rows ≤ cols."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16() if matrices.device.type == "cuda" else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices, and fused AdamW for the rest.

    For a matrix W of r rows and c columns with gradient g: M ← μM + (1 − μ)g; W ← W − lr · (decay · W + √max(1, r/c) ·
    orthogonalise((1 − μ)g + μM)). This is ``torch.optim.Muon`` with its default adjustment, but equal shapes are stacked into
    one product. AdamW is part of the same optimizer, so that both have one schedule, one checkpoint and one latch.

    Args:
        groups: parameter groups with ``lr``, ``weight_decay`` and ``eps``. Groups with ``matrix=True`` contain matrices, or
            stacks of them (N, r, c).
        betas: the betas of AdamW. momentum: μ. steps: Newton–Schulz iterations.

    As in torch's fused optimizers, no step is made if the tensor ``found_inf`` is 1.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], momentum: float = 0.95, steps: int = 5
    ) -> None:
        defaults = {"betas": betas, "momentum": momentum, "steps": steps, "matrix": False, "fused": True}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                (self._matrices if group["matrix"] else self._elementwise)(group, params, [p.grad for p in params])
        return loss

    def _elementwise(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                averages = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device), **averages}
        mean, square, step = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq", "step"))
        options: dict[str, Any] = {name: group[name] for name in ("lr", "weight_decay", "eps")}
        options |= {"amsgrad": False, "maximize": False, "fused": True, "found_inf": self.found_inf}
        beta1, beta2 = group["betas"]
        adamw(params, grads, mean, square, [], step, beta1=beta1, beta2=beta2, **options)

    def _matrices(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        go = 1.0
        if self.found_inf is not None:
            grads = [torch.where(self.found_inf.bool(), 0.0, grad) for grad in grads]
            go = 1.0 - self.found_inf  # type: ignore[assignment]
        for p in params:
            self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        buffers, momentum = [self.state[p]["momentum_buffer"] for p in params], group["momentum"]
        torch._foreach_lerp_(buffers, grads, 1.0 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum)
        for p, update in zip(params, orthogonalise(updates, group["steps"]), strict=True):
            p.mul_(1.0 - group["lr"] * group["weight_decay"] * go)
            p.sub_(update * (group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5 * go))
