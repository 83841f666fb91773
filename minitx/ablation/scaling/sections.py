"""The sections that only the scaling ablation has, and its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from minitx.ablation import generic
from minitx.ablation import wording as say
from minitx.ablation.figures import curve_panels, probe_panels, rate_of
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.outcomes import gradient_norms, outcome
from minitx.ablation.records import Run
from minitx.ablation.report import Block, Picture, Section, Table
from minitx.ablation.scaling.initial_weights import init_figure, init_sweep, variance_slope
from minitx.ablation.scaling.options import Options, by_width
from minitx.ablation.scaling.rules import levels_of

NO_HARM = ("SAME", "FASTER", "MORE STABLE", "WIDER", "BETTER", "UNDECIDED")


def sections(findings: Findings) -> list[Section]:
    """Where the effect disappears, instability, the ladder, controls, and what others have published."""
    options = Options.of(findings)
    return [
        Section("Where the effect disappears", _disappears(findings)),
        Section("Instability from scratch and on text", _instability(findings, [*options.scratch, *options.text.values()])),
        Section("Stress ladder", [*_outcomes(findings, [options.ladder]), *_curves(findings, [options.ladder])]),
        Section("Controls", _controls(findings)),
        Section("Published results", [_published(findings), _common_sentences(findings)]),
    ]


def limits(findings: Findings) -> list[str]:
    """The general limits, and those of this question."""
    said, endpoints = generic.limits(findings), {f.endpoint for f in findings.findings if f.pairs}
    if "stability" in endpoints:
        said.append(
            "“Stable” is about models that learned with the scale and are trained on at a constant rate. The missing scale acts by "
            "making the steps of the logits larger: the same model with the learning rates of W_Q and W_K divided to match is the "
            "scaled model again."
        )
    if "time" in endpoints:
        said.append("Steps to solve say how soon a run learns the task, not how good it becomes in the end.")
    return said


def _told(findings: Findings, listed: Sequence[Finding], caption: str) -> list[Block]:
    """A table of findings in words."""
    rows = [(say.finding_sentence(findings, f), f.verdict) for f in listed]
    return [Table(caption, ("finding", "verdict"), rows, is_open=True)] if rows else []


def _disappears(findings: Findings) -> list[Block]:
    """The findings with and without the scale that show no harm."""
    compared = [f for f in findings.findings if f.comparison.arms == tuple(Options.of(findings).arms) and f.interval]
    kept = _told(findings, [f for f in compared if f.verdict in NO_HARM], "Settings without a proven harm")
    return kept or (["At none of the settings of this grid that have a verdict."] if compared else [])


# --- instability


def _instability(findings: Findings, studies: Sequence[str]) -> list[Block]:
    """Outcomes, gradients and curves of text models, and what their attention does over time."""
    probes: list[Block] = []
    for study in studies:
        if any(len(run.result["probes"]) > 1 for run in findings.runs.select(study, status="done")):
            caption = "Every line is a layer of a run, deeper layers darker; rows are statistics, columns are settings."
            heading = f"{say.title(findings.grid, study)}: attention during training"
            probes.append(Picture(f"probes_{study}", heading, caption, probe_panels(findings, study)))
    return [*_outcomes(findings, studies), *_curves(findings, studies), *probes]


def _outcomes(findings: Findings, studies: Sequence[str]) -> list[Table]:
    """What became of every run, and the size of its gradients."""
    grid, outcomes, gradients = findings.grid, [], []
    for study in studies:
        runs = findings.runs.select(study, status="done")
        for (condition, arm), of_setting in _grouped(runs, lambda run: (tuple(run.condition.items()), run.arm)):
            place = (say.title(grid, study), say.condition_text(grid, dict(condition)), say.words(grid, arm))
            by_rate = _grouped(of_setting, rate_of)
            counts = {run[0].rate: Counter(outcome(one, levels_of(findings, one)) for one in run) for _, run in by_rate}
            told = {rate: " + ".join(f"{n} {name}" for name, n in sorted(count.items())) for rate, count in counts.items()}
            outcomes.append((*place, "; ".join(f"{float(rate):g}: {text}" if rate else text for rate, text in told.items())))
            for rate, found in by_rate:
                norms = [norm for run in found if (norm := gradient_norms(run))]
                columns = [", ".join(map(say.number, column)) for column in zip(*norms, strict=True)]
                gradients += [(*place, found[0].rate and f"{rate:g}", *columns)] if columns else []
    headers = ("study", "setting", "arm")
    by_outcome = "Outcomes: each run has one, by rules that look at every arm alike"
    by_norm = "Gradient norm without W_Q and W_K, a number a seed, from step 10 on"
    tables = [
        Table(by_outcome, (*headers, "outcomes at each learning rate"), outcomes, is_open=True),
        Table(by_norm, (*headers, "learning rate", "99th percentile", "largest"), gradients),
    ]
    return [table for table in tables if table.rows]


def _grouped(runs: Iterable[Run], key: Any) -> list[tuple[Any, list[Run]]]:
    return [(value, list(found)) for value, found in groupby(sorted(runs, key=key), key=key)]


def _curves(findings: Findings, studies: Sequence[str]) -> list[Block]:
    """The training loss of every run of each study that has one."""
    caption = (
        "Every run is a line, a panel a setting. A cross: the run ended there because its loss was no longer finite. "
        "Grey: the loss of n-gram models."
    )
    with_runs = [study for study in studies if findings.runs.select(study, status="done")]
    titles = {study: f"{say.title(findings.grid, study)}: training loss" for study in with_runs}
    return [Picture(f"curves_{study}", titles[study], caption, curve_panels(findings, study)) for study in with_runs]


# --- controls


def _controls(findings: Findings) -> list[Block]:
    """Null control, the folded scale, the start of continued runs, and the initial weights."""
    grid, blocks = findings.grid, []
    rows = []
    for e in findings.equalities:
        arms = " and ".join(say.words(grid, arm) for arm in e.comparison.arms)
        equal = f"{sum(e.equal.values())} of {len(e.equal)} seeds, {e.steps} steps"
        verdict = "EQUAL" if all(e.equal.values()) else "DIFFERENT"
        rows += [(arms, say.condition_text(grid, e.condition), equal, verdict)] if e.equal else []
    if rows:
        caption = "Null control: two ways to write the same model must have the same losses, bit for bit"
        blocks.append(Table(caption, ("arms", "setting", "losses that are equal", "result"), rows, is_open=True))
    removed = Options.of(findings).arms
    stable = [f for f in findings.findings if f.endpoint == "stability" and f.pairs]
    folded = [f for f in stable if f.comparison.arms != tuple(removed)]
    told = _told(findings, folded, "The missing scale, folded into weights and learning rates: the effect must be gone")
    errors = [run.result["start_error"] for run in findings.runs.all if run.status == "done" and run.record["start"]]
    start = [
        f"Continued models start as the same function: over {say.count_text(len(errors), 'run')} the largest difference of the "
        f"outputs at the start is {max(errors):.0e} of the largest output."
        for _ in errors[:1]
    ]
    caption = (
        f"Single attention layers without training. Left: Var(q·k) grows as d_k (slope {variance_slope():.3f} for LeCun's weights). "
        "Right: above √(2 ln n) attention over n keys starts on one key."
    )
    weights = Picture("initial_weights", "Logits at the initial weights, without the scale", caption, init_figure())
    return [*blocks, *told, *start, weights]


# --- what others say


PUBLISHED = {
    "R1": "Var(q·k) = d_k (Vaswani et al. 2017, footnote 4)",
    "R2": "softmax saturates without the scale, by the oracles of iid Gaussian rows",
    "R3": "the scale is a parametrisation (Raffel et al. 2020, T5)",
    "R4": "condensation of the weights (random energy model)",
    "R5": "lower bound of the entropy (Zhai et al. 2023, theorem 3.1)",
    "R6": "a smaller scale gives smaller gradients of W_Q and W_K at the start (Noci et al. 2022)",
    "R7": "harmless at small d_k, harmful at large d_k (Britz et al. 2017)",
    "R8": "without the scale worse than with the scale folded into the weights (T5)",
    "R9": "normalised queries and keys allow larger rates (Wortsman et al. 2023, figures 1 and 2)",
    "R10": "logits forced to 10⁴ are worse than bigrams (Wortsman et al. 2023, figure 10)",
    "R11": "1/d_k equals 1/√d_k at the best rate in small models (Wortsman et al. 2023, appendix E.6)",
    "R12": "a temperature of 0.1 hurts more during warm-up than later (Zhai et al. 2023)",
    "R13": "post-norm without warm-up is worse than pre-norm without (Xiong et al. 2020)",
}


def _published(findings: Findings) -> Table:
    """PASS, FAIL, INCONCLUSIVE or NOT RUN for each; the first six are asserted by the test suite."""
    wanted, rows = Options.of(findings).published, []
    for i, (name, result) in enumerate(PUBLISHED.items(), 1):
        measured = _grows(findings) if name == "R7" else _foretold(findings, wanted.get(name, {}))
        rows.append((name, result, *(("asserted by the test suite", "TEST") if i <= 6 else measured)))
    caption = "Published results. They are reported, not asserted, and a FAIL is shown"
    return Table(caption, ("name", "result", "measured here", "status"), rows)


def _grows(findings: Findings) -> tuple[str, str]:
    """R7: the slope of log₂ (ratio of the steps) on log₂ d_k is above 0 for every seed that has all d_k."""
    options = Options.of(findings)
    found = by_width(findings, options.time, "time")
    seeds = set.intersection(*({pair.seed for pair in f.pairs} for f in found)) if found else set()
    if len(found) < 2 or not seeds:
        return "not run", "NOT RUN"
    widths = np.log2([float(f.condition[options.width]) for f in found])
    ratios = [[np.log2(pair.effect.low) for pair in f.pairs if pair.seed in seeds] for f in found]  # (d_k, seeds)
    slopes = np.polyfit(widths, ratios, 1)[0]
    said = f"log₂ of the ratio grows by {min(slopes):.2f} to {max(slopes):.2f} a doubling of d_k"
    passed = "PASS" if min(slopes) > 0 else "FAIL" if max(slopes) < 0 else "INCONCLUSIVE"
    return f"{said} ({say.count_text(len(slopes), 'seed')})", passed if len(slopes) >= 6 else "INCONCLUSIVE"


def _foretold(findings: Findings, expected: Mapping[str, Any]) -> tuple[str, str]:
    """Whether the findings that the grid names have the verdict that it names."""
    place = {name: value for name, value in expected.items() if name != "verdict"}
    found = [f for f in findings.find(**place) if f.pairs] if place else []
    if not found:
        return "not run", "NOT RUN"
    verdicts = {f.verdict for f in found}
    status = "INCONCLUSIVE" if "UNDECIDED" in verdicts else "PASS" if verdicts == {expected["verdict"]} else "FAIL"
    return " ".join(say.finding_sentence(findings, f) for f in found), status


def _common_sentences(findings: Findings) -> Table:
    """Sentences that are often said of the scale, beside what was measured."""
    ratios = {row.width: row.gradient_ratio for row in init_sweep() if row.scheme == "lecun"}
    listed = ", ".join(f"d_k {width}: {say.number(ratio)}" for width, ratio in ratios.items())
    vaswani = "Without the scale, softmax has extremely small gradients at the start (Vaswani et al. 2017, section 3.2.1)."
    gradients = f"‖∇W_Q‖ without / with the scale, one layer with LeCun's initial weights: {listed}"
    claims = [(vaswani, gradients, min(ratios.values()) > 1)]
    equal = [same for e in findings.equalities for same in e.equal.values()]
    if equal:
        told = f"{sum(equal)} of {len(equal)} null controls have the same losses bit for bit"
        claims.append(("The scale gives the model something that its weights cannot.", told, all(equal)))
    rows = [(text, measured, "CONTRADICTED" if wrong else "NOT CONTRADICTED") for text, measured, wrong in claims]
    caption = "Common sentences about the scale, and what was measured here"
    return Table(caption, ("sentence", "measured", "result"), rows, is_open=True)
