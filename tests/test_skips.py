"""One list of skips with reasons: docs/dev/testing.md, held against every skip that the tests spell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/dev/testing.md"
SKIPS = {"skipif": "reason", "skip": "reason", "importorskip": "modname", "xfail": "reason"}
ADVERBS = {"skip", "skipif", "xfail"}


def skips(source: str) -> Iterator[str]:
    """The reason of every skip in a file of tests; what an f-string fills in is ``…``, and no reason is an empty text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (keyword := SKIPS.get(called(node.func))):
            given = {part.arg: part.value for part in node.keywords}
            first = node.args[:1] if called(node.func) not in ("skipif", "xfail") else []
            yield text(given.get(keyword, first[0] if first else None))
        elif isinstance(node, ast.Attribute) and node.attr in ADVERBS and ast.unparse(node.value).endswith("mark"):
            yield from () if is_called(node, source) else ("",)  # @pytest.mark.skip, bare


def called(function: ast.expr) -> str:
    """``skip`` of ``pytest.skip`` and of ``pytest.mark.skip``; other objects' methods of that name do not count."""
    name = ast.unparse(function)
    return name.rpartition(".")[2] if name.startswith("pytest.") else ""


def is_called(node: ast.Attribute, source: str) -> bool:
    return ast.get_source_segment(source, node) is not None and source.splitlines()[node.end_lineno - 1][node.end_col_offset :].startswith("(")  # fmt: skip


def text(node: ast.expr | None) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_every_skip_stands_in_the_list_with_its_reason_and_the_list_holds_no_other():
    rows = [line.split("|")[1:4] for line in PAGE.read_text().splitlines() if line.startswith("| `tests/")]
    listed = {(where.strip(" `"), reason.strip()) for where, reason, _ in rows}
    assert all(when.strip() for _, _, when in rows) and len(listed) == len(rows)
    spelled = {
        (str(path.relative_to(ROOT)), reason)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for reason in skips(path.read_text())
    }
    assert spelled == listed


@pytest.mark.parametrize(
    ("source", "reasons"),
    [
        ("pytest.skip('no font')", ["no font"]),
        ("@pytest.mark.skip\ndef test(): ...", [""]),
        ("@pytest.mark.skip(reason='later')\ndef test(): ...", ["later"]),
        ("mark = pytest.mark.skipif(sys.platform == 'x', reason=f'needs {x} here')", ["needs … here"]),
        ("pytest.mark.skipif(True)", [""]),
        ("onnx = pytest.importorskip('onnx')", ["onnx"]),
        ("pytest.param(1, marks=pytest.mark.xfail(reason='torch 3'))", ["torch 3"]),
        ("reader.skip(3)", []),
    ],
)
def test_a_skip_is_found_however_it_is_spelled(source, reasons):
    assert list(skips(source)) == reasons
