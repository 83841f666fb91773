"""What the report says of any question: sentences, figures, tables, limits."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from minitx.ablation import figures
from minitx.ablation.arms import unsolved
from minitx.ablation.config import RATE, StudyConfig
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.predictions import answers
from minitx.ablation.records import Run, worst_accuracy
from minitx.ablation.report import Picture, Section, Table
from minitx.ablation.wording import (
    RATIOS,
    budget,
    condition_text,
    count_text,
    effect_text,
    endpoint_text,
    finding_sentence,
    list_text,
    number,
    p_text,
    span_text,
    title,
    where_text,
    words,
)
from minitx.config import to_dict


def sentences(findings: Findings) -> list[str]:
    """A sentence for each primary finding; where the grid has none, for the first of each comparison."""
    first = {(f.comparison.study, f.comparison.arms): f for f in reversed(findings.findings)}
    primary = [f for f in findings.findings if f.is_primary] or [f for f in findings.findings if f in first.values()]
    said = [finding_sentence(findings, f) for f in primary if f.pairs]
    return said or ["No comparison of this grid has two finished runs of the same seed."]


def figure(findings: Findings) -> list[Picture]:
    """The runs of the first judged study against the learning rate."""
    for name, study in findings.grid.studies.items():
        if study.scores and findings.runs.select(name, status="done") and study.scores[0] != "equal":
            return study_pictures(findings, name)[:1]
    return []


def sections(findings: Findings) -> list[Section]:
    """Nothing: every section of a question without a module of its own is general."""
    return []


def limits(findings: Findings) -> list[str]:
    """Limits that hold for every grid."""
    done = [run for run in findings.runs.all if run.status == "done"]
    said = []
    if done:
        largest = max(run.result["parameters"] for run in done)
        said.append(
            f"The models are small (up to {largest:,} parameters) and the runs are short (up to {max(r.result['cap'] for r in done):,} steps)."
        )
    few = sorted({len(f.pairs) for f in findings.findings if f.interval is None})
    if few:
        said.append(f"Some comparisons have {list_text([str(n) for n in few])} pairs. Fewer than six give no verdict.")
    edges = [f for f in findings.findings if any(f.at_edge) and f.endpoint != "largest_rate"]
    if edges:
        said.append(
            f"In {count_text(len(edges), 'comparison')} a best learning rate is the smallest or largest of those tried. The true best rate may lie outside."
        )
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
        Section("How to reproduce", _reproduce(findings, meta)),
    ]


def incomplete(findings: Findings) -> str:
    """A sentence where runs failed or are missing; else empty."""
    count = Counter(run.status for run in findings.runs.all)
    lost = [
        count_text(count[status], "run") + f" {verb}"
        for status, verb in (("failed", "failed"), ("missing", "not finished"))
        if count[status]
    ]
    return f"{list_text(lost)}, of {len(findings.runs.all)}; they are listed below." if lost else ""


def _studies(findings: Findings) -> Table:
    grid, rows = findings.grid, []
    for name, study in grid.studies.items():
        runs = findings.runs.select(name)
        done = [run for run in runs if run.status == "done"]
        levels = [
            f"{words(grid, f)}: {', '.join(words(grid, level) for level in found)}"
            for f, found in study.factors.items()
            if f != RATE
        ]
        rates = ", ".join(f"{float(rate):g}" for rate in sorted({run.rate for run in runs} - {""}, key=float))
        seeds = count_text(len(study.seeds), "seed") + (f" + {len(study.tune_seeds)} to tune" if study.tune_seeds else "")
        arms = ", ".join(words(grid, arm) for arm in study.arms)
        of = f"{len(done)} of {len(runs)}"
        rows.append(
            (title(findings.grid, name), arms, "; ".join(levels) or "–", rates or "–", seeds, budget(done) if done else "–", of)
        )
    headers = ("study", "arms", "conditions", "learning rates", "seeds", "budget", "runs done")
    total = Counter(run.status for run in findings.runs.all)
    said = ", ".join(f"{total[status]} {status}" for status in ("done", "not run", "failed", "missing") if total[status])
    return Table(f"{count_text(len(findings.runs.all), 'run')}: {said}.", headers, rows, is_open=True)


def _not_done(findings: Findings) -> list[Table]:
    """Every run that is not done, by status, with its reason."""
    captions = {
        "failed": "Runs that failed",
        "missing": "Runs without a record",
        "not run": "Runs that a rule of the grid left out",
    }
    found = []
    for status, caption in captions.items():
        runs = [run for run in findings.runs.all if run.status == status]
        rows = [(title(findings.grid, run.study), *_place(findings, run), run.record.get("reason", "")) for run in runs]
        if rows:
            found.append(
                Table(f"{caption} ({len(rows)})", ("study", "arm", "place", "seed", "reason"), rows, is_open=status == "failed")
            )
    return found


def _place(findings: Findings, run: Run) -> tuple[str, str, str]:
    rate = f"learning rate {run.rate}" if run.rate else ""
    where = ", ".join(text for text in (condition_text(findings.grid, run.condition), rate) if text)
    return words(findings.grid, run.arm), where, str(run.seed)


def _verdicts(findings: Findings) -> list[str | Table]:
    """The verdicts in words, and behind a line each the statistics."""
    primary = [f for f in findings.findings if f.is_primary]
    others = [f for f in findings.findings if not f.is_primary]
    blocks: list[str | Table] = []
    if primary:
        blocks.append(_in_words(findings, primary, "The primary comparisons, which were named before the runs"))
    if others:
        caption = "Other comparisons: descriptive, not adjusted for their number"
        blocks.append(_in_words(findings, others, caption, is_open=not primary))
    if findings.findings:
        blocks.append(_statistics(findings))
    return [*blocks, *_never(findings)]


def _in_words(findings: Findings, listed: Sequence[Finding], caption: str, is_open: bool = True) -> Table:
    grid = findings.grid
    rows = [
        (
            where_text(grid, f),
            endpoint_text(grid, f),
            " against ".join(words(grid, arm) for arm in reversed(f.comparison.arms)),
            effect_text(f),
            f.verdict,
        )
        for f in listed
    ]
    return Table(caption, ("where", "what", "arms", "effect (median)", "verdict"), rows, is_open=is_open)


def _never(findings: Findings) -> list[Table]:
    """How many judged runs never solve their task, by learning rate."""
    grid = findings.grid
    rows = []
    for name in (name for name, study in grid.studies.items() if "time" in study.scores):
        places = {(run.arm, tuple(run.condition.items())): run for run in findings.runs.select(name, status="done")}
        for run in places.values():
            for never in unsolved(grid, findings.runs, name, run.arm, run.condition):
                where = (
                    title(grid, name),
                    words(grid, run.arm),
                    condition_text(grid, run.condition),
                    f"{figures.rate_of(run) if not never.rate else float(never.rate):g}",
                )
                rows.append((*where, f"{never.count} of {never.total}", span_text(never.interval)))
    headers = ("study", "arm", "where", "learning rate", "never solved it", "95 % interval of the share (Wilson)")
    return [Table("Runs that do not solve the task within the budget", headers, rows)] if rows else []


def _statistics(findings: Findings) -> Table:
    """Everything that a verdict rests on."""
    rows = []
    for f in findings.findings:
        coverage = f" ({100 * f.coverage:.1f} %)" if f.coverage is not None and f.interval is not None else ""
        rates = "; ".join(", ".join(sorted(set(rates), key=float)) for rates in f.rates if any(rates))
        missing = f", missing {list_text([str(seed) for seed in f.missing])}" if f.missing else ""
        law = "–" if f.law is None else number(f.law)
        pairs = f"{len(f.pairs)}{missing}"
        measured = (effect_text(f), span_text(f.interval) + coverage, law, p_text(f.p), p_text(f.p_adjusted), rates or "–")
        rows.append((where_text(findings.grid, f), endpoint_text(findings.grid, f), pairs, *measured, f.verdict, f.reason))
    headers = (
        "where",
        "what",
        "pairs",
        "median",
        "interval (coverage)",
        "theory",
        "p",
        "p by Holm",
        "best rates",
        "verdict",
        "rests on",
    )
    caption = (
        "Statistics: effects of the second arm against the first, paired by seed; intervals of the median by order statistics; "
        f"p of a one-sided sign test against the margin (× {findings.grid.ratio_margin:g}, or {findings.grid.score_margin:g})"
    )
    return Table(caption, headers, rows)


def _predictions(findings: Findings) -> list[str | Table]:
    rows = [(a.name, a.statement, a.status, a.evidence) for a in answers(findings)]
    caption = "Written before the runs. UNDECIDED: the runs show neither the prediction nor its opposite."
    return [Table(caption, ("name", "prediction", "status", "measured"), rows, is_open=True)] if rows else []


def _reproduce(findings: Findings, meta: Mapping[str, Any]) -> list[str | Table]:
    names = {name: name for name in ("command", "commit", "date", "hardware", "versions")} | {
        "wall_seconds": "wall time in seconds"
    }
    rows = [(shown, _meta_text(meta.get(name))) for name, shown in names.items()]
    grid = json.dumps(to_dict(findings.grid), sort_keys=True)
    rows.append(("SHA-256 of the grid", hashlib.sha256(grid.encode()).hexdigest()))
    names = sorted({*findings.grid.arms, *findings.grid.studies} & set(findings.grid.words))
    known = [(name, words(findings.grid, name)) for name in names]
    said = "Every run is an ordinary training run. cells.csv has the command that runs it alone, and its numbers; cells.jsonl has its curves."
    tables = [Table("What made this page", ("what", "value"), rows, is_open=True)]
    return [said, *tables, *([Table("Names in cells.csv, and their words here", ("name", "words"), known)] if known else [])]


def _meta_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {version}" for name, version in sorted(value.items()))
    if isinstance(value, float):
        return f"{value:.0f}"
    return "not recorded" if value in (None, "") else str(value)


# --- figures


def pictures(findings: Findings) -> list[Picture]:
    """The figures of every judged study, and the pairs of all comparisons."""
    found = []
    timed = [f for f in findings.findings if f.endpoint == "time" and f.pairs]
    if timed:
        caption = "Share of the judged seeds that solved the task by each step, at the arm's own best learning rate. The page's other numbers use the budget at the right end."
        found.append(Picture("budget", "Gap against budget", caption, figures.gap_against_budget(findings, timed)))
    for name, study in findings.grid.studies.items():
        if study.scores and findings.runs.select(name, status="done"):
            found += study_pictures(findings, name)
    groups: dict[str, list[Finding]] = {}
    for f in findings.findings:
        if f.pairs:
            groups.setdefault("ratio" if f.endpoint in RATIOS else f.endpoint, []).append(f)
    for kind, listed in groups.items():
        what = "Ratios" if kind == "ratio" else endpoint_text(findings.grid, listed[0])
        caption = (
            "A dot is a seed, the bar is the interval of the median, the band is the margin, the dashed line is theory. "
            "Arrows: known up to this end only. ×: not known."
        )
        found.append(
            Picture(
                f"pairs_{_file(kind)}",
                f"{what[:1].upper()}{what[1:]}, paired by seed",
                caption,
                figures.paired_effects(findings, listed),
            )
        )
    return found


def _file(name: str) -> str:
    """A name as part of a file's name."""
    plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in name)
    return plain if plain == name else f"{plain}_{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def study_pictures(findings: Findings, name: str) -> list[Picture]:
    """The runs of a study against the learning rate, a figure a score."""
    study, found = findings.grid.studies[name], []
    for score in study.scores:
        plan = _plan(findings, study, score)
        if plan:
            value, y, missing, log = plan
            drawn = figures.by_rate(findings, name, value, y, missing=missing, log=log)
            caption = f"Every finished run is a dot; lines join the medians over seeds. Budget: {budget(findings.runs.select(name, status='done'))}."
            found.append(Picture(f"{_file(name)}_{score}", f"{title(findings.grid, name)}: {y}", caption, drawn))
    return found


def _plan(findings: Findings, study: StudyConfig, score: str) -> tuple[figures.Value, str, str, bool] | None:
    """What a score is drawn as: the value of a run, its name, the name of the row of runs without one, whether the axis is logarithmic."""
    if score == "time":
        return partial(figures.steps_to_solve, findings.grid), "steps to solve the task", "not solved", True
    if score == "stability" and study.stable.metric == "train_accuracy":
        return (
            (lambda run: worst_accuracy(run.result, study.stable.window)),
            f"worst accuracy over {study.stable.window} steps",
            "not finite",
            False,
        )
    if score == "stability":
        return (
            partial(_last_loss, study.stable.window),
            f"mean loss of the last {study.stable.window} steps",
            "not finite",
            False,
        )
    if score in ("loss", "accuracy"):
        return (lambda run: run.result[f"val_{score}"]), f"validation {score}", "not finite", False
    return None


def _last_loss(window: int, run: Run) -> float | None:
    last = run.result["loss"][-window:]
    return None if any(value is None for value in last) else math.fsum(last) / len(last)
