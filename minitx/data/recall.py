"""Synthetic recall tasks: each row contains its answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from minitx.config import IGNORED, ConfigError
from minitx.config.schema import Count, Natural, require
from minitx.data.seeding import VALIDATION_SEED, generator
from minitx.data.task import Batch, Task


def kv_lookup(*, num_keys: Count = 64, num_values: Count = 16, num_pairs: Count = 16, val_size: Count = 1024) -> Task:
    """T1: each position shows a key with its value; the last position shows a key, and its label is the key's value.

    With P pairs a row has L = P + 1 positions. Position i < P shows key k_i (distinct, uniform) with value v_i (independent,
    uniform); position P shows k_j for a uniform j and has the label v_j:

        input_ids       k_1 … k_P       k_j                    keys are 0 … num_keys − 1
        token_type_ids  v_1+1 … v_P+1   0                      0 means "no value"
        labels          −100 … −100     num_keys + v_j         values as outputs follow the keys

    Args:
        num_keys: different keys.
        num_values: different values; chance is 1 / num_values.
        num_pairs: key-value pairs in a row.
        val_size: validation rows, the same for every seed.
    """
    _check_pairs(num_pairs, num_keys)
    draw = partial(_kv_lookup, num_keys, num_values, num_pairs)
    size = num_keys + num_values
    return _recall_task("kv_lookup", draw, val_size, 1 / num_values, vocab_size=size, type_vocab_size=num_values + 1)


def multi_query_recall(
    *, num_keys: Count = 64, num_values: Count = 16, num_pairs: Count = 16, num_queries: Count = 16, val_size: Count = 1024
) -> Task:
    """T2 (MQAR): keys and values are separate tokens, and some of the keys are queried.

    Arora et al. 2023, "Zoology", arXiv:2312.04927, §3.

    With P pairs and Q queries a row has L = 2P + Q positions: P distinct uniform keys, each followed by its value
    (independent, uniform), then Q of the keys again, distinct and in random order:

        input_ids   k_1   v_1   …  k_P   v_P   q_1 … q_Q          keys are 0 … num_keys − 1, values follow them
        labels      −100  −100  …  −100  −100  a_1 … a_Q          a_i is the value of q_i

    A value is one position after its key, so two layers are needed: the first copies the key to the position of its value, and the
    second looks up the key. Unlike in Zoology, values may repeat (a guess is always right with probability 1/num_values), and
    there are no filler tokens between queries: a query is 2 to L − 1 positions after its key.

    Args:
        num_keys: different keys.
        num_values: different values; chance is 1 / num_values.
        num_pairs: key-value pairs in a row.
        num_queries: queried keys, each once, in random order.
        val_size: validation rows, the same for every seed.
    """
    _check_pairs(num_pairs, num_keys)
    if num_queries > num_pairs:
        raise ConfigError(f"data.num_queries={num_queries} must not exceed data.num_pairs={num_pairs}: a key is queried once")
    draw = partial(_multi_query_recall, num_keys, num_values, num_pairs, num_queries)
    return _recall_task("multi_query_recall", draw, val_size, 1 / num_values, vocab_size=num_keys + num_values)


def induction(*, num_tokens: Count = 64, segment_len: Count = 12, max_gap: Natural = 16, val_size: Count = 1024) -> Task:
    """T3: a random segment appears twice, and the second copy must be predicted (Olsson et al. 2022, arXiv:2209.11895).

    N = ``segment_len`` tokens appear twice and G = ``max_gap`` others once: g of them (uniform in 0 … G) between the copies,
    the rest before the first. All tokens except the copy are distinct, so that "the token after the previous occurrence" is
    unique. The last token is predicted but not shown, so a row has L = 2N + G − 1 positions:

        input_ids   x x  A B C D  y y y  A  B  C          N = 4, G = 5, g = 3
        labels      −100  …  −100        B  C  D

    The distance N + g to the first copy is random and independent of the query's position. With a constant distance, a head
    that looks back a fixed number of positions could solve the task. Here such a head is right in 1/(G + 1) of the rows.

    Args:
        num_tokens: different tokens; chance is 1 / num_tokens.
        segment_len: tokens in the segment.
        max_gap: tokens that appear once: 0 to max_gap of them (uniform) between the copies, the others before.
        val_size: validation rows, the same for every seed.
    """
    drawn = segment_len + max_gap
    require(segment_len > 1, f"data.segment_len={segment_len} must be at least 2: its first token is not predicted")
    require(drawn <= num_tokens, f"data.num_tokens={num_tokens} must be at least segment_len + max_gap = {drawn}")
    draw = partial(_induction, num_tokens, segment_len, max_gap)
    return _recall_task("induction", draw, val_size, 1 / num_tokens, vocab_size=num_tokens)


def _kv_lookup(num_keys: int, num_values: int, num_pairs: int, count: int, random: np.random.Generator) -> Batch:
    keys = _distinct_numbers(num_keys, (count, num_pairs), random)
    values = random.integers(num_values, size=(count, num_pairs))
    asked = random.integers(num_pairs, size=(count, 1))
    input_ids = np.concatenate([keys, np.take_along_axis(keys, asked, axis=1)], axis=1)
    answers = num_keys + np.take_along_axis(values, asked, axis=1)
    return _batch(input_ids, answers, token_type_ids=np.pad(values + 1, ((0, 0), (0, 1))))


def _multi_query_recall(
    num_keys: int, num_values: int, num_pairs: int, num_queries: int, count: int, random: np.random.Generator
) -> Batch:
    keys = _distinct_numbers(num_keys, (count, num_pairs), random)
    values = num_keys + random.integers(num_values, size=(count, num_pairs))
    asked = _distinct_numbers(num_pairs, (count, num_queries), random)
    shown = np.stack([keys, values], axis=2).reshape(count, -1)  # (B, P, 2) -> (B, 2P)
    input_ids = np.concatenate([shown, np.take_along_axis(keys, asked, axis=1)], axis=1)
    return _batch(input_ids, np.take_along_axis(values, asked, axis=1))


def _induction(num_tokens: int, segment_len: int, max_gap: int, count: int, random: np.random.Generator) -> Batch:
    once = _distinct_numbers(num_tokens, (count, segment_len + max_gap), random)  # the row without the copy
    first = max_gap - random.integers(max_gap + 1, size=(count, 1))
    copy = np.take_along_axis(once, first + np.arange(segment_len), axis=1)
    return _batch(np.concatenate([once, copy[:, :-1]], axis=1), copy[:, 1:])


def _check_pairs(num_pairs: int, num_keys: int) -> None:
    if not 0 < num_pairs <= num_keys:
        raise ConfigError(f"data.num_pairs={num_pairs} must lie in [1, data.num_keys={num_keys}]: keys of a row are distinct")


def _recall_task(name: str, draw: Callable[..., Batch], val_size: int, chance: float, **fields: int) -> Task:
    """A task with new rows in each training step, and fixed rows for validation."""
    val = draw(val_size, generator(VALIDATION_SEED, "val"))
    return Task(
        name=f"data={name}",
        kind="language_model",
        train=draw,
        val=[{key: tensor[row] for key, tensor in val.items()} for row in range(val_size)],
        longest=val["input_ids"].shape[1],
        key_masks={},
        model_fields=fields,
        baselines=lambda: {"chance_accuracy": chance},
        recall=True,
    )


def _distinct_numbers(num_kinds: int, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Distinct numbers of 0 … num_kinds − 1 in each row, uniform and in random order."""
    kinds = np.broadcast_to(np.arange(num_kinds), (shape[0], num_kinds))
    return random.permuted(kinds, axis=1)[:, : shape[1]]


def _batch(input_ids: np.ndarray, answers: np.ndarray, **inputs: np.ndarray) -> Batch:
    """A batch whose last positions have ``answers`` as labels."""
    before = input_ids.shape[1] - answers.shape[1]
    labels = np.pad(answers, ((0, 0), (before, 0)), constant_values=IGNORED)
    return {key: torch.from_numpy(array) for key, array in {"input_ids": input_ids, **inputs, "labels": labels}.items()}


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
    previous = previous_occurrences(input_ids)
    return torch.where(previous < 0, previous, previous + 1)


def answer_positions(batch: Batch) -> Tensor:
    """Return for each labelled position of a recall task the position of its answer, and −1 for other positions. (B, L) int64.

    A head with its weight there solves the task. In kv-lookup a value is at the position of its key, otherwise one position
    after it.
    """
    has_pairs = "token_type_ids" in batch  # a position contains a key and its value
    positions = previous_occurrences(batch["input_ids"]) if has_pairs else induction_targets(batch["input_ids"])
    return torch.where(batch["labels"] == IGNORED, -1, positions)
