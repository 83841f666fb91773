"""The ledger: formulas against counts, part by part; the meter sees what runs, and a wrong number shows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from minitx.analysis import attention_cost as formulas
from minitx.analysis.attention_cost import AttentionShape, attention_call, attention_cost, running_core
from minitx.analysis.cost import ledger, measure_model, model_call
from minitx.analysis.flops import train_flops
from minitx.analysis.growth import ATTENTIONS, figure, growth, with_attention
from minitx.analysis.meter import Meter, allocations, fit_exponent, measure
from minitx.config import ConfigError, TransformerConfig
from minitx.nn import Causal, scaled_dot_product_attention
from minitx.nn.backends import chunked
from minitx.nn.feedforward import FeedForward
from minitx.nn.models import build_model

CONFIGS = Path(__file__).parents[2] / "configs" / "model"
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
FROM_DATA = {"vocab_size": 67, "num_labels": 5, "image_size": 12, "num_channels": 3}
SMALL = {**FROM_DATA, "embed_dim": 24, "num_heads": 3, "num_layers": 2, "max_len": 131}


def values_of(name):
    values = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    for base in values.pop("defaults", []):
        if isinstance(base, str):  # else the dataclass's own defaults
            values = {**values_of(base), **values}
    return values


def preset(name, **changes):
    """A preset as train.py composes it."""
    return TransformerConfig(**{**values_of(name), **changes})


def disagreements(config, batch_size, length, *, backward, tolerance=0.02):
    """Parts whose parameters or operations are not those that were counted, or whose bytes are farther off."""
    parts, counted = (
        ledger(config, batch_size, length, backward=backward),
        measure_model(config, batch_size, length, backward=backward),
    )
    found = []
    for part in parts:
        place = part.stack, part.name
        for kind in ("parameters", "flops"):
            if getattr(part, kind) != getattr(counted, kind)[place]:
                found.append((place, kind, getattr(part, kind), getattr(counted, kind)[place]))
        if backward and abs(counted.bytes[place] - part.bytes) > tolerance * part.bytes:
            found.append((place, "bytes", part.bytes, counted.bytes[place]))
    places = {(part.stack, part.name) for part in parts}
    return found + [place for kind in (counted.parameters, counted.flops, counted.bytes) for place in kind.keys() - places]


@pytest.mark.parametrize("name", PRESETS)
def test_the_parameters_of_every_preset_are_those_of_the_model(name):
    config = preset(name, **FROM_DATA, **({"num_layers": 1} if name == "gpt2" else {}))
    assert sum(part.parameters for part in ledger(config, 1, 5)) == sum(p.numel() for p in build_model(config).parameters())


@pytest.mark.parametrize(("backend", "backward"), [("math", True), ("sdpa", True), ("chunked", True), ("sdpa", False)])
@pytest.mark.parametrize("name", PRESETS)
def test_every_part_of_every_preset_costs_what_is_counted(name, backend, backward):
    heads = 1 if name == "recall" else 3
    config = preset(name, **{**SMALL, "num_heads": heads, "num_layers": 1}, backend=backend)
    assert disagreements(config, 2, 36, backward=backward, tolerance=0.02) == []


OPTIONS = [
    {"logit_softcap": 30.0, "num_layers": 3},
    {"norm_position": "sandwich", "norm": "rms", "layer_scale": 0.1},
    {"norm_position": "deepnorm", "activation": "relu2", "embed_norm": True},
    {"parallel": True, "activation": "geglu", "stochastic_depth": 0.1, "type_vocab_size": 2},
    {"dropout": 0.1, "activation": "swiglu"},
    {"qk_norm": "rms", "position": "rotary", "num_kv_heads": 1, "activation": "reglu"},
    {"qk_norm": "layer", "head_dim": 10, "bias": False, "qkv_bias": True},
    {"qk_norm": "l2", "scale": "learned", "scale_factor": 2.0, "out_bias": False},
    {"num_kv_heads": 1, "backend": "math", "tie_embeddings": False, "head_bias": True, "scale_logits": True},
    {"num_kv_heads": 1, "backend": "chunked", "window": 17, "sinks": True},
    {"window": 17},
    {"window": 17, "backend": "math", "softcap": 5.0},
    {"position": "alibi"},
    {"position": "t5", "backend": "chunked"},
    {"position": "none", "scale": "log_length"},
    {"num_experts": 4, "activation": "swiglu"},
    {"num_experts": 3, "experts_per_token": 1, "activation": "relu"},
    {"checkpointing": True},
    {"checkpointing": True, "norm_position": "post", "backend": "chunked"},
    {"checkpointing": True, "parallel": True, "num_experts": 3},
    {"attention": "linear"},
    {"attention": "linear", "num_kv_heads": 1},
    {"attention": "performer", "num_features": 13, "num_kv_heads": 1},
    {"architecture": "encoder", "attention": "linformer", "num_slots": 11, "head": "token"},
    {"architecture": "encoder", "attention": "linear", "head": "sequence", "pooling": "mean", "pooler": True},
    {"architecture": "encoder", "head_transform": True, "norm": "rms", "position": "rotary"},
    {"architecture": "encoder", "head": "sequence", "norm_position": "post", "pooling": "mean"},
    {"architecture": "encoder_decoder", "num_decoder_layers": 1, "position": "rotary", "qk_norm": "rms"},
    {"architecture": "encoder_decoder", "parallel": True, "position": "t5", "window": 17},
    {"architecture": "vision", "head": "none", "embed_norm": True},
    {"architecture": "vision", "head": "sequence", "pooling": "first", "dropout": 0.1},
]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_of_a_model_costs_what_is_counted(option):
    config = TransformerConfig(**{**SMALL, **option})
    assert disagreements(config, 2, 37 if config.architecture == "vision" else 130, backward=True, tolerance=0.05) == []


@pytest.mark.parametrize("option", [{}, {"window": 3, "num_kv_heads": 1}, {"num_experts": 3}, {"checkpointing": True}, {"attention": "linear"}, {"architecture": "encoder", "head": "sequence"}, {"architecture": "encoder_decoder"}], ids=str)  # fmt: skip
def test_what_is_needed_is_the_accounting_of_the_project(option):
    config = TransformerConfig(**{**SMALL, **option})
    want = 2 * train_flops(config, 29)
    assert sum(part.needed for part in ledger(config, 2, 29)) == pytest.approx(want, rel=1e-12)
    assert sum(part.needed for part in ledger(config, 2, 29, backward=False)) == pytest.approx(want / 3, rel=1e-12)


def test_gpt2_costs_a_token_what_is_published():
    """124 million parameters at 1024 tokens: 798 million operations a token causal, about 855 with all scores."""
    config = preset("gpt2", vocab_size=50257, backend="math")
    parts = ledger(config, 1, 1024)
    assert sum(part.parameters for part in parts) == 124_439_808
    assert round(sum(part.needed for part in parts) / 1024 / 1e6) == 798
    assert sum(part.flops for part in parts) / 1024 == pytest.approx(855e6, rel=1e-3)


def test_a_case_worked_out_by_hand():
    config = TransformerConfig(
        vocab_size=7, embed_dim=6, num_heads=2, num_layers=1, max_len=5, ffn_dim=11, bias=False, backend="math"
    )
    parts = {part.name: part for part in ledger(config, 3, 5, backward=False)}
    assert parts["q_proj"].parameters, parts["q_proj"].flops == (36, 2 * 15 * 36)
    assert parts["core"].flops == 3 * 2 * 25 * (2 * 3 + 2 * 3)  # B H L L: q·k and p·v, three wide each
    assert parts["core"].needed == 3 * 2 * 15 * (2 * 3 + 2 * 3)  # 1 + 2 + 3 + 4 + 5 visible pairs
    assert (parts["feedforward"].parameters, parts["feedforward"].flops) == (132, 2 * 15 * 132)
    assert parts["feedforward"].bytes == 4 * 15 * 11 * 2  # what goes into the GELU, and what comes out
    assert (parts["embedding"].parameters, parts["norms"].parameters, parts["head"].parameters) == (72, 36, 0)
    assert (parts["head"].flops, parts["head"].bytes) == (
        2 * 15 * 42,
        4 * 15 * 7 + 8 * 5,
    )  # logits, and the positions that were looked up


def shape(attention, *, causal, length, batch_size=1, backward=True, **changes):
    config = TransformerConfig(architecture="decoder" if causal else "encoder", **{**SMALL, "embed_dim": 48, **changes})
    return AttentionShape(with_attention(config, attention, length), batch_size, length, causal, training=backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_multiplies_what_its_formula_says_and_its_peak_is_within_the_stated_factor(attention, causal, backward):
    if attention == "linformer" and causal:
        with pytest.raises(ConfigError, match="linformer is not causal"):
            shape(attention, causal=True, length=5)
        return
    for batch_size, length, kv_heads in ((2, 300, 3), (1, 517, 1)):
        one = shape(attention, causal=causal, length=length, batch_size=batch_size, backward=backward, num_kv_heads=kv_heads)
        found, (flops, peak) = measure(attention_call(one)), attention_cost(one)
        assert flops == found["flops"]
        factor = 1.15 if attention in ("math", "sdpa") else 1.5
        assert 1 / factor < peak / found["peak"] < factor, (batch_size, length, peak, found["peak"])


# claimed exponents in the length of operations and of bytes
CLAIMS = {
    "math": (2, 2),
    "sdpa": (2, 1),
    "chunked": (2, 1),
    "linear": (1, 1),
    "performer": (1, 1),
    "linformer": (1, 1),
}


@pytest.mark.parametrize("attention", CLAIMS)
def test_the_fitted_exponents_are_the_claimed_ones(attention, monkeypatch):
    monkeypatch.setattr(
        chunked, "LARGEST", 32
    )  # tiles that are small beside a sequence, or their constant size hides the growth
    sizes = {**SMALL, "embed_dim": 64, "num_heads": 1}
    config = TransformerConfig(architecture="encoder", **sizes, num_slots=32)
    found = growth(config, attention, (128, 256, 512), backward=attention != "chunked")
    assert found.counted == found.flops
    for got, want in zip((found.flops_exponent, found.bytes_exponent), CLAIMS[attention], strict=True):
        assert -0.13 < got - want < 0.03, (got, want)


def test_a_window_and_slots_of_the_models_own_stay():
    config = TransformerConfig(**{**SMALL, "window": 9, "num_slots": 5})
    assert with_attention(config, "math", 1000).max_len == 1000
    assert with_attention(dataclasses.replace(config, window=None), "linear", 7).num_slots is None
    with pytest.raises(ConfigError, match="window=9 has no meaning with attention=linear"):
        with_attention(config, "linear", 7)
    with pytest.raises(ValueError, match=r"attention='maths' is not known; one of math, sdpa"):
        with_attention(config, "maths", 7)


def test_the_core_that_runs_is_the_one_that_is_explained():
    cases = [({}, "sdpa"), ({"softcap": 3.0}, "math"), ({"position": "t5", "backend": "sdpa"}, "sdpa, plain"), ({"dropout": 0.1}, "sdpa, plain"), ({"attention": "linear"}, "linear")]  # fmt: skip
    for option, name in cases:
        config = TransformerConfig(**{**SMALL, **option})
        assert running_core(AttentionShape(config, 1, 7, True)) == name
    assert running_core(AttentionShape(TransformerConfig(**SMALL, dropout=0.1), 1, 7, True, training=False)) == "sdpa"
    large = TransformerConfig(**{**SMALL, "softcap": 3.0, "max_len": 1024})
    assert running_core(AttentionShape(large, 1, 1024, True)) == "chunked"
    with pytest.raises(ValueError, match=r"backend=sdpa cannot serve this call: torch's kernels have no soft-cap"):
        ledger(TransformerConfig(**SMALL, softcap=3.0, backend="sdpa"), 1, 7)


# a count that cannot be wrong proves nothing: each fault, in the code or in a formula, must show


def test_a_formula_that_forgets_a_product_is_found(monkeypatch):
    monkeypatch.setitem(formulas._CORES, "math", lambda shape: formulas._math(shape)._replace(backward=0))
    config = TransformerConfig(**SMALL, backend="math")
    assert [place for place, *_ in disagreements(config, 1, 29, backward=True)] == [("decoder", "core")]


def test_a_layer_that_multiplies_twice_is_found(monkeypatch):
    forward = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: (self.up_proj(x), forward(self, x))[1])
    (found,) = disagreements(TransformerConfig(**SMALL), 1, 29, backward=False)
    assert found == (("decoder", "feedforward"), "flops", 4 * 29 * 2 * 24 * 96, 6 * 29 * 2 * 24 * 96)


def test_tiles_that_are_no_longer_skipped_are_found(monkeypatch):
    config = TransformerConfig(**{**SMALL, "max_len": 600}, backend="chunked")
    one = AttentionShape(config, 1, 600, True, training=False)
    assert measure(attention_call(one))["flops"] == attention_cost(one)[0]
    monkeypatch.setattr(Causal, "verdict", lambda *_: (False, False))
    assert measure(attention_call(one))["flops"] > 1.2 * attention_cost(one)[0]


def test_an_activation_that_is_kept_for_nothing_is_found(monkeypatch):
    forward = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: forward(self, x * (x.sin() + 1.0)))
    places = [place for place, *_ in disagreements(TransformerConfig(**SMALL), 2, 29, backward=True)]
    assert places == [("decoder", "feedforward")]


# the meter


def test_products_inside_our_operators_are_counted_and_torchs_fused_attention_by_its_formula():
    q = torch.randn(1, 2, 512, 8, requires_grad=True)
    whole = 2 * 512 * 512 * 8 * 4
    for backend, forward, backward in (("math", 1.0, 2.0), ("sdpa", 1.0, 2.5), ("chunked", 0.75, 1.875)):
        with Meter() as meter:
            out = scaled_dot_product_attention(q, q, q, is_causal=True, backend=backend)
            before = meter.flops
            out.sum().backward()
        assert (before, meter.flops - before) == (forward * whole, backward * whole), backend


def test_looking_into_an_operator_changes_no_bit_of_its_answer():
    q = torch.randn(1, 2, 300, 8, requires_grad=True)
    answers = []
    for look in (False, True):
        q.grad = None
        out = scaled_dot_product_attention(q, q, q, is_causal=True, backend="chunked")
        if look:
            with Meter():
                out = scaled_dot_product_attention(q, q, q, is_causal=True, backend="chunked")
                out.square().sum().backward()
        else:
            out.square().sum().backward()
        answers.append((out.detach(), q.grad))
    assert all(torch.equal(a, b) for a, b in zip(*answers, strict=True))


def test_operations_of_the_backward_pass_belong_to_the_module_that_ran_forward():
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    with Meter() as meter, meter.watch(model):
        model(torch.randn(11, 5)).sum().backward()
    assert meter.flops_of == {"0": 2 * 11 * 35 * 2, "2": 2 * 11 * 21 * 3}  # the first layer's input has no gradient
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_run_that_fails_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(5, 7))
    with pytest.raises(RuntimeError, match="shapes"), Meter() as meter, meter.watch(model):
        model(torch.randn(2, 5))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model[0](torch.randn(2, 5)).shape == (2, 7)


def test_the_allocator_and_the_meter_agree_on_the_peak():
    config = TransformerConfig(**SMALL, backend="math")
    _, run = model_call(config, 2, 64)
    assert allocations(run)[1] == pytest.approx(measure(run)["peak"], rel=0.02)
    assert allocations(lambda: torch.ones(10) + torch.ones(10)) == (40, 120)


@pytest.mark.parametrize(
    ("sizes", "costs", "message"),
    [
        ((3,), (4,), "two sizes at least"),
        ((3, 3), (4, 5), "two sizes"),
        ((3, 5), (4,), "as many"),
        ((3, 5), (0, 4), "positive"),
    ],
)
def test_an_exponent_needs_two_sizes_and_positive_costs(sizes, costs, message):
    with pytest.raises(ValueError, match=message):
        fit_exponent(sizes, costs)


def test_the_figure_has_a_panel_for_operations_and_one_for_bytes():
    config = TransformerConfig(**SMALL)
    curves = [growth(config, name, (8, 16), backward=False) for name in ("math", "linear")]
    drawn = figure(curves, "a title with $ and _")
    assert [ax.get_ylabel() for ax in drawn.axes] == ["operations", "bytes at once"]
    assert all(len(ax.lines) == 4 and math.isclose(ax.get_xlim()[0], 8, rel_tol=0.1) for ax in drawn.axes)
    assert [text.get_text() for text in drawn.axes[0].get_legend().get_texts()] == [f"{c.attention}: $n^{{{c.flops_exponent:.2f}}}$" for c in curves]  # fmt: skip
    assert dataclasses.replace(curves[0], attention="other").flops == curves[0].flops
