"""Synthetic tasks that attention alone can solve."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minitx.config import KeyValueDataConfig
from minitx.data.addressing import IGNORED, VALIDATION_SEED, Batch, BatchSource, FiniteSource, generator


def key_value_examples(config: KeyValueDataConfig, num_examples: int, random: np.random.Generator) -> Batch:
    """Draw examples of kv-lookup (task T1 of the scaling ablation), vectorised.

    With P pairs an example has L = P + 1 positions. Position i < P shows key k_i (distinct, uniform) with value v_i
    (independent, uniform); position P shows k_j for a uniform j and asks for v_j:

        input_ids       k_1 … k_P       k_j                    keys are 0 … num_keys − 1
        token_type_ids  v_1+1 … v_P+1   0                      0 means "no value"
        labels          −100 … −100     num_keys + v_j         values as outputs follow the keys

    Returns:
        ``input_ids``, ``token_type_ids``, ``labels``, each (num_examples, P + 1) int64, and ``num_targets``.
    """
    shape = (num_examples, config.num_pairs + 1)
    every_key = np.broadcast_to(np.arange(config.num_keys), (num_examples, config.num_keys))
    input_ids, token_type_ids = np.empty(shape, np.int64), np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    input_ids[:, :-1] = random.permuted(every_key, axis=1)[:, : config.num_pairs]
    values = random.integers(config.num_values, size=(num_examples, config.num_pairs))
    token_type_ids[:, :-1] = values + 1
    asked = random.integers(config.num_pairs, size=num_examples)
    rows = np.arange(num_examples)
    input_ids[:, -1] = input_ids[rows, asked]
    labels[:, -1] = config.num_keys + values[rows, asked]
    arrays = {"input_ids": input_ids, "token_type_ids": token_type_ids, "labels": labels}
    return {**{key: torch.from_numpy(a) for key, a in arrays.items()}, "num_targets": torch.tensor(num_examples)}


def key_value_texts(input_ids: Sequence[int], token_type_ids: Sequence[int]) -> list[str]:
    """Positions for people: ``key:value``, values from 1 on as in ``token_type_ids``; the key alone where it has no value.

    >>> key_value_texts([12, 3, 12], [5, 1, 0])
    ['12:5', '3:1', '12']
    """
    return [f"{key}:{value}" if value else str(key) for key, value in zip(input_ids, token_type_ids, strict=True)]


def _slice(batch: Batch, rows: range) -> Batch:
    return {key: value[rows.start : rows.stop] if value.ndim else value for key, value in batch.items()}


class KeyValueSource(BatchSource):
    """Fresh kv-lookup examples for every step: a pure function of (seed, step).

    The model needs ``vocab_size`` = num_keys + num_values and ``type_vocab_size`` = num_values + 1.
    """

    def __init__(self, config: KeyValueDataConfig, *, seed: int, accumulate: int = 1, world: int = 1) -> None:
        super().__init__(config.batch_size, accumulate=accumulate, world=world)
        self.config, self.seed = config, seed

    def batch(self, step: int, rows: range) -> Batch:
        whole = key_value_examples(self.config, self.batch_size, generator(self.seed, "train", step))
        return _slice(whole, rows)


class KeyValueValidation(FiniteSource):
    """``config.val_size`` fixed kv-lookup examples, the same for every seed."""

    def __init__(self, config: KeyValueDataConfig, *, batch_size: int, world: int = 1) -> None:
        super().__init__(batch_size, world=world, split="val")
        self.num_rows = config.val_size
        self._examples = key_value_examples(config, config.val_size, generator(VALIDATION_SEED, "val"))

    def rows(self, rows: range) -> Batch:
        chosen = {key: value.clone() for key, value in _slice(self._examples, rows).items()}
        return {**chosen, "num_targets": self.count(rows)}

    def count(self, rows: range) -> Tensor:
        return torch.tensor(len(rows))
