"""``nn.Linear``, and a faster product for the few rows of a decoding step on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# up to how many rows, and from how many weights on, halves beat the whole (measured by benchmarks/few_rows.py)
MOST_ROWS, LEAST_WEIGHTS = 4, 2**16


class Linear(nn.Linear):
    """x Wᵀ + b, as ``nn.Linear`` in all but speed.

    The product of a large matrix with a row or a few, which a decoding step is made of, is bound by reading W. On a CPU the
    kernel behind ``F.linear`` reads it at less than half of the memory's speed; as a batch of two products, one for each half
    of W's rows, it comes close to it. Looks at types and sizes only; gradients, hooks and names are ``nn.Linear``'s.

    Shapes: (..., in_features) to (..., out_features).

    >>> Linear(3, 2)(torch.randn(5, 3)).shape
    torch.Size([5, 2])
    """

    def forward(self, input: Tensor) -> Tensor:
        if not _faster_in_halves(input, self.weight):
            return super().forward(input)
        out = product_in_halves(input.reshape(-1, self.in_features), self.weight)
        return (out if self.bias is None else out + self.bias).view(*input.shape[:-1], self.out_features)


def _faster_in_halves(input: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or not input.device.type == weight.device.type == "cpu":
        return False
    return (
        weight.numel() >= LEAST_WEIGHTS
        and 0 < input.numel() <= MOST_ROWS * weight.shape[1]
        and input.dtype == weight.dtype == torch.float32
        and type(weight) is nn.Parameter  # nothing sharded, batched or quantised
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )


def product_in_halves(rows: Tensor, weight: Tensor) -> Tensor:
    """rows Wᵀ, (R, in) to (R, out), as two products at once and that of the last row of W where it has an odd number.

    >>> rows, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> product_in_halves(rows, weight)
    tensor([[1., 2., 3.]])
    """
    half, width = len(weight) // 2, weight.shape[1]
    halves = weight[: 2 * half].view(2, half, width)
    out = torch.bmm(halves, rows.t().expand(2, -1, -1)).view(2 * half, len(rows)).t()  # (2, out / 2, R) to (R, out)
    return torch.cat([out, F.linear(rows, weight[2 * half :])], 1) if len(weight) % 2 else out.contiguous()
