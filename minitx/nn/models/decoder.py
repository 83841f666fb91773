"""A causal language model: embeddings, decoder blocks, a head. GPT-2 and Llama shapes by config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.bias import as_bias
from minitx.nn.blocks import run_checkpointed
from minitx.nn.cache import KVCache
from minitx.nn.feedforward import MixtureOfExperts, load_balancing_loss
from minitx.nn.init import init_weights
from minitx.nn.masks import Causal, Documents, Mask, Padding, SlidingWindow, intersect
from minitx.nn.models.parts import Embeddings, build_bias, build_block, init_gains
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
        self.blocks = nn.ModuleList(build_block(config, layer, decoder=True) for layer in range(config.num_layers))
        self.attn_bias = build_bias(config, decoder=True)
        # post-norm and deepnorm end in a norm already
        ends_normed = config.norm_position in ("post", "deepnorm")
        self.final_norm = nn.Identity() if ends_normed else make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embeddings.token.weight
        options = {"fold": config.init_fold, "num_layers": config.num_layers, "gains": init_gains(config)}
        init_weights(self, config.init, **options, generator=generator)  # type: ignore[arg-type]

    def forward(
        self,
        input_ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        mask: Mask | None = None,
        head_mask: Tensor | Mapping[int, Tensor] | None = None,
        cache: KVCache | None = None,
        return_extras: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Next-token logits.

        Args:
            input_ids: int (B, L). token_type_ids: int (B, L), summed into the embeddings.
            key_mask: bool (B, L), True = real token; left and right padding are both fine. Padding *between* real tokens
                counts in the distances of ``alibi``, ``t5`` and ``window``, though not in ``position_ids``.
            position_ids: int (B or 1, L); default counts the real tokens, from 0 in every document.
            document_ids: int (B, L); packed documents never see each other.
            mask: intersects with the model's own (causal, window, padding, documents).
            head_mask: (num_layers, H), or for some layers (H,) or (B, H); multiplies each head's output.
            cache: what was read before; ``input_ids`` continue it, and everything above describes the new tokens only,
                but for ``mask``, whose keys count from the beginning.
            return_extras: return ``(hidden, extras)`` before ``self.head`` instead of logits; ``extras["router_loss"]``
                is the mean ``load_balancing_loss`` of the layers where the model has experts.

        Returns:
            (B, L, V), or ``(hidden (B, L, E), extras)``.

        Raises:
            ValueError: inputs that do not fit each other, the cache, or the tables of the model.
        """
        self._check_inputs(input_ids, position_ids, cache)
        L, past = input_ids.shape[1], 0 if cache is None else cache.length
        if cache is not None:
            key_mask, document_ids = cache.joined(input_ids, key_mask, document_ids)  # (B, S)
        full_mask = self._mask(input_ids.shape[0], L, past + L, key_mask, document_ids, mask)
        if position_ids is None:
            position_ids = position_ids_from(key_mask, document_ids, past + L, input_ids.device)[:, past:]
        options = {
            "attn_mask": full_mask,
            "position_ids": position_ids,
            "attn_bias": None if self.attn_bias is None else as_bias(self.attn_bias),
            **({"return_extras": True} if return_extras else {}),
        }
        run = run_checkpointed if self.config.checkpointing and torch.is_grad_enabled() else _run
        heads = {} if head_mask is None else self._layers_heads(head_mask)
        routing: list[dict[str, Tensor]] = []
        x = self.embeddings(input_ids, position_ids, token_type_ids)  # (B, L, E)
        for layer, block in enumerate(self.blocks):
            x = run(block, x, **options, head_mask=heads.get(layer), cache=None if cache is None else cache.layers[layer])
            if return_extras:
                x, extras = x
                routing.append(extras)
        if cache is not None:
            cache.key_mask, cache.document_ids = key_mask, document_ids
        hidden = self.final_norm(x)
        return (hidden, _router_loss(routing, key_mask, past)) if return_extras else self.head(hidden)

    def _mask(self, B: int, L: int, S: int, key_mask: Tensor | None, document_ids: Tensor | None, mask: Mask | None) -> Mask:
        """Everything that hides keys, symbolic; built once and shared by all layers."""
        full_mask = intersect(
            Causal(),
            SlidingWindow(self.config.window) if self.config.window is not None else None,
            Padding(key_mask) if key_mask is not None else None,
            Documents(document_ids) if document_ids is not None else None,
            mask,
        )
        assert full_mask is not None  # there is always Causal
        full_mask.check(B, self.config.num_heads, L, S)
        return full_mask

    def _layers_heads(self, head_mask: Tensor | Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The head mask of each layer that has one."""
        N, H = self.config.num_layers, self.config.num_heads
        if isinstance(head_mask, Tensor):
            if tuple(head_mask.shape) != (N, H):
                raise ValueError(f"head_mask must have shape (num_layers, H) = {(N, H)}, got {tuple(head_mask.shape)}")
            return dict(enumerate(head_mask))
        unknown = [layer for layer in head_mask if layer not in range(N)]
        if unknown:
            raise ValueError(f"head_mask names layers {unknown}, but the model has 0 to {N - 1}")
        return dict(head_mask)

    def _check_inputs(self, input_ids: Tensor, position_ids: Tensor | None, cache: KVCache | None) -> None:
        if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise ValueError(f"input_ids must be whole numbers of shape (B, L), got {input_ids.dtype} {tuple(input_ids.shape)}")
        if 0 in input_ids.shape:
            raise ValueError(f"input_ids must have at least one row and one token, got shape {tuple(input_ids.shape)}")
        config, L = self.config, input_ids.shape[1]
        if cache is not None and len(cache.layers) != config.num_layers:
            raise ValueError(f"cache has {len(cache.layers)} layers, but the model has num_layers={config.num_layers}")
        if position_ids is not None and config.position in ("alibi", "t5", "none"):
            raise ValueError(f"position_ids were given, but position={config.position} does not read them")
        if config.position == "learned" and position_ids is None:
            past = 0 if cache is None else cache.length
            if config.max_len < past + L:
                before = f" after {past} in the cache" if past else ""
                raise ValueError(
                    f"input_ids has {L} tokens a row{before}, but the position table ends at max_len={config.max_len}"
                )

    def num_parameters(self) -> int:
        """Number of trainable scalars; a tied head counts once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def flops_per_token(self, length: int) -> float:
        """Training FLOPs per token at ``length`` tokens a row, causal and exact: 3 · (2·N_mm + 4·layers·H·D·T_eff).

        N_mm are the matrix parameters that a token meets (a tied head counts, embedding look-ups do not, and of N experts
        the k that it is sent to); T_eff = (T + 1) / 2, or the mean
        number of visible keys under a window. The backward pass counts twice the forward.
        """
        config = self.config
        visible = sum(min(i + 1, config.window or length) for i in range(length)) / length
        matrices = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):  # a token goes through k of N
                experts = sum(p.numel() for p in module.parameters(recurse=False))
                matrices += experts * module.experts_per_token // module.num_experts
        return 3.0 * (2.0 * matrices + 4.0 * config.num_layers * config.num_heads * config.width_per_head * visible)


def _run(block: nn.Module, x: Tensor, **options: Any) -> Any:
    return block(x, **options)


def _router_loss(routing: list[dict[str, Tensor]], key_mask: Tensor | None, past: int) -> dict[str, Tensor]:
    """The mean load-balancing loss of the layers that route, over the real new tokens."""
    real = None if key_mask is None else key_mask[:, past:]
    losses = [load_balancing_loss(r["router_probs"], r["router_choice"], real) for r in routing if r]
    return {"router_loss": torch.stack(losses).mean()} if losses else {}
