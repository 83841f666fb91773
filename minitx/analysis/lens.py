"""The logit lens: the logits that a model would give if it ended after an earlier block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis.answers import logits_of
from minitx.analysis.interventions import intervene
from minitx.analysis.recorder import before_calls, capture, modules_of, stream_of
from minitx.analysis.token_places import home_of, with_positions
from minitx.nn.blocks import is_block
from minitx.nn.modes import evaluating


@torch.no_grad()
def logit_lens(model: nn.Module, **inputs: Tensor) -> Tensor:
    """Return the logits that the model would give if it ended after each block: (blocks, B, L, V).

    The output of the last block is replaced by the output of each earlier block, so the final norm and the head are applied to the
    residual stream after each block (nostalgebraist 2020, "interpreting GPT: the logit lens"). A block that is applied several
    times counts each time. Blocks may be nested in other modules. Blocks whose residual stream is not the last block's are left out:
    the encoder of an encoder–decoder, and a separate vision model.

    Raises:
        ValueError: the model has no block, no block runs, or the residual stream changes its shape between blocks; the model has no
            head and therefore returns no logits; or a layer that isn't marked as a block follows the last block.

    >>> from minitx.config import TransformerConfig
    >>> from minitx.nn import DecoderLM
    >>> model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=3, num_layers=2))
    >>> ids = torch.tensor([[1, 2, 3, 5]])
    >>> logits = logit_lens(model, input_ids=ids)
    >>> logits.shape, bool(torch.equal(logits[-1], model(ids)))
    (torch.Size([2, 1, 4, 11]), True)
    """
    inputs = dict(with_positions(model, inputs))
    with evaluating(model):
        with capture(model, what="residual") as seen:
            calls = _block_calls(model, inputs)
        if not calls:
            raise ValueError(f"no block of {type(model).__name__} ran")
        with intervene(model, "residual", lambda x: x.flip(-1)):
            changed = _block_calls(model, inputs)
        # A stream starts at a block whose input does not depend on the outputs of the earlier blocks.
        pairs = zip(calls, changed, strict=True)
        start = max((i for i, ((_, x), (_, y)) in enumerate(pairs) if torch.equal(x, y)), default=0)
        records = {name: iter(of_block) for name, of_block in seen.items()}
        after = [next(records[name]) for name, _ in calls]
        last = calls[-1][0]
        out = []
        _refuse_layers_after(model, last)
        for record in after[start:]:
            with intervene(model, "residual", {last: [*seen[last][:-1], record]}):
                out.append(logits_of(model(**inputs)))
    if not isinstance(out[0], Tensor):
        raise ValueError(f"{type(model).__name__} returns a {type(out[0]).__name__}, not logits: use the model with its head")
    return torch.stack(out)


def _refuse_layers_after(model: nn.Module, last: str) -> None:
    """Raise an error if a layer that isn't a block follows the block ``last`` in its list: the lens would include that layer."""
    path, _, number = last.rpartition(".")
    layers = model.get_submodule(path)
    if isinstance(layers, nn.ModuleList) and not all(map(is_block, layers[int(number) + 1 :])):
        raise ValueError(
            f"a layer of {path} that isn't marked as a block follows the last block, {last}, so the lens would include it: mark its "
            "class with is_block = True"
        )


def _block_calls(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """The name and the input of each block that ``model(**inputs)`` calls, in order, of the innermost model around the last block."""
    calls: list[tuple[str, Tensor]] = []

    def enter(name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((name, stream_of(args, kwargs).clone()))

    with before_calls(modules_of(model, "residual"), enter):
        model(**inputs)
    homes = [home_of(model, name) for name, _ in calls]
    return [call for call, home in zip(calls, homes, strict=True) if home == homes[-1]]
