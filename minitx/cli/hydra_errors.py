"""Messages for a command line that Hydra cannot compose: the first line of Hydra's message, and a suggestion."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence

from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from minitx.cli.overrides import FIRST_NAMES, parsed, roots_of
from minitx.config import CONFIG_DIR
from minitx.config.schema import nearest


def is_of_hydra(error: BaseException) -> bool:
    """Return whether Hydra or OmegaConf raised ``error``."""
    names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [name for name in names if name.partition(".")[0] not in ("os", "pathlib")]  # Hydra creates folders with these
    raised_in = names[-1] if names else ""
    return isinstance(error, HydraException | OmegaConfBaseException) or raised_in.startswith(("hydra.", "omegaconf."))


def explained(error: BaseException, words: Sequence[str], *, sweeps: bool = False) -> str:
    """Return one line for an error of Hydra or OmegaConf, with advice on the option or the override that it is about.

    Args:
        words: overrides that Hydra's grammar can read, and ``--config-dir=FOLDER``.
        sweeps: whether ``a=1,2`` is a sweep (``-m``).
    """
    advice = ""
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        options = error.options or [path.stem for root in roots_of(words) for path in sorted((root / group).glob("*.yaml"))]
        if options:
            advice = nearest(option, options) or f"; {group} must be one of: {', '.join(options)}"
    elif isinstance(error, ConfigCompositionException):
        advice = next(filter(None, (_advice(word, sweeps) for word in words)), "")
    return f"{message_of(error).rstrip('.')}{advice}" if advice else message_of(error)


def _advice(word: str, sweeps: bool) -> str:
    """Return the end of a message that is about the form of a word, else an empty text."""
    if word.startswith(CONFIG_DIR):
        return ""
    override = parsed(word)
    name = override.key_or_group
    if override.is_sweep_override() and not sweeps:
        return f"; add -m to run every value, or write '{name}=[...]' for a list"
    if override.is_delete():
        return "; --help shows the keys"
    if override.is_add():
        return f"; {name} already exists: remove the +" if name.partition(".")[0] in FIRST_NAMES else ""
    if override.package:
        return f" (did you mean {name}?)"
    is_known = "/" in name or name.partition(".")[0] in (*FIRST_NAMES, "hydra") or override.is_force_add()
    return "" if is_known else f" (did you mean +{name}?)"  # a group of the user's that no run has


def message_of(error: BaseException) -> str:
    """Return the first line of a message, with the key and the cause if they are missing in it."""
    mark = getattr(error, "problem_mark", None)  # of PyYAML
    if mark is not None:
        return f"{os.path.relpath(mark.name)}, line {mark.line + 1}: {error.problem}"  # type: ignore[attr-defined]
    cause = error.__cause__
    if not str(error).strip() and cause is not None:
        return message_of(cause)
    first, *more = str(error).strip().splitlines() or [type(error).__name__]
    if first.endswith(":"):
        first = " ".join([first, *more[:1]])
    if isinstance(cause, OmegaConfBaseException) and not isinstance(cause, ConfigAttributeError | ConfigKeyError):
        first = f"{first}: {message_of(cause)}"
    key = getattr(error, "full_key", None)
    return " ".join((f"{key}: {first}" if key and key not in first else first).split())
