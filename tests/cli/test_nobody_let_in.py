"""Nobody is let in: attacks by configs, names and secrets. Each would leave a marker file; none may, and one line says no."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from minitx.cli.compose import compose_config
from minitx.cli.overrides import check_arguments
from minitx.cli.redaction import SHORTEST, redact, redact_overrides, refuse_secrets
from minitx.cli.targets import ALLOWED, check_names, instantiate_all
from minitx.config import (
    AblationConfig,
    CallbacksConfig,
    ConfigError,
    OptimizerConfig,
    ParameterRule,
    RunConfig,
    StudyConfig,
    TextDataConfig,
    to_dict,
)
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
TINY = ("data=kv_lookup", "debug=one_step", "model.embed_dim=8", "model.num_heads=2", "model.num_layers=1", "callbacks.progress=false")  # fmt: skip
TIMER = "lightning.pytorch.callbacks.Timer"
MARKER = "MARKER"
PICKLED = "evil.pkl"

# what each would do: run a command, read a pickle, write a file, import a module, unpack an archive
DANGEROUS = {
    "os.system": {"command": f"touch {MARKER}"},
    "os.popen": {"cmd": f"touch {MARKER}"},
    "os.mkdir": {"path": MARKER},
    "os.makedirs": {"name": MARKER},
    "posix.system": {"command": f"touch {MARKER}"},
    "subprocess.run": {"args": ["touch", MARKER]},
    "subprocess.call": {"args": ["touch", MARKER]},
    "subprocess.Popen": {"args": ["touch", MARKER]},
    "subprocess.check_output": {"args": ["touch", MARKER]},
    "builtins.open": {"file": MARKER, "mode": "w"},
    "builtins.eval": {"_args_": [f"open('{MARKER}', 'w')"]},
    "builtins.exec": {"_args_": [f"open('{MARKER}', 'w')"]},
    "io.open": {"file": MARKER, "mode": "w"},
    "io.FileIO": {"file": MARKER, "mode": "w"},
    "codecs.open": {"filename": MARKER, "mode": "w"},
    "pathlib.Path.write_text": {"_args_": [{"_target_": "pathlib.Path", "_args_": [MARKER]}, "x"]},
    "pathlib.Path.touch": {"_args_": [{"_target_": "pathlib.Path", "_args_": [MARKER]}]},
    "pickle.load": {"_args_": [{"_target_": "builtins.open", "_args_": [PICKLED, "rb"]}]},
    "pickle.loads": {"_args_": [{"_target_": "codecs.encode", "_args_": ["cpickle", "latin-1"]}]},
    "torch.load": {"f": PICKLED, "weights_only": False},
    "torch.jit.load": {"f": PICKLED},
    "torch.hub.load": {"repo_or_dir": ".", "model": "evil", "source": "local"},
    "torch.save": {"obj": 1, "f": MARKER},
    "pandas.read_pickle": {"filepath_or_buffer": PICKLED},
    "numpy.load": {"file": PICKLED, "allow_pickle": True},
    "numpy.save": {"file": MARKER, "arr": [1]},
    "joblib.load": {"filename": PICKLED},
    "shelve.open": {"filename": MARKER},
    "sqlite3.connect": {"database": MARKER},
    "logging.FileHandler": {"filename": MARKER},
    "runpy.run_path": {"path_name": "evil.py"},
    "importlib.import_module": {"name": "minitx_evil"},
    "hydra.utils.instantiate": {"config": {"_target_": "builtins.open", "file": MARKER, "mode": "w"}},
    "tarfile.TarFile.extractall": {"path": ".."},
    "shutil.unpack_archive": {"filename": "evil.zip", "extract_dir": "."},
    "shutil.copy": {"src": PICKLED, "dst": MARKER},
    "lightning.pytorch.Trainer": {"default_root_dir": MARKER},
    "minitx.cli.ablate.run_cell": {"overrides": [], "folder": MARKER},
    "minitx.training.callbacks.os.system": {"command": f"touch {MARKER}"},
}


class Evil:
    """Pickles to a call that leaves the marker."""

    def __reduce__(self):
        return os.system, (f"touch {MARKER}",)


@pytest.fixture
def room(place, monkeypatch):
    """The current folder with what an attacker would have put there."""
    (place / PICKLED).write_bytes(pickle.dumps(Evil()))
    for name in ("evil.py", "minitx_evil.py", "hubconf.py"):
        (place / name).write_text(f"open({str(place / MARKER)!r}, 'w')\ndef evil(): pass\n")
    monkeypatch.syspath_prepend(str(place))
    return place


def marked(room: Path) -> list[Path]:
    return list(room.parent.rglob(f"*{MARKER}*"))


def assert_refused(said, *parts: str) -> None:
    """One sentence and exit code 2."""
    assert said.code == 2, said
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1, said.err
    for part in parts:
        assert part in said.err, (part, said.err)


# --- classes that a config names


def test_thirty_dangerous_targets_are_tried():
    assert len(DANGEROUS) >= 30
    assert not ALLOWED & DANGEROUS.keys()


@pytest.mark.parametrize("key", ["logger", "callbacks.extra"])
@pytest.mark.parametrize("target", DANGEROUS)
def test_a_dangerous_target_is_refused_wherever_a_config_can_name_it(room, target, key):
    evil = {"_target_": target, **DANGEROUS[target]}
    nests = [
        evil,
        {"_target_": TIMER, "duration": evil},
        {"_target_": TIMER, "_args_": [[evil]]},
        {"_target_": TIMER, "_args_": [{"deep": {"deeper": [0, evil]}}]},
        {"_target_": TIMER, "duration": {"_partial_": True, **evil}},
        {**evil, "_partial_": True, "_recursive_": False, "_convert_": "all"},
    ]
    for node in nests:
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)}\.x.*(is not allowed: one of|is not read here)") as caught:
            instantiate_all({"x": node}, key, room)
        assert "\n" not in str(caught.value)
    assert marked(room) == []


@pytest.mark.parametrize("key", ["logger", "callbacks.extra"])
def test_the_program_refuses_dangerous_targets_in_a_file_with_one_line(cli, room, key):
    folder = room / "conf" / "experiment"
    folder.mkdir(parents=True)
    for target in ("torch.load", "pathlib.Path.write_text"):
        node: dict = {"x": {"_target_": TIMER, "duration": {"_target_": target, **DANGEROUS[target]}}}
        for part in reversed(key.split(".")):
            node = {part: node}
        (folder / "evil.yaml").write_text("# @package _global_\n" + yaml.safe_dump(node))
        said = cli("--config-dir", "conf", "experiment=evil", *TINY)
        assert_refused(said, f"{key}.x.duration", f"_target_={target} is not allowed")
    assert marked(room) == []


DYNAMIC = ["${oc.create:'{_target_: builtins.open, file: MARKER, mode: w}'}", "${oc.create:${oc.decode:'{_target_: builtins.open, file: MARKER, mode: w}'}}"]  # fmt: skip


@pytest.mark.parametrize("value", DYNAMIC)
def test_a_target_that_an_interpolation_makes_is_refused_or_stays_text(cli, room, monkeypatch, value):
    """Hydra's own ``instantiate`` would resolve the text once more, after the check, and build it."""
    node = {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor", "logging_interval": value}
    with pytest.raises(ConfigError, match=r"callbacks\.extra\.x cannot be built: logging_interval"):
        instantiate_all({"x": node}, "callbacks.extra", room)
    folder = room / "conf" / "experiment"
    folder.mkdir(parents=True)
    for text in (value, "\\" + value):  # resolved when the config is composed, or not at all
        text = "# @package _global_\n" + yaml.safe_dump({"callbacks": {"extra": {"x": {**node, "logging_interval": text}}}})
        (folder / "evil.yaml").write_text(text)
        assert_refused(cli("--config-dir", "conf", "experiment=evil", *TINY), "callbacks.extra.x")
    monkeypatch.setenv("MINITX_TARGET", "builtins.open")
    said = cli(*TINY, f"+callbacks.extra.x={{_target_: '${{oc.env:MINITX_TARGET}}', file: {MARKER}, mode: w}}")
    assert_refused(said, "callbacks.extra.x._target_=builtins.open is not allowed")
    assert marked(room) == []


def test_nested_allowed_targets_are_built_as_arguments(tmp_path):
    from lightning.pytorch.callbacks import Timer

    node = {"_target_": TIMER, "_args_": [{"seconds": 7}], "interval": "step"}
    (timer,) = instantiate_all({"x": node}, "callbacks.extra", tmp_path)
    assert isinstance(timer, Timer)
    assert timer.time_remaining() == 7


# --- Hydra's own settings, which it acts on before it calls us

HYDRA = {
    "+hydra.callbacks.x={_target_:builtins.open,file:MARKER,mode:w}": "hydra.callbacks",
    "+hydra.callbacks.x={_target_:torch.load,f:evil.pkl,weights_only:false}": "hydra.callbacks",
    "+hydra.job_logging={version:1,root:{handlers:[f]},handlers:{f:{class:logging.FileHandler,filename:MARKER}}}": "hydra.job_logging",
    "hydra/job_logging=default": "hydra.job_logging",
    "hydra.run.dir=MARKER": "hydra.run",
    "hydra.output_subdir=../MARKER": "hydra.output_subdir",
    "hydra.job.chdir=true": "hydra.job.chdir",
    "+hydra.job.env_set.LD_PRELOAD=./evil.so": "hydra.job.env_set",
    "-m hydra.sweep.dir=sweep hydra.sweep.subdir=../../MARKER": "hydra.sweep.subdir",
    "-m +hydra.launcher.x={_target_:builtins.open,file:MARKER,mode:w}": "hydra.launcher",
    "-m hydra.launcher._target_=os.system": "hydra.launcher",
    "-m hydra.sweeper._target_=os.system": "hydra.sweeper._target_",
}


@pytest.mark.parametrize("typed", HYDRA)
def test_hydra_itself_is_told_to_run_and_write_nothing(cli, room, typed):
    assert_refused(cli(*typed.split(" "), *TINY), f"{HYDRA[typed]} cannot be changed")
    assert marked(room) == []
    assert not (room / "runs").exists()


@pytest.mark.parametrize("how", ["--config-dir", "hydra.searchpath", "--config-name", "-m"])
def test_a_config_file_from_elsewhere_cannot_set_them_either(cli, room, how):
    folder = room / "conf" / "experiment"
    folder.mkdir(parents=True)
    evil = {"hydra": {"callbacks": {"x": {"_target_": "builtins.open", "file": MARKER, "mode": "w"}}}}
    (folder / "evil.yaml").write_text("# @package _global_\n" + yaml.safe_dump(evil))
    (folder / "good.yaml").write_text("# @package _global_\nseed: 3\n")
    (room / "conf" / "primary.yaml").write_text(yaml.safe_dump(evil | {"defaults": ["train", "_self_"]}))
    arguments = {
        "--config-dir": ("--config-dir", "conf", "experiment=evil"),
        "hydra.searchpath": ("hydra.searchpath=[file://conf]", "experiment=evil"),
        "--config-name": ("--config-dir", "conf", "--config-name", "primary"),
        "-m": ("-m", "--config-dir", "conf", "experiment=evil,good"),
    }
    assert_refused(cli(*arguments[how], *TINY), "hydra.callbacks cannot be changed")
    assert marked(room) == []


@pytest.mark.parametrize("typed", [("--experimental-rerun", PICKLED), (f"--experimental-rerun={PICKLED}",), ("--exp", PICKLED)])
def test_hydra_reads_no_pickle(cli, room, typed):
    assert_refused(cli(*typed), "--experimental-rerun is not read here")
    assert marked(room) == []


def test_a_run_after_a_refusal_finds_hydra_as_it_was(cli, room):
    import hydra._internal.hydra as inner

    before = inner.ConfigLoaderImpl, sys.modules["hydra.main"]._get_rerun_conf
    cli("hydra.run.dir=MARKER")
    assert (inner.ConfigLoaderImpl, sys.modules["hydra.main"]._get_rerun_conf) == before
    assert compose_config(["seed=3"]).seed == 3


@pytest.mark.parametrize("group", ["logger", "ablation"])
def test_what_a_run_can_do_without_may_be_taken_away(group):
    check_arguments([f"~{group}"])
    assert not getattr(compose_config([f"~{group}"]), group)


def test_every_target_that_a_shipped_config_names_is_allowed():
    """In the text of every file of configs/, so that the overrides of a grid's arms count."""
    found = {
        (str(path.relative_to(CONFIGS)), target)
        for path in CONFIGS.rglob("*.yaml")
        for line in path.read_text(encoding="utf-8").splitlines()
        for target in re.findall(r"_target_['\"]?\s*[:=]\s*['\"]?([\w.]+)", line.partition("#")[0])
    }
    assert {target for path, target in found if path.startswith("ablation/")}, "the grids name a class"
    assert {(path, target) for path, target in found if target not in ALLOWED} == set()


# --- checkpoints


@pytest.mark.parametrize("kind", ["pickle", "torch.save", "no zip"])
def test_a_malicious_checkpoint_is_refused_by_every_program(cli, room, monkeypatch, capfd, kind):
    path = room / "evil.ckpt"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        torch.save({"minitx": Evil(), "state_dict": {}}, path, _use_new_zipfile_serialization=kind != "no zip")
    assert_refused(cli(*TINY, "ckpt_path=evil.ckpt"), "ckpt_path=evil.ckpt cannot be read as a checkpoint of minitx")
    from minitx.cli import atlas, evaluate, generate, view

    more = {atlas: (), evaluate: (), generate: ("prompt=a",), view: ("text=a",)}
    for program, arguments in more.items():
        monkeypatch.setattr(sys, "argv", ["program", "ckpt_path=evil.ckpt", *arguments])
        code = program.main()
        err = capfd.readouterr().err
        assert (code, err.count("\n")) == (2, 1), (program, err)
        assert "evil.ckpt cannot be read as a checkpoint of minitx" in err
    assert marked(room) == []


# --- names that become folders

BAD_NAMES = ["../../MARKER", "a/MARKER", "..", ".", "MARKER\nb", "MARKER\0", "a\\MARKER", "/tmp/MARKER", "MARKER\u2028", ""]


def written(room: Path, values: dict) -> tuple[str, ...]:
    """Arguments that add ``values`` to a run, from a file."""
    (room / "conf" / "experiment").mkdir(parents=True, exist_ok=True)
    (room / "conf" / "experiment" / "evil.yaml").write_text("# @package _global_\n" + yaml.safe_dump(values))
    return "--config-dir", "conf", "experiment=evil"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_leads_elsewhere_is_none(name):
    message = re.escape(f"={name!r} must be a plain name")
    with pytest.raises(ConfigError, match=f"^experiment{message}"):
        check_names(RunConfig(experiment=name))
    for key in ("name", "version", "id", "project", "sub_dir") if name else ():
        with pytest.raises(ConfigError, match=rf"^logger\.board\.{key}{message}"):
            check_names(RunConfig(logger={"board": {key: name}}))
    with pytest.raises(ConfigError, match=rf"^ablation\.name{message}"):
        check_names(RunConfig(ablation=AblationConfig(name=name)))
    with pytest.raises(ConfigError, match=r"^ablation\.studies.* must be a plain name"):
        check_names(RunConfig(ablation=AblationConfig(studies={name: StudyConfig()})))


def test_a_name_with_dots_spaces_and_any_letters_is_one():
    for name in ("v1.2", "two words", "实验-3", "..."):
        check_names(RunConfig(experiment=name, logger={"board": {"name": name, "version": 3, "sub_dir": ""}}))


@pytest.mark.parametrize("name", ["../../MARKER", "MARKER\nb"])
def test_a_bad_name_in_a_file_makes_no_folder(cli, room, name):
    board = {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "name": name}
    for values in ({"experiment": name}, {"logger": {"board": board}}):
        assert_refused(cli(*written(room, values), *TINY), "must be a plain name")
    assert not (room / "runs").exists()
    assert marked(room) == []


GROUPS = ["experiment=../../x", "experiment=/etc/passwd", "+experiment=a/../../b", "model=/etc/passwd", "model=../../../etc/passwd",
          "data=..", "+x@y=z", "+experiment@../x=kv_lookup"]  # fmt: skip


@pytest.mark.parametrize("typed", GROUPS)
def test_an_option_of_a_group_is_no_path(cli, room, typed):
    before = sorted(room.parent.rglob("*"))
    assert_refused(cli(*(t for t in TINY if not typed.startswith("data=") or not t.startswith("data=")), typed))
    assert sorted(room.parent.rglob("*")) == before


@pytest.mark.parametrize("typed", ['output_dir="MARKER\nb"', 'output_dir="MARKER\0b"', 'ckpt_path="MARKER\n"'])
def test_a_path_of_two_lines_is_refused(cli, room, typed):
    assert_refused(cli(*TINY, typed), "must be a path of one line")
    assert marked(room) == []


def test_an_explicit_folder_may_be_anywhere(cli, room):
    assert cli(*TINY, "output_dir=../elsewhere").code == 0
    assert (room.parent / "elsewhere" / "metrics.csv").exists()


# --- secrets

SECRET = "0f1e2d3c4b5a6978"


KEPT = {
    "output_dir": {"output_dir": f"x{SECRET}"},
    "experiment": {"experiment": SECRET},
    "data.path": {"data": TextDataConfig(name="text", path="https://me:pass@host/x.txt")},
    "optimizer.rules[0].match": {"optimizer": OptimizerConfig(rules=(ParameterRule(match=SECRET),))},
    "logger.wandb.project": {"logger": {"wandb": {"project": SECRET}}},
    "logger.wandb.tags[1]": {"logger": {"wandb": {"tags": ["a", SECRET]}}},
    "logger.wandb": {"logger": {"wandb": {f"x{SECRET}": 3}}},
    "callbacks.extra.a.b.c": {"callbacks": CallbacksConfig(extra={"a": {"b": {"c": SECRET}}})},
}


@pytest.mark.parametrize("key", KEPT)
def test_a_secret_is_refused_where_a_run_would_keep_it(monkeypatch, key):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)} holds a secret") as caught:
        refuse_secrets(RunConfig(**KEPT[key]), [])
    assert SECRET not in str(caught.value)


def test_a_secret_under_its_key_may_go_to_a_logger_or_a_callback(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    given = {"a": {"b": {"api_key": SECRET, "tokens": 3}}}
    config = RunConfig(logger=given, callbacks=CallbacksConfig(extra=given))
    assert refuse_secrets(config, [f"+logger.a.b.api_key={SECRET}"]) is None


@pytest.mark.parametrize("typed", ["output_dir=${oc.env:MINITX_SECRET}", f"output_dir={SECRET}", "logger=wandb +logger.wandb.notes=${oc.env:MINITX_SECRET}"])  # fmt: skip
def test_a_secret_of_the_environment_gets_one_line_that_does_not_tell_it(cli, room, monkeypatch, typed):
    monkeypatch.setenv("MINITX_SECRET", SECRET)
    before = sorted(room.parent.rglob("*"))
    said = cli(*TINY, *typed.split(" "))
    assert_refused(said, "holds a secret")
    assert SECRET not in said.out + said.err
    assert sorted(room.parent.rglob("*")) == before


def test_a_grid_takes_no_secret_since_its_records_hold_every_override(cli, room, monkeypatch):
    monkeypatch.setattr("minitx.cli.ablate.run_ablation", lambda *args: pytest.fail("the grid began"))
    typed = "+logger.x={_target_:lightning.pytorch.loggers.WandbLogger,token:hello}"
    assert_refused(cli("experiment=scaling_ablation", "ablation=smoke", typed), "+logger.x holds a secret", "WANDB_API_KEY")
    assert not (room / "runs").exists()
    grid = AblationConfig(
        arms={"a": (), "b": ("seed=1", "+logger.x.api_key=hello")}, launcher="ray", launcher_options={"password": "x"}
    )
    with pytest.raises(ConfigError, match=r"^ablation\.arms\.b\[1\] holds a secret"):
        refuse_secrets(RunConfig(ablation=grid), [])
    refuse_secrets(RunConfig(ablation=dataclasses.replace(grid, arms={})), ["+ablation.launcher_options.password=x"])


def test_words_of_every_shipped_config_are_no_secrets():
    for name in ("char_lm", "scaling_ablation", "masked_lm", "finetune", "vit_digits", "translate_dates", "kv_lookup"):
        values = json.loads(json.dumps(to_dict(compose_config([f"experiment={name}"]))))
        assert redact(values) == values, name


@pytest.mark.parametrize(
    "name", ["GITHUB_TOKEN", "MY_API_KEY", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY", "SSH_PRIVATE_KEY", "KEY"]
)
def test_values_of_the_environment_are_found_in_any_text(monkeypatch, name):
    monkeypatch.setenv(name, SECRET)
    assert redact({"a": [f"x{SECRET}y"], f"k{SECRET}": 1}) == {"a": ["x<redacted>y"], "k<redacted>": 1}
    assert redact_overrides([f"a.b=[{SECRET}]"]) == ["a.b=[<redacted>]"]
    monkeypatch.setenv(name, SECRET[: SHORTEST - 1])
    assert redact([f"x{SECRET}y"]) == [f"x{SECRET}y"]


def test_other_variables_of_the_environment_are_no_secrets(monkeypatch):
    for name in ("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "KEYBOARD", "HOME", "MONKEY"):
        monkeypatch.setenv(name, SECRET)
        assert redact([SECRET]) == [SECRET]
        monkeypatch.delenv(name)


TYPED = {
    "+l.x.api_key=abc": "+l.x.api_key=<redacted>",
    "+l.x.token.value=abc": "+l.x.token.value=<redacted>",
    "++l.x.key=abc": "++l.x.key=<redacted>",
    "+l.x={a: 1, token: [abc, abc], p: q}": "+l.x={a: 1, token: <redacted>, p: q}",
    "+l.x={token: {v: abc, w: 'abc'}, p: q}": "+l.x={token: <redacted>, p: q}",
    "+l.x={password: abc abc abc}": "+l.x={password: <redacted>}",
    r"+l.x={password: 'it\'s, abc', p: q}": "+l.x={password: <redacted>, p: q}",
    '+l.x={"secret" : "}abc", p: q}': '+l.x={"secret" : <redacted>, p: q}',
    "+l.x=[{token: f(abc,abc)},{token: abc}]": "+l.x=[{token: <redacted>},{token: <redacted>}]",
    "+l.x.url=https://me:abc@host/a": "+l.x.url=https://<redacted>@host/a",
    "+l.x.url=https://abc@host/a": "+l.x.url=https://<redacted>@host/a",
    "+l.x={token: 'abc": "+l.x={token: <redacted>",
    "data.tokenizer=bpe": "data.tokenizer=bpe",
    "data.num_keys=64": "data.num_keys=64",
    "model.experts_per_token=3": "model.experts_per_token=3",
    "optimizer.rules=[{match: '(q|k)_proj', lr: 2}]": "optimizer.rules=[{match: '(q|k)_proj', lr: 2}]",
}


@pytest.mark.parametrize("typed", TYPED)
def test_a_secret_on_the_command_line_is_taken_out_whole_and_nothing_else(typed):
    assert redact_overrides([typed]) == [TYPED[typed]]


def test_no_byte_of_a_finished_run_holds_a_secret(cli, place, monkeypatch):
    """Environment, command line and git remote, in config, command, metrics, checkpoints and what a logger is handed."""
    import lightning.pytorch.loggers as loggers
    from lightning.pytorch.loggers.logger import DummyLogger

    handed: list = []

    class WandbLogger(DummyLogger):
        def __init__(self, **arguments):
            super().__init__()
            handed.append(arguments)

        def log_hyperparams(self, values):
            handed.append(values)

    monkeypatch.setattr(loggers, "WandbLogger", WandbLogger)
    monkeypatch.setenv("MINITX_AUTH_TOKEN", SECRET)
    remote = "ghp_5ecre7remote"
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "remote", "add", "origin", f"https://{remote}:x-oauth-basic@example.com/a.git"], check=True)
    arguments = ["trainer.ckpt_every=1", "trainer.max_steps=1", "logger=wandb", "output_dir=run", "callbacks.probe.every=1",
                 "+logger.wandb.settings.api_key=${oc.env:MINITX_AUTH_TOKEN}", "+logger.wandb.token=[typed5ecret,3]",
                 "+logger.wandb.settings.base_url='https://me:typed5ecret@example.com'"]  # fmt: skip
    said = cli(*(t for t in TINY if not t.startswith("debug")), "data.val_size=16", *arguments[:-1])
    assert said.code == 0, said
    made, hyperparameters = handed
    assert made["settings"]["api_key"] == SECRET
    assert made["settings"]["disable_git"] is made["settings"]["x_disable_meta"] is True
    secrets = (SECRET, "typed5ecret", remote)
    files = [path for path in (place / "run").rglob("*") if path.is_file()]
    assert {"config.yaml", "command.txt", "metrics.csv", "last.ckpt"} <= {path.name for path in files}
    for secret in secrets:
        assert secret not in str(hyperparameters) + said.out + said.err
        assert [path for path in files if secret.encode() in contents_of(path)] == []
    assert_refused(cli(*TINY, *arguments[:-4], arguments[-1]), "logger.wandb.settings.base_url holds a secret")


def contents_of(path: Path) -> bytes:
    """The bytes of a file; of a zip (a checkpoint), also those of its members, which may be compressed."""
    import zipfile

    whole = path.read_bytes()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            whole += b"".join(archive.read(name) for name in archive.namelist())
    return whole


@pytest.mark.slow
def test_no_byte_of_an_offline_folder_of_wandb_holds_a_secret(tmp_path):
    """wandb itself would record the command line, and the address of the git remote with its login."""
    subprocess.run(["git", "init", "-q"], check=True, cwd=tmp_path)
    address = "https://ghp_5ecre7remote:x-oauth-basic@example.com/a.git"
    subprocess.run(["git", "remote", "add", "origin", address], check=True, cwd=tmp_path)
    (tmp_path / "home").mkdir()
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "NETRC": str(tmp_path / "none"), "WANDB_MODE": "offline",
                   "MINITX_AUTH_TOKEN": SECRET, "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
    arguments = [*TINY, "logger=wandb", "output_dir=run", "+logger.wandb.settings.api_key=typed5ecret" + 24 * "0"]
    program = [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and not path.is_symlink()]
    assert any(path.suffix == ".wandb" for path in files)
    for secret in (b"typed5ecret", SECRET.encode(), b"ghp_5ecre7remote"):
        assert [path for path in files if secret in path.read_bytes()] == []
