"""``save_pretrained`` and ``from_pretrained``: models of our own, ``config.json`` beside ``model.safetensors``.

The weights carry a SHA-256 over every tensor and the config, so that a changed byte is an error and not a worse model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minitx.config import TransformerConfig, to_dict
from minitx.interop.weights import WEIGHTS, read_json, write_json, write_tensors
from minitx.nn.models import TransformerModel, build_model

FORMAT, VERSION = "minitx", 1
TOKENIZER = "tokenizer.json"


class CanSave(Protocol):
    """A tokenizer of ``minitx.data``, or of ``tokenizers``."""

    def save(self, path: str) -> None:
        """Write the tokenizer to the file ``path``."""


def save_pretrained(model: TransformerModel, folder: str | Path, *, tokenizer: CanSave | None = None) -> None:
    """Write ``config.json`` and ``model.safetensors``; a tied head is written once.

    Args:
        folder: made if it is missing.
        tokenizer: written beside them, as ``tokenizer.json``, which ``tokenizers`` and ``minitx.data`` read.

    >>> import tempfile
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder)
    ...     again = from_pretrained(folder)
    >>> torch.equal(again.head.weight, model.head.weight)
    True
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(model).items()}
    config = json.dumps(to_dict(model.config), sort_keys=True)
    metadata = {"config": config, "sha256": _digest(tensors, config)}
    write_tensors(tensors, folder / WEIGHTS, metadata)
    write_json(folder / "config.json", {"format": FORMAT, "format_version": VERSION, "model": to_dict(model.config)})
    if tokenizer is not None:
        tokenizer.save(str(folder / TOKENIZER))


def from_pretrained(folder: str | Path, *, config: TransformerConfig | None = None) -> TransformerModel:
    """The model that ``save_pretrained`` wrote, bit for bit, in eval mode.

    Args:
        config: what the caller expects; another one in the folder is an error.

    Raises:
        FileNotFoundError: no such file.
        ValueError: another format; damaged weights; a config that is not that of the weights, or not the expected one.
    """
    folder = Path(folder)
    values = read_json(folder / "config.json")
    if values.get("format") != FORMAT:
        hint = "; it is of Hugging Face's kind: use load_hf" if "model_type" in values else ""
        raise ValueError(f"{folder} holds no model of minitx: config.json has format={values.get('format')!r}{hint}")
    if values.get("format_version") != VERSION:
        raise ValueError(
            f"{folder} has format_version={values.get('format_version')!r}; this version of minitx reads {VERSION}"
        )
    tensors, stored = _read(folder / WEIGHTS)
    _refuse_other(values.get("model"), stored, f"{folder / 'config.json'} is not the config of the weights beside it")
    try:
        found = TransformerConfig(**stored)
    except TypeError as error:
        raise ValueError(f"{folder}: the config was written by another version of minitx: {error}") from None
    if config is not None:
        _refuse_other(to_dict(found), to_dict(config), f"{folder} is not what config asks for")
    with torch.random.fork_rng(devices=[]):
        model = build_model(found)
    targets = _tensors(model)
    shapes, found_shapes = ({name: one.shape for name, one in some.items()} for some in (targets, tensors))
    wrong = sorted(name for name in shapes.keys() | found_shapes.keys() if shapes.get(name) != found_shapes.get(name))
    if wrong:
        raise ValueError(f"{folder}: the weights were written by another version of minitx; these differ: {', '.join(wrong)}")
    for name, tensor in targets.items():
        tensor.data = tensors[name]
    return model.eval()


def hub_class() -> type:
    """A class with ``huggingface_hub``'s ``push_to_hub`` around these two functions; needs that package.

    ``hub_class()(model).push_to_hub("me/mine")``, and ``hub_class().from_pretrained("me/mine").model``. Nothing here
    touches the network before one of them is called with a name that is no folder.

    Raises:
        ImportError: ``huggingface_hub`` is not installed.
    """
    try:
        from huggingface_hub import ModelHubMixin, snapshot_download
    except ImportError:
        raise ImportError("hub_class needs huggingface_hub: pip install huggingface_hub") from None

    class HubModel(ModelHubMixin, library_name="minitx", tags=["minitx"]):  # type: ignore[misc, call-arg]
        def __init__(self, model: TransformerModel) -> None:
            self.model = model

        def _save_pretrained(self, save_directory: Path) -> None:
            save_pretrained(self.model, save_directory)

        @classmethod
        def _from_pretrained(cls, *, model_id: str, **options: Any) -> HubModel:
            return cls(from_pretrained(model_id if Path(model_id).is_dir() else snapshot_download(model_id, **options)))

    return HubModel


def _tensors(model: TransformerModel) -> dict[str, Tensor]:
    """Parameters, a shared one once, and persistent buffers."""
    parameters, names = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in names}
    return {**parameters, **buffers}


def _digest(tensors: Mapping[str, Tensor], config: str) -> str:
    """SHA-256 of names, dtypes, shapes, bytes and the config."""
    digest = hashlib.sha256(config.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file and the config that they were saved with, after comparing the SHA-256."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not {"sha256", "config"} <= metadata.keys():
        raise ValueError(f"{path} is damaged, or was not written by save_pretrained: its metadata has no sha256 and config")
    found = _digest(tensors, metadata["config"])
    if found != metadata["sha256"]:
        raise ValueError(f"{path} is damaged: the SHA-256 of its contents is {found}, and should be {metadata['sha256']}")
    return tensors, json.loads(metadata["config"])


def _refuse_other(found: Any, wanted: Mapping[str, Any], what: str) -> None:
    """Name the fields in which two configs differ."""
    found = found if isinstance(found, dict) else {}
    names = sorted(name for name in found.keys() | wanted.keys() if found.get(name, "absent") != wanted.get(name, "absent"))
    if names:
        differences = (f"{name}={found.get(name, 'absent')} against {wanted.get(name, 'absent')}" for name in names)
        raise ValueError(f"{what}: {', '.join(differences)}")
