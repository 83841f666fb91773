"""Count what each part of a model costs, and how the cost of one layer grows with the length of the row. Nothing is timed.

Operations are those of matrix products (``minitx.nn.counting``), in millions. Softmax, scale and mask count no operations, but
read and write O(L²) bytes if the scores are stored. ``formula``: the operations of exact attention, with the keys that a query sees.
``forward`` and ``backward``: counted operations. ``kept``: bytes kept for the backward pass.

    python examples/cost.py        # half a minute; writes cost.png
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler counts the bytes; without this it prints messages

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from minitx.analysis import save_figure
from minitx.canvas import INK, PALETTE, label, panels
from minitx.config import TransformerConfig
from minitx.nn import Causal, DecoderLM, DotProductAttention, FeedForward, SlidingWindow
from minitx.nn.counting import allocations, count_flops, fit_exponent, flop_counter, forward_flops
from minitx.nn.efficient import build_core
from minitx.nn.functional import make_call
from minitx.nn.masks import intersect
from minitx.nn.models import TransformerModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = TransformerConfig(vocab_size=256, embed_dim=128, num_heads=4, num_layers=4, max_len=256)
PARTS = ("embedding", "q_proj", "k_proj", "v_proj", "core", "out_proj", "feedforward", "norms", "head")
"""The values of ``Part.name``. ``norms`` is the residual stream with its norms."""
_PART_OF = {  # the first of these words in a module's name decides; the rest is the head
    **{word: word for word in ("q_proj", "k_proj", "v_proj", "out_proj", "feedforward")},
    **{"embeddings": "embedding", "attention": "core", "cross_attention": "core", "attn_bias": "core"},
    **{"blocks": "norms", "final_norm": "norms", "encoder": "norms", "": "norms"},
}
GROWTHS = {  # operations and bytes, as in a textbook
    **{"math": ("n²d", "n²"), "sdpa": ("n²d", "nd"), "chunked": ("n²d", "nd"), "window": ("nwd", "nd")},
    **{"linear": ("nd²", "nd"), "performer": ("nmd", "nm"), "linformer": ("nkd", "nk")},
    **{"recurrent": ("nd²", "nd"), "feed-forward": ("nd²", "nd")},
}
"""The layers that ``growth`` measures, with their complexity in a textbook: w is the window, m features, k slots."""


@dataclass(frozen=True)
class Part:
    """One line of the ledger, summed over all layers.

    Attributes:
        name: one of ``PARTS``.
        parameters: the number of trainable parameters. A tied head counts as the embedding.
        formula: operations that the forward pass of exact attention needs (``forward_flops``): 2·tokens·inputs·outputs of a
            linear map, 4·B·H·L·T_eff·D of the core, where T_eff is the mean number of visible keys.
        forward, backward: the counted operations.
        kept: bytes of activations kept for the backward pass, without parameters. An activation counts for the first part that
            keeps it.
    """

    name: str
    parameters: int
    formula: float
    forward: int
    backward: int
    kept: int


def ledger(model: TransformerModel, inputs: dict[str, Tensor], *, backward: bool = True) -> list[Part]:
    """Run one of our models once and count what each part costs.

    The backward pass starts from a gradient of ones for the logits, so no loss is counted. ``.grad`` is not changed.

    Args:
        model: a model from ``build_model``, on a CPU or GPU.
        inputs: its arguments, for example from ``example_inputs``.
        backward: also count the backward pass and the bytes kept for it.

    Raises:
        NotImplementedError: the backend does not support the model.
    """
    config, tally = model.config, _Tally(model)
    tally.run(inputs, backward=backward)
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[_part_of(name)] += parameter.numel()
    source = inputs.get("input_ids", next(iter(inputs.values())))
    lengths = () if config.architecture == "vision" else (source.shape[1], inputs.get("decoder_input_ids", source).shape[1])
    formula = forward_flops(config, *lengths)
    rows = [
        (parameters[name], len(source) * formula.get(name, 0.0), tally.forward[name], tally.backward[name]) for name in PARTS
    ]
    return [Part(name, *row, tally.kept[name]) for name, row in zip(PARTS, rows, strict=True)]


def _part_of(module: str) -> str:
    words = module.split(".")
    return next((part for word, part in _PART_OF.items() if word in words), "head")


@dataclass(eq=False)
class _Saved:
    """A tensor that an autograd node keeps. It is freed with the node."""

    tensor: Tensor
    part: str


class _Tally:
    """Counts by part. An operation of the backward pass belongs to the part whose forward made the autograd node."""

    def __init__(self, model: TransformerModel) -> None:
        self.model, self.counter, self.total = model, flop_counter(), 0
        self.forward, self.backward, self.kept = Counter[str](), Counter[str](), Counter[str]()
        self.flops, self.running = self.forward, ["norms"]
        self.saved: list[weakref.ref[_Saved]] = []
        self.storages = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def run(self, inputs: dict[str, Tensor], *, backward: bool) -> None:
        with ExitStack() as hooks, torch.set_grad_enabled(backward):
            for name, module in self.model.named_modules():
                hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, _part_of(name))))
                hooks.enter_context(module.register_forward_hook(self._leave, always_call=True))
            hooks.enter_context(self.counter)
            with saved_tensors_hooks(self._keep, lambda saved: saved.tensor):
                out = self.model(**inputs)
            self._settle()
            self._weigh()
            if backward:
                self.flops = self.backward
                learned = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
                torch.autograd.grad(out, learned, torch.ones_like(out), allow_unused=True)
                self._settle()

    def _settle(self) -> None:
        """Add the operations since the last call to the part that runs."""
        total = self.counter.get_total_flops()
        self.flops[self.running[-1]] += total - self.total
        self.total = total

    def _enter(self, part: str, *_: Any) -> None:
        self._settle()
        self.running.append(part)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        """Assign the autograd nodes of ``out`` that belong to no part yet to the part that ends."""
        self._settle()
        part = self.running.pop()
        nodes: list[Any] = [t.grad_fn for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is not None and "minitx.part" not in node.metadata:
                node.metadata["minitx.part"] = part
                node.register_prehook(partial(self._resume, part))
                nodes += [earlier for earlier, _ in node.next_functions]

    def _resume(self, part: str, grads: Any) -> None:
        self._settle()
        self.running[-1] = part

    def _keep(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach(), self.running[-1])  # detached, or a node that keeps its own result would keep itself
        self.saved.append(weakref.ref(saved))
        return saved

    def _weigh(self) -> None:
        """Count the bytes that autograd still keeps, each storage once."""
        for saved in filter(None, (reference() for reference in self.saved)):
            storage = saved.tensor.untyped_storage()
            if storage.data_ptr() not in self.storages:
                self.storages.add(storage.data_ptr())
                self.kept[saved.part] += storage.nbytes()


def example_inputs(config: TransformerConfig, batch_size: int, length: int | None = None) -> dict[str, Tensor]:
    """Return random input for a model of ``config``: rows of ``length`` tokens (for source and target), or images."""
    if config.architecture == "vision":
        assert config.image_size is not None and config.num_channels is not None
        return {"pixel_values": torch.randn(batch_size, config.num_channels, config.image_size, config.image_size)}
    assert config.vocab_size is not None and length is not None
    names = ["input_ids", *(["decoder_input_ids"] if config.architecture == "encoder_decoder" else [])]
    return {name: torch.randint(config.vocab_size, (batch_size, length)) for name in names}


@dataclass(frozen=True)
class Growth:
    """The counted operations and the peak bytes of one layer at several lengths. ``kind`` is one of ``GROWTHS``."""

    kind: str
    lengths: tuple[int, ...]
    flops: tuple[int, ...]
    peak: tuple[int, ...]

    @property
    def exponents(self) -> tuple[float, float]:
        """Return the exponents p of operations ∝ nᵖ and of bytes ∝ nᵖ."""
        return fit_exponent(self.lengths, self.flops), fit_exponent(self.lengths, self.peak)


def growth(kind: str, lengths: Sequence[int], *, backward: bool = True, **sizes: Any) -> Growth:
    """Measure how the cost of one layer grows with the length n: attention without projections, or another layer of the same width.

    Args:
        kind: ``math``, ``sdpa``, ``chunked``, ``window`` (a sliding window with ``chunked``), ``linear``, ``performer``,
            ``linformer``, ``recurrent`` (``nn.RNN``) or ``feed-forward``. The last two have width H · D.
        lengths: the lengths to measure.
        backward: include the backward pass. Default: True.
        sizes: arguments of ``layer_call``.

    Raises:
        ValueError: an unknown kind.
    """
    rows = []
    for length in lengths:
        run = layer_call(kind, length, backward=backward, **sizes)
        rows.append((length, count_flops(run), allocations(run)[1]))
    return Growth(kind, *zip(*rows, strict=True))


def layer_call(
    kind: str,
    length: int,
    *,
    num_heads: int = 4,
    head_dim: int = 32,
    causal: bool = True,
    window: int = 64,
    num_slots: int = 64,
    backward: bool = True,
) -> Callable[[], None]:
    """Return the function that ``growth`` measures: one layer on a row of ``length`` positions. ``linformer`` is never causal."""
    if kind not in GROWTHS:
        raise ValueError(f"kind={kind!r} must be one of {', '.join(GROWTHS)}")
    E, is_attention = num_heads * head_dim, kind not in ("recurrent", "feed-forward")
    rules = Causal() if causal and kind != "linformer" else None, SlidingWindow(window) if kind == "window" else None
    layer: nn.Module
    if kind == "recurrent":
        layer = nn.RNN(E, E, batch_first=True)
    elif kind == "feed-forward":
        layer = FeedForward(E, 4 * E)
    elif kind in ("linear", "performer", "linformer"):
        layer = build_core(kind, head_dim=head_dim, max_len=length, num_slots=num_slots if kind == "linformer" else None)
    else:
        layer = DotProductAttention(backend="chunked" if kind == "window" else kind)
    x = torch.randn(1, length, 3 * E if is_attention else E, requires_grad=backward)

    def run() -> None:
        with torch.set_grad_enabled(backward):
            if is_attention:
                query, key, value = (part.unflatten(-1, (num_heads, head_dim)).transpose(1, 2) for part in x.split(E, dim=-1))
                out = layer(make_call(query, key, value, intersect(*rules)))
            else:
                out = layer(x)[0] if kind == "recurrent" else layer(x)
            if backward:
                out.backward(torch.ones_like(out))
        x.grad = None
        layer.zero_grad()

    return run


def growth_figure(curves: Sequence[Growth], title: str = "") -> Figure:
    """Draw operations and bytes against the length, on logarithmic axes.

    Markers are measurements. The legend has the power of n that was fitted to them. Each line has the power of the textbook and passes
    through the last marker.
    """
    figure, axes = panels(1, 2, width=5.2, height=3.6)
    for i, (ax, values, name) in enumerate(zip(axes.flat, ("flops", "peak"), ("operations", "bytes at once"), strict=True)):
        for curve, (color, marker) in zip(curves, PALETTE, strict=False):
            x, y = np.array(curve.lengths), getattr(curve, values)
            textbook = GROWTHS[curve.kind][i]
            text = f"{curve.kind}: {textbook}, $n^{{{curve.exponents[i]:.2f}}}$"
            ax.plot(x, y[-1] * (x / x[-1]) ** (2 if "n²" in textbook else 1), color=color, linewidth=1.0)
            ax.plot(x, y, color=color, marker=marker, markersize=5, linestyle="", label=text)
        ax.set(xscale="log", yscale="log")
        ax.set_xticks(curves[0].lengths, [str(length) for length in curves[0].lengths])
        ax.minorticks_off()
        place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
        ax.legend(**place, fontsize=8, frameon=False, title="line: textbook order; power: fitted", title_fontsize=8)
        label(ax, x="length n of the row", y=name)
    figure.suptitle(title, fontsize=9.5, color=INK, parse_math=False)
    return figure


def main(config: TransformerConfig = CONFIG, lengths: tuple[int, ...] = (256, 512, 1024, 2048), path: str = "cost.png"):
    """Print both tables, draw the figure, and return the parts and the growths."""
    parts = ledger(DecoderLM(config), example_inputs(config, batch_size=1, length=config.max_len))
    print(f"{'part':<12}{'parameters':>12}{'formula':>10}{'forward':>10}{'backward':>10}{'kept':>14}")
    for part in parts:
        counted = "".join(f"{value / 1e6:>10,.1f}" for value in (part.formula, part.forward, part.backward))
        print(f"{part.name:<12}{part.parameters:>12,}{counted}{part.kept:>14,}")

    shape = {"num_heads": config.num_heads, "head_dim": config.width_per_head}
    curves = [growth(kind, lengths, **shape) for kind in GROWTHS]
    print(f"\n{'one layer':<14}{'textbook':>16}{'counted':>18}")
    for curve in curves:
        fitted = " and ".join(f"n^{exponent:.2f}" for exponent in curve.exponents)
        print(f"{curve.kind:<14}{' and '.join(GROWTHS[curve.kind]):>16}{fitted:>18}")
    save_figure(growth_figure(curves), path)
    return parts, curves


if __name__ == "__main__":
    main()
