"""The score scale: the factor on q·k."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config.scale_words import check_scale, evaluate_factor
from minitx.config.schema import Finite, read
from minitx.config.transformer import TransformerConfig


def scale_multiplier(scale: str | float, head_dim: int) -> float:
    """Return the number that a fixed ``scale`` stands for.

    Args:
        scale: ``inv_sqrt`` is 1/√D (Vaswani et al. 2017, arXiv:1706.03762, §3.2.1). ``inv`` is 1/D (μP; Yang et al. 2022,
            arXiv:2203.03466, §4). ``unscaled`` is 1. ``head_dim^p`` is D to the power p. A number is returned unchanged.
        head_dim: D.

    >>> scale_multiplier("inv_sqrt", 16), scale_multiplier("unscaled", 16), scale_multiplier("inv", 16)
    (0.25, 1.0, 0.0625)
    >>> scale_multiplier("head_dim^-0.75", 16)
    0.125

    Raises:
        ValueError: an unknown word, or ``learned`` or ``log_length``: they are not fixed numbers.
    """
    check_scale(scale)
    if not isinstance(scale, str) or scale.startswith("head_dim"):
        return evaluate_factor(scale, head_dim=head_dim)
    if scale not in ("inv_sqrt", "unscaled", "inv"):
        raise ValueError(f"scale={scale} has no fixed multiplier; use ScoreScale")
    return {"inv_sqrt": head_dim**-0.5, "unscaled": 1.0, "inv": 1.0 / head_dim}[scale]


class ScoreScale(nn.Module):
    """The scale c of one attention layer, in the scores c · q·k.

    ``forward(query, counts)`` returns ``(query, multiplier)``. A fixed scale is the multiplier, and the backend applies it. The other
    two scales multiply the query and return 1.0, so that they work with every backend:

    * ``learned``: exp(s_h), with one parameter s_h for each head. It starts at 1/√D.
    * ``log_length``: ln(n_i) / ln(max_len) / √D, where n_i is the number of real keys up to query i. It keeps the entropy of the
      weights from growing with the length (Chiang & Cholak 2022, arXiv:2202.12172; Su 2021).

    Args:
        scale: ``inv_sqrt``, ``unscaled``, ``inv``, ``head_dim^p``, ``learned``, ``log_length`` or a number. ``None`` is an error: it
            could mean 1/√D, as in torch, or no scale.
        head_dim: D.
        num_heads: H. Only ``learned`` needs it.
        max_len: the length at which ``log_length`` equals 1/√D. Only ``log_length`` needs it.
        factor: multiplies the scale.

    Attributes:
        multiplier: the number that a fixed scale stands for, times ``factor``; None for the other scales.

    Raises:
        ValueError: an unknown scale, a factor that is not finite, or a missing ``num_heads`` or ``max_len``.

    >>> query, multiplier = ScoreScale("inv_sqrt", head_dim=16)(torch.ones(1, 1, 1, 16))
    >>> multiplier
    0.25
    """

    def __init__(
        self,
        scale: str | float = "inv_sqrt",
        *,
        head_dim: int,
        num_heads: int | None = None,
        max_len: int | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale, self.head_dim, self.num_heads, self.max_len = scale, head_dim, num_heads, max_len
        self.factor: float = read(Finite, factor, "factor")
        self._fixed = None if scale in ("learned", "log_length") else scale_multiplier(scale, head_dim)
        if scale == "learned":
            if num_heads is None:
                raise ValueError("scale=learned has one scale for each head and needs num_heads, got num_heads=None")
            self.log_scale = nn.Parameter(torch.empty(num_heads))
            self.reset_parameters()
        if scale == "log_length" and (max_len is None or max_len < 2):
            raise ValueError(f"scale=log_length divides by ln(max_len) and needs max_len > 1, got max_len={max_len}")

    def reset_parameters(self) -> None:
        """Set the learned scales to 1/√D."""
        if self.scale == "learned":
            nn.init.constant_(self.log_scale, -0.5 * math.log(self.head_dim))

    @property
    def multiplier(self) -> float | None:
        """The number that multiplies q·k, or None if it depends on the head or the query."""
        is_overridden = type(self).forward is not ScoreScale.forward  # a subclass may compute another scale
        return None if self._fixed is None or is_overridden else self._fixed * self.factor

    @property
    def needs_counts(self) -> bool:
        """Whether ``forward`` needs the number of real keys up to each query."""
        return self.scale == "log_length"

    def forward(self, query: Tensor, counts: Tensor | None = None) -> tuple[Tensor, float]:
        """Return ``(query, multiplier)`` for query (B, H, L, D). ``log_length`` needs counts (B or 1, H or 1, L, 1)."""
        if self.scale == "learned":
            return query * (self.log_scale.exp() * self.factor).to(query.dtype).view(1, -1, 1, 1), 1.0
        if self.scale == "log_length":
            assert counts is not None and self.max_len is not None
            lengths = counts.clamp(min=1).to(torch.promote_types(query.dtype, torch.float32))
            multiplier = lengths.log() * (self.factor / math.log(self.max_len) / math.sqrt(self.head_dim))
            return query * multiplier.to(query.dtype), 1.0
        assert self._fixed is not None
        return query, self._fixed * self.factor

    def extra_repr(self) -> str:
        factor = f", factor={self.factor}" if self.factor != 1.0 else ""
        return f"{self.scale!r}, head_dim={self.head_dim}{factor}"


@torch.no_grad()
def fold_scale(
    model: nn.Module, to: str | float = "unscaled", *, factor: float = 1.0, inputs: Mapping[str, Any] | None = None
) -> nn.Module:
    """Change the score scale of a model and compensate in its weights, so that the model computes the same function.

    Let c be the old multiplier and c' the new one. W_Q and its bias are multiplied by sign(c/c') √|c/c'|, and W_K and its bias by
    √|c/c'|. Then c' q'·k' = c q·k. The model's config is updated.

    In a model that ``minitx.interop.adopt_hf`` adopted, queries and keys are multiplied in the same way, in the projections or norms
    that make them. One call of the model finds these. If no weights of a layer make its keys alone, the queries take the whole factor
    c/c', with a warning. ``release_hf`` undoes the fold. ``save_pretrained`` of transformers does not store the scale: call
    ``release_hf`` first.

    Args:
        model: any module that contains ``MultiHeadAttention`` or adopted attention. It is changed in place and returned. Pass the
            whole model: from a part, neither the model's config nor other uses of a projection can be seen.
        to: the new scale: ``inv_sqrt``, ``unscaled``, ``inv``, ``head_dim^p`` or a number.
        factor: the new ``scale_factor``.
        inputs: the arguments of the call of an adopted model. Default: some token ids or a random image.

    Raises:
        ValueError: the model has no attention; the old or the new scale is 0 or has no fixed multiplier (``learned``,
            ``log_length``); a layer has QK-norm (it would undo the change); a core computes no dot products; W_Q or W_K is not a
            plain ``nn.Linear`` (a subclass, quantised, parametrised, with LoRA or hooks); or another layer uses the same weight
            and needs another factor (``v_proj``, an embedding). In adopted models: no single projection or norm makes the queries
            alone (LoRA, quantised weights), or the queries are clipped. The model is then unchanged.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention, x = MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    >>> before = attention(x)
    >>> bool(torch.allclose(fold_scale(attention)(x), before, atol=1e-6)), attention.scale
    (True, ScoreScale('unscaled', head_dim=4))
    """
    layers, new = _new_scales(model, to, factor)
    if adopted := _adopted_cores(model):
        if layers:
            raise ValueError(
                f"{type(model).__name__} contains adopted attention and attention of minitx: fold each part separately"
            )
        next(iter(adopted.values())).fold_scale(model, to, factor, inputs)
        return model
    if not layers:
        raise ValueError(f"{type(model).__name__} contains no attention layer with a scale")
    for name, layer in layers.items():
        if (reason := _why_not_fold(layer, new[name])) is not None:
            raise ValueError(f"cannot fold the scale of {name or type(layer).__name__}: {reason}")
    folded: set[str] = set()
    # by memory: layers can share projections; these are multiplied once
    shares: dict[tuple[int, int], tuple[Tensor, float]] = {}
    for name, layer in layers.items():
        ratio = layer.scale.multiplier / new[name].multiplier
        for part, share in (("q_proj", math.copysign(math.sqrt(abs(ratio)), ratio)), ("k_proj", math.sqrt(abs(ratio)))):
            folded.add(f"{name}.{part}".removeprefix("."))
            for parameter in getattr(layer, part).parameters():
                if shares.setdefault(memory_of(parameter), (parameter, share))[1] != share:
                    raise ValueError(
                        f"cannot fold the scale of {name}: it shares a projection that needs another factor elsewhere"
                    )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        is_folded = name.rpartition(".")[0] in folded
        if any(overlap(memory_of(parameter), other) and not (is_folded and memory_of(parameter) == other) for other in shares):
            raise ValueError(f"cannot fold the scale: {name} is also the weight of a q_proj or k_proj, or a part of it")
    for parameter, share in shares.values():
        parameter.mul_(share)
    _replace_scales(model, layers, new, to, factor)
    return model


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
    layers, new = _new_scales(model, to, factor)
    adopted = _adopted_cores(model)
    if not layers and not adopted:
        raise ValueError(f"{type(model).__name__} contains no attention layer with a scale")
    for core in adopted.values():
        core.set_scale(to, factor)
    if to == "learned":
        new = {name: scale.to(layers[name].q_proj.weight) for name, scale in new.items()}
    _replace_scales(model, layers, new, to, factor)
    return model


def _adopted_cores(model: nn.Module) -> dict[str, Any]:
    """The cores of models that ``adopt_hf`` adopted, by name. (Layers of PEFT have a ``set_scale``, too.)"""
    return {name: module for name, module in model.named_modules() if hasattr(type(module), "fold_scale")}


def _new_scales(model: nn.Module, to: str | float, factor: float) -> tuple[dict[str, Any], dict[str, ScoreScale]]:
    """The attention layers of a model by name, and a new scale for each."""
    read(Finite, factor, "factor")  # adopted attention has no ``ScoreScale``
    layers: dict[str, Any] = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(getattr(layer, "scale", None), ScoreScale)
    }
    return layers, {
        name: ScoreScale(to, head_dim=layer.head_dim, num_heads=layer.num_heads, max_len=layer.scale.max_len, factor=factor)
        for name, layer in layers.items()
    }


def _replace_scales(
    model: nn.Module, layers: dict[str, Any], new: dict[str, ScoreScale], to: str | float, factor: float
) -> None:
    for name, layer in layers.items():
        layer.scale = new[name]
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, TransformerConfig):
            module.config = replace(config, scale=to, scale_factor=factor)  # type: ignore[assignment]


def _why_not_fold(layer: nn.Module, new: ScoreScale) -> str | None:
    """The reason why the scale of an attention layer cannot be folded into ``new``, or None."""
    projections: Any = (layer.q_proj, layer.k_proj)
    old: Any = layer.scale
    faults = [fault for projection in projections if (fault := not_plain(projection, nn.Linear, ("weight", "bias")))]
    reasons = {
        f"scale={old.scale} has no fixed multiplier": old.multiplier is None,
        f"to={new.scale} has no fixed multiplier": new.multiplier is None,
        "the old or the new scale is 0": 0.0 in (old.multiplier, new.multiplier),
        "qk_norm would undo a change of W_Q and W_K": layer.qk_norm is not None,
        f"{type(layer.core).__name__} computes no dot products": not getattr(layer.core, "has_dot_products", False),
        f"q_proj and k_proj must be plain Linear layers: {', '.join(faults)}": bool(faults),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def not_plain(module: nn.Module, kind: type[nn.Module], parameters: Collection[str]) -> str | None:
    """Return why ``module`` may compute something other than a ``kind`` with these parameters, or None."""
    name = f"{type(module).__module__}.{type(module).__name__}"
    others = sorted({parameter for parameter, _ in module.named_parameters()} - set(parameters))
    if not isinstance(module, kind) or type(module).forward is not kind.forward or "forward" in vars(module):
        return f"{name} has its own forward"
    if others:
        return f"{name} has other parameters, {', '.join(others)}"
    # torch has no public list of a module's hooks
    return f"{name} has a hook" if module._forward_hooks or module._forward_pre_hooks else None


def memory_of(parameter: Tensor) -> tuple[int, int]:
    """The memory range of a tensor. A tensor without memory (meta, DTensor) gets a unique range."""
    steps = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
    start = parameter.data_ptr()
    return (start, start + (steps + 1) * parameter.element_size()) if start else (-id(parameter), 1 - id(parameter))


def overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two ranges of ``memory_of`` have a byte in common."""
    return first[0] < second[1] and second[0] < first[1]
