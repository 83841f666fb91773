"""The models that ``view_attention.py`` shows: of checkpoints, and of Hugging Face folders. Each reads text in its own way."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minitx.analysis.answers import next_tokens
from minitx.analysis.recorder import chosen_modules
from minitx.analysis.snapshot import SOURCE, TARGET
from minitx.cli.command_line import encode_text, open_stored, refusing
from minitx.cli.inputs import RowInputs, row_inputs
from minitx.config import ConfigError, TransformerConfig
from minitx.config.packages import package
from minitx.config.schema import first_line, require, stated
from minitx.data.token_labels import key_value_texts, namer, token_texts
from minitx.data.tokenizer import Tokenizer, fingerprint
from minitx.generation import beam_search, generate
from minitx.interop import adopt_hf
from minitx.interop.files import find_folder
from minitx.interop.finetune import load_folder, quiet
from minitx.nn.attention import attention_cores
from minitx.training.checkpoints import move_to_device
from minitx.training.net import Net, OfTransformers

TYPES = "token_type_ids"


class CheckpointModel:
    """The model of the checkpoint ``path``, which the key ``key`` names. It reads text as in training.

    Raises:
        ConfigError: the checkpoint cannot be read, or its model has no attention that can be shown.
    """

    def __init__(self, key: str, path: str, device: str, trust: bool) -> None:
        self.key, self.path, self.stored = key, path, open_stored(path, trust=trust)
        self.tokenizer, network = self.stored.tokenizer, self.stored.network
        with refusing(f"ckpt_path={path} cannot be shown: "):
            if isinstance(self.stored.net, OfTransformers) and not attention_cores(network):
                adopt_hf(network)
            chosen_modules(network, "weights", None)
        self.model = move_to_device(network, device)
        self.shape = Net.of(network).shape
        self.kind: str = self.shape.architecture
        self.is_pair = self.kind == "encoder_decoder"

    def check_reads_alike(self, other: CheckpointModel, text: str) -> None:
        """Raise a ConfigError unless ``other`` can read the same inputs."""
        other_path = f"{other.key}={other.path}"
        for name in ("architecture", "vocab_size", "type_vocab_size", "image_size", "num_channels", "patch_size"):
            expected, actual = (getattr(viewed.shape, name) for viewed in (self, other))
            require(
                expected == actual,
                f"{other_path} has model.{name}={actual}, but {self.path} has {expected}: they cannot read the same inputs",
            )
        expected, actual = (viewed.tokenizer and fingerprint(viewed.tokenizer) for viewed in (self, other))
        require(expected == actual, f"{other_path} reads text with another tokenizer than {self.path}: their tokens differ")

    def row_inputs(self, row: int) -> RowInputs:
        """Return the inputs of row ``row`` of the validation split."""
        return row_inputs(self.stored.task(), row)

    def text_inputs(self, text: str, name: str, target: str | None, **options: Any) -> RowInputs:
        """Return the inputs for ``text``, the value of the key ``name``.

        Args:
            target: the target text of an encoder–decoder; None: the model's own answer.
            options: ``num_beams`` and ``max_new_tokens`` of the model's own answer.

        Raises:
            ConfigError: the text is empty, has more than ``max_len`` tokens, or contains an unknown character or id.
        """
        shape, tokenizer = self.shape, self.tokenizer
        require(self.kind != "vision", "text is for text models: to choose an image, set row=N")
        if tokenizer is None:
            return _id_inputs(shape, text)
        marks, first_id = tokenizer.mark_ids, self.stored.state.get("first_id")
        before = [] if first_id is None else [first_id]
        before += [marks["cls"]] if shape.head == "sequence" and "cls" in marks else []  # the class token
        rows = {SOURCE: before + encode_text(tokenizer, text, name)}
        _check_ids(rows[SOURCE], name, shape.max_len)
        if self.is_pair:
            answer = self._own_answer(rows[SOURCE], **options) if target is None else encode_text(tokenizer, target, "target")
            assert shape.bos_id is not None
            rows[TARGET] = [shape.bos_id, *answer]
            _check_ids(rows[TARGET], "target", shape.max_len)
        tensors = {axis: torch.tensor([row]) for axis, row in rows.items()}
        num_logits = tokenizer.vocab_size if self.is_pair or self.kind == "decoder" else None
        return _inputs(tensors, partial(token_texts, tokenizer), tokenizer.vocab_size, num_logits)

    def _own_answer(self, ids: list[int], num_beams: int, **options: Any) -> list[int]:
        write: Any = generate if num_beams == 1 else partial(beam_search, num_beams=num_beams)
        with refusing("target is missing, and the model's own answer cannot be generated: ", (ValueError, FloatingPointError)):
            (answer,) = write(self.model, torch.tensor([ids], device=next(self.model.parameters()).device), **options)
        tokens: list[int] = answer.tolist()
        return tokens


class FolderModel:
    """The adopted model of a Hugging Face folder. It reads text with the special tokens of the folder's tokenizer.

    ``architectures`` in ``config.json`` names the class of the model. Only safetensors are read, code in the folder is not run,
    and nothing is downloaded.

    Args:
        key: the key that names it, for messages.
        path: a folder, or the name of a model in the local cache of the Hugging Face hub.

    Raises:
        ConfigError: transformers is not installed; the folder does not exist; ``config.json``, the tokenizer or some weights
            are missing; transformers cannot read it; or ``adopt_hf`` refuses the model.
    """

    model: Any

    def __init__(self, key: str, path: str, device: str) -> None:
        self.key, self.path, key_and_path = key, path, f"{key}={path}"
        transformers = package("transformers", key_and_path)
        with refusing(f"{key}=", (FileNotFoundError,)):
            folder = find_folder(path, download=False)
        require((folder / "config.json").is_file(), f"{key_and_path} has no config.json, so it is not a Hugging Face folder")
        with quiet():
            try:
                read: Any = transformers.AutoTokenizer.from_pretrained
                self.tokenizer = read(folder, local_files_only=True, trust_remote_code=False)
            except Exception as error:  # transformers and tokenizers raise many types of error
                raise ConfigError(f"{key_and_path} has no tokenizer that transformers can read: {first_line(error)}") from error
        # without these files, transformers returns an empty tokenizer
        files = sorted({"tokenizer.json", *self.tokenizer.vocab_files_names.values()})
        require(
            any((folder / file).is_file() for file in files), f"{key_and_path} has no tokenizer: none of {', '.join(files)}"
        )
        with refusing(f"{key_and_path} cannot be shown: "):
            adopted = adopt_hf(load_folder(folder))
        self.model = move_to_device(adopted, device)
        self.kind, self.is_pair = type(self.model).__name__, self.model.config.is_encoder_decoder

    def check_reads_alike(self, other: FolderModel, text: str) -> None:
        """Raise a ConfigError unless ``other`` reads ``text`` as the same ids."""
        expected, actual = (viewed._encoding(text, "text")[SOURCE] for viewed in (self, other))
        require(
            expected == actual,
            f"{other.key}={other.path} reads text with another tokenizer than {self.key}={self.path}: their tokens differ",
        )

    def text_inputs(self, text: str, name: str, target: str | None, **options: Any) -> RowInputs:
        """Return the inputs for ``text``, the value of the key ``name``.

        Args:
            target: the target text of an encoder–decoder; None: the model's own answer.
            options: options of ``model.generate``.

        Raises:
            ConfigError: the text is empty, has more tokens than the model has positions, or contains an id outside of the
                model's vocabulary; or the encoder–decoder has no head.
        """
        model, tokenizer = self.model, self.tokenizer
        tensors = {key: torch.tensor([row]) for key, row in self._encoding(text, name).items()}
        if self.is_pair:
            require(model.can_generate(), f"{self.kind} is an encoder-decoder without a head: it cannot read a target")
            if target is None:
                model_inputs = {key: tensors[key].to(model.device) for key in (SOURCE, "attention_mask")}
                with quiet():
                    answer = model.generate(**model_inputs, do_sample=False, **options)
                tensors[TARGET] = answer[:, :-1].cpu()  # the last token is not read
            else:
                labels = torch.tensor([self._encoding(target, "target", is_target=True)[SOURCE]])
                tensors[TARGET] = model.prepare_decoder_input_ids_from_labels(labels)
        num_logits = model.config.get_text_config().vocab_size if model.can_generate() else None
        texts = tokenizer.convert_ids_to_tokens  # pieces, of a tokenizer that is not from the package tokenizers
        if tokenizer.is_fast:
            texts = partial(token_texts, Tokenizer(tokenizer.backend_tokenizer.to_str()))
        return _inputs(tensors, texts, len(tokenizer), num_logits)

    def _encoding(self, text: str, name: str, *, is_target: bool = False) -> Any:
        encoding = self.tokenizer(text_target=text) if is_target else self.tokenizer(text)
        ids, size = encoding[SOURCE], self.model.get_input_embeddings().num_embeddings
        _check_ids(ids, name, stated(self.model.config, "max_position_embeddings", int) or len(ids))
        require(max(ids) < size, f"{name} has the id {max(ids)}, but the vocabulary of the model has {size} tokens")
        return encoding


def _inputs(
    tensors: dict[str, Tensor], texts: Callable[[Sequence[int]], list[str]], num_texts: int, num_logits: int | None
) -> RowInputs:
    """Return inputs with texts for the ids below ``num_texts``, and the questions for a model that writes text (``num_logits``)."""
    rows = {axis: tensors[axis][0].tolist() for axis in (SOURCE, TARGET) if axis in tensors}
    *_, last = rows
    asked = None if num_logits is None else next_tokens(last, [rows[last]], namer(texts, num_texts), num_logits)
    return RowInputs(tensors, {axis: [texts(row)] for axis, row in rows.items()}, asked)


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
