"""Numbers beside the loss of a finished run, asked for in ``evaluation``: longer rows, and what another attention costs."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from statistics import mean
from typing import Any

import torch
from torch import nn

from minitx.analysis.attention_cost import AttentionShape, core_cost
from minitx.config import ConfigError, RunConfig, TransformerConfig
from minitx.data.addressing import Batch
from minitx.data.module import DataModule, build_data
from minitx.nn.attention import MultiHeadAttention
from minitx.nn.functional import AttentionCall, reference_attention
from minitx.nn.masks import Mask, SlidingWindow, intersect
from minitx.nn.modes import evaluating
from minitx.training.calling import network_inputs
from minitx.training.evaluation import evaluate

ROWS_OF_ERROR = 8


def check_measures(config: RunConfig, model: TransformerConfig, data: DataModule) -> None:
    """Refuse before training what could not be measured after it.

    Raises:
        ConfigError: lengths of data whose rows have no ``context_len``, or beyond a table of positions; a bias, sinks or a
            soft-cap on scores that are to be compared with plain ones.
    """
    if config.evaluation.attention_cost:
        extra: list[str] = [model.position] if model.position in ("alibi", "t5") else []
        extra += [name for name in ("sinks", "softcap") if getattr(model, name)]
        if extra or model.architecture == "encoder_decoder":
            what = extra[0] if extra else "cross-attention"
            raise ConfigError(f"evaluation.attention_cost=true compares with plain self-attention, and the model has {what}")
        try:
            core_cost(AttentionShape(model, 1, 2, causal=model.architecture == "decoder", training=False))
        except ValueError as error:
            raise ConfigError(f"evaluation.attention_cost=true: {error}") from None
    longest = max(config.evaluation.lengths, default=0)
    if not longest:
        return
    if data.task.kind != "language_model" or not hasattr(config.data, "context_len"):
        raise ConfigError(
            f"evaluation.lengths={list(config.evaluation.lengths)} needs a language model of text, not {data.task.kind}"
        )
    if model.position in ("learned", "sinusoidal") and longest > model.max_len:
        raise ConfigError(f"evaluation.lengths: {longest} is beyond model.max_len={model.max_len} of position={model.position}")


def measures(network: nn.Module, model: TransformerConfig, data: DataModule, config: RunConfig) -> dict[str, float]:
    """What ``config.evaluation`` asks for, by name; small is good throughout.

    =====================  ======================================================================================
    ``loss_at_N``          for each of ``lengths``: loss in nats a token on validation rows of N tokens; as many tokens for
                           every N as ``num_rows`` rows of training's length have, from the start of the split
    ``attention_error``    ‖core − exact‖_F / ‖exact‖_F of the trained attention, mean over layers, on 8 validation rows
                           (exact softmax attention under the same scale and mask, without a window)
    ``attention_cost``     operations of a core's forward pass over those of the ``math`` backend (``core_cost``)
    =====================  ======================================================================================

    The last two with ``attention_cost: true``. The network is in evaluation mode meanwhile; no random number is drawn.
    """
    found = {}
    for length in config.evaluation.lengths:
        rows = config.evaluation.num_rows
        rows = None if rows is None else max(1, rows * config.data.max_tokens // length)  # type: ignore[operator, union-attr]
        longer, options = _with_rows_of(length, data, config), dataclasses.replace(config.evaluation, num_rows=rows)
        found[f"loss_at_{length}"] = evaluate(network, longer, options).metrics["loss"].value
    if config.evaluation.attention_cost:
        found |= _attention(network, model, data.probe_batch(ROWS_OF_ERROR))
    return found


def _with_rows_of(length: int, data: DataModule, config: RunConfig) -> DataModule:
    longer: Any = dataclasses.replace(config.data, context_len=length)  # type: ignore[type-var]
    rows = config.trainer.val_batch_size
    return build_data(longer, seed=config.seed, max_steps=1, val_batch_size=rows, tokenizer=data.task.tokenizer)


@torch.no_grad()
def _attention(network: nn.Module, model: TransformerConfig, batch: Batch) -> dict[str, float]:
    """Each core is called once more with what it got, and its operations are counted for that shape."""
    calls: list[tuple[nn.Module, AttentionCall]] = []
    device = next(network.parameters()).device
    with evaluating(network):
        with ExitStack() as hooks:
            for module in network.modules():
                if isinstance(module, MultiHeadAttention):
                    hook = module.core.register_forward_pre_hook(lambda core, args: calls.append((core, args[0])))
                    hooks.enter_context(hook)
            network(**{name: tensor.to(device) for name, tensor in network_inputs(batch).items()})
        errors = [_error(core, call) for core, call in calls]
    rows, _, length, _ = calls[0][1].shape
    shape = AttentionShape(model, rows, length, causal=model.architecture == "decoder", training=False)
    exact = dataclasses.replace(model, attention="exact", window=None, backend="math")
    cost = core_cost(shape).forward / core_cost(dataclasses.replace(shape, config=exact)).forward
    return {"attention_error": mean(errors), "attention_cost": cost}


def _error(core: nn.Module, call: AttentionCall) -> float:
    """Of one core beside exact attention, which sees what a window hides."""
    exact = reference_attention(dataclasses.replace(call, mask=_without_window(call.mask)))
    return float((core(call) - exact).norm() / exact.norm())


def _without_window(mask: Mask | None) -> Mask | None:
    """Exact attention is to see what a window drops."""
    return mask and intersect(*(part for part in mask.parts() if not isinstance(part, SlidingWindow)))
