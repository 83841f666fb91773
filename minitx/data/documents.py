"""Language modelling on documents that never see each other: packed into rows, or one a row."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterable, Iterator
from itertools import islice, tee
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitx.config import IGNORED, ChatDataConfig, ConfigError, HubDataConfig
from minitx.config.data_bases import TokenizedDataConfig
from minitx.data.addressing import Batch
from minitx.data.tables import column_of, held_out, load_tables
from minitx.data.task import Ragged, Task, tokenizer_of
from minitx.data.tokenizers import Tokenizer, find_tokenizer, fingerprint
from minitx.data.tokens import FORMAT, TokenArray, bits_per, cached, write_ids

DOCUMENTS_AT_ONCE = 1000


class DocumentRows:
    """Rows of whole documents. A document t_1 … t_n is kept as m t_1 … t_n m, with the mark m (or bos, eos) around it;

        input_ids     m t_1 … t_n        labels   t_1 … t_n m

    so that every token and every end is asked for once. A document that is longer than a row is cut into rows, each of which
    sees only itself. ``document_ids`` (packing only) number the documents of a row; −1 is padding.

    Args:
        documents: with the marks around them.
        context_len: L, the longest row.
        packing: several documents share a row, as many as fit; else one document (or piece of it) a row.
        counted: bool, of the shape of ``documents.values``: the tokens that are asked for; ``None``: all.
    """

    def __init__(self, documents: Ragged, *, context_len: int, packing: bool, counted: np.ndarray | None = None) -> None:
        inputs = documents.lengths - 1
        pieces = -(-inputs // context_len)
        nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # 0, 1, ... in every document
        starts = np.repeat(documents.starts, pieces) + nth * context_len
        lengths = np.minimum(context_len, np.repeat(inputs, pieces) - nth * context_len)
        self.pieces = Ragged(documents.values, starts, lengths + 1)  # one more: the target of the last position
        self.counted = None if counted is None else Ragged(counted, starts + 1, lengths)
        self.packing = packing
        members = pack(lengths, context_len) if packing else [[piece] for piece in range(len(lengths))]
        self.rows = Ragged.of([np.array(row) for row in members])
        self.lengths = np.array([lengths[row].sum() for row in members])

    def __len__(self) -> int:
        return len(self.rows)

    def num_targets(self, row: int) -> int:
        """See ``Task``."""
        return self.lengths[row] if self.counted is None else sum(self.counted[piece].sum() for piece in self.rows[row])

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        pieces = self.rows[row]
        ids = [self.pieces[piece] for piece in pieces]
        found = {"input_ids": np.concatenate([own[:-1] for own in ids]), "labels": np.concatenate([own[1:] for own in ids])}
        if self.counted is not None:
            found["labels"][np.concatenate([self.counted[piece] for piece in pieces]) == 0] = IGNORED
        if self.packing:
            found["document_ids"] = np.repeat(np.arange(len(ids)), [len(own) - 1 for own in ids])
        return found


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Put items into as few rows as the longest-first worst-fit rule finds: each goes to the row with the most room.

    >>> pack(np.array([3, 6, 2, 5]), capacity=8)
    [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (-room, row), the largest room first
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        if not room or -room[0][0] < length:
            rows.append([])
            heapq.heappush(room, (-capacity, len(rows) - 1))
        left, row = room[0]
        rows[row].append(item)
        heapq.heapreplace(room, (left + length, row))
    return rows


def pack_batch(batch: Batch, length: int | None = None) -> Batch:
    """The rows of a padded batch, several in one: the same tokens, targets and loss with less padding.

    Padding costs as much as text. Real tokens keep their order; ``document_ids`` number the rows of the old batch within a row
    of the new one (-1 is padding), by which a model hides them from each other and counts positions from 0 in each. For
    tasks that ask at tokens (masked tokens, tags, language models), not once a row. Krell et al. 2021, "Efficient sequence
    packing without cross-contamination", arXiv:2107.02027.

    Args:
        batch: ``input_ids``, ``labels`` and whatever else has shape (B, L), with ``key_mask`` (B, L), True = real; rows may be
            padded on either side. What has no shape, such as ``num_targets``, is kept.
        length: the longest row of the new batch; ``None``: L.

    Returns:
        Tensors (R, M) with R <= B and M <= ``length``, ``key_mask`` and ``document_ids`` among them.

    Raises:
        ValueError: no ``key_mask``, a tensor of another shape, rows that are packed already, or one longer than ``length``.

    >>> real = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
    >>> ids = torch.tensor([[5, 6, 0], [1, 2, 3], [9, 0, 0]])
    >>> packed = pack_batch({"input_ids": ids, "key_mask": real, "labels": ids})
    >>> packed["input_ids"].tolist(), packed["document_ids"].tolist()
    ([[1, 2, 3], [5, 6, 9]], [[0, 0, 0], [0, 0, 1]])
    """
    if "key_mask" not in batch or "document_ids" in batch:
        raise ValueError(f"batch must have a key_mask and no document_ids, got {', '.join(batch)}")
    real = batch["key_mask"]
    tensors = {name: tensor for name, tensor in batch.items() if tensor.dim() and name != "key_mask"}
    for name, tensor in tensors.items():
        if tensor.shape != real.shape:
            raise ValueError(f"{name} must have the shape of key_mask, {tuple(real.shape)}, got {tuple(tensor.shape)}")
    lengths, longest = real.sum(1).numpy(), real.shape[1] if length is None else length
    if lengths.max() > longest:
        raise ValueError(f"length={longest} must reach the longest row, which has {lengths.max()} tokens")
    members = pack(lengths, longest)
    order = torch.tensor([row for row_members in members for row in row_members])
    used = np.array([lengths[row_members].sum() for row_members in members])
    place = torch.from_numpy(np.arange(used.max()) < used[:, None])  # (R, M), filled from the left, row by row
    nth = np.concatenate([np.arange(len(row_members)) for row_members in members])

    def laid_out(tokens: Tensor, fill: int) -> Tensor:
        return torch.full(place.shape, fill, dtype=tokens.dtype).masked_scatter_(place, tokens)

    kept = {name: tensor for name, tensor in batch.items() if not tensor.dim()}
    fills = {"labels": IGNORED}
    moved = {name: laid_out(tensor[order][real[order]], fills.get(name, 0)) for name, tensor in tensors.items()}
    numbers = torch.from_numpy(np.repeat(nth, lengths[order.numpy()]))
    return {**moved, "key_mask": place, "document_ids": laid_out(numbers, -1), **kept}


def load_documents(config: HubDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Language modelling on the documents that ``config`` names.

    Raises:
        ConfigError: the data cannot be read, have no such column, or too few documents.
    """
    from minitx.data.document_stream import load_stream  # which imports this module

    texts = [] if config.text_column is None else [config.text_column]
    tables = load_tables(config, texts=texts, streaming=config.streaming)
    columns = tables[0].column_names or list(next(iter(tables[0]), {}))  # a stream may not know its columns
    if config.text_column is None and "text" not in columns and len(columns) != 1:
        raise ConfigError(f"data.text_column=null must name a column of the data, which has: {', '.join(columns)}")
    column = column_of(tables[0], config.text_column or ("text" if "text" in columns else columns[0]), "text_column")
    if config.streaming:
        return load_stream(config, tables, column, tokenizer)
    parts, made_by, record = _tokenised(config, folder, tokenizer, tables, column)
    train, val = (DocumentRows(part, context_len=config.context_len, packing=config.packing) for part in parts)
    return task_of(config, train, val, made_by, bits_per(int(val.lengths.sum()), record["splits"]["val"]))


def task_of(
    config: HubDataConfig | ChatDataConfig, train: Any, val: DocumentRows, tokenizer: Tokenizer, bits: dict[str, float]
) -> Task:
    """Language modelling on rows of documents; ``bits`` is ``Task.bits_per``."""
    return Task(
        name=f"data.path={config.path}",
        kind="language_model",
        train=train,
        val=val,
        pad={"document_ids": -1},
        bucket=config.bucket and isinstance(train, DocumentRows),
        tokenizer=tokenizer,
        model_fields={"vocab_size": tokenizer.vocab_size},
        bits_per=bits,
    )


def _tokenised(
    config: HubDataConfig, folder: Path, given: Tokenizer | None, tables: list[Any], column: str
) -> tuple[list[Ragged], Tokenizer, dict]:
    """The documents of both splits with marks around them, the tokenizer and the record, from the cache or made anew."""
    given = given or find_tokenizer(config.tokenizer)
    word = fingerprint(given) if given else [config.tokenizer, config.bpe_vocab_size]
    files = [(len(table), [file["filename"] for file in table.cache_files]) for table in tables]
    key = json.dumps([FORMAT, files, config.split, config.val_split, column, word, config.val_fraction])  # files change names
    path = folder / f"hf-{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"
    record, tokenizer = cached(path, str(config.path), lambda: _build(path, config, tables, column, given))
    lengths = np.array(record["lengths"], np.int64)
    values = TokenArray(path, record["dtype"], 0, int(lengths.sum()))
    starts, cut = np.cumsum(lengths) - lengths, record["splits"]["train"]["documents"]
    both = [Ragged(values, starts[part], lengths[part]) for part in (slice(0, cut), slice(cut, None))]
    return both, tokenizer, record


def _build(path: Path, config: HubDataConfig, tables: list[Any], column: str, given: Tokenizer | None) -> dict[str, Any]:
    """Write the documents of both splits to ``path``; returns the record of it."""
    if len(tables) == 1:
        train, val = held_out(config, range(len(tables[0])))
    else:
        train, val = (np.arange(len(table)) for table in tables)
    rows = {"train": (tables[0], train), "val": (tables[-1], val)}
    tokenizer = tokenizer_of(config, given, _documents(*rows["train"], column), learned_marks(config))
    lengths: dict[str, list[int]] = {"train": [], "val": []}

    def marked() -> Iterator[tuple[str, str, np.ndarray]]:
        for split, part in rows.items():
            texts, again = tee(_documents(*part, column))
            for text, ids in zip(texts, with_marks(tokenizer, again, f"data={config.name}"), strict=True):
                lengths[split].append(len(ids))
                yield split, text, ids

    record = write_ids(path, tokenizer, marked())
    for split, counted in record["splits"].items():
        counted["documents"] = len(lengths[split])
        if not lengths[split]:
            raise ConfigError(f"data.path={config.path} has no document for the {split} split: all of them are blank")
    return {**record, "lengths": lengths["train"] + lengths["val"]}


def _documents(table: Any, rows: np.ndarray, column: str) -> Iterator[str]:
    """The documents of these rows, read when they are needed."""
    for start in range(0, len(rows), DOCUMENTS_AT_ONCE):
        yield from not_blank(table[rows[start : start + DOCUMENTS_AT_ONCE]][column], column)


def not_blank(texts: Iterable[Any], column: str) -> Iterator[str]:
    """The texts that have more than white space.

    Raises:
        ConfigError: something is no text.
    """
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise ConfigError(f"data.text_column={column} must have texts, got {type(text).__name__}")
        if text and not text.isspace():
            yield text


def learned_marks(config: TokenizedDataConfig) -> tuple[str, ...]:
    """The marks that a tokenizer for documents learns; byte-level BPE has its own end mark."""
    return ("eos",) if config.tokenizer == "char" else ()


def with_marks(tokenizer: Tokenizer, texts: Iterable[str], name: str) -> Iterator[np.ndarray]:
    """The ids of documents, with bos in front and eos behind, or twice the one of them that there is.

    Raises:
        ConfigError: the tokenizer has neither.
    """
    marks = [tokenizer.mark_ids[mark] for mark in ("bos", "eos") if mark in tokenizer.mark_ids]
    if not marks:
        raise ConfigError(f"{name} needs a tokenizer with a bos or eos token, which ends a document")
    texts = iter(texts)
    while batch := list(islice(texts, DOCUMENTS_AT_ONCE)):
        yield from (np.concatenate([marks[:1], ids, marks[-1:]]) for ids in tokenizer.encode_batch(batch))
