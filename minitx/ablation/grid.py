"""The cells of a grid (ordinary training runs with their own overrides), and the records of the runs.

A record is one line of ``cells.jsonl``:

==============  ==========================================================================================================
``cell``        a hash of the place in the grid, the overrides, and the code that determines the result
``study, arm, factors, seed``  the place in the grid; ``factors`` maps a factor to its level
``overrides, command``  the overrides of the run, and a command that runs only this run
``start``       ``cell`` of the run from whose weights it started, or null
``status``      ``done``, ``failed``, or ``not run`` (left out by a rule of the grid), with its ``reason``
``seconds``     wall time
``result``      the return value of ``minitx.ablation.measures.result_of`` if done (the next table), else null
==============  ==========================================================================================================

===================  =====================================================================================================
``steps, cap``       number of updates, and ``trainer.max_steps``
``loss``             training loss of each step, with 5 significant digits; null if not finite
``accuracy``         training accuracy of each step, or null if the objective does not count it
``nonfinite_step``   the first non-finite step, or null; last step + 1 if only the validation loss is not finite
``validation``       a list of [step, validation loss], for every validation
``val_loss, val_accuracy``  results of the validation after the last step, or null
``floors``           losses of simple baselines (``unigram``, ``bigram``) by name, in nats; {} if the task has none
``digest``           SHA-256 of the training losses as float64, to compare runs bit for bit
``parameters``       number of parameters
``start_error``      largest difference of outputs to the starting model, over the largest output; or null
``measures``         numbers of the callback ``Measures``, by name
``probes``           a list of {``step``, ``layers``}: statistics of each attention layer, averaged over heads
``attention``        {step: (rows, L, S) weights of the first head in layer 1} if the study keeps them, else {}
===================  =====================================================================================================

The ``result`` of a threshold comes from ``minitx.ablation.thresholds.measure_threshold``:

===================  =====================================================================================================
``low, high``        bounds of the largest stable rate: ``low`` is stable and ``high`` is not
``above``            rates above ``high`` that were stable anyway (a second crossing)
``first``            the rate at which the search started
``start``            for train_loss, the mean loss of the starting model on the first batches, else null
``cap``              ``trainer.max_steps``
``parameters, start_error``  as above
``runs``             a list of {``rate``, ``stable``, ``steps``, ``nonfinite_step``, ``worst``, ``loss``, ``accuracy``}, by rate;
                     ``worst`` is the worst mean over a window (with ``above: minimum``, its largest rise above the lowest
                     mean), or null if the run ended within the first window
===================  =====================================================================================================
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from minitx.ablation.design import RATE, AblationConfig, StudyConfig, ThresholdConfig, settings
from minitx.config import CONFIG_DIR, ConfigError, to_dict
from minitx.config.schema import require
from minitx.config.shipped import shipped_configs
from minitx.config.training import WindowConfig
from minitx.training.window import Window

NEW_DATA = 1000
"""Added to the seed of a run that starts from the weights of another run, so that its batches are new, and equal for all arms."""

# files of the package and folders of its configs without effect on the result of a run. All others are part of a cell's hash
_READS_RESULTS = (
    "check/",
    "canvas.py",
    "estimates.py",
    *(f"ablation/{name}.py" for name in ("judge", "report", "rate_report", "curves", "formatting", "intervals")),
    "ablation/scaling/__init__.py",
    "analysis/viewer/",
    *(f"analysis/{name}.py" for name in ("experiments", "figures", "film", "heads", "interventions", "lens", "wandb_files")),
    *(f"cli/{name}.py" for name in ("check", "evaluate", "export", "generate", "inputs", "play", "source_files", "train")),
    *(f"cli/{name}.py" for name in ("view", "view_config", "view_models", "view_records", "opened_models")),
    *(f"cli/{name}.py" for name in ("command_line", "exit_codes", "flags", "hydra_errors")),
)
_OTHER_CONFIGS = ("ablation/", "logger/")

Record = dict[str, Any]


@dataclass(frozen=True)
class GridPlace:
    """The place of a run in its grid. ``factors`` are (factor, level), sorted by the factor's name."""

    study: str
    arm: str
    factors: tuple[tuple[str, str], ...]
    seed: int

    @property
    def rate(self) -> str:
        """The level of the factor ``lr``, or an empty string without this factor."""
        return dict(self.factors).get(RATE, "")

    @property
    def condition(self) -> dict[str, str]:
        """The levels of all factors except ``lr``."""
        return {name: level for name, level in self.factors if name != RATE}

    def __str__(self) -> str:
        levels = "".join(f", {name} {level}" for name, level in self.factors)
        return f"{self.study}: {self.arm}{levels}, seed {self.seed}"


@dataclass(frozen=True)
class Cell:
    """One training run or threshold of a grid: its place, its overrides, and the run from whose weights it starts."""

    place: GridPlace
    overrides: tuple[str, ...]
    start: Cell | None = None
    keeps_weights: bool = False
    threshold: ThresholdConfig | None = field(default=None, hash=False)

    @cached_property
    def hash(self) -> str:
        """A hash of the place and of everything that determines the result: overrides, code, and the starting run."""
        keys = [text for text in self.overrides if not text.startswith(CONFIG_DIR)]
        user_code = [
            folder_fingerprint(text.removeprefix(CONFIG_DIR)) for text in self.overrides if text.startswith(CONFIG_DIR)
        ]
        user_code += named_code(tuple(re.findall(r"_target_\W+([\w.]+)", " ".join(keys))))
        place = [self.place.study, self.place.arm, self.place.factors, self.place.seed]
        parts = [*place, keys, code_fingerprint(), *user_code, self.start.hash if self.start else None]
        if self.threshold is not None:
            parts.append({**to_dict(self.threshold), "first": self.threshold.first[self.place.arm]})
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def folder(self, grid: Path) -> Path:
        """Return the folder of the run in the folder of the grid."""
        return grid / "cells" / self.hash

    def weights(self, grid: Path) -> Path:
        """Return the path of the last checkpoint, where other runs start."""
        return self.folder(grid) / "checkpoints" / "last.ckpt"

    def words(self, grid: Path) -> list[str]:
        """Return the overrides of the run.

        They load the weights of ``start``. If the scale is folded, they add a check that the model starts as the same function.
        """
        values, loading = settings(self.overrides), list[str]()
        check: dict[str, Any] = {"_target_": "minitx.ablation.measures.SameStart"}
        folded = (node for node in ("init_from", "model") if values.get(f"{node}.fold_scale", "").lower() == "true")
        if self.start is not None:
            check["path"] = str(self.start.weights(grid))
            loading = [f"init_from.path={as_override(check['path'])}", "init_from.fold_scale=true"]
        elif node := next(folded, None):
            check["path"] = values.get(f"{node}.path", f"${{{node}.path}}").strip("\"'")  # an experiment may set it
            if node == "model":
                check["model"] = {"_target_": "${model._target_}", "path": check["path"], "_partial_": True}
        else:
            return list(self.overrides)
        if values.get("trust", "").lower() == "true":
            check["trust"] = True
        return [*self.overrides, *loading, f"+callbacks.same_start={as_override(check)}"]

    def steps(self) -> int:
        """Return the number of steps, from the last override of ``trainer.max_steps``.

        Raises:
            ConfigError: there is no such override, or it is not a whole number.
        """
        steps, study = settings(self.overrides).get("trainer.max_steps", "missing"), f"ablation.studies.{self.place.study}"
        require(steps.isdecimal(), f"{study}.base must set trainer.max_steps to a whole number, got {steps}")
        return int(steps)

    def describe(self, grid: Path) -> dict[str, Any]:
        """Return the description of the cell for ``cells.jsonl``, as plain data."""
        return {
            "cell": self.hash,
            **vars(self.place),
            "factors": dict(self.place.factors),
            "overrides": list(self.overrides),
            "command": command_of(self.words(grid)),
            "start": self.start.hash if self.start else None,
        }


def of_experiment(grid: dict[str, Any], typed: str | None) -> dict[str, Any]:
    """Return a grid with the typed experiment in place of ``experiment=???`` in the base of a study."""
    for name, study in grid["studies"].items():
        if "experiment=???" in (base := study.get("base", ())):
            require(typed is not None, f"ablation.studies.{name} is for any experiment: add experiment=NAME")
            study["base"] = [typed if word == "experiment=???" else word for word in base]
    return grid


def as_override(value: Mapping[str, Any] | str | bool) -> str:
    """Return a value as Hydra reads it in an override. In a quoted string, only the quote itself is escaped.

    >>> as_override({"path": 'the "new" one', "trust": True})
    '{path: "the \\\\"new\\\\" one", trust: true}'
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_override(entry)}' for key, entry in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else '"' + value.replace('"', r"\"") + '"'


def command_of(words: Sequence[str]) -> str:
    """Return the command that runs these overrides. ``--config-dir`` comes first, as argparse requires."""
    return shlex.join(["python", "scripts/train.py", *sorted(words, key=lambda text: not text.startswith(CONFIG_DIR))])


def cells(grid: AblationConfig, *, common: Sequence[str] = ()) -> list[Cell]:
    """Return all cells of the chosen studies, ordered by seed: first the first seed of all studies, then the second seeds, and so on.

    An interrupted grid is therefore still balanced. A cell follows the cell that it starts from. Overrides apply in the order
    base, arm, factors, seed, common.

    Args:
        common: overrides for every cell.

    Raises:
        ConfigError: two cells are equal; two of arm, factors, seeds, threshold and ``common`` set the same key; or the grid
            does not contain the starting run of a cell.
    """
    cells_by_place, blocks = dict[GridPlace, Cell](), dict[GridPlace, int]()
    studies = grid.chosen()
    starts = {(study.start.study, study.start.arm) for study in studies.values() if study.start}
    for name, study in sorted(studies.items(), key=lambda item: len(grid.phases(item[0]))):
        where = f"ablation.studies.{name}"
        places = [*_grid_places(name, study)]
        require(bool(places), f"{where} has no run: it needs arms, seeds, and levels that skip does not leave out")
        for place in places:
            require(place not in cells_by_place, f"{where} names a seed or a level twice: {place}")
            factors, first = dict(place.factors), None
            if study.start is not None:
                shared = tuple(pair for pair in place.factors if pair[0] in grid.studies[study.start.study].factors)
                first = GridPlace(study.start.study, study.start.arm, shared, place.seed)
                require(first in cells_by_place, f"{where}.start: the grid has no run {first}")
            parts = {
                "base": study.base,
                f"arm {place.arm}": grid.arms[place.arm],
                **{f"factor {factor}": of_level[factors[factor]] for factor, of_level in study.factors.items()},
                "threshold": [f"optimizer.lr={rate:g}"]
                if study.threshold and (rate := study.threshold.first[place.arm])
                else [],
                "seeds": [f"seed={place.seed + NEW_DATA if first else place.seed}"],
                "the command line or the lab itself": common,
            }
            _check_apart(where, parts)
            overrides = tuple(itertools.chain(*parts.values()))
            start, keeps = cells_by_place[first] if first else None, (name, place.arm) in starts
            cells_by_place[place] = Cell(place, overrides, start, keeps, study.threshold)
            blocks[place] = max(study.seeds.index(place.seed), blocks[first] if first else 0)
    return sorted(cells_by_place.values(), key=lambda cell: blocks[cell.place])


def _check_apart(where: str, parts: Mapping[str, Iterable[str]]) -> None:
    """Check that no two parts set the same key, because one of them would have no effect. Only ``base`` may be overridden, except its seed."""
    keys = {name: {*settings(overrides)} for name, overrides in parts.items()}
    keys["base"] &= {"seed"}
    for first, second in itertools.combinations(keys, 2):
        if both := sorted(keys[first] & keys[second]):
            raise ConfigError(f"{where}: {first} and {second} both set {', '.join(both)}")


def _grid_places(name: str, study: StudyConfig) -> Iterator[GridPlace]:
    """Yield the places of a study by seed, without skipped ones."""
    combined = itertools.product(*study.factors.values(), study.arms)
    for seed, (*levels, arm) in itertools.product(study.seeds, combined):
        factors = dict(zip(study.factors, levels, strict=True))
        place = {"arm": arm, "seed": str(seed), **factors}
        if not any(all(place[key] in allowed for key, allowed in skip.items()) for skip in study.skip):
            yield GridPlace(name, arm, tuple(sorted(factors.items())), seed)


@cache
def code_fingerprint() -> str:
    """Return a digest of the code and configs that may determine the result of a run, and of torch's version.

    Comments, docstrings and the code that only reads results do not affect it.
    """
    import torch

    package = Path(__file__).resolve().parent.parent
    files = {
        f"{part}/{name}": path
        for root, part, others in ((package, "minitx", _READS_RESULTS), (shipped_configs(), "configs", _OTHER_CONFIGS))
        for path in root.rglob("*.*")
        if path.suffix in (".py", ".yaml") and not (name := path.relative_to(root).as_posix()).startswith(others)
    }
    return _digest(files, torch.__version__)


@cache
def folder_fingerprint(folder: str) -> str:
    """Return a digest of the configs in a user's folder, except for the grids in ``ablation/``, and of the user's code.

    The code consists of all modules and packages that a ``_target_`` in these configs names, from the current folder, else from
    ``folder``, else from its parent. The locations of the folders do not affect the digest.
    """
    files = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*.yaml")}
    named = {name for path in files.values() for name in re.findall(r"_target_\W+(\w+)", path.read_text(encoding="utf-8"))}
    files = {name: path for name, path in files.items() if not name.startswith("ablation/")}
    for place in (Path(folder).parent, Path(folder), Path.cwd()):
        for name in named - {"minitx"}:
            code = (place / f"{name}.py", *(place / name).rglob("*.py"))
            files |= {path.relative_to(place).as_posix(): path for path in code if path.is_file()}
    return _digest(files)


@cache
def named_code(targets: tuple[str, ...]) -> list[str]:
    """Return a digest of the modules in the current folder that targets name, such as ``examples.changes.latent.LatentAttention``; [] if none."""
    dotted = [".".join(words[:count]) for words in (name.split(".") for name in targets) for count in range(1, len(words))]
    paths = {name: Path(*name.split(".")).with_suffix(".py") for name in dotted if not name.startswith("minitx")}
    files = {name: path for name, path in paths.items() if path.is_file()}
    return [_digest(files)] if files else []


def _digest(files: Mapping[str, Path], first: str = "") -> str:
    """Return a digest of names and contents, sorted by name. For Python files, only executed code counts."""
    digest = hashlib.sha256(first.encode())
    for name in sorted(files):
        digest.update(name.encode())
        content = files[name].read_bytes()
        digest.update(_executed(content) if files[name].suffix == ".py" else content)
    return digest.hexdigest()[:16]


def _executed(source: bytes) -> bytes:
    """Return Python code without comments, docstrings and layout. They do not change a run."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # not valid Python: a foreign file in the user's folder
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).encode()


# --- records


@dataclass(frozen=True)
class Run(GridPlace):
    """A run of the grid with its record ({} if there is none)."""

    record: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def status(self) -> str:
        """The status in the record, or ``missing``."""
        return self.record.get("status", "missing")  # type: ignore[no-any-return]

    @property
    def result(self) -> Mapping[str, Any]:
        """The measured values of a finished run."""
        assert self.status == "done", self
        return self.record["result"]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Runs:
    """The runs of a grid, in the order of its cells."""

    all: tuple[Run, ...]

    @classmethod
    def of(cls, places: Iterable[GridPlace], records: Iterable[Record]) -> Runs:
        """Return the runs at ``places``, each with the last record of a finished run, or else the last record. Other records are ignored."""
        by_place = {}
        for record in sorted(records, key=lambda record: record["status"] == "done"):
            factors = tuple(sorted(record["factors"].items()))
            by_place[GridPlace(record["study"], record["arm"], factors, record["seed"])] = record
        return cls(tuple(Run(**vars(place), record=by_place.get(place, {})) for place in places))

    def select(
        self, study: str, arm: str = "", condition: Mapping[str, str] = {}, *, rate: str = "", status: str = ""
    ) -> list[Run]:
        """Return the runs of a study that match all arguments. ``condition`` may omit factors."""
        of_study = (run for run in self.all if run.study == study and condition.items() <= dict(run.factors).items())
        return [run for run in of_study if arm in ("", run.arm) and rate in ("", run.rate) and status in ("", run.status)]


RECORD_KEYS = ("cell", "study", "arm", "factors", "seed", "overrides", "status", "result")
"""Keys that each record of a grid has."""


def solved_step(result: Mapping[str, Any], solved: WindowConfig) -> int | None:
    """Return the first step t at which the mean of the metric over steps t - window + 1 ... t reaches the value.

    Return None if there is no such step, or if the run was not finite. A missing value counts as the worst: accuracy 0, or an
    infinite loss.

    >>> solved_step({"accuracy": [0.0, 1.0, 1.0], "nonfinite_step": None}, WindowConfig(value=0.9, window=2))
    3
    """
    if result["nonfinite_step"] is not None:
        return None
    window, worst = Window(solved.metric, solved.value, solved.window), 0.0 if solved.metric == "train_accuracy" else math.inf
    for step, value in enumerate(result[solved.metric.removeprefix("train_")] or [], 1):
        if window.reaches(window.add({solved.metric: worst if value is None else value})):
            return step
    return None
