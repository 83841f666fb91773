"""``heads.py``: score every attention head of a checkpoint or of a run's folder. See ``docs/looking.md``."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitx.cli.arguments import StoredConfig, check_output, key, run_program, write, writing
from minitx.cli.inputs import attention_of, first_ids, open_stored, shape_of, text_inputs, with_attention
from minitx.config import ConfigError
from minitx.config.checks import Count, require

if TYPE_CHECKING:
    from minitx.analysis.heads import Heads, Score
    from minitx.analysis.snapshot import Snapshot
    from minitx.training.stored import Stored

USAGE = "python scripts/heads.py ckpt_path=FILE [text=TEXT | conllu=FILE] [key=value ...]"


@dataclass(frozen=True, kw_only=True)
class HeadsConfig(StoredConfig):
    """The keys of ``heads.py``. Data, tokenizer and model come from the checkpoint."""

    ckpt_path: str = key(
        dataclasses.MISSING, "checkpoint, or a run's folder: its last checkpoint, and labels at recorded steps"
    )
    text: str | None = key(None, "one text to use instead of validation rows")
    conllu: str | None = key(None, "CoNLL-U file: use its sentences, and compare the heads with their syntax")
    num_rows: Count = key(64, "number of validation rows or sentences")
    window: Count = key(4, "a head is local if it looks at most this many tokens away")
    seed: int = key(0, "seed of the control with shuffled words")
    output: str = key("heads", "folder for heads.csv, heads.json and heads.png")

    def check(self) -> None:
        require(self.text is None or self.conllu is None, "conllu takes the place of text: give one of them")
        require(0 <= self.seed < 2**63, f"seed={self.seed} must lie in [0, 2^63)")
        check_output(self.output, "folder")


def main() -> int:
    """The program behind ``scripts/heads.py`` and ``minitx-heads``; returns the exit code."""
    return run_program(HeadsConfig, USAGE, _heads)


def _heads(config: HeadsConfig) -> None:
    from minitx.analysis.heads import head_scores
    from minitx.training.stored import place

    path = Path(config.ckpt_path)
    stored = open_stored(str(path / "checkpoints" / "last.ckpt" if path.is_dir() else path), trust=config.trust)
    place(with_attention(stored), config.device)
    what, snapshots, syntax = _syntax(config, stored) if config.conllu else _rows(config, stored)
    heads = head_scores(snapshots, window=config.window, syntax=syntax)
    write(f"{what}\n" + "\n".join(heads.lines()) + "\n")
    for line in _steps(path, config.window):
        write(line)
    with writing("output", config.output):
        _write_files(Path(config.output), {"ckpt_path": stored.path, "rows": what, "seed": config.seed}, heads)


def _rows(config: HeadsConfig, stored: Stored) -> tuple[str, Iterable[Snapshot], None]:
    """The typed text, or the first rows of the validation split."""
    from minitx.cli.inputs import row_inputs
    from minitx.data.task import as_split

    if config.text is not None:
        inputs = text_inputs(stored.network, stored.tokenizer, config.text, None)
        return "one text, so without intervals", [attention_of(stored.network, inputs.tensors)], None
    task = stored.task()
    count = min(config.num_rows, len(as_split(task, "val")))
    return (
        f"{count} validation rows",
        (attention_of(stored.network, row_inputs(task, row).tensors) for row in range(count)),
        None,
    )


def _syntax(config: HeadsConfig, stored: Stored) -> tuple[str, Iterable[Snapshot], dict[tuple[str, int], Score]]:
    """The sentences of a treebank; of an encoder-decoder, its encoder reads them."""
    import torch

    from minitx.analysis.heads import syntax_scores
    from minitx.analysis.treebank import read_conllu

    shape, tokenizer = shape_of(stored.network), stored.tokenizer
    if tokenizer is None or shape.architecture == "vision":
        raise ConfigError(f"conllu={config.conllu} holds sentences, but ckpt_path={config.ckpt_path} reads no text")
    try:
        sentences = read_conllu(str(config.conllu))
    except ValueError as error:
        raise ConfigError(f"conllu={error}") from None
    except ModuleNotFoundError:
        raise ConfigError("conllu=FILE needs the package conllu: pip install conllu") from None
    before, pairs = first_ids(shape, tokenizer), shape.architecture == "encoder_decoder"

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).tolist()

    def attend(ids: torch.Tensor) -> Snapshot:
        inputs = {"input_ids": ids} | ({"decoder_input_ids": torch.tensor([[shape.bos_id]])} if pairs else {})
        return attention_of(stored.network, inputs, layers=["encoder."] if pairs else None)

    kept = [one for one in sentences if one.encode(encode, before)[0].shape[1] <= shape.max_len][: config.num_rows]
    if not kept:
        raise ConfigError(f"conllu={config.conllu} has no sentence of at most {shape.max_len} tokens (model.max_len)")
    syntax = syntax_scores(attend, kept, encode, before=before, seed=config.seed)
    return f"{len(kept)} of {len(sentences)} sentences", (attend(one.encode(encode, before)[0]) for one in kept), syntax


def _steps(folder: Path, window: int) -> Iterator[str]:
    """Of a run's folder, the label of each head at every step whose attention was recorded."""
    from minitx.analysis.heads import head_scores
    from minitx.analysis.snapshot import read_snapshots

    if not list(folder.glob("attention/step_*.safetensors")):
        return
    try:
        recorded = [(one.step, head_scores(one, window=window).heads) for one in read_snapshots(folder)]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for heads in zip(*(heads for _, heads in recorded), strict=True):
        labels = [head.label for head in heads]
        turns = [
            f"{step} {label}"
            for i, ((step, _), label) in enumerate(zip(recorded, labels, strict=True))
            if labels[i - 1 : i] != [label]
        ]
        yield f"{heads[0].layer} {heads[0].head} from step " + ", ".join(turns) + "\n"


def _write_files(folder: Path, about: dict[str, Any], heads: Heads) -> None:
    from minitx.analysis.canvas import png
    from minitx.analysis.heads import heads_figure

    folder.mkdir(exist_ok=True)
    rows = heads.rows()
    (folder / "heads.json").write_text(json.dumps({**about, "heads": rows}, indent=1) + "\n", encoding="utf-8")
    with (folder / "heads.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    (folder / "heads.png").write_bytes(png(heads_figure(heads)))
