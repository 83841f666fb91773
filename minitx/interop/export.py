"""``export_onnx``: write a model as an ONNX file."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim

from minitx.config import TransformerConfig
from minitx.nn.models import TransformerModel
from minitx.nn.modes import evaluating


def export_onnx(model: TransformerModel, path: str | Path) -> None:
    """Write a model as an ONNX graph with any batch size and any length.

    The output is ``logits``. The inputs, all of them required, are those of the model's ``forward``:

    * text models: ``input_ids`` (B, L) int64 and ``key_mask`` (B, L) bool, which is True everywhere without padding;
    * with ``type_vocab_size`` also ``token_type_ids`` (B, L) int64;
    * an encoder–decoder also ``decoder_input_ids`` and ``decoder_key_mask``;
    * a Vision Transformer only ``pixel_values`` (B, C, image_size, image_size).

    The logits at padded positions are undefined.

    Args:
        model: a model of ``minitx.nn``, which is exported in evaluation mode.
        path: the file. Weights above 2 GB are written to a second file beside it.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        ValueError: what ONNX has no operator for: ``backend=chunked``, and causal ``linear`` or ``performer`` attention.
    """
    config = model.config
    causal = config.architecture in ("decoder", "encoder_decoder")
    for name, lacking in (
        ("backend", config.backend == "chunked"),
        ("attention", causal and config.attention in ("linear", "performer")),
    ):
        if lacking:
            raise ValueError(
                f"a model with {name}={getattr(config, name)} cannot be written as ONNX, which has no operator for it"
            )
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(f"export_onnx needs {' and '.join(missing)}: install minitx with the extra export")
    inputs, open_axes = _inputs(config)
    device = next(model.parameters()).device
    with evaluating(model), warnings.catch_warnings():  # torch's exporter emits DeprecationWarnings
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            kwargs={name: tensor.to(device) for name, tensor in inputs.items()},
            dynamic_shapes=open_axes,
            input_names=list(inputs),
            output_names=["logits"],
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(str(path))


def _inputs(config: TransformerConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return example inputs of the model, and their axes of variable size."""
    if config.architecture == "vision":
        assert config.image_size is not None and config.num_channels is not None
        pixels = torch.zeros(2, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": pixels}, {"pixel_values": {0: Dim("batch")}}
    inputs, axes = {}, {}
    limit = {"max": config.max_len} if config.position == "learned" else {}
    lengths = {"": 5, "decoder_": 7} if config.architecture == "encoder_decoder" else {"": 5}
    for side, length in lengths.items():
        length = min(length, config.max_len) if limit else length
        inputs[f"{side}input_ids"] = torch.zeros(2, length, dtype=torch.long)
        inputs[f"{side}key_mask"] = torch.ones(2, length, dtype=torch.bool)
        axes[f"{side}input_ids"] = axes[f"{side}key_mask"] = {0: Dim("batch"), 1: Dim(f"{side}length", **limit)}
    if config.type_vocab_size:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        axes["token_type_ids"] = axes["input_ids"]
    return inputs, axes
