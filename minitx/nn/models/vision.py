"""A Vision Transformer: an encoder whose tokens are the patches of an image."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.models.base import TransformerModel
from minitx.nn.models.encoder import Pool, build_head
from minitx.nn.models.parts import Core
from minitx.nn.norms import make_norm


class VisionTransformer(TransformerModel):
    """An image classifier: images in, ``num_labels`` logits out (Dosovitskiy et al. 2021, arXiv:2010.11929, §3.1).

    An image (C, h, w) is cut into h/P · w/P patches of P × P pixels. A linear map of the C · P² numbers of a patch gives its token.
    With ``pooling=first`` a learned class token comes first, and the head reads its last hidden state. With ``pooling=mean`` the
    head reads the mean of the patches. The position table is for images of ``image_size`` and is interpolated for other sizes (§3.2).

    Args:
        config: the model's config. ``image_size``, ``num_channels`` and, with ``head=sequence``, ``num_labels`` must be set.
            ``patch_size`` is P, in pixels.
        core: a function that builds the attention core of a layer, instead of ``config.attention``.
        generator: for the initial weights. Default: torch's global generator.

    Raises:
        ValueError: ``image_size``, ``num_channels`` or ``num_labels`` is missing, or ``architecture`` is another.

    >>> sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    >>> config = TransformerConfig(architecture="vision", head="sequence", embed_dim=12, num_heads=3, num_layers=2, **sizes)
    >>> model = VisionTransformer(config)
    >>> model(torch.randn(5, 1, 8, 8)).shape, model(torch.randn(5, 1, 12, 6)).shape
    (torch.Size([5, 10]), torch.Size([5, 10]))
    """

    architecture = "vision"

    def __init__(
        self, config: TransformerConfig, *, core: Core | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(config, PatchEmbeddings(config), core=core)
        self.pool = Pool(config) if config.head == "sequence" or config.pooler else None
        self.head = build_head(config)
        self._init_weights(generator)

    def forward(self, pixel_values: Tensor, *, return_hidden: bool = False) -> Tensor:  # type: ignore[override]
        """Return logits (B, num_labels), or hidden states (B, tokens, E) with ``head=none``.

        Args:
            pixel_values: float (B, C, h, w). h and w are multiples of ``patch_size``.
            return_hidden: return the input of ``self.head`` instead of logits, as in ``Encoder``.

        Raises:
            ValueError: images of another shape.
            TypeError: images that are not floating-point.
        """
        hidden = self._run(self.embeddings(pixel_values))
        if self.config.head == "sequence":
            hidden = self.pool(hidden)  # type: ignore[misc]
        return hidden if return_hidden else self.head(hidden)


class PatchEmbeddings(nn.Module):
    """Embed the patches of images: (B, C, h, w) to (B, tokens, E). The class token comes first. Positions are added."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        for name in ("image_size", "num_channels"):
            if getattr(config, name) is None:
                raise ValueError(f"{name}=None: VisionTransformer needs {name}")
        assert config.image_size is not None and config.num_channels is not None
        E, P, self.num_channels = config.embed_dim, config.patch_size, config.num_channels
        self.patch_size, self.side = P, config.image_size // P
        self.num_class_tokens = config.num_class_tokens
        self.num_tokens = self.side**2 + self.num_class_tokens
        self.patch_proj = nn.Linear(self.num_channels * P * P, E)
        self.class_token = nn.Parameter(torch.zeros(1, 1, E)) if self.num_class_tokens else None
        self.position = nn.Embedding(self.num_tokens, E) if config.position == "learned" else None
        self.norm = make_norm(config.norm, E, config.norm_eps) if config.embed_norm else None
        self.dropout = nn.Dropout(config.dropout)

    def reset_parameters(self) -> None:
        """Set the class token to zero."""
        if self.class_token is not None:
            nn.init.zeros_(self.class_token)

    def forward(self, pixel_values: Tensor) -> Tensor:
        P, shape = self.patch_size, tuple(pixel_values.shape)
        if len(shape) != 4 or shape[1] != self.num_channels or shape[2] % P or shape[3] % P or 0 in shape:
            raise ValueError(
                f"pixel_values must have shape (B, {self.num_channels}, h, w) with h and w multiples of patch_size={P}, got {shape}"
            )
        if not pixel_values.is_floating_point():
            raise TypeError(f"pixel_values must be floating-point, got {pixel_values.dtype}")
        grid = shape[2] // P, shape[3] // P
        patches = pixel_values.unfold(2, P, P).unfold(3, P, P)  # (B, C, rows, columns, P, P)
        x = self.patch_proj(patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))  # (B, rows * columns, E)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(shape[0], -1, -1), x), dim=1)
        if self.position is not None:
            x = x + self.positions(*grid)
        return self.dropout(x if self.norm is None else self.norm(x))

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return the position table (tokens, E), with bicubic interpolation for a grid of another size."""
        assert self.position is not None
        table, n = self.position.weight, self.num_class_tokens
        if (rows, columns) == (self.side, self.side):
            return table
        square = table[n:].T.view(1, -1, self.side, self.side)
        high = square.to(torch.promote_types(square.dtype, torch.float32))
        resized = F.interpolate(high, size=(rows, columns), mode="bicubic", align_corners=False).to(table.dtype)
        return torch.cat((table[:n], resized[0].flatten(1).T))
