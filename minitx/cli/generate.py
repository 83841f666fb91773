"""``generate.py``: generate text from a checkpoint and a prompt, printed token by token."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from minitx.cli import importing
from minitx.cli.command_line import StoredConfig, encode_text, open_stored, refusing, run_program, write
from minitx.config import ConfigError
from minitx.config.schema import Count, require

if TYPE_CHECKING:
    from torch import Tensor, nn

    from minitx.data.tokenizer import TextStream, Tokenizer


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(StoredConfig):
    """The keys of ``generate.py``. Decoding is described in ``minitx.generation``: ``generate``, ``Sampler``, ``beam_search``.

    Attributes:
        prompt: text to continue, or to answer with an encoder-decoder; null: each line of stdin is a prompt.
        max_new_tokens: longest answer, in tokens; null: 256, or the number of positions of an encoder-decoder.
        context: longest context, in tokens; when it is full, the older half is dropped; null: the model's max_len; for a model
            of your own, data.context_len.
        temperature: 0: take the most probable token; above 0: sample (1: with the model's probabilities).
        top_k: sample only from the k most probable tokens.
        top_p: sample only from the most probable tokens whose probabilities sum to this number, in (0, 1].
        min_p: sample only from tokens with at least this share of the largest probability, in [0, 1].
        repetition_penalty: above 1: make tokens that are already in the text less probable.
        num_beams: number of beams; above 1: beam search, with temperature=0.
        length_penalty: for beam search: 0 favours short answers; larger values favour longer ones.
        seed: seed of the random draws; the same seed gives the same text.
        stop: text of one token that ends an answer; null: the model's end token, if it has one.
        num_samples: number of answers to each prompt, separated by ---; needs temperature above 0.
        template: treat prompts as user messages in the chat template of the checkpoint, if it has one.
    """

    prompt: str | None = None
    max_new_tokens: int | None = None
    context: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    num_beams: int = 1
    length_penalty: float = 0.6
    seed: int = 0
    stop: str | None = None
    num_samples: Count = 1
    template: bool = True

    def check(self) -> None:
        require(0 <= self.seed < 2**63, f"seed={self.seed} must lie in [0, 2^63)")
        require(
            self.num_beams == 1 or self.temperature == 0.0,
            f"num_beams={self.num_beams} needs temperature=0, got temperature={self.temperature}: beam search does not sample",
        )
        require(
            self.num_beams != 1 or self.length_penalty == GenerateConfig.length_penalty,
            f"length_penalty={self.length_penalty} has no effect without beam search: set num_beams above 1",
        )
        require(
            self.num_samples == 1 or self.temperature != 0.0,
            f"num_samples={self.num_samples} needs temperature above 0: without sampling, all answers are equal",
        )


def main() -> int:
    """The program behind ``scripts/generate.py`` and ``minitx-generate``; returns the exit code."""
    usage = "python scripts/generate.py ckpt_path=FILE [prompt=TEXT] [key=value ...]"
    return run_program(GenerateConfig, usage, _generate)


def _generate(config: GenerateConfig) -> None:
    with importing():
        import torch

        from minitx.training.checkpoints import move_to_device

    stored = open_stored(config.checkpoint, trust=config.trust)
    tokenizer, shape, kind = stored.tokenizer, stored.net.config, stored.net.shape.architecture
    require(
        kind in ("decoder", "encoder_decoder"),
        f"ckpt_path={config.ckpt_path} contains a model that does not generate text: architecture={kind}",
    )
    if tokenizer is None:
        raise ConfigError(
            f"ckpt_path={config.ckpt_path} contains no tokenizer, so it cannot read a prompt: "
            "train with data=text, or with Task(tokenizer=...)"
        )
    model = move_to_device(stored.net.writer(tokenizer.vocab_size, stored.path), config.device)
    first_id = stored.state.get("first_id")
    bos_id = shape.bos_id if shape is not None and kind == "decoder" else None  # for an empty prompt
    context = stored.net.context_of(stored.nodes["data"]) if config.context is None else config.context
    # a user's model reads the whole text for each token
    options = {**_options(config, model, tokenizer), "context": context, "use_cache": shape is not None}
    generator = torch.Generator().manual_seed(config.seed)
    refusing_template = partial(refusing, "template=true (template=false ignores the template): ")
    chat = None
    if config.template and kind == "decoder" and tokenizer.chat_template is not None:
        from minitx.interop.conversations import ChatFormat

        with refusing_template():
            chat = ChatFormat(tokenizer.chat_template, tokenizer, "the chat template of the checkpoint")
        sys.stderr.write("prompts are user messages in the chat template of the checkpoint; template=false ignores it\n")

    def answer(prompt: str) -> None:
        require(
            bool(prompt) or first_id is not None or bos_id is not None,
            "prompt is empty: the model needs at least one character",
        )
        ids: list[Any] = encode_text(tokenizer, prompt, "prompt")
        ids = [first_id, *ids] if first_id is not None else ids or [bos_id]
        stop = options["stop"]
        if chat is not None:
            with refusing_template():
                prompt_ids, ends = chat.prompt(prompt)
            ids, stop = prompt_ids.tolist(), [*stop, *ends] if config.stop is None else stop
        input_ids = torch.tensor([ids], device=next(model.parameters()).device)
        _write_answers(model, input_ids, tokenizer, config, generator, {**options, "stop": stop})

    if config.prompt is not None:
        answer(config.prompt)
        return
    for number, line in enumerate(_lines(), 1):
        with refusing(f"line {number} of stdin: "):
            answer(line)


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        sys.stderr.write("one prompt per line; Ctrl-D ends\n")
    if hasattr(sys.stdin, "reconfigure"):  # report a line that is not UTF-8 in the same way as an argument
        # newline=None: \r\n ends a line, too
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="surrogateescape", newline=None)
    for line in sys.stdin:
        yield line.removesuffix("\n")


def _options(config: GenerateConfig, model: nn.Module, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the limits that ``generate`` and ``beam_search`` share."""
    from minitx.data.text_files import encoder_of_lines
    from minitx.generation.reader import eos_ids

    stop = [id for id in (*eos_ids(model), tokenizer.mark_ids.get("eos")) if id is not None]
    if config.stop is not None:
        encode_text(tokenizer, config.stop, "stop")  # refuses unknown characters
        # as within a text, because tokenizers may add a space at the beginning
        (ids,) = encoder_of_lines(tokenizer)([config.stop])
        stop = ids.tolist()
        require(len(stop) == 1, f"stop={config.stop!r} must be the text of one token, but it has {len(stop)}")
    return {"max_new_tokens": config.max_new_tokens, "stop": stop}


def _write_answers(
    model: nn.Module, ids: Tensor, tokenizer: Tokenizer, config: GenerateConfig, generator: Any, options: dict[str, Any]
) -> None:
    """Write ``num_samples`` answers to a prompt, printing text as soon as later tokens cannot change it."""
    from minitx.data.tokenizer import TextStream
    from minitx.generation import Sampler, beam_search, generate

    beams: dict[str, Any] = {name: getattr(config, name) for name in ("num_beams", "length_penalty", "repetition_penalty")}
    for sample in range(config.num_samples):
        stream = TextStream(tokenizer.decode)
        if sample:
            write("---\n")
        try:
            if config.num_beams != 1:
                (answer,) = beam_search(model, ids, **beams, **options)
                write("".join(map(stream.push, answer.tolist())))
            else:
                sampler = Sampler(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Sampler)})
                generate(model, ids, sampler=sampler, generator=generator, on_token=partial(_write_token, stream), **options)
        except ValueError as error:
            raise ConfigError(str(error).replace("input_ids has", "prompt has")) from error
        write(stream.flush() + "\n")


def _write_token(stream: TextStream, row: int, id: int) -> None:
    write(stream.push(id))
