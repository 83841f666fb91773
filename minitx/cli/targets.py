"""What a config may name: classes (``_target_``) that are on a list, names that stay names. Hydra's own settings stay too."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minitx.config import ConfigError, RunConfig, to_dict

ALLOWED = frozenset(
    {
        "lightning.pytorch.loggers.WandbLogger",
        "lightning.pytorch.loggers.TensorBoardLogger",
        "lightning.pytorch.callbacks.LearningRateMonitor",
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.callbacks.DeviceStatsMonitor",
        "lightning.pytorch.callbacks.Timer",
        "minitx.training.callbacks.AttentionTemperature",
    }
)
LOCKED: dict[str, Any] = {
    "callbacks": {},
    **{f"{name}_logging": {"version": 1, "root": None, "disable_existing_loggers": False} for name in ("job", "hydra")},
    "launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"},
    "sweeper._target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "run": {"dir": "."},
    "output_subdir": None,
    "sweep.subdir": "${hydra.job.num}",
    "job.chdir": None,
    "job.env_set": {},
}
"""What Hydra itself would import, call, write or put into the environment, and the only values that it may have."""

_NOT_RECORDED = {"disable_git": True, "x_disable_meta": True}  # wandb keeps the remote with its login, and the command line
_NAMES = ("name", "version", "id", "project", "entity", "group", "sub_dir")  # of loggers, which make folders of some
_PATHS = ("path", "dir", "pretrained")  # endings of the keys that hold one
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


# --- what Hydra composes


def guarded(program: Callable[[], Any]) -> Callable[[], Any]:
    """``program``, a ``hydra.main``, which refuses a config that changes ``LOCKED``, and reads no pickle.

    Hydra acts on its settings before it calls us, and again for each job of a sweep; all that it composes goes through its
    loader, which is therefore where we look.
    """
    import hydra._internal.hydra as inner

    outer = sys.modules["hydra.main"]  # the name hydra.main is the function

    class Loader(inner.ConfigLoaderImpl):
        def load_configuration(self, *args: Any, **options: Any) -> Any:
            config = super().load_configuration(*args, **options)
            check_hydra(config)
            return config

    def no_pickle(*args: Any) -> None:
        raise ConfigError("--experimental-rerun is not read here: it would execute a pickle; command.txt repeats a run")

    def run() -> Any:
        places = (inner, "ConfigLoaderImpl", Loader), (outer, "_get_rerun_conf", no_pickle)
        before = [getattr(module, name) for module, name, _ in places]
        try:
            for module, name, ours in places:
                setattr(module, name, ours)
            return program()
        finally:
            for (module, name, _), theirs in zip(places, before, strict=True):
                setattr(module, name, theirs)

    return run


def check_hydra(config: Any) -> None:
    """Refuse a composed config in which Hydra's settings are not those of ``LOCKED``.

    Raises:
        ConfigError: one is another; the message names it.
    """
    from omegaconf import OmegaConf

    settings = OmegaConf.to_container(config.hydra, resolve=False)
    for key, wanted in LOCKED.items():
        found: Any = settings
        for part in key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if found != wanted:
            raise ConfigError(f"hydra.{key} cannot be changed: a config names no code and no folder by Hydra's own settings")


def check_names(config: RunConfig) -> None:
    """Refuse names that would lead to another folder, and paths that hold control characters.

    Raises:
        ConfigError: a name of the experiment, the grid, a study or a logger with a slash, a control character, or that is
            ``..``; the message names its key.
    """
    named = {"experiment": config.experiment}
    if config.ablation is not None:
        named |= {"ablation.name": config.ablation.name}
        named |= {f"ablation.studies.{name!r}": name for name in config.ablation.studies}
    for logger, node in config.logger.items():
        named |= {f"logger.{logger}.{key}": node[key] for key in _NAMES if isinstance(node.get(key), str)}
    for key, name in named.items():
        if name in (".", "..") or any(c in name for c in "/\\") or _CONTROL.search(name) or not (name or "logger" in key):
            raise ConfigError(f"{key}={name!r} must be a plain name: folders are called so; no slash, no .., one line")
    for key, path in _paths(to_dict(config), ""):
        if _CONTROL.search(path):
            raise ConfigError(f"{key}={path!r} must be a path of one line, without control characters")


def _paths(node: Any, path: str) -> Iterator[tuple[str, str]]:
    for name, child in node.items() if isinstance(node, Mapping) else ():
        if isinstance(child, str) and str(name).endswith(_PATHS):
            yield f"{path}{name}", child
        yield from _paths(child, f"{path}{name}.")


# --- the classes that it names


def check_targets(group: Mapping[str, Mapping[str, Any]], key: str) -> None:
    """Refuse a group of ``name: {_target_: …}`` that names anything outside ``ALLOWED``; imports nothing.

    Raises:
        ConfigError: a missing ``_target_``, one that is not allowed, or another word of Hydra's, at any depth.
    """
    for name, node in group.items():
        if "_target_" not in node:
            raise ConfigError(f"{key}.{name} has no _target_")
        for path, target in _targets(node, f"{key}.{name}"):
            if target not in ALLOWED:
                raise ConfigError(f"{path}._target_={target} is not allowed: one of {', '.join(sorted(ALLOWED))}")


def instantiate_all(group: Mapping[str, Mapping[str, Any]], key: str, folder: Path) -> list[Any]:
    """Build what ``group`` names, after ``check_targets``; loggers write into the run's ``folder``.

    Not Hydra's ``instantiate``: that resolves ``${...}`` once more, and so builds targets that nobody has checked.

    Raises:
        ConfigError: a target that is not allowed, or arguments that do not fit it.
    """
    check_targets(group, key)
    built = []
    for name, node in group.items():
        try:
            built.append(_build({**node, **_defaults(str(node["_target_"]), node, folder)}))
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"{key}.{name} cannot be built: {reason}") from error
    return built


def _build(node: Any) -> Any:
    """``node`` with a built object in the place of every mapping that has a ``_target_``."""
    if isinstance(node, list | tuple):
        return [_build(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    arguments = {name: _build(value) for name, value in node.items() if name not in ("_target_", "_args_")}
    if "_target_" not in node:
        return arguments
    module, _, name = str(node["_target_"]).rpartition(".")
    return getattr(importlib.import_module(module), name)(*_build(node.get("_args_", ())), **arguments)


def _targets(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, str(node["_target_"])
            other = [name for name in node if re.fullmatch(r"_\w+_", str(name)) and name not in ("_target_", "_args_")]
            if other:
                raise ConfigError(f"{path}.{other[0]} is not read here: a target has _target_, _args_ and its own arguments")
        for name, child in node.items():
            yield from _targets(child, f"{path}.{name}")
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from _targets(child, f"{path}[{i}]")


def _defaults(target: str, node: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Loggers write beside the run; wandb without a key runs offline instead of asking for one."""
    if ".loggers." not in target:
        return {}
    defaults: dict[str, Any] = {} if "save_dir" in node else {"save_dir": str(folder)}
    if not target.endswith("WandbLogger"):
        return defaults
    defaults["settings"] = {**node.get("settings", {}), **_NOT_RECORDED}
    if "offline" not in node and not os.environ.get("WANDB_MODE"):
        has_key = bool(os.environ.get("WANDB_API_KEY")) or _netrc_has("api.wandb.ai")
        defaults |= {} if has_key else {"offline": True}
    return defaults


def _netrc_has(host: str) -> bool:
    import netrc

    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
