"""How many verdicts of the grid ``changes`` repeat with eight fresh seeds.

    python examples/changes/repeats.py runs/scaling_ablation/changes                                           # what to repeat
    python examples/changes/repeats.py runs/scaling_ablation/changes runs/scaling_ablation/changes_again       # how many did

The first prints the verdicts that are MORE or LESS, and the command of the second draw. It leaves out changes without such a verdict.
The second prints how many verdicts are the same words in both draws, then each.
"""

import json
import shlex
import sys
from pathlib import Path

from minitx.ablation.design import AblationConfig
from minitx.ablation.formatting import sides
from minitx.ablation.grid import RECORD_KEYS, Runs, cells
from minitx.ablation.judge import Contrast, judge
from minitx.cli.compose import compose_grid, find_own_modules
from minitx.training.json_lines import read_json_lines

Verdicts = dict[tuple[str, str, str, str], Contrast]


def verdicts(grid: AblationConfig, folder: Path) -> Verdicts:
    """Return the results of a grid by study, quantity and the two sides of the comparison."""
    runs = Runs.of([cell.place for cell in cells(grid)], read_json_lines(folder / "cells.jsonl", RECORD_KEYS))
    found = {}
    for f in judge(grid, runs).findings:
        first, second = sides(grid, f.comparison, f.condition)
        change = grid.words.get(f.condition["change"], f.condition["change"])
        found[f.comparison.study, f.endpoint.name, f"{change}: {second}", first] = f
    return found


def second_draw(grid: AblationConfig, decided: Verdicts) -> list[str]:
    """Return the overrides of the second draw: it runs the changes of ``decided`` and the plain model, in their studies."""
    wanted = {name: {"plain"} for name in grid.studies}
    for (study, *_), f in decided.items():
        for name in grid.phases(study):
            wanted[name].add(f.condition["change"])
    words = ["experiment=scaling_ablation", "ablation=changes_again"]
    words.append(f"ablation.only=[{', '.join(dict.fromkeys(study for study, *_ in decided))}]")
    for name, study in grid.studies.items():
        without = [change for change in study.factors["change"] if change not in wanted[name]]
        skips = [
            *({key: list(levels) for key, levels in skip.items()} for skip in study.skip),
            *([{"change": without}] if without else []),
        ]
        words.append(f"ablation.studies.{name}.skip={json.dumps(skips)}".replace('"', ""))
    return words


def main(first: str, second: str | None = None) -> tuple[int, int]:
    """Print the verdicts, and return how many of them the second draw repeats, and how many there are."""
    find_own_modules()
    grid = compose_grid(["experiment=scaling_ablation", "ablation=changes"])
    decided = {key: f for key, f in verdicts(grid, Path(first)).items() if f.word in ("MORE", "LESS")}
    again: Verdicts = {}
    if second is not None:
        again = verdicts(compose_grid(["experiment=scaling_ablation", "ablation=changes_again"]), Path(second))
    words = {key: again[key].word if key in again else "not run" for key in decided}
    repeated = sum(words[key] == f.word for key, f in decided.items())
    if second is not None:
        print(f"{repeated} of {len(decided)} verdicts repeat with fresh seeds\n")
    for key, f in decided.items():
        study, quantity, treatment, reference = key
        then = f", then {words[key]}" if second is not None else ""
        print(f"{study}, {quantity}: {treatment} against {reference}: {f.word}, {f.estimate.low:.3g}{then}")
    if second is None and decided:
        print(f"\npython scripts/train.py {shlex.join(second_draw(grid, decided))}")
    return repeated, len(decided)


if __name__ == "__main__":
    main(*sys.argv[1:])
