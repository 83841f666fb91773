"""Parameters and operations of each change of attention in the grid ``changes`` and of the plain model.

    python examples/changes/sizes.py                   # in the top folder of the clone
    python examples/changes/sizes.py plain latent      # some of them
    python examples/changes/sizes.py --config-dir=mine ablation=head_gate

Operations are the floating-point operations of the matrix products in a forward and a backward pass of one batch, 12 × 64 characters, as torch
counts them. Fused attention computes its scores again in the backward pass; soft-cap and sinks run without a fused kernel.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from minitx.cli.compose import compose_cell, compose_grid, find_own_modules
from minitx.config import ConfigError
from minitx.nn.counting import count_flops
from minitx.training.network_building import network_of

VOCABULARY = 64


def main(*arguments: str) -> list[tuple[str, int, int]]:
    """Print a table of the changes, by default all, and return its rows: name, parameters, operations."""
    sys.path.append(str(Path(__file__).parents[2]))
    names = [argument for argument in arguments if "=" not in argument]
    words = [argument for argument in arguments if "=" in argument]
    find_own_modules(words)
    study = compose_grid(["experiment=scaling_ablation", "ablation=changes", *words]).studies["loss"]
    changes = study.factors["change"]
    if unknown := [name for name in names if name not in changes]:
        raise ConfigError(f"{unknown[0]} must be one of {', '.join(changes)}")
    ids, rows = torch.zeros(12, 64, dtype=torch.long), []
    print(f"{'':20} {'parameters':>9} {'':>6} operations")
    for name in names or changes:
        network = network_of(compose_cell([*study.base, *changes[name], f"model.vocab_size={VOCABULARY}"]).model)
        operations = count_flops(lambda network=network: F.cross_entropy(network(ids).flatten(0, 1), ids.flatten()).backward())
        rows.append((name, sum(parameter.numel() for parameter in network.parameters()), operations))
        _, parameters, cost = rows[0]
        print(
            f"{name:20} {rows[-1][1]:9,} {rows[-1][1] / parameters - 1:+7.2%} {operations / 1e9:7.3f}e9 {operations / cost - 1:+7.2%}"
        )
    return rows


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
