"""What others have said of the scale, held against what the grid measured: common sentences, and published results."""

from __future__ import annotations

from statistics import median

from minitx.ablation import records as rec
from minitx.ablation.render import Table
from minitx.ablation.sections import clause
from minitx.ablation.tables import gradient_ratios, variance_slopes
from minitx.ablation.verdict import Comparison, Findings
from minitx.ablation.wording import number, place_text, signed, span


def contradictions(findings: Findings) -> Table:
    """Common sentences about the scale, held against what was measured."""
    ratios = {width: r for (init, width), r in gradient_ratios(findings.init).items() if init == rec.PRIMARY_INIT}
    listed = ", ".join(f"d_k {w}: {number(r, 2)}" for w, r in ratios.items())
    larger = ratios[max(ratios, key=lambda w: rec.as_number(w) or 0.0)] > 1 if ratios else None
    null = [p.equal for p in findings.null if p.equal is not None]
    equal = f"full_fold: {sum(null)} of {len(null)} loss series bitwise equal to inv_sqrt"
    rows = [
        (
            "Without the scale, softmax has extremely small gradients at init (Vaswani et al. 2017, §3.2.1).",
            f"‖∇W_Q‖ unscaled / inv_sqrt at step 0, LeCun init: {listed}" if ratios else "not measured",
            _contradicted(larger),
        ),
        (
            "The scale gives the model something that its weights cannot.",
            equal if null else "not measured",
            _contradicted(all(null) if null else None),
        ),
    ]
    return Table("Common sentences and what was measured here.", ("sentence", "measured", "result"), rows)


def _contradicted(answer: bool | None) -> str:
    return "NOT TESTED" if answer is None else "CONTRADICTED" if answer else "NOT CONTRADICTED"


def _measured(c: Comparison | None) -> str:
    return "not measured" if c is None else f"{c.label}, {place_text(c.study, c.condition)}: {clause(c)}"


def published(findings: Findings) -> Table:
    """The table of published results beside what this grid found."""
    slope = variance_slopes(findings.init).get(rec.PRIMARY_INIT)
    variance = f"slope of ln Var on ln d_k in the network {number(slope.estimate, 2)}" if slope else "no init sweep"
    null = [p.equal for p in findings.null if p.equal is not None]
    gap = next((g.slope for g in findings.gaps if g.init in (rec.PRIMARY_INIT, "") and g.slope), None)
    fold = findings.find("E1", rec.FOLD, rec.TREATMENT, init=rec.PRIMARY_INIT)
    small_scale = findings.find("E1", rec.REFERENCE, "inv", init=rec.PRIMARY_INIT)
    sharp, post = findings.find("E1", "sharp_late", "sharp_early"), findings.find("E1", "pre_norm", "post_norm", warmup="0")
    suite = "asserted by the test suite"
    rows = [
        ("R1", "Var(q·k) = d_k (Vaswani et al. 2017, footnote 4)", f"{variance}; the bar is {suite}", "TEST"),
        ("R2, R4, R5, R6", "saturation, condensation, entropy bound, order of gradients", suite, "TEST"),
        (
            "R3",
            "the scale is a parametrisation (T5)",
            f"{sum(null)} of {len(null)} null controls bitwise equal" if null else "no null control",
            _pass(all(null), null),
        ),
        (
            "R7",
            "harmless at small d_k, harmful at large (Britz et al. 2017)",
            f"gap slope a doubling of d_k {signed(gap.estimate)} ({span(gap)})"
            if gap
            else "no recall study with two d_k and three seeds",
            _pass(None if gap is None or gap.low <= 0 <= gap.high else gap.low > 0, gap),
        ),
        ("R8", "unscaled is worse than init_fold at the largest d_k (T5)", *_foretold(fold, "HARM")),
        (
            "R9",
            "qk_norm: largest usable rate at least 3 times that of inv_sqrt (Wortsman et al. 2023)",
            *_largest_rate(findings),
        ),
        (
            "R10",
            "a forced largest logit of 10⁴ is worse than bigrams (Wortsman et al. 2023)",
            "not part of this grid",
            "NOT RUN",
        ),
        (
            "R11",
            "1/d_k is harmless at the best rate in small models (Wortsman et al. 2023)",
            *_foretold(small_scale, "NO HARM"),
        ),
        ("R12", "sharp attention hurts more while the rate rises than after (Zhai et al. 2023)", *_foretold(sharp, "HARM")),
        ("R13", "post-norm is worse than pre-norm without warm-up (Xiong et al. 2020)", *_foretold(post, "HARM")),
    ]
    return Table(
        "Reported, never asserted; a FAIL is shown. Scores are those after the steps of this grid.",
        ("name", "result", "measured", "status"),
        rows,
    )


def _pass(answer: bool | None, was_run: object) -> str:
    return "NOT RUN" if not was_run else "INCONCLUSIVE" if answer is None else "PASS" if answer else "FAIL"


def _foretold(c: Comparison | None, word: str) -> tuple[str, str]:
    """What was measured, and PASS where it is ``word``, FAIL where it is the opposite."""
    return _measured(c), _pass(c.agrees(word) if c else None, c)


def _largest_rate(findings: Findings) -> tuple[str, str]:
    """Medians over seeds of the largest rate that solves recall, at the largest d_k under the primary init."""
    mine = [r for r in findings.arms if r.study == rec.RECALL and r.condition.get(rec.INIT) == rec.PRIMARY_INIT and r.largest]
    widest = max((rec.width_of(r.condition) for r in mine), default=0.0)
    rates = {
        r.arm: median((rec.as_number(x) or 0.0) if x else 0.0 for x in r.largest)
        for r in mine
        if rec.width_of(r.condition) == widest
    }
    if not {rec.REFERENCE, "qk_norm"} <= set(rates):
        return "not part of this grid", "NOT RUN"
    ours, base = rates["qk_norm"], rates[rec.REFERENCE]
    top = max(rec.as_number(rate) or 0.0 for rate in findings.cells.levels(rec.RECALL, rec.RATE))
    measured = f"medians over seeds: qk_norm {ours:g}, inv_sqrt {base:g}; the largest rate of the grid is {top:g}"
    open_end = base == 0.0 or (ours < 3 * base and ours == top)
    return measured, _pass(None if open_end else ours >= 3 * base, rates)
