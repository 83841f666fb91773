"""One training run from its config: build, fit, validate, summarise. What the command line and the lab both call."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from minitx.config import ConfigError, RunConfig, TrainerConfig, TransformerConfig, to_dict
from minitx.data.module import DataModule, build_data
from minitx.nn.models import build_model
from minitx.training.callbacks import BarProgress, StepLog, StoppedError, StopSignals, checkpoints, progress
from minitx.training.metrics import MetricsFile
from minitx.training.module import NonFiniteError, TrainingModule
from minitx.training.objectives import build_objective
from minitx.training.optimizers import build_optimizer
from minitx.training.outcome import summarise
from minitx.training.probes import Probe
from minitx.training.schedules import lr_factor

log = logging.getLogger(__name__)


def train(
    config: RunConfig,
    folder: Path,
    *,
    files: Mapping[str, str] | None = None,
    loggers: Sequence[Any] = (),
    callbacks: Sequence[L.Callback] = (),
) -> dict[str, Any]:
    """Train as ``config`` says, in ``folder``, and return the result as plain data (see ``outcome.summarise``).

    Args:
        folder: gets ``metrics.csv``, ``probes.jsonl`` where probes are on, and ``checkpoints/``; made only once data,
            model and checkpoint are known to be good.
        files: further text files for the folder, by name (``config.yaml``, ``command.txt``).
        loggers, callbacks: in addition to the run's own.

    Raises:
        ConfigError: what only the data or the machine can tell (vocabulary, missing device, a checkpoint of another model).
        NonFiniteError: with ``on_nonfinite=stop``. StoppedError: on SIGINT or SIGTERM, after the checkpoint was written.
    """
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    check_devices(config.trainer)
    with quiet_lightning():
        data = prepare_data(config)
        model_config = fit_model_config(config.model, data)
        module = build_module(config, model_config, data)
        resume = load_checkpoint(Path(config.ckpt_path), model_config) if config.ckpt_path else {}
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (files or {}).items():
            (folder / name).write_text(text, encoding="utf-8")
        own = own_callbacks(config, data, folder)
        trainer = build_trainer(config, folder, resume.get("global_step", 0), loggers, [*own, *callbacks])
        nonfinite_step = None
        try:
            with own[0]:
                trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path, weights_only=True)
            finish(trainer, module, data, config, folder)
        except NonFiniteError as error:
            if config.on_nonfinite == "stop":
                raise
            nonfinite_step = error.step + 1
    return summarise(
        folder,
        floors=data.floors,
        recall=config.data.name == "kv_lookup",
        nonfinite_step=nonfinite_step,
        num_parameters=sum(p.numel() for p in module.network.parameters()),
    )


def prepare_data(config: RunConfig) -> DataModule:
    """The data module, opened."""
    data = build_data(
        config.data,
        seed=config.seed,
        max_steps=config.trainer.max_steps,
        accumulate=config.trainer.accumulate,
        val_batch_size=config.trainer.val_batch_size,
    )
    data.prepare_data()
    data.setup()
    return data


def fit_model_config(model: TransformerConfig, data: DataModule) -> TransformerConfig:
    """The model's config with the vocabulary that the data has.

    Raises:
        ConfigError: a ``vocab_size`` that is smaller than the data's.
    """
    if model.vocab_size is not None and model.vocab_size < data.vocab_size:
        raise ConfigError(f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of the data, {data.vocab_size}")
    return dataclasses.replace(
        model, vocab_size=model.vocab_size or data.vocab_size, type_vocab_size=model.type_vocab_size or data.type_vocab_size
    )


def build_module(config: RunConfig, model_config: TransformerConfig, data: DataModule) -> TrainingModule:
    """Network, objective and optimizer factory in a TrainingModule; initial weights depend on the seed alone."""
    torch.manual_seed(config.seed)
    network = build_model(model_config)
    state = {
        "config": to_dict(config),
        "model": to_dict(model_config),
        "tokenizer": data.tokenizer.to_dict() if data.tokenizer else None,
    }
    return TrainingModule(
        network,
        build_objective(config.objective),
        partial(build_optimizer, config=config.optimizer, head_dim=model_config.width_per_head),
        lr_factor(config.schedule, config.trainer.max_steps),
        clip=config.optimizer.clip,
        compile=config.trainer.compile,
        seed=config.seed,
        state=state,
    )


def own_callbacks(config: RunConfig, data: DataModule, folder: Path) -> list[Any]:
    """The run's own callbacks; the first is the signal guard."""
    keeps = config.trainer.ckpt_every > 0
    own: list[Any] = [StopSignals(folder / "checkpoints" / "last.ckpt" if keeps else None), StepLog(config.trainer.log_every)]
    if config.callbacks.probe.every:
        own.append(
            Probe(folder / "probes.jsonl", data.probe_batch(config.callbacks.probe.batch_size), config.callbacks.probe.every)
        )
    if config.callbacks.progress:
        own.append(progress())
    return own + checkpoints(config.trainer, folder / "checkpoints")


def build_trainer(
    config: RunConfig, folder: Path, start_step: int, loggers: Sequence[Any], callbacks: Sequence[L.Callback]
) -> L.Trainer:
    """A Lightning trainer whose every count is in optimizer steps."""
    options = config.trainer
    steps = min(options.val_every or options.max_steps, options.max_steps)
    return L.Trainer(
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=options.strategy,
        precision=supported_precision(options.precision, options.accelerator),  # type: ignore[arg-type]
        max_steps=options.max_steps,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=steps * options.accumulate,
        check_val_every_n_epoch=None,
        limit_val_batches=options.val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        deterministic=options.deterministic,
        use_distributed_sampler=False,
        logger=[MetricsFile(folder / "metrics.csv", start_step), *loggers],
        callbacks=list(callbacks),
        enable_progress_bar=any(isinstance(callback, BarProgress) for callback in callbacks),
        enable_model_summary=False,
        enable_checkpointing=options.ckpt_every > 0,
        default_root_dir=folder,
    )


def check_devices(options: TrainerConfig) -> None:
    """Refuse what this machine lacks.

    Raises:
        ConfigError: no GPU, or fewer than asked for.
    """
    found = torch.cuda.device_count()
    if options.accelerator == "gpu" and found < options.devices:
        raise ConfigError(
            f"trainer.accelerator=gpu with trainer.devices={options.devices}: this machine has {found} usable GPUs"
        )


def supported_precision(precision: str, accelerator: str) -> str:
    """bf16 on a CPU only where it pays (AMX tiles); elsewhere float32, said once."""
    on_cpu = accelerator == "cpu" or not torch.cuda.is_available()
    if precision.startswith("bf16") and on_cpu and not torch.cpu._is_amx_tile_supported():
        log.info("trainer.precision=%s runs as 32-true: this CPU has no AMX, where bf16 is many times slower", precision)
        return "32-true"
    return precision


def finish(trainer: L.Trainer, module: TrainingModule, data: DataModule, config: RunConfig, folder: Path) -> None:
    """Validate at the last step if the interval did not, and write the last checkpoint."""
    interval = config.trainer.val_every or config.trainer.max_steps
    if config.trainer.max_steps % min(interval, config.trainer.max_steps):
        trainer.validate(module, datamodule=data, verbose=False)
    if config.trainer.ckpt_every:
        trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")


def load_checkpoint(path: Path, model_config: TransformerConfig) -> dict[str, Any]:
    """A checkpoint's plain content, checked against the model that is to continue it. Nothing in it is executed.

    Raises:
        ConfigError: no such file, not a checkpoint of ours, or one of another model (the fields are named).
    """
    if not path.is_file():
        raise ConfigError(f"ckpt_path={path} is not a file")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        saved = checkpoint["minitx"]["model"]
    except Exception as error:  # torch raises many kinds for a damaged or foreign file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"ckpt_path={path} cannot be read as a checkpoint of minitx: {reason[:200]}") from None
    wanted = to_dict(model_config)
    other = [f"{name} {saved.get(name)} != {value}" for name, value in wanted.items() if saved.get(name) != value]
    if other:
        raise ConfigError(f"ckpt_path={path} holds another model than the config asks for: {'; '.join(other)}")
    return checkpoint


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's notices (devices found, tips, advice about workers) out of our output."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
            warnings.filterwarnings("ignore", message=".*isinstance.*LeafSpec.*is deprecated.*")
            warnings.filterwarnings("ignore", message=".*found in cache.*precision.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


__all__ = ["StoppedError", "train"]
