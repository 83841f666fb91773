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
import dis
import inspect
import operator
import re
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minitx.config.schema import stated
from minitx.interop.folding import Fold, fold_adopted, outermost
from minitx.nn.attention import DotProductAttention
from minitx.nn.functional import AttentionCall
from minitx.nn.masks import Causal, Dense, Mask, Padding
from minitx.nn.scale import scale_multiplier

NAME = "minitx"
"""The name of our function in transformers' two registries. It is all that is process-wide."""

OTHER_STATES = ("key_value_states", "encoder_hidden_states")
"""The arguments of attention modules for the states of another sequence."""

QUERY_AND_KEY = (("query", "key"), ("queries", "keys"))
"""The arguments of attention modules that get one tensor twice, or the states of two sequences (SAM 2, V-JEPA 2)."""

OTHER_STEPS = {"bmm": "p", "einsum": "p", "matmul": "p", "scaled_dot_product_attention": "psp"}
"""What computes products (p) and softmax (s) in layers that have their own attention."""


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


@dataclass(eq=False)
class Call:
    """What a running call of an adopted model was given.

    Attributes:
        weights_wanted: whether the call, or one around it, has ``output_attentions=True``.
        key_masks: which keys of the running model are real, bool (B, S), as its ``attention_mask`` says, and those of the other
            sequence. None: no padding.
        masks: the bool masks of the outermost call by what they were made of. Its layers share them, with what a kernel has computed
            of a mask.
    """

    weights_wanted: bool = False
    key_masks: Sequence[Tensor | None] = (None, None)
    masks: dict[tuple[Any, ...], Mask] = field(default_factory=dict)


class Running(threading.local):
    """The calls of an adopted model that are running, one inside the other. Each thread has its own."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __reduce__(self) -> tuple[type[Running], tuple[()]]:
        return Running, ()  # a copy of the model runs nothing yet


class Adoption:
    """What the cores of one adopted model share: what a running call was given, of which its attention modules may not hear.

    Attributes:
        configs: pairs of the copy of a config that the adopted model uses, and its original.
        hooks: the handles of the hooks that note the call.
        is_scaled: whether ``set_scale`` or ``fold_scale`` has changed a core.
        weights_wanted: that of the last call: for checkpointed layers that run again in the backward pass, perhaps in a thread of
            autograd's.
        running: the calls that are running.
    """

    def __init__(self, configs: list[tuple[Any, Any]]) -> None:
        self.configs = configs
        self.hooks: list[RemovableHandle] = []
        self.weights_wanted, self.is_scaled = False, False
        self.running = Running()

    @property
    def call(self) -> Call:
        """The innermost call."""
        return self.running.calls[-1] if self.running.calls else Call(self.weights_wanted)

    def enter_model(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the arguments of a call. An inner model may be called without ``output_attentions``, or with a mask that is built."""
        calls = self.running.calls
        outer = calls[-1] if calls else Call()
        if self.is_scaled and not calls and not torch.compiler.is_compiling():
            _check_ours(model)
        if len(args) > 1:
            options = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | options
        wanted = bool(options.get("output_attentions", stated(model.config, "output_attentions")))
        self.weights_wanted = wanted or outer.weights_wanted
        key_masks = [*outer.key_masks]
        for index, name in enumerate(("attention_mask", "encoder_attention_mask")):
            mask = options.get(name)
            if isinstance(mask, Tensor) and mask.dim() == 2:
                key_masks[index] = mask != 0
            elif mask is None or options.get("encoder_hidden_states") is not None:  # the mask around a decoder is the encoder's
                key_masks[index] = None
        calls.append(Call(self.weights_wanted, key_masks, outer.masks))

    def enter_attention(self, names: list[str], module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note whether the keys are of another sequence."""
        given = dict(zip(names, args, strict=False)) | options
        others = any(given.get(name) is not None for name in OTHER_STATES)
        module.core.is_cross = others or any(given.get(query) is not given.get(key) for query, key in QUERY_AND_KEY)

    def leave_model(self, *_: Any) -> None:
        """Give the model around this one its own padding back (a model of pictures has none)."""
        if self.running.calls:  # else a hook before ``enter_model`` failed
            self.running.calls.pop()

    def mask(self, tensor: Tensor | None, is_causal: bool, keys: tuple[int, int], is_cross: bool) -> Mask | None:
        """Return what transformers' mask of a layer means, for ``keys`` = (B, S). A call of the model has one object for a bool tensor."""
        if tensor is None and not is_causal:
            return None
        call = self.call
        key_mask = call.key_masks[is_cross]
        made_of = (tensor, key_mask, is_causal, keys)  # tensors are equal as keys where they are one object
        # a mask of floats may be a layer's own (Doge)
        is_shared = (tensor is None or tensor.dtype == torch.bool) and not torch.compiler.is_compiling()
        if is_shared and made_of in call.masks:
            return call.masks[made_of]
        if tensor is None:
            mask: Mask = Causal()
        else:
            if key_mask is not None and is_causal and not is_cross:
                key_mask = key_mask[:, -keys[1] :]  # a cache with a window has the last keys
            # one of another shape is of other keys, for example of pictures
            real = None if key_mask is None or key_mask.shape != keys else key_mask.to(tensor.device)
            visible = tensor if tensor.dtype == torch.bool else _visible(tensor)
            mask = TransformersMask(visible[..., : keys[1]], is_causal, real)
        if is_shared:
            call.masks[made_of] = mask
        return mask


def _visible(added: Tensor) -> Tensor:
    """Which keys a mask of floats leaves visible: a key 9,000 below the largest of its row is hidden (MarkupLM adds -10,000)."""
    return added > (added.amax(-1, keepdim=True) - 9e3).clamp(min=torch.finfo(added.dtype).min / 2)


class AdoptedCore(DotProductAttention):
    """The core of an adopted attention module. It has no parameters, so that state dicts stay as they are.

    ``scale`` is None for the scale of the model, or what ``set_scale`` was given. ``own_scale`` is the model's own in the last call,
    and ``own_factor`` the part of it by which the module had multiplied its queries before the call. ``is_cross`` is whether the
    running attention module was given other states for its keys. ``folds`` are what ``fold_scale`` has multiplied.
    """

    def __init__(self, adoption: Adoption, *, backend: str = "auto") -> None:
        super().__init__(backend=backend)
        self.adoption = adoption
        self.scale: tuple[str | float, float] | None = None
        self.own_scale, self.own_factor = 1.0, 1.0
        self.is_cross = False
        self.folds: list[Fold] = []

    def set_scale(self, to: str | float, factor: float) -> None:
        """Replace the model's own scale by ``factor`` times a fixed scale."""
        if to == "own":
            self.scale = None
            return
        scale_multiplier(to, 1)  # raises where the scale is not a fixed number
        self.scale, self.adoption.is_scaled = (to, factor), True

    @staticmethod
    def fold_scale(model: nn.Module, to: str | float, factor: float, inputs: Mapping[str, Any] | None) -> None:
        """Fold the scale of all adopted attention of ``model``, as ``minitx.nn.fold_scale`` says."""
        fold_adopted(model, adopted_cores(model), to, factor, inputs)

    @staticmethod
    def fold_back(model: nn.Module) -> None:
        """Give the cores the model's own scale again, for good, with the function as it is now. The weights take the change."""
        AdoptedCore.fold_scale(model, "own", 1.0, None)
        for module in adopted_cores(model).values():
            module.core.folds = []


def adopt_hf(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Put our attention core under a Hugging Face model, in place, and return the model.

    Logits, gradients, caches and ``generate`` stay those of the model under ``sdpa`` or ``eager``, within rounding. The modules
    of the model get a copy of their config, so that other models made from the same config object stay as they are.
    ``output_attentions=True`` returns the weights of the core. A block of the model is a layer that transformers marks for gradient
    checkpointing, or the item of an ``nn.ModuleList``, that contains attention.

    Args:
        model: a ``transformers.PreTrainedModel``, or a module that contains such models, for example one of PEFT.
        backend: the backend of the cores, as in ``DotProductAttention``.

    Raises:
        TypeError: ``model`` contains no transformers model. ValueError: the model is adopted already, or its attention, or that
            of one of its layers, does not pass through transformers' ``AttentionInterface`` (Falcon, BLOOM, GPT-Neo, GPT-J,
            LongT5), so that no other function can take its place. A later call that selects keys with ``indices``
            (DeepSeek V3.2) is refused, too.

    Warns:
        UserWarning: some layers are torch's own ``nn.MultiheadAttention`` (the pooling head of SigLIP), or compute attention
            themselves (the picture tokenizer of Chameleon, the speech encoder of Granite Speech). They stay as they are.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    roots = list(outermost(model)) if isinstance(model, nn.Module) else []
    if not roots:
        raise TypeError(f"adopt_hf takes a model of transformers, got {type(model).__name__}, which contains none")
    if adopted_cores(model):
        raise ValueError(f"{type(model).__name__} is adopted already: release_hf gives it back")
    layers = _attention_layers(model)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask_of_call)
    adoption = Adoption(_copy_configs(model))
    for module in layers.values():
        module.core = AdoptedCore(adoption, backend=backend)
        arguments = inspect.signature(module.forward).parameters
        module.core.is_cross = "cross_attention_states" in arguments  # always, also where a cache has them (Mllama)
        if not {*OTHER_STATES, "key", "keys"}.isdisjoint(arguments):
            enter = partial(adoption.enter_attention, list(arguments))
            adoption.hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            adoption.hooks.append(module.register_forward_pre_hook(adoption.enter_model, with_kwargs=True))
            adoption.hooks.append(module.register_forward_hook(adoption.leave_model, always_call=True))
    _mark_blocks(model, layers.values())
    for root in roots:
        root.adoption = adoption
        root.set_attn_implementation(NAME)
    still = [name for name, module in layers.items() if module.config._attn_implementation != NAME]
    if still:
        release_hf(model)
        raise ValueError(f"{still[0]} of {type(model).__name__} cannot change its attention: transformers left it as it was")
    torchs = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    others = [name for name, kind in _without(model, layers) if _attends_by_itself(kind, others=True)]
    of_torch = "is torch's nn.MultiheadAttention (swap_attention(model), before adopt_hf, gives it our core, too)"
    for what, names in {of_torch: torchs, "computes its attention itself": others}.items():
        if names:
            kept = "it stays as it is, is not recorded, and keeps its scale"
            warnings.warn(f"{', '.join(names)} of {type(model).__name__} {what}: {kept}", stacklevel=2)
    return model


def release_hf(model: nn.Module) -> nn.Module:
    """Undo ``adopt_hf``: remove the cores, give the modules their own configs and scales back, and undo ``fold_scale``.

    Raises:
        ValueError: the model is not adopted, or is a part of the model that was adopted.
    """
    modules = list(model.modules())
    roots = [one for one in modules if isinstance(vars(one).get("adoption"), Adoption) and not isinstance(one, AdoptedCore)]
    adoptions = [vars(one).pop("adoption") for one in roots]
    if not adoptions:
        raise ValueError(f"{type(model).__name__} is {'a part of an adopted model' if adopted_cores(model) else 'not adopted'}")
    originals = {id(copied): original for adoption in adoptions for copied, original in adoption.configs}
    for module in modules:
        for name, value in vars(module).items():
            if id(value) in originals:
                setattr(module, name, originals[id(value)])
        vars(module).pop("is_block", None)
        core = getattr(module, "core", None)
        if isinstance(core, AdoptedCore) and core.adoption in adoptions:
            for fold in reversed(core.folds):
                fold.apply(undo=True)
            del module.core
    for adoption in adoptions:
        for handle in adoption.hooks:
            handle.remove()
    return model


def _check_ours(model: nn.Module) -> None:
    """Raise an error if attention whose scale was changed no longer passes through its core."""
    for name, module in adopted_cores(model).items():
        if module.core.scale is not None and (other := module.config._attn_implementation) != NAME:
            said = f"was set to {other!r} after its scale was changed, and would use the old scale"
            back = f"set_attn_implementation({NAME!r}) brings the new one back, release_hf(model) takes it away"
            raise RuntimeError(f"the attention of {name or type(module).__name__} {said}: {back}")


def adopted_cores(model: nn.Module) -> dict[str, Any]:
    """Return the adopted attention modules of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(getattr(module, "core", None), AdoptedCore)}


def _attention_layers(model: nn.Module) -> dict[str, Any]:
    """Return the attention modules of ``model`` by name. Raise a ValueError if some attention cannot be replaced."""
    layers = {name: module for name, module in model.named_modules() if _calls_interface(type(module))}
    if others := [name for name, kind in _without(model, layers) if _attends_by_itself(kind)]:
        where = f"the attention of {others[0]} in {type(model).__name__}"
        said = "does not pass through transformers' AttentionInterface, so no other function can take its place"
        raise ValueError(f"{where} {said}")
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention to adopt: no layer calls transformers' AttentionInterface")
    if taken := [name for name, module in layers.items() if hasattr(module, "core")]:
        raise ValueError(f"{taken[0]} has an attribute named core already")
    return layers


def _without(model: nn.Module, layers: Iterable[str]) -> list[tuple[str, Any]]:
    """The names and classes of the modules that neither are nor contain one of ``layers``."""
    known = {*layers, "", *(around for name in layers for around in _around(name))}
    return [(name, type(module)) for name, module in model.named_modules() if name not in known]


def _mark_blocks(model: nn.Module, layers: Collection[nn.Module]) -> None:
    """Note which modules are blocks, for those who look at the residual stream: layers of transformers' class, else of a list (ALBERT)."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for name in [name for name, module in model.named_modules(remove_duplicate=False) if module in layers]:
        around: list[Any] = [model, *map(model.get_submodule, _around(name))]
        marked = [module for module in around if isinstance(module, GradientCheckpointingLayer)]
        listed = [module for outer, module in pairwise(around) if isinstance(outer, nn.ModuleList)]
        for block in marked or listed[-1:]:
            block.is_block = True


def _around(name: str) -> list[str]:
    """The names of the modules that contain the module ``name``, the outermost first."""
    return [name[:end] for end, letter in enumerate(name) if letter == "."]


def _calls_interface(kind: type[nn.Module]) -> bool:
    """Whether the code of ``forward`` names a registry of attention functions."""
    from transformers import AttentionInterface

    forward = inspect.unwrap(kind.forward)
    return isinstance(forward, FunctionType) and any(
        isinstance(forward.__globals__.get(name), AttentionInterface) for name in _names_of(forward.__code__)
    )


@cache
def _attends_by_itself(kind: type[nn.Module], others: bool = False) -> bool:
    """Whether methods of a class compute a softmax, and take a mask (not that of padding alone, as routers of experts do) or multiply
    before and after it: with ``@``, as SAM does. ``others``: or with other products, or they call torch's function.

    ``__init__`` does not count: a loss has options that are named after masks.
    """
    methods = [vars(base)[name] for base in kind.__mro__ for name in vars(base) if name != "__init__"]
    unwrapped = [inspect.unwrap(method) for method in methods if callable(method)]
    codes = [method.__code__ for method in unwrapped if isinstance(method, FunctionType)]
    arguments = {name for code in codes for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    takes_mask = any(name.endswith("mask") and name != "padding_mask" for name in arguments)
    attends = [code for code in codes if {"softmax", "scaled_dot_product_attention"} & set(_names_of(code))]
    steps = {"@": "p", "softmax": "s"} | (OTHER_STEPS if others else {})
    found = [
        "".join(steps.get(str(one.argval), steps.get(one.argrepr, "")) for one in dis.get_instructions(code))
        for code in attends
    ]
    return (takes_mask and bool(attends)) or any(re.search("p.*s.*p", marks) for marks in found)


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


def _mask_of_call(*, config: Any = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """The mask that transformers builds for ``sdpa``. A causal one is not left out where layers share keys: they may drop queries (Gemma 4)."""
    from transformers.masking_utils import sdpa_mask

    shares_keys = bool(stated(config, "num_kv_shared_layers"))
    return sdpa_mask(**options, config=config, allow_is_causal_skip=allow_is_causal_skip and not shares_keys)


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
    if chosen := [name for name in ("indices", "block_indices", "sinks") if options.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} hands {chosen[0]} to its attention function, which no core takes: release_hf"
        )
    core: AdoptedCore = module.core
    if is_causal is None:  # a module that always gets a mask from transformers need not say it (NLLB-MoE, Mllama)
        is_causal = getattr(module, "is_causal", False) or (getattr(module, "is_decoder", False) and not core.is_cross)
    mask, bias, S = _mask_and_bias(core, attention_mask, position_bias, bool(is_causal), query.shape[2], key)
    value = value[:, :, :S]
    query, key = query.to(value), key[:, :, :S].to(value)  # under autocast, rotary makes float32 of both
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)  # learned queries have one row
    own = getattr(module, "scaling", None)
    before = own if scaling == 1 and isinstance(own, float) else 1.0  # OPT and Whisper multiply their queries themselves
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if not torch.compiler.is_compiling():
        core.own_scale, core.own_factor = scaling * before, before
    if core.scale is not None:
        to, factor = core.scale
        scaling = scale_multiplier(to, query.shape[-1]) * factor / before
    wanted = core.adoption.call.weights_wanted
    call = AttentionCall(
        query, key, value, mask, bias, scaling, softcap, s_aux, dropout_p=dropout, need_weights=wanted, is_cross=core.is_cross
    )
    out, weights = core(call) if wanted else (core(call), None)
    return out.transpose(1, 2).contiguous(), weights


def _mask_and_bias(
    core: AdoptedCore, attention_mask: Tensor | None, position_bias: Tensor | None, causal: bool, L: int, key: Tensor
) -> tuple[Mask | None, Tensor | None, int]:
    """What hides keys, what is added to the scores, and how many keys count: a static cache hands out keys that are not written."""
    (B, _, S, _), key_mask = key.shape, core.adoption.call.key_masks[core.is_cross]
    if attention_mask is None:
        S = min(L, S) if causal and L > 1 else S
    elif causal and not core.is_cross and key_mask is not None and key_mask.shape[1] >= L:  # else it is of other keys
        S = min(S, key_mask.shape[1])
    mask = core.adoption.mask(attention_mask, causal, (B, S), core.is_cross)
    added = [part[..., :S] for part in (position_bias, attention_mask) if part is not None and part.dtype != torch.bool]
    return mask, reduce(operator.add, added) if added else None, S
