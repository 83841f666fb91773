"""The sections that only the scaling ablation has, and its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from minitx.ablation import generic
from minitx.ablation import wording as say
from minitx.ablation.curves import arms_of, curve_panels, probe_panels, settings
from minitx.ablation.judge import Finding, Findings
from minitx.ablation.layout import Block, Picture, Section, Table
from minitx.ablation.outcomes import gradient_norms
from minitx.ablation.records import Run
from minitx.ablation.scaling.initial_weights import init_figure, variance_slope
from minitx.ablation.scaling.rules import NOTHING, RULES, is_text, levels_of, outcome_of
from minitx.ablation.scaling.studies import ARMS

NO_HARM = ("SAME", "FASTER", "MORE STABLE", "WIDER", "BETTER")
PUBLISHED = {"HELD": "PASS", "NOT HELD": "FAIL", "UNDECIDED": "INCONCLUSIVE", "NOT TESTED": "NOT RUN"}


def sections(findings: Findings) -> list[Section]:
    """Where the effect disappears, instability, controls, and what others have published."""
    options = findings.grid.options
    return [
        Section("Where the effect disappears", _disappears(findings)),
        Section("Instability from scratch and on text", _instability(findings, [*options["scratch"], *options["text"]])),
        Section("Controls", _controls(findings)),
        Section("Published results", _published(findings)),
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


def _told(findings: Findings, listed: Sequence[Finding], caption: str) -> Table:
    """A table of findings in sentences."""
    rows = [{"finding": say.finding_sentence(findings, f), "verdict": f.verdict} for f in listed]
    return Table(caption, rows, is_open=True)


def _disappears(findings: Findings) -> list[Block]:
    """The findings with and without the scale that show no harm, and apart from them those that decide nothing."""
    compared = [f for f in findings.findings if f.comparison.arms == ARMS and f.interval]
    gone = [f for f in compared if f.verdict in NO_HARM]
    undecided = [f for f in compared if f.verdict == "UNDECIDED"]
    none: list[Block] = ["At none of the settings of this grid, as far as its verdicts say."] if compared and not gone else []
    return [*none, _told(findings, gone, "Settings without harm"), _told(findings, undecided, "Settings that are undecided")]


# --- instability


def _instability(findings: Findings, studies: Sequence[str]) -> list[Block]:
    """Outcomes and gradients of the runs of some studies, their curves, and what their attention does over time."""
    done = {study: runs for study in studies if (runs := findings.runs.select(study, status="done"))}
    blocks: list[Block] = [_outcomes(findings, list(done))]
    for study, runs in done.items():
        title = say.title(findings.grid, study)
        caption = "Every run is a line. A cross: its loss was no longer finite. Grey: the loss of n-gram models."
        blocks.append(Picture(f"curves_{study}", f"{title}: training loss", caption, curve_panels(findings, study)))
        if any(len(run.result["probes"]) > 1 for run in runs):
            caption = "Every line is a layer of a run, deeper layers darker; rows are statistics, columns are settings."
            title = f"{title}: attention during training"
            blocks.append(Picture(f"probes_{study}", title, caption, probe_panels(findings, study)))
    return blocks


def _outcomes(findings: Findings, studies: Sequence[str]) -> Table:
    """What became of the runs of each arm at each setting, and the size of their gradients."""
    grid, rows = findings.grid, []
    for study in studies:
        for setting, runs in settings(findings, study).items():
            for arm in arms_of(grid, runs):
                of_arm = [run for run in runs if run.arm == arm]
                counts = Counter(_outcome_text(findings, run) for run in of_arm)
                norms = [norm for run in of_arm if (norm := gradient_norms(run))]
                row = {
                    "study": say.title(grid, study),
                    "setting": setting,
                    "arm": say.words(grid, arm),
                    "outcomes": " + ".join(f"{count} {name}" for name, count in sorted(counts.items())),
                    "gradient norm: 99th percentile": ", ".join(say.number(high) for high, _ in norms) or "not logged",
                    "largest": ", ".join(say.number(largest) for _, largest in norms) or "not logged",
                }
                rows.append(row)
    caption = (
        "Outcomes: each run has one, by rules that look at every arm alike. Gradient norms, a number a seed: without W_Q and W_K, "
        "from step 10 on"
    )
    return Table(caption, rows, is_open=True)


def _outcome_text(findings: Findings, run: Run) -> str:
    """The outcome of a run. TRAINED can only be told where an arm has a plain average as its attention."""
    found = outcome_of(findings, run)
    is_untold = found == "TRAINED" and is_text(run) and levels_of(findings, run).uniform is None
    return "with no outcome that these rules can tell" if is_untold else found


# --- controls


def _controls(findings: Findings) -> list[Block]:
    """Null control, the folded scale, the start of continued runs, and the initial weights."""
    grid, equal = findings.grid, []
    for e in findings.equalities:
        row = {
            "arms": " and ".join(say.words(grid, arm) for arm in e.comparison.arms),
            "setting": say.condition_text(grid, e.condition),
            "losses that are equal": f"{sum(e.equal.values())} of {len(e.equal)} seeds, {e.steps} steps",
            "result": "EQUAL" if all(e.equal.values()) else "DIFFERENT",
        }
        equal += [row] if e.equal else []
    folded = [f for f in findings.findings if f.endpoint == "stability" and f.pairs and f.comparison.arms != ARMS]
    blocks: list[Block] = [
        Table("Null control: two ways to write the same model must have the same losses, bit for bit", equal, is_open=True),
        _told(findings, folded, "The missing scale, folded into weights and learning rates: the effect must be gone"),
    ]
    errors = [run.result["start_error"] for run in findings.runs.all if run.status == "done" and run.record["start"]]
    if errors:
        runs = say.count_text(len(errors), "run")
        blocks.append(
            f"Continued models start as the same function: over {runs} the largest difference of the outputs at the start is "
            f"{max(errors):.0e} of the largest output."
        )
    caption = (
        f"Single attention layers without training. The variance of q·k grows as d_k (slope {variance_slope():.3f} of the logarithms, "
        "LeCun's weights). Above √(2 ln n) attention over n keys starts on one key."
    )
    return [*blocks, Picture("initial_weights", "Logits at the initial weights, without the scale", caption, init_figure())]


# --- what others say


def _published(findings: Findings) -> list[Block]:
    """PASS, FAIL, INCONCLUSIVE or NOT RUN for each published result that the grid names."""
    rows = []
    for name, result in findings.grid.options["published"].items():
        status, measured = RULES[result["rule"]](findings, **result["options"]) if "rule" in result else NOTHING
        row = {"name": name, "result": result["statement"], "measured here": measured, "status": PUBLISHED[status]}
        rows.append(row)
    asserted = "; ".join(findings.grid.options["asserted"])
    said = [f"Asserted by the test suite: {asserted}."] if asserted else []
    return [Table("Published results. They are reported, not asserted, and a FAIL is shown", rows, is_open=True), *said]
