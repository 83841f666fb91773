"""The report of a grid: one HTML file, its figures, a Markdown summary, and a table of the runs.

A grid's ``about`` names a module for its question, which may define any of

``sentences(findings) -> list[str]``   the first screen's sentences
``figure(findings) -> list[Picture]``  the first screen's figures
``sections(findings) -> list[Section]``  sections after the table of numbers
``limits(findings) -> list[str]``      sentences of the section on limits

The rest is the same for every grid: one table of numbers, figures, controls, predictions, limits, and how to run it again.
"""

from __future__ import annotations

import base64
import html
import importlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from minitx.ablation import curves
from minitx.ablation import wording as say
from minitx.ablation.design import AblationConfig
from minitx.ablation.intervals import mean_interval, median
from minitx.ablation.judge import Finding, Findings, Threshold, answers
from minitx.analysis.canvas import DPI, png, svg
from minitx.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS = ("steps", "cap", "val_loss", "val_accuracy", "nonfinite_step", "low", "high", "start_error", "parameters", "digest")
"""The numbers of a result in the table of runs."""


@dataclass(frozen=True)
class Table:
    """A table. Each row maps the name of a column to its text. ``is_open``: shown at once, not only after a click on its caption."""

    caption: str
    rows: Sequence[Mapping[str, str]]
    is_open: bool = False


@dataclass(frozen=True)
class Picture:
    """A figure with a unique name, a title, and a description."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def file(self) -> str:
        """The name of its files, without the ending."""
        return quote(self.name, safe="")


Block = str | Table | Picture


@dataclass(frozen=True)
class Section:
    """A section of the page. Tables without rows and sections without blocks are left out."""

    title: str
    blocks: Sequence[Block]


def module_of(grid: AblationConfig) -> Any:
    """Return the module ``about``, or None.

    Raises:
        ConfigError: it cannot be imported.
    """
    if grid.about is None:
        return None
    try:
        return importlib.import_module(grid.about)
    except (ImportError, TypeError, ValueError) as error:  # also of a name that cannot be one
        raise ConfigError(f"about={grid.about} cannot be imported: {error}") from error


def write_report(findings: Findings, folder: Path, *, meta: Mapping[str, Any]) -> list[str]:
    """Write ``report.html``, ``summary.md``, ``cells.csv`` and ``figures/`` into ``folder``, and return the first screen's sentences.

    Equal runs give equal files in any order of the records. Only ``meta`` changes the files.

    Args:
        meta: how the records were made: ``commit``, ``command``, ``date``, ``hardware``, ``versions`` (a mapping),
            ``wall_seconds``.
    """
    about = module_of(findings.grid)

    def of_question(part: str, otherwise: list[Any]) -> list[Any]:
        return getattr(about, part)(findings) if hasattr(about, part) else otherwise  # type: ignore[no-any-return]

    sentences = of_question("sentences", []) or [_sentence(findings, f) for f in findings.findings if f.pairs][:6]
    sentences = sentences or ["No comparison of this grid has a pair: two finished runs of the same seed."]
    first = of_question("figure", study_pictures(findings)[:1])
    sections = [
        Section("Numbers", [_numbers(findings), *_slopes(findings)]),
        *of_question("sections", []),
        Section("Figures", study_pictures(findings)),
        Section("Controls", _controls(findings)),
        Section("Predictions", [_predictions(findings)]),
        Section("Limits", [*of_question("limits", []), *_limits(findings)]),
        Section("What was run, and how to run it again", [_runs(findings), _not_done(findings), *_reproduce(meta)]),
    ]
    sections = _worth_showing(sections, first)
    pictures = [*first, *(block for section in sections for block in section.blocks if isinstance(block, Picture))]
    page = {
        "title": findings.grid.question,
        "sentences": sentences,
        "notes": [text for text in (findings.grid.note, _incomplete(findings)) if text],
        "pictures": first,
        "sections": sections,
        "images": _write_figures(pictures, folder / "figures"),
        "dpi": DPI,
    }
    for name in ("report.html", "summary.md"):
        (folder / name).write_text(_template(name).render(page), encoding="utf-8")
    _write_cells(findings, folder / "cells.csv")
    return sentences


def _worth_showing(sections: Sequence[Section], first: Sequence[Picture]) -> list[Section]:
    """Without the figures of the first screen, tables without rows, and then sections without blocks."""
    shown = {picture.name for picture in first}

    def is_news(block: Block) -> bool:
        if isinstance(block, Picture):
            return block.name not in shown
        return not isinstance(block, Table) or bool(block.rows)

    kept = [Section(section.title, [block for block in section.blocks if is_news(block)]) for section in sections]
    return [section for section in kept if section.blocks]


def _write_figures(pictures: Sequence[Picture], folder: Path) -> dict[str, str]:
    """Write each figure as PNG and SVG. Returns the PNG files in base 64, by the name of the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {}
    for picture in pictures:
        picture.figure.draw_without_rendering()
        picture.figure.set_layout_engine("none")  # it is laid out once, not again for each file
        image = png(picture.figure)
        (folder / f"{picture.file}.png").write_bytes(image)
        (folder / f"{picture.file}.svg").write_bytes(svg(picture.figure))
        images[picture.name] = base64.b64encode(image).decode()
    return images


def _template(name: str) -> Any:
    """A template of this package. HTML is escaped in the page; the summary has the filter ``markdown``."""
    import jinja2

    loader = jinja2.PackageLoader("minitx.ablation", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=name.endswith(".html"), trim_blocks=True, lstrip_blocks=True)
    environment.filters["markdown"] = _markdown
    return environment.get_template(f"{name}.j2")


def _markdown(text: str) -> str:
    """Text in which no table, emphasis, link or tag begins or ends."""
    return html.escape(re.sub(r"[\\|_*`\[\]$]", r"\\\g<0>", " ".join(text.split())), quote=False)


def _write_cells(findings: Findings, path: Path) -> None:
    """One row a run or threshold: its place, its status, and its numbers."""
    import pandas

    rows = []
    for run in findings.runs.all:
        row: dict[str, Any] = {"study": run.study, "arm": run.arm, **dict(run.place.factors), "seed": run.seed}
        row |= {"status": run.status, **{name: run.record.get(name) for name in ("reason", "seconds", "command")}}
        if run.status == "done":
            row |= {name: run.result.get(name) for name in NUMBERS} | run.result.get("measures", {})
        rows.append(row)
    pandas.DataFrame(rows).to_csv(path, index=False, lineterminator="\n")


# --- numbers


def _sentence(findings: Findings, f: Finding) -> str:
    """A finding in one sentence, for a grid without a module of its own."""
    grid, (reference, treatment) = findings.grid, f.comparison.arms
    where = ": ".join(text for text in (say.title(grid, f.comparison.study), say.condition_text(grid, f.condition)) if text)
    kind = "ratio" if f.endpoint.is_ratio else "difference"
    arms = f"“{say.words(grid, treatment)}” against “{say.words(grid, reference)}”"
    return f"{where}. {_endpoint(grid, f).capitalize()}, {arms}: {f.word}, {kind} {say.span_text(f.estimate)} {_basis(f)}."


def _endpoint(grid: AblationConfig, f: Finding) -> str:
    return say.words(grid, f.endpoint.text)


def _basis(f: Finding) -> str:
    """The seeds and the interval that a number rests on."""
    if f.interval is None:
        return f"({say.count_text(len(f.pairs), 'seed')}: no interval)"
    return f"({say.span_text(f.interval[0])}; {say.count_text(len(f.pairs), 'seed')}, {f.interval[1]:.1%})"


def _numbers(findings: Findings) -> Table:
    """The one table: every comparison with its numbers."""
    grid, rows = findings.grid, []
    for f in findings.findings:
        if not f.pairs:
            continue
        sides = [pair.reference for pair in f.pairs], [pair.treatment for pair in f.pairs]
        values = [median(side, ratio=f.endpoint.is_ratio) for side in sides]
        predicted = [] if f.predicted is None else [f"{say.number(f.predicted)} (formula)"]
        predicted += [] if f.bound is None else [f"{'at most ' if f.predicted else ''}{say.number(f.bound)}"]
        row = {
            "study": say.title(grid, f.comparison.study),
            "setting": say.condition_text(grid, f.condition),
            "what": _endpoint(grid, f),
            "first arm": f"{say.words(grid, f.comparison.arms[0])}: {say.span_text(values[0])}",
            "second arm": f"{say.words(grid, f.comparison.arms[1])}: {say.span_text(values[1])}",
            "ratio or difference": say.span_text(f.estimate),
            "range": _basis(f),
            "predicted": ", ".join(predicted),
            "second arm has": f.word + (" (a rate at the edge of those tried)" if f.at_edge else ""),
        }
        rows.append(row)
    caption = (
        "Medians over the seeds. The ratio of times is second / first, that of largest stable rates first / second. The range is that of the "
        "median, by order statistics, with its coverage. MORE and LESS: the whole range is beyond the margin "
        f"(× {grid.ratio_margin:g}, or {grid.score_margin:g}); SAME: it is within"
    )
    return Table(caption, rows, is_open=True)


def _slopes(findings: Findings) -> list[Table]:
    """The exponents of the ratios of thresholds over the factor of a law."""
    rows = []
    for comparison in findings.grid.comparisons:
        law, name = comparison.law, comparison.study
        conditions = [f.condition for f in findings.find(name, "threshold", comparison.arms)] if law else []
        others = [{k: v for k, v in condition.items() if law and k != law.factor} for condition in conditions]
        for i, other in enumerate(others):
            slopes = findings.slopes(name, comparison.arms, law.factor, other) if law and other not in others[:i] else []
            if (found := mean_interval(slopes)) is not None:
                rows.append(
                    {
                        "study": say.title(findings.grid, name),
                        "exponent over " + say.words(findings.grid, law.factor if law else ""): say.number(found[0]),
                        "95 % (Student's t)": say.span_text(found[1]),
                        "of the law": say.number(law.power if law else None),
                        "seeds": str(len(slopes)),
                    }
                )
    return [Table("Exponents of the ratios: the mean of the slopes of single seeds", rows, is_open=True)]


def _controls(findings: Findings) -> list[Block]:
    """The null control, and the equal start of continued runs."""
    grid, rows = findings.grid, []
    for e in findings.equalities:
        row = {
            "arms": say.list_text([say.words(grid, arm) for arm in e.comparison.arms]),
            "setting": say.condition_text(grid, e.condition),
            "losses that are equal": f"{sum(e.equal.values())} of {say.count_text(len(e.equal), 'seed')}, {e.steps} steps",
            "result": "EQUAL" if all(e.equal.values()) else "DIFFERENT",
        }
        rows += [row] if e.equal else []
    done = [run for run in findings.runs.all if run.status == "done"]
    errors = [run.result["start_error"] for run in done if run.result.get("start_error") is not None]
    blocks: list[Block] = [Table("Two ways to write the same model must have the same losses, bit for bit", rows, is_open=True)]
    if errors:
        blocks.append(
            f"Continued models start as the same function: of {len(errors):,} the largest difference of the outputs at the start is "
            f"{max(errors):.0e} of the largest output."
        )
    return blocks


def _predictions(findings: Findings) -> Table:
    rows = []
    for answer in answers(findings):
        where = say.condition_text(findings.grid, answer.finding.condition) if answer.finding else ""
        row = {"prediction": answer.statement, "where": where, "status": answer.status}
        rows.append(row | {"measured": say.span_text(answer.measured)})
    order = ("NOT HELD", "UNDECIDED", "HELD", "NOT RUN")
    rows.sort(key=lambda row: order.index(row["status"]))
    return Table("Written before the runs; what did not hold comes first", rows, is_open=True)


def _limits(findings: Findings) -> list[str]:
    """The limits that apply to this grid."""
    said, results = [], [run.result for run in findings.runs.all if run.status == "done"]
    if results:
        size, steps = (max(result[name] for result in results) for name in ("parameters", "cap"))
        said.append(f"The models are small (up to {size:,} parameters) and the runs are short (up to {steps:,} steps).")
    if any(f.pairs and f.interval is None for f in findings.findings):
        said.append("Some comparisons have fewer than five pairs, which give no range and no word.")
    above = sum(bool(result.get("above")) for result in results)
    if above:
        total = sum("above" in result for result in results)
        said.append(
            f"In {above} of {total} searches a rate above the first failure was stable again. The first failure counts."
        )
    return said


# --- what was run


def _incomplete(findings: Findings) -> str:
    is_whole = not {run.status for run in findings.runs.all} & {"failed", "missing"}
    return "" if is_whole else f"The grid is not complete. {_counted(findings)} They are listed below."


def _counted(findings: Findings) -> str:
    total = Counter(str(run.status) for run in findings.runs.all)
    said = ", ".join(f"{total[status]} {status}" for status in ("done", "not run", "failed", "missing") if total[status])
    return f"{say.count_text(total.total(), 'run')} and searches: {said}."


def _runs(findings: Findings) -> Table:
    grid, rows = findings.grid, []
    for name, study in grid.studies.items():
        runs = findings.runs.select(name)
        levels = [f"{say.words(grid, f)}: {', '.join(say.words(grid, n) for n in names)}" for f, names in study.factors.items()]
        done = [run for run in runs if run.status == "done"]
        row = {
            "study": say.title(grid, name),
            "arms": ", ".join(say.words(grid, arm) for arm in study.arms),
            "settings": "; ".join(levels),
            "seeds": say.count_text(len(study.seeds), "seed"),
            "length": say.budget(done) if done else "",
            "done": f"{len(done)} of {len(runs)}",
        }
        rows += [row] if done else []
    return Table(_counted(findings), rows, is_open=True)


def _not_done(findings: Findings) -> Table:
    """Every run that is not done, with its reason."""
    rows = [
        {"run": str(run.place), "status": run.status, "reason": run.record.get("reason") or ""}
        for run in sorted(findings.runs.all, key=lambda run: run.status)
        if run.status != "done"
    ]
    return Table(f"Runs that failed, are missing, or were left out ({len(rows)})", rows)


def _reproduce(meta: Mapping[str, Any]) -> list[Block]:
    rows = []
    for name in ("command", "commit", "date", "hardware", "versions", "wall_seconds"):
        value = meta.get(name) or "not recorded"
        text = ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, Mapping) else str(value)
        rows.append({"what": name.replace("_", " "), "value": f"{value:.0f}" if isinstance(value, float) else text})
    said = "Every run is an ordinary training run. cells.csv has the command that runs it alone; cells.jsonl has its curves."
    return [said, Table("What made this page", rows, is_open=True)]


def study_pictures(findings: Findings) -> list[Picture]:
    """Return a figure for each endpoint of each judged study: thresholds against the factor of a law, other runs against the rate."""
    found = []
    for name, study in findings.grid.studies.items():
        runs = findings.runs.select(name, status="done")
        title = say.title(findings.grid, name)
        listed = [f for f in findings.findings if f.comparison.study == name and f.pairs]
        with_law = [f for f in listed if f.comparison.law and not f.comparison.law.part(f.condition)]
        if study.threshold is not None and with_law:
            drawn = curves.threshold_panel(findings, [f for f in with_law if f.comparison == with_law[0].comparison])
            said = "Every dot is a seed. Solid: what the formula predicts from the first arm; dashed: its upper bound."
            found.append(Picture(f"{name}_threshold", f"{title}: {Threshold.text}", said, drawn))
        for score in study.scores if runs else ():
            if score != "equal" and study.factors.get("lr"):
                y, missing = ("steps to solve", "not solved") if score == "time" else (f"validation {score}", "not finite")
                drawn = curves.by_rate(findings, name, score, y, missing)
                said = f"Every finished run is a dot; lines join the medians over seeds. Budget: {say.budget(runs)}."
                found.append(Picture(f"{name}_{score}", f"{title}: {y}", said, drawn))
    return found
