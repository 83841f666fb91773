"""Read the signatures of functions and classes: parameters, defaults and type hints."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterable
from functools import cache
from typing import Any


@cache
def hints_of(target: Any) -> dict[str, Any]:
    """Return the type hints of a dataclass's fields or of a callable's parameters; {} if they cannot be resolved."""
    is_plain_class = isinstance(target, type) and not dataclasses.is_dataclass(target)
    annotated: Any = target.__init__ if is_plain_class else target
    try:
        return typing.get_type_hints(annotated, include_extras=True)
    except Exception:  # some names exist only for type checkers
        return {}


def parameters_of(target: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a function or class, or None if it has no signature, as with some written in C."""
    try:
        return list(inspect.signature(target).parameters.values())
    except (ValueError, TypeError):
        return None


def by_keyword(parameters: Iterable[inspect.Parameter] | None) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be passed by keyword, by name, without ``**kwargs``."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {param.name: param for param in parameters or () if param.kind in kinds}


def parameter_names(function: Any) -> set[str]:
    """Return the names of the parameters that can be passed by keyword, without ``**kwargs``."""
    return {*by_keyword(parameters_of(function))}


def required(function: Any, positional: int = 0) -> list[str]:
    """Return the names of the parameters without a default, skipping the first ``positional`` parameters."""
    parameters = (parameters_of(function) or [])[positional:]
    return [name for name, param in by_keyword(parameters).items() if param.default is param.empty]
