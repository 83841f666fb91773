"""DecoderLM: causal, blind to padding, blind to neighbours in a pack, and honest about its size."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from minitx.config import TransformerConfig, to_dict
from minitx.nn import DecoderLM, SlidingWindow
from minitx.nn.models import build_model

V, E, H, L = 13, 12, 3, 7
POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "t5", "none")
NORM_POSITIONS = ("pre", "post", "sandwich", "deepnorm")
VARIANTS = {
    "default": {},
    "unscaled": {"scale": "unscaled"},
    "learned scale": {"scale": "learned"},
    "log_length": {"scale": "log_length"},
    "grouped": {"num_kv_heads": 1},
    "window": {"window": 2},
    "qk-norm": {"qk_norm": "rms"},
    "soft-cap": {"softcap": 2.0},
    "parallel": {"parallel": True},
    "swiglu rms": {"activation": "swiglu", "norm": "rms", "bias": False},
    **{f"{kind}-norm": {"norm_position": kind} for kind in NORM_POSITIONS},
    "layer scale": {"layer_scale": 0.5},
    "sinks": {"sinks": True},
    "experts": {"num_experts": 3, "activation": "reglu"},
    "checkpointing": {"checkpointing": True},
}
WITHOUT_FUSED = ("soft-cap", "sinks")  # the sdpa backend refuses these by name


def model(**options):
    """Weights large enough that every path matters; float64."""
    options = {"vocab_size": V, "embed_dim": E, "num_heads": H, "num_layers": 2, "max_len": 31, "init": "lecun", **options}
    generator = torch.Generator().manual_seed(0)
    network = DecoderLM(TransformerConfig(**options), generator=generator).double()
    if network.config.position == "t5":  # starts at zero, which would hide its own loss
        torch.nn.init.normal_(network.attn_bias.weight, generator=generator)
    return network


def tokens(*shape):
    return torch.randint(1, V, shape)


def reach(network, length=L, **inputs):
    """|d logits[t] / d embedding[u]|: (L, L)."""
    embedded = []
    handle = network.embeddings.register_forward_hook(lambda m, a, out: embedded.append(out.requires_grad_()) or out)
    logits = network(tokens(1, length), **inputs)
    handle.remove()
    rows = [torch.autograd.grad(logits[0, t].square().sum(), embedded[0], retain_graph=True)[0][0] for t in range(length)]
    return torch.stack(rows).abs().sum(-1)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("backend", ["math", "auto"])
def test_future_tokens_receive_no_gradient(variant, position, backend):
    seen = reach(model(position=position, backend=backend, **VARIANTS[variant]))
    assert not seen.triu(1).any()
    assert (seen.diagonal() > 0).all()
    if variant not in ("window",):
        assert (seen.tril()[1:] > 0).sum() == L * (L + 1) // 2 - 1


@pytest.mark.parametrize("position", POSITIONS)
def test_changing_a_future_token_changes_no_bit(position):
    network = model(position=position)
    ids = tokens(2, L)
    other = ids.clone()
    other[:, 4:] = other[:, 4:] % (V - 1) + 1
    assert torch.equal(network(ids)[:, :4], network(other)[:, :4])
    assert not torch.equal(network(ids)[:, 4:], network(other)[:, 4:])


def test_a_window_of_w_reaches_w_minus_one_back_in_every_layer():
    seen = reach(model(window=2, num_layers=2))
    assert torch.equal(seen > 0, torch.ones(L, L, dtype=torch.bool).tril().triu(-2))
    seen = reach(model(window=3, num_layers=1))
    assert torch.equal(seen > 0, torch.ones(L, L, dtype=torch.bool).tril().triu(-2))


@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in WITHOUT_FUSED])
def test_left_padded_equals_right_padded_equals_unpadded(variant, position, backend):
    network = model(position=position, backend=backend, **VARIANTS[variant])
    ids = tokens(1, L)
    plain = network(ids)
    for left, right in ((3, 0), (0, 3), (2, 2)):
        padded = torch.cat((tokens(1, left), ids, tokens(1, right)), dim=1)
        real = torch.tensor([[left <= t < left + L for t in range(left + L + right)]])
        logits = network(padded, key_mask=real)
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits[:, left : left + L], plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", POSITIONS)
def test_padding_next_to_other_rows_and_its_token_ids_do_not_matter(position):
    network = model(position=position)
    ids = tokens(2, L)
    real = torch.tensor([[False] * 3 + [True] * 4, [True] * L])
    other = ids.clone()
    other[0, :3] = 0
    one, two = network(ids, key_mask=real), network(other, key_mask=real)
    assert torch.equal(one[0, 3:], two[0, 3:])
    assert torch.equal(one[1], two[1])
    torch.testing.assert_close(one[1:], network(ids[1:]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("position", POSITIONS)
def test_padding_sends_no_gradient_and_receives_none(position):
    network = model(position=position, tie_embeddings=False)
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    real = torch.tensor([[False, False, True, True, True]])
    network(ids, key_mask=real)[0, 2:].square().sum().backward()
    grad = network.embeddings.token.weight.grad
    assert torch.isfinite(grad).all()
    assert not grad[[1, 2]].any()
    assert grad[[3, 4, 5]].abs().sum(-1).min() > 0


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("variant", ["default", "log_length", "window", "grouped", "post-norm"])
def test_packed_documents_equal_separate_runs(variant, position):
    network = model(position=position, **VARIANTS[variant])
    first, second = tokens(1, 4), tokens(1, 6)
    documents = torch.tensor([[3] * 4 + [9] * 6])
    packed = network(torch.cat((first, second), dim=1), document_ids=documents)
    torch.testing.assert_close(packed[:, :4], network(first), rtol=0, atol=1e-12)
    torch.testing.assert_close(packed[:, 4:], network(second), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["math", "sdpa"])
@pytest.mark.parametrize("position", POSITIONS)
def test_changing_one_document_changes_no_bit_of_the_next(position, backend):
    network = model(position=position, backend=backend).float()
    documents = torch.tensor([[0] * 4 + [1] * 6])
    ids = tokens(1, 10)
    other = ids.clone()
    other[:, :4] = other[:, :4] % (V - 1) + 1
    one, two = network(ids, document_ids=documents), network(other, document_ids=documents)
    assert torch.equal(one[:, 4:], two[:, 4:])
    assert not torch.equal(one[:, :4], two[:, :4])


@pytest.mark.parametrize("position", POSITIONS)
def test_a_padded_pack_equals_its_documents(position):
    network = model(position=position)
    first, second = tokens(1, 3), tokens(1, 4)
    packed = torch.cat((tokens(1, 2), first, second), dim=1)
    real = torch.tensor([[False] * 2 + [True] * 7])
    logits = network(packed, key_mask=real, document_ids=torch.tensor([[1] * 5 + [2] * 4]))  # padding shares the first id
    torch.testing.assert_close(logits[:, 2:5], network(first), rtol=0, atol=1e-12)
    torch.testing.assert_close(logits[:, 5:], network(second), rtol=0, atol=1e-12)


def test_a_mask_given_by_the_caller_intersects_with_the_models_own():
    network = model(num_layers=1)
    assert torch.equal(reach(network, mask=SlidingWindow(2)) > 0, torch.ones(L, L, dtype=torch.bool).tril().triu(-1))
    everything = torch.ones(L, L, dtype=torch.bool)
    assert not reach(network, mask=everything).triu(1).any()
    assert torch.equal(reach(network, mask=everything.triu()) > 0, torch.eye(L, dtype=torch.bool))


def test_the_mask_is_built_once_and_shared_by_all_layers():
    network = model(num_layers=3)
    seen = []
    for block in network.blocks:
        block.attention.core.register_forward_pre_hook(lambda m, a, k: seen.append(k["mask"]), with_kwargs=True)
    network(tokens(2, L), key_mask=torch.ones(2, L, dtype=torch.bool))
    assert len(seen) == 3
    assert seen[0] is seen[1] is seen[2]


def test_token_types_are_summed_into_the_embeddings():
    network = model(type_vocab_size=2, position="none")
    ids, types = tokens(1, L), torch.tensor([[0, 0, 1, 1, 1, 0, 1]])
    got = network.embeddings(ids, torch.arange(L)[None], types)
    assert torch.equal(got, network.embeddings.token.weight[ids] + network.embeddings.token_type.weight[types])
    assert not torch.equal(network(ids, token_type_ids=types), network(ids, token_type_ids=1 - types))


def test_positions_can_be_given():
    network = model()
    ids = tokens(2, L)
    assert torch.equal(network(ids, position_ids=torch.arange(L)[None]), network(ids))
    assert not torch.equal(network(ids, position_ids=torch.arange(L)[None] + 5), network(ids))
    rotary = model(position="rotary")
    torch.testing.assert_close(rotary(ids, position_ids=torch.arange(L)[None] + 5), rotary(ids), rtol=0, atol=1e-11)


def test_without_positions_a_bag_of_earlier_tokens_is_all_there_is():
    network = model(position="none", num_layers=1)
    ids = tokens(1, L)
    swapped = ids[:, [1, 0, 2, 3, 4, 5, 6]]
    torch.testing.assert_close(network(swapped)[:, 2:], network(ids)[:, 2:], rtol=0, atol=1e-12)
    ordered = model(position="learned", num_layers=1)
    assert not torch.allclose(ordered(swapped)[:, 2:], ordered(ids)[:, 2:])


def test_extras_come_before_the_head():
    network = model()
    ids = tokens(2, L)
    hidden, extras = network(ids, return_extras=True)
    assert hidden.shape == (2, L, E)
    assert extras == {}
    assert torch.equal(network.head(hidden), network(ids))


def test_tied_embeddings_share_one_parameter():
    tied, untied = model(tie_embeddings=True), model(tie_embeddings=False)
    assert tied.head.weight is tied.embeddings.token.weight
    assert untied.num_parameters() - tied.num_parameters() == V * E
    twin = copy.deepcopy(tied)
    assert twin.head.weight is twin.embeddings.token.weight


def test_number_of_parameters_by_hand():
    # per layer: 4 (E² + E) + (E·4E + 4E) + (4E·E + E) + 2 norms of 2E; around: V·E + 31·E + 2E
    per_layer = 4 * (144 + 12) + (576 + 48) + (576 + 12) + 48
    assert model().num_parameters() == 2 * per_layer + 13 * 12 + 31 * 12 + 24
    network = model()
    network.blocks[0].requires_grad_(False)
    assert network.num_parameters() == per_layer + 13 * 12 + 31 * 12 + 24


@pytest.mark.parametrize("gated", [False, True])
def test_flops_per_token_is_the_published_formula(gated):
    layers, E, F, V, T = 3, 32, 72, 41, 17
    network = model(
        vocab_size=V, embed_dim=E, num_heads=4, num_layers=layers, ffn_dim=F, activation="swiglu" if gated else "gelu"
    )  # fmt: skip
    matrices = layers * (4 * E**2 + (3 if gated else 2) * E * F) + E * V
    forward = 2 * matrices + 4 * layers * E * (T + 1) / 2
    assert network.flops_per_token(T) == pytest.approx(3 * forward, rel=1e-15)
    untied = model(vocab_size=V, embed_dim=E, num_heads=4, num_layers=layers, ffn_dim=F, tie_embeddings=False)
    tied = model(vocab_size=V, embed_dim=E, num_heads=4, num_layers=layers, ffn_dim=F)
    assert untied.flops_per_token(T) == tied.flops_per_token(T)


def test_flops_of_gpt2_124m_at_1024_tokens():
    config = {"vocab_size": 50257, "embed_dim": 768, "num_heads": 12, "num_layers": 12, "max_len": 1024}
    with torch.device("meta"):
        network = DecoderLM(TransformerConfig(**config))
    assert network.num_parameters() == 124_439_808
    assert round(network.flops_per_token(1024) / 1e6) == 798


def test_flops_under_a_window_count_visible_keys():
    full, windowed = model(), model(window=2)
    # T = 3: 1 + 2 + 3 keys against 1 + 2 + 2, times 4 · layers · E · 3 / T
    assert full.flops_per_token(3) - windowed.flops_per_token(3) == pytest.approx(3 * 4 * 2 * 12 / 3)


def test_deepnorm_scales_the_stream_by_the_fourth_root_of_twice_the_depth():
    network = model(norm_position="deepnorm", num_layers=8)
    assert network.blocks[5].attention_residual.residual_scale == pytest.approx(2.0)
    assert model(norm_position="post").blocks[0].attention_residual.residual_scale == 1.0


@pytest.mark.parametrize("norm_position", NORM_POSITIONS)
def test_the_hidden_state_ends_normed_whatever_the_norm_position(norm_position):
    hidden, _ = model(norm_position=norm_position)(tokens(2, L), return_extras=True)
    torch.testing.assert_close(hidden.var(-1, correction=0), torch.ones(2, L).double(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_copies_and_pickles_answer_alike(variant):
    network, ids = model(**VARIANTS[variant]), tokens(2, L)
    want = network(ids)
    assert torch.equal(copy.deepcopy(network)(ids), want)
    assert torch.equal(pickle.loads(pickle.dumps(network))(ids), want)
    buffer = io.BytesIO()
    torch.save(network.state_dict(), buffer)
    buffer.seek(0)
    restored = DecoderLM(TransformerConfig(**to_dict(network.config))).double()
    restored.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(restored(ids), want)


@pytest.mark.parametrize("position", POSITIONS)
def test_checkpoints_hold_parameters_only(position):
    network = model(position=position)
    assert set(network.state_dict()) == {n for n, _ in network.named_parameters(remove_duplicate=False)}


def test_train_eval_and_no_grad_agree_to_the_bit_and_dropout_is_off_in_eval():
    network, ids = model(), tokens(2, L)
    trained = network(ids)
    with torch.no_grad():
        assert torch.equal(network.eval()(ids), trained)
    dropping = model(dropout=0.3)
    assert not torch.equal(dropping(ids), dropping(ids))
    assert torch.equal(dropping.eval()(ids), dropping(ids))
    assert torch.equal(dropping(ids), trained)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v not in WITHOUT_FUSED])
def test_backends_agree_on_the_whole_model_forward_and_backward(variant):
    ids, results = tokens(2, L), []
    real = torch.tensor([[False] * 2 + [True] * 5, [True] * L])
    for backend in ("math", "sdpa"):
        network = model(backend=backend, **VARIANTS[variant])
        logits = network(ids, key_mask=real)
        logits[real].square().mean().backward()
        results.append([logits[real], *(p.grad for p in network.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-11)


def test_layers_do_not_share_weights():
    network = model()
    one, two = (block.attention.q_proj.weight for block in network.blocks)
    assert one is not two and not torch.equal(one, two)


def test_the_architecture_word_builds_the_model():
    built = build_model(TransformerConfig(vocab_size=V, embed_dim=E, num_heads=H, num_layers=1))
    assert isinstance(built, DecoderLM) and isinstance(built, nn.Module)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_stays_finite_under_padding(precision):
    network, ids = model().to(precision), tokens(2, L)
    real = torch.tensor([[False] * 6 + [True], [True] * L])
    logits = network(ids, key_mask=real)
    logits[real].float().logsumexp(-1).sum().backward()
    assert logits.dtype == precision
    assert torch.isfinite(logits).all()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)


@pytest.mark.parametrize("position", ["alibi", "t5"])
def test_one_bias_is_shared_by_all_layers(position):
    network, seen = model(position=position, num_layers=3), []
    for block in network.blocks:
        block.attention.core.register_forward_pre_hook(lambda m, a, k: seen.append(k["attn_bias"]), with_kwargs=True)
    network(tokens(1, L))
    assert seen[0] is not None and seen[0] is seen[1] is seen[2]


def test_alibi_subtracts_the_distance_times_the_slope_of_the_head():
    network, seen = model(position="alibi", num_heads=2, num_layers=1), {}
    block = network.blocks[0]
    block.attention.core.register_forward_pre_hook(lambda m, a, k: seen.update(q=a[0], k=a[1]), with_kwargs=True)
    block.attention.core.register_forward_hook(lambda m, a, k, out: seen.update(out=out, v=a[2]), with_kwargs=True)
    network(tokens(1, L))
    distance = (torch.arange(L)[:, None] - torch.arange(L)).double()
    scores = seen["q"] @ seen["k"].transpose(-1, -2) / 6**0.5 - torch.tensor([2.0**-4, 2.0**-8]).view(2, 1, 1) * distance
    want = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ seen["v"]
    torch.testing.assert_close(seen["out"], want, rtol=0, atol=1e-12)


def test_the_t5_bias_learns_and_its_gradient_comes_from_every_layer():
    network = model(position="t5")
    network(tokens(2, L)).square().sum().backward()
    grad = network.attn_bias.weight.grad
    assert (grad[:L].abs().sum(-1) > 0).all() and not grad[L:].any()  # the distances 0 … L - 1 have a bucket each
    assert "attn_bias.weight" in network.state_dict()
    assert not network.attn_bias.bidirectional  # a decoder looks back only: all buckets are for the past


@pytest.mark.parametrize("position", ["alibi", "t5"])
def test_relative_positions_go_beyond_max_len(position):
    network = model(position=position, max_len=4)
    assert torch.isfinite(network(tokens(1, 40))).all()


def test_a_head_mask_of_one_layer_is_that_row_of_the_whole():
    network, ids = model(num_layers=3), tokens(2, L)
    whole = torch.ones(3, H)
    whole[1] = torch.tensor([0.0, 1.0, 0.5])
    assert torch.equal(network(ids, head_mask=whole), network(ids, head_mask={1: whole[1]}))
    assert torch.equal(network(ids, head_mask={}), network(ids))
    torch.testing.assert_close(network(ids, head_mask=torch.ones(3, H)), network(ids), rtol=0, atol=1e-12)
    assert not torch.allclose(network(ids, head_mask=whole), network(ids))


def test_without_any_head_a_layer_adds_its_output_bias_alone():
    network, ids = model(num_layers=1, bias=False), tokens(2, L)
    got = network(ids, head_mask=torch.zeros(1, H))
    x = network.embeddings(ids, torch.arange(L)[None])
    block = network.blocks[0]
    want = network.head(network.final_norm(x + block.feedforward(block.feedforward_residual.norm(x))))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_stochastic_depth_grows_linearly_to_the_last_block():
    network = model(num_layers=4, stochastic_depth=0.2)
    chances = [block.attention_residual.branch[0].p for block in network.blocks]
    assert chances == pytest.approx([0.05, 0.10, 0.15, 0.20])
    ids = tokens(2, L)
    assert not torch.equal(network(ids), network(ids))
    assert torch.equal(network.eval()(ids), model(num_layers=4)(ids))


@pytest.mark.parametrize("variant", ["default", "experts", "layer scale"])
@pytest.mark.parametrize("position", ["rotary", "t5"])
def test_checkpointing_changes_no_bit_of_the_gradients(position, variant):
    ids, results = tokens(2, L), []
    for checkpointing in (False, True):
        network = model(
            position=position, dropout=0.2, stochastic_depth=0.3, **{**VARIANTS[variant], "checkpointing": checkpointing}
        )
        torch.manual_seed(7)
        hidden, extras = network(ids, return_extras=True)
        (network.head(hidden).square().mean() + sum(extras.values())).backward()
        results.append({name: p.grad for name, p in network.named_parameters()})
    plain, checkpointed = results
    assert all(grad is not None for grad in plain.values())
    assert all(torch.equal(grad, checkpointed[name]) for name, grad in plain.items())


def test_checkpointing_keeps_less_for_the_backward_pass():
    sizes = []
    for checkpointing in (False, True):
        network, kept = model(checkpointing=checkpointing, num_layers=6), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            network(tokens(2, 16))
        sizes.append(sum(kept))
    assert sizes[1] < sizes[0] / 4


def test_a_router_loss_is_there_only_where_there_is_a_router():
    assert model()(tokens(1, L), return_extras=True)[1] == {}
    assert list(model(num_experts=2)(tokens(1, L), return_extras=True)[1]) == ["router_loss"]
