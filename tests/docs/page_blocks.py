"""The pages that a reader sees, their fenced blocks and their links."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, and the line of the page where its text begins."""

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page, from the root of the repository."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[Block]:
    """The fenced blocks of a page in order, of some languages or of all."""
    text = read(page)
    found = [Block(page, text.count("\n", 0, m.start(2)) + 1, m[1], m[2]) for m in FENCE.finditer(text)]
    return [block for block in found if not languages or block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block of bash as words, without comments."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            yield words[:end]
            words = words[end + 1 :]


def breaks_when_pasted(line: str) -> bool:
    """Whether bash and zsh would read a line of a block differently, or as something else than it says.

    zsh knows no comments at its prompt: one after a command becomes arguments, and in a line of its own a quote opens a string and a
    sign starts a command. zsh also splits no variable into words, and stops at an unquoted pattern that matches no file.
    """
    if line.startswith("#"):
        return re.search(r"""["'`$!;&|<>(){}\[\]*?]""", line) is not None
    unquoted = re.sub(r"""'[^']*'|"[^"$`!]*\"""", "", line)
    return re.search(r"(^|\s)#|[$`!*?{}\[\]]", unquoted) is not None


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", read(page)), flags=re.MULTILINE)
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)  # of a link, its text
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in shown}


def links(page: str) -> list[str]:
    """The targets of links and images that are no addresses on the net."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", read(page)))
    return [target for target in re.findall(r"(?:\]\(|<img src=\")([^)\s\"]+)", text) if not re.match(r"[a-z]+:", target)]
