"""Adopt a small random model of every family that transformers has and the table does not: python tests/tools/other_families.py [NAMES]

Writes the list of docs/weights.md below the table: adopted and checked, refused with what, not checked. Each answer is held against
one of its own: logits of longer rows with padding on either side, before and after, without the check. Where no small config can be
made up, the family is left out.
"""

from __future__ import annotations

import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

sys.path.insert(0, str(Path(__file__).parents[2]))

from minitx.check.properties import compare, rounding
from minitx.interop import adopt_hf, release_hf
from minitx.interop.trial import answer, settled

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"
FOUND = re.compile(r"(?<=<!-- other families -->\n)(.*?)(?=<!-- end of other families -->)", re.DOTALL)
HEADS = (
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)
LARGEST, SECONDS = 20_000_000, 60
"""No model has more parameters, and no family takes longer."""

COUNTS = {
    2: "num_key_value_heads num_experts_per_tok moe_topk top_k_experts num_key_value_heads_swa n_kv_heads decoder_layers encoder_layers "
    "moe_k index_n_heads linear_num_key_heads num_global_key_value_heads index_topk num_kv_heads kv_n_heads mamba_d_conv mamba_expand",
    4: "num_hidden_layers num_attention_heads n_layer n_head n_layers n_heads num_layers num_heads num_experts num_local_experts "
    "n_routed_experts attention_heads encoder_attention_heads decoder_attention_heads mamba_chunk_size mamba_n_heads "
    "linear_num_value_heads num_attention_heads_swa depth num_decoder_layers moe_num_experts",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim d_kv index_head_dim mamba_d_state mamba_d_head state_size "
    "linear_key_head_dim linear_value_head_dim sliding_window local_attention global_head_dim swa_head_dim rotary_dim num_buckets",
    16: "q_lora_rank kv_lora_rank moe_intermediate_size o_lora_rank image_size expert_hidden_dim",
    32: "hidden_size n_embd d_model dim embed_dim embedding_size emb_dim emb_size word_embed_proj_dim hidden_dim_size out_hidden_size "
    "projection_dim vision_output_dim hidden_size_per_layer_input",
    48: "intermediate_size n_inner ffn_dim d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim shared_expert_intermediate_size mlp_dim "
    "ffn_hidden_size shared_intermediate_size ffn_hidden_dim",
    64: "max_position_embeddings n_positions",
    99: "vocab_size vocab_size_per_layer_input",
    0: "pad_token_id",
    1: "bos_token_id n_shared_experts first_k_dense_replace n_group topk_group mamba_n_groups num_shared_experts num_nextn_predict_layers",
}
DROPOUTS = (
    "attention_dropout hidden_dropout_prob attention_probs_dropout_prob dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop "
    "activation_dropout"
)
SMALL = {name: size for size, names in COUNTS.items() for name in names.split()} | {"eos_token_id": 2, "patch_size": 4}
SMALL |= dict.fromkeys(DROPOUTS.split(), 0.0)


def small_config(kind: type) -> Any:
    """A config of this class with small sizes, also in its parts."""

    def options(default: Any) -> dict[str, Any]:
        aliases = getattr(type(default), "attribute_map", {})
        names = {*default.to_dict(), *aliases}
        found = {name: size for name, size in SMALL.items() if name in names and aliases.get(name) not in SMALL}
        if "kv_lora_rank" in names:  # whose keys all heads share
            found["num_key_value_heads"] = SMALL["num_attention_heads"]
        for part in getattr(default, "sub_configs", {}):
            if (value := getattr(default, part, None)) is not None:
                found[part] = {**options(value), "model_type": value.model_type}
        return found

    return kind(**options(kind()))


def family(model_type: str) -> tuple[type, Any]:
    """The class of a model with a head, if it has one, and a small config."""
    name = next(names[model_type] for names in HEADS if model_type in names)
    cls = getattr(transformers, name if isinstance(name, str) else name[0])
    return cls, small_config(cls.config_class)


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took {SECONDS} seconds")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def build(model_type: str) -> Any:
    cls, config = family(model_type)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
            if not parameter.isfinite().all():  # memory that no one has written
                parameter.normal_(0.0, 0.1)
    return model


def verdict(model: Any) -> str:
    """``checked``, ``refused: why`` or ``not checked: why``."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            adopt_hf(model)
        except ValueError as error:
            return f"refused: {error}"
    texts = [str(one.message) for one in seen]
    unchecked = [text.partition("of a call (")[2][:-1] for text in texts if "the adopted model is not checked" in text]
    return (
        f"not checked: {unchecked[0]}"
        if unchecked
        else "; ".join(["checked", *(text for text in texts if "AttentionInterface stay" in text or "did not run" in text)])
    )


def really(model: Any) -> str:
    """What longer rows say of the model without the check: the largest difference over what rounding explains."""
    torch.manual_seed(1)
    ids = torch.randint(3, 99, (2, 23))
    worst = 0.0
    for pad in (slice(0), slice(7), slice(16, None)):
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(0, torch.tensor([1]), 1)}
        inputs["attention_mask"][1, pad] = 0
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids[:, :13]
        where = inputs["attention_mask"] != 0
        with settled(model):
            wanted = answer(model, inputs)
            where = where if wanted.shape[:2] == where.shape else None
            noise = max(rounding(lambda x: answer(model, x), model, inputs, wanted, where, seed) for seed in range(3))
        with warnings.catch_warnings(action="ignore"):
            adopt_hf(model, check=False)
        try:
            with settled(model):
                gap = compare(answer(model, inputs), wanted, noise, where)
        finally:
            release_hf(model)
        worst = max(worst, gap.size / gap.allowed if gap.allowed else float(gap.size > 0))
    return f"{worst:.2g}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names = sys.argv[1:] or sorted({name for names in HEADS for name in names})
    for name in names:
        try:
            with limited(), warnings.catch_warnings(action="ignore"):
                model = build(name)
        except Exception as error:
            print(
                f"{name}\tnot built\t{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}",
                flush=True,
            )
            continue
        try:
            with limited():
                said = verdict(model)
                if said.startswith(("checked", "not")):
                    release_hf(model)
        except Exception as error:
            print(f"{name}\tBROKE\t{type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        try:
            with limited():
                truth = really(model) if "no attention to adopt" not in said else ""
        except Exception as error:
            truth = f"{type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
        print(f"{name}\t{type(model).__name__}\t{said}\t{truth}", flush=True)
