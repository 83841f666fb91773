"""Hugging Face models as they are, with our core under their attention.

``adopt_hf(model)`` gives every attention module of a transformers model (v5) a child ``core``, the same
``DotProductAttention`` that our own models have, and lets transformers call it through its public ``AttentionInterface``. The
model keeps its weights, its code and its results. From then on ``capture``, ``intervene``, the statistics and the viewer work
on it, beside the fused kernel.

Nothing depends on the name of a model. An attention module is a module whose ``forward`` calls a function of transformers'
``AttentionInterface``. What differs between models is read off the arguments of this call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minitx.nn.attention import DotProductAttention
from minitx.nn.functional import AttentionCall
from minitx.nn.masks import Causal, Dense, Mask, Padding

NAME = "minitx"
"""The name of our function in transformers' two registries. It is all that is process-wide."""


@dataclass(frozen=True, eq=False)
class TransformersMask(Dense):
    """What transformers' mask of a call means: its tensor, whether it is causal, and which keys are padding.

    ``tensor`` alone decides what is visible. The rest is for those who look: a bool tensor does not say why it hides a key.
    """

    is_causality: bool = False  # type: ignore[misc]  # of the class elsewhere
    key_mask: Tensor | None = None

    def parts(self) -> Iterator[Mask]:
        yield self
        if self.key_mask is not None:
            yield Padding(self.key_mask)


class Adoption:
    """What the cores of one adopted model share: what a running call was given, of which its attention modules may not hear.

    Attributes:
        configs: pairs of the copy of a config that the adopted model uses, and its original.
        hooks: the handles of the hooks that note the call.
        weights_wanted: whether the call has ``output_attentions=True``.
        is_cross: whether the running attention module was given other states for its keys.
        key_masks: which keys are real, (B, S) or None, by ``is_cross``, as the running model was told.
    """

    def __init__(self, configs: list[tuple[Any, Any]]) -> None:
        self.configs = configs
        self.hooks: list[RemovableHandle] = []
        self.leave()

    def enter_model(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the arguments of a call. A model that is called inside replaces them: attention runs in the innermost model."""
        self.weights_wanted |= bool(options.get("output_attentions", getattr(model.config, "output_attentions", False)))
        self.key_masks = {False: options.get("attention_mask"), True: options.get("encoder_attention_mask")}

    def enter_attention(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note whether the keys are of another sequence."""
        self.is_cross = any(options.get(name) is not None for name in ("key_value_states", "encoder_hidden_states"))

    def leave(self, *_: Any) -> None:
        """Forget the call when the outermost model returns."""
        self.weights_wanted = self.is_cross = False
        self.key_masks: dict[bool, Any] = {}

    def key_mask(self, num_keys: int) -> Tensor | None:
        """Which keys of the running attention are real, bool (B, S), or None where the model was not told."""
        mask = self.key_masks.get(self.is_cross)
        return mask != 0 if isinstance(mask, Tensor) and mask.shape[1:] == (num_keys,) else None


class AdoptedCore(DotProductAttention):
    """The core of an adopted attention module. It has no parameters, so that state dicts stay as they are."""

    def __init__(self, adoption: Adoption, *, backend: str = "auto") -> None:
        super().__init__(backend=backend)
        self.adoption = adoption


def adopt_hf(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Put our attention core under a Hugging Face model, in place, and return the model.

    Logits, gradients, caches and ``generate`` stay those of the model under ``sdpa`` or ``eager``, within rounding. The modules
    of the model get a copy of their config, so that other models made from the same config object stay as they are.
    ``output_attentions=True`` returns the weights of the core.

    Args:
        model: a ``transformers.PreTrainedModel``, or a module that contains such models, for example one of PEFT.
        backend: the backend of the cores, as in ``DotProductAttention``.

    Raises:
        TypeError: ``model`` contains no transformers model. ValueError: the model is adopted already, or its attention does not
            pass through transformers' ``AttentionInterface`` (Falcon, BLOOM, GPT-Neo, GPT-J), so that no other function can
            take its place.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import sdpa_mask
    from transformers.modeling_layers import GradientCheckpointingLayer

    outermost = list(_outermost(model, PreTrainedModel))
    if not outermost:
        raise TypeError(f"adopt_hf takes a model of transformers, got {type(model).__name__}, which contains none")
    if adopted_cores(model):
        raise ValueError(f"{type(model).__name__} is adopted already: release_hf gives it back")
    layers = {name: module for name, module in model.named_modules() if _calls_interface(type(module))}
    if not layers:
        raise ValueError(
            f"the attention of {type(model).__name__} does not pass through transformers' AttentionInterface, "
            "so no other function can take its place"
        )
    taken = [name for name, module in layers.items() if hasattr(module, "core")]
    if taken:
        raise ValueError(f"{taken[0]} has an attribute named core already")
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    adoption = Adoption(_copy_configs(model))
    for module in layers.values():
        module.core = AdoptedCore(adoption, backend=backend)
        adoption.hooks.append(module.register_forward_pre_hook(adoption.enter_attention, with_kwargs=True))
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and adopted_cores(module):
            module.is_block = True
        if isinstance(module, PreTrainedModel):
            adoption.hooks.append(module.register_forward_pre_hook(adoption.enter_model, with_kwargs=True))
    for root in outermost:
        adoption.hooks.append(root.register_forward_hook(adoption.leave, always_call=True))
        root.set_attn_implementation(NAME)
    still = [name for name, module in layers.items() if module.config._attn_implementation != NAME]
    if still:
        release_hf(model)
        raise ValueError(f"{still[0]} of {type(model).__name__} cannot change its attention: transformers left it as it was")
    return model


def release_hf(model: nn.Module) -> nn.Module:
    """Undo ``adopt_hf``: remove the cores, and give the modules their own configs back.

    Raises:
        ValueError: the model is not adopted.
    """
    cores = adopted_cores(model)
    if not cores:
        raise ValueError(f"{type(model).__name__} is not adopted")
    adoption = next(iter(cores.values())).core.adoption
    originals = {id(copied): original for copied, original in adoption.configs}
    for module in model.modules():
        for name, value in vars(module).items():
            if id(value) in originals:
                setattr(module, name, originals[id(value)])
        vars(module).pop("is_block", None)
    for module in cores.values():
        del module.core
    for handle in adoption.hooks:
        handle.remove()
    return model


def adopted_cores(model: nn.Module) -> dict[str, Any]:
    """Return the adopted attention modules of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(getattr(module, "core", None), AdoptedCore)}


def _outermost(module: nn.Module, kind: type) -> Iterator[Any]:
    if isinstance(module, kind):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child, kind)


def _calls_interface(kind: type[nn.Module]) -> bool:
    """Whether the code of ``forward`` names a registry of attention functions."""
    from transformers import AttentionInterface

    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, FunctionType):
        return False
    return any(isinstance(forward.__globals__.get(name), AttentionInterface) for name in _names_of(forward.__code__))


def _names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


def _copy_configs(model: nn.Module) -> list[tuple[Any, Any]]:
    """Give the modules copies of their configs, and return pairs of copy and original. A config that is part of another stays so."""
    from transformers import PreTrainedConfig

    memo: dict[int, Any] = {}
    pairs: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                pairs[id(value)] = copy.deepcopy(value, memo), value
                setattr(module, name, pairs[id(value)][0])
    return list(pairs.values())


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function that transformers calls: (B, H, L, D) in, (B, L, H, Dv) and the weights or None out.

    ``attention_mask`` is what transformers builds for ``sdpa``: None, bool (True = may attend), or a float that is added.
    Without a mask, ``is_causal`` is aligned at the upper left, as in torch: a static cache hands out keys that are not written.
    """
    adoption: Adoption = module.core.adoption
    L, S = query.shape[2], key.shape[2]
    causal = module.is_causal if is_causal is None else is_causal
    mask: Mask | None = None
    bias = position_bias
    if attention_mask is None:
        if causal and L > 1:
            key, value, mask = key[:, :, :L], value[:, :, :L], Causal()
    elif attention_mask.dtype == torch.bool:
        mask = TransformersMask(attention_mask[..., :S], bool(causal), adoption.key_mask(S))
    else:
        bias = attention_mask[..., :S] if bias is None else bias + attention_mask[..., :S]
    call = AttentionCall(
        query.expand(key.shape[0], -1, -1, -1),  # learned queries have one row
        key,
        value,
        mask,
        None if bias is None else bias[..., : key.shape[2]],
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap,
        s_aux,
        dropout_p=dropout,
        need_weights=adoption.weights_wanted,
        is_cross=adoption.is_cross,
    )
    out, weights = module.core(call) if call.need_weights else (module.core(call), None)
    return out.transpose(1, 2).contiguous(), weights
