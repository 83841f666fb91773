"""Language modelling on tokenised text: windows of ``context_len`` tokens as addressed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minitx.config import IGNORED, ConfigError, TextDataConfig
from minitx.data.addressing import Batch, EpochSource, FiniteSource
from minitx.data.baselines import compressed_bits
from minitx.data.corpus import find_corpus
from minitx.data.examples import Task
from minitx.data.tokenizers import Tokenizer
from minitx.data.tokens import TokenArray, bits_per, split_chunks, tokenised


class TextSource(EpochSource):
    """Training windows, epoch by epoch.

    Epoch e cuts the text into W windows of L = ``context_len`` tokens (each with the token that follows it) from a
    random offset below L on, and gives them in random order; both depend on (seed, e) alone. W = max(1, ⌊(n − L) / L⌋) for n tokens, so that every offset fits and W is the same in every
    epoch. A permutation takes 8 bytes a window.

    Args:
        tokens: the training split.
        context_len: L, the tokens of a row.
        batch_size: rows of the global batch.
        seed: of the order.
        accumulate, world: how a global batch is sliced.

    Raises:
        ValueError: fewer than L + 1 tokens.
    """

    def __init__(
        self, tokens: TokenArray, *, context_len: int, batch_size: int, seed: int, accumulate: int = 1, world: int = 1
    ) -> None:
        if len(tokens) <= context_len:
            raise ValueError(f"context_len={context_len} needs at least {context_len + 1} tokens, got {len(tokens)}")
        windows = max(1, (len(tokens) - context_len) // context_len)
        super().__init__(windows, batch_size=batch_size, seed=seed, accumulate=accumulate, world=world)
        self.tokens, self.context_len = tokens, context_len
        self._windows: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_windows": None}  # a pickled view would carry the tokens themselves

    def batch(self, step: int, rows: range) -> Batch:
        """See ``BatchSource``; no label is ignored."""
        starts = self.items(step, rows)
        if self._windows is None:  # (n - L, L + 1), a view: making it costs more than a small batch
            self._windows = np.lib.stride_tricks.sliding_window_view(self.tokens.array, self.context_len + 1)
        gathered = self._windows[starts]  # (B, L + 1), one gather
        return {
            "input_ids": torch.from_numpy(gathered[:, :-1].astype(np.int64)),
            "labels": torch.from_numpy(gathered[:, 1:].astype(np.int64)),
            "num_targets": torch.tensor(self.batch_size * self.context_len),
        }

    def order(self, epoch: int, random: np.random.Generator) -> np.ndarray:
        """First token of every window of an epoch, (W,) int64."""
        offset = random.integers(min(self.context_len, len(self.tokens) - self.epoch_len * self.context_len))
        return random.permutation(self.epoch_len) * self.context_len + offset


class TextValidation(FiniteSource):
    """Consecutive windows over the whole validation split: every token after the first is a target exactly once.

    Row r holds tokens r·L … r·L + L − 1; what the last row lacks is input 0 and label −100.

    Args:
        tokens: the validation split.
        context_len: L.
        batch_size: rows of a batch over all ranks.
        world: ranks.

    Raises:
        ValueError: fewer than two tokens.
    """

    def __init__(self, tokens: TokenArray, *, context_len: int, batch_size: int, world: int = 1) -> None:
        super().__init__(batch_size, world=world, split="val")
        if len(tokens) < 2:
            raise ValueError(f"validation needs at least 2 tokens, got {len(tokens)}")
        self.tokens, self.context_len = tokens, context_len
        self.num_rows = -(-(len(tokens) - 1) // context_len)

    def rows(self, rows: range) -> Batch:
        """See ``FiniteSource``."""
        last = len(self.tokens) - 1
        index = np.arange(rows.start, rows.stop)[:, None] * self.context_len + np.arange(self.context_len + 1)
        gathered = self.tokens.array[np.minimum(index, last)].astype(np.int64)  # (B, L + 1)
        return {
            "input_ids": torch.from_numpy(np.where(index[:, :-1] <= last, gathered[:, :-1], 0)),
            "labels": torch.from_numpy(np.where(index[:, 1:] <= last, gathered[:, 1:], IGNORED)),
            "num_targets": self.count(rows),
        }

    def count(self, rows: range) -> Tensor:
        """See ``FiniteSource``."""
        last = len(self.tokens) - 1
        return torch.tensor(min(rows.stop * self.context_len, last) - rows.start * self.context_len)


def load_text(config: TextDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Language modelling on the text that ``config`` names.

    Raises:
        ConfigError: the text cannot be read, or is shorter than a row.
    """
    text = tokenised(config, folder, tokenizer)
    said = f"data.path={config.path}" if config.name == "text" else f"data={config.name}"
    wanted = config.context_len + 1
    if len(text.train) < wanted:
        raise ConfigError(
            f"{said} has {len(text.train)} training tokens, but data.context_len={config.context_len} needs at least {wanted}"
        )
    if len(text.val) < 2:
        raise ConfigError(
            f"{said} has {len(text.val)} validation tokens with data.val_fraction={config.val_fraction}, "
            "but at least 2 are needed"
        )
    splits = text.record["splits"]

    def baselines() -> dict[str, float]:
        """Bits per character and per byte of the validation split's UTF-8 under ``xz -9`` and ``bzip2 -9``."""
        parts = split_chunks(find_corpus(config).normalised(folder), splits["train"]["characters"])
        bits = compressed_bits(chunk.encode() for split, chunk in parts if split == "val")
        units = ("character", "byte")
        return {f"{name}_bits_per_{unit}": size / splits["val"][f"{unit}s"] for name, size in bits.items() for unit in units}

    return Task(
        kind="language_model",
        train=text.train,
        val=text.val,
        tokenizer=text.tokenizer,
        model_fields={"vocab_size": text.tokenizer.vocab_size},
        baselines=baselines,
        bits_per=bits_per(splits["val"]["tokens"], splits["val"]),
        floors=text.record["floors"] or {},
    )
