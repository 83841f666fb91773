"""The arguments of a module's ``forward``. Only ``minitx.check``, which imports torch alone, reads them in its own way."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from torch import nn

from minitx.config.signatures import by_keyword


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
        named = by_keyword(parameters).values()
        others = [p for p in parameters if p.kind is p.VAR_KEYWORD]
        groups = [keys for p in others for keys in get_args(p.annotation)]
        self.further = [name for keys in groups for name in getattr(keys, "__annotations__", ())]
        self.ordered = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = [p.name for p in named]
        self.needed = [p.name for p in named if p.default is p.empty]
        self.takes_any = bool(others)
        self.unnamed = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]

    def of_call(self, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name. Arguments for ``*args`` are left out."""
        return {**dict(zip(self.ordered, args, strict=False)), **options}
