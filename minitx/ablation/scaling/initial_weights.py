"""How large the logits of attention are at the initial weights: passes of single layers, without training."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minitx.analysis.canvas import INK, PALETTE, label, legend, log_ticks, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class InitRow(NamedTuple):
    """A scheme of initial weights at one d_k: the row-centred std of the unscaled logits, Var(q·k), and ‖∇W_Q‖ without / with the scale."""

    scheme: str
    width: int
    row_std: float
    variance: float
    gradient_ratio: float


SCHEMES = {
    "lecun": "LeCun (variance 1/d)",
    "torch_mha": "nn.MultiheadAttention",
    "torch_linear": "nn.Linear default",
    "t5": "T5",
    "gpt2": "GPT-2 (std 0.02)",
}
WIDTHS, EMBED_DIM, LENGTH = (4, 8, 16, 32, 64, 128), 128, 64


@functools.cache
def init_sweep() -> tuple[InitRow, ...]:
    """Attention layers at their initial weights on unit-normal input: one forward and one backward pass each, no training."""
    import torch

    from minitx.analysis import capture
    from minitx.nn import MultiHeadAttention
    from minitx.nn.init import init_weights

    found = []
    for scheme in SCHEMES:
        for width in WIDTHS:
            norms = []
            for scale in ("inv_sqrt", "unscaled"):
                draws = torch.Generator().manual_seed(0)
                layer = MultiHeadAttention(EMBED_DIM, EMBED_DIM // width, scale=scale)
                init_weights(layer, scheme, generator=draws)
                x = torch.randn(8, LENGTH, EMBED_DIM, generator=draws)
                with capture(layer) as seen:
                    out = layer(x)
                (gradient,) = torch.autograd.grad(out, [layer.q_proj.weight], torch.randn(out.shape, generator=draws))
                norms.append(float(gradient.norm()))
            spread, variance = (float(seen["core"][0][name].mean()) for name in ("row_std", "dot_product_variance"))
            found.append(InitRow(scheme, width, spread, variance, norms[1] / norms[0]))
    return tuple(found)


def variance_slope() -> float:
    """Slope of ln Var(q·k) on ln d_k with LeCun's initial weights."""
    rows = [row for row in init_sweep() if row.scheme == "lecun"]
    return float(np.polyfit(np.log([row.width for row in rows]), np.log([row.variance for row in rows]), 1)[0])


def init_figure() -> Figure:
    """The spread of the logits along a row against d_k, with the thresholds √(2 ln n)."""
    drawn, axes = panels(1, 1, width=6.2, height=3.2)
    ax, looks = axes[0, 0], []
    for (scheme, text), (color, marker) in zip(SCHEMES.items(), PALETTE, strict=False):
        spreads = [row.row_std for row in init_sweep() if row.scheme == scheme]
        ax.plot(WIDTHS, spreads, marker=marker, color=color, markersize=4.5, linewidth=1.2)
        looks.append((text, color, marker, "-"))
    for length, line in ((16, ":"), (64, "-."), (1024, "--")):
        limit = math.sqrt(2 * math.log(length))
        ax.axhline(limit, color=INK, linewidth=0.9, linestyle=line)
        ax.text(1.01, limit, f"{length} keys", transform=ax.get_yaxis_transform(), fontsize=7, va="center")
    ax.set_xscale("log", base=2)
    log_ticks(ax)
    ax.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
    label(ax, "", "d_k", "standard deviation of the logits along a row")
    legend(drawn, looks)
    return drawn
