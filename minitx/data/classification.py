"""Classification of texts and of images, from any table that ``datasets`` reads, and scikit-learn's digits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minitx.config import ConfigError
from minitx.config.packages import package
from minitx.config.schema import Count, Fraction, Natural, read, require
from minitx.data.baselines import bag_of_words_accuracy, majority_accuracy
from minitx.data.seeding import VALIDATION_SEED, generator
from minitx.data.splits import Split
from minitx.data.tables import checksum_of, column_of, divided, hold_out, labels_of, load_tables, share_of, texts_of
from minitx.data.task import Task, VocabSize
from minitx.data.tokenizer import Tokenizer, count_unknown, require_marks
from minitx.data.tokenizer_choice import find_or_train_tokenizer

log = logging.getLogger(__name__)
EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""The PIL modes that can be converted to grey or RGB. The other modes have floats, or 16 or 32 bits."""

Texts = Sequence[tuple[str, ...]]
Examples = tuple[Texts, np.ndarray]
"""The one or two texts of each row, and its label."""

Labelled = tuple[Any, np.ndarray]
"""Images, and their labels."""


# --- texts


def classify(
    *,
    path: str,
    val_path: str | None = None,
    subset: str | None = None,
    split: str = "train",
    val_split: str | None = None,
    val_fraction: Fraction = 0.1,
    text_column: str = "text",
    second_column: str | None = None,
    label_column: str = "label",
    tokenizer: str | Tokenizer = "bpe",
    bpe_vocab_size: VocabSize = 4096,
    max_len: Count = 128,
    bucket: bool = True,
) -> Task:
    """Classification of the texts of a table. A row is the class token, if the tokenizer has one, and the text.

    Args:
        path, val_path, subset, split, val_split: see ``load_tables``.
        val_fraction: share of the distinct texts for validation.
        text_column: the column of texts.
        second_column: a column of second texts, after an end mark (else another class token); ``null``: none.
        label_column: the column of labels (numbers or words).
        tokenizer, bpe_vocab_size: see ``find_or_train_tokenizer``.
        max_len: longest row in tokens, with the class token. Longer texts are truncated.
        bucket: put rows of similar length into the same batch.

    Raises:
        ConfigError: a file or a column is missing, or a split would be empty.
    """
    columns = {"text_column": text_column} | ({"second_column": second_column} if second_column else {})

    def texts(table: Any) -> Texts:
        return list(zip(*(texts_of(table, column, key) for key, column in columns.items()), strict=True))

    tables = load_tables(path, val_path, subset, split, val_split, texts=[*columns.values(), label_column])
    texts_of_splits = [*map(texts, tables)]
    # before the split: a small validation split may have only numbers as labels
    labels, names = labels_of(tables, label_column)
    if len(tables) == 1:
        (all_texts,), (all_labels,) = texts_of_splits, labels
        splits = hold_out(all_texts, val_fraction)
        texts_of_splits = [[all_texts[i] for i in rows] for rows in splits]
        labels = [all_labels[rows] for rows in splits]
    (train, blank), (val, blank_val) = (
        _with_text(rows, of_rows, text_column, path) for rows, of_rows in zip(texts_of_splits, labels, strict=True)
    )
    tokenizer = find_or_train_tokenizer(tokenizer, bpe_vocab_size, (text for row in train[0] for text in row), ("pad", "cls"))
    marks = tokenizer.mark_ids
    only_end = "pad" not in marks and "eos" in marks  # with a decoder's tokenizer, the end mark is used for padding
    pad_id = marks["eos"] if only_end else require_marks(tokenizer, "pad")[0]
    require(
        not second_column or "eos" in marks or "cls" in marks,
        f"data.second_column={second_column} needs a tokenizer with an end mark or a class token to put between texts",
    )
    words = [[" ".join(row) for row in rows] for rows, _ in (train, val)]
    (rows, cut), (val_rows, cut_val) = (_text_rows(part, tokenizer, max_len) for part in (train, val))
    count_unknown(tokenizer, (row["input_ids"] for row in rows), f"data.path={path}")
    return Task(
        name=f"data.path={path}",
        kind="classify",
        train=rows,
        val=val_rows,
        left_out={"train": [*blank, *cut], "val": [*blank_val, *cut_val]},
        longest=max_len,
        pad={"input_ids": pad_id},
        bucket=bucket,
        tokenizer=tokenizer,
        model_fields={"vocab_size": tokenizer.vocab_size, "num_labels": len(names), "pad_id": pad_id},
        val_examples=[(text, names[label]) for text, label in zip(words[1], val[1], strict=True)],
        label_names=names,
        baselines=lambda: {
            "majority_accuracy": majority_accuracy(train[1], val[1]),
            "bag_of_words_accuracy": bag_of_words_accuracy(words[0], train[1], words[1], val[1]),
        },
        checksum=checksum_of(train[0], train[1].tolist(), val[0], val[1].tolist(), names),
    )


def _text_rows(examples: Examples, tokenizer: Tokenizer, max_len: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a split (class token if any, first text, separator, second text), and sentences about truncated rows.

    The separator is the end mark, or the class token if the tokenizer has no end mark.
    """
    texts, labels = examples
    marks = tokenizer.mark_ids
    first = [[marks["cls"]]] if "cls" in marks else []
    rows: list[list[Any]] = [first.copy() for _ in texts]
    for place, side in enumerate(zip(*texts, strict=True)):
        for row, ids in zip(rows, tokenizer.encode_batch(side), strict=True):
            row += [[marks.get("eos", marks.get("cls"))], ids] if place else [ids]
    whole = [np.concatenate(row).astype(np.int64) for row in rows]
    cut = share_of(sum(len(ids) > max_len for ids in whole), len(whole), f"rows are cut at data.max_len={max_len}")
    rows_and_labels = zip(whole, labels.tolist(), strict=True)
    return [{"input_ids": ids[:max_len], "labels": label} for ids, label in rows_and_labels], cut


def _with_text(texts: Texts, labels: np.ndarray, column: str, path: str) -> tuple[Examples, list[str]]:
    """The rows of a split that have a text, and a sentence about rows without text."""
    kept = np.array([any(row) for row in texts])
    require(bool(kept.any()), f"data.text_column={column} has no text in a split of data.path={path}")
    examples = [row for row, keep in zip(texts, kept, strict=True) if keep], labels[kept]
    return examples, share_of(int((~kept).sum()), len(kept), "rows are left out: without text")


# --- images


def digits(*, val_fraction: Fraction = 0.2, shift: Natural = 1) -> Task:
    """Classification of images: scikit-learn's digits, 8×8.

    Args:
        val_fraction: share of every class for validation.
        shift: shift each training image by a random number of pixels, at most this many.

    Raises:
        ConfigError: scikit-learn is missing.
    """
    bundle = package("sklearn.datasets", "data=digits").load_digits()
    pixels, labels = bundle.images[:, None].astype(np.uint8), bundle.target
    train, val = stratified(labels, val_fraction)
    splits = (pixels[train], labels[train]), (pixels[val], labels[val])
    return _image_task("data=digits", *splits, tuple("0123456789"), largest=16, shift=shift)


def images(
    *,
    path: str,
    val_path: str | None = None,
    subset: str | None = None,
    split: str = "train",
    val_split: str | None = None,
    val_fraction: Fraction = 0.2,
    image_column: str = "image",
    label_column: str = "label",
    image_size: Count | None = None,
    shift: Natural = 1,
) -> Task:
    """Classification of images: a folder with one folder per label, or a table. Images are decoded when they are needed.

    Args:
        path, val_path, subset, split, val_split: see ``load_tables``.
        val_fraction: share of every class for validation.
        image_column: the column of images.
        label_column: the column of labels (numbers or words).
        image_size: resize images to squares with sides of this many pixels; ``null``: do not resize.
        shift: shift each training image by a random number of pixels, at most this many.

    Raises:
        ConfigError: the data or a column is missing, or images are not square.
    """
    loaded = load_tables(path, val_path, subset, split, val_split)
    tables = divided(loaded, lambda table: stratified(labels_of([table], label_column)[0][0], val_fraction))
    (labels, val_labels), names = labels_of(tables, label_column)
    pictures = Pictures(tables[0], image_column, image_size)
    val = Pictures(tables[1], image_column, image_size, pictures), val_labels
    task = _image_task(f"data.path={path}", (pictures, labels), val, names, largest=255, shift=shift)
    # without the pixels, because reading all of them would take long
    return replace(task, checksum=checksum_of(labels.tolist(), val_labels.tolist(), names))


def _image_task(name: str, train: Labelled, val: Labelled, names: tuple[str, ...], *, largest: int, shift: int) -> Task:
    channels, height, width = train[0].shape[-3:]
    require(
        height == width, f"{name} must have square images, got {height}x{width} pixels: set data.image_size=SIZE to resize them"
    )
    require(shift < height, f"data.shift={shift} must be less than the {height} pixels of an image")
    return Task(
        name=name,
        kind="classify",
        train=LabelledImages(*train, largest=largest, shift=shift),
        val=LabelledImages(*val, largest=largest),
        model_fields={"num_labels": len(names), "image_size": height, "num_channels": channels},
        label_names=names,
        baselines=lambda: {"majority_accuracy": majority_accuracy(train[1], val[1])},
    )


class LabelledImages:
    """Images with labels: ``pixel_values`` (C, H, W) float32 in [0, 1], ``labels`` ().

    Args:
        pixels: an array or ``Pictures``. ``pixels[i]`` is (C, H, W) uint8.
        labels: the labels (N,).
        largest: the largest pixel value. It is mapped to 1.
        shift: shift an image by a random number of pixels, at most this many, along both axes, each time it is read. New pixels
            are 0.
    """

    def __init__(self, pixels: np.ndarray | Pictures, labels: np.ndarray, *, largest: int, shift: int = 0) -> None:
        self.pixels, self.labels, self.largest, self.shift = pixels, labels.astype(np.int64), largest, shift

    def __len__(self) -> int:
        return len(self.labels)

    def num_targets(self, row: int) -> int:
        """See ``Task``."""
        return 1

    def row(self, row: int, random: np.random.Generator) -> dict[str, Any]:
        """See ``Task``."""
        pixels, margin = self.pixels[row], self.shift
        if margin:
            height, width = pixels.shape[1:]
            framed = np.pad(pixels, ((0, 0), (margin, margin), (margin, margin)))
            y, x = random.integers(2 * margin + 1, size=2)
            pixels = framed[:, y : y + height, x : x + width]
        return {"pixel_values": pixels.astype(np.float32) / np.float32(self.largest), "labels": self.labels[row]}


class Pictures:
    """The images of a table, (C, H, W) uint8. An image is decoded when it is read.

    Args:
        table: a ``datasets.Dataset``.
        column: the column of images.
        size: resize images to a square with sides of this many pixels. ``None``: do not resize.
        like: other images that determine the size and the number of channels. ``None``: the first image determines them.
    """

    _has_warned = False

    def __init__(self, table: Any, column: str, size: int | None, like: Pictures | None = None) -> None:
        self.table, self.column, self.size = table, column_of(table, column, "image_column"), size
        self.mode: str = like.mode if like else "L" if self._picture(0).mode in ("1", "L") else "RGB"
        self.shape: tuple[int, ...] = like.shape if like else self._pixels(0).shape

    def __getitem__(self, row: int) -> np.ndarray:
        pixels = self._pixels(row)
        if pixels.shape != self.shape:
            (_, h, w), (_, h2, w2) = self.shape, pixels.shape
            raise ConfigError(
                f"data.image_size=null: images have {h}x{w} and {h2}x{w2} pixels; set data.image_size=SIZE to resize them"
            )
        return pixels

    def _pixels(self, row: int) -> np.ndarray:
        picture = self._picture(row)
        if self.mode == "L" and picture.mode not in ("1", "L", "LA") and not self._has_warned:
            log.warning("data.image_column=%s: the first image is grey, so images with colours become grey, too", self.column)
            self._has_warned = True
        image = picture.convert(self.mode)
        image = image if self.size is None else image.resize((self.size, self.size))
        return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)

    def _picture(self, row: int) -> Any:
        try:
            image = self.table[row][self.column]
        except OSError as error:  # raised by PIL
            raise ConfigError(f"data.image_column={self.column}: image {row + 1} of a split cannot be read: {error}") from None
        if getattr(image, "mode", None) not in EIGHT_BITS:
            got = f"an image of mode {image.mode}" if hasattr(image, "mode") else type(image).__name__
            raise ConfigError(f"data.image_column={self.column} must have images with 8 bits per channel, got {got}")
        return image


def stratified(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of both splits. A ``fraction`` of each label's rows (rounded) is held out. The run's seed does not matter.

    Raises:
        ConfigError: ``fraction`` is not in (0, 1), or a split would be empty.
    """
    fraction = read(Fraction, fraction, "data.val_fraction")
    random = generator(VALIDATION_SEED, "stratified")
    train, val = [], []
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        count = round(fraction * len(rows))
        val.append(rows[:count])
        train.append(rows[count:])
    splits = np.sort(np.concatenate(train)), random.permutation(np.concatenate(val))
    require(all(map(len, splits)), f"data.val_fraction={fraction} leaves a split of {len(labels)} images empty")
    return splits


# --- labels numbered as in a trained head


def numbered_as(task: Task, names: Sequence[str]) -> Task:
    """Return the task with its labels numbered as in ``names``, the labels of a trained head.

    Labels have equal names, or names that differ only in case if this is unambiguous. Whole numbers from 0 on number the labels of a
    head with other names. Names such as LABEL_0 do not name a label.

    Raises:
        ConfigError: a label of the data is not among ``names``, or is a larger number; two labels would become one; or a split
            makes batches of its own (``Split``) and numbers them otherwise.
    """
    ours = task.label_names
    no_names = list(names) == [f"LABEL_{number}" for number in range(len(names))]
    if all(map(str.isdecimal, ours)) and not any(map(str.isdecimal, names)) and (no_names or "0" in ours):
        numbers = [*map(int, ours)]
    elif no_names:
        numbers = [*range(len(ours))]
    else:
        numbers = [_place_of(name, names) for name in ours]
    if max(numbers) >= len(names) or len({*numbers}) < len(ours):
        raise ConfigError(
            f"{task.name} has {len(ours)} labels ({', '.join(ours)}), but the trained head has {len(names)} ({', '.join(names)}): "
            "rename the labels, or make a new head with model=hf model.path=FOLDER model.new_head=true"
        )
    own_batches = any(isinstance(split, Split) for split in (task.train, task.val, task.test))
    require(
        numbers == [*range(len(ours))] or not own_batches,
        f"{task.name}: a Split makes batches of its own, so number its labels as the trained head does: {', '.join(names)}",
    )
    label_names = tuple(ours if no_names and len(ours) == len(names) else names)
    named = {label: label_names[number] for label, number in zip(ours, numbers, strict=True)}
    return replace(
        task,
        label_names=label_names,
        label_numbers=[numbers[number] for number in task.label_numbers or range(len(ours))],
        model_fields={**task.model_fields, "num_labels": len(names)},
        val_examples=[(text, named[label]) for text, label in task.val_examples],
        test_examples=[(text, named[label]) for text, label in task.test_examples],
    )


def _place_of(name: str, names: Sequence[str]) -> int:
    """The place of a name in ``names``, or their number if it is not there, or if several differ from it in case alone."""
    places = [place for place, other in enumerate(names) if other.casefold() == name.casefold()]
    exact = [place for place in places if names[place] == name]
    return (exact or places)[0] if len(exact or places) == 1 else len(names)
