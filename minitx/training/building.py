"""Build the parts of a run from its config: data, network and training module. Each is ours or the user's own."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn

from minitx.config import ConfigError, OptimizerConfig, Part, RunConfig, TransformerConfig, to_dict
from minitx.config.checks import first_line, nearest
from minitx.data.module import DataModule, load_task
from minitx.data.task import Task
from minitx.data.tokenizers import Tokenizer
from minitx.nn.models import build_model
from minitx.nn.modes import evaluating
from minitx.training.calling import Caller, config_of, is_of_transformers, set_training, unwrapped
from minitx.training.hardware import device_type
from minitx.training.module import TrainingModule
from minitx.training.objectives import CrossEntropy, build_objective, check_head, checked_sums
from minitx.training.optimizers import build_optimizer, build_schedule, parameter_groups
from minitx.training.parts import build, core_of, named_by
from minitx.training.start import check_scale_of, load_start, start_from

log = logging.getLogger(__name__)

DEFAULT_BATCH_SIZE = 32
"""The default of ``data.batch_size`` for a ``Task`` of the user's own."""


# --- data


def open_data(
    config: RunConfig,
    data: Task | L.LightningDataModule | None = None,
    tokenizer: Tokenizer | None = None,
    batch_size: int = DEFAULT_BATCH_SIZE,
) -> L.LightningDataModule:
    """Return the data of a run: our data module for a ``Task``, or the ``LightningDataModule`` itself.

    Args:
        data: an object to use instead of ``config.data``.
        tokenizer: a tokenizer to use, for example that of a checkpoint. Default: that of ``init_from``.

    Raises:
        ConfigError: the data cannot be read, or ``_target_`` returns neither of the two.
    """
    if tokenizer is None and config.init_from.path is not None:
        tokenizer = load_start(config.init_from)[2]
        asked = getattr(config.data, "tokenizer", None)
        if tokenizer is None and data is None and asked in ("char", "bpe"):
            raise ConfigError(
                f"data.tokenizer={asked} would be a new tokenizer, whose ids the weights of init_from.path={config.init_from.path} do "
                "not know, and none is stored with them: data.tokenizer must name the file or folder of theirs"
            )
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": 0}
    if data is None and not isinstance(config.data, Mapping):
        data = load_task(config.data, tokenizer)
        options = {name: getattr(config.data, name) for name in options}
    elif data is None:
        assert isinstance(config.data, Mapping)
        options |= {name: config.data[name] for name in options if name in config.data}
        data = _own_data(config.data, config.seed, tokenizer, options)
    if isinstance(data, L.LightningDataModule):
        return data
    if not isinstance(data, Task):
        raise ConfigError(f"data must be a Task or a LightningDataModule, got {type(data).__name__}")
    trainer = config.trainer
    trainer.check_rows(options["batch_size"])
    return DataModule(
        data,
        **options,
        seed=config.seed,
        max_steps=trainer.max_steps,
        accumulate=trainer.accumulate,
        val_batch_size=trainer.val_batch_size,
        repeat_first=trainer.overfit,
    )


def _own_data(node: Part, seed: int, tokenizer: Tokenizer | None, options: Mapping[str, Any]) -> Any:
    """What the ``_target_`` of ``data`` gives; ``options`` that it does not name are those of our loader."""
    names = named_by(node, "data")
    given = {name: value for name, value in node.items() if name in names or name not in options}
    if tokenizer is not None and "tokenizer" in names:
        given.pop("tokenizer", None)
    return build(given, "data", {**options, "tokenizer": tokenizer, "seed": seed})


# --- model

# what a task asks of a model: architecture and head
_MODELS_OF = {
    "language_model": (("decoder", "lm"),),
    "masked_lm": (("encoder", "lm"),),
    "seq2seq": (("encoder_decoder", "lm"),),
    "classify": (("encoder", "sequence"), ("vision", "sequence")),
    "tag": (("encoder", "token"),),
}


def build_network(config: RunConfig, data: L.LightningDataModule, model: nn.Module | None = None) -> nn.Module:
    """Return the network of a run. Weights come from ``init_from`` if it is set. Otherwise they depend only on the seed.

    Raises:
        ConfigError: the model cannot be built or does not fit the data.
    """
    torch.manual_seed(config.seed)
    if model is None and isinstance(config.model, TransformerConfig):
        shape = fit_model_config(config.model, data)
        if config.init_from.path is not None:
            check_scale_of(config.init_from, shape)
        try:
            model = build_model(shape, core_of(shape))
        except (ValueError, TypeError, RuntimeError, MemoryError) as error:  # what torch says of sizes, it says in many lines
            raise ConfigError(f"model cannot be built: {first_line(error)}") from error
    elif model is None:
        assert isinstance(config.model, Mapping)
        model = build(config.model, "model", decided_fields(data))
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model._target_={config.model['_target_']} must give a torch.nn.Module, got {type(model).__name__}"
            )
    check_network(model, decided_fields(data))
    if parts := set_training(model):
        log.info("model: in evaluation mode, as given: %s", ", ".join(parts[:3]) + (", ..." if len(parts) > 3 else ""))
    if config.init_from.path is not None:
        start_from(config.init_from, model)
    if config.trainer.precision == "64-true":
        to_float64(model)  # Lightning would, after it has loaded a checkpoint into float32
    return model


def check_network(network: nn.Module, fields: Mapping[str, Any]) -> None:
    """Refuse a network that cannot be trained as it is, and say what of it does not take part.

    Args:
        fields: what the data decide, such as ``vocab_size`` and ``num_labels``.

    Raises:
        ConfigError: the network is a LightningModule, or its vocabulary or number of labels is smaller than that of the data.
    """
    network = unwrapped(network)
    name, config = type(network).__name__, getattr(network, "config", None)
    if isinstance(network, L.LightningModule):
        raise ConfigError(
            f"model: {name} is a LightningModule, whose training_step and configure_optimizers would not run: give its network as model, "
            "its loss as objective and its optimizer as optimizer"
        )
    for key, what in (("vocab_size", "the vocabulary"), ("num_labels", "the number of labels")):
        known, wanted = getattr(config, key, None), fields.get(key)
        if key == "num_labels" and not is_of_transformers(
            network
        ):  # a wrapper may show the config of a part, with another head
            continue
        if known and wanted and known < wanted:
            raise ConfigError(f"model: {what} of {name}, {known:,}, is smaller than that of the data, {wanted:,}")
        if known and wanted and known > wanted:
            log.info("model: %s of %s, %s, is larger than that of the data, %s", what, name, f"{known:,}", f"{wanted:,}")
    if hasattr(config, "output_router_logits"):
        log.info("model: %s is a mixture of experts, and its router loss is not part of the objective", name)


def to_float64(network: nn.Module) -> None:
    """Convert a network to float64, and what it gets: Lightning converts only the batches of its own loops."""
    network.double().register_forward_pre_hook(_in_float64, with_kwargs=True)


def _in_float64(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a network, with numbers such as pixels in float64."""
    wide = {name: x.double() for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return args, {**inputs, **wide}


def decided_fields(data: L.LightningDataModule) -> dict[str, Any]:
    """Return the fields of a model that the data decide, under common names such as ``num_classes``."""
    task = getattr(data, "task", None)
    fields = dict(task.model_fields if isinstance(task, Task) else getattr(data, "model_fields", {}))
    for name, other in (("num_labels", "num_classes"), ("num_classes", "num_labels")):
        if name in fields:
            fields.setdefault(other, fields[name])
    return fields


def fit_model_config(model: TransformerConfig, data: L.LightningDataModule) -> TransformerConfig:
    """Return the model's config with the fields that the data decide: vocabulary, labels, images, special ids.

    Raises:
        ConfigError: the model is for another task or too small for the data, or there are fewer rows than in a batch.
    """
    fields = decided_fields(data)
    fields.pop("num_classes", None)
    if isinstance(data, DataModule):
        data.check_batch()
        _check_kind(model, data.task, fields)
    model.check_length(max(fields.pop(name, 0) for name in ("max_source_len", "max_target_len")))
    found = {}
    known = [field.name for field in dataclasses.fields(model)]
    for name, value in fields.items():
        if name not in known:
            raise ConfigError(
                f"data decides model.{name}={value}, but a model has no such field{nearest(name, known, 'model.')}"
            )
        given = getattr(model, name)
        if given and not name.endswith("_id") and (given < value if name == "vocab_size" else given != value):
            what = {"vocab_size": "the vocabulary"}.get(name, name)
            how = "is smaller than" if name == "vocab_size" else "differs from"
            raise ConfigError(f"model.{name}={given} {how} {what} of the data, {value}")
        found[name] = value if given is None or (given == 0 and not name.endswith("_id")) else given
    return dataclasses.replace(model, **found)


def _check_kind(model: TransformerConfig, task: Task, fields: Mapping[str, Any]) -> None:
    """Refuse a model for another kind of task. A task of another kind than ours takes any."""
    if task.kind not in _MODELS_OF:
        return
    kinds = [kind for kind in _MODELS_OF[task.kind] if (kind[0] == "vision") == ("image_size" in fields)]
    if (model.architecture, model.head) not in kinds:
        wanted = " or ".join(f"model.architecture={kind} with model.head={head}" for kind, head in kinds)
        raise ConfigError(
            f"model.architecture={model.architecture} with model.head={model.head} does not fit {task.name}, which needs {wanted}"
        )


# --- the training module


def build_module(
    config: RunConfig, data: L.LightningDataModule, network: nn.Module, objective: Callable[..., Any] | None = None
) -> TrainingModule:
    """Return a ``TrainingModule`` with network, objective, optimizer and schedule.

    Raises:
        ConfigError: the model cannot run, or the objective or the optimizer rules do not fit it.
    """
    ours = config_of(network)
    built = build_objective(config.objective if objective is None else objective)
    if isinstance(built, CrossEntropy):
        check_head(built, network, ours.head if ours else "none")
    head_dim = ours.width_per_head if ours else 1
    if isinstance(config.optimizer, OptimizerConfig):
        parameter_groups(network, config.optimizer, head_dim=head_dim)  # refuses its rules before the run has a folder
    if isinstance(data, DataModule) and device_type(config.trainer) == "cpu":
        try_once(network, built, data)
    tokenizer = getattr(getattr(data, "task", data), "tokenizer", None)
    return TrainingModule(
        network,
        built,
        partial(build_optimizer, node=config.optimizer, head_dim=head_dim),
        partial(build_schedule, node=config.schedule, max_steps=config.trainer.max_steps),
        clip=config.trainer.clip,
        compile=config.trainer.compile,
        seed=config.seed,
        state={
            "config": to_dict(config),
            "model": stored_node(config, data, ours, network),
            "tokenizer": tokenizer.to_dict() if isinstance(tokenizer, Tokenizer) else None,
        },
    )


def stored_node(
    config: RunConfig, data: L.LightningDataModule, ours: TransformerConfig | None, network: nn.Module
) -> dict[str, Any]:
    """Return the description of a model in a checkpoint: the config of one of ours, the user's node with the fields that the data decided, or the class."""
    if ours is not None:
        return dict(to_dict(ours))
    if isinstance(config.model, Mapping):
        names = named_by(config.model, "model")
        return {**{name: value for name, value in decided_fields(data).items() if name in names}, **config.model}
    return {"_target_": f"{type(network).__module__}.{type(network).__qualname__}"}


def try_once(network: nn.Module, objective: Callable[..., Any], data: DataModule) -> None:
    """Run one row through network and objective to find errors early. No random number is drawn.

    Raises:
        ConfigError: the backend does not exist or does not support the options, or a key is missing in the batch.
    """
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    batch = {name: tensor.to(device) for name, tensor in data.probe_batch(1).items()}
    caller = Caller(network)
    caller.check(batch)
    try:
        with evaluating(network), torch.no_grad(), torch.random.fork_rng(devices=[]):
            checked_sums(objective(caller(batch), batch))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model cannot be run: {first_line(error)}") from error
