"""Load Hugging Face models for training and analysis, with our core, another score scale, or LoRA."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from torch import nn

from minitx.config.packages import package
from minitx.config.schema import Count, check_choice, first_line, read, require
from minitx.interop.adopt import adopt_hf, fold_back, release_hf
from minitx.interop.adopted_core import adopted_cores
from minitx.interop.files import find_folder, write_companions
from minitx.interop.lora import Lora, adapted_ties, merged, set_untied, with_lora
from minitx.nn.config_differences import structure_of
from minitx.nn.folding import fold_scale as fold
from minitx.nn.folding import set_scale

log = logging.getLogger(__name__)

Attention = Literal["sdpa", "eager"]
TASKS = {
    "language_model": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "classify": "AutoModelForSequenceClassification",
    "tag": "AutoModelForTokenClassification",
}
"""The class of transformers for a kind of task (``Task.kind``)."""


def pretrained_hf(
    path: str,
    *,
    task: str | None = None,
    adopt: bool = False,
    scale: str | float = "own",
    fold_scale: bool = False,
    lora: Count | Lora | None = None,
    attention: Attention = "sdpa",
    new_head: bool = False,
    num_labels: int | None = None,
    pad_id: int | None = None,
    tokenizer: Any = None,
) -> nn.Module:
    """Load a Hugging Face model in float32. Only safetensors files are read, and no code of the folder runs.

    The attribute ``stored_node`` of the model is a config node that builds the model again without the folder, with new weights
    (``hf_from_config``). Checkpoints contain it, unless a part or a scale of the model has changed since.

    Args:
        path: a folder with ``config.json`` and weights, or a name on the hub.
        task: the kind of task. It determines the head: ``language_model``, ``masked_lm``, ``seq2seq``, ``classify`` or ``tag``. In
            a run, the data decide. Default, and for ``other``: the class that ``config.json`` names. A head that the folder does not
            have is new.
        adopt: run attention through our core (``adopt_hf``), for probes, the viewer, interventions and ``scale``.
        scale: the score scale of an adopted model, as in ``set_scale``; ``own``: the model's.
        fold_scale: multiply W_Q and W_K so that the model with the new scale starts as the same function.
        lora: train only a low-rank adapter (Hu et al. 2021, arXiv:2106.09685) with ``peft``: a rank (on all linear layers but the
            head), or keys of ``Lora``.
        attention: ``sdpa`` or ``eager``, for a model that is not adopted.
        new_head: with ``classify`` and ``tag``: a new head. Otherwise the labels are numbered as in the folder's ``id2label``.
        num_labels: the number of labels of a new head. In a run, the data decide.
        pad_id: the id of padding in the data, instead of the config's. In a run, the data decide.
        tokenizer: the tokenizer of the data. In a run, the data decide.

    Raises:
        ImportError: ``transformers`` or, for ``lora``, ``peft`` is not installed. FileNotFoundError: the folder does not exist.
        ValueError: ``task`` or ``attention`` is unknown; transformers cannot read the folder; weights are missing; the tokenizer is not
            the folder's tokenizer; or ``adopt_hf``, ``set_scale`` or ``fold_scale`` refuses the model.
    """
    if scale != "own" and not adopt:
        raise ValueError(f"scale={scale} needs adopt=true: otherwise a Hugging Face model keeps its own scale")
    if fold_scale and scale == "own":
        raise ValueError("fold_scale=true needs a scale other than scale=own")
    _check_words(task, attention)
    folder = find_folder(path)
    _check_vocabulary(folder, tokenizer)
    model = load_folder(folder, task, num_labels, new_head)
    if pad_id is not None:
        model.config.pad_token_id = pad_id  # classifiers built on decoders use it to find the last token
    options = {"task": task, "adopt": adopt, "scale": scale, "lora": lora, "attention": attention}
    return _finished(model, options, fold_scale, logging.WARNING)


def hf_from_config(
    config: Mapping[str, Any],
    *,
    task: str | None = None,
    adopt: bool = False,
    scale: str | float = "own",
    lora: Count | Lora | None = None,
    attention: Attention = "sdpa",
    untied: tuple[str, ...] = (),
) -> nn.Module:
    """Build a Hugging Face model with new weights from ``config``, the content of its ``config.json``. No file is read.

    Args:
        task, adopt, scale, lora, attention: see ``pretrained_hf``.
        untied: weights that are not tied, although the config ties them (the head of T5 v1.1).

    Raises:
        ImportError, ValueError: see ``pretrained_hf``.
    """
    _check_words(task, attention)
    with quiet() as transformers:
        known = transformers.AutoConfig.for_model(**_without_kernels(config))
        kind = _class_for(known, task)
        model = getattr(kind, "from_config", kind)(known)  # an Auto class has ``from_config``
    model.set_attn_implementation("eager")
    model = model.float().eval()
    for weight in untied:
        layer, _, name = weight.rpartition(".")
        setattr(model.get_submodule(layer), name, nn.Parameter(model.get_parameter(weight).detach().clone()))
    return _finished(model, {"task": task, "adopt": adopt, "scale": scale, "lora": lora, "attention": attention})


def _check_words(task: str | None, attention: str) -> None:
    check_choice("task", "other" if task is None else task, (*TASKS, "other"))
    check_choice("attention", attention, get_args(Attention))


def _finished(model: Any, options: dict[str, Any], fold_scale: bool = False, level: int = logging.INFO) -> nn.Module:
    """Adopt the model, change its scale, add an adapter, and store how to build it again. PEFT's warnings are logged at ``level``."""
    scale, lora, config = options["scale"], options["lora"], json.loads(model.config.to_json_string())
    ties = model.get_expanded_tied_weights_keys(all_submodels=True).items()
    untied = [name for name, other in ties if model.get_parameter(name) is not model.get_parameter(other)]
    options["untied"] = untied or None
    if options["adopt"]:
        adopt_hf(model)
    elif options["attention"] != "eager":
        model.set_attn_implementation(options["attention"])
    if scale != "own":
        (fold if fold_scale else set_scale)(model, scale)
    if lora is not None:
        lora = lora if isinstance(lora, Lora) else Lora(r=read(Count, lora, "lora"))
        model = with_lora(model, lora, options["task"], level)
        options["lora"] = dataclasses.asdict(lora)
    stored = {name: value for name, value in options.items() if value is not None}
    model.stored_node = {"_target_": "minitx.interop.hf_from_config", **stored, "config": config}
    model.stored_structure = structure_of(model)
    return model


def load_folder(folder: Path, task: str | None = None, num_labels: int | None = None, new_head: bool = False) -> Any:
    """Return the model of a folder for ``task``, in evaluation mode, in float32 and with eager attention. See ``pretrained_hf``."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a Hugging Face folder")
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    with quiet() as transformers:
        config = _read_by(transformers.AutoConfig.from_pretrained, folder, **local)
        suffix = TASKS.get(task or "", "").removeprefix("AutoModel")
        new_head = task in ("classify", "tag") and (new_head or not (config.architectures or [""])[0].endswith(suffix))
        model, loading = _read_by(
            _class_for(config, task).from_pretrained,
            folder,
            dtype="float32",
            attn_implementation="eager",  # a config may name a kernel of the hub, and kernels are code
            use_safetensors=True,
            output_loading_info=True,
            **local,
            **(_new_labels(num_labels) if new_head and num_labels is not None else {}),
        )
    missing = sorted(loading["missing_keys"])
    in_layers = any(re.search(r"\.\d+\.", name) for name in missing)
    if missing and (in_layers or not new_head):
        raise ValueError(f"{folder} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}")
    drawn = {*missing, *(key for key, *_ in loading["mismatched_keys"])}
    if new_head:
        drawn |= _draw_head(model, drawn)
    if drawn:
        log.info("model: %s lacks these weights, so they are new: %s", folder, ", ".join(sorted(drawn)))
    return model.eval()


def _read_by(function: Callable[..., Any], folder: Path, **options: Any) -> Any:
    """Call a function of transformers that reads a folder. Its error becomes a sentence about the folder."""
    try:
        return function(folder, **options)
    except Exception as error:  # transformers raises many kinds
        raise ValueError(f"{folder} cannot be read by transformers: {first_line(error)}") from error


def _new_labels(count: int) -> dict[str, Any]:
    """Options of ``from_pretrained`` for a new head with ``count`` labels."""
    names = {number: f"LABEL_{number}" for number in range(count)}
    return {"id2label": names, "label2id": {name: number for number, name in names.items()}, "ignore_mismatched_sizes": True}


def _draw_head(model: Any, drawn: Set[str]) -> set[str]:
    """Draw the weights of the head that transformers has not ``drawn``. Return the names of all weights of the head."""
    head = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
    for layer in {model.get_submodule(name.rpartition(".")[0]) for name in head - drawn}:
        layer.reset_parameters()
    return head


def _class_for(config: Any, task: str | None) -> Any:
    """The class for a kind of task, or the class that the config names."""
    import transformers

    if task in TASKS:
        return getattr(transformers, TASKS[task])
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_model else transformers.AutoModel


def _without_kernels(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the names of attention functions, because these may be kernels of the hub, and kernels are code."""
    kept = {name: value for name, value in config.items() if "attn_implementation" not in str(name)}  # id2label has numbers
    return {name: _without_kernels(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def _check_vocabulary(folder: Path, tokenizer: Any) -> None:
    """Refuse the tokenizer of the data if its ids mean other tokens than the folder's."""
    require(
        not isinstance(tokenizer, str),
        f"model.tokenizer={tokenizer} cannot be set: the tokenizer is an option of the data, data.tokenizer={tokenizer}",
    )
    if tokenizer is None:
        return
    file = folder / "tokenizer.json"
    if not file.is_file():
        log.info("model: %s has no tokenizer.json to compare data.tokenizer with", folder)
        return
    ours, theirs = (json.loads(text)["model"]["vocab"] for text in (tokenizer.to_dict()["json"], file.read_text("utf-8")))
    if ours != theirs:
        raise ValueError(f"data.tokenizer has other ids than the tokenizer of the model: set data.tokenizer={folder}")


def save_finetuned(
    model: Any,
    folder: Path,
    *,
    tokenizer: Any,
    chat_template: str | None,
    facts: Mapping[str, Any],
    labels: Sequence[str] = (),
    first_id: int | None = None,
) -> None:
    """Save a model of transformers with ``save_pretrained``, after merging LoRA and removing our attention core."""
    unties = bool(adapted_ties(model))
    model = merged(model) if hasattr(model, "merge_and_unload") else model
    if any(module.core.scale is not None for module in adopted_cores(model).values()):
        fold_back(model)  # configs of transformers cannot store a scale
    model = release_hf(model) if adopted_cores(model) else model
    if unties:
        set_untied(model)  # after release_hf, because it restores the original configs
    if labels:
        model.config.id2label, model.config.label2id = dict(enumerate(labels)), {name: i for i, name in enumerate(labels)}
    with quiet():
        model.save_pretrained(str(folder))
    write_companions(folder, model, type(model).__name__, tokenizer, chat_template, facts, first_id)


@contextmanager
def quiet() -> Iterator[Any]:
    """Import transformers and yield the package, without its progress bars and logs.

    Raises:
        ImportError: ``transformers`` is not installed.
    """
    transformers = package("transformers", "a Hugging Face model")
    theirs = transformers.logging
    with ExitStack() as after:
        after.callback(theirs.set_verbosity, theirs.get_verbosity())
        theirs.set_verbosity(theirs.CRITICAL)
        if theirs.is_progress_bar_enabled():
            after.callback(theirs.enable_progress_bar)
            theirs.disable_progress_bar()
        yield transformers
