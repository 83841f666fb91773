"""What a viewer writes beside the positions of a batch."""

from __future__ import annotations

from minitx.data.addressing import Batch
from minitx.data.synthetic import key_value_texts
from minitx.data.task import Task
from minitx.data.tokenizers import token_texts


def position_texts(task: Task, inputs: Batch) -> dict[str, list[list[str]]]:
    """Return a text for each position of a batch: its token, or ``KEY:VALUE`` in a recall task. {} if there is neither."""
    ids = {axis: inputs[axis] for axis in ("input_ids", "decoder_input_ids") if axis in inputs}
    if task.tokenizer is not None:
        return {axis: [token_texts(task.tokenizer, row) for row in rows.tolist()] for axis, rows in ids.items()}
    if not task.recall:
        return {}
    types = inputs.get("token_type_ids", ids["input_ids"].new_zeros(ids["input_ids"].shape))
    rows = zip(ids["input_ids"].tolist(), types.tolist(), strict=True)
    return {"input_ids": [key_value_texts(*row) for row in rows]}
