"""A classifier of flat pictures."""

import torch
from torch import nn


class SimpleDenseNet(nn.Module):
    """Two linear layers with batch norm between them."""

    def __init__(self, input_size: int = 64, hidden_size: int = 32, output_size: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(input_size, hidden_size), nn.BatchNorm1d(hidden_size), nn.ReLU(), nn.Linear(hidden_size, output_size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (B, classes) of pictures (B, height, width)."""
        return self.layers(x.flatten(1))
