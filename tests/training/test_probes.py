"""What the probes write down is what happened, in the run that they watch."""

import pytest
import torch
from extra import fit

from minitx.analysis import capture, read_snapshots
from minitx.analysis.probe import Probe
from minitx.analysis.statistics import token_cosine_of, token_cosine_sums
from minitx.config import ConfigError, node
from minitx.data.datamodule import open_data
from minitx.data.task import Task
from minitx.interop import adopt_hf
from minitx.training.checkpoints import load_model
from minitx.training.json_lines import read_json_lines, read_probes
from minitx.training.metrics_csv import read_metrics
from minitx.training.net import Net
from minitx.training.run import train
from minitx.training.schedules import constant
from tests.interop.families import build


def test_every_diagnostic_is_there_for_every_layer_and_head(make_config, tmp_path):
    probe = {"probe__every": 2, "probe__weights_every": 4, "probe__weights_rows": 2}
    train(make_config(model__num_layers=2, trainer__max_steps=4, **probe), tmp_path)
    records, means = (read(tmp_path / "probes.jsonl") for read in (read_json_lines, read_probes))
    assert [record["step"] for record in records] == [0, 1, 2, 4]
    single = {"token_cosine", "grad_q", "grad_k", "grad_v", "grad_query_rms", "grad_query_median", "snr_q", "snr_k", "snr_v"}
    heads = {"entropy", "row_std", "max_logit", "ipr", "saturation_99", "jacobian_fro", "argmax_retention"}
    for record in records:
        assert [layer["name"] for layer in record["layers"]] == ["blocks.0.attention.core", "blocks.1.attention.core"]
        for layer in record["layers"]:
            by_head = {name: len(value) for name, value in layer.items() if isinstance(value, list)}
            assert by_head.keys() > heads
            assert set(by_head.values()) == {2}
            assert ("logit_step" in by_head) == (record["step"] > 0)
            assert {name for name, value in layer.items() if isinstance(value, float)} == single
    assert records[0]["layers"][0]["argmax_retention"] == [1.0, 1.0]
    assert means[1]["layers"][0]["entropy"] == pytest.approx(sum(records[1]["layers"][0]["entropy"]) / 2)
    first, last = read_snapshots(tmp_path)
    assert (first.step, last.step, first.tokens) == (0, 4, last.tokens)
    assert first.maps[0].weights.shape == (2, 2, 7, 7)
    assert not torch.equal(first.maps[0].weights, last.maps[0].weights)


def test_a_probe_runs_the_network_once_before_an_update_and_once_after_it(make_config, tmp_path, monkeypatch):
    calls, run = [], Net.__call__
    monkeypatch.setattr(Net, "__call__", lambda net, batch: (calls.append(batch), run(net, batch))[1])
    counts = []
    for every in (0, 2):
        train(make_config(trainer__max_steps=4, probe__every=every), tmp_path / str(every))
        counts.append(len(calls) - sum(counts))
    # after 0, 1, 2 and 4 updates, and before the fourth: before the first and the second, it was just looked at
    assert counts[1] - counts[0] == 5


@pytest.mark.parametrize("position", ["learned", "t5"])
def test_the_logit_step_is_the_change_that_one_update_made(make_config, tmp_path, position):
    """Against the scores of two checkpoints one update apart, computed from the network alone."""
    scores = []
    for steps in (3, 4):
        options = {"probe__every": 2, "model__position": position}
        config = make_config(trainer__max_steps=steps, trainer__ckpt_every=1, schedule=node(constant), **options)
        train(config, tmp_path / str(steps))
        network = load_model(tmp_path / str(steps) / "checkpoints" / "last.ckpt")[0].eval()
        ids = open_data(config.data, config.trainer, seed=config.seed).probe_batch(3)["input_ids"]
        with torch.no_grad(), capture(network, what="scores") as seen:
            network(ids)
        scores.append(seen["blocks.0.attention.core"][0])
    seen = scores[0].isfinite()
    seen[:, :, 0] = False  # one visible key
    change = torch.where(seen, scores[1] - scores[0], 0.0).double()
    expected = (change.square().sum((0, 2, 3)) / seen.sum((0, 2, 3))).sqrt()
    records = {record["step"]: record for record in read_json_lines(tmp_path / "4" / "probes.jsonl")}
    assert records[4]["layers"][0]["logit_step"] == pytest.approx(expected.tolist(), rel=1e-4)


def test_a_model_without_weights_to_look_at_is_refused(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"callbacks\.probe\.every: the model has no attention weights"):
        train(make_config(model__attention="linear", probe__every=2), tmp_path / "run")


@pytest.mark.filterwarnings("ignore:.*ran several times")
@pytest.mark.parametrize("name", ["Llama", "Bert", "T5", "Albert"])
def test_an_adopted_model_is_probed_as_it_is_captured_without_its_padding(name, tmp_path):
    pytest.importorskip("transformers")
    model, sizes = adopt_hf(build(name)), (7, 5, 2)
    rows = [{"input_ids": list(range(3, 3 + n)), "labels": list(range(3, 3 + n))} for n in sizes]
    if name == "T5":
        rows = [{**row, "decoder_input_ids": row["input_ids"][:-1], "labels": row["labels"][1:]} for row in rows]
    real = torch.arange(7) < torch.tensor(sizes)[:, None]
    inputs = {"input_ids": torch.arange(3, 10) * real, "attention_mask": real.long()}
    if name == "T5":
        inputs |= {"decoder_input_ids": inputs["input_ids"][:, :6] * real[:, 1:], "decoder_attention_mask": real[:, 1:].long()}
    with torch.no_grad(), capture(model) as seen, capture(model, what="residual") as streams:
        model(**inputs)
    callbacks = {"probe": node(Probe, every=2, batch_size=3, weights_every=2, weights_rows=2)}
    masks = {"key_masks": {"input_ids": "key_mask", "decoder_input_ids": "decoder_key_mask"}} if name == "T5" else {}
    task = Task(name="mine", train=rows, val=rows, model_fields={"vocab_size": 99}, **masks)
    fit(tmp_path, task, model=model, batch_size=3, max_steps=2, val_every=0, callbacks=callbacks)
    records = read_json_lines(tmp_path / "probes.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [layer["name"] for layer in records[0]["layers"]] == list(seen)
    for layer in records[0]["layers"]:
        assert layer["entropy"] == pytest.approx(seen[layer["name"]][0]["entropy"].tolist(), abs=1e-5)
        stream = next(calls[0] for block, calls in streams.items() if layer["name"].startswith(f"{block}."))
        cosine = token_cosine_of(token_cosine_sums(stream, real[:, 7 - stream.shape[1] :]))
        assert layer["grad_query_rms"] > 0 and layer["token_cosine"] == pytest.approx(float(cosine), abs=1e-5)
    snapshot = read_snapshots(tmp_path)[-1]
    assert torch.equal(snapshot.real["input_ids"], real[:2]) and [one.name for one in snapshot.maps] == list(seen)


def test_the_norm_of_a_gradient_is_that_of_the_step_and_frozen_projections_have_none(make_config, tmp_path):
    frozen = {"all but one": [{"match": r"v_proj\.weight"}, {"match": "", "trainable": False}]}
    frozen["two"] = [{"match": "(q|k)_proj", "trainable": False}]
    for name, rules in frozen.items():
        train(make_config(probe__every=2, optimizer__rules=rules, trainer__max_steps=2), tmp_path / name)
        layers = [record["layers"][0] for record in read_probes(tmp_path / name / "probes.jsonl")]
        assert all("snr_v" in layer and "snr_q" not in layer for layer in layers)
        assert all((layer["grad_q"], layer["grad_k"]) == (0.0, 0.0) for layer in layers)
        assert all((layer.get("grad_query_rms", 0.0) > 0.0) == (name == "two") for layer in layers)
        if name == "all but one":
            rows = read_metrics(tmp_path / name / "metrics.csv")
            assert layers[-1]["grad_v"] == pytest.approx(rows[1]["grad_norm"], rel=1e-6)
