"""From exceptions to one sentence and an exit code; no traceback of ours greets a user for a plain mistake.

0 done · 2 anything wrong in what was typed · 3 failed after starting · 130 SIGINT, 143 SIGTERM (checkpoint written).
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from minitx.cli.launch import FOLDER, RankFailedError, tell_launcher
from minitx.cli.schema import unknown_key
from minitx.config import ConfigError, RunConfig


class CellsFailedError(RuntimeError):
    """Cells of a grid failed; the others are done and reported."""


class GridStoppedError(RuntimeError):
    """A grid was stopped by a signal; its finished cells are kept."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; the finished cells are kept: the same command goes on")
        self.number = number


class JobErrors:
    """Takes a job function to Hydra and keeps what it raises, because Hydra prints before it re-raises."""

    def __init__(self, job: Callable[[Any], None]) -> None:
        self.job, self.errors = job, list[Exception]()

    def __call__(self, composed: Any) -> None:
        try:
            self.job(composed)
        except Exception as error:
            self.errors.append(error)


def exit_code(compose_and_run: Callable[[Callable[[Any], None]], Any], job: Callable[[Any], None]) -> int:
    """Hand ``job`` to ``compose_and_run`` and translate what either raises; the sentence goes to stderr.

    What is raised outside of the job is about what was typed. In a sweep the other jobs run on, and the first error counts.
    """
    guarded = JobErrors(job)
    try:
        compose_and_run(guarded)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 2
    except KeyboardInterrupt:
        return _say(None, "stopped by SIGINT", 130)
    except BrokenPipeError:  # `train.py --help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _say(error, *sentence(error)[:1], 2)
    return _say(guarded.errors[0], *sentence(guarded.errors[0])) if guarded.errors else 0


def _say(error: Exception | None, text: str, code: int) -> int:
    if error is not None and show_traceback():
        traceback.print_exception(error)
    tell_launcher(text)
    if FOLDER not in os.environ:  # else the program that started this process says it, once for all of them
        sys.stderr.write(f"{'error: ' if code < 128 else ''}{text}\n")
    return code


def take_traceback(arguments: Sequence[str]) -> list[str]:
    """``arguments`` without ``traceback=true`` or ``false``, which says whether errors show where they came from."""
    os.environ["MINITX_TRACEBACK"] = "1" if "traceback=true" in arguments else "0"
    return [argument for argument in arguments if argument not in ("traceback=true", "traceback=false")]


def show_traceback() -> bool:
    """Whether ``traceback=true`` was asked for."""
    return os.environ.get("MINITX_TRACEBACK") == "1"


def sentence(error: Exception) -> tuple[str, int]:
    """One line and the exit code for ``error``."""
    if isinstance(error, ConfigError):
        return _one_line(str(error)), 2
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _compose_error(error), 2
    if isinstance(error, RankFailedError):
        return _one_line(str(error)), error.code
    kind = type(error).__name__  # some are of rooms that load torch, and known by name
    number = getattr(error, "number", None)
    if kind in ("GridStoppedError", "LaunchStoppedError", "StoppedError") and isinstance(number, int):
        return str(error), 128 + number
    if kind in ("NonFiniteError", "CheckpointError", "WorkerError", "CellsFailedError"):
        return _one_line(str(error)), 3
    if isinstance(error, RecursionError) and (key := re.search(r"full_key: ([a-z_.]+)", str(error))):
        return f"{key[1]} holds itself, without end", 2
    if type(error).__module__.startswith("yaml."):
        return _yaml_error(error), 2
    return f"{kind}: {_one_line(str(error)) or 'no message'} (traceback=true shows where)", 3


def _compose_error(error: Exception) -> str:
    """Hydra's and OmegaConf's messages, shortened to what was typed and what is allowed."""
    text = str(error)
    missing_key = re.search(r"Could not override '([^']+)'", text)
    if missing_key:
        return unknown_key(RunConfig, missing_key[1])
    group = re.search(r"Could not find '([^']+)'", text) or re.search(r"Could not load '?([^'\n]+)'?", text)
    if group:
        options = re.search(r"Available options in '([^']+)':\n((?:\t.*\n?)+)", text)
        if options:
            return f"{group[1].replace('/', '=', 1)} is not an option; {options[1]} is one of: {', '.join(options[2].split())}"
        return f"{group[1]} is not a config group or option; --help shows what there is"
    full_key = re.search(r"full_key: (\S+)", text)
    if text.startswith("Ambiguous value for argument"):
        typed = text.split("'")[1]
        name, _, value = typed.partition("=")
        return f"{typed} is several values: write [{value}] for a list, '{name}=\"{value}\"' for a text, or -m to run each"
    lines = text.strip().splitlines() or [type(error).__name__]
    told = [line for line in lines[1:2] if lines[0].startswith("Error merging") or lines[0].endswith(":")]
    first = ": ".join([lines[0].removesuffix(":"), *told])
    return _one_line(f"{full_key[1]}: {first}" if full_key and full_key[1] not in first else first)


def _yaml_error(error: Any) -> str:
    """Where in which file, and what is wrong there."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "something else"
    if mark is None:
        return _one_line(f"{getattr(error, 'name', 'a config')} is no YAML: {what}")
    return _one_line(f"{mark.name}, line {mark.line + 1}, is no YAML: {what}")


def _one_line(text: str) -> str:
    return " ".join(text.split())
