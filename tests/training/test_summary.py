"""What a run says before its first step, and presets that Hydra composes."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_class

from minitx.config import TransformerConfig
from minitx.nn.models import build_model
from minitx.training.run import quiet_lightning
from minitx.training.summary import summary


@pytest.fixture
def trainer():
    with quiet_lightning():
        return L.Trainer(accelerator="cpu", max_steps=1009, val_check_interval=194, accumulate_grad_batches=2, check_val_every_n_epoch=None, logger=False, enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip


def lines_of(text):
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def test_a_run_says_model_device_data_steps_and_folder(trainer):
    config = TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)
    network = build_model(config)
    network.blocks[0].requires_grad_(False)
    facts = {"data": "kjv, 97 rows", "tokenizer": None}
    lines = lines_of(summary(trainer, network, Path("runs/x"), model=config, facts=facts))
    assert list(lines) == ["model", "device", "data", "steps", "folder"]
    total = sum(p.numel() for p in network.parameters())
    for part in ("DecoderLM", f"{total:,}", f"{network.num_parameters():,}", "num_layers 2", "num_heads 3", "embed_dim 12"):
        assert part in lines["model"]
    assert "CPU" in lines["device"] and "32-true" in lines["device"]
    assert "1,009" in lines["steps"] and "97" in lines["steps"]
    assert lines["folder"] == "runs/x"


def test_a_model_of_the_users_is_told_by_its_class_and_size(trainer):
    lines = lines_of(summary(trainer, torch.nn.Linear(3, 5), Path("run")))
    assert lines["model"] == "Linear, 20 parameters"


PRESETS = {
    "callbacks": ["default", "probe", "samples", "early_stopping", "ema", "top_k", "lr_monitor"],
    "logger": ["csv", "wandb", "tensorboard"],
}


@pytest.mark.parametrize("group", PRESETS)
def test_presets_add_up_and_name_classes_that_exist(request, group):
    """A defaults list of all of them, in the order of their names."""
    folder = request.config.rootpath / "configs"
    assert sorted(PRESETS[group]) == sorted(path.stem for path in (folder / group).glob("*.yaml"))
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3"):
        found = compose(overrides=[f"+{group}=[{','.join(PRESETS[group])}]"])[group]
    assert set(PRESETS[group]) - {"default", "csv"} <= set(found)
    for node in found.values():
        if "_target_" in (node if hasattr(node, "keys") else ()):
            assert isinstance(get_class(node["_target_"]), type)
