"""Turn exceptions into a sentence and an exit code. ``minitx.config.failures`` lists the exit codes."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from minitx.cli.compose import SHOWS_TRACEBACK
from minitx.cli.launch import FOLDER, LOST, is_of_a_lost_process, tell_launcher
from minitx.config import ConfigError
from minitx.config.failures import FailedRunError, code_of
from minitx.training import StoppedError


def exit_code(program: Callable[[], Any]) -> int:
    """Run ``program`` and return its exit code. The message of an exception is written to stderr.

    The program continues if the reader of stdout exits (``train.py ... | head``), or if a stream is closed.
    """
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    # a letter outside of the encoding must not raise an error
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    code = _code_of(program)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python reports the broken pipe at exit
    return code


def _code_of(program: Callable[[], Any]) -> int:
    try:
        program()
    except SystemExit as stop:
        if isinstance(stop.code, str):  # from a user's module
            return _say(stop, stop.code, 2)
        return 2 if stop.code == 1 else stop.code or 0  # with code 1, Hydra has written the message
    except KeyboardInterrupt:
        return _say(None, "stopped by SIGINT", 130)
    except BrokenPipeError:  # from `train.py --help | head`
        return 0
    except Exception as error:
        return report(error)
    return 0


def report(error: Exception) -> int:
    """Write the message of an exception to stderr, and return the exit code."""
    return _say(error, *sentence(error))


def is_traceback(word: str) -> bool:
    """Return whether a word of the command line sets the key ``traceback``."""
    return word.lstrip("+").startswith("traceback=")


def _shows_traceback(error: BaseException) -> bool:
    """Whether the config of the job asks for the traceback, or without a config the command line, in a word that YAML reads as true."""
    *_, typed = ["", *filter(is_traceback, sys.argv[1:])]
    return bool(getattr(error, SHOWS_TRACEBACK, typed.partition("=")[2].lower() in ("true", "yes", "on")))


def _say(error: BaseException | None, text: str, code: int) -> int:
    if error is not None and _shows_traceback(error):
        traceback.print_exception(error)
    tell_launcher(text)
    if FOLDER not in os.environ:  # in launched processes, the parent writes it once for all ranks
        sys.stderr.write(f"{'error: ' if code < 128 else ''}{text}\n")
    return code


def sentence(error: BaseException) -> tuple[str, int]:
    """Return the message of an exception in one line, and the exit code."""
    from minitx.cli.hydra_errors import OF_HYDRA, message_of  # only errors need it

    text = " ".join(str(error).split())
    if isinstance(error, ConfigError | FailedRunError | StoppedError):
        return text, code_of(error)
    if isinstance(error, OF_HYDRA):
        return message_of(error), 2
    if is_of_a_lost_process(error):
        return LOST, code_of(error)
    return f"{type(error).__name__}: {text or 'no message'} (traceback=true shows where)", code_of(error)
