"""The figures of why_scale.py, and its tables as Markdown."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from matplotlib.figure import Figure

from minitx.analysis.canvas import GREY, INK, PALETTE, RED, Entry, label, legend, log_ticks, panels, png

LOOKS = dict(zip(("inv_sqrt", "unscaled", "t5", "inv"), (*PALETTE[:3], PALETTE[4]), strict=True))
Series = Mapping[str, Sequence[float]]  # names in the legend, each with a value for each x


class Arguments(argparse.ArgumentParser):
    """A parser that prints errors as one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help shows the options\n")


def output_folder(arguments: Sequence[str]) -> Path:
    """Return the folder of the option ``--output``, which is created if it does not exist."""
    parser = Arguments(prog="why_scale.py", description="Why 1/√d_k, in numbers and figures.", allow_abbrev=False)
    parser.add_argument("--output", metavar="FOLDER", default="runs/why_scale", help="for figures and tables (%(default)s)")
    given = parser.parse_args(arguments).output
    try:
        Path(given or "\0").mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reasons = {FileExistsError: "it is a file", ValueError: "it is not a valid folder name"}
        parser.error(f"--output {given!r} cannot be used: {reasons.get(type(error), error)}")
    return Path(given)


class Output:
    """Writes tables to ``tables.md`` in a folder, and figures to the same folder. An old ``tables.md`` is deleted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tables = folder, folder / "tables.md"
        self.tables.unlink(missing_ok=True)

    def table(self, name: str, headings: Sequence[object], rows: Sequence[Sequence[str | float]]) -> None:
        """Print a Markdown table and append it to ``tables.md``."""
        cells = [[x if isinstance(x, str) else f"{x:.3g}" for x in row] for row in rows]
        lines = [f"| {' | '.join(map(str, line))} |" for line in (headings, ["---"] * len(headings), *cells)]
        with self.tables.open("a", encoding="utf-8") as file:
            file.write("\n".join([f"<!-- {name} -->", *lines, "", ""]))
        print(f"\n{name}", *lines, sep="\n")

    def figure(self, name: str, figure: Figure) -> None:
        """Write a figure as a PNG file."""
        (self.folder / f"{name}.png").write_bytes(png(figure))


def curves(ax: Any, x: Sequence[float], series: Series, line: str = "-", **look: Any) -> list[Entry]:
    """Plot a line for each series against a logarithmic x. Returns the legend entries."""
    entries: list[Entry] = []
    for (name, values), usual in zip(series.items(), PALETTE, strict=False):
        color, marker = LOOKS.get(name, usual)
        ax.plot(x, values, linestyle=line, marker=marker, color=color, **{"markersize": 4.5, "linewidth": 1.2, **look})
        entries.append((name, color, marker, line))
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [f"{tick:g}" for tick in x])
    ax.minorticks_off()
    return entries


def variance(widths: Sequence[int], variances: Series) -> Figure:
    """Plot the variance of q·k against d_k, with the lines d_k and d_k²."""
    figure, ((ax,),) = panels(1, 1, width=4.6, height=2.8)
    entries = curves(ax, widths, variances, "", fillstyle="none", markersize=7)
    ax.plot(widths, widths, "--", color=INK, linewidth=1)
    ax.plot(widths, np.square(widths), ":", color=INK, linewidth=1)
    log_ticks(ax)
    label(ax, "", "d_k", "variance of q·k")
    legend(figure, [*entries, ("d_k", INK, "", "--"), ("d_k²", INK, "", ":")])
    return figure


def saturation(spreads: Sequence[float], found: Mapping[int, Sequence[Mapping[str, float]]]) -> Figure:
    """Plot entropy and largest weight against the spread of the logits, for each number of keys n, with √(2 ln n)."""
    figure, axes = panels(1, 2, width=3.5, height=2.5)
    for ax, name, words in zip(axes[0], ("entropy", "max_weight"), ("entropy / ln n", "largest weight"), strict=True):
        entries = curves(ax, spreads, {f"{n} keys": [row[name] for row in of] for n, of in found.items()})
        for n, (_, color, *_) in zip(found, entries, strict=True):
            ax.axvline(np.sqrt(2 * np.log(n)), color=color, linewidth=1, linestyle="-.")
        ax.set_ylim(-0.03, 1.03)
        label(ax, "", "std of the logits", words)
    bound = [row["bound"] for row in found[64]]
    axes[0, 0].plot(spreads, bound, ":", color=PALETTE[1][0], linewidth=1.2)
    legend(figure, [*entries, ("√(2 ln n)", GREY, "", "-."), ("Zhai's bound, 64 keys", PALETTE[1][0], "", ":")])
    return figure


def jacobian(widths: Sequence[int], size: Series, reaching: Series, density: float) -> Figure:
    """Plot ½ ‖J‖₁ and ½ ‖c·J‖₁ against d_k, with the prediction ``density`` / √d_k."""
    figure, axes = panels(1, 2, width=3.5, height=2.5)
    titles = ("J: from the weights to the logits", "c·J: from the weights to q·k")
    for ax, title, series in zip(axes[0], titles, (size, reaching), strict=True):
        entries = curves(ax, widths, series)
        ax.plot(widths, density / np.sqrt(widths), "--", color=INK, linewidth=1)
        log_ticks(ax)
        label(ax, title, "d_k", "mean of ½ ‖·‖₁")
    legend(figure, [*entries, (f"{density:.2f} / √d_k", INK, "", "--")])
    return figure


def gradients(widths: Sequence[int], rms: Series, medians: Series, models: Mapping[str, Series]) -> Figure:
    """Plot ‖dL/dq‖ of random rows (RMS and median) and ‖∇W_Q‖ of a model with each init against d_k."""
    figure, axes = panels(1, 3, width=2.9, height=2.4)
    entries = curves(axes[0, 0], widths, rms)
    curves(axes[0, 0], widths, medians, ":", fillstyle="none")
    label(axes[0, 0], "64 keys, unit-normal rows", "d_k", "‖dL/dq‖")
    for ax, init in zip(axes[0, 1:], models, strict=True):
        curves(ax, widths, models[init])
        label(ax, f"one-layer model, init {init}", "d_k", "‖∇W_Q‖")
    for ax in axes[0]:
        log_ticks(ax)
    legend(figure, [*entries, ("the median row", GREY, "", ":")])
    return figure


def rates(lrs: Sequence[float], accuracies: Mapping[tuple[str, str], Sequence[float]], chance: float) -> Figure:
    """Plot the accuracy against the peak learning rate for each (start, arm)."""
    figure, axes = panels(1, 2, width=3.5, height=2.5, sharey=True)
    for ax, start in zip(axes[0], ("variance 1", "N(0, 0.02²)"), strict=True):
        shown = {arm: of for (which, arm), of in accuracies.items() if which == start}
        for dodged, (arm, values) in zip((0.94, 1.06, 1.0), shown.items(), strict=False):
            curves(ax, np.multiply(lrs, dodged), {arm: values})
        ax.set_xticks(lrs, [f"{lr:g}" for lr in lrs])
        ax.axhline(chance, color=GREY, linewidth=1, linestyle=":")
        ax.set_ylim(-0.03, 1.03)
        label(ax, f"queries and keys start with {start}" if start == "variance 1" else f"init {start}", "peak learning rate")
    axes[0, 0].set_ylabel("accuracy after 100 steps", fontsize=8.5, color=INK)
    words = {"inv_sqrt": "inv_sqrt", "unscaled": "unscaled", "t5": "unscaled, 1/√d_k in the initial W_Q (t5)"}
    legend(figure, [*((words[arm], *LOOKS[arm], "-") for arm in words), ("chance", GREY, "", ":")])
    return figure


def steps(widths: Sequence[int], changes: Series) -> Figure:
    """Plot the first step of the logits against d_k."""
    figure, ((ax,),) = panels(1, 1, width=4.6, height=2.8)
    entries = curves(ax, widths, changes)
    log_ticks(ax)
    label(ax, "", "d_k", "first step of the logits, rate 0.01")
    legend(figure, entries)
    return figure


def folds(pairs: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Plot the losses with the scale in the scores and with the scale in W_Q, for each optimizer."""
    figure, axes = panels(1, 3, width=2.8, height=2.3, sharey=True)
    for ax, (name, (scores, weights)) in zip(axes[0], pairs.items(), strict=True):
        ax.plot(scores, "-", color=LOOKS["inv_sqrt"][0], linewidth=4, alpha=0.45)
        ax.plot(weights, "--", color=INK, linewidth=1.1)
        label(ax, name, "step")
    axes[0, 0].set_ylabel("training loss (nats)", fontsize=8.5, color=INK)
    entries = [("1/√d_k in the scores", LOOKS["inv_sqrt"][0], "", "-"), ("1/√d_k in the initial W_Q", INK, "", "--")]
    legend(figure, entries)
    return figure


def spreads(widths: Sequence[int], stds: Series) -> Figure:
    """Plot the standard deviation of unscaled logits against the model's width for each init, with √(2 ln 64)."""
    figure, ((ax,),) = panels(1, 1, width=4.6, height=2.8)
    entries = curves(ax, widths, stds)
    ax.axhline(np.sqrt(2 * np.log(64)), color=RED, linewidth=1, linestyle="-.")
    log_ticks(ax)
    label(ax, "", "d_model, at d_k 64", "row std of unscaled logits")
    legend(figure, [*entries, ("√(2 ln 64)", RED, "", "-.")])
    return figure
