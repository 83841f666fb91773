"""Tools for looking, on the pretended accelerator (``tests/pretend.py``): what they return on the CPU, and no device is mixed."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

import minitx.analysis
from minitx.analysis import (
    attention_statistics,
    capture,
    effects_figure,
    head_heatmap,
    head_scores,
    heads_figure,
    heatmap,
    heatmap_grid,
    intervene,
    knock_out_heads,
    logit_lens,
    patch_heads,
    save_figure,
    take_snapshot,
    to_bertviz,
    zhai_entropy_bound,
)
from minitx.analysis.answers import next_tokens
from minitx.analysis.experiments import with_knock_outs
from minitx.analysis.gradients import gradient_statistics
from minitx.analysis.snapshot import write_snapshot
from minitx.analysis.statistics import logit_step_of, logit_step_sums, token_cosine_of, token_cosine_sums
from minitx.config import TransformerConfig
from minitx.nn import AttentionCall, DecoderLM, EncoderDecoder
from minitx.nn.transfer import to_host
from tests import pretend
from tests.training.ranks import run_ranks

pytestmark = pretend.is_needed

SIZES = {"vocab_size": 29, "embed_dim": 12, "num_heads": 3, "num_layers": 2, "max_len": 32, "init": "lecun", "backend": "math"}
OF_FILES = {
    "AttentionMap",
    "HeadEffects",
    "Snapshot",
    "induction_steps",
    "read_snapshots",
    "saturation_over_steps",
}
"""Classes of results, and what reads files of a run."""


def everything(device, folder):
    """The result of each tool by its name."""
    folder.mkdir()
    torch.manual_seed(0)
    ids = torch.randint(29, (5, 7))
    real = torch.arange(7) >= torch.tensor([[0], [2], [1], [0], [0]])
    vectors = torch.randn(2, 3, 7, 4)
    model = DecoderLM(TransformerConfig(**SIZES)).eval().to(device)
    translation = EncoderDecoder(TransformerConfig(architecture="encoder_decoder", **SIZES)).eval().to(device)
    ids, real, vectors = ids.to(device), real.to(device), vectors.to(device)
    inputs, asked = {"input_ids": ids, "key_mask": real}, next_tokens("input_ids", ids.tolist(), str, 29)
    both = {**inputs, "decoder_input_ids": ids[:, :4]}
    call = AttentionCall(vectors, vectors, vectors)
    snapshot = take_snapshot(model, inputs, asked=asked)
    write_snapshot(snapshot, folder / "attention")
    results = {
        "take_snapshot": [
            snapshot.maps,
            with_knock_outs(snapshot, model, inputs, asked).answers,
            take_snapshot(translation, both).maps,
        ],
        "attention_statistics": attention_statistics(call),
        "zhai_entropy_bound": zhai_entropy_bound(vectors),
        "head_scores": head_scores(snapshot).heads,
        "to_bertviz": [to_bertviz(snapshot)],
        "knock_out_heads": knock_out_heads(model, lambda network: network(ids).square().mean((1, 2))),
        "logit_lens": logit_lens(model, **inputs),
        "logit_step": logit_step_of(to_host(logit_step_sums(call, AttentionCall(2 * vectors, vectors, vectors)))),
        "token_cosine": token_cosine_of(to_host(token_cosine_sums(vectors[:, 0], real[:2]))),
        "gradient_statistics": gradient_statistics(model, ids, lambda ids: (model(ids).square().sum(), {})),
    }
    corrupted = {**inputs, "input_ids": ids.flip(0)}
    results["patch_heads"] = effects = patch_heads(model, inputs, corrupted, lambda logits: logits[:, -1, 4])
    for what in ("statistics", "weights", "scores", "values", "heads", "feedforward", "residual"):
        for network, arguments in {model: inputs, translation: both}.items():
            heads = [2, 0] if what not in ("feedforward", "residual") else None
            with capture(network, what=what, heads=heads) as seen:
                network(**arguments)
            results[f"capture {what} {type(network).__name__}"] = dict(seen)
    results["capture"] = seen.kinds
    results["intervene"] = changed = []
    for what in ("scores", "weights", "values", "heads", "feedforward", "residual"):
        options = {"positions": [0, -2]} if what != "weights" else {}
        with intervene(model, what, lambda x: 0.5 * x, **options), intervene(model, what, 0.25, layers=[1]):
            changed.append(model(**inputs))
    figures = {
        "heatmap": heatmap(snapshot.maps[0].weights[0, 0]),
        "heatmap_grid": heatmap_grid(snapshot),
        "head_heatmap": head_heatmap(snapshot, 0, 1),
        "heads_figure": heads_figure(head_scores(snapshot)),
        "effects_figure": effects_figure(effects),
    }
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}.png")
        results[name] = (folder / f"{name}.png").stat().st_size > 1000
    results["save_figure"] = len(figures)
    return as_arrays(results)


def as_arrays(value):
    """Plain data that can travel between processes. A tensor becomes an array."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if dataclasses.is_dataclass(value):
        return [as_arrays(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return {name: as_arrays(each) for name, each in value.items()}
    return [as_arrays(each) for each in value] if isinstance(value, list | tuple) else value


def on_both_devices(folder):
    device = pretend.register()  # before the first backward pass
    return everything(torch.device("cpu"), folder / "cpu"), everything(device, folder / "device")


def assert_near(there, here, place):
    assert type(there) is type(here), place
    if isinstance(here, np.ndarray):
        assert there.dtype == here.dtype, place
        np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-6, err_msg=place)
    elif isinstance(here, dict | list):
        keys = here if isinstance(here, dict) else range(len(here))
        assert len(there) == len(here), place
        for key in keys:
            assert_near(there[key], here[key], f"{place} {key}")
    elif isinstance(here, float):
        assert there == pytest.approx(here, rel=1e-4, abs=1e-5, nan_ok=True), place
    else:
        assert there == here, place


@pytest.mark.slow
def test_every_tool_returns_on_an_accelerator_what_it_returns_on_the_cpu(tmp_path):
    here, there = run_ranks(1, on_both_devices, tmp_path)[0]
    assert {*minitx.analysis.__all__} - OF_FILES <= here.keys(), "a tool is not tried on the accelerator"
    assert_near(there, here, "")
