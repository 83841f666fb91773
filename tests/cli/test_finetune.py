"""model.pretrained: somebody's weights and tokenizer go on with a text of one's own."""

from __future__ import annotations

import json

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from minitx.cli.pretrained import load_pretrained
from minitx.config import ConfigError, TransformerConfig
from minitx.data.tokenizers import train_tokenizer
from minitx.interop import load_hf, save_hf, save_pretrained
from minitx.nn import DecoderLM
from minitx.training.stored import load_model

TEXT = "In the beginning was the Word, and the Word was with God, and the Word was God. " * 40
GPT2 = {"embed_dim": 12, "num_heads": 3, "num_layers": 2, "max_len": 64, "activation": "gelu_tanh"}


@pytest.fixture
def theirs(tmp_path):
    """A folder in GPT-2's format with a byte-level tokenizer, as the hub has them."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    torch.manual_seed(2)
    folder = tmp_path / "theirs"
    save_hf(DecoderLM(TransformerConfig(vocab_size=tokenizer.get_vocab_size(), **GPT2)), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return folder


def arguments(theirs, *more):
    steps = ["trainer.max_steps=3", "schedule.warmup_steps=1", "trainer.log_every=1", "trainer.val_every=0"]
    sizes = ["data.context_len=32", "data.batch_size=4", "trainer.accelerator=cpu", "output_dir=run"]
    chosen = ["experiment=finetune", f"model.pretrained={theirs}", f"data.path={theirs.parent / 'text.txt'}"]
    return [*chosen, *steps, *sizes, *more]


def test_training_goes_on_from_the_weights_and_with_the_tokenizer_of_the_folder(cli, theirs, place):
    said = cli(*arguments(theirs, "optimizer.lr=1e-30"))
    assert (said.code, said.err) == (0, "")
    found = json.loads((place / "run" / "evaluation.json").read_text(encoding="utf-8"))
    assert found["metrics"]["bits_per_byte"]["value"] > 0
    model, tokenizer, _ = load_model(place / "run" / "checkpoints" / "last.ckpt")
    ids = tokenizers.Tokenizer.from_file(str(theirs / "tokenizer.json")).encode("the Word was God").ids
    assert tokenizer.encode("the Word was God").tolist() == ids
    with torch.no_grad():
        torch.testing.assert_close(model(torch.tensor([ids])), load_hf(theirs)(torch.tensor([ids])))
    losses = (place / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert len(losses) > 3


def test_a_switch_of_attention_can_be_flipped_in_a_model_that_was_trained_without_it(theirs):
    model, _ = load_pretrained(TransformerConfig(pretrained=str(theirs), scale="unscaled", dropout=0.1))
    plain = load_hf(theirs)
    assert (model.config.scale, model.config.dropout, model.config.embed_dim) == ("unscaled", 0.1, 12)
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in model.state_dict().items())
    ids = torch.arange(20).view(1, 20)
    assert not torch.equal(model.eval()(ids), plain(ids))


def test_a_folder_of_our_own_is_one_to_start_from_too(tmp_path):
    tokenizer = train_tokenizer("char", [TEXT])
    torch.manual_seed(0)
    ours = DecoderLM(TransformerConfig(vocab_size=tokenizer.vocab_size, **GPT2))
    save_pretrained(ours, tmp_path / "ours", tokenizer=tokenizer)
    model, again = load_pretrained(TransformerConfig(pretrained=str(tmp_path / "ours")))
    assert torch.equal(model.head.weight, ours.head.weight)
    assert again.encode("Word").tolist() == tokenizer.encode("Word").tolist()


def test_what_does_not_fit_is_told_with_its_shapes(theirs):
    with pytest.raises(ConfigError) as raised:
        load_pretrained(TransformerConfig(pretrained=str(theirs), ffn_dim=13))
    said = str(raised.value)
    assert said.startswith(f"model.pretrained={theirs} does not fit model.ffn_dim=13")
    assert "blocks.0.feedforward.up_proj.weight" in said
    assert "torch.Size([48, 12])" in said
    assert "torch.Size([13, 12])" in said


def test_a_mistake_is_one_sentence(cli, theirs):
    said = cli("experiment=finetune")
    assert (said.code, said.err) == (2, "error: model.pretrained=FOLDER is not a folder with a config.json\n")
    said = cli(*arguments(theirs.parent))
    assert (said.code, said.err) == (2, f"error: model.pretrained={theirs.parent} is not a folder with a config.json\n")
    (theirs / "tokenizer.json").unlink()
    assert cli(*arguments(theirs)).err.startswith(f"error: {theirs / 'tokenizer.json'} cannot be read: ")
    config = json.loads((theirs / "config.json").read_text(encoding="utf-8"))
    (theirs / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}), encoding="utf-8")
    said = cli(*arguments(theirs))
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert said.err.startswith(f"error: model.pretrained={theirs} cannot be loaded: ")
    assert "model_type='mamba' is not known" in said.err
