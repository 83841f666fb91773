"""A page in two languages tells the same: the same code, the same pages, the same numbers. The Chinese README also begins with a
Chinese text."""

import re
from pathlib import Path
from unicodedata import east_asian_width

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "README.zh.md", "docs/start.md", "docs/start.zh.md", "docs/why_scale.md", "docs/why_scale.zh.md")
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
OWN = re.compile(r"## 从一个中文文本文件开始\n.*?(?=^## )", re.DOTALL | re.MULTILINE)
assert len(OWN.findall(TEXTS["README.zh.md"])) == 1
TEXTS["README.zh.md"] = OWN.sub("", TEXTS["README.zh.md"]).replace("我喜欢深度学习", "the cat sat")
CHINESE = [name for name in TEXTS if name.endswith(".zh.md")]


def code(text):
    """The lines of code of all blocks, without comments."""
    blocks = re.findall(r"```(?:bash|python|yaml)\n(.*?)```", text, re.DOTALL)
    return [[re.split("(?:^|  )# (?!@)", line)[0] for line in block.splitlines()] for block in blocks]


def pages(text):
    """What it links to and shows, in any order; a page in Chinese stands for the English one."""
    return sorted(re.findall(r"(?:\]\(|<img src=\")([^)#\"]+)", text.replace(".zh.", ".")))


def numbers(text):
    """Every number with a point, and every one in thousands, with its sign."""
    return sorted(re.findall(r"[−+]?\d+(?:\.\d+|,\d{3})+", text))


def sections(text):
    """Headings by depth, and rows of tables."""
    lines = text.splitlines()
    return [len(line.split(" ")[0]) for line in lines if re.match(r"#+ ", line)], sum(line.startswith("|") for line in lines)


@pytest.mark.parametrize("page", CHINESE)
@pytest.mark.parametrize("part", [code, pages, numbers, sections])
def test_both_languages_tell_the_same(part, page):
    assert part(TEXTS[page.replace(".zh.", ".")]) == part(TEXTS[page])


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_no_line_of_code_is_cut_off_on_a_rendered_page(page):
    for block in re.findall(r"```\w*\n(.*?)```", TEXTS[page], re.DOTALL):
        for line in block.splitlines():
            columns = sum(2 if east_asian_width(letter) in "WF" else 1 for letter in line)
            assert columns <= 88, f"{columns} columns: {line}"


def test_the_first_minute_takes_less_than_900_words():
    assert len(TEXTS["README.md"].split()) < 900
