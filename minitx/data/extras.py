"""Packages that an extra of minitx installs."""

from importlib import import_module
from typing import Any

from minitx.config import ConfigError


def package(name: str, option: str, distribution: str = "", extra: str = "train") -> Any:
    """Import a module that an extra installs. If it is missing, raise a ConfigError that names the package."""
    try:
        return import_module(name)
    except ImportError:
        hint = f"install minitx with the extra {extra}"
        raise ConfigError(f"{option} needs the package {distribution or name}: {hint}") from None
