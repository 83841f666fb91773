"""``export.py``: a checkpoint becomes a folder that transformers reads without a line of ours."""

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors import SafetensorError

from minitx.interop.conversations import TEMPLATE, ChatFormat
from minitx.training.checkpoints import load_model
from tests.cli.conftest import SHORT, TEXT

PARTS = ("In the beginning", " the\tearth", "你好世界 🎉", "na\u00efve <eos")
LINES = [f"{part} {number}" for number in range(250) for part in PARTS]
FILES = "config.json model.safetensors tokenizer.json tokenizer_config.json generation_config.json README.md"
TINY_CHAT = ("data.context_len=32", "model=llama_small", "model.embed_dim=12", "model.num_heads=3", "model.num_kv_heads=3")


@pytest.fixture(autouse=True)
def _calm(monkeypatch):
    """Transformers may warn and draw bars on stderr."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("run", ["text", "bytes"])
def test_an_exported_run_has_the_ids_the_logits_and_the_text_of_the_checkpoint(cli, output, last, place, run):
    assert output("export", last(run), "output=out") == "out\n"
    assert {path.name for path in (place / "out").iterdir()} == set(FILES.split())
    network, tokenizer, _ = load_model(last(run).removeprefix("ckpt_path="))
    theirs = transformers.AutoTokenizer.from_pretrained(place / "out")
    assert [theirs(line).input_ids for line in LINES] == [tokenizer.encode(line).tolist() for line in LINES]
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "out").eval()
    ids = torch.tensor([tokenizer.encode(TEXT).tolist()[:61]])
    with torch.no_grad():
        assert (model(ids).logits - network(ids)).abs().max() < 1e-5
    written = transformers.pipeline("text-generation", str(place / "out"))("In the", max_new_tokens=7, do_sample=False)
    said = output("generate", last(run), "prompt=In the", "max_new_tokens=7")
    assert written[0]["generated_text"] in (said.strip("\n"), f"In the{said.strip(chr(10))}")


def test_the_readme_of_a_runs_folder_says_what_the_run_knows(output, runs, place):
    output("export", f"ckpt_path={runs / 'text'}", "output=out")
    text = (place / "out" / "README.md").read_text(encoding="utf-8")
    for words in ("20 steps", "text.txt", "validation loss", "GPT2LMHeadModel", "AutoModelForCausalLM.from_pretrained"):
        assert words in text
    assert str(runs) not in text  # no path of this machine


def test_a_checkpoint_that_was_copied_away_from_its_run_is_exported_without_what_lies_there(output, last, runs, place):
    for name in ("last.ckpt", "link.ckpt"):
        file = runs / "text" / "checkpoints" / "last.ckpt"
        os.symlink(file, name) if name == "link.ckpt" else shutil.copy(file, name)
        shutil.copy(runs / "text" / "metrics.csv", place.parent)
        output("export", f"ckpt_path={name}", f"output=of_{name}")
        assert ("validation loss" in Path(f"of_{name}", "README.md").read_text(encoding="utf-8")) == (name == "link.ckpt")


def test_a_chat_template_is_that_of_the_run_or_of_a_file_and_gives_the_ids_of_the_training(cli, output, place):
    chat = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three."}]
    (place / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 61)
    assert cli(*SHORT, "data=chat", "data.path=chat.jsonl", "data.tokenizer=char", *TINY_CHAT, "output_dir=run").code == 0
    output("export", "ckpt_path=run/checkpoints/last.ckpt", "output=out")
    _, tokenizer, _ = load_model("run/checkpoints/last.ckpt")
    theirs = transformers.AutoTokenizer.from_pretrained(place / "out")
    for options in ({}, {"add_generation_prompt": True}):
        want, _ = ChatFormat(TEMPLATE, tokenizer).encode(chat, **options)
        assert theirs.apply_chat_template(chat, return_dict=False, **options) == want.tolist()
    assert theirs.eos_token_id == tokenizer.mark_ids["eos"]
    assert json.loads((place / "out" / "generation_config.json").read_text())["eos_token_id"] == theirs.eos_token_id
    (place / "mine.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    output("export", "ckpt_path=run/checkpoints/last.ckpt", "output=other", "chat_template=mine.jinja")
    other = transformers.AutoTokenizer.from_pretrained(place / "other")
    assert other.apply_chat_template(chat, tokenize=False) == "How many?"


@pytest.fixture
def reviews(place):
    """The words that train a classifier of three labels on a table."""
    kinds = {"good": "a fine day", "bad": "rain and fog again", "neither": "so"}
    rows = [f"{text} {number},{kind}" for number in range(11) for kind, text in kinds.items()]
    (place / "reviews.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    return ["data.path=reviews.csv", "data.tokenizer=char", "data.max_len=31", "data.val_fraction=0.3", "output_dir=run"]


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_a_text_classifier_has_the_logits_of_the_checkpoint_and_the_names_of_its_labels(cli, output, place, reviews, tokenizer):
    bpe = ["data.bpe_vocab_size=270", f"data.tokenizer={tokenizer}"] if tokenizer == "bpe" else []
    chosen = [*SHORT, "experiment=classify", "model=bert_small", *reviews, *bpe, "optimizer.lr=1e-2", "trainer.max_steps=9"]
    assert cli(*chosen).code == 0
    output("export", "ckpt_path=run", "output=out")
    network, ours, _ = load_model("run/checkpoints/last.ckpt")
    theirs = transformers.AutoTokenizer.from_pretrained("out")
    model = transformers.AutoModelForSequenceClassification.from_pretrained("out").eval()
    assert model.config.id2label == {0: "bad", 1: "good", 2: "neither"}
    texts, alone = ["a fine day 3", "so 7", "rain and fog again 10"], []
    for text in texts:
        ids = theirs(text, return_tensors="pt").input_ids
        assert ids[0].tolist() == [ours.mark_ids["cls"], *ours.encode(text).tolist()]
        with torch.no_grad():
            alone.append(network(ids))
            torch.testing.assert_close(model(ids).logits, alone[-1], rtol=0, atol=1e-5)
    padded = theirs(texts, padding=True, return_tensors="pt")
    assert len({*padded.attention_mask.sum(1).tolist()}) == 3
    with torch.no_grad():
        for logits in (model(**padded).logits, network(padded.input_ids, key_mask=padded.attention_mask.bool())):
            torch.testing.assert_close(logits, torch.cat(alone), rtol=0, atol=1e-5)
    said = transformers.pipeline("text-classification", "out")(texts)
    assert [one["label"] for one in said] == [model.config.id2label[int(row.argmax())] for row in alone]


def test_a_classifier_that_no_class_expresses_is_refused_with_all_its_fields(cli, reviews):
    assert cli(*SHORT, "experiment=classify", *reviews).code == 0
    fields = ["position", "norm", "norm_position", "embed_norm", "activation", "bias", "pooling", "pooler"]
    said = cli("ckpt_path=run", "output=out", program="export")
    assert said.code == 2 and "BertForSequenceClassification" in said.err
    assert [name for name in fields if f" {name}=" not in said.err] == []


def test_a_classifier_of_transformers_has_the_names_of_the_labels_too(cli, output, place, reviews):
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained("base")
    kept = [word for word in SHORT if not word.startswith("model.")]
    assert cli(*kept, "experiment=finetune", "data=classify", "model=hf", "model.path=base", *reviews).code == 0
    output("export", "ckpt_path=run", "output=out")
    assert transformers.AutoConfig.from_pretrained("out").id2label == {0: "bad", 1: "good", 2: "neither"}


def test_a_folder_that_is_not_empty_stays_as_it_is(assert_refused, last, place):
    (place / "out").mkdir()
    (place / "out" / "note.txt").write_text("mine", encoding="utf-8")
    assert_refused("output=out is not empty", last("text"), "output=out", program="export")
    assert_refused("output=out/note.txt is a file", last("text"), "output=out/note.txt", program="export")
    assert [path.name for path in (place / "out").iterdir()] == ["note.txt"]


def test_a_disk_that_is_full_and_a_template_without_a_tokenizer_are_said(assert_refused, last, place, monkeypatch):
    (place / "chat.jinja").write_text("{{ messages }}", encoding="utf-8")
    words = "output=out", "chat_template=chat.jinja"
    assert_refused("chat_template=chat.jinja needs a tokenizer", last("digits"), *words, program="export")
    for error in (OSError(28, "full"), SafetensorError("full")):
        monkeypatch.setattr("minitx.interop.save_hf", Mock(side_effect=error))
        assert_refused("error: output=out cannot be written: full", last("text"), "output=out", program="export")


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
def test_lm_eval_gives_the_log_likelihoods_of_the_checkpoint_on_a_task_of_local_files(output, last, place, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
    output("export", last("text"), "output=out")
    (place / "rows.jsonl").write_text(json.dumps({"text": "In the beginning", "a": " God", "b": " the heaven", "label": 0}))
    (place / "local.yaml").write_text(
        'task: local\ndataset_path: json\ntarget_delimiter: ""\noutput_type: multiple_choice\nvalidation_split: validation\n'
        f"dataset_kwargs:\n  data_files:\n    validation: {place / 'rows.jsonl'}\n"
        'doc_to_text: "{{text}}"\ndoc_to_choice: "{{[a, b]}}"\ndoc_to_target: label\nmetric_list:\n  - metric: acc\n'
    )
    tasks = lm_eval.tasks.TaskManager(include_path=str(place), include_defaults=False)
    model = {"model": "hf", "model_args": {"pretrained": str(place / "out")}, "device": "cpu"}
    found = lm_eval.simple_evaluate(**model, tasks=["local"], task_manager=tasks, bootstrap_iters=0)
    network, tokenizer, _ = load_model(last("text").removeprefix("ckpt_path="))
    (sample,) = found["samples"]["local"]
    for answer, (score, _) in zip((" God", " the heaven"), sample["filtered_resps"], strict=True):
        ids = torch.tensor([tokenizer.encode(f"In the beginning{answer}").tolist()])
        with torch.no_grad():
            steps = network(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[0, -len(tokenizer.encode(answer)) :]
        assert float(score) == pytest.approx(float(steps.sum()), abs=1e-3)
