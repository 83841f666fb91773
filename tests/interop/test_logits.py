"""Other people's weights answer here what they answer there: every family, shape and side of padding, in two precisions."""

import pytest
import torch
import transformers
from foreign import BERT, CASES, GPT2, PAD, UNPADDED, L, answers, batch, build, in_float64, positions, save, widen, worst

from minitx.interop import load_hf

GRID = [(name, padding) for name in CASES for padding in (("none",) if name in UNPADDED else ("none", "left", "right"))]


def inputs(name, padding):
    return (torch.randn(3, 2, 12, 12), None) if name.startswith("vit") else batch(padding)


@pytest.mark.parametrize(("name", "padding"), GRID)
def test_logits_are_theirs_in_float32_and_float64(name, padding, tmp_path, monkeypatch):
    theirs = build(name)
    ours, wide_ours = load_hf(save(theirs, tmp_path)), load_hf(tmp_path, dtype=torch.double)
    given = inputs(name, padding)
    pairs = answers(theirs, ours, given)
    assert worst(pairs) < 1e-5
    assert all(one.std() > 0.05 for one, _ in pairs)  # there is something to compare
    with in_float64(monkeypatch):
        wide = given[0].double() if given[0].is_floating_point() else given[0]
        assert worst(answers(widen(theirs), wide_ours, (wide, given[1]))) < 1e-10


# Each key, changed in the config alone, changes the answer: it is read, and the comparison above would see a mistake in it.
READ = [
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt2", {"layer_norm_epsilon": 1e-2}),
    ("bert masked", {"hidden_act": "gelu_new"}),
    ("bert masked", {"layer_norm_eps": 1e-2}),
    ("roberta masked", {"pad_token_id": 0, "max_position_embeddings": 43}),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama grouped tied", {"rms_norm_eps": 1e-6}),
    ("llama grouped tied", {"hidden_act": "gelu"}),
    ("mistral window", {"sliding_window": 4}),
    ("mistral window", {"sliding_window": None}),
    ("qwen2 window", {"use_sliding_window": False, "layer_types": None}),
    ("qwen3", {"rms_norm_eps": 1e-6}),
    ("gemma2", {"attn_logit_softcapping": 2.5}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 14}),
    ("gemma2", {"hidden_activation": "gelu"}),
    ("gemma2 window", {"layer_types": ["full_attention"] * 2}),
    ("gemma3", {"query_pre_attn_scalar": 14}),
    ("gemma3 window", {"sliding_window": 4}),
    ("gemma3 window", {"rope_parameters": None, "rope_local_base_freq": 500.0}),
    ("t5 few buckets", {"relative_attention_max_distance": 5}),
    ("t5 v1.0", {"scale_decoder_outputs": False}),
]


@pytest.mark.parametrize(("name", "changed"), READ)
def test_a_key_of_the_config_changes_the_answer(name, changed, tmp_path):
    theirs = build(name)
    save(theirs, tmp_path)
    given = batch("right")
    assert worst(answers(theirs, load_hf(tmp_path), given)) < 1e-5
    assert worst(answers(theirs, load_hf(tmp_path, overrides=changed), given)) > 1e-4


def test_images_of_another_size_get_the_positions_that_they_get_there(tmp_path):
    theirs = build("vit")
    ours, pixels = load_hf(save(theirs, tmp_path)), torch.randn(2, 2, 18, 9)
    with torch.no_grad():
        want = theirs(pixel_values=pixels, interpolate_pos_encoding=True).logits
        assert (ours(pixels) - want).abs().max() < 1e-5


def test_a_base_model_without_a_pooler_and_a_gpt2_without_a_head_load(tmp_path):
    torch.manual_seed(7)
    bare = transformers.BertModel(transformers.BertConfig(**BERT), add_pooling_layer=False).eval()
    ours, (ids, _) = load_hf(save(bare, tmp_path / "bert")), batch("none")
    with torch.no_grad():
        hidden, extras = ours(ids, return_extras=True)
        assert (hidden - bare(ids).last_hidden_state).abs().max() < 1e-5
    assert extras == {}
    headless = transformers.GPT2Model(transformers.GPT2Config(**GPT2)).eval()
    ours = load_hf(save(headless, tmp_path / "gpt2"))
    with torch.no_grad():
        assert (ours(ids, return_extras=True)[0] - headless(ids).last_hidden_state).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["bert masked", "bert sequence", "bert token", "roberta masked"])
def test_token_types_are_0_where_none_are_given(name, tmp_path):
    theirs = build(name)
    ours, (ids, real) = load_hf(save(theirs, tmp_path)), batch("right")
    with torch.no_grad():
        want, got = theirs(ids, attention_mask=real.long()).logits, ours(ids, key_mask=real)
    seen = real if got.dim() == 3 else real[:, 0]
    assert (got - want)[seen].abs().max() < 1e-5
    with pytest.raises(ValueError, match="token_type_ids"):
        load_hf(save(build("gpt2"), tmp_path / "gpt2"))(ids, token_type_ids=torch.zeros_like(ids))


@pytest.mark.parametrize("name", ["bert sequence", "roberta sequence", "bert pooler"])
def test_a_left_padded_row_is_pooled_as_if_it_were_alone(name, tmp_path):
    """There the padding in the first column answers for the row."""
    theirs = build(name)
    ours = load_hf(save(theirs, tmp_path))
    row = torch.tensor([[5, 7, 11, 13]])
    padded = torch.cat((torch.full((1, 3), PAD), row), dim=1)
    with torch.no_grad():
        hidden, extras = ours(padded, key_mask=padded != PAD, return_extras=True)
        alone = theirs(row)
        if name == "bert pooler":
            assert (extras["pooled"] - alone.pooler_output).abs().max() < 1e-5
        else:
            assert (ours.head(hidden) - alone.logits).abs().max() < 1e-5


def test_positions_count_real_tokens_where_transformers_counts_columns(tmp_path):
    theirs = build("gpt2")
    ours, (ids, real) = load_hf(save(theirs, tmp_path)), batch("left")
    with torch.no_grad():
        told = theirs(ids, attention_mask=real.long(), position_ids=positions(real)).logits
        untold = theirs(ids, attention_mask=real.long()).logits
        mine = ours(ids, key_mask=real)
    assert (mine - told)[real].abs().max() < 1e-5
    assert (mine - untold)[real].abs().max() > 1e-2


@torch.no_grad()
def greedy(step, ids, steps=32):
    """``step`` gives the logits after what is there; every row grows by its likeliest id."""
    for _ in range(steps):
        ids = torch.cat((ids, step(ids).argmax(-1, keepdim=True)), dim=1)
    return ids[:, -steps:]


@pytest.mark.parametrize("name", ["gpt2", "llama grouped tied", "qwen3", "gemma2", "t5 v1.0", "t5 v1.1"])
def test_greedy_ids_are_theirs_over_32_tokens(name, tmp_path):
    theirs = build(name)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():  # so that it does not repeat one id
            if parameter.dim() > 1 and not any(word in key for word in ("wte", "embed", "shared", "lm_head")):
                parameter.mul_(3.0)
    ours = load_hf(save(theirs, tmp_path))
    prompt, real = batch("left")

    def mask(ids):
        return torch.cat((real, torch.ones(3, ids.shape[1] - L, dtype=torch.bool)), dim=1)

    def their_step(ids):
        return theirs(ids, attention_mask=mask(ids).long(), position_ids=positions(mask(ids))).logits[:, -1]

    def their_t5_step(ids):
        options = {"input_ids": prompt, "attention_mask": real.long(), "use_cache": False}
        return theirs(decoder_input_ids=ids, **options).logits[:, -1]

    if name.startswith("t5"):
        start, memory = torch.zeros(3, 1, dtype=torch.long), ours.encode(prompt, key_mask=real)
        mine = greedy(lambda ids: ours(None, ids, key_mask=real, memory=memory)[:, -1], start)
        want = greedy(their_t5_step, start)
    else:
        mine = greedy(lambda ids: ours(ids, key_mask=mask(ids))[:, -1], prompt)
        want = greedy(their_step, prompt)
    assert torch.equal(mine, want)
    assert len(mine.unique()) > 6
