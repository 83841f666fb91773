"""``check.py``: what is typed, what is shown, and the exit code."""

import importlib
import inspect
import json
import pickle
import shlex
import sys

import pytest
import torch

from minitx.check import check_attention, check_model
from minitx.cli import check
from minitx.cli.command_line import compose_program, meanings
from minitx.cli.compose import compose_config
from minitx.cli.launch import run_training
from minitx.cli.source_files import object_at
from minitx.training.checkpoint_files import write_checkpoint
from tests.cli.conftest import TINY

SOURCE = """
import torch

def right(q, k, v, mask=None):
    from minitx.nn import scaled_dot_product_attention
    return scaled_dot_product_attention(q, k, v, mask)

def no_scale(q, k, v):
    return (q @ k.mT).softmax(-1) @ v

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        return no_scale(self.q_proj(x), self.k_proj(x), self.v_proj(x))

def made():
    return Layer()

def in_one_tuple(batch):
    return no_scale(*batch)

def adapter(function, query, key, value):
    return function((query, key, value))

class NeedsSizes(torch.nn.Module):
    def __init__(self, vocab_size, n_positions):
        super().__init__()

number = 3
"""


MODEL = """
from torch import nn

class Own(nn.Module):
    def __init__(self, leaks=False):
        super().__init__()
        self.table, self.head, self.leaks = nn.Embedding(31, 8), nn.Linear(8, 31), leaks

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x.sum(1, keepdim=True) + x if self.leaks else x.cumsum(1))

model = Own()

def leaky():
    return Own(leaks=True)

class ReadsDict(Own):
    def forward(self, batch):
        return super().forward(batch["ids"])

def in_dict(model, ids):
    return model({"ids": ids})
"""


@pytest.fixture
def program(tmp_path, monkeypatch, capsys):
    """Run ``check.py`` beside ``mine.py``: its exit code, what it shows, and its complaint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def attention(q, k, v:\n")
    (tmp_path / "raises.py").write_text("{}['weights']\n")
    (tmp_path / "needs.py").write_text("import absent_package\n")
    (tmp_path / "model.py").write_text(MODEL)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["check.py", *words])
        code = check.main()
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_the_exit_code_is_1_only_where_something_is_wrong(program):
    code, shown, _ = program("mine.py:right")
    assert code == 0 and shown.startswith("right, seed 0\ncalled as  right(q, k, v, mask)")
    code, shown, _ = program("mine.py:no_scale", "seed=4")
    assert code == 1 and "no_scale, seed 4" in shown and "wrong      no scale" in shown


def test_a_stage_is_graded_into_a_file(program, tmp_path):
    code, shown, _ = program("mine.py:no_scale", "stage=2", "json=out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert code == 1 and "points     0 of 3 in stage 2" in shown
    assert read["points"] == {"reached": 0, "most": 3} and not read["is_right"]


def test_expect_and_only_make_a_layer_a_model_of_vectors(program, tmp_path):
    text = "from minitx.nn import MultiHeadAttention\n\nlayer = MultiHeadAttention(12, 3)\n"
    (tmp_path / "alone.py").write_text(text, encoding="utf-8")
    code, shown, _ = program("alone.py:layer", "expect=causal", "only=causality")
    assert code == 1 and "later tokens change earlier outputs" in shown


def test_help_says_that_the_file_runs_and_shows_every_key_and_its_meaning(program):
    code, shown, _ = program("--help")
    assert code == 0 and "Python runs the file" in shown
    for name, meaning in meanings(check.CheckConfig).items():
        assert f"  {name}=" in shown and meaning in shown


@pytest.mark.parametrize(("words", "complaint"), [
    ([], "FILE.py:NAME is missing"),
    (["mine.py"], "mine.py must be FILE.py:NAME"),
    (["nowhere.py:right"], "nowhere.py does not exist"),
    (["mine.py:rigth"], "mine.py does not define rigth; did you mean right?"),
    (["mine.py:number"], "check_attention needs a function, a class or a module, got int"),
    (["broken.py:attention"], "SyntaxError: '(' was never closed (broken.py, line 1)\n"),
    (["model.py:model", "stage=1"], "stage= is for functions and layers, but Own is a model\n"),
    (["model.py:leaky", "mask=keep"], "mask= is for functions and layers, but Own is a model; an adapter declares the mask of a model: call="),
    (["model.py:model", "only=causalty"], "only=causalty must be one of"),
    (["mine.py:right", "only=rows"], "only and expect are for models, but this is a function"),
    (["mine.py:NeedsSizes", "only=rows"], "write a function without arguments that returns NeedsSizes(vocab_size, n_positions)"),
    (["raises.py:model"], "raises.py cannot be imported: KeyError: 'weights'"),
    (["model=nowhere"], "model=nowhere does not exist"),
    (["model=."], "model=. is neither a Hugging Face folder (config.json) nor a run"),
    (["mine.py:right", "model=."], "cannot be combined"),
    (["mine.py:in_one_tuple", "call=nowhere"], "mine.py does not define nowhere"),
    (["mine.py:in_one_tuple", "call=number"], "call=number must be a function, got int"),
    (["mine.py:in_one_tuple", "call=made"], "call=made must take (function, query, key, value, mask), or no mask, got ()"),
    (["model.py:ReadsDict", "call=leaky"], "call=leaky must take (model, input_ids, keep), or no mask, got ()"),
    (["model=.", "call=adapter"], "call=adapter needs a file, because model= has none: call=FILE.py:adapter"),
    (["mine.py:right", "strict=true", "call=adapter"], "cannot be combined"),
    (["mine.py:right", "stag=3"], "did you mean stage?"),
    (["mine.py:right", "stage=6"], "stage=6 is not allowed"),
    (["mine.py:right", "mask=show"], "mask=show is not allowed: one of keep, hide"),
    (["mine.py:right", "stage=1", "strict=true"], "cannot be combined"),
    (["model.py:model", "mask=keep", "only=padding"], "only and mask cannot be combined"),
    (["model.py:model", "mask=keep", "expect=causal"], "expect and mask cannot be combined"),
    (["needs.py:attention"], "ModuleNotFoundError: No module named 'absent_package'; install its package"),
    (["mine.py:right", "json=nowhere/out.json"], "in a folder that does not exist"),
])  # fmt: skip
def test_what_is_mistyped_ends_with_one_sentence_and_the_exit_code_2(program, words, complaint):
    code, shown, error = program(*words)
    assert code == 2 and shown == "" and complaint in error
    assert error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("name", ["Own", "model"])
def test_a_class_and_an_instance_of_a_model_are_checked(program, name):
    code, shown, _ = program(f"model.py:{name}", "only=rows,causality")
    assert code == 0 and shown.startswith("Own, seed 0\ncalled as  Own(ids)") and "passed     call, rows, causality" in shown


@pytest.mark.parametrize("words", [(), ("stage=1",)])
@pytest.mark.parametrize("name", ["Layer", "made"])
def test_a_layer_that_a_class_or_a_function_returns_is_checked(program, name, words):
    code, shown, _ = program(f"mine.py:{name}", *words)
    assert code == 1 and shown.startswith("Layer, seed 0") and "Layer.forward(x)" in shown and "wrong      no scale" in shown


def test_an_adapter_of_the_same_or_of_another_file_calls_what_is_checked(program):
    code, shown, _ = program("mine.py:in_one_tuple", "call=adapter")
    assert code == 1 and "called as  adapter(query, key, value)" in shown and "wrong      no scale" in shown
    for word in ("call=in_dict", "call=model.py:in_dict"):
        code, shown, _ = program("model.py:ReadsDict", "only=causality", word)
        assert code == 0 and "ReadsDict by in_dict(ids)" in shown
        code, shown, _ = program("model.py:ReadsDict", "only=causality,cache", word)
        assert code == 2 and "not tried  cache: call= passes no cache" in shown and "passed     call, causality" in shown


GPT = """
from torch import nn
from layers import FACTOR

class GPT(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(31, 8), nn.Linear(8, 31))

    def forward(self, ids):
        return super().forward(ids) * FACTOR

def adapter(model, ids):
    return model(ids)
"""


def test_two_files_of_one_name_are_two_modules_and_import_their_own_neighbours(program, tmp_path):
    for folder, factor in (("ref", 2), ("port", 3)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.py").write_text(GPT)
        (tmp_path / folder / "layers.py").write_text(f"FACTOR = {factor}\n")
    first, second, again = (object_at(f"{folder}/model.py:GPT") for folder in ("ref", "port", "ref"))
    assert [kind.forward.__globals__["FACTOR"] for kind in (first, second, again)] == [2, 3, 2]
    for kind in (first, second, again):
        assert pickle.loads(pickle.dumps(kind)) is kind and "nn.Sequential" in inspect.getsource(kind)
    code, shown, error = program("port/model.py:GPT", "like=ref/model.py:GPT")
    assert code == 1 and "1.5 times" in shown, shown + error
    code, shown, error = program("model.py:Own", "call=ref/model.py:adapter", "only=rows")  # the adapter of the other model.py
    assert code == 0 and "Own by adapter(ids)" in shown, error


def test_a_file_in_a_package_is_its_module_and_a_namesake_in_another_folder_is_another_one(program, tmp_path):
    for folder, factor in (("new", 2), ("old", 3)):
        package = tmp_path / folder / "src" / "lib_to_check"
        (package / "models").mkdir(parents=True)
        (package / "__init__.py").write_text("from .models.gpt import GPT\n")
        (package / "models" / "__init__.py").touch()
        (package / "models" / "gpt.py").write_text(GPT.replace("from layers", "from ..layers") + "from alone import NAME\n")
        (package / "models" / "alone.py").write_text("NAME = 'beside the file'\n")
        (package / "layers.py").write_text(f"FACTOR = {factor}\n")
    new, old = (object_at(f"{folder}/src/lib_to_check/models/gpt.py:GPT") for folder in ("new", "old"))
    assert (new.__module__, new.forward.__globals__["FACTOR"]) == ("lib_to_check.models.gpt", 2)
    assert (old.__module__, old.forward.__globals__["FACTOR"]) == ("lib_to_check.models.gpt", 3)
    assert object_at("old/src/lib_to_check/__init__.py:GPT") is old  # a second import of one package
    code, shown, error = program("new/src/lib_to_check/models/gpt.py:GPT", "like=old/src/lib_to_check/models/gpt.py:GPT")
    assert code == 1 and "0.6667 times" in shown, shown + error
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("def attention(q, k, v): ...\n")
    code, _, error = program("torch/__init__.py:attention")
    assert code == 2 and "torch/__init__.py cannot be imported: torch is already " in error


@pytest.mark.parametrize("name", ["random", "colorsys"])
def test_a_file_named_as_a_library_does_not_take_its_place(program, tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    code, _, error = program(f"{name}.py:in_one_tuple", "call=adapter")
    assert code == 1, error
    assert hasattr(importlib.import_module(name), {"random": "Random", "colorsys": "rgb_to_hsv"}[name])


def test_the_command_in_a_report_of_a_model_repeats_it(program):
    code, shown, _ = program("model.py:leaky", "only=rows,causality", "expect=causal", "seed=2")
    assert code == 1 and "later tokens change earlier outputs" in shown
    command = next(line for line in shown.splitlines() if "minitx-check" in line).split()
    assert command == ["minitx-check", "model.py:leaky", "expect=causal", "only=causality", "seed=2"]
    code, again, _ = program(*command[1:])
    assert code == 1 and command == next(line for line in again.splitlines() if "minitx-check" in line).split()


def test_a_folder_of_hugging_face_is_checked_and_its_code_does_not_run(program, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 31, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    folder = tmp_path / "gpt"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder)
    (folder / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.Own", "AutoConfig": "modeling_own.Own"}
    (folder / "config.json").write_text(json.dumps(config))
    code, shown, error = program("model=gpt", "only=causality,padding", "json=out.json")
    assert code == 0, error
    assert "GPT2LMHeadModel, seed 0" in shown and shown.endswith("passed     call, causality\n")  # a note tells about padding
    assert not (tmp_path / "ran").exists()
    assert json.loads((tmp_path / "out.json").read_text())["subject"] == "GPT2LMHeadModel"


def test_a_run_and_its_checkpoint_are_checked(program, tmp_path):
    run_training(compose_config([*TINY, "trainer.max_steps=1"]), tmp_path / "run", "a test")
    for path in ("run", "run/checkpoints/last.ckpt"):
        code, shown, error = program(f"model={path}", "only=causality,cache")
        assert code == 0, error
        assert "DecoderLM, seed 0\ncalled as  DecoderLM(input_ids, key_mask)" in shown
        assert "passed     call, causality, cache" in shown


def test_a_checkpoint_that_names_a_class_of_another_package_is_refused(program, tmp_path):
    run_training(compose_config([*TINY, "trainer.max_steps=1"]), tmp_path / "run", "a test")
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    content["minitx"]["model"] = {"_target_": "model.Own"}
    write_checkpoint(content, path)
    (tmp_path / "model.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code, shown, error = program("model=run", "only=rows")
    assert code == 2 and not shown and "model.Own" in error and "trust" in error
    assert not (tmp_path / "ran").exists()


WORDS = (
    ["m.py:Net"],
    ["my model.py:Net", "expect=window:4"],
    ["model=runs/own", "trust=true"],
    ["m.py:Net", "expect=causal", "call=mine.py:f"],
    ["m.py:Net", "device=cuda:1"],
)


@pytest.mark.parametrize("words", WORDS)
def test_the_command_that_repeats_a_finding_has_every_word_that_changes_the_check(words, monkeypatch):
    given = {}
    monkeypatch.setattr("minitx.check.model_checks.check_model", lambda model, **options: given.update(options))
    config = compose_program(check.CheckConfig, [word if "=" in word else f"target={word}" for word in words])
    check._model_report(None, config, None)
    assert shlex.split(given["repeat"]) == ["minitx-check", *words]


class ReadsDict(torch.nn.Module):
    def forward(self, batch):
        return batch["ids"]


def test_what_cannot_be_called_gets_advice():
    block = torch.nn.Sequential(
        torch.nn.Linear(32, 96), torch.nn.Linear(96, 32), torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
    )
    for report in (check_model(ReadsDict()), check_attention(block)):
        assert report.mend_first.id == "cannot-be-called" and report.mend_first.advice, report
