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
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from minitx.check.calling import QKV, invoke
from minitx.check.cases import Case, Operands, by_definition, drawn, kernel_cases, results_of
from minitx.check.reference import dtype_name, gradient_sizes, tolerance
from minitx.check.results import Check, Finding, Severity, Status
from minitx.check.subjects import reused


def check_cases(
    kernel: Callable[..., Any], chosen: Iterable[Case] | None = None, device: torch.device | str = "cpu"
) -> list[Check]:
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
    checks = []
    for case in kernel_cases() if chosen is None else chosen:
        inputs = drawn(case, seed=11)
        options = {**inputs.options, "attn_mask": inputs.allowed, "is_causal": inputs.is_causal or None}
        options = {name: option for name, option in options.items() if option is not None}
        missing = [] if takes_all else [name for name in options if name not in parameters]
        for dtype in case.dtypes:
            check = Check(f"{case.id}/{dtype_name(dtype)}", Status.NOT_TRIED, f"no parameter {', '.join(missing)}")
            checks.append(check if missing else _judged(kernel, case, inputs, options, dtype, device))
    return checks


def findings_of(checks: Iterable[Check]) -> list[Finding]:
    """Return a finding for each case that failed in some dtype."""
    failed: dict[str, list[Check]] = {}
    for check in checks:
        if check.status == Status.FAILED:
            failed.setdefault(check.id.partition("/")[0], []).append(check)
    findings = []
    for case, results in failed.items():
        worst = max(results, key=lambda check: check.size or 0.0)
        fault = f"case {case}, {', '.join(check.id.partition('/')[2] for check in results)}: {worst.reason}"
        witness = "" if worst.size is None else f"error {worst.size:.2e}, allowed {worst.allowed:.2e}"
        findings.append(Finding(case, Severity.WRONG, fault, witness=witness))
    return findings


def compared(
    name: str, got: Tensor | None, want: Tensor, low: Tensor, dtype: torch.dtype, size: float = 0.0, factor: float = 1.0
) -> tuple[str, float | None, float | None]:
    """Return a fault ("": none), the error, and the error that ``factor`` · ``tolerance`` allows."""
    if got is None or got.shape != want.shape or got.dtype != dtype:
        return f"{name} is {'missing' if got is None else f'{dtype_name(got.dtype)} of shape {tuple(got.shape)}'}", None, None
    error = (got.double() - want).abs().nan_to_num(torch.inf).max().item()
    allowed = factor * tolerance(want, low, dtype, size)
    return "" if error <= allowed else f"{name} is inexact", error, allowed


def _judged(
    kernel: Callable[..., Any], case: Case, inputs: Operands, options: dict[str, Any], dtype: torch.dtype, device: Any
) -> Check:
    """Compare the kernel with ``naive_attention`` in one case."""
    id, want = f"{case.id}/{dtype_name(dtype)}", by_definition(inputs, dtype, torch.float64, is_graded=True)
    try:
        got, changed = _run(kernel, inputs, options, dtype, device)
    except NotImplementedError as error:
        return Check(id, Status.NOT_TRIED, f"refused: {error}")
    except Exception as error:  # any other exception is a fault of the kernel
        return Check(id, Status.FAILED, f"raised {type(error).__name__}: {error}")
    if changed:
        return Check(id, Status.FAILED, f"it changes {changed[0]} in place")
    low = by_definition(inputs, dtype, torch.float32 if dtype == torch.float64 else dtype, is_graded=True)
    again, sizes = "output without gradients", dict[str, float]()
    if dtype in (torch.float64, torch.float32):  # in half precision, rounding of the result dominates
        scale = case.options.get("scale", inputs.query.shape[-1] ** -0.5)
        sizes = gradient_sizes(*inputs.heads, inputs.cotangent, want["weights"], scale)
    judged = case.judged or (*(name for name in want if name != "weights" or "need_weights" in case.options), again)
    results = []
    for name in judged:
        key = "output" if name in (again, "spread") else name
        fault, size, allowed = compared(
            name, got.get(name.replace("spread", "output")), want[key], low[key], dtype, sizes.get(name, float("grad" in name))
        )
        if name == "spread" and size is not None:  # Σ_j p_j² dropout_p / (1 - dropout_p) is the variance for values of 1
            share = case.options["dropout_p"]
            variance = want["weights"].square().sum(-1, keepdim=True) * share / (1 - share)
            size, allowed = abs(((got["output"].double() - 1.0).square() / variance).mean().item() - 1.0), 0.5
            fault = "" if size <= allowed else "the spread of the output is another"
        results.append(Check(id, Status.FAILED if fault else Status.PASSED, fault or name, size, allowed))
    failed = [result for result in results if result.status == Status.FAILED]
    return (failed or [max(results, key=lambda result: (result.size or 0.0) / (result.allowed or 1.0))])[0]


def _run(
    kernel: Callable[..., Any], inputs: Operands, options: dict[str, Any], dtype: torch.dtype, device: torch.device | str
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the results, and the arguments that are changed in place.

    Without gradients, the kernel gets contiguous tensors that had other numbers in an earlier call.
    """
    given = {name: option.to(device, copy=True) if isinstance(option, Tensor) else option for name, option in options.items()}
    learned = {name: option for name, option in given.items() if isinstance(option, Tensor) and option.requires_grad}
    tensors = dict(zip(QKV, inputs.heads, strict=True)) | learned
    leaves = {name: tensor.detach().to(device, dtype, copy=True).requires_grad_() for name, tensor in tensors.items()}
    views = {name: leaves[name].transpose(1, 2).contiguous().transpose(1, 2) for name in QKV}  # of (B, L, H, D), as in a layer
    result, changed = invoke(kernel, {**given, **leaves, **views}, QKV)
    results = results_of(result, leaves, inputs.cotangent.to(dtype))
    with torch.no_grad():
        again, changed_again = reused(lambda tensors: invoke(kernel, given | tensors, QKV, is_copied=False), views)
    results["output without gradients"] = (again[0] if isinstance(again, tuple) else again).cpu()
    return results, changed + changed_again
