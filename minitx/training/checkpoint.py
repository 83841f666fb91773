"""A checkpoint alone gives the model, its tokenizer and its config: what generation and evaluation start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from minitx.config import ConfigError, TransformerConfig
from minitx.data.tokenizers import Tokenizer, from_dict
from minitx.nn.models import TransformerModel, build_model


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint's plain content, on the CPU. Nothing in it is executed.

    Raises:
        ConfigError: no such file, or not a checkpoint of ours.
    """
    if not Path(path).is_file():
        raise ConfigError(f"ckpt_path={path} is not a file")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        dict(checkpoint["minitx"]["model"])
    except Exception as error:  # torch raises many kinds for a damaged or foreign file
        raise ConfigError(f"ckpt_path={path} cannot be read as a checkpoint of minitx: {first_line(error)}") from None
    return checkpoint


def load_model(path: str | Path) -> tuple[TransformerModel, Tokenizer | None, dict[str, Any]]:
    """The trained network of a checkpoint, in eval mode on the CPU.

    Returns:
        ``(model, tokenizer, state)``: the tokenizer is None where the data had none; ``state`` is the plain data that the
        run stored: ``config`` (of the whole run), ``model`` and ``tokenizer``.

    Raises:
        ConfigError: no such file, not a checkpoint of ours, or one of a model that this version cannot build.
    """
    checkpoint = read_checkpoint(path)
    state = checkpoint["minitx"]
    try:
        model = build_model(TransformerConfig(**state["model"]))
        weights = {name.removeprefix("network."): weight for name, weight in checkpoint["state_dict"].items()}
        model.load_state_dict(weights)
        tokenizer = None if state["tokenizer"] is None else from_dict(state["tokenizer"])
    except Exception as error:  # an unknown field, weights of other shapes, a tokenizer of another kind
        raise ConfigError(f"ckpt_path={path} holds a model that cannot be built: {first_line(error)}") from error
    return model.eval(), tokenizer, state


def place(model: TransformerModel, device: str) -> TransformerModel:
    """``model`` on ``device``, a word of torch's; ``auto`` takes a GPU if there is one.

    Raises:
        ConfigError: a word that is none, or a device that is not there.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.to(torch.device(device))
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"device={device} cannot be used: {str(error).splitlines()[0]}") from error


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return " ".join(line.strip() for line in lines[:2])[:200]  # torch names the tensors in the second line
