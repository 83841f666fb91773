from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
import yaml

from minitx.config import ConfigError, KeyValueDataConfig, TextDataConfig
from minitx.data.module import build_data

KEY_VALUE = KeyValueDataConfig(num_keys=13, num_values=5, num_pairs=7, batch_size=12, val_size=41)
CONFIGS = Path(__file__).parents[2] / "configs" / "data"


def place(module, *, step=0, rank=0, world=1):
    """Put a module where a trainer would."""
    device = SimpleNamespace(root_device=torch.device("cpu"))
    module.trainer = SimpleNamespace(global_step=step, global_rank=rank, world_size=world, strategy=device)
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
    assert module.describe()["train_tokens"] == 270


def test_bits_per_byte_and_character_count_tokens_of_validation(text_config, cache):
    module = ready(text_config("é" * 500, tokenizer="bpe", bpe_vocab_size=257), cache)  # one token a byte, two a character
    assert module.bits_per == pytest.approx({"byte": 1.442695, "character": 2 * 1.442695})


def test_a_key_value_module_knows_what_a_model_needs(cache):
    module = ready(KEY_VALUE, cache)
    assert (module.vocab_size, module.type_vocab_size, module.tokenizer) == (18, 6, None)
    assert (module.floors, module.bits_per, module.describe()["chance"]) == ({}, {}, 0.2)
    assert not cache.exists()


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
    assert other.tokenizer.fingerprint() == learnt.fingerprint()


@pytest.mark.parametrize(
    ("content", "values", "message"),
    [
        ("x" * 20, {"context_len": 31}, "has 18 training tokens, but data.context_len=31 needs at least 32"),
        ("x" * 20, {"val_fraction": 0.05}, "has 1 validation tokens with data.val_fraction=0.05, but at least 2"),
    ],
)
def test_a_text_too_short_is_refused_by_name(text_config, cache, content, values, message):
    module = build_data(text_config(content, **values), seed=0, max_steps=5, data_dir=cache)
    with pytest.raises(ConfigError, match=rf"^data.path=.*text.txt {message}"):
        module.prepare_data()


def test_a_missing_file_is_refused_before_anything_is_made(cache):
    with pytest.raises(ConfigError, match=r"data.path=absent.txt does not exist"):
        build_data(TextDataConfig(name="text", path="absent.txt"), seed=0, max_steps=5, data_dir=cache)


def test_data_cannot_be_used_before_setup(text_config):
    with pytest.raises(RuntimeError, match=r"call setup\(\) before the data is used"):
        build_data(text_config(), seed=0, max_steps=5).train_dataloader()


@pytest.mark.parametrize("name", ["kjv", "text", "kv_lookup"])
def test_every_config_lists_every_key_with_its_default(name):
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    must_be_given = {"path": "FILE"} if name == "text" else {}
    kind = KeyValueDataConfig if name == "kv_lookup" else TextDataConfig
    assert kind(**{**values, **must_be_given}) == kind(name=name, **must_be_given)
    assert list(values) == list(kind.__dataclass_fields__)


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
    assert whole.validated == 2 * (len(ready(config, cache).text.val) - 1)
    kept = tmp_path / "stopped.ckpt"
    first, _ = train(ready(config, cache, **options), max_steps=stop, keep=kept)
    second, trainer = train(ready(config, cache, **options), max_steps=5, ckpt_path=kept)
    assert trainer.global_step == 5
    assert first.seen + second.seen == whole.seen
