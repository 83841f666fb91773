"""Capture looks without touching."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from minitx.analysis import capture, intervene, knock_out_heads, take_snapshot
from minitx.analysis.gradients import gradient_statistics
from minitx.nn import Causal, KVCache, MultiHeadAttention
from minitx.nn.efficient import LinearAttention
from minitx.nn.functional import AttentionCall
from tests.analysis.models import CHANGEABLE, IDS, Checkpointed, model_of, records_of, translation_of

EVERYTHING = ("statistics", *CHANGEABLE)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("backend", ["math", "chunked"])
@pytest.mark.parametrize("what", ["weights"])  # the others: tests/lattice/models.py
def test_the_output_and_the_gradients_are_bit_equal_with_and_without_looking(backend, dropout, what):
    model = model_of(backend=backend, position="rotary", dropout=dropout).train()
    torch.manual_seed(5)
    plain = model(IDS)
    plain.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(5)
    with capture(model, what=what):
        watched = model(IDS)
        watched.sum().backward()
    assert torch.equal(plain, watched)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_weights_are_those_before_dropout_and_with_the_values_they_give_what_the_layer_gives():
    attention, x = MultiHeadAttention(12, 6, num_kv_heads=2, dropout=0.5), torch.randn(2, 5, 12)
    [weights] = records_of(attention, x, attn_mask=Causal(), what="weights")["core"]
    assert weights.shape == (2, 6, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 5))
    assert (weights.triu(1) == 0).all()
    with capture(attention.eval(), what="values") as values:
        out = attention(x, is_causal=True)
    torch.testing.assert_close(attention.out_proj((weights @ values["core"][0]).transpose(1, 2).flatten(2)), out)


def test_nothing_stays_on_the_modules_and_every_call_is_recorded_once():
    model = model_of()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ZeroDivisionError), capture(model) as seen:
        _ = model(IDS), model(IDS), 1 / 0
    model(IDS)
    assert {name: len(calls) for name, calls in seen.items()} == {f"blocks.{i}.attention.core": 2 for i in (0, 1)}
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("model", "options", "message"), [
    ({}, {"what": "weight"}, "what='weight' must be one of statistics, weights"),
    (None, {}, "Linear has no attention core with weights: .* adopt_hf"),
    ({"attention": "linear"}, {}, "weights .LinearAttention: it computes no weights over keys.* what='heads'"),
    ({"attention": "additive"}, {"what": "weights"}, "need_weights=True returns them"),
    ({}, {"layers": ["cross"]}, "layers: 'cross' is none of"),
    ({}, {"heads": [3]}, "must be numbers from 0 to 2"),
    ({}, {"what": "residual", "heads": [1]}, r"heads=\[1\] has no effect with what='residual'"),
])  # fmt: skip
def test_what_is_not_there_is_refused_and_the_hooks_are_gone(model, options, message):
    model = torch.nn.Linear(2, 2) if model is None else model_of(**model)
    with pytest.raises(ValueError, match=message), capture(model, **options):
        model(IDS)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_chosen_layers_and_heads_are_slices_of_the_whole():
    model = model_of(num_kv_heads=1)
    for what in ("weights", "scores", "values", "statistics"):
        whole, part = records_of(model, IDS, what=what), records_of(model, IDS, what=what, layers=[-1], heads=[2, 0])
        assert list(part) == ["blocks.1.attention.core"]
        all_heads, chosen = whole["blocks.1.attention.core"][0], part["blocks.1.attention.core"][0]
        if what == "statistics":
            assert torch.equal(chosen["entropy"], all_heads["entropy"][[2, 0]])
            all_heads, chosen = all_heads["favourite"], chosen["favourite"]
        assert torch.equal(chosen, all_heads[:, [2, 0]])


def test_softmax_of_the_scores_is_the_weights_and_hidden_keys_have_minus_infinity():
    model = model_of(position="alibi", softcap=5.0, window=3)
    scores, weights = (records_of(model, IDS, what=what) for what in ("scores", "weights"))
    for name in scores:
        torch.testing.assert_close(scores[name][0].softmax(-1), weights[name][0])
        assert torch.equal(scores[name][0] == -torch.inf, weights[name][0] == 0)
        assert (scores[name][0] == -torch.inf).any()


@torch.no_grad()
def test_cached_decoding_gives_row_by_row_what_one_forward_gives():
    model, cache, again = model_of(position="rotary"), *(KVCache(capacity=5, num_layers=2) for _ in range(2))
    whole = records_of(model, IDS, what="weights")
    with capture(model, what="weights") as steps:
        watched = [model(piece, cache=cache) for piece in IDS.split(1, dim=1)]
    assert all(torch.equal(model(piece, cache=again), out) for piece, out in zip(IDS.split(1, dim=1), watched, strict=True))
    for name in whole:
        for i, row in enumerate(steps[name]):
            torch.testing.assert_close(row[:, :, 0], whole[name][0][:, :, i, : i + 1])


def test_padded_targets_count_neither_in_self_nor_in_cross_attention():
    model = translation_of(num_layers=1, num_decoder_layers=1).double()
    source, target = torch.tensor([[1, 2, 3, 5, 7]]), torch.tensor([[2, 4, 6]])
    plain = records_of(model, source, target)
    masks = {"key_mask": torch.arange(7)[None] < 5, "decoder_key_mask": torch.arange(7)[None] < 3}
    padded = records_of(model, nn.functional.pad(source, (0, 2)), nn.functional.pad(target, (0, 4)), **masks)
    places = {"blocks.0.attention": "causal", "blocks.0.cross_attention": "cross", "encoder.blocks.0.attention": "self"}
    assert plain.kinds == padded.kinds == {f"{name}.core": kind for name, kind in places.items()}
    for name in plain:
        for statistic, value in plain[name][0].items():
            if statistic != "favourite":
                torch.testing.assert_close(padded[name][0][statistic], value, msg=lambda m, s=statistic: f"{s}: {m}")
    assert (padded["blocks.0.cross_attention.core"][0]["favourite"][0, :, 3:] == -1).all()


# --- which modules are attention, and how layers are numbered


def test_a_number_selects_the_same_block_in_every_record():
    model = translation_of()
    model.blocks[0].attention.core = LinearAttention()  # this layer keeps its cross-attention, which has weights
    layers = ["blocks.0", "blocks.1", "blocks.2", "encoder.blocks.0", "encoder.blocks.1"]
    for (number, layer), what, first in itertools.product(enumerate(layers), EVERYTHING, (0, -5)):
        seen = records_of(model, IDS, IDS, what=what, layers=number + first)
        assert seen and all(f"{name}.".startswith(f"{layer}.") and len(seen[name]) == 1 for name in seen)


def test_a_layer_without_the_record_is_refused_by_its_number():
    model = model_of()
    model.blocks[0].attention.core = LinearAttention()
    assert list(records_of(model, IDS, what="heads", layers=0)) == ["blocks.0.attention.core"]
    said = r"layers: layer 0 \(blocks\.0\) has no attention with weights; the layers with it are 1 \(blocks\.1\)"
    with pytest.raises(ValueError, match=said), capture(model, layers=0):
        pass
    with pytest.raises(ValueError, match=r"layers: 2 is none of the 1 layers 1 \(blocks\.1\)"), capture(model, layers=2):
        pass


def test_layers_outside_of_blocks_are_numbered_by_the_numbers_in_their_names():
    layers = [nn.ModuleDict({"near": MultiHeadAttention(6, 2), "far": MultiHeadAttention(6, 3)}) for _ in range(2)]
    model = nn.ModuleDict({"pool": MultiHeadAttention(6, 2), "layers": nn.ModuleList(layers)})
    silent = r"layers\.1\.near\.core, layers\.1\.far\.core did not run"
    with pytest.warns(UserWarning, match=silent), capture(model, layers=2) as seen:
        pass
    assert list(seen) == ["layers.1.near.core", "layers.1.far.core"]


class WithCore(nn.Module):
    """A model of somebody else whose residual stream goes through a part called core."""

    num_heads = 3

    def __init__(self):
        super().__init__()
        self.core = nn.Linear(12, 12)

    def forward(self, x):
        return self.core(x)


def test_a_part_that_is_only_called_core_is_no_attention():
    model, x = WithCore(), torch.randn(2, 5, 12)
    with pytest.raises(ValueError, match="attention core"), capture(model, what="heads"):
        pass
    with pytest.raises(ValueError, match="attention core"):
        knock_out_heads(model, lambda model: model(x).mean((1, 2)))
    both = nn.ModuleList([model, MultiHeadAttention(12, 3)])
    with capture(both, what="heads") as seen:
        both[1](both[0](x))
    assert list(seen) == ["1.core"]


class Uniform(nn.Module):
    """A core of one's own, in an attention of one's own. The class attribute says that it is a core."""

    softmax_weights = False

    def forward(self, call):
        return call.value.mean(2, keepdim=True).expand_as(call.query)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Uniform()

    def forward(self, x):
        x = x.unflatten(-1, (3, -1)).transpose(1, 2)
        return self.inner(AttentionCall(x, x, x)).transpose(1, 2).flatten(2)


def test_a_core_of_ones_own_is_looked_at_wherever_it_is():
    x = torch.randn(2, 5, 12)
    for model, name in ((Attention(), "inner"), (MultiHeadAttention(12, 3, core=Uniform()), "core")):
        assert {core: one.shape for core, [one] in records_of(model, x, what="heads").items()} == {name: (2, 3, 5, 4)}
        with pytest.raises(ValueError, match="no attention core with weights"), capture(model):
            pass
        assert knock_out_heads(model, lambda model: model(x).square().mean((1, 2))).mean.shape == (1, 3)


def test_gradients_of_a_core_that_runs_several_times_count_the_queries_of_every_call():
    model = model_of()
    model.blocks[1] = model.blocks[0]  # one layer, twice
    queries = []
    model.blocks[0].attention.core.register_forward_pre_hook(lambda core, args: queries.append(args[0].query))
    loss = model(IDS).square().sum()
    norms = torch.cat([gradient.norm(dim=-1).flatten() for gradient in torch.autograd.grad(loss, queries)])
    found = gradient_statistics(model, IDS, lambda ids: (model(ids).square().sum(), {}))["blocks.0.attention.core"]
    assert sum(found["grad_query_histogram"].values()) == len(norms) == 2 * IDS.numel() * 3
    assert found["grad_query_rms"] == pytest.approx(float(norms.square().mean().sqrt()))


def test_a_snapshot_of_a_core_that_ran_several_times_says_which_call_it_shows():
    model = model_of()
    model.blocks[1] = model.blocks[0]
    with pytest.warns(UserWarning, match=r"blocks.0.attention.core \(2 times\) ran several times, and only the last call"):
        shown = take_snapshot(model, IDS).maps
    assert torch.equal(shown[0].weights, records_of(model, IDS, what="weights")["blocks.0.attention.core"][1])


@pytest.mark.parametrize("options", [{"target_modules": ["q_proj", "v_proj"]}, {"modules_to_save": ["attention"], "target_modules": ["up_proj"]},
                                     {"modules_to_save": ["core"]}, {"modules_to_save": ["feedforward"]}])  # fmt: skip
def test_in_a_peft_model_only_the_attention_that_runs_counts(options):
    peft = pytest.importorskip("peft")
    plain = model_of()
    want = knock_out_heads(plain, lambda model: model(IDS).mean((1, 2)))
    model = peft.get_peft_model(model_of(), peft.LoraConfig(**{"target_modules": ["k_proj"], **options}))
    found = knock_out_heads(model, lambda model: model(IDS).mean((1, 2)))
    assert len(found.names) == 2 and all(name.startswith(f"base_model.model.blocks.{i}.") for i, name in enumerate(found.names))
    torch.testing.assert_close(found.mean, want.mean)  # new adapters add nothing
    for what in EVERYTHING:
        seen = records_of(model, IDS, what=what, layers=-1)
        [name] = filter(seen.get, seen)
        assert name.startswith("base_model.model.blocks.1") and len(seen[name]) == 1
    statistics = gradient_statistics(model, IDS, lambda ids: (model(ids).square().sum(), {}))
    measured = [name for name, numbers in statistics.items() if numbers]
    assert measured and not any("original_module" in name for name in measured)


# --- hooks that do not run, and runs that do not count


def test_layers_that_did_not_run_are_named_in_a_warning():
    model = model_of()
    compiled = torch.compile(model, backend="eager")
    try:
        with torch.no_grad():
            compiled(IDS)
            for look in (capture, partial(capture, what="residual"), partial(intervene, what="heads", to=0.0)):
                with pytest.warns(UserWarning, match=r"blocks\.1.* did not run.*compiled"), look(model, layers=1):
                    compiled(IDS)
                with look(model, layers=1):  # warnings are errors here
                    model(IDS), compiled(IDS)
            with pytest.raises(ValueError, match="none of the 2 attention cores"):
                knock_out_heads(model, lambda model: compiled(IDS).mean((1, 2)))
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_block_that_somebody_else_checkpoints_is_recorded_once_a_call(use_reentrant):
    plain, model = model_of(), model_of()
    model.blocks = nn.ModuleList(Checkpointed(block, use_reentrant) for block in model.blocks)
    for what in CHANGEABLE:
        records = []
        for one in (plain, model):
            with capture(one, what=what) as seen:
                one(IDS).sum().backward()
                one(IDS).sum().backward()
            records.append(list(seen.values()))
        assert all(len(calls) == 2 for calls in records[1])
        assert all(torch.equal(a, b) for one, two in zip(*records, strict=True) for a, b in zip(one, two, strict=True))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
