import bz2
import dataclasses
import hashlib
import lzma
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch

from minitx.cli.compose import compose_config
from minitx.config import (
    BooksDataConfig,
    ChatDataConfig,
    ConfigError,
    DataConfig,
    DatesDataConfig,
    DigitsDataConfig,
    HubDataConfig,
    ImageDataConfig,
    InductionDataConfig,
    KeyValueDataConfig,
    LanguagesDataConfig,
    MaskedDataConfig,
    MultiQueryDataConfig,
    PairsDataConfig,
    RunConfig,
    TextDataConfig,
    TransformerConfig,
    VersesDataConfig,
)
from minitx.data.addressing import Address
from minitx.data.module import DataModule, build_data
from minitx.data.task import Task

KEY_VALUE = KeyValueDataConfig(num_keys=13, num_values=5, num_pairs=7, batch_size=12, val_size=41)
MULTI_QUERY = MultiQueryDataConfig(num_keys=13, num_values=5, num_pairs=7, num_queries=3, batch_size=12, val_size=41)
INDUCTION = InductionDataConfig(num_tokens=20, segment_len=5, max_gap=7, batch_size=12, val_size=41)
CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def place(module, *, step=0, rank=0, world=1):
    """Put a module where a trainer would."""
    device = SimpleNamespace(root_device=torch.device("cpu"))
    place = {"rank": rank, "num_replicas": world}
    module.trainer = SimpleNamespace(global_step=step, distributed_sampler_kwargs=place, strategy=device)
    return module


def ready(config, cache, **options):
    return build_data(config, **{"seed": 0, "max_steps": 5, "folder": cache, **options})


def ids_of(batches):
    return [batch["input_ids"].tolist() for batch in batches]


# what a task says of itself


def test_a_text_says_what_a_model_needs(text_config, cache):
    module = ready(text_config("abcabd" * 50), cache)
    task = module.task
    assert task.model_fields == {"vocab_size": 5}
    assert task.tokenizer.decode(module.probe_batch(1)["input_ids"][0]) in "abcabd" * 3
    assert task.floors["bigram"] < task.floors["unigram"]
    assert task.bits_per == pytest.approx({"byte": 1.442695, "character": 1.442695})


def test_bits_per_byte_and_character_count_tokens_of_validation(text_config, cache):
    task = ready(text_config("é" * 500, tokenizer="bpe", bpe_vocab_size=257), cache).task  # one token a byte, two a character
    assert task.bits_per == pytest.approx({"byte": 1.442695, "character": 2 * 1.442695})


@pytest.mark.parametrize(
    ("config", "fields", "chance"),
    [
        (KEY_VALUE, {"vocab_size": 18, "type_vocab_size": 6}, 0.2),
        (MULTI_QUERY, {"vocab_size": 18}, 0.2),
        (INDUCTION, {"vocab_size": 20}, 0.05),
    ],
)
def test_a_recall_task_says_what_a_model_needs(cache, config, fields, chance):
    module = ready(config, cache)
    task = module.task
    assert (task.model_fields, task.tokenizer, task.recall) == (fields, None, True)
    assert (task.floors, task.bits_per) == ({}, {})
    assert task.baselines() == {"chance_accuracy": chance}
    assert not cache.exists()
    batch = module.probe_batch(3)
    (first, *_) = module.texts(batch)["input_ids"]
    ids, values = batch["input_ids"][0].tolist(), batch.get("token_type_ids", torch.zeros(1, len(first), dtype=int))[0]
    assert first == [f"{i}:{v}" if v else str(i) for i, v in zip(ids, values.tolist(), strict=True)]


@pytest.mark.parametrize(("content", "values"), [("x" * 20, {"context_len": 31}), ("x" * 20, {"val_fraction": 0.05})])
def test_a_text_too_short_is_refused_by_name(text_config, cache, content, values):
    (key,) = values
    with pytest.raises(ConfigError, match=rf"^data\.path=.*text\.txt .*data\.{key}="):
        ready(text_config(content, **values), cache)


def test_data_of_texts_load_without_lightning(text_config, cache):
    code = "import sys; from minitx.data.load import load_task; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_compressors_are_measured_on_the_bytes_and_characters_of_validation(text_config, cache):
    text = "Ünder the räven, never flitting\n" * 97
    found = ready(text_config(text, val_fraction=0.3), cache).task.baselines()
    val = text[int(len(text) * (1 - 0.3)) :]
    assert found["xz_bits_per_character"] == 8 * len(lzma.compress(val.encode(), preset=9)) / len(val)
    assert found["bzip2_bits_per_byte"] == 8 * len(bz2.compress(val.encode(), 9)) / len(val.encode())
    assert len(found) == 4


# batches


SMALL = {
    "text": TextDataConfig(name="text", path="FILE", context_len=7, batch_size=12),
    "kv_lookup": KEY_VALUE,
    "masked": MaskedDataConfig(path="FILE", context_len=7, batch_size=12),
    "dates": DatesDataConfig(train_size=101, val_size=41, batch_size=12),
    "pairs": PairsDataConfig(path="FILE", tokenizer="char", batch_size=12),
    "languages": LanguagesDataConfig(languages=("de", "nl"), batch_size=12),
    "digits": DigitsDataConfig(batch_size=12),
    "hf": HubDataConfig(path="FILE", tokenizer="char", context_len=17, batch_size=12),
    "streaming": HubDataConfig(path="FILE", tokenizer="char", context_len=17, batch_size=12, streaming=True, val_rows=7),
}


@pytest.fixture(params=SMALL)
def small(request, write_text, offline_datasets):
    """A small config of every kind of data."""
    config = SMALL[request.param]
    if getattr(config, "path", None) is None:
        return config
    contents = {"pairs": "".join(f"{n}\t{-n}\n" for n in range(61)), "text": "the raven " * 400, "masked": "the raven " * 400}
    documents = "\n".join("raven" * (n % 5 + 1) for n in range(97))
    return dataclasses.replace(config, path=write_text(contents.get(config.name, documents)))


def test_every_task_says_what_it_is(small, cache):
    module = ready(small, cache)
    task = module.task
    kinds = {"masked": "masked_lm", "dates": "seq2seq", "pairs": "seq2seq", "languages": "classify", "digits": "classify"}
    assert task.kind == kinds.get(small.name, "language_model")
    assert task.name == (f"data={small.name}" if getattr(small, "path", None) is None else f"data.path={small.path}")
    assert len(task.val) == module.val_source().num_rows
    if task.tokenizer:
        assert task.model_fields["vocab_size"] == task.tokenizer.vocab_size
    if task.kind == "classify":
        assert len(task.label_names) == task.model_fields["num_labels"]
    assert all(isinstance(value, float) for value in task.baselines().values())
    assert bool(task.baselines()) == (small.name != "hf")
    assert len(task.val_examples) == (len(task.val) if small.name in ("dates", "pairs", "languages") else 0)


def test_every_task_trains_and_resumes_on_addressed_batches(small, cache):
    whole = list(ready(small, cache, accumulate=2).train_dataloader())
    assert len(whole) == 10
    if getattr(small, "streaming", False):  # which resumes by the state of its loader: see test_streaming.py
        return
    rest = list(place(ready(small, cache, accumulate=2), step=3).train_dataloader())
    for one, other in zip(whole[6:], rest, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    for step in range(5):
        counted = sum(int((batch["labels"] != -100).sum()) for batch in whole[2 * step : 2 * step + 2])
        assert {int(batch["num_targets"]) for batch in whole[2 * step : 2 * step + 2]} == {counted}


@pytest.mark.parametrize("kind", ["text", "kv_lookup"])
def test_ranks_share_the_global_batch_and_validation(text_config, cache, kind):
    config = KEY_VALUE if kind == "kv_lookup" else text_config()
    whole = list(ready(config, cache).train_dataloader())
    ranks = [list(place(ready(config, cache), rank=rank, world=3).train_dataloader()) for rank in range(3)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([batches[step]["labels"] for batches in ranks]), batch["labels"])
    for size in (None, 16):
        ranks = [place(ready(config, cache, val_batch_size=size), rank=rank, world=5).val_dataloader() for rank in range(5)]
        assert len({len(batches) for batches in ranks}) == 1
        alone = ready(config, cache).val_dataloader()
        found, wanted = (
            sorted(row for batch in batches for row in batch["labels"].tolist() if max(row) >= 0)
            for batches in ([batch for batches in ranks for batch in batches], alone)
        )
        assert found == wanted


def test_a_probe_is_the_beginning_of_validation(text_config, cache):
    module = ready(text_config(), cache)
    first = next(iter(module.val_dataloader()))
    assert torch.equal(module.probe_batch(5)["labels"], first["labels"][:5])
    assert len(module.probe_batch(10**6)["labels"]) == module.val_source().num_rows


def test_workers_make_the_same_batches(cache):
    alone = list(ready(SMALL["dates"], cache).train_dataloader())
    helped = list(ready(dataclasses.replace(SMALL["dates"], num_workers=2), cache).train_dataloader())
    assert all(torch.equal(one[key], other[key]) for one, other in zip(alone, helped, strict=True) for key in one)


def test_fewer_rows_than_a_batch_are_refused_for_training():
    rows = [{"input_ids": [1, 2], "labels": 1}] * 5
    DataModule(Task(name="mine", train=rows, val=rows), batch_size=5).check_batch()
    with pytest.raises(ConfigError, match=r"^mine has 5 .*data\.batch_size=6"):
        DataModule(Task(name="mine", train=rows, val=rows), batch_size=6).check_batch()


RECORDED = {
    "kjv": (TextDataConfig(), ["950153033d16", "b2f4dc9ff153", "9e567870f40a"]),
    "masked": (MaskedDataConfig(), ["e2d7ac18b1c6", "233db88ed382", "315a1f44ebdf"]),
    "kv": (KeyValueDataConfig(), ["34b6c3ea7cfc", "905ab9c490ea", "2da429b3b67f"]),
    "mq": (MultiQueryDataConfig(), ["7a831f80ca82", "6d76b80542af", "bc02a548e105"]),
    "ind": (InductionDataConfig(), ["98803df6f2b5", "9b7f595eb021", "b9b6e30e9c1b"]),
    "dates": (DatesDataConfig(train_size=5003, val_size=101), ["5a043251d090", "fafac2524816", "ba6a5ff33093"]),
    "verses": (
        VersesDataConfig(tokenizer="char", max_source_len=200, max_target_len=200),
        ["9f0c98ae1b16", "7b1d0a97c734", "7643f0656e66"],
    ),
    "languages": (LanguagesDataConfig(), ["8d0c795a5a4c", "d3d7d97fe3da", "5c4cc3f9ea2a"]),
    "digits": (DigitsDataConfig(), ["0df31f4634e1", "2cf59281c3fa", "a050804402ea"]),
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
    batches = [
        module.train_source()[Address(0)],
        module.train_source(2)[Address(60, 1, 1)],
        module.val_source().rows(range(3, 9)),
    ]
    assert [digest(batch) for batch in batches] == wanted


# configs

KINDS = {name: kind for kind in typing.get_args(DataConfig) for name in typing.get_args(typing.get_type_hints(kind)["name"])}
OF_FILES = ("text", "pairs", "classify", "images", "hf", "chat")


def test_every_config_has_a_file_and_every_file_a_config():
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == sorted(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_every_file_makes_the_config_of_its_name_with_the_defaults_of_the_dataclass(name):
    path = {"path": "FILE"} if name in OF_FILES else {}
    found = compose_config([f"data={name}", *(f"data.{key}={value}" for key, value in path.items()), "model.max_len=2048"])
    assert found.data == KINDS[name](name=name, **path)
    if path:
        with pytest.raises((TypeError, ConfigError), match="path"):
            KINDS[name](name=name)


@pytest.mark.parametrize(
    ("kind", "values", "key"),
    [
        (MaskedDataConfig, {"mask_fraction": 0.0}, "mask_fraction"),
        (TextDataConfig, {"bpe_vocab_size": 256}, "bpe_vocab_size"),
        (TextDataConfig, {"path": "a"}, "path"),
        (TextDataConfig, {"batch_size": 0}, "batch_size"),
        (TextDataConfig, {"context_len": 0}, "context_len"),
        (TextDataConfig, {"num_workers": -1}, "num_workers"),
        (MultiQueryDataConfig, {"num_pairs": 65}, "num_pairs"),
        (MultiQueryDataConfig, {"num_queries": 17}, "num_queries"),
        (MultiQueryDataConfig, {"num_queries": 0}, "num_queries"),
        (KeyValueDataConfig, {"val_size": 0}, "val_size"),
        (InductionDataConfig, {"segment_len": 1}, "segment_len"),
        (InductionDataConfig, {"max_gap": -1}, "max_gap"),
        (InductionDataConfig, {"num_tokens": 27}, "num_tokens"),
        (DatesDataConfig, {"locales": ()}, "locales"),
        (DatesDataConfig, {"first_year": 900}, "first_year"),
        (DatesDataConfig, {"first_year": 2099, "val_size": 365}, "val_size"),
        (PairsDataConfig, {"path": "a", "val_path": "b", "val_target_path": "c"}, "val_target_path"),
        (PairsDataConfig, {"path": "a", "target_path": "b", "val_target_path": "c"}, "val_target_path"),
        (PairsDataConfig, {"path": "a", "target_path": "b", "val_path": "c"}, "val_target_path"),
        (PairsDataConfig, {"path": "a", "source_column": "en"}, "source_column"),
        (PairsDataConfig, {"path": "a", "target_path": "b", "source_column": "en", "target_column": "de"}, "source_column"),
        (LanguagesDataConfig, {"languages": ("de", "de")}, "languages"),
        (BooksDataConfig, {"max_len": 0}, "max_len"),
        (DigitsDataConfig, {"shift": -1}, "shift"),
        (ImageDataConfig, {"path": "a", "image_size": 0}, "image_size"),
        (HubDataConfig, {"path": "a", "val_fraction": 1.0}, "val_fraction"),
        (HubDataConfig, {"path": "a", "streaming": True, "num_workers": 2}, "num_workers"),
        (HubDataConfig, {"path": "a", "streaming": True, "val_rows": 0}, "val_rows"),
        (ChatDataConfig, {"path": "a", "context_len": 0}, "context_len"),
    ],
)
def test_configs_that_cannot_be_used_are_refused(kind, values, key):
    with pytest.raises(ConfigError, match=rf"^{key}="):
        kind(**values)


@pytest.mark.parametrize("name", KINDS)
def test_every_config_says_how_long_its_rows_may_be(name):
    limits = {"kv_lookup": 17, "multi_query_recall": 48, "induction": 39, "dates": 64, "digits": None, "images": None}
    limits |= {"kjv": 64, "text": 64, "masked": 64, "verses": 128, "pairs": 128, "languages": 48, "hf": 256, "chat": 256}
    path = {"path": "FILE"} if name in OF_FILES else {}
    assert KINDS[name](name=name, **path).max_tokens == limits.get(name, 128)


def test_learned_positions_must_reach_the_longest_row_of_the_data():
    model = TransformerConfig(max_len=63, position="learned")
    with pytest.raises(ConfigError, match=r"model.max_len=63"):
        RunConfig(model=model, data=DatesDataConfig(batch_size=12))
    RunConfig(model=model, data=DigitsDataConfig(batch_size=12))  # how many patches there are, the model says


# inside of Lightning


class Recorder(pl.LightningModule):
    """Trains one number and writes down the batches that it was given."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated = [], 0

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].tolist())
        return self.weight * batch["labels"].float().mean()

    def validation_step(self, batch, batch_idx):
        self.validated += (batch["labels"] != -100).sum().item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def train(module, *, max_steps, accumulate=2, ckpt_path=None, keep=None):
    recorder = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        check_val_every_n_epoch=None,
        val_check_interval=2 * accumulate,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(recorder, datamodule=module, ckpt_path=ckpt_path)
    if keep:
        trainer.save_checkpoint(keep)
    return recorder, trainer


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.parametrize("stop", [2, 3])
@pytest.mark.parametrize("kind", ["text", "streaming"])
def test_a_resumed_lightning_run_sees_what_an_uninterrupted_one_sees(write_text, cache, tmp_path, stop, kind, offline_datasets):
    config = dataclasses.replace(SMALL[kind], path=write_text("\n".join(f"{n} the raven" for n in range(97))))
    options = {"accumulate": 2, "max_steps": 5}
    whole, trainer = train(ready(config, cache, **options), max_steps=5)
    assert (trainer.global_step, len(whole.seen)) == (5, 10)
    source = ready(config, cache).val_source()
    assert whole.validated == 2 * int(source.rows(range(source.num_rows))["num_targets"])
    kept = tmp_path / "stopped.ckpt"
    first, _ = train(ready(config, cache, **options), max_steps=stop, keep=kept)
    second, trainer = train(ready(config, cache, **options), max_steps=5, ckpt_path=kept)
    assert trainer.global_step == 5
    assert first.seen + second.seen == whole.seen
