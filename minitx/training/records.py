"""The JSON Lines files of a run: ``probes.jsonl`` and ``samples.jsonl``. A line is a record of one step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from minitx.training.metrics_csv import naming


def read_records(path: Path | str) -> list[dict[str, Any]]:
    """Read a JSON Lines file; [] if it does not exist. An incomplete last line, after a crash, is skipped."""
    if not (path := Path(path)).exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def add_records(path: Path, *records: Mapping[str, Any]) -> None:
    """Append records to a JSON Lines file."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def drop_records(path: Path, step: int) -> None:
    """Remove the records after ``step``, at which a run resumes. If ``step`` is 0, remove all records."""
    kept = [record for record in read_records(path) if record["step"] <= step > 0]
    new = path.with_suffix(".new")  # after a crash, the old or the new file remains
    new.unlink(missing_ok=True)
    if kept:
        add_records(new, *kept)
        new.replace(path)
    else:
        path.unlink(missing_ok=True)


def over_heads(value: Any) -> Any:
    """Return the mean over heads if ``value`` is a list with one value per head, else ``value``."""
    return mean(value) if isinstance(value, list) else value


def read_probes(path: Path | str) -> list[dict[str, Any]]:
    """Read the records of a probe file, averaged over heads (``read_records`` keeps the heads); [] if it does not exist."""
    return [
        {**record, "layers": [{key: over_heads(value) for key, value in layer.items()} for layer in record["layers"]]}
        for record in read_records(path)
    ]
