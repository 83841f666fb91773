"""Synthetic tasks for attention: each row contains its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitx.config import IGNORED, InductionDataConfig, KeyValueDataConfig, MultiQueryDataConfig, RecallDataConfig
from minitx.data.addressing import VALIDATION_SEED, Batch, generator
from minitx.data.task import Task, name_of
from minitx.data.tokenizers import Tokenizer


def key_value_examples(config: KeyValueDataConfig, num_examples: int, random: np.random.Generator) -> Batch:
    """Draw examples of kv-lookup (task T1 of the scaling ablation), vectorised.

    With P pairs an example has L = P + 1 positions. Position i < P shows key k_i (distinct, uniform) with value v_i
    (independent, uniform); position P shows k_j for a uniform j and asks for v_j:

        input_ids       k_1 … k_P       k_j                    keys are 0 … num_keys − 1
        token_type_ids  v_1+1 … v_P+1   0                      0 means "no value"
        labels          −100 … −100     num_keys + v_j         values as outputs follow the keys

    Returns:
        ``input_ids``, ``token_type_ids``, ``labels``, each (num_examples, P + 1) int64.
    """
    shape = (num_examples, config.num_pairs + 1)
    input_ids, token_type_ids = np.empty(shape, np.int64), np.zeros(shape, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    input_ids[:, :-1] = _distinct(config.num_keys, (num_examples, config.num_pairs), random)
    values = random.integers(config.num_values, size=(num_examples, config.num_pairs))
    token_type_ids[:, :-1] = values + 1
    asked = random.integers(config.num_pairs, size=num_examples)
    rows = np.arange(num_examples)
    input_ids[:, -1] = input_ids[rows, asked]
    labels[:, -1] = config.num_keys + values[rows, asked]
    return _batch(input_ids=input_ids, token_type_ids=token_type_ids, labels=labels)


def multi_query_examples(config: MultiQueryDataConfig, num_examples: int, random: np.random.Generator) -> Batch:
    """Draw examples of multi-query recall (T2), vectorised: MQAR of Arora et al. 2023, "Zoology" (arXiv:2312.04927, §3).

    With P pairs and Q queries an example has L = 2P + Q positions: P distinct uniform keys, each followed by its value
    (independent, uniform), then Q of the keys again, distinct and in random order:

        input_ids   k_1   v_1   …  k_P   v_P   q_1 … q_Q          keys are 0 … num_keys − 1, values follow them
        labels      −100  −100  …  −100  −100  a_1 … a_Q          a_i is the value of q_i

    A value is one position after its key, so two layers are needed: the first tells each value which key is before it, the
    second looks up the key. Unlike in Zoology, values may repeat (a guess is always right with probability 1/num_values), and
    there are no filler tokens between the queries: a query is 2 to L − 1 positions after its key.

    Returns:
        ``input_ids`` and ``labels``, each (num_examples, 2P + Q) int64.
    """
    pairs = (num_examples, config.num_pairs)
    keys = _distinct(config.num_keys, pairs, random)
    values = config.num_keys + random.integers(config.num_values, size=pairs)
    asked = _distinct(config.num_pairs, (num_examples, config.num_queries), random)
    shown = np.stack([keys, values], axis=2).reshape(num_examples, -1)  # (B, P, 2) -> (B, 2P)
    input_ids = np.concatenate([shown, np.take_along_axis(keys, asked, axis=1)], axis=1)
    labels = np.full(input_ids.shape, IGNORED, np.int64)
    labels[:, shown.shape[1] :] = np.take_along_axis(values, asked, axis=1)
    return _batch(input_ids=input_ids, labels=labels)


def induction_examples(config: InductionDataConfig, num_examples: int, random: np.random.Generator) -> Batch:
    """Draw examples of induction (T3), vectorised: a random segment that appears twice (Olsson et al. 2022, arXiv:2209.11895).

    N = ``segment_len`` tokens appear twice and G = ``max_gap`` others once: g of them (uniform in 0 … G) between the copies,
    the rest before the first. All tokens except the copy are distinct, so that "the token after the previous occurrence" is
    unique. The last token is predicted but not shown, so an example has L = 2N + G − 1 positions:

        input_ids   x x  A B C D  y y y  A  B  C          N = 4, G = 5, g = 3
        labels      −100  …  −100        B  C  D

    The distance N + g to the first copy is random and independent of the query's position. With a constant distance, a head
    that looks back a fixed number of positions could solve the task. Here such a head is right in 1/(G + 1) of the rows.

    Returns:
        ``input_ids`` and ``labels``, each (num_examples, 2N + G − 1) int64.
    """
    n, others = config.segment_len, config.max_gap
    once = _distinct(config.num_tokens, (num_examples, n + others), random)  # the row without the copy
    first = others - random.integers(others + 1, size=(num_examples, 1))
    copy = np.take_along_axis(once, first + np.arange(n), axis=1)
    input_ids = np.concatenate([once, copy[:, :-1]], axis=1)
    labels = np.full(input_ids.shape, IGNORED, np.int64)
    labels[:, n + others :] = copy[:, 1:]
    return _batch(input_ids=input_ids, labels=labels)


def key_value_texts(input_ids: Sequence[int], token_type_ids: Sequence[int]) -> list[str]:
    """Return readable positions: ``key:value``, with values from 1 on as in ``token_type_ids``, or only the key if it has no value.

    >>> key_value_texts([12, 3, 12], [5, 1, 0])
    ['12:5', '3:1', '12']
    """
    return [f"{key}:{value}" if value else str(key) for key, value in zip(input_ids, token_type_ids, strict=True)]


EXAMPLES: dict[type, Callable[[Any, int, np.random.Generator], Batch]] = {
    KeyValueDataConfig: key_value_examples,
    MultiQueryDataConfig: multi_query_examples,
    InductionDataConfig: induction_examples,
}
"""The function that draws examples, for each config class."""


def previous_occurrences(input_ids: Tensor) -> Tensor:
    """Return for each position the latest earlier position with the same token, or −1. (B, L) int64 to (B, L) int64.

    Duplicate-token heads look there. In kv-lookup, where each position has a key and its value, the answer is there.

    >>> previous_occurrences(torch.tensor([[5, 7, 5, 5]])).tolist()
    [[-1, -1, 0, 2]]
    """
    place = torch.arange(input_ids.shape[1], device=input_ids.device)
    same = input_ids[:, :, None] == input_ids[:, None, :]  # (B, L, S)
    earlier = place[:, None] > place
    return torch.where(same & earlier, place, -1).amax(dim=2)


def induction_targets(input_ids: Tensor) -> Tensor:
    """Return for each position the position after the latest earlier occurrence of its token, or −1. (B, L) int64.

    Induction heads look there (Olsson et al. 2022, arXiv:2209.11895: "prefix matching").

    >>> induction_targets(torch.tensor([[5, 7, 9, 5, 7]])).tolist()
    [[-1, -1, -1, 1, 2]]
    """
    found = previous_occurrences(input_ids)
    return torch.where(found < 0, found, found + 1)


def answer_positions(batch: Batch) -> Tensor:
    """Return for each labelled position of a recall task the position of its answer, and −1 for other positions. (B, L) int64.

    A head with its weight there solves the task. In kv-lookup a value is at the position of its key, otherwise one position
    after it.
    """
    beside = "token_type_ids" in batch
    found = previous_occurrences(batch["input_ids"]) if beside else induction_targets(batch["input_ids"])
    return torch.where(batch["labels"] == IGNORED, -1, found)


def load_recall(config: RecallDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Return a recall task: new examples for each training step, and ``val_size`` fixed ones for validation, the same for every seed."""
    draw = partial(EXAMPLES[type(config)], config)
    val = draw(config.val_size, generator(VALIDATION_SEED, "val"))
    types = {"type_vocab_size": config.type_vocab_size} if config.type_vocab_size else {}
    return Task(
        name=name_of(config),
        kind="language_model",
        train=draw,
        val=[{key: tensor[row] for key, tensor in val.items()} for row in range(config.val_size)],
        key_masks={},
        model_fields={"vocab_size": config.vocab_size, **types},
        baselines=lambda: {"chance_accuracy": config.chance},
        recall=True,
    )


def _distinct(num_kinds: int, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """In each row different numbers of 0 … num_kinds − 1, uniform, in random order."""
    every = np.broadcast_to(np.arange(num_kinds), (shape[0], num_kinds))
    return random.permuted(every, axis=1)[:, : shape[1]]


def _batch(**arrays: np.ndarray) -> Batch:
    return {key: torch.from_numpy(array) for key, array in arrays.items()}
