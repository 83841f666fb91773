"""Models from checkpoints and Hugging Face folders, and their inputs: a text from the command line, or a row of the data."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis.answers import Questions, next_tokens
from minitx.analysis.experiments import with_knock_outs
from minitx.analysis.questions import questions_of
from minitx.analysis.recorder import Layers, chosen_modules
from minitx.analysis.snapshot import SOURCE, TARGET, Snapshot
from minitx.analysis.snapshot_sources import take_snapshot
from minitx.cli.command_line import encode_text, refusing
from minitx.config import ConfigError, TransformerConfig
from minitx.config.packages import package
from minitx.config.schema import first_line, require, stated
from minitx.data.batches import ValSource
from minitx.data.splits import as_split
from minitx.data.task import Task, without_targets
from minitx.data.token_labels import key_value_texts, namer, position_texts, token_namer, token_texts
from minitx.data.tokenizer import Tokenizer, fingerprint
from minitx.generation import beam_search, generate
from minitx.interop import adopt_hf
from minitx.interop.files import find_folder
from minitx.interop.finetune import load_folder, quiet
from minitx.nn.attention import attention_cores
from minitx.training.checkpoints import Stored
from minitx.training.net import Net, OfTransformers

TYPES = "token_type_ids"


@dataclass(frozen=True)
class RowInputs:
    """The inputs of a model for a row (B = 1) on the CPU, a text for each token, and the questions for the row."""

    tensors: dict[str, Tensor]
    texts: dict[str, list[list[str]]] = field(default_factory=dict)
    asked: Questions | None = None


def with_attention(stored: Stored) -> nn.Module:
    """Return the network of a checkpoint. A model of Hugging Face gets our attention core.

    Raises:
        ConfigError: the network has no attention that can be shown.
    """
    with refusing(f"ckpt_path={stored.path} cannot be shown: "):
        if isinstance(stored.net, OfTransformers) and not attention_cores(stored.network):
            adopt_hf(stored.network)
        chosen_modules(stored.network, "weights", None)
    return stored.network


def attention_of(
    model: nn.Module, inputs: RowInputs, *, layers: Layers = None, step: int | None = None, knock_out: bool = False
) -> Snapshot:
    """Return the attention on a row, and the model's answers. The row may have keys that the model does not use.

    Args:
        layers, step: see ``take_snapshot``.
        knock_out: also compute the answers without each head (one forward pass per head).

    Raises:
        ConfigError: the model does not use our attention, or cannot read the row; or with ``knock_out``, there is no question.
    """
    net, device = Net.of(model), next(model.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in net.inputs(inputs.tensors).items() if tensor.dim()}
    descriptions: dict[str, Any] = {"tokens": inputs.texts, "asked": inputs.asked, "title": net.title}
    with refusing("", (ValueError, RuntimeError, IndexError)):
        snapshot = take_snapshot(model, tensors, layers=layers, step=step, **descriptions)
        return with_knock_outs(snapshot, model, tensors, inputs.asked) if knock_out else snapshot


def check_reads_alike(
    key_and_path: str, ours: nn.Module, theirs: nn.Module, tokenizers: Sequence[Tokenizer | None], first: str
) -> None:
    """Raise a ConfigError unless the model ``theirs`` of ``key_and_path`` can read the same inputs as ``ours`` of ``first``."""
    for name in ("architecture", "vocab_size", "type_vocab_size", "image_size", "num_channels", "patch_size"):
        expected, actual = (getattr(Net.of(model).shape, name) for model in (ours, theirs))
        require(
            expected == actual,
            f"{key_and_path} has model.{name}={actual}, but {first} has {expected}: they cannot read the same inputs",
        )
    expected, actual = (None if tokenizer is None else fingerprint(tokenizer) for tokenizer in tokenizers)
    require(expected == actual, f"{key_and_path} reads text with another tokenizer than {first}: their tokens differ")


def row_inputs(task: Task, row: int) -> RowInputs:
    """Return the inputs of row ``row`` of the validation split.

    Raises:
        ConfigError: there is no such row.
    """
    source = ValSource(as_split(task, "val"), batch_size=1, world=1)
    require(row < source.num_rows, f"row={row} must lie in [0, {source.num_rows}), the range of validation rows")
    batch = source.rows(range(row, row + 1))
    tensors = without_targets(batch)
    return RowInputs(tensors, position_texts(task, tensors), questions_of(task, batch))


def text_inputs(
    model: nn.Module,
    tokenizer: Tokenizer | None,
    text: str,
    name: str,
    target: str | None,
    first_id: int | None = None,
    **options: Any,
) -> RowInputs:
    """Return the inputs for ``text``, the value of the key ``name``, encoded as in training.

    Args:
        target: the target text of an encoder–decoder; None: the model's own answer.
        first_id: the token that began every text in training, or None.
        options: options of ``_own_answer``.

    Raises:
        ConfigError: the text is empty, has more than ``max_len`` tokens, or contains an unknown character or id.
    """
    config = Net.of(model).shape
    require(config.architecture != "vision", "text is for text models: to choose an image, set row=N")
    if tokenizer is None:
        return _id_inputs(config, text)
    marks = tokenizer.mark_ids
    before = [] if first_id is None else [first_id]
    before += [marks["cls"]] if config.head == "sequence" and "cls" in marks else []  # the class token
    rows = {SOURCE: before + encode_text(tokenizer, text, name)}
    _check_ids(rows[SOURCE], name, config.max_len)
    if config.architecture == "encoder_decoder":
        answer = _own_answer(model, rows[SOURCE], **options) if target is None else encode_text(tokenizer, target, "target")
        assert config.bos_id is not None
        rows[TARGET] = [config.bos_id, *answer]
        _check_ids(rows[TARGET], "target", config.max_len)
    tensors = {axis: torch.tensor([row]) for axis, row in rows.items()}
    axis = TARGET if TARGET in rows else SOURCE
    writes = config.architecture in ("decoder", "encoder_decoder")
    asked = next_tokens(axis, [rows[axis]], token_namer(tokenizer), tokenizer.vocab_size) if writes else None
    return RowInputs(tensors, {axis: [token_texts(tokenizer, row)] for axis, row in rows.items()}, asked)


def _own_answer(model: nn.Module, ids: list[int], num_beams: int = 1, **options: Any) -> list[int]:
    """Return the answer of an encoder–decoder to ``ids``. ``options`` are passed to ``generate`` or ``beam_search``."""
    write: Any = generate if num_beams == 1 else partial(beam_search, num_beams=num_beams)
    with refusing("target is missing, and the model's own answer cannot be generated: ", (ValueError, FloatingPointError)):
        (answer,) = write(model, torch.tensor([ids], device=next(model.parameters()).device), **options)
    tokens: list[int] = answer.tolist()
    return tokens


def _id_inputs(config: TransformerConfig, text: str) -> RowInputs:
    """Return the inputs for a text of ids, each written as ``ID`` or ``ID:TYPE``."""
    words = text.split()
    wrong = next((word for word in words if not re.fullmatch(r"\d+(:\d+)?", word, re.ASCII)), None)
    require(wrong is None, f"text has {wrong!r}, but the model has no tokenizer: write ids, or ID:TYPE, separated by spaces")
    ids, types = ([int((word + ":0").split(":")[part]) for word in words] for part in (0, 1))
    for name, numbers, size in (("ids", ids, config.vocab_size or 0), ("types", types, config.type_vocab_size or 1)):
        largest = max(numbers, default=-1)
        require(largest < size, f"text has {largest} among its {name}: {name} must lie in [0, {size})")
    _check_ids(ids, "text", config.max_len)
    tensors = {SOURCE: torch.tensor([ids])} | ({TYPES: torch.tensor([types])} if config.type_vocab_size else {})
    return RowInputs(tensors, {SOURCE: [key_value_texts(ids, types)]})


def _check_ids(ids: Sequence[int], name: str, limit: int) -> None:
    require(bool(ids), f"{name} is empty: the model needs at least one token")
    require(len(ids) <= limit, f"{name} has {len(ids)} tokens, but the model reads at most {limit}")


def paired(first: RowInputs, second: RowInputs) -> list[RowInputs]:
    """Return the inputs of two texts for one page. Where their tokens differ, both are labelled ``a|b``.

    Raises:
        ConfigError: the numbers of tokens differ.
    """
    texts = {}
    for axis, (row,) in first.texts.items():
        (other,) = second.texts[axis]
        require(
            len(row) == len(other),
            f"compare_text has {len(other)} tokens, but text has {len(row)}: the numbers must be equal, because texts are compared token by token",
        )
        texts[axis] = [[a if a == b else f"{a}|{b}" for a, b in zip(row, other, strict=True)]]
    return [replace(first, texts=texts), replace(second, texts=texts)]


# --- Hugging Face folders


def open_hf(path: str, name: str) -> tuple[Any, Any]:
    """Load the model and the tokenizer of a Hugging Face folder in float32, and make the model use our attention (``adopt_hf``).

    ``architectures`` in ``config.json`` names the class of the model. Only safetensors are read, code in the folder is not run,
    and nothing is downloaded.

    Args:
        path: a folder, or the name of a model in the local cache of the Hugging Face hub.
        name: the key of this value, for messages.

    Raises:
        ConfigError: transformers is not installed; the folder does not exist; ``config.json``, the tokenizer or some weights
            are missing; transformers cannot read it; or ``adopt_hf`` refuses the model.
    """
    key_and_path = f"{name}={path}"
    transformers = package("transformers", key_and_path)
    with refusing(f"{name}=", (FileNotFoundError,)):
        folder = find_folder(path, download=False)
    require((folder / "config.json").is_file(), f"{key_and_path} has no config.json, so it is not a Hugging Face folder")
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers and tokenizers raise many types of error
            raise ConfigError(f"{key_and_path} has no tokenizer that transformers can read: {first_line(error)}") from error
    # without these files, transformers returns an empty tokenizer
    files = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
    require(
        any((folder / file).is_file() for file in files), f"{key_and_path} has no tokenizer: none of {', '.join(sorted(files))}"
    )
    with refusing(f"{key_and_path} cannot be shown: "):
        return adopt_hf(load_folder(folder)), tokenizer


def hf_inputs(model: Any, tokenizer: Any, text: str, name: str, target: str | None, **options: Any) -> RowInputs:
    """Return the inputs for ``text``, the value of the key ``name``, with the special tokens of the tokenizer.

    Args:
        target: the target text of an encoder–decoder; None: the model's own answer.
        options: options of ``model.generate``.

    Raises:
        ConfigError: the text is empty, has more tokens than the model has positions, or contains an id outside of the model's
            vocabulary; or the encoder–decoder has no head.
    """
    encoding = hf_ids(model, tokenizer, text, name)
    rows, tensors = {SOURCE: encoding[SOURCE]}, {key: torch.tensor([row]) for key, row in encoding.items()}
    if model.config.is_encoder_decoder:
        require(model.can_generate(), f"{type(model).__name__} is an encoder-decoder without a head: it cannot read a target")
        if target is None:
            model_inputs = {key: tensors[key].to(model.device) for key in (SOURCE, "attention_mask")}
            with quiet():
                answer = model.generate(**model_inputs, do_sample=False, **options)
            tensors[TARGET] = answer[:, :-1].cpu()  # the last token is not read
        else:
            labels = torch.tensor([hf_ids(model, tokenizer, target, "target", is_target=True)[SOURCE]])
            tensors[TARGET] = model.prepare_decoder_input_ids_from_labels(labels)
        rows[TARGET] = tensors[TARGET][0].tolist()
    asked, texts = None, _hf_texts(tokenizer)
    if model.can_generate():
        axis, known, size = TARGET if TARGET in rows else SOURCE, len(tokenizer), model.config.get_text_config().vocab_size
        asked = next_tokens(axis, [rows[axis]], namer(texts, known), size)
    return RowInputs(tensors, {axis: [texts(row)] for axis, row in rows.items()}, asked)


def hf_ids(model: Any, tokenizer: Any, text: str, name: str, *, is_target: bool = False) -> Any:
    """Return the encoding of ``text``, the value of the key ``name``. For errors, see ``hf_inputs``."""
    encoding = tokenizer(text_target=text) if is_target else tokenizer(text)
    ids, size = encoding[SOURCE], model.get_input_embeddings().num_embeddings
    _check_ids(ids, name, stated(model.config, "max_position_embeddings", int) or len(ids))
    require(max(ids) < size, f"{name} has the id {max(ids)}, but the vocabulary of the model has {size} tokens")
    return encoding


def _hf_texts(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """Return a function from ids to the texts of tokens, or to the pieces of a tokenizer that is not from the package tokenizers."""
    if not tokenizer.is_fast:
        return tokenizer.convert_ids_to_tokens
    return partial(token_texts, Tokenizer(tokenizer.backend_tokenizer.to_str()))
