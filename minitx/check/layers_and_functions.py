"""Run one case with a function or a layer: record the inputs and the output of its attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check import calling
from minitx.check.calling import (
    QKV,
    Device,
    DoesNotApplyError,
    MaskForm,
    NotTriedError,
    ReturnError,
    Watch,
    copied,
    need,
)
from minitx.check.cases import HEADS, WIDTH, Case, Operands, Outcome, drawn, results_of

MEANINGS = (
    *(MaskForm(dtype) for dtype in (torch.bool, torch.int, torch.float64)),
    MaskForm(torch.float64, added=-torch.inf),
    *(MaskForm(dtype, hides=True) for dtype in (torch.bool, torch.float64)),
)
OF_KEYS: Mapping[Any, Callable[[int], Any]] = {"S": lambda S: S, "2S": lambda S: 2 * S, "(S, S)": lambda S: (S, S)}
"""Values that depend on the number of keys: a window or top-k of this size hides nothing."""

PADDING, FOUR_AXES, THREE_AXES = ("B--S", "B11S"), ("B1LS", "BHLS", "B-LS", "--LS", "B--S"), ("NHLS", "--LS", "NH-S")


@dataclass(frozen=True)
class Layout:
    """The order of the axes of query, key and value. Inside the checker they are (B, H, L, D).

    Attributes:
        put: converts (B, H, L, D) to the layout.
        take: converts the layout to (B, H, L, D), given the number of heads.
        masks: the shapes of masks to try.
    """

    name: str
    put: Callable[[Tensor], Tensor]
    take: Callable[[Tensor, int], Tensor]
    masks: Sequence[str] = FOUR_AXES


HEADS_FIRST = Layout("(B, H, L, D)", lambda x: x, lambda x, heads: x)
AXES_3 = Layout("(B, L, D)", lambda x: x.flatten(0, 1), lambda x, heads: x.unflatten(0, (-1, heads)), THREE_AXES)
LENGTH_FIRST = Layout("(B, L, H, D)", lambda x: x.transpose(1, 2), lambda x, heads: x.transpose(1, 2))
AXES_2 = Layout("(L, D)", lambda x: x[0, 0], lambda x, heads: x[None, None], ("--LS",))  # one call for each sequence and head
LAYER_AXES = (*FOUR_AXES[:3], "NHLS", *FOUR_AXES[3:])
WHOLE = Layout(
    "(B, L, H·D)", lambda x: x.transpose(1, 2).flatten(2), lambda x, heads: x.unflatten(2, (heads, -1)).transpose(1, 2)
)
LAYER = Layout("(B, L, E)", WHOLE.put, WHOLE.take, LAYER_AXES)
LAYER_LENGTH_FIRST = Layout(
    "(L, B, E)", lambda x: WHOLE.put(x).transpose(0, 1), lambda x, heads: WHOLE.take(x.transpose(0, 1), heads), LAYER_AXES
)


@dataclass(frozen=True)
class Inner:
    """How the projections of a layer become heads.

    Attributes:
        heads: the number of heads.
        is_batch_first: whether the rows of a product are (B, L), not (L, B).
        is_per_head: whether a fused projection stores each key head with its value and its queries, not all queries first.
        kv_heads: the number of key heads in a fused projection. None: as many as heads.
        order: the place of query, key and value among the projections. None: by their names, or else in order.
    """

    heads: int = HEADS
    is_batch_first: bool = True
    is_per_head: bool = False
    kv_heads: int | None = None
    order: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class Way:
    """One way of calling.

    Attributes:
        order: the argument for each input: query, key and value, or x.
        fixed: the values of other required arguments. guessed: those whose names do not show their meaning.
        layout: the order of axes.
        mask: the argument for a mask. form: the form of the mask. None: no mask is passed.
        causal: the causal option. None: there is none.
        inner: how the projections of a layer become heads.
    """

    order: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    guessed: tuple[str, ...] = ()
    layout: Layout = HEADS_FIRST
    mask: str | None = None
    form: MaskForm | None = None
    causal: str | None = None
    inner: Inner = Inner()

    @property
    def call_key(self) -> tuple[Any, ...]:
        """Return what determines the call, but not how projections become heads."""
        return tuple(self.order.items()), tuple(self.fixed.items()), self.layout, self.mask, self.form, self.causal

    @property
    def kind(self) -> str:
        """Return the kind of mask that can be expressed."""
        return "cells" if self.form is None or self.layout is AXES_2 else self.form.kind


class Subject:
    """A function or layer that computes attention.

    Args:
        function: the function or module to call.
        dtype: the dtype of the inputs. device: the device of the inputs.
        seed: the seed of the inputs. call: the caller's adapter. None: the function itself is called.

    Attributes:
        width: the width of all heads.
        layouts: the layouts to try. mask_axes: the shapes of masks. Empty: those of the layout. meanings: the forms of masks.
    """

    is_layer, width = False, HEADS * WIDTH
    layouts: Sequence[Layout] = (HEADS_FIRST, AXES_3, LENGTH_FIRST, AXES_2)
    mask_axes: Sequence[str] = ()
    meanings: Sequence[MaskForm] = MEANINGS

    def __init__(
        self, function: Any, dtype: torch.dtype, device: Device, seed: int, call: Callable[..., Any] | None = None
    ) -> None:
        self.function, self.dtype, self.device, self.seed = function, dtype, device, seed
        self.name = getattr(call or function, "__name__", type(function).__name__)
        self.arguments = calling.read_arguments(function)
        if call is not None:
            self.arguments = calling.read_adapter(call, "(function, query, key, value, mask)", *QKV, "mask")
            self.function = partial(call, function)
            self.layouts, self.mask_axes, self.meanings = (HEADS_FIRST,), ("B1LS",), MEANINGS[:1]
        self.mask = self.arguments.named("kept", "mask", "padding")
        self.is_for_padding = self.mask is not None and self.mask == self.arguments.named("padding")
        self.causal = self.arguments.named("causal")
        self.refused: dict[str, str] = {}  # arguments that raise, and their errors
        self.changed: set[str] = set()  # the arguments that calls since the last reset changed in place
        self.known: dict[tuple[Any, ...], Outcome] = {}
        self.products: dict[tuple[Any, ...], tuple[list[Product], Outcome]] = {}  # of a layer

    # --- ways

    def orders(self) -> Iterator[dict[str, str]]:
        """Yield possible roles of the inputs: by their names, or else every order of three required arguments."""
        arguments, roles = self.arguments, self.arguments.roles
        if all(role in roles for role in QKV):
            yield {role: roles[role] for role in QKV}
        elif "x" in roles:
            yield {"x": roles["x"]}
        else:
            free = [name for name in arguments.required if arguments.role_of(name) in (None, *QKV)][: len(QKV)]
            if len(free) == len(QKV):
                yield from (dict(zip(QKV, order, strict=True)) for order in permutations(free))

    def places(self) -> Iterator[tuple[Layout, Inner]]:
        """Yield the layouts of inputs, and how projections become heads."""
        yield from ((layout, Inner()) for layout in (*self.layouts, *[WHOLE] * ("heads" in self.arguments.roles)))

    def ways(self) -> Iterator[Way]:
        """Yield ways to call it without a mask, the most likely first."""
        for order, (layout, inner), fixed in calling.ways(self.arguments, self.orders(), self.places(), self._values):
            fixed = {name: value for name, value in fixed.items() if value is not None or name in self.arguments.required}
            guessed = tuple(name for name in fixed if self.arguments.role_of(name) is None)
            yield Way(order, fixed, guessed, layout, self.mask, causal=self.causal, inner=inner)

    def _values(self, name: str, form: tuple[Layout, Inner]) -> Sequence[Any]:
        """Values to try for an argument without an input. None leaves an optional argument out."""
        (layout, inner), role = form, self.arguments.role_of(name)
        width, heads = self.width // inner.heads, inner.heads
        known = {"heads": heads, "width": width, "embed": self.width, "dropout": 0.0, "causal": False}
        if name in self.arguments.required:
            return (known.get(role),) if role else (None, *OF_KEYS, width, heads, self.width)
        if layout is WHOLE and role == "heads":
            return (heads,)
        return (None, *OF_KEYS) if role is None and is_limit(self.arguments.defaults[name]) else ()

    def mask_ways(self, way: Way, meaning: str | None) -> Iterator[Way]:
        """Yield a way for each form of a mask. ``meaning``: "keep" or "hide", the only meaning to try."""
        shapes = self.mask_axes or (PADDING if self.is_for_padding else way.layout.masks)
        others = [name for name in self.without_role() if self.arguments.defaults[name] is None]
        for name, axes, form in product([self.mask] if self.mask else others, shapes, self.meanings):
            guessed = way.guessed if self.mask else (*way.guessed, name)
            if meaning is None or (form.added is None and form.hides == (meaning == "hide")):
                yield replace(way, mask=name, guessed=guessed, form=replace(form, axes=axes))

    def limits(self, way: Way) -> list[str]:
        """Return the arguments that may be a window or top-k: without a role, and None or a number if nothing is hidden."""
        usual = {**{name: self.arguments.defaults[name] for name in self.without_role()}, **way.fixed}
        free = [name for name in usual if name in (*self.without_role(), *way.guessed) and name not in (way.mask, way.causal)]
        return [name for name in free if usual[name] in (None, *OF_KEYS) or (is_limit(usual[name]) and name not in way.fixed)]

    def without_role(self) -> list[str]:
        """Return the optional arguments whose names do not show their meaning."""
        return [name for name in self.arguments.defaults if self.arguments.role_of(name) is None]

    # --- calls

    def outcome(self, way: Way, case: Case, is_always_causal: bool = False) -> Outcome:
        """Run one case, or return its result from memory. ``is_always_causal``: the causal option is not used."""
        asked = replace(case, is_causal=False) if is_always_causal else case
        try:
            self.refuse(way, case)
            inputs = self.inputs(way, asked)
        except NotTriedError as reason:
            return Outcome(case, drawn(case), fault=str(reason), refusal=reason)
        key = asked, way.inner, *(replace(way, form=None) if inputs.allowed is None else way).call_key
        if key not in self.known:
            self.changed.clear()
            try:
                self.known[key] = self.measured(way, asked, inputs)
            except Exception as error:
                self.known[key] = Outcome(asked, inputs, fault=calling.fault_text(error))
        return self.known[key]

    def refuse(self, way: Way, case: Case) -> None:
        """Raise ``NotTriedError`` if the case does not apply."""
        has_heads = way.layout not in (AXES_2, AXES_3, WHOLE)
        need(has_heads or not case.kv_heads, f"the layout {way.layout.name} has no heads")

    def measured(self, way: Way, case: Case, inputs: Operands) -> Outcome:
        """Call it, and measure the inputs and the output of its attention."""
        dtype = (*case.dtypes, self.dtype)[0]
        learned = {name: x for name, x in inputs.options.items() if isinstance(x, Tensor) and x.requires_grad}
        tensors = dict(zip(QKV, inputs.heads, strict=True)) | learned
        leaves = {name: x.detach().to(self.device, dtype, copy=True).requires_grad_() for name, x in tensors.items()}
        answer = partial(self._answer, way, inputs, dtype, not case.is_reused)
        result = reused(answer, leaves) if case.is_reused else answer(leaves)
        results = results_of(result, leaves, inputs.cotangent)
        gradients = tuple(tensor for name, tensor in results.items() if name.startswith("gradient"))
        changed = tuple(sorted(self.changed))
        return Outcome(case, inputs, results["output"], results.get("weights"), gradients, bool(gradients), changed=changed)

    def _answer(
        self, way: Way, inputs: Operands, dtype: torch.dtype, is_copied: bool, tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The output (B, H, L, Dv), and the weights if any are returned."""
        (B, H, L, _), width = tensors["query"].shape, tensors["value"].shape[-1]
        if way.layout is AXES_2 and B * H > 1:
            outputs = []
            for b, h in product(range(B), range(H)):
                one = inputs if inputs.allowed is None else replace(inputs, allowed=inputs.allowed[b : b + 1])
                parts = {role: x[b : b + 1, h : h + 1] for role, x in tensors.items()}
                outputs.append(self._answer(way, one, dtype, is_copied, parts)[0])
            return torch.cat(outputs).view(B, H, L, width), None
        given = {way.order[role]: way.layout.put(tensors[role]) for role in QKV}
        given |= {name: tensor for name, tensor in tensors.items() if name not in QKV}
        result = self.call({**self.options(way, inputs, H, dtype), **given}, is_copied)
        output, weights = _output_and_weights(result, way.layout.put(torch.empty(B, H, L, width, device="meta")).shape)
        return way.layout.take(output, H), weights

    def inputs(self, way: Way, case: Case) -> Operands:
        """Return the inputs of a case, with the causal mask inside the mask if there is no option for it."""
        need(way.mask or not case.mask, "no argument for a mask was found")
        is_square = case.rows == case.keys or "x" not in way.order
        need(is_square, "it takes one input for queries and keys", DoesNotApplyError)
        inputs = drawn(case, way.inner.heads, self.width // way.inner.heads, way.kind, self.seed)
        if case.is_causal and way.causal is None:
            need(way.mask, "it takes neither a causal option nor a mask")
            need(way.kind == "cells" and not self.is_for_padding, "it takes no causal option, and no mask for each query")
            inputs = inputs.through_mask
        need(inputs.allowed is None or way.form, "none of the kinds of mask that were tried is accepted")
        return inputs

    def options(self, way: Way, inputs: Operands, heads: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments other than the inputs."""
        fixed = {name: OF_KEYS[value](inputs.key.shape[2]) if value in OF_KEYS else value for name, value in way.fixed.items()}
        options = {**fixed, **inputs.options}
        options = {name: x.to(self.device, copy=True) if isinstance(x, Tensor) else x for name, x in options.items()}
        if way.causal is not None and (inputs.is_causal or self.arguments.defaults.get(way.causal) is not False):
            options[way.causal] = inputs.is_causal
        if inputs.allowed is not None and way.form is not None and way.mask is not None:
            mask = way.form.write(inputs.allowed.to(self.device, copy=True), heads)
            options[way.mask] = mask.to(dtype) if mask.is_floating_point() else mask
        return options

    def call(self, arguments: dict[str, Any], is_copied: bool = True) -> Any:
        """Call it with arguments by name, and positional-only arguments in order."""
        result, changed = calling.invoke(self.function, arguments, self.arguments.positional, is_copied=is_copied)
        self.changed.update(changed)
        return result

    # --- words

    def used(self, way: Way) -> list[str]:
        """Return the arguments that some case uses, in order."""
        used = {*way.order.values(), *way.fixed, way.causal, way.mask if way.form else None}
        return [name for name in self.arguments.names if name in used]

    def describe(self, way: Way) -> str:
        """Describe the call in one readable line."""
        listed = ", ".join(f"{n}={way.fixed[n]}" if way.fixed.get(n) is not None else n for n in self.used(way))
        parts = [f"{self.name}({listed}): {', '.join(way.order.values())} {way.layout.name}"]
        if self.is_layer:
            parts.append(f"{way.inner.heads} head{'s' * (way.inner.heads > 1)}")
        else:
            parts += [f"{role} = {name}" for role, name in way.order.items() if name[:1].lower() != role[:1]]
        form = str(way.form).replace("B·H", "B") if way.layout is AXES_3 else str(way.form)
        parts.append("no mask" if way.mask is None else f"{way.mask} {form}" if way.form else f"{way.mask} not used")
        return "; ".join(parts)


def is_limit(value: Any) -> bool:
    """Return whether a default is a number of keys, or one for each side."""
    return type(value) is int or (isinstance(value, tuple) and len(value) == 2 and all(type(side) is int for side in value))


def reused(call: Callable[[dict[str, Tensor]], Any], tensors: Mapping[str, Tensor]) -> Any:
    """Call twice with the same contiguous tensors, with other numbers in the first call, and return the second result."""
    again = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    call({name: tensor.mul_(2) for name, tensor in again.items()})
    return call({name: tensor.copy_(tensors[name].detach()) for name, tensor in again.items()})


class AttentionLayer(Subject):
    """A module with projections of queries, keys and values. Its attention is the part between its products with parameters."""

    is_layer = True

    def __init__(self, function: nn.Module, dtype: torch.dtype, device: Device, seed: int) -> None:
        self.module = copied(function).to(device, dtype).eval()
        super().__init__(self.module, dtype, device, seed)
        self.name = f"{type(function).__name__}.forward"
        self.matrices = {name: p for name, p in self.module.named_parameters() if p.ndim > 1}
        flat = [p for p in self.matrices.values() if p.ndim == 2] or list(self.matrices.values())
        sizes = [size for p in flat for size in p.shape]
        self.width = next((width for width in self._attributes("embed") if width in sizes), max(sorted(sizes), key=sizes.count))

    def _attributes(self, role: str) -> list[int]:
        names = [name for name in vars(self.module) if re.fullmatch(calling.ROLE_NAMES[role], name.lower())]
        return [value for name in names if type(value := getattr(self.module, name)) is int]

    def places(self) -> Iterator[tuple[Layout, Inner]]:
        stated = [count for count in self._attributes("heads") if count > 0 and self.width % count == 0][:1]
        counts = stated or [count for count in (1, 2, 3, 4, 6, 8, 12, 16) if self.width % count == 0]
        sizes = {size for p in self.matrices.values() for size in p.shape}
        is_fused = len(QKV) * self.width in sizes
        has_order = is_fused or _by_names(list(self.matrices)) is not None
        orders = [None] if has_order else list(permutations(range(len(QKV))))
        layout = LAYER if getattr(self.module, "batch_first", True) else LAYER_LENGTH_FIRST
        yield from ((layout, Inner(*parts)) for parts in product(counts, (True, False), {False, is_fused}, [None], orders))
        groups = [(heads, group) for heads in counts for group in range(1, heads) if heads % group == 0]
        groups = [(heads, group) for heads, group in groups if self.width + 2 * group * (self.width // heads) in sizes]
        for (heads, group), is_batch_first, is_per_head in product(groups, (True, False), (False, True)):
            yield layout, Inner(heads, is_batch_first, is_per_head, group)

    def refuse(self, way: Way, case: Case) -> None:
        is_own = not (case.kv_heads or case.value_width or case.low is not None)
        need(is_own, "a layer projects its own queries, keys and values", DoesNotApplyError)
        is_usual = not (case.dtypes or case.small < 1 or case.is_reused)
        need(is_usual, "a layer is tried in one dtype, with its own numbers", DoesNotApplyError)
        is_apart = not (case.hidden and case.mask == "keys" and "x" in way.order)
        need(is_apart, "it takes one input for queries and values", DoesNotApplyError)

    def measured(self, way: Way, case: Case, inputs: Operands) -> Outcome:
        key = case, inputs.query.shape[1], *way.call_key  # ways that only split the products differently share the call
        if key not in self.products:
            tensors = dict(zip(QKV, inputs.heads, strict=True)) | {"x": inputs.query + case.hidden}
            leaves = {n: way.layout.put(tensors[r]).to(self.device, self.dtype).requires_grad_() for r, n in way.order.items()}
            options = self.options(way, inputs, inputs.query.shape[1], self.dtype)
            with Products(self.matrices) as watched:
                result = self.call({**options, **leaves})
            output = result[0] if isinstance(result, tuple | list) else result
            if not isinstance(output, Tensor):
                raise ReturnError(f"it returns {type(output).__name__}")
            gradients = torch.autograd.grad(output.square().sum(), list(leaves.values()), materialize_grads=True)
            changed = tuple(self.changed & {way.mask})
            on_cpu = tuple(gradient.cpu() for gradient in gradients)
            self.products[key] = watched.seen, Outcome(case, inputs, output, gradients=on_cpu, changed=changed)
        products, outcome = self.products[key]
        query, keys, value, output = _heads(products, outcome.output, way.inner, self.width, case)
        return replace(outcome, inputs=replace(inputs, query=query, key=keys, value=value), output=output)

    def idle_parameters(self) -> list[str]:
        """Return the names of the matrices that no call uses."""
        used = {name for products, _ in self.products.values() for name, *_ in products}
        return [name for name, p in self.matrices.items() if p.ndim == 2 and name not in used]


Product = tuple[str, Any, Any]
"""A product of an activation with a parameter: the parameter's name, the activation and the result."""


class Products(Watch):
    """Record the products of activations with parameters of a module.

    They are recorded below autograd, because ``nn.MultiheadAttention`` and layers with bare parameters call no submodule.
    """

    def __init__(self, matrices: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {p.untyped_storage().data_ptr(): name for name, p in matrices.items()}
        self.seen: list[Product] = []

    def computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of a function of ATen."""
        result, aten = func(*args, **kwargs), torch.ops.aten
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear):
            factors = [x for x in args if isinstance(x, Tensor) and x.ndim > 1]
            names = [self.names.get(factor.untyped_storage().data_ptr()) for factor in factors]
            if any(names) and None in names:
                self.seen.append((next(filter(None, names)), factors[names.index(None)], result))
        return result


def _output_and_weights(result: Any, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
    """The output, which has this shape or at least this shape but for the width, and the weights: the first other tensor."""
    parts = [part for part in (result if isinstance(result, tuple | list) else (result,)) if isinstance(part, Tensor)]
    for output in [p for p in parts if p.shape == shape] + [p for p in parts if p.shape[:-1] == shape[:-1]]:
        return output, next((part for part in parts if part is not output), None)
    shapes = ", ".join(str(tuple(part.shape)) for part in parts) or type(result).__name__
    raise ReturnError(f"it returns {shapes}, not {tuple(shape)}")


def _heads(products: list[Product], output: Any, inner: Inner, width: int, case: Case) -> list[Tensor]:
    """Query, key, value and the output of attention, from the products with parameters and the layer's output."""
    *before, (_, mixed, last) = products or [("", output, output)]
    mixed_inner, pieces = inner, _projected_parts(before, inner, width)
    is_input = any(mixed.equal(read) for _, read, _ in before)
    if is_input or (len(pieces) != len(QKV) and not last.flatten().equal(output.flatten())):  # there is no output projection
        mixed_inner, mixed = replace(inner, is_batch_first=True), output
        pieces = _projected_parts(products, inner, width)
    if len(pieces) != len(QKV):
        seen = ", ".join(f"{name} {tuple(result.shape)}" for name, _, result in products)
        raise ValueError(f"expected three projections and an output, got: {seen or 'no product with a parameter'}")
    order = inner.order or _by_names([name for name, _ in pieces]) or range(len(QKV))
    lengths = case.rows, case.keys, case.keys
    heads = [_split(pieces[place][1], inner, case.batch, length, width) for place, length in zip(order, lengths, strict=True)]
    return [*heads, _split(mixed, mixed_inner, case.batch, case.rows, width)]


def _projected_parts(products: list[Product], inner: Inner, width: int) -> list[tuple[str, Tensor]]:
    """The projections. Fused projections are split."""
    pieces: list[tuple[str, Tensor]] = []
    for name, _, result in products:
        group, size = inner.kv_heads or inner.heads, width // inner.heads
        count, rest = divmod(result.shape[-1], width)
        parts = [result] if rest or not count else list(result.split(width, dim=-1))
        if (inner.is_per_head or inner.kv_heads) and result.shape[-1] == width + 2 * group * size:
            by_head = result.unflatten(-1, (group, -1, size)).split([inner.heads // group, 1, 1], dim=-2)
            in_order = result.split([width, group * size, group * size], dim=-1)
            parts = [part.flatten(-3) for part in by_head] if inner.is_per_head else list(in_order)
        pieces += [(name, part) for part in parts]
    return pieces


def _by_names(names: list[str]) -> tuple[int, ...] | None:
    """The places of query, key and value among parameters, if their names show them."""
    patterns = [rf"(^|[^a-z]){letter}($|[^a-z])|{word}" for letter, word in (("q", "quer"), ("k", "key"), ("v", "val"))]
    places = [[place for place, name in enumerate(names) if re.search(pattern, name.lower())] for pattern in patterns]
    flat = tuple(matches[0] for matches in places if len(matches) == 1)
    return flat if len(set(flat)) == len(QKV) else None


def _split(piece: Tensor, inner: Inner, batch: int, length: int, width: int) -> Tensor:
    """Heads (B, H, length, D) from a projection with rows (B, length) or (length, B)."""
    rows = piece.reshape(batch, length, -1) if inner.is_batch_first else piece.reshape(length, batch, -1).transpose(0, 1)
    return rows.unflatten(-1, (-1, width // inner.heads)).transpose(1, 2).detach().cpu()


def make_subject(
    function: Any, device: Device, dtype: torch.dtype, seed: int, call: Callable[..., Any] | None = None
) -> Subject:
    """Return the function or layer with its arguments, or those of the adapter ``call``, read.

    Raises:
        ValueError, TypeError: ``function`` does not compute attention. The message explains why.
    """
    kind, is_module = type(function).__name__, isinstance(function, nn.Module)
    if call is not None:
        return Subject(copied(function).to(device, dtype).eval() if is_module else function, dtype, device, seed, call)
    if not callable(function):
        raise TypeError(f"check_attention needs a function, a class or a module, got {kind}")
    embedding = [name for name, m in function.named_modules() if isinstance(m, nn.Embedding)] if is_module else []
    if embedding:
        text = f"{kind} is a model with the embedding {embedding[0]}, but check_attention takes a function or a layer"
        raise ValueError(f"{text}: use check_model")
    has_projections = is_module and any(p.ndim > 1 for p in function.parameters())
    called = copied(function).eval() if is_module and not has_projections else function
    subject = (AttentionLayer if has_projections else Subject)(called, dtype, device, seed)
    order = next(subject.orders(), None)
    if order is None:
        names = ", ".join(subject.arguments.names) or "none"
        raise ValueError(f"{kind} has no arguments that look like query, key and value, or x; its arguments: {names}")
    if "x" in order and not has_projections:
        raise ValueError(f"{kind} takes one input and has no projections, so its queries, keys and values cannot be seen")
    return subject


def instance_of(cls: type[Any]) -> tuple[Any, str]:
    """Return an instance of a class, and the call that made it. Sizes are found by names, or else by trying.

    Raises:
        ValueError: every call raises.
    """
    arguments = calling.read_arguments(cls)
    known = {"heads": HEADS, "width": WIDTH, "embed": HEADS * WIDTH, "dropout": 0.0}

    def values(name: str, form: Any) -> Sequence[Any]:
        role = arguments.role_of(name)
        sizes = (known[role],) if role in known else (HEADS * WIDTH, HEADS, WIDTH, 0.0, None)
        return sizes if name in arguments.required else ()

    tried = [chosen for _, _, chosen in calling.ways(arguments, [{}], [None], values)]
    tried.sort(key=lambda chosen: len(chosen) - len(set(chosen.values())))
    faults: dict[str, None] = {}
    chosen = calling.first_that_works(tried[:100], lambda chosen: cls(**chosen), faults)
    if chosen is None:
        advice = f"pass an instance: write layer = {cls.__name__}(...) into the file, and check FILE.py:layer"
        raise ValueError(f"{cls.__name__} cannot be created: {next(iter(faults))}; {advice}")
    return cls(**chosen), f"{cls.__name__}({', '.join(f'{name}={value}' for name, value in chosen.items())})"
