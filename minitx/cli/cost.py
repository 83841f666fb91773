"""``cost.py``: the cost of a model by part, and its growth with the length."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from minitx.cli.arguments import help_text, key, run_program, write, writing
from minitx.config import ConfigError, TransformerConfig, from_dict, to_dict
from minitx.config.checks import Config, Count, require

USAGE = "python scripts/cost.py model=NAME [model.KEY=VALUE ...] [key=value ...]"
NOTES = """\
Operations are those of matrix products, in millions (1e6). formula: what exact attention needs, with the
keys that a query sees. forward, backward: what was counted. Softmax, scale and mask count nothing, but
wherever a matrix of scores exists they read and write O(n²) bytes. kept: bytes of activations that wait for
the backward pass. Parameters, optimizer state and the loss with its logits come on top.
Layers: w is a window of 64 keys, m are D ln D features, k are 64 slots. linformer is not causal.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostConfig(Config):
    """The keys of ``cost.py``. ``model.KEY=VALUE`` are those of ``train.py``."""

    model: str = key(dataclasses.MISSING, "an option of configs/model, such as char_small; model.KEY=VALUE changes its keys")
    length: Count | None = key(None, "tokens in a row; null: the model's max_len. Not for images")
    batch_size: Count = key(1, "rows")
    lengths: tuple[Count, ...] = key((256, 512, 1024, 2048), "lengths at which to measure single layers, forward and backward")
    output_dir: str = key("runs/cost", "folder for cost.json and cost.png")

    def check(self) -> None:
        given = ",".join(map(str, self.lengths))
        require(len(set(self.lengths)) > 1, f"lengths={given} must be two different numbers at least, for a fit")
        require(not Path(self.output_dir).is_file(), f"output_dir={self.output_dir} is a file")


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
    model, assumed = completed([f"model={config.model}", *overrides])
    if config.length is not None and model.architecture == "vision":
        raise ConfigError(f"length={config.length} is not for pictures: change model.image_size or model.patch_size")

    from minitx.analysis import cost
    from minitx.analysis.canvas import png
    from minitx.analysis.counting import allocations
    from minitx.nn.models import build_model

    inputs = cost.example_inputs(model, config.batch_size, config.length or model.max_len)
    try:
        network = build_model(model)
        parts = cost.ledger(network, inputs)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{' '.join([f'model={config.model}', *overrides])}: {error}") from error
    peak = allocations(lambda: network(**inputs).sum().backward())[1]
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
    lines = [f"{config.model}: {shapes}", *(f"assumed, since the data decide it: {word}" for word in assumed)]
    write("\n".join([*lines, "", *_parts_table(parts), f"most bytes at once, parameters left out: {peak:,}", "", ""]))
    causal = model.architecture in ("decoder", "encoder_decoder")
    sizes: dict[str, Any] = {"num_heads": model.num_heads, "head_dim": model.width_per_head, "causal": causal}
    curves = [cost.growth(kind, config.lengths, **sizes) for kind in cost.GROWTHS]
    title = (
        f"one layer, H = {model.num_heads}, D = {model.width_per_head}, {'causal' * causal or 'all keys'}, forward and backward"
    )
    write("\n".join([title, *_growth_table(curves, config.lengths), "", NOTES]))
    about: dict[str, Any] = {"command": command, "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    about |= {"versions": {name: version(name) for name in ("torch", "minitx")}, "model": to_dict(model), "inputs": shapes}
    found = {"parts": [dataclasses.asdict(part) for part in parts], "peak": peak}
    found["growth"] = [{**dataclasses.asdict(curve), "exponents": curve.exponents} for curve in curves]
    folder = Path(config.output_dir)
    with writing("output_dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cost.json").write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")
        (folder / "cost.png").write_bytes(png(cost.growth_figure(curves, f"{config.model}: {title}")))
    write(f"\n{folder / 'cost.json'}\n{folder / 'cost.png'}\n")


def completed(words: Sequence[str]) -> tuple[TransformerConfig, list[str]]:
    """Return the model of ``train.py WORDS``, and the sizes that were assumed because its data would decide them."""
    from minitx.cli.compose import composed, plain

    model = from_dict(TransformerConfig, plain(composed(words).model), "model.")
    usual = {"vocab_size": 256} if model.architecture != "vision" else {"image_size": 16 * model.patch_size, "num_channels": 3}
    if model.head in ("sequence", "token"):
        usual["num_labels"] = 10
    missing = {name: value for name, value in usual.items() if getattr(model, name) is None}
    return dataclasses.replace(model, **missing), [f"model.{name}={value}" for name, value in missing.items()]  # type: ignore[arg-type]


def _parts_table(parts: Sequence[Any]) -> list[str]:
    """The ledger with its sums."""
    columns = ("parameters", "formula", "forward", "backward", "kept")
    total = {name: sum(getattr(part, name) for part in parts) for name in columns}
    lines = [f"{'part':<12}{'parameters':>13}{'formula':>13}{'forward':>13}{'backward':>13}{'share':>8}{'kept bytes':>16}"]
    for name, row in [*((part.name, dataclasses.asdict(part)) for part in parts), ("all", total)]:
        millions = "".join(f"{row[kind] / 1e6:>13,.2f}" for kind in ("formula", "forward", "backward"))
        share = (row["forward"] + row["backward"]) / (total["forward"] + total["backward"])
        lines.append(f"{name:<12}{row['parameters']:>13,}{millions}{share:>8.1%}{row['kept']:>16,}")
    counted = total["forward"] + total["backward"]
    return [*lines, "", f"counted / (3 x formula) = {counted / (3 * total['formula']):.3f}"]


def _growth_table(curves: Sequence[Any], lengths: Sequence[int]) -> list[str]:
    """Counted operations and measured bytes by length, with the fitted exponents."""
    from minitx.analysis.cost import GROWTHS

    lines = []
    for i, (values, unit) in enumerate((("flops", "operations, 1e6"), ("peak", "most bytes at once, 1e6"))):
        lines += ["", f"{unit:<24}{'textbook':>9}" + "".join(f"{f'n = {length}':>14}" for length in lengths) + f"{'fitted':>9}"]
        for curve in curves:
            numbers = "".join(f"{value / 1e6:>14,.2f}" for value in getattr(curve, values))
            lines.append(f"{curve.kind:<24}{GROWTHS[curve.kind][i]:>9}{numbers}{f'n^{curve.exponents[i]:.2f}':>9}")
    return lines
