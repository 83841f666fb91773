"""Optional packages: import one, or say what installs it."""

import re
from contextlib import suppress
from importlib import import_module, metadata
from typing import Any

from minitx.config.failures import ConfigError

DISTRIBUTIONS = {"hydra": "hydra-core", "sklearn": "scikit-learn"}
"""Package names on PyPI that differ from the names of their modules."""


class MissingPackageError(ConfigError, ImportError):
    """An optional package is not installed."""


def package(module: str, user: str) -> Any:
    """Import a module of an optional package for ``user``, which needs it: a key of a config, a program or a function.

    Raises:
        MissingPackageError: the package is not installed. Any error of an installed package is raised as it is.
    """
    top = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != top:
            raise
        advice = package_of_extra(top) or f"the package {top}: pip install {top}"
        raise MissingPackageError(f"{user} needs {advice}") from None


def package_of_extra(module: str) -> str:
    """Return the package of a module, and the extra of minitx that installs it; an empty text if no extra does."""
    name = DISTRIBUTIONS.get(module, module).replace("_", "-").lower()
    with suppress(metadata.PackageNotFoundError):  # minitx itself is not installed
        for requirement in metadata.requires("minitx") or ():
            matched = re.match(r"([\w.-]+).*extra == ['\"](\w+)['\"]", requirement)  # peft>=0.17; extra == "hf"
            if matched and matched[2] != "dev" and matched[1].lower() == name:
                return f"the package {matched[1]}: install minitx with the extra {matched[2]}"
    return ""
