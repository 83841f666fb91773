"""Classification of images: scikit-learn's digits, and image data sets through ``datasets``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from minitx.config import ConfigError, DigitsDataConfig, ImageDataConfig
from minitx.data.addressing import VALIDATION_SEED, generator
from minitx.data.baselines import majority_accuracy
from minitx.data.tables import column_of, labels_of, load_splits
from minitx.data.task import Task, name_of
from minitx.data.tokenizers import Tokenizer

EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""The modes of PIL that can be converted to grey or RGB. The others have floats or 16 and 32 bits."""


class LabelledImages:
    """Images with a label each: ``pixel_values`` (C, H, W) float32 in [0, 1], ``labels`` ().

    Args:
        pixels: an array or ``Pictures``. ``pixels[i]`` is (C, H, W) uint8.
        labels: the labels (N,).
        largest: the largest pixel value, which becomes 1.
        shift: move an image by a random number of pixels, up to this one, in both directions, each time it is read. New pixels
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
            (height, width), framed = pixels.shape[1:], np.pad(pixels, ((0, 0), (margin, margin), (margin, margin)))
            y, x = random.integers(2 * margin + 1, size=2)
            pixels = framed[:, y : y + height, x : x + width]
        return {"pixel_values": pixels.astype(np.float32) / np.float32(self.largest), "labels": self.labels[row]}


class Pictures:
    """The images of a table, (C, H, W) uint8. An image is decoded when it is read.

    Args:
        table: a ``datasets.Dataset``.
        column: the column of images.
        size: resize images to a square with sides of this many pixels. ``None``: do not resize.
        like: other images, whose size and number of channels are used. ``None``: those of the first image.
    """

    def __init__(self, table: Any, column: str, size: int | None, like: Pictures | None = None) -> None:
        self.table, self.column, self.size = table, column_of(table, column, "image_column"), size
        self.mode: str = like.mode if like else "L" if self._picture(0).mode in ("1", "L") else "RGB"
        self.shape: tuple[int, ...] = like.shape if like else self._pixels(0).shape

    def __getitem__(self, row: int) -> np.ndarray:
        pixels = self._pixels(row)
        if pixels.shape != self.shape:
            (_, h, w), (_, h2, w2) = self.shape, pixels.shape
            raise ConfigError(f"data.image_size=null: images have {h}x{w} and {h2}x{w2} pixels; give a size to resize them to")
        return pixels

    def _pixels(self, row: int) -> np.ndarray:
        image = self._picture(row).convert(self.mode)
        image = image if self.size is None else image.resize((self.size, self.size))
        return np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)

    def _picture(self, row: int) -> Any:
        image = self.table[row][self.column]
        if getattr(image, "mode", None) not in EIGHT_BITS:
            found = f"an image of mode {image.mode}" if hasattr(image, "mode") else type(image).__name__
            raise ConfigError(f"data.image_column={self.column} must have images of 8 bits a channel, got {found}")
        return image


def load_images(config: DigitsDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """Return the classification task of ``config``, with a part of every class (or ``val_split``) held out for validation.

    Raises:
        ConfigError: a package, the data or a column is missing, or images are not square.
    """
    read, largest = (_tables, 255) if isinstance(config, ImageDataConfig) else (_digits, 16)
    train_pixels, labels, val_pixels, val_labels, names = read(config)
    channels, height, width = train_pixels.shape[-3:]
    if height != width:
        raise ConfigError(
            f"{name_of(config)} has images of {height}x{width} pixels, which must be squares: data.image_size=SIZE"
        )
    if config.shift >= height:
        raise ConfigError(f"data.shift={config.shift} must be less than the {height} pixels of an image")
    return Task(
        name=name_of(config),
        kind="classify",
        train=LabelledImages(train_pixels, labels, largest=largest, shift=config.shift),
        val=LabelledImages(val_pixels, val_labels, largest=largest),
        model_fields={"num_labels": len(names), "image_size": height, "num_channels": channels},
        label_names=names,
        baselines=lambda: {"majority_accuracy": majority_accuracy(labels, val_labels)},
    )


def stratified(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of both splits. ``fraction`` of the rows of every label, rounded, are held out. The run's seed has no influence.

    Raises:
        ConfigError: a split would be empty.
    """
    random = generator(VALIDATION_SEED, "stratified")
    train, val = [], []
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        count = round(fraction * len(rows))
        val.append(rows[:count])
        train.append(rows[count:])
    found = np.sort(np.concatenate(train)), random.permutation(np.concatenate(val))
    if not all(map(len, found)):
        raise ConfigError(f"data.val_fraction={fraction} leaves a split of {len(labels)} images empty")
    return found


Both = tuple[Any, np.ndarray, Any, np.ndarray, tuple[str, ...]]
"""The images and labels of training and of validation, and the names of the labels."""


def _digits(config: DigitsDataConfig) -> Both:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("data=digits needs the package scikit-learn: install minitx with the extra vision") from None
    digits = load_digits()
    pixels, labels = digits.images[:, None].astype(np.uint8), digits.target
    train, val = stratified(labels, config.val_fraction)
    return pixels[train], labels[train], pixels[val], labels[val], tuple("0123456789")


def _tables(config: Any) -> Both:
    def divide(table: Any) -> tuple[np.ndarray, np.ndarray]:
        return stratified(labels_of([table], config.label_column)[0][0], config.val_fraction)

    tables = load_splits(config, divide)
    (labels, val_labels), names = labels_of(tables, config.label_column)
    pictures = Pictures(tables[0], config.image_column, config.image_size)
    return pictures, labels, Pictures(tables[1], config.image_column, config.image_size, pictures), val_labels, names
