"""The attention of a model on one batch: the input of the viewer, the head scores and the figures.

``take_snapshot`` (``snapshot_sources.py``) takes a snapshot of a model. ``read_snapshots`` (``saved_snapshots.py``) reads the snapshots
that the probe wrote to a run's folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

from torch import Tensor

from minitx.analysis.answers import Answers
from minitx.analysis.attention_map import AttentionMap
from minitx.analysis.recorder import LACKS, Layers, chosen_names, layer_of
from minitx.analysis.tally import Tally, heads_on_key, tally_of

SOURCE, TARGET, PIXELS = "input_ids", "decoder_input_ids", "pixel_values"
MASKS_OF = {SOURCE: ("key_mask", "attention_mask"), TARGET: ("decoder_key_mask", "decoder_attention_mask")}


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

    >>> import torch
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

        >>> import torch
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
        tally = self.tally if self.num_rows == 1 else tally_of(self.maps, self.answers, row)
        return replace(self, maps=tuple(maps), tokens=tokens, ids=ids, real=all_real, answers=answers, tally=tally)


def typical_row(runs: Sequence[Sequence[Snapshot]]) -> int | None:
    """Return the first row that ends like most rows in every run, or None if there is none.

    The end of a row is whether the answer to its last question is right at the last step, and whether a head's largest weight lies on
    the key that holds the answer, if there is such a key.

    Args:
        runs: the snapshots of each run, of the same rows.
    """
    ends = [_ends(snapshots[-1]) for snapshots in runs if snapshots[-1].answers is not None]
    usual = [Counter(of_rows).most_common(1)[0][0] for of_rows in ends]
    rows = range(min(map(len, ends), default=0))
    return next((row for row in rows if all(of_rows[row] == most for of_rows, most in zip(ends, usual, strict=True))), None)


def _ends(snapshot: Snapshot) -> list[tuple[bool, bool] | None]:
    """For each row, whether the answer to its last question is right, and whether a head found the key."""
    assert snapshot.answers is not None
    ends: list[tuple[bool, bool] | None] = []
    for row, answers in enumerate(snapshot.answers.rows):
        known = [answer for answer in answers if answer.right is not None]
        if not known:
            ends.append(None)
            continue
        maps = [layer for layer in snapshot.maps if layer.queries == layer.keys == snapshot.answers.axis]
        has_key = known[-1].key is not None and any(any(heads_on_key(layer, row, known[-1])) for layer in maps)
        ends.append((bool(known[-1].is_right), has_key))
    return ends
