"""The stored notebooks are what their source makes, hold their outputs, and run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from make_notebook import EXAMPLES, NOTEBOOKS, cells, notebook, run


@pytest.mark.parametrize("language", NOTEBOOKS)
def test_the_stored_notebook_has_the_cells_of_its_source_and_their_outputs(language):
    text, source = NOTEBOOKS[language].read_text("utf-8"), (EXAMPLES / "attention.py").read_text("utf-8")
    assert [(c["cell_type"], "".join(c["source"])) for c in json.loads(text)["cells"]] == cells(source, language)
    assert "image/png" in text
    assert "<iframe" in text
    assert '"output_type": "error"' not in text
    assert NOTEBOOKS[language].stat().st_size < 1e6


@pytest.mark.release
def test_the_notebook_runs_from_top_to_bottom(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = notebook("en")
    for cell in made.cells:  # a reader's runs learn their tasks; these show that every cell fits the package
        cell.source = re.sub(r"\bsteps=\d+", "steps=10", cell.source)
    done = [cell for cell in run(made).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in done)
    shown = {kind for cell in done for output in cell.outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= shown
