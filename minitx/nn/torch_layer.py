"""The weights of ``torch.nn.MultiheadAttention`` in our layer, and back (``MultiHeadAttention.from_torch`` and ``to_torch``)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

TORCH_PARTS = {
    **{f"in_proj_{kind}": [f"{name}_proj.{kind}" for name in "qkv"] for kind in ("weight", "bias")},
    **{f"out_proj.{kind}": [f"out_proj.{kind}"] for kind in ("weight", "bias")},
    **{f"{name}_proj_weight": [f"{name}_proj.weight"] for name in "qkv"},  # with kdim or vdim, instead of in_proj_weight
}
"""Each parameter of ``torch.nn.MultiheadAttention``, and the parameters of ``MultiHeadAttention`` that it concatenates."""

STEPS = ("forward", "project", "merge")  # a subclass that overrides one of them computes something else


def check_torch_layer(theirs: nn.MultiheadAttention) -> None:
    """Raise a TypeError or a ValueError unless our layer can compute the same."""
    if not isinstance(theirs, nn.MultiheadAttention):
        raise TypeError(f"theirs must be a torch.nn.MultiheadAttention, got {type(theirs).__name__}")
    if theirs.bias_k is not None or theirs.add_zero_attn:
        option = "add_bias_kv" if theirs.bias_k is not None else "add_zero_attn"
        raise ValueError(f"{option}=True appends a key to every sequence, and MultiHeadAttention has no such option")
    if (fault := not_plain(theirs, nn.MultiheadAttention, TORCH_PARTS)) is not None:
        raise ValueError(f"theirs must be a plain torch.nn.MultiheadAttention: {fault}")


def copy_weights(theirs: nn.MultiheadAttention, ours: nn.Module) -> None:
    """Copy the parameters of torch's layer to our layer."""
    for name, whole in theirs.named_parameters(remove_duplicate=False):  # q_proj_weight may also be k_proj_weight
        parts = [ours.get_parameter(part) for part in TORCH_PARTS[name]]
        for part, copied in zip(parts, whole.detach().chunk(len(parts)), strict=True):
            part.data.copy_(copied)
            part.requires_grad_(whole.requires_grad)  # a frozen layer stays frozen


@torch.no_grad()
def as_torch_layer(ours: Any, layer: type[nn.Module], core: type[nn.Module], batch_first: bool) -> nn.MultiheadAttention:
    """Return torch's layer with the weights of ``ours``, which must be a plain ``layer`` with a ``core``."""
    E, H = ours.embed_dim, ours.num_heads
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        if (fault := not_plain(getattr(ours, name), nn.Linear, ("weight", "bias"))) is not None:
            raise ValueError(f"{name} must be a plain Linear layer: {fault}")
    lacking = {
        f"num_kv_heads={ours.num_kv_heads}": ours.num_kv_heads != H,
        f"head_dim={ours.head_dim}": ours.head_dim * H != E,
        f"scale={ours.scale.scale} times {ours.scale.factor}": ours.scale.multiplier != ours.head_dim**-0.5,
        f"out_bias={ours.out_proj.bias is not None}": (ours.out_proj.bias is None) != (ours.q_proj.bias is None),
        **{name: getattr(ours, name) is not None for name in ("qk_norm", "rotary", "sinks", "softcap")},
        type(ours.core).__name__: not isinstance(ours.core, core),
    }
    if names := ", ".join(name for name, is_set in lacking.items() if is_set):
        raise ValueError(f"torch.nn.MultiheadAttention has no {names}")
    if fault := not_plain(ours, layer, [part for parts in TORCH_PARTS.values() for part in parts]):
        raise ValueError(f"this must be a plain {layer.__name__}: {fault}")
    sizes = {"kdim": ours.k_proj.in_features, "vdim": ours.v_proj.in_features, "bias": ours.q_proj.bias is not None}
    theirs = nn.MultiheadAttention(E, H, dropout=ours.dropout, batch_first=batch_first, **sizes)
    theirs = theirs.to(ours.q_proj.weight).train(ours.training)
    for name, whole in theirs.named_parameters():
        parts: list[Tensor] = [ours.get_parameter(part) for part in TORCH_PARTS[name]]
        if len({part.requires_grad for part in parts}) > 1:
            raise ValueError(
                "only some of q_proj, k_proj and v_proj are frozen, but torch.nn.MultiheadAttention joins them in one "
                "parameter: freeze all of them or none"
            )
        whole.copy_(torch.cat(parts)).requires_grad_(parts[0].requires_grad)
    return theirs


def not_plain(module: nn.Module, kind: type[nn.Module], parameters: Collection[str]) -> str | None:
    """Return why ``module`` may compute something other than a ``kind`` with these parameters, or None."""
    name = f"{type(module).__module__}.{type(module).__name__}"
    others = sorted({parameter for parameter, _ in module.named_parameters()} - set(parameters))
    own = [step for step in STEPS if getattr(type(module), step, None) is not getattr(kind, step, None) or step in vars(module)]
    if not isinstance(module, kind) or own:
        return f"{name} has its own {(own or STEPS)[0]}"
    if others:
        return f"{name} has other parameters, {', '.join(others)}"
    # torch has no public list of a module's hooks
    return f"{name} has a hook" if module._forward_hooks or module._forward_pre_hooks else None
