"""``view_attention.py``: write the attention of a model, or a page to play with, as one HTML file for a browser."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minitx.cli import importing
from minitx.cli.command_line import FilePath, StoredConfig, check_output, refusing, run_program, write, write_page, writing
from minitx.cli.play import PLAY, PLAY_USAGE, play
from minitx.config.schema import Count, Natural, require

if TYPE_CHECKING:
    from minitx.analysis.viewer import RowRule, Trace

USAGE = f"""python scripts/view_attention.py ckpt_path=FILE text=TEXT [key=value ...]
python scripts/view_attention.py model=FOLDER text=TEXT [key=value ...]
{PLAY_USAGE}   a page to play with, without a model"""
FILM = (".gif", ".png", ".webp")
"""The file endings of animated pictures."""


@dataclass(frozen=True, kw_only=True)
class ViewConfig(StoredConfig):
    """The keys of ``view_attention.py``. Model and tokenizer come from the checkpoint or the Hugging Face folder.

    Attributes:
        ckpt_path: checkpoint of a run, several separated by commas (each is a step of the slider), or the folder of a run: its
            recorded attention, or, with text or knock_out, its last checkpoint.
        model: instead of ckpt_path: a Hugging Face folder with its tokenizer, or the name of a model in the local cache of the
            hub.
        text: text for the model; without a tokenizer, ids (ID or ID:TYPE) separated by spaces.
        target: target text of an encoder-decoder; null: its own answer.
        row: instead of text: number of a validation row or of a recorded sentence, from 0.
        compare: a second model, as in ckpt_path or model, to compare side by side and as a difference.
        compare_text: a second text with as many tokens as text, to compare in the same way.
        layers: layers to show: numbers from 0 or parts of names (cross), separated by commas; null: all.
        num_beams: number of beams for an encoder-decoder's own answer; 1: greedy.
        max_new_tokens: longest own answer of an encoder-decoder, in tokens.
        knock_out: compute the model's answer without each head, for the page's button; one forward pass per head.
        head: the head that a film shows.
        output: the file to write; one that ends in .gif, .png or .webp is a film of one head of one layer over its steps.
    """

    ckpt_path: FilePath = ""
    model: FilePath = ""
    text: str | None = None
    target: str | None = None
    row: Natural | None = None
    compare: FilePath | None = None
    compare_text: str | None = None
    layers: str | None = None
    num_beams: Count = 1
    max_new_tokens: Count = 64
    knock_out: bool = False
    head: Natural = 0
    output: FilePath = "attention.html"

    @property
    def is_film(self) -> bool:
        """Whether the output is an animated picture."""
        return Path(self.output).suffix.lower() in FILM

    def check(self) -> None:
        require(bool(self.ckpt_path or self.model), "ckpt_path is missing: add ckpt_path=FILE, or model=FOLDER")
        typed = self.changed_keys
        for name in ("row", "trust"):
            require(not {name, "model"} <= typed, f"{name} is for checkpoints: model= has no data, and its code never runs")
        self.refuse_together("model", "ckpt_path")
        self.refuse_together("text", "row")
        self.refuse_together("compare", "compare_text")
        for name in ("model", "target", "compare_text"):
            require(name not in typed or "text" in typed, f"text is missing: {name} needs text=TEXT")
        require(not (self.knock_out and self.is_film), "knock_out is for a page, not for a film")
        require(not self.head or self.is_film, f"head={self.head} is for a film, output=NAME.gif: a page shows all heads")
        check_output(self.output, ".html", ".htm", *FILM)

    @property
    def chosen_layers(self) -> list[int | str] | None:
        """The layers as an argument of ``capture``."""
        parts = [part.strip() for part in (self.layers or "").strip("[]").split(",")]
        return [int(p) if re.fullmatch(r"-?\d+", p, re.ASCII) else p for p in parts if p] or None


RULES: dict[RowRule, str] = {
    "typical": "the first on which each model ends with its most common outcome (right or wrong, key found or missed)",
    "first": "no row has the most common outcome of each model",
    "chosen": "chosen with row=",
}
"""Why a film shows a row, by the rule that chose it."""


def main() -> int:
    """The program behind ``scripts/view_attention.py`` and ``minitx-view``; returns the exit code."""
    if PLAY in sys.argv[1:]:
        return play(sys.argv[1:])
    return run_program(ViewConfig, USAGE, _view)


def _view(config: ViewConfig) -> None:
    with importing():
        from minitx.analysis.viewer import viewer_page

    paths = {name: path for name in ("ckpt_path", "model", "compare") if (path := getattr(config, name))}
    runs_model = bool(config.model or config.knock_out or config.text is not None)  # otherwise show the records of a run
    are_folders = {path: not runs_model and os.path.isdir(path) for path in paths.values()}
    shows_records = next(iter(are_folders.values()))
    require(
        len({is_folder for path, is_folder in are_folders.items() if os.path.exists(path)}) < 2,
        f"compare={config.compare} must be a {'run folder' if shows_records else 'checkpoint'}, as ckpt_path is",
    )
    rule: RowRule | None = None
    if shows_records:
        from minitx.cli.view_records import recorded_traces

        title, traces, rule = recorded_traces(config, paths)
    else:
        from minitx.cli.view_models import model_traces

        title, traces = model_traces(config, paths)
    if config.is_film:
        _write_film(config, traces, rule)
        return
    with refusing():
        page = viewer_page(traces, title=title, rule=rule)
    write_page(page, config.output, f"{_line_of_sizes(traces, 'model' if config.compare_text is None else 'text')}\n")


def _write_film(config: ViewConfig, traces: list[Trace], rule: RowRule | None) -> None:
    from minitx.analysis.film import write_film

    tally = traces[0].snapshots[0].tally
    note = f"Row {tally.row} of {tally.rows}, counted from 0: {RULES[rule]}" if tally and rule else ""
    with writing(config.output), refusing(f"output={config.output}: "):
        steps = write_film(traces, config.output, head=config.head, note=note)
    write(f"{steps} steps\n{config.output}  {Path(config.output).stat().st_size / 1e6:.2f} MB\n")


def _line_of_sizes(traces: list[Trace], side: str) -> str:
    maps = traces[0].snapshots[0].maps
    tokens = " and ".join(str(len(rows[0])) for rows in traces[0].snapshots[0].tokens.values())
    steps = max(len(trace.snapshots) for trace in traces)
    counted = [f"{len(maps)} layer", f"{maps[0].weights.shape[1]} head", f"{steps} step", f"{len(traces)} {side}"]
    return ", ".join(f"{text}s" if int(text.split()[0]) != 1 else text for text in counted) + f", {tokens} tokens"
