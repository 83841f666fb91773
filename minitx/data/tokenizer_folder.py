"""Tokenizers that others made: a ``tokenizer.json``, its folder, or a name on the Hugging Face hub."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minitx.config import ConfigError
from minitx.config.schema import first_line
from minitx.data.tokenizer import Tokenizer, marks_named

log = logging.getLogger(__name__)
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a file, a folder or a name on the hub. See ``find_tokenizer``."""
    from huggingface_hub import snapshot_download

    path = Path(name).expanduser()
    try:
        is_local = path.is_file() or (path / "tokenizer.json").is_file()
        return load_tokenizer(path if is_local else snapshot_download(name, allow_patterns=TOKENIZER_FILES))
    except Exception as error:  # huggingface_hub raises many kinds, with long messages
        raise ConfigError(
            f"data.tokenizer={name} (experiment=finetune: model.path) must be char, bpe, a tokenizer.json, a folder that contains one, "
            f"or a name on the Hugging Face hub that can be reached or is in the cache: {first_line(error).partition('. ')[0]}"
        ) from None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a ``tokenizer.json`` from its path or its folder, with the chat template and the special tokens that the folder names.

    Raises:
        ConfigError: the file does not exist, or ``tokenizers`` cannot read it.
    """
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    settings = _content_of(file.with_name("tokenizer_config.json"))
    template = file.with_name("chat_template.jinja")
    named = _special_tokens(_content_of(file.with_name("special_tokens_map.json"))) | _special_tokens(settings)
    try:
        written = template.read_text(encoding="utf-8") if template.is_file() else settings.get("chat_template")
        if isinstance(written, list):  # several templates, by name
            written = next((each["template"] for each in written if each["name"] == "default"), None)
        chat_template = written if isinstance(written, str) else None
        tokenizer = Tokenizer(file.read_text(encoding="utf-8"), chat_template, named)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; it must be a tokenizer.json") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not a tokenizer.json: {first_line(error)}") from None
    by_name = [f"{mark}={tokenizer.decode([id])}" for mark, id in tokenizer.mark_ids.items() if mark not in marks_named(named)]
    if by_name:
        log.info("%s: no file beside it names these special tokens, so they are found by name: %s", file, ", ".join(by_name))
    return tokenizer


def _content_of(file: Path) -> dict[str, Any]:
    """The content of a JSON file, or nothing."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The texts of special tokens by role. In the file, a token is its text or a dict with its ``content``."""
    roles = {f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    tokens = {role: settings[role] for role in sorted(roles & settings.keys())}
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in tokens.items()}
    return {role: text for role, text in texts.items() if isinstance(text, str)}
