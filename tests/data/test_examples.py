"""The one mechanism of example-based data, as properties of batches."""

import pickle

import numpy as np
import pytest
import torch

from minitx.data.addressing import Address
from minitx.data.classify import LabelledTexts
from minitx.data.examples import ExampleSource, ExampleValidation, Ragged, hold_out
from minitx.data.images import LabelledImages
from minitx.data.masked import MaskedExamples
from minitx.data.seq2seq import PairExamples
from minitx.data.tokens import TokenArray

COUNT, BATCH = 109, 12


def some_rows(seed, largest=41, count=COUNT):
    random = np.random.default_rng(seed)
    return [random.integers(5, 97, size=random.integers(1, largest)).astype(np.uint32) for _ in range(count)]


def pairs(count=COUNT):
    return PairExamples(some_rows(0, count=count), some_rows(1, count=count), pad_id=0, bos_id=1, eos_id=2)


def texts(count=COUNT):
    return LabelledTexts(some_rows(2, count=count), np.arange(count) % 7, cls_id=3, pad_id=0, max_len=29)


def images():
    pixels = np.random.default_rng(3).integers(0, 17, size=(COUNT, 1, 5, 5)).astype(np.uint8)
    return LabelledImages(pixels, np.arange(COUNT) % 7, largest=16, shift=1)


@pytest.fixture
def masked(tmp_path):
    ids = np.random.default_rng(4).integers(5, 97, size=COUNT * 11 - 4).astype("<u2")
    (tmp_path / "ids.bin").write_bytes(ids.tobytes())
    tokens = TokenArray(tmp_path / "ids.bin", "<u2", 0, len(ids))
    return MaskedExamples(tokens, context_len=11, mask_fraction=0.15, mask_id=4, pad_id=0, replacements=np.arange(5, 97))


@pytest.fixture(params=["pairs", "texts", "images", "masked"])
def examples(request, masked):
    return masked if request.param == "masked" else {"pairs": pairs, "texts": texts, "images": images}[request.param]()


def source(examples, *, bucket=True, accumulate=1, world=1, seed=3, batch_size=BATCH):
    return ExampleSource(examples, batch_size=batch_size, seed=seed, bucket=bucket, accumulate=accumulate, world=world)


def stripped(batch):
    """The rows of a batch without their padding, whatever it is padded to."""
    rows = []
    for row in range(len(batch["labels"])):
        values = {}
        for key, tensor in batch.items():
            if key not in ("num_targets", "key_mask", "decoder_key_mask"):
                mask = batch.get("key_mask")
                if key in ("decoder_input_ids", "labels"):
                    mask = batch.get("decoder_key_mask", mask)
                one = tensor[row]
                values[key] = (one if mask is None or mask.shape != tensor.shape else one[mask[row]]).tolist()
        rows.append(values)
    return rows


@pytest.mark.parametrize("bucket", [True, False])
@pytest.mark.parametrize("batch_size", [1, 12, 64, 109, 250])
def test_every_example_comes_once_an_epoch(examples, bucket, batch_size):
    stream = source(examples, bucket=bucket, batch_size=batch_size)
    steps = -(-3 * COUNT // batch_size)
    seen = np.concatenate([stream.items(step, range(batch_size)) for step in range(steps)])
    for epoch in range(3):
        assert sorted(seen[epoch * COUNT : (epoch + 1) * COUNT]) == list(range(COUNT))


@pytest.mark.parametrize(("accumulate", "world"), [(2, 1), (1, 3), (3, 2), (4, 3)])
def test_any_split_over_micro_batches_and_ranks_gives_the_same_global_batch(examples, accumulate, world):
    parts = source(examples, accumulate=accumulate, world=world)
    for step in (0, 8, 9, 31):  # 9 touches two epochs
        whole = source(examples)[Address(step)]
        slices = [parts[Address(step, micro, rank)] for micro in range(accumulate) for rank in range(world)]
        assert [row for part in slices for row in stripped(part)] == stripped(whole)
        assert {int(part["num_targets"]) for part in slices} == {int(whole["num_targets"])}
        assert sum(int((part["labels"] != -100).sum()) for part in slices) == int(whole["num_targets"])


def test_a_batch_does_not_depend_on_what_was_asked_before(examples):
    warm = source(examples)
    for step in (40, 0, 90, 3):
        assert stripped(warm[Address(step)]) == stripped(source(examples)[Address(step)])


def test_seeds_and_epochs_differ_in_order():
    orders = {source(pairs(), seed=seed)._order(epoch).tobytes() for seed in (0, 1) for epoch in range(3)}
    assert len(orders) == 6


def test_a_slice_is_as_long_as_its_longest_row():
    parts = source(pairs(), accumulate=4)
    for micro in range(4):
        batch = parts[Address(2, micro)]
        assert batch["key_mask"].any(dim=0).all()
        assert batch["decoder_key_mask"].any(dim=0).all()


def padding(bucket):
    stream = source(texts(1009), bucket=bucket)
    batches = [stream[Address(step)] for step in range(84)]
    real = sum(int(batch["key_mask"].sum()) for batch in batches)
    return 1 - real / sum(batch["key_mask"].numel() for batch in batches)


def test_buckets_pad_much_less():
    assert padding(bucket=True) < 0.05 < 0.3 < padding(bucket=False)


def test_every_batch_within_an_epoch_is_a_piece_of_a_sorted_window():
    stream, count = source(texts(1009)), 0
    for step in range(3 * 84):
        lengths = stream.examples.lengths[stream.items(step, range(BATCH))]
        if step * BATCH // 1009 == (step * BATCH + BATCH - 1) // 1009:
            count += 1
            assert (np.diff(lengths) >= 0).all()
    assert count >= 3 * 83


def test_batches_of_a_length_are_spread_over_the_epoch():
    stream = source(texts(1009))
    lengths = [stream.examples.lengths[stream.items(step, range(BATCH))].mean() for step in range(84)]
    assert abs(np.corrcoef(lengths, range(84))[0, 1]) < 0.3


@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (5, 1), (6, 3), (200, 5)])
def test_validation_shows_every_row_once_over_all_ranks(examples, batch_size, world):
    batch_size *= 1 if batch_size % world == 0 else world
    val = ExampleValidation(examples, batch_size=batch_size, world=world)
    alone = stripped(val.rows(range(COUNT)))
    found, targets = [], 0
    for step in range(len(val)):
        batches = [val[Address(step, rank=rank, split="val")] for rank in range(world)]
        counted = [batch for batch in batches if (batch["labels"] != -100).any()]
        found += [row for batch in counted for row in stripped(batch)]
        assert {int(batch["num_targets"]) for batch in batches} == {sum(int((b["labels"] != -100).sum()) for b in counted)}
        targets += int(batches[0]["num_targets"])
    assert found == alone
    assert targets == int(examples.targets.sum())


def test_a_source_travels_to_a_worker(examples):
    used = source(examples)
    used[Address(0)]
    assert stripped(pickle.loads(pickle.dumps(used))[Address(7)]) == stripped(used[Address(7)])


def test_rows_of_different_lengths_are_padded_behind():
    ids, real = Ragged.of([np.array([5, 6, 7]), np.array([8]), np.array([9, 10])]).padded(np.array([2, 1]), fill=4)
    assert ids.tolist() == [[9, 10], [8, 4]]
    assert real.tolist() == [[True, True], [True, False]]
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("fraction", [0.001, 0.3, 0.999])
def test_groups_are_never_torn(fraction):
    groups = [number * 7 % 31 for number in range(101)]
    train, val = hold_out(groups, fraction)
    assert sorted([*train, *val]) == list(range(101))
    assert len(train) and len(val)
    assert not {groups[i] for i in train} & {groups[i] for i in val}


def test_some_groups_may_be_kept_for_training():
    train, val = hold_out("abcdefg" * 3, 0.95, always_train="cg")
    assert {"abcdefg"[i % 7] for i in val} == set("abdef")
    assert {"abcdefg"[i % 7] for i in train} == set("cg")


def test_one_group_cannot_be_split():
    with pytest.raises(ValueError, match="1 groups cannot be split, 1 of them free to validate"):
        hold_out("aaaa", 0.5)
