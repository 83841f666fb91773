"""The engine of the generated tests, on a subject whose faults are known."""

import itertools

import pytest

from tests.lattice.engine import FEWEST, KnownFault, Lattice, Oracle, Refusal, matches, run

AXES = {"a": ("a0", "a1", "a2"), "b": ("b0", "b1"), "c": ("c0", "c1", "c2", "c3"), "d": ("d0", "d1")}


def sums(point):
    if point["a"] == "a1" and point["b"] == "b1":
        raise ValueError("a1 is unsupported with b1")
    assert (point["a"], point["c"]) != ("a2", "c3"), "the sum is wrong"


def products(point):
    assert point["d"] != "d1" or point["c"] != "c1", "the product is wrong"


REFUSED = Refusal({"a": "a1", "b": "b1"}, "unsupported")
WRONG = KnownFault({"d": "d1", "c": "c1"}, "products", "product", "library 1.0")


def lattice(**options):
    options = {"oracles": (Oracle(sums), Oracle(products)), "refusals": (REFUSED,), "known": (WRONG,), **options}
    return Lattice("toy.py", AXES, lambda point: point, **options)


def faults(lattice, points=None):
    points = lattice.points() if points is None else points
    shrunk = (lattice.shrunk(point, failure) for point in points for failure in lattice.failures(point))
    return {(lattice.words(point), failure.oracle) for point, failure in shrunk}


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_of_values_meets_in_a_point_that_is_not_refused(seed):
    subject = lattice(meaningless=({"b": "b1", "d": "d1"},))
    served = [point for point in subject.points(seed) if subject.serves(point)]
    for one, other in itertools.combinations(AXES, 2):
        for values in itertools.product(AXES[one], AXES[other]):
            if set(values) not in ({"a1", "b1"}, {"b1", "d1"}):
                assert any((point[one], point[other]) == values for point in served), values
    assert all(subject.exists(point) for point in subject.points(seed))


def test_all_triples_of_the_strong_axes_meet():
    points = lattice(strong=("a", "c", "d")).points()
    assert {(p["a"], p["c"], p["d"]) for p in points} == set(itertools.product(AXES["a"], AXES["c"], AXES["d"]))


def test_a_costly_value_is_only_in_points_that_a_pair_of_it_needs():
    subject, cheaper = lattice(refusals=()), lattice(refusals=(), costly={"c": "c3"})
    counts = [sum(point["c"] == "c3" for point in each.points()) for each in (subject, cheaper)]
    assert counts[1] == len(AXES["a"]) <= counts[0]
    pairs = {(point["a"], point["c"]) for point in cheaper.points()}
    assert pairs == set(itertools.product(AXES["a"], AXES["c"]))


def test_strength_3_covers_all_triples():
    subject = lattice(refusals=())
    points = subject.points(strength=3)
    for axes in itertools.combinations(AXES, 3):
        assert {tuple(p[axis] for axis in axes) for p in points} == set(itertools.product(*(AXES[axis] for axis in axes)))


def test_each_combination_of_a_refusal_has_a_point_of_its_own():
    wide = Refusal({"a": "a1", "c": "c1|c2"}, "unsupported")
    refused = [point for point in lattice(refusals=(wide,)).points() if matches(wide.where, point)]
    assert {"c1", "c2"} == {point["c"] for point in refused}


def test_a_fault_of_two_values_is_found_and_shrunk_to_them():
    assert faults(lattice()) == {("a=a2 c=c3", "sums")}


def test_a_refusal_that_is_not_in_the_table_fails():
    assert ("a=a1 b=b1", "sums") in faults(lattice(refusals=()))


def test_a_refused_point_is_reported_once_and_shrinks_to_a_refusal_with_its_own_message():
    def twice(point):
        assert point["c"] != "c2", "the result is wrong"
        if (point["a"], point["d"]) == ("a1", "d1"):
            raise ValueError(f"unsupported with {point['b']}")

    def after(point):
        twice(point)

    subject = lattice(oracles=(Oracle(twice), Oracle(after)), refusals=(), known=())
    (failure,) = subject.failures(subject.point_of("a=a1 b=b1 d=d1 c=c1"))
    simplest, failure = subject.shrunk(subject.point_of("a=a1 b=b1 d=d1 c=c1"), failure)
    assert subject.words(simplest) == "a=a1 d=d1" and failure.message.startswith("refused") and "with b0" in failure.message
    assert failure.oracle == "twice"
    (wrong, _) = subject.failures(subject.point_of("a=a1 c=c2 d=d1"))
    assert subject.words(subject.shrunk(subject.point_of("a=a1 c=c2 d=d1"), wrong)[0]) == "c=c2"


def test_an_entry_that_is_no_longer_refused_fails():
    found = faults(lattice(refusals=(REFUSED, Refusal({"b": "b1", "d": "d1"}, "unsupported"))))
    assert any(oracle == "table" for _, oracle in found)


def test_a_refused_point_that_no_oracle_is_asked_at_does_not_fail():
    subject = lattice(refusals=(REFUSED,), oracles=(Oracle(sums, where=({"c": "c1"},)),), known=())
    assert not list(subject.failures(subject.point_of("a=a1 b=b1 c=c0")))


def test_a_refusal_with_another_message_fails():
    assert ("a=a1 b=b1", "table") in faults(lattice(refusals=(Refusal(REFUSED.where, "out of memory"),)))


def test_a_point_with_two_reasons_may_be_refused_for_either():
    for other in (Refusal({"a": "a1", "b": "b1", "c": "c1"}, "never told"), Refusal({"b": "b1", "a": "a1"}, "never told")):
        subject = lattice(refusals=(other, REFUSED))
        assert not list(subject.failures(subject.point_of("a=a1 b=b1 c=c1")))


def test_a_known_fault_that_was_mended_fails():
    mended = KnownFault({"d": "d1", "c": "c2"}, "products", "product", "library 1.0")
    assert any(oracle == "table" for _, oracle in faults(lattice(known=(WRONG, mended))))


def test_each_known_fault_has_a_point():
    narrow = KnownFault({"a": "a2", "b": "b1", "c": "c3", "d": "d1"}, "sums", "sum", "library 1.0")
    for seed in range(10):
        assert any(matches(narrow.where, point) for point in lattice(known=(narrow,)).points(seed))


def test_a_known_fault_with_another_message_fails():
    other = KnownFault(WRONG.where, "products", "quotient", "library 1.0")
    assert ("c=c1 d=d1", "products") in faults(lattice(known=(other,)))


def test_any_other_error_is_a_failure():
    def crashes(point):
        raise RuntimeError("a crash") if point["c"] == "c2" else AssertionError

    (failure,) = lattice(oracles=(Oracle(crashes),), refusals=(), known=()).failures(lattice().point_of("c=c2"))
    assert failure.message.startswith("RuntimeError: a crash [test_engine.py:")


def test_pairs_leave_all_other_axes_plain():
    subject = lattice()
    assert {subject.words(point).count("=") for point in subject.pairs() if subject.words(point) != "plain"} == {1, 2}
    assert ("a=a2 c=c3", "sums") in faults(subject, subject.pairs())


def test_an_oracle_is_counted_where_it_is_asked():
    subject = lattice(oracles=(Oracle(sums, where=({"a": "!a0"},), unless=({"c": "c3"},)), Oracle(products)))
    counts, points = subject.asked(subject.points()), subject.points()
    assert counts["sums"] == sum(p["a"] != "a0" and p["c"] != "c3" and subject.serves(p) for p in points) >= FEWEST


def test_a_seed_that_asks_too_seldom_is_told_with_the_next_that_asks_often_enough():
    subject = lattice(oracles=(Oracle(sums, where=({"c": "c0|c1", "b": "b0"},)), Oracle(products)))
    assert [len(subject.seldom(seed)) for seed in (0, 1, 2, 3)] == [1, 0, 1, 0]
    assert subject.seldom(2) == {"sums": 4}
    assert subject.advice(2).endswith(": set SEED = 3")
    rare = lattice(oracles=(Oracle(sums, where=({"c": "c1", "d": "d0"},)), Oracle(products)))
    assert rare.advice(0).endswith(": no seed up to 20 does, so let them apply to more values")


def test_a_line_of_words_is_the_point_again():
    subject = lattice()
    for point in subject.points():
        assert subject.point_of(subject.words(point)) == point
    with pytest.raises(ValueError, match="a=a9: expected one of a0, a1, a2"):
        subject.point_of("a=a9")


def test_an_entry_with_an_unknown_value_is_refused():
    with pytest.raises(ValueError, match="no axis a with a7"):
        lattice(refusals=(Refusal({"a": "a1|a7"}, ""),))


def test_the_program_prints_the_line_that_repeats_a_failure(capsys):
    assert run(lattice(), ["--seed", "0"]) == 1
    assert "again: python toy.py 'a=a2 c=c3'" in capsys.readouterr().out
    assert run(lattice(), ["a=a2 c=c2"]) == 0
    assert run(lattice(), ["a=a2 c=c9"]) == 2


def asked_by(capsys, *arguments):
    """The lines of the points that the program asks."""
    run(lattice(), ["--seed", "0", "--verbose", *arguments])
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(("plain", "a=", "b=", "c=", "d="))]


def test_the_program_asks_a_part_of_the_points_and_goes_on_after_it(capsys):
    every = asked_by(capsys)
    assert asked_by(capsys, "--where", "a=a1|a2 c=!c0") == [words for words in every if "a=" in words and "c=" in words]
    assert asked_by(capsys, "--skip", "3") == every[3:]
    assert run(lattice(), ["--where", "a=a9"]) == 2
