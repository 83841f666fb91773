"""Llama's shape and those of its kin: Mistral has a window, Qwen2 biases on q, k, v, Qwen3 norms on q and k."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from minitx.interop.table import Architecture, Family, Key, Values

GATES = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}  # fmt: skip
ROPE = "rope_parameters."
SCALINGS = {"default": None, "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
# what a kind of scaling calls the turns below which a pair of channels is stretched and above which it is kept
TURNS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}


def tidy(values: Values, names: Collection[str]) -> Values:
    """``rope_parameters`` flat, whether written so (transformers 5) or as ``rope_theta`` and ``rope_scaling``."""
    theta, old, new = (values.pop(name, None) for name in ("rope_theta", "rope_scaling", "rope_parameters"))
    old, new = dict(old or {}), dict(new or {})
    for rope in (old, new):  # as older files call it
        if "type" in rope and rope.setdefault("rope_type", rope["type"]) == rope["type"]:
            rope.pop("type")
    old.update({} if theta is None else {"rope_theta": theta})
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            raise ValueError(f"{ROPE}{name}={new[name]!r} contradicts the {old[name]!r} of the older spelling beside it")
    rope = {"rope_type": "default", "rope_theta": 10000.0, **old, **new}
    kind = rope["rope_type"]
    if kind in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", values.get("max_position_embeddings"))
    for name, plain in zip(("low", "high"), TURNS.get(kind, ()), strict=False):
        rope[name] = rope.pop(plain, None)
    if kind == "yarn":
        _check_temperature(rope)
    for name, off in (("partial_rotary_factor", 1.0), ("truncate", True)):
        for place in (rope, values):
            if place.get(name) == off:
                place.pop(name)
    return {**values, **{ROPE + name: value for name, value in rope.items()}}


def _check_temperature(rope: Values) -> None:
    """Refuse a temperature of YaRN other than the paper's, 0.1 ln(factor) + 1."""
    given, top, bottom = (rope.pop(name, None) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if not isinstance(rope.get("factor"), int | float):
        raise ValueError(f"{ROPE}factor={rope.get('factor')!r} must be a number with {ROPE}rope_type='yarn'")
    paper = 0.1 * math.log(rope["factor"]) + 1.0
    if given is None and top and bottom:
        given = (0.1 * top * math.log(rope["factor"]) + 1.0) / (0.1 * bottom * math.log(rope["factor"]) + 1.0)
    if given is not None and not math.isclose(given, paper, rel_tol=1e-9):
        raise ValueError(f"{ROPE}attention_factor={given} cannot be honoured: it must be 0.1 ln(factor) + 1 = {paper}")


def untidy(values: Values) -> Values:
    """Nested again, in both spellings: an older reader would take 10000 for a missing base in silence."""
    rope = {name.removeprefix(ROPE): value for name, value in values.items() if name.startswith(ROPE)}
    rope.setdefault("rope_type", "default")
    low, high = TURNS.get(rope["rope_type"], ("low", "high"))
    rope[low], rope[high] = rope.pop("low"), rope.pop("high")
    scaling = {name: value for name, value in rope.items() if value is not None and name != "rope_theta"}
    if rope["rope_type"] == "default":
        scaling = {"rope_type": "default"}
    spellings = {
        "rope_parameters": {**scaling, "rope_theta": rope["rope_theta"]},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
    }
    return {**{name: value for name, value in values.items() if not name.startswith(ROPE)}, **spellings}


def tidy_qwen(values: Values, names: Collection[str]) -> Values:
    """A window counts with ``use_sliding_window`` only, from layer ``max_window_layers`` on."""
    values, layers = tidy(values, names), values.get("num_hidden_layers", 32)
    first = values.pop("max_window_layers", 28)
    if not values.get("use_sliding_window", False):
        values["sliding_window"], first = None, layers
    if not values.get("layer_types"):
        values["layer_types"] = ["full_attention"] * min(first, layers) + ["sliding_attention"] * max(layers - first, 0)
    if "sliding_attention" not in values["layer_types"]:
        values["sliding_window"], values["use_sliding_window"] = None, False
    return values


def untidy_qwen(values: Values) -> Values:
    """Our values as Qwen2's config states them, which says for each layer whether it has a window."""
    return {**untidy(values), "max_window_layers": values["num_hidden_layers"] if values["sliding_window"] is None else 0}


QWEN_LAYERS: Values = {
    "use_sliding_window": lambda fields: fields["window"] is not None,
    "layer_types": lambda fields: [f"{'full' if fields['window'] is None else 'sliding'}_attention"] * fields["num_layers"],
}
WINDOW = Key("sliding_window", "window", 4096)
BIASES = Key("attention_bias", ("qkv_bias", "out_bias"), False)


def _family(model_type: str, name: str, keys: tuple[Key, ...], fields: Values, **more: Any) -> Family:
    sizes: dict[str, Any] = {"llama": (32000, None, 2048), "mistral": (32000, 8, 131072)}
    vocab_size, num_kv_heads, max_len = sizes.get(model_type, (151936, 32, 32768))
    bos_id, eos_id = (1, 2) if model_type in sizes else (None, None)
    constants = {"attention_dropout": 0.0, **more.pop("constants", {})}
    return Family(
        model_type=model_type,
        keys=(
            Key("vocab_size", "vocab_size", vocab_size),
            Key("hidden_size", "embed_dim", 4096),
            Key("intermediate_size", "ffn_dim", {"llama": 11008, "mistral": 14336}.get(model_type, 22016)),
            Key("num_hidden_layers", "num_layers", 32),
            Key("num_attention_heads", "num_heads", 32),
            Key("num_key_value_heads", "num_kv_heads", lambda v: _given(v, "num_key_value_heads", num_kv_heads)),
            Key("head_dim", "head_dim", lambda v: _head_dim(v, 128 if model_type == "qwen3" else None)),
            Key("hidden_act", "activation", "silu", GATES),
            Key("max_position_embeddings", "max_len", max_len),
            Key("rms_norm_eps", ("norm_eps", "qk_norm_eps") if model_type == "qwen3" else "norm_eps", 1e-6),
            Key("tie_word_embeddings", "tie_embeddings", False),
            Key("bos_token_id", "bos_id", bos_id),
            Key("eos_token_id", "eos_id", eos_id),
            Key("pad_token_id", "pad_id"),
            Key(ROPE + "rope_type", "rotary_scaling", "default", SCALINGS),
            Key(ROPE + "rope_theta", "rotary_base", 10000.0),
            Key(ROPE + "factor", "rotary_factor", 1.0),
            Key(ROPE + "original_max_position_embeddings", "rotary_original_len"),
            Key(ROPE + "low", "rotary_low"),
            Key(ROPE + "high", "rotary_high"),
            *keys,
        ),
        fields={"architecture": "decoder", "position": "rotary", "norm": "rms", "bias": False, **fields},
        constants=constants,
        architectures={name: Architecture({}, {"head": "lm_head"})},
        prefix="model.",
        tensors={
            "embeddings.token": "embed_tokens",
            "blocks.*.attention_residual.norm": "layers.*.input_layernorm",
            **{f"blocks.*.attention.{one}_proj": f"layers.*.self_attn.{one}_proj" for one in "qkv"},
            "blocks.*.attention.out_proj": "layers.*.self_attn.o_proj",
            "blocks.*.attention.qk_norm.query_norm": "layers.*.self_attn.q_norm",
            "blocks.*.attention.qk_norm.key_norm": "layers.*.self_attn.k_norm",
            "blocks.*.feedforward_residual.norm": "layers.*.post_attention_layernorm",
            **{f"blocks.*.feedforward.{one}_proj": f"layers.*.mlp.{one}_proj" for one in ("gate", "up", "down")},
            "final_norm": "norm",
        },
        harmless=("pretraining_tp",),
        ignored=("layers.*.self_attn.rotary_emb.inv_freq", "rotary_emb.inv_freq"),
        copies={"lm_head.weight": "embed_tokens.weight"},
        **{"tidy": tidy, "untidy": untidy, **more},
    )


def _given(values: Any, name: str, default: int | None) -> Any:
    """An absent key is the default; ``null`` is the number of heads."""
    return values.get("num_attention_heads", 32) if name in values or default is None else default


def _head_dim(values: Any, default: int | None) -> int:
    if default is not None and "head_dim" not in values:
        return default
    return values.get("hidden_size", 4096) // values.get("num_attention_heads", 32)


LLAMA = _family("llama", "LlamaForCausalLM", (BIASES, Key("mlp_bias", "bias", False)), {})
MISTRAL = _family("mistral", "MistralForCausalLM", (WINDOW,), {})
qwen: dict[str, Any] = {"constants": QWEN_LAYERS, "tidy": tidy_qwen, "untidy": untidy_qwen}
QWEN2 = _family("qwen2", "Qwen2ForCausalLM", (WINDOW,), {"qkv_bias": True, "out_bias": False}, **qwen)
QWEN3 = _family("qwen3", "Qwen3ForCausalLM", (WINDOW, BIASES), {"qk_norm": "rms"}, **qwen)
