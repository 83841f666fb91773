"""The score scale of adopted models, folded into the weights of their queries.

No table says where the queries of a model come from. One call of the model finds it: the gradient of the queries says which rows of
which weights make them, and Euler's theorem says which weights the queries are proportional to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minitx.nn.functional import AttentionCall
from minitx.nn.modes import evaluating
from minitx.nn.scale import memory_of, overlap, scale_multiplier


@dataclass(frozen=True, eq=False)
class Fold:
    """A module whose output makes queries, and what they are multiplied by.

    Attributes:
        module: the last projection or norm before the scores.
        rows: which outputs of the module are queries, bool.
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
        """Multiply the queries by ``ratio``, or divide them by it."""
        for parameter in self.module.parameters(recurse=False):
            factor = torch.where(self.rows, 1 / self.ratio if undo else self.ratio, 1.0).to(parameter)
            if parameter.dim() > 1 and self.axis == 0:
                factor = factor.view(-1, *(1,) * (parameter.dim() - 1))
            parameter.copy_((parameter + self.shift) * factor - self.shift)


def fold_adopted(
    model: nn.Module,
    roots: Iterable[Any],
    layers: Mapping[str, Any],
    to: str | float,
    factor: float,
    inputs: Mapping[str, Any] | None,
) -> None:
    """Give the cores of adopted ``layers`` another scale, and multiply their queries so that the function stays the same.

    ``roots`` are the transformers models in ``model``, which are called.
    """
    trained = {p: p.requires_grad for layer in layers.values() for p in layer.parameters() if p.is_floating_point()}
    try:
        for parameter in trained:
            parameter.requires_grad_()
        calls = _first_calls(roots, layers, inputs)
        folds = {name: _fold_of(name, layer, calls[name], to, factor) for name, layer in layers.items()}
    finally:
        for parameter, flag in trained.items():
            parameter.requires_grad_(flag)
    folded = {fold.module for fold in folds.values()}
    own = [memory_of(parameter) for module in folded for parameter in module.parameters(recurse=False)]
    for name, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            if sum(overlap(memory_of(parameter), other) for other in own) > (module in folded):
                raise ValueError(f"cannot fold the scale: {name}.{part} shares its memory with a weight that makes queries")
    if len(folded) < len(folds):
        raise ValueError("cannot fold the scale: two attention layers share the weights that make their queries")
    for name, fold in folds.items():
        if fold.ratio != 1:
            fold.apply()
        layers[name].core.set_scale(to, factor)
        layers[name].core.folds.append(fold)


def _first_calls(roots: Iterable[Any], layers: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> dict[str, AttentionCall]:
    """The first call of each layer's core while each model is called once."""
    calls: dict[str, AttentionCall] = {}
    for root in roots:
        with ExitStack() as hooks, evaluating(root), torch.enable_grad():
            for name, layer in layers.items():
                hook = layer.core.register_forward_pre_hook(lambda _, args, name=name: calls.setdefault(name, args[0]) and None)
                hooks.enter_context(hook)
            root(**(_default_inputs(root) if inputs is None else inputs))
    if missing := [name for name in layers if name not in calls]:
        raise ValueError(
            f"cannot fold the scale: {missing[0]} did not run when the model was called. Give the whole model, or the arguments "
            "of another call as inputs="
        )
    return calls


def _default_inputs(root: Any) -> dict[str, Tensor]:
    """Arguments for one call of a model of text or of pictures."""
    config = root.config
    if root.main_input_name == "pixel_values" and hasattr(config, "image_size"):
        size = config.image_size if isinstance(config.image_size, tuple | list) else (config.image_size,) * 2
        shape = (1, config.num_channels, *size)
        picture = torch.arange(math.prod(shape)).sin().view(shape)
        return {"pixel_values": picture.to(root.device, root.dtype)}
    if root.main_input_name == "input_ids":
        ids = torch.arange(1, 8, device=root.device).view(1, 7)
        return {"input_ids": ids} | ({"decoder_input_ids": ids} if config.is_encoder_decoder else {})
    raise ValueError(f"fold_scale calls the model once: inputs= takes the arguments, {root.main_input_name} and others")


def _fold_of(name: str, layer: Any, call: AttentionCall, to: str | float, factor: float) -> Fold:
    new = scale_multiplier(to, call.query.shape[-1]) * factor
    if 0.0 in (call.scale, new):
        raise ValueError(f"cannot fold the scale of {name}: the old or the new scale is 0")
    clips = [clip for owner in (layer, layer.config) if (clip := getattr(owner, "clip_qkv", None)) is not None]
    if clips:  # one call may stay below it
        raise ValueError(f"cannot fold the scale of {name}: its queries are clipped to clip_qkv={clips[0]}")
    if (found := _source_of(layer, call, call.scale / new)) is None:
        raise ValueError(
            f"cannot fold the scale of {name}: no projection or norm of its own makes its queries and nothing else"
        )
    return found


@torch.enable_grad()
def _source_of(layer: nn.Module, call: AttentionCall, ratio: float) -> Fold | None:
    """The last module of ``layer`` that makes queries and nothing else, and to whose parameters the queries are proportional.

    By Euler's theorem the queries q are homogeneous of degree 1 in parameters θ if Σ θ · ∂(u·q)/∂θ = u·q. For the parameters of a
    projection before a norm the sum is 0.
    """
    query, parameters = call.query, [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if not query.requires_grad:
        return None
    wanted, others = _combination(query), _combination(call.key) + _combination(call.value)
    options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    of_query, of_others = (
        dict(zip(parameters, torch.autograd.grad(value, parameters, **options), strict=True)) for value in (wanted, others)
    )
    for module in reversed(list(layer.modules())):
        axis = 0 if isinstance(module, nn.Linear) else -1  # transformers' Conv1D has its outputs last
        own = [parameter for parameter in module.parameters(recurse=False) if parameter in of_query]
        made = [_outputs(of_query[parameter], axis) for parameter in own]
        if len({rows.shape for rows in made}) != 1 or any((rows != made[0]).any() for rows in made):
            continue
        shared = any((made[0] & _outputs(of_others[parameter], axis)).any() for parameter in own)
        if shared or int(made[0].sum()) % query.shape[-1]:
            continue
        for shift in (0.0, 1.0):
            euler = sum(((parameter.detach() + shift).double() * of_query[parameter].double()).sum() for parameter in own)
            if abs(float(euler / wanted.detach().double()) - 1) < max(torch.finfo(query.dtype).eps, 1e-7) ** 0.5:
                return Fold(module, made[0], axis, shift, ratio)
    return None


def _combination(tensor: Tensor) -> Tensor:
    """A positive sum of all entries with different factors."""
    factors = 0.5 + torch.arange(tensor.numel()).sin().abs().view(tensor.shape)
    return (tensor * tensor.detach().sign() * factors.to(tensor)).sum()


def _outputs(gradient: Tensor, axis: int) -> Tensor:
    """Which outputs of a module have a gradient, bool, from the gradient of one of its parameters."""
    return gradient.movedim(axis, 0).flatten(1).any(1) if gradient.dim() > 1 else gradient != 0
