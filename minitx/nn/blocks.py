"""Transformer blocks. They are composed of attention, a feed-forward network and norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.module_tracker import ModuleTracker

from minitx.nn.bias import Bias
from minitx.nn.cache import LayerCache
from minitx.nn.masks import Causal, Mask, as_mask, intersect
from minitx.nn.positions import Rotation

NORM_POSITIONS = ("pre", "post", "sandwich", "deepnorm")


class LayerScale(nn.Module):
    """Multiply a sublayer's output by a learned gain for each channel, small at first: λ · f(x).

    Touvron et al. 2021, "Going deeper with Image Transformers", arXiv:2103.17239, §2.1 (10⁻¹ up to 18 layers, 10⁻⁵ up to
    24, 10⁻⁶ beyond).

    Args:
        embed_dim: E, the number of channels.
        start: the initial λ, a positive number.

    >>> LayerScale(3, 0.5)(torch.ones(1, 2, 3)).unique().tolist()
    [0.5]
    """

    def __init__(self, embed_dim: int, start: float) -> None:
        super().__init__()
        if not start > 0.0:
            raise ValueError(f"layer_scale must be a positive start (or None for off), got {start}")
        self.start = start
        self.gain = nn.Parameter(torch.full((embed_dim,), float(start)))

    def reset_parameters(self) -> None:
        """Set every gain to ``start``."""
        nn.init.constant_(self.gain, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class StochasticDepth(nn.Module):
    """In training, drop a sublayer's whole output with probability ``p`` for each sample, and divide the others by 1 - p.

    Huang et al. 2016, arXiv:1603.09382; a sample is one entry of the first axis.

    >>> StochasticDepth(0.5)(torch.ones(1000, 2, 3)).unique().tolist()
    [0.0, 2.0]
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"stochastic_depth must lie in [0, 1), got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        kept = x.new_empty(x.shape[0], *(1,) * (x.dim() - 1)).bernoulli_(1.0 - self.p)
        return x * (kept / (1.0 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Residual(nn.Module):
    """The residual connection around a sublayer f, with its norms.

    * ``pre``: x + f(norm(x)) (Xiong et al. 2020, arXiv:2002.04745); ``post``: norm(x + f(x)) (Vaswani et al. 2017, §3.1)
    * ``sandwich``: x + norm'(f(norm(x))) (Ding et al. 2021, arXiv:2105.13290); ``deepnorm``: norm(α x + f(x)), α =
      ``residual_scale`` (Wang et al. 2022, arXiv:2203.00555)

    Dropout is applied to the sublayer's output, then ``branch`` if there is one, then the sum.

    Args:
        norm: a function that builds one norm.
        norm_position: one of the four.
        dropout: the dropout probability on the sublayer's output, in training only.
        residual_scale: α.
        branch: a function that builds a module for the output after dropout: ``LayerScale``, ``StochasticDepth``, or both.

    >>> Residual(norm=lambda: nn.LayerNorm(3))(torch.ones(1, 2, 3), lambda x: x).tolist()[0]  # ones have no deviation
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        norm_position: str = "pre",
        *,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
        branch: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if norm_position not in NORM_POSITIONS:
            raise ValueError(f"norm_position={norm_position!r} must be one of {', '.join(NORM_POSITIONS)}")
        if isinstance(norm, nn.Module):
            raise TypeError(
                f"norm must be a function that builds a norm, such as lambda: nn.LayerNorm(E), got a {type(norm).__name__}"
            )
        self.norm_position, self.residual_scale = norm_position, residual_scale
        self.norm_first = norm_position in ("pre", "sandwich")
        self.norm = norm()
        self.output_norm = norm() if norm_position == "sandwich" else None
        self.dropout = nn.Dropout(dropout) if dropout != 0.0 else None
        self.branch = None if branch is None else branch()

    def finish(self, out: Tensor) -> Tensor:
        """Return a sublayer's contribution to the residual stream: after norm' of ``sandwich``, dropout and ``branch``."""
        if self.output_norm is not None:
            out = self.output_norm(out)
        if self.dropout is not None:
            out = self.dropout(out)
        return out if self.branch is None else self.branch(out)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Any], *, may_return_weights: bool = False) -> Tensor:
        """Return the residual stream after ``sublayer``.

        Args:
            x: (B, L, E).
            sublayer: a function (B, L, E) -> (B, L, E).
            may_return_weights: the sublayer may also return a tuple with its output first, as attention does.
        """
        out = sublayer(self.norm(x) if self.norm_first else x)
        if may_return_weights and isinstance(out, tuple):
            out = out[0]
        out = self.finish(out)  # first, because the order decides the last bits of gradients
        return x + out if self.norm_first else self.norm(x * self.residual_scale + out)


class Block(nn.Module):
    """A Transformer block: self-attention, optional cross-attention and feed-forward, each in a ``Residual``. (B, L, E) in and out.

    ``Block(...)`` is an encoder block, ``Block(..., causal=True)`` the block of a language model, and ``causal=True`` with
    ``cross_attention`` the decoder block of an encoder–decoder.

    Args:
        attention: a ``MultiHeadAttention``, or a module that takes x and the options of ``forward`` that are not None. If it
            returns a tuple, the first entry is the output.
        feedforward: a module (B, L, E) -> (B, L, E).
        norm: a function that builds one norm, for example ``lambda: nn.LayerNorm(E)``.
        causal: intersect the mask with ``Causal()``. A mask that defines causality itself (``PrefixLM``) replaces ``Causal()``.
        cross_attention: a ``MultiHeadAttention`` over ``memory``, or None.
        norm_position: ``pre``, ``post``, ``sandwich`` or ``deepnorm``.
        parallel: attention and feed-forward get the same normed input, and their outputs are added (GPT-J; pre-norm only).
        dropout: the dropout probability on each sublayer's output; with ``parallel``, on the sum of the two. residual_scale: α of
            ``deepnorm``. branch: as in ``Residual``, after dropout.

    Raises:
        ValueError: ``parallel`` without ``norm_position="pre"``.

    >>> from minitx.nn import FeedForward, MultiHeadAttention
    >>> block = Block(MultiHeadAttention(12, 3), FeedForward(12, 48), norm=lambda: nn.LayerNorm(12), causal=True).eval()
    >>> x = torch.randn(2, 5, 12)
    >>> torch.allclose(block(x)[:, :3], block(x[:, :3]), atol=1e-6)  # the future changes nothing
    True
    """

    cross_attention: Any  # a module or None
    cross_residual: Any
    feedforward_residual: Any

    def __init__(
        self,
        attention: nn.Module,
        feedforward: nn.Module,
        *,
        norm: Callable[[], nn.Module],
        causal: bool = False,
        cross_attention: nn.Module | None = None,
        norm_position: str = "pre",
        parallel: bool = False,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
        branch: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        if parallel and norm_position != "pre":
            raise ValueError(f"parallel sublayers need norm_position='pre', got {norm_position!r}")
        self.attention, self.feedforward, self.cross_attention = attention, feedforward, cross_attention
        self.causal, self.parallel = causal, parallel
        residual = partial(Residual, norm, norm_position, dropout=dropout, residual_scale=residual_scale, branch=branch)
        self.attention_residual = residual()
        self.feedforward_residual = None if parallel else residual()
        self.cross_residual = None if cross_attention is None else residual()

    def forward(
        self,
        x: Tensor,
        *,
        attn_mask: Tensor | Mask | None = None,
        position_ids: Tensor | Rotation | None = None,
        attn_bias: Tensor | Bias | None = None,
        cache: LayerCache | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """Apply the block.

        Args:
            x: (B, L, E).
            attn_mask, position_ids, attn_bias: as in ``MultiHeadAttention.forward``.
            cache: the layer's keys and values of earlier positions and of the memory. x holds the next positions. The S keys of
                a mask include the earlier ones.
            memory: (B, S, kdim), the encoder's output, for ``cross_attention``. With a cache, its keys and values are computed
                once.
            memory_mask: bool (L, S), (B, 1, 1, S) …, or a ``Mask``.

        Raises:
            ValueError: ``memory`` is given without cross-attention, or missing with it.
        """
        if (memory is None) != (self.cross_attention is None):
            state = "has no cross_attention" if self.cross_attention is None else "has cross_attention and needs memory"
            raise ValueError(f"this block {state}; got memory={'None' if memory is None else 'a tensor'}")
        if self.causal and not (isinstance(attn_mask, Mask) and attn_mask.is_causality):
            attn_mask = intersect(Causal(), attn_mask)
        options = _without_none(attn_mask=attn_mask, position_ids=position_ids, attn_bias=attn_bias, cache=cache)
        cross = {} if memory is None else _without_none(key=memory, attn_mask=as_mask(memory_mask, "memory_mask"), cache=cache)
        first = self._attention_and_feedforward if self.parallel else self.attention
        x = self.attention_residual(x, partial(first, **options), may_return_weights=True)
        if self.cross_attention is not None:
            x = self.cross_residual(x, partial(self.cross_attention, **cross), may_return_weights=True)
        return x if self.parallel else self.feedforward_residual(x, self.feedforward)

    def _attention_and_feedforward(self, x: Tensor, **options: Any) -> Tensor:
        """The sum of the two sublayers of a parallel block."""
        out = self.attention(x, **options)
        return (out[0] if isinstance(out, tuple) else out) + self.feedforward(x)


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: option for name, option in options.items() if option is not None}


def is_block(module: nn.Module) -> bool:
    """Return whether a module is a layer whose output is the residual stream: a ``Block``, or a module with ``is_block = True``.

    The attribute may be set on the class or on the module. ``adopt_hf`` sets it on the layers of a Hugging Face model.
    """
    # not getattr(module, ...): wrappers forward it to the module that they wrap
    is_block = vars(module).get("is_block", getattr(type(module), "is_block", False))
    return isinstance(module, Block) or is_block is True


def is_recomputing() -> bool:
    """Return whether a backward pass is running. A forward pass inside of it is the recomputation of activation checkpointing.

    This holds for ``torch.utils.checkpoint`` in all its forms. Recorders skip this second run. Hooks run both times, because a
    hook that changes a value must change it both times.

    >>> is_recomputing()
    False
    """
    return ModuleTracker().is_bw


def run_checkpointed(block: nn.Module, x: Tensor, **options: Any) -> Any:
    """Return ``block(x, **options)``. Only the input is kept; the activations are computed again in the backward pass.

    Both runs use the same random numbers, so the gradients equal a plain call's bit by bit (Chen et al. 2016,
    arXiv:1604.06174).
    """
    return checkpoint(block, x, use_reentrant=False, **options)
