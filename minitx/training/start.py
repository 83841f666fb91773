"""``init_from``: weights to start from, in a checkpoint or a model folder (Hugging Face's or ours)."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from minitx.config import ConfigError, InitFrom, TransformerConfig, to_dict
from minitx.config.checks import first_line
from minitx.data.tokenizers import Tokenizer, from_dict, load_tokenizer
from minitx.nn.scale import ScoreScale, fold_scale
from minitx.training.checkpoint import network_weights, read_checkpoint

log = logging.getLogger(__name__)


Start = tuple[dict[str, Any], dict[str, Any] | None, Tokenizer | None]


def load_start(init_from: InitFrom) -> Start:
    """Load (weights by name, the model's config as plain data, tokenizer) from a checkpoint, a folder or a name on the hub.

    The config is None if the model is not one of ours. The latest result is cached, because a run needs it twice.

    Raises:
        ConfigError: nothing can be read there. The message names ``init_from.path``.
    """
    return _load_start(str(init_from.path), json.dumps(to_dict(init_from.overrides)), init_from.ignore)


@lru_cache(maxsize=1)
def _load_start(path: str, overrides: str, ignore: tuple[str, ...]) -> Start:
    from minitx.interop.files import find_folder

    place = Path(path).expanduser()
    if not place.exists():
        try:
            place = find_folder(path)
        except (ImportError, FileNotFoundError) as error:
            raise ConfigError(f"init_from.path={path} cannot be loaded: {error}") from None
    if place.is_dir() and (place / "config.json").is_file():
        return _of_folder(place, path, json.loads(overrides), ignore)
    if json.loads(overrides) or ignore:
        raise ConfigError(f"init_from.overrides and init_from.ignore belong to a Hugging Face folder, not to {path}")
    if place.is_dir() and not (place / ".metadata").is_file():
        raise ConfigError(f"init_from.path={path} is a folder without config.json")
    checkpoint = read_checkpoint(place, key="init_from.path", verb="start from")
    state = checkpoint["minitx"]
    shape = None if "_target_" in state["model"] else dict(state["model"])
    return network_weights(checkpoint), shape, from_dict(state["tokenizer"]) if state["tokenizer"] else None


def _of_folder(folder: Path, path: str, overrides: dict[str, Any], ignore: tuple[str, ...]) -> Start:
    from minitx.interop import from_pretrained, load_hf

    try:
        ours = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("format") == "minitx"
        model = from_pretrained(folder) if ours else load_hf(folder, overrides=overrides, ignore=ignore)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"init_from.path={path} cannot be loaded: {error}") from error
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    return dict(model.state_dict()), to_dict(model.config), tokenizer


def stored_shape(init_from: InitFrom) -> dict[str, Any]:
    """Return the fields of the model's config in a checkpoint or folder, or {} if the model is not one of ours."""
    return dict(load_start(init_from)[1] or {})


def check_scale_of(init_from: InitFrom, model: TransformerConfig) -> None:
    """Raise a ConfigError if the score scale differs from that of the weights and is not folded. Warn that ``model.init_fold`` has no effect.

    Raises:
        ConfigError: ``scale`` or ``scale_factor`` differs.
    """
    stored, path = stored_shape(init_from), init_from.path
    for name in ("scale", "scale_factor"):
        if not init_from.fold_scale and stored and stored.get(name, getattr(model, name)) != getattr(model, name):
            raise ConfigError(
                f"model.{name}={getattr(model, name)} differs from {stored[name]}, with which the weights of init_from.path={path} "
                "were trained: another scale is another function, unless init_from.fold_scale=true"
            )
    if model.init_fold is not None:
        log.info("model.init_fold=%s is ignored: the weights come from init_from.path=%s", model.init_fold, path)


def start_from(init_from: InitFrom, network: nn.Module) -> None:
    """Load the weights of ``init_from.path`` into ``network``. With ``fold_scale``, fold a different score scale into them.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape (torch's message names it), or the scale cannot be
            folded.
    """
    try:
        weights, shape, _ = load_start(init_from)
        network.load_state_dict(weights)
        wanted: Any = getattr(network, "config", None)
        if init_from.fold_scale and shape is not None and isinstance(wanted, TransformerConfig):
            for layer in network.modules():  # the scale of the weights, then the wanted one
                if isinstance(scale := getattr(layer, "scale", None), ScoreScale):
                    layer.scale = ScoreScale(shape["scale"], head_dim=scale.head_dim, factor=shape["scale_factor"])
            fold_scale(network, wanted.scale, factor=wanted.scale_factor)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"init_from.path={init_from.path} does not fit the model: {first_line(error)}") from error
    finally:
        _load_start.cache_clear()  # the weights are not kept twice
