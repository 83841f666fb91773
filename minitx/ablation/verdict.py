"""What the grid says: the comparisons of the arms on recall, and everything else that the report shows.

Endpoints, paired by seed: **E1** the score at each arm's own best learning rate, chosen on seeds of their own or on the
other seeds; **E2**, where the score is accuracy, the usable window: the share of the common rates on which the task is
solved; and every measure of the study at the rate that E1 chose. What the grid calls *primary* is one family, adjusted by Holm over all its endpoints. Everything else is
*secondary*: the same statistics, not adjusted, and labelled so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from minitx.ablation import records as rec
from minitx.ablation import statistics as st
from minitx.ablation import tables
from minitx.ablation.effects import Effect, Paired
from minitx.ablation.records import Cells, Condition
from minitx.ablation.statistics import Interval, Judgement
from minitx.config import ComparisonConfig

WINDOW = "usable window"
"""E2 in words."""


@dataclass(frozen=True)
class Comparison:
    """``arms`` (reference, treatment) on one endpoint under one condition, and the verdict on their difference.

    ``words`` are the endpoint in words, and ``better`` is −1 where small is good.
    ``effect`` holds the scores of ``seeds``; a seed with a missing or failed cell cannot be scored, is ``incomplete`` and makes
    the verdict INCONCLUSIVE. ``p_adjusted`` is ``None`` for secondary comparisons, whose p is not adjusted.
    """

    primary: bool
    study: str
    endpoint: str
    words: str
    better: int
    arms: tuple[str, str]
    condition: Condition
    seeds: tuple[int, ...]
    incomplete: tuple[int, ...]
    effect: Effect | None
    margin: float
    p_adjusted: float | None = None

    @property
    def label(self) -> str:
        """The comparison as a difference: treatment − reference."""
        return f"{self.arms[1]} − {self.arms[0]}"

    @property
    def gains(self) -> tuple[float, ...]:
        """The differences with their sign turned so that more is better; none without an effect."""
        return tuple(self.better * d for d in self.effect.differences) if self.effect else ()

    @cached_property
    def p_harm(self) -> float | None:
        """One-sided p of "no harm", not adjusted."""
        return st.sign_flip_p(self.gains, "less") if self.gains else None

    @property
    def p_equal(self) -> float | None:
        """p of "not equal within the margin"; None under two pairs."""
        return st.equivalence_p(self.gains, self.margin) if len(self.gains) > 1 else None

    @cached_property
    def judgement(self) -> Judgement:
        """The verdict, and why."""
        p = self.p_harm if self.p_adjusted is None else self.p_adjusted
        if self.incomplete:
            total = len(self.incomplete) + len(self.seeds)
            listed = ", ".join(map(str, self.incomplete))
            return Judgement("INCONCLUSIVE", f"{len(self.incomplete)} of {total} seeds lack a finished cell (seed {listed})")
        if p is None:
            return Judgement("INCONCLUSIVE", "no paired seeds" if not self.seeds else "a run left no number")
        return st.verdict(self.gains, margin=self.margin, p_harm=p)

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


def _compare(cells: Cells, planned: ComparisonConfig, condition: Condition) -> Iterator[Comparison]:
    """The endpoints of a study for one pair of arms under one condition; no p is adjusted."""
    study, score = planned.study, cells.score(planned.study)
    assert score is not None  # the config refuses a comparison of a study without a score
    pair = Paired(cells, study, planned.arms, condition, score)
    found = [("E1", f"{score.name} at the best rate", score.better, pair.effect())]
    if score.better > 0:
        windows = (st.usable_window(v, cells.planned(study).solved).share for v in pair.values)
        found.append(("E2", WINDOW, 1, Effect(*windows) if pair.usable else None))
    for name in cells.grid.studies[study].measures:
        measured = rec.measure(name)
        found.append((name, measured.name, measured.better, pair.effect(measured)))
    is_primary = any(levels.items() <= condition.items() for levels in planned.primary)
    for endpoint, words, better, effect in found:
        yield Comparison(
            primary=is_primary and endpoint in ("E1", "E2"),
            study=study,
            endpoint=endpoint,
            words=words,
            better=better,
            arms=planned.arms,
            condition=condition,
            seeds=pair.seeds,
            incomplete=pair.incomplete,
            effect=effect,
            margin=cells.grid.margin,
        )


def comparisons(cells: Cells) -> tuple[Comparison, ...]:
    """The primary family first, adjusted by Holm; then what is secondary, in the order of the grid, smallest d_k first.

    The family counts every primary endpoint, also those that could not be tested.
    """
    found = [
        comparison
        for planned in cells.grid.comparisons
        for condition in cells.conditions(planned.study, *planned.arms)
        for comparison in _compare(cells, planned, condition)
    ]
    family = [c for c in found if c.primary]
    adjusted = iter(st.holm([c.p_harm for c in family if c.p_harm is not None], len(family)))
    family = [c if c.p_harm is None else replace(c, p_adjusted=next(adjusted)) for c in family]
    return (*family, *(c for c in found if not c.primary))


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
    def primary_condition(self) -> Condition | None:
        """The primary condition of recall with the largest d_k, or ``None`` where the grid has none."""
        found = [c.condition for c in self.comparisons if c.primary and (c.study, c.arms) == (rec.RECALL, rec.ARMS)]
        return max(found, key=rec.width_of, default=None)

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
