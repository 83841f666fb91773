"""DecoderLM: causal, blind to padding, blind to neighbours in a pack, and honest about its size."""

import copy
from typing import get_args, get_type_hints

import pytest
import torch
from sizes import assert_same, tokens
from sizes import small_model as model

from minitx.config import TransformerConfig
from minitx.nn import PrefixLM, Rotary, SlidingWindow, model_parts
from minitx.nn.blocks import NORM_POSITIONS
from minitx.nn.feedforward import ACTIVATIONS, GATED
from minitx.nn.init import SCHEMES
from minitx.nn.models import MODELS

V, E, L = 13, 12, 7
POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "t5", "none")


def test_the_words_of_an_option_are_those_that_the_layers_know():
    def words(name):
        return {*get_args(get_type_hints(TransformerConfig)[name])}

    known = {"activation": ACTIVATIONS, "norm_position": NORM_POSITIONS, "position": model_parts.POSITIONS, "init": SCHEMES}
    assert {name: words(name) for name in known} == {name: {*registry} for name, registry in known.items()}
    assert {name for name in ACTIVATIONS if "glu" in name} == {*GATED}


def reach(network, length=L, **inputs):
    """|d logits[t] / d embedding[u]|: (L, L)."""
    embedded = []
    handle = network.embeddings.register_forward_hook(lambda m, a, out: embedded.append(out.requires_grad_()) or out)
    logits = network(tokens(1, length), **inputs)
    handle.remove()
    rows = [torch.autograd.grad(logits[0, t].square().sum(), embedded[0], retain_graph=True)[0][0] for t in range(length)]
    return torch.stack(rows).abs().sum(-1)


@pytest.mark.parametrize(("position", "options"), [("learned", {}), ("t5", {}), ("rotary", {"window": 2})], ids=str)
def test_future_tokens_receive_no_gradient_and_change_no_bit(position, options):
    network, ids = model(position=position, **options), tokens(2, L)
    seen = reach(network) > 0
    assert torch.equal(seen, torch.ones(L, L, dtype=torch.bool).tril().triu(-2 if "window" in options else -L))
    other = ids.clone()
    other[:, 4:] = other[:, 4:] % (V - 1) + 1
    assert torch.equal(network(ids)[:, :4], network(other)[:, :4])
    assert not torch.equal(network(ids)[:, 4:], network(other)[:, 4:])


def test_packed_documents_need_positions_for_the_longest_alone():
    network, ids = model(max_len=4), tokens(1, 8)
    packed = network(ids, document_ids=torch.tensor([[0] * 4 + [1] * 4]))
    assert_same(packed[:, 4:], network(ids[:, 4:]))
    with pytest.raises(ValueError, match="position_ids"):
        network(ids, document_ids=torch.tensor([[0] * 5 + [1] * 3]))


def test_a_mask_given_by_the_caller_intersects_with_the_models_own():
    network = model(num_layers=1)
    assert torch.equal(reach(network, mask=SlidingWindow(2)) > 0, torch.ones(L, L, dtype=torch.bool).tril().triu(-1))
    everything = torch.ones(L, L, dtype=torch.bool)
    assert not reach(network, mask=everything).triu(1).any()
    assert torch.equal(reach(network, mask=everything.triu()) > 0, torch.eye(L, dtype=torch.bool))


@pytest.mark.parametrize(("position", "backend"), [("learned", "sdpa"), ("alibi", "math"), ("rotary", "chunked")])
def test_a_prefix_is_seen_both_ways_and_the_future_after_it_is_not(position, backend):
    network, prefix = model(position=position, backend=backend), PrefixLM(3)
    ids = tokens(1, L)
    assert not torch.allclose(network(ids, mask=prefix)[:, :2], network(ids)[:, :2])
    seen = reach(network, mask=prefix) > 0
    visible = torch.ones(L, L, dtype=torch.bool).tril()
    visible[:3, :3] = True
    assert torch.equal(seen, visible)


def test_positions_can_be_given():
    network = model()
    ids = tokens(2, L)
    assert torch.equal(network(ids, position_ids=torch.arange(L)[None]), network(ids))
    assert not torch.equal(network(ids, position_ids=torch.arange(L)[None] + 5), network(ids))
    rotary = model(position="rotary")
    torch.testing.assert_close(rotary(ids, position_ids=torch.arange(L)[None] + 5), rotary(ids), rtol=0, atol=1e-11)


def test_rotary_positions_of_ones_own_act_in_their_layer_alone():
    class Slow(Rotary):
        def frequencies(self, *args):
            return super().frequencies(*args) / 2

    network, ids = model(position="rotary"), tokens(2, L)
    want = model(position="rotary", rotary_scaling="linear", rotary_factor=(1.0, 2.0))(ids)
    network.blocks[1].attention.rotary = Slow(network.blocks[1].attention.head_dim)
    torch.testing.assert_close(network(ids), want)


def test_a_model_takes_no_config_of_another_architecture():
    """It would be saved as one and come back as the other."""
    sizes = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 1}
    for architecture, kind in MODELS.items():
        for other in MODELS.keys() - {architecture}:
            more = {"head": "none", "image_size": 6, "num_channels": 1} if other == "vision" else {}
            config = TransformerConfig(architecture=other, **more, **sizes)
            with pytest.raises(ValueError, match=f"architecture='{architecture}', got '{other}'|image_size=None: Vision"):
                kind(config)


def test_tied_embeddings_share_one_parameter():
    tied, untied = model(tie_embeddings=True), model(tie_embeddings=False)
    assert tied.head.weight is tied.embeddings.token.weight
    assert untied.num_parameters() - tied.num_parameters() == V * E
    twin = copy.deepcopy(tied)
    assert twin.head.weight is twin.embeddings.token.weight


@pytest.mark.parametrize("architecture", ["decoder", "encoder_decoder"])
def test_a_tied_model_stays_tied_where_torch_makes_new_parameters(architecture):
    options = {"architecture": architecture, "tie_embeddings": True}
    tied = model(**options)
    weights, number = {name: weight.clone() for name, weight in tied.state_dict().items()}, tied.num_parameters()
    with torch.device("meta"):
        empty, assigned = (torch.nn.Sequential(model(**options)) for _ in range(2))
    empty.to_empty(device="cpu")
    empty[0].load_state_dict(weights)
    assigned.load_state_dict({f"0.{name}": weight for name, weight in weights.items()}, assign=True)
    for [found] in (empty, assigned):
        assert found.num_parameters() == number and found.head.weight is found.embeddings.token.weight
        assert_same(list(found.state_dict().values()), list(weights.values()))
    head = weights.pop("head.weight")
    assigned[0].load_state_dict(weights, strict=False, assign=True)
    assert assigned[0].head.weight is assigned[0].embeddings.token.weight
    weights["head.weight"] = head + 1
    assigned[0].load_state_dict(weights, assign=True)  # these are two
    assert assigned[0].num_parameters() == number + V * E


def test_a_model_prints_the_sizes_of_its_parts():
    parts = {"stochastic_depth": 0.2, "layer_scale": 0.5, "scale": "learned", "qk_norm": "l2"}
    shown = repr(model(position="t5", backend="math", **parts)) + repr(model(position="rotary", rotary_interleaved=True))
    for wanted in ("interleaved", "p=0.2", "bidirectional=False", "embed_dim=12", "backend='math'", "head_dim=4"):
        assert wanted in shown


def test_checkpoints_hold_parameters_only():
    for position in POSITIONS:
        network = model(position=position)
        assert set(network.state_dict()) == {n for n, _ in network.named_parameters(remove_duplicate=False)}


def test_train_eval_and_no_grad_agree_to_the_bit_and_dropout_is_off_in_eval():
    trained, ids = model(dropout=0.3), tokens(2, L)
    assert not torch.equal(trained(ids), trained(ids))
    want = model()(ids)
    with torch.no_grad():
        assert torch.equal(trained.eval()(ids), want)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for its CPU kernel
def test_gradients_of_each_row_by_vmap_of_grad_are_those_of_the_rows_alone():
    network, ids = model(position="learned"), tokens(3, L)
    weights = {name: weight.detach() for name, weight in network.named_parameters()}

    def loss(weights, row):
        return torch.func.functional_call(network, weights, (row.unsqueeze(0),)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)
    for row, one in enumerate(ids):
        want = torch.func.grad(loss)(weights, one)
        torch.testing.assert_close({name: gradient[row] for name, gradient in each.items()}, want)


def test_tables_may_be_wrapped_as_peft_wraps_them_and_ids_are_checked():
    class Adapter(torch.nn.Module):
        def __init__(self, base_layer):
            super().__init__()
            self.adapter = torch.nn.ModuleDict({"base_layer": base_layer})

        def forward(self, ids):
            return self.adapter["base_layer"](ids)

    options = {"position": "learned", "type_vocab_size": 2, "tie_embeddings": False}
    network, ids = model(**options), tokens(2, L)
    parts = network.embeddings
    parts.token, parts.token_type, parts.position.table = map(Adapter, (parts.token, parts.token_type, parts.position.table))
    types = ids % 2
    assert torch.equal(network(ids, token_type_ids=types), model(**options)(ids, token_type_ids=types))
    with pytest.raises(ValueError, match="input_ids must be between 0"):
        network(ids + V)


def test_stochastic_depth_grows_linearly_to_the_last_block():
    network = model(num_layers=4, stochastic_depth=0.2)
    chances = [block.attention_residual.branch[0].p for block in network.blocks]
    assert chances == pytest.approx([0.05, 0.10, 0.15, 0.20])
    ids = tokens(2, L)
    assert not torch.equal(network(ids), network(ids))
    assert torch.equal(network.eval()(ids), model(num_layers=4)(ids))
