"""Language modelling on tokenised text: windows of ``context_len`` tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from minitx.config import IGNORED, ConfigError, TextDataConfig
from minitx.data.addressing import Batch
from minitx.data.baselines import compressed_bits
from minitx.data.corpus import read_text
from minitx.data.task import Draw, Split, Task, name_of
from minitx.data.tokenizers import Tokenizer
from minitx.data.tokens import TokenArray, bits_per, tokenised


class TrainingWindows(Split):
    """Windows of L = ``context_len`` tokens. The label of each token is the next one.

    In each epoch the text is cut into W windows, from a random offset below L on. They come in random order. W = max(1, ⌊(n −
    L) / L⌋) for n > L tokens, so that W is the same for every offset. An item is the index of a window's first token.
    """

    def __init__(self, tokens: TokenArray, context_len: int) -> None:
        self.tokens, self.context_len = tokens, context_len
        self._windows: np.ndarray | None = None

    def __len__(self) -> int:
        return max(1, (len(self.tokens) - self.context_len) // self.context_len)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_windows": None}  # a pickled view would hold the tokens themselves

    def count(self, items: np.ndarray) -> int:
        """See ``Split``. Every label counts."""
        return len(items) * self.context_len

    def order(self, epoch: int, random: np.random.Generator) -> np.ndarray:
        """Return the index of the first token of every window of an epoch, (W,) int64."""
        offset = random.integers(min(self.context_len, len(self.tokens) - len(self) * self.context_len))
        return random.permutation(len(self)) * self.context_len + offset

    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        """See ``Split``."""
        if self._windows is None:  # (n - L, L + 1), a view: making it costs more than a small batch
            self._windows = np.lib.stride_tricks.sliding_window_view(self.tokens.array, self.context_len + 1)
        gathered = self._windows[items]  # (B, L + 1), one gather
        input_ids, labels = gathered[:, :-1].astype(np.int64), gathered[:, 1:].astype(np.int64)
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


class ValidationWindows:
    """Consecutive windows over the whole split: every token after the first is a target exactly once.

    Row r has the tokens r·L … r·L + L − 1. The last row is padded with input 0 and label −100. At least two tokens are needed.
    """

    def __init__(self, tokens: TokenArray, context_len: int) -> None:
        self.tokens, self.context_len = tokens, context_len

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.context_len)

    def num_targets(self, row: int) -> int:
        """See ``Task``."""
        return min(self.context_len, len(self.tokens) - 1 - row * self.context_len)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        found = self.tokens.array[row * self.context_len :][: self.context_len + 1].astype(np.int64)
        window = np.pad(found, (0, self.context_len + 1 - len(found)), constant_values=IGNORED)
        return {"input_ids": np.where(window == IGNORED, 0, window)[:-1], "labels": window[1:]}


def load_text(config: TextDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Return the task of language modelling on the text of ``config``.

    Raises:
        ConfigError: the text cannot be read, or is shorter than a row.
    """
    train, val, tokenizer, record = tokenised(config, folder, tokenizer)
    name, splits = name_of(config), record["splits"]
    for count, least, key in ((len(train), config.context_len + 1, "context_len"), (len(val), 2, "val_fraction")):
        if count < least:
            raise ConfigError(f"{name} has {count} tokens of a split, but data.{key}={getattr(config, key)} needs {least}")

    def baselines() -> dict[str, float]:
        """Bits per character and per byte of the validation split's UTF-8 under ``xz -9`` and ``bzip2 -9``."""
        bits = compressed_bits(map(str.encode, read_text(config, splits["train"]["characters"])))
        units = ("character", "byte")
        return {f"{name}_bits_per_{unit}": size / splits["val"][f"{unit}s"] for name, size in bits.items() for unit in units}

    return Task(
        name=name,
        kind="language_model",
        train=TrainingWindows(train, config.context_len),
        val=ValidationWindows(val, config.context_len),
        key_masks={},
        tokenizer=tokenizer,
        model_fields={"vocab_size": tokenizer.vocab_size},
        baselines=baselines,
        bits_per=bits_per(splits["val"]["tokens"], splits["val"]),
        floors=record["floors"] or {},
    )
