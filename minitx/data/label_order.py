"""The labels of a classification, numbered as in a trained head."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitx.config import ConfigError
from minitx.data.seeding import Draw
from minitx.data.splits import Split, as_split
from minitx.data.task import Batch, Task


def _renumbered(split: Split, numbers: Sequence[int]) -> Split:
    """Return the split with ``numbers[l]`` for each label l ≥ 0."""
    changed = copy(split)
    changed.collate = partial(_collate, split, torch.tensor(numbers))  # type: ignore[method-assign]
    return changed


def _collate(split: Split, numbers: Tensor, items: np.ndarray, draw: Draw) -> Batch:
    batch = split.collate(items, draw)
    labels = batch["labels"]
    return {**batch, "labels": torch.where(labels < 0, labels, numbers[labels.clamp(min=0)])}


def numbered_as(task: Task, names: Sequence[str]) -> Task:
    """Return the task with its labels numbered as in ``names``, the labels of a trained head.

    Labels that are whole numbers already number the head's labels. Names such as LABEL_0 do not name a label.

    Raises:
        ConfigError: a label of the data is not among ``names``, or is a larger number.
    """
    ours = task.label_names
    known = {name.casefold(): number for number, name in enumerate(names)}
    unnamed = len(names)
    no_names = list(names) == [f"LABEL_{number}" for number in range(len(names))]
    numbers = [known.get(name.casefold(), unnamed) for name in ours]
    if all(map(str.isdecimal, ours)) and not any(map(str.isdecimal, names)):
        numbers = [*map(int, ours)]
    elif no_names:
        numbers = [*range(len(ours))]
    if max(numbers) >= len(names):
        raise ConfigError(
            f"{task.name} has {len(ours)} labels ({', '.join(ours)}), but the trained head has {len(names)} ({', '.join(names)}): "
            "rename the labels, or make a new head with model=hf model.path=FOLDER model.new_head=true"
        )
    changed: dict[str, Any] = {
        name: getattr(task, name) for name in ("train", "val", "test") if getattr(task, name) is not None
    }
    if numbers != [*range(len(ours))]:
        changed = {name: _renumbered(as_split(task, name), numbers) for name in changed}
    label_names = tuple(ours if no_names and len(ours) == len(names) else names)
    named = {label: label_names[number] for label, number in zip(ours, numbers, strict=True)}
    for name in ("val_examples", "test_examples"):
        changed[name] = [(text, named[label]) for text, label in getattr(task, name)]
    fields = {**task.model_fields, "num_labels": len(names)}
    return replace(task, **changed, label_names=label_names, model_fields=fields)
