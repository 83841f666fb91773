"""Numbers beside the loss of a finished run."""

from __future__ import annotations

import dataclasses

import pytest

from minitx.config import ConfigError, HubDataConfig, TransformerConfig
from minitx.training.evaluation import evaluate
from minitx.training.run import train


def test_the_loss_at_the_length_of_training_is_the_validation_loss(make_config, tmp_path):
    config = make_config(evaluation__lengths=(7, 13), trainer__val_batches=None)
    result = train(config, tmp_path / "run")
    assert set(result["measures"]) == {"loss_at_7", "loss_at_13"}
    assert result["measures"]["loss_at_7"] == pytest.approx(result["val_loss"], rel=1e-5)
    assert result["measures"]["loss_at_13"] != pytest.approx(result["val_loss"], rel=1e-3)


def test_documents_are_measured_at_every_length(make_config, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    path = tmp_path / "documents.txt"
    path.write_text("\n".join(f"{n} " + "abc" * (n % 7) for n in range(61)), encoding="utf-8")
    documents = HubDataConfig(path=str(path), tokenizer="char", context_len=11, batch_size=4)
    config = make_config(evaluation__lengths=(5, 11), model__position="rotary", trainer__val_batches=None)
    result = train(dataclasses.replace(config, data=documents), tmp_path / "run")
    assert result["measures"]["loss_at_11"] == pytest.approx(result["val_loss"], rel=1e-5)
    assert result["measures"]["loss_at_5"] != pytest.approx(result["val_loss"], rel=1e-3)


def test_measuring_leaves_the_run_bit_equal(make_config, tmp_path):
    plain = train(make_config(), tmp_path / "plain")
    measured = train(make_config(evaluation__lengths=(5,), evaluation__attention_cost=True), tmp_path / "measured")
    assert measured["loss_digest"] == plain["loss_digest"]
    assert measured["val_loss"] == plain["val_loss"]
    assert plain["measures"] == {}


def test_exact_attention_has_no_error_and_costs_what_it_costs(make_config, tmp_path):
    found = train(make_config(evaluation__attention_cost=True), tmp_path / "run")["measures"]
    assert found["attention_error"] < 1e-6
    assert found["attention_cost"] == 1.0


def test_a_window_has_the_error_of_the_keys_that_it_drops(make_config, tmp_path):
    errors = []
    for window in (1, 3, 7):
        model = TransformerConfig(embed_dim=8, num_heads=2, num_layers=1, max_len=16, init="lecun", window=window)
        config = dataclasses.replace(make_config(evaluation__attention_cost=True), model=model)
        errors.append(train(config, tmp_path / str(window))["measures"]["attention_error"])
    assert errors[0] > errors[1] > 1e-3
    assert errors[2] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation__lengths": (17,)}, "evaluation.lengths: 17 is beyond model.max_len=16 of position=learned"),
        ({"evaluation__attention_cost": True, "model__position": "alibi"}, "the model has alibi"),
        ({"evaluation__attention_cost": True, "model__softcap": 5.0}, "the model has softcap"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(make_config, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(make_config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_every_length_is_measured_on_as_many_tokens(make_config, tmp_path, monkeypatch):
    seen = []

    def spy(network, data, options):
        seen.append((data.task.val.context_len, options.num_rows))
        return evaluate(network, data, options)

    monkeypatch.setattr("minitx.training.measures.evaluate", spy)
    train(make_config(evaluation__lengths=(7, 14, 16), evaluation__num_rows=6), tmp_path / "run")
    assert seen == [(7, 6), (14, 3), (16, 2)]


def test_a_backend_without_a_formula_is_refused_before_training(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation\.attention_cost=true: "):
        train(make_config(evaluation__attention_cost=True, model__backend="flex"), tmp_path / "run")
