"""What the report says of any question: sentences, figures, tables, limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from minitx.ablation import figures
from minitx.ablation import wording as say
from minitx.ablation.arms import unsolved
from minitx.ablation.config import RATE, StudyConfig
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.predictions import answers
from minitx.ablation.records import Run, worst_accuracy
from minitx.ablation.report import Block, Picture, Section, Table


def sentences(findings: Findings) -> list[str]:
    """A sentence for each primary finding; where the grid has none, for the first of each comparison."""
    first = {(f.comparison.study, f.comparison.arms): f for f in reversed(findings.findings)}
    chosen = [f for f in findings.findings if f.is_primary] or list(reversed(first.values()))
    said = [say.finding_sentence(findings, f) for f in chosen if f.pairs]
    return said or ["No comparison of this grid has two finished runs of the same seed."]


def figure(findings: Findings) -> list[Picture]:
    """The runs of the first judged study against the learning rate."""
    drawn = (picture for name in findings.grid.studies for picture in study_pictures(findings, name))
    return [picture for picture in (next(drawn, None),) if picture]


def sections(findings: Findings) -> list[Section]:
    """None: the sections of a question without a module of its own are those of every report."""
    return []


def limits(findings: Findings) -> list[str]:
    """Limits of every grid, each where it applies."""
    said, results = [], [run.result for run in findings.runs.all if run.status == "done"]
    if results:
        size, steps = (max(result[name] for result in results) for name in ("parameters", "cap"))
        said.append(f"The models are small (up to {size:,} parameters) and the runs are short (up to {steps:,} steps).")
    few = sorted({str(len(f.pairs)) for f in findings.findings if f.interval is None})
    if few:
        said.append(f"Some comparisons have {say.list_text(few)} pairs. Fewer than six give no verdict.")
    edges = say.count_text(sum(any(f.at_edge) and f.endpoint != "largest_rate" for f in findings.findings), "comparison")
    if edges != "0 comparisons":
        said.append(f"In {edges} a best rate is the smallest or largest of those tried. The true one may lie outside.")
    if any(not f.is_primary for f in findings.findings):
        said.append("Only the primary comparisons are adjusted for their number. All others are descriptive.")
    return said


# --- the sections of every report


def all_sections(
    findings: Findings, special: Sequence[Section], limits: Sequence[str], meta: Mapping[str, Any]
) -> list[Section]:
    """The page below its first screen; ``special`` comes after the figures."""
    return [
        Section("What was run", [_studies(findings), *_not_done(findings)]),
        Section("Verdicts", _verdicts(findings)),
        Section("Figures", pictures(findings)),
        *special,
        Section("Predictions", _predictions(findings)),
        Section("Limits", limits),
        Section("How to reproduce", _reproduce(meta)),
    ]


def incomplete(findings: Findings) -> str:
    """A sentence where runs failed or are missing; else empty."""
    count = Counter(run.status for run in findings.runs.all)
    lost = [f"{say.count_text(count['failed'], 'run')} failed"] if count["failed"] else []
    lost += [f"{say.count_text(count['missing'], 'run')} not finished"] if count["missing"] else []
    return f"{say.list_text(lost)}, of {len(findings.runs.all)}; they are listed below." if lost else ""


def _studies(findings: Findings) -> Table:
    grid, rows = findings.grid, []
    for name, study in grid.studies.items():
        runs = findings.runs.select(name)
        done = [run for run in runs if run.status == "done"]
        factors = {factor: levels for factor, levels in study.factors.items() if factor != RATE}
        levels = [f"{say.words(grid, f)}: {', '.join(say.words(grid, n) for n in names)}" for f, names in factors.items()]
        rates = [f"{rate:g}" for rate in sorted({float(run.rate) for run in runs if run.rate})]
        seeds = say.count_text(len(study.seeds), "seed") + (f" + {len(study.tune_seeds)} to tune" if study.tune_seeds else "")
        arms = ", ".join(say.words(grid, arm) for arm in study.arms)
        budget = say.budget(done) if done else "–"
        places = ("; ".join(levels) or "–", ", ".join(rates) or "–", seeds, budget)
        rows.append((say.title(grid, name), arms, *places, f"{len(done)} of {len(runs)}"))
    total = Counter(str(run.status) for run in findings.runs.all)
    said = ", ".join(f"{total[status]} {status}" for status in ("done", "not run", "failed", "missing") if total[status])
    headers = ("study", "arms", "conditions", "learning rates", "seeds", "budget", "runs done")
    return Table(f"{say.count_text(total.total(), 'run')}: {said}.", headers, rows, is_open=True)


NOT_DONE = {"failed": "Runs that failed", "missing": "Runs without a record", "not run": "Runs that a rule left out"}


def _not_done(findings: Findings) -> list[Table]:
    """Every run that is not done, by status, with its reason."""
    grid, found = findings.grid, []
    for status, caption in NOT_DONE.items():
        rows = []
        for run in findings.runs.all:
            rate = f"learning rate {run.rate}" if run.rate else ""
            where = ", ".join(text for text in (say.condition_text(grid, run.condition), rate) if text)
            place = (say.title(grid, run.study), say.words(grid, run.arm), where, str(run.seed))
            rows += [(*place, run.record.get("reason", ""))] if run.status == status else []
        if rows:
            headers = ("study", "arm", "place", "seed", "reason")
            found.append(Table(f"{caption} ({len(rows)})", headers, rows, is_open=status == "failed"))
    return found


def _verdicts(findings: Findings) -> list[Block]:
    """The verdicts in words, and behind a line each the other comparisons, the statistics, and runs that never solve."""
    primary = [f for f in findings.findings if f.is_primary]
    others = [f for f in findings.findings if not f.is_primary]
    first = _in_words(findings, primary, "The primary comparisons, which were named before the runs", is_open=True)
    second = _in_words(findings, others, "Other comparisons, descriptive, not adjusted for their number", is_open=not primary)
    return [table for table in (first, second, _statistics(findings), _never(findings)) if table.rows]


def _in_words(findings: Findings, listed: Sequence[Finding], caption: str, *, is_open: bool) -> Table:
    grid, rows = findings.grid, []
    for f in listed:
        arms = " against ".join(say.words(grid, arm) for arm in reversed(f.comparison.arms))
        rows.append((say.where_text(grid, f), say.endpoint_text(grid, f), arms, say.effect_text(f), f.verdict))
    return Table(caption, ("where", "what", "arms", "effect (median)", "verdict"), rows, is_open=is_open)


def _statistics(findings: Findings) -> Table:
    """Everything that a verdict rests on."""
    grid, rows = findings.grid, []
    for f in findings.findings:
        interval = say.span_text(f.interval) + (f" ({100 * f.coverage:.1f} %)" if f.coverage is not None else "")
        rates = "; ".join(", ".join(sorted(set(rates), key=float)) for rates in f.rates if any(rates)) or "–"
        pairs = f"{len(f.pairs)}" + (f", missing {say.list_text([str(seed) for seed in f.missing])}" if f.missing else "")
        law = "–" if f.law is None else say.number(f.law)
        numbers = (pairs, say.effect_text(f), interval, law, say.p_text(f.p), say.p_text(f.p_adjusted), rates)
        rows.append((say.where_text(grid, f), say.endpoint_text(grid, f), *numbers, f.verdict, f.reason))
    measured = ("pairs", "median", "interval (coverage)", "theory", "p", "p by Holm", "best rates")
    caption = (
        "Statistics: effects of the second arm against the first, paired by seed; intervals of the median by order statistics; "
        f"p of a one-sided sign test against the margin (× {grid.ratio_margin:g}, or {grid.score_margin:g})"
    )
    return Table(caption, ("where", "what", *measured, "verdict", "rests on"), rows)


def _never(findings: Findings) -> Table:
    """How many judged runs never solve their task, by learning rate."""
    grid, rows = findings.grid, []
    for name in (name for name, study in grid.studies.items() if "time" in study.scores):
        runs = findings.runs.select(name, status="done")
        for run in {(run.arm, tuple(run.condition.items())): run for run in runs}.values():
            place = (say.title(grid, name), say.words(grid, run.arm), say.condition_text(grid, run.condition))
            for never in unsolved(grid, findings.runs, name, run.arm, run.condition):
                rows.append((*place, never.rate, f"{never.count} of {never.total}", say.span_text(never.interval)))
    headers = ("study", "arm", "where", "learning rate", "never solved it", "95 % interval of the share (Wilson)")
    return Table("Runs that do not solve the task within the budget", headers, rows)


def _predictions(findings: Findings) -> list[Block]:
    rows = [(a.name, a.statement, a.status, a.evidence) for a in answers(findings)]
    caption = "Written before the runs. UNDECIDED: the runs show neither the prediction nor its opposite."
    return [Table(caption, ("name", "prediction", "status", "measured"), rows, is_open=True)] if rows else []


def _reproduce(meta: Mapping[str, Any]) -> list[Block]:
    rows = []
    for name in ("command", "commit", "date", "hardware", "versions", "wall_seconds"):
        value = meta.get(name) or "not recorded"
        text = ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, Mapping) else str(value)
        rows.append((name.replace("_", " "), f"{value:.0f}" if isinstance(value, float) else text))
    said = "Every run is an ordinary training run. cells.csv has the command that runs it alone; cells.jsonl has its curves."
    return [said, Table("What made this page", ("what", "value"), rows, is_open=True)]


# --- figures


def pictures(findings: Findings) -> list[Picture]:
    """Gap against budget, the runs of every judged study, and the pairs of every comparison."""
    found, timed = [], [f for f in findings.findings if f.endpoint == "time" and f.pairs]
    if timed:
        caption = "Share of the judged seeds that solved the task by each step, at the arm's own best learning rate."
        found.append(Picture("budget", "Gap against budget", caption, figures.gap_against_budget(findings, timed)))
    for name in findings.grid.studies:
        found += study_pictures(findings, name)
    kinds = {"ratio" if f.endpoint in say.RATIOS else f.endpoint: f for f in findings.findings if f.pairs}
    caption = (
        "A dot is a seed, the dark band is the interval of the median, the light one the margin, the dashed line theory. "
        "An arrow: known up to this end only. ×: not known."
    )
    for kind, example in kinds.items():
        endpoints = say.RATIOS if kind == "ratio" else (kind,)
        listed = [f for f in findings.findings if f.endpoint in endpoints and f.pairs]
        what = "Ratios" if kind == "ratio" else say.endpoint_text(findings.grid, example)
        drawn = figures.paired_effects(findings, listed)
        found.append(Picture(f"pairs_{kind}", f"{what}, paired by seed", caption, drawn))
    return found


def study_pictures(findings: Findings, name: str) -> list[Picture]:
    """The runs of a study against the learning rate, a figure a score."""
    study, runs, found = findings.grid.studies[name], findings.runs.select(name, status="done"), []
    for score in study.scores if runs else ():
        if score != "equal":
            value, y, missing = _drawn_as(findings, study, score)
            drawn = figures.by_rate(findings, name, value, y, missing, log=score == "time")
            said = f"Every finished run is a dot; lines join the medians over seeds. Budget: {say.budget(runs)}."
            heading = f"{say.title(findings.grid, name)}: {y}"
            found.append(Picture(f"{name}_{score}", heading, said, drawn))
    return found


def _drawn_as(findings: Findings, study: StudyConfig, score: str) -> tuple[figures.Value, str, str]:
    """What a score is drawn as: the value of a run, its name, and the name of the row of runs without one."""
    window = study.stable.window
    if score == "time":
        return partial(figures.steps_to_solve, findings.grid), "steps to solve the task", "not solved"
    if score == "stability" and study.stable.metric == "train_accuracy":
        return (lambda run: worst_accuracy(run.result, window)), f"worst accuracy over {window} steps", "not finite"
    if score == "stability":
        return partial(_last_loss, window), f"mean loss of the last {window} steps", "not finite"
    return (lambda run: run.result[f"val_{score}"]), f"validation {score}", "not finite"


def _last_loss(window: int, run: Run) -> float | None:
    last = run.result["loss"][-window:]
    return None if None in last else math.fsum(last) / len(last)
