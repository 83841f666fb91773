"""``train.py``: one training run, a sweep of them, or (``experiment=scaling_ablation``) a grid."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from minitx.ablation.design import AblationConfig
from minitx.cli.command_line import check_flags
from minitx.cli.compose import build_config, build_grid, explaining, find_own_modules, idle, register_defaults, unlisted
from minitx.cli.exit_codes import exit_code, sentence
from minitx.cli.launch import FOLDER, job_name, launch, needs_launch, run_training, started_from_outside
from minitx.config import CONFIG_DIR, ConfigError, RunConfig
from minitx.config.part import import_modules
from minitx.config.schema import require
from minitx.config.shipped import shipped_configs
from minitx.training import kept_environment, rank

_GRIDS = set[Path]()  # the folders of the grids of this call
_FAILED = set[str]()  # the reasons and overrides of the failed jobs of this call that were logged
log = logging.getLogger("minitx")


def main() -> int:
    """The program behind ``scripts/train.py`` and ``minitx-train``; returns the exit code."""
    register_defaults()

    def program() -> None:
        _GRIDS.clear()
        _FAILED.clear()
        sys.argv[1:], words, is_shown = check_flags(sys.argv[1:])
        find_own_modules(words)
        if is_shown:
            sys.argv[1:1] = unlisted(words)
        sweeps = bool({"-m", "--multirun"} & {*sys.argv})
        try:
            with redirect_stderr(_WithoutRepeats(sys.stderr)) if sweeps else nullcontext(), explaining(words, sweeps=sweeps):
                hydra.main(version_base="1.3", config_path=str(shipped_configs()), config_name="train")(run_job)()
        finally:
            is_empty = SweepFolder.remove()
        require(not is_empty, "the sweep has no job: a range or glob in it has no values")

    with kept_environment("HYDRA_FULL_ERROR"):
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing a traceback; the sentence is ours
        return exit_code(program)


def run_job(composed: DictConfig) -> float | None:
    """Run one job of Hydra: a run or a grid. Return the value of ``optimized_metric`` for sweepers."""
    speak_on_the_first_rank()
    words = command_words()
    find_own_modules(words)
    try:
        grid = build_grid(composed, words)
        if grid is None:
            config = build_config(composed, words)
        else:  # the other keys are for its runs, and checked there
            config = RunConfig(experiment=composed.experiment, output_dir=composed.output_dir, seed=composed.seed)
        folder = output_folder(config, composed, grid)
        if grid is not None:
            from minitx.cli.ablate import run_ablation

            require(
                folder not in _GRIDS,
                f"output_dir={folder} is the folder of another grid of this sweep (-m), whose report this one would replace"
                f": set one with ${{…}} in it, such as output_dir=runs/${{hydra:job.num}}",
            )
            _GRIDS.add(folder)
            run_ablation(grid, folder, words, command())
            return None
        for said in () if FOLDER in os.environ else idle(config, words):
            require(HydraConfig.get().mode == RunMode.MULTIRUN, said)  # in a sweep another job may read it
            log.warning("job %s: %s", HydraConfig.get().job.num, said)
        if config.trainer.plan:
            run_plan(config, folder)
            return None
        if needs_launch(config.trainer):
            return run_on_devices(config, folder)
        if not words and HydraConfig.get().job.config_name == "train":
            log.info("no arguments: this trains the default model on the King James text; train.py --help shows the choices")
        result = run_training(config, folder, command())
        log.info("%s", summary_line(result, folder))
        return value_of(result, config.optimized_metric)
    except BaseException as error:
        remove_hydra_folder()
        if not isinstance(error, Exception):
            raise
        if HydraConfig.get().mode == RunMode.RUN or isinstance(getattr(error, "number", None), int) or FOLDER in os.environ:
            raise KeyboardInterrupt from error  # else Hydra adds a line, and runs the next job of a sweep
        log.warning("job %s failed: %s", HydraConfig.get().job.num, sentence(error)[0])  # Hydra tells of the first alone
        _FAILED.update((str(error), str(OmegaConf.to_container(HydraConfig.get().overrides.task))))
        raise


class _WithoutRepeats:
    """The stream ``stderr`` of a sweep, without Hydra's lines about jobs whose failure has its line."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if text.rstrip().endswith(tuple(_FAILED)) else int(self._stream.write(text) or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_new(record: logging.LogRecord) -> bool:
    """Return whether a record isn't a sweeper's about a job whose failure has its line."""
    is_of_plugin = record.name.startswith(("hydra.", "hydra_plugins."))
    return not (is_of_plugin and any(said in record.getMessage() for said in _FAILED if said))


def speak_on_the_first_rank() -> None:
    """Log to stdout, in the first process only. Each process also has its own log in the run's folder."""
    handler = logging.StreamHandler(sys.stdout)
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # of a closed pipe: a traceback for each line
    handler.addFilter(_is_new)
    handler.setLevel(logging.CRITICAL if rank() else logging.NOTSET)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])


def hydra_folder() -> Path | None:
    """Return the folder of this job from ``hydra.run.dir`` or a sweep (Hydra has created it), or None."""
    job = HydraConfig.get()
    return Path(job.runtime.output_dir) if job.mode == RunMode.MULTIRUN or job.run.dir != "." else None


def remove_hydra_folder() -> None:
    """Remove the folder that Hydra has created for this job, if nothing is in it."""
    if (made := hydra_folder()) is not None:
        with suppress(OSError):
            made.rmdir()


class SweepFolder(Callback):
    """Keep the config of a sweep, because it names the folder, until ``remove`` is called. Hydra itself keeps the config of a run."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        HydraConfig.instance().set_config(config)

    @staticmethod
    def remove() -> bool:
        """Remove the folder of the sweep (Hydra creates it first) if no job has left anything in it. Return whether it was removed."""
        is_empty = False
        if HydraConfig.initialized():
            folder = Path(HydraConfig.get().sweep.dir)
            HydraConfig.instance().cfg = None
            is_empty = folder.is_dir() and {path.name for path in folder.glob("*")} <= {"multirun.yaml"}
            if is_empty:
                (folder / "multirun.yaml").unlink(missing_ok=True)  # Optuna's sweeper writes none
                inner = os.path.relpath(folder)
                with suppress(OSError):  # the current folder
                    if not inner.startswith(os.pardir):  # empty folders elsewhere are the user's
                        os.removedirs(inner)  # and the empty ones above it
        return is_empty


def command_words() -> list[str]:
    """Return the typed command line of this job only, without the other jobs of a sweep, with its interpolations."""
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    sources = HydraConfig.get().runtime.config_sources
    return [*(f"{CONFIG_DIR}{source.path}" for source in sources if source.provider == "command-line"), *typed]


def command() -> str:
    """Return the command that repeats this job, with the program under its typed name."""
    called = {"train.py": ["python", sys.argv[0]], "minitx-train": ["minitx-train"]}.get(Path(sys.argv[0]).name)
    primary = HydraConfig.get().job.config_name
    named = [] if primary == "train" else [f"--config-name={primary}"]
    return shlex.join([*(called or ["python", "scripts/train.py"]), *named, *command_words()])


def run_plan(config: RunConfig, folder: Path) -> None:
    """Print what each process of a run will hold. The run would have ``folder``, and a plan has none.

    Raises:
        ConfigError: the run is one of a sweep, or could not begin.
    """
    from minitx.training.run import train

    require(HydraConfig.get().mode == RunMode.RUN, "trainer.plan=true shows one run: leave out -m")
    train(config, folder)
    remove_hydra_folder()


def run_on_devices(config: RunConfig, folder: Path) -> float:
    """Start the processes of a run on several devices, wait for them, and return the value of the run."""
    from minitx.training.checkpoints import check_free
    from minitx.training.devices import check_count

    import_modules(config.imports)  # one of them may register the accelerator
    check_count(config.trainer)
    check_free(folder, config.ckpt_path)  # the processes would wait for each other
    launch([f"--config-name={HydraConfig.get().job.config_name}", *command_words()], config.trainer.world_size, folder)
    return value_of(json.loads((folder / "result.json").read_text(encoding="utf-8")), config.optimized_metric)


def value_of(result: Mapping[str, Any], metric: str = "val_loss") -> float:
    """Return the value for a sweeper: the last value of ``metric``, or NaN if it or the run was not finite.

    Raises:
        ConfigError: the run has logged other metrics, but not this one.
    """
    found = result["metrics"]
    if metric not in found and metric != "val_loss" and result["nonfinite_step"] is None:
        raise ConfigError(f"optimized_metric={metric} is not logged; there are {', '.join(found)}")
    return float("nan") if found.get(metric) is None else float(found[metric])


def summary_line(result: Mapping[str, Any], folder: Path) -> str:
    """Return the result of a run in one line, with its folder."""
    step = result["nonfinite_step"]
    values = [f"{result['steps']} steps" if step is None else f"not finite at step {step}"]
    for name in ("val_loss", "val_accuracy"):
        if result[name] is not None:
            values.append(f"{name.replace('val_', 'validation ')} {result[name]:.4f}")
    for name, floor in result["floors"].items():
        values.append(f"{name} floor {floor:.4f}")
    return "  ".join(values) + f"\n{folder}"


def output_folder(config: RunConfig, composed: DictConfig, grid: AblationConfig | None) -> Path:
    """Return ``output_dir``, else Hydra's folder if ``hydra.run.dir`` or a sweep sets one, else ``runs/<experiment>/<date_time>``.

    A grid has ``runs/<experiment>/<grid>``, so that it can resume. Under torchrun and srun the default is
    ``runs/<experiment>/<name of the job>``, known to all processes.

    Raises:
        ConfigError: ``ckpt_path`` needs a run that is not there, a sweep has one folder for all jobs, or torchrun's job has no
            name.
    """
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    job = HydraConfig.get()
    sweeps = job.mode == RunMode.MULTIRUN
    is_shared = sweeps and config.output_dir and not OmegaConf.is_interpolation(composed, "output_dir")
    require(
        not is_shared,
        f"output_dir={config.output_dir} is one folder for all jobs of -m: set hydra.sweep.dir, or leave it out",
    )
    if grid is not None:
        return Path(config.output_dir or Path("runs", config.experiment, grid.name)).absolute()
    named = config.output_dir or hydra_folder()
    require(
        config.ckpt_path != "last" or named is not None,
        "ckpt_path=last is the newest checkpoint in output_dir=null: say which run goes on, output_dir=FOLDER",
    )
    if not started_from_outside():
        return Path(named or default_folder(config.experiment)).absolute()
    require(not sweeps, "a sweep (-m) starts the processes of each of its runs: call it without torchrun and srun")
    return Path(named or Path("runs", config.experiment, job_name())).absolute()


def default_folder(experiment: str) -> Path:
    """Return ``runs/<experiment>/<date_time>``, with ``_2`` if this folder exists."""
    second = Path("runs", experiment, time.strftime("%Y-%m-%d_%H-%M-%S"))
    numbered = (second.with_name(f"{second.name}_{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([second], numbered) if not os.path.lexists(folder))
