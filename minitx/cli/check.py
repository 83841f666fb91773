"""``check.py``: name the mistakes in an attention function, an attention layer or a model."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from minitx.cli import importing
from minitx.cli.command_line import FilePath, ProgramConfig, checkpoint_of, open_stored, refusing, run_program, write
from minitx.cli.source_files import module_at, object_at
from minitx.config import ConfigError
from minitx.config.schema import Natural, first_line, require, shown

if TYPE_CHECKING:
    from minitx.check.results import Report

HELP = """minitx-check FILE.py:NAME [key=value ...]      (in a clone also: python scripts/check.py)
minitx-check model=FOLDER [key=value ...]
minitx-check FILE.py:NAME like=FILE.py:NAME [key=value ...]

NAME is a function of queries, keys and values, a layer with projections, a model, or a class or function that returns one.
Python runs the file with your permissions. FOLDER is a Hugging Face folder, a checkpoint or the folder of a run; their code
is not run. A file in a package is imported as its module. The exit code is 1 if something is wrong, and 2 if there is nothing to
check, no check could be tried, or none of a property in only=."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig(ProgramConfig):
    """The keys of ``check.py``.

    Attributes:
        target: FILE.py:NAME; target= may be omitted.
        model: a Hugging Face folder, a checkpoint or the folder of a run, instead of FILE.py:NAME.
        only: properties of a model to check, such as causality,padding.
        like: the reference of a port: FILE.py:NAME or a folder; reports why the two models differ.
        weights: FILE.py:NAME of a function from the reference's state dict to the port's; null: equal names or equal weights.
        expect: what an output may depend on: causal, bidirectional or window:4, and relative for positions; null: a model that declares
            nothing is only described.
        trust: build any class that a checkpoint names. This can run arbitrary code.
        stage: grade one stage of the exercise: 1 plain, 2 masks, 3 queries that see nothing, 4 wide values and causal, 5 half
            precision and large scores.
        strict: check a kernel with the signature of scaled_dot_product_attention in all cases and dtypes.
        mask: the meaning of True in the mask: keep or hide; null: inferred.
        call: an adapter, a function in the same file or FILE.py:NAME. For a model: (model, input_ids, keep) -> logits (B, L, V), with a bool
            mask keep (B, L), True = a real token. For a function or layer: (function, query, key, value, mask) -> output, all (B, H, L, D),
            with a bool mask (B, 1, L, S), True = may attend. The mask may be left out; null: the call is found by trying.
        seed: seed of the random inputs.
        device: cpu, cuda, cuda:1 or mps.
        json: also write the report to this file, for graders.
    """

    target: FilePath = ""
    model: FilePath = ""
    only: str | None = None
    like: FilePath = ""
    weights: FilePath = ""
    expect: str | None = None
    trust: bool = False
    stage: Literal[1, 2, 3, 4, 5] | None = None
    strict: bool = False
    mask: Literal["keep", "hide"] | None = None
    call: str | None = None
    seed: Natural = 0
    device: str = "cpu"
    json: FilePath = ""

    def check(self) -> None:
        require(bool(self.target or self.model), "FILE.py:NAME is missing, such as mine.py:attention, or model=FOLDER")
        self.refuse_together("model", "target", "strict", "stage", "mask")
        self.refuse_together("like", "only", "expect", "call", "strict", "stage", "mask")
        self.refuse_together("strict", "call", "stage")
        for key in ("only", "expect"):
            self.refuse_together(key, "strict", "stage", "mask")
        for key, value in {"": self.target, "weights=": self.weights}.items():
            require(not value or all(value.rpartition(":")), f"{key}{value} must be FILE.py:NAME, such as mine.py:attention")
        require(bool(self.like) or not self.weights, "weights is for a reference: add like=FILE.py:NAME")
        has_file = self.call is None or bool(self.target) or ".py:" in self.call
        require(has_file, f"call={self.call} needs a file, because model= has none: call=FILE.py:{self.call}")
        if self.json and not Path(self.json).absolute().parent.is_dir():
            raise ConfigError(f"json={self.json} is in a folder that does not exist")

    @property
    def properties(self) -> list[str] | None:
        """The properties in ``only``, or None for all."""
        return None if self.only is None else self.only.split(",")


def main() -> int:
    """The program behind ``scripts/check.py`` and ``minitx-check``; returns the exit code."""
    reports: list[Report] = []
    arguments = [word if "=" in word or word.startswith("-") else f"target={word}" for word in sys.argv[1:]]
    code = run_program(CheckConfig, HELP, lambda config: reports.append(_run_check(config)), arguments=arguments)
    return code or max((report.exit_code for report in reports), default=0)


def _run_check(config: CheckConfig) -> Report:
    with importing():
        module = None if config.model else module_at(config.target.rpartition(":")[0])
        subject = object_at(config.target, module) if module else _stored_model(config.model, "model", config.trust)
    adapter = _adapter(config, module)
    if config.like:
        report = _twin_report(subject, config)
    else:
        report = _model_report(subject, config, adapter) if config.model else _code_report(subject, config, adapter)
    if config.json:
        with refusing(f"json={config.json} cannot be written: ", (OSError,)):
            Path(config.json).write_text(report.json(), encoding="utf-8")
    write(f"{report}\n")
    return report


def _code_report(subject: Any, config: CheckConfig, adapter: Any) -> Report:
    """Return the report on the subject that the file defines."""
    from torch.nn import Module

    from minitx.check.attention_checks import check_attention

    made = _instance_of(subject, config.target)
    is_model = _is_whole_model(made)
    if adapter is not None and isinstance(made, Module):  # (model, input_ids, keep), or (function, query, key, value, mask)
        is_model = len(inspect.signature(adapter).parameters) <= 3
    # only and expect are keys of models, and a layer of vectors is one
    if is_model or (isinstance(made, Module) and (config.only or config.expect)):
        for key, hint in {"strict": "", "stage": "", "mask": "; an adapter declares the mask of a model: call="}.items():
            is_set = getattr(config, key) not in (None, False)
            require(not is_set, f"{key}= is for functions and layers, but {type(made).__name__} is a model{hint}")
        return _model_report(made, config, adapter)
    with refusing(f"{config.target}: ", (ValueError, TypeError)):
        require(config.only is None and config.expect is None, f"only and expect are for models{_advice_for_models(subject)}")
        return check_attention(
            subject if inspect.isclass(subject) else made,
            strict=config.strict,
            stage=config.stage,
            mask=config.mask,
            call=adapter,
            seed=config.seed,
            device=config.device,
        )


def _model_report(model: Any, config: CheckConfig, adapter: Any) -> Report:
    from minitx.check.model_checks import check_model

    if sys.stderr.isatty():  # some seconds without output follow
        sys.stderr.write(f"checking {type(model).__name__} ...\n")
    with refusing(), _refusing_device(config.device):
        return check_model(
            model,
            only=config.properties,
            expect=config.expect,
            call=adapter,
            seed=config.seed,
            device=config.device,
            repeat=_command(config, "expect", "call", "trust", "device"),
        )


def _adapter(config: CheckConfig, own: ModuleType | None) -> Any:
    """Return the function that ``call`` names, from a file or from ``own``, the file of the target. Without ``call``, return None."""
    if config.call is None:
        return None
    is_own = ":" not in config.call
    path = config.target.rpartition(":")[0]
    adapter = object_at(f"{path}:{config.call}", own) if is_own else object_at(config.call)
    require(inspect.isfunction(adapter), f"call={config.call} must be a function, got {type(adapter).__name__}")
    return adapter


def _twin_report(subject: Any, config: CheckConfig) -> Report:
    """Return the comparison of a port with its reference."""
    from minitx.check.twins import twin

    mine = subject if config.model else _instance_of(subject, config.target)
    is_file = ".py:" in config.like
    reference = object_at(config.like) if is_file else _stored_model(config.like, "like", config.trust)
    reference = _instance_of(reference, config.like)
    for model, word in ((mine, config.target), (reference, config.like)):
        require(
            callable(model) and not inspect.isclass(model),
            f"{word} must be a model or a function of ids{_advice_for_models(model)}",
        )
    with refusing(), _refusing_device(config.device):
        return twin(
            mine,
            reference,
            weights=object_at(config.weights) if config.weights else None,
            seed=config.seed,
            device=config.device,
            repeat=_command(config, "like", "weights", "trust", "seed", "device"),
        )


def _command(config: CheckConfig, *keys: str) -> str:
    """Return the command that repeats a check, with the seed and every key of ``keys`` that is set."""
    subject = f"model={config.model}" if config.model else config.target
    typed = [key for key in keys if key in config.changed_keys or key == "seed"]
    return f"minitx-check {shlex.join([subject, *(f'{key}={shown(getattr(config, key))}' for key in typed)])}"


def _refusing_device(device: str) -> AbstractContextManager[None]:
    """A context that turns the errors of a device that cannot be used into a ConfigError. On the CPU, they are errors of the model."""
    return nullcontext() if device == "cpu" else refusing(f"device={device} cannot be used: ", (RuntimeError, AssertionError))


def _instance_of(subject: Any, target: str) -> Any:
    """Call the subject if it is a class of modules or a function without required arguments, and return the result; else the subject."""
    from torch import nn

    if isinstance(subject, nn.Module) or (inspect.isclass(subject) and not issubclass(subject, nn.Module)):
        return subject
    parameters = inspect.signature(subject).parameters.values() if callable(subject) else None
    if parameters is None or any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters):
        return subject  # a function of attention, or a layer that needs sizes
    try:
        made = subject()
    except Exception as error:
        raise ConfigError(f"{target}() raises {type(error).__name__}: {first_line(error)}") from error
    return made if callable(made) else subject


def _is_whole_model(subject: Any) -> bool:
    """Return whether the subject is a model, and not a layer or a function of attention."""
    from torch import nn

    if not isinstance(subject, nn.Module):
        return False
    reads = (nn.Embedding, nn.Conv2d)
    return any(isinstance(module, reads) for module in subject.modules()) or hasattr(subject, "config")


def _advice_for_models(subject: Any) -> str:
    """Return the end of a message: why the subject is checked as attention."""
    if not inspect.isclass(subject):
        return f", but this is a {type(subject).__name__}"
    required = [p.name for p in inspect.signature(subject).parameters.values() if p.default is p.empty]
    return f"; to check a model, write a function without arguments that returns {subject.__name__}({', '.join(required)})"


def _stored_model(path: str, key: str, trust: bool) -> Any:
    """Return the model of a Hugging Face folder, a checkpoint or the folder of a run, without running their code."""
    require(os.path.exists(path), f"{key}={path} does not exist")
    if not (Path(path) / "config.json").is_file():
        file = checkpoint_of(path)
        require(
            os.path.isfile(file),
            f"{key}={path} is neither a Hugging Face folder (config.json) nor a run (checkpoints/last.ckpt)",
        )
        return open_stored(file, trust=trust).network
    from minitx.interop.finetune import load_folder

    with refusing(f"{key}={path}: "):
        return load_folder(Path(path))
