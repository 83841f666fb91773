import hashlib

import pytest
import torch

import minitx.config as configs
from minitx.config import ConfigError
from minitx.data.addressing import Address
from minitx.data.module import DataModule, build_data
from minitx.data.task import Task

KEY_VALUE = configs.KeyValueDataConfig(num_keys=13, num_values=5, num_pairs=7, batch_size=12, val_size=41)
INDUCTION = configs.InductionDataConfig(num_tokens=20, segment_len=5, max_gap=7, batch_size=12, val_size=41)


def ready(config, cache, **options):
    return build_data(config, **{"seed": 0, "max_steps": 5, "folder": cache, **options})


# what a task says of itself


def test_a_text_says_what_a_model_needs(text_config, cache):
    task = ready(text_config("abcabd" * 50), cache).task
    assert (task.model_fields, task.floors["bigram"] < task.floors["unigram"]) == ({"vocab_size": 5}, True)
    assert task.bits_per == pytest.approx({"byte": 1.442695, "character": 1.442695})
    task = ready(text_config("é" * 500, tokenizer="bpe", bpe_vocab_size=257), cache).task  # one token a byte, two a character
    assert task.bits_per == pytest.approx({"byte": 1.442695, "character": 2 * 1.442695})


@pytest.mark.parametrize(
    ("config", "fields", "chance"),
    [(KEY_VALUE, {"vocab_size": 18, "type_vocab_size": 6}, 0.2), (INDUCTION, {"vocab_size": 20}, 0.05)],
)
def test_a_recall_task_says_what_a_model_needs(cache, config, fields, chance):
    module = ready(config, cache)
    assert (module.task.model_fields, module.task.tokenizer, module.task.recall) == (fields, None, True)
    assert module.task.baselines() == {"chance_accuracy": chance}
    batch = module.probe_batch(1)
    values = batch.get("token_type_ids", torch.zeros_like(batch["input_ids"]))[0].tolist()
    shown = [f"{i}:{v}" if v else str(i) for i, v in zip(batch["input_ids"][0].tolist(), values, strict=True)]
    assert module.texts(batch)["input_ids"] == [shown]


@pytest.mark.parametrize(("content", "values"), [("x" * 20, {"context_len": 31}), ("x" * 20, {"val_fraction": 0.05})])
def test_a_text_too_short_is_refused_by_name(text_config, cache, content, values):
    (key,) = values
    with pytest.raises(ConfigError, match=rf"^data\.path=.*text\.txt .*data\.{key}="):
        ready(text_config(content, **values), cache)


# batches


def test_fewer_rows_than_a_batch_are_refused_for_training():
    rows = [{"input_ids": [1, 2], "labels": 1}] * 5
    DataModule(Task(name="mine", train=rows, val=rows), batch_size=5).check_batch()
    with pytest.raises(ConfigError, match=r"^mine has 5 .*data\.batch_size=6"):
        DataModule(Task(name="mine", train=rows, val=rows), batch_size=6).check_batch()


RECORDED = {
    "kjv": (configs.TextDataConfig(), ["950153033d16", "b2f4dc9ff153", "9e567870f40a"]),
    "masked": (configs.MaskedDataConfig(), ["e2d7ac18b1c6", "233db88ed382", "315a1f44ebdf"]),
    "kv": (configs.KeyValueDataConfig(), ["34b6c3ea7cfc", "905ab9c490ea", "2da429b3b67f"]),
    "mq": (configs.MultiQueryDataConfig(), ["7a831f80ca82", "6d76b80542af", "bc02a548e105"]),
    "ind": (configs.InductionDataConfig(), ["98803df6f2b5", "9b7f595eb021", "b9b6e30e9c1b"]),
    "dates": (configs.DatesDataConfig(train_size=5003, val_size=101), ["5a043251d090", "fafac2524816", "ba6a5ff33093"]),
    "digits": (configs.DigitsDataConfig(), ["0df31f4634e1", "2cf59281c3fa", "a050804402ea"]),
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
    config, wanted = RECORDED[name]
    module = ready(config, tmp_path_factory.getbasetemp() / "recorded", seed=5, max_steps=100, accumulate=2)
    kinds = {"masked": "masked_lm", "dates": "seq2seq", "digits": "classify"}
    assert (module.task.kind, module.task.name) == (kinds.get(name, "language_model"), f"data={config.name}")
    assert len(module.task.val) == module.val_source().num_rows
    train = module.train_source()[Address(0)], module.train_source(2)[Address(60, 1, 1)]
    assert [digest(batch) for batch in (*train, module.val_source().rows(range(3, 9)))] == wanted


# configs


REFUSED = [
    (configs.MaskedDataConfig, {"mask_fraction": 0.0}),
    (configs.TextDataConfig, {"path": "a"}),
    (configs.MultiQueryDataConfig, {"num_queries": 17}),
    (configs.InductionDataConfig, {"num_tokens": 27}),
    (configs.DatesDataConfig, {"first_year": 2099, "val_size": 365}),
    (configs.PairsDataConfig, {"path": "a", "target_path": "b", "val_path": "c", "val_target_path": None}),
    (configs.PairsDataConfig, {"path": "a", "target_path": "b", "target_column": "de", "source_column": "en"}),
]


@pytest.mark.parametrize(("kind", "values"), REFUSED)
def test_configs_that_cannot_be_used_are_refused_by_their_last_key(kind, values):
    with pytest.raises(ConfigError, match=rf"^{list(values)[-1]}="):
        kind(**values)
