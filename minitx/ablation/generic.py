"""The report's sentences, figures, tables and limits for any question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from minitx.ablation import curves
from minitx.ablation import wording as say
from minitx.ablation.arms import unsolved
from minitx.ablation.design import RATE, AblationConfig, StudyConfig
from minitx.ablation.intervals import wilson
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.layout import Block, Picture, Section, Table
from minitx.ablation.outcomes import last_mean
from minitx.ablation.predictions import answers
from minitx.ablation.records import worst_accuracy


def sentences(findings: Findings) -> list[str]:
    """Return a sentence for each primary finding. Without primary findings, return one for the first finding of each comparison."""
    first = {(f.comparison.study, f.comparison.arms): f for f in reversed(findings.findings)}
    chosen = [f for f in findings.findings if f.is_primary] or list(reversed(first.values()))
    said = [say.finding_sentence(findings, f) for f in chosen if f.pairs]
    return said or [
        "No comparison of this grid has a pair: two finished runs of the same seed, each at a learning rate that other seeds chose."
    ]


def figure(findings: Findings) -> list[Picture]:
    """Draw the runs of the first judged study against the learning rate."""
    drawn = (picture for study in findings.grid.studies for picture in study_pictures(findings, study))
    return list(islice(drawn, 1))


def sections(findings: Findings) -> list[Section]:
    """Return no sections: a question without a module has only the general ones."""
    return []


def limits(findings: Findings) -> list[str]:
    """Return the limits that apply to this grid."""
    said, results = [], [run.result for run in findings.runs.all if run.status == "done"]
    if results:
        size, steps = (max(result[name] for result in results) for name in ("parameters", "cap"))
        said.append(f"The models are small (up to {size:,} parameters) and the runs are short (up to {steps:,} steps).")
    if any(f.interval is None for f in findings.findings):
        said.append("Some comparisons have fewer than six pairs, which give no verdict.")
    if any(any(f.at_edge) for f in findings.findings):
        said.append("In some comparisons a best rate is the smallest or largest of those tried. The true one may lie outside.")
    if any(not f.is_primary for f in findings.findings):
        said.append("Only the primary comparisons are adjusted for their number. All others are descriptive.")
    return said


# --- the sections of every report


def all_sections(
    findings: Findings, special: Sequence[Section], limits: Sequence[str], meta: Mapping[str, Any]
) -> list[Section]:
    """Return the sections below the first screen. ``special`` comes after the figures."""
    return [
        Section("What was run", [_studies(findings), _not_done(findings)]),
        Section("Verdicts", [_verdicts(findings), _statistics(findings), _never(findings)]),
        Section("Figures", pictures(findings)),
        *special,
        Section("Predictions", [_predictions(findings)]),
        Section("Limits", limits),
        Section("How to reproduce", _reproduce(meta)),
    ]


def counted(findings: Findings) -> str:
    """Return the number of runs by status, in words."""
    total = Counter(str(run.status) for run in findings.runs.all)
    said = ", ".join(f"{total[status]} {status}" for status in ("done", "not run", "failed", "missing") if total[status])
    return f"{say.count_text(total.total(), 'run')}: {said}."


def incomplete(findings: Findings) -> str:
    """Return a sentence if runs failed or are missing, else an empty text."""
    is_whole = not {run.status for run in findings.runs.all} & {"failed", "missing"}
    return "" if is_whole else f"The grid is not complete. {counted(findings)} They are listed below."


def _studies(findings: Findings) -> Table:
    grid, rows = findings.grid, []
    for name, study in grid.studies.items():
        runs = findings.runs.select(name)
        done = [run for run in runs if run.status == "done"]
        factors = {factor: levels for factor, levels in study.factors.items() if factor != RATE}
        levels = [f"{say.words(grid, f)}: {', '.join(say.words(grid, n) for n in names)}" for f, names in factors.items()]
        tuning = f" + {len(study.tune_seeds)} to tune" if study.tune_seeds else ""
        row = {
            "study": say.title(grid, name),
            "arms": ", ".join(say.words(grid, arm) for arm in study.arms),
            "conditions": "; ".join(levels),
            "learning rates": ", ".join(f"{rate:g}" for rate in sorted({float(run.rate) for run in runs if run.rate})),
            "seeds": say.count_text(len(study.seeds), "seed") + tuning,
            "budget": say.budget(done) if done else "",
            "runs done": f"{len(done)} of {len(runs)}",
        }
        rows.append(row)
    return Table(counted(findings), rows, is_open=True)


def _not_done(findings: Findings) -> Table:
    """Every run that is not done, with its reason."""
    grid, rows = findings.grid, []
    for run in sorted(findings.runs.all, key=lambda run: str(run.status)):
        row = {"study": say.title(grid, run.study), "arm": say.words(grid, run.arm), "setting": say.setting_text(grid, run)}
        row |= {"seed": str(run.seed), "status": str(run.status), "reason": run.record.get("reason", "")}
        rows += [row] if run.status != "done" else []
    return Table(f"Runs that failed, are missing, or were left out by a rule ({len(rows)})", rows)


def _verdicts(findings: Findings) -> Table:
    """The primary comparisons; where the grid has none, all."""
    primary = [f for f in findings.findings if f.is_primary]
    caption = "The primary comparisons, which were named before the runs" if primary else "All comparisons"
    return Table(caption, [_verdict(findings.grid, f) for f in primary or findings.findings], is_open=True)


def _verdict(grid: AblationConfig, f: Finding) -> dict[str, str]:
    """A finding in words."""
    return {
        "where": say.where_text(grid, f),
        "what": say.endpoint_text(grid, f),
        "arms": " against ".join(say.words(grid, arm) for arm in reversed(f.comparison.arms)),
        "effect (median)": say.effect_text(f),
        "verdict": f.verdict,
    }


def _statistics(findings: Findings) -> Table:
    """Every finding with everything that its verdict rests on."""
    grid, rows = findings.grid, []
    for f in findings.findings:
        numbers = {
            "pairs": f"{len(f.pairs)} of {len(f.pairs) + len(f.missing)}",
            "interval (coverage)": say.span_text(f.interval) + (f" ({f.coverage:.1%})" if f.coverage is not None else ""),
            "of each seed": "; ".join(say.span_text(pair.effect) for pair in f.pairs),
            "theory": say.number(f.law),
            "p": say.number(f.p),
            "p by Holm": say.number(f.p_adjusted),
            "best rates": "; ".join(", ".join(sorted(set(rates), key=float)) for rates in f.rates if any(rates)),
            "rests on": f.reason,
        }
        rows.append(_verdict(grid, f) | numbers)
    caption = (
        "All comparisons with their statistics: effects of the first arm against the second, paired by seed; intervals of the median by "
        f"order statistics; p of a one-sided sign test that the second arm is worse by more than the margin (× {grid.ratio_margin:g}, or {grid.score_margin:g}). "
        "Those that are not primary are descriptive and not adjusted for their number"
    )
    return Table(caption, rows)


def _never(findings: Findings) -> Table:
    """How many judged runs never solve their task, by learning rate."""
    grid, rows = findings.grid, {}
    timed = [f for f in findings.findings if f.endpoint == "time"]
    for finding, arm in [(f, arm) for f in timed for arm in f.comparison.arms]:
        found = unsolved(grid, findings.runs, finding.comparison.study, arm, finding.condition)
        for rate, (count, total) in found.items():
            where, share = say.where_text(grid, finding), "95 % interval of the share (Wilson)"
            row = {"where": where, "arm": say.words(grid, arm), "learning rate": rate}
            row |= {"never solved it": f"{count} of {total}", share: say.span_text(wilson(count, total))}
            rows[where, arm, rate] = row
    return Table("Runs that do not solve the task within the budget", list(rows.values()))


def _predictions(findings: Findings) -> Table:
    rows = [{"name": a.name, "prediction": a.statement, "status": a.status, "measured": a.evidence} for a in answers(findings)]
    caption = "Written before the runs. UNDECIDED: the runs show neither the prediction nor its opposite."
    return Table(caption, rows, is_open=True)


def _reproduce(meta: Mapping[str, Any]) -> list[Block]:
    rows = []
    for name in ("command", "commit", "date", "hardware", "versions", "wall_seconds"):
        value = meta.get(name) or "not recorded"
        text = ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, Mapping) else str(value)
        rows.append({"what": name.replace("_", " "), "value": f"{value:.0f}" if isinstance(value, float) else text})
    said = "Every run is an ordinary training run. cells.csv has the command that runs it alone; cells.jsonl has its curves."
    return [said, Table("What made this page", rows, is_open=True)]


# --- figures


def pictures(findings: Findings) -> list[Picture]:
    """Return the figures: gap against budget, and the runs of every judged study."""
    found, timed = [], [f for f in findings.findings if f.endpoint == "time" and f.pairs]
    if timed:
        caption = "Share of the judged seeds that solved the task by each step, at the arm's own best learning rate."
        found.append(Picture("budget", "Gap against budget", caption, curves.gap_against_budget(findings, timed)))
    for name in findings.grid.studies:
        found += study_pictures(findings, name)
    return found


def study_pictures(findings: Findings, name: str) -> list[Picture]:
    """Return figures of a study's runs against the learning rate, one for each score."""
    study, runs, found = findings.grid.studies[name], findings.runs.select(name, status="done"), []
    for score in study.scores if runs else ():
        if score != "equal":
            value, y, missing = _drawn_as(findings, study, score)
            drawn = curves.by_rate(findings, name, value, y, missing, log=score == "time")
            said = f"Every finished run is a dot; lines join the medians over seeds. Budget: {say.budget(runs)}."
            found.append(Picture(f"{name}_{score}", f"{say.title(findings.grid, name)}: {y}", said, drawn))
    return found


def _drawn_as(findings: Findings, study: StudyConfig, score: str) -> tuple[curves.Value, str, str]:
    """What a score is drawn as: the value of a run, its name, and the name of the row of runs without one."""
    window = study.stable.window
    if score == "time":
        return partial(curves.steps_to_solve, findings.grid), "steps to solve the task", "not solved"
    if score == "stability" and study.stable.metric == "train_accuracy":
        return (lambda run: worst_accuracy(run.result, window)), f"worst accuracy over {window} steps", "not finite"
    if score == "stability":
        return (lambda run: last_mean(run, "loss", window)), f"mean loss of the last {window} steps", "not finite"
    return (lambda run: run.result[f"val_{score}"]), f"validation {score}", "not finite"
