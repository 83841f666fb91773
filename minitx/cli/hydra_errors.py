"""Messages of Hydra and OmegaConf in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import yaml
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from minitx.cli.keys import all_keys
from minitx.cli.overrides import FIRST_NAMES, roots_of
from minitx.config.unknown_keys import nearest, similar_key

OF_HYDRA = (HydraException, OmegaConfBaseException, yaml.YAMLError)
"""The types of errors of Hydra, OmegaConf and their YAML reader."""


def explained(error: BaseException, words: Sequence[str], config: DictConfig | None) -> str:
    """Return one line for an error of Hydra or OmegaConf, with a suggestion for a misspelled option or interpolation.

    Args:
        words: overrides, and ``--config-dir=FOLDER``.
        config: the composed config, if Hydra has composed one.
    """
    advice = ""
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or [path.stem for root in roots_of(words) for path in sorted((root / group).glob("*.yaml"))]
        advice = nearest(option, options) or f"; {group} must be one of: {', '.join(options)}" * bool(options)
    if isinstance(error, InterpolationKeyError) and config is not None and (missing := re.search("'(.+)'", str(error))):
        advice = similar_key(missing[1], FIRST_NAMES, all_keys(config))
    return f"{message_of(error).rstrip('.')}{advice}" if advice else message_of(error)


def message_of(error: BaseException) -> str:
    """Return the first line of a message, with the key and the cause if they are missing in it."""
    mark = getattr(error, "problem_mark", None)  # of PyYAML
    if mark is not None:
        return f"{os.path.relpath(mark.name)}, line {mark.line + 1}: {error.problem}"  # type: ignore[attr-defined]
    cause = error.__cause__
    if not str(error).strip() and cause is not None:
        return message_of(cause)
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    if first.endswith(":") or type(error) is ConfigCompositionException:  # with Hydra's advice
        first = " ".join([first, *more])
    if isinstance(cause, OmegaConfBaseException) and not isinstance(cause, ConfigAttributeError | ConfigKeyError):
        first = f"{first}: {message_of(cause)}"
    key = getattr(error, "full_key", None)
    return " ".join((f"{key}: {first}" if key and key not in first else first).split())
