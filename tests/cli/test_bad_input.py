"""A mistake in what was typed ends with exit code 2, at most three lines that name its key, and no folder.

Cases are checked by exit code and key, not by their wording.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import assert_named

TINY = ("data=kv_lookup", "debug=one_step", "model.embed_dim=8", "model.num_heads=2", "model.num_layers=1", "callbacks.progress=false", "trainer.accelerator=cpu")  # fmt: skip
GRID = "experiment=scaling_ablation "

# what was typed, and what the answer must name; found before anything is read
COMPOSED = {
    # keys and groups
    "trainer.max_step=3": "did you mean trainer.max_steps?",
    "++model.foo=1": "model.foo",
    "data=kv_lookup data.context_len=3": "data.context_len",
    "+logger.x.project=minitx": "logger.x",
    "model=nonsense": "char_small",
    "debug=on": "one_step",
    "modle=char_small": "modle",
    "~optimizer": "optimizer",
    "+model=char_small": "model",
    "evaluation=null": "evaluation",
    "seed=3 trainer=null model.scale=null": "trainer=null",
    "+objective._target_=torch.nn.CrossEntropyLoss": "override /objective: null",
    # values
    "model.num_heads=abc": "model.num_heads=abc",
    "model.num_heads=null": "model.num_heads=null",
    "model.num_heads=7": "num_heads=7",
    "model.dropout=nan": "model.dropout=nan",
    "model.scale=sqrt": "model.scale=sqrt",
    "model.scale=null": "unscaled",
    "model.init=lecunn": "did you mean lecun?",
    "optimizer.lr=0": "optimizer.lr=0",
    "optimizer.lr=inf": "optimizer.lr=inf",
    "optimizer.betas=[0.9]": "optimizer.betas=[0.9]",
    "optimizer.rules=[{matc:q_proj}]": "optimizer.rules[0].matc",
    "optimizer.rules=[{match:'('}]": "optimizer.rules[0].match=(",
    "trainer.accumulate=5": "trainer.accumulate=5",
    "seed=-1": "seed=-1",
    "seed=???": "seed",
    "ckpt_path=": "ckpt_path",
    "init_from={path:''}": "init_from.path",
    "init_from={path:x,fold_scale:true}": "fold_scale",
    "data=text": "data.path",
    "data.path=x.txt": "data.path=x.txt",
    "data.name=wiki": "data.name=wiki",
    GRID + "ablation.score_margin=0": "ablation.score_margin=0",
    GRID + "ablation.launcher=slurn": "did you mean slurm?",
    GRID + "ablation.studies.recall.arms=[foo]": "studies.recall.arms",
    # Hydra's grammar
    "max_steps": "max_steps",
    "=3": "",
    "--max_steps=3": "--max_steps=3",
    "--config-name": "--config-name",
    "--config-dir=nowhere": "nowhere",
    "ckpt_path=runs/lr=1/last.ckpt": "ckpt_path=runs/lr=1/last.ckpt",
    "output_dir=a,b": "output_dir=a,b",
    "optimizer.betas=[0.9": "optimizer.betas=[0.9",
    "model.embed_dim=${nope}": "nope",
    "seed=${seed}": "seed",
}

# found in files, machine or model: TINY stands before what was typed
BUILT = {
    "model.backend=nonsense": "nonsense",
    "model.backend=sdpa model.softcap=5": "sdpa",
    "model.embed_dim=1000000000000000000": "model",
    "model.num_experts=1": "num_experts=1",
    "model.attention=performer model.dropout=0.1": "dropout",
    "optimizer.rules=[{match:nomatch}]": "optimizer.rules[0].match=nomatch",
    "optimizer.rules=[{match:'.',trainable:false}]": "optimizer.rules",
    "+callbacks.a={_target_:lightning.pytorch.callbacks.Timer,nonsense:1}": "callbacks.a",
    "+logger.a={_target_:no.such.Logger}": "logger.a._target_=no.such.Logger",
    "trainer.profiler={_target_:no.such.Profiler}": "trainer.profiler._target_=no.such.Profiler",
    "trainer.extra={nonsense:1}": "trainer",
    "imports=[no_such_module_anywhere]": "imports=no_such_module_anywhere",
    "~model +model._target_=torch.nn.Linear +model.in_features=2": "model._target_=torch.nn.Linear",
    "~model +model._target_=torch.nn.Identity": "model",
    "~optimizer +optimizer._target_=torch.optim.SGD +optimizer.nonsense=1": "optimizer._target_=torch.optim.SGD",
    "~objective +objective._target_=torch.nn.CrossEntropyLoss": "objective.reduction=mean",
    "~data +data._target_=builtins.dict": "data",
    "model.architecture=encoder": "model.architecture=encoder",
    "model.vocab_size=3": "model.vocab_size=3",
    "trainer.devices=2 trainer.accelerator=auto": "trainer.devices=2",
    "ckpt_path=missing.ckpt": "ckpt_path=missing.ckpt",
    "ckpt_path=last": "ckpt_path=last",
    "ckpt_path=last output_dir=run": "ckpt_path=",
    "init_from={path:nowhere}": "init_from.path=nowhere",
    "output_dir=/dev/null/x": "output_dir=/dev/null/x",
    "output_dir=short.txt/below": "output_dir=",
    "output_dir=new/run model.backend=nonsense": "nonsense",
    "data=digits model=vit_small data.batch_size=4096": "data.batch_size=4096",
    "data=text data.path=missing.txt": "data.path=missing.txt",
}

PROGRAMS = {
    "evaluate": {"": "ckpt_path", "ckpt_path=missing.ckpt": "missing.ckpt", "ckpt=x": "ckpt_path", "num_rows=0 ckpt_path=x": "num_rows=0"},
    "generate": {"": "ckpt_path", "ckpt_path=missing.ckpt": "missing.ckpt", "ckpt_path=x top_k=many": "top_k=many", "prompt": "prompt"},
    "view": {"": "ckpt_path", "ckpt_path=missing.ckpt text=a": "missing.ckpt", "ckpt_path=x row=1 text=a": "row=1", "ckpt_path=x output=no/where.html": "output=no/where.html"},
    "heads": {"": "ckpt_path", "ckpt_path=missing.ckpt": "missing.ckpt", "ckpt_path=x num_rows=0": "num_rows=0"},
    "cost": {"model=nonsense": "char_small", "model=char_small lengths=8": "lengths=8", "model=char_small model.num_head=2": "model.num_head"},
}  # fmt: skip


def words(typed: str) -> list[str]:
    return typed.split(" ") if typed else []


@pytest.fixture
def no_run(monkeypatch):
    """A mistake that slips through would train for minutes."""
    for name in ("minitx.cli.train.run_training", "minitx.cli.ablate.pool_of"):
        monkeypatch.setattr(name, lambda *args, **kwargs: pytest.fail("the run began"))


@pytest.mark.parametrize("typed", COMPOSED)
def test_a_mistake_in_the_config_is_named(cli, place, no_run, typed):
    assert_named(cli(*words(typed)), COMPOSED[typed])
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("typed", BUILT)
def test_a_mistake_that_only_files_machine_or_model_show_is_named(cli, place, typed):
    (place / "short.txt").write_text("too short", encoding="utf-8")
    chosen = {word.partition("=")[0] for word in words(typed)}
    gone = tuple(word[1:] for word in words(typed) if word.startswith("~"))
    kept = (word for word in TINY if word.partition("=")[0] not in chosen and not (gone and word.startswith(gone)))
    said = cli(*kept, *words(typed))
    assert_named(said, BUILT[typed])
    assert [path.name for path in place.iterdir()] == ["short.txt"]


@pytest.mark.parametrize(("program", "typed"), [(program, typed) for program, cases in PROGRAMS.items() for typed in cases])
def test_a_mistake_in_another_program_is_named(cli, place, program, typed):
    assert_named(cli(*words(typed), program=program), PROGRAMS[program][typed])
    assert list(place.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_a_gpu_that_is_not_there_is_named(cli, place):
    assert_named(cli(*TINY, "trainer.accelerator=gpu"), "trainer.accelerator=gpu")
    assert list(place.iterdir()) == []


def test_a_folder_that_holds_a_run_is_not_written_over(cli, place):
    assert cli(*TINY, "output_dir=run").code == 0
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert_named(cli(*TINY, "output_dir=run"), "output_dir=")
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_traceback_shows_where_an_error_came_from(cli):
    said = cli("traceback=true", "model.num_heads=abc")
    assert said.code == 2
    assert "Traceback (most recent call last)" in said.err
    assert "Traceback" not in cli("model.num_heads=abc").err


def test_a_run_that_stops_being_finite_exits_with_3_or_records_it(cli):
    wild = (*TINY, "trainer.max_steps=4", "optimizer.lr=1e30", "model.norm_position=post")
    assert_named(cli(*wild), "not finite", code=3)
    assert cli(*wild, "on_nonfinite=record").code == 0


def test_a_typo_is_answered_before_torch_is_imported(tmp_path):
    watcher = (
        "import sys; sys.argv[0] = 'train.py'\n"
        "from minitx.cli.train import main\n"
        "code = main()\n"
        "heavy = {'torch', 'lightning', 'numpy', 'wandb', 'tokenizers', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else code)\n"
    )
    for typo in ("model.num_head=3", "schedule.warmup_steps=9999", "model=nope"):
        process = subprocess.run([sys.executable, "-c", watcher, typo], cwd=tmp_path, capture_output=True, text=True)
        assert process.returncode == 2, process
    assert list(Path(tmp_path).iterdir()) == []
