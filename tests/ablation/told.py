"""Fabricated findings with words, for the tests of the report."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from minitx.ablation.config import LawConfig
from minitx.ablation.judge import Findings, judge
from minitx.ablation.records import Runs
from tests.ablation import made_up
from tests.ablation.made_up import Truth

WORDS = {
    "inv_sqrt": "with the scale",
    "unscaled": "without the scale",
    "full_fold": "scale in the weights",
    "uniform": "plain average",
    "head_dim": "d_k",
    "stability_adamw": "trained on with AdamW",
    "stability_sgd": "trained on with SGD",
    "null": "null control",
}
OPTIONS = {
    "where": {},
    "task": "look up a value",
    "last_row": "",
    "asserted": ["R1"],
    "published": {},
    "ladder": "",
    "settings": {"128": "one head, d_k = 128"},
    "chance": 1 / 16,
    "time": "recall",
    "continued": {
        "AdamW": {"study": "stability_adamw", "shown": "stability_adamw", "rate": "1e-2"},
        "SGD": {"study": "stability_sgd", "shown": "stability_sgd", "rate": "3.2e-2"},
    },
    "attention": {"shown": "stability_adamw", "rate": "1e-2"},
    "text": ["text_stability"],
    "scratch": ["text"],
}
LAWS = {"stability_adamw": "d_k^¼", "stability_sgd": "√d_k"}
STARTS = ("solved", "text_first")
META = {
    "commit": "c0ffee",
    "command": "make ablation",
    "date": "2026-01-02",
    "hardware": "2 cores",
    "versions": {"torch": "2.13"},
    "wall_seconds": 301.5,
}


def findings(
    *names: str,
    truth: Truth | None = None,
    dims: tuple[str, ...] = (),
    seeds: int = 6,
    steps: Mapping[str, int] | None = None,
    **changes: Any,
) -> Findings:
    """The findings of some studies (default all) of the fabricated grid, in words; with some d_k, fewer seeds, other steps if given."""
    found = {name: study for name, study in made_up.studies().items() if not names or name in (*names, *STARTS)}
    for name, study in found.items():
        factors = dict(study.factors)
        if dims and "head_dim" in factors:
            factors["head_dim"] = {dim: factors["head_dim"][dim] for dim in dims}
        base = (f"trainer.max_steps={(steps or {}).get(name, made_up.cap_of(study))}",)
        found[name] = dataclasses.replace(study, factors=factors, seeds=study.seeds[:seeds], base=base)
    grid = made_up.grid(studies=found, **{"words": WORDS, **changes})
    named = []
    for comparison in grid.comparisons:
        law = comparison.law and LawConfig(factor="head_dim", power=comparison.law.power, text=LAWS[comparison.study])
        kept = tuple(c for c in comparison.primary if not dims or c["head_dim"] in dims)
        named.append(dataclasses.replace(comparison, law=law, primary=kept))
    grid = dataclasses.replace(grid, comparisons=tuple(named))
    return judge(grid, made_up.runs(grid, truth))


def of_the_scale(*names: str, options: dict[str, Any] | None = None, **rest: Any) -> Findings:
    """The same, with the module and the options of the scaling ablation."""
    return findings(*names, about="minitx.ablation.scaling", options={**OPTIONS, **(options or {})}, **rest)


def without(findings: Findings, *, keep: Any) -> Findings:
    """Judged again from the runs that ``keep`` accepts; the others have no record."""
    records = [run.record for run in findings.runs.all if run.record and keep(run)]
    places = [run.place for run in findings.runs.all]
    return judge(findings.grid, Runs.of(places, records))  # type: ignore[arg-type]
