"""Judge the records: endpoints, intervals, verdicts. See ``docs/ablation.md``, "How it is judged"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from minitx.ablation.arms import Arm
from minitx.ablation.design import AblationConfig, ComparisonConfig, Condition, Endpoint, Verdict, endpoints
from minitx.ablation.intervals import ALPHA, MIN_PAIRS, Span, holm, median, median_interval, sign_test
from minitx.ablation.records import Runs

_RATIOS = ("time", "stability")
_WORDS: dict[Endpoint, tuple[Verdict, Verdict]] = {
    "time": ("FASTER", "SLOWER"),
    "stability": ("MORE STABLE", "LESS STABLE"),
    "largest_rate": ("NARROWER", "WIDER"),
    "accuracy": ("WORSE", "BETTER"),
}
"""The verdicts for an effect below and above the margin. For losses and measures: BETTER and WORSE."""
_HARM = ("SLOWER", "LESS STABLE", "NARROWER", "WORSE")


@dataclass(frozen=True)
class Pair:
    """One seed of a comparison: the values of reference and treatment, and their ratio or difference.

    ``time``: steps, the ratio treatment / reference (above 1: slower). ``stability``: largest stable rates, the ratio
    reference / treatment (above 1: less stable). ``largest_rate``: indices on the grid of rates, treatment - reference, in steps
    of the grid. Scores and measures: values, treatment - reference.
    """

    seed: int
    reference: Span
    treatment: Span
    effect: Span


@dataclass(frozen=True)
class Finding:
    """One comparison on one endpoint under one condition.

    Attributes:
        comparison: study, arms, law.
        endpoint: what is compared.
        condition: the levels of all factors except the rate.
        is_primary: whether it belongs to the family that is adjusted.
        rates: the best rates of reference and treatment, one for each judged seed; () for ``stability``.
        at_edge: for each arm, whether a best rate is the smallest or largest of the rates tried.
        pairs: the seeds that have both arms.
        missing: the seeds without a pair.
        estimate: the median of the lower ends of the effects. For largest rates, the end of ``printed`` that is nearer to 0.
        or_more: whether the median of the upper ends is larger. For largest rates, whether the other end of ``printed`` is
            farther from 0.
        interval: the interval of the median effect, by order statistics. None with fewer than six pairs.
        coverage: the coverage of the interval.
        p: the p value of a one-sided sign test that the treatment is worse by more than the margin. None with fewer than six pairs.
        p_adjusted: p adjusted by Holm over the primary findings. None for the others.
        law: the law's value under this condition, or None.
        verdict, reason: the verdict, and its reason in one sentence.
    """

    comparison: ComparisonConfig
    endpoint: Endpoint
    condition: Condition
    is_primary: bool
    rates: tuple[tuple[str, ...], tuple[str, ...]]
    at_edge: tuple[bool, bool]
    pairs: tuple[Pair, ...]
    missing: tuple[int, ...]
    estimate: float | None
    or_more: bool
    interval: Span | None
    coverage: float | None
    p: float | None
    p_adjusted: float | None
    law: float | None
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Equality:
    """The result of the score ``equal``: for each seed, whether the arms of a comparison have the same losses bit for bit."""

    comparison: ComparisonConfig
    condition: Condition
    equal: Mapping[int, bool]
    steps: int


@dataclass(frozen=True)
class Findings:
    """All results of ``judge``, with the runs."""

    grid: AblationConfig
    runs: Runs
    findings: tuple[Finding, ...]
    equalities: tuple[Equality, ...]

    def find(
        self, study: str, endpoint: Endpoint, arms: Sequence[str] | None = None, condition: Condition | None = None
    ) -> list[Finding]:
        """Return the findings that match all arguments."""
        wanted = set((condition or {}).items())
        return [
            f
            for f in self.findings
            if f.comparison.study == study
            and f.endpoint == endpoint
            and (arms is None or f.comparison.arms == tuple(arms))
            and wanted <= set(f.condition.items())
        ]


def judge(grid: AblationConfig, runs: Runs) -> Findings:
    """Judge a grid. The result depends only on its config and its runs."""
    found, equalities = [], []
    for comparison in grid.comparisons:
        for condition in _conditions(runs, comparison):
            arms = [Arm(grid, runs, comparison.study, arm, condition) for arm in comparison.arms]
            for endpoint in endpoints(grid.studies[comparison.study]):
                if endpoint == "equal":
                    equalities.append(_equality(comparison, condition, arms))
                elif endpoint != "threshold":
                    found.append(_Contest(comparison, condition, endpoint, arms).finding())
    return Findings(grid, runs, tuple(_with_holm(grid, found)), tuple(equalities))


def _conditions(runs: Runs, comparison: ComparisonConfig) -> list[Condition]:
    """The conditions that the grid has for both arms."""
    reference, treatment = ([run.condition for run in runs.select(comparison.study, arm)] for arm in comparison.arms)
    return [condition for i, condition in enumerate(reference) if condition in treatment and condition not in reference[:i]]


def printed(endpoint: Endpoint, pairs: Sequence[Pair]) -> Span:
    """Return the median of the lower and of the upper ends of the effects. For largest rates, remove the uncertainty of one step."""
    middle = median([pair.effect for pair in pairs], ratio=endpoint in _RATIOS)
    return Span(middle.low + 1, middle.high - 1) if endpoint == "largest_rate" else middle


@dataclass(frozen=True)
class _Contest:
    """Two arms on an endpoint under a condition."""

    comparison: ComparisonConfig
    condition: Condition
    endpoint: Endpoint
    arms: Sequence[Arm]

    @property
    def score(self) -> str:
        """What chooses the rates: the endpoint itself, or for a measure the study's first score that chooses any."""
        choosing = [score for score in self.arms[0].study.scores if score in ("time", "loss", "accuracy")]
        if self.endpoint == "largest_rate":
            return "time"
        return self.endpoint if self.endpoint in choosing else choosing[0]

    def word(self, effect: Span) -> Verdict:
        """The verdict where the whole effect is beyond the margin, or within it; steps of the grid count from two on."""
        grid = self.arms[0].grid
        margin = 1.0 if self.endpoint == "largest_rate" else grid.score_margin
        low, high = (1 / grid.ratio_margin, grid.ratio_margin) if self.endpoint in _RATIOS else (-margin, margin)
        below, above = _WORDS.get(self.endpoint, ("BETTER", "WORSE"))
        if effect.within(Span(low, high)):
            return "SAME"
        return above if effect.low > high else below if effect.high < low else "UNDECIDED"

    def pairs(self, rates: Sequence[Mapping[int, str | None]]) -> list[Pair]:
        """The pairs of the judged seeds that both arms have, each arm at its rate for that seed."""
        found = []
        for seed in self.arms[0].study.seeds:
            first, second = (arm.value(self.endpoint, own.get(seed), seed) for arm, own in zip(self.arms, rates, strict=True))
            if first is None or second is None:
                continue
            if self.endpoint in _RATIOS:
                effect = second.over(first) if self.endpoint == "time" else first.over(second)
            else:
                effect = second.minus(first)
            if self.endpoint == "largest_rate":  # it lies between two rates of the grid
                effect = Span(effect.low - 1, effect.high + 1)
            found.append(Pair(seed, first, second, effect))
        return found

    def verdict(self, rates: Sequence[Mapping[int, str | None]], pairs: Sequence[Pair]) -> tuple[Verdict, str]:
        """The word and its reason."""
        found = median_interval([pair.effect for pair in pairs])
        if found is None:
            return "UNDECIDED", f"{len(pairs)} pairs, and fewer than {MIN_PAIRS} give no verdict"
        if not self.reference_solves():
            return "UNDECIDED", "no tuning run of the first arm solves the task"
        word, interval = self.word(found[0]), f"the interval from {found[0].low:.3g} to {found[0].high:.3g}"
        if word == "UNDECIDED":
            return word, f"{interval} crosses the margin"
        reason = f"{interval} lies {'within' if word == 'SAME' else 'beyond'} the margin"
        if self.endpoint in ("stability", "largest_rate"):
            return word, reason
        # in hindsight: the worse arm takes its best rate for the judged seeds
        is_above = printed(self.endpoint, pairs).low > (1 if self.endpoint in _RATIOS else 0)
        worse = 1 if is_above == (self.endpoint != "accuracy") else 0
        seeds = self.arms[worse].study.seeds
        best = self.arms[worse].best_rate(self.score, seeds)
        changed = [dict.fromkeys(seeds, best) if i == worse else own for i, own in enumerate(rates)]
        again = median_interval([pair.effect for pair in self.pairs(changed)])
        if again is None or self.word(again[0]) != word:
            which = ("first", "second")[worse]
            return "UNDECIDED", f"{reason}, but not with the {which} arm at {best}, its best rate in hindsight"
        return word, reason

    def reference_solves(self) -> bool:
        """Whether for every judged seed a run that chooses the reference's rate solves the task, where that is judged."""
        arm = self.arms[0]
        return self.endpoint not in ("time", "largest_rate") or all(arm.solves(arm.tuning_seeds(s)) for s in arm.study.seeds)

    def finding(self) -> Finding:
        """Everything that is found."""
        study, law, is_ratio = self.arms[0].study, self.comparison.law, self.endpoint in _RATIOS
        rates: list[dict[int, str | None]] = [{}, {}]
        if self.endpoint != "stability":  # there the rates are what is measured
            rates = [{seed: arm.best_rate(self.score, arm.tuning_seeds(seed)) for seed in study.seeds} for arm in self.arms]
        first, second = (tuple(rate for rate in own.values() if rate is not None) for own in rates)
        pairs = self.pairs(rates)
        middle = printed(self.endpoint, pairs) if pairs else None
        estimate = None if middle is None else middle.low
        if middle is not None and self.endpoint == "largest_rate":
            estimate = min(max(0.0, middle.low), middle.high)
        interval, coverage = median_interval([pair.effect for pair in pairs]) or (None, None)
        harmed = sum(self.word(pair.effect) in _HARM for pair in pairs) if self.reference_solves() else 0
        verdict, reason = self.verdict(rates, pairs)
        return Finding(
            comparison=self.comparison,
            endpoint=self.endpoint,
            condition=self.condition,
            is_primary=self.endpoint == study.scores[0] and any(_fits(w, self.condition) for w in self.comparison.primary),
            rates=(first, second),
            at_edge=(self.arms[0].has_edge(first), self.arms[1].has_edge(second)),
            pairs=tuple(pairs),
            missing=tuple(sorted(set(study.seeds) - {pair.seed for pair in pairs})),
            estimate=estimate,
            or_more=middle is not None and middle.high > middle.low,
            interval=interval,
            coverage=coverage,
            p=None if interval is None else sign_test(harmed, len(pairs)),
            p_adjusted=None,
            law=float(self.condition[law.factor]) ** law.power if law and is_ratio else None,
            verdict=verdict,
            reason=reason,
        )


def _fits(wanted: Condition, condition: Condition) -> bool:
    return wanted.items() <= condition.items()


def _with_holm(grid: AblationConfig, found: Sequence[Finding]) -> Iterator[Finding]:
    """The findings with adjusted p values. A primary comparison that was not made counts in the family, too."""
    primary = [finding for finding in found if finding.is_primary]
    wanted = [(comparison, condition) for comparison in grid.comparisons for condition in comparison.primary]
    absent = [w for w in wanted if not any(w[0] == f.comparison and _fits(w[1], f.condition) for f in primary)]
    adjusted = iter(holm([finding.p for finding in primary if finding.p is not None], len(primary) + len(absent)))
    for finding in found:
        if finding.is_primary and finding.p is not None:
            p = next(adjusted)
            finding = replace(finding, p_adjusted=p)
            if finding.verdict in _HARM and p >= ALPHA:
                reason = f"{finding.reason}, but the adjusted p = {p:.3g} is not below {ALPHA}"
                finding = replace(finding, verdict="UNDECIDED", reason=reason)
        yield finding


def _equality(comparison: ComparisonConfig, condition: Condition, arms: Sequence[Arm]) -> Equality:
    reference, treatment = arms[0].done, arms[1].done
    both = [key for key in reference if key in treatment and key[1] in arms[0].study.seeds]
    equal = {seed: True for _, seed in both}
    for key in both:
        equal[key[1]] &= reference[key].result["digest"] == treatment[key].result["digest"]
    return Equality(comparison, condition, equal, min((reference[key].result["steps"] for key in both), default=0))
