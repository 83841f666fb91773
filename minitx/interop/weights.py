"""Folders and hub names of Hugging Face models in and out, by the tables of the families."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.interop.bert import BERT, ROBERTA
from minitx.interop.files import INDEX, WEIGHTS, find_folder, read_json, write_json, write_shards
from minitx.interop.gemma import GEMMA2, GEMMA3
from minitx.interop.gpt2 import GPT2
from minitx.interop.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from minitx.interop.t5 import T5
from minitx.interop.table import Architecture, Family, Place, find_architecture, read_config, unlike, write_config
from minitx.interop.vit import VIT
from minitx.nn.models import TransformerModel, build_model

log = logging.getLogger(__name__)
KNOWN = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, BERT, ROBERTA, T5, VIT)
FAMILIES = {family.model_type: family for family in KNOWN}


def load_hf(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = (),
) -> TransformerModel:
    """Load a Hugging Face model, in eval mode: GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3, BERT, RoBERTa, T5, ViT.

    Reads ``config.json`` and ``model.safetensors`` (or the shards of ``model.safetensors.index.json``), and nothing else: no
    pickle, no code. The class is that of ``architectures``. Keys of the config that do not change what the model computes
    are passed over, and one line of the log (``minitx.interop``, INFO) names them.

    Args:
        folder: a local folder, or a name on the hub such as ``openai-community/gpt2``. A model of the hub is fetched by
            ``huggingface_hub`` into its usual cache; offline (``HF_HUB_OFFLINE=1``) it is read from there.
        dtype: of the parameters; default as in the file.
        overrides: entries to take instead of those in ``config.json``.
        ignore: tensors of the file to leave out, by name or pattern (``"cls.seq_relationship.*"``).

    Raises:
        FileNotFoundError: no such folder, file or model on the hub.
        ValueError: keys of the config that the model cannot honour; tensors that are missing, left over or of another
            shape. All of them are named.
    """
    folder = find_folder(folder)
    values = {**read_json(folder / "config.json"), **(overrides or {})}
    if values.get("model_type") not in FAMILIES:
        hint = "; from_pretrained reads folders of minitx" if values.get("format") == "minitx" else ""
        raise ValueError(f"{folder}: model_type={values.get('model_type')!r} is not known: one of {', '.join(FAMILIES)}{hint}")
    family = FAMILIES[values["model_type"]]
    try:
        architecture = find_architecture(family, values)
        tensors = _read_files(folder, family, [*family.ignored, *architecture.ignored, *ignore])
        config, passed = read_config(family, architecture, values, tensors)
        with torch.device("meta"):
            model = build_model(config)
        places = _places(model, family, architecture)
        _fill(model, _fitted(model, places, family, tensors), places, dtype)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    if passed:
        log.info("%s: keys that do not change what the model computes are passed over: %s", folder, ", ".join(passed))
    return model.eval()


def save_hf(
    model: TransformerModel, folder: str | Path, *, model_type: str | None = None, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write a model as a Hugging Face folder that ``load_hf`` and ``transformers`` read back.

    Args:
        model: any model whose config one of the families can express, wherever it comes from.
        folder: made if it is missing.
        model_type: for example ``mistral``; default the first family that expresses the config.
        max_shard_bytes: tensors beyond it go to further files, with an index.

    Raises:
        ValueError: a model that no family can express; the fields that the nearest one lacks are named.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r} is not known: one of {', '.join(FAMILIES)}")
    lacking: dict[str, dict[str, tuple[Any, Any]]] = {}
    for family in KNOWN if model_type is None else (FAMILIES[model_type],):
        for name, architecture in family.architectures.items():
            values = write_config(family, name, model.config)
            names = {str(place.name) for place in _places(model, family, architecture).values()}
            lacking[name] = unlike(family, architecture, values, names, model.config)
            if not lacking[name]:
                tensors = _write_tensors(model, family, architecture)
                dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
                Path(folder).mkdir(parents=True, exist_ok=True)
                write_json(Path(folder) / "config.json", {**values, "dtype": dtype})
                write_shards(Path(folder), tensors, max_shard_bytes)
                return
    nearest = min(lacking, key=lambda name: ("architecture" in lacking[name], len(lacking[name])))
    wrong = ", ".join(f"{field}={ours!r} (there {theirs!r})" for field, (ours, theirs) in lacking[nearest].items())
    raise ValueError(f"no family of Hugging Face models can express this config; {nearest} comes nearest and lacks {wrong}")


def _read_files(folder: Path, family: Family, ignored: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of the folder by their names without prefix, but the ignored ones."""
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            found = load_file(path)  # mapped from the disk
        except SafetensorError as error:
            raise ValueError(f"{path.name} is not a whole safetensors file: {error}") from None
        for name, tensor in found.items():
            plain = name.removeprefix(family.prefix)
            for old, new in family.renames.items():
                plain = plain.replace(old, new)
            if any(fnmatchcase(one, pattern) for one in (name, plain) for pattern in ignored):
                continue
            if plain in tensors:
                raise ValueError(f"{name} is there twice, with and without the prefix {family.prefix}")
            tensors[plain] = tensor
    for copy, original in family.copies.items():  # of two names of one tensor, a file may hold either
        if original not in tensors and copy in tensors:
            tensors[original] = tensors.pop(copy)
    return tensors


def _files(folder: Path) -> list[Path]:
    """Return ``model.safetensors``, or the shards that the index lists."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        shards = sorted({str(shard) for shard in read_json(folder / INDEX).get("weight_map", {}).values()})
        missing = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder / INDEX} lists shards that are not in the folder: {', '.join(missing)}")
        return [folder / shard for shard in shards]
    pickled = any(folder.glob("*.bin"))
    hint = "; pickled weights (*.bin) are not read: have transformers save them as safetensors" if pickled else ""
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}")


def _places(model: nn.Module, family: Family, architecture: Architecture, prefix: str = "") -> dict[str, Place]:
    """Return where each parameter lies that the table knows; those outside of the head begin with ``prefix``."""
    config: TransformerConfig = model.config  # type: ignore[assignment]
    places: dict[str, Place] = {}
    for name, _ in model.named_parameters():
        pattern, layer = re.sub(r"\.\d+\.", ".*.", name), "".join(re.findall(r"\.(\d+)\.", name)[:1])
        module, _, kind = pattern.rpartition(".")
        for table, start in ((architecture.tensors, ""), (family.tensors, prefix)):
            key, end = (pattern, "") if pattern in table else (module, f".{kind}")
            if key not in table or name in places:
                continue
            found = table[key]
            place = found if isinstance(found, Place) else Place(found)
            plain = place.name if isinstance(place.name, str) else place.name(config)
            places[name] = replace(place, name=start + plain.replace("*", layer) + end)
    return places


def _fitted(
    model: TransformerModel, places: Mapping[str, Place], family: Family, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return every parameter by our names and in our layout."""
    faults, fitted = [], {}
    for name, parameter in model.named_parameters():
        place = places.get(name)
        theirs = "" if place is None else str(place.name)
        if place is None or theirs not in tensors:
            faults.append(f"{name} {tuple(parameter.shape)} is not filled: the file has no {theirs or 'tensor for it'}")
            continue
        wanted, shape = _shape_there(place, parameter.shape, model.config), tuple(tensors[theirs].shape)
        if shape == wanted:
            tensor = tensors[theirs].T if place.transposed and len(shape) == 2 else tensors[theirs]
            fitted[name] = tensor.chunk(place.part[1])[place.part[0]].reshape(parameter.shape)
        else:
            vocab = ", so its rows are not the vocab_size of the config: padded?" if name == "embeddings.token.weight" else ""
            faults.append(f"{theirs} has shape {shape}, but the config wants {wanted}{vocab}")
    for name in tensors.keys() - {place.name for place in places.values()}:
        original = family.copies.get(name)
        if original is None:
            faults.append(f"{name} {tuple(tensors[name].shape)} is in the file, but this model has no place for it")
        elif not torch.equal(tensors[name], tensors[original]):
            faults.append(f"{name} differs from {original}, but the config ties them")
    if faults:
        what = "; ".join(sorted(faults))
        raise ValueError(f"the weights do not fit {type(model).__name__}: {what}. Tensors of no use: ignore=[...]")
    return fitted


def _shape_there(place: Place, shape: Sequence[int], config: TransformerConfig) -> tuple[int, ...]:
    """Return their shape of the tensor that (a part of) is ours of ``shape``."""
    if place.shape is not None:
        return place.shape(config)
    whole = (shape[0] * place.part[1], *shape[1:])
    return whole[::-1] if place.transposed else whole


def _fill(model: nn.Module, tensors: dict[str, Tensor], places: Mapping[str, Place], dtype: torch.dtype | None) -> None:
    """Put tensors in the place of parameters on the meta device; a shared parameter stays shared."""
    fresh = {}
    for name, parameter in model.named_parameters():
        tensor = tensors.pop(name)
        tensor = tensor.to(dtype or tensor.dtype).contiguous()
        fresh[parameter] = nn.Parameter(tensor + places[name].shift if places[name].shift else tensor)
    every = model.named_parameters(remove_duplicate=False)
    model.load_state_dict({name: fresh[parameter] for name, parameter in every}, assign=True)


def _write_tensors(model: TransformerModel, family: Family, architecture: Architecture) -> dict[str, Tensor]:
    """Return the parameters by their names and in their layout."""
    places = _places(model, family, architecture, "" if architecture.is_base else family.prefix)
    parts: dict[str, list[tuple[Place, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if name not in places:
            raise ValueError(f"{name} {tuple(parameter.shape)} has no place in a model_type={family.model_type!r}")
        parts.setdefault(str(places[name].name), []).append((places[name], parameter.detach().cpu()))
    tensors = {}
    for name, found in parts.items():
        place = found[0][0]
        whole = torch.cat([tensor for one, tensor in sorted(found, key=lambda pair: pair[0].part)])
        whole = whole.T if place.transposed and whole.dim() == 2 else whole
        whole = whole - place.shift if place.shift else whole
        tensors[name] = whole.reshape(whole.shape if place.shape is None else place.shape(model.config)).contiguous()
    for copy, name in {} if model.config.tie_embeddings else architecture.twice.items():
        tensors[copy] = tensors[name].clone()
    return tensors
