"""Replace the attention of a Vision Transformer that is written like the one of torchvision.

torchvision's encoder block contains ``nn.MultiheadAttention`` and calls ``x, _ = self.self_attention(x, x, x, need_weights=False)``.
``DropInAttention`` copies the weights and has the same interface, so the code of the model does not change and its output stays equal. The
new layers can be inspected: the last lines of this file compute the entropy of their weights, which torch's fused path does not return.

    python examples/swap_vit.py

This prints the largest difference of the logits in float32 and float64, with and without padding, and the mean entropy of each layer.
"""

import torch
from torch import Tensor, nn

from minitx.analysis import capture
from minitx.nn import DropInAttention


class EncoderBlock(nn.Module):
    """A block with the names of torchvision (torchvision.models.vision_transformer.EncoderBlock)."""

    def __init__(self, num_heads: int, hidden_dim: int, mlp_dim: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden_dim, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(hidden_dim, num_heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(hidden_dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(hidden_dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, hidden_dim))

    def forward(self, input: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.ln_1(input)
        x, _ = self.self_attention(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)
        x = x + input
        return x + self.mlp(self.ln_2(x))


class SmallViT(nn.Module):
    """A small Vision Transformer: 16 patches of 16 x 16 images, a class token, three blocks."""

    def __init__(self, hidden_dim: int = 48, num_classes: int = 10) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, hidden_dim, kernel_size=4, stride=4)
        self.class_token = nn.Parameter(torch.randn(1, 1, hidden_dim))
        self.pos_embedding = nn.Parameter(0.02 * torch.randn(1, 17, hidden_dim))
        self.layers = nn.ModuleList(EncoderBlock(4, hidden_dim, 2 * hidden_dim) for _ in range(3))
        self.head = nn.Linear(hidden_dim, num_classes)

    def forward(self, images: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        patches = self.conv_proj(images).flatten(2).transpose(1, 2)  # (B, E, 4, 4) -> (B, 16, E)
        x = torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1) + self.pos_embedding
        for block in self.layers:
            x = block(x, key_padding_mask)
        return self.head(x[:, 0])


def swap(vit: SmallViT) -> None:
    """Replace the attention of each block."""
    for block in vit.layers:
        block.self_attention = DropInAttention(block.self_attention)


def largest_difference(dtype: torch.dtype, *, padded: bool) -> float:
    """Return the largest difference of the logits of eight images. ``padded`` hides the last five patches (True = hidden)."""
    torch.manual_seed(0)
    vit, images = SmallViT().to(dtype).eval(), torch.randn(8, 3, 16, 16, dtype=dtype)
    hidden = (torch.arange(17) >= 12).expand(8, 17) if padded else None
    with torch.no_grad():
        before = vit(images, hidden)
        swap(vit)
        return (vit(images, hidden) - before).abs().max().item()


def main() -> dict[str, float]:
    """Print and return the results."""
    results = {}
    for dtype in (torch.float32, torch.float64):
        for padded in (False, True):
            name = f"{str(dtype).removeprefix('torch.')}{', padded' if padded else ''}"
            results[name] = largest_difference(dtype, padded=padded)
            print(f"largest difference of the logits, {name}: {results[name]:.1e}")

    torch.manual_seed(0)
    vit = SmallViT().eval()
    swap(vit)
    with capture(vit) as seen, torch.no_grad():
        vit(torch.randn(8, 3, 16, 16))
    for layer, (record,) in seen.items():
        results[layer] = record["entropy"].mean().item()
        print(f"{layer}: mean entropy {results[layer]:.3f} of 1")
    return results


if __name__ == "__main__":
    main()
