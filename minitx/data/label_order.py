"""The labels of a classification, numbered as in a trained head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from minitx.config import ConfigError
from minitx.data.seeding import Draw
from minitx.data.splits import Split, as_split
from minitx.data.task import Batch, Task


class RenumberedSplit(Split):
    """A split with the label ``numbers[l]`` in place of each label l ≥ 0."""

    def __init__(self, split: Split, numbers: Sequence[int]) -> None:
        self.split, self.numbers = split, torch.tensor(numbers)
        self.key_masks = split.key_masks

    def __len__(self) -> int:
        return len(self.split)

    @property
    def lengths(self) -> np.ndarray:  # type: ignore[override]
        """See ``Split``."""
        return self.split.lengths

    def order(self, epoch: int, random: np.random.Generator) -> np.ndarray:
        """See ``Split``."""
        return self.split.order(epoch, random)

    def count(self, items: np.ndarray) -> int | None:
        """See ``Split``."""
        return self.split.count(items)

    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        """See ``Split``."""
        batch = self.split.collate(items, draw)
        labels = batch["labels"]
        return {**batch, "labels": torch.where(labels < 0, labels, self.numbers[labels.clamp(min=0)])}


def numbered_as(task: Task, names: Sequence[str]) -> Task:
    """Return the task with its labels numbered as in ``names``, the labels of a trained head.

    Labels that are whole numbers already number the head's labels. Names such as LABEL_0 do not name a label.

    Raises:
        ConfigError: a label of the data is not among ``names``, or is a larger number.
    """
    ours = task.label_names
    number_of = {name.casefold(): number for number, name in enumerate(names)}
    unnamed = len(names)
    no_names = list(names) == [f"LABEL_{number}" for number in range(len(names))]
    numbers = [number_of.get(name.casefold(), unnamed) for name in ours]
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
        changed = {name: RenumberedSplit(as_split(task, name), numbers) for name in changed}
    label_names = tuple(ours if no_names and len(ours) == len(names) else names)
    named = {label: label_names[number] for label, number in zip(ours, numbers, strict=True)}
    for name in ("val_examples", "test_examples"):
        changed[name] = [(text, named[label]) for text, label in getattr(task, name)]
    fields = {**task.model_fields, "num_labels": len(names)}
    return replace(task, **changed, label_names=label_names, model_fields=fields)
