"""Training FLOPs of a model, computed from its config alone."""

from __future__ import annotations

from collections import defaultdict
from functools import cache

from minitx.config import TransformerConfig


@cache
def train_flops(config: TransformerConfig, length: int | None = None, decoder_length: int | None = None) -> float:
    """Return the floating-point operations of one training step on one *row* of ``length`` tokens.

    The formula is

        N_mm      = layers · (4·E² + 2·E·F) + E·V        (3·E·F with a gated activation)
        forward   = length · (2·N_mm + 4·layers·E·T_eff)
        training  = 3 · forward

    T_eff is the mean number of keys that a query sees: T without a mask, (T + 1) / 2 with a causal mask, fewer with a window.
    Only matrix products count, with two operations for each multiplication and addition. Embedding look-ups do not count; a
    tied head does. If H·D differs from E, the projections use H·D. Grouped key heads count with their own size. Exact attention
    is assumed for every core, and padding counts. Divide by ``length`` for FLOPs per token.

    Args:
        config: the config of one of our models. Sizes that depend on the data (``vocab_size``, ``num_labels``, …) must be set.
        length: the number of tokens; of an encoder–decoder, in the source. None for an image, whose tokens are its patches and
            the class token.
        decoder_length: the number of tokens of the target. None: ``length``.

    Returns:
        The FLOPs of the forward and the backward pass of one row, as in Chowdhery et al. 2022 (arXiv:2204.02311, Appendix B).

    >>> config = TransformerConfig(vocab_size=50257, embed_dim=768, num_heads=12, num_layers=12)
    >>> round(train_flops(config, 1024) / 1024 / 1e6)
    798
    """
    return 3.0 * sum(forward_flops(config, length, decoder_length).values())


def forward_flops(config: TransformerConfig, length: int | None = None, decoder_length: int | None = None) -> dict[str, float]:
    """Return the operations of the forward pass by part, summed over all layers. See ``train_flops``.

    The parts are ``embedding`` (the patches of an image), ``q_proj``, ``k_proj``, ``v_proj``, ``core``, ``out_proj``,
    ``feedforward`` and ``head``.

    >>> config = TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)
    >>> forward_flops(config, 5)["core"] == 2 * 4 * 5 * 12 * (5 + 1) / 2  # layers · 4 · L · E · T_eff
    True
    """
    found: dict[str, float] = defaultdict(float)
    if config.architecture == "vision":
        patches = ((config.image_size or 0) // config.patch_size) ** 2
        length = patches + config.num_class_tokens
        found["embedding"] = 2 * patches * (config.num_channels or 0) * config.patch_size**2 * config.embed_dim
    assert length is not None
    target = length
    if config.architecture != "decoder":
        _add_stack(found, config, config.num_layers, length, causal=False)
    if config.architecture == "encoder_decoder":
        target = decoder_length or length
        for _ in range(config.decoder_layers):
            _add_attention(found, config, target, length, float(length))
    if config.architecture in ("decoder", "encoder_decoder"):
        _add_stack(found, config, config.decoder_layers, target, causal=True)
    found["head"] = _head(config, target)
    return found


def _add_stack(found: dict[str, float], config: TransformerConfig, layers: int, length: int, *, causal: bool) -> None:
    """Add self-attention and feed-forward of ``layers`` blocks."""
    matrices = (3 if "glu" in config.activation else 2) * config.embed_dim * config.ffn_width
    found["feedforward"] += layers * 2 * length * matrices
    for layer in range(layers):
        w = min(config.window_of(layer) or length, length)
        before = (w * (w + 1) / 2 + (length - w) * w) / length  # keys up to the query's own
        _add_attention(found, config, length, length, before if causal else 2 * before - 1)


def _add_attention(found: dict[str, float], config: TransformerConfig, queries: int, keys: int, visible: float) -> None:
    """Add one layer of attention: four projections, and ``visible`` scores and weighted values for each query."""
    E, D, heads, kv_heads = config.embed_dim, config.width_per_head, config.num_heads, config.kv_heads
    rows = {"q_proj": heads * queries, "k_proj": kv_heads * keys, "v_proj": kv_heads * keys, "out_proj": heads * queries}
    for name, count in rows.items():
        found[name] += 2 * E * D * count
    found["core"] += 4 * heads * D * queries * visible


def _head(config: TransformerConfig, length: int) -> float:
    """The map to logits: at every token, or once a row."""
    E = config.embed_dim
    if config.head == "lm":
        return 2.0 * length * E * ((config.vocab_size or 0) + E * config.head_transform)
    rows = length if config.head == "token" else 1
    return 2.0 * E * (rows * (config.num_labels or 0) * (config.head != "none") + E * config.pooler)
