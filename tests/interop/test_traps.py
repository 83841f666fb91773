"""Where conversions go wrong: each fault, made on purpose, is far outside the tolerance that the true model keeps."""

import pytest
import torch
from foreign import V, answers, batch, build, positions, save, worst

from minitx.interop import load_hf
from minitx.nn import ScoreScale


def attentions(model):
    return [block.attention for block in model.blocks]


def conv1d_not_transposed(model):
    for attention in attentions(model):
        attention.out_proj.weight.data = attention.out_proj.weight.data.T.contiguous()


def scores_scaled(model):
    for attention in attentions(model):
        attention.scale = ScoreScale("inv_sqrt", head_dim=attention.head_dim)


def bias_shared_by_the_stacks(model):
    model.attn_bias.weight.data = model.encoder.attn_bias.weight.data


def encoder_buckets_in_one_direction(model):
    model.encoder.attn_bias.bidirectional = False


def decoder_buckets_in_both_directions(model):
    model.attn_bias.bidirectional = True


def logits_not_scaled(model):
    object.__setattr__(model.config, "scale_logits", False)


def rotary_interleaved(model):
    for attention in attentions(model):
        attention.rotary.interleaved = True


def groups_by_tiling(model):
    """Query head h meets key head h % Hkv instead of h // (H / Hkv)."""
    for attention in attentions(model):
        H, D = attention.num_heads, attention.head_dim
        order = torch.arange(H).view(-1, attention.num_kv_heads).T.flatten()
        for weight, dim in ((attention.q_proj.weight, 0), (attention.out_proj.weight, 1)):
            weight.data = weight.data.unflatten(dim, (H, D)).index_select(dim, order).flatten(dim, dim + 1)


def head_tied(model):
    model.head.weight = model.embeddings.token.weight


def positions_from_the_first_row(model):
    model.embeddings.offset = 0


def gelu_by_tanh(model):
    for block in model.blocks:
        block.feedforward.activation = "gelu_tanh"


def other_eps(model):
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = 1e-6


def other_eps_of_qk_norm(model):
    for attention in attentions(model):
        attention.qk_norm.query_norm.eps = attention.qk_norm.key_norm.eps = 1e-6


def no_temperature(model):
    for attention in attentions(model):
        attention.scale = ScoreScale(
            attention.head_dim**-0.5 / attention.rotary.scaling.magnitude**2, head_dim=attention.head_dim
        )


def window_without_the_own_key(model):
    object.__setattr__(model.config, "window", model.config.window - 1)


FAULTS = [
    ("gpt2", conv1d_not_transposed),
    ("t5 v1.0", scores_scaled),
    ("t5 v1.0", logits_not_scaled),
    ("t5 few buckets", bias_shared_by_the_stacks),
    ("t5 few buckets", encoder_buckets_in_one_direction),
    ("t5 few buckets", decoder_buckets_in_both_directions),
    ("llama", rotary_interleaved),
    ("llama grouped tied", groups_by_tiling),
    ("llama grouped tied", other_eps),
    ("qwen3", other_eps_of_qk_norm),
    ("llama", head_tied),
    ("llama yarn", no_temperature),
    ("mistral window", window_without_the_own_key),
    ("roberta masked", positions_from_the_first_row),
    ("bert masked", gelu_by_tanh),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=lambda part: getattr(part, "__name__", part))
def test_the_comparison_catches_the_fault(name, fault, tmp_path):
    theirs = build(name)
    ours, given = load_hf(save(theirs, tmp_path)), batch("right")
    assert worst(answers(theirs, ours, given)) < 1e-5
    fault(ours)
    assert worst(answers(theirs, ours, given)) > 1e-4


def test_positions_counted_from_the_padding_on_are_caught(tmp_path):
    """``transformers`` counts positions from the first column, padding or not, unless told otherwise; here real tokens count."""
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


@pytest.mark.parametrize("name", ["gpt2", "llama grouped tied", "qwen3", "t5 v1.0", "t5 v1.1"])
def test_greedy_ids_are_theirs_over_32_tokens(name, tmp_path):
    theirs = build(name)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():  # so that it does not repeat one id
            if parameter.dim() > 1 and not any(word in key for word in ("wte", "embed", "shared", "lm_head")):
                parameter.mul_(3.0)
    ours = load_hf(save(theirs, tmp_path))
    prompt, real = batch("left")
    if name.startswith("t5"):
        start = torch.zeros(3, 1, dtype=torch.long)
        memory = ours.encode(prompt, key_mask=real)
        mine = greedy(lambda ids: ours(None, ids, key_mask=real, memory=memory)[:, -1], start)
        options = {"input_ids": prompt, "attention_mask": real.long(), "use_cache": False}
        want = greedy(lambda ids: theirs(decoder_input_ids=ids, **options).logits[:, -1], start)
    else:

        def mask(ids):
            return torch.cat((real, torch.ones(3, ids.shape[1] - real.shape[1], dtype=torch.bool)), dim=1)

        mine = greedy(lambda ids: ours(ids, key_mask=mask(ids))[:, -1], prompt)
        want = greedy(
            lambda ids: theirs(ids, attention_mask=mask(ids).long(), position_ids=positions(mask(ids))).logits[:, -1], prompt
        )
    assert mine.shape == (3, 32)
    assert torch.equal(mine, want)
    assert len(mine.unique()) > 6 and int(mine.max()) < V
