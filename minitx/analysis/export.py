"""Attention handed to other people's viewers, in the form that they take."""

from __future__ import annotations

from torch import Tensor

from minitx.analysis.capture import Seen
from minitx.analysis.snapshot import Snapshot

Layers = tuple[Tensor, ...]


def to_bertviz(seen: Snapshot | Seen, row: int = 0) -> Layers | tuple[Layers | None, Layers | None, Layers | None]:
    """What BertViz's ``head_view`` and ``model_view`` take: one tensor (1, H, L, S) a layer.

    ::

        from bertviz import head_view, model_view

        sentence = snapshot.sentence(0)  # without padding
        head_view(to_bertviz(snapshot), sentence.tokens["input_ids"][0])

        encoder, decoder, cross = to_bertviz(snapshot)  # of an encoder–decoder
        model_view(
            encoder_attention=encoder,
            decoder_attention=decoder,
            cross_attention=cross,
            encoder_tokens=sentence.tokens["input_ids"][0],
            decoder_tokens=sentence.tokens["decoder_input_ids"][0],
        )

    CircuitsVis takes (H, L, L) of one layer, and no cross-attention: ``circuitsvis.attention.attention_heads(attention=
    to_bertviz(snapshot)[layer][0], tokens=sentence.tokens["input_ids"][0])``. Neither package is needed here.

    Args:
        seen: a snapshot, whose padding is left out, or what ``capture(model, what="weights")`` gave, of which each layer's
            last call is taken with its padding.
        row: of the batch; both viewers show one sentence.

    Returns:
        The layers in the model's order; where there is cross-attention, three such tuples: the encoder's, the decoder's own,
        and cross-attention. A kind that was not looked at is None, as BertViz wants it.

    Raises:
        ValueError: no such row; layers with different numbers of heads, which BertViz cannot stack; a layer without a call.
        TypeError: neither a snapshot nor weights.

    >>> import torch
    >>> from minitx.analysis import capture
    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(6, 2)
    >>> with capture(attention, what="weights") as seen:
    ...     _ = attention(torch.randn(3, 5, 6))
    >>> [tuple(layer.shape) for layer in to_bertviz(seen, row=2)]
    [(1, 2, 5, 5)]
    """
    if isinstance(seen, Snapshot):
        layers = [(layer.kind, layer.weights) for layer in seen.sentence(row).maps]
    else:
        layers = _of_seen(seen, row)
    by_kind = {kind: tuple(weights for its, weights in layers if its == kind) for kind in ("self", "causal", "cross")}
    for kind, weights in by_kind.items():
        heads = [layer.shape[1] for layer in weights]
        if len(set(heads)) > 1:
            raise ValueError(f"the {kind} layers have {heads} heads; BertViz wants the same number in every layer")
    if by_kind["cross"]:
        return by_kind["self"] or None, by_kind["causal"] or None, by_kind["cross"]
    return tuple(weights for _, weights in layers)


def _of_seen(seen: Seen, row: int) -> list[tuple[str, Tensor]]:
    if not isinstance(seen, Seen):
        raise TypeError(f"to_bertviz takes a Snapshot or what capture(...) gave, got {type(seen).__name__}")
    layers = []
    for name, calls in seen.items():
        if not calls:
            raise ValueError(f"{name} was not called while it was looked at")
        if not isinstance(calls[-1], Tensor):
            raise TypeError(f"to_bertviz needs capture(..., what='weights'), {name} holds a {type(calls[-1]).__name__}")
        if not 0 <= row < len(calls[-1]):
            raise ValueError(f"row={row} must be one of the batch's 0 to {len(calls[-1]) - 1}")
        layers.append((seen.kinds[name], calls[-1][row : row + 1].cpu()))
    return layers
