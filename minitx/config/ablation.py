"""A grid of training runs as data: arms, studies, what is compared, and what was predicted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from minitx.config.checks import Config, Count, Positive, require

_MEASURES = r"loss_at_\d+|attention_error|attention_cost"


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """One full factorial of an ablation: ``arms`` × the levels of every factor × ``seeds``.

    The factor ``lr`` is tuned where a study is judged: on the ``tune_seeds``, or, where there are none, for every seed on
    the others.

    Attributes:
        base: overrides that every cell takes.
        arms: names of ``ablation.arms``.
        factors: a factor's name to its levels, and each level to overrides.
        seeds: of the runs that are judged.
        tune_seeds: of runs of their own that choose the factor ``lr`` and are never judged.
        skip: combinations to leave out, each a mapping from factor (or ``arm``) to a level or a list of them.
        score: what cells are judged by: ``accuracy`` (with the share of rates that reach ``solved``, the usable window) or
            ``loss`` (of validation, in nats); ``null``: they are not judged.
        solved: the accuracy from which a rate counts as usable.
        measures: further numbers of a run's result, small is good, judged as endpoints of their own at the rate that the
            score chose: ``loss_at_N``, ``attention_error``, ``attention_cost``.
    """

    base: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    factors: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    tune_seeds: tuple[int, ...] = ()
    skip: tuple[Mapping[str, tuple[str, ...]], ...] = ()
    score: Literal["accuracy", "loss"] | None = None
    solved: float = 0.99
    measures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.score is not None or not self.measures, f"measures={list(self.measures)} need a score to choose the rate by"
        )
        unknown = [name for name in self.measures if not re.fullmatch(_MEASURES, name)]
        require(not unknown, f"measures={unknown} are none that a run has: loss_at_N, attention_error, attention_cost")


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """Two arms, compared under every condition of a study that has both.

    Attributes:
        study: a name of ``ablation.studies``.
        arms: reference and treatment.
        primary: conditions, each a mapping from factor to level, that form one family over all comparisons of the grid,
            adjusted by Holm; the others are secondary and not adjusted.
    """

    study: str
    arms: tuple[str, str]
    primary: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExpectedVerdict:
    """A verdict that a prediction foretells.

    Attributes:
        study: of the comparison.
        arms: its reference and treatment.
        verdict: what it will be.
        endpoint: ``E1`` (the score at the best rate), ``E2`` (the usable window) or a measure of the study.
        condition: it holds under every condition that has these levels.
    """

    study: str
    arms: tuple[str, str]
    verdict: Literal["HARM", "NO HARM"]
    endpoint: str = "E1"
    condition: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PredictionConfig:
    """What was expected before the runs.

    Attributes:
        statement: a sentence.
        expect: the verdicts that it foretells; without any, the report has a rule of its own for it, or says that it has none.
    """

    statement: str
    expect: tuple[ExpectedVerdict, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AblationConfig(Config):
    """A grid of training runs and how it is judged: see ``docs/ablation.md`` and ``minitx.ablation``.

    Attributes:
        name: of the grid's folder, ``runs/<experiment>/<name>/``.
        question: the title of the report.
        confirmatory: whether the grid was planned to confirm; the report says so.
        arms: names for lists of overrides.
        studies: by name.
        only: studies to run; empty: all. The cells are those of the whole grid, so a grid can be run in parts.
        comparisons: what is judged.
        predictions: by name, written before the runs.
        margin: the smallest difference that counts as harm (accuracy; share of the rate grid; nats).
        workers: cells at once; null: one a core, or one a GPU where cells run on GPUs.
        launcher: where cells run. slurm needs minitx[slurm], ray needs minitx[ray]; the results are the same.
        launcher_options: slurm: submitit's, such as {slurm_partition: p, timeout_min: 60}; cluster: local tries it without
            Slurm. ray: those of ray.init, and task, such as {num_gpus: 1}. All nodes must see the folder.
        time_limit: seconds for the cells; when they are projected to take longer, ``trim`` applies; null: none.
        report_only: write the report again from the records in the folder, and run nothing.
        trim: overrides that shorten the runs of a study, by its name.
    """

    name: str = "quick"
    question: str = "An ablation"
    confirmatory: bool = False
    arms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    studies: Mapping[str, StudyConfig] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    comparisons: tuple[ComparisonConfig, ...] = ()
    predictions: Mapping[str, PredictionConfig] = field(default_factory=dict)
    margin: Positive = 0.02
    workers: Count | None = None
    launcher: Literal["local", "slurm", "ray"] = "local"
    launcher_options: Mapping[str, Any] = field(default_factory=dict)
    time_limit: Positive | None = None
    report_only: bool = False
    trim: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def check(self) -> None:
        require(
            self.launcher != "local" or not self.launcher_options,
            f"launcher_options={dict(self.launcher_options)} are for launcher=slurm or ray; launcher=local takes none",
        )
        for name, study in self.studies.items():
            unknown = [arm for arm in study.arms if arm not in self.arms]
            require(not unknown, f"studies.{name}.arms={unknown} are not defined; ablation.arms has {', '.join(self.arms)}")
            both = sorted(set(study.seeds) & set(study.tune_seeds))
            require(
                not both, f"studies.{name}.tune_seeds={list(study.tune_seeds)} are judged too: seed {both[:1]} is in both lists"
            )
        for key, names in (("only", self.only), ("trim", self.trim)):
            missing = [name for name in names if name not in self.studies]
            require(not missing, f"{key}={missing} are no studies of this grid; it has {', '.join(self.studies)}")
        for i, comparison in enumerate(self.comparisons):
            self._check_comparison(f"comparisons[{i}]", comparison)
        for name, prediction in self.predictions.items():
            for i, expected in enumerate(prediction.expect):
                self._check_expected(f"predictions.{name}.expect[{i}]", expected)

    def _check_comparison(self, place: str, comparison: ComparisonConfig) -> None:
        study = self.studies.get(comparison.study)
        if study is None:
            require(False, f"{place}.study={comparison.study} is not defined; ablation.studies has {', '.join(self.studies)}")
            return
        require(study.score is not None, f"{place}.study={comparison.study} has no score; set studies.{comparison.study}.score")
        require(comparison.arms[0] != comparison.arms[1], f"{place}.arms={list(comparison.arms)} compares an arm with itself")
        unknown = [arm for arm in comparison.arms if arm not in study.arms]
        require(not unknown, f"{place}.arms={unknown} are not in studies.{comparison.study}.arms={list(study.arms)}")
        for condition in comparison.primary:
            wrong = [f"{n}={v}" for n, v in condition.items() if v not in study.factors.get(n, ())]
            require(
                "lr" not in condition, f"{place}.primary: lr={condition.get('lr')} is tuned, not a condition to judge under"
            )
            require(not wrong, f"{place}.primary: {', '.join(wrong)} is no level of studies.{comparison.study}.factors")

    def _check_expected(self, place: str, expected: ExpectedVerdict) -> None:
        compared = any((c.study, c.arms) == (expected.study, expected.arms) for c in self.comparisons)
        require(compared, f"{place}: arms={list(expected.arms)} of study={expected.study} are not in ablation.comparisons")
        study = self.studies[expected.study]
        endpoints = ("E1", "E2", *study.measures) if study.score == "accuracy" else ("E1", *study.measures)
        require(expected.endpoint in endpoints, f"{place}.endpoint={expected.endpoint} must be one of {', '.join(endpoints)}")
        wrong = [f"{n}={v}" for n, v in expected.condition.items() if v not in study.factors.get(n, ())]
        require(not wrong, f"{place}.condition: {', '.join(wrong)} is no level of studies.{expected.study}.factors")

    def chosen(self) -> AblationConfig:
        """The grid of the studies that ``only`` names, and of what is compared in them: a part, which confirms nothing."""
        if not self.only:
            return self
        studies = {name: study for name, study in self.studies.items() if name in self.only}
        compared = tuple(c for c in self.comparisons if c.study in studies)
        foretold = {
            name: prediction
            for name, prediction in self.predictions.items()
            if all(expected.study in studies for expected in prediction.expect)
        }
        trim = {name: overrides for name, overrides in self.trim.items() if name in studies}
        return replace(
            self, studies=studies, comparisons=compared, predictions=foretold, trim=trim, only=(), confirmatory=False
        )
