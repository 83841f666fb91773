"""A replacement for ``torch.nn.MultiheadAttention`` in an existing model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from minitx.nn.attention import MultiHeadAttention
from minitx.nn.functional import require_tensor
from minitx.nn.masks import Causal, Dense, Mask, Padding, hides_later, intersect
from minitx.nn.rules import MASKS_PAGE
from minitx.nn.torch_layer import TORCH_PARTS
from minitx.nn.tracing import can_look

READS = ("device", "dim", "dtype", "is_meta", "ndim", "numel", "shape", "size")
WRITES = ("add_", "clamp_", "copy_", "div_", "erfinv_", "fill_", "mul_", "normal_", "sub_", "uniform_", "zero_")
"""The attributes that functions of ``torch.nn.init`` read, and the methods that they call to write."""
APART = "DropInAttention splits in_proj_weight and in_proj_bias into attention.q_proj, k_proj and v_proj. Use these"


class JoinedProjections:
    """Torch's ``in_proj_weight`` or ``in_proj_bias``, for code that initialises it. Writes go to the three projections.

    It isn't a tensor: torch's fused path refuses any object with a ``__torch_function__``.
    """

    __slots__ = ("parts",)  # setting any other attribute, such as requires_grad, is an error

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = parts

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> JoinedProjections:
        options = dict(options or {})
        joined = args[0] if args else options.pop("tensor", None)
        if function.__module__ != "torch.nn.init" or not isinstance(joined, cls):
            raise TypeError(f"{APART} for {function.__name__}")
        return joined._write(function, *args[1:], **options)

    def __getattr__(self, name: str) -> Any:
        if name in READS:
            return getattr(self._whole(), name)
        if name in WRITES:
            return partial(self._write, getattr(Tensor, name))
        raise AttributeError(f"{APART} for {name}")

    def _whole(self) -> Tensor:
        return torch.cat([part.detach() for part in self.parts])

    @torch.no_grad()
    def _write(self, change: Callable[..., object], *args: Any, **options: Any) -> JoinedProjections:
        whole = self._whole()
        change(whole, *args, **options)
        for part, changed in zip(self.parts, whole.split([len(part) for part in self.parts]), strict=True):
            part.copy_(changed)
        return self


class DropInAttention(nn.Module):
    """A ``MultiHeadAttention`` that is called like ``torch.nn.MultiheadAttention``.

    It copies the weights of torch's layer and has its interface: it returns ``(output, weights)``, True means *hidden* in bool
    masks, the weights are averaged over heads, and ``batch_first`` is kept. The attribute ``attention`` is the
    ``MultiHeadAttention``. Its results differ from torch's in two points. The weights are those before dropout. A query without
    a visible key gives zero before ``out_proj``, where torch gives NaN.

    The parameters are new: torch has one ``in_proj_weight``, and this layer has three matrices. **Build the optimizer after
    the replacement**, because an optimizer that was built before keeps the parameters of the old layer and never trains the new
    ones. The same holds for an exponential moving average and for gradient hooks on parameters. ``load_state_dict`` also takes
    the state dict of torch's layer, so checkpoints of the old model load. ``swap_attention`` replaces every layer of a model.

    Masks become rules: a key padding mask, bool or float, becomes a ``Padding``, and a causal ``attn_mask`` a ``Causal``. The finite
    numbers of a float mask become a bias. Off the CPU, the layer does not wait to read the values of a mask: every float mask is also
    a bias there, and ``attn_mask`` never becomes a ``Causal``.

    Args:
        theirs: the layer to replace. Its training mode, dtype and device are kept.
        backend: as in ``DotProductAttention``.

    Attributes:
        embed_dim, num_heads, head_dim, kdim, vdim, dropout, out_proj: as in ``attention``, under the names of torch's layer.
        in_proj_weight, in_proj_bias: functions of ``torch.nn.init`` write through them to the three projections. Any other use is an
            AttributeError or a TypeError.

    Raises:
        TypeError, ValueError: as in ``MultiHeadAttention.from_torch``.

    >>> block = nn.TransformerEncoderLayer(12, 2, batch_first=True).eval()
    >>> x = torch.randn(3, 5, 12)
    >>> before = block(x)
    >>> block.self_attn = DropInAttention(block.self_attn)
    >>> bool(torch.allclose(block(x), before, atol=1e-5))
    True
    """

    # These two keep nn.TransformerEncoderLayer and nn.TransformerEncoder from torch's fused path: it would not call this layer.
    _qkv_same_embed_dim = False
    in_proj_weight = property(lambda self: self._joined("in_proj_weight"))
    in_proj_bias = property(lambda self: self._joined("in_proj_bias"))
    q_proj_weight = property(lambda self: self.attention.q_proj.weight)
    k_proj_weight = property(lambda self: self.attention.k_proj.weight)
    v_proj_weight = property(lambda self: self.attention.v_proj.weight)
    out_proj = property(lambda self: self.attention.out_proj)
    embed_dim = property(lambda self: self.attention.embed_dim)
    num_heads = property(lambda self: self.attention.num_heads)
    head_dim = property(lambda self: self.attention.head_dim)
    kdim = property(lambda self: self.attention.kdim)
    vdim = property(lambda self: self.attention.vdim)
    dropout = property(lambda self: self.attention.dropout)

    def __init__(self, theirs: nn.MultiheadAttention, *, backend: str = "auto") -> None:
        super().__init__()
        self.attention = MultiHeadAttention.from_torch(theirs, backend=backend)
        self.batch_first = theirs.batch_first
        self.train(theirs.training)
        self.register_load_state_dict_pre_hook(_translate)  # type: ignore[no-untyped-call]

    def _joined(self, name: str) -> JoinedProjections | None:
        """The parameter ``name`` of torch's layer, or None if torch has none: without biases, or for inputs of other widths."""
        ours = self.attention
        kind = name.rpartition("_")[2]
        if (kind == "bias" and ours.q_proj.bias is None) or (kind == "weight" and not ours.embed_dim == ours.kdim == ours.vdim):
            return None
        return JoinedProjections([ours.get_parameter(part) for part in TORCH_PARTS[name]])

    def to_torch(self) -> nn.MultiheadAttention:
        """Return a ``torch.nn.MultiheadAttention`` with copies of these weights. See ``MultiHeadAttention.to_torch``."""
        return self.attention.to_torch(batch_first=self.batch_first)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention with the arguments of ``torch.nn.MultiheadAttention``.

        Args:
            query, key, value: (B, L or S, width), or (L or S, B, width) without ``batch_first``. Unbatched: (L or S, width).
            key_padding_mask: (B, S), or (S,) if unbatched. Bool with True = hidden, or float to add to the scores. A key
                that it hides is padding. Statistics also leave out the query at that position.
            need_weights: also return the weights.
            attn_mask: (L, S) or (B · H, L, S). Bool with True = hidden, or float to add to the scores.
            average_attn_weights: return the mean of the weights over heads, (B, L, S), instead of (B, H, L, S).
            is_causal: a hint that ``attn_mask`` is causal, as in torch. The values of the mask decide.

        Returns:
            ``(output, weights)``. ``weights`` is None without ``need_weights``.

        Raises:
            ValueError: ``is_causal`` without ``attn_mask``, as in torch, or shapes that do not fit.
            TypeError: a mask that is neither bool nor float.
        """
        if attn_mask is None and is_causal:
            raise ValueError(f"is_causal=True needs attn_mask, as in torch, got None ({MASKS_PAGE})")
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require_tensor(name, tensor)
        unbatched = query.dim() == 2
        batch_axis = 0 if self.batch_first else 1
        if unbatched:
            query, key, value = _each_once(lambda tensor: tensor.unsqueeze(batch_axis), query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = _each_once(lambda tensor: tensor.transpose(0, 1), query, key, value)
        mask, bias = self._constraints(attn_mask, key_padding_mask, query, key)
        out = self.attention(query, key, value, attn_mask=mask, attn_bias=bias, need_weights=need_weights)
        output, weights = out if need_weights else (out, None)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        output = output if self.batch_first else output.transpose(0, 1)
        if unbatched:
            output, weights = output.squeeze(batch_axis), None if weights is None else weights.squeeze(0)
        return output, weights

    def _constraints(
        self, attn_mask: Tensor | None, padding: Tensor | None, query: Tensor, key: Tensor
    ) -> tuple[Mask | None, Tensor | None]:
        """Convert torch's two masks to a ``Mask`` and a bias. The bias is the sum of float masks that do more than hide keys."""
        B, L, S, H = query.shape[0], query.shape[1], key.shape[1], self.attention.num_heads
        rules: list[Mask | None] = []
        biases: list[Tensor | None] = []
        if padding is not None:
            if tuple(padding.shape) != (B, S):
                got = tuple(padding.shape)
                raise ValueError(f"key_padding_mask must have shape (B, S) = {(B, S)}, got {got} ({MASKS_PAGE})")
            real, bias = _visible("key_padding_mask", padding)
            rules.append(None if can_look(real) and real.all() else Padding(real))
            biases.append(None if bias is None else bias[:, None, None])  # (B, S) -> (B, 1, 1, S)
        if attn_mask is not None:
            if tuple(attn_mask.shape) not in ((L, S), (B * H, L, S)):
                expected = f"(L, S) = {(L, S)} or (B * H, L, S) = {(B * H, L, S)}"
                raise ValueError(f"attn_mask must have shape {expected}, got {tuple(attn_mask.shape)} ({MASKS_PAGE})")
            attn_mask = attn_mask.unflatten(0, (B, H)) if attn_mask.dim() == 3 else attn_mask[None, None]  # to (B, H, L, S)
            visible, bias = _visible("attn_mask", attn_mask)
            biases.append(bias)
            if can_look(visible):
                rules.append(_mask_rule(visible, B))
            elif bias is None:  # else its -inf hide the same keys
                rules.append(Dense(visible))
        added = [bias for bias in biases if bias is not None]
        return intersect(*rules), reduce(torch.add, added) if added else None


def _visible(name: str, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return which keys torch's ``mask`` leaves visible, and the mask as a bias unless it only hides keys.

    A float mask is also a bias if it requires grad, or if its values cannot be read at no cost.
    """
    if mask.dtype == torch.bool:
        return ~mask, None
    if not mask.is_floating_point():
        advice = f"use .bool() where 1 means hidden, and {name} == 0 where 1 means visible"
        requirement = f"{name} must be bool (True = hidden) or float (added to the scores)"
        raise TypeError(f"{requirement}, got {mask.dtype}: {advice} ({MASKS_PAGE})")
    visible = mask != -torch.inf
    only_hides = can_look(mask) and not mask.requires_grad and not mask.masked_fill(~visible, 0.0).any()
    return visible, None if only_hides else mask


def _mask_rule(visible: Tensor, batch_size: int) -> Mask | None:
    """Return the rule that a bool mask (B or 1, H or 1, L, S) amounts to: padding, causality, both, or the tensor itself."""
    L, S = visible.shape[-2:]
    real = visible.any(dim=1).any(dim=1)  # the keys that a query sees, (B or 1, S)
    causal = Causal() if hides_later(visible) else None
    plain = real[:, None, None]
    if causal is not None:
        plain = plain & torch.ones(L, S, dtype=torch.bool, device=visible.device).tril(S - L)
    if not torch.equal(visible, plain.expand_as(visible)):
        return intersect(causal, Dense(visible))
    return intersect(causal, None if real.all() else Padding(real.expand(batch_size, -1)))


def swap_attention(model: nn.Module, *, backend: str = "auto") -> nn.Module:
    """Replace every ``torch.nn.MultiheadAttention`` in a model by a ``DropInAttention``, in place.

    A layer that the model uses in several places stays one layer. The new layers have new parameters: build the optimizer
    afterwards. ``load_state_dict`` of the swapped model also takes a state dict of the original model.

    Args:
        model: any module that contains torch's layer. It is changed in place and returned.
        backend: as in ``DotProductAttention``.

    Raises:
        ValueError: the model contains no such layer, or a layer that cannot be replaced: one that ``from_torch`` refuses, or one
            that shares a parameter with another module. The model is then unchanged.

    >>> model = nn.Transformer(12, 2, 1, 1, 16, batch_first=True).eval()
    >>> source, target = torch.randn(2, 5, 12), torch.randn(2, 3, 12)
    >>> before = model(source, target)
    >>> bool(torch.allclose(swap_attention(model)(source, target), before, atol=1e-5))
    True
    """
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if name and isinstance(layer, nn.MultiheadAttention)
    }
    if not layers:
        raise ValueError(
            f"{type(model).__name__} contains no torch.nn.MultiheadAttention; for a single layer, use DropInAttention"
        )
    owners: dict[nn.Parameter, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        owner = layers.get(name.removesuffix(".out_proj"), module)
        for parameter in module.parameters(recurse=False):
            other = owners.setdefault(parameter, owner)
            if other is not owner and any(isinstance(holder, nn.MultiheadAttention) for holder in (owner, other)):
                raise ValueError(
                    f"cannot swap the attention: {name} shares a parameter with another module, and a copy would not share it"
                )
    swapped: dict[nn.Module, DropInAttention] = {}
    for name, layer in layers.items():
        if layer not in swapped:
            try:
                swapped[layer] = DropInAttention(layer, backend=backend)
            except ValueError as error:
                raise ValueError(f"cannot swap {name}: {error}") from None
    for name, layer in layers.items():
        model.set_submodule(name, swapped[layer])
    return model


def _translate(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *rest: object) -> None:
    """Rename and split the entries of torch's layer before ``load_state_dict``."""
    for name, parts in TORCH_PARTS.items():
        if (whole := state_dict.pop(f"{prefix}{name}", None)) is not None:
            for part, tensor in zip(parts, whole.chunk(len(parts)), strict=True):
                state_dict[f"{prefix}attention.{part}"] = tensor


def _each_once(change: Callable[[Tensor], Tensor], *tensors: Tensor) -> list[Tensor]:
    """Apply ``change`` to each tensor, once if a tensor is repeated: self-attention is recognised by identical tensors."""
    changed = {id(tensor): change(tensor) for tensor in tensors}
    return [changed[id(tensor)] for tensor in tensors]
