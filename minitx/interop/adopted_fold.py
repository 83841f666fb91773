"""``fold_scale`` for adopted attention, in three steps.

1. Call the model, and keep the queries, keys and multiplier of each core (``_uses``).
2. Find the projections or norms that make them, by name (``_found``).
3. Multiply their weights, call the model again, and compare. If something differs, undo it (``_apply``).

If a layer has no weights for its keys alone, step 3 is repeated with the whole factor in the queries.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minitx.config.schema import stated
from minitx.interop.trial import AdoptionTrial, answer, made_up_inputs, outermost, settled
from minitx.nn.folding import REFUSED, Fold, multiply, shares
from minitx.nn.functional import AttentionCall
from minitx.nn.scale import scale_multiplier


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


def fold_adopted(
    model: nn.Module, layers: Mapping[str, Any], to: str | float, factor: float, inputs: Mapping[str, Any] | None
) -> None:
    """``fold_scale`` for adopted attention, by calling the model before and after it."""
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
            stacklevel=5,
        )


def _shared(queries: Mapping[str, Fold], keys: Mapping[str, Fold], ratios: Mapping[str, float]) -> list[Fold]:
    """The folds of queries and keys, with the roots of ``ratios`` as factors."""
    both = (("query", queries), ("key", keys))
    return [replace(fold, ratio=shares(ratios[name])[role]) for role, folds in both for name, fold in folds.items()]


def _uses(model: nn.Module, layers: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> tuple[dict[str, Use], Again]:
    """Call a model. Return the first use of each layer's core, and a function that calls the model again.

    This function returns the uses then, and a description of what differs in the answer, empty if nothing does.
    """
    weights = [parameter for layer in layers.values() for parameter in layer.parameters()]
    if any(weight.is_meta or hasattr(weight, "full_tensor") for weight in weights):  # a DTensor has a full tensor
        raise ValueError(f"{REFUSED}weights of the attention are offloaded (on the meta device) or sharded; load them first")
    trials = list[AdoptionTrial]()

    def record(uses: dict[str, Use], name: str, core: Any, args: tuple[AttentionCall]) -> None:
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
            trials.append(AdoptionTrial(root, made_up_inputs(root) if inputs is None else inputs))
        except ValueError as error:
            raise ValueError(f"cannot fold the scale, because {error}: pass inputs=, the arguments of a call") from None
    with recording() as uses:
        for trial in trials:
            with settled(trial.model):
                answer(trial.model, trial.inputs)
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
    once = multiply(model, folds)
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
