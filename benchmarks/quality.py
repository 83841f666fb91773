"""P2 and P3: how fast, and in how many tokens, the modern preset comes to the loss of GPT-2's recipe on a text, on a CPU.

    python benchmarks/quality.py --text FILE          # tiny-shakespeare, one file of 1,115,394 characters; 25 minutes on two cores

Every run is kept in runs/quality/ under what its config, the code's commit and the machine's threads are, so that a benchmark that was
stopped resumes.

P2. ``experiment=gpt2_baseline`` (0.80 million parameters, 2,000 steps of 12 x 64 characters: nanoGPT's recipe for a CPU) over
``experiment=speedrun_char``, each as ``scripts/train.py`` runs it, in a separate process, seed by seed in turn. Training seconds leave
out the validation. The loss is over the whole validation split, the last tenth of the text.

P3. Both presets at two lengths of training around the loss; a line through loss against the logarithm of tokens says, seed by seed, where
it is reached. GPT-2's rate is chosen among four on a separate seed; the modern preset's rates were chosen on another text, the
King James Bible, on one seed (docs/dev/decisions.md).
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import ROOT, Row, commit, exact, measure, median_interval, parser, ratio_interval, row, seconds_of

from minitx.cli.compose import compose_config
from minitx.config import to_dict
from minitx.training.metrics_csv import read_metrics

KEPT = ROOT / "runs" / "quality"
LOSS = 1.885
OURS, THEIRS = "speedrun_char", "gpt2_baseline"
RATES, TUNING_SEED, TUNING_STEPS = ("1e-3", "2e-3", "4e-3", "8e-3"), 1000, 900
LENGTHS = {THEIRS: (900, 1500), OURS: (180, 250)}
NAME = "tiny-shakespeare"


def trained(text: Path, preset: str, seed: int, *more: str) -> dict[str, float]:
    """One run: its last validation loss, training and process seconds, and tokens; kept, and read where it was kept."""
    data = ["data=text", f"data.path='{text}'", "data.context_len=64"]  # as in the presets
    options = [f"experiment={preset}", *data, f"seed={seed}", "callbacks.progress=false", *more]
    said = json.dumps([to_dict(compose_config(options)), commit(), torch.__version__, torch.get_num_threads()], sort_keys=True)
    kept = KEPT / f"{preset}-{seed}-{hashlib.sha256(said.encode()).hexdigest()[:16]}.json"
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(process(options, seed)))
    found: dict[str, float] = json.loads(kept.read_text())
    print(f"    {preset} {' '.join(more)} {found}", flush=True)
    return found


def process(options: list[str], seed: int) -> dict[str, float]:
    """What ``train.py`` makes of ``options``."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "scripts/train.py", *options, f"output_dir={run}"]
        whole = seconds_of(lambda: subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True))
        rows = read_metrics(run / "metrics.csv")
    loss = [one["val_loss"] for one in rows if one["val_loss"] is not None][-1]
    last = [one for one in rows if one["seconds"] is not None][-1]
    found = {"seed": seed, "loss": loss, "training seconds": last["seconds"], "process seconds": whole}
    return found | {"tokens": last["tokens"], "steps": last["step"]}


def reached(loss: float, points: dict[int, float]) -> float:
    """How many tokens have ``loss``, on the line through (ln tokens, loss) of the shortest and the longest run."""
    (x0, y0), (x1, y1) = ((math.log(tokens), points[tokens]) for tokens in (min(points), max(points)))
    return math.exp(x0 + (y0 - loss) * (x1 - x0) / (y0 - y1))


def time_to_loss(text: Path, seeds: int) -> Iterator[Row]:
    """P2."""
    runs: dict[str, list[dict[str, float]]] = {THEIRS: [], OURS: []}
    for seed in range(seeds):
        for preset in list(runs)[:: 1 if seed % 2 == 0 else -1]:
            runs[preset].append(trained(text, preset, seed))
    label = f"{NAME}, {seeds} seeds"
    for name, wanted in (("training seconds", ">= 7"), ("process seconds", ">= 5"), ("tokens", None)):
        values = {preset: [run[name] for run in runs[preset]] for preset in runs}
        ratios = ratio_interval([a / b for a, b in zip(values[THEIRS], values[OURS], strict=True)])
        yield row("P2", f"{name}, {THEIRS} over {OURS}", label, ratios, wanted, runs=values)
    for preset, wanted in ((OURS, f"<= {LOSS}"), (THEIRS, None)):
        losses = [run["loss"] for run in runs[preset]]
        yield row("P2", f"loss of {preset}, the worst seed", label, exact(max(losses)), wanted, "lower", losses=losses)


def tokens_to_loss(text: Path, seeds: int) -> Iterator[Row]:
    """P3."""
    length = f"trainer.max_steps={TUNING_STEPS}"
    tuning = {rate: trained(text, THEIRS, TUNING_SEED, f"optimizer.lr={rate}", length)["loss"] for rate in RATES}
    rate = min(tuning, key=lambda one: tuning[one])
    needed: dict[str, list[float]] = {}
    for preset, lengths in LENGTHS.items():
        own = [f"optimizer.lr={rate}"] if preset == THEIRS else []
        runs = [[trained(text, preset, seed, f"trainer.max_steps={n}", *own) for n in lengths] for seed in range(seeds)]
        needed[preset] = [reached(LOSS, {int(run["tokens"]): run["loss"] for run in pair}) for pair in runs]
    ratios = ratio_interval([a / b for a, b in zip(needed[THEIRS], needed[OURS], strict=True)])
    label, what = f"{NAME}, {seeds} seeds", f"tokens to a loss of {LOSS}, {THEIRS} over {OURS}"
    yield row("P3", what, label, ratios, ">= 4", rate=rate, tuning=tuning)
    for preset, tokens in needed.items():
        thousands = median_interval([n / 1e3 for n in tokens])
        yield row("P3", f"thousand tokens to that loss, {preset}", label, thousands, None, "lower")


def main() -> None:
    parse = parser(__doc__, ("P2", "P3"))
    parse.add_argument("--text", type=Path, required=True, help="tiny-shakespeare, one file")
    given = parse.parse_args()
    if not (text := given.text.resolve()).is_file():
        sys.exit(f"error: --text {given.text} is not a file")
    measure("quality", given, {"P2": lambda: time_to_loss(text, 5), "P3": lambda: tokens_to_loss(text, 3)})


if __name__ == "__main__":
    main()
