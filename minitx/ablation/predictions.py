"""The fate of the predictions, computed from the findings.

The statements stand in the grid's config. One that foretells verdicts is held against them; for those about the scale that say
more than a verdict can, here is a rule for each name, which returns a status and its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from minitx.ablation import records as rec
from minitx.ablation import statistics as st
from minitx.ablation.effects import Effect, Paired
from minitx.ablation.records import Record
from minitx.ablation.tables import gradient_ratios, layer_mean, variance_slopes
from minitx.ablation.verdict import Findings
from minitx.ablation.wording import condition_text, number, place_text, signed, span
from minitx.config import ExpectedVerdict, PredictionConfig

SLOPE_BAR = 0.1
"""The variance law holds in the real network when the slope of ln Var on ln d_k is within 1 ± this."""

Status = Literal["HELD", "NOT HELD", "INCONCLUSIVE", "NOT TESTED"]
Answer = tuple[Status, str]


@dataclass(frozen=True)
class Prediction:
    """A prediction, whether it held, and the numbers."""

    name: str
    statement: str
    status: Status
    evidence: str


def predictions(findings: Findings) -> list[Prediction]:
    """Judge the predictions that the grid brings: by the verdicts that they foretell, else by the rules of their names."""
    stated = findings.cells.grid.predictions.items()
    return [Prediction(name, p.statement, *_judge(findings, name, p)) for name, p in stated]


def _judge(findings: Findings, name: str, prediction: PredictionConfig) -> Answer:
    if prediction.expect:
        return _foretold(findings, prediction.expect)
    rule = RULES.get(name) if findings.about_the_scale else None
    return rule(findings) if rule else ("NOT TESTED", "it foretells no verdict, and this report has no rule for it")


def _foretold(findings: Findings, expected: Sequence[ExpectedVerdict]) -> Answer:
    """HELD where every verdict is the one foretold, NOT HELD where one is the opposite."""
    met: list[bool | None] = []
    evidence = []
    for one in expected:
        asked = (one.study, one.endpoint, one.arms)
        found = [c for c in findings.comparisons if (c.study, c.endpoint, c.arms) == asked]
        for c in [c for c in found if one.condition.items() <= c.condition.items()]:
            met.append(c.agrees(one.verdict))
            size = f"{signed(c.effect.difference)} ({span(c.effect.interval)})" if c.effect else c.judgement.reason
            place = place_text(c.study, c.condition)
            came_out = f"{c.judgement.word}{', a gain' if c.is_gain else ''}"
            evidence.append(f"{c.label}, {place}: {c.words} {size}, {came_out}, foretold {one.verdict}")
    if not met:
        return "NOT TESTED", "no such comparison"
    return _status(held=all(met), refuted=False in met), "; ".join(evidence)


def _status(*, held: bool, refuted: bool) -> Status:
    if refuted:
        return "NOT HELD"
    return "HELD" if held else "INCONCLUSIVE"


def _variance_law(findings: Findings) -> Answer:
    slopes = variance_slopes(findings.init)
    if not slopes:
        return "NOT TESTED", "no init sweep with three or more d_k"
    texts = [f"{init} {number(s.estimate, 2)} ({number(s.low, 2)} to {number(s.high, 2)})" for init, s in slopes.items()]
    init = rec.PRIMARY_INIT if rec.PRIMARY_INIT in slopes else next(iter(slopes))
    slope = slopes[init]
    evidence = f"slope of ln Var on ln d_k, bar 1 ± {SLOPE_BAR:g} under {init}: " + ", ".join(texts)
    if abs(slope.estimate - 1) <= SLOPE_BAR:
        return "HELD", evidence
    return ("INCONCLUSIVE" if slope.low <= 1 <= slope.high else "NOT HELD"), evidence


def _gap_grows(findings: Findings) -> Answer:
    gap = next((g for g in findings.gaps if g.init in (rec.PRIMARY_INIT, "")), None)
    if gap is None:
        return "NOT TESTED", f"no recall study with two d_k under {rec.PRIMARY_INIT}"
    listed = ", ".join(f"d_k {w}: {signed(g)}" for w, g in gap.gaps)
    width, at_smallest = gap.gaps[0][0], gap.rows[0].judgement.word
    slope = "no interval" if gap.slope is None else f"{signed(gap.slope.estimate)} ({span(gap.slope)})"
    evidence = f"accuracy gap inv_sqrt − unscaled {listed}; slope a doubling of d_k {slope}; at d_k {width}: {at_smallest}"
    if gap.slope is None or len(gap.rows[0].seeds) < st.MIN_PAIRS:
        return "INCONCLUSIVE", f"too few seeds; {evidence}"
    held = gap.slope.low > 0 and at_smallest == "NO HARM"
    return _status(held=held, refuted=gap.slope.high < 0 or at_smallest == "HARM"), evidence


def _small_init(findings: Findings) -> Answer:
    e1, e2 = (findings.find(endpoint, *rec.ARMS, init=rec.SMALL_INIT) for endpoint in ("E1", "E2"))
    if e1 is None or e2 is None or e1.effect is None or e2.effect is None:
        return "NOT TESTED", f"no recall study with init {rec.SMALL_INIT}"
    final, window = e1.judgement.word, e2.judgement.word
    evidence = (
        f"{condition_text(e1.condition)}: accuracy {signed(e1.effect.difference)} ({span(e1.effect.interval)}), "
        f"{final}; window {signed(e2.effect.difference)} ({span(e2.effect.interval)}), {window}"
    )
    held = window == "HARM" and (e1.is_gain or final == "NO HARM")
    return _status(held=held, refuted=final == "HARM" or window == "NO HARM"), evidence


def _query_gradient(findings: Findings) -> Answer:
    ratios = {k: r for k, r in gradient_ratios(findings.init).items() if (rec.as_number(k[1]) or math.inf) <= 256}
    if not ratios:
        return "NOT TESTED", "no gradients at step 0 were recorded"
    inverse = gradient_ratios(findings.init, "inv").values()
    larger, smaller = sum(r > 1 for r in ratios.values()), sum(r < 1 for r in inverse)
    ordered = sorted(ratios.items(), key=lambda item: item[1])
    ends = " to ".join(f"{number(r, 2)} ({init}, d_k {width})" for (init, width), r in (ordered[0], ordered[-1]))
    evidence = f"unscaled / inv_sqrt above 1 in {larger} of {len(ratios)} (init, d_k), from {ends}"
    evidence += f"; inv below 1 in {smaller} of {len(inverse)}" if inverse else ""
    return ("HELD" if larger == len(ratios) and smaller == len(inverse) else "NOT HELD"), evidence


def _fold(findings: Findings) -> Answer:
    window = findings.find("E2", rec.REFERENCE, rec.FOLD, init=rec.PRIMARY_INIT)
    if window is None or not window.seeds:
        return "NOT TESTED", "no init_fold arm"
    arms = (*rec.ARMS, rec.FOLD)
    pair = Paired(findings.cells, rec.RECALL, arms, window.condition, rec.SCORES["accuracy"])
    if len(pair.seeds) < 2:
        return "INCONCLUSIVE", "fewer than two paired seeds"
    base, bare, fold = low = [values[:, 0] for values in pair.values]
    largest = [np.array(st.usable_window(values, findings.cells.planned(rec.RECALL).solved).largest) for values in pair.values]
    recovered, smaller = st.paired_t_interval(fold - (base + bare) / 2), st.paired_t_interval(largest[2] - largest[0])
    means = ", ".join(f"{arm} {number(float(v.mean()))}" for arm, v in zip(arms, low, strict=True))
    evidence = (
        f"{condition_text(window.condition)}, lr {pair.rates[0]}: accuracy {means}; above the middle of the gap by "
        f"{signed(recovered.estimate)} ({span(recovered)}); largest usable rate against inv_sqrt in steps of the grid "
        f"{signed(smaller.estimate, 2)} ({span(smaller, 2)})"
    )
    refuted = recovered.high < 0 or smaller.low > 0
    return _status(held=recovered.low > 0 and smaller.high < 0, refuted=refuted), evidence


def _needs_qk_norm(findings: Findings) -> Answer:
    if "qk_norm" not in findings.cells.arms(rec.RECALL):
        return "NOT TESTED", "this grid has no qk_norm arm"
    rows = [
        r for r in findings.arms if r.study == rec.RECALL and r.condition.get(rec.INIT, rec.PRIMARY_INIT) == rec.PRIMARY_INIT
    ]
    best = {r.arm: max((rec.as_number(x) or 0.0 for x in r.largest if x), default=0.0) for r in rows}
    listed = ", ".join(f"{arm} {rate:g}" for arm, rate in best.items())
    ours, others = best.pop("qk_norm", 0.0), max(best.values(), default=0.0)
    return _status(held=ours > others, refuted=ours < others), f"largest usable: {listed}"


def _retention(findings: Findings) -> Answer:
    condition = findings.primary_condition or {}
    kept: dict[str, dict[int, list[float]]] = {arm: {} for arm in rec.ARMS}
    for arm in rec.ARMS:
        for record in findings.cells.select(rec.RECALL, arm, **condition):
            value = _last_retention(record)
            if value is not None:
                kept[arm].setdefault(record["seed"], []).append(value)
    seeds = sorted(kept[rec.REFERENCE].keys() & kept[rec.TREATMENT].keys())
    if not seeds:
        return "NOT TESTED", "no probe after step 0"
    effect = Effect(*(tuple(float(np.mean(kept[arm][s])) for s in seeds) for arm in rec.ARMS))
    base, level, interval = float(np.mean(effect.reference)), float(np.mean(effect.treatment)), effect.interval
    evidence = (
        f"share of rows whose favourite key is still that of step 0 at the last probe: inv_sqrt {number(base)}, unscaled "
        f"{number(level)}, difference {signed(effect.difference)} ({span(interval)}); high means above one half and above "
        "inv_sqrt"
    )
    if interval is None:
        return "INCONCLUSIVE", evidence
    return _status(held=interval.low > 0, refuted=level <= 0.5 or interval.high < 0), evidence


def _last_retention(record: Record) -> float | None:
    last = max(record["result"]["probes"], key=lambda p: p["step"], default=None)
    return layer_mean(last["layers"], "argmax_retention") if last and last["step"] > 0 else None


RULES: dict[str, Callable[[Findings], Answer]] = {
    "P1": _variance_law,
    "P2": _gap_grows,
    "P3": _small_init,
    "P4": _query_gradient,
    "P5": _fold,
    "P6": _needs_qk_norm,
    "P7": _retention,
}
