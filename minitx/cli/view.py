"""``view_attention.py``: write the attention of a model, or a page to play with, as one HTML file for a browser."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitx.cli import importing
from minitx.cli.command_line import FilePath, StoredConfig, check_output, checkpoint_of, refusing, run_program, write, writing
from minitx.config import ConfigError
from minitx.config.schema import Config, Count, Natural, require

if TYPE_CHECKING:
    from minitx.analysis.snapshot import Snapshot
    from minitx.analysis.viewer import RowRule, Trace
    from minitx.cli.inputs import RowInputs
    from minitx.training.checkpoints import Stored

PLAY_USAGE = "python scripts/view_attention.py --play [output=FILE]"
VIEW_USAGE = f"""python scripts/view_attention.py ckpt_path=FILE text=TEXT [key=value ...]
python scripts/view_attention.py model=FOLDER text=TEXT [key=value ...]
{PLAY_USAGE}   a page to play with, without a model"""
FILM = (".gif", ".png", ".webp")
"""The file endings of animated pictures."""

LARGEST_PAGE = 256 * 2**20
"""The size limit of a page in bytes. Browsers need minutes for larger pages, or fail."""


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


PLAY = "--play"
RULES: dict[RowRule, str] = {
    "typical": "the first on which each model ends with its most common outcome (right or wrong, key found or missed)",
    "first": "no row has the most common outcome of each model",
    "chosen": "chosen with row=",
}
"""Why a film shows a row, by the rule that chose it."""


@dataclass(frozen=True, kw_only=True)
class PlayConfig(Config):
    """The keys of ``view_attention.py --play``.

    Attributes:
        output: the file to write.
        pages: address of pages about minitx, for a link at the top; null: no link.
    """

    output: FilePath = "play.html"
    pages: str | None = None

    def check(self) -> None:
        check_output(self.output, ".html", ".htm")


def main() -> int:
    """The program behind ``scripts/view_attention.py`` and ``minitx-view``; returns the exit code."""
    if PLAY in sys.argv[1:]:
        return run_program(PlayConfig, PLAY_USAGE, _play, arguments=[word for word in sys.argv[1:] if word != PLAY])
    return run_program(ViewConfig, VIEW_USAGE, _view)


def _play(config: PlayConfig) -> None:
    with importing():
        from minitx.analysis.viewer import playground

    _write_page(playground(pages=config.pages).page, config.output)


def _write_page(page: str, output: str, summary: str = "") -> None:
    with writing(output):
        Path(output).write_text(page, encoding="utf-8")
    write(f"{summary}{output}  {len(page.encode()) / 1e6:.2f} MB\n")


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
        title, traces, rule = _recorded_traces(config, paths)
    else:
        title, traces = _model_traces(config, paths)
    if config.is_film:
        _write_film(config, traces, rule)
        return
    with refusing():
        page = viewer_page(traces, title=title, rule=rule)
    _write_page(page, config.output, f"{_line_of_sizes(traces, 'model' if config.compare_text is None else 'text')}\n")


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


# --- the records of a run


def _recorded_traces(config: ViewConfig, paths: dict[str, str]) -> tuple[str, list[Trace], RowRule]:
    from minitx.analysis.snapshot import read_snapshots, typical_row
    from minitx.analysis.viewer import Trace

    runs: list[list[Snapshot]] = []
    for name, path in paths.items():
        require(os.path.isdir(path), f"{name}={path} does not exist")
        with refusing("without text= or a checkpoint file, the page shows what a run recorded: "):
            runs.append(read_snapshots(Path(path)))
    typical = typical_row(runs) if config.row is None else None
    row = config.row or typical or 0
    traces = []
    rule: RowRule = "chosen" if config.row is not None else "first" if typical is None else "typical"
    for path, snapshots, title_of_trace in zip(paths.values(), runs, _names_of_inputs(list(paths.values())), strict=True):
        count = snapshots[0].num_rows
        require(row < count, f"row={row} must lie in [0, {count}), the range of sentences in {path}")
        with refusing():
            kept = snapshots[0].chosen(config.chosen_layers)
        shots = [snapshot.sentence(row) for snapshot in snapshots]
        shots = [dataclasses.replace(shot, maps=tuple(layer for layer in shot.maps if layer.name in kept)) for shot in shots]
        traces.append(Trace(title_of_trace, shots))
        _check_size(traces[-1].snapshots[0], sum(len(trace.snapshots) for trace in traces))
    return f"Attention on recorded sentence {row}", traces, rule


# --- attention of models on texts or on a row


def _model_traces(config: ViewConfig, paths: dict[str, str]) -> tuple[str, list[Trace]]:
    from minitx.analysis.viewer import Trace
    from minitx.cli.inputs import SOURCE, attention_of, check_reads_alike, hf_ids

    files = {name: [path] if config.model else _checkpoint_files(path) for name, path in paths.items()}
    steps = {} if config.model else _steps(files)
    name, listed = next(iter(files.items()))
    first = listed[-1]  # the latest model determines the inputs and the answers
    opened = {first: _open(config, name, first)}
    model, tokenizer, stored = opened[first]
    inputs, title = _inputs(config, model, tokenizer, stored)
    traces: list[Trace] = []
    for name, name_of_trace in zip(files, _names_of_inputs(list(paths.values())), strict=True):
        snapshots: list[list[Snapshot]] = [[] for _ in inputs]
        for file in files[name]:
            other, its_tokenizer, _ = opened.pop(file) if file in opened else _open(config, name, file)
            if stored is not None:
                check_reads_alike(f"{name}={file}", model, other, (tokenizer, its_tokenizer), first)
            else:
                ids = hf_ids(other, its_tokenizer, config.text or "", "text")[SOURCE]
                require(
                    ids == inputs[0].tensors[SOURCE][0].tolist(),
                    f"{name}={file} reads text with another tokenizer than model={first}: their tokens differ",
                )
            for taken, row in zip(snapshots, inputs, strict=True):
                taken.append(
                    attention_of(other, row, layers=config.chosen_layers, step=steps.get(file), knock_out=config.knock_out)
                )
                _check_size(taken[-1], sum(map(len, files.values())) * len(inputs))
        traces += map(Trace, _titles(config, name_of_trace), snapshots)
    return title, traces


def _steps(files: dict[str, list[str]]) -> dict[str, int]:
    """Return the steps of all checkpoints, and sort the lists of checkpoints by step."""
    from minitx.training.checkpoint_files import read_checkpoint

    steps: dict[str, int] = {}
    for name, listed in files.items():
        steps |= {file: int(read_checkpoint(file, key=name, verb="read")["global_step"]) for file in listed}
        listed.sort(key=steps.__getitem__)
        duplicate = next((steps[b] for a, b in itertools.pairwise(listed) if steps[a] == steps[b]), None)
        require(duplicate is None, f"{name} has two checkpoints of step {duplicate}: remove one of them")
    return steps


def _open(config: ViewConfig, name: str, file: str) -> tuple[Any, Any, Stored | None]:
    """Return a model, its tokenizer, and the contents of its checkpoint (None for a Hugging Face folder)."""
    from minitx.cli.command_line import open_stored
    from minitx.cli.inputs import open_hf, with_attention
    from minitx.training.checkpoints import move_to_device

    if config.model:
        model, tokenizer = open_hf(file, name)
        return move_to_device(model, config.device), tokenizer, None
    stored = open_stored(file, trust=config.trust)
    return move_to_device(with_attention(stored), config.device), stored.tokenizer, stored


def _inputs(config: ViewConfig, model: Any, tokenizer: Any, stored: Stored | None) -> tuple[list[RowInputs], str]:
    """Return the inputs (a text, two texts, or a row) and the title of the page."""
    from minitx.cli.inputs import hf_inputs, paired, row_inputs, text_inputs

    kind = type(model).__name__ if stored is None else stored.net.shape.architecture
    is_pair = model.config.is_encoder_decoder if stored is None else kind == "encoder_decoder"
    require(is_pair or config.target is None, f"target is for encoder-decoders, but the model is a {kind}")
    if is_pair and config.compare_text is not None and config.target is None:
        raise ConfigError("compare_text needs target=TEXT: the model reads both texts with the same target")
    if config.text is not None:
        read: Any = hf_inputs if stored is None else partial(text_inputs, first_id=stored.state.get("first_id"))
        answering = {"num_beams": config.num_beams, "max_new_tokens": config.max_new_tokens}
        texts = {name: text for name in ("text", "compare_text") if (text := getattr(config, name)) is not None}
        inputs = [read(model, tokenizer, text, name, config.target, **answering) for name, text in texts.items()]
        return paired(*inputs) if len(inputs) == 2 else inputs, f"Attention on {_short_quote(config.text)}"
    if config.row is None and tokenizer is not None:
        raise ConfigError("text is missing: set text=TEXT, or row=N for a row of the validation data")
    assert stored is not None
    row = config.row or 0
    return [row_inputs(stored.task(), row)], f"Attention on validation row {row}"


def _titles(config: ViewConfig, name: str) -> list[str]:
    """Return the titles of the traces of a model: one for each text."""
    return [name] if config.compare_text is None else [_short_quote(text) for text in (config.text or "", config.compare_text)]


def _short_quote(text: str) -> str:
    return f"“{text if len(text) <= 60 else text[:59] + '…'}”"


def _check_size(snapshot: Snapshot, count: int) -> None:
    num_weights = sum(int(layer.visible.sum()) for layer in snapshot.maps)
    size = num_weights * 8 // 3  # two bytes per weight; base64 has four letters for three bytes
    if snapshot.answers is not None:
        num_answers = len(snapshot.answers.rows[0]) * sum(map(len, snapshot.answers.without.values()))
        size += num_answers * 80  # about 80 bytes per answer
    size *= count
    require(
        size <= LARGEST_PAGE,
        f"the page would have {size / 2**20:,.0f} MiB, more than browsers can show ({LARGEST_PAGE >> 20} MiB): "
        "choose some layers=, fewer steps, or a shorter text",
    )


def _checkpoint_files(path: str) -> list[str]:
    return [checkpoint_of(path)] if os.path.exists(path) else [checkpoint_of(part) for part in path.split(",") if part]


def _names_of_inputs(paths: list[str]) -> list[str]:
    """Return names for the paths: the folders of their runs, or the whole paths if these names are not unique."""
    names = []
    for path in paths:
        last = Path(_checkpoint_files(path)[-1])
        name = last.parents[1].name if last.parent.name == "checkpoints" else last.name.removesuffix(".ckpt")
        names.append(name or path)
    return paths if len(set(names)) < len(names) else names
