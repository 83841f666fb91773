"""``init_from``: weights to start from, of a checkpoint or of a model folder, Hugging Face's or ours."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from minitx.config import ConfigError, TransformerConfig, to_dict
from minitx.config.checks import first_line
from minitx.data.tokenizers import Tokenizer, from_dict, load_tokenizer
from minitx.nn.scale import ScoreScale, fold_scale
from minitx.training.checkpoint import network_weights, read_checkpoint

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def load_start(path: str) -> tuple[dict[str, Any], dict[str, Any] | None, Tokenizer | None]:
    """(weights by name, the model's config as plain data, tokenizer) of a checkpoint or a folder.

    The config is None where the model is not one of ours. The latest answer is kept, because a run asks twice.

    Raises:
        ConfigError: nothing there that can be read; the message names ``init_from.path``.
    """
    place = Path(path).expanduser()
    if place.is_dir() and (place / "config.json").is_file():
        return _of_folder(place, path)
    if place.is_dir() and not (place / ".metadata").is_file():
        raise ConfigError(f"init_from.path={path} is a folder without config.json")
    try:
        checkpoint = read_checkpoint(place)
    except ConfigError as error:
        raise ConfigError(str(error).replace("ckpt_path=", "init_from.path=", 1)) from None
    state = checkpoint["minitx"]
    shape = None if "_target_" in state["model"] else dict(state["model"])
    return network_weights(checkpoint), shape, from_dict(state["tokenizer"]) if state["tokenizer"] else None


def _of_folder(folder: Path, path: str) -> tuple[dict[str, Any], dict[str, Any], Tokenizer | None]:
    from minitx.interop import from_pretrained, load_hf

    try:
        ours = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("format") == "minitx"
        model = from_pretrained(folder) if ours else load_hf(folder)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"init_from.path={path} cannot be loaded: {error}") from error
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    return dict(model.state_dict()), to_dict(model.config), tokenizer


def stored_shape(path: str) -> dict[str, Any]:
    """The fields of the model's config in a checkpoint or folder; {} where the model is not one of ours."""
    return dict(load_start(path)[1] or {})


def check_scale_of(path: str, model: TransformerConfig, *, fold: bool = False) -> None:
    """Refuse another score scale than that of the weights unless it is folded; say that ``model.init_fold`` does nothing.

    Raises:
        ConfigError: ``scale`` or ``scale_factor`` differs.
    """
    stored = stored_shape(path)
    for name in ("scale", "scale_factor"):
        if not fold and stored and stored.get(name, getattr(model, name)) != getattr(model, name):
            raise ConfigError(
                f"model.{name}={getattr(model, name)} differs from {stored[name]}, with which the weights of init_from.path={path} "
                "were trained: another scale is another function, unless init_from.fold_scale=true"
            )
    if model.init_fold is not None:
        log.info("model.init_fold=%s is ignored: the weights come from init_from.path=%s", model.init_fold, path)


def start_from(path: str, network: nn.Module, *, fold: bool = False) -> None:
    """Give ``network`` the weights of ``path``; ``fold`` another score scale than theirs into them.

    Raises:
        ConfigError: a tensor is missing, left over or of another shape; torch's own words name it. A scale that cannot be folded.
    """
    try:
        weights, shape, _ = load_start(path)
        network.load_state_dict(weights)
        wanted: Any = getattr(network, "config", None)
        if fold and shape is not None and isinstance(wanted, TransformerConfig):
            for layer in network.modules():  # the scale of the weights, then the wanted one
                if isinstance(scale := getattr(layer, "scale", None), ScoreScale):
                    layer.scale = ScoreScale(shape["scale"], head_dim=scale.head_dim, factor=shape["scale_factor"])
            fold_scale(network, wanted.scale, factor=wanted.scale_factor)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"init_from.path={path} does not fit the model: {first_line(error)}") from error
    finally:
        load_start.cache_clear()  # the weights are not kept twice
