"""``twin`` names the mistake of a port, and finds none in a right port."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from minitx.check import Status, twin
from minitx.check.port_mistakes import with_values
from minitx.check.tensor_trace import Change, Trace
from minitx.cli.check import main

REFERENCE = """
import torch
from torch import nn


def rotate(x, theta=10000.0):
    a, b = x.chunk(2, -1)
    angles = torch.arange(x.shape[-2])[:, None] * theta ** (-torch.arange(a.shape[-1]) / a.shape[-1])
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Attention(nn.Module):
    def __init__(self, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.dim = heads, groups, width // heads
        self.qkv, self.out = nn.Linear(width, (heads + 2 * groups) * self.dim), nn.Linear(width, width)

    def forward(self, x, mask):
        B, L, E = x.shape
        q, k, v = (t.view(B, L, -1, self.dim).transpose(1, 2) for t in self.qkv(x).split([E, self.groups * self.dim, self.groups * self.dim], -1))
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        places = torch.arange(L)
        seen = (places <= places[:, None]) & (places[:, None] - places < 5)
        if mask is not None:
            seen = seen & (mask == 1)[:, None, None]
        scores = q @ k.mT * self.dim**-0.5
        return self.out((scores.masked_fill(~seen, -1e9).softmax(-1) @ v).transpose(1, 2).reshape(B, L, E))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn, self.norm1, self.norm2 = Attention(width, 4, 2), nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.gate_up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x, mask):
        x = x + self.attn(self.norm1(x), mask)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class GPT(nn.Module):
    def __init__(self, vocab=40, width=32):
        super().__init__()
        self.table, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(2)), nn.RMSNorm(width, eps=1e-6)

    def forward(self, ids, mask=None):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))
"""

MISTAKES = {  # the id, words of the finding and the first module, and what is replaced by what
    "theta": ("rotary", "theta 500;", "blocks.0.attn", "theta=10000.0", "theta=500.0"),
    "pairs": ("rotary", "rotation of pairs", "blocks.0.attn", "a, b = x.chunk(2, -1)", "a, b = x[..., ::2], x[..., 1::2]"),
    "window": ("visible", "5 tokens before it and itself; in the reference 4 tokens", "blocks.0.attn", "- places < 5", "- places <= 5"),
    "the token itself": ("visible", "4 tokens before it; in the reference 4 tokens before it and itself", "blocks.0.attn", "places <= places[:, None])", "places < places[:, None])"),
    "a later token": ("visible", "4 tokens before it and itself and 1 after it; in", "blocks.0.attn", "places <= places[:, None])", "places <= places[:, None] + 1)"),
    "scale": ("scale", "0.3536 (1/√d_k)", "blocks.0.attn", "self.dim**-0.5", "self.dim**-1.0"),
    "soft-cap": ("soft-cap", "of 2,", "blocks.0.attn", "self.dim**-0.5\n", "self.dim**-0.5\n        scores = 2 * torch.tanh(scores / 2)\n"),
    "heads": ("head-order", "are tiled", "blocks.0.attn", "repeat_interleave(self.heads // self.groups, 1)", "repeat(1, self.heads // self.groups, 1, 1)"),
    "order of k and v": ("split-order", "q, v, k", "blocks.0.attn", "q, k, v = (t", "q, v, k = (t"),
    "eps": ("norm-eps", "eps is 1e-03, in the reference 1e-06", "blocks.0.norm1", "1e-6", "1e-3"),
    "residual": ("multiplier", "1 x + 0.5 y", "blocks.0", "x = x + self.attn", "x = x + 0.5 * self.attn"),
    "polarity": ("mask-polarity", "mask has the other polarity", "", "mask == 1", "mask == 0"),
}  # fmt: skip


def model(*edits: tuple[str, str]) -> nn.Module:
    """The model with edits of its source, the same weights at every call."""
    source = REFERENCE
    for old, new in edits:
        assert old in source
        source = source.replace(old, new)
    space: dict = {"__name__": "gpt"}
    exec(source, space)
    torch.manual_seed(0)
    made = space["GPT"]()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.1 if parameter is made.table.weight else 3 if parameter.dim() == 2 else 1)
    return made


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_the_first_module(name):
    id, words, module, *edit = MISTAKES[name]
    report = twin(model(tuple(edit)), model())
    assert [finding.id for finding in report.findings] == [id], report
    assert report.exit_code == 1
    assert words in report.findings[0].fault
    if module:
        assert f"first module: {module} (" in report.findings[0].witness
        assert "equals the port to rounding" in report.findings[0].advice


BY_HAND = (
    "scores.masked_fill(~seen, -1e9).softmax(-1)",
    "(lambda s: s / s.sum(-1, keepdim=True))((scores.masked_fill(~seen, -torch.inf) - scores.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)).exp())",
)


def test_a_causal_mask_off_by_one_is_named_if_the_softmax_is_written_by_hand():
    report = twin(model(BY_HAND, MISTAKES["a later token"][-2:]), model(BY_HAND))
    assert [finding.id for finding in report.findings] == ["visible"] and "1 after it" in report.findings[0].fault, report
    assert "equals the port to rounding" in report.findings[0].advice


@pytest.mark.parametrize("word", ["port", "reference"])
def test_a_model_that_is_random_in_evaluation_is_named_so(word):
    noisy = model(("x = self.table(ids)", "x = nn.functional.dropout(self.table(ids), 0.1)"))
    report = twin(*((noisy, model()) if word == "port" else (model(), noisy)))
    assert [finding.id for finding in report.findings] == ["random"] and f"calls of the {word} " in report.findings[0].fault, (
        report
    )


def test_two_mistakes_are_both_named():
    report = twin(model(MISTAKES["theta"][-2:], MISTAKES["residual"][-2:]), model())
    assert [finding.id for finding in report.findings] == ["rotary", "multiplier"]


def test_a_wider_window_is_named_if_scores_have_a_bias():
    bias = ("self.dim**-0.5\n", "self.dim**-0.5 - 0.3 * (places[:, None] - places).abs()\n")
    report = twin(model(bias, MISTAKES["window"][-2:]), model(bias))
    assert [finding.id for finding in report.findings] == ["visible"], report


def test_a_sum_in_place_is_a_sum():
    sums = [("x = x + self.attn", f"x = x.clone()\n        x += {factor} * self.attn") for factor in (1.0, 0.5)]
    report = twin(model(sums[1]), model(sums[0]))
    assert [finding.fault for finding in report.findings] == ["the sum in blocks.0 is 1 x + 0.5 y"], report


def test_a_change_that_does_not_fit_the_model_is_not_tried_further():
    class Layers(nn.Module):
        def __init__(self, eps):
            super().__init__()
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(16, 2, 32, layer_norm_eps=eps, batch_first=True)
            self.table, self.layers, self.head = nn.Embedding(40, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 40)

        def forward(self, ids):
            return self.head(self.layers(self.table(ids)))

    report = twin(Layers(1e-3), Layers(1e-5))  # two norms a layer, as of queries and keys, but after the attention
    faults = [finding.fault for finding in report.findings]
    assert faults == ["layers.layers.0.norm1: eps is 1e-03, in the reference 1e-05"], report


def test_a_mistake_outside_the_catalogue_is_not_named():
    one_layer = ("in range(2)", "in range(1)")
    report = twin(model(one_layer, ("silu(gate)", "silu(gate).roll(1, 1)")), model(one_layer))
    assert [finding.id for finding in report.findings] == ["not-named"]
    assert "first module: blocks.0 (Block), before blocks.0.down" in report.findings[0].witness


class Split(nn.Module):
    """A right port in another layout: separate projections, einsum, fused norms."""

    def __init__(self):
        super().__init__()
        whole = model()
        self.table, self.head, self.norm = whole.table, whole.head, whole.norm
        self.q, self.k, self.v, self.out = (nn.ModuleList() for _ in range(4))
        self.rest = nn.ModuleList(whole.blocks)
        for block in whole.blocks:
            weights, biases = (x.detach().split([32, 16, 16]) for x in (block.attn.qkv.weight, block.attn.qkv.bias))
            for modules, weight, bias in zip((self.q, self.k, self.v), weights, biases, strict=True):
                modules.append(nn.Linear(32, len(bias)))
                modules[-1].load_state_dict({"weight": weight, "bias": bias})

    def forward(self, ids):
        x, L = self.table(ids), ids.shape[1]
        places = torch.arange(L)
        hidden = torch.zeros(L, L).masked_fill((places > places[:, None]) | (places[:, None] - places >= 5), float("-inf"))
        angles = places[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
        turn = torch.polar(torch.ones_like(angles), angles)
        for q, k, v, block in zip(self.q, self.k, self.v, self.rest, strict=True):
            y = block.norm1(x)
            heads = [p(y).unflatten(-1, (-1, 2, 4)).transpose(1, 2) for p in (q, k)]
            q, k = (torch.view_as_real(torch.view_as_complex(t.mT.contiguous()) * turn).flatten(-2) for t in heads)
            k, v = (t.repeat_interleave(2, 1) for t in (k, v(y).unflatten(-1, (-1, 8)).transpose(1, 2)))
            weights = (torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5 + hidden).softmax(-1)
            x = x + block.attn.out(torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2))
            gate, up = block.gate_up(block.norm2(x)).chunk(2, -1)
            x = x + block.down(nn.functional.silu(gate) * up)
        return self.head(self.norm(x))


def test_a_right_port_in_another_layout_is_equal():
    report = twin(Split(), model())
    assert not report.findings, report
    assert report.with_status(Status.PASSED)[0].id == "outputs"
    assert report.exit_code == 0


def test_each_buffer_keeps_its_numbers():
    class Scaled(nn.Module):
        def __init__(self, names):
            super().__init__()
            self.net, self.names = model(), names
            for number, name in enumerate(names):
                self.register_buffer(name, torch.tensor(2.0 + number), persistent=False)

        def forward(self, ids):
            factors = [getattr(self, name) for name in self.names] or torch.arange(2.0, 10.0)
            return self.net(ids) * torch.stack(list(factors)).repeat(5)

    report = twin(Scaled([]), Scaled(list("abcdefgh")))
    assert not report.findings, report


def test_functions_of_ids_are_compared():
    reference = model()
    report = twin(lambda ids: reference(ids) / 4, reference, torch.arange(12).view(2, 6))
    assert [finding.fault for finding in report.findings] == ["logits are 0.25 times the reference's"]


def test_the_models_keep_their_weights():
    mine, reference = model(MISTAKES["eps"][-2:]), model()
    before = [p.clone() for m in (mine, reference) for p in m.parameters()]
    twin(mine, reference)
    assert all(torch.equal(p, q) for p, q in zip(before, [p for m in (mine, reference) for p in m.parameters()], strict=True))
    assert torch.get_default_dtype() == torch.float32


def test_a_change_ends_with_its_call():
    changed, ids = model(), torch.arange(14).view(2, 7)
    before = [p.clone() for p in changed.parameters()]
    with torch.no_grad():
        plain = Trace(changed, lambda: changed(ids), ids).output
        for values in ({"weight": lambda weight: weight + 1}, {"eps": lambda eps: 1.0}):
            other = Change("", "", {changed.norm: partial(with_values, **values)})
            assert not torch.equal(Trace(changed, lambda: changed(ids), ids, [other]).output, plain)
            assert torch.equal(changed(ids), plain)
    assert all(torch.equal(p, q) for p, q in zip(before, changed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda state: {name: tensor for name, tensor in state.items() if "head" not in name}, "missing: head.weight"),
        (lambda state: state | {"other": state["head.weight"]}, "unexpected: other"),
        (
            lambda state: state | {"head.weight": state["head.weight"].T},
            r"head.weight must have shape \(40, 32\), got \(32, 40\)",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        twin(model(), model(), weights=weights)


def test_models_without_a_common_weight_are_refused():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40))

        def forward(self, ids):
            return self.net(ids)

    with pytest.raises(ValueError, match="no weight in common"):
        twin(Other(), model())


def test_the_program_compares_two_files(tmp_path, monkeypatch, capfd):
    maker = "\n\ndef make():\n    torch.manual_seed(0)\n    return GPT()\n\n\ndef convert(state):\n    return state\n"
    (tmp_path / "theirs.py").write_text(REFERENCE + maker)
    (tmp_path / "mine.py").write_text(REFERENCE.replace("theta=10000.0", "theta=500.0") + maker)
    monkeypatch.chdir(tmp_path)

    def code(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["check.py", "mine.py:make", *arguments])
        return main()

    assert code("like=theirs.py:make", "weights=mine.py:convert", "json=out.json") == 1
    assert json.loads(Path("out.json").read_text())["findings"][0]["id"] == "rotary"
    assert code("like=theirs.py:nothing") == code("like=folder") == code("weights=mine.py:convert") == 2
    assert "theirs.py does not define nothing" in capfd.readouterr().err
