"""Data: batches from the loader (P10), and a large text (P13).

The loader, over two other ways to the same rows of the same tokens: nanoGPT's ``get_batch``, written anew from what its README and
comments say (the file mapped again for every batch, a slice for each row cast to int64 and stacked), and Hugging Face ``datasets`` in
torch format, random rows through a ``DataLoader``. All give int64 inputs and labels of the same shape; nobody has workers.

P13: a text of ``--megabytes``, made by repeating and shuffling the lines of the King James text, through ``scripts/train.py data=text
data.tokenizer=bpe``, over a text of 1 MB. What the first start takes more than the second is tokenising: learning, encoding, counting.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import ROOT, Row, compare, compared, exact, measure, parser, row, turns
from torch import Tensor
from torch.utils.data import DataLoader

from minitx.data import kjv
from minitx.data.corpus import corpus_stem
from minitx.data.datamodule import DataModule
from minitx.data.text_files import read_text
from minitx.data.token_cache import data_dir

SIZES = ((12, 64), (64, 256))  # rows, tokens a row
WATCHED = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode)
"""  # a process of its own starts the run, because the most memory of a process includes that of the one that started it
RUN = ("trainer.max_steps=1", "trainer.accelerator=cpu", "trainer.val_batches=1", "trainer.ckpt_every=0")
RUN += ("callbacks.progress=false",)


def get_batch(tokens: Any, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    """A batch as nanoGPT makes it."""
    mapped = np.memmap(tokens.path, dtype=tokens.dtype, mode="r")
    starts = torch.randint(len(tokens) - context, (batch_size,)).tolist()
    rows = [torch.from_numpy(mapped[start : start + context + 1].astype(np.int64)) for start in starts]
    return torch.stack([one[:-1] for one in rows]), torch.stack([one[1:] for one in rows])


def hugging_face_rows(tokens: Any, context: int, folder: str) -> Any:
    """The rows as a data set on disk, in torch format."""
    from datasets import Dataset, disable_progress_bars, load_from_disk

    disable_progress_bars()
    num_rows = (len(tokens) - 1) // context
    ids = np.asarray(tokens.array[: num_rows * context + 1], dtype=np.int64)
    inputs, labels = (ids[i : i + num_rows * context].reshape(num_rows, context) for i in (0, 1))
    Dataset.from_dict({"input_ids": inputs, "labels": labels}).save_to_disk(folder)
    return load_from_disk(folder).with_format("torch")


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def loader_over_others(pairs: int) -> Iterator[Row]:
    """P10, the rows of the loader."""
    for batch_size, context in SIZES:
        data = DataModule(kjv(context_len=context), batch_size=batch_size, max_steps=10_000_000)
        tokens, loader = data.task.train.tokens, iter(data.train_dataloader())  # type: ignore[union-attr]
        first, other = next(loader), get_batch(tokens, batch_size, context)
        assert first["input_ids"].shape == first["labels"].shape == other[0].shape == other[1].shape
        with tempfile.TemporaryDirectory() as folder:
            theirs = forever(DataLoader(hugging_face_rows(tokens, context, folder), batch_size=batch_size, shuffle=True))
            sides: dict[str, Callable[[], object]] = {
                "nanoGPT's get_batch": partial(get_batch, tokens, batch_size, context),
                "random rows of datasets": partial(next, theirs),
            }
            for name, side in sides.items():
                found = compare(side, partial(next, loader), pairs=pairs, block=0.25, warm=40)
                speed = {"batches_per_second": round(1 / found["seconds"][1])}
                yield row("P10", f"batches from the loader over {name}", f"{batch_size} x {context}", found, None, **speed)


# --- a large text


def make_text(path: Path, megabytes: float, lines: list[str]) -> None:
    """The lines, shuffled anew for each repetition, up to a size."""
    shuffle, written = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            shuffle.shuffle(lines)
            for line in lines:
                written += file.write(line)
                if written >= megabytes * 1e6:
                    return


def forget(texts: list[Path]) -> None:
    """Delete what runs have kept of texts."""
    for text in texts:
        for kept in data_dir().glob(f"{corpus_stem(str(text))}-*"):
            kept.unlink()


def start(text: Path, folder: Path) -> tuple[float, float]:
    """(seconds, most resident MB) of a training run of one step on ``text``."""
    words = [*RUN, "data=text", f"data.path='{text}'", "data.tokenizer=bpe", f"output_dir={folder / f'run-{time.time_ns()}'}"]
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *words]
    done = subprocess.run([sys.executable, "-c", WATCHED, *command], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: train.py {' '.join(words)} ended with {done.returncode}")
    return time.perf_counter() - began, int(done.stdout) / (1e3 if sys.platform != "darwin" else 1e6)


def of_tokenizers(text: Path, at_once: int = 10_000) -> tuple[float, float]:
    """Seconds that ``tokenizers`` alone takes to learn from the text, and to encode it with ``encode_batch`` on all cores."""
    from tokenizers import ByteLevelBPETokenizer

    bpe, began = ByteLevelBPETokenizer(), time.perf_counter()
    bpe.train([str(text)], vocab_size=1024, show_progress=False)
    learned = time.perf_counter()
    with text.open(encoding="utf-8") as file:
        while lines := list(islice(file, at_once)):
            bpe.encode_batch(lines)
    return learned - began, time.perf_counter() - learned


def large_text(pairs: int, megabytes: float) -> Iterator[Row]:
    """P13."""
    lines, label = "".join(read_text(None)).splitlines(keepends=True), f"{megabytes:g} MB"
    wanted = (">= 0.8", "<= 600", "<= 1.1") if megabytes >= 1000 else (None, None, None)  # the targets are for such texts
    with tempfile.TemporaryDirectory(prefix="minitx-bench-") as name:
        large, small = texts = [Path(name) / f"{size}.txt" for size in ("large", "small")]
        make_text(large, megabytes, lines)
        make_text(small, 1.0, lines)
        forget(texts)
        try:
            seconds, memory = zip(*(start(text, Path(name)) for text in (large, small)), strict=True)
            blocks = [(side, start((small, large)[side], Path(name))[0]) for side in turns(pairs)]
        finally:
            forget(texts)
        learning, encoding = of_tokenizers(large)
    second, more = compared(blocks), exact(memory[0] - memory[1])
    ours = seconds[0] - second["seconds"][1]
    known = {"our_seconds": ours, "learning_seconds": learning, "encoding_seconds": encoding}
    yield row("P13", "tokenising over tokenizers' encode_batch alone", label, exact(encoding / ours), wanted[0], **known)
    yield row("P13", "tokenising over tokenizers' learning and encode_batch", label, exact((learning + encoding) / ours), None)
    yield row("P13", "most resident MB over a run on 1 MB", label, more, wanted[1], "lower", resident_mb=memory)
    yield row("P13", "second start over that on 1 MB", label, second, wanted[2], "lower")


def main() -> None:
    parse = parser(__doc__, ("P10", "P13"))
    parse.add_argument("--megabytes", type=float, default=1000, help="of the large text")
    parse.add_argument("--starts", type=int, default=4, help="pairs of second starts, an even number")
    given = parse.parse_args()
    measure("data", given, {
        "P10": lambda: loader_over_others(given.pairs),
        "P13": lambda: large_text(given.starts, given.megabytes),
    })  # fmt: skip


if __name__ == "__main__":
    main()
