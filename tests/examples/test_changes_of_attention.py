"""``examples/changes``: each change of attention equals its formula, and the grid ``changes`` gives it the size that the grid states."""

import copy
import functools
import importlib
import json
import math
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from examples.changes import repeats
from examples.changes.attention_residuals import AttentionResiduals
from examples.changes.differential import Differential
from examples.changes.latent import LatentAttention
from examples.changes.no_positions import NoPositions
from examples.changes.output_gate import OutputGate
from examples.changes.qk_clip import QKClip
from examples.changes.value_residual import value_residual
from minitx.ablation.design import settings
from minitx.ablation.execution import CellJob
from minitx.ablation.grid import Cell, GridPlace, Runs, cells
from minitx.ablation.judge import judge
from minitx.ablation.report import study_pictures
from minitx.check import assert_causal, check_model
from minitx.cli.ablate import run_cell, stored_records
from minitx.cli.compose import compose_cell, compose_grid, find_own_modules
from minitx.config import ConfigError, TransformerConfig, node
from minitx.config.schema import read
from minitx.config.training import Model
from minitx.nn import MultiHeadAttention, QKNorm, Rotary, build_model, fold_scale
from minitx.nn.counting import count_flops
from minitx.training.network_building import network_of

E, H, D, L = 24, 2, 6, 7
SMALL = {"embed_dim": 24, "ffn_dim": 20, "max_len": 16, "vocab_size": 11}
LATENT = {"latent_dim": 5, "rotary_dim": 6}


@pytest.fixture(scope="module")
def grid():
    find_own_modules()
    return compose_grid(["experiment=scaling_ablation", "ablation=changes"])


@pytest.fixture(scope="module")
def arms(grid):
    return grid.studies["loss"].factors["change"]


@functools.cache
def plain_node():
    return compose_cell(["experiment=scaling_cell_text", "model.position=rotary", "trainer.max_steps=1"]).model.plain()


def built(overrides, **fields):
    """The model of a cell with these overrides. Hydra's grammar is YAML's here, and takes a tenth of the time."""
    words = {key.removeprefix("model."): yaml.safe_load(value) for key, value in settings(overrides).items() if "model." in key}
    if "latent_dim" in str(words) and "embed_dim" in fields:
        words["attention"] |= LATENT
    return network_of(read(Model, {**plain_node(), **words, **fields}, "model"))


def small(arms, name, *more):
    torch.manual_seed(0)
    return built([*arms[name], *more], **SMALL).double().eval()


CHANGES = (
    *("plain", "gate", "differential", "value_residual", "qk_norm", "qk_clip", "softcap", "sinks", "learned", "log_length"),
    *("latent", "no_positions", "attention_residuals"),
)
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


def randomised(module, std=0.4):
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.double()


def inputs():
    return torch.randn(2, L, E, dtype=torch.float64)


def heads(x, count):
    return x.view(*x.shape[:2], count, -1).transpose(1, 2)


def softmax_map(q, k, scale):
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return (scale * q @ k.mT).masked_fill(hidden, -math.inf).softmax(-1)


def rotated(x, base=10000.0):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * base ** (-torch.arange(half, dtype=x.dtype) / half)
    turns = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turns.real, turns.imag), dim=-1)


# --- formulas


def test_the_gate_multiplies_each_number_of_the_heads_before_the_output_projection():
    torch.manual_seed(0)
    layer, x = randomised(OutputGate(E, H, head_dim=D)), inputs()
    q, k, v = (heads(projection(x), H) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    joined = (softmax_map(q, k, D**-0.5) @ v).transpose(1, 2).flatten(2)
    expected = (joined * torch.sigmoid(x @ layer.gate_proj.weight.T + layer.gate_proj.bias)) @ layer.out_proj.weight.T
    torch.testing.assert_close(layer(x, is_causal=True), expected + layer.out_proj.bias, rtol=0, atol=1e-12)


@pytest.mark.parametrize("number", [0, 2])
def test_differential_attention_subtracts_the_second_map_of_each_pair(number):
    torch.manual_seed(number)
    count = 4
    layer, x = randomised(MultiHeadAttention(E, count, head_dim=D, core=Differential(D, number))), inputs()
    q, k, v = (heads(projection(x), count) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
    start = 0.8 - 0.6 * math.exp(-0.3 * number)
    l1, m1, l2, m2 = layer.core.vectors.detach()
    factor = math.exp(sum(l1 * m1)) - math.exp(sum(l2 * m2)) + start
    pairs = []
    for p in range(2):
        first, second = (softmax_map(q[:, h], k[:, h], D**-0.5) for h in (p, p + 2))
        out = (first - factor * second) @ torch.cat((v[:, p], v[:, p + 2]), dim=-1)
        pairs.append((1 - start) * out / (out.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    torch.testing.assert_close(layer(x, is_causal=True), layer.out_proj(torch.cat(pairs, dim=-1)), rtol=0, atol=1e-12)


def test_value_residual_mixes_the_values_of_the_first_layer_into_the_others():
    torch.manual_seed(0)
    model = randomised(value_residual(TransformerConfig(vocab_size=11, embed_dim=E, num_heads=H, num_layers=3))).eval()
    shares, seen = [0.3, 0.8], []
    for share, block in zip(shares, model.blocks[1:], strict=True):
        nn.init.constant_(block.attention.core.share, share)
    for block in model.blocks:
        block.attention.core.register_forward_hook(lambda core, arguments, out: seen.append((arguments[0], out)))
    model(IDS)
    first = seen[0][0].value
    for share, (call, out) in zip([0.0, *shares], seen, strict=True):
        value = (1 - share) * call.value + share * first
        torch.testing.assert_close(out, softmax_map(call.query, call.key, call.scale) @ value, rtol=0, atol=1e-12)


def test_latent_attention_makes_keys_and_values_of_one_vector_and_rotates_channels_of_their_own():
    torch.manual_seed(0)
    layer = randomised(LatentAttention(E, H, head_dim=D, latent_dim=5, rotary_dim=2, rotary=Rotary(D)))
    x = inputs()
    down = layer.down_proj(x)
    latent = down / (down.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.latent_norm.weight
    q, v, content = heads(layer.q_proj(x), H), heads(layer.v_proj(latent), H), heads(layer.k_proj(latent), H)
    shared = rotated(layer.rotary_k_proj(x))[:, None].expand(-1, H, -1, -1)
    q = torch.cat((q[..., : D - 2], rotated(q[..., D - 2 :])), dim=-1)
    out = softmax_map(q, torch.cat((content, shared), dim=-1), D**-0.5) @ v
    expected = layer.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, is_causal=True), expected, rtol=0, atol=1e-12)


def test_every_fourth_layer_has_no_positions():
    plain = TransformerConfig(vocab_size=11, embed_dim=E, num_heads=H, num_layers=8, position="rotary")
    model = randomised(build_model(TransformerConfig(**{**vars(plain), "attention": node(NoPositions)})))
    assert [block.attention.rotary is None for block in model.blocks] == [False, False, False, True] * 2
    layer, x = model.blocks[3].attention, inputs()
    shuffled = [4, 1, 3, 0, 2, 5, 6]
    torch.testing.assert_close(layer(x)[:, shuffled], layer(x[:, shuffled]), rtol=0, atol=1e-12)  # without a mask, no order
    layer = model.blocks[2].attention
    assert not torch.allclose(layer(x)[:, shuffled], layer(x[:, shuffled]), atol=1e-3)


def test_the_input_of_a_sublayer_is_a_weighted_mean_of_all_outputs_before_it():
    torch.manual_seed(0)
    model = randomised(AttentionResiduals(TransformerConfig(vocab_size=11, embed_dim=E, num_heads=H, num_layers=2))).eval()

    def mean(outputs, query):
        scores = [(v / v.square().mean(-1, keepdim=True).add(torch.finfo(v.dtype).eps).sqrt()) @ query for v in outputs]
        weights = [score.exp() / sum(other.exp() for other in scores) for score in scores]
        return sum(weight[..., None] * v for weight, v in zip(weights, outputs, strict=True))

    outputs = [model.embeddings(IDS, torch.arange(L)[None])]
    for i, block in enumerate(model.blocks):
        h = mean(outputs, model.depth_queries[2 * i])
        outputs.append(block.attention(block.attention_residual.norm(h), is_causal=True))
        h = mean(outputs, model.depth_queries[2 * i + 1])
        outputs.append(block.feedforward(block.feedforward_residual.norm(h)))
    expected = model.head(model.final_norm(mean(outputs, model.depth_queries[4])))
    torch.testing.assert_close(model(IDS), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", ["inv_sqrt", "unscaled", "learned"])
def test_the_clip_brings_the_largest_visible_logit_of_a_head_to_the_limit_and_leaves_smaller_ones(scale):
    torch.manual_seed(0)
    layer, x = randomised(MultiHeadAttention(E, H, head_dim=D, scale=scale)), inputs()

    def largest():
        calls = []
        with layer.core.register_forward_hook(lambda core, arguments, out: calls.append(arguments[0])):
            layer(x, is_causal=True)
        logits = calls[0].scale * calls[0].query @ calls[0].key.mT
        return logits.masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -math.inf).amax((0, 2, 3)).detach()

    before = largest()
    small_head, large_head = before.argsort().tolist()
    limit = float(before.mean())
    clip, module = QKClip(limit), SimpleNamespace(network=nn.Sequential(layer))
    clip.on_train_start(None, module)
    layer(x, is_causal=True)
    clip.on_step(None, module, 1, None)
    layer.eval()(x, is_causal=True)  # an evaluation is not of a step
    assert not clip.largest
    clip.on_train_end(None, module)
    assert largest()[large_head].item() == pytest.approx(limit)
    assert largest()[small_head].item() == pytest.approx(before[small_head].item(), rel=1e-12)


# --- the grid


def test_the_grid_has_every_change_and_five_hours_of_runs(grid, arms):
    assert tuple(arms) == CHANGES
    studies = [cell.place.study for cell in cells(grid)]
    assert {name: studies.count(name) for name in grid.studies} == {"trained": 13 * 8, "stable": 13 * 2 * 8, "loss": 13 * 4 * 6}


def test_every_change_has_the_parameters_of_the_plain_model_within_two_percent(arms):
    sizes = {name: sum(p.numel() for p in built(arms[name], vocab_size=64).parameters()) for name in arms}
    assert sizes.pop("plain") == pytest.approx(next(iter(sizes.values())), rel=0.02)
    assert max(sizes.values()) / min(sizes.values()) < 1.02


@pytest.mark.parametrize("name", CHANGES)
def test_no_token_sees_a_later_one(arms, name):
    assert_causal(randomised(small(arms, name), std=0.3).float())


def without_the_scale(grid, name):
    (skipped, *_) = (skip for skip in grid.studies["stable"].skip if "factored" in skip["arm"])
    arm = grid.arms["unscaled" if name in skipped["change"] else "factored"]
    D = 12 if name == "differential" else 24
    return [word if "scale_factor" not in word else f"model.scale_factor={D**0.5!r}" for word in arm]


@pytest.mark.parametrize("name", CHANGES)
def test_without_the_scale_a_folded_start_is_the_same_function(grid, arms, name):
    """From trained weights, which ``fold_scale`` changes, and from scratch, with ``init_fold``. The start is far from zero and from equal weights."""
    words = without_the_scale(grid, name)
    model, other = small(arms, name), small(arms, name, *words)
    expected = model(IDS)
    torch.testing.assert_close(other(IDS), expected, rtol=0, atol=1e-5)
    trained = randomised(small(arms, name), std=0.3)
    expected = trained(IDS)
    folded = fold_scale(copy.deepcopy(trained), other.config.scale, factor=other.config.scale_factor)
    torch.testing.assert_close(folded(IDS), expected, rtol=0, atol=1e-9)
    alone = copy.deepcopy(other)
    alone.load_state_dict(trained.state_dict())
    assert not torch.allclose(alone(IDS), expected, atol=1e-3)  # the scale matters
    alone.load_state_dict(folded.state_dict())
    torch.testing.assert_close(alone(IDS), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["gate", "value_residual"])
def test_the_lab_continues_a_trained_change_without_the_scale_and_checks_that_it_starts_alike(grid, arms, name, tmp_path):
    tiny = [
        "experiment=scaling_cell_recall",
        "model.embed_dim=8",
        "model.ffn_dim=8",
        "data.val_size=8",
        "trainer.val_batch_size=8",
    ]
    words = [*tiny, *(word for word in arms[name] if "ffn_dim" not in word), "callbacks.progress=false", "trainer.max_steps=1"]
    place = GridPlace("solved", "own", (), 1)
    first = Cell(place, (*words, "trainer.ckpt_every=1000", "seed=1"), keeps_weights=True)
    run_cell(CellJob(first.words(tmp_path), first.folder(tmp_path), 1, keeps_weights=True))
    second = Cell(place, (*words, *grid.arms["unscaled"], "trust=true", "seed=2"), first)
    result = run_cell(CellJob(second.words(tmp_path), second.folder(tmp_path), 1))
    assert 0.0 < result["start_error"] < 1e-5  # folded, so not bit for bit


def test_the_table_prints_each_change_with_its_parameters_and_operations(capsys):
    from examples.changes import sizes

    plain, latent = sizes.main("plain", "latent")
    heads, *printed = capsys.readouterr().out.splitlines()
    assert heads.split() == ["parameters", "operations"]
    assert [line.split()[0] for line in printed] == ["plain", "latent"] == [plain[0], latent[0]]
    network, ids = built([], vocab_size=sizes.VOCABULARY), torch.zeros(12, 64, dtype=torch.long)
    assert plain[1] == sum(p.numel() for p in network.parameters()) != latent[1]
    assert plain[2] == count_flops(lambda: F.cross_entropy(network(ids).flatten(0, 1), ids.flatten()).backward())
    with pytest.raises(ConfigError, match="plian must be one of plain, gate"):
        sizes.main("plian")


def fabricated(grid, folder, ratio):
    """Records of ``stable`` in which the gate's largest stable rate is ``ratio`` times as large with the scale, and the others' are equal."""
    folder.mkdir()
    with (folder / "cells.jsonl").open("w") as file:
        for cell in cells(grid):
            if cell.place.study == "stable":
                is_larger = cell.place.arm == "own" and cell.place.condition["change"] == "gate"
                rate = 0.004 * (ratio if is_larger else 1.0)
                result = {"low": rate / 1.01, "high": rate * 1.01}
                file.write(json.dumps({**cell.describe(folder), "status": "done", "result": result}) + "\n")
    return str(folder)


def test_a_second_draw_runs_what_was_decided_and_counts_what_repeats(grid, tmp_path, capsys):
    fresh = compose_grid(["experiment=scaling_ablation", "ablation=changes_again"])
    first, again, other = (
        fabricated(one, tmp_path / name, ratio) for one, name, ratio in ((grid, "1", 2.0), (fresh, "2", 1.9), (fresh, "3", 1.0))
    )
    assert repeats.main(first) == (0, 2)  # with the scale against without it, and the gate against the plain model
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[:2] == ["python", "scripts/train.py"]
    runs = cells(compose_grid(command[2:]))
    ran = {(cell.place.study, cell.place.arm, cell.place.condition["change"]) for cell in runs}
    assert ran == {
        (study, arm, change)
        for study, arm in (("trained", "own"), ("stable", "own"), ("stable", "unscaled"))
        for change in ("plain", "gate")
    }
    assert not {cell.place.seed for cell in runs} & {cell.place.seed for cell in cells(grid)}
    assert repeats.main(first, again) == (2, 2) and capsys.readouterr().out.startswith("2 of 2 verdicts repeat")
    assert repeats.main(first, other) == (0, 2)


def test_a_figure_has_a_row_for_each_change_and_a_dot_for_each_seed(grid, tmp_path):
    chosen = cells(grid)
    folder = Path(fabricated(grid, tmp_path / "1", 2.0))
    found = judge(grid, Runs.of([cell.place for cell in chosen], stored_records(chosen, folder / "cells.jsonl")))
    pictures = {picture.name: picture.figure.axes[0] for picture in study_pictures(found)}
    assert list(pictures) == ["stable_effects_0", "stable_effects_1"]
    for ax, count, gate in zip(pictures.values(), (13, 12), (2.0, 0.5), strict=True):
        rows = [tick.get_text() for tick in ax.get_yticklabels()]
        dots = [line for line in ax.lines if line.get_gid() == "runs"]
        assert len(rows) == count and len(dots) == 8 * count
        of_gate = [line.get_xdata()[0] for line in dots if round(line.get_ydata()[0]) == rows.index("output gate")]
        assert of_gate == pytest.approx([gate] * 8)
        assert sum(line.get_xdata()[0] == pytest.approx(1) for line in dots) == 8 * (count - 1)


def test_the_page_shows_a_change_that_is_measured_beside_the_plain_model(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "changes.md").read_text(encoding="utf-8")
    folder = tmp_path / "mine"
    (folder / "ablation").mkdir(parents=True)
    for kind, name in (("python", "head_gate.py"), ("yaml", "ablation/head_gate.yaml")):
        [block] = re.findall(rf"^```{kind}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        (folder / name).write_text(block, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = [f"--config-dir={folder}", "experiment=scaling_ablation", "ablation=head_gate"]
    find_own_modules(words)
    own = compose_grid(words)
    ran = {(cell.place.study, cell.place.arm, cell.place.condition["change"]) for cell in cells(own)}
    arms = (("trained", "own"), ("stable", "own"), ("stable", "unscaled"), ("loss", "own"))
    assert ran == {(*arm, change) for arm in arms for change in ("plain", "head_gate")}
    assert len({(c.study, c.arms) for c in own.comparisons}) == 4
    with_all = compose_grid([*words, "ablation.studies.loss.skip=[]"])
    assert {cell.place.arm for cell in cells(with_all) if cell.place.study == "loss"} == {"own", "unscaled"}
    layers = [
        module
        for module in built(own.studies["loss"].factors["change"]["head_gate"], **SMALL, num_heads=H).modules()
        if hasattr(module, "gate")
    ]
    assert layers and all(layer.gate.weight.shape == (H, E) for layer in layers)


# --- other implementations


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_minitx_check_finds_nothing_wrong(arms, name):
    report = check_model(small(arms, name).float())
    assert report.mend_first is None, str(report)


def modeling(name):
    pytest.importorskip("transformers")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def causal_bias():
    return torch.zeros(L, L, dtype=torch.float64).masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), -math.inf)[None, None]


def angles(width):
    return torch.arange(L, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(width // 2, dtype=torch.float64) * 2 / width
    )


def positions_of_llama(width):
    both = torch.cat((angles(width), angles(width)), dim=-1)[None]
    return both.cos(), both.sin()


def assert_same(ours, theirs, **arguments):
    x = inputs()
    expected = theirs(hidden_states=x, attention_mask=causal_bias(), **arguments)[0]
    torch.testing.assert_close(ours(x, is_causal=True), expected, rtol=0, atol=1e-6)  # they take norms and angles in float32


@pytest.mark.slow
def test_differential_attention_equals_diffllama():
    theirs = modeling("diffllama")
    config = theirs.DiffLlamaConfig(
        hidden_size=E, num_attention_heads=4, num_key_value_heads=4, head_dim=D, attention_bias=False
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = randomised(theirs.DiffLlamaAttention(config, layer_idx=2)).eval()
    ours = MultiHeadAttention(E, 4, head_dim=D, bias=False, rotary=Rotary(D), core=Differential(D, 2)).double().eval()
    for name, other in (("q_proj", "q_proj"), ("k_proj", "k_proj"), ("v_proj", "v_proj"), ("out_proj", "o_proj")):
        ours.get_submodule(name).load_state_dict(layer.get_submodule(other).state_dict())
    ours.core.vectors.data = torch.stack([getattr(layer, f"lambda_{name}") for name in ("q1", "k1", "q2", "k2")]).detach()
    assert_same(ours, layer, position_embeddings=positions_of_llama(D))


@pytest.mark.slow
def test_the_output_gate_equals_qwen3_next():
    theirs = modeling("qwen3_next")
    config = theirs.Qwen3NextConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=1, head_dim=D, attention_bias=True
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = randomised(theirs.Qwen3NextAttention(config, layer_idx=0)).eval()
    norm = QKNorm("rms", D, num_kv_heads=1, eps=config.rms_norm_eps)
    ours = OutputGate(E, H, num_kv_heads=1, head_dim=D, qk_norm=norm, rotary=Rotary(D)).double().eval()
    for part in ("weight", "bias"):
        both = getattr(layer.q_proj, part).detach().unflatten(0, (H, 2, D)).unbind(1)  # the query and the gate of each head
        for projection, value in zip((ours.q_proj, ours.gate_proj), both, strict=True):
            setattr(projection, part, nn.Parameter(value.flatten(0, 1)))
        for name, other in (("k_proj", "k_proj"), ("v_proj", "v_proj"), ("out_proj", "o_proj")):
            setattr(ours.get_submodule(name), part, getattr(layer.get_submodule(other), part))
    norm.query_norm.weight.data, norm.key_norm.weight.data = 1 + layer.q_norm.weight.data, 1 + layer.k_norm.weight.data
    assert_same(ours, layer, position_embeddings=positions_of_llama(D))


@pytest.mark.slow
def test_latent_attention_equals_deepseek_v2():
    theirs = modeling("deepseek_v2")
    sizes = {"kv_lora_rank": 5, "qk_rope_head_dim": 2, "qk_nope_head_dim": D - 2, "v_head_dim": D, "q_lora_rank": None}
    config = theirs.DeepseekV2Config(hidden_size=E, num_attention_heads=H, num_key_value_heads=H, **sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    layer = randomised(theirs.DeepseekV2Attention(config, layer_idx=0)).eval()
    options = {"latent_dim": 5, "rotary_dim": 2, "rotary": Rotary(D, interleaved=True)}
    ours = LatentAttention(E, H, head_dim=D, bias=False, **options).double().eval()
    down, rotary = layer.kv_a_proj_with_mqa.weight.detach().split((5, 2))
    content, value = layer.kv_b_proj.weight.detach().unflatten(0, (H, -1)).split((D - 2, D), dim=1)
    weights = {
        "q_proj": layer.q_proj.weight,
        "down_proj": down,
        "rotary_k_proj": rotary,
        "latent_norm": layer.kv_a_layernorm.weight,
    }
    weights |= {"k_proj": content.flatten(0, 1), "v_proj": value.flatten(0, 1), "out_proj": layer.o_proj.weight}
    ours.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()})
    turns = torch.polar(torch.ones(1, L, 1), angles(2).float()[None])
    assert_same(ours, layer, position_embeddings=turns)
