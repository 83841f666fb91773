"""``view_attention.py``: from a checkpoint, a run's folder or a Hugging Face folder to a page."""

import json
import re
import shutil
import sys
from base64 import b64decode

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from minitx.analysis import take_snapshot
from minitx.analysis.snapshot import read_snapshots, typical_row
from minitx.analysis.viewer import playground
from minitx.cli.inputs import RowInputs, attention_of
from minitx.config import TransformerConfig, to_dict
from minitx.config.training import MODEL
from minitx.data.token_labels import token_texts
from minitx.data.tokenizer import train_tokenizer
from minitx.generation import generate
from minitx.nn import MultiHeadAttention
from minitx.nn.models import build_model
from minitx.training.checkpoint_files import write_checkpoint
from minitx.training.checkpoints import load_model
from tests.cli.conftest import TEXT


@pytest.fixture
def data(output, place):
    """``data(ckpt_path=…)``: what the page that ``view_attention.py`` wrote holds."""

    def run(*arguments):
        out = output("view", *arguments)
        page = (place / "attention.html").read_text(encoding="utf-8")
        return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1]) | {"html": page, "out": out}

    return run


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 12, "intermediate_size": 17}
PAIR = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 3, "d_model": 12,
        "encoder_ffn_dim": 17, "decoder_ffn_dim": 17, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3,
        "pad_token_id": 0}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with random models as transformers saves them: BERT and BART with words, Llama with bytes. Falcon is refused."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "##s", "你", "好"]
    wordpiece = transformers.BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    bytes_ = train_tokenizer("bpe", [TEXT], vocab_size=257)
    made = {
        "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=257, max_position_embeddings=31, **SIZES)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=11, **SIZES)),
        "bert-2.5": transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=11, **SIZES)),
        "bart": transformers.BartForConditionalGeneration(transformers.BartConfig(vocab_size=11, **PAIR)),
        "falcon": transformers.FalconForCausalLM(transformers.FalconConfig(vocab_size=257, **SIZES)),
    }
    folder = tmp_path_factory.mktemp("folders")
    for name, model in made.items():
        model.save_pretrained(folder / name)
        if name in ("llama", "falcon"):
            bytes_.save(folder / name / "tokenizer.json")
        else:
            wordpiece.save_pretrained(folder / name)
    return folder


@pytest.fixture
def bare(runs, tmp_path):
    """``bare("linear", attention="linear")``: the argument for a checkpoint of that model with fresh weights and a tokenizer."""

    def make(name, tokenizer=None, **model):
        tokenizer = tokenizer or train_tokenizer("char", [TEXT])
        config = TransformerConfig(vocab_size=tokenizer.vocab_size, embed_dim=12, num_heads=3, max_len=64, **model)
        found = torch.load(runs / "text" / "checkpoints" / "last.ckpt", weights_only=True)
        found["state_dict"] = {f"network.{name}": weight for name, weight in build_model(config).state_dict().items()}
        found["minitx"] |= {"model": {"_target_": MODEL, **to_dict(config)}, "tokenizer": tokenizer.to_dict()}
        write_checkpoint(found, tmp_path / f"{name}.ckpt")
        return f"ckpt_path={tmp_path / name}.ckpt"

    return make


def test_a_checkpoint_and_a_text_are_enough_and_the_page_holds_what_the_model_does(data, last):
    page = data(last("text"), "text=the heaven")
    assert page["tokens"] == {"input_ids": list("the heaven")}
    assert [layer["kind"] for layer in page["layers"]] == ["causal"] * 2
    assert page["out"].startswith("2 layers, 3 heads, 1 step, 1 model, 10 tokens\nattention.html  ")
    assert "“the heaven”" in page["html"]
    model, tokenizer, _ = load_model(last("text").partition("=")[2])
    seen = take_snapshot(model, {"input_ids": torch.tensor([tokenizer.encode("the heaven").tolist()])}).maps[1]
    packed = bytearray(b64decode(page["traces"][0]["snapshots"][0]["layers"][1]["weights"]))
    shown = torch.frombuffer(packed, dtype=torch.uint16).double() / 65534
    torch.testing.assert_close(shown, seen.weights[seen.visible].double(), atol=1e-5, rtol=0)


def test_several_checkpoints_are_the_steps_of_the_slider_and_a_second_model_stands_beside(data, last):
    paths = f"{last('text')},{last('unscaled').partition('=')[2]}"  # after 20 steps and after 2
    page = data(paths, "text=and", last("unscaled").replace("ckpt_path", "compare"))
    one, other = page["traces"]
    assert [s["step"] for s in one["snapshots"]] == [2, 20]
    assert [s["step"] for s in other["snapshots"]] == [2]
    assert other["snapshots"][0]["title"].endswith("scale unscaled")
    assert "2 steps, 2 models, 3 tokens" in page["out"]


def test_an_encoder_decoder_gives_its_own_answer_or_takes_a_target(data, last):
    model, tokenizer, _ = load_model(last("dates").partition("=")[2])
    (answer,) = generate(model, torch.tensor([tokenizer.encode("de: 7.3.1999").tolist()]), max_new_tokens=5)
    page = data(last("dates"), "text=de: 7.3.1999", "max_new_tokens=5")
    assert page["tokens"]["input_ids"] == list("de: 7.3.1999")
    assert page["tokens"]["decoder_input_ids"] == ["<bos>", *token_texts(tokenizer, answer.tolist())]
    assert {layer["kind"] for layer in page["layers"]} == {"self", "causal", "cross"}
    page = data(last("dates"), "text=de: 7.3.1999", "target=1999", "layers=cross")
    assert page["tokens"]["decoder_input_ids"] == ["<bos>", *"1999"]
    assert [layer["kind"] for layer in page["layers"]] == ["cross"] * 2


def test_a_row_of_validation_takes_the_place_of_a_text(data, last):
    target = data(last("dates"), "row=2")["tokens"]["decoder_input_ids"]
    assert target[0] == "<bos>"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", "".join(target[1:]))
    page = data(last("text"), "row=1")
    assert len(page["tokens"]["input_ids"]) == 24
    assert "validation row 1" in page["html"]
    assert data(last("digits"), "row=3")["tokens"]["pixel_values"][-1] == "1,1"  # patches


def test_a_task_without_a_tokenizer_shows_a_row_or_ids(data, last):
    tokens = data(last("lookup"))["tokens"]["input_ids"]
    assert all(re.fullmatch(r"\d+:\d+", token) for token in tokens[:-1])
    assert re.fullmatch(r"\d+", tokens[-1])
    assert data(last("lookup"), "text=" + " ".join(tokens))["tokens"]["input_ids"] == tokens


def test_a_text_to_classify_begins_with_its_mark(data, bare):
    marked = train_tokenizer("char", [TEXT], marks=["pad", "cls"])
    path = bare("classes", marked, architecture="encoder", head="sequence", num_labels=2)
    assert data(path, "text=the")["tokens"]["input_ids"] == ["<cls>", *"the"]


def test_a_run_that_recorded_its_attention_needs_no_text_and_has_its_answers_and_a_film_shows_it(
    data, output, runs, place, assert_refused
):
    run = f"ckpt_path={runs / 'lookup'}"
    page = data(run, "row=1", f"compare={runs / 'lookup'}")
    assert len(page["traces"]) == 2
    shots = page["traces"][0]["snapshots"]
    assert [shot["step"] for shot in shots] == [0, 1, 2]
    tokens = page["tokens"]["input_ids"]
    for (one,) in (shot["answers"]["rows"] for shot in shots):
        assert one["text"] == f"Which value has key {tokens[-1]}?"
        assert tokens[one["key"]] == f"{tokens[-1]}:{page['words'][one['right']]}"
    assert shots[0]["answers"]["rows"][0]["answer"] != shots[-1]["answers"]["rows"][0]["answer"]
    tallies, whole = [shot["tally"] for shot in shots], read_snapshots(runs / "lookup")
    assert page["rule"] == "chosen" and {(one["row"], one["rows"]) for one in tallies} == {(1, whole[0].num_rows)}
    assert [one["right"] for one in tallies] == [sum(row[-1].is_right for row in shot.answers.rows) for shot in whole]
    page = data(run, "layers=-1")
    assert [layer["name"] for layer in page["layers"]] == ["blocks.1.attention.core"]
    assert page["rule"] == "typical" and page["traces"][0]["snapshots"][0]["tally"]["row"] == typical_row([whole])
    said = output("view", run, "row=1", "layers=1", "head=2", "output=film.webp")
    assert re.fullmatch(r"3 steps\nfilm\.webp  0\.\d\d MB\n", said)
    with Image.open(place / "film.webp") as film:
        assert film.n_frames == 3
    assert_refused("shows one layer, got 2", run, "output=film.gif", program="view")
    assert_refused("head=2 is for a film", run, "head=2", program="view")
    assert_refused("without text= or a checkpoint file", f"ckpt_path={runs / 'text'}", program="view")


def test_a_checkpoint_answers_on_a_text_and_on_a_row(data, last, folders):
    rows = data(last("text"), "text=the")["traces"][0]["snapshots"][0]["answers"]["rows"]
    assert [(one["text"], one["at"]) for one in rows] == [(f"Which token follows “{c}”?", i) for i, c in enumerate("the")]
    page = data(last("digits"), "row=3")
    (one,) = page["traces"][0]["snapshots"][0]["answers"]["rows"]
    assert (one["text"], one["at"], one["key"]) == ("Which class?", None, None)
    page = data(f"model={folders / 'llama'}", "text=abc")
    rows = page["traces"][0]["snapshots"][0]["answers"]["rows"]
    assert [one["right"] if one["right"] is None else page["words"][one["right"]] for one in rows] == ["b", "c", None]
    page = data(f"model={folders / 'bart'}", "text=the cat", "target=你 dog")
    rows = page["traces"][0]["snapshots"][0]["answers"]["rows"]
    assert [one["text"] for one in rows] == [f"Which token follows “{c}”?" for c in ("[SEP]", "[CLS]", "你", "dog")]
    assert "answers" not in data(f"model={folders / 'bert'}", "text=the")["traces"][0]["snapshots"][0]


@pytest.mark.parametrize("kind", ["text", "llama"])
def test_a_page_has_the_answers_without_each_head_where_they_are_asked_for(kind, data, last, folders):
    chosen = last("text") if kind == "text" else f"model={folders / 'llama'}"
    pages = [data(chosen, "text=the", *more) for more in ([], ["knock_out=true", "layers=1"])]
    whole, cut = (page["traces"][0]["snapshots"][0]["answers"] for page in pages)
    (heads,) = cut["without"]
    assert len(heads) == 3 and heads[0] != heads[1]
    assert "without" not in whole and cut["rows"] == whole["rows"]


def test_models_that_cannot_stand_beside_each_other_and_a_page_that_no_browser_opens_are_refused(
    assert_refused, bare, monkeypatch
):
    known, other = bare("known", num_layers=2), train_tokenizer("char", [TEXT.replace("I", "Z")])
    others = {"tokenizer": bare("shifted", other, num_layers=2), "layers": bare("shallow", num_layers=1)}
    for part, other in others.items():
        assert_refused(part, known, "text=the", other.replace("ckpt_path", "compare"), program="view")
    assert_refused("no weights over keys", bare("linear", num_layers=2, attention="linear"), "text=the", program="view")
    monkeypatch.setattr("minitx.cli.view_models.LARGEST_PAGE", 100)
    assert_refused("layers=", known, "text=the heaven", program="view")


def test_a_model_of_ones_own_may_take_fewer_keys_than_the_data_have():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention = nn.Embedding(7, 6), MultiHeadAttention(6, 2)

        def forward(self, input_ids):
            return self.attention(self.embed(input_ids))

    row = RowInputs({"input_ids": torch.tensor([[1, 2, 3, 5, 6]]), "key_mask": torch.ones(1, 5, dtype=torch.bool)}, {})
    assert attention_of(Net(), row, step=0).step == 0


def test_a_hugging_face_folder_and_a_text_are_enough(data, folders):
    page = data(f"model={folders / 'llama'}", "text=a你")
    assert page["tokens"] == {"input_ids": ["a", "你·1/3", "你·2/3", "你·3/3"]}
    layers = [(f"model.layers.{i}.self_attn.core", "causal") for i in range(2)]
    assert [(layer["name"], layer["kind"]) for layer in page["layers"]] == layers
    assert page["out"].startswith("2 layers, 3 heads, 1 step, 1 model, 4 tokens\nattention.html  ")
    assert page["traces"][0]["name"] == "llama"
    assert page["traces"][0]["snapshots"][0]["title"] == "LlamaForCausalLM"


def test_an_encoder_decoder_of_hugging_face_gives_its_own_answer_or_takes_a_target(data, folders):
    page = data(f"model={folders / 'bart'}", "text=the cat", "target=你 dog")
    assert page["tokens"] == {
        "input_ids": ["[CLS]", "the", "cat", "[SEP]"],
        "decoder_input_ids": ["[SEP]", "[CLS]", "你", "dog"],
    }
    assert [layer["kind"] for layer in page["layers"]] == ["self", "causal", "cross"]
    page = data(f"model={folders / 'bart'}", "text=the cat", "max_new_tokens=3")
    model = transformers.BartForConditionalGeneration.from_pretrained(folders / "bart")
    (answer,) = model.generate(torch.tensor([[2, 4, 5, 3]]), max_new_tokens=3, do_sample=False).tolist()
    known = transformers.AutoTokenizer.from_pretrained(folders / "bart")
    assert page["tokens"]["decoder_input_ids"] == known.convert_ids_to_tokens(answer[:-1])


def test_two_hugging_face_models_stand_beside_each_other(data, folders, assert_refused):
    page = data(f"model={folders / 'bert'}", f"compare={folders / 'bert-2.5'}", "text=the cat")
    assert [trace["name"] for trace in page["traces"]] == ["bert", "bert-2.5"]
    a, b = (trace["snapshots"][0]["layers"][0]["weights"] for trace in page["traces"])
    assert a != b
    assert_refused("tokenizer", f"model={folders / 'bert'}", f"compare={folders / 'llama'}", "text=the", program="view")


def test_two_texts_of_equally_many_tokens_stand_beside_each_other(data, folders, last, assert_refused):
    page = data(f"model={folders / 'bert'}", "text=the cat", "compare_text=the dog")
    assert page["tokens"]["input_ids"] == ["[CLS]", "the", "cat|dog", "[SEP]"]
    assert [trace["name"] for trace in page["traces"]] == ["“the cat”", "“the dog”"]
    assert page["out"].startswith("2 layers, 3 heads, 1 step, 2 texts, 4 tokens")
    page = data(last("text"), "text=the", "compare_text=tho")
    assert page["tokens"]["input_ids"] == ["t", "h", "e|o"]
    alone = data(last("text"), "text=tho")["traces"][0]["snapshots"][0]["layers"]
    assert [layer["weights"] for layer in page["traces"][1]["snapshots"][0]["layers"]] == [one["weights"] for one in alone]
    target = data(last("dates"), "text=de: 7.3.1999", "compare_text=de: 7.4.1999", "target=1999")["tokens"]
    assert target["decoder_input_ids"] == ["<bos>", *"1999"]
    assert_refused("compare_text has 4 tokens", last("text"), "text=the", "compare_text=then", program="view")
    assert_refused("target", last("dates"), "text=de: 7.3.1999", "compare_text=de: 7.4.1999", program="view")


def test_a_name_in_the_cache_of_the_hub_is_a_folder_too(data, folders, tmp_path, monkeypatch):
    cached = tmp_path / "models--somebody--bert"
    shutil.copytree(folders / "bert", cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert data("model=somebody/bert", "text=the")["tokens"]["input_ids"] == ["[CLS]", "the", "[SEP]"]


@pytest.mark.parametrize(("part", "arguments"), [
    ("neither a folder nor", "model=NOWHERE text=a"),
    ("neither a folder nor", "model=some/where/else text=a"),
    ("nothing/here", "ckpt_path=nothing/here knock_out=true"),
    ("config.json", "model=. text=a"),
    ("no tokenizer", "model=untold text=a"),
    ("AttentionInterface", "model=falcon text=a"),
    ("reads at most 31", f"model=llama text={'a' * 37}"),
    ("text is empty", "model=llama text="),
    ("text is missing", "model=llama"),
    ("model", "model=llama ckpt_path=last.ckpt text=a"),
    ("has the id", "model=narrow text=heaven"),
    ("compare", "model=llama text=a compare=llama compare_text=b"),
    ("row is for checkpoints", "model=llama text=a row=1"),
    ("gives no answer", "model=bert text=the knock_out=true"),
    ("must end in .html", "model=llama text=a output=a.txt"),
    ("not for a film", "model=llama text=a knock_out=true output=a.gif"),
])  # fmt: skip
def test_what_no_page_can_be_made_of_is_refused_in_one_sentence(part, arguments, folders, assert_refused, place):
    for folder in folders.iterdir():
        (place / folder.name).symlink_to(folder)
    for name, source in {"untold": "bert", "narrow": "llama"}.items():
        shutil.copytree(folders / source, place / name)
    for file in (place / "untold").glob("*token*"):
        file.unlink()
    (place / "narrow" / "tokenizer.json").unlink()
    train_tokenizer("bpe", [TEXT * 7], vocab_size=290).save(place / "narrow" / "tokenizer.json")
    assert_refused(part, *arguments.split(" "), program="view")


def test_a_page_to_play_with_needs_no_model(output, assert_refused, place):
    said = output("view", "--play")
    assert re.fullmatch(r"play\.html  0\.\d\d MB\n", said)
    assert (place / "play.html").read_text(encoding="utf-8") == playground().page
    output("view", "output=mine.html", "pages=docs/index.html", "--play")
    assert (place / "mine.html").read_text(encoding="utf-8") == playground(pages="docs/index.html").page
    assert_refused("ckpt_path is not a key", "--play", "ckpt_path=a", program="view")
    assert_refused("output=no/play.html", "--play", "output=no/play.html", program="view")


@pytest.mark.parametrize("kind", ["own", "llama"])
def test_code_and_pickles_in_a_folder_are_not_read(kind, folders, assert_refused, place):
    shutil.copytree(folders / "llama", place / "given")
    auto = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "evil.Evil")
    changed = {"model_type": kind, "auto_map": auto, "architectures": ["Evil"]}
    values = json.loads((place / "given" / "config.json").read_text())
    (place / "given" / "config.json").write_text(json.dumps(values | changed))
    (place / "given" / "evil.py").write_text("open('ran', 'w').close()\nclass Evil: pass")
    if kind == "llama":  # known: the code is not needed
        torch.save(load_file(place / "given" / "model.safetensors"), place / "given" / "pytorch_model.bin")
        (place / "given" / "model.safetensors").unlink()
    assert_refused("model=given", "model=given", "text=a", program="view")
    assert not (place / "ran").exists()


def test_a_missing_transformers_is_said(folders, assert_refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert_refused(
        "needs the package transformers: install minitx with the extra hf",
        f"model={folders / 'llama'}",
        "text=a",
        program="view",
    )


ASKED = ["view text=e", "view text=e knock_out=true", "view row=1 knock_out=true", "generate prompt=e", "evaluate num_shown=0"]


@pytest.mark.parametrize("asked", ASKED)
def test_a_runs_folder_stands_for_its_last_checkpoint_where_a_model_is_asked(output, place, runs, last, asked):
    (program, *words), said = asked.split(), []
    for path in (f"ckpt_path={runs / 'text'}", last("text")):
        said.append([output(program, path, *words), *(page.read_bytes() for page in place.glob("*.html"))])
    assert said[0] == said[1]
