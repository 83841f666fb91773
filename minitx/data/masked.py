"""Masked-token prediction (Devlin et al. 2018, arXiv:1810.04805, §3.1) on tokenised text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from minitx.config import IGNORED, ConfigError, MaskedDataConfig
from minitx.data.addressing import Batch
from minitx.data.baselines import unigram_nll
from minitx.data.task import Draw, Ragged, Split, Task, padded
from minitx.data.tokenizers import Tokenizer, require_marks
from minitx.data.tokens import TokenArray, corpus_name, tokenised

MARKS = ("pad", "mask")


class MaskedRows(Split):
    """Consecutive rows of ``context_len`` tokens of a split (the last may be shorter), some of them hidden.

    Of a row's n tokens, max(1, round(n · mask_fraction)) are chosen at random and become labels. Of the chosen ones, 80 % show
    ``mask_id``, 10 % a random token of the text's vocabulary, and 10 % themselves. All other labels are −100.

    Args:
        tokens: the split.
        context_len: tokens of a row.
        mask_fraction: the part of a row's tokens that is asked for.
        mask_id, pad_id: of the vocabulary.
        replacements: (R,) the ids that a random token is drawn from: all but marks.
    """

    def __init__(
        self, tokens: TokenArray, context_len: int, mask_fraction: float, mask_id: int, pad_id: int, replacements: np.ndarray
    ) -> None:
        starts = np.arange(0, len(tokens), context_len)
        self.text = Ragged(tokens, starts, np.minimum(context_len, len(tokens) - starts))
        self.targets = np.maximum(1, np.rint(self.text.lengths * mask_fraction).astype(np.int64))
        self.mask_id, self.pad_id, self.replacements = mask_id, pad_id, replacements

    def __len__(self) -> int:
        return len(self.text)

    def count(self, items: np.ndarray) -> int:
        """See ``Split``."""
        return int(self.targets[items].sum())

    def collate(self, items: np.ndarray, draw: Draw) -> Batch:
        """See ``Split``."""
        ids, lengths = padded([self.text[row] for row in items], self.pad_id), self.text.lengths[items]
        drawn = np.ones((3, *ids.shape))  # which are chosen, what they show, which other token
        for row, length in enumerate(lengths):
            drawn[:, row, :length] = draw(row).random((3, length))
        chosen = drawn[0].argsort(axis=1).argsort(axis=1) < self.targets[items, None]  # (B, L)
        others = self.replacements[(drawn[2] * len(self.replacements)).astype(np.int64) % len(self.replacements)]
        shown = np.select([chosen & (drawn[1] < 0.8), chosen & (drawn[1] < 0.9)], [self.mask_id, others], ids)
        arrays = {"input_ids": shown, "key_mask": np.arange(ids.shape[1]) < lengths[:, None]}
        arrays["labels"] = np.where(chosen, ids, IGNORED)
        return {key: torch.from_numpy(array) for key, array in arrays.items()}


def load_masked(config: MaskedDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """The masked-token task on the text that ``config`` names.

    Raises:
        ConfigError: the text is missing or too short, or the tokenizer has no mask.
    """
    train, val, tokenizer, _ = tokenised(config, folder, tokenizer, MARKS)
    pad_id, mask_id = require_marks(tokenizer, *MARKS)
    vocab_size = tokenizer.vocab_size
    plain = np.setdiff1d(np.arange(vocab_size), list(tokenizer.mark_ids.values()))
    options = (config.context_len, config.mask_fraction, mask_id, pad_id, plain)
    if not len(val) or not len(train):
        raise ConfigError(f"data.val_fraction={config.val_fraction} leaves a split of {corpus_name(config)} without a token")
    return Task(
        name=corpus_name(config),
        kind="masked_lm",
        train=MaskedRows(train, *options),
        val=MaskedRows(val, *options),
        tokenizer=tokenizer,
        model_fields={"vocab_size": vocab_size, "pad_id": pad_id},
        baselines=lambda: {"unigram_perplexity": float(np.exp(unigram_nll(train.array, val.array, vocab_size)))},
    )
