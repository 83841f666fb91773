"""``model.pretrained=FOLDER``: training starts from the weights and the tokenizer of a Hugging Face folder, or one of ours."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minitx.config import ConfigError, TransformerConfig

if TYPE_CHECKING:
    from minitx.data.tokenizers import Tokenizer
    from minitx.nn.models import TransformerModel


def load_pretrained(asked: TransformerConfig) -> tuple[TransformerModel, Tokenizer]:
    """The model and tokenizer of ``asked.pretrained``.

    The model's shape is the folder's. Fields of ``asked`` that are not at their defaults (``dropout``, ``scale``,
    ``backend`` …) replace the folder's, as long as the weights still fit.

    Raises:
        ConfigError: no such folder, a model that cannot be honoured, fields under which weights do not fit (each tensor
            with its shapes), no tokenizer.
    """
    from minitx.data.tokenizers import load_tokenizer
    from minitx.interop import from_pretrained, load_hf
    from minitx.nn.models import build_model

    assert asked.pretrained is not None
    folder = Path(asked.pretrained).expanduser()
    said = f"model.pretrained={asked.pretrained}"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{said} is not a folder with a config.json")
    try:
        ours = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("format") == "minitx"
        model = from_pretrained(folder) if ours else load_hf(folder)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{said} cannot be loaded: {error}") from error
    changed = _changed(asked)
    try:
        again = build_model(dataclasses.replace(model.config, **changed))
        again.to(next(model.parameters()).dtype).load_state_dict(model.state_dict())
    except (ValueError, RuntimeError) as error:
        names = ", ".join(f"model.{name}={value}" for name, value in changed.items())
        raise ConfigError(f"{said} does not fit {names}: {error}") from error
    return again, load_tokenizer(folder)


def _changed(asked: TransformerConfig) -> dict[str, Any]:
    """The fields that somebody asked for."""
    fields = {field.name: field.default for field in dataclasses.fields(asked) if field.name != "pretrained"}
    return {name: getattr(asked, name) for name, default in fields.items() if getattr(asked, name) != default}
