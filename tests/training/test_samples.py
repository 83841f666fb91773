"""Text that is written while a model is trained."""

from types import SimpleNamespace

import pytest
import torch
from extra import AddLoggers, losses_of, train_with
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers.logger import DummyLogger

from minitx.config import ConfigError, StopAtConfig, TransformerConfig, node
from minitx.nn import build_model
from minitx.training.json_lines import read_json_lines
from minitx.training.net import Net
from minitx.training.run import train
from minitx.training.samples import Samples, SamplesOptions


class Letters:
    """A tokenizer of lower-case letters."""

    characters = None

    def encode(self, text):
        if not text.isalpha():
            raise ValueError(f"{text!r} is not made of letters")
        return torch.tensor([ord(letter) % 26 for letter in text])

    def decode(self, ids):
        return "".join(chr(97 + id % 26) for id in ids)


def samples(folder, seed=0, **changes):
    plain = {"every": 2, "prompts": ("once", "upon"), "max_new_tokens": 5, "temperature": 0.0}
    rows = SimpleNamespace(task=SimpleNamespace(tokenizer=Letters(), encode_prompt=None, first_id=None))
    return Samples(SamplesOptions(**{**plain, **changes}), folder=folder, rows=rows, seed=seed)


@pytest.mark.parametrize("stop", [None, StopAtConfig(metric="train_loss", value=1e9, window=1, extra_steps=4)])
def test_texts_go_to_the_log_a_file_and_loggers_of_text(make_config, tmp_path, caplog, stop):
    logger, tables = DummyLogger(), []
    logger.log_text = lambda key, columns, data, step: tables.append((key, columns, [*map(list, data)], step))
    caplog.set_level("INFO", "minitx")
    config = make_config(trainer__max_steps=9 if stop else 5, trainer__stop_at=stop)
    train_with(config, tmp_path, AddLoggers(logger), samples(tmp_path))
    records = read_json_lines(tmp_path / "samples.jsonl")
    assert [(record["step"], record["prompt"]) for record in records] == [(s, p) for s in (2, 4, 5) for p in ("once", "upon")]
    assert all(len(record["text"]) == 5 for record in records)
    pairs = {s: [[record["prompt"], record["text"]] for record in records if record["step"] == s] for s in (2, 4, 5)}
    assert tables == [("samples", ["prompt", "text"], data, step) for step, data in pairs.items()]
    assert sum(record["text"] in line for record in records for line in caplog.messages) >= len(records)


def test_the_last_step_has_texts_also_where_its_validation_fails(make_config, tmp_path):
    failing = LambdaCallback(on_validation_end=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_with(make_config(trainer__max_steps=3), tmp_path, samples(tmp_path), failing)
    assert read_json_lines(tmp_path / "samples.jsonl")[-1]["step"] == 3


def test_draws_depend_on_seed_and_step_alone_and_leave_the_run_bit_equal(make_config, tmp_path):
    config, texts = make_config(model__dropout=0.3, trainer__max_steps=3), {}
    train(config, tmp_path / "without")
    for name, seed, every in (("a", 1, 1), ("b", 1, 3), ("c", 2, 3)):
        train_with(config, tmp_path / name, samples(tmp_path / name, temperature=2.0, seed=seed, every=every))
        texts[name] = {(r["step"], r["prompt"]): r["text"] for r in read_json_lines(tmp_path / name / "samples.jsonl")}
        assert losses_of(tmp_path / name) == losses_of(tmp_path / "without")
    assert texts["b"].items() <= texts["a"].items()
    assert texts["b"] != texts["c"]


def test_an_encoder_decoder_answers(make_config, tmp_path):
    model = node(build_model, architecture="encoder_decoder", embed_dim=8, num_heads=2, num_layers=1, max_len=64)
    data = {"_target_": "minitx.data.dates", "batch_size": 12, "locales": ("en",), "train_size": 31, "val_size": 7}
    train_with(make_config(trainer__max_steps=2, model=model, data=data), tmp_path, samples(tmp_path))
    assert len(read_json_lines(tmp_path / "samples.jsonl")) == 2


def test_what_cannot_be_sampled_is_refused_before_the_first_step(tmp_path):
    trainer = SimpleNamespace(strategy=None, is_global_zero=True, global_step=0)
    ours = build_model(TransformerConfig(vocab_size=5, embed_dim=4, num_heads=2, num_layers=1))
    for network, prompts, key in (
        (torch.nn.Linear(1, 1), ["a"], "callbacks.samples.every"),
        (ours, [""], "callbacks.samples.prompts"),
    ):
        with pytest.raises(ConfigError, match=f"^{key}[= ]"):
            samples(tmp_path, prompts=prompts).on_train_start(trainer, SimpleNamespace(net=Net.of(network)))
