"""Measure what works with which family of transformers, and write the table of docs/weights.md: python tests/tools/families_table.py

A cell is what the tests of ``tests/interop/test_adopt.py`` say of a random small model. The release tests compare the page with it.
Where gradients are not compared in float64, transformers' experts have no product in float64; logits were compared, in float32.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from pytest import skip  # noqa: PT013 (tests/test_skips.py counts each pytest.skip)

sys.path.insert(0, str(Path(__file__).parents[2]))

from minitx.analysis import capture
from minitx.interop import adopt_hf
from tests.interop import test_adopt as checks
from tests.interop.families import BESIDE, NAMES, PARTLY, REFUSED, build, inputs_of

PAGE = Path(__file__).parents[2] / "docs" / "weights.md"
FOUND = re.compile(r"(?<=<!-- families -->\n)(.*?)(?=<!-- end of families -->)", re.DOTALL)


def holds(check: Callable[..., None], *args: str) -> str:
    """``yes``, ``no``, or ``–`` where the check does not apply."""
    torch.manual_seed(0)
    try:
        check(*args)
    except skip.Exception:
        return "–"
    except Exception:
        return "no"
    return "yes"


def layers_are_found(name: str) -> None:
    model, (inputs, _) = adopt_hf(build(name)), inputs_of(name)
    with torch.no_grad(), capture(model, what="residual") as residual, capture(model, what="feedforward") as feedforward:
        model(**inputs)
    records = [record for seen in (residual, feedforward) for of_layer in seen.values() for record in of_layer]
    assert len(residual) == len(feedforward) and all(record.dim() == 3 and len(record) == 2 for record in records)


def checked(name: str) -> str:
    """Whether the check of adoption needs no inputs of one's own."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        adopt_hf(build(name))
    return "`inputs`" if any("is not checked" in str(one.message) for one in seen) else "`auto`"


def padding(name: str) -> str:
    if "attention_mask" not in inputs_of(name)[0]:
        return "–"
    check = checks.test_padding_on_either_side_is_hidden_as_it_is_in_the_model
    return ", ".join(side for side in ("left", "right") if holds(check, name, side) == "yes") or "no"


CELLS: dict[str, Callable[[str], str]] = {
    "`check`": checked,
    "gradients in float64": partial(holds, checks.test_an_adopted_model_has_the_logits_and_gradients_of_its_eager_self),
    "padding": padding,
    "`generate` with a cache": partial(holds, checks.test_a_cache_and_generate_give_what_the_model_gives),
    "`capture`, `intervene`": partial(holds, checks.test_looking_changes_no_bit_and_knocking_a_head_out_changes_the_answer),
    "`output_attentions`": partial(holds, checks.test_output_attentions_are_the_weights_of_the_core),
    "`residual`, `feedforward`": partial(holds, layers_are_found),
    "`fold_scale`": partial(holds, checks.test_folding_the_scale_keeps_the_function_and_release_gives_the_weights_back),
}


USUAL = {"`check`": "`auto`", "padding": "left, right"}
"""What the page leaves out, besides ``yes`` and ``–``."""


def row(name: str) -> str:
    """What applies to one family and is not as usual; empty for nothing."""
    if name in REFUSED:
        held = holds(checks.test_a_model_whose_attention_is_not_replaced_or_not_rightly_is_refused_and_given_back, name)
        return "refused" if held == "yes" else "not refused"
    cells = {column: cell(name) for column, cell in CELLS.items()}
    return "; ".join(f"{column}: {cell}" for column, cell in cells.items() if cell not in (USUAL.get(column, "yes"), "–"))


def table(names: tuple[str, ...] = (*NAMES, *BESIDE, *PARTLY, *REFUSED)) -> str:
    """The table, with one line for the families that are alike."""
    lines: dict[str, list[str]] = {}
    for name in names:
        lines.setdefault(row(name), []).append(name)
    rows = [
        ("families", "exceptions"),
        ("---", "---"),
        *((", ".join(found), exceptions) for exceptions, found in lines.items()),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def on_the_page() -> dict[str, str]:
    """The exceptions of each family on the page."""
    _, _, *lines = FOUND.search(PAGE.read_text(encoding="utf-8"))[0].splitlines()  # type: ignore[index]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name: exceptions for names, exceptions in rows for name in names.split(", ")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(FOUND.sub(lambda _: table(), page), encoding="utf-8")
