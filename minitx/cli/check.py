"""``check.py``: say what is wrong with a function or a layer of attention."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from minitx.cli.command_line import key, refusing, run_program, write
from minitx.config import ConfigError
from minitx.config.schema import Config, Natural, require

if TYPE_CHECKING:
    from minitx.check.results import Report

USAGE = """python scripts/check.py FILE.py:NAME [key=value ...]

NAME is a function of queries, keys and values, a layer with projections, or a class that makes one.
Python runs the file, with all rights that you have. The exit code is 1 if something is wrong."""

STAGES = "1 plain, 2 masks, 3 queries that see nothing, 4 wide values and causal, 5 half precision and large scores"


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Config):
    """The keys of ``check.py``."""

    target: str = key("", "FILE.py:NAME; target= may be left out")
    stage: Natural | None = key(None, f"grade one stage of the exercise: {STAGES}")
    strict: bool = key(False, "check a kernel with the arguments of scaled_dot_product_attention in all cases and dtypes")
    mask: str | None = key(None, "what True in the mask means, keep or hide; null: what fits")
    seed: Natural = key(0, "seed of the random inputs")
    device: str = key("cpu", "cpu, cuda, cuda:1, mps ...")
    json: str = key("", "also write the report to this file, for graders")

    def check(self) -> None:
        require(bool(self.target), "FILE.py:NAME is missing, such as mine.py:attention")
        path, colon, name = self.target.rpartition(":")
        require(bool(colon and path and name), f"{self.target} must be FILE.py:NAME, such as mine.py:attention")
        require(self.stage in (None, 1, 2, 3, 4, 5), f"stage={self.stage} must be {STAGES}")
        require(self.mask in (None, "keep", "hide"), f"mask={self.mask} must be keep or hide")
        require(not self.strict or self.stage is None, "strict=true and stage exclude each other: give one of them")
        folder = Path(self.json).absolute().parent
        require(not self.json or folder.is_dir(), f"json={self.json} is in a folder that does not exist")


def main() -> int:
    """The program behind ``scripts/check.py`` and ``minitx-check``; returns the exit code."""
    reports: list[Report] = []
    arguments = [word if "=" in word or word.startswith("-") else f"target={word}" for word in sys.argv[1:]]
    code = run_program(CheckConfig, USAGE, lambda config: reports.append(_check(config)), arguments=arguments)
    return code or max((report.exit_code for report in reports), default=0)


def _check(config: CheckConfig) -> Report:
    path, _, name = config.target.rpartition(":")
    report = _report(_object(_module(path), path, name), config)
    if config.json:
        with refusing(f"json={config.json} cannot be written: ", (OSError,)):
            Path(config.json).write_text(report.json(), encoding="utf-8")
    write(f"{report}\n")
    return report


def _report(subject: Any, config: CheckConfig) -> Report:
    """The report for what the file names. Models belong here, too: a class or function that makes one, and an instance."""
    from minitx.check.calls import check_attention

    with refusing(f"{config.target}: ", (ValueError, TypeError)):
        return check_attention(
            subject,
            strict=config.strict,
            stage=config.stage,
            mask=config.mask,  # type: ignore[arg-type]
            seed=config.seed,
            device=config.device,
        )


def _module(path: str) -> ModuleType:
    """Run the file, with its folder first on the path of imports."""
    file = Path(os.path.expanduser(path))
    require(file.is_file(), f"{path} does not exist" if not file.exists() else f"{path} is not a file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if file.suffix != ".py" or spec is None or spec.loader is None:
        raise ConfigError(f"{path} must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.absolute().parent))
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        place = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {error}{place}") from error
    return module


def _object(module: ModuleType, path: str, name: str) -> Any:
    """What the file defines under a name."""
    if hasattr(module, name):
        return getattr(module, name)
    names = [other for other, value in vars(module).items() if not other.startswith("_") and not inspect.ismodule(value)]
    similar = difflib.get_close_matches(name, names, n=1)
    advice = f"did you mean {similar[0]}?" if similar else f"it defines {', '.join(names) or 'nothing'}"
    raise ConfigError(f"{path} does not define {name}; {advice}")
