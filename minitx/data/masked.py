"""Masked-token prediction (Devlin et al. 2018, arXiv:1810.04805, §3.1) on tokenised text."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minitx.config import IGNORED, ConfigError, MaskedDataConfig
from minitx.data.baselines import unigram_nll
from minitx.data.task import Task, name_of
from minitx.data.tokenizers import Tokenizer, require_marks
from minitx.data.tokens import TokenArray, tokenised

MARKS = ("pad", "mask")


class MaskedRows:
    """Consecutive rows of ``context_len`` tokens of a split, with some tokens masked. The last row may be shorter.

    Of a row's n tokens, max(1, round(n · mask_fraction)) are chosen at random and become labels. Of these, 80 % are replaced by
    ``mask_id``, 10 % by a random token, and 10 % are unchanged. All other labels are −100.

    Args:
        tokens: the tokens of the split.
        context_len: tokens in a row.
        mask_fraction: the part of a row's tokens to predict.
        mask_id: the id of the mask.
        replacements: (R,), the ids for random tokens: all but marks.
    """

    def __init__(
        self, tokens: TokenArray, context_len: int, mask_fraction: float, mask_id: int, replacements: np.ndarray
    ) -> None:
        self.tokens, self.context_len, self.mask_fraction = tokens, context_len, mask_fraction
        self.mask_id, self.replacements = mask_id, replacements

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.context_len)

    def num_targets(self, row: int) -> int:
        """See ``Task``."""
        length = min(self.context_len, len(self.tokens) - row * self.context_len)
        return max(1, round(length * self.mask_fraction))

    def row(self, row: int, random: np.random.Generator) -> dict[str, np.ndarray]:
        """See ``Task``."""
        ids = self.tokens.array[row * self.context_len :][: self.context_len].astype(np.int64)
        order, shown_as, other = random.random((3, len(ids)))
        chosen = order.argsort().argsort() < self.num_targets(row)
        others = self.replacements[(other * len(self.replacements)).astype(np.int64)]
        input_ids = np.select([chosen & (shown_as < 0.8), chosen & (shown_as < 0.9)], [self.mask_id, others], ids)
        return {"input_ids": input_ids, "labels": np.where(chosen, ids, IGNORED)}


def load_masked(config: MaskedDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Return the masked-token task on the text of ``config``.

    Raises:
        ConfigError: the text is missing or too short, or the tokenizer has no mask.
    """
    train, val, tokenizer, _ = tokenised(config, folder, tokenizer, MARKS)
    pad_id, mask_id = require_marks(tokenizer, *MARKS)
    vocab_size = tokenizer.vocab_size
    plain = np.setdiff1d(np.arange(vocab_size), list(tokenizer.mark_ids.values()))
    options = (config.context_len, config.mask_fraction, mask_id, plain)
    if not len(val) or not len(train):
        raise ConfigError(f"data.val_fraction={config.val_fraction} leaves a split of {name_of(config)} without a token")
    return Task(
        name=name_of(config),
        kind="masked_lm",
        train=MaskedRows(train, *options),
        val=MaskedRows(val, *options),
        pad={"input_ids": pad_id},
        tokenizer=tokenizer,
        model_fields={"vocab_size": vocab_size, "pad_id": pad_id},
        baselines=lambda: {"unigram_perplexity": float(np.exp(unigram_nll(train.array, val.array, vocab_size)))},
    )
