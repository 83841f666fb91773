"""A replacement for ``torch.nn.MultiheadAttention`` in an existing model."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor, nn

from minitx.nn.attention import TORCH_PARTS, MultiHeadAttention
from minitx.nn.masks import Dense, Mask, intersect


class _NotFused:
    """Stands where torch looks for a weight: its fused path refuses whatever has a ``__torch_function__``."""

    def __torch_function__(self, *args: object, **options: object) -> object:
        return NotImplemented


class DropInAttention(nn.Module):
    """A ``MultiHeadAttention`` that is called like ``torch.nn.MultiheadAttention``.

    It copies the weights of torch's layer and has its interface: it returns ``(output, weights)``, True means *hidden* in bool
    masks, the weights are averaged over heads, and ``batch_first`` is kept. The attribute ``attention`` is the
    ``MultiHeadAttention``. Its results differ from torch's in two points. The weights are those before dropout. A query without
    a visible key gives zero before ``out_proj``, where torch gives NaN.

    The parameters are new ones: torch has one ``in_proj_weight``, and this layer has three matrices. **Build the optimizer after
    the replacement**, because an optimizer that was built before keeps the parameters of the old layer and never trains the new
    ones. The same holds for an exponential moving average and for gradient hooks on parameters. ``load_state_dict`` also takes
    the state dict of torch's layer, so checkpoints of the old model load. ``swap_attention`` replaces every layer of a model.

    Args:
        theirs: the layer to replace. Its training mode, dtype and device are kept.
        backend: as in ``DotProductAttention``.

    Attributes:
        embed_dim, num_heads, head_dim, kdim, vdim, dropout, out_proj: those of ``attention``, as torch's layer has them.

    Raises:
        TypeError, ValueError: as in ``MultiHeadAttention.from_torch``.

    >>> block = nn.TransformerEncoderLayer(12, 2, batch_first=True).eval()
    >>> x = torch.randn(3, 5, 12)
    >>> before = block(x)
    >>> block.self_attn = DropInAttention(block.self_attn)
    >>> bool(torch.allclose(block(x), before, atol=1e-5))
    True
    """

    # nn.TransformerEncoderLayer and nn.TransformerEncoder read these, which keep both from torch's fused path: it would not
    # call this layer.
    in_proj_bias, _qkv_same_embed_dim = None, False
    in_proj_weight = _NotFused()
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
            key_padding_mask: (B, S), or (S,) if unbatched. Bool with True = hidden, or float, which is added to the scores.
            need_weights: also return the weights.
            attn_mask: (L, S) or (B · H, L, S). Bool with True = hidden, or float, which is added to the scores.
            average_attn_weights: return the mean of the weights over heads, (B, L, S), instead of (B, H, L, S).
            is_causal: a hint that ``attn_mask`` is causal, as in torch. Only the mask decides what is hidden.

        Returns:
            ``(output, weights)``. ``weights`` is None without ``need_weights``.

        Raises:
            ValueError: ``is_causal`` without ``attn_mask``, as in torch, or shapes that do not fit.
            TypeError: a mask that is neither bool nor float.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True needs attn_mask, got None")
        unbatched, batch_axis = query.dim() == 2, 0 if self.batch_first else 1
        if unbatched:
            query, key, value = _each_once(lambda tensor: tensor.unsqueeze(batch_axis), query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = _each_once(lambda tensor: tensor.transpose(0, 1), query, key, value)
        mask, bias = self._constraints(attn_mask, key_padding_mask, query.shape[0])
        out = self.attention(query, key, value, attn_mask=mask, attn_bias=bias, need_weights=need_weights)
        output, weights = out if need_weights else (out, None)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        output = output if self.batch_first else output.transpose(0, 1)
        if unbatched:
            output, weights = output.squeeze(batch_axis), None if weights is None else weights.squeeze(0)
        return output, weights

    def _constraints(
        self, attn_mask: Tensor | None, padding: Tensor | None, batch_size: int
    ) -> tuple[Mask | None, Tensor | None]:
        """Convert torch's two masks to a ``Mask`` and a bias."""
        H, given = self.attention.num_heads, {}
        if attn_mask is not None:
            if attn_mask.dim() == 3 and attn_mask.shape[0] != batch_size * H:
                wanted = f"(L, S) or (B * H, L, S) = ({batch_size * H}, L, S)"
                raise ValueError(f"attn_mask must have shape {wanted}, got {tuple(attn_mask.shape)}")
            given["attn_mask"] = attn_mask.unflatten(0, (-1, H)) if attn_mask.dim() == 3 else attn_mask  # to (B, H, L, S)
        if padding is not None:
            given["key_padding_mask"] = padding[:, None, None]  # (B, S) -> (B, 1, 1, S)
        for name, tensor in given.items():
            if tensor.dtype != torch.bool and not tensor.is_floating_point():
                raise TypeError(f"{name} must be bool (True = hidden) or float (added to the scores), got {tensor.dtype}")
        biases = [tensor for tensor in given.values() if tensor.dtype != torch.bool]
        hidden = [Dense(~tensor) for tensor in given.values() if tensor.dtype == torch.bool]
        return intersect(*hidden), reduce(torch.add, biases) if biases else None


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
            if other is not owner and any(isinstance(one, nn.MultiheadAttention) for one in (owner, other)):
                raise ValueError(
                    f"cannot swap the attention: {name} shares a parameter with another module, which a copy would not"
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
    """Before ``load_state_dict``: give the entries of torch's layer the names and shapes of ours."""
    for name, parts in TORCH_PARTS.items():
        if (whole := state_dict.pop(f"{prefix}{name}", None)) is not None:
            for part, tensor in zip(parts, whole.chunk(len(parts)), strict=True):
                state_dict[f"{prefix}attention.{part}"] = tensor


def _each_once(change: Callable[[Tensor], Tensor], *tensors: Tensor) -> list[Tensor]:
    """Apply ``change`` to each tensor, once if a tensor is repeated: self-attention is recognised by identical tensors."""
    changed = {id(tensor): change(tensor) for tensor in tensors}
    return [changed[id(tensor)] for tensor in tensors]
