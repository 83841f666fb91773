"""Errors that end a program, and its exit codes.

0 done · 1 ``minitx-check`` found a fault · 2 a mistake in the command line or in its files · 3 failed after starting, or a bug in
code · 130 SIGINT, 143 SIGTERM (after writing a checkpoint, unless trainer.ckpt_every=0 or training had not started).
"""


class ConfigError(ValueError):
    """An invalid config. The message begins with ``key=value``, so that a caller can prepend a path."""

    exit_code = 2


class UnknownKeyError(ConfigError):
    """A config has a key, ``key``, that does not exist. ``ending`` completes the message."""

    def __init__(self, key: str, ending: str) -> None:
        super().__init__(key, ending)  # unchanged arguments, so that the error can be pickled
        self.key = key

    def __str__(self) -> str:
        return f"{self.key} is not a key{self.args[1]}"


class FailedRunError(RuntimeError):
    """A run failed after it started. The message is a sentence for the user."""

    exit_code = 3


def code_of(error: BaseException) -> int:
    """Return the exit code of a program that ``error`` ends: its ``exit_code``, if it has one.

    >>> code_of(KeyError("a")), code_of(ConfigError("seed=a must be a whole number"))
    (3, 2)
    """
    return 130 if isinstance(error, KeyboardInterrupt) else int(getattr(error, "exit_code", 3))
