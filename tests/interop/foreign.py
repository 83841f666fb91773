"""Random small models of ``transformers`` and what they answer: the golden values of the tests beside."""

from __future__ import annotations

import contextlib
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
transformers.utils.logging.disable_progress_bar()

V, L, PAD = 61, 11, 1
SHAPE = {"hidden_size": 40, "intermediate_size": 53, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {**SHAPE, "vocab_size": V, "max_position_embeddings": 43, "pad_token_id": PAD}
VIT = {**SHAPE, "image_size": 12, "patch_size": 3, "num_channels": 2}
LLAMA = {
    **SHAPE,
    "vocab_size": V,
    "num_key_value_heads": 4,
    "max_position_embeddings": 43,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
GROUPED = {**LLAMA, "num_key_value_heads": 2}
QWEN3 = {**GROUPED, "head_dim": 14, "rms_norm_eps": 1e-3, "attention_bias": True, "tie_word_embeddings": True}
OTHER_LLAMA = {"num_key_value_heads": 1, "head_dim": 14, "hidden_act": "gelu", "attention_bias": True, "mlp_bias": True}
FULL, SLIDING = ({"layer_types": [f"{kind}_attention"] * 2} for kind in ("full", "sliding"))
GEMMA = {**GROUPED, **FULL, "head_dim": 14, "query_pre_attn_scalar": 30, "sliding_window": 5}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 0.7}
ROPE = {"rope_theta": 500.0, "factor": 3.0}
YARN = {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 13}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GPT2 = {"vocab_size": V, "n_positions": 43, "n_embd": 40, "n_layer": 2, "n_head": 4, "bos_token_id": 2, "eos_token_id": 3}
OTHER_GPT2 = {"layer_norm_epsilon": 1e-3, "scale_attn_weights": False, "activation_function": "relu", "n_inner": 53}
T5 = {"vocab_size": V, "d_model": 40, "d_kv": 7, "d_ff": 53, "num_heads": 3, "num_layers": 2}
T5_V11 = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 9}
OTHER_T5 = {**BUCKETS, "num_decoder_layers": 3, "layer_norm_epsilon": 1e-2}
CASES = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2 untied unscaled relu": ("GPT2LMHeadModel", {**GPT2, **OTHER_GPT2, "tie_word_embeddings": False}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama grouped tied": ("LlamaForCausalLM", {**GROUPED, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "llama one key head biases": ("LlamaForCausalLM", {**LLAMA, **OTHER_LLAMA}),
    "llama linear": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "llama llama3": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": LLAMA3}),
    "llama yarn": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": YARN}),
    "llama yarn turns": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5}}),
    "llama yarn one turn": ("LlamaForCausalLM", {**LLAMA, "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0}}),
    "mistral window": ("MistralForCausalLM", {**GROUPED, "sliding_window": 5}),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": None, "head_dim": 14}),
    "qwen2 window": ("Qwen2ForCausalLM", {**GROUPED, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen2 mixed": ("Qwen2ForCausalLM", {**GROUPED, **MIXED, "use_sliding_window": True, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", QWEN3),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, **CAPS}),
    "gemma2 window": ("Gemma2ForCausalLM", {**GEMMA, **CAPS, **SLIDING, "query_pre_attn_scalar": 14}),
    "gemma2 no caps": ("Gemma2ForCausalLM", {**GEMMA, **dict.fromkeys(CAPS), "tie_word_embeddings": False}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "rms_norm_eps": 1e-3, "attention_bias": True}),
    "gemma3 window": ("Gemma3ForCausalLM", {**GEMMA, **SLIDING, "final_logit_softcapping": 0.7}),
    "gemma3 mixed, stretched": ("Gemma3ForCausalLM", {**GEMMA, **MIXED, "rope_parameters": STRETCHED}),
    "bert masked": ("BertForMaskedLM", BERT),
    "bert masked untied": ("BertForMaskedLM", {**BERT, "tie_word_embeddings": False, "hidden_act": "gelu_new"}),
    "bert sequence": ("BertForSequenceClassification", {**BERT, "num_labels": 5}),
    "bert token": ("BertForTokenClassification", {**BERT, "num_labels": 3, "type_vocab_size": 3}),
    "bert pooler": ("BertModel", BERT),
    "roberta masked": ("RobertaForMaskedLM", BERT),
    "roberta sequence": ("RobertaForSequenceClassification", {**BERT, "num_labels": 5, "type_vocab_size": 1}),
    "roberta pooler": ("RobertaModel", BERT),
    "t5 v1.0": ("T5ForConditionalGeneration", T5),
    "t5 v1.1": ("T5ForConditionalGeneration", T5_V11),
    "t5 few buckets": ("T5ForConditionalGeneration", {**T5, **OTHER_T5, "feed_forward_proj": "gated-silu"}),
    "t5 encoder": ("T5EncoderModel", {**T5, "feed_forward_proj": "gated-gelu"}),
    "vit": ("ViTForImageClassification", {**VIT, "num_labels": 7}),
    "vit no qkv bias": ("ViTForImageClassification", {**VIT, "qkv_bias": False, "hidden_act": "gelu_new"}),
    "vit pooler": ("ViTModel", VIT),
}


def build(name):
    """The model of a case with weights that leave nothing at 0 or 1."""
    return random_model(*CASES[name])


def random_model(kind, config):
    cls = getattr(transformers, kind)
    torch.manual_seed(7)
    model = cls._from_config(cls.config_class(**config), attn_implementation="eager").eval().float()
    if kind == "T5ForConditionalGeneration" and config is T5_V11:  # transformers 5 ties at first, whatever the config says
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            else:
                parameter.normal_(0.0, 0.6 * parameter[0].numel() ** -0.5)
        for name, parameter in model.named_parameters():  # a soft-cap and a window matter where scores are large
            if kind.startswith("Gemma") and name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(3.0)
        for head in (getattr(model, "cls", None), getattr(model, "lm_head", None)):
            head = getattr(head, "predictions", head)
            if hasattr(head, "decoder"):  # two names for one bias, which an untied model takes for two
                head.decoder.bias.copy_(head.bias)
    return model


def saved(model, folder):
    """Its folder; ``model`` may be the name of a case."""
    (build(model) if isinstance(model, str) else model).save_pretrained(folder)
    return folder


def batch(padding, name=""):
    """(input_ids, key_mask): rows of several lengths, padded on one side; None for no padding. Pictures for a ViT."""
    if name.startswith("vit"):
        return torch.randn(3, 2, 12, 12), None
    ids, lengths, at = torch.randint(4, V, (3, L)), torch.tensor([L, 7, 5])[:, None], torch.arange(L)
    if padding == "none":
        return ids, None
    real = at < lengths if padding == "right" else at >= L - lengths
    return ids.where(real, torch.tensor(PAD)), real


def positions(real):
    return None if real is None else (real.long().cumsum(-1) - 1).clamp(min=0)


@contextlib.contextmanager
def in_float64(monkeypatch):
    """What ``transformers`` computes in float32 whatever the model's dtype is computed in float64: the formula, unrounded."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def widen(theirs):
    """A float64 copy, its rotary frequencies computed anew; inside ``in_float64``."""
    theirs = theirs.double()
    if hasattr(theirs, "model") and hasattr(theirs.model, "rotary_emb"):
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    embed = getattr(getattr(theirs, "model", None), "embed_tokens", None)
    if hasattr(embed, "embed_scale"):
        embed.embed_scale = torch.tensor(embed.scalar_embed_scale, dtype=torch.double)
    return theirs


@torch.no_grad()
def answers(theirs, ours, inputs):
    """Their logits (or hidden states) and ours, at real tokens; pooled vectors behind them where there are any."""
    kind, (ids, real) = type(theirs).__name__, inputs
    if kind.startswith("ViT"):
        out, pixels = theirs(pixel_values=ids), ids
        if kind == "ViTModel":
            hidden = ours(pixels)
            return [(out.last_hidden_state, hidden), (out.pooler_output, ours.pool(hidden))]
        return [(out.logits, ours(pixels))]
    seen = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    mask = None if real is None else real.long()
    if kind == "T5ForConditionalGeneration":
        target = ids.roll(1, 0)
        out = theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=target, decoder_attention_mask=mask)
        logits = ours(ids, target, key_mask=real, decoder_key_mask=real)
        return [(out.logits[seen], logits[seen])]
    options = {} if kind.startswith(("T5", "Roberta")) else {"position_ids": positions(real)}
    mine = {}
    if "ert" in kind:  # BERT and RoBERTa
        types = torch.arange(L).expand_as(ids) % theirs.config.type_vocab_size
        options["token_type_ids"] = mine["token_type_ids"] = types
    out = theirs(input_ids=ids, attention_mask=mask, **options)
    hidden = ours(ids, key_mask=real, return_hidden=True, **mine)
    if kind in ("BertModel", "RobertaModel", "T5EncoderModel"):
        pairs = [(out.last_hidden_state[seen], hidden[seen])]
        if ours.pool is not None and seen[:, 0].all():  # they pool the padding of left-padded rows
            pairs.append((out.pooler_output, ours.pool(hidden, real)))
        return pairs
    logits = ours.head(hidden)
    if out.logits.dim() == 2:
        return [(out.logits[seen[:, 0]], logits[seen[:, 0]])]
    return [(out.logits[seen], logits[seen])]


def worst(pairs):
    """The largest difference."""
    assert all(one.shape == two.shape and one.numel() for one, two in pairs)
    return max(float((one - two).abs().max()) for one, two in pairs)
