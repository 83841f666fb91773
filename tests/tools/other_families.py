"""Adopt a small random model of every family of transformers: python tests/tools/other_families.py

Writes docs/dev/adopted_families.tsv: family, class, answer, and whether longer rows say the same. A family whose default config cannot be made small by the names of its fields is left out. Longer
rows are 23 tokens with padding on either side, of which the logits before and after are compared without the check.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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

RECORD = Path(__file__).parents[2] / "docs" / "dev" / "adopted_families.tsv"
ANSWERS = {  # and what adopt_hf says then
    "checked": "",
    "checked, layers without a core": "layers without attention",
    "checked, some attention did not run": "did not run in the check",
    "not checked": "the adopted model is not checked",
    "refused, no layer calls the interface": "no attention to adopt",
    "refused, a call fails": "cannot be adopted",
    "refused, the answer differs": "its answer differs",
    "refused, transformers keeps its attention": "cannot be replaced: transformers did not change it",
}
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
    """One of ``ANSWERS``. The model is as it was afterwards."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            adopt_hf(model)
            release_hf(model)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=1)
    told = "\n".join(str(one.message) for one in seen)
    return [answer for answer, sign in ANSWERS.items() if sign in told][-1]


def excess(model: Any) -> float:
    """How many times longer rows differ by what rounding explains, without the check."""
    torch.manual_seed(1)
    ids, worst = torch.randint(3, 99, (2, 23)), 0.0
    for padding in (slice(0), slice(7), slice(16, None)):
        mask = torch.ones_like(ids)
        mask[1, padding] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids[:, :13]
        with settled(model):
            wanted = answer(model, inputs)
            where = mask != 0 if wanted.shape[:2] == mask.shape else None
            noise = max(rounding(partial(answer, model), model, inputs, wanted, where, seed) for seed in range(3))
        with warnings.catch_warnings(action="ignore"):
            adopt_hf(model, check=False)
        try:
            with settled(model):
                gap = compare(answer(model, inputs), wanted, noise, where)
        finally:
            release_hf(model)
        worst = max(worst, gap.size / gap.allowed)
    return worst


def agreement(model: Any, said: str) -> str:
    """Whether longer rows say the same: ``agrees``, ``disagrees``, or a dash where they say nothing."""
    try:
        differs = excess(model) > 1
    except Exception:  # it does not read rows of text, or nothing can be adopted
        return "-"
    return "-" if said == "not checked" else "agrees" if differs == said.startswith("refused") else "disagrees"


def on_record() -> dict[str, list[str]]:
    """Class, answer and agreement of each family of the record."""
    _, *lines = RECORD.read_text(encoding="utf-8").splitlines()
    return {name: cells for name, *cells in (line.split("\t") for line in lines)}


def measured(name: str) -> list[str]:
    """Class, answer and agreement of a family."""
    with limited():
        with warnings.catch_warnings(action="ignore"):
            model = build(name)
        said = verdict(model)
        return [type(model).__name__, said, agreement(model, said)]


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names = sorted({name for names in HEADS for name in names})
    lines = [f"family\tclass in transformers {transformers.__version__}\tanswer of adopt_hf\tlonger rows\n"]
    for name in names:
        try:
            lines.append("\t".join([name, *measured(name)]) + "\n")
        except Exception as error:
            print(name, "is left out:", type(error).__name__, str(error).split("\n", 1)[0][:100], flush=True)
    RECORD.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines) - 1} of {len(names)} families")


if __name__ == "__main__":
    main()
