"""``check_model`` finds mistakes in a model. It calls the model with changes that must not matter, and reports what changed and where.

>>> class Leaks(torch.nn.Module):  # each token also sees the token after it
...     causal = True
...     def __init__(self):
...         super().__init__()
...         self.table, self.head = torch.nn.Embedding(30, 8), torch.nn.Linear(8, 30)
...     def forward(self, ids):
...         x = self.table(ids)
...         return self.head(x + torch.cat((x[:, 1:], x[:, :1]), 1))
>>> report = check_model(Leaks(), only="causality")
>>> report.mend_first.fault, report.exit_code
('later tokens change earlier outputs', 1)
"""

from __future__ import annotations

import contextlib
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from minitx.check import incremental, loss_and_gradients, modes_and_sizes, visibility
from minitx.check.model_examination import Examination, StopError
from minitx.check.model_interface import CannotBeCalledError, make_called
from minitx.check.results import Check, Finding, Report, Severity, Status

PROPERTIES: dict[str, Callable[[Examination], None]] = {
    "weights": modes_and_sizes.weights,
    "determinism": modes_and_sizes.determinism,
    "rows": visibility.rows,
    "causality": visibility.causality,
    "reach": visibility.reach,
    "padding": visibility.padding,
    "sizes": modes_and_sizes.sizes,
    "cache": incremental.cache,
    "documents": visibility.documents,
    "switches": modes_and_sizes.switches,
    "loss": loss_and_gradients.loss,
    "gradient": loss_and_gradients.gradient,
    "train-mode": modes_and_sizes.train_mode,
    "bfloat16": modes_and_sizes.bfloat16,
    "compile": modes_and_sizes.compiled,
}
"""The properties by the words of ``only``, in the order to fix mistakes."""

EXPECT = r"(causal|bidirectional|window:[1-9]\d*)(,relative)?|relative"

CALL = "forward must take token ids (B, L), vectors (B, L, E) or images, and return a tensor with B rows; call= passes a function that calls it."

UNCALLED = {"cache": "cache", "documents": "document_ids or position_ids", "loss": "labels", "switches": "further results"}
"""The properties that need an argument that an adapter does not pass."""


def check_model(
    model: nn.Module,
    *,
    only: str | Sequence[str] | None = None,
    expect: str | None = None,
    call: Callable[..., Any] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    repeat: str = "",
) -> Report:
    """Find mistakes in a model that reads tokens or images.

    The way to call it is found by trying. The input is ids (B, L) or vectors (B, L, E), and the output logits or hidden states
    (B, L, ...), or one vector per row (B, ...). Encoder–decoders and vision models are supported. A copy of the model is checked in
    evaluation mode. Trainable weights that are all zero are filled with noise, because they would hide every change before them. A
    difference counts if rounding in this model does not explain it.

    Args:
        model: any module, including Hugging Face models and models wrapped by PEFT or ``torch.compile``.
        only: the properties to check, words of ``PROPERTIES``. Default: all.
        expect: what the output of a token may depend on: "causal" (no later tokens), "bidirectional", or "window:4" (the last 4 tokens).
            Default: causal if the class, the config, a buffer or a cache says so. Any other model is only described. "relative":
            adding a number to all positions changes nothing. "causal,relative" declares both.
        seed: the seed of the random inputs. device: the device of the copy. dtype: the dtype of the copy. Default: the model's dtype.
        repeat: the command that repeats a finding, without ``only`` and ``seed``. Default: a call of this function.
        call: a function that calls the model: (model, input_ids, keep) -> logits (B, L, ...), with a bool mask ``keep`` (B, L), True = a
            real token. Without its third parameter, no mask is tried. ``UNCALLED`` has the properties that are then not tried.

    Returns:
        A report. Its ``exit_code`` is 1 if something is wrong, and 2 if a property in ``only`` could not be tried. Checks that could not be
        tried are listed with the reason.

    Raises:
        ValueError: ``only`` or ``expect`` has an unknown word, or ``call`` does not call the model. TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    chosen = list(PROPERTIES) if only is None else [only] if isinstance(only, str) else list(only)
    if unknown := [name for name in chosen if name not in PROPERTIES]:
        raise ValueError(f"only={unknown[0]} must be one of {', '.join(PROPERTIES)}")
    if expect is not None and not re.fullmatch(EXPECT, expect):
        raise ValueError(f"expect={expect} must be causal, bidirectional or window:4, with or without ,relative, or relative")
    name = type(model).__name__
    with _settled(seed):
        try:
            called = make_called(model, seed, device, dtype, call)
        except CannotBeCalledError as faults:
            if call is not None:
                raise ValueError(f"call={call.__name__} does not call {name}: {faults}") from faults
            checks = [Check(word, Status.NOT_TRIED, "no way to call it was found") for word in chosen]
            finding = Finding("cannot-be-called", Severity.FRAGILE, "no way to call the model was found", CALL, str(faults))
            return Report(name, "", seed, tuple(checks), (finding,))
        examination = Examination(called, seed, expect or "", repeat or "check_model(model, {})")
        _examine(examination, [word for word in PROPERTIES if word in chosen])
    called_as = examination.called.describe()
    found = tuple(examination.checks), tuple(examination.findings)
    return Report(name, called_as, seed, *found, taken_as=examination.taken_as, only=() if only is None else tuple(chosen))


def _examine(examination: Examination, chosen: Sequence[str]) -> None:
    try:
        examination.begin()
        for word in chosen:
            examination.word = word
            if examination.called.call is not None and word in UNCALLED:
                examination.skip(word, f"call= passes no {UNCALLED[word]}")
            else:
                examination.attempt(word, partial(_check, examination))
    except StopError as reason:
        for word in chosen:
            if all(check.id.partition("/")[0] != word for check in examination.checks):
                examination.skip(word, str(reason))


def _check(examination: Examination, word: str) -> None:
    if word != "weights" and not examination.is_measured:
        examination.measure()
    PROPERTIES[word](examination)


@contextlib.contextmanager
def _settled(seed: int) -> Iterator[None]:
    """Run without gradients and warnings, with all random generators seeded, and restore their states."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(), torch.no_grad(), warnings.catch_warnings(action="ignore"):
            torch.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


# --- for test suites


def assert_causal(model: nn.Module, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Assert that later tokens change nothing: neither values nor gradients, with and without a mask.

    Raises:
        AssertionError: the report of ``check_model``.
    """
    _assert(model, "causality", seed, device, expect="causal")


def assert_ignores_padding(model: nn.Module, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Assert that hidden tokens on the left, on the right and inside change nothing.

    Raises:
        AssertionError: the report of ``check_model``.
    """
    _assert(model, "padding", seed, device)


def assert_rows_are_independent(model: nn.Module, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Assert that the rows of a batch do not change each other's outputs.

    Raises:
        AssertionError: the report of ``check_model``.
    """
    _assert(model, "rows", seed, device)


def assert_cache_changes_nothing(model: nn.Module, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Assert that pieces with a cache equal one call.

    Raises:
        AssertionError: the report of ``check_model``.
    """
    _assert(model, "cache", seed, device)


def assert_documents_are_apart(model: nn.Module, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Assert that documents packed into one row do not see each other.

    Raises:
        AssertionError: the report of ``check_model``.
    """
    _assert(model, "documents", seed, device)


def assert_deterministic(model: nn.Module, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Assert that two calls in evaluation mode are equal.

    Raises:
        AssertionError: the report of ``check_model``.
    """
    _assert(model, "determinism", seed, device)


def assert_gradients_reach_everything(model: nn.Module, *, seed: int = 0, device: torch.device | str = "cpu") -> None:
    """Assert that each parameter that changes the output gets a finite gradient.

    Raises:
        AssertionError: the report of ``check_model``.
    """
    _assert(model, "gradient", seed, device)


def _assert(model: nn.Module, only: str, seed: int, device: torch.device | str, expect: str | None = None) -> None:
    """Fail if something is wrong, or if nothing was tried."""
    report = check_model(model, only=only, expect=expect, seed=seed, device=device)
    if report.exit_code or report.with_status(Status.FAILED):
        raise AssertionError(str(report))
