"""Language modelling on separate documents: packed into rows, or one per row. There is no attention between documents."""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import IGNORED, ChatDataConfig, ConfigError, HubDataConfig
from minitx.config.data_bases import TokenizedDataConfig
from minitx.data.tables import as_texts, column_names, column_of, divided, load_tables
from minitx.data.task import Ragged, Task, hold_out, name_of, tokenizer_of
from minitx.data.tokenizers import Tokenizer, find_tokenizer, fingerprint
from minitx.data.tokens import FORMAT, TEXTS_AT_ONCE, bits_per, cached, write_ids

log = logging.getLogger(__name__)


class DocumentRows:
    """Rows of whole documents. A document t_1 … t_n is kept as m t_1 … t_n m, with the mark m (or bos, eos) around it;

        input_ids     m t_1 … t_n        labels   t_1 … t_n m

    so that every token and every end is predicted once. A document that is longer than a row is cut into rows without attention
    between them. ``document_ids`` (packing only) number the documents of a row; −1 is padding.

    Args:
        documents: the documents with the marks around them.
        context_len: L, the longest row.
        packing: put as many documents into a row as fit. Otherwise, one document (or piece of it) per row.
        counted: bool, in the shape of ``documents.values``: the tokens to predict. ``None``: all.
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
    """Pack items into rows by the longest-first worst-fit rule: each item goes to the row with the most room.

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


def load_documents(config: HubDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Return the task of language modelling on the documents of ``config``.

    Raises:
        ConfigError: the data cannot be read, the column does not exist, or there are too few documents.
    """
    tables, column = document_tables(config)
    parts, made_by, record = _tokenised(config, folder, tokenizer, tables, column)
    train, val = (DocumentRows(part, context_len=config.context_len, packing=config.packing) for part in parts)
    return task_of(config, train, val, made_by, bits_per(int(val.lengths.sum()), record["splits"]["val"]))


def document_tables(config: HubDataConfig) -> tuple[list[Any], str]:
    """Return the table or tables of ``config``, and the column of documents."""
    texts = [] if config.text_column is None else [config.text_column]
    tables = load_tables(config, texts=texts, streaming=config.streaming)
    names = column_names(tables[0])
    return tables, column_of(tables[0], config.text_column or (names[0] if len(names) == 1 else "text"), "text_column")


def task_of(
    config: HubDataConfig | ChatDataConfig, train: Any, val: DocumentRows, tokenizer: Tokenizer, bits: dict[str, float]
) -> Task:
    """Return the task of language modelling on rows of documents. ``bits`` is ``Task.bits_per``."""
    return Task(
        name=name_of(config),
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
    # a table that datasets keeps in memory has no files, but a fingerprint
    files = [(len(table), [file["filename"] for file in table.cache_files] or table._fingerprint) for table in tables]
    key = json.dumps([FORMAT, files, config.split, config.val_split, column, word, config.val_fraction])  # files change names
    path = folder / f"hf-{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"

    def build() -> dict[str, Any]:
        train, val = divided(tables, lambda table: hold_out(range(len(table)), config.val_fraction))
        tokenizer = tokenizer_of(config, given, _documents(train, column), learned_marks(config))
        splits, lengths = {"train": _documents(train, column), "val": _documents(val, column)}, list[int]()

        def encode(texts: Sequence[str]) -> list[np.ndarray]:
            found = with_marks(tokenizer, texts)
            lengths.extend(map(len, found))
            return found

        return {**write_ids(path, tokenizer, splits, encode), "lengths": lengths}

    *parts, tokenizer, record = cached(path, str(config.path), build)
    lengths = np.array(record["lengths"], np.int64)
    if blank := sum(map(len, tables)) - len(lengths):
        log.info("left out %d of %d rows of data.path=%s: without text", blank, blank + len(lengths), config.path)
    first_of_val = int(np.searchsorted(np.cumsum(lengths), len(parts[0]), side="right"))
    both = zip(("train", "val"), parts, np.split(lengths, [first_of_val]), strict=True)
    documents = []
    for split, tokens, own in both:
        if not len(own):
            raise ConfigError(f"data.path={config.path} has no document for the {split} split: all of them are blank")
        documents.append(Ragged(tokens, np.cumsum(own) - own, own))
    return documents, tokenizer, record


def _documents(table: Any, column: str) -> Iterator[str]:
    """The documents of a table, read when they are needed."""
    for rows in table.iter(batch_size=TEXTS_AT_ONCE):
        yield from not_blank(rows[column], column)


def not_blank(values: Iterable[Any], column: str) -> Iterator[str]:
    """Yield the texts that are not only white space."""
    return (text for text in as_texts(values, f"data.text_column={column}") if text.strip())


def learned_marks(config: TokenizedDataConfig) -> tuple[str, ...]:
    """Return the marks for training a tokenizer for documents. Byte-level BPE has its own end mark."""
    return ("eos",) if config.tokenizer == "char" else ()


def document_marks(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the marks before and after a document: bos and eos. If the tokenizer has only one of them, it is used for both.

    Raises:
        ConfigError: the tokenizer has neither.
    """
    marks = [tokenizer.mark_ids[mark] for mark in ("bos", "eos") if mark in tokenizer.mark_ids]
    if not marks:
        raise ConfigError("data.tokenizer has no bos or eos token, which ends a document")
    return marks[0], marks[-1]


def with_marks(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Yield the ids of documents with the marks around them."""
    before, behind = document_marks(tokenizer)
    return [np.concatenate([[before], ids, [behind]]) for ids in tokenizer.encode_batch(texts)]
