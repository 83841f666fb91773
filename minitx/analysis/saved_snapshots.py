"""The files of snapshots: the probe of a run writes them, and ``read_snapshots`` reads them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from minitx.analysis.answers import Answer, Answers
from minitx.analysis.attention_map import AttentionMap
from minitx.analysis.snapshot import Snapshot
from minitx.crash_safe import replacing


def write_snapshot(snapshot: Snapshot, folder: Path) -> Path:
    """Write a snapshot to ``folder/step_00000100.safetensors``.

    Weights are in float16, logits in float32, masks as bytes, and tokens in the header. Readers never see half a file.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {f"ids/{axis}": tensor for axis, tensor in snapshot.ids.items()}
    tensors |= {f"real/{axis}": tensor for axis, tensor in snapshot.real.items()}
    for layer in snapshot.maps:
        parts = {"weights": layer.weights.half(), "visible": layer.visible, "max_logit": layer.max_logit.float()}
        tensors |= {f"{part}/{layer.name}": tensor for part, tensor in parts.items()}
    maps = [layer.place() for layer in snapshot.maps]
    header: dict[str, Any] = {"step": snapshot.step, "title": snapshot.title, "tokens": snapshot.tokens, "maps": maps}
    header["layers"] = snapshot.layers
    if snapshot.answers is not None:  # answers without heads are not stored
        header["answers"] = [snapshot.answers.axis, [[asdict(answer) for answer in row] for row in snapshot.answers.rows]]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{snapshot.step or 0:08}.safetensors"
    with replacing(path) as part:
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, part, {"minitx": json.dumps(header, ensure_ascii=False)}
        )
    return path


def read_snapshot(path: Path) -> Snapshot:
    """Read a file that ``write_snapshot`` wrote.

    Raises:
        ValueError: the file is not a snapshot.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            header: dict[str, Any] = json.loads((file.metadata() or {})["minitx"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, KeyError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a snapshot of attention: {error}") from None
    maps = []
    for place in header["maps"]:
        weights, visible, max_logit = (tensors[f"{part}/{place['name']}"] for part in ("weights", "visible", "max_logit"))
        maps.append(AttentionMap(**place, weights=weights.float(), visible=visible, max_logit=max_logit))
    ids, real = (
        {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}
        for kind in ("ids/", "real/")
    )
    answers = None
    if "answers" in header:
        axis, rows = header["answers"]
        answers = Answers(axis, [[Answer(**{**each, "top": tuple(map(tuple, each["top"]))}) for each in row] for row in rows])
    layers = tuple(header.get("layers", ()))
    return Snapshot(tuple(maps), header["tokens"], ids, real, header["step"], header["title"], answers, layers)


def read_snapshots(folder: Path | str) -> list[Snapshot]:
    """Read all snapshots of a run, in the order of their steps. ``folder`` is the run's folder or its ``attention/``.

    Raises:
        ValueError: the folder has no snapshots, or a file is not a snapshot.

    >>> import torch
    >>> from tempfile import TemporaryDirectory
    >>> from minitx.analysis import take_snapshot
    >>> from minitx.nn import MultiHeadAttention
    >>> snapshot = take_snapshot(MultiHeadAttention(6, 2), {"query": torch.randn(1, 3, 6)}, step=50)
    >>> with TemporaryDirectory() as run:
    ...     path = write_snapshot(snapshot, Path(run) / "attention")
    ...     [again] = read_snapshots(Path(run))
    >>> path.name, again.step
    ('step_00000050.safetensors', 50)
    """
    folder = Path(folder)
    paths = sorted(folder.glob("step_*.safetensors")) or sorted((folder / "attention").glob("step_*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no snapshots of attention: train with callbacks.probe.weights_every=N")
    return sorted(map(read_snapshot, paths), key=lambda snapshot: snapshot.step or 0)
