"""``train.py``: one training run, or (``experiment=scaling_ablation``) a grid of them."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from minitx.cli.claim import claimed
from minitx.cli.compose import build_config
from minitx.cli.errors import exit_code, take_traceback
from minitx.cli.launch import FOLDER, launch, needs_launch, rank, shared_folder, started_from_outside
from minitx.cli.overrides import check_arguments
from minitx.cli.redaction import redact_overrides, refuse_secrets
from minitx.cli.run import run_training, summary_line
from minitx.cli.targets import check_names, check_targets, guarded
from minitx.config import CONFIG_DIR, ConfigError, RunConfig

CONFIGS = "pkg://minitx.configs"
log = logging.getLogger("minitx")


def main() -> int:
    """The program behind ``scripts/train.py`` and ``minitx-train``; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if rank():  # the first process speaks; each has a log of its own in the run's folder
        for handler in logging.getLogger().handlers:
            handler.setLevel(logging.CRITICAL)
    sys.argv[1:] = take_traceback(sys.argv[1:])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing and exiting; the translation is ours
    decorate = hydra.main(version_base="1.3", config_path=CONFIGS, config_name="train")

    def compose_and_run(job: Callable[[Any], None]) -> None:
        check_arguments(sys.argv[1:])
        guarded(decorate(job))()

    return exit_code(compose_and_run, _main)


def _main(composed: DictConfig) -> None:
    config = build_config(composed)
    check_targets(config.logger, "logger")
    check_targets(config.callbacks.extra, "callbacks.extra")
    check_names(config)
    overrides = list(HydraConfig.get().overrides.task)
    refuse_secrets(config, overrides)
    overrides = redact_overrides(overrides)
    words = [*_own_folders(), *overrides]
    primary = HydraConfig.get().job.config_name
    named = [] if primary == "train" else [f"--config-name={primary}"]
    command = shlex.join(["python", "scripts/train.py", *named, *words])
    here = config.ablation is not None or not needs_launch(config.trainer)
    folder = output_folder(config)
    with claimed(folder):
        if not here:
            from minitx.training.hardware import check_count

            check_count(config.trainer)
            launch(_arguments_of_this_job(), config.trainer.world_size, folder)
        elif config.ablation is not None:
            from minitx.cli.ablate import run_ablation

            run_ablation(config, folder, words, command)
        else:
            log.info("%s", summary_line(run_training(config, folder, command), folder))


def _arguments_of_this_job() -> list[str]:
    """The command line of this job alone, for a process of its own: in a sweep without the others."""
    job = HydraConfig.get()
    return [*_own_folders(), f"--config-name={job.job.config_name}", *job.overrides.task]


def _own_folders() -> list[str]:
    """``--config-dir=FOLDER`` of this command line, if it was given."""
    sources = HydraConfig.get().runtime.config_sources
    return [f"{CONFIG_DIR}{source.path}" for source in sources if source.provider == "command-line"]


def output_folder(config: RunConfig) -> Path:
    """``output_dir``, else ``runs/<experiment>/<date_time>`` (a grid: ``runs/<experiment>/<grid>``, so that it resumes).

    Raises:
        ConfigError: the folder holds a run already and ``ckpt_path`` does not continue it, or holds none and should.
    """
    if config.ablation is not None:
        return Path(config.output_dir or Path("runs", config.experiment, config.ablation.name)).absolute()
    if FOLDER in os.environ:
        return Path(os.environ[FOLDER])
    if config.ckpt_path == "last" and config.output_dir is None:
        raise ConfigError(
            "ckpt_path=last is the newest checkpoint in output_dir=null: say which run goes on, output_dir=FOLDER"
        )
    folder = Path(config.output_dir or _default_folder(config.experiment)).absolute()
    if started_from_outside():
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            raise ConfigError("a sweep (-m) starts the processes of each of its runs: call it without torchrun and srun")
        folder = shared_folder(folder)
        if rank():
            return folder
    try:
        is_file, is_run = folder.exists() and not folder.is_dir(), (folder / "metrics.csv").exists()
    except OSError as error:
        raise ConfigError(f"output_dir={folder} cannot be written: {error.strerror}") from None
    if is_file:
        raise ConfigError(f"output_dir={folder} is a file")
    if is_run and config.ckpt_path is None:
        raise ConfigError(f"output_dir={folder} holds a run already; continue it with ckpt_path=last, or choose another folder")
    return folder


def _default_folder(experiment: str) -> Path:
    """``runs/<experiment>/<date_time>``, with ``_2`` where that second has a run; in a sweep (``-m``) the job's number in its folder."""
    if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
        return Path(HydraConfig.get().sweep.dir, str(HydraConfig.get().job.num))
    second = Path("runs", experiment, time.strftime("%Y-%m-%d_%H-%M-%S"))
    numbered = (second.with_name(f"{second.name}_{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([second], numbered) if not os.path.lexists(folder))
