"""The attention of a model on one batch: the input of the viewer, the head scores and the figures.

A ``Snapshot`` has an ``AttentionMap`` for each layer, the tokens, and the ``Answers`` of the model with their ``AnswerCounts``. ``take_snapshot``
(``snapshot_sources.py``) takes one of a model. The probe of a run writes them to files (``write_snapshot``), and ``read_snapshots`` reads them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minitx.analysis.answers import Answer, Answers
from minitx.analysis.recorder import LACKS, Layers, chosen_names, layer_of
from minitx.crash_safe import replacing

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
class AnswerCounts:
    """Counts of right answers, and of heads that look at the right key, over all rows of a batch.

    Attributes:
        row: the number of the row that is shown. rows: the number of rows.
        asked: the number of questions whose right answer is known. right: the number of right answers to them.
        keyed: the number of questions with a key that holds the answer.
        on_key: by the name of a layer's core, for each head: the number of these questions whose key has the largest weight.
    """

    row: int
    rows: int
    asked: int
    right: int
    keyed: int
    on_key: Mapping[str, Sequence[int]]


def tally_of(maps: Sequence[AttentionMap], answers: Answers | None, row: int) -> AnswerCounts | None:
    """Return the counts over all rows of a snapshot that shows ``row``; None if no right answer is known."""
    if answers is None:
        return None
    questions = [(b, answer) for b, row in enumerate(answers.rows) for answer in row if answer.right is not None]
    keyed = [(b, answer) for b, answer in questions if answer.key is not None]
    on_key = {
        layer.name: [sum(hits) for hits in zip(*(heads_on_key(layer, b, answer) for b, answer in keyed), strict=True)]
        for layer in maps
        if keyed and layer.queries == layer.keys == answers.axis
    }
    right = sum(bool(answer.is_right) for _, answer in questions)
    return AnswerCounts(row, len(answers.rows), len(questions), right, len(keyed), on_key) if questions else None


def heads_on_key(layer: AttentionMap, row: int, answer: Answer) -> list[bool]:
    """For each head, whether the key that holds the answer has the largest weight of the question's row."""
    return [bool(favourite == answer.key) for favourite in layer.weights[row, :, answer.at].argmax(-1)]


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
    tally: AnswerCounts | None = None

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


# --- files


def write_snapshot(snapshot: Snapshot, folder: Path) -> Path:
    """Write a snapshot to ``folder/step_00000100.safetensors``.

    Weights are in float16, logits in float32, masks as bytes, and tokens in the header. Readers never see half a file.
    """
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {f"ids/{axis}": tensor for axis, tensor in snapshot.ids.items()}
    tensors |= {f"real/{axis}": tensor for axis, tensor in snapshot.real.items()}
    for layer in snapshot.maps:
        parts = {"weights": layer.weights.half(), "visible": layer.visible, "max_logit": layer.max_logit.float()}
        tensors |= {f"{part}/{layer.name}": tensor for part, tensor in parts.items()}
    maps = [layer.place() for layer in snapshot.maps]
    header: dict[str, Any] = {"step": snapshot.step, "title": snapshot.title, "tokens": snapshot.tokens, "maps": maps}
    header["layers"] = snapshot.layers
    if snapshot.answers is not None:  # answers without heads are not stored
        header["answers"] = [snapshot.answers.axis, [[asdict(answer) for answer in row] for row in snapshot.answers.rows]]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{snapshot.step or 0:08}.safetensors"
    with replacing(path) as part:
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, part, {"minitx": json.dumps(header, ensure_ascii=False)}
        )
    return path


def read_snapshot(path: Path) -> Snapshot:
    """Read a file that ``write_snapshot`` wrote.

    Raises:
        ValueError: the file is not a snapshot.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            header: dict[str, Any] = json.loads((file.metadata() or {})["minitx"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, KeyError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a snapshot of attention: {error}") from None
    maps = []
    for place in header["maps"]:
        weights, visible, max_logit = (tensors[f"{part}/{place['name']}"] for part in ("weights", "visible", "max_logit"))
        maps.append(AttentionMap(**place, weights=weights.float(), visible=visible, max_logit=max_logit))
    ids, real = (
        {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}
        for kind in ("ids/", "real/")
    )
    answers = None
    if "answers" in header:
        axis, rows = header["answers"]
        answers = Answers(axis, [[Answer(**{**each, "top": tuple(map(tuple, each["top"]))}) for each in row] for row in rows])
    layers = tuple(header.get("layers", ()))
    return Snapshot(tuple(maps), header["tokens"], ids, real, header["step"], header["title"], answers, layers)


def read_snapshots(folder: Path | str) -> list[Snapshot]:
    """Read all snapshots of a run, in the order of their steps. ``folder`` is the run's folder or its ``attention/``.

    Raises:
        ValueError: the folder has no snapshots, or a file is not a snapshot.

    >>> import torch
    >>> from tempfile import TemporaryDirectory
    >>> from minitx.analysis import take_snapshot
    >>> from minitx.nn import MultiHeadAttention
    >>> snapshot = take_snapshot(MultiHeadAttention(6, 2), {"query": torch.randn(1, 3, 6)}, step=50)
    >>> with TemporaryDirectory() as run:
    ...     path = write_snapshot(snapshot, Path(run) / "attention")
    ...     [again] = read_snapshots(Path(run))
    >>> path.name, again.step
    ('step_00000050.safetensors', 50)
    """
    folder = Path(folder)
    paths = sorted(folder.glob("step_*.safetensors")) or sorted((folder / "attention").glob("step_*.safetensors"))
    if not paths:
        raise ValueError(f"{folder} has no snapshots of attention: train with callbacks.probe.weights_every=N")
    return sorted(map(read_snapshot, paths), key=lambda snapshot: snapshot.step or 0)
