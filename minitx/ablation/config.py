"""A grid of training runs as data: arms, studies, what is compared, and what was predicted. See ``docs/ablation.md``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from minitx.config.checks import Config, Count, Finite, Positive, require

RATE = "lr"
"""The factor that is tuned: its levels are learning rates."""

Condition = Mapping[str, str]
"""Levels of factors, by the factor's name."""


@dataclass(frozen=True, kw_only=True)
class Solved(Config):
    """When a run counts as having solved its task: at the first step where the mean over a window reaches a value.

    Attributes:
        metric: an accuracy must rise to value, a loss fall to it.
        value: what the mean must reach.
        window: steps that the mean is over.
    """

    metric: Literal["train_accuracy", "train_loss"] = "train_accuracy"
    value: Finite = 0.9
    window: Count = 16


@dataclass(frozen=True, kw_only=True)
class Stable(Config):
    """What a run that starts from a trained model must keep to count as stable.

    Attributes:
        metric: train_accuracy: the worst mean over ``window`` consecutive steps must stay at ``value`` or above; train_loss:
            the mean over the last ``window`` steps may exceed that of the first phase's last ``window`` by ``value`` nats.
        value: the limit.
        window: steps that a mean is over.
        lost: train_accuracy: a worst mean below it counts as lost.
    """

    metric: Literal["train_accuracy", "train_loss"] = "train_accuracy"
    value: Finite = 0.9
    window: Count = 8
    lost: Finite = 0.5


@dataclass(frozen=True, kw_only=True)
class StartConfig(Config):
    """The runs whose weights a study starts from: those of another study that share its seed and its factors.

    Each arm of the study gets the same weights. Where an arm has another scale, the difference is folded into W_Q and W_K,
    so that every arm starts as the same function (``init_from.fold_scale=true``); the run checks that it does.

    Attributes:
        study: the study of the first phase.
        arm: an arm of it.
        solved: only where that run solved its task (``solved`` of its study).
    """

    study: str
    arm: str
    solved: bool = True


Score = Literal["time", "stability", "loss", "accuracy", "equal"]


@dataclass(frozen=True, kw_only=True)
class StudyConfig(Config):
    """One full factorial of a grid: ``arms`` x the levels of every factor x ``seeds``.

    The factor ``lr`` is tuned: each arm is judged at its own best rate, which is chosen on ``tune_seeds``, or, where there are
    none, for each judged seed on the other ones. Under ``stability`` no rate is chosen: the rates are what is measured.

    Attributes:
        title: what the study is, in words.
        base: overrides that every run takes; ``trainer.max_steps`` must be among them.
        arms: names of ``ablation.arms``.
        factors: a factor's name to its levels, and each level to overrides.
        seeds: of the runs that are judged.
        tune_seeds: of runs that choose the rate and are never judged.
        skip: combinations to leave out, each a mapping from factor (or ``arm``, ``seed``) to a list of levels.
        start: the runs whose weights these runs start from.
        prune: rates above which higher ones are not run. lost: above a rate at which the same arm and seed lost what was
            learned. unsolved: above two neighbouring rates that no tuning seed solved, where a lower one was solved.
        scores: what is judged. time: steps until the task is solved, and the largest rate that solves it; stability: the
            largest rate that is stable; loss, accuracy: of validation after the last step; equal: whether the losses are
            equal bit for bit.
        measures: further numbers of a run, small is good, judged at the rate that the first score chose: ``loss_at_N``,
            ``attention_error``, ``attention_cost``.
        solved: for ``time``.
        stable: for ``stability``.
        keep_attention: keep the attention weights that ``callbacks.probe.weights_every`` asks for.
    """

    title: str = ""
    base: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    factors: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    tune_seeds: tuple[int, ...] = ()
    skip: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    start: StartConfig | None = None
    prune: Literal["lost", "unsolved"] | None = None
    scores: tuple[Score, ...] = ()
    measures: tuple[str, ...] = ()
    solved: Solved = Solved()
    stable: Stable = Stable()
    keep_attention: bool = False

    def check(self) -> None:
        both = sorted(set(self.seeds) & set(self.tune_seeds))
        require(not both, f"tune_seeds={list(self.tune_seeds)} are judged too: seed {both[:1]} is in both lists")
        chooses = "loss" in self.scores or "accuracy" in self.scores
        measures = f"measures={list(self.measures)}"
        require(chooses or not self.measures, f"{measures} need a score of loss or accuracy to choose the rate by")
        require("stability" not in self.scores or self.start is not None, "scores=[stability] needs start, a trained model")
        words = [level for level in self.factors.get(RATE, ()) if not _is_rate(level)]
        require(not words, f"factors.{RATE} has the level {words[:1]}; the name of a learning rate is a positive number")
        require(self.prune is None or RATE in self.factors, f"prune={self.prune} needs the factor {RATE}")
        require(self.prune != "unsolved" or bool(self.tune_seeds), "prune=unsolved needs tune_seeds, which decide it")
        there = {"arm": self.arms, "seed": [str(seed) for seed in (*self.tune_seeds, *self.seeds)], **self.factors}
        for skip in self.skip:
            _known("skip", skip, there, "the study")
            for key, levels in skip.items():
                _known(f"skip.{key}", levels, there[key], "it")


@dataclass(frozen=True, kw_only=True)
class LawConfig(Config):
    """A value that a ratio is held against: the level of ``factor``, to the ``power``.

    Attributes:
        factor: a factor of the study whose levels are numbers.
        power: of the level.
        text: the law as the report writes it.
    """

    factor: str
    power: Finite
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig(Config):
    """Two arms, compared under every condition of a study that has both, on each of its scores.

    Attributes:
        study: a name of ``ablation.studies``.
        arms: reference and treatment.
        primary: conditions under which the study's first score is primary. The primary comparisons of a grid form one family,
            adjusted by Holm; all others are descriptive and not adjusted.
        law: what the ratio is held against.
    """

    study: str
    arms: tuple[str, str]
    primary: tuple[Condition, ...] = ()
    law: LawConfig | None = None


Verdict = Literal["SLOWER", "FASTER", "LESS STABLE", "MORE STABLE", "NARROWER", "WIDER", "WORSE", "BETTER", "SAME", "UNDECIDED"]
Endpoint = str
"""``time``, ``largest_rate``, ``stability``, ``loss``, ``accuracy``, or the name of a measure."""


@dataclass(frozen=True, kw_only=True)
class ExpectedConfig(Config):
    """A finding that a prediction foretells, of every comparison that fits.

    Attributes:
        study: of the comparison.
        arms: of the comparison.
        endpoint: of the comparison: time, largest_rate, stability, loss, accuracy, or the name of a measure.
        verdict: what it will be; null: any.
        ratio: bounds of the printed ratio (or difference, for scores and largest rates); null on a side: no bound.
        condition: only where a comparison has these levels.
    """

    study: str
    arms: tuple[str, str]
    endpoint: Endpoint
    verdict: Verdict | None = None
    ratio: tuple[float | None, float | None] = (None, None)
    condition: Condition = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PredictionConfig(Config):
    """What was expected before the runs.

    Attributes:
        statement: a sentence.
        expect: the findings that it foretells.
        rule: the name of a function in the module that ``about`` names, for what ``expect`` cannot say.
        options: keyword arguments of that function.
    """

    statement: str
    expect: tuple[ExpectedConfig, ...] = ()
    rule: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AblationConfig(Config):
    """A grid of training runs and how it is judged.

    Attributes:
        name: of the grid's folder, ``runs/<experiment>/<name>/``.
        question: the title of the report.
        about: a module with what only this question says: sentences, figures, rules of predictions (see
            ``minitx.ablation.report``); null: the report says what holds for every question.
        options: what the module ``about`` wants to know, such as which of the studies it speaks of.
        note: a sentence for the first screen, such as that the grid is a demonstration.
        arms: names for lists of overrides.
        words: an arm's, a factor's, a level's or a study's name to the words that the report uses.
        studies: by name.
        only: studies to run; empty: all.
        comparisons: what is judged.
        predictions: by name, written before the runs.
        ratio_margin: time and stability: ratios from 1/margin to margin count as the same.
        score_margin: loss (nats) and accuracy: differences up to it count as the same.
        workers: runs at once; null: one a core, or one a GPU where they run on GPUs.
        launcher: where runs go: worker processes of this machine, or Slurm (needs minitx[slurm]).
        launcher_options: submitit's, such as {slurm_partition: p, timeout_min: 60}; cluster: local tries it without Slurm.
        report_only: write the report again from the records in the folder, and run nothing.
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
        require(
            self.launcher == "slurm" or not self.launcher_options,
            f"launcher_options={dict(self.launcher_options)} are for launcher=slurm; launcher=local takes none",
        )
        require(self.ratio_margin > 1, f"ratio_margin={self.ratio_margin:g} must be above 1")
        _known("only", self.only, self.studies, "ablation.studies")
        for name, study in self.studies.items():
            _known(f"studies.{name}.arms", study.arms, self.arms, "ablation.arms")
            if study.start is not None:
                _known(f"studies.{name}.start.study", [study.start.study], self.studies, "ablation.studies")
                first, place = self.studies[study.start.study], f"studies.{study.start.study}"
                _known(f"studies.{name}.start.arm", [study.start.arm], first.arms, f"{place}.arms")
                _known(f"{place}.factors", first.factors, study.factors, f"studies.{name}, which starts from it,")
        for name in self.studies:
            self.phases(name)
        for i, comparison in enumerate(self.comparisons):
            self._check_comparison(f"comparisons[{i}]", comparison)
        for name, prediction in self.predictions.items():
            for i, expected in enumerate(prediction.expect):
                self._check_expected(f"predictions.{name}.expect[{i}]", expected)

    def _check_comparison(self, place: str, comparison: ComparisonConfig) -> None:
        _known(f"{place}.study", [comparison.study], self.studies, "ablation.studies")
        study = self.studies[comparison.study]
        require(bool(study.scores), f"{place}.study={comparison.study} has no scores; set studies.{comparison.study}.scores")
        require(comparison.arms[0] != comparison.arms[1], f"{place}.arms={list(comparison.arms)} compares an arm with itself")
        _known(f"{place}.arms", comparison.arms, study.arms, f"studies.{comparison.study}.arms")
        for condition in comparison.primary:
            require(RATE not in condition, f"{place}.primary: {RATE} is tuned, not a condition to judge under")
            _check_condition(f"{place}.primary", condition, study)
        if comparison.law is not None:
            _known(f"{place}.law.factor", [comparison.law.factor], study.factors, f"studies.{comparison.study}.factors")

    def _check_expected(self, place: str, expected: ExpectedConfig) -> None:
        compared = any((c.study, c.arms) == (expected.study, expected.arms) for c in self.comparisons)
        require(compared, f"{place}: arms={list(expected.arms)} of study={expected.study} are not in ablation.comparisons")
        study = self.studies[expected.study]
        _known(f"{place}.endpoint", [expected.endpoint], endpoints(study), "that study")
        _check_condition(f"{place}.condition", expected.condition, study)

    def phases(self, name: str) -> list[str]:
        """A study, the one that it starts from, and so on.

        Raises:
            ConfigError: it starts from itself in the end.
        """
        found = [name]
        while (start := self.studies[found[-1]].start) is not None:
            require(start.study not in found, f"studies: {', '.join(found)} start from each other")
            found.append(start.study)
        return found

    def chosen(self) -> AblationConfig:
        """The grid of the studies that ``only`` names, of those that they start from, and of what is compared in them."""
        if not self.only:
            return self
        names = {name for chosen in self.only for name in self.phases(chosen)}
        foretold = {
            name: prediction
            for name, prediction in self.predictions.items()
            if prediction.rule is None and all(expected.study in names for expected in prediction.expect)
        }
        studies = {name: study for name, study in self.studies.items() if name in names}
        compared = tuple(comparison for comparison in self.comparisons if comparison.study in names)
        return replace(self, studies=studies, comparisons=compared, predictions=foretold, only=())


def endpoints(study: StudyConfig) -> list[Endpoint]:
    """What a comparison in ``study`` is judged on, the primary one first."""
    found: list[Endpoint] = []
    for score in study.scores:
        found += ["time", "largest_rate"] if score == "time" else [score]
    return [*found, *study.measures]


def _is_rate(level: str) -> bool:
    try:
        return 0.0 < float(level) < math.inf
    except ValueError:
        return False


def _known(place: str, names: Iterable[str], there: Iterable[str], where: str) -> None:
    there = list(there)
    unknown = [name for name in names if name not in there]
    require(not unknown, f"{place}={unknown} not found; {where} has {', '.join(there)}")


def _check_condition(place: str, condition: Condition, study: StudyConfig) -> None:
    wrong = [f"{name}={level}" for name, level in condition.items() if level not in study.factors.get(name, ())]
    require(not wrong, f"{place}: {', '.join(wrong)} is no level of the study's factors")
