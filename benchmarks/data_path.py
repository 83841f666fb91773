"""P10, the data path: batches a second from our loader, against two other ways to the same rows of the same tokens.

nanoGPT's ``get_batch``, written anew from what its README and comments say: the token file is mapped again for every batch
(which keeps memory flat), random starts are drawn, a slice for each row is cast to int64 and stacked, for inputs and for targets.
Hugging Face ``datasets``: the text cut into rows, a ``Dataset`` in torch format in memory-mapped Arrow, as a data set on disk is;
random rows through a ``DataLoader``, which reads a whole batch at once, and one after another, ``data[i]``. All four give int64 inputs and targets of the same shape; nobody has workers.
Ours is the loader that training iterates: addressed batches, a gather from the mapped file, an order without repetition.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from inside_fit import ready, run_config
from measure import compare, row, table, write
from torch import Tensor
from torch.utils.data import DataLoader

from minitx.data.tokens import TokenArray

WANTED_GET_BATCH, WANTED_DATASETS = ">= 3", ">= 50"
SIZES = ((12, 64), (64, 256))  # rows, tokens a row
BATCHES = 20  # in a piece of work, so that the clock counts nothing


def get_batch(tokens: TokenArray, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    """A batch as nanoGPT makes it."""
    mapped = np.memmap(tokens.path, dtype=tokens.dtype, mode="r")
    starts = torch.randint(len(tokens) - context, (batch_size,)).tolist()
    rows = [torch.from_numpy(mapped[start : start + context + 1].astype(np.int64)) for start in starts]
    return torch.stack([one[:-1] for one in rows]), torch.stack([one[1:] for one in rows])


def hugging_face_rows(tokens: TokenArray, context: int, folder: str) -> Any:
    """The rows as a data set on disk, in torch format."""
    from datasets import Dataset, disable_progress_bars, load_from_disk

    disable_progress_bars()
    num_rows = (len(tokens) - 1) // context
    ids = np.asarray(tokens.array[: num_rows * context + 1], dtype=np.int64)
    inputs, labels = (ids[i : i + num_rows * context].reshape(num_rows, context) for i in (0, 1))
    Dataset.from_dict({"input_ids": inputs, "labels": labels}).save_to_disk(folder)
    return load_from_disk(folder).with_format("torch")


def one_after_another(data: Any, batch_size: int) -> tuple[Tensor, ...]:
    """A batch of random rows, each asked for by its number."""
    rows = [data[i] for i in torch.randint(len(data), (batch_size,)).tolist()]
    return tuple(torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels"))


def forever(loader: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    while True:
        yield from loader


def pieces(batch: Callable[[], object]) -> Callable[[], None]:
    """``BATCHES`` batches after each other."""

    def work() -> None:
        for _ in range(BATCHES):
            batch()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for batch_size, context in SIZES:
        _, data = ready(run_config(batch_size, 10_000_000, context=context))
        tokens = data.task.train.tokens
        loader = iter(data.train_dataloader())
        shapes = [t.shape for t in get_batch(tokens, batch_size, context)]
        first = next(loader)
        assert shapes == [first["input_ids"].shape, first["labels"].shape] == [(batch_size, context)] * 2
        ours = pieces(lambda loader=loader: next(loader))
        size = f"{batch_size} x {context}"
        found = compare(pieces(lambda: get_batch(tokens, batch_size, context)), ours, pairs=given.pairs, block=0.25)  # noqa: B023
        speed = {"b_batches_per_second": round(BATCHES / found["b_seconds"])}
        rows.append(row(f"{size}: loader over nanoGPT's get_batch", found, WANTED_GET_BATCH, **speed))
        with tempfile.TemporaryDirectory() as folder:
            theirs = hugging_face_rows(tokens, context, folder)
            batches = forever(DataLoader(theirs, batch_size=batch_size, shuffle=True))
            sides: dict[str, Callable[[], object]] = {
                "one after another": lambda: one_after_another(theirs, batch_size),  # noqa: B023
                "a batch at once": lambda: next(batches),  # noqa: B023
            }
            for how, side in sides.items():
                found = compare(pieces(side), ours, pairs=given.pairs, block=0.25)
                rows.append(row(f"{size}: loader over random rows of datasets, {how}", found, WANTED_DATASETS))
    print(table(rows))
    title = f"Batches from the loader; seconds are those of {BATCHES} batches"
    print(write("data_path", {"target": "P10", "title": title, "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
