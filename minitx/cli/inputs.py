"""The inputs of a model that ``view_attention.py`` shows: a text from the command line, or a row of the data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from minitx.analysis.answers import Questions
from minitx.analysis.experiments import with_knock_outs
from minitx.analysis.questions import questions_of
from minitx.analysis.recorder import Layers
from minitx.analysis.snapshot import Snapshot
from minitx.analysis.snapshot_sources import take_snapshot
from minitx.cli.command_line import refusing
from minitx.config.schema import require
from minitx.data.batches import ValSource
from minitx.data.splits import as_split
from minitx.data.task import Task, without_targets
from minitx.data.token_labels import position_texts
from minitx.training.net import Net


@dataclass(frozen=True)
class RowInputs:
    """The inputs of a model for a row (B = 1) on the CPU, a text for each token, and the questions for the row."""

    tensors: dict[str, Tensor]
    texts: dict[str, list[list[str]]] = field(default_factory=dict)
    asked: Questions | None = None


def attention_of(
    model: nn.Module, inputs: RowInputs, *, layers: Layers = None, step: int | None = None, knock_out: bool = False
) -> Snapshot:
    """Return the attention on a row, and the model's answers. The row may have keys that the model does not use.

    Args:
        layers, step: see ``take_snapshot``.
        knock_out: also compute the answers without each head (one forward pass per head).

    Raises:
        ConfigError: the model does not use our attention, or cannot read the row; or with ``knock_out``, there is no question.
    """
    net, device = Net.of(model), next(model.parameters()).device
    tensors = {name: tensor.to(device) for name, tensor in net.inputs(inputs.tensors).items() if tensor.dim()}
    descriptions: dict[str, Any] = {"tokens": inputs.texts, "asked": inputs.asked, "title": net.title}
    with refusing("", (ValueError, RuntimeError, IndexError)):
        snapshot = take_snapshot(model, tensors, layers=layers, step=step, **descriptions)
        return with_knock_outs(snapshot, model, tensors, inputs.asked) if knock_out else snapshot


def row_inputs(task: Task, row: int) -> RowInputs:
    """Return the inputs of row ``row`` of the validation split.

    Raises:
        ConfigError: there is no such row.
    """
    source = ValSource(as_split(task, "val"), batch_size=1, world=1)
    require(row < source.num_rows, f"row={row} must lie in [0, {source.num_rows}), the range of validation rows")
    batch = source.rows(range(row, row + 1))
    tensors = without_targets(batch)
    return RowInputs(tensors, position_texts(task, tensors), questions_of(task, batch))


def paired(first: RowInputs, second: RowInputs) -> list[RowInputs]:
    """Return the inputs of two texts for one page. Where their tokens differ, both are labelled ``a|b``.

    Raises:
        ConfigError: the numbers of tokens differ.
    """
    texts = {}
    for axis, (row,) in first.texts.items():
        (other,) = second.texts[axis]
        require(
            len(row) == len(other),
            f"compare_text has {len(other)} tokens, but text has {len(row)}: the numbers must be equal, because texts are compared token by token",
        )
        texts[axis] = [[a if a == b else f"{a}|{b}" for a, b in zip(row, other, strict=True)]]
    return [replace(first, texts=texts), replace(second, texts=texts)]
