"""Writes docs/dev/performance.md, and the lines about speed of both READMEs, from the files of benchmarks/results/ that have ``rows``.

    python benchmarks/report.py

Runs nothing. Numbers come from the files alone, so the page says what was recorded, where, when and with which command.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from measure import RESULTS, number, table, verdict, wish

PAGE = Path(__file__).parents[1] / "docs" / "dev" / "performance.md"
READMES = {language: PAGE.parents[2] / name for language, name in (("en", "README.md"), ("zh", "README.zh.md"))}
BEGIN, END = "<!-- performance:begin -->\n", "<!-- performance:end -->"
TARGETS = {
    "P1": "training throughput over other libraries, same architecture, weights and batch",
    "P2": "time to nanoGPT's loss on tiny-shakespeare",
    "P3": "tokens to that loss, modern preset over GPT-2's",
    "P4": "a step under the trainer over a raw loop",
    "P5": "fused and chunked attention over math attention",
    "P6": "regret of `auto` over the best backend",
    "P7": "ragged encoder training over padding",
    "P8": "greedy decoding with a cache",
    "P9": "peak memory of a training step over Hugging Face",
    "P10": "cold start to the first step, and batches from the loader",
    "P11": "attention statistics each 50 steps over none",
    "P12": "what our Python costs over plain torch",
}
CHINESE = {
    "P1": "相同结构、权重和批次下，训练吞吐量与其他库之比",
    "P2": "在 tiny-shakespeare 上达到 nanoGPT 损失所需的时间",
    "P3": "达到该损失所需的词元数，现代配方与 GPT-2 配方之比",
    "P4": "训练器中的一步与裸循环之比",
    "P5": "融合与分块注意力相对 math 后端",
    "P6": "`auto` 的遗憾值：比最佳后端多花的时间",
    "P7": "变长序列的编码器训练，相对填充",
    "P8": "带缓存的贪心解码",
    "P9": "一个训练步的峰值内存，相对 Hugging Face",
    "P10": "冷启动到第一步，以及数据加载",
    "P11": "每 50 步统计一次注意力，相对不统计",
    "P12": "自身的 Python 代码相对纯 torch 的开销",
}
WORDS = {
    "en": (TARGETS, "| what | setting | median (95 %) | wanted |", {True: "met", False: "missed"}, " to "),
    "zh": (CHINESE, "| 内容 | 设置 | 中位数（95 % 区间） | 要求 |", {True: "达到", False: "未达到"}, " ～ "),
}
HEAD = """# Performance

What minitx costs beside others, on the machines named below. `make bench` measures the CPU's part again and writes this page, but for
P2 and P3, runs of minutes each (`make bench-quality TEXT=tinyshakespeare.txt`, the file of 1,115,394 characters that nanoGPT reads), and
P8's whole length (`python benchmarks/decoding.py`). The switches under P3 come from the grid `experiment=speedrun_ablation`, on the King
James text; the value residual and the embedding shortcut, two of them, were taken out since, so `speedrun_char` has no value residual now.
`sdpa:math` of P5 is torch's plain path. `python benchmarks/report.py` writes the page from the files in `benchmarks/results/`, from which every number here comes.

Both sides of a row run in one process (P2, P3 and the cold start of P10: in processes of their own, one after another), with the same
threads and the same batch, in blocks by turns, A B B A. Each pair of neighbours gives a ratio; a row shows the median and its 95 %
bootstrap interval, and counts as *met* when the whole interval meets what was wanted. A against A is the same measurement between
blocks of one side: where its interval does not hold 1, the machine was not quiet enough for the row, whatever it says. Ratios with `≥`
say how many times as fast minitx is, those with `≤` its time or memory over the other's. Rows without an interval are counted, not
timed. A regret of 1 without a spread (P6): there `auto` took the very backend that was the fastest in either half of the rounds.
"""

WHY = """
## Why what is missed is missed

- P1 on a CPU: most of a float32 step are matrix products that every side hands to the same kernel, so that only the rest can be
  faster. bfloat16 does not pay on this CPU, which has no instructions for it.
- P2: the median is above what was wanted, the lower end of the interval of five seeds is not: in the pair behind it `gpt2_baseline` took 105 s,
  where it took up to 132 s in others, and `speedrun_char` 21.5 s. `speedrun_char` makes as many steps as its slowest seed needs. `gpt2_baseline` is
  nanoGPT's recipe for a CPU with its rate of 1e-3 and 2,000 steps, whole, and ends between 1.889 and 1.909: the row is the time of its budget over
  the time to 1.885. With a rate of its own, as P3 has it, it needs fewer tokens.
- P4: a trainer's step takes some 2.5 ms more than the loop's. 0.9 ms are the gradient norm and the check for NaN before every update, which the
  loop leaves out; the rest is Lightning's own Python between two steps.
- P6, worst kind: values wider than the queries, 2²² scores. There torch's plain path and `chunked` take about as long, and which of them is ahead changes
  from recording to recording (docs/dev/decisions.md); a rule about sizes cannot be right in all.
- P8: a token of a single row reads every weight once, and both sides are bound by how fast their products do so. Ours are made in halves
  (the second table below); reading the weights and nothing else would take more than half of our time for a token. The prompt,
  which counts, takes as long on both sides.
- P10 on rows of `datasets`: its loader reads a whole batch at once; the rows above have both ways.
- P11: a look of the probe is more than statistics of attention: it takes the gradients of four parts of its batch, too. The second row
  has the statistics alone. The control shows that on this machine a few hundredths are noise, as large as what is wanted.
"""


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The results that have ``rows``, by target and name."""
    found = [{"file": path.stem, **json.loads(path.read_text(encoding="utf-8"))} for path in sorted(folder.glob("*.json"))]
    return sorted((one for one in found if "rows" in one), key=lambda one: (_order(one["target"]), one["file"]))


def page(results: list[dict[str, Any]]) -> str:
    """The whole page."""
    parts = [HEAD, "## Targets\n", summary(results), *([WHY] if results else [])]
    parts += [part for one in results for part in (f"\n## {one['target']}: {one['title']}\n", section(one))]
    return "\n".join(parts)


def summary(results: list[dict[str, Any]]) -> str:
    """One line for each row that something was wanted of; a target without one is not measured."""
    lines = ["| target | what | measured | median (95 %) | wanted | |", "|---|---|---|---|---|---|"]
    for target, what in TARGETS.items():
        rows = [row for one in results if one["target"] == target for row in one["rows"] if row["wanted"] is not None]
        if not rows:
            lines.append(f"| {target} | {what} | | | | not measured |")
        for row in rows:
            interval = "" if row["low"] == row["high"] else f" ({number(row['low'])} to {number(row['high'])})"
            cells = (target, what, row["name"], number(row["median"]) + interval, sign(wish(row)), verdict(row))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def headlines(results: list[dict[str, Any]], language: str = "en") -> str:
    """The two rows that are farthest below what was wanted of them, and the two farthest above, of four targets; these first."""
    targets, head, verdicts, to = WORDS[language]
    found = [(_margin(row), one["target"], row) for one in results for row in one["rows"] if row["wanted"] is not None]
    found.sort(key=lambda item: item[0])
    chosen: dict[str, dict[str, Any]] = {}
    for met, order in ((False, found), (True, found[::-1])):
        for _, target, row in [item for item in order if item[2]["met"] is met and item[1] not in chosen]:
            if sum(other["met"] is met for other in chosen.values()) < 2 and target not in chosen:
                chosen[target] = row
    lines = [head, "|---|---|---|---|"]
    for target, row in sorted(chosen.items(), key=lambda item: not item[1]["met"]):
        interval = "" if row["low"] == row["high"] else f" ({number(row['low'])}{to}{number(row['high'])})"
        wanted = f"{sign(wish(row))}, {verdicts[row['met']]}"
        lines.append(f"| {targets[target]} | {row['name']} | {number(row['median'])}{interval} | {wanted} |")
    return "\n".join(lines) + "\n"


def _margin(row: dict[str, Any]) -> float:
    """ln of how many times as good as wanted a row is."""
    kind, wanted = row["wanted"].split()
    ratio = row["median"] / float(wanted)
    return math.log(ratio if kind == ">=" else 1 / ratio)


def readme(text: str, results: list[dict[str, Any]], language: str = "en") -> str:
    """A README with its lines about speed written anew."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + headlines(results, language) + END + rest.partition(END)[2]


def section(one: dict[str, Any]) -> str:
    """All rows of one file, and where they come from."""
    versions = ", ".join(f"{name} {version}" for name, version in one["versions"].items())
    threads = f"{one['threads']} threads, " if "threads" in one else ""
    return f"{one['hardware']}; {threads}{versions}; {one['date']}.\n\n    {one['command']}\n\n{sign(table(one['rows']))}\n"


def sign(text: str) -> str:
    """Comparisons as people write them."""
    return text.replace("<=", "≤").replace(">=", "≥")


def _order(target: str) -> int:
    return list(TARGETS).index(target)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(read()), encoding="utf-8")
    for language, path in READMES.items():
        path.write_text(readme(path.read_text(encoding="utf-8"), read(), language), encoding="utf-8")
    print(PAGE)
