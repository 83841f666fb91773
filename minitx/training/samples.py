"""Text that the model writes during training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn

from minitx.config import ConfigError, SamplesConfig
from minitx.data.tokenizers import Tokenizer
from minitx.generation import Sampler, generate
from minitx.nn.modes import evaluating
from minitx.training.metrics import add_records, drop_records
from minitx.training.module import TrainingModule, hash_seed
from minitx.training.parallel import Sharded
from minitx.training.steps import StepCallback

log = logging.getLogger(__name__)


class Samples(StepCallback):
    """Let the model continue some prompts at regular steps. An encoder–decoder answers them.

    The texts go to the log, to ``samples.jsonl`` in the run's folder (one JSON object for each prompt: ``step``, ``prompt``,
    ``text``), and to every logger with ``log_text`` (wandb), as a table. The run itself does not change: random numbers come
    from a separate generator, seeded by (``seed``, step).

    Args:
        folder: the run's folder.
        tokenizer: the tokenizer of the data, or None.
        options: how often (there are also samples at the last step), the prompts, and how they are continued.
        seed: the seed of the random numbers.

    Raises:
        ConfigError: at the start of training, if the model writes no text or is sharded over devices, or if there are no
            prompts, no tokenizer, or a prompt that it cannot encode.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer | None, options: SamplesConfig, seed: int = 0) -> None:
        self.path, self.tokenizer, self.options, self.seed = folder / "samples.jsonl", tokenizer, options, seed
        self._ids: list[list[int]] = []

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self._check(trainer, module.network)
        if trainer.is_global_zero:
            drop_records(self.path, trainer.global_step)

    def on_step(self, trainer: L.Trainer, module: TrainingModule, step: int, batch: Any) -> None:
        if not trainer.is_global_zero or (step % self.options.every and step != trainer.max_steps):
            return
        texts = self._write_texts(module, step)
        pairs = [*zip(self.options.prompts, texts, strict=True)]
        add_records(self.path, *({"step": step, "prompt": prompt, "text": text} for prompt, text in pairs))
        for prompt, text in pairs:
            log.info("step %d  %s | %s", step, prompt, text)
        for logger in trainer.loggers:
            if hasattr(logger, "log_text"):
                logger.log_text("samples", columns=["prompt", "text"], data=pairs, step=step)

    def _check(self, trainer: L.Trainer, network: nn.Module) -> None:
        config: Any = getattr(network, "config", None)
        kind = getattr(config, "architecture", type(network).__name__)
        if kind not in ("decoder", "encoder_decoder") or self.tokenizer is None:
            raise ConfigError(f"callbacks.samples needs text and a decoder or encoder-decoder of ours, got {kind}")
        if isinstance(trainer.strategy, Sharded):
            raise ConfigError("callbacks.samples needs whole weights on one device, got trainer.strategy=sharded")
        if not self.options.prompts or not all(self.options.prompts):
            raise ConfigError(
                f"callbacks.samples.prompts={list(self.options.prompts)} must be texts to continue, none of them empty"
            )
        if kind == "encoder_decoder" and config.position == "learned" and self.options.max_new_tokens > config.max_len:
            raise ConfigError(
                f"callbacks.samples.max_new_tokens={self.options.max_new_tokens} must be at most model.max_len={config.max_len}"
            )
        try:
            self._ids = [[int(id) for id in self.tokenizer.encode(prompt)] for prompt in self.options.prompts]
        except ValueError as error:
            raise ConfigError(f"callbacks.samples.prompts cannot be read by the tokenizer: {error}") from error

    def _write_texts(self, module: TrainingModule, step: int) -> list[str]:
        network: Any = module.network
        assert self.tokenizer is not None
        context = None if hasattr(network, "encode") else network.config.max_len
        options: dict[str, Any] = {"max_new_tokens": self.options.max_new_tokens, "context": context}
        options["sampler"] = Sampler(temperature=self.options.temperature)
        generator = torch.Generator().manual_seed(hash_seed(self.seed, step))
        with evaluating(network):
            answers = [
                generate(network, torch.tensor([ids], device=module.device), **options, generator=generator)[0]
                for ids in self._ids
            ]
        return [self.tokenizer.decode(answer.tolist()) for answer in answers]
