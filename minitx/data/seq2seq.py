"""Sequence to sequence: pairs of texts in one vocabulary, from dates, a table or two files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import ConfigError, DatesDataConfig, PairsDataConfig
from minitx.data.dates import date_pairs
from minitx.data.tables import load_splits, load_table, texts_of
from minitx.data.task import Task, hold_out, name_of, tokenizer_of
from minitx.data.tokenizers import Tokenizer, require_marks, train_tokenizer

log = logging.getLogger(__name__)
MARKS = ("pad", "bos", "eos")
Pairs = list[tuple[str, str]]


def load_pairs(config: DatesDataConfig | PairsDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Return the sequence-to-sequence task of ``config``. For a source s_1 … s_n and a target t_1 … t_m:

        input_ids          s_1 … s_n                key_mask          True where real
        decoder_input_ids  bos t_1 … t_m            decoder_key_mask  True where real
        labels             t_1 … t_m eos            −100 behind the end

    Raises:
        ConfigError: a package is missing, a file has no pairs, or a split has no pairs.
    """
    pairs = _both_splits(config)
    texts = (side for pair in pairs[0] for side in pair)
    if isinstance(config, DatesDataConfig):
        tokenizer = tokenizer or train_tokenizer("char", texts, vocab_size=0, marks=MARKS)
        longest = (config.max_tokens, config.max_tokens)
    else:
        tokenizer = tokenizer_of(config, tokenizer, texts, MARKS)
        longest = (config.max_source_len, config.max_target_len)
    pad_id, bos_id, eos_id = require_marks(tokenizer, *MARKS)
    (_, train), (kept_val, val) = (_rows(part, tokenizer, longest, config.name) for part in pairs)
    count, left_out = len(pairs[0]) + len(pairs[1]), len(pairs[0]) + len(pairs[1]) - len(train) - len(val)
    if left_out:
        log.info("left out %d of %d pairs: longer than the config allows", left_out, count)
    fields = {"vocab_size": tokenizer.vocab_size, "pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id}
    for name, key in (("max_source_len", "input_ids"), ("max_target_len", "labels")):
        fields[name] = max(len(row[key]) for row in [*train, *val])
    return Task(
        name=name_of(config),
        kind="seq2seq",
        train=train,
        val=val,
        pad={"input_ids": pad_id, "decoder_input_ids": pad_id},
        bucket=config.bucket,
        tokenizer=tokenizer,
        model_fields=fields,
        val_examples=kept_val,
        baselines=lambda: {"copy_exact_match": float(np.mean([source == target for source, target in kept_val]))},
    )


def _rows(pairs: Pairs, tokenizer: Tokenizer, longest: tuple[int, int], name: str) -> tuple[Pairs, list[dict[str, np.ndarray]]]:
    """The pairs that are short enough and have no empty side, as texts and as rows."""
    bos, eos = ([tokenizer.mark_ids[mark]] for mark in ("bos", "eos"))
    kept, rows = [], []
    sides = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side in (0, 1)]
    for pair, s, t in zip(pairs, *sides, strict=True):
        if 0 < len(s) <= longest[0] and 0 < len(t) < longest[1]:
            kept.append(pair)
            rows.append({"input_ids": s, "decoder_input_ids": np.append(bos, t), "labels": np.append(t, eos)})
    if not kept:
        said = f"data.max_source_len={longest[0]} and data.max_target_len={longest[1]} leave none of the {len(pairs)} pairs"
        raise ConfigError(f"{said} of a split of data={name}")
    return kept, rows


def _both_splits(config: DatesDataConfig | PairsDataConfig) -> tuple[Pairs, Pairs]:
    if isinstance(config, DatesDataConfig):
        return date_pairs(config)
    return _files(config) if config.target_path else _columns(config)


def _columns(config: PairsDataConfig) -> tuple[Pairs, Pairs]:
    """Two columns of a table: those with a name, or the first two."""
    header = config.source_column is not None
    kind = "csv" if Path(str(config.path)).suffix.lower() == ".txt" else None
    options = {"texts": [config.source_column, config.target_column] if header else [0, 1], "header": header, "kind": kind}

    def read(table: Any) -> list[list[str]]:
        names = [config.source_column, config.target_column] if header else table.column_names[:2]
        if len(names) < 2:
            said = f"data.path={config.path} has one column, but two are needed, separated by tabs (in .csv by commas)"
            raise ConfigError(f"{said}, or data.target_path=FILE with the targets")
        return [texts_of(table, name, f"{side}_column") for name, side in zip(names, ("source", "target"), strict=True)]

    train, val = load_splits(config, lambda table: hold_out(read(table)[0], config.val_fraction), **options)
    return _pairs(read(train), config), _pairs(read(val), config)


def _files(config: PairsDataConfig) -> tuple[Pairs, Pairs]:
    """The lines of two files that belong together."""

    def read(*keys: str) -> Pairs:
        sides = [texts_of(load_table(config, key, kind="text"), "text", key) for key in keys]
        if len(sides[0]) != len(sides[1]):
            lines = f"{len(sides[1])} lines, but data.{keys[0]} has {len(sides[0])}"
            raise ConfigError(f"data.{keys[1]}={getattr(config, keys[1])} has {lines}: line n belongs to line n")
        return _pairs(sides, config)

    pairs = read("path", "target_path")
    if config.val_path is not None:
        return pairs, read("val_path", "val_target_path")
    train, val = hold_out([source for source, _ in pairs], config.val_fraction)
    return [pairs[i] for i in train], [pairs[i] for i in val]


def _pairs(sides: Sequence[Sequence[str]], config: PairsDataConfig) -> Pairs:
    pairs = [(source, target) for source, target in zip(*sides, strict=True) if source and target]
    if not pairs:
        raise ConfigError(f"data.path={config.path} has no pair without a blank side")
    if len(pairs) < len(sides[0]):
        log.info(
            "left out %d of %d pairs of data.path=%s: a side is blank", len(sides[0]) - len(pairs), len(sides[0]), config.path
        )
    return pairs
