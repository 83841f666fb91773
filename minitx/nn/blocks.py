"""Transformer blocks from built parts: attention, feed-forward, and where the norms stand."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from minitx.nn.attention import MultiHeadAttention
from minitx.nn.masks import Causal, Mask, as_mask, intersect

NORM_POSITIONS = ("pre", "post", "sandwich", "deepnorm")


class Residual(nn.Module):
    """The residual connection around a sublayer f, and its norms.

    * ``pre``: x + f(norm(x)) (Xiong et al. 2020, arXiv:2002.04745); ``post``: norm(x + f(x)) (Vaswani et al. 2017, §3.1)
    * ``sandwich``: x + norm'(f(norm(x))) (Ding et al. 2021, arXiv:2105.13290); ``deepnorm``: norm(α x + f(x)), α =
      ``residual_scale`` (Wang et al. 2022, arXiv:2203.00555)

    Dropout acts on the sublayer's output, before it is added.
    """

    def __init__(
        self,
        norm: Callable[[], nn.Module],
        norm_position: str = "pre",
        *,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if norm_position not in NORM_POSITIONS:
            raise ValueError(f"norm_position={norm_position!r} must be one of {', '.join(NORM_POSITIONS)}")
        self.norm_position, self.residual_scale = norm_position, residual_scale
        self.norm = norm()
        self.output_norm = norm() if norm_position == "sandwich" else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_position in ("post", "deepnorm"):
            return self.norm(x * self.residual_scale + self.dropout(sublayer(x)))
        out = sublayer(self.norm(x))
        return x + self.dropout(out if self.output_norm is None else self.output_norm(out))


class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward, each in a ``Residual``; (B, L, E) in and out.

    Args:
        attention: a ``MultiHeadAttention`` (or anything called alike).
        feedforward: a module (B, L, E) -> (B, L, E).
        norm: makes one norm, for example ``lambda: nn.LayerNorm(E)``.
        norm_position: ``pre``, ``post``, ``sandwich`` or ``deepnorm``.
        parallel: attention and feed-forward read the same normed input and are added together (GPT-J; pre-norm only).
        dropout: on each sublayer's output. residual_scale: α of ``deepnorm``.

    >>> import torch
    >>> from minitx.nn import FeedForward, MultiHeadAttention
    >>> block = EncoderBlock(MultiHeadAttention(12, 3), FeedForward(12, 48), norm=lambda: nn.LayerNorm(12))
    >>> block(torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: nn.Module,
        *,
        norm: Callable[[], nn.Module],
        norm_position: str = "pre",
        parallel: bool = False,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if parallel and norm_position != "pre":
            raise ValueError(f"parallel sublayers need norm_position='pre', got {norm_position!r}")
        self.attention, self.feedforward, self.parallel = attention, feedforward, parallel
        options = {"dropout": dropout, "residual_scale": residual_scale}
        self.attention_residual = Residual(norm, norm_position, **options)
        self.feedforward_residual = None if parallel else Residual(norm, norm_position, **options)

    def forward(self, x: Tensor, *, attn_mask: Tensor | Mask | None = None, position_ids: Tensor | None = None) -> Tensor:
        """x (B, L, E); attn_mask bool, True = may attend, or a ``Mask``; position_ids (B or 1, L) for rotary."""
        x = self.attention_residual(x, lambda h: self._attend(h, attn_mask, position_ids))
        return x if self.feedforward_residual is None else self.feedforward_residual(x, self.feedforward)

    def _attend(self, x: Tensor, attn_mask: Tensor | Mask | None, position_ids: Tensor | None) -> Tensor:
        out = self.attention(x, attn_mask=attn_mask, position_ids=position_ids)
        assert isinstance(out, Tensor)
        return out + self.feedforward(x) if self.parallel else out


class DecoderBlock(EncoderBlock):
    """Causal self-attention, cross-attention where it was given, then feed-forward.

    Causal by itself: the block intersects ``Causal()`` with whatever mask it is handed.

    Args:
        cross_attention: a ``MultiHeadAttention`` over ``memory``, or None for a decoder-only block.
        The others are those of ``EncoderBlock``.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: nn.Module,
        *,
        norm: Callable[[], nn.Module],
        cross_attention: MultiHeadAttention | None = None,
        norm_position: str = "pre",
        parallel: bool = False,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__(
            attention,
            feedforward,
            norm=norm,
            norm_position=norm_position,
            parallel=parallel,
            dropout=dropout,
            residual_scale=residual_scale,
        )
        self.cross_attention = cross_attention
        self.cross_residual = (
            None if cross_attention is None else Residual(norm, norm_position, dropout=dropout, residual_scale=residual_scale)
        )

    def forward(
        self,
        x: Tensor,
        *,
        attn_mask: Tensor | Mask | None = None,
        position_ids: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | Mask | None = None,
    ) -> Tensor:
        """x (B, L, E); memory (B, S, kdim) of the encoder, with memory_mask (L, S), (B, 1, 1, S) … or a ``Mask``."""
        if (memory is None) != (self.cross_attention is None):
            state = "has no cross_attention" if self.cross_attention is None else "has cross_attention and needs memory"
            raise ValueError(f"this DecoderBlock {state}; got memory={'None' if memory is None else 'a tensor'}")
        mask = intersect(as_mask(attn_mask), Causal())
        x = self.attention_residual(x, lambda h: self._attend(h, mask, position_ids))
        if self.cross_attention is not None and self.cross_residual is not None:
            cross = self.cross_attention
            x = self.cross_residual(x, lambda h: cross(h, memory, attn_mask=memory_mask))
        return x if self.feedforward_residual is None else self.feedforward_residual(x, self.feedforward)
