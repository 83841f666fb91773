"""``load_hf`` and ``save_hf``: load and save models in the format of Hugging Face."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitx.config import to_dict
from minitx.data.tokenizer import Tokenizer
from minitx.data.tokenizer_folder import load_tokenizer
from minitx.interop.config_json import UnsupportedError, find_architecture, read_config, unlike, write_config
from minitx.interop.decoder_families import DECODERS
from minitx.interop.encoder_families import ENCODERS
from minitx.interop.family import Architecture, Family
from minitx.interop.files import (
    TOKENIZER,
    CanSave,
    find_folder,
    read_json,
    read_shards,
    write_companions,
    write_json,
    write_shards,
)
from minitx.nn.config_differences import changes_of, hooked_modules, joined
from minitx.nn.models import TransformerModel, build_model

log = logging.getLogger(__name__)
FAMILIES = {family.model_type: family for family in (*DECODERS, *ENCODERS)}
ELSEWHERE = "transformers can build such a model: pretrained_hf(folder, adopt=True), or model=hf model.adopt=true in a run"


def load_hf(
    folder: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    overrides: Mapping[str, Any] | None = None,
    ignore: str | Sequence[str] = (),
) -> TransformerModel:
    """Load a Hugging Face model: GPT-2, Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3, BERT, RoBERTa, T5 or ViT.

    It reads ``config.json`` and ``model.safetensors`` (or the shards of ``model.safetensors.index.json``), never pickle files or code.
    ``architectures`` in the config determines the model class. Unknown keys are ignored and logged (``minitx.interop``, level INFO) if
    they cannot change what the model computes: names such as labels, dtypes, token ids and dropout rates, values that are null or empty,
    and false or 0 unless transformers has another default for the key. The supported rotary kinds are
    ``default``, ``linear``, ``llama3`` and ``yarn``, without interleaving. Padding rows that see no key have finite outputs that differ
    from transformers. The model is in evaluation mode.

    Args:
        folder: a local folder, or a name on the hub such as ``openai-community/gpt2``. ``huggingface_hub`` downloads it into its
            usual cache. Offline (``HF_HUB_OFFLINE=1``) it is read from the cache.
        dtype: the dtype of the parameters, such as ``torch.bfloat16`` or ``"bfloat16"``. Default: the file's dtype.
        overrides: values that replace values of ``config.json``. A mapping replaces only the keys that it contains. If the weights were
            not trained with a value, the model is wrong.
        ignore: names or patterns of tensors in the file to ignore, such as ``"cls.seq_relationship.*"``.

    Raises:
        FileNotFoundError: the folder, a file in it, or the model on the hub does not exist.
        ValueError: keys of the config that are not supported, or tensors that are missing, unexpected or of a wrong shape. The
            message lists all of them.
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ValueError(f"dtype must be a floating point dtype of torch or its name, such as 'bfloat16', got {dtype!r}")
    folder = find_folder(folder)
    values = _with(read_json(folder / "config.json"), overrides or {})
    if values.get("model_type") not in FAMILIES:
        raise ValueError(
            f"{folder}: model_type={values.get('model_type')!r} is not supported: one of {', '.join(FAMILIES)}. {ELSEWHERE}"
        )
    family = FAMILIES[values["model_type"]]
    try:
        architecture = find_architecture(family, values)
        ignored = [ignore] if isinstance(ignore, str) else ignore
        tensors = _read_files(folder, family, [*family.tensors.ignored, *architecture.ignored, *ignored])
        config, passed = read_config(family, architecture, values, tensors)
        with torch.device("meta"):
            model = build_model(config)
        _put_tensors(model, family, architecture, tensors, dtype)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}{f'. {ELSEWHERE}' if isinstance(error, UnsupportedError) else ''}") from None
    if passed:
        log.info("%s: ignored keys that do not change what the model computes: %s", folder, ", ".join(passed))
    return model.eval()


def read_folder(
    name: str, overrides: Mapping[str, Any], ignore: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any], Tokenizer | None, list[str]] | None:
    """Return the weights, the config, the tokenizer (or None) and the labels of a folder or a model on the hub, for ``init_from``.

    None: ``name`` is neither a folder nor a name on the hub. For the arguments and errors, see ``load_hf``.
    """
    folder = find_folder(name)
    if not folder.is_dir():
        return None
    if not (folder / "config.json").is_file():
        raise FileNotFoundError("it is a folder without config.json")
    model = load_hf(folder, overrides=overrides, ignore=ignore)
    tokenizer = load_tokenizer(folder) if (folder / TOKENIZER).is_file() else None
    labels = read_json(folder / "config.json").get("id2label") or {}
    return dict(model.state_dict()), to_dict(model.config), tokenizer, [labels[number] for number in sorted(labels, key=int)]


def save_hf(
    model: TransformerModel,
    folder: str | Path,
    *,
    tokenizer: CanSave | None = None,
    chat_template: str | None = None,
    first_id: int | None = None,
    facts: Mapping[str, Any] | None = None,
    labels: Sequence[str] = (),
    model_type: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Save a model as a Hugging Face folder for ``transformers``, programs built on it, and ``load_hf``.

    The folder contains ``config.json``, ``model.safetensors``, ``README.md`` (an existing file is kept), ``generation_config.json`` for
    a model that generates text, and with ``tokenizer`` the files that ``AutoTokenizer`` reads. The package ``huggingface_hub`` is
    required.

    Args:
        model: a model of ``minitx.nn`` that one of the supported families can represent. After ``fold_scale`` it can be saved if a
            family has the new scale.
        folder: created if it does not exist.
        tokenizer: a tokenizer of ``minitx.data``, ``tokenizers`` or ``transformers``. A tokenizer of ``minitx.data`` adds no tokens
            to a text; the saved tokenizer adds ``first_id`` or, for a classifier, the class token. A character tokenizer without
            marks gets its unknown character as ``eos_token``, because lm-eval needs one; generation does not stop there.
        chat_template: a jinja2 template for ``apply_chat_template``, saved with the tokenizer.
        first_id: the token that begins every text (``Task.first_id``), or None: no token.
        facts: rows of the table in ``README.md``, for example about the training.
        labels: the names of a classifier's labels, in their order. Default: ``LABEL_0`` and so on.
        model_type: for example ``mistral``. Default: the first family that can represent the model.
        max_shard_bytes: the largest size of one file. A larger model is split into several files with an index.

    Raises:
        TypeError: ``model`` is not a model of ``minitx.nn``.
        ValueError: no family can represent the model (the message names the closest class and all fields that it would change); the
            model differs from its config, because a part was removed, added, replaced, quantised or changed (including ``scale`` and
            ``softcap``), or has a hook; ``chat_template`` without ``tokenizer``; or a number of ``labels`` that is not ``num_labels``.
    """
    if model_type is not None and model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r} is not supported: one of {', '.join(FAMILIES)}")
    if chat_template is not None and tokenizer is None:
        raise ValueError("chat_template needs tokenizer, because the template is saved with the tokenizer")
    _check_unchanged(model)
    if labels and len(labels) != model.config.num_labels:
        raise ValueError(
            f"labels must be {model.config.num_labels} names (the model's num_labels), got {len(labels)}: {labels}"
        )
    lacking: dict[str, dict[str, str]] = {}
    for family in FAMILIES.values() if model_type is None else (FAMILIES[model_type],):
        for name, architecture in family.architectures.items():
            values = write_config(family, name, model.config, labels)
            names = {place.name for place in _places(model, family, architecture).values()}
            lacking[name] = unlike(family, architecture, values, names, model.config)
            if not lacking[name]:
                tensors = _write_tensors(model, family, architecture)
                dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
                folder = Path(folder)
                folder.mkdir(parents=True, exist_ok=True)
                write_json(folder / "config.json", {**values, "dtype": dtype})
                write_shards(folder, tensors, max_shard_bytes)
                write_companions(folder, model, name, tokenizer, chat_template, facts or {}, first_id)
                return
    nearest = min(lacking, key=lambda name: ("architecture" in lacking[name], "head" in lacking[name], len(lacking[name])))
    wrong = ", ".join(lacking[nearest].values())
    raise ValueError(f"no Hugging Face class can represent this model; in the closest one, {nearest}, {wrong}")


def _check_unchanged(model: nn.Module) -> None:
    """Raise an error unless ``model`` is a minitx model and has the parts and settings that its config builds, without hooks."""
    if not isinstance(model, TransformerModel):
        hint = "save other models with their own library"
        if hasattr(model, "merge_and_unload"):
            from minitx.interop.lora import adapted_ties

            hint = "merge_and_unload() returns the model"
            for names in adapted_ties(model):  # PEFT would merge the adapter of one name into the shared weight
                hint = f"{' and '.join(names)} are one weight, and merging would change it everywhere, but the adapter changes one name"
        raise TypeError(f"save_hf saves models of minitx.nn, got {type(model).__name__}; {hint}")
    faults = changes_of(model) + [f"{name} has a hook, and hooks are not saved" for name in hooked_modules(model)]
    if faults:
        raise ValueError(f"save_hf: the model differs from its config: {joined(faults)}")


def _with(values: Any, changes: Any) -> Any:
    """Return ``values`` with ``changes``. Mappings are merged recursively."""
    if not (isinstance(values, Mapping) and isinstance(changes, Mapping)):
        return changes
    return {**values, **{name: _with(values.get(name), value) for name, value in changes.items()}}


def _read_files(folder: Path, family: Family, ignored: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of the folder that are not ignored, by their names without the prefix."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_shards(folder):
        plain = name.removeprefix(family.tensors.prefix)
        for old, new in family.tensors.renames.items():
            plain = plain.replace(old, new)
        if any(fnmatchcase(spelling, pattern) for spelling in (name, plain) for pattern in ignored):
            continue
        if plain in tensors:
            raise ValueError(f"the weights contain {plain} twice, with and without the prefix {family.tensors.prefix}")
        tensors[plain] = tensor
    for copy, original in family.tensors.copies.items():  # a file may contain only the copy
        if original not in tensors and copy in tensors:
            tensors[original] = tensors.pop(copy)
    return tensors


class Place(NamedTuple):
    """The place of our parameter in their file: part i of n of the tensor ``name`` of shape ``shape``.

    ``shift``: our values minus theirs.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[int, int]
    is_transposed: bool
    shift: float

    def view(self, tensor: Tensor) -> Tensor:
        """Return the part of their tensor that is ours."""
        index, number = self.part
        return (tensor.T if self.is_transposed else tensor).chunk(number)[index]


def _places(model: TransformerModel, family: Family, architecture: Architecture, prefix: str = "") -> dict[str, Place]:
    """Return the place of each parameter that is in the table. ``prefix`` is added to names outside the head.

    In GPT-2, for example, ``blocks.3.attention.k_proj.weight`` (E, E) is part 1 of 3 of ``h.3.attn.c_attn.weight`` (E, 3E), transposed.
    """
    table = family.tensors
    theirs_of = {ours: prefix + theirs for ours, theirs in table.names.items()} | dict(architecture.tensors)
    replacements = table.gated if "glu" in model.config.activation else {}
    places: dict[str, Place] = {}
    for name, parameter in model.named_parameters():
        ours = re.sub(r"\.\d+\.", ".*.", name)  # blocks.*.attention.k_proj.weight
        module, _, kind = ours.rpartition(".")
        key = ours if ours in theirs_of else module  # the table names a parameter, or a module for its weight and bias
        if key not in theirs_of:
            continue
        theirs = theirs_of[key] + ("" if key == ours else f".{kind}")
        if layer := re.search(r"\.(\d+)\.", name):
            theirs = theirs.replace("*", layer[1])
        for plain, replacement in replacements.items():
            theirs = theirs.replace(plain, replacement)
        joined_keys = [other for other in theirs_of if theirs_of[other] == theirs_of[key]]  # q_proj, k_proj, v_proj
        shape = (parameter.shape[0] * len(joined_keys), *parameter.shape[1:])
        if ours in table.shapes:
            shape = table.shapes[ours](model.config, shape)
        is_transposed = table.is_transposed and parameter.dim() == 2 and key.startswith("blocks.")
        places[name] = Place(
            name=theirs,
            shape=shape[::-1] if is_transposed else shape,
            part=(joined_keys.index(key), len(joined_keys)),
            is_transposed=is_transposed,
            shift=table.norm_shift if key.endswith("norm") else 0.0,
        )
    return places


def _put_tensors(
    model: TransformerModel,
    family: Family,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> None:
    """Replace the parameters on the meta device by tensors of a file. Shared parameters stay shared.

    Raises:
        ValueError: tensors that do not fit. The message lists all of them.
    """
    places, faults, fresh = _places(model, family, architecture), list[str](), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        place = places[name]
        if place.name not in tensors:
            faults.append(f"{name} {tuple(parameter.shape)} is missing: the file has no {place.name}")
        elif (shape := tuple(tensors[place.name].shape)) != place.shape:
            hint = " (is the table larger than vocab_size?)" if name == "embeddings.token.weight" else ""
            faults.append(f"{place.name} has shape {shape}, but the config needs {place.shape}{hint}")
        elif not tensors[place.name].is_floating_point():
            faults.append(f"{place.name} has dtype {tensors[place.name].dtype}, but weights must be floating-point")
        else:
            tensor = place.view(tensors[place.name]).reshape(parameter.shape)
            tensor = tensor.to(dtype or tensor.dtype).contiguous()
            fresh[name] = tensor + place.shift if place.shift else tensor
    known = {place.name for place in places.values()}
    extra = tensors.keys() - known - family.tensors.copies.keys()
    faults += [f"{name} {tuple(tensors[name].shape)} is unexpected: it is in the file, but not in this model" for name in extra]
    for name in (tensors.keys() & family.tensors.copies.keys()) - known:
        if not torch.equal(tensors[name], tensors[family.tensors.copies[name]]):
            faults.append(f"{name} differs from {family.tensors.copies[name]}, but the config ties them")
    if faults:
        listed = "; ".join(sorted(faults))
        modules = {name.rpartition(".")[0] for name in known}
        is_apart = all(name.rpartition(".")[0] not in modules and not re.search(r"\.\d+\.", name) for name in extra)
        hint = "ignore=[...] leaves out the tensors of another head" if is_apart else ELSEWHERE
        raise ValueError(f"the weights do not fit {type(model).__name__}: {listed}{f'. {hint}' if extra else ''}")
    model.load_state_dict(fresh, assign=True)


def _write_tensors(model: TransformerModel, family: Family, architecture: Architecture) -> dict[str, Tensor]:
    """Return the parameters by their names and in their layout."""
    prefix = "" if architecture.is_base else family.tensors.prefix
    places, tensors = _places(model, family, architecture, prefix), dict[str, Tensor]()
    for name, parameter in model.named_parameters():
        place = places[name]
        part = place.view(tensors.setdefault(place.name, torch.empty(place.shape, dtype=parameter.dtype)))
        part.copy_((parameter.detach() - place.shift).reshape(part.shape))
    types = family.tensors.names.get("embeddings.token_type")
    if types is not None and not model.config.type_vocab_size:  # transformers would fill the table with random numbers
        tensors[f"{prefix}{types}.weight"] = torch.zeros(1, model.config.embed_dim, dtype=next(model.parameters()).dtype)
    for copy, name in {} if model.config.tie_embeddings else architecture.twice.items():
        tensors[copy] = tensors[name].clone()
    return tensors
