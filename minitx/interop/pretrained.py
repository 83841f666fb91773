"""``save_pretrained`` and ``from_pretrained``: a folder with ``config.json`` and ``model.safetensors``.

The weights file contains a SHA-256 of all tensors and the config. If either file has changed, loading raises an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config import ConfigError, Part, TransformerConfig, from_dict, is_node, to_dict
from minitx.config.schema import first_line
from minitx.interop.files import TOKENIZER, WEIGHTS, CanSave, find_folder, read_json, read_tensors, write_json, write_tensors
from minitx.interop.finetune import adapted_ties
from minitx.nn.layers import Core
from minitx.nn.models import TransformerModel, build_model

FORMAT, VERSION = "minitx", 1
# names of parts and settings that do not change what a trained model computes (cores are compared by their parts)
TRAINING_ONLY = ("training", "dropout", "p", "inplace", "backend", "strict", "has_own_core")
SHOWN = 5
"""The largest number of differences in a message."""


def save_pretrained(model: TransformerModel, folder: str | Path, *, tokenizer: CanSave | None = None) -> None:
    """Save a model as ``config.json`` and ``model.safetensors``.

    ``huggingface_hub.upload_folder(folder_path=folder, repo_id="me/mine")`` uploads such a folder to the hub.

    Args:
        model: any model of ``minitx.nn``. Tied weights are saved once.
        folder: created if it does not exist.
        tokenizer: saved as ``tokenizer.json``, for ``tokenizers`` and ``minitx.data``.

    Raises:
        TypeError: ``model`` is not a model of ``minitx.nn``.
        ValueError: the model differs from its config, because a part was removed, added, replaced, quantised or changed (including
            ``scale`` and ``softcap``), or has a hook.

    >>> import tempfile
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_pretrained(model, folder)
    ...     again = from_pretrained(folder)
    >>> torch.equal(again.head.weight, model.head.weight)
    True
    """
    check_unchanged(model, "save_pretrained")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = to_dict(model.config)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(model).items()}
    write_tensors(tensors, folder / WEIGHTS, {"sha256": _digest(tensors, config)})
    core = {"own_core": True} if model.has_own_core else {}
    write_json(folder / "config.json", {"format": FORMAT, "format_version": VERSION, "model": config, **core})
    if tokenizer is not None:
        tokenizer.save(str(folder / TOKENIZER))


def from_pretrained(
    folder: str | Path, *, config: TransformerConfig | None = None, core: Core | None = None
) -> TransformerModel:
    """Load a model that ``save_pretrained`` saved. Its weights are bitwise equal. It is in evaluation mode.

    Args:
        folder: a local folder, or a name on the Hugging Face hub, as in ``load_hf``.
        config: the expected config. Default: any.
        core: the function that builds an attention core, for a model that was built with ``core``. It is not saved in the folder.

    Raises:
        FileNotFoundError: the folder, a file in it, or the model on the hub does not exist.
        ValueError: another format, a file that has changed since it was saved, a config that is not the expected one, ``core`` is
            missing, or ``core`` for a model that was built without it.
    """
    folder = find_folder(folder)
    values = read_json(folder / "config.json")
    kind, version = values.get("format"), values.get("format_version")
    if (kind, version) != (FORMAT, VERSION):
        hint = "; for a Hugging Face model, use load_hf" if "model_type" in values else ""
        expected = f"format={FORMAT!r} and format_version={VERSION}"
        raise ValueError(
            f"{folder}: config.json must have {expected}, got format={kind!r} and format_version={version!r}{hint}"
        )
    tensors, metadata = read_tensors(folder / WEIGHTS)
    if "sha256" not in metadata:
        raise ValueError(f"{folder / WEIGHTS} was not saved by save_pretrained: its metadata has no sha256")
    if metadata["sha256"] != _digest(tensors, values.get("model")):
        raise ValueError(f"{folder}: {WEIGHTS} is damaged, or config.json has changed since it was saved")
    if ("own_core" in values) != (core is not None):
        how = "with core=, a function that builds an attention core: pass it" if core is None else "without core=: leave it out"
        raise ValueError(f"{folder}: the model was built {how}")
    try:
        stored = _config_of(values["model"], core)
    except ConfigError as error:
        raise ValueError(f"{folder}: the config was written by another version of minitx: {error}") from None
    if config is not None and stored != config:
        ours, theirs = to_dict(config), to_dict(stored)
        differing = (f"{name}={theirs[name]}, not {ours[name]}" for name in sorted(ours) if theirs[name] != ours[name])
        raise ValueError(f"{folder} does not have the expected config: {'; '.join(differing)}")
    with torch.random.fork_rng(devices=[]):
        model = build_model(stored, core)
    try:
        model.load_state_dict(tensors, assign=True)  # tied weights have a single name in the file
    except RuntimeError as error:
        raise ValueError(f"{folder}: the weights do not fit this version of minitx: {first_line(error)}") from None
    return model.eval()


def _config_of(values: Mapping[str, Any], core: Core | None) -> TransformerConfig:
    """The config in a file. No code that a file names is run: an ``attention`` with ``_target_`` keeps its name and builds ``core``."""
    attention: Any = values.get("attention")
    if is_node(attention):
        if core is None:
            raise ConfigError(f"attention._target_={attention['_target_']} names code, and code that a file names is not run")
        arguments = {name: value for name, value in attention.items() if name != "_target_"}
        values = {**values, "attention": Part("model.attention", attention["_target_"], lambda **_: core(), arguments)}
    return from_dict(TransformerConfig, values)


def check_unchanged(model: nn.Module, caller: str) -> None:
    """Raise an error unless ``model`` has the parts and settings that its config builds, because loading builds the model from it.

    Raises:
        TypeError: ``model`` is not a model of ``minitx.nn``. ValueError: another part or setting. The message names it.
    """
    if not isinstance(model, TransformerModel):
        hint = "save other models with their own library"
        if hasattr(model, "merge_and_unload"):
            hint = "merge_and_unload() returns the model"
            for names in adapted_ties(model):  # PEFT would merge the adapter of one name into the shared weight
                hint = f"{' and '.join(names)} are one weight, and merging would change it everywhere, but the adapter changes one name"
        raise TypeError(f"{caller} saves models of minitx.nn, got {type(model).__name__}; {hint}")
    faults = _differences(model, ignores_cores=model.has_own_core)
    for name in hooked_modules(model):
        faults.setdefault(name, f"{name} has a hook, and hooks are not saved")
    if faults:
        raise ValueError(f"{caller}: the model differs from its config: {joined(_outermost(faults))}")


def differences_from_config(model: nn.Module) -> list[str]:
    """Return the parts and settings of ``model`` that differ from what ``model.config`` builds, outermost parts only. Hooks are ignored.

    Args:
        model: a network whose ``config`` is a ``TransformerConfig``. If its class is not ours, that is the only difference.

    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> differences_from_config(model)
    []
    >>> model.blocks[1].attention.softcap = 2.0
    >>> differences_from_config(model)
    ['blocks.1.attention.softcap is 2.0, not None']
    """
    if not isinstance(model, TransformerModel):
        return [f"{type(model).__name__} is not a model of minitx.nn"]
    attention = model.config.attention
    faults = _differences(model, ignores_cores=isinstance(attention, Part))
    if isinstance(attention, Part) and isinstance(attention.target, type):
        for name, module in model.named_modules():
            if name.endswith("attention.core") and type(module) is not attention.target:
                faults[name] = f"{name} is {type(module).__name__}, not {attention.name}"
    return _outermost(faults)


def hooked_modules(model: nn.Module) -> list[str]:
    """Return the names of the modules of ``model`` with a forward hook."""
    # torch has no public list of a module's hooks
    hooked = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    return [name or "the model" for name in hooked]


def joined(differences: Sequence[str]) -> str:
    """Return differences as text for a message. Only the first ones are shown."""
    more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return f"{'; '.join(differences[:SHOWN])}{more}"


def _differences(model: Any, *, ignores_cores: bool) -> dict[str, str]:
    """The parts and settings of ``model`` that differ from what its config builds, as sentences by name."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        built = build_model(model.config, nn.Identity if ignores_cores else None)
    parts, faults = _parts(model), {}
    actual, expected = {**_settings(model), **parts}, {**_settings(built), **_parts(built)}
    for name in sorted({*expected, *parts}):
        ours, theirs = actual.get(name, "missing"), expected.get(name, "a part of the config")
        if ours != theirs and not (name.rpartition(".")[2] in TRAINING_ONLY or (ignores_cores and ".core" in name)):
            faults[name] = f"{name} is {ours}, not {theirs}"
    return faults


def _outermost(faults: Mapping[str, str]) -> list[str]:
    return [text for name, text in faults.items() if not any(name.startswith(f"{other}.") for other in faults)]


def _parts(model: nn.Module) -> dict[str, Any]:
    """The class of each module and the shape of each parameter and buffer; for a further name of one of them, its first name."""
    first: dict[Any, str] = {}

    def described(entry: nn.Module | Tensor, name: str, description: Any) -> Any:
        kind = "module" if isinstance(entry, nn.Module) else "tensor"
        return description if first.setdefault(entry, name) == name else f"the {kind} {first[entry]}"

    modules = {
        name or "the model": described(module, name, f"{type(module).__module__}.{type(module).__name__}")
        for name, module in model.named_modules(remove_duplicate=False)
    }
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {**modules, **{name: described(tensor, name, tuple(tensor.shape)) for name, tensor in named}}


def _settings(model: nn.Module) -> dict[str, Any]:
    """The numbers, strings, tuples and dataclasses among the attributes of each module."""
    return {
        f"{name}.{key}".removeprefix("."): str(value) if is_dataclass(value) else value
        for name, module in model.named_modules(remove_duplicate=False)
        for key, value in vars(module).items()
        if not key.startswith("_") and (value is None or isinstance(value, str | float | int | tuple) or is_dataclass(value))
    }


def _tensors(model: TransformerModel) -> dict[str, Tensor]:
    """Return the parameters (shared parameters once) and the persistent buffers."""
    once, every = dict(model.named_parameters()), model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in every.items() if name in once or not isinstance(tensor, nn.Parameter)}


def _digest(tensors: Mapping[str, Tensor], config: Any) -> str:
    """Return the SHA-256 of the config and of the names, dtypes, shapes and bytes of the tensors."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
