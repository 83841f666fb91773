"""All configs, as frozen dataclasses, with checks of their fields.

A config is plain data (``dict``, ``list``, ``str``, numbers) in YAML files, on the command line and in checkpoints;
``from_dict`` turns it into these classes. Only the standard library is used, so that typing errors are reported before torch is
imported. Messages begin with ``key=value``.
"""

from minitx.config.checks import ConfigError, is_part, to_dict
from minitx.config.data import (
    ChatDataConfig,
    ClassifyDataConfig,
    DataConfig,
    DatesDataConfig,
    DigitsDataConfig,
    HubDataConfig,
    ImageDataConfig,
    InductionDataConfig,
    KeyValueDataConfig,
    MaskedDataConfig,
    MultiQueryDataConfig,
    PairsDataConfig,
    RecallDataConfig,
    TextDataConfig,
)
from minitx.config.data_bases import IGNORED, CorpusConfig
from minitx.config.model import SCALE_WORDS, TransformerConfig, check_scale
from minitx.config.run import CONFIG_DIR, InitFrom, RunConfig
from minitx.config.schema import from_dict, unknown_key
from minitx.config.training import (
    CallbacksConfig,
    EvaluationConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParameterRule,
    Part,
    ProbeConfig,
    SamplesConfig,
    ScheduleConfig,
    StopAtConfig,
    TrainerConfig,
    evaluate_factor,
)
