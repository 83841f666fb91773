"""One training run from its config: build, fit, validate, summarise. The command line and the lab use it."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from torch import nn

from minitx.config import ConfigError, RunConfig, TransformerConfig, is_part, to_dict
from minitx.config.checks import first_line, require
from minitx.data.module import DataModule
from minitx.data.task import Task
from minitx.nn.models import build_model
from minitx.training.building import DEFAULT_BATCH_SIZE, build_module, build_network, open_data, to_float64
from minitx.training.callbacks import BestCheckpoint, LastCheckpoint, progress
from minitx.training.calling import config_of
from minitx.training.checkpoint import read_checkpoint
from minitx.training.cpu import keep_freed_memory, onednn_products
from minitx.training.devices import check_parallel, place_of
from minitx.training.evaluation import evaluate, report
from minitx.training.folder import check_free, run_folder
from minitx.training.hardware import check_count, device_type
from minitx.training.metrics import MetricsFile
from minitx.training.module import NonFiniteError, TrainingModule
from minitx.training.outcome import summarise
from minitx.training.parallel import whole_state
from minitx.training.parts import GIVEN, build, build_all, core_of, import_modules, parameter_names
from minitx.training.probes import Probe
from minitx.training.samples import Samples
from minitx.training.steps import StepLog, StopAt
from minitx.training.summary import summary
from minitx.training.wandb import WandbExtras, finish_wandb

log = logging.getLogger(__name__)


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    files: Mapping[str, str] | None = None,
    model: nn.Module | None = None,
    data: Task | L.LightningDataModule | None = None,
    objective: Callable[..., Any] | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
) -> dict[str, Any]:
    """Train with ``config`` in ``folder``, and return the result as plain data (see ``outcome.summarise``).

    Args:
        folder: the folder for ``metrics.csv``, ``checkpoints/`` and, with probes, ``probes.jsonl``. It is created after data,
            model and checkpoint have been checked. It must hold no run, unless ``config.ckpt_path`` is a checkpoint to continue
            from, or ``last``: the one in this folder.
        files: other text files to write to the folder, by name (``config.yaml``, ``command.txt``).
        model, data, objective: objects to use instead of those of the config. Without ``data``, also a model of your own is
            trained on ``config.data``, by default the King James text. Read a checkpoint of such a model with
            ``load_model(path, model=...)``; the programs open data and objective of the config only.
        batch_size: rows of a step, if ``data`` is a ``Task``.

    Raises:
        ConfigError: the config does not fit the data, the machine or the checkpoint, an argument is of another type, or the
            folder holds a run that is not continued. NonFiniteError: a loss or gradient is not
            finite, with ``on_nonfinite=stop``. StoppedError: on SIGINT or SIGTERM, after the checkpoint was written.
    """
    require(isinstance(config, RunConfig), f"config must be a RunConfig, got {config!r:.60}")
    require(isinstance(model, nn.Module | None), f"model must be a torch.nn.Module, got {model!r:.60}")
    if data is None and model is None:
        config.check_data()
    folder = Path(folder)
    if config.ckpt_path == "last":
        config = dataclasses.replace(config, ckpt_path=str(folder / "checkpoints" / "last.ckpt"))
    check_free(folder, config.ckpt_path)
    with quiet_lightning(), ExitStack() as stack:
        if config.trainer.threads is not None:
            torch.set_num_threads(config.trainer.threads)
        import_modules(config.imports)
        check_count(config.trainer)
        if device_type(config.trainer) == "cpu":
            keep_freed_memory()
            stack.enter_context(onednn_products())
        opened = open_data(config, data, batch_size=batch_size)
        network = build_network(config, opened, model)
        check_parallel(config_of(network), config.trainer, probes=config.callbacks.probe.every > 0)
        module = build_module(config, opened, network, objective)
        for name, value in {"data": data, "objective": objective}.items():
            if value is not None:
                module.state["config"][name] = {"_target_": GIVEN}
        done = check_resumed(config, module)
        guard = last_checkpoint(config, folder)
        callbacks = [*own_callbacks(config, module, opened, folder), guard]
        loggers = build_all(config.logger, "logger", {"save_dir": str(folder)})
        stack.enter_context(run_folder(folder, files or {}))  # every part is built: a mistake in one has changed no file
        stack.enter_context(finish_wandb())
        loggers.insert(0, MetricsFile(folder / "metrics.csv", done))
        trainer = build_trainer(config, folder, loggers, callbacks, addressed=isinstance(opened, DataModule))
        if trainer.is_global_zero:
            log.info("%s", summary(trainer, config, module, opened, folder))
        nonfinite_step = fit(trainer, module, opened, config, guard)
        if nonfinite_step is None and config.evaluation.at_end:
            evaluate_at_end(trainer, module, opened, config, folder)
    return summarise(
        folder,
        floors=getattr(getattr(opened, "task", None), "floors", {}),
        nonfinite_step=nonfinite_step,
        num_parameters=sum(p.numel() for p in module.network.parameters()),
    )


def check_resumed(config: RunConfig, module: TrainingModule) -> int:
    """Return the step at which ``ckpt_path`` resumes, or 0 without it. Nothing in the checkpoint is executed.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint of minitx, is beyond ``trainer.max_steps``, or is of another
            model, optimizer or schedule. The message names the fields that differ.
    """
    if config.ckpt_path is None:
        return 0
    checkpoint = read_checkpoint(config.ckpt_path)
    saved, wanted = checkpoint["minitx"]["model"], module.state["model"]
    if not is_part(saved) and not is_part(wanted):  # options that are younger than it, at their defaults
        saved = to_dict(TransformerConfig(**saved))
    other = [f"{name} {saved.get(name)} != {value}" for name, value in wanted.items() if saved.get(name) != value]
    if other:
        raise ConfigError(f"ckpt_path={config.ckpt_path} holds another model than the config asks for: {'; '.join(other)}")
    for name in ("optimizer", "schedule"):  # their state in the checkpoint would win over the config
        saved, wanted = checkpoint["minitx"]["config"][name], module.state["config"][name]
        keys = [key for key in saved | wanted if saved.get(key) != wanted.get(key)]
        if keys:
            changed = "; ".join(f"{name}.{key} {saved.get(key)} != {wanted.get(key)}" for key in keys)
            raise ConfigError(
                f"ckpt_path={config.ckpt_path} goes on with its own {name}, and the config asks for another: {changed}. "
                "Leave it as it was, or start a new run from the weights with init_from.path"
            )
    step = int(checkpoint["global_step"])
    if step > config.trainer.max_steps:
        raise ConfigError(f"ckpt_path={config.ckpt_path} is of step {step}, after trainer.max_steps={config.trainer.max_steps}")
    return step


def last_checkpoint(config: RunConfig, folder: Path) -> LastCheckpoint:
    """Return the callback that writes ``last.ckpt``. It handles signals even if the run writes no checkpoints."""
    options = config.trainer
    path = folder / "checkpoints" / "last.ckpt" if options.ckpt_every else None
    return LastCheckpoint(path, options.ckpt_every, options.ckpt_minutes, options.log_every)


def own_callbacks(config: RunConfig, module: TrainingModule, data: L.LightningDataModule, folder: Path) -> list[Any]:
    """Return all callbacks of the run except ``LastCheckpoint``: first ours, then the user's."""
    options, asked = config.trainer, config.callbacks
    task = getattr(data, "task", None)
    own: list[Any] = [StepLog(options.log_every, config_of(module.network), options.peak_tflops)]
    if options.stop_at is not None:
        own.append(StopAt(**to_dict(options.stop_at)))
    if asked.probe.every:
        if not isinstance(data, DataModule):
            raise ConfigError("callbacks.probe.every needs the data of a Task, whose validation rows it looks at: set it to 0")
        own.append(Probe(folder, data.probe_batch(asked.probe.batch_size), asked.probe, data.texts))
    if asked.samples.every:
        prompts = asked.samples.prompts or tuple(default_prompts(data))
        chosen = dataclasses.replace(asked.samples, prompts=prompts)
        own.append(Samples(folder, task.tokenizer if task else None, chosen, config.seed))
    if asked.progress:
        own.append(progress())
    if options.ckpt_every:
        own.append(BestCheckpoint(folder / "checkpoints"))
    own.append(WandbExtras(module.state["config"], folder, **to_dict(asked.wandb)))
    return own + build_all(asked.parts, "callbacks")


def default_prompts(data: L.LightningDataModule) -> list[str]:
    """Return the beginnings of three validation rows."""
    if not isinstance(data, DataModule) or data.task.tokenizer is None:
        raise ConfigError("callbacks.samples.every needs data with a tokenizer")
    rows = data.probe_batch(3)["input_ids"]
    return [data.task.tokenizer.decode(row[: max(1, len(row) // 4)].tolist(), skip_marks=True) for row in rows]


def build_trainer(
    config: RunConfig, folder: Path, loggers: Sequence[Any], callbacks: Sequence[L.Callback], *, addressed: bool
) -> L.Trainer:
    """Build the Lightning trainer. All its counts are in optimizer steps.

    Args:
        addressed: whether each process already has its own batches. Otherwise Lightning's distributed sampler divides the data.

    Raises:
        ConfigError: Lightning does not accept the devices, the strategy, ``trainer.extra``, a plugin or the profiler.
    """
    options = config.trainer
    check_callbacks(callbacks, addressed=addressed)
    if unknown := set(options.extra) - parameter_names(L.Trainer):
        raise ConfigError(f"trainer.extra.{min(unknown)} is no argument of Lightning's Trainer")
    steps = min(options.val_every or options.max_steps, options.max_steps)
    place = place_of(options)
    place["plugins"] += [build(node, f"trainer.plugins[{i}]") for i, node in enumerate(options.plugins)]
    profiler = (
        None
        if options.profiler is None
        else build(options.profiler, "trainer.profiler", {"dirpath": folder, "filename": "profile"})
    )
    try:
        trainer = L.Trainer(
            **place,
            max_steps=options.max_steps,
            accumulate_grad_batches=options.accumulate,
            val_check_interval=steps * options.accumulate,
            check_val_every_n_epoch=None,
            limit_val_batches=options.val_batches,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            deterministic=options.deterministic,
            use_distributed_sampler=not addressed,
            logger=list(loggers),
            callbacks=list(callbacks),
            enable_progress_bar=any(isinstance(callback, L.callbacks.ProgressBar) for callback in callbacks),
            enable_model_summary=False,
            default_root_dir=folder,
            profiler=profiler,
            **options.extra,
        )
    except Exception as error:
        asked = f"trainer.strategy={options.strategy} with trainer.accelerator={options.accelerator}"
        raise ConfigError(f"{asked} and trainer.devices={options.devices} cannot be used: {first_line(error)}") from error
    # Lightning has no public switch for this: before every micro-batch it waits for the device, and broadcasts, to share a
    # signal that LastCheckpoint shares when it is time. lightning is bounded in pyproject.toml.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


def check_callbacks(callbacks: Sequence[L.Callback], *, addressed: bool) -> None:
    """Refuse callbacks of Lightning that would do nothing, or change the batches of a step, in a run of ``max_steps`` steps.

    Raises:
        ConfigError: ``StochasticWeightAveraging``; or ``GradientAccumulationScheduler`` with the data of a ``Task``.
    """
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigError(
                "callbacks: StochasticWeightAveraging counts epochs up to max_epochs, and a run ends at trainer.max_steps, so it would "
                "do nothing: callbacks=[default,ema] averages weights by step"
            )
        if addressed and isinstance(callback, GradientAccumulationScheduler):
            raise ConfigError(
                "callbacks: GradientAccumulationScheduler changes the micro-batches of a step by epoch, and the data of a Task have one "
                "epoch: set trainer.accumulate"
            )


def fit(
    trainer: L.Trainer, module: TrainingModule, data: L.LightningDataModule, config: RunConfig, guard: LastCheckpoint
) -> int | None:
    """Train, and validate at the last step. With ``on_nonfinite=record``, return the step that was not finite."""
    try:
        with guard:
            trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path, weights_only=True)
    except NonFiniteError as error:
        if config.on_nonfinite == "stop":
            raise
        return error.step + 1
    trainer.strategy.barrier()  # the result is read from files that the first process writes
    return None


def evaluate_at_end(
    trainer: L.Trainer, module: TrainingModule, data: L.LightningDataModule, config: RunConfig, folder: Path
) -> None:
    """Evaluate the finished network, on the first process."""
    network, model = module.network, config_of(module.network)
    if config.trainer.strategy == "sharded":
        state = whole_state(network)  # from all processes
        assert model is not None
        network = build_model(model, core_of(model))
        if config.trainer.precision == "64-true":
            to_float64(network)
        network.to(next(iter(state.values())).dtype).load_state_dict(state)
    if trainer.is_global_zero:
        report(evaluate(network, data, config.evaluation, module.objective), folder)


_NOTICES = (
    "does not have many workers",
    "Checkpoint directory .* exists and is not empty",
    "dataloader is not resumable",  # the run says it in its own words
    "in eval mode at the start of training",  # the run says it in its own words
    "isinstance.*LeafSpec.*is deprecated",
    "on_before_batch_transfer` in `LightningModule",  # that of the module is the one to use
    "dirpath has changed from",
    "found in cache.*precision",
    "sync_dist=True",  # what is logged is the sum over ranks already
    "FSDP2-wrapped module.*view tensor",  # no block works in place
    "WeightAveraging callback with a model that overrides",  # configure_model shards; otherwise it does nothing
)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hide Lightning's notices (devices found, tips, advice about workers), but not the table of its ``ModelSummary``."""
    quiet = {
        "lightning.pytorch": logging.WARNING,
        "lightning.pytorch.callbacks.model_summary": logging.INFO,  # its table was asked for
        "lightning.fabric": logging.WARNING,
        "torch.distributed.tensor": logging.ERROR,
    }
    levels = {name: logging.getLogger(name).level for name in quiet}
    try:
        for name, level in quiet.items():
            logging.getLogger(name).setLevel(level)
        with warnings.catch_warnings():
            for message in _NOTICES:
                warnings.filterwarnings("ignore", message=f".*{message}.*")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
