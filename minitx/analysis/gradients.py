"""The size of the gradients of queries, and the signal-to-noise ratio of the gradients of W_Q, W_K and W_V."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis.capture import attention_cores, watch
from minitx.analysis.snapshot import SOURCE, TARGET
from minitx.nn.modes import evaluating
from minitx.nn.precision import widest_float
from minitx.nn.transfer import to_host

Loss = Callable[[Any], tuple[Tensor, Mapping[str, Tensor]]]


def gradient_statistics(model: nn.Module, parts: Sequence[Any], loss: Loss) -> dict[str, dict[str, Any]]:
    """Compute gradient statistics on some batches, without changing any ``.grad`` and without drawing random numbers.

    ==========================================  ================================================================
    ``grad_query_rms``, ``grad_query_median``   over rows i and heads, of ‖dL/dq_i‖, q as the core gets it
    ``grad_query_histogram``                    number of rows by log10 ‖dL/dq_i‖, rounded down to a quarter: ``{"-1.75": 12, …}``;
                                                ``"zero"`` counts rows without any gradient
    ``snr_q``, ``snr_k``, ``snr_v``             ‖ḡ‖² / (Σ_m ‖g_m - ḡ‖² / (M - 1)) of the M parts' gradients g_m of W_Q, W_K, W_V:
                                                power of the mean over the variance of one part; 0 with one part,
                                                left out if the weight is frozen
    ==========================================  ================================================================

    Args:
        model: it runs in evaluation mode. Its mode is restored.
        parts: the M batches.
        loss: a function of a batch that returns two things. The first is the loss L, summed over the targets, so that it does
            not depend on M. The second is a mask of the queries that count, bool (B, L) for each axis. Cores with other queries
            count all rows.

    Returns:
        The five numbers and the histogram of each attention core, by name, over all its calls. The ``grad_query`` entries are left
        out for a core whose query has no gradient (below all trained weights).

    Raises:
        TypeError: the model has int8 layers of torch (``quantize_dynamic``). Their gradients would be 0.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(6, 2)
    >>> statistics = gradient_statistics(attention, list(torch.randn(4, 2, 3, 6)), lambda x: (attention(x).square().sum(), {}))
    >>> sorted(statistics["core"])
    ['grad_query_histogram', 'grad_query_median', 'grad_query_rms', 'snr_k', 'snr_q', 'snr_v']
    """
    for name, module in model.named_modules():
        if re.match(r"torch\.ao\.nn\..*quantized", type(module).__module__):
            raise TypeError(f"{name} is a torch int8 layer without a backward pass: use the model before quantize_dynamic")
    cores, projections = attention_cores(model), projection_weights(model)
    trained = {name: {x: w for x, w in projections.get(name, {}).items() if w.requires_grad} for name in cores}
    weights = {(name, f"snr_{letter}"): weight for name, by_letter in trained.items() for letter, weight in by_letter.items()}
    norms: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in cores}  # (B, L, H), and the rows that count
    gradients: dict[tuple[str, str], list[Tensor]] = {place: [] for place in weights}
    with evaluating(model):
        for part in parts:
            with torch.enable_grad(), watch(model, lambda look: look) as seen:
                value, counted = loss(part)
            looks = [(name, look) for name, calls in seen.items() for look in calls if look.call.query.requires_grad]
            inputs = [*(look.call.query for _, look in looks), *weights.values()]
            computed = iter(torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True))
            for name, look in looks:
                # with a target, only the encoder's self-attention reads the source
                axis = SOURCE if TARGET not in counted or look.kind == "self" else TARGET
                rows = counted.get(axis, look.real_queries)
                norms[name].append((_wide(next(computed)).norm(dim=-1).transpose(1, 2), rows))
            for place, gradient in zip(weights, computed, strict=True):
                gradients[place].append(_wide(gradient).flatten())
    noises = {place: _signal_and_noise(torch.stack(of_parts)) for place, of_parts in gradients.items()}
    norms, noises = to_host((norms, noises))
    result: dict[str, dict[str, Any]] = {name: {} for name in cores}
    for name, calls in ((name, calls) for name, calls in norms.items() if calls):
        rows = torch.cat([of_call[counts].flatten() for of_call, counts in calls])
        sizes = {"grad_query_rms": float(rows.square().mean().sqrt()), "grad_query_median": float(rows.median())}
        result[name] |= {**sizes, "grad_query_histogram": _log_histogram(rows)}
    for (name, key), (signal, noise) in noises.items():
        result[name][key] = float(signal / noise) if noise > 0 else 0.0
    return result


def projection_weights(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return W_Q, W_K and W_V of every attention layer as ``q``, ``k`` and ``v``, by the name of the core.

    In the layer of an adopted model, they are the matrices whose names begin with these letters (``q_proj``, ``query``, ``q_lin``).
    A layer without exactly one matrix per letter is left out, for example a layer with a single matrix for all three.
    """
    by_core: dict[str, dict[str, Tensor]] = {}
    for name in attention_cores(model):
        layer = model.get_submodule(name.removesuffix("core").removesuffix("."))
        weights = {part: getattr(child, "weight", None) for part, child in layer.named_children()}
        matrices = {part: weight for part, weight in weights.items() if isinstance(weight, Tensor) and weight.dim() == 2}
        chosen = {letter: [weight for part, weight in matrices.items() if part[0] == letter] for letter in "qkv"}
        if all(len(candidates) == 1 for candidates in chosen.values()):
            by_core[name] = {letter: weight for letter, [weight] in chosen.items()}
    return by_core


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(widest_float(tensor.device))


def _log_histogram(norms: Tensor) -> dict[str, int]:
    """Counts by the lower edge of a quarter of a decade, ascending; zeros and NaN first."""
    positive = norms[norms > 0]
    edges, counts = torch.unique((positive.log10() * 4).floor() / 4, return_counts=True)
    by_edge = {f"{edge:.2f}": int(count) for edge, count in zip(edges.tolist(), counts.tolist(), strict=True)}
    return {"zero": len(norms) - len(positive), **by_edge} if len(positive) < len(norms) else by_edge


def _signal_and_noise(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """(M, number of weights) -> ‖mean‖², and the variance of one part."""
    noise = gradients.var(0).sum() if len(gradients) > 1 else gradients.new_zeros(())
    return gradients.mean(0).square().sum(), noise
