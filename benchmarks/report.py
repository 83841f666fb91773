"""Writes the table of docs/dev/performance.md from ``results/*.json``; runs nothing.

python benchmarks/report.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from harness import RESULTS, ROOT, Row, spread, verdict

PAGE = ROOT / "docs" / "dev" / "performance.md"
MOST_SETTINGS = 4
"""A quantity with more settings than this is one line with their range."""

BEGIN, END = "<!-- performance:begin -->\n", "<!-- performance:end -->"
TARGETS = {  # and what measures it
    "P1": ("training throughput over other libraries", "step.py"),
    "P1b": ("a step over its own matrix products", "step.py"),
    "P2": ("time to nanoGPT's loss", "quality.py"),
    "P3": ("tokens to that loss, modern preset over GPT-2's", "quality.py"),
    "P4": ("a step under the trainer over a raw loop", "step.py"),
    "P5": ("fused and chunked attention over math", "attention.py"),
    "P6": ("the choice of a kernel, and masks", "attention.py"),
    "P7": ("ragged encoder training over padding", "attention.py"),
    "P8": ("greedy decoding with a cache", "decode.py"),
    "P9": ("peak memory of a training step", "step.py"),
    "P10": ("from a command to its work, and the loader", "start.py"),
    "P11": ("attention statistics each 50 steps over none", "step.py"),
    "P12": ("the quick ablation", "grid.py"),
    "P13": ("a large text", "data.py"),
    "P14": ("the tests", "grid.py"),
    "P15": ("an adopted Hugging Face model over the same under sdpa", "adopted.py"),
    "P16": ("statistics of an adopted model over eager attention with weights", "adopted.py"),
}


def read(folder: Path = RESULTS) -> list[Row]:
    """Every row of the files of a topic, in the order of the targets, each with its ``run``."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    runs = [run for file in files if "topic" in file for run in file["runs"]]
    rows = [{**one, "run": {**run, "rows": None}} for run in runs for one in run["rows"]]
    return sorted(rows, key=lambda one: list(TARGETS).index(one["target"]))


def table(rows: list[Row]) -> str:
    """A line for every quantity that has a target, with its settings († where the control does not hold), then the runs.

    Settings are left out where they equal those of the line above.
    """
    lines = ["| quantity and target | setting: median (95 %) |", "|---|---|"]
    machines: dict[str, dict[str, list[str]]] = {}  # the runs on each, and the targets of each run
    for target, (about, program) in TARGETS.items():
        quantities: dict[str, list[Row]] = {}
        for row in (row for row in rows if row["target"] == target and row["wanted"]):
            targets = machines.setdefault(machine(row["run"]), {}).setdefault(told(row["run"]), [])
            targets += [target] if target not in targets else []
            quantity = f"{'GPU: ' * ('device' in row['run'])}{row['what']}"
            quantities.setdefault(quantity, []).append(row)
        above: list[str] = []
        for quantity, same in quantities.items():
            settings = [row["label"] for row in same]
            wanted = {sign(row["wanted"]): None for row in same}
            places = ["" if settings == above else f"{setting}: " for setting in settings]
            if len(wanted) > 1:  # each setting has its own target
                places = [f"{row['label']}, {sign(row['wanted'])}: " for row in same]
            else:
                quantity = ", ".join([quantity, *wanted])
            values = [f"{place}{value(row)}" for place, row in zip(places, same, strict=True)]
            if len(same) > MOST_SETTINGS:
                values = [summary(same)]
            lines.append(f"| {target} {quantity} | {'<br>'.join(values)} |")
            above = settings
        if not quantities:
            lines.append(f"| {target} {about} | not recorded yet (`{program}`) |")
    for where, runs in machines.items():
        lines += ["", f"{where}:", "", *(f"- {', '.join(targets)}: {run}" for run, targets in runs.items())]
    return "\n".join(lines) + "\n"


def summary(rows: list[Row]) -> str:
    """The range of the medians of several settings, and how many of them miss the target. ``results/`` has each."""
    medians = [row["median"] for row in rows]
    missed = sum(verdict(row) == "missed" for row in rows)
    settings = f"{len(rows)} settings, from {rows[0]['label']} to {rows[-1]['label']}"
    return f"{settings}: {min(medians):.3f} to {max(medians):.3f}" + (f", **{missed} missed**" if missed else "")


def value(row: Row) -> str:
    """The median with its interval, † where the control does not hold, and whether the target is missed."""
    missed = ", **missed**" if verdict(row) == "missed" else ""
    return f"{spread(row)}{'' if row.get('control_holds', True) else ' †'}{missed}"


def machine(run: Row) -> str:
    """Where a run was recorded."""
    return ", ".join(
        [run.get("device") or run["hardware"], *(f"{name} {version}" for name, version in run["versions"].items())]
    )


def told(run: Row) -> str:
    """When and how a run was recorded."""
    return f"`{run['command']}`, {run['threads']} thread{'s' * (run['threads'] > 1)}; {run['date']}"


def between(text: str, new: str) -> str:
    """A page with what stands between the marks written anew."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + new + END + rest.partition(END)[2]


def sign(wanted: str | None) -> str:
    """Comparisons as people write them."""
    return (wanted or "").replace("<=", "≤").replace(">=", "≥")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(between(PAGE.read_text(encoding="utf-8"), table(read())), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
