"""What runs of a grid do beside training: callbacks that any run can use, added by an override."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch

from minitx.ablation.callbacks import AttentionTemperature
from minitx.ablation.measures import result_of
from minitx.cli.compose import compose_config
from minitx.config import ConfigError
from minitx.training.evaluation import evaluate
from minitx.training.metrics import read_metrics
from minitx.training.run import train
from minitx.training.stored import load_model

POEM = "Once upon a midnight dreary, while I pondered, weak and weary,\nOver many a quaint and curious volume\n"
TEXT = ["data=text", "data.batch_size=12", "data.context_len=7"]
TINY = ["model.embed_dim=8", "model.num_heads=2", "model.num_layers=1",
        "model.ffn_dim=16", "model.max_len=16", "model.init=lecun", "trainer.max_steps=6", "trainer.accelerator=cpu",
        "trainer.val_every=0", "trainer.log_every=1", "trainer.threads=1", "callbacks.progress=false", "callbacks.probe.every=0"]  # fmt: skip


def callback(name, **options):
    keys = "".join(f", {key}: {json.dumps(value)}" for key, value in options.items())
    return f"+callbacks.mine_{name.lower()}={{_target_: minitx.ablation.callbacks.{name}{keys}}}"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run("name", "more=overrides")`` trains on a small text; gives the folder and what came of it."""
    monkeypatch.setattr("minitx.data.load.data_dir", lambda: tmp_path / "data")
    text = tmp_path / "text.txt"
    text.write_text(POEM * 9, encoding="utf-8")

    def make(name, *words):
        folder = tmp_path / name
        data = [] if any(word.startswith("data=") for word in words) else [*TEXT, f"data.path={text}"]
        return folder, train(compose_config([*data, *TINY, *words]), folder)

    return make


def column(folder, name):
    return [row.get(name) for row in read_metrics(folder / "metrics.csv") if row["train_loss"] is not None]


def measured(folder):
    return json.loads((folder / "measures.json").read_text())


# --- temperature


def test_a_temperature_is_the_scale_factor_of_its_window_and_touches_no_other_update(run):
    def losses(name, *words):
        folder, result = run(name, *words)
        return column(folder, "train_loss"), result["val_loss"]

    plain, _ = losses("plain")
    hot, hot_validation = losses("all", callback("AttentionTemperature", value=0.25, first=0, last=6))
    factor, factor_validation = losses("factor", "model.scale_factor=4.0")
    assert hot == factor
    assert hot_validation == factor_validation
    late, late_validation = losses("late", callback("AttentionTemperature", value=0.25, first=3, last=5))
    assert late[:3] == plain[:3]
    assert late[3] != plain[3]
    assert late_validation != hot_validation


@pytest.mark.parametrize(("value", "first", "last"), [(0.0, 0, 1), (math.nan, 0, 1), (1.0, 2, 2), (1.0, -1, 2)])
def test_a_temperature_without_a_meaning_is_refused(value, first, last):
    with pytest.raises(ValueError, match=r"value=|first="):
        AttentionTemperature(value, first, last)


def test_two_temperatures_in_a_run_are_refused(run):
    one = callback("AttentionTemperature", value=0.5, first=0, last=1)
    with pytest.raises(ValueError, match="several AttentionTemperature"):
        run("run", one, one.replace("mine_", "yours_"))


# --- gradient


def test_the_gradient_norm_is_that_of_all_but_queries_and_keys_at_each_step(run, monkeypatch):
    from minitx.training.module import TrainingModule

    expected, inner = [], TrainingModule.on_before_optimizer_step

    def look(module, optimizer):
        chosen = [p.grad for name, p in module.network.named_parameters() if not {"q_proj", "k_proj"} & set(name.split("."))]
        expected.append(math.sqrt(sum(float(gradient.double().square().sum()) for gradient in chosen)))
        inner(module, optimizer)

    monkeypatch.setattr(TrainingModule, "on_before_optimizer_step", look)
    folder, _ = run("run", callback("GradientNorm"), "trainer.clip=null")
    found, whole = column(folder, "gradient"), column(folder, "grad_norm")
    assert found == pytest.approx(expected, rel=1e-5)
    assert all(part < norm for part, norm in zip(found, whole, strict=True))


# --- measures


def test_documents_are_measured_at_every_length(run, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    path = tmp_path / "documents.txt"
    path.write_text("\n".join(f"{n} " + "abc" * (n % 7) for n in range(61)), encoding="utf-8")
    documents = ["data=hf", f"data.path={path}", "data.tokenizer=char", "data.context_len=11", "data.batch_size=4"]
    words = [*documents, "model.position=rotary", "trainer.val_batches=null"]
    folder, result = run("run", *words, callback("Measures", lengths=[5, 11]))
    assert measured(folder)["loss_at_11"] == pytest.approx(result["val_loss"], rel=1e-5)
    assert measured(folder)["loss_at_5"] != pytest.approx(result["val_loss"], rel=1e-3)


def test_every_length_is_measured_on_as_many_tokens(run, monkeypatch):
    seen = []

    def spy(network, data, options):
        seen.append((data.task.val.context_len, options.num_rows))
        return evaluate(network, data, options)

    monkeypatch.setattr("minitx.ablation.callbacks.evaluate", spy)
    run("run", callback("Measures", lengths=[7, 14, 16]), "evaluation.num_rows=6")
    assert seen == [(7, 6), (14, 3), (16, 2)]


def test_measuring_leaves_the_run_bit_equal_and_exact_attention_has_no_error(run):
    whole = "trainer.val_batches=null"
    plain, before = run("plain", whole)
    folder, after = run("run", whole, callback("Measures", lengths=[7, 13], attention=True), callback("GradientNorm"))
    results = [result_of(place, result, 6) for place, result in ((plain, before), (folder, after))]
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["val_loss"] == results[1]["val_loss"]
    assert (results[0]["measures"], results[0]["gradient"]) == ({}, None)
    found = results[1]["measures"]
    assert set(found) == {"loss_at_7", "loss_at_13", "attention_error", "attention_cost"}
    assert found["loss_at_7"] == pytest.approx(after["val_loss"], rel=1e-5)  # the length of training
    assert found["loss_at_13"] != pytest.approx(after["val_loss"], rel=1e-3)
    assert found["attention_error"] < 1e-6
    assert found["attention_cost"] == 1.0


def test_linear_attention_costs_what_is_counted(run):
    linear = measured(run("linear", callback("Measures", attention=True), "model.attention=linear")[0])
    # q·k and p·v of 4 and of 4 + 1 numbers for 7² pairs, and the state of 4 × 5 read and made, over 8 · 7²
    assert linear["attention_cost"] == pytest.approx((7 * 7 * (4 + 5) + 2 * 7 * 4 * 5) / (7 * 7 * 8))


@pytest.mark.parametrize("window", [1, 3])
def test_the_error_of_a_window_is_that_of_the_keys_that_it_drops(run, monkeypatch, window):
    """Beside attention computed here, of the same queries, keys and values, over all keys up to each query."""
    from minitx.data.module import DataModule

    seen, inner = [], DataModule.probe_batch

    def spy(self, rows):
        seen.append(inner(self, rows))
        return seen[-1]

    monkeypatch.setattr(DataModule, "probe_batch", spy)
    folder, _ = run("run", callback("Measures", attention=True), f"model.window={window}", "trainer.ckpt_every=100")
    model = load_model(str(folder / "checkpoints" / "last.ckpt"))[0].eval()
    calls = []
    attention = next(part for part in model.modules() if hasattr(part, "core"))
    attention.core.register_forward_pre_hook(lambda core, args: calls.append(copy.copy(args[0])))
    with torch.no_grad():
        model(seen[-1]["input_ids"])
    query, key, value = calls[0].query.double(), calls[0].key.double(), calls[0].value.double()
    scores = query @ key.transpose(-1, -2) / math.sqrt(4)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    exact = scores.masked_fill(hidden, -math.inf).softmax(-1) @ value
    near = scores.masked_fill(hidden | torch.ones(7, 7, dtype=torch.bool).tril(-window), -math.inf).softmax(-1) @ value
    found = measured(folder)
    assert found["attention_error"] == pytest.approx(float((near - exact).norm() / exact.norm()), rel=1e-4, abs=1e-6)
    assert found["attention_error"] > 1e-3


@pytest.mark.parametrize(("words", "message"), [
    ([callback("Measures", lengths=[17])], "lengths: 17 is beyond model.max_len=16 of position=learned"),
    ([callback("Measures", attention=True), "model.position=alibi"], "the model has alibi"),
    ([callback("Measures", attention=True), "model.softcap=5.0"], "the model has softcap"),
    ([callback("Measures", lengths=[5]), "data=kv_lookup", "model.position=none"], "a language model of text"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_training(run, tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        run("run", *words)
    assert not (tmp_path / "run").exists()
