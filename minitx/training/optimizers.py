"""Optimizers and learning-rate schedules. The arguments of each function are its keys in a config. Yours can be used as well.

Schedules are in this file because configs and checkpoints name them ``minitx.training.optimizers.cosine``. The state of an optimizer
is loaded in ``keep_dtypes``; ``sharding`` converts a sharded optimizer's state.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from minitx.config import ConfigError, ParameterRule, Part, evaluate_factor
from minitx.config.schema import Bound, Count, NotNegative, Positive, Share, require
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


# --- schedules

DecayFraction = Annotated[float, Bound("lie in (0, 1]", lambda share: 0.0 < share <= 1.0)]
Warmup = Annotated[
    int | float,
    Bound(
        "be a whole number of steps, or a share of all steps below 1",
        lambda steps: 0 <= steps < math.inf and (steps < 1 or float(steps).is_integer()),
    ),
]
"""The length of a warm-up."""


def constant(optimizer: torch.optim.Optimizer, max_steps: int, *, warmup_steps: Warmup = 0) -> LambdaLR:
    """A constant learning rate after a linear warm-up (step + 1) / ``warmup_steps``.

    Args:
        max_steps: the number of steps; the run passes it.
        warmup_steps: steps of a linear rise from zero; below 1: a share of all steps.
    """
    return _after_warmup(optimizer, max_steps, warmup_steps, lambda t: 1.0)


def linear(
    optimizer: torch.optim.Optimizer, max_steps: int, *, warmup_steps: Warmup = 0, final_lr: NotNegative = 0.1
) -> LambdaLR:
    """A linear decay from the peak to f = ``final_lr``: 1 - (1 - f) t, where t runs from 0 to 1 after the warm-up.

    Args:
        max_steps, warmup_steps: see ``constant``.
        final_lr: final learning rate, as a share of optimizer.lr.

    >>> schedule = linear(torch.optim.SGD([torch.zeros(1)], lr=1.0), 6, warmup_steps=2, final_lr=0.0)
    >>> [schedule.lr_lambdas[0](step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    return _after_warmup(optimizer, max_steps, warmup_steps, lambda t: 1.0 - (1.0 - final_lr) * t)


def cosine(
    optimizer: torch.optim.Optimizer, max_steps: int, *, warmup_steps: Warmup = 0, final_lr: NotNegative = 0.1
) -> LambdaLR:
    """Half a cosine from the peak to f = ``final_lr``: f + (1 - f) (1 + cos πt) / 2 (Loshchilov & Hutter 2017, arXiv:1608.03983).

    Args:
        max_steps, warmup_steps: see ``constant``.
        final_lr: see ``linear``.
    """
    return _after_warmup(
        optimizer, max_steps, warmup_steps, lambda t: final_lr + (1.0 - final_lr) * 0.5 * (1.0 + math.cos(math.pi * t))
    )


def trapezoid(
    optimizer: torch.optim.Optimizer,
    max_steps: int,
    *,
    warmup_steps: Warmup = 0,
    final_lr: NotNegative = 0.1,
    decay_fraction: DecayFraction = 0.2,
) -> LambdaLR:
    """A constant learning rate, then a linear decay to ``final_lr`` (warm-up, stable, decay: WSD; Hu et al. 2024, arXiv:2404.06395).

    Args:
        max_steps, warmup_steps: see ``constant``.
        final_lr: see ``linear``.
        decay_fraction: share of the steps, at the end, for the decay.
    """
    start = max(warmup_of(warmup_steps, max_steps), max_steps - round(decay_fraction * max_steps))
    return _after_warmup(optimizer, max_steps, warmup_steps, lambda t: 1.0 - (1.0 - final_lr) * t, start)


def warmup_of(steps: float, max_steps: int) -> int:
    """Return the number of warm-up steps: ``steps``, or, if it is below 1, this share of ``max_steps``, rounded.

    >>> warmup_of(100, 2000), warmup_of(0.1, 2000), warmup_of(0.1, 3)
    (100, 200, 0)
    """
    return round(steps * max_steps) if steps < 1 else int(steps)


def _after_warmup(
    optimizer: torch.optim.Optimizer, max_steps: int, steps: float, curve: Callable[[float], float], start: int | None = None
) -> LambdaLR:
    """Return a schedule: (step + 1) / warmup, then ``curve(t)``, where t runs from 0 at step ``start`` to 1 at ``max_steps``."""
    warmup = warmup_of(steps, max_steps)
    require(
        warmup <= max_steps,
        f"schedule.warmup_steps={warmup} must not exceed trainer.max_steps={max_steps}; a value below 1 is a share of them",
    )
    first = warmup if start is None else start

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return curve(min(1.0, max(0.0, (step - first) / max(1, max_steps - first))))

    return LambdaLR(optimizer, factor)


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
