"""The program as a user meets it: help, folders, secrets, signals, processes."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from minitx.cli.redaction import redact, redact_overrides
from minitx.cli.targets import ALLOWED, check_targets, instantiate_all
from minitx.cli.train import output_folder
from minitx.config import ConfigError, RunConfig
from minitx.training.metrics import read_metrics
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train.py"
TINY = ["data=kv_lookup", "data.val_size=16", "data.batch_size=8", "model.embed_dim=8", "model.num_heads=2", "model.num_layers=1",
        "trainer.accelerator=cpu", "trainer.threads=1"]  # fmt: skip


def start(arguments, cwd, **environment):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip


def run(arguments, cwd, **environment):
    process = start(arguments, cwd, **environment)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def test_a_typo_is_answered_before_torch_is_imported(tmp_path):
    watcher = (
        "import sys; sys.argv[0] = 'train.py'\n"
        "from minitx.cli.train import main\n"
        "code = main()\n"
        "heavy = {'torch', 'lightning', 'numpy', 'wandb', 'tokenizers', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else code)\n"
    )
    for typo in ("model.num_head=3", "model.num_heads=abc", "schedule.warmup_steps=9999", "model=nope"):
        process = subprocess.run(
            [sys.executable, "-c", watcher, typo], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
        )  # fmt: skip
        assert process.returncode == 2, process
        assert process.stderr.startswith("error: ")
        assert process.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_script_runs_from_any_folder_and_keeps_to_its_own(tmp_path):
    code, out, err = run([*TINY, "trainer.max_steps=2", "trainer.ckpt_every=2", "experiment=kv_lookup", "schedule.warmup_steps=1"], tmp_path)  # fmt: skip
    assert (code, err) == (0, ""), (out, err)
    (folder,) = (tmp_path / "runs" / "kv_lookup").iterdir()
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoints", "command.txt", "config.yaml", "logs", "metrics.csv"]
    assert str(folder) in out
    assert "step 2/2" in out


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)])
def test_a_signal_ends_a_run_with_its_code_and_a_checkpoint_that_goes_on(tmp_path, number, code):
    arguments = [*TINY, "output_dir=run", "trainer.max_steps=10000000", "trainer.log_every=1", "trainer.ckpt_every=99999", "trainer.val_every=0"]  # fmt: skip
    process = start(arguments, tmp_path)
    metrics = tmp_path / "run" / "metrics.csv"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    assert err.count("\n") == 1
    loaded = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    rows = read_metrics(metrics)
    assert rows[-1]["step"] == loaded["global_step"] == len(rows)
    for parameters in loaded["state_dict"].values():
        assert torch.isfinite(parameters).all()


def test_help_shows_groups_keys_and_values(cli):
    said = cli("--help")
    assert (said.code, said.err) == (0, "")
    for part in ("model: bert_small, char_small", "scaling_ablation", "scale: inv_sqrt", "max_steps: 1000", "traceback=true"):  # fmt: skip
        assert part in said.out, part


def test_the_composed_config_can_be_printed(cli, place):
    said = cli("--cfg", "job", "model.scale=unscaled")
    assert said.code == 0
    assert yaml.safe_load(said.out)["model"]["scale"] == "unscaled"
    assert list(place.iterdir()) == []


def test_config_and_command_in_the_folder_repeat_the_run(cli, place):
    arguments = [*TINY, "trainer.max_steps=3", "trainer.log_every=1", "optimizer.rules=[{match: '(q|k)_proj', lr: 'head_dim^-0.25'}]"]  # fmt: skip
    assert cli(*arguments, "output_dir=one").code == 0
    words = shlex.split((place / "one" / "command.txt").read_text())
    assert words[:2] == ["python", "scripts/train.py"]
    again = ["output_dir=two" if word.startswith("output_dir=") else word for word in words[2:]]
    assert cli(*again).code == 0
    losses = [[row["train_loss"] for row in read_metrics(place / name / "metrics.csv")] for name in ("one", "two")]
    assert losses[0] == losses[1]
    stored = yaml.safe_load((place / "one" / "config.yaml").read_text())
    assert stored["trainer"]["max_steps"] == 3
    assert stored["optimizer"]["rules"][0]["lr"] == "head_dim^-0.25"


def test_the_stored_command_names_the_users_own_configs(cli, place):
    (place / "mine" / "experiment").mkdir(parents=True)
    (place / "mine" / "experiment" / "own.yaml").write_text("# @package _global_\nexperiment: own\nseed: 7\n", encoding="utf-8")
    (place / "mine" / "primary.yaml").write_text("defaults: [train, _self_]\nseed: 8\n", encoding="utf-8")
    for folder, words in (("a", ["experiment=own"]), ("b", ["--config-name=primary"])):
        said = cli("--config-dir=mine", *words, *TINY, "trainer.max_steps=1", "schedule.warmup_steps=0", f"output_dir={folder}")
        assert said.code == 0, said.err
        command = shlex.split((place / folder / "command.txt").read_text(encoding="utf-8"))[2:]
        assert f"--config-dir={place / 'mine'}" in command
        assert words[0] in command
        assert cli(*command[:-1], f"output_dir={folder}2").code == 0
        first, again = (
            yaml.safe_load((place / name / "config.yaml").read_text(encoding="utf-8")) for name in (folder, f"{folder}2")
        )
        assert {**first, "output_dir": None} == {**again, "output_dir": None}
        assert first["seed"] == (7 if folder == "a" else 8)


def test_a_run_continues_with_ckpt_path_last(cli, place):
    arguments = [*TINY, "output_dir=run", "trainer.ckpt_every=2", "trainer.log_every=1"]
    assert cli(*arguments, "trainer.max_steps=2").code == 0
    assert cli(*arguments, "trainer.max_steps=4", "ckpt_path=last").code == 0
    assert [row["step"] for row in read_metrics(place / "run" / "metrics.csv")] == [1, 2, 3, 4]


def test_runs_that_begin_in_one_second_get_a_folder_each(place, monkeypatch):
    monkeypatch.setattr("minitx.cli.train.time", SimpleNamespace(strftime=lambda _: "2026-11-22_10-00-00"))
    names = []
    for _ in range(3):
        folder = output_folder(RunConfig())
        folder.mkdir(parents=True)
        names.append(folder.relative_to(place / "runs").as_posix())
    assert names == [f"default/2026-11-22_10-00-00{number}" for number in ("", "_2", "_3")]


def test_each_job_of_a_sweep_is_a_run_with_a_folder_of_its_own(cli, place):
    said = cli("-m", *TINY, "trainer.max_steps=1", "seed=0,1,2")
    assert said.code == 0, said
    runs = sorted(p.parent for p in place.rglob("metrics.csv"))
    assert len(set(runs)) == 3
    assert sorted(yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in runs) == [0, 1, 2]
    assert [p.name for p in place.iterdir()] == ["runs"]


def test_a_sweep_with_a_bad_job_says_so_and_runs_the_others(cli, place):
    said = cli("-m", *TINY, "trainer.max_steps=1", "model.num_heads=2,3")
    assert said.code == 2
    assert "num_heads=3" in said.err
    assert len(list(place.rglob("metrics.csv"))) == 1


DANGEROUS = ["os.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "builtins.__import__", "pickle.loads", "torch.load",
             "shutil.rmtree", "lightning.pytorch.Trainer", "importlib.import_module", "hydra.utils.instantiate", "posix.system",
             "lightning.pytorch.loggers.wandb.WandbLogger.__init__", "LIGHTNING.pytorch.loggers.WandbLogger", ""]  # fmt: skip


@pytest.mark.parametrize("target", DANGEROUS)
def test_a_target_outside_the_list_is_refused_at_any_depth(target, tmp_path):
    good = "lightning.pytorch.callbacks.Timer"
    for node in ({"_target_": target}, {"_target_": good, "a": {"_target_": target}}, {"_target_": good, "_args_": [[{"_target_": target}]]}):  # fmt: skip
        with pytest.raises(ConfigError, match=r"callbacks\.extra\.x.*_target_=.* is not allowed: one of"):
            instantiate_all({"x": node}, "callbacks.extra", tmp_path)


def test_a_refused_target_is_never_imported(tmp_path, monkeypatch):
    (tmp_path / "minitx_evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"minitx_evil.Thing is not allowed"):
        check_targets({"x": {"_target_": "minitx_evil.Thing"}}, "logger")
    assert "minitx_evil" not in sys.modules


def test_every_allowed_target_exists():
    import importlib

    for target in ALLOWED:
        module, _, name = target.rpartition(".")
        assert hasattr(importlib.import_module(module), name)


SECRET = "0f1e2d3c4b5a"


@pytest.mark.parametrize("key", ["api_key", "apikey", "API_KEY", "token", "auth_token", "hf_token", "secret", "password", "aws_secret_access_key", "credentials"])  # fmt: skip
@pytest.mark.parametrize("value", [SECRET, 1234567890, {"value": SECRET}, [SECRET]], ids=["text", "number", "mapping", "list"])
def test_secrets_are_redacted_wherever_they_stand(key, value):
    redacted = redact({"logger": {"x": {key: value, "project": "p"}, "list": [{key: value}]}})
    assert SECRET not in str(redacted)
    assert "1234567890" not in str(redacted)
    assert redacted["logger"]["x"]["project"] == "p"


def test_words_that_only_look_like_secrets_stay():
    plain = {"tokenizer": "char", "data": {"num_tokens": 5}, "token": None, "secret": False}
    assert redact(plain) == plain
    assert redact_overrides(["data.tokenizer=bpe", "seed=3", "debug"]) == ["data.tokenizer=bpe", "seed=3", "debug"]


def test_secrets_in_overrides_are_redacted_also_inside_of_a_mapping():
    overrides = [f"+logger.x.api_key={SECRET}", f"+logger.x={{_target_:a.B,api_key:{SECRET},project:p}}", f"+logger.y={{a: {{token: '{SECRET}'}}}}"]  # fmt: skip
    redacted = redact_overrides(overrides)
    assert SECRET not in str(redacted)
    assert "project:p" in redacted[1]


class FakeLogger:
    """Stands in for WandbLogger: writes nothing."""


def test_no_file_of_a_run_holds_a_secret(cli, place, monkeypatch):
    import lightning.pytorch.loggers as loggers
    from lightning.pytorch.loggers.logger import DummyLogger

    class WandbLogger(DummyLogger):
        made: list[dict] = []  # noqa: RUF012

        def __init__(self, **arguments):
            super().__init__()
            self.made.append(arguments)

        def log_hyperparams(self, values):
            self.made.append(values)

    monkeypatch.setattr(loggers, "WandbLogger", WandbLogger)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(place / "none"))
    said = cli(*TINY, "trainer.max_steps=1", "trainer.ckpt_every=1", "logger=wandb", f"+logger.wandb.api_key={SECRET}", "output_dir=run")  # fmt: skip
    assert said.code == 0, said
    made, hyperparameters = WandbLogger.made
    assert made["api_key"] == SECRET  # it reaches the logger ...
    assert made["offline"] is True
    assert made["save_dir"] == str(place / "run")
    assert SECRET not in str(hyperparameters)
    for path in place.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path  # ... and no file
    assert SECRET not in said.out + said.err


def test_a_run_with_a_bad_model_starts_no_logger(cli, place, monkeypatch):
    monkeypatch.setattr("minitx.cli.run.instantiate_all", lambda group, key, folder: [] if not group else pytest.fail("made"))
    assert cli(*TINY, "logger=wandb", "model.backend=nonsense").code == 2
    assert list(place.iterdir()) == []


@pytest.mark.long
def test_wandb_runs_offline_without_a_key_and_stays_in_the_folder(tmp_path):
    environment = {"WANDB_API_KEY": "", "HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "none")}
    (tmp_path / "home").mkdir()
    code, out, err = run([*TINY, "trainer.max_steps=2", "logger=wandb", "output_dir=run"], tmp_path, **environment)
    assert code == 0, (out, err)
    assert (tmp_path / "run" / "wandb").is_dir()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "home") == ["run"]


@pytest.mark.long
def test_two_processes_give_the_losses_of_one(tmp_path):
    common = [*TINY, "trainer.max_steps=4", "trainer.log_every=1", "trainer.val_every=2", "trainer.ckpt_every=4", "model.dropout=0.0", "callbacks.progress=false"]  # fmt: skip
    one = run([*common, "output_dir=one"], tmp_path)
    two = run([*common, "output_dir=two", "trainer.devices=2", "trainer.strategy=ddp"], tmp_path)
    assert one[0] == two[0] == 0, (one, two)
    single, pair = (read_metrics(tmp_path / name / "metrics.csv") for name in ("one", "two"))
    assert [row["step"] for row in pair] == [1, 2, 3, 4]
    for a, b in zip(single, pair, strict=True):
        assert b["train_loss"] == pytest.approx(a["train_loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert (a["val_loss"] is None) == (b["val_loss"] is None)
        if a["val_loss"] is not None:
            assert b["val_loss"] == pytest.approx(a["val_loss"], rel=1e-5)
    weights = [torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for name in ("one", "two")]  # fmt: skip
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-6)


KINDS = {
    "padded": ["data=dates", "data.locales=[en,de]", "data.train_size=97", "data.val_size=32", "model=vaswani_small"],
    "packed": ["data=hf", "data.path=documents.jsonl", "data.tokenizer=char", "data.context_len=48"],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_32_rows_at_once_are_32_micro_batches_are_two_processes_of_16(tmp_path, kind):
    lines = [json.dumps({"text": "word " * (1 + 7 * i % 11) + str(i)}) for i in range(211)]
    (tmp_path / "documents.jsonl").write_text("\n".join(lines), encoding="utf-8")
    sizes = ["model.embed_dim=8", "model.num_heads=2", "model.num_layers=1", "data.batch_size=32", "trainer.max_steps=3"]
    more = [
        "trainer.accelerator=cpu",
        "trainer.threads=1",
        "trainer.log_every=1",
        "trainer.val_every=0",
        "callbacks.progress=false",
    ]
    splits = {"one": [], "micro": ["trainer.accumulate=32"], "ranks": ["trainer.devices=2", "trainer.strategy=ddp"]}
    found = {}
    for name, split in splits.items():
        code, out, err = run([*KINDS[kind], *sizes, *more, *split, f"output_dir={name}"], tmp_path)
        assert code == 0, (out, err)
        found[name] = read_metrics(tmp_path / name / "metrics.csv")
    for name in ("micro", "ranks"):
        for got, want in zip(found[name], found["one"], strict=True):
            assert got["tokens"] == want["tokens"]
            assert got["train_loss"] == pytest.approx(want["train_loss"], rel=1e-5)
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
        assert found[name][-1]["val_loss"] == pytest.approx(found["one"][-1]["val_loss"], rel=1e-5)


def test_the_metrics_file_is_a_plain_table(cli, place):
    cli(*TINY, "trainer.max_steps=2", "trainer.log_every=1", "output_dir=run")
    with (place / "run" / "metrics.csv").open() as file:
        header, *rows = list(csv.reader(file))
    assert header == ["step", "train_loss", "val_loss", "val_accuracy", "lr", "grad_norm", "tokens", "seconds"]
    assert [row[0] for row in rows] == ["1", "2"]
