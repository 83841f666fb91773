"""How one attention layer grows with the length of its text: operations and bytes, by formula and as counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minitx.analysis.attention_cost import AttentionShape, attention_call, attention_cost
from minitx.analysis.meter import fit_exponent, measure
from minitx.config import TransformerConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ATTENTIONS: dict[str, dict[str, Any]] = {  # what a model can be asked to attend with, and the options that it then takes
    **{name: {"attention": "exact", "backend": name} for name in ("math", "sdpa", "chunked")},
    "linear": {"attention": "linear"},
    "performer": {"attention": "performer", "num_features": None},
    "linformer": {"attention": "linformer", "num_slots": 64},
}


@dataclass(frozen=True)
class Growth:
    """One attention layer by itself, of the shape that a model gives it, at several lengths.

    ``flops`` and ``bytes`` by formula, ``counted`` and ``peak`` (bytes at once) as measured; the exponents in the length are
    fitted to what was measured.
    """

    attention: str
    lengths: tuple[int, ...]
    flops: tuple[int, ...]
    counted: tuple[int, ...]
    bytes: tuple[int, ...]
    peak: tuple[int, ...]

    @property
    def flops_exponent(self) -> float:
        """p of counted operations ∝ lengthᵖ."""
        return fit_exponent(self.lengths, self.counted)

    @property
    def bytes_exponent(self) -> float:
        """p of measured bytes ∝ lengthᵖ."""
        return fit_exponent(self.lengths, self.peak)


def with_attention(config: TransformerConfig, attention: str, length: int) -> TransformerConfig:
    """``config`` with another core or backend, a word of ``ATTENTIONS``, made for sequences of ``length``.

    Options that it takes (window, block size, features, slots) stay as the model has them, where it has them.

    Raises:
        ConfigError: a model that cannot attend like that, with the reason. ValueError: another word.
    """
    if attention not in ATTENTIONS:
        raise ValueError(f"attention={attention!r} is not known; one of {', '.join(ATTENTIONS)}")
    options = ATTENTIONS[attention]
    taken = {name: getattr(config, name) or options[name] for name in options if name not in ("attention", "backend")}
    foreign = {name: None for name in ("num_features", "num_slots") if name not in options}
    return dataclasses.replace(config, **{**options, **taken, **foreign}, max_len=length)


def growth(
    config: TransformerConfig, attention: str, lengths: Sequence[int], *, batch_size: int = 1, backward: bool = True
) -> Growth:
    """How one attention layer of ``config`` grows with the length if it attends by ``attention``; self-attention, causal in
    a decoder.

    Raises:
        ConfigError, ValueError: as in ``with_attention``; a backend that cannot serve the call.

    >>> config = TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2)
    >>> round(growth(config, "math", (64, 128), backward=False).flops_exponent, 6)
    2.0
    """
    rows = []
    for length in lengths:
        causal = config.architecture in ("decoder", "encoder_decoder")
        shape = AttentionShape(with_attention(config, attention, length), batch_size, length, causal, training=backward)
        found = measure(attention_call(shape))
        flops, estimate = attention_cost(shape)
        rows.append((length, flops, found["flops"], estimate, found["peak"]))
    return Growth(attention, *zip(*rows, strict=True))


def figure(curves: Sequence[Growth], title: str = "") -> Figure:
    """Operations and bytes against length, both logarithmic: marks are measured, lines the formulas, and the legends have the
    fitted exponents.
    """
    from minitx.analysis.canvas import INK, PALETTE, label, panels

    drawn, axes = panels(1, 2, width=5.0, height=3.5)
    kinds = ("operations", "flops", "counted", "flops_exponent"), ("bytes at once", "bytes", "peak", "bytes_exponent")
    for ax, (kind, formula, found, exponent) in zip(axes.flat, kinds, strict=True):
        for curve, (color, marker) in zip(curves, PALETTE, strict=False):
            name = f"{curve.attention}: $n^{{{getattr(curve, exponent):.2f}}}$"
            ax.plot(curve.lengths, getattr(curve, formula), color=color, linewidth=1.0)
            ax.plot(curve.lengths, getattr(curve, found), color=color, marker=marker, markersize=5, linestyle="", label=name)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(curves[0].lengths, [str(length) for length in curves[0].lengths])
        ax.minorticks_off()
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        ax.legend(**place, fontsize=8, frameon=False, title="measured, fitted\nlines: formula", title_fontsize=8)
        label(ax, x="length n", y=kind)
    drawn.suptitle(title, fontsize=9.5, color=INK, parse_math=False)
    return drawn
