"""Adapters of PEFT on Hugging Face models: what is exported is what was trained, with tied weights, too."""

import json

import pytest
import torch
import transformers

from minitx.interop import hf_from_config, pretrained_hf
from minitx.interop.finetune import save_finetuned
from minitx.interop.lora import Lora
from minitx.training.checkpoint_files import load_weights

V = 61
WIDE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": V}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": V, "decoder_start_token_id": 0}
BART = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
BART |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": V}
# the kind of task, the class, its config, its head and its embeddings
FAMILIES = {
    "llama": ("language_model", transformers.LlamaForCausalLM, WIDE, "lm_head", "embed_tokens"),
    "gpt2": ("language_model", transformers.GPT2LMHeadModel, {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": V}, "lm_head", "wte"),
    "bert": ("masked_lm", transformers.BertForMaskedLM, WIDE, "decoder", "word_embeddings"),
    "t5": ("seq2seq", transformers.T5ForConditionalGeneration, T5, "lm_head", "embed_tokens"),
    "bart": ("seq2seq", transformers.BartForConditionalGeneration, BART, "lm_head", "embed_tokens"),
}  # fmt: skip
AUTO = {"language_model": "AutoModelForCausalLM", "masked_lm": "AutoModelForMaskedLM", "seq2seq": "AutoModelForSeq2SeqLM"}
QUICK = ("llama",)
ADAPTERS = {
    "head": lambda head, table: {"target_modules": (head,)},
    "embeddings": lambda head, table: {"target_modules": (table,)},
    "both": lambda head, table: {"target_modules": (head, table)},
    "dora": lambda head, table: {"target_modules": (head,), "use_dora": True},
    "all-linear": lambda head, table: {"target_modules": "all-linear"},
    "saved head": lambda head, table: {"modules_to_save": (head,)},
    "saved embeddings": lambda head, table: {"modules_to_save": (table,)},
    "saved both": lambda head, table: {"modules_to_save": (head, table)},
}


def folder_of(name, tied, folder):
    """A model of a family, and its folder."""
    _, kind, sizes, *_ = FAMILIES[name]
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes, tie_word_embeddings=tied))
    if not tied:  # T5 ties at first, whatever its config says
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.randn_like(head.weight) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def inputs_of(name):
    ids = torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, **({"decoder_input_ids": ids[:, :5]} if FAMILIES[name][0] == "seq2seq" else {})}


@torch.no_grad()
def logits(model, name):
    return model.eval()(**inputs_of(name)).logits


def trained(model):
    """Random numbers stand in for training."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def again(model):
    """The model of a checkpoint: built from its node, with its weights."""
    node = json.loads(json.dumps({key: value for key, value in model.stored_node.items() if key != "_target_"}))
    if "lora" in node:
        node["lora"] = Lora(**node["lora"])
    built = hf_from_config(**node)
    load_weights(built, model.state_dict())
    return built


def exported(model, name, folder):
    save_finetuned(model, folder, tokenizer=None, chat_template=None, facts={})
    found, report = getattr(transformers, AUTO[FAMILIES[name][0]]).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return found


HALF = {"head", "all-linear", "saved embeddings", "saved both"}
"""Of the adapters of ``QUICK``, those with tied weights; the others are without. Other families have both."""
EXPORTED = [(name, adapter, tied) for name in FAMILIES for adapter in ADAPTERS for tied in (True, False)
            if name not in QUICK or tied == (adapter in HALF)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "adapter", "tied"), [pytest.param(*one, marks=() if one[0] in QUICK else pytest.mark.slow) for one in EXPORTED]
)
def test_the_exported_folder_has_the_logits_of_the_checkpoint(name, adapter, tied, tmp_path):
    task, _, _, *parts = FAMILIES[name]
    before = logits(folder_of(name, tied, tmp_path / "base"), name)
    model = trained(pretrained_hf(str(tmp_path / "base"), task=task, lora=Lora(r=3, **ADAPTERS[adapter](*parts))))
    want = logits(model, name)
    assert (want - before).abs().max() > 0.05
    checkpoint = again(model)
    assert torch.equal(logits(checkpoint, name), want)
    torch.testing.assert_close(logits(exported(checkpoint, name, tmp_path / "out"), name), want, rtol=1e-5, atol=1e-4)


def test_an_adopted_model_with_another_scale_and_an_adapter_of_its_tied_head_is_exported_as_it_is(tmp_path):
    folder_of("llama", True, tmp_path / "base")
    lora = Lora(r=3, target_modules=("lm_head", "q_proj"))
    model = trained(pretrained_hf(str(tmp_path / "base"), adopt=True, scale=20.0, lora=lora))
    want = logits(model, "llama")
    found = exported(model, "llama", tmp_path / "out")
    torch.testing.assert_close(logits(found, "llama"), want, rtol=1e-5, atol=1e-4)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("adapter", ["head", "saved embeddings", "all-linear"])
def test_what_peft_warns_of_and_what_becomes_of_a_tied_weight_are_lines_of_the_log(adapter, tmp_path, caplog, recwarn):
    folder_of("llama", True, tmp_path)
    model = pretrained_hf(str(tmp_path), lora=Lora(**ADAPTERS[adapter]("lm_head", "embed_tokens")))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("tie_word_embeddings" in line for line in lines) is (adapter != "all-linear")  # of PEFT
    assert any("model.embed_tokens.weight and lm_head.weight" in line for line in lines) is (adapter != "all-linear")
    assert all("\n" not in line for line in lines)
    caplog.clear()
    again(model)  # a stored model was warned of before
    assert not caplog.records and not recwarn.list


class AlwaysTied(transformers.LlamaForCausalLM):
    """A model whose config does not untie it."""

    def __init__(self, config):
        super().__init__(config)
        self.lm_head.weight = self.model.embed_tokens.weight


def test_an_adapter_of_a_weight_that_no_config_unties_is_refused_at_the_start(tmp_path, monkeypatch):
    folder_of("llama", True, tmp_path)
    monkeypatch.setitem(transformers.AutoModelForCausalLM._model_mapping._extra_content, transformers.LlamaConfig, AlwaysTied)
    said = "AlwaysTied always ties model.embed_tokens.weight and lm_head.weight"
    with pytest.raises(ValueError, match=said):
        pretrained_hf(str(tmp_path), task="language_model", lora=Lora(target_modules=("lm_head",)))
    pretrained_hf(str(tmp_path), task="language_model", lora=Lora(target_modules=("q_proj",)))


def test_a_checkpoint_of_a_model_that_is_not_tied_as_its_config_says_is_built_again_as_it_was(tmp_path):
    folder_of("t5", False, tmp_path)  # as T5 v1.1 and Flan-T5
    model = trained(pretrained_hf(str(tmp_path), task="seq2seq"))
    assert model.config.tie_word_embeddings and model.lm_head.weight is not model.shared.weight
    checkpoint = again(model)
    assert checkpoint.encoder.embed_tokens.weight is checkpoint.shared.weight
    assert torch.equal(logits(checkpoint, "t5"), logits(model, "t5"))
    assert torch.equal(logits(again(checkpoint), "t5"), logits(model, "t5"))
