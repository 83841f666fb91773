"""The strict check of kernels passes what is right, and finds each fault that a library has shipped."""

import inspect
import math
from functools import partial

import pytest
import torch
from broken_functions import KERNELS

from minitx.check import Status, check_attention, strict
from minitx.check.cases import kernel_cases
from minitx.check.reference import tolerance
from minitx.check.results import stable_id
from minitx.nn import scaled_dot_product_attention
from minitx.nn.backends import chunked


def textbook(
    query, key, value, *, attn_mask=None, is_causal=False, scale=None, attn_bias=None,
    softcap=None, sinks=None, dropout_p=0.0, need_weights=False,
):  # fmt: skip
    """Attention as a user would write it."""
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    (B, H, L, D), S, group = query.shape, key.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    visible = torch.ones(B, H, L, S, dtype=torch.bool)
    if is_causal:
        visible = visible.tril(S - L)
    if attn_mask is not None:
        visible = visible & attn_mask
    if attn_bias is not None:
        visible = visible & (attn_bias != -math.inf)
    some, unseen = visible.any(-1, keepdim=True), ~visible.any(-2).unsqueeze(-1)
    key, value = key.masked_fill(unseen, 0.0), value.masked_fill(unseen, 0.0)
    scale = 1 / math.sqrt(D) if scale is None else scale
    scores = query.to(wide) @ key.to(wide).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_bias is not None:
        scores = scores + attn_bias
    scores = scores.masked_fill(~visible, -math.inf)
    scores = torch.where(some, scores, 0.0)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, H, 1, 1).expand(B, H, L, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :S].to(wide) * some
    kept = torch.nn.functional.dropout(weights, dropout_p)
    output = (kept @ value.to(wide)).to(dtype)
    return (output, weights.to(dtype)) if need_weights else output


MASKED = "scores = scores.masked_fill(~visible, -math.inf)"
FAULTS = {  # a case that must find it, and what in the textbook is replaced by what
    "unscaled": ("plain", "1 / math.sqrt(D) if", "1.0 if"),
    "scale ignored": ("scale 1", "if scale is None else scale", ""),
    "scale twice": ("plain", ".mT * scale", ".mT * scale * scale"),
    "heads tiled": ("plain", "repeat_interleave(group, dim=1)", "repeat(1, group, 1, 1)"),
    "top-left": ("causal, decoding one", "S - L", ""),
    "mask ignored when causal": ("mask and causal", "attn_mask is not None", "attn_mask is not None and not is_causal"),
    "mask as number": ("mask (L, S)", "visible = visible & attn_mask", "attn_bias = attn_mask.to(wide)"),
    "finite fill": ("low scores beside the mask", "-math.inf", "-1e9"),
    "finite fill without a bias": ("low scores beside the mask, without a bias", "-math.inf", "-1e9"),
    "mask ignored when causal, equal heads": (
        "as many key heads, mask and causal",
        "attn_mask is not None",
        "attn_mask is not None and not is_causal",
    ),
    "NaN on empty rows": ("empty rows", "torch.where(some, scores, 0.0)", "scores"),
    "mean on empty rows": ("empty rows", " * some", ""),
    "NaN leaks": ("NaN where no query looks", ".masked_fill(unseen, 0.0)", ""),
    "output in float32": ("plain", "value.to(wide)).to(dtype)", "value.to(wide))"),
    "softmax in float16": ("large scores", "scores.softmax", "scores.to(dtype).softmax"),
    "soft-cap after the mask": ("soft-cap and mask", "if softcap", f"{MASKED}\n    visible = visible | True\n    if softcap"),
    "bias before the soft-cap": ("soft-cap and bias", "tanh(scores", "tanh((scores + attn_bias)"),
    "sinks with a value": ("sinks", "[..., :S]", "[..., :S].softmax(-1)"),
    "weights after dropout": ("weights before dropout", "(output, weights", "(output, kept"),
    "gradient off": (
        "plain",
        "    if softcap",
        "    scores = scores.detach() + (scores - scores.detach()) * 1.01\n    if softcap",
    ),
    "scale of one width": ("wide queries and keys", "math.sqrt(D) if", "math.sqrt(8) if"),
    "strides ignored": ("plain", "query.to(wide) @", "query.as_strided(query.shape, (H * L * D, L * D, D, 1)).to(wide) @"),
    "fault without gradients": (
        "plain",
        "return (output",
        "output = output if query.requires_grad else 2 * output\n    return (output",
    ),
    "last tile of queries": (
        "causal, several tiles of queries",
        "value.to(wide))",
        "value.to(wide) * (torch.arange(L) < 128)[:, None])",
    ),
    "bias of the first row": ("bias per batch", "scores + attn_bias", "scores + attn_bias[:1]"),
    "-inf in the bias": ("bias of -inf", "visible & (attn_bias != -math.inf)", "visible"),
    "bias constant": ("bias with a gradient", "scores + attn_bias", "scores + attn_bias.detach()"),
    "sinks constant": ("sinks with a gradient", "sinks.to(", "sinks.detach().to("),
    "dropout ignored": ("dropout", "weights, dropout_p)", "weights, 0.0)"),
    "dropout not scaled up": ("dropout", "weights, dropout_p)", "weights, dropout_p) * (1 - dropout_p)"),
    "gradient missing": ("plain", "value.to(wide))", "value.to(wide)).detach()"),
}


def faulty(fault):
    """The textbook with a fault."""
    _, old, new = FAULTS[fault]
    source, names = inspect.getsource(textbook), {**globals()}
    assert old in source
    exec(source.replace(old, new), names)
    return names["textbook"]


def chosen(*names):
    """These of all cases."""
    found = [case for case in kernel_cases() if case.name in names]
    assert len(found) == len(names)
    return found


def failures(kernel, cases):
    return {check.id.partition("/")[0] for check in strict.check_cases(kernel, cases) if check.status == Status.FAILED}


def test_a_function_with_other_parameter_names_is_refused_in_one_sentence():
    with pytest.raises(TypeError, match=r"strict needs the parameter names of .*, but query, value is missing"):
        check_attention(lambda q, key, v: q, strict=True)


@pytest.mark.parametrize("backend", ["math", "sdpa", pytest.param("chunked", marks=pytest.mark.slow)])
def test_the_backends_pass(backend, monkeypatch):
    monkeypatch.setattr(chunked, "LARGEST", 2)  # several tiles
    monkeypatch.setattr(chunked, "SMALLEST", 2)
    report = check_attention(partial(scaled_dot_product_attention, backend=backend), strict=True)
    assert report.is_right and report.exit_code == 0, report
    refused = {
        case for check in report.with_status(Status.NOT_TRIED) for case in ("soft-cap", "sinks") if check.id.startswith(case)
    }
    assert refused == ({"soft-cap", "sinks"} if backend == "sdpa" else set())
    assert len(report.with_status(Status.PASSED)) == 182 - 24 * (backend == "sdpa")


@pytest.mark.parametrize("fault", FAULTS)
def test_each_seeded_fault_is_found(fault):
    cases = chosen(FAULTS[fault][0])
    assert failures(textbook, cases) == set()
    assert failures(faulty(fault), cases) == {stable_id(FAULTS[fault][0])}


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.__name__ != "mask_for_several_sequences_only"])
def test_a_kernel_that_passes_other_tests_fails(kernel):
    cases = chosen("as many key heads", "small values")
    assert failures(kernel() if isinstance(kernel, type) else kernel, cases)


@pytest.mark.parametrize("name", ["attn_mask", "attn_bias", "value"])
def test_an_argument_that_is_changed_in_place_is_found_and_the_next_kernel_gets_the_original(name):
    def changes(query, key, value, *, attn_mask=None, attn_bias=None):
        out = textbook(query, key, value, attn_mask=attn_mask, attn_bias=attn_bias)
        given = {"attn_mask": attn_mask, "attn_bias": attn_bias, "value": value}[name]
        if given is not None and not given.requires_grad:
            given.zero_()
        return out

    cases = chosen("mask (L, S)", "bias")
    checks = strict.check_cases(changes, cases)
    assert f"it changes {name} in place" in {check.reason for check in checks if check.status == Status.FAILED}
    assert failures(textbook, cases) == set()


def test_a_missing_parameter_is_not_tried_and_neither_is_what_a_kernel_refuses():
    def small(query, key, value, *, is_causal=False, scale=None):
        if scale is not None and scale <= 0:
            raise NotImplementedError("a positive scale, please")
        return textbook(query, key, value, is_causal=is_causal, scale=scale)

    checks = strict.check_cases(small, chosen("plain", "causal", "scale 0", "bias", "empty rows"))
    found = {check.id.partition("/")[0]: (check.status, check.reason) for check in checks}
    assert found["plain"][0] == found["causal"][0] == Status.PASSED
    assert found["scale-0"] == (Status.NOT_TRIED, "refused: a positive scale, please")
    assert found["bias"] == (Status.NOT_TRIED, "no parameter attn_bias")
    assert found["empty-rows"] == (Status.NOT_TRIED, "no parameter attn_mask")


def test_a_kernel_that_raises_or_answers_in_another_shape_fails():
    def broken(query, key, value, *, is_causal=False):
        if is_causal:
            raise IndexError("oops")
        return textbook(query, key, value)[:, :1]

    checks = strict.check_cases(broken, chosen("plain", "causal"))
    assert {check.status for check in checks} == {Status.FAILED}
    found = {check.id: check.reason for check in checks}
    assert found["causal/float64"] == "IndexError: oops"
    assert found["plain/float16"] == "it returns (2, 1, 5, 8), not (2, 4, 5, 8)"
    assert {finding.id for finding in strict.findings_of(checks)} == {"plain", "causal"}


# the reference and the tolerance


def test_the_tolerance_is_twice_the_error_plus_four_units_of_the_largest_term():
    want, low = torch.tensor([0.5, 3.0], dtype=torch.float64), torch.tensor([0.5, 2.75])
    eps = torch.finfo(torch.float32).eps
    assert tolerance(want, low, torch.float32) == 2 * 0.25 + 4 * eps * 3.0
    assert tolerance(want, low, torch.float32, 7.0) == 2 * 0.25 + 4 * eps * 7.0
    ratio = torch.finfo(torch.float64).eps / eps
    assert tolerance(want, low, torch.float64) == pytest.approx(ratio * tolerance(want, low, torch.float32))
