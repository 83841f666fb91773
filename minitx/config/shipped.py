"""Where minitx's own YAML files are."""

from functools import cache
from pathlib import Path


@cache
def shipped_configs() -> Path:
    """Return the folder of minitx's own configs: ``minitx/configs`` of the wheel, or ``configs`` next to the package in a clone."""
    package = Path(__file__).resolve().parents[1]
    folder = package / "configs"
    return folder if folder.is_dir() else package.with_name("configs")
