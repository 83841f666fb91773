"""Language modelling on separate documents: packed into rows, or one per row, without attention between documents.

The documents are prepared before training, or read by ``datasets`` during training (``streaming``).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minitx.config import IGNORED, ConfigError
from minitx.config.schema import Count, Fraction, require
from minitx.data.batches import Source
from minitx.data.seeding import generator
from minitx.data.tables import as_texts, column_names, column_of, divided, hold_out, load_tables, num_held_out, share_of
from minitx.data.task import Batch, Task, VocabSize
from minitx.data.token_cache import CACHE_FORMAT, TEXTS_AT_ONCE, bits_per, cached, write_ids
from minitx.data.tokenizer import Tokenizer, fingerprint
from minitx.data.tokenizer_choice import find_or_train_tokenizer, find_tokenizer

log = logging.getLogger(__name__)
BLANK = "documents are left out: without text"
DOCUMENTS_AT_ONCE = 64
DOCUMENTS_TO_LEARN_FROM = 10_000
START = "[0, null, 0]"
"""The beginning of a stream. A position is JSON of three values: the epoch; the state of the table before the documents that are being
read, or null at the beginning of the epoch; and the number of tokens of these documents that rows have already used."""


class Ragged:
    """Rows of ids of different lengths in one array: row i is ``values[starts[i] : starts[i] + lengths[i]]``."""

    def __init__(self, values: Any, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.values, self.starts, self.lengths = values, starts, lengths

    @classmethod
    def of(cls, rows: Iterable[np.ndarray]) -> Ragged:
        """Copy ``rows`` into one array."""
        rows = list(rows)
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        return cls(np.concatenate([np.zeros(0, np.uint32), *rows]).astype(np.uint32), np.cumsum(lengths) - lengths, lengths)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> np.ndarray:
        values = self.values if isinstance(self.values, np.ndarray) else self.values.array
        return values[self.starts[row] : self.starts[row] + self.lengths[row]].astype(np.int64)


class DocumentRows:
    """Rows of whole documents. A document t_1 … t_n is stored as m t_1 … t_n m, with the mark m (or bos, eos) around it:

        input_ids     m t_1 … t_n        labels   t_1 … t_n m

    Every token and every end is therefore predicted once. A document that is longer than a row is cut into rows without attention
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
        self.pieces = Ragged(documents.values, starts, lengths + 1)  # plus the target of the last position
        self.counted = None if counted is None else Ragged(counted, starts + 1, lengths)
        self.packing, self.context_len = packing, context_len
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
        input_ids, labels, document_ids = shifted([self.pieces[piece] for piece in pieces])
        if self.counted is not None:
            labels[np.concatenate([self.counted[piece] for piece in pieces]) == 0] = IGNORED
        return {"input_ids": input_ids, "labels": labels} | ({"document_ids": document_ids} if self.packing else {})


def shifted(documents: Sequence[np.ndarray], first: int = 0) -> np.ndarray:
    """Return ids, labels and document numbers of several documents, one after another: (3, n) int64.

    The label of an id is the next id of its document. Documents are numbered from ``first``.

    >>> shifted([np.array([1, 5, 6, 1]), np.array([1, 7, 1])]).tolist()
    [[1, 5, 6, 1, 7], [5, 6, 1, 7, 1], [0, 0, 0, 1, 1]]
    """
    numbers = np.repeat(np.arange(first, first + len(documents)), [len(ids) - 1 for ids in documents])
    return np.stack([np.concatenate([ids[:-1] for ids in documents]), np.concatenate([ids[1:] for ids in documents]), numbers])


def pack(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack items into rows by the longest-first worst-fit rule: each item goes to the row with the most room.

    A heap finds this row, and best fit needs as many rows: 25,219 for 50,000 documents of 1 to 256 tokens in rows of 256 (full rows: 25,153).

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


def hf(
    *,
    path: str,
    val_path: str | None = None,
    subset: str | None = None,
    split: str = "train",
    val_split: str | None = None,
    val_fraction: Fraction = 0.1,
    text_column: str | None = None,
    tokenizer: str | Tokenizer = "bpe",
    bpe_vocab_size: VocabSize = 4096,
    context_len: Count = 256,
    packing: bool = True,
    bucket: bool = True,
    streaming: bool = False,
    val_rows: Count = 1000,
    cache_dir: str | None = None,
) -> Task:
    """Language modelling on documents: a row of a table is a document. A row of a batch can contain several documents.

    With ``streaming``, checkpoints store the position in the stream, so a run must resume with the same number of processes and
    workers.

    Args:
        path, val_path, subset, split, val_split: see ``load_tables``.
        val_fraction: share of the documents for validation.
        text_column: the column of documents; ``null``: ``text``, or the only column.
        tokenizer, bpe_vocab_size: see ``find_or_train_tokenizer``.
        context_len: longest row in tokens. A longer document continues in another.
        packing: several documents in a row, without attention between them; ``false``: one.
        bucket: put rows of similar length into the same batch.
        streaming: read documents during training, not before it. Every row is full; without packing, its documents see each
            other.
        val_rows: with streaming: validation documents, from ``val_path`` or ``val_split``, else the first of ``split``.
        cache_dir: the folder for caches; ``null``: ``data/`` in a checkout, else the user's cache folder.

    Raises:
        ConfigError: the data cannot be read, the column does not exist, there are too few documents, or the tokenizer has no
            end mark.
    """
    texts = ["text", 0] if text_column is None else [text_column]
    tables = load_tables(path, val_path, subset, split, val_split, texts=texts, streaming=streaming)
    names = column_names(tables[0])
    name = f"data.path={path}"
    column = column_of(tables[0], text_column or (names[0] if len(names) == 1 else "text"), "text_column")
    rows: dict[str, Any] = {"context_len": context_len, "packing": packing}
    shared: dict[str, Any] = {"tokenizer": tokenizer, "bpe_vocab_size": bpe_vocab_size}
    train: Any
    if streaming:
        documents = _stream(tables, column, name, val_rows=val_rows, **shared, **rows)
        train = documents.train
    else:
        shared |= {"val_fraction": val_fraction, "cache_dir": cache_dir, "splits": (split, val_split)}
        documents = _tokenised(tables, column, name, **shared)
        train = DocumentRows(documents.train, **rows)
    val = DocumentRows(documents.val, **rows)
    first_id, *_, end = with_marks(documents.tokenizer, [""])[0].tolist()
    bits = bits_per(int(val.lengths.sum()), documents.counted)
    is_bucketed = bucket and not streaming
    task = task_of(name, train, val, documents.tokenizer, [end], is_bucketed, bits, left_out=documents.left_out)
    return replace(task, first_id=first_id, checksum=documents.checksum)


def task_of(
    name: str,
    train: Any,
    val: DocumentRows,
    tokenizer: Tokenizer,
    ends: Sequence[int],
    bucket: bool,
    bits: dict[str, float] | None = None,
    *,
    left_out: Mapping[str, Sequence[str]],
) -> Task:
    """Return a language-modelling task on rows of documents that end with an id in ``ends``. ``bits`` is ``Task.bits_per``."""
    eos_id = {"eos_id": ends[0] if len(ends) == 1 else tuple(ends)} if ends else {}
    return Task(
        name=name,
        kind="language_model",
        train=train,
        val=val,
        longest=val.context_len,
        bucket=bucket,
        tokenizer=tokenizer,
        model_fields={"vocab_size": tokenizer.vocab_size, **eos_id},
        bits_per=bits or {},
        left_out=left_out,
    )


class TokenisedDocuments(NamedTuple):
    """The documents of both splits, with marks around them.

    Attributes:
        train: the documents of training, or the stream of them.
        val: the documents of validation.
        tokenizer: the tokenizer of both.
        counted: the numbers of ``characters`` and ``bytes`` of validation.
        left_out: sentences about dropped documents, by split.
        checksum: ``Task.checksum``.
    """

    train: Any
    val: Ragged
    tokenizer: Tokenizer
    counted: dict[str, int]
    left_out: dict[str, list[str]]
    checksum: str | None = None


def _tokenised(
    tables: list[Any],
    column: str,
    name: str,
    *,
    tokenizer: str | Tokenizer,
    bpe_vocab_size: int,
    val_fraction: float,
    cache_dir: str | None,
    splits: tuple[str | None, ...],
) -> TokenisedDocuments:
    """Return the documents of both splits, from the cache if it has them."""
    existing = find_tokenizer(tokenizer)
    word = [fingerprint(existing), existing.mark_ids] if existing else [tokenizer, bpe_vocab_size]
    # datasets renames a file if its content changes; a table in memory has no files, but a fingerprint
    files = [(len(table), [file["filename"] for file in table.cache_files] or table._fingerprint) for table in tables]
    key = json.dumps([CACHE_FORMAT, files, *splits, column, word, val_fraction])
    cache = f"hf-{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"

    def build(path: Path) -> dict[str, Any]:
        train, val = divided(tables, lambda table: hold_out(range(len(table)), val_fraction))
        texts = {"train": _documents(train, column), "val": _documents(val, column)}
        marks = learned_marks(tokenizer)
        learned = find_or_train_tokenizer(existing or tokenizer, bpe_vocab_size, _documents(train, column), marks)
        lengths = list[int]()

        def encode(texts: Sequence[str]) -> list[np.ndarray]:
            documents = with_marks(learned, texts)
            lengths.extend(map(len, documents))
            return documents

        return {**write_ids(path, learned, texts, encode), "lengths": lengths}

    *ids, stored, record = cached(cache_dir, cache, name.removeprefix("data.path="), build)
    lengths = np.array(record["lengths"], np.int64)
    first_of_val = int(np.searchsorted(np.cumsum(lengths), len(ids[0]), side="right"))
    lengths_of = dict(zip(("train", "val"), np.split(lengths, [first_of_val]), strict=True))
    for split, of_split in lengths_of.items():
        require(len(of_split) > 0, f"{name} has no document for the {split} split: all its documents are blank")
    train, val = (Ragged(tokens, np.cumsum(n) - n, n) for tokens, n in zip(ids, lengths_of.values(), strict=True))
    counts = zip(lengths_of.items(), _counts(tables, val_fraction), strict=True)
    left_out = {split: share_of(count - len(of_split), count, BLANK) for (split, of_split), count in counts}
    return TokenisedDocuments(train, val, stored, record["splits"]["val"], left_out, record["tokens_sha256"])


def _counts(tables: list[Any], val_fraction: float) -> list[int]:
    """The numbers of documents of training and of validation, blank ones included."""
    if len(tables) > 1:
        return [*map(len, tables)]
    held_out = num_held_out(len(tables[0]), val_fraction)
    return [len(tables[0]) - held_out, held_out]


def _documents(table: Any, column: str) -> Iterator[str]:
    """The documents of a table, read when they are needed."""
    for rows in table.iter(batch_size=TEXTS_AT_ONCE):
        yield from not_blank(rows[column], column)


def not_blank(values: Iterable[Any], column: str) -> Iterator[str]:
    """Yield the texts that are not only white space."""
    return (text for text in as_texts(values, f"data.text_column={column}") if text.strip())


def learned_marks(tokenizer: str | Tokenizer) -> tuple[str, ...]:
    """Return the marks for training a tokenizer for documents. Byte-level BPE has its own end mark."""
    return ("eos",) if tokenizer == "char" else ()


def with_marks(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Return the ids of documents with marks around them: bos and eos. A tokenizer with a single mark uses it for both.

    Raises:
        ConfigError: the tokenizer has neither bos nor eos.
    """
    marks = [[tokenizer.mark_ids[mark]] for mark in ("bos", "eos") if mark in tokenizer.mark_ids]
    require(bool(marks), "data.tokenizer has no bos or eos token to end a document with")
    return [np.concatenate([marks[0], ids, marks[-1]]) for ids in tokenizer.encode_batch(texts)]


# --- a stream, read during training


@dataclass(frozen=True, kw_only=True)
class DocumentStream:
    """The training documents of a streamed table.

    Attributes:
        table: a ``datasets.IterableDataset``.
        column: the column of documents.
        tokenizer: the tokenizer.
        context_len: L, tokens in a row.
        packing: whether documents of a row are separated, so that they do not see each other.
        name: the name of the data in messages.
    """

    table: Any
    column: str
    tokenizer: Tokenizer
    context_len: int
    packing: bool
    name: str

    def source(self, **options: Any) -> StreamSource:
        """Return the training batches. For ``options``, see ``StreamSource``."""
        return StreamSource(self, **options)

    def rows(self, position: str, seed: int, part: int, parts: int) -> Iterator[tuple[np.ndarray, str]]:
        """Yield the full rows of part ``part`` of ``parts`` parts of the documents, each with the position after the row.

        A row is (3, L) int64: input ids, labels, and the number of the document in the row.
        """
        epoch, state, used = json.loads(position)
        row, filled = np.empty((3, self.context_len), np.int64), 0
        for *place, tokens in self._tokens(epoch, state, seed, part, parts):
            while used < tokens.shape[1]:
                taken = tokens[:, used : used + self.context_len - filled]
                row[:, filled : filled + taken.shape[1]] = taken
                filled, used = filled + taken.shape[1], used + taken.shape[1]
                if filled == self.context_len:
                    row[2] -= row[2, 0]
                    yield row, json.dumps([*place, used])
                    row, filled = np.empty_like(row), 0
            used = 0

    def _tokens(self, epoch: int, state: Any, seed: int, part: int, parts: int) -> Iterator[tuple[int, Any, np.ndarray]]:
        """Yield the epoch, the state of the table before some documents, and their ids, labels and numbers (3, n)."""
        from datasets.distributed import split_dataset_by_node

        count = blank = 0
        while True:
            by = "shards" if self.table.num_shards >= parts else "examples"
            table, has_documents = split_dataset_by_node(self.table, part, parts, strategy=by), state is not None
            # ``datasets`` seeds the order of shards with the number of the epoch, and does not shuffle with 0
            table.set_epoch(state["epoch"] if state else 1 + int(generator(seed, "epoch", epoch).integers(1 << 31)))
            if state:
                table.load_state_dict(state)
            for rows in table.iter(batch_size=DOCUMENTS_AT_ONCE):
                texts = list(not_blank(rows[self.column], self.column))
                if not blank and len(texts) < len(rows[self.column]):
                    log.info("%s: rows without text are left out", self.name)
                blank += len(rows[self.column]) - len(texts)
                ids = with_marks(self.tokenizer, texts)
                if ids:
                    yield epoch, state, shifted(ids, count)
                count, has_documents, state = count + len(ids), has_documents or bool(ids), table.state_dict()
            require(has_documents, f"{self.name} has no documents to train on for part {part} of {parts}")
            epoch, state = epoch + 1, None


class StreamSource(Source):
    """Training batches from a stream, in the order of their addresses.

    Every training process has ``max(1, num_workers)`` parts of the documents, and its micro-batches come from these parts in turn.
    ``AddressedLoader`` removes the ``position`` from a batch (the part, and the position after the batch) and stores it. The batches
    depend only on (seed, world, num_workers), and with several workers on ``accumulate``.

    Args:
        stream: the documents.
        seed: the seed of the order of shards.
        num_workers: processes that load batches.
        batch_size, accumulate, world: see ``Source``.
    """

    def __init__(self, stream: DocumentStream, *, seed: int, num_workers: int = 0, **slices: Any) -> None:
        super().__init__(**slices)
        self.stream, self.seed, self.parts = stream, seed, max(1, num_workers)
        self._first, self._starts = 0, [[START] * self.parts for _ in range(self.world)]  # a step, and the positions before it
        self._rows: Iterator[tuple[np.ndarray, str]] = iter(())
        self._next = -1  # the micro-batch that ``_rows`` yields next

    def batch(self, step: int, rows: range) -> Batch:
        """Return the next ``len(rows)`` rows of a rank. All of their labels count."""
        slice_of_step, rank = divmod(rows.start // len(rows), self.world)
        micro = step * self.accumulate + slice_of_step
        part = micro % self.parts
        if micro != self._next:
            if not 0 <= micro - self._first * self.accumulate < self.parts:
                raise ConfigError(f"{self.stream.name}: the checkpoint has no position in the stream for step {step}")
            num_parts = self.world * self.parts
            self._rows = self.stream.rows(self._starts[rank][part], self.seed, rank * self.parts + part, num_parts)
        self._next = micro + self.parts
        drawn = list(islice(self._rows, len(rows)))
        input_ids, labels, document_ids = torch.from_numpy(np.stack([row for row, _ in drawn], axis=1))
        batch: Any = {"input_ids": input_ids, "labels": labels, "position": (part, drawn[-1][1])}
        batch["num_targets"] = torch.tensor(self.batch_size * labels.shape[1])
        return batch | ({"document_ids": document_ids} if self.stream.packing else {})

    def state_dict(self, rank: int, positions: Mapping[int, str]) -> dict[str, Any]:
        """Return ``{"stream": the positions of every process}``. Every process must call this with its own new ``positions``."""
        of_all: list[Any] = [[positions.get(part, start) for part, start in enumerate(self._starts[rank])]]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            (of_rank,), of_all = of_all, [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(of_all, of_rank)
        return {"stream": of_all}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with step ``state["step"]``.

        Raises:
            ConfigError: the state was saved with another number of processes or of workers.
        """
        starts = [list(of_rank) for of_rank in state.get("stream", ())]
        before, now = list(map(len, starts)), [self.parts] * self.world
        require(
            before == now,
            f"{self.stream.name}: a stream resumes with the same number of processes and the same data.num_workers only, but the "
            f"workers by process were {before}, and now they are {now}",
        )
        self._first, self._starts, self._next = int(state["step"]), starts, -1


def _stream(
    tables: list[Any],
    column: str,
    name: str,
    *,
    tokenizer: str | Tokenizer,
    bpe_vocab_size: int,
    val_rows: int,
    **options: Any,
) -> TokenisedDocuments:
    """Return the stream of a table for training. The validation documents are in memory."""
    from datasets import Features, Value, concatenate_datasets

    table, *val_table = tables
    existing = find_tokenizer(tokenizer)
    shards = [table.shard(num_shards=table.num_shards, index=index) for index in range(table.num_shards)]
    rows = ((index, row[column]) for index, shard in enumerate(shards) for row in shard)
    texts = list[str]()
    held_out = Counter[int]()
    # without a validation table, the rest of ``rows`` is for training
    for index, text in ((0, row[column]) for row in val_table[0]) if val_table else rows:
        held_out[index] += 1
        texts += not_blank([text], column)
        if len(texts) == val_rows:
            break
    if not val_table:
        # skipping in the whole table would fix the order of its shards; without features, each shard would be opened here
        table, count = table.select_columns([column]).cast(Features({column: Value("string")})), table.num_shards
        table = concatenate_datasets([table.shard(num_shards=count, index=i).skip(held_out[i]) for i in range(count)])
    first = list(islice(not_blank((text for _, text in rows), column), 1 if existing else DOCUMENTS_TO_LEARN_FROM))
    require(
        bool(first and texts),
        f"{name} has too few documents: it needs data.val_rows={val_rows} for validation, and others for training",
    )
    marks = learned_marks(tokenizer)
    tokenizer = find_or_train_tokenizer(existing or tokenizer, bpe_vocab_size, first, marks)
    stream = DocumentStream(table=table, column=column, tokenizer=tokenizer, name=name, **options)
    counted = {"characters": sum(map(len, texts)), "bytes": sum(len(text.encode()) for text in texts)}
    left_out = {"val": share_of(held_out.total() - len(texts), held_out.total(), BLANK)}
    return TokenisedDocuments(stream, Ragged.of(with_marks(tokenizer, texts)), tokenizer, counted, left_out)
