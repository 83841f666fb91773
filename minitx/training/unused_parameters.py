"""Parameters without a gradient, in a run of several processes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import lightning.pytorch as L
from torch import nn

from minitx.config import ConfigError, TrainerConfig
from minitx.config.failures import FailedRunError
from minitx.nn.config_differences import joined
from minitx.training.processes import largest_of_all

log = logging.getLogger(__name__)

FIND_UNUSED: Final = "ddp_find_unused_parameters_true"
"""The value of ``trainer.strategy`` for DDP that looks for parameters without a gradient in every step. The name is Lightning's."""


class UnusedParametersError(FailedRunError):
    """A step left parameters without a gradient that several processes wait for, or that FSDP2 would add to others."""


@contextmanager
def reached_by_gradients(network: nn.Module) -> Iterator[set[nn.Parameter]]:
    """A context that yields the set of parameters that have received a gradient in it."""
    reached = set[nn.Parameter]()
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    handles = [weight.register_post_accumulate_grad_hook(lambda weight: reached.add(weight)) for weight in trained]  # type: ignore[arg-type]
    try:
        yield reached
    finally:
        for handle in handles:
            handle.remove()


def unreached(names: Sequence[str]) -> str:
    """Return the subject and the verb of a sentence about parameters.

    >>> unreached(["a"]), unreached(["a", "b", "c", "d"])
    ('a gets no gradient from', 'a, b, c and 1 more get no gradient from')
    """
    return f"{joined(names, ', ')} {'gets' if len(names) == 1 else 'get'} no gradient from"


def prepare_for_unused(network: nn.Module, options: TrainerConfig, reached: Sequence[set[nn.Parameter]]) -> TrainerConfig:
    """Return options with which several processes train parameters that have no gradient after some backward passes. Log their names.

    DDP waits for the gradient of every parameter, unless it looks for unused ones. FSDP2 adds up the gradients of a layer by their
    order, so they must belong to the same parameters in every process.

    Args:
        reached: for several backward passes, the parameters that had a gradient afterwards. A pass without any, of a row without
            targets, does not count.

    Raises:
        ConfigError: some passes reach a parameter and others do not, but the run shards the model.
    """
    trained = {weight: name for name, weight in network.named_parameters() if weight.requires_grad}
    passes = [weights for weights in reached if weights]
    unused = {weight: name for weight, name in trained.items() if not all(weight in weights for weights in passes)}
    sometimes = [name for weight, name in unused.items() if any(weight in weights for weights in passes)]
    if options.strategy == "sharded" and sometimes:
        raise ConfigError(f"model: {unreached(sometimes)} some rows, and FSDP2 cannot train such a model: use trainer=ddp")
    if unused and options.strategy != "sharded":
        rows = "some rows" if sometimes else "any row"
        log.info("model: %s %s: DDP looks for unused parameters in every step", unreached([*unused.values()]), rows)
        return dataclasses.replace(options, strategy=FIND_UNUSED)
    return options


def check_reached(network: nn.Module, reached: set[nn.Parameter] | None, options: TrainerConfig, trainer: L.Trainer) -> None:
    """Check that the processes have gradients of the same parameters. With FSDP2, only at steps with a row of metrics.

    Args:
        reached: the parameters that have a gradient from this micro-batch; None where DDP does not wait for them.

    Raises:
        UnusedParametersError: DDP has no gradient of a parameter, or FSDP2 has one in some processes only.
    """
    step = trainer.global_step
    trained = {name: weight for name, weight in network.named_parameters() if weight.requires_grad}
    if reached is not None:
        unused = [name for name, weight in trained.items() if weight not in reached]
        remedy = f"and DDP waits for them: set trainer.strategy={FIND_UNUSED}"
    elif options.strategy == "sharded" and step % options.log_every == 0:
        has_gradient = [int(weight.grad is not None) for weight in trained.values()]
        largest = largest_of_all(trainer, *has_gradient, *(-number for number in has_gradient))
        unused = [name for name, most, least in zip(trained, largest, largest[len(trained) :], strict=False) if most != -least]
        remedy = "in some processes only, which FSDP2 cannot train: use trainer=ddp"
    else:
        return
    if unused:
        raise UnusedParametersError(f"model: {unreached(unused)} step {step + 1} {remedy}")
