"""What the grid says: the comparisons of the arms on recall, and everything else that the report shows.

Two endpoints on the recall task, paired by seed: **E1** accuracy at each arm's own best learning rate, chosen on the
other seeds; **E2** the usable window, the share of the common rates on which the task is solved. *Primary* is unscaled −
inv_sqrt at the largest d_k under LeCun init, E1 and E2, adjusted by Holm with m = 2. Everything else is *secondary*:
the same statistics, not adjusted, and labelled so.
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

ENDPOINTS = {"E1": "accuracy at the best rate", "E2": "usable window"}


@dataclass(frozen=True)
class Comparison:
    """``arms`` (reference, treatment) on one endpoint under one condition, and the verdict on their difference.

    ``effect`` holds the scores of ``seeds``; a seed with a missing or failed cell cannot be scored and makes the verdict
    INCONCLUSIVE. ``p_adjusted`` is ``None`` for secondary comparisons, whose p is not adjusted.
    """

    primary: bool
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


def compare(cells: Cells, arms: tuple[str, str], condition: Condition, *, primary: bool) -> list[Comparison]:
    """Reference and treatment on both endpoints under one condition; as one Holm family where ``primary``."""
    pair, margin = paired_scores(cells, rec.RECALL, arms, condition, rec.accuracy_of), cells.grid.margin
    effects: list[Effect] = []
    if pair.seeds:
        effects = [own_best("E1", pair.values), Effect("E2", *(st.usable_window(v, rec.SOLVED).share for v in pair.values))]
    p_values = [st.sign_flip_p(effect.differences, "less") for effect in effects]
    adjusted = st.holm(p_values, len(ENDPOINTS))
    found = []
    for i, endpoint in enumerate(ENDPOINTS):
        effect, p = (effects[i], p_values[i]) if effects else (None, None)
        p_adjusted = adjusted[i] if primary and effects else None
        p_equal = st.equivalence_p(effect.differences, margin) if effect and len(pair.seeds) > 1 else None
        judgement = _judge(pair, effect, p if p_adjusted is None else p_adjusted, margin)
        found.append(Comparison(primary, endpoint, arms, condition, pair.seeds, effect, p, p_adjusted, p_equal, judgement))
    return found


def _judge(pair: Paired, effect: Effect | None, p: float | None, margin: float) -> Judgement:
    if pair.incomplete:
        total = len(pair.incomplete) + len(pair.seeds)
        listed = ", ".join(map(str, pair.incomplete))
        return Judgement("INCONCLUSIVE", f"{len(pair.incomplete)} of {total} seeds lack a finished cell (seed {listed})")
    if p is None or effect is None:
        return Judgement("INCONCLUSIVE", "no paired seeds")
    return st.verdict(effect.differences, margin=margin, p_harm=p)


def primary_condition(cells: Cells) -> Condition | None:
    """The largest d_k under LeCun init with both arms, or ``None`` where the grid has none."""
    found = [c for c in cells.conditions(rec.RECALL, *rec.ARMS) if c.get(rec.INIT, rec.PRIMARY_INIT) == rec.PRIMARY_INIT]
    return max(found, key=rec.width_of, default=None)


def comparisons(cells: Cells) -> tuple[Comparison, ...]:
    """The primary family first, then every secondary comparison that the grid allows, smallest d_k first."""
    first = primary_condition(cells)
    found = [] if first is None else compare(cells, rec.ARMS, first, primary=True)
    for arms in (rec.ARMS, (rec.FOLD, rec.TREATMENT), (rec.REFERENCE, rec.FOLD)):
        for condition in cells.conditions(rec.RECALL, *arms):
            if (arms, condition) != (rec.ARMS, first):
                found += compare(cells, arms, condition, primary=False)
    return tuple(found)


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
        """Unscaled − inv_sqrt, the primary condition first."""
        return [c for c in self.comparisons if c.arms == rec.ARMS]

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
