"""``generate.py``: a checkpoint and a prompt in, text out as it is written."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from minitx.cli.errors import JobErrors, exit_code
from minitx.cli.schema import from_dict
from minitx.config import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from minitx.data.tokenizers import Tokenizer
    from minitx.generation import TextStream


def _key(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What ``generate.py`` takes; the choices of decoding are those of ``minitx.generation.generate``."""

    ckpt_path: str = _key(dataclasses.MISSING, "checkpoint of a run, such as runs/char_lm/.../checkpoints/last.ckpt")
    prompt: str | None = _key(None, "text to continue, or (encoder-decoder) to answer; without it, a prompt a line of stdin")
    max_new_tokens: int | None = _key(None, "longest answer; null: 256, or what the model's table of positions leaves room for")
    temperature: float = _key(0.0, "0 takes the likeliest token each time, above 0 draws one (1: as the model says)")
    top_k: int | None = _key(None, "draw from the k likeliest tokens only")
    top_p: float | None = _key(None, "draw from the likeliest tokens that have this probability together only, in (0, 1]")
    min_p: float | None = _key(None, "draw from tokens with this share of the likeliest one's probability only, in [0, 1]")
    repetition_penalty: float = _key(1.0, "above 1, tokens that are in the text already get less likely")
    num_beams: int = _key(1, "above 1, beam search, with temperature=0")
    length_penalty: float = _key(0.6, "of beam search: 0 favours short answers, more favours longer ones")
    seed: int = _key(0, "of the draws; the same seed writes the same text")
    stop: str | None = _key(None, "text of one token that ends an answer; null: the model's end token, if it has one")
    device: str = _key("auto", "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one")
    num_samples: int = _key(1, "answers to each prompt, with --- between them; needs temperature above 0")

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"num_samples={self.num_samples} must be positive")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed} must lie in [0, 2^63)")
        if self.num_samples > 1 and self.temperature == 0.0:
            raise ConfigError(f"num_samples={self.num_samples} needs temperature above 0: without draws all are the same")


def main() -> int:
    """The program behind ``scripts/generate.py`` and ``minitx-generate``; returns the exit code."""
    arguments = sys.argv[1:]
    os.environ["MINITX_TRACEBACK"] = "1" if "traceback=true" in arguments else "0"
    arguments = [argument for argument in arguments if not argument.startswith("traceback=")]
    if {"--help", "-h"} & set(arguments):
        return exit_code(lambda job: _write(help_text()), _generate)
    return exit_code(partial(_parse_and_run, arguments), _generate)


def _parse_and_run(arguments: Sequence[str], job: JobErrors) -> None:
    job(parse(arguments))
    for error in job.errors:
        if isinstance(error, BrokenPipeError):  # `generate.py ... | head`: the reader has seen enough
            raise error


def parse(arguments: Iterable[str]) -> GenerateConfig:
    """``key=value`` arguments as a config: text as it stands, everything else as YAML.

    Raises:
        ConfigError: no ``key=value``, an unknown key (with the nearest known one), a value of another type.
    """
    import yaml

    kinds = {field.name: str(field.type) for field in dataclasses.fields(GenerateConfig)}
    values: dict[str, Any] = {}
    for argument in arguments:
        key, is_pair, value = argument.partition("=")
        if not is_pair:
            raise ConfigError(f"{argument} is not key=value; --help shows the keys")
        if key in values:
            raise ConfigError(f"{key} is given twice")
        try:
            values[key] = value if kinds.get(key, "str").startswith("str") else yaml.safe_load(value)
        except yaml.YAMLError:
            values[key] = value
    return from_dict(GenerateConfig, values)


def help_text() -> str:
    """The keys with their defaults and meaning."""
    lines = ["python scripts/generate.py ckpt_path=FILE [prompt=TEXT] [key=value ...]", ""]
    for field in dataclasses.fields(GenerateConfig):
        default = "" if field.default is dataclasses.MISSING else "null" if field.default is None else field.default
        lines.append(f"  {f'{field.name}={default}':<24}{field.metadata['meaning']}")
    return "\n".join([*lines, "", "  traceback=true shows where an error came from", ""])


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _generate(config: GenerateConfig) -> None:
    import torch

    from minitx.training.checkpoint import load_model

    model, tokenizer, state = load_model(config.ckpt_path)
    kind = state["model"].get("architecture", "decoder")
    if kind not in ("decoder", "encoder_decoder"):
        raise ConfigError(f"ckpt_path={config.ckpt_path} holds a model with architecture={kind}, which writes no text")
    if tokenizer is None:
        raise ConfigError(f"ckpt_path={config.ckpt_path} holds no tokenizer: its model was not trained on text")
    generator = torch.Generator().manual_seed(config.seed)
    answer = partial(_answer, _placed(model, config.device), tokenizer, config, generator)
    if config.prompt is not None:
        answer(config.prompt)
        return
    for number, line in enumerate(_lines(), 1):
        try:
            answer(line)
        except ConfigError as error:
            raise ConfigError(f"line {number} of stdin: {error}") from error


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        sys.stderr.write("a prompt a line; Ctrl-D ends\n")
    if hasattr(sys.stdin, "reconfigure"):  # what is not UTF-8 is named with its line, as in an argument
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for line in sys.stdin:
        yield line.removesuffix("\n")


def _placed(model: nn.Module, device: str) -> nn.Module:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a word that is none, or a device that is not there
        raise ConfigError(f"device={device} cannot be used: {str(error).splitlines()[0]}") from error


def _answer(model: nn.Module, tokenizer: Tokenizer, config: GenerateConfig, generator: Any, prompt: str) -> None:
    """Write ``num_samples`` answers to one prompt, each token's text as soon as it is certain."""
    import torch

    from minitx.generation import TextStream, generate

    device = next(model.parameters()).device
    ids = torch.tensor([_prompt_ids(model, tokenizer, prompt)], device=device)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "num_beams", "length_penalty")
    options = {name: getattr(config, name) for name in names}
    stop = _stop_ids(model, tokenizer, config.stop)
    for sample in range(config.num_samples):
        stream = TextStream(tokenizer.decode)
        if sample:
            _write("---\n")
        try:
            generate(model, ids, **options, stop=stop, generator=generator, on_token=partial(_write_token, stream))
        except ValueError as error:
            raise ConfigError(str(error).replace("input_ids has", "prompt has")) from error
        _write(stream.flush() + "\n")


def _write_token(stream: TextStream, row: int, id: int) -> None:
    _write(stream.push(id))


def _encode(tokenizer: Tokenizer, text: str, name: str) -> list[int]:
    """The ids of ``text``, which is the key ``name``; nothing is replaced by an unknown id."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: character {error.start + 1} cannot be read") from None
    known: str | None = getattr(tokenizer, "characters", None)
    unknown = next((character for character in text if known is not None and character not in known), None)
    if known is not None and unknown is not None:
        code = f"{unknown!r} (U+{ord(unknown):04X})"
        raise ConfigError(f"{name} has the character {code}, which is none of the {len(known)} that the model knows")
    return tokenizer.encode(text).tolist()


def _prompt_ids(model: nn.Module, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of the prompt; of a language model's empty one, the mark with which texts begin."""
    bos_id: Any = getattr(model.config, "bos_id", None)
    if not prompt and (bos_id is None or hasattr(model, "encode")):
        raise ConfigError("prompt is empty: the model needs one character at least")
    return _encode(tokenizer, prompt, "prompt") or [bos_id]


def _stop_ids(model: nn.Module, tokenizer: Tokenizer, stop: str | None) -> list[int]:
    """The ids that end an answer."""
    if stop is None:
        ends = getattr(model.config, "eos_id", None), getattr(tokenizer, "end_id", None)
        return [id for id in ends if id is not None]
    ids = _encode(tokenizer, stop, "stop")
    if len(ids) != 1:
        raise ConfigError(f"stop={stop!r} must be the text of one token, but it has {len(ids)}")
    return ids
