"""Whole models: one frozen ``TransformerConfig`` in, logits out."""

from __future__ import annotations

from torch import nn

from minitx.config import TransformerConfig
from minitx.nn.models.decoder import DecoderLM

__all__ = ["MODELS", "DecoderLM", "build_model"]

MODELS: dict[str, type[nn.Module]] = {"decoder": DecoderLM}


def build_model(config: TransformerConfig) -> nn.Module:
    """The model that ``config.architecture`` names."""
    return MODELS[config.architecture](config)
