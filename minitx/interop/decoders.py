"""The tables of the decoders: GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minitx.interop.families import ACTIVATIONS, Architecture, Family, Key, Place, Tensors, Values

# --- GPT-2

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

GATES = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "relu": "reglu",
}
ROPE = "rope_parameters."
SCALINGS = {"default": None, "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# the names of `low` and `high` of a `RotaryScaling`
TURNS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
FULL, SLIDING = "full_attention", "sliding_attention"


# --- rotary positions


def tidy(values: Values, names: Collection[str] = ()) -> Values:
    """Turn the rotary options into flat keys. Transformers 5 has ``rope_parameters``, older versions ``rope_theta`` and ``rope_scaling``."""
    theta, old, new = (values.pop(name, None) for name in ("rope_theta", "rope_scaling", "rope_parameters"))
    old, new = dict(old or {}), dict(new or {})
    if theta is not None:
        old["rope_theta"] = theta
    for rope in (old, new):
        if "type" in rope:  # the name in older files
            rope.setdefault("rope_type", rope.pop("type"))
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise ValueError(f"{ROPE}{name}={new[name]!r} contradicts {old[name]!r} in rope_theta or rope_scaling")
    rope = {"rope_type": "default", "rope_theta": 10000.0, **old, **new}
    kind = rope["rope_type"]
    if kind in TURNS:
        rope.setdefault("original_max_position_embeddings", values.get("max_position_embeddings"))
        rope["low"], rope["high"] = (rope.pop(name, None) for name in TURNS[kind])
    if kind == "yarn":
        paper = 0.1 * math.log(rope.get("factor", 1.0)) + 1.0  # Peng et al. 2023, arXiv:2309.00071, eq. 22
        given = rope.pop("attention_factor", None) or paper
        if not math.isclose(given, paper, rel_tol=1e-9):
            raise ValueError(f"{ROPE}attention_factor={given} is not supported: it must be 0.1 ln(factor) + 1 = {paper}")
    return {**values, **{ROPE + name: value for name, value in rope.items()}}


def untidy(values: Values) -> Values:
    """Write the rotary options in both spellings: an older version of transformers would use a base of 10000 without warning."""
    rope = {name.removeprefix(ROPE): value for name, value in values.items() if name.startswith(ROPE)}
    kind, theta = rope.setdefault("rope_type", "default"), rope.pop("rope_theta")
    low, high = TURNS.get(kind, ("low", "high"))
    rope[low], rope[high] = rope.pop("low"), rope.pop("high")
    scaling = {name: value for name, value in rope.items() if value is not None}
    if kind == "default":
        scaling = {"rope_type": "default"}
    spellings = {
        "rope_parameters": {**scaling, "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else scaling,
    }
    return {**{name: value for name, value in values.items() if not name.startswith(ROPE)}, **spellings}


# --- layers with and without a window


def by_layer(of_kind: Mapping[str, Any], kinds: Sequence[str]) -> Any:
    """Return the value of each layer as a list, or one value if all layers have the same."""
    unknown = sorted(set(kinds) - set(of_kind))
    if unknown:
        raise ValueError(f"layer_types={unknown} is not supported: each must be one of {', '.join(of_kind)}")
    found = [of_kind[kind] for kind in kinds]
    return found[0] if found and found.count(found[0]) == len(found) else found


def layer_kinds(window: Any, num_layers: int) -> list[str]:
    """Return ``layer_types`` for the field ``window`` of our config."""
    windows = window if isinstance(window, list) else [window] * num_layers
    return [FULL if one is None else SLIDING for one in windows]


def largest(window: Any) -> int | None:
    """Return the largest window of the layers, or None if no layer has one."""
    windows = window if isinstance(window, list) else [window]
    return max((one for one in windows if one is not None), default=None)


def tidy_qwen(values: Values, names: Collection[str]) -> Values:
    """Translate the keys of Qwen. With ``use_sliding_window``, the layers from ``max_window_layers`` on have a window."""
    layers, first = values.get("num_hidden_layers", 32), values.pop("max_window_layers", 28)
    given = values.pop("layer_types", None) or [FULL] * min(first, layers) + [SLIDING] * max(layers - first, 0)
    kinds = given if values.pop("use_sliding_window", False) else [FULL] * layers
    window = by_layer({FULL: None, SLIDING: values.get("sliding_window", 4096)}, kinds)
    return tidy({**values, "sliding_window": window})


def untidy_qwen(values: Values) -> Values:
    """Write the keys of Qwen: ``layer_types`` and, for older versions of transformers, ``max_window_layers``."""
    kinds = layer_kinds(values["sliding_window"], values["num_hidden_layers"])
    more = {"layer_types": kinds, "max_window_layers": kinds.count(FULL), "use_sliding_window": SLIDING in kinds}
    return {**untidy(values), **more, "sliding_window": largest(values["sliding_window"])}


# --- Llama, Mistral, Qwen2 and Qwen3

KEYS = (
    Key("vocab_size", "vocab_size", 32000),
    Key("hidden_size", "embed_dim", 4096),
    Key("intermediate_size", "ffn_dim", 11008),
    Key("num_hidden_layers", "num_layers", 32),
    Key("num_attention_heads", "num_heads", 32),
    Key("num_key_value_heads", "num_kv_heads"),
    Key("head_dim", "head_dim"),
    Key("max_position_embeddings", "max_len", 2048),
    Key("rms_norm_eps", "norm_eps", 1e-6),
    Key("tie_word_embeddings", "tie_embeddings", False),
    Key("bos_token_id", "bos_id"),
    Key("eos_token_id", "eos_id"),
    Key("pad_token_id", "pad_id"),
    Key(ROPE + "rope_type", "rotary_scaling", "default", SCALINGS),
    Key(ROPE + "rope_theta", "rotary_base", 10000.0),
    Key(ROPE + "factor", "rotary_factor", 1.0),
    Key(ROPE + "original_max_position_embeddings", "rotary_original_len"),
    Key(ROPE + "low", "rotary_low"),
    Key(ROPE + "high", "rotary_high"),
)
ACTIVATION = Key("hidden_act", "activation", "silu", GATES)
WINDOW = Key("sliding_window", "window", 4096)
BIASES = (Key("attention_bias", "qkv_bias", False), Key("attention_bias", "out_bias", False))
QK_NORM_EPS = Key("rms_norm_eps", "qk_norm_eps", 1e-6)
TENSORS: Tensors = {
    "embeddings.token": "embed_tokens",
    **{f"blocks.*.attention.{one}_proj": f"layers.*.self_attn.{one}_proj" for one in "qkv"},
    "blocks.*.attention.out_proj": "layers.*.self_attn.o_proj",
    **{f"blocks.*.feedforward.{one}_proj": f"layers.*.mlp.{one}_proj" for one in ("gate", "up", "down")},
}
NORMS = {
    "blocks.*.attention_residual.norm": "layers.*.input_layernorm",
    "blocks.*.attention.qk_norm.query_norm": "layers.*.self_attn.q_norm",
    "blocks.*.attention.qk_norm.key_norm": "layers.*.self_attn.k_norm",
    "blocks.*.feedforward_residual.norm": "layers.*.post_attention_layernorm",
    "final_norm": "norm",
}


def llama_family(
    model_type: str, name: str, defaults: Values, keys: Sequence[Key] = (), fields: Values | None = None, **more: Any
) -> Family:
    """Return a family like Llama, with other ``defaults`` of its keys and with additional ``keys`` and ``fields``."""
    shared = tuple(replace(key, default=defaults.get(key.key, key.default)) for key in KEYS)
    return Family(
        model_type=model_type,
        keys=(*shared, *keys),
        fields={"architecture": "decoder", "position": "rotary", "norm": "rms", "bias": False, **(fields or {})},
        required={"partial_rotary_factor": 1.0, ROPE + "partial_rotary_factor": 1.0, ROPE + "truncate": True},
        architectures={name: Architecture({}, {"head": "lm_head"})},
        prefix="model.",
        ignored=("layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"),
        copies={"lm_head.weight": "embed_tokens.weight"},
        **{"tensors": {**TENSORS, **NORMS}, "harmless": ("pretraining_tp",), "tidy": tidy, "untidy": untidy, **more},
    )


LLAMA = llama_family(
    "llama", "LlamaForCausalLM", {"bos_token_id": 1, "eos_token_id": 2}, (ACTIVATION, *BIASES, Key("mlp_bias", "bias", False))
)
MISTRAL = llama_family(
    "mistral",
    "MistralForCausalLM",
    {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    (ACTIVATION, WINDOW),
)
QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}
QWEN2 = llama_family(
    "qwen2",
    "Qwen2ForCausalLM",
    QWEN,
    (ACTIVATION, WINDOW),
    {"qkv_bias": True, "out_bias": False},
    tidy=tidy_qwen,
    untidy=untidy_qwen,
)
QWEN3 = llama_family(
    "qwen3",
    "Qwen3ForCausalLM",
    {**QWEN, "head_dim": 128},
    (ACTIVATION, WINDOW, *BIASES, QK_NORM_EPS),
    {"qk_norm": "rms"},
    tidy=tidy_qwen,
    untidy=untidy_qwen,
)

# --- Gemma 2 and 3

NORMS_HERE = {
    **NORMS,
    "blocks.*.attention_residual.output_norm": "layers.*.post_attention_layernorm",
    "blocks.*.feedforward_residual.norm": "layers.*.pre_feedforward_layernorm",
    "blocks.*.feedforward_residual.output_norm": "layers.*.post_feedforward_layernorm",
}


def _tidy_gemma_layers(values: Values, every: int) -> tuple[Values, list[str]]:
    """Compute the window and the kind of each layer (every ``every``-th has no window), and the score scale."""
    every = values.pop("sliding_window_pattern", None) or every
    layers = values.get("num_hidden_layers", 26)
    kinds = values.pop("layer_types", None) or [SLIDING if i % every else FULL for i in range(1, layers + 1)]
    values["sliding_window"] = by_layer({FULL: None, SLIDING: values.get("sliding_window", 4096)}, kinds)
    scalar = values.get("query_pre_attn_scalar", 256)
    values["query_pre_attn_scalar"] = "inv_sqrt" if scalar == values.get("head_dim", 256) else scalar**-0.5
    return values, kinds


def tidy_gemma2(values: Values, names: Collection[str]) -> Values:
    """Translate the keys of Gemma 2. Every second layer has a window, beginning with the first."""
    return tidy(_tidy_gemma_layers(values, 2)[0])


def tidy_gemma3(values: Values, names: Collection[str]) -> Values:
    """Translate the keys of Gemma 3. Five of six layers have a window, and these have another rotary base."""
    values, kinds = _tidy_gemma_layers(values, 6)
    local = {"rope_type": "default", "rope_theta": values.pop("rope_local_base_freq", 10000.0)}
    rope = values.get("rope_parameters") or {}
    if FULL in rope or SLIDING in rope:
        rope, local = rope.get(FULL) or {}, {**local, **(rope.get(SLIDING) or {})}
    values = tidy({"rope_theta": rope.get("rope_theta", 1e6), **values, "rope_parameters": rope})
    kind = values[ROPE + "rope_type"]
    if SLIDING in kinds and (kind not in ("default", "linear") or local["rope_type"] != "default"):
        raise ValueError(f"{ROPE}rope_type={kind!r} is not supported in a model with windows: only 'default' or 'linear'")
    if kind == "linear":  # in layers without a window only; a factor of 1 changes nothing
        values[ROPE + "factor"] = by_layer({FULL: values[ROPE + "factor"], SLIDING: 1.0}, kinds)
    values[ROPE + "rope_theta"] = by_layer({FULL: values[ROPE + "rope_theta"], SLIDING: local["rope_theta"]}, kinds)
    return values


def untidy_gemma2(values: Values) -> Values:
    """Write the keys of Gemma 2: the kind of each layer, and the score scale as the number under the root."""
    scale, window = values["query_pre_attn_scalar"], values["sliding_window"]
    is_root = isinstance(scale, float) and scale > 1e-6  # `unlike` finds a scale that is not of this form
    scalar = round(scale**-2) if is_root else values["head_dim"]
    kinds = layer_kinds(window, values["num_hidden_layers"])
    return {**untidy(values), "layer_types": kinds, "sliding_window": largest(window), "query_pre_attn_scalar": scalar}


def untidy_gemma3(values: Values) -> Values:
    """Write the keys of Gemma 3: those of Gemma 2, and the rotary bases in the old and the new spelling."""
    values = untidy_gemma2({**values, ROPE + "factor": largest(values.get(ROPE + "factor"))})
    theta, kinds = values["rope_theta"], values["layer_types"]
    of_kind = dict(zip(kinds, theta if isinstance(theta, list) else [theta] * len(kinds), strict=True))
    full, local = of_kind.get(FULL, 1e6), of_kind.get(SLIDING, 10000.0)
    nested = {FULL: {**values["rope_parameters"], "rope_theta": full}, SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {**values, "rope_parameters": nested, "rope_theta": full, "rope_local_base_freq": local}


def _gemma_family(model_type: str, name: str, defaults: Values, keys: Sequence[Key], fields: Values, **more: Any) -> Family:
    sizes = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
    others = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    activation = Key("hidden_activation", "activation", "gelu_pytorch_tanh", GATES)
    return llama_family(
        model_type,
        name,
        {**sizes, **others, **ids, **defaults},
        (activation, WINDOW, *BIASES, Key("query_pre_attn_scalar", "scale"), *keys),
        {"norm_position": "sandwich", "scale_embeddings": True, **fields},
        tensors={**TENSORS, **{ours: Place(theirs, shift=1.0) for ours, theirs in NORMS_HERE.items()}},
        harmless=("hidden_act",),
        **more,
    )


GEMMA2 = _gemma_family(
    "gemma2",
    "Gemma2ForCausalLM",
    {"vocab_size": 256000, "max_position_embeddings": 8192},
    (Key("attn_logit_softcapping", "softcap", 50.0), Key("final_logit_softcapping", "logit_softcap", 30.0)),
    {},
    tidy=tidy_gemma2,
    untidy=untidy_gemma2,
)
GEMMA3 = _gemma_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    {"vocab_size": 262208, "max_position_embeddings": 131072},
    (Key("final_logit_softcapping", "logit_softcap"), QK_NORM_EPS),
    {"qk_norm": "rms"},
    tidy=tidy_gemma3,
    untidy=untidy_gemma3,
)
