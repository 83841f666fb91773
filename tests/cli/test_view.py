"""view_attention.py: from a checkpoint or a run's folder to a page, and one sentence for a mistake."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitx.analysis import take_snapshot
from minitx.analysis.snapshot import write_snapshot
from minitx.cli.arguments import help_text, parse
from minitx.cli.view import USAGE, ViewConfig, main
from minitx.config import (
    DatesDataConfig,
    DigitsDataConfig,
    KeyValueDataConfig,
    RunConfig,
    TextDataConfig,
    TrainerConfig,
    TransformerConfig,
    to_dict,
)
from minitx.data.tokenizers import token_texts, train_tokenizer
from minitx.generation import generate
from minitx.nn.models import build_model
from minitx.training.checkpoint import AtomicCheckpointIO
from minitx.training.stored import load_model
from minitx.training.run import build_module, fit_model_config, prepare_data

SCRIPT = Path(__file__).parents[2] / "scripts" / "view_attention.py"
SMALL = {"embed_dim": 12, "num_heads": 3, "num_layers": 2, "max_len": 64}
TEXT = "In the beginning was the Word.\n"


def save(folder, data, step, **model):
    """What a run writes at ``step``, without the run: fresh weights and the plain data beside them."""
    config = RunConfig(
        model=TransformerConfig(**SMALL | model), data=data, trainer=TrainerConfig(max_steps=9, accelerator="cpu")
    )
    opened = prepare_data(config)
    config = dataclasses.replace(config, seed=step)
    module = build_module(config, fit_model_config(config.model, opened), opened)
    write(folder, module.state_dict(), module.state, step)


def write(folder, weights, state, step):
    path = folder / "checkpoints" / f"step{step}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    AtomicCheckpointIO().save_checkpoint({"state_dict": weights, "minitx": state, "global_step": step}, path)


def save_bare(folder, tokenizer, **model):
    """A checkpoint of a model of text whose data is of no importance."""
    config = TransformerConfig(vocab_size=tokenizer.vocab_size, **SMALL | model)
    torch.manual_seed(0)
    state = {"config": {}, "model": to_dict(config), "tokenizer": tokenizer.to_dict()}
    write(folder, build_model(config).state_dict(), state, 7)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of every kind of model, and one that recorded its attention."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    text = TextDataConfig(name="text", path=str(folder / "text.txt"), context_len=11)
    dates = DatesDataConfig(locales=("en", "de"), train_size=53, val_size=17, batch_size=6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minitx.data.load.data_dir", lambda: folder)
        save(folder / "text", text, 5)
        save(folder / "text", text, 31)
        save(folder / "unscaled", text, 31, scale="unscaled")
        save(folder / "heads", text, 31, head_dim=6, num_kv_heads=1)
        save(folder / "shallow", text, 31, num_layers=1)
        save(folder / "dates", dates, 4, architecture="encoder_decoder")
        save(folder / "lookup", KeyValueDataConfig(num_keys=13, num_values=5, num_pairs=6, val_size=8), 3)
        save(folder / "digits", DigitsDataConfig(), 2, architecture="vision", head="sequence", pooling="mean")
    marked = train_tokenizer("char", [TEXT], marks=["pad", "cls"])
    save_bare(folder / "classes", marked, architecture="encoder", head="sequence", num_labels=2)
    save_bare(folder / "bytes", train_tokenizer("bpe", [], vocab_size=257))
    save_bare(folder / "sorted", train_tokenizer("char", [TEXT]))
    save_bare(folder / "shifted", train_tokenizer("char", [TEXT.replace("W", "Z")]))
    save_bare(folder / "linear", train_tokenizer("char", [TEXT]), attention="linear")
    model, _, _ = load_model(checkpoint(folder, "text", 5))
    for name, first in (("recorded", "a"), ("again", "a"), ("other", "x")):
        for step in (0, 100):
            real = torch.tensor([[True] * 3 + [False], [True] * 4])
            inputs = {"input_ids": torch.tensor([[1, 2, 3, 0], [4, 5, 2, 1]]), "key_mask": real}
            texts = {"input_ids": [[first, "b", "c", "<pad>"], list("defg")]}
            write_snapshot(take_snapshot(model, inputs, tokens=texts, step=step), folder / name / "attention")
    (folder / "empty").mkdir()
    return folder


def checkpoint(runs, name, step):
    return runs / name / "checkpoints" / f"step{step}.ckpt"


@pytest.fixture
def cli(monkeypatch, capsys, runs, tmp_path):
    """``cli("ckpt_path=…")`` runs ``view_attention.py`` in this process; ``page`` is what it wrote, read back."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["view_attention.py", *map(str, arguments)])
            patch.setattr("minitx.data.load.data_dir", lambda: runs)
            patch.setenv("MINITX_TRACEBACK", "0")
            code = main()
        out, err = capsys.readouterr()
        file = tmp_path / "attention.html"
        page = file.read_text(encoding="utf-8") if file.exists() else ""
        found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
        return SimpleNamespace(code=code, out=out, err=err, html=page, data=json.loads(found[1]) if found else None)

    return run


def test_a_checkpoint_and_a_text_are_enough(cli, runs, tmp_path):
    said = cli(f"ckpt_path={checkpoint(runs, 'text', 31)}", "text=the Word")
    assert (said.code, said.err) == (0, "")
    assert said.data["tokens"] == {"input_ids": list("the Word")}
    assert [layer["kind"] for layer in said.data["layers"]] == ["causal"] * 2
    assert said.data["traces"][0]["name"] == "text"
    assert "Attention on “the Word”" in said.html
    size = (tmp_path / "attention.html").stat().st_size
    assert said.out == f"2 layers, 3 heads, 1 step, 1 model, 8 tokens\nattention.html  {size / 1e6:.2f} MB\n"


def test_the_page_holds_what_the_model_does(cli, runs):
    from base64 import b64decode

    said = cli(f"ckpt_path={checkpoint(runs, 'text', 31)}", "text=Word")
    model, tokenizer, _ = load_model(checkpoint(runs, "text", 31))
    snapshot = take_snapshot(model, {"input_ids": torch.tensor([tokenizer.encode("Word").tolist()])})
    wanted = snapshot.maps[1].weights[snapshot.maps[1].visible]
    packed = said.data["traces"][0]["snapshots"][0]["layers"][1]["weights"]
    got = torch.frombuffer(bytearray(b64decode(packed)), dtype=torch.uint16).double() / 65534
    torch.testing.assert_close(got, wanted.double(), atol=1e-5, rtol=0)


def test_several_checkpoints_are_the_steps_of_the_slider_in_their_order(cli, runs):
    paths = f"{checkpoint(runs, 'text', 31)},{checkpoint(runs, 'text', 5)}"
    said = cli(f"ckpt_path={paths}", "text=was", f"compare={checkpoint(runs, 'unscaled', 31)}")
    assert said.code == 0
    scaled, unscaled = said.data["traces"]
    assert [s["step"] for s in scaled["snapshots"]] == [5, 31]
    assert [s["step"] for s in unscaled["snapshots"]] == [31]
    assert (scaled["name"], unscaled["name"]) == ("text", "unscaled")
    assert unscaled["snapshots"][0]["title"].endswith("scale unscaled")
    assert "2 steps, 2 models, 3 tokens" in said.out


def test_two_checkpoints_of_one_run_have_names_of_their_own(cli, runs):
    paths = [checkpoint(runs, "text", step) for step in (31, 5)]
    said = cli(f"ckpt_path={paths[0]}", "text=was", f"compare={paths[1]}")
    assert [trace["name"] for trace in said.data["traces"]] == [str(path) for path in paths]


def test_an_encoder_decoder_gives_its_own_answer_or_takes_a_target(cli, runs):
    path = checkpoint(runs, "dates", 4)
    model, tokenizer, _ = load_model(path)
    ids = torch.tensor([tokenizer.encode("de: 7.3.1999").tolist()])
    (answer,) = generate(model, ids, max_new_tokens=5)
    said = cli(f"ckpt_path={path}", "text=de: 7.3.1999", "max_new_tokens=5")
    assert said.code == 0
    assert said.data["tokens"]["input_ids"] == list("de: 7.3.1999")
    assert said.data["tokens"]["decoder_input_ids"] == ["<bos>", *token_texts(tokenizer, answer.tolist())]
    assert {layer["kind"] for layer in said.data["layers"]} == {"self", "causal", "cross"}
    said = cli(f"ckpt_path={path}", "text=de: 7.3.1999", "target=1999", "layers=cross")
    assert said.data["tokens"]["decoder_input_ids"] == ["<bos>", *"1999"]
    assert [layer["kind"] for layer in said.data["layers"]] == ["cross"] * 2


def test_a_row_of_validation_takes_the_place_of_a_text(cli, runs):
    said = cli(f"ckpt_path={checkpoint(runs, 'dates', 4)}", "row=2")
    assert said.data["tokens"]["decoder_input_ids"][0] == "<bos>"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", "".join(said.data["tokens"]["decoder_input_ids"][1:]))
    said = cli(f"ckpt_path={checkpoint(runs, 'text', 5)}", "row=1")
    assert len(said.data["tokens"]["input_ids"]) == 11
    assert "Attention on validation row 1" in said.html


def test_a_task_without_a_tokenizer_shows_a_row_or_ids(cli, runs):
    path = f"ckpt_path={checkpoint(runs, 'lookup', 3)}"
    tokens = cli(path).data["tokens"]["input_ids"]
    assert len(tokens) == 7
    assert all(re.fullmatch(r"\d+:\d+", token) for token in tokens[:-1])
    assert re.fullmatch(r"\d+", tokens[-1])
    assert cli(path, "text=" + " ".join(tokens)).data["tokens"]["input_ids"] == tokens


def test_an_image_is_a_row_whose_tokens_are_patches(cli, runs):
    said = cli(f"ckpt_path={checkpoint(runs, 'digits', 2)}", "row=3")
    assert said.code == 0
    assert said.data["tokens"]["pixel_values"][-1] == "3,3"


def test_a_text_to_classify_begins_with_its_mark_as_in_training(cli, runs):
    assert cli(f"ckpt_path={checkpoint(runs, 'classes', 7)}", "text=was").data["tokens"]["input_ids"] == ["<cls>", *"was"]


def test_bytes_are_shown_as_their_characters(cli, runs):
    tokens = cli(f"ckpt_path={checkpoint(runs, 'bytes', 7)}", "text=a你").data["tokens"]["input_ids"]
    assert tokens == ["a", "你·1/3", "你·2/3", "你·3/3"]


def test_a_run_that_recorded_its_attention_needs_no_text(cli, runs):
    said = cli(f"ckpt_path={runs / 'recorded'}")
    assert said.code == 0
    assert said.data["tokens"] == {"input_ids": list("abc")}  # without its padding
    assert [s["step"] for s in said.data["traces"][0]["snapshots"]] == [0, 100]
    said = cli(f"ckpt_path={runs / 'recorded'}", "row=1", "layers=-1", f"compare={runs / 'again'}")
    assert said.data["tokens"] == {"input_ids": list("defg")}
    assert [layer["name"] for layer in said.data["layers"]] == ["blocks.1.attention.core"]
    assert [trace["name"] for trace in said.data["traces"]] == ["recorded", "again"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "ckpt_path is missing"),
        ("ckpt=1", "ckpt is not a key; did you mean ckpt_path?"),
        ("fast", "fast is not key=value; --help shows the keys"),
        ("ckpt_path=nowhere.ckpt text=a", "ckpt_path=nowhere.ckpt is not a file"),
        ("ckpt_path={runs}/text.txt text=a", "ckpt_path={runs}/text.txt cannot be read as a checkpoint of minitx"),
        ("ckpt_path={text}", "text is missing: give text=TEXT for the model to read, or row=N for a row"),
        ("ckpt_path={text} text=", "text is empty: the model needs one token at least"),
        ("ckpt_path={text} text=" + "e" * 65, "text has 65 tokens, but the model reads 64 at most (max_len)"),
        ("ckpt_path={text} text=é", "text has the character 'é' (U+00E9), which is none of the"),
        ("ckpt_path={text} text=e row=1", "row=1 takes the place of text: give one of them"),
        ("ckpt_path={text} row=-1", "row=-1 must be zero or more"),
        ("ckpt_path={text} row=x", "row=x must be a whole number"),
        ("ckpt_path={text} row=999", "row=999 must lie in [0, "),
        ("ckpt_path={text} target=e", "target belongs to a text: give text=TEXT, too"),
        ("ckpt_path={text} text=e target=e", "target is for encoder-decoders, and the model's architecture is decoder"),
        ("ckpt_path={text} text=e num_beams=0", "num_beams=0 must be positive"),
        ("ckpt_path={text} text=e layers=2", "layers: 2 is none of the 2 layers"),
        ("ckpt_path={text} text=e layers=cross", "layers: 'cross' is none of the 2 layers"),
        ("ckpt_path={text} text=e device=toaster", "device=toaster cannot be used"),
        ("ckpt_path={text} text=e output=no/such/page.html", "output=no/such/page.html is in a folder that does not exist"),
        ("ckpt_path={text} text=e output=.", "output=. is a folder, but must name a file"),
        ("ckpt_path={text},{text} text=e", "ckpt_path has two checkpoints of step 31"),
        ("ckpt_path={text} text=e compare={recorded}", "compare={recorded} must be a checkpoint as ckpt_path is"),
        ("ckpt_path={recorded} compare={text}", "compare={text} must be a run folder as ckpt_path is"),
        ("ckpt_path={text} text=e compare=gone.ckpt", "ckpt_path=gone.ckpt is not a file"),
        ("ckpt_path={text} text=e compare={lookup}", "compare={lookup} has model.vocab_size=18, but {text} has"),
        (
            "ckpt_path={text} text=e compare={dates}",
            "compare={dates} has model.architecture=encoder_decoder, but {text} has decoder",
        ),
        ("ckpt_path={text} text=e compare={shallow}", "'shallow' has other layers than the first snapshot: 1 layers against 2"),
        ("ckpt_path={sorted} text=e compare={shifted}", "compare={shifted} reads text with another tokenizer than {sorted}"),
        ("ckpt_path={recorded} compare={other}", "'other' has other tokens: input_ids[0] is 'x' against 'a'"),
        ("ckpt_path={linear} text=e", "DecoderLM has no attention core with weights to look at"),
        ("ckpt_path={lookup} text=1,2", "text has '1,2', but the model has no tokenizer: give ids, or ID:TYPE"),
        ("ckpt_path={lookup} text=18", "text has 18 among its ids, which must lie in [0, 18)"),
        ("ckpt_path={lookup} text=1:6", "text has 6 among its types, which must lie in [0, 6)"),
        ("ckpt_path={digits} text=1", "text is for models of text: an image is chosen by row=N"),
        ("ckpt_path={digits} row=359", "row=359 must lie in [0, 359), the validation rows"),
        ("ckpt_path={dates} text=7 target=" + "7" * 64, "target has 65 tokens, but the model reads 64 at most (max_len)"),
        (
            "ckpt_path={dates} text=7 max_new_tokens=99",
            "the model's own answer cannot be had: max_new_tokens=99 after 1 tokens",
        ),
        ("ckpt_path={recorded} text=e", "text is for checkpoints: a run's folder holds sentences of its own"),
        ("ckpt_path={recorded} row=2", "row=2 must lie in [0, 2), the sentences that {recorded} holds"),
        ("ckpt_path={recorded} layers=7", "layers: 7 is none of the 2 layers blocks.0.attention.core"),
        ("ckpt_path={runs}/empty", "{runs}/empty holds no snapshots of attention; train with callbacks.probe.weights_every=N"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(cli, runs, tmp_path, arguments, sentence):
    steps = {"text": 31, "dates": 4, "lookup": 3, "digits": 2, "linear": 7, "shallow": 31, "sorted": 7, "shifted": 7}
    names = {name: checkpoint(runs, name, step) for name, step in steps.items()}
    names |= {"runs": runs, **{name: runs / name for name in ("recorded", "other")}}
    said = cli(*(argument.format(**names) for argument in arguments.split()))
    assert said.err.startswith(f"error: {sentence.format(**names)}")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert not (tmp_path / "attention.html").exists()


def test_models_may_differ_in_all_that_leaves_tokens_layers_and_heads_alone(cli, runs):
    said = cli(f"ckpt_path={checkpoint(runs, 'text', 5)}", "text=e", f"compare={checkpoint(runs, 'heads', 31)}")
    assert said.code == 0


def test_a_page_that_no_browser_opens_is_refused(cli, runs, monkeypatch):
    monkeypatch.setattr("minitx.cli.view.LARGEST_PAGE", 100)
    said = cli(f"ckpt_path={checkpoint(runs, 'text', 31)}", "text=the Word")
    assert said.code == 2
    assert said.err.startswith("error: the page would have 0 MiB, more than browsers take (0): choose some layers=")


def test_layers_are_numbers_or_parts_of_names():
    assert parse(ViewConfig, ["ckpt_path=x", "layers=[0, -1, cross]"]).chosen_layers == [0, -1, "cross"]
    assert parse(ViewConfig, ["ckpt_path=x"]).chosen_layers is None


def test_help_names_every_key(cli):
    said = cli("--help")
    assert (said.code, said.out) == (0, help_text(ViewConfig, USAGE))
    assert all(f"{field.name}=" in said.out for field in dataclasses.fields(ViewConfig))


def test_the_script_answers_a_typo_before_torch_is_loaded():
    code = (
        "import sys\n"
        "from minitx.cli.view import main\n"
        "sys.argv = ['view_attention.py', 'ckpt=1']\n"
        "assert main() == 2\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
    assert SCRIPT.is_file()
