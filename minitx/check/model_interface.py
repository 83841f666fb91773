"""Call any model: draw random tokens, write its mask, and read its output. The way to call it is found by trying."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minitx.check import calling
from minitx.check.calling import Arguments, Device, MaskForm, copied, parts_of

NUM_ROWS = 3
TRIED_LENGTHS = (12, 16, 32, 64, 128, 8, 5, 10, 7, 9, 6, 4, 3, 2)
"""Numbers of tokens to try, in this order: some models need whole blocks, some read only a few."""

TOKENS = "tokens"
"""In place of the value of an argument: the tokens of the last stream."""

TRIES = 300
"""The number of ways to try."""

LIMITS = ("max_position_embeddings", "n_positions", "block_size", "max_len", "max_seq_len", "context_length", "max_length")
PICTURES = ((3, 32), (1, 28), (3, 16), (3, 64), (1, 16), (1, 32), (3, 8), (1, 8), (3, 224))
OUTPUT_NAMES = ("logits", "prediction_logits", "last_hidden_state", "pooler_output")
MASK_FORMS = tuple(product((torch.long, torch.bool, torch.float32), ("B--S", "B11S", "B-1S", "B-LS", "B1LS")))


class CannotBeCalledError(ValueError):
    """No way to call the model was found. The message lists the faults."""


@dataclass(frozen=True)
class Stream:
    """A sequence of tokens that the model reads.

    Attributes:
        name: the argument for the tokens. mask: the argument for their mask, or None.
        length: the number of tokens.
        width: the width of tokens that are vectors. None: the tokens are ids.
        form: the form of the mask. None: no mask can be given, and ``why_unmasked`` is the reason.
    """

    name: str
    length: int
    mask: str | None = None
    width: int | None = None
    form: MaskForm | None = None
    why_unmasked: str = ""


@dataclass
class CalledModel:
    """A model, and the way to call it.

    Attributes:
        arguments: the arguments of the model, or of the caller's adapter.
        streams: the sequences of tokens. The output belongs to the last stream. Empty: the model reads images.
        picture: the argument for images, their channels and their side.
        fixed: further arguments: ``TOKENS`` for the tokens of the last stream, or None.
        cache: the argument for a cache. call: the caller's adapter. None: the model itself is called.
        has_positions: whether the output is (B, L, ...).
        prepended: the number of output positions before the tokens, such as virtual tokens of prompt tuning. They are left out.
        vocabulary: the number of ids. usable: the ids without special tokens.
        changed: the tokens and masks that a call changed in place. Each call gets copies.
        pad: the id for padding, if the config or the table states it.
        has_width: whether the output has an axis after (B, L). Without it, one is added.
        is_length_first: whether tokens and output are (L, B, ...). Masks are (B, L) in any case, as in torch.
    """

    model: nn.Module
    arguments: Arguments
    generator: torch.Generator
    device: torch.device
    streams: tuple[Stream, ...] = ()
    picture: tuple[str, int, int] | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    cache: str | None = None
    call: Callable[..., Any] | None = None
    has_positions: bool = True
    prepended: int = 0
    vocabulary: int = 0
    usable: Tensor = field(default_factory=lambda: torch.arange(0))
    changed: set[str] = field(default_factory=set)
    pad: int | None = None
    is_length_first: bool = False
    has_width: bool = True

    @property
    def stream(self) -> Stream:
        """The stream that the outputs belong to."""
        return self.streams[-1]

    @property
    def config(self) -> Any:
        """The config of the model, or None."""
        return getattr(self.model, "config", None)

    def floats(self) -> torch.dtype:
        """Return the dtype of the parameters."""
        return next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)

    @property
    def limit(self) -> int | None:
        """The largest number of tokens that the config states, or None."""
        stated = [_stated(place, name) for place in (self.config, self.model) for name in LIMITS]
        return next((number for number in stated if isinstance(number, int) and 0 < number < 2**20), None)

    @property
    def why_without_positions(self) -> str:
        """Return the reason why no output belongs to one token, or an empty string."""
        return "it reads no tokens" if not self.streams else "" if self.has_positions else "the output has no positions"

    # --- inputs

    def draw(self, rows: int = NUM_ROWS, lengths: Mapping[str, int] | None = None) -> dict[str, Tensor]:
        """Return random inputs."""
        if self.picture is not None:
            name, channels, side = self.picture
            return {name: self._vectors(rows, channels, side, side)}
        lengths = lengths or {}
        return {s.name: self._tokens(s, rows, lengths.get(s.name, s.length)) for s in self.streams}

    def _tokens(self, stream: Stream, rows: int, length: int) -> Tensor:
        if stream.width is not None:
            return self._vectors(rows, length, stream.width)
        return self.usable[torch.randint(len(self.usable), (rows, length), generator=self.generator)].to(self.device)

    def _vectors(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.floats())

    def others(self, inputs: Mapping[str, Tensor], name: str, changed: Tensor) -> dict[str, Tensor]:
        """Return the inputs with other tokens in the stream ``name``, wherever ``changed`` (B, L) is True."""
        tokens, at = inputs[name], changed.to(self.device)
        if tokens.is_floating_point():
            return {**inputs, name: torch.where(at.unsqueeze(-1), -tokens, tokens)}
        steps = torch.randint(1, len(self.usable), tokens.shape, generator=self.generator)
        places = torch.searchsorted(self.usable, tokens.cpu())
        others = self.usable[(places + steps) % len(self.usable)].to(self.device)
        return {**inputs, name: torch.where(at, others, tokens)}

    def counted(self, keep: Tensor) -> dict[str, Any]:
        """Return ``position_ids`` that count the real tokens of ``keep`` (B, L), or nothing for a model that does not take them."""
        positions = (keep.long().cumsum(-1) - 1).clamp(min=0).to(self.device)
        return {"position_ids": positions} if "position_ids" in self.arguments.names else {}

    # --- calls

    @contextmanager
    def using(self, model: nn.Module) -> Iterator[None]:
        """Call another model in place of this one. Vectors are converted to its dtype."""
        usual, self.model = self.model, model
        try:
            yield
        finally:
            self.model = usual

    def run(self, inputs: Mapping[str, Tensor], keep: Mapping[str, Tensor] | None = None, **options: Any) -> Any:
        """Call the model and return its raw result. ``keep`` has a bool mask (B, L) for each stream, True = a real token."""
        arguments: dict[str, Any] = {**self.fixed, **inputs}
        arguments |= {name: x.to(self.floats()) for name, x in inputs.items() if x.is_floating_point()}
        for stream in self.streams:
            if keep is not None and stream.name in keep:
                assert stream.form is not None and stream.mask is not None
                arguments[stream.mask] = stream.form.write(keep[stream.name].to(self.device))
            if self.is_length_first:
                arguments[stream.name] = arguments[stream.name].transpose(0, 1)
        arguments |= {name: arguments[self.stream.name] for name, value in self.fixed.items() if value == TOKENS}
        arguments |= {"use_cache": False} if "use_cache" in self.arguments.names else {}
        function = self.model if self.call is None else partial(self.call, self.model)
        if self.call is not None and self.streams and (mask := self.stream.mask) and arguments[mask] is None:
            arguments[mask] = torch.ones(inputs[self.stream.name].shape[:2], dtype=torch.bool, device=self.device)
        result, changed = calling.invoke(function, arguments | options, self.arguments.positional)
        self.changed.update(changed)
        return result

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

    # --- what trying and declarations show

    def find_forms(self, inputs: Mapping[str, Tensor]) -> None:
        """Find the form of each stream's mask by trying."""
        for stream in self.streams:
            keep, faults = keep_mask(inputs[stream.name], slice(stream.length // 3)), dict[str, None]()
            forms = [MaskForm(dtype, "pad" in (stream.mask or ""), axes) for dtype, axes in MASK_FORMS]
            forms = [MaskForm(axes="B--S")] if self.call else forms
            tried = (self.with_form(stream, form) for form in forms if stream.mask)
            call = partial(CalledModel.answer, inputs=inputs, keep={stream.name: keep})
            found = calling.first_that_works(tried, call, faults)
            why = f"no form of {stream.mask} was accepted: {next(iter(faults))}" if faults else stream.why_unmasked
            self.streams = (found or self.with_form(stream, None, why)).streams

    def with_form(self, stream: Stream, form: MaskForm | None, why: str = "") -> CalledModel:
        """Return the same model with another form of mask for a stream, or with the reason why there is none."""
        other = replace(stream, form=form, why_unmasked=why)
        return replace(self, streams=tuple(other if s.name == stream.name else s for s in self.streams))

    def decoder_signs(self) -> str:
        """Return the reason to expect that the model is causal, or an empty string."""
        name, config, model = type(self.model).__name__, self.config, self.model
        if re.search(r"CausalLM|GPT|DecoderLM", name) and not (_stated(config, "is_decoder") is False and "GPT" not in name):
            return f"its class is {name}"
        marks = [getattr(model, "causal", False), *(_stated(config, key) for key in ("is_decoder", "is_encoder_decoder"))]
        if any(mark is True for mark in marks):
            return "its config or class marks it as a decoder"
        for path, buffer in model.named_buffers():
            if buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] > 2:
                square = buffer.flatten(0, -3)[0] if buffer.dim() > 2 else buffer
                if any(torch.equal(marks, torch.ones_like(marks).tril()) for marks in (square == 1, square == 0)):
                    return f"the buffer {path} is a causal mask"
        return "it returns a cache of its tokens" if self._returns_cache() else ""

    def _returns_cache(self) -> bool:
        """Return whether the model gives back a cache of its tokens.

        A recurrent state declares nothing: bidirectional models have one, too. Nor does a layer: its caller's mask decides.
        """
        if self.cache in (None, "state", "hidden") or not self.streams or self.stream.width is not None:
            return False
        if hasattr(self.model, "make_cache"):
            return True
        with suppress(Exception):
            options: dict[str, Any] = {"use_cache": True} if "use_cache" in self.arguments.names else {}
            return returned_cache(self.run(self.draw(), **options), str(self.cache)) is not None
        return False

    def describe(self) -> str:
        """Describe the call in one readable line."""
        name = type(self.model).__name__ + (f" by {self.call.__name__}" if self.call else "")
        if self.picture is not None:
            pixels, channels, side = self.picture
            return f"{name}({pixels}): {pixels} (B, {channels}, {side}, {side})"
        forms, axes = dict[str, str](), "L, B" if self.is_length_first else "B, L"
        for stream in self.streams:
            forms[stream.name] = f"({axes}{'' if stream.width is None else f', {stream.width}'})"
            if stream.mask is not None and stream.form is not None:
                forms[stream.mask] = str(stream.form).replace("S", "L")
        same = [name for name, value in self.fixed.items() if value == TOKENS]
        listed = ", ".join([*forms, *same])
        forms |= {name: f"= {self.stream.name}" for name in same if name != "targets"}
        length = f"{self.prepended} + L" if self.prepended else "L"
        forms["output"] = f"({axes.replace('L', length)}, ·)" if self.has_positions else "(B, ·)"
        return f"{name}({listed}): {'; '.join(' '.join(form) for form in forms.items())}"


def make_called(
    model: nn.Module, seed: int, device: Device, dtype: torch.dtype | None, call: Callable[..., Any] | None = None
) -> CalledModel:
    """Find out how to call a model. A copy of it is used, in evaluation mode. ``call``: the caller's adapter.

    Raises:
        CannotBeCalledError: no way was found.
    """
    generator = torch.Generator().manual_seed(seed)
    model = copied(model).to(device, dtype).eval()
    fill_zeros(model, generator)
    arguments = (
        calling.read_arguments(model) if call is None else calling.read_adapter(call, "(model, input_ids, keep)", "x", "mask")
    )
    takes_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
    if call is None and takes_all and _stated(getattr(model, "config", None), "use_cache") is not None:
        arguments = replace(arguments, names=tuple(dict.fromkeys((*arguments.names, "use_cache"))))
    where = next((p.device for p in model.parameters()), torch.device(device))
    called = CalledModel(model, arguments, generator, where, cache=arguments.named("cache"), call=call)
    called.vocabulary, called.usable = _vocabulary(model)
    pads = (_stated(called.config, "pad_token_id"), *(table.padding_idx for table in _tables(model)))
    called.pad = next((pad for pad in pads if isinstance(pad, int) and pad >= 0), None)
    faults: dict[str, None] = {}
    candidate = calling.first_that_works(islice(_ways(called), TRIES), _check_output, faults)
    if candidate is None:
        raise CannotBeCalledError("; ".join(list(faults)[:3]) or "no argument for tokens or images was found")
    if not candidate.streams:
        candidate.has_positions = False
        return candidate
    output, L = candidate.answer(candidate.draw()), candidate.stream.length
    if "targets" in arguments.names and output.dim() == 3 and output.shape[1] == 1 < L:  # nanoGPT: all logits only with targets
        candidate.fixed["targets"] = TOKENS
        output = candidate.answer(candidate.draw())
    shorter = _lengths(candidate)
    if output.shape[1:] == (L,) and shorter == (L - 1,):
        candidate.has_width, output = False, output.unsqueeze(-1)
    if output.dim() >= 3 and output.shape[1] > L and shorter[:1] == (output.shape[1] - 1,):
        candidate.prepended = output.shape[1] - L
    candidate.has_positions = output.dim() >= 3 and output.shape[1] == candidate.prepended + L
    return candidate


def _check_output(called: CalledModel) -> None:
    output = called.answer(called.draw())
    if output.dim() < 2 or output.shape[0] != NUM_ROWS:
        raise calling.ReturnError(f"the output has shape {tuple(output.shape)} for {NUM_ROWS} rows")


def _lengths(called: CalledModel) -> tuple[int, ...]:
    """The axes of the output after the rows if the tokens are one fewer, or () if the model reads whole blocks."""
    with suppress(Exception):
        return called.answer(called.draw(NUM_ROWS, {called.stream.name: called.stream.length - 1})).shape[1:]
    return ()


def _ways(called: CalledModel) -> Iterator[CalledModel]:
    """Yield ways to call a model, the most likely first."""
    arguments, model = called.arguments, called.model
    first = next(iter(arguments.required or arguments.names), "")
    ids, target, pixels = arguments.named("x") or first, arguments.named("target"), arguments.named("pixels")
    if pixels is None and any(isinstance(m, nn.Conv2d) for m in model.modules()) and not _tables(model):
        pixels = first
    if pixels is not None and target is None and "input_ids" not in arguments.names:
        side, channels = (_stated(called.config, name) for name in ("image_size", "num_channels"))
        side = side[0] if isinstance(side, list | tuple) else side
        stated = [(channels or 3, side)] if isinstance(side, int) else []
        yield from (replace(called, picture=(pixels, *picture)) for picture in (*stated, *PICTURES))
        return
    mask, target_mask = arguments.named("kept", "padding", "mask"), arguments.named("target_padding", "target_mask")
    roles, masks = {"x": ids}, {"x": target_mask if ids == target else mask, "target": target_mask}  # there are decoders alone
    roles |= {} if target in (None, ids) else {"target": str(target)}
    why = (
        "call= takes no mask" if called.call else "no argument for a mask was found, so rows of one batch must have one length"
    )

    def values(name: str, form: tuple[int | None, int]) -> Sequence[Any]:
        return (None, TOKENS) if name in arguments.required and name not in masks.values() else ()

    for _, (width, length), chosen in calling.ways(arguments, [roles], _token_forms(called), values):
        names = roles | ({"x": "inputs_embeds"} if width is not None and "inputs_embeds" in arguments.names else {})
        lengths = {"x": length, "target": max(2, length - 3)}
        streams = (Stream(name, lengths[role], masks[role], width, why_unmasked=why) for role, name in names.items())
        yield replace(called, streams=tuple(streams), fixed=dict.fromkeys(arguments.required) | chosen)


def _token_forms(called: CalledModel) -> list[tuple[int | None, int]]:
    """The widths of vectors (None: ids) and the numbers of tokens to try: vectors as the first modules read them."""
    attributes = ("in_features", "input_size", "embed_dim", "in_channels")
    found = (getattr(m, name, None) for m in called.model.modules() for name in attributes)
    widths = list(dict.fromkeys(width for width in found if isinstance(width, int)))[:4]
    lengths = [length for length in TRIED_LENGTHS if length <= (called.limit or length)]
    return list(product([*[None] * bool(_tables(called.model)), *widths] or [None], lengths))


def keep_mask(tokens: Tensor, hidden: slice = slice(0)) -> Tensor:
    """Return a mask (B, L), True = a real token. The tokens ``hidden`` of row 1 are hidden."""
    keep = torch.ones(tokens.shape[:2], dtype=torch.bool)
    keep[1, hidden] = False
    return keep


def fill_zeros(model: nn.Module, generator: torch.Generator) -> None:
    """Fill trainable parameters that are all zero with noise, because they would hide every change before them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.numel() and not parameter.is_meta and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _stated(config: Any, name: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def _tables(model: nn.Module) -> list[nn.Embedding]:
    return [m for m in model.modules() if isinstance(m, nn.Embedding)]


def _vocabulary(model: nn.Module) -> tuple[int, Tensor]:
    """The number of ids, and the ids without special tokens."""
    config, tables = getattr(model, "config", None), _tables(model)
    table: Any = None
    with suppress(NotImplementedError, AttributeError):
        table = model.get_input_embeddings()  # type: ignore[operator]
    stated = [getattr(table, "num_embeddings", None), _stated(config, "vocab_size"), *(t.num_embeddings for t in tables), 50]
    size = next(number for number in stated if isinstance(number, int))
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    special = {table.padding_idx for table in tables} | ({0, 1, 2} if size > 12 else set())
    for mark in (value for name, value in values.items() if name.endswith("_id")):
        special |= set(mark) if isinstance(mark, list | tuple) else {mark}
    usable = [token for token in range(size) if token not in special] or list(range(size))
    return size, torch.tensor(usable)


def _floats(result: Any) -> Tensor | None:
    """The first floating-point tensor with at least one axis. Logits come first."""
    if isinstance(result, Tensor):
        return result if result.is_floating_point() and result.dim() else None
    named = [output for name in OUTPUT_NAMES if isinstance(output := _stated(result, name), Tensor)]
    if named:
        return named[0]
    return next((output for part in parts_of(result) if (output := _floats(part)) is not None), None)


class WithoutDropout(TorchFunctionMode):
    """Functions of dropout return their input. ``count``: the number of calls of dropout that is switched on."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_dropout = "dropout" in getattr(func, "__name__", "")
        is_on = is_dropout and (kwargs.get("training") or args[2:3] == (True,))
        self.count += bool(is_on or kwargs.get("dropout_p"))
        if is_dropout:
            return kwargs["input"] if "input" in kwargs else args[0]
        return func(*args, **(kwargs | {"dropout_p": 0.0} if "dropout_p" in kwargs else kwargs))


def draws_by_itself(call: Callable[[], Any]) -> bool:
    """Return whether a call draws random numbers, and none of them for dropout."""
    with torch.random.fork_rng(), WithoutDropout() as dropout:
        before = torch.get_rng_state()
        call()
        return not dropout.count and not torch.equal(torch.get_rng_state(), before)


def returned_cache(result: Any, name: str) -> Any:
    """Return the cache in the result of a call whose argument for it is ``name``, or None."""
    for key in (name, "past_key_values", "cache_params", "state"):
        if (cache := _stated(result, key)) is not None:
            return cache
    parts = result[1:] if isinstance(result, tuple) else ()
    rest = [part for part in parts if part is not None and not (isinstance(part, Tensor) and part.dim() == 0)]
    return rest[-1] if rest else None
