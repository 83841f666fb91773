"""The state of one check of a model: measurements, checks and findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.calling import NotTriedError, fault_text, is_own, is_refusal, tensors_of
from minitx.check.model_interface import CalledModel, Stream, draws_by_itself, keep_mask
from minitx.check.properties import FACTOR, Gap, compare, rounding, unit
from minitx.check.results import FAILED, FRAGILE, NOT_TRIED, NOTE, PASSED, WRONG, Check, Finding, Severity, Status, finding

SHARE = 0.1
"""If rounding moves the output by more than this share of the effect of a visible token, equal outputs prove nothing."""


FAR_SHARE = 2.0
"""If far tokens move outputs by this multiple of near tokens, the report says so. Random weights without a distance bias give 0.7 to 1.7."""

LONG = 130
"""The number of tokens of a long row: more than two blocks of 64, and more than many windows."""


class StopError(Exception):
    """Nothing more can be tried. The message is the reason."""


class FailedError(Exception):
    """A check failed: the key of the finding, the gap or None, and the words of the finding."""


class Examination:
    """One check of one model.

    Attributes:
        word: the property that is checked now.
        inputs: random rows. base: the output for them. noise: the largest change of the output by rounding.
        turned: streams whose mask has the opposite meaning of its name.
        expect: the caller's argument. repeat: the command that repeats a check, with a place for its options.
        taken_as: a description of the positions that a token sees, and the reason. "": not examined.
    """

    def __init__(self, called: CalledModel, seed: int, expect: str, repeat: str) -> None:
        self.called, self.seed, self.expect, self.repeat = called, seed, expect, repeat
        self.taken_as = ""
        self.checks: list[Check] = []
        self.findings: list[Finding] = []
        self.word = "call"
        self.inputs: dict[str, Tensor] = {}
        self.base = torch.empty(0)
        self.noise = 0.0
        self.is_measured, self.are_rows_apart = False, True
        self.turned: list[str] = []

    def begin(self) -> None:
        """Draw inputs, and find the form of the masks.

        Raises:
            StopError: the output is not finite.
        """
        called = self.called
        self.inputs = called.draw()
        self.base = called.answer(self.inputs)
        if not self.base.isfinite().all():
            self.failed("call/finite", "not-finite")
            raise StopError("the output is not finite")
        self.passed("call/finite")
        called.find_forms(self.inputs)
        if called.changed:
            self.failed("call/inputs", "changes-inputs", name=min(called.changed))

    def measure(self) -> None:
        """Measure the noise, and find the meaning of the masks.

        Raises:
            StopError: two calls differ, or the tokens have no effect.
        """
        called = self.called
        again = compare(called.answer(self.inputs), self.base, 0.0)
        if not again.is_rounding:
            call = self.answers(self.inputs)
            key = "random-by-itself" if draws_by_itself(call) else "random"
            self.judge("determinism", again, key, call, call, self.whole, training="training=self.training")
            raise StopError(self.findings[-1].fault)
        self.noise = max(rounding(called.answer, called.model, self.inputs, self.base, seed=seed) for seed in range(3))
        if called.streams:
            others = called.others(self.inputs, called.stream.name, self.places >= 0)
            if self.gap(called.answer(others), self.base).is_rounding:
                self.failed("call/effect", "no-effect", name=called.stream.name)
                raise StopError("the output does not depend on the tokens")
        self._settle_layout()
        self._settle_meanings()
        self.is_measured = True

    def _settle_layout(self) -> None:
        """Take the tokens as (L, B) if the rows of (B, L) change each other, and the rows of (L, B) do not.

        Ids whose order along the first axis does not matter are (B, L): in a model of (L, B), the order of tokens matters.
        """
        called, shape = self.called, self.base.shape[:2]
        if len(called.streams) != 1 or not called.has_positions or self.other_row()[0].is_rounding:
            return
        flipped = called.answer({name: value.flip(0) for name, value in self.inputs.items()}).flip(0)
        if called.stream.width is None and self.gap(flipped, self.base).is_rounding:
            return
        other = replace(called, is_length_first=True)
        other.find_forms(self.inputs)
        if self._takes(other, lambda: self.base.shape[:2] == shape and self.other_row()[0].is_rounding):
            self.note("length-first", NOTE if called.stream.width else FRAGILE)

    def _settle_meanings(self) -> None:
        """Invert the meaning of a mask if only the other meaning hides tokens."""
        for stream in self.called.streams:
            if stream.form is not None and not self.hides(stream):
                other = self.called.with_form(stream, replace(stream.form, hides=not stream.form.hides))
                self.turned += [stream.name] * self._takes(other, partial(self.hides, stream))

    def _takes(self, called: CalledModel, is_right: Callable[[], bool]) -> bool:
        """Call the model in another way if that is right. Return whether it is."""
        before = self.called, self.base
        with suppress(Exception):
            self.called, self.base = called, called.answer(self.inputs)
            if is_right():
                return True
        self.called, self.base = before
        return False

    def other_row(self) -> tuple[Gap, dict[str, Tensor]]:
        """Return the gap in the other rows if row 1 is another row, and the inputs with that row."""
        others, still = self.called.draw(), self.whole.clone()
        changed = {name: torch.cat((value[:1], others[name][1:2], value[2:])) for name, value in self.inputs.items()}
        still[1] = False
        return self.gap(self.called.answer(changed), self.base, still), changed

    def hides(self, stream: Stream) -> bool:
        """Return whether tokens that the mask hides on the left change nothing."""
        with suppress(Exception):
            keep = keep_mask(self.inputs[stream.name], slice(max(1, stream.length // 3)))
            first, gap = self.unseen(stream, keep, ~keep)
            return bool(first[self.still(stream, keep)].isfinite().all()) and gap.is_rounding
        return False

    def unseen(self, stream: Stream, keep: Tensor, changed: Tensor, **options: Any) -> tuple[Tensor, Gap]:
        """Return the output with the mask ``keep``, and its gap to the output with other tokens at ``changed``."""
        others = self.called.others(self.inputs, stream.name, changed)
        first, second = (self.called.answer(tokens, {stream.name: keep}, **options) for tokens in (self.inputs, others))
        return first, self.gap(second, first, self.still(stream, keep))

    def still(self, stream: Stream, keep: Tensor) -> Tensor:
        """Return the positions or rows at which the output must not move if hidden tokens of a stream change."""
        return keep if self.called.has_positions and stream.name == self.called.stream.name else self.whole

    # --- measurements

    @property
    def whole(self) -> Tensor:
        """All rows, or all rows and positions."""
        shape = self.base.shape[:2] if self.called.has_positions else self.base.shape[:1]
        return torch.ones(shape, dtype=torch.bool)

    @property
    def places(self) -> Tensor:
        """The place of each token of the last stream, (B, L)."""
        tokens = self.inputs[self.called.stream.name]
        return torch.arange(tokens.shape[1]).expand(tokens.shape[:2])

    @property
    def allowed(self) -> float:
        """The largest difference that rounding explains."""
        return FACTOR * (self.noise + unit(self.base.dtype) * self.base.abs().max().item())

    def gap(self, output: Tensor, expected: Tensor, where: Tensor | None = None, noise: float | None = None) -> Gap:
        """Compare two outputs. Rounding explains the measured noise. ``where``: bool (B, L), or (B,) for whole rows."""
        if where is not None and where.dim() == 1:
            where = where.unsqueeze(1).expand(output.shape[:2])
        if output.shape != expected.shape:
            return Gap(torch.inf, 0.0, (0,) * expected.dim())
        return compare(output, expected, self.noise if noise is None else noise, where)

    @cached_property
    def long(self) -> tuple[dict[str, Tensor], Tensor, float]:
        """One long row, the output for it, and the noise.

        Raises:
            NotImplementedError: the model does not read so many tokens.
        """
        called = self.called
        length = min(called.limit or LONG, LONG)
        inputs = called.draw(1, {called.stream.name: length})
        try:
            base = called.answer(inputs)
        except Exception as error:
            raise NotImplementedError(f"{length} tokens: {fault_text(error)}") from error
        return inputs, base, rounding(called.answer, called.model, inputs, base)

    @cached_property
    def influence(self) -> Tensor:
        """(L, L): the change of the output of token i when token j changes, the largest in two rows."""
        called, name = self.called, self.called.stream.name
        L = self.inputs[name].shape[1]
        result = torch.zeros(L, L)
        for row in (0, 1):
            single = {key: value[row : row + 1] for key, value in self.inputs.items()}
            many = {key: value.expand(L, *value.shape[1:]).contiguous() for key, value in single.items()}
            twins = called.others(many, name, torch.eye(L, dtype=torch.bool))
            both = {key: torch.cat((single[key], twins[key])) for key in many}
            parts = [both] if self.are_rows_apart else [{k: v[j : j + 1] for k, v in both.items()} for j in range(L + 1)]
            output = torch.cat([called.answer(part) for part in parts])
            size = (output[1:] - output[:1]).abs().flatten(2).amax(-1).float().cpu()  # (changed, position)
            result = torch.maximum(result, size.T)
        return result

    @cached_property
    def typical(self) -> float:
        """The median change of an output by a visible token."""
        if not self.called.streams:
            return self.base.abs().max().item()
        if not self.called.has_positions:
            changed = self.called.others(self.inputs, self.called.stream.name, self.places == 1)
            return (self.called.answer(changed) - self.base).abs().max().item()
        earlier = self.influence.tril(-1)
        moved = earlier[earlier > self.allowed]
        if not moved.numel():
            moved = self.influence[self.influence > self.allowed]
        return moved.median().item() if moved.numel() else 0.0

    @cached_property
    def intention(self) -> tuple[str, str]:
        """What is declared, a word of ``expect``, and by what. "": nothing is declared, so the model is only described."""
        if word := self.expect.removesuffix("relative").removesuffix(","):
            return word, "as declared"
        signs = self.called.decoder_signs()
        return "causal" * bool(signs), signs

    @property
    def severity(self) -> Severity:
        """The severity of a contradiction of ``intention``."""
        return WRONG if self.intention[0] else FRAGILE

    @cached_property
    def is_causal(self) -> bool:
        """Whether later tokens must change nothing. If nothing is declared: whether they change nothing, or much less than earlier tokens."""
        if self.intention[0]:
            return self.intention[0] != "bidirectional"
        seen = self.influence > self.allowed
        earlier, later = int(seen.tril(-1).sum()), int(seen.triu(1).sum())
        return len(self.called.streams) > 1 or later < earlier / 2 or not later

    def look(self) -> Tensor:
        """Return which token sees which, bool (L, L), and describe it in ``taken_as``."""
        seen, (word, reason) = self.influence > self.allowed, self.intention
        later = int(seen.triu(1).sum())
        blind = [(i, j) for i, j in (~seen).nonzero().tolist() if j < i or (j > i and not self.is_causal)]
        blind *= int(seen.sum() > seen.diagonal().sum())  # if it sees no other token at all, ``reach`` says so
        if not word and later:
            pairs = f"{later} pair{'s' * (later > 1)} of a token and a later token that it sees"
            word, reason = "bidirectional", f"{pairs}; expect=causal judges it"
        elif not word:
            word, reason = "causal", "no token sees a later token"
        self.describe(f"{word}: {reason}")
        if blind:
            i, j = max(blind, key=lambda pair: abs(pair[0] - pair[1]))
            self.describe(f"token {i} does not see token {j}, one of {len(blind)} such pairs, as with a window")
        elif (share := self._share_of_far_tokens()) > FAR_SHARE:
            bias = "as with a distance bias of the wrong sign"
            self.describe(f"far tokens move the output {share:.1f} times as much as near ones, {bias}")
        return seen

    def _share_of_far_tokens(self) -> float:
        """The effect of tokens far before an output, as a multiple of the effect of the two tokens before it."""
        rows = [(i, row) for i, row in enumerate(self.influence) if i >= max(4, len(self.influence) // 2)]
        shares = [row[: i - 2].mean() / row[i - 2 : i].mean() for i, row in rows]
        return torch.stack(shares).median().item() if shares else 0.0

    def describe(self, text: str) -> None:
        """Add to the description of the model in the first lines of the report."""
        if text not in self.taken_as:
            self.taken_as += f"; {text}" if self.taken_as else text

    @property
    def sees_later(self) -> bool:
        """Whether some token sees a later token."""
        return bool((self.influence.triu(1) > self.allowed).any())

    # --- checks and findings

    def record(self, id: str, status: Status, reason: str = "", gap: Gap | None = None) -> None:
        """Record the result of a check."""
        size, allowed = (None, None) if gap is None else (gap.size, gap.allowed)
        self.checks.append(Check(id, status, reason, size, allowed))

    def passed(self, id: str, gap: Gap | None = None) -> None:
        """Record a check that passed. If rounding would hide a mistake, it counts as not tried."""
        if gap is not None and gap.allowed > SHARE * self.typical:
            reason = f"rounding moves the output by up to {gap.allowed:.2g}, a visible token by {self.typical:.2g}"
            self.record(id, NOT_TRIED, reason, gap)
        else:
            self.record(id, PASSED, gap=gap)

    def skip(self, id: str, reason: str) -> None:
        """Record a check that was not tried."""
        self.record(id, NOT_TRIED, reason)

    def failed(self, check: str, key: str, gap: Gap | None = None, at: str = "", **words: Any) -> None:
        """Record a check that failed, and its finding in ``findings.toml``, with ``words`` in it. ``at``: the end of the witness."""
        found = finding(key, **{"severity": self.severity, "gap": gap, "exam": self} | words)
        self.record(check, FAILED, found.fault, gap)
        self._add(replace(found, witness=(found.witness + at).removeprefix("; "), repeat=self._repeat(check)))

    def note(self, key: str, severity: Severity | None = None, **words: Any) -> str:
        """Add a finding that fails no check, and return its text."""
        found = finding(key, severity, **words)
        self._add(found)
        return found.fault

    def _add(self, found: Finding) -> None:
        """Add a finding. The first with an id counts."""
        if all(found.id != other.id for other in self.findings):
            self.findings.append(found)

    def judge(self, check: str, gap: Gap, key: str, *calls: Any, explained_by: str = "", **words: Any) -> bool:
        """Record a comparison, and return whether it passed. If it failed, the finding ``key`` says why, unless another does.

        ``calls``: the arguments of ``where``. Its text ends the witness.
        """
        if gap.is_rounding:
            self.passed(check, gap)
        elif explained_by:
            self.record(check, FAILED, f"see {explained_by}", gap)
        else:
            self.failed(check, key, gap, at=self.where(*calls) if calls else "", **words)
        return gap.is_rounding

    def demand(self, condition: Any, key: str, gap: Gap | None = None, **words: Any) -> None:
        """Raise unless the condition holds. The check that runs then fails with the finding ``key``."""
        if not condition:
            raise FailedError(key, gap, words)

    def attempt(self, id: str, check: Callable[[str], Any]) -> None:
        """Run one check. It passes if it records nothing and raises nothing. A refusal, or an error of the check itself, is not a fault."""
        count = len(self.checks)
        try:
            check(id)
            if len(self.checks) == count and all(other.id != id for other in self.checks):
                self.passed(id)
        except StopError:
            raise
        except NotTriedError as reason:
            self.skip(id, str(reason))
        except FailedError as failure:
            key, gap, words = failure.args
            self.failed(id, key, gap, **words)
        except Exception as error:
            is_of_check = is_own(error)
            if is_of_check or is_refusal(error):
                self.skip(id, f"{'the check itself' if is_of_check else 'it'} raises {fault_text(error)}")
                return
            name = id.replace("-", " ").replace("/", ", ")
            self.failed(id, "raises-{part}", part=id.replace("/", "-"), name=name, error=fault_text(error))

    def where(self, calm: Callable[[], Any], moved: Callable[[], Any], *stills: Tensor) -> str:
        """Return the end of a sentence that names the first module that moves."""
        with suppress(Exception):  # a failing witness must not fail the check
            if module := first_moved(self.called.model, calm, moved, *stills):
                return f"; the first module that moves is {module}"
        return ""

    def answers(self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None) -> Callable[[], Tensor]:
        """Return a call for ``where``."""
        return lambda: self.called.answer(inputs, keep)

    def _repeat(self, id: str) -> str:
        word = id.partition("/")[0]
        word = self.word if word == "call" else word
        if "{}" in self.repeat:
            return self.repeat.format(f'only="{word}", seed={self.seed}')
        return f"{self.repeat} only={word} seed={self.seed}"


# --- where a change first shows


TINY = 64.0
"""The tolerance as a multiple of one rounding error. It can be small, because rows of one call are computed alike."""


ModuleCall = tuple[str, list[Tensor], list[Tensor]]
"""One call of a module: its name, and its floating-point inputs and outputs."""


def first_moved(model: nn.Module, calm: Callable[[], Any], moved: Callable[[], Any], *stills: Tensor) -> str:
    """Return the name and class of the first module that moves where it must not, or an empty string.

    Args:
        calm, moved: two calls of the model.
        stills: bool (B, L), the rows and positions that must not move, for each length L; or bool (B,), rows.
    """
    fallback = ""
    for (name, inputs, outputs), (other, *after) in zip(_calls(model, calm), _calls(model, moved), strict=False):
        if name != other:
            return fallback
        if name and _moves(outputs, after[1], stills):
            described = f"{name} ({type(model.get_submodule(name)).__name__})"
            if not _moves(inputs, after[0], stills):
                return described
            fallback = fallback or described
    return fallback


def _calls(model: nn.Module, call: Callable[[], Any]) -> list[ModuleCall]:
    """The calls of all modules, ordered by when they end."""
    calls: list[ModuleCall] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def end(module: nn.Module, args: Any, kwargs: Any, result: Any, name: str = name) -> None:
                calls.append((name, _float_tensors((args, kwargs)), _float_tensors(result)))

            hooks.enter_context(module.register_forward_hook(end, with_kwargs=True))
        call()
    return calls


def _float_tensors(value: Any) -> list[Tensor]:
    return [x.detach().clone() for x in tensors_of(value) if x.is_floating_point() and x.dim() >= 2]


def _moves(before: list[Tensor], after: list[Tensor], stills: Sequence[Tensor]) -> bool:
    return any(_moved(x, y, still) for x, y in zip(before, after, strict=False) for still in stills)


def _moved(x: Tensor, y: Tensor, still: Tensor) -> bool:
    x_still, y_still = _still_part(x, still), _still_part(y, still)
    if x_still.shape != y_still.shape or not x_still.numel():
        return False
    size = x.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    gap = (x_still - y_still).abs().nan_to_num(0.0).max().item()
    return gap > TINY * torch.finfo(x.dtype).eps * size


def _still_part(x: Tensor, still: Tensor) -> Tensor:
    """The rows and positions of (B, L, ...) or (B, H, L, ...), and nothing of other shapes."""
    if still.dim() > 1 and x.dim() >= 4 and x.shape[1] != still.shape[1]:
        x = x.transpose(1, 2)
    return x[still.to(x.device)] if x.shape[: still.dim()] == still.shape else x[:0]
