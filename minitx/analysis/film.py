"""A recorded training as an animated picture: one head's map at each step, and above it what the model is asked and answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitx.analysis.answers import Answer
from minitx.analysis.canvas import GREY, INK, PALETTE, drawable, token_labels
from minitx.analysis.figures import draw_weights, masked_weights, name_tokens
from minitx.analysis.snapshot import AttentionMap, Snapshot
from minitx.analysis.viewer import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage
    from matplotlib.text import Annotation

ENDINGS = (".gif", ".png", ".webp")
GOOD, BAD = "#0b6b2e", "#b3261e"
FILM_DPI, FRAMES_PER_SECOND, LAST_FRAMES = 100, 4, 8
"""``LAST_FRAMES``: how often the last frame is shown before the film begins again."""
MOST_LABELS = 30
"""Of an axis: more tokens have one label for several."""


def write_film(traces: Sequence[Trace], path: Path | str, *, head: int = 0) -> int:
    """Write a film of one head of one layer, or of two models side by side, and return the number of its steps.

    A frame shows for each model the map, and of the last question whose right answer is known: the question, the right answer, the
    most probable answer and its probability, right or wrong in colour and sign, and below the maps the probability of the right
    answer at all steps so far. The question's row and the key that holds the answer are framed.

    Args:
        traces: as in ``viewer_page``; each snapshot has one layer.
        path: a file that ends in .gif, .png (APNG) or .webp.
        head: the index of the head.

    Raises:
        ValueError: another ending; fewer than two steps; several layers; the head does not exist; or weights are not finite.
    """
    from matplotlib.animation import PillowWriter
    from matplotlib.figure import Figure

    if Path(path).suffix.lower() not in ENDINGS:
        raise ValueError(f"path={path} must end in {', '.join(ENDINGS)}")
    every = [(trace.name, one) for trace in traces for one in trace.snapshots]
    layers = max(([layer.name for layer in one.maps] for _, one in every), key=len)
    if len(layers) != 1:
        raise ValueError(f"a film shows one layer, and there are {len(layers)}: {', '.join(layers)}")
    heads = min(one.maps[0].weights.shape[1] for _, one in every)
    if not 0 <= head < heads:
        raise ValueError(f"head={head} must be one of 0 to {heads - 1} of {layers[0]}")
    steps = sorted({one.step for _, one in every if one.step is not None})
    if len(steps) < 2:
        raise ValueError(f"a film needs two steps at least, got {len(steps)}: record them with callbacks=film")
    for name, one in every:
        if not one.maps[0].weights.isfinite().all():
            raise ValueError(f"{name} has weights at step {one.step} that are not finite: there is nothing to draw")
    figure = Figure(figsize=(4.1 * len(traces) + 0.2, 5.9), dpi=FILM_DPI, layout="constrained")
    rows = figure.add_gridspec(2, len(traces), height_ratios=(5, 1))
    shown = [_Pane(figure.add_subplot(rows[0, i]), (i + 0.02) / len(traces), trace, head) for i, trace in enumerate(traces)]
    curve = _Curve(figure.add_subplot(rows[1, :]), traces, steps)
    writer = PillowWriter(fps=FRAMES_PER_SECOND)
    with writer.saving(figure, str(path), FILM_DPI):
        for step in steps:
            for pane in shown:
                pane.show(step)
            curve.show(step)
            if step == steps[0]:
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # later frames stay where the first one is
            for _ in range(LAST_FRAMES if step == steps[-1] else 1):
                writer.grab_frame()
    return len(steps)


def _at(trace: Trace, step: int) -> Snapshot:
    """The snapshot of a step, or the latest one before, or the first."""
    before = [one for one in trace.snapshots if one.step is not None and one.step <= step]
    return (before or trace.snapshots[:1])[-1]


def _asked(snapshot: Snapshot) -> Answer | None:
    """The last question whose right answer is known."""
    found = [one for one in snapshot.answers.rows[0] if one.right is not None] if snapshot.answers else []
    return found[-1] if found else None


def _in_one_line(text: str) -> tuple[str, list[str]]:
    [shown], families = drawable([text.replace("\n", "↵")])
    return shown, families


class _Pane:
    """The map of one model, and above it its answer, from ``left`` (a fraction of the figure's width)."""

    def __init__(self, ax: Axes, left: float, trace: Trace, head: int) -> None:
        self.ax, self.left, self.trace, self.head = ax, left, trace, head
        first = trace.snapshots[0]
        asked = _asked(first)
        self.image = self._map(first, first.maps[0])
        if asked and asked.at is not None and first.answers and first.answers.axis == first.maps[0].queries:
            self._frame(asked, first.maps[0].weights.shape[-1])
        ax.set_title("\n\n\n\n", fontsize=9)  # room for the lines above the map
        self.name = f"{trace.name}, head {head}" if first.maps[0].weights.shape[1] > 1 else trace.name
        self.title = self._line(self.name, 40, 10, weight="bold")
        self._line(f"{asked.text}  Right: {asked.right}" if asked else "", 23, 9)
        self.verdict = self._line("", 7, 9, weight="bold")

    def _map(self, snapshot: Snapshot, layer: AttentionMap) -> AxesImage:
        _, _, L, S = layer.weights.shape
        image = draw_weights(self.ax, layer, self.head, (-0.5, S - 0.5, L - 0.5, -0.5))
        self.ax.set_aspect("equal")
        for axis, name, turned in ((self.ax.yaxis, layer.queries, 0), (self.ax.xaxis, layer.keys, 90)):
            labels, families = token_labels(snapshot.tokens[name][0])
            name_tokens(axis, labels, families, math.ceil(len(labels) / MOST_LABELS), rotation=turned)
        self.ax.tick_params(labelsize=7.5, colors=INK, length=0)
        self.ax.spines[:].set_color(GREY)
        self.ax.set_xlabel("key", fontsize=8, color=INK)
        self.ax.set_ylabel("query", fontsize=8, color=INK)
        return image

    def _frame(self, asked: Answer, S: int) -> None:
        """Frame the row of the question, and in it the key that holds the answer."""
        from matplotlib.patches import Rectangle

        assert asked.at is not None
        self.ax.add_patch(Rectangle((-0.5, asked.at - 0.5), S, 1, fill=False, edgecolor=INK, linewidth=1.2))
        if asked.key is not None:
            place = (asked.key - 0.5, asked.at - 0.5)
            self.ax.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=GOOD, linewidth=2.4))

    def _line(self, text: str, points: float, size: float, **font: Any) -> Annotation:
        """A line of text, so many points above the map."""
        shown, families = _in_one_line(text)
        place: dict[str, Any] = {"xycoords": ("figure fraction", "axes fraction"), "textcoords": "offset points"}
        font |= {"family": families, "fontsize": size, "color": INK, "parse_math": False}
        return self.ax.annotate(shown, (self.left, 1.0), (0, points), **place, **font)

    def show(self, step: int) -> None:
        snapshot = _at(self.trace, step)
        self.title.set_text(_in_one_line(self.name if snapshot.step == step else f"{self.name}, step {snapshot.step}")[0])
        self.image.set_data(masked_weights(snapshot.maps[0], self.head))
        answer = _asked(snapshot)
        if answer is not None:
            word, p = answer.top[0]
            sign, said = ("✓", "right") if answer.is_right else ("✗", "wrong")
            shown, families = _in_one_line(f"{sign} {said}: the model says {word:.20}, probability {p:.2f}")
            self.verdict.set(text=shown, color=GOOD if answer.is_right else BAD, family=families)


class _Curve:
    """The probability of the right answer, step by step."""

    def __init__(self, ax: Axes, traces: Sequence[Trace], steps: Sequence[int]) -> None:
        self.traces, self.steps, self.ax = traces, steps, ax
        self.lines = []
        names, families = drawable([trace.name.replace("$", r"\$") for trace in traces])
        for name, (colour, marker) in zip(names, PALETTE, strict=False):
            (line,) = ax.plot([], [], color=colour, marker=marker, markersize=3.5, linewidth=1.4, label=name)
            self.lines.append(line)
        ax.set(xlim=(steps[0], steps[-1]), ylim=(-0.04, 1.04))
        ax.set_ylabel("p of the\nright answer", fontsize=8, color=INK)
        ax.tick_params(labelsize=7.5, colors=INK)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color="#E6E6E6", linewidth=0.6)
        ax.legend(handles=self.lines, loc="center right", frameon=False, prop={"family": families, "size": 8})
        self.label = ax.set_xlabel("", fontsize=9, color=INK)

    def show(self, step: int) -> None:
        for line, trace in zip(self.lines, self.traces, strict=True):
            told = [(one.step, _asked(one)) for one in trace.snapshots if one.step is not None and one.step <= step]
            points = [(at, math.exp(-answer.loss)) for at, answer in told if answer is not None and answer.loss is not None]
            line.set_data([at for at, _ in points], [p for _, p in points])
        self.label.set_text(f"training step {step} of {self.steps[-1]}")
