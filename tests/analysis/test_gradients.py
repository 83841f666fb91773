"""The statistics of gradients: against autograd by hand, for every kind of attention and of layer."""

import math
import statistics

import pytest
import torch
from torch import nn

from minitx.analysis.gradients import gradient_statistics
from minitx.config import TransformerConfig
from minitx.nn import DecoderLM, EncoderDecoder
from minitx.nn.attention import attention_cores

SIZES = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "init": "lecun"}


def decoder(num_layers):
    torch.manual_seed(0)
    return DecoderLM(TransformerConfig(**SIZES, num_layers=num_layers)).double().eval()


def test_gradient_statistics_equal_autograd_by_hand_and_leave_no_gradient_behind():
    model, (ids, labels) = decoder(num_layers=1), torch.randint(0, 11, (2, 9, 7)).unbind()
    labels[:, :3] = -100

    def loss(part):
        value = torch.nn.functional.cross_entropy(model(ids[part]).mT, labels[part], reduction="sum")
        return 1e-3 * value, {"input_ids": labels[part] != -100}

    found = gradient_statistics(model, slice(None), loss)["blocks.0.attention.core"]
    assert all(p.grad is None for p in model.parameters())

    layer, queries, norms, gradients = model.blocks[0].attention, [], [], []
    layer.core.register_forward_pre_hook(lambda _, args: queries.append(args[0].query))
    for part in torch.arange(9).chunk(4):
        value, _ = loss(part)
        grad_q, grad_w = torch.autograd.grad(value, [queries[-1], layer.q_proj.weight])
        norms += [float(grad_q[b, h, i].norm()) for b in range(len(part)) for h in range(3) for i in range(3, 7)]
        gradients.append(grad_w.flatten())
    stacked = torch.stack(gradients)
    noise = sum(float((g - stacked.mean(0)).norm() ** 2) for g in stacked) / (len(stacked) - 1)
    assert noise < 0.1
    assert found["snr_q"] == pytest.approx(float(stacked.mean(0).norm() ** 2) / noise)
    assert found["grad_query_rms"] == pytest.approx((sum(n * n for n in norms) / len(norms)) ** 0.5)
    assert found["grad_query_median"] == pytest.approx(statistics.median(norms))
    edges = [f"{math.floor(4 * math.log10(norm)) / 4:.2f}" for norm in norms]
    assert found["grad_query_histogram"] == {edge: edges.count(edge) for edge in edges}


def test_the_signal_to_noise_ratio_equals_autograd_on_each_part_for_a_layer_that_runs_twice():
    model = decoder(num_layers=2)
    model.blocks[1] = model.blocks[0]
    layer, ids = model.blocks[0].attention, torch.randint(0, 11, (5, 7))

    def statistics():
        return gradient_statistics(model, ids, lambda ids: (model(ids).square().sum(), {}), num_parts=2)[
            "blocks.0.attention.core"
        ]

    found = statistics()
    for letter in "qkv":
        weight = layer.get_submodule(f"{letter}_proj").weight
        parts = torch.stack([torch.autograd.grad(model(part).square().sum(), weight)[0].flatten() for part in ids.chunk(2)])
        assert found[f"snr_{letter}"] == pytest.approx(float(parts.mean(0).square().sum() / parts.var(0).sum()))

    def halve(core, args):
        args[0].query.mul_(0.5)

    layer.core.register_forward_pre_hook(halve)  # the gradient of the projection's output is then another one
    assert "snr_q" not in statistics() and "snr_k" in statistics()


@pytest.mark.filterwarnings("ignore")  # of torch.ao
def test_a_model_whose_layers_have_no_backward_pass_is_refused():
    model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=1))
    whole = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    with pytest.raises(TypeError, match=r"blocks\.0\.\S+ is a torch int8 layer without a backward pass"):
        gradient_statistics(whole, torch.zeros(1, 3, dtype=torch.long), lambda ids: (whole(ids).sum(), {}))


def test_the_rows_that_count_are_sources_in_the_encoder_and_targets_in_the_decoder():
    torch.manual_seed(0)
    model = EncoderDecoder(TransformerConfig(**SIZES, num_layers=1, architecture="encoder_decoder")).double().eval()
    sources, targets, queries = torch.randint(0, 11, (5, 7)), torch.randint(0, 11, (5, 3)), {}
    counted = {"input_ids": torch.rand(5, 7) < 0.5, "decoder_input_ids": torch.rand(5, 3) < 0.5}
    cores = {name: model.get_submodule(name) for name in attention_cores(model)}
    for name, core in cores.items():
        core.register_forward_pre_hook(lambda _, args, name=name: queries.update({name: args[0].query}))

    def loss(batch):
        return model(sources, targets).square().sum(), counted

    found = gradient_statistics(model, None, loss)
    for (name, query), gradient in zip(queries.items(), torch.autograd.grad(loss(None)[0], [*queries.values()]), strict=True):
        rows = gradient.norm(dim=-1).movedim(1, -1)[counted["input_ids" if query.shape[2] == 7 else "decoder_input_ids"]]
        assert found[name]["grad_query_rms"] == pytest.approx(float(rows.square().mean().sqrt()))
        assert sum(found[name]["grad_query_histogram"].values()) == rows.numel()
    assert len(queries) == 3 == len({query.shape for query in queries.values()}) + 1


def test_queries_that_the_loss_does_not_use_have_gradients_of_zero_and_their_weights_no_ratio():
    model, streams = decoder(num_layers=2), []
    model.blocks[0].register_forward_hook(lambda block, args, output: streams.append(output))

    def loss(ids):
        model(ids)
        return streams[-1].square().sum(), {}

    used, unused = gradient_statistics(model, torch.randint(0, 11, (5, 7)), loss).values()
    assert unused == {"grad_query_rms": 0.0, "grad_query_median": 0.0, "grad_query_histogram": {"zero": 5 * 7 * 3}}
    assert used["grad_query_rms"] > 0 and all(used[f"snr_{letter}"] > 0 for letter in "qkv")


def test_one_row_has_no_noise_to_compare_with():
    model = decoder(num_layers=1)
    [found] = gradient_statistics(model, torch.tensor([[3, 5, 7]]), lambda ids: (model(ids).square().sum(), {})).values()
    assert [found[f"snr_{letter}"] for letter in "qkv"] == [0.0] * 3


class Halved(nn.Linear):
    def forward(self, tokens):
        return super().forward(tokens) / 2


def test_frozen_weights_and_layers_with_another_forward_have_no_ratio():
    model = decoder(num_layers=1)
    layer, [name] = model.blocks[0].attention, attention_cores(model)
    layer.q_proj = Halved(12, 12, bias=False, dtype=torch.float64)
    layer.k_proj.weight.requires_grad_(False)
    found = gradient_statistics(model, torch.randint(0, 11, (5, 7)), lambda ids: (model(ids).square().sum(), {}))[name]
    assert [key for key in found if key.startswith("snr")] == ["snr_v"]
