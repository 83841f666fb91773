"""Language modelling on a stream of documents. Nothing is prepared in advance, every row is full, and the state is the position in the stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from minitx.config import ConfigError, HubDataConfig
from minitx.data.addressing import Address, Batch, generator
from minitx.data.documents import DocumentRows, learned_marks, not_blank, task_of, with_marks
from minitx.data.sources import Source
from minitx.data.task import Ragged, Task, name_of, tokenizer_of
from minitx.data.tokenizers import Tokenizer, find_tokenizer
from minitx.data.tokens import bits_per

DOCUMENTS_AT_ONCE = 64
DOCUMENTS_TO_LEARN_FROM = 10_000
Place = tuple[int, int, int, int]
"""A position: epoch, number of the shard in it, row in the shard, and the number of tokens of that document that were used."""


@dataclass(frozen=True, kw_only=True)
class DocumentStream:
    """The training documents of a streamed table.

    Attributes:
        table: a ``datasets.IterableDataset``.
        column: the column of documents.
        held_out: for each shard, how many of its first rows are held out for validation.
        tokenizer: the tokenizer.
        context_len: tokens in a row.
        packing: the documents of a row do not see each other.
        name: the name of the data in messages.
    """

    table: Any
    column: str
    held_out: Mapping[int, int]
    tokenizer: Tokenizer
    context_len: int
    packing: bool
    name: str

    def rows(self, place: Place, seed: int, rank: int, world: int) -> Iterator[tuple[np.ndarray, Place]]:
        """Yield full rows from ``place`` on, each with the position after it.

        A row is (3, L) int64: input ids, labels, and the number of the document in the row.
        """
        row, filled, number = np.empty((3, self.context_len), np.int64), 0, 0
        for (epoch, nth, of_shard, _), ids in self._documents(place, seed, rank, world):
            used = place[3] if (epoch, nth, of_shard) == place[:3] else 0
            while used < len(ids) - 1:
                size = min(self.context_len - filled, len(ids) - 1 - used)
                part = row[:, filled : filled + size]
                part[0], part[1], part[2] = ids[used : used + size], ids[used + 1 : used + 1 + size], number
                filled, used, number = filled + size, used + size, number + 1
                if filled == self.context_len:
                    yield row, (epoch, nth, of_shard, used)
                    row, filled, number = np.empty_like(row), 0, 0

    def _documents(self, place: Place, seed: int, rank: int, world: int) -> Iterator[tuple[Place, np.ndarray]]:
        """The documents from ``place`` on, each with its own place in front.

        The order of the shards depends on (seed, epoch). A rank takes every ``world``-th shard, or every ``world``-th row where
        there are fewer shards than ranks.
        """
        epoch, first_shard, first_row, _ = place
        shards, found = self.table.num_shards, True
        while found:
            order, found = generator(seed, "epoch", epoch).permutation(shards).tolist(), False
            for nth, shard in list(enumerate(order[rank::world] if shards >= world else order))[first_shard:]:
                start = max(first_row, self.held_out.get(shard, 0))
                rows = enumerate(self.table.shard(num_shards=shards, index=shard).skip(start), start)
                mine = ((row, value) for row, value in rows if shards >= world or row % world == rank)
                for row, ids in self._encoded(mine):
                    found = True
                    yield (epoch, nth, row, 0), ids
                first_row = 0
            epoch, first_shard = epoch + 1, 0
        raise ConfigError(f"{self.name} has no documents to train on for process {rank} of {world}")

    def _encoded(self, rows: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, np.ndarray]]:
        while batch := list(islice(rows, DOCUMENTS_AT_ONCE)):
            kept = [(row, text) for row, value in batch for text in not_blank([value[self.column]], self.column)]
            for (row, _), ids in zip(kept, with_marks(self.tokenizer, [text for _, text in kept]), strict=True):
                yield row, ids


class StreamSource(Source):
    """Training batches from a stream, in the order of their addresses.

    They depend only on (seed, world). The state is the position of every rank at the start of a step. The same number of
    processes can then continue with the next batch.

    Args:
        stream: the documents.
        seed: the seed of the order of shards.
        batch_size, accumulate, world: see ``Source``.
    """

    def __init__(self, stream: DocumentStream, *, seed: int, **slices: Any) -> None:
        super().__init__(**slices)
        self.stream, self.seed, self.rank = stream, seed, 0
        self._starts: dict[int, dict[int, Place]] = {0: dict.fromkeys(range(self.world), (0, 0, 0, 0))}  # by step, by rank
        self._rows: Iterator[tuple[np.ndarray, Place]] = iter(())
        self._next = (-1, 0)  # the step and the micro-batch that ``_rows`` goes on with

    def __getitem__(self, address: Address) -> Batch:
        if (address.step, address.micro) != self._next:
            if address.micro or address.step not in self._starts:
                raise ConfigError(f"{self.stream.name}: the checkpoint has no place in the stream for step {address.step}")
            self.rank = address.rank
            self._rows = self.stream.rows(self._starts[address.step][self.rank], self.seed, self.rank, self.world)
        done = address.micro + 1 == self.accumulate
        self._next = (address.step + 1, 0) if done else (address.step, address.micro + 1)
        return super().__getitem__(address)

    def batch(self, step: int, rows: range) -> Batch:
        """Return the next ``len(rows)`` rows. All of their labels count."""
        drawn = list(islice(self._rows, len(rows)))
        self._starts = {step: self._starts[step], step + 1: {self.rank: drawn[-1][1]}}
        input_ids, labels, document_ids = torch.from_numpy(np.stack([row for row, _ in drawn], axis=1))
        batch = {"input_ids": input_ids, "labels": labels, "num_targets": torch.tensor(self.batch_size * labels.shape[1])}
        return batch | ({"document_ids": document_ids} if self.stream.packing else {})

    def state_dict(self, step: int) -> dict[str, Any]:
        """Return ``{"stream": the position of each rank at the start of step}``. Every process must call it."""
        places = dict(self._starts.get(step, self._starts[max(self._starts)]))  # the last one where a step is repeated
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            of_all: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(of_all, places)
            places = {rank: place for own in of_all for rank, place in own.items()}
        return {"stream": [list(places[rank]) for rank in sorted(places)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with step ``state["step"]``.

        Raises:
            ConfigError: the state was saved with another number of processes.
        """
        places = state.get("stream", ())
        if len(places) != self.world:
            said = f"{self.stream.name}: data.streaming=true resumes with the same number of processes"
            raise ConfigError(f"{said}: {len(places)} processes before, {self.world} now")
        self._starts = {int(state["step"]): {rank: tuple(place) for rank, place in enumerate(places)}}
        self._next = (-1, 0)


def load_stream(config: HubDataConfig, tables: Sequence[Any], column: str, tokenizer: Tokenizer | None) -> Task:
    """Return the task of language modelling on a streamed table of documents. Validation documents are read into memory.

    Raises:
        ConfigError: too few documents, or a tokenizer without an end mark.
    """
    name, table, tokenizer = name_of(config), tables[0], tokenizer or find_tokenizer(config.tokenizer)
    rows = ((shard, row[column]) for shard, rows in enumerate(_shards(table)) for row in rows)
    texts, held_out = list[str](), Counter[int]()
    if len(tables) == 1:
        for shard, text in rows:  # what is left of them trains
            held_out[shard] += 1
            texts += not_blank([text], column)
            if len(texts) == config.val_rows:
                break
    else:
        texts += islice(not_blank((row[column] for row in tables[1]), column), config.val_rows)
    first = list(islice(not_blank((text for _, text in rows), column), 1 if tokenizer else DOCUMENTS_TO_LEARN_FROM))
    if not first or not texts:
        raise ConfigError(f"{name} has too few documents: data.val_rows={config.val_rows} of them validate, and others train")
    tokenizer = tokenizer_of(config, tokenizer, first, learned_marks(config))
    options: dict[str, Any] = {"context_len": config.context_len, "packing": config.packing}
    val = DocumentRows(Ragged.of(with_marks(tokenizer, texts)), **options)
    counted = {"characters": sum(map(len, texts)), "bytes": sum(len(text.encode()) for text in texts)}
    stream = DocumentStream(table=table, column=column, held_out=held_out, tokenizer=tokenizer, name=name, **options)
    return task_of(config, stream, val, tokenizer, bits_per(int(val.lengths.sum()), counted))


def _shards(table: Any) -> Iterator[Any]:
    """The parts of a stream, each of which is read by itself."""
    return (table.shard(num_shards=table.num_shards, index=index) for index in range(table.num_shards))
