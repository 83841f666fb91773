"""One training run from its config: build, fit, validate, summarise. What the command line and the lab both call."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from minitx.config import ConfigError, RunConfig, TransformerConfig, to_dict
from minitx.config.checks import first_line
from minitx.data.module import DataModule, build_data
from minitx.data.tokenizers import Tokenizer
from minitx.nn.models import TransformerModel, build_model
from minitx.training.callbacks import BarProgress, LastCheckpoint, StepLog, StoppedError, best_checkpoint, progress
from minitx.training.checkpoint import read_checkpoint
from minitx.training.devices import check_devices, check_parallel, place_of
from minitx.training.evaluation import Evaluation, evaluate
from minitx.training.folder import make_folder, rank_log
from minitx.training.hardware import runs_on_cpu
from minitx.training.measures import check_measures, measures
from minitx.training.metrics import MetricsFile
from minitx.training.module import NonFiniteError, TrainingModule, network_inputs
from minitx.training.objectives import build_head_objective, build_objective, check_head
from minitx.training.optimizers import build_optimizer, parameter_groups
from minitx.training.outcome import summarise
from minitx.training.parallel import whole_state
from minitx.training.probes import Probe
from minitx.training.schedules import lr_factor

log = logging.getLogger(__name__)


def train(
    config: RunConfig,
    folder: Path,
    *,
    files: Mapping[str, str] | None = None,
    extras: Callable[[], tuple[Sequence[Any], Sequence[L.Callback]]] = lambda: ((), ()),
    start: tuple[TransformerModel, Tokenizer] | None = None,
) -> dict[str, Any]:
    """Train as ``config`` says, in ``folder``, and return the result as plain data (see ``outcome.summarise``).

    Args:
        folder: gets ``metrics.csv``, ``probes.jsonl`` where probes are on, and ``checkpoints/``; made only once data,
            model and checkpoint are known to be good.
        files: further text files for the folder, by name (``config.yaml``, ``command.txt``).
        start: a network and a tokenizer to go on with, in place of new ones.
        extras: makes (loggers, callbacks) in addition to the run's own, once the folder is there.

    Raises:
        ConfigError: what only the data or the machine can tell (vocabulary, missing device, a checkpoint of another model).
        NonFiniteError: with ``on_nonfinite=stop``. StoppedError: on SIGINT or SIGTERM, after the checkpoint was written.
    """
    if config.trainer.threads is not None:
        torch.set_num_threads(config.trainer.threads)
    with quiet_lightning(), ExitStack() as stack:
        check_devices(config.trainer)
        network, tokenizer = start or (None, None)
        data = prepare_data(config, tokenizer)
        model_config = fit_model_config(config.model if network is None else network.config, data)
        check_measures(config, model_config, data)
        check_parallel(model_config, config.trainer, probes=config.callbacks.probe.every > 0)
        module = build_module(config, model_config, data, network)
        done = int(load_checkpoint(Path(config.ckpt_path), model_config)["global_step"]) if config.ckpt_path else 0
        make_folder(folder, files or {})
        loggers, callbacks = extras()
        stack.enter_context(rank_log(folder))
        metrics, guard = MetricsFile(folder / "metrics.csv", done), last_checkpoint(config, folder)
        everyone = [*own_callbacks(config, data, folder), *callbacks, guard]
        trainer = build_trainer(config, folder, [metrics, *loggers], everyone)
        nonfinite_step, measured = None, dict[str, float]()
        try:
            with guard:
                trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path, weights_only=True)
            finish(trainer, module, data, config, folder)
            measured = look_back(trainer, module, data, config, folder)
        except NonFiniteError as error:
            if config.on_nonfinite == "stop":
                raise
            nonfinite_step = error.step + 1
    return summarise(
        folder,
        floors=data.task.floors,
        recall=data.task.recall,
        chance=data.task.chance,
        nonfinite_step=nonfinite_step,
        num_parameters=sum(p.numel() for p in module.network.parameters()),
        measures=measured,
    )


def prepare_data(config: RunConfig, tokenizer: Tokenizer | None = None) -> DataModule:
    """The data module, opened; it reads text with ``tokenizer``, if there is one, or with its own."""
    return build_data(
        config.data,
        seed=config.seed,
        max_steps=config.trainer.max_steps,
        accumulate=config.trainer.accumulate,
        val_batch_size=config.trainer.val_batch_size,
        tokenizer=tokenizer,
    )


# what a task asks of a model: architecture and head
_MODELS_OF = {
    "language_model": (("decoder", "lm"),),
    "masked_lm": (("encoder", "lm"),),
    "seq2seq": (("encoder_decoder", "lm"),),
    "classify": (("encoder", "sequence"), ("vision", "sequence")),
}


def fit_model_config(model: TransformerConfig, data: DataModule) -> TransformerConfig:
    """The model's config with what the data decides: vocabulary, labels, images, special ids.

    Raises:
        ConfigError: a model for another task; sizes that are smaller than the data's; fewer rows than a batch.
    """
    data.check_batch()
    fields = dict(data.task.model_fields)
    longest = max(fields.pop(name, 0) for name in ("max_source_len", "max_target_len"))
    if model.position == "learned" and longest > model.max_len:
        raise ConfigError(f"model.max_len={model.max_len} must reach the rows of the data, which have {longest} tokens")
    kinds = [kind for kind in _MODELS_OF[data.task.kind] if (kind[0] == "vision") == ("image_size" in fields)]
    if (model.architecture, model.head) not in kinds:
        wanted = " or ".join(f"model.architecture={kind} with model.head={head}" for kind, head in kinds)
        raise ConfigError(
            f"model.architecture={model.architecture} with model.head={model.head} does not fit {data.task.name}, "
            f"which needs {wanted}"
        )
    found = {}
    for name, value in fields.items():
        given = getattr(model, name)
        if given and not name.endswith("_id") and (given < value if name == "vocab_size" else given != value):
            what = {"vocab_size": "the vocabulary"}.get(name, name)
            how = "is smaller than" if name == "vocab_size" else "differs from"
            raise ConfigError(f"model.{name}={given} {how} {what} of the data, {value}")
        found[name] = value if given is None or (given == 0 and not name.endswith("_id")) else given
    return dataclasses.replace(model, **found)


def build_module(
    config: RunConfig, model_config: TransformerConfig, data: DataModule, network: TransformerModel | None = None
) -> TrainingModule:
    """Network, objective and optimizer factory in a TrainingModule; the initial weights of a new one depend on the seed alone.

    Raises:
        ConfigError: a model that cannot be built or run, optimizer rules that do not fit it.
    """
    torch.manual_seed(config.seed)
    try:
        network = build_model(model_config) if network is None else network
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:  # what torch says of sizes, it says in many lines
        raise ConfigError(f"model cannot be built: {first_line(error)}") from error
    network.config = model_config
    check_head(config.objective, network, model_config.head)
    if runs_on_cpu(config.trainer):
        try_forward(network, data)
    try:
        parameter_groups(network, config.optimizer, head_dim=model_config.width_per_head)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if config.trainer.precision == "64-true":
        network.double()  # Lightning would, after it has loaded a checkpoint into float32
    state = {
        "config": to_dict(config),
        "model": to_dict(model_config),
        "tokenizer": data.task.tokenizer.to_dict() if data.task.tokenizer else None,
    }
    return TrainingModule(
        network,
        build_objective(config.objective),
        partial(build_optimizer, config=config.optimizer, head_dim=model_config.width_per_head),
        lr_factor(config.schedule, config.trainer.max_steps),
        head_objective=build_head_objective(config.objective),
        router_loss=config.objective.router_loss if model_config.num_experts else 0.0,
        clip=config.optimizer.clip,
        compile=config.trainer.compile,
        seed=config.seed,
        state=state,
    )


def try_forward(network: torch.nn.Module, data: DataModule) -> None:
    """One row through the network; draws no random number.

    Raises:
        ConfigError: options that the backend refuses, or a backend that nobody knows.
    """
    try:
        with torch.no_grad():
            network.eval()(**network_inputs(data.probe_batch(1)))
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"model cannot be run: {first_line(error)}") from error
    network.train()


def last_checkpoint(config: RunConfig, folder: Path) -> LastCheckpoint:
    """The keeper of ``last.ckpt``, which listens for signals even where the run keeps no checkpoint."""
    options = config.trainer
    path = folder / "checkpoints" / "last.ckpt" if options.ckpt_every else None
    return LastCheckpoint(path, options.ckpt_every, options.ckpt_minutes, options.log_every)


def own_callbacks(config: RunConfig, data: DataModule, folder: Path) -> list[Any]:
    """The run's own callbacks but the keeper of the last checkpoint."""
    own: list[Any] = [StepLog(config.trainer.log_every)]
    if config.callbacks.probe.every:
        own.append(Probe(folder, data.probe_batch(config.callbacks.probe.batch_size), config.callbacks.probe, data.texts))
    if config.callbacks.progress:
        own.append(progress())
    if config.trainer.ckpt_every:
        own.append(best_checkpoint(folder / "checkpoints"))
    return own


def build_trainer(config: RunConfig, folder: Path, loggers: Sequence[Any], callbacks: Sequence[L.Callback]) -> L.Trainer:
    """A Lightning trainer whose every count is in optimizer steps."""
    options = config.trainer
    steps = min(options.val_every or options.max_steps, options.max_steps)
    trainer = L.Trainer(
        **place_of(options),
        max_steps=options.max_steps,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=steps * options.accumulate,
        check_val_every_n_epoch=None,
        limit_val_batches=options.val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        deterministic=options.deterministic,
        use_distributed_sampler=False,
        logger=list(loggers),
        callbacks=list(callbacks),
        enable_progress_bar=any(isinstance(callback, BarProgress) for callback in callbacks),
        enable_model_summary=False,
        default_root_dir=folder,
    )
    # a broadcast before every micro-batch, to share a signal that LastCheckpoint shares when it is time
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer


def finish(trainer: L.Trainer, module: TrainingModule, data: DataModule, config: RunConfig, folder: Path) -> None:
    """Validate at the last step if the interval did not, and write the last checkpoint."""
    interval = config.trainer.val_every or config.trainer.max_steps
    if config.trainer.max_steps % min(interval, config.trainer.max_steps):
        trainer.validate(module, datamodule=data, verbose=False)
    if config.trainer.ckpt_every:
        trainer.save_checkpoint(folder / "checkpoints" / "last.ckpt")
    trainer.strategy.barrier()  # the result is read from files that the first process writes


def look_back(
    trainer: L.Trainer, module: TrainingModule, data: DataModule, config: RunConfig, folder: Path
) -> dict[str, float]:
    """What the finished network can do: the evaluation, if asked for, and the measures of the run; by the first process."""
    network: torch.nn.Module = module.network
    shape = TransformerConfig(**module.state["model"])
    if config.trainer.strategy == "sharded":
        state = whole_state(network)  # from all processes
        network = build_model(shape)
        network.to(next(iter(state.values())).dtype).load_state_dict(state)
    if not trainer.is_global_zero:
        return {}
    if config.evaluation.at_end:
        report(evaluate(network, data, config.evaluation), folder)
    return measures(network, shape, data, config)


def report(found: Evaluation, folder: Path) -> None:
    """An evaluation to the log and to ``evaluation.json``."""
    (folder / "evaluation.json").write_text(json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for line in found.lines():
        log.info("%s", line)


def load_checkpoint(path: Path, model_config: TransformerConfig) -> dict[str, Any]:
    """A checkpoint's plain content, checked against the model that is to continue it. Nothing in it is executed.

    Raises:
        ConfigError: no such file, not a checkpoint of ours, or one of another model (the fields are named).
    """
    checkpoint = read_checkpoint(path)
    saved = to_dict(TransformerConfig(**checkpoint["minitx"]["model"]))  # options that are younger than it, at their defaults
    wanted = to_dict(model_config)
    other = [f"{name} {saved.get(name)} != {value}" for name, value in wanted.items() if saved.get(name) != value]
    if other:
        raise ConfigError(f"ckpt_path={path} holds another model than the config asks for: {'; '.join(other)}")
    return checkpoint


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's notices (devices found, tips, advice about workers) out of our output."""
    quiet = {
        "lightning.pytorch": logging.WARNING,
        "lightning.fabric": logging.WARNING,
        "torch.distributed.tensor": logging.ERROR,
    }
    levels = {name: logging.getLogger(name).level for name in quiet}
    try:
        for name, level in quiet.items():
            logging.getLogger(name).setLevel(level)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
            warnings.filterwarnings("ignore", message=".*isinstance.*LeafSpec.*is deprecated.*")
            warnings.filterwarnings("ignore", message=".*dirpath has changed from.*")
            warnings.filterwarnings("ignore", message=".*found in cache.*precision.*")
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*")  # what is logged is the sum over ranks already
            warnings.filterwarnings("ignore", message=".*FSDP2-wrapped module.*view tensor.*")  # no block works in place
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


__all__ = ["StoppedError", "train"]
