"""Every run has one outcome, by rules that look at every arm alike."""

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitx.ablation import outcomes
from minitx.ablation.outcomes import Levels, Outcome, gradient_norms, initial_loss, last_mean, outcome
from minitx.ablation.records import Run, Runs
from tests.ablation import made_up
from tests.ablation.made_up import INITIAL, UNIFORM_LEVEL, UNIGRAM

TEXT = Levels(initial=INITIAL, unigram=UNIGRAM, uniform=UNIFORM_LEVEL)
RECALL = Levels(initial=2.8)


def run(loss, accuracy=None, start=None, nonfinite=None, gradient=None, cell="a"):
    result = {"loss": list(loss), "accuracy": accuracy, "nonfinite_step": nonfinite, "gradient": gradient}
    return Run("s", "a", (), 0, {"status": "done", "cell": cell, "start": start, "result": result})


def recall(*pieces, start=None):
    """A run whose accuracy is each share for so many steps."""
    accuracy = [share for share, steps in pieces for _ in range(steps)]
    return run([2.77 * (1 - share) for share in accuracy], accuracy, start=start)


@pytest.mark.parametrize("word", sorted(set(get_args(Outcome)) - {"NONFINITE"}))
def test_a_run_on_text_gets_the_outcome_that_its_curve_was_made_for(word):
    assert outcome(run(made_up.text_curve(word, 1.7, 1000)), TEXT) == word


@pytest.mark.parametrize(
    ("made", "wanted"),
    [
        (recall((0.06, 100), (1.0, 100)), "TRAINED"),
        (recall((0.06, 300)), "NEVER LEARNED"),
        (recall((0.06, 100), (0.27, 15), (0.06, 100)), "NEVER LEARNED"),
        (recall((0.06, 100), (0.28, 16)), "TRAINED"),
        (recall((0.06, 100), (1.0, 20), (0.3, 100)), "LEARNED AND LOST"),
        (recall((0.06, 100), (1.0, 20), (0.3, 100), (1.0, 50)), "SPIKED, RECOVERED"),
        (recall((1.0, 4), (0.06, 196), start="first"), "LEARNED AND LOST"),
        (recall((1.0, 20), (0.6, 180), start="first"), "SPIKED, NOT RECOVERED"),
        (recall((1.0, 200), start="first"), "TRAINED"),
    ],
)
def test_a_run_on_recall_is_judged_by_its_accuracy(made, wanted):
    assert outcome(made, RECALL) == wanted


def test_a_loss_that_is_not_finite_comes_first():
    assert outcome(run([2.0, None], nonfinite=2), TEXT) == "NONFINITE"
    assert outcome(run([2.0] * 9, nonfinite=9), TEXT) == "NONFINITE"  # the gradient was not finite


def test_a_run_that_ends_above_its_initial_loss_diverged_even_where_it_never_learned():
    assert outcome(run([INITIAL] + [INITIAL + 0.1] * 100), TEXT) == "DIVERGED"
    assert outcome(run([2.8] + [2.9] * 100, [0.06] * 101), RECALL) == "DIVERGED"


@pytest.mark.parametrize(("end", "wanted"), [(UNIFORM_LEVEL - 0.04, "STUCK"), (UNIFORM_LEVEL - 0.06, "TRAINED")])
def test_stuck_means_within_a_twentieth_of_the_uniform_level(end, wanted):
    assert outcome(run(np.linspace(INITIAL, end, 400).tolist() + [end] * 100), TEXT) == wanted


def test_without_a_uniform_arm_text_is_neither_lost_nor_stuck():
    level = Levels(initial=INITIAL, unigram=UNIGRAM)
    assert outcome(run(made_up.text_curve("STUCK", 1.7, 1000)), level) == "TRAINED"
    assert outcome(run(made_up.text_curve("LEARNED AND LOST", 1.7, 1000)), level) == "SPIKED, NOT RECOVERED"


@pytest.mark.parametrize(
    ("width", "height", "first", "wanted"),
    [
        (3, 0.5, 50, "SPIKED, RECOVERED"),
        (2, 9.0, 50, "TRAINED"),  # a median over five steps does not see two
        (3, 0.45, 50, "TRAINED"),
        (4, -1.0, 0, "TRAINED"),  # the first four steps are not looked at
    ],
)
def test_a_spike_is_half_a_nat_over_three_steps(width, height, first, wanted):
    loss = np.full(100, 2.0)
    loss[first : first + width] += height
    assert outcome(run(loss.tolist()), Levels(initial=INITIAL)) == wanted


def test_of_several_spikes_the_last_decides_whether_the_run_recovered():
    loss = np.full(300, 2.0)
    loss[50:60] = 3.0
    assert outcome(run(loss.tolist()), Levels(initial=INITIAL)) == "SPIKED, RECOVERED"
    loss[250:] = 2.6
    assert outcome(run(loss.tolist()), Levels(initial=INITIAL)) == "SPIKED, NOT RECOVERED"


@given(st.lists(st.floats(0, 20), min_size=1, max_size=80), st.booleans(), st.booleans())
def test_every_run_has_one_outcome(loss, is_recall, is_continued):
    accuracy = [1 / (1 + value) for value in loss] if is_recall else None
    assert outcome(run(loss, accuracy, "first" if is_continued else None), TEXT) in get_args(Outcome)


def test_the_outcome_of_a_run_does_not_depend_on_its_arm():
    grid = made_up.grid(studies={"text": made_up.studies()["text"]})
    for word in ("STUCK", "LEARNED AND LOST"):
        truth = made_up.Truth(outcomes={("text", arm, "1e-2"): word for arm in grid.studies["text"].arms}, spread=1.0)
        found = {outcome(one, TEXT) for one in made_up.runs(grid, truth).select("text", rate="1e-2")}
        assert found == {word}


def test_the_initial_loss_of_a_continued_run_is_that_of_the_untrained_network():
    first, second, third = run([4.2, 1.6]), run([1.6, 9.0], start="a", cell="b"), run([1.0], start="b", cell="c")
    whole = Runs((first, second, third))
    assert [initial_loss(whole, one) for one in whole.all] == [4.2, 4.2, 4.2]


def test_the_end_is_the_mean_of_the_last_steps_and_the_worst_where_it_is_not_finite():
    assert last_mean(run([9.0] * 50 + [2.0] * 50), "loss") == 2.0
    assert last_mean(run([2.0, None], [0.5, 0.5], nonfinite=2), "loss") == math.inf
    assert last_mean(run([2.0, None], [0.5, 0.5], nonfinite=2), "accuracy") == 0.0


def test_gradient_norms_leave_out_the_first_nine_steps_and_what_is_not_finite():
    assert gradient_norms(run([1.0] * 12, gradient=[99.0] * 9 + [1.0, 2.0, None])) == (pytest.approx(1.99), 2.0)
    assert gradient_norms(run([1.0], gradient=None)) is None and gradient_norms(run([1.0] * 9, gradient=[1.0] * 9)) is None


def test_the_uniform_level_of_recall_is_that_of_the_protocol_unless_it_is_given():
    made = recall((0.06, 100), (0.3, 30))
    assert outcomes.UNIFORM_ACCURACY == 0.17
    assert outcome(made, RECALL) == "TRAINED" and outcome(made, Levels(initial=2.8, uniform=0.25)) == "NEVER LEARNED"
