"""What the grid says: the comparisons of the arms on recall, and everything else that the report shows.

Endpoints, paired by seed: **E1** the score at each arm's own best learning rate, chosen on seeds of their own or on the
other seeds; **E2**, where the score is accuracy, the usable window: the share of the common rates on which the task is
solved; and every measure of the study at the rate that E1 chose. What the grid calls *primary* is one family, adjusted by Holm over all its endpoints. Everything else is
*secondary*: the same statistics, not adjusted, and labelled so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minitx.ablation import records as rec
from minitx.ablation import statistics as st
from minitx.ablation import tables
from minitx.ablation.effects import Effect, Paired, own_best, paired_scores, score_table
from minitx.ablation.records import Cells, Condition
from minitx.ablation.statistics import Interval, Judgement
from minitx.config import ComparisonConfig

WINDOW = "usable window"
"""E2 in words."""


@dataclass(frozen=True)
class Comparison:
    """``arms`` (reference, treatment) on one endpoint under one condition, and the verdict on their difference.

    ``words`` are the endpoint in words, and ``better`` is −1 where small is good.
    ``effect`` holds the scores of ``seeds``; a seed with a missing or failed cell cannot be scored and makes the verdict
    INCONCLUSIVE. ``p_adjusted`` is ``None`` for secondary comparisons, whose p is not adjusted.
    """

    primary: bool
    study: str
    endpoint: str
    words: str
    better: int
    arms: tuple[str, str]
    condition: Condition
    seeds: tuple[int, ...]
    effect: Effect | None
    p_harm: float | None
    p_adjusted: float | None
    p_equal: float | None
    judgement: Judgement

    @property
    def label(self) -> str:
        """The comparison as a difference: treatment − reference."""
        return f"{self.arms[1]} − {self.arms[0]}"

    @property
    def is_gain(self) -> bool:
        """Whether the second arm is better by more than chance: the whole interval lies on the good side of zero."""
        interval = self.effect.interval if self.effect else None
        return interval is not None and min(self.better * interval.low, self.better * interval.high) > 0

    def agrees(self, verdict: str) -> bool | None:
        """Whether what was measured is ``verdict`` (HARM or NO HARM) or its opposite; ``None``: neither is shown.

        A gain is no harm, though the verdict on it is INCONCLUSIVE, because equivalence is not shown either.
        """
        found = "NO HARM" if self.is_gain else self.judgement.word
        return None if found == "INCONCLUSIVE" else found == verdict


@dataclass(frozen=True)
class _Tested:
    """One endpoint before the family is adjusted; ``gains`` are the differences with their sign turned so that more is better."""

    planned: ComparisonConfig
    condition: Condition
    endpoint: str
    words: str
    better: int
    pair: Paired
    effect: Effect | None

    @property
    def primary(self) -> bool:
        main = self.endpoint in ("E1", "E2")
        return main and any(levels.items() <= self.condition.items() for levels in self.planned.primary)

    @property
    def gains(self) -> tuple[float, ...]:
        return tuple(self.better * d for d in self.effect.differences) if self.effect else ()

    @property
    def p_harm(self) -> float | None:
        return st.sign_flip_p(self.gains, "less") if self.gains else None

    def judged(self, p_adjusted: float | None, margin: float) -> Comparison:
        p = self.p_harm
        p_equal = st.equivalence_p(self.gains, margin) if len(self.gains) > 1 else None
        judgement = _judge(self.pair, self.gains, p if p_adjusted is None else p_adjusted, margin)
        place = (self.primary, self.planned.study, self.endpoint, self.words, self.better, self.planned.arms, self.condition)
        return Comparison(*place, self.pair.seeds, self.effect, p, p_adjusted, p_equal, judgement)


def _test(cells: Cells, planned: ComparisonConfig, condition: Condition) -> list[_Tested]:
    """The endpoints of a study for one pair of arms under one condition."""
    study, score = planned.study, cells.score(planned.study)
    assert score is not None  # the config refuses a comparison of a study without a score
    pair = paired_scores(cells, study, planned.arms, condition, score.of)
    usable = bool(pair.seeds) and pair.is_tuned

    def tested(endpoint: str, words: str, better: int, effect: Effect | None) -> _Tested:
        return _Tested(planned, condition, endpoint, words, better, pair, effect)

    found = [
        tested("E1", f"{score.name} at the best rate", score.better, own_best("E1", pair, score.better) if usable else None)
    ]
    if score.better > 0:
        windows = (st.usable_window(v, cells.solved(study)).share for v in pair.values) if usable else ()
        found.append(tested("E2", WINDOW, 1, Effect("E2", *windows) if usable else None))
    for name in cells.grid.studies[study].measures:
        effect = measured_effect(cells, study, planned.arms, condition, pair, name) if usable else None
        found.append(tested(name, rec.measure(name).name, -1, effect))
    return found


def measured_effect(
    cells: Cells, study: str, arms: Sequence[str], condition: Condition, pair: Paired, name: str
) -> Effect | None:
    """A measure of both arms at the rates that ``pair`` chose; ``None`` where a run left none."""
    better = rec.SCORES[cells.grid.studies[study].score or "loss"].better
    values = []
    for i, arm in enumerate(arms):
        table = score_table(cells, study, arm, condition, pair.seeds, pair.rates, rec.measure(name).of)
        values.append(table[range(len(pair.seeds)), pair.choices(i, better).picks])
    if not all(np.isfinite(v).all() for v in values):
        return None
    return Effect(name, *(tuple(v.tolist()) for v in values))


def _judge(pair: Paired, gains: Sequence[float], p: float | None, margin: float) -> Judgement:
    if pair.incomplete:
        total = len(pair.incomplete) + len(pair.seeds)
        listed = ", ".join(map(str, pair.incomplete))
        return Judgement("INCONCLUSIVE", f"{len(pair.incomplete)} of {total} seeds lack a finished cell (seed {listed})")
    if p is None:
        return Judgement("INCONCLUSIVE", "no paired seeds" if not pair.seeds else "a run left no number")
    return st.verdict(gains, margin=margin, p_harm=p)


def comparisons(cells: Cells) -> tuple[Comparison, ...]:
    """The primary family first, adjusted by Holm; then what is secondary, in the order of the grid, smallest d_k first.

    The family counts every primary endpoint, also those that could not be tested.
    """
    tested = [
        endpoint
        for planned in cells.grid.comparisons
        for condition in cells.conditions(planned.study, *planned.arms)
        for endpoint in _test(cells, planned, condition)
    ]
    family = [t for t in tested if t.primary]
    known = [t for t in family if t.p_harm is not None]
    adjusted = st.holm([t.p_harm for t in known if t.p_harm is not None], len(family))
    by_test = {id(t): p for t, p in zip(known, adjusted, strict=True)}
    ordered = [*family, *(t for t in tested if not t.primary)]
    return tuple(t.judged(by_test.get(id(t)), cells.grid.margin) for t in ordered)


def primary_condition(cells: Cells) -> Condition | None:
    """The primary condition of recall with the largest d_k, or ``None`` where the grid has none."""
    planned = [c for c in cells.grid.comparisons if (c.study, c.arms) == (rec.RECALL, rec.ARMS)]
    found = [
        condition
        for comparison in planned
        for condition in cells.conditions(rec.RECALL, *rec.ARMS)
        if any(levels.items() <= condition.items() for levels in comparison.primary)
    ]
    return max(found, key=rec.width_of, default=None)


@dataclass(frozen=True)
class Gap:
    """The E1 gap inv_sqrt − unscaled against log2 d_k under one init: positive is harm, slope in accuracy a doubling.

    ``rows`` are the comparisons, smallest d_k first.
    """

    init: str
    rows: tuple[Comparison, ...]
    slope: Interval | None

    @property
    def gaps(self) -> tuple[tuple[str, float], ...]:
        """(d_k, gap), smallest d_k first."""
        return tuple((c.condition[rec.WIDTH], -c.effect.difference) for c in self.rows if c.effect)


def gaps_by_width(found: Sequence[Comparison]) -> list[Gap]:
    """One :class:`Gap` an init with two or more d_k; the slope needs three seeds that are complete at every d_k."""
    mine = [c for c in found if (c.study, c.endpoint, c.arms) == (rec.RECALL, "E1", rec.ARMS)]
    scored = [c for c in mine if c.effect and rec.width_of(c.condition)]
    gaps = []
    for init in sorted({c.condition.get(rec.INIT, "") for c in scored}):
        rows = sorted((c for c in scored if c.condition.get(rec.INIT, "") == init), key=lambda c: rec.width_of(c.condition))
        widths = [rec.width_of(c.condition) for c in rows]
        if len(widths) > 1 and len(set(widths)) == len(widths):
            gaps.append(Gap(init, tuple(rows), _gap_slope(rows, widths)))
    return gaps


def _gap_slope(rows: Sequence[Comparison], widths: Sequence[float]) -> Interval | None:
    common = sorted(set.intersection(*(set(c.seeds) for c in rows)))
    if len(common) < 3:
        return None
    losses = [{s: -d for s, d in zip(c.seeds, c.effect.differences, strict=True)} for c in rows if c.effect]
    return st.slope_interval([math.log2(w) for w in widths], [[loss[seed] for loss in losses] for seed in common])


# --- everything that the report shows


@dataclass(frozen=True)
class Findings:
    """All tables of one grid."""

    cells: Cells
    comparisons: tuple[Comparison, ...]
    gaps: tuple[Gap, ...]
    arms: tuple[tables.ArmRow, ...]
    ladder: tuple[tables.LadderRow, ...]
    init: tuple[tables.InitRow, ...]
    null: tuple[tables.NullPair, ...]

    @property
    def main(self) -> list[Comparison]:
        """What the grid is about: its primary comparisons, and those of the arms that it compares first; primary ones first.

        Measures are not among them.
        """
        planned = self.cells.grid.comparisons
        endpoints = [c for c in self.comparisons if c.endpoint in ("E1", "E2")]
        return [c for c in endpoints if c.primary or c.arms == planned[0].arms]

    @property
    def about_the_scale(self) -> bool:
        """Whether the grid has the arms that sentences and results about 1/√d_k speak of."""
        return set(rec.ARMS) <= set(self.cells.grid.arms)

    def find(self, endpoint: str, reference: str, treatment: str, **levels: str) -> Comparison | None:
        """The comparison of these arms at the largest d_k with these levels; that of recall, where there is one."""
        asked = (endpoint, reference, treatment)
        rows = [c for c in self.comparisons if (c.endpoint, *c.arms) == asked and levels.items() <= c.condition.items()]
        return max(rows, key=lambda c: (c.study == rec.RECALL, rec.width_of(c.condition)), default=None)


def analyse(cells: Cells) -> Findings:
    """Every table of the grid; a study that the grid does not have gives an empty one."""
    found = comparisons(cells)
    return Findings(
        cells=cells,
        comparisons=found,
        gaps=tuple(gaps_by_width(found)),
        arms=tuple(tables.arm_rows(cells)),
        ladder=tuple(tables.ladder_rows(cells)),
        init=tuple(tables.init_rows(cells)),
        null=tuple(tables.null_pairs(cells)),
    )
