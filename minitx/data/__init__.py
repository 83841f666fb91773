"""Data sets. Each is a function that returns a ``Task``. Its arguments are the keys of ``data`` in a config.

A file in ``configs/data`` may name the function by any path to it. This package offers short names.
``minitx.data.datamodule`` makes batches of a ``Task`` for Lightning.
"""

from typing import TYPE_CHECKING

from minitx.config.lazy import on_first_use

if TYPE_CHECKING:
    from minitx.data.classification import classify, digits, images
    from minitx.data.corpus import kjv, masked, text
    from minitx.data.documents import hf
    from minitx.data.recall import induction, kv_lookup, multi_query_recall
    from minitx.data.task import Task
    from minitx.data.translation import dates, pairs

__all__ = [
    "Task",
    "classify",
    "dates",
    "digits",
    "hf",
    "images",
    "induction",
    "kjv",
    "kv_lookup",
    "masked",
    "multi_query_recall",
    "pairs",
    "text",
]

__getattr__, __dir__ = on_first_use(__name__)
