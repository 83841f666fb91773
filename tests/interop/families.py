"""Random small models of transformers' families, with weights large enough that soft-caps, masks and positions matter."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4}
SMALL = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 99}
MARKS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT = {**SMALL, **MARKS}
GROUPED = {**TEXT, "num_key_value_heads": 2}
WIDE = {**GROUPED, "head_dim": 8}
LOCAL = {**WIDE, "sliding_window": 5}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64, **MARKS}
OPT = {**SIZES, "hidden_size": 32, "ffn_dim": 64, "vocab_size": 99, "word_embed_proj_dim": 32, **MARKS}
PICTURE = {**SIZES, "hidden_size": 32, "intermediate_size": 64, "image_size": 16, "patch_size": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "decoder_start_token_id": 0}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99, "max_position_embeddings": 64, **MARKS}
BART["decoder_start_token_id"] = 2
SPEECH = {**BART, "max_source_positions": 50, "suppress_tokens": None, "begin_suppress_tokens": None}

DECODERS = {
    "Llama": GROUPED, "Mistral": {**GROUPED, "sliding_window": 5}, "Qwen2": GROUPED, "Qwen3": WIDE, "Gemma": WIDE, "Gemma2": LOCAL,
    "Gemma3": LOCAL, "Phi": TEXT, "Phi3": GROUPED, "Olmo": GROUPED, "Olmo2": GROUPED, "Cohere": GROUPED, "Cohere2": {**GROUPED, "sliding_window": 5},
    "Granite": GROUPED, "StableLm": GROUPED, "Starcoder2": GROUPED, "SmolLM3": GROUPED, "Glm": WIDE, "Glm4": WIDE, "Helium": WIDE,
    "Nemotron": GROUPED, "Persimmon": TEXT, "Arcee": GROUPED, "Ernie4_5": GROUPED, "Exaone4": GROUPED, "Apertus": GROUPED,
    "BioGpt": TEXT, "GPTNeoX": TEXT, "OPT": OPT, "GPTBigCode": GPT,
    "GptOss": {**LOCAL, "num_local_experts": 2, "num_experts_per_tok": 1}, "Mixtral": {**GROUPED, "num_local_experts": 2},
    "Olmoe": {**GROUPED, "num_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip
ENCODERS = {
    "Bert": TEXT, "Roberta": TEXT, "XLMRoberta": TEXT, "Camembert": TEXT, "Electra": {**TEXT, "embedding_size": 32},
    "Albert": {**TEXT, "embedding_size": 32}, "Ernie": TEXT, "NomicBert": TEXT, "ModernBert": {**TEXT, "local_attention": 12},
    "DistilBert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 99, "pad_token_id": 0},
}  # fmt: skip
PICTURES = dict.fromkeys(("ViT", "DeiT", "Dinov2", "SiglipVision", "CLIPVision"), PICTURE)
PICTURES["SiglipVision"] = {**PICTURE, "vision_use_head": False}
PAIRS = {"T5": T5, "MT5": T5, "UMT5": T5, "Bart": BART, "MBart": BART, "Pegasus": BART, "Marian": BART, "Blenderbot": BART}
REFUSED = {
    "Falcon": SMALL, "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99},
    "GPTNeo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "attention_types": [[["global", "local"], 1]]},
    "GPTJ": {**GPT, "rotary_dim": 4}, "Git": {"vision_config": PICTURE, **TEXT},
}  # fmt: skip
REFUSED_PAIRS = {"BigBirdPegasus": BART}
PARTLY = {"LongT5": T5, "PegasusX": {**BART, "block_size": 4, "num_global_tokens": 2}}
"""Families whose encoder computes its attention itself, and stays as it is."""
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}
BESIDE = {
    "Jamba": {**GROUPED, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4},
    "Bamba": {**GROUPED, **MAMBA, "attn_layer_indices": [1]}, "FalconH1": {**GROUPED, **MAMBA, "mamba_d_ssm": 64},
    "Qwen3Next": {
        **WIDE, **EXPERTS, "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    },
}  # fmt: skip
QUICK = ("GPT2", "Llama", "Gemma2", "Bert", "T5", "ViT")
"""One of each kind, and of each way of writing a mask: run by every ``make test``."""


KINDS = {
    "ForCausalLM": {"GPT2": GPT, **DECODERS, **BESIDE, **REFUSED},
    "ForMaskedLM": ENCODERS,
    "Model": PICTURES,
    "ForConditionalGeneration": {**PAIRS, **PARTLY, "Whisper": SPEECH, **REFUSED_PAIRS},
}
"""The end of the name of the class, and the configs of its families."""
REFUSED |= REFUSED_PAIRS


def build(name: str) -> Any:
    """A model of a family in evaluation mode, the same at every call. Its matrices are three times as large as at the start."""
    end, options = next((end, found[name]) for end, found in KINDS.items() if name in found)
    cls = getattr(transformers, {"Marian": "MarianMTModel", "GPT2": "GPT2LMHeadModel"}.get(name, f"{name}{end}"))
    torch.manual_seed(0)
    model = cls(cls.config_class(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


NAMES = ["GPT2", *DECODERS, *ENCODERS, *PICTURES, *PAIRS, "Whisper"]


def inputs_of(name: str, *, pad: str | None = None) -> tuple[dict[str, Tensor], Tensor | None]:
    """The arguments of a call, and which rows and positions of the output count (None: all). ``pad``: left or right."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 99, (2, 11), generator=generator)
    real = torch.ones(2, 11, dtype=torch.long)
    if pad is not None:
        real[1, slice(4) if pad == "left" else slice(7, None)] = 0
    if name in PICTURES:
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}, None
    if name == "Whisper":
        return {"input_features": torch.randn(2, 80, 100, generator=generator), "decoder_input_ids": ids}, None
    found: dict[str, Tensor] = {"input_ids": ids, "attention_mask": real}
    if name in (*PAIRS, *PARTLY, *REFUSED_PAIRS):
        return {**found, "decoder_input_ids": ids[:, :7]}, None
    return found, real.bool()


def output_of(model: Any, inputs: dict[str, Tensor], counts: Tensor | None) -> Tensor:
    """Logits or hidden states of the rows and positions that count."""
    found = model(**inputs)
    out: Tensor = found.logits if hasattr(found, "logits") else found.last_hidden_state
    return out if counts is None else out[counts]
