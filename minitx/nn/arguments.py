"""The arguments of a module's ``forward``. Only ``minitx.check``, which imports torch alone, reads them in its own way."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from torch import nn


class Arguments:
    """The parameters of ``forward``.

    Args:
        module: a module, or a class of modules.

    Attributes:
        ordered: the parameters that can be passed by position, in order.
        names: the parameters that can be passed by name.
        further: the keys of the annotation ``Unpack[...]`` of ``**kwargs``. ``forward`` may ignore them.
        needed: the ``names`` without a default.
        takes_any: whether it has ``**kwargs``.
        unnamed: the parameters without a default that can only be passed by position.

    >>> Arguments(nn.Bilinear).names
    ['input1', 'input2']
    """

    def __init__(self, module: nn.Module | type[nn.Module]) -> None:
        parameters = [*inspect.signature(module.forward).parameters.values()][isinstance(module, type) :]  # a class: no self
        named = [param for param in parameters if param.kind in (param.POSITIONAL_OR_KEYWORD, param.KEYWORD_ONLY)]
        others = [param for param in parameters if param.kind is param.VAR_KEYWORD]
        groups = [keys for param in others for keys in get_args(param.annotation)]
        self.further = [name for keys in groups for name in getattr(keys, "__annotations__", ())]
        self.ordered = [
            param.name for param in parameters if param.kind in (param.POSITIONAL_ONLY, param.POSITIONAL_OR_KEYWORD)
        ]
        self.names = [param.name for param in named]
        self.needed = [param.name for param in named if param.default is param.empty]
        self.takes_any = bool(others)
        self.unnamed = [
            param.name for param in parameters if param.kind is param.POSITIONAL_ONLY and param.default is param.empty
        ]

    def of_call(self, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name. Arguments for ``*args`` are left out."""
        return {**dict(zip(self.ordered, args, strict=False)), **options}
