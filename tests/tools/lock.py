"""Write ``uv.lock``, with the versions of ``constraints.txt``, for ``uv sync``. Needs uv: ``pip install uv``.

python tests/tools/lock.py

uv has no option for a file of constraints in ``uv lock``. So it gets a copy of the project that has them in ``pyproject.toml``, and
the list of constraints is taken out of the lock again. ``tests/test_package.py`` compares the lock with both files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BESIDE = ("README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "minitx", "configs")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for each in BESIDE:
            copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
            copy(ROOT / each, folder / each)
        project = folder / "pyproject.toml"
        pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").split() if "==" in line]
        text = project.read_text(encoding="utf-8")
        assert text.count("[tool.uv]\n") == 1
        project.write_text(text.replace("[tool.uv]\n", f"[tool.uv]\nconstraint-dependencies = {pins}\n"), encoding="utf-8")
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        subprocess.run(["uv", "lock", "--no-config"], cwd=folder, env=plain, check=True)
        lock = (folder / "uv.lock").read_text(encoding="utf-8")
    found, count = re.subn(r"\[manifest\]\nconstraints = \[\n.*?\n\]\n\n", "", lock, flags=re.DOTALL)
    assert count == 1
    (ROOT / "uv.lock").write_text(found, encoding="utf-8")


if __name__ == "__main__":
    main()
