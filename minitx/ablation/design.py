"""The config of a grid of training runs: arms, studies, comparisons and predictions. See ``docs/ablation.md``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from minitx.config.schema import Config, ConfigError, Count, Finite, Natural, Positive, require
from minitx.config.training import WindowConfig

RATE = "lr"
"""The name of the tuned factor. Its levels are learning rates."""

PARTS = "qk", "rest"
"""Levels of a factor that trains only W_Q and W_K, or only the other weights."""

Condition = Mapping[str, str]
"""A level for each factor, by the factor's name."""


@dataclass(frozen=True, kw_only=True)
class StartConfig(Config):
    """The runs whose weights a study starts from: runs of another study with the same seed and the same factors.

    All arms of the study start from the same weights. If an arm has another scale, the difference is folded into W_Q and W_K
    (``init_from.fold_scale=true``), so that every arm starts as the same function. Each run checks this.

    Attributes:
        study: the study that trained the weights (the first phase).
        arm: the arm of that study.
        solved: start only from runs that solved their task, as defined by ``solved`` of their study.
    """

    study: str
    arm: str
    solved: bool = True


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig(WindowConfig):
    """How the largest stable learning rate of a trained model is measured, for each arm and seed: doubling, then bisection.

    The rate is ``optimizer.lr``; the other keys of the optimizer do not change. A run ends when it fails, and is stable if it
    completes ``trainer.max_steps`` steps.

    Attributes:
        first: the rate at which the search starts, by arm; null: the rate of the config.
        bisections: number of bisections of the logarithm after the doubling: high / low = 2^(1 / 2^bisections), 1.044 for four.
        metric: train_accuracy: a run fails when the mean over ``window`` steps falls below ``value``; train_loss: a run fails
            when the mean rises more than ``value`` above the loss that ``above`` names.
        value: the limit.
        window: number of steps in a mean.
        above: for train_loss: start, the loss of the starting model on the first ``window`` batches, for trained models; minimum,
            the lowest mean so far, for models from scratch, whose loss falls far below the start.
    """

    first: Mapping[str, Positive | None]
    bisections: Natural = 4
    window: Count = 8
    above: Literal["start", "minimum"] = "start"

    def check(self) -> None:
        super().check()
        require(
            self.above == "start" or self.metric == "train_loss", f"above=minimum needs metric=train_loss, got {self.metric}"
        )


Score = Literal["time", "loss", "accuracy", "equal", "speedup"]


@dataclass(frozen=True, kw_only=True)
class StudyConfig(Config):
    """One full factorial of a grid: ``arms`` x the levels of every factor x ``seeds``.

    The factor ``lr`` is tuned: for each seed, an arm is judged at the rate that is best on the other seeds.

    Attributes:
        title: a title for the report.
        base: overrides for every run. ``trainer.max_steps`` must be among them.
        arms: names of ``ablation.arms``.
        factors: the levels of each factor, and the overrides of each level.
        seeds: the seeds.
        skip: combinations to leave out. Each is a mapping from a factor (or ``arm``, ``seed``) to a list of levels.
        start: the runs whose weights these runs start from.
        threshold: measure the largest stable rate of each arm, instead of one run for each level of ``lr``.
        scores: the quantities to judge. time: steps until the task is solved; loss, accuracy: results of the validation after
            the last step; equal: whether the training losses are equal bit for bit; speedup: how many times fewer operations
            one run needs for the other's final loss, at the rates that the loss chooses.
        measures: further quantities to judge, at the rate that the first loss or accuracy chooses: names from ``MEASURES`` in
            ``minitx.ablation.measures``, such as ``loss_at_256``.
        solved: when the task counts as solved, for ``time`` and for runs that start from these.
        keep_attention: keep the attention weights of ``callbacks.probe.weights_every`` in the records.
    """

    title: str = ""
    base: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    factors: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    skip: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    start: StartConfig | None = None
    threshold: ThresholdConfig | None = None
    scores: tuple[Score, ...] = ()
    measures: tuple[str, ...] = ()
    solved: WindowConfig = field(default_factory=WindowConfig)
    keep_attention: bool = False

    def check(self) -> None:
        if self.measures and not {"loss", "accuracy"} & {*self.scores}:
            raise ConfigError(f"measures={list(self.measures)} need the score loss or accuracy to choose the rate")
        if self.threshold is not None:
            if self.scores or RATE in self.factors:
                raise ConfigError(f"threshold searches for the rate itself: remove scores and the factor {RATE}")
            _require_known("arms", self.arms, self.threshold.first, "threshold.first")
        if {"arm", "seed"} & {*self.factors}:
            raise ConfigError(
                "factors.arm and factors.seed are reserved for the arms and seeds of the study: choose other names"
            )
        require(len({*self.scores}) == len(self.scores), f"scores={list(self.scores)} names a score twice")
        require("speedup" not in self.scores or "loss" in self.scores, "the score speedup needs the score loss")
        rates = self.factors.get(RATE, {})
        if words := [level for level in rates if not _is_rate(level)]:
            raise ConfigError(
                f"factors.{RATE} has the level {words[:1]}, but the name of a learning rate must be a positive number"
            )
        require(len({*map(float, rates)}) == len(rates), f"factors.{RATE} names a rate twice: {', '.join(rates)}")
        for level, rate in ((level, settings(overrides).get("optimizer.lr", level)) for level, overrides in rates.items()):
            if _is_rate(rate) and float(rate) != float(level):
                raise ConfigError(
                    f"factors.{RATE}.{level} has optimizer.lr={rate}, but the report would show {level}: make them equal"
                )
        there = {"arm": self.arms, "seed": [str(seed) for seed in self.seeds], **self.factors}
        for skip in self.skip:
            require(bool(skip), "skip=[{}] would leave out every run: name at least one factor")
            _require_known("skip", skip, there, "the study")
            for key, levels in skip.items():
                _require_known(f"skip.{key}", levels, there[key], "it")

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The compared quantities: ``threshold``, or the scores and the measures."""
        return ("threshold",) if self.threshold else (*self.scores, *self.measures)


@dataclass(frozen=True, kw_only=True)
class LawConfig(Config):
    """A prediction for a ratio: the level of ``factor`` to the power ``power``. With ``parts``, this is an upper bound.

    Attributes:
        factor: a factor of the study whose levels are numbers.
        power: the exponent of the level, e.
        text: the law as text for the report.
        parts: a factor of a threshold whose levels ``qk`` and ``rest`` train only W_Q and W_K, or only the other weights. With
            the largest stable rates η_QK and η_R of the first arm there, the share of W_Q and W_K is
            s = (1 / η_QK) / (1 / η_QK + 1 / η_R), and the ratio is 1 + (level^e - 1) s.
    """

    factor: str
    power: Finite
    text: str = ""
    parts: str | None = None

    def part(self, condition: Condition) -> str | None:
        """Return which part of the weights trains alone under a condition: ``qk``, ``rest``, or None for all weights."""
        level = condition.get(self.parts or "")
        return level if level in PARTS else None


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig(Config):
    """Two arms, or two levels of a factor, to compare on each score of a study, under every condition that has both.

    Attributes:
        study: a name of ``ablation.studies``.
        arms: the reference and the treatment.
        against: levels of the reference, in place of the treatment's. With one arm twice, this compares each other level with these.
        law: a prediction to compare the ratio with.
    """

    study: str
    arms: tuple[str, str]
    against: Condition = field(default_factory=dict, hash=False)
    law: LawConfig | None = None


@dataclass(frozen=True, kw_only=True)
class OverConfig(Config):
    """The divisor of a measured ratio: the median ratio of another comparison, at the same levels of all factors that both studies have.

    Attributes:
        study: the study of the other comparison.
        arms: its arms.
        condition: levels of further factors of that study.
    """

    study: str
    arms: tuple[str, str]
    condition: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExpectedConfig(OverConfig):
    """The expected range of a ratio (of a difference for scores and measures) in all matching comparisons.

    Attributes:
        study: the study of the comparison.
        arms: the arms of the comparison.
        condition: consider only comparisons with these levels.
        endpoint: the compared quantity: threshold, time, loss, accuracy, or the name of a measure.
        range: the smallest and the largest number expected; null: no bound on this side.
        over: first divide the ratio by the ratio of another comparison; null: do not divide.
        formula: first divide the ratio by the prediction of the law of the comparison.
        share: the range is of the share of W_Q and W_K in 1/η* of the first arm, not of the ratio (see ``LawConfig.parts``).
        by: median: the median must be in the range; interval: the interval of the median must overlap the range.
    """

    endpoint: str
    range: tuple[float | None, float | None]
    over: OverConfig | None = None
    formula: bool = False
    share: bool = False
    by: Literal["median", "interval"] = "median"


@dataclass(frozen=True, kw_only=True)
class PredictionConfig(Config):
    """A prediction, written before the runs.

    Attributes:
        statement: the prediction in one sentence.
        expect: the expected ranges. All of them must hold.
    """

    statement: str
    expect: tuple[ExpectedConfig, ...]


@dataclass(frozen=True, kw_only=True)
class AblationConfig(Config):
    """A grid of training runs, and how to judge it.

    Attributes:
        name: the name of the grid. Its folder is ``runs/<experiment>/<name>/``.
        question: the question, used as the title of the report.
        about: a module with sentences and figures for this question (see ``minitx.ablation.report``); null: the general report.
        options: options of the module ``about``, for example which studies it describes.
        note: a sentence for the top of the report, for example that the grid is a demonstration.
        arms: the overrides of each arm, by name.
        words: texts that the report shows for the names of arms, factors, levels and studies.
        studies: the studies, by name.
        only: names of the studies to run; empty: all.
        comparisons: the comparisons to judge.
        predictions: the predictions, by name, written before the runs.
        ratio_margin: for time and threshold: ratios from 1/margin to margin count as the same.
        score_margin: for loss (nats) and accuracy: differences up to this number count as the same.
        workers: number of concurrent runs; null: one per core, or one per GPU for runs on GPUs.
        launcher: where runs are computed: local (worker processes on this machine) | slurm (needs minitx[slurm]).
        launcher_options: options of submitit, such as {slurm_partition: p, timeout_min: 60}; {cluster: local} runs the jobs as
            processes of this machine, to try it without Slurm.
        report_only: only rewrite the report from the records in the folder.
    """

    name: str = "quick"
    question: str = "An ablation"
    about: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    arms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    studies: Mapping[str, StudyConfig] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    comparisons: tuple[ComparisonConfig, ...] = ()
    predictions: Mapping[str, PredictionConfig] = field(default_factory=dict)
    ratio_margin: Positive = 1.25
    score_margin: Positive = 0.02
    workers: Count | None = None
    launcher: Literal["local", "slurm"] = "local"
    launcher_options: Mapping[str, Any] = field(default_factory=dict)
    report_only: bool = False

    def check(self) -> None:
        if self.launcher_options and self.launcher != "slurm":
            raise ConfigError(
                f"launcher_options={dict(self.launcher_options)} need launcher=slurm, got launcher={self.launcher}"
            )
        if self.options and self.about is None:
            raise ConfigError(f"options={dict(self.options)} need about, the module that reads them")
        require(self.ratio_margin > 1, f"ratio_margin={self.ratio_margin:g} must be above 1")
        _require_known("only", self.only, self.studies, "ablation.studies")
        for name, study in self.studies.items():
            _require_known(f"studies.{name}.arms", study.arms, self.arms, "ablation.arms")
            if study.start is not None:
                _require_known(f"studies.{name}.start.study", [study.start.study], self.studies, "ablation.studies")
        for i, comparison in enumerate(self.comparisons):
            self._check_comparison(f"comparisons[{i}]", comparison)
            require(comparison not in self.comparisons[:i], f"comparisons[{i}] is a duplicate: remove it")
        for name, prediction in self.predictions.items():
            for i, expected in enumerate(prediction.expect):
                self._check_expected(f"predictions.{name}.expect[{i}]", expected)

    def _check_comparison(self, place: str, comparison: ComparisonConfig) -> None:
        name, arms, law = comparison.study, comparison.arms, comparison.law
        _require_known(f"{place}.study", [name], self.studies, "ablation.studies")
        study = self.studies[name]
        require(bool(study.endpoints), f"{place}.study={name} has no scores: set studies.{name}.scores")
        require(arms[0] != arms[1] or bool(comparison.against), f"{place}.arms={list(arms)} compares an arm with itself")
        for factor, level in comparison.against.items():
            _require_known(f"{place}.against.{factor}", [level], study.factors.get(factor, ()), f"studies.{name}")
        _require_known(f"{place}.arms", arms, study.arms, f"studies.{name}.arms")
        if law is not None:
            require(
                not comparison.against, f"{place}: a law predicts the ratio of two arms under one condition: remove against"
            )
            _require_known(f"{place}.law", filter(None, (law.factor, law.parts)), study.factors, f"studies.{name}.factors")
            if law.factor == RATE or not all(map(_is_rate, study.factors[law.factor])):
                raise ConfigError(
                    f"{place}.law.factor={law.factor} must be a factor other than {RATE} whose levels are positive numbers"
                )
            if law.parts is not None:
                _require_known(f"{place}.law.parts={law.parts} needs levels", PARTS, study.factors[law.parts], "it")

    def _check_expected(self, place: str, expected: ExpectedConfig) -> None:
        laws, study, endpoint = self._laws(place, expected), self.studies[expected.study], expected.endpoint
        _require_known(f"{place}.endpoint", [endpoint], study.endpoints, "that study")
        divides = bool(expected.over or expected.formula)
        if divides and endpoint not in ("threshold", "time"):
            raise ConfigError(f"{place}: over and formula divide ratios, but {endpoint} is compared by a difference")
        if expected.over is not None:
            self._laws(f"{place}.over", expected.over)
        require(not (divides and expected.share), f"{place}.share=true is a number of its own: no over and no formula")
        for key in ("formula", "share"):
            if getattr(expected, key) and not all(law and law.parts for law in laws):
                raise ConfigError(f"{place}.{key}=true needs a law with parts in the comparison")

    def _laws(self, place: str, compared: OverConfig) -> list[LawConfig | None]:
        """Return the laws of a comparison, after checking that the comparison and the condition exist."""
        name, arms = compared.study, compared.arms
        laws = [comparison.law for comparison in self.comparisons if (comparison.study, comparison.arms) == (name, arms)]
        require(bool(laws), f"{place}: arms={list(arms)} of study={name} are not in ablation.comparisons")
        for factor, level in compared.condition.items():
            _require_known(
                f"{place}.condition.{factor}", [level], self.studies[name].factors.get(factor, ()), f"studies.{name}"
            )
        return laws

    def phases(self, name: str) -> list[str]:
        """Return the names of a study, of the study that it starts from, and so on.

        Raises:
            ConfigError: a study starts from itself, directly or indirectly.
        """
        names = [name]
        while (start := self.studies[names[-1]].start) is not None:
            require(start.study not in names, f"ablation.studies: {', '.join(names)} start from each other")
            names.append(start.study)
        return names

    def chosen(self) -> dict[str, StudyConfig]:
        """Return the studies in ``only`` and those that they start from; all studies if ``only`` is empty."""
        names = {name for chosen in self.only or self.studies for name in self.phases(chosen)}
        return {name: study for name, study in self.studies.items() if name in names}


def settings(overrides: Iterable[str]) -> dict[str, str]:
    """Return the values of overrides by key. The last override of a key applies.

    >>> settings(["seed=1", "+data.path=a=b", "seed=2"])
    {'seed': '2', 'data.path': 'a=b'}
    """
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    return {key: value for key, _, value in pairs}


def _is_rate(level: str) -> bool:
    try:
        return 0.0 < float(level) < math.inf
    except ValueError:
        return False


def _require_known(place: str, names: Iterable[str], allowed: Iterable[str], owner: str) -> None:
    allowed = list(allowed)
    if unknown := [name for name in names if name not in allowed]:
        raise ConfigError(f"{place}={unknown} not found; {owner} has {', '.join(allowed)}")
