"""The score scale of adopted models, folded into the weights of their queries and keys.

The weights that make the queries are found from one call of the model, without a table of models. The gradient of the queries shows
the weights and rows on which they depend. Euler's theorem shows the weights to which they are proportional. In a second call, the
outputs of these weights are set to zero, and all queries must then be zero. Keys are treated in the same way.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config.schema import stated
from minitx.interop.trial import made_up_inputs
from minitx.nn.functional import AttentionCall
from minitx.nn.modes import evaluating
from minitx.nn.precision import widest_float
from minitx.nn.scale import memory_of, overlap, scale_multiplier


@dataclass(frozen=True, eq=False)
class Fold:
    """A module whose output makes queries or keys, and their factor.

    Attributes:
        module: the last projection or norm before the scores.
        rows: a bool mask of the module's outputs that are queries (or keys).
        axis: the axis of the outputs in the module's weights.
        shift: 1 for a norm that multiplies by 1 + weight, else 0.
        ratio: the factor.
    """

    module: nn.Module
    rows: Tensor
    axis: int
    shift: float
    ratio: float

    @torch.no_grad()
    def apply(self, *, undo: bool = False) -> None:
        """Multiply the queries or keys by ``ratio``, or divide them by it."""
        for parameter in self.module.parameters(recurse=False):
            factor = torch.ones(self.rows.shape, dtype=parameter.dtype, device=parameter.device)
            factor.masked_fill_(self.rows.to(parameter.device), 1 / self.ratio if undo else self.ratio)
            outputs = parameter.movedim(self.axis, -1)
            outputs.copy_((outputs + self.shift) * factor - self.shift)

    def silence(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """A forward hook that sets the queries (or keys) in the module's output to 0."""
        return output.masked_fill(self.rows.to(output.device), 0.0)


def outermost(module: nn.Module) -> Iterator[Any]:
    """The transformers models in ``module`` that are not inside of another."""
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from outermost(child)


def fold_adopted(
    model: nn.Module, layers: Mapping[str, Any], to: str | float, factor: float, inputs: Mapping[str, Any] | None
) -> None:
    """Change the scale of adopted ``layers``, and multiply their queries and keys so that the function stays the same."""
    trained = {p: p.requires_grad for layer in layers.values() for p in layer.parameters() if p.is_floating_point()}
    if any(parameter.is_meta for parameter in trained):
        raise ValueError(
            "cannot fold the scale: weights of the attention are offloaded (on the meta device); load all of them first"
        )
    try:
        for parameter in trained:
            parameter.requires_grad_()
        calls = _first_calls(model, layers, inputs)
        ratios = {name: _ratio_of(name, layer, calls[name], to, factor) for name, layer in layers.items()}
        folds = _folds_of(model, layers, _sources(model, layers, calls, inputs), ratios)
    finally:
        for parameter, flag in trained.items():
            parameter.requires_grad_(flag)
    for name, listed in folds.items():
        for fold in listed:
            fold.apply()
        layers[name].core.set_scale(to, factor)
        layers[name].core.folds += listed


def _first_calls(model: nn.Module, layers: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, AttentionCall]:
    """Call each transformers model once, and return the first call of each layer's core."""
    calls: dict[str, AttentionCall] = {}
    for root in outermost(model):
        with ExitStack() as hooks, evaluating(root), torch.enable_grad():
            for name, layer in layers.items():
                hook = layer.core.register_forward_pre_hook(lambda _, args, name=name: calls.setdefault(name, args[0]) and None)
                hooks.enter_context(hook)
            root(**(_made_up_inputs(root) if inputs is None else inputs))
    if missing := [name for name in layers if name not in calls]:
        raise ValueError(
            f"cannot fold the scale: {missing[0]} did not run when the model was called. Pass the whole model, or the arguments of "
            "another call as inputs="
        )
    return calls


def _made_up_inputs(root: Any) -> dict[str, Tensor]:
    try:
        return made_up_inputs(root)
    except ValueError as error:
        raise ValueError(f"cannot fold the scale, because {error}: pass inputs=, the arguments of a call") from None


def _sources(
    model: nn.Module, layers: Mapping[str, Any], calls: Mapping[str, AttentionCall], inputs: Mapping[str, Any] | None
) -> dict[str, tuple[Fold | None, Fold | None]]:
    """Return, for each layer, the module that makes only the queries, and the module that makes only the keys, or None.

    ``_source_of`` may mistake a small adapter for rounding, above all in bfloat16. With the module silenced, the adapter's output
    remains.
    """
    sources = {}
    for name, layer in layers.items():
        call = calls[name]
        rest = [part for part in (call.value, call.attn_bias, call.sinks) if isinstance(part, Tensor)]
        of_query = _source_of(layer, call.query, (call.key, *rest))
        sources[name] = of_query, _source_of(layer, call.key, (call.query, *rest)) if of_query else None
    with ExitStack() as hooks:
        for name, fold in ((name, fold) for name, pair in sources.items() for fold in pair if fold):
            for module in layers[name].modules():  # several modules may share a tied weight
                if not {*module.parameters(recurse=False)}.isdisjoint(fold.module.parameters(recurse=False)):
                    hooks.enter_context(module.register_forward_hook(fold.silence))
        silent = _first_calls(model, layers, inputs)
    return {
        name: (None if silent[name].query.any() else of_query, None if silent[name].key.any() else of_key)
        for name, (of_query, of_key) in sources.items()
    }


def _folds_of(
    model: nn.Module,
    layers: Mapping[str, Any],
    sources: Mapping[str, tuple[Fold | None, Fold | None]],
    ratios: Mapping[str, float],
) -> dict[str, list[Fold]]:
    """Return the weights to multiply in each layer. Queries and keys each get √ratio if all layers have weights for their keys."""
    queries, both = dict[str, list[Fold]](), dict[str, list[Fold]]()
    without = ""
    for name in layers:
        (of_query, of_key), ratio = sources[name], ratios[name]
        if of_query is None:
            raise ValueError(
                f"cannot fold the scale of {name}: no projection or norm with plain weights makes only its queries"
            )
        share = math.sqrt(abs(ratio))
        queries[name] = [replace(of_query, ratio=ratio)]
        both[name] = [replace(of_query, ratio=math.copysign(share, ratio))]
        if of_key is not None:
            both[name].append(replace(of_key, ratio=share))
        elif ratio != 1:  # another layer may make its keys
            without = without or f"no projection or norm of {name} makes only its keys"
    if (reason := without or _why_shared(model, both)) and any(ratio != 1 for ratio in ratios.values()):
        if refused := _why_shared(model, queries):
            raise ValueError(f"cannot fold the scale: {refused}")
        warnings.warn(
            f"{reason}: the queries take the whole factor, so an update of their weights moves the scores further than an update of "
            "the keys' weights",
            stacklevel=6,
        )
        both = queries
    return both


def _why_shared(model: nn.Module, folds: Mapping[str, Sequence[Fold]]) -> str:
    """The reason why multiplying the weights would change more than the queries and keys of these layers, or an empty string."""
    listed = [{fold.module for fold in of_layer} for of_layer in folds.values()]
    folded = set[nn.Module]().union(*listed)
    ranges = [memory_of(parameter) for module in folded for parameter in module.parameters(recurse=False)]
    for name, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            if sum(overlap(memory_of(parameter), other) for other in ranges) > (module in folded):
                return f"{name}.{part} shares its memory with a weight that makes queries or keys"
    if len(folded) < sum(map(len, listed)):
        return "two attention layers share the weights that make their queries or keys"
    return ""


def _ratio_of(name: str, layer: Any, call: AttentionCall, to: str | float, factor: float) -> float:
    """The old multiplier of q·k divided by the new multiplier."""
    new = layer.core.model_scale if to == "own" else scale_multiplier(to, call.query.shape[-1]) * factor
    old = call.scale * layer.core.model_factor
    if 0.0 in (old, new):
        raise ValueError(f"cannot fold the scale of {name}: the old or the new scale is 0")
    clips = [clip for owner in (layer, layer.config) if (clip := stated(owner, "clip_qkv")) is not None]
    if clips:  # the queries of this call may be below the limit
        raise ValueError(f"cannot fold the scale of {name}: its queries are clipped to clip_qkv={clips[0]}")
    return old / new


@torch.enable_grad()
def _source_of(layer: nn.Module, made: Tensor, others: tuple[Tensor, ...]) -> Fold | None:
    """The last module of ``layer`` that makes ``made`` (queries or keys) but none of ``others``, if ``made`` is proportional to its weights.

    By Euler's theorem the queries q are homogeneous of degree 1 in parameters θ if Σ θ · ∂(u·q)/∂θ = u·q. For the parameters of a
    projection before a norm the sum is 0.
    """
    # writing to a quantised weight may have no effect
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad and type(parameter) is nn.Parameter]
    if not made.requires_grad or not parameters:
        return None
    target, rest = _combination(made), torch.stack([*map(_combination, others)]).sum()
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    of_target, of_others = (
        dict(zip(parameters, torch.autograd.grad(value, parameters, **options), strict=True)) for value in (target, rest)
    )
    for module in reversed(list(layer.modules())):
        axis = 0 if isinstance(module, nn.Linear) else -1  # in transformers' Conv1D, outputs are the last axis
        weights = [parameter for parameter in module.parameters(recurse=False) if parameter in of_target]
        rows = [_outputs(of_target[parameter], axis) for parameter in weights]
        if len({mask.shape for mask in rows}) != 1 or any((mask != rows[0]).any() for mask in rows):
            continue
        shared = any((rows[0] & _outputs(of_others[parameter], axis)).any() for parameter in weights)
        if shared or int(rows[0].sum()) % made.shape[-1]:
            continue
        wide = widest_float(made.device)
        for shift in (0.0, 1.0):
            euler = sum(((parameter.detach() + shift).to(wide) * of_target[parameter].to(wide)).sum() for parameter in weights)
            if abs(float(euler / target.detach().to(wide)) - 1) < max(torch.finfo(made.dtype).eps, 1e-7) ** 0.5:
                return Fold(module, rows[0], axis, shift, 1.0)
    return None


def _combination(tensor: Tensor) -> Tensor:
    """A positive weighted sum of all entries, with different weights."""
    factors = 0.5 + torch.arange(tensor.numel()).sin().abs().view(tensor.shape)
    return (tensor * tensor.detach().sign() * factors.to(tensor)).sum()


def _outputs(gradient: Tensor, axis: int) -> Tensor:
    """A bool mask of the outputs of a module that have a gradient, from the gradient of one parameter."""
    return gradient.movedim(axis, 0).flatten(1).any(1) if gradient.dim() > 1 else gradient != 0
