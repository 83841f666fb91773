"""Transformer models that are built from a ``TransformerConfig``."""

from __future__ import annotations

from minitx.config import TransformerConfig
from minitx.nn.models.base import TransformerModel
from minitx.nn.models.decoder import DecoderLM
from minitx.nn.models.encoder import Encoder
from minitx.nn.models.encoder_decoder import EncoderDecoder
from minitx.nn.models.parts import Core
from minitx.nn.models.vision import VisionTransformer

__all__ = ["MODELS", "DecoderLM", "Encoder", "EncoderDecoder", "TransformerModel", "VisionTransformer", "build_model"]

MODELS = {model.architecture: model for model in (DecoderLM, Encoder, EncoderDecoder, VisionTransformer)}


def build_model(config: TransformerConfig, core: Core | None = None) -> TransformerModel:
    """Build the model of ``config.architecture``. ``core`` builds the attention core of each layer, instead of ``config.attention``.

    >>> from minitx.config import TransformerConfig
    >>> type(build_model(TransformerConfig(architecture="encoder", vocab_size=11))).__name__
    'Encoder'
    """
    return MODELS[config.architecture](config, core=core)
