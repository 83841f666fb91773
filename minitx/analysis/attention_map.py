"""The attention of one layer on a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionMap:
    """One layer's attention.

    Attributes:
        name: the name of the core, such as ``blocks.0.attention.core``. kind: ``causal``, ``self`` or ``cross``.
        queries, keys: the tokens on the two axes, as keys of ``Snapshot.tokens``.
        weights: (B, H, L, S), before dropout. visible: bool (B, H, L, S), True = may attend.
        max_logit: (B, H, L), the largest |z| among a row's visible scores.

    >>> weights, visible = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]]), torch.ones(2, 2).tril().bool()[None, None]
    >>> layer = AttentionMap("core", "causal", "query", "query", weights, visible, torch.zeros(1, 1, 2))
    >>> layer.entropy().tolist()  # the first row has no choice, the second chooses nothing
    [[[nan, 1.0]]]
    """

    name: str
    kind: str
    queries: str
    keys: str
    weights: Tensor
    visible: Tensor
    max_logit: Tensor

    def place(self) -> dict[str, str]:
        """Return the name, the kind and the axes of the layer as plain data."""
        return {name: getattr(self, name) for name in ("name", "kind", "queries", "keys")}

    def entropy(self) -> Tensor:
        """Return H̄ = -Σ p ln p / ln n of every row with n visible keys: (B, H, L). NaN if n < 2."""
        count = self.visible.sum(-1).double()
        return (torch.special.entr(self.weights.double()).sum(-1) / count.log()).masked_fill(count < 2, torch.nan)
