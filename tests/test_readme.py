"""The README in two languages tells the same: the same code, the same pages, the same numbers."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))


def code(text):
    """The lines of code of all blocks, without comments."""
    blocks = re.findall(r"```(?:bash|python|yaml)\n(.*?)```", text, re.DOTALL)
    return [[line.split("  #")[0].rstrip() for line in block.splitlines()] for block in blocks]


def pages(text):
    """What it links to and shows, in any order."""
    return sorted(target for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if not target.startswith("README"))


def numbers(text):
    """Every number with a point, and every one in thousands, with its sign."""
    return sorted(re.findall(r"[−+]?\d+(?:\.\d+|,\d{3})+", text))


def sections(text):
    """Headings by depth, and rows of tables."""
    lines = text.splitlines()
    return [len(line.split(" ")[0]) for line in lines if re.match(r"#+ ", line)], sum(line.startswith("|") for line in lines)


@pytest.mark.parametrize("part", [code, pages, numbers, sections])
def test_both_languages_tell_the_same(part):
    assert part(ENGLISH) == part(CHINESE)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["English", "Chinese"])
def test_a_readme_can_be_read_in_one_go(text):
    assert len(text.splitlines()) <= 230


def test_no_chinese_sentence_is_broken_by_a_line_end_which_would_show_as_a_space():
    prose = re.sub(r"```.*?```", "", CHINESE, flags=re.DOTALL)
    assert re.findall(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]\n[^\n|#<!-]", prose) == []
