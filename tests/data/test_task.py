"""Splits and sources as properties of batches: our own, and data sets of the user's."""

import itertools
import math
import pickle
from functools import partial

import numpy as np
import pytest
import torch

from minitx.config import ConfigError
from minitx.data.batches import Address, TrainSource, ValSource
from minitx.data.classification import LabelledImages, stratified
from minitx.data.corpus import MaskedRows, text
from minitx.data.datamodule import DataModule
from minitx.data.splits import PAD
from minitx.data.tables import hold_out
from minitx.data.task import Task, num_targets
from minitx.data.token_cache import TokenArray
from tests.data.conftest import batch_of, split_of

COUNT, BATCH = 109, 12


def some_rows(seed, largest=41, count=COUNT):
    random = np.random.default_rng(seed)
    return [random.integers(5, 97, size=random.integers(1, largest)) for _ in range(count)]


def texts(count=COUNT):
    """Rows of one length each, without anything beside ``[i]``."""
    return split_of([{"input_ids": ids, "labels": n % 7} for n, ids in enumerate(some_rows(2, count=count))])


def pairs(tmp_path=None):
    both = zip(some_rows(0), some_rows(1), strict=True)
    return split_of([{"input_ids": a, "decoder_input_ids": b, "labels": b} for a, b in both])


class Torch(torch.utils.data.Dataset):
    """A torch data set with all that a split may have."""

    def __init__(self):
        self.ids = some_rows(5)
        self.lengths = np.array(list(map(len, self.ids)))

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        return {"input_ids": torch.tensor(self.ids[i]), "labels": torch.tensor(self.ids[i]), "weight": 0.5}

    def num_targets(self, i):
        return len(self.ids[i])


def images(tmp_path):
    pixels = np.random.default_rng(3).integers(17, size=(COUNT, 1, 5, 5), dtype=np.uint8)
    return split_of(LabelledImages(pixels, np.arange(COUNT) % 7, largest=16, shift=1))


def masked(tmp_path):
    ids = np.random.default_rng(4).integers(5, 97, size=COUNT * 11 - 4).astype("<u2")
    (tmp_path / "ids.bin").write_bytes(ids.tobytes())
    return split_of(MaskedRows(TokenArray(tmp_path / "ids.bin", "<u2", 0, len(ids)), 11, 0.15, 4, np.arange(5, 97)))


def table(tmp_path):
    import datasets

    return split_of(datasets.Dataset.from_list([{"input_ids": ids.tolist(), "labels": 1} for ids in some_rows(6)]))


@pytest.fixture(params=[pairs, images, masked, table, lambda tmp_path: split_of(Torch())])
def split(request, tmp_path):
    return request.param(tmp_path)


def source(split, *, bucket=False, seed=3, batch_size=BATCH, **slices):
    return TrainSource(split, batch_size=batch_size, seed=seed, bucket=bucket, **slices)


def trimmed(tensor):
    """Without what stands at the end, padding or not."""
    values = tensor.flatten().tolist()
    while values and values[-1] in (0, -100):
        values.pop()
    return values


def stripped(batch):
    """The rows of a batch, whatever they are padded to."""
    keys = batch.keys() - {"num_targets"}
    return [{key: trimmed(batch[key][row]) for key in keys} for row in range(len(batch["labels"]))]


@pytest.mark.parametrize("bucket", [True, False])
@pytest.mark.parametrize("batch_size", [1, 64, 250])
def test_every_row_comes_once_an_epoch_in_an_order_of_its_own(bucket, batch_size):
    stream = source(texts(), bucket=bucket, batch_size=batch_size)
    seen = np.concatenate([stream.items(step, range(batch_size)) for step in range(-(-3 * COUNT // batch_size))])
    epochs = [seen[epoch * COUNT : (epoch + 1) * COUNT] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)
    orders = [*epochs, source(texts(), bucket=bucket, batch_size=batch_size, seed=4).items(0, range(COUNT))]
    assert len({order.tobytes() for order in orders}) == 4, "epochs and seeds differ in their order"


@pytest.mark.parametrize(("accumulate", "world"), [(2, 1), (1, 3), (4, 3)])
def test_any_division_among_micro_batches_and_ranks_gives_the_same_global_batch(split, accumulate, world):
    parts = source(split, accumulate=accumulate, world=world)
    for step in (0, 9, 31):  # 9 touches two epochs
        whole = source(split)[Address(step)]
        slices = [parts[Address(step, micro, rank)] for micro in range(accumulate) for rank in range(world)]
        assert [row for part in slices for row in stripped(part)] == stripped(whole)
        assert {int(part["num_targets"]) for part in slices} == {int(whole["num_targets"])}
        assert sum(int((part["labels"] != -100).sum()) for part in slices) == int(whole["num_targets"])


def test_a_batch_depends_neither_on_what_was_asked_before_nor_on_the_process(split):
    warm = source(split)
    for step in (40, 0, 90, 3):
        assert stripped(warm[Address(step)]) == stripped(source(split)[Address(step)])
    assert stripped(pickle.loads(pickle.dumps(warm))[Address(7)]) == stripped(warm[Address(7)])


def test_a_slice_is_as_long_as_its_longest_row():
    parts = source(pairs(), accumulate=4, bucket=True)
    for batch in (parts[Address(2, micro)] for micro in range(4)):
        assert batch["key_mask"].any(dim=0).all() and batch["decoder_key_mask"].any(dim=0).all()


def test_buckets_pad_much_less_and_come_in_no_order():
    share, split = {}, texts(1009)
    for bucket in (True, False):
        batches = [source(split, bucket=bucket)[Address(step)] for step in range(84)]
        real = [int(batch["key_mask"].sum()) for batch in batches]
        share[bucket] = 1 - sum(real) / sum(batch["key_mask"].numel() for batch in batches)
        assert abs(np.corrcoef(real, range(84))[0, 1]) < 0.3
    assert share[True] < 0.05 < 0.3 < share[False]


@pytest.mark.parametrize("epoch", range(4))
def test_the_batches_inside_an_epoch_have_lengths_that_do_not_overlap(epoch):
    rows, size = 83, 12
    split = texts(rows)
    stream = source(split, bucket=True, batch_size=size)
    inside = [step for step in range(rows) if epoch * rows <= step * size and (step + 1) * size <= (epoch + 1) * rows]
    lengths = [split.lengths[stream.items(step, range(size))] for step in inside]
    ends = sorted((batch.min(), batch.max()) for batch in lengths)
    assert len(ends) == 6 and all(longest <= shortest for (_, longest), (shortest, _) in itertools.pairwise(ends))


@pytest.mark.parametrize(("batch_size", "world"), [(5, 1), (6, 3), (200, 5)])
def test_validation_shows_every_row_once_over_all_ranks(split, batch_size, world):
    val = ValSource(split, batch_size=batch_size, world=world)
    found, targets = [], 0
    for step in range(len(val)):
        batches = [val[Address(step, rank=rank)] for rank in range(world)]
        counted = [batch for batch in batches if (batch["labels"] != -100).any()]
        found += [row for batch in counted for row in stripped(batch)]
        assert {int(batch["num_targets"]) for batch in batches} == {sum(int((b["labels"] != -100).sum()) for b in counted)}
        targets += int(batches[0]["num_targets"])
    whole = val.rows(range(COUNT))
    assert found == stripped(whole)
    assert targets == int(whole["num_targets"])


# data sets of the user's


def test_keys_are_padded_with_what_was_asked_for():
    long = {"input_ids": [1, 2, 3], "position_ids": [0, 1, 2], "labels": [2, 3, 4], "weight": 0.5, "image": np.zeros((2, 2))}
    rows = [long, {"input_ids": [5], "position_ids": [0], "labels": [6], "weight": 2, "image": np.ones((2, 2))}]
    batch = batch_of(split_of(rows, pad={"input_ids": 9}))
    assert {key: tensor.tolist() for key, tensor in batch.items() if key != "image"} == {
        "input_ids": [[1, 2, 3], [5, 9, 9]],
        "position_ids": [[0, 1, 2], [0, 0, 0]],
        "labels": [[2, 3, 4], [6, -100, -100]],
        "key_mask": [[True] * 3, [True, False, False]],
        "weight": [0.5, 2.0],
    }
    assert "key_mask" not in batch_of(split_of(rows, key_masks={}, pad={"input_ids": 9}))
    rows[0]["key_mask"], rows[1]["key_mask"] = [False, True, True], [True]
    assert batch_of(split_of(rows))["key_mask"].tolist() == [[False, True, True], [True, False, False]]


OWN = [{"src": [5, 6, 7], "trg": [1, 2], "labels": [1, 2]}, {"src": [8], "trg": [3], "labels": [3]}]


def test_keys_of_ones_own_are_padded_only_with_what_a_task_says_of_them():
    masks = {"src": "src_mask", "trg": "trg_mask"}
    with pytest.raises(
        ConfigError, match=r"^mine: rows have 1 to 3 values of src, .*key_masks=\{'src': 'src_mask'\}.*pad=\{'src': "
    ):
        batch_of(split_of(OWN))
    with pytest.raises(ConfigError, match=r"^mine: rows have 1 to 2 values of trg"):
        batch_of(split_of(OWN, pad={"src": 9}))
    assert batch_of(split_of(OWN, pad={"src": 9, "trg": 4}))["src"].tolist() == [[5, 6, 7], [8, 9, 9]]
    batch = batch_of(split_of(OWN, key_masks=masks))
    assert [batch[mask].tolist() for mask in masks.values()] == [
        [[True] * 3, [True, False, False]],
        [[True] * 2, [True, False]],
    ]
    given = [{**row, "src_mask": [True] * len(row["src"])} for row in OWN]  # masks of the rows themselves
    assert batch_of(split_of(given, key_masks=masks))["src_mask"].tolist() == batch["src_mask"].tolist()
    with pytest.raises(
        ConfigError, match=r"^mine: rows have 1 to 2 values of input_ids, .*key_masks=\{'input_ids': 'key_mask'\}"
    ):
        batch_of(split_of([{"input_ids": [1] * n, "labels": 1} for n in (1, 2)], key_masks={}))


@pytest.mark.parametrize("key", sorted(PAD))
def test_keys_of_one_right_padding_value_need_no_word(key):
    rows = [{"input_ids": [1] * n, key: [1] * n, **({} if key == "labels" else {"labels": 1})} for n in (2, 1)]
    assert batch_of(split_of(rows))[key].tolist() == [[1, 1], [1, PAD[key]]]


NUMBERS = {
    **{name: partial(np.array, dtype=name) for name in ("bool", "uint8", "int8", "int32", "uint16", "float16", "float32")},
    "list": list,
    "torch": torch.tensor,
    "torch bool": lambda row: torch.tensor(row).bool(),
    "torch uint8": lambda row: torch.tensor(row).byte(),
    "torch bfloat16": lambda row: torch.tensor(row).bfloat16(),
    "with a gradient": lambda row: torch.tensor(row).float().requires_grad_(),
}


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("key", ["labels", "document_ids", "key_mask"])
def test_padding_is_told_from_data_in_rows_of_every_dtype(kind, key):
    make = NUMBERS[kind]
    rows, pad = [{"labels": 1, key: make([1, 0, 1])}, {"labels": 1, key: make([0])}], {}
    is_float = "float" in kind or kind == "with a gradient"
    if is_float and key == "labels":  # -100 may be a target
        with pytest.raises(ConfigError, match=r"set Task\(pad=\{'labels': math.nan\}\)"):
            batch_of(split_of(rows))
        pad = {"labels": math.nan}
    padded, first = batch_of(split_of(rows, pad=pad))[key], batch_of(split_of(rows[:1], pad=pad))[key]
    wanted = torch.tensor([[1, 0, 1], [0, *[(PAD | pad)[key]] * 2]])
    torch.testing.assert_close(padded, wanted.to(padded.dtype), equal_nan=True)
    assert first.dtype == padded.dtype  # not a matter of the lengths in a batch
    assert padded.dtype.is_floating_point == is_float


@pytest.mark.parametrize(
    ("row", "fill", "kind"), [([1, 2], 0.5, "int64"), ([True, False], 0.5, "int64"), (np.ones(2, np.float16), 1e9, "float16")]
)
def test_a_padding_value_that_the_numbers_of_a_row_cannot_hold_is_refused(row, fill, kind):
    with pytest.raises(ConfigError, match=rf"^mine: x is {kind}, so its padding value in Task\.pad cannot be {fill}"):
        batch_of(split_of([{"x": row, "labels": 1}, {"x": row[:1], "labels": 1}], pad={"x": fill}))


def test_rows_of_several_axes_and_other_shapes_are_refused_with_the_way_to_pad_them():
    with pytest.raises(ConfigError, match=r"^mine: rows have x of shapes \(2, 3\) and \(4, 3\): .*collate_fn"):
        batch_of(split_of([{"x": np.zeros((n, 3)), "labels": 1} for n in (2, 4)]))


def test_an_error_of_a_value_is_not_reported_as_one_of_its_shape():
    class Broken:
        def __array__(self, *args, **options):
            raise RuntimeError("the file behind it is closed")

    with pytest.raises(RuntimeError, match="the file behind it is closed"):
        batch_of(split_of([{"x": Broken(), "labels": 1}]))


def test_values_in_half_precision_or_with_a_gradient_are_read_at_any_rank():
    for change in (torch.Tensor.bfloat16, torch.Tensor.requires_grad_, lambda values: values.requires_grad_().bfloat16()):
        rows = [{"x": change(torch.full((2, 3), 0.5)), "labels": change(torch.tensor(1.0))}] * 2
        batch = batch_of(split_of(rows))
        assert {batch["x"].dtype, batch["labels"].dtype} == {torch.float32} and batch["x"].unique().tolist() == [0.5]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_lengths_that_differ_in_a_later_batch_alone_are_refused_there_in_one_sentence(num_workers):
    rows = [{"src": [1, 2], "labels": 1}] * 5 + [{"src": [1], "labels": 1}]
    loader = DataModule(Task(name="mine", train=rows, val=rows), batch_size=2, num_workers=num_workers).val_dataloader()
    batches = iter(loader)
    assert [next(batches)["src"].shape for _ in range(2)] == [(2, 2)] * 2
    with pytest.raises(ConfigError, match=r"^mine: rows have 1 to 2 values of src, but no padding value is known: [^\n]*$"):
        next(batches)


def test_a_kind_of_task_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(
        ConfigError, match=r"^kind=lm is not allowed: one of language_model, masked_lm, seq2seq, classify, tag, other"
    ):
        split_of(OWN, kind="lm")


def test_an_empty_list_does_not_make_fractions_of_the_ids_of_other_rows():
    rows = [{"input_ids": [], "labels": []}, {"input_ids": [5, 6], "labels": [6, 7]}]
    for some in (rows, rows[:1]):
        batch = batch_of(split_of(some))
        assert {batch["input_ids"].dtype, batch["labels"].dtype} == {torch.int64}
        assert batch["key_mask"].any(1).tolist() == [False, True][: len(some)]


@pytest.mark.parametrize("order", [1, -1])
def test_a_key_that_some_rows_lack_is_refused_and_not_dropped_by_the_order_of_the_rows(order):
    rows = [{"input_ids": [1], "labels": 1}, {"input_ids": [1], "labels": 1, "token_type_ids": [1]}][::order]
    with pytest.raises(ConfigError, match=r"^mine: rows must have the same keys, got .*token_type_ids"):
        batch_of(split_of(rows))


def test_labels_that_are_no_whole_numbers_count_as_others_do():
    rows = [{"x": [1.0, 2.0], "labels": [0.5, 0.25]} for _ in range(7)]
    assert source(split_of(rows), batch_size=6, accumulate=3)[Address(0, 1)]["num_targets"] == 12
    last = [ValSource(split_of(rows), batch_size=6, world=3)[Address(1, rank=rank)] for rank in range(3)]
    found = [(len(batch["labels"]), int(batch["num_targets"]), int(num_targets(batch["labels"]))) for batch in last]
    assert found == [(1, 2, 2), (1, 2, 0), (1, 2, 0)]


@pytest.mark.parametrize("labels", [(1, 0.5), (0.5, 1)])
def test_the_dtype_of_numbers_does_not_depend_on_the_order_of_the_rows(labels):
    rows = [{"x": [1.0, 2.0], "labels": label} for label in labels]
    assert split_of(rows).collate(np.arange(2), None)["labels"].dtype == torch.float32


class Endless(torch.utils.data.IterableDataset):
    """torch's data set without [i]; some have a length."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(())


ROWS = [
    [],
    iter([{"labels": 1}]),
    [{"input_ids": [1]}],
    [{"input_ids": "text", "labels": 1}],
    [{"input_ids": [1], "labels": 1}, {"labels": 1}],
    [{"image": np.zeros((2, 2)), "labels": 1}, {"image": np.zeros((2, 3)), "labels": 1}],
    Endless(),
]


@pytest.mark.parametrize(
    "rows", ROWS, ids=["empty", "no length", "no labels", "texts", "a key is missing", "two shapes", "a stream"]
)
def test_rows_that_make_no_batch_are_refused_with_the_name_of_the_data(rows):
    with pytest.raises(ConfigError, match=r"^mine"):
        batch_of(split_of(rows))


@pytest.mark.parametrize("fraction", [0.001, 0.3, 0.999])
def test_groups_are_never_torn(fraction):
    groups = [number * 7 % 31 for number in range(101)]
    train, val = hold_out(groups, fraction)
    assert sorted([*train, *val]) == list(range(101))
    assert len(train) and len(val)
    assert not {groups[i] for i in train} & {groups[i] for i in val}
    with pytest.raises(ConfigError, match=rf"^data\.val_fraction={fraction} .* 1 different"):
        hold_out("aaaa", fraction)


@pytest.mark.parametrize("fraction", [0, 1.5])
def test_from_python_too_a_part_for_validation_lies_between_0_and_1(write_text, fraction):
    of_text = partial(text, path=write_text(300 * "abc "), val_fraction=fraction)
    for split in (of_text, *(partial(of_rows, np.arange(9), fraction) for of_rows in (hold_out, stratified))):
        with pytest.raises(ConfigError, match=r"^data\.val_fraction=\S+ must lie in \(0, 1\)"):
            split()
