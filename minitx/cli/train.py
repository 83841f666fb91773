"""``train.py``: a training run, a sweep of runs, or a grid (``experiment=scaling_ablation``)."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from minitx.ablation.design import AblationConfig
from minitx.cli.compose import (
    SHOWS_TRACEBACK,
    build_config,
    build_grid,
    explaining,
    find_own_modules,
    hydra_config,
    register_defaults,
)
from minitx.cli.exit_codes import exit_code, report, sentence
from minitx.cli.flags import Flags
from minitx.cli.launch import FOLDER, job_name, launch, needs_launch, run_training, started_from_outside, stop_with_parent
from minitx.cli.overrides import FIRST_NAMES, for_hydra
from minitx.config import CONFIG_DIR, ConfigError, RunConfig
from minitx.config.part import import_modules
from minitx.config.schema import require
from minitx.config.shipped import shipped_configs
from minitx.training import StoppedError, kept_environment, rank

log = logging.getLogger("minitx")


def main() -> int:
    """The program behind ``scripts/train.py`` and ``minitx-train``; returns the exit code."""
    register_defaults()
    if FOLDER in os.environ:
        stop_with_parent()

    def program() -> None:
        grids: set[Path] = set()

        def job(composed: DictConfig) -> float | None:
            try:
                return run_job(composed, grids)
            except Exception as error:
                if ends_sweep(error):  # Hydra would add a line to the message, and run the next job
                    raise SystemExit(report(error)) from error
                log.warning("job %s failed: %s", HydraConfig.get().job.num, sentence(error)[0])
                if is_diverged(error):
                    return worst_value()
                raise

        read = Flags(of_hydra=True).read(sys.argv[1:])
        flags = [word for word in sys.argv[1:] if word not in read.overrides]
        words = [f"{CONFIG_DIR}{read.config_dir}", *read.overrides] if read.config_dir else read.overrides
        find_own_modules(words)
        overrides = for_hydra(words)
        if read.config_name is None and (read.help or read.cfg == "job"):
            from minitx.cli.keys import unlisted

            overrides += unlisted(hydra_config(words))
        sys.argv[1:] = [*overrides, *flags]  # Hydra expects flags at the end
        with explaining(words, sweeps=read.multirun):
            hydra.main(version_base="1.3", config_path=str(shipped_configs()), config_name="train")(job)()

    with kept_environment("HYDRA_FULL_ERROR"):
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
        return exit_code(program)


def run_job(composed: DictConfig, grids: set[Path]) -> float | None:
    """Run a job of Hydra: a run or a grid. Return the value of ``optimized_metric`` for sweepers.

    Args:
        grids: the folders of the grids of earlier jobs. The folder of a grid is added.
    """
    speak_on_the_first_rank()
    words = command_words()
    find_own_modules(words)
    try:
        grid = build_grid(composed, words)
        if grid is not None:
            run_grid(grid, composed, words, grids)
            return None
        return run_one(build_config(composed, words), composed, words)
    except BaseException as error:
        remove_hydra_folder()
        setattr(error, SHOWS_TRACEBACK, composed.traceback is True)
        raise


def run_grid(grid: AblationConfig, composed: DictConfig, words: Sequence[str], others: set[Path]) -> None:
    """Run a grid, and add its folder to ``others``. The keys outside of ``ablation`` belong to its runs, and are checked there.

    Raises:
        ConfigError: another grid of this sweep has the same folder.
    """
    from minitx.cli.ablate import run_ablation

    config = RunConfig(experiment=composed.experiment, output_dir=composed.output_dir, seed=composed.seed)
    folder = output_folder(config, composed, grid)
    require(
        folder not in others,
        f"output_dir={folder} is already the folder of another grid of this sweep (-m): "
        f"set a folder that depends on the job, such as output_dir=runs/${{hydra:job.num}}",
    )
    others.add(folder)
    run_ablation(grid, folder, words, command())


def run_one(config: RunConfig, composed: DictConfig, words: Sequence[str]) -> float | None:
    """Train, or print the memory plan, and return the value of ``optimized_metric``."""
    folder = output_folder(config, composed, None)
    if config.trainer.plan:
        run_plan(config)
        return None
    if needs_launch(config.trainer):
        return run_on_devices(config, folder)
    check_direction(config)
    if not words and HydraConfig.get().job.config_name == "train":
        log.info("no arguments: training the default model on the King James text; train.py --help shows the options")
    result = run_training(config, folder, command())
    log.info("%s", summary_line(result, folder))
    return value_of(result, config.optimized_metric)


def ends_sweep(error: Exception) -> bool:
    """Return whether the error of a job ends the program: in a single run, after a signal, and for a name that no job has."""
    from minitx.config.unknown_keys import UnknownKeyError  # only errors need it

    is_single = HydraConfig.get().mode == RunMode.RUN or FOLDER in os.environ
    is_of_all_jobs = isinstance(error, UnknownKeyError) and error.key.partition(".")[0] not in FIRST_NAMES
    return is_single or is_of_all_jobs or isinstance(error, StoppedError)


def is_diverged(error: Exception) -> bool:
    """Return whether the run of a search diverged. Its value is then ``worst_value()``."""
    from minitx.training.nonfinite import NonFiniteError  # imports torch

    return math.isinf(worst_value()) and isinstance(error, NonFiniteError)


def speak_on_the_first_rank() -> None:
    """Log to stdout on rank 0 only. Each process also writes its own log in the folder of the run."""
    handler = logging.StreamHandler(sys.stdout)
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # with a closed pipe, the default prints a traceback per line
    handler.setLevel(logging.CRITICAL if rank() else logging.NOTSET)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])


def hydra_folder() -> Path | None:
    """Return the folder that Hydra created for this job, from ``hydra.run.dir`` or a sweep, or None."""
    job = HydraConfig.get()
    return Path(job.runtime.output_dir) if job.mode == RunMode.MULTIRUN or job.run.dir != "." else None


def remove_hydra_folder() -> None:
    """Remove the folder that Hydra created for this job, if it is empty."""
    if (folder := hydra_folder()) is not None:
        with suppress(OSError):
            folder.rmdir()


def command_words() -> list[str]:
    """Return the command line of this job alone (not of the whole sweep), with unresolved interpolations."""
    typed: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    sources = HydraConfig.get().runtime.config_sources
    return [*(f"{CONFIG_DIR}{source.path}" for source in sources if source.provider == "command-line"), *typed]


def command() -> str:
    """Return a command that repeats this job, with the name of the program as typed."""
    called = {"train.py": ["python", sys.argv[0]], "minitx-train": ["minitx-train"]}.get(Path(sys.argv[0]).name)
    primary = HydraConfig.get().job.config_name
    config_name = [] if primary == "train" else [f"--config-name={primary}"]
    return shlex.join([*(called or ["python", "scripts/train.py"]), *config_name, *command_words()])


def run_plan(config: RunConfig) -> None:
    """Print the memory plan of a run. No folder is created.

    Raises:
        ConfigError: the run is part of a sweep, or cannot be built.
    """
    from minitx.training.memory_plan import show_plan

    require(HydraConfig.get().mode == RunMode.RUN, "trainer.plan=true is for single runs: remove -m")
    show_plan(config)
    remove_hydra_folder()


def run_on_devices(config: RunConfig, folder: Path) -> float:
    """Start the processes of a run on several devices, wait for them, and return the value of the run."""
    from minitx.training.devices import check_count
    from minitx.training.resume_checks import check_free

    import_modules(config.imports)  # one of them may register the accelerator
    check_count(config.trainer)
    check_free(folder, config.ckpt_path)  # sooner than in the processes, which check it, too
    launch([f"--config-name={HydraConfig.get().job.config_name}", *command_words()], config.trainer.world_size, folder)
    return value_of(json.loads((folder / "result.json").read_text(encoding="utf-8")), config.optimized_metric)


def direction() -> str | None:
    """Return ``minimize`` or ``maximize`` if this job belongs to a search that states a direction (Optuna's), else None."""
    job: Any = HydraConfig.get()
    stated = OmegaConf.select(job, "sweeper.direction") if job.mode == RunMode.MULTIRUN else None
    return getattr(stated, "name", stated) if isinstance(getattr(stated, "name", stated), str) else None


def check_direction(config: RunConfig) -> None:
    """Raise a ConfigError if a search would minimize an accuracy, maximize a loss, or contradict ``trainer.monitor_mode``."""
    metric, trainer = config.optimized_metric, config.trainer
    better = {"accuracy": "maximize", "loss": "minimize"}.get(metric.rpartition("_")[2])
    if metric == trainer.monitor:
        better = "maximize" if trainer.monitor_mode == "max" else "minimize"
    require(
        direction() in (None, better) or better is None,
        f"hydra.sweeper.direction={direction()} would {direction()} {metric}: set hydra.sweeper.direction={better}",
    )


def worst_value() -> float:
    """Return the value of a run that diverged, for a search: infinity in the wrong direction, or NaN without a direction."""
    return {"minimize": math.inf, "maximize": -math.inf}.get(direction() or "", math.nan)


def value_of(result: Mapping[str, Any], metric: str = "val_loss") -> float:
    """Return the last value of ``metric``, for a sweeper, or ``worst_value()`` if the value or the run was not finite.

    Raises:
        ConfigError: the run did not log this metric.
    """
    metrics = result["metrics"]
    if metric not in metrics and metric != "val_loss" and result["nonfinite_step"] is None:
        raise ConfigError(f"optimized_metric={metric} is not logged; logged are: {', '.join(metrics)}")
    return worst_value() if metrics.get(metric) is None else float(metrics[metric])


def summary_line(result: Mapping[str, Any], folder: Path) -> str:
    """Return the result of a run in a line, followed by its folder."""
    step = result["nonfinite_step"]
    place = "in the validation after" if result["nonfinite_phase"] == "validation" else "at"
    values = [f"{result['steps']} steps" if step is None else f"not finite {place} step {step}"]
    for name in ("val_loss", "val_accuracy"):
        if result[name] is not None:
            values.append(f"{name.replace('val_', 'validation ')} {result[name]:.4f}")
    for name, floor in result["floors"].items():
        values.append(f"{name} floor {floor:.4f}")
    return "  ".join(values) + f"\n{folder}"


def output_folder(config: RunConfig, composed: DictConfig, grid: AblationConfig | None) -> Path:
    """Return ``output_dir``, else Hydra's folder if ``hydra.run.dir`` or a sweep sets one, else ``runs/<experiment>/<date_time>``.

    The default of a grid is ``runs/<experiment>/<grid>``, so that it can resume. With torchrun or srun, the default is
    ``runs/<experiment>/<name of the job>``, because all processes know this name.

    Raises:
        ConfigError: ``ckpt_path=last`` without a folder, a sweep with one folder for all jobs, or a job of torchrun without a
            name.
    """
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    job = HydraConfig.get()
    sweeps = job.mode == RunMode.MULTIRUN
    if sweeps and config.output_dir and not OmegaConf.is_interpolation(composed, "output_dir"):
        raise ConfigError(f"output_dir={config.output_dir} is the same folder for all jobs of -m: set hydra.sweep.dir instead")
    if grid is not None:
        return Path(config.output_dir or Path("runs", config.experiment, grid.name)).absolute()
    folder = config.output_dir or hydra_folder()
    require(
        config.ckpt_path != "last" or folder is not None,
        "ckpt_path=last needs the folder of the run to resume: set output_dir=FOLDER",
    )
    if not started_from_outside():
        return Path(folder or default_folder(config.experiment)).absolute()
    require(not sweeps, "a sweep (-m) starts the processes of its runs itself: call it without torchrun or srun")
    return Path(folder or Path("runs", config.experiment, job_name())).absolute()


def default_folder(experiment: str) -> Path:
    """Return ``runs/<experiment>/<date_time>``, with ``_2`` or more appended if this folder exists."""
    folder_of_second = Path("runs", experiment, time.strftime("%Y-%m-%d_%H-%M-%S"))
    numbered = (folder_of_second.with_name(f"{folder_of_second.name}_{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([folder_of_second], numbered) if not os.path.lexists(folder))
