"""A run that is ready to start: ``Run.fit`` trains, validates and evaluates it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import distributed, nn

from minitx.config import ConfigError, EvaluationConfig, Part, to_dict
from minitx.config.schema import first_line, require
from minitx.data.datamodule import DataModule
from minitx.training import rank
from minitx.training.checkpoint_callbacks import Averages, BestCheckpoint, LastCheckpoint, check_whole_weights, early_end
from minitx.training.metrics_rows import StepLog
from minitx.training.module import TrainingModule
from minitx.training.nonfinite import NonFiniteError
from minitx.training.outcome import summarise
from minitx.training.resume_checks import check_free
from minitx.training.run_folder import run_folder
from minitx.training.summary import summary
from minitx.training.trackers import finish_wandb, resuming, send_facts
from minitx.training.trainer import build_trainer
from minitx.training.unsupported import epoch_hooks

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a run needs, checked but not started.

    Attributes:
        module: the network, the objective, the optimizer, the schedule and the options of the trainer.
        data: the data.
        callbacks, loggers: the parts of the config, by name.
        evaluation: the options of the evaluation after training.
        on_nonfinite: what ends a run whose loss or gradient is not finite (``RunConfig.on_nonfinite``).
        description: the objective, the optimizer and the schedule in one line.
        state: plain data to store in every checkpoint.
        ckpt_path: the checkpoint to resume from, or None.
        resumed_step: the number of steps before that checkpoint, or 0.
    """

    module: TrainingModule
    data: DataModule
    callbacks: Mapping[str, Part | None]
    loggers: Mapping[str, Part | None]
    evaluation: EvaluationConfig
    on_nonfinite: str
    description: str
    state: Mapping[str, Any]
    ckpt_path: str | None
    resumed_step: int

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
        module, data, options = self.module, self.data, self.module.options
        callbacks = build_callbacks(self, folder)
        parts = self.loggers if self.ckpt_path is None else resuming(self.loggers, folder)
        loggers = [*build_all(parts, "logger", Logger, save_dir=str(folder)).values()]
        check_free(folder, self.ckpt_path)  # again, because another run may have started here in the meantime
        with run_folder(folder, files or {}), finish_wandb():
            trainer = build_trainer(options, folder, loggers, callbacks, self.resumed_step, checkpoints)
            log_on_rank_zero(summary(trainer, module, data, self.description, folder, self.resumed_step))
            for line in epoch_hooks(callbacks):
                log_on_rank_zero(line)
            send_facts(trainer, self.state["config"], (files or {}).get("command.txt"))
            nonfinite = self._train(trainer)
            metrics = {} if nonfinite else dict(trainer.callback_metrics)
            if nonfinite is None and (self.evaluation.at_end or self.evaluation.test):
                from minitx.training.evaluation import evaluate_splits

                metrics = evaluate_splits(trainer, module, data, self.evaluation, folder, self.state["model"])
            trainer.strategy.barrier()  # the result is read from files that the first process writes
        return summarise(folder, trainer.global_step, nonfinite, metrics, data.task.floors, module.network)

    def _train(self, trainer: L.Trainer) -> NonFiniteError | None:
        """Train, and validate at the last step. With ``on_nonfinite=record``, return the error that ended the run, or None."""
        signals = next(each for each in trainer.callbacks if isinstance(each, LastCheckpoint))  # type: ignore[attr-defined]
        try:
            with signals, self._noting_gradients(trainer) as self.module.reached:
                trainer.fit(self.module, datamodule=self.data, ckpt_path=self.ckpt_path, weights_only=True)
        except NonFiniteError as error:
            if self.on_nonfinite == "stop":
                raise
            return error
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
        if not isinstance(trainer.strategy, DDPStrategy):
            return nullcontext()
        from minitx.training.unused_parameters import FIND_UNUSED, reached_by_gradients

        return nullcontext() if self.module.options.strategy == FIND_UNUSED else reached_by_gradients(self.module.network)


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
    """Return the callbacks of a run: ours, the config's, and ``LastCheckpoint`` (it also handles signals).

    A callback of the config gets ``folder``, ``rows`` and ``seed`` if it has arguments of these names.
    """
    options, module = run.module.options, run.module
    parts = build_all(run.callbacks, "callbacks", L.Callback, folder=folder, rows=run.data, seed=module.seed)
    check_whole_weights(parts, is_sharded=options.strategy == "sharded")
    last = LastCheckpoint(folder / "checkpoints", options, run.state)
    callbacks: list[Any] = [Averages(last), StepLog(options.log_every, module.net.config, options.peak_tflops)]
    if options.stop_at is not None:
        from minitx.training.stop_at_value import StopAt

        callbacks.append(StopAt(**to_dict(options.stop_at)))
    if options.ckpt_every:
        callbacks.append(BestCheckpoint(folder / "checkpoints", options.monitor, options.monitor_mode))
    return [*callbacks, *parts.values(), last]


def log_on_rank_zero(text: str) -> None:
    """Log a text in the process of rank 0."""
    if not rank():
        log.info("%s", text)
