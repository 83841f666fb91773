"""P11: training that looks at the attention of every layer and head each 50 steps, over training that never looks.

Both sides take turns inside one running fit of the small character model: blocks of 50 steps with the probe of
``callbacks.probe`` (its record at the end of the block, and the look before that update, both as a run has them) and blocks of
50 without. The probe reads 8 rows of validation, and takes gradients of four parts of them besides; in a second row it takes the
statistics alone. That no L × S matrix lives in memory is asserted on the statistics themselves:
the largest allocation and the peak of bytes, by ``minitx.analysis.counting.allocations``, as the context doubles.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from inside_fit import Turns, fit, ready, run_config
from measure import compared, row, table, write
from torch import Tensor

from minitx.analysis.counting import allocations, fit_exponent
from minitx.analysis.statistics import attention_statistics
from minitx.config import ProbeConfig
from minitx.nn import AttentionCall, Causal
from minitx.training.probes import Probe

WANTED, EVERY, LENGTHS = "<= 1.03", 50, (512, 1024, 2048, 4096)


class Switched(Probe):
    """The run's probe, at each 50th step of the blocks that look and at no other."""

    looks = False

    def due(self, step: int) -> bool:
        return self.looks and step % self.options.every == 0


class StatisticsAlone(Switched):
    """What of it are statistics: no gradients, no look before the update."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        pass

    def _write(self, trainer: Any, module: Any, step: int) -> None:
        _, layers = self._look(module, statistics=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(layers, default=Tensor.tolist) + "\n")


def share(kind: type[Switched], batch_size: int, pairs: int) -> dict[str, Any]:
    """Blocks that look over blocks that do not."""
    with tempfile.TemporaryDirectory() as folder:
        _, data = ready(run_config(batch_size, 1))
        probe = kind(Path(folder), data.probe_batch(8), ProbeConfig(every=EVERY))
        blocks = Turns(EVERY, pairs, before=lambda side: setattr(probe, "looks", side == 1), warm=EVERY)
        fit(run_config(batch_size, blocks.num_steps), [blocks, probe])
        looks = len((Path(folder) / "probes.jsonl").read_text(encoding="utf-8").splitlines())
    assert looks in (pairs, pairs + 1), looks  # one a block, and the whole probe at step 0
    return compared(blocks.blocks)


def memory_of_statistics() -> dict[str, float]:
    """The powers of the length with which peak memory and the largest allocation grow; ends the benchmark at 1.5 or where an
    allocation is as large as one head's L × S matrix."""
    peaks, largest = [], []
    for length in LENGTHS:
        query, key = torch.randn(2, 1, 4, length, 32).unbind()

        def look(query: torch.Tensor = query, key: torch.Tensor = key) -> None:
            attention_statistics(AttentionCall(query, key, key, mask=Causal(), scale=32**-0.5))

        for found, size in zip((largest, peaks), allocations(look), strict=True):
            found.append(size)
    powers = {"peak_bytes": fit_exponent(LENGTHS, peaks), "largest_allocation": fit_exponent(LENGTHS, largest)}
    if max(powers.values()) >= 1.5 or largest[-1] >= 4 * LENGTHS[-1] ** 2:
        raise SystemExit(f"error: the statistics hold a matrix of L x S: {powers}, {largest[-1]} bytes at L = {LENGTHS[-1]}")
    return powers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=12, help="rows of a training step")
    given = parser.parse_args()
    powers = memory_of_statistics()
    print("statistics: " + ", ".join(f"{name} grows as L^{power:.2f}" for name, power in powers.items()))
    rows = [
        row(
            f"{name} each {EVERY} steps / none", share(kind, given.batch_size, given.pairs), WANTED, batch_size=given.batch_size
        )
        for name, kind in (("probe", Switched), ("statistics alone", StatisticsAlone))
    ]
    print(table(rows))
    title = "Attention statistics of every layer and head each 50 steps, over none"
    about = {"target": "P11", "title": title, "threads": torch.get_num_threads(), "rows": rows}
    print(write("attention_statistics", {**about, "growth_with_length": powers}))


if __name__ == "__main__":
    main()
