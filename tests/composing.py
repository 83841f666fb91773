"""Composing once for each choice of groups.

Hydra reads and merges 25 files for a config, twice for each run of a program, which takes a quarter of a second. What ``configs`` and
Hydra's own files say does not change while tests run. So what follows from them and from the chosen groups alone is made once in a process
and copied, and Hydra sets the typed values in the copy. With a folder of the user's this holds while its files are the same.

Hydra composes a run's config a first time only to read ``hydra.mode``, and for each file lists the choices that an interpolated option
may name. No file of minitx's has either, so both are left out where nothing asks for them.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import InputDefault
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig

from minitx.config.shipped import shipped_configs

_create_defaults_list = config_loader_impl.create_defaults_list
_merge = ConfigLoaderImpl._compose_config_from_defaults_list
_load = ConfigRepository.load_config
_mode, _choices = Hydra.get_mode, defaults_list._create_interpolation_map
_kept: dict[Any, bytes] = {}


def remember_compositions() -> None:
    """Let Hydra keep, in this process, what it makes of minitx's files and its own."""
    config_loader_impl.create_defaults_list = _remembered_defaults
    ConfigLoaderImpl._compose_config_from_defaults_list = lambda self, defaults, repo: _remembered(  # type: ignore[method-assign]
        repo, lambda: _merge(self, defaults, repo), "merged", repr(defaults)
    )
    ConfigRepository.load_config = lambda self, config_path: _remembered(  # type: ignore[method-assign]
        self, lambda: _load(self, config_path), "loaded", config_path
    )
    defaults_list._create_interpolation_map = _choices_if_asked
    Hydra.get_mode = _mode_if_set  # type: ignore[method-assign]
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]  # each composition copies it, and only reads it


@contextmanager
def composing_anew() -> Iterator[None]:
    """A context in which Hydra keeps nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_loader_impl, "create_defaults_list", _create_defaults_list)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", _merge)
        patch.setattr(ConfigRepository, "load_config", _load)
        patch.setattr(Hydra, "get_mode", _mode)
        patch.setattr(defaults_list, "_create_interpolation_map", _choices)
        patch.delattr(ConfigStore, "__deepcopy__", raising=False)
        yield


def _remembered(repo: Any, make: Callable[[], Any], *key: Any) -> Any:
    whole = (tuple(map(_files, repo.get_sources())), *key)
    if whole not in _kept:
        _kept[whole] = pickle.dumps(make())
    return pickle.loads(_kept[whole])


def _mode_if_set(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """What the config says of the mode. None without a word about Hydra or a folder of the user's, as where nothing is said."""
    own = any(
        source.scheme() == "file" and source.path != str(shipped_configs()) for source in hydra.config_loader.get_sources()
    )
    return _mode(hydra, config_name, overrides) if own or any("hydra" in word for word in overrides) else None


def _choices_if_asked(overrides: Overrides, options: list[InputDefault], self_added: bool) -> DictConfig:
    return _choices(overrides, options, self_added) if any("${" in repr(option) for option in options) else DictConfig({})


def _files(source: Any) -> tuple[Any, ...]:
    """A source of configs, and what is in its files if they may change."""
    if source.scheme() != "file" or source.path == str(shipped_configs()):
        return source.scheme(), source.path
    found = [path for ending in ("yaml", "yml") for path in Path(source.path).rglob(f"*.{ending}")]
    return source.provider, source.path, *((str(path), path.read_bytes()) for path in sorted(found))


def _remembered_defaults(
    repo: Any, config_name: str | None, overrides_list: list[Override], prepend_hydra: bool, skip_missing: bool
) -> DefaultsList:
    values = Overrides(repo=repo, overrides_list=overrides_list).config_overrides
    groups = [override for override in overrides_list if not any(override is value for value in values)]
    key = ("defaults", config_name, tuple(override.input_line for override in groups), prepend_hydra)

    def make(skip: bool) -> DefaultsList:
        return _create_defaults_list(repo, config_name, groups, prepend_hydra, skip)

    try:
        found: DefaultsList = _remembered(repo, lambda: make(False), *key)
    except ConfigCompositionException:  # else nothing was missing, and there was nothing to skip
        found = make(skip_missing)
    found.config_overrides = found.overrides.config_overrides = values
    return found
