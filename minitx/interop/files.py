"""The files of a model folder: finding it on disk or on the hub, JSON, safetensors, and the companions of the weights."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minitx.config.packages import package
from minitx.config.schema import stated
from minitx.crash_safe import replacing
from minitx.data.tokenizer_folder import TOKENIZER_FILES

WEIGHTS, INDEX, TOKENIZER = "model.safetensors", "model.safetensors.index.json", "tokenizer.json"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# the suffixes of model classes, the class of transformers that loads each, and its task on the hub
AUTO_CLASSES = {
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForConditionalGeneration": ("AutoModelForSeq2SeqLM", "text2text-generation"),
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
    "Model": ("AutoModel", "feature-extraction"),
}


class CanSave(Protocol):
    """A tokenizer that can be saved, such as those in ``minitx.data`` and ``tokenizers``."""

    def save(self, path: str) -> None:
        """Write the tokenizer to the file ``path``."""


def find_folder(name: str | Path, *, download: bool = True) -> Path:
    """Return the folder of a model. A name on the Hugging Face hub is downloaded into the cache of ``huggingface_hub``.

    Only the config, the weights and the tokenizer are downloaded. A local folder needs no network.

    Args:
        download: False: a name must be in the cache.

    Raises:
        ImportError: ``huggingface_hub`` is needed and not installed.
        FileNotFoundError: the model cannot be downloaded and is not in the cache.
    """
    folder = Path(os.path.expanduser(name))
    if folder.is_dir() or (download and not HUB_NAME.fullmatch(str(name))):
        return folder
    hub = package("huggingface_hub", f"{name} is not a folder, and loading it from the hub")
    patterns = ["config.json", WEIGHTS, INDEX, "model-*.safetensors", *TOKENIZER_FILES]
    try:
        return Path(hub.snapshot_download(str(name), allow_patterns=patterns, local_files_only=not download))
    except Exception as error:  # huggingface_hub raises many kinds, with long messages
        also = ", and cannot be downloaded" if download else ""
        raise FileNotFoundError(
            f"{name} is neither a folder nor a model in the cache of the Hugging Face hub{also} ({type(error).__name__})"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
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


def read_shards(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``model.safetensors``, memory-mapped, or of the shards that the index lists, by their names."""
    shards = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            pickled = any(folder.glob("*.bin"))
            hint = "; pickled weights (*.bin) are not supported: save them with transformers as safetensors" if pickled else ""
            raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}")
        shards = sorted({str(shard) for shard in read_json(folder / INDEX).get("weight_map", {}).values()})
        missing = [shard for shard in shards if Path(shard).name != shard or not (folder / shard).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder / INDEX} lists shards that are not in the folder: {', '.join(missing)}")
    for shard in shards:
        try:
            with safe_open(folder / shard, "pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (no mapping)
        except (SafetensorError, UnicodeDecodeError) as error:
            raise ValueError(f"{folder / shard} is damaged: {error}") from None


def write_shards(folder: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """Write the tensors to one file, or to several files with an index if they exceed ``max_shard_bytes``."""
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=max_shard_bytes)
    for stale in (folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
        stale.unlink(missing_ok=True)  # an old model.safetensors would be read instead of the shards
    for file, names in split.filename_to_tensors.items():
        with replacing(folder / file) as part:  # loaded tensors may still be memory-mapped from the old file
            save_file({name: tensors[name] for name in names}, part, metadata={"format": "pt"})
    if split.is_sharded:
        write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


# --- the other files of a Hugging Face folder


def write_companions(
    folder: Path,
    model: Any,
    name: str,
    tokenizer: Any,
    chat_template: str | None,
    facts: Mapping[str, Any],
    first_id: int | None = None,
) -> None:
    """Write the files that accompany ``config.json`` and the weights of a model of class ``name``. See ``save_hf``.

    Hugging Face models write their own ``generation_config.json``.
    """
    loader, task = next((entry for suffix, entry in AUTO_CLASSES.items() if name.endswith(suffix)), AUTO_CLASSES["Model"])
    ids = _special_ids(model.config, tokenizer)
    if loader in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM") and not hasattr(model, "generation_config"):
        begins = {f"{role}_token_id": ids[role][0] for role in ("bos", "pad") if ids[role]}
        ends = {"eos_token_id": ids["eos"] if len(ids["eos"]) > 1 else ids["eos"][0]} if ids["eos"] else {}
        start = {"decoder_start_token_id": model.config.bos_id} if loader == "AutoModelForSeq2SeqLM" else {}
        write_json(folder / "generation_config.json", {**begins, **ends, **start})
    if hasattr(tokenizer, "save_pretrained"):  # a tokenizer of transformers
        tokenizer.save_pretrained(str(folder))
    elif tokenizer is not None:
        tokenizer.save(str(folder / TOKENIZER))
        max_len = _size(model.config, "max_len", "max_position_embeddings")
        _write_tokenizer(folder, loader, max_len, ids, tokenizer, first_id)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    if not (folder / "README.md").exists():
        loaders = {"model": loader, **({} if tokenizer is None else {"tokenizer": "AutoTokenizer"})}
        (folder / "README.md").write_text(_readme(folder.name, model, name, task, loaders, facts), encoding="utf-8")


def _size(config: Any, *names: str) -> Any:
    """Return the first of these attributes that ``config``, ours or transformers', has."""
    return next((value for name in names if (value := stated(config, name)) is not None), None)


def _special_ids(config: Any, tokenizer: Any) -> dict[str, list[int]]:
    """Return the ids of the special tokens by role: first from the config, then from a ``minitx.data`` tokenizer."""
    marks = getattr(tokenizer, "mark_ids", {})
    ids = {
        role: [_size(config, f"{role}_id", f"{role}_token_id"), marks.get(role)]
        for role in ("pad", "bos", "eos", "mask", "cls")
    }
    if isinstance(ids["eos"][0], list | tuple):
        ids["eos"] = [*ids["eos"][0], *ids["eos"][1:]]
    return {role: list(dict.fromkeys(id for id in candidates if id is not None)) for role, candidates in ids.items()}


def _write_tokenizer(
    folder: Path, loader: str, max_len: int | None, ids: Mapping[str, list[int]], tokenizer: Any, first_id: int | None
) -> None:
    """Write ``tokenizer_config.json``. In ``tokenizer.json``, the template of special tokens adds what ``minitx.data`` adds."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer.from_file(str(folder / TOKENIZER))
    added = {id: token.content for id, token in made.get_added_tokens_decoder().items()}
    tokens = {f"{role}_token": added[id] for role, of_role in ids.items() for id in of_role[:1] if id in added}
    if unknown := getattr(made.model, "unk_token", None):
        tokens = {"eos_token": unknown, **tokens, "unk_token": unknown}  # lm-eval needs an eos_token
    # special tokens from the tokenizer's folder, for roles that are still missing
    from_folder, known = getattr(tokenizer, "special_tokens", {}), made.get_vocab()
    tokens = {**{role: text for role, text in from_folder.items() if text in known}, **tokens}
    if hasattr(tokenizer, "mark_ids"):
        made.post_processor = None
        first = between = "" if first_id is None else added[first_id]
        if loader == "AutoModelForSequenceClassification" and "cls_token" in tokens:
            first, between = tokens["cls_token"], tokens.get("eos_token", tokens["cls_token"])
        if first:
            special = [(token, made.token_to_id(token)) for token in (first, between)]
            pair = [first, "$A", between, "$B:0"]
            made.post_processor = TemplateProcessing(single=pair[:2], pair=pair, special_tokens=special)
        made.save(str(folder / TOKENIZER))
    options: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    options |= {} if max_len is None else {"model_max_length": max_len}
    options["model_input_names"] = ["input_ids", "attention_mask"]
    # a causal model continues the last column
    options["padding_side"] = "left" if loader == "AutoModelForCausalLM" else "right"
    write_json(folder / "tokenizer_config.json", {**options, **tokens})


def _readme(title: str, model: Any, name: str, task: str, loaders: Mapping[str, str], facts: Mapping[str, Any]) -> str:
    """Return the text of ``README.md``: the sizes of the model, ``facts``, and how to load it."""
    sizes = {
        "class": name,
        "parameters": f"{model.num_parameters():,}",
        "layers": _size(model.config, "num_layers", "num_hidden_layers"),
        "width": _size(model.config, "embed_dim", "hidden_size"),
        "heads": _size(model.config, "num_heads", "num_attention_heads"),
        "vocabulary": model.config.vocab_size,
        "longest text": _size(model.config, "max_len", "max_position_embeddings"),
        "score scale": _size(model.config, "scale"),
    }
    cells = {key: str(value).replace("|", "/") for key, value in {**sizes, **facts}.items() if value is not None}
    rows = [f"| {key.replace('|', '/')} | {value} |" for key, value in cells.items()]
    code = [f"from transformers import {', '.join(loaders.values())}", ""]
    code += [f'{what} = {cls}.from_pretrained("{title}")' for what, cls in loaders.items()]
    head = ["---", "library_name: transformers", f"pipeline_tag: {task}", "tags:", "- minitx", "---", "", f"# {title}", ""]
    table = ["A Transformer, saved by minitx.", "", "| | |", "|---|---|", *rows, ""]
    return "\n".join([*head, *table, "```python", *code, "```", ""])
