"""The targets that a checkpoint may name. They are checked before they are looked up, because a lookup imports modules and runs code."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from minitx.config import ConfigError, is_node
from minitx.config.shipped import shipped_configs
from minitx.config.training import MODEL, NODES

OURS = (
    *("minitx.config.TransformerConfig", "minitx.nn.DecoderLM", "minitx.nn.Encoder", "minitx.nn.EncoderDecoder"),
    *("minitx.nn.VisionTransformer", "minitx.nn.MultiHeadAttention"),
)
"""Classes of this package that a checkpoint may name."""

BUILDERS = {"model": frozenset([MODEL, "minitx.interop.hf_from_config"]), "objective": frozenset([NODES["objective"]])}
"""Functions of this package that a checkpoint may name, by the key of their node, besides ``data_sets()``. They run no foreign code."""

_ADVICE = "to build it anyway and run its code, set trust=true"


@cache
def data_sets() -> frozenset[str]:
    """Return the names of the data sets of this package: the targets in ``configs/data``."""
    texts = [file.read_text(encoding="utf-8") for file in shipped_configs().joinpath("data").glob("*.yaml")]
    return frozenset(name for text in texts for name in re.findall(r"^_target_: (\S+)$", text, flags=re.MULTILINE))


def check_trusted(node: Any, key: str) -> None:
    """Raise a ConfigError if a stored node could run untrusted code.

    For ``data``, the outermost ``_target_`` must be in ``data_sets()``; for other nodes, it must be in ``BUILDERS`` or be a
    ``torch.nn.Module``. Every nested ``_target_`` must be a class defined in ``torch.nn`` or ``torch.optim``, or be in
    ``OURS``. The check imports only torch and this package.

    Raises:
        ConfigError: the node contains another target.
    """
    allowed = data_sets() if key == "data" else BUILDERS.get(key, frozenset())
    if is_node(node) and (key == "data" or node["_target_"] in allowed):
        if node["_target_"] not in allowed:
            raise ConfigError(f"{key}._target_={node['_target_']} in the checkpoint is not a data set of minitx; {_ADVICE}")
        node = {name: value for name, value in node.items() if name != "_target_"}
    elif is_node(node) and not issubclass(_trusted_class(str(node["_target_"]), key), nn.Module):
        raise ConfigError(f"{key}._target_={node['_target_']} in the checkpoint is not a torch.nn.Module; {_ADVICE}")
    _check_nested(node, key)


def _check_nested(node: Any, key: str) -> None:
    if isinstance(node, Mapping):
        if "_target_" in node:
            _trusted_class(str(node["_target_"]), key)
        for name, value in node.items():
            _check_nested(value, f"{key}.{name}")
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            _check_nested(value, f"{key}[{index}]")


def _trusted_class(target: str, key: str) -> type:
    """Return the class that ``target`` names, or raise a ConfigError if it is not trusted."""
    module, _, name = target.rpartition(".")
    if target in OURS:
        cls = getattr(importlib.import_module(module), name)
    else:
        cls = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if isinstance(cls, type):
        defined_in = cls.__module__
        of_torch = defined_in.startswith(("torch.nn.", "torch.optim."))
        if target in OURS or (of_torch and getattr(sys.modules[defined_in], cls.__name__, None) is cls):
            return cls
    raise ConfigError(f"{key}._target_={target} in the checkpoint is not a trusted class; {_ADVICE}")
