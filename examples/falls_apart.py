"""Train a solved model further, with and without 1/√d_k. Scene 3 of the playground shows the results.

    python examples/falls_apart.py      # half a minute on two cores; writes minitx/analysis/viewer/training.json

A model with one head (d_k = 128) learns to look up a key among 16 (``data=kv_lookup``). Two copies of it are trained further: one
keeps the scale 1/√d_k; the other has none, and its W_Q and W_K are divided by d_k^¼ each. So both compute the same function at
the start. The runs use AdamW and SGD (momentum 0.9) with three learning rates each, 200 steps and one seed. ``scripts/train.py``
repeats a run with the overrides below, as in ``configs/ablation/limits.yaml``. The table of largest stable rates comes from the
record of that grid.
"""

import argparse
import csv
import json
import lzma
import shlex
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from minitx.analysis import capture
from minitx.cli.compose import compose_config
from minitx.config import node
from minitx.data.recall import kv_lookup
from minitx.nn.modes import evaluating
from minitx.training.run import train
from minitx.training.step_callback import StepCallback

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "scaling_ablation" / "limits" / "cells.jsonl.xz"
OUTPUT = ROOT / "minitx" / "analysis" / "viewer" / "training.json"

RUN = "experiment=scaling_cell_recall model.num_heads=1 callbacks.progress=false trainer.threads=1"
SOLVE = (
    "seed=0 optimizer.lr=3.2e-3 trainer.max_steps=1500 'trainer.stop_at={value: 0.99, window: 16}' trainer.ckpt_every=100000"
)
FURTHER = "seed=1000 init_from.fold_scale=true"
STEPS = 200
ARMS = ("inv_sqrt", "unscaled")
RATES = {"adamw": (0.003, 0.008, 0.032), "sgd": (0.004, 0.03, 0.24)}
LOOKS = (*range(0, 40, 2), *range(40, STEPS + 1, 5))
"""The numbers of steps after which the model is measured."""

LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
"""A number p from 0 to 1 is written as the character at round(63 √p): near 0 the levels are closer."""


def questions():
    """Return the inputs of 16 rows, and the correct answers (16,). All have the pairs of the first validation row; row i asks for key i."""
    first = {name: torch.as_tensor(value) for name, value in kv_lookup().val[0].items()}
    inputs = {name: first[name].repeat(16, 1) for name in ("input_ids", "token_type_ids")}
    inputs["input_ids"][:, 16] = first["input_ids"][:16]
    return inputs, first["token_type_ids"][:16] + 63  # value v is written v + 1 in a pair, and 64 + v as an answer


class Look(StepCallback):
    """Ask the 16 questions at the steps in ``LOOKS``, and append a line to ``looks.jsonl`` each time."""

    def on_train_start(self, trainer, module):
        self.on_step(trainer, module, 0, None)

    @torch.no_grad()
    def on_step(self, trainer, module, step, batch):
        if step not in LOOKS:
            return
        inputs, right = questions()
        with evaluating(module.network), capture(module.network, what="scores") as seen:
            answers = module.network(**inputs)[:, -1].argmax(-1)
        ((scores,),) = seen.values()
        scores = scores[:, 0, -1]  # (16, 17): of the last position with each
        record = {
            "weights": text(scores.softmax(-1)),
            "right": "".join("01"[is_right] for is_right in (answers == right).tolist()),
            "largest": significant(scores.abs().max().item()),
        }
        with Path(trainer.default_root_dir, "looks.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def text(weights):
    """Write weights from 0 to 1 as characters of ``LEVELS``."""
    return "".join(LEVELS[round(63 * p**0.5)] for p in weights.clamp(0, 1).flatten().tolist())


def significant(number):
    """Round to four significant digits."""
    return float(f"{number:.4g}")


def run(overrides, folder, **callbacks):
    """Train like ``train.py OVERRIDES``, and return the loss and the number of correct answers of each step."""
    config = compose_config(shlex.split(f"{RUN} {overrides}"))
    train(replace(config, callbacks={**config.callbacks, **callbacks}), folder)
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train_loss"]]
    return [significant(float(row["train_loss"])) for row in rows], [round(64 * float(row["train_accuracy"])) for row in rows]


def trained_further(folder):
    """Return the twelve runs."""
    start, runs = folder / "solved", []
    run(SOLVE, start)
    init = f"{FURTHER} init_from.path={shlex.quote(str(start / 'checkpoints' / 'last.ckpt'))}"
    for optimizer, rates in RATES.items():
        for rate in rates:
            for arm in ARMS:
                run_folder = folder / f"{optimizer}_{rate}_{arm}"
                # one step more than the page shows, because the loss of a step is measured before its update
                overrides = f"optimizer={optimizer} optimizer.lr={rate} model.scale={arm} trainer.max_steps={STEPS + 1} {init}"
                loss, right = run(overrides, run_folder, look=node(Look))
                looks = [json.loads(line) for line in (run_folder / "looks.jsonl").read_text(encoding="utf-8").splitlines()]
                looked = {name: [look[name] for look in looks] for name in looks[0]}
                runs.append({"optimizer": optimizer, "rate": rate, "arm": arm, "loss": loss, "accuracy": right, **looked})
                print(f"{optimizer:6} {rate:<6} {arm:9} lowest accuracy over 8 steps {lowest(right):.3f}")
    return runs


def lowest(right):
    """Return the lowest share of correct answers over 8 successive steps with 64 answers each."""
    return min(sum(right[end - 8 : end]) for end in range(8, len(right) + 1)) / 512


def largest_rates():
    """Return the largest stable rates in the record by optimizer and d_k: medians over the seeds, with two digits."""
    with lzma.open(RECORD, "rt", encoding="utf-8") as lines:
        cells = [
            cell for cell in map(json.loads, lines) if cell["status"] == "done" and cell["factors"].get("trained") == "all"
        ]
    limits = {}
    for optimizer in RATES:
        for width in (8, 32, 128, 512):
            rates = [
                {
                    cell["seed"]: (cell["result"]["low"] * cell["result"]["high"]) ** 0.5
                    for cell in cells
                    if (cell["study"], cell["arm"], cell["factors"]["head_dim"]) == (optimizer, arm, str(width))
                }
                for arm in ARMS
            ]
            seeds = sorted(rates[0].keys() & rates[1].keys())
            middle = [statistics.median(rate[seed] for seed in seeds) for rate in rates]
            ratio = statistics.median(rates[0][seed] / rates[1][seed] for seed in seeds)
            numbers = [float(f"{number:.2g}") for number in (*middle, ratio)]
            limits.setdefault(optimizer, []).append([width, *numbers, len(seeds)])
    return limits


def main(output=OUTPUT):
    """Train, write the numbers for the page, and return them."""
    with tempfile.TemporaryDirectory() as folder:
        record = {"looks": LOOKS, "runs": trained_further(Path(folder)), "limits": largest_rates()}
    Path(output).write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    return record


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a solved model further with and without the scale, for the playground.")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="(%(default)s)")
    main(parser.parse_args().output)
