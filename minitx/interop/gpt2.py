"""GPT-2 (Radford et al. 2019). Its matrices have shape (in, out), and one matrix holds q, k and v (``Conv1D``)."""

from __future__ import annotations

from minitx.interop.table import ACTIVATIONS, Architecture, Family, Key, Place

GPT2 = Family(
    model_type="gpt2",
    keys=(
        Key("vocab_size", "vocab_size", 50257),
        Key("n_positions", "max_len", 1024),
        Key("n_embd", "embed_dim", 768),
        Key("n_layer", "num_layers", 12),
        Key("n_head", "num_heads", 12),
        Key("n_inner", "ffn_dim"),
        Key("activation_function", "activation", "gelu_new", {"gelu_new": "gelu_tanh", **ACTIVATIONS}),
        *(Key(name, "dropout", 0.1) for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")),
        Key("layer_norm_epsilon", "norm_eps", 1e-5),
        Key("scale_attn_weights", "scale", True, {True: "inv_sqrt", False: "unscaled"}),
        Key("tie_word_embeddings", "tie_embeddings", True),
        Key("bos_token_id", "bos_id", 50256),
        Key("eos_token_id", "eos_id", 50256),
        Key("pad_token_id", "pad_id"),
    ),
    fields={"architecture": "decoder"},
    architectures={
        "GPT2LMHeadModel": Architecture({}, {"head": "lm_head"}),
        "GPT2Model": Architecture({}, {"head": "lm_head"}, is_base=True),
    },
    prefix="transformer.",
    tensors={
        "embeddings.token": "wte",
        "embeddings.position.table": "wpe",
        "blocks.*.attention_residual.norm": "h.*.ln_1",
        **{f"blocks.*.attention.{'qkv'[i]}_proj": Place("h.*.attn.c_attn", True, (i, 3)) for i in range(3)},
        "blocks.*.attention.out_proj": Place("h.*.attn.c_proj", True),
        "blocks.*.feedforward_residual.norm": "h.*.ln_2",
        "blocks.*.feedforward.up_proj": Place("h.*.mlp.c_fc", True),
        "blocks.*.feedforward.down_proj": Place("h.*.mlp.c_proj", True),
        "final_norm": "ln_f",
    },
    harmless=("n_ctx", "n_special", "predict_special_tokens"),
    ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),
    copies={"lm_head.weight": "wte.weight"},
)
