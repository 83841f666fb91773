"""What each switch of the fast recipe buys in tokens and in seconds: the grid ``experiment=speedrun_ablation``, and a stop-watch.

    python scripts/train.py experiment=speedrun_ablation        # 36 minutes on two cores
    python benchmarks/switches.py

The grid says, arm by arm and seed by seed, the validation loss at two lengths of training; a line through loss against the logarithm of
tokens says how many tokens each arm needs for the loss that the whole recipe has halfway between (in ln tokens). Seconds a step
are measured here, each arm against the whole recipe in blocks by turns. Seconds = tokens x seconds a step; an arm's rates are the
recipe's, tuned for the whole, but for AdamW's, which are its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import compare, judged, ratio_interval, reached, table, write

from minitx.ablation.grid import cells
from minitx.cli.compose import compose_config, compose_grid
from minitx.config import RunConfig
from minitx.training.building import build_module, build_network, open_data

ROOT = Path(__file__).parents[1]
FULL = "all"


def step_of(overrides: list[str]) -> Callable[[], object]:
    """A training step of a cell: forward, loss, backward, update."""
    config: RunConfig = compose_config([*overrides, "trainer.accelerator=cpu"])
    data = open_data(config)
    module = build_module(config, data, build_network(config, data))
    optimizer = module.make_optimizer(module.network)
    batch = data.train_source().batch(0, range(config.data.batch_size))

    def step() -> None:
        logits = module.network(batch["input_ids"])
        F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def losses(records: Path) -> dict[str, dict[int, dict[int, float]]]:
    """arm -> seed -> steps -> validation loss, of the finished cells."""
    found: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for line in records.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["status"] == "done":
            found[record["arm"]][record["seed"]][int(record["factors"]["steps"])] = record["result"]["val_loss"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=ROOT / "runs" / "speedrun_ablation" / "speedrun" / "cells.jsonl")
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    if not given.records.is_file():
        sys.exit(
            f"error: {given.records} does not exist; run the grid first: python scripts/train.py experiment=speedrun_ablation"
        )
    found = losses(given.records)
    grid = compose_grid(["experiment=speedrun_ablation"])
    assert grid is not None
    overrides = {cell.place.arm: list(cell.overrides) for cell in cells(grid)}
    full = step_of(overrides[FULL])
    rows, seconds = [], {}
    for arm in found:
        ratios: list[float] = []
        for seed, points in found[arm].items():
            wanted = sum(found[FULL][seed].values()) / len(found[FULL][seed])  # on its line, halfway in ln tokens
            ratios.append(reached(wanted, points) / reached(wanted, found[FULL][seed]))
        if arm == FULL:
            continue
        timed = compare(step_of(overrides[arm]), full, pairs=given.pairs)
        seconds[arm] = timed
        rows.append(judged(f"{arm}, tokens", ratio_interval(ratios), None, seeds=ratios))
        rows.append(judged(f"{arm}, seconds a step", timed["ratio"], None, control=timed["control"]))
        rows.append(judged(f"{arm}, seconds", ratio_interval([r * timed["ratio"]["median"] for r in ratios]), None))
        print(table(rows[-3:]), flush=True)
    title = "One switch of the fast recipe at a time, over the whole recipe (more than 1: the switch pays)"
    results: dict[str, Any] = {"losses": found, "steps": seconds}
    print(write("switches", {"target": "P3", "title": title, "threads": torch.get_num_threads(), "rows": rows, **results}))


if __name__ == "__main__":
    main()
