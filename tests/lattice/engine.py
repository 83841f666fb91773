"""Generated tests: axes, a covering array over them, a table of refusals, and oracles that hold everywhere.

An *axis* is a name and its values; the first value is the plain one. A *point* has one value of each axis. A *subject* is what a
point builds: a call, a model, a run. An *oracle* is a property that every subject has. A *refusal* is a combination of values
that must be refused, with the message; a *known fault* is a combination at which an oracle must fail, because a library fails there.

``Lattice.points`` returns

- a covering array: each pair of values of two axes meets in a point that is not refused, and each triple of the ``strong`` axes does.
  A refused point covers nothing, because the error hides what comes after it;
- points for each combination that a refusal or a known fault names, among them one with the other axes plain.

``Lattice.pairs`` returns every pair of values with all other axes plain: some faults show only if nothing else is unusual.

Each lattice is a program, too:

    python tests/lattice/calls.py                                  # the points of today's seed
    python tests/lattice/calls.py 'backend=sdpa mask=empty'        # one point; an axis that is not named is plain
    python tests/lattice/calls.py --seed 7 --strength 3            # another draw; every triple of values
    python tests/lattice/calls.py --where 'backend=chunked dtype=!bf16' --seconds 600   # a part of them; --skip N goes on after N

Each failure ends with the line that repeats it, shrunk to the values that matter.
Covering arrays: Cohen et al. 1997, https://doi.org/10.1109/32.605761.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import math
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Point = dict[str, str]
Where = Mapping[str, str]
"""Axes and their values, several as ``"a|b"``, all but some as ``"!a|b"``."""

FEWEST = 5
"""An oracle that is asked at fewer points is a fault of the lattice."""


def matches(where: Where, point: Mapping[str, str]) -> bool:
    """Whether a point has a value that ``where`` names on each of its axes."""
    for axis, values in where.items():
        listed, negated = _listed(values)
        if axis not in point or (point[axis] in listed) == negated:
            return False
    return True


@functools.cache
def _listed(values: str) -> tuple[frozenset[str], bool]:
    """The values that ``"a|b"`` or ``"!a|b"`` lists, and whether they are excluded."""
    return frozenset(values.removeprefix("!").split("|")), values.startswith("!")


@dataclass(frozen=True)
class Refusal:
    """A combination of values that must raise an error whose message matches ``message``."""

    where: Where
    message: str


@dataclass(frozen=True)
class KnownFault:
    """A combination at which ``oracle`` fails with a message that matches ``message``: a fault of another library.

    If the oracle passes there, the test fails: the fault was mended, and the entry goes. Give ``reason`` with the version.
    """

    where: Where
    oracle: str
    message: str
    reason: str


@dataclass(frozen=True)
class Oracle:
    """A property of every subject: ``check`` raises AssertionError where it does not hold.

    It is asked at the points that match one entry of ``where`` (all points if empty) and none of ``unless``.
    """

    check: Callable[[Any], None]
    where: Sequence[Where] = ()
    unless: Sequence[Where] = ()

    @property
    def name(self) -> str:
        return self.check.__name__

    def applies(self, point: Mapping[str, str]) -> bool:
        wanted = not self.where or any(matches(where, point) for where in self.where)
        return wanted and not any(matches(where, point) for where in self.unless)


@dataclass(frozen=True)
class Failure:
    """What is wrong at a point: the oracle's name (``table`` for an entry that no longer holds) and the message."""

    oracle: str
    message: str
    is_refusal: bool = False

    def __str__(self) -> str:
        return f"{self.oracle}: {self.message}"


@dataclass
class Lattice:
    """Axes, the subject of a point, the oracles, and the table of what is refused.

    Attributes:
        file: the path of the program, for the line that repeats a failure.
        axes: names and values; the first value of an axis is the plain one.
        make: builds the subject of a point, and checks nothing. A subject is made anew for each oracle.
        oracles: the properties.
        refusals: what must be refused.
        known: faults of other libraries.
        meaningless: combinations that are no subject at all.
        strong: axes whose triples are all covered.
        costly: values by axis, as ``"a|b"``, that a point has only where a pair needs them.
        errors: the types of error that count as a refusal. Any other error is a failure.
    """

    file: str
    axes: Mapping[str, Sequence[str]]
    make: Callable[[Point], Any]
    oracles: Sequence[Oracle]
    refusals: Sequence[Refusal] = ()
    known: Sequence[KnownFault] = ()
    meaningless: Sequence[Where] = ()
    strong: Sequence[str] = ()
    costly: Where = field(default_factory=dict)
    errors: tuple[type[BaseException], ...] = (ValueError, TypeError, NotImplementedError)
    _points: dict[tuple[int, int], list[Point]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        tables = [entry.where for entry in (*self.refusals, *self.known)] + list(self.meaningless)
        tables += [where for oracle in self.oracles for where in (*oracle.where, *oracle.unless)]
        tables.append(self.costly)
        for where in tables:
            for axis, values in where.items():
                unknown = _listed(values)[0] - set(self.axes.get(axis, ()))
                if axis not in self.axes or unknown:
                    raise ValueError(
                        f"{self.file}: no axis {axis} with {', '.join(sorted(unknown)) or 'these values'}: {dict(where)}"
                    )
        names = {oracle.name for oracle in self.oracles}
        for entry in self.known:
            if entry.oracle not in names:
                raise ValueError(f"{self.file}: no oracle {entry.oracle}")

    # Points

    @functools.cached_property
    def _existing(self) -> dict[str, list[Where]]:
        """The meaningless combinations that name an axis."""
        return {axis: [where for where in self.meaningless if axis in where] for axis in self.axes}

    @functools.cached_property
    def _serving(self) -> dict[str, list[Where]]:
        """The meaningless and refused combinations that name an axis."""
        return {axis: self._existing[axis] + [r.where for r in self.refusals if axis in r.where] for axis in self.axes}

    @property
    def plain(self) -> Point:
        return {axis: values[0] for axis, values in self.axes.items()}

    def exists(self, point: Mapping[str, str]) -> bool:
        return not any(matches(where, point) for where in self.meaningless)

    def refusal_of(self, point: Mapping[str, str]) -> Refusal | None:
        return next((refusal for refusal in self.refusals if matches(refusal.where, point)), None)

    def serves(self, point: Mapping[str, str]) -> bool:
        """Whether the point exists and is not refused."""
        return self.exists(point) and self.refusal_of(point) is None

    def points(self, seed: int = 0, strength: int = 2) -> list[Point]:
        """The covering array of a seed, then the points of the refusals and of the known faults."""
        if (seed, strength) not in self._points:
            self._points[seed, strength] = [*self._covering(seed, strength), *self._refused(seed), *self._faulty()]
        return self._points[seed, strength]

    def _covering(self, seed: int, strength: int) -> list[Point]:
        draw = random.Random(seed)
        groups = {*itertools.combinations(sorted(self.axes), strength), *itertools.combinations(sorted(self.strong), 3)}
        uncovered = {part for axes in groups for part in self._combinations(axes) if self.serves(dict(part))}
        chosen = [self.plain] if self.serves(self.plain) else []
        uncovered.difference_update(*(self._parts(point, strength) for point in chosen))
        queue = sorted(uncovered)
        draw.shuffle(queue)
        for part in queue:
            if part not in uncovered:
                continue
            attempts = [point for point in (self._completed(dict(part), draw) for _ in range(20)) if point]
            if not attempts:  # no point has all of them
                uncovered.discard(part)
                continue
            covered = [uncovered.intersection(self._parts(point, strength)) for point in attempts]
            best = max(range(len(attempts)), key=lambda i: len(covered[i]))
            uncovered -= covered[best]
            chosen.append(attempts[best])
        return chosen

    def _combinations(self, axes: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
        for values in itertools.product(*(self.axes[axis] for axis in axes)):
            yield tuple(zip(axes, values, strict=True))

    def _parts(self, point: Point, strength: int) -> Iterator[tuple[tuple[str, str], ...]]:
        """The combinations of ``strength`` values of the point, and of three values on the strong axes."""
        values = sorted(point.items())
        yield from itertools.combinations(values, strength)
        yield from itertools.combinations([(axis, value) for axis, value in values if axis in self.strong], 3)

    def _completed(self, start: Point, draw: random.Random, refused: bool = False) -> Point | None:
        """``start`` with a drawn value on each other axis, or None if the draw comes to an axis without a usable value.

        The point is served, or, with ``refused``, exists.
        """
        entries = self._existing if refused else self._serving
        point = dict(start)
        axes = [axis for axis in self.axes if axis not in point]
        draw.shuffle(axes)
        for axis in axes:
            values = list(self.axes[axis])
            draw.shuffle(values)
            values.sort(key=lambda value: axis in self.costly and matches({axis: self.costly[axis]}, {axis: value}))
            for value in values:
                point[axis] = value
                if not any(matches(where, point) for where in entries[axis]):
                    break
            else:
                return None
        return point

    def _plainest(self, start: Point) -> Point | None:
        """``start`` with plain values where that exists, and else the first values that do."""
        point = dict(start)
        for axis, values in self.axes.items():
            if axis not in point:
                value = next((value for value in values if self.exists({**point, axis: value})), None)
                if value is None:
                    return None
                point[axis] = value
        return point if self.exists(point) else None

    def _refused(self, seed: int) -> list[Point]:
        """For each combination that a refusal names: the plainest point, and a drawn one."""
        draw = random.Random(seed)
        points = []
        for refusal in self.refusals:
            axes = list(refusal.where)
            for part in self._combinations(axes):
                if matches(refusal.where, dict(part)) and self.exists(dict(part)):
                    points += [self._plainest(dict(part)), self._completed(dict(part), draw, refused=True)]
        return [point for point in points if point is not None]

    def _faulty(self) -> list[Point]:
        """For each combination that a known fault names: the plainest point."""
        parts = [
            dict(part)
            for fault in self.known
            for part in self._combinations(list(fault.where))
            if matches(fault.where, dict(part))
        ]
        points = [self._plainest(part) for part in parts if self.exists(part)]
        return list({self.words(point): point for point in points if point is not None and self.serves(point)}.values())

    def pairs(self, **fixed: str) -> list[Point]:
        """Every pair of values of two axes, with ``fixed`` values and all other axes plain, where such a point is served."""
        found, plain = {}, {**self.plain, **fixed}
        for axes in itertools.combinations([axis for axis in self.axes if axis not in fixed], 2):
            for part in self._combinations(axes):
                point = {**plain, **dict(part)}
                if self.serves(point):
                    found[self.words(point)] = point
        return list(found.values())

    # Checks

    def failures(self, point: Point, oracles: Sequence[str] | None = None) -> Iterator[Failure]:
        """What is wrong at a point, by the oracles that are named (default: all that apply).

        After a refusal without an entry, no other oracle is asked: each would be refused in its own way.
        """
        refusals = [refusal for refusal in self.refusals if matches(refusal.where, point)]
        if refusals:
            yield from self._not_refused(point, refusals)
            return
        for oracle in self.oracles:
            if not oracle.applies(point) or (oracles is not None and oracle.name not in oracles):
                continue
            faults = [fault for fault in self.known if fault.oracle == oracle.name and matches(fault.where, point)]
            failure = self._failure(oracle, point)
            if failure is None and faults:
                yield Failure("table", f"{oracle.name} passes now: take out the known fault {dict(faults[0].where)}")
            elif failure is not None and not any(re.search(fault.message, failure.message) for fault in faults):
                yield failure
                if failure.is_refusal:
                    return

    def _failure(self, oracle: Oracle, point: Point) -> Failure | None:
        try:
            oracle.check(self.make(point))
        except AssertionError as error:
            return Failure(oracle.name, str(error).strip()[:400] or "an assertion without a message" + place_of(error))
        except self.errors as error:
            message = f"refused, and no Refusal of {self.file} has this message: {type(error).__name__}: {str(error)[:300]}"
            return Failure(oracle.name, message + place_of(error), is_refusal=True)
        except (Exception, SystemExit) as error:
            return Failure(oracle.name, f"{type(error).__name__}: {str(error)[:300]}{place_of(error)}")
        return None

    def _not_refused(self, point: Point, refusals: Sequence[Refusal]) -> Iterator[Failure]:
        """The oracles run in turn until one raises the refusal: the first may not reach the refused part.

        A point with several reasons may be refused for any of them. A point without an oracle tells nothing.
        """
        message = "|".join(refusal.message for refusal in refusals)
        asked = [oracle for oracle in self.oracles if oracle.applies(point)]
        for oracle in asked:
            try:
                oracle.check(self.make(point))
            except self.errors as error:
                if not re.search(message, str(error)):
                    told = f"refused with another message than {message!r}: {type(error).__name__}: {str(error)[:300]}"
                    yield Failure("table", told + place_of(error))
                return
            except (Exception, SystemExit) as error:
                yield Failure(oracle.name, f"{type(error).__name__}: {str(error)[:300]}{place_of(error)}")
                return
        if asked:
            yield Failure("table", f"is no longer refused: take out {dict(refusals[0].where)}")

    def asked(self, points: Iterable[Point]) -> Counter[str]:
        """At how many points each oracle is asked; refused points count for none."""
        counts = Counter({oracle.name: 0 for oracle in self.oracles})
        for point in points:
            if self.refusal_of(point) is None:
                counts.update(oracle.name for oracle in self.oracles if oracle.applies(point))
        return counts

    def seldom(self, seed: int) -> dict[str, int]:
        """The oracles that the points of a seed ask less than ``FEWEST`` times, and how often."""
        return {name: count for name, count in self.asked(self.points(seed)).items() if count < FEWEST}

    def advice(self, seed: int) -> str:
        """What to do if the points of a seed ask an oracle too seldom: the next seed of twenty that asks all often enough."""
        other = next((other for other in range(seed + 1, seed + 21) if not self.seldom(other)), None)
        remedy = f"no seed up to {seed + 20} does, so let them apply to more values" if other is None else f"set SEED = {other}"
        return (
            f"{self.file}: an axis or value has changed the draw, and some oracles are asked less than {FEWEST} times: {remedy}"
        )

    def shrunk(self, point: Point, failure: Failure) -> tuple[Point, Failure]:
        """The point with as many plain values as still fail the same oracle, and its failure. A refusal stays a refusal."""
        if failure.oracle == "table":
            return point, failure
        plain = self.plain
        for axis in self.axes:
            nearer = {**point, axis: plain[axis]}
            if nearer != point and self.serves(nearer):
                alike = (f for f in self.failures(nearer, [failure.oracle]) if f.is_refusal == failure.is_refusal)
                if (simpler := next(alike, None)) is not None:
                    point, failure = nearer, simpler
        return point, failure

    def words(self, point: Mapping[str, str]) -> str:
        """The values of a point that are not plain, as its line on the command line."""
        return " ".join(f"{axis}={point[axis]}" for axis, value in self.plain.items() if point[axis] != value) or "plain"

    def point_of(self, words: str) -> Point:
        """The point of a line of words.

        Raises:
            ValueError: an axis or a value does not exist.
        """
        point = self.plain
        for word in words.split():
            axis, _, value = word.partition("=")
            if word != "plain":
                if value not in self.axes.get(axis, ()):
                    known = ", ".join(self.axes.get(axis, self.axes))
                    raise ValueError(f"{word}: expected one of {known}")
                point[axis] = value
        return point

    def where_of(self, words: str) -> Where:
        """The values that words like ``"axis=a|b axis=!c"`` name.

        Raises:
            ValueError: an axis or a value does not exist.
        """
        where = dict(word.partition("=")[::2] for word in words.split())
        for axis, values in where.items():
            for value in _listed(values)[0]:
                self.point_of(f"{axis}={value}")
        return where

    def check(self, point: Point) -> None:
        """Raise AssertionError with all failures of a point, and the shrunk lines that repeat them."""
        lines = []
        for failure in self.failures(point):
            simplest, failure = self.shrunk(point, failure)
            lines.append(f"{failure}\n    again: python {self.file} '{self.words(simplest)}'")
        assert not lines, "\n".join(lines)


def place_of(error: BaseException) -> str:
    """The file and line that raised an error, in brackets."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" [{frames[-1].filename.split('/')[-1]}:{frames[-1].lineno}]"


def today() -> int:
    """The seed of the day: 20261128 on 2026-11-28."""
    return int(datetime.date.today().strftime("%Y%m%d"))


def run(lattice: Lattice, arguments: Sequence[str] | None = None) -> int:
    """The program of a lattice. Returns 0, 1 after a failure, 2 for an unknown word."""
    parser = argparse.ArgumentParser(description="Ask the oracles of a lattice at its points.")
    parser.add_argument("point", nargs="?", help="'axis=value …': one point; an axis that is not named is plain")
    parser.add_argument("--seed", type=int, default=today(), help="of the covering array (default: today's date)")
    parser.add_argument("--strength", type=int, default=2, help="2: every pair of values; 3: every triple")
    parser.add_argument("--pairs", action="store_true", help="every pair of values with all other axes plain")
    parser.add_argument("--count", action="store_true", help="print the number of points and of questions, and stop")
    parser.add_argument("--where", default="", help="'axis=a|b axis=!c …': only the points with a or b, and without c")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many points, which were asked before")
    parser.add_argument("--limit", type=int, help="at most so many points, drawn by the seed")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no point after so many seconds")
    parser.add_argument("--verbose", action="store_true", help="print each point")
    options = parser.parse_args(arguments)
    try:
        points = [lattice.point_of(options.point)] if options.point else None
        where = lattice.where_of(options.where)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if points is None:
        points = lattice.pairs() if options.pairs else lattice.points(options.seed, options.strength)
        points = [point for point in points if matches(where, point)]
    if options.limit is not None and options.limit < len(points):
        points = random.Random(options.seed).sample(points, options.limit)
    points = points[options.skip :]
    draw = "" if options.point or options.pairs else f", seed {options.seed}, strength {options.strength}"
    print(f"{lattice.file}: {len(points)} points{draw}", flush=True)
    for name, count in lattice.asked(points).items():
        print(f"  {count:5} × {name}")
    return 0 if options.count else _ask(lattice, points, options.verbose, options.seconds)


def _ask(lattice: Lattice, points: Sequence[Point], verbose: bool, seconds: float) -> int:
    start, reported, end = time.process_time(), Counter[str](), time.monotonic() + seconds
    known = set()
    for number, point in enumerate(points):
        if time.monotonic() > end:
            print(f"{number} of {len(points)} points in {seconds:g} seconds")
            break
        if verbose:
            print(lattice.words(point), flush=True)
        for failure in lattice.failures(point):
            simplest, failure = lattice.shrunk(point, failure)
            again = lattice.words(simplest)
            reported[failure.oracle] += 1
            if (failure.oracle, again) not in known:
                known.add((failure.oracle, again))
                print(f"FAILED {failure}\n    again: python {lattice.file} '{again}'", flush=True)
    print(f"{len(known)} failures in {time.process_time() - start:.0f} CPU seconds {dict(reported) or ''}")
    return 1 if known else 0
