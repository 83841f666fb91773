"""Packages whose names are imported on first use (PEP 562), so that a part of minitx loads only the modules that it needs."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def on_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package that imports its public names under ``if TYPE_CHECKING``.

    Type checkers read these imports. At run time, the first use of a name makes the import. Each name is thus written once:
    ``lazy_loader`` would need a stub file of imports for each package.
    """

    @functools.cache
    def homes() -> dict[str, str]:
        """The module of each public name."""
        tree = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        return {name.name: str(node.module) for node in imports for name in node.names if node.module != __name__}

    def get(name: str) -> Any:
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes()[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes()})
