"""Interventions have the effect that a formula or another run gives, and touch nothing else."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from minitx.analysis import capture, intervene, knock_out_heads, logit_lens, patch_heads
from minitx.analysis.recorder import CallRecords
from minitx.nn import Block, FeedForward, MultiHeadAttention
from minitx.nn.efficient import LinearAttention
from tests.analysis.models import CHANGEABLE, IDS, Checkpointed, model_of, records_of, translation_of

OTHER = torch.tensor([[6, 2, 10, 5, 3], [4, 8, 8, 0, 2]])
REAL = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])


@pytest.mark.parametrize("what", ["values", "heads", "residual"])
def test_to_patch_everything_is_the_other_run_bit_for_bit(what):
    model = model_of(position="none")
    with capture(model, what=what) as seen:
        other = model(OTHER)
    layers = {"residual": [-1]}.get(what)
    with intervene(model, what, seen, layers=layers), capture(model, what=what, layers=layers) as inside:
        got = model(IDS)
    assert all(torch.equal(record, seen[name][0]) for name, [record] in inside.items())
    assert torch.equal(got, other) == (what == "residual")  # which goes around attention, and starts from the other tokens


@pytest.mark.parametrize("what", CHANGEABLE)
def test_the_same_in_place_of_the_same_changes_nothing(what):
    model = model_of(torch.float64, num_heads=6, num_kv_heads=2, position="rotary", softcap=3.0, sinks=True)
    plain = model(IDS, key_mask=REAL)
    for to in (records_of(model, IDS, key_mask=REAL, what=what), lambda tensor: tensor):
        with intervene(model, what, to):
            torch.testing.assert_close(model(IDS, key_mask=REAL)[REAL], plain[REAL], rtol=0, atol=1e-12)
    assert torch.equal(model(IDS, key_mask=REAL), plain)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_temperature_on_the_scores_is_another_scale():
    model = model_of(torch.float64)
    with intervene(model, "scores", lambda z: z * 2.0):  # head_dim 4
        got = model(IDS)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q_proj.weight *= 2.0
            block.attention.q_proj.bias *= 2.0
    torch.testing.assert_close(got, model(IDS), rtol=0, atol=1e-12)


def test_heads_and_positions_are_the_only_ones_changed():
    model = model_of(torch.float64)
    [want] = records_of(model, IDS, what="heads")["blocks.0.attention.core"]
    with intervene(model, "heads", 7.0, layers=[0], heads=[-1, 0], positions=[1, -1]):
        [found] = records_of(model, IDS, what="heads")["blocks.0.attention.core"]
    want[:, [0, 2], 1], want[:, [0, 2], 4] = 7.0, 7.0
    assert torch.equal(found, want)


@pytest.mark.parametrize("what", CHANGEABLE)
def test_gradients_flow_through_what_is_computed(what):
    model = model_of(torch.float64)
    factor = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    with intervene(model, what, lambda x: x * factor, layers=[0]):
        model(IDS).square().sum().backward()

    def loss(number):
        with torch.no_grad(), intervene(model, what, lambda x: x * number, layers=[0]):
            return float(model(IDS).square().sum())

    slope = (loss(0.9 + 1e-6) - loss(0.9 - 1e-6)) / 2e-6
    assert float(factor.grad) == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("to", [0.0, lambda heads: 2 * heads, "a record"], ids=["a number", "a function", "a record"])
@pytest.mark.parametrize("by", ["config", "reentrant", "not reentrant"])
def test_a_recomputed_block_has_its_change_in_the_context_and_is_refused_outside(by, to):
    gradients = []
    for checkpointing in (False, True):
        model = model_of(torch.float64, checkpointing=checkpointing and by == "config")
        with torch.no_grad(), capture(model, what="heads") as seen:
            model(OTHER)
        name = "blocks.0.attention.core"
        records = seen[name]
        if checkpointing and by != "config":
            model.blocks[0], name = Checkpointed(model.blocks[0], by == "reentrant"), "blocks.0.block.attention.core"
        with intervene(model, "heads", {name: records} if to == "a record" else to, layers=[name]):
            model(IDS).square().sum().backward()
            loss = model(IDS).sum()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        with (
            pytest.raises(RuntimeError, match=r"call backward\(\) inside of `with intervene")
            if checkpointing
            else nullcontext()
        ):
            loss.backward()
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_a_recomputed_block_that_ran_without_its_change_or_has_several_records_is_refused():
    model = model_of(checkpointing=True)
    with torch.no_grad(), capture(model, what="heads") as seen:
        model(OTHER), model(IDS)
    loss = model(IDS).sum()
    with intervene(model, "heads", 0.0, layers=[0]), pytest.raises(RuntimeError, match="but it ran before without it"):
        loss.backward()
    with intervene(model, "heads", seen, layers=[0]), pytest.raises(RuntimeError, match="its 2 records do not say"):
        model(IDS).sum().backward()


@pytest.mark.parametrize(("what", "to", "options", "said"), [
    ("weight", 0.0, {}, "what='weight' must be one of"),
    ("heads", 0.0, {"heads": [3]}, r"heads=\[3\] must be .* 3 heads"),
    ("residual", 0.0, {"positions": 9}, r"positions=\[9\] must be"),
    ("heads", torch.zeros(7), {}, "must fit the shape"),
    ("heads", {"blocks.0.attention.core": [torch.zeros(2, 3, 4, 4)]}, {}, "record"),
    ("heads", {}, {}, "records have none"),
    ("weights", CallRecords(["blocks.0.attention.core"], "scores"), {}, "what='weights' cannot be replaced by records of 'scores'"),
    ("heads", lambda heads: None, {}, "must return a tensor, got NoneType"),
    ("heads", 0.0, {"positions": [True, False]}, r"positions=\[True, False\] must be numbers from 0"),
    ("heads", 0.0, {"layers": []}, r"layers=\[\]"),
])  # fmt: skip
def test_what_cannot_be_changed_is_refused_with_its_name(what, to, options, said):
    model = model_of()
    with pytest.raises(ValueError, match=said), intervene(model, what, to, **options):
        model(IDS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_model_without_what_is_changed_is_refused():
    attention, model = MultiHeadAttention(12, 3, core=LinearAttention()), model_of()
    with pytest.raises(ValueError, match="no attention core with weights"), intervene(attention, "weights", 0.0):
        pass
    with pytest.raises(RuntimeError, match="OptimizedModule is compiled"), capture(torch.compile(model, backend="eager")):
        pass
    model.blocks[1].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"blocks\.1 is compiled"), intervene(model, "heads", 0.0):
        pass


# --- the two experiments and the lens


def test_a_head_that_is_knocked_out_changes_the_loss_by_what_its_columns_give():
    model = model_of(torch.float64)

    def loss(model):
        return model(IDS).square().mean((1, 2))

    found = knock_out_heads(model.train(), loss)
    assert model.training
    whole = loss(model.eval())
    with torch.no_grad():
        model.blocks[0].attention.out_proj.weight[:, 4:8] = 0.0
        want = (loss(model) - whole).mean()
    assert float(found.mean[0, 1]) == pytest.approx(float(want), rel=1e-10)
    assert ((found.low <= found.mean) & (found.mean <= found.high)).all()


def test_a_row_without_a_loss_does_not_count_and_a_loss_that_is_lost_is_no_number():
    calls = iter(range(99))

    def loss(model):
        return torch.tensor([1.0, 2.0, torch.nan, torch.nan if next(calls) == 2 else 3.0]) + model(IDS).sum()

    found = knock_out_heads(model_of(), loss)
    assert found.rows == 3 and found.mean.isnan().tolist() == [[False, True, False], [False] * 3]


def test_patching_finds_the_one_head_that_carries_the_answer():
    """Head 1 copies the previous token's embedding; the others are blind. The corrupted row differs in that token."""
    model = model_of(torch.float64, num_layers=1, position="none", tie_embeddings=False, norm="layer")
    with torch.no_grad():
        model.blocks[0].attention.out_proj.weight[:, :4] = 0.0
        model.blocks[0].attention.out_proj.weight[:, 8:] = 0.0
    clean, corrupted = {"input_ids": IDS}, {"input_ids": torch.cat([OTHER[:, :4], IDS[:, 4:]], 1)}
    found = patch_heads(model, clean, corrupted, lambda logits: logits[:, -1, 3] - logits[:, -1, 5], what="heads")
    for edge in (found.mean, found.low, found.high):  # a share that is 1 in each row is known exactly
        torch.testing.assert_close(edge, torch.tensor([[0.0, 1.0, 0.0]]).double(), rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="same mean score"):
        patch_heads(model, clean, clean, lambda logits: logits[:, -1, 3])


def test_an_encoder_decoder_is_changed_in_the_layer_that_is_named_and_its_decoder_is_read_by_the_lens():
    """An encoder's layers have names that end in those of the decoder."""
    model = translation_of()
    with intervene(model, "heads", 0.0, layers=["blocks.0.attention.core"]):
        seen = records_of(model, IDS, OTHER, what="heads")
    assert [name for name, [record] in seen.items() if (record == 0).all()] == ["blocks.0.attention.core"]
    lens, residual = logit_lens(model, input_ids=IDS, decoder_input_ids=OTHER), []
    with model.blocks[0].register_forward_hook(lambda module, args, out: residual.append(out)):
        logits = model(IDS, OTHER)
    assert lens.shape == (3, 2, 5, 11) and torch.equal(lens[-1], logits)
    torch.testing.assert_close(lens[0], model.head(model.final_norm(residual[0])))


def test_weights_that_are_given_reach_keys_that_the_mask_hides():
    attention, x = MultiHeadAttention(6, 2).double(), torch.randn(1, 4, 6, dtype=torch.float64)
    real, last = torch.tensor([[True, True, True, False]]), torch.zeros(4, 4, dtype=torch.float64)
    last[:, 3] = 1
    values = attention.v_proj(x)
    with torch.no_grad(), intervene(attention, "weights", last):
        torch.testing.assert_close(attention(x, key_mask=real), attention.out_proj(values[:, 3:].expand_as(values)))
        assert (records_of(attention, x, key_mask=real, what="weights")["core"][0] == last).all()
        assert attention(x.masked_fill(~real[..., None], torch.nan), key_mask=real).isnan().all()
        with intervene(attention, "weights", last.roll(1, 1)):  # nothing looks at the last key, so its value has no effect
            x[:, 3] = torch.nan
            assert attention(x, key_mask=real).isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_gate_on_the_weights_has_the_gradient_of_a_gate_on_the_head_also_at_zero(is_causal):
    torch.manual_seed(0)
    attention, x = MultiHeadAttention(6, 2).double(), torch.randn(2, 5, 6, dtype=torch.float64)
    found = []
    for what in ("weights", "heads"):  # a gate scales either alike
        gate = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
        with intervene(attention, what, lambda old, gate=gate: old * gate.view(1, -1, 1, 1)):
            found += torch.autograd.grad(attention(x, is_causal=is_causal).square().sum(), gate)
    assert found[0][0] != 0
    torch.testing.assert_close(*found)


def test_one_name_one_number_or_several_choose_layers_and_heads():
    model = model_of()
    outs = []
    for layers, heads in ((["blocks.1"], [2]), ("blocks.1", 2), (1, [2]), (-1, -1)):
        with torch.no_grad(), intervene(model, "heads", 0.0, layers=layers, heads=heads):
            outs.append(model(IDS))
    assert all(torch.equal(out, outs[0]) for out in outs) and not torch.equal(outs[0], model(IDS))


# --- the lens where blocks are not simply a list


class Layer(nn.Module):
    """A layer of somebody else, which holds a block and does something of its own."""

    def __init__(self, block):
        super().__init__()
        self.block, self.gain = block, nn.Parameter(torch.tensor(1.5))

    def forward(self, x, **options):
        return self.block(self.gain * x, **options)


class Stages(nn.Module):
    """Two lists of blocks, a norm between them, and a block that is applied three times at the end."""

    def __init__(self):
        super().__init__()
        one = model_of(num_layers=4)
        self.again, self.late, self.early = one.blocks[3], one.blocks[2:3], one.blocks[:2]  # in no helpful order
        self.between, self.norm, self.embed, self.head = nn.LayerNorm(12), one.final_norm, one.embeddings, one.head

    def forward(self, input_ids, after=None):
        """The logits, or those of a model that ends after so many blocks."""
        x = self.embed(input_ids, torch.arange(5)[None], None)
        for number, block in enumerate([*self.early, *self.late, *[self.again] * 3]):
            if number == 2:
                x = self.between(x)
            x = block(x=x) if number else block(x)
            x *= 1.5  # in place
            if after == number + 1:
                break
        return self.head(self.norm(x))


@torch.no_grad()
def test_the_lens_reads_every_call_of_a_block_in_two_stages():
    class Own(Block):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    model = Stages()
    model.again.__class__ = Own
    lens = logit_lens(model, input_ids=IDS)
    assert len(lens) == 6 and torch.equal(lens[-1], model(IDS))
    for number, logits in enumerate(lens, 1):
        assert torch.equal(logits, model(IDS, after=number))
    with intervene(model, "residual", given := torch.ones(2, 5, 12)):
        model(IDS)
    assert torch.equal(given, torch.ones(2, 5, 12))


def test_a_copy_made_inside_of_a_context_stays_as_the_model_was():
    plain = (model := model_of())(IDS)
    with intervene(model, "values", 0.0), intervene(model, "heads", 0.0), capture(model) as seen:
        assert not torch.equal(model(IDS), plain) and torch.equal(copy.deepcopy(model)(IDS), plain)
    assert all(len(records) == 1 for records in seen.values())


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, fully_shard])
def test_wrappers_around_the_blocks_change_nothing_that_is_seen(wrap, process_group):
    model = model_of(num_layers=3)
    wrapped = copy.deepcopy(model)
    wrapped.blocks = nn.ModuleList(wrap(block) for block in wrapped.blocks)
    assert torch.equal(logit_lens(wrapped, input_ids=IDS), logit_lens(model, input_ids=IDS))
    for what in CHANGEABLE:
        [[record]] = records_of(wrapped, IDS, what=what, layers=[-1]).values()
        [[other]] = records_of(model, IDS, what=what, layers=2).values()
        assert torch.equal(record, other)


@torch.no_grad()
def test_the_lens_leaves_out_blocks_of_another_stream_however_they_are_wrapped():
    model = translation_of()
    want = logit_lens(model, input_ids=IDS, decoder_input_ids=OTHER)
    model.encoder.blocks = nn.ModuleList(map(Layer, model.encoder.blocks))
    model.blocks = nn.ModuleList(map(Layer, model.blocks))
    for layer in (*model.encoder.blocks, *model.blocks):
        layer.gain.fill_(1.0)
    assert torch.equal(logit_lens(model, input_ids=IDS, decoder_input_ids=OTHER), want) and len(want) == 3


class Hybrid(nn.Module):
    """A list of blocks and of layers without attention, as in Bamba."""

    def __init__(self, *kinds):
        super().__init__()
        one = model_of()
        self.embed, self.head, blocks = one.embeddings, one.head, iter(one.blocks)
        self.layers = nn.ModuleList(next(blocks) if kind == "block" else Layer(FeedForward(12, 12)) for kind in kinds)

    def forward(self, input_ids):
        x = self.embed(input_ids, torch.arange(5)[None], None)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_layer_after_the_last_block_has_a_lens_once_it_is_marked():
    model = Hybrid("block", "other", "block")
    assert torch.equal(logit_lens(model, input_ids=IDS)[-1], model(IDS))
    model = Hybrid("block", "block", "other")
    with pytest.raises(ValueError, match="mark its class with is_block = True"):
        logit_lens(model, input_ids=IDS)
    model.layers[2].is_block = True
    lens = logit_lens(model, input_ids=IDS)
    assert len(lens) == 3 and torch.equal(lens[-1], model(IDS))


class TheirBlock(nn.Module):
    """A layer of somebody else's GPT."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(12), FeedForward(12, 24)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class TheirGPT(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed, self.h, self.head = nn.Embedding(11, 12), nn.ModuleList(block() for _ in range(3)), nn.Linear(12, 11)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.h:
            x = block(x)
        return self.head(x)


@torch.no_grad()
@pytest.mark.parametrize("marks", ["the class", "the modules"])
def test_blocks_of_other_people_are_marked_as_the_refusal_says(marks):
    model = TheirGPT(TheirBlock)
    for what in ("residual", "feedforward"):
        with pytest.raises(ValueError, match=r"TheirGPT has no block.*is_block = True"), capture(model, what=what):
            pass
    with pytest.raises(ValueError, match="is_block = True"):
        logit_lens(model, input_ids=IDS)
    if marks == "the class":
        model = TheirGPT(type("Marked", (TheirBlock,), {"is_block": True}))
    else:
        for block in model.h:
            block.is_block = True
    assert list(records_of(model, IDS, what="residual")) == ["h.0", "h.1", "h.2"]
    assert list(records_of(model, IDS, what="feedforward", layers=1)) == ["h.1.mlp"]
    lens = logit_lens(model, input_ids=IDS)
    assert (
        len(lens) == 3 and torch.equal(lens[-1], model(IDS)) and torch.equal(lens[0], model.head(model.h[0](model.embed(IDS))))
    )


def test_a_stream_that_changes_its_shape_and_a_model_without_blocks_have_no_lens():
    class Shorter(Layer):
        def forward(self, x, **options):
            return self.block(x[:, ::2])

    model = model_of()
    model.blocks[1] = Shorter(model.blocks[1])
    with pytest.raises(ValueError, match=r"shape \(2, 5, 12\), but \(2, 3, 12\) is replaced"):
        logit_lens(model, input_ids=IDS)
    with pytest.raises(ValueError, match="Linear has no block"):
        logit_lens(nn.Linear(3, 3), input=torch.randn(2, 3))


def test_a_loss_and_a_score_must_be_one_number_for_each_row():
    model = model_of()
    for loss in (lambda m: 1.0, lambda m: m(IDS).mean(), lambda m: m(IDS).mean(-1)):
        with pytest.raises(ValueError, match=r"loss must return one number for each row, \(n,\), got"):
            knock_out_heads(model, loss)
    inputs = {"input_ids": IDS}
    with pytest.raises(ValueError, match=r"score must return one number for each row, \(n,\), got \(\)"):
        patch_heads(model, inputs, inputs, lambda logits: logits.mean())
    with pytest.raises(ValueError, match="what='statistics' must be one of values, heads, weights, scores"):
        patch_heads(model, inputs, {"input_ids": OTHER}, lambda logits: logits[:, -1, 4], what="statistics")
