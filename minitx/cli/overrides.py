"""What was typed for ``train.py``, looked at before Hydra is: Hydra's own words for it are many and name no key.

The grammar is Hydra's; see https://hydra.cc/docs/advanced/override_grammar/basic.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from minitx.config import ConfigError

GROUPS = (
    "model",
    "data",
    "objective",
    "optimizer",
    "schedule",
    "trainer",
    "logger",
    "callbacks",
    "ablation",
    "experiment",
    "debug",
)
CHOSEN = ("model", "data", "objective", "optimizer", "schedule", "trainer", "callbacks", "evaluation")
"""What a config must fill: a run on the defaults of all of them is not what anybody asked for."""


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse what Hydra cannot read.

    Raises:
        ConfigError: an unknown flag, an argument that is no ``key=value``, a value that must be quoted, a group without an
            option, a folder of configs with a file that is no config.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise ConfigError(f"{message}; --help shows what there is")

    parser.error = refuse  # type: ignore[assignment, method-assign]
    given = parser.parse_args(list(arguments))
    for argument in given.overrides:
        _check_override(argument)
    for folder in (given.config_dir, given.config_path):
        if folder is not None and "://" not in folder:
            _check_folder(Path(folder), given.config_name)


def _check_override(argument: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    name, is_pair, value = argument.partition("=")
    if not is_pair and not name.startswith("~"):
        raise ConfigError(f"{argument} is not key=value; --help shows the keys")
    if name == "traceback":
        raise ConfigError(f"{argument} must be true or false")
    if not name.strip("+~"):
        raise ConfigError(f"{argument} names no key; --help shows the keys")
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        raise ConfigError(f"{argument} cannot be read: {_quoted(name, value)}") from None
    if override.key_or_group in GROUPS:
        if override.is_delete() and override.key_or_group in CHOSEN:
            raise ConfigError(f"{argument} leaves nothing to run: choose another option, {override.key_or_group}=OPTION")
        is_value = is_pair and not override.is_delete() and not override.is_sweep_override()
        if is_value and not isinstance(override.value(), str | list):
            raise ConfigError(f"{argument} must name an option of that group; --help shows them")


def _quoted(name: str, value: str) -> str:
    """How a shell is given a value that Hydra reads as it stands."""
    if value[:1] in "[{":
        return f"within a list or a mapping, a text with another sign than -_./+*@% stands in quotes: \"{name}=[{{a: 'b^c'}}]\""
    return "a value with one of ^=,()[]{}'\" is " + f"written with two pairs of quotes: '{name}=\"{value.strip(chr(34))}\"'"


def _check_folder(folder: Path, primary: str | None) -> None:
    """Refuse a YAML file of the user's that Hydra would read as something else, or stumble over without its name."""
    if not folder.is_dir():
        raise ConfigError(f"--config-dir={folder} is not a folder of configs")
    import yaml

    for file in sorted(folder.rglob("*.yaml")):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file} is not UTF-8 at byte {error.start}; convert it to UTF-8") from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
        if file.parent == folder and file.stem == (primary or "").removesuffix(".yaml"):
            with file.open(encoding="utf-8") as stream:
                yaml.safe_load(stream)  # its error names file and line
            if not re.search(r"^defaults\s*:", text, re.MULTILINE):
                raise ConfigError(f"{file} chooses no model and no data: begin it with the line 'defaults: [train, _self_]'")
