"""A run that is killed or stopped after any step, and goes on, is the run that was left alone."""

import signal

import pytest
from killing import blows, hit_and_go_on, length_of, result_of, run

STEPS = 48
BLOWS = blows(seed=1, kills=4, terms=1, interrupts=1, tmpdirs=[None])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """The result of the run that was left alone."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert run(length_of(STEPS), folder, cache) == 0
    assert run([*length_of(STEPS), "seed=1"], folder.parent / "other", cache) == 0
    assert result_of(folder.parent / "other") != result_of(folder)  # the digest sees a difference
    return result_of(folder)


@pytest.mark.slow
@pytest.mark.parametrize("blow", BLOWS, ids=lambda blow: f"{signal.Signals(blow.number).name}-{blow.after:.2f}-{blow.save}")
def test_a_run_that_was_hit_comes_to_the_same_end(blow, whole, cache, tmp_path):
    found = hit_and_go_on(STEPS, tmp_path / "run", cache, blow)
    assert found["result"] == whole
    assert found["left"] == ["best.ckpt", "last.ckpt"]  # and no half of one
    assert found["code"] in (0, -blow.number, 128 + blow.number)
