"""Writing the report into a folder: HTML, Markdown, a CSV of the cells and the figures, and a table for the terminal."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from string import ascii_lowercase
from typing import Any

from minitx.ablation.figures import draw_all
from minitx.ablation.page import budget_sentences, build_page
from minitx.ablation.predictions import Prediction, predictions
from minitx.ablation.records import ARMS, Cells, collect, loss_of
from minitx.ablation.render import Table, to_html, to_markdown, to_text
from minitx.ablation.verdict import Comparison, Findings, analyse
from minitx.ablation.wording import number, p_text, place_text, signed, span
from minitx.config import AblationConfig

RESULT_COLUMNS = (
    "outcome", "accuracy", "val_loss", "initial_loss", "steps", "nonfinite_step", "grad_norm_median", "grad_norm_max",
    "spike_share", "num_parameters", "loss_digest",
)  # fmt: skip
RECORD_COLUMNS = ("seconds", "cell", "error", "command")


@dataclass(frozen=True)
class Report:
    """What was written, and what the terminal shows.

    ``headline`` is the verdict sentence; ``table_text`` a summary of at most 100 columns; ``findings`` carry the verdicts and
    the cells.
    """

    folder: Path
    files: tuple[Path, ...]
    headline: str
    table_text: str
    findings: Findings
    predictions: Sequence[Prediction]


def write_report(
    records: Iterable[Mapping[str, Any]],
    grid: AblationConfig,
    expected: Iterable[Mapping[str, Any]],
    folder: str | Path,
    *,
    meta: Mapping[str, Any],
) -> Report:
    """Write ``report.html``, ``summary.md``, ``cells.csv`` and the figures into ``folder``.

    Equal records give equal files, byte for byte, whatever their order, apart from what ``meta`` says.

    Args:
        records: one mapping a finished or failed cell (see ``records``).
        grid: how the grid was planned and is judged.
        expected: every cell of the grid (``study``, ``arm``, ``factors``, ``seed``), so that none can be lost unseen.
        folder: made where it does not exist; files of the same names are replaced, others stay.
        meta: ``commit``, ``versions`` (a mapping), ``wall_seconds``, ``command``, ``date``, ``hardware``; each may be
            missing, which the page says.

    Raises:
        KeyError: a record without ``study``, ``arm``, ``seed`` or ``status``.
    """
    cells = collect(records, grid, expected)
    findings = analyse(cells)
    drawings = draw_all(findings)
    judged = predictions(findings)
    page = build_page(findings, judged, drawings, meta)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    contents: dict[str, bytes] = {
        "report.html": to_html(page).encode(),
        "summary.md": to_markdown(page).encode(),
        "cells.csv": cells_csv(cells).encode(),
        **{f"{d.name}.png": d.png for d in drawings},
    }
    for name, content in contents.items():
        (target / name).write_bytes(content)
    return Report(
        folder=target,
        files=tuple(target / name for name in contents),
        headline=" ".join(filter(None, [page.notice, *page.headline])),
        table_text=summary_text(findings, judged),
        findings=findings,
        predictions=judged,
    )


# --- what the terminal and the CSV show


def summary_text(findings: Findings, judged: Sequence[Prediction]) -> str:
    """Counts, verdicts, ladder, null control and predictions in at most 100 columns."""
    cells = findings.cells
    counts = (
        f"{cells.grid.name}{'' if cells.grid.confirmatory else ' (not confirmatory)'}: {len(cells.expected)} cells "
        f"expected, {len(cells.done)} done, {len(cells.failed)} failed, {len(cells.missing)} missing"
    )
    blocks = [counts, *("\n".join(textwrap.wrap(sentence, 100)) for sentence in budget_sentences(cells))]
    pairs = list(dict.fromkeys(c.arms for c in findings.main))
    letters = {pair: f"{letter}: " for pair, letter in zip(pairs, ascii_lowercase, strict=False)} if len(pairs) > 1 else {}
    rows = [_summary_row(c, letters.get(c.arms, "")) for c in findings.main]
    if rows:
        arms = pairs[0] if len(pairs) == 1 else ("first", "second")
        headers = ("", "where", "seeds", *arms, "change", "95 % interval", "p", "verdict")
        named = [f"{letter}{treatment} − {reference}." for (reference, treatment), letter in letters.items()]
        caption = " ".join(["E1 score after the last step at the best rate, E2 usable window; * primary.", *named])
        blocks.append(to_text(Table(caption, headers, rows)))
    if findings.ladder:
        blocks.append(to_text(_ladder_summary(findings)))
    if findings.null:
        equal = sum(p.equal is True for p in findings.null)
        blocks.append(f"null control: {equal} of {len(findings.null)} full_fold runs bitwise equal to inv_sqrt")
    if judged:
        blocks.append("\n".join(textwrap.wrap("predictions: " + ", ".join(f"{p.name} {p.status}" for p in judged), 100)))
    return "\n\n".join(blocks)


def _summary_row(c: Comparison, pair: str) -> tuple[str, ...]:
    e = c.effect
    means = (number(mean(e.reference)), number(mean(e.treatment)), signed(e.difference)) if e else ("–", "–", "–")
    p = p_text(c.p_adjusted if c.primary else c.p_harm)
    where = pair + place_text(c.study, c.condition).replace("init ", "")
    interval = span(e.interval) if e and e.interval else "–"
    return (c.endpoint, where + ("*" if c.primary else ""), str(len(c.seeds)), *means, interval, p, c.judgement.word)


def _ladder_summary(findings: Findings) -> Table:
    rows = []
    for row in findings.ladder:
        outcomes = [run["result"]["outcome"] if run else "–" for run in row.runs]
        losses = [number(loss_of(run), 2) if run else "–" for run in row.runs]
        ratio = number(row.gradient_ratio, 1)
        note = row.signs[0] if row.signs else "both fail" if row.both_fail else ""
        rows.append((row.label, *losses, *outcomes, ratio, note))
    headers = ("ladder", *ARMS, *("outcome" for _ in ARMS), "gradients", "without the scale")
    return Table("Stress ladder: loss in nats, outcome, ratio of the median gradient norms.", headers, rows)


def cells_csv(cells: Cells) -> str:
    """One line an expected cell, missing ones included, in the order of their keys; empty where nothing was measured."""
    factors = sorted({name for key in cells.expected for name, _ in key.factors})
    buffer = io.StringIO()
    lines = csv.writer(buffer, lineterminator="\n")
    lines.writerow(["study", "arm", *factors, "seed", "status", *RESULT_COLUMNS, *RECORD_COLUMNS])
    for key in cells.expected:
        record = cells.done.get(key) or cells.failed.get(key) or {"status": "missing"}
        result = record.get("result") or {}
        levels = dict(key.factors)
        values = [key.study, key.arm, *(levels.get(f) for f in factors), key.seed, record["status"]]
        values += [result.get(name) for name in RESULT_COLUMNS]
        lines.writerow(values + [record.get(name) for name in RECORD_COLUMNS])
    return buffer.getvalue()
