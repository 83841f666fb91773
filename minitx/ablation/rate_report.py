"""The parts of the report of ``ablation=rate``: the largest stable learning rate of one experiment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from minitx.ablation.curves import running_means
from minitx.ablation.execution import duration
from minitx.ablation.formatting import Text, number, say, seeds_text, span_text
from minitx.ablation.grid import Run
from minitx.ablation.intervals import Span
from minitx.ablation.judge import Findings
from minitx.ablation.report import Picture, Section, Table
from minitx.canvas import label, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDY = "rate"


def sentences(findings: Findings) -> list[Text]:
    """Return the bracket, the definition of stable, and the cost."""
    searches, rule = _searches(findings), findings.grid.studies[STUDY].threshold
    if not searches or rule is None:
        return []
    results = [search.result for search in searches]
    bracket = Span(min(result["low"] for result in results), max(result["high"] for result in results))
    trained = [run for result in results for run in result["runs"]]
    seconds = sum(search.record["seconds"] for search in searches)
    found = "The largest stable learning rate of %(experiment)s is %(bracket)s (%(seeds)s, bracket of %(width)s each). The config has %(rate)s."
    stable = "Stable: all %(steps)s steps are finite, and the mean loss of %(window)s steps never rises by more than %(value)s above its lowest value before. The largest rise of a stable run was %(rise)s. From scratch the loss falls far below the start, so a limit above the start would call many broken runs stable."
    cost = "%(runs)s runs took %(time)s. A stable rate need not be a good one: of the rates tried, %(best)s ends with the lowest loss, %(loss)s."
    best = min(trained, key=lambda run: _last(run, rule.window))
    rises = [run["worst"] for run in trained if run["stable"] and run["worst"] is not None]
    bracket_values = {
        "experiment": findings.grid.studies[STUDY].title,
        "bracket": span_text(bracket),
        "seeds": seeds_text(len(searches)),
        "width": f"{2 ** (0.5**rule.bisections) - 1:.1%}",
        "rate": number(results[0]["first"]),
    }
    rule_values = {"steps": f"{results[0]['cap']:,}", "window": rule.window, "value": number(rule.value)}
    return [
        say(found, **bracket_values),
        say(stable, **rule_values, rise=number(max(rises, default=None))),
        say(cost, runs=len(trained), time=duration(seconds), best=number(best["rate"]), loss=number(_last(best, rule.window))),
    ]


def figure(findings: Findings) -> list[Picture]:
    """Return the loss curves of all runs."""
    searches, rule = _searches(findings), findings.grid.studies[STUDY].threshold
    if not searches or rule is None:
        return []
    caption = say("Training loss, the mean of %(window)s steps. Dashed: runs that failed.", window=rule.window)
    return [Picture("rate", say("Loss at each learning rate"), caption, _curves(searches, rule.window))]


def sections(findings: Findings) -> list[Section]:
    """Return the table of all runs."""
    rule = findings.grid.studies[STUDY].threshold
    assert rule is not None
    rows = [
        {
            "seed": str(search.seed),
            "rate": number(run["rate"]),
            "stable": say("yes" if run["stable"] else "no"),
            "steps": f"{run['steps']:,}",
            "largest rise": number(run["worst"]),
            "last loss": number(_last(run, rule.window)),
        }
        for search in _searches(findings)
        for run in search.result["runs"]
    ]
    caption = say("Every run of the search, by rate; the last loss is the mean of %(window)s steps", window=rule.window)
    return [Section("Runs", [Table(caption, rows)])]


def _searches(findings: Findings) -> list[Run]:
    return findings.runs.select(STUDY, status="done")


def _curves(searches: Iterable[Run], window: int) -> Figure:
    """Draw a line for each run. Small rates are dark, large rates are light."""
    from matplotlib import colormaps

    runs = sorted((run for search in searches for run in search.result["runs"]), key=lambda run: run["rate"])
    rates = sorted({run["rate"] for run in runs})
    chart, axes = panels(1, 1, width=7.6, height=3.6)
    ax = axes[0, 0]
    for run in runs:
        color = colormaps["viridis"](0.9 * rates.index(run["rate"]) / max(len(rates) - 1, 1))
        means = running_means(run["loss"], window)
        look = {"color": color, "linewidth": 1, "linestyle": "-" if run["stable"] else "--", "label": f"{run['rate']:.3g}"}
        ax.plot(range(1, len(means) + 1), means, **look)
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    chart.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=7, title="rate", title_fontsize=7)
    label(ax, "", "step", "training loss")
    return chart


def _last(run: Mapping[str, Any], window: int) -> float:
    """Return the mean loss of the last steps of a run, or infinity for a run that failed."""
    return running_means(run["loss"], window)[-1] if run["stable"] else math.inf
