"""Build optimizers and schedules: ours, with parameter groups from rules, or any other."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from minitx.config import ConfigError, OptimizerConfig, ParameterRule, Part, ScheduleConfig, evaluate_factor
from minitx.training.muon import Muon, matrix_names
from minitx.training.parts import call, factory
from minitx.training.schedules import lr_factor


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
        found = call(factory(node, "optimizer"), "optimizer", node, parameters)
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


def build_schedule(optimizer: torch.optim.Optimizer, node: ScheduleConfig | Part, max_steps: int) -> Any:
    """Build the schedule of ``optimizer``, which is stepped once per update: ours (``lr_factor``), or the ``_target_`` of a node.

    Raises:
        ConfigError: the target cannot be built.
    """
    if isinstance(node, ScheduleConfig):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(node, max_steps))
    return call(factory(node, "schedule"), "schedule", node, optimizer)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` supports ``found_inf``, which skips updates after a non-finite step without waiting for the host."""
    return bool(optimizer.defaults.get("fused"))
