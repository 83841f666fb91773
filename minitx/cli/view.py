"""``view_attention.py``: write the attention of a model, or a page to play with, as one HTML file for a browser."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from minitx.cli.command_line import StoredConfig, check_output, key, run_program, write, writing
from minitx.config import ConfigError, TransformerConfig
from minitx.config.schema import Config, Count, Natural, require

if TYPE_CHECKING:
    from torch import nn

    from minitx.analysis.snapshot import Snapshot
    from minitx.analysis.viewer import Trace
    from minitx.cli.inputs import Inputs
    from minitx.data.tokenizers import Tokenizer
    from minitx.training.checkpoints import Stored

    Reader = tuple[nn.Module, Tokenizer | None]

USAGE = """python scripts/view_attention.py ckpt_path=FILE text=TEXT [key=value ...]
python scripts/view_attention.py model=FOLDER text=TEXT [key=value ...]
python scripts/view_attention.py --play [output=FILE]   a page to play with, without a model"""
PLAY_USAGE = "python scripts/view_attention.py --play [output=FILE]"
LARGEST_PAGE = 256 * 2**20
"""In bytes. Browsers need minutes for larger pages, or fail."""


@dataclass(frozen=True, kw_only=True)
class ViewConfig(StoredConfig):
    """The keys of ``view_attention.py``. Model and tokenizer come from the checkpoint or the Hugging Face folder."""

    ckpt_path: str = key(
        "",
        "checkpoint of a run, several with commas between (a step of the slider each), or the folder of a run that recorded "
        "its attention",
    )
    model: str = key(
        "",
        "instead of ckpt_path: a Hugging Face folder with its tokenizer, or the name of a model in the local cache of the hub",
    )
    text: str | None = key(None, "text for the model; without a tokenizer, ids (ID or ID:TYPE) separated by spaces")
    target: str | None = key(None, "target text of an encoder-decoder; null: its own answer")
    row: Natural | None = key(None, "instead of text: number of a validation row or of a recorded sentence, from 0")
    compare: str | None = key(None, "a second model, as in ckpt_path or model, to compare side by side and as a difference")
    compare_text: str | None = key(None, "a second text with as many tokens as text, to compare in the same way")
    layers: str | None = key(None, "layers to show: numbers from 0 or parts of names (cross), separated by commas; null: all")
    num_beams: Count = key(1, "beams for an encoder-decoder's own answer; 1: greedy")
    max_new_tokens: Count = key(64, "longest own answer of an encoder-decoder, in tokens")
    output: str = key("attention.html", "the file to write")

    def check(self) -> None:
        require(bool(self.ckpt_path or self.model), "ckpt_path is missing: add ckpt_path=FILE, or model=FOLDER")
        require(not (self.ckpt_path and self.model), "model takes the place of ckpt_path: give one of them")
        require(
            not (self.model and self.row is not None),
            "row is for checkpoints: a Hugging Face folder has no data, so give text=TEXT",
        )
        require(not (self.model and self.trust), "trust is for checkpoints: no code of a Hugging Face folder runs")
        require(not self.model or self.text is not None, "text is missing: give text=TEXT for the model to read")
        require(self.compare is None or self.compare_text is None, "compare_text takes the place of compare: give one of them")
        require(self.compare_text is None or self.text is not None, "compare_text is compared with a text: give text=TEXT, too")
        require(self.text is None or self.row is None, f"row={self.row} takes the place of text: give one of them")
        require(self.target is None or self.text is not None, "target belongs to a text: give text=TEXT, too")
        check_output(self.output)

    @property
    def chosen_layers(self) -> list[int | str] | None:
        """Return ``layers`` in the form of ``capture``."""
        parts = [part.strip() for part in (self.layers or "").strip("[]").split(",")]
        return [int(p) if re.fullmatch(r"-?\d+", p, re.ASCII) else p for p in parts if p] or None

    @property
    def answering(self) -> dict[str, int]:
        """Return how an encoder-decoder writes its own answer."""
        return {"num_beams": self.num_beams, "max_new_tokens": self.max_new_tokens}


PLAY = "--play"


@dataclass(frozen=True, kw_only=True)
class PlayConfig(Config):
    """The keys of ``view_attention.py --play``."""

    output: str = key("play.html", "the file to write")

    def check(self) -> None:
        check_output(self.output)


def main() -> int:
    """The program behind ``scripts/view_attention.py`` and ``minitx-view``; returns the exit code."""
    if PLAY in sys.argv[1:]:
        return run_program(PlayConfig, PLAY_USAGE, _play, flag=PLAY)
    return run_program(ViewConfig, USAGE, _view)


def _play(config: PlayConfig) -> None:
    from minitx.analysis.viewer import playground

    _write_page(playground().page, config.output)


def _write_page(page: str, output: str, said: str = "") -> None:
    with writing("output", output):
        Path(output).write_text(page, encoding="utf-8")
    write(f"{said}{output}  {len(page.encode()) / 1e6:.2f} MB\n")


def _view(config: ViewConfig) -> None:
    from minitx.analysis.viewer import viewer_page

    paths = {name: path for name in ("ckpt_path", "model", "compare") if (path := getattr(config, name))}
    folders = [Path(path).is_dir() for path in paths.values()]
    if config.model:
        title, traces = _adopted(config, paths)
    elif folders[0] != folders[-1]:
        raise ConfigError(f"compare={config.compare} must be a {'run folder' if folders[0] else 'checkpoint'} as ckpt_path is")
    else:
        title, traces = _recorded(config, paths) if folders[0] else _taken(config, paths)
    try:
        page = viewer_page(traces, title=title)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _write_page(page, config.output, f"{_say(traces, 'model' if config.compare_text is None else 'text')}\n")


def _say(traces: list[Trace], side: str) -> str:
    maps = traces[0].snapshots[0].maps
    tokens = " and ".join(str(len(rows[0])) for rows in traces[0].snapshots[0].tokens.values())
    steps = max(len(trace.snapshots) for trace in traces)
    counted = [f"{len(maps)} layer", f"{maps[0].weights.shape[1]} head", f"{steps} step", f"{len(traces)} {side}"]
    return ", ".join(f"{text}s" if int(text.split()[0]) != 1 else text for text in counted) + f", {tokens} tokens"


# --- what a run recorded


def _recorded(config: ViewConfig, paths: dict[str, str]) -> tuple[str, list[Trace]]:
    from minitx.analysis.snapshot import read_snapshots
    from minitx.analysis.viewer import Trace

    if config.text is not None:
        raise ConfigError("text is for checkpoints: a run's folder holds sentences of its own, to be chosen by row=N")
    row, traces = config.row or 0, []
    for path, shown in zip(paths.values(), _names(list(paths.values())), strict=True):
        try:
            snapshots = read_snapshots(Path(path))
        except ValueError as error:
            raise ConfigError(f"{error}; or give one of its checkpoints") from error
        count = snapshots[0].num_rows
        if row >= count:
            raise ConfigError(f"row={row} must lie in [0, {count}), the sentences that {path} holds")
        traces.append(Trace(shown, [_with_layers(snapshot.sentence(row), config) for snapshot in snapshots]))
        _check_size(traces[-1].snapshots[0], sum(len(trace.snapshots) for trace in traces))
    return f"Attention on recorded sentence {row}", traces


def _with_layers(snapshot: Snapshot, config: ViewConfig) -> Snapshot:
    from minitx.analysis.capture import chosen_names

    try:
        kept = chosen_names([layer.name for layer in snapshot.maps], config.chosen_layers)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return dataclasses.replace(snapshot, maps=tuple(layer for layer in snapshot.maps if layer.name in kept))


# --- what models of Hugging Face do


def _adopted(config: ViewConfig, paths: dict[str, str]) -> tuple[str, list[Trace]]:
    from minitx.analysis.viewer import Trace
    from minitx.cli.inputs import SOURCE, hf_source, open_hf, paired, with_target
    from minitx.training.checkpoints import place

    texts = {name: text for name in ("text", "compare_text") if (text := getattr(config, name)) is not None}
    inputs: list[Inputs] = []
    traces: list[Trace] = []
    for name, shown in zip(paths, _names(list(paths.values())), strict=True):
        model, tokenizer = open_hf(paths[name], name)
        place(model, config.device)
        read = [hf_source(model, tokenizer, text, key) for key, text in texts.items()]
        if not inputs:  # the first model answers
            _check_target(config, type(model).__name__, model.config.is_encoder_decoder)
            if model.config.is_encoder_decoder:
                read = [with_target(model, tokenizer, source, config.target, **config.answering) for source in read]
            inputs = paired(*read) if len(read) == 2 else read
        elif read[0].tensors[SOURCE].tolist() != inputs[0].tensors[SOURCE].tolist():
            raise ConfigError(
                f"compare={config.compare} reads text with another tokenizer than model={config.model}: their tokens differ"
            )
        for title, given in zip(_titles(config, shown), inputs, strict=True):
            traces.append(Trace(title, [_snapshot(config, model, given, None)]))
            _check_size(traces[-1].snapshots[0], len(paths) * len(texts))
    return f"Attention on {_quoted(config.text or '')}", traces


def _titles(config: ViewConfig, shown: str) -> list[str]:
    """What the page calls a model that reads one text, or two."""
    return [shown] if config.compare_text is None else [_quoted(text) for text in (config.text or "", config.compare_text)]


def _quoted(text: str) -> str:
    return f"“{text if len(text) <= 60 else text[:59] + '…'}”"


def _check_target(config: ViewConfig, kind: str, is_pair: bool) -> None:
    require(is_pair or config.target is None, f"target is for encoder-decoders, and the model is a {kind}")
    needed = is_pair and config.compare_text is not None and config.target is None
    require(not needed, "compare_text needs target=TEXT: the model reads both texts with the same target")


# --- what checkpoints do


def _taken(config: ViewConfig, paths: dict[str, str]) -> tuple[str, list[Trace]]:
    from minitx.analysis.viewer import Trace
    from minitx.cli.inputs import open_stored, with_attention
    from minitx.training.checkpoints import place, read_checkpoint

    files = {name: _files(path) for name, path in paths.items()}
    steps = {
        file: int(read_checkpoint(file, key=name, verb="read")["global_step"])
        for name, listed in files.items()
        for file in listed
    }
    for name, listed in files.items():
        listed.sort(key=steps.__getitem__)
        twice = next((steps[b] for a, b in itertools.pairwise(listed) if steps[a] == steps[b]), None)
        if twice is not None:
            raise ConfigError(f"{name} has two checkpoints of step {twice}")
    first = files["ckpt_path"][-1]  # the latest says what is read, and answers
    stored = open_stored(first, trust=config.trust)
    model, tokenizer = with_attention(stored), stored.tokenizer
    place(model, config.device)
    inputs, title = _inputs(config, stored)
    count = sum(map(len, files.values())) * len(inputs)
    traces: list[Trace] = []
    for name, shown in zip(files, _names(list(paths.values())), strict=True):
        snapshots: list[list[Snapshot]] = [[] for _ in inputs]
        for file in files[name]:
            second = open_stored(file, trust=config.trust)
            other = with_attention(second)
            _check_reads_alike(f"{name}={file}", (model, tokenizer), (other, second.tokenizer), first)
            place(other, config.device)
            for taken, given in zip(snapshots, inputs, strict=True):
                taken.append(_snapshot(config, other, given, steps[file]))
                _check_size(taken[-1], count)
        traces += map(Trace, _titles(config, shown), snapshots)
    return title, traces


def _inputs(config: ViewConfig, stored: Stored) -> tuple[list[Inputs], str]:
    """What the models read, one text or two, and the page's title."""
    from minitx.cli.inputs import paired, row_inputs, shape_of, text_inputs, with_attention

    model, tokenizer = with_attention(stored), stored.tokenizer
    architecture = shape_of(model).architecture
    _check_target(config, architecture, architecture == "encoder_decoder")
    if config.text is not None:
        texts = [text for text in (config.text, config.compare_text) if text is not None]
        read = [text_inputs(model, tokenizer, text, config.target, **config.answering) for text in texts]
        return paired(*read) if len(read) == 2 else read, f"Attention on {_quoted(config.text)}"
    if config.row is None and tokenizer is not None:
        raise ConfigError("text is missing: give text=TEXT for the model to read, or row=N for a row of its validation data")
    row = config.row or 0
    return [row_inputs(stored.task(), row)], f"Attention on validation row {row}"


def _snapshot(config: ViewConfig, model: nn.Module, inputs: Inputs, step: int | None) -> Snapshot:
    from minitx.cli.inputs import attention_of

    made = getattr(model, "config", None)
    title = type(model).__name__
    if isinstance(made, TransformerConfig):
        title = f"{made.architecture.replace('_', '–')}, heads of width {made.width_per_head}, scale {made.scale}"
    return attention_of(model, inputs.tensors, tokens=inputs.texts, layers=config.chosen_layers, step=step, title=title)


def _check_reads_alike(said: str, ours: Reader, theirs: Reader, first: str) -> None:
    from minitx.cli.inputs import shape_of
    from minitx.data.tokenizers import fingerprint

    for name in ("architecture", "vocab_size", "type_vocab_size", "image_size", "num_channels", "patch_size"):
        mine, other = getattr(shape_of(ours[0]), name), getattr(shape_of(theirs[0]), name)
        if mine != other:
            raise ConfigError(f"{said} has model.{name}={other}, but {first} has {mine}: they cannot read the same")
    marks = [None if tokenizer is None else fingerprint(tokenizer) for _, tokenizer in (ours, theirs)]
    if marks[0] != marks[1]:
        raise ConfigError(f"{said} reads text with another tokenizer than {first}: their tokens differ")


def _check_size(snapshot: Snapshot, count: int) -> None:
    size = count * sum(int(layer.visible.sum()) for layer in snapshot.maps) * 8 // 3  # two bytes, four letters for three
    if size > LARGEST_PAGE:
        raise ConfigError(
            f"the page would have {size / 2**20:,.0f} MiB, more than browsers take ({LARGEST_PAGE >> 20}): choose some "
            "layers=, fewer steps, or a shorter text"
        )


def _files(path: str) -> list[str]:
    return [path] if Path(path).exists() else [part for part in path.split(",") if part]


def _names(paths: list[str]) -> list[str]:
    """What the page calls each: its run's folder, or the whole path where that does not tell them apart."""
    names = []
    for path in paths:
        last = Path(_files(path)[-1])
        shown = last.parents[1].name if last.parent.name == "checkpoints" else last.name.removesuffix(".ckpt")
        names.append(shown or path)
    return paths if len(set(names)) < len(names) else names
