"""``docs/errors.md``: what each case printed, as a table. Each test compares its own row; one command writes them all."""

from __future__ import annotations

import os
import re
from pathlib import Path

from bad_input_cases import CASES, TINY, Case

PATH = Path(__file__).parents[2] / "docs" / "errors.md"
COMMAND = "MINITX_WRITE_ERRORS=1 python -m pytest tests/cli/test_bad_input.py"
WRITES = os.environ.get("MINITX_WRITE_ERRORS") == "1"
SCRIPTS = {"view": "view_attention"}

TITLES = {"config": "Keys and values", "data": "Data", "files": "Folders and files", "environment": "The machine"}
HEAD = f"""\
# What a mistake prints

A plain mistake gets one line that names the key, the file and the value, and an exit code; no traceback, and no folder that
looks like a run. Every row below is a test that ran: what is wrong, what was typed, the exit code, and the line as it was
printed. `FOLDER` stands for the current folder, `…` for words of another package. In the rows marked with * a small run stands
before what was typed: `{" ".join(TINY)}`.

    {COMMAND}

writes this page; without the variable the same tests compare it with what they print.
"""
FOOT = """\
## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 2 | something is wrong with what was typed, or with the files and the machine that it names; nothing has begun |
| 3 | the run failed after it had begun; what it had written stays |
| 130 | stopped by SIGINT (Ctrl-C), after the checkpoint was written |
| 143 | stopped by SIGTERM, after the checkpoint was written |

Behind `traceback=true`, which every program takes, the traceback comes before the line:

    python scripts/train.py traceback=true model.num_heads=abc
"""


def row_of(case: Case, line: str, place: Path) -> str:
    """The row of the table for a case that printed ``line`` in the folder ``place``."""
    said = line.strip().replace(str(place), "FOLDER")
    if case.cut is not None:
        before, found, _ = said.partition(case.cut)
        assert found, (case.cut, said)
        said = f"{before}{found} …"
    typed = f"{SCRIPTS.get(case.program, case.program)}.py {case.typed}".strip()
    star = "*" if case.builds and case.program == "train" else ""
    return f"| {case.wrong}{star} | {_code(typed)} | {case.code} | {_code(said) if said else 'nothing'} |"


def _code(text: str) -> str:
    marks = "``" if "`" in text else "`"
    return f"{marks}{text}{marks}".replace("|", "\\|")


def rows_in(page: str) -> dict[str, str]:
    """The rows of a page by what is wrong."""
    rows = [line for line in page.splitlines() if re.match(r"\| [^|]+ \| `", line)]
    return {row.split(" | ")[0].removeprefix("| ").removesuffix("*"): row for row in rows}


def page_of(rows: dict[str, str]) -> str:
    """The whole page."""
    parts = [HEAD]
    for group, cases in CASES.items():
        lines = [rows[case.wrong] for case in cases if case.wrong in rows]
        table = ["| what is wrong | what was typed | exit code | the line |", "|---|---|---|---|", *lines]
        parts.append(f"## {TITLES[group]}\n\n" + "\n".join(table) + "\n")
    return "\n".join([*parts, FOOT])


def committed() -> str:
    """The page as it stands."""
    return PATH.read_text(encoding="utf-8") if PATH.is_file() else ""
