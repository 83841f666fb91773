"""``twin`` compares two implementations of a model with the same weights, and explains why they differ."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.model_interface import CalledModel, CannotBeCalledError, keep_mask, make_called
from minitx.check.port_mistakes import CATALOGUE, MEASURED, Pair
from minitx.check.properties import Gap, compare, rounding
from minitx.check.results import Check, Finding, Report, Severity, Status
from minitx.check.tensor_trace import Change, Trace, Wide, matched

State = Mapping[str, Tensor]
LENGTHS = (23, 29, 19, 17, 13, 11, 7, 5, 53, 101, 211)
"""Numbers of tokens to try: primes, because few other sizes of a model are primes."""

MOST = 8
"""The largest number of mistakes that are named."""

UNFIT = (RuntimeError, ValueError, LookupError, TypeError, AttributeError)
"""Errors of a change that does not fit the model."""

MASKS = {
    "mask-polarity": "has the other polarity",
    "mask-ignored": "is ignored",
    "mask-positions": "moves positions, unlike in the reference",
    "mask-differs": "hides other keys",
}
"""Findings with hidden tokens, tried in this order."""


def _as_module(function: Any, vocabulary: int) -> nn.Module:
    parts = {"forward": lambda self, ids: function(ids), "config": {"vocab_size": vocabulary}}
    return type(getattr(function, "__name__", "Function"), (nn.Module,), parts)()


def twin(
    mine: nn.Module | Callable[[Tensor], Any],
    reference: nn.Module | Callable[[Tensor], Any],
    ids: Tensor | None = None,
    *,
    weights: Callable[[dict[str, Tensor]], State] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    repeat: str = "",
) -> Report:
    """Compare a port with its reference. If they differ, find the change of the reference that reproduces the port's numbers.

    Both are copied and called with the same tokens, in float64 if possible. Each tensor of one call is looked up in the other call, in
    any layout. Where the port differs, changes of a catalogue are tried on the reference, with numbers measured in both calls. A change
    is named if further tensors of the port then equal the reference's to rounding. It stays, and the rest is compared, so that a
    second mistake is found, too.

    Args:
        mine: a model, or a function from ids (B, L) to logits (B, L, V).
        reference: the same.
        ids: int (B, L). Default: two random rows.
        weights: a function from the reference's state dict to the port's. Default: the reference's weights if the names are
            equal; otherwise both models keep their weights.
        seed: the seed of the tokens, and of the noise that replaces constant weights. device: the device of the copies.
        repeat: the command that repeats the report.

    Returns:
        A report. Its ``exit_code`` is 0 if the outputs are equal to rounding, 1 if they differ, and 2 if a model cannot be called.

    Raises:
        ValueError: the weights do not fit, or ``ids`` has another shape.
    """
    modules = [m for model in (mine, reference) if isinstance(model, nn.Module) for m in model.modules()]
    sizes = [m.num_embeddings for m in modules if isinstance(m, nn.Embedding)] + [50 if ids is None else int(ids.max()) + 1]
    models = [model if isinstance(model, nn.Module) else _as_module(model, sizes[0]) for model in (mine, reference)]
    models = [getattr(model, "_orig_mod", model) for model in models]  # of torch.compile
    names = [type(model).__name__ for model in models]
    with torch.random.fork_rng(), torch.no_grad(), warnings.catch_warnings(action="ignore"), ExitStack() as wide:
        torch.manual_seed(seed)
        try:
            port, ours = _called(models, seed, device, wide)
        except CannotBeCalledError as faults:
            finding = Finding("cannot-be-called", Severity.FRAGILE, "no way to call the models was found", "", str(faults))
            return Report(names[0], "", seed, (Check("outputs", Status.NOT_TRIED, "a model cannot be called"),), (finding,))
        for name, called in zip(names, (port, ours), strict=True):
            if len(called.streams) != 1 or called.stream.width is not None:
                raise ValueError(f"{name} must read ids (B, L) and nothing else")
        _load(port, ours, models, weights, seed)
        comparison = _Comparison(port, ours, _tokens(port, ours, ids), repeat)
        comparison.explain()
        comparison.with_mask()
    called_as = f"{port.describe()}; the reference is {names[1]}"
    return Report(names[0], called_as, seed, tuple(comparison.checks), tuple(comparison.findings))


def _called(models: Sequence[nn.Module], seed: int, device: Any, wide: ExitStack) -> list[CalledModel]:
    """Find out how to call copies of the models, in float64 if possible."""
    try:
        wide.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        wide.enter_context(Wide())
        return [make_called(model, seed, device, torch.float64) for model in models]
    except CannotBeCalledError:
        wide.close()
        return [make_called(model, seed, device, torch.float32) for model in models]


def _load(port: CalledModel, ours: CalledModel, models: Sequence[nn.Module], weights: Any, seed: int) -> None:
    """Give the port the weights of the reference."""
    own, state = (model.state_dict() for model in models)
    if weights is None and (own.keys() != state.keys() or not own):
        sums = [{f"{p.numel()} {p.double().abs().sum():.4g}" for p in side.values() if p.dim() > 1} for side in (own, state)]
        if own and state and not sums[0] & sums[1]:
            raise ValueError(f"the models have no weight in common; {_names(own, state)}; name a function with weights=")
        for called, model in zip((port, ours), models, strict=True):
            called.model.load_state_dict(model.state_dict())  # weights of zero stay zero
        return
    generator = torch.Generator().manual_seed(seed)
    for parameter in ours.model.parameters():
        if parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all():  # a constant hides where it is used
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)
    own, new = port.model.state_dict(), dict(ours.model.state_dict())
    new = new if weights is None else dict(weights(new))
    known = {own[name].data_ptr() for name in new if name in own} | {buffer.data_ptr() for buffer in port.model.buffers()}
    needed = {name: p for name, p in own.items() if name in new or p.data_ptr() not in known}
    if needed.keys() != new.keys():
        raise ValueError(f"the weights do not fit {type(models[0]).__name__}; {_names(needed, new)}")
    for name, tensor in new.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"{name} must have shape {tuple(own[name].shape)}, got {tuple(tensor.shape)}")
    port.model.load_state_dict(new, strict=False)


def _names(own: State, given: State) -> str:
    parts = {"missing": [n for n in own if n not in given], "unexpected": [n for n in given if n not in own]}
    return "; ".join(f"{word}: {', '.join(names[:3])}" + ", …" * (len(names) > 3) for word, names in parts.items() if names)


def _tokens(port: CalledModel, ours: CalledModel, ids: Tensor | None) -> Tensor:
    """Two rows of ids, or the given rows."""
    if ids is not None:
        if ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < 3:
            raise ValueError(f"ids must be int (B, L) with L of 3 or more, got {ids.dtype} {tuple(ids.shape)}")
        ids = ids if len(ids) > 1 else torch.cat((ids, ids.roll(1, 1)))  # two rows tell tokens from positions
        return ids.to(port.device)
    sizes = {size for called in (port, ours) for p in called.model.parameters() for size in p.shape}
    limit = min(called.limit or 10**9 for called in (port, ours)) - 2
    fits = [n for n in LENGTHS if n <= limit and n not in sizes] or [limit]
    length = next((n for n in fits if n > (getattr(ours.config, "sliding_window", None) or 0) + 1), fits[0])
    usable = min(port.usable, ours.usable, key=len)
    return usable[torch.randint(len(usable), (2, length), generator=port.generator)].to(port.device)


def _answer(called: CalledModel, tokens: Tensor, keep: Tensor | None = None, **options: Any) -> Tensor:
    name = called.stream.name
    return called.answer({name: tokens}, None if keep is None else {name: keep}, **options)


class _Comparison:
    """The port's call, and calls of the reference with changes."""

    def __init__(self, port: CalledModel, ours: CalledModel, tokens: Tensor, repeat: str) -> None:
        self.port, self.ours, self.tokens, self.repeat = port, ours, tokens, repeat
        self.checks, self.findings, self.changes = list[Check](), list[Finding](), list[Change]()
        self.target = Trace(port.model, partial(_answer, port, tokens), tokens)
        self.noise = rounding(ours.answer, ours.model, {ours.stream.name: tokens})

    def trace(self, changes: Sequence[Change], keep: Tensor | None = None, **options: Any) -> Trace:
        call = partial(_answer, self.ours, self.tokens, keep, **options)
        return Trace(self.ours.model, call, self.tokens, changes)

    def gap(self, trace: Trace) -> Gap:
        return compare(self.target.output, trace.output, self.noise)

    def explain(self) -> None:
        """Name changes until the outputs are equal."""
        current, L = self.trace(()), self.tokens.shape[1]
        if current.output.shape != self.target.output.shape:
            shapes = tuple(self.target.output.shape), tuple(current.output.shape)
            raise ValueError(f"the outputs must have the same shape, got {shapes[0]} and {shapes[1]}")
        if not (current.steps and self.target.steps):
            raise ValueError("an output is the same for all tokens: there is nothing to compare")
        for called, word in ((self.port, "port"), (self.ours, "reference")):
            once, again = (_answer(called, self.tokens) for _ in range(2))
            if not (gap := compare(again, once, 0.0)).is_rounding:
                advice = "In evaluation, F.dropout needs training=self.training, and attention dropout_p=0."
                self.find(
                    "random", f"two calls of the {word} with the same inputs differ", self.size(gap, again - once), advice
                )
                self.checks.append(Check("outputs", Status.NOT_TRIED, f"the {word} is random"))
                return
        self.check("outputs", self.gap(current))
        if (window := getattr(self.ours.config, "sliding_window", None) or 0) + 1 >= L:
            reason = f"the rows have {L} tokens, the window {window}: give longer ids"
            self.checks.append(Check("window", Status.NOT_TRIED, reason))
        named: dict[tuple[str, str], str] = {}
        while not self.gap(current).is_rounding and len(named) < MOST and (best := self.best(current)) is not None:
            change, after = best
            named.setdefault((change.id, change.text), self.witness(current, after))
            self.changes.append(change)
            current = after
        is_whole = self.gap(current).is_rounding
        end = "this change" if len(named) == 1 else f"all {len(named)} changes"
        advice = f"The reference with {end} equals the port to rounding." if is_whole else "Other differences remain."
        for (id, text), witness in named.items():
            self.find(id, text, witness, advice)
        if not is_whole:
            text = f"no change in the catalogue reproduces the {'remaining ' * bool(named)}difference"
            self.find("not-named", text, self.witness(current, None))

    def best(self, current: Trace) -> tuple[Change, Trace] | None:
        """Return the change that makes most further tensors equal, and the call with it."""
        pair, best, most = Pair(self.target, current, self.ours.model), None, 0
        for generate in CATALOGUE:
            with contextlib.suppress(*UNFIT):
                for change in generate(pair):
                    try:
                        trace = self.trace([*self.changes, change])
                    except UNFIT:
                        continue
                    now = matched(self.target.steps, trace.steps)
                    gain = int((now & ~pair.is_matched).sum()) - 10 * int((pair.is_matched & ~now).sum())
                    if self.gap(trace).is_rounding:
                        return change, trace
                    if gain > most:
                        best, most = (change, trace), gain
            if best is not None and generate in MEASURED:
                break
        return best

    def witness(self, before: Trace, after: Trace | None) -> str:
        """Return the first module that differs, the size, and the first token."""
        steps = self.target.steps
        was = matched(steps, before.steps).tolist()
        if after is None:  # the first without an equal, after the last with one
            fresh = steps[max([-1, *(number for number, is_equal in enumerate(was) if is_equal)]) + 1 :]
        else:
            now = matched(steps, after.steps).tolist()
            fresh = [step for step, old, new in zip(steps, was, now, strict=True) if new and not old]
        step = next((step for step in fresh if step.kind in ("in", "out")), (fresh or steps[-1:])[0])
        name = type(self.port.model.get_submodule(step.path)).__name__
        place = (f"{step.path} ({name})" if step.path else name) + (f", before {step.key}" if step.kind == "in" else "")
        return f"first module: {place}; {self.size(self.gap(before), self.target.output - before.output)}"

    def size(self, gap: Gap, difference: Tensor) -> str:
        """Return the largest difference, and the first token with one."""
        row, moved = gap.place[0], difference.abs() > gap.allowed
        first = int(moved[row].flatten(1).any(-1).int().argmax()) if moved.dim() > 2 else 0
        return f"outputs differ by {gap.size:.2g} (rounding: {gap.allowed:.1g}), in row {row} from token {first} on"

    def check(self, id: str, gap: Gap) -> None:
        status = Status.PASSED if gap.is_rounding else Status.FAILED
        self.checks.append(Check(id, status, "", gap.size, gap.allowed))

    def find(self, id: str, text: str, witness: str, advice: str = "", severity: Severity = Severity.WRONG) -> None:
        self.findings.append(Finding(id, severity, text, advice, witness, self.repeat))

    def with_mask(self) -> None:
        """Compare once more with hidden tokens."""
        if any(found.id in ("not-named", "random", "visible") for found in self.findings):
            return
        port, ours, tokens = self.port, self.ours, self.tokens
        for called in (port, ours):
            called.find_forms({called.stream.name: tokens})
        if reasons := [called.stream.why_unmasked for called in (port, ours) if called.stream.form is None]:
            self.checks.append(Check("mask", Status.NOT_TRIED, reasons[0]))
            return
        for hidden in (slice(1, 3), slice(0, 2)):  # inside, and on the left
            keep = keep_mask(tokens, hidden).to(tokens.device)
            places = {"position_ids": (keep.cumsum(-1) - 1).clamp(min=0)} if "position_ids" in ours.arguments.names else {}
            given, inverted, plain = (_answer(port, tokens, mask) for mask in (keep, ~keep, None))
            expected, moved = (self.trace(self.changes, keep, **options).output for options in ({}, places))
            sides = (given, expected), (inverted, expected), (given, plain), (given, moved)
            gaps = [compare(*side, self.noise, keep) for side in sides]
            if gaps[0].is_rounding:
                break
        id = next((id for id, gap in zip(("", *MASKS), gaps, strict=False) if gap.is_rounding), "mask-differs")
        self.check("mask", gaps[3 if id == "mask-positions" else 0])
        if id:
            severity = Severity.NOTE if id == "mask-positions" else Severity.WRONG
            witness = self.size(gaps[0], (given - expected) * keep.unsqueeze(-1))
            self.find(id, f"{port.stream.mask} {MASKS[id]}", witness, severity=severity)
