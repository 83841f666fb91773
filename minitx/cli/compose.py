"""From overrides to a config: what hydra composes, as dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from omegaconf import DictConfig, OmegaConf

from minitx.cli.overrides import CHOSEN
from minitx.cli.schema import from_dict
from minitx.config import CONFIG_DIR, ConfigError, RunConfig


def build_config(composed: DictConfig) -> RunConfig:
    """The composed config as dataclasses, every interpolation resolved and every field checked."""
    values = plain(composed)
    for name in ("experiment", "debug"):  # what a file without that line says lands there
        if isinstance(values.get(name), dict | list):
            raise ConfigError(
                f"{name}={values[name]} is no config: its file must hold keys and begin with the line '# @package _global_'"
            )
    for name in CHOSEN:
        if not values.get(name):
            raise ConfigError(
                f"{name} is missing: choose an option, {name}=OPTION, or begin your config with 'defaults: [train]'"
            )
    return from_dict(RunConfig, values)


def plain(composed: DictConfig) -> dict[str, Any]:
    """A composed config, or a group of it, as plain data with every interpolation resolved."""
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def composed(overrides: Sequence[str]) -> DictConfig:
    """What hydra composes for ``train.py OVERRIDES``, in this process, beside a program that hydra runs in it."""
    state = Singleton.get_state()  # hydra keeps one at a time
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_module("minitx.configs", version_base="1.3"):
            return hydra.compose("train", overrides=list(overrides))
    finally:
        Singleton.set_state(state)


def compose_config(words: Sequence[str]) -> RunConfig:
    """What ``train.py WORDS`` would run.

    ``words`` are overrides, and ``--config-dir=FOLDER`` where configs of the user's own are meant.
    """
    folders = [Path(word.removeprefix(CONFIG_DIR)).absolute() for word in words if word.startswith(CONFIG_DIR)]
    overrides = [word for word in words if not word.startswith(CONFIG_DIR)]
    if folders:
        quoted = ("'file://" + str(folder).replace("'", r"\'") + "'" for folder in folders)
        overrides.append(f"hydra.searchpath=[{','.join(quoted)}]")
    return build_config(composed(overrides))
