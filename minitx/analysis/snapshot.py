"""The attention of a model on one batch: the input of the viewer, the head scores and the figures.

``take_snapshot`` takes a snapshot of a model. ``read_snapshots`` reads the snapshots that the probe wrote to a run's folder.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis.answers import Answer, Answers, Asked, read_answers
from minitx.analysis.recorder import (
    LACKS,
    Layers,
    Look,
    before_calls,
    chosen_modules,
    chosen_names,
    layer_of,
    layers_of,
    warn_of_calls,
    watch,
)
from minitx.analysis.statistics import over_tiles
from minitx.analysis.token_places import home_of, with_positions
from minitx.config.schema import stated
from minitx.crash_safe import replacing
from minitx.nn.arguments import Arguments
from minitx.nn.attention import MultiHeadAttention
from minitx.nn.blocks import Block
from minitx.nn.core import EfficientAttention
from minitx.nn.functional import AttentionCall
from minitx.nn.modes import evaluating
from minitx.nn.precision import full_precision
from minitx.nn.transfer import to_host

SOURCE, TARGET, PIXELS = "input_ids", "decoder_input_ids", "pixel_values"
WEIGHT_TOLERANCE = 1e-2
"""The largest distance of weights of 8 or 16 bits from the range 0 to 1."""
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
class Tally:
    """Counts of right answers, and of heads that look at the right key, over all rows of a batch.

    Attributes:
        row: the number of the row that is shown. rows: the number of rows.
        asked: the number of questions whose right answer is known. right: the number of right answers to them.
        keyed: the number of questions with a key that holds the answer.
        on_key: by the name of a layer's core, for each head: the number of these questions in which the key has the largest weight.
    """

    row: int
    rows: int
    asked: int
    right: int
    keyed: int
    on_key: Mapping[str, Sequence[int]]


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
        tally = self.tally if self.num_rows == 1 else self._tally(row)
        return replace(self, maps=tuple(maps), tokens=tokens, ids=ids, real=all_real, answers=answers, tally=tally)

    def _tally(self, row: int) -> Tally | None:
        """Count answers and favourite keys over all rows; None if no right answer is known."""
        if self.answers is None:
            return None
        questions = [(b, answer) for b, row in enumerate(self.answers.rows) for answer in row if answer.right is not None]
        keyed = [(b, answer) for b, answer in questions if answer.key is not None]
        on_key = {
            layer.name: [sum(hits) for hits in zip(*(_heads_on_key(layer, b, answer) for b, answer in keyed), strict=True)]
            for layer in self.maps
            if keyed and layer.queries == layer.keys == self.answers.axis
        }
        right = sum(bool(answer.is_right) for _, answer in questions)
        return Tally(row, self.num_rows, len(questions), right, len(keyed), on_key) if questions else None


def _heads_on_key(layer: AttentionMap, row: int, answer: Answer) -> list[bool]:
    """For each head, whether the key that holds the answer has the largest weight of the question's row."""
    return [bool(favourite == answer.key) for favourite in layer.weights[row, :, answer.at].argmax(-1)]


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
        has_key = known[-1].key is not None and any(any(_heads_on_key(layer, row, known[-1])) for layer in maps)
        ends.append((bool(known[-1].is_right), has_key))
    return ends


@torch.no_grad()
def take_snapshot(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    *,
    tokens: Mapping[str, Sequence[Sequence[str]]] | None = None,
    layers: Layers = None,
    asked: Asked | None = None,
    step: int | None = None,
    title: str = "",
) -> Snapshot:
    """Run ``model(**inputs)`` and return the attention of each layer, in at least float32, on the CPU.

    The model runs in evaluation mode and without autocast.

    Args:
        inputs: the arguments of the model by name (``input_ids``, ``key_mask``, ``decoder_input_ids`` …), or a tensor, its
            first argument. Ids (L,) are one row. A Hugging Face model that would count padding on the left as tokens (GPT-2) gets
            ``position_ids`` from ``attention_mask``.
        tokens: the texts of the tokens, see ``Snapshot``. Default: the ids as numbers; for images, the number of each token, or
            ``row,column`` for patches if the config has a ``patch_size`` and changing some patches changes the tokens at these places.
        layers: as in ``capture``.
        asked: questions. The snapshot keeps the answers if the model's output has logits for them (see ``read_answers``).
        step: the training step.
        title: a title for the viewer and the figures.

    Raises:
        ValueError, RuntimeError: as in ``capture``; texts that do not fit the ids; or no attention ran.

    Warns:
        UserWarning: a core ran several times (ALBERT, universal Transformers). The snapshot has the last call. Or a part of a Hugging
            Face model reads other tokens than the ids (the images of LLaVA). The snapshot leaves it out.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> snapshot = take_snapshot(model, torch.tensor([1, 2, 3, 5]))
    >>> snapshot.maps[1].weights.shape, snapshot.tokens["input_ids"]
    (torch.Size([1, 3, 4, 4]), [['1', '2', '3', '5']])
    """
    inputs = with_positions(model, named_inputs(model, inputs))
    device = next(iter(inputs.values())).device
    with evaluating(model), watch(model, _look, layers=layers) as seen, full_precision(device):
        output = model(**inputs)
    source = next((axis for axis in (SOURCE, PIXELS) if axis in inputs), next(iter(inputs)))
    ran = {name: records for name, records in seen.items() if records}
    others = [name for name in ran if source == SOURCE and not _takes_ids(model, home_of(model, name))]
    shown = {name: records for name, records in ran.items() if name not in others}
    warn_of_calls(shown, "last")
    maps = []
    padding = dict[str, Tensor]()
    other_axis = PIXELS if PIXELS in inputs and TARGET not in inputs else source
    for name, records in shown.items():
        kind = seen.kinds[name]
        queries = TARGET if TARGET in inputs and kind != "self" else source
        keys = queries if kind != "cross" else "key" if "key" in inputs else other_axis
        weights, visible, max_logit, real_queries = to_host(records[-1])
        maps.append(AttentionMap(name, kind, queries, keys, weights, visible, max_logit))
        if kind != "cross":
            padding[queries] = real_queries
    if not maps:
        raise ValueError(f"no attention core of {type(model).__name__} ran{f' that reads {SOURCE}' if others else ''}")
    if others:
        warnings.warn(
            f"{', '.join(others)} read other tokens than {SOURCE}, such as images, and are left out: capture records them",
            stacklevel=2,
        )
    patches = list[str]()
    if PIXELS in (source, other_axis) and PIXELS not in (tokens or {}):
        with evaluating(model), full_precision(device):
            patches = _places_of_patches(model, inputs)
    snapshot = replace(_assembled(maps, inputs, padding, tokens or {}, patches), step=step, title=title)
    snapshot = replace(snapshot, layers=tuple(dict.fromkeys(layers_of(model).values())))
    if asked is None or asked.axis not in snapshot.tokens or (rows := read_answers(output, asked)) is None:
        return snapshot
    return replace(snapshot, answers=Answers(asked.axis, rows))


def _takes_ids(model: nn.Module, home: str) -> bool:
    """Whether the part ``home`` of a model reads ids, as the whole model does."""
    return not home or SOURCE in Arguments(model.get_submodule(home)).names


def _assembled(
    maps: Sequence[AttentionMap],
    inputs: Mapping[str, Tensor],
    padding: Mapping[str, Tensor],
    tokens: Mapping[str, Sequence[Sequence[str]]],
    patches: Sequence[str] = (),
) -> Snapshot:
    """Add ids, texts and padding to the maps. A mask in ``inputs`` replaces the ``padding`` of its axis.

    ``patches`` are the names of the tokens of an image, if they are known.
    """
    sizes = {axis: size for m in maps for axis, size in ((m.queries, m.weights.shape[2]), (m.keys, m.weights.shape[3]))}
    B = maps[0].weights.shape[0]
    everything = {axis: torch.ones(B, size, dtype=torch.bool) for axis, size in sizes.items()}
    masks = {axis: inputs[name] for axis, names in MASKS_OF.items() for name in names if isinstance(inputs.get(name), Tensor)}
    fitting = {axis: masks[axis] != 0 for axis, real in everything.items() if axis in masks and masks[axis].shape == real.shape}
    ids = {axis: inputs[axis].clone() for axis in sizes if axis in inputs and not inputs[axis].is_floating_point()}
    real, ids = to_host(({**everything, **padding, **fitting}, ids))
    if not isinstance(tokens, Mapping):
        raise ValueError(
            f'tokens must be a dict with the texts of each axis and row, such as {{"{maps[0].queries}": [["the", "cat"]]}}'
        )
    if unknown := set(tokens) - set(sizes):
        raise ValueError(f"tokens={sorted(unknown)} must be among {', '.join(sizes)}, the inputs of the model")
    if len(patches) == sizes.get(PIXELS):
        tokens = {**tokens, PIXELS: [patches] * B}
    texts = {axis: _texts(axis, size, B, ids, tokens) for axis, size in sizes.items()}
    return Snapshot(tuple(maps), texts, ids, real)


def named_inputs(model: nn.Module, inputs: Tensor | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``inputs`` by name. A tensor is the first argument of ``model``; ids (L,) and, for a layer, x (L, E) are one row.

    Raises:
        ValueError: ``model`` is the core of a layer (a core does not take a tensor), or ``inputs`` is neither a tensor nor a dict.
    """
    if not isinstance(inputs, Tensor):
        if not isinstance(inputs, Mapping):
            raise ValueError(f"inputs must be a tensor, such as ids (B, L), or a dict of tensors, got {type(inputs).__name__}")
        return inputs
    if hasattr(type(model), "softmax_weights") or isinstance(model, EfficientAttention):
        raise ValueError(
            f"{type(model).__name__} is the core of an attention layer and takes no x: pass the layer that contains it"
        )
    first, *_ = *Arguments(model).ordered, SOURCE  # wrappers such as PEFT's take *args
    is_row = inputs.dim() == (2 if isinstance(model, MultiHeadAttention | Block) else 1)
    return {first: inputs.unsqueeze(0) if is_row else inputs}


def as_weights(numbers: Any) -> Tensor:
    """Return attention weights as a float32 tensor on the CPU. ``numbers`` is a tensor, an array, or nested lists.

    Raises:
        ValueError: no numbers, or numbers outside of 0 to 1, such as scores before softmax.

    >>> as_weights([[1, 0], [0.5, 0.5]])
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    try:
        weights = torch.as_tensor(numbers).detach().cpu().float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"weights must be numbers in a tensor, an array or nested lists of equal length: {error}") from None
    low, high = (float(edge(weights.nan_to_num())) if weights.numel() else 0.0 for edge in (torch.min, torch.max))
    if low < -WEIGHT_TOLERANCE or high > 1 + WEIGHT_TOLERANCE:
        raise ValueError(f"weights must lie between 0 and 1, got {low:.3g} to {high:.3g}: apply softmax(-1) to scores first")
    return weights


def snapshot_of_weights(weights: Sequence[Any], tokens: Mapping[str, Sequence[Sequence[str]]] | None = None) -> Snapshot:
    """Return a snapshot of weights that were computed elsewhere. A weight of 0 counts as hidden. The scores are unknown (NaN).

    Args:
        weights: (B, H, L, S), (H, L, S) or (L, S) for each layer, in a form that ``as_weights`` takes.
        tokens: the texts of the axes ``query`` and ``key``. If L = S, both axes are ``query``.

    Raises:
        ValueError: as in ``as_weights``; another shape; lengths that differ between layers; texts that do not fit.

    >>> snapshot_of_weights([torch.tensor([[1.0, 0.0], [0.5, 0.5]])]).maps[0].kind
    'causal'
    """
    maps = []
    for i, matrix in enumerate(map(as_weights, weights)):
        if not 2 <= matrix.dim() <= 4 or not matrix.numel():
            raise ValueError(f"weights must be (B, H, L, S), (H, L, S) or (L, S), got {tuple(matrix.shape)}")
        layer = matrix[(None,) * (4 - matrix.dim())]
        L, S = layer.shape[2:]
        kind = "cross" if L != S else "causal" if not layer.triu(1).any() else "self"
        keys = "key" if kind == "cross" else "query"
        maps.append(AttentionMap(str(i), kind, "query", keys, layer, layer != 0, torch.full(layer.shape[:3], torch.nan)))
    if len(sizes := {(m.weights.shape[0], *m.weights.shape[2:]) for m in maps}) != 1:
        raise ValueError(f"weights must have the same (B, L, S) in each layer, got {sorted(sizes)}")
    return _assembled(maps, {}, {}, tokens or {})


def _look(look: Look) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weights (B, H, L, S), visible (B, H, L, S), largest |z| of each row (B, H, L), real queries (B, L)."""
    parts = [
        (tile.weights, tile.visible.expand_as(tile.weights), tile.scores.abs().masked_fill(~tile.visible, 0.0).amax(-1))
        for tile in over_tiles(look.call)
    ]
    weights, visible, max_logit = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    return weights, visible, max_logit, look.real_queries


def _texts(
    axis: str, size: int, B: int, ids: Mapping[str, Tensor], tokens: Mapping[str, Sequence[Sequence[str]]]
) -> list[list[str]]:
    if axis in tokens:
        rows = [list(row) for row in tokens[axis]]
        if [len(row) for row in rows] != [size] * B:
            raise ValueError(f"tokens[{axis!r}] must have {B} rows of {size} texts, got {[len(row) for row in rows]}")
        return rows
    if axis in ids:
        return [[str(number) for number in row] for row in ids[axis].tolist()]
    return [[str(i) for i in range(size)]] * B


def _places_of_patches(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
    """Return the names of the tokens of an image, or [] if it is not known which tokens are which patches.

    The config has the size of a patch. Three patches are changed to find out whether the last tokens are the patches, row by row.
    """
    pixels = inputs[PIXELS]
    configs: list[Any] = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), "patch_size")]
    side = configs[0].patch_size if configs else None
    if side is None or pixels.dim() != 4:
        return []
    height, width = side if isinstance(side, Sequence) else (side, side)
    rows, columns = pixels.shape[2] // height, pixels.shape[3] // width
    corners = [(0, 0), (0, columns - 1), (rows - 1, columns - 1)]
    changed = pixels.clone()
    for row, column in corners:
        patch = changed[:, :, row * height : (row + 1) * height, column * width : (column + 1) * width]
        patch.copy_(patch.cumsum(-1) + 1)  # not a constant, which a norm may remove
    queries = list[Tensor]()  # of the first attention, before and after the change
    for images in (pixels, changed):
        calls = list[AttentionCall]()
        with before_calls(chosen_modules(model, "heads", None), lambda name, core, args, options: calls.append(args[0])):  # noqa: B023
            model(**{**inputs, PIXELS: images})
        queries.append(calls[0].query)
    B, _, size, _ = queries[0].shape
    first = size - rows * columns
    change = (queries[0] - queries[1]).abs().amax((0, 1, 3))
    moved = (change > change.max() / 20).nonzero().flatten().tolist()  # quantisation moves all tokens a little
    if len(pixels) != B or moved != sorted({first + row * columns + column for row, column in corners}):
        return []
    registers = stated(configs[0], "num_register_tokens") or 0
    special = [*["cls"] * (first > registers), *(f"register {i}" for i in range(registers))]
    names = special if len(special) == first else [str(i) for i in range(first)]
    return [*names, *(f"{row},{column}" for row in range(rows) for column in range(columns))]


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

    >>> from tempfile import TemporaryDirectory
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
