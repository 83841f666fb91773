"""Unchanged Hugging Face models whose attention runs through our core.

``adopt_hf(model)`` gives every attention module of a transformers model (v5) a child ``core``, the same
``DotProductAttention`` that our own models have, and lets transformers call it through its public ``AttentionInterface``. The
model keeps its weights, its code and its results. ``capture``, ``intervene``, the statistics and the viewer then work on it
while the fused kernel runs.

Nothing depends on the name of a model. An attention module is a module whose ``forward`` calls a function of transformers'
``AttentionInterface``. The arguments of this call show the differences between models.

A call of an adopted model, in order::

    model(input_ids, attention_mask=...)
      CallTracker.enter_model         hook: padding and output_attentions of this call; wraps checkpoint functions
      mask_function                   called by transformers: the mask that it builds for sdpa
      attention module of each layer
        CallTracker.enter_attention   hook: whether the keys are another sequence's
        attention_function            called by transformers: its arguments become an InterfaceCall
          CallTracker.mask            the tensor becomes a Mask, one object for all layers
          core(AttentionCall)         our kernel, under the hooks of capture and intervene
      CallTracker.leave_model         hook: back to the call of the surrounding model
    loss.backward()
      CheckpointFunction              runs a checkpointed layer again within the call of its first run

``adopted_core.py`` has the functions that transformers calls, ``call_tracker.py`` the hooks, ``trial.py`` the check of an adoption,
and ``adopted_fold.py`` the fold of a scale.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, Literal

from torch import nn
from torch.utils.hooks import RemovableHandle

from minitx.interop.adopted_core import (
    NAME,
    AdoptedCore,
    adopted_cores,
    attention_function,
    check_cores,
    mask_function,
)
from minitx.interop.call_tracker import OTHER_STATES, CallTracker
from minitx.interop.trial import AdoptionTrial, error_text, made_up_inputs, outermost
from minitx.nn.arguments import Arguments
from minitx.nn.config_differences import joined
from minitx.nn.folding import fold_scale

WARNINGS = {
    "of torch": "torch's nn.MultiheadAttention stays unchanged, is not recorded and keeps its scale: call swap_attention(model) "
    "before adopt_hf to replace it, too",
    "no core": "layers whose attention does not pass through transformers' AttentionInterface stay unchanged: their attention is not "
    "recorded, and they keep their scale",
    "not run": "attention that did not run in the check is not checked: pass check=inputs, the arguments of a call that runs it",
    "not checked": "the adopted model is not checked: pass check=inputs, the arguments of a call",
}
"""The warnings of ``adopt_hf``. The names of modules, or a reason, follow in brackets."""


@dataclass(eq=False)
class Adoption:
    """What ``adopt_hf`` changed in a model, for ``release_hf``.

    Attributes:
        configs: pairs of a config's copy, used by the adopted model, and the original.
        tracker: records the running calls for the cores.
        hooks: the handles of the hooks of ``tracker``.
    """

    configs: list[tuple[Any, Any]]
    tracker: CallTracker
    hooks: list[RemovableHandle] = field(default_factory=list)


def fold_back(model: nn.Module) -> None:
    """Restore the own scale of an adopted model permanently. The weights change, so that the function stays the same."""
    fold_scale(model, "own")
    for module in adopted_cores(model).values():
        module.core.folds = []


def adopt_hf(
    model: nn.Module, *, backend: str = "auto", check: Literal["auto", False] | Mapping[str, Any] = "auto"
) -> nn.Module:
    """Run the attention of a Hugging Face model through our core, in place, and return the model.

    Within rounding, logits, gradients, caches and ``generate`` give the same results as with ``sdpa`` or ``eager``. The modules of the
    model get a copy of their config, so other models made from the same config object do not change.
    ``output_attentions=True`` returns the weights of the core. A block of the model is a layer with attention that transformers marks
    for gradient checkpointing, or an item with attention of an ``nn.ModuleList``. In a hybrid such as Qwen3-Next, the layers without
    attention in the same list are blocks, too.

    With ``check``, the model is called twice before and once after, in evaluation mode and without gradients, and all random
    states are restored. The outputs must agree within the rounding that is measured in the model. In a causal model, later tokens
    must still not affect earlier outputs. Hooks of the model also run in these calls.

    Args:
        model: a ``transformers.PreTrainedModel``, or a module that contains such models, for example a PEFT model.
        backend: the backend of the cores, as in ``DotProductAttention``.
        check: ``auto``: call the model with two short random rows, one of them padded, or with two random images. A mapping: the
            arguments of the call, for audio or multimodal models, or without padding for a model with torch's dynamic quantisation
            (padding changes the rounding of real tokens there). False: do not check, for example if the backend needs a device and
            the model is moved there later.

    Raises:
        TypeError: ``model`` contains no transformers model. ValueError: the model is already adopted; none of its attention passes
            through transformers' ``AttentionInterface`` (Falcon, BLOOM, GPT-Neo, GPT-J), so it cannot be replaced; or the check
            fails. The model is then unchanged.

    Warns:
        UserWarning: the check was not possible; some cores did not run in it; or some layers have no core and stay unchanged,
            because they are torch's own ``nn.MultiheadAttention`` (the pooling head of SigLIP), attend themselves (the encoder of
            LongT5), or do not attend (Mamba).
    """
    roots = list(outermost(model)) if isinstance(model, nn.Module) else []
    if not roots:
        raise TypeError(f"adopt_hf needs a transformers model, or a module that contains one, got {type(model).__name__}")
    if adopted_cores(model):
        raise ValueError(f"{type(model).__name__} is already adopted: call release_hf first")
    if check is not False and not isinstance(check, Mapping) and not (isinstance(check, str) and check == "auto"):
        raise ValueError(f"check={check!r} must be 'auto', False, or a mapping with the arguments of a call")
    for root in roots:
        if root.config._attn_implementation == NAME:  # it was built from the config of an adopted model
            _copy_configs(root)
            root.set_attn_implementation("eager")
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
            warnings.warn(f"{type(model).__name__}: {WARNINGS[kind]} ({joined(details, ', ')})", stacklevel=2)
    return model


def _trials(
    model: nn.Module, roots: Sequence[Any], check: str | bool | Mapping[str, Any]
) -> tuple[list[AdoptionTrial], list[str]]:
    """Call the models before the change. Also return the reasons why some of them cannot be called."""
    if isinstance(check, Mapping):
        try:
            return [AdoptionTrial(model, check)], []
        except ValueError as error:
            raise ValueError(f"check={{...}}: a call of {type(model).__name__} with it fails: {error_text(error)}") from error
    trials, reasons = list[AdoptionTrial](), list[str]()
    for root in roots if check else ():
        try:
            if any(parameter.is_meta for parameter in root.parameters()):
                raise ValueError("weights are on the meta device or offloaded")
            trials.append(AdoptionTrial(root, made_up_inputs(root)))
        except ValueError as error:
            reasons.append(error_text(error))
    return trials, reasons


def _compare(trials: Iterable[AdoptionTrial]) -> list[str]:
    """Call the models again, and return the names of the attention modules that did not run."""
    silent = list[str]()
    for trial in trials:
        difference, names = trial.difference({name: layer.core for name, layer in adopted_cores(trial.model).items()})
        if difference:
            raise ValueError(f"{type(trial.model).__name__} cannot be adopted: {difference}")
        silent += names
    return silent


def _exchange(model: nn.Module, roots: Sequence[Any], layers: Mapping[str, Any], backend: str) -> None:
    """Add cores to the ``layers`` of a model, and let transformers call them."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    tracker = CallTracker([module for module in model.modules() if hasattr(module, "gradient_checkpointing")], check_cores)
    adoption = Adoption(_copy_configs(model), tracker)
    for root in roots:
        root.adoption = adoption
    for module in layers.values():
        module.core = AdoptedCore(tracker, backend=backend)
        arguments = Arguments(module)
        module.core.is_cross = "cross_attention_states" in arguments.names  # always, even if a cache holds the states (Mllama)
        if not {*OTHER_STATES, "key", "keys"}.isdisjoint(arguments.names):
            enter = partial(tracker.enter_attention, arguments)
            adoption.hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            enter = partial(tracker.enter_model, Arguments(module))
            adoption.hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            adoption.hooks.append(module.register_forward_hook(tracker.leave_model, always_call=True))
    _mark_blocks(model, layers.values())
    for root in roots:
        root.set_attn_implementation(NAME)
    unchanged = [name for name, module in layers.items() if module.config._attn_implementation != NAME]
    if unchanged:
        raise ValueError(
            f"the attention of {unchanged[0]} in {type(model).__name__} cannot be replaced: transformers did not change it"
        )


def release_hf(model: nn.Module) -> nn.Module:
    """Undo ``adopt_hf``: remove the cores, restore the configs and scales of the modules, and undo ``fold_scale``.

    Raises:
        ValueError: the model is not adopted, or is a part of the model that was adopted.
    """
    modules = list(model.modules())
    adoptions = [vars(m).pop("adoption") for m in modules if isinstance(vars(m).get("adoption"), Adoption)]
    if not adoptions:
        raise ValueError(f"{type(model).__name__} is {'a part of an adopted model' if adopted_cores(model) else 'not adopted'}")
    trackers = [adoption.tracker for adoption in adoptions]
    originals = {id(copied): original for adoption in adoptions for copied, original in adoption.configs}
    for module in modules:
        for name, value in vars(module).items():
            if id(value) in originals:
                setattr(module, name, originals[id(value)])
        vars(module).pop("is_block", None)
        core = getattr(module, "core", None)
        if isinstance(core, AdoptedCore) and core.tracker in trackers:
            for fold in reversed(core.folds):
                fold.apply(undo=True)
            del module.core
    for adoption in adoptions:
        for handle in adoption.hooks:
            handle.remove()
        adoption.tracker.unwrap_checkpoints()
    return model


def _attention_layers(model: nn.Module) -> dict[str, Any]:
    """Return the attention modules of ``model`` by name. Raise a ValueError if no attention can be replaced."""
    layers = {name: module for name, module in model.named_modules() if _calls_interface(type(module))}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention to adopt: no layer calls transformers' AttentionInterface")
    if taken := [name for name, module in layers.items() if hasattr(module, "core")]:
        raise ValueError(f"{taken[0]} already has an attribute named core")
    return layers


def _layers_without_core(model: nn.Module) -> list[str]:
    """The names of the layers that transformers marks and that contain neither a core nor torch's attention."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    names = list[str]()
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{other}.") for other in names)
        attends = any(isinstance(part, AdoptedCore | nn.MultiheadAttention) for part in module.modules())
        if isinstance(module, GradientCheckpointingLayer) and not is_inside and not attends:
            names.append(name)
    return names


def _mark_blocks(model: nn.Module, layers: Collection[nn.Module]) -> None:
    """Mark the blocks for analysis of the residual stream: layers of transformers' class, or else items of a list (ALBERT).

    In a hybrid (Qwen3-Next, Bamba), the blocks are all layers of a list, and only some have attention.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for name in [name for name, module in model.named_modules(remove_duplicate=False) if module in layers]:
        around: list[Any] = [model, *(model.get_submodule(name[:end]) for end, letter in enumerate(name) if letter == ".")]
        marked = [module for module in around if isinstance(module, GradientCheckpointingLayer)]
        listed = [module for outer, module in pairwise(around) if isinstance(outer, nn.ModuleList)]
        lists = [outer for outer, module in pairwise(around) if isinstance(outer, nn.ModuleList) and module in marked]
        siblings = [layer for layers in lists for layer in layers if isinstance(layer, GradientCheckpointingLayer)]
        for block in [*marked, *siblings] or listed[-1:]:
            block.is_block = True


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
    """Replace the configs of the modules by copies, and return pairs of copy and original. Nested configs stay nested."""
    from transformers import PreTrainedConfig

    memo: dict[int, Any] = {}
    pairs: dict[int, tuple[Any, Any]] = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                pairs[id(value)] = copy.deepcopy(value, memo), value
                setattr(module, name, pairs[id(value)][0])
    return list(pairs.values())
