"""The recorded training of the playground: its numbers belong together, and its command makes it."""

import json
import math

import numpy as np
import pytest

from minitx.analysis.viewer import playground
from tests.examples.conftest import ROOT

RECORD = ROOT / "minitx" / "analysis" / "viewer" / "training.json"


@pytest.fixture(scope="module")
def script(example):
    return example("falls_apart")


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text(encoding="utf-8"))


def weights(script, look):
    """(16, 17), from the letters."""
    return (np.array([script.LEVELS.index(letter) for letter in look]) / 63).reshape(16, 17) ** 2


def assert_is_complete(script, found):
    settings = [(optimizer, rate, arm) for optimizer, rates in script.RATES.items() for rate in rates for arm in script.ARMS]
    assert [(run["optimizer"], run["rate"], run["arm"]) for run in found["runs"]] == settings
    assert tuple(found["looks"]) == script.LOOKS
    for run in found["runs"]:
        assert len(run["loss"]) == len(run["accuracy"]) == script.STEPS + 1
        assert all(isinstance(right, int) and 0 <= right <= 64 for right in run["accuracy"])
        assert len(run["weights"]) == len(run["right"]) == len(run["largest"]) == len(script.LOOKS)
        assert all(len(look) == 16 * 17 for look in run["weights"]) and all(len(look) == 16 for look in run["right"])


def test_the_record_is_complete_and_small(script, record):
    assert_is_complete(script, record)
    assert RECORD.stat().st_size <= 300_000 and len(playground().page.encode()) <= 600_000


def test_the_smallest_rate_holds_in_both_arms_the_middle_one_with_the_scale_and_the_largest_in_none(script, record):
    holds = [script.lowest(run["accuracy"]) >= 0.9 for run in record["runs"]]
    assert holds == [True, True, True, False, False, False] * 2


def test_the_arms_start_as_one_function(record):
    for scaled, unscaled in zip(record["runs"][::2], record["runs"][1::2], strict=True):
        assert scaled["weights"][0] == unscaled["weights"][0] == record["runs"][0]["weights"][0]
        assert scaled["right"][0] == unscaled["right"][0] == "1" * 16
        assert scaled["largest"][0] == pytest.approx(unscaled["largest"][0], rel=1e-3)
        assert scaled["loss"][0] == pytest.approx(unscaled["loss"][0], rel=1e-2)


def test_maps_answers_accuracy_loss_and_logits_say_the_same(script, record):
    """A row of weights sums to 1; where the right key has the largest weight, the answer is right; the batches of training agree."""
    differences = []
    for run in record["runs"]:
        for look, step in enumerate(record["looks"]):
            found = weights(script, run["weights"][look])
            np.testing.assert_allclose(found.sum(1), 1, atol=0.05)
            looked = found.argmax(1) == np.arange(16)
            right = np.array([letter == "1" for letter in run["right"][look]])
            accuracy = run["accuracy"][step] / 64
            differences.append((np.mean(looked != right), abs(looked.mean() - accuracy), abs(right.mean() - accuracy)))
            assert (accuracy > 0.95) <= (run["loss"][step] < 0.7) and (accuracy < 0.2) <= (run["loss"][step] > 1.5)
    assert max(np.mean(differences, axis=0)) < 0.05
    for scaled, unscaled in zip(record["runs"][::2], record["runs"][1::2], strict=True):
        fallen = [run for run in (scaled, unscaled) if script.lowest(run["accuracy"]) < 0.9]
        assert all(max(run["largest"]) > 10 * run["largest"][0] for run in fallen)
        if scaled not in fallen and unscaled in fallen:
            assert max(unscaled["largest"]) > 8 * max(scaled["largest"])


def test_the_table_of_four_widths_is_that_of_the_record(script, record):
    """If the record of the grid has grown: python examples/falls_apart.py."""
    assert record["limits"] == script.largest_rates()
    for name, power in (("adamw", 1 / 4), ("sgd", 1 / 2)):
        for width, scaled, unscaled, ratio, seeds in record["limits"][name]:
            assert ratio == pytest.approx(scaled / unscaled, rel=0.1) and seeds == 10
            assert 1 < ratio < 1.2 * width**power
        scaled, unscaled = record["limits"][name][2][1:3]  # d_k = 128
        low, middle, high = script.RATES[name]
        assert low < unscaled < middle < scaled < high


def test_levels_are_finer_for_small_weights(script):
    import torch

    given = torch.linspace(0, 1, 1001)
    read = (np.array([script.LEVELS.index(letter) for letter in script.text(given)]) / 63) ** 2
    assert np.abs(read - given.numpy()).max() < 0.016
    assert math.isclose(read[0], 0) and math.isclose(read[-1], 1)


@pytest.mark.release  # a minute
def test_the_command_makes_such_a_record(script, tmp_path, record):
    found = script.main(tmp_path / "training.json")
    assert json.loads((tmp_path / "training.json").read_text(encoding="utf-8")) == json.loads(json.dumps(found))
    assert_is_complete(script, found)
    # other machines round otherwise, and a lost run is chaotic
    for mine, stored in zip(found["runs"], record["runs"], strict=True):
        assert (script.lowest(mine["accuracy"]) >= 0.9) == (script.lowest(stored["accuracy"]) >= 0.9)
        assert mine["loss"][:5] == pytest.approx(stored["loss"][:5], rel=0.02)
