"""``cost.py``: what a model costs, part by part, by formula and as counted, and how its attention grows with the length."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitx.cli.arguments import help_text, key, run_program, write, writing
from minitx.config import ConfigError, TransformerConfig, from_dict, to_dict
from minitx.config.checks import Config, Count, require

if TYPE_CHECKING:
    from minitx.analysis.cost import Measured, Part
    from minitx.analysis.growth import Growth

USAGE = "python scripts/cost.py model=NAME [model.KEY=VALUE ...] [key=value ...]"
CONVENTIONS = """\
flops    multiply-adds of matrix products that run, two operations each; softmax, norms, activations and look-ups count
         nothing. counted: read off every product while the model ran, inside chunked and the experts too; torch's fused
         attention counts by torch's formula, all L x S scores whatever a mask hides, 2 products forward and 5 backward.
needed   what utilisation (MFU) is about: 2 N + 4 layers H D T_eff operations a token, times 3 with the backward pass; T_eff
         is the mean number of visible keys, (T + 1) / 2 where causal. Exact attention without waste, whatever runs.
bytes    float32 activations that wait for the backward pass, q, k and v counted with core; measured: alive when the forward
         pass ended. Parameters, gradients, optimizer state and the loss come on top.
"""


@dataclass(frozen=True, kw_only=True)
class CostConfig(Config):
    """What ``cost.py`` takes; ``model.KEY=VALUE`` are those of ``train.py``."""

    model: str = key(dataclasses.MISSING, "an option of configs/model, such as char_small; model.KEY=VALUE changes its keys")
    length: Count | None = key(None, "tokens a row; null: the model's max_len, or the tokens of its pictures")
    batch_size: Count = key(1, "rows")
    backward: bool = key(True, "count forward and backward pass; false: the forward pass")
    lengths: tuple[Count, ...] = key((256, 512, 1024, 2048), "at which one attention layer is measured by itself")
    compare: tuple[str, ...] | None = key(None, "what it attends with there: math,sdpa,linear ...; null: all that it can")
    output_dir: str = key("runs/cost", "folder for cost.json and cost.png")
    save: bool = key(True, "write them; false: show the tables only")

    def check(self) -> None:
        given = ",".join(map(str, self.lengths))
        require(len(set(self.lengths)) > 1, f"lengths={given} must be two different numbers at least, for a fit")
        require(self.compare != (), "compare= must name one at least; null compares all that the model can attend with")
        require(not self.save or not Path(self.output_dir).is_file(), f"output_dir={self.output_dir} is a file")

    @property
    def passes(self) -> str:
        """What is counted, in words."""
        return "forward and backward pass" if self.backward else "forward pass"


def main() -> int:
    """The program behind ``scripts/cost.py`` and ``minitx-cost``; returns the exit code."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler, whose memory events are read, would chat
    typed = [argument for argument in sys.argv[1:] if not argument.startswith("traceback=")]
    if not typed:
        write(help_text(CostConfig, USAGE))
    overrides = [argument for argument in typed if argument.startswith("model.")]
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument not in overrides]
    command = shlex.join(["python", "scripts/cost.py", *typed])
    return run_program(CostConfig, USAGE, partial(_cost, overrides=overrides, command=command))


def _cost(config: CostConfig, overrides: Sequence[str], command: str) -> None:
    model, assumed = completed(compose_model([f"model={config.model}", *overrides]))
    length = _length(config.length, model)

    from minitx.analysis.cost import ledger, measure_model, model_call
    from minitx.analysis.growth import growth
    from minitx.analysis.meter import allocations

    compared = _compared(config, model)
    backward = config.backward
    try:
        parts = ledger(model, config.batch_size, length, backward=backward)
    except ValueError as error:
        raise ConfigError(f"model.{error}") from error
    measured = measure_model(model, config.batch_size, length, backward=backward)
    allocated = allocations(model_call(model, config.batch_size, length, backward=backward)[1])[1]
    write("\n".join([*_heading(config, model, length, assumed), "", *_table(parts, measured, allocated, backward), ""]))
    curves = [
        growth(model, name, config.lengths, batch_size=config.batch_size, backward=backward)
        for name, reason in compared.items()
        if reason is None
    ]
    write("\n".join(["", *_growth_tables(curves, config), *_left_out(compared), "", CONVENTIONS]))
    if config.save:
        sizes = {"batch_size": config.batch_size, "length": length, "backward": backward}
        peaks = {"peak": measured.peak, "allocated": allocated}
        fitted = ("flops_exponent", "bytes_exponent")
        grown = [{**dataclasses.asdict(curve), **{name: getattr(curve, name) for name in fitted}} for curve in curves]
        found = {"parts": _plain(parts, measured), **peaks, "growth": grown}
        plain = {"command": command, **_machine(), "model": to_dict(model), "assumed": assumed, **sizes, **found}
        _save(Path(config.output_dir), plain, curves, config)


def compose_model(overrides: Sequence[str]) -> TransformerConfig:
    """The model that ``train.py OVERRIDES`` builds, but for what its data would decide."""
    from minitx.cli.compose import composed, plain

    return from_dict(TransformerConfig, plain(composed(overrides).model), "model.")


def completed(model: TransformerConfig) -> tuple[TransformerConfig, dict[str, int]]:
    """``model`` with what its data decide in training and nobody said, and what was assumed.

    >>> completed(TransformerConfig())[1]
    {'vocab_size': 256}
    """
    usual = {"vocab_size": 256} if model.architecture != "vision" else {"image_size": 16 * model.patch_size, "num_channels": 3}
    if model.head in ("sequence", "token"):
        usual["num_labels"] = 10
    assumed = {name: value for name, value in usual.items() if getattr(model, name) is None}
    return dataclasses.replace(model, **assumed), assumed  # type: ignore[arg-type]


def _length(asked: int | None, model: TransformerConfig) -> int:
    """Tokens a row.

    Raises:
        ConfigError: more than the model's tables reach.
    """
    usual, has_table = model.max_len, model.position == "learned" or model.attention == "linformer"
    if model.architecture == "vision":
        assert model.image_size is not None
        usual, least = (model.image_size // model.patch_size) ** 2 + model.num_class_tokens, 1 + model.num_class_tokens
        has_table = model.attention == "linformer"  # that of positions is interpolated
        if asked is not None and asked < least:
            raise ConfigError(f"length={asked} must be {least} at least: one patch, and the class token if there is one")
    length = usual if asked is None else asked
    if length > model.max_len and has_table:
        raise ConfigError(f"length={length} exceeds model.max_len={model.max_len}, to which the model's tables reach")
    return length


def _compared(config: CostConfig, model: TransformerConfig) -> dict[str, str | None]:
    """What the attention layer is measured with, each with the reason why it is not, or None.

    Raises:
        ConfigError: what was asked for by name and is unknown or impossible.
    """
    from minitx.analysis.growth import ATTENTIONS, with_attention

    found: dict[str, str | None] = {}
    for name in config.compare or ATTENTIONS:
        try:
            variant = with_attention(model, name, max(config.lengths))
            _core(config, variant, max(config.lengths))
            found[name] = None
        except ValueError as error:
            if config.compare is not None:
                raise ConfigError(f"compare={name}: {error}") from error
            found[name] = str(error)
    return found


def _core(config: CostConfig, model: TransformerConfig, length: int) -> str:
    """What the self-attention of ``model`` runs on."""
    from minitx.analysis.attention_cost import AttentionShape, running_core

    causal = model.architecture in ("decoder", "encoder_decoder")
    return running_core(AttentionShape(model, config.batch_size, length, causal, training=config.backward))


def _heading(config: CostConfig, model: TransformerConfig, length: int, assumed: Mapping[str, int]) -> list[str]:
    layers = f"{model.num_layers} + {model.decoder_layers}" if model.architecture == "encoder_decoder" else model.num_layers
    sizes = f"{layers} layers, E = {model.embed_dim}, H = {model.num_heads}, D = {model.width_per_head}, F = {model.ffn_width}"
    lines = [f"{config.model}: {model.architecture}, {sizes}"]
    if assumed:
        values = ", ".join(f"model.{name}={value}" for name, value in assumed.items())
        lines.append(f"assumed, since the data decide it in training: {values}")
    side = " of source and of target" if model.architecture == "encoder_decoder" else ""
    rows = f"{config.batch_size} row{'s' * (config.batch_size > 1)} of {length} tokens{side}"
    return [*lines, f"{rows}, {config.passes}, self-attention by {_core(config, model, length)}"]


def _table(parts: Sequence[Part], measured: Measured, allocated: int, backward: bool) -> list[str]:
    """The ledger with its sums, aligned; a column of counts right of each of formulas."""
    names = ["part", "parameters", "counted", "flops", "counted", "share", "needed", *(["bytes", "measured"] * backward)]
    total = sum(part.flops for part in parts)
    rows: list[list[Any]] = []
    for part in parts:
        place = (part.stack, part.name)
        values = [part.parameters, measured.parameters[place], part.flops, measured.flops[place]]
        held = [part.bytes, measured.bytes[place]] if backward else []
        rows.append([f"{part.stack} {part.name}".strip(), *values, f"{part.flops / total:.1%}", part.needed, *held])
    sums: list[Any] = [sum(row[i] for row in rows) if isinstance(rows[0][i], int) else "" for i in range(1, len(names))]
    sums[4] = "100.0%"
    lines = _aligned([names, *rows, ["all", *sums]])
    needed = sum(part.needed for part in parts)
    gradients = ", gradients included" if backward else ""
    peak = f"{allocated:,} bytes by torch's allocator{gradients}; {measured.peak:,} in tensors"
    return [*lines, "", f"needed / flops = {needed / total:.3f}", f"most at once beside the parameters: {peak}"]


def _growth_tables(curves: Sequence[Growth], config: CostConfig) -> list[str]:
    """Counted operations and measured bytes by length, with the fitted exponents and how far the formulas are."""
    lines = [f"one attention layer between its projections, {config.passes}, batch_size={config.batch_size}"]
    lengths = [f"n = {length}" for length in config.lengths]
    kinds = ("flops, counted", "flops", "counted", "flops_exponent"), ("most bytes at once", "bytes", "peak", "bytes_exponent")
    for title, formula, found, exponent in kinds:
        rows = []
        for curve in curves:
            ratios = [a / b for a, b in zip(getattr(curve, formula), getattr(curve, found), strict=True)]
            near = "equal" if set(ratios) == {1.0} else f"{min(ratios):.2f} to {max(ratios):.2f}"
            rows.append([curve.attention, *getattr(curve, found), f"n^{getattr(curve, exponent):.2f}", near])
        lines += ["", *_aligned([[title, *lengths, "fitted", "formula / this"], *rows])]
    return lines


def _left_out(compared: Mapping[str, str | None]) -> list[str]:
    """A line for each reason why something was not measured."""
    names: dict[str, list[str]] = {}
    for name, reason in compared.items():
        if reason is not None:
            names.setdefault(reason.removeprefix(f"attention={name} "), []).append(name)
    return [f"not measured: {', '.join(those)}: {reason}" for reason, those in names.items()]


def _aligned(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Rows of a table as lines: the first column to the left, the others to the right, numbers with their thousands."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]


def _plain(parts: Sequence[Part], measured: Measured) -> list[dict[str, Any]]:
    """Each part with what was measured of it."""
    return [
        {
            **dataclasses.asdict(part),
            "measured": {name: getattr(measured, name)[part.stack, part.name] for name in ("parameters", "flops", "bytes")},
        }
        for part in parts
    ]


def _machine() -> dict[str, Any]:
    """What the numbers were measured with."""
    versions = {"python": platform.python_version(), "torch": version("torch"), "minitx": version("minitx")}
    return {"versions": versions, "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}


def _save(folder: Path, plain: Mapping[str, Any], curves: Sequence[Growth], config: CostConfig) -> None:
    from minitx.analysis.canvas import png
    from minitx.analysis.growth import figure

    title = f"{config.model}: one attention layer between its projections, {config.passes.removesuffix(' pass')}"
    with writing("output_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cost.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        (folder / "cost.png").write_bytes(png(figure(curves, title)))
    write(f"\n{folder / 'cost.json'}\n{folder / 'cost.png'}\n")
