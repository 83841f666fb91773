"""Snapshots of a model on a batch, and of weights that were computed elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis.answers import Answers, Questions, read_answers
from minitx.analysis.recorder import Layers, ObservedCall, before_calls, chosen_modules, layers_of, warn_of_calls, watch
from minitx.analysis.snapshot import MASKS_OF, PIXELS, SOURCE, TARGET, AttentionMap, Snapshot
from minitx.analysis.statistics import over_tiles
from minitx.analysis.token_places import home_of, with_positions
from minitx.config.schema import stated
from minitx.nn.arguments import Arguments
from minitx.nn.attention import MultiHeadAttention
from minitx.nn.blocks import Block
from minitx.nn.core_bases import EfficientAttention
from minitx.nn.functional import AttentionCall
from minitx.nn.modes import evaluating
from minitx.nn.precision import full_precision
from minitx.nn.transfer import to_host

WEIGHT_TOLERANCE = 1e-2
"""The largest distance of weights of 8 or 16 bits from the range 0 to 1."""


@torch.no_grad()
def take_snapshot(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    *,
    tokens: Mapping[str, Sequence[Sequence[str]]] | None = None,
    layers: Layers = None,
    asked: Questions | None = None,
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
            patches = places_of_patches(model, inputs)
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


def _look(look: ObservedCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


def places_of_patches(model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
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
