"""A recorded training run as an animated image: one head's map at each step, the model's answer, and the accuracy on all rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitx.analysis.answers import Answer
from minitx.analysis.figures import draw_weights, masked_weights, name_tokens
from minitx.analysis.snapshot import AttentionMap, Snapshot
from minitx.analysis.viewer import Trace
from minitx.canvas import GREY, INK, PALETTE, drawable, token_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage
    from matplotlib.text import Annotation

ENDINGS = (".gif", ".png", ".webp")
GOOD, BAD = "#0b6b2e", "#b3261e"
FILM_DPI, FRAMES_PER_SECOND, LAST_FRAMES = 100, 4, 8
"""``LAST_FRAMES``: the number of frames that show the last step, before the film restarts."""
MOST_LABELS = 30
"""The largest number of labels on an axis. With more tokens, only every second, third … has a label."""
SIGNS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}
"""The markers of the curves as text."""
SURE = 0.9
"""If the right key has at least this weight, a wrong answer is not the fault of the weights."""


def write_film(traces: Sequence[Trace], path: Path | str, *, head: int = 0, note: str = "") -> int:
    """Write a film of one head of one layer, or of two models side by side, and return the number of its steps.

    A frame shows the map of each model, and the last question whose right answer is known: the question, the right answer, and the
    most probable answer with its probability. Colour and sign show whether it is right. The question's row and the key that holds
    the answer are framed. Below the maps, curves show two shares at all steps so far, over all recorded rows: right answers, and
    questions whose largest weight lies on the right key. For a single row, they show the probability of its right answer.

    Args:
        traces: as in ``viewer_page``. Each snapshot must have one layer.
        path: a file that ends in .gif, .png (APNG) or .webp.
        head: the index of the head.
        note: a line below the film, such as the rule that chose the row.

    Raises:
        ValueError: another extension, fewer than two steps, several layers, a head that does not exist, or weights that are not finite.
    """
    from matplotlib.animation import PillowWriter
    from matplotlib.figure import Figure

    if Path(path).suffix.lower() not in ENDINGS:
        raise ValueError(f"path={path} must end in {', '.join(ENDINGS)}")
    snapshots = [(trace.name, snapshot) for trace in traces for snapshot in trace.snapshots]
    layers = max(([layer.name for layer in snapshot.maps] for _, snapshot in snapshots), key=len)
    if len(layers) != 1:
        raise ValueError(f"a film shows one layer, got {len(layers)}: {', '.join(layers)}")
    heads = min(snapshot.maps[0].weights.shape[1] for _, snapshot in snapshots)
    if not 0 <= head < heads:
        raise ValueError(f"head={head} must be one of 0 to {heads - 1} of {layers[0]}")
    steps = sorted({snapshot.step for _, snapshot in snapshots if snapshot.step is not None})
    if len(steps) < 2:
        raise ValueError(f"a film needs at least two steps, got {len(steps)}: record them with callbacks=film")
    for name, snapshot in snapshots:
        if not snapshot.maps[0].weights.isfinite().all():
            raise ValueError(f"{name} has weights at step {snapshot.step} that are not finite: there is nothing to draw")
    figure = Figure(figsize=(4.1 * len(traces) + 0.2, 6.1), dpi=FILM_DPI, layout="constrained")
    measures = _measures(traces, head)
    columns = len(traces) * len(measures)
    rows = figure.add_gridspec(2, columns, height_ratios=(5, 1.15))
    panes = [rows[0, i * len(measures) : (i + 1) * len(measures)] for i in range(len(traces))]
    shown = [
        _Pane(figure.add_subplot(place), (i + 0.02) / len(traces), traces[i], head, PALETTE[i]) for i, place in enumerate(panes)
    ]
    places = [rows[1, i * len(traces) : (i + 1) * len(traces)] for i in range(len(measures))]
    curves = [
        _Curve(figure.add_subplot(place), title, measure, traces, steps)
        for place, (title, measure) in zip(places, measures.items(), strict=True)
    ]
    if note:
        figure.supxlabel(_in_one_line(note)[0], fontsize=8, color=INK, family=_in_one_line(note)[1], parse_math=False)
    writer = PillowWriter(fps=FRAMES_PER_SECOND)
    with writer.saving(figure, str(path), FILM_DPI):
        for step in steps:
            for pane in shown:
                pane.show(step)
            for curve in curves:
                curve.show(step)
            if step == steps[0]:
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # later frames stay where the first one is
            for _ in range(LAST_FRAMES if step == steps[-1] else 1):
                writer.grab_frame()
    return len(steps)


def _at_step(trace: Trace, step: int) -> Snapshot:
    """The snapshot of a step, or the latest earlier snapshot, or the first."""
    before = [snapshot for snapshot in trace.snapshots if snapshot.step is not None and snapshot.step <= step]
    return (before or trace.snapshots[:1])[-1]


def _asked(snapshot: Snapshot) -> Answer | None:
    """The last question whose right answer is known."""
    known = [answer for answer in snapshot.answers.rows[0] if answer.right is not None] if snapshot.answers else []
    return known[-1] if known else None


def _in_one_line(text: str) -> tuple[str, list[str]]:
    [shown], families = drawable([text.replace("\n", "↵")])
    return shown, families


class _Pane:
    """The map of one model with its answer above. The text starts at ``left``, a fraction of the figure's width."""

    def __init__(self, ax: Axes, left: float, trace: Trace, head: int, look: tuple[str, str]) -> None:
        self.ax, self.left, self.trace, self.head = ax, left, trace, head
        first = trace.snapshots[0]
        asked = _asked(first)
        self.image = self._map(first, first.maps[0])
        if asked and asked.at is not None and first.answers and first.answers.axis == first.maps[0].queries:
            self._frame(asked, first.maps[0].weights.shape[-1])
        ax.set_title("\n\n\n\n\n", fontsize=9)  # room for the lines above the map
        colour, marker = look  # as in its curves, which have no legend
        self.name = f"{SIGNS.get(marker, '')} {trace.name}" + (f", head {head}" if first.maps[0].weights.shape[1] > 1 else "")
        self.title = self._line(self.name, 54, 10, weight="bold")
        self.title.set_color(colour)
        self._line(f"{asked.text}  Right: {asked.right}" if asked else "", 38, 9)
        self.verdict = self._line("", 22, 9, weight="bold")
        self.reason = self._line("", 8, 8)

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
        """Frame the row of the question, and the key in it that holds the answer."""
        from matplotlib.patches import Rectangle

        assert asked.at is not None
        self.ax.add_patch(Rectangle((-0.5, asked.at - 0.5), S, 1, fill=False, edgecolor=INK, linewidth=1.2))
        if asked.key is not None:
            place = (asked.key - 0.5, asked.at - 0.5)
            self.ax.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=GOOD, linewidth=2.4))

    def _line(self, text: str, points: float, size: float, **font: Any) -> Annotation:
        """A line of text, ``points`` above the map."""
        shown, families = _in_one_line(text)
        place: dict[str, Any] = {"xycoords": ("figure fraction", "axes fraction"), "textcoords": "offset points"}
        font |= {"family": families, "fontsize": size, "color": INK, "parse_math": False}
        return self.ax.annotate(shown, (self.left, 1.0), (0, points), **place, **font)

    def show(self, step: int) -> None:
        snapshot = _at_step(self.trace, step)
        self.title.set_text(_in_one_line(self.name if snapshot.step == step else f"{self.name}, step {snapshot.step}")[0])
        self.image.set_data(masked_weights(snapshot.maps[0], self.head))
        answer = _asked(snapshot)
        if answer is not None:
            word, p = answer.top[0]
            sign, verdict = ("✓", "right") if answer.is_right else ("✗", "wrong")
            shown, families = _in_one_line(f"{sign} {verdict}: the model says {word:.20}, probability {p:.2f}")
            self.verdict.set(text=shown, color=GOOD if answer.is_right else BAD, family=families)
            self.reason.set_text("" if answer.is_right else self._why(snapshot, answer))

    def _why(self, snapshot: Snapshot, answer: Answer) -> str:
        """Explain a wrong answer, if this head alone connects the tokens."""
        [layer] = snapshot.maps
        if (
            answer.key is None
            or answer.at is None
            or not layer.queries == layer.keys == (snapshot.answers and snapshot.answers.axis)
        ):
            return ""
        weights = layer.weights[0, self.head, answer.at]
        if int(weights.argmax()) != answer.key:
            return "the largest weight lies on a wrong key"
        alone = layer.weights.shape[1] == len(snapshot.layers) == 1
        if weights[answer.key] < SURE or not alone:
            return f"found the key (weight {float(weights[answer.key]):.2f})"
        return "found the key, the answer is still wrong: W_V and the head have not learned"


Measure = Callable[[Snapshot], float | None]


def _measures(traces: Sequence[Trace], head: int) -> dict[str, Measure]:
    """The measures that the curves show, by title."""
    tallies = [snapshot.tally for trace in traces for snapshot in trace.snapshots]
    counted = [tally for tally in tallies if tally is not None]
    if len(counted) < len(tallies) or min(tally.rows for tally in counted) < 2:
        return {"probability of the right answer": _chance}
    rows = f"{min(tally.rows for tally in counted)} rows"
    measures: dict[str, Measure] = {f"right answers, share of {rows}": _accuracy}
    if all(tally.on_key for tally in counted):
        measures[f"largest weight on the right key, share of {rows}"] = partial(_on_key, head=head)
    return measures


def _chance(snapshot: Snapshot) -> float | None:
    answer = _asked(snapshot)
    return None if answer is None or answer.loss is None else math.exp(-answer.loss)


def _accuracy(snapshot: Snapshot) -> float:
    assert snapshot.tally is not None
    return snapshot.tally.right / snapshot.tally.asked


def _on_key(snapshot: Snapshot, head: int) -> float:
    assert snapshot.tally is not None
    return snapshot.tally.on_key[snapshot.maps[0].name][head] / snapshot.tally.keyed


class _Curve:
    """A measure of each model, step by step."""

    def __init__(self, ax: Axes, title: str, measure: Measure, traces: Sequence[Trace], steps: Sequence[int]) -> None:
        self.measure, self.traces, self.steps, self.ax = measure, traces, steps, ax
        self.lines = []
        for _, (colour, marker) in zip(traces, PALETTE, strict=False):
            (line,) = ax.plot([], [], color=colour, marker=marker, markersize=3.5, linewidth=1.4)
            self.lines.append(line)
        ax.set(xlim=(steps[0], steps[-1]), ylim=(-0.04, 1.04))
        ax.set_title(title, fontsize=8, color=INK, loc="left")
        ax.tick_params(labelsize=7.5, colors=INK)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color="#E6E6E6", linewidth=0.6)
        self.label = ax.set_xlabel("", fontsize=8, color=INK)

    def show(self, step: int) -> None:
        for line, trace in zip(self.lines, self.traces, strict=True):
            past = [(s.step, self.measure(s)) for s in trace.snapshots if s.step is not None and s.step <= step]
            points = [(at, value) for at, value in past if value is not None]
            line.set_data([at for at, _ in points], [value for _, value in points])
        self.label.set_text(f"training step {step} of {self.steps[-1]}")
