"""Checks before a run resumes from a checkpoint: its folder, its config and its data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minitx.config import ConfigError, Part, TransformerConfig
from minitx.config.part import defaults, differing_keys
from minitx.config.training import MODEL
from minitx.data.tokenizer import Tokenizer, fingerprint
from minitx.training.checkpoint_files import read_checkpoint

log = logging.getLogger(__name__)


def check_free(folder: Path, ckpt_path: str | None) -> None:
    """Check that a run does not overwrite another run. ``metrics.csv`` appears only when all processes of a run have checked this.

    Raises:
        ConfigError: the folder contains a run, and ``ckpt_path`` is neither ``last`` nor a file in it.
    """
    if ckpt_path == "last" or not (folder / "metrics.csv").exists():
        return
    if ckpt_path is None or not _is_in(folder, ckpt_path):
        other = "" if ckpt_path is None else f", and ckpt_path={ckpt_path} is not a checkpoint of that run"
        raise ConfigError(
            f"output_dir={folder} already contains a run{other}: resume it with ckpt_path=last, or choose another folder"
        )


def _is_in(folder: Path, path: str) -> bool:
    """Whether a path is in the folder of a run. ``checkpoints`` or a file in it may be a link to another disk."""
    homes, places = (folder, folder / "checkpoints"), (Path(path), Path(path).parent)
    return any(place.resolve().is_relative_to(home.resolve()) for home in homes for place in places)


def check_resumed(path: str | None, parts: Mapping[str, Part], state: Mapping[str, Any]) -> int:
    """Return the step at which the checkpoint ``path`` resumes, or 0 if it is None. Code in the checkpoint is not executed.

    Args:
        path: the checkpoint, ``ckpt_path`` of the config.
        parts: the parts ``data``, ``objective``, ``optimizer`` and ``schedule`` of the run.
        state: the plain data that the run stores (``stored_state``).

    Raises:
        ConfigError: the file does not exist, is not a checkpoint of minitx, is beyond ``trainer.max_steps``, or was written
            with another model, optimizer, schedule, tokenizer, number of steps (``check_length``), or on other data. The message
            names the differences.
    """
    if path is None:
        return 0
    checkpoint = read_checkpoint(path)
    named = f"ckpt_path={path}"
    stored = checkpoint["minitx"]
    saved, current = stored["config"], state["config"]
    model_defaults = defaults(TransformerConfig) if stored["model"]["_target_"] == MODEL else {}
    changes = {name: part.differences(saved[name]) for name, part in parts.items()}
    changes["model"] = differing_keys({**model_defaults, **stored["model"]}, state["model"], "model")
    if changes["model"]:
        raise ConfigError(f"{named} contains another model than the config: {'; '.join(changes['model'])}")
    _check_updates(named, changes)
    if not all("lr_lambdas" in entry for entry in checkpoint["lr_schedulers"]):  # a LambdaLR stores no number of steps
        check_length(parts["schedule"], saved["trainer"], current["trainer"], named)
    _check_tokenizer(named, stored["tokenizer"], state["tokenizer"])
    for name in ("data_checksum", "labels"):
        if stored.get(name) and state[name] and stored[name] != state[name]:
            raise ConfigError(
                f"{named} was trained on other data: {'; '.join(changes['data']) or 'rows or labels have changed'}. "
                "Resume with the old data, or start a new run from the weights with init_from.path"
            )
    of_rows = [f"seed {saved['seed']} != {current['seed']}"] if saved["seed"] != current["seed"] else []
    of_rows += changes["data"]
    other_rows = "another seed or other data, so rows may be repeated or skipped"
    _warn(named, other_rows, of_rows, ("data.cache_dir ", "data.num_workers "))
    other_losses = "another objective, so its losses cannot be compared with those before"
    _warn(named, other_losses, changes["objective"], ("objective.chunk_tokens ", "objective.count_correct "))
    step = int(checkpoint["global_step"])
    max_steps = current["trainer"]["max_steps"]
    if max_steps is not None and step > max_steps:
        raise ConfigError(f"{named} is at step {step}, beyond trainer.max_steps={max_steps}")
    return step


def _check_updates(named: str, changes: Mapping[str, Sequence[str]]) -> None:
    """Refuse another optimizer or schedule, because the state in the checkpoint would override the config."""
    for name in ("optimizer", "schedule"):
        if changes[name]:
            raise ConfigError(
                f"{named} was trained with another {name}: {'; '.join(changes[name])}. "
                "Resume with the old values, or start a new run from the weights with init_from.path"
            )


def check_length(schedule: Part, saved: Mapping[str, Any], current: Mapping[str, Any], named: str) -> None:
    """Refuse to resume with another number of steps if the state of the schedule may depend on the old number.

    Args:
        saved, current: the options of the trainer in the checkpoint ``named``, and in the run.

    Raises:
        ConfigError: ``trainer.max_steps`` or ``max_epochs`` has changed, and the schedule is built with the number of steps.
    """
    takes_steps = "max_steps" in schedule.names - {*schedule.arguments}
    for name in ("max_steps", "max_epochs") if takes_steps else ():
        if saved[name] != current[name]:
            raise ConfigError(
                f"{named} was trained with a schedule for trainer.{name}={saved[name]}. "
                "Resume with the old value, or start a new run from the weights with init_from.path"
            )


def _check_tokenizer(named: str, saved: dict[str, Any] | None, current: dict[str, Any] | None) -> None:
    """Refuse another tokenizer, because ids may have other meanings, even if the size is the same."""
    fingerprints = {fingerprint(Tokenizer.from_dict(entry)) for entry in (saved, current) if entry}
    if len(fingerprints) > 1:
        raise ConfigError(
            f"{named} was trained with another tokenizer. Resume with the old data, "
            "or start a new run from the weights and their tokenizer with init_from.path"
        )


def _warn(named: str, difference: str, changes: Sequence[str], without: tuple[str, ...]) -> None:
    """Log the changes, except changes that begin with one of ``without``: these are harmless."""
    counted = [change for change in changes if not change.startswith(without)]
    if counted:
        log.warning("%s resumes with %s: %s", named, difference, "; ".join(counted))
