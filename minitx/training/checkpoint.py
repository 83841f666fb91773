"""Checkpoints. Writing never loses the previous one. Reading rejects damaged files and never executes code.

A checkpoint is torch's zip file. Its zip comment is the SHA-256 of everything before the comment. It is written under another
name, synced to the disk and then renamed, so that ``last.ckpt`` is always complete: the old one or the new one.

A checkpoint contains the model, its tokenizer and its config. ``minitx.training.stored`` reads them.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch

from minitx.config import ConfigError
from minitx.config.checks import first_line

FORMAT = 1
"""The format that this version writes. It reads this and all earlier formats."""

_MARK = b"minitx-sha256:"
_COMMENT_LEN = len(_MARK) + 64
_PART = ".part"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The previous one is intact."""


def write_checkpoint(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint`` to ``path`` with its digest. Until it is complete, ``path`` holds the previous one.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    part = Path(f"{path}{_PART}")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w+b") as file:
            torch.save(checkpoint, file)
            _append_digest(file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync(part.parent)  # the name, too, must reach the disk
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a write that failed
        cause = next((e for e in (error, error.__cause__, error.__context__) if isinstance(e, OSError)), None)
        reason = cause.strerror if cause is not None else first_line(error)
        part.unlink(missing_ok=True)
        raise CheckpointError(f"checkpoint {path} could not be written: {reason}; an earlier one is intact") from error


def clean_up(folder: Path) -> None:
    """Remove the incomplete files of a killed run from its folder of checkpoints."""
    for part in folder.glob(f"*{_PART}"):
        part.unlink()


def read_checkpoint(path: str | Path, *, key: str = "ckpt_path", verb: str = "go on from") -> dict[str, Any]:
    """Read the content of a checkpoint to the CPU. Nothing in it is executed.

    Args:
        key, verb: for the message: the key that names the checkpoint, and what the caller does with it.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint of minitx, is damaged, or is from a newer version. The message
            also names the newest intact checkpoint in the folder.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{key}={path} is not a file that exists{_offer(path, key, verb)}")
    try:
        return _read(path)
    except ConfigError as error:
        said = f"{key}={path} cannot be read as a checkpoint of minitx: {error}"
        raise ConfigError(f"{said}{_offer(path, key, verb)}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        check_digest(path)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        state = dict(found["minitx"])
        dict(state["model"])
    except ConfigError:
        raise
    except Exception as error:  # torch raises many kinds for a damaged or foreign file
        raise ConfigError(first_line(error)) from None
    written = state.get("format", FORMAT)
    if not isinstance(written, int) or written > FORMAT:
        raise ConfigError(f"a newer minitx wrote it (format {written}, this one reads up to {FORMAT}): update minitx")
    return found


def check_digest(path: Path) -> None:
    """Compare a checkpoint with its digest.

    Raises:
        ConfigError: the digest is missing or differs.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size <= _COMMENT_LEN:
            raise ConfigError(f"it is {'empty' if size == 0 else 'cut short'} ({size} bytes)")
        file.seek(size - _COMMENT_LEN)
        comment = file.read()
        if not comment.startswith(_MARK):
            raise ConfigError("it does not end as a checkpoint of minitx does: it is cut short, damaged, or another program's")
        if _sha256(file, size - _COMMENT_LEN).encode() != comment.removeprefix(_MARK):
            raise ConfigError("it is damaged (the SHA-256 is not the one that was written)")


def newest_valid(folder: Path) -> Path | None:
    """Return the newest intact checkpoint in ``folder``, or None."""
    for path in sorted(folder.glob("*.ckpt"), key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            _read(path)
        except ConfigError:
            continue
        return path
    return None


def _offer(path: Path, key: str, verb: str) -> str:
    """What to do about ``path``: take the newest whole checkpoint beside it, if there is one."""
    found = newest_valid(path.parent) if path.parent.is_dir() else None
    return f"; {verb} the newest whole one beside it with {key}={found}" if found else ""


def _append_digest(file: BinaryIO) -> None:
    """Make the digest the comment of the zip file, which zip readers pass over."""
    file.seek(-2, os.SEEK_END)
    if file.read(2) != b"\0\0":
        raise CheckpointError("torch.save did not end its file with an empty comment")
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", _COMMENT_LEN))
    size = file.tell()
    digest = _sha256(file, size).encode()
    file.seek(size)
    file.write(_MARK + digest)


def _sha256(file: BinaryIO, size: int) -> str:
    """Of the first ``size`` bytes."""
    file.flush()
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
        return hashlib.sha256(content).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def network_weights(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of the network in a checkpoint's content, by their names in the network."""
    state = checkpoint["state_dict"].items()
    return {name.removeprefix("network."): weight for name, weight in state if name.startswith("network.")}
