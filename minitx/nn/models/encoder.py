"""A bidirectional encoder, such as BERT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn.feedforward import ACTIVATIONS
from minitx.nn.masks import Mask
from minitx.nn.models.base import TransformerModel
from minitx.nn.models.parts import Core, Embeddings
from minitx.nn.norms import make_norm


class Encoder(TransformerModel):
    """A bidirectional Transformer: each token sees all others (Devlin et al. 2019, "BERT", arXiv:1810.04805, §3).

    ``config.head`` decides what the model returns:

    * ``lm``: logits over the vocabulary for masked language modelling, (B, L, V);
    * ``sequence``: logits over labels for each row, (B, num_labels);
    * ``token``: logits over labels for each token, (B, L, num_labels);
    * ``none``: hidden states, (B, L, E).

    Args:
        config: the model's config. ``vocab_size`` must be set, and ``num_labels`` for ``sequence`` and ``token``.
        core: a function that builds the attention core of a layer, instead of ``config.attention``.
        generator: for the initial weights. Default: torch's global generator.

    Raises:
        ValueError: ``vocab_size`` or ``num_labels`` is missing, or ``architecture`` is another.

    >>> options = {"vocab_size": 11, "embed_dim": 12, "num_heads": 3, "num_layers": 2}
    >>> model = Encoder(TransformerConfig(architecture="encoder", head="sequence", num_labels=5, **options))
    >>> model(torch.tensor([[1, 2, 3, 5, 7], [1, 4, 0, 0, 0]]), key_mask=torch.tensor([[True] * 5, [True] * 2 + [False] * 3])).shape
    torch.Size([2, 5])
    """

    architecture = "encoder"

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
        return_hidden: bool = False,
    ) -> Tensor:
        """Return the logits of ``config.head``. The arguments are those of ``DecoderLM.forward``.

        With ``return_hidden``, return the input of ``self.head``: (B, E) for ``head=sequence``, else (B, L, E). With ``head=none``
        and a pooler, ``model.pool(hidden, key_mask)`` (B, E) is the pooled vector.
        """
        options = {"key_mask": key_mask, "token_type_ids": token_type_ids, "position_ids": position_ids}
        x, shared = self._embed(input_ids, document_ids=document_ids, mask=mask, **options)  # type: ignore[arg-type]
        hidden = self._run(x, shared)
        if self.config.head == "sequence":
            hidden = self.pool(hidden, key_mask)  # type: ignore[misc]
        return hidden if return_hidden else self.head(hidden)


class Pool(nn.Module):
    """Pool (B, L, E) to (B, E): take the first real token or the mean of the real tokens, then apply BERT's tanh layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.pooling = config.pooling
        # the mean of an image is that of its patches
        self.start = config.num_class_tokens if config.architecture == "vision" and config.pooling == "mean" else 0
        self.dense = nn.Linear(config.embed_dim, config.embed_dim) if config.pooler else None

    def forward(self, hidden: Tensor, key_mask: Tensor | None = None) -> Tensor:
        hidden = hidden[:, self.start :]
        if self.pooling == "first":
            if key_mask is None:
                pooled = hidden[:, 0]
            else:
                first = key_mask.int().argmax(-1)  # not 0 in a left-padded row
                pooled = hidden.gather(1, first.view(-1, 1, 1).expand(-1, 1, hidden.shape[-1]))[:, 0]
        elif key_mask is None:
            pooled = hidden.mean(1)
        else:
            real = key_mask.unsqueeze(-1)
            pooled = hidden.masked_fill(~real, 0.0).sum(1) / real.sum(1).clamp(min=1)
        return pooled if self.dense is None else torch.tanh(self.dense(pooled))


class MaskedHead(nn.Module):
    """BERT's head for masked tokens: norm(a(W x)), then a linear layer to V (``cls/predictions`` in the authors' code)."""

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
    """Build the head of ``config.head``. An ``lm`` head may be tied to the ``token`` table.

    Raises:
        ValueError: the head needs ``num_labels``, which is missing.
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
