"""Real runs of the lab: a two-phase run equals one made by hand, the null control is equal bit for bit, and stored commands work."""

from __future__ import annotations

import hashlib
import os
import shlex
import struct
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from pretended_runs import SMALL, Here, from_start
from torch import nn

from minitx.ablation.design import AblationConfig, StartConfig, StudyConfig
from minitx.ablation.execution import CellJob, run_cells
from minitx.ablation.grid import NEW_DATA, cells
from minitx.cli.ablate import check, run_cell
from minitx.cli.compose import compose_config, compose_grid
from minitx.config import ConfigError
from minitx.data.datamodule import open_data
from minitx.training.checkpoint_files import network_weights, read_checkpoint
from minitx.training.metrics_csv import read_metrics
from minitx.training.network_building import network_of

ROOT = Path(__file__).parents[2]
ARMS = compose_grid(["experiment=scaling_ablation", "ablation=smoke"]).arms


def trained(folder, *words, steps, keep=True):
    cell = [*SMALL, f"trainer.max_steps={steps}", *words]
    return run_cell(CellJob(cell, folder, steps, keeps_weights=keep))


def losses(folder):
    return [row["train_loss"] for row in read_metrics(folder / "metrics.csv")]


# --- the second phase


def test_a_second_phase_starts_from_a_model_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "own", None)  # which is put back, or removed, afterwards
    del sys.modules["own"]
    own = [f"--config-dir={ROOT / 'examples' / 'own_project' / 'conf'}", "experiment=sorted_task", "trainer.max_steps=2"]
    words = [*own, "trainer.val_every=0", "callbacks.progress=false", "callbacks.announce=null", "trainer.log_every=1"]
    run_cell(CellJob([*words, "seed=1"], tmp_path / "first", 2, keeps_weights=True))
    start = from_start(tmp_path / "first" / "checkpoints" / "last.ckpt")
    result = run_cell(CellJob([*words, "seed=1001", *start], tmp_path / "run", 2))
    assert result["start_error"] == 0.0


def test_a_second_phase_trains_the_hand_made_fold_as_plain_torch_on_new_batches(tmp_path, first):
    words = ["optimizer=adamw", "optimizer.lr=0.01", *ARMS["unscaled"], f"seed={3 + NEW_DATA}"]
    result = trained(tmp_path / "run", *words, *from_start(first), steps=5)
    assert 0.0 <= result["start_error"] < 1e-5
    config = compose_config([*SMALL, *words])
    data = open_data(config.data, config.trainer, seed=config.seed)
    model = network_of(config.model, data)
    model.load_state_dict(network_weights(read_checkpoint(first)))
    folded = [(part, p) for part, p in model.named_parameters() if "q_proj" in part or "k_proj" in part]
    assert len(folded) == 4  # weights and biases
    with torch.no_grad():
        for _, parameter in folded:
            parameter *= 16**-0.25
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=config.optimizer.get("betas"), weight_decay=0.0)
    expected = []
    for batch in islice(data.train_dataloader(), 5):
        inputs = {key: batch[key] for key in ("input_ids", "token_type_ids")}
        loss = nn.functional.cross_entropy(model(**inputs).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-6)


def test_a_second_phase_that_does_not_begin_as_the_same_function_is_refused(tmp_path, first):
    trained(tmp_path / "other", "trainer.ckpt_every=100000", "seed=4", steps=1)
    words = [f"init_from.path={tmp_path / 'other' / 'checkpoints' / 'last.ckpt'}", *from_start(first)[1:]]
    with pytest.raises(ConfigError, match=r"the outputs differ from the outputs of .*last\.ckpt by"):
        trained(tmp_path / "run", *words, steps=2)


# --- the null control


@pytest.mark.parametrize(("optimizer", "fold", "wrong", "rate"), [
    ("adamw", "full_fold", "unscaled", 0.003), ("sgd", "full_fold_sgd", "full_fold", 0.03),
])  # fmt: skip
@pytest.mark.parametrize("phase", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_folded_model_with_folded_rates_is_the_scaled_one_bit_for_bit(tmp_path, first, optimizer, fold, wrong, rate, phase):
    words = [f"optimizer={optimizer}", f"optimizer.lr={rate}", "seed=7", *(from_start(first) if phase == 2 else [])]
    scaled, folded, other = (trained(tmp_path / arm, *words, *ARMS[arm], steps=20) for arm in ("inv_sqrt", fold, wrong))
    for name in ("digest", "val_loss"):
        assert folded[name] == scaled[name] != other[name]


# --- grids of real runs


def two_phases():
    base = (*SMALL, "trainer.max_steps=6", "model.dropout=0.1")
    first = StudyConfig(base=(*base, "trainer.ckpt_every=100000"), arms=("inv_sqrt",), seeds=(3,))
    start = StartConfig(study="first", arm="inv_sqrt", solved=False)
    second = StudyConfig(base=(*base, "optimizer=sgd"), arms=("unscaled",), seeds=(3,), start=start)
    return AblationConfig(arms=ARMS, studies={"first": first, "second": second})


@pytest.mark.slow
def test_a_stored_command_gives_the_bits_of_a_used_process_in_a_new_one(tmp_path):
    config, paths = two_phases(), [str(ROOT), os.environ.get("PYTHONPATH", "")]
    check(cells(config))
    (tmp_path / "grid").mkdir()
    first, second = run_cells(Here(), config, cells(config), tmp_path / "grid", run_cell)
    assert (first["status"], second["status"], second["start"]) == ("done", "done", first["cell"])
    _, program, *words = shlex.split(second["command"])
    command = [sys.executable, ROOT / program, *words, f"output_dir={tmp_path / 'alone'}"]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    digest = hashlib.sha256(struct.pack("<6d", *losses(tmp_path / "alone"))).hexdigest()
    assert digest == second["result"]["digest"]


@pytest.mark.parametrize(("study", "words", "message"), [
    ("first", ("trainer.ckpt_every=0",), "ablation.studies.first: trainer.ckpt_every must not be 0, because other runs start from its weights"),
    ("second", ("trainer.devices=2", "trainer.strategy=ddp"), "ablation.studies.second: trainer.devices must be 1"),
    ("second", ("model.num_heads=5",), "ablation.studies.second, arm unscaled: .*num_heads=5"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused_before_it_is(study, words, message):
    config = two_phases()
    wrong = replace(config.studies[study], base=(*config.studies[study].base, *words))
    with pytest.raises(ConfigError, match=message):
        check(cells(replace(config, studies={**config.studies, study: wrong})))
