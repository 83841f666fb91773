"""``export.py``: write a checkpoint as a Hugging Face folder, with its tokenizer and facts about the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minitx.cli import importing
from minitx.cli.command_line import FilePath, StoredConfig, open_stored, refusing, run_program, write, writing
from minitx.config.schema import require


@dataclass(frozen=True, kw_only=True)
class ExportConfig(StoredConfig):
    """The keys of ``export.py``. Model, tokenizer and chat template come from the checkpoint.

    Attributes:
        output: a new or empty folder for config.json, the weights, the tokenizer and README.md.
        model_type: the family to write, such as mistral; null: the first that can express the model.
        chat_template: a file with a chat template (jinja2); null: the template of the run, with data=chat.
    """

    output: FilePath
    model_type: str | None = None
    chat_template: FilePath | None = None

    def check(self) -> None:
        require(bool(self.output), "output= must name a folder")
        folder = Path(self.output)
        require(not folder.exists() or folder.is_dir(), f"output={self.output} is a file, but must name a folder")
        require(not folder.exists() or not any(folder.iterdir()), f"output={self.output} is not empty: name a new folder")


def main() -> int:
    """The program behind ``scripts/export.py`` and ``minitx-export``; returns the exit code."""
    usage = "python scripts/export.py ckpt_path=FILE output=FOLDER [key=value ...]"
    return run_program(ExportConfig, usage, _export)


def _export(config: ExportConfig) -> None:
    with importing():
        from safetensors import SafetensorError

        from minitx.interop import save_hf
        from minitx.interop.finetune import save_finetuned

    stored = open_stored(config.checkpoint, trust=config.trust)
    tokenizer = stored.tokenizer
    require(
        tokenizer is not None or config.chat_template is None,
        f"chat_template={config.chat_template} needs a tokenizer, but ckpt_path={config.ckpt_path} has none",
    )
    if config.chat_template is None:
        template = getattr(tokenizer, "chat_template", None)
    else:
        require(Path(config.chat_template).is_file(), f"chat_template={config.chat_template} does not exist")
        template = Path(config.chat_template).read_text(encoding="utf-8")
    facts = _facts(config.checkpoint, stored.state["config"])
    labels = _labels(stored.state.get("labels", ()), getattr(stored.network, "config", None))
    options: dict[str, Any] = {"tokenizer": tokenizer, "chat_template": template, "facts": facts, "labels": labels}
    options["first_id"] = stored.state.get("first_id")
    save: Any = partial(save_hf, model_type=config.model_type)
    if hasattr(stored.network, "save_pretrained"):  # a model of transformers
        require(config.model_type is None, "model_type has no effect on a model of transformers: remove it")
        save = save_finetuned
    cannot = refusing(f"ckpt_path={config.ckpt_path} cannot be exported: ", (TypeError, ValueError))
    with writing(config.output, SafetensorError), cannot:
        save(stored.network, Path(config.output), **options)
    write(f"{config.output}\n")


def _labels(names: Sequence[str], config: Any) -> Sequence[str]:
    """Return the names of labels if the model has the same number of labels, else (): foreign models may have more."""
    return names if names and len(names) == getattr(config, "num_labels", None) else ()


def _facts(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts about the training of a checkpoint, for the table in ``README.md``."""
    from minitx import __version__
    from minitx.training.checkpoint_files import read_checkpoint
    from minitx.training.metrics_csv import read_metrics

    step = read_checkpoint(path)["global_step"]
    data = config["data"]
    folder = Path(path).resolve().parent
    metrics = folder.parent / "metrics.csv"  # only in the folder of the run, not above a copy
    is_there = folder.name == "checkpoints" and metrics.is_file()
    rows = [row for row in (read_metrics(metrics) if is_there else []) if row["step"] == step]
    measured = {name: value for row in rows for name, value in row.items() if value is not None}
    source = f" ({Path(data['path']).name})" if data.get("path") else ""
    optimizer = config["optimizer"]
    return {
        "data": f"{_short_name(data)}{source}",
        "tokenizer": Path(str(data["tokenizer"])).name if data.get("tokenizer") else None,
        "trained for": f"{step:,} steps",
        "tokens": f"{measured['tokens']:,}" if "tokens" in measured else None,
        "validation loss": f"{measured['val_loss']:.4f} nats per token" if "val_loss" in measured else None,
        "optimizer": f"{_short_name(optimizer)}, learning rate {optimizer.get('lr')}",
        "seed": config["seed"],
        "minitx": __version__,
    }


def _short_name(node: Mapping[str, Any]) -> str:
    """Return a short name of a node: the last part of its ``name`` or its target."""
    return str(node.get("name") or node.get("_target_", "")).rpartition(".")[2]
