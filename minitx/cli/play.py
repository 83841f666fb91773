"""``view_attention.py --play``: write a page to play with attention, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minitx.cli import importing
from minitx.cli.command_line import FilePath, check_output, run_program, write_page
from minitx.config.schema import Config

PLAY = "--play"
PLAY_USAGE = f"python scripts/view_attention.py {PLAY} [output=FILE]"


@dataclass(frozen=True, kw_only=True)
class PlayConfig(Config):
    """The keys of ``view_attention.py --play``.

    Attributes:
        output: the file to write.
        pages: address of pages about minitx, for a link at the top; null: no link.
    """

    output: FilePath = "play.html"
    pages: str | None = None

    def check(self) -> None:
        check_output(self.output, ".html", ".htm")


def play(words: Sequence[str]) -> int:
    """Run the program with a command line, and return its exit code."""
    return run_program(PlayConfig, PLAY_USAGE, _play, arguments=[word for word in words if word != PLAY])


def _play(config: PlayConfig) -> None:
    with importing():
        from minitx.analysis.viewer import playground

    write_page(playground(pages=config.pages).page, config.output)
