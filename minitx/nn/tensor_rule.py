"""A tensor as a rule: what the mask ``Dense`` and the bias ``TensorBias`` share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorRule:
    """One entry for each query and key: (L, S), or 4-D and broadcastable to (B, H, L, S)."""

    tensor: Tensor

    @property
    def four(self) -> Tensor:
        """The tensor with four axes."""
        return self.tensor if self.tensor.dim() == 4 else self.tensor[None, None]

    def at(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """The entries at these indices, which broadcast."""
        places = zip((batch, head, row, key), self.four.shape, strict=True)
        return self.four[tuple(index if size > 1 else torch.zeros_like(index) for index, size in places)]

    def dense(
        self, num_queries: int, num_keys: int, *, rows: slice = slice(None), keys: slice = slice(None), **axes: object
    ) -> Tensor:
        """The entries, or a tile of them; what has one row or one key for all keeps it."""
        four = self.four[:, :, rows] if self.four.shape[2] > 1 else self.four
        return four[..., keys] if four.shape[3] > 1 else four

    def broadcasts_to(self, wanted: tuple[int, int, int, int]) -> bool:
        """Whether the last axes are those of ``wanted``, or 1."""
        return all(have in (1, want) for have, want in zip(self.tensor.shape[::-1], wanted[::-1], strict=False))
