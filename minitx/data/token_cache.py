"""The cache of token ids: a memory-mapped file of ids, and a JSON file that describes it.

Its name contains what the ids depend on: a checksum of the text or the files, the tokenizer and the split. The JSON file contains the
checksum of the ids, so that a damaged cache is rebuilt.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from minitx.config import ConfigError
from minitx.crash_safe import replacing
from minitx.data.tokenizer import Tokenizer, warn_of_unknown

log = logging.getLogger(__name__)

CACHE_FORMAT = 4
TEXTS_AT_ONCE = 1000


def data_dir() -> Path:
    """Return the folder for data: ``data/`` in a checkout, or ``minitx`` in the user's cache folder for an installed package.

    The cache folder is ``$XDG_CACHE_HOME`` if this is an absolute path, else ``~/.cache``.
    """
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root / "data"
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "minitx"


@contextlib.contextmanager
def caching(path: Path) -> Iterator[BinaryIO]:
    """Write ``path``, a file of the cache, in a context: yield a temporary file and rename it at the end.

    Raises:
        ConfigError: the folder or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, is_shared=True) as part, part.open("xb") as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"{path}, a cache of prepared data, cannot be written: {error.strerror}; set data.cache_dir=FOLDER to move it (train.py, "
            "evaluate.py)"
        ) from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, read in chunks (about a second per GB)."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class TokenArray:
    """The tokens ``start`` to ``stop - 1`` of a token file, mapped into memory on first use.

    Only the path and the numbers are pickled. A pickled ``np.memmap`` would contain the tokens themselves.
    """

    def __init__(self, path: Path, dtype: str, start: int, stop: int) -> None:
        self.path, self.dtype, self.start, self.stop = path, dtype, start, stop
        self._array: np.ndarray | None = None

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def array(self) -> np.ndarray:
        """The ids, 1-D, read-only."""
        if self._array is None:
            mapped = np.memmap(self.path, dtype=self.dtype, mode="r") if len(self) else np.empty(0, self.dtype)
            self._array = np.asarray(mapped)[self.start : self.stop]
        return self._array

    def __getitem__(self, part: slice) -> np.ndarray:
        """The ids of a slice with step 1, copied into memory. In contrast, every page of a mapped file that was read stays resident."""
        start, stop, _ = part.indices(len(self))
        offset = (self.start + start) * np.dtype(self.dtype).itemsize
        return np.fromfile(self.path, self.dtype, max(stop - start, 0), offset=offset)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_array": None}


Ids = np.ndarray | TokenArray
"""Token ids, 1-D."""

Tokens = tuple[TokenArray, TokenArray, Tokenizer, dict[str, Any]]
"""The ids of training and of validation, the tokenizer, and the record in the JSON file of a cache."""


def cached(cache_dir: str | Path | None, name: str, source: str, build: Callable[[Path], dict[str, Any]]) -> Tokens:
    """Return the tokens in the file ``name`` of ``cache_dir`` (None: ``data_dir()``), and the record in its JSON file.

    If the files are missing, damaged or do not match, ``build(file)`` writes them again. ``source`` names the text in the log and in the
    warning about unknown characters.
    """
    tokens = None
    path = Path(cache_dir or data_dir()) / name
    description = path.with_suffix(".json")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged file is rebuilt
        record = json.loads(description.read_text(encoding="utf-8"))
        if record["format"] == CACHE_FORMAT and record["tokens_sha256"] == sha256_of(path):
            tokens = (*token_arrays(path, record), Tokenizer.from_dict(record["tokenizer"]), record)
    if tokens is None:
        log.info("tokenising %s", source)
        record = build(path)
        with caching(description) as file:
            file.write(json.dumps(record).encode())
        tokens = (*token_arrays(path, record), Tokenizer.from_dict(record["tokenizer"]), record)
    counts = record["splits"]["train"]
    warn_of_unknown(counts.get("unknown", 0), counts["tokens"], source)
    return tokens


def token_arrays(path: Path, record: Mapping[str, Any]) -> tuple[TokenArray, TokenArray]:
    """Return the ids of training and of validation, stored one after the other in the file at ``path``."""
    cut, rest = (record["splits"][split]["tokens"] for split in ("train", "val"))
    return TokenArray(path, record["dtype"], 0, cut), TokenArray(path, record["dtype"], cut, cut + rest)


def write_ids(
    path: Path, tokenizer: Tokenizer, splits: Mapping[str, Iterable[str]], encode: Callable[[Sequence[str]], list[np.ndarray]]
) -> dict[str, Any]:
    """Write the ids of the texts of ``train`` and then of ``val`` to ``path``, and return their record."""
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    counts = {split: {"tokens": 0, "characters": 0, "bytes": 0, "unknown": 0} for split in ("train", "val")}
    digest = hashlib.sha256()
    unknown = -1 if tokenizer.unknown_id is None else tokenizer.unknown_id
    with caching(path) as file:
        for split, counted in counts.items():
            texts = iter(splits[split])
            while batch := list(islice(texts, TEXTS_AT_ONCE)):
                written = np.concatenate(encode(batch)).astype(dtype)
                counted["tokens"] += len(written)
                counted["characters"] += sum(map(len, batch))
                counted["bytes"] += sum(len(text.encode()) for text in batch)
                counted["unknown"] += int(np.count_nonzero(written == unknown))
                digest.update(written.tobytes())
                file.write(written.tobytes())
    about = {"format": CACHE_FORMAT, "tokenizer": tokenizer.to_dict(), "tokens_sha256": digest.hexdigest()}
    return {**about, "dtype": dtype, "splits": counts}


def bits_per(targets: int, counted: Mapping[str, int]) -> dict[str, float]:
    """Return factors from nats per token to bits per ``byte`` and per ``character``, for a split with these counts."""
    return {unit: targets / counted[f"{unit}s"] / math.log(2) for unit in ("byte", "character")}
