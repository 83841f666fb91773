"""Which training runs can be one stack: of a grid's cells by their place in it, of configs by what they ask for.

``stacked`` trains them; this file needs no torch, so that a plan can be made without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from minitx.ablation.grid import Cell
from minitx.ablation.records import RATE
from minitx.config import ConfigError, OptimizerConfig, RunConfig, ScheduleConfig, to_dict

# what each key must be in a run that is stacked: nothing that draws random numbers or needs a trainer
SERVED: dict[str, tuple[Any, ...]] = {
    "on_nonfinite": ("record",),
    "callbacks.extra": ({},),
    "evaluation.lengths": ([],),
    "model.attention": ("exact",),
    "optimizer.name": ("adamw",),
    "model.backend": ("auto", "math"),
    "trainer.strategy": ("auto",),
    "trainer.precision": ("32-true", "64-true"),
    **dict.fromkeys(("ckpt_path", "model.num_experts", "model.pretrained", "objective.chunk_tokens"), (None,)),
    **dict.fromkeys(("model.dropout", "model.stochastic_depth", "trainer.val_every"), (0,)),
    **dict.fromkeys(("trainer.devices", "trainer.accumulate"), (1,)),
    **dict.fromkeys(
        ("model.checkpointing", "evaluation.at_end", "evaluation.attention_cost", "trainer.compile", "trainer.deterministic"),
        (False,),
    ),
}


def stacks(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that differ in their seed and in the level of the factor ``lr`` only, together; the order is kept.

    What they cannot be stacked for beyond that, ``check_configs`` says.

    >>> run = lambda arm, lr, seed: Cell("recall", arm, {"lr": lr}, seed, ())
    >>> found = stacks([run("a", "1", 0), run("b", "1", 0), run("a", "2", 0), run("a", "1", 1)])
    >>> [[(cell.arm, cell.factors["lr"], cell.seed) for cell in stack] for stack in found]
    [[('a', '1', 0), ('a', '2', 0), ('a', '1', 1)], [('b', '1', 0)]]
    """
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        condition = sorted((name, level) for name, level in cell.factors.items() if name != RATE)
        found.setdefault((cell.study, cell.arm, *condition), []).append(cell)
    return list(found.values())


def check_configs(configs: Sequence[RunConfig]) -> None:
    """Refuse what cannot be stacked.

    Raises:
        ValueError: no config. ConfigError: a value that is not in ``SERVED``, or more than what may differ differs.
    """
    if not configs:
        raise ValueError("configs must hold at least one run, got none")
    for config in configs:
        found = _flat(to_dict(config)) | {"callbacks.extra": dict(config.callbacks.extra)}
        for key, served in SERVED.items():
            if found[key] not in served:
                allowed = " or ".join(f"{key}={value}" for value in served)
                raise ConfigError(f"{key}={found[key]} cannot be trained in a stack, which needs {allowed}")
    first = _shared(configs[0])
    for config in configs[1:]:
        other = _shared(config)
        keys = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
        if keys:
            wrong = ", ".join(f"{key}={first.get(key)} and {other.get(key)}" for key in keys)
            raise ConfigError(f"{wrong} cannot be trained in one stack, whose runs differ in seed, rates and initial weights")


def _shared(config: RunConfig) -> dict[str, Any]:
    """What all runs of a stack must have in common, by dotted key."""
    model = replace(config.model, init="gpt2", init_fold=None, init_zero_outputs=False)
    optimizer, schedule = OptimizerConfig(betas=config.optimizer.betas), ScheduleConfig()
    same = replace(config, model=model, optimizer=optimizer, schedule=schedule, seed=0, output_dir=None)
    return _flat(to_dict(same))


def _flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {path + key: value}
    return found
