"""Reports: the order of findings, points, and JSON for graders."""

import json

import pytest

from minitx.check import Check, Finding, Report, Severity, Status, check_attention, mutant
from minitx.check.attention_checks import BLIND_GRADIENT
from minitx.check.cases import CASES, DRAWS
from minitx.check.mutants import MUTANTS
from minitx.check.results import stable_id

NOTE = Finding("a", Severity.NOTE, "a note")
FRAGILE = Finding("b", Severity.FRAGILE, "a weakness", "Do this.")
WRONG = Finding("c", Severity.WRONG, "a mistake", "Do that.", "seen in: plain")
CHECKS = (
    Check("plain", Status.FAILED, "the output differs", 0.5, 1e-9),
    Check("mask", Status.NOT_TRIED, "no argument for a mask was found"),
    Check("causal-with-a-cache", Status.PASSED),
)


def report(*findings, **options):
    return Report("attention", "attention(q, k, v)", 7, CHECKS, findings, **options)


def test_the_worst_finding_comes_first_and_is_the_one_to_mend():
    assert [finding.id for finding in report(NOTE, FRAGILE, WRONG).findings] == ["c", "b", "a"]
    assert report(NOTE, FRAGILE, WRONG).mend_first is WRONG
    assert report(NOTE).mend_first is None


@pytest.mark.parametrize(("findings", "code"), [((), 0), ((NOTE, FRAGILE), 0), ((FRAGILE, WRONG), 1)])
def test_only_what_is_wrong_gives_the_exit_code_1(findings, code):
    assert report(*findings).exit_code == code


def test_a_check_that_was_not_tried_earns_no_point():
    assert report(stage=2).points == (1, 3) and report().points is None


def test_the_table_has_everything_that_the_json_has():
    shown = str(report(FRAGILE, WRONG, stage=2))
    for text in ("seed 7", "called as  attention(q, k, v)", "a mistake", "Do that.", "seen in: plain", "a weakness"):
        assert text in shown
    assert "not tried  mask: no argument for a mask was found" in shown and "passed     causal with a cache" in shown
    assert "points     1 of 3 in stage 2" in shown and "mend first a mistake" in shown


def test_a_part_of_a_check_that_was_not_tried_is_named_beside_the_parts_that_were():
    tried, untried = Check("causality/values", Status.PASSED), Check("causality/with-a-mask", Status.NOT_TRIED, "no mask")
    shown = str(Report("f", "", 0, (tried, untried, Check("padding/left", Status.NOT_TRIED, "no mask")), ()))
    assert "not tried  causality (with a mask), padding: no mask" in shown and "passed     causality" in shown


def test_the_json_is_strict_json_with_the_findings_and_checks():
    read = json.loads(Report("f", "", 0, (Check("plain", Status.FAILED, size=float("inf")),), (WRONG,)).json())
    assert read["checks"][0]["size"] == "inf" and read["findings"][0]["id"] == read["mend_first"] == "c"
    assert set(read) == {
        "version",
        "subject",
        "called_as",
        "taken_as",
        "seed",
        "stage",
        "only",
        "is_right",
        "points",
        "mend_first",
        "findings",
        "checks",
    }


IDS = """
plain more-keys-than-queries mask mask-that-hides-keys large-hidden-values a-query-that-sees-nothing
other-hidden-values-where-a-query-sees-nothing gradients-where-a-query-sees-nothing wide-values causal causal-with-a-cache
mask-and-causal grouped-heads large-scores low-scores low-scores-beside-a-mask very-low-scores-beside-a-mask
float16 float16-with-a-mask bfloat16 bfloat16-with-a-mask one-sequence mask-of-one-sequence grouped-heads-three-sequences
65-queries-130-keys 130-tokens-mask-and-causal small-values the-same-tensors-with-other-numbers
"""
MISTAKES = """
no-scale scale-by-d-k scores-multiplied-by-d-k scale-by-embed-dim scale-by-the-number-of-heads scale-by-the-number-of-keys
scale-by-d-v fourth-root-of-d-k cosine-of-query-and-key cosine-without-scale query-unused key-unused scores-transposed
key-reshaped-not-transposed causal-mask-hides-the-token-itself causal-mask-shows-one-later-token
causal-mask-from-the-upper-left causal-mask-upside-down causal-ignored mask-inverted mask-ignored mask-ignored-when-causal
causal-ignored-beside-a-mask mask-or-causal padding-mask-on-the-queries mask-transposed first-mask-for-the-whole-batch
hidden-scores-of-0 hidden-scores-of-1 mask-added-as-0-and-1 nan-where-a-query-sees-nothing
padding-mask-of-1e9-averages-hidden-values hidden-scores-of-1e4 lowest-finite-number-for-hidden-scores
1e9-added-to-hidden-scores 1e4-added-to-hidden-scores softmax-over-the-queries softmax-over-the-heads softmax-over-the-batch
softmax-over-all-scores softmax-twice no-softmax log-softmax sigmoid exp-without-the-maximum eps-in-the-denominator
one-maximum-for-all-rows scale-after-the-softmax scale-before-and-after-the-softmax mask-after-the-softmax
eps-after-the-softmax weights-without-gradient weights-transposed keys-mixed queries-mixed query-added-to-the-output
grouped-heads-tiled first-key-head-for-all heads-by-view heads-merged-by-view zeros-like-q-for-d-v-d-k
causal-mask-from-the-upper-left-hides-the-token-itself causal-mask-shows-later-tokens-alone
causal-mask-from-the-upper-left-shows-one-later-token heads-not-transposed weights-unused keys-and-values-swapped
"""


def test_the_ids_that_graders_read_stay_the_same():
    """A new id is added to these lists. An id that changes or goes needs a new version of the JSON."""
    assert {experiment.id for experiment in (*CASES, *DRAWS)} | {BLIND_GRADIENT} == set(IDS.split())
    assert [entry.id for entry in MUTANTS] == MISTAKES.split()
    checks = check_attention(mutant("no scale")).checks
    assert {check.id for check in checks} == set(IDS.split())


def test_ids_have_small_letters_digits_and_hyphens():
    assert stable_id("Scale by √d_k (−1e9)") == "scale-by-d-k-1e9"


def test_a_name_never_stands_among_the_passed_if_one_of_its_checks_failed():
    checks = Check("padding/left", Status.PASSED), Check("padding/inside", Status.FAILED), Check("rows", Status.PASSED)
    assert str(Report("Net", "Net(ids)", 0, checks, (WRONG,))).endswith("passed     rows")
    assert "passed" not in str(Report("Net", "Net(ids)", 0, checks[:2], (WRONG,)))
