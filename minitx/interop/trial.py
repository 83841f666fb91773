"""Check that a transformers model gives the same output before and after its attention is replaced."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.properties import Inputs, compare, later_tokens, rounding
from minitx.config.schema import first_line
from minitx.data.seeding import CPU, kept_generators
from minitx.nn.arguments import Arguments
from minitx.nn.modes import evaluating, restored
from minitx.nn.precision import full_precision

LENGTH, TARGET = 9, 5
"""The number of tokens in a made-up row, and in a row for the decoder of an encoder–decoder."""


def made_up_inputs(root: Any) -> dict[str, Tensor]:
    """Return arguments for a call of a text or vision model: two rows, the second padded on the left, or two images.

    Raises:
        ValueError: the model takes other inputs.
    """
    config, generator = root.config, torch.Generator().manual_seed(0)
    if root.main_input_name == "pixel_values" and hasattr(config, "image_size") and hasattr(config, "num_channels"):
        size = config.image_size if isinstance(config.image_size, tuple | list) else (config.image_size,) * 2
        images = torch.randn(2, config.num_channels, *size, generator=generator)
        return {"pixel_values": images.to(root.device, root.dtype)}
    if root.main_input_name != "input_ids":
        raise ValueError(f"no inputs are made up for {root.main_input_name}")
    texts = config.get_text_config()
    marks = [value for part in (config, texts) for name, value in part.to_dict().items() if "token_i" in name]
    marks += [mark for value in marks if isinstance(value, list) for mark in value]
    usable = [token for token in range(min(getattr(texts, "vocab_size", 64), 4096)) if token not in marks]
    ids = torch.tensor(usable)[torch.randint(len(usable), (2, LENGTH), generator=generator)].to(root.device)
    arguments = Arguments(root).names
    inputs = {"input_ids": ids}
    if "attention_mask" in arguments:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, : LENGTH // 3] = 0
    return inputs | ({"decoder_input_ids": ids[:, :TARGET]} if "decoder_input_ids" in arguments else {})


class CallError(ValueError):
    """A call of the model raises the error that is the cause of this one."""


def outermost(module: nn.Module) -> Iterator[Any]:
    """The transformers models in ``module`` that are not inside of another."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from outermost(child)


class AdoptionTrial:
    """A call of a model in evaluation mode, before its attention is replaced. The model is called twice.

    Args:
        inputs: the arguments of the call. To rows of tokens, copies with other later tokens are added (``later_tokens``).

    Raises:
        CallError: the model raises an error. ValueError: the model returns no finite floats.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model, self.inputs = model, inputs
        self.twins, self.counts = None, None  # counts: bool (rows, L), the positions that are not padding
        ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        shapes = {name: value.shape for name, value in inputs.items() if isinstance(value, Tensor)}
        mask = "attention_mask" if "input_ids" == ids in shapes and shapes[ids] == shapes.get("attention_mask") else None
        with settled(model):
            try:
                if ids not in shapes:
                    raise ValueError("no tokens")
                twins = later_tokens(inputs, ids, mask)
                expected = answer(model, twins.inputs)
                self.inputs = twins.inputs
                self.twins = twins if expected.dim() > 2 and expected.shape[:2] == self.inputs[ids].shape else None
            except ValueError:  # no tokens, or tokens that cannot be replaced because they stand for images
                expected = answer(model, inputs)
            self.finite = expected.isfinite()
            if not self.finite.any():
                raise ValueError("its answer is not finite")
            if mask is not None and expected.dim() > 2 and expected.shape[:2] == self.inputs[mask].shape:
                self.counts = self.inputs[mask] != 0
            self.expected = expected.masked_fill(~self.finite, 0.0)
            self.noise = rounding(self._answer, model, self.inputs, self.expected, self.counts)

    def _answer(self, inputs: Inputs) -> Tensor:
        """The answer, with 0 at entries that were not finite before (in some models, rows that see no key)."""
        output = answer(self.model, inputs)
        return output.masked_fill(~self.finite, 0.0) if output.shape == self.finite.shape else output

    def difference(self, cores: Mapping[str, nn.Module]) -> tuple[str, list[str]]:
        """Return a description of what differs now, empty if nothing does, and the names of the ``cores`` that did not run."""
        ran = set[str]()
        with settled(self.model), ExitStack() as hooks:
            for name, core in cores.items():
                hooks.enter_context(core.register_forward_pre_hook(lambda *_, name=name: ran.add(name)))
            try:
                output = self._answer(self.inputs)
                gap = compare(output, self.expected, self.noise, self.counts)
            except ValueError as error:  # of the model, or another shape
                return error_text(error), []
            for seed in (1, 2, 3):  # discrete steps, such as the choice of an expert, change the answer in some draws only
                if not gap.is_rounding:
                    noise = rounding(self._answer, self.model, self.inputs, output, self.counts, seed)
                    gap = compare(output, self.expected, max(self.noise, noise), self.counts)
        faults = [] if gap.is_rounding else [f"its answer differs by {gap.size:.2g}, and rounding explains {gap.allowed:.2g}"]
        return "; ".join([*faults, *self._leaks(output)]), [name for name in cores if name not in ran]

    def _leaks(self, output: Tensor) -> Iterator[str]:
        """Describe changes of hidden or later tokens that now affect the answer, but did not before."""
        if self.twins is None:
            return
        is_padded = ~self.twins.still[:, :1]
        for what, rows in {"later tokens move": ~is_padded, "hidden or later tokens move": is_padded}.items():
            still = self.twins.still & rows
            if still.any():
                before, after = (
                    compare(out[len(still) :], out[: len(still)], self.noise, still) for out in (self.expected, output)
                )
                if before.is_rounding and not after.is_rounding:
                    yield f"{what} it by {after.size:.2g}"


def error_text(error: Exception) -> str:
    """The first line of an error's message, after its class unless the message explains itself."""
    kind = "" if isinstance(error, ValueError | NotImplementedError) else f"{type(error).__name__}: "
    return kind + first_line(error)


def answer(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits of a call, or the hidden states of a model without a head. Raise a ``CallError`` if the model raises an error."""
    try:
        output = model(**inputs)
    except Exception as error:  # a model of any kind may fail in any way
        raise CallError(error_text(error)) from error
    if (floats := _first_floats(output)) is None:
        raise ValueError(f"{type(model).__name__} returns no floating-point tensor")
    return floats


def _first_floats(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        output = [output[name] for name in sorted(output, key=lambda name: name not in ("logits", "last_hidden_state"))]
    parts = map(_first_floats, output) if isinstance(output, list | tuple) else ()
    return next((part for part in parts if part is not None), None)


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode without gradients, autocast and warnings.

    Afterwards all random states, attributes and parts of modules are restored: a short row makes BigBird change itself.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} - {torch.device("meta")}
    with ExitStack() as after:
        after.enter_context(restored(model, numbers=False))
        for device in devices | {CPU}:
            after.enter_context(kept_generators(device))
            after.enter_context(full_precision(device))
        if "torch._dynamo" in sys.modules:  # the compiler's module: set_stance would import it, which takes seconds
            after.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled layer would run its old attention
        after.enter_context(evaluating(model))
        after.enter_context(torch.no_grad())
        after.enter_context(warnings.catch_warnings(action="ignore"))
        yield
