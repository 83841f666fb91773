"""Labels of tokens, for axes and lists."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import torch

from minitx.data.task import Batch, Task
from minitx.data.tokenizer import Tokenizer


def token_texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """Return a label for each of ``ids`` as a part of one text, for axes and lists of tokens.

    A token that covers only some bytes of a character is labelled with the character and these bytes: ``你·1/3`` or
    ``你·2-3/3``. A byte that is not UTF-8 is labelled ``⟨E4⟩``, an unknown character ``<unk>``, and a mark with its name.

    Raises:
        ValueError: a negative id.

    >>> from minitx.data.tokenizer import train_tokenizer
    >>> bare = train_tokenizer("bpe", [], vocab_size=257)
    >>> token_texts(bare, bare.encode("né你"))
    ['n', 'é·1/2', 'é·2/2', '你·1/3', '你·2/3', '你·3/3']
    """
    pieces = tokenizer.token_bytes(ids)
    text = b"".join(pieces).decode("utf-8", "surrogateescape")  # a byte that is not UTF-8 becomes one lone surrogate
    sizes = ((character, len(character.encode("utf-8", "surrogateescape"))) for character in text)
    places = ((character, i, size) for character, size in sizes for i in range(size))  # one for every byte
    return [_label(list(itertools.islice(places, len(piece)))) for piece in pieces]


def token_namer(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """Return a function from ids to texts; without a tokenizer, to numbers."""
    return str if tokenizer is None else namer(partial(token_texts, tokenizer), tokenizer.vocab_size)


def namer(texts: Callable[[list[int]], Sequence[str]], vocab_size: int) -> Callable[[int], str]:
    """Return a function from an id to its text by ``texts``. Ids from ``vocab_size`` on become ``id N``."""
    return cache(lambda i: texts([i])[0] if i < vocab_size else f"id {i}")


def key_value_texts(input_ids: Sequence[int], token_type_ids: Sequence[int]) -> list[str]:
    """Return a readable text for each position: ``key:value``, with values from 1 as in ``token_type_ids``, or only the key.

    >>> key_value_texts([12, 3, 12], [5, 1, 0])
    ['12:5', '3:1', '12']
    """
    return [f"{key}:{value}" if value else str(key) for key, value in zip(input_ids, token_type_ids, strict=True)]


def position_texts(task: Task, inputs: Batch) -> dict[str, list[list[str]]]:
    """Return a text for each position of a batch: its token, or ``KEY:VALUE`` in a recall task. {} in other tasks."""
    ids = {axis: inputs[axis] for axis in ("input_ids", "decoder_input_ids") if axis in inputs}
    if task.tokenizer is not None:
        return {axis: [token_texts(task.tokenizer, row) for row in rows.tolist()] for axis, rows in ids.items()}
    if not task.recall:
        return {}
    types = inputs.get("token_type_ids", torch.zeros_like(ids["input_ids"]))
    rows = zip(ids["input_ids"].tolist(), types.tolist(), strict=True)
    return {"input_ids": [key_value_texts(*row) for row in rows]}


def _label(places: Sequence[tuple[str, int, int]]) -> str:
    """The label of a token, from the character, the index in it and the character's size for each of the token's bytes."""
    label = ""
    for at, (character, first, size) in enumerate(places):
        if at and first:
            continue  # included with the byte before
        last = min(first + len(places) - at, size)
        if "\udc80" <= character <= "\udcff":
            label += f"⟨{ord(character) - 0xDC00:02X}⟩"
        elif last - first == size:
            label += character
        else:
            label += f"{character}·{first + 1}/{size}" if last - first == 1 else f"{character}·{first + 1}-{last}/{size}"
    return label
