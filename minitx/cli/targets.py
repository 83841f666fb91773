"""``_target_``: which classes a config may name. Everything else is refused before it is imported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minitx.config import ConfigError

ALLOWED = frozenset(
    {
        "lightning.pytorch.loggers.WandbLogger",
        "lightning.pytorch.loggers.TensorBoardLogger",
        "lightning.pytorch.callbacks.LearningRateMonitor",
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.callbacks.DeviceStatsMonitor",
        "lightning.pytorch.callbacks.Timer",
        "minitx.training.callbacks.AttentionTemperature",
    }
)
_SECRET = re.compile(r"(api_?key|token|secret|password|passwd|credential)", re.IGNORECASE)
_SECRET_ENTRY = re.compile(
    r"((?:api_?key|token|secret|password|passwd|credential)\w*(?<!izer)(?<!tokens)['\"]?\s*:\s*)('[^']*'|\"[^\"]*\"|[^,}\s]+)",
    re.IGNORECASE,
)


def check_targets(group: Mapping[str, Mapping[str, Any]], key: str) -> None:
    """Refuse a group of ``name: {_target_: …}`` that names anything outside ``ALLOWED``; imports nothing.

    Raises:
        ConfigError: a missing ``_target_`` or one that is not allowed, at any depth.
    """
    for name, node in group.items():
        if "_target_" not in node:
            raise ConfigError(f"{key}.{name} has no _target_")
        for path, target in _targets(node, f"{key}.{name}"):
            if target not in ALLOWED:
                raise ConfigError(f"{path}._target_={target} is not allowed: one of {', '.join(sorted(ALLOWED))}")


def instantiate_all(group: Mapping[str, Mapping[str, Any]], key: str, folder: Path) -> list[Any]:
    """Build what ``group`` names, after ``check_targets``; loggers write into the run's ``folder``.

    Raises:
        ConfigError: a target that is not allowed, or arguments that do not fit it.
    """
    check_targets(group, key)
    if not group:
        return []
    from hydra.utils import instantiate

    built = []
    for name, node in group.items():
        try:
            built.append(instantiate({**node, **_defaults(str(node["_target_"]), node, folder)}))
        except Exception as error:
            reason = " ".join(str(error.__cause__ or error).split())[:300]
            raise ConfigError(f"{key}.{name} cannot be built: {reason}") from error
    return built


def _targets(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        if "_target_" in node:
            yield path, str(node["_target_"])
        for name, child in node.items():
            yield from _targets(child, f"{path}.{name}")
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from _targets(child, f"{path}[{i}]")


def _defaults(target: str, node: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Loggers write beside the run; wandb without a key runs offline instead of asking for one."""
    if ".loggers." not in target:
        return {}
    defaults: dict[str, Any] = {} if "save_dir" in node else {"save_dir": str(folder)}
    if target.endswith("WandbLogger") and "offline" not in node and not os.environ.get("WANDB_MODE"):
        has_key = bool(os.environ.get("WANDB_API_KEY")) or _netrc_has("api.wandb.ai")
        defaults |= {} if has_key else {"offline": True}
    return defaults


def _netrc_has(host: str) -> bool:
    import netrc

    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def redact(value: Any) -> Any:
    """Plain data with the values of keys that look like secrets replaced.

    >>> redact({"logger": {"api_key": "abc", "project": "minitx"}})
    {'logger': {'api_key': '<redacted>', 'project': 'minitx'}}
    """
    if isinstance(value, Mapping):
        return {k: "<redacted>" if _is_secret(str(k), v) else redact(v) for k, v in value.items()}
    return [redact(item) for item in value] if isinstance(value, list | tuple) else value


def _is_secret(key: str, value: Any) -> bool:
    has_value = value is not None and value != "" and not isinstance(value, bool)
    return bool(_SECRET.search(key)) and not key.endswith(("izer", "tokens")) and has_value


def redact_overrides(overrides: list[str]) -> list[str]:
    """Command-line overrides with the values of secret-looking keys replaced."""
    return [_redact_override(*text.partition("=")) for text in overrides]


def _redact_override(key: str, sign: str, value: str) -> str:
    if _is_secret(key.rpartition(".")[2], value):
        return f"{key}=<redacted>"
    return key + sign + _SECRET_ENTRY.sub(r"\1<redacted>", value)  # {api_key: abc} inside of a value
