"""``help()`` reads well: every public name says what it is; those of ``minitx.nn`` name each argument."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import minitx
from minitx import interop, nn
from minitx.nn import backends, efficient, models

MODULES = sorted(name for _, name, _ in pkgutil.walk_packages(minitx.__path__, "minitx.") if "configs" not in name)


def members(name: str) -> Iterator[tuple[str, Any]]:
    """The public classes and functions that a module defines, and their public methods."""
    for key, thing in vars(importlib.import_module(name)).items():
        if key.startswith("_") or getattr(thing, "__module__", None) != name or not is_documented(thing):
            continue
        yield key, thing
        for method, function in vars(thing).items() if inspect.isclass(thing) else ():
            if not method.startswith("_") and is_method(function):
                yield f"{key}.{method}", getattr(thing, method)


def is_documented(thing: Any) -> bool:
    return inspect.isclass(thing) or inspect.isfunction(thing)


def is_method(thing: Any) -> bool:
    function = getattr(thing, "fget", thing)  # of a property
    return inspect.isfunction(function) and function.__name__ != "<lambda>"


def says_what(thing: Any) -> bool:
    """Whether there is a docstring, its own or that of what it overrides; the signature that a dataclass gets is none."""
    text = inspect.getdoc(thing)
    made = f"{thing.__name__}{inspect.signature(thing)}" if dataclasses.is_dataclass(thing) else None
    return bool(text) and text != str(made).removesuffix(" -> None")


def test_every_public_name_says_what_it_is():
    assert [name for name in MODULES if not importlib.import_module(name).__doc__] == []
    assert [f"{name}.{key}" for name in MODULES for key, thing in members(name) if not says_what(thing)] == []


PUBLIC = {f"{room.__name__}.{key}": getattr(room, key) for room in (nn, models, interop) for key in room.__all__}
PUBLIC |= {f"{efficient.__name__}.{key}": thing for key, thing in members(efficient.__name__) if "." not in key}
PUBLIC |= {f"backends.{thing.__name__}": thing for thing in (backends.Backend, backends.BackendReport, backends.backend_for)}


def arguments(thing: Any) -> list[str]:
    """What a reader may pass: the parameters of a function or of a constructor, the fields of a dataclass."""
    if inspect.isclass(thing) and dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing) if field.init]
    parameters = inspect.signature(thing).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and not p.name.startswith("_")]


def text_of(thing: Any) -> str:
    own = inspect.getdoc(thing) or ""
    built = inspect.getdoc(thing.__init__) if inspect.isclass(thing) and "__init__" in vars(thing) else None
    return f"{own}\n{built or ''}"


def test_every_argument_is_named_in_the_docstring():
    for name, thing in PUBLIC.items():
        if is_documented(thing):
            text = text_of(thing)
            assert [one for one in arguments(thing) if not re.search(rf"\b{re.escape(one)}\b", text)] == [], name
