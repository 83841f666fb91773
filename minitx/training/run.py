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
from minitx.config.training import LOADING, REPLACED
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
    load_start,
    start_from,
    stored_state,
    tokenizer_of,
)
from minitx.training.devices import check_accelerator, cpu_precision, device_of, machine
from minitx.training.evaluation import evaluate_splits
from minitx.training.loggers import WandbExtras, describe_part, finish_wandb, run_folder, summarise, summary
from minitx.training.memory_plan import build_without_numbers, make_plan, precision_of
from minitx.training.metrics_csv import COLUMNS, MetricsFile
from minitx.training.module import AtomicCheckpointIO, NonFiniteError, Sharded, TrainingModule, build_module
from minitx.training.net import Net, build_network, lent
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

    Afterwards, the random generators, threads, environment variables and signal handlers of this process are restored, and
    the same parameters of ``model`` are trainable as before. Its weights keep the dtype of ``trainer.precision``.

    Args:
        folder: the folder for ``metrics.csv``, ``checkpoints/`` and, with probes, ``probes.jsonl``. It is created after data,
            model and checkpoint have been checked. It must not contain a run, unless ``config.ckpt_path`` is a checkpoint in
            this folder, or ``last`` for the last one.
        files: further text files to write to the folder, by name (``config.yaml``, ``command.txt``).
        model, data, objective: objects to use instead of the config's. Without ``data``, your own model is also
            trained on ``config.data``, by default the King James text. Load a checkpoint of your own model, or of a
            model of minitx that was changed after its config built it, with ``load_model(path, model=...)``. The programs can only open data and objectives that a config names.
        batch_size: number of rows in a step, if ``data`` is a ``Task``. A ``LightningDataModule`` has its own batch size.

    Raises:
        ConfigError: the config does not match the data, the machine or the checkpoint, an argument has the wrong type, or the
            folder contains a run that is not resumed.
        NonFiniteError: with ``on_nonfinite=stop``, a loss or gradient is not finite.
        StoppedError: on SIGINT or SIGTERM, after the checkpoint was written.
    """
    folder = Path(folder)
    config = checked(config, folder, model=model, data=data, objective=objective, batch_size=batch_size)
    with quiet_lightning(), machine(config.trainer):
        config, rows, network = open_parts(config)
        parts = config.objective, config.optimizer, config.schedule
        with lent(network, config.trainer.precision):
            module = build_module(network, rows, *parts, config.trainer, config.seed)
            check_demands(module.net, rows, config)
            if is_rehearsed(config.trainer, config.ckpt_path):
                rehearse(config, module, rows, perform)
            steps, nonfinite_step, metrics = perform(config, module, rows, folder, files)
    return summarise(folder, steps, nonfinite_step, metrics, rows.task.floors, network)


def open_parts(config: RunConfig) -> tuple[RunConfig, DataModule, nn.Module]:
    """Return the config with epochs converted to steps, the data, and the network with the weights of ``init_from``."""
    start = load_start(config.init_from)  # for the tokenizer and the weights; freed when this function returns
    tokenizer = tokenizer_of(config.init_from, start, config.data)
    rows = open_data(config.data, config.trainer, seed=config.seed, tokenizer=tokenizer)
    config = dataclasses.replace(config, trainer=in_steps(config.trainer, rows))
    network = build_network(config.model, rows, config.trainer.precision)
    return config, rows, start_from(config.init_from, start, network)


def show_plan(
    config: RunConfig,
    *,
    model: nn.Module | None = None,
    data: Task | L.LightningDataModule | None = None,
    batch_size: int = LOADING["batch_size"][1],
) -> dict[str, int]:
    """Log the memory plan of the run that ``train`` would make of these arguments, and return its bytes by name."""
    config = with_objects(config, model=model, data=data, objective=None, batch_size=batch_size)
    options = config.trainer
    check_accelerator(options.accelerator)
    with quiet_lightning(), kept_generators(torch.device("cpu")):
        tokenizer = tokenizer_of(config.init_from, load_start(config.init_from), config.data)
        rows = open_data(config.data, options, seed=config.seed, tokenizer=tokenizer)
        network = build_without_numbers(config.model, rows, options.precision)
        net = Net.of(network)
        check_demands(net, rows, config)
        callbacks = build_all(config.callbacks.parts, "callbacks", L.Callback)
        check_averages(callbacks, is_sharded=options.strategy == "sharded")
        plan = make_plan(network, config.optimizer, options, callbacks)
    is_sharded, count = options.strategy == "sharded", options.world_size
    processes = f"{count} processes, {'sharded' if is_sharded else 'ddp'}" if count > 1 else "one process"
    gathered = ", layers that FSDP gathers for their computation" if is_sharded else ""
    lines = {
        "model": net.describe(),
        "training": describe_part(config.optimizer),
        "plan": f"{processes}, {precision_of(options)}; each process holds{' at most' if is_sharded else ''}",
        "": plan.table(),
        "excludes": f"activations (they grow with the rows of a micro-batch){gathered}, and the memory of the device's libraries",
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
    """Train and evaluate in ``folder``. Return the number of steps, the first non-finite step or None, and the final metrics.

    ``checkpoints`` writes and reads the checkpoints; None: ``AtomicCheckpointIO``.

    All parts are built before the folder is touched, so that a faulty part changes no file.
    """
    state = stored_state(config, rows.task, module.net)
    done = check_resumed(config, state)
    callbacks = build_callbacks(config.callbacks, module, rows, folder, state)
    loggers = build_all(config.logger, "logger", Logger, save_dir=str(folder))
    check_free(folder, config.ckpt_path)  # again, because another run may have started here in the meantime
    with run_folder(folder, files or {}), finish_wandb():
        trainer = build_trainer(config.trainer, folder, loggers, callbacks, done, checkpoints)
        log_on_rank_zero(summary(trainer, module, rows, config.optimizer, config.schedule, folder, done))
        for line in epoch_hooks(callbacks):
            log_on_rank_zero(line)
        nonfinite_step = fit(trainer, module, rows, config.ckpt_path, config.on_nonfinite)
        metrics = {} if nonfinite_step else evaluate_splits(trainer, module, rows, config.evaluation, folder, state["model"])
    return trainer.global_step, nonfinite_step, metrics


def checked(config: RunConfig, folder: Path, **objects: Any) -> RunConfig:
    """Check the arguments of ``train``, and return the config with the objects as parts, and the path of ``ckpt_path=last``."""
    config = with_objects(config, **objects)
    require(not config.trainer.plan, "trainer.plan=true describes a run and does not train: call show_plan(config)")
    check_free(folder, config.ckpt_path)
    path = str(folder / "checkpoints" / "last.ckpt") if config.ckpt_path == "last" else config.ckpt_path
    return dataclasses.replace(config, ckpt_path=path)


def with_objects(config: RunConfig, *, model: Any, data: Any, objective: Any, batch_size: int) -> RunConfig:
    """Check a config and objects, import the modules of the config, and return the config with the objects as parts."""
    require(isinstance(config, RunConfig), f"config must be a RunConfig, got {config!r:.60}")
    require(isinstance(model, nn.Module | None), f"model must be a torch.nn.Module, got {model!r:.60}")
    batch_size = read(Count, batch_size, "batch_size")
    check_arguments(config.trainer.extra)
    import_modules(config.imports)
    parts: dict[str, Any] = {}
    if model is not None:
        parts["model"] = Part.of_object(model, "model")
    if data is not None:
        parts["data"] = Part.of_object(data, "data", batch_size=batch_size)
    if objective is not None:
        parts["objective"] = Part.of_object(objective, "objective")
    return dataclasses.replace(config, **parts)


def build_all(group: Mapping[str, Part | None], path: str, kind: type, **offered: Any) -> list[Any]:
    """Build every entry of a group of callbacks or loggers that is not null.

    Raises:
        ConfigError: an entry cannot be built, or is not a ``kind``.
    """
    entries = []
    for name, part in group.items():
        if part is not None:
            entries.append(part.at(f"{path}.{name}").build(**offered))
            cls = type(entries[-1])
            require(
                isinstance(entries[-1], kind),
                f"{path}.{name}._target_={part.name} must return a {kind.__name__} of the package lightning, got "
                f"{cls.__module__}.{cls.__qualname__}",
            )
    return entries


def check_demands(net: Net, data: DataModule, config: RunConfig) -> None:
    """Check that the run supports everything that the config demands.

    Raises:
        ConfigError: the data has no test split; or with ``trainer.strategy=sharded``, the layers of the model are unknown,
            probes are on (they need whole weights on one device), or the evaluation would have to rebuild a model that was
            passed from Python.
    """
    test = config.evaluation.test
    require(test is None or data.task.test is not None, f"evaluation.test={test}: the data has no test split")
    if config.trainer.strategy != "sharded":
        return
    net.layers(config.trainer.shard)
    if config.callbacks.probe.every:
        raise ConfigError("callbacks.probe.every needs whole weights on one device: with trainer.strategy=sharded, set it to 0")
    is_built = net.stored_node is not None or not config.model.is_object
    if config.evaluation.at_end and not is_built:
        raise ConfigError("evaluation.at_end with trainer.strategy=sharded needs a model that the config can rebuild")


def build_callbacks(
    config: CallbacksConfig, module: TrainingModule, data: DataModule, folder: Path, state: Mapping[str, Any]
) -> list[L.Callback]:
    """Return the callbacks of the run: ours, the configured ones, and ``LastCheckpoint`` (it also handles signals).

    Args:
        state: plain data to store in every checkpoint (``stored_state``).
    """
    options = module.options
    callbacks: list[Any] = [StepLog(options.log_every, module.net.config, options.peak_tflops)]
    if options.stop_at is not None:
        callbacks.append(StopAt(**to_dict(options.stop_at)))
    if config.probe.every:
        callbacks.append(
            Probe(folder, data.probe_batch(config.probe.batch_size), config.probe, data.texts, partial(questions_of, data.task))
        )
    if config.samples.every:
        callbacks.append(build_samples(config.samples, module.seed, data, folder, state["config"]["data"]))
    if config.progress:
        callbacks.append(progress())
    if options.ckpt_every:
        best = BestCheckpoint(folder / "checkpoints", options.monitor, options.monitor_mode)
        callbacks.append(best)
    callbacks.append(WandbExtras(state["config"], folder, **to_dict(config.wandb)))
    last = LastCheckpoint(folder / "checkpoints", options, state)
    # save before WeightAveraging copies the average into the model at the end
    before = LambdaCallback(on_train_end=last.on_train_end)
    return [Averages(), before, *callbacks, *build_all(config.parts, "callbacks", L.Callback), last]


def build_samples(options: SamplesConfig, seed: int, data: DataModule, folder: Path, node: Mapping[str, Any]) -> Samples:
    """Return the callback that writes samples.

    Args:
        node: the node of the data, for its chat template.

    Raises:
        ConfigError: the data has no tokenizer, or a character of a prompt is not in its vocabulary.
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
    """Build Lightning's Trainer. It logs to ``metrics.csv`` from row ``done`` on, and to ``loggers``.

    ``TrainingModule`` does its own clipping and logging, and the loaders of ``DataModule`` give each process its own batches.

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
        "deterministic": options.deterministic or None,  # False would override torch.use_deterministic_algorithms
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
        options_text = f"trainer.strategy={options.strategy} with trainer.accelerator={options.accelerator}"
        raise ConfigError(
            f"{options_text} and trainer.devices={options.devices} cannot be used: {first_line(error)}"
        ) from error
    # Before every micro-batch, Lightning waits for the device and broadcasts whether SIGTERM was received. LastCheckpoint shares
    # signals at fewer steps. There is no public switch for this; pyproject.toml bounds the version of lightning.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


def key_of_argument(name: str) -> str | None:
    """Return the key for an argument of Lightning's Trainer, or None if the Trainer has no such argument.

    >>> key_of_argument("gradient_clip_val"), key_of_argument("devices"), key_of_argument("benchmark"), key_of_argument("foo")
    ('trainer.clip', 'trainer.devices', 'trainer.extra.benchmark', None)
    """
    if name not in parameter_names(L.Trainer):
        return None
    return REPLACED.get(name, f"trainer.{name}" if name in defaults(TrainerConfig) else f"trainer.extra.{name}")


def check_arguments(extra: Mapping[str, Any]) -> None:
    """Refuse entries of ``trainer.extra`` that are not arguments of Lightning's Trainer, or that have a key of their own.

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
    """Refuse arguments that have no effect on our training step or data.

    Raises:
        ConfigError: ``extra`` has such an argument.
    """
    of_epochs = {"limit_train_batches", "check_val_every_n_epoch", "min_epochs", "reload_dataloaders_every_n_epochs"}
    idle = {
        "has no effect: the training step clips by norm": {"gradient_clip_algorithm"},
        "has no effect on the data of a Task": {"use_distributed_sampler", *of_epochs},
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
    """Refuse callbacks of Lightning whose result would be lost, or that change the batches of a step by epoch.

    Raises:
        ConfigError: ``StochasticWeightAveraging`` or ``GradientAccumulationScheduler``.
    """
    for callback in callbacks:
        if isinstance(callback, StochasticWeightAveraging):
            raise ConfigError(
                "callbacks: StochasticWeightAveraging averages at the end of the last epoch, after the last validation and checkpoint, "
                "so its result would not be saved: use 'callbacks=[default,ema]' to average by step"
            )
        if isinstance(callback, GradientAccumulationScheduler):
            raise ConfigError(
                "callbacks: GradientAccumulationScheduler changes the micro-batches of a step by epoch, but the data of a Task has only "
                "one epoch: set trainer.accumulate"
            )


def epoch_hooks(callbacks: Sequence[L.Callback]) -> list[str]:
    """Return a line for each hook of a user's callback that Lightning calls once an epoch, because a run is a single epoch."""
    return [
        f"callbacks: {type(callback).__name__}.{hook} is called once, because Lightning counts the whole run as one epoch: for a call "
        "after each validation, use on_validation_end"
        for callback in callbacks
        for hook in ("on_train_epoch_start", "on_train_epoch_end")
        if getattr(type(callback), hook).__module__.partition(".")[0] not in ("lightning", "pytorch_lightning", "minitx")
    ]


def place_of(options: TrainerConfig) -> dict[str, Any]:
    """Return the arguments of Lightning's Trainer for devices, strategy, precision and checkpoints."""
    device = device_of(options.accelerator)
    precision: str | None = cpu_precision(options.precision) if device.type == "cpu" else options.precision
    plugins: list[Any] = []
    if options.strategy == "sharded" and precision == "64-true":  # Lightning refuses this by name, but not as a plugin
        plugins, precision = [*plugins, DoublePrecision()], None
    elif precision == "bf16-mixed":  # for unknown devices Lightning would use CUDA's autocast
        plugins, precision = [*plugins, MixedPrecision("bf16-mixed", device.type)], None
    strategy: Strategy = SingleDeviceStrategy(device)  # for unknown devices Lightning would use the CPU
    if options.strategy == "sharded":
        strategy = Sharded(options.world_size)
    elif options.strategy == "ddp" or options.world_size > 1:
        strategy = DDPStrategy(gradient_as_bucket_view=True)
    where = {"accelerator": options.accelerator, "devices": options.devices, "num_nodes": options.num_nodes}
    return {**where, "strategy": strategy, "plugins": plugins, "precision": precision}


# --- training


def log_on_rank_zero(text: str) -> None:
    """Log a text in the process of rank 0."""
    if not rank():
        log.info("%s", text)


def fit(
    trainer: L.Trainer, module: TrainingModule, data: DataModule, ckpt_path: str | None = None, on_nonfinite: str = "stop"
) -> int | None:
    """Train, and validate at the last step. With ``on_nonfinite=record``, return the first non-finite step, or None.

    Raises:
        ConfigError: Lightning refuses the options.
        NonFiniteError: with ``on_nonfinite=stop``, a step is not finite.
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
    "overridden .on_before_batch_transfer.",  # the module checks masks there, before they are copied to the device
    "does not have many workers",  # one process loads faster than our models train
    "Checkpoint directory .* exists and is not empty",  # the folder of the run that is resumed
    "dataloader is not resumable",  # it is: batches are addressed by step
    "in eval mode at the start of training",  # build_network logs these modules
    "isinstance.*LeafSpec.*is deprecated",  # in Lightning's own code, for every batch
    "sync_dist=True",  # metrics are already reduced over ranks
    "FSDP2-wrapped module.*view tensor",  # no block changes its output in place
    "WeightAveraging callback with a model that overrides",  # configure_model only shards
    "WeightAveraging callback, but loading a checkpoint outside",  # evaluation uses the averaged weights
)
"""Warnings of Lightning and torch that do not help a user, each with the reason."""


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """A context that hides Lightning's notices (devices, tips, advice about workers), but not the table of ``ModelSummary``."""
    quiet = {
        "lightning.pytorch": logging.WARNING,
        "lightning.pytorch.callbacks.model_summary": logging.INFO,  # users add this callback to see its table
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
