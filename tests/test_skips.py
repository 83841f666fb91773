"""One list of skips with reasons: docs/dev/testing.md, held against every skip that the tests spell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/dev/testing.md"
SKIPS = {"skipif": "reason", "skip": "reason", "importorskip": "modname", "xfail": "reason"}


def skips(source: str) -> Iterator[str]:
    """The reason of every skip in a file of tests; what an f-string fills in is ``…``, and no reason is an empty text."""
    nodes = list(ast.walk(ast.parse(source))) if re.search("|".join(SKIPS), source) else []
    calls = {node.func: node for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in SKIPS and ast.unparse(node).startswith("pytest."):
            call = calls.get(node, ast.Call(node, [], []))  # or bare: @pytest.mark.skip
            first = [] if node.attr in ("skipif", "xfail") else call.args
            given = [part.value for part in call.keywords if part.arg == SKIPS[node.attr]]
            yield text(*[*given, *first, None][:1])


def text(node: ast.expr | None) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_every_skip_stands_in_the_list_with_its_reason_and_the_list_holds_no_other():
    lines = PAGE.read_text().splitlines()
    table = lines[lines.index("| reason | needs | tests |") + 2 :]
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in takewhile(lambda line: line.startswith("|"), table)]
    rows = [(path, reason) for reason, _, paths in cells for path in re.findall(r"`(tests/[^`]+)`", paths)]
    listed = set(rows)
    assert all(needs and paths for _, needs, paths in cells) and len(listed) == len(rows) >= len(cells)
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert {(str(path.relative_to(ROOT)), reason) for path in files for reason in skips(path.read_text())} == listed
