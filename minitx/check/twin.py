"""``twin`` compares two implementations of a model with the same weights, and explains why they differ."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.called_model import CalledModel, CannotBeCalledError, find_forms, limit_of, make_called
from minitx.check.properties import Gap, compare, rounding
from minitx.check.results import Check, Finding, Report, Severity, Status
from minitx.check.tensor_trace import Change, Trace, Wide, matched
from minitx.check.twin_changes import CATALOGUE, Pair

State = Mapping[str, Tensor]
LENGTHS = (23, 29, 19, 17, 13, 11, 7, 5)
"""Numbers of tokens: primes, so that no other size of a model is one."""
MOST = 8
"""The largest number of mistakes that are looked for."""


class _Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, ids: Tensor) -> Any:
        return self.function(ids)


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

    Both are copied and called in float64 with the same tokens. Each tensor of one call is looked up in the other call, in any layout.
    Where the port differs, changes of a catalogue are tried on the reference, with numbers measured in both calls. A change is named if
    further tensors of the port then are those of the reference to rounding. It stays, and the rest is compared, so that a second mistake
    is found, too.

    Args:
        mine: a model, or a function from ids (B, L) to logits (B, L, V).
        reference: the same.
        ids: int (B, L). Default: two random rows.
        weights: a function from the state dict of the reference to that of the port. Default: the names are equal. If they are not, the
            models must have the same weights already.
        seed: the seed of the tokens and of the noise for weights that are constant. device: the device of the copies.
        repeat: the command that repeats the report.

    Returns:
        A report. Its ``exit_code`` is 0 if the outputs are equal to rounding, 1 if they differ, and 2 if they cannot be compared.

    Raises:
        ValueError: the weights do not fit, or ``ids`` has another shape.
    """
    names = [getattr(model, "__name__", type(model).__name__) for model in (mine, reference)]
    models = [model if isinstance(model, nn.Module) else _Function(model) for model in (mine, reference)]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        torch.manual_seed(seed)
        wide = ExitStack()
        stack.enter_context(wide)
        try:
            wide.enter_context(Wide())
            port, ours = (make_called(model, seed, device, torch.float64) for model in models)
        except CannotBeCalledError:
            wide.close()
            try:
                port, ours = (make_called(model, seed, device, torch.float32) for model in models)
            except CannotBeCalledError as faults:
                finding = Finding("cannot-be-called", Severity.FRAGILE, "no way to call the models was found", "", str(faults))
                return Report(names[0], "", seed, (), (finding,))
        _load(port, ours, models, weights, seed)
        tokens = _tokens(port, ours) if ids is None else _two_rows(ids).to(port.device)
        comparison = _Comparison(port, ours, tokens)
        comparison.explain()
        comparison.with_mask()
    called_as = f"{port.describe()}, like {names[1]}"
    findings = [Finding(f.id, f.severity, f.fault, f.advice, f.witness, repeat) for f in comparison.findings]
    return Report(names[0], called_as, seed, tuple(comparison.checks), tuple(findings))


# --- weights and tokens


def _load(port: CalledModel, ours: CalledModel, models: list[nn.Module], weights: Any, seed: int) -> None:
    """Give the port the weights of the reference."""
    state, own = models[1].state_dict(), models[0].state_dict()
    if weights is None and own and own.keys() != state.keys():
        sums = [{(p.numel(), f"{float(p.double().abs().sum()):.5g}") for p in s.values() if p.dim() > 1} for s in (own, state)]
        if state and not sums[0] & sums[1]:
            raise ValueError(f"the weights of the models have other names{_names(own, state)}; write a function for weights=")
    if weights is None and (own.keys() != state.keys() or not own):
        for called, model in ((port, models[0]), (ours, models[1])):
            called.model.load_state_dict(model.state_dict())  # zeros stay zeros
        return
    generator = torch.Generator().manual_seed(seed)
    for parameter in ours.model.parameters():
        if parameter.numel() > 1 and (parameter == parameter.flatten()[0]).all():  # constants would hide what they are used for
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * 0.1)
    state = dict(ours.model.state_dict())
    new = state if weights is None else dict(weights(state))
    own = port.model.state_dict()
    buffers = {name for name, _ in port.model.named_buffers()}
    places = {own[name].data_ptr() for name in new if name in own}
    missing = {name: own[name] for name in own if name not in new and name not in buffers and own[name].data_ptr() not in places}
    if missing or new.keys() - own.keys():
        raise ValueError(f"the weights do not fit the port{_names(missing | {n: own[n] for n in own if n in new}, new)}")
    for name, tensor in new.items():
        if tensor.shape != own[name].shape:
            raise ValueError(f"{name} must have shape {tuple(own[name].shape)}, got {tuple(tensor.shape)} from weights=")
        own[name].copy_(tensor)


def _names(own: State, given: State) -> str:
    parts = {"missing": [n for n in own if n not in given], "unexpected": [n for n in given if n not in own]}
    return "".join(f"; {word}: {', '.join(names[:3])}" + " …" * (len(names) > 3) for word, names in parts.items() if names)


def _tokens(port: CalledModel, ours: CalledModel) -> Tensor:
    """Two rows of random ids."""
    sizes = {size for called in (port, ours) for p in called.model.parameters() for size in p.shape}
    limit = min(limit_of(called.model) or 10**9 for called in (port, ours))
    window = getattr(ours.config, "sliding_window", None) or 0
    lengths = [n for n in ((*LENGTHS, 53, 101, 211) if window < 200 else LENGTHS) if n <= limit - 2 and n not in sizes]
    length = next((n for n in lengths if n > window + 1), lengths[0])
    usable = min(port.usable, ours.usable, key=len) if len(ours.model.state_dict()) and len(port.model.state_dict()) else (
        ours.usable if len(ours.model.state_dict()) else port.usable
    )
    return usable[torch.randint(len(usable), (2, length), generator=port.generator)].to(port.device)


def _two_rows(ids: Tensor) -> Tensor:
    if ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < 2:
        raise ValueError(f"ids must be int (B, L) with L of 2 or more, got {ids.dtype} {tuple(ids.shape)}")
    return ids if len(ids) > 1 and not torch.equal(ids[0], ids[-1]) else torch.cat((ids, ids[-1:].roll(1, 1)))


# --- comparison


class _Comparison:
    """The port's call, and calls of the reference with changes."""

    def __init__(self, port: CalledModel, ours: CalledModel, tokens: Tensor) -> None:
        self.port, self.ours, self.tokens = port, ours, tokens
        self.checks: list[Check] = []
        self.findings: list[Finding] = []
        self.changes: list[Change] = []
        self.target = Trace(port.model, lambda: port.answer({port.stream.name: tokens}), tokens)
        inputs = {ours.stream.name: tokens}
        self.noise = rounding(ours.answer, ours.model, inputs)

    def trace(self, changes: list[Change]) -> Trace:
        ours = self.ours
        return Trace(ours.model, lambda: ours.answer({ours.stream.name: self.tokens}), self.tokens, changes)

    def gap(self, trace: Trace) -> Gap:
        return compare(self.target.output, trace.output, self.noise)

    def explain(self) -> None:
        """Look for changes until the outputs are equal."""
        first = current = self.trace([])
        gap = self.gap(current)
        status = Status.PASSED if gap.is_rounding else Status.FAILED
        self.checks.append(Check("outputs", status, "" if gap.is_rounding else "they differ", gap.size, gap.allowed))
        named: list[tuple[Change, Trace, Trace]] = []
        while not self.gap(current).is_rounding and len(named) < MOST:
            best = self._best(current)
            if best is None:
                break
            named.append((best[0], current, best[1]))
            self.changes.append(best[0])
            current = best[1]
        rest = self.gap(current)
        for number, (change, before, after) in enumerate(named):
            is_last = number == len(named) - 1 and rest.is_rounding
            end = "the reference with this change equals the port to rounding" if is_last else "other differences remain"
            others = f"with the changes of all {len(named)} findings, " if is_last and number else ""
            self.findings.append(
                Finding(change.id, Severity.WRONG, change.text, others + end, self._witness(before, after))
            )
        if not rest.is_rounding:
            text = "no change of the catalogue reproduces the " + ("rest of the difference" if named else "difference")
            self.findings.append(Finding("not-named", Severity.WRONG, text, "", self._witness(current, None)))
        del first

    def _best(self, current: Trace) -> tuple[Change, Trace] | None:
        """Return the change that makes most further tensors equal, and its call."""
        pair = Pair(self.target, current, self.ours.model)
        best, most = None, 0
        for generate in CATALOGUE:
            for change in generate(pair):
                try:
                    trace = self.trace([*self.changes, change])
                except (RuntimeError, ValueError, IndexError, TypeError):  # a change that does not fit the model
                    continue
                now = matched(self.target.steps, trace.steps)
                gained, lost = now & ~pair.is_matched, pair.is_matched & ~now
                gain = int(gained.sum()) - 10 * int(lost.sum())
                if gain > most:
                    best, most = (change, trace), gain
                if self.gap(trace).is_rounding:
                    return change, trace
            if best is not None and any(step.is_module for step, new in zip(self.target.steps, now, strict=True) if new):
                pass
        return best

    def _witness(self, before: Trace, after: Trace | None) -> str:
        """Return where the port first differs, by how much, and for which token."""
        was = matched(self.target.steps, before.steps)
        now = torch.ones_like(was) if after is None else matched(self.target.steps, after.steps)
        fresh = [step for step, old, new in zip(self.target.steps, was.tolist(), now.tolist(), strict=True) if new and not old]
        if after is None:  # the first without an equal, after the last with one
            last = max([0, *was.nonzero().flatten().tolist()])
            fresh = [step for step, old in zip(self.target.steps[last:], was[last:].tolist(), strict=True) if not old]
        step = next((step for step in fresh if step.is_module), fresh[0])
        module = dict(self.port.model.named_modules())[step.path]
        text = f"first module: {step.path} ({type(module).__name__})" if step.path else f"first module: {type(module).__name__}"
        if step.kind == "in":
            text += f", before {step.key}"
        gap = self.gap(before)
        row, token = gap.place[:2]
        moved = (self.target.output - before.output).abs().amax(-1)
        token = int((moved[row] > gap.allowed).nonzero().flatten()[:1].sum()) if moved.dim() > 1 else token
        return f"{text}; the outputs differ by {gap.size:.2g} (rounding: {gap.allowed:.1g}), first at row {row}, token {token}"

    def with_mask(self) -> None:
        """Compare once more with hidden tokens."""
        if any(not finding.id for finding in self.findings) or any(f.id == "not-named" for f in self.findings):
            return
        if any(change.id == "visible" for change in self.changes):
            self.checks.append(Check("mask", Status.NOT_TRIED, "a token sees other keys without a mask, too"))
            return
        for called in (self.port, self.ours):
            called.streams = tuple(called.streams)
            find_forms(called, {called.stream.name: self.tokens})
        if any(called.stream.form is None for called in (self.port, self.ours)):
            reason = next(c.stream.why_unmasked for c in (self.port, self.ours) if c.stream.form is None)
            self.checks.append(Check("mask", Status.NOT_TRIED, reason))
            return
        keep = torch.ones(self.tokens.shape, dtype=torch.bool, device=self.tokens.device)
        keep[-1, 1:3] = False

        def port(keep: Tensor) -> Tensor:
            return self.port.answer({self.port.stream.name: self.tokens}, {self.port.stream.name: keep})

        ours, target = self.ours, self.ours.stream.name
        expected = Trace(
            ours.model, lambda: ours.answer({target: self.tokens}, {target: keep}), self.tokens, self.changes
        ).output
        gap = compare(port(keep), expected, self.noise, keep)
        self.checks.append(Check("mask", Status.PASSED if gap.is_rounding else Status.FAILED, "", gap.size, gap.allowed))
        if gap.is_rounding:
            return
        name, place = self.port.stream.mask, f"row {gap.place[0]}, token {gap.place[1]}: {gap.size:.2g} (rounding: {gap.allowed:.1g})"
        plain = self.port.answer({self.port.stream.name: self.tokens})
        if compare(port(~keep), expected, self.noise, keep).is_rounding:
            self.findings.append(Finding("mask-polarity", Severity.WRONG, f"{name} has the other polarity", "", place))
        elif compare(port(keep), plain, self.noise, keep).is_rounding:
            self.findings.append(Finding("mask-ignored", Severity.WRONG, f"{name} is ignored", "", place))
        else:
            self.findings.append(Finding("mask-differs", Severity.WRONG, f"{name} hides other keys or moves positions", "", place))
