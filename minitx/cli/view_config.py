"""The keys of ``view_attention.py``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from minitx.cli.command_line import FilePath, StoredConfig, check_output
from minitx.config.schema import Count, Natural, require

FILM = (".gif", ".png", ".webp")
"""The file endings of animated pictures."""


@dataclass(frozen=True, kw_only=True)
class ViewConfig(StoredConfig):
    """The keys of ``view_attention.py``. Model and tokenizer come from the checkpoint or the Hugging Face folder.

    Attributes:
        ckpt_path: checkpoint of a run, several separated by commas (each is a step of the slider), or the folder of a run: its
            recorded attention, or, with text or knock_out, its last checkpoint.
        model: instead of ckpt_path: a Hugging Face folder with its tokenizer, or the name of a model in the local cache of the
            hub.
        text: text for the model; without a tokenizer, ids (ID or ID:TYPE) separated by spaces.
        target: target text of an encoder-decoder; null: its own answer.
        row: instead of text: number of a validation row or of a recorded sentence, from 0.
        compare: a second model, as in ckpt_path or model, to compare side by side and as a difference.
        compare_text: a second text with as many tokens as text, to compare in the same way.
        layers: layers to show: numbers from 0 or parts of names (cross), separated by commas; null: all.
        num_beams: number of beams for an encoder-decoder's own answer; 1: greedy.
        max_new_tokens: longest own answer of an encoder-decoder, in tokens.
        knock_out: compute the model's answer without each head, for the page's button; one forward pass per head.
        head: the head that a film shows.
        output: the file to write; one that ends in .gif, .png or .webp is a film of one head of one layer over its steps.
    """

    ckpt_path: FilePath = ""
    model: FilePath = ""
    text: str | None = None
    target: str | None = None
    row: Natural | None = None
    compare: FilePath | None = None
    compare_text: str | None = None
    layers: str | None = None
    num_beams: Count = 1
    max_new_tokens: Count = 64
    knock_out: bool = False
    head: Natural = 0
    output: FilePath = "attention.html"

    @property
    def is_film(self) -> bool:
        """Whether the output is an animated picture."""
        return Path(self.output).suffix.lower() in FILM

    def check(self) -> None:
        require(bool(self.ckpt_path or self.model), "ckpt_path is missing: add ckpt_path=FILE, or model=FOLDER")
        typed = self.changed_keys
        for name in ("row", "trust"):
            require(not {name, "model"} <= typed, f"{name} is for checkpoints: model= has no data, and its code never runs")
        self.refuse_together("model", "ckpt_path")
        self.refuse_together("text", "row")
        self.refuse_together("compare", "compare_text")
        for name in ("model", "target", "compare_text"):
            require(name not in typed or "text" in typed, f"text is missing: {name} needs text=TEXT")
        require(not (self.knock_out and self.is_film), "knock_out is for a page, not for a film")
        require(not self.head or self.is_film, f"head={self.head} is for a film, output=NAME.gif: a page shows all heads")
        check_output(self.output, ".html", ".htm", *FILM)

    @property
    def chosen_layers(self) -> list[int | str] | None:
        """The layers as an argument of ``capture``."""
        parts = [part.strip() for part in (self.layers or "").strip("[]").split(",")]
        return [int(p) if re.fullmatch(r"-?\d+", p, re.ASCII) else p for p in parts if p] or None
