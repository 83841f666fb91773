"""The stored notebooks are what their source makes, hold their outputs, and run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from minitx.config import TransformerConfig
from minitx.data.tokenizer import train_tokenizer
from minitx.interop import save_hf
from minitx.nn import DecoderLM

sys.path.insert(0, str(Path(__file__).parent / "tools"))
from make_notebook import EXAMPLES, NOTEBOOKS, cells, notebook, run


@pytest.mark.parametrize("language", NOTEBOOKS)
def test_the_stored_notebook_has_the_cells_of_its_source_and_their_outputs(language):
    text, source = NOTEBOOKS[language].read_text("utf-8"), (EXAMPLES / "attention.py").read_text("utf-8")
    assert [(c["cell_type"], "".join(c["source"])) for c in json.loads(text)["cells"]] == cells(source, language)
    outputs = [output for cell in json.loads(text)["cells"] for output in cell.get("outputs", [])]
    frames = [i for i, output in enumerate(outputs) if "<iframe" in "".join(output.get("data", {}).get("text/html", ""))]
    assert len(frames) == 3 and all(list(outputs[i + 1]["data"]) == ["image/png"] for i in frames)  # sites remove frames
    assert all(len("".join(output.get("data", {}).get("text/plain", ""))) < 200 for output in outputs)
    assert '"output_type": "error"' not in text and '"name": "stderr"' not in text
    assert "layer 18, head 6: 0.7" in text, "make_notebook.py ran without SmolLM2"
    assert NOTEBOOKS[language].stat().st_size < 1e6


def test_without_smollm2_its_chapter_says_so_once_and_does_nothing(capsys):
    found = cells((EXAMPLES / "attention.py").read_text("utf-8"), "en")
    chapter = next(number for number, (_, text) in enumerate(found) if text.startswith("## 9."))
    names = {"find_spec": lambda name: None}
    for kind, text in found[chapter:]:
        if kind == "code":
            exec(text, names)
    said = capsys.readouterr().out
    assert said.startswith("This chapter is skipped") and said.count("\n") == 1


@pytest.mark.release
def test_the_notebook_runs_from_top_to_bottom(monkeypatch, tmp_path):
    tokenizer = train_tokenizer("bpe", [" The lamp of Marla Voss burned."], vocab_size=270)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shape = {"embed_dim": 12, "num_heads": 3, "num_layers": 7, "max_len": 128, "vocab_size": tokenizer.vocab_size}
    llama = {"position": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
    save_hf(DecoderLM(TransformerConfig(**shape, **llama)), tmp_path)  # stands for SmolLM2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = notebook("en")
    for cell in made.cells:  # a reader's runs learn their tasks; these show that every cell fits the package
        cell.source = re.sub(r"\bsteps=\d+", "steps=10", cell.source)
        cell.source = cell.source.replace("source, options = None", f"source, options = {str(tmp_path)!r}")
    done = [cell for cell in run(made).cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in done)
    shown = {kind for cell in done for output in cell.outputs for kind in output.get("data", {})}
    assert {"image/png", "text/html"} <= shown
    said = "".join(output.get("text", "") for cell in done for output in cell.outputs)
    assert "without the eight strongest:" in said and "skipped" not in said
