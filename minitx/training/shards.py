"""Sharded checkpoints: folders of torch's distributed checkpoint, read without executing code. Also the numbering of optimizer states.

torch reads two parts of such a folder as pickles: the index ``.metadata``, and small values that are not tensors. Here the
index may contain only torch's own descriptions of tensors, and values must be plain data.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

EXTRA = "meta.pt"
"""The file in which Lightning stores everything except weights and optimizer state."""

_DESCRIPTIONS = {
    "pathlib": ("PosixPath",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
}


def read_shards(path: Path) -> dict[str, Any]:
    """Read a folder of shards to one device, in the form in which Lightning would have written it to one file.

    Raises:
        pickle.UnpicklingError: it contains something that is neither a tensor nor plain data.
    """
    found: dict[str, Any] = {}
    try:
        dcp.state_dict_loader._load_state_dict(found, SafeReader(path), planner=_SafeWholePlanner(), no_dist=True)
    except dcp.CheckpointException as error:  # no Exception, and many lines
        raise pickle.UnpicklingError(str(next(iter(error.failures.values()))[0])) from None
    states = [by_number(found.pop(name)) for name in sorted(found) if name.startswith("optimizer_")]
    return {**found, **read_extra(path), "optimizer_states": states}


def load_shards(state: dict[str, Any], path: Path) -> None:
    """Load a folder into ``state``, which is sharded like the present run. Any number of processes may have written the folder. This is a collective."""
    dcp.load(state, storage_reader=SafeReader(path), planner=_SafePlanner())


def read_extra(path: Path) -> dict[str, Any]:
    """Read the rest of a folder of shards: everything except weights and optimizer states."""
    return dict(torch.load(path / EXTRA, map_location="cpu", weights_only=True))


class SafeReader(dcp.FileSystemReader):
    """torch's reader, restricted to an index that only describes tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _IndexReader(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _DESCRIPTIONS.get(module, ()):
            raise pickle.UnpicklingError(f"its index names {module}.{name}")
        return super().find_class(module, name)


class _SafePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises where it is no plain data; torch's own call would execute it
        value.seek(0)
        super().load_bytes(read_item, value)


class _SafeWholePlanner(_SafePlanner, _EmptyStateDictLoadPlanner):
    """For a state that is to be made from the folder itself."""


def by_number(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an optimizer's state from parameter names to numbers, as in torch: counted through the groups, from 0."""
    return _renamed(state, {name: number for number, name in enumerate(_parameters(state["param_groups"]))})


def by_name(state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The inverse of ``by_number``. ``groups`` contain the names."""
    return _renamed(state, dict(zip(_parameters(state["param_groups"]), _parameters(groups), strict=True)))


def _parameters(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    return [parameter for group in groups for parameter in group["params"]]


def _renamed(state: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    groups = [{**group, "params": [new[old] for old in group["params"]]} for group in state["param_groups"]]
    return {"state": {new[old]: moments for old, moments in state["state"].items()}, "param_groups": groups}
