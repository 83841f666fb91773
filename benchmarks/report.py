"""Writes the table of docs/dev/performance.md and the rows about speed of both READMEs from ``results/*.json``; runs nothing.

python benchmarks/report.py
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from harness import RESULTS, ROOT, Row, spread, verdict

PAGE = ROOT / "docs" / "dev" / "performance.md"
READMES = {language: ROOT / name for language, name in (("en", "README.md"), ("zh", "README.zh.md"))}
BEGIN, END = "<!-- performance:begin -->\n", "<!-- performance:end -->"
TARGETS = {  # in English, in Chinese, and what measures it
    "P1": ("training throughput over other libraries", "训练吞吐量与其他库之比", "step.py"),
    "P1b": ("a step over its own matrix products", "一步与其中矩阵乘法之比", "step.py"),
    "P2": ("time to nanoGPT's loss", "达到 nanoGPT 损失所需的时间", "quality.py"),
    "P3": (
        "tokens to that loss, modern preset over GPT-2's",
        "达到该损失所需的词元数，现代配方与 GPT-2 配方之比",
        "quality.py",
    ),
    "P4": ("a step under the trainer over a raw loop", "训练器中的一步与裸循环之比", "step.py"),
    "P5": ("fused and chunked attention over math", "融合与分块注意力相对 math 后端", "attention.py"),
    "P6": ("the choice of a kernel, and masks", "内核的选择与掩码的开销", "attention.py"),
    "P7": ("ragged encoder training over padding", "变长序列的编码器训练，相对填充", "attention.py"),
    "P8": ("greedy decoding with a cache", "带缓存的贪心解码", "decode.py"),
    "P9": ("peak memory of a training step", "一个训练步的峰值内存", "step.py"),
    "P10": ("from a command to its work, and the loader", "从命令到开始工作，以及数据加载", "start.py"),
    "P11": ("attention statistics each 50 steps over none", "每 50 步统计一次注意力，相对不统计", "step.py"),
    "P12": ("the quick ablation", "快速消融实验", "grid.py"),
    "P13": ("a large text", "大文本", "data.py"),
    "P14": ("the tests", "测试", "grid.py"),
}
WORDS = {
    "en": (0, ", ", "| what | setting | median (95 %) | wanted |", {"met": "met", "missed": "missed"}, " to "),
    "zh": (1, "，", "| 内容 | 设置 | 中位数（95 % 区间） | 要求 |", {"met": "达到", "missed": "未达到"}, " 到 "),
}


def read(folder: Path = RESULTS) -> list[Row]:
    """Every row of the files of a topic, in the order of the targets, each with its ``run``."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    runs = [run for file in files if "topic" in file for run in file["runs"]]
    rows = [{**one, "run": {**run, "rows": None}} for run in runs for one in run["rows"]]
    return sorted(rows, key=lambda one: list(TARGETS).index(one["target"]))


def table(rows: list[Row]) -> str:
    """A line for every row, then the runs; a target without a row is not recorded."""
    lines = ["| target | what | setting | median (95 %) | wanted | | control | run |", "|---|---|---|---|---|---|---|---|"]
    runs: list[Row] = []
    for target, (what, _, program) in TARGETS.items():
        mine = [one for one in rows if one["target"] == target]
        if not mine:
            lines.append(f"| {target} | {what} | | | | not recorded yet (`{program}`) | | |")
        for one in mine:
            run = one["run"]
            runs += [run] if run not in runs else []
            held = "" if "control" not in one else "holds" if one["control_holds"] else "does not hold"
            cells = [
                target,
                "GPU: " * ("device" in run) + one["what"],
                one["label"],
                spread(one),
                sign(one["wanted"]),
                verdict(one),
            ]
            lines.append(f"| {' | '.join([*cells, held, str(runs.index(run) + 1)])} |")
    return "\n".join([*lines, "", *(f"{number}. {told(run)}" for number, run in enumerate(runs, 1))]) + "\n"


def told(run: Row) -> str:
    """Where, when and how a run was recorded."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    where = f"{run.get('device') or run['hardware']}, {run['threads']} threads, {versions}"
    return f"`{run['command']}`: {where}; {run['date']}, commit {run['commit']}"


def headlines(rows: list[Row], language: str = "en") -> str:
    """The two rows that are farthest below what was wanted of them, and the two farthest above, of four targets; these first.

    Counts, and rows whose control does not hold, are left out.
    """
    index, comma, head, verdicts, to = WORDS[language]
    sure = (
        one for one in rows if one["wanted"] is not None and one["low"] != one["high"] and one.get("control_holds") is not False
    )
    found = sorted(sure, key=margin)
    chosen: dict[str, Row] = {}
    for kind, order in (("missed", found), ("met", found[::-1])):
        for one in [one for one in order if verdict(one) == kind and one["target"] not in chosen]:
            if sum(verdict(other) == kind for other in chosen.values()) < 2 and one["target"] not in chosen:
                chosen[one["target"]] = one
    lines = [head, "|---|---|---|---|"]
    for target, one in sorted(chosen.items(), key=lambda item: verdict(item[1]) == "missed"):
        cells = (TARGETS[target][index], f"{one['what']}; {one['label']}", spread(one, to), sign(one["wanted"]))
        lines.append(f"| {' | '.join(cells)}{comma}{verdicts[verdict(one)]} |")
    return "\n".join(lines) + "\n"


def margin(one: Row) -> float:
    """ln of how many times as good as wanted a row is."""
    kind, wanted = one["wanted"].split()
    ratio = one["median"] / float(wanted)
    return math.log(ratio if kind == ">=" else 1 / ratio)


def between(text: str, new: str) -> str:
    """A page with what stands between the marks written anew."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + new + END + rest.partition(END)[2]


def pages(rows: list[Row]) -> dict[Path, str]:
    """What is generated, by the file that it stands in."""
    return {PAGE: table(rows), **{path: headlines(rows, language) for language, path in READMES.items()}}


def sign(wanted: str | None) -> str:
    """Comparisons as people write them."""
    return (wanted or "").replace("<=", "≤").replace(">=", "≥")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path, new in pages(read()).items():
        path.write_text(between(path.read_text(encoding="utf-8"), new), encoding="utf-8")
        print(path.relative_to(ROOT))
