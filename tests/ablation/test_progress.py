"""The live table: what it counts, and how it corrects a projection by what the cells took."""

from __future__ import annotations

import io
from concurrent.futures import Future

import pytest

from minitx.ablation.grid import Cell
from minitx.ablation.launchers import Outcome
from minitx.ablation.progress import LiveTable, TerminalLine
from minitx.ablation.runner import run_cells


def cell(name, seed=0):
    return Cell("main", name, {"lr": "1e-3"}, seed, (f"name={name}", "trainer.max_steps=5", f"seed={seed}"))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def end(live, one, seconds, error=None):
    """The cell is over, after so many seconds."""
    live.waiting.discard(one.hash)
    live.running[one.hash] = (one, live.clock() - seconds)
    live.end(one, error)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shown():
    return []


@pytest.fixture
def table(clock, shown):
    """Eight cells, one done before; each to run is projected at 10 s, and two run at once."""

    def make(seconds=10.0, lanes=2, count=7):
        todo = [cell("a", seed) for seed in range(count)]
        projected = {one.hash: seconds for one in todo} if seconds else None
        display = lambda text, stays: shown.append((text, stays))  # noqa: E731
        return todo, LiveTable(8, 8 - count, projected, {one.hash: lanes for one in todo}, display=display, clock=clock)

    return make


def test_before_a_cell_is_over_the_projection_tells_the_time_left(table, clock):
    todo, live = table()
    assert live.seconds_left() == 35.0  # 7 cells of 10 s, two at once
    live.begin(todo[0])
    live.begin(todo[1])
    clock.now += 4.0
    assert live.seconds_left() == 35.0 - 4.0
    clock.now += 60.0  # what runs longer than projected counts nothing
    assert live.seconds_left() == 25.0


def test_the_projection_is_corrected_by_what_the_finished_cells_took(table, clock):
    todo, live = table()
    for one in todo[:3]:
        live.begin(one)
    end(live, todo[0], 30.0)
    assert live.seconds_left() == 6 * 30.0 / 2
    end(live, todo[1], 10.0)  # 40 s where 20 were projected
    assert live.seconds_left() == 5 * 20.0 / 2
    end(live, todo[2], 0.1, "ValueError: no luck")  # one that failed tells nothing
    assert live.seconds_left() == 4 * 20.0 / 2


def test_without_a_projection_the_first_cells_tell_and_before_them_nothing(table):
    todo, live = table(seconds=None)
    assert live.seconds_left() is None
    assert "left" not in live.line()
    live.begin(todo[0])
    end(live, todo[0], 3.0)
    assert live.seconds_left() == 6 * 3.0 / 2


def test_cells_that_run_alone_are_not_divided_among_the_workers(clock):
    todo = [cell("a"), cell("b")]
    lanes = {todo[0].hash: 1, todo[1].hash: 4}
    assert LiveTable(2, 0, {one.hash: 8.0 for one in todo}, lanes, clock=clock).seconds_left() == 8.0 + 2.0


def test_the_line_names_counts_times_and_the_cell_that_runs_longest(table, clock, shown):
    todo, live = table()
    live.begin(todo[4])
    clock.now += 8.0
    live.begin(todo[5])
    live.begin(todo[6])
    end(live, todo[6], 10.0, "ValueError: no luck")
    clock.now += 1.0
    live.look()
    clock.now += 1.0
    live.look()
    live.look()
    line = "1 of 8 cells done, 2 running, 1 failed, 10 s passed, about 24 s left; longest 10 s: main: a, lr 1e-3, seed 4"
    assert shown == [(f"failed: {todo[6].command}: ValueError: no luck", True), (line, False)]


def test_the_last_line_stays_and_speaks_of_no_time_left(table, clock, shown):
    todo, live = table(count=1)
    live.begin(todo[0])
    clock.now += 200.0
    end(live, todo[0], 200.0)
    live.look()
    assert shown == [("8 of 8 cells done, 0 running, 0 failed, 3 min passed", True)]


def test_a_terminal_gets_one_line_that_is_drawn_over_and_never_wraps():
    stream = io.StringIO()
    show = TerminalLine(stream, columns=lambda: 11)
    show("1 of 20 done", False)
    show("failed: it has a long reason", True)
    show("2 of 20 done", False)
    clear = "\r\x1b[2K"
    assert stream.getvalue() == f"{clear}1 of 20 do{clear}failed: it has a long reason\n{clear}2 of 20 do"


def test_the_table_is_shown_while_no_cell_finishes(tmp_path, shown):
    class Slow:
        workers = 1
        asked = 0

        def submit(self, cell, folder):
            self.future = Future()
            return self.future

        def runs_alone(self, cell):
            return False

    launcher = Slow()

    def display(text, stays):
        shown.append(text)
        if len(shown) == 3:
            launcher.future.set_result(Outcome({}, None, 0.1))

    run_cells(launcher, [cell("a")], tmp_path, display=display, every_seconds=0.02)
    assert [text.split(",")[0] for text in shown] == ["0 of 1 cells done"] * 3 + ["1 of 1 cells done"]
    assert "1 running" in shown[0]
