"""The operations and the bytes of a computation: counted, and by formula from a config (``train_flops``).

**Operations** are counted by torch's ``FlopCounterMode``: matrix products, two operations for each multiplication with its
addition. Softmax, norms, activations and look-ups are not counted. ``flop_counter`` also counts the CPU's fused attention
(all L × S scores, hidden or not), but torch does not. **Bytes** are the peak of torch's allocator, as torch's profiler reports
it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import linear_regression
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from minitx.config import TransformerConfig
from minitx.nn.feedforward import GATED


def _fused(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **options: Any) -> int:
    """The operations of the CPU's fused attention, from the shapes of its arguments."""
    return 2 * math.prod(query[:3]) * value[2] * (query[3] + value[3])  # 2 · B · H · L · S · (D + Dv)


def _fused_backward(
    grad: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **options: Any
) -> int:
    return 2 * math.prod(query[:3]) * value[2] * (3 * query[3] + 2 * value[3])  # QKᵀ again, dP and dV, dQ and dK


def flop_counter() -> FlopCounterMode:
    """Return a ``FlopCounterMode`` that also counts the CPU's fused attention.

    >>> with flop_counter() as counter:
    ...     out = torch.ones(3, 5) @ torch.ones(5, 7)
    >>> counter.get_total_flops()
    210
    """
    # F.scaled_dot_product_attention calls these operators on a CPU. They have no public names, and torch's counter lacks them.
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return FlopCounterMode(display=False, custom_mapping={forward: _fused, backward: _fused_backward})


def count_flops(run: Callable[[], Any]) -> int:
    """Return the number of operations of the matrix products in ``run()``.

    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
    60
    """
    with flop_counter() as counter:
        run()
    return counter.get_total_flops()


def allocations(run: Callable[[], Any]) -> tuple[int, int]:
    """Return (largest single allocation, peak of allocated bytes) of ``run()`` on the CPU, including memory inside kernels.

    The numbers come from the memory events of ``torch.profiler``. Memory that was allocated before does not count.

    >>> allocations(lambda: torch.ones(10) + torch.ones(10))
    (40, 120)
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    memory = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    sizes = [event["args"]["Bytes"] for event in memory]
    return max(sizes, default=0), max(itertools.accumulate(sizes), default=0)


def fit_exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return p in cost ∝ sizeᵖ: the least-squares slope of ln cost over ln size. 1 is linear, 2 is quadratic.

    Raises:
        ValueError: fewer than two different sizes, a different number of costs, or a number that is not positive.

    >>> round(fit_exponent((1, 10, 100), (3, 300, 30000)), 12)
    2.0
    """
    if any(number <= 0 for number in (*sizes, *costs)):
        raise ValueError(f"sizes and costs must be positive, got {list(sizes)} and {list(costs)}")
    return linear_regression(list(map(math.log, sizes)), list(map(math.log, costs))).slope


# --- by formula


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
        length: the number of tokens; for an encoder–decoder, of the source. None for an image: its tokens are its patches and the
            class token.
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
    flops: dict[str, float] = defaultdict(float)
    if config.architecture == "vision":
        patches = ((config.image_size or 0) // config.patch_size) ** 2
        length = patches + config.num_class_tokens
        flops["embedding"] = 2 * patches * (config.num_channels or 0) * config.patch_size**2 * config.embed_dim
    assert length is not None
    target = length
    if config.architecture != "decoder":
        _add_stack(flops, config, config.num_layers, length, causal=False)
    if config.architecture == "encoder_decoder":
        target = decoder_length or length
        for _ in range(config.decoder_layers):
            _add_attention(flops, config, target, length, float(length))
    if config.architecture in ("decoder", "encoder_decoder"):
        _add_stack(flops, config, config.decoder_layers, target, causal=True)
    flops["head"] = _head(config, target)
    return flops


def _add_stack(flops: dict[str, float], config: TransformerConfig, layers: int, length: int, *, causal: bool) -> None:
    """Add self-attention and feed-forward of ``layers`` blocks."""
    matrices = (3 if config.activation in GATED else 2) * config.embed_dim * config.ffn_width
    flops["feedforward"] += layers * 2 * length * matrices
    for layer in range(layers):
        w = min(config.window_of(layer) or length, length)
        before = (w * (w + 1) / 2 + (length - w) * w) / length  # keys up to the query's own
        _add_attention(flops, config, length, length, before if causal else 2 * before - 1)


def _add_attention(flops: dict[str, float], config: TransformerConfig, queries: int, keys: int, visible: float) -> None:
    """Add one layer of attention: four projections, and ``visible`` scores and weighted values for each query."""
    E, D, heads, kv_heads = config.embed_dim, config.width_per_head, config.num_heads, config.kv_heads
    rows = {"q_proj": heads * queries, "k_proj": kv_heads * keys, "v_proj": kv_heads * keys, "out_proj": heads * queries}
    for name, count in rows.items():
        flops[name] += 2 * E * D * count
    flops["core"] += 4 * heads * D * queries * visible


def _head(config: TransformerConfig, length: int) -> float:
    """The map to logits: at every token, or once per row."""
    E = config.embed_dim
    if config.head == "lm":
        return 2.0 * length * E * ((config.vocab_size or 0) + E * config.head_transform)
    rows = length if config.head == "token" else 1
    labels = 0 if config.head == "none" else config.num_labels or 0
    pooler = E if config.has_pooler and config.head == "sequence" else 0
    return 2.0 * E * (rows * labels + pooler)
