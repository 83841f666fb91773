"""The mean of a training metric over the last steps, and the value that it must reach."""

from __future__ import annotations

import math
from collections.abc import Mapping

from minitx.config import ConfigError
from minitx.config.schema import check_choice


class Window:
    """The mean of a metric over the last ``window`` steps. An accuracy must rise to ``value``; a loss must fall to it.

    Args:
        metric: ``train_accuracy`` or ``train_loss``.
        value: the value to reach.
        window: the number of steps in the mean.
        key: the key of these options, for messages.

    Attributes:
        last: the metric of the last ``window`` steps, for checkpoints.

    Raises:
        ConfigError: ``metric`` is another word.
    """

    def __init__(self, metric: str, value: float, window: int, key: str = "") -> None:
        check_choice("metric", metric, ("train_accuracy", "train_loss"))
        self.metric, self.value, self.window, self.key = metric, value, window, key
        self.last: list[float] = []

    def add(self, metrics: Mapping[str, float]) -> float | None:
        """Add the metrics of a step, and return the mean, or None in the first ``window`` - 1 steps.

        Raises:
            ConfigError: the objective does not count correct answers for ``train_accuracy``.
        """
        if self.metric not in metrics:
            place = f"{self.key}.metric={self.metric}"
            raise ConfigError(f"{place}: the objective does not count correct answers; use train_loss")
        self.last.append(metrics[self.metric])
        del self.last[: -self.window]
        return math.fsum(self.last) / self.window if len(self.last) == self.window else None

    def reaches(self, mean: float | None) -> bool:
        """Return whether a mean reaches the value. None and NaN do not.

        >>> Window("train_loss", 1.5, 2).reaches(1.0), Window("train_accuracy", 0.9, 2).reaches(None)
        (True, False)
        """
        return mean is not None and (mean <= self.value if self.metric == "train_loss" else mean >= self.value)
