"""Classification of images: scikit-learn's digits, and image data sets through ``datasets``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minitx.config import ConfigError, ImageDataConfig
from minitx.data.addressing import VALIDATION_SEED, Batch, generator
from minitx.data.baselines import majority_accuracy
from minitx.data.examples import Draw, Examples, Task
from minitx.data.hub import column_of, load_table
from minitx.data.tokenizers import Tokenizer

EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Modes of PIL that become grey or RGB without loss of range; the others hold floats or 16 and 32 bits."""


class LabelledImages(Examples):
    """Images with a label each: ``pixel_values`` (B, C, H, W) float32 in [0, 1], ``labels`` (B,).

    Args:
        pixels: (N, C, H, W) uint8. largest: the value of a full pixel, which becomes 1.
        labels: (N,).
        shift: an image is moved by up to so many pixels in both directions, drawn anew each time; 0 leaves it in place.
            What comes in is 0.
    """

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, *, largest: int, shift: int = 0) -> None:
        self.pixels, self.labels, self.largest, self.shift = pixels, labels.astype(np.int64), largest, shift
        self.lengths = self.targets = np.ones(len(labels), np.int64)

    def collate(self, index: np.ndarray, draw: Draw) -> Batch:
        """See ``Examples``."""
        pixels, margin = self.pixels[index], self.shift
        if margin:
            (height, width), framed = pixels.shape[2:], np.pad(pixels, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
            corners = [draw(row).integers(2 * margin + 1, size=2) for row in range(len(index))]
            pixels = np.stack([image[:, y : y + height, x : x + width] for image, (y, x) in zip(framed, corners, strict=True)])
        values = torch.from_numpy(pixels.astype(np.float32) / np.float32(self.largest))
        return {"pixel_values": values, "labels": torch.from_numpy(self.labels[index])}


def load_images(config: ImageDataConfig, folder: Path, tokenizer: Tokenizer | None) -> Task:
    """The images that ``config`` names, with a part of every class (or ``val_split``) held out.

    Raises:
        ConfigError: a package, the data or a column is missing; images differ in size.
    """
    pixels, labels, names = _digits() if config.name == "digits" else _table(config, "split")
    if config.val_split is None:
        train, val = stratified(labels, config.val_fraction)
        val_pixels, val_labels = pixels[val], labels[val]
    else:
        train = np.arange(len(labels))
        val_pixels, val_labels, val_names = _table(config, "val_split")
        if val_names != names:
            raise ConfigError(f"data.val_split={config.val_split} has other labels than data.split={config.split}")
    if not len(train) or not len(val_labels):
        raise ConfigError(f"data.val_fraction={config.val_fraction} leaves a split of {len(labels)} images empty")
    channels, height, width = pixels.shape[1:]
    if height != width or val_pixels.shape[1:] != pixels.shape[1:]:
        raise ConfigError(
            f"data.path={config.path} has images of {height}x{width} pixels; make them squares: data.image_size=SIZE"
        )
    if config.shift >= height:
        raise ConfigError(
            f"data.shift={config.shift} must be less than the {height} pixels of an image, or nothing is left of it"
        )
    largest = 16 if config.name == "digits" else 255
    return Task(
        kind="classify",
        train=LabelledImages(pixels[train], labels[train], largest=largest, shift=config.shift),
        val=LabelledImages(val_pixels, val_labels, largest=largest),
        model_fields={"num_labels": len(names), "image_size": height, "num_channels": channels},
        label_names=names,
        baselines=lambda: {"majority_accuracy": majority_accuracy(labels[train], val_labels)},
    )


def stratified(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows of both splits, the same whatever the run's seed: ``fraction`` of every label's rows, rounded, are held out."""
    random = generator(VALIDATION_SEED, "stratified")
    train, val = [], []
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        count = round(fraction * len(rows))
        val.append(rows[:count])
        train.append(rows[count:])
    return np.sort(np.concatenate(train)), random.permutation(np.concatenate(val))


def _digits() -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError("data=digits needs the package scikit-learn: pip install minitx[vision]") from None
    digits = load_digits()
    return digits.images[:, None].astype(np.uint8), digits.target, tuple("0123456789")


def _table(config: ImageDataConfig, key: str) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Pixels (N, C, H, W) uint8, labels (N,) and their names of the split ``config.key``, which ``datasets`` reads."""
    split = getattr(config, key)
    table = load_table(str(config.path), split=split, subset=config.subset, key=key)
    images = table[column_of(table, config.image_column, "image_column")]
    values = list(table[column_of(table, config.label_column, "label_column")])
    if not values or not all(isinstance(value, int | str) for value in values):
        raise ConfigError(f"data.label_column={config.label_column} of data.{key}={split} does not hold a label for each image")
    names = getattr(table.features[config.label_column], "names", None)  # values are numbers of these, if there are any
    labels = np.unique(values, return_inverse=True)[1] if names is None else np.array(values)
    if labels.min() < 0:
        raise ConfigError(f"data.{key}={split} has images without a label (-1 in data.label_column={config.label_column})")
    names = sorted(set(values)) if names is None else names
    return _pixels(images, config), labels, tuple(map(str, names))


def _pixels(images: Sequence[Any], config: ImageDataConfig) -> np.ndarray:
    arrays, mode = [], None
    for image in images:
        if not hasattr(image, "convert"):
            raise ConfigError(f"data.image_column={config.image_column} holds no images but {type(image).__name__}")
        if image.mode not in EIGHT_BITS:
            raise ConfigError(
                f"data.image_column={config.image_column} has an image of mode {image.mode}, whose values need not fit 8 bits "
                "or be numbers at all; convert it to 8 bits a channel"
            )
        mode = mode or ("L" if image.mode in ("1", "L") else "RGB")
        image = image.convert(mode)
        if config.image_size is not None:
            image = image.resize((config.image_size, config.image_size))
        arrays.append(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1))  # (C, H, W)
    sizes = sorted({array.shape[1:] for array in arrays})
    if len(sizes) > 1:
        (h, w), (h2, w2) = sizes[0], sizes[-1]
        raise ConfigError(
            f"data.path={config.path} has images of {h}x{w} and of {h2}x{w2} pixels; make them alike: data.image_size=SIZE"
        )
    return np.stack(arrays)
