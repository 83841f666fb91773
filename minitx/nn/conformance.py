"""Does a kernel of yours compute attention? ``python -m minitx.nn.conformance my_module:my_attention``

The kernel is any callable with the names of ``scaled_dot_product_attention``:

    def my_attention(query, key, value, *, attn_mask=None, is_causal=False, scale=None, attn_bias=None,
                     softcap=None, sinks=None, dropout_p=0.0, need_weights=False): ...

query (B, H, L, D), key (B, Hkv, S, D), value (B, Hkv, S, Dv); ``attn_mask`` a bool tensor that broadcasts to (B, H, L, S),
True = may attend; ``attn_bias`` a float tensor; the others as there. **A parameter that it lacks is a feature that it does
not claim**: those cases are skipped, and listed. A call that it refuses with ``NotImplementedError`` is listed as refused.
Everything else is compared with ``math`` in float64, output and gradients.

The tolerance is derived, not guessed: twice the error of independent runs in the same precision (scores and softmax in
float32, weights and output rounded) plus a rounding band of four units in the last place. Exit codes: 0 all passed, 1 a
case failed, 2 the callable cannot be loaded.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minitx.nn.functional import attention_scores, attention_weights, reference_attention
from minitx.nn.masks import Causal, intersect

Kernel = Callable[..., Any]
OPTIONS = ("attn_mask", "is_causal", "scale", "attn_bias", "softcap", "sinks", "dropout_p", "need_weights")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """One call: shapes, options, and how large the scores are."""

    name: str
    rows: int = 13
    keys: int = 13
    heads: tuple[int, int] = (6, 3)
    value_width: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    spread: float = 1.0
    dtypes: tuple[torch.dtype, ...] = DTYPES
    gradients: bool = True


@dataclass(frozen=True)
class Result:
    """One line of the table; ``error`` and ``allowed`` of the worst of output and gradients."""

    case: str
    dtype: str
    status: str  # passed, failed, skipped or refused
    what: str = ""
    error: float = 0.0
    allowed: float = 0.0

    def __str__(self) -> str:
        """The error in units of the tolerance, or the status."""
        return f"{self.error / self.allowed:.2f}" if self.status == "passed" and self.allowed else self.status


def table(results: Sequence[Result]) -> str:
    """One row a case, one column a dtype: the worst error over the tolerance; below it the reasons, each once."""
    columns = [_short(dtype) for dtype in DTYPES]
    cells = {(result.case, result.dtype): str(result) for result in results}
    names = dict.fromkeys(result.case for result in results)
    lines = [f"{'error / tolerance':28}" + "".join(f"{column:>10}" for column in columns)]
    lines += [f"{name:28}" + "".join(f"{cells.get((name, column), ''):>10}" for column in columns) for name in names]
    reasons: dict[str, str] = {}
    for result in results:
        if result.status != "passed":
            numbers = f": error {result.error:.2e}, allowed {result.allowed:.2e}" if result.allowed else ""
            reasons.setdefault(f"{result.case}, {result.status}", f"{result.what}{numbers} ({result.dtype})")
    lines += [f"{place}: {reason}" for place, reason in reasons.items()]
    counts = (f"{sum(r.status == status for r in results)} {status}" for status in ("passed", "failed", "skipped", "refused"))
    return "\n".join([*lines, ", ".join(counts)])


def cases() -> Iterator[Case]:
    """Masks × scale × grouped heads × empty rows × decoding × options."""
    generator = torch.Generator().manual_seed(7)
    cells = torch.rand(2, 6, 13, 13, generator=generator) < 0.6
    empty = cells.clone()
    empty[:, :, (0, 4)] = False
    padding = (torch.arange(13) >= torch.tensor([[4], [0]]))[:, None, None]  # left padding in the first row of the batch
    shut = padding.expand(2, 1, 13, 13) & torch.ones(13, 13, dtype=torch.bool).tril()
    bias = torch.randn(1, 6, 13, 13, generator=generator)
    yield Case("plain")
    yield Case("one head", heads=(1, 1))
    yield Case("heads of their own", heads=(6, 6))
    yield Case("multi-query", heads=(6, 1))
    yield Case("wide values", value_width=11)
    for scale in (1.0, 0.0, -0.5, 1e-3):
        yield Case(f"scale {scale:g}", options={"scale": scale})
    yield Case("scale 1 and causal", options={"scale": 1.0, "is_causal": True})
    yield Case("causal", options={"is_causal": True})
    yield Case("causal, decoding one", rows=1, options={"is_causal": True})
    yield Case("causal, decoding five", rows=5, options={"is_causal": True})
    yield Case("mask (L, S)", options={"attn_mask": cells[0, 0]})
    yield Case("mask per batch", options={"attn_mask": cells[:, :1]})
    yield Case("mask per head", options={"attn_mask": cells[:1]})
    yield Case("padding (B, 1, 1, S)", options={"attn_mask": padding})
    yield Case("mask and causal", options={"attn_mask": cells, "is_causal": True})
    yield Case("mask and causal, decoding", rows=5, options={"attn_mask": padding, "is_causal": True})
    yield Case("empty rows", options={"attn_mask": empty})
    yield Case("empty rows of left padding", options={"attn_mask": shut})
    yield Case("nothing visible", options={"attn_mask": torch.zeros(13, 13, dtype=torch.bool)})
    # a fused backward pass cannot tell rows apart at such scores, but no finite fill may outweigh them
    low = {"attn_mask": cells, "attn_bias": torch.full((13, 13), -2e9)}
    yield Case("low scores beside the mask", options=low, dtypes=DTYPES[:2], gradients=False)
    yield Case("bias", options={"attn_bias": bias})
    yield Case("bias and mask", options={"attn_bias": bias, "attn_mask": empty})
    yield Case("soft-cap", options={"softcap": 1.5}, spread=3.0)
    yield Case("soft-cap and mask", options={"softcap": 1.5, "attn_mask": empty})
    yield Case("soft-cap and bias", options={"softcap": 1.5, "attn_bias": 3 * bias})
    yield Case("sinks", options={"sinks": torch.linspace(-2, 2, 6)})
    yield Case("sinks and mask", options={"sinks": torch.linspace(-2, 2, 6), "attn_mask": empty})
    yield Case("large scores", keys=67, rows=67, spread=12.0)
    yield Case("weights", options={"need_weights": True})
    yield Case("weights and mask", options={"need_weights": True, "attn_mask": empty})
    yield Case("weights under dropout", options={"need_weights": True, "dropout_p": 0.5}, dtypes=DTYPES[:2])


def conformance(kernel: Kernel, *, device: str = "cpu") -> list[Result]:
    """Run ``kernel`` through every case.

    >>> from minitx.nn import scaled_dot_product_attention
    >>> {result.status for result in conformance(scaled_dot_product_attention)}
    {'passed'}
    """
    accepts = accepted(kernel)
    results = []
    for case in cases():
        missing = [name for name in case.options if name not in accepts]
        for dtype in case.dtypes:
            if missing:
                results.append(Result(case.name, _short(dtype), "skipped", f"no parameter {', '.join(missing)}"))
            else:
                results.append(_judge(kernel, case, dtype, device))
    poison = [_poison(kernel, dtype, device) for dtype in DTYPES] if "attn_mask" in accepts else []
    return results + poison


def accepted(kernel: Kernel) -> set[str]:
    """Which of ``OPTIONS`` the callable takes by name.

    Raises:
        TypeError: a callable without a readable signature.
    """
    try:
        parameters = inspect.signature(kernel).parameters.values()
    except ValueError as error:
        raise TypeError("it has no readable signature; wrap it in a Python function that names its parameters") from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set(OPTIONS)
    return {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)} & set(OPTIONS)


def _judge(kernel: Kernel, case: Case, dtype: torch.dtype, device: str) -> Result:
    inputs, cotangent = _inputs(case, dtype, device)
    options = {name: o.to(device) if isinstance(o, Tensor) else o for name, o in case.options.items()}
    line = partial(Result, case.name, _short(dtype))
    reference = _gradients(_reference, inputs, cotangent, options, torch.float64)
    runs = [partial(_independent, low=dtype, flip=flip) for flip in (False, True)]
    honest = [_gradients(run, inputs, cotangent, options, torch.float32) for run in runs]
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    plain = {name: option for name, option in _plain(exact["query"], options).items() if name not in ("mask", "sinks")}
    largest = attention_scores(exact["query"], exact["key"], **plain).abs().max().item()
    try:
        got = _gradients(kernel, inputs, cotangent, options, dtype)
    except NotImplementedError as error:
        return line("refused", str(error))
    except Exception as error:
        return line("failed", f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    worst = line("passed", allowed=1e-300)
    for name, want in reference.items():
        if name not in got:
            return line("failed", f"{name} is missing")
        if (not case.gradients and name.startswith("gradient")) or ("dropout_p" in options and name != "weights"):
            continue  # under dropout only the weights have one right answer
        have = got[name]
        if have.shape != want.shape:
            return line("failed", f"{name} has shape {tuple(have.shape)}, not {tuple(want.shape)}")
        if name == "output" and have.dtype != dtype:
            return line("failed", f"output is {have.dtype}, not {dtype}")
        if not torch.isfinite(have).all():
            return line("failed", f"{name} is not finite")
        distance = (have.double() - want).abs().max().item()
        allowed = _tolerance(dtype, name, want, [run[name] for run in honest], inputs, largest)
        if distance > allowed:
            return line("failed", name, distance, allowed)
        if distance / allowed >= worst.error / worst.allowed:
            worst = line("passed", name, distance, allowed)
    return worst


def _inputs(case: Case, dtype: torch.dtype, device: str) -> tuple[dict[str, Tensor], Tensor]:
    """The same numbers in every dtype, rounded to it."""
    generator = torch.Generator().manual_seed(11)
    H, Hkv = case.heads
    shapes = {"query": (2, H, case.rows, 8), "key": (2, Hkv, case.keys, 8), "value": (2, Hkv, case.keys, case.value_width)}
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    drawn["query"] *= case.spread
    cotangent = torch.randn(2, H, case.rows, case.value_width, generator=generator, dtype=torch.float64)
    return {name: tensor.to(device, dtype) for name, tensor in drawn.items()}, cotangent.to(device, dtype)


def _gradients(
    kernel: Kernel, inputs: dict[str, Tensor], cotangent: Tensor, options: dict[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Output, weights where asked for, and the gradients of query, key and value."""
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
    result = kernel(*leaves.values(), **options)
    found: dict[str, Tensor] = {}
    if options.get("need_weights"):
        result, weights = result
        found["weights"] = weights.detach()
    found["output"] = result.detach()
    if result.requires_grad and result.shape == cotangent.shape:
        grads = torch.autograd.grad(result, list(leaves.values()), cotangent.to(result.dtype), materialize_grads=True)
        found.update({f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)})
    return found


def _plain(query: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The options as the reference takes them."""
    mask = intersect(options.get("attn_mask"), Causal() if options.get("is_causal") else None)
    scale = options.get("scale")
    plain = {name: options.get(name) for name in ("attn_bias", "softcap", "sinks")}
    return {"mask": mask, "scale": query.shape[-1] ** -0.5 if scale is None else scale, **plain}


def _reference(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    plain = _plain(query, options)
    output = reference_attention(query, key, value, **plain)
    return (output, attention_weights(query, key, **plain)) if options.get("need_weights") else output


def _independent(query: Tensor, key: Tensor, value: Tensor, *, low: torch.dtype, flip: bool, **options: Any) -> Any:
    """The textbook, one matrix after the other, with what a good low-precision kernel rounds.

    ``flip`` sums everything in another order: the worse of two runs is less a matter of luck.
    """

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(low).to(tensor.dtype)

    plain = _plain(query, options)
    B, H, L, _ = query.shape
    S, group = key.shape[2], H // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("bhld,bhsd->bhls", *((query.flip(-1), key.flip(-1)) if flip else (query, key))) * plain["scale"]
    if plain["softcap"] is not None:
        scores = (scores / plain["softcap"]).tanh() * plain["softcap"]
    if plain["attn_bias"] is not None:
        scores = scores + plain["attn_bias"]
    visible = torch.ones(B, H, L, S, dtype=torch.bool, device=query.device)
    if plain["mask"] is not None:
        visible = visible & plain["mask"].dense(L, S, batch_size=B, num_heads=H, device=query.device)
    scores = scores.masked_fill(~visible, -torch.inf)
    if plain["sinks"] is not None:
        scores = torch.cat((scores, plain["sinks"].to(scores.dtype).view(1, -1, 1, 1).expand(B, H, L, 1)), dim=-1)
    some = (scores > -torch.inf).any(-1, keepdim=True)
    weights = torch.where(some, scores, 0.0).softmax(-1)[..., :S] * visible
    kept = rounded(weights)
    output = rounded(torch.einsum("bhls,bhsv->bhlv", *((kept.flip(-1), value.flip(-2)) if flip else (kept, value))))
    return (output, rounded(weights)) if options.get("need_weights") else output


def _tolerance(
    dtype: torch.dtype, name: str, want: Tensor, honest: list[Tensor], inputs: dict[str, Tensor], largest_score: float
) -> float:
    """Twice the error of the independent runs, plus four units in the last place of the largest number involved, plus
    those weights' error that a kernel cannot avoid which keeps one number a row, the logsumexp, for its backward pass.
    """
    error = max((run.double() - want).abs().max().item() for run in honest)
    if dtype == torch.float64:  # nothing judges float64 from above: a float32 run's error, in proportion
        error *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    terms = {"output": ["value"], "weights": []}.get(name, list(inputs))  # what a sum may nearly cancel
    largest = max([1.0, want.abs().max().item(), *(inputs[term].abs().max().item() for term in terms)])
    kept = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * largest_score * want.abs().max().item()
    return 2 * error + 4 * torch.finfo(dtype).eps * largest + (kept if name.startswith("gradient") else 0.0)


def _poison(kernel: Kernel, dtype: torch.dtype, device: str) -> Result:
    """NaN in keys and values that no query may see must change no bit."""
    case = Case("NaN where no query looks")
    inputs, _ = _inputs(case, dtype, device)
    mask = (torch.arange(13, device=device) >= 4).expand(13, 13)
    dirty = {name: tensor.clone() for name, tensor in inputs.items()}
    dirty["key"][:, :, :4] = dirty["value"][:, :, :4] = torch.nan
    line = partial(Result, case.name, _short(dtype))
    try:
        clean, got = kernel(*inputs.values(), attn_mask=mask), kernel(*dirty.values(), attn_mask=mask)
    except NotImplementedError as error:
        return line("refused", str(error))
    except Exception as error:
        return line("failed", f"raised {type(error).__name__}")
    return line("passed") if torch.equal(clean, got) else line("failed", "output changed")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load(target: str) -> Kernel:
    """The callable that ``module:name`` stands for.

    Raises:
        ValueError: with one sentence, where there is none.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ValueError(f"{target!r} is not of the form my_module:my_attention")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"module {module_name!r} cannot be imported: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"module {module_name!r} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{target} is not callable, but a {type(found).__name__}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The program: a table on standard output, a sentence on standard error where something typed is wrong."""
    parser = argparse.ArgumentParser(prog="python -m minitx.nn.conformance", description="Does a kernel compute attention?")
    parser.add_argument("target", help="module:callable, for example minitx.nn:scaled_dot_product_attention")
    parser.add_argument("--backend", help="passed on as backend=..., for a callable that takes one")
    parser.add_argument("--device", default="cpu")
    typed = parser.parse_args(arguments)
    sys.path.insert(0, "")
    try:
        kernel = load(typed.target)
        results = conformance(partial(kernel, backend=typed.backend) if typed.backend else kernel, device=typed.device)
    except (ValueError, TypeError) as error:
        sys.stderr.write(f"{typed.target}: {error}\n")
        return 2
    sys.stdout.write(table(results) + "\n")
    return 1 if any(result.status == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
