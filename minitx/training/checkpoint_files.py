"""The files of checkpoints. Writing never loses the previous checkpoint. Reading rejects damaged files, and never executes code.

A checkpoint is a zip file of ``torch.save``. It is written under another name, synced to disk and then renamed, so that
``last.ckpt`` is always a complete checkpoint, the old or the new one. A zip file contains a CRC-32 of each record. torch does
not check it, but ``read_checkpoint`` does.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.utils.serialization import config as serialization

from minitx.config import ConfigError, is_node
from minitx.config.failures import FailedRunError
from minitx.config.schema import first_line, require
from minitx.crash_safe import PART, replacing
from minitx.data.task import Task
from minitx.data.tokenizer import Tokenizer

FORMAT = 1
"""The format that this version writes. This version reads this format and all earlier ones."""


class CheckpointError(FailedRunError):
    """A checkpoint could not be written. The previous checkpoint is intact."""


def write_checkpoint(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint`` to ``path``. Until it is complete, ``path`` is the previous checkpoint.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("wb") as file, serialization.patch({"save.compute_crc32": True}):  # type: ignore[attr-defined]
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(path.parent)  # the new name must be on disk, too
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if writing fails
        cause = next((e for e in (error, error.__cause__, error.__context__) if isinstance(e, OSError)), None)
        reason = cause.strerror if cause is not None else first_line(error)
        note = "; the previous checkpoint is intact" if path.exists() else ""
        raise CheckpointError(f"checkpoint {path} could not be written: {reason}{note}") from error


def clean_up(folder: Path) -> None:
    """Remove incomplete files that a killed run left in its folder of checkpoints."""
    for part in folder.glob(f"*{PART}"):
        part.unlink()


def read_checkpoint(path: str | Path, *, key: str = "ckpt_path", verb: str = "resume from") -> dict[str, Any]:
    """Read the content of a checkpoint to the CPU, without executing code in it.

    Args:
        key, verb: for messages: the key that names the checkpoint, and the purpose of reading it.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint of minitx, is damaged, or was written by a newer version. The
            message also names the newest intact checkpoint in the folder.
    """
    path = Path(path)
    if os.path.isdir(path):
        offer = _offer(path / "x.ckpt", key, verb) or _offer(path / "checkpoints" / "x.ckpt", key, verb)
        raise ConfigError(f"{key}={path} is a folder{offer.replace(' in this folder', ' in it') or ' without a checkpoint'}")
    if not os.path.isfile(path):  # False even for a name that is too long
        raise ConfigError(f"{key}={path} does not exist{_offer(path, key, verb)}")
    try:
        return _read(path)
    except Exception as error:  # damaged and foreign files raise many types of error
        raise ConfigError(
            f"{key}={path} cannot be read as a checkpoint of minitx: {first_line(error)}{_offer(path, key, verb)}"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        _check_records(file)
        try:  # load the open file, because a run may have replaced ``path`` in the meantime
            checkpoint = torch.load(f"/dev/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many types of error
            reason = first_line(error).partition(". ")[0]
            raise ConfigError(f"it is damaged, or another program wrote it ({reason})") from None
    state = checkpoint.get("minitx") if isinstance(checkpoint, Mapping) else None
    if not isinstance(state, Mapping) or not isinstance(format := state.get("format"), int):
        raise ConfigError("another program wrote it: it has no minitx.format")
    require(format <= FORMAT, f"a newer minitx wrote it (format {format}, this version reads up to {FORMAT}): update minitx")
    require(
        is_node(state.get("model")), "a version of minitx before 0.1 wrote it, and its format is not supported: train again"
    )
    return dict(checkpoint)


def _check_records(file: BinaryIO) -> None:
    """Check the CRC-32 of each record of a zip file, without loading the whole file.

    Raises:
        ConfigError: a record does not match, or the file is not a complete zip file.
    """
    start = file.read(4)
    require(bool(start), "it is empty")
    try:
        with zipfile.ZipFile(file) as records:
            # torch does not read records that are marked as folders, and returns uninitialised memory for them
            folders = [record.filename for record in records.infolist() if record.external_attr & 0x10]
            damaged = records.testzip()
    except Exception:  # a damaged directory raises many types of error
        is_zip = b"PK\3\4".startswith(start)
        raise ConfigError("it is cut short or damaged" if is_zip else "another program wrote it, not as a zip file") from None
    require(not folders, f"it is damaged: record {' '.join(folders[:1])} is marked as a folder")
    require(damaged is None, f"it is damaged: record {damaged!r} does not match its CRC-32")


def _offer(path: Path, key: str, verb: str) -> str:
    """Return advice for a message about ``path``: the newest intact checkpoint in its folder, or an empty string."""
    files = filter(Path.is_file, path.parent.glob("*.ckpt"))
    for file in sorted(files, key=lambda p: p.stat().st_mtime, reverse=True):
        with suppress(Exception):  # damaged and foreign files are skipped
            _read(file)
            return f"; {verb} the newest intact checkpoint in this folder with {key}={file}"
    return ""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def stored_state(config: Mapping[str, Any], model: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Return the plain data that every checkpoint of a run contains: the config, the model, and facts about the data.

    Args:
        config: the config as plain data.
        model: the node of the model (``Net.node``).
        task: the data.
    """
    tokenizer = task.tokenizer
    return {
        "config": config,
        "model": model,
        "tokenizer": tokenizer.to_dict() if isinstance(tokenizer, Tokenizer) else None,
        "first_id": task.first_id,
        "labels": list(task.label_names),
        "data_checksum": task.checksum,
        "format": FORMAT,
    }


def network_weights(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of the network in the content of a checkpoint, by their names in the network."""
    prefix = "network."
    return {name.removeprefix(prefix): weight for name, weight in checkpoint["state_dict"].items() if name.startswith(prefix)}


def load_weights(network: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load every weight of ``network``.

    Raises:
        RuntimeError: a tensor is missing, unexpected or of another shape.
        ValueError: two names share a tensor in the network, but have different values in ``weights``.
    """
    network.load_state_dict(weights)
    names: dict[int, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name not in weights:  # extra state, and names that load_state_dict converts
            continue
        first = names.setdefault(id(tensor), name)
        kind = tensor.dtype
        if first != name and not torch.allclose(weights[first].to(kind), weights[name].to(kind), 0, 0, equal_nan=True):
            raise ValueError(f"{first} and {name} share a tensor in the model, but differ in the weights")
