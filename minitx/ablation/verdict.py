"""What the grid says: the comparisons of the arms on recall, and everything else that the report shows.

Two endpoints, paired by seed: **E1** the score at each arm's own best learning rate, chosen on seeds of their own or on the
other seeds; **E2**, where the score is accuracy, the usable window: the share of the common rates on which the task is
solved. What the grid calls *primary* is one family, adjusted by Holm over all its endpoints. Everything else is
*secondary*: the same statistics, not adjusted, and labelled so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minitx.ablation import records as rec
from minitx.ablation import statistics as st
from minitx.ablation import tables
from minitx.ablation.effects import Effect, Paired, own_best, paired_scores
from minitx.ablation.records import Cells, Condition
from minitx.ablation.statistics import Interval, Judgement
from minitx.config import ComparisonConfig

ENDPOINTS = {"E1": "accuracy at the best rate", "E2": "usable window"}


@dataclass(frozen=True)
class Comparison:
    """``arms`` (reference, treatment) on one endpoint under one condition, and the verdict on their difference.

    ``effect`` holds the scores of ``seeds``; a seed with a missing or failed cell cannot be scored and makes the verdict
    INCONCLUSIVE. ``p_adjusted`` is ``None`` for secondary comparisons, whose p is not adjusted.
    """

    primary: bool
    study: str
    endpoint: str
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
        return f"{self.arms[1]} − {self.arms[0]}"


@dataclass(frozen=True)
class _Tested:
    """One endpoint before the family is adjusted; ``gains`` are the differences with their sign turned so that more is better."""

    planned: ComparisonConfig
    condition: Condition
    endpoint: str
    pair: Paired
    effect: Effect | None
    gains: tuple[float, ...]

    @property
    def primary(self) -> bool:
        return any(levels.items() <= self.condition.items() for levels in self.planned.primary)

    @property
    def p_harm(self) -> float | None:
        return st.sign_flip_p(self.gains, "less") if self.gains else None

    def judged(self, p_adjusted: float | None, margin: float) -> Comparison:
        p = self.p_harm
        p_equal = st.equivalence_p(self.gains, margin) if len(self.gains) > 1 else None
        judgement = _judge(self.pair, self.gains, p if p_adjusted is None else p_adjusted, margin)
        place = (self.primary, self.planned.study, self.endpoint, self.planned.arms, self.condition, self.pair.seeds)
        return Comparison(*place, self.effect, p, p_adjusted, p_equal, judgement)


def _test(cells: Cells, planned: ComparisonConfig, condition: Condition) -> list[_Tested]:
    """The endpoints of a study for one pair of arms under one condition."""
    score = score_of(cells, planned.study)
    pair = paired_scores(cells, planned.study, planned.arms, condition, score.of)
    effects: dict[str, Effect | None] = dict.fromkeys(ENDPOINTS if score.better > 0 else ("E1",))
    if pair.seeds and pair.is_tuned:
        windows = (st.usable_window(v, rec.SOLVED).share for v in pair.values)
        found = {"E1": own_best("E1", pair, score.better), "E2": Effect("E2", *windows)}
        effects = {endpoint: found[endpoint] for endpoint in effects}
    gains = {name: tuple(score.better * d for d in e.differences) if e else () for name, e in effects.items()}
    return [_Tested(planned, condition, name, pair, effect, gains[name]) for name, effect in effects.items()]


def score_of(cells: Cells, study: str) -> rec.Score:
    """What a compared study is judged by."""
    word = cells.grid.studies[study].score
    assert word is not None  # the config refuses a comparison of a study without a score
    return rec.SCORES[word]


def _judge(pair: Paired, gains: Sequence[float], p: float | None, margin: float) -> Judgement:
    if pair.incomplete:
        total = len(pair.incomplete) + len(pair.seeds)
        listed = ", ".join(map(str, pair.incomplete))
        return Judgement("INCONCLUSIVE", f"{len(pair.incomplete)} of {total} seeds lack a finished cell (seed {listed})")
    if p is None:
        return Judgement("INCONCLUSIVE", "no paired seeds")
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
    scored = [c for c in found if c.endpoint == "E1" and c.arms == rec.ARMS and c.effect and rec.width_of(c.condition)]
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
        """The arms that the grid compares first, under every condition, the primary ones first."""
        planned = self.cells.grid.comparisons
        return [c for c in self.comparisons if c.arms == planned[0].arms]

    def find(self, endpoint: str, reference: str, treatment: str, **levels: str) -> Comparison | None:
        """The comparison of these arms at the largest d_k with these levels."""
        asked = (endpoint, reference, treatment)
        rows = [c for c in self.comparisons if (c.endpoint, *c.arms) == asked and levels.items() <= c.condition.items()]
        return max(rows, key=lambda c: rec.width_of(c.condition), default=None)


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
