"""Images: scaling, shifts, splits, and image folders."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

from minitx.config import ConfigError
from minitx.data import digits, images
from minitx.data.classification import LabelledImages
from minitx.data.seeding import generator
from minitx.data.splits import as_split
from tests.data.conftest import batch_of

SQUARE = np.arange(25, dtype=np.uint8).reshape(1, 1, 5, 5)


def test_pixels_are_scaled_and_shifts_move_whole_images_in_all_directions_and_bring_in_zeros():
    row = LabelledImages(SQUARE, np.array([3]), largest=24).row(0, None)
    assert row["labels"] == 3 and row["pixel_values"].dtype == np.float32
    assert np.array_equal(row["pixel_values"][0], np.arange(25, dtype=np.float32).reshape(5, 5) / 24)
    examples = LabelledImages(SQUARE + 1, np.array([3]), largest=1, shift=1)
    found = {examples.row(0, generator(0, draw))["pixel_values"][0].tobytes() for draw in range(200)}
    framed = np.pad(SQUARE[0, 0] + 1, 1)
    assert found == {framed[y : y + 5, x : x + 5].astype(np.float32).tobytes() for y in range(3) for x in range(3)}


def test_digits_become_a_task():
    task = digits()
    assert task.model_fields == {"num_labels": 10, "image_size": 8, "num_channels": 1}
    assert (len(task.train) + len(task.val), len(task.val)) == (1797, pytest.approx(1797 / 5, abs=5))


@pytest.fixture
def image_folder(tmp_path, offline_datasets):
    """A folder with a folder of pictures for each label; a picture's first pixel is its number."""
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for n in range(10):
            pixels = np.full((6, 6, 3), n if label == "cat" else 100 + n, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / label / f"{n}.png")
    return tmp_path / "pictures"


def all_batches(task):
    return [batch_of(as_split(task, which)) for which in ("train", "val")]


def test_a_folder_of_images_becomes_a_task(image_folder):
    task = images(path=str(image_folder), shift=0)
    assert (len(task.train), len(task.val), task.label_names) == (16, 4, ("cat", "dog"))
    assert task.model_fields == {"num_labels": 2, "image_size": 6, "num_channels": 3}
    batch = batch_of(as_split(task, "train"))
    numbers = (batch["pixel_values"][:, 0, 0, 0] * 255).round().long()
    assert torch.equal(batch["labels"], (numbers >= 100).long())
    assert len(numbers.unique()) == 16


def test_pictures_are_resized_when_asked_and_refused_when_of_several_sizes(image_folder):
    assert images(path=str(image_folder), image_size=4).model_fields["image_size"] == 4
    Image.fromarray(np.zeros((6, 9, 3), np.uint8)).save(image_folder / "cat" / "wide.png")
    with pytest.raises(ConfigError, match=r"^data\.image_size=null.*6x9"):
        all_batches(images(path=str(image_folder), shift=0))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # PIL leaves the file open
def test_a_picture_that_cannot_be_read_is_named_by_its_column_and_row(image_folder):
    """A file that is no picture, and one that is cut short."""
    path = image_folder / "cat" / "3.png"
    for content in (b"no picture", path.read_bytes()[:50]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"^data\.image_column=image: image \d+ of a split cannot be read: \w+"):
            all_batches(images(path=str(image_folder), shift=0))


def test_colours_that_a_grey_first_picture_takes_from_the_others_are_said_to_be_lost_once(image_folder, caplog):
    for path in image_folder.glob("cat/*.png"):
        Image.open(path).convert("L").save(path)
    task = images(path=str(image_folder), val_path=str(image_folder))
    batch_of(as_split(task, "train"))
    assert task.model_fields["num_channels"] == 1
    assert caplog.text.count("the first image is grey, so images with colours become grey, too") == 1


def test_a_table_of_images_with_a_split_of_its_own_is_read(tmp_path, offline_datasets):
    (tmp_path / "set").mkdir()
    for split, values in (("train", [7, 30, 7, 50]), ("test", [50, 7, 30])):
        pictures = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in values]
        table = Dataset.from_dict({"image": pictures, "label": [f"k{value}" for value in values]})
        table.to_parquet(tmp_path / "set" / f"{split}.parquet")
    task = images(path=str(tmp_path / "set"), val_split="test")
    assert (task.label_names, task.model_fields["num_channels"]) == (("k30", "k50", "k7"), 1)
    assert (task.train.labels.tolist(), task.val.labels.tolist()) == ([2, 0, 2, 1], [1, 2, 0])
    assert (batch_of(as_split(task, "val"))["pixel_values"][:, 0, 0, 0] * 255).round().tolist() == [50, 7, 30]
