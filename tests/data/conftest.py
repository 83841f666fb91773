from pathlib import Path

import numpy as np
import pytest

from minitx.data.corpus import tokenised
from minitx.data.seeding import generator
from minitx.data.splits import Split, as_split
from minitx.data.task import Batch, Task
from minitx.data.token_cache import TokenArray

POEM = "Once upon a midnight dreary, while I pondered, weak and weary,\nOver many a quaint and curious volume\n\n"


def split_of(rows, **task) -> Split:
    """A data set as a split of a task."""
    return as_split(Task(name="mine", train=rows, val=rows, baselines=lambda: {}, **task), "train")


def batch_of(split: Split) -> Batch:
    """All rows of a split in one batch."""
    return split.collate(np.arange(len(split)), lambda row: generator(0, row))


def total_left_out(task: Task, why: str = "") -> int:
    """How many rows of both splits are left out or cut because of ``why``."""
    return sum(int(said.split()[0]) for split in ("train", "val") for said in task.left_out[split] if why in said)


@pytest.fixture
def write_text(tmp_path):
    """Write a text (or bytes) to a file of the test's own and return its path as a string."""

    def write(content: str | bytes, name: str = "text.txt") -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


@pytest.fixture
def read_tokens(write_text, cache):
    """Write a text to a file of the test's own and return it tokenised."""

    def make(content: str | bytes = POEM * 29, **values) -> tuple:
        options = {"tokenizer": "char", "bpe_vocab_size": 1024, "val_fraction": 0.1, "cache_dir": cache}
        return tokenised(write_text(content), **{**options, **values})

    return make


@pytest.fixture
def tokens(read_tokens) -> tuple[TokenArray, TokenArray]:
    """Both splits of a small text."""
    return read_tokens()[:2]


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def offline_datasets(tmp_path, monkeypatch):
    """``datasets`` with an empty cache of the test's own and no way to the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


SPACE = {"llama": "▁", "metaspace": "▁", "byte_level": "Ġ"}


def beginning_with_a_space(kind, letters):
    """A model of ``tokenizers`` that begins a text with a space, which it merges with the first of ``letters``."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    known = [SPACE[kind], *(letters.replace("\n", "Ċ") if kind == "byte_level" else letters)]
    model = Tokenizer(models.BPE({word: i for i, word in enumerate([*known, "".join(known[:2])])}, [tuple(known[:2])]))
    if kind == "llama":
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    elif kind == "metaspace":
        model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    else:
        model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    return model
