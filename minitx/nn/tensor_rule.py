"""The common base of the mask ``Dense`` and the bias ``TensorBias``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TensorRule:
    """A rule given as a tensor of shape (L, S), or 4-D and broadcastable to (B, H, L, S)."""

    tensor: Tensor

    @property
    def four(self) -> Tensor:
        """Return the tensor with four axes."""
        return self.tensor if self.tensor.dim() == 4 else self.tensor[None, None]

    def at(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        """Return the entries at these indices, which broadcast."""
        places = zip((batch, head, row, key), self.four.shape, strict=True)
        return self.four[tuple(index if size > 1 else torch.zeros_like(index) for index, size in places)]

    def dense(
        self, num_queries: int, num_keys: int, *, rows: slice = slice(None), keys: slice = slice(None), **axes: object
    ) -> Tensor:
        """Return the tensor or a tile of it. Axes of size 1 are kept."""
        four = self.four[:, :, rows] if self.four.shape[2] > 1 else self.four
        return four[..., keys] if four.shape[3] > 1 else four

    def broadcasts_to(self, wanted: tuple[int, int, int, int]) -> bool:
        """Return whether the tensor broadcasts to the shape ``wanted``."""
        return all(have in (1, want) for have, want in zip(self.tensor.shape[::-1], wanted[::-1], strict=False))
