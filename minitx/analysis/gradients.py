"""The size of the gradients of queries, and the signal-to-noise ratio of the gradients of W_Q, W_K and W_V."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minitx.analysis.recorder import watch
from minitx.analysis.snapshot import SOURCE, TARGET
from minitx.nn.attention import attention_cores
from minitx.nn.modes import evaluating
from minitx.nn.precision import widest_float
from minitx.nn.transfer import to_host

Loss = Callable[[Any], tuple[Tensor, Mapping[str, Tensor]]]


def gradient_statistics(model: nn.Module, batch: Any, loss: Loss, *, num_parts: int = 4) -> dict[str, dict[str, Any]]:
    """Compute gradient statistics of a batch in one backward pass, without changing any ``.grad`` and without drawing random numbers.

    ==========================================  ================================================================
    ``grad_query_rms``, ``grad_query_median``   over rows i and heads, of ‖dL/dq_i‖, q as the core gets it
    ``grad_query_histogram``                    number of rows by log10 ‖dL/dq_i‖, rounded down to a quarter: ``{"-1.75": 12, …}``;
                                                ``"zero"`` counts rows without any gradient
    ``snr_q``, ``snr_k``, ``snr_v``             ‖ḡ‖² / (Σ_m ‖g_m - ḡ‖² / (M - 1)) of the gradients g_m of W_Q, W_K, W_V on M parts of
                                                the batch: power of the mean over the variance of one part; 0 with one part
    ==========================================  ================================================================

    Args:
        model: it runs in evaluation mode. Its mode is restored.
        batch: passed to ``loss``. The model's rows must not depend on each other.
        loss: a function of the batch that returns two things. The first is the loss L, summed over the targets, so that it does
            not depend on M. The second is a mask of the queries that count, bool (B, L) for each axis. Cores with other queries
            count all rows.
        num_parts: M. The B rows are divided as ``torch.chunk`` does, so fewer rows give fewer parts.

    Returns:
        The five numbers and the histogram of each attention core, by name, over all its calls. The ``grad_query`` entries are left
        out for a core whose query has no gradient (below all trained weights). The ratio of a weight is left out if the weight is
        frozen, or if its layer is not a plain ``Linear`` with inputs (B, …, E) whose output is used unchanged: g_m is Σ (dL/dy)ᵀ x
        over the rows of part m, with the inputs x and outputs y of the layer.

    Raises:
        TypeError: the model has int8 layers of torch (``quantize_dynamic``). Their gradients would be 0.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(6, 2)
    >>> statistics = gradient_statistics(attention, torch.randn(4, 3, 6), lambda x: (attention(x).square().sum(), {}))
    >>> sorted(statistics["core"])
    ['grad_query_histogram', 'grad_query_median', 'grad_query_rms', 'snr_k', 'snr_q', 'snr_v']
    """
    for name, module in model.named_modules():
        if re.match(r"torch\.ao\.nn\..*quantized", type(module).__module__):
            raise TypeError(f"{name} is a torch int8 layer without a backward pass: use the model before quantize_dynamic")
    cores = attention_cores(model)
    layers = {
        (name, f"snr_{letter}"): layer
        for name, of_core in projections(model).items()
        for letter, layer in of_core.items()
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and layer.weight.requires_grad
    }
    with evaluating(model):
        with torch.enable_grad(), watch(model, lambda look: look) as seen, _inputs_and_outputs(layers) as calls:
            value, counted = loss(batch)
        looks = [(name, look) for name, of_core in seen.items() for look in of_core if look.call.query.requires_grad]
        outputs = [(place, tokens, edge) for place, of_layer in calls.items() for tokens, edge in of_layer]
        targets = [*(look.call.query for _, look in looks), *(edge for _, _, edge in outputs)]
        gradients = iter(torch.autograd.grad(value, targets, allow_unused=True))
    norms: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in cores}  # (B, L, H), and the rows that count
    for name, look in looks:
        # with a target, only the encoder's self-attention reads the source
        axis = SOURCE if TARGET not in counted or look.kind == "self" else TARGET
        rows, gradient = counted.get(axis, look.real_queries), next(gradients)
        gradient = torch.zeros_like(look.call.query) if gradient is None else gradient
        norms[name].append((_wide(gradient).norm(dim=-1).transpose(1, 2), rows))
    num_rows = {name: {look.call.query.shape[0] for look in of_core} for name, of_core in seen.items()}
    by_part: dict[tuple[str, str], list[Tensor]] = {}  # M gradients of each weight
    for (place, tokens, _), gradient in zip(outputs, gradients, strict=True):
        if gradient is not None and {tokens.shape[0]} == num_rows[place[0]]:
            parts = _by_part(tokens, gradient, num_parts)
            by_part[place] = [a + b for a, b in zip(by_part[place], parts, strict=True)] if place in by_part else parts
    noises = {place: _signal_and_noise(torch.stack(parts)) for place, parts in by_part.items()}
    norms, noises = to_host((norms, noises))
    result: dict[str, dict[str, Any]] = {name: {} for name in cores}
    for name, of_calls in ((name, of_calls) for name, of_calls in norms.items() if of_calls):
        rows = torch.cat([of_call[counts].flatten() for of_call, counts in of_calls])
        sizes = {"grad_query_rms": float(rows.square().mean().sqrt()), "grad_query_median": _median(rows)}
        result[name] |= {**sizes, "grad_query_histogram": _log_histogram(rows)}
    for (name, key), (signal, noise) in noises.items():
        result[name][key] = float(signal / noise) if noise > 0 else 0.0
    return result


def projections(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the modules with W_Q, W_K and W_V of every attention layer as ``q``, ``k`` and ``v``, by the name of the core.

    In the layer of an adopted model, these are the modules with a matrix whose names begin with these letters (``q_proj``, ``query``,
    ``q_lin``). A layer without exactly one per letter is left out, for example a layer with a single matrix for all three.
    ``nn.folding`` looks for other modules: those after which queries and keys can be multiplied, such as norms.
    """
    by_core: dict[str, dict[str, Any]] = {}
    for name in attention_cores(model):
        layer = model.get_submodule(name.removesuffix("core").removesuffix("."))
        weights = {part: getattr(child, "weight", None) for part, child in layer.named_children()}
        matrices = [part for part, weight in weights.items() if isinstance(weight, Tensor) and weight.dim() == 2]
        chosen = {letter: [layer.get_submodule(part) for part in matrices if part[0] == letter] for letter in "qkv"}
        if all(len(of_letter) == 1 for of_letter in chosen.values()):
            by_core[name] = {letter: child for letter, [child] in chosen.items()}
    return by_core


@contextmanager
def _inputs_and_outputs(layers: Mapping[Any, nn.Module]) -> Iterator[dict[Any, list[tuple[Tensor, GradientEdge]]]]:
    """Record the input of each call of a layer, and where the gradient of its output arrives."""
    calls: dict[Any, list[tuple[Tensor, GradientEdge]]] = {place: [] for place in layers}
    with ExitStack() as hooks:
        for place, layer in layers.items():

            def record(_: nn.Module, inputs: tuple[Tensor], output: Tensor, place: Any = place) -> None:
                if output.requires_grad:
                    calls[place].append((inputs[0].detach(), get_gradient_edge(output)))

            hooks.enter_context(layer.register_forward_hook(record))
        yield calls


def _by_part(tokens: Tensor, gradient: Tensor, num_parts: int) -> list[Tensor]:
    """The gradient of a weight on each part of the batch, from the layer's input (B, …, E) and its output's gradient (B, …, out)."""
    pairs = zip(gradient.chunk(num_parts), tokens.chunk(num_parts), strict=True)
    return [_wide(g.flatten(0, -2).mT @ x.flatten(0, -2)).flatten() for g, x in pairs]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(widest_float(tensor.device))


def _median(values: Tensor) -> float:
    """The median: of an even number of values the mean of the middle two, unlike ``torch.median``."""
    ordered = values.sort().values
    half = len(values) // 2
    return float(ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _log_histogram(norms: Tensor) -> dict[str, int]:
    """Counts by the lower edge of a quarter of a decade, ascending; zeros and NaN first."""
    positive = norms[norms > 0]
    edges, counts = torch.unique((positive.log10() * 4).floor() / 4, return_counts=True)
    by_edge = {f"{edge:.2f}": int(count) for edge, count in zip(edges.tolist(), counts.tolist(), strict=True)}
    return {"zero": len(norms) - len(positive), **by_edge} if len(positive) < len(norms) else by_edge


def _signal_and_noise(gradients: Tensor) -> tuple[Tensor, Tensor]:
    """(M, number of weights) -> ‖mean‖², and the variance of one part."""
    mean = gradients.mean(0)  # gradients.var(0) is ten times slower
    noise = (gradients - mean).square().sum() / max(1, len(gradients) - 1)
    return mean.square().sum(), noise
