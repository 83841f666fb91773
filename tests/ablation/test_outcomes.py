"""Every run has one outcome, by rules that look at every arm alike."""

import math
from typing import get_args

import numpy as np
import pytest

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


def to(end):
    return run(np.linspace(INITIAL, end, 400).tolist() + [end] * 100)


@pytest.mark.parametrize("word", sorted(set(get_args(Outcome)) - {"NONFINITE"}))
def test_a_run_on_text_gets_the_outcome_that_its_curve_was_made_for(word):
    assert outcome(run(made_up.text_curve(word, 1.7, 1000)), TEXT) == word


@pytest.mark.parametrize(("made", "levels", "wanted"), [
    (recall((0.06, 100), (1.0, 100)), RECALL, "TRAINED"),
    (recall((0.06, 300)), RECALL, "NEVER LEARNED"),
    (recall((0.06, 100), (0.27, 15), (0.06, 100)), RECALL, "NEVER LEARNED"),
    (recall((0.06, 100), (0.28, 16)), RECALL, "TRAINED"),  # above a plain average: .17, unless it is given
    (recall((0.06, 100), (0.3, 30)), Levels(initial=2.8, uniform=0.25), "NEVER LEARNED"),
    (recall((0.06, 100), (1.0, 20), (0.3, 100)), RECALL, "LEARNED AND LOST"),
    (recall((1.0, 4), (0.06, 196), start="first"), RECALL, "LEARNED AND LOST"),
    (run([2.0, None], nonfinite=2), TEXT, "NONFINITE"),
    (run([2.0] * 9, nonfinite=9), TEXT, "NONFINITE"),  # the gradient was not finite
    (run([INITIAL] + [INITIAL + 0.1] * 100), TEXT, "DIVERGED"),  # even where it never learned
    (to(UNIFORM_LEVEL - 0.04), TEXT, "STUCK"),
    (to(UNIFORM_LEVEL - 0.06), TEXT, "TRAINED"),
    (run(made_up.text_curve("STUCK", 1.7, 1000)), Levels(INITIAL, UNIGRAM), "TRAINED"),  # without a uniform arm
])  # fmt: skip
def test_the_first_rule_that_fits_decides(made, levels, wanted):
    assert outcome(made, levels) == wanted


def test_the_initial_loss_of_a_continued_run_is_that_of_the_untrained_network():
    first, second, third = run([4.2, 1.6]), run([1.6, 9.0], start="a", cell="b"), run([1.0], start="b", cell="c")
    whole = Runs((first, second, third))
    assert [initial_loss(whole, one) for one in whole.all] == [4.2, 4.2, 4.2]


def test_the_end_is_the_mean_of_the_last_steps_and_the_worst_where_it_is_not_finite():
    assert last_mean(run([9.0] * 50 + [2.0] * 50), "loss") == 2.0
    broken = run([2.0, None], [0.5, 0.5], nonfinite=2)
    assert (last_mean(broken, "loss"), last_mean(broken, "accuracy")) == (math.inf, 0.0)


def test_gradient_norms_leave_out_the_first_nine_steps_and_what_is_not_finite():
    assert gradient_norms(run([1.0] * 12, gradient=[99.0] * 9 + [1.0, 2.0, None])) == (pytest.approx(1.99), 2.0)
    assert gradient_norms(run([1.0], gradient=None)) is None
