"""Which tokens of a vision model are patches of its image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from minitx.analysis.recorder import before_calls, chosen_modules
from minitx.analysis.snapshot import PIXELS
from minitx.config.schema import stated
from minitx.nn.functional import AttentionCall


def places_of_patches(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of the tokens of an image, or [] if it is not known which tokens are which patches.

    The config has the size of a patch. Three patches are changed to find out whether the last tokens are the patches, row by row.
    """
    pixels = inputs[PIXELS]
    configs: list[Any] = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), "patch_size")]
    side = configs[0].patch_size if configs else None
    if side is None or pixels.dim() != 4:
        return []
    height, width = side if isinstance(side, Sequence) else (side, side)
    rows, columns = pixels.shape[2] // height, pixels.shape[3] // width
    corners = [(0, 0), (0, columns - 1), (rows - 1, columns - 1)]
    changed = pixels.clone()
    for row, column in corners:
        patch = changed[:, :, row * height : (row + 1) * height, column * width : (column + 1) * width]
        patch.copy_(patch.cumsum(-1) + 1)  # not a constant, which a norm may remove
    queries = list[Tensor]()  # of the first attention, before and after the change
    for images in (pixels, changed):
        calls = list[AttentionCall]()
        with before_calls(chosen_modules(model, "heads", None), lambda name, core, args, options: calls.append(args[0])):  # noqa: B023
            model(**{**inputs, PIXELS: images})
        queries.append(calls[0].query)
    B, _, size, _ = queries[0].shape
    first = size - rows * columns
    change = (queries[0] - queries[1]).abs().amax((0, 1, 3))
    moved = (change > change.max() / 20).nonzero().flatten().tolist()  # quantisation moves all tokens a little
    if len(pixels) != B or moved != sorted({first + row * columns + column for row, column in corners}):
        return []
    registers = stated(configs[0], "num_register_tokens") or 0
    special = [*["cls"] * (first > registers), *(f"register {i}" for i in range(registers))]
    names = special if len(special) == first else [str(i) for i in range(first)]
    return [*names, *(f"{row},{column}" for row in range(rows) for column in range(columns))]
