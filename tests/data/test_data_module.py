import bz2
import dataclasses
import lzma
import re
import typing
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import yaml

from minitx.config.schema import from_dict
from minitx.config import (
    ClassifyDataConfig,
    ConfigError,
    DataConfig,
    DatesDataConfig,
    HubDataConfig,
    ImageDataConfig,
    InductionDataConfig,
    KeyValueDataConfig,
    MaskedDataConfig,
    MultiQueryDataConfig,
    PairsDataConfig,
    RunConfig,
    TextDataConfig,
    TransformerConfig,
    to_dict,
)
from minitx.data import text as text_data
from minitx.data.module import build_data
from minitx.data.tokenizers import fingerprint

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
    module = build_data(config, **{"seed": 0, "max_steps": 5, "data_dir": cache, **options})
    module.prepare_data()
    module.setup()
    return module


def ids_of(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def test_a_text_module_knows_what_a_model_needs(text_config, cache):
    module = ready(text_config("abcabd" * 50), cache)
    assert (module.vocab_size, module.type_vocab_size) == (5, 0)
    assert module.tokenizer.decode(module.probe_batch(1)["input_ids"][0]) in "abcabd" * 3
    assert module.floors["bigram"] < module.floors["unigram"]
    assert module.bits_per == pytest.approx({"byte": 1.442695, "character": 1.442695})
    assert len(module.examples.train) == 270


def test_bits_per_byte_and_character_count_tokens_of_validation(text_config, cache):
    module = ready(text_config("é" * 500, tokenizer="bpe", bpe_vocab_size=257), cache)  # one token a byte, two a character
    assert module.bits_per == pytest.approx({"byte": 1.442695, "character": 2 * 1.442695})


@pytest.mark.parametrize(
    ("config", "vocab_size", "type_vocab_size", "chance"),
    [(KEY_VALUE, 18, 6, 0.2), (MULTI_QUERY, 18, 0, 0.2), (INDUCTION, 20, 0, 0.05)],
)
def test_a_recall_module_knows_what_a_model_needs(cache, config, vocab_size, type_vocab_size, chance):
    module = ready(config, cache)
    assert (module.vocab_size, module.type_vocab_size, module.tokenizer) == (vocab_size, type_vocab_size, None)
    assert (module.floors, module.bits_per, module.chance) == ({}, {}, chance)
    assert module.baselines() == {"chance_accuracy": chance}
    assert not cache.exists()


def test_the_texts_of_recall_data_are_its_ids_with_the_values_that_stand_beside_them(cache):
    for config in (KEY_VALUE, MULTI_QUERY, INDUCTION):
        batch = ready(config, cache).probe_batch(3)
        (first, *_) = build_data(config, seed=0, max_steps=5).texts(batch)["input_ids"]
        ids, values = batch["input_ids"][0].tolist(), batch.get("token_type_ids", torch.zeros(1, len(first), dtype=int))[0]
        assert first == [f"{i}:{v}" if v else str(i) for i, v in zip(ids, values.tolist(), strict=True)]


def test_only_the_recall_tasks_are_solved_or_failed(text_config, cache):
    recall = [build_data(config, seed=0, max_steps=5).recall for config in (KEY_VALUE, MULTI_QUERY, INDUCTION)]
    others = [build_data(config, seed=0, max_steps=5).recall for config in (text_config(), DatesDataConfig())]
    assert (recall, others) == ([True] * 3, [False] * 2)


@pytest.mark.parametrize("kind", ["text", "kv"])
def test_training_goes_on_from_the_trainers_step(text_config, cache, kind):
    config = KEY_VALUE if kind == "kv" else text_config()
    whole = ids_of(ready(config, cache, accumulate=2).train_dataloader())
    rest = place(ready(config, cache, accumulate=2), step=3).train_dataloader()
    assert len(whole) == 10
    assert ids_of(rest) == whole[6:]


@pytest.mark.parametrize("kind", ["text", "kv"])
def test_ranks_share_the_global_batch(text_config, cache, kind):
    config = KEY_VALUE if kind == "kv" else text_config()
    whole = list(ready(config, cache).train_dataloader())
    ranks = [list(place(ready(config, cache), rank=rank, world=3).train_dataloader()) for rank in range(3)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([batches[step]["labels"] for batches in ranks]), batch["labels"])


@pytest.mark.parametrize("kind", ["text", "kv"])
@pytest.mark.parametrize("val_batch_size", [None, 16])
def test_ranks_share_validation_in_equal_numbers_of_batches(text_config, cache, kind, val_batch_size):
    config = KEY_VALUE if kind == "kv" else text_config()
    whole = list(ready(config, cache).val_dataloader())
    options = {"val_batch_size": val_batch_size}
    ranks = [list(place(ready(config, cache, **options), rank=rank, world=5).val_dataloader()) for rank in range(5)]
    assert len({len(batches) for batches in ranks}) == 1

    def counted(batches):
        return sorted(row for batch in batches for row in batch["labels"].tolist() if max(row) >= 0)

    assert counted([batch for batches in ranks for batch in batches]) == counted(whole)


def test_a_probe_is_the_beginning_of_validation(text_config, cache):
    module = ready(text_config(), cache)
    first = next(iter(module.val_dataloader()))
    assert torch.equal(module.probe_batch(5)["labels"], first["labels"][:5])
    assert len(module.probe_batch(10**6)["labels"]) == module.val_source().num_rows


def test_a_model_sees_text_through_a_given_tokenizer(text_config, cache):
    learnt = ready(text_config(), cache).tokenizer
    other = ready(text_config("Other words entirely. " * 20), cache, tokenizer=learnt)
    assert fingerprint(other.tokenizer) == fingerprint(learnt)


@pytest.mark.parametrize(
    ("content", "values", "message"),
    [
        ("x" * 20, {"context_len": 31}, "has 18 training tokens, but data.context_len=31 needs at least 32"),
        ("x" * 20, {"val_fraction": 0.05}, "has 1 validation tokens with data.val_fraction=0.05, but at least 2"),
    ],
)
def test_a_text_too_short_is_refused_by_name(text_config, cache, content, values, message):
    module = build_data(text_config(content, **values), seed=0, max_steps=5, data_dir=cache)
    for _ in range(2):
        with pytest.raises(ConfigError, match=rf"^data.path=.*text.txt {message}"):
            module.prepare_data()


def test_text_is_read_once_however_often_a_trainer_asks(text_config, cache, monkeypatch):
    asked, real = [], text_data.tokenised

    def tokenised(*args):
        asked.append(args)
        return real(*args)

    monkeypatch.setattr(text_data, "tokenised", tokenised)
    module = build_data(text_config(), seed=0, max_steps=5, data_dir=cache)
    for _ in range(3):
        module.prepare_data()
        module.setup("fit")
    assert len(asked) == 1


def test_a_missing_file_is_refused_before_anything_is_made(cache):
    with pytest.raises(ConfigError, match=r"data.path=absent.txt does not exist"):
        build_data(TextDataConfig(name="text", path="absent.txt"), seed=0, max_steps=5, data_dir=cache)


def test_data_cannot_be_used_before_setup(text_config):
    with pytest.raises(RuntimeError, match=r"call setup\(\) before the data is used"):
        build_data(text_config(), seed=0, max_steps=5).train_dataloader()


KINDS = {name: kind for kind in typing.get_args(DataConfig) for name in typing.get_args(typing.get_type_hints(kind)["name"])}
DELIBERATE = {"books": {"tokenizer": "bpe", "max_len": 128}}  # verses are longer than names


def test_every_config_has_a_file_and_every_file_a_config():
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == sorted(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_every_config_lists_every_key_with_its_default(name):
    values, kind = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), KINDS[name]
    must_be_given = {"path": "FILE"} if name in ("text", "pairs", "images", "hf") else {}
    stated = from_dict(kind, {**values, **must_be_given})
    assert to_dict(stated) == to_dict(kind(name=name, **must_be_given, **DELIBERATE.get(name, {})))
    assert list(values) == list(kind.__dataclass_fields__)
    for key in must_be_given:
        with pytest.raises(ConfigError, match=f"^{key}=null must name a .* with data={name}$"):
            from_dict(kind, values)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (MaskedDataConfig, {"mask_fraction": 0.0}, "mask_fraction=0.0 must lie in (0, 1)"),
        (MaskedDataConfig, {"bpe_vocab_size": 258}, "bpe_vocab_size=258 must be at least 259 (256 bytes and 3 marks)"),
        (TextDataConfig, {"bpe_vocab_size": 256}, "bpe_vocab_size=256 must be at least 257 (256 bytes and an end mark)"),
        (
            MultiQueryDataConfig,
            {"num_pairs": 65},
            "num_pairs=65 must not exceed num_keys=64: the keys of one example are distinct",
        ),
        (MultiQueryDataConfig, {"num_queries": 17}, "num_queries=17 must not exceed num_pairs=16: a key is asked for once"),
        (MultiQueryDataConfig, {"num_queries": 0}, "num_queries=0 must be positive"),
        (
            InductionDataConfig,
            {"segment_len": 1},
            "segment_len=1 must be at least 2: the first token of the copy is not asked for",
        ),
        (InductionDataConfig, {"max_gap": -1}, "max_gap=-1 must be zero or more"),
        (
            InductionDataConfig,
            {"num_tokens": 27},
            "num_tokens=27 must be at least segment_len + max_gap = 28: the tokens of one example are distinct but for the copy",
        ),
        (DatesDataConfig, {"locales": ()}, "locales=[] must name at least one locale"),
        (
            DatesDataConfig,
            {"first_year": 900},
            "first_year=900 and last_year=2099 must be years of four digits in this order",
        ),
        (
            DatesDataConfig,
            {"first_year": 2099, "val_size": 365},
            "val_size=365 must be smaller than the number of days, about 365",
        ),
        (PairsDataConfig, {"path": "a"}, "path belongs to data=pairs, not to data=verses"),
        (
            PairsDataConfig,
            {"name": "pairs", "path": "a", "val_path": "b", "val_target_path": "c"},
            "val_path=b must come like path=a: both with a target file, or both with two columns",
        ),
        (
            PairsDataConfig,
            {"name": "pairs", "path": "a", "target_path": "b", "val_target_path": "c"},
            "val_target_path=c needs val_path, its sources",
        ),
        (
            PairsDataConfig,
            {"name": "pairs", "path": "a", "source_column": "en"},
            "source_column needs the other column beside it: source_column and target_column",
        ),
        (
            PairsDataConfig,
            {"name": "pairs", "path": "a", "target_path": "b", "source_column": "en", "target_column": "de"},
            "target_path=b is a file of lines: it has no columns",
        ),
        (ClassifyDataConfig, {"languages": ("de", "de")}, "languages=['de', 'de'] must name at least two languages"),
        (ImageDataConfig, {"path": "a"}, "path=a belongs to data=images, not to data=digits"),
        (ImageDataConfig, {"shift": -1}, "shift=-1 must be zero or more"),
        (HubDataConfig, {"path": "a", "val_fraction": 1.0}, "val_fraction=1.0 must lie in (0, 1)"),
    ],
)
def test_configs_that_cannot_be_used_are_refused(kind, values, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        kind(**values)


@pytest.mark.parametrize("name", KINDS)
def test_every_config_says_how_long_its_rows_may_be(name, request):
    given = {"text": "text", "pairs": "pairs", "images": None, "hf": "documents"}
    limits = {"kv_lookup": 17, "multi_query_recall": 48, "induction": 39, "dates": 64, "digits": None, "images": None}
    limits |= {"verses": 128, "pairs": 128, "languages": 48}
    values = {"path": "FILE"} if name in given else {}
    wanted = limits.get(name, 256 if name == "hf" else 48 if name == "books" else 64)
    assert KINDS[name](name=name, **values).max_tokens == wanted


def test_learned_positions_must_reach_the_longest_row_of_the_data():
    model = TransformerConfig(max_len=63, position="learned")
    with pytest.raises(ConfigError, match=r"model.max_len=63 must reach the rows of the data, which have 64 tokens"):
        RunConfig(model=model, data=DatesDataConfig(batch_size=12))
    RunConfig(model=model, data=ImageDataConfig(batch_size=12))  # how many patches there are, the model says


SMALL = {
    "masked": (MaskedDataConfig(context_len=7, batch_size=12), "masked_lm"),
    "dates": (DatesDataConfig(train_size=101, val_size=41, batch_size=12), "seq2seq"),
    "pairs": (PairsDataConfig(name="pairs", path="FILE", tokenizer="char", batch_size=12), "seq2seq"),
    "languages": (ClassifyDataConfig(languages=("de", "nl"), batch_size=12), "classify"),
    "digits": (ImageDataConfig(batch_size=12), "classify"),
    "hf": (HubDataConfig(path="FILE", tokenizer="char", context_len=17, batch_size=12), "language_model"),
}


@pytest.fixture(params=SMALL)
def small(request, write_text, offline_datasets):
    """A small config of every kind of example-based data, and its task."""
    config, task = SMALL[request.param]
    contents = {"masked": "the raven " * 400, "pairs": "".join(f"{n}\t{-n}\n" for n in range(61))}
    if request.param in ("masked", "pairs", "hf"):
        content = contents.get(request.param, "\n".join("raven" * (n % 5 + 1) for n in range(97)))
        config = dataclasses.replace(config, path=write_text(content))
    return config, task


def test_every_task_tells_the_model_what_it_must_be(small, cache):
    config, task = small
    module = ready(config, cache)
    fields = module.model_fields()
    assert module.task == task
    assert module.vocab_size == fields.get("vocab_size", 0)
    assert len(module.examples.val) == module.val_source().num_rows
    if module.tokenizer:
        assert module.vocab_size == module.tokenizer.vocab_size
    if task == "classify":
        assert len(module.label_names) == fields["num_labels"]
    baselines = module.baselines()
    assert all(isinstance(value, float) for value in baselines.values())
    assert bool(baselines) == (task != "language_model")
    wanted = module.val_source().num_rows if task == "seq2seq" or isinstance(config, ClassifyDataConfig) else 0
    assert len(module.val_examples()) == wanted


def test_every_task_trains_and_resumes_on_addressed_batches(small, cache):
    config, _ = small
    module = ready(config, cache, accumulate=2)
    whole = list(module.train_dataloader())
    assert len(whole) == 10
    rest = list(place(ready(config, cache, accumulate=2), step=3).train_dataloader())
    for one, other in zip(whole[6:], rest, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    for step in range(5):
        counted = sum(int((batch["labels"] != -100).sum()) for batch in whole[2 * step : 2 * step + 2])
        assert {int(batch["num_targets"]) for batch in whole[2 * step : 2 * step + 2]} == {counted}


def test_workers_make_the_same_batches(cache):
    config = SMALL["dates"][0]
    alone = list(ready(config, cache).train_dataloader())
    helped = list(ready(dataclasses.replace(config, num_workers=2), cache).train_dataloader())
    assert all(torch.equal(one[key], other[key]) for one, other in zip(alone, helped, strict=True) for key in one)


def test_compressors_are_held_against_the_bytes_and_characters_of_validation(text_config, cache):
    text = "Ünder the räven, never flitting\n" * 97
    module = ready(text_config(text, val_fraction=0.3), cache)
    val = text[int(len(text) * (1 - 0.3)) :]
    found = module.baselines()
    assert found["xz_bits_per_character"] == 8 * len(lzma.compress(val.encode(), preset=9)) / len(val)
    assert found["bzip2_bits_per_byte"] == 8 * len(bz2.compress(val.encode(), 9)) / len(val.encode())
    assert len(found) == 4


@pytest.mark.slow
def test_the_compressors_on_the_king_james_text(cache):
    found = ready(TextDataConfig(), cache).baselines()
    assert found["xz_bits_per_character"] == pytest.approx(2.168, abs=0.002)
    assert found["bzip2_bits_per_character"] == pytest.approx(1.927, abs=0.002)


def test_the_fields_of_a_model_for_text_and_for_recall(text_config, cache):
    assert ready(text_config("abcabd" * 50), cache).model_fields() == {"vocab_size": 5}
    assert ready(KEY_VALUE, cache).model_fields() == {"vocab_size": 18, "type_vocab_size": 6}
    assert ready(KEY_VALUE, cache).baselines() == {"chance_accuracy": 0.2}


def test_a_missing_text_to_mask_is_refused_before_anything_is_made(cache):
    with pytest.raises(ConfigError, match=r"data.path=absent.txt does not exist"):
        build_data(MaskedDataConfig(path="absent.txt"), seed=0, max_steps=5, data_dir=cache)


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


def train(module, *, max_steps, accumulate=2, ckpt_path=None, keep=None, limit_val_batches=1.0):
    recorder = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        check_val_every_n_epoch=None,
        val_check_interval=2 * accumulate,
        num_sanity_val_steps=0,
        limit_val_batches=limit_val_batches,
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
def test_a_resumed_lightning_run_sees_what_an_uninterrupted_one_sees(text_config, cache, tmp_path, stop):
    config, options = text_config(), {"accumulate": 2, "max_steps": 5}
    whole, trainer = train(ready(config, cache, **options), max_steps=5)
    assert trainer.global_step == 5
    assert len(whole.seen) == 10
    assert whole.validated == 2 * (len(ready(config, cache).examples.val) - 1)
    kept = tmp_path / "stopped.ckpt"
    first, _ = train(ready(config, cache, **options), max_steps=stop, keep=kept)
    second, trainer = train(ready(config, cache, **options), max_steps=5, ckpt_path=kept)
    assert trainer.global_step == 5
    assert first.seen + second.seen == whole.seen
