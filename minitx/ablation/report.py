"""Writing the report: the same page as HTML, as Markdown and as text for a terminal, the figures and a CSV.

``write_report`` is the one entry. All text is escaped here, in one place. The HTML holds its style and its pictures: it
asks the network for nothing.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import html
import io
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from minitx.ablation import analysis as an
from minitx.ablation import page as parts
from minitx.ablation.figures import Drawing, draw_all
from minitx.ablation.page import ARMS, Block, Page, Section, Table
from minitx.ablation.statistics import MIN_PAIRS, number, p_text, signed, span
from minitx.ablation.verdict import Comparison, Findings, Prediction, analyse, predictions
from minitx.config import AblationConfig, to_dict

BADGES = {
    "HARM": "bad",
    "NO HARM": "good",
    "INCONCLUSIVE": "open",
    "HELD": "good",
    "NOT HELD": "bad",
    "NOT TESTED": "open",
    "NOT RUN": "open",
    "TEST": "open",
    "PASS": "good",
    "FAIL": "bad",
    "CONTRADICTED": "bad",
    "NOT CONTRADICTED": "open",
    "EQUAL": "good",
    "DIFFERENT": "bad",
}
"""Words that are shown as a coloured badge where they are a whole cell of a table."""

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --ink: #1d1f23; --soft: #5b616b; --line: #d9dce1; --panel: #f4f5f7;
  --accent: #0b57a4; --good-back: #d7f0e3; --good: #0a5236; --bad-back: #fbdcd0; --bad: #86270a; --open-back: #e6e8ec;
  --open: #3c424b; --note-back: #fff3cf; --note: #5d4600; }
@media (prefers-color-scheme: dark) { :root { --back: #15171b; --ink: #e6e8eb; --soft: #a2a9b4; --line: #363b44;
  --panel: #1e2127; --accent: #8cc2ff; --good-back: #123c2a; --good: #9be3bf; --bad-back: #55200d; --bad: #ffbfa5;
  --open-back: #31363f; --open: #d5d9df; --note-back: #40340f; --note: #f7df95; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
p { max-width: 78ch; margin: .6rem 0; overflow-wrap: anywhere; }
.notice { background: var(--note-back); color: var(--note); padding: .5rem .8rem; border-radius: 6px; font-weight: 600; }
.headline { background: var(--panel); border-left: 4px solid var(--accent); border-radius: 4px; padding: .9rem 1.1rem;
  margin: 1rem 0; }
.headline p { max-width: none; margin: 0; font-weight: 650; }
.headline ul { margin: .4rem 0 0; padding-left: 1.2rem; }
.headline li { margin: .3rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; margin: 1rem 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
nav { font-size: .9rem; columns: 2 22rem; margin: 1rem 0; }
nav a { display: block; color: var(--accent); text-decoration: none; padding: .1rem 0; }
nav a:hover { text-decoration: underline; }
.scroll { overflow-x: auto; margin: .2rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .85rem; line-height: 1.4; min-width: 40%; font-variant-numeric: tabular-nums; }
.caption, summary { color: var(--soft); font-size: .88rem; margin: 1.2rem 0 .2rem; }
summary { cursor: pointer; color: var(--accent); }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem .35rem 0; border-bottom: 1px solid var(--line);
  max-width: 26rem; }
th { color: var(--soft); font-weight: 600; border-bottom-width: 2px; }
td.short { white-space: nowrap; }
td.long { min-width: 13rem; overflow-wrap: anywhere; }
.badge { display: inline-block; white-space: nowrap; border-radius: 4px; padding: 0 .45rem; font-weight: 650; font-size: .8rem; }
.good { background: var(--good-back); color: var(--good); }
.bad { background: var(--bad-back); color: var(--bad); }
.open { background: var(--open-back); color: var(--open); }
figure { margin: 1.2rem 0 2rem; }
figure div { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
figure img { display: block; height: auto; max-width: none; }
@media (min-width: 700px) { figure img { max-width: 100%; } }
figcaption { font-size: .9rem; color: var(--soft); margin: .5rem 0; max-width: 78ch; }
figcaption b { color: var(--ink); }
@media (max-width: 600px) { main { padding: 1rem .8rem 3rem; } dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: .4rem; } h1 { font-size: 1.35rem; } }
@media print { nav { display: none; } .scroll { overflow: visible; } }
"""


@dataclass(frozen=True)
class Report:
    """What was written, and what the terminal shows.

    ``headline`` is the verdict sentence; ``table_text`` a summary of at most 100 columns; ``comparisons`` carry the
    verdicts; the counts say how many cells were expected, finished, failed and never came back.
    """

    folder: Path
    files: tuple[Path, ...]
    headline: str
    table_text: str
    comparisons: tuple[Comparison, ...]
    predictions: tuple[Prediction, ...]
    expected: int
    done: int
    failed: int
    missing: int


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
        records: one mapping a finished or failed cell (see ``analysis``).
        grid: how the grid was planned and is judged.
        expected: every cell of the grid (``study``, ``arm``, ``factors``, ``seed``), so that none can be lost unseen.
        folder: made where it does not exist; files of the same names are replaced, others stay.
        meta: ``commit``, ``versions`` (a mapping), ``wall_seconds``, ``command``, ``date``, ``hardware``; each may be
            missing, which the page says.

    Raises:
        KeyError: a record without ``study``, ``arm``, ``seed`` or ``status``.
    """
    cells = an.collect(records, grid, expected)
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
        headline=" ".join(page.headline),
        table_text=summary_text(findings, judged),
        comparisons=findings.comparisons,
        predictions=tuple(judged),
        expected=len(cells.expected),
        done=len(cells.done),
        failed=len(cells.failed),
        missing=len(cells.missing),
    )


# --- the page


def build_page(findings: Findings, judged: Sequence[Prediction], drawings: Sequence[Drawing], meta: Mapping[str, Any]) -> Page:
    """The twelve parts in the order of the protocol."""
    cells, grid = findings.cells, findings.cells.grid
    counts = (
        f"{len(cells.expected)} expected, {len(cells.done)} done, {len(cells.failed)} failed, "
        f"{len(cells.missing)} missing, {len(cells.unexpected)} that belong to no cell of the grid"
    )
    titled: list[tuple[str, Sequence[Block]]] = [
        ("Verdict", parts.verdict_part(findings)),
        ("Three claims apart", parts.claims_part(findings)),
        ("Figures", list(drawings) or ["No figure: no cell has finished."]),
        ("Every arm", parts.arms_part(findings)),
        ("Controls", parts.controls_part(findings)),
        ("Where the effect disappears", parts.where_part(findings)),
        ("The stress ladder, entire", parts.ladder_part(findings)),
        ("What is contradicted", [parts.contradictions(findings)]),
        ("Published results", [parts.published(findings)]),
        ("Limits", _limits(findings)),
        ("How to reproduce", _reproduce(cells, meta)),
        ("The predictions", [parts.prediction_table(judged)]),
    ]
    return Page(
        title=f"What 1/√d_k does: the scaling ablation, {grid.name} grid",
        notice="" if grid.confirmatory else f"{grid.name}: not confirmatory",
        headline=parts.headline(findings),
        facts=[("Cells", counts), ("Date", _known(meta, "date")), ("Commit", _known(meta, "commit"))],
        sections=[Section(title, blocks) for title, blocks in titled],
    )


def _known(meta: Mapping[str, Any], name: str) -> str:
    value = meta.get(name)
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in sorted(value.items())) or "not recorded"
    return "not recorded" if value in (None, "") else str(value)


def _limits(findings: Findings) -> list[Block]:
    cells = findings.cells
    results = [r["result"] for r in cells.done.values()]
    limits = [] if cells.grid.confirmatory else [f"The {cells.grid.name} grid is exploratory: it was not run to confirm."]
    if results:
        sizes = [r["num_parameters"] for r in results]
        steps = {s: max(r["result"]["steps"] for r in cells.select(s)) for s in sorted({k.study for k in cells.done})}
        limits.append(
            f"Small models (up to {max(sizes):,} parameters) and short runs "
            f"({', '.join(f'{study} {count}' for study, count in steps.items())} steps)."
        )
    pairs = {len(c.seeds) for c in parts.main(findings)}
    if pairs and min(pairs) < MIN_PAIRS:
        limits.append(f"{min(pairs)} paired seeds somewhere: under {MIN_PAIRS} no verdict is given.")
    if any(r.on_edge for r in findings.arms):
        edges = sum(r.on_edge for r in findings.arms)
        limits.append(f"{edges} choices of a rate lie on the edge of the grid; the optimum may be outside.")
    if findings.ladder and len({row.rung for row in findings.ladder}) == len(findings.ladder):
        limits.append("The ladder has one run a cell: it shows what can happen, not how often.")
    limits += [
        "The usable window is a share of few rates: it moves in steps, and only within the rates of this grid.",
        "Rates are chosen on the other seeds of the same grid, not on seeds of their own.",
    ]
    return [" ".join(limits)]


def _reproduce(cells: an.Cells, meta: Mapping[str, Any]) -> list[Block]:
    text = json.dumps(to_dict(cells.grid), sort_keys=True)
    seconds = an.finite(meta.get("wall_seconds"))
    rows = [
        ("command", _known(meta, "command")),
        ("commit", _known(meta, "commit")),
        ("grid hash (SHA-256)", hashlib.sha256(text.encode()).hexdigest()),
        ("versions", _known(meta, "versions")),
        ("hardware", _known(meta, "hardware")),
        ("date", _known(meta, "date")),
        ("wall time", "not recorded" if seconds is None else f"{number(seconds, 0)} s"),
    ]
    note = "Each cell is an ordinary training run; cells.csv holds the command that runs it alone, and its result."
    return [Table("What made this page.", ("what", "value"), rows), note]


# --- HTML


def _cell(text: str) -> str:
    if text in BADGES:
        return f'<td class="short"><span class="badge {BADGES[text]}">{html.escape(text)}</span></td>'
    return f'<td class="{"long" if len(text) > 30 else "short"}">{html.escape(text)}</td>'


def _html_table(table: Table) -> str:
    head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in table.headers)
    body = "\n".join(f"<tr>{''.join(_cell(c) for c in row)}</tr>" for row in table.rows)
    caption = html.escape(table.caption)
    inner = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    if table.folded:
        return f'<details><summary>{caption}</summary><div class="scroll"><table>{inner}</table></div></details>'
    return f'<p class="caption">{caption}</p><div class="scroll" tabindex="0"><table>{inner}</table></div>'


def _html_block(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{html.escape(block)}</p>"
    if isinstance(block, Table):
        return _html_table(block)
    title, caption = html.escape(block.title), html.escape(block.caption)
    data = base64.b64encode(block.png).decode()
    picture = f'<img alt="{title}. {caption}" width="{block.width}" src="data:image/png;base64,{data}">'
    return f"<figure><div>{picture}</div><figcaption><b>{title}.</b> {caption}</figcaption></figure>"


def to_html(page: Page) -> str:
    """One self-contained HTML document."""
    links = "".join(f'<a href="#s{i}">{i}. {html.escape(s.title)}</a>' for i, s in enumerate(page.sections, 1))
    facts = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in page.facts)
    said = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in page.headline[1:])
    notice = f'<p class="notice">{html.escape(page.notice)}</p>' if page.notice else ""
    sections = [
        f'<section><h2 id="s{i}">{i}. {html.escape(s.title)}</h2>\n' + "\n".join(map(_html_block, s.blocks)) + "</section>"
        for i, s in enumerate(page.sections, 1)
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{html.escape(page.title)}</h1>\n{notice}\n<div class="headline"><p>{html.escape(page.headline[0])}</p>'
        f"<ul>{said}</ul></div>\n"
        f"<dl>{facts}</dl>\n<nav>{links}</nav>\n" + "\n".join(sections) + "\n</main>\n</body>\n</html>\n"
    )


# --- Markdown, CSV and plain text


def _markdown(text: str) -> str:
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("_", "\\_").replace("*", "\\*")


def _markdown_block(block: Block) -> str:
    if isinstance(block, str):
        return _markdown(block)
    if isinstance(block, Drawing):
        return f"![{_markdown(block.title)}]({block.name}.png)\n\n{_markdown(block.caption)}"
    lines = [block.headers, tuple("---" for _ in block.headers), *block.rows]
    rows = "\n".join("| " + " | ".join(_markdown(cell) for cell in line) + " |" for line in lines)
    return f"{_markdown(block.caption)}\n\n{rows}"


def to_markdown(page: Page) -> str:
    """The same report for a repository's front page; the figures are the PNG files beside it."""
    notice = [f"**{_markdown(page.notice)}**"] if page.notice else []
    said = "\n- ".join(_markdown(sentence) for sentence in page.headline).replace("\n-", "\n\n-", 1)
    facts = "\n".join(f"- {_markdown(k)}: {_markdown(v)}" for k, v in page.facts)
    sections = [f"# {_markdown(page.title)}", *notice, said, facts]
    for i, section in enumerate(page.sections, 1):
        sections += [f"## {i}. {_markdown(section.title)}", *map(_markdown_block, section.blocks)]
    return "\n\n".join(sections) + "\n"


def to_csv(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([headers, *rows])
    return buffer.getvalue()


def to_text(table: Table, width: int = 100) -> str:
    """A table for a terminal: columns as wide as their content, the last one cut at ``width``."""
    lines = [table.headers, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.headers))]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    cut = [line if len(line) <= width else line[: width - 1] + "…" for line in text]
    return "\n".join([*textwrap.wrap(table.caption, width), *cut])


# --- what the terminal and the CSV show


def summary_text(findings: Findings, judged: Sequence[Prediction]) -> str:
    """Counts, verdicts, ladder, null control and predictions in at most 100 columns."""
    cells = findings.cells
    counts = (
        f"{cells.grid.name}{'' if cells.grid.confirmatory else ' (not confirmatory)'}: {len(cells.expected)} cells "
        f"expected, {len(cells.done)} done, {len(cells.failed)} failed, {len(cells.missing)} missing"
    )
    blocks = [counts]
    rows = [_summary_row(c) for c in parts.main(findings)]
    if rows:
        headers = ("", "recall under", "seeds", *ARMS, "change", "95 % interval", "p", "verdict")
        blocks.append(to_text(Table("E1 accuracy at the best rate, E2 usable window; * primary.", headers, rows)))
    if findings.ladder:
        blocks.append(to_text(_ladder_summary(findings)))
    if findings.null:
        equal = sum(p.equal is True for p in findings.null)
        blocks.append(f"null control: {equal} of {len(findings.null)} full_fold runs bitwise equal to inv_sqrt")
    if judged:
        blocks.append("\n".join(textwrap.wrap("predictions: " + ", ".join(f"{p.name} {p.status}" for p in judged), 100)))
    return "\n\n".join(blocks)


def _summary_row(c: Comparison) -> tuple[str, ...]:
    e = c.effect
    means = (number(mean(e.reference)), number(mean(e.treatment)), signed(e.difference)) if e else ("–", "–", "–")
    p = p_text(c.p_adjusted if c.primary else c.p_harm)
    where = an.condition_text(c.condition).replace("init ", "")
    interval = span(e.interval) if e and e.interval else "–"
    return (c.endpoint, where + ("*" if c.primary else ""), str(len(c.seeds)), *means, interval, p, c.judgement.word)


def _ladder_summary(findings: Findings) -> Table:
    rows = []
    for row in findings.ladder:
        outcomes = [run["result"]["outcome"] if run else "–" for run in (row.reference, row.treatment)]
        losses = [number(an.loss_of(run), 2) if run else "–" for run in (row.reference, row.treatment)]
        ratio = number(row.gradient_ratio, 1)
        note = row.signs[0] if row.signs else "both fail" if row.both_fail else ""
        rows.append((row.rung, *losses, *outcomes, ratio, note))
    headers = ("ladder", *ARMS, *("outcome" for _ in ARMS), "gradients", "instability without the scale")
    return Table("Stress ladder: loss in nats, outcome, ratio of the median gradient norms.", headers, rows)


RESULT_COLUMNS = (
    "outcome",
    "accuracy",
    "val_loss",
    "initial_loss",
    "steps",
    "nonfinite_step",
    "grad_norm_median",
    "grad_norm_max",
    "spike_share",
    "num_parameters",
    "loss_digest",
)


def cells_csv(cells: an.Cells) -> str:
    """One line an expected cell, missing ones included, in the order of their keys; empty where nothing was measured."""
    factors = sorted({name for key in cells.expected for name, _ in key.factors})
    headers = ["study", "arm", *factors, "seed", "status", *RESULT_COLUMNS, "seconds", "cell", "error", "command"]
    rows = []
    for key in cells.expected:
        record = cells.done.get(key) or cells.failed.get(key) or {"status": "missing"}
        result = record.get("result") or {}
        levels = dict(key.factors)
        values = [key.study, key.arm, *(levels.get(f) for f in factors), key.seed, record["status"]]
        values += [result.get(name) for name in RESULT_COLUMNS]
        values += [record.get(name) for name in ("seconds", "cell", "error", "command")]
        rows.append(["" if value is None else str(value) for value in values])
    return to_csv(headers, rows)
