"""What a finished run amounts to, from its own files: outcome, losses, spikes, a digest of the loss series."""

from __future__ import annotations

import hashlib
import statistics
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minitx.training.metrics import finite, read_metrics
from minitx.training.probes import read_probes

SOLVED_AT = 0.99
_CURVE_POINTS = 100


def spike_share(losses: Sequence[float], window: int, sigmas: float) -> float:
    """Share of losses at least ``sigmas`` standard deviations above the mean of the ``window`` before them.

    OLMo 2 (arXiv:2501.00656) uses 1000 and 7; short runs 128 and 6. The first ``window`` steps cannot spike.

    >>> spike_share([1.0, 1.1] * 64 + [9.0], window=128, sigmas=6)
    1.0
    """
    if len(losses) <= window:
        return 0.0
    spikes = 0
    total, square = sum(losses[:window]), sum(x * x for x in losses[:window])
    for i in range(window, len(losses)):
        mean = total / window
        spread = max(square / window - mean * mean, 0.0) ** 0.5
        spikes += losses[i] >= mean + sigmas * max(spread, 1e-12)
        total += losses[i] - losses[i - window]
        square += losses[i] ** 2 - losses[i - window] ** 2
    return spikes / (len(losses) - window)


def outcome(
    final: float | None, initial: float | None, accuracy: float | None, floors: Mapping[str, float], *, recall: bool
) -> str:
    """The word for a run: a recall task is SOLVED or FAILED, a language model is held to its floors.

    NONFINITE · DIVERGED (final ≥ loss at init) · COLLAPSED (≥ unigram) · NO-CONTEXT (≥ bigram) · OK.
    """
    if final is None or initial is None:
        return "NONFINITE"
    if recall:
        return "SOLVED" if (accuracy or 0.0) >= SOLVED_AT else "FAILED"
    if final >= initial:
        return "DIVERGED"
    if final >= floors.get("unigram", float("inf")):
        return "COLLAPSED"
    return "NO-CONTEXT" if final >= floors.get("bigram", float("inf")) else "OK"


def summarise(folder: Path, **facts: Any) -> dict[str, Any]:
    """The result of a run as plain data (no NaN), read back from ``metrics.csv`` and ``probes.jsonl`` in ``folder``.

    ``facts`` are the keywords of ``summarise_rows``.
    """
    return summarise_rows(read_metrics(folder / "metrics.csv"), read_probes(folder / "probes.jsonl"), **facts)


def summarise_rows(
    rows: Sequence[Mapping[str, Any]],
    probes: Sequence[Mapping[str, Any]] = (),
    *,
    floors: Mapping[str, float],
    recall: bool,
    nonfinite_step: int | None,
    num_parameters: int,
    chance: float = 0.0,
    measures: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """``summarise`` for rows in memory: of ``metrics.COLUMNS`` it reads the step, the losses, the accuracy and the norm.

    ``chance`` is the accuracy of guessing, ``measures`` are what ``minitx.training.measures`` found.
    """
    logged = [row for row in rows if row["train_loss"] is not None]
    losses = [row["train_loss"] for row in logged]
    norms = [norm for row in logged if (norm := finite(row["grad_norm"])) is not None]
    validated = [row for row in rows if row["val_loss"] is not None]
    final = finite(validated[-1]["val_loss"]) if validated and nonfinite_step is None else None
    accuracy = finite(validated[-1]["val_accuracy"]) if validated else None
    initial = finite(losses[0]) if losses else None
    window, sigmas = (1000, 7.0) if len(losses) >= 3000 else (128, 6.0)
    thin = max(1, -(-len(logged) // _CURVE_POINTS))
    return {
        "outcome": outcome(final, initial, accuracy, floors, recall=recall),
        "val_loss": final,
        "accuracy": accuracy,
        "initial_loss": initial,
        "floors": dict(floors),
        "chance": chance,
        "measures": {name: finite(value) for name, value in measures.items()},
        "steps": logged[-1]["step"] if logged else 0,
        "nonfinite_step": nonfinite_step,
        "grad_norm_median": statistics.median(norms) if norms else None,
        "grad_norm_max": max(norms, default=None),
        "spike_share": spike_share([finite(x) or initial or 0.0 for x in losses], window, sigmas),
        "loss_digest": hashlib.sha256(b"".join(struct.pack("<d", x) for x in losses)).hexdigest(),
        "curve": [[row["step"], finite(row["train_loss"]), finite(row["grad_norm"])] for row in logged[::thin]],
        "num_parameters": num_parameters,
        "probes": list(probes),
    }
