"""Load Hugging Face models for training and analysis, with our core, another score scale, or LoRA."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from minitx.config.schema import Config, Count, Share, check_choice, first_line, read, require
from minitx.interop.adopt import adopt_hf
from minitx.interop.files import find_folder
from minitx.nn.changes import structure_of
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
PLACE_OF_ADAPTER = re.compile(r"\.(base_layer|original_module)\.")
"""The part that PEFT inserts into the name of a weight with an adapter or a trained copy."""


@dataclass(frozen=True, kw_only=True)
class Lora(Config):
    """Arguments of ``peft.LoraConfig`` for ``pretrained_hf``.

    Attributes:
        r: the rank.
        lora_alpha: the factor of the adapter, divided by r; ``null``: 2r.
        lora_dropout: probability of dropout before the adapter.
        target_modules: names of the layers with an adapter, a regular expression for them, or ``all-linear`` (all but the head).
            An adapter on tied embeddings or their head unties both; on a head with a soft-cap, it is added after the cap and
            cannot be merged.
        modules_to_save: other modules to train. The new head of a classifier always is.
        use_rslora: divide by √r instead of r (Kalajdzievski 2023, arXiv:2312.03732).
        use_dora: learn direction and magnitude separately (Liu et al. 2024, arXiv:2402.09353).
    """

    r: Count = 8
    lora_alpha: Count | None = None
    lora_dropout: Share = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    modules_to_save: tuple[str, ...] = ()
    use_rslora: bool = False
    use_dora: bool = False


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
        task: the kind of task, which determines the head: ``language_model``, ``masked_lm``, ``seq2seq``, ``classify`` or ``tag``. In
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
    _check_tokenizer(folder, tokenizer)
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
        model = _with_lora(model, lora, options["task"], level)
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
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **local)
            kind, options = _class_for(config, task), dict[str, Any]()
            suffix = TASKS.get(task or "", "").removeprefix("AutoModel")
            new_head = task in ("classify", "tag") and (new_head or not (config.architectures or [""])[0].endswith(suffix))
            if new_head and num_labels is not None:
                names = {number: f"LABEL_{number}" for number in range(num_labels)}
                options = {
                    "id2label": names,
                    "label2id": {name: i for i, name in names.items()},
                    "ignore_mismatched_sizes": True,
                }
            model, loading = kind.from_pretrained(
                folder,
                dtype="float32",
                attn_implementation="eager",  # a config may name a kernel of the hub, which is code
                use_safetensors=True,
                output_loading_info=True,
                **local,
                **options,
            )
        except Exception as error:  # transformers raises many kinds
            raise ValueError(f"{folder} cannot be read by transformers: {first_line(error)}") from error
    inside = f"{model.base_model_prefix}."
    missing = sorted(loading["missing_keys"])
    if missing and not (new_head and not any(re.search(r"\.\d+\.", name) for name in missing)):  # not part of a layer
        raise ValueError(f"{folder} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}")
    other = {*missing, *(key for key, *_ in loading["mismatched_keys"])}  # transformers has drawn these
    head = [name for name, _ in model.named_parameters() if not name.startswith(inside)] if new_head else []
    for layer in {model.get_submodule(name.rpartition(".")[0]) for name in head if name not in other}:
        layer.reset_parameters()
    if other or head:
        log.info("model: %s lacks these weights, so they are new: %s", folder, ", ".join(sorted({*other, *head})))
    return model.eval()


def _class_for(config: Any, task: str | None) -> Any:
    """The class for a kind of task, or the class that the config names."""
    import transformers

    if task in TASKS:
        return getattr(transformers, TASKS[task])
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], None)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    return kind if is_model else transformers.AutoModel


def _without_kernels(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the names of attention functions, because these may be kernels of the hub, which are code."""
    kept = {name: value for name, value in config.items() if "attn_implementation" not in str(name)}  # id2label has numbers
    return {name: _without_kernels(value) if isinstance(value, Mapping) else value for name, value in kept.items()}


def _check_tokenizer(folder: Path, tokenizer: Any) -> None:
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


def _with_lora(model: Any, lora: Lora, task: str | None, level: int) -> Any:
    """Add an adapter to the model. Warnings of PEFT are logged at ``level``."""
    try:
        import peft
    except ImportError:
        raise ImportError("lora needs the package peft: pip install peft") from None
    arguments = dataclasses.asdict(lora)
    arguments["lora_alpha"] = 2 * arguments["r"] if arguments["lora_alpha"] is None else arguments["lora_alpha"]
    arguments["modules_to_save"] = list(arguments["modules_to_save"]) or None
    kind = {"classify": "SEQ_CLS", "tag": "TOKEN_CLS"}.get(task or "")  # for these PEFT also trains the new head
    with logging_warnings(level):
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=kind, **arguments))
    for names in adapted_ties(adapted):
        if any(not {*tie}.isdisjoint(names) for tie in _ties_without_config(model)):
            raise ValueError(
                f"model.lora: {type(model).__name__} always ties {' and '.join(names)}, but the adapter would change only one of "
                "them: choose other target_modules"
            )
        log.log(
            level,
            "model.lora: %s are tied, and the adapter changes only one of them: an exported model is untied",
            " and ".join(names),
        )
    return adapted


@contextmanager
def logging_warnings(level: int) -> Iterator[None]:
    """Log the warnings of PEFT in this context, without deprecations."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    texts = [" ".join(str(warning.message).split()) for warning in caught if issubclass(warning.category, UserWarning)]
    for text in dict.fromkeys(texts):
        log.log(level, "model.lora: %s", text)


def adapted_ties(model: nn.Module) -> list[list[str]]:
    """Return the names of each tied weight that a PEFT adapter changes under one name only, as in the model without adapters."""
    ties = [names for names in _names_of_weights(model) if any(PLACE_OF_ADAPTER.search(name) for name in names)]
    return [[PLACE_OF_ADAPTER.sub(".", name.removeprefix("base_model.model.")) for name in names] for names in ties]


def _names_of_weights(model: nn.Module) -> list[list[str]]:
    """The names of each weight with several names."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _ties_without_config(model: Any) -> list[list[str]]:
    """The names of the weights that this class of model ties even with ``tie_word_embeddings=False``."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    with torch.device("meta"):
        return _names_of_weights(type(model)(config))


@torch.no_grad()
def merged(model: Any) -> Any:
    """Merge the adapters of a PEFT model into its weights, in place, and return the model.

    Tied weights are untied if an adapter changes them under one name only.

    Raises:
        ValueError: an adapted layer has a soft-cap. PEFT adds the adapter after the cap, but merging would add it before.
    """
    for name, module in model.named_modules():
        softcap = getattr(getattr(module, "base_layer", None), "softcap", None)
        if softcap is not None:
            raise ValueError(
                f"{name} cannot be merged: its adapter is added after the soft-cap of {softcap}, and would then be added before it; "
                "train the adapter without this layer (target_modules)"
            )
    if adapted_ties(model):
        _untie(model)
    with logging_warnings(logging.INFO):
        return model.merge_and_unload()


def _untie(model: nn.Module) -> None:
    """Untie all weights: each name gets a separate copy, and the configs are changed."""
    shared = {model.get_parameter(names[0]) for names in _names_of_weights(model)}
    for module in model.modules():
        if hasattr(module, "base_layer") and not shared.isdisjoint(module.base_layer.parameters()):  # type: ignore[union-attr]
            module.base_layer = copy.deepcopy(module.base_layer)  # it may also be used elsewhere without an adapter
    seen = set[nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                setattr(module, name, nn.Parameter(parameter.clone(), requires_grad=parameter.requires_grad))
            seen.add(parameter)
    set_untied(model)


def set_untied(model: nn.Module) -> None:
    """Set ``tie_word_embeddings=False`` in the configs of a Hugging Face model."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            module.config.tie_word_embeddings = False  # type: ignore[union-attr]


@contextmanager
def quiet() -> Iterator[Any]:
    """Import transformers and yield the package, without its progress bars and logs.

    Raises:
        ImportError: ``transformers`` is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError("Hugging Face models need the package transformers: pip install transformers") from None
    theirs = transformers.logging
    with ExitStack() as after:
        after.callback(theirs.set_verbosity, theirs.get_verbosity())
        theirs.set_verbosity(theirs.CRITICAL)
        if theirs.is_progress_bar_enabled():
            after.callback(theirs.enable_progress_bar)
            theirs.disable_progress_bar()
        yield transformers
