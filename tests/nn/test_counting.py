"""Training FLOPs by formula equal those that torch counts."""

from __future__ import annotations

import pytest
import torch

from minitx.config import TransformerConfig
from minitx.nn.counting import count_flops, fit_exponent, train_flops
from minitx.nn.models import build_model

SMALL = {"vocab_size": 41, "embed_dim": 24, "num_heads": 3, "num_layers": 2, "max_len": 32, "backend": "math"}
T = 13


def counted(config, length, target=None):
    """Of one row."""
    model, inputs = build_model(config), {"input_ids": torch.randint(config.vocab_size, (2, length))}
    if config.architecture == "encoder_decoder":
        inputs["decoder_input_ids"] = torch.randint(config.vocab_size, (2, target))
    if config.architecture == "vision":
        inputs = {"pixel_values": torch.randn(2, config.num_channels, config.image_size, config.image_size)}
    return count_flops(lambda: model(**inputs).sum().backward()) / 2


@pytest.mark.parametrize("options", [
    {"architecture": "encoder", "num_kv_heads": 1, "head_dim": 10}, {"architecture": "encoder", "head_transform": True},
    {"architecture": "encoder", "activation": "swiglu", "ffn_dim": 31, "tie_embeddings": False},
    {"architecture": "encoder", "head": "token", "num_labels": 5},
    {"architecture": "encoder", "head": "sequence", "num_labels": 5, "pooler": True},
    {"architecture": "encoder", "head": "none", "pooler": True},
    {"num_kv_heads": 1, "activation": "geglu"}, {"window": 4},
    {"architecture": "encoder_decoder", "num_decoder_layers": 1, "num_kv_heads": 1}, {"architecture": "encoder_decoder"},
], ids=str)  # fmt: skip
def test_a_model_costs_what_torch_counts_but_for_a_decoders_hidden_scores(options):
    """The kernel multiplies all T² pairs; the formula counts those that the mask shows."""
    config = TransformerConfig(**SMALL, **options)
    target = 7 if config.architecture == "encoder_decoder" else T
    visible = sum(min(i + 1, config.window or target) for i in range(target))
    layers = 0 if config.architecture == "encoder" else config.decoder_layers
    hidden = 3 * 4 * layers * config.embed_dim * (target**2 - visible)
    assert counted(config, T, target) == train_flops(config, T, target) + hidden


def test_a_picture_costs_what_torch_counts_but_for_the_gradient_of_its_pixels():
    config = TransformerConfig(**SMALL, architecture="vision", head="sequence", num_labels=5, image_size=6, num_channels=3)
    assert counted(config, 10) == train_flops(config) - 2 * 9 * 3 * 4 * config.embed_dim


def test_a_core_of_ones_own_costs_what_exact_attention_does():
    """A part of a config cannot be hashed."""
    config = TransformerConfig(**{**SMALL, "backend": "auto"}, attention={"_target_": "minitx.nn.DotProductAttention"})
    assert train_flops(config, T) == train_flops(TransformerConfig(**SMALL), T) > 0


def test_what_costs_nothing_has_no_exponent():
    with pytest.raises(ValueError, match=r"must be positive, got \[1, 2\] and \[0, 3\]"):
        fit_exponent((1, 2), (0, 3))
