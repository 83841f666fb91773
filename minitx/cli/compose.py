"""Compose configs with Hydra, and read them as dataclasses.

``words`` are the words after the program on the command line: overrides, and ``--config-dir=FOLDER`` for the user's configs.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from minitx.cli import importing
from minitx.cli.overrides import FIRST_NAMES, by_key, for_hydra, roots_of
from minitx.config import ConfigError, InitFrom, RunConfig, TrainerConfig, from_dict, is_node
from minitx.config.failures import FailedRunError
from minitx.config.part import defaults, import_modules
from minitx.config.schema import read, require
from minitx.config.shipped import shipped_configs
from minitx.config.training import MODEL, NODES
from minitx.training import StoppedError

if TYPE_CHECKING:
    from minitx.ablation.design import AblationConfig

log = logging.getLogger(__name__)
Options = TypeVar("Options")

GROUPS = (*NODES, "trainer")
"""Groups that must have an option in every run."""

SHOWS_TRACEBACK = "shows_traceback"
"""An attribute of an error of a job of Hydra: the key ``traceback`` of the job's config."""

NOT_FOR_CELLS = ("experiment=", "ablation=", "ablation.", "output_dir=", "hydra.", "hydra/", "seed=")
"""Prefixes of overrides that configure a grid. All other overrides apply to every cell."""


@cache
def register_defaults() -> None:
    """Register the defaults of the config classes with Hydra, for ``defaults: [/schema@_here_: NAME]`` in YAML files."""
    from minitx.ablation.design import AblationConfig

    store = ConfigStore.instance()
    for name, values in {"trainer": defaults(TrainerConfig), "ablation": defaults(AblationConfig)}.items():
        store.store(group="schema", name=name, node=OmegaConf.create(values, flags={"struct": False}))
    run = OmegaConf.create({name: {} if name in GROUPS else value for name, value in defaults(RunConfig).items()})
    for group in filter(OmegaConf.is_dict, run.values()):  # their keys are checked when the config is read
        OmegaConf.set_struct(group, False)
    store.store(group="schema", name="run", node=run)
    OmegaConf.register_new_resolver("minitx.warmup", _fitting_warmup, replace=True)


def _fitting_warmup(steps: int, *, _root_: DictConfig) -> int:
    """Return ``${minitx.warmup:STEPS}`` of our experiments: ``steps``, or a tenth of ``trainer.max_steps`` if the run has fewer steps."""
    with suppress(ConfigError):  # without a number of steps
        max_steps: int = read(int, OmegaConf.select(_root_, "trainer.max_steps"), "trainer.max_steps")
        if steps > max_steps:
            shorter = max_steps // 10
            message = "schedule.warmup_steps=%d of the experiment exceeds trainer.max_steps=%d: shortened to %d"
            log.info(message, steps, max_steps, shorter)
            return shorter
    return steps


def for_cells(words: Iterable[str]) -> list[str]:
    """Return the overrides of a grid that apply to every cell."""
    return [word for word in words if not word.lstrip("+~").startswith(NOT_FOR_CELLS)]


@importing()
def build_config(config: DictConfig, words: Sequence[str] = ()) -> RunConfig:
    """Return a composed config as dataclasses, with interpolations resolved and fields checked.

    Args:
        words: the words that ``config`` was composed from. With ``init_from``, typed fields of the model replace the fields
            in the file.
    """
    typed = by_key(words)
    with explaining(words, config=config):
        # before values are resolved, because a module may register a resolver
        import_modules(OmegaConf.select(config, "imports") or ())
        try:
            values = plain(config)
        except InterpolationKeyError:  # the key may only exist as a default of its target
            from minitx.cli.keys import complete

            values = plain(OmegaConf.create(complete(config)))
    for name in ("experiment", "debug"):  # the effect of a file without the line in the message
        require(
            not isinstance(values.get(name), dict | list),
            f"{name}={values.get(name)} is not a config: its file must contain keys and begin with the line '# @package _global_'",
        )
    if (values.get("init_from") or {}).get("path") and (values.get("model") or {}).get("_target_", MODEL) == MODEL:
        values["model"] = _as_stored(values, typed)
    for name in GROUPS:
        require(
            name == "model" or bool(values.get(name)),
            f"{name} is missing: choose an option, {name}=OPTION, or begin your config with 'defaults: [train]'",
        )
    require(
        is_node(values.get("model")),
        "model is missing: start from a trained model, init_from.path=FOLDER or model=hf model.path=FOLDER, or choose model=OPTION",
    )
    try:
        return from_dict(RunConfig, {name: values[name] for name in defaults(RunConfig) if name in values})
    except ConfigError as error:
        from minitx.config.unknown_keys import set_by_a_file  # only errors need it

        raise set_by_a_file(error, typed, NODES) from None


def check_names(config: DictConfig, words: Sequence[str]) -> None:
    """Check the names at the top of a composed config: keys of a run, and variables of the user that other values contain.

    Raises:
        UnknownKeyError: a name is neither. The message suggests a similar key.
    """
    new = [str(name) for name in config if name not in FIRST_NAMES]
    unresolved = json.dumps(OmegaConf.to_container(config)) if new else ""
    for name in new:
        if not re.search(rf"\$\{{{re.escape(name)}[.\[}}]", unresolved):
            key = next((key for key in by_key(words) if key.partition(".")[0] == name), name)
            from minitx.cli.keys import all_keys  # only errors need it
            from minitx.config.unknown_keys import unknown_name

            raise unknown_name(key, FIRST_NAMES, all_keys(config))


def _as_stored(values: Mapping[str, Any], typed: Mapping[str, str]) -> dict[str, Any]:
    """Return the node of the model with the fields of the file in ``init_from``, except for typed fields."""
    from minitx.training.init_from import stored_model_config

    shape = stored_model_config(from_dict(InitFrom, values["init_from"], "init_from."), values.get("trust") is True)
    chosen = {name.partition(".")[2] for name in typed if name.startswith("model.")}
    return {**shape, **{name: values["model"].get(name) for name in chosen}, "_target_": MODEL}


def build_grid(config: DictConfig, words: Sequence[str]) -> AblationConfig | None:
    """Return the grid of a composed config, or None if it has no grid.

    Args:
        words: the words that ``config`` was composed from.

    Raises:
        ConfigError: a key is wrong, or a file sets a key outside of ``ablation``. The runs of a grid would not have this key,
            because they use only typed overrides and overrides of their study. An experiment may set such a key if it is in the
            ``base`` of every study.
    """
    check_names(config, words)
    if (node := OmegaConf.select(config, "ablation")) is None:
        return None
    from minitx.ablation.design import AblationConfig
    from minitx.ablation.grid import of_experiment

    with explaining(words):
        values = plain(node)
    grid = from_dict(AblationConfig, of_experiment(values, by_key(words).get("experiment")), "ablation.")
    bases = [study.base for study in grid.chosen().values()]
    common = for_cells(words)
    config_of_runs = hydra_config([word for word in words if word in common or all(word in base for base in bases)])
    of_grid, of_runs = (dict[str, Any](OmegaConf.to_container(each)) for each in (config, config_of_runs))  # type: ignore[arg-type]
    for name in sorted(set(of_grid) - {"experiment", "ablation", "output_dir", "seed"}):
        require(
            of_grid[name] == of_runs.get(name),
            f"{name} is set outside of ablation, in a file of experiment= or --config-name, so the runs of the grid would not have "
            f"it: set it on the command line, or in ablation.studies.NAME.base",
        )
    return grid


def plain(config: DictConfig) -> dict[str, Any]:
    """Return a composed config, or one of its groups, as plain data with interpolations resolved."""
    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def hydra_config(words: Sequence[str]) -> DictConfig:
    """Return the config that Hydra composes for ``train.py WORDS``. This works within a job of Hydra, too.

    Raises:
        ConfigError: Hydra cannot compose it, or a key is unknown.
    """
    register_defaults()
    folders = find_own_modules(words)
    quoted = ("'file://" + str(folder).replace("'", r"\'") + "'" for folder in folders)
    search = [f"hydra.searchpath=[{','.join(quoted)}]"] if folders else []
    with (
        explaining(words),
        _outside_of_jobs(),
        hydra.initialize_config_dir(str(shipped_configs()), version_base="1.3"),
    ):
        config = hydra.compose("train", overrides=[*for_hydra(words), *search])
    check_names(config, words)
    return config


@contextmanager
def explaining(words: Sequence[str] = (), *, sweeps: bool = False, config: DictConfig | None = None) -> Iterator[None]:
    """A context for calls of Hydra or OmegaConf. It turns their errors into a ConfigError of one line; see ``explained``."""
    try:
        yield
    except Exception as error:
        is_of_job = hasattr(error, SHOWS_TRACEBACK)
        if is_of_job or isinstance(error, ConfigError | FailedRunError | StoppedError | BrokenPipeError):
            raise
        from minitx.cli.hydra_errors import explained  # only errors need it

        raise ConfigError(explained(error, words, sweeps=sweeps, config=config)) from error


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """A context that lets Hydra, a singleton, compose even while it runs a job."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running


def compose_config(words: Sequence[str]) -> RunConfig:
    """Return the config of the run ``train.py WORDS``."""
    return build_config(hydra_config(words), words)


def compose_cell(words: Sequence[str]) -> RunConfig:
    """Like ``compose_config``, for the runs of a grid.

    Composing takes a quarter of a second, so it is done once for all runs that differ only in seed, learning rate and start,
    and these keys are set in the result. The config files must not change in the meantime.
    """
    late = [word for word in words if word.startswith(("seed=", "optimizer.lr=", "init_from.path=", "+callbacks.same_start="))]
    config = copy.deepcopy(_kept_config(tuple(word for word in words if word not in late)))
    for override in OverridesParser.create().parse_overrides(late):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=override.is_add())
    return build_config(config, words)


_kept_config = cache(hydra_config)


def compose_grid(words: Sequence[str]) -> AblationConfig | None:
    """Return the grid of ``train.py WORDS``, or None if it is a single run."""
    return build_grid(hydra_config(words), words)


def find_own_modules(words: Iterable[str] = ()) -> list[Path]:
    """Make the user's modules importable, and return the folders of ``--config-dir``.

    The current folder, each folder of configs and its parent are added at the end of ``sys.path``, so that they cannot replace
    libraries.

    Raises:
        ConfigError: a config in such a folder has the same group and name as a config of minitx.
    """
    _, *folders = roots_of(words)
    for place in [Path.cwd(), *(place for folder in folders for place in (folder, folder.parent))]:
        sys.path += [str(place)] if str(place) not in sys.path else []
    for folder in folders:
        for path in sorted(folder.glob("*/**/*.yaml")):
            shipped = shipped_configs() / path.relative_to(folder)
            if shipped.is_file() and shipped.read_bytes() != path.read_bytes():
                raise ConfigError(f"{path} has the name of minitx's config {shipped}: rename it")
    return folders
