"""Record attention during a forward pass. The output stays bit-equal to a run without recording."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from minitx.analysis.statistics import over_tiles, real_queries, statistic_sums, statistics_of
from minitx.analysis.token_places import PaddingWarner, models_that_count
from minitx.nn.arguments import Arguments
from minitx.nn.attention import MultiHeadAttention, attention_cores
from minitx.nn.bias import TensorBias, as_bias
from minitx.nn.blocks import Block, is_block, is_recomputing
from minitx.nn.functional import AttentionCall
from minitx.nn.masks import Dense, hides_later
from minitx.nn.precision import full_precision
from minitx.nn.transfer import to_device, to_host

Layers = Sequence[int | str] | int | str | None
Indices = Sequence[int] | int | None
"""The types of ``layers`` and ``heads`` in ``capture``. None: all."""

WARNED_BYTES = 2**30
"""``capture`` warns before it records more bytes than this."""


@dataclass(frozen=True)
class ObservedCall:
    """One attention call, the argument of a recorder.

    Attributes:
        call: the arguments of the core. Its tensors belong to the autograd graph, if there is one. A recorder runs without
            gradients.
        kind: ``causal``, ``self`` or ``cross``, see ``CallRecords``.
        real_queries: bool (B, L), False for padded queries.
        heads: int (H',), the heads to record.
    """

    call: AttentionCall
    kind: str
    real_queries: Tensor
    heads: Tensor


Recorder = Callable[[ObservedCall], Any]


def _statistics(look: ObservedCall) -> dict[str, Tensor]:
    sums, heads = to_host((statistic_sums(look.call, look.real_queries), look.heads))
    values = statistics_of(sums, look.call)
    return {name: value[:, heads] if name == "favourite" else value[heads] for name, value in values.items()}


def _attention_weights(look: ObservedCall) -> Tensor:
    return torch.cat([tile.weights[:, look.heads] for tile in over_tiles(look.call)], dim=2)


def _scores(look: ObservedCall) -> Tensor:
    tiles = over_tiles(look.call)
    return torch.cat([t.scores.masked_fill(~t.visible, -torch.inf)[:, look.heads] for t in tiles], dim=2)


def _values(look: ObservedCall) -> Tensor:
    group = look.call.query.shape[1] // look.call.value.shape[1]
    return look.call.value[:, look.heads // group].clone()  # a cache writes into tensors that it returned


RECORDERS: dict[str, Recorder] = {
    "statistics": _statistics,
    "weights": _attention_weights,
    "scores": _scores,
    "values": _values,
}


OUTPUTS = ("heads", "feedforward", "residual")
"""The records that are unchanged outputs of modules."""

FEEDFORWARD = ("mlp", "feed_forward", "ffn", "DenseReluDense", "fc2", "ffn_output", "output.dense")
"""The names of the feed-forward part, or of its last matrix, in the layers of transformers. Other names are not recognised."""


class CallRecords(dict[str, list[Any]]):
    """The records: for each attention core (such as ``blocks.0.attention.core``) a list with one entry per call.

    Attributes:
        kinds: the kind of each core's last call: ``causal``, ``self`` (not causal), or ``cross`` (keys of another sequence).
        what: the kind of record, as in ``capture``; None for your own recorder.
    """

    def __init__(self, names: Sequence[str], what: str | None) -> None:
        super().__init__({name: [] for name in names})
        self.kinds: dict[str, str] = {}
        self.what = what


def capture(
    model: nn.Module, *, layers: Layers = None, heads: Indices = None, what: str = "statistics"
) -> AbstractContextManager[CallRecords]:
    """Record every attention call of ``model`` while the context is open.

    It works for any module that contains our attention, and for a Hugging Face model after ``adopt_hf``. It supports every
    backend, caches, grouped heads, activation checkpointing, DDP and FSDP. A forward pass inside of a backward pass is not
    recorded: it is the recomputation of activation checkpointing. The first four records below are recomputed from the arguments
    of the core, in at least float32. The others are the outputs of modules. Nothing is stored on the modules, no random number is
    drawn, and the hooks are removed at the end.

    =============== ===========================================================================================
    ``statistics``  the result of ``attention_statistics``; never stores L × S values
    ``weights``     (B, H, L, S), after softmax and before dropout; rows sum to 1, with sinks to less
    ``scores``      (B, H, L, S), scaled, soft-capped and with bias, before softmax; -inf where a key is hidden
    ``values``      (B, H, S, Dv), the values as each query head gets them
    ``heads``       (B, H, L, Dv), the output of each head before ``out_proj``
    ``feedforward`` (B, L, E), the output of each block's feed-forward part
    ``residual``    (B, L, E), the residual stream after each block
    =============== ===========================================================================================

    Args:
        layers: the layers to record: one or several numbers, or parts of the names of the recorded modules, such as ``"cross"``.
            All records have the same numbers. Layer 0 is the first in the order of ``named_modules``, layer -1 the
            last. A block is one layer, with all its attention. Elsewhere, modules belong to the same layer if their names are
            equal up to the last number; attention without a number in its name is a separate layer. ``"blocks.1"`` does not
            select ``blocks.10``, and a full name selects only that module. Default: all.
        heads: the heads to record, in this order, or one. Default: all.
        what: one of the names above.

    Returns:
        a context that gives ``CallRecords``, a dict from the module's name to a list with one entry per call.

    Raises:
        ValueError: an unknown ``what``, layer or head, or a model without attention weights. Cores without weights (linear
            attention, Performer, Linformer) are skipped if there are others. RuntimeError: a module is compiled. Hooks that are
            added after compiling never run.

    Warns:
        UserWarning: ``weights`` or ``scores`` will take more than 1 GiB; a Hugging Face model gets padding on the left without
            ``position_ids`` and counts it as tokens (GPT-2); or, at the end, a layer did not run. The hooks do not run if a
            function compiled earlier, such as ``torch.compile(model)``, is called instead of ``model``.

    >>> from minitx.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(6, 2)
    >>> with capture(attention, what="weights", heads=[1]) as seen:
    ...     _ = attention(torch.randn(1, 3, 6), is_causal=True)
    >>> seen["core"][0].shape, seen.kinds["core"]
    (torch.Size([1, 1, 3, 3]), 'causal')
    """
    if what in RECORDERS:
        return watch(model, RECORDERS[what], layers=layers, heads=heads)
    if what in OUTPUTS:
        return _watch_outputs(model, what, layers, heads)
    raise ValueError(f"what={what!r} must be one of {', '.join((*RECORDERS, *OUTPUTS))}")


@contextmanager
def watch(model: nn.Module, recorder: Recorder, *, layers: Layers = None, heads: Indices = None) -> Iterator[CallRecords]:
    """Like ``capture``, with your own recorder: a function that is called with an ``ObservedCall`` at each attention call."""
    cores = chosen_modules(model, "weights", layers)
    what = next((name for name, known in RECORDERS.items() if known is recorder), None)
    decoders = {name: module for name, module in model.named_modules() if _mask_of_queries(type(module))}  # type: ignore[arg-type]
    watcher = _Watcher(CallRecords(list(cores), what), recorder, heads)
    with warning_of_padding(model), before_calls(cores, watcher.enter_core), before_calls(decoders, watcher.enter_model):
        yield watcher.seen
    warn_of_silence(model, watcher.seen)


@contextmanager
def _watch_outputs(model: nn.Module, what: str, layers: Layers, heads: Indices) -> Iterator[CallRecords]:
    modules = chosen_modules(model, what, layers, heads)
    seen = CallRecords(list(modules), what)

    def leave(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_recomputing():
            out = (output[0] if isinstance(output, tuple) else output).detach()
            out = out.unflatten(0, rows[layer_of(name, rows)]) if out.dim() == 2 else out
            seen[name].append(out.clone() if heads is None else out[:, places_of("heads", heads, out.shape[1], out.device)])

    with warning_of_padding(model), rows_of_blocks(model) as rows, ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(Hook(partial(leave, name))))
        yield seen
    warn_of_silence(model, seen)


class Hook:
    """A hook of one module. In a copy of the module it does nothing, because no context would remove it there."""

    def __init__(self, run: Callable[..., Any] = lambda *_: None) -> None:
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


@contextmanager
def before_calls(modules: Mapping[str, nn.Module], enter: Callable[..., None]) -> Iterator[None]:
    """Call ``enter(name, module, args, kwargs)`` before each call of the modules, given by name, while the context is open."""
    with ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(Hook(partial(enter, name)), with_kwargs=True))
        yield


def warning_of_padding(model: nn.Module) -> AbstractContextManager[None]:
    """Warn while the context is open if a model counts padding on the left as tokens."""
    return before_calls(models_that_count(model), PaddingWarner().enter)


@contextmanager
def rows_of_blocks(model: nn.Module) -> Iterator[dict[str, tuple[int, int]]]:
    """Record B and L of each block by name while it runs, because OPT flattens (B, L, E) to (B·L, E) inside of a block.

    The images of Qwen-VL are one row (L, E).
    """
    rows: dict[str, tuple[int, int]] = {}

    def enter(name: str, block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        hidden = stream_of(args, options)
        rows[name] = (hidden.shape[0], hidden.shape[1]) if hidden.dim() > 2 else (1, hidden.shape[0])

    with before_calls(modules_of(model, "residual"), enter):
        yield rows


def stream_of(args: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor:
    """Return the residual stream that a block is called with: its first tensor. The argument has many names in other libraries."""
    return next(value for value in (*args, *options.values()) if isinstance(value, Tensor))


def modules_of(model: nn.Module, what: str) -> dict[str, nn.Module]:
    """Return, by name, the modules that are recorded for ``what``.

    ``residual`` and ``feedforward`` belong to each block (``is_block``), ``heads`` to each attention core: the core of a
    ``MultiHeadAttention``, or a module whose class has the attribute ``softmax_weights``. All other records belong to the cores
    where this attribute is True. A module that is used in several places has one name.
    """
    named = dict(model.named_modules())
    modules = list(named.values())
    if what in ("feedforward", "residual"):
        recorded = [module for module in modules if is_block(module)]
        if what == "feedforward":
            recorded = [part for part in map(_feedforward_of, recorded) if part is not None]
    elif what == "heads":
        recorded = [module.core for module in modules if isinstance(module, MultiHeadAttention)]
        inside = {part for core in recorded for part in core.modules()}  # a core may be wrapped, or contain another core
        recorded += [module for module in modules if _is_core(module) and module not in inside]
    else:
        return attention_cores(model)
    unique = set(recorded)
    return {name: module for name, module in named.items() if module in unique}


def _feedforward_of(block: nn.Module) -> nn.Module | None:
    """The feed-forward part of a block: the one module with a name of ``FEEDFORWARD``, or None."""
    if isinstance(block, Block):
        return block.feedforward
    parts = list[tuple[str, nn.Module]]()
    for name, module in block.named_modules():
        name = re.sub(r"^\w+\.\d+\.", "", name)  # T5: layer.1.DenseReluDense
        if name in FEEDFORWARD and not any(map(_is_core, module.modules())):
            parts.append((name, module))
    if [name for name, _ in parts] == ["ffn", "ffn_output"]:  # ALBERT's two matrices
        parts = parts[1:]
    return parts[0][1] if len(parts) == 1 else None


def _is_core(module: nn.Module) -> bool:
    return hasattr(type(module), "softmax_weights")


@cache
def _mask_of_queries(kind: type[nn.Module]) -> str | None:
    """The argument that gives a module of this class the padding of the queries: our modules, or decoders of torch or transformers."""
    names = Arguments(kind).names
    for name in ("decoder_key_mask", "tgt_key_padding_mask"):
        if name in names:
            return name
    has_other_states = not {"encoder_hidden_states", "cross_attention_states", "image_attention_mask"}.isdisjoint(names)
    return "attention_mask" if has_other_states and {"input_ids", "attention_mask"} <= {*names} else None


def _real_of(kind: type[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The mask of the queries in the arguments of a decoder of this class: False or 0 at padding. None without a mask."""
    name = _mask_of_queries(kind)  # type: ignore[arg-type]  # a class is hashable
    mask = Arguments(kind).of_call(args, kwargs).get(name)  # type: ignore[arg-type]
    if mask is None or name != "tgt_key_padding_mask":
        return mask
    mask = mask.unsqueeze(0) if mask.dim() == 1 else mask
    return ~mask if mask.dtype == torch.bool else mask != -torch.inf  # torch's True and -inf are hidden


def chosen_modules(model: nn.Module, what: str, layers: Layers, heads: Indices = None) -> dict[str, nn.Module]:
    """Return, by name, the modules of ``modules_of`` that ``layers`` selects.

    Raises:
        ValueError: the model has none, ``layers`` selects none, or ``heads`` is given for a record without heads.
        RuntimeError: a part of the model is compiled.
    """
    if heads is not None and what in ("feedforward", "residual"):
        raise ValueError(f"heads={heads} has no effect with what={what!r}, which has no heads")
    modules = modules_of(model, what)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no {_missing(model, what)}")
    refuse_compiled(model)
    return {
        name: modules[name] for name in chosen_names(list(modules), layers, layers_of(model), LACKS.get(what, LACKS["weights"]))
    }


def _missing(model: nn.Module, what: str) -> str:
    """The missing part of ``model``, the reason, and what to do."""
    mark = "Mark the class of the layers whose output is the residual stream with is_block = True"
    other = "it contains no attention of minitx. Call adopt_hf first for a Hugging Face model"
    parts = {"heads": f"attention core: {other}", "residual": f"block. {mark}"}
    parts["feedforward"] = f"block with one feed-forward part, named {', '.join(FEEDFORWARD)}. {mark}"
    if what in parts:
        return parts[what]
    core = next(iter(modules_of(model, "heads").values()), None)
    if core is None:
        return f"attention core with weights: {other}. view and heatmap also draw weights that you already have"
    default = "its weights are not the softmax of scale · q·k; a call with need_weights=True returns them"
    why = getattr(core, "refusals", {}).get("need_weights", default)
    instead = "capture(model, what='heads') records the output of each head; a model with attention='exact' has weights"
    return f"attention core with weights ({type(core).__name__}: {why}). {instead}"


def layers_of(model: nn.Module) -> dict[str, str]:
    """Return, by name, the layer of each block, feed-forward part and attention core, in the order of ``named_modules``."""
    blocks = modules_of(model, "residual")
    recorded = {name for what in ("residual", "feedforward", "heads", "weights") for name in modules_of(model, what)}
    return {name: layer_of(name, blocks) for name, _ in model.named_modules() if name in recorded}


def layer_of(name: str, blocks: Iterable[str] = ()) -> str:
    """Return the layer that a module belongs to: the name up to its last number, or up to the number of its block.

    >>> layer_of("encoder.blocks.1.attention.core"), layer_of("pooling.core")
    ('encoder.blocks.1', 'pooling.core')
    """
    name = next((block for block in blocks if f"{name}.".startswith(f"{block}.".lstrip("."))), name)
    numbered = re.match(r"(.*\.)?\d+(?=\.|$)", name)
    return numbered[0] if numbered else name


def layer_numbers(names: Sequence[str]) -> list[str]:
    """Return the numbers of layers for a figure: the numbers in the names if all differ, else 0, 1, ….

    >>> layer_numbers(["model.layers.3.self_attn.core", "model.layers.7.self_attn.core"]), layer_numbers(["near", "far"])
    (['3', '7'], ['0', '1'])
    """
    matches = [re.search(r"\d+$", layer_of(name)) for name in names]
    numbers = [match[0] for match in matches if match]
    return numbers if len(set(numbers)) == len(names) else [str(i) for i in range(len(names))]


LACKS = {"weights": "attention with weights", "heads": "attention", "feedforward": "one feed-forward part", "residual": "block"}
"""The part that a layer without a record lacks, in words."""


def chosen_names(
    names: Sequence[str], layers: Layers, layer_of_name: Mapping[str, str] | None = None, lacks: str = "record"
) -> list[str]:
    """Return the names that ``layers`` selects, in the order of ``names``. ``layers`` are numbers of layers, or parts of names.

    Args:
        layer_of_name: the layer of each name. Numbers select among its different values, in their order. Default: ``layer_of``.
        lacks: the part that a layer without a name lacks, for the message.

    Raises:
        ValueError: no entry, or one that selects nothing.

    >>> chosen_names(["blocks.0.attention", "blocks.0.cross", "blocks.1.attention", "blocks.10.attention"], [0, "blocks.1"])
    ['blocks.0.attention', 'blocks.0.cross', 'blocks.1.attention']
    >>> chosen_names(["blocks.1.attention", "blocks.11.attention"], "1.attention")
    ['blocks.1.attention']
    """
    if layers is None:
        return list(names)
    places = {name: layer_of(name) for name in names} if layer_of_name is None else layer_of_name
    numbered = list(dict.fromkeys(places.values()))
    available = {places[name] for name in names}
    chosen: set[str] = set()
    for layer in [layers] if isinstance(layers, int | str) else layers:
        if isinstance(layer, str):
            begin = r"(?<!\d)" if layer[:1].isdigit() else ""
            part = re.compile(rf"{begin}{re.escape(layer)}(?!\d)")  # 1 is not 10 or 11
            matching = [layer] if layer in names else [name for name in names if part.search(name)]
            if not matching:
                raise ValueError(f"layers: {layer!r} is none of the {len(names)} layers {', '.join(names)}")
        else:
            known = ", ".join(f"{i} ({place})" for i, place in enumerate(numbered) if place in available)
            if not -len(numbered) <= layer < len(numbered):
                raise ValueError(f"layers: {layer!r} is none of the {len(available)} layers {known}")
            if numbered[layer] not in available:
                raise ValueError(f"layers: layer {layer} ({numbered[layer]}) has no {lacks}; the layers with it are {known}")
            matching = [name for name in names if places[name] == numbered[layer]]
        chosen.update(matching)
    if not chosen:
        raise ValueError(f"layers={layers!r} selects none of the {len(names)} layers {', '.join(names)}")
    return [name for name in names if name in chosen]


def warn_of_silence(model: nn.Module, ran: Mapping[str, Any]) -> None:
    """Warn of layers whose hooks did not run, or that have left the model. ``ran`` maps the name of a module to whether its hook ran."""
    places = layers_of(model)
    active = {places[name] for name, has_run in ran.items() if has_run and name in places}
    if gone := [name for name in ran if name not in places]:
        warnings.warn(
            f"{', '.join(gone)} left the model (release_hf) while the context was open: later calls were not recorded or changed",
            stacklevel=4,
        )
    silent = [name for name in ran if name in places and places[name] not in active]
    if silent:
        warnings.warn(
            f"{', '.join(silent)} did not run while the context was open, so nothing was recorded or changed there. Hooks do not "
            "run in a model that was compiled earlier (torch.compile), nor in a Hugging Face model after set_attn_implementation: "
            "call the plain module inside of the context",
            stacklevel=4,
        )


def refuse_compiled(model: nn.Module) -> None:
    """Raise an error if a module is compiled, because its hooks would not run.

    Raises:
        RuntimeError: a part of ``model`` is compiled. The message names it.
    """
    for name, module in model.named_modules():
        # torch.compile(module) or module.compile(): torch has no public test for them
        if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise RuntimeError(
                f"{name or type(module).__name__} is compiled, and hooks added after compiling never fire: capture the plain module"
            )


def warn_of_calls(seen: Mapping[str, list[Any]], shown: str) -> None:
    """Warn of cores that ran several times, as layers with shared weights do. ``shown`` names the call that is shown."""
    if many := [f"{name} ({len(calls)} times)" for name, calls in seen.items() if len(calls) > 1]:
        warnings.warn(
            f"{', '.join(many)} ran several times, and only the {shown} call is shown: capture records all of them",
            stacklevel=3,
        )


def _is_causal(call: AttentionCall) -> bool:
    """Whether a rule of the call is causal, or a tensor among its masks and biases hides every later position."""
    if call.mask is not None and call.mask.is_causality:
        return True
    masks = [] if call.mask is None else [part.four for part in call.mask.parts() if isinstance(part, Dense)]
    bias = call.attn_bias if call.attn_bias is None else as_bias(call.attn_bias)
    masks += [bias.four != -torch.inf] if isinstance(bias, TensorBias) else []
    return any(mask.shape[-2:] == call.shape[2:] and hides_later(mask) for mask in masks)


class _Watcher:
    """The hooks. The real queries of cross-attention come from the arguments of the decoder."""

    def __init__(self, seen: CallRecords, recorder: Recorder, heads: Indices) -> None:
        self.seen, self.recorder, self.heads = seen, recorder, heads
        self.decoder_key_mask: Tensor | None = None
        self.has_warned = False
        self.num_bytes = 0

    def enter_model(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.decoder_key_mask = _real_of(type(module), args, kwargs)

    @torch.no_grad()
    def enter_core(self, name: str, core: nn.Module, args: tuple[AttentionCall], kwargs: dict[str, Any]) -> None:
        if is_recomputing():  # activation checkpointing runs a block again in the backward pass
            return
        (call,) = args
        kind = "cross" if call.is_cross else "causal" if _is_causal(call) else "self"
        heads = places_of("heads", self.heads, call.query.shape[1], call.query.device)
        look = ObservedCall(call, kind, self._real_queries(call, kind), heads)
        self._warn_of_memory(look)
        with full_precision(call.query.device):
            self.seen[name].append(self.recorder(look))
        self.seen.kinds[name] = kind

    def _real_queries(self, call: AttentionCall, kind: str) -> Tensor:
        """In self-attention the queries are the last L keys, with the same padding. In cross-attention the decoder has a mask."""
        if kind != "cross":
            return real_queries(call)
        B, _, L, _ = call.shape
        mask = self.decoder_key_mask
        if mask is None or mask[:, -L:].shape != (B, L):
            return torch.ones(B, L, dtype=torch.bool, device=call.query.device)
        return mask[:, -L:].to(call.query.device) != 0  # with a cache, the last L positions

    def _warn_of_memory(self, look: ObservedCall) -> None:
        if self.has_warned or self.recorder not in (_attention_weights, _scores):
            return
        B, _, L, S = look.call.shape
        taken = B * len(look.heads) * L * S * torch.promote_types(look.call.query.dtype, torch.float32).itemsize
        self.num_bytes += taken
        needed = max(self.num_bytes, taken * len(self.seen))
        if needed > WARNED_BYTES:
            self.has_warned = True
            size = f"{B} x {len(look.heads)} heads x {L} x {S} values for each of {len(self.seen)} layers"
            fewer = "layers= and heads= select fewer, what='statistics' stores none"
            warnings.warn(f"capture is about to take {needed / 2**30:.1f} GiB: {size}; {fewer}", stacklevel=2)


def places_of(name: str, chosen: Indices, size: int, device: torch.device) -> Tensor:
    """Return the chosen ``heads`` or ``positions`` of ``size`` as indices from 0. None: all."""
    if chosen is None:
        return torch.arange(size, device=device)
    numbers = [chosen] if isinstance(chosen, int) else chosen
    if not len(numbers) or any(isinstance(number, bool) or not -size <= number < size for number in numbers):
        raise ValueError(f"{name}={list(numbers)} must be numbers from 0 to {size - 1}: there are {size} {name}")
    return to_device(torch.tensor([number % size for number in numbers], device="cpu"), device)
