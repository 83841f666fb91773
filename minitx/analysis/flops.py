"""Training FLOPs of a model, from its config alone. Nothing heavy is imported."""

from __future__ import annotations

from functools import cache

from minitx.config import TransformerConfig


@cache
def train_flops(config: TransformerConfig, length: int | None = None, decoder_length: int | None = None) -> float:
    """Floating-point operations of one training step on one *row* of ``length`` tokens.

    The formula is

        N_mm      = layers · (4·E² + 2·E·F) + E·V        (3·E·F with a gated activation)
        forward   = length · (2·N_mm + 4·layers·E·T_eff)
        training  = 3 · forward

    T_eff is the mean number of keys that a query sees: T without a mask, (T + 1) / 2 under a causal mask, fewer with a
    window. Only matrix products count, a multiplication and its addition as two. Embedding look-ups count nothing, a tied
    head counts. Where the heads together are narrower or wider than E, H·D stands for E, and grouped key heads count as they
    are. Exact attention is assumed, whatever core the model uses, and every position counts, padding included. Divide by
    ``length`` for FLOPs per token.

    Args:
        config: of one of our models, with the sizes that the data decide filled in (``vocab_size``, ``num_labels``, …).
        length: tokens of the row: of the source for an encoder–decoder. None for a picture, whose tokens are its patches
            and its class token.
        decoder_length: tokens of the target. None for ``length``.

    Returns:
        FLOPs of the forward and the backward pass of one row, as in Chowdhery et al. 2022 (arXiv:2204.02311, Appendix B).

    >>> config = TransformerConfig(vocab_size=50257, embed_dim=768, num_heads=12, num_layers=12)
    >>> round(train_flops(config, 1024) / 1024 / 1e6)
    798
    """
    if config.architecture == "vision":
        patches = ((config.image_size or 0) // config.patch_size) ** 2
        length = patches + config.num_class_tokens
        patch = patches * (config.num_channels or 0) * config.patch_size**2 * config.embed_dim
        return 3.0 * (_stack(config, config.num_layers, length, causal=False) + _head(config, length) + 2 * patch)
    assert length is not None
    if config.architecture != "encoder_decoder":
        causal = config.architecture == "decoder"
        return 3.0 * (_stack(config, config.num_layers, length, causal=causal) + _head(config, length))
    target, layers = decoder_length or length, config.decoder_layers
    encoder = _stack(config, config.num_layers, length, causal=False)
    decoder = _stack(config, layers, target, causal=True)
    cross = layers * _attention(config, target, length, float(length))
    return 3.0 * (encoder + decoder + cross + _head(config, target))


def _stack(config: TransformerConfig, layers: int, length: int, *, causal: bool) -> float:
    """Self-attention and feed-forward of ``layers`` blocks."""
    matrices = (3 if "glu" in config.activation else 2) * config.embed_dim * config.ffn_width
    if config.num_experts is not None:
        matrices = matrices * config.experts_per_token + config.embed_dim * config.num_experts
    total = layers * 2.0 * length * matrices
    for layer in range(layers):
        w = min(config.window_of(layer) or length, length)
        before = (w * (w + 1) / 2 + (length - w) * w) / length  # keys up to the query's own
        total += _attention(config, length, length, before if causal else 2 * before - 1)
    return total


def _attention(config: TransformerConfig, queries: int, keys: int, visible: float) -> float:
    """One layer of attention: four projections, and ``visible`` scores and weighted values for each query."""
    E, D = config.embed_dim, config.width_per_head
    projections = 2 * E * D * (2 * config.num_heads * queries + 2 * config.kv_heads * keys)
    return projections + 4.0 * config.num_heads * D * queries * visible


def _head(config: TransformerConfig, length: int) -> float:
    """The map to logits: at every token, or once a row."""
    E = config.embed_dim
    if config.head == "lm":
        return 2.0 * length * E * ((config.vocab_size or 0) + E * config.head_transform)
    rows = length if config.head == "token" else 1
    return 2.0 * E * (rows * (config.num_labels or 0) * (config.head != "none") + E * config.pooler)
