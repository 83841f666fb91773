"""Folders and hub names of Hugging Face models in and out, by the tables of the families."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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
Located = dict[str, tuple[str, Any]]  # a tensor's name without the prefix -> its name in the file, the open file


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
        located = _locate(folder, family, [*family.ignored, *architecture.ignored, *ignore])
        config, passed = read_config(family, values, located)
        with torch.device("meta"):
            model = build_model(config)
        _fill(model, _read_tensors(model, family, architecture, located, dtype))
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
            lacking[name] = unlike(family, values, model.config, names)
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


def _locate(folder: Path, family: Family, ignored: Sequence[str]) -> Located:
    """Return every tensor of the folder but the ignored ones."""
    located: Located = {}
    for path in _files(folder):
        try:
            file = safe_open(path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path.name} is not a whole safetensors file: {error}") from None
        for name in file.keys():  # noqa: SIM118 (no mapping)
            plain = name.removeprefix(family.prefix)
            for old, new in family.renames.items():
                plain = plain.replace(old, new)
            if any(fnmatchcase(one, pattern) for one in (name, plain) for pattern in ignored):
                continue
            if plain in located:
                raise ValueError(f"{name} is there twice, also as {located[plain][0]}")
            located[plain] = name, file
    for copy, original in family.copies.items():  # of two names of one tensor, a file may hold either
        if original not in located and copy in located:
            located[original] = located.pop(copy)
    return located


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


def _read_tensors(
    model: TransformerModel, family: Family, architecture: Architecture, located: Located, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every parameter, after all of them have been found to fit."""
    places, parameters = _places(model, family, architecture), dict(model.named_parameters())
    shapes = {name: tuple(file.get_slice(theirs).get_shape()) for name, (theirs, file) in located.items()}
    faults = []
    for name, parameter in parameters.items():
        place = places.get(name)
        theirs = None if place is None else str(place.name)
        if place is None or theirs not in located:
            faults.append(f"{name} {tuple(parameter.shape)} is not filled: the file has no {theirs}")
            continue
        wanted = _shape_there(place, parameter.shape, model.config)
        if shapes[theirs] != wanted:
            vocab = ", so its rows are not the vocab_size of the config: padded?" if name == "embeddings.token.weight" else ""
            faults.append(f"{located[theirs][0]} has shape {shapes[theirs]}, but the config wants {wanted}{vocab}")
    for name in located.keys() - {place.name for place in places.values()}:
        if name not in family.copies:
            faults.append(f"{located[name][0]} {shapes[name]} is in the file, but this model has no place for it")
        elif not torch.equal(_tensor(located[name]), _tensor(located[family.copies[name]])):
            faults.append(f"{located[name][0]} differs from {located[family.copies[name]][0]}, but the config ties them")
    if faults:
        what = "; ".join(sorted(faults))
        raise ValueError(f"the weights do not fit {type(model).__name__}: {what}. Tensors of no use: ignore=[...]")
    for name, parameter in parameters.items():
        place = places[name]
        tensor = _tensor(located[str(place.name)])
        tensor = tensor.T if place.transposed and tensor.dim() == 2 else tensor
        part = tensor.chunk(place.part[1])[place.part[0]].reshape(parameter.shape)
        part = part.to(dtype or part.dtype)
        yield name, part + place.shift if place.shift else part


def _shape_there(place: Place, shape: Sequence[int], config: TransformerConfig) -> tuple[int, ...]:
    """Return their shape of the tensor that (a part of) is ours of ``shape``."""
    if place.shape is not None:
        return place.shape(config)
    whole = (shape[0] * place.part[1], *shape[1:])
    return whole[::-1] if place.transposed else whole


def _tensor(where: tuple[str, Any]) -> Tensor:
    return where[1].get_tensor(where[0])


def _fill(model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Put tensors in the place of parameters on the meta device; a shared parameter stays shared."""
    parameters = dict(model.named_parameters())
    fresh = {parameters[name]: nn.Parameter(tensor.contiguous()) for name, tensor in tensors}
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
