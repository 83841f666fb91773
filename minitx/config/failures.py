"""Errors that end a program, and its exit codes.

0 done · 1 ``minitx-check`` found a fault · 2 a mistake in the command line or in its files · 3 failed after starting · 130
SIGINT, 143 SIGTERM (after writing a checkpoint, unless trainer.ckpt_every=0 or training had not started).
"""


class ConfigError(ValueError):
    """An invalid config. The message begins with ``key=value``, so that a caller can prepend a path."""

    exit_code = 2


class FailedRunError(RuntimeError):
    """A run failed after it started. The message is a sentence for the user."""

    exit_code = 3


def code_of(error: BaseException) -> int:
    """Return the exit code of a program that ``error`` ends: its ``exit_code``, if it has one.

    >>> code_of(KeyError("a")), code_of(FailedRunError("a process failed")), code_of(KeyboardInterrupt())
    (3, 3, 130)
    """
    return 130 if isinstance(error, KeyboardInterrupt) else int(getattr(error, "exit_code", 3))
