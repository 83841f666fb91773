"""All configs, as frozen dataclasses, with checks of their fields.

A config is plain data (``dict``, ``list``, ``str``, numbers) in YAML files, on the command line and in checkpoints;
``from_dict`` turns it into these classes. A node with ``_target_`` becomes a ``Part``: its target is looked up, and its
arguments are read by the signature of the target (``read_call``), or as the fields of a dataclass. Only the standard library is
used. Messages begin with ``key=value``.
"""

from typing import TYPE_CHECKING

from minitx.config.lazy import on_first_use

if TYPE_CHECKING:
    from minitx.config.part import Part, node
    from minitx.config.scale_words import evaluate_factor
    from minitx.config.schema import ConfigError, from_dict, is_node, to_dict
    from minitx.config.training import (
        CONFIG_DIR,
        IGNORED,
        EvaluationConfig,
        InitFrom,
        ParameterRule,
        RunConfig,
        StopAtConfig,
        TrainerConfig,
    )
    from minitx.config.transformer import TransformerConfig

__all__ = [
    "CONFIG_DIR",
    "IGNORED",
    "ConfigError",
    "EvaluationConfig",
    "InitFrom",
    "ParameterRule",
    "Part",
    "RunConfig",
    "StopAtConfig",
    "TrainerConfig",
    "TransformerConfig",
    "evaluate_factor",
    "from_dict",
    "is_node",
    "node",
    "to_dict",
]

__getattr__, __dir__ = on_first_use(__name__)
