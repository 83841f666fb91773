"""A mistake in what was typed ends with exit code 2, at most three lines that name its key, and no folder.

Cases are checked by exit code and key, not by their wording.
"""

import os
import subprocess
import sys

import pytest

from minitx.cli.compose import compose_grid
from tests.cli.conftest import PROGRAMS, RESULT, TINY, assert_named, put
from tests.cli.processes import ROOT

STEP = ("debug=one_step", *(word for word in TINY if "val_size" not in word))

# what was typed, and what the answer must name; found before anything is read
COMPOSED = {
    # keys and groups
    "++model.num_head=3": "did you mean model.num_heads?",
    "model=nonsense": "char_small",
    "modle=char_small": "modle",
    "~optimizer": "optimizer",
    "logger.wandb.name=x": "'logger=[csv,wandb]'",
    "optimizer.lr=1,0.1": "add -m to run every value",
    "modle.num_layers=2": "did you mean model.num_layers?",
    "experiment=char_ml": "did you mean char_lm?",
    "model._target_=own.Net": "No module named 'own'; go to the folder that contains own.py or own/",
    "model._target_=Net": "No module named 'Net'; write MODULE.NAME",
    "model=gpt2 model._target_=torch.nn.Linear": "'- override /model: null'",
    "model.d_k=8": "Set model.num_heads, or model.head_dim",
    "trainer.gradient_clip_val=1": "trainer.clip",
    "trainer.fast_dev_run=true": "trainer.fast_dev_run is not a key; allowed here",
    "experiment=speedrun_char schedule=constant": "a config file sets it: add ~schedule.final_lr",
    "model.dropout=nan": "model.dropout=nan",
    "optimizer.lr=0": "optimizer.lr=0.0 must be positive",
    "optimizer.rules=[{match:'('}]": "optimizer.rules[0].match=(",
    "schedule=linear schedule.decay_fraction=0.1": "schedule.decay_fraction is not a key",
    "+model._scale=2": "model._scale is not a key",
    "+model._args_=[2]": "model._args_=[2]",
    "+optimizer._args_=2": "optimizer._args_=2 must be a list",
    "trainer.max_steps={_target_:x}": "trainer.max_steps has a _target_",
    "trainer.extra=[1]": "trainer.extra",
    # values
    "model.scale=null": "unscaled",
    "model.window=[]": "model.window=[]",
    "seed=???": "seed",
    "experiment=classify": "data.path is missing",
    "experiment=scaling_ablation ablation.launcher=slurn": "did you mean slurm?",
    "experiment=scaling_ablation ckpt_path=last": "to resume a grid, repeat its command",
    "experiment=scaling_ablation trainer.plan=true": "trainer.plan=true is for single runs",
    "trainer.plan=true trainer.devices=0": "trainer.devices=0",
    "trainer.plan=true ckpt_path=a.ckpt": "trainer.plan=true describes a new run",
    # Hydra's grammar
    "max_steps": "max_steps",
    "--experiment=kv_lookup": "keys have no dashes: use experiment=kv_lookup",
    "--config-dir=nowhere": "nowhere",
    "data.tokenizer=a(b": "into two pairs of quotes",
    "seed=${seed}": "seed",
    "data.path=~/a": "data.path is not a key",
    "output_dir=\udcff": r"'output_dir=\udcff' is not UTF-8 text",
    "--cfg nonsense": "choose from 'job'",
    "init_from.path='~no.such.user/a'": "init_from.path=~no.such.user/a does not exist",
    "model..num_heads=3": "'model..num_heads' is not a valid key",
    "=3": "=3 has no key",
    "callbacks=null": "callbacks=[] mean none",
}

# found in files, machine or model: STEP stands before what was typed
BUILT = {
    "logger=[csv,wandb] logger.wandb.offlin=true": "did you mean logger.wandb.offline?",
    "logger=[csv,wandb] logger.wandb.entitty=me": "did you mean logger.wandb.entity?",
    "logger=[csv,wandb] logger.wandb.nonsense=1": "logger.wandb.nonsense is not a key",
    "logger=[csv,tensorboard] logger.tensorboard.log_grap=true": "did you mean logger.tensorboard.log_graph?",
    "callbacks=[default,early_stopping] callbacks.early_stopping.patienc=3": "did you mean callbacks.early_stopping.patience?",
    "experiment=kv_lookup ckpt_path=. output_dir=out": "ckpt_path=. is a folder without a checkpoint",
    "optimizer.head_di=4": "optimizer.head_di is not a key; allowed here",
    "model.backend=sdpa model.softcap=5": "sdpa",
    "model.embed_dim=1000000000000000000": "model",
    "optimizer=muon trainer.strategy=sharded": "optimizer=muon needs whole matrices",
    "schedule.warmup_steps=9999": "schedule.warmup_steps=9999 must not exceed trainer.max_steps",
    "+callbacks.a={_target_:lightning.pytorch.callbacks.Timer,nonsense:1}": "callbacks.a",
    "imports=[no_such_module_anywhere]": "imports=no_such_module_anywhere",
    "model.architecture=encoder": "model.architecture=encoder",
    "trainer.devices=2 trainer.accelerator=auto": "trainer.devices=2",
    "trainer.plan=true trainer.devices=5 trainer.num_nodes=3": "divisible by trainer.accumulate=1 x trainer.devices=15",
    "trainer.plan=true trainer.strategy=sharded optimizer=muon": "optimizer=muon needs whole matrices",
    "trainer.plan=true hydra.run.dir=new model.backend=nonsense": "nonsense",
    "trainer.accelerator=cuda": "trainer.accelerator=cuda is not allowed: one of auto, cpu, gpu, mps",
    "+trainer.extra.foo=1": "trainer.extra.foo",
    "trainer.extra.logger=1": "trainer.extra.logger is not allowed: use logger",
    "ckpt_path=runs/lr=1/last.ckpt": "ckpt_path=runs/lr=1/last.ckpt does not exist",
    "output_dir=short.txt/below": "output_dir=",
    "output_dir=new/run model.backend=nonsense": "nonsense",
    "imports=[leaves]": "error: no such machine",
    "hydra.run.dir=short.txt/below": "short.txt/below",
    "--cfg job --package modle": "modle",
}


OTHERS = {
    # a checkpoint or a run, and what is asked of it
    "evaluate {text} output=no/such/found.json": "output=no/such/found.json",
    "evaluate {text} device=toaster": "device=toaster",
    "evaluate {text} data.tokenizer=bpe": "data.tokenizer has no effect",
    "evaluate {text} num_beams=2": "num_beams=2 has no effect",
    "evaluate {text} data.path=小说.txt": "data.path=小说.txt",
    "evaluate {text} batch_size=4,5": "write 'batch_size=[...]' for a list",
    "evaluate {text} data.path=a(b": "into two pairs of quotes",
    "evaluate {text} =3": "=3 has no key",
    "evaluate {text} --split=test": "keys have no dashes: use split=test",
    "evaluate {text} split=val split=test": "split=test",  # the last one counts, as in train.py
    "evaluate {text} evaluate.split=test": "evaluate is not a key",
    "generate {text} prompt=God length_penalty=2": "length_penalty=2.0 has no effect",
    "generate {text} prompt=God top_k=[": "top_k=[",
    "generate {text} prompt=God top_k=5": "top_k=5",
    "generate {text} prompt=God stop=ab": "stop=",
    "generate {text} prompt=né": "U+00E9",
    "generate {text} prompt=\udcff": "prompt",
    "generate {lookup} prompt=a": "ckpt_path=",
    "view {text}": "text",
    "view {text} row=999": "row=999",
    "view {text} text=e compare=lost.ckpt": "compare=lost.ckpt does not exist",
    "view {text} text=e layers=2": "layers",
    "view {text},{runs}/text/checkpoints/best.ckpt text=e": "step 20",
    "view {text} text=e compare={runs}/lookup": "compare=",
    "view {text} text=e compare={runs}/bytes/checkpoints/last.ckpt": "vocab_size",
    "view {dates} text=7 max_new_tokens=99": "max_new_tokens=99",
    "view ckpt_path={runs}/lookup row=13": "row=13",
    "view ckpt_path={runs}/lookup compare=lost": "compare=lost does not exist",
    "view ckpt_path=lost compare={runs}/lookup": "ckpt_path=lost does not exist",
    "view --play output=play.gif": "output=play.gif must end in .html",
    "view ckpt_path=" + "a.ckpt,b.ckpt," * 500 + " text=e": "ckpt_path=a.ckpt does not exist",
    "evaluate ckpt_path=" + "a" * 300: "does not exist",
    "export {text} output=out model_type=bert": "Bert",
    "export {text} output=out chat_template=lost.jinja": "chat_template=lost.jinja",
}


@pytest.fixture
def no_run(monkeypatch):
    """A mistake that slips through would train for minutes."""
    for name in ("minitx.cli.train.run_training", "minitx.cli.ablate.pool_of"):
        monkeypatch.setattr(name, lambda *args, **kwargs: pytest.fail("the run began"))


@pytest.mark.parametrize("typed", COMPOSED)
def test_a_mistake_in_the_config_is_named(cli, place, no_run, typed):
    assert_named(cli(*typed.split()), COMPOSED[typed])
    assert list(place.iterdir()) == []


def test_an_option_of_the_users_with_the_name_of_one_of_ours_is_refused_with_both_paths(cli, place, no_run):
    path, ours = (folder / "optimizer" / "sgd.yaml" for folder in (place / "conf", ROOT / "configs"))
    put(path, "defaults: [/schema@_here_: optimizer]\nname: sgd\nlr: 0.77\n")
    said = cli("--config-dir=conf")
    assert_named(said, "conf/optimizer/sgd.yaml")
    assert str(ours) in said.err
    path.write_bytes(ours.read_bytes())
    assert "nonsense" in cli("--config-dir=conf", "model=nonsense").err  # a copy hides nothing


def test_keys_that_a_file_inherits_for_another_target_are_refused_with_the_line_that_removes_them(cli, place, monkeypatch):
    text = "# @package _global_\ndefaults: [override /model: {}]\nmodel: {{_target_: torch.nn.Linear, in_features: 3, out_features: 2}}\n"
    put(place / "conf" / "experiment" / "mine.yaml", text.format("gpt2"))
    assert_named(cli("--config-dir=conf", "experiment=mine"), "'- override /model: null'")
    put(place / "conf" / "experiment" / "mine.yaml", text.format("null"))
    monkeypatch.setattr("minitx.cli.train.run_training", lambda *_: RESULT)
    assert cli("--config-dir=conf", "experiment=mine").code == 0


@pytest.mark.parametrize("typed", BUILT)
def test_a_mistake_that_only_files_machine_or_model_show_is_named(cli, place, monkeypatch, typed):
    (place / "short.txt").write_text("too short", encoding="utf-8")
    put(place.parent / "above" / "leaves.py", "raise SystemExit('no such machine')")
    monkeypatch.syspath_prepend(place.parent / "above")
    chosen = {word.partition("=")[0] for word in typed.split()}
    step = (word for word in (*STEP, "trainer.rehearse=true") if word.partition("=")[0] not in chosen)
    assert_named(cli(*step, *typed.split()), BUILT[typed])
    assert [path.name for path in place.iterdir()] == ["short.txt"]


@pytest.mark.parametrize("program", ["evaluate", "generate", "view", "export"])
def test_a_checkpoint_that_is_not_named_or_not_there_is_named(assert_refused, place, program):
    assert_refused("ckpt_path", program=program)
    needed = {"view": ["text=a"], "export": ["output=out"]}.get(program, [])
    assert_refused("missing.ckpt", "ckpt_path=missing.ckpt", *needed, program=program)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("program", ["evaluate", "generate", "view", "export"])
def test_a_folder_without_a_checkpoint_is_named_as_one(assert_refused, place, program):
    (place / "empty" / "checkpoints").mkdir(parents=True)
    needed = {"view": ["text=a"], "export": ["output=out"]}.get(program, [])
    said = assert_refused("ckpt_path=empty is a folder without a checkpoint", "ckpt_path=empty", *needed, program=program)
    assert [path.name for path in place.iterdir()] == ["empty"], said


def test_a_folder_of_checkpoints_offers_the_newest(assert_refused, last, place):
    file = last("text").removeprefix("ckpt_path=")
    folder = os.path.dirname(file)
    assert_refused(f"ckpt_path={folder}/", f"ckpt_path={folder}", program="evaluate")


@pytest.mark.parametrize("name", ["sklearn.missing_part", "sklearn"])
def test_a_target_whose_module_needs_an_extra_names_the_extra(cli, place, monkeypatch, name):
    """As the template's example does without scikit-learn."""
    monkeypatch.setitem(sys.modules, "sklearn", None)
    put(place / "needs_more.py", f"import {name}\n")
    monkeypatch.syspath_prepend(place)
    assert_named(cli("data._target_=needs_more.Digits"), "with the extra vision")


def test_an_experiment_of_ones_own_without_its_first_line_is_told_of_it(cli, place, no_run):
    for text in ("trainer: {max_steps: 3}", "defaults: [override /data: kv_lookup]", "defaults: [kv_lookup, _self_]"):
        put(place / "mine" / "experiment" / "own.yaml", text)
        assert_named(cli("--config-dir=mine", "experiment=own", "seed=3"), "# @package _global_")


def test_what_stands_beside_a_grid_and_would_reach_none_of_its_runs_is_refused(cli, place, no_run):
    put(place / "conf" / "primary.yaml", "defaults: [train, _self_]\noptimizer: {weight_decay: 0.3}\n")
    words = "--config-dir=conf", "--config-name=primary", "experiment=scaling_ablation", "ablation=smoke"
    assert_named(cli(*words), "optimizer is set outside of ablation")
    assert compose_grid(["experiment=speedrun_char", "ablation=speedrun"])  # all of its runs have this experiment


@pytest.mark.parametrize("typed", OTHERS)
def test_a_mistake_in_another_program_is_named(assert_refused, runs, last, place, typed):
    paths = {"runs": runs, **{name: last(name) for name in ("text", "lookup", "dates")}}
    program, *arguments = typed.format(**paths).split(" ")
    assert_refused(OTHERS[typed], *arguments, program=program)
    assert list(place.iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_written_over(cli, place):
    assert cli(*STEP, "output_dir=run").code == 0
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    for words in ([], ["trainer=ddp_cpu"]):
        assert_named(cli(*STEP, *words, "output_dir=run"), "output_dir=")
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "typed",
    [
        "traceback=true",
        "traceback=True",
        "+traceback=yes modle=1",
        "++traceback=true",
        "-m ++traceback=true",
        "--config-dir=conf experiment=traced",
    ],
)
def test_traceback_shows_where_an_error_came_from_wherever_it_is_set(cli, place, typed):
    put(place / "conf" / "experiment" / "traced.yaml", "# @package _global_\ntraceback: true\n")
    for words, is_shown in ((typed, True), (typed + " traceback=false", False)):
        said = cli(*words.split(), "model.num_heads=abc")
        assert said.code == 2
        assert ("Traceback (most recent call last)" in said.err) == is_shown, words
    assert "Traceback" in cli("traceback=True", "ckpt_path=lost", program="evaluate").err


def test_a_run_that_stops_being_finite_exits_with_3_or_records_it(cli):
    wild = (*STEP, "trainer.max_steps=4", "optimizer.lr=1e30", "model.norm_position=post")
    assert_named(cli(*wild), "not finite", code=3)
    assert cli(*wild, "on_nonfinite=record").code == 0


def test_a_typo_is_answered_before_torch_is_imported(tmp_path):
    """In one process of its own, for all programs."""
    typed = [("train", "trainer.max_step=3"), ("train", "trainer.val_every=-1"), ("train", "model=nope")]
    typed += [(program, "ckpt_pth=x") for program in PROGRAMS if program != "train"]
    code = (
        "import importlib, sys\n"
        f"for program, typo in {typed}:\n"
        "    sys.argv = [f'{program}.py', typo]\n"
        "    assert importlib.import_module(f'minitx.cli.{program}').main() == 2\n"
        "assert not {'torch', 'lightning', 'numpy', 'wandb', 'tokenizers', 'scipy', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("error: ")) == (0, len(typed)), done.stderr
    assert list(tmp_path.iterdir()) == []
