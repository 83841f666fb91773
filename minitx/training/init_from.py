"""What a run starts from: the weights, the tokenizer and the labels of ``init_from.path``."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from typing import Any

from torch import nn

from minitx.config import ConfigError, InitFrom, Part, TransformerConfig, to_dict
from minitx.config.part import FROM_PYTHON, find_target
from minitx.config.schema import first_line
from minitx.config.training import FOLDER_READER, MODEL
from minitx.data.tokenizer import LEARNED, Tokenizer
from minitx.nn.config_differences import joined
from minitx.training.checkpoint_files import load_weights, network_weights, read_checkpoint
from minitx.training.net import Net

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What a run starts from: the content of ``init_from.path``.

    Attributes:
        path: the checkpoint, the folder or the name on the hub.
        fold_scale: allow another scale (``init_from.fold_scale``).
        weights: the weights by name.
        model_config: the model's config as plain data; None if it isn't a minitx model.
        tokenizer: the tokenizer that is stored with the weights, or None.
        labels: the names of the labels of a classifier, in the order of its head.
        changes: the differences between the model and its config (``Net.changes``).
    """

    path: str
    fold_scale: bool = False
    weights: dict[str, Any]
    model_config: dict[str, Any] | None
    tokenizer: Tokenizer | None
    labels: Sequence[str] = ()
    changes: Sequence[str] = ()

    def tokenizer_for(self, data: Part) -> Tokenizer | None:
        """Return the tokenizer that is stored with the weights, or None.

        Raises:
            ConfigError: there is none, and ``data.tokenizer`` would train a new one.
        """
        kind = data.get("tokenizer")
        if self.tokenizer is None and kind in LEARNED:
            raise ConfigError(
                f"data.tokenizer={kind} would be a new tokenizer, but the weights of init_from.path={self.path} were trained "
                "with another one: data.tokenizer must name its file or folder, because it is not stored with the weights"
            )
        return self.tokenizer

    def load_into(self, network: nn.Module) -> None:
        """Load the weights into ``network``. With ``fold_scale``, a different scale is folded into them.

        Raises:
            ConfigError: a tensor is missing, unexpected or of another shape (torch's message names it); the scale differs and is
                not, or cannot be, folded; or the weights are of a model that differs from its config in other ways than ``network``.
        """
        net = Net.of(network)
        if self.changes and list(self.changes) != net.changes():
            raise ConfigError(
                f"init_from.path={self.path} contains a model that differs from its config: {joined(self.changes)}. The model of this run "
                "would be another function: build it as for the run that wrote the weights, and pass it to train(model=...)"
            )
        model = net.config
        if model is not None:
            self._check_scale(model)
        try:
            load_weights(network, self.weights)
            if self.fold_scale and self.model_config is not None and model is not None:
                scale, factor = self.model_config["scale"], self.model_config["scale_factor"]  # the scale of the weights
                if (scale, factor) != (model.scale, model.scale_factor):
                    from minitx.nn.folding import fold_ours, set_scale

                    set_scale(network, scale, factor=factor)
                    fold_ours(network, model.scale, model.scale_factor)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"init_from.path={self.path} does not match the model: {first_line(error)}") from error

    def _check_scale(self, model: TransformerConfig) -> None:
        """Check the scale of the model, and log that ``model.init_fold`` has no effect."""
        shape = {} if self.model_config is None or self.fold_scale else self.model_config
        for name in ("scale", "scale_factor"):
            value = getattr(model, name)
            stored = shape.get(name, value)
            if stored != value:
                raise ConfigError(
                    f"model.{name}={value} differs from {stored}, the value of the weights of init_from.path={self.path}, "
                    "and would change the function: use that value, or set init_from.fold_scale=true"
                )
        if model.init_fold is not None:
            log.info("model.init_fold=%s is ignored: the weights come from init_from.path=%s", model.init_fold, self.path)


def load_start(init_from: InitFrom) -> Start | None:
    """Load the weights of ``init_from.path``: a checkpoint, a folder or a name on the hub. Return None if no path is set.

    Raises:
        ConfigError: the weights cannot be loaded. The message names ``init_from.path``.
    """
    if init_from.path is None:
        return None
    path = init_from.path
    overrides = to_dict(init_from.overrides)
    if not os.path.isfile(os.path.expanduser(path)):
        read_folder = find_target(FOLDER_READER, "init_from")  # by name: the core does not import Hugging Face's formats
        try:
            content = read_folder(path, overrides, init_from.ignore)
        except (ImportError, OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"init_from.path={path} cannot be loaded: {error}") from error
        if content is not None:
            parts = dict(zip(("weights", "model_config", "tokenizer", "labels"), content, strict=True))
            return Start(path=path, fold_scale=init_from.fold_scale, **parts)
    if overrides or init_from.ignore:
        raise ConfigError(
            f"init_from.overrides and init_from.ignore are only for a Hugging Face folder, but init_from.path={path} is not one"
        )
    checkpoint = read_checkpoint(os.path.expanduser(path), key="init_from.path", verb="start from")
    state = checkpoint["minitx"]
    model = dict(state["model"])
    target = model.pop("_target_")
    # a user's function may take a TransformerConfig too
    takes_our_keys = target != FROM_PYTHON and {"scale", "scale_factor"} <= model.keys()
    model_config = model if target == MODEL or takes_our_keys else None
    return Start(
        path=path,
        fold_scale=init_from.fold_scale,
        weights=network_weights(checkpoint),
        model_config=model_config,
        tokenizer=Tokenizer.from_dict(state["tokenizer"]) if state["tokenizer"] else None,
        labels=state.get("labels", ()),
        changes=() if model_config else model.get("changes", ()),
    )


def stored_model_config(init_from: InitFrom, trust: bool) -> dict[str, Any]:
    """Return the fields of the model's config in a checkpoint or folder, or {} if it isn't a minitx model.

    Raises:
        ConfigError: without ``trust``, the fields name a class that is not trusted.
    """
    start = load_start(init_from)
    shape = {} if start is None else dict(start.model_config or {})
    if not trust:
        from minitx.training.trust import check_trusted

        check_trusted({"_target_": MODEL, **shape}, "model")
    return shape
