"""The files of a model folder: finding it on disk or on the hub, JSON, and safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def find_folder(name: str | Path) -> Path:
    """Return the folder of a model. A name on the Hugging Face hub is downloaded into the cache of ``huggingface_hub``.

    Only the config, the weights and the tokenizer are downloaded. A local folder needs no network.

    Raises:
        ImportError: ``huggingface_hub`` is needed and not installed.
        FileNotFoundError: the model cannot be downloaded and is not in the cache.
    """
    folder = Path(name).expanduser()
    if folder.is_dir() or not HUB_NAME.fullmatch(str(name)):
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ImportError(f"{name} is not a folder; to download it from the hub: pip install huggingface_hub") from None
    wanted = ["config.json", WEIGHTS, INDEX, "model-*.safetensors", TOKENIZER]
    try:
        return Path(snapshot_download(str(name), allow_patterns=wanted))
    except Exception as error:  # huggingface_hub raises many kinds, with long messages
        raise FileNotFoundError(
            f"{name} is not a folder, cannot be downloaded from the Hugging Face hub and is not in its cache "
            f"({type(error).__name__})"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(values).__name__}")
    return values


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object to a file."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_shards(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """Write the tensors to one file, or to several files with an index if they exceed ``max_shard_bytes``."""
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=max_shard_bytes)
    for stale in (folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
        stale.unlink(missing_ok=True)  # an old model.safetensors would be read instead of the shards
    for file, names in split.filename_to_tensors.items():
        write_tensors({name: tensors[name] for name in names}, folder / file, {"format": "pt"})
    if split.is_sharded:
        write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a temporary file and rename it, because loaded tensors may still be memory-mapped from the old file."""
    partial = path.with_name(f"{path.name}.partial")
    save_file(dict(tensors), partial, metadata=dict(metadata))
    partial.replace(path)
