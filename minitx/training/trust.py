"""The targets that a checkpoint may name. They are checked before they are looked up, because a lookup imports modules, and so runs code."""

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

BUILDERS = {
    "model": frozenset([MODEL, "minitx.interop.hf_from_config"]),
    "objective": frozenset([NODES["objective"]]),
}
"""Parts of this package that a checkpoint may name, by the key of their node, in addition to ``data_sets()``. They run no other code."""

_ADVICE = "with trust=true it is built all the same, which runs its code"


@cache
def data_sets() -> frozenset[str]:
    """Return the data sets of this package: the targets in the files of ``configs/data``."""
    texts = [file.read_text(encoding="utf-8") for file in shipped_configs().joinpath("data").glob("*.yaml")]
    return frozenset(name for text in texts for name in re.findall(r"^_target_: (\S+)$", text, flags=re.MULTILINE))


def check_trusted(node: Any, key: str) -> None:
    """Raise a ConfigError if a stored node could run untrusted code.

    The outermost ``_target_`` must be of the kind of its node: one of ``data_sets()`` for ``data``; for other nodes one of
    ``BUILDERS``, or a ``torch.nn.Module``. Every other ``_target_`` in it must be a class defined in ``torch.nn`` or
    ``torch.optim``, or one of ``OURS``. Only torch and this package are imported for the check.

    Raises:
        ConfigError: the node has another target.
    """
    known = data_sets() if key == "data" else BUILDERS.get(key, frozenset())
    if is_node(node) and (key == "data" or node["_target_"] in known):
        if node["_target_"] not in known:
            raise ConfigError(f"{key}._target_={node['_target_']} in the checkpoint is no data set of minitx; {_ADVICE}")
        node = {name: value for name, value in node.items() if name != "_target_"}
    elif is_node(node) and not issubclass(_trusted_class(str(node["_target_"]), key), nn.Module):
        raise ConfigError(f"{key}._target_={node['_target_']} in the checkpoint is no torch.nn.Module; {_ADVICE}")
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
    """The class that ``target`` names, if a checkpoint may name it."""
    module, _, name = target.rpartition(".")
    if target in OURS:
        importlib.import_module(module)
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if isinstance(found, type):
        home = found.__module__
        of_torch = home.startswith(("torch.nn.", "torch.optim.")) and getattr(sys.modules[home], found.__name__, None) is found
        if of_torch or target in OURS:
            return found
    raise ConfigError(f"{key}._target_={target} in the checkpoint is none of the classes that a checkpoint may name; {_ADVICE}")
