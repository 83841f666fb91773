"""What all models share: a stack of blocks, initial weights, and their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.blocks import run_checkpointed
from minitx.nn.cache import KVCache
from minitx.nn.feedforward import MixtureOfExperts, load_balancing_loss
from minitx.nn.init import init_weights
from minitx.nn.models.parts import build_block, init_gains
from minitx.nn.norms import make_norm

Routing = list[dict[str, Tensor]]
HeadMask = Tensor | Mapping[int, Tensor] | None


class Stack(nn.ModuleList):
    """Blocks one after another; (B, L, E) in and out, each with the same mask and bias."""

    def __init__(self, config: TransformerConfig, num_layers: int, *, decoder: bool, cross: bool = False) -> None:
        depth = {"num_layers": num_layers, "decoder": decoder, "cross": cross}
        super().__init__(build_block(config, layer, **depth) for layer in range(num_layers))  # type: ignore[arg-type]
        self.checkpointing, self.value_residual = config.checkpointing, config.value_residual
        self.embed_shortcut = config.embed_shortcut

    def forward(
        self,
        x: Tensor,
        *,
        head_masks: Mapping[int, Tensor] | None = None,
        cache: KVCache | None = None,
        routing: Routing | None = None,
        **options: Any,
    ) -> Tensor:
        """``options`` go to every block; ``head_masks`` and the cache by layer; ``routing`` collects what routers chose."""
        run = run_checkpointed if self.checkpointing and torch.is_grad_enabled() else _run
        embeddings, first_value = x if self.embed_shortcut else None, None
        for layer, block in enumerate(self):
            own = {} if cache is None else {"cache": cache.layers[layer]}
            shared = {"embeddings": embeddings, "first_value": first_value} if layer else {"need_value": self.value_residual}
            need_extras = routing is not None or (self.value_residual and not layer)
            head_mask = (head_masks or {}).get(layer)
            x = run(block, x, **options, **own, **shared, head_mask=head_mask, return_extras=need_extras)
            if need_extras:
                x, extras = x
                first_value = extras.pop("value", first_value)
            if routing is not None:
                routing.append(extras)
        return x


class TransformerModel(nn.Module):
    """The base of every model: its config, initial weights and size."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def _final_norm(self) -> nn.Module:
        """The norm after the last block; post-norm and deepnorm end in one already."""
        config = self.config
        ends_normed = config.norm_position in ("post", "deepnorm")
        return nn.Identity() if ends_normed else make_norm(config.norm, config.embed_dim, config.norm_eps)

    def _init_weights(self, generator: torch.Generator | None) -> None:
        config = self.config
        options = {"fold": config.init_fold, "num_layers": config.decoder_layers, "gains": init_gains(config)}
        init_weights(self, config.init, **options, generator=generator)  # type: ignore[arg-type]

    def _head_masks(self, head_mask: HeadMask, num_layers: int) -> dict[int, Tensor]:
        """The head mask of each layer that has one."""
        if head_mask is None:
            return {}
        N, H = num_layers, self.config.num_heads
        if isinstance(head_mask, Tensor):
            if tuple(head_mask.shape) != (N, H):
                raise ValueError(f"head_mask must have shape (num_layers, H) = {(N, H)}, got {tuple(head_mask.shape)}")
            return dict(enumerate(head_mask))
        unknown = [layer for layer in head_mask if layer not in range(N)]
        if unknown:
            raise ValueError(f"head_mask names layers {unknown}, but the model has 0 to {N - 1}")
        return dict(head_mask)

    def num_parameters(self) -> int:
        """Number of trainable scalars; a tied head counts once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def _training_flops(self, scores: float, once_a_row: int = 0, length: int = 1) -> float:
        """3 · (2 · N_mm + 4 · H · D · ``scores``): what one token costs forward and backward.

        N_mm are the matrix parameters that a token meets (a tied head counts, embedding look-ups do not, and of N experts
        the k that it is sent to; ``once_a_row`` of them meet one token a row of ``length``); ``scores`` is the number of
        scores that a token needs in all layers together, as exact attention computes them. The backward pass counts twice
        the forward.
        """
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):  # a token goes through k of N
                experts = sum(p.numel() for p in module.parameters(recurse=False))
                matrices += experts * module.experts_per_token // module.num_experts
        met = matrices - once_a_row + once_a_row / length
        return 3.0 * (2.0 * met + 4.0 * self.config.num_heads * self.config.width_per_head * scores)


def mean_visible(length: int, window: int | None, *, causal: bool) -> float:
    """How many keys a query sees on average in a row of ``length`` tokens.

    >>> mean_visible(4, None, causal=True), mean_visible(4, 2, causal=False)
    (2.5, 2.5)
    """
    w = length if window is None else min(window, length)
    before = sum(min(i + 1, w) for i in range(length)) / length  # a query's own key included
    return before if causal else 2 * before - 1


def router_loss(routing: Routing, key_mask: Tensor | None = None) -> dict[str, Tensor]:
    """``router_loss``: the mean load-balancing loss of the layers that route, over real tokens; or nothing."""
    losses = [load_balancing_loss(r["router_probs"], r["router_choice"], key_mask) for r in routing if r]
    return {"router_loss": torch.stack(losses).mean()} if losses else {}


def _run(block: nn.Module, x: Tensor, **options: Any) -> Any:
    return block(x, **options)
