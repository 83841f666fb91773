"""The sections that only the scaling ablation has, and its limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from minitx.ablation import generic
from minitx.ablation.figures import curve_panels, probe_panels, rate_of
from minitx.ablation.judge import Findings
from minitx.ablation.outcomes import gradient_norms, outcome
from minitx.ablation.records import Run
from minitx.ablation.report import Block, Picture, Section, Table
from minitx.ablation.scaling.initial_weights import init_figure, init_sweep, variance_slope
from minitx.ablation.scaling.options import Options, by_width
from minitx.ablation.scaling.rules import levels_of
from minitx.ablation.wording import condition_text, count_text, finding_sentence, number, title, words


def sections(findings: Findings) -> list[Section]:
    """Where the effect disappears, instability, the ladder, controls, and what others have published."""
    options = Options.of(findings)
    return [
        Section("Where the effect disappears", _disappears(findings)),
        Section("Instability from scratch and on text", _instability(findings, [*options.scratch, *options.text.values()])),
        Section("Stress ladder", _curves(findings, [options.ladder])),
        Section("Controls", _controls(findings)),
        Section("Published results", [_published(findings), _common_sentences(findings)]),
    ]


def limits(findings: Findings) -> list[str]:
    """The general limits, and those of this question."""
    said = generic.limits(findings)
    if any(f.endpoint == "stability" and f.pairs for f in findings.findings):
        said.append(
            "“Stable” is about models that learned with the scale and are trained on at a constant rate. "
            "The missing scale acts by making the steps of the logits larger: the same model with the learning rates of W_Q and W_K divided "
            "to match is the scaled model again."
        )
    if any(f.endpoint == "time" and f.pairs for f in findings.findings):
        said.append("Steps to solve say how soon a run learns the task, not how good it becomes in the end.")
    return said


def _disappears(findings: Findings) -> list[Block]:
    """The findings without harm, with and without the scale."""
    arms = Options.of(findings).arms
    compared = [f for f in findings.findings if f.comparison.arms == arms and f.pairs]
    kept = [
        f for f in compared if f.verdict in ("SAME", "FASTER", "MORE STABLE", "WIDER", "BETTER", "UNDECIDED") and f.interval
    ]
    if not compared:
        return []
    if not kept:
        return ["At none of the settings of this grid that have a verdict."]
    return [
        Table(
            "Settings without a proven harm",
            ("finding", "verdict"),
            [(finding_sentence(findings, f), f.verdict) for f in kept],
            is_open=True,
        )
    ]


# --- instability


def _curves(findings: Findings, studies: Sequence[str]) -> list[Block]:
    """The training loss of every run of each study that has one."""
    caption = "Every run is a line, a panel a setting. A cross: the run ended there because its loss was no longer finite. Grey: the loss of n-gram models."
    return [
        Picture(f"curves_{study}", f"{title(findings.grid, study)}: training loss", caption, curve_panels(findings, study))
        for study in studies
        if findings.runs.select(study, status="done")
    ]


def _instability(findings: Findings, studies: Sequence[str]) -> list[Block]:
    """Outcomes and curves of text models, the size of their gradients, and what their attention does over time."""
    rows, gradients, pictures = [], [], []
    for study in studies:
        runs = findings.runs.select(study, status="done")
        for key, found in groupby(sorted(runs, key=_setting), key=_setting):
            of_setting = list(found)
            where = (title(findings.grid, study), words(findings.grid, key[0]), condition_text(findings.grid, dict(key[1])))
            outcomes = {
                rate: Counter(outcome(run, levels_of(findings, run)) for run in of_rate)
                for rate, of_rate in _by_rate(of_setting)
            }
            rows.append((*where, "; ".join(f"{rate}: {_counts(counter)}" for rate, counter in outcomes.items())))
            for rate, of_rate in _by_rate(of_setting):
                norms = [norm for run in of_rate if (norm := gradient_norms(run))]
                if norms:
                    gradients.append((*where, rate, *(", ".join(number(norm[i]) for norm in norms) for i in (0, 1))))
        if any(len(run.result["probes"]) > 1 for run in runs):
            caption = (
                "Every line is one layer of one run, deeper layers darker; rows are statistics, columns are learning rates."
            )
            pictures.append(
                Picture(
                    f"probes_{study}",
                    f"{title(findings.grid, study)}: attention during training",
                    caption,
                    probe_panels(findings, study),
                )
            )
    if not rows:
        return []
    headers = ("study", "arm", "setting")
    caption = "Outcomes: each run has one, by rules that look at every arm alike"
    tables = [Table(caption, (*headers, "outcomes at each learning rate"), rows, is_open=True)]
    if gradients:
        caption = "Gradient norm without W_Q and W_K, a number a seed, steps 10 and later"
        tables.append(Table(caption, (*headers, "learning rate", "99th percentile", "largest"), gradients))
    return [*tables, *_curves(findings, studies), *pictures]


def _setting(run: Run) -> tuple[str, tuple[tuple[str, str], ...]]:
    return run.arm, tuple(run.condition.items())


def _by_rate(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """The runs by learning rate, the smallest first."""
    ordered = sorted(runs, key=rate_of)
    return [(f"{rate:g}", list(found)) for rate, found in groupby(ordered, key=rate_of)]


def _counts(outcomes: Counter[str]) -> str:
    return " + ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))


# --- controls and what others say


def _controls(findings: Findings) -> list[Block]:
    grid, options = findings.grid, Options.of(findings)
    blocks: list[Block] = []
    rows = [
        (
            " and ".join(words(grid, arm) for arm in e.comparison.arms),
            condition_text(grid, e.condition),
            f"{list(e.equal.values()).count(True)} of {len(e.equal)} seeds, {e.steps} steps",
            "EQUAL" if all(e.equal.values()) else "DIFFERENT",
        )
        for e in findings.equalities
        if e.equal
    ]
    if rows:
        caption = "Null control: two ways to write the same model must have the same losses, bit for bit"
        blocks.append(Table(caption, ("arms", "setting", "losses that are equal", "result"), rows, is_open=True))
    folded = [f for f in findings.findings if f.endpoint == "stability" and f.comparison.arms != options.arms and f.pairs]
    if folded:
        caption = "The missing scale, folded into weights and learning rates: the effect must be gone"
        said = [(finding_sentence(findings, f), f.verdict) for f in folded]
        blocks.append(Table(caption, ("finding", "verdict"), said, is_open=True))
    errors = [
        run.result["start_error"] for run in findings.runs.all if run.status == "done" and run.result["start_error"] is not None
    ]
    if errors:
        blocks.append(
            f"Models that are trained on start as the same function: over {count_text(len(errors), 'run')} the largest difference of the outputs at the start is {max(errors):.0e} of the largest output."
        )
    caption = (
        f"Single attention layers at their initial weights, no training. Left: Var(q·k) grows as d_k (slope {variance_slope():.3f} for LeCun's). "
        "Right: above √(2 ln n) attention over n keys starts on one key."
    )
    blocks.append(Picture("initial_weights", "Logits at the initial weights, without the scale", caption, init_figure()))
    return blocks


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
SUITE = ("R1", "R2", "R3", "R4", "R5", "R6")


def _published(findings: Findings) -> Table:
    """PASS, FAIL, INCONCLUSIVE or NOT RUN for each; the first six are asserted by the test suite."""
    options = Options.of(findings)
    rows = []
    for name, result in PUBLISHED.items():
        if name in SUITE:
            rows.append((name, result, "asserted by the test suite", "TEST"))
        elif name == "R7":
            rows.append((name, result, *_grows(findings)))
        else:
            rows.append((name, result, *_foretold(findings, options.published.get(name))))
    return Table(
        "Published results. They are reported, not asserted, and a FAIL is shown",
        ("name", "result", "measured here", "status"),
        rows,
    )


def _grows(findings: Findings) -> tuple[str, str]:
    """R7: the slope of log₂ (ratio of the steps) on log₂ d_k is above 0 for every seed that has all d_k."""
    found = by_width(findings, Options.of(findings).time, "time")
    if len(found) < 2:
        return "not run", "NOT RUN"
    widths = [float(f.condition[Options.of(findings).width]) for f in found]
    import numpy as np

    seeds = set.intersection(*({pair.seed for pair in f.pairs} for f in found))
    slopes = []
    for seed in sorted(seeds):
        ratios = [next(pair.effect.low for pair in f.pairs if pair.seed == seed) for f in found]
        slopes.append(float(np.polyfit(np.log2(widths), np.log2(ratios), 1)[0]))
    said = f"log₂ of the ratio of the steps grows by {min(slopes):.2f} to {max(slopes):.2f} a doubling of d_k ({count_text(len(slopes), 'seed')})"
    if len(slopes) < 6 or min(slopes) <= 0 <= max(slopes):
        return said, "INCONCLUSIVE"
    return said, "PASS" if min(slopes) > 0 else "FAIL"


def _foretold(findings: Findings, expected: Mapping[str, object] | None) -> tuple[str, str]:
    """Whether the finding that the grid names has the verdict that it names."""
    wanted = dict(expected or {})
    verdict = wanted.pop("verdict", None)
    found = [f for f in findings.find(**wanted) if f.pairs] if wanted else []  # type: ignore[arg-type]
    if not found:
        return "not run", "NOT RUN"
    said = "; ".join(finding_sentence(findings, f) for f in found)
    verdicts = {f.verdict for f in found}
    return said, "INCONCLUSIVE" if "UNDECIDED" in verdicts else "PASS" if verdicts == {verdict} else "FAIL"


def _common_sentences(findings: Findings) -> Table:
    """Sentences that are often said of the scale, beside what was measured."""
    ratios = {row.width: row.gradient_ratio for row in init_sweep() if row.scheme == "lecun"}
    listed = ", ".join(f"d_k {width}: {number(ratio)}" for width, ratio in ratios.items())
    equal = [same for e in findings.equalities for same in e.equal.values()]
    larger = ratios[max(ratios)] > 1
    rows = [
        (
            "Without the scale, softmax has extremely small gradients at the start (Vaswani et al. 2017, section 3.2.1).",
            f"‖∇W_Q‖ without / with the scale, one layer with LeCun's initial weights: {listed}",
            "CONTRADICTED" if larger else "NOT CONTRADICTED",
        )
    ]
    if equal:
        rows.append(
            (
                "The scale gives the model something that its weights cannot.",
                f"{equal.count(True)} of {len(equal)} null controls have the same losses bit for bit",
                "CONTRADICTED" if all(equal) else "NOT CONTRADICTED",
            )
        )
    return Table(
        "Common sentences about the scale, and what was measured here", ("sentence", "measured", "result"), rows, is_open=True
    )
