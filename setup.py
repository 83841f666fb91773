"""The one step of the build that pyproject.toml cannot express: a wheel carries ``configs/`` as ``minitx/configs/``.

A clone keeps ``configs/`` at its top, and ``minitx.config.shipped`` finds it there. An entry in ``package-dir`` would do the
same for the wheel, but then ``pip install -e`` installs an import hook in place of a path. Python asks that hook last, after
it has taken a folder named ``minitx`` (the clone itself, for a script beside it) for a namespace package.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source in sorted(Path("configs").rglob("*.yaml")):
                target = Path(self.build_lib, "minitx", source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


if __name__ == "__main__":  # a clone's top folder is on the path, so a program could import this file by its name
    setup(cmdclass={"build_py": BuildWithConfigs})
