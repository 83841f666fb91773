"""Compose configs with Hydra, and read them as dataclasses.

``words`` are the words after the program on the command line: overrides, and ``--config-dir=FOLDER`` for the user's configs.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from minitx.cli import importing
from minitx.config import CONFIG_DIR, ConfigError, InitFrom, RunConfig, TrainerConfig, from_dict, is_node
from minitx.config.part import find_target, import_modules, plain_defaults, required
from minitx.config.schema import UNIONS, config_class_of, defaults, hints_of, require
from minitx.config.shipped import shipped_configs
from minitx.config.training import LOADING, MODEL, NODES

if TYPE_CHECKING:
    from minitx.ablation.design import AblationConfig

log = logging.getLogger(__name__)
Options = TypeVar("Options")

GROUPS = (*NODES, "trainer")
"""Groups that must have an option in every run."""

NOT_FOR_CELLS = ("experiment=", "ablation=", "ablation.", "output_dir=", "hydra.", "hydra/", "seed=")
"""Prefixes of overrides that configure a grid. All other overrides apply to every cell."""


@cache
def register_defaults() -> None:
    """Register the defaults of the config classes with Hydra, for ``defaults: [/schema@_here_: NAME]`` in YAML files."""
    from minitx.ablation.design import AblationConfig

    store = ConfigStore.instance()
    for name, values in {"trainer": defaults(TrainerConfig), "ablation": defaults(AblationConfig)}.items():
        store.store(group="schema", name=name, node=OmegaConf.create(values, flags={"struct": False}))
    run = {name: {} if name in GROUPS else value for name, value in defaults(RunConfig).items()}
    store.store(group="schema", name="run", node=_with_open_groups(run))


def _with_open_groups(values: Mapping[str, Any]) -> DictConfig:
    """Return a config whose groups accept any key, because keys are checked when the config is read."""
    config = OmegaConf.create(dict(values))
    for name in [name for name, value in values.items() if isinstance(value, Mapping)]:
        OmegaConf.set_struct(config[name], False)
    return config


def by_key(words: Iterable[str]) -> dict[str, str]:
    """Return overrides by the key that they set or delete. The last override of a key applies."""
    return {word.lstrip("+~").partition("=")[0]: word for word in words}


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
    with explaining(words):
        # before values are resolved, because a module may register a resolver
        import_modules(OmegaConf.select(config, "imports") or ())
        try:
            values = plain(config)
        except InterpolationKeyError:  # the key may only exist as a default of its target
            values = plain(_with_defaults(config))
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
    variables = _variables(config, set(values) - set(defaults(RunConfig)))
    try:
        run = from_dict(RunConfig, {name: value for name, value in values.items() if name not in variables})
    except ConfigError as error:
        raise ConfigError(f"{error}{_advice_on_a_file(str(error), typed)}") from error
    return _with_fitting_warmup(run, typed)


def _variables(config: DictConfig, names: Iterable[str]) -> set[str]:
    """Return the keys that are not keys of a run: ``debug`` and ``ablation``, and the user's variables in other values."""
    unresolved = json.dumps(OmegaConf.to_container(config))
    return {"debug", "ablation"} | {name for name in names if re.search(rf"\$\{{{re.escape(name)}[.\[}}]", unresolved)}


def _advice_on_a_file(message: str, typed: Mapping[str, str]) -> str:
    """Return the end of a message about an unknown key: how to remove the key if a config file sets it for another target."""
    unknown = re.match(r"((\w+)\.\w+) is not a key", message)  # schedule.power is not a key (did you mean ...?)
    if unknown is None or unknown[1] in typed or unknown[2] not in NODES:
        return ""
    return f"; a config file sets it: add ~{unknown[1]}, or '- override /{unknown[2]}: null' to the defaults of your file"


def _as_stored(values: Mapping[str, Any], typed: Mapping[str, str]) -> dict[str, Any]:
    """Return the node of the model with the fields of the file in ``init_from``, except for typed fields."""
    from minitx.training.init_from import stored_model_config

    shape = stored_model_config(from_dict(InitFrom, values["init_from"], "init_from."), values.get("trust") is True)
    chosen = {name.partition(".")[2] for name in typed if name.startswith("model.")}
    return {**shape, **{name: values["model"].get(name) for name in chosen}, "_target_": MODEL}


def _with_fitting_warmup(config: RunConfig, typed: Mapping[str, str]) -> RunConfig:
    """Shorten a warm-up that is longer than ``trainer.max_steps`` to a tenth of the steps, unless it was typed."""
    steps = config.trainer.max_steps
    warmup = config.schedule.get("warmup_steps", 0)
    is_ours = config.schedule.name.startswith("minitx.training.schedules.")
    if steps is None or not is_ours or warmup <= steps or "schedule.warmup_steps" in typed:
        return config
    log.info(
        "schedule.warmup_steps=%s of the experiment exceeds trainer.max_steps=%d: shortened to %d", warmup, steps, steps // 10
    )
    return dataclasses.replace(config, schedule=config.schedule.with_(warmup_steps=steps // 10))


def build_grid(config: DictConfig, words: Sequence[str]) -> AblationConfig | None:
    """Return the grid of a composed config, or None if it has no grid.

    Args:
        words: the words that ``config`` was composed from.

    Raises:
        ConfigError: a key is wrong, or a file sets a key outside of ``ablation``. The runs of a grid would not have this key,
            because they use only typed overrides and overrides of their study. An experiment may set such a key if it is in the
            ``base`` of every study.
    """
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
        ConfigError: Hydra cannot compose it.
    """
    with explaining(words):
        return _hydra_config(words)


@contextmanager
def explaining(words: Sequence[str], **options: Any) -> Iterator[None]:
    """A context that turns errors of Hydra and OmegaConf into a ConfigError. For ``options``, see ``CommandLine``."""
    try:
        yield
    except Exception as error:
        from minitx.cli.hydra_errors import CommandLine, explained, is_of_hydra  # only errors need it

        if isinstance(error, ConfigError) or not is_of_hydra(error):
            raise
        raise ConfigError(explained(error, CommandLine(words, **{"keys_of": _keys_of, **options}))) from error


def _keys_of(words: Sequence[str]) -> list[str]:
    """Return all keys of ``train.py WORDS``, as ``group.key``."""
    from minitx.cli.hydra_errors import names_of

    return list(names_of(OmegaConf.to_container(_with_defaults(_hydra_config(words)))))


def _hydra_config(words: Sequence[str]) -> DictConfig:
    """Like ``hydra_config``, but with Hydra's own errors."""
    register_defaults()
    overrides = [word for word in words if not word.startswith(CONFIG_DIR)]
    folders = find_own_modules(words)
    quoted = ("'file://" + str(folder).replace("'", r"\'") + "'" for folder in folders)
    search = [f"hydra.searchpath=[{','.join(quoted)}]"] if folders else []
    with _outside_of_jobs(), hydra.initialize_config_dir(str(shipped_configs()), version_base="1.3"):
        return hydra.compose("train", overrides=[*overrides, *search])


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """A context that lets Hydra, a singleton, compose even while it runs a job."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = running


def unlisted(words: Sequence[str]) -> list[str]:
    """Return overrides that add the defaults of targets, so that ``--help`` and ``--cfg`` show all keys."""
    config = hydra_config(words)
    complete: Any = OmegaConf.to_container(_with_defaults(config))
    nodes = {group: complete[group] for group in NODES if is_node(complete.get(group))}
    added = [(group, name, node[name]) for group, node in nodes.items() for name in node if name not in config[group]]
    return [f"+{group}.{name}={json.dumps(value)}" for group, name, value in added if not isinstance(value, dict)]


def _with_defaults(config: DictConfig) -> DictConfig:
    """Return a config whose nodes have all keys. Interpolations are not resolved."""
    values: Any = OmegaConf.to_container(config)
    return OmegaConf.create({name: _completed(node, name) if is_node(node) else node for name, node in values.items()})


def _completed(node: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return a node with the defaults of its target, and ``???`` for required keys of data. Nodes of foreign models are not changed."""
    try:
        target = find_target(str(node["_target_"]), group)
    except ConfigError:
        return dict(node)
    if group == "model" and config_class_of(target) is None:
        return dict(node)
    values = plain_defaults(target)
    if group == "data":
        values |= dict.fromkeys(required(target), "???") | {name: default for name, (_, default) in LOADING.items()}
    return {**node, **{name: value for name, value in values.items() if name not in node}}


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
    folders = [Path(word.removeprefix(CONFIG_DIR)).absolute() for word in words if word.startswith(CONFIG_DIR)]
    for place in [Path.cwd(), *(place for folder in folders for place in (folder, folder.parent))]:
        sys.path += [str(place)] if str(place) not in sys.path else []
    for folder in folders:
        for path in sorted(folder.glob("*/**/*.yaml")):
            shipped = shipped_configs() / path.relative_to(folder)
            if shipped.is_file() and shipped.read_bytes() != path.read_bytes():
                raise ConfigError(f"{path} has the name of minitx's config {shipped}: rename it")
    return folders


# --- the command line

FilePath = Annotated[str, "a path: a leading ~ is expanded"]
"""The type of a key of a program whose value is a path."""


def compose_program(cls: type[Options], words: Iterable[str]) -> Options:
    """Return the config of a program other than ``train.py``: a ``cls``, whose fields are the keys.

    The value of a text key is taken literally (``prompt=Hello, world!``), unless it is ``null`` or in quotes.

    Raises:
        ConfigError: an override is not ``key=value``, a key is unknown (the message suggests a similar one), or a value has the
            wrong type.
    """
    hints: dict[str, Any] = hints_of(cls)  # type: ignore[arg-type]  # a class is hashable
    kinds = {name: {hint, *(get_args(hint) if get_origin(hint) in UNIONS else ())} for name, hint in hints.items()}
    texts = dict[str, Any]()
    others = list[str]()
    for word in words:
        name, is_pair, value = word.partition("=")
        is_quoted = value[:1] in ("'", '"') and _is_parsed(word)
        if is_pair and kinds.get(name, set()) & {str, FilePath} and value != "null" and not is_quoted:
            texts[name] = value
        else:
            others.append(readable(word))
    known = defaults(cls)
    ConfigStore.instance().store(cls.__name__, _with_open_groups(known))
    with (
        explaining(others, keys_of=lambda _: [*known], of_run=False),
        _outside_of_jobs(),
        # not hydra.initialize: it looks through the sources of all modules for its caller
        hydra.initialize_config_dir(str(shipped_configs()), version_base="1.3"),
    ):
        parsed: Any = OmegaConf.to_container(hydra.compose(cls.__name__, overrides=others), resolve=True)
    values = {name: value for name, value in parsed.items() if value != "???"} | texts
    for name, value in values.items():
        if FilePath in kinds[name] and isinstance(value, str):
            values[name] = os.path.expanduser(value)
    return from_dict(cls, values)


def readable(word: str) -> str:
    """Return an override, with its value in quotes if Hydra's grammar cannot read it (``data.path=小说.txt``).

    A value with a comma, a bracket or a quote is not quoted.
    """
    name, is_pair, value = word.partition("=")
    if not is_pair or set(value) & set("'\"\\,()[]{}") or _is_parsed(word):
        return word
    quoted = f"{name}={QuotedString(value, Quote.double).with_quotes()}"
    return quoted if _is_parsed(quoted) else word


def _is_parsed(word: str) -> bool:
    with suppress(HydraException):
        return OverridesParser.create().parse_override(word) is not None
    return False
