"""``evaluate.py``: evaluate a checkpoint with the metrics of its task and 95 % intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from minitx.cli import importing
from minitx.cli.command_line import FilePath, StoredConfig, check_output, open_stored, run_program, write, writing
from minitx.config import EvaluationConfig
from minitx.config.schema import Count, Natural, require


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(StoredConfig):
    """The keys of ``evaluate.py``. Data, tokenizer and model come from the checkpoint.

    Attributes:
        split: the split to evaluate: val or test.
        num_rows: number of rows; null: all.
        num_beams: number of beams for generated answers; 1: greedy.
        num_shown: number of answers to show.
        batch_size: number of rows in a batch; null: as in training.
        output: also write the numbers to this JSON file.
        model: a model that replaces the stored one: {_target_: ...}; like the next two keys, it is trusted.
        data: keys of the data that replace the stored ones: data.path=FILE.
        objective: an objective that replaces the stored one: {_target_: ...}.
    """

    split: Literal["val", "test"] = "val"
    num_rows: Count | None = None
    num_beams: Count = 1
    num_shown: Natural = 3
    batch_size: Count | None = None
    output: FilePath | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        if self.output is not None:
            check_output(self.output)


def main() -> int:
    """The program behind ``scripts/evaluate.py`` and ``minitx-evaluate``; returns the exit code."""
    return run_program(EvaluateConfig, "python scripts/evaluate.py ckpt_path=FILE [key=value ...]", _evaluate)


def _evaluate(config: EvaluateConfig) -> None:
    with importing():
        from minitx.training.checkpoints import move_to_device
        from minitx.training.evaluation import evaluate
        from minitx.training.onednn import onednn_products

    changes = {"model": config.model, "data": config.data, "objective": config.objective}
    options = EvaluationConfig(num_rows=config.num_rows, num_beams=config.num_beams, num_shown=config.num_shown)
    with onednn_products():  # as in training
        stored = open_stored(config.checkpoint, trust=config.trust, changes=changes)
        require(
            stored.tokenizer is None or "tokenizer" not in config.data,
            "data.tokenizer has no effect: the checkpoint contains the tokenizer",
        )
        task = stored.task()
        require(
            config.num_beams == 1 or task.kind == "seq2seq",
            f"num_beams={config.num_beams} has no effect: only encoder-decoders generate answers",
        )
        in_training = stored.state["config"]["trainer"]["val_batch_size"] or stored.part("data").run_values["batch_size"]
        network = move_to_device(stored.network, config.device)
        rows = config.batch_size or in_training
        evaluation = evaluate(network, task, options, stored.objective(), batch_size=rows, split=config.split)
    write("\n".join(evaluation.lines()) + "\n")
    if config.output is not None:
        plain = {"ckpt_path": config.ckpt_path, "data": task.name, "split": config.split, **evaluation.to_dict()}
        with writing(config.output):
            Path(config.output).write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
