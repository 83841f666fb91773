"""The attention of models on a text, on two texts or on a row of the data, for ``view_attention.py``."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from minitx.analysis.snapshot import Snapshot
from minitx.analysis.viewer import Trace
from minitx.cli.command_line import checkpoint_of
from minitx.cli.inputs import RowInputs, attention_of, paired
from minitx.cli.opened_models import CheckpointModel, FolderModel
from minitx.cli.view_config import ViewConfig
from minitx.config import ConfigError
from minitx.config.schema import require
from minitx.training.checkpoint_files import read_checkpoint

LARGEST_PAGE = 256 * 2**20
"""The size limit of a page in bytes. Browsers need minutes for larger pages, or fail."""


def model_traces(config: ViewConfig, paths: dict[str, str]) -> tuple[str, list[Trace]]:
    """Return the title of the page, and a trace for each model in ``paths`` (by key) and each text."""
    files = {key: [path] if config.model else checkpoint_files(path) for key, path in paths.items()}
    steps = {} if config.model else _steps(files)
    key, listed = next(iter(files.items()))
    first = _opened(config, key, listed[-1])  # the latest model determines the inputs and the answers
    inputs, title = _inputs(config, first)
    traces: list[Trace] = []
    for key, name in zip(files, names_of_inputs(list(paths.values())), strict=True):
        snapshots: list[list[Snapshot]] = [[] for _ in inputs]
        for file in files[key]:
            viewed = first if file == first.path else _opened(config, key, file)
            first.check_reads_alike(viewed, config.text or "")
            for taken, row in zip(snapshots, inputs, strict=True):
                options: dict[str, Any] = {
                    "layers": config.chosen_layers,
                    "step": steps.get(file),
                    "knock_out": config.knock_out,
                }
                taken.append(attention_of(viewed.model, row, **options))
                check_size(taken[-1], sum(map(len, files.values())) * len(inputs))
        traces += map(Trace, _titles(config, name), snapshots)
    return title, traces


def _opened(config: ViewConfig, key: str, file: str) -> Any:
    """Return the ``CheckpointModel`` or the ``FolderModel`` at ``file``."""
    if config.model:
        return FolderModel(key, file, config.device)
    return CheckpointModel(key, file, config.device, config.trust)


def _steps(files: dict[str, list[str]]) -> dict[str, int]:
    """Return the steps of all checkpoints, and sort the lists of checkpoints by step."""
    steps: dict[str, int] = {}
    for name, listed in files.items():
        steps |= {file: int(read_checkpoint(file, key=name, verb="read")["global_step"]) for file in listed}
        listed.sort(key=steps.__getitem__)
        duplicate = next((steps[b] for a, b in itertools.pairwise(listed) if steps[a] == steps[b]), None)
        require(duplicate is None, f"{name} has two checkpoints of step {duplicate}: remove one of them")
    return steps


def _inputs(config: ViewConfig, viewed: Any) -> tuple[list[RowInputs], str]:
    """Return the inputs (a text, two texts, or a row) and the title of the page."""
    is_pair = viewed.is_pair
    require(is_pair or config.target is None, f"target is for encoder-decoders, but the model is a {viewed.kind}")
    if is_pair and config.compare_text is not None and config.target is None:
        raise ConfigError("compare_text needs target=TEXT: the model reads both texts with the same target")
    if config.text is not None:
        answering = {"num_beams": config.num_beams, "max_new_tokens": config.max_new_tokens}
        texts = {name: text for name in ("text", "compare_text") if (text := getattr(config, name)) is not None}
        inputs = [viewed.text_inputs(text, name, config.target, **answering) for name, text in texts.items()]
        return paired(*inputs) if len(inputs) == 2 else inputs, f"Attention on {_short_quote(config.text)}"
    if config.row is None and viewed.tokenizer is not None:
        raise ConfigError("text is missing: set text=TEXT, or row=N for a row of the validation data")
    row = config.row or 0
    return [viewed.row_inputs(row)], f"Attention on validation row {row}"


def _titles(config: ViewConfig, name: str) -> list[str]:
    """Return the titles of the traces of a model: one for each text."""
    return [name] if config.compare_text is None else [_short_quote(text) for text in (config.text or "", config.compare_text)]


def _short_quote(text: str) -> str:
    return f"“{text if len(text) <= 60 else text[:59] + '…'}”"


def check_size(snapshot: Snapshot, count: int) -> None:
    """Raise a ConfigError if a page with ``count`` such snapshots is larger than ``LARGEST_PAGE``."""
    num_weights = sum(int(layer.visible.sum()) for layer in snapshot.maps)
    size = num_weights * 8 // 3  # two bytes per weight; base64 has four letters for three bytes
    if snapshot.answers is not None:
        num_answers = len(snapshot.answers.rows[0]) * sum(map(len, snapshot.answers.without.values()))
        size += num_answers * 80  # about 80 bytes per answer
    size *= count
    require(
        size <= LARGEST_PAGE,
        f"the page would have {size / 2**20:,.0f} MiB, more than browsers can show ({LARGEST_PAGE >> 20} MiB): "
        "choose some layers=, fewer steps, or a shorter text",
    )


def checkpoint_files(path: str) -> list[str]:
    """Return the checkpoints that a path names: one, or several separated by commas."""
    return [checkpoint_of(path)] if os.path.exists(path) else [checkpoint_of(part) for part in path.split(",") if part]


def names_of_inputs(paths: list[str]) -> list[str]:
    """Return names for the paths: the folders of their runs, or the whole paths if these names are not unique."""
    names = []
    for path in paths:
        last = Path(checkpoint_files(path)[-1])
        name = last.parents[1].name if last.parent.name == "checkpoints" else last.name.removesuffix(".ckpt")
        names.append(name or path)
    return paths if len(set(names)) < len(names) else names
