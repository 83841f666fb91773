"""Make examples/attention.ipynb and its Chinese twin from examples/attention.py, and run them: python tests/tools/make_notebook.py

``make_notebook.py exercise`` does the same with examples/exercise.py.

The source is a Python file with cells (``# %%``). Text cells say their language; code cells belong to both. A picture of each frame of
the viewer stands below it, because sites such as GitHub remove frames. It ends below the maps, and is taken with playwright in Chromium.
"""

from __future__ import annotations

import base64
import html
import io
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = {"en": EXAMPLES / "attention.ipynb", "zh": EXAMPLES / "attention.zh.ipynb"}
EXERCISES = {"en": EXAMPLES / "exercise.ipynb", "zh": EXAMPLES / "exercise.zh.ipynb"}


def cells(source: str, language: str) -> list[tuple[str, str]]:
    """("markdown" or "code", text) of each cell in one language.

    >>> cells("# %% [markdown] en\\n# one\\n\\n# %% [markdown] zh\\n# 一\\n\\n# %%\\nx = 1\\n", "zh")
    [('markdown', '一'), ('code', 'x = 1')]
    """
    _, *parts = re.split(r"^# %%(.*)\n", source, flags=re.MULTILINE)
    found = []
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        if not kind.strip():
            found.append(("code", text.strip()))
        elif kind.split()[-1] == language:
            found.append(("markdown", re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE)))
    return found


def notebook(language: str, source: str = "attention.py") -> Any:
    """A notebook without outputs."""
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    make = {"code": new_code_cell, "markdown": new_markdown_cell}
    found = cells((EXAMPLES / source).read_text("utf-8"), language)
    made = new_notebook(cells=[make[kind](text) for kind, text in found])
    for number, cell in enumerate(made.cells):
        cell.id = f"cell-{number}"  # the same each time
    made.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return made


def run(made: Any) -> Any:
    """The notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell that fails.
    """
    from nbclient import NotebookClient

    client = NotebookClient(
        made, timeout=None, kernel_name="python3", coalesce_streams=True, resources={"metadata": {"path": EXAMPLES}}
    )
    # no progress bars, and no warning that a widget for them is missing
    return client.execute(env={**os.environ, "TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress not found"})


@contextmanager
def window(width: int = 1000) -> Iterator[Any]:
    """A page of a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser.new_page(viewport={"width": width, "height": 900}, color_scheme="light")
        browser.close()


def add_pictures(made: Any) -> None:
    """Put a picture of each frame below it."""
    from nbformat.v4 import new_output

    with window() as page:
        for cell in made.cells:
            for output in list(cell.get("outputs", [])):
                shown = output.get("data", {}).get("text/html", "")
                if frame := re.search(r'height: (\d+)px.*srcdoc="([^"]*)"', shown, re.DOTALL):
                    picture = {"image/png": _picture(page, int(frame[1]), html.unescape(frame[2]))}
                    cell.outputs.insert(cell.outputs.index(output) + 1, new_output("display_data", picture))


def shrink_figures(made: Any) -> None:
    """Give the figures of matplotlib a palette."""
    for cell in made.cells:
        for output in cell.get("outputs", []):
            if (data := output.get("data", {})).get("image/png"):
                data["image/png"] = _small(base64.b64decode(data["image/png"]))


def _picture(page: Any, height: int, text: str) -> str:
    page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
    page.set_content(text)
    page.wait_for_selector("#panes .cells")
    maps = [found.bounding_box() for found in page.locator("#panes .map").all()]
    bottom = max(box["y"] + box["height"] for box in maps) + 40
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": bottom}
    return _small(page.screenshot(full_page=True, clip=clip))


def _small(picture: bytes) -> str:
    """A picture with a palette, in base64."""
    small = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(128).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def main() -> None:
    import nbformat

    is_exercise = "exercise" in sys.argv[1:]
    source, notebooks = ("exercise.py", EXERCISES) if is_exercise else ("attention.py", NOTEBOOKS)
    done = run(notebook("en", source))
    if "This chapter is skipped" in str([cell.get("outputs") for cell in done.cells]):
        raise SystemExit("nothing was written, because a chapter was skipped: install the packages that it names")
    shrink_figures(done)
    if not is_exercise:
        add_pictures(done)
    for cell in done.cells:
        cell.metadata.pop("execution", None)  # times of day
    outputs = [cell.outputs for cell in done.cells if cell.cell_type == "code"]
    for language, path in notebooks.items():
        made = notebook(language, source)
        for number, (cell, found) in enumerate(zip([c for c in made.cells if c.cell_type == "code"], outputs, strict=True), 1):
            cell.outputs, cell.execution_count = found, number
        nbformat.write(made, path)
        sys.stdout.write(f"{path}  {path.stat().st_size / 1e6:.2f} MB\n")


if __name__ == "__main__":
    main()
