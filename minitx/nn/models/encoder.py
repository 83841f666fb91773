"""An encoder: every token sees every other. BERT's shape by config, with a head for each kind of question."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.feedforward import ACTIVATIONS
from minitx.nn.masks import Mask
from minitx.nn.models.base import TransformerModel, router_loss
from minitx.nn.models.parts import Core, Embeddings
from minitx.nn.norms import make_norm


class Encoder(TransformerModel):
    """Bidirectional Transformer over token ids: logits out, never a loss.

    ``config.head`` says what for: ``lm`` gives (B, L, V), the masked tokens' distributions; ``sequence`` (B, num_labels),
    one answer a row; ``token`` (B, L, num_labels), one a token; ``none`` the hidden states (B, L, E). Devlin et al. 2019,
    "BERT", arXiv:1810.04805, §3.

    Args:
        config: ``vocab_size`` must be set, and ``num_labels`` for ``sequence`` and ``token``.
        core: makes the attention core of a layer, in place of ``config.attention``.
        generator: for the initial weights; default torch's global one.

    Raises:
        ValueError: a missing size; inputs that do not fit.

    >>> options = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2}
    >>> model = Encoder(TransformerConfig(architecture="encoder", head="sequence", num_labels=5, **options))
    >>> model(torch.tensor([[1, 2, 3, 5, 7], [1, 4, 0, 0, 0]]), key_mask=torch.tensor([[True] * 5, [True] * 2 + [False] * 3])).shape
    torch.Size([2, 5])
    """

    def __init__(
        self, config: TransformerConfig, *, core: Core | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(config, Embeddings(config), core=core)
        self.pool = Pool(config) if config.head == "sequence" or config.pooler else None
        self.head = build_head(config, self.embeddings.token)
        self._init_weights(generator)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        *,
        key_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        mask: Tensor | Mask | None = None,
        return_extras: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Logits; the arguments are those of ``DecoderLM.forward``.

        Returns:
            Logits as ``config.head`` says; with ``return_extras`` ``(hidden, extras)`` before ``self.head``: (B, E) of a row
            for ``sequence``, (B, L, E) otherwise. ``extras["pooled"]`` (B, E) is the pooler's answer with ``head=none``.
        """
        options = {"key_mask": key_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        x, shared = self._embed(input_ids, document_ids=document_ids, mask=mask, **options)  # type: ignore[arg-type]
        hidden, routing = self._run(x, shared)
        extras = router_loss(routing, key_mask)
        if self.config.head == "sequence":
            hidden = self.pool(hidden, key_mask)  # type: ignore[misc]
        elif self.pool is not None:
            extras["pooled"] = self.pool(hidden, key_mask)
        return (hidden, extras) if return_extras else self.head(hidden)


class Pool(nn.Module):
    """One vector for a row, (B, L, E) -> (B, E): its first real token or the mean of the real ones, then BERT's tanh layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.dense = nn.Linear(config.embed_dim, config.embed_dim) if config.pooler else None

    def forward(self, hidden: Tensor, key_mask: Tensor | None = None) -> Tensor:
        if self.pooling == "first":
            if key_mask is None:
                pooled = hidden[:, 0]
            else:
                first = key_mask.int().argmax(-1)  # a left-padded row begins later
                pooled = hidden.gather(1, first.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1]))[:, 0]
        elif key_mask is None:
            pooled = hidden.mean(1)
        else:
            real = key_mask.unsqueeze(-1)
            pooled = hidden.masked_fill(~real, 0.0).sum(1) / real.sum(1).clamp(min=1)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))


class MaskedHead(nn.Module):
    """BERT's head for masked tokens: norm(a(W x)), then the vocabulary (Devlin et al. 2019's code, ``cls/predictions``)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.dense = nn.Linear(config.embed_dim, config.embed_dim)
        self.activation = config.activation
        self.norm = make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.head = nn.Linear(config.embed_dim, config.vocab_size, bias=config.head_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(ACTIVATIONS[self.activation](self.dense(hidden))))


def build_head(config: TransformerConfig, token: nn.Embedding | None = None) -> nn.Module:
    """What turns hidden states into logits, as ``config.head`` says; an ``lm`` head may be tied to the ``token`` table.

    Raises:
        ValueError: no ``num_labels`` where the head needs it.
    """
    if config.head == "none":
        return nn.Identity()
    if config.head == "lm":
        assert config.vocab_size is not None and token is not None
        head = MaskedHead(config) if config.head_transform else nn.Linear(config.embed_dim, config.vocab_size, config.head_bias)
        if config.tie_embeddings:
            last = head.head if isinstance(head, MaskedHead) else head
            last.weight = token.weight
        return head
    if config.num_labels is None:
        raise ValueError(f"num_labels=None: head={config.head} needs the number of labels")
    return nn.Linear(config.embed_dim, config.num_labels)
