"""Snapshots with known weights for tests of the viewer, what a page holds read back, and what a browser says of it."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from dataclasses import replace

import numpy as np
import torch

from minitx.analysis import AttentionMap, Snapshot
from minitx.analysis.answers import Answer, Answers

SOURCE = ["你·1/3", "你·2/3", "你·3/3", "<script>alert(1)</script>", " ", "\n", "שלום"]
TARGET = ["<bos>", "\"quoted\" & 'so'", "</script><!--", "e", "\u0301"]
AXES = {"self": ("input_ids", "input_ids"), "causal": ("decoder_input_ids",) * 2, "cross": ("decoder_input_ids", "input_ids")}


def random_snapshot(
    seed: int, step: int | None = None, *, kinds=("self", "self", "causal", "cross"), H: int = 3, **other
) -> Snapshot:
    """A snapshot as an encoder–decoder's, with random weights: rows sum to 1 over what is visible."""
    generator = torch.Generator().manual_seed(seed)
    tokens = {"input_ids": [SOURCE], "decoder_input_ids": [TARGET]} | other.pop("tokens", {})
    maps = []
    for i, kind in enumerate(kinds):
        queries, keys = AXES[kind]
        L, S = len(tokens[queries][0]), len(tokens[keys][0])
        visible = torch.ones(1, H, L, S, dtype=torch.bool)
        visible = visible.tril(S - L) if kind == "causal" else visible
        scores = 3 * torch.randn(1, H, L, S, generator=generator)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        largest = scores.abs().masked_fill(~visible, 0).amax(-1)
        maps.append(AttentionMap(f"blocks.{i}.{kind}.core", kind, queries, keys, weights, visible, largest))
    used = {axis for one in maps for axis in (one.queries, one.keys)}
    tokens = {axis: rows for axis, rows in tokens.items() if axis in used}
    real = {axis: torch.ones(1, len(rows[0]), dtype=torch.bool) for axis, rows in tokens.items()}
    return Snapshot(tuple(maps), tokens, {}, real, step, **other)


def data_of(page: str) -> dict:
    """The JSON in a page."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def weights_of(data: dict, trace: int, snapshot: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """(weights, visible) of a layer, (H, L, S) each, as the page unpacks them."""
    H, L, S = data["layers"][layer]["shape"]
    packed = data["traces"][trace]["snapshots"][snapshot]["layers"][layer]
    bits = [np.frombuffer(b64decode(data["masks"][mask]), np.uint8) for mask in packed["masks"]]
    visible = np.stack([np.unpackbits(one, bitorder="little")[: L * S] for one in bits]).reshape(H, L, S).astype(bool)
    numbers = np.frombuffer(b64decode(packed["weights"]), "<u2").astype(np.float64)
    weights = np.zeros((H, L, S))
    low, high = packed["range"]
    weights[visible] = np.where(numbers > data["full"], np.nan, low + numbers / data["full"] * (high - low))
    return weights, visible


def with_answers(snapshot: Snapshot, answers: list[Answer], without: list[list[list[Answer]]] | None = None) -> Snapshot:
    """The snapshot with answers of its only row, and for each layer and head the answers without it."""
    heads = {one.name: [[row] for row in rows] for one, rows in zip(snapshot.maps, without or [], strict=False)}
    return replace(snapshot, answers=Answers("input_ids", [answers], heads))


def choose(page, text: str) -> None:
    """One of several."""
    page.locator(".choice label:visible", has_text=re.compile(f"^{re.escape(text)}$")).click()


def unnamed(page) -> list[str]:
    """What can be reached or looked at in a page of a browser, and has no name."""
    return page.evaluate(
        "[...document.querySelectorAll('button, input, select, svg[role=img], [tabindex=\"0\"]')].filter(e => e.checkVisibility() &&"
        " !(e.ariaLabel || e.textContent.trim() || e.labels?.length || e.ariaLabelledByElements?.length)).map(e => e.outerHTML)"
    )


def shows_focus(page) -> bool:
    """Whether what has the focus of the keyboard is outlined."""
    outline = "e => getComputedStyle(e.matches('.choice input') ? e.nextSibling : e).outlineStyle"
    return page.locator(":focus").evaluate(outline) != "none"


def is_dark(page) -> bool:
    """Whether the paper of a page is dark."""
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(int, background.strip("rgba()").split(",")[:3])) < 3 * 64


def weak_texts(page) -> list:
    """The texts whose contrast with their ground is below WCAG AA's 4.5."""
    return page.evaluate("""() => {
      const parts = (colour) => colour.match(/[\\d.]+/g).map((x) => Number(x) * (colour.startsWith('color(srgb') ? 255 : 1));
      const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
      const ground = (node) => {
        for (let at = node; at; at = at.parentElement) {
          const found = parts(getComputedStyle(at).backgroundColor);
          if (found.length < 4 || found[3] > 0) return found;
        }
      };
      const owns = (node) => [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim());
      return [...document.querySelectorAll('body *, svg text')].filter(node => node.checkVisibility() && owns(node))
        .filter(node => !node.closest(':disabled, [aria-disabled=true], script, style')).map(node => {
          const style = getComputedStyle(node);
          const [a, b] = [light(parts(node.closest('svg') ? style.fill : style.color)), light(ground(node))];
          return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), node.outerHTML.slice(0, 120)];
        }).filter(([ratio]) => ratio < 4.5);
    }""")
