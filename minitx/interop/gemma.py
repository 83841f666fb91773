"""Gemma 2 and 3 (Gemma Team 2024, arXiv:2408.00118, and 2025, arXiv:2503.19786).

They differ from Llama in this: norms stand before and after each sublayer and multiply by 1 + weight, embeddings are multiplied by
√E, the config gives the score scale, and some layers have a window. Gemma 2 soft-caps scores and logits. Gemma 3 has norms on q and
k, and another rotary base in layers with a window.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from minitx.interop.llama import (
    BIASES,
    FULL,
    GATES,
    NORMS,
    QK_NORM_EPS,
    ROPE,
    SLIDING,
    TENSORS,
    WINDOW,
    by_layer,
    largest,
    layer_kinds,
    llama_family,
    tidy,
    untidy,
)
from minitx.interop.table import Family, Key, Place, Values

NORMS_HERE = {
    **NORMS,
    "blocks.*.attention_residual.output_norm": "layers.*.post_attention_layernorm",
    "blocks.*.feedforward_residual.norm": "layers.*.pre_feedforward_layernorm",
    "blocks.*.feedforward_residual.output_norm": "layers.*.post_feedforward_layernorm",
}


def _tidy_layers(values: Values, every: int) -> tuple[Values, list[str]]:
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
    return tidy(_tidy_layers(values, 2)[0])


def tidy_gemma3(values: Values, names: Collection[str]) -> Values:
    """Translate the keys of Gemma 3. Five of six layers have a window, and these have another rotary base."""
    values, kinds = _tidy_layers(values, 6)
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


def _family(model_type: str, name: str, defaults: Values, keys: Sequence[Key], fields: Values, **more: Any) -> Family:
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


GEMMA2 = _family(
    "gemma2",
    "Gemma2ForCausalLM",
    {"vocab_size": 256000, "max_position_embeddings": 8192},
    (Key("attn_logit_softcapping", "softcap", 50.0), Key("final_logit_softcapping", "logit_softcap", 30.0)),
    {},
    tidy=tidy_gemma2,
    untidy=untidy_gemma2,
)
GEMMA3 = _family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    {"vocab_size": 262208, "max_position_embeddings": 131072},
    (Key("final_logit_softcapping", "logit_softcap"), QK_NORM_EPS),
    {"qk_norm": "rms"},
    tidy=tidy_gemma3,
    untidy=untidy_gemma3,
)
