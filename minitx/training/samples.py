"""Text that a run generates at regular steps, for its log, ``samples.jsonl`` and its loggers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from minitx.config import ConfigError
from minitx.config.schema import Config, Count, Natural, NotNegative, require, takes_fields_of
from minitx.data.datamodule import DataModule
from minitx.data.tokenizer import encode_known
from minitx.generation import Sampler, generate
from minitx.nn.modes import evaluating
from minitx.nn.transfer import to_device, to_host
from minitx.training.json_lines import add_records, drop_records
from minitx.training.module import TrainingModule, hash_seed
from minitx.training.step_callback import StepCallback

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SamplesOptions(Config):
    """The keys of ``callbacks.samples``.

    Attributes:
        every: steps between samples, besides those at the end; 0: none.
        prompts: texts to continue or answer (user messages with data=chat); empty: beginnings of validation rows.
        max_new_tokens: longest sample, in tokens.
        temperature: 0: take the most probable token; above 0: sample.
    """

    every: Natural = 0
    prompts: tuple[str, ...] = ()
    max_new_tokens: Count = 64
    temperature: NotNegative = 0.8


@takes_fields_of(SamplesOptions)
class Samples(StepCallback):
    """Generate continuations of some prompts at regular steps; an encoder–decoder generates answers.

    The texts are written to the log, to ``samples.jsonl`` in the run's folder (a JSON object with ``step``, ``prompt`` and
    ``text`` for each prompt), and to every logger with ``log_text`` (wandb), as a table. Samples do not change the run: random
    numbers come from a separate generator, seeded with (``seed``, step).

    Args:
        options: the keys of ``callbacks.samples``.
        folder: the run's folder.
        rows: the data. Its tokenizer encodes the prompts (``Task.encode_prompt``, if the task has it).
        seed: the seed of the random numbers.

    Raises:
        ConfigError: the data has no tokenizer, or it cannot encode a prompt; at the start of training: the model does not generate
            text.
    """

    needs_whole_weights = True

    def __init__(self, options: SamplesOptions, *, folder: Path, rows: DataModule, seed: int = 0) -> None:
        task = rows.task
        if task.tokenizer is None:
            raise ConfigError("callbacks.samples.every needs data with a tokenizer")
        self.path, self.tokenizer, self.options, self.seed = folder / "samples.jsonl", task.tokenizer, options, seed
        self.prompts: Sequence[str] = options.prompts or self._beginnings(rows)
        require(
            bool(self.prompts) and all(self.prompts),
            f"callbacks.samples.prompts={list(self.prompts)} must be a list of texts, none of them empty",
        )
        first = [] if task.first_id is None else [task.first_id]
        encode: Any = (options.prompts and task.encode_prompt) or (lambda text: [*first, *self.tokenizer.encode(text)])
        for prompt in self.prompts:
            encode_known(task.tokenizer, prompt, "callbacks.samples.prompts")
        self._ids = [[int(id) for id in encode(prompt)] for prompt in self.prompts]

    def _beginnings(self, rows: DataModule) -> list[str]:
        """Return the beginnings of three validation rows."""
        ids = rows.probe_batch(3)["input_ids"]
        return [self.tokenizer.decode(row[: max(1, len(row) // 4)].tolist(), skip_marks=True) for row in ids]

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        config = module.net.config
        kind = module.net.kind if config is None else config.architecture
        if config is None or kind not in ("decoder", "encoder_decoder"):
            raise ConfigError(f"callbacks.samples.every needs a decoder or encoder-decoder of minitx, got {kind}")
        if kind == "encoder_decoder" and config.position == "learned" and self.options.max_new_tokens > config.max_len:
            raise ConfigError(
                f"callbacks.samples.max_new_tokens={self.options.max_new_tokens} must be at most model.max_len={config.max_len}"
            )
        self._written = trainer.global_step
        if trainer.is_global_zero:
            drop_records(self.path, trainer.global_step)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        if step % self.options.every == 0 or step == trainer.max_steps:
            self._write(trainer, module, step)

    def _write(self, trainer: L.Trainer, module: TrainingModule, step: int) -> None:
        self._written = step
        module.raise_if_nonfinite()
        if not trainer.is_global_zero:
            return
        pairs = [*zip(self.prompts, self._write_texts(module, step), strict=True)]
        add_records(self.path, *({"step": step, "prompt": prompt, "text": text} for prompt, text in pairs))
        for prompt, text in pairs:
            log.info("step %d  %s | %s", step, prompt, text)
        for logger in trainer.loggers:
            if hasattr(logger, "log_text"):
                logger.log_text("samples", columns=["prompt", "text"], data=pairs, step=step)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        if self._written != trainer.global_step:  # the last step, even if the run was stopped before max_steps
            self._write(trainer, module, trainer.global_step)

    def _write_texts(self, module: TrainingModule, step: int) -> list[str]:
        network, config = module.network, module.net.config
        assert config is not None  # see ``on_train_start``
        context = None if config.architecture == "encoder_decoder" else config.max_len
        options: dict[str, Any] = {"max_new_tokens": self.options.max_new_tokens, "context": context}
        generator = torch.Generator().manual_seed(hash_seed(self.seed, step))
        options |= {"sampler": Sampler(temperature=self.options.temperature), "generator": generator}
        with evaluating(network):
            prompts = [to_device(torch.tensor([ids]), module.device) for ids in self._ids]
            answers = to_host([generate(network, prompt, **options)[0] for prompt in prompts])
        return [self.tokenizer.decode(answer.tolist()) for answer in answers]
