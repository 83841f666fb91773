"""``evaluate.py``: a checkpoint in, its task's metrics out, with 95 % intervals."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from minitx.cli.arguments import check_output, key, run_program, write, writing
from minitx.config import EvaluationConfig
from minitx.config.checks import positive

USAGE = "python scripts/evaluate.py ckpt_path=FILE [key=value ...]"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What ``evaluate.py`` takes; data, tokenizer and model come from the checkpoint."""

    ckpt_path: str = key(dataclasses.MISSING, "checkpoint of a run, such as runs/char_lm/.../checkpoints/last.ckpt")
    num_rows: int | None = key(None, "validation rows to look at; null: all")
    num_beams: int = key(1, "of generated answers; 1: greedy")
    num_shown: int = key(3, "answers to show")
    batch_size: int | None = key(None, "rows at a time; null: as in training")
    device: str = key("auto", "cpu, cuda, cuda:1 ...; auto takes a GPU if there is one")
    output: str | None = key(None, "JSON file to write the numbers to, too")

    def __post_init__(self) -> None:
        EvaluationConfig(num_rows=self.num_rows, num_beams=self.num_beams, num_shown=self.num_shown)
        positive(self, "batch_size")
        if self.output is not None:
            check_output(self.output, "file")


def main() -> int:
    """The program behind ``scripts/evaluate.py`` and ``minitx-evaluate``; returns the exit code."""
    return run_program(EvaluateConfig, USAGE, _evaluate)


def _evaluate(config: EvaluateConfig) -> None:
    from minitx.cli.inputs import data_of_run, stored_run
    from minitx.training.checkpoint import load_model, place
    from minitx.training.evaluation import evaluate

    model, tokenizer, state = load_model(config.ckpt_path)
    data = data_of_run(config.ckpt_path, model, tokenizer, state, config.batch_size)
    options = EvaluationConfig(num_rows=config.num_rows, num_beams=config.num_beams, num_shown=config.num_shown)
    found = evaluate(place(model, config.device), data, options)
    write("\n".join(found.lines()) + "\n")
    if config.output is not None:
        plain = {"ckpt_path": config.ckpt_path, "data": stored_run(state).data.name, **found.to_dict()}
        with writing("output", config.output):
            Path(config.output).write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
