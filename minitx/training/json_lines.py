"""JSON Lines files: ``probes.jsonl`` and ``samples.jsonl`` of a run, with a record of a step per line, and ``cells.jsonl`` of a grid."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from minitx.config.schema import require
from minitx.crash_safe import naming, replacing


def read_json_lines(path: Path | str, keys: Collection[str] = ()) -> list[dict[str, Any]]:
    """Read a JSON Lines file; [] if it does not exist. An incomplete last line, after a crash, is skipped.

    Raises:
        ConfigError: another line is not JSON, or a line lacks one of ``keys``.
    """
    records = []
    lines = Path(path).read_bytes().split(b"\n") if Path(path).exists() else []
    for number, line in enumerate(lines, 1):
        record = _value(line)
        if record is not None or (line and number < len(lines)):
            require(isinstance(record, dict) and record.keys() >= {*keys}, f"{path}: line {number} is not a record of a run")
            records.append(record)
    return records


def end_last_line(path: Path) -> None:
    """End the last line of a JSON Lines file, or remove it if a crash has cut it short, so that the next record has its own line."""
    last = path.read_bytes().rpartition(b"\n")[2] if path.exists() else b""
    if _value(last) is not None:
        with path.open("ab") as file:
            file.write(b"\n")
    elif last:
        os.truncate(path, path.stat().st_size - len(last))


def _value(line: bytes) -> Any:
    """Return the value of a line, or None if the line is not JSON."""
    with suppress(ValueError):
        return json.loads(line)
    return None


def add_records(path: Path, *records: Mapping[str, Any]) -> None:
    """Append records to a JSON Lines file."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def drop_records(path: Path, step: int) -> None:
    """Remove the records after ``step``, at which a run resumes. If ``step`` is 0, remove all records."""
    kept = [record for record in read_json_lines(path) if record["step"] <= step > 0]
    if not kept:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as new:
        new.unlink(missing_ok=True)  # a killed run may have left it
        add_records(new, *kept)


def over_heads(value: Any) -> Any:
    """Return the mean over heads if ``value`` is a list with one value per head, else ``value``."""
    return mean(value) if isinstance(value, list) else value


def read_probes(path: Path | str) -> list[dict[str, Any]]:
    """Read the records of a probe file, averaged over heads (``read_json_lines`` keeps the heads); [] if it does not exist."""
    return [
        {**record, "layers": [{key: over_heads(value) for key, value in layer.items()} for layer in record["layers"]]}
        for record in read_json_lines(path)
    ]
