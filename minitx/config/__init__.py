"""All configs, as frozen dataclasses, with checks of their fields.

A config is plain data (``dict``, ``list``, ``str``, numbers) in YAML files, on the command line and in checkpoints;
``from_dict`` turns it into these classes. The arguments of a node with ``_target_`` are read by the signature of its target
(``read_call``), or as the fields of a dataclass. Only the standard library is used. Messages begin with ``key=value``.
"""

from minitx.config.schema import ConfigError, Part, from_dict, is_part, node, to_dict
from minitx.config.training import (
    CONFIG_DIR,
    IGNORED,
    CallbacksConfig,
    EvaluationConfig,
    InitFrom,
    ParameterRule,
    ProbeConfig,
    RunConfig,
    SamplesConfig,
    StopAtConfig,
    TrainerConfig,
    evaluate_factor,
)
from minitx.config.transformer import SCALE_WORDS, TransformerConfig, check_scale
