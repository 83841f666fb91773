"""``load_hf`` and ``save_hf``: folders of ``config.json`` and safetensors, through the tables of the families."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.interop.bert import BERT, ROBERTA
from minitx.interop.gpt2 import GPT2
from minitx.interop.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from minitx.interop.t5 import T5
from minitx.interop.table import Architecture, Family, Place, Values, read_config, unlike, write_config
from minitx.interop.vit import VIT
from minitx.nn.models import TransformerModel, build_model

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, BERT, ROBERTA, T5, VIT)}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
Located = dict[str, tuple[str, Any]]  # a tensor's name without the prefix -> its name in the file, the open file


def load_hf(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    overrides: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = (),
) -> TransformerModel:
    """The model of a Hugging Face folder, in eval mode: GPT-2, Llama, Mistral, Qwen2, Qwen3, BERT, RoBERTa, T5 or ViT.

    Reads ``config.json`` and ``model.safetensors``, or the shards of ``model.safetensors.index.json``; nothing else, no
    network, no pickle, no code. The class is that of ``architectures``.

    Args:
        folder: a local folder.
        dtype: of the parameters; default as in the file.
        overrides: entries to take instead of those in ``config.json``; what to do about an option that is refused.
        ignore: tensors of the file to leave out, by name or pattern (``"cls.seq_relationship.*"``).

    Raises:
        FileNotFoundError: no such file.
        ValueError: an option of the config that the model cannot honour; a tensor that is missing, left over or of
            another shape. All of them are named.
    """
    folder = Path(folder)
    values = {**read_json(folder / "config.json"), **(overrides or {})}
    if values.get("model_type") not in FAMILIES:
        hint = "; from_pretrained reads folders of minitx" if values.get("format") == "minitx" else ""
        raise ValueError(f"{folder}: model_type={values.get('model_type')!r} is not known: one of {', '.join(FAMILIES)}{hint}")
    family = FAMILIES[values["model_type"]]
    located = _locate(folder, family, ignore)
    try:
        architecture, config = read_config(family, values, located)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    with torch.device("meta"):
        model = build_model(config)
    _fill(model, _read_tensors(model, family, architecture, located), dtype)
    return model.eval()


def save_hf(
    model: TransformerModel, folder: str | Path, *, model_type: str | None = None, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write a model as a Hugging Face folder that ``load_hf`` and ``transformers`` read back, bit for bit.

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
    for family in FAMILIES.values() if model_type is None else (FAMILIES[model_type],):
        for name, architecture in family.architectures.items():
            places = _places(model, family, architecture)
            values = write_config(family, name, model.config)
            names = {place.name for place in places.values()}
            lacking[name] = unlike(family, values, model.config, names)  # type: ignore[arg-type]
            if not lacking[name]:
                _save(model, Path(folder), family, architecture, values, max_shard_bytes)
                return
    nearest = min(lacking, key=lambda name: ("architecture" in lacking[name], len(lacking[name])))
    wrong = ", ".join(f"{field}={ours!r} (there {theirs!r})" for field, (ours, theirs) in lacking[nearest].items())
    raise ValueError(f"no family of Hugging Face models can express this config; {nearest} comes nearest and lacks {wrong}")


def read_json(path: Path) -> Values:
    """A JSON object of a file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold an object, got {type(values).__name__}")
    return values


def write_json(path: Path, values: Values) -> None:
    """An object to a file, as ``read_json`` reads it."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _locate(folder: Path, family: Family, ignore: Sequence[str]) -> Located:
    """Every tensor of the folder that counts."""
    located: Located = {}
    dropped = [*family.ignored, *ignore]
    for path in _files(folder):
        try:
            file = safe_open(path, "pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
        for name in file.keys():  # noqa: SIM118 (no mapping)
            plain = name.removeprefix(family.prefix)
            for old, new in (family.renames or {}).items():
                plain = plain.replace(old, new)
            if any(fnmatch.fnmatchcase(one, pattern) for one in (name, plain) for pattern in dropped):
                continue
            if plain in located:
                raise ValueError(f"{path}: {name} is there twice, also as {located[plain][0]}")
            located[plain] = name, file
    for copy, original in (family.copies or {}).items():  # of two names of one tensor, a file may hold either
        if original not in located and copy in located:
            located[original] = located.pop(copy)
    return located


def _files(folder: Path) -> list[Path]:
    """``model.safetensors``, or the shards that the index lists."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        shards = sorted({str(shard) for shard in read_json(folder / INDEX).get("weight_map", {}).values()})
        strange = [shard for shard in shards if Path(shard).name != shard]
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if strange or missing:
            raise FileNotFoundError(
                f"{folder / INDEX} lists shards that are not in the folder: {', '.join(strange or missing)}"
            )
        return [folder / shard for shard in shards]
    pickled = any(folder.glob("*.bin"))
    hint = "; pickled weights (*.bin) are not read: have transformers save them as safetensors" if pickled else ""
    raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}")


def _places(model: nn.Module, family: Family, architecture: Architecture, *, prefix: bool = False) -> dict[str, Place]:
    """Where each parameter lies that the table knows; ``prefix`` for the names as they are written."""
    config: TransformerConfig = model.config  # type: ignore[assignment]
    base = "" if architecture.is_base or not prefix else family.prefix
    tables = (architecture.tensors, ""), (family.tensors, base)
    places: dict[str, Place] = {}
    for name, _ in model.named_parameters():
        pattern, layer = re.sub(r"\.\d+\.", ".*.", name), "".join(re.findall(r"\.(\d+)\.", name)[:1])
        module, _, kind = pattern.rpartition(".")
        keys = (pattern, ""), (module, f".{kind}")
        found = [(table[key], start, end) for table, start in tables for key, end in keys if key in table]
        if found:
            place, start, end = found[0]
            place = place if isinstance(place, Place) else Place(place)
            plain = place.name if isinstance(place.name, str) else place.name(config)
            places[name] = replace(place, name=start + plain.replace("*", layer) + end)
    return places


def _shape_there(place: Place, shape: Sequence[int], config: TransformerConfig) -> tuple[int, ...]:
    """Their shape of the tensor that (a part of) is ours of ``shape``."""
    if place.shape is not None:
        return place.shape(config)
    whole = (shape[0] * place.part[1], *shape[1:])
    return whole[::-1] if place.transposed else whole


def _read_tensors(
    model: TransformerModel, family: Family, architecture: Architecture, located: Located
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter, after all of them have been found to fit."""
    places, copies = _places(model, family, architecture), family.copies or {}
    parameters = dict(model.named_parameters())
    used = {place.name for place in places.values()}
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
    for name in located.keys() - used:
        if name not in copies:
            faults.append(f"{located[name][0]} {shapes[name]} is in the file, but this model has no place for it")
        elif not torch.equal(_tensor(located[name]), _tensor(located[copies[name]])):
            faults.append(f"{located[name][0]} differs from {located[copies[name]][0]}, but the config ties them")
    if faults:
        raise ValueError(
            f"the weights do not fit {type(model).__name__}: {'; '.join(sorted(faults))}. Tensors of no use: ignore=[...]"
        )
    for name, parameter in parameters.items():
        place = places[name]
        tensor = _tensor(located[str(place.name)])
        tensor = tensor.T if place.transposed and tensor.dim() == 2 else tensor
        yield name, tensor.chunk(place.part[1])[place.part[0]].reshape(parameter.shape)


def _tensor(where: tuple[str, Any]) -> Tensor:
    return where[1].get_tensor(where[0])


def _fill(model: nn.Module, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> None:
    """Put tensors in the place of parameters on the meta device; a shared parameter stays shared."""
    parameters = dict(model.named_parameters())
    fresh = {parameters[name]: nn.Parameter(tensor.to(dtype or tensor.dtype).contiguous()) for name, tensor in tensors}
    every = model.named_parameters(remove_duplicate=False)
    model.load_state_dict({name: fresh[parameter] for name, parameter in every}, assign=True)


def _save(
    model: TransformerModel, folder: Path, family: Family, architecture: Architecture, values: Values, max_shard_bytes: int
) -> None:
    places = _places(model, family, architecture, prefix=True)
    parts: dict[str, list[tuple[Place, Tensor]]] = {}
    for name, parameter in model.named_parameters():
        place = places.get(name)
        if place is None:
            raise ValueError(f"{name} {tuple(parameter.shape)} has no place in a model_type={family.model_type!r}")
        parts.setdefault(str(place.name), []).append((place, parameter.detach().cpu()))
    tensors = {}
    for name, found in parts.items():
        place = found[0][0]
        whole = torch.cat([tensor for one, tensor in sorted(found, key=lambda pair: pair[0].part)])
        whole = whole.T if place.transposed and whole.dim() == 2 else whole
        tensors[name] = whole.reshape(whole.shape if place.shape is None else place.shape(model.config)).contiguous()
    for copy, name in ({} if model.config.tie_embeddings else architecture.twice or {}).items():
        tensors[copy] = tensors[name].clone()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {**values, "dtype": dtype})
    _write(folder, tensors, max_shard_bytes)


def _write(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """One file, or shards with an index."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    for stale in (folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
        stale.unlink(missing_ok=True)  # a reader would take the one file before the shards
    if len(shards) == 1:
        write_tensors(shards[0], folder / WEIGHTS, {"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(shard, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": weight_map}
    write_json(folder / INDEX, index)


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Beside the file first: loaded tensors may still be mapped from the one that is replaced."""
    partial = path.with_name(f"{path.name}.partial")
    save_file(tensors, partial, metadata=metadata)
    partial.replace(path)
