"""Check whether a function computes attention: ``python -m minitx.testing my_module:my_attention``

The function has the parameter names of ``scaled_dot_product_attention``::

    def my_attention(query, key, value, *, attn_mask=None, is_causal=False, scale=None, attn_bias=None,
                     softcap=None, sinks=None, dropout_p=0.0, need_weights=False): ...

Shapes: query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv) and sinks (H,). ``attn_mask`` is a bool tensor that broadcasts to
(B, H, L, S), True = may attend. ``attn_bias`` is a float tensor that broadcasts to (B, H, L, S); -inf in it hides a key. Query, key and
value are views of (B, L, H, D), as a layer makes them.

Leave out the parameters that the function does not support. The cases that need them are skipped and listed. A call that raises
``NotImplementedError`` is listed as refused. In all other cases the output, with and without gradients, the weights and the gradients
are compared with those of ``naive_attention`` in float64; with dropout the spread of the output is. The tolerance is twice the error of
``naive_attention`` in the same precision, plus a few roundings. From Python, call ``check_kernel``.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def naive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    attn_bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention in plain loops, one query at a time. It shares no code with the rest of the package.

    In float64 it is the reference. In half precision it rounds as a good kernel does: the scores and the softmax are in float32, the
    weights and the output in the dtype of the inputs.

    Args:
        query, key, value: (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv).
        attn_mask: a bool tensor that broadcasts to (B, H, L, S), True = may attend. Default: nothing is hidden.
        is_causal: hide later keys. The last query sees all keys.
        scale: the factor on q·k. Default: 1/√D.
        attn_bias: a float tensor that broadcasts to (B, H, L, S), added to the scores; -inf hides a key. Default: none.
        softcap: t in t · tanh(score / t). Default: none.
        sinks: (H,), one more logit in the softmax of each head. Default: none.

    Returns:
        ``(output (B, H, L, Dv), weights (B, H, L, S))``.

    >>> query, key, value = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
    >>> output, weights = naive_attention(query, key, value)
    >>> output.item(), weights.tolist()
    (2.0, [[[[0.5, 0.5]]]])
    """
    (B, H, L, D), (Hkv, S) = query.shape, key.shape[1:3]
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    scale = D**-0.5 if scale is None else scale
    mask = torch.ones(B, H, L, S, dtype=torch.bool) if attn_mask is None else attn_mask.expand(B, H, L, S)
    bias = None if attn_bias is None else attn_bias.to(wide).expand(B, H, L, S)
    allowed = (mask if bias is None else mask & (bias != -torch.inf)).tolist()
    outputs, weights = [], []
    for b, h in product(range(B), range(H)):
        keys, values = key[b, h // (H // Hkv)].to(wide), value[b, h // (H // Hkv)].to(wide)
        for i in range(L):
            end = i + S - L + 1 if is_causal else S  # the last query sees the last key
            visible = torch.tensor([j for j in range(end) if allowed[b][h][i][j]], dtype=torch.long)
            logits = keys[visible] @ query[b, h, i].to(wide) * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if bias is not None:
                logits = logits + bias[b, h, i, visible]
            if sinks is not None:
                logits = torch.cat((logits, sinks[h : h + 1].to(wide)))
            largest = logits.detach().max() if len(logits) else 0.0  # without a visible key, the sums below are zero
            exponentials = torch.exp(logits - largest)
            p = (exponentials / exponentials.sum())[: len(visible)].to(dtype)
            outputs.append((p.to(wide) @ values[visible]).to(dtype))
            weights.append(p.new_zeros(S).index_put((visible,), p))
    return torch.stack(outputs).view(B, H, L, -1), torch.stack(weights).view(B, H, L, S)


def tolerance(want: Tensor, low: Tensor, dtype: torch.dtype, size: float = 1.0) -> float:
    """Return the largest error that a result in ``dtype`` may have: twice the error of ``low``, plus four roundings.

    Args:
        want: the exact result, in float64.
        low: the result of ``naive_attention`` in ``dtype``. If ``dtype`` is float64, its result in float32, whose error is scaled.
        dtype: the dtype of the result.
        size: the largest summand of the result, for results in which large summands cancel.
    """
    error = (low.double() - want).abs().max().item()
    if dtype == torch.float64:
        error *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return 2 * error + 4 * torch.finfo(dtype).eps * max(1.0, size, want.abs().max().item())


def gradient_sizes(
    query: Tensor, key: Tensor, value: Tensor, cotangent: Tensor, weights: Tensor, scale: float
) -> dict[str, float]:
    """Return the ``size`` in ``tolerance`` for each gradient.

    The gradient of a score is p (dp - Σ p dp) with dp = cotangent · value. For a query with one key this is zero although dp is not. A
    fused kernel recomputes p from the score and the logsumexp. Both are rounded, so larger scores give larger errors.
    """
    key, value = key.double().nan_to_num(), value.double().nan_to_num()
    dp = cotangent.double() @ value.repeat_interleave(cotangent.shape[1] // value.shape[1], dim=1).mT
    largest_dp = (dp.abs() * weights.double()).sum(-1).max().item()
    largest_query, largest_key = query.abs().max().item(), key.abs().max().item()
    return {
        "gradient of query": abs(scale) * largest_dp * largest_key,
        "gradient of key": abs(scale) * largest_dp * largest_query,
        "gradient of value": abs(scale) * query.norm(dim=-1).max().item() * key.norm(dim=-1).max().item(),
    }


@dataclass(frozen=True, eq=False)
class Case:
    """One call, with batch size 2. ``judged`` lists the results to compare. Default: all, with the gradients of options that require one."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    rows: int = 5
    keys: int = 5
    heads: tuple[int, int] = (4, 2)
    width: int = 8
    value_width: int = 8
    spread: float = 1.0  # a factor on the scores
    nan_keys: int = 0  # how many keys and values are NaN
    judged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """The result of one case in one dtype. ``error`` and ``allowed`` are those of the worst of output, weights and gradients."""

    case: str
    dtype: str
    status: str  # passed, failed, skipped or refused
    what: str = ""
    error: float = 0.0
    allowed: float = 0.0


@cache
def cases() -> tuple[Case, ...]:
    """Return the cases, the same objects each time."""
    return tuple(_cases())


def _cases() -> Iterator[Case]:
    """Yield cases with masks, scales, grouped heads, empty rows, decoding, several tiles, and the other options."""
    generator = torch.Generator().manual_seed(7)
    cells = torch.rand(2, 4, 5, 5, generator=generator) < 0.6
    empty = cells & (torch.arange(5) % 3 > 0).view(5, 1)  # queries 0 and 3 see nothing
    padding = (torch.arange(5) >= torch.tensor([[2], [0]]))[:, None, None]  # left padding in the first sequence of the batch
    bias, sinks = torch.randn(1, 4, 5, 5, generator=generator), torch.linspace(-2, 2, 4)
    learned_bias = (4 * bias).round().div(4).requires_grad_()  # the same number in each dtype
    yield Case("plain")
    yield Case("as many key heads", heads=(4, 4))
    yield Case("multi-query", heads=(4, 1))
    yield Case("wide values", value_width=11)
    yield Case("wide queries and keys", width=19)
    yield Case("one key", keys=1)
    for scale in (1.0, 0.0, -0.5, 1e-3):
        yield Case(f"scale {scale:g}", {"scale": scale})
    for scale in (0.0, -0.5):  # a kernel that multiplies its own -inf by the scale fails here
        yield Case(f"scale {scale:g} and causal", {"scale": scale, "is_causal": True})
    yield Case("causal", {"is_causal": True})
    yield Case("causal, decoding one", {"is_causal": True}, rows=1)
    yield Case("causal, decoding three", {"is_causal": True}, rows=3)
    yield Case("causal, several tiles", {"is_causal": True}, rows=3, keys=271)
    yield Case("causal, several tiles of queries", {"is_causal": True}, rows=131, keys=131, heads=(1, 1))
    yield Case("mask (L, S)", {"attn_mask": cells[0, 0]})
    yield Case("mask per batch", {"attn_mask": cells[:, :1]})
    yield Case("mask per head", {"attn_mask": cells[:1]})
    yield Case("padding (B, 1, 1, S)", {"attn_mask": padding})
    yield Case("mask and causal", {"attn_mask": cells, "is_causal": True})
    yield Case("padding and causal, decoding", {"attn_mask": padding, "is_causal": True}, rows=3)
    yield Case("empty rows", {"attn_mask": empty})
    yield Case("empty rows of left padding", {"attn_mask": padding, "is_causal": True})
    yield Case("nothing visible", {"attn_mask": torch.zeros(5, 5, dtype=torch.bool)})
    yield Case("NaN where no query looks", {"attn_mask": (torch.arange(5) >= 2).expand(5, 5)}, nan_keys=2)
    # a kernel that replaces hidden scores by a large negative number fails here
    yield Case("low scores beside the mask", {"attn_mask": cells, "attn_bias": torch.full((5, 5), -2e9)}, judged=("output",))
    yield Case("bias", {"attn_bias": bias})
    yield Case("bias per batch", {"attn_bias": torch.cat((bias, -bias))})
    yield Case("bias of -inf", {"attn_bias": bias.masked_fill(~empty, -torch.inf)})
    yield Case("bias with a gradient", {"attn_bias": learned_bias})
    yield Case("bias and mask", {"attn_bias": bias, "attn_mask": empty})
    yield Case("soft-cap", {"softcap": 1.5}, spread=3.0)
    yield Case("soft-cap and mask", {"softcap": 1.5, "attn_mask": empty})
    yield Case("soft-cap and bias", {"softcap": 1.5, "attn_bias": 3 * bias})
    yield Case("sinks", {"sinks": sinks})
    yield Case("sinks with a gradient", {"sinks": torch.arange(-1.0, 3.0).requires_grad_()})
    yield Case("sinks and mask", {"sinks": sinks, "attn_mask": empty})
    yield Case("large scores", keys=67, spread=12.0)
    yield Case("weights and mask", {"need_weights": True, "attn_mask": empty})
    yield Case("dropout", {"dropout_p": 0.25}, rows=67, keys=67, heads=(2, 1), judged=("spread",))
    yield Case("weights before dropout", {"need_weights": True, "dropout_p": 0.5}, judged=("weights",))


def check_kernel(kernel: Callable[..., Any], device: str = "cpu") -> list[Result]:
    """Run every case with ``kernel``, in float64, float32, bfloat16 and float16.

    Args:
        kernel: the function to check, as described above.
        device: where the kernel runs.

    Returns:
        One ``Result`` for each case and dtype.

    Raises:
        TypeError, ValueError: ``kernel`` is not callable, or Python cannot read its parameters. Wrap it in a function that names them.

    >>> from minitx.nn import scaled_dot_product_attention
    >>> {result.status for result in check_kernel(scaled_dot_product_attention)}
    {'passed'}
    """
    parameters = inspect.signature(kernel).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    results = []
    for case in cases():
        missing = [] if takes_all else [name for name in case.options if name not in parameters]
        if missing:
            results.append(Result(case.name, "", "skipped", f"no parameter {', '.join(missing)}"))
        else:
            results += [_judge(kernel, case, dtype, device) for dtype in DTYPES]
    return results


def _judge(kernel: Callable[..., Any], case: Case, dtype: torch.dtype, device: str) -> Result:
    """Compare the kernel with ``naive_attention`` in one case."""
    query, key, value, cotangent = _draw(case, dtype)
    want = _by_definition(case, dtype, torch.float64)
    try:
        options = {name: option.to(device) if isinstance(option, Tensor) else option for name, option in case.options.items()}
        inputs = [tensor.to(device) for tensor in (query, key, value)]
        got = _run(partial(kernel, **options), inputs, cotangent.to(device), dtype)
    except NotImplementedError as error:
        return Result(case.name, _short(dtype), "refused", str(error))
    except Exception as error:  # any other exception is a fault of the kernel
        return Result(case.name, _short(dtype), "failed", f"raised {type(error).__name__}: {error}")
    if case.judged == ("spread",):
        return _judge_dropout(case, dtype, got["output"], want)
    scale = case.options.get("scale", query.shape[-1] ** -0.5)
    low = _by_definition(case, dtype, torch.float32 if dtype == torch.float64 else dtype)
    is_half = dtype in (torch.bfloat16, torch.float16)  # there the rounding of the result is larger
    sizes = {} if is_half else gradient_sizes(query, key, value, cotangent, want["weights"], scale)
    judged = case.judged or [name for name in want if name != "weights" or "need_weights" in case.options]
    results = [_compare(case, dtype, name, got.get(name), want[name], low[name], sizes.get(name, 1.0)) for name in judged]
    failed = next((result for result in results if result.status == "failed"), None)
    return failed or max(results, key=lambda result: result.error / result.allowed)


@lru_cache(maxsize=512)
def _by_definition(case: Case, drawn: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
    """The results of ``naive_attention`` in ``dtype`` for inputs of a case that are drawn in ``drawn``. They are the same for every kernel."""
    plain = {name: option for name, option in case.options.items() if name not in ("dropout_p", "need_weights")}
    *inputs, cotangent = _draw(case, drawn)
    return _run(partial(naive_attention, **plain), inputs, cotangent, dtype)


def _judge_dropout(case: Case, dtype: torch.dtype, output: Tensor, want: dict[str, Tensor]) -> Result:
    """Compare the variance of Σ_j p_j m_j, the output for values of 1, with Σ_j p_j² dropout_p / (1 - dropout_p)."""
    if output.shape != want["output"].shape:
        return _compare(case, dtype, "output", output, want["output"], want["output"], 1.0)
    share = case.options["dropout_p"]
    variance = want["weights"].square().sum(-1, keepdim=True) * share / (1 - share)
    error, allowed = abs(((output.double() - 1.0).square() / variance).mean().item() - 1.0), 0.5
    status = "passed" if error <= allowed else "failed"
    return Result(case.name, _short(dtype), status, "spread of the output", error, allowed)


def _compare(case: Case, dtype: torch.dtype, name: str, got: Tensor | None, want: Tensor, low: Tensor, size: float) -> Result:
    """Compare the output, the weights or one gradient."""
    if got is None or got.shape != want.shape or got.dtype != dtype:
        found = "missing" if got is None else f"{_short(got.dtype)} of shape {tuple(got.shape)}"
        return Result(case.name, _short(dtype), "failed", f"{name} is {found}")
    error, allowed = (got.double() - want).abs().max().item(), tolerance(want, low, dtype, size)
    passed = error <= allowed  # False if the error is NaN
    return Result(case.name, _short(dtype), "passed" if passed else "failed", name, error, allowed)


def _draw(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Draw query, key, value and the gradient of the output. They are the same in each dtype, except for rounding."""
    generator = torch.Generator().manual_seed(11)
    H, Hkv = case.heads
    L, S, D, Dv = case.rows, case.keys, case.width, case.value_width
    shapes = (H, L, D), (Hkv, S, D), (Hkv, S, Dv), (H, L, Dv)
    query, key, value, cotangent = (torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    key[:, :, : case.nan_keys] = value[:, :, : case.nan_keys] = torch.nan
    value = torch.ones_like(value) if case.judged == ("spread",) else value
    found = [tensor.to(dtype) for tensor in (query * case.spread, key, value, cotangent)]
    return [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in found]  # (B, H, L, D), as views of (B, L, H, D)


def _run(attention: partial[Any], inputs: Sequence[Tensor], cotangent: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the output, the weights if there are any, and the gradients of query, key, value and of options that require one. Of a
    kernel also the output without gradients, of contiguous tensors."""
    learned = {name: x for name, x in attention.keywords.items() if isinstance(x, Tensor) and x.requires_grad}
    given = dict(zip(("query", "key", "value"), inputs, strict=True)) | learned
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in given.items()}
    query, key, value, *_ = leaves.values()
    options = {name: leaves[name] for name in learned}
    result = attention(query, key, value, **options)
    found = dict(zip(("output", "weights"), result if isinstance(result, tuple) else (result,), strict=False))
    output = found["output"]
    if output.requires_grad and output.shape == cotangent.shape:
        wanted = list(leaves.values())
        gradients = torch.autograd.grad(output, wanted, cotangent.to(output.dtype), materialize_grads=True)
        found.update(zip((f"gradient of {name}" for name in leaves), gradients, strict=True))
    with torch.no_grad():
        plain = [tensor.detach().contiguous() for tensor in (query, key, value)]
        again = result if attention.func is naive_attention else attention(*plain, **options)
    found["output without gradients"] = again[0] if isinstance(again, tuple) else again
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def table(results: Sequence[Result]) -> str:
    """Return a table with a row for each case and a column for each dtype, then the reasons of cases that did not pass.

    A cell is the worst error divided by its tolerance.
    """
    columns = [_short(dtype) for dtype in DTYPES]
    rows: dict[str, dict[str, str]] = {}
    reasons = []
    for result in results:
        share = f"{result.error / result.allowed:.2f}" if result.status == "passed" else result.status
        rows.setdefault(result.case, {})[result.dtype] = share
        if result.status != "passed":
            numbers = f": error {result.error:.2e}, allowed {result.allowed:.2e}" if result.allowed else ""
            reasons.append(f"{result.case}, {result.dtype or 'all'}, {result.status}: {result.what}{numbers}")
    lines = [f"{name:30}" + "".join(f"{cells.get(column, ''):>10}" for column in columns) for name, cells in rows.items()]
    counts = (f"{sum(r.status == status for r in results)} {status}" for status in ("passed", "failed", "skipped", "refused"))
    heading = f"{'error / tolerance':30}" + "".join(f"{column:>10}" for column in columns)
    return "\n".join([heading, *lines, *reasons, ", ".join(counts)])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Return 0 if nothing failed, else 1. Exit with 2 if the function is not found."""
    parser = argparse.ArgumentParser("python -m minitx.testing", description="Check whether a function computes attention.")
    parser.add_argument("target", help="module:function, for example minitx.nn:scaled_dot_product_attention")
    parser.add_argument("--device", default="cpu")
    typed = parser.parse_args(arguments)
    module, _, name = typed.target.partition(":")
    try:
        results = check_kernel(getattr(importlib.import_module(module), name), typed.device)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        parser.error(f"target={typed.target} must be module:function: {error}")
    sys.stdout.write(table(results) + "\n")
    return 1 if any(result.status == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
