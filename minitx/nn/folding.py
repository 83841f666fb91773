"""``set_scale`` and ``fold_scale``: another score scale for a model, without or with weights that keep its function.

The weights that make queries and keys are found by the names in ``PROJECTIONS``. In attention that is not ours, a fold is tried: the
model is called before and after it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitx.config.schema import Finite, read, stated
from minitx.config.transformer import TransformerConfig
from minitx.nn.attention import not_plain
from minitx.nn.scale import OtherScale, ScoreScale, scale_multiplier


class Projections(NamedTuple):
    """The names of the modules that make the queries and keys of an attention layer.

    Attributes:
        query, key: the names.
        rows: for a module that makes both: ``joined``, all queries, then all keys, then all values; or ``by head``, the query, key
            and value of each head.
    """

    query: str
    key: str
    rows: str = ""


PROJECTIONS = (
    Projections("q_norm", "k_norm"),  # Qwen3, Gemma 3, OLMo 2: a norm comes after the projection
    Projections("q_layernorm", "k_layernorm"),  # Persimmon
    Projections("query_layernorm", "key_layernorm"),  # HunYuan
    Projections("q_proj", "k_proj"),  # ours, Llama and its relatives, BART, OPT, Whisper, ViT
    Projections("query", "key"),  # BERT
    Projections("q_lin", "k_lin"),  # DistilBERT
    Projections("q", "k"),  # T5
    Projections("Wq", "Wk"),  # CTRL
    Projections("q_b_proj", ""),  # DeepSeek, whose keys and values have common weights
    Projections("c_attn", "c_attn", "joined"),  # GPT-2, GPTBigCode
    Projections("qkv_proj", "qkv_proj", "joined"),  # Phi-3
    Projections("Wqkv", "Wqkv", "joined"),  # ModernBERT
    Projections("query_key_value", "query_key_value", "by head"),  # GPT-NeoX, Persimmon
)
"""The first row whose module has parameters counts, for queries and for keys."""

REFUSED = "cannot fold the scale: "


class Use(NamedTuple):
    """What one call of an attention core shows.

    Attributes:
        query, key: (B, H, L, D) and (B, Hkv, S, D).
        multiplier: the multiplier of q·k.
        own_multiplier: the multiplier of the model itself, before any change of its scale.
    """

    query: Tensor
    key: Tensor
    multiplier: float
    own_multiplier: float


Again = Callable[[], tuple[dict[str, Use], str]]


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
        groups, start, length: for a module that makes more than these queries or keys: its outputs consist of ``groups`` equal
            parts, and in each part the ``length`` outputs from ``start`` are multiplied. ``length`` 0: all outputs.
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
    whose names are in ``minitx.nn.folding.PROJECTIONS``, and the model is called before and after. If no weights of a layer make its
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
        _fold_adopted(model, others, to, factor, inputs)
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
        for role, share in _shares(ratio).items():
            for part, module in makers[role].items():
                parameters = tuple(parameter for parameter, _ in module.named_parameters())
                folds.append(Fold(f"{name}.{part}".removeprefix("."), role, module, parameters, ratio=share))
    _multiply(model, folds)
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


def _shares(ratio: float) -> dict[str, float]:
    """The roots of ``ratio``, by role. The queries take the sign."""
    share = math.sqrt(abs(ratio))
    return {"query": math.copysign(share, ratio), "key": share}


def _fold_adopted(
    model: nn.Module, layers: Mapping[str, Any], to: str | float, factor: float, inputs: Mapping[str, Any] | None
) -> None:
    """``fold_scale`` for adopted attention, by calling the model before and after it."""
    read(Finite, factor, "factor")
    uses, again = _uses(model, layers, inputs)
    ratios = {name: _ratio_of(name, layer, uses[name], to, factor) for name, layer in layers.items()}
    queries = {name: _found(name, layer, "query", uses[name]) for name, layer in layers.items()}
    try:
        keys = {name: _found(name, layer, "key", uses[name]) for name, layer in layers.items() if ratios[name] != 1}
        _apply(model, _shared(queries, keys, ratios), layers, to, factor, uses, again)
    except ValueError as error:
        _apply(model, [replace(fold, ratio=ratios[name]) for name, fold in queries.items()], layers, to, factor, uses, again)
        warnings.warn(
            f"{str(error).removeprefix(REFUSED)}: the queries take the whole factor, so an update of their weights moves the scores "
            "further than an update of the keys' weights",
            stacklevel=4,
        )


def _shared(queries: Mapping[str, Fold], keys: Mapping[str, Fold], ratios: Mapping[str, float]) -> list[Fold]:
    """The folds of queries and keys, with the roots of ``ratios`` as factors."""
    both = (("query", queries), ("key", keys))
    return [replace(fold, ratio=_shares(ratios[name])[role]) for role, folds in both for name, fold in folds.items()]


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
    read(Finite, factor, "factor")  # adopted attention has no ``ScoreScale``
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


def _uses(model: nn.Module, layers: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> tuple[dict[str, Use], Again]:
    """Call a model whose attention is not ours. See ``OtherScale.trial``."""
    weights = [parameter for layer in layers.values() for parameter in layer.parameters()]
    if any(weight.is_meta or hasattr(weight, "full_tensor") for weight in weights):  # a DTensor has a full tensor
        raise ValueError(f"{REFUSED}weights of the attention are offloaded (on the meta device) or sharded; load them first")
    uses, again = next(iter(layers.values())).core.trial(model, layers, inputs)
    if missing := [name for name in layers if name not in uses]:
        raise ValueError(
            f"{REFUSED}{missing[0]} did not run when the model was called. Pass the whole model, or the arguments of "
            "another call as inputs="
        )
    return uses, again


def _ratio_of(name: str, layer: Any, use: Use, to: str | float, factor: float) -> float:
    """The old multiplier of q·k divided by the new multiplier."""
    new = use.own_multiplier if to == "own" else scale_multiplier(to, use.query.shape[-1]) * factor
    if 0.0 in (use.multiplier, new):
        raise ValueError(f"cannot fold the scale of {name}: the old or the new scale is 0")
    clips = [clip for owner in (layer, layer.config) if (clip := stated(owner, "clip_qkv")) is not None]
    if clips:  # the queries of this call may be below the limit
        raise ValueError(f"cannot fold the scale of {name}: its queries are clipped to clip_qkv={clips[0]}")
    return use.multiplier / new


def _found(name: str, layer: nn.Module, role: str, use: Use) -> Fold:
    """The weights that make the queries or keys of an adopted attention layer, by the names in ``PROJECTIONS``.

    Raises:
        ValueError: the layer has no such weights of a known name, or not in a plain projection or norm.
    """
    for row in PROJECTIONS:
        part = row.query if role == "query" else row.key
        module: Any = getattr(layer, part, None)
        parameters = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
        if parameters:
            break
    else:
        known = ", ".join(filter(None, (row.query if role == "query" else row.key for row in PROJECTIONS)))
        raise ValueError(f"{REFUSED}{name} has no weights for its {role} under a known name ({known})")
    fold = Fold(f"{name}.{part}".removeprefix("."), role, module, tuple(parameters))
    # writing to a quantised weight may have no effect; nested parameters belong to an adapter or a parametrisation
    if not {*parameters} <= {"weight", "bias"} or any(type(parameter) is not nn.Parameter for parameter in parameters.values()):
        raise ValueError(f"{REFUSED}{fold.name}, {type(module).__name__}, is no projection or norm with plain weights")
    is_norm = all(parameter.dim() == 1 for parameter in parameters.values())
    _, H, _, D = use.query.shape
    Hkv = use.key.shape[1]
    if row.rows == "by head":
        return replace(fold, groups=H, start=D * (role == "key"), length=D)
    if row.rows == "joined":
        return replace(fold, start=H * D * (role == "key"), length=(Hkv if role == "key" else H) * D)
    return replace(fold, shift=_shift_of(module, parameters)) if is_norm else fold


def _shift_of(norm: nn.Module, parameters: Mapping[str, Tensor]) -> float:
    """1 for a norm that multiplies by 1 + weight, or 0: with 2w + 1 or with 2w instead of w, its output is twice as large."""
    weight = parameters["weight"]
    row = torch.arange(1, weight.numel() + 1, device=weight.device).sin().to(weight.dtype)[None]

    def error(shift: float) -> float:
        doubled = {name: 2 * parameter + shift for name, parameter in parameters.items()}
        return float((torch.func.functional_call(norm, doubled, (row,)) - 2 * norm(row)).abs().max())

    return min((0.0, 1.0), key=error)


def _multiply(model: nn.Module, folds: Sequence[Fold]) -> list[Fold]:
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


def _apply(
    model: nn.Module,
    folds: Sequence[Fold],
    layers: Mapping[str, Any],
    to: str | float,
    factor: float,
    uses: Mapping[str, Use],
    again: Again,
) -> None:
    """Fold the scale of adopted attention. If the outputs of the model change, undo it.

    Raises:
        ValueError: a weight needs another factor elsewhere, or the outputs change.
    """
    before = [(weight, weight.clone()) for fold in folds for weight in map(fold.module.get_parameter, fold.parameters)]
    once = _multiply(model, folds)
    scales = {layer.core: layer.core.scale for layer in layers.values()}
    for core in scales:
        core.set_scale(to, factor)
    now, reason = again()
    factors = {(fold.name.rpartition(".")[0], fold.role): fold.ratio for fold in folds}
    reason = reason or next(
        (
            f"{name} has other {role} values"
            for name in layers
            for role in ("query", "key")
            if not _are_multiplied(getattr(uses[name], role), getattr(now[name], role), factors.get((name, role), 1.0))
        ),
        "",
    )
    if reason:
        for weight, old in before:
            weight.copy_(old)
        for core, scale in scales.items():
            core.scale = scale
        raise ValueError(f"{REFUSED}the queries and keys are not proportional to the weights of their projections: {reason}")
    for name, layer in layers.items():
        layer.core.folds += [fold for fold in once if fold.name.rpartition(".")[0] == name and fold.parameters]


def _are_multiplied(before: Tensor, after: Tensor, factor: float) -> bool:
    """Whether in each head most vectors of ``after`` are ``factor`` times the vectors of ``before``. (B, H, L, D).

    It is more exact than the answer of a model in bfloat16. Rounding may change the choice of an expert, and with it some vectors.
    """
    multiplied = before.float() * factor
    errors = (after.float() - multiplied).norm(dim=-1) / multiplied.norm(dim=-1)  # 0/0 is ignored
    return not (errors.movedim(1, 0).flatten(1).nanmedian(1).values > 0.1).any()


def memory_of(parameter: Tensor) -> tuple[int, int]:
    """The memory range of a tensor. A tensor without memory (meta, DTensor) gets a unique range."""
    steps = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
    start = parameter.data_ptr()
    return (start, start + (steps + 1) * parameter.element_size()) if start else (-id(parameter), 1 - id(parameter))


def overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two ranges of ``memory_of`` have a byte in common."""
    return first[0] < second[1] and second[0] < first[1]
