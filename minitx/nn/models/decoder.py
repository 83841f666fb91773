"""A causal language model: embeddings, decoder blocks, a head. GPT-2 and Llama shapes by config."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.init import init_weights
from minitx.nn.masks import Causal, Documents, Mask, Padding, SlidingWindow, intersect
from minitx.nn.models.parts import Embeddings, build_block
from minitx.nn.norms import make_norm
from minitx.nn.positions import position_ids_from


class DecoderLM(nn.Module):
    """Decoder-only Transformer over token ids: logits out, never a loss.

    Every option is a field of ``TransformerConfig``. The mask is built once per forward and handed down symbolically.

    Args:
        config: ``vocab_size`` must be set.
        generator: for the initial weights; default torch's global one.

    Raises:
        ValueError: no ``vocab_size``; inputs that do not fit.

    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> model(torch.tensor([[1, 2, 3, 5, 7]])).shape
    torch.Size([1, 5, 11])
    """

    def __init__(self, config: TransformerConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size=None: DecoderLM needs the number of token ids")
        self.config = config
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(build_block(config, decoder=True) for _ in range(config.num_layers))
        # post-norm and deepnorm end in a norm already
        ends_normed = config.norm_position in ("post", "deepnorm")
        self.final_norm = nn.Identity() if ends_normed else make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embeddings.token.weight
        init_weights(self, config.init, fold=config.init_fold, num_layers=config.num_layers, generator=generator)

    def forward(
        self,
        input_ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        mask: Mask | None = None,
        return_extras: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Next-token logits.

        Args:
            input_ids: int (B, L). token_type_ids: int (B, L), summed into the embeddings.
            key_mask: bool (B, L), True = real token; left and right padding are both fine.
            position_ids: int (B or 1, L); default counts the real tokens, from 0 in every document.
            document_ids: int (B, L); packed documents never see each other.
            mask: intersects with the model's own (causal, window, padding, documents).
            return_extras: return ``(hidden, extras)`` before ``self.head`` instead of logits.

        Returns:
            (B, L, V), or ``(hidden (B, L, E), extras)``.
        """
        L = self._check_ids(input_ids)
        full_mask = intersect(
            Causal(),
            SlidingWindow(self.config.window) if self.config.window is not None else None,
            Padding(key_mask) if key_mask is not None else None,
            Documents(document_ids) if document_ids is not None else None,
            mask,
        )
        assert full_mask is not None  # there is always Causal
        full_mask.check(input_ids.shape[0], self.config.num_heads, L, L)
        if position_ids is None:
            position_ids = position_ids_from(key_mask, document_ids, L, input_ids.device)
        x = self.embeddings(input_ids, position_ids, token_type_ids)  # (B, L, E)
        for block in self.blocks:
            x = block(x, attn_mask=full_mask, position_ids=position_ids)
        hidden = self.final_norm(x)
        return (hidden, {}) if return_extras else self.head(hidden)

    def _check_ids(self, input_ids: Tensor) -> int:
        if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise ValueError(f"input_ids must be whole numbers of shape (B, L), got {input_ids.dtype} {tuple(input_ids.shape)}")
        L = input_ids.shape[1]
        if self.config.position == "learned" and self.config.max_len < L:
            raise ValueError(f"input_ids has {L} tokens a row, but the position table ends at max_len={self.config.max_len}")
        return L

    def num_parameters(self) -> int:
        """Number of trainable scalars; a tied head counts once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def flops_per_token(self, length: int) -> float:
        """Training FLOPs per token at ``length`` tokens a row, causal and exact: 3 · (2·N_mm + 4·layers·H·D·T_eff).

        N_mm are the matrix parameters (a tied head counts, embedding look-ups do not); T_eff = (T + 1) / 2, or the mean
        number of visible keys under a window. The backward pass counts twice the forward.
        """
        config = self.config
        visible = sum(min(i + 1, config.window or length) for i in range(length)) / length
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 3.0 * (2.0 * matrices + 4.0 * config.num_layers * config.num_heads * config.width_per_head * visible)
