"""The tables of the decoders: GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 2 and Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from minitx.interop.config_json import SIZES, TEXT, WORDS_OF_ACTIVATION, UnsupportedError
from minitx.interop.family import Architecture, ConfigTable, Family, TensorTable, Values

# --- GPT-2 (Radford et al. 2019): its matrices have shape (in, out), and one matrix holds q, k and v (``Conv1D``)

GPT2 = Family(
    model_type="gpt2",
    architectures={
        "GPT2LMHeadModel": Architecture({}, {"head": "lm_head"}),
        "GPT2Model": Architecture({}, {"head": "lm_head"}, is_base=True),
    },
    config=ConfigTable(
        keys={
            **TEXT,
            "max_len": "n_positions",
            "embed_dim": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "ffn_dim": "n_inner",
            "activation": "activation_function",
            "dropout": "resid_pdrop",
            "norm_eps": "layer_norm_epsilon",
            "scale": "scale_attn_weights",
        },
        defaults={
            **{"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "resid_pdrop": 0.1},
            **{"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True},
            **{"tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256},
        },
        words={
            "activation_function": {"gelu_new": "gelu_tanh", **WORDS_OF_ACTIVATION},
            "scale_attn_weights": {True: "inv_sqrt", False: "unscaled"},
        },
        fields={"architecture": "decoder"},
        untidy=lambda values: {**values, "embd_pdrop": values["resid_pdrop"], "attn_pdrop": values["resid_pdrop"]},
    ),
    tensors=TensorTable(
        names={
            "embeddings.token": "wte",
            "embeddings.position.table": "wpe",
            "blocks.*.attention_residual.norm": "h.*.ln_1",
            **{f"blocks.*.attention.{x}_proj": "h.*.attn.c_attn" for x in "qkv"},
            "blocks.*.attention.out_proj": "h.*.attn.c_proj",
            "blocks.*.feedforward_residual.norm": "h.*.ln_2",
            "blocks.*.feedforward.up_proj": "h.*.mlp.c_fc",
            "blocks.*.feedforward.down_proj": "h.*.mlp.c_proj",
            "final_norm": "ln_f",
        },
        prefix="transformer.",
        ignored=("h.*.attn.bias", "h.*.attn.masked_bias"),
        copies={"lm_head.weight": "wte.weight"},
        is_transposed=True,
    ),
)

# --- rotary positions

ROPE = "rope_parameters."
# the keys of ``config.json`` with rotary options
SPELLINGS = ("rope_theta", "rope_scaling", "rope_parameters")
# the names of `low` and `high` of a `RotaryScaling`
TURNS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
ORIGINAL_LEN = "original_max_position_embeddings"
# what transformers cannot compute without; it ignores these options in other kinds
NEEDED: dict[Any, tuple[str, ...]] = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", ORIGINAL_LEN, *TURNS["llama3"]),
    "yarn": ("rope_theta", "factor", ORIGINAL_LEN),
}


def tidy_rope(values: Values, names: Collection[str] = ()) -> tuple[Values, list[str]]:
    """Turn the rotary options into flat keys. Transformers 5 has ``rope_parameters``, older versions ``rope_theta`` and ``rope_scaling``.

    An option that is absent or null gets the value that transformers computes. Where it computes none, this is an error.
    """
    rope = _joined_rope(values)
    rest = {name: value for name, value in values.items() if name not in SPELLINGS and not name.startswith(ROPE)}
    kind = rope["rope_type"]
    if kind not in NEEDED:
        return {**rest, ROPE + "rope_type": kind}, []
    inner = rope.get(ORIGINAL_LEN, values.get("max_position_embeddings"))
    outer = rest.pop(ORIGINAL_LEN, inner)  # outside of the rotary options it has priority
    rope[ORIGINAL_LEN] = inner and outer
    if kind == "yarn":
        if rope.get("factor", 1.0) is None and rope[ORIGINAL_LEN] is not None:
            rope["factor"] = values["max_position_embeddings"] / rope[ORIGINAL_LEN]
        rope["truncate"] = bool(rope.get("truncate", True))
    for name in NEEDED[kind]:
        if rope.get(name) is None:
            raise ValueError(f"{ROPE}{name}=None must be a number with {ROPE}rope_type={kind!r}")
    options, unsupported = _renamed_rope(rope)
    return {**rest, **{ROPE + name: value for name, value in options.items()}}, unsupported


def _joined_rope(values: Values) -> Values:
    """Return the rotary options of all spellings. Raise an error if they contradict each other."""
    theta = {"rope_theta": values["rope_theta"]} if "rope_theta" in values else {}
    ropes = [{**theta, **rope} for name in SPELLINGS[1:] if (rope := dict(values.get(name) or {}))]
    for rope in ropes:
        if "type" in rope:  # the name in older files
            rope.setdefault("rope_type", rope.pop("type"))
    first, *others = [*ropes, theta]
    pairs = [pair for other in others for pair in other.items()]
    faults = [f"{ROPE}{name}={value!r} contradicts {first.get(name)!r}" for name, value in pairs if first.get(name) != value]
    if faults:
        raise ValueError(f"{'; '.join(faults)} in rope_theta, rope_scaling or rope_parameters")
    overrides = {name.removeprefix(ROPE): value for name, value in values.items() if name.startswith(ROPE)}
    return {"rope_type": "default", "rope_theta": 10000.0, **first, **overrides}


def _renamed_rope(rope: Values) -> tuple[Values, list[str]]:
    """Return the options that this kind reads, with ``low`` and ``high`` of ``RotaryScaling``, and unsupported options."""
    kind = rope["rope_type"]
    unread = {"factor", ORIGINAL_LEN} - {*NEEDED[kind]}
    options = {"factor": 1.0} | {name: value for name, value in rope.items() if value is not None and name not in unread}
    if kind in TURNS:
        options["low"], options["high"] = (options.pop(name, None) or None for name in TURNS[kind])
    if kind != "yarn":
        return options, []
    paper = 0.1 * math.log(max(options["factor"], 1.0)) + 1.0  # Peng et al. 2023, arXiv:2309.00071, eq. 22
    factor = options.pop("attention_factor", paper)
    if math.isclose(factor, paper, rel_tol=1e-9):
        return options, []
    return options, [f"{ROPE}attention_factor={factor} is not supported here, only 0.1 ln(factor) + 1 = {paper}"]


def untidy_rope(values: Values) -> Values:
    """Write the rotary options in both spellings: an older version of transformers would use a base of 10000 without warning."""
    rope = {name.removeprefix(ROPE): value for name, value in values.items() if name.startswith(ROPE)}
    kind, theta = rope.setdefault("rope_type", "default"), rope.pop("rope_theta")
    low, high = TURNS.get(kind, ("low", "high"))
    rope[low], rope[high] = rope.pop("low"), rope.pop("high")
    scaling = {name: value for name, value in rope.items() if value is not None}
    if kind == "default":
        scaling = {"rope_type": "default"}
    rest = {name: value for name, value in values.items() if not name.startswith(ROPE)}
    both = {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}
    return {**rest, "rope_parameters": {**scaling, "rope_theta": theta}, **both}


# --- layers with and without a window

FULL, SLIDING = "full_attention", "sliding_attention"


def by_layer(of_kind: Mapping[str, Any], kinds: Sequence[str]) -> Any:
    """Return the value of each layer as a list, or a single value if all layers have the same."""
    unknown = sorted(set(kinds) - set(of_kind))
    if unknown:
        raise UnsupportedError(f"layer_types={unknown} is not supported here, only {', '.join(of_kind)}")
    values = [of_kind[kind] for kind in kinds]
    return values[0] if values and values.count(values[0]) == len(values) else values


def untidy_layers(values: Values) -> Values:
    """Write the windows of the layers as ``layer_types`` and the largest ``sliding_window``."""
    windows = values["sliding_window"]
    windows = windows if isinstance(windows, list) else [windows] * values["num_hidden_layers"]
    kinds = [FULL if window is None else SLIDING for window in windows]
    largest = max((window for window in windows if window is not None), default=None)
    return {**untidy_rope(values), "layer_types": kinds, "sliding_window": largest}


# --- Llama (Touvron et al. 2023, arXiv:2302.13971)

LLAMA_KEYS = {
    **SIZES,
    **TEXT,
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "rotary_scaling": ROPE + "rope_type",
    "rotary_base": ROPE + "rope_theta",
    "rotary_factor": ROPE + "factor",
    "rotary_original_len": ROPE + "original_max_position_embeddings",
    "rotary_low": ROPE + "low",
    "rotary_high": ROPE + "high",
}
LLAMA_DEFAULTS = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6},
    **{"tie_word_embeddings": False, "sliding_window": 4096, "attention_bias": False, "mlp_bias": False},
}
GATES = {
    **{"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh"},
    "relu": "reglu",
}
LLAMA_WORDS: dict[str, Mapping[Any, Any]] = {
    "hidden_act": GATES,
    "hidden_activation": GATES,
    ROPE + "rope_type": {"default": None, "linear": "linear", "llama3": "llama3", "yarn": "yarn"},
}
WINDOW = {"window": "sliding_window"}
BIASES = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
LLAMA_NAMES = {
    "embeddings.token": "embed_tokens",
    "blocks.*.attention_residual.norm": "layers.*.input_layernorm",
    **{f"blocks.*.attention.{x}_proj": f"layers.*.self_attn.{x}_proj" for x in "qkv"},
    "blocks.*.attention.qk_norm.query_norm": "layers.*.self_attn.q_norm",
    "blocks.*.attention.qk_norm.key_norm": "layers.*.self_attn.k_norm",
    "blocks.*.attention.out_proj": "layers.*.self_attn.o_proj",
    "blocks.*.feedforward_residual.norm": "layers.*.post_attention_layernorm",
    "blocks.*.feedforward.gate_proj": "layers.*.mlp.gate_proj",
    "blocks.*.feedforward.up_proj": "layers.*.mlp.up_proj",
    "blocks.*.feedforward.down_proj": "layers.*.mlp.down_proj",
    "final_norm": "norm",
}
LLAMA_TENSORS = TensorTable(
    names=LLAMA_NAMES,
    prefix="model.",
    ignored=("layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"),
    copies={"lm_head.weight": "embed_tokens.weight"},
)


def llama_family(
    model_type: str,
    name: str,
    keys: Mapping[str, str],
    defaults: Values,
    fields: Values | None = None,
    tensors: TensorTable = LLAMA_TENSORS,
    **more: Any,
) -> Family:
    """Return a family like Llama, with further ``keys`` and ``fields``, other ``defaults``, and ``more`` of its ``ConfigTable``."""
    return Family(
        model_type=model_type,
        architectures={name: Architecture({}, {"head": "lm_head"})},
        config=ConfigTable(
            keys={**LLAMA_KEYS, **keys},
            defaults={**LLAMA_DEFAULTS, **defaults},
            words=LLAMA_WORDS,
            fields={"architecture": "decoder", "position": "rotary", "norm": "rms", "bias": False, **(fields or {})},
            required={"partial_rotary_factor": 1.0, ROPE + "partial_rotary_factor": 1.0, ROPE + "truncate": True},
            **{"tidy": tidy_rope, "untidy": untidy_rope, **more},
        ),
        tensors=tensors,
    )


LLAMA_IDS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA = llama_family("llama", "LlamaForCausalLM", {**BIASES, "bias": "mlp_bias"}, LLAMA_IDS, needs_whole_heads=True)

# --- Mistral (Jiang et al. 2023, arXiv:2310.06825): all layers have a window

MISTRAL_DEFAULTS = {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, **LLAMA_IDS}
MISTRAL = llama_family("mistral", "MistralForCausalLM", WINDOW, MISTRAL_DEFAULTS)

# --- Qwen2 and Qwen3 (Yang et al. 2024, arXiv:2407.10671, and 2025, arXiv:2505.09388): biases or norms on q and k


def tidy_qwen(values: Values, names: Collection[str]) -> tuple[Values, list[str]]:
    """Translate the keys of Qwen. With ``use_sliding_window``, the layers from ``max_window_layers`` on have a window."""
    values = dict(values)
    layers, first = values.get("num_hidden_layers", 32), values.pop("max_window_layers", 28)
    listed = values.pop("layer_types", None) or [FULL] * min(first, layers) + [SLIDING] * max(layers - first, 0)
    kinds = listed if values.pop("use_sliding_window", False) else [FULL] * layers
    window = by_layer({FULL: None, SLIDING: values.get("sliding_window", 4096)}, kinds)
    return tidy_rope({**values, "sliding_window": window})


def untidy_qwen(values: Values) -> Values:
    """Write the keys of Qwen: ``layer_types`` and, for older versions of transformers, ``max_window_layers``."""
    values = untidy_layers(values)
    kinds = values["layer_types"]
    return {**values, "max_window_layers": kinds.count(FULL), "use_sliding_window": SLIDING in kinds}


QWEN: Values = {"tidy": tidy_qwen, "untidy": untidy_qwen}
QWEN_DEFAULTS = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}
QWEN2 = llama_family("qwen2", "Qwen2ForCausalLM", WINDOW, QWEN_DEFAULTS, {"qkv_bias": True, "out_bias": False}, **QWEN)
QWEN3 = llama_family(
    "qwen3",
    "Qwen3ForCausalLM",
    {**WINDOW, **BIASES, "qk_norm_eps": "rms_norm_eps"},
    {**QWEN_DEFAULTS, "head_dim": 128},
    {"qk_norm": "rms"},
    **QWEN,
)

# --- Gemma 2 and 3 (Gemma Team 2024, arXiv:2408.00118, and 2025, arXiv:2503.19786): there are norms before and after each sublayer,
# norms multiply by 1 + weight, embeddings are multiplied by √E, the config gives the score scale, and some layers have a window. Gemma
# 2 soft-caps scores and logits. Gemma 3 has norms on q and k, and another rotary base in layers with a window.

GEMMA_NORMS = {
    "blocks.*.attention_residual.output_norm": "layers.*.post_attention_layernorm",
    "blocks.*.feedforward_residual.norm": "layers.*.pre_feedforward_layernorm",
    "blocks.*.feedforward_residual.output_norm": "layers.*.post_feedforward_layernorm",
}


def _tidy_gemma(values: Values, every: int) -> tuple[Values, list[str]]:
    """Compute the window and the kind of each layer (every ``every``-th has no window), and the score scale."""
    values = dict(values)
    every = values.pop("sliding_window_pattern", None) or every
    layers = values.get("num_hidden_layers", 26)
    kinds = values.pop("layer_types", None) or [SLIDING if i % every else FULL for i in range(1, layers + 1)]
    values["sliding_window"] = by_layer({FULL: None, SLIDING: values.get("sliding_window", 4096)}, kinds)
    scalar = values.get("query_pre_attn_scalar", 256)
    values["query_pre_attn_scalar"] = "inv_sqrt" if scalar == values.get("head_dim", 256) else scalar**-0.5
    return values, kinds


def tidy_gemma2(values: Values, names: Collection[str]) -> tuple[Values, list[str]]:
    """Translate the keys of Gemma 2. Every second layer has a window, beginning with the first."""
    return tidy_rope(_tidy_gemma(values, 2)[0])


def tidy_gemma3(values: Values, names: Collection[str]) -> tuple[Values, list[str]]:
    """Translate the keys of Gemma 3. Five of six layers have a window, and a different rotary base."""
    values, kinds = _tidy_gemma(values, 6)
    outer = {"rope_theta": values.pop("rope_local_base_freq")} if "rope_local_base_freq" in values else {}
    rope = values.get("rope_parameters") or {}
    if flat := sorted({*rope} - {FULL, SLIDING}):
        raise UnsupportedError(f"{ROPE}{flat[0]} is not supported here, only options inside {FULL} and {SLIDING}")
    rope, sliding_rope = rope.get(FULL) or {}, rope.get(SLIDING)
    local, _ = tidy_rope({**outer, "rope_parameters": sliding_rope})
    values, unsupported = tidy_rope({"rope_theta": rope.get("rope_theta", 1e6), **values, "rope_parameters": rope})
    kind = values[ROPE + "rope_type"]
    plain = {ROPE + "rope_type": "default", ROPE + "rope_theta": local.get(ROPE + "rope_theta"), ROPE + "factor": 1.0}
    if SLIDING in kinds and (kind not in ("default", "linear") or local != plain):
        differing = ", ".join(
            f"{name.removeprefix(ROPE)}={value!r}" for name, value in local.items() if plain.get(name) != value
        )
        pair = f"{ROPE}rope_type={kind!r} with {differing or 'default'} in layers with a window"
        unsupported = [f"{pair} is not supported here, only 'default' or 'linear' with 'default'"]
    if kind == "linear":  # in layers without a window only; a factor of 1 changes nothing
        values[ROPE + "factor"] = by_layer({FULL: values[ROPE + "factor"], SLIDING: 1.0}, kinds)
    values[ROPE + "rope_theta"] = by_layer({FULL: values[ROPE + "rope_theta"], SLIDING: plain[ROPE + "rope_theta"]}, kinds)
    return values, unsupported


def untidy_gemma2(values: Values) -> Values:
    """Write the keys of Gemma 2: the kind of each layer, and the score scale as the number under the root."""
    scale = values["query_pre_attn_scalar"]
    is_root = isinstance(scale, float) and scale > 1e-6  # `unlike` finds a scale that does not have this form
    written = {**untidy_layers(values), "query_pre_attn_scalar": round(scale**-2) if is_root else values["head_dim"]}
    return written | {"sliding_window": written["sliding_window"] or 4096}  # transformers always needs a number


def untidy_gemma3(values: Values) -> Values:
    """Write the keys of Gemma 3: the keys of Gemma 2, and the rotary bases in the old and the new spelling."""
    factor = values.get(ROPE + "factor")
    values = untidy_gemma2({**values, ROPE + "factor": max(factor) if isinstance(factor, list) else factor})
    theta, kinds = values["rope_theta"], values["layer_types"]
    of_kind = dict(zip(kinds, theta if isinstance(theta, list) else [theta] * len(kinds), strict=True))
    full, local = of_kind.get(FULL, 1e6), of_kind.get(SLIDING, 10000.0)
    nested = {FULL: {**values["rope_parameters"], "rope_theta": full}, SLIDING: {"rope_type": "default", "rope_theta": local}}
    return {**values, "rope_parameters": nested, "rope_theta": full, "rope_local_base_freq": local}


def _gemma_family(model_type: str, name: str, keys: Mapping[str, str], defaults: Values, **more: Any) -> Family:
    shared = {"activation": "hidden_activation", "scale": "query_pre_attn_scalar", "logit_softcap": "final_logit_softcapping"}
    sizes = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}
    others = {"num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    fields = {"norm_position": "sandwich", "scale_embeddings": True, **more.pop("fields", {})}
    return llama_family(
        model_type,
        name,
        {**shared, **WINDOW, **BIASES, **keys},
        {**sizes, **others, **ids, **defaults},
        fields,
        replace(LLAMA_TENSORS, names={**LLAMA_NAMES, **GEMMA_NORMS}, norm_shift=1.0),
        needs_whole_heads=True,
        **more,
    )


CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2 = _gemma_family(
    "gemma2",
    "Gemma2ForCausalLM",
    {"softcap": "attn_logit_softcapping"},
    {"vocab_size": 256000, "max_position_embeddings": 8192, **CAPS},
    tidy=tidy_gemma2,
    untidy=untidy_gemma2,
)
GEMMA3 = _gemma_family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    {"qk_norm_eps": "rms_norm_eps"},
    {"vocab_size": 262208, "max_position_embeddings": 131072},
    fields={"qk_norm": "rms"},
    tidy=tidy_gemma3,
    untidy=untidy_gemma3,
)

DECODERS = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3)
"""The families, in the order that ``save_hf`` tries them."""
