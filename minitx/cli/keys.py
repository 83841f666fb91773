"""All keys of a composed config, with those that only the targets of its nodes name: for help and for suggestions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from minitx.cli.overrides import FIRST_NAMES
from minitx.config import ConfigError, is_node
from minitx.config.part import find_target, plain_defaults
from minitx.config.schema import config_class_of
from minitx.config.signatures import required
from minitx.config.training import LOADING, NODES


def complete(config: DictConfig) -> dict[str, Any]:
    """Return a config whose nodes have all keys. Interpolations are not resolved."""
    values: Any = OmegaConf.to_container(config)
    return {name: _completed(node, name) if is_node(node) else node for name, node in values.items()}


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


def unlisted(config: DictConfig) -> list[str]:
    """Return overrides that add the defaults of targets, so that ``--help`` and ``--cfg`` show all keys."""
    nodes = {group: node for group, node in complete(config).items() if group in NODES and is_node(node)}
    added = [(group, name, node[name]) for group, node in nodes.items() for name in node if name not in config[group]]
    return [f"+{group}.{name}={json.dumps(value)}" for group, name, value in added if not isinstance(value, dict)]


def all_keys(config: DictConfig) -> Iterator[str]:
    """Yield all keys of a composed config that a run has, as ``group.key``. For most configs, this imports torch."""
    yield from _keys({name: node for name, node in complete(config).items() if name in FIRST_NAMES})


def _keys(node: Any, path: str = "") -> Iterator[str]:
    """Yield the keys of a config at all levels, as ``group.key``."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        if not str(name).startswith("_"):
            yield f"{path}{name}"
            yield from _keys(value, f"{path}{name}.")
