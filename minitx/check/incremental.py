"""Caches of models: pieces with a cache equal one call."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minitx.check.calling import NotTriedError, OutputShapeError, fault_text, need
from minitx.check.model_examination import Examination
from minitx.check.model_interface import keep_mask, returned_cache
from minitx.check.properties import Gap
from minitx.check.results import FRAGILE, WRONG

BACK = 3
"""The number of tokens cut from a cache."""


def cache(exam: Examination) -> None:
    """Pieces with a cache equal one call."""
    called = exam.called
    learned_prompt = getattr(getattr(called.model, "active_peft_config", None), "is_prompt_learning", False)
    need(called.cache is not None and not called.why_without_positions, "no argument for a cache was found")
    need(not (called.prepended or learned_prompt), "each call adds the virtual tokens again, with or without a cache")
    need(exam.is_causal, "the model is bidirectional")
    L = called.stream.length
    need(L > 2 * BACK, "rows have too few tokens to be cut into pieces")
    random_cuts = sorted((torch.randperm(L - 1, generator=called.generator)[:3] + 1).tolist())
    pieces = _Pieces(exam)
    plain = {"token-by-token": range(1, L), "prefill-then-tokens": range(L // 2, L), "pieces": random_cuts}
    for kind, cuts in plain.items():
        exam.attempt(f"cache/{kind}", partial(pieces.compare, cuts=list(cuts)))
    exam.attempt("cache/cut-back", partial(pieces.compare, cuts=[L // 3, L - 2], what=f" that is cut back by {BACK} tokens"))
    exam.attempt("cache/long", partial(pieces.compare, cuts=[], what=" and a long row"))
    exam.attempt("cache/left-padding", partial(pieces.padded, cuts=[L // 2, L // 2 + 1, L - 3]))
    static = getattr(sys.modules.get("transformers"), "StaticCache", None)
    if static is not None and called.cache == "past_key_values" and called.config is not None:
        exam.attempt("cache/static", partial(pieces.static, kind=static, cuts=[L // 2, L // 2 + 1]))


class _Pieces:
    """Calls of a model piece by piece, with a cache."""

    def __init__(self, exam: Examination) -> None:
        self.exam, self.called = exam, exam.called
        self.make = getattr(exam.called.model, "make_cache", None)

    def run(
        self, cuts: Sequence[int], row: Any = None, keep: Tensor | None = None, cache: Any = None, back: int = 0, **extra: Any
    ) -> Tensor:
        """Return the outputs of all pieces, joined. After the second piece, ``back`` tokens are removed and fed again."""
        called, inputs = self.called, row or self.exam.inputs
        stream, tokens = called.stream, inputs[called.stream.name]
        B, L = tokens.shape[:2]
        if cache is None and self.make is not None:
            count = len(inspect.signature(self.make).parameters)
            cache = self.make(*(B, L)[2 - count :])
        outputs, start = list[Tensor](), 0
        for end in [*cuts, L]:
            piece = {**inputs, stream.name: tokens[:, start:end].contiguous()}
            options: dict[str, Any] = {} if cache is None else {str(called.cache): cache}
            options |= {"use_cache": True} if "use_cache" in called.arguments.names else {}
            options |= {key: value[:, start:end] for key, value in extra.items()}
            # most models need the whole mask; minitx's cache stores its earlier part
            starts = [] if keep is None else [0, start][: 1 + (start > 0)]
            masks = [{stream.name: keep[:, first:end]} for first in starts if keep is not None]
            result, cache = self._piece(piece, masks or [None], options)
            outputs.append(called.output(result, piece))
            if outputs[-1].shape[:2] != (B, end - start):
                shape = tuple(outputs[-1].shape)
                raise OutputShapeError(f"a piece of {end - start} tokens in {B} rows gives an output of shape {shape}")
            if self.make is None:
                cache = returned_cache(result, str(called.cache))
                need(
                    cache is not None, "the model returns no cache, and has no method make_cache() for one that its calls fill"
                )
            start = end
            if back and hasattr(cache, "activate_past_recording"):  # of transformers
                cache.activate_past_recording()
            if back and len(outputs) == 2:
                try:
                    cache.crop(-back)
                except (AttributeError, RuntimeError) as error:
                    raise NotTriedError(f"the cache cannot be cut back: {fault_text(error)}") from error
                outputs[-1], start = outputs[-1][:, :-back], end - back
        return torch.cat(outputs, 1)

    def _piece(self, piece: dict[str, Tensor], masks: Sequence[Any], options: dict[str, Any]) -> tuple[Any, Any]:
        """Call the model with the first mask that it accepts, and return its result and the cache that it was given."""
        key = str(self.called.cache)
        for mask in masks[:-1]:
            tried = options if self.make is None else options | {key: copy.deepcopy(options[key])}  # a refused call may fill it
            with suppress(RuntimeError, ValueError):
                return self.called.run(piece, mask, **tried), tried.get(key)
        return self.called.run(piece, masks[-1], **options), options.get(key)

    def compare(self, id: str, cuts: Sequence[int], what: str = "") -> None:
        """Compare pieces with one call. Without ``cuts``, the row is long."""
        exam = self.exam
        row, expected, noise = (exam.inputs, exam.base, exam.noise) if cuts else exam.long
        L = expected.shape[1]
        cuts = cuts or [L // 2, L // 2 + 1, L - 1]
        output = self.run(cuts, back=BACK * ("cut back" in what), row=row)
        self._judge(id, exam.gap(output, expected, noise=noise), cuts, what)

    def _judge(self, id: str, gap: Gap, cuts: Sequence[int], what: str = "") -> None:
        is_known = any(finding.id == "cache-differs" for finding in self.exam.findings)
        how = f"token by token from {cuts[0]}" if len(cuts) > 5 else f"pieces that end at {', '.join(map(str, cuts))}"
        # a recurrent state may not be meant to be cut back
        severity = self.exam.severity if "long row" in what else FRAGILE if "cut back" in what else WRONG
        words: dict[str, Any] = {"kind": re.sub("[ ,]+", "-", what), "what": what, "how": how, "severity": severity}
        self.exam.judge(id, gap, "cache-differs{kind}", explained_by="the cache" * is_known, **words)

    def padded(self, id: str, cuts: Sequence[int]) -> None:
        """Compare pieces with one call, with padding on the left of a row."""
        exam, called, stream = self.exam, self.called, self.called.stream
        need(stream.form, "no mask")
        keep = keep_mask(exam.inputs[stream.name], slice(stream.length // 3))
        extra = called.counted(keep)
        try:
            expected = called.answer(exam.inputs, {stream.name: keep}, **extra)
        except (ValueError, NotImplementedError):  # the model does not use positions
            extra, expected = {}, called.answer(exam.inputs, {stream.name: keep})
        output = self.run(cuts, keep=keep, **extra)
        self._judge(id, exam.gap(output, expected, keep), cuts, " and padding on the left")

    def static(self, id: str, kind: Any, cuts: Sequence[int]) -> None:
        """Compare pieces with one call, with the static cache of transformers."""
        exam, called = self.exam, self.called
        is_supported = getattr(called.model, "_can_compile_fullgraph", True) is not False
        need(is_supported, "a cache of fixed size is not supported by the model")
        need(len(called.streams) == 1, "a cache of fixed size is not tried with encoder–decoders")
        try:
            output = self.run(cuts, cache=kind(config=called.config, max_cache_len=called.stream.length + 3))
        except Exception as error:  # some architectures do not support it
            raise NotTriedError(f"it raises {fault_text(error)}") from error
        self._judge(id, exam.gap(output, exam.base), cuts, " of fixed size")
