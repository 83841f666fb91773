"""The Lightning data module of every data set: addressed loaders, and what a model must know about the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule

from minitx.config import (
    ClassifyDataConfig,
    ConfigError,
    CorpusConfig,
    DataConfig,
    DatesDataConfig,
    HubDataConfig,
    ImageDataConfig,
    MaskedDataConfig,
    PairsDataConfig,
    RecallDataConfig,
    TextDataConfig,
)
from minitx.data.addressing import AddressedLoader, AddressSampler, Batch, BatchSource, EpochSource, FiniteSource
from minitx.data.classify import load_classes
from minitx.data.corpus import check_file, data_dir
from minitx.data.documents import load_documents
from minitx.data.examples import ExampleSource, ExampleValidation, Task, TaskName
from minitx.data.images import load_images
from minitx.data.masked import load_masked
from minitx.data.seq2seq import load_pairs
from minitx.data.synthetic import RecallSource, RecallValidation, key_value_texts
from minitx.data.text import TextSource, TextValidation, load_text
from minitx.data.tokenizers import Tokenizer, token_texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What a data module needs beside the config of its data.

    Attributes:
        seed: of the order (text) or the examples (synthetic tasks) of training.
        max_steps: optimizer steps of the run.
        accumulate: micro-batches a step.
        data_dir: where texts and tokens are kept; ``None`` is ``corpus.data_dir()``.
        val_batch_size: rows of a validation batch over all ranks, rounded up to a multiple of their number; ``None``
            is the training batch size.
        tokenizer: read text with this tokenizer (a checkpoint's) instead of learning one.
    """

    seed: int
    max_steps: int
    accumulate: int = 1
    data_dir: str | Path | None = None
    val_batch_size: int | None = None
    tokenizer: Tokenizer | None = None


class DataModule(LightningDataModule):
    """Addressed loaders over one data set; works inside a Lightning trainer and without one.

    What it holds comes from a function in the table ``LOADERS``. After ``setup``: ``task``; ``recall`` (every answer stands in
    its row, so that a run is SOLVED or FAILED); ``vocab_size`` (V of the model, 0 for images), ``type_vocab_size`` (0 where no
    ``token_type_ids`` are used), ``tokenizer`` or ``None``, ``label_names`` (of a classification), ``floors`` (cross-entropies
    in nats that a model must beat: ``unigram`` and ``bigram``, or nothing) and ``bits_per`` (factors from nats per token to
    bits per ``byte`` and ``character``, or nothing).

    Raises:
        ConfigError: at construction where ``data.path`` names no readable text; in ``prepare_data`` where the data cannot be
            read or are too few.
    """

    task: TaskName = "language_model"
    recall: bool = False
    vocab_size: int
    type_vocab_size: int = 0
    label_names: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None
    floors: dict[str, float]
    bits_per: dict[str, float]

    def __init__(self, config: Any, options: DataOptions) -> None:
        super().__init__()
        self.config, self.options = config, options
        self.floors, self.bits_per = {}, {}
        self._examples: Task | None = None
        if isinstance(config, CorpusConfig) and config.path is not None:
            check_file(config.path)

    @property
    def examples(self) -> Task:
        """The data; there after ``setup``."""
        if self._examples is None:
            raise RuntimeError("call setup() before the data is used")
        return self._examples

    def prepare_data(self) -> None:
        """Read the data and make its cache where it has one. Lightning calls this on one process of a node."""
        if self._examples is None:  # a trainer asks again for what is there
            load = LOADERS[type(self.config)]
            self._examples = load(self.config, Path(self.options.data_dir or data_dir()), self.options.tokenizer)

    def setup(self, stage: str | None = None) -> None:
        """Read the data where ``prepare_data`` did not run."""
        self.prepare_data()
        found = self.examples
        self.task, self.tokenizer, self.label_names = found.kind, found.tokenizer, found.label_names
        self.floors, self.bits_per = found.floors, found.bits_per
        self.vocab_size = found.model_fields.get("vocab_size", 0)

    def train_source(self, world: int = 1) -> BatchSource:
        """The training batches for ``world`` ranks."""
        return ExampleSource(self.examples.train, bucket=getattr(self.config, "bucket", False), **self._slices(world))

    def val_source(self, world: int = 1) -> FiniteSource:
        """The validation batches for ``world`` ranks."""
        return ExampleValidation(self.examples.val, batch_size=self.val_batch_size(world), world=world)

    def model_fields(self) -> dict[str, Any]:
        """What the model's config must say to fit the data: ``vocab_size``, and with the task ``type_vocab_size``;
        ``pad_id``, ``bos_id``, ``eos_id``, ``max_source_len`` and ``max_target_len`` (longest rows, marks included);
        ``num_labels``; ``image_size`` and ``num_channels``."""
        return dict(self.examples.model_fields)

    def baselines(self) -> dict[str, float]:
        """What a model must beat on the validation split, computed when asked for."""
        return self.examples.baselines()

    def val_examples(self) -> list[tuple[str, str]]:
        """(source text, reference text or name of the label) of every validation row in order, where the task has both."""
        return list(self.examples.val_examples)

    @property
    def chance(self) -> float:
        """The accuracy of guessing, where there are a few answers to guess among; else 0."""
        return 1.0 / len(self.label_names) if self.label_names else 0.0

    def train_dataloader(self) -> AddressedLoader:
        """This rank's training batches from the trainer's current optimizer step on (0 without a trainer)."""
        options, trainer = self.options, self.trainer
        start = min(trainer.global_step, options.max_steps) if trainer else 0
        sampler = AddressSampler(options.max_steps, start_step=start, accumulate=options.accumulate, rank=self._place()[0])
        return self._loader(self.train_source(self._place()[1]), sampler)

    def val_dataloader(self) -> AddressedLoader:
        """This rank's validation batches: every row once over all ranks, as many batches on each rank."""
        rank, world = self._place()
        source = self.val_source(world)
        return self._loader(source, AddressSampler(len(source), rank=rank, split="val"))

    def probe_batch(self, num_rows: int) -> Batch:
        """The first ``num_rows`` rows of validation (all of them where there are fewer)."""
        source = self.val_source()
        return source.rows(range(min(num_rows, source.num_rows)))

    def texts(self, inputs: Batch) -> dict[str, list[list[str]]]:
        """What stands at each position of a batch's ids, for people; {} where there is no tokenizer."""
        if self.tokenizer is None:
            return {}
        ids = {axis: inputs[axis] for axis in ("input_ids", "decoder_input_ids") if axis in inputs}
        return {axis: [token_texts(self.tokenizer, row) for row in rows.tolist()] for axis, rows in ids.items()}

    def val_batch_size(self, world: int) -> int:
        """Rows of a validation batch over all ranks: as asked for, rounded up to a multiple of ``world``."""
        return world * math.ceil((self.options.val_batch_size or self.config.batch_size) / world)

    def check_batch(self) -> None:
        """Refuse to train on batches that would hold a row twice; evaluation reads the same data without asking.

        Raises:
            ConfigError: fewer training rows than ``data.batch_size``.
        """
        source, wanted = self.train_source(), self.config.batch_size
        if isinstance(source, EpochSource) and source.epoch_len < wanted:
            path = getattr(self.config, "path", None)
            said = f"data.path={path}" if path else f"data={self.config.name}"
            raise ConfigError(f"{said} has {source.epoch_len} training rows, fewer than a batch has: data.batch_size={wanted}")

    def _slices(self, world: int) -> dict[str, int]:
        """How the training batches of ``world`` ranks are drawn and cut."""
        seed, accumulate = self.options.seed, self.options.accumulate
        return {"batch_size": self.config.batch_size, "seed": seed, "accumulate": accumulate, "world": world}

    def _place(self) -> tuple[int, int]:
        """Among the processes that see different rows: this one, and how many there are."""
        place = self.trainer.distributed_sampler_kwargs if self.trainer else None
        return (place["rank"], place["num_replicas"]) if place else (0, 1)

    def _loader(self, source: BatchSource, sampler: AddressSampler) -> AddressedLoader:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return AddressedLoader(source, sampler, num_workers=self.config.num_workers, pin_memory=on_gpu)


class TextDataModule(DataModule):
    """Language modelling on the King James text or the user's file."""

    def train_source(self, world: int = 1) -> TextSource:
        return TextSource(self.examples.train, context_len=self.config.context_len, **self._slices(world))

    def val_source(self, world: int = 1) -> TextValidation:
        size = self.val_batch_size(world)
        return TextValidation(self.examples.val, context_len=self.config.context_len, batch_size=size, world=world)


class RecallDataModule(DataModule):
    """The recall tasks: kv-lookup (T1), multi-query recall (T2), induction (T3), which are drawn and not read."""

    recall = True

    def __init__(self, config: RecallDataConfig, options: DataOptions) -> None:
        super().__init__(config, options)
        self.vocab_size, self.type_vocab_size = config.vocab_size, config.type_vocab_size

    def prepare_data(self) -> None:
        """Nothing to read."""

    def setup(self, stage: str | None = None) -> None:
        """Nothing to open."""

    def train_source(self, world: int = 1) -> RecallSource:
        return RecallSource(self.config, seed=self.options.seed, accumulate=self.options.accumulate, world=world)

    def val_source(self, world: int = 1) -> RecallValidation:
        return RecallValidation(self.config, batch_size=self.val_batch_size(world), world=world)

    def model_fields(self) -> dict[str, Any]:
        types = {"type_vocab_size": self.type_vocab_size} if self.type_vocab_size else {}
        return {"vocab_size": self.vocab_size, **types}

    def baselines(self) -> dict[str, float]:
        return {"chance_accuracy": self.chance}

    def val_examples(self) -> list[tuple[str, str]]:
        return []

    @property
    def chance(self) -> float:
        return float(self.config.chance)

    def texts(self, inputs: Batch) -> dict[str, list[list[str]]]:
        """See ``key_value_texts``; where positions have no value, the ids."""
        ids = inputs["input_ids"]
        types = inputs.get("token_type_ids", ids.new_zeros(ids.shape))
        rows = zip(ids.tolist(), types.tolist(), strict=True)
        return {"input_ids": [key_value_texts(*row) for row in rows]}


LOADERS: dict[type, Callable[[Any, Path, Tokenizer | None], Task]] = {
    TextDataConfig: load_text,
    MaskedDataConfig: load_masked,
    DatesDataConfig: load_pairs,
    PairsDataConfig: load_pairs,
    ClassifyDataConfig: load_classes,
    ImageDataConfig: load_images,
    HubDataConfig: load_documents,
}
"""From a config to its data: (config, folder of caches, tokenizer to use instead of learning one)."""


def build_data(
    config: DataConfig,
    *,
    seed: int,
    max_steps: int,
    accumulate: int = 1,
    data_dir: str | Path | None = None,
    val_batch_size: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> DataModule:
    """The data module that ``config`` names; the keywords are those of ``DataOptions``.

    Raises:
        ConfigError: ``data.path`` names no readable file.
    """
    options = DataOptions(
        seed=seed,
        max_steps=max_steps,
        accumulate=accumulate,
        data_dir=data_dir,
        val_batch_size=val_batch_size,
        tokenizer=tokenizer,
    )
    if isinstance(config, RecallDataConfig):
        return RecallDataModule(config, options)
    kind = TextDataModule if isinstance(config, TextDataConfig) else DataModule
    return kind(config, options)
