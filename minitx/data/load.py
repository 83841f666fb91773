"""Load the ``Task`` of a config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from minitx import config as configs
from minitx.data.chat import load_chat
from minitx.data.classify import load_classes
from minitx.data.corpus import data_dir
from minitx.data.documents import load_documents
from minitx.data.images import load_images
from minitx.data.masked import load_masked
from minitx.data.seq2seq import load_pairs
from minitx.data.streaming import load_stream
from minitx.data.synthetic import load_recall
from minitx.data.task import Task
from minitx.data.text import load_text
from minitx.data.tokenizers import Tokenizer

LOADERS: dict[type, Callable[[Any, Path, Tokenizer | None], Task]] = {
    configs.TextDataConfig: load_text,
    configs.MaskedDataConfig: load_masked,
    configs.RecallDataConfig: load_recall,
    configs.DatesDataConfig: load_pairs,
    configs.PairsDataConfig: load_pairs,
    configs.ClassifyDataConfig: load_classes,
    configs.DigitsDataConfig: load_images,
    configs.HubDataConfig: load_documents,
    configs.ChatDataConfig: load_chat,
}
"""The loader of each config class, also used for its subclasses. Arguments: config, folder of caches, tokenizer."""


def load_task(config: configs.DataConfig, tokenizer: Tokenizer | None = None, folder: str | Path | None = None) -> Task:
    """Load the task of ``config``.

    Args:
        config: one of the data configs.
        tokenizer: a tokenizer to use instead of that of ``config``, for example that of a checkpoint.
        folder: the folder for caches. ``None``: ``corpus.data_dir()``.

    Raises:
        ConfigError: the data cannot be read, or there are too few of them.
    """
    load = next(LOADERS[kind] for kind in type(config).__mro__ if kind in LOADERS)
    if isinstance(config, configs.HubDataConfig) and config.streaming:
        load = load_stream
    return load(config, Path(folder or data_dir()), tokenizer)
