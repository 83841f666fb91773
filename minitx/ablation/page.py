"""The report put together: the headline, the twelve parts in order, and those that judge, limit or say how to repeat."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from minitx.ablation import records as rec
from minitx.ablation import sections
from minitx.ablation.effects import best_rate_loss
from minitx.ablation.predictions import Prediction
from minitx.ablation.published import contradictions, published
from minitx.ablation.records import Cells
from minitx.ablation.render import Block, Drawing, Page, Section, Table
from minitx.ablation.statistics import ALPHA, MIN_PAIRS
from minitx.ablation.tables import budget_text, ladder_sentence
from minitx.ablation.verdict import Comparison, Findings
from minitx.ablation.wording import condition_text, count_text, number, signed
from minitx.config import to_dict


def build_page(findings: Findings, judged: Sequence[Prediction], drawings: Sequence[Drawing], meta: Mapping[str, Any]) -> Page:
    """The twelve parts in the order of the protocol; those that speak of the scale where the grid does."""
    cells, grid = findings.cells, findings.cells.grid
    counts = (
        f"{len(cells.expected)} expected, {len(cells.done)} done, {len(cells.failed)} failed, "
        f"{len(cells.missing)} missing, {len(cells.unexpected)} that belong to no cell of the grid"
    )
    scale = findings.about_the_scale
    parts: dict[str, Sequence[Block]] = {
        "Verdict": sections.verdict_part(findings),
        "Start, learning rates and scores": sections.claims_part(findings) if scale else (),
        "Figures": list(drawings) or ["No figure: no cell has finished."],
        "Every arm": sections.arms_part(findings),
        "Controls": sections.controls_part(findings) if scale else (),
        "Where the arms differ after these steps": sections.where_part(findings),
        "The stress ladder, entire": sections.ladder_part(findings) if scale else (),
        "What is contradicted": [contradictions(findings)] if scale else (),
        "Published results": [published(findings)] if scale else (),
        "Limits": _limits(findings),
        "How to reproduce": _reproduce(cells, meta),
        "The predictions": [_prediction_table(judged) if judged else "The grid brings no predictions."],
    }
    return Page(
        title=f"{grid.question}: {grid.name} grid",
        notice="" if grid.confirmatory else f"{grid.name}: not confirmatory.",
        headline=headline(findings),
        facts=[("Cells", counts), ("Date", _known(meta, "date")), ("Commit", _known(meta, "commit"))],
        sections=[Section(title, blocks) for title, blocks in parts.items() if blocks],
    )


def headline(findings: Findings) -> list[str]:
    """The verdict in sentences: every comparison that the grid is about, under every condition; text and the ladder beside."""
    cells = findings.cells
    sentences = budget_sentences(cells)
    for (study, arms), of_arms in itertools.groupby(findings.main, key=lambda c: (c.study, c.arms)):
        listed = list(of_arms)
        sign = "negative" if listed[0].better > 0 else "positive"
        rule = f" (paired by seed; {sign} is harm)" if not any(f"{sign} is harm" in sentence for sentence in sentences) else ""
        clauses = [
            _under_condition(list(group), findings)
            for _, group in itertools.groupby(listed, key=lambda c: (c.condition, c.primary))
        ]
        head = f"{study}, {arms[1]} − {arms[0]}{rule}:"
        sentences += [head, *clauses] if len(clauses) > 1 else [f"{head} {clauses[0]}"]
    if not findings.main:
        sentences.append("INCONCLUSIVE, the grid compares no two arms.")
    compared = {c.study for c in findings.main}
    for condition in cells.conditions(rec.TEXT) if rec.TEXT not in compared else ():
        best = best_rate_loss(cells, condition)
        if best:
            pairs, size = count_text(len(best.reference), "paired seed"), f"{signed(best.difference)} nats"
            interval = sections.interval_text(best)
            sentences.append(f"text ({pairs}): validation loss at the best rate {size} ({interval}), positive is harm.")
    return [*sentences, *([ladder_sentence(findings.ladder)] if findings.ladder else [])]


def budget_sentences(cells: Cells) -> list[str]:
    """After how many steps the scores were taken, and what that means; none where no judged run has finished."""
    steps = budget_text(cells)
    meaning = "they say how far a run has come by then, not whether it can learn the task."
    return [f"Scores after a fixed number of steps ({steps}): {meaning}"] if steps else []


def _under_condition(listed: Sequence[Comparison], findings: Findings) -> str:
    """The endpoints under one condition, and the measures beside them."""
    first = listed[0]
    role = f"{'primary' if first.primary else 'secondary, not adjusted'}, {count_text(len(first.seeds), 'paired seed')}"
    where = f"{condition_text(first.condition)} ({role})" if first.condition else role
    said = "; ".join(map(sections.clause, listed))
    place = (first.study, first.arms, first.condition)
    measured = [c for c in findings.comparisons if (c.study, c.arms, c.condition) == place and c.endpoint not in ("E1", "E2")]
    beside = f" Secondary: {'; '.join(map(sections.clause, measured))}." if measured else ""
    return f"{where}: {said}.{beside}"


# --- predictions, limits, and how to repeat it


def _prediction_table(judged: Sequence[Prediction]) -> Table:
    rows = [(p.name, p.statement, p.status, p.evidence) for p in judged]
    caption = "Written down before the runs. INCONCLUSIVE where the runs show neither the prediction nor its opposite."
    return Table(caption, ("name", "prediction", "status", "measured"), rows)


def _limits(findings: Findings) -> list[Block]:
    cells, grid = findings.cells, findings.cells.grid
    limits = [] if grid.confirmatory else [f"The {grid.name} grid is exploratory: it was not run to confirm."]
    if cells.done:
        size = max(r["result"]["num_parameters"] for r in cells.done.values())
        steps = {s: max(r["result"]["steps"] for r in cells.select(s)) for s in sorted({k.study for k in cells.done})}
        listed = ", ".join(f"{study} {count}" for study, count in steps.items())
        limits.append(f"Small models (up to {size:,} parameters) and short runs ({listed} steps).")
    pairs = min((len(c.seeds) for c in findings.main), default=MIN_PAIRS)
    if pairs < MIN_PAIRS:
        limits.append(f"As few as {count_text(pairs, 'paired seed')}: under {MIN_PAIRS} no verdict is given.")
    family = [c for c in findings.comparisons if c.primary]
    seeds = max((len(c.seeds) for c in family), default=0)
    floor = len(family) * 0.5**seeds
    if seeds >= MIN_PAIRS and floor >= ALPHA:
        limits.append(
            f"With {count_text(seeds, 'paired seed')} and {len(family)} primary endpoints no adjusted p can fall below "
            f"{floor:.4f}: this grid cannot find harm."
        )
    edges = sum(r.on_edge for r in findings.arms)
    if edges:
        limits.append(f"{edges} choices of a rate lie on the edge of the grid; the optimum may be outside.")
    if findings.ladder and len({row.rung for row in findings.ladder}) == len(findings.ladder):
        limits.append("The ladder has one seed a rung: it shows what can happen, not how often.")
    if any(c.endpoint == "E2" for c in findings.main):
        limits.append(
            "The usable window is the share of this grid's few rates that solve the task within these steps. Where an arm solves it "
            "at none, the difference is the other arm's share alone."
        )
    reused = sorted(
        {c.study for c in findings.main if not cells.planned(c.study).tune_seeds and len(cells.levels(c.study, rec.RATE)) > 1}
    )
    if reused:
        studies = f" ({', '.join(reused)})" if len(reused) < len({c.study for c in findings.main}) else ""
        limits.append(f"Rates are chosen on the other seeds of the same grid, not on seeds of their own{studies}.")
    return [" ".join(limits)]


def _known(meta: Mapping[str, Any], name: str) -> str:
    value = meta.get(name)
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in sorted(value.items())) or "not recorded"
    return "not recorded" if value in (None, "") else str(value)


def _reproduce(cells: Cells, meta: Mapping[str, Any]) -> list[Block]:
    text = json.dumps(to_dict(cells.grid), sort_keys=True)
    seconds = rec.finite(meta.get("wall_seconds"))
    rows = [
        ("command", _known(meta, "command")),
        ("commit", _known(meta, "commit")),
        ("grid hash (SHA-256)", hashlib.sha256(text.encode()).hexdigest()),
        ("versions", _known(meta, "versions")),
        ("hardware", _known(meta, "hardware")),
        ("date", _known(meta, "date")),
        ("wall time", "not recorded" if seconds is None else f"{number(seconds, 0)} s"),
    ]
    note = "Each cell is an ordinary training run; cells.csv holds the command that runs it alone, and its result."
    return [Table("What made this page.", ("what", "value"), rows), note]
