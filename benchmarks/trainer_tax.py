"""P4: what a training step costs under the trainer, over a raw loop with the same module, optimizer and data source.

Both sides take turns inside one running fit, on the same weights and the same optimizer: A is a raw loop (a batch from a loader
of its own, logits, ``F.cross_entropy``, backward, the optimizer's step, gradients dropped), B are steps of the trainer as
``minitx.training.run.train`` builds it, with ``metrics.csv``, progress and the watch for signals. B does more than A: it looks at
every loss and gradient norm for NaN, seeds each step, follows the schedule, and logs; that is the tax. The rows of a batch are
chosen so that a raw step takes about ``--milliseconds``. Afterwards a short fit with Lightning's profiler says where it goes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from inside_fit import Turns, fit, measured, ready, run_config
from lightning.pytorch.profilers import SimpleProfiler
from measure import median_interval, row, seconds_of, table, write
from peers import loss_of
from torch import Tensor, nn

from minitx.training.module import TrainingModule

WANTED = "<= 1.02"
PARTS = {  # of Lightning's profiler: the name of an action ends so
    "the whole step": ("run_training_batch",),
    "fetching the batch": ("train_dataloader_next",),
    "moving the batch": (".batch_to_device",),
    "training_step: forward, loss, accuracy": (".training_step",),
    "backward": (".backward",),
    "the optimizer's step, all that it encloses": (".optimizer_step",),
    "on_before_optimizer_step: norm, check for NaN": ("TrainingModule.on_before_optimizer_step",),
    "callbacks after the batch": (".on_train_batch_end",),
    "callbacks before the batch": (".on_train_batch_start",),
}


def raw_step(network: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    loss_of(network(batch["input_ids"]), batch["labels"]).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def raw_blocks(batches: Iterator[dict[str, Tensor]]) -> Callable[[TrainingModule, int], None]:
    """Blocks of the raw loop on the network and the optimizer of the running fit."""

    def block(module: TrainingModule, steps: int) -> None:
        optimizer = module.trainer.optimizers[0]
        optimizer.zero_grad(set_to_none=True)
        for _ in range(steps):
            raw_step(module.network, optimizer, next(batches))

    return block


def raw_seconds(rows: int) -> float:
    """Seconds of a raw step."""
    module, data = ready(run_config(rows, 12))
    optimizer = module.configure_optimizers()["optimizer"]
    batches = data.train_dataloader()
    return median_interval([seconds_of(partial(raw_step, module.network, optimizer, batch)) for batch in batches])["median"]


def rows_for(seconds: float) -> int:
    """How many rows a batch must have for a raw step of about so many seconds."""
    raw_seconds(12)  # warm
    return max(1, round(48 * seconds / raw_seconds(48)))


class Recorded(SimpleProfiler):
    """Lightning's profiler, and the seconds between the beginnings of two steps."""

    def parts(self, steps: int) -> dict[str, float]:
        """Milliseconds a step of each of ``PARTS``."""
        return {
            name: 1e3 * sum(sum(found) for key, found in self.recorded_durations.items() if key.endswith(ends)) / steps
            for name, ends in PARTS.items()
        }


class Clock(L.Callback):
    """Seconds from the beginning of training to its end."""

    seconds = 0.0

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.seconds = -time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        self.seconds += time.perf_counter()


def where_it_goes(batch_size: int, steps: int) -> dict[str, float]:
    """Milliseconds a step by part; the profiler itself costs some of them."""
    profiler, clock = Recorded(), Clock()
    fit(run_config(batch_size, steps), [clock], lambda trainer: setattr(trainer, "profiler", profiler))
    return {"from step to step": 1e3 * clock.seconds / steps, **profiler.parts(steps)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a raw step")
    parser.add_argument("--steps", type=int, default=50, help="of a block")
    given = parser.parse_args()
    batch_size = rows_for(given.milliseconds / 1e3)
    spare = given.steps * given.pairs + 1
    _, data = ready(run_config(batch_size, spare))
    blocks = Turns(given.steps, given.pairs, outside={0: raw_blocks(iter(data.train_dataloader()))})
    found = measured(run_config(batch_size, blocks.num_steps), blocks)
    name = f"trainer / raw loop, steps of {1e3 * found['a_seconds']:.1f} ms"
    rows = [row(name, found, WANTED, batch_size=batch_size, extra_milliseconds=1e3 * (found["b_seconds"] - found["a_seconds"]))]
    print(table(rows))
    parts = where_it_goes(batch_size, 200)
    print("\n| with Lightning's profiler | ms a step |\n|---|---|")
    for part, milliseconds in parts.items():
        print(f"| {part} | {milliseconds:.3f} |")
    title = "A step under the trainer over a raw loop with the same module, optimizer and data"
    about = {"target": "P4", "title": title, "threads": torch.get_num_threads(), "rows": rows}
    print(write("trainer_tax", {**about, "profiled_milliseconds": parts}))


if __name__ == "__main__":
    main()
