"""A report as data, and the same data as HTML, as Markdown and as text for a terminal.

All text is escaped here, in one place. The HTML holds its style and its pictures: it asks the network for nothing.
"""

from __future__ import annotations

import base64
import html
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """Rows of text; ``folded`` hides a long table behind its caption in HTML."""

    caption: str
    headers: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    folded: bool = False


class Drawing(NamedTuple):
    """One figure of the report: file name without ending, title, what it shows, width in pixels, and its PNG bytes."""

    name: str
    title: str
    caption: str
    width: int
    png: bytes


Block = str | Table | Drawing


class Section(NamedTuple):
    title: str
    blocks: Sequence[Block]


class Page(NamedTuple):
    """A report: the ``headline`` sentences say it all, ``notice`` stands above, ``facts`` are label and value pairs."""

    title: str
    notice: str
    headline: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]


BADGES = {
    **dict.fromkeys(("NO HARM", "HELD", "PASS", "EQUAL"), "good"),
    **dict.fromkeys(("HARM", "NOT HELD", "FAIL", "CONTRADICTED", "DIFFERENT"), "bad"),
    **dict.fromkeys(("INCONCLUSIVE", "NOT TESTED", "NOT RUN", "TEST", "NOT CONTRADICTED"), "open"),
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
.notice { background: var(--note-back); color: var(--note); padding: .5rem .8rem; border-radius: 6px; font-weight: 600;
  max-width: none; }
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


# --- Markdown and plain text


def _markdown(text: str) -> str:
    plain = re.sub(r"[\\|_*`]|\](?=[(:])", r"\\\g<0>", " ".join(text.split()))  # no table, no emphasis, no link begins or ends
    return html.escape(plain, quote=False)


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


def to_text(table: Table, width: int = 100) -> str:
    """A table for a terminal: columns as wide as their content, the last one cut at ``width``."""
    lines = [table.headers, *table.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.headers))]
    text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    cut = [line if len(line) <= width else line[: width - 1] + "…" for line in text]
    return "\n".join([*textwrap.wrap(table.caption, width), *cut])
