"""How a model runs: evaluation, caches, gradients, sizes, train mode, half precision and compilation."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.examination import Examination
from minitx.check.model_inputs import CACHES, is_refusal, limit_of, said
from minitx.check.properties import Gap, compare, rounding
from minitx.check.results import Severity

TRIED_ALONE = 8
"""How many parameters without a gradient are moved, one at a time."""

LARGE, GROUPS, WIDTH, SLOPE = 200_000_000, 24, 1e-4, 0.05
"""Of gradients against differences: the most parameters, the most groups of them, the step, and the share that may differ."""

LONG = 320
"""Tokens for half precision: bfloat16 has no odd numbers above 256."""


def determinism(exam: Examination) -> None:
    """Two calls in evaluation mode are equal. A difference has stopped the check before."""
    exam.passed("determinism")


# --- caches


def cache(exam: Examination) -> None:
    """Pieces with a cache equal one call."""
    called = exam.called
    name = next((name for name in CACHES if name in called.names), None)
    if name is None or not called.streams or not called.has_positions:
        exam.skip("cache", "no argument for a cache was found")
        return
    L = called.stream.length
    random_cuts = sorted((torch.randperm(L - 1, generator=called.generator)[:3] + 1).tolist())
    pieces = _Pieces(exam, name)
    cuts = {"token-by-token": range(1, L), "prefill-then-tokens": range(L // 2, L), "pieces": random_cuts}
    for kind, places in cuts.items():
        exam.attempt(f"cache/{kind}", partial(pieces.compare, cuts=list(places)))
    exam.attempt("cache/left-padding", partial(pieces.padded, cuts=[L // 2, L // 2 + 1, L - 3]))
    exam.attempt("cache/static", partial(pieces.static, cuts=[L // 2, L // 2 + 1]))


class NoCacheError(ValueError):
    """The model gives no cache back."""


class WrongShapeError(RuntimeError):
    """A piece has an output of another shape."""


class _Pieces:
    """Calls in pieces."""

    def __init__(self, exam: Examination, name: str) -> None:
        self.exam, self.name = exam, name
        self.make = getattr(exam.called.model, "make_cache", None)

    def _new(self, rows: int, length: int) -> Any:
        if self.make is None:
            return None
        count = len(inspect.signature(self.make).parameters)
        return self.make(*(rows, length)[-count:]) if count else self.make()

    def run(
        self,
        cuts: Sequence[int],
        keep: Tensor | None = None,
        extra: Mapping[str, Tensor] | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Return the outputs of all pieces, joined."""
        called, inputs = self.exam.called, self.exam.inputs
        stream, tokens = called.stream, inputs[called.stream.name]
        B, L = tokens.shape[:2]
        cache = self._new(B, L) if cache is None else cache
        found, start = [], 0
        for end in [*cuts, L]:
            piece = {**inputs, stream.name: tokens[:, start:end].contiguous()}
            options: dict[str, Any] = {} if cache is None else {self.name: cache}
            if "use_cache" in called.names:
                options["use_cache"] = True
            given = None
            if keep is not None:  # a cache of ours keeps the earlier part of the mask
                given = {stream.name: keep[:, (0 if self.make is None else start) : end]}
            options |= {key: value[:, start:end] for key, value in (extra or {}).items()}
            result = self._piece(piece, given, options, keep, start, end)
            found.append(called.output(result, piece))
            if found[-1].shape[:2] != (B, end - start):
                raise WrongShapeError(f"{end - start} of {B} rows give an output of shape {tuple(found[-1].shape)}")
            if self.make is None:
                cache = self._returned(result)
                if cache is None:
                    raise NoCacheError("no cache comes back")
            start = end
        return torch.cat(found, 1)

    def _piece(
        self, piece: dict[str, Tensor], given: Any, options: dict[str, Any], keep: Tensor | None, start: int, end: int
    ) -> Any:
        """One call. Some models want the mask of all tokens so far, others of the new ones."""
        called = self.exam.called
        try:
            return called.run(piece, given, **options)
        except (RuntimeError, ValueError):
            if keep is None or start == 0 or self.make is not None:
                raise
            return called.run(piece, {called.stream.name: keep[:, start:end]}, **options)

    def _returned(self, result: Any) -> Any:
        for name in (self.name, "past_key_values", "cache_params", "state"):
            found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
            if found is not None:
                return found
        if isinstance(result, tuple) and len(result) > 1:
            rest = [part for part in result[1:] if part is not None and not (isinstance(part, Tensor) and part.dim() == 0)]
            return rest[-1] if rest else None
        return None

    def compare(self, id: str, cuts: Sequence[int]) -> None:
        """Compare pieces with one call."""
        try:
            found = self.run(cuts)
        except NoCacheError as reason:
            self.exam.skip(id, str(reason))
            return
        self._judge(id, self.exam.gap(found, self.exam.base), cuts)

    def _judge(self, id: str, gap: Gap, cuts: Sequence[int], what: str = "") -> None:
        exam = self.exam
        if gap.is_rounding:
            exam.passed(id, gap)
            return
        if any(finding.id == "cache-differs" for finding in exam.findings):
            exam.explained(id, "the cache", gap)
            return
        witness = (
            f"pieces that end at {', '.join(map(str, cuts))}: the output of token {gap.place[1]} differs by {gap.size:.2g}"
        )
        if len(cuts) > 5:
            witness = f"token by token from {cuts[0]}: the output of token {gap.place[1]} differs by {gap.size:.2g}"
        fault = f"with a cache{what}, pieces differ from one call"
        advice = "Look at the positions of new tokens, and align the causal mask to the lower right: tril(diagonal=S - L)."
        exam.failed(id, f"cache-differs{what.replace(' ', '-').replace(',', '')}", Severity.WRONG, fault, advice, witness, gap)

    def padded(self, id: str, cuts: Sequence[int]) -> None:
        """The same with a row that has padding on its left."""
        exam, called = self.exam, self.exam.called
        stream = called.stream
        if stream.form is None:
            exam.skip(id, "no mask")
            return
        B, L = exam.inputs[stream.name].shape[:2]
        keep = torch.ones(B, L, dtype=torch.bool)
        keep[1, : L // 3] = False
        extra: dict[str, Tensor] = {}
        if "position_ids" in called.names:
            extra = {"position_ids": (keep.long().cumsum(-1) - 1).clamp(min=0).to(called.device)}
        try:
            wanted = called.answer(exam.inputs, {stream.name: keep}, **extra)
        except (ValueError, NotImplementedError):  # it has no use for positions
            extra, wanted = {}, called.answer(exam.inputs, {stream.name: keep})
        try:
            found = self.run(cuts, keep, extra)
        except NoCacheError as reason:
            exam.skip(id, str(reason))
            return
        self._judge(id, exam.gap(found, wanted, keep), cuts, " and padding on the left")

    def static(self, id: str, cuts: Sequence[int]) -> None:
        """The same with a cache of fixed size of transformers."""
        exam = self.exam
        library = sys.modules.get("transformers")
        kind = getattr(library, "StaticCache", None)
        if kind is None or self.name != "past_key_values" or exam.called.config is None:
            return
        if getattr(exam.called.model, "_can_compile_fullgraph", True) is False:
            exam.skip(id, "the model says that it supports no cache of fixed size")
            return
        try:
            found = self.run(cuts, cache=kind(config=exam.called.config, max_cache_len=exam.called.stream.length + 3))
        except Exception as error:  # not every architecture has one
            exam.skip(id, f"it raises {said(error)}")
            return
        self._judge(id, exam.gap(found, exam.base), cuts, " of fixed size")


# --- gradients and weights


def gradient(exam: Examination) -> None:
    """Every parameter that changes the output gets a finite gradient."""
    called, model = exam.called, exam.called.model
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel()]
    if not parameters:
        exam.skip("gradient", "no parameter requires a gradient")
        return
    with torch.enable_grad():
        out = called.answer(exam.inputs)
        if not out.requires_grad:
            advice = "Look for no_grad, detach() or .data around the whole model."
            exam.failed("gradient", "no-gradient", Severity.WRONG, "the output has no gradient", advice)
            return
        weights = torch.randn(out.shape, generator=called.generator).to(out)
        grads = torch.autograd.grad((out * weights).sum(), [p for _, p in parameters], allow_unused=True)
    pairs = list(zip(parameters, grads, strict=True))
    if broken := [name for (name, _), grad in pairs if grad is not None and not grad.isfinite().all()]:
        exam.failed(
            "gradient",
            "gradient-not-finite",
            Severity.WRONG,
            "NaN or infinity in gradients",
            witness=f"of {', '.join(broken[:3])}",
        )
        return
    silent = [(name, p) for (name, p), grad in pairs if grad is None or not grad.any()]
    moving = []
    for name, parameter in silent[:TRIED_ALONE]:
        kept = parameter.detach().clone()
        size = 1e-3 * (0.1 + kept.abs().max().item())  # so small that a router chooses the same experts
        gaps = []
        for _ in range(2):
            parameter.copy_(kept + size * torch.randn(kept.shape, generator=called.generator).to(kept))
            gaps.append(exam.gap(called.answer(exam.inputs), exam.base))
        parameter.copy_(kept)
        if not any(gap.is_rounding for gap in gaps):
            moving.append((name, gaps[0]))
    if moving:
        name, gap = moving[0]
        witness = f"another {name} moves the output by {gap.size:.2g}, and its gradient is 0; {len(moving)} of {min(len(silent), TRIED_ALONE)} that were tried"
        fault = "parameters change the output and get no gradient"
        exam.failed(
            "gradient",
            "parameter-without-gradient",
            Severity.WRONG,
            fault,
            "Look for detach(), no_grad or .data.",
            witness,
            gap,
        )
        return
    if silent:
        names = ", ".join(name for name, _ in silent[:3]) + (" ..." if len(silent) > 3 else "")
        exam.note("unused-parameters", f"{len(silent)} of {len(parameters)} parameters change nothing here: {names}")
    exam.passed("gradient/all")
    exam.attempt("gradient/differences", partial(_differences, exam))


def _differences(exam: Examination, id: str) -> None:
    """Gradients equal differences of the output, in float64."""
    called, model = exam.called, exam.called.model
    if called.floats() != torch.float32 or sum(p.numel() for p in model.parameters()) > LARGE:
        exam.skip(id, f"it is for float32 and at most {LARGE // 10**6} million parameters")
        return
    try:
        called.model = double = copy.deepcopy(model).to(torch.float64)
        called.answer(exam.inputs if called.streams else {n: v.double() for n, v in exam.inputs.items()})
    except Exception as error:  # parts of some models compute in one dtype alone
        exam.skip(id, f"in float64 it raises {said(error)}")
        return
    finally:
        called.model = model
    inputs = {name: v[:1].double() if v.is_floating_point() else v[:1] for name, v in exam.inputs.items()}
    parameters = {name: p for name, p in double.named_parameters() if p.requires_grad and p.numel()}
    try:
        called.model = double
        with torch.enable_grad():
            out = called.answer(inputs)
            weights = torch.randn(out.shape, generator=called.generator).to(out)
            loss = (out * weights).sum()
            grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        slopes = dict(zip(parameters, grads, strict=True))
        worst = 0.0, "", 0.0, 0.0
        for names in _shares(list(parameters)):
            steps = {n: _step(parameters[n], called.generator) for n in names}
            expected = sum((slopes[n] * steps[n]).sum().item() for n in names)
            found, wider = (
                _slope(lambda: (called.answer(inputs) * weights).sum().item(), parameters, steps, width)
                for width in (WIDTH, 8 * WIDTH)
            )
            scale = sum((slopes[n] * steps[n]).norm().item() ** 2 for n in names) ** 0.5
            differs = max(0.0, abs(found - expected) - 4 * abs(found - wider)) / max(
                scale, abs(found), abs(expected), 1e-4 * abs(loss.item()), 1e-9
            )
            worst = max(worst, (differs, names[-1] if len(names) == 1 else f"{names[0]} ... {names[-1]}", found, expected))
    finally:
        called.model = model
    share, name, slope, expected = worst
    if share <= SLOPE:
        exam.passed(id)
        return
    fault = "gradients differ from the slope of the output"
    advice = "Look for detach(), no_grad, .data or a backward of your own. A straight-through estimator does this on purpose."
    witness = f"along a random step of {name}: gradient {expected:.3g}, slope {slope:.3g}"
    exam.failed(id, "gradient-differs", Severity.FRAGILE, fault, advice, witness)


def _step(parameter: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(parameter.shape, generator=generator).to(parameter) * max(parameter.detach().abs().mean().item(), 1e-2)


def _shares(names: list[str]) -> list[list[str]]:
    """The names, one by one or in at most ``GROUPS`` groups."""
    size = -(-len(names) // GROUPS)
    return [names[start : start + size] for start in range(0, len(names), size)]


def _slope(call: Callable[[], float], parameters: Mapping[str, Tensor], steps: Mapping[str, Tensor], width: float) -> float:
    """The slope of a number along a step, by differences on both sides."""
    kept = {name: parameters[name].detach().clone() for name in steps}
    found = []
    for sign in (1, -1):
        for name, step in steps.items():
            parameters[name].copy_(kept[name] + sign * width * step)
        found.append(call())
    for name, value in kept.items():
        parameters[name].copy_(value)
    return (found[0] - found[1]) / (2 * width)


def weights(exam: Examination) -> None:
    """Parts in plain lists have no parameters, and tied tables are one."""
    model = exam.called.model
    hidden = [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and any(isinstance(part, nn.Module) and _has_own(part, model) for part in _items(value))
    ]
    if hidden:
        fault = f"modules in the plain list or dict {hidden[0]} are not part of the model: they are not trained, saved or moved"
        exam.failed("weights/registered", "unregistered-modules", Severity.WRONG, fault, "Use nn.ModuleList or nn.ModuleDict.")
    else:
        exam.passed("weights/registered")
    try:
        head, table = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        head = table = None
    wanted = getattr(exam.called.config, "tie_word_embeddings", None)
    if head is None or table is None or not isinstance(wanted, bool) or not hasattr(head, "weight"):
        return
    if (head.weight is table.weight) != wanted:
        is_one = "one" if head.weight is table.weight else "two"
        fault = f"config.tie_word_embeddings={wanted}, and head and table are {is_one}"
        exam.failed("weights/tied", "tied-otherwise", Severity.FRAGILE, fault, "Call tie_weights().")
    else:
        exam.passed("weights/tied")


def _items(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _has_own(part: nn.Module, model: nn.Module) -> bool:
    mine = {id(p) for p in model.parameters()}
    return any(id(p) not in mine for p in part.parameters())


# --- sizes


def sizes(exam: Examination) -> None:
    """Sizes that crash."""
    called = exam.called
    if not called.streams:
        exam.attempt("sizes/rows", partial(_one_row, exam))
        return
    name, limit = called.stream.name, limit_of(called.model)
    most = min(limit or 40, 40)
    drawn = torch.randint(1, most + 1, (4,), generator=called.generator).tolist()
    for length in dict.fromkeys([1, 2, *drawn]):
        exam.attempt("sizes/lengths", partial(_length, exam, name=name, length=length))
    if limit is not None and limit <= 2048:
        exam.attempt("sizes/limit", partial(_limit, exam, name=name, limit=limit))
    if called.stream.width is None:
        exam.attempt("sizes/ids", partial(_ids, exam, name=name))


def _one_row(exam: Examination, id: str) -> None:
    found = exam.called.answer({name: value[:1] for name, value in exam.inputs.items()})
    if found.shape[:1] == (1,):
        exam.passed(id)
    else:
        fault = f"one row gives an output of shape {tuple(found.shape)}"
        exam.failed(id, "loses-axis", Severity.FRAGILE, fault, "squeeze() needs its axis.")


def _length(exam: Examination, id: str, name: str, length: int) -> None:
    called = exam.called
    inputs = called.draw(2, {name: length})
    try:
        found = called.answer(inputs)
    except Exception as error:
        if is_refusal(error):
            exam.skip(f"sizes/length-{length}", f"it raises {said(error)}")
        else:
            fault = f"{length} token{'s' * (length > 1)} crash"
            exam.failed(id, "crashes-at-a-length", Severity.FRAGILE, fault, witness=said(error))
        return
    if not found.isfinite().all():
        exam.failed(id, "nan-at-a-length", Severity.WRONG, f"NaN for {length} tokens")
    elif called.has_positions and found.shape[:2] != (2, length):
        fault = f"{length} tokens give an output of shape {tuple(found.shape)}"
        exam.failed(id, "loses-axis", Severity.FRAGILE, fault, "squeeze() needs its axis.")
    elif not any(check.id == id for check in exam.checks):
        exam.passed(id)


def _limit(exam: Examination, id: str, name: str, limit: int) -> None:
    called = exam.called
    for length in (limit, limit + 1):
        try:
            found = called.answer(called.draw(1, {name: length}))
        except Exception as error:
            if length == limit:
                exam.failed(
                    id, "crashes-at-its-limit", Severity.FRAGILE, f"{limit} tokens, its limit, crash", witness=said(error)
                )
                return
            exam.passed(id)
            return
        if not found.isfinite().all():
            exam.failed(id, "nan-at-its-limit", Severity.WRONG, f"NaN for {length} tokens; its limit is {limit}")
            return
    exam.note("beyond-its-limit", f"{limit + 1} tokens, one more than its limit, raise no error")
    exam.passed(id)


def _ids(exam: Examination, id: str, name: str) -> None:
    called = exam.called
    for token in (called.vocabulary - 1, called.vocabulary, -1):
        inputs = called.draw(1)
        inputs[name][0, 1] = token
        try:
            called.answer(inputs)
        except Exception as error:
            if token == called.vocabulary - 1:
                fault = f"the last id, {token} of {called.vocabulary}, crashes"
                exam.failed(id, "last-id-crashes", Severity.FRAGILE, fault, witness=said(error))
                return
            continue
        if token in (called.vocabulary, -1):
            exam.note("ids-outside", f"id {token}, outside of the table of {called.vocabulary}, raises no error")
    exam.passed(id)


# --- modes


def train_mode(exam: Examination) -> None:
    """In train mode the model differs by randomness alone."""
    called, model = exam.called, exam.called.model
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        exam.skip("train-mode", "batch norm uses the batch in train mode")
        return
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    try:
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(called.answer(exam.inputs))
    finally:
        model.eval()
        for name, buffer in model.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])
    if found[0].shape != exam.base.shape:
        exam.skip("train-mode", "it returns another shape in train mode")
        return
    first, second = exam.gap(found[0], exam.base), exam.gap(found[0], found[1])
    rates = sum(m.p for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd))
    if second.is_rounding and not first.is_rounding:
        fault = "train mode differs from evaluation without randomness"
        exam.failed(
            "train-mode",
            "train-mode-differs",
            Severity.FRAGILE,
            fault,
            "Look for self.training.",
            f"by {first.size:.2g}",
            first,
        )
        return
    if not second.is_rounding and not rates:
        exam.note("random-training", "it is random in train mode, though no nn.Dropout has p > 0")
    exam.passed("train-mode")


def bfloat16(exam: Examination) -> None:
    """In bfloat16 the model differs from float32 by rounding in bfloat16."""
    called = exam.called
    if called.floats() != torch.float32:
        exam.skip("bfloat16", f"the model is of {str(called.floats()).removeprefix('torch.')}")
        return
    limit = limit_of(called.model)
    lengths = {}
    if called.streams and called.has_positions and len(called.streams) == 1:
        lengths = {called.stream.name: LONG if limit is None else min(limit, LONG)}
    inputs = called.draw(1, lengths)
    try:
        wanted = called.answer(inputs)
    except Exception:  # its limit is smaller than its config says
        inputs = called.draw(1)
        wanted = called.answer(inputs)
    model = called.model
    try:
        low = copy.deepcopy(model).to(torch.bfloat16)
        called.model = low
        rounded = {name: v.to(torch.bfloat16) if v.is_floating_point() else v for name, v in inputs.items()}
        found = called.answer(rounded)
        noise = max(rounding(called.answer, low, rounded, found, seed=seed) for seed in range(2))
    finally:
        called.model = model
    if not found.isfinite().all():
        exam.failed("bfloat16", "bfloat16-not-finite", Severity.WRONG, "NaN or infinity in bfloat16")
        return
    gap = compare(found, wanted, noise)
    if gap.is_rounding:
        exam.passed("bfloat16")
        return
    share = gap.size / wanted.abs().max().item()
    witness = f"by {gap.size:.2g}, {share:.0%} of the largest output; rounding explains {gap.allowed:.2g}"
    fault = "bfloat16 differs from float32 by more than rounding"
    advice = "Keep positions, angles, norms and the softmax in float32."
    exam.failed("bfloat16", "bfloat16-differs", Severity.FRAGILE, fault, advice, witness, gap)


def compiled(exam: Examination) -> None:
    """``torch.compile`` changes nothing."""
    called, model = exam.called, exam.called.model
    try:
        called.model = torch.compile(model, backend="aot_eager", dynamic=False)  # type: ignore[assignment]
        found = called.answer(exam.inputs)
    except Exception as error:
        exam.failed("compile", "compile-raises", Severity.FRAGILE, "torch.compile raises", witness=said(error))
        return
    finally:
        called.model = model
        torch.compiler.reset()
    gap = exam.gap(found, exam.base)
    if gap.is_rounding:
        exam.passed("compile", gap)
    else:
        exam.failed(
            "compile", "compile-differs", Severity.WRONG, "the compiled model differs", witness=f"by {gap.size:.2g}", gap=gap
        )
