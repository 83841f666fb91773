"""What the grid says: the comparisons of the arms and the fate of the predictions, all computed.

Two endpoints on the recall task, paired by seed: **E1** accuracy at each arm's own best learning rate, chosen on the
other seeds; **E2** the usable window, the share of the common rates on which the task is solved. *Primary* is unscaled −
inv_sqrt at the largest d_k under LeCun init, E1 and E2, adjusted by Holm with m = 2. Everything else is *secondary*:
the same statistics, not adjusted, and labelled so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from minitx.ablation import analysis as an
from minitx.ablation import statistics as st
from minitx.ablation.analysis import Cells, Condition, Effect
from minitx.ablation.statistics import Interval, Judgement, number, paired_t_interval, signed, span

PRIMARY_INIT = "lecun"
SMALL_INIT = "gpt2"
ENDPOINTS = {"E1": "accuracy at the best rate", "E2": "usable window"}
SLOPE_BAR = 0.1
"""The variance law holds in the real network when the slope of ln Var on ln d_k is within 1 ± this."""

Status = Literal["HELD", "NOT HELD", "INCONCLUSIVE", "NOT TESTED"]

PREDICTIONS = {
    "P1": "Variance law: Var(q·k) grows in proportion to d_k.",
    "P2": "Under LeCun init the gap is about 0 at the smallest d_k and grows with d_k.",
    "P3": "With the 0.02 init: no harm at the best rate, perhaps a gain; the usable window narrows all the same.",
    "P4": "The gradient of W_Q at step 0 is larger for unscaled at d_k ≤ 256, and smaller for inv.",
    "P5": "init_fold recovers most of the gap at a low rate but has a smaller largest usable rate.",
    "P6": "qk_norm has the largest usable rate.",
    "P7": "Argmax retention is high in unscaled.",
}
"""What is judged when the grid brings no predictions of its own."""


# --- comparisons


@dataclass(frozen=True)
class Comparison:
    """Treatment − reference on one endpoint under one condition, and its verdict.

    ``effect`` holds the scores of ``seeds``; ``incomplete`` names the seeds with a missing or failed cell, which cannot be
    scored and make the verdict INCONCLUSIVE. ``largest`` are the largest usable rates (reference, treatment), a seed
    each. ``p_adjusted`` is ``None`` for secondary comparisons, whose p is not adjusted.
    """

    primary: bool
    endpoint: str
    reference: str
    treatment: str
    condition: Condition
    seeds: tuple[int, ...]
    incomplete: tuple[int, ...]
    largest: tuple[tuple[str | None, ...], tuple[str | None, ...]]
    effect: Effect | None
    p_harm: float | None
    p_adjusted: float | None
    p_equal: float | None
    judgement: Judgement

    @property
    def label(self) -> str:
        return f"{self.treatment} − {self.reference}"


@dataclass(frozen=True)
class _Pair:
    """Scores of both arms on the seeds that are complete in both; rates ascending and common."""

    rates: tuple[str, ...]
    seeds: tuple[int, ...]
    incomplete: tuple[int, ...]
    values: tuple[np.ndarray, np.ndarray]


def _pair(cells: Cells, reference: str, treatment: str, condition: Condition) -> _Pair:
    common = [
        rate
        for rate in cells.levels(an.RECALL, an.RATE, **condition)
        if {reference, treatment} <= set(cells.arms(an.RECALL, **{**condition, an.RATE: rate}))
    ]
    rates = tuple(common) or ("",)
    a, b = (an.scores(cells, an.RECALL, arm, condition, rates, an.accuracy_of) for arm in (reference, treatment))
    gone = set(a.incomplete) | set(b.incomplete) | (set(a.seeds) ^ set(b.seeds))
    a, b = a.without(gone), b.without(gone)
    return _Pair(rates, a.seeds, tuple(sorted(gone)), (a.values, b.values))


def _effect(endpoint: str, pair: _Pair) -> Effect | None:
    """The scores of both arms on an endpoint, ``None`` where no seed is complete."""
    if not pair.seeds:
        return None
    if endpoint == "E2":
        return Effect(endpoint, *(st.usable_window(v, an.SOLVED).share for v in pair.values))
    seeds = range(len(pair.seeds))
    return Effect(endpoint, *(tuple(v[seeds, st.leave_one_out(v).picks].tolist()) for v in pair.values))


def _largest(pair: _Pair) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    found = [st.usable_window(v, an.SOLVED).largest if len(v) else () for v in pair.values]
    a, b = (tuple(pair.rates[i] if i >= 0 else None for i in indices) for indices in found)
    return a, b


def compare(
    cells: Cells, conditions: Sequence[tuple[str, Condition]], reference: str, treatment: str, *, primary: bool
) -> list[Comparison]:
    """Compare two arms on these (endpoint, condition) pairs; as one Holm family where ``primary``."""
    pairs = [_pair(cells, reference, treatment, condition) for _, condition in conditions]
    effects = [_effect(endpoint, pair) for (endpoint, _), pair in zip(conditions, pairs, strict=True)]
    p_values = [st.sign_flip_p(e.differences, "less") if e else None for e in effects]
    adjusted = iter(st.holm([p for p in p_values if p is not None], len(conditions)))
    margin = cells.grid.margin
    found = []
    for (endpoint, condition), pair, effect, p in zip(conditions, pairs, effects, p_values, strict=True):
        p_adjusted = next(adjusted) if primary and p is not None else None
        found.append(
            Comparison(
                primary=primary,
                endpoint=endpoint,
                reference=reference,
                treatment=treatment,
                condition=condition,
                seeds=pair.seeds,
                incomplete=pair.incomplete,
                largest=_largest(pair),
                effect=effect,
                p_harm=p,
                p_adjusted=p_adjusted,
                p_equal=st.equivalence_p(effect.differences, margin) if effect and len(pair.seeds) > 1 else None,
                judgement=_judge(pair, effect, p if p_adjusted is None else p_adjusted, margin),
            )
        )
    return found


def _judge(pair: _Pair, effect: Effect | None, p: float | None, margin: float) -> Judgement:
    if pair.incomplete:
        total = len(pair.incomplete) + len(pair.seeds)
        listed = ", ".join(map(str, pair.incomplete))
        return Judgement("INCONCLUSIVE", f"{len(pair.incomplete)} of {total} seeds lack a finished cell (seed {listed})")
    if p is None or effect is None:
        return Judgement("INCONCLUSIVE", "no paired seeds")
    return st.verdict(effect.differences, margin=margin, p_harm=p)


def primary_condition(cells: Cells) -> Condition | None:
    """The largest d_k under LeCun init with both arms, or ``None`` where the grid has none."""
    found = [
        c
        for c in cells.conditions(an.RECALL)
        if c.get(an.INIT, PRIMARY_INIT) == PRIMARY_INIT and {an.REFERENCE, an.TREATMENT} <= set(cells.arms(an.RECALL, **c))
    ]
    return max(found, key=lambda c: an.as_number(c.get(an.WIDTH, "0")) or 0.0) if found else None


def comparisons(cells: Cells) -> tuple[Comparison, ...]:
    """The primary family first, then every secondary comparison that the grid allows, smallest d_k first."""
    first = primary_condition(cells)
    found = []
    if first is not None:
        found += compare(cells, [(e, first) for e in ENDPOINTS], an.REFERENCE, an.TREATMENT, primary=True)
    for reference, treatment in (
        (an.REFERENCE, an.TREATMENT),
        (an.FOLD, an.TREATMENT),
        (an.REFERENCE, an.FOLD),
    ):
        for condition in cells.conditions(an.RECALL):
            is_first = condition == first and (reference, treatment) == (an.REFERENCE, an.TREATMENT)
            if not is_first and {reference, treatment} <= set(cells.arms(an.RECALL, **condition)):
                asked = [(e, condition) for e in ENDPOINTS]
                found += compare(cells, asked, reference, treatment, primary=False)
    return tuple(found)


@dataclass(frozen=True)
class Gap:
    """The E1 gap inv_sqrt − unscaled against log2 d_k under one init: positive is harm, slope in accuracy a doubling."""

    init: str
    widths: tuple[str, ...]
    gaps: tuple[float, ...]
    slope: Interval | None


def gaps_by_width(found: Sequence[Comparison]) -> list[Gap]:
    """One :class:`Gap` an init with two or more d_k; the slope needs three seeds that are complete at every d_k."""
    e1 = [c for c in found if c.endpoint == "E1" and (c.reference, c.treatment) == (an.REFERENCE, an.TREATMENT)]
    gaps = []
    for init in sorted({c.condition.get(an.INIT, "") for c in e1}):
        rows = [c for c in e1 if c.condition.get(an.INIT, "") == init and an.as_number(c.condition.get(an.WIDTH, "x"))]
        rows = sorted((c for c in rows if c.effect), key=lambda c: float(c.condition[an.WIDTH]))
        widths = [c.condition[an.WIDTH] for c in rows]
        if len(set(widths)) < 2 or len(set(widths)) < len(widths):
            continue
        common = sorted(set.intersection(*(set(c.seeds) for c in rows)))
        losses = [{s: -d for s, d in zip(c.seeds, c.effect.differences, strict=True)} for c in rows if c.effect]
        table = [[loss[seed] for loss in losses] for seed in common]
        x = [math.log2(float(w)) for w in widths]
        slope = st.slope_interval(x, table) if len(common) >= 3 else None
        gaps.append(Gap(init, tuple(widths), tuple(float(np.mean(list(loss.values()))) for loss in losses), slope))
    return gaps


# --- everything that the report shows


@dataclass(frozen=True)
class Findings:
    """All tables of one grid."""

    cells: Cells
    comparisons: tuple[Comparison, ...]
    gaps: tuple[Gap, ...]
    arms: tuple[an.ArmRow, ...]
    ladder: tuple[an.LadderRow, ...]
    init: tuple[an.InitRow, ...]
    null: tuple[an.NullPair, ...]

    def find(self, endpoint: str, reference: str, treatment: str, **levels: str) -> Comparison | None:
        """The comparison of these arms at the largest d_k with these levels."""
        rows = [
            c
            for c in self.comparisons
            if (c.endpoint, c.reference, c.treatment) == (endpoint, reference, treatment)
            and levels.items() <= c.condition.items()
        ]
        return max(rows, key=lambda c: an.as_number(c.condition.get(an.WIDTH, "0")) or 0.0, default=None)


def analyse(cells: Cells) -> Findings:
    """Every table of the grid; a study that the grid does not have gives an empty one."""
    found = comparisons(cells)
    return Findings(
        cells=cells,
        comparisons=found,
        gaps=tuple(gaps_by_width(found)),
        arms=tuple(an.arm_rows(cells)),
        ladder=tuple(an.ladder_rows(cells)),
        init=tuple(an.init_rows(cells)),
        null=tuple(an.null_pairs(cells)),
    )


def variance_slopes(rows: Sequence[an.InitRow]) -> dict[str, Interval]:
    """Slope of ln Var(q·k) on ln d_k, an init each, through the unscaled arm's points (the scale comes after q·k)."""
    slopes = {}
    for init in dict.fromkeys(row.init for row in rows):
        points = [
            (float(row.head_dim), row.values["dot_product_variance"])
            for row in rows
            if row.init == init and row.arm == an.TREATMENT and an.as_number(row.head_dim)
        ]
        usable = [(w, v) for w, v in points if v]
        if len(usable) >= 3:
            widths, variances = zip(*usable, strict=True)
            slopes[init] = st.fit_interval(np.log(widths), np.log(variances))
    return slopes


def gradient_ratios(rows: Sequence[an.InitRow], arm: str = an.TREATMENT) -> dict[tuple[str, str], float]:
    """‖∇W_Q‖ of ``arm`` over that of inv_sqrt at step 0, by (init, d_k)."""
    norms = {(row.arm, row.init, row.head_dim): row.values["grad_q"] for row in rows}
    ratios = {}
    for (name, init, width), norm in norms.items():
        base = norms.get((an.REFERENCE, init, width))
        if name == arm and norm is not None and base:
            ratios[init, width] = norm / base
    return ratios


# --- the predictions


@dataclass(frozen=True)
class Prediction:
    """A prediction, whether it held, and the numbers."""

    name: str
    statement: str
    status: Status
    evidence: str


Answer = tuple[Status, str]


def predictions(findings: Findings) -> list[Prediction]:
    """Judge the predictions of the grid, or P1–P7 where it brings none."""
    stated = findings.cells.grid.predictions or PREDICTIONS
    unknown: Answer = ("NOT TESTED", "this report has no rule for it")
    judged = []
    for name, statement in stated.items():
        status, evidence = RULES[name](findings) if name in RULES else unknown
        judged.append(Prediction(name, statement, status, evidence))
    return judged


def _variance_law(findings: Findings) -> Answer:
    slopes = variance_slopes(findings.init)
    if not slopes:
        return "NOT TESTED", "no init sweep with three or more d_k"
    texts = [f"{init} {number(s.estimate, 2)} ({number(s.low, 2)} to {number(s.high, 2)})" for init, s in slopes.items()]
    init = PRIMARY_INIT if PRIMARY_INIT in slopes else next(iter(slopes))
    slope = slopes[init]
    evidence = f"slope of ln Var on ln d_k, bar 1 ± {SLOPE_BAR:g} under {init}: " + ", ".join(texts)
    if abs(slope.estimate - 1) <= SLOPE_BAR:
        return "HELD", evidence
    return ("INCONCLUSIVE" if slope.low <= 1 <= slope.high else "NOT HELD"), evidence


def _gap_grows(findings: Findings) -> Answer:
    gap = next((g for g in findings.gaps if g.init in (PRIMARY_INIT, "")), None)
    if gap is None:
        return "NOT TESTED", f"no recall study with two d_k under {PRIMARY_INIT}"
    listed = ", ".join(f"d_k {w}: {signed(g)}" for w, g in zip(gap.widths, gap.gaps, strict=True))
    smallest = next(
        c
        for c in findings.comparisons
        if c.endpoint == "E1"
        and (c.reference, c.treatment) == (an.REFERENCE, an.TREATMENT)
        and c.condition.get(an.INIT, "") == gap.init
        and c.condition[an.WIDTH] == gap.widths[0]
    )
    slope = "no interval" if gap.slope is None else f"{signed(gap.slope.estimate)} ({span(gap.slope)})"
    evidence = (
        f"accuracy gap inv_sqrt − unscaled {listed}; slope a doubling of d_k {slope}; "
        f"at d_k {gap.widths[0]}: {smallest.judgement.word}"
    )
    if gap.slope is None or len(smallest.seeds) < st.MIN_PAIRS:
        return "INCONCLUSIVE", f"too few seeds; {evidence}"
    if gap.slope.high < 0 or smallest.judgement.word == "HARM":
        return "NOT HELD", evidence
    return ("HELD" if gap.slope.low > 0 and smallest.judgement.word == "NO HARM" else "INCONCLUSIVE"), evidence


def _small_init(findings: Findings) -> Answer:
    e1, e2 = (findings.find(e, an.REFERENCE, an.TREATMENT, init=SMALL_INIT) for e in ENDPOINTS)
    if e1 is None or e2 is None or e1.effect is None or e2.effect is None:
        return "NOT TESTED", f"no recall study with init {SMALL_INIT}"
    evidence = (
        f"{an.condition_text(e1.condition)}: accuracy {signed(e1.effect.difference)} ({span(e1.effect.interval)}), "
        f"{e1.judgement.word}; window {signed(e2.effect.difference)} ({span(e2.effect.interval)}), {e2.judgement.word}"
    )
    gain = e1.effect.interval is not None and e1.effect.interval.low > 0
    if e1.judgement.word == "HARM" or e2.judgement.word == "NO HARM":
        return "NOT HELD", evidence
    return ("HELD" if e2.judgement.word == "HARM" and (gain or e1.judgement.word == "NO HARM") else "INCONCLUSIVE"), evidence


def _query_gradient(findings: Findings) -> Answer:
    ratios = {k: r for k, r in gradient_ratios(findings.init).items() if (an.as_number(k[1]) or math.inf) <= 256}
    if not ratios:
        return "NOT TESTED", "no gradients at step 0 were recorded"
    inverse = gradient_ratios(findings.init, "inv")
    larger = [key for key, ratio in ratios.items() if ratio > 1]
    low, high = min(ratios, key=lambda k: ratios[k]), max(ratios, key=lambda k: ratios[k])
    evidence = f"unscaled / inv_sqrt above 1 in {len(larger)} of {len(ratios)} (init, d_k), from " + " to ".join(
        f"{number(ratios[key], 2)} ({key[0]}, d_k {key[1]})" for key in (low, high)
    )
    evidence += f"; inv below 1 in {sum(r < 1 for r in inverse.values())} of {len(inverse)}" if inverse else "; no inv arm"
    held = len(larger) == len(ratios) and all(r < 1 for r in inverse.values())
    return ("HELD" if held else "NOT HELD"), evidence


def _fold(findings: Findings) -> Answer:
    cells = findings.cells
    window = findings.find("E2", an.REFERENCE, an.FOLD, init=PRIMARY_INIT)
    if window is None or not window.seeds:
        return "NOT TESTED", "no init_fold arm"
    rates = cells.levels(an.RECALL, an.RATE, **window.condition)
    tables = [
        an.scores(cells, an.RECALL, arm, window.condition, rates[:1], an.accuracy_of)
        for arm in (an.REFERENCE, an.TREATMENT, an.FOLD)
    ]
    low_rate = [dict(zip(t.seeds, t.values[:, 0], strict=True)) for t in tables]
    seeds = [s for s in window.seeds if all(s in t and math.isfinite(t[s]) for t in low_rate)]
    order = {rate: i for i, rate in enumerate(rates)}
    steps = [order.get(b or "", -1) - order.get(a or "", -1) for a, b in zip(*window.largest, strict=True)]
    if min(len(seeds), len(steps)) < 2:
        return "INCONCLUSIVE", "fewer than two paired seeds"
    recovered = paired_t_interval([low_rate[2][s] - (low_rate[0][s] + low_rate[1][s]) / 2 for s in seeds])
    smaller = paired_t_interval(steps)
    means = ", ".join(
        f"{arm} {number(float(np.mean([t[s] for s in seeds])))}"
        for arm, t in zip((an.REFERENCE, an.TREATMENT, an.FOLD), low_rate, strict=True)
    )
    evidence = (
        f"{an.condition_text(window.condition)}, lr {rates[0]}: accuracy {means}; above the middle of the gap by "
        f"{signed(recovered.estimate)} ({span(recovered)}); largest usable rate against inv_sqrt in steps of the grid "
        f"{signed(smaller.estimate, 2)} ({span(smaller, 2)})"
    )
    if recovered.high < 0 or smaller.low > 0:
        return "NOT HELD", evidence
    return ("HELD" if recovered.low > 0 and smaller.high < 0 else "INCONCLUSIVE"), evidence


def _needs_qk_norm(findings: Findings) -> Answer:
    if not findings.cells.has(an.RECALL, "qk_norm"):
        return "NOT TESTED", "this grid has no qk_norm arm"
    rows = [r for r in findings.arms if r.study == an.RECALL and r.condition.get(an.INIT, PRIMARY_INIT) == PRIMARY_INIT]
    best = {r.arm: max((an.as_number(x) or 0.0 for x in r.largest if x), default=0.0) for r in rows}
    listed = ", ".join(f"{arm} {rate:g}" for arm, rate in best.items())
    others = max((rate for arm, rate in best.items() if arm != "qk_norm"), default=0.0)
    ours = best.get("qk_norm", 0.0)
    return ("HELD" if ours > others else "INCONCLUSIVE" if ours == others else "NOT HELD"), f"largest usable: {listed}"


def _retention(findings: Findings) -> Answer:
    condition = primary_condition(findings.cells)
    found: dict[str, dict[int, float]] = {}
    for arm in (an.REFERENCE, an.TREATMENT):
        by_seed: dict[int, list[float]] = {}
        for record in findings.cells.select(an.RECALL, arm, **(condition or {})):
            late = [p for p in record["result"]["probes"] if p["step"] > 0]
            value = an.layer_mean(max(late, key=lambda p: p["step"])["layers"], "argmax_retention") if late else None
            if value is not None:
                by_seed.setdefault(record["seed"], []).append(value)
        found[arm] = {seed: float(np.mean(values)) for seed, values in by_seed.items()}
    seeds = sorted(found[an.REFERENCE].keys() & found[an.TREATMENT].keys())
    if not seeds:
        return "NOT TESTED", "no probe after step 0"
    kept = Effect("retention", *(tuple(found[arm][s] for s in seeds) for arm in (an.REFERENCE, an.TREATMENT)))
    base, level = float(np.mean(kept.reference)), float(np.mean(kept.treatment))
    evidence = (
        f"share of rows whose favourite key is still that of step 0 at the last probe: inv_sqrt "
        f"{number(base)}, unscaled {number(level)}, difference {signed(kept.difference)} "
        f"({span(kept.interval)}); high means above one half and above inv_sqrt"
    )
    if kept.interval is None:
        return "INCONCLUSIVE", evidence
    if level <= 0.5 or kept.interval.high < 0:
        return "NOT HELD", evidence
    return ("HELD" if kept.interval.low > 0 else "INCONCLUSIVE"), evidence


RULES: dict[str, Callable[[Findings], Answer]] = {
    "P1": _variance_law,
    "P2": _gap_grows,
    "P3": _small_init,
    "P4": _query_gradient,
    "P5": _fold,
    "P6": _needs_qk_norm,
    "P7": _retention,
}
