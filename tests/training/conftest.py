"""Tiny runs: one layer of width 8 on a small text of the test's own."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minitx.config import Part, RunConfig, TrainerConfig, node
from minitx.config.training import CALLBACKS
from minitx.nn import build_model

POEM = "Once upon a midnight dreary, while I pondered, weak and weary,\nOver many a quaint and curious volume\n"


@pytest.fixture
def make_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """A tiny config; keywords ``group__key=value`` set a key of a group or of a callback, others a key of the run."""
    monkeypatch.setattr("minitx.data.token_cache.data_dir", lambda: tmp_path / "data")
    text = tmp_path / "text.txt"
    text.write_text(POEM * 9, encoding="utf-8")
    model = node(build_model, embed_dim=8, num_heads=2, num_layers=1, ffn_dim=16, max_len=16, init="lecun")
    data = {"_target_": "minitx.data.text", "path": str(text), "batch_size": 12, "context_len": 7}
    trainer = TrainerConfig(
        max_steps=6, accelerator="cpu", val_every=0, log_every=1, ckpt_every=0, val_batches=2, rehearse=False
    )

    def make(**changes: Any) -> RunConfig:
        config = RunConfig(model=model, data=data, trainer=trainer, callbacks={})
        groups: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            group, _, key = name.rpartition("__")
            groups.setdefault(group, {})[key] = value
        own = groups.pop("", {})
        entries = own.pop("callbacks", {})
        for name in {*CALLBACKS} & {*groups}:
            entries |= {name: {**CALLBACKS[name], **({"batch_size": 3} if name == "probe" else {}), **groups.pop(name)}}
        changed: dict[str, Any] = {"callbacks": entries}
        for group, keys in groups.items():
            old = getattr(config, group)
            changed[group] = old.with_(**keys) if isinstance(old, Part) else dataclasses.replace(old, **keys)
        return dataclasses.replace(config, **changed, **own)

    return make
