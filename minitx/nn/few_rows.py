"""A faster product for a matrix and the few rows of a decoding step, on a CPU."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# up to how many rows, and from how many weights on, halves beat the whole (benchmarks/few_rows.py; smaller matrices, and all of
# models that fit into a cache, are read from there, where the usual kernel is as fast)
MOST_ROWS, LEAST_WEIGHTS = 4, 2**19


class FewRows:
    """A context in which a large ``nn.Linear`` of ``model`` meets up to four rows as two products, one for each half of W.

    Such products, of which a decoding step consists, are bound by reading W. On a CPU the kernel behind ``F.linear`` reads it at
    less than half of the memory's speed; a batch of two products comes close to it. Everything else is as outside of the
    context: other layers, calls of which a gradient is wanted (whose backward pass would be slower), other devices, number types
    and layouts, compiled code. Works for any model, and hooks fire; answers agree to rounding. While it lasts, the layers have another
    ``forward``; a layer that somebody gave a ``forward`` of its own keeps it. A context can be entered again and again.
    ``minitx.generation.generate`` reads under it; a decoding loop of one's own may do so as well.

    >>> layer, row = nn.Linear(1024, 1024), torch.randn(1, 1024)
    >>> with torch.no_grad(), FewRows(layer):
    ...     out = layer(row)
    >>> bool(torch.allclose(out, layer(row), atol=1e-5))
    True
    """

    def __init__(self, model: nn.Module) -> None:
        linears = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m).forward is nn.Linear.forward]
        self.layers = [m for m in linears if m.weight.numel() >= LEAST_WEIGHTS and m.weight.device.type == "cpu"]
        self.changed: list[list[nn.Linear]] = []  # by each entering that has not ended

    def __enter__(self) -> None:
        self.changed.append([layer for layer in self.layers if "forward" not in vars(layer)])
        for layer in self.changed[-1]:
            vars(layer)["forward"] = partial(_forward, layer)

    def __exit__(self, *error: object) -> None:
        for layer in self.changed.pop():
            vars(layer).pop("forward", None)


def _forward(layer: nn.Linear, input: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    return (linear_in_halves if faster_in_halves(input, weight, bias) else F.linear)(input, weight, bias)


def faster_in_halves(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether this call is one that halves make faster; looks at no values."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # a graph is for any number of rows
        return False
    if weight.numel() < LEAST_WEIGHTS or not 0 < input.numel() <= MOST_ROWS * weight.shape[-1]:
        return False
    tensors = (input, weight) if bias is None else (input, weight, bias)
    plain = all(
        type(tensor) in (Tensor, nn.Parameter)  # nothing sharded or quantised
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and tensor.layout == torch.strided
        and not torch._C._functorch.is_batchedtensor(tensor)  # a weight would be copied for each sample
        for tensor in tensors
    )
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    fits = weight.dim() == 2 and input.shape[-1:] == weight.shape[1:] and (bias is None or bias.shape == weight.shape[:1])
    known = torch.backends.mkl.is_available() and not torch.is_autocast_enabled("cpu")
    return plain and fits and known and not learns and weight.is_contiguous()


def linear_in_halves(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: (..., in) to (..., out), as two products at once and that of the last row of W where it has an odd number.

    >>> weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> linear_in_halves(torch.tensor([[1.0, 2.0]]), weight)
    tensor([[1., 2., 3.]])
    """
    (outputs, width), half = weight.shape, len(weight) // 2
    rows = input.reshape(-1, width)
    out = torch.bmm(weight[: 2 * half].view(2, half, width), rows.t().expand(2, -1, -1))  # (2, out / 2, R)
    out = out.view(2 * half, len(rows)).t()
    out = torch.cat([out, rows @ weight[2 * half :].t()], 1) if outputs % 2 else out.contiguous()
    return (out if bias is None else out + bias).view(*input.shape[:-1], outputs)
