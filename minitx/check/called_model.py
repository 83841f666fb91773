"""Call any model: find its inputs by the names of its arguments, draw random tokens, write its mask, and read its output."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minitx.check.copying import copied

NUM_ROWS = 3
LENGTHS = (12, 16, 32, 64, 128, 8, 5, 10, 7, 9, 6, 4, 3, 2)
"""Numbers of tokens to try, in this order: some models need whole blocks, some read only a few."""

IDS = ("input_ids", "idx", "ids", "tokens", "token_ids", "inputs", "x", "src", "input", "xb")
TARGET_IDS = ("decoder_input_ids", "tgt", "target_ids", "tgt_ids", "decoder_ids")
PIXELS = ("pixel_values", "images", "image", "img", "imgs", "pixels")
MASK_NAMES = [
    "attention_mask",
    "key_mask",
    "padding_mask",
    "src_key_padding_mask",
    "key_padding_mask",
    "pad_mask",
    "src_mask",
    "mask",
]
TARGET_MASKS = ("decoder_attention_mask", "decoder_key_mask", "tgt_key_padding_mask", "tgt_mask")
CACHES = ("past_key_values", "cache", "cache_params", "kv_cache", "past_kv", "past", "state", "hidden")
LIMITS = ("max_position_embeddings", "n_positions", "block_size", "max_len", "max_seq_len", "context_length", "max_length")
PICTURES = ((3, 32), (1, 28), (3, 16), (3, 64), (1, 16), (1, 32), (3, 8), (1, 8), (3, 224))
OUTPUT_NAMES = ("logits", "prediction_logits", "last_hidden_state", "pooler_output")


class CannotBeCalledError(ValueError):
    """No way to call the model was found. The message lists the faults."""


@dataclass(frozen=True)
class StreamMask:
    """The dtype, meaning and shape of a stream's mask.

    Attributes:
        hides: whether True means that a token is hidden. shape: (B, L) with more axes.
    """

    dtype: torch.dtype = torch.long
    hides: bool = False
    shape: tuple[str, ...] = ("B", "L")

    def write(self, keep: Tensor) -> Tensor:
        """Return the mask for ``keep`` (B, L), True = a real token."""
        mask = (~keep if self.hides else keep).to(self.dtype)
        B, L = keep.shape
        view = {"B": B, "L": L, "1": 1}
        mask = mask.view([view.get(axis, 1) for axis in self.shape])
        return mask.expand([L if axis == "Q" else size for axis, size in zip(self.shape, mask.shape, strict=True)])

    def __str__(self) -> str:
        meaning = "hidden" if self.hides else "kept"
        true = "True" if self.dtype == torch.bool else "1"
        return f"({', '.join(axis.replace('Q', 'L') for axis in self.shape)}), {true} = {meaning}"


SHAPES = (("B", "L"), ("B", "1", "1", "L"), ("B", "1", "L"), ("B", "Q", "L"), ("B", "1", "Q", "L"))
MASK_DTYPES = (torch.long, torch.bool, torch.float32)


@dataclass(frozen=True)
class Stream:
    """A sequence of tokens that the model reads.

    Attributes:
        name: the argument for the tokens. mask: the argument for their mask, or None.
        length: the number of tokens.
        width: the width of tokens that are vectors. None: the tokens are ids.
        form: the form of the mask. None: no form was accepted, and ``refused`` is the reason.
    """

    name: str
    length: int
    mask: str | None = None
    width: int | None = None
    form: StreamMask | None = None
    refused: str = ""

    @property
    def why_unmasked(self) -> str:
        """Return the reason why no mask can be given."""
        if self.mask is None:
            return "no argument for a mask was found, so rows of one batch must have one length"
        return f"no form of {self.mask} was accepted: {self.refused}"


@dataclass
class CalledModel:
    """A model, and the way to call it.

    Attributes:
        names: the names of the arguments.
        streams: the sequences of tokens. The output belongs to the last stream. Empty: the model reads images.
        picture: the channels and the side of an image.
        has_positions: whether the output is (B, L, ...).
        prepended: the number of output positions before the tokens, such as virtual tokens of prompt tuning. They are left out.
        vocabulary: the number of ids. usable: the ids without special tokens.
        changed: the tokens and masks that a call changed in place. Each call gets copies.
        pad: the id for padding, if the config or the table states it.
        has_width: whether the output has an axis after (B, L). Without it, one is added.
        is_length_first: whether tokens and output are (L, B, ...). Masks are (B, L) in any case, as in torch.
    """

    model: nn.Module
    names: tuple[str, ...]
    generator: torch.Generator
    device: torch.device
    streams: tuple[Stream, ...] = ()
    picture: tuple[int, int] | None = None
    pixels: str = ""
    has_positions: bool = True
    prepended: int = 0
    vocabulary: int = 0
    usable: Tensor = field(default_factory=lambda: torch.arange(0))
    constants: dict[str, Any] = field(default_factory=dict)
    gives_targets: bool = False
    is_positional: bool = False
    changed: set[str] = field(default_factory=set)
    pad: int | None = None
    is_length_first: bool = False
    has_width: bool = True

    @property
    def stream(self) -> Stream:
        """The stream to which the outputs belong."""
        return self.streams[-1]

    @property
    def config(self) -> Any:
        """The config of the model, or None."""
        return getattr(self.model, "config", None)

    def floats(self) -> torch.dtype:
        """Return the dtype of the parameters."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    # --- inputs

    def draw(self, rows: int = NUM_ROWS, lengths: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Return random inputs."""
        if self.picture is not None:
            channels, side = self.picture
            pixels = torch.randn(rows, channels, side, side, generator=self.generator)
            return {self.pixels: pixels.to(self.device, self.floats())}
        lengths = lengths or {}
        return {s.name: self._tokens(s, rows, lengths.get(s.name, s.length)) for s in self.streams}

    def _tokens(self, stream: Stream, rows: int, length: int) -> Tensor:
        if stream.width is not None:
            return torch.randn(rows, length, stream.width, generator=self.generator).to(self.device, self.floats())
        places = torch.randint(len(self.usable), (rows, length), generator=self.generator)
        return self.usable[places].to(self.device)

    def others(self, inputs: Mapping[str, Tensor], name: str, changed: Tensor) -> dict[str, Tensor]:
        """Return the inputs with other tokens in the stream ``name``, wherever ``changed`` (B, L) is True."""
        tokens, at = inputs[name], changed.to(self.device)
        if tokens.is_floating_point():
            return {**inputs, name: torch.where(at.unsqueeze(-1), -tokens, tokens)}
        steps = torch.randint(1, len(self.usable), tokens.shape, generator=self.generator)
        places = torch.searchsorted(self.usable, tokens.cpu())
        others = self.usable[(places + steps) % len(self.usable)].to(self.device)
        return {**inputs, name: torch.where(at, others, tokens)}

    # --- calls

    def run(self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None, **options: Any) -> Any:
        """Call the model and return its raw result. ``keep`` has a bool mask (B, L) for each stream, True = a real token."""
        originals = dict(inputs)
        for stream in self.streams:
            if keep is not None and stream.name in keep:
                assert stream.form is not None and stream.mask is not None
                originals[stream.mask] = stream.form.write(keep[stream.name].to(self.device))
        if self.is_length_first:
            originals |= {s.name: originals[s.name].transpose(0, 1) for s in self.streams}
        copies = {name: tensor.clone() for name, tensor in originals.items()}
        result = self._called({**self.constants, **copies}, options)
        self.changed.update(name for name, tensor in originals.items() if not torch.equal(copies[name], tensor))
        return result

    def _called(self, arguments: dict[str, Any], options: Mapping[str, Any]) -> Any:
        if self.gives_targets:
            arguments["targets"] = arguments[self.stream.name].contiguous()
        if "use_cache" in self.names:
            arguments["use_cache"] = False
        arguments |= options
        if self.is_positional:
            first = [s.name for s in self.streams] or [self.pixels]
            return self.model(*(arguments.pop(name) for name in first), **arguments)
        return self.model(**arguments)

    def answer(self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None, **options: Any) -> Tensor:
        """Return the output as one tensor, (B, L, ...) or (B, ...)."""
        return self.output(self.run(inputs, keep, **options), inputs)

    def output(self, result: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the logits or hidden states in the raw result of a call."""
        output = _floats(result)
        if output is None:
            raise ValueError(f"{type(self.model).__name__} returns no floating-point tensor, got {type(result).__name__}")
        output = output if self.has_width else output.unsqueeze(-1)
        if self.is_length_first:
            return output.transpose(0, 1)
        if self.streams:
            B, L = inputs[self.stream.name].shape[:2]
            if output.shape[:1] == (B * L,) and B > 1 < L and output.dim() == 2:
                output = output.view(B, L, -1)
        return output[:, self.prepended :] if self.prepended else output

    def describe(self) -> str:
        """Describe the call in one readable line."""
        name = type(self.model).__name__
        if self.picture is not None:
            shape = f"(B, {self.picture[0]}, {self.picture[1]}, {self.picture[1]})"
            return f"{name}({self.pixels}): {self.pixels} {shape}"
        arguments, forms, axes = list[str](), list[str](), "L, B" if self.is_length_first else "B, L"
        for stream in self.streams:
            arguments.append(stream.name)
            forms.append(f"{stream.name} ({axes}{'' if stream.width is None else f', {stream.width}'})")
            if stream.mask is not None and stream.form is not None:
                arguments.append(stream.mask)
                forms.append(f"{stream.mask} {stream.form}")
        arguments += ["targets"] * self.gives_targets
        length = f"{self.prepended} + L" if self.prepended else "L"
        out = f"({axes.replace('L', length)}, ·)" if self.has_positions else "(B, ·)"
        return f"{name}({', '.join(arguments)}): {'; '.join(forms)}; output {out}"


def make_called(model: nn.Module, seed: int, device: torch.device | str, dtype: torch.dtype | None) -> CalledModel:
    """Find out how to call a model. A copy of it is used, in evaluation mode.

    Raises:
        CannotBeCalledError: no way was found.
    """
    generator = torch.Generator().manual_seed(seed)
    model = copied(model)
    model = model.to(device).eval() if dtype is None else model.to(device, dtype).eval()
    fill_zeros(model, generator)
    names, required = arguments_of(model)
    where = next((p.device for p in model.parameters()), torch.device(device))
    called = CalledModel(model, names, generator, where)
    called.vocabulary, called.usable = _vocabulary(model)
    pads = (_stated(called.config, "pad_token_id"), *(table.padding_idx for table in _tables(model)))
    called.pad = next((pad for pad in pads if isinstance(pad, int) and pad >= 0), None)
    faults: dict[str, None] = {}
    for candidate in _ways(called, required):
        try:
            inputs = candidate.draw()
            output = candidate.answer(inputs)
        except Exception as error:
            faults[fault_text(error)] = None
            continue
        if output.dim() < 2 or output.shape[0] != NUM_ROWS:
            faults[f"the output has shape {tuple(output.shape)} for {NUM_ROWS} rows"] = None
            continue
        if candidate.streams:
            L = candidate.stream.length
            if "targets" in names and output.dim() == 3 and output.shape[1] == 1 < L:  # nanoGPT: all logits only with targets
                candidate.gives_targets = True
                output = candidate.answer(inputs)
            if output.shape[1:] == (L,) and _lengths(candidate) == (L - 1,):
                candidate.has_width, output = False, output.unsqueeze(-1)
            candidate.prepended = _prepended(candidate, output)
            candidate.has_positions = output.dim() >= 3 and output.shape[1] == candidate.prepended + L
        else:
            candidate.has_positions = False
        return candidate
    raise CannotBeCalledError("; ".join(list(faults)[:3]) or "no argument for tokens or images was found")


def _prepended(called: CalledModel, output: Tensor) -> int:
    """The number of output positions before the tokens. It must not change with the number of tokens."""
    L = called.stream.length
    if output.dim() < 3 or output.shape[1] <= L:
        return 0
    return output.shape[1] - L if _lengths(called)[:1] == (output.shape[1] - 1,) else 0


def _lengths(called: CalledModel) -> tuple[int, ...]:
    """The axes of the output after the rows if the tokens are one fewer, or () if the model reads whole blocks."""
    try:
        return called.answer(called.draw(NUM_ROWS, {called.stream.name: called.stream.length - 1})).shape[1:]
    except Exception:
        return ()


def _ways(called: CalledModel, required: Sequence[str]) -> Iterator[CalledModel]:
    """Yield ways to call a model, the most likely first."""
    names, model = called.names, called.model
    first = next(iter(required or names), "")
    pixels = next((name for name in PIXELS if name in names), None)
    if pixels is None and any(isinstance(m, nn.Conv2d) for m in model.modules()) and not _tables(model):
        pixels = first
    if pixels is not None and not any(name in names for name in ("input_ids", *TARGET_IDS)):
        side, channels = (_stated(called.config, name) for name in ("image_size", "num_channels"))
        side = side[0] if isinstance(side, list | tuple) else side
        pictures = ([(channels or 3, side)] if isinstance(side, int) else []) + list(PICTURES)
        yield from (replace(called, picture=picture, pixels=pixels) for picture in pictures)
        return
    ids = next((name for name in IDS if name in names), first)
    target = next((name for name in TARGET_IDS if name in names), None)
    mask = next((name for name in MASK_NAMES if name in names), None)
    target_mask = next((name for name in TARGET_MASKS if name in names), None)
    limit = limit_of(model)
    widths: list[int | None] = [*([None] if _tables(model) else []), *_input_widths(model)]
    for width, length in product(widths or [None], LENGTHS):
        if limit is not None and length > limit:
            continue
        source = Stream("inputs_embeds" if width is not None and "inputs_embeds" in names else ids, length, mask, width)
        streams = (source,) if target is None else (source, Stream(target, max(2, length - 3), target_mask, width))
        known = {stream.name for stream in streams}
        rest = [name for name in required if name not in known]
        yield replace(called, streams=streams, constants=dict.fromkeys(rest))


def arguments_of(model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of all arguments and of the required arguments, also through the wrappers of torch.compile and PEFT."""
    inner: Any = model
    while True:
        parameters = inspect.signature(inner.forward).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        children = list(inner.children())
        base = inner.get_base_model() if callable(getattr(inner, "get_base_model", None)) else None
        if base is None and not named and len(children) == 1:
            base = children[0]
        if base is None or base is inner:
            break
        inner = base
    names = tuple(p.name for p in named)
    if any(p.kind is p.VAR_KEYWORD for p in parameters) and hasattr(inner, "config") and "use_cache" not in names:
        names = (*names, "use_cache") if _stated(inner.config, "use_cache") is not None else names
    return names, tuple(p.name for p in named if p.default is p.empty)


def find_forms(called: CalledModel, inputs: Mapping[str, Tensor]) -> None:
    """Find the form of each stream's mask by trying."""
    streams = []
    for stream in called.streams:
        if stream.mask is None:
            streams.append(stream)
            continue
        keep = torch.ones(inputs[stream.name].shape[:2], dtype=torch.bool)
        keep[1, : stream.length // 3] = False
        hides, faults, accepted = "pad" in stream.mask, dict[str, None](), None
        for dtype, shape in product(MASK_DTYPES, SHAPES):
            form = StreamMask(dtype, hides, shape)
            called.streams = tuple(replace(s, form=form) if s.name == stream.name else s for s in called.streams)
            try:
                called.answer(inputs, {stream.name: keep})
            except Exception as error:
                faults[fault_text(error)] = None
                continue
            accepted = form
            break
        streams.append(replace(stream, form=accepted, refused="" if accepted else next(iter(faults))))
    called.streams = tuple(streams)


def with_form(called: CalledModel, stream: Stream, form: StreamMask) -> CalledModel:
    """Return the same model with another form of mask for a stream."""
    return replace(called, streams=tuple(replace(s, form=form) if s.name == stream.name else s for s in called.streams))


def limit_of(model: nn.Module) -> int | None:
    """Return the largest number of tokens that the config states, or None."""
    config = getattr(model, "config", None)
    of_config = [n for n in (_stated(config, name) for name in LIMITS) if isinstance(n, int) and 0 < n < 2**20]
    of_model = [n for n in (getattr(model, name, None) for name in LIMITS) if isinstance(n, int) and n > 0]
    return next(iter(of_config + of_model), None)


def fill_zeros(model: nn.Module, generator: torch.Generator) -> None:
    """Fill trainable parameters that are all zero with noise, because they would hide every change before them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.numel() and not parameter.is_meta and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def fault_text(error: Exception) -> str:
    """Return the class and the first line of an error."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line[:140]}" if line else type(error).__name__


def is_refusal(error: Exception) -> bool:
    """Return whether an error reports an unsupported call. Such an error is not a fault."""
    return isinstance(error, ValueError | NotImplementedError | TypeError | AssertionError)


def _stated(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def _tables(model: nn.Module) -> list[nn.Embedding]:
    return [m for m in model.modules() if isinstance(m, nn.Embedding)]


def _input_widths(model: nn.Module) -> list[int]:
    """The widths of vectors to try: those that the first modules read."""
    found = (
        getattr(m, name, None) for m in model.modules() for name in ("in_features", "input_size", "embed_dim", "in_channels")
    )
    return list(dict.fromkeys(width for width in found if isinstance(width, int)))[:4]


def _vocabulary(model: nn.Module) -> tuple[int, Tensor]:
    """The number of ids, and the ids without special tokens."""
    config, tables = getattr(model, "config", None), _tables(model)
    table: Any = None
    getter: Any = getattr(model, "get_input_embeddings", None)
    if callable(getter):
        try:
            table = getter()
        except (NotImplementedError, AttributeError):
            table = None
    size = getattr(table, "num_embeddings", None)
    stated = _stated(config, "vocab_size")
    if size is None and isinstance(stated, int):
        size = stated
    if size is None:
        size = tables[0].num_embeddings if tables else 50
    stated_ids = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    special = {table.padding_idx for table in tables} | ({0, 1, 2} if size > 12 else set())
    for mark in (value for name, value in stated_ids.items() if name.endswith("_id")):
        special |= set(mark) if isinstance(mark, list | tuple) else {mark}
    usable = [token for token in range(size) if token not in special] or list(range(size))
    return size, torch.tensor(usable)


def _floats(result: Any) -> Tensor | None:
    """The first floating-point tensor with at least one axis. Logits come first."""
    if isinstance(result, Tensor):
        return result if result.is_floating_point() and result.dim() else None
    for name in OUTPUT_NAMES:
        output = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if isinstance(output, Tensor):
            return output
    parts: Any = result.values() if isinstance(result, Mapping) else result if isinstance(result, list | tuple) else ()
    return next((output for part in parts if (output := _floats(part)) is not None), None)


def decoder_signs(model: nn.Module) -> str:
    """Return the reason to expect that the model is causal, or an empty string."""
    name, config = type(model).__name__, getattr(model, "config", None)
    if re.search(r"CausalLM|GPT|DecoderLM", name) and not (_stated(config, "is_decoder") is False and "GPT" not in name):
        return f"its class is {name}"
    if getattr(model, "causal", False) is True or any(
        _stated(config, key) is True for key in ("is_decoder", "is_encoder_decoder")
    ):
        return "its config or class marks it as a decoder"
    for path, buffer in model.named_buffers():
        if buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] > 2:
            square = buffer.flatten(0, -3)[0] if buffer.dim() > 2 else buffer
            if any(torch.equal(marks, torch.ones_like(marks).tril()) for marks in (square == 1, square == 0)):
                return f"the buffer {path} is a causal mask"
    return ""


class _Dropouts(TorchFunctionMode):
    """Count the calls of dropout that is switched on."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_on = "dropout" in getattr(func, "__name__", "") and (kwargs.get("training") or args[2:3] == (True,))
        self.count += bool(is_on or kwargs.get("dropout_p"))
        return func(*args, **kwargs)


def draws_by_itself(call: Callable[[], Any]) -> bool:
    """Return whether a call draws random numbers, and none of them for dropout."""
    with torch.random.fork_rng(), _Dropouts() as dropouts:
        before = torch.get_rng_state()
        call()
        return not dropouts.count and not torch.equal(torch.get_rng_state(), before)


def returned_cache(result: Any, name: str) -> Any:
    """Return the cache in the result of a call whose argument for it is ``name``, or None."""
    for key in (name, "past_key_values", "cache_params", "state"):
        cache = result.get(key) if isinstance(result, Mapping) else getattr(result, key, None)
        if cache is not None:
            return cache
    parts = result[1:] if isinstance(result, tuple) else ()
    rest = [part for part in parts if part is not None and not (isinstance(part, Tensor) and part.dim() == 0)]
    return rest[-1] if rest else None


def returns_cache(called: CalledModel) -> bool:
    """Return whether the model gives back a cache of its tokens. A recurrent state is none: a bidirectional model has one, too."""
    name = next((name for name in CACHES if name in called.names), None)
    if name in (None, "state", "hidden"):
        return False
    if hasattr(called.model, "make_cache"):
        return True
    try:
        options: dict[str, Any] = {"use_cache": True} if "use_cache" in called.names else {}
        return returned_cache(called.run(called.draw(), **options), str(name)) is not None
    except Exception:
        return False
