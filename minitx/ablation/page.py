"""What the page says: the headline and the twelve parts of the report, as blocks of text, tables and figures.

Every sentence and number is computed from the findings; what the grid does not have is named as missing, never left
out. How the blocks look is the business of ``report``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from statistics import mean, median
from typing import NamedTuple

from minitx.ablation import analysis as an
from minitx.ablation.analysis import Cells, condition_text
from minitx.ablation.figures import Drawing
from minitx.ablation.statistics import fisher_p, number, p_text, signed, span
from minitx.ablation.verdict import (
    ENDPOINTS,
    PRIMARY_INIT,
    SMALL_INIT,
    Comparison,
    Findings,
    Prediction,
    gradient_ratios,
    variance_slopes,
)

ARMS = (an.REFERENCE, an.TREATMENT)


class Table(NamedTuple):
    """Rows of text; ``folded`` hides a long table behind its caption in HTML."""

    caption: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    folded: bool = False


Block = str | Table | Drawing


class Section(NamedTuple):
    title: str
    blocks: Sequence[Block]


class Page(NamedTuple):
    """A report: the ``headline`` sentences say it all, ``notice`` stands above, ``facts`` are label and value pairs."""

    title: str
    notice: str
    headline: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]


# --- the headline


def headline(findings: Findings) -> list[str]:
    """The verdict in sentences: every endpoint, d_k and init of unscaled − inv_sqrt; text and the ladder beside them."""
    cells = findings.cells
    opening = "" if cells.grid.confirmatory else f"{cells.grid.name}: not confirmatory. "
    sentences = [f"{opening}Recall without 1/√d_k (unscaled − inv_sqrt, paired by seed, negative is harm):"]
    for condition, group in itertools.groupby(main(findings), key=lambda c: c.condition):
        listed = list(group)
        role = "primary" if listed[0].primary else "secondary, not adjusted"
        seeds = _count(len(listed[0].seeds), "paired seed")
        sentences.append(f"{condition_text(condition)} ({role}, {seeds}): {'; '.join(map(clause, listed))}.")
    if len(sentences) == 1:
        sentences.append("INCONCLUSIVE, the grid has no recall study with both arms.")
    for condition in cells.conditions(an.TEXT):
        best = an.best_rate_effect(cells, an.TEXT, condition, an.loss_of)
        if best:
            size, pairs = f"{signed(best.difference)} nats ({_interval(best)})", _count(len(best.reference), "paired seed")
            sentences.append(f"Text ({pairs}): validation loss at the best rate {size}, positive is harm.")
    return [*sentences, an.ladder_sentence(findings.ladder)]


def _count(number_of: int, word: str) -> str:
    return f"{number_of} {word}" + ("" if number_of == 1 else "s")


def clause(c: Comparison) -> str:
    if c.effect is None:
        return f"{ENDPOINTS[c.endpoint]}: {c.judgement.word} ({c.judgement.reason})"
    size = f"{signed(c.effect.difference)} ({_interval(c.effect)})"
    return f"{ENDPOINTS[c.endpoint]} {size}: {c.judgement.word}"


def _interval(effect: an.Effect) -> str:
    return "one pair, no interval" if effect.interval is None else f"95 % {span(effect.interval)}"


def main(findings: Findings) -> list[Comparison]:
    """Unscaled − inv_sqrt, the primary condition first."""
    return [c for c in findings.comparisons if (c.reference, c.treatment) == ARMS]


# --- the twelve parts


def _comparison_table(caption: str, found: Sequence[Comparison], named: bool = False) -> Table:
    """One row a comparison; ``named`` says which arms are compared, where that differs from row to row."""
    rows = []
    for c in found:
        e = c.effect
        scores = (signed(e.difference), span(e.interval), _centre(e.reference), _centre(e.treatment)) if e else ("–",) * 4
        p_harm = p_text(c.p_harm) + (f", adjusted {p_text(c.p_adjusted)}" if c.p_adjusted is not None else "")
        where = condition_text(c.condition) + (" (primary)" if c.primary else "")
        what = (*((c.label,) if named else ()), c.endpoint, where, c.judgement.word)
        rows.append((*what, *scores, str(len(c.seeds)), p_harm, p_text(c.p_equal)))
    arms = ("reference", "treatment") if named else ARMS
    headers = (*(("arms",) if named else ()), "endpoint", "condition", "verdict", "difference", "95 % interval")
    tests = (*(f"{arm} mean (median)" for arm in arms), "seeds", "p of harm", "p of equality")
    return Table(caption, (*headers, *tests), rows, folded=named)


def verdict_part(findings: Findings) -> list[Block]:
    cells, mine = findings.cells, main(findings)
    blocks: list[Block] = []
    if mine:
        blocks.append(
            _comparison_table(
                "Unscaled − inv_sqrt on recall, paired by seed; negative is harm. E1: accuracy at each arm's own best rate. "
                "E2: usable window, the share of the rates that solve recall. p of harm: exact sign-flip, one-sided; "
                f"adjusted by Holm over the primary family (m = 2). p of equality: TOST within ±{cells.grid.margin:g}. "
                "Other rows are secondary: the same statistics, not adjusted.",
                mine,
            )
        )
        open_ones = [c for c in mine if c.judgement.word == "INCONCLUSIVE"]
        reasons = (f"{c.endpoint} at {condition_text(c.condition)}: {c.judgement.reason}" for c in open_ones)
        blocks += [f"INCONCLUSIVE, {reason}." for reason in reasons]
    else:
        blocks.append("The grid has no recall study with both arms, so there is no verdict.")
    lost = [(str(k), "failed", str(r["error"] or "no reason was recorded")) for k, r in cells.failed.items()]
    lost += [(str(k), "missing", "no record came back") for k in cells.missing]
    lost += [(str(k), "unexpected", "no cell of this grid; left out of every table") for k in cells.unexpected]
    if lost:
        blocks.append(Table("Cells that are not in the tables, and why.", ("cell", "status", "reason"), lost))
    else:
        blocks.append("Every expected cell finished; none was left out.")
    return blocks


def claims_part(findings: Findings) -> list[Block]:
    blocks: list[Block] = [_init_claim(findings)]
    if findings.init:
        blocks.append(_init_table(findings))
    windows = [c for c in main(findings) if c.endpoint == "E2" and c.effect]
    listed = "; ".join(f"{condition_text(c.condition)} {clause(c)}" for c in windows) or "not measured"
    blocks.append(f"Optimisation. Usable window: {listed}. {an.ladder_sentence(findings.ladder)}")
    finals = [c for c in main(findings) if c.endpoint == "E1" and c.effect]
    listed = "; ".join(f"{condition_text(c.condition)} {clause(c)}" for c in finals) or "not measured"
    blocks.append(f"Final quality. Recall at each arm's own best rate: {listed}.")
    blocks.append(text_effects(findings.cells))
    return blocks


def _init_claim(findings: Findings) -> str:
    rows = [r for r in findings.init if r.init == PRIMARY_INIT and r.values["row_std"] is not None]
    if not rows:
        return "Init statistics. Not measured: the grid has no init sweep under LeCun init."
    clauses = []
    for arm in ARMS:
        mine = [r for r in rows if r.arm == arm]
        if mine:
            ends = " to ".join(f"{number(r.values['row_std'], 2)} at d_k {r.head_dim}" for r in (mine[0], mine[-1]))
            frozen = next((r.head_dim for r in mine if (r.values["row_std"] or 0) > r.threshold), None)
            where = f"above the threshold {number(rows[0].threshold, 2)} from d_k {frozen}" if frozen else "never frozen"
            clauses.append(f"{arm} {ends} ({where})")
    slopes = [f"{init} {number(s.estimate, 2)}" for init, s in variance_slopes(findings.init).items()]
    law = f" Slope of ln Var(q·k) on ln d_k: {', '.join(slopes)}." if slopes else ""
    return f"Init statistics. Row std of the logits at step 0 under LeCun init: {'; '.join(clauses)}.{law}"


def _init_table(findings: Findings) -> Table:
    by_key = {(r.arm, r.init, r.head_dim): r for r in findings.init}
    ratios = gradient_ratios(findings.init)
    rows = []
    for init, width in dict.fromkeys((r.init, r.head_dim) for r in findings.init):
        a, b = (by_key.get((arm, init, width)) for arm in ARMS)
        known = b or a
        if known is None:
            continue
        std = b.values["row_std"] if b else None
        pair = [[number(r.values[name]) if r else "–" for r in (a, b)] for name in ("row_std", "logit_std", "entropy")]
        root = float(width) ** 0.5 if an.as_number(width) else None
        frozen = "–" if std is None else "frozen" if std > known.threshold else "free"
        tail = (number(known.threshold, 2), frozen, number(ratios.get((init, width)), 2))
        variance = number(known.values["dot_product_variance"])
        rows.append((init, width, number(root, 2), *itertools.chain(*pair), variance, *tail))
    names = ("row std", "logit std", "entropy")
    headers = ("init", "d_k", "√d_k", *(f"{name} {arm}" for name in names for arm in ARMS))
    headers += ("Var(q·k)", "√(2 ln n)", "unscaled is", "‖∇W_Q‖ unscaled / inv_sqrt")
    return Table("Attention at step 0, every init and d_k: means over seeds and layers.", headers, rows, folded=True)


def _centre(values: Sequence[float]) -> str:
    return f"{number(mean(values))} ({number(median(values))})"


def text_effects(cells: Cells) -> Block:
    """Validation loss on text, at the same rate and at each arm's own best."""
    rows = []
    for condition in cells.conditions(an.TEXT):
        effects = an.rate_effects(cells, an.TEXT, condition, an.loss_of)
        best = an.best_rate_effect(cells, an.TEXT, condition, an.loss_of)
        for e in [*effects, *([best] if best else [])]:
            rows.append((condition_text(condition), e.label, *_effect_cells(e)))
    caption = "Text (T4): validation loss in nats; positive is harm."
    return Table(caption, ("condition", "rate", *EFFECT_HEADERS), rows) if rows else "Text (T4): no paired cells."


def same_rate_effects(cells: Cells) -> Block:
    """Recall at the same learning rate: accuracy, and solved seeds with Fisher's exact p."""
    rows = []
    for condition in cells.conditions(an.RECALL):
        for e in an.rate_effects(cells, an.RECALL, condition, an.accuracy_of):
            pairs = len(e.reference)
            a, b = (sum(x >= an.SOLVED for x in values) for values in (e.reference, e.treatment))
            p = p_text(fisher_p((a, b), (pairs, pairs)))
            rows.append((condition_text(condition), e.label, *_effect_cells(e), f"{a} and {b} of {pairs}", p))
    caption = "Secondary: recall accuracy of both arms at the same rate; negative is harm. Not adjusted."
    headers = ("condition", "rate", *EFFECT_HEADERS, "solved", "Fisher p, two-sided")
    return Table(caption, headers, rows, folded=True) if rows else "Recall at the same rate: no paired cells."


EFFECT_HEADERS = ("pairs", *(f"{arm} mean (median)" for arm in ARMS), "unscaled − inv_sqrt", "95 % interval")


def _effect_cells(e: an.Effect) -> tuple[str, ...]:
    return (str(len(e.reference)), _centre(e.reference), _centre(e.treatment), signed(e.difference), span(e.interval))


def arms_part(findings: Findings) -> list[Block]:
    rows = []
    for r in findings.arms:
        chosen = ", ".join(f"{rate} ({count})" for rate, count in r.chosen.items()) or "–"
        edge = "–" if not r.chosen else f"yes, {r.on_edge} of {sum(r.chosen.values())}" if r.on_edge else "no"
        outcomes = ", ".join(f"{count} {name}" for name, count in r.outcomes.items()) or "none finished"
        largest = ", ".join(f"{rate} ({n})" for rate, n in Counter(x or "none" for x in r.largest).items()) or "–"
        where = "all cells" if r.study not in (an.RECALL, an.TEXT) else condition_text(r.condition)
        rows.append((r.study, where, r.arm, f"{r.done} of {r.expected}", outcomes, chosen, edge, largest))
    headers = ("study", "condition", "arm", "cells", "outcomes", "chosen rate (seeds)", "on the edge", "largest usable (seeds)")
    caption = (
        "Rates are chosen for each seed by the other seeds; ties go to the smaller rate. An edge is flagged where the "
        "first or last rate beats every inner one by more than the margin. Largest usable: the largest rate that solves "
        "recall; in brackets the seeds."
    )
    return [Table(caption, headers, rows)] if rows else ["The grid has no cells."]


def controls_part(findings: Findings) -> list[Block]:
    words = {True: "EQUAL", False: "DIFFERENT", None: "NOT RUN"}
    rows = [(p.label, str(p.steps or "–"), words[p.equal]) for p in findings.null]
    caption = "full_fold against inv_sqrt: are the training-loss series equal bit by bit?"
    blocks: list[Block] = [Table(caption, ("cell", "steps", "series"), rows)] if rows else ["No full_fold null control here."]
    floors = [r for r in findings.arms if r.study == an.RECALL and r.arm == an.FLOOR]
    for row in floors:
        found = [an.accuracy_of(r) for r in findings.cells.select(an.RECALL, an.FLOOR, **row.condition)]
        if found:
            mean, most = number(sum(found) / len(found)), number(max(found))
            where = condition_text(row.condition)
            blocks.append(f"Floor without attention ({an.FLOOR}), {where}: mean accuracy {mean}, largest {most}.")
    if not floors:
        blocks.append(f"No floor without attention: the grid has no {an.FLOOR} arm on recall.")
    return blocks


def where_part(findings: Findings) -> list[Block]:
    titles = {"HARM": "appears", "NO HARM": "disappears", "INCONCLUSIVE": "is open"}
    rows = []
    for word, title in titles.items():
        found = [c for c in main(findings) if c.judgement.word == word]
        places = dict.fromkeys(condition_text(c.condition) for c in found)
        for c in found:
            where = condition_text(c.condition)
            places[where] = f"{places[where]} and {c.endpoint}" if places[where] else c.endpoint
        listed = "; ".join(f"{where}: {endpoints}" for where, endpoints in places.items())
        rows.append((word, title, listed or "nowhere"))
    caption = "Unscaled − inv_sqrt on recall. E1: accuracy at the best rate. E2: usable window."
    blocks: list[Block] = [Table(caption, ("verdict", "the effect", "where"), rows)]
    gaps = []
    for g in findings.gaps:
        listed = "; ".join(f"d_k {w}: {signed(x)}" for w, x in zip(g.widths, g.gaps, strict=True))
        slope = (signed(g.slope.estimate), span(g.slope)) if g.slope else ("–", "fewer than three seeds")
        gaps.append((g.init or "all", listed, *slope))
    if gaps:
        caption = "Accuracy gap inv_sqrt − unscaled at each arm's own best rate; slope a doubling of d_k, bootstrap over seeds."
        blocks.append(Table(caption, ("init", "gap", "slope", "95 % interval"), gaps))
    blocks.append(same_rate_effects(findings.cells))
    others = [c for c in findings.comparisons if c not in main(findings)]
    if others:
        blocks.append(_comparison_table("Secondary: comparisons with init_fold, same statistics, not adjusted.", others, True))
    return blocks


def ladder_part(findings: Findings) -> list[Block]:
    rows = []
    for row in findings.ladder:
        name = row.rung if row.seed == 0 else f"{row.rung}, seed {row.seed}"
        runs = (row.reference, row.treatment)
        note = "; ".join(row.signs) or ("both arms fail: not the scale's doing" if row.both_fail else "none")
        if None in runs:
            note = "a cell is missing or failed"
        keys = (("val_loss", 3), ("grad_norm_median", 2), ("grad_norm_max", 1), ("spike_share", 3))
        values = [" / ".join(_ladder_value(run, key, digits) for run in runs) for key, digits in keys]
        outcomes = tuple(run["result"]["outcome"] if run else "–" for run in runs)
        apart = "–" if row.difference is None else "yes" if row.separated else "no"
        rows.append((name, *outcomes, values[0], signed(row.difference), apart, *values[1:], note))
    pairs = tuple(f"{n}, inv_sqrt / unscaled" for n in ("val loss", "median gradient", "largest gradient", "spike share"))
    headers = ("rung", *(f"outcome {arm}" for arm in ARMS), pairs[0], "difference", "apart", *pairs[1:])
    caption = (
        "Loss in nats; the difference scores NONFINITE and DIVERGED runs at the loss at init. "
        f"Apart: worse by more than {an.SEPARATION:g} nats. Instability is named where the scaled arm trains: failure to "
        f"learn, spikes, or a gradient norm at least {an.GRADIENT_RATIO:g} times larger. One run a cell."
    )
    table = [Table(caption, (*headers, "instability"), rows)] if rows else []
    return [an.ladder_sentence(findings.ladder), *table]


def _ladder_value(run: an.Record | None, key: str, digits: int) -> str:
    return number(run["result"][key], digits) if run else "–"


def contradictions(findings: Findings) -> Table:
    """Common sentences about the scale, held against what was measured."""
    ratios = {width: r for (init, width), r in gradient_ratios(findings.init).items() if init == PRIMARY_INIT}
    listed = ", ".join(f"d_k {w}: {number(r, 2)}" for w, r in ratios.items())
    wide = ratios.get(max(ratios, key=lambda w: an.as_number(w) or 0.0)) if ratios else None
    small = findings.find("E1", *ARMS, init=SMALL_INIT)
    tuned = next((c for c in findings.comparisons if c.primary and c.endpoint == "E1"), None)
    fold = findings.find("E2", an.REFERENCE, an.FOLD, init=PRIMARY_INIT)
    null = [p.equal for p in findings.null if p.equal is not None]
    rows = [
        (
            "Without the scale, softmax has extremely small gradients at init (Vaswani et al. 2017, §3.2.1).",
            f"‖∇W_Q‖ unscaled / inv_sqrt at step 0, LeCun init: {listed}" if ratios else "not measured",
            _contradicted(None if wide is None else wide > 1),
        ),
        (
            "Without the scale, a large d_k always hurts.",
            _measured(small),
            _contradicted_by(small, "NO HARM"),
        ),
        (
            "A well chosen learning rate makes up for the missing scale.",
            _measured(tuned),
            _contradicted_by(tuned, "HARM"),
        ),
        (
            "A matched start (init_fold) makes up for the missing scale.",
            _measured(fold),
            _contradicted_by(fold, "HARM"),
        ),
        (
            "The scale gives the model something that its weights cannot.",
            f"full_fold: {sum(null)} of {len(null)} loss series bitwise equal to inv_sqrt" if null else "not measured",
            _contradicted(all(null) if null else None),
        ),
    ]
    return Table("Common sentences and what was measured here.", ("sentence", "measured", "result"), rows)


def _contradicted(answer: bool | None) -> str:
    return "NOT TESTED" if answer is None else "CONTRADICTED" if answer else "NOT CONTRADICTED"


def _contradicted_by(c: Comparison | None, word: str) -> str:
    if c is None or c.judgement.word == "INCONCLUSIVE":
        return "NOT TESTED" if c is None else "INCONCLUSIVE"
    return _contradicted(c.judgement.word == word)


def _measured(c: Comparison | None) -> str:
    return "not measured" if c is None else f"{c.label}, {condition_text(c.condition)}: {clause(c)}"


def published(findings: Findings) -> Table:
    slope = variance_slopes(findings.init).get(PRIMARY_INIT)
    null = [p.equal for p in findings.null if p.equal is not None]
    gap = next((g.slope for g in findings.gaps if g.init in (PRIMARY_INIT, "") and g.slope), None)
    fold = findings.find("E1", an.FOLD, an.TREATMENT, init=PRIMARY_INIT)
    variance = f"slope of ln Var on ln d_k in the network {number(slope.estimate, 2)}" if slope else "no init sweep"
    suite = "asserted by the test suite"
    rows = [
        ("R1", "Var(q·k) = d_k (Vaswani et al. 2017, footnote 4)", f"{variance}; the bar is {suite}", "TEST"),
        ("R2, R4, R5, R6", "saturation, condensation, entropy bound, order of gradients", suite, "TEST"),
        (
            "R3",
            "the scale is a parametrisation (T5)",
            f"{sum(null)} of {len(null)} null controls bitwise equal" if null else "no null control",
            _pass(all(null) if null else None, bool(null)),
        ),
        (
            "R7",
            "harmless at small d_k, harmful at large (Britz et al. 2017)",
            f"gap slope a doubling of d_k {signed(gap.estimate)} ({span(gap)})" if gap else "fewer than two d_k or three seeds",
            _pass(None if gap is None or gap.low <= 0 <= gap.high else gap.low > 0, gap is not None),
        ),
        (
            "R8",
            "unscaled is worse than init_fold at the largest d_k (T5)",
            _measured(fold),
            _pass(None if fold is None or fold.judgement.word == "INCONCLUSIVE" else fold.judgement.word == "HARM", fold),
        ),
        ("R9 to R13", "qk_norm, logit size, 1/d_k, temperature, warm-up", "not part of this grid", "NOT RUN"),
    ]
    return Table("Reported, never asserted; a FAIL is shown.", ("name", "result", "measured", "status"), rows)


def _pass(answer: bool | None, was_run: object) -> str:
    return "NOT RUN" if not was_run else "INCONCLUSIVE" if answer is None else "PASS" if answer else "FAIL"


def prediction_table(judged: Sequence[Prediction]) -> Table:
    rows = [(p.name, p.statement, p.status, p.evidence) for p in judged]
    caption = "Written down before the runs. INCONCLUSIVE where an interval contains zero."
    return Table(caption, ("name", "prediction", "status", "measured"), rows)
