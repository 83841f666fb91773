"""Translate the texts of a report to Chinese: phrases, and patterns for sentences with numbers and names. Other texts stay English.

The texts of a grid (questions, arms, studies, predictions) are translated in its YAML file.
"""

from __future__ import annotations

import re
from collections.abc import Callable

STATES = {
    "HELD": "成立",
    "NOT HELD": "不成立",
    "UNDECIDED": "未定",
    "MORE": "更多",
    "LESS": "更少",
    "SAME": "相同",
    "EQUAL": "相等",
    "DIFFERENT": "不同",
}

PHRASES = STATES | {
    # sections
    "Numbers": "数据",
    "Figures": "图",
    "Controls": "对照",
    "Predictions": "预测",
    "Limits": "局限",
    "What the runs look like": "训练过程",
    "What was run, and how to run it again": "运行的内容和复现的方法",
    # columns
    "study": "研究",
    "setting": "设置",
    "settings": "设置",
    "what": "项目",
    "value": "值",
    "first arm": "第一组",
    "second arm": "第二组",
    "arms": "各组",
    "ratio or difference": "比值或差值",
    "range": "范围",
    "predicted": "预测",
    "second arm has": "第二组的结果",
    "seeds": "种子",
    "of the law": "定律给出",
    "95 % (Student's t)": "95 %（t 分布）",
    "losses that are equal": "相等的损失",
    "result": "结果",
    "prediction": "预测",
    "where": "条件",
    "status": "状态",
    "measured": "测得",
    "length": "长度",
    "seed": "种子",
    "η*": "η*",
    "η_QK": "η_QK",
    "η_R": "η_R",
    "share of W_Q and W_K": "W_Q 和 W_K 的份额",
    "between the bounds": "在两个界限之间",
    "lower bound": "下界",
    "upper bound": "上界",
    "η* is": "η* 的位置",
    "between": "在界限之间",
    "below": "低于下界",
    "above": "高于上界",
    "done": "完成",
    "run": "运行",
    "reason": "原因",
    # endpoints
    "steps until the task is solved": "学会任务的步数",
    "largest stable learning rate": "最大的稳定学习率",
    "validation loss": "验证损失",
    "validation accuracy": "验证准确率",
    # captions and sentences
    "Two ways to write the same model must have the same losses, bit for bit": "同一个模型的两种写法，损失必须逐位相等",
    "Written before the runs; what did not hold comes first": "运行之前写下；不成立的排在前面",
    "What made this page": "本页由什么生成",
    "Exponents of the ratios: the mean of the slopes of single seeds": "比值的指数：各个种子的斜率的平均",
    "Every run is an ordinary training run. cells.csv has the command that runs it alone; cells.jsonl has its curves.": "每次运行都是一次普通的训练。cells.csv 里有单独运行它的命令，cells.jsonl 里有它的曲线。",
    "No comparison of this grid has a pair: two finished runs of the same seed.": "没有可以比较的运行：每次比较需要同一个种子的两次已完成的运行。",
    "The null control failed: two ways to write the same model differ. Do not trust the numbers.": "空白对照没有通过：同一个模型的两种写法结果不同。不要相信这些数。",
    "Without the scale, every attention score is √d_k times larger.": "没有缩放，每个注意力分数都是原来的 √d_k 倍。",
    "Without the scale, every attention score is √d_k times larger. Two effects follow.": "没有缩放，每个注意力分数都是原来的 √d_k 倍。这有两种影响。",
    "What limits the largest stable rate η* of the first arm: medians over the seeds. η_QK if W_Q and W_K alone train, η_R if the rest alone trains. The share of W_Q and W_K is (1 / η_QK) / (1 / η_QK + 1 / η_R), and the formula's ratio 1 + (bound − 1) · share": "第一组的最大稳定学习率 η* 由什么限制：各个种子的中位数。η_QK：只训练 W_Q 和 W_K；η_R：只训练其余权重。W_Q 和 W_K 的份额是 (1 / η_QK) / (1 / η_QK + 1 / η_R)，公式给出的比值是 1 + (上界 − 1) · 份额",
    "The largest stable rate belongs to a model that has solved its task and is trained further at a constant rate. If other weights limit the rate before W_Q and W_K do, the scale matters less: see the formula.": "最大的稳定学习率，是让已经学会任务的模型以固定学习率继续训练而测得的。如果其他权重比 W_Q 和 W_K 更早限制学习率，缩放的影响就小一些：见公式。",
    "Steps to solve measure how soon a run learns the task, not its final quality.": "学会任务的步数衡量学得多快，不衡量最终学得多好。",
    "Every dot is a seed. The formula predicts from the first arm alone.": "每个点是一个种子。公式只用第一组来预测。",
}  # fmt: skip

NUMBER = r"[−\d][\d.,e−]*"
Match = re.Match[str]


def chinese(text: str) -> str | None:
    """Return a phrase or sentence of a report in Chinese, or None if it is not known.

    >>> chinese("MORE"), chinese("1.12 to 1.85"), chinese("1,500 steps"), chinese("with the scale")
    ('更多', '1.12 到 1.85', '1,500 步', None)
    """
    if text in PHRASES:
        return PHRASES[text]
    for pattern, make in PATTERNS:
        if match := pattern.fullmatch(text):
            return make(match)
    return None


def _span(text: str) -> str:
    """A range, its number of seeds and its coverage."""
    text = re.sub(rf"({NUMBER}) to ({NUMBER})", r"\1 到 \2", text)
    text = re.sub(r" or more", " 以上", re.sub(r" or less", " 以下", text))
    text = re.sub(r"(\d+) seeds?", r"\1 个种子", text).replace(": no interval", "：没有区间")
    return text.replace("; ", "；").replace(", ", "，")


def _start(match: Match) -> str:
    width, times, optimizer, interval, none, more = match.groups()
    sentence = f"在起点，当初始权重较大时：方差为 1/宽度（LeCun）时，一个头（d_k = {width}）的模型要学会查值，{optimizer} 需要 {times} 倍的步数（{_span(interval)}）"
    if none:
        sentence += "；用 GPT-2 较小的权重（minitx 的默认值），并不需要更多"
    elif more:
        sentence += f"；用 GPT-2 较小的权重（minitx 的默认值），是 {_span(more)} 倍"
    return f"{sentence}。"


def _rates(text: str) -> str:
    """“3.0 times smaller with AdamW (2.15–3.17) and 12 times with SGD (10.6–13.2)”."""
    items = re.findall(rf"({NUMBER})(?: times(?: smaller)?)?(?: with (\w+))?(?: \(([^)]*)\))?", text)
    return "，".join(
        f"{name}{' 下' if name else ''}缩小到 1/{times}{f'（{_span(interval)}）' if interval else ''}"
        for times, name, interval in items
    )


def _step(match: Match) -> str:
    wide, width, narrow, undo = match.groups()
    sentence = f"在每一步：一次更新使分数移动得更远。我们从学会的模型里去掉缩放，不改变它算出的结果，再继续训练。不崩溃的最大学习率，{_rates(wide)}"
    if narrow:
        sentence += f"；d_k = {width} 时：{_rates(narrow)}".replace("：缩小到", "分别缩小到").replace("，缩小到 ", "、")
    return f"{sentence}。" + ("把 W_Q 和 W_K 的学习率调小，就能抵消。" if undo else "")


def _comparison(match: Match) -> str:
    where, quantity, second, first, word, kind, value, basis = match.groups()
    measure = {"ratio": "比值", "difference": "差值"}[kind]
    return f"{where}。{PHRASES.get(quantity.lower(), quantity)}，“{second}”对“{first}”：{STATES.get(word, word)}，{measure} {_span(value)}（{_span(basis)}）。"


def _caption(match: Match) -> str:
    triangle, loss, accuracy, window = match.groups()
    sentence = f"每条线或每个点是一个种子{'；三角形表示到了步数上限仍没有学会' if triangle else ''}。括号里是种子中位数的范围。"
    if window:
        limit = f"损失比开始时高出 {loss} nat 以上" if loss else f"准确率低于 {accuracy}"
        sentence += f"崩溃：{limit}（{window} 步的平均）。去掉缩放的办法是把 W_Q 和 W_K 各除以 d_k^¼。"
    return sentence


PATTERNS: tuple[tuple[re.Pattern[str], Callable[[Match], str]], ...] = tuple(
    (re.compile(pattern, re.DOTALL), make)
    for pattern, make in (
        (rf"{NUMBER}(?: to {NUMBER}| or more| or less)", lambda m: _span(m[0])),
        (r"\((.*\d seeds?.*)\)", lambda m: f"（{_span(m[1])}）"),
        (rf"({NUMBER}) seeds?", lambda m: f"{m[1]} 个种子"),
        (rf"({NUMBER}) steps", lambda m: f"{m[1]} 步"),
        (r"(\d+) of (\d+)", lambda m: f"{m[2]} 中的 {m[1]}"),
        (r"(\d+) of (\d+) seeds?, (.*) steps", lambda m: f"{m[2]} 个种子中的 {m[1]} 个，{m[3]} 步"),
        (
            r"At the start, if initial weights are large: with variance 1/width \(LeCun\), a one-head model \(d_k = (\d+)\) needs (\S+) times as "
            r"many steps of (\w+) \(([^)]*)\) to learn a lookup(?:; with GPT-2's smaller weights, our default, (?:(no more)|(.+)))?\.",
            _start,
        ),
        (
            r"At every step: an update moves the scores further\. We removed the scale from solved models, kept their function, and "
            r"trained them further\. The largest rate without a collapse was (.+?)(?:; d_k = (\d+): (.+?))?\.( Smaller learning rates for W_Q and W_K undo this\.)?",
            _step,
        ),
        (r"(.*)\. (.*), “(.*)” against “(.*)”: ([A-Z ]+), (ratio|difference) (.*) \((.*)\)\.", _comparison),
        (
            r"Every line or dot is a seed(; a triangle reached its cap of steps unsolved)?\. Brackets hold the range of the median over the "
            r"seeds\.(?:\s+A collapse: the (?:loss rises more than (\S+) nats above its start|accuracy falls below (\S+)) \(mean of (\d+) steps\)\. "
            r"The scale was removed by dividing W_Q and W_K by d_k\^¼ each\.)?",
            _caption,
        ),
        (
            r"Medians over the seeds; .* beyond the margin \(× (\S+), or (\S+)\); SAME: the whole range is within the margin",
            lambda m: (
                "各个种子的中位数；步数和得分取在其他种子上最好的学习率。步数的比值是第二组除以第一组，最大稳定学习率的比值是第一组除以第二组。范围是中位数的"
                "范围，由次序统计量得出，并注明覆盖率；少于五个种子则没有范围。更多、更少：整个范围超出"
                f"容限（× {m[1]}，或 {m[2]}）；相同：整个范围在容限之内"
            ),
        ),
        (
            r"The models are small \(up to (\S+) parameters\) and the runs are short \(up to (\S+) steps\)\.",
            lambda m: f"模型很小（至多 {m[1]} 个参数），训练很短（至多 {m[2]} 步）。",
        ),
        (
            r"In (\d+) of (\d+) searches a rate above the first failure was stable again\. The first failure counts\.",
            lambda m: f"{m[2]} 次搜索中有 {m[1]} 次，在第一次失败之上又有稳定的学习率。以第一次失败为准。",
        ),
        (
            r"Continued models start as the same function: in (\S+) starts, outputs differ by at most (\S+) of the largest output\.",
            lambda m: f"继续训练的模型从同一个函数出发：{m[1]} 次开始时，输出之差不超过最大输出的 {m[2]}。",
        ),
        (
            r"([\d,]+) runs? and searches?: (.*)\.",
            lambda m: (
                f"{m[1]} 次运行和搜索："
                + m[2]
                .replace(" done", " 次完成")
                .replace(" not run", " 次未运行")
                .replace(" failed", " 次失败")
                .replace(" missing", " 次缺失")
                .replace(", ", "，")
                + "。"
            ),
        ),
        (r"Runs that failed, are missing, or were left out \((\d+)\)", lambda m: f"失败、缺失或略去的运行（{m[1]}）"),
        (
            r"η\* and its bounds for each seed: (\d+) of (\d+) lie between them\. .* Between: .*",
            lambda m: (
                f"每个种子的 η* 和两个界限：{m[2]} 个中有 {m[1]} 个在两者之间。下界是 1 / (1 / η_QK + 1 / η_R)，上界是 η_QK 和 η_R 中较小的一个。在界限之间："
                "η* 的区间与从下界到上界的范围相交；两端也只精确到各自的搜索区间"
            ),
        ),
        (r"(.*): steps to solve", lambda m: f"{m[1]}：学会任务的步数"),
        (
            r"Every finished run is a dot; lines join the medians over seeds\. Budget: (.*) steps\.",
            lambda m: f"每次完成的运行是一个点，线连接各种子的中位数。步数上限：{m[1]}。",
        ),
    )
)
