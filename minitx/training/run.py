"""One training run from its config: build, fit, validate, summarise. The command line and the lab use it."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from minitx.config import CallbacksConfig, ConfigError, Part, RunConfig, SamplesConfig, TrainerConfig, to_dict
from minitx.config.part import import_modules, parameter_names
from minitx.config.schema import Count, defaults, first_line, read, require
from minitx.config.training import LOADING
from minitx.data.conversations import ChatFormat, is_chat, template_of
from minitx.data.datamodule import DataModule, in_steps, open_data
from minitx.data.task import Task, kept_generators
from minitx.data.tokenizers import Tokenizer, encode_known
from minitx.training import rank
from minitx.training.callbacks import (
    Averages,
    BestCheckpoint,
    LastCheckpoint,
    Samples,
    StepLog,
    StopAt,
    check_averages,
    progress,
)
from minitx.training.checkpoints import (
    check_free,
    check_resumed,
    start_from,
    stored_state,
    tokenizer_of,
)
from minitx.training.devices import check_accelerator, cpu_precision, device_of, machine
from minitx.training.evaluation import check_test, evaluate_splits
from minitx.training.loggers import WandbExtras, describe_part, finish_wandb, run_folder, summarise, summary
from minitx.training.memory_plan import build_without_numbers, make_plan, precision_of
from minitx.training.metrics_csv import COLUMNS, MetricsFile
from minitx.training.module import AtomicCheckpointIO, NonFiniteError, Sharded, TrainingModule, build_module
from minitx.training.net import Net, build_network
from minitx.training.probes import Probe
from minitx.training.questions import questions_of
from minitx.training.rehearse import is_rehearsed, rehearse

log = logging.getLogger(__name__)


def train(
    config: RunConfig,
    folder: str | Path,
    *,
    files: Mapping[str, str] | None = None,
    model: nn.Module | None = None,
    data: Task | L.LightningDataModule | None = None,
    objective: Callable[..., Any] | None = None,
    batch_size: int = LOADING["batch_size"][1],
) -> dict[str, Any]:
    """Train with ``config`` in ``folder``, and return the result as plain data (see ``summarise``).

    Random generators, threads, environment variables and signal handlers of this process are restored afterwards. With
    ``trainer.plan=true`` nothing is trained and no folder is made: the plan is logged, and its bytes are returned.

    Args:
        folder: the folder for ``metrics.csv``, ``checkpoints/`` and, with probes, ``probes.jsonl``. It is created after data,
            model and checkpoint have been checked. It must hold no run, unless ``config.ckpt_path`` is a checkpoint to continue
            from in this folder, or ``last``: the last one.
        files: other text files to write to the folder, by name (``config.yaml``, ``command.txt``).
        model, data, objective: objects to use instead of the config's. Without ``data``, even your own model is
            trained on ``config.data``, by default the King James text. Read a checkpoint of such a model with
            ``load_model(path, model=...)``; the programs open data and objective of the config only.
        batch_size: rows of a step, if ``data`` is a ``Task``. A ``LightningDataModule`` has its own.

    Raises:
        ConfigError: the config does not fit the data, the machine or the checkpoint, an argument is of another type, or the
            folder holds a run that is not continued. NonFiniteError: a loss or gradient is not
            finite, with ``on_nonfinite=stop``. StoppedError: on SIGINT or SIGTERM, after the checkpoint was written.
    """
    folder = Path(folder)
    config = checked(config, folder, model=model, data=data, objective=objective, batch_size=batch_size)
    if config.trainer.plan:
        return show_plan(config)
    with quiet_lightning(), machine(config.trainer):
        rows = open_data(config.data, config.trainer, seed=config.seed, tokenizer=tokenizer_of(config.init_from, config.data))
        config = dataclasses.replace(config, trainer=in_steps(config.trainer, rows))
        network = build_network(config.model, rows, precision=config.trainer.precision, seed=config.seed)
        parts = config.objective, config.optimizer, config.schedule
        module = build_module(start_from(config.init_from, network), rows, *parts, config.trainer, config.seed)
        check_asked(module.net, rows, config)
        if is_rehearsed(config):
            rehearse(config, module, rows, perform)
        steps, nonfinite_step, metrics = perform(config, module, rows, folder, files)
    return summarise(folder, steps, nonfinite_step, metrics, rows.task.floors, network)


def show_plan(config: RunConfig) -> dict[str, int]:
    """Log the plan of a run (see ``make_plan``), and return its bytes by name."""
    options = config.trainer
    check_accelerator(options.accelerator)
    with quiet_lightning(), kept_generators(torch.device("cpu")):
        rows = open_data(config.data, options, seed=config.seed, tokenizer=tokenizer_of(config.init_from, config.data))
        network = build_without_numbers(config, rows)
        net = Net.of(network)
        check_asked(net, rows, config)
        callbacks = build_all(config.callbacks.parts, "callbacks", L.Callback)
        check_averages(callbacks, is_sharded=options.strategy == "sharded")
        plan = make_plan(config, network, callbacks)
    is_sharded, count = options.strategy == "sharded", options.world_size
    processes = f"{count} processes, {'sharded' if is_sharded else 'ddp'}" if count > 1 else "one process"
    gathered = ", the layers that FSDP gathers while they compute" if is_sharded else ""
    lines = {
        "model": net.describe(),
        "training": describe_part(config.optimizer),
        "plan": f"{processes}, {precision_of(options)}; each process holds{' at most' if is_sharded else ''}",
        "": plan.table(),
        "beside": f"activations, which grow with the rows of a micro-batch{gathered}, and what the device's libraries take",
    }
    log_on_rank_zero("\n".join(f"{name:9}  {line}" if name else line for name, line in lines.items()))
    return vars(plan)


def perform(
    config: RunConfig,
    module: TrainingModule,
    rows: DataModule,
    folder: Path,
    files: Mapping[str, str] | None = None,
    checkpoints: CheckpointIO | None = None,
) -> tuple[int, int | None, dict[str, Any]]:
    """Train and evaluate in ``folder``. Return the number of steps, the step that was not finite, and the metrics of the end.

    ``checkpoints`` writes and reads the checkpoints, by default complete or not at all.

    Every part is built before the folder is touched, so that a mistake in one changes no file.
    """
    state = stored_state(config, rows.task, module.net)
    done = check_resumed(config, state)
    callbacks = build_callbacks(config.callbacks, module, rows, folder, state)
    loggers = build_all(config.logger, "logger", Logger, save_dir=str(folder))
    check_free(folder, config.ckpt_path)  # once more: another run may have begun here, while this one was built
    with run_folder(folder, files or {}), finish_wandb():
        trainer = build_trainer(config.trainer, folder, loggers, callbacks, done, checkpoints)
        log_on_rank_zero(summary(trainer, module, rows, config.optimizer, config.schedule, folder))
        nonfinite_step = fit(trainer, module, rows, config.ckpt_path, config.on_nonfinite)
        metrics = {} if nonfinite_step else evaluate_splits(trainer, module, rows, config.evaluation, folder, state["model"])
    return trainer.global_step, nonfinite_step, metrics


def checked(config: RunConfig, folder: Path, *, model: Any, data: Any, objective: Any, batch_size: int) -> RunConfig:
    """Check the arguments of ``train``, import the modules of the config, and return the config with the objects as its parts."""
    require(isinstance(config, RunConfig), f"config must be a RunConfig, got {config!r:.60}")
    require(isinstance(model, nn.Module | None), f"model must be a torch.nn.Module, got {model!r:.60}")
    batch_size = read(Count, batch_size, "batch_size")
    check_arguments(config.trainer.extra)
    check_free(folder, config.ckpt_path)
    import_modules(config.imports)
    changes: dict[str, Any] = {}
    if model is not None:
        changes["model"] = Part.given(model, "model")
    if data is not None:
        changes["data"] = Part.given(data, "data", batch_size=batch_size)
    if objective is not None:
        changes["objective"] = Part.given(objective, "objective")
    if config.ckpt_path == "last":
        changes["ckpt_path"] = str(folder / "checkpoints" / "last.ckpt")
    return dataclasses.replace(config, **changes)


def build_all(group: Mapping[str, Part | None], path: str, kind: type, **offered: Any) -> list[Any]:
    """Build every entry of a group of callbacks or loggers that is not null.

    Raises:
        ConfigError: see ``Part.build``; or an entry is not of this ``kind``.
    """
    entries = []
    for name, part in group.items():
        if part is not None:
            entries.append(part.at(f"{path}.{name}").build(**offered))
            made = type(entries[-1])
            require(
                isinstance(entries[-1], kind),
                f"{path}.{name}._target_={part.name} must give a {kind.__name__} of the package lightning, got "
                f"{made.__module__}.{made.__qualname__}",
            )
    return entries


def check_asked(net: Net, data: DataModule, config: RunConfig) -> None:
    """Check that the run can do everything that the config demands.

    Raises:
        ConfigError: the data have no test split; or with ``trainer.strategy=sharded``, the layers of the model are not known, probes
            are on (they need whole weights on one device), or a model that was given from Python would have to be built again to be
            evaluated.
    """
    check_test(config.evaluation.test, data.task)
    if config.trainer.strategy != "sharded":
        return
    net.layers(config.trainer.shard)
    if config.callbacks.probe.every:
        raise ConfigError("callbacks.probe.every needs whole weights on one device: set it to 0 with trainer.strategy=sharded")
    is_built = net.stored_node is not None or not config.model.is_given
    if config.evaluation.at_end and not is_built:
        raise ConfigError("evaluation.at_end needs a model that the config can build again with trainer.strategy=sharded")


def build_callbacks(
    asked: CallbacksConfig, module: TrainingModule, data: DataModule, folder: Path, state: Mapping[str, Any]
) -> list[L.Callback]:
    """Return the callbacks of the run: ours, the configured ones, and ``LastCheckpoint`` (it handles signals even without checkpoints).

    Args:
        state: the plain data for every checkpoint (``stored_state``).
    """
    options = module.options
    own: list[Any] = [StepLog(options.log_every, module.net.config, options.peak_tflops)]
    if options.stop_at is not None:
        own.append(StopAt(**to_dict(options.stop_at)))
    if asked.probe.every:
        own.append(
            Probe(folder, data.probe_batch(asked.probe.batch_size), asked.probe, data.texts, partial(questions_of, data.task))
        )
    if asked.samples.every:
        own.append(build_samples(asked.samples, module.seed, data, folder, state["config"]["data"]))
    if asked.progress:
        own.append(progress())
    if options.ckpt_every:
        best = BestCheckpoint(folder / "checkpoints", options.monitor, options.monitor_mode)
        own.append(best)
    own.append(WandbExtras(state["config"], folder, **to_dict(asked.wandb)))
    last = LastCheckpoint(folder / "checkpoints", options, state)
    # WeightAveraging puts the average into the model at the end
    before = LambdaCallback(on_train_end=last.on_train_end)
    return [Averages(), before, *own, *build_all(asked.parts, "callbacks", L.Callback), last]


def build_samples(options: SamplesConfig, seed: int, data: DataModule, folder: Path, node: Mapping[str, Any]) -> Samples:
    """Return the callback that writes samples.

    Args:
        node: the node of the data, for its chat template.

    Raises:
        ConfigError: the data have no tokenizer, or a character of a prompt is not in its vocabulary.
    """
    tokenizer = data.task.tokenizer
    if tokenizer is None:
        raise ConfigError("callbacks.samples.every needs data with a tokenizer")
    for prompt in options.prompts:
        encode_known(tokenizer, prompt, "callbacks.samples.prompts")
    format = ChatFormat(str(template_of(node, tokenizer)), tokenizer) if options.prompts and is_chat(node) else None
    prompts = options.prompts or tuple(default_prompts(data, tokenizer))
    return Samples(folder, tokenizer, dataclasses.replace(options, prompts=prompts), seed, format)


def default_prompts(data: DataModule, tokenizer: Tokenizer) -> list[str]:
    """Return the beginnings of three validation rows."""
    rows = data.probe_batch(3)["input_ids"]
    return [tokenizer.decode(row[: max(1, len(row) // 4)].tolist(), skip_marks=True) for row in rows]


# --- Lightning's trainer


def build_trainer(
    options: TrainerConfig,
    folder: Path,
    loggers: Sequence[Any],
    callbacks: Sequence[L.Callback],
    done: int,
    checkpoints: CheckpointIO | None = None,
) -> L.Trainer:
    """Build the Lightning trainer. It logs to ``metrics.csv`` from row ``done`` on, and to ``loggers``.

    ``TrainingModule`` clips and logs by itself, and the loaders of ``DataModule`` give each process its own batches.

    Raises:
        ConfigError: Lightning does not accept the devices, the strategy, ``trainer.extra``, a plugin or the profiler.
    """
    check_extra(options.extra)
    check_callbacks(callbacks)
    place = place_of(options)
    place["plugins"] += [checkpoints or AtomicCheckpointIO()] + [
        part.at(f"trainer.plugins[{i}]").build() for i, part in enumerate(options.plugins)
    ]
    profiler = options.profiler and options.profiler.at("trainer.profiler").build(dirpath=folder, filename="profile")
    arguments = {
        **place,
        "max_steps": options.max_steps,
        "accumulate_grad_batches": options.accumulate,
        **validation_of(options),
        "limit_val_batches": options.val_batches,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "deterministic": options.deterministic or None,  # False would undo the user's setting
        "use_distributed_sampler": False,
        "logger": [MetricsFile(folder / "metrics.csv", done, COLUMNS), *loggers],
        "callbacks": list(callbacks),
        "enable_progress_bar": any(isinstance(callback, L.callbacks.ProgressBar) for callback in callbacks),
        "enable_model_summary": False,
        "default_root_dir": folder,
        "profiler": profiler,
    }
    try:
        trainer = L.Trainer(**{**arguments, **options.extra})
    except Exception as error:
        asked = f"trainer.strategy={options.strategy} with trainer.accelerator={options.accelerator}"
        raise ConfigError(f"{asked} and trainer.devices={options.devices} cannot be used: {first_line(error)}") from error
    # Lightning has no public switch for this: before every micro-batch it waits for the device, and broadcasts, to share a
    # signal that LastCheckpoint shares when it is time. lightning is bounded in pyproject.toml.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


REPLACED = {
    "accumulate_grad_batches": "trainer.accumulate",
    "callbacks": "callbacks",
    "default_root_dir": "output_dir",
    "enable_checkpointing": "trainer.ckpt_every",
    "enable_progress_bar": "callbacks.progress",
    "gradient_clip_val": "trainer.clip",
    "limit_val_batches": "trainer.val_batches",
    "log_every_n_steps": "trainer.log_every",
    "logger": "logger",
    "overfit_batches": "trainer.overfit",
    "val_check_interval": "trainer.val_every",
}
"""Arguments of Lightning's Trainer that have a key of another name."""


def key_of_argument(name: str) -> str | None:
    """Return the key for an argument of Lightning's Trainer, or None if the Trainer has no such argument.

    >>> key_of_argument("gradient_clip_val"), key_of_argument("devices"), key_of_argument("benchmark"), key_of_argument("foo")
    ('trainer.clip', 'trainer.devices', 'trainer.extra.benchmark', None)
    """
    if name not in parameter_names(L.Trainer):
        return None
    return REPLACED.get(name, f"trainer.{name}" if name in defaults(TrainerConfig) else f"trainer.extra.{name}")


def check_arguments(extra: Mapping[str, Any]) -> None:
    """Refuse entries of ``trainer.extra`` that Lightning's Trainer does not have, or that have a key.

    Raises:
        ConfigError: ``extra`` has such an entry. The message names the key, or a similar argument.
    """
    for name in sorted(extra):
        key = key_of_argument(name)
        near = [key_of_argument(like) for like in difflib.get_close_matches(name, sorted(parameter_names(L.Trainer)), n=1)]
        meant = f" (did you mean {near[0]}?)" if near else ""
        require(key is not None, f"trainer.extra.{name} is not an argument of Lightning's Trainer{meant}")
        require(key == f"trainer.extra.{name}", f"trainer.extra.{name} is not allowed: use {key}")


def check_extra(extra: Mapping[str, Any]) -> None:
    """Refuse arguments without effect on our training step or data.

    Raises:
        ConfigError: ``extra`` has such an argument.
    """
    of_epochs = {"limit_train_batches", "check_val_every_n_epoch", "min_epochs", "reload_dataloaders_every_n_epochs"}
    idle = {
        "does not apply to our own training step, which clips by the norm": {"gradient_clip_algorithm"},
        "does not apply to the data of a Task": {"use_distributed_sampler", *of_epochs},
    }
    for why, names in idle.items():
        for name in sorted(names & set(extra)):
            raise ConfigError(f"trainer.extra.{name} {why}")


def validation_of(options: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for ``trainer.val_every``."""
    assert options.max_steps is not None  # see ``in_steps``
    steps = min(options.val_every or options.max_steps, options.max_steps)
    return {"val_check_interval": steps * options.accumulate, "check_val_every_n_epoch": None}


def check_callbacks(callbacks: Sequence[L.Callback]) -> None:
    """Refuse callbacks of Lightning whose result would be lost, or which change the batches of a step by epoch.

    Raises:
        ConfigError: ``StochasticWeightAveraging`` or ``GradientAccumulationScheduler``.
    """
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigError(
                "callbacks: StochasticWeightAveraging makes its average at the end of the last epoch, after the last validation and "
                "checkpoint, so that no file would have it: callbacks=[default,ema] averages weights by step"
            )
        if isinstance(callback, GradientAccumulationScheduler):
            raise ConfigError(
                "callbacks: GradientAccumulationScheduler changes the micro-batches of a step by epoch, and the data of a Task have one "
                "epoch: set trainer.accumulate"
            )


def place_of(options: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for devices, strategy, precision and checkpoints."""
    device = device_of(options.accelerator)
    precision: str | None = cpu_precision(options.precision) if device.type == "cpu" else options.precision
    plugins: list[Any] = []
    if options.strategy == "sharded" and precision == "64-true":  # which Lightning refuses by name, not as a plugin
        plugins, precision = [*plugins, DoublePrecision()], None
    elif precision == "bf16-mixed":  # Lightning takes CUDA's autocast for a device that it does not know
        plugins, precision = [*plugins, MixedPrecision("bf16-mixed", device.type)], None
    strategy: Strategy = SingleDeviceStrategy(device)  # Lightning takes the CPU for a device that it does not know
    if options.strategy == "sharded":
        strategy = Sharded(options.world_size)
    elif options.strategy == "ddp" or options.world_size > 1:
        strategy = DDPStrategy(gradient_as_bucket_view=True)
    where = {"accelerator": options.accelerator, "devices": options.devices, "num_nodes": options.num_nodes}
    return {**where, "strategy": strategy, "plugins": plugins, "precision": precision}


# --- training


def log_on_rank_zero(text: str) -> None:
    """Log a text in the first process."""
    if not rank():
        log.info("%s", text)


def fit(
    trainer: L.Trainer, module: TrainingModule, data: DataModule, ckpt_path: str | None = None, on_nonfinite: str = "stop"
) -> int | None:
    """Train, and validate at the last step. With ``on_nonfinite=record``, return the step that was not finite.

    Raises:
        ConfigError: Lightning refuses the options. NonFiniteError: with ``on_nonfinite=stop``.
    """
    signals = next(each for each in trainer.callbacks if isinstance(each, LastCheckpoint))  # type: ignore[attr-defined]
    try:
        with signals:
            trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    except NonFiniteError as error:
        if on_nonfinite == "stop":
            raise
        return error.step + 1
    except MisconfigurationException as error:
        raise ConfigError(f"model: {first_line(error)}") from error
    trainer.strategy.barrier()  # the result is read from files that the first process writes
    return None


_NOTICES = (
    "overridden .on_before_batch_transfer.",  # the module checks masks there, before they are on the device; the data module has none
    "does not have many workers",  # one process loads faster than our models train
    "Checkpoint directory .* exists and is not empty",  # it is the folder of the run that is resumed
    "dataloader is not resumable",  # its batches are addressed by step, so that it is
    "in eval mode at the start of training",  # build_network logs these parts
    "isinstance.*LeafSpec.*is deprecated",  # in Lightning's own code, for every batch
    "sync_dist=True",  # metrics are already reduced over ranks
    "FSDP2-wrapped module.*view tensor",  # no block changes its output in place
    "WeightAveraging callback with a model that overrides",  # configure_model shards; otherwise it does nothing
    "WeightAveraging callback, but loading a checkpoint outside",  # the averaged weights are tested
)
"""Warnings of Lightning and torch that would tell a user nothing, each with the reason."""


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
