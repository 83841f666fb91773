"""Whether a model of transformers answers the same before and after its attention core is exchanged."""

from __future__ import annotations

import inspect
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.properties import Inputs, compare, later_tokens, rounding
from minitx.config.schema import first_line
from minitx.nn.modes import evaluating
from minitx.nn.precision import full_precision

LENGTH, TARGET = 9, 5
"""The numbers of tokens in a made-up row, and in a row of a decoder with an encoder."""


def made_up_inputs(root: Any) -> dict[str, Tensor]:
    """Return arguments for a call of a model of text or of pictures: two rows, the second one padded on the left, or two pictures.

    Raises:
        ValueError: the model takes something else.
    """
    config, generator = root.config, torch.Generator().manual_seed(0)
    if root.main_input_name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, tuple | list) else (config.image_size,) * 2
        pictures = torch.randn(2, config.num_channels, *size, generator=generator)
        return {"pixel_values": pictures.to(root.device, root.dtype)}
    if root.main_input_name != "input_ids":
        raise ValueError(f"no inputs are made up for {root.main_input_name}")
    texts = config.get_text_config()
    marks = [value for part in (config, texts) for name, value in part.to_dict().items() if "token_i" in name]
    marks += [mark for value in marks if isinstance(value, list) for mark in value]
    usable = [token for token in range(min(getattr(texts, "vocab_size", 64), 4096)) if token not in marks]
    ids = torch.tensor(usable)[torch.randint(len(usable), (2, LENGTH), generator=generator)].to(root.device)
    arguments = inspect.signature(root.forward).parameters
    inputs = {"input_ids": ids}
    if "attention_mask" in arguments:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, : LENGTH // 3] = 0
    return inputs | ({"decoder_input_ids": ids[:, :TARGET]} if "decoder_input_ids" in arguments else {})


class Trial:
    """A call of a model before its core is exchanged, in evaluation mode. The model is called twice.

    Args:
        inputs: the arguments of the call. Where its tensors are rows of tokens, twins of the rows are added (``later_tokens``).

    Raises:
        Exception: whatever the model raises. ValueError: the model returns no finite floats.
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        self.model, self.inputs = model, inputs
        self.twins, self.counts = None, None  # counts: bool (rows, L), the positions that are not padding
        ids = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        shapes = {name: value.shape for name, value in inputs.items() if isinstance(value, Tensor)}
        mask = "attention_mask" if "input_ids" == ids in shapes and shapes[ids] == shapes.get("attention_mask") else None
        with settled(model):
            wanted = None
            try:
                twins = later_tokens(inputs, ids, mask)
                wanted = answer(model, twins.inputs)
                self.inputs = twins.inputs
                self.twins = twins if wanted.dim() > 2 and wanted.shape[:2] == self.inputs[ids].shape else None
            except Exception:  # no tokens, or some cannot be replaced: they stand for pictures
                wanted = answer(model, inputs)
            self.finite = wanted.isfinite()
            if not self.finite.any():
                raise ValueError("its answer is not finite")
            if mask is not None and wanted.dim() > 2 and wanted.shape[:2] == self.inputs[mask].shape:
                self.counts = self.inputs[mask] != 0
            self.wanted = wanted.masked_fill(~self.finite, 0.0)
            self.noise = rounding(self._answer, model, self.inputs, self.wanted, self.counts)

    def _answer(self, inputs: Inputs) -> Tensor:
        """The answer, and 0 where it was not finite (rows that see no key, in some models)."""
        found = answer(self.model, inputs)
        return found.masked_fill(~self.finite, 0.0) if found.shape == self.finite.shape else found

    def difference(self, cores: Mapping[str, nn.Module]) -> tuple[str, list[str]]:
        """Return what differs now, or nothing; and the names of the ``cores`` that did not run."""
        ran = set[str]()
        with settled(self.model), ExitStack() as hooks:
            for name, core in cores.items():
                hooks.enter_context(core.register_forward_pre_hook(lambda *_, name=name: ran.add(name)))
            try:
                found = self._answer(self.inputs)
                gap = compare(found, self.wanted, self.noise, self.counts)
            except Exception as error:
                return said_by(error), []
            for seed in (1, 2, 3):  # steps such as the choice of an expert move the answer in some draws only
                if not gap.is_rounding:
                    noise = rounding(self._answer, self.model, self.inputs, found, self.counts, seed)
                    gap = compare(found, self.wanted, max(self.noise, noise), self.counts)
        faults = [] if gap.is_rounding else [f"its answer differs by {gap.size:.2g}, and rounding explains {gap.allowed:.2g}"]
        return "; ".join([*faults, *self._leaks(found)]), [name for name in cores if name not in ran]

    def _leaks(self, found: Tensor) -> Iterator[str]:
        """Which changes move positions that must be still, and did not move them before."""
        if self.twins is None:
            return
        is_padded = ~self.twins.still[:, :1]
        for what, rows in {"later tokens move": ~is_padded, "hidden or later tokens move": is_padded}.items():
            still = self.twins.still & rows
            if still.any():
                before, after = (
                    compare(out[len(still) :], out[: len(still)], self.noise, still) for out in (self.wanted, found)
                )
                if before.is_rounding and not after.is_rounding:
                    yield f"{what} it by {after.size:.2g}"


def said_by(error: Exception) -> str:
    """The first line of an error, with its kind where the text may not stand alone."""
    kind = "" if isinstance(error, ValueError | NotImplementedError) else f"{type(error).__name__}: "
    return kind + first_line(error)


def answer(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits of a call, or the hidden states of a model without a head."""
    found = _first_floats(model(**inputs))
    if found is None:
        raise ValueError(f"{type(model).__name__} returns no tensor of floats")
    return found


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

    All random states are restored, and attributes and parts of modules that have changed: a short row lets BigBird change its own.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} - {torch.device("meta")}
    with ExitStack() as after:
        for module in model.modules():
            for attributes in (vars(module), module._buffers, module._modules):
                after.callback(attributes.update, dict(attributes))
        after.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            after.callback(numpy.random.set_state, numpy.random.get_state())
        after.enter_context(torch.random.fork_rng([]))
        for device in devices:
            after.enter_context(full_precision(device))
            if device.type == "mps":
                after.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
            elif device.type != "cpu":
                after.enter_context(torch.random.fork_rng([device.index], device_type=device.type))
        if "torch._dynamo" in sys.modules:
            after.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled layer has its old attention
        after.enter_context(evaluating(model))
        after.enter_context(torch.no_grad())
        after.enter_context(warnings.catch_warnings(action="ignore"))
        yield
