"""One interface to any network: ``Net.of`` wraps our models, models of transformers, and any other module.

A ``Net`` calls its network with a batch, and provides its title, sizes, node for a checkpoint, text-generating module, layers
and head. ``build_network`` builds the network of a run.

Here, the *network* is the module that is trained, and the *model* is inside it: the same module, unless the network is a wrapper of
``torch.compile`` or PEFT. ``net`` is the ``Net`` of a network.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minitx.config import ConfigError, Part, TransformerConfig, to_dict
from minitx.config.part import FROM_PYTHON
from minitx.config.schema import require, stated
from minitx.config.training import MODEL
from minitx.data.seeding import seed_device
from minitx.data.task import Batch, Task, without_targets
from minitx.data.task_loading import FIRST_INPUT, lightning_base, overrides
from minitx.nn.arguments import Arguments
from minitx.nn.config_differences import changes_of, hooked_modules, joined
from minitx.nn.modes import evaluating
from minitx.nn.positions import position_ids_from

if TYPE_CHECKING:
    from minitx.data.datamodule import DataModule

log = logging.getLogger(__name__)

MASK_NAMES = {"key_mask": "attention_mask", "decoder_key_mask": "decoder_attention_mask"}
"""Names of masks: ours, and those in transformers, where masks contain 0 and 1."""


class Net:
    """A network that is called with those keys of a batch that are parameters of its ``forward``.

    * ``inputs`` is passed as the first parameter, unless the batch has a key with that parameter's name.
    * For ``**kwargs``, the keys of the annotation ``Unpack[...]`` count as parameters. Other keys are not passed.
    * If ``forward`` has no parameter ``key_mask``, the mask is passed as ``attention_mask`` with values 0 and 1. The same holds
      for ``decoder_key_mask`` and ``decoder_attention_mask``.

    Args:
        network: the network to call.
        model: the model inside the wrappers of ``torch.compile`` and PEFT. Its ``forward`` determines the keys.

    Attributes:
        config: the config, if the model is ours; else None.
        head_dim: the width of its heads; 1 if unknown.
        kind: the class name of the model.
    """

    config: TransformerConfig | None = None
    head_dim = 1

    @staticmethod
    def of(network: nn.Module) -> Net:
        """Return the ``Net`` for a network of any kind."""
        model = _inside(network)
        if isinstance(getattr(model, "config", None), TransformerConfig):
            return Ours(network, model)
        # checked by name, without importing transformers
        is_theirs = any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)
        return (OfTransformers if is_theirs else Net)(network, model)

    def __init__(self, network: nn.Module, model: Any) -> None:
        self.network, self.model, self.kind = network, model, type(model).__name__
        arguments = Arguments(model)
        self.names = [*arguments.names, *arguments.further]
        self.needed, self.unnamed = arguments.needed, arguments.unnamed
        self._keys: dict[tuple[str, ...], dict[str, str]] = {}  # see ``_keys_for``

    # --- calling the network

    def __call__(self, batch: Batch) -> Tensor:
        """Return the logits of a batch."""
        return self._logits(self.network(**self.inputs(batch)))

    def _logits(self, output: Any) -> Tensor:
        """Return the output of the network, or its attribute or key ``logits``."""
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            kind = type(output).__name__
            raise ConfigError(f"model: {self.kind} must return logits, or an object or dict with logits; got {kind}")
        return logits

    def _keys_for(self, batch: Batch) -> dict[str, str]:
        """Return the key of ``batch`` for each parameter of ``forward`` that has one."""
        names = tuple(batch)
        if names not in self._keys:
            keys = {}
            for parameter in self.names:
                mask = next((key for key, other in MASK_NAMES.items() if other == parameter and key not in self.names), None)
                first = FIRST_INPUT if parameter == self.names[0] else None
                key = next((key for key in (parameter, mask, first) if key in names), None)
                if key is not None:
                    keys[parameter] = key
            self._keys[names] = keys
        return self._keys[names]

    def inputs(self, batch: Batch) -> Batch:
        """Return the arguments of the network for ``batch``.

        Raises:
            ConfigError: ``forward`` requires a key that the batch does not have, or a parameter that can only be passed by
                position, or no parameter of it matches a key.
        """
        require(
            not self.unnamed,
            f"model: {self.kind}.forward takes {', '.join(self.unnamed)} only by position, but the keys of a batch are passed by name: "
            "remove the / from its parameters",
        )
        keys = self._keys_for(batch)
        missing = [name for name in self.needed if name not in keys]
        if missing or not keys:
            advice = f"name the parameters of forward after the keys of the batch: {', '.join(without_targets(batch))}"
            if missing:
                raise ConfigError(f"model: {self.kind}.forward needs {missing[0]}, but the batch has no such key; {advice}")
            raise ConfigError(f"model: no parameter of {self.kind}.forward matches a key of the batch; {advice}")
        return {name: batch[key].long() if key in MASK_NAMES and key != name else batch[key] for name, key in keys.items()}

    def dropped(self, batch: Batch) -> list[str]:
        """Return the names of inputs in ``batch`` that are not passed to the network."""
        taken = self._keys_for(batch).values()
        return [name for name in without_targets(batch) if name not in taken]

    def check(self, batch: Batch, masks: Iterable[str] = ()) -> None:
        """Refuse a batch whose padding or document boundaries are not passed to the network.

        Args:
            masks: the names of the masks in ``Task.key_masks``. ``forward`` must have a parameter for a name that the user
                chose.

        Raises:
            ConfigError: a mask that hides a token, a mask with a name that the user chose, or ``document_ids`` that differ
                within a row are not passed.
        """
        known = (*MASK_NAMES, *MASK_NAMES.values())
        for name in self.dropped(batch):
            if (name in known and not batch[name].all()) or (name in masks and name not in known):
                raise ConfigError(
                    f"model: {self.kind}.forward has no parameter {name}{f' or {MASK_NAMES[name]}' if name in MASK_NAMES else ''}, so it would read "
                    "padding as data. Add the parameter, or set Task(key_masks={}, pad=...) if the model recognizes padding by its value"
                )
            ids = batch[name]
            if name == "document_ids" and ((ids != ids[:, :1]) & (ids >= 0)).any():
                raise ConfigError(
                    f"model: {self.kind}.forward has no parameter document_ids, so attention would cross the documents of a row. "
                    "Set data.packing=false to put one document into a row"
                )

    def check_documents(self, batch: Batch) -> None:
        """Refuse a network whose attention does not separate the documents of a row, although it receives their boundaries."""

    # --- sizes

    @property
    def shape(self) -> TransformerConfig:
        """The config of one of our models. Other networks are treated as decoders of any length."""
        return self.config or TransformerConfig(max_len=2**31)

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary size in the model's config, or None."""
        return stated(getattr(self.model, "config", None), "vocab_size", int)

    def check_sizes(self, fields: Mapping[str, Any], longest: int = 0) -> None:
        """Refuse a network that is too small for the data, and log sizes that are larger than needed.

        Args:
            fields: the fields that the data determines, such as ``vocab_size`` and ``num_labels``.
            longest: the number of tokens of the longest row; 0: unknown.

        Raises:
            ConfigError: its vocabulary or number of labels is smaller than the data's, or it has fewer positions than the longest
                row.
        """
        self._check_size("the vocabulary", self.vocab_size, fields.get("vocab_size"))

    def _check_size(self, name: str, size: int | None, needed: int | None) -> None:
        if size and needed and size < needed:
            raise ConfigError(f"model: {name} of {self.kind}, {size:,}, is smaller than the data needs, {needed:,}")
        if size and needed and size > needed:
            log.info("model: %s of %s, %s, is larger than the data needs, %s", name, self.kind, f"{size:,}", f"{needed:,}")

    # --- names and parts

    @property
    def label_names(self) -> Sequence[str]:
        """The names of the labels that the network states, in the order of its head."""
        return ()

    @property
    def title(self) -> str:
        """The title for figures of this network."""
        return self.kind

    def describe(self) -> str:
        """Return the class, the number of parameters and, for our models, the sizes.

        >>> Net.of(nn.Linear(2, 3)).describe()
        'Linear, 9 parameters'
        """
        total = sum(p.numel() for p in self.network.parameters())
        trained = sum(p.numel() for p in self.network.parameters() if p.requires_grad)
        return f"{type(self.network).__name__}, {total:,} parameters" + (f" ({trained:,} trained)" if trained != total else "")

    def changes(self) -> list[str]:
        """Return the differences between the network and what its config or ``stored_node`` builds; [] if it has neither."""
        return changes_of(self.network)

    @property
    def stored_node(self) -> Mapping[str, Any] | None:
        """The node that rebuilds the network, if the network stores it as an attribute and has not changed; else None."""
        node = getattr(self.network, "stored_node", None)
        return node if isinstance(node, Mapping) and not self.changes() else None

    def node(self, part: Part, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the node of the network for a checkpoint.

        This is the stored node if there is one. Otherwise it is the node of ``part`` with the fields that the data determined,
        or, for an object from Python, the name of its class. An object that was changed after its config built it cannot be
        rebuilt: its node lists the changes (``changes``), and ``load_model`` needs the model.
        """
        if (stored := self.stored_node) is not None:
            return dict(stored)
        if part.is_object and (changes := self.changes()):
            return {"_target_": FROM_PYTHON, "changes": changes, **({} if self.config is None else to_dict(self.config))}
        if part.is_object:
            return {"_target_": f"{type(self.network).__module__}.{type(self.network).__qualname__}"}
        if self.config is not None and part.fields is not None:
            part = part.with_fields(self.config)  # with the fields that the data determined
        return {**{name: value for name, value in fields.items() if name in part.names}, **part.plain()}

    @property
    def head(self) -> nn.Module | None:
        """The head of one of our language models, from hidden states to logits, if it is a single linear map; else None."""
        return None

    def writer(self, vocab_size: int, path: str) -> nn.Module:
        """Return a module for ``generate``, from ids (B, L) to logits (B, L, V).

        Args:
            vocab_size: number of tokens of the tokenizer.
            path: the path of the checkpoint, for messages.
        """
        return _Writer(self, vocab_size, path).eval()

    def context_of(self, data: Mapping[str, Any]) -> int | None:
        """Return the largest number of tokens to read at once when it generates, or None for no limit.

        Args:
            data: the arguments of the data that it was trained on. A table of positions may end at their ``context_len``.
        """
        return data.get("context_len")

    def train(self) -> list[str]:
        """Put the network into training mode, and return the names of the modules that stay in evaluation mode (``_kept_in_eval``).

        PEFT freezes the whole model, so with PEFT all modules are put into training mode.
        """
        kept = [] if hasattr(self.network, "get_base_model") else _kept_in_eval(self.network)
        self.network.train()
        for name in kept:
            self.network.get_submodule(name).eval()
        return kept


def _kept_in_eval(module: nn.Module, name: str = "", parent: nn.Module | None = None) -> list[str]:
    """Return the names of the outermost modules in evaluation mode that a run leaves in it.

    A module in evaluation mode was put there on purpose if all of its parameters are frozen, or if it is a single layer, such as
    a batch norm, inside a module in training mode. Other modules are there because ``from_pretrained`` of transformers returns
    models in evaluation mode, without dropout.
    """
    if not module.training:
        trained = [parameter.requires_grad for parameter in module.parameters()]
        is_frozen = bool(trained) and not any(trained)
        is_single_layer = next(module.children(), None) is None and parent is not None and parent.training
        if is_frozen or is_single_layer:
            return [name]
    children = [(f"{name}.{child}".removeprefix("."), part) for child, part in module.named_children()]
    return [kept for child, part in children for kept in _kept_in_eval(part, child, module)]


class Ours(Net):
    """One of our models."""

    config: TransformerConfig

    def __init__(self, network: nn.Module, model: Any) -> None:
        super().__init__(network, model)
        self.config, self.head_dim = model.config, model.config.width_per_head

    @property
    def title(self) -> str:
        config = self.config
        return f"{config.architecture.replace('_', '–')}, heads of width {config.width_per_head}, scale {config.scale}"

    def describe(self) -> str:
        config = self.config
        sizes = f"num_layers {config.num_layers}, num_heads {config.num_heads}, embed_dim {config.embed_dim}"
        return f"{super().describe()}: {sizes}"

    def check_sizes(self, fields: Mapping[str, Any], longest: int = 0) -> None:
        super().check_sizes(fields)
        self._check_size("the number of labels", self.config.num_labels, fields.get("num_labels"))
        self.config.check_length(longest)

    def changes(self) -> list[str]:
        if self.network is not self.model:
            return [f"{self.kind} is inside {type(self.network).__name__}"]
        return changes_of(self.model)

    @property
    def stored_node(self) -> Mapping[str, Any] | None:
        return None if self.changes() else {"_target_": MODEL, **to_dict(self.config)}

    @property
    def head(self) -> nn.Module | None:
        is_linear = self.config.head == "lm" and not self.config.head_transform and self.config.logit_softcap is None
        return self.model.get_submodule("head") if is_linear else None

    def writer(self, vocab_size: int, path: str) -> nn.Module:
        return self.network

    def context_of(self, data: Mapping[str, Any]) -> int | None:
        return self.config.max_len if self.config.architecture == "decoder" else None


class OfTransformers(Net):
    """A model of transformers.

    ``labels`` are not passed, because the model would compute its own loss, and ``use_cache`` is False. If ``forward`` has a
    parameter ``position_ids``, ``document_ids`` are passed as positions that restart with each document, without
    ``attention_mask``: the model then separates the documents itself (padding counts as a document).
    """

    def __init__(self, network: nn.Module, model: Any) -> None:
        super().__init__(network, model)
        self.options = {"use_cache": False} if "use_cache" in self.names else {}
        self.names = [name for name in self.names if name != "labels"]
        self.packs = "position_ids" in self.names

    def __call__(self, batch: Batch) -> Tensor:
        return self._logits(self.network(**self.inputs(batch), **self.options))

    def inputs(self, batch: Batch) -> Batch:
        ids = batch.get("document_ids") if self.packs else None
        if ids is not None:
            kept = {name: x for name, x in batch.items() if name not in ("key_mask", "document_ids", "attention_mask")}
            batch = {**kept, "position_ids": position_ids_from(None, ids, ids.shape[1], ids.device)}
        return super().inputs(batch)

    def dropped(self, batch: Batch) -> list[str]:
        return [name for name in super().dropped(batch) if not (self.packs and name == "document_ids")]

    def context_of(self, data: Mapping[str, Any]) -> int | None:
        return None

    @property
    def label_names(self) -> Sequence[str]:
        names = stated(self.model.config, "id2label", dict) or {}
        return [names[number] for number in sorted(names)]

    @torch.no_grad()
    def check_documents(self, batch: Batch) -> None:
        """Check on a few tokens of the first row that tokens of one document do not change the logits of another."""
        if not self.packs or "document_ids" not in batch:
            return
        ids = batch["input_ids"][:1, :8].to(next(self.network.parameters()).device)
        documents = (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] // 2).long()[None]
        changed = torch.where(documents == 0, (ids + 1) % (ids.max() + 2), ids)
        with evaluating(self.network):
            first, second = (self({"input_ids": each, "document_ids": documents})[documents == 1] for each in (ids, changed))
        if not torch.allclose(first, second, rtol=1e-4, atol=1e-4 * float(first.abs().max())):
            raise ConfigError(
                f"model: attention of {self.kind} crosses the documents of a row, although their positions restart. "
                "Set data.packing=false to put one document into a row"
            )

    def check_sizes(self, fields: Mapping[str, Any], longest: int = 0) -> None:
        super().check_sizes(fields)
        config = self.model.config
        self._check_size("the number of labels", stated(config, "num_labels", int), fields.get("num_labels"))
        if stated(config, "output_router_logits", bool) is not None:
            log.info("model: %s is a mixture of experts; its router loss is not part of the objective", self.kind)


class _Writer(nn.Module):
    """Adapts a model that is not ours to ``generate``. A text ends at the same tokens as in transformers.

    Raises:
        ConfigError: when called, if the model does not return logits (B, L, V) for ``input_ids``.
    """

    def __init__(self, net: Net, vocab_size: int, path: str) -> None:
        super().__init__()
        self.network, self.net, self.path = net.network, net, path
        ends = stated(getattr(net.model, "generation_config", None), "eos_token_id")
        known = [id for id in (ends if isinstance(ends, list) else [ends]) if id in range(vocab_size)]
        self.config = SimpleNamespace(eos_id=known)  # GPT-2's config has 50256 for every vocabulary

    def forward(self, input_ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        logits = self.net({"input_ids": input_ids})
        if logits.shape[:-1] != input_ids.shape:
            shapes = f"{tuple(logits.shape)} for input_ids of {tuple(input_ids.shape)}"
            raise ConfigError(f"ckpt_path={self.path}: generating text needs logits (B, L, V), got {shapes}")
        return logits


def _inside(network: Any) -> Any:
    """Return the model inside the wrappers of ``torch.compile`` and PEFT. The wrappers pass on all arguments."""
    while True:
        inner = dict(network.named_children()).get("_orig_mod")  # the name in the state_dict of a compiled module
        if inner is None and hasattr(network, "get_base_model"):
            inner = network.get_base_model()
        if inner is None:
            return network
        network = inner


# --- building the network of a run

# possible (architecture, head) for each kind of task
_MODELS_OF = {
    "language_model": (("decoder", "lm"),),
    "masked_lm": (("encoder", "lm"),),
    "seq2seq": (("encoder_decoder", "lm"),),
    "classify": (("encoder", "sequence"), ("vision", "sequence")),
    "tag": (("encoder", "token"),),
}

_LENGTHS = ("max_source_len", "max_target_len")
"""Fields of data in pairs: the longest row on each side."""


def build_network(part: Part, data: DataModule, precision: str = "32-true") -> nn.Module:
    """Return the network of a run. Its weights depend only on the seed, ``data.seed``.

    Raises:
        ConfigError: the model cannot be built, does not match the data, or is a LightningModule with its own training step; or
            the data has fewer rows than a batch.
    """
    data.check_batch()
    seed_device(data.seed)
    model = network_of(part, data)
    base = lightning_base(model, "LightningModule")
    if base is not None and overrides(model, base, "training_step"):
        raise ConfigError(
            f"model: {type(model).__name__} is a LightningModule with its own training_step, but minitx does not call it: "
            "train it with Lightning's Trainer and import blocks of minitx, or pass its network as model"
        )
    net = Net.of(model)
    data.number_labels_as(net.label_names)
    fields = decided_fields(data.task)
    net.check_sizes(fields, max(data.task.longest or 0, *(fields.get(name, 0) for name in _LENGTHS)))
    if parts := net.train():
        log.info("model: stays in evaluation mode: %s", joined(parts, ", "))
    if part.is_object and (changes := net.changes()):
        log.info("model: load its checkpoints with load_model(path, model=...), because %s", joined(changes))
    if net.config is not None and (hooked := hooked_modules(model)):
        log.info("model: checkpoints do not contain the hooks of %s", joined(hooked, ", "))
    if precision == "64-true":
        model.double()  # Lightning does this only after loading a checkpoint in float32
    return model


def network_of(part: Part, data: DataModule | None = None) -> nn.Module:
    """Build the network of a part. If ``data`` is not None, it determines some of the fields.

    Raises:
        ConfigError: the model cannot be built, does not match the data, or is not a ``torch.nn.Module``.
    """
    offered: dict[str, Any] = {}
    if data is not None and isinstance(part.fields, TransformerConfig):
        part = part.with_fields(fitted(part.fields, data))
    elif data is not None:
        offered = {**decided_fields(data.task), "task": data.task.kind, "tokenizer": data.task.tokenizer}
    model = part.build(**offered)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model._target_={part.name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def decided_fields(task: Task) -> dict[str, Any]:
    """Return the fields of a model that the data determines, under common names such as ``num_classes``."""
    fields = dict(task.model_fields)
    for name, other in (("num_labels", "num_classes"), ("num_classes", "num_labels")):
        if name in fields:
            fields.setdefault(other, fields[name])
    return fields


def fitted(model: TransformerConfig, data: DataModule) -> TransformerConfig:
    """Return the config of one of our models with the fields that the data determines: vocabulary, labels, images, special ids.

    Raises:
        ConfigError: the model is for another task, or its fields differ from the data's.
    """
    fields = decided_fields(data.task)
    _check_kind(model, data.task, fields)
    changes = {}
    known = [field.name for field in dataclasses.fields(model)]
    for name, value in fields.items():
        if name in ("num_classes", *_LENGTHS):
            continue
        if name not in known:
            from minitx.config.unknown_keys import nearest  # only errors need it

            raise ConfigError(
                f"the data sets model.{name}={value}, but a model has no such field{nearest(name, known, 'model.')}"
            )
        current = getattr(model, name)
        if current and not name.endswith("_id") and (current < value if name == "vocab_size" else current != value):
            label = {"vocab_size": "the vocabulary"}.get(name, name)
            relation = "is smaller than" if name == "vocab_size" else "differs from"
            raise ConfigError(f"model.{name}={current} {relation} {label} of the data, {value}")
        changes[name] = value if current is None or (current == 0 and not name.endswith("_id")) else current
        if name == "eos_id" and current is not None:  # the end token of the data ends a text, in addition to the model's
            ends = dict.fromkeys(id for ids in (current, value) for id in (ids if isinstance(ids, tuple | list) else [ids]))
            changes[name] = tuple(ends) if len(ends) > 1 else value
    return dataclasses.replace(model, **changes)


def _check_kind(model: TransformerConfig, task: Task, fields: Mapping[str, Any]) -> None:
    """Refuse a model for another kind of task. A kind of task that is not ours accepts any model."""
    if task.kind not in _MODELS_OF:
        return
    kinds = [kind for kind in _MODELS_OF[task.kind] if (kind[0] == "vision") == ("image_size" in fields)]
    pair = model.architecture, model.head
    if pair not in kinds:
        actual, *possible = (f"model.architecture={kind} with model.head={head}" for kind, head in (pair, *kinds))
        raise ConfigError(f"{actual} does not fit {task.name}: it needs {' or '.join(possible)}")


PURE = ("64-true", "bf16-true")
"""The precisions with one dtype, other than float32, for weights and computations."""


def in_own_dtype(network: nn.Module) -> RemovableHandle:
    """Make a network convert floating-point inputs, such as pixels, to the dtype of its weights. The handle undoes it.

    Lightning converts only batches of Lightning's loops.
    """
    return network.register_forward_pre_hook(_to_own_dtype, with_kwargs=True)


@contextmanager
def prepared_network(network: nn.Module, precision: str) -> Iterator[None]:
    """A context for the run of a network that may be the user's: it converts inputs to its dtype.

    Afterwards, this hook is removed, and the same parameters are trainable as before.
    """
    trainable = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
    hook = in_own_dtype(network) if precision in PURE else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(trainable.get(name, parameter.requires_grad))


def _to_own_dtype(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a network, floating-point ones in the dtype of its largest weight. Norms may have another dtype."""
    # sorted, because torch.compile cannot trace max with a key; empty for a network without floating-point weights
    largest = sorted((weight for weight in module.parameters() if weight.is_floating_point()), key=torch.Tensor.numel)[-1:]
    numbers = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return args, {**inputs, **{name: x.to(weight.dtype) for weight in largest for name, x in numbers.items()}}
