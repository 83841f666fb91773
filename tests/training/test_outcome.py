"""The files of a run and what is read off them."""

import csv
import dataclasses
import json
import logging
import math
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from extra import of_digits, train_with
from torch import nn

import minitx.training.run as run_module
from minitx.ablation.measures import result_of
from minitx.cli.train import summary_line
from minitx.config import ConfigError, EvaluationConfig
from minitx.data.batches import Address
from minitx.data.datamodule import DataModule
from minitx.data.task import Task
from minitx.training import json_lines
from minitx.training.evaluation import Evaluation, report
from minitx.training.input_dtype import in_own_dtype
from minitx.training.json_lines import add_records, read_json_lines
from minitx.training.metrics_csv import MetricsFile, read_metrics
from minitx.training.nonfinite import NonFiniteError
from minitx.training.outcome import summarise
from minitx.training.run import train
from minitx.training.run_folder import run_folder
from minitx.training.summary import describe_data, describe_device
from minitx.training.unsupported import check_callbacks


def test_the_summary_names_the_validation_rows_that_all_processes_read():
    rows = [{"input_ids": torch.tensor([i]), "labels": 0} for i in range(40)]
    data = DataModule(Task(name="mine", train=rows, val=rows), batch_size=4, val_batch_size=7)
    for world in (1, 2, 3):
        source = data.val_source(world)
        read = sum(len(source[Address(step, rank=rank)]["labels"]) for step in range(2) for rank in range(world))
        assert f"the first {read} of 40 to validate" in describe_data(data, 2, world)


FLOORS = {"unigram": 3.0, "bigram": 2.5}


def write(path, rows, start_step=0):
    file = MetricsFile(path, start_step)
    file.begin()
    for values, step in rows:
        file.log_metrics(values, step)
    file.finalize("success")


def test_values_of_one_step_share_its_row_and_are_on_disk_bit_equal_before_the_file_is_closed(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, [({"train_loss": 0.1 + 0.2, "lr": 1e-300}, 1), ({"val_loss": 1 / 3}, 1), ({"train_loss": float("nan")}, 2)])
    first, second = read_metrics(path)
    assert (first["step"], first["train_loss"], first["lr"], first["val_loss"]) == (1, 0.1 + 0.2, 1e-300, 1 / 3)
    assert (second["step"], second["val_loss"], math.isnan(second["train_loss"])) == (2, None, True)
    file = MetricsFile(tmp_path / "open.csv")
    file.begin()
    for step in (1, 2, 3):
        file.log_metrics({"train_loss": float(step)}, step)
        assert len(read_metrics(tmp_path / "open.csv")) == step


def test_going_on_drops_what_came_after_the_checkpoint_and_keeps_the_rest_bit_equal(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, [({"train_loss": 1 / step, "tokens": step}, step) for step in range(1, 8)])
    before = read_metrics(path)
    write(path, [({"val_loss": 0.5}, 4), ({"train_loss": 9.0}, 5)], start_step=4)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]
    assert read_metrics(path)[:4] == [*before[:3], {**before[3], "val_loss": 0.5}]


def test_a_metrics_file_that_was_cut_anywhere_gives_whole_rows_only(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, [({"train_loss": 1 / (3 * step), "seconds": 1e-5 * step, "tokens": 100 * step}, step) for step in (1, 2, 3)])
    whole, text = read_metrics(path), path.read_bytes()
    for end in range(0, len(text), 3):
        path.write_bytes(text[:end])
        rows = read_metrics(path)
        assert rows == whole[: len(rows)], end
        assert len(rows) >= text[:end].count(b"\n") - 1


def test_a_crash_while_the_file_is_written_anew_loses_no_row(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    write(path, [({"train_loss": 1.0}, 1), ({"train_loss": 2.0}, 2)])
    before = path.read_bytes()
    monkeypatch.setattr(csv.DictWriter, "writerows", None)
    for rows, start_step in (([], 1), ([({"train_loss": 3.0, "a_new_column": 1.0}, 3)], 2)):
        with pytest.raises(TypeError):
            write(path, rows, start_step)
        assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_or_a_crash_leaves_the_files_of_the_run_that_goes_on_as_they_were(tmp_path, monkeypatch):
    config, probes = tmp_path / "config.yaml", tmp_path / "probes.jsonl"
    config.write_text("old", encoding="utf-8")
    config.with_name("config.yaml.part").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="No space left on device"), run_folder(tmp_path, {config.name: "new"}):
        pass
    add_records(probes, {"step": 1}, {"step": 2})
    monkeypatch.setattr(json_lines, "add_records", None)
    with pytest.raises(TypeError):
        json_lines.drop_records(probes, 1)
    assert config.read_text(encoding="utf-8") == "old" and len(read_json_lines(probes)) == 2


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    (tmp_path / "logs").mkdir()
    hold = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(tmp_path / "logs" / "rank_0.log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with (
            pytest.raises(ConfigError, match="another process is training"),
            run_folder(tmp_path, {"config.yaml": "a"}),
        ):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["logs"]
        other.stdin.close()
    with run_folder(tmp_path, {"config.yaml": "b"}):
        assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == "b"


def summary(folder, *rows, **facts):
    write(folder / "metrics.csv", rows)
    plain = {"steps": 2, "floors": FLOORS, "nonfinite": None, "network": torch.nn.Linear(2, 1), "metrics": {}}
    return summarise(folder, **{**plain, **facts})


def test_a_result_is_read_off_the_last_step_and_the_last_validation_and_is_plain_json(tmp_path):
    first, second = ({"train_loss": 4.0}, 1), ({"val_loss": 3.5, "val_accuracy": 0.25}, 1)
    result = summary(tmp_path, first, second, ({"train_loss": 2.0}, 2), ({"val_loss": 2.5}, 2))
    assert (result["steps"], result["train_loss"], result["val_loss"], result["val_accuracy"]) == (2, 2.0, 2.5, 0.25)
    assert (result["nonfinite_step"], result["floors"], result["num_parameters"]) == (None, FLOORS, 3)
    result = summary(tmp_path, ({"train_loss": math.inf}, 3), ({"val_loss": math.nan, "val_accuracy": 0.5}, 3))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert (result["train_loss"], result["val_loss"], result["val_accuracy"]) == (None, None, 0.5)
    result = summary(tmp_path, first, second, nonfinite=NonFiniteError(1, math.inf, math.inf))
    found = (result["steps"], result["nonfinite_step"], result["train_loss"], result["val_loss"], result["val_accuracy"])
    assert found == (1, 2, 4.0, None, None)  # a run that was not finite has no validation
    assert (summary(tmp_path)["train_loss"], summary(tmp_path)["metrics"]) == (None, {})
    result = summary(tmp_path, first, second, metrics={"mine": 0.5, "train_loss": 4.1})
    assert result["metrics"] == {"mine": 0.5, "train_loss": 4.0, "val_loss": 3.5, "val_accuracy": 0.25}


def test_a_run_says_model_device_data_steps_and_folder(make_config, tmp_path, caplog):
    caplog.set_level("INFO")
    frozen = {"optimizer__rules": [{"match": "ffn|feed", "trainable": False}], "schedule__warmup_steps": 3}
    train(make_config(trainer__val_every=3, trainer__accumulate=2, trainer__clip=0.5, **frozen), tmp_path / "run")
    said = next(message for message in caplog.messages if message.startswith("model "))
    lines = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert list(lines) == ["model", "device", "data", "tokenizer", "training", "steps", "folder"]
    assert all(part in lines["model"] for part in ("DecoderLM", "trained", "num_layers 1", "num_heads 2", "embed_dim 8"))
    assert "CPU" in lines["device"] and "32-true" in lines["device"] and "12 a step in 2 parts" in lines["data"]
    parts = ("CrossEntropy, sum / labels of a step", "adamw, lr 0.001", "cosine, warmup_steps 3", "clip 0.5")
    assert all(part in said for part, said in zip(parts, lines["training"].split(" · "), strict=True)), lines["training"]
    assert "without ffn|feed" in lines["training"]
    assert (lines["steps"], lines["folder"]) == ("6, validation every 3", str(tmp_path / "run"))


@pytest.mark.parametrize(("load", "threads", "is_said"), [(2.0, 2, True), (0.2, 2, False), (9.0, 1, False), (0.2, 3, True)])
def test_a_run_whose_threads_would_wait_for_other_programs_says_so(monkeypatch, load, threads, is_said):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    torch.set_num_threads(threads)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert ("trainer.threads=1" in describe_device(trainer)) is is_said


def test_where_a_target_is_a_row_speed_is_in_rows(make_config, tmp_path, caplog):
    caplog.set_level(logging.INFO, "minitx")
    train(of_digits(make_config(callbacks={"progress": True}, trainer__max_steps=2)), tmp_path / "run")
    assert re.search(r"step 2/2 .* rows/s", caplog.text) and "tokens/s" not in caplog.text
    assert "sum / rows of a step" in caplog.text


def test_reports_that_were_asked_for_are_shown_or_stand_in_the_folder(make_config, tmp_path, caplog):
    """Lightning prints them by its logger, whose notices a run hides."""
    caplog.set_level(logging.INFO)
    summary = {"summary": {"_target_": "lightning.pytorch.callbacks.ModelSummary", "max_depth": 1}}
    profiler = {"_target_": "lightning.pytorch.profilers.SimpleProfiler"}
    config = make_config(trainer__max_steps=1, trainer__profiler=profiler, callbacks=summary)
    train(config, tmp_path / "run")
    assert "optimizer_step" in (tmp_path / "run" / "fit-profile.txt").read_text(encoding="utf-8")
    assert re.search(r"network +\| DecoderLM", caplog.text)


OTHERS = [
    ("callbacks", "lightning.pytorch.callbacks.StochasticWeightAveraging", {"swa_lrs": 0.1}, "callbacks: Sto.* epoch"),
    ("callbacks", "lightning.pytorch.callbacks.GradientAccumulationScheduler", {"scheduling": {0: 3}}, "callbacks: Gr.* epoch"),
    ("callbacks", "lightning.pytorch.callbacks.BatchSizeFinder", {}, "callbacks: BatchSizeFinder .* set data.batch_size"),
    ("callbacks", "lightning.pytorch.callbacks.LearningRateFinder", {}, "callbacks: LearningRateFinder .* -m optimizer.lr"),
    ("callbacks", "lightning.pytorch.callbacks.BackboneFinetuning", {}, "callbacks: BackboneFinetuning .* optimizer.rules"),
    ("callbacks", "lightning.pytorch.callbacks.ModelCheckpoint", {"monitor": "val_loss", "every_n_train_steps": 4}, "callbacks: ModelCheckpoint .* earlier weights: remove"),
    ("callbacks", "torch.nn.ReLU", {}, r"callbacks\.own\._target_=torch\.nn\.ReLU must return a Callback of the package lightning, got torch\.nn\.modules\.activation\.ReLU"),
    ("logger", "torch.nn.ReLU", {}, r"logger\.own\._target_=torch\.nn\.ReLU must return a Logger of the package lightning, got torch\.nn\.modules\.activation\.ReLU"),
]  # fmt: skip


@pytest.mark.parametrize(("group", "target", "given", "said"), OTHERS)
def test_what_is_no_callback_or_logger_or_counts_epochs_is_refused_before_the_run_has_a_folder(make_config, tmp_path, group, target, given, said):  # fmt: skip
    with pytest.raises(ConfigError, match=f"^{said}"):
        train(make_config(**{group: {"own": {"_target_": target, **given}}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_averaged_by_epoch_are_refused_with_epochs_too():  # last.ckpt had no average
    with pytest.raises(ConfigError, match="its result would not be saved"):
        check_callbacks([L.callbacks.StochasticWeightAveraging(0.1)])


def test_of_two_runs_that_start_in_one_folder_at_once_the_second_to_be_built_is_refused(make_config, tmp_path, monkeypatch):
    """Both find the folder free; the first has begun when the second is built."""
    build, config = run_module.build_network, make_config(trainer__max_steps=2)

    def slowly(*arguments, **options):
        monkeypatch.setattr(run_module, "build_network", build)
        train(config, tmp_path / "run", files={"command.txt": "first"})
        return build(*arguments, **options)

    monkeypatch.setattr(run_module, "build_network", slowly)
    with pytest.raises(ConfigError, match="already contains a run"):
        train(config, tmp_path / "run", files={"command.txt": "second"})
    assert (tmp_path / "run" / "command.txt").read_text(encoding="utf-8") == "first"


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_pixels_in_float32_train_a_network_of_another_dtype(make_config, tmp_path, monkeypatch, precision):
    monkeypatch.setattr("minitx.training.trainer.cpu_precision", str)  # whatever the processor has
    config = make_config(trainer__precision=precision, trainer__max_steps=2, probe__every=2)
    train(of_digits(config, evaluation=EvaluationConfig(at_end=True, num_rows=7)), tmp_path / "run")
    assert all((tmp_path / "run" / name).stat().st_size for name in ("evaluation.json", "probes.jsonl"))
    pixels, kept = torch.ones(1, 8), torch.nn.LayerNorm(8)  # a norm that stays in float32
    network = torch.nn.Sequential(kept, torch.nn.Linear(8, 2, dtype=torch.bfloat16))
    without_weights = torch.nn.Identity()
    in_own_dtype(without_weights)
    assert without_weights(input=pixels) is pixels
    hook = in_own_dtype(network)
    assert network(input=pixels).dtype == torch.bfloat16
    hook.remove()
    with pytest.raises(RuntimeError, match="dtype"):
        network(input=pixels)


@pytest.mark.parametrize("before", [True, False])
def test_a_run_leaves_threads_and_deterministic_kernels_as_they_were(make_config, tmp_path, monkeypatch, before):
    threads, found = torch.get_num_threads(), []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)  # which deterministic kernels switch off
    torch.use_deterministic_algorithms(before)
    look = L.callbacks.LambdaCallback(
        on_train_end=lambda *_: found.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()))
    )
    try:
        for name, asked in {"with": {"threads": threads + 1, "deterministic": True}, "without": {}}.items():
            config = make_config(trainer__max_steps=1, **{f"trainer__{key}": value for key, value in asked.items()})
            train_with(config, tmp_path / name, look)
            assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (threads, before)
            assert torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
    assert found == [(threads + 1, True), (threads, before)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path):
    (tmp_path / "evaluation.json").symlink_to("/dev/full")
    (tmp_path / "probes.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*probes.jsonl'"):
        add_records(tmp_path / "probes.jsonl", {"step": 1})
    with pytest.raises(OSError, match=r"No space left on device: '.*evaluation.json'"):
        report(Evaluation({}), tmp_path)
    (tmp_path / "metrics.csv.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*metrics.csv'"):
        MetricsFile(tmp_path / "metrics.csv").begin()


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_plain_lines_without_a_terminal_and_nothing_is_advertised(make_config, tmp_path, capfd, caplog, progress):
    caplog.set_level("INFO")
    train(make_config(callbacks={"progress": progress}, trainer__val_every=3), tmp_path)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("minitx")]
    assert any(re.fullmatch(r"step 6/6 .*\d\.\d{4}.*tokens/s.*left", line) for line in lines) == progress, lines
    assert {line[:8] for line in lines if "validation loss" in line} == ({"step 3/6", "step 6/6"} if progress else set())
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.name.startswith("lightning") and record.levelno >= 20] == []


class CountEpochs(L.Callback):
    calls = 0

    def on_train_epoch_end(self, trainer, pl_module):
        CountEpochs.calls += 1


def test_a_hook_of_epochs_is_called_once_in_a_run_of_several_and_the_log_names_it(make_config, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    monitor = L.callbacks.LearningRateMonitor()
    train_with(make_config(trainer__max_epochs=2, trainer__max_steps=None), tmp_path / "run", CountEpochs(), monitor)
    assert CountEpochs.calls == 1
    lines = [message for message in caplog.messages if message.startswith("callbacks: ")]
    assert len(lines) == 1 and "CountEpochs.on_train_epoch_end is called once" in lines[0]


class NanInValidation(nn.Module):
    """The cross-entropy of a step; NaN in evaluation."""

    def forward(self, logits, batch):
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return loss * (1.0 if torch.is_grad_enabled() else math.nan)


def test_a_validation_that_is_not_finite_counts_as_a_step_that_is_not(make_config, tmp_path):
    config = make_config(trainer__val_every=3)
    with pytest.raises(NonFiniteError, match="the validation loss after step 3 is not finite"):
        train(config, tmp_path / "stop", objective=NanInValidation())
    result = train(dataclasses.replace(config, on_nonfinite="record"), tmp_path / "record", objective=NanInValidation())
    found = (result["steps"], result["nonfinite_step"], result["nonfinite_phase"], result["val_loss"])
    assert found == (3, 3, "validation", None)
    assert summary_line(result, tmp_path).startswith("not finite in the validation after step 3  ")
    assert result_of(tmp_path / "record", result, 3)["nonfinite_step"] == 4  # in the records of grids: last step + 1


def test_a_run_that_ends_early_says_why(make_config, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    early = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val_loss", "patience": 2}
    train(make_config(optimizer__lr=1e-30, trainer__val_every=1, callbacks={"early": early}), tmp_path / "early")
    assert [line for line in caplog.messages if "ended at step 3 of 6" in line and "val_loss" in line and "patience 2" in line]
    stop = L.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", True))
    train_with(make_config(), tmp_path / "own", stop)
    assert "the run ended at step 1 of 6: a callback or an argument of trainer.extra ended it" in caplog.messages
