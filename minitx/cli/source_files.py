"""Import a Python file by its path, and find an object in it: FILE.py:NAME."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import itertools
import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from minitx.config import ConfigError
from minitx.config.schema import require


def object_at(target: str, module: ModuleType | None = None) -> Any:
    """Return the object at FILE.py:NAME. ``module`` is the file if it was imported before."""
    path, _, name = target.rpartition(":")
    module = module or module_at(path)
    if hasattr(module, name):
        return getattr(module, name)
    names = [
        candidate for candidate, value in vars(module).items() if not candidate.startswith("_") and not inspect.ismodule(value)
    ]
    similar = difflib.get_close_matches(name, names, n=1)
    advice = f"did you mean {similar[0]}?" if similar else f"it defines {', '.join(names) or 'nothing'}"
    raise ConfigError(f"{path} does not define {name}; {advice}")


PREFIX = "file_to_check_"
"""The beginning of the module names of files. A number follows."""


def module_at(path: str) -> ModuleType:
    """Import a file under a name that no other module has, or as a module of the package that it is in.

    While it runs, its folder, or the folder of its package, is the first in ``sys.path``, as in a script.
    """
    file = Path(path)
    require(file.is_file(), f"{path} does not exist" if not file.exists() else f"{path} is not a file")
    folder, name = _place_in_package(file)
    number = sum(name.startswith(PREFIX) for name in sys.modules)
    spec = importlib.util.spec_from_file_location(f"{PREFIX}{number}", file.absolute())
    if file.suffix != ".py" or spec is None or spec.loader is None:
        raise ConfigError(f"{path} must end in .py")
    _unload_namesakes(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up a module by its name
    sys.path[:] = [folder, *sys.path, str(file.absolute().parent)]
    try:
        if name:
            module.__file__ = str(Path(folder, file.name))  # the home of the package, for _unload_namesakes
            module = importlib.import_module(name)
        else:
            spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}{_import_advice(error)}") from error
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)  # for imports in functions, without taking the place of libraries
    found = str(module.__file__)
    require(not name or os.path.samefile(found, file), f"{path} cannot be imported: {name} is already {found}")
    return module


def _place_in_package(file: Path) -> tuple[str, str]:
    """Return the folder that a file is imported from, and its dotted name there ("": it is in no package)."""
    file = file.absolute()
    folder, names = file.parent, [] if file.stem == "__init__" else [file.stem]
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        folder, names = folder.parent, [folder.name, *names]
    is_module = folder != file.parent and all(name.isidentifier() for name in names)
    return (str(folder), ".".join(names)) if is_module else (str(file.parent), "")


def _import_advice(error: Exception) -> str:
    """Return the end of the message if a package was not found: how it is found."""
    return "; install its package (pip install -e .), or add its folder to PYTHONPATH" * isinstance(error, ModuleNotFoundError)


def _unload_namesakes(folder: str) -> None:
    """Unload what earlier files imported from their own folders, if ``folder`` has a module of the same name."""
    names = list(itertools.dropwhile(lambda name: not name.startswith(PREFIX), sys.modules))  # imported since the first file
    homes = {name: os.path.dirname(getattr(sys.modules[name], "__file__", None) or "") for name in names}
    earlier = {home for name, home in homes.items() if name.startswith(PREFIX)} - {folder}
    own = (name for name, home in homes.items() if earlier & {home, os.path.dirname(home)})  # modules and packages
    namesakes = {name for name in own if PathFinder.find_spec(name, [folder])}
    for name in names:
        if name.partition(".")[0] in namesakes:
            del sys.modules[name]
