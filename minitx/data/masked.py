"""Masked-token prediction (Devlin et al. 2018, arXiv:1810.04805, §3.1) on tokenised text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from minitx.config import IGNORED, ConfigError, MaskedDataConfig
from minitx.data.addressing import Batch
from minitx.data.baselines import unigram_nll
from minitx.data.examples import Draw, Examples, Ragged, Task
from minitx.data.tokenizers import Tokenizer, require_marks
from minitx.data.tokens import TokenArray, tokenised

MARKS = ("pad", "mask")


class MaskedExamples(Examples):
    """Consecutive rows of ``context_len`` tokens of a split (the last may be shorter), some of them hidden.

    Of a row's n tokens max(1, round(n · mask_fraction)) are chosen at random and become labels; of the chosen ones 80 %
    show ``mask_id``, 10 % a random token of the text's vocabulary and 10 % stay. All other labels are −100.

    Args:
        tokens: the split.
        context_len: tokens a row.
        mask_fraction: of the tokens of a row that are asked for.
        mask_id, pad_id: of the vocabulary.
        replacements: (R,) the ids that a random token is drawn from: all but marks.
    """

    def __init__(
        self,
        tokens: TokenArray,
        *,
        context_len: int,
        mask_fraction: float,
        mask_id: int,
        pad_id: int,
        replacements: np.ndarray,
    ) -> None:
        starts = np.arange(0, len(tokens), context_len)
        self.lengths = np.minimum(context_len, len(tokens) - starts)
        self.targets = np.maximum(1, np.rint(self.lengths * mask_fraction).astype(np.int64))
        self.text = Ragged(tokens, starts, self.lengths)
        self.mask_id, self.pad_id, self.replacements = mask_id, pad_id, replacements

    def collate(self, index: np.ndarray, draw: Draw) -> Batch:
        """See ``Examples``."""
        ids, key_mask = self.text.padded(index, self.pad_id)
        drawn = np.ones((3, *ids.shape))  # which are chosen, what they show, which other token
        for row, length in enumerate(self.lengths[index]):
            drawn[:, row, :length] = draw(row).random((3, length))
        chosen = drawn[0].argsort(axis=1).argsort(axis=1) < self.targets[index, None]  # (B, L)
        others = self.replacements[(drawn[2] * len(self.replacements)).astype(np.int64) % len(self.replacements)]
        shown = np.select([chosen & (drawn[1] < 0.8), chosen & (drawn[1] < 0.9)], [self.mask_id, others], ids.numpy())
        return {
            "input_ids": torch.from_numpy(shown),
            "key_mask": key_mask,
            "labels": ids.masked_fill(torch.from_numpy(~chosen), IGNORED),
        }


def load_masked(config: MaskedDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """The masked-token task on the text that ``config`` names.

    Raises:
        ConfigError: the text is missing or too short, or the tokenizer has no mask.
    """
    text = tokenised(config, folder, tokenizer, MARKS)
    pad_id, mask_id = require_marks(text.tokenizer, *MARKS)
    vocab_size = text.tokenizer.vocab_size
    options: dict[str, Any] = {
        "context_len": config.context_len,
        "mask_fraction": config.mask_fraction,
        "mask_id": mask_id,
        "pad_id": pad_id,
        "replacements": np.setdiff1d(np.arange(vocab_size), list(text.tokenizer.mark_ids.values())),
    }
    if not len(text.val) or not len(text.train):
        raise ConfigError(f"data.val_fraction={config.val_fraction} leaves a split of data=masked without a token")
    return Task(
        kind="masked_lm",
        train=MaskedExamples(text.train, **options),
        val=MaskedExamples(text.val, **options),
        tokenizer=text.tokenizer,
        model_fields={"vocab_size": vocab_size, "pad_id": pad_id},
        baselines=lambda: {
            "unigram_perplexity": float(np.exp(unigram_nll(text.train.array, text.val.array, vocab_size))),
        },
    )
