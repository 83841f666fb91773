"""``set_scale`` and ``fold_scale``: another score scale for a model, without or with weights that keep its function.

Attention that is not ours finds and multiplies the weights of its queries and keys itself (``OtherScale.fold``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config.transformer import TransformerConfig
from minitx.nn.core_bases import OtherScale
from minitx.nn.scale import ScoreScale, check_factor
from minitx.nn.torch_layer import not_plain

REFUSED = "cannot fold the scale: "


@dataclass(frozen=True, eq=False)
class Fold:
    """Weights that make queries or keys, and their factor.

    Attributes:
        name: the name of the module in the model.
        role: ``query`` or ``key``.
        module: a projection or norm.
        parameters: the names of its parameters.
        ratio: the factor.
        shift: 1 for a norm that multiplies by 1 + weight, else 0.
        groups: the number of equal parts of the outputs of a module that makes more than these queries or keys.
        start: the first output that is multiplied, in each part.
        length: the number of outputs that are multiplied, in each part. 0: all.
    """

    name: str
    role: str
    module: nn.Module
    parameters: tuple[str, ...]
    ratio: float = 1.0
    shift: float = 0.0
    groups: int = 1
    start: int = 0
    length: int = 0

    @torch.no_grad()
    def apply(self, *, undo: bool = False) -> None:
        """Multiply the queries or keys by ``ratio``, or divide them by it."""
        ratio = 1 / self.ratio if undo else self.ratio
        for name in self.parameters:
            outputs = self.module.get_parameter(name)
            if self.length:
                axis = 0 if isinstance(self.module, nn.Linear) else -1  # in transformers' Conv1D, outputs are the last axis
                parts = outputs.movedim(axis, -1).unflatten(-1, (self.groups, -1))  # a view
                outputs = parts.narrow(-1, self.start, self.length)
            outputs.mul_(ratio)
            if self.shift:  # (w + 1) * ratio - 1
                outputs.add_(self.shift * (ratio - 1))

    def places(self) -> dict[str, tuple[Any, ...]]:
        """The memory of each parameter, and the part of it that is multiplied."""
        part = self.groups, self.start, self.length
        return {name: (memory_of(self.module.get_parameter(name)), *part) for name in self.parameters}


@torch.no_grad()
def fold_scale(
    model: nn.Module, to: str | float = "unscaled", *, factor: float = 1.0, inputs: Mapping[str, Any] | None = None
) -> nn.Module:
    """Change the score scale of a model and compensate in its weights, so that the model computes the same function.

    Let c be the old multiplier and c' the new one. W_Q and its bias are multiplied by sign(c/c') √|c/c'|, and W_K and its bias by
    √|c/c'|. Then c' q'·k' = c q·k. With QK-norm, its gains are multiplied instead. A learned or log-length scale keeps its kind, and
    ``factor`` changes. The model's config is updated.

    In a model that ``minitx.interop.adopt_hf`` adopted, queries and keys are multiplied in the same way, in the projections or norms
    whose names are in ``minitx.interop.adopted_fold.PROJECTIONS``, and the model is called before and after. If no weights of a layer make its
    keys alone, the queries take the whole factor c/c', with a warning. ``release_hf`` undoes the fold. ``save_pretrained`` of
    transformers does not store the scale: call ``release_hf`` first.

    Args:
        model: any module that contains ``MultiHeadAttention`` or adopted attention. It is changed in place and returned. Pass the
            whole model: from a part, neither the model's config nor other uses of a projection can be seen.
        to: the new scale: ``inv_sqrt``, ``unscaled``, ``inv``, ``head_dim^p`` or a number.
        factor: the new ``scale_factor``.
        inputs: the arguments of the calls of an adopted model. Default: some token ids or random images.

    Raises:
        ValueError: the model has no attention; the old or the new scale is 0; one of both has no fixed multiplier (``learned``,
            ``log_length``) and the other is of another kind; a layer has ``qk_norm=l2``; a core computes no dot products; W_Q or W_K
            is not a plain ``nn.Linear`` (a subclass, quantised, parametrised, with LoRA or hooks); or another layer uses the same weight
            and needs another factor (``v_proj``, an embedding). In adopted models: the layer has no projection or norm of a known
            name with plain weights (LoRA, quantised weights), the outputs would differ, or the queries are clipped. The model is
            then unchanged.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention, x = MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    >>> before = attention(x)
    >>> bool(torch.allclose(fold_scale(attention)(x), before, atol=1e-6)), attention.scale
    (True, ScoreScale('unscaled', head_dim=4))
    """
    ours = _our_layers(model)
    others = _other_layers(model)
    if ours and others:
        raise ValueError(
            f"{type(model).__name__} contains adopted attention and attention of minitx: fold each part separately"
        )
    if not ours and not others:
        raise ValueError(f"{type(model).__name__} contains no attention layer with a scale")
    if others:
        check_factor(factor)
        next(iter(others.values())).core.fold(model, others, to, factor, inputs)
        _update_configs(model, to, factor)
        return model
    return fold_ours(model, to, factor)


@torch.no_grad()
def fold_ours(model: nn.Module, to: str | float, factor: float) -> nn.Module:
    """``fold_scale`` for the attention of minitx: the multipliers are known, so the model is not called."""
    layers = _our_layers(model)
    new = _new_scales(layers, to, factor)
    folds = list[Fold]()
    for name, layer in layers.items():
        if (reason := _why_not_fold(layer, new[name])) is not None:
            raise ValueError(f"cannot fold the scale of {name or type(layer).__name__}: {reason}")
        old, ratio = layer.scale, layer.scale.factor / new[name].factor
        if old.multiplier is not None:
            ratio = old.multiplier / new[name].multiplier
        makers = {"query": _makers(layer, "query"), "key": _makers(layer, "key") if ratio != 1 else {}}
        for role, share in shares(ratio).items():
            for part, module in makers[role].items():
                parameters = tuple(parameter for parameter, _ in module.named_parameters())
                folds.append(Fold(f"{name}.{part}".removeprefix("."), role, module, parameters, ratio=share))
    multiply(model, folds)
    _replace_scales(model, layers, new, to, factor)
    return model


def _makers(layer: Any, role: str) -> dict[str, nn.Module]:
    """The modules, by name, that the queries or keys of one of our layers are proportional to.

    They are the norm of QK-norm, or the projections whose names end in ``q_proj`` or ``k_proj``: a subclass may have several.
    """
    if layer.qk_norm is not None:
        return {f"qk_norm.{role}_norm": layer.qk_norm.get_submodule(f"{role}_norm")}
    named = layer.named_modules(remove_duplicate=False)  # queries and keys may share a projection
    return {name: module for name, module in named if "." not in name and name.endswith(f"{role[0]}_proj")}


@torch.no_grad()
def fold_start(model: nn.Module, fold: str) -> None:
    """Multiply what makes the queries and keys of our layers, for ``fold`` of ``init_weights``; with ``qk_norm=l2``, the gain of the keys."""
    done = set[Tensor]()
    for layer in _our_layers(model).values():
        D, norm = layer.head_dim, layer.qk_norm
        factors = {"query": D**-0.5} if fold == "query" else {"query": D**-0.25, "key": D**-0.25}
        if norm is not None and norm.kind == "l2":
            parameters = {norm.gain: D**-0.5}
        else:
            modules = [(module, factor) for role, factor in factors.items() for module in _makers(layer, role).values()]
            parameters = {parameter: factor for module, factor in modules for parameter in module.parameters()}
        for parameter, factor in parameters.items():
            if parameter not in done:  # once, although layers may share it
                parameter.mul_(factor)
        done |= parameters.keys()


def shares(ratio: float) -> dict[str, float]:
    """Return the roots of ``ratio``, by role. The queries take the sign."""
    share = math.sqrt(abs(ratio))
    return {"query": math.copysign(share, ratio), "key": share}


def set_scale(model: nn.Module, to: str | float, *, factor: float = 1.0) -> nn.Module:
    """Change the score scale of a model, and with it the function that the model computes. The weights do not change.

    The config of a model of minitx is updated. In a model that ``minitx.interop.adopt_hf`` adopted, the scale replaces the model's
    own scale; ``release_hf`` restores it.

    Args:
        model: any module that contains ``MultiHeadAttention`` or adopted attention. It is changed in place and returned.
        to: the new scale, as in ``ScoreScale``. Adopted attention takes ``inv_sqrt``, ``unscaled``, ``inv``, ``head_dim^p`` and
            numbers.
        factor: multiplies the scale.

    Raises:
        ValueError: the model has no attention, the scale is unknown, the factor is not finite, or adopted attention is
            given ``learned`` or ``log_length``. The model is then unchanged.

    >>> from minitx.nn import MultiHeadAttention
    >>> set_scale(MultiHeadAttention(12, 3), "unscaled").scale
    ScoreScale('unscaled', head_dim=4)
    """
    check_factor(factor)  # adopted attention has no ``ScoreScale``
    layers = _our_layers(model)
    others = _other_layers(model)
    if not layers and not others:
        raise ValueError(f"{type(model).__name__} contains no attention layer with a scale")
    new = _new_scales(layers, to, factor)
    for layer in others.values():
        layer.core.set_scale(to, factor)
    if to == "learned":
        new = {name: scale.to(layers[name].q_proj.weight) for name, scale in new.items()}
    _replace_scales(model, layers, new, to, factor)
    return model


def _other_layers(model: nn.Module) -> dict[str, Any]:
    """The attention layers, by name, with a core that is an ``OtherScale``."""
    named = model.named_modules(remove_duplicate=False)
    return {name: layer for name, layer in named if isinstance(getattr(layer, "core", None), OtherScale)}


def _our_layers(model: nn.Module) -> dict[str, Any]:
    """The attention layers, by name, with a ``ScoreScale``."""
    named = model.named_modules(remove_duplicate=False)
    return {name: layer for name, layer in named if isinstance(getattr(layer, "scale", None), ScoreScale)}


def _new_scales(layers: Mapping[str, Any], to: str | float, factor: float) -> dict[str, ScoreScale]:
    """A new scale for each of our attention layers. The parameters of a learned scale are kept."""
    new = {
        name: ScoreScale(to, head_dim=layer.head_dim, num_heads=layer.num_heads, max_len=layer.scale.max_len, factor=factor)
        for name, layer in layers.items()
    }
    for name, layer in layers.items():
        if to == layer.scale.scale == "learned":
            new[name].log_scale = nn.Parameter(layer.scale.log_scale.detach().clone())
    return new


def _replace_scales(
    model: nn.Module, layers: dict[str, Any], new: dict[str, ScoreScale], to: str | float, factor: float
) -> None:
    for name, layer in layers.items():
        layer.scale = new[name]
    _update_configs(model, to, factor)


def _update_configs(model: nn.Module, to: str | float, factor: float) -> None:
    """Set the new scale in the configs of the models of minitx in ``model``."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, TransformerConfig):
            module.config = replace(config, scale=to, scale_factor=factor)  # type: ignore[assignment]


def _why_not_fold(layer: Any, new: ScoreScale) -> str | None:
    """The reason why the scale of one of our attention layers cannot be folded into ``new``, or None."""
    old: Any = layer.scale
    is_same_kind = type(old) is type(new) and old.scale == new.scale
    reasons = {
        f"scale={old.scale} has no fixed multiplier": old.multiplier is None and not is_same_kind,
        f"to={new.scale} has no fixed multiplier": new.multiplier is None and not is_same_kind,
        "the old or the new scale is 0": 0.0 in (old.multiplier, new.multiplier, old.factor, new.factor),
        "qk_norm=l2 has no gain for queries": layer.qk_norm is not None and layer.qk_norm.kind == "l2",
        f"{type(layer.core).__name__} computes no dot products": not getattr(layer.core, "has_dot_products", False),
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    kind = nn.Linear if layer.qk_norm is None else type(layer.qk_norm.query_norm)
    modules = [module for role in ("query", "key") for module in _makers(layer, role).values()]
    faults = [fault for module in modules if (fault := not_plain(module, kind, ("weight", "bias")))]
    what = "q_proj and k_proj" if layer.qk_norm is None else "the norms of queries and keys"
    return f"{what} must be plain {kind.__name__} layers: {', '.join(faults)}" if faults else None


def multiply(model: nn.Module, folds: Sequence[Fold]) -> list[Fold]:
    """Multiply weights, each once, although layers may share them. Return the folds with the parameters that each has multiplied.

    Raises:
        ValueError: a weight needs another factor elsewhere. The model is then unchanged.
    """
    done: dict[tuple[Any, ...], float] = {}
    once = list[Fold]()
    for fold in folds:
        places = fold.places()
        if any(done.get(place, fold.ratio) != fold.ratio for place in places.values()):
            raise ValueError(f"{REFUSED}{fold.name} shares a projection that needs another factor elsewhere")
        once += [replace(fold, parameters=tuple(name for name, place in places.items() if place not in done))]
        done |= dict.fromkeys(places.values(), fold.ratio)
    names = {fold.name for fold in once}
    memory = {place[0] for place in done}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        place = memory_of(parameter)
        is_folded = name.rpartition(".")[0] in names
        if any(overlap(place, other) and not (is_folded and place == other) for other in memory):
            raise ValueError(f"{REFUSED}{name} is also the weight of queries or keys, or shares memory with it")
    for fold in once:
        fold.apply()
    return once


def memory_of(parameter: Tensor) -> tuple[int, int]:
    """The memory range of a tensor. A tensor without memory (meta, DTensor) gets a unique range."""
    steps = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
    start = parameter.data_ptr()
    return (start, start + (steps + 1) * parameter.element_size()) if start else (-id(parameter), 1 - id(parameter))


def overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two ranges of ``memory_of`` have a byte in common."""
    return first[0] < second[1] and second[0] < first[1]
