"""Models of checkpoints and of Hugging Face folders, and their inputs: a text from the command line, or a row of the data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitx.config import ConfigError, TransformerConfig
from minitx.config.schema import first_line, require

if TYPE_CHECKING:
    from torch import Tensor, nn

    from minitx.analysis.snapshot import Snapshot
    from minitx.data.task import Task
    from minitx.data.tokenizers import Tokenizer
    from minitx.training.checkpoints import Stored

SOURCE, TARGET = "input_ids", "decoder_input_ids"
TYPES = "token_type_ids"


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model for one row (B = 1) on the CPU, and a text for each token."""

    tensors: dict[str, Tensor]
    texts: dict[str, list[list[str]]] = field(default_factory=dict)


def open_stored(path: str, *, trust: bool = False, changes: Mapping[str, Any] | None = None) -> Stored:
    """Load the checkpoint ``path``. Modules of the user's are found in the current folder.

    Args:
        trust, changes: see ``load_stored``.

    Raises:
        ConfigError: see ``load_stored``.
    """
    from minitx.cli.compose import find_own_modules
    from minitx.training.checkpoints import load_stored

    find_own_modules(())
    return load_stored(path, trust=trust, changes=changes)


def with_attention(stored: Stored) -> nn.Module:
    """Return the network of a checkpoint, with our attention core under a model of Hugging Face.

    Raises:
        ConfigError: it has no attention that can be shown.
    """
    from minitx.analysis.capture import attention_cores
    from minitx.interop import adopt_hf
    from minitx.training.build import is_of_transformers, unwrapped

    if is_of_transformers(unwrapped(stored.network)) and not attention_cores(stored.network):
        try:
            adopt_hf(stored.network)
        except ValueError as error:
            raise ConfigError(f"ckpt_path={stored.path} cannot be shown: {error}") from error
    if not attention_cores(stored.network):
        name = type(stored.network).__name__
        raise ConfigError(f"ckpt_path={stored.path} holds a {name} without attention of minitx, so there is none to show")
    return stored.network


def shape_of(model: nn.Module) -> TransformerConfig:
    """Return the config of one of our models. A model of the user's is treated as a decoder of any length."""
    found = getattr(model, "config", None)
    return found if isinstance(found, TransformerConfig) else TransformerConfig(max_len=2**31)


def attention_of(model: nn.Module, inputs: dict[str, Any], **options: Any) -> Snapshot:
    """Return the attention on a batch; ``options`` are those of ``take_snapshot``. The model may take fewer keys than the data have.

    Raises:
        ConfigError: the model has no attention of ours, or cannot read the batch.
    """
    from minitx.analysis.snapshot import take_snapshot
    from minitx.training.build import Caller

    device, read = next(model.parameters()).device, Caller(model).inputs(inputs)
    try:
        return take_snapshot(model, {name: tensor.to(device) for name, tensor in read.items() if tensor.dim()}, **options)
    except (ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(" ".join(str(error).split())[:300]) from error


def reader_of_ids(stored: Stored) -> Any:
    """Wrap a model of the user's for ``generate``: ids (B, L) in, logits (B, L, V) out.

    Raises:
        ConfigError: in a call, if the model does not return such logits for ``input_ids``.
    """
    import torch

    from minitx.training.build import Caller

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.caller = stored.network, Caller(stored.network)

        def forward(self, input_ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
            logits = self.caller({"input_ids": input_ids})
            if logits.shape[:-1] != input_ids.shape:
                shapes = f"{tuple(logits.shape)} for input_ids of {tuple(input_ids.shape)}"
                raise ConfigError(f"ckpt_path={stored.path}: to write text a model must give logits (B, L, V), got {shapes}")
            return logits

    return Reads().eval()


def row_inputs(task: Task, row: int) -> Inputs:
    """Return row ``row`` of the validation split.

    Raises:
        ConfigError: the row does not exist.
    """
    from minitx.data.batches import ValSource
    from minitx.data.task import as_split, position_texts
    from minitx.training.build import network_inputs

    source = ValSource(as_split(task, "val"), batch_size=1, world=1)
    if not 0 <= row < source.num_rows:
        raise ConfigError(f"row={row} must lie in [0, {source.num_rows}), the validation rows")
    tensors = network_inputs(source.rows(range(row, row + 1)))
    return Inputs(tensors, position_texts(task, tensors))


def text_inputs(model: nn.Module, tokenizer: Tokenizer | None, text: str, target: str | None, **options: Any) -> Inputs:
    """Return ``text`` in the form in which ``model`` was trained. For an encoder–decoder, also ``target`` (None: its own answer).

    Args:
        options: arguments of ``own_answer``.

    Raises:
        ConfigError: the text is empty, has more than ``max_len`` tokens, or contains a character or an id that the model does
            not know.
    """
    import torch

    from minitx.data.tokenizers import token_texts

    config = shape_of(model)
    if config.architecture == "vision":
        raise ConfigError("text is for models of text: an image is chosen by row=N")
    if tokenizer is None:
        return _id_inputs(model, text)
    ids = first_ids(config, tokenizer) + encode_text(tokenizer, text, "text")
    check_length(model, ids, "text")
    rows = {SOURCE: ids}
    if config.architecture == "encoder_decoder":
        answer = own_answer(model, ids, **options) if target is None else encode_text(tokenizer, target, "target")
        assert config.bos_id is not None
        rows[TARGET] = [config.bos_id, *answer]
        check_length(model, rows[TARGET], "target")
    tensors = {axis: torch.tensor([row]) for axis, row in rows.items()}
    return Inputs(tensors, {axis: [token_texts(tokenizer, row)] for axis, row in rows.items()})


def first_ids(config: TransformerConfig, tokenizer: Tokenizer) -> list[int]:
    """Return the ids before a text: the class token, if the tokenizer has one."""
    return [tokenizer.mark_ids["cls"]] if config.head == "sequence" and "cls" in tokenizer.mark_ids else []


def own_answer(model: nn.Module, ids: list[int], num_beams: int = 1, **options: Any) -> list[int]:
    """Return the answer of an encoder–decoder to ``ids``. ``options`` are those of ``generate`` and ``beam_search``."""
    import torch

    from minitx.generation import beam_search, generate

    device = next(model.parameters()).device
    try:
        tensor = torch.tensor([ids], device=device)
        if num_beams == 1:
            (answer,) = generate(model, tensor, **options)
        else:
            (answer,) = beam_search(model, tensor, num_beams=num_beams, **options)
    except (ValueError, FloatingPointError) as error:
        raise ConfigError(f"the model's own answer cannot be had: {error}; give it as target=TEXT") from error
    return answer.tolist()


def _id_inputs(model: nn.Module, text: str) -> Inputs:
    """Ids with spaces between them, each ``ID`` or ``ID:TYPE``."""
    import torch

    from minitx.data.task import key_value_texts

    config = shape_of(model)
    words = text.split()
    wrong = next((word for word in words if not re.fullmatch(r"\d+(:\d+)?", word, re.ASCII)), None)
    if wrong is not None:
        raise ConfigError(f"text has {wrong!r}, but the model has no tokenizer: give ids, or ID:TYPE, with spaces between them")
    ids, types = ([int((word + ":0").split(":")[part]) for word in words] for part in (0, 1))
    for name, numbers, size in (("ids", ids, config.vocab_size or 0), ("types", types, config.type_vocab_size or 1)):
        if numbers and max(numbers) >= size:
            raise ConfigError(f"text has {max(numbers)} among its {name}, which must lie in [0, {size})")
    check_length(model, ids, "text")
    tensors = {SOURCE: torch.tensor([ids])} | ({TYPES: torch.tensor([types])} if config.type_vocab_size else {})
    return Inputs(tensors, {SOURCE: [key_value_texts(ids, types)]})


def check_length(model: nn.Module, ids: list[int], name: str) -> None:
    """Raise a ConfigError for no tokens, or more than the model allows."""
    if not ids:
        raise ConfigError(f"{name} is empty: the model needs one token at least")
    if len(ids) > shape_of(model).max_len:
        raise ConfigError(f"{name} has {len(ids)} tokens, but the model reads {shape_of(model).max_len} at most (max_len)")


def encode_text(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    """Return the ids of ``text``, the value of the key ``name``. An unknown character is an error.

    Raises:
        ConfigError: the text is not UTF-8, or a character model does not know a character.
    """
    check_utf8(text, name)
    known: str | None = getattr(tokenizer, "characters", None)
    unknown = next((character for character in text if known is not None and character not in known), None)
    if known is not None and unknown is not None:
        code = f"{unknown!r} (U+{ord(unknown):04X})"
        raise ConfigError(f"{name} has the character {code}, which is none of the {len(known)} that the model knows")
    return tokenizer.encode(text).tolist()


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
        if len(row) != len(other):
            raise ConfigError(
                f"compare_text has {len(other)} tokens, but text has {len(row)}: two texts are compared token by token"
            )
        texts[axis] = [[a if a == b else f"{a}|{b}" for a, b in zip(row, other, strict=True)]]
    return [replace(first, texts=texts), replace(second, texts=texts)]


# --- Hugging Face folders


def open_hf(path: str, name: str) -> tuple[Any, Any]:
    """Load the model and the tokenizer of a Hugging Face folder in float32, and put our attention under the model (``adopt_hf``).

    The class of the model is the one that ``architectures`` in its ``config.json`` names. Only safetensors are read, no code of the
    folder runs, and nothing is downloaded.

    Args:
        path: a folder, or the name of a model in the cache of the Hugging Face hub. name: the key of this value.

    Raises:
        ConfigError: transformers is not installed; there is no such folder; it has no ``config.json``, no tokenizer, or not
            all weights; transformers cannot read it; or ``adopt_hf`` refuses the model.
    """
    from minitx.interop import adopt_hf
    from minitx.interop.finetune import load_folder, quiet

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
    try:
        return adopt_hf(load_folder(folder)), tokenizer
    except ValueError as error:
        raise ConfigError(f"{said} cannot be shown: {error}") from error


def _hf_folder(path: str, said: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    folder = Path(path).expanduser()
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(path, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            raise ConfigError(f"{said} is neither a folder nor a model in the cache of the Hugging Face hub") from None
    require((folder / "config.json").is_file(), f"{said} has no config.json, so it is not a Hugging Face folder")
    return folder


def hf_source(model: Any, tokenizer: Any, text: str, name: str) -> Inputs:
    """Return ``text``, the value of the key ``name``, with the special tokens that the tokenizer puts around it.

    Raises:
        ConfigError: the text is empty, has more tokens than the model has positions, or an id that the model does not have.
    """
    import torch

    check_utf8(text, name)
    found = tokenizer(text)
    ids, limit = found[SOURCE], getattr(model.config, "max_position_embeddings", None)
    _check_ids(model, ids, name)
    if limit is not None and len(ids) > limit:
        raise ConfigError(f"{name} has {len(ids)} tokens, but the model reads {limit} at most (max_position_embeddings)")
    return Inputs({key: torch.tensor([row]) for key, row in found.items()}, {SOURCE: [_hf_texts(tokenizer, ids)]})


def with_target(model: Any, tokenizer: Any, source: Inputs, target: str | None, **options: Any) -> Inputs:
    """Add what the decoder of an encoder–decoder reads: ``target``, or (None) the model's own answer.

    Args:
        options: arguments of ``model.generate``.

    Raises:
        ConfigError: the model cannot write text, or ``target`` as in ``hf_source``.
    """
    import torch

    from minitx.interop.finetune import quiet

    require(model.can_generate(), f"{type(model).__name__} is an encoder-decoder without a head, so it reads no target")
    if target is None:
        device = next(model.parameters()).device
        with quiet():
            given = {name: source.tensors[name].to(device) for name in (SOURCE, "attention_mask")}
            ids = model.generate(**given, do_sample=False, **options)[:, :-1].cpu()  # nothing reads the last token
    else:
        check_utf8(target, "target")
        labels = tokenizer(text_target=target)[SOURCE]
        _check_ids(model, labels, "target")
        ids = model.prepare_decoder_input_ids_from_labels(torch.tensor([labels]))
    return Inputs(source.tensors | {TARGET: ids}, source.texts | {TARGET: [_hf_texts(tokenizer, ids[0].tolist())]})


def _check_ids(model: Any, ids: list[int], name: str) -> None:
    size = model.get_input_embeddings().num_embeddings
    require(bool(ids), f"{name} is empty: the model needs one token at least")
    require(max(ids, default=0) < size, f"{name} has the id {max(ids, default=0)}, but the model knows {size} tokens")


def _hf_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """As ``token_texts``. A tokenizer that is not of the package tokenizers gives its pieces."""
    from minitx.data.tokenizers import Tokenizer, token_texts

    if not tokenizer.is_fast:
        return tokenizer.convert_ids_to_tokens(ids)
    return token_texts(Tokenizer(tokenizer.backend_tokenizer.to_str()), ids)
