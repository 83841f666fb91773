"""``atlas.py``: a checkpoint or a run's folder in, what every attention head does out; see ``docs/atlas.md``."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitx.cli.arguments import StoredConfig, check_output, key, run_program, write, writing
from minitx.cli.inputs import first_ids, open_stored, shape_of, with_attention
from minitx.config import ConfigError, RunConfig
from minitx.config.checks import Count, require

if TYPE_CHECKING:
    from torch import Tensor, nn

    from minitx.analysis.atlas import Atlas
    from minitx.analysis.snapshot import Snapshot
    from minitx.analysis.structure import Sentence, Structure
    from minitx.data.tokenizers import Tokenizer
    from minitx.training.stored import Stored

USAGE = "python scripts/atlas.py ckpt_path=FILE_OR_FOLDER [structure=FILE] [key=value ...]"


@dataclass(frozen=True, kw_only=True)
class AtlasConfig(StoredConfig):
    """What ``atlas.py`` takes; data, tokenizer and model come from the checkpoint."""

    ckpt_path: str = key(dataclasses.MISSING, "checkpoint, or a run's folder: its last checkpoint and recorded snapshots")
    structure: str | None = key(None, "CoNLL-U or bracket file: look at its sentences instead of validation rows")
    num_rows: Count = key(64, "rows or sentences to look at")
    batch_size: Count = key(8, "rows at a time")
    seed: int = key(0, "of the shuffled control")
    output: str | None = key(None, "folder to write atlas.csv, atlas.json and figures to")

    def check(self) -> None:
        require(0 <= self.seed < 2**63, f"seed={self.seed} must lie in [0, 2^63)")
        if self.output is not None:
            check_output(self.output, "folder")


def main() -> int:
    """The program behind ``scripts/atlas.py`` and ``minitx-atlas``; returns the exit code."""
    return run_program(AtlasConfig, USAGE, _atlas)


def _atlas(config: AtlasConfig) -> None:
    from minitx.analysis.atlas import atlas_over_steps, head_atlas
    from minitx.analysis.snapshot import take_snapshot
    from minitx.training.stored import place

    path = Path(config.ckpt_path)
    snapshots = _recorded(path)
    if path.is_dir():
        path = path / "checkpoints" / "last.ckpt"
        if not path.is_file():
            raise ConfigError(f"ckpt_path={config.ckpt_path} is a folder without checkpoints/last.ckpt")
    stored = open_stored(str(path), trust=config.trust)
    model, tokenizer, run = with_attention(stored), stored.tokenizer, stored.config
    if config.structure is None:
        what, batches = _validation(config, stored)
    else:
        what, batches = _sentences(config, model, tokenizer)
    device = next(place(model, config.device).parameters()).device
    moved = (({name: tensor.to(device) for name, tensor in inputs.items()}, structure) for inputs, structure in batches)
    only = ["encoder."] if config.structure is not None and shape_of(model).architecture == "encoder_decoder" else None
    atlas = head_atlas(lambda inputs: take_snapshot(model, inputs, layers=only), moved, seed=config.seed)
    write(f"{what}\n" + "\n".join(atlas.lines()) + "\n")
    steps = []
    if snapshots:
        structure = known_structure(run, snapshots[0].ids, snapshots[0].real, tokenizer)
        steps = atlas_over_steps(snapshots, structure)
        write("\n" + "\n".join(_step_lines(steps, snapshots[0].num_rows)) + "\n")
    if config.output is not None:
        with writing("output", config.output):
            _write_files(Path(config.output), {"ckpt_path": str(path), "rows": what, "seed": config.seed}, atlas, steps)


def _recorded(folder: Path) -> list[Snapshot]:
    """The snapshots of a run's folder; none where there are none."""
    from minitx.analysis.snapshot import read_snapshots

    if not list(folder.glob("attention/step_*.safetensors")):
        return []
    try:
        return read_snapshots(folder)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _step_lines(steps: Sequence[Atlas], num_rows: Count) -> list[str]:
    """What the recorded snapshots come to: each head's class and since when it has had it."""
    from minitx.analysis.agreement import MIN_SENTENCES
    from minitx.analysis.atlas import turning_points

    out = [f"{len(steps)} recorded snapshots of {num_rows} rows, steps {steps[0].step} to {steps[-1].step}"]
    if num_rows < 2 * MIN_SENTENCES:
        out.append("which are few: record more with callbacks.probe.batch_size=32 callbacks.probe.weights_rows=32")
    found = turning_points(steps)
    width = max(len(head.layer) for head, _ in found)
    return out + [f"{head.layer:{width}} {head.head:4} {head.label:10} since step {since}" for head, since in found]


def _write_files(folder: Path, about: dict[str, Any], atlas: Atlas, steps: Sequence[Atlas]) -> None:
    from minitx.analysis.atlas_figures import atlas_figure, classes_figure, scores_figure
    from minitx.analysis.canvas import png

    folder.mkdir(exist_ok=True)
    for name, atlases in {"atlas": [atlas], "atlas_steps": steps}.items():
        rows = [row for one in atlases for row in one.rows()]
        if not rows:
            continue
        (folder / f"{name}.json").write_text(json.dumps({**about, "heads": rows}, indent=1) + "\n", encoding="utf-8")
        columns = list(dict.fromkeys(column for row in rows for column in row))
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, columns, lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    figures = {"atlas": atlas_figure(atlas)}
    if steps:
        final = atlas if len(atlas.heads) == len(steps[0].heads) else None  # with structure=, of an encoder alone
        figures |= {"atlas_steps_classes": classes_figure(steps), "atlas_steps_scores": scores_figure(steps, final)}
    for name, figure in figures.items():
        (folder / f"{name}.png").write_bytes(png(figure))


# --- rows to look at

Batches = Iterator[tuple[dict[str, Any], "Structure | None"]]


def _validation(config: AtlasConfig, stored: Stored) -> tuple[str, Batches]:
    """The first rows of the validation split, with the structure that is known of their task."""
    from minitx.data.module import DataModule
    from minitx.training.calling import network_inputs

    data = stored.data()
    if not isinstance(data, DataModule):
        raise ConfigError(f"ckpt_path={stored.path} was trained on a {type(data).__name__}: give structure=FILE instead")
    source = data.val_source()
    is_text = data.task.kind == "language_model" and not data.task.recall
    filled = is_text and "key_mask" not in source.rows(range(1))  # the last row of a text may be short
    whole = source.num_rows - filled
    rows = range(min(config.num_rows, max(whole, 1)))

    def batches() -> Batches:
        for start in rows[:: config.batch_size]:
            inputs = network_inputs(source.rows(rows[start : start + config.batch_size]))
            masks = {"input_ids": "key_mask", "decoder_input_ids": "decoder_key_mask"}
            ids = {axis: inputs[axis] for axis in masks if axis in inputs}
            real = {axis: inputs.get(masks[axis], tensor >= 0) for axis, tensor in ids.items()}
            yield inputs, known_structure(stored.config, ids, real, stored.tokenizer)

    return f"{len(rows)} validation rows of {data.task.name}", batches()


def _sentences(config: AtlasConfig, model: nn.Module, tokenizer: Tokenizer | None) -> tuple[str, Batches]:
    """The first sentences of the file, as the model reads them; those that are too long for it are left out."""
    from minitx.analysis.structure import encode_sentences

    wanted = shape_of(model)
    if tokenizer is None or wanted.architecture == "vision":
        raise ConfigError(f"structure={config.structure} holds sentences, but ckpt_path={config.ckpt_path} reads no text")
    sentences = _read_structure(str(config.structure))
    known = getattr(tokenizer, "characters", None)
    unknown = {c for sentence in sentences for c in sentence.text if known is not None and c not in known}
    marks = first_ids(wanted, tokenizer)
    reader = tokenizer

    def read(rows: Sequence[Sentence]) -> tuple[dict[str, Tensor], Structure]:
        return encode_sentences(rows, lambda text: reader.encode(text).tolist(), before=marks, pad_id=wanted.pad_id or 0)

    fitting = [sentence for sentence in sentences if read([sentence])[0]["input_ids"].shape[1] <= wanted.max_len]
    if not fitting:
        raise ConfigError(f"structure={config.structure} has no sentence of at most {wanted.max_len} tokens (model.max_len)")
    kept = fitting[: config.num_rows]

    def batches() -> Batches:
        for start in range(0, len(kept), config.batch_size):
            inputs, structure = read(kept[start : start + config.batch_size])
            if wanted.bos_id is not None and wanted.architecture == "encoder_decoder":  # whose encoder is looked at
                inputs["decoder_input_ids"] = inputs["input_ids"].new_full((len(structure.rows), 1), wanted.bos_id)
            yield inputs, structure

    what = f"{len(kept)} sentences of {config.structure}"
    if len(fitting) < len(sentences):
        what += f", {len(sentences) - len(fitting)} of more than {wanted.max_len} tokens left out"
    return what + f"; unknown to the model: {' '.join(sorted(unknown))}" * bool(unknown), batches()


def _read_structure(path: str) -> list[Sentence]:
    """A file that begins with a bracket holds brackets, any other CoNLL-U."""
    from minitx.analysis.structure import read_brackets, read_conllu

    if not Path(path).is_file():
        raise ConfigError(f"structure={path} is not a file")
    try:
        with Path(path).open(encoding="utf-8-sig", errors="replace") as file:
            first = next((line.strip()[0] for line in file if line.strip()), "")
        return read_brackets(path) if first in tuple("([") else read_conllu(path)
    except ValueError as error:
        raise ConfigError(f"structure={error}") from None


# --- what is known of our tasks


def known_structure(
    run: RunConfig, ids: Mapping[str, Tensor], real: Mapping[str, Tensor], tokenizer: Tokenizer | None
) -> Structure | None:
    """Where the answers stand in the rows of a task that has one: where a good model would look.

    * ``kv_lookup``, ``multi_query_recall``, ``induction``: the earlier position that holds what is asked for.
    * ``dates``, cross-attention: the characters of the source that the *next* character of the target is made of.
    """
    from minitx.analysis.structure import position_structure
    from minitx.data.synthetic import induction_targets, previous_occurrences

    name = getattr(run.data, "name", None)
    if name == "dates" and tokenizer is not None:
        return dates_structure(ids, real, tokenizer)
    if name not in ("kv_lookup", "multi_query_recall", "induction"):
        return None
    rows = ids["input_ids"]
    targets = previous_occurrences(rows) if name == "kv_lookup" else induction_targets(rows)
    asked = {"kv_lookup": 1, "multi_query_recall": getattr(run.data, "num_queries", 0)}.get(name, rows.shape[1])
    targets[:, : rows.shape[1] - asked] = -1  # a value that comes again is no question
    return position_structure(targets)


def dates_structure(ids: Mapping[str, Tensor], real: Mapping[str, Tensor], tokenizer: Tokenizer) -> Structure:
    """Arcs from each decoder position to the source characters of the part (year, month, day) that it writes next.

    A part that is written alike on both sides goes character by character, any other (``March`` for ``03``) as a whole.
    """
    from minitx.analysis.structure import Links, Structure
    from minitx.data.dates import date_parts

    rows = []
    for row in range(len(ids["input_ids"])):
        source, target = (
            tokenizer.decode(ids[axis][row][real[axis][row]].tolist(), skip_marks=True)
            for axis in ("input_ids", "decoder_input_ids")
        )
        arcs = []
        for part, (start, stop) in date_parts(source, target).items():
            first, last = {"year": (0, 4), "month": (5, 7), "day": (8, 10)}[part]
            alike = source[start:stop] == target[first:last]
            for position in range(first, last):  # the decoder reads its mark of the beginning first
                wanted = [start + position - first] if alike else range(start, stop)
                arcs += [(position, character, part) for character in wanted]
        queries, keys = (
            tuple((i, i + 1) for i in range(int(real[axis][row].sum()))) for axis in ("decoder_input_ids", "input_ids")
        )
        rows.append(Links(queries, keys, tuple(arcs)))
    return Structure("decoder_input_ids", "input_ids", tuple(rows))
