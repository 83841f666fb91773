"""P2 and P3: how fast, and in how many tokens, the modern preset comes to the loss of GPT-2's recipe on a text, on a CPU.

    python benchmarks/quality.py --text FILE          # tiny-shakespeare, in one file; about 25 minutes on two cores

Every run is kept in runs/quality/ under what its config says, so that a benchmark that was stopped goes on: runs of the two sides
may then lie some minutes apart.

P2. A is ``experiment=gpt2_baseline`` (0.80 million parameters, 2000 steps of 12 x 64 characters: nanoGPT's recipe for a CPU), B is
``experiment=speedrun_char``, each as ``scripts/train.py`` runs it, in a process of its own, seed by seed in turn. Training seconds leave out
the validation; the whole process is what a clock beside it shows. The loss is that of the whole validation split (the last tenth of
the text) in rows of 64 characters, in float32, with the weights as they are.

P3. Both presets at two lengths of training, around the loss that is wanted; a line through loss against the logarithm of tokens says, seed by seed,
where it is reached. GPT-2's rate is chosen among four on a seed of its own. The modern preset's rates were chosen on seed 0
of this text (docs/dev/decisions.md), by no more runs of no more tokens.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import judged, median_interval, ratio_interval, reached, table, write

from minitx.cli.compose import compose_config
from minitx.config import to_dict

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "runs" / "quality"
LOSS = 1.885
PRESETS = ("gpt2_baseline", "speedrun_char")
RATES, TUNING_SEED, TUNING_STEPS = ("1e-3", "2e-3", "4e-3", "8e-3"), 1000, 900
LENGTHS = {"gpt2_baseline": (900, 1500), "speedrun_char": (180, 250)}


def trained(text: Path, preset: str, seed: int, *more: str) -> dict[str, float]:
    """One run: its last validation loss, training and process seconds, and tokens; kept, and read where it was kept."""
    options = [f"experiment={preset}", "data=text", f"data.path='{text}'", f"seed={seed}", "callbacks.progress=false", *more]
    said = json.dumps([to_dict(compose_config(options)), torch.__version__, torch.get_num_threads()], sort_keys=True)
    kept = KEPT / f"{preset}-{seed}-{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"
    found = json.loads(kept.read_text()) if kept.exists() else _trained(options, seed)
    KEPT.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found))
    print(f"{preset} {' '.join(more)} {found}", flush=True)
    return found


def _trained(options: list[str], seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "scripts/train.py", *options, f"output_dir={run}"]
        began = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        whole = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(done.stderr.strip().splitlines()[-1])
        with (run / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    last = next(row for row in reversed(rows) if row["seconds"])
    found = {"seed": seed, "loss": losses[-1], "training_seconds": float(last["seconds"]), "process_seconds": whole}
    return found | {"tokens": int(last["tokens"]), "steps": int(last["step"])}


def time_to_loss(text: Path, seeds: int) -> dict[str, Any]:
    """P2: the rows, and every run."""
    runs: dict[str, list[dict[str, float]]] = {preset: [] for preset in PRESETS}
    for seed in range(seeds):
        for preset in PRESETS if seed % 2 == 0 else reversed(PRESETS):
            runs[preset].append(trained(text, preset, seed))
    ours, theirs = runs["speedrun_char"], runs["gpt2_baseline"]
    rows = []
    for name, wanted in (("training_seconds", ">= 5"), ("process_seconds", ">= 3"), ("tokens", None)):
        ratios = ratio_interval([a[name] / b[name] for a, b in zip(theirs, ours, strict=True)])
        rows.append(judged(f"{name.replace('_', ' ')}, gpt2_baseline / speedrun_char", ratios, wanted))
    worst = {name: max(run["loss"] for run in runs[name]) for name in PRESETS}
    rows.append(judged(f"loss of speedrun_char, the worst of {seeds} seeds", _exact(worst["speedrun_char"]), f"<= {LOSS}"))
    rows.append(judged(f"loss of gpt2_baseline, the worst of {seeds} seeds", _exact(worst["gpt2_baseline"]), None))
    for name in ("training_seconds", "process_seconds"):
        rows.append(judged(f"speedrun_char, {name.replace('_', ' ')}", median_interval([run[name] for run in ours]), None))
    return {"rows": rows, "runs": runs, "loss": LOSS}


def tokens_to_loss(text: Path, seeds: int) -> dict[str, Any]:
    """P3: the rows, and every run."""
    tuning = {
        rate: trained(text, "gpt2_baseline", TUNING_SEED, f"optimizer.lr={rate}", f"trainer.max_steps={TUNING_STEPS}")
        for rate in RATES
    }
    rate = min(RATES, key=lambda one: tuning[one]["loss"])
    runs: dict[str, list[list[dict[str, float]]]] = {}
    for preset, lengths in LENGTHS.items():
        own = [f"optimizer.lr={rate}"] if preset == "gpt2_baseline" else []
        runs[preset] = [
            [trained(text, preset, seed, f"trainer.max_steps={length}", *own) for length in lengths] for seed in range(seeds)
        ]
    needed = {
        preset: [reached(LOSS, {int(run["tokens"]): run["loss"] for run in pair}) for pair in found]
        for preset, found in runs.items()
    }
    ratios = [a / b for a, b in zip(needed["gpt2_baseline"], needed["speedrun_char"], strict=True)]
    rows = [judged("tokens, gpt2_baseline / speedrun_char", ratio_interval(ratios), ">= 2")]
    rows += [judged(f"thousand tokens to {LOSS}, {p}", median_interval([n / 1e3 for n in needed[p]]), None) for p in needed]
    return {"rows": rows, "rate": rate, "tuning": tuning, "runs": runs, "tokens_to_loss": needed, "loss": LOSS}


def _exact(value: float) -> dict[str, float]:
    return dict.fromkeys(("median", "low", "high"), value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="tiny-shakespeare, one file")
    parser.add_argument("--seeds", type=int, default=5, help="of P2; P3 has three")
    parser.add_argument("--only", choices=("P2", "P3"))
    given = parser.parse_args()
    text = given.text.resolve()
    if not text.is_file():
        sys.exit(f"error: --text {given.text} is no file")
    parts = {
        "P2": ("time_to_loss", f"Time to a loss of {LOSS} on tiny-shakespeare", lambda: time_to_loss(text, given.seeds)),
        "P3": ("tokens_to_loss", f"Tokens to a loss of {LOSS} on tiny-shakespeare", lambda: tokens_to_loss(text, 3)),
    }
    for target, (name, title, measured) in parts.items():
        if given.only in (None, target):
            found = measured()
            print(table(found["rows"]))
            print(write(name, {"target": target, "title": title, "threads": torch.get_num_threads(), **found}))


if __name__ == "__main__":
    main()
