"""Unchanged Hugging Face models with our core under their attention.

``adopt_hf(model)`` gives every attention module of a transformers model (v5) a child ``core``, the same
``DotProductAttention`` that our own models have, and lets transformers call it through its public ``AttentionInterface``. The
model keeps its weights, its code and its results. From then on ``capture``, ``intervene``, the statistics and the viewer work
on it while the fused kernel runs.

Nothing depends on the name of a model. An attention module is a module whose ``forward`` calls a function of transformers'
``AttentionInterface``. Differences between models are read off the arguments of this call.
"""

from __future__ import annotations

import copy
import inspect
import operator
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial, reduce
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minitx.config.schema import stated
from minitx.interop.folding import Fold, fold_adopted, outermost
from minitx.interop.trial import Trial, made_up_inputs, said_by
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

WARNINGS = {
    "of torch": "torch's nn.MultiheadAttention stays unchanged, is not recorded and keeps its scale: call swap_attention(model) "
    "before adopt_hf to give it our core, too",
    "no core": "layers whose attention does not pass through transformers' AttentionInterface stay unchanged: their attention is not "
    "recorded, and they keep their scale",
    "not run": "attention that did not run in the check is not checked: pass check=inputs, the arguments of a call that runs it",
    "not checked": "the adopted model is not checked: pass check=inputs, the arguments of a call",
}
"""The warnings of ``adopt_hf``. The names of modules, or a reason, follow in brackets."""


@dataclass(frozen=True, eq=False)
class TransformersMask(Dense):
    """The mask of a call of transformers: its tensor, whether it is causal, and which keys are padding.

    ``tensor`` alone decides visibility. The rest serves analysis: a bool tensor does not tell why a key is hidden. The key mask is not
    a field, so backends do not keep it for the backward pass.
    """

    is_causality: bool = False  # type: ignore[misc]  # of the class elsewhere
    key_mask: InitVar[Tensor | None] = None

    def __post_init__(self, key_mask: Tensor | None) -> None:
        super().__post_init__()
        vars(self)["padding"] = [] if key_mask is None else [Padding(key_mask)]

    def parts(self) -> Iterator[Mask]:
        yield self
        yield from vars(self)["padding"]


@dataclass(eq=False)
class Call:
    """The arguments of a running call of an adopted model.

    Attributes:
        weights_wanted: whether the call, or one around it, has ``output_attentions=True``.
        key_masks: the real keys of the running model, bool (B, S), by its ``attention_mask``, and the real keys of the other
            sequence. None: no padding.
        masks: the bool masks of the outermost call, by the arguments that they were made of. Its layers share them and everything that
            a kernel has computed of a mask.
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


class Checkpoint:
    """transformers' checkpoint function of a layer. The layer runs within the same ``Call`` again in the backward pass. The
    backward pass may run after other calls, and in a thread of autograd.
    """

    def __init__(self, adoption: Adoption, function: Callable[..., Any]) -> None:
        self.adoption, self.function = adoption, function

    def __call__(self, layer: Callable[..., Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph has the layer twice already
            return self.function(layer, *args)
        return self.function(partial(self.adoption.run_within, self.adoption.call, layer), *args)


class Adoption:
    """The state that the cores of one adopted model share: arguments of the running call that its attention modules may not get.

    Attributes:
        configs: pairs of the copy of a config that the adopted model uses, and its original.
        checkpointed: the modules that may checkpoint their layers, or themselves.
        hooks: the handles of the hooks that note the call.
        is_scaled: whether ``set_scale`` or ``fold_scale`` has changed a core.
        weights_wanted: whether the last call wanted weights, for layers that torch's own checkpoint runs again.
        running: the calls that are running.
    """

    def __init__(self, configs: list[tuple[Any, Any]], checkpointed: list[Any]) -> None:
        self.configs, self.checkpointed = configs, checkpointed
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
        if not calls and not torch.compiler.is_compiling():
            self.wrap_checkpoints()
            if self.is_scaled:
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

    def wrap_checkpoints(self) -> None:
        """Wrap the checkpoint functions. transformers has no public place for them, and sets them at any time."""
        for module in self.checkpointed:
            function = vars(module).get("_gradient_checkpointing_func")
            if function is not None and not isinstance(function, Checkpoint):
                module._gradient_checkpointing_func = Checkpoint(self, function)

    def unwrap_checkpoints(self) -> None:
        """Give the modules their checkpoint functions back."""
        for module in self.checkpointed:
            function = vars(module).get("_gradient_checkpointing_func")
            if isinstance(function, Checkpoint):
                module._gradient_checkpointing_func = function.function

    def run_within(self, call: Call, function: Callable[..., Any], *args: Any) -> Any:
        """Return ``function(*args)``, run within ``call``."""
        self.running.calls.append(call)
        try:
            return function(*args)
        finally:
            self.running.calls.pop()

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
    """The core of an adopted attention module. It has no parameters, so state dicts do not change.

    ``scale`` is None for the scale of the model, or the arguments of ``set_scale``. ``own_scale`` is the model's own scale in the last
    call; the module had multiplied its queries by ``own_factor`` of it before the call. ``is_cross`` tells whether the running
    attention module got other states for its keys. ``folds`` lists the weights that ``fold_scale`` has multiplied.
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
        """Fold the scale of all adopted attention of ``model``. See ``minitx.nn.fold_scale``."""
        fold_adopted(model, adopted_cores(model), to, factor, inputs)

    @staticmethod
    def fold_back(model: nn.Module) -> None:
        """Give the cores the model's own scale again, for good. The weights change so that the function does not."""
        AdoptedCore.fold_scale(model, "own", 1.0, None)
        for module in adopted_cores(model).values():
            module.core.folds = []


def adopt_hf(
    model: nn.Module, *, backend: str = "auto", check: Literal["auto", False] | Mapping[str, Any] = "auto"
) -> nn.Module:
    """Put our attention core under a Hugging Face model, in place, and return the model.

    Logits, gradients, caches and ``generate`` equal the model's under ``sdpa`` or ``eager``, within rounding. The modules of the
    model get a copy of their config, so other models made from the same config object do not change.
    ``output_attentions=True`` returns the weights of the core. A block of the model is a layer that transformers marks for gradient
    checkpointing, or the item of an ``nn.ModuleList``, that contains attention. In a hybrid such as Qwen3-Next, the layers without
    attention in the same list are blocks, too.

    With ``check``, the model is called twice before and once after, in evaluation mode and without gradients, and all random
    states are restored. The answers must agree within the rounding that is measured in the model, and in a causal model later tokens
    must still change nothing before them. Hooks of the model run in these calls, too.

    Args:
        model: a ``transformers.PreTrainedModel``, or a module that contains such models, for example a PEFT model.
        backend: the backend of the cores, as in ``DotProductAttention``.
        check: ``auto``: call the model with two short made-up rows, one of them padded, or with two made-up pictures. A mapping:
            the arguments of the call, for models of sound or of several modalities, or without padding for a model with torch's
            dynamic quantisation (padding changes the rounding of real tokens there). False: do not check, for example if the
            backend needs a device and the model is moved there later.

    Raises:
        TypeError: ``model`` contains no transformers model. ValueError: the model is adopted already; none of its attention passes
            through transformers' ``AttentionInterface`` (Falcon, BLOOM, GPT-Neo, GPT-J), so no other function can replace it; or
            the check fails. The model is then left unchanged.

    Warns:
        UserWarning: the check was not possible; some cores did not run in it; or some layers have no core and stay unchanged,
            because they are torch's own ``nn.MultiheadAttention`` (the pooling head of SigLIP), attend themselves (the encoder of
            LongT5), or do not attend (Mamba).
    """
    roots = list(outermost(model)) if isinstance(model, nn.Module) else []
    if not roots:
        raise TypeError(f"adopt_hf needs a transformers model, got {type(model).__name__}, and it contains none")
    if adopted_cores(model):
        raise ValueError(f"{type(model).__name__} is adopted already: release_hf gives it back")
    is_auto = isinstance(check, str) and check == "auto"
    if not (is_auto or check is False or isinstance(check, Mapping)):
        raise ValueError(f"check={check!r} must be 'auto', False, or a mapping: the arguments of a call")
    layers = _attention_layers(model)
    trials, unchecked = _trials(model, roots, check)
    try:
        _exchange(model, roots, layers, backend)
        silent = _compare(trials)
    except BaseException:
        release_hf(model)
        raise
    remarks = {
        "of torch": [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)],
        "no core": _layers_without_core(model),
        "not run": silent,
        "not checked": unchecked,
    }
    for kind, details in remarks.items():
        if details:
            more = [f"and {len(details) - 3} more"] if len(details) > 3 else []
            listed = ", ".join([*details[:3], *more])
            warnings.warn(f"{type(model).__name__}: {WARNINGS[kind]} ({listed})", stacklevel=2)
    return model


def _trials(model: nn.Module, roots: Sequence[Any], check: str | bool | Mapping[str, Any]) -> tuple[list[Trial], list[str]]:
    """Call the models before a change. Also return why some of them cannot be called."""
    if isinstance(check, Mapping):
        try:
            return [Trial(model, check)], []
        except Exception as error:
            raise ValueError(f"check={{...}}: a call of {type(model).__name__} with it fails: {said_by(error)}") from error
    trials, reasons = list[Trial](), list[str]()
    for root in roots if check else ():
        try:
            if any(parameter.is_meta for parameter in root.parameters()):
                raise ValueError("weights are on the meta device or offloaded")
            trials.append(Trial(root, made_up_inputs(root)))
        except Exception as error:  # a model of any kind may fail in any way
            reasons.append(said_by(error))
    return trials, reasons


def _compare(trials: Iterable[Trial]) -> list[str]:
    """Call the models again, and return the names of the attention modules that did not run."""
    silent = list[str]()
    for trial in trials:
        difference, names = trial.difference({name: layer.core for name, layer in adopted_cores(trial.model).items()})
        if difference:
            raise ValueError(f"{type(trial.model).__name__} cannot be adopted: {difference}")
        silent += names
    return silent


def _exchange(model: nn.Module, roots: Sequence[Any], layers: Mapping[str, Any], backend: str) -> None:
    """Give the ``layers`` of a model their cores, and let transformers call them."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask_of_call)
    adoption = Adoption(_copy_configs(model), [one for one in model.modules() if hasattr(one, "gradient_checkpointing")])
    for root in roots:
        root.adoption = adoption
    for module in layers.values():
        module.core = AdoptedCore(adoption, backend=backend)
        arguments = inspect.signature(module.forward).parameters
        module.core.is_cross = "cross_attention_states" in arguments  # always, even if a cache holds the states (Mllama)
        if not {*OTHER_STATES, "key", "keys"}.isdisjoint(arguments):
            enter = partial(adoption.enter_attention, list(arguments))
            adoption.hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            adoption.hooks.append(module.register_forward_pre_hook(adoption.enter_model, with_kwargs=True))
            adoption.hooks.append(module.register_forward_hook(adoption.leave_model, always_call=True))
    _mark_blocks(model, layers.values())
    for root in roots:
        root.set_attn_implementation(NAME)
    still = [name for name, module in layers.items() if module.config._attn_implementation != NAME]
    if still:
        raise ValueError(f"{still[0]} of {type(model).__name__} cannot change its attention: transformers did not replace it")


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
        adoption.unwrap_checkpoints()
    return model


def _check_ours(model: nn.Module) -> None:
    """Raise an error if attention whose scale was changed no longer passes through its core."""
    for name, module in adopted_cores(model).items():
        if module.core.scale is not None and (other := module.config._attn_implementation) != NAME:
            raise RuntimeError(
                f"the attention of {name or type(module).__name__} was set to {other!r} after its scale was changed, and would use the "
                f"old scale: set_attn_implementation({NAME!r}) restores the new scale, release_hf(model) the model's own"
            )


def adopted_cores(model: nn.Module) -> dict[str, Any]:
    """Return the adopted attention modules of ``model`` by name."""
    return {name: module for name, module in model.named_modules() if isinstance(getattr(module, "core", None), AdoptedCore)}


def _attention_layers(model: nn.Module) -> dict[str, Any]:
    """Return the attention modules of ``model`` by name. Raise a ValueError if no attention can be replaced."""
    layers = {name: module for name, module in model.named_modules() if _calls_interface(type(module))}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention to adopt: no layer calls transformers' AttentionInterface")
    if taken := [name for name, module in layers.items() if hasattr(module, "core")]:
        raise ValueError(f"{taken[0]} has an attribute named core already")
    return layers


def _layers_without_core(model: nn.Module) -> list[str]:
    """The names of the layers, as transformers marks them, that hold neither a core nor torch's attention."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    names = list[str]()
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") for other in names)
        attends = any(isinstance(part, AdoptedCore | nn.MultiheadAttention) for part in module.modules())
        if isinstance(module, GradientCheckpointingLayer) and not is_inside and not attends:
            names.append(name)
    return names


def _mark_blocks(model: nn.Module, layers: Collection[nn.Module]) -> None:
    """Mark the blocks, for analysis of the residual stream: layers of transformers' class, else items of a list (ALBERT).

    In a hybrid (Qwen3-Next, Bamba), the blocks are all layers of a list where some layers have attention.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for name in [name for name, module in model.named_modules(remove_duplicate=False) if module in layers]:
        around: list[Any] = [model, *map(model.get_submodule, _around(name))]
        marked = [module for module in around if isinstance(module, GradientCheckpointingLayer)]
        listed = [module for outer, module in pairwise(around) if isinstance(outer, nn.ModuleList)]
        lists = [outer for outer, module in pairwise(around) if isinstance(outer, nn.ModuleList) and module in marked]
        siblings = [layer for layers in lists for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
        for block in [*marked, *siblings] or listed[-1:]:
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
        raise ValueError(f"{type(module).__name__} hands {chosen[0]} to its attention function, and no core takes {chosen[0]}")
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
    """Return the mask, the tensor to add to the scores, and the number of keys that count: a static cache returns unwritten keys, too."""
    (B, _, S, _), key_mask = key.shape, core.adoption.call.key_masks[core.is_cross]
    if attention_mask is None:
        S = min(L, S) if causal and L > 1 else S
    elif causal and not core.is_cross and key_mask is not None and key_mask.shape[1] >= L:  # else it is of other keys
        S = min(S, key_mask.shape[1])
    mask = core.adoption.mask(attention_mask, causal, (B, S), core.is_cross)
    added = [part[..., :S] for part in (position_bias, attention_mask) if part is not None and part.dtype != torch.bool]
    return mask, reduce(operator.add, added) if added else None, S
