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
from minitx.ablation.judge import Finding, Findings, Threshold, answers, slopes
from minitx.analysis.canvas import DPI, png, svg
from minitx.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS = ("steps", "cap", "val_loss", "val_accuracy", "nonfinite_step", "low", "high", "start_error", "parameters", "digest")
"""The numbers of a result in the table of runs."""


@dataclass(frozen=True)
class Table:
    """A table. Each row maps the name of a column to its text. Unless ``is_open``, it is shown after a click on its caption."""

    caption: str
    rows: Sequence[Mapping[str, str]]
    is_open: bool = True


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
    about, grid, own = module_of(findings.grid), findings.grid, study_pictures(findings)

    def of_question(part: str, otherwise: list[Any]) -> list[Any]:
        return getattr(about, part)(findings) if hasattr(about, part) else otherwise  # type: ignore[no-any-return]

    sentences = of_question("sentences", []) or [_sentence(grid, f) for f in findings.findings if f.pairs][:6]
    sentences = sentences or ["No comparison of this grid has a pair: two finished runs of the same seed."]
    first = of_question("figure", own[:1])
    sections = [
        Section("Numbers", [_numbers(findings), _slopes(findings)]),
        *of_question("sections", []),
        Section("Figures", [picture for picture in own if picture not in first]),
        Section("Controls", _controls(findings)),
        Section("Predictions", [_predictions(findings)]),
        Section("Limits", [*of_question("limits", []), *_limits(findings)]),
        Section("What was run, and how to run it again", [_runs(findings), _not_done(findings), *_reproduce(meta)]),
    ]
    sections = [Section(each.title, [block for block in each.blocks if getattr(block, "rows", True)]) for each in sections]
    sections = [section for section in sections if section.blocks]
    pictures = [*first, *(block for section in sections for block in section.blocks if isinstance(block, Picture))]
    page = {
        **{"title": grid.question, "sentences": sentences, "pictures": first, "sections": sections, "dpi": DPI},
        "notes": [text for text in (grid.note, _incomplete(findings)) if text],
        "images": _write_figures(pictures, folder / "figures"),
    }
    for name in ("report.html", "summary.md"):
        (folder / name).write_text(_template(name).render(page), encoding="utf-8")
    _write_cells(findings, folder / "cells.csv")
    return sentences


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
        row: dict[str, Any] = {"study": run.study, "arm": run.arm, **dict(run.factors), "seed": run.seed}
        row |= {"status": run.status, **{name: run.record.get(name) for name in ("reason", "seconds", "command")}}
        if run.status == "done":
            row |= {name: run.result.get(name) for name in NUMBERS} | run.result.get("measures", {})
        rows.append(row)
    pandas.DataFrame(rows).to_csv(path, index=False, lineterminator="\n")


# --- numbers


def _sentence(grid: AblationConfig, f: Finding) -> str:
    """A finding in one sentence, for a grid without a module of its own."""
    reference, treatment = f.comparison.arms
    where = ": ".join(text for text in (say.title(grid, f.comparison.study), say.condition_text(grid, f.condition)) if text)
    kind = "ratio" if f.endpoint.is_ratio else "difference"
    arms = f"“{say.words(grid, treatment)}” against “{say.words(grid, reference)}”"
    return f"{where}. {say.words(grid, f.endpoint.text).capitalize()}, {arms}: {f.word}, {kind} {say.span_text(f.estimate)} {_basis(f)}."


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
        values = [median([pair.values[i] for pair in f.pairs], ratio=f.endpoint.is_ratio) for i in range(2)]
        bound, formula = (None if value is None else say.number(value) for value in (f.bound, f.predicted))
        row = {
            "study": say.title(grid, f.comparison.study),
            "setting": say.condition_text(grid, f.condition),
            "what": say.words(grid, f.endpoint.text),
            "first arm": f"{say.words(grid, f.comparison.arms[0])}: {say.span_text(values[0])}",
            "second arm": f"{say.words(grid, f.comparison.arms[1])}: {say.span_text(values[1])}",
            "ratio or difference": say.span_text(f.estimate),
            "range": _basis(f),
            "predicted": f"{formula} (formula), at most {bound}" if formula else bound or "",
            "second arm has": f.word + (" (a rate at the edge of those tried)" if f.at_edge else ""),
        }
        rows.append(row)
    caption = (
        "Medians over the seeds; times and scores at the rate that is best on the other seeds. The ratio of times is second / first, that of largest stable rates first / second. The range is that of the "
        "median, by order statistics, with its coverage; fewer than five seeds have none. MORE and LESS: the whole range is beyond the margin "
        f"(× {grid.ratio_margin:g}, or {grid.score_margin:g}); SAME: it is within"
    )
    return Table(caption, rows)


def _slopes(findings: Findings) -> Table:
    """The exponents of the ratios of thresholds over the factor of a law."""
    grid, rows, series = findings.grid, [], dict[Any, list[Finding]]()
    for f in findings.findings:
        if f.endpoint.name == "threshold" and f.pairs and f.comparison.law:
            others = tuple(level for level in f.condition.items() if level[0] != f.comparison.law.factor)
            series.setdefault((f.comparison, f.comparison.law, others), []).append(f)
    for (comparison, law, _), listed in series.items():
        values = slopes(listed)
        if (found := mean_interval(values)) is not None:
            row = {
                "study": say.title(grid, comparison.study),
                "exponent over " + say.words(grid, law.factor): say.number(found[0]),
                "95 % (Student's t)": say.span_text(found[1]),
                "of the law": say.number(law.power),
                "seeds": str(len(values)),
            }
            rows.append(row)
    return Table("Exponents of the ratios: the mean of the slopes of single seeds", rows)


def _controls(findings: Findings) -> list[Block]:
    """The null control, and the equal start of continued runs."""
    grid, rows = findings.grid, []
    for e in findings.equalities:
        if e.equal:
            row = {"arms": say.list_text([say.words(grid, arm) for arm in e.comparison.arms])}
            row["setting"] = say.condition_text(grid, e.condition)
            row["losses that are equal"] = f"{sum(e.equal.values())} of {say.count_text(len(e.equal), 'seed')}, {e.steps} steps"
            rows.append(row | {"result": "EQUAL" if all(e.equal.values()) else "DIFFERENT"})
    results = [run.result for run in findings.runs.all if run.status == "done"]
    errors = [result["start_error"] for result in results if result.get("start_error") is not None]
    said = (
        f"Continued models start as the same function: of {len(errors):,} the largest difference of the outputs at the start is "
        f"{max(errors, default=0):.0e} of the largest output."
    )
    return [Table("Two ways to write the same model must have the same losses, bit for bit", rows), *([said] if errors else [])]


def _predictions(findings: Findings) -> Table:
    rows = []
    for statement, finding, measured, status in answers(findings):
        where = say.condition_text(findings.grid, finding.condition)
        rows.append({"prediction": statement, "where": where, "status": status, "measured": say.span_text(measured)})
    rows.sort(key=lambda row: ("NOT HELD", "UNDECIDED", "HELD").index(row["status"]))
    return Table("Written before the runs; what did not hold comes first", rows)


def _limits(findings: Findings) -> list[str]:
    """The limits that apply to this grid."""
    said, results = [], [run.result for run in findings.runs.all if run.status == "done"]
    if results:
        size, steps = (max(result[name] for result in results) for name in ("parameters", "cap"))
        said.append(f"The models are small (up to {size:,} parameters) and the runs are short (up to {steps:,} steps).")
    above = [bool(result["above"]) for result in results if "above" in result]
    if any(above):
        said.append(
            f"In {sum(above)} of {len(above)} searches a rate above the first failure was stable again. The first failure counts."
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
        runs, done = findings.runs.select(name), findings.runs.select(name, status="done")
        levels = [
            f"{say.words(grid, f).rstrip(':')}: {', '.join(say.words(grid, n) for n in names)}"
            for f, names in study.factors.items()
        ]
        if done:
            row = {"study": say.title(grid, name), "arms": ", ".join(say.words(grid, arm) for arm in study.arms)}
            row |= {
                "settings": "; ".join(levels),
                "seeds": say.count_text(len(study.seeds), "seed"),
                "length": say.budget(done),
            }
            rows.append(row | {"done": f"{len(done)} of {len(runs)}"})
    return Table(_counted(findings), rows)


def _not_done(findings: Findings) -> Table:
    """Every run that is not done, with its reason."""
    runs = sorted((run for run in findings.runs.all if run.status != "done"), key=lambda run: run.status)
    rows = [{"run": str(run), "status": run.status, "reason": run.record.get("reason") or ""} for run in runs]
    return Table(f"Runs that failed, are missing, or were left out ({len(rows)})", rows, is_open=False)


def _reproduce(meta: Mapping[str, Any]) -> list[Block]:
    rows = []
    for name in ("command", "commit", "date", "hardware", "versions", "wall_seconds"):
        if value := meta.get(name):
            text = ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, Mapping) else str(value)
            rows.append({"what": name.replace("_", " "), "value": f"{value:.0f}" if isinstance(value, float) else text})
    said = "Every run is an ordinary training run. cells.csv has the command that runs it alone; cells.jsonl has its curves."
    return [said, Table("What made this page", rows)]


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
            said = "Every dot is a seed. The formula predicts from the first arm alone."
            found.append(Picture(f"{name}_threshold", f"{title}: {Threshold.text}", said, drawn))
        for score in study.scores if runs else ():
            if score != "equal" and study.factors.get("lr"):
                y, missing = ("steps to solve", "not solved") if score == "time" else (f"validation {score}", "not finite")
                drawn = curves.by_rate(findings, name, score, y, missing)
                said = f"Every finished run is a dot; lines join the medians over seeds. Budget: {say.budget(runs)}."
                found.append(Picture(f"{name}_{score}", f"{title}: {y}", said, drawn))
    return found
