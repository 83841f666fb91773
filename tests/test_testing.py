"""``minitx.testing`` passes what is right, and finds each fault that a library has shipped."""

import inspect
import math
from functools import partial

import pytest
import torch

from minitx import testing
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


def only(monkeypatch, *names):
    """Of all cases check these alone."""
    found = [case for case in testing.cases() if case.name in names]
    assert len(found) == len(names)
    monkeypatch.setattr(testing, "cases", lambda: found)


def failures(kernel):
    return {result.case for result in testing.check_kernel(kernel) if result.status == "failed"}


@pytest.mark.parametrize("backend", ["sdpa", pytest.param("chunked", marks=pytest.mark.slow)])
def test_the_backends_pass(backend, monkeypatch):
    monkeypatch.setattr(chunked, "LARGEST", 2)  # several tiles
    monkeypatch.setattr(chunked, "SMALLEST", 2)
    results = testing.check_kernel(partial(scaled_dot_product_attention, backend=backend))
    assert [result for result in results if result.status == "failed"] == []
    refused = {result.case.split()[0] for result in results if result.status == "refused"}
    assert refused == ({"soft-cap", "sinks"} if backend == "sdpa" else set())
    assert sum(result.status == "passed" for result in results) >= 110


@pytest.mark.parametrize("fault", FAULTS)
def test_each_seeded_fault_is_found(fault, monkeypatch):
    only(monkeypatch, FAULTS[fault][0])
    assert failures(textbook) == set()
    assert failures(faulty(fault)) == {FAULTS[fault][0]}


def test_a_missing_parameter_skips_the_cases_that_need_it_and_a_refusal_is_listed(monkeypatch):
    only(monkeypatch, "plain", "causal", "scale 0", "bias", "empty rows")

    def small(query, key, value, *, is_causal=False, scale=None):
        if scale is not None and scale <= 0:
            raise NotImplementedError("a positive scale, please")
        return textbook(query, key, value, is_causal=is_causal, scale=scale)

    results = testing.check_kernel(small)
    status = {result.case: result.status for result in results}
    assert status["plain"] == status["causal"] == "passed"
    assert status["scale 0"] == "refused"
    assert status["bias"] == status["empty rows"] == "skipped"
    lines = testing.table(results).splitlines()
    assert "bias, all, skipped: no parameter attn_bias" in lines
    assert "scale 0, float64, refused: a positive scale, please" in lines
    assert "0 failed" in lines[-1]


def test_a_kernel_that_raises_or_answers_in_another_shape_fails(monkeypatch):
    only(monkeypatch, "plain", "causal")

    def broken(query, key, value, *, is_causal=False):
        if is_causal:
            raise IndexError("oops")
        return textbook(query, key, value)[:, :1]

    found = {result.case: result.what for result in testing.check_kernel(broken) if result.status == "failed"}
    assert found["causal"] == "raised IndexError: oops"
    assert found["plain"] == "output is float16 of shape (2, 1, 5, 8)"


UNREADABLE = "torch.nn.functional:scaled_dot_product_attention"  # its signature


@pytest.mark.parametrize("target", ["nowhere:attend", "minitx.nn:nothing", "minitx.nn", "minitx.testing:DTYPES", UNREADABLE])
def test_a_bad_target_ends_with_one_sentence_and_exit_code_2(target, capsys):
    with pytest.raises(SystemExit) as ended:
        testing.main([target])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert target in shown.err.splitlines()[-1] and "Traceback" not in shown.err and not shown.out


def test_the_program_prints_a_table_and_returns_1_on_a_failure(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "from minitx.nn import scaled_dot_product_attention as good\n"
        "def right(query, key, value, *, attn_mask=None): return good(query, key, value, attn_mask)\n"
        "def wrong(query, key, value, *, attn_mask=None): return 1.01 * good(query, key, value, attn_mask)\n"
    )
    only(monkeypatch, "plain", "empty rows")
    monkeypatch.syspath_prepend(tmp_path)  # as python -m does with the current folder
    for name, code in (("right", 0), ("wrong", 1)):
        assert testing.main([f"mine:{name}"]) == code
        shown = capsys.readouterr().out
        assert "empty rows" in shown and shown.splitlines()[-1].endswith("0 refused")


# the reference and the tolerance


def test_the_tolerance_is_twice_the_error_plus_four_units_of_the_largest_term():
    want, low = torch.tensor([0.5, 3.0], dtype=torch.float64), torch.tensor([0.5, 2.75])
    eps = torch.finfo(torch.float32).eps
    assert testing.tolerance(want, low, torch.float32) == 2 * 0.25 + 4 * eps * 3.0
    assert testing.tolerance(want, low, torch.float32, 7.0) == 2 * 0.25 + 4 * eps * 7.0
    ratio = torch.finfo(torch.float64).eps / eps
    assert testing.tolerance(want, low, torch.float64) == pytest.approx(ratio * testing.tolerance(want, low, torch.float32))
