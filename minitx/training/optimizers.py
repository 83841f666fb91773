"""Optimizers. The arguments of each function are its keys in a config. Yours can be used as well.

The state of an optimizer is loaded in ``keep_dtypes``; ``sharding`` converts a sharded optimizer's state.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config import ConfigError, ParameterRule, Part, evaluate_factor
from minitx.config.schema import Count, NotNegative, Positive, Share, require
from minitx.training.muon import Muon, matrix_names
from minitx.training.processes import is_sharded, part_of

Rules = tuple[ParameterRule, ...]


def adamw(
    network: nn.Module,
    *,
    lr: Positive = 1e-3,
    weight_decay: NotNegative = 0.0,
    betas: tuple[Share, Share] = (0.9, 0.95),
    eps: Positive = 1e-8,
    rules: Rules = (),
    head_dim: int = 1,
) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) for every parameter. Weight decay is not applied to biases, norms and other vectors.

    Args:
        lr: the peak learning rate.
        weight_decay: not applied to biases, norms and other vectors (see ``role_of``).
        betas: decay rates of the two moments.
        eps: added to the square root of the second moment.
        rules: [{match: q_proj, lr: head_dim^-0.25, trainable: true}]: factors by name.
        head_dim: d_k of the model, for ``head_dim^p`` in rules. The run passes it.
    """
    groups = parameter_groups(network, lr=lr, weight_decay=weight_decay, eps=eps, rules=rules, head_dim=head_dim)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def sgd(
    network: nn.Module,
    *,
    lr: Positive = 1e-3,
    momentum: Share = 0.9,
    weight_decay: NotNegative = 0.0,
    rules: Rules = (),
    head_dim: int = 1,
) -> torch.optim.SGD:
    """Fused stochastic gradient descent with momentum for every parameter. Weight decay is not applied to biases, norms and other vectors.

    Args:
        lr: see ``adamw``.
        momentum: share of the previous updates to add.
        weight_decay, rules, head_dim: see ``adamw``. The factor ``eps`` of a rule has no effect.
    """
    groups = parameter_groups(network, lr=lr, weight_decay=weight_decay, rules=rules, head_dim=head_dim)
    # the fused kernel does not support shards, and is wrong in half precision on a CPU (torch 2.13)
    is_plain = any(is_sharded(p) or (p.device.type == "cpu" and p.dtype.itemsize < 4) for p in network.parameters())
    groups = [{name: value for name, value in group.items() if name != "eps"} for group in groups]
    return torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=not is_plain)


def muon(
    network: nn.Module,
    *,
    lr: Positive = 4e-3,
    matrix_lr: Positive = 0.02,
    momentum: Share = 0.95,
    ns_steps: Count = 5,
    weight_decay: NotNegative = 0.0,
    betas: tuple[Share, Share] = (0.9, 0.95),
    eps: Positive = 1e-8,
    rules: Rules = (),
    head_dim: int = 1,
) -> Muon:
    """``Muon`` for the matrices of linear layers (see ``matrix_names``), and AdamW for embeddings, layers named ``head`` and vectors.

    Args:
        lr: peak learning rate of all other parameters.
        matrix_lr: peak learning rate of the matrices.
        momentum: μ, the momentum of the matrices.
        ns_steps: Newton-Schulz iterations per update.
        weight_decay, betas, eps, rules, head_dim: see ``adamw``.

    Raises:
        ConfigError: no parameter is a matrix for Muon; or see ``parameter_groups``.
    """
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "eps": eps, "rules": rules, "head_dim": head_dim}
    groups = parameter_groups(network, matrix_lr=matrix_lr, **options)
    require(
        any(p.requires_grad for group in groups if "matrix" in group for p in group["params"]),  # type: ignore[attr-defined]
        f"optimizer=muon needs a trainable torch.nn.Linear other than heads, but {type(network).__name__} has none: use optimizer=adamw",
    )
    optimizer = Muon(groups, betas=betas, momentum=momentum, steps=ns_steps)
    optimizer.defaults["lr"] = lr
    return optimizer


def parameter_groups(
    network: nn.Module,
    *,
    lr: float,
    matrix_lr: float | None = None,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    rules: Rules = (),
    head_dim: int = 1,
) -> list[dict[str, object]]:
    """Return groups of parameters with equal lr, weight decay and eps and, if ``matrix_lr`` is set, equal update rule (``matrix``).

    Weight decay is not applied to biases, norms and vectors (``role_of``). The first of ``rules`` whose ``match`` is found in a
    parameter's name applies. With ``trainable: false``, the parameter is in no group; ``freeze`` freezes it.

    Args:
        matrix_lr: the lr of matrices for Muon; None: Muon is not used.
        head_dim: d_k, for factors such as ``head_dim^p``.

    Raises:
        ConfigError: a rule matches no parameter, a factor is negative or infinite, or no parameter is trainable.
    """
    groups: dict[tuple[float, float, float, bool], list[nn.Parameter]] = defaultdict(list)
    matrices = set() if matrix_lr is None else matrix_names(network)
    unused = set(range(len(rules)))
    for name, parameter in network.named_parameters():
        index, rule = _rule_of(name, rules)
        unused.discard(index)
        if not rule.trainable:
            continue
        rate, decay, add = (_factor(rule, key, f"optimizer.rules[{index}]", head_dim) for key in ("lr", "weight_decay", "eps"))
        decay = decay if role_of(network, name) in DECAYED else 0.0
        base = matrix_lr if matrix_lr is not None and name in matrices else lr
        groups[base * rate, weight_decay * decay, eps * add, name in matrices].append(parameter)
    if unused:
        raise ConfigError(f"optimizer.rules[{min(unused)}].match={rules[min(unused)].match} matches no parameter name")
    require(bool(groups), "optimizer.rules freeze every parameter: nothing is left to train")
    return [
        {"params": params, "lr": rate, "weight_decay": decay, "eps": add, **({"matrix": True} if matrix else {})}
        for (rate, decay, add, matrix), params in groups.items()
    ]


def _rule_of(name: str, rules: Rules) -> tuple[int, ParameterRule]:
    """Return the first rule that matches a name, with its number; a rule without an effect, and -1, if none does."""
    return next(((i, rule) for i, rule in enumerate(rules) if re.search(rule.match, name)), (-1, ParameterRule(match="")))


def freeze(network: nn.Module, optimizer: Part) -> None:
    """Freeze the parameters that the rules of an optimizer do not train: ``requires_grad`` becomes False."""
    rules = tuple(rule for rule in optimizer.get("rules") or () if isinstance(rule, ParameterRule))
    for name, parameter in network.named_parameters():
        if not _rule_of(name, rules)[1].trainable:
            parameter.requires_grad_(False)


DECAYED = ("weights", "embeddings")
"""The roles with weight decay."""


def role_of(network: nn.Module, name: str) -> str:
    """Return the role of a parameter: ``biases``, ``norms``, ``embeddings``, ``vectors`` or ``weights``.

    The module that owns the parameter decides, not the number of axes: the norms of separate heads and the biases of experts are
    matrices. A norm is recognised by the name of its class, or its own name, and a bias by its name.

    >>> norms = nn.ModuleDict({"q_norm": nn.LayerNorm((3, 5)), "out": nn.Linear(3, 5)})
    >>> [role_of(norms, name) for name, _ in norms.named_parameters()]
    ['norms', 'biases', 'weights', 'biases']
    """
    path, _, last = name.rpartition(".")
    owner = network.get_submodule(path)
    if "bias" in last:
        return "biases"
    if isinstance(owner, nn.Embedding):
        return "embeddings"
    if not isinstance(owner, nn.Linear) and "norm" in f"{type(owner).__name__} {path.rpartition('.')[2]}".lower():
        return "norms"
    return "weights" if network.get_parameter(name).dim() > 1 else "vectors"


def describe_decay(optimizer: torch.optim.Optimizer, network: nn.Module) -> str:
    """Return which parameters have which weight decay, or "" if it is the same for all.

    >>> network = nn.Linear(3, 5)
    >>> describe_decay(adamw(network, weight_decay=0.1), network)
    'weight decay 0.1: weights (1); 0: biases (1)'
    """
    names = {parameter: name for name, parameter in network.named_parameters()}
    counts: dict[float, Counter[str]] = defaultdict(Counter)
    for group in optimizer.param_groups:
        counts[group.get("weight_decay", 0.0)].update(role_of(network, names[p]) for p in group["params"] if p in names)
    listed = (f"{decay:g}: {', '.join(f'{role} ({n})' for role, n in roles.items())}" for decay, roles in counts.items())
    return f"weight decay {'; '.join(listed)}" if len(counts) > 1 else ""


def _factor(rule: ParameterRule, key: str, path: str, head_dim: int) -> float:
    try:
        factor = evaluate_factor(getattr(rule, key), head_dim=head_dim)
    except OverflowError:
        factor = math.inf
    require(0.0 <= factor < math.inf, f"{path}.{key}={getattr(rule, key)} must be a finite factor of zero or more")
    return factor


def build_optimizer(part: Part, network: nn.Module, head_dim: int = 1) -> torch.optim.Optimizer:
    """Build the optimizer of a part. Its first argument is the network if the target has a parameter ``network``, else the trainable parameters.

    Raises:
        ConfigError: the target cannot be built, does not return a ``torch.optim.Optimizer``, or returns one with other weights for
            evaluation (methods ``train`` and ``eval``).
    """
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = part.build(network if "network" in part.names else trained, head_dim=head_dim)
    require(
        isinstance(optimizer, torch.optim.Optimizer),
        f"optimizer._target_={part.name} must return a torch.optim.Optimizer, got {type(optimizer).__name__}",
    )
    require(
        not (hasattr(optimizer, "train") and hasattr(optimizer, "eval")),
        f"optimizer._target_={part.name} has other weights for evaluation than for training (train() and eval()), which is not supported: "
        "use optimizer=adamw, with callbacks=[default,ema] for averaged weights",
    )
    return optimizer


def check_strategy(optimizer: torch.optim.Optimizer, strategy: str) -> None:
    """Raise a ConfigError for an optimizer that cannot train with ``trainer.strategy``."""
    if isinstance(optimizer, Muon) and strategy == "sharded":
        raise ConfigError(
            "optimizer=muon needs whole matrices, but trainer.strategy=sharded shards them: use trainer.strategy=ddp"
        )


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``optimizer`` supports ``found_inf``, and so can skip updates without waiting for the host."""
    return bool(optimizer.defaults.get("fused"))


# --- the state of an optimizer in a checkpoint


def keep_dtypes(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], dtypes: Mapping[nn.Parameter, torch.dtype | None]
) -> None:
    """Restore the saved dtypes of the state of ``optimizer``.

    ``Optimizer.load_state_dict`` casts every tensor except ``step`` to the dtype of its parameter. For example, it would round
    ``mu_product`` of ``NAdam`` from float32 to bfloat16, and the resumed run would differ.

    Args:
        saved: the saved state.
        dtypes: the dtype of each parameter when the state was saved. A state tensor with that dtype is cast as in torch.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for name, value in saved["state"].get(number, {}).items():
            loaded = optimizer.state[parameter].get(name)
            is_cast = isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype
            if is_cast and value.dtype != dtypes[parameter]:
                optimizer.state[parameter][name] = part_of(value.to(loaded.device), loaded)
