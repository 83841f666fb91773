"""Sequence to sequence: pairs of texts in one vocabulary, and where the pairs come from (dates, verses, files)."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minitx.config import IGNORED, ConfigError, DatesDataConfig, PairsDataConfig
from minitx.data.addressing import Batch
from minitx.data.bible import read_verses
from minitx.data.corpus import check_file
from minitx.data.dates import date_pairs
from minitx.data.examples import Draw, Examples, Ragged, Task, hold_out
from minitx.data.tokenizers import Tokenizer, require_marks, train_tokenizer

log = logging.getLogger(__name__)
MARKS = ("pad", "bos", "eos")
Pairs = list[tuple[str, str]]


class PairExamples(Examples):
    """Pairs as batches for teacher forcing. For a source s_1 … s_n and a target t_1 … t_m:

        input_ids          s_1 … s_n                key_mask          True where real
        decoder_input_ids  bos t_1 … t_m            decoder_key_mask  True where real
        labels             t_1 … t_m eos            −100 behind the end

    Args:
        sources, targets: ids of the texts.
        pad_id, bos_id, eos_id: of the vocabulary that both sides share.
    """

    def __init__(
        self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], *, pad_id: int, bos_id: int, eos_id: int
    ) -> None:
        self.pad_id, self.bos_id = pad_id, bos_id
        self.sources = Ragged.of(sources)
        self.outputs = Ragged.of([np.append(target, eos_id) for target in targets])
        self.lengths, self.targets = self.sources.lengths + self.outputs.lengths, self.outputs.lengths

    def collate(self, index: np.ndarray, draw: Draw) -> Batch:
        """See ``Examples``; nothing is drawn."""
        input_ids, key_mask = self.sources.padded(index, self.pad_id)
        outputs, real = self.outputs.padded(index, self.pad_id)
        shifted = torch.cat([torch.full_like(outputs[:, :1], self.bos_id), outputs[:, :-1]], dim=1)
        return {
            "input_ids": input_ids,
            "key_mask": key_mask,
            "decoder_input_ids": shifted.masked_fill(~real, self.pad_id),
            "decoder_key_mask": real,
            "labels": outputs.masked_fill(~real, IGNORED),
        }


def load_pairs(config: DatesDataConfig | PairsDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """The sequence-to-sequence task that ``config`` names.

    Raises:
        ConfigError: a package is missing, a file does not hold pairs, or no pair is left for a split.
    """
    train, val = _both_splits(config)
    if tokenizer is None:
        texts = (side for pair in train for side in pair)
        if isinstance(config, DatesDataConfig):
            tokenizer = train_tokenizer("char", texts, marks=MARKS)
        else:
            tokenizer = train_tokenizer(config.tokenizer, texts, vocab_size=config.bpe_vocab_size, marks=MARKS)
    pad_id, bos_id, eos_id = require_marks(tokenizer, *MARKS)
    marks = {"pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
    longest = (
        (config.max_tokens,) * 2 if isinstance(config, DatesDataConfig) else (config.max_source_len, config.max_target_len)
    )
    _, train_examples = _examples(train, tokenizer, marks, longest, config)
    kept_val, val_examples = _examples(val, tokenizer, marks, longest, config)
    both = (train_examples, val_examples)
    left_out = len(train) + len(val) - len(train_examples) - len(val_examples)
    if left_out:
        log.info("left out %d of %d pairs: longer than the config allows", left_out, len(train) + len(val))
    return Task(
        kind="seq2seq",
        train=train_examples,
        val=val_examples,
        tokenizer=tokenizer,
        model_fields={
            "vocab_size": tokenizer.vocab_size,
            **marks,
            "max_source_len": max(int(examples.sources.lengths.max()) for examples in both),
            "max_target_len": max(int(examples.outputs.lengths.max()) for examples in both),
        },
        val_examples=kept_val,
        baselines=lambda: {"copy_exact_match": float(np.mean([source == target for source, target in kept_val]))},
    )


def _examples(
    pairs: Pairs, tokenizer: Tokenizer, marks: dict[str, int], longest: tuple[int, int], config: Any
) -> tuple[Pairs, PairExamples]:
    """The pairs that are short enough (an empty side has nothing to say), as texts and as examples."""
    sources, targets = (tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1))
    fits = [0 < len(s) <= longest[0] and 0 < len(t) < longest[1] for s, t in zip(sources, targets, strict=True)]
    kept = np.flatnonzero(fits)
    if not len(kept):
        raise ConfigError(
            f"data.max_source_len={longest[0]} and data.max_target_len={longest[1]} leave none of the {len(pairs)} pairs of "
            f"a split of data={config.name}"
        )
    return [pairs[i] for i in kept], PairExamples([sources[i] for i in kept], [targets[i] for i in kept], **marks)


def _both_splits(config: DatesDataConfig | PairsDataConfig) -> tuple[Pairs, Pairs]:
    if isinstance(config, DatesDataConfig):
        return date_pairs(config)
    if config.name == "verses":
        old, new = (read_verses(version, needed_by="data=verses") for version in ("kjv", "web"))
        shared = [verse for verse in old if verse in new]
        pairs, groups = [(old[verse], new[verse]) for verse in shared], [verse // 1000 for verse in shared]
        return _split(pairs, groups, config, "data=verses")
    pairs = read_pairs(config, "path", "target_path")
    if config.val_path is not None:
        return pairs, read_pairs(config, "val_path", "val_target_path")
    return _split(pairs, [source for source, _ in pairs], config, f"data.path={config.path}")


def _split(pairs: Pairs, groups: Sequence[Any], config: PairsDataConfig, said: str) -> tuple[Pairs, Pairs]:
    try:
        train, val = hold_out(groups, config.val_fraction)
    except ValueError:
        raise ConfigError(
            f"{said} has {len(set(groups))} different sources, too few for a training and a validation split"
        ) from None
    return [pairs[i] for i in train], [pairs[i] for i in val]


def read_pairs(config: PairsDataConfig, key: str, target_key: str) -> Pairs:
    """The pairs of ``config.key`` (two columns) or of ``config.key`` and ``config.target_key`` (lines), both sides not blank.

    Raises:
        ConfigError: a file is missing, empty, no UTF-8, or has no two columns; the files differ in length.
    """
    name, target_name = getattr(config, key), getattr(config, target_key)
    if target_name is None:
        pairs = _columns(config, key)
    else:
        sources, targets = (_read(name, k, _lines) for name, k in ((name, key), (target_name, target_key)))
        if len(sources) != len(targets):
            raise ConfigError(
                f"data.{target_key}={target_name} has {len(targets)} lines, but data.{key}={name} has {len(sources)}: "
                "line n of one must belong to line n of the other"
            )
        pairs = list(zip(sources, targets, strict=True))
    pairs = [(source.strip(), target.strip()) for source, target in pairs if source.strip() and target.strip()]
    if not pairs:
        raise ConfigError(f"data.{key}={name} has no pair without a blank side")
    return pairs


def _columns(config: PairsDataConfig, key: str) -> Pairs:
    """The two columns of a file: csv, or separated by tabs without quotes."""
    name = getattr(config, key)
    is_csv = Path(name).suffix.lower() == ".csv"
    rows = _read(name, key, lambda file: list(csv.reader(file)) if is_csv else [line.split("\t") for line in _lines(file)])
    places, start = [0, 1], 0
    if config.source_column is not None:
        places, start = [], 1
        for column in ("source_column", "target_column"):
            wanted = getattr(config, column)
            if wanted not in rows[0]:
                raise ConfigError(f"data.{column}={wanted} is no column of {name}, which has: {', '.join(rows[0])}")
            places.append(rows[0].index(wanted))
    for number, row in enumerate(rows[start:], start=start + 1):
        if row and any(row) and len(row) <= max(places):
            between = "commas" if is_csv else "tabs"
            raise ConfigError(
                f"data.{key}={name} has {len(row)} columns in row {number}, but two are needed, separated by {between} "
                "(or give the file of the targets: data.target_path=FILE)"
            )
    first, second = places
    return [(row[first], row[second]) for row in rows[start:] if row and any(row)]


def _lines(file: Any) -> list[str]:
    return [line.rstrip("\n") for line in file]


def _read(name: str, key: str, parse: Callable[[Any], Any]) -> Any:
    wanted = "a UTF-8 file of texts, one a line, or of two columns"
    try:
        with check_file(name, key, wanted).open(encoding="utf-8-sig", newline=None) as file:
            return parse(file)
    except UnicodeDecodeError:
        raise ConfigError(f"data.{key}={name} is not UTF-8; convert it to UTF-8") from None
    except csv.Error as error:
        raise ConfigError(f"data.{key}={name} is no csv file: {error}") from None
