"""One training run. ``built`` makes a ``Run`` from a config, and ``Run.fit`` trains, validates and evaluates it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import distributed, nn

from minitx.config import ConfigError, EvaluationConfig, Part, RunConfig, to_dict
from minitx.config.part import import_modules
from minitx.config.schema import Count, first_line, read, require
from minitx.config.training import LOADING
from minitx.data.datamodule import DataModule, in_steps, open_data
from minitx.data.task import Task
from minitx.training import rank
from minitx.training.callbacks import Averages, BestCheckpoint, LastCheckpoint, StepLog, StopAt, check_whole_weights, early_end
from minitx.training.checkpoints import check_free, check_resumed, load_start, stored_state
from minitx.training.devices import machine
from minitx.training.loggers import describe_training, finish_wandb, resuming, run_folder, send_facts, summarise, summary
from minitx.training.module import FIND_UNUSED, NonFiniteError, TrainingModule, build_module, reached_by_gradients
from minitx.training.net import Net, build_network, decided_fields, lent
from minitx.training.rehearse import rehearse
from minitx.training.trainer import build_trainer, check_extra, epoch_hooks, quiet_lightning

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
            model of minitx that was changed after its config built it, with ``load_model(path, model=...)``. The programs can
            only open data and objectives that a config names.
        batch_size: number of rows in a step, if ``data`` is a ``Task``. A ``LightningDataModule`` has its own batch size.

    Raises:
        ConfigError: the config does not match the data, the machine or the checkpoint, an argument has the wrong type, or the
            folder contains a run that is not resumed.
        NonFiniteError: with ``on_nonfinite=stop``, a loss or gradient is not finite.
        StoppedError: on SIGINT or SIGTERM, after the checkpoint was written.
    """
    folder = Path(folder)
    config = with_objects(config, batch_size, model=model, data=data, objective=objective)
    if config.trainer.plan:
        raise ConfigError("trainer.plan=true describes a run and does not train: call show_plan(config)")
    if config.ckpt_path == "last":
        config = dataclasses.replace(config, ckpt_path=str(folder / "checkpoints" / "last.ckpt"))
    check_free(folder, config.ckpt_path)
    with built(config) as run:
        if config.trainer.rehearse:
            rehearse(run)
        return run.fit(folder, files)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a run needs, checked but not started.

    Attributes:
        module: the network, the objective, the optimizer, the schedule and the options of the trainer.
        rows: the data.
        callbacks, loggers: the parts of the config, by name.
        evaluation: the options of the evaluation after training.
        on_nonfinite: what ends a run whose loss or gradient is not finite (``RunConfig.on_nonfinite``).
        description: the objective, the optimizer and the schedule in one line.
        state: plain data to store in every checkpoint.
        ckpt_path: the checkpoint to resume from, or None.
        done: the number of steps before that checkpoint, or 0.
    """

    module: TrainingModule
    rows: DataModule
    callbacks: Mapping[str, Part | None]
    loggers: Mapping[str, Part | None]
    evaluation: EvaluationConfig
    on_nonfinite: str
    description: str
    state: Mapping[str, Any]
    ckpt_path: str | None
    done: int

    def fit(
        self, folder: Path, files: Mapping[str, str] | None = None, checkpoints: CheckpointIO | None = None
    ) -> dict[str, Any]:
        """Train, validate and evaluate in ``folder``, and return the result (``summarise``).

        All callbacks and loggers are built before the folder is touched, so that a faulty part changes no file.

        Args:
            files: see ``train``.
            checkpoints: writes and reads the checkpoints; None: ``AtomicCheckpointIO``.

        Raises:
            ConfigError, NonFiniteError, StoppedError: see ``train``.
        """
        module, rows, options = self.module, self.rows, self.module.options
        callbacks = build_callbacks(self, folder)
        parts = self.loggers if self.ckpt_path is None else resuming(self.loggers, folder)
        loggers = [*build_all(parts, "logger", Logger, save_dir=str(folder)).values()]
        check_free(folder, self.ckpt_path)  # again, because another run may have started here in the meantime
        with run_folder(folder, files or {}), finish_wandb():
            trainer = build_trainer(options, folder, loggers, callbacks, self.done, checkpoints)
            log_on_rank_zero(summary(trainer, module, rows, self.description, folder, self.done))
            for line in epoch_hooks(callbacks):
                log_on_rank_zero(line)
            send_facts(trainer, self.state["config"], (files or {}).get("command.txt"))
            nonfinite_step = self._train(trainer)
            metrics = {} if nonfinite_step else dict(trainer.callback_metrics)
            if nonfinite_step is None and (self.evaluation.at_end or self.evaluation.test):
                from minitx.training.evaluation import evaluate_splits

                metrics = evaluate_splits(trainer, module, rows, self.evaluation, folder, self.state["model"])
            trainer.strategy.barrier()  # the result is read from files that the first process writes
        return summarise(folder, trainer.global_step, nonfinite_step, metrics, rows.task.floors, module.network)

    def _train(self, trainer: L.Trainer) -> int | None:
        """Train, and validate at the last step. With ``on_nonfinite=record``, return the first non-finite step, or None."""
        signals = next(each for each in trainer.callbacks if isinstance(each, LastCheckpoint))  # type: ignore[attr-defined]
        try:
            with signals, self._noting_gradients(trainer) as self.module.reached:
                trainer.fit(self.module, datamodule=self.rows, ckpt_path=self.ckpt_path, weights_only=True)
        except NonFiniteError as error:
            if self.on_nonfinite == "stop":
                raise
            return error.step + 1
        except MisconfigurationException as error:
            raise ConfigError(f"model: {first_line(error)}") from error
        except ConfigError:
            if trainer.world_size == 1 and distributed.is_initialized():
                distributed.destroy_process_group()  # the next run of this process makes its own
            raise
        for line in early_end(trainer):
            log_on_rank_zero(line)
        return None

    def _noting_gradients(self, trainer: L.Trainer) -> AbstractContextManager[set[nn.Parameter] | None]:
        """A context for ``module.reached``. Only DDP that does not look for unused parameters must know it."""
        waits = isinstance(trainer.strategy, DDPStrategy) and self.module.options.strategy != FIND_UNUSED
        return reached_by_gradients(self.module.network) if waits else nullcontext()


# --- from the config to the run


def with_objects(config: RunConfig, batch_size: int, **objects: Any) -> RunConfig:
    """Check a config, import its modules, and return it with those of ``objects`` that are not None as parts."""
    model = objects["model"]
    if not isinstance(config, RunConfig):
        raise ConfigError(f"config must be a RunConfig, got {config!r:.60}")
    if not isinstance(model, nn.Module | None):
        raise ConfigError(f"model must be a torch.nn.Module, got {model!r:.60}")
    loading = {"data": {"batch_size": read(Count, batch_size, "batch_size")}}
    check_extra(config.trainer.extra)
    import_modules(config.imports)
    parts: dict[str, Any] = {
        name: Part.of_object(value, name, **loading.get(name, {})) for name, value in objects.items() if value is not None
    }
    return dataclasses.replace(config, **parts)


@contextmanager
def built(config: RunConfig) -> Iterator[Run]:
    """A context for the run of a config. In it, this process has the threads, generators and settings of the run.

    Raises:
        ConfigError: the parts of the config do not fit each other, the machine or the checkpoint.
    """
    with quiet_lightning(), machine(config.trainer):
        config, rows, network = open_parts(config)
        options = config.trainer
        parts = {name: getattr(config, name) for name in ("data", "objective", "optimizer", "schedule")}
        with lent(network, options.precision):
            module = build_module(network, rows, config.objective, config.optimizer, config.schedule, options, config.seed)
            net = module.net
            check_evaluation(config, rows.task, net)
            state = stored_state(to_dict(config), net.node(config.model, decided_fields(rows.task)), rows.task)
            yield Run(
                module=module,
                rows=rows,
                callbacks=config.callbacks,
                loggers=config.logger,
                evaluation=config.evaluation,
                on_nonfinite=config.on_nonfinite,
                description=describe_training(module, rows, config.optimizer, config.schedule),
                state=state,
                ckpt_path=config.ckpt_path,
                done=check_resumed(config.ckpt_path, parts, state),
            )


def open_parts(
    config: RunConfig, build: Callable[[Part, DataModule, str], nn.Module] = build_network, *, is_empty: bool = False
) -> tuple[RunConfig, DataModule, nn.Module]:
    """Return the config with epochs converted to steps, the data, and the network with the weights of ``init_from``.

    Args:
        build: builds the network.
        is_empty: whether the network has no numbers, so that no weights are loaded.
    """
    start = load_start(config.init_from)  # for the tokenizer, the labels and the weights; freed when this function returns
    tokenizer = None if start is None else start.tokenizer_for(config.data)
    rows = open_data(config.data, config.trainer, seed=config.seed, tokenizer=tokenizer)
    rows.number_labels_as(() if start is None else start.labels)
    network = build(config.model, rows, config.trainer.precision)
    if start is not None and not is_empty:
        start.load_into(network)
    return dataclasses.replace(config, trainer=in_steps(config.trainer, rows)), rows, network


def check_evaluation(config: RunConfig, task: Task, net: Net) -> None:
    """Check that the evaluation after training is possible. It rebuilds a sharded network.

    Raises:
        ConfigError: the data has no test split, or a network from Python cannot be rebuilt.
    """
    evaluation = config.evaluation
    if evaluation.test is not None and task.test is None:
        raise ConfigError(f"evaluation.test={evaluation.test}: the data has no test split")
    if evaluation.at_end and config.trainer.strategy == "sharded" and config.model.is_object and net.stored_node is None:
        raise ConfigError("evaluation.at_end with trainer.strategy=sharded needs a model that the config can rebuild")


def build_all(group: Mapping[str, Part | None], path: str, kind: type, **offered: Any) -> dict[str, Any]:
    """Build every entry of a group of callbacks or loggers that is not null, and return the results by name.

    Raises:
        ConfigError: an entry cannot be built, or is not a ``kind``.
    """
    entries = {}
    for name, part in group.items():
        if part is not None:
            entries[name] = part.at(f"{path}.{name}").build(**offered)
            cls = type(entries[name])
            require(
                isinstance(entries[name], kind),
                f"{path}.{name}._target_={part.name} must return a {kind.__name__} of the package lightning, got "
                f"{cls.__module__}.{cls.__qualname__}",
            )
    return entries


def build_callbacks(run: Run, folder: Path) -> list[L.Callback]:
    """Return the callbacks of a run: ours, those of the config, and ``LastCheckpoint`` (it also handles signals).

    A callback of the config gets ``folder``, ``rows`` and ``seed`` if it has arguments of these names.
    """
    options, module = run.module.options, run.module
    parts = build_all(run.callbacks, "callbacks", L.Callback, folder=folder, rows=run.rows, seed=module.seed)
    check_whole_weights(parts, is_sharded=options.strategy == "sharded")
    last = LastCheckpoint(folder / "checkpoints", options, run.state)
    callbacks: list[Any] = [Averages(last), StepLog(options.log_every, module.net.config, options.peak_tflops)]
    if options.stop_at is not None:
        callbacks.append(StopAt(**to_dict(options.stop_at)))
    if options.ckpt_every:
        callbacks.append(BestCheckpoint(folder / "checkpoints", options.monitor, options.monitor_mode))
    return [*callbacks, *parts.values(), last]


def log_on_rank_zero(text: str) -> None:
    """Log a text in the process of rank 0."""
    if not rank():
        log.info("%s", text)
