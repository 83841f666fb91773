"""Language modelling on documents that never see each other: packed into rows, or one a row."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitx.config import IGNORED, ConfigError, HubDataConfig
from minitx.data.addressing import Batch
from minitx.data.examples import Draw, Examples, Ragged, Task, hold_out
from minitx.data.hub import column_of, load_table
from minitx.data.tokenizers import Tokenizer, fingerprint, from_dict, train_tokenizer
from minitx.data.tokens import TokenArray, bits_per, cached, write_ids

FORMAT = 1
DOCUMENTS_AT_ONCE = 1000
Texts = dict[str, Callable[[], Iterator[str]]]


class DocumentExamples(Examples):
    """Rows of whole documents. A document t_1 … t_n is kept as m t_1 … t_n m, with the mark m (or bos, eos) around it;

        input_ids     m t_1 … t_n        labels   t_1 … t_n m

    so that every token and every end is asked for once. A longer document than a row is cut into rows, each of which
    sees only itself. ``document_ids`` (packing only) number the documents of a row; −1 is padding.

    Args:
        documents: with the marks around them.
        context_len: L, the longest row.
        packing: several documents share a row, as many as fit; else one document (or piece of it) a row.
    """

    def __init__(self, documents: Ragged, *, context_len: int, packing: bool) -> None:
        inputs = documents.lengths - 1
        pieces = -(-inputs // context_len)
        nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # 0, 1, ... in every document
        starts = np.repeat(documents.starts, pieces) + nth * context_len
        lengths = np.minimum(context_len, np.repeat(inputs, pieces) - nth * context_len)
        self.pieces = Ragged(documents.values, starts, lengths + 1)  # one more: the target of the last position
        self.packing = packing
        members = pack(lengths, context_len) if packing else [[piece] for piece in range(len(lengths))]
        self.rows = Ragged.of([np.array(row) for row in members])
        self.lengths = self.targets = np.array([lengths[row].sum() for row in members])

    def collate(self, index: np.ndarray, draw: Draw) -> Batch:
        """See ``Examples``; nothing is drawn."""
        shape = len(index), int(self.lengths[index].max())
        input_ids, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        document_ids = np.full(shape, -1, np.int64)
        for row, example in enumerate(index):
            start = 0
            for number, piece in enumerate(self.rows[example]):
                ids = self.pieces[piece]
                place = slice(start, start + len(ids) - 1)
                input_ids[row, place], labels[row, place], document_ids[row, place] = ids[:-1], ids[1:], number
                start = place.stop
        arrays = {"input_ids": input_ids, "key_mask": document_ids >= 0, "labels": labels}
        arrays |= {"document_ids": document_ids} if self.packing else {}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


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
        ConfigError: the data cannot be had, has no such column, or has too few documents.
    """
    train, val, made_by, record = _tokenised(config, folder, tokenizer)
    options: dict[str, Any] = {"context_len": config.context_len, "packing": config.packing}
    return Task(
        kind="language_model",
        train=DocumentExamples(train, **options),
        val=DocumentExamples(val, **options),
        tokenizer=made_by,
        model_fields={"vocab_size": made_by.vocab_size},
        bits_per=bits_per(int((val.lengths - 1).sum()), record["splits"]["val"]),
    )


def _tokenised(config: HubDataConfig, folder: Path, tokenizer: Tokenizer | None) -> tuple[Ragged, Ragged, Tokenizer, dict]:
    """The documents of both splits with marks around them, the tokenizer and the record, from the cache or made anew."""
    table = load_table(str(config.path), split=config.split, subset=config.subset)
    val_table = None
    if config.val_split is not None:
        val_table = load_table(str(config.path), split=config.val_split, subset=config.subset, key="val_split")
    column = _text_column(table, config)
    learnt = config.tokenizer if config.tokenizer == "char" else f"bpe{config.bpe_vocab_size}"
    word = learnt if tokenizer is None else fingerprint(tokenizer)
    prints = [getattr(one, "_fingerprint", None) for one in (table, val_table)]  # datasets' own: of files and revision
    key = hashlib.sha256(json.dumps([FORMAT, prints, column, word, config.val_fraction]).encode()).hexdigest()[:16]
    path = folder / f"hf-{key}.bin"

    def build() -> dict[str, Any]:
        return _build(path, config, _texts(table, val_table, column, config), tokenizer)

    record = cached(path, str(config.path), lambda _: True, build)  # the file's name says what it is of
    lengths = np.array(record["lengths"], np.int64)
    values = TokenArray(path, record["dtype"], 0, int(lengths.sum()))
    starts, cut = np.cumsum(lengths) - lengths, record["splits"]["train"]["documents"]
    both = [Ragged(values, starts[part], lengths[part]) for part in (slice(0, cut), slice(cut, None))]
    return both[0], both[1], from_dict(record["tokenizer"]), record


def _text_column(table: Any, config: HubDataConfig) -> str:
    if config.text_column is not None:
        return column_of(table, config.text_column, "text_column")
    if "text" not in table.column_names and len(table.column_names) != 1:
        raise ConfigError(f"data.text_column=null must name a column of the data, which has: {', '.join(table.column_names)}")
    return "text" if "text" in table.column_names else table.column_names[0]


def _documents(table: Any, column: str, rows: np.ndarray) -> Iterator[str]:
    """The documents of these rows that are not blank, read from the table when they are asked for."""
    for start in range(0, len(rows), DOCUMENTS_AT_ONCE):
        for text in table[rows[start : start + DOCUMENTS_AT_ONCE]][column]:
            if text is not None and not isinstance(text, str):
                raise ConfigError(f"data.text_column={column} holds no texts but {type(text).__name__}")
            if text and not text.isspace():
                yield text


def _texts(table: Any, val_table: Any, column: str, config: HubDataConfig) -> Texts:
    """The documents of both splits, as often as they are asked for."""
    if val_table is not None:
        column_of(val_table, column, "text_column")
        tables = {"train": table, "val": val_table}
        return {split: partial(_documents, one, column, np.arange(len(one))) for split, one in tables.items()}
    try:
        train, val = hold_out(range(len(table)), config.val_fraction)
    except ValueError:
        raise ConfigError(
            f"data.path={config.path} has {len(table)} documents, too few for a training and a validation split"
        ) from None
    return {"train": partial(_documents, table, column, train), "val": partial(_documents, table, column, val)}


def _build(path: Path, config: HubDataConfig, texts: Texts, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Write the documents of both splits to ``path``; returns the record of it."""
    if tokenizer is None:
        marks = ("eos",) if config.tokenizer == "char" else ()  # byte-level BPE has its <|endoftext|>
        tokenizer = train_tokenizer(config.tokenizer, texts["train"](), vocab_size=config.bpe_vocab_size, marks=marks)
    marks_of = tokenizer.mark_ids
    if not marks_of.keys() & {"bos", "eos"}:
        raise ConfigError(f"data={config.name} needs a tokenizer with a bos or eos token, which ends a document")
    first, last = marks_of.get("bos", marks_of.get("eos")), marks_of.get("eos", marks_of.get("bos"))
    encode_batch = tokenizer.encode_batch
    lengths: dict[str, list[int]] = {split: [] for split in texts}

    def marked() -> Iterator[tuple[str, str, np.ndarray]]:
        for split, documents in texts.items():
            supply = documents()
            while batch := list(islice(supply, DOCUMENTS_AT_ONCE)):
                for text, ids in zip(batch, encode_batch(batch), strict=True):
                    lengths[split].append(len(ids) + 2)
                    yield split, text, np.concatenate([[first], ids, [last]])
            if not lengths[split]:
                raise ConfigError(f"data.path={config.path} has no document for the {split} split: all of them are blank")

    record = write_ids(path, tokenizer, marked())
    for split, counted in record["splits"].items():
        counted["documents"] = len(lengths[split])
    return {**record, "tokenizer": tokenizer.to_dict(), "lengths": lengths["train"] + lengths["val"]}
