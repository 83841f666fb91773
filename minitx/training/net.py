"""Any network as one kind of thing: ``Net.of`` chooses once among our models, transformers models and any other module.

A ``Net`` calls its network with a batch, and knows its title, its sizes, its node for a checkpoint, the module that writes text, its
layers and its head. ``build_network`` builds the network of a run.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from minitx.config import ConfigError, Part, TransformerConfig, to_dict
from minitx.config.schema import nearest, require, stated
from minitx.config.training import MODEL
from minitx.data.lightning_data import INPUTS, lightning_base, overrides
from minitx.data.task import Batch, Task, seed_device, without_targets
from minitx.nn.blocks import is_block
from minitx.nn.modes import evaluating

if TYPE_CHECKING:
    from minitx.data.datamodule import DataModule

log = logging.getLogger(__name__)

MASKS = {"key_mask": "attention_mask", "decoder_key_mask": "decoder_attention_mask"}
"""Our names of masks, and transformers' names. Values of transformers' masks are 0 and 1."""


class Net:
    """A network that gets the keys of a batch that are parameters of its ``forward``.

    * ``inputs`` goes to the first parameter if no other key of the batch is called like it.
    * With ``**kwargs``, the keys of their annotation ``Unpack[...]`` count, too. Other keys are not passed.
    * ``key_mask`` goes to a parameter ``attention_mask`` if ``forward`` has no parameter ``key_mask``, and ``decoder_key_mask`` to
      ``decoder_attention_mask``, as 0 and 1.

    Args:
        network: the network that is called.
        model: the model inside the wrappers of ``torch.compile`` and PEFT. Its ``forward`` decides the keys.

    Attributes:
        config: the config of one of our models, or None.
        head_dim: the width of its heads; 1 where it is unknown.
        kind: the name of the class of the model.
    """

    config: TransformerConfig | None = None
    head_dim = 1

    @staticmethod
    def of(network: nn.Module) -> Net:
        """Return the net of a network of any kind."""
        model = _inside(network)
        if isinstance(getattr(model, "config", None), TransformerConfig):
            return Ours(network, model)
        # transformers is not imported for the question
        is_theirs = any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)
        return (OfTransformers if is_theirs else Net)(network, model)

    def __init__(self, network: nn.Module, model: Any) -> None:
        self.network, self.model, self.kind = network, model, type(model).__name__
        parameters = list(inspect.signature(model.forward).parameters.values())
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        unpacked = [keys for one in parameters if one.kind is one.VAR_KEYWORD for keys in get_args(one.annotation)]
        self.names = [one.name for one in named] + [name for keys in unpacked for name in getattr(keys, "__annotations__", ())]
        self.needed = [one.name for one in named if one.default is one.empty]
        self._keys: dict[tuple[str, ...], dict[str, str]] = {}  # see ``_keys_for``

    # --- calling it

    def __call__(self, batch: Batch) -> Tensor:
        """Return the logits of a batch."""
        return self._logits(self.network(**self.inputs(batch)))

    def _logits(self, output: Any) -> Tensor:
        """The output of the network, or its attribute or key ``logits``."""
        logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            kind = type(output).__name__
            raise ConfigError(f"model: {self.kind} must return logits, or an object or dict with logits; got {kind}")
        return logits

    def _keys_for(self, batch: Batch) -> dict[str, str]:
        """The key of ``batch`` for each parameter of ``forward`` that has one."""
        names = tuple(batch)
        if names not in self._keys:
            keys = {}
            for parameter in self.names:
                mask = next((key for key, other in MASKS.items() if other == parameter and key not in self.names), None)
                first = INPUTS if parameter == self.names[0] else None
                key = next((key for key in (parameter, mask, first) if key in names), None)
                if key is not None:
                    keys[parameter] = key
            self._keys[names] = keys
        return self._keys[names]

    def inputs(self, batch: Batch) -> Batch:
        """Return the arguments of the network for ``batch``.

        Raises:
            ConfigError: ``forward`` requires a key that the batch does not have, or names none of its keys.
        """
        keys = self._keys_for(batch)
        missing = [name for name in self.needed if name not in keys]
        if missing or not keys:
            keys_of_batch = f"the batch has: {', '.join(batch)}"
            if missing:
                raise ConfigError(f"model: {self.kind}.forward needs {missing[0]}; {keys_of_batch}")
            raise ConfigError(f"model: no parameter of {self.kind}.forward matches a key of the batch; {keys_of_batch}")
        return {name: batch[key].long() if key in MASKS and key != name else batch[key] for name, key in keys.items()}

    def dropped(self, batch: Batch) -> list[str]:
        """Return the inputs of ``batch`` that the network does not get."""
        taken = self._keys_for(batch).values()
        return [name for name in without_targets(batch) if name not in taken]

    def check(self, batch: Batch, masks: Iterable[str] = ()) -> None:
        """Refuse a batch with padding or several documents in a row if the network is not told of them.

        Args:
            masks: the names of the masks in ``Task.key_masks``. ``forward`` must have a parameter for a name that the user chose.

        Raises:
            ConfigError: a mask that hides a token, ``document_ids`` that differ within a row, or a mask with a name that the user
                chose are not passed.
        """
        known = (*MASKS, *MASKS.values())
        for name in self.dropped(batch):
            if (name in known and not batch[name].all()) or (name in masks and name not in known):
                raise ConfigError(
                    f"model: {self.kind}.forward does not name {name}{f' or {MASKS[name]}' if name in MASKS else ''}, so it would read "
                    "padding as data. Name it in forward, or give Task(key_masks={}, pad=...) if the model knows padding by its value"
                )
            ids = batch[name]
            if name == "document_ids" and ((ids != ids[:, :1]) & (ids >= 0)).any():
                raise ConfigError(
                    f"model: {self.kind}.forward does not name document_ids, so attention would cross the documents of a row. "
                    "Set data.packing=false, which puts one document into a row"
                )

    def check_documents(self, batch: Batch) -> None:
        """Refuse a network that gets documents of a batch in a form that does not separate them."""

    # --- its sizes

    @property
    def shape(self) -> TransformerConfig:
        """The config. A network that is not ours is treated as a decoder of any length."""
        return self.config or TransformerConfig(max_len=2**31)

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens, if its config states it."""
        return stated(getattr(self.model, "config", None), "vocab_size", int)

    def check_sizes(self, fields: Mapping[str, Any]) -> None:
        """Refuse a network that is smaller than the data, and log unused parts of it.

        Args:
            fields: the fields that the data decide, such as ``vocab_size`` and ``num_labels``.

        Raises:
            ConfigError: its vocabulary or number of labels is smaller than the data's.
        """
        self._check_size("the vocabulary", self.vocab_size, fields.get("vocab_size"))

    def _check_size(self, what: str, known: int | None, wanted: int | None) -> None:
        if known and wanted and known < wanted:
            raise ConfigError(f"model: {what} of {self.kind}, {known:,}, is smaller than that of the data, {wanted:,}")
        if known and wanted and known > wanted:
            log.info("model: %s of %s, %s, is larger than that of the data, %s", what, self.kind, f"{known:,}", f"{wanted:,}")

    # --- its names and parts

    @property
    def title(self) -> str:
        """The title of a picture of it."""
        return self.kind

    def describe(self) -> str:
        """Return the class and the number of parameters, and for our models their sizes.

        >>> Net.of(nn.Linear(2, 3)).describe()
        'Linear, 9 parameters'
        """
        total = sum(p.numel() for p in self.network.parameters())
        trained = sum(p.numel() for p in self.network.parameters() if p.requires_grad)
        return f"{type(self.network).__name__}, {total:,} parameters" + (f" ({trained:,} trained)" if trained != total else "")

    @property
    def stored_node(self) -> Mapping[str, Any] | None:
        """The node that builds the network again, if the network has it as an attribute."""
        node = getattr(self.network, "stored_node", None)
        return node if isinstance(node, Mapping) else None

    def node(self, part: Part, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the node of the network in a checkpoint: its stored node; the node of ``part``, with the fields that the data decided; or,
        for an object from Python, its class."""
        if self.stored_node is not None:
            return dict(self.stored_node)
        if part.is_given:
            return {"_target_": f"{type(self.network).__module__}.{type(self.network).__qualname__}"}
        return {**{name: value for name, value in fields.items() if name in part.names}, **part.plain()}

    def layers(self, classes: Sequence[str] = ()) -> list[nn.Module]:
        """Return the modules that FSDP shards one by one, inner ones first: modules of ``classes``, or the layers of the network.

        Raises:
            ConfigError: there are none.
        """

        def is_layer(module: nn.Module) -> bool:
            kinds = {kind.__name__ for kind in type(module).__mro__}
            theirs = "GradientCheckpointingLayer" in kinds  # transformers' layers, without importing it here
            return type(module).__name__ in classes if classes else is_block(module) or theirs

        layers = [module for module in self.network.modules() if is_layer(module)]
        if missing := sorted(set(classes) - {type(module).__name__ for module in layers}):
            raise ConfigError(f"trainer.shard={missing[0]} is the class of no module of {type(self.network).__name__}")
        if not layers:
            raise ConfigError(
                f"trainer.strategy=sharded does not know the layers of {type(self.network).__name__}: name their classes, trainer.shard=[CLASS]"
            )
        return layers[::-1]

    @property
    def head(self) -> nn.Module | None:
        """The language-model head, through which hidden states become logits, of one of our models."""
        return None

    def writer(self, vocab_size: int, path: str) -> nn.Module:
        """Return a module for ``generate``: ids (B, L) in, logits (B, L, V) out.

        Args:
            vocab_size: number of tokens of the tokenizer. path: the path of the checkpoint, for messages.
        """
        return _Writer(self, vocab_size, path).eval()

    def show_attention(self) -> None:
        """Put our attention core under a model of transformers, in place, so that its attention can be recorded."""

    def train(self) -> list[str]:
        """Put the network into training mode, and return the names of the parts that stay in evaluation mode.

        ``from_pretrained`` of transformers returns models in evaluation mode, without dropout. A part in evaluation mode stays in it
        if all of its parameters are frozen, or if it is a single layer, such as a batch norm, of a part in training mode. An
        adapter of PEFT freezes its model, so there the frozen parts train.
        """
        kept: list[str] = []

        def visit(name: str, part: nn.Module, parent: nn.Module | None) -> None:
            trained = [parameter.requires_grad for parameter in part.parameters()]
            leaf = parent is not None and parent.training and not any(True for _ in part.children())
            if not part.training and ((trained and not any(trained)) or leaf):
                kept.append(name)
                return
            for child, module in part.named_children():
                visit(f"{name}.{child}" if name else child, module, part)

        if not hasattr(self.network, "get_base_model"):
            visit("", self.network, None)
        self.network.train()
        for name in kept:
            self.network.get_submodule(name).eval()
        return kept


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

    @property
    def stored_node(self) -> Mapping[str, Any]:
        return {"_target_": MODEL, **to_dict(self.config)}

    @property
    def head(self) -> nn.Module | None:
        return self.model.get_submodule("head") if self.config.head == "lm" else None

    def writer(self, vocab_size: int, path: str) -> nn.Module:
        return self.network


class OfTransformers(Net):
    """A model of transformers.

    It gets no ``labels``, because it would compute its own loss, and ``use_cache=False``. If it takes ``position_ids``, it gets
    ``document_ids`` as positions that start again with each document, and no ``attention_mask``: its own mask then separates the
    documents (padding counts as a document).
    """

    def __init__(self, network: nn.Module, model: Any) -> None:
        super().__init__(network, model)
        self.options = {"use_cache": False} if "use_cache" in self.names else {}
        self.names = [name for name in self.names if name != "labels"]
        self.packs = "position_ids" in self.names

    def __call__(self, batch: Batch) -> Tensor:
        return self._logits(self.network(**self.inputs(batch), **self.options))

    def inputs(self, batch: Batch) -> Batch:
        if self.packs and "document_ids" in batch:
            kept = {name: x for name, x in batch.items() if name not in ("key_mask", "document_ids", "attention_mask")}
            batch = {**kept, "position_ids": positions_in_documents(batch["document_ids"])}
        return super().inputs(batch)

    def dropped(self, batch: Batch) -> list[str]:
        return [name for name in super().dropped(batch) if not (self.packs and name == "document_ids")]

    @torch.no_grad()
    def check_documents(self, batch: Batch) -> None:
        """Check on a few tokens of the first row that a token of one document does not change the logits of another."""
        if not self.packs or "document_ids" not in batch:
            return
        ids = batch["input_ids"][:1, :8].to(next(self.network.parameters()).device)
        documents = (torch.arange(ids.shape[1], device=ids.device) >= ids.shape[1] // 2).long()[None]
        other = torch.where(documents == 0, (ids + 1) % (ids.max() + 2), ids)
        with evaluating(self.network):
            one, two = (self({"input_ids": each, "document_ids": documents})[documents == 1] for each in (ids, other))
        if not torch.allclose(one, two, rtol=1e-4, atol=1e-4 * float(one.abs().max())):
            raise ConfigError(
                f"model: attention of {self.kind} crosses the documents of a row, which its positions do not separate. "
                "Set data.packing=false, which puts one document into a row"
            )

    def check_sizes(self, fields: Mapping[str, Any]) -> None:
        super().check_sizes(fields)
        config = self.model.config
        self._check_size("the number of labels", stated(config, "num_labels", int), fields.get("num_labels"))
        if stated(config, "output_router_logits", bool) is not None:
            log.info("model: %s is a mixture of experts, and its router loss is not part of the objective", self.kind)

    def show_attention(self) -> None:
        from minitx.analysis.capture import attention_cores
        from minitx.interop import adopt_hf

        if not attention_cores(self.network):
            adopt_hf(self.network)


class _Writer(nn.Module):
    """A model that is not ours, for ``generate``. It ends a text as transformers would.

    Raises:
        ConfigError: in a call, if the model does not return logits (B, L, V) for ``input_ids``.
    """

    def __init__(self, net: Net, vocab_size: int, path: str) -> None:
        super().__init__()
        self.network, self.net, self.path = net.network, net, path
        ends = stated(getattr(net.model, "generation_config", None), "eos_token_id")
        known = [id for id in (ends if isinstance(ends, list) else [ends]) if id in range(vocab_size)]
        self.config = SimpleNamespace(eos_id=known)  # GPT-2's config names 50256 for every vocabulary

    def forward(self, input_ids: Tensor, key_mask: Tensor | None = None) -> Tensor:
        logits = self.net({"input_ids": input_ids})
        if logits.shape[:-1] != input_ids.shape:
            shapes = f"{tuple(logits.shape)} for input_ids of {tuple(input_ids.shape)}"
            raise ConfigError(f"ckpt_path={self.path}: to write text a model must give logits (B, L, V), got {shapes}")
        return logits


def _inside(network: Any) -> Any:
    """The model inside the wrappers of ``torch.compile`` and PEFT. The wrappers pass on all arguments."""
    while True:
        inner = dict(network.named_children()).get("_orig_mod")  # so the state_dict of a compiled module names it
        if inner is None and hasattr(network, "get_base_model"):
            inner = network.get_base_model()
        if inner is None:
            return network
        network = inner


def positions_in_documents(document_ids: Tensor) -> Tensor:
    """Return the position of each token in its document, (B, L), from the numbers of the documents.

    >>> positions_in_documents(torch.tensor([[4, 4, 4, 5, 5, -1]]))
    tensor([[0, 1, 2, 0, 1, 0]])
    """
    place = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    starts = document_ids.diff(dim=1, prepend=document_ids[:, :1]) != 0
    return place - torch.where(starts, place, 0).cummax(dim=1).values


# --- building the network of a run

# the architecture and the head that a task needs
_MODELS_OF = {
    "language_model": (("decoder", "lm"),),
    "masked_lm": (("encoder", "lm"),),
    "seq2seq": (("encoder_decoder", "lm"),),
    "classify": (("encoder", "sequence"), ("vision", "sequence")),
    "tag": (("encoder", "token"),),
}


def build_network(part: Part, data: DataModule, *, precision: str = "32-true", seed: int = 0) -> nn.Module:
    """Return the network of a run. Its weights depend only on the seed.

    Raises:
        ConfigError: the model cannot be built, does not fit the data, or is a LightningModule with its own training step.
    """
    seed_device(seed)
    model = network_of(part, data)
    base = lightning_base(model, "LightningModule")
    if base is not None and overrides(model, base, "training_step"):
        raise ConfigError(
            f"model: {type(model).__name__} is a LightningModule with a training_step of its own, which minitx does not call: "
            "train it with Lightning's Trainer and import blocks of minitx into it, or give its network as model"
        )
    net = Net.of(model)
    net.check_sizes(decided_fields(data.task))
    if parts := net.train():
        log.info("model: in evaluation mode, as given: %s", ", ".join(parts[:3]) + (", ..." if len(parts) > 3 else ""))
    if precision == "64-true":
        model.double()  # Lightning would, after it has loaded a checkpoint into float32
    return in_own_dtype(model) if precision in ("64-true", "bf16-true") else model


def network_of(part: Part, data: DataModule | None = None) -> nn.Module:
    """Build the network of a part, with the fields that the data decide if ``data`` is given.

    Raises:
        ConfigError: the model cannot be built, does not fit the data, or is not a ``torch.nn.Module``.
    """
    offered: dict[str, Any] = {}
    if data is not None and isinstance(part.fields, TransformerConfig):
        part = part.with_fields(fitted(part.fields, data))
    elif data is not None:
        offered = {**decided_fields(data.task), "task": data.task.kind, "tokenizer": data.task.tokenizer}
    model = part.build(**offered)
    require(isinstance(model, nn.Module), f"model._target_={part.name} must give a torch.nn.Module, got {type(model).__name__}")
    return model


def decided_fields(task: Task) -> dict[str, Any]:
    """Return the fields of a model that the data decide, under common names such as ``num_classes``."""
    fields = dict(task.model_fields)
    for name, other in (("num_labels", "num_classes"), ("num_classes", "num_labels")):
        if name in fields:
            fields.setdefault(other, fields[name])
    return fields


def fitted(model: TransformerConfig, data: DataModule) -> TransformerConfig:
    """Return the config of one of our models with the fields that the data decide: vocabulary, labels, images, special ids.

    Raises:
        ConfigError: the model is for another task or too small for the data, or there are fewer rows than in a batch.
    """
    fields = decided_fields(data.task)
    fields.pop("num_classes", None)
    data.check_batch()
    _check_kind(model, data.task, fields)
    model.check_length(max(data.task.longest or 0, *(fields.pop(name, 0) for name in ("max_source_len", "max_target_len"))))
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
        if name == "eos_id" and given is not None:  # the end mark of the rows ends a text, even if the weights have another
            ends = dict.fromkeys(id for ids in (given, value) for id in (ids if isinstance(ids, tuple | list) else [ids]))
            found[name] = tuple(ends) if len(ends) > 1 else value
    return dataclasses.replace(model, **found)


def _check_kind(model: TransformerConfig, task: Task, fields: Mapping[str, Any]) -> None:
    """Refuse a model for another kind of task. A task of another kind than ours takes any."""
    if task.kind not in _MODELS_OF:
        return
    kinds = [kind for kind in _MODELS_OF[task.kind] if (kind[0] == "vision") == ("image_size" in fields)]
    own = model.architecture, model.head
    given, *wanted = (f"model.architecture={kind} with model.head={head}" for kind, head in (own, *kinds))
    require(own in kinds, f"{given} does not fit {task.name}, which needs {' or '.join(wanted)}")


def in_own_dtype(network: nn.Module) -> nn.Module:
    """Let a network convert its inputs, such as pixels, to the dtype of its weights, and return it: Lightning converts only the batches of
    its loops."""
    network.register_forward_pre_hook(_to_own_dtype, with_kwargs=True)
    return network


def _to_own_dtype(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs of a network, with numbers in the dtype of its largest weight: a norm may keep another."""
    # sorted, because torch.compile traces no max with a key; empty for a network without such weights
    largest = sorted((weight for weight in module.parameters() if weight.is_floating_point()), key=torch.Tensor.numel)[-1:]
    numbers = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return args, {**inputs, **{name: x.to(weight.dtype) for weight in largest for name, x in numbers.items()}}
