"""Models of checkpoints and of Hugging Face folders, and their inputs: a text from the command line, or a row of the data."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis.answers import Asked, next_tokens
from minitx.analysis.capture import Layers, chosen_modules
from minitx.analysis.intervene import with_knock_outs
from minitx.analysis.snapshot import Snapshot, take_snapshot
from minitx.cli.command_line import refusing
from minitx.cli.compose import find_own_modules
from minitx.config import ConfigError, TransformerConfig
from minitx.config.schema import first_line, require, stated
from minitx.data.batches import ValSource
from minitx.data.conversations import ChatFormat, template_of
from minitx.data.task import Task, as_split, key_value_texts, position_texts, without_targets
from minitx.data.tokenizers import Tokenizer, encode_known, fingerprint, token_texts
from minitx.generation import beam_search, generate
from minitx.interop import adopt_hf
from minitx.interop.finetune import load_folder, quiet
from minitx.training.checkpoints import Stored, load_stored
from minitx.training.net import Net
from minitx.training.questions import questions_of, token_namer

SOURCE, TARGET, TYPES = "input_ids", "decoder_input_ids", "token_type_ids"


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model for one row (B = 1) on the CPU, a text for each token, and the row's questions."""

    tensors: dict[str, Tensor]
    texts: dict[str, list[list[str]]] = field(default_factory=dict)
    asked: Asked | None = None


def open_stored(path: str, *, trust: bool = False, changes: Mapping[str, Any] | None = None) -> Stored:
    """Load the checkpoint ``path``. Modules of the user are found in the current folder.

    Args:
        trust, changes: see ``load_stored``.

    Raises:
        ConfigError: see ``load_stored``.
    """
    find_own_modules()
    return load_stored(path, trust=trust, changes=changes)


def with_attention(stored: Stored) -> nn.Module:
    """Return the network of a checkpoint, with our attention core under a model of Hugging Face.

    Raises:
        ConfigError: it has no attention that can be shown.
    """
    with refusing(f"ckpt_path={stored.path} cannot be shown: "):
        stored.net.show_attention()
        chosen_modules(stored.network, "weights", None)
    return stored.network


def attention_of(
    model: nn.Module, inputs: Inputs, *, layers: Layers = None, step: int | None = None, knock_out: bool = False
) -> Snapshot:
    """Return the attention on a row, and the model's answers. The model may take fewer keys than the data have.

    Args:
        layers, step: as in ``take_snapshot``. knock_out: also answer without each head (one forward pass a head).

    Raises:
        ConfigError: the model has no minitx attention, or cannot read the row; or with ``knock_out``, there is nothing to answer.
    """
    net, device = Net.of(model), next(model.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in net.inputs(inputs.tensors).items() if tensor.dim()}
    told: dict[str, Any] = {"tokens": inputs.texts, "asked": inputs.asked, "title": net.title}
    with refusing("", (ValueError, RuntimeError, IndexError)):
        snapshot = take_snapshot(model, tensors, layers=layers, step=step, **told)
        return with_knock_outs(snapshot, model, tensors, inputs.asked) if knock_out else snapshot


def check_reads_alike(
    said: str, ours: nn.Module, theirs: nn.Module, tokenizers: Sequence[Tokenizer | None], first: str
) -> None:
    """Raise a ConfigError unless the model ``theirs`` of ``said`` reads the same inputs as ``ours`` of ``first``."""
    for name in ("architecture", "vocab_size", "type_vocab_size", "image_size", "num_channels", "patch_size"):
        mine, other = (getattr(Net.of(model).shape, name) for model in (ours, theirs))
        require(mine == other, f"{said} has model.{name}={other}, but {first} has {mine}: they cannot read the same")
    mine, other = (None if tokenizer is None else fingerprint(tokenizer) for tokenizer in tokenizers)
    require(mine == other, f"{said} reads text with another tokenizer than {first}: their tokens differ")


def chat_format(stored: Stored) -> ChatFormat | None:
    """Return the chat template of a checkpoint, for its prompts, or None if it has none.

    Raises:
        ConfigError: the template cannot be read, or the tokenizer has no end mark.
    """
    template = template_of(stored.nodes["data"], stored.tokenizer)
    if template is None or stored.tokenizer is None:
        return None
    return ChatFormat(template, stored.tokenizer, "the chat template of the checkpoint")


def row_inputs(task: Task, row: int) -> Inputs:
    """Return row ``row`` of the validation split.

    Raises:
        ConfigError: the row does not exist.
    """
    source = ValSource(as_split(task, "val"), batch_size=1, world=1)
    require(row < source.num_rows, f"row={row} must lie in [0, {source.num_rows}), the validation rows")
    batch = source.rows(range(row, row + 1))
    tensors = without_targets(batch)
    return Inputs(tensors, position_texts(task, tensors), questions_of(task, batch))


def text_inputs(
    model: nn.Module, tokenizer: Tokenizer | None, text: str, name: str, target: str | None, **options: Any
) -> Inputs:
    """Return ``text``, the value of the key ``name``, in the form that ``model`` was trained on. An encoder–decoder also reads
    ``target`` (None: its own answer).

    Args:
        options: arguments of ``_own_answer``.

    Raises:
        ConfigError: the text is empty, has more than ``max_len`` tokens, or contains a character or an id that the model does
            not know.
    """
    config = Net.of(model).shape
    require(config.architecture != "vision", "text is for models of text: an image is chosen by row=N")
    if tokenizer is None:
        return _id_inputs(config, text)
    marks = tokenizer.mark_ids
    before = [marks["cls"]] if config.head == "sequence" and "cls" in marks else []  # the class token
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
    return Inputs(tensors, {axis: [token_texts(tokenizer, row)] for axis, row in rows.items()}, asked)


def _own_answer(model: nn.Module, ids: list[int], num_beams: int = 1, **options: Any) -> list[int]:
    """Return the answer of an encoder–decoder to ``ids``. ``generate`` and ``beam_search`` take the ``options``."""
    write: Any = generate if num_beams == 1 else partial(beam_search, num_beams=num_beams)
    with refusing("target is missing, and the model's own answer cannot be had: ", (ValueError, FloatingPointError)):
        (answer,) = write(model, torch.tensor([ids], device=next(model.parameters()).device), **options)
    found: list[int] = answer.tolist()
    return found


def _id_inputs(config: TransformerConfig, text: str) -> Inputs:
    """Ids with spaces between them, each ``ID`` or ``ID:TYPE``."""
    words = text.split()
    wrong = next((word for word in words if not re.fullmatch(r"\d+(:\d+)?", word, re.ASCII)), None)
    require(
        wrong is None,
        f"text has {wrong!r}, but the model has no tokenizer: give ids, or ID:TYPE, with spaces between them",
    )
    ids, types = ([int((word + ":0").split(":")[part]) for word in words] for part in (0, 1))
    for name, numbers, size in (("ids", ids, config.vocab_size or 0), ("types", types, config.type_vocab_size or 1)):
        largest = max(numbers, default=-1)
        require(largest < size, f"text has {largest} among its {name}, which must lie in [0, {size})")
    _check_ids(ids, "text", config.max_len)
    tensors = {SOURCE: torch.tensor([ids])} | ({TYPES: torch.tensor([types])} if config.type_vocab_size else {})
    return Inputs(tensors, {SOURCE: [key_value_texts(ids, types)]})


def _check_ids(ids: Sequence[int], name: str, limit: int) -> None:
    require(bool(ids), f"{name} is empty: the model needs one token at least")
    require(len(ids) <= limit, f"{name} has {len(ids)} tokens, but the model reads {limit} at most")


def encode_text(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    """Return the ids of ``text``, the value of the key ``name``. An unknown character is an error.

    Raises:
        ConfigError: the text is not UTF-8, or a character model does not know a character.
    """
    check_utf8(text, name)
    return encode_known(tokenizer, text, name)


def check_utf8(text: str, name: str) -> None:
    """Raise a ConfigError if ``text``, the value of the key ``name``, has bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: character {error.start + 1} cannot be read") from None


def paired(first: Inputs, second: Inputs) -> list[Inputs]:
    """Return the inputs of two texts for one page. Where their tokens differ, both have the label ``a|b``.

    Raises:
        ConfigError: the texts do not have equally many tokens.
    """
    texts = {}
    for axis, (row,) in first.texts.items():
        (other,) = second.texts[axis]
        require(
            len(row) == len(other),
            f"compare_text has {len(other)} tokens, but text has {len(row)}: two texts are compared token by token",
        )
        texts[axis] = [[a if a == b else f"{a}|{b}" for a, b in zip(row, other, strict=True)]]
    return [replace(first, texts=texts), replace(second, texts=texts)]


# --- Hugging Face folders


def open_hf(path: str, name: str) -> tuple[Any, Any]:
    """Load the model and the tokenizer of a Hugging Face folder in float32, and put our attention under the model (``adopt_hf``).

    ``architectures`` in its ``config.json`` names the class of the model. Only safetensors are read, no code of the
    folder runs, and nothing is downloaded.

    Args:
        path: a folder, or the name of a model in the cache of the Hugging Face hub. name: the key of this value.

    Raises:
        ConfigError: transformers is not installed; the folder does not exist; it has no ``config.json``, no tokenizer, or not
            all weights; transformers cannot read it; or ``adopt_hf`` refuses the model.
    """
    said = f"{name}={path}"
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{said} needs the package transformers: pip install transformers") from None
    folder = _hf_folder(path, said)
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers and tokenizers raise many kinds
            raise ConfigError(f"{said} has no tokenizer that transformers can read: {first_line(error)}") from error
    files = {"tokenizer.json", *tokenizer.vocab_files_names.values()}  # without them, transformers makes an empty one
    require(any((folder / file).is_file() for file in files), f"{said} has no tokenizer: none of {', '.join(sorted(files))}")
    with refusing(f"{said} cannot be shown: "):
        return adopt_hf(load_folder(folder)), tokenizer


def _hf_folder(path: str, said: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = Path(path)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise ConfigError(f"{said} is neither a folder nor a model in the cache of the Hugging Face hub") from None
    require((folder / "config.json").is_file(), f"{said} has no config.json, so it is not a Hugging Face folder")
    return folder


def hf_inputs(model: Any, tokenizer: Any, text: str, name: str, target: str | None, **options: Any) -> Inputs:
    """Return ``text``, the value of the key ``name``, with the special tokens that the tokenizer puts around it. An encoder–decoder
    also reads ``target`` (None: its own answer).

    Args:
        options: arguments of ``model.generate``.

    Raises:
        ConfigError: the text is empty, has more tokens than the model has positions, or an id that the model does not have; or an
            encoder–decoder cannot write text.
    """
    found = hf_ids(model, tokenizer, text, name)
    rows, tensors = {SOURCE: found[SOURCE]}, {key: torch.tensor([row]) for key, row in found.items()}
    if model.config.is_encoder_decoder:
        require(
            model.can_generate(),
            f"{type(model).__name__} is an encoder-decoder without a head, so it reads no target",
        )
        if target is None:
            given = {key: tensors[key].to(model.device) for key in (SOURCE, "attention_mask")}
            with quiet():
                answer = model.generate(**given, do_sample=False, **options)
            tensors[TARGET] = answer[:, :-1].cpu()  # nothing reads the last token
        else:
            labels = torch.tensor([hf_ids(model, tokenizer, target, "target", is_target=True)[SOURCE]])
            tensors[TARGET] = model.prepare_decoder_input_ids_from_labels(labels)
        rows[TARGET] = tensors[TARGET][0].tolist()
    asked, texts = None, _hf_texts(tokenizer)
    if model.can_generate():
        axis, known, size = TARGET if TARGET in rows else SOURCE, len(tokenizer), model.config.get_text_config().vocab_size
        asked = next_tokens(axis, [rows[axis]], cache(lambda i: texts([i])[0] if i < known else f"id {i}"), size)
    return Inputs(tensors, {axis: [texts(row)] for axis, row in rows.items()}, asked)


def hf_ids(model: Any, tokenizer: Any, text: str, name: str, *, is_target: bool = False) -> Any:
    """Return the encoding of a text, the value of the key ``name``. For errors, see ``hf_inputs``."""
    check_utf8(text, name)
    found = tokenizer(text_target=text) if is_target else tokenizer(text)
    ids, size = found[SOURCE], model.get_input_embeddings().num_embeddings
    _check_ids(ids, name, stated(model.config, "max_position_embeddings", int) or len(ids))
    require(max(ids) < size, f"{name} has the id {max(ids)}, but the model knows {size} tokens")
    return found


def _hf_texts(tokenizer: Any) -> Callable[[Sequence[int]], list[str]]:
    """The function ``token_texts`` of a tokenizer. One that is not of the package tokenizers gives its pieces."""
    if not tokenizer.is_fast:
        return tokenizer.convert_ids_to_tokens
    return partial(token_texts, Tokenizer(tokenizer.backend_tokenizer.to_str()))
