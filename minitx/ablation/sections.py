"""The measured parts of the report, as blocks of text and tables: verdict, claims, arms, controls, where, ladder.

Every sentence and number is computed from the findings; what the grid does not have is named as missing, never left
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import mean, median

from minitx.ablation import records as rec
from minitx.ablation import tables
from minitx.ablation.effects import Effect, best_rate_loss, rate_effects
from minitx.ablation.records import Cells
from minitx.ablation.render import Block, Table
from minitx.ablation.statistics import fisher_p
from minitx.ablation.tables import InitRow, LadderRow
from minitx.ablation.verdict import Comparison, Findings
from minitx.ablation.wording import condition_text, number, p_text, place_text, signed, span

MEANS = "mean (median)"


def _effect_headers(arms: Sequence[str]) -> tuple[str, ...]:
    return ("pairs", *(f"{arm} {MEANS}" for arm in arms), f"{arms[1]} − {arms[0]}", "95 % interval")


def interval_text(effect: Effect) -> str:
    """An effect's 95 % interval in words."""
    return "one pair, no interval" if effect.interval is None else f"95 % {span(effect.interval)}"


def clause(c: Comparison) -> str:
    """An endpoint, its difference and its verdict."""
    return f"{c.words}{_outcome(c)}"


def _outcome(c: Comparison) -> str:
    if c.effect is None:
        return f": {c.judgement.word} ({c.judgement.reason})"
    return f" {signed(c.effect.difference)} ({interval_text(c.effect)}): {c.judgement.word}"


def _centre(values: Sequence[float]) -> str:
    return f"{number(mean(values))} ({number(median(values))})"


def _effect_cells(e: Effect) -> tuple[str, ...]:
    return (str(len(e.reference)), _centre(e.reference), _centre(e.treatment), signed(e.difference), span(e.interval))


# --- the verdict


def verdict_part(findings: Findings) -> list[Block]:
    """Part 1: what is primary, its verdicts, and the cells that are missing."""
    if not findings.main:
        return ["The grid compares no two arms, so there is no verdict.", _lost_cells(findings.cells)]
    family = sum(c.primary for c in findings.comparisons)
    caption = (
        "The second arm minus the first, paired by seed. E1: the score after the last step at each arm's own best rate; of accuracy, "
        "negative is harm, of loss, positive. HARM is a worse score after these steps. E2: usable window, the share of the rates "
        "that solve the task by then. p of harm: exact sign-flip, "
        f"one-sided; adjusted by Holm over the primary family (m = {family}). p of equality: TOST within "
        f"±{findings.cells.grid.margin:g}. Other rows are secondary: the same statistics, not adjusted."
    )
    reasons: dict[str, list[Comparison]] = {}
    for c in findings.main:
        if c.judgement.word == "INCONCLUSIVE":
            reasons.setdefault(c.judgement.reason, []).append(c)
    named = len({c.arms for c in findings.main}) > 1
    said = [f"INCONCLUSIVE ({_places(found, named)}): {reason}." for reason, found in reasons.items()]
    if list(reasons.values()) == [findings.main]:
        said = [f"INCONCLUSIVE everywhere: {next(iter(reasons))}."]
    return [_comparison_table(caption, findings.main), *said, _lost_cells(findings.cells)]


def _places(found: Sequence[Comparison], named: bool) -> str:
    """Which endpoints under which condition; ``named`` says of which arms."""
    places: dict[str, list[str]] = {}
    for c in found:
        place = place_text(c.study, c.condition)
        places.setdefault(f"{c.label}, {place}" if named else place, []).append(c.endpoint)
    return "; ".join(f"{where}: {' and '.join(endpoints)}" for where, endpoints in places.items())


def _comparison_table(caption: str, found: Sequence[Comparison], folded: bool = False) -> Table:
    """One row a comparison; it says which arms are compared where that differs from row to row."""
    named = len({c.arms for c in found}) > 1
    rows = []
    for c in found:
        e = c.effect
        scores = (signed(e.difference), span(e.interval), _centre(e.reference), _centre(e.treatment)) if e else ("–",) * 4
        p_harm = p_text(c.p_harm) + (f", adjusted {p_text(c.p_adjusted)}" if c.p_adjusted is not None else "")
        where = place_text(c.study, c.condition) + (" (primary)" if c.primary else "")
        endpoint = c.endpoint if c.endpoint in ("E1", "E2") else c.words
        what = (*((c.label,) if named else ()), endpoint, where, c.judgement.word)
        rows.append((*what, *scores, str(len(c.seeds)), p_harm, p_text(c.p_equal)))
    arms = ("first arm", "second arm") if named else found[0].arms
    headers = (*(("arms",) if named else ()), "endpoint", "condition", "verdict", "difference", "95 % interval")
    tests = (*(f"{arm} {MEANS}" for arm in arms), "seeds", "p of harm", "p of equality")
    return Table(caption, (*headers, *tests), rows, folded=folded)


def _lost_cells(cells: Cells) -> Block:
    lost = [(str(k), "failed", str(r["error"] or "no reason was recorded")) for k, r in cells.failed.items()]
    lost += [(str(k), "missing", "no record came back") for k in cells.missing]
    lost += [(str(k), "unexpected", "no cell of this grid; left out of every table") for k in cells.unexpected]
    if not lost:
        return "Every expected cell finished; none was left out."
    return Table("Cells that are not in the tables, and why.", ("cell", "status", "reason"), lost)


# --- three claims apart


def claims_part(findings: Findings) -> list[Block]:
    """Part 2: the start, the share of usable rates, and the scores after the last step, each apart."""
    recall = [c for c in findings.main if (c.study, c.arms) == (rec.RECALL, rec.ARMS)]
    windows, finals = (
        "; ".join(f"{condition_text(c.condition)}:{_outcome(c)}" for c in recall if c.endpoint == e and c.effect)
        for e in ("E2", "E1")
    )
    steps = tables.steps_of(findings.cells, rec.RECALL)
    within, after = (f" {word} {steps} steps" if steps else "" for word in ("within", "after"))
    return [
        _init_claim(findings),
        *([_init_table(findings)] if findings.init else []),
        f"Learning rates. Usable window{within}: {windows or 'not measured'}. {tables.ladder_sentence(findings.ladder)}",
        f"Score. Recall{after} at each arm's own best rate: {finals or 'not measured'}.",
        _text_effects(findings.cells),
    ]


def _init_claim(findings: Findings) -> str:
    rows = [r for r in findings.init if r.init == rec.PRIMARY_INIT and r.values["row_std"] is not None]
    if not rows:
        return "Init statistics. Not measured: the grid has no init sweep under LeCun init."
    by_arm = {arm: [r for r in rows if r.arm == arm] for arm in rec.ARMS}
    clauses = "; ".join(_init_clause(arm, mine) for arm, mine in by_arm.items() if mine)
    slopes = [f"{init} {number(s.estimate, 2)}" for init, s in tables.variance_slopes(findings.init).items()]
    law = f" Slope of ln Var(q·k) on ln d_k: {', '.join(slopes)}." if slopes else ""
    return f"Init statistics. Row std of the logits at step 0 under LeCun init: {clauses}.{law}"


def _init_clause(arm: str, rows: Sequence[InitRow]) -> str:
    ends = " to ".join(f"{number(r.values['row_std'], 2)} at d_k {r.head_dim}" for r in (rows[0], rows[-1]))
    frozen = next((r.head_dim for r in rows if (r.values["row_std"] or 0) > r.threshold), None)
    where = f"above the threshold {number(rows[0].threshold, 2)} from d_k {frozen}" if frozen else "never frozen"
    return f"{arm} {ends} ({where})"


def _init_table(findings: Findings) -> Table:
    by_key = {(r.arm, r.init, r.head_dim): r for r in findings.init}
    ratios = tables.gradient_ratios(findings.init)
    rows = []
    for place in dict.fromkeys((r.init, r.head_dim) for r in findings.init):
        both = [by_key.get((arm, *place)) for arm in rec.ARMS]
        pairs = [number(r.values[name]) if r else "–" for name in ("row_std", "logit_std", "entropy") for r in both]
        known = both[1] or both[0]
        if known is not None:
            std = both[1].values["row_std"] if both[1] else None
            root = float(place[1]) ** 0.5 if rec.as_number(place[1]) else None
            frozen = "–" if std is None else "frozen" if std > known.threshold else "free"
            tail = (number(known.threshold, 2), frozen, number(ratios.get(place), 2))
            rows.append((*place, number(root, 2), *pairs, number(known.values["dot_product_variance"]), *tail))
    names = (f"{name} {arm}" for name in ("row std", "logit std", "entropy") for arm in rec.ARMS)
    tail = ("√(2 ln n)", "unscaled is", "‖∇W_Q‖ unscaled / inv_sqrt")
    caption = "Attention at step 0, every init and d_k: means over seeds and layers."
    return Table(caption, ("init", "d_k", "√d_k", *names, "Var(q·k)", *tail), rows, folded=True)


def _text_effects(cells: Cells) -> Block:
    """Validation loss on text, at the same rate and at each arm's own best."""
    rows = []
    for condition in cells.conditions(rec.TEXT):
        effects = rate_effects(cells, rec.TEXT, rec.ARMS, condition, rec.SCORES["loss"])
        best = best_rate_loss(cells, condition)
        if best:
            effects["own best rate" + (" (tuned on itself)" if len(best.reference) < 2 else "")] = best
        rows += [(condition_text(condition), rate, *_effect_cells(e)) for rate, e in effects.items()]
    caption = "Text (T4): validation loss in nats; positive is harm."
    return Table(caption, ("condition", "rate", *_effect_headers(rec.ARMS)), rows) if rows else "Text (T4): no paired cells."


# --- every arm, and the controls


def arms_part(findings: Findings) -> list[Block]:
    """Part 4: every arm with its chosen rates and its failures."""
    rows: list[tuple[str, ...]] = []
    for r in findings.arms:
        chosen = ", ".join(f"{rate} ({count})" for rate, count in r.chosen.items()) or "–"
        edge = "–" if not r.chosen else f"yes, {r.on_edge} of {sum(r.chosen.values())}" if r.on_edge else "no"
        outcomes = ", ".join(f"{count} {name}" for name, count in r.outcomes.items()) or "none finished"
        if r.done and r.study in (rec.INIT_SWEEP, rec.NULL_CONTROL):
            outcomes = "not judged"  # a step or a few: too short to learn anything
        largest = ", ".join(f"{rate} ({n})" for rate, n in Counter(x or "none" for x in r.largest).items()) or "–"
        done = f"{r.done} of {r.expected}"
        rows.append((r.study, condition_text(r.condition), r.arm, done, outcomes, chosen, edge, largest))
    headers = ("study", "condition", "arm", "cells", "outcomes", "chosen rate (seeds)", "on the edge")
    usable = any(row[-1] != "–" for row in rows)
    if not usable:
        rows = [row[:-1] for row in rows]
    tuned = [name for name, study in findings.cells.grid.studies.items() if study.tune_seeds and study.score]
    how = (
        f"on seeds of their own ({', '.join(tuned)}), else for each seed by the other seeds" if tuned else "by the other seeds"
    )
    caption = (
        f"Rates are chosen {how}; ties go to the smaller rate. An edge is flagged where the first or last rate beats every "
        "inner one by more than the margin."
        + (" Largest usable: the largest rate that solves the task; in brackets the seeds." if usable else "")
    )
    last = ("largest usable (seeds)",) if usable else ()
    return [Table(caption, (*headers, *last), rows) if rows else "The grid has no cells."]


def controls_part(findings: Findings) -> list[Block]:
    """Part 5: what must be equal bit for bit, and what must fail."""
    words = {True: "EQUAL", False: "DIFFERENT", None: "NOT RUN"}
    rows = [(p.label, str(p.steps or "–"), words[p.equal]) for p in findings.null]
    caption = "full_fold against inv_sqrt: are the training-loss series equal bit by bit?"
    blocks: list[Block] = [Table(caption, ("cell", "steps", "series"), rows) if rows else "No full_fold null control here."]
    cells = findings.cells
    floors = [(s, c) for s in (rec.RECALL, rec.FLOOR_STUDY) for c in cells.conditions(s, rec.FLOOR)]
    for study, condition in floors:
        found = [rec.accuracy_of(r) for r in cells.select(study, rec.FLOOR, **condition)]
        size = f"mean accuracy {number(mean(found))}, largest {number(max(found))}" if found else "no run finished"
        blocks.append(f"Floor without attention ({rec.FLOOR}), {condition_text(condition)}: {size}.")
    return blocks if floors else [*blocks, f"No floor without attention: the grid has no {rec.FLOOR} arm on recall."]


# --- where the effect is


def where_part(findings: Findings) -> list[Block]:
    """Part 6: the conditions under which the scores after the last step differ or are equal."""
    main = findings.main
    others = [c for c in findings.comparisons if c not in main]
    caption = "Secondary: further comparisons and measures, same statistics, not adjusted."
    return [
        *([_where_table(main)] if main else ["The grid compares no two arms."]),
        *([_gap_table(findings)] if findings.gaps else []),
        *_same_rate_effects(findings),
        *([_comparison_table(caption, others, folded=len(others) > 8)] if others else []),
    ]


def _where_table(found: Sequence[Comparison]) -> Table:
    words = {"HARM": "worse", "NO HARM": "equal within the margin", "INCONCLUSIVE": "open"}
    named = len({c.arms for c in found}) > 1
    places = {w: _places([c for c in found if c.judgement.word == w], named) for w in words}
    rows = [(w, title, places[w] or "nowhere") for w, title in words.items()]
    labels = ", ".join(dict.fromkeys(c.label for c in found))
    return Table(
        f"{labels}. E1: the score after the last step, at the best rate. E2: usable window.",
        ("verdict", "second arm after these steps", "where"),
        rows,
    )


def _gap_table(findings: Findings) -> Table:
    rows = []
    for gap in findings.gaps:
        listed = "; ".join(f"d_k {w}: {signed(x)}" for w, x in gap.gaps)
        slope = (signed(gap.slope.estimate), span(gap.slope)) if gap.slope else ("–", "fewer than three seeds")
        rows.append((gap.init or "all", listed, *slope))
    caption = "Accuracy gap inv_sqrt − unscaled at each arm's own best rate; slope a doubling of d_k, bootstrap over seeds."
    return Table(caption, ("init", "gap", "slope", "95 % interval"), rows)


def _same_rate_effects(findings: Findings) -> list[Block]:
    """The first comparison at the same learning rate, a table a study; solved seeds with Fisher's exact p."""
    compared = dict.fromkeys((c.study, c.arms) for c in findings.main)
    found = [_same_rate_table(findings.cells, study, arms) for study, arms in compared]
    return [table for table in found if table.rows] or ["The same rate: no paired cells."]


def _same_rate_table(cells: Cells, study: str, arms: Sequence[str]) -> Table:
    score, bar = cells.score(study), cells.planned(study).solved
    assert score is not None
    rows = []
    for condition in cells.conditions(study, *arms):
        for rate, e in rate_effects(cells, study, arms, condition, score).items():
            pairs, solved = len(e.reference), ("–", "–")
            if score.better > 0:
                a, b = (sum(x >= bar for x in values) for values in (e.reference, e.treatment))
                solved = (f"{a} and {b} of {pairs}", p_text(fisher_p((a, b), (pairs, pairs))))
            rows.append((condition_text(condition), rate, *_effect_cells(e), *solved))
    sign = "negative" if score.better > 0 else "positive"
    label = f"{study}, {arms[1]} − {arms[0]}"
    caption = f"Secondary: {label}, {score.name} at the same rate; {sign} is harm. Not adjusted."
    return Table(caption, ("condition", "rate", *_effect_headers(arms), "solved", "Fisher p, two-sided"), rows, folded=True)


# --- the ladder


def ladder_part(findings: Findings) -> list[Block]:
    """Part 7: the stress ladder, rung by rung."""
    pairs = tuple(f"{n}, inv_sqrt / unscaled" for n in ("val loss", "median gradient", "largest gradient", "spike share"))
    headers = (
        "rung",
        *(f"outcome {arm}" for arm in rec.ARMS),
        pairs[0],
        "difference",
        "apart",
        *pairs[1:],
        "without the scale",
    )
    caption = (
        "Loss in nats; the difference scores NONFINITE and DIVERGED runs at the loss at init. "
        f"Apart: worse by more than {tables.SEPARATION:g} nats. The last column says, where the scaled arm trains, what the other "
        f"arm shows: failure to learn, spikes, or a gradient norm at least {tables.GRADIENT_RATIO:g} times larger. Gradient norms depend "
        "on the parametrisation, so a larger one is no instability by itself. The spike share leaves out the first window of "
        "steps, so an early jump of either arm is not in it. One run a row and arm."
    )
    table = [Table(caption, headers, [_ladder_cells(row) for row in findings.ladder])] if findings.ladder else []
    return [tables.ladder_sentence(findings.ladder), *table]


def _ladder_cells(row: LadderRow) -> tuple[str, ...]:
    def pair(key: str, digits: int) -> str:
        return " / ".join(number(run["result"][key], digits) if run else "–" for run in row.runs)

    note = "; ".join(row.signs) or ("both arms fail" if row.both_fail else "none")
    if None in row.runs:
        note = "a cell is missing or failed"
    outcomes = (run["result"]["outcome"] if run else "–" for run in row.runs)
    apart = "–" if row.difference is None else "yes" if row.separated else "no"
    gradients = (pair("grad_norm_median", 2), pair("grad_norm_max", 1), pair("spike_share", 3))
    return (row.label, *outcomes, pair("val_loss", 3), signed(row.difference), apart, *gradients, note)
