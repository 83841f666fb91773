"""The conformance kit: it passes what is right, and catches each fault that some library ships."""

import math
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from minitx.nn import conformance as kit
from minitx.nn import scaled_dot_product_attention

FAULTS = (
    "heads tiled", "top-left", "weights after dropout", "finite fill", "mask ignored when causal", "nan on empty rows",
    "mean on empty rows", "soft-cap after mask", "softmax in fp16", "scale twice", "mask as number",
    "unscaled", "scale ignored", "gradient of the scale", "bias before the soft-cap", "sinks with a value", "poison leaks",
)  # fmt: skip


def textbook(
    query, key, value, *, attn_mask=None, is_causal=False, scale=None, attn_bias=None,
    softcap=None, sinks=None, dropout_p=0.0, need_weights=False, fault="",
):  # fmt: skip
    """Attention as a user would write it, with one fault to choose."""
    group, dtype = query.shape[1] // key.shape[1], query.dtype
    if fault == "heads tiled":
        key, value = key.repeat(1, group, 1, 1), value.repeat(1, group, 1, 1)
    else:
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    wide = torch.promote_types(dtype, torch.float32)
    L, S = query.shape[2], key.shape[2]
    visible = torch.ones(L, S, dtype=torch.bool)
    if is_causal:
        visible = visible.tril(0 if fault == "top-left" else S - L)
    if attn_mask is not None and fault != "mask as number" and not (fault == "mask ignored when causal" and is_causal):
        visible = visible & attn_mask
    if fault != "poison leaks":
        seen = visible.expand(query.shape[0], query.shape[1], L, S).any(-2).unsqueeze(-1)
        key, value = key.masked_fill(~seen, 0.0), value.masked_fill(~seen, 0.0)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None and fault != "unscaled" else 1.0 if scale is None else scale
    if fault == "scale ignored":
        scale = 1 / math.sqrt(query.shape[-1])
    scores = (query.to(wide) @ key.to(wide).mT) * scale * (scale if fault == "scale twice" else 1.0)
    if fault == "gradient of the scale":
        scores = scores.detach() + (scores - scores.detach()) * 1.01
    fill = -1e9 if fault == "finite fill" else -math.inf
    if fault == "soft-cap after mask":
        scores = scores.masked_fill(~visible, fill)
    if fault == "bias before the soft-cap" and attn_bias is not None:
        scores = scores + attn_bias
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_bias is not None and fault != "bias before the soft-cap":
        scores = scores + attn_bias
    if attn_mask is not None and fault == "mask as number":
        scores = scores + attn_mask
    if fault != "soft-cap after mask" or softcap is None:
        scores = scores.masked_fill(~visible, fill)
    if fault == "softmax in fp16" and dtype in (torch.float16, torch.bfloat16):
        scores = scores.half()
    some = visible.any(-1, keepdim=True)
    if fault == "mean on empty rows":
        scores = torch.where(some, scores, 0.0)
    elif fault != "nan on empty rows" and fault != "finite fill":
        scores = torch.where(some | (scores > -math.inf).any(-1, keepdim=True), scores, 0.0)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(-1)[..., :S]
    if fault == "sinks with a value" and sinks is not None:
        weights = weights / weights.sum(-1, keepdim=True)
    if fault not in ("nan on empty rows", "mean on empty rows", "finite fill"):
        weights = weights.masked_fill(~(visible & some), 0.0) if fault != "soft-cap after mask" else weights * some
    kept = torch.nn.functional.dropout(weights, dropout_p)
    output = (kept.to(wide) @ value.to(wide)).to(dtype)
    return (output, kept if fault == "weights after dropout" else weights) if need_weights else output


def failures(kernel):
    return {result.case for result in kit.conformance(kernel) if result.status == "failed"}


@pytest.mark.parametrize("backend", ["math", "sdpa", "chunked", "auto"])
def test_the_backends_pass(backend):
    results = kit.conformance(partial(scaled_dot_product_attention, backend=backend))
    assert [str(r) + r.case + r.what for r in results if r.status == "failed"] == []
    refused = {result.case.split()[0] for result in results if result.status == "refused"}
    assert refused == ({"soft-cap", "sinks"} if backend == "sdpa" else set())
    assert sum(result.status == "passed" for result in results) >= 110


def test_an_honest_textbook_passes():
    assert {result.status for result in kit.conformance(textbook)} == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_seeded_fault_is_caught(fault):
    caught = failures(partial(textbook, fault=fault))
    assert caught
    word = {
        "heads tiled": "plain",
        "top-left": "causal, decoding one",
        "weights after dropout": "weights under dropout",
        "finite fill": "low scores beside the mask",
        "mask ignored when causal": "mask and causal",
        "nan on empty rows": "empty rows",
        "mean on empty rows": "empty rows",
        "soft-cap after mask": "soft-cap and mask",
        "softmax in fp16": "large scores",
        "scale twice": "plain",
        "mask as number": "mask (L, S)",
        "poison leaks": "NaN where no query looks",
    }.get(fault)
    assert word is None or word in caught


def test_a_fault_is_caught_where_it_is_and_nowhere_else():
    assert failures(partial(textbook, fault="weights after dropout")) == {"weights under dropout"}
    assert failures(partial(textbook, fault="top-left")) == {
        "causal, decoding one", "causal, decoding five", "mask and causal, decoding",
    }  # fmt: skip


def test_what_a_kernel_lacks_is_skipped_and_what_it_refuses_is_listed():
    def small(query, key, value, *, is_causal=False, scale=None):
        if scale is not None and scale <= 0:
            raise NotImplementedError("a positive scale, please")
        return textbook(query, key, value, is_causal=is_causal, scale=scale)

    results = kit.conformance(small)
    status = {result.case: result.status for result in results}
    assert status["plain"] == status["causal"] == "passed"
    assert status["scale 0"] == "refused"
    assert status["bias"] == status["empty rows"] == "skipped"
    lines = kit.table(results).splitlines()
    assert "bias, skipped: no parameter attn_bias (float64)" in lines
    assert "scale 0, refused: a positive scale, please (float64)" in lines
    assert "0 failed" in lines[-1]


def test_a_kernel_that_raises_or_answers_in_another_shape_fails():
    def broken(query, key, value, *, is_causal=False):
        if is_causal:
            raise IndexError("oops")
        return textbook(query, key, value)[:, :1]

    found = {result.case: result.what for result in kit.conformance(broken) if result.status == "failed"}
    assert found["causal"] == "raised IndexError: oops"
    assert found["plain"] == "output has shape (2, 1, 13, 8), not (2, 6, 13, 8)"


def test_a_kernel_without_gradients_fails():
    def detached(query, key, value):
        return textbook(query, key, value).detach()

    found = {result.case: result.what for result in kit.conformance(detached) if result.status == "failed"}
    assert found["plain"] == "gradient of query is missing"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("nowhere:attend", "module 'nowhere' cannot be imported"),
        ("minitx.nn:nothing", "module 'minitx.nn' has no 'nothing'"),
        ("minitx.nn", "is not of the form my_module:my_attention"),
        ("minitx.nn.conformance:OPTIONS", "is not callable, but a tuple"),
        ("torch.nn.functional:scaled_dot_product_attention", "no readable signature"),
    ],
)
def test_a_bad_target_is_one_sentence_and_exit_code_2(target, sentence, capsys):
    assert kit.main([target]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err and shown.err.count("\n") == 1 and not shown.out


@pytest.mark.slow
def test_the_program_prints_a_table_and_exits_1_on_a_failure(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from minitx.nn import scaled_dot_product_attention as good\n"
        "def right(query, key, value, *, attn_mask=None): return good(query, key, value, attn_mask)\n"
        "def wrong(query, key, value, *, attn_mask=None): return 1.01 * good(query, key, value, attn_mask)\n"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }  # the minitx that is tested here
    for name, code in (("right", 0), ("wrong", 1)):
        command = [sys.executable, "-m", "minitx.nn.conformance", f"mine:{name}"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert "empty rows" in done.stdout and done.stdout.splitlines()[-1].endswith("0 refused")
