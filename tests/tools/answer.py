"""Compute the numbers about the scale that the pages have from the records of the ablation, and print what the pages say.

python tests/tools/answer.py             # the numbers, README's answer in both languages, the tables of docs/why_scale.md
python tests/tools/answer.py FILE.png    # README's figure

It reads the raw runs and uses none of the lab's code. ``tests/tools/test_answer.py`` compares what it prints with the pages.

- A ratio of rates: the largest stable rate with the scale over that without it (``docs/scaling_ablation/limits``). A run at a rate
  is stable if it has all its 200 steps and its mean accuracy over any 8 consecutive steps is at least 90 %. The largest stable rate is
  the geometric mean of the smallest rate that is not stable and the largest stable one below it.
- The formula: (b / η_QK + 1 / η_R) / (1 / η_QK + 1 / η_R) of each seed, with the largest stable rates η_QK and η_R of the model with
  the scale when only W_Q and W_K train, or only the rest, and b = d_k^¼ (AdamW) or √d_k (SGD).
- The share of W_Q and W_K: (1 / η_QK) / (1 / η_QK + 1 / η_R) of each seed, so that the formula is 1 + (b - 1) · share.
- The bounds: for a quadratic loss that curves upward, the largest stable rate η of all weights lies between 1 / (1 / η_QK + 1 / η_R)
  and the smaller one of η_QK and η_R. Each rate is known between two rates that were tried; η counts as below or above if no number
  between its two is between the bounds, whatever the bounds are within theirs.
- A ratio of steps: the steps from scratch until the mean accuracy of 16 steps (1,024 answers) reaches 90 %, without the scale over
  with it. With LeCun's weights twelve seeds, six of ``docs/scaling_ablation/record.jsonl.xz`` and six of ``norms``, at the rates that
  both have; with GPT-2's sixteen, six of the former and ten of ``init`` (standard deviation 0.02). Each arm runs at the rate that needs
  the fewest steps on the *other* seeds (mean; a run that does not get there counts as 1,500 steps).

A number is the median of the seeds, and its range that of the median by order statistics with at least 95 %: from the smallest to the
largest of six to eight seeds, from the second to the second largest of nine to eleven, from the third of twelve to fourteen, and from
the fourth of fifteen and sixteen.
"""

from __future__ import annotations

import functools
import itertools
import json
import lzma
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scipy import stats

RECORDS = Path(__file__).parents[2] / "docs" / "scaling_ablation"
CAP = 1500
WIDTHS = ("8", "32", "128", "512")
"""The d_k of the record ``limits``."""
Curves = dict[tuple[str, float, int], list[float]]
"""The accuracy of each step, by arm, learning rate and seed."""


class Ratio(NamedTuple):
    """The median of the seeds, the ends of its range, and the number of seeds."""

    median: float
    low: float
    high: float
    seeds: int

    def __format__(self, spec: str) -> str:
        """The median, or, with ``range``, the range as text."""
        return f"{self.low:.3g}–{self.high:.3g}" if spec == "range" else format(self.median, spec)


@functools.cache
def read(name: str) -> list[dict[str, Any]]:
    """The runs of a record that were made."""
    with lzma.open(RECORDS / name, "rt", encoding="utf-8") as lines:
        return [run for run in map(json.loads, lines) if run["status"] == "done"]


def means(curve: Sequence[float], window: int) -> Iterator[float]:
    """The mean over each ``window`` consecutive steps."""
    return (math.fsum(curve[end - window : end]) / window for end in range(window, len(curve) + 1))


def last_means(curve: Sequence[float], window: int) -> Iterator[float]:
    """The mean of the last ``window`` steps at each step, of fewer at first. At step 0 nothing has been learned yet."""
    return (statistics.fmean(curve[max(0, end - window) : end]) for end in range(1, len(curve) + 1))


def median(values: Iterable[float]) -> Ratio:
    """The median of ratios and its range."""
    found = sorted(values)
    count = len(found)
    k = max(int(stats.binom.ppf(0.025, count, 0.5)), 1)  # the k-th smallest: fewer than k are below the median in at most 2.5 %
    return Ratio(math.sqrt(found[(count - 1) // 2] * found[count // 2]), found[k - 1], found[-k], count)


# --- the largest stable rates


def is_stable(run: dict[str, Any], steps: int, start: float | None = None) -> bool:
    """Whether one run of a search has all its steps and never falls below 90 %, or rises above the loss ``start`` by more than 0.3."""
    if start is not None:
        return run["nonfinite_step"] is None and len(run["loss"]) == steps and max(means(run["loss"], 8)) <= start + 0.3
    curve = [value or 0.0 for value in run["accuracy"]]
    return run["nonfinite_step"] is None and len(curve) == steps and min(means(curve, 8)) >= 0.9


def bracket(runs: Sequence[dict[str, Any]], steps: int = 200, start: float | None = None) -> tuple[float, float]:
    """The two rates of a search between which the largest stable rate is."""
    high = min(run["rate"] for run in runs if not is_stable(run, steps, start))
    return max(run["rate"] for run in runs if run["rate"] < high), high


def largest_rate(runs: Sequence[dict[str, Any]], steps: int = 200, start: float | None = None) -> float:
    """The largest stable rate of a search."""
    return math.sqrt(math.prod(bracket(runs, steps, start)))


Place = tuple[str, str, str, str, int]
"""Of a search: its study, arm, d_k (in the grids of changes: the change), which weights train, and seed."""
Rates = dict[Place, float]
"""The largest stable rates."""


def brackets(searches: Iterable[dict[str, Any]], by_loss: bool = False) -> dict[Place, tuple[float, float]]:
    """The bracket of every search. ``by_loss``: a run is judged by its loss above that of the starting model."""
    found = {}
    for one in searches:
        factors, result = one["factors"], one["result"]
        if "runs" in result:
            setting = factors.get("head_dim") or factors["change"]
            place = (one["study"], one["arm"], setting, factors.get("trained", "all"), one["seed"])
            found[place] = bracket(result["runs"], result["cap"], result["start"] if by_loss else None)
    return found


def rates(searches: Iterable[dict[str, Any]], by_loss: bool = False) -> Rates:
    """The largest stable rate of every search."""
    return {place: math.sqrt(low * high) for place, (low, high) in brackets(searches, by_loss).items()}


def by_seed(found: Rates, *place: str) -> dict[int, float]:
    """The largest stable rates of a study, an arm, a d_k and the weights that train, by seed."""
    return {key[-1]: found[key] for key in sorted(found) if key[:-1] == place}


def ratios(
    found: Rates, study: str, d_k: str, arms: Sequence[str] = ("inv_sqrt", "unscaled"), part: str = "all"
) -> dict[int, float]:
    """The ratio of two arms, by seed."""
    high, low = (by_seed(found, study, arm, d_k, part) for arm in arms)
    return {seed: high[seed] / low[seed] for seed in high if seed in low}


def ratio_of_rates(*args: Any, **arms_and_part: Any) -> Ratio:
    """The median of ``ratios``."""
    return median(ratios(*args, **arms_and_part).values())


def real_model() -> dict[str, Any]:
    """SmolLM2-135M: the ratio with all weights trained, with W_Q and W_K alone, and the formula's for the former."""
    found = rates(read("real/cells.jsonl.xz"), by_loss=True)
    result: dict[str, Any] = {}
    for study, power in (("sgd", 0.5), ("adamw", 0.25)):
        for part in ("all", "qk"):
            result[f"real {study} {part}"] = ratio_of_rates(found, study, "64", part=part)
            result[f"real {study} {part} seeds"] = [
                f"{ratio:.2f}" for ratio in sorted(ratios(found, study, "64", part=part).values())
            ]
        result[f"real {study} formula"] = formula(found, study, "64", power)
    return result


def sides(found: dict[Place, tuple[float, float]], study: str = "", d_k: str = "", arm: str = "inv_sqrt") -> dict[str, int]:
    """How many largest stable rates of all weights lie ``below``, ``between`` and ``above`` their bounds.

    The parts are those of the model with the scale. Without it, η_QK is divided by b: the two models are the same but for this.
    """
    count = {"below": 0, "between": 0, "above": 0}
    for place, (low, high) in found.items():
        parts = [found.get((place[0], "inv_sqrt", place[2], part, place[-1])) for part in ("qk", "rest")]
        if place[1] == arm and place[3] == "all" and None not in parts and study in ("", place[0]) and d_k in ("", place[2]):
            (qk, rest), (qk_high, rest_high) = zip(*filter(None, parts), strict=True)
            fold = float(place[2]) ** OPTIMIZERS[place[0]][1] if arm == "unscaled" else 1.0
            at_least, at_most = 1 / (fold / qk + 1 / rest), min(qk_high / fold, rest_high)
            count["below" if high < at_least else "above" if low > at_most else "between"] += 1
    return count


def shares(found: Rates, study: str, d_k: str) -> dict[int, float]:
    """The share of W_Q and W_K, by seed."""
    qk, rest = parts_of(found, study, d_k)
    return {seed: rest[seed] / (qk[seed] + rest[seed]) for seed in qk if seed in rest}


def text_model() -> dict[str, Any]:
    """Character models on text: the ratios of the largest stable rates, and from scratch the loss without the scale minus that with it."""
    runs = read("text/cells.jsonl.xz")
    found = rates(runs, by_loss=True)
    result: dict[str, Any] = {f"text {study}": ratio_of_rates(found, study, "128") for study in ("adamw", "sgd")}
    for init in ("lecun", "gpt2"):
        chosen = [run for run in runs if run["study"] == "scratch" and run["factors"]["init"] == init]
        losses = {(run["arm"], float(run["factors"]["lr"]), run["seed"]): run["result"]["val_loss"] for run in chosen}
        result[f"text loss {init}"] = difference_of_losses(losses)
        result[f"text rates {init}"] = best_rate(losses, "inv_sqrt") / best_rate(losses, "unscaled")
    return result


def text_parts(record: str = "text_parts", d_k: str = "128") -> dict[str, Any]:
    """The models of text: the shares of W_Q and W_K, the ratios that the formula gives, and the sides of the bounds."""
    searches = brackets(read(f"{record}/cells.jsonl.xz"), by_loss=True)
    found = {place: math.sqrt(low * high) for place, (low, high) in searches.items()}
    result: dict[str, Any] = {}
    for study in BOTH:
        for arm in ("inv_sqrt", "unscaled"):
            result[f"text {study} {arm}"] = sides(searches, study, arm=arm)
        of = sorted(shares(found, study, d_k).values())
        result[f"text {study} share"] = median(of)._replace(median=statistics.median(of))
        result[f"text {study} formula"] = formula(found, study, d_k, OPTIMIZERS[study][1])
        for part, by in zip(("qk", "rest"), parts_of(found, study, d_k), strict=True):
            result[f"text {study} {part}"] = statistics.median(by.values())
        seeds = shares(found, study, d_k)
        result[f"text {study} all"] = statistics.median(by_seed(found, study, "inv_sqrt", d_k, "all")[seed] for seed in seeds)
        qk, rest = parts_of(found, study, d_k)
        for arm, fold in (("inv_sqrt", 1.0), ("unscaled", float(d_k) ** OPTIMIZERS[study][1])):
            whole = by_seed(found, study, arm, d_k, "all")
            sums = (whole[seed] * (fold / qk[seed] + 1 / rest[seed]) for seed in seeds if seed in whole)
            result[f"text {study} {arm} over the sum"] = statistics.median(sums)
        measured = {seed: ratio for seed, ratio in ratios(found, study, d_k).items() if seed in seeds}
        result[f"text {study} measured"] = median(measured.values())
    return result


def rows_of_text(found: dict[str, Any]) -> list[str]:
    """The rows of the table in ``text_parts/README.md``."""
    rows = []
    for study in BOTH:
        name, power = OPTIMIZERS[study]
        bound, share, measured = 128**power, found[f"text {study} share"], found[f"text {study} measured"]
        alone = " | ".join(f"{found[f'text {study} {part}']:.3g}" for part in ("all", "qk", "rest"))
        implied = (measured.median - 1) / (bound - 1)
        ratio = f"{bound:.2f} | {found[f'text {study} formula']:.2f} | {measured:.2f} ({measured:range})"
        rows.append(f"| {name} | {alone} | {share:.2f} ({share:range}) | {implied:.2f} | {ratio} |")
    return rows


def sentences_of_text(found: dict[str, Any]) -> list[str]:
    """What ``text_parts/README.md`` says in sentences."""
    adamw, sgd = (found[f"text {study} share"] for study in BOTH)
    lines = [f"{adamw:.2f} ({adamw:range}) with AdamW and {sgd:.2f} ({sgd:range}) with SGD"]
    for arm, words in (("inv_sqrt", "With the scale"), ("unscaled", "Without it")):
        times = [f"{found[f'text {study} {arm} over the sum']:.2f}" for study in BOTH]
        lines.append(f"{words}, η\\* is {times[0]} times what the sum gives with AdamW, and {times[1]} times with SGD")
        counts = [found[f"text {study} {arm}"] for study in BOTH]
        between, total = sum(count["between"] for count in counts), sum(sum(count.values()) for count in counts)
        lines.append(f"{words}, {between} of {total} lie between them")
    return lines


# --- changes of attention

CHANGES = {
    **{"plain": "none (the plain model)", "gate": "output gate", "differential": "differential attention"},
    **{"value_residual": "value residual", "qk_norm": "QK-norm", "qk_clip": "QK-clip", "softcap": "soft-cap", "sinks": "sinks"},
    **{"learned": "learned scale", "log_length": "log-length scale", "latent": "latent attention"},
    **{"no_positions": "no positions in every fourth layer", "attention_residuals": "attention residuals"},
}
"""The names of the changes on the page, in the order of the grid."""
FACTORED = ("learned", "log_length")
"""Changes that have a scale of their own: in the arm without 1/√d_k, it starts √d_k times larger."""


def verdict(found: dict[int, tuple[tuple[float, float], tuple[float, float]]]) -> tuple[Ratio, str]:
    """The ratio of the first of two largest stable rates to the second, and whether the second is LESS, MORE or the SAME, by ×1.25.

    The range of the ratio is wider for this by the widest bracket, since a rate is known no better.
    """
    ratio = median(math.sqrt(math.prod(first) / math.prod(second)) for first, second in found.values())
    step = max(high / low for pair in found.values() for low, high in pair)
    low, high = ratio.low / step, ratio.high * step
    return ratio, "LESS" if low > 1.25 else "MORE" if high < 0.8 else "SAME" if low >= 0.8 and high <= 1.25 else "UNDECIDED"


def changes(record: str = "changes") -> dict[str, dict[str, Any]]:
    """Of each change: the largest stable rates with 1/√d_k and without it, the verdict on them, and that against the plain model's rate."""
    searches = brackets(read(f"{record}/cells.jsonl.xz"), by_loss=record == "changes")
    result = {}
    for change in dict.fromkeys(place[2] for place in searches):
        others = (("plain", "own"), (change, "factored" if change in FACTORED else "unscaled"))
        own, plain, without = (
            {place[-1]: ends for place, ends in searches.items() if (place[2], place[1]) == side}
            for side in ((change, "own"), *others)
        )
        result[change] = {
            "with": median(math.sqrt(math.prod(ends)) for ends in own.values()),
            "without": median(math.sqrt(math.prod(ends)) for ends in without.values()),
            "ratio": verdict({seed: (own[seed], without[seed]) for seed in own if seed in without}),
            "plain": verdict({seed: (plain[seed], own[seed]) for seed in own if seed in plain}),
        }
    return result


def main_ratios(found: dict[str, dict[str, Any]]) -> tuple[Ratio, Ratio, float, float]:
    """The ratios of the plain model and of QK-norm, the smallest and the largest median ratio of the other changes."""
    plain, norm = (found[change]["ratio"][0] for change in ("plain", "qk_norm"))
    others = [of["ratio"][0].median for change, of in found.items() if change not in ("plain", "qk_norm")]
    return plain, norm, min(others), max(others)


def sentences_of_changes(found: dict[str, dict[str, Any]], recall: dict[str, dict[str, Any]]) -> list[str]:
    """What ``docs/changes.md`` says in sentences."""
    plain, norm, low, high = main_ratios(found)
    against = [1 / found[change]["plain"][0].median for change in found if change != "plain"]
    searches = brackets(read("changes/cells.jsonl.xz"), by_loss=True)
    clipped, unclipped = (
        {seed: ends for (_, arm, name, _, seed), ends in searches.items() if (arm, name) == ("unscaled", change)}
        for change in ("qk_clip", "plain")
    )
    same = sum(ends == unclipped[seed] for seed, ends in clipped.items())
    plain_recall, norm_recall, low_recall, high_recall = main_ratios(recall)
    rate, word = recall["qk_norm"]["plain"]
    (acts, with_it), (acts_without, without), (in_time, collapses) = clips("own"), clips("unscaled"), clips("unscaled", False)
    assert acts == 0
    return [
        f"smaller by a factor of {plain:.2f} ({plain:range}) in the plain model, {norm:.2f} ({norm:range}) with QK-norm, "
        f"and {low:.2f} to {high:.2f} with the other eleven changes",
        f"{plain_recall:.2f} ({plain_recall:range}) in the plain model, {norm_recall:.2f} ({norm_recall:range}) with QK-norm, "
        f"and {low_recall:.2f} to {high_recall:.2f} with the seven others",
        f"{1 / rate.median:.2f} times the plain model's ({1 / rate.high:.2f}–{1 / rate.low:.2f}), {word}",
        f"between {min(against):.2f} and {max(against):.2f} times the plain model's",
        f"in none of {with_it} runs with the scale and in {acts_without} of {without} without it",
        f"In {collapses - in_time} of {collapses} collapses no score exceeds the limit before the loss has risen by 0.3 nats",
        f"in {same} of {len(clipped)} seeds the largest stable rate without the scale is exactly the plain model's",
    ]


def clips(arm: str, stable: bool | None = None) -> tuple[int, int]:
    """In how many runs QK-clip acts, and of how many: those that the plain model has at the same rate and seed. It acts if a loss differs.

    ``stable``: only runs that are stable, or not, in the plain model.
    """
    runs = {
        (one["factors"]["change"], one["seed"], run["rate"]): run
        for one in read("changes/cells.jsonl.xz")
        if (one["study"], one["arm"]) == ("stable", arm)
        for run in one["result"]["runs"]
    }
    pairs = [(run, runs.get(("plain", *place))) for (change, *place), run in runs.items() if change == "qk_clip"]
    both = [(run, plain) for run, plain in pairs if plain is not None and stable in (None, plain["stable"])]
    return sum(run["loss"] != plain["loss"] for run, plain in both), len(both)


def rows_of_changes(found: dict[str, dict[str, Any]], recall: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The numbers in the rows of the table in ``docs/changes.md``, by the name of the change; ``recall``: those of models of recall."""
    rows = {}
    for change in filter(found.__contains__, CHANGES):
        of, (plain, against) = found[change], found[change]["plain"]
        cells = [f"{of[side].median * 1e3:.2f}" for side in ("with", "without")]
        verdicts = [ratios[change]["ratio"] if change in ratios else None for ratios in (found, recall)]
        cells += [f"{one[0]:.2f} ({one[0]:range}) {one[1]}" if one else "–" for one in verdicts]
        times = f"{1 / plain.median:.2f} ({1 / plain.high:.2f}–{1 / plain.low:.2f}) {against}"
        rows[CHANGES[change]] = f"| {' | '.join([*cells, times if change != 'plain' else '–'])} |"
    return rows


def best_rate(losses: dict[tuple[str, float, int], float], arm: str, without: int | None = None) -> float:
    """The rate with the smallest mean loss, over all seeds or those that are not ``without``."""

    def mean(rate: float) -> float:
        return statistics.mean(loss for key, loss in losses.items() if key[:2] == (arm, rate) and key[2] != without)

    return min({rate for one, rate, _ in losses if one == arm}, key=mean)


def difference_of_losses(losses: dict[tuple[str, float, int], float]) -> Ratio:
    """The median over the seeds, the smallest and the largest; each arm at the rate with the smallest mean on the other seeds."""

    def loss_of(arm: str, seed: int) -> float:
        return losses[arm, best_rate(losses, arm, without=seed), seed]

    found = sorted(loss_of("unscaled", seed) - loss_of("inv_sqrt", seed) for seed in {seed for *_, seed in losses})
    return Ratio(statistics.median(found), found[0], found[-1], len(found))


def exponent(found: Rates, study: str) -> tuple[float, float, float]:
    """The slope of ln(ratio) on ln(d_k): the mean of the seeds, and the ends of its 95 % interval (Student's t)."""
    by_width = {math.log(float(d_k)): ratios(found, study, d_k) for d_k in WIDTHS}
    seeds = next(iter(by_width.values()))
    ys = [[math.log(of[seed]) for of in by_width.values()] for seed in seeds]
    slopes = [statistics.linear_regression(list(by_width), each).slope for each in ys]
    mean = statistics.mean(slopes)
    return mean, *stats.t.interval(0.95, len(seeds) - 1, mean, stats.sem(slopes))


def parts_of(found: Rates, study: str, d_k: str) -> list[dict[int, float]]:
    """η_QK and η_R of the model with the scale, by seed."""
    return [by_seed(found, study, "inv_sqrt", d_k, part) for part in ("qk", "rest")]


def formula(found: Rates, study: str, d_k: str, power: float) -> float:
    """The ratio that the formula gives: the median of the seeds."""
    qk, rest = parts_of(found, study, d_k)
    bound = float(d_k) ** power
    seeds = qk.keys() & rest.keys()
    return statistics.median((bound / qk[seed] + 1 / rest[seed]) / (1 / qk[seed] + 1 / rest[seed]) for seed in seeds)


# --- steps from scratch


def curves(runs: Sequence[dict[str, Any]], study: str, **factors: str) -> Curves:
    """The curves of a study at some levels of its factors, of the seeds that did not decide which rates were tried."""
    chosen = (run for run in runs if run["study"] == study and factors.items() <= run["factors"].items() and run["seed"] >= 10)
    return {(run["arm"], float(run["factors"]["lr"]), run["seed"]): run["result"]["accuracy"] for run in chosen}


def steps(curve: Sequence[float]) -> int:
    """Steps to 90 % of 16 steps; a run that was left out or does not get there counts as the cap."""
    return next((end for end, mean in enumerate(means(curve, 16), 16) if mean >= 0.9), CAP)


def steps_of(found: dict[tuple[str, float, int], int], arm: str, seed: int) -> int:
    """The steps of a seed, at the rate that is best on the other seeds, of the steps of each curve."""
    others = {other for _, _, other in found} - {seed}

    def cost(rate: float) -> float:
        return math.fsum(math.log(found.get((arm, rate, other), CAP)) for other in others)

    best = min(sorted({rate for _, rate, _ in found}), key=cost)
    return found.get((arm, best, seed), CAP)


def ratio_of_steps(found: Curves) -> Ratio:
    """Steps without the scale over steps with it. Of a run that ended at its cap only a lower end is known."""
    seeds, counts = {seed for _, _, seed in found}, {key: steps(curve) for key, curve in found.items()}
    pairs = [(steps_of(counts, "unscaled", seed), steps_of(counts, "inv_sqrt", seed)) for seed in seeds]
    high = median(math.inf if without == CAP else without / with_it for without, with_it in pairs).high
    return median(without / with_it for without, with_it in pairs)._replace(high=high)


def from_scratch() -> dict[str, Curves]:
    """The curves from scratch at d_k 128, by initial weights: ``lecun`` with twelve seeds, ``gpt2`` with sixteen."""
    before = read("record.jsonl.xz")
    found = {init: curves(before, "recall", init=init, head_dim="128") for init in ("lecun", "gpt2")}
    norms = curves(read("norms/cells.jsonl.xz"), "recall")
    later = {key: curve for key, curve in norms.items() if key[0] in ("inv_sqrt", "unscaled")}
    small = curves(read("init/cells.jsonl.xz"), "recall", init="0.02")
    return {init: at_shared_rates(found[init], more) for init, more in (("lecun", later), ("gpt2", small))}


INITS = ("0.02", "0.03", "0.044", "0.0625", "0.088")
"""The standard deviations of the initial weights that the record ``init`` tried."""


def by_init() -> dict[str, Ratio]:
    """The ratio of steps by the standard deviation of the initial weights."""
    runs = read("init/cells.jsonl.xz")
    return {init: ratio_of_steps(curves(runs, "recall", init=init)) for init in INITS}


def crossing(found: dict[str, Ratio]) -> float:
    """The standard deviation at which the medians pass 1, on a line between two points of the logarithms."""
    points = [(math.log(float(init)), math.log(ratio.median)) for init, ratio in found.items()]
    (x, y), (x2, y2) = next(pair for pair in itertools.pairwise(points) if pair[0][1] < 0 <= pair[1][1])
    return math.exp(x - y * (x2 - x) / (y2 - y))


def at_shared_rates(first: Curves, second: Curves) -> Curves:
    """The curves of two records at the rates that both tried."""
    shared = {rate for _, rate, _ in first} & {rate for _, rate, _ in second}
    return {key: curve for key, curve in {**first, **second}.items() if key[1] in shared}


# --- what the pages say

OPTIMIZERS = {
    **{"adamw": ("AdamW", 0.25), "lion": ("Lion", 0.25), "muon": ("Muon", 0.25)},
    **{"sgd": ("SGD, momentum .9", 0.5), "plain_sgd": ("SGD", 0.5), "relative": ("relative steps", 0.0)},
}
"""Studies of thresholds: the name, and the exponent e of d_k that is the bound."""
BOTH = ("adamw", "sgd")


def numbers() -> dict[str, Any]:
    """The largest stable rates, the ratios and the formula's values, by name."""
    found = rates(read("limits/cells.jsonl.xz"))
    result: dict[str, Any] = {f"steps {init}": ratio_of_steps(of) for init, of in from_scratch().items()}
    result |= real_model() | text_model() | text_parts() | {"changes": changes()}
    steps_by_init = by_init()
    result |= {f"steps {init}": ratio for init, ratio in steps_by_init.items()} | {"even": crossing(steps_by_init)}
    for study, (_, power) in OPTIMIZERS.items():
        result[f"{study} exponent"] = exponent(found, study)
        for d_k in WIDTHS:
            result[f"{study} {d_k}"] = ratio_of_rates(found, study, d_k)
            if study in BOTH:
                result[f"{study} {d_k} formula"] = formula(found, study, d_k, power)
                qk, rest = parts_of(found, study, d_k)
                result[f"{study} {d_k} rest over qk"] = statistics.median(rest.values()) / statistics.median(qk.values())
                whole = by_seed(found, study, "inv_sqrt", d_k, "all")
                sums = (whole[seed] * (1 / qk[seed] + 1 / rest[seed]) for seed in whole)
                result[f"{study} {d_k} over the sum"] = statistics.median(sums)
    for study in BOTH:
        result[f"{study} query"] = ratio_of_rates(found, study, "128", arms=("inv_sqrt", "query"))
        result[f"{study} from unscaled"] = ratio_of_rates(found, f"{study}_from_unscaled", "128")
    for d_k in ("8", "128"):
        result[f"1/d_k {d_k}"] = ratio_of_rates(found, "adamw", d_k, arms=("inv", "inv_sqrt"))
    return result


def answer(found: dict[str, Any]) -> dict[str, list[str]]:
    """The lines of README's answer, by the name of the page. The words "no more" need a range that ends at 1 or below."""
    assert found["steps gpt2"].high <= 1
    start, lost = found["steps lecun"], found["text loss gpt2"]
    places = ("{} 8", "{} 128", "text {}")
    rows = {study: [found[place.format(study)] for place in places] for study in BOTH}
    plain = [
        " | ".join([f"| {name}", *(f"{one:.{0 if one.median > 10 else 1}f} ({one:range})" for one in rows[study])]) + " |"
        for study, name in zip(BOTH, ("AdamW", "SGD"), strict=True)
    ]
    return {
        "README.md": [
            "Scores are √d_k times larger, and updates move them further. We removed the scale from trained models, keeping their "
            "function. *Collapse*: accuracy below 90 % over 8 steps; text: loss up 0.3 nats.",
            "",
            "| largest rate without collapse: times smaller | d_k 8 | d_k 128 | text, d_k 128 |",
            "|---|---|---|---|",
            *plain,
            "",
            f"From LeCun's initial weights (d_k 128), AdamW then needs {start:.1f} times the steps ({start:range}); from GPT-2's, our "
            f"default, as many, but text ends {lost:.2f} nats higher.",
        ],
        "README.zh.md": [
            "没有缩放，分数是原来的 √d_k 倍，每次更新也使分数移动得更远。我们从训练好的模型里去掉缩放，不改变它算出的结果，再继续训练。"
            "*崩溃*：连续 8 步的准确率低于 90 %；在文本上，是损失上升超过 0.3 nat。",
            "",
            "| 不崩溃的最大学习率缩小的倍数 | d_k = 8 | d_k = 128 | 文本，d_k = 128 |",
            "|---|---|---|---|",
            *plain,
            "",
            f"从头训练（d_k = 128）：用 LeCun 的初始权重，AdamW 需要 {start:.1f} 倍的步数（{start:range}）；用 GPT-2 的初始权重（minitx 的默认值），"
            f"并不需要更多，但在文本上损失高 {lost:.2f} nat。",
        ],
    }


def sentences(found: dict[str, Any]) -> dict[str, list[str]]:
    """What ``docs/why_scale.md`` and its Chinese page say in sentences."""
    lecun, gpt2 = found["steps lecun"], found["steps gpt2"]
    real, alone = found["real sgd all"], found["real sgd qk"]
    *seeds, last = found["real adamw all seeds"]
    adamw, sgd, lost, large = (found[f"text {name}"] for name in ("adamw", "sgd", "loss gpt2", "loss lecun"))
    even, spread = found["even"], 128**1.5 * found["even"] ** 2  # √d_k · width · σ²
    parts = sorted(value for name, value in found.items() if name.endswith("rest over qk"))
    plain, norm, least, most = main_ratios(found["changes"])
    (a, *_, b), (c, *_, d) = (sorted(found[f"{study} {d_k} over the sum"] for d_k in WIDTHS) for study in ("adamw", "sgd"))
    return {
        "why_scale.md": [
            f"equally fast near a standard deviation of {even:.3f}, where unscaled logits have {spread:.1f}",
            f"the bounds are 3.36 and 11.3; measured are {adamw:.2f} ({adamw:range}) with AdamW and {sgd:.2f} ({sgd:range}) with SGD",
            f"| GPT-2's N(0, 0.02²) | {gpt2:.2f} ({gpt2:range}) | {lost:.2f} ({lost:range}) |",
            f"| LeCun's | {lecun:.1f} ({lecun:range}) | {large:.2f} ({large:range}) |",
            f"it is {found['text rates gpt2']:.0f} times smaller without the scale",
            f"the formula gives {found['real sgd formula']:.2f}, and {real:.2f} ({real:range}) is measured",
            f"with AdamW the formula gives {found['real adamw formula']:.2f}, and {found['real adamw all']:.2f} is measured "
            f"({', '.join(seeds)} and {last} in the three seeds). With W_Q and W_K alone it is {alone:.1f} and {found['real adamw qk']:.2f}",
            f"η_QK is {parts[0]:.1f} to {parts[-1]:.1f} times smaller than η_R",
            f"η\\* is {a:.2f} to {b:.2f} times this sum's prediction with AdamW, and {c:.2f} to {d:.2f} times with SGD",
            f"larger rate than 1/√d_k: {found['1/d_k 8']:.1f} times at d_k 8, {found['1/d_k 128']:.1f} times at 128",
            f"{found['adamw query']:.1f} times with AdamW, {found['sgd query']:.0f} times with SGD",
            f"{plain:.2f} in the plain model, {norm:.2f} ({norm:range}) with QK-norm, {least:.2f} to {most:.2f} with eleven other changes",
            f"{found['adamw from unscaled']:.1f} ({found['adamw from unscaled']:range}) with AdamW and "
            f"{found['sgd from unscaled']:.1f} ({found['sgd from unscaled']:range}) with SGD",
        ],
        "why_scale.zh.md": [
            f"标准差约为 {even:.3f} 时两者一样快，这时不缩放的 logit 的标准差是 {spread:.1f}",
            f"上界是 3.36 和 11.3；测得的是 AdamW {adamw:.2f}（{adamw:range}），SGD {sgd:.2f}（{sgd:range}）",
            f"| GPT-2 的 N(0, 0.02²) | {gpt2:.2f} ({gpt2:range}) | {lost:.2f} ({lost:range}) |",
            f"| LeCun | {lecun:.1f} ({lecun:range}) | {large:.2f} ({large:range}) |",
            f"最佳学习率小到 1/{found['text rates gpt2']:.0f}",
            f"公式给出 {found['real sgd formula']:.2f}，测得 {real:.2f}（{real:range}）",
            f"用 AdamW 时公式给出 {found['real adamw formula']:.2f}，测得 {found['real adamw all']:.2f}"
            f"（三个种子分别为 {'、'.join([*seeds, last])}）。只训练 W_Q 和 W_K 时是 {alone:.1f} 和 {found['real adamw qk']:.2f}",
            f"η_QK 是 η_R 的 1/{parts[0]:.1f} 到 1/{parts[-1]:.1f}",
            f"AdamW 下 η\\* 是它给出的值的 {a:.2f} 到 {b:.2f} 倍，SGD 下是 {c:.2f} 到 {d:.2f} 倍",
            f"d_k 为 8 时是 1/√d_k 的 {found['1/d_k 8']:.1f} 倍，d_k 为 128 时是 {found['1/d_k 128']:.1f} 倍",
            f"AdamW 下是 {found['adamw query']:.1f}，SGD 下是 {found['sgd query']:.0f}",
            f"比值在普通模型是 {plain:.2f}，用 QK-norm 是 {norm:.2f}（{norm:range}），用另外十一种改动是 {least:.2f} 到 {most:.2f}",
            f"AdamW 下是 {found['adamw from unscaled']:.1f}（{found['adamw from unscaled']:range}），"
            f"SGD 下是 {found['sgd from unscaled']:.1f}（{found['sgd from unscaled']:range}）",
        ],
    }


def notebook(found: dict[str, Any]) -> dict[str, str]:
    """What the notebook says of the records, in ``examples/attention.py``."""
    lecun, gpt2, adamw, sgd = (found[name] for name in ("steps lecun", "steps gpt2", "adamw 128", "sgd 128"))
    low = f"{found['adamw 8']:.1f}", f"{found['sgd 8']:.1f}"
    return {
        "en start": f"With these initial weights (LeCun's) and AdamW, each seed at the rate that is best on the others, it needs "
        f"{lecun:.1f} times as many steps as with the scale ({lecun:range}); with GPT-2's smaller weights {gpt2:.2f} times ({gpt2:range})",
        "zh start": f"用这里的初始权重（LeCun）和 AdamW，每个种子用在其他种子上最好的学习率，所需步数是有缩放时的 {lecun:.1f} 倍（{lecun:range}）；"
        f"用 GPT-2 较小的权重，则是 {gpt2:.2f} 倍（{gpt2:range}）",
        "en rate": f"Over ten seeds, the largest rate without a collapse was {adamw:.1f} times smaller with AdamW ({adamw:range}) and "
        f"{sgd:.0f} times with SGD ({sgd:range}); at d_k = 8, {low[0]} and {low[1]} times",
        "zh rate": f"十个种子的结果：不崩溃的最大学习率，AdamW 下缩小到 1/{adamw:.1f}（倍数的范围 {adamw:range}），SGD 下缩小到 1/{sgd:.0f}（{sgd:range}）；"
        f"d_k = 8 时分别是 1/{low[0]} 和 1/{low[1]}",
    }


def tables(found: dict[str, Any]) -> dict[str, list[str]]:
    """The rows of the tables in ``docs/why_scale.md`` and its Chinese page, which have the same numbers."""
    rows: dict[str, list[str]] = {"formula": [], "optimizers": []}
    for study, (name, power) in OPTIMIZERS.items():
        mean, low, high = found[f"{study} exponent"]
        rows["optimizers"].append(f"| {name} | {power:g} | {mean:.3f} [{low:.3f}, {high:.3f}] |".replace("-", "−"))
        for d_k in WIDTHS if study in BOTH else ():
            predicted, measured = found[f"{study} {d_k} formula"], found[f"{study} {d_k}"]
            bound = float(d_k) ** power
            rows["formula"].append(
                f"| {name.partition(',')[0]}, {d_k} | {bound:.2f} | {predicted:.2f} | {measured:.2f} ({measured:range}) |"
            )
    return rows


# --- README's figure


def draw(path: str) -> None:
    """Draw solved models that are trained on, the largest stable rates against d_k, and the steps from scratch."""
    from minitx.canvas import INK, PALETTE, label, legend, log_ticks, panels, save_figure

    found, before = rates(read("limits/cells.jsonl.xz")), read("record.jsonl.xz")
    figure, axes = panels(2, 2, width=4.1, height=2.5)
    axes = axes.flat
    arms, widths = dict(zip(("inv_sqrt", "unscaled"), PALETTE, strict=False)), [int(d_k) for d_k in WIDTHS]
    for (arm, rate, _), curve in curves(before, "stability_adamw", head_dim="128").items():
        if rate == 0.01 and arm in arms:
            axes[0].plot(list(last_means(curve, 8)), color=arms[arm][0], linewidth=0.9, alpha=0.8)
    label(axes[0], "A solved model, trained on\n(AdamW, rate 0.01, d_k 128)", "step", "accuracy (mean of the last 8)")
    for ax, study, name, power in zip(axes[1:3], ("adamw", "sgd"), ("AdamW", "SGD"), (0.25, 0.5), strict=False):
        for i, (arm, (color, marker)) in enumerate(arms.items()):
            for d_k in widths:
                heights = by_seed(found, study, arm, str(d_k), "all").values()
                xs = [d_k * 2 ** (0.18 * (2 * i - 1) + 0.03 * (k - len(heights) / 2)) for k in range(len(heights))]
                ax.plot(xs, heights, marker, color=color, markersize=3)
        middle = [statistics.median(by_seed(found, study, "inv_sqrt", d_k, "all").values()) for d_k in WIDTHS]
        predicted = [formula(found, study, d_k, power) for d_k in WIDTHS]
        ax.plot(widths, [rate / ratio for rate, ratio in zip(middle, predicted, strict=True)], "-", color=INK, linewidth=1.2)
        ax.plot(widths, [rate / d_k**power for rate, d_k in zip(middle, widths, strict=True)], "--", color=INK, linewidth=1)
        ax.set_xscale("log", base=2)
        log_ticks(ax)
        ax.set_xticks(widths, [str(d_k) for d_k in widths])
        label(ax, f"Largest rate without a collapse\n({name})", "d_k", "learning rate")
    for column, of_init in enumerate(from_scratch().values()):
        seeds, counts = sorted({seed for _, _, seed in of_init}), {key: steps(curve) for key, curve in of_init.items()}
        for i, (arm, (color, marker)) in enumerate(arms.items()):
            heights = [steps_of(counts, arm, seed) for seed in seeds]
            xs = [column + 0.3 * (i - 0.5) + 0.03 * (k - len(heights) / 2) for k in range(len(heights))]
            for x, height in zip(xs, heights, strict=True):
                ended = height >= CAP  # at its cap, before it had learned the task
                axes[3].plot(
                    x,
                    height,
                    "^" if ended else marker,
                    color=color,
                    markersize=5 if ended else 3,
                    fillstyle="none" if ended else "full",
                )
    log_ticks(axes[3])
    axes[3].set_xlim(-0.5, 1.5)
    axes[3].set_xticks([0, 1], ["LeCun's", "GPT-2's"])
    label(axes[3], "Steps to learn the task\n(AdamW, d_k 128)", "initial weights", "steps")
    names = {"inv_sqrt": "with the scale 1/√d_k", "unscaled": "without the scale"}
    lines = [("without it, predicted", INK, "", "-"), ("its bound: d_k^¼ or √d_k", INK, "", "--")]
    capped = (f"ended at its cap of {CAP:,} steps, not learned", INK, "^", "")
    legend(figure, [*((names[arm], *look, "-") for arm, look in arms.items()), *lines, capped])
    figure.legends[0].legend_handles[-1].set_fillstyle("none")
    save_figure(figure, path)


if __name__ == "__main__":
    found = numbers()
    if len(sys.argv) > 1:
        draw(sys.argv[1])
        raise SystemExit
    for name, one in found.items():
        told = f"{one:.3f} ({one.low:.3f} to {one.high:.3f}; {one.seeds})" if isinstance(one, Ratio) else one
        print(f"{name:22}", told)
    for page, lines in answer(found).items():
        print(f"\n{page}", *lines, sep="\n")
    for name, lines in {**tables(found), **sentences(found), "text_parts": rows_of_text(found)}.items():
        print(f"\n{name}", *lines, sep="\n")
