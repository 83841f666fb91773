"""``train.py`` as a user meets it: help, folders, what a folder holds, sweeps, signals."""

import csv
import dataclasses
import io
import os
import re
import shlex
import signal
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

import minitx
from minitx.cli import train
from minitx.cli.check import CheckConfig
from minitx.cli.command_line import compose_program, meanings, write
from minitx.cli.evaluate import EvaluateConfig
from minitx.cli.exit_codes import exit_code
from minitx.cli.export import ExportConfig
from minitx.cli.generate import GenerateConfig
from minitx.cli.overrides import readable
from minitx.cli.play import PlayConfig
from minitx.cli.train import default_folder
from minitx.cli.view_config import ViewConfig
from minitx.config import ConfigError, RunConfig
from minitx.training import StoppedError
from minitx.training.metrics_csv import COLUMNS, read_metrics
from tests.cli.conftest import RESULT, TINY, losses, put
from tests.cli.processes import ROOT, start
from tests.waiting import PATIENCE, wait_for

OTHERS = {"evaluate": EvaluateConfig, "generate": GenerateConfig, "view": ViewConfig, "export": ExportConfig}


def test_help_shows_groups_keys_and_values(cli):
    said = cli("--help")
    assert (said.code, said.err) == (0, "")
    groups = "model: bert_small, char_small", "scaling_ablation"
    for part in (*groups, "scale: inv_sqrt", "max_epochs: null", "context_len: 64", "num_workers: 0", "traceback=true"):
        assert part in said.out, part


def test_the_composed_config_lists_every_argument_of_a_data_set_of_ours_and_of_the_users(cli):
    own = (f"--config-dir={ROOT / 'examples' / 'own_project' / 'conf'}", "experiment=sorted_task")
    for words, listed in ((["data=text"], ["path: ???", "context_len: 128", "num_workers: 0"]), (own, ["train_size: 512"])):
        said = cli(*words, "--cfg", "job", "--package", "data")
        assert (said.code, said.err) == (0, "")
        assert set(listed) <= set(said.out.splitlines())


def test_help_of_the_other_programs_shows_every_key_and_its_meaning(cli):
    for program, keys in OTHERS.items():
        said = cli("--help", program=program)
        assert (said.code, said.err) == (0, "")
        for field in dataclasses.fields(keys):
            assert f"  {field.name}=" in said.out and meanings(keys)[field.name] in said.out


@pytest.mark.parametrize(
    "keys",
    [
        *OTHERS.values(),
        CheckConfig,
        PlayConfig,
        RunConfig,
        *(field.default.__class__ for field in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(field.default)),
    ],
)
def test_the_docstring_of_every_config_has_a_meaning_for_every_key(keys):
    known = meanings(keys)
    assert {field.name for field in dataclasses.fields(keys)} <= {name for name, meaning in known.items() if len(meaning) > 5}


def test_a_run_keeps_to_its_folder_and_says_where_it_is(cli, place, caplog):
    caplog.set_level("INFO")
    said = cli(*TINY, "trainer.max_steps=2", "experiment=kv_lookup", "schedule.warmup_steps=1", "callbacks.progress=true")
    assert (said.code, said.err) == (0, "")
    (folder,) = (place / "runs" / "kv_lookup").iterdir()
    assert [p.name for p in place.iterdir()] == ["runs"]
    files = "checkpoints command.txt config.yaml logs metrics.csv result.json"
    assert sorted(p.name for p in folder.iterdir()) == files.split()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert str(folder) in caplog.text and "step 2/2" in caplog.text
    with (folder / "metrics.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header[: len(COLUMNS)] == list(COLUMNS)
    assert [row[0] for row in rows] == ["1", "2"]


def test_config_and_command_in_the_folder_repeat_the_run_also_with_configs_of_ones_own(cli, place):
    put(place / "mine" / "experiment" / "own.yaml", "# @package _global_\nexperiment: own\nseed: 7\n")
    put(place / "mine" / "primary.yaml", "defaults: [train, _self_]\nckpt_path: null\n")
    typed = "--config-name=primary", "experiment=own", "optimizer.rules=[{match: '(q|k)_proj', lr: 'head_dim^-0.25'}]"
    resolved = "data.num_keys=${data.num_values}"
    assert cli("--config-dir=mine", *typed, *TINY, "trainer.max_steps=2", resolved, "output_dir=one").code == 0
    words = shlex.split((place / "one" / "command.txt").read_text(encoding="utf-8"))
    assert words[:2] == ["python", "train.py"]  # as the program was called
    assert cli(*words[2:-1], "output_dir=two").code == 0
    assert losses(place / "one") == losses(place / "two")
    first, again = (yaml.safe_load((place / name / "config.yaml").read_text(encoding="utf-8")) for name in ("one", "two"))
    assert {**first, "output_dir": None} == {**again, "output_dir": None}
    assert (first["seed"], first["optimizer"]["rules"][0]["lr"], first["data"]["num_keys"]) == (7, "head_dim^-0.25", 16)


def test_runs_that_begin_in_one_second_get_a_folder_each(place, monkeypatch):
    monkeypatch.setattr("minitx.cli.train.time", SimpleNamespace(strftime=lambda _: "2026-11-22_10-00-00"))
    for number in ("", "_2", "_3"):
        folder = default_folder("kv")
        assert folder.as_posix() == f"runs/kv/2026-11-22_10-00-00{number}"
        folder.mkdir(parents=True)


def test_a_sweep_with_bad_jobs_says_so_of_each_and_runs_the_others(cli, place, caplog):
    said = cli("-m", *TINY, "trainer.max_steps=1", "model.num_heads=3,2,5")
    assert said.code == 2
    assert "num_heads=3" in said.err
    failed = [message.partition(" is not")[0] for message in caplog.messages if " failed: " in message]
    assert failed == ["job 0 failed: model.embed_dim=8", "job 2 failed: model.embed_dim=8"]
    assert len(list(place.rglob("metrics.csv"))) == 1
    assert [path.name for path in place.iterdir()] == ["runs"]


def test_grids_of_one_sweep_have_a_folder_each(cli, place, monkeypatch):
    run, seen = "minitx.cli.ablate.run_ablation", []
    monkeypatch.setattr(run, lambda grid, folder, *_: seen.append(folder.relative_to(place).as_posix()))
    words = ("-m", "experiment=scaling_ablation", "ablation=smoke", "model.num_heads=1,2")
    said = cli(*words)
    assert said.code == 2 and "is already the folder of another grid of this sweep" in said.err
    assert cli(*words, "output_dir=g${hydra:job.num}").code == 0
    assert cli("experiment=scaling_ablation", "ablation=real", "model.path=folder", "output_dir=g2").code == 0  # for model=hf
    assert seen == ["runs/scaling_ablation/smoke", "g0", "g1", "g2"]


def test_flags_may_stand_anywhere(cli, place, monkeypatch):
    (place / "conf").mkdir()
    seen = []
    result = {**RESULT, "val_loss": 1.0, "metrics": {"val_loss": 1.0}}
    monkeypatch.setattr("minitx.cli.train.run_training", lambda config, *_: seen.append(config.seed) or result)
    for flags in (["-m"], ["--config-dir", "conf", "--multirun"]):
        assert cli(*TINY, *flags, "seed=3,5").code == 0
    assert seen == [3, 5, 3, 5]


def test_a_path_that_no_shell_has_expanded_is_not_a_folder_named_tilde(cli, place, monkeypatch):
    monkeypatch.setenv("HOME", str(place / "home"))
    assert cli(*TINY, "trainer.max_steps=1", 'output_dir="~/run"').code == 0
    assert cli("ckpt_path=~/run", "output=~/found.json", program="evaluate").code == 0
    assert [path.name for path in place.iterdir()] == ["home"]
    assert (place / "home" / "found.json").exists()


def test_the_version_is_that_of_minitx(cli):
    for program in ("train", *OTHERS):
        said = cli("--version", program=program)
        assert (said.code, said.out, said.err) == (0, f"minitx {minitx.__version__}\n", "")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error_and_the_run_goes_on(tmp_path):
    process = start([*TINY, "trainer.max_steps=2", "output_dir=run"], tmp_path)
    process.stdin.close(), process.stdout.close()
    with process.stderr as said:
        assert said.read() == ""
    assert process.wait(PATIENCE) == 0
    assert len(losses(tmp_path / "run")) == 2


def test_a_reader_of_the_help_that_goes_away_is_no_error(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", buffering=1, encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
        monkeypatch.setattr(sys, "stdout", stdout)
        assert train.main() == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr"])
def test_a_stream_that_is_closed_from_the_start_is_no_error(monkeypatch, stream):
    monkeypatch.setattr(sys, stream, None)
    assert exit_code(lambda: [sys.stdin.isatty(), sys.stdout.write(""), sys.stderr.write("")]) == 0
    getattr(sys, stream).close()


@pytest.mark.parametrize(("way", "said"), [("ascii:strict", b"\\xb7 \\udcff"), ("utf-8:surrogateescape", b"\xc2\xb7 \xff")])
def test_a_letter_that_the_output_has_not_is_its_number_or_what_the_locale_asks(monkeypatch, way, said):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), *way.split(":")))
    assert exit_code(lambda: write("· \udcff")) == 0 and sys.stdout.buffer.getvalue() == said


@pytest.mark.parametrize(("stop", "code"), [(StoppedError(signal.SIGTERM, " after step 3"), 143), (KeyboardInterrupt, 130)])
def test_a_signal_ends_the_whole_sweep_and_leaves_no_empty_folder(cli, monkeypatch, place, stop, code):
    seen = []

    def stopped(config, *_):
        seen.append(config.seed)
        raise stop

    monkeypatch.setattr("minitx.cli.train.run_training", stopped)
    said = cli("-m", *TINY, "seed=1,2", "hydra.sweep.dir=swept")
    assert (said.code, said.err.count("\n"), seen) == (code, 1, [1])
    assert [path.name for path in (place / "swept").iterdir()] == ["multirun.yaml"]


@pytest.mark.slow
def test_a_signal_ends_a_run_with_its_code_and_a_checkpoint_that_goes_on(tmp_path):
    process = start([*TINY, "output_dir=run", "trainer.max_steps=10000000", "trainer.ckpt_every=99999", "trainer.val_every=0"], tmp_path)  # fmt: skip
    metrics = tmp_path / "run" / "metrics.csv"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err.count("\n")) == (130, 1), err
    loaded = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    rows = read_metrics(metrics)
    assert rows[-1]["step"] == loaded["global_step"] == len(rows)
    assert all(torch.isfinite(weight).all() for weight in loaded["state_dict"].values())


def test_a_chinese_text_file_is_trained_on_and_looked_at_as_the_chinese_readme_says(cli, output, place):
    put(place / "小说.txt", "我喜欢深度学习。你也喜欢吗？\n" * 40)
    small = [*TINY[3:], "trainer.max_steps=2", "trainer.val_every=0", "schedule.warmup_steps=1", "evaluation.at_end=false"]
    words = ["experiment=char_lm", "data=text", "data.path=小说.txt", "output_dir=小说"]
    assert cli(*words, *small, "data.context_len=16", "data.batch_size=4").code == 0
    typed = shlex.split((place / "小说" / "command.txt").read_text(encoding="utf-8").splitlines()[-1])[2:]
    again = [word.replace('小说"', '又"') if word.startswith("output_dir") else word for word in typed]
    assert cli(*again).code == 0
    assert losses(place / "又") == losses(place / "小说")
    assert "7 tokens" in output("view", "ckpt_path=小说", "text=我喜欢深度学习")
    assert len(output("generate", "ckpt_path=小说", "prompt=我喜欢", "max_new_tokens=3").rstrip("\n")) <= 3
    assert "我喜欢深度学习" in (place / "attention.html").read_text(encoding="utf-8")


def test_letters_that_hydra_cannot_read_are_quoted_and_its_own_marks_are_left_to_it():
    for value in ("数据/小说 1.txt", "~/a", "runs/lr=1", "a;b"):
        assert readable(f"data.path={value}") == f'data.path="{value}"'
    for word in ("a=b c", "seed=1,2", 'data.path="小说.txt"', "tags=[小,说]", "~小说", "data.path=小,说"):
        assert readable(word) == word


def test_the_words_of_the_other_programs_are_read_by_the_grammar_of_train():
    words = [
        "+ckpt_path=a, b",
        "split=val",
        "split=test",
        "data={path:x.csv,num:3}",
        "++data.num=4",
        "num_rows=${num_shown}",
        "num_shown=7",
    ]
    config = compose_program(EvaluateConfig, ["ckpt_path='c d'", *words[1:]])
    assert (config.ckpt_path, config.split, config.num_rows) == ("c d", "test", 7)
    assert config.data == {"path": "x.csv", "num": 4}
    for typed, last in ((["ckpt_path='c'", "ckpt_path=a, b"], "a, b"), (["ckpt_path=a, b", "ckpt_path='c'"], "c")):
        assert compose_program(EvaluateConfig, [*typed, "output=null"]).ckpt_path == last
    for wrong, said in (
        ("~split", r"^~split is not a key \(did you mean split\?\)"),
        ("+splt=val", r"^splt is not a key \(did you mean split\?\)"),
        ("split", "form key=value"),
        ("data.a=(", "quotes"),
    ):
        with pytest.raises(ConfigError, match=said):
            compose_program(EvaluateConfig, ["ckpt_path=a", wrong])


def test_a_plan_of_64_processes_is_printed_and_leaves_no_folder(cli, place, caplog):
    caplog.set_level("INFO")
    said = cli(*TINY, "data.batch_size=64", "trainer=fsdp", "trainer.devices=64", "hydra.run.dir=new", "trainer.plan=true")
    assert (said.code, said.err) == (0, "")
    assert re.search(
        r"64 processes, sharded.*\nparameters +[\d,]+ bytes.*\ngradients .*\noptimizer states .*\ntogether ", caplog.text
    )
    assert "activations" in caplog.text
    assert list(place.iterdir()) == []


def test_a_plan_is_of_one_run_and_not_of_a_sweep(cli, place):
    said = cli(*TINY, "-m", "seed=0,1", "trainer.plan=true")
    assert said.code == 2 and "trainer.plan=true is for single runs: remove -m" in said.out + said.err
    assert not list(place.rglob("metrics.csv"))


@pytest.mark.slow
def test_the_search_for_a_rate_resumes(cli, place):
    words = (
        "experiment=kv_lookup ablation=rate trainer.max_steps=12 ablation.studies.rate.threshold.bisections=1 data.val_size=16"
    )
    words += " model.embed_dim=8 model.num_heads=1 model.num_layers=1 ablation.workers=1 output_dir=grid"
    result = cli(*words.split())
    assert result.code == 0, result
    first = (place / "grid" / "cells.jsonl").read_bytes()
    assert cli(*words.split()).code == 0
    assert (place / "grid" / "cells.jsonl").read_bytes() == first
    assert "The largest stable learning rate of kv\\_lookup is" in (place / "grid" / "summary.md").read_text(encoding="utf-8")
