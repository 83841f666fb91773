"""The meaning of a window or top-k is found by trying, and the same in all rows."""

import pytest
import torch
from windows_and_top_k import BROKEN, NEITHER, RIGHT, top_k, top_k_by_itself, window_before_itself

from minitx.check import Severity, Status, check_attention


def wrong(report):
    return [finding for finding in report.findings if finding.severity == Severity.WRONG]


def of_argument(report):
    return next(check for check in report.checks if check.id.startswith("argument "))


@pytest.mark.parametrize("function", RIGHT, ids=lambda function: function.__name__)
def test_a_right_window_or_top_k_is_described_and_not_accused(function):
    report = check_attention(function)
    assert wrong(report) == [] and report.taken_as == RIGHT[function], report
    assert of_argument(report).status == Status.PASSED and f"taken as   {report.taken_as[:40]}" in str(report)


@pytest.mark.parametrize("function", BROKEN, ids=lambda function: function.__name__)
def test_a_window_or_top_k_that_is_wrong_in_few_rows_is_noticed(function):
    report = check_attention(function)
    (found,) = [finding for finding in report.findings if finding.id == "other-selection"]
    assert BROKEN[function] in f"{found.fault} {found.witness}" and of_argument(report).status == Status.FAILED, report
    is_alignment = BROKEN[function] == "more keys than queries"  # a window without a cache is right
    assert found.severity == (Severity.FRAGILE if is_alignment else Severity.WRONG)


@pytest.mark.parametrize("function", NEITHER, ids=lambda function: function.__name__)
def test_an_argument_that_is_neither_is_not_judged(function):
    report = check_attention(function)
    assert report.findings == () and of_argument(report).status == Status.NOT_TRIED, report
    assert NEITHER[function] in of_argument(report).reason


def test_top_k_without_an_argument_is_described():
    (found,) = check_attention(top_k_by_itself).findings
    assert found.severity == Severity.NOTE and "as top-k does" in found.fault


def test_a_window_of_a_layer_is_tried():
    class Layer(torch.nn.Module):
        def __init__(self, function):
            super().__init__()
            self.num_heads, self.function = 4, function
            self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

        def forward(self, x, mask=None, is_causal=False, size=None):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return self.out(self.function(q, k, v, mask, is_causal, size).transpose(1, 2).flatten(2))

    report = check_attention(Layer(top_k))
    assert wrong(report) == [] and report.taken_as == "with size=3, a query sees the 3 keys with its largest scores", report
    report = check_attention(Layer(lambda q, k, v, mask, is_causal, size: window_before_itself(q, k, v, mask, False, size)))
    assert "causal-ignored" in {finding.id for finding in report.findings}, report
