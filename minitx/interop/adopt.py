"""Unchanged Hugging Face models whose attention runs through our core.

``adopt_hf(model)`` gives every attention module of a transformers model (v5) a child ``core``, the same
``DotProductAttention`` that our own models have, and lets transformers call it through its public ``AttentionInterface``. The
model keeps its weights, its code and its results. ``capture``, ``intervene``, the statistics and the viewer then work on it
while the fused kernel runs.

Nothing depends on the name of a model. An attention module is a module whose ``forward`` calls a function of transformers'
``AttentionInterface``. The arguments of this call show the differences between models.
"""

from __future__ import annotations

import copy
import inspect
import operator
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass, field
from functools import partial, reduce
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minitx.config.schema import stated
from minitx.interop.trial import Trial, answer, error_text, made_up_inputs, settled
from minitx.nn.arguments import Arguments
from minitx.nn.attention import DotProductAttention
from minitx.nn.changes import joined
from minitx.nn.folding import Again, Use, fold_scale
from minitx.nn.functional import AttentionCall
from minitx.nn.masks import Causal, Dense, Mask, Padding
from minitx.nn.scale import OtherScale, scale_multiplier

NAME = "minitx"
"""The name of our function in transformers' two registries. Nothing else is global to the process."""

OTHER_STATES = ("key_value_states", "encoder_hidden_states")
"""The arguments of attention modules for the states of another sequence."""

QUERY_AND_KEY = (("query", "key"), ("queries", "keys"))
"""Pairs of arguments of attention modules: the same tensor twice, or the states of two sequences (SAM 2, V-JEPA 2)."""

WARNINGS = {
    "of torch": "torch's nn.MultiheadAttention stays unchanged, is not recorded and keeps its scale: call swap_attention(model) "
    "before adopt_hf to replace it, too",
    "no core": "layers whose attention does not pass through transformers' AttentionInterface stay unchanged: their attention is not "
    "recorded, and they keep their scale",
    "not run": "attention that did not run in the check is not checked: pass check=inputs, the arguments of a call that runs it",
    "not checked": "the adopted model is not checked: pass check=inputs, the arguments of a call",
}
"""The warnings of ``adopt_hf``. The names of modules, or a reason, follow in brackets."""


@dataclass(frozen=True, eq=False)
class TransformersMask(Dense):
    """The mask of a call of transformers: its tensor, whether it is causal, and which keys are padding.

    ``tensor`` alone decides visibility. The rest is for analysis, because a bool tensor does not show why a key is hidden. The key mask
    is not a field, so backends do not keep it for the backward pass.
    """

    is_causality: bool = False  # type: ignore[misc]  # in other masks it belongs to the class
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
        needs_weights: whether this call, or a call around it, has ``output_attentions=True``.
        key_masks: the real keys of the running model, bool (B, S), from its ``attention_mask``, and the real keys of the other
            sequence. None: no padding.
        masks: the bool masks of the outermost call, by the arguments from which they were built. Its layers share them, and the results
            that kernels store with a mask.
    """

    needs_weights: bool = False
    key_masks: Sequence[Tensor | None] = (None, None)
    masks: dict[tuple[Any, ...], Mask] = field(default_factory=dict)


class Running(threading.local):
    """The running calls of an adopted model, the outermost first. Each thread has its own list."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __reduce__(self) -> tuple[type[Running], tuple[()]]:
        return Running, ()  # a copy of the model runs nothing yet


class Checkpoint:
    """The checkpoint function that transformers set on a layer. In the backward pass, the layer runs again within the same ``Call``.

    The backward pass may run after other calls, and in a thread of autograd.
    """

    def __init__(self, adoption: Adoption, function: Callable[..., Any]) -> None:
        self.adoption, self.function = adoption, function

    def __call__(self, layer: Callable[..., Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph already contains both runs of the layer
            return self.function(layer, *args)
        return self.function(partial(self.adoption.run_within, self.adoption.call, layer), *args)


class Adoption:
    """The state that the cores of one adopted model share: arguments of the running call that its attention modules may not get.

    Attributes:
        configs: pairs of a config's copy, which the adopted model uses, and the original.
        checkpointed: the modules that may checkpoint their layers, or themselves.
        hooks: the handles of the hooks that record the call.
        is_scaled: whether ``set_scale`` or ``fold_scale`` has changed a core.
        needs_weights: whether the last call needed weights, for layers that torch's checkpoint function runs again.
        running: the calls that are running.
    """

    def __init__(self, configs: list[tuple[Any, Any]], checkpointed: list[Any]) -> None:
        self.configs, self.checkpointed = configs, checkpointed
        self.hooks: list[RemovableHandle] = []
        self.needs_weights, self.is_scaled = False, False
        self.running = Running()

    @property
    def call(self) -> Call:
        """The innermost call."""
        return self.running.calls[-1] if self.running.calls else Call(self.needs_weights)

    def enter_model(self, arguments: Arguments, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Record the arguments of a call. An inner model may be called without ``output_attentions``, or with a 4-D mask."""
        calls = self.running.calls
        outer = calls[-1] if calls else Call()
        if not calls and not torch.compiler.is_compiling():
            self.wrap_checkpoints()
            if self.is_scaled:
                _check_ours(model)
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
        calls.append(Call(self.needs_weights, key_masks, outer.masks))

    def wrap_checkpoints(self) -> None:
        """Wrap the checkpoint functions. They have no public access in transformers, which may set them at any time."""
        for module in self.checkpointed:
            function = vars(module).get("_gradient_checkpointing_func")
            if function is not None and not isinstance(function, Checkpoint):
                module._gradient_checkpointing_func = Checkpoint(self, function)

    def unwrap_checkpoints(self) -> None:
        """Restore the checkpoint functions of the modules."""
        for module in self.checkpointed:
            function = vars(module).get("_gradient_checkpointing_func")
            if isinstance(function, Checkpoint):
                module._gradient_checkpointing_func = function.function

    def run_within(self, call: Call, function: Callable[..., Any], *args: Any) -> Any:
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
            mask = TransformersMask(visible[..., : keys[1]], is_causal, real)
        if is_shared:
            call.masks[made_of] = mask
        return mask


def _not_hidden(added: Tensor) -> Tensor:
    """The keys that a float mask leaves visible. A key 9,000 below the largest of its row is hidden (MarkupLM adds -10,000)."""
    return added > (added.amax(-1, keepdim=True) - 9e3).clamp(min=torch.finfo(added.dtype).min / 2)


class AdoptedCore(OtherScale, DotProductAttention):
    """The core of an adopted attention module. It has no parameters, so state dicts do not change.

    ``model_scale`` is the scale that the model used in the last call, and ``model_factor`` the part of it by which the module had
    already multiplied its queries. ``is_cross`` is whether the running attention module got other states for its keys.
    """

    def __init__(self, adoption: Adoption, *, backend: str = "auto") -> None:
        super().__init__(backend=backend)
        self.adoption = adoption
        self.scale = None
        self.model_scale, self.model_factor = 1.0, 1.0
        self.is_cross = False
        self.folds = []

    def set_scale(self, to: str | float, factor: float) -> None:
        super().set_scale(to, factor)
        self.adoption.is_scaled = True

    def trial(
        self, model: nn.Module, layers: Mapping[str, Any], inputs: Mapping[str, Any] | None
    ) -> tuple[dict[str, Use], Again]:
        trials = list[Trial]()

        def record(uses: dict[str, Use], name: str, core: AdoptedCore, args: tuple[AttentionCall]) -> None:
            uses.setdefault(name, Use(args[0].query, args[0].key, args[0].scale * core.model_factor, core.model_scale))

        @contextmanager
        def recording() -> Iterator[dict[str, Use]]:
            uses = dict[str, Use]()
            with ExitStack() as hooks:
                for name, layer in layers.items():
                    hooks.enter_context(layer.core.register_forward_pre_hook(partial(record, uses, name)))
                yield uses

        def again() -> tuple[dict[str, Use], str]:
            with recording() as uses:
                return uses, "; ".join(filter(None, (trial.difference({})[0] for trial in trials)))

        for root in outermost(model):
            try:
                trials.append(Trial(root, made_up_inputs(root) if inputs is None else inputs))
            except ValueError as error:
                raise ValueError(f"cannot fold the scale, because {error}: pass inputs=, the arguments of a call") from None
        with recording() as uses:
            for trial in trials:
                with settled(trial.model):
                    answer(trial.model, trial.inputs)
        return uses, again


def fold_back(model: nn.Module) -> None:
    """Restore the own scale of an adopted model permanently. The weights change, so that the function stays the same."""
    fold_scale(model, "own")
    for module in adopted_cores(model).values():
        module.core.folds = []


def outermost(module: nn.Module) -> Iterator[Any]:
    """The transformers models in ``module`` that are not inside of another."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from outermost(child)


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


def _trials(model: nn.Module, roots: Sequence[Any], check: str | bool | Mapping[str, Any]) -> tuple[list[Trial], list[str]]:
    """Call the models before the change. Also return the reasons why some of them cannot be called."""
    if isinstance(check, Mapping):
        try:
            return [Trial(model, check)], []
        except Exception as error:
            raise ValueError(f"check={{...}}: a call of {type(model).__name__} with it fails: {error_text(error)}") from error
    trials, reasons = list[Trial](), list[str]()
    for root in roots if check else ():
        try:
            if any(parameter.is_meta for parameter in root.parameters()):
                raise ValueError("weights are on the meta device or offloaded")
            trials.append(Trial(root, made_up_inputs(root)))
        except Exception as error:  # a model of any kind may fail in any way
            reasons.append(error_text(error))
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
    """Add cores to the ``layers`` of a model, and let transformers call them."""
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask_of_call)
    adoption = Adoption(_copy_configs(model), [m for m in model.modules() if hasattr(m, "gradient_checkpointing")])
    for root in roots:
        root.adoption = adoption
    for module in layers.values():
        module.core = AdoptedCore(adoption, backend=backend)
        arguments = Arguments(module)
        module.core.is_cross = "cross_attention_states" in arguments.names  # always, even if a cache holds the states (Mllama)
        if not {*OTHER_STATES, "key", "keys"}.isdisjoint(arguments.names):
            enter = partial(adoption.enter_attention, arguments)
            adoption.hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            adoption.hooks.append(
                module.register_forward_pre_hook(partial(adoption.enter_model, Arguments(module)), with_kwargs=True)
            )
            adoption.hooks.append(module.register_forward_hook(adoption.leave_model, always_call=True))
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
    roots = [m for m in modules if isinstance(vars(m).get("adoption"), Adoption) and not isinstance(m, AdoptedCore)]
    adoptions = [vars(root).pop("adoption") for root in roots]
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
                f"old scale: call set_attn_implementation({NAME!r}) to keep the new scale, or release_hf(model) to restore the old scale"
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

    In a hybrid (Qwen3-Next, Bamba), the blocks are all layers of a list in which some layers have attention.
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


def _mask_of_call(*, config: Any = None, allow_is_causal_skip: bool = True, **options: Any) -> Tensor | None:
    """The mask that transformers builds for ``sdpa``.

    A causal mask is always built if layers share keys, because such layers may drop queries (Gemma 4).
    """
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

    ``attention_mask`` is the mask that transformers builds for ``sdpa``: None, bool (True = may attend), or a float that is added.
    Without a mask, ``is_causal`` is aligned at the upper left, as in torch: a static cache returns keys that are not written yet.
    """
    if unsupported := [name for name in ("indices", "block_indices", "sinks") if options.get(name) is not None]:
        name = unsupported[0]
        raise ValueError(f"{type(module).__name__} passes {name} to its attention function, but our core does not support it")
    core: AdoptedCore | None = getattr(module, "core", None)
    if core is None:
        raise RuntimeError(
            f"{type(module).__name__} has no core: its model was built from the config of an adopted model, so call adopt_hf(model)"
        )
    if is_causal is None:  # some modules rely on the mask from transformers (NLLB-MoE, Mllama)
        is_causal = getattr(module, "is_causal", False) or (getattr(module, "is_decoder", False) and not core.is_cross)
    mask, bias, S = _mask_and_bias(core, attention_mask, position_bias, bool(is_causal), query.shape[2], key)
    value = value[:, :, :S]
    query, key = query.to(value), key[:, :, :S].to(value)  # under autocast, rotary positions convert both to float32
    if query.shape[0] != key.shape[0]:
        query = query.expand(key.shape[0], -1, -1, -1)  # learned queries have one row
    attribute = getattr(module, "scaling", None)
    before = attribute if scaling == 1 and isinstance(attribute, float) else 1.0  # OPT and Whisper scale their queries first
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if not torch.compiler.is_compiling():
        core.model_scale, core.model_factor = scaling * before, before
    if core.scale is not None:
        to, factor = core.scale
        scaling = scale_multiplier(to, query.shape[-1]) * factor / before
    needs_weights = core.adoption.call.needs_weights
    settings: dict[str, Any] = {"dropout_p": dropout, "need_weights": needs_weights, "is_cross": core.is_cross}
    call = AttentionCall(query, key, value, mask, bias, scaling, softcap, s_aux, **settings)
    out, weights = core(call) if needs_weights else (core(call), None)
    return out.transpose(1, 2).contiguous(), weights


def _mask_and_bias(
    core: AdoptedCore, attention_mask: Tensor | None, position_bias: Tensor | None, causal: bool, L: int, key: Tensor
) -> tuple[Mask | None, Tensor | None, int]:
    """Return the mask, the tensor to add to the scores, and the number of keys to use: a static cache also returns unwritten keys."""
    (B, _, S, _), key_mask = key.shape, core.adoption.call.key_masks[core.is_cross]
    if attention_mask is None:
        S = min(L, S) if causal and L > 1 else S
    elif causal and not core.is_cross and key_mask is not None and key_mask.shape[1] >= L:  # otherwise it belongs to other keys
        S = min(S, key_mask.shape[1])
    mask = core.adoption.mask(attention_mask, causal, (B, S), core.is_cross)
    added = [part[..., :S] for part in (position_bias, attention_mask) if part is not None and part.dtype != torch.bool]
    return mask, reduce(operator.add, added) if added else None, S
