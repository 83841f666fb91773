"""Checkpoints. Writing never loses the previous one. Reading rejects damaged files and never executes code.

A checkpoint is torch's zip file. It is written under another name, synced to the disk and then renamed, so that ``last.ckpt`` is
always complete: the old one or the new one. A zip file holds a CRC-32 of each record. torch does not check it; ``read_checkpoint``
does.

A checkpoint contains the model, its tokenizer and its config. ``load_model`` reads them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.serialization import config as serialization

from minitx.config import ConfigError, InitFrom, Part, RunConfig, TransformerConfig, is_node, to_dict
from minitx.config.part import GIVEN, differences, import_modules
from minitx.config.schema import defaults, first_line, read, require
from minitx.config.training import MODEL, Data, Model
from minitx.config.training import Objective as ObjectivePart
from minitx.data import tokenizers
from minitx.data.lightning_data import load_task
from minitx.data.task import Task
from minitx.data.tokenizers import Tokenizer, load_tokenizer
from minitx.nn.scale import fold_scale, set_scale
from minitx.training import rank
from minitx.training.devices import device_of
from minitx.training.net import Net, decided_fields, network_of
from minitx.training.objectives import Objective, build_objective
from minitx.training.trust import check_trusted

log = logging.getLogger(__name__)

Network = TypeVar("Network", bound=nn.Module)


# --- writing and reading

FORMAT = 1
"""The format that this version writes. It reads this and all earlier formats."""

_PART = ".part"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. The previous one is intact."""


def write_checkpoint(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint`` to ``path``. Until it is complete, ``path`` holds the previous one.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    part = Path(f"{path}{_PART}")
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file, serialization.patch({"save.compute_crc32": True}):  # type: ignore[attr-defined]
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync(part.parent)  # the name, too, must reach the disk
    except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of a write that failed
        cause = next((e for e in (error, error.__cause__, error.__context__) if isinstance(e, OSError)), None)
        reason = cause.strerror if cause is not None else first_line(error)
        part.unlink(missing_ok=True)
        kept = "; an earlier one is intact" if Path(path).exists() else ""
        raise CheckpointError(f"checkpoint {path} could not be written: {reason}{kept}") from error


def clean_up(folder: Path) -> None:
    """Remove the incomplete files of a killed run from its folder of checkpoints."""
    for part in folder.glob(f"*{_PART}"):
        part.unlink()


def read_checkpoint(path: str | Path, *, key: str = "ckpt_path", verb: str = "go on from") -> dict[str, Any]:
    """Read the content of a checkpoint to the CPU. Nothing in it is executed.

    Args:
        key, verb: for the message: the key that names the checkpoint, and the caller's purpose.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint of minitx, is damaged, or is from a newer version. The message
            also names the newest intact checkpoint in the folder.
    """
    path = Path(path)
    if os.path.isdir(path):
        offer = _offer(path / "x.ckpt", key, verb) or _offer(path / "checkpoints" / "x.ckpt", key, verb)
        raise ConfigError(f"{key}={path} is a folder{offer.replace(' beside it', ' in it') or ' without a checkpoint'}")
    if not os.path.isfile(path):  # also False for a name that is too long
        raise ConfigError(f"{key}={path} is not a file that exists{_offer(path, key, verb)}")
    try:
        return _read(path)
    except Exception as error:  # torch raises many kinds for a damaged or foreign file
        raise ConfigError(
            f"{key}={path} cannot be read as a checkpoint of minitx: {first_line(error)}{_offer(path, key, verb)}"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        _check_records(file)
        try:  # the open file, not ``path``: a run may have put another file there meanwhile
            found = torch.load(f"/dev/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many kinds
            reason = first_line(error).partition(". ")[0]
            raise ConfigError(f"another program wrote it, or it is damaged ({reason})") from None
    state = found.get("minitx") if isinstance(found, Mapping) else None
    if not isinstance(state, Mapping) or not isinstance(written := state.get("format"), int):
        raise ConfigError("another program wrote it: it has no minitx.format")
    require(written <= FORMAT, f"a newer minitx wrote it (format {written}, this one reads up to {FORMAT}): update minitx")
    require(is_node(state.get("model")), "an unreleased minitx before 0.1 wrote it, which this one does not read: train again")
    return dict(found)


def _check_records(file: BinaryIO) -> None:
    """Compare each record of a zip file with its CRC-32, one MB at a time.

    Raises:
        ConfigError: a record differs, or the file is not a whole zip file.
    """
    start = file.read(4)
    require(bool(start), "it is empty")
    try:
        with zipfile.ZipFile(file) as records:
            # torch skips a record that is marked as a folder, and returns uninitialised memory
            folders = [record.filename for record in records.infolist() if record.external_attr & 0x10]
            damaged = records.testzip()
    except Exception:  # a damaged directory raises many kinds
        is_zip = b"PK\3\4".startswith(start)
        raise ConfigError(
            "it is cut short or damaged" if is_zip else "another program wrote it: it is not a zip file"
        ) from None
    require(not folders, f"it is damaged: record {' '.join(folders[:1])} is marked as a folder")
    require(damaged is None, f"it is damaged: record {damaged!r} does not match its CRC-32")


def _offer(path: Path, key: str, verb: str) -> str:
    """Return advice for a bad ``path``: the newest whole checkpoint in its folder, if there is one."""
    files = filter(Path.is_file, path.parent.glob("*.ckpt"))
    for found in sorted(files, key=lambda p: p.stat().st_mtime, reverse=True):
        with suppress(Exception):  # of a damaged or foreign file
            _read(found)
            return f"; {verb} the newest whole one beside it with {key}={found}"
    return ""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def stored_state(config: RunConfig, task: Task, net: Net) -> dict[str, Any]:
    """Return the plain data about a run that every checkpoint holds: its config, its model, its tokenizer and the names of its labels."""
    tokenizer = task.tokenizer
    return {
        "config": to_dict(config),
        "model": net.node(config.model, decided_fields(task)),
        "tokenizer": tokenizer.to_dict() if isinstance(tokenizer, Tokenizer) else None,
        "labels": list(task.label_names),
        "format": FORMAT,
    }


def network_weights(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of the network in a checkpoint's content, by their names in the network."""
    prefix, state = "network.", checkpoint["state_dict"].items()
    return {name.removeprefix(prefix): weight for name, weight in state if name.startswith(prefix)}


def load_weights(network: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load every weight of ``network``.

    Raises:
        RuntimeError: a tensor is missing, unexpected or of another shape. ValueError: the network shares a tensor between two names
            that have different values in ``weights``, so one would be lost.
    """
    network.load_state_dict(weights)
    first: dict[int, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name not in weights:  # extra state, and names that the network translates
            continue
        other, kind = first.setdefault(id(tensor), name), tensor.dtype
        if other != name and not torch.allclose(weights[other].to(kind), weights[name].to(kind), 0, 0, equal_nan=True):
            raise ValueError(f"{other} and {name} are one tensor of the model, and two different ones among the weights")


def check_free(folder: Path, ckpt_path: str | None) -> None:
    """Check, in the first process, that a run replaces no other.

    Raises:
        ConfigError: the folder holds a run, and ``ckpt_path`` is not a file in it.
    """
    if rank() or not (folder / "metrics.csv").exists():
        return
    if ckpt_path is None or (ckpt_path != "last" and not _is_in(folder, ckpt_path)):
        other = "" if ckpt_path is None else f", which ckpt_path={ckpt_path} does not belong to"
        raise ConfigError(
            f"output_dir={folder} holds a run already{other}; continue it with ckpt_path=last, or choose another folder"
        )


def _is_in(folder: Path, path: str) -> bool:
    """Whether a path leads into the folder of a run. ``checkpoints`` or a file there may be a link to another disk."""
    homes, places = (folder, folder / "checkpoints"), (Path(path), Path(path).parent)
    return any(place.resolve().is_relative_to(home.resolve()) for home in homes for place in places)


# --- starting from stored weights

Start = tuple[dict[str, Any], dict[str, Any] | None, Tokenizer | None]


def load_start(init_from: InitFrom) -> Start:
    """Load (weights by name, the model's config as plain data, tokenizer) from a checkpoint, a folder or a name on the hub.

    The config is None for other people's models. The latest result is cached, because a run needs it twice.

    Raises:
        ConfigError: nothing can be read there. The message names ``init_from.path``.
    """
    return _load_start(str(init_from.path), json.dumps(to_dict(init_from.overrides)), init_from.ignore)


@lru_cache(maxsize=1)
def _load_start(path: str, overrides: str, ignore: tuple[str, ...]) -> Start:
    from minitx.interop.files import find_folder

    place = Path(os.path.expanduser(path))
    if not place.exists():
        try:
            place = find_folder(path)
        except (ImportError, FileNotFoundError) as error:
            raise ConfigError(f"init_from.path={path} cannot be loaded: {error}") from None
    if (place / "config.json").is_file():
        return _of_folder(place, path, json.loads(overrides), ignore)
    require(not place.is_dir(), f"init_from.path={path} is a folder without config.json")
    require(
        not (json.loads(overrides) or ignore),
        f"init_from.overrides and init_from.ignore belong to a Hugging Face folder, not to {path}",
    )
    checkpoint = read_checkpoint(place, key="init_from.path", verb="start from")
    state = checkpoint["minitx"]
    model = dict(state["model"])
    shape = model if model.pop("_target_") == MODEL else None
    return network_weights(checkpoint), shape, tokenizers.from_dict(state["tokenizer"]) if state["tokenizer"] else None


def _of_folder(folder: Path, path: str, overrides: dict[str, Any], ignore: tuple[str, ...]) -> Start:
    from minitx.interop import from_pretrained, load_hf
    from minitx.interop.files import read_json

    try:
        ours = read_json(folder / "config.json").get("format") == "minitx"
        require(not (ours and (overrides or ignore)), "init_from.overrides and init_from.ignore are for a Hugging Face folder")
        model = from_pretrained(folder) if ours else load_hf(folder, overrides=overrides, ignore=ignore)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"init_from.path={path} cannot be loaded: {error}") from error
    tokenizer = load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None
    return dict(model.state_dict()), to_dict(model.config), tokenizer


def tokenizer_of(init_from: InitFrom, data: Part) -> Tokenizer | None:
    """Return the tokenizer of the weights to start from. It is None without ``init_from.path``, and where none is stored there.

    Raises:
        ConfigError: none is stored there, and ``data.tokenizer`` is a new one.
    """
    if init_from.path is None:
        return None
    tokenizer, asked = load_start(init_from)[2], data.get("tokenizer")
    if tokenizer is None and asked in ("char", "bpe"):
        raise ConfigError(
            f"data.tokenizer={asked} would be a new tokenizer, whose ids the weights of init_from.path={init_from.path} do "
            "not know, and none is stored with them: data.tokenizer must name the file or folder of theirs"
        )
    return tokenizer


def stored_shape(init_from: InitFrom, trust: bool = True) -> dict[str, Any]:
    """Return the fields of the model's config in a checkpoint or folder, or {} for other people's models.

    Raises:
        ConfigError: without ``trust``, they name a class that a checkpoint may not name.
    """
    shape = dict(load_start(init_from)[1] or {})
    if not trust:
        check_trusted({"_target_": MODEL, **shape}, "model")
    return shape


def check_scale_of(init_from: InitFrom, model: TransformerConfig) -> None:
    """Raise a ConfigError if the score scale differs from the weights' and is not folded. Log that ``model.init_fold`` has no effect.

    Raises:
        ConfigError: ``scale`` or ``scale_factor`` differs.
    """
    stored, path = stored_shape(init_from), init_from.path
    for name in ("scale", "scale_factor"):
        if not init_from.fold_scale and stored and stored.get(name, getattr(model, name)) != getattr(model, name):
            raise ConfigError(
                f"model.{name}={getattr(model, name)} differs from {stored[name]}, with which the weights of init_from.path={path} "
                "were trained: another scale is another function, unless init_from.fold_scale=true"
            )
    if model.init_fold is not None:
        log.info("model.init_fold=%s is ignored: the weights come from init_from.path=%s", model.init_fold, path)


def start_from(init_from: InitFrom, network: Network) -> Network:
    """Load the weights of ``init_from.path``, if it is set, into ``network``, and return it. With ``fold_scale``, fold a different score scale into them.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape (torch's message names it), or the scale differs and is
            not or cannot be folded.
    """
    if init_from.path is None:
        return network
    wanted = Net.of(network).config
    if wanted is not None:
        check_scale_of(init_from, wanted)
    try:
        weights, shape, _ = load_start(init_from)
        load_weights(network, weights)
        if init_from.fold_scale and shape is not None and wanted is not None:
            set_scale(network, shape["scale"], factor=shape["scale_factor"])  # the scale of the weights, then the wanted scale
            fold_scale(network, wanted.scale, factor=wanted.scale_factor)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"init_from.path={init_from.path} does not fit the model: {first_line(error)}") from error
    finally:
        _load_start.cache_clear()  # the weights are not kept twice
    return network


def check_resumed(config: RunConfig, state: Mapping[str, Any]) -> int:
    """Return the step at which ``ckpt_path`` resumes, or 0 without it. Nothing in the checkpoint is executed.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint of minitx, is beyond ``trainer.max_steps``, or is of another
            model, optimizer or schedule, or of another number of steps (``check_length``). The message names what differs.
    """
    if config.ckpt_path is None:
        return 0
    checkpoint, named = read_checkpoint(config.ckpt_path), f"ckpt_path={config.ckpt_path}"
    stored = checkpoint["minitx"]
    saved, wanted = stored["config"], state["config"]
    usual = defaults(TransformerConfig) if stored["model"]["_target_"] == MODEL else {}
    other = "; ".join(differences({**usual, **stored["model"]}, state["model"], "model"))
    require(not other, f"{named} holds another model than the config asks for: {other}")
    for name, part in {"optimizer": config.optimizer, "schedule": config.schedule}.items():
        changed = "; ".join(part.differences(saved[name]))  # its state in the checkpoint would win over the config
        require(
            not changed,
            f"{named} goes on with its own {name}, and the config asks for another: {changed}"
            ". Leave it as it was, or start a new run from the weights with init_from.path",
        )
    lambdas = ["lr_lambdas" in each for each in checkpoint["lr_schedulers"]]
    if not all(lambdas):  # the state of a LambdaLR has no number of steps
        check_length(config, saved["trainer"])
    known = [tokenizers.from_dict(each["tokenizer"]) for each in (stored, state) if each["tokenizer"]]
    if len({*map(tokenizers.fingerprint, known)}) > 1:  # as many ids may stand for other text
        raise ConfigError(
            f"{named} was trained with another tokenizer than the data have now. Go on with the data of the run, "
            "or start a new run from the weights with init_from.path, which brings the tokenizer"
        )
    others = [f"seed {saved['seed']} != {wanted['seed']}"] if saved["seed"] != wanted["seed"] else []
    changes = config.data.differences(saved["data"])
    others += [change for change in changes if not change.startswith(("data.cache_dir ", "data.num_workers "))]
    if others:
        said = "%s goes on with another seed or other data, so rows may come twice or not at all: %s"
        log.warning(said, named, "; ".join(others))
    step, most = int(checkpoint["global_step"]), config.trainer.max_steps
    require(most is None or step <= most, f"{named} is of step {step}, after trainer.max_steps={most}")
    return step


def check_length(config: RunConfig, saved: Mapping[str, Any]) -> None:
    """Refuse to resume with another number of steps if the schedule's state in the checkpoint may contain the old number.

    Raises:
        ConfigError: ``trainer.max_steps`` or ``max_epochs`` is another, and the target of the schedule gets the number of steps.
    """
    takes_steps = "max_steps" in config.schedule.names - {*config.schedule.arguments}
    for name in ("max_steps", "max_epochs") if takes_steps else ():
        said = f"ckpt_path={config.ckpt_path} goes on with its own schedule, which is that of trainer.{name}={saved[name]}"
        advice = "leave it as it was, or start a new run from the weights with init_from.path"
        require(saved[name] == getattr(config.trainer, name), f"{said}: {advice}")


# --- building the contents of a checkpoint again


HINTS: dict[str, Any] = {"model": Model, "data": Data, "objective": ObjectivePart}
"""The parts of a stored config that can be built again."""


@dataclasses.dataclass
class Stored:
    """A trained network, in evaluation mode on the CPU. The data and the objective of its training are built on demand.

    Attributes:
        state: the plain data that the run stored: ``config``, ``model`` and ``tokenizer``.
        nodes: the nodes of ``data`` and ``objective``, with changes.
        untrusted: those that come from the checkpoint. They may name only classes of torch and minitx.
    """

    path: str
    network: nn.Module
    tokenizer: Tokenizer | None
    state: dict[str, Any]
    nodes: dict[str, dict[str, Any]]
    untrusted: frozenset[str]
    _parts: dict[str, Part] = dataclasses.field(default_factory=dict)

    @property
    def net(self) -> Net:
        """The network, as training knows it."""
        return Net.of(self.network)

    def part(self, name: str) -> Part:
        """Return ``model``, ``data`` or ``objective``. Nothing is imported for it before it is trusted.

        Raises:
            ConfigError: it was given from Python, is not trusted, or does not exist.
        """
        if name in self._parts:
            return self._parts[name]
        node = self.nodes[name]
        if node.get("_target_") == GIVEN:
            raise ConfigError(
                f"ckpt_path={self.path} was trained with {name} given from Python, which no checkpoint holds: give evaluate.py "
                f"{name}._target_=MODULE.NAME (the viewer reads text=TEXT), or call evaluate() from Python"
            )
        if name in self.untrusted:
            check_trusted(node, name)
        self._parts[name] = read(HINTS[name], node, name)
        return self._parts[name]

    def task(self) -> Task:
        """Load the data of the run.

        Raises:
            ConfigError: the data do not exist, or no longer fit the model's vocabulary or its learned positions.
        """
        task, _ = load_task(self.part("data"), seed=self.state["config"]["seed"], tokenizer=self.tokenizer)
        net = self.net
        if net.vocab_size is not None and task.model_fields.get("vocab_size", 0) > net.vocab_size:
            raise ConfigError(f"ckpt_path={self.path} was trained on other data than {task.name} is now")
        if net.config is not None:
            net.config.check_length(task.longest or 0)
        return task

    def objective(self) -> Objective:
        """Build the objective of the run."""
        return build_objective(self.part("objective"))


def load_stored(
    path: str | Path,
    *,
    model: nn.Module | None = None,
    trust: bool = False,
    changes: Mapping[str, Any] | None = None,
    model_only: bool = False,
) -> Stored:
    """Read a checkpoint and build its model. Nothing in it is executed without ``trust``.

    Args:
        model: a network for the weights, instead of the network that the checkpoint names.
        trust: build any ``_target_`` of the checkpoint, and import its ``imports``. Otherwise only classes of ``torch.nn``,
            ``torch.optim`` and a list of minitx are allowed.
        changes: nodes that replace stored ones (``model``, ``data``, ``objective``), or keys of ``data``. They need no trust.
        model_only: check data and objective only when they are built.

    Raises:
        ConfigError: the file does not exist or is not a checkpoint of minitx, a target is not trusted, or the model cannot be
            built.
    """
    checkpoint = read_checkpoint(path, verb="read")
    state = checkpoint["minitx"]
    nodes, untrusted = {name: dict(state["config"][name]) for name in HINTS} | {"model": dict(state["model"])}, set()
    for name in HINTS:
        change, is_given = (changes or {}).get(name) or {}, nodes[name].get("_target_") == GIVEN
        if "_target_" in change or (is_given and change):
            nodes[name] = dict(change)
            continue
        if not trust and not is_given:
            untrusted.add(name)
            nodes[name].pop("cache_dir", None)  # a checkpoint does not say where files are written
        nodes[name].update(change)
    stored = Stored(str(path), nn.Identity(), None, state, nodes, frozenset(untrusted))
    for name in untrusted - ({"data", "objective"} if model_only else set()) - ({"model"} if model is not None else set()):
        check_trusted(nodes[name], name)
    import_modules(state["config"].get("imports", ()) if trust else ())
    try:
        stored.tokenizer = None if state["tokenizer"] is None else tokenizers.from_dict(state["tokenizer"])
        network = network_of(stored.part("model")) if model is None else model
        load_weights(network, network_weights(checkpoint))
    except ConfigError:
        raise
    except Exception as error:  # an unknown field, weights of other shapes, a tokenizer of another kind
        raise ConfigError(f"ckpt_path={path} holds a model that cannot be built: {first_line(error)}") from error
    stored.network = network.eval()
    return stored


def load_model(
    path: str | Path, model: nn.Module | None = None, trust: bool = False
) -> tuple[nn.Module, Tokenizer | None, dict[str, Any]]:
    """Load a checkpoint: the trained network in evaluation mode on the CPU, its tokenizer (or None), and the stored plain data.

    Args:
        model: a network for the weights. Default: the network that the checkpoint names.
        trust: whether to build any code that the checkpoint names.

    Raises:
        ConfigError: see ``load_stored``.
    """
    found = load_stored(path, model=model, trust=trust, model_only=True)
    return found.network, found.tokenizer, found.state


def place(model: Network, device: str) -> Network:
    """Move ``model`` to ``device``, a name of torch or ``auto``, the device that training takes (``device_of``).

    Raises:
        ConfigError: the name or the device does not exist.
    """
    try:
        return model.to(device_of() if device == "auto" else torch.device(device))
    except (RuntimeError, AssertionError, TypeError) as error:  # TypeError: float64 on Apple's GPU
        raise ConfigError(f"device={device} cannot be used: {first_line(error)}") from error
