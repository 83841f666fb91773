"""One training run, from its config. ``build_run`` makes a ``Run``, and ``Run.fit`` trains, validates and evaluates it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from torch import nn

from minitx.config import ConfigError, Part, RunConfig, to_dict
from minitx.config.part import import_modules
from minitx.config.schema import Count, read
from minitx.config.training import LOADING
from minitx.data.datamodule import DataModule, in_steps, open_data
from minitx.data.task import Task
from minitx.training.checkpoint_files import stored_state
from minitx.training.devices import process_settings
from minitx.training.fit import Run
from minitx.training.input_dtype import prepared_network
from minitx.training.module import build_module
from minitx.training.net import Net
from minitx.training.network_building import build_network, decided_fields
from minitx.training.rehearse import rehearse
from minitx.training.resume_checks import check_free, check_resumed
from minitx.training.summary import describe_training
from minitx.training.trainer import quiet_lightning
from minitx.training.unsupported import check_extra


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
    with build_run(config) as run:
        if config.trainer.rehearse:
            rehearse(run)
        return run.fit(folder, files)


# --- from the config to the run


def with_objects(config: RunConfig, batch_size: int, **objects: Any) -> RunConfig:
    """Check a config, import its modules, and return it with each entry of ``objects`` that is not None as a part."""
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
def build_run(config: RunConfig) -> Iterator[Run]:
    """A context for the run of a config. In it, this process has the threads, generators and settings of the run.

    Raises:
        ConfigError: the parts of the config do not fit each other, the machine or the checkpoint.
    """
    with quiet_lightning(), process_settings(config.trainer):
        config, data, network = open_parts(config)
        options = config.trainer
        parts = {name: getattr(config, name) for name in ("data", "objective", "optimizer", "schedule")}
        with prepared_network(network, options.precision):
            module = build_module(network, data, config.objective, config.optimizer, config.schedule, options, config.seed)
            net = module.net
            check_evaluation(config, data.task, net)
            state = stored_state(to_dict(config), net.node(config.model, decided_fields(data.task)), data.task)
            yield Run(
                module=module,
                data=data,
                callbacks=config.callbacks,
                loggers=config.logger,
                evaluation=config.evaluation,
                on_nonfinite=config.on_nonfinite,
                description=describe_training(module, data, config.optimizer, config.schedule),
                state=state,
                ckpt_path=config.ckpt_path,
                resumed_step=check_resumed(config.ckpt_path, parts, state),
            )


def open_parts(
    config: RunConfig, build_empty: Callable[[Part, DataModule, str], nn.Module] | None = None
) -> tuple[RunConfig, DataModule, nn.Module]:
    """Return the config with epochs converted to steps, the data, and the network with the weights of ``init_from``.

    Args:
        build_empty: builds a network without numbers, and no weights are loaded. None: ``build_network``.
    """
    start: Any = None  # for the tokenizer, the labels and the weights; freed when this function returns
    if config.init_from.path is not None:
        from minitx.training.init_from import load_start

        start = load_start(config.init_from)
    tokenizer = None if start is None else start.tokenizer_for(config.data)
    data = open_data(config.data, config.trainer, seed=config.seed, tokenizer=tokenizer)
    data.number_labels_as(() if start is None else start.labels)
    network = (build_empty or build_network)(config.model, data, config.trainer.precision)
    if start is not None and build_empty is None:
        start.load_into(network)
    return dataclasses.replace(config, trainer=in_steps(config.trainer, data)), data, network


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
