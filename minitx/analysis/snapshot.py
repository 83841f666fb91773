"""The attention of a model on one batch: the input of the viewer, the head scores and the figures.

``take_snapshot`` (``snapshot_sources.py``) takes a snapshot of a model. ``read_snapshots`` (``snapshot_files.py``) reads the snapshots
that the probe wrote to a run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch
from torch import Tensor

from minitx.analysis.answers import Answers
from minitx.analysis.recorder import LACKS, Layers, chosen_names, layer_of
from minitx.analysis.tally import Tally, tally_of

SOURCE, TARGET, PIXELS = "input_ids", "decoder_input_ids", "pixel_values"
MASKS_OF = {SOURCE: ("key_mask", "attention_mask"), TARGET: ("decoder_key_mask", "decoder_attention_mask")}


@dataclass(frozen=True)
class AttentionMap:
    """One layer's attention.

    Attributes:
        name: the name of the core, such as ``blocks.0.attention.core``. kind: ``causal``, ``self`` or ``cross``.
        queries, keys: the tokens on the two axes, as keys of ``Snapshot.tokens``.
        weights: (B, H, L, S), before dropout. visible: bool (B, H, L, S), True = may attend.
        max_logit: (B, H, L), the largest |z| among a row's visible scores.

    >>> weights, visible = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]]), torch.ones(2, 2).tril().bool()[None, None]
    >>> layer = AttentionMap("core", "causal", "query", "query", weights, visible, torch.zeros(1, 1, 2))
    >>> layer.entropy().tolist()  # the first row has no choice, the second chooses nothing
    [[[nan, 1.0]]]
    """

    name: str
    kind: str
    queries: str
    keys: str
    weights: Tensor
    visible: Tensor
    max_logit: Tensor

    def place(self) -> dict[str, str]:
        """Return the name, the kind and the axes of the layer as plain data."""
        return {name: getattr(self, name) for name in ("name", "kind", "queries", "keys")}

    def entropy(self) -> Tensor:
        """Return H̄ = -Σ p ln p / ln n of every row with n visible keys: (B, H, L). NaN if n < 2."""
        count = self.visible.sum(-1).double()
        return (torch.special.entr(self.weights.double()).sum(-1) / count.log()).masked_fill(count < 2, torch.nan)


@dataclass(frozen=True)
class Snapshot:
    """The attention of all layers on one batch.

    Attributes:
        maps: one for each layer, in the model's order.
        tokens: the text of each token, for each axis (``input_ids``, ``decoder_input_ids``, ``pixel_values``, or the first
            argument of a model of your own) and each row of the batch.
        ids: int (B, n) for each axis, but not for images. real: bool (B, n) for each axis, False at padding.
        step: the training step, or None. title: a title for the viewer and the figures.
        answers: the model's answers, or None.
        layers: the names of all layers of the model, with and without a map. A layer's place in this list is its number.
        tally: for a row that was cut out of a batch (``sentence``), the counts over all rows of the batch, or None.

    >>> from minitx.analysis import take_snapshot
    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import Encoder
    >>> model = Encoder(TransformerConfig(architecture="encoder", vocab_size=11, embed_dim=12, num_heads=3, num_layers=1))
    >>> real = torch.tensor([[True, True, True], [True, True, False]])
    >>> snapshot = take_snapshot(model, {"input_ids": torch.tensor([[1, 2, 3], [5, 7, 0]]), "key_mask": real})
    >>> snapshot.num_rows, snapshot.sentence(1).maps[0].weights.shape
    (2, torch.Size([1, 3, 2, 2]))
    """

    maps: tuple[AttentionMap, ...]
    tokens: Mapping[str, Sequence[Sequence[str]]]
    ids: Mapping[str, Tensor]
    real: Mapping[str, Tensor]
    step: int | None = None
    title: str = ""
    answers: Answers | None = None
    layers: tuple[str, ...] = ()
    tally: Tally | None = None

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis} {self.num_rows} x {len(rows[0])}" for axis, rows in self.tokens.items())
        return f"Snapshot({len(self.maps)} maps, {sizes}, step={self.step})"

    @property
    def num_rows(self) -> int:
        """B."""
        return self.maps[0].weights.shape[0]

    def chosen(self, layers: Layers) -> list[str]:
        """Return the names of the maps that ``layers`` selects, with numbers and errors as in ``capture``.

        >>> from minitx.analysis.snapshot_sources import snapshot_of_weights
        >>> snapshot_of_weights([torch.eye(2), torch.eye(2)]).chosen(-1)
        ['1']
        """
        names = [layer.name for layer in self.maps]
        places = {layer: layer for layer in self.layers} | {name: layer_of(name, self.layers) for name in names}
        return chosen_names(names, layers, places, LACKS["weights"])

    def sentence(self, row: int) -> Snapshot:
        """Return one row of the batch without its padding (B = 1), with the tally of all rows.

        Raises:
            ValueError: the row does not exist, or the layers read different tokens (Swin).
        """
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row={row} must be one of the rows 0 to {self.num_rows - 1} of the batch")
        real = {axis: mask[row] for axis, mask in self.real.items()}
        maps = []
        for layer in self.maps:
            q, k = real[layer.queries], real[layer.keys]
            (B, _, *sizes) = layer.weights.shape
            if (B, sizes) != (self.num_rows, [len(q), len(k)]):
                raise ValueError(
                    f"{layer.name} has {B} rows of {sizes[0]} queries and {sizes[1]} keys, and {layer.queries} has {self.num_rows} of "
                    f"{len(q)}: take a separate snapshot of layers that read other tokens (layers=)"
                )
            cut = {name: getattr(layer, name)[row : row + 1][:, :, q][..., k] for name in ("weights", "visible")}
            maps.append(replace(layer, **cut, max_logit=layer.max_logit[row : row + 1][:, :, q]))
        tokens = {axis: [list(compress(rows[row], real[axis].tolist()))] for axis, rows in self.tokens.items()}
        ids = {axis: tensor[row : row + 1, real[axis]] for axis, tensor in self.ids.items()}
        answers = self.answers and self.answers.of_row(row, real[self.answers.axis].tolist())
        all_real = {axis: mask[mask].unsqueeze(0) for axis, mask in real.items()}
        tally = self.tally if self.num_rows == 1 else tally_of(self, row)
        return replace(self, maps=tuple(maps), tokens=tokens, ids=ids, real=all_real, answers=answers, tally=tally)
