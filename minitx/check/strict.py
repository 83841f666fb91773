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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from minitx.check.experiments import Experiment, HeadSizes, drawn
from minitx.check.reference import DTYPES, dtype_name, gradient_sizes, naive_attention, tolerance
from minitx.check.results import Check, Finding, Severity, Status, stable_id


@dataclass(frozen=True, eq=False, kw_only=True)
class Case(Experiment):
    """An experiment with options. ``judged`` lists the results to compare. Default: all, including gradients of learned options."""

    options: dict[str, Any] = field(default_factory=dict)
    heads: int = 4
    kv_heads: int = 2
    width: int = 8
    value_width: int = 8
    nan_keys: int = 0  # the number of keys and values that are NaN
    low_keys: int = 0  # the number of last keys with scores of -2.5e9; the other scores are 0
    judged: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = DTYPES


@cache
def cases() -> tuple[Case, ...]:
    """Return the cases, the same objects each time."""
    return tuple(_cases())


def _cases() -> Iterator[Case]:
    """Yield all cases."""
    generator = torch.Generator().manual_seed(7)
    cells = torch.rand(2, 4, 5, 5, generator=generator) < 0.6
    empty = cells & (torch.arange(5) % 3 > 0).view(5, 1)  # queries 0 and 3 see nothing
    bias = torch.randn(1, 4, 5, 5, generator=generator)
    yield from _shapes_and_scales()
    yield from _masks(cells, empty)
    yield from _further_options(bias, empty)


def _shapes_and_scales() -> Iterator[Case]:
    """Yield cases without a mask: grouped heads, widths, scales, causal decoding and several tiles."""
    yield Case("plain")
    yield Case("as many key heads", keys=130, kv_heads=4)
    yield Case("multi-query", batch=1, kv_heads=1)
    yield Case("wide values", value_width=11)
    yield Case("wide queries and keys", width=19)
    yield Case("one key", keys=1)
    yield Case("small values", kv_heads=4, small=2.0**-30, dtypes=tuple(dtype for dtype in DTYPES if dtype != torch.float16))
    for scale in (1.0, 0.0, -0.5, 1e-3):
        yield Case(f"scale {scale:g}", options={"scale": scale})
    for scale in (0.0, -0.5):  # fails a kernel that multiplies -inf by the scale
        yield Case(f"scale {scale:g} and causal", options={"scale": scale, "is_causal": True})
    yield Case("causal", options={"is_causal": True})
    yield Case("causal, decoding one", options={"is_causal": True}, rows=1)
    yield Case("causal, decoding three", options={"is_causal": True}, rows=3)
    yield Case("causal, several tiles", options={"is_causal": True}, rows=3, keys=271)
    yield Case(
        "causal, several tiles of queries", options={"is_causal": True}, rows=131, keys=131, batch=1, heads=1, kv_heads=1
    )


def _masks(cells: Tensor, empty: Tensor) -> Iterator[Case]:
    """Yield cases with masks. In ``empty``, some queries see no key."""
    padding = (torch.arange(5) >= torch.tensor([[2], [0]]))[:, None, None]  # left padding in the first sequence of the batch
    yield Case("as many key heads, mask and causal", options={"attn_mask": cells, "is_causal": True}, kv_heads=4)
    yield Case("mask (L, S)", options={"attn_mask": cells[0, 0]})
    yield Case("mask per batch", options={"attn_mask": cells[:, :1]})
    yield Case("mask per head", options={"attn_mask": cells[:1]})
    yield Case("padding (B, 1, 1, S)", options={"attn_mask": padding})
    yield Case("mask and causal", options={"attn_mask": cells, "is_causal": True})
    yield Case("padding and causal, decoding", options={"attn_mask": padding, "is_causal": True}, rows=3)
    yield Case("empty rows", options={"attn_mask": empty})
    yield Case("empty rows of left padding", options={"attn_mask": padding, "is_causal": True})
    yield Case("nothing visible", options={"attn_mask": torch.zeros(5, 5, dtype=torch.bool)})
    yield Case("NaN where no query looks", options={"attn_mask": (torch.arange(5) >= 2).expand(5, 5)}, nan_keys=2)
    # fails a kernel that replaces hidden scores by a large negative number
    yield Case(
        "low scores beside the mask", options={"attn_mask": cells, "attn_bias": torch.full((5, 5), -2e9)}, judged=("output",)
    )
    yield Case(
        "low scores beside the mask, without a bias",
        options={"attn_mask": (torch.arange(5) >= 2).expand(5, 5)},
        low_keys=3,
        judged=("output",),
        dtypes=tuple(dtype for dtype in DTYPES if dtype != torch.float16),  # such scores overflow in float16
    )


def _further_options(bias: Tensor, empty: Tensor) -> Iterator[Case]:
    """Yield cases with a bias, a soft-cap, sinks, large scores, weights and dropout."""
    sinks = torch.linspace(-2, 2, 4)
    learned_bias = (4 * bias).round().div(4).requires_grad_()  # the same number in each dtype
    yield Case("bias", options={"attn_bias": bias})
    yield Case("bias per batch", options={"attn_bias": torch.cat((bias, -bias))})
    yield Case("bias of -inf", options={"attn_bias": bias.masked_fill(~empty, -torch.inf)})
    yield Case("bias with a gradient", options={"attn_bias": learned_bias})
    yield Case("bias and mask", options={"attn_bias": bias, "attn_mask": empty})
    yield Case("soft-cap", options={"softcap": 1.5}, spread=3.0)
    yield Case("soft-cap and mask", options={"softcap": 1.5, "attn_mask": empty})
    yield Case("soft-cap and bias", options={"softcap": 1.5, "attn_bias": 3 * bias})
    yield Case("sinks", options={"sinks": sinks})
    yield Case("sinks with a gradient", options={"sinks": torch.arange(-1.0, 3.0).requires_grad_()})
    yield Case("sinks and mask", options={"sinks": sinks, "attn_mask": empty})
    yield Case("large scores", keys=67, spread=12.0)
    yield Case("weights and mask", options={"need_weights": True, "attn_mask": empty})
    yield Case("dropout", options={"dropout_p": 0.25}, rows=67, keys=67, heads=2, kv_heads=1, judged=("spread",))
    yield Case("weights before dropout", options={"need_weights": True, "dropout_p": 0.5}, judged=("weights",))


def check_cases(
    kernel: Callable[..., Any], chosen: Iterable[Case] | None = None, device: torch.device | str = "cpu"
) -> list[Check]:
    """Run cases with ``kernel``, in their dtypes.

    Args:
        kernel: the function to check, as described above.
        chosen: the cases. Default: all of ``cases()``.
        device: the device of the inputs.

    Returns:
        One ``Check`` for each case and dtype, with the largest error among output, weights and gradients.

    Raises:
        TypeError, ValueError: ``kernel`` is not callable, or Python cannot read its parameters (wrap it in a function that names them).
    """
    parameters = inspect.signature(kernel).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    checks = []
    for case in cases() if chosen is None else chosen:
        missing = [] if takes_all else [name for name in case.options if name not in parameters]
        for dtype in case.dtypes:
            if missing:
                checks.append(_case_check(case, dtype, Status.NOT_TRIED, f"no parameter {', '.join(missing)}"))
            else:
                checks.append(_judge(kernel, case, dtype, device))
    return checks


def findings_of(checks: Iterable[Check]) -> list[Finding]:
    """Return a finding for each case that failed in some dtype."""
    failed: dict[str, list[Check]] = {}
    for check in checks:
        if check.status == Status.FAILED:
            failed.setdefault(check.id.partition("/")[0], []).append(check)
    return [_finding_of_case(case, results) for case, results in failed.items()]


def _finding_of_case(case: str, failed: list[Check]) -> Finding:
    names = ", ".join(check.id.partition("/")[2] for check in failed)
    worst = max(failed, key=lambda check: 0.0 if check.size is None else check.size)
    witness = "" if worst.size is None else f"error {worst.size:.2e}, allowed {worst.allowed:.2e}"
    return Finding(case, Severity.WRONG, f"case {case}, {names}: {worst.reason}", witness=witness)


def _case_check(
    case: Case, dtype: torch.dtype, status: Status, reason: str = "", size: float | None = None, allowed: float | None = None
) -> Check:
    return Check(f"{stable_id(case.name)}/{dtype_name(dtype)}", status, reason, size, allowed)


def _judge(kernel: Callable[..., Any], case: Case, dtype: torch.dtype, device: torch.device | str) -> Check:
    """Compare the kernel with ``naive_attention`` in one case."""
    query, key, value, cotangent = _draw(case, dtype)
    want = _by_definition(case, dtype, torch.float64)
    try:
        options = {
            name: option.to(device, copy=True) if isinstance(option, Tensor) else option
            for name, option in case.options.items()
        }
        inputs = [tensor.to(device, copy=True) for tensor in (query, key, value)]
        got = _run(partial(kernel, **options), inputs, cotangent.to(device), dtype)
        _refuse_changes(case.options, options)
    except NotImplementedError as error:
        return _case_check(case, dtype, Status.NOT_TRIED, f"refused: {error}")
    except ChangedError as error:
        return _case_check(case, dtype, Status.FAILED, str(error))
    except Exception as error:  # any other exception is a fault of the kernel
        return _case_check(case, dtype, Status.FAILED, f"raised {type(error).__name__}: {error}")
    if case.judged == ("spread",):
        return _judge_dropout(case, dtype, got["output"], want)
    scale = case.options.get("scale", query.shape[-1] ** -0.5)
    low = _by_definition(case, dtype, torch.float32 if dtype == torch.float64 else dtype)
    is_half = dtype in (torch.bfloat16, torch.float16)  # in half precision, rounding of the result dominates
    sizes = {} if is_half else gradient_sizes(query, key, value, cotangent, want["weights"], scale)
    judged = case.judged or [name for name in want if name != "weights" or "need_weights" in case.options]
    results = [
        _weigh(case, dtype, name, got.get(name), want[name], low[name], sizes.get(name, float("gradient" in name)))
        for name in judged
    ]
    failed = next((result for result in results if result.status == Status.FAILED), None)
    return failed or max(results, key=lambda result: (result.size or 0.0) / (result.allowed or 1.0))


@lru_cache(maxsize=512)
def _by_definition(case: Case, drawn: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
    """The results of ``naive_attention`` in ``dtype`` for a case whose inputs are drawn in ``drawn``. Every kernel shares them."""
    plain = {name: option for name, option in case.options.items() if name not in ("dropout_p", "need_weights")}
    *inputs, cotangent = _draw(case, drawn)
    return _run(partial(naive_attention, **plain), inputs, cotangent, dtype)


def _judge_dropout(case: Case, dtype: torch.dtype, output: Tensor, want: dict[str, Tensor]) -> Check:
    """Compare the variance of Σ_j p_j m_j, the output for values of 1, with Σ_j p_j² dropout_p / (1 - dropout_p)."""
    if output.shape != want["output"].shape:
        return _weigh(case, dtype, "output", output, want["output"], want["output"], 1.0)
    share = case.options["dropout_p"]
    variance = want["weights"].square().sum(-1, keepdim=True) * share / (1 - share)
    error = abs(((output.double() - 1.0).square() / variance).mean().item() - 1.0)
    return _compared(case, dtype, "spread of the output", error, 0.5)


def _weigh(case: Case, dtype: torch.dtype, name: str, got: Tensor | None, want: Tensor, low: Tensor, size: float) -> Check:
    """Compare the output, the weights or one gradient."""
    if got is None or got.shape != want.shape or got.dtype != dtype:
        fault = "missing" if got is None else f"{dtype_name(got.dtype)} of shape {tuple(got.shape)}"
        return _case_check(case, dtype, Status.FAILED, f"{name} is {fault}")
    return _compared(case, dtype, name, (got.double() - want).abs().max().item(), tolerance(want, low, dtype, size))


def _compared(case: Case, dtype: torch.dtype, name: str, error: float, allowed: float) -> Check:
    is_close = error <= allowed  # False if the error is NaN
    return _case_check(case, dtype, Status.PASSED if is_close else Status.FAILED, name, error, allowed)


def _draw(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Draw query, key, value and the gradient of the output. They are the same in each dtype, except for rounding."""
    query, key, value = (tensor.clone() for tensor in drawn(case, HeadSizes(case.heads, case.width), seed=11).heads)
    cotangent = drawn(case, HeadSizes(case.heads, case.value_width), seed=12).query / case.spread
    key[:, :, : case.nan_keys] = value[:, :, : case.nan_keys] = torch.nan
    if case.low_keys:
        query, key = torch.zeros_like(query), torch.zeros_like(key)
        query[..., -2:] = 2.0**16
        key[:, :, -case.low_keys :, -2:] = -(2.0**16) * case.width**0.5 * 0.3
    value = torch.ones_like(value) if case.judged == ("spread",) else value
    tensors = [tensor.to(dtype) for tensor in (query, key, value, cotangent)]
    return [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]  # (B, H, L, D), as views of (B, L, H, D)


def _run(attention: partial[Any], inputs: Sequence[Tensor], cotangent: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the output, the weights if there are any, and the gradients of query, key, value and learned options.

    For a kernel, also return the output without gradients, from contiguous tensors that had other numbers in an earlier call.
    """
    learned = {name: x for name, x in attention.keywords.items() if isinstance(x, Tensor) and x.requires_grad}
    tensors = dict(zip(("query", "key", "value"), inputs, strict=True)) | learned
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in tensors.items()}
    query, key, value, *_ = leaves.values()
    options = {name: leaves[name] for name in learned}
    result = attention(query, key, value, **options)
    results = dict(zip(("output", "weights"), result if isinstance(result, tuple) else (result,), strict=False))
    output = results["output"]
    if output.requires_grad and output.shape == cotangent.shape:
        roots = list(leaves.values())
        gradients = torch.autograd.grad(output, roots, cotangent.to(output.dtype), materialize_grads=True)
        results.update(zip((f"gradient of {name}" for name in leaves), gradients, strict=True))
    with torch.no_grad():
        plain = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (query, key, value)]
        again = result
        if attention.func is not naive_attention:
            attention(*(tensor.mul_(2) for tensor in plain), **options)
            for tensor, original in zip(plain, (query, key, value), strict=True):
                tensor.copy_(original)
            again = attention(*plain, **options)
    names = ("query", "key", "value")
    _refuse_changes(dict(zip(names, (query, key, value), strict=True)), dict(zip(names, plain, strict=True)))
    results["output without gradients"] = again[0] if isinstance(again, tuple) else again
    return {name: tensor.detach().cpu() for name, tensor in results.items()}


class ChangedError(Exception):
    """A kernel changed an argument in place."""


def _refuse_changes(originals: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, original in originals.items():
        if isinstance(original, Tensor):
            before, after = (tensor.detach().cpu().nan_to_num() for tensor in (original, given[name]))
            if not torch.equal(before, after):
                raise ChangedError(f"it changes {name} in place")
