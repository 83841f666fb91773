"""Checkpoints. Writing never loses the previous checkpoint. Reading rejects damaged files, and never executes code.

A checkpoint is a zip file of ``torch.save``. It is written under another name, synced to disk and then renamed, so that
``last.ckpt`` is always a complete checkpoint, the old or the new one. A zip file contains a CRC-32 of each record. torch does
not check it, but ``read_checkpoint`` does.

A checkpoint contains the model, its tokenizer and its config. ``load_model`` reads them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.serialization import config as serialization

from minitx.config import ConfigError, InitFrom, Part, TransformerConfig, is_node, to_dict
from minitx.config.part import FROM_PYTHON, differing_keys, find_target, import_modules
from minitx.config.schema import FailedRunError, defaults, first_line, read, require
from minitx.config.training import FOLDER_READER, MODEL, Data, Model
from minitx.config.training import Objective as ObjectivePart
from minitx.crash_safe import PART, replacing
from minitx.data import tokenizers
from minitx.data.lightning_data import load_task
from minitx.data.task import Task
from minitx.data.tokenizers import Tokenizer
from minitx.nn.changes import joined
from minitx.training.devices import device_of
from minitx.training.net import Net, network_of
from minitx.training.objectives import Objective, build_objective

log = logging.getLogger(__name__)

Network = TypeVar("Network", bound=nn.Module)


# --- writing and reading

FORMAT = 1
"""The format that this version writes. This version reads this format and all earlier ones."""


class CheckpointError(FailedRunError):
    """A checkpoint could not be written. The previous checkpoint is intact."""


def write_checkpoint(checkpoint: dict[str, Any], path: str | Path) -> None:
    """Write ``checkpoint`` to ``path``. Until it is complete, ``path`` is the previous checkpoint.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("wb") as file, serialization.patch({"save.compute_crc32": True}):  # type: ignore[attr-defined]
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        _sync(path.parent)  # the new name must be on disk, too
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError if writing fails
        cause = next((e for e in (error, error.__cause__, error.__context__) if isinstance(e, OSError)), None)
        reason = cause.strerror if cause is not None else first_line(error)
        note = "; the previous checkpoint is intact" if path.exists() else ""
        raise CheckpointError(f"checkpoint {path} could not be written: {reason}{note}") from error


def clean_up(folder: Path) -> None:
    """Remove incomplete files that a killed run left in its folder of checkpoints."""
    for part in folder.glob(f"*{PART}"):
        part.unlink()


def read_checkpoint(path: str | Path, *, key: str = "ckpt_path", verb: str = "resume from") -> dict[str, Any]:
    """Read the content of a checkpoint to the CPU, without executing code in it.

    Args:
        key, verb: for messages: the key that names the checkpoint, and the purpose of reading it.

    Raises:
        ConfigError: the file does not exist, is not a checkpoint of minitx, is damaged, or was written by a newer version. The
            message also names the newest intact checkpoint in the folder.
    """
    path = Path(path)
    if os.path.isdir(path):
        offer = _offer(path / "x.ckpt", key, verb) or _offer(path / "checkpoints" / "x.ckpt", key, verb)
        raise ConfigError(f"{key}={path} is a folder{offer.replace(' in this folder', ' in it') or ' without a checkpoint'}")
    if not os.path.isfile(path):  # False even for a name that is too long
        raise ConfigError(f"{key}={path} does not exist{_offer(path, key, verb)}")
    try:
        return _read(path)
    except Exception as error:  # damaged and foreign files raise many types of error
        raise ConfigError(
            f"{key}={path} cannot be read as a checkpoint of minitx: {first_line(error)}{_offer(path, key, verb)}"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        _check_records(file)
        try:  # load the open file, because a run may have replaced ``path`` in the meantime
            checkpoint = torch.load(f"/dev/fd/{file.fileno()}", map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many types of error
            reason = first_line(error).partition(". ")[0]
            raise ConfigError(f"it is damaged, or another program wrote it ({reason})") from None
    state = checkpoint.get("minitx") if isinstance(checkpoint, Mapping) else None
    if not isinstance(state, Mapping) or not isinstance(format := state.get("format"), int):
        raise ConfigError("another program wrote it: it has no minitx.format")
    require(format <= FORMAT, f"a newer minitx wrote it (format {format}, this version reads up to {FORMAT}): update minitx")
    require(
        is_node(state.get("model")), "a version of minitx before 0.1 wrote it, and its format is not supported: train again"
    )
    return dict(checkpoint)


def _check_records(file: BinaryIO) -> None:
    """Check the CRC-32 of each record of a zip file, without loading the whole file.

    Raises:
        ConfigError: a record does not match, or the file is not a complete zip file.
    """
    start = file.read(4)
    require(bool(start), "it is empty")
    try:
        with zipfile.ZipFile(file) as records:
            # torch does not read records that are marked as folders, and returns uninitialised memory for them
            folders = [record.filename for record in records.infolist() if record.external_attr & 0x10]
            damaged = records.testzip()
    except Exception:  # a damaged directory raises many types of error
        is_zip = b"PK\3\4".startswith(start)
        raise ConfigError("it is cut short or damaged" if is_zip else "another program wrote it, not as a zip file") from None
    require(not folders, f"it is damaged: record {' '.join(folders[:1])} is marked as a folder")
    require(damaged is None, f"it is damaged: record {damaged!r} does not match its CRC-32")


def _offer(path: Path, key: str, verb: str) -> str:
    """Return advice for a message about ``path``: the newest intact checkpoint in its folder, or an empty string."""
    files = filter(Path.is_file, path.parent.glob("*.ckpt"))
    for file in sorted(files, key=lambda p: p.stat().st_mtime, reverse=True):
        with suppress(Exception):  # damaged and foreign files are skipped
            _read(file)
            return f"; {verb} the newest intact checkpoint in this folder with {key}={file}"
    return ""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def stored_state(config: Mapping[str, Any], model: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Return the plain data that every checkpoint of a run contains: config, model, tokenizer and names of labels.

    Args:
        config: the config as plain data.
        model: the node of the model (``Net.node``).
        task: the data.
    """
    tokenizer = task.tokenizer
    return {
        "config": config,
        "model": model,
        "tokenizer": tokenizer.to_dict() if isinstance(tokenizer, Tokenizer) else None,
        "first_id": task.first_id,
        "labels": list(task.label_names),
        "format": FORMAT,
    }


def network_weights(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of the network in the content of a checkpoint, by their names in the network."""
    prefix = "network."
    return {name.removeprefix(prefix): weight for name, weight in checkpoint["state_dict"].items() if name.startswith(prefix)}


def load_weights(network: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load every weight of ``network``.

    Raises:
        RuntimeError: a tensor is missing, unexpected or of another shape.
        ValueError: two names share a tensor in the network, but have different values in ``weights``.
    """
    network.load_state_dict(weights)
    names: dict[int, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor) or name not in weights:  # extra state, and names that load_state_dict converts
            continue
        first = names.setdefault(id(tensor), name)
        kind = tensor.dtype
        if first != name and not torch.allclose(weights[first].to(kind), weights[name].to(kind), 0, 0, equal_nan=True):
            raise ValueError(f"{first} and {name} share a tensor in the model, but differ in the weights")


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


# --- starting from stored weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """What a run starts from: the content of ``init_from.path``.

    Attributes:
        path: the checkpoint, the folder or the name on the hub.
        fold_scale: allow another scale (``init_from.fold_scale``).
        weights: the weights by name.
        shape: the model's config as plain data; None if the model is not one of ours.
        tokenizer: the tokenizer that is stored with the weights, or None.
        labels: the names of the labels of a classifier, in the order of its head.
        changes: the differences between the model and its config (``Net.changes``).
    """

    path: str
    fold_scale: bool = False
    weights: dict[str, Any]
    shape: dict[str, Any] | None
    tokenizer: Tokenizer | None
    labels: Sequence[str] = ()
    changes: Sequence[str] = ()

    def tokenizer_for(self, data: Part) -> Tokenizer | None:
        """Return the tokenizer that is stored with the weights, or None.

        Raises:
            ConfigError: there is none, and ``data.tokenizer`` would train a new one.
        """
        kind = data.get("tokenizer")
        if self.tokenizer is None and kind in ("char", "bpe"):
            raise ConfigError(
                f"data.tokenizer={kind} would be a new tokenizer, but the weights of init_from.path={self.path} were trained "
                "with another one: data.tokenizer must name its file or folder, because it is not stored with the weights"
            )
        return self.tokenizer

    def load_into(self, network: nn.Module) -> None:
        """Load the weights into ``network``. With ``fold_scale``, a different scale is folded into them.

        Raises:
            ConfigError: a tensor is missing, unexpected or of another shape (torch's message names it); the scale differs and is
                not, or cannot be, folded; or the weights are of a model that differs from its config in other ways than ``network``.
        """
        net = Net.of(network)
        if self.changes and list(self.changes) != net.changes():
            raise ConfigError(
                f"init_from.path={self.path} contains a model that differs from its config: {joined(self.changes)}. The model of this run "
                "would be another function: build it as for the run that wrote the weights, and pass it to train(model=...)"
            )
        model = net.config
        if model is not None:
            self._check_scale(model)
        try:
            load_weights(network, self.weights)
            if self.fold_scale and self.shape is not None and model is not None:
                from minitx.nn.folding import fold_ours, set_scale

                set_scale(network, self.shape["scale"], factor=self.shape["scale_factor"])  # the scale of the weights
                fold_ours(network, model.scale, model.scale_factor)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"init_from.path={self.path} does not match the model: {first_line(error)}") from error

    def _check_scale(self, model: TransformerConfig) -> None:
        """Check the scale of the model, and log that ``model.init_fold`` has no effect."""
        shape = {} if self.shape is None or self.fold_scale else self.shape
        for name in ("scale", "scale_factor"):
            value = getattr(model, name)
            stored = shape.get(name, value)
            if stored != value:
                raise ConfigError(
                    f"model.{name}={value} differs from {stored}, the value of the weights of init_from.path={self.path}, "
                    "and would change the function: use that value, or set init_from.fold_scale=true"
                )
        if model.init_fold is not None:
            log.info("model.init_fold=%s is ignored: the weights come from init_from.path=%s", model.init_fold, self.path)


def load_start(init_from: InitFrom) -> Start | None:
    """Load the weights of ``init_from.path``: a checkpoint, a folder or a name on the hub. Return None if no path is set.

    Raises:
        ConfigError: the weights cannot be loaded. The message names ``init_from.path``.
    """
    if init_from.path is None:
        return None
    path = init_from.path
    overrides = to_dict(init_from.overrides)
    if not os.path.isfile(os.path.expanduser(path)):
        read_folder = find_target(FOLDER_READER, "init_from")  # by name: the core does not import Hugging Face's formats
        try:
            content = read_folder(path, overrides, init_from.ignore)
        except (ImportError, OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"init_from.path={path} cannot be loaded: {error}") from error
        if content is not None:
            parts = dict(zip(("weights", "shape", "tokenizer", "labels"), content, strict=True))
            return Start(path=path, fold_scale=init_from.fold_scale, **parts)
    if overrides or init_from.ignore:
        raise ConfigError(
            f"init_from.overrides and init_from.ignore are only for a Hugging Face folder, but init_from.path={path} is not one"
        )
    checkpoint = read_checkpoint(os.path.expanduser(path), key="init_from.path", verb="start from")
    state = checkpoint["minitx"]
    model = dict(state["model"])
    target = model.pop("_target_")
    # a user's function may take a TransformerConfig too
    takes_our_keys = target != FROM_PYTHON and {"scale", "scale_factor"} <= model.keys()
    shape = model if target == MODEL or takes_our_keys else None
    return Start(
        path=path,
        fold_scale=init_from.fold_scale,
        weights=network_weights(checkpoint),
        shape=shape,
        tokenizer=Tokenizer.from_dict(state["tokenizer"]) if state["tokenizer"] else None,
        labels=state.get("labels", ()),
        changes=() if shape else model.get("changes", ()),
    )


def stored_shape(init_from: InitFrom, trust: bool) -> dict[str, Any]:
    """Return the fields of the model's config in a checkpoint or folder, or {} if the model is not one of ours.

    Raises:
        ConfigError: without ``trust``, the fields name a class that is not trusted.
    """
    start = load_start(init_from)
    shape = {} if start is None else dict(start.shape or {})
    if not trust:
        from minitx.training.trust import check_trusted

        check_trusted({"_target_": MODEL, **shape}, "model")
    return shape


def check_resumed(path: str | None, parts: Mapping[str, Part], state: Mapping[str, Any]) -> int:
    """Return the step at which the checkpoint ``path`` resumes, or 0 if it is None. Code in the checkpoint is not executed.

    Args:
        path: the checkpoint, ``ckpt_path`` of the config.
        parts: the parts ``data``, ``objective``, ``optimizer`` and ``schedule`` of the run.
        state: the plain data that the run stores (``stored_state``).

    Raises:
        ConfigError: the file does not exist, is not a checkpoint of minitx, is beyond ``trainer.max_steps``, or was written
            with another model, optimizer, schedule or number of steps (``check_length``). The message names the differences.
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
    _warn_of_other_rows(named, saved["seed"], current["seed"], changes["data"])
    _warn_of_other_losses(named, changes["objective"])
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
        saved, current: the options of the trainer in the checkpoint ``named``, and those of the run.

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
    fingerprints = {tokenizers.fingerprint(Tokenizer.from_dict(entry)) for entry in (saved, current) if entry}
    if len(fingerprints) > 1:
        raise ConfigError(
            f"{named} was trained with another tokenizer. Resume with the old data, "
            "or start a new run from the weights and their tokenizer with init_from.path"
        )


def _warn_of_other_rows(named: str, saved_seed: int, seed: int, changes: Sequence[str]) -> None:
    of_rows = [f"seed {saved_seed} != {seed}"] if saved_seed != seed else []
    of_rows += [change for change in changes if not change.startswith(("data.cache_dir ", "data.num_workers "))]
    if of_rows:
        text = "%s resumes with another seed or other data, so rows may be repeated or skipped: %s"
        log.warning(text, named, "; ".join(of_rows))


def _warn_of_other_losses(named: str, changes: Sequence[str]) -> None:
    equal = ("objective.chunk_tokens ", "objective.count_correct ")  # the loss does not depend on them
    of_loss = [change for change in changes if not change.startswith(equal)]
    if of_loss:
        text = "%s resumes with another objective, so its losses cannot be compared with those before: %s"
        log.warning(text, named, "; ".join(of_loss))


# --- rebuilding the contents of a checkpoint


HINTS: dict[str, Any] = {"model": Model, "data": Data, "objective": ObjectivePart}
"""The parts of a stored config that can be rebuilt."""


@dataclasses.dataclass
class Stored:
    """A trained network, in evaluation mode on the CPU. The data and the objective of its training are built on demand.

    Attributes:
        state: the plain data that the run stored: ``config``, ``model`` and ``tokenizer``.
        nodes: the nodes of ``model``, ``data`` and ``objective``, with the changes of ``load_stored``.
        untrusted: names of the nodes that come from the checkpoint. These nodes may name only classes of torch and minitx.
        network, tokenizer: set by ``load_stored``.
    """

    path: str
    state: dict[str, Any]
    nodes: dict[str, dict[str, Any]]
    untrusted: frozenset[str]
    network: nn.Module = dataclasses.field(init=False)
    tokenizer: Tokenizer | None = dataclasses.field(init=False)
    _parts: dict[str, Part] = dataclasses.field(default_factory=dict)

    @property
    def net(self) -> Net:
        """The network as a ``Net``."""
        return Net.of(self.network)

    def part(self, name: str) -> Part:
        """Return the part ``model``, ``data`` or ``objective``. Its modules are imported only after its node is trusted.

        Raises:
            ConfigError: the part was an object from Python, is not trusted, or does not exist.
        """
        if name in self._parts:
            return self._parts[name]
        node = self.nodes[name]
        if name == "model" and node.get("_target_") == FROM_PYTHON:
            raise ConfigError(
                f"ckpt_path={self.path} contains a model that differs from its config: {joined(node['changes'])}. Build the model "
                "as for training and call load_model(path, model=...), or pass model._target_=MODULE.NAME to evaluate.py"
            )
        if node.get("_target_") == FROM_PYTHON:
            raise ConfigError(
                f"ckpt_path={self.path} was trained with {name} passed from Python, and a checkpoint cannot contain it: pass "
                f"{name}._target_=MODULE.NAME to evaluate.py (text=TEXT to the viewer), or call evaluate() from Python"
            )
        if name in self.untrusted:
            from minitx.training.trust import check_trusted

            check_trusted(node, name)
        self._parts[name] = read(HINTS[name], node, name)
        return self._parts[name]

    def task(self) -> Task:
        """Load the data of the run.

        Raises:
            ConfigError: the data does not exist, or no longer matches the vocabulary or the learned positions of the model.
        """
        task, _ = load_task(self.part("data"), seed=self.state["config"]["seed"], tokenizer=self.tokenizer)
        if task.label_names and self.state["labels"]:
            from minitx.data.label_order import numbered_as

            task = numbered_as(task, self.state["labels"])
        net = self.net
        if net.vocab_size is not None and task.model_fields.get("vocab_size", 0) > net.vocab_size:
            raise ConfigError(f"ckpt_path={self.path} was trained on other data: {task.name} has more tokens than the model")
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
    """Read a checkpoint and build its model. Without ``trust``, code that the checkpoint names is not executed.

    Args:
        model: a network to load the weights into. Default: the network that the checkpoint names.
        trust: build any ``_target_`` of the checkpoint, and import its ``imports``. Otherwise only classes of ``torch.nn`` and
            ``torch.optim``, and some of minitx, are allowed (``trust.check_trusted``).
        changes: nodes of ``model``, ``data`` and ``objective`` that replace the stored ones, or single keys of them. They are
            trusted.
        model_only: check the nodes of data and objective only when they are built.

    Raises:
        ConfigError: the file does not exist or is not a checkpoint of minitx, a target is not trusted, or the model cannot be
            built.
    """
    from minitx.training.trust import check_trusted

    checkpoint = read_checkpoint(path, verb="read")
    state = checkpoint["minitx"]
    nodes = {name: dict(state["config"][name]) for name in HINTS}
    nodes["model"] = dict(state["model"])
    untrusted = set[str]()
    for name in HINTS:
        change = (changes or {}).get(name) or {}
        is_object = nodes[name].get("_target_") == FROM_PYTHON
        if "_target_" in change or (is_object and change):
            nodes[name] = dict(change)
            continue
        if not trust and not is_object:
            untrusted.add(name)
            nodes[name].pop("cache_dir", None)  # a checkpoint must not determine where files are written
        nodes[name].update(change)
    stored = Stored(str(path), state, nodes, frozenset(untrusted))
    for name in untrusted - ({"data", "objective"} if model_only else set()) - ({"model"} if model is not None else set()):
        check_trusted(nodes[name], name)
    import_modules(state["config"].get("imports", ()) if trust else ())
    try:
        stored.tokenizer = None if state["tokenizer"] is None else Tokenizer.from_dict(state["tokenizer"])
        network = network_of(stored.part("model")) if model is None else model
        load_weights(network, network_weights(checkpoint))
    except ConfigError:
        raise
    except Exception as error:  # for example an unknown field, or weights of another shape
        raise ConfigError(f"ckpt_path={path} contains a model that cannot be built: {first_line(error)}") from error
    stored.network = network.eval()
    return stored


def load_model(
    path: str | Path, model: nn.Module | None = None, trust: bool = False
) -> tuple[nn.Module, Tokenizer | None, dict[str, Any]]:
    """Load a checkpoint: the trained network in evaluation mode on the CPU, its tokenizer (or None), and the stored plain data.

    Args:
        model: a network to load the weights into. Default: the network that the checkpoint names. It is required if a model of
            minitx was trained that differs from its config.
        trust: whether to execute any code that the checkpoint names.

    Raises:
        ConfigError: see ``load_stored``.
    """
    stored = load_stored(path, model=model, trust=trust, model_only=True)
    return stored.network, stored.tokenizer, stored.state


def place(model: Network, device: str) -> Network:
    """Move ``model`` to ``device``: a name of torch, or ``auto`` for the device that training uses (``device_of``).

    Raises:
        ConfigError: the device does not exist, or cannot hold the model.
    """
    try:
        return model.to(device_of() if device == "auto" else torch.device(device))
    except (RuntimeError, AssertionError, TypeError) as error:  # TypeError: float64 on Apple's GPU
        raise ConfigError(f"device={device} cannot be used: {first_line(error)}") from error
