"""The words for a score scale, and factors that depend on the width of a head."""

from __future__ import annotations

import math
import re
from typing import Annotated

from minitx.config.schema import Bound, ConfigError, require, shown


def evaluate_factor(factor: float | str, *, head_dim: int, key: str = "factor") -> float:
    """Return a number unchanged, and ``head_dim^p`` as d_k to the power p.

    >>> evaluate_factor("head_dim^-0.25", head_dim=16)
    0.5
    """
    if isinstance(factor, int | float):
        return float(factor)
    matched = re.fullmatch(r"head_dim\^(-?\d+(?:\.\d+)?)", factor.strip())
    require(matched is not None, f"{key}={factor} must be a number or head_dim^p, for example head_dim^-0.25")
    return float(head_dim) ** float(matched[1])  # type: ignore[index]


SCALE_WORDS = ("inv_sqrt", "unscaled", "inv", "learned", "log_length")


def _is_scale(scale: object) -> bool:
    if scale in SCALE_WORDS:
        return True
    if isinstance(scale, bool) or not isinstance(scale, str | int | float):
        return False
    try:
        return math.isfinite(evaluate_factor(scale, head_dim=2**20))
    except (ConfigError, OverflowError):
        return False


_MUST = f"be one of {', '.join(SCALE_WORDS)}, head_dim^p, or a finite number; 'unscaled' means no scaling, 'inv_sqrt' means 1/sqrt(head_dim)"

Scale = Annotated[str | float, Bound(_MUST, _is_scale)]
"""A word of ``SCALE_WORDS``, ``head_dim^p`` or a finite number."""


def check_scale(scale: object) -> None:
    """Raise a ConfigError unless ``scale`` is a ``Scale``."""
    require(_is_scale(scale), f"scale={shown(scale)} must {_MUST}")
