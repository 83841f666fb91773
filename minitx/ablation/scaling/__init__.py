"""The parts of reports about the scale: ``about: minitx.ablation.scaling``. Its options are in ``configs/ablation/parts/scaling.yaml``.

Its sentences and its figure are filled with numbers. Each is omitted if its records are missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minitx.ablation import curves
from minitx.ablation.design import ThresholdConfig
from minitx.ablation.formatting import Text, list_text, number, say, seeds_text, span_text, title, words
from minitx.ablation.grid import Run
from minitx.ablation.judge import Contrast, Findings
from minitx.ablation.report import Picture, Section
from minitx.canvas import INK, label, log_ticks, panels

ARMS = ("inv_sqrt", "unscaled")
"""The arms with and without the scale, in every grid about the scale."""
AVERAGED_STEPS = 8
"""The number of steps over which the first figure averages the accuracy."""

LIMITS_BY_ENDPOINT = {
    "threshold": "The largest stable rate belongs to a model that has solved its task and is trained further at a constant rate. If other weights limit the rate before W_Q and W_K do, the scale matters less: see the formula.",
    "time": "Steps to solve measure how soon a run learns the task, not its final quality.",
}
"""The limits of the statements about the scale, by endpoint."""


def sentences(findings: Findings) -> list[Text]:
    """Return sentences on the effects of the scale, with the numbers of this grid."""
    options, equal = findings.grid.options, [value for e in findings.equalities for value in e.equal.values()]
    wide, narrow = (_thresholds(findings, options["widths"][name]) for name in ("wide", "narrow"))
    started = _started(findings)
    large, small = (started.get(options["inits"][name]) for name in ("large", "small"))
    shown = []
    if not all(equal):
        shown.append(say("The null control failed: two ways to write the same model differ. Do not trust the numbers."))
    if large and wide:
        shown.append(say("Without the scale, every attention score is √d_k times larger. Two effects follow."))
    elif large or wide or shown:
        shown.append(say("Without the scale, every attention score is √d_k times larger."))
    if large:
        shown.append(_at_the_start(options, large, small))
    if wide:
        shown.append(_at_every_step(options, wide, narrow, bool(equal) and all(equal)))
    return shown


def _at_the_start(options: Mapping[str, Any], large: Contrast, small: Contrast | None) -> Text:
    """Return the sentence on the steps to learn the task from scratch."""
    default: str = ""
    if small is not None:
        no_more = "; with GPT-2's smaller weights, our default, no more"
        more = "; with GPT-2's smaller weights, our default, %(times)s (%(range)s)"
        default = say(no_more if small.interval and small.interval[0].high <= 1 else more, **_effect(small))
    message = "At the start, if initial weights are large: with variance 1/width (LeCun), a one-head model (d_k = %(width)s) needs %(times)s times as many steps of %(optimizer)s (%(range)s) to learn a lookup%(default)s."
    width, (optimizer,) = options["widths"]["wide"], options["time"]
    return say(message, width=width, optimizer=optimizer, default=default, **_effect(large))


def _at_every_step(
    options: Mapping[str, Any], wide: Mapping[str, Contrast], narrow: Mapping[str, Contrast], equal: bool
) -> Text:
    """Return the sentence on the largest rates without a collapse, by optimizer. ``equal``: whether the null control held."""
    first, further = "%(times)s times smaller with %(optimizer)s (%(range)s)", "%(times)s times with %(optimizer)s (%(range)s)"
    rates = [say(further if i else first, optimizer=name, **_effect(f)) for i, (name, f) in enumerate(wide.items())]
    others = [
        Text(times, f"1/{times.chinese}")
        if narrow.keys() == wide.keys()
        else say("%(times)s with %(optimizer)s", times=times, optimizer=name)
        for name, times in ((name, span_text(f.estimate)) for name, f in narrow.items())
    ]
    width = options["widths"]["narrow"]
    message = "At every step: an update moves the scores further. We removed the scale from solved models, kept their function, and trained them further. The largest rate without a collapse was %(rates)s%(others)s.%(undone)s"
    return say(
        message,
        rates=list_text(rates, "，"),
        others=say("; d_k = %(width)s: %(rates)s", width=width, rates=list_text(others)) if others else "",
        undone=say(" Smaller learning rates for W_Q and W_K undo this.") if equal else "",
    )


def _effect(f: Contrast) -> dict[str, str]:
    """Return the ratio and its interval, or the number of seeds if there is none."""
    times = span_text(f.estimate)
    if f.interval is None:
        return {"times": times, "range": seeds_text(len(f.pairs))}
    low, high = number(f.interval[0].low), number(f.interval[0].high)
    return {"times": times, "range": say("%(low)s or more", low=low) if high == "∞" else f"{low}–{high}"}


def _thresholds(findings: Findings, width: str) -> dict[str, Contrast]:
    """Return the threshold findings at one d_k, by the name of the optimizer."""
    studies = findings.grid.options["optimizers"]
    by_optimizer = {name: findings.find(study, "threshold", ARMS, {"head_dim": width}) for name, study in studies.items()}
    return {name: listed[0] for name, listed in by_optimizer.items() if listed}


def _started(findings: Findings) -> dict[str, Contrast]:
    """Return the findings on the steps to solve the task, by initial weights."""
    (study,) = findings.grid.options["time"].values()
    findings_of_time = findings.find(study, "time", ARMS)
    first = findings.grid.options["inits"]["large"]
    return {f.condition.get("init", first): f for f in findings_of_time if f.estimate.low > 0}  # 0: both ran into their cap


# --- the first figure


def figure(findings: Findings) -> list[Picture]:
    """Draw the accuracy of solved models that are trained further, the largest stable rates against d_k, and the steps to learn from scratch."""
    options, grid = findings.grid.options, findings.grid
    shown = {name: runs_of_name for name, rate in options["shown"].items() if (runs_of_name := _shown(findings, name, rate))}
    stable = {name: listed for name, s in options["optimizers"].items() if (listed := findings.find(s, "threshold", ARMS))}
    started = _started(findings)
    columns = len(shown) + len(stable) + bool(started)
    if not columns:
        return []
    drawn, axes = panels(1, columns, width=12.5 / columns, height=2.6)
    for ax, (name, runs) in zip(axes[0], shown.items(), strict=False):
        curves.curves(ax, grid, runs, "accuracy", AVERAGED_STEPS)
        label(
            ax, f"solved models, {name},\nrate {options['shown'][name]}", "step", f"accuracy, mean of the last {AVERAGED_STEPS}"
        )
    for ax, (name, of_study) in zip(axes[0, len(shown) :], stable.items(), strict=False):
        curves.draw_thresholds(ax, grid, of_study)
        label(ax, f"largest rate without a collapse,\n{name}", "d_k", "learning rate")
    if started:
        _draw_times(axes[0, -1], findings, started)
    lines = curves.law_lines(grid, [f for listed in stable.values() for f in listed]) if stable else []
    if started:
        lines.append(("ended at its cap of steps, not solved", INK, "^", ""))
    curves.arms_legend(drawn, grid, ARMS, lines, line="-")
    threshold = next((grid.studies[listed[0].comparison.study].threshold for listed in stable.values()), None)
    return [Picture("scale", "What happens without the scale", _caption(bool(started), threshold), drawn)]


def _caption(has_caps: bool, threshold: ThresholdConfig | None) -> Text:
    """Return the caption of the first figure."""
    collapse = {
        "train_loss": " A collapse: the loss rises more than %(value)s nats above its start (mean of %(window)s steps). The scale was removed by dividing W_Q and W_K by d_k^¼ each.",
        "train_accuracy": " A collapse: the accuracy falls below %(value)s (mean of %(window)s steps). The scale was removed by dividing W_Q and W_K by d_k^¼ each.",
    }
    message = "Every line or dot is a seed%(caps)s. Brackets hold the range of the median over the seeds.%(collapse)s"
    return say(
        message,
        caps=say("; a triangle reached its cap of steps unsolved") if has_caps else "",
        collapse=say(collapse[threshold.metric], value=f"{threshold.value:g}", window=threshold.window) if threshold else "",
    )


def _draw_times(ax: Any, findings: Findings, started: dict[str, Contrast]) -> None:
    """Draw the steps of each seed, by initial weights and arm, with a triangle if the task was not solved within the cap."""
    for column, f in enumerate(started.values()):
        curves.dots(ax, findings.grid, f, lambda shift, column=column: column + 0.6 * shift)  # type: ignore[misc]
    log_ticks(ax)
    ax.set_xlim(-0.5, len(started) - 0.5)
    ax.set_xticks(range(len(started)), [words(findings.grid, init).replace(" (", "\n(") for init in started])
    (optimizer,) = findings.grid.options["time"]
    label(ax, f"from scratch, {optimizer},\nby initial weights", "", "steps to solve")


def _shown(findings: Findings, name: str, rate: str) -> list[Run]:
    """Return the finished runs whose curves are shown for an optimizer at one rate, or [] unless both arms have some."""
    study = findings.grid.options["curves"].get(name, "")
    runs_by_arm = [findings.runs.select(study, arm, rate=rate, status="done") for arm in ARMS]
    return [run for runs in runs_by_arm for run in runs] if all(runs_by_arm) else []


# --- below


def sections(findings: Findings) -> list[Section]:
    """Return a section with the attention of a head before and after further training, and the loss curves on text."""
    study = findings.grid.options["attention"]
    kept = [run for arm in ARMS for run in findings.runs.select(study, arm, status="done")[:1] if run.result["attention"]]
    blocks = [_attention_picture(findings, kept)] if len(kept) == len(ARMS) else []
    for name in findings.grid.options["text"]:
        if findings.runs.select(name, status="done"):
            heading = say("%(title)s: %(quantity)s", title=title(findings.grid, name), quantity=say("training loss"))
            caption = "Every run is a line. A cross: its loss was no longer finite. Grey: the loss of n-gram models."
            blocks.append(Picture(f"curves_{name}", heading, caption, curves.curve_panels(findings, name)))
    return [Section("What the runs look like", blocks)]


def _attention_picture(findings: Findings, kept: list[Run]) -> Picture:
    """Draw the attention of the question before and after further steps, with and without the scale."""
    before = kept[0].result["attention"]["0"]
    maps = [("before", before)]
    for run in kept:
        last = max(run.result["attention"], key=int)
        maps.append((f"{words(findings.grid, run.arm)},\n{last} steps later", run.result["attention"][last]))
    keys = [max(range(len(rows[-1])), key=rows[-1].__getitem__) for rows in before]
    message = "The last position asks for a key. Rows are examples, columns are keys. Squares: the key that the model looked at when it had solved the task. Seed %(seed)s, learning rate %(rate)s."
    caption = say(message, seed=kept[0].seed, rate=f"{float(kept[0].rate):g}")
    heading = "Attention of a solved model, before and after it was trained on"
    return Picture("attention", heading, caption, curves.attention(maps, keys))


def limits(findings: Findings) -> list[str]:
    """Return the limits of the statements about the scale."""
    judged = {f.endpoint.name for f in findings.findings}
    return [text for endpoint, text in LIMITS_BY_ENDPOINT.items() if endpoint in judged]
