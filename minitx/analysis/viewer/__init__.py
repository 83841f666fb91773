"""The attention viewer and the playground. Each is one HTML file that needs no network.

The pages are plain HTML, CSS and JavaScript (the files in this folder). The viewer's data is JSON: weights of visible pairs as 16-bit
numbers, masks as bits, entropy and the largest logit of each row as float32.
"""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from minitx.analysis.answers import Answer, Answers, Questions, next_tokens
from minitx.analysis.experiments import with_knock_outs
from minitx.analysis.recorder import layer_numbers
from minitx.analysis.snapshot import MASKS_OF, SOURCE, TARGET, AttentionMap, Snapshot
from minitx.analysis.snapshot_sources import named_inputs, snapshot_of_weights, take_snapshot
from minitx.config.schema import stated

__all__ = ["Trace", "View", "playground", "view", "viewer_page"]

SCRIPTS = (
    "page_words.js", "common.js", "data.js", "ramps.js", "colours.js", "controls.js", "tally.js", "answers.js", "map.js", "lines.js", "page.js",
)  # fmt: skip
PLAY_SCRIPTS = (
    "play_words.js", "common.js", "ramps.js", "arithmetic.js", "draws.js", "hand.js", "width.js", "training.js", "traps.js", "play.js",
)  # fmt: skip
FULL = 65534
"""The 16-bit number for a weight of 1. The next larger number means NaN."""
LOWEST, TALLEST, ABOVE, CELL = 640, 920, 340, 44
"""Heights in pixels: the smallest and the largest frame (longer maps have smaller cells), the space above a map, and a cell."""


@dataclass(frozen=True)
class Trace:
    """One model over time.

    Attributes:
        name: the name on the page.
        snapshots: snapshots of one sentence (B = 1, see ``Snapshot.sentence``), in the order of their steps.
    """

    name: str
    snapshots: Sequence[Snapshot]


@dataclass(frozen=True, repr=False)
class View:
    """A page of the viewer, or the playground. A notebook shows it in a frame below the cell. Nothing is loaded from the network.

    Attributes:
        page: the page as HTML. height: the height of the frame, in pixels.
    """

    page: str
    height: int = TALLEST

    def __repr__(self) -> str:
        return f"View({len(self.page.encode()) / 1e3:.0f} kB, height={self.height}): save(path) writes the page"

    def _repr_html_(self) -> str:
        frame = f'sandbox="allow-scripts" style="width: 100%; height: {self.height}px; border: 0"'
        return f'<iframe {frame} srcdoc="{html.escape(self.page)}"></iframe>'

    def save(self, path: str | Path) -> None:
        """Write the page to a file for a browser."""
        Path(path).write_text(self.page, encoding="utf-8")


Viewed = nn.Module | Tensor | Sequence[Tensor] | Snapshot | Sequence[Snapshot]


def view(
    model: Viewed | Mapping[str, Viewed],
    inputs: str | Tensor | Mapping[str, Any] | None = None,
    *,
    tokenizer: Any = None,
    tokens: Mapping[str, Sequence[Sequence[str]]] | None = None,
    row: int = 0,
    knock_out: bool = False,
    height: int | None = None,
) -> View:
    """Show the attention of a model in a notebook.

    Args:
        model: a model, an attention layer or a block; attention weights (B, H, L, S), (H, L, S) or (L, S) as a tensor or an
            array, or a list with one for each layer (a weight of 0 counts as masked); a snapshot, or snapshots of one model over
            training (``read_snapshots``). To compare two, pass a dict with their names as keys.
        inputs: a text (with ``tokenizer``), the first argument of the model (ids (L,) or (B, L); for a layer or block, x (L, E) or
            (B, L, E)), or a dict of the model's inputs. None if ``model`` is not a module.
        tokenizer: an object with ``encode(text)`` (returns ids, or an object with ``ids``) and ``decode(ids)`` (also gives the texts
            of the tokens).
        tokens: a text for each token, as in ``take_snapshot``. The axes of weights are ``query`` and ``key``, and only
            ``query`` if L = S.
        row: the row of the batch to show.
        knock_out: also compute the token that the model expects without each head, for the page's button *Knock out this head*. It
            takes one forward pass for each head.
        height: the height of the frame in pixels. Default: the whole map is visible if the frame is at least 940 pixels wide.

    With ``tokenizer`` or ``knock_out``, the page shows the token that a causal language model expects after each position. A causal
    language model has causal attention over these tokens, and its output is logits (B, L, V) with V = ``config.vocab_size``.

    Returns:
        An object that a notebook shows, with ``page`` (HTML) and ``save(path)``.

    Raises:
        ValueError: a text without a tokenizer, a model without inputs, inputs without a model, an object without attention,
            ``knock_out`` without a causal language model, or as in ``take_snapshot`` and ``viewer_page``.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> view(model, torch.tensor([1, 2, 3, 5]))._repr_html_()[:40]
    '<iframe sandbox="allow-scripts" style="w'

    The weights of one layer:

    >>> from minitx.nn import MultiHeadAttention
    >>> _, weights = MultiHeadAttention(12, 3)(torch.randn(1, 5, 12), need_weights=True)
    >>> page = view(weights, tokens={"query": ["the cat sat on it".split()]})
    """
    models: Mapping[str, Viewed] = model if isinstance(model, Mapping) else {"model": model}
    traces = []
    name_of = _namer(tokenizer)
    for name, viewed in models.items():
        if not isinstance(viewed, nn.Module):
            if inputs is not None:
                instead = 'pass the texts of weights as tokens={"query": [["the", "cat"]]}'
                raise ValueError(f"{name} is a {type(viewed).__name__}, and only a module takes inputs; {instead}")
            if knock_out:
                raise ValueError(f"knock_out=True needs a model, and {name} is a {type(viewed).__name__}")
            traces.append(Trace(name, [snapshot.sentence(row) for snapshot in _snapshots(viewed, tokens)]))
            continue
        if inputs is None:
            choices = "a text with tokenizer=, its first argument (ids; x for a layer), or inputs by name"
            raise ValueError(f"{name} is a model and needs inputs: {choices}")
        batch = named_inputs(viewed, _encoded(inputs, tokenizer) if isinstance(inputs, str) else inputs)
        axis = SOURCE if SOURCE in batch else next(iter(batch))
        texts = tokens
        if tokens is None and tokenizer is not None and not batch[axis].is_floating_point():
            texts = {axis: [[tokenizer.decode([number]) for number in ids] for ids in batch[axis].tolist()]}
        device = next((parameter.device for parameter in viewed.parameters()), torch.device("cpu"))
        placed = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
        asked = _next_tokens(viewed, batch, name_of) if knock_out or tokenizer is not None else None
        snapshot = take_snapshot(viewed, placed, tokens=texts, asked=asked)
        if asked is None or not _sees_no_later(snapshot, asked.axis):
            asked = None
            snapshot = replace(snapshot, answers=None)
        if knock_out:
            snapshot = with_knock_outs(snapshot, viewed, placed, asked)
        traces.append(Trace(name, [snapshot.sentence(row)]))
    page = viewer_page(traces)
    length = max(layer.weights.shape[2] for layer in traces[0].snapshots[0].maps)
    return View(page, height or min(max(ABOVE + CELL * length, LOWEST), TALLEST))


def playground(*, pages: str | None = None, height: int = 1000) -> View:
    """Return an interactive page about attention, in English and Chinese. It needs no model.

    Scene 1 computes one row of softmax(q Kᵀ / √d_k) V by hand, for the reader's tokens and numbers (d_k = 3). Scene 2 draws random
    queries and keys, and shows the effect of d_k (1 to 1,024) and of a factor on q·k on logits, weights, the softmax's Jacobian and
    16-bit numbers. With seed 0, its numbers equal the numbers of ``examples/why_scale.py``. Scene 3 shows a solved model that was
    trained further with and without the scale, as ``examples/falls_apart.py`` recorded it. In scene 4, the reader looks for the
    wrong line in nine pieces of code.

    Args:
        pages: the address of pages about minitx, for a link at the top. None: no link.
        height: the height of the frame in a notebook, in pixels.

    >>> page = playground().page
    >>> page.startswith("<!DOCTYPE html>"), len(page.encode()) < 600_000
    (True, True)
    """
    link = "" if pages is None else f'\n    <a class="pages" href="{html.escape(pages)}" data-text="pages"></a>'
    return View(_joined_page("play", PLAY_SCRIPTS, {"training": _asset("training.json").strip(), "pages": link}), height)


def _namer(tokenizer: Any) -> Callable[[int], str]:
    """Return a function from an id to its text, or its number. If ids have the same text, all but the first add their number."""
    first: dict[str, int] = {}

    @cache
    def name(i: int) -> str:
        try:
            text = str(i) if tokenizer is None else tokenizer.decode([i])
        except (ValueError, LookupError, OverflowError):  # a model may have more ids than the tokenizer
            return f"id {i}"
        return text if first.setdefault(text, i) == i else f"{text} (id {i})"

    return name


def _next_tokens(model: nn.Module, batch: Mapping[str, Any], name_of: Callable[[int], str]) -> Questions | None:
    """The questions of a model with ``config.vocab_size`` at real tokens. The token after the last real one is not known."""
    axis, size = TARGET if TARGET in batch else SOURCE, stated(getattr(model, "config", None), "vocab_size", int)
    if size is None or axis not in batch:
        return None
    asked = next_tokens(axis, batch[axis].tolist(), name_of, size)
    ids = batch[axis]
    masks = [batch[key] for key in MASKS_OF[axis] if getattr(batch.get(key), "shape", None) == ids.shape]
    real = [[*row, 0] for row in (masks[0] if masks else torch.ones_like(ids)).tolist()]
    rows = [
        [replace(q, right=q.right if real[b][i + 1] else None) for i, q in enumerate(row) if real[b][i]]
        for b, row in enumerate(asked.rows)
    ]
    return replace(asked, rows=rows)


def _sees_no_later(snapshot: Snapshot, axis: str) -> bool:
    """Whether no position of ``axis`` sees a later one."""
    layers = [layer for layer in snapshot.maps if layer.queries == layer.keys == axis]
    return all(layer.kind == "causal" or (layer.visible.shape[-1] > 1 and not layer.visible.triu(1).any()) for layer in layers)


def _encoded(text: str, tokenizer: Any) -> Tensor:
    if not hasattr(tokenizer, "decode") or isinstance(tokenizer, str | bytes):
        raise ValueError("a text needs tokenizer=, an object with encode(text) and decode(ids); or pass ids")
    ids = tokenizer.encode(text)
    return torch.as_tensor(getattr(ids, "ids", ids))


def _snapshots(viewed: Any, tokens: Mapping[str, Sequence[Sequence[str]]] | None) -> Sequence[Snapshot]:
    viewed = [viewed] if isinstance(viewed, Tensor | np.ndarray | Snapshot) else viewed
    if not isinstance(viewed, Sequence) or isinstance(viewed, str) or not viewed:
        choices = "a model, an attention layer, weights, or snapshots"
        raise ValueError(f"view takes {choices}, got {viewed!r:.40} ({type(viewed).__name__})")
    if not isinstance(viewed[0], Snapshot):
        return [snapshot_of_weights(viewed, tokens)]
    if tokens is not None:
        raise ValueError("tokens= has no effect on snapshots: they contain the texts of their tokens")
    return viewed


RowRule = Literal["typical", "first", "chosen"]
"""How the row of a batch was chosen: it ends like most rows (``typical_row``), it is the first, or the user chose it."""


def viewer_page(traces: Sequence[Trace], *, title: str = "Attention", rule: RowRule | None = None) -> str:
    """Return the page of the viewer as HTML. It shows all heads, one head in detail, training steps, and two models side by side.

    Weights from 0 to 1 are rounded to multiples of 1/65534, an error below 8e-6. If a layer has other weights (``intervene``), they
    are rounded to multiples of its range over 65534. ``write_snapshot`` has already rounded to float16, by up to 2.5e-4 near 1.

    Args:
        traces: one model, or two to compare. The second is B, and differences are A − B. All snapshots must have the same
            tokens and layers. Padding is left out.
        title: the title of the page.
        rule: how the row was chosen, for a sentence on the page.

    If the row was cut out of a batch whose right answers are known, curves show two shares at each step: right answers over all rows,
    and questions whose largest weight lies on the right key.

    Raises:
        ValueError: no trace or more than two; a trace without snapshots, or with steps that do not increase; a snapshot with
            more than one row; different tokens or layers.

    >>> import torch
    >>> from minitx.analysis import take_snapshot
    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> page = viewer_page([Trace("untrained", [take_snapshot(model, {"input_ids": torch.tensor([[1, 2, 3, 5]])})])])
    >>> page.startswith("<!DOCTYPE html>"), len(page) < 100_000
    (True, True)
    """
    _check_traces(traces)
    cut = [(trace.name, [snapshot.sentence(0) for snapshot in trace.snapshots]) for trace in traces]
    first = cut[0][1][0]
    for name, snapshots in cut:
        for snapshot in snapshots:
            _check_alike(name, first, snapshot)
    masks: dict[bytes, int] = {}
    words: dict[str, int] = {}
    kinds = dict.fromkeys(layer.kind for layer in first.maps)
    of_kind = [[layer.name for layer in first.maps if layer.kind == kind] for kind in kinds]
    numbers = {name: number for names in of_kind for name, number in zip(names, layer_numbers(names), strict=True)}
    data = {
        "traces": [{"name": name, "snapshots": [_snapshot(s, masks, words) for s in snapshots]} for name, snapshots in cut],
        "layers": [{**m.place(), "number": numbers[m.name], "shape": list(m.weights.shape[1:])} for m in first.maps],
        "tokens": {axis: list(rows[0]) for axis, rows in first.tokens.items()},
        "masks": [base64.b64encode(bits).decode() for bits in masks],
        "words": list(words),
        "full": FULL,
        "rule": rule,
    }
    return _page(title, data)


def _check_traces(traces: Sequence[Trace]) -> None:
    if not 1 <= len(traces) <= 2:
        raise ValueError(f"traces must be one model, or two to compare, got {len(traces)}")
    for trace in traces:
        if not trace.snapshots:
            raise ValueError(f"trace {trace.name!r} has no snapshots")
        if many := [snapshot.num_rows for snapshot in trace.snapshots if snapshot.num_rows != 1]:
            raise ValueError(f"trace {trace.name!r} has a snapshot of {many[0]} rows: choose one with sentence(row)")
        steps = [snapshot.step for snapshot in trace.snapshots]
        if not all(a is not None and b is not None and a < b for a, b in itertools.pairwise(steps)):
            raise ValueError(f"trace {trace.name!r} must have increasing steps, got {steps}")


def _check_alike(name: str, first: Snapshot, other: Snapshot) -> None:
    """Refuse a snapshot whose layers or tokens differ from the first snapshot."""
    expected, got = (
        [f"{m.name} ({m.kind}, heads x queries x keys {tuple(m.weights.shape[1:])})" for m in s.maps] for s in (first, other)
    )
    if expected != got:
        numbers = f"{len(expected)} layers", f"{len(got)} layers"
        a, b = next((pair for pair in zip(expected, got, strict=False) if pair[0] != pair[1]), numbers)
        raise ValueError(f"{name!r} has other layers than the first snapshot: {b} against {a}")
    for axis, rows in first.tokens.items():
        mine, theirs = list(rows[0]), list(other.tokens.get(axis, [[]])[0])
        if mine != theirs:
            at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)  # equal sizes: checked above
            raise ValueError(f"{name!r} has other tokens: {axis}[{at}] is {theirs[at]!r} against {mine[at]!r}")


def _snapshot(snapshot: Snapshot, masks: dict[bytes, int], words: dict[str, int]) -> dict[str, Any]:
    """Return one step as plain data. ``masks`` numbers the different masks (as bits), and ``words`` the texts of answers."""
    layers = [_page_layer(layer, masks) for layer in snapshot.maps]
    data: dict[str, Any] = {"step": snapshot.step, "title": snapshot.title, "layers": layers}
    if snapshot.answers is not None:
        data["answers"] = _page_answers(snapshot, snapshot.answers, words)
    if (tally := snapshot.tally) is not None:
        on_key = [list(tally.on_key.get(layer.name, ())) for layer in snapshot.maps]
        data["tally"] = {**asdict(tally), "on_key": on_key}
    return data


def _page_answers(snapshot: Snapshot, answers: Answers, words: dict[str, int]) -> dict[str, Any]:
    """Questions with answers, and for each layer and head the answers without the head: [is it right, loss, [[word, p], ...]]."""

    def number(word: str) -> int:
        return words.setdefault(word, len(words))

    def plain(answer: Answer) -> list[Any]:
        top = [[number(word), finite_or_text(float(f"{p:.3g}"))] for word, p in answer.top]
        return [answer.is_right, answer.loss if answer.loss is None else finite_or_text(round(answer.loss, 4)), top]

    def finite_or_text(value: float) -> float | str:  # JSON has no NaN and no infinity; JavaScript reads the text
        return value if math.isfinite(value) else json.dumps(value)

    rows = [
        {
            "text": answer.text,
            "at": answer.at,
            "key": answer.key,
            "right": None if answer.right is None else number(answer.right),
            "answer": plain(answer),
        }
        for answer in answers.rows[0]
    ]
    data: dict[str, Any] = {"axis": answers.axis, "rows": rows}
    if answers.without:
        data["without"] = [[list(map(plain, head[0])) for head in answers.without[layer.name]] for layer in snapshot.maps]
    return data


def _page_layer(layer: AttentionMap, masks: dict[bytes, int]) -> dict[str, Any]:
    weights, visible = layer.weights[0].double().numpy(), layer.visible[0].numpy()  # (H, L, S)
    seen = weights[visible]
    finite = np.isfinite(seen)
    low, high = seen.min(initial=0.0, where=finite), seen.max(initial=1.0, where=finite)
    numbers = np.where(finite, np.rint((seen - low) / (high - low) * FULL), FULL + 1)
    bits = [np.packbits(head, bitorder="little").tobytes() for head in visible]
    return {
        "weights": _base64(numbers, "<u2"),
        "range": [low, high],
        "masks": [masks.setdefault(head, len(masks)) for head in bits],
        "entropy": _base64(layer.entropy()[0].numpy(), "<f4"),
        "max_logit": _base64(np.where(visible.any(-1), layer.max_logit[0].numpy(), np.nan), "<f4"),
    }


def _base64(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(values.astype(kind).tobytes()).decode()


def _page(title: str, data: dict[str, Any]) -> str:
    texts = {
        "title": html.escape(title).encode(errors="xmlcharrefreplace").decode(),
        # the user's text: in ASCII, and without a "<" that could end the surrounding element
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    return _joined_page("page", SCRIPTS, texts)


def _joined_page(name: str, scripts: Sequence[str], texts: Mapping[str, str]) -> str:
    """Join the files of this folder to a page. The hashes in its policy allow this style and this script only."""
    style, script = ("\n".join(map(_asset, names)) for names in (("base.css", f"{name}.css"), scripts))
    parts = {"style": style, "script": script, "style-hash": _hash(style), "script-hash": _hash(script), **texts}
    return re.sub(r"\{\{([a-z-]+)\}\}", lambda place: parts[place[1]], _asset(f"{name}.html"))  # in one pass: parts may hold {{


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
