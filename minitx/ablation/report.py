"""The report of a grid: an HTML file, its figures, a Markdown summary, and a table of the runs.

``about`` of a grid names a module for its question. The module may define any of

``sentences(findings) -> list[str]``   sentences at the top
``figure(findings) -> list[Picture]``  figures at the top
``sections(findings) -> list[Section]``  sections after the table of numbers
``limits(findings) -> list[str]``      sentences for the section on limits

The rest is the same for every grid: a table of numbers, figures, controls, predictions, limits, and instructions to reproduce
it. The page is in English and Chinese (see ``minitx.ablation.formatting``). A ``Text`` of the module has both, a string is English.
"""

from __future__ import annotations

import base64
import html
import importlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from minitx.ablation import curves
from minitx.ablation.design import AblationConfig, ComparisonConfig
from minitx.ablation.formatting import (
    Text,
    capital,
    caps_text,
    chinese,
    condition_text,
    list_text,
    number,
    range_text,
    say,
    seeds_text,
    sides,
    span_text,
    title,
    words,
)
from minitx.ablation.intervals import Span, median
from minitx.ablation.judge import RATIOS, Contrast, Findings, Parts, middle, slopes, verdicts
from minitx.canvas import DPI, png, svg
from minitx.config import ConfigError
from minitx.estimates import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS = ("steps", "cap", "val_loss", "val_accuracy", "nonfinite_step", "low", "high", "start_error", "parameters", "digest")
"""The numbers of a result in the table of runs."""

FACTS = ("study", "arm", "seed", "status", "reason", "seconds", "command")
"""The other columns of the table of runs, in addition to one for each factor."""

CAPTIONS = {
    "numbers": "Medians over the seeds; times and scores at the rate that is best on the other seeds. Ratios of times are second / first, ratios of largest stable rates first / second. The range covers the median, by order statistics, with the coverage beside it; fewer than five seeds have no range. For largest stable rates, it leaves out the last step of the search; the words add this step to both ends. MORE and LESS: the whole range is beyond the margin (× %(ratio)s, or %(score)s); SAME: the whole range is within the margin",
    "shares": "What limits the largest stable rate η* of the first arm: medians over the seeds. η_QK if W_Q and W_K alone train, η_R if the rest alone trains. The share of W_Q and W_K is (1 / η_QK) / (1 / η_QK + 1 / η_R), and the formula's ratio 1 + (bound − 1) · share",
    "bounds": "η* and its bounds for each seed: %(between)s of %(searches)s lie between them. The lower bound is 1 / (1 / η_QK + 1 / η_R), the upper bound the smaller one of η_QK and η_R. Between: the bracket of η* overlaps the range from the lower to the upper bound, whose ends are known within brackets, too",
}
"""The captions of the tables of numbers."""

HOOKS = ("sentences", "figure", "sections", "limits")
"""Functions that a module ``about`` may define."""


@dataclass(frozen=True)
class Table:
    """A table. Each row maps column names to texts. If ``is_open`` is False, the table is hidden until its caption is clicked."""

    caption: str
    rows: Sequence[Mapping[str, str]]
    is_open: bool = True


@dataclass(frozen=True)
class Picture:
    """A figure with a unique name, a title and a caption."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def file(self) -> str:
        """The name of its files, without the suffix."""
        return quote(self.name, safe="")


@dataclass(frozen=True)
class Section:
    """A section of the page. Tables without rows and sections without blocks are omitted."""

    title: str
    blocks: Sequence[str | Table | Picture]


def module_of(grid: AblationConfig) -> Any:
    """Return the module that ``about`` names, or None.

    Raises:
        ConfigError: the module cannot be imported, or defines none of ``HOOKS``.
    """
    if grid.about is None:
        return None
    try:
        module = importlib.import_module(grid.about)
    except (ImportError, TypeError, ValueError) as error:  # invalid module names raise the last two
        raise ConfigError(f"ablation.about={grid.about} cannot be imported: {error}") from error
    if not any(hasattr(module, name) for name in HOOKS):
        raise ConfigError(f"ablation.about={grid.about} must define at least one of {', '.join(HOOKS)}")
    return module


def write_report(findings: Findings, folder: Path, *, meta: Mapping[str, Any]) -> list[str]:
    """Write ``report.html``, ``summary.md``, ``cells.csv`` and ``figures/`` into ``folder``, and return the sentences at the top.

    The files depend only on the grid, the runs and ``meta``, and not on the order of the records.

    Args:
        meta: the origin of the records: ``commit``, ``command``, ``date``, ``hardware``, ``versions`` (a mapping),
            ``wall_seconds``.
    """
    about, grid, pictures_of_studies = module_of(findings.grid), findings.grid, study_pictures(findings)

    def of_question(part: str, otherwise: list[Any]) -> list[Any]:
        return getattr(about, part)(findings) if hasattr(about, part) else otherwise  # type: ignore[no-any-return]

    sentences = of_question("sentences", []) or [_comparison_sentence(grid, f) for f in findings.findings[:6]]
    sentences = sentences or ["No comparison of this grid has a pair: two finished runs of the same seed."]
    first = of_question("figure", pictures_of_studies[:1])
    results = [run.result for run in findings.runs.all if run.status == "done"]
    sections = [
        Section("Numbers", [_number_table(findings), _slope_table(findings), _share_table(findings), _bound_table(findings)]),
        *of_question("sections", []),
        Section("Figures", [picture for picture in pictures_of_studies if picture not in first]),
        Section("Controls", [_controls(findings), *_starts(results)]),
        Section("Predictions", [_predictions(findings)]),
        Section("Limits", [*of_question("limits", []), *_limits(results)]),
        Section("What was run, and how to run it again", [_runs(findings), _not_done(findings), *_reproduce(meta)]),
    ]
    shown = (Section(each.title, [block for block in each.blocks if getattr(block, "rows", True)]) for each in sections)
    sections = [section for section in shown if section.blocks]
    pictures = [*first, *(block for section in sections for block in section.blocks if isinstance(block, Picture))]
    page = {
        **{"title": grid.question, "sentences": sentences, "pictures": first, "sections": sections, "dpi": DPI},
        "notes": [note for note in (grid.note, _incomplete(findings)) if note],
        "images": _write_figures(pictures, folder / "figures"),
    }
    for name in ("report.html", "summary.md"):
        (folder / name).write_text(_template(name).render(page), encoding="utf-8")
    _write_cells(findings, folder / "cells.csv")
    return sentences


def _write_figures(pictures: Sequence[Picture], folder: Path) -> dict[str, str]:
    """Write each figure as PNG and SVG, and return the PNG files in base64, by the name of the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    images = {}
    for picture in pictures:
        picture.figure.draw_without_rendering()
        picture.figure.set_layout_engine("none")  # do not repeat the layout for each file
        image = png(picture.figure)
        (folder / f"{picture.file}.png").write_bytes(image)
        (folder / f"{picture.file}.svg").write_bytes(svg(picture.figure))
        images[picture.name] = base64.b64encode(image).decode()
    return images


@cache
def _template(name: str) -> Any:
    """Return a template of this package. HTML templates are escaped; Markdown templates use the filter ``markdown``."""
    import jinja2

    loader = jinja2.PackageLoader("minitx.ablation", "templates")
    environment = jinja2.Environment(loader=loader, autoescape=name.endswith(".html"), trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"markdown": _markdown, "chinese": chinese, "capital": capital}
    return environment.get_template(f"{name}.j2")


def _markdown(plain: str) -> str:
    """Escape the characters of Markdown tables, emphasis, links and HTML tags."""
    return html.escape(re.sub(r"[\\|_*`\[\]$]", r"\\\g<0>", " ".join(plain.split())), quote=False)


def _write_cells(findings: Findings, path: Path) -> None:
    """Write a row for each run or threshold: its place, its status and its numbers."""
    import pandas

    rows = []
    for run in findings.runs.all:
        levels = {f"factor {name}" if name in (*FACTS, *NUMBERS) else name: level for name, level in run.factors}
        row: dict[str, Any] = {"study": run.study, "arm": run.arm, **levels, "seed": run.seed}
        row |= {"status": run.status, **{name: run.record.get(name) for name in ("reason", "seconds", "command")}}
        if run.status == "done":
            row |= {name: run.result.get(name) for name in NUMBERS} | run.result.get("measures", {})
        rows.append(row)
    pandas.DataFrame(rows).to_csv(path, index=False, lineterminator="\n")


# --- sentences


def _comparison_sentence(grid: AblationConfig, f: Contrast) -> Text:
    """Return the result of a comparison."""
    first, second = sides(grid, f.comparison, f.condition)
    where = ": ".join(filter(None, [title(grid, f.comparison.study), condition_text(grid, f.condition)]))
    kind = "difference" if not f.endpoint.is_ratio else "inverse ratio" if f.endpoint.is_inverse else "ratio"
    message = "%(where)s. %(quantity)s, “%(second)s” against “%(first)s”: %(word)s, %(kind)s %(value)s %(range)s."
    return say(
        message,
        where=where,
        quantity=capital(words(grid, f.endpoint.text)),
        second=second,
        first=first,
        word=say(f.word),
        kind=say(kind),
        value=span_text(f.estimate),
        range=range_text(f.interval, len(f.pairs)),
    )


def _starts(results: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return how closely continued models start as the same function."""
    errors = [error for result in results if (error := result.get("start_error")) is not None]
    message = "Continued models start as the same function: in %(starts)s starts, outputs differ by at most %(error)s of the largest output."
    return [say(message, starts=f"{len(errors):,}", error=f"{max(errors):.0e}")] if errors else []


def _limits(results: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return the limits of any grid: the sizes of models and runs, and searches with a second crossing."""
    limits, searches = [], [bool(result["above"]) for result in results if "above" in result]
    if results:
        parameters, steps = (f"{max(result[name] for result in results):,}" for name in ("parameters", "cap"))
        message = "The models are small (up to %(parameters)s parameters) and the runs are short (up to %(steps)s steps)."
        limits.append(say(message, parameters=parameters, steps=steps))
    if any(searches):
        message = (
            "In %(again)s of %(searches)s searches a rate above the first failure was stable again. The first failure counts."
        )
        limits.append(say(message, again=sum(searches), searches=len(searches)))
    return limits


# --- numbers


def _first_columns(grid: AblationConfig, f: Contrast) -> dict[str, str]:
    """Return the first columns of a row about a comparison."""
    return {"study": title(grid, f.comparison.study), "setting": condition_text(grid, f.condition)}


def _number_table(findings: Findings) -> Table:
    """Return the table of all comparisons with their numbers."""
    grid, rows = findings.grid, []
    for f in findings.findings:
        medians = (median([pair.values[i] for pair in f.pairs], ratio=f.endpoint.is_ratio) for i in range(2))
        arms = zip(("first arm", "second arm"), sides(grid, f.comparison, f.condition), medians, _best_rates(f), strict=True)
        bound, formula = (None if value is None else number(value) for value in (f.bound, f.predicted))
        predicted = say("%(formula)s (formula), at most %(bound)s", formula=formula, bound=bound) if formula else bound or ""
        row = {
            **_first_columns(grid, f),
            "what": words(grid, f.endpoint.text),
            **{column: _side(arm, value, rates) for column, arm, value, rates in arms},
            "ratio or difference": span_text(f.estimate),
            "range": range_text(f.interval, len(f.pairs)),
            "predicted": predicted,
            "second arm has": say("%(word)s (a rate at the edge of those tried)", word=say(f.word)) if f.at_edge else f.word,
        }
        rows.append(row)
    return Table(say(CAPTIONS["numbers"], ratio=f"{grid.ratio_margin:g}", score=f"{grid.score_margin:g}"), rows)


def _best_rates(f: Contrast) -> list[Text]:
    """Return for both sides the rates at which the seeds are judged; empty if the study tries no rates."""
    by_side = zip(*(pair.rates for pair in f.pairs), strict=True)
    return [list_text([number(rate) for rate in sorted({float(rate) for rate in rates if rate})]) for rates in by_side]


def _side(arm: str, value: Span | None, rates: Text) -> Text:
    """Return the name of a side with its median, and with its rates if the study tries several."""
    if rates:
        return say("%(arm)s: %(value)s (rate %(rates)s)", arm=arm, value=span_text(value), rates=rates)
    return say("%(arm)s: %(value)s", arm=arm, value=span_text(value))


def _series(findings: Findings) -> dict[tuple[ComparisonConfig, str], list[Contrast]]:
    """Return the thresholds whose ratio has a law, grouped so that those in a group differ only in the factor of the law."""
    series = dict[tuple[ComparisonConfig, str], list[Contrast]]()
    for f in findings.findings:
        if f.endpoint.name == "threshold" and f.bound and (law := f.comparison.law):
            others = {factor: level for factor, level in f.condition.items() if factor != law.factor}
            series.setdefault((f.comparison, condition_text(findings.grid, others)), []).append(f)
    return series


def _compared_in_settings(findings: Findings, study: str) -> list[list[Contrast]]:
    """Return the comparisons of a study in three settings or more, without a law, grouped by endpoint and first side."""
    groups = dict[tuple[str, str, bool], list[Contrast]]()
    for f in findings.findings:
        if f.comparison.study == study and f.comparison.law is None:
            groups.setdefault((f.endpoint.name, f.comparison.arms[0], bool(f.comparison.against)), []).append(f)
    return [listed for listed in groups.values() if len({tuple(f.condition.items()) for f in listed}) > 2]


def _slope_table(findings: Findings) -> Table:
    """Return the table of exponents: slopes of the ratios of thresholds against the factor of a law."""
    grid = findings.grid
    rows = [
        {
            "study": title(grid, comparison.study),
            "arms": list_text([words(grid, arm) for arm in comparison.arms]),
            "setting": setting,
            say("exponent over %(factor)s", factor=words(grid, law.factor)): number(exponent.mean),
            "95 % (Student's t)": span_text(Span(exponent.low, exponent.high)),
            "of the law": number(law.power),
            "seeds": str(exponent.n),
        }
        for (comparison, setting), listed in _series(findings).items()
        if (law := comparison.law) and (exponent := Interval.of(slopes(listed))).n > 1
    ]
    return Table("Exponents of the ratios: the mean of the slopes of single seeds", rows)


def _share_table(findings: Findings) -> Table:
    """What limits the largest stable rate of the first arm, by the searches that train a part of the weights."""
    rows = [
        {
            **_first_columns(findings.grid, f),
            **{"η*": _middle_text(parts.whole for parts in f.parts)},
            **{"η_QK": _middle_text(parts.qk for parts in f.parts), "η_R": _middle_text(parts.rest for parts in f.parts)},
            "share of W_Q and W_K": span_text(f.share),
            "range": range_text(f.share_interval, len(f.parts)),
            "between the bounds": say("%(part)s of %(whole)s", part=_between(f.parts), whole=len(f.parts)),
        }
        for f in findings.findings
        if f.parts
    ]
    return Table(CAPTIONS["shares"], rows)


def _middle_text(spans: Iterable[Span]) -> str:
    """The median of the middles of brackets."""
    return number(float(np.median([middle(span) for span in spans])))


def _between(listed: Sequence[Parts]) -> int:
    """The number of η* that lie between their bounds."""
    return sum(parts.place == "between" for parts in listed)


def _bound_table(findings: Findings) -> Table:
    """Every η* whose parts were searched, with its two bounds."""
    searched = [(f, parts) for f in findings.findings for parts in f.parts]
    rows = [
        {
            **_first_columns(findings.grid, f),
            **{"seed": str(parts.seed), "η*": span_text(parts.whole)},
            **{"lower bound": span_text(parts.lower), "upper bound": span_text(parts.upper), "η* is": parts.place},
        }
        for f, parts in searched
    ]
    between = _between([parts for _, parts in searched])
    return Table(say(CAPTIONS["bounds"], between=between, searches=len(rows)), rows, is_open=False)


def _controls(findings: Findings) -> Table:
    """Return the table of the null control."""
    grid, rows = findings.grid, []
    for e in findings.equalities:
        seeds = seeds_text(len(e.equal))
        equal = say("%(equal)s of %(seeds)s, %(steps)s steps", equal=sum(e.equal.values()), seeds=seeds, steps=e.steps)
        arms, result = [words(grid, arm) for arm in e.comparison.arms], "EQUAL" if all(e.equal.values()) else "DIFFERENT"
        row = {"arms": list_text(arms), "setting": condition_text(grid, e.condition)}
        rows.append({**row, "losses that are equal": equal, "result": result})
    return Table("Two ways to write the same model must have the same losses, bit for bit", rows)


def _predictions(findings: Findings) -> Table:
    rows = []
    for statement, finding, measured, status in verdicts(findings):
        where = condition_text(findings.grid, finding.condition)
        rows.append({"prediction": statement, "where": where, "status": status, "measured": span_text(measured)})
    rows.sort(key=lambda row: ("NOT HELD", "UNDECIDED", "HELD").index(row["status"]))
    return Table("Written before the runs; what did not hold comes first", rows)


# --- the runs of the grid


def _incomplete(findings: Findings) -> str:
    is_whole = not {run.status for run in findings.runs.all} & {"failed", "missing"}
    return "" if is_whole else say("The grid is not complete. %(counts)s They are listed below.", counts=_run_counts(findings))


def _run_counts(findings: Findings) -> Text:
    total = Counter(str(run.status) for run in findings.runs.all)
    statuses = [status for status in ("done", "not run", "failed", "missing") if total[status]]
    counts = [say("%(count)s %(status)s", count=total[status], status=say(status)) for status in statuses]
    listed = Text(", ".join(counts), "，".join(map(chinese, counts)))
    message = "%(total)s run and searches: %(counts)s." if total.total() == 1 else "%(total)s runs and searches: %(counts)s."
    return say(message, total=f"{total.total():,}", counts=listed)


def _runs(findings: Findings) -> Table:
    def named(names: Iterable[str]) -> str:
        return ", ".join(words(findings.grid, name) for name in names)

    rows = [
        {
            "study": title(findings.grid, name),
            "arms": named(study.arms),
            "settings": "; ".join(
                f"{named([f]).rstrip(':')}: {named(levels)}".removeprefix(": ") for f, levels in study.factors.items()
            ),
            "seeds": seeds_text(len(study.seeds)),
            "length": say("%(steps)s steps", steps=caps_text(done)),
            "done": say("%(part)s of %(whole)s", part=len(done), whole=len(findings.runs.select(name))),
        }
        for name, study in findings.grid.studies.items()
        if (done := findings.runs.select(name, status="done"))
    ]
    return Table(_run_counts(findings), rows)


def _not_done(findings: Findings) -> Table:
    """Return the table of unfinished runs, with reasons."""
    runs = sorted((run for run in findings.runs.all if run.status != "done"), key=lambda run: run.status)
    rows = [{"run": str(run), "status": run.status, "reason": run.record.get("reason") or ""} for run in runs]
    caption = say("Runs that failed, are missing, or were left out (%(count)s)", count=len(rows))
    return Table(caption, rows, is_open=False)


def _reproduce(meta: Mapping[str, Any]) -> list[str | Table]:
    rows = []
    for name in ("command", "commit", "date", "hardware", "versions", "wall_seconds"):
        if value := meta.get(name):
            shown_value = ", ".join(f"{k} {v}" for k, v in sorted(value.items())) if isinstance(value, Mapping) else str(value)
            rows.append({"what": name.replace("_", " "), "value": f"{value:.0f}" if isinstance(value, float) else shown_value})
    command = "Every run is an ordinary training run. cells.csv has the command that runs it alone; cells.jsonl has its curves."
    return [command, Table("What made this page", rows)]


def study_pictures(findings: Findings) -> list[Picture]:
    """Return the figures of each study: thresholds against the factor of a law, runs against the rate, or else effects in several settings."""
    pictures = list[Picture]()
    for name, study in findings.grid.studies.items():
        runs, before = findings.runs.select(name, status="done"), len(pictures)
        name_text = title(findings.grid, name)
        of_study = [item for item in _series(findings).items() if item[0][0].study == name]
        for i, ((_, setting), listed) in enumerate(of_study):
            where = name_text + (f" ({setting})" if setting else "")
            heading = say("%(title)s: %(quantity)s", title=where, quantity=say(RATIOS["threshold"]))
            caption = "Every dot is a seed. The formula predicts from the first arm alone."
            drawn = curves.threshold_panel(findings, listed)
            pictures.append(Picture(f"{name}_threshold{f'_{i}' if i else ''}", heading, caption, drawn))
        for score in study.scores if runs else ():
            if score not in ("equal", "speedup") and study.factors.get("lr"):
                y, missing = ("steps to solve", "not solved") if score == "time" else (f"validation {score}", "not finite")
                drawn = curves.by_rate(findings, name, score, y, missing)
                message = "Every finished run is a dot; lines join the medians over seeds. Budget: %(steps)s steps."
                heading = say("%(title)s: %(quantity)s", title=name_text, quantity=say(y))
                pictures.append(Picture(f"{name}_{score}", heading, say(message, steps=caps_text(runs)), drawn))
        for i, listed in enumerate(_compared_in_settings(findings, name) if len(pictures) == before else ()):
            heading = say("%(title)s: %(quantity)s", title=name_text, quantity=say(listed[0].endpoint.text))
            caption = "A row for each setting. Every dot is a seed, and a line covers the range of the median. In the grey band effects count as the same."
            pictures.append(Picture(f"{name}_effects_{i}", heading, caption, curves.effect_panel(findings, listed)))
    return pictures
