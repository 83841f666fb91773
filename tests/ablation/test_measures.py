"""What runs of a grid do beside training: callbacks that any run can use, added by an override."""

from __future__ import annotations

import json
import math

import pytest
import torch

from minitx.ablation import measures
from minitx.ablation.design import AblationConfig, StudyConfig
from minitx.ablation.measures import check_measures, result_of
from minitx.cli.compose import compose_config
from minitx.config import ConfigError
from minitx.training.run import train

POEM = "Once upon a midnight dreary, while I pondered, weak and weary,\nOver many a quaint and curious volume\n"
TEXT = ["data=text", "data.batch_size=12", "data.context_len=7"]
TINY = ["model.embed_dim=8", "model.num_heads=2", "model.num_layers=1",
        "model.ffn_dim=16", "model.max_len=16", "model.init=lecun", "trainer.max_steps=6", "trainer.accelerator=cpu",
        "trainer.val_every=0", "trainer.log_every=1", "trainer.threads=1", "trainer.rehearse=false", "callbacks.progress=false", "callbacks.probe.every=0"]  # fmt: skip


def callback(name, **options):
    keys = "".join(f", {key}: {json.dumps(value)}" for key, value in options.items())
    return f"+callbacks.mine_{name.lower()}={{_target_: minitx.ablation.measures.{name}{keys}}}"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``run("name", "more=overrides")`` trains on a small text; gives the folder and what came of it."""
    monkeypatch.setattr("minitx.data.token_cache.data_dir", lambda: tmp_path / "data")
    text = tmp_path / "text.txt"
    text.write_text(POEM * 9, encoding="utf-8")

    def make(name, *words):
        folder = tmp_path / name
        data = [] if any(word.startswith("data=") for word in words) else [*TEXT, f"data.path={text}"]
        return folder, train(compose_config([*data, *TINY, *words]), folder)

    return make


def measured(folder):
    return json.loads((folder / "measures.json").read_text())


# --- measures


@pytest.mark.parametrize("name", ["loss_at_nine", "loss_at_N", "attention_erorr"])
def test_a_measure_that_nothing_writes_is_refused(name):
    grid = {"arms": {"a": ()}, "studies": {"s": StudyConfig(arms=("a",), scores=("loss",), measures=("loss_at_9", name))}}
    with pytest.raises(
        ConfigError, match=rf"^ablation\.studies\.s\.measures=\['loss_at_9', '{name}'\] must be among loss_at_N, a"
    ):
        check_measures(AblationConfig(**grid))


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


def test_measuring_leaves_the_run_bit_equal_and_exact_attention_has_no_error(run):
    whole = "trainer.val_batches=null"
    plain, before = run("plain", whole)
    folder, after = run("run", whole, callback("Measures", lengths=[7, 13], attention=True))
    alone, watched = (result_of(place, result, 6) for place, result in ((plain, before), (folder, after)))
    assert (alone["digest"], alone["val_loss"]) == (watched["digest"], watched["val_loss"])
    assert alone["measures"] == {}
    found = watched["measures"]
    assert found["loss_at_7"] == pytest.approx(after["val_loss"], rel=1e-5)  # the length of training
    assert found["loss_at_13"] != pytest.approx(after["val_loss"], rel=1e-3)
    assert found["attention_error"] < 1e-6 and found["attention_cost"] == 1.0


def test_operations_are_those_of_one_training_step_and_change_nothing_of_the_run(run):
    words = ("trainer.accumulate=2", "optimizer=muon", "callbacks.probe.every=4")
    plain, watched = (
        run(name, *words, *more) for name, more in (("plain", ()), ("run", (callback("Measures", operations=True),)))
    )
    assert result_of(*plain, 6)["digest"] == result_of(*watched, 6)["digest"]
    found = measured(run("adamw", callback("Measures", operations=True), "callbacks.probe.every=4")[0])["operations"]
    B, L, E, H, D, F, V = 12, 7, 8, 2, 4, 16, len({*POEM}) + 1  # and the unknown character
    matrices = 6 * B * L * (4 * E * E + 2 * E * F + E * V)  # forward, and the gradients of inputs and weights
    attention = 2 * B * H * L * L * (2 * D + 5 * D)  # the backward pass computes the scores again
    assert found == matrices + attention
    assert measured(watched[0])["operations"] > found  # both micro-batches, and Muon's products


def test_linear_attention_costs_what_is_counted(run):
    linear = measured(run("linear", callback("Measures", attention=True), "model.attention=linear")[0])
    # q·k and p·v of 4 and of 4 + 1 numbers for 7² pairs, and the state of 4 × 5 read and made, over 8 · 7²
    assert linear["attention_cost"] == pytest.approx((7 * 7 * (4 + 5) + 2 * 7 * 4 * 5) / (7 * 7 * 8))


def test_the_error_of_a_window_is_that_of_the_keys_that_it_drops(run, monkeypatch):
    """Beside attention computed here, of the same queries, keys and values, over all keys up to each query."""
    seen, inner = [], measures._against_exact
    monkeypatch.setattr(measures, "_against_exact", lambda core, call: seen.append(call) or inner(core, call))
    folder, _ = run("run", callback("Measures", attention=True), "model.window=3")
    query, key, value = (tensor.double() for tensor in (seen[0].query, seen[0].key, seen[0].value))
    behind = torch.arange(7)[:, None] - torch.arange(7)
    scores = (query @ key.transpose(-1, -2) / math.sqrt(4)).masked_fill(behind < 0, -math.inf)
    exact, near = scores.softmax(-1) @ value, scores.masked_fill(behind >= 3, -math.inf).softmax(-1) @ value
    error = float((near - exact).norm() / exact.norm())
    assert measured(folder)["attention_error"] == pytest.approx(error, rel=1e-4) and error > 1e-3


def test_a_run_whose_last_update_broke_it_is_not_finite(run):
    folder, trained = run(
        "broken", "trainer.max_steps=1", "optimizer.lr=1e30", "schedule.warmup_steps=0", "on_nonfinite=record"
    )
    assert (trained["steps"], trained["nonfinite_step"], trained["val_loss"]) == (1, 1, None)
    assert result_of(folder, trained, 1)["nonfinite_step"] == 2


@pytest.mark.parametrize(("words", "message"), [
    ([callback("Measures", lengths=[17])], "lengths=17 exceeds model.max_len=16, the limit of position=learned"),
    ([callback("Measures", attention=True), "model.position=alibi"], "the model has alibi"),
    ([callback("Measures", lengths=[5]), "data=kv_lookup", "model.position=none"], "a language model of text"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_training(run, tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        run("run", *words)
    assert not (tmp_path / "run").exists()
