"""The flags of the programs, such as ``--help``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from minitx import __version__
from minitx.config import ConfigError
from minitx.config.schema import require


class Flags(argparse.ArgumentParser):
    """Parser for the flags of a program. All other words are ``overrides``. An unknown flag is a ConfigError.

    Args:
        of_hydra: accept the flags of Hydra, except ``--experimental-rerun``, which reads a pickle. Hydra reads them, but prints a page of
            usage for an unknown flag.
    """

    def __init__(self, *, of_hydra: bool = False) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("overrides", nargs="*")
        self.add_argument("--version", action="version", version=f"minitx {__version__}")
        self.add_argument("--help", "-h", action="store_true")
        if not of_hydra:
            return
        for names in ("--hydra-help", "--multirun -m", "--run -r", "--resolve", "--shell-completion -sc"):
            self.add_argument(*names.split(), action="store_true")
        self.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
        topics = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
        self.add_argument("--info", "-i", nargs="?", choices=topics)
        for names in ("--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd"):
            self.add_argument(*names.split())

    def error(self, message: str) -> NoReturn:
        dashed = message.partition("unrecognized arguments: --")[2]
        advice = f"keys have no dashes: use {dashed}" if "=" in dashed else "--help shows the keys and flags"
        raise ConfigError(f"{message}; {advice}")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Separate flags from overrides.

        Raises:
            ConfigError: a flag is unknown, a word is not UTF-8 text in the locale of this process, or an override has no key.
        """
        for word in words:
            if word != word.encode(errors="ignore").decode():
                raise ConfigError(f"{word!a} is not UTF-8 text; in a locale without UTF-8, set PYTHONUTF8=1")
            require(not word.startswith("="), f"{word} has no key; --help shows the keys")
        return self.parse_intermixed_args(list(words))
