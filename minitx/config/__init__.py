"""All configs, as frozen dataclasses, with checks of their fields.

A config is plain data (``dict``, ``list``, ``str``, numbers) in YAML files, on the command line and in checkpoints;
``from_dict`` turns it into these classes. The arguments of a node with ``_target_`` are read by the signature of its target
(``read_call``). Only the standard library is used. Messages begin with ``key=value``.
"""

from minitx.config.model import SCALE_WORDS, TransformerConfig, check_scale
from minitx.config.run import CONFIG_DIR, InitFrom, RunConfig
from minitx.config.schema import ConfigError, Part, from_dict, is_part, to_dict
from minitx.config.training import (
    IGNORED,
    CallbacksConfig,
    EvaluationConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParameterRule,
    ProbeConfig,
    SamplesConfig,
    ScheduleConfig,
    StopAtConfig,
    TrainerConfig,
    evaluate_factor,
)
