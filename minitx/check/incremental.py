"""Caches of models: pieces with a cache equal one call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minitx.check.called_model import CACHES, returned_cache
from minitx.check.calling import fault_text
from minitx.check.examination import Examination
from minitx.check.properties import Gap
from minitx.check.results import Severity


def cache(exam: Examination) -> None:
    """Pieces with a cache equal one call."""
    called = exam.called
    name = next((name for name in CACHES if name in called.names), None)
    if name is None or not called.streams or not called.has_positions:
        exam.skip("cache", "no argument for a cache was found")
        return
    if not exam.is_causal:
        exam.skip("cache", "the model is bidirectional")
        return
    learned_prompt = getattr(getattr(called.model, "active_peft_config", None), "is_prompt_learning", False)
    if called.prepended or learned_prompt:
        exam.skip("cache", "each call adds the virtual tokens again, with or without a cache")
        return
    L = called.stream.length
    random_cuts = sorted((torch.randperm(L - 1, generator=called.generator)[:3] + 1).tolist())
    pieces = _Pieces(exam, name)
    cuts = {"token-by-token": range(1, L), "prefill-then-tokens": range(L // 2, L), "pieces": random_cuts}
    for kind, places in cuts.items():
        exam.attempt(f"cache/{kind}", partial(pieces.compare, cuts=list(places)))
    exam.attempt("cache/cut-back", partial(pieces.compare, cuts=[L // 3, L - 2], what=f" that is cut back by {BACK} tokens"))
    exam.attempt("cache/long", partial(pieces.compare, cuts=[], what=" and a long row"))
    exam.attempt("cache/left-padding", partial(pieces.padded, cuts=[L // 2, L // 2 + 1, L - 3]))
    exam.attempt("cache/static", partial(pieces.static, cuts=[L // 2, L // 2 + 1]))


BACK = 3
"""The number of tokens by which a cache is cut back."""


class NoCacheError(ValueError):
    """The model returns no cache, or one that cannot be cut back."""


class WrongShapeError(RuntimeError):
    """The output of a piece has the wrong shape."""


class _Pieces:
    """Calls of a model piece by piece, with a cache."""

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
        back: int = 0,
        row: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Return the outputs of all pieces, joined. After the second piece, ``back`` tokens are removed and fed again."""
        called, inputs = self.exam.called, row or self.exam.inputs
        stream, tokens = called.stream, inputs[called.stream.name]
        B, L = tokens.shape[:2]
        cache = self._new(B, L) if cache is None else cache
        outputs, start = [], 0
        for end in [*cuts, L]:
            piece = {**inputs, stream.name: tokens[:, start:end].contiguous()}
            options: dict[str, Any] = {} if cache is None else {self.name: cache}
            if "use_cache" in called.names:
                options["use_cache"] = True
            masks = None
            if keep is not None:  # minitx's cache stores the earlier part of the mask
                masks = {stream.name: keep[:, (0 if self.make is None else start) : end]}
            options |= {key: value[:, start:end] for key, value in (extra or {}).items()}
            result = self._piece(piece, masks, options, keep, start, end)
            outputs.append(called.output(result, piece))
            if outputs[-1].shape[:2] != (B, end - start):
                shape = tuple(outputs[-1].shape)
                raise WrongShapeError(f"a piece of {end - start} tokens in {B} rows gives an output of shape {shape}")
            if self.make is None:
                cache = returned_cache(result, self.name)
                if cache is None:
                    raise NoCacheError("the model returns no cache")
            start = end
            if back and hasattr(cache, "activate_past_recording"):  # of transformers
                cache.activate_past_recording()
            if back and len(outputs) == 2:
                try:
                    cache.crop(-back)
                except (AttributeError, RuntimeError) as error:
                    raise NoCacheError(f"the cache cannot be cut back: {fault_text(error)}") from error
                outputs[-1], start = outputs[-1][:, :-back], end - back
        return torch.cat(outputs, 1)

    def _piece(
        self, piece: dict[str, Tensor], masks: Any, options: dict[str, Any], keep: Tensor | None, start: int, end: int
    ) -> Any:
        """Call the model once. Some models need the mask of all tokens so far, others the mask of the new tokens."""
        called = self.exam.called
        try:
            return called.run(piece, masks, **options)
        except (RuntimeError, ValueError):
            if keep is None or start == 0 or self.make is not None:
                raise
            return called.run(piece, {called.stream.name: keep[:, start:end]}, **options)

    def compare(self, id: str, cuts: Sequence[int], what: str = "") -> None:
        """Compare pieces with one call. Without ``cuts``, the row is long."""
        exam = self.exam
        row, expected, noise = (exam.inputs, exam.base, exam.noise) if cuts else exam.long
        L = expected.shape[1]
        cuts = cuts or [L // 2, L // 2 + 1, L - 1]
        output = self.run(cuts, back=BACK * ("cut back" in what), row=row)
        self._judge(id, exam.gap(output, expected, noise=noise), cuts, what)

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
        is_mild = "cut back" in what  # a recurrent state may not be meant to be cut back
        is_mild |= "long row" in what and not exam.intention[0]
        severity = Severity.FRAGILE if is_mild else Severity.WRONG
        exam.failed(id, f"cache-differs{what.replace(' ', '-').replace(',', '')}", severity, fault, advice, witness, gap)

    def padded(self, id: str, cuts: Sequence[int]) -> None:
        """Compare pieces with one call, with padding on the left of a row."""
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
            expected = called.answer(exam.inputs, {stream.name: keep}, **extra)
        except (ValueError, NotImplementedError):  # the model does not use positions
            extra, expected = {}, called.answer(exam.inputs, {stream.name: keep})
        output = self.run(cuts, keep, extra)
        self._judge(id, exam.gap(output, expected, keep), cuts, " and padding on the left")

    def static(self, id: str, cuts: Sequence[int]) -> None:
        """Compare pieces with one call, with the static cache of transformers."""
        exam = self.exam
        library = sys.modules.get("transformers")
        kind = getattr(library, "StaticCache", None)
        if kind is None or self.name != "past_key_values" or exam.called.config is None:
            return
        if len(exam.called.streams) > 1:
            exam.skip(id, "the cache of fixed size is not tried with encoder–decoders")
            return
        if getattr(exam.called.model, "_can_compile_fullgraph", True) is False:
            exam.skip(id, "the model does not support a cache of fixed size")
            return
        try:
            output = self.run(cuts, cache=kind(config=exam.called.config, max_cache_len=exam.called.stream.length + 3))
        except Exception as error:  # some architectures do not support it
            exam.skip(id, f"it raises {fault_text(error)}")
            return
        self._judge(id, exam.gap(output, exam.base), cuts, " of fixed size")
