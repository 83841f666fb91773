"""Language modelling on a stream of documents, read by ``datasets`` during training. Nothing is prepared, and every row is full."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minitx.config import ConfigError, HubDataConfig
from minitx.data.addressing import Address, Batch, generator
from minitx.data.documents import DocumentRows, document_tables, learned_marks, not_blank, task_of, with_marks
from minitx.data.sources import Source
from minitx.data.task import Ragged, Task, name_of, tokenizer_of
from minitx.data.tokenizers import Tokenizer, find_tokenizer
from minitx.data.tokens import bits_per

log = logging.getLogger(__name__)
DOCUMENTS_AT_ONCE = 64
DOCUMENTS_TO_LEARN_FROM = 10_000
START = "[0, null, 0]"
"""A position as JSON: the epoch, the state of the table before some documents (null: before all), the tokens used of these."""


@dataclass(frozen=True, kw_only=True)
class DocumentStream:
    """The training documents of a streamed table.

    Attributes:
        table: a ``datasets.IterableDataset``.
        column: the column of documents.
        tokenizer: the tokenizer.
        context_len: L, tokens in a row.
        packing: the documents of a row do not see each other.
        name: the name of the data in messages.
    """

    table: Any
    column: str
    tokenizer: Tokenizer
    context_len: int
    packing: bool
    name: str

    def rows(self, position: str, seed: int, part: int, parts: int) -> Iterator[tuple[np.ndarray, str]]:
        """Yield full rows of one of ``parts`` equal parts of the documents, each with the position after the row.

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
        """The epoch, the state of the table before some documents, and (3, n) their ids, labels and numbers."""
        from datasets.distributed import split_dataset_by_node

        count = blank = 0
        while True:
            by = "shards" if self.table.num_shards >= parts else "examples"
            table, found = split_dataset_by_node(self.table, part, parts, strategy=by), state is not None
            # the number of an epoch is the seed of the order of shards in ``datasets``, and 0 does not shuffle
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
                    numbers = np.repeat(np.arange(count, count + len(ids)), [len(own) - 1 for own in ids])
                    sides = np.concatenate([own[:-1] for own in ids]), np.concatenate([own[1:] for own in ids])
                    yield epoch, state, np.stack([*sides, numbers])
                count, found, state = count + len(ids), found or bool(ids), table.state_dict()
            if not found:
                raise ConfigError(f"{self.name} has no documents to train on for part {part} of {parts}")
            epoch, state = epoch + 1, None


class StreamSource(Source):
    """Training batches from a stream, in the order of their addresses.

    Every process that trains has ``max(1, num_workers)`` parts of the documents, and its micro-batches come from them in turn. A
    batch has its ``position``: the part, and the position after the batch, which ``AddressedLoader`` takes out and keeps. The
    batches depend only on (seed, world, num_workers).

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
        self._next = -1  # the micro-batch that ``_rows`` goes on with

    def __getitem__(self, address: Address) -> Batch:
        micro = address.step * self.accumulate + address.micro
        part = micro % self.parts
        if micro != self._next:
            if not 0 <= micro - self._first * self.accumulate < self.parts:
                raise ConfigError(f"{self.stream.name}: the checkpoint has no position in the stream for step {address.step}")
            start, every = self._starts[address.rank][part], self.world * self.parts
            self._rows = self.stream.rows(start, self.seed, address.rank * self.parts + part, every)
        self._next, self._part = micro + self.parts, part
        return super().__getitem__(address)

    def batch(self, step: int, rows: range) -> Batch:
        """Return the next ``len(rows)`` rows. All of their labels count."""
        drawn = list(islice(self._rows, len(rows)))
        input_ids, labels, document_ids = torch.from_numpy(np.stack([row for row, _ in drawn], axis=1))
        batch: Any = {"input_ids": input_ids, "labels": labels, "position": (self._part, drawn[-1][1])}
        batch["num_targets"] = torch.tensor(self.batch_size * labels.shape[1])
        return batch | ({"document_ids": document_ids} if self.stream.packing else {})

    def state_dict(self, rank: int, positions: Mapping[int, str]) -> dict[str, Any]:
        """Return ``{"stream": the positions of every process}``. Every process must call it with its own new ``positions``."""
        own = {rank: [positions.get(part, start) for part, start in enumerate(self._starts[rank])]}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            of_all: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(of_all, own)
            own = {rank: of_rank for one in of_all for rank, of_rank in one.items()}
        return {"stream": [own[rank] for rank in sorted(own)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with step ``state["step"]``.

        Raises:
            ConfigError: the state was saved with another number of processes or of workers.
        """
        starts = [list(of_rank) for of_rank in state.get("stream", ())]
        if list(map(len, starts)) != [self.parts] * self.world:
            said = f"{self.stream.name}: data.streaming=true resumes with the same number of processes and the same data.num_workers"
            raise ConfigError(f"{said}: {list(map(len, starts))} before, {[self.parts] * self.world} now, by process")
        self._first, self._starts, self._next = int(state["step"]), starts, -1


def load_stream(config: HubDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Return the task of language modelling on a streamed table of documents. Validation documents are read into memory.

    Raises:
        ConfigError: too few documents, or a tokenizer without an end mark.
    """
    from datasets import Features, Value, concatenate_datasets

    (table, *own_val), column = document_tables(config)
    name, tokenizer = name_of(config), tokenizer or find_tokenizer(config.tokenizer)
    shards = [table.shard(num_shards=table.num_shards, index=index) for index in range(table.num_shards)]
    rows = ((index, row[column]) for index, shard in enumerate(shards) for row in shard)
    texts = list(islice(not_blank((row[column] for row in own_val[0]), column), config.val_rows)) if own_val else list[str]()
    if not own_val:
        held_out = Counter[int]()
        for index, text in rows:  # what is left of them trains
            held_out[index] += 1
            texts += not_blank([text], column)
            if len(texts) == config.val_rows:
                break
        # a skip of the whole table would fix the order of its shards; without features, each shard would be opened here
        table, count = table.select_columns([column]).cast(Features({column: Value("string")})), table.num_shards
        table = concatenate_datasets([table.shard(num_shards=count, index=i).skip(held_out[i]) for i in range(count)])
    first = list(islice(not_blank((text for _, text in rows), column), 1 if tokenizer else DOCUMENTS_TO_LEARN_FROM))
    if not first or not texts:
        raise ConfigError(f"{name} has too few documents: data.val_rows={config.val_rows} of them validate, and others train")
    tokenizer = tokenizer_of(config, tokenizer, first, learned_marks(config))
    options: dict[str, Any] = {"context_len": config.context_len, "packing": config.packing}
    val = DocumentRows(Ragged.of(with_marks(tokenizer, texts)), **options)
    counted = {"characters": sum(map(len, texts)), "bytes": sum(len(text.encode()) for text in texts)}
    stream = DocumentStream(table=table, column=column, tokenizer=tokenizer, name=name, **options)
    return task_of(config, stream, val, tokenizer, bits_per(int(val.lengths.sum()), counted))
