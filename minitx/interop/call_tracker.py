"""The running calls of an adopted model: what its attention modules need to know and do not get as arguments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from minitx.config.schema import stated
from minitx.nn.arguments import Arguments
from minitx.nn.masks import Causal, Dense, Mask, Padding

OTHER_STATES = ("key_value_states", "encoder_hidden_states")
"""The arguments of attention modules for the states of another sequence."""

QUERY_AND_KEY = (("query", "key"), ("queries", "keys"))
"""Pairs of arguments of attention modules: the same tensor twice, or the states of two sequences (SAM 2, V-JEPA 2)."""


class TransformersMask(Dense):
    """The mask of a call of transformers: its tensor, and which keys are padding.

    ``tensor`` alone decides visibility. ``padding`` is for analysis, because a bool tensor does not show why a key is hidden. It is
    not a field, so backends do not keep it for the backward pass.
    """

    padding: Padding | None

    def __init__(self, tensor: Tensor, key_mask: Tensor | None = None) -> None:
        super().__init__(tensor)
        object.__setattr__(self, "padding", None if key_mask is None else Padding(key_mask))

    def parts(self) -> Iterator[Mask]:
        yield self
        if self.padding is not None:
            yield self.padding


class CausalTransformersMask(TransformersMask):
    """A mask of transformers that hides later positions."""

    is_causality: ClassVar[bool] = True


@dataclass(eq=False)
class ModelCall:
    """The arguments of a running call of an adopted model.

    Attributes:
        needs_weights: whether this call, or a call around it, has ``output_attentions=True``.
        key_masks: the real keys of the running model, bool (B, S), from its ``attention_mask``, and the real keys of the other
            sequence. None: no padding.
        masks: the bool masks of the outermost call, by the arguments that built them. Its layers share them, and the results
            that kernels store with a mask.
    """

    needs_weights: bool = False
    key_masks: Sequence[Tensor | None] = (None, None)
    masks: dict[tuple[Any, ...], Mask] = field(default_factory=dict)


class CallStack(threading.local):
    """The running calls of an adopted model, the outermost first. Each thread has its own list."""

    def __init__(self) -> None:
        self.calls: list[ModelCall] = []

    def __reduce__(self) -> tuple[type[CallStack], tuple[()]]:
        return CallStack, ()  # a copy of the model runs nothing yet


class CheckpointFunction:
    """The function that transformers sets on a layer for activation checkpointing. The layer runs again within the same ``ModelCall``.

    The backward pass may run after other calls, and in a thread of autograd.
    """

    def __init__(self, tracker: CallTracker, function: Callable[..., Any]) -> None:
        self.tracker, self.function = tracker, function

    def __call__(self, layer: Callable[..., Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph already contains both runs of the layer
            return self.function(layer, *args)
        return self.function(partial(self.tracker.run_within, self.tracker.call, layer), *args)


class CallTracker:
    """Hooks that record the running calls of one adopted model for its cores.

    A call of LLaVA with images and padded texts, in order, and the padding that attention sees then:

    =============================================  =========================================================================
    ``enter_model`` of the whole model             the mask of the texts: ``call.key_masks[0]`` is bool (B, S)
    ``enter_model`` of the vision model            none, because it is called without ``attention_mask``
    … its layers call ``mask``
    ``leave_model`` of the vision model            the mask of the texts again
    ``enter_model`` of the language model          its own ``attention_mask``; a mask of four dimensions leaves the padding as it was
    ``enter_attention`` of a layer                 whether the keys are another sequence's, in models with cross-attention only
    … its layer calls ``mask``
    ``leave_model`` of both
    =============================================  =========================================================================

    Attributes:
        checkpointed: the modules that may checkpoint their layers, or themselves.
        check: raises an error if a model with changed scales does not call its cores.
        is_scaled: whether ``set_scale`` or ``fold_scale`` has changed a core.
        needs_weights: whether the last call needed weights, for layers that torch's checkpoint function runs again.
        running: the calls that are running.
    """

    def __init__(self, checkpointed: list[Any], check: Callable[[Any], None]) -> None:
        self.checkpointed, self.check = checkpointed, check
        self.needs_weights, self.is_scaled = False, False
        self.running = CallStack()

    @property
    def call(self) -> ModelCall:
        """The innermost call."""
        return self.running.calls[-1] if self.running.calls else ModelCall(self.needs_weights)

    def enter_model(self, arguments: Arguments, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Record the arguments of a call. An inner model may be called without ``output_attentions``, or with a 4-D mask."""
        calls = self.running.calls
        outer = calls[-1] if calls else ModelCall()
        if not calls and not torch.compiler.is_compiling():
            self.wrap_checkpoints()
            if self.is_scaled:
                self.check(model)
        options = arguments.of_call(args, options)
        outputs_weights = bool(options.get("output_attentions", stated(model.config, "output_attentions")))
        self.needs_weights = outputs_weights or outer.needs_weights
        key_masks = [*outer.key_masks]
        for index, name in enumerate(("attention_mask", "encoder_attention_mask")):
            mask = options.get(name)
            if isinstance(mask, Tensor) and mask.dim() == 2:
                key_masks[index] = mask != 0
            elif mask is None or options.get("encoder_hidden_states") is not None:  # around a decoder, it is the encoder's mask
                key_masks[index] = None
        calls.append(ModelCall(self.needs_weights, key_masks, outer.masks))

    def wrap_checkpoints(self) -> None:
        """Wrap the checkpoint functions. They are private in transformers, and it may set them at any time."""
        for module in self.checkpointed:
            function = vars(module).get("_gradient_checkpointing_func")
            if function is not None and not isinstance(function, CheckpointFunction):
                module._gradient_checkpointing_func = CheckpointFunction(self, function)

    def unwrap_checkpoints(self) -> None:
        """Restore the checkpoint functions of the modules."""
        for module in self.checkpointed:
            function = vars(module).get("_gradient_checkpointing_func")
            if isinstance(function, CheckpointFunction):
                module._gradient_checkpointing_func = function.function

    def run_within(self, call: ModelCall, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function(*args)`` within ``call`` and return its result."""
        self.running.calls.append(call)
        try:
            return function(*args)
        finally:
            self.running.calls.pop()

    def enter_attention(self, signature: Arguments, module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Record whether the keys belong to another sequence."""
        arguments = signature.of_call(args, options)
        others = any(arguments.get(name) is not None for name in OTHER_STATES)
        module.core.is_cross = others or any(arguments.get(query) is not arguments.get(key) for query, key in QUERY_AND_KEY)

    def leave_model(self, *_: Any) -> None:
        """Return to the call of the surrounding model, which may have other padding (a vision model has none)."""
        if self.running.calls:  # else a hook before ``enter_model`` failed
            self.running.calls.pop()

    def mask(self, tensor: Tensor | None, is_causal: bool, keys: tuple[int, int], is_cross: bool) -> Mask | None:
        """Convert transformers' mask of a layer, for ``keys`` = (B, S). Within a call of the model, equal bool tensors give one object."""
        if tensor is None and not is_causal:
            return None
        call = self.call
        key_mask = call.key_masks[is_cross]
        made_of = (tensor, key_mask, is_causal, keys)  # a tensor as a key equals only itself
        # a float mask may belong to one layer only (Doge)
        is_shared = (tensor is None or tensor.dtype == torch.bool) and not torch.compiler.is_compiling()
        if is_shared and made_of in call.masks:
            return call.masks[made_of]
        if tensor is None:
            mask: Mask = Causal()
        else:
            if key_mask is not None and is_causal and not is_cross:
                key_mask = key_mask[:, -keys[1] :]  # a cache with a window has only the last keys
            # a mask of another shape belongs to other keys, for example of images
            real = None if key_mask is None or key_mask.shape != keys else key_mask.to(tensor.device)
            visible = tensor if tensor.dtype == torch.bool else _not_hidden(tensor)
            kind = CausalTransformersMask if is_causal else TransformersMask
            mask = kind(visible[..., : keys[1]], real)
        if is_shared:
            call.masks[made_of] = mask
        return mask


def _not_hidden(added: Tensor) -> Tensor:
    """The keys that a float mask leaves visible. A key 9,000 below the largest of its row is hidden (MarkupLM adds -10,000)."""
    return added > (added.amax(-1, keepdim=True) - 9e3).clamp(min=torch.finfo(added.dtype).min / 2)
