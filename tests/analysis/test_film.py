"""A film of a recorded training: its frames, what they say, and what it refuses."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from pages import random_snapshot, with_answers
from PIL import Image, ImageSequence

from minitx.analysis.answers import Answer
from minitx.analysis.film import BAD, GOOD, _measures, _Pane, write_film
from minitx.analysis.snapshot import AnswerCounts
from minitx.analysis.viewer import Trace
from minitx.canvas import PALETTE, drawable

pytestmark = pytest.mark.filterwarnings("ignore:matplotlib has no font")  # of the machine


def recorded(seed, step, is_right, **options):
    snapshot = random_snapshot(seed, step, **{"kinds": ("self",), **options})
    loss, top = 0.1 if is_right else 3.0, (("said", 0.9), ("b", 0.05))
    return with_answers(snapshot, [Answer("Which value has key 7?", 6, 3, "right one", is_right, loss, top)])


TRACES = [
    Trace("scaled", [recorded(1, 0, False), recorded(2, 5, True)]),
    Trace("unscaled", [recorded(3, 0, False), recorded(4, 10, False)]),
]


@pytest.fixture(autouse=True)
def _short_end(monkeypatch):
    monkeypatch.setattr("minitx.analysis.film.LAST_FRAMES", 2)  # each is drawn


def colours(frame):
    return {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in np.unique(np.asarray(frame.convert("RGB")).reshape(-1, 3), axis=0)}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "webp", "gif"])
def test_a_film_has_a_frame_for_each_step_of_either_model(tmp_path, ending):
    assert write_film(TRACES, tmp_path / f"film.{ending}", head=2) == 3
    with Image.open(tmp_path / f"film.{ending}") as film:
        assert film.n_frames == 3
        assert film.info.get("loop", 0) == 0
        frames = [np.asarray(frame.convert("RGB")).astype(int) for frame in ImageSequence.Iterator(film)]
    assert all(frame.shape == frames[0].shape for frame in frames)
    assert min(np.abs(a - b).max() for a, b in pairwise(frames)) > 100


def test_right_and_wrong_have_their_own_colour(tmp_path):
    write_film(TRACES, tmp_path / "film.png")
    with Image.open(tmp_path / "film.png") as film:
        halves = ((0, 0, film.width // 2, 105), (film.width // 2, 0, film.width, 105))
        for step, wanted in ((0, [{BAD}, {BAD}]), (1, [{GOOD}, {BAD}])):
            film.seek(step)
            assert [colours(film.crop(half)) & {GOOD, BAD} for half in halves] == wanted


def test_a_map_of_another_step_than_the_frames_says_so():
    pane = _Pane(Figure().add_subplot(), 0.0, TRACES[0], 1, PALETTE[0])
    for step, wanted in ((5, "● scaled, head 1"), (10, "● scaled, head 1, step 5"), (0, "● scaled, head 1")):
        pane.show(step)
        assert pane.title.get_text() == wanted


def test_names_and_tokens_of_any_text_are_shown_as_they_are():
    names, one = [r"$\frac{1$", "_b", "有"], recorded(1, 0, True)
    asked = replace(one.answers.rows[0][0], text="Which follows “\n”?", right="\n", top=(("\n", 0.9),))
    traces = [Trace(name, [with_answers(one, [asked])]) for name in names]
    figure = Figure()
    panes = [_Pane(figure.add_subplot(1, 3, i + 1), 0.0, trace, 0, PALETTE[i]) for i, trace in enumerate(traces)]
    for pane in panes:
        pane.show(0)
    assert [pane.title.get_text()[2:4] for pane in panes] == ["$\\", "_b", drawable(["有"])[0][0][:2]]
    pane = panes[0]
    assert "the model says ↵, probability 0.90" in pane.verdict.get_text()
    assert not any("\n" in text.get_text() for text in pane.ax.texts)
    figure.draw_without_rendering()


def test_a_recording_without_answers_is_a_film_of_its_maps(tmp_path):
    bare = [replace(one, answers=None) for one in TRACES[0].snapshots]
    assert write_film([Trace("a", bare)], tmp_path / "film.png") == 2


def test_what_no_film_can_be_made_of_is_refused_and_writes_nothing(tmp_path):
    one = recorded(1, 0, True)
    maps = [replace(layer, weights=layer.weights.masked_fill(torch.eye(7).bool(), torch.nan)) for layer in one.maps]
    torn = Trace("a", [one, replace(one, step=4, maps=tuple(maps))])
    two = [recorded(5, step, True, kinds=("self", "self")) for step in (1, 2)]
    for name, traces, options, message in (
        ("film.mp4", TRACES, {}, "must end in .gif, .png, .webp"),
        ("film.gif", [Trace("a", [one])], {}, "at least two steps, got 1: record them with callbacks=film"),
        ("film.gif", [Trace("a", two)], {}, "shows one layer, got 2: blocks.0.self.core, blocks.1.self.core"),
        ("film.gif", [TRACES[0], Trace("b", two)], {}, "shows one layer, got 2: blocks.0.self.core"),
        ("film.gif", [TRACES[0], Trace("b", [recorded(1, 0, True, H=1)])], {"head": 1}, "head=1 must be one of 0 to 0"),
        ("film.gif", TRACES, {"head": 3}, "head=3 must be one of 0 to 2 of blocks.0.self.core"),
        ("film.gif", [torn], {}, "a has weights at step 4 that are not finite"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            write_film(traces, tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []


def counted(snapshot, right, on_key):
    """The snapshot as a row of a batch of 8, with answers right and the key found on so many of them."""
    name, H = snapshot.maps[0].name, snapshot.maps[0].weights.shape[1]
    return replace(snapshot, tally=AnswerCounts(2, 8, asked=8, right=right, keyed=8, on_key={name: [0] * (H - 1) + [on_key]}))


def test_curves_count_all_rows_where_a_batch_was_recorded():
    rows = [Trace("a", [counted(recorded(1, 0, False), 1, 2), counted(recorded(1, 5, True), 6, 7)])]
    measures = _measures(rows, head=2)
    assert list(measures) == ["right answers, share of 8 rows", "largest weight on the right key, share of 8 rows"]
    assert [[measure(one) for one in rows[0].snapshots] for measure in measures.values()] == [[1 / 8, 6 / 8], [2 / 8, 7 / 8]]
    assert list(_measures(TRACES, head=2)) == ["probability of the right answer"]


@pytest.mark.parametrize(
    ("weight", "H", "is_right", "reason"),
    [
        (0.95, 1, False, "found the key, the answer is still wrong: W_V and the head have not learned"),
        (0.6, 1, False, "found the key (weight 0.60)"),
        (0.3, 1, False, "the largest weight lies on a wrong key"),
        (0.95, 2, False, "found the key (weight 0.95)"),  # another head may be at fault
        (0.3, 1, True, ""),
    ],
)
def test_a_wrong_answer_has_its_reason_where_the_head_shows_it(weight, H, is_right, reason):
    one = recorded(1, 0, is_right, H=H)
    weights = one.maps[0].weights.clone()
    weights[0, :, 6] = 0
    weights[0, :, 6, 3], weights[0, :, 6, 1] = weight, 1 - weight
    one = replace(one, maps=(replace(one.maps[0], weights=weights),), layers=("blocks.0",))
    pane = _Pane(Figure().add_subplot(), 0.0, Trace("a", [one]), 0, PALETTE[0])
    pane.show(0)
    assert pane.reason.get_text() == reason
