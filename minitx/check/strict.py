"""The cases that an attention kernel must pass: every option, in four dtypes, with gradients.

``check_attention(kernel, strict=True)`` runs them. The function has the parameter names of ``scaled_dot_product_attention``::

    def my_attention(query, key, value, *, attn_mask=None, is_causal=False, scale=None, attn_bias=None,
                     softcap=None, sinks=None, dropout_p=0.0, need_weights=False): ...

Shapes: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv) and sinks (H,). ``attn_mask`` is a bool tensor that broadcasts to
(B, H, L, S), True = may attend. ``attn_bias`` is a float tensor that broadcasts to (B, H, L, S); -inf in it hides a key. Query, key and
value are views of (B, L, H, D), as in a layer.

Leave out the parameters that the function does not support. Cases that need them count as not tried, and so do calls that raise
``NotImplementedError``. In all other cases the output, with and without gradients, the weights and the gradients are compared with
``naive_attention`` in float64. With dropout, the spread of the output is compared. The tolerance is twice the error of
``naive_attention`` in the same precision, plus a few rounding errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from minitx.check.calling import QKV, Device, MaskForm
from minitx.check.cases import Case, by_definition, kernel_cases
from minitx.check.layers_and_functions import HEADS_FIRST, Layout, Subject, Way
from minitx.check.reference import dtype_name, gradient_sizes, tolerance
from minitx.check.results import FAILED, NOT_TRIED, PASSED, WRONG, Check, Finding


class _AsGiven(MaskForm):
    """The mask of a kernel, in any shape that broadcasts."""

    def write(self, allowed: Tensor, heads: int = 1) -> Tensor:
        return allowed


VIEWS = Layout("views of (B, L, H, D)", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x, heads: x)


def check_cases(kernel: Callable[..., Any], chosen: Iterable[Case] | None = None, device: Device = "cpu") -> list[Check]:
    """Run cases with ``kernel``, in their dtypes.

    Args:
        kernel: the function to check, as described above.
        chosen: the cases. Default: all of ``kernel_cases()``.
        device: the device of the inputs.

    Returns:
        One ``Check`` for each case and dtype, with the largest error among output, weights and gradients.

    Raises:
        TypeError, ValueError: ``kernel`` is not callable, or Python cannot read its parameters (wrap it in a function that names them).
    """
    parameters = inspect.signature(kernel).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_all and (absent := [name for name in QKV if name not in parameters]):
        raise TypeError(f"strict needs the parameter names of scaled_dot_product_attention, but {', '.join(absent)} is missing")
    subject, checks = Subject(kernel, torch.float64, device, seed=11), []
    for case in kernel_cases() if chosen is None else chosen:
        has_mask = case.mask or case.allowed is not None
        needed = [*case.options, *["attn_mask"] * bool(has_mask), *["is_causal"] * case.is_causal]
        missing = [] if takes_all else [name for name in needed if name not in parameters]
        for dtype in case.dtypes:
            check = Check(f"{case.id}/{dtype_name(dtype)}", NOT_TRIED, f"no parameter {', '.join(missing)}")
            checks.append(check if missing else _judged(subject, replace(case, dtypes=(dtype,)), check.id, dtype))
    return checks


def findings_of(checks: Iterable[Check]) -> Iterator[Finding]:
    """Yield a finding for each case that failed in some dtype."""
    failed = [check for check in checks if check.status == FAILED]
    for case, group in groupby(failed, key=lambda check: check.id.partition("/")[0]):
        results = list(group)
        worst = max(results, key=lambda check: check.size or 0.0)
        fault = f"case {case}, {', '.join(check.id.partition('/')[2] for check in results)}: {worst.reason}"
        witness = "" if worst.size is None else f"error {worst.size:.2e}, allowed {worst.allowed:.2e}"
        yield Finding(case, WRONG, fault, witness=witness)


def compared(id: str, name: str, got: Tensor | None, want: Tensor, allowed: float, dtype: torch.dtype) -> Check:
    """Return the check of a result. ``want``: the definition. ``allowed``: the largest error. ``dtype``: the dtype to expect."""
    if got is None or got.shape != want.shape or got.dtype != dtype:
        kind = "missing" if got is None else f"{dtype_name(got.dtype)} of shape {tuple(got.shape)}"
        return Check(id, FAILED, f"{name} is {kind}")
    error = (got.double() - want).abs().nan_to_num(torch.inf).max().item()
    return Check(id, *((PASSED, name) if error <= allowed else (FAILED, f"{name} is inexact")), error, allowed)


def _judged(subject: Subject, case: Case, id: str, dtype: torch.dtype) -> Check:
    """Compare the kernel with ``naive_attention`` in one case."""
    causal = "is_causal" if case.is_causal else None
    way = Way(dict(zip(QKV, QKV, strict=True)), layout=VIEWS, mask="attn_mask", form=_AsGiven(), causal=causal)
    outcome = subject.outcome(way, case)
    # without gradients: contiguous tensors that had other numbers in an earlier call
    again = subject.outcome(replace(way, layout=HEADS_FIRST), replace(case, is_reused=True))
    if fault := outcome.fault or again.fault:
        is_refused = fault.startswith("NotImplementedError")
        return Check(id, *((NOT_TRIED, f"refused: {fault.partition(': ')[2]}") if is_refused else (FAILED, fault)))
    if changed := outcome.changed or again.changed:
        return Check(id, FAILED, f"it changes {changed[0]} in place")
    inputs, wide = outcome.inputs, torch.float32 if dtype == torch.float64 else dtype
    want, low = (by_definition(inputs, dtype, precision, is_graded=True) for precision in (torch.float64, wide))
    got = dict(zip(("output", "weights"), (outcome.output, outcome.weights), strict=True))
    got |= zip((name for name in want if "gradient" in name), outcome.gradients, strict=False)
    got["output without gradients"], got["spread"] = again.output, outcome.output
    sizes: dict[str, float] = {}
    if dtype in (torch.float64, torch.float32):  # in half precision, rounding of the result dominates
        scale = case.options.get("scale", inputs.query.shape[-1] ** -0.5)
        sizes = gradient_sizes(*inputs.heads, inputs.cotangent, want["weights"], scale)
    names = (name for name in (*want, "output without gradients") if name != "weights" or "need_weights" in case.options)
    results = []
    for name in case.judged or names:
        key, result = "output" if name not in want else name, got.get(name)
        allowed = tolerance(want[key], low[key], dtype, sizes.get(name, float("of" in name)))
        check = compared(id, name, result, want[key], allowed, dtype)
        if name == "spread" and result is not None and check.size is not None:
            # for values of 1, the variance is Σ_j p_j² dropout_p / (1 - dropout_p)
            share = case.options["dropout_p"]
            variance = want["weights"].square().sum(-1, keepdim=True) * share / (1 - share)
            size = abs(((result.double() - 1.0).square() / variance).mean().item() - 1.0)
            check = Check(id, *((PASSED, name) if size <= 0.5 else (FAILED, "the spread of the output is another")), size, 0.5)
        results.append(check)
    failed = [check for check in results if check.status == FAILED]
    return (failed or [max(results, key=lambda check: (check.size or 0.0) / (check.allowed or 1.0))])[0]
