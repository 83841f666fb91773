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
from minitx.ablation.records import Cells
from minitx.ablation.render import Block, Drawing, Page, Section, Table
from minitx.ablation.statistics import MIN_PAIRS
from minitx.ablation.tables import gradient_ratios, ladder_sentence, variance_slopes
from minitx.ablation.verdict import Comparison, Findings
from minitx.ablation.wording import condition_text, count_text, number, signed, span
from minitx.config import to_dict


def build_page(findings: Findings, judged: Sequence[Prediction], drawings: Sequence[Drawing], meta: Mapping[str, Any]) -> Page:
    """The twelve parts in the order of the protocol."""
    cells, grid = findings.cells, findings.cells.grid
    counts = (
        f"{len(cells.expected)} expected, {len(cells.done)} done, {len(cells.failed)} failed, "
        f"{len(cells.missing)} missing, {len(cells.unexpected)} that belong to no cell of the grid"
    )
    parts: dict[str, Sequence[Block]] = {
        "Verdict": sections.verdict_part(findings),
        "Three claims apart": sections.claims_part(findings),
        "Figures": list(drawings) or ["No figure: no cell has finished."],
        "Every arm": sections.arms_part(findings),
        "Controls": sections.controls_part(findings),
        "Where the effect disappears": sections.where_part(findings),
        "The stress ladder, entire": sections.ladder_part(findings),
        "What is contradicted": [_contradictions(findings)],
        "Published results": [_published(findings)],
        "Limits": _limits(findings),
        "How to reproduce": _reproduce(cells, meta),
        "The predictions": [_prediction_table(judged) if judged else "The grid brings no predictions."],
    }
    return Page(
        title=f"What 1/√d_k does: the scaling ablation, {grid.name} grid",
        notice="" if grid.confirmatory else f"{grid.name}: not confirmatory.",
        headline=headline(findings),
        facts=[("Cells", counts), ("Date", _known(meta, "date")), ("Commit", _known(meta, "commit"))],
        sections=[Section(title, blocks) for title, blocks in parts.items()],
    )


def headline(findings: Findings) -> list[str]:
    """The verdict in sentences: every endpoint, d_k and init of unscaled − inv_sqrt; text and the ladder beside them."""
    cells = findings.cells
    sentences = ["Recall without 1/√d_k (unscaled − inv_sqrt, paired by seed, negative is harm):"]
    for condition, group in itertools.groupby(findings.main, key=lambda c: c.condition):
        listed = list(group)
        role = "primary" if listed[0].primary else "secondary, not adjusted"
        seeds = count_text(len(listed[0].seeds), "paired seed")
        sentences.append(f"{condition_text(condition)} ({role}, {seeds}): {'; '.join(map(sections.clause, listed))}.")
    if not findings.main:
        sentences.append("INCONCLUSIVE, the grid has no recall study with both arms.")
    for condition in cells.conditions(rec.TEXT):
        best = best_rate_loss(cells, rec.TEXT, condition, rec.loss_of)
        if best:
            pairs, size = count_text(len(best.reference), "paired seed"), f"{signed(best.difference)} nats"
            text = (
                f"Text ({pairs}): validation loss at the best rate {size} ({sections.interval_text(best)}), positive is harm."
            )
            sentences.append(text)
    return [*sentences, ladder_sentence(findings.ladder)]


# --- what others have said


def _contradictions(findings: Findings) -> Table:
    """Common sentences about the scale, held against what was measured."""
    ratios = {width: r for (init, width), r in gradient_ratios(findings.init).items() if init == rec.PRIMARY_INIT}
    listed = ", ".join(f"d_k {w}: {number(r, 2)}" for w, r in ratios.items())
    larger = ratios[max(ratios, key=lambda w: rec.as_number(w) or 0.0)] > 1 if ratios else None
    null = [p.equal for p in findings.null if p.equal is not None]
    equal = f"full_fold: {sum(null)} of {len(null)} loss series bitwise equal to inv_sqrt"
    small = findings.find("E1", *rec.ARMS, init=rec.SMALL_INIT)
    tuned = next((c for c in findings.main if c.primary and c.endpoint == "E1"), None)
    fold = findings.find("E2", rec.REFERENCE, rec.FOLD, init=rec.PRIMARY_INIT)
    rows = [
        (
            "Without the scale, softmax has extremely small gradients at init (Vaswani et al. 2017, §3.2.1).",
            f"‖∇W_Q‖ unscaled / inv_sqrt at step 0, LeCun init: {listed}" if ratios else "not measured",
            _contradicted(larger),
        ),
        ("Without the scale, a large d_k always hurts.", *_contradicted_by(small, "NO HARM")),
        ("A well chosen learning rate makes up for the missing scale.", *_contradicted_by(tuned, "HARM")),
        ("A matched start (init_fold) makes up for the missing scale.", *_contradicted_by(fold, "HARM")),
        (
            "The scale gives the model something that its weights cannot.",
            equal if null else "not measured",
            _contradicted(all(null) if null else None),
        ),
    ]
    return Table("Common sentences and what was measured here.", ("sentence", "measured", "result"), rows)


def _contradicted(answer: bool | None) -> str:
    return "NOT TESTED" if answer is None else "CONTRADICTED" if answer else "NOT CONTRADICTED"


def _contradicted_by(c: Comparison | None, word: str) -> tuple[str, str]:
    """What was measured, and whether a verdict of ``word`` contradicts the sentence."""
    judged = c.judgement.word if c else None
    answer = "INCONCLUSIVE" if judged == "INCONCLUSIVE" else _contradicted(judged == word if judged else None)
    return _measured(c), answer


def _measured(c: Comparison | None) -> str:
    return "not measured" if c is None else f"{c.label}, {condition_text(c.condition)}: {sections.clause(c)}"


def _published(findings: Findings) -> Table:
    slope = variance_slopes(findings.init).get(rec.PRIMARY_INIT)
    variance = f"slope of ln Var on ln d_k in the network {number(slope.estimate, 2)}" if slope else "no init sweep"
    null = [p.equal for p in findings.null if p.equal is not None]
    gap = next((g.slope for g in findings.gaps if g.init in (rec.PRIMARY_INIT, "") and g.slope), None)
    fold = findings.find("E1", rec.FOLD, rec.TREATMENT, init=rec.PRIMARY_INIT)
    harmed = {"HARM": True, "NO HARM": False}.get(fold.judgement.word) if fold else None
    suite = "asserted by the test suite"
    rows = [
        ("R1", "Var(q·k) = d_k (Vaswani et al. 2017, footnote 4)", f"{variance}; the bar is {suite}", "TEST"),
        ("R2, R4, R5, R6", "saturation, condensation, entropy bound, order of gradients", suite, "TEST"),
        (
            "R3",
            "the scale is a parametrisation (T5)",
            f"{sum(null)} of {len(null)} null controls bitwise equal" if null else "no null control",
            _pass(all(null), null),
        ),
        (
            "R7",
            "harmless at small d_k, harmful at large (Britz et al. 2017)",
            f"gap slope a doubling of d_k {signed(gap.estimate)} ({span(gap)})" if gap else "fewer than two d_k or three seeds",
            _pass(None if gap is None or gap.low <= 0 <= gap.high else gap.low > 0, gap),
        ),
        ("R8", "unscaled is worse than init_fold at the largest d_k (T5)", _measured(fold), _pass(harmed, fold)),
        ("R9 to R13", "qk_norm, logit size, 1/d_k, temperature, warm-up", "not part of this grid", "NOT RUN"),
    ]
    return Table("Reported, never asserted; a FAIL is shown.", ("name", "result", "measured", "status"), rows)


def _pass(answer: bool | None, was_run: object) -> str:
    return "NOT RUN" if not was_run else "INCONCLUSIVE" if answer is None else "PASS" if answer else "FAIL"


def _prediction_table(judged: Sequence[Prediction]) -> Table:
    rows = [(p.name, p.statement, p.status, p.evidence) for p in judged]
    caption = "Written down before the runs. INCONCLUSIVE where an interval contains zero."
    return Table(caption, ("name", "prediction", "status", "measured"), rows)


# --- limits, and how to repeat it


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
    edges = sum(r.on_edge for r in findings.arms)
    if edges:
        limits.append(f"{edges} choices of a rate lie on the edge of the grid; the optimum may be outside.")
    if findings.ladder and len({row.rung for row in findings.ladder}) == len(findings.ladder):
        limits.append("The ladder has one run a cell: it shows what can happen, not how often.")
    limits += [
        "The usable window is a share of few rates: it moves in steps, and only within the rates of this grid.",
        "Rates are chosen on the other seeds of the same grid, not on seeds of their own.",
    ]
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
