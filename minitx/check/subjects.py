"""Run one experiment with a function or a layer: record the inputs and the output of its attention."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # documented in torch's notes on extending it

from minitx.check import signatures
from minitx.check.copying import copied
from minitx.check.experiments import HEADS, SIMPLE, WIDTH, Experiment, HeadSizes, Operands, Outcome, drawn, through_mask
from minitx.check.signatures import QKV, Layout, MaskForm, MaskShape, Signature


class NotTriedError(Exception):
    """An experiment cannot be run in this way of calling. The message is the reason."""


RETURNS = "it returns"
"""The beginning of a fault about the type or the shape of the result."""


class ReturnError(ValueError):
    """The result of a call is not an output of attention."""

    def __init__(self, result: str) -> None:
        super().__init__(f"{RETURNS} {result}")


class DoesNotApplyError(NotTriedError):
    """An experiment does not apply to this subject, so a graded exercise does not require it."""


@dataclass(frozen=True, eq=False)
class Way:
    """One way of calling.

    Attributes:
        order: the argument for each input: query, key and value, or x.
        fixed: the values of other required arguments.
        layout: the order of axes.
        form, shape: the form and the shape of the mask. None: no mask is passed.
        inner: for a layer, how its projections become heads.
        gives_causal: whether the causal option is used. False if it raises.
    """

    order: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout = signatures.HEADS_FIRST
    form: MaskForm | None = None
    shape: MaskShape | None = None
    inner: Inner | None = None
    gives_causal: bool = True

    @property
    def mask_kind(self) -> str:
        """Return the kind of mask that can be expressed."""
        return "cells" if self.shape is None else self.shape.kind


@dataclass(frozen=True)
class Inner:
    """How the projections of a layer become heads.

    Attributes:
        heads: the number of heads.
        is_batch_first: whether the rows of a product are (B, L), not (L, B).
        is_per_head: whether a fused projection stores query, key and value of each head next to each other.
        order: the place of query, key and value among the projections. None: by their names, or else in order.
    """

    heads: int
    is_batch_first: bool = True
    is_per_head: bool = False
    order: tuple[int, ...] | None = None


class Subject:
    """A function or layer that computes attention.

    Args:
        function: the function or module to call.
        dtype: the dtype of the inputs. device: the device of the inputs.
        seed: the seed of the inputs.
    """

    def __init__(self, function: Callable[..., Any], dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        self.function, self.dtype, self.device, self.seed = function, dtype, device, seed
        self.signature: Signature = signatures.read_signature(function)
        self.refused: dict[str, str] = {}  # arguments that raise, and their errors
        self.has_changed_mask = False  # whether a call since the last reset changed its mask in place

    def ways(self) -> Iterator[Way]:
        """Yield ways to call it without a mask."""
        raise NotImplementedError

    def mask_ways(self, way: Way, forms: tuple[MaskForm, ...]) -> Iterator[Way]:
        """Yield a way for each form and shape of a mask."""
        shapes = signatures.PADDING if self.signature.is_padding else way.layout.shapes
        yield from (replace(way, form=form, shape=shape) for shape, form in product(shapes, forms))

    def run(self, way: Way, experiment: Experiment) -> Outcome:
        """Run one experiment.

        Raises:
            NotTriedError: the experiment cannot be run in this way of calling.
        """
        raise NotImplementedError

    def outcome(self, way: Way, experiment: Experiment) -> Outcome:
        """Run one experiment. If it cannot be run, the outcome's fault is the reason."""
        try:
            return self.run(way, experiment)
        except NotTriedError as reason:
            return Outcome(experiment, drawn(experiment), fault=str(reason))

    def forget(self) -> None:
        """Forget earlier calls."""

    def beyond(self, way: Way, is_named: bool) -> str:
        """Return what a module does beyond the definition, or an empty string: what it changes between its projections and its softmax.

        Args:
            is_named: a known mistake gives its numbers, so that only changed queries, keys and values count.
        """
        if not isinstance(self.function, nn.Module):
            return ""
        self.forget()
        with Products(self.function) as watched:
            seen = self.outcome(way, SIMPLE).inputs
        if not watched.softmaxes and not watched.cores:
            return "it takes no softmax of products of queries and keys"
        if is_named and any(all(any(_is_scaled(x, y) for y in seen.heads) for x in core[:2]) for core in watched.cores):
            return ""
        for query, key, scores in watched.cores:
            pairs = (query, key), (key, query)
            is_plain = any(_is_scaled(one, seen.query) and _is_scaled(other, seen.key) for one, other in pairs)
            if is_plain and (scores is None or any(x is None or _reaches(scores, x) for x in watched.softmaxes)):
                return ""
        return "it changes queries, keys or scores before the softmax, as a norm, positions or a window do"

    def describe(self, way: Way) -> str:
        """Describe the call in one readable line."""
        raise NotImplementedError

    def inputs(self, way: Way, experiment: Experiment, sizes: HeadSizes) -> Operands:
        """Return the inputs of an experiment, with the causal mask inside the mask if there is no option for it."""
        if experiment.mask and self.signature.mask is None:
            raise NotTriedError("no argument for a mask was found")
        if "x" in way.order and experiment.rows != experiment.keys:
            raise DoesNotApplyError("it takes one input for queries and keys")
        inputs = drawn(experiment, sizes, self.seed)
        if not experiment.is_causal or self.causal(way):
            return inputs
        if self.signature.mask is None:
            raise NotTriedError("it takes neither a causal option nor a mask")
        if self.signature.is_padding or sizes.mask != "cells":
            raise NotTriedError("it takes no causal option, and no mask for each query")
        return through_mask(inputs)

    def options(self, way: Way, inputs: Operands, heads: int, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments other than the inputs."""
        options = dict(way.fixed)
        causal = self.causal(way)
        if causal is not None and (inputs.is_causal or causal in self.signature.switched_on):
            options[causal] = inputs.is_causal
        if inputs.allowed is not None:
            if way.form is None or way.shape is None:
                raise NotTriedError("none of the kinds of mask that were tried is accepted")
            mask = way.form.make(way.shape.make(inputs.allowed, heads).to(self.device))
            options[self.signature.mask or ""] = mask.to(dtype if mask.is_floating_point() else mask.dtype, copy=True)
        return options

    def call(self, arguments: dict[str, Any]) -> Any:
        """Call it with arguments by name, and positional-only arguments in order."""
        masks = [value for name, value in arguments.items() if name == self.signature.mask and isinstance(value, Tensor)]
        before = [mask.clone() for mask in masks]
        listed = [arguments.pop(name) for name in self.signature.positional if name in arguments]
        with warnings.catch_warnings():  # ways that do not fit may warn
            warnings.simplefilter("ignore")
            result = self.function(*listed, **arguments)
        self.has_changed_mask |= not all(map(torch.equal, masks, before))
        return result

    def causal(self, way: Way) -> str | None:
        """Return the argument for the causal option, if it is used."""
        return self.signature.named("causal") if way.gives_causal else None

    def arguments(self, way: Way) -> list[str]:
        """Return the arguments that some experiment uses, in order."""
        used = {*way.order.values(), *way.fixed, self.causal(way)}
        if way.form is not None:
            used.add(self.signature.mask)
        return [name for name in self.signature.names if name in used]

    def dtype_of(self, experiment: Experiment) -> torch.dtype:
        """Return the dtype of the inputs of an experiment."""
        return experiment.dtype or self.dtype


class Function(Subject):
    """A function of query, key and value."""

    def ways(self) -> Iterator[Way]:
        for order in self.signature.orders():
            layouts = [*signatures.LAYOUTS, signatures.WHOLE_WIDTH] if self.signature.named("heads") else signatures.LAYOUTS
            for layout in layouts:
                fixed = self.signature.fixed(order, HEADS, WIDTH)
                if fixed is not None:
                    heads = self.signature.named("heads")
                    count = {heads: HEADS} if heads and layout is signatures.WHOLE_WIDTH else {}
                    yield Way(order, {**fixed, **count}, layout)

    def run(self, way: Way, experiment: Experiment) -> Outcome:
        if "x" in way.order:
            raise NotTriedError("a function of one input has no projections")
        if experiment.kv_heads and way.layout not in (signatures.HEADS_FIRST, signatures.LENGTH_FIRST):
            raise NotTriedError(f"the layout {way.layout.name} has no heads")
        inputs = self.inputs(way, experiment, HeadSizes(mask=way.mask_kind))
        dtype = self.dtype_of(experiment)
        leaves = [tensor.to(self.device, dtype).requires_grad_() for tensor in inputs.heads]
        tensors = [leaf * 1 for leaf in leaves]  # leaves cannot be changed in place, but their copies can
        before = [tensor.detach().clone() for tensor in tensors]
        options = self.options(way, inputs, HEADS, dtype)
        self.has_changed_mask = False
        try:
            if experiment.is_reused:
                tensors = [leaf.detach() + 1.0 for leaf in leaves]
                self._answer(way, tensors, options, _shape_of_output(inputs))
                tensors = [tensor.copy_(leaf) for tensor, leaf in zip(tensors, leaves, strict=True)]
            output, weights = self._answer(way, tensors, options, _shape_of_output(inputs))
        except Exception as error:
            return Outcome(experiment, inputs, fault=_sentence(error))
        gradients: tuple[Tensor, ...] = ()
        if output.requires_grad:
            gradients = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True, materialize_grads=True)
        changed = [
            name for name, tensor, old in zip(QKV, tensors, before, strict=True) if not torch.equal(tensor.detach(), old)
        ]
        changed += [self.signature.mask or ""] * self.has_changed_mask
        kept = None if weights is None else weights.detach().cpu()
        on_cpu = tuple(gradient.cpu() for gradient in gradients)
        return Outcome(experiment, inputs, output.detach().cpu(), kept, on_cpu, bool(on_cpu), changed=tuple(changed))

    def _answer(
        self, way: Way, tensors: list[Tensor], options: dict[str, Any], shape: torch.Size
    ) -> tuple[Tensor, Tensor | None]:
        """The output (B, H, L, Dv), and the weights if any are returned."""
        if way.layout is signatures.AXES_2:
            return self._matrices(way, tensors, options, shape)
        names = [way.order[role] for role in QKV]
        result = self.call({**options, **dict(zip(names, map(way.layout.put, tensors), strict=True))})
        expected = way.layout.put(torch.empty(shape, device="meta")).shape
        output, weights = _output_and_weights(result, expected)
        return way.layout.take(output, shape[1]), weights

    def _matrices(
        self, way: Way, tensors: list[Tensor], options: dict[str, Any], shape: torch.Size
    ) -> tuple[Tensor, Tensor | None]:
        """Call the function once for each sequence and each head."""
        names, mask = [way.order[role] for role in QKV], self.signature.mask
        outputs = []
        for b, h in product(range(shape[0]), range(shape[1])):
            arguments = {**options, **{name: tensor[b, h] for name, tensor in zip(names, tensors, strict=True)}}
            if mask in arguments and isinstance(arguments[mask], Tensor):
                arguments[mask] = arguments[mask][b]
            outputs.append(_output_and_weights(self.call(arguments), shape[2:])[0])
        return torch.stack(outputs).view(shape), None

    def describe(self, way: Way) -> str:
        roles = [f"{role} = {way.order[role]}" for role in QKV if way.order[role][:1].lower() != role[:1]]
        call = f"{_function_name(self.function)}({_listed_arguments(self, way)})"
        inputs = ", ".join(way.order[role] for role in QKV)
        return "; ".join([f"{call}: {inputs} {way.layout.name}", *roles, _mask_text(self.signature, way)])


class AttentionLayer(Subject):
    """A module with projections of queries, keys and values. Its attention is the part between its products with parameters."""

    def __init__(self, function: nn.Module, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        module = copied(function).to(device, dtype).eval()
        super().__init__(module, dtype, device, seed)
        self.module = module
        self.width = _width(module)
        self.products: dict[Any, list[Product] | Exception] = {}

    def ways(self) -> Iterator[Way]:
        counts = _head_counts(self.module, self.width)
        matrices = {name: p for name, p in self.module.named_parameters() if p.ndim > 1}
        is_fused = any(size == len(QKV) * self.width for p in matrices.values() for size in p.shape)
        places: list[tuple[int, ...] | None] = [None]
        if not is_fused and _by_names(list(matrices)) is None:
            places = list(permutations(range(len(QKV))))
        for order in self.signature.orders():
            fixed = self.signature.fixed(order, counts[0], self.width // counts[0])
            if fixed is not None:
                inners = (Inner(*parts) for parts in product(counts, (True, False), (False, True)[: 1 + is_fused], places))
                yield from (Way(order, fixed, _layer_layout(self.module), inner=inner) for inner in inners)

    def mask_ways(self, way: Way, forms: tuple[MaskForm, ...]) -> Iterator[Way]:
        shapes = signatures.PADDING if self.signature.is_padding else signatures.LAYER_AXES
        yield from (replace(way, form=form, shape=shape) for shape, form in product(shapes, forms))

    def run(self, way: Way, experiment: Experiment) -> Outcome:
        if experiment.kv_heads or experiment.value_width or experiment.low is not None:
            raise DoesNotApplyError("a layer projects its own queries, keys and values")
        if experiment.dtype is not None or experiment.small < 1 or experiment.is_reused:
            raise DoesNotApplyError("a layer is tried in one dtype, with its own numbers")
        if experiment.hidden and experiment.mask == "keys" and "x" in way.order:
            raise DoesNotApplyError("it takes one input for queries and values")
        assert way.inner is not None
        inputs = self.inputs(way, experiment, HeadSizes(way.inner.heads, self.width // way.inner.heads, way.mask_kind))
        products = self._products(way, experiment, inputs)
        if isinstance(products, Exception):
            return Outcome(experiment, inputs, fault=_sentence(products))
        try:
            query, key, value, output = _heads(products, way.inner, self.width, experiment)
        except (RuntimeError, ValueError) as error:
            return Outcome(experiment, inputs, fault=_sentence(error))
        seen = Operands(query, key, value, inputs.allowed, inputs.is_causal)
        changed = (self.signature.mask or "",) if products[-1].has_changed_mask else ()
        return Outcome(experiment, seen, output, gradients=products[-1].gradients, changed=changed)

    def forget(self) -> None:
        self.products.clear()

    def _products(self, way: Way, experiment: Experiment, inputs: Operands) -> list[Product] | Exception:
        """The products with parameters in one call. Ways that only split the products differently share the call."""
        heads = inputs.query.shape[1]
        key = experiment, heads, tuple(way.order.items()), way.form, way.shape, way.gives_causal
        if key not in self.products:
            try:
                self.products[key] = self._watched(way, inputs, heads, experiment.hidden)
            except NotTriedError:
                raise
            except Exception as error:
                self.products[key] = error
        return self.products[key]

    def _watched(self, way: Way, inputs: Operands, heads: int, hidden: float) -> list[Product]:
        tensors = dict(zip(QKV, inputs.heads, strict=True)) | {"x": inputs.query + hidden}
        arguments = self.options(way, inputs, heads, self.dtype)
        leaves = {
            n: way.layout.put(tensors[role]).to(self.device, self.dtype).requires_grad_() for role, n in way.order.items()
        }
        self.has_changed_mask = False
        with Products(self.module) as watched:
            result = self.call({**arguments, **leaves})
        output = result[0] if isinstance(result, tuple | list) else result
        if not isinstance(output, Tensor):
            raise ReturnError(type(output).__name__)
        gradients = torch.autograd.grad(output.square().sum(), list(leaves.values()), materialize_grads=True)
        on_cpu = tuple(gradient.cpu() for gradient in gradients)
        return [*watched.seen, Product("", output, output, on_cpu, self.has_changed_mask)]

    def describe(self, way: Way) -> str:
        assert way.inner is not None
        call = f"{type(self.module).__name__}.forward({_listed_arguments(self, way)})"
        heads = f"{way.inner.heads} heads" if way.inner.heads > 1 else "1 head"
        inputs = ", ".join(way.order.values())
        return "; ".join([f"{call}: {inputs} {way.layout.name}", heads, _mask_text(self.signature, way)])

    def idle_parameters(self, way: Way) -> list[str]:
        """Return the names of the matrices that are not used in a call without a mask."""
        used = {product.name for key, seen in self.products.items() if isinstance(seen, list) for product in seen}
        return [name for name, p in self.module.named_parameters() if p.ndim == 2 and name not in used]


@dataclass(frozen=True, eq=False)
class Product:
    """A product of an activation with a parameter.

    The last entry of a call is the output, with the gradients of the inputs, and whether the call changed its mask in place.
    """

    name: str
    factor: Tensor
    result: Tensor
    gradients: tuple[Tensor, ...] = ()
    has_changed_mask: bool = False


class _Recorder:
    """The method of ``Products``. In a direct subclass, torch would wrap it and import its compiler, which takes seconds."""

    names: dict[int, str]
    seen: list[Product]
    cores: list[tuple[Tensor, Tensor, Tensor | None]]
    softmaxes: list[Tensor | None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear):
            self._record([x for x in args if isinstance(x, Tensor) and x.ndim > 1], result)
        elif func.overloadpacket in (aten._softmax, aten._safe_softmax):  # what torch's softmax dispatches to
            self.softmaxes.append(args[0])
        elif func.overloadpacket is aten.exp:
            self.softmaxes.append(None)
        elif "scaled_dot_product" in func.name() and (kwargs or {}).get("attn_mask") is None and "backward" not in func.name():
            self.cores.append((args[0], args[1], None))
        return result

    def _record(self, factors: list[Tensor], result: Tensor) -> None:
        names = [self.names.get(factor.untyped_storage().data_ptr()) for factor in factors]
        activation = next((factor for factor, name in zip(factors, names, strict=True) if name is None), None)
        parameter = next((name for name in names if name is not None), None)
        if parameter is not None and activation is not None:
            self.seen.append(Product(parameter, activation, result))
        elif parameter is None and len(factors) > 1:
            self.cores.append((factors[-2], factors[-1], result))


class Products(_Recorder, TorchDispatchMode):
    """Record the products of activations with parameters of a module.

    They are recorded below autograd, because ``nn.MultiheadAttention`` and layers with bare parameters call no submodule.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.names = {p.untyped_storage().data_ptr(): name for name, p in module.named_parameters() if p.ndim > 1}
        self.seen: list[Product] = []
        self.cores: list[tuple[Tensor, Tensor, Tensor | None]] = []  # factors without parameters, and their product
        self.softmaxes: list[Tensor | None] = []  # their inputs; None: an exponential


# --- helpers


def _is_scaled(got: Tensor, want: Tensor) -> bool:
    """Return whether two tensors have the same numbers, in any order and shape, except for a factor."""
    one, other = (tensor.detach().cpu().double().unique() for tensor in (got, want))
    return one.numel() == other.numel() and _is_parallel(one, other)


def _is_parallel(one: Tensor, other: Tensor) -> bool:
    size = one.norm() * other.norm()
    return torch.allclose(one * other.norm(), other * one.norm(), rtol=0.0, atol=1e-5 * float(size) / one.numel() ** 0.5)


def _reaches(scores: Tensor, entered: Tensor) -> bool:
    """Return whether the scores enter the softmax as they are, or without those of later tokens."""
    if _is_scaled(entered, scores):
        return True
    L = entered.shape[-1]
    if entered.numel() != scores.numel() or entered.shape[-2] != L:
        return False
    earlier = torch.ones(L, L, dtype=torch.bool).tril()
    one, other = (tensor.detach().cpu().double().reshape(-1, L, L) for tensor in (entered, scores))
    return bool((one[:, ~earlier] < -1e3).all()) and _is_parallel(one[:, earlier], other[:, earlier])


def _shape_of_output(inputs: Operands) -> torch.Size:
    return torch.Size((*inputs.query.shape[:3], inputs.value.shape[-1]))


def _output_and_weights(result: Any, shape: torch.Size) -> tuple[Tensor, Tensor | None]:
    """The output, which has this shape, and the weights: the first other tensor of a tuple."""
    parts = [part for part in (result if isinstance(result, tuple | list) else (result,)) if isinstance(part, Tensor)]
    output = next((part for part in parts if part.shape == shape), None)
    if output is None:  # the width may differ
        output = next((part for part in parts if part.shape[:-1] == shape[:-1]), None)
    if output is None:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts) or type(result).__name__
        raise ReturnError(f"{shapes}, not {tuple(shape)}")
    return output, next((part for part in parts if part is not output), None)


def _sentence(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, ReturnError) else f"{type(error).__name__}: {first[:160]}"


def _function_name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _listed_arguments(subject: Subject, way: Way) -> str:
    """The arguments of a call, with their values if these are constant."""
    fixed = {name: value for name, value in way.fixed.items() if value is not None}
    return ", ".join(f"{name}={fixed[name]}" if name in fixed else name for name in subject.arguments(way))


def _mask_text(signature: Signature, way: Way) -> str:
    if signature.mask is None:
        return "no mask"
    if way.form is None or way.shape is None:
        return f"{signature.mask} not used"
    return f"{signature.mask} {way.shape.name}, {way.form.name}"


def _layer_layout(module: nn.Module) -> Layout:
    if getattr(module, "batch_first", True):
        return replace(signatures.WHOLE_WIDTH, name="(B, L, E)")
    take = signatures.WHOLE_WIDTH.take
    return Layout(
        "(L, B, E)", lambda x: signatures.WHOLE_WIDTH.put(x).transpose(0, 1), lambda x, heads: take(x.transpose(0, 1), heads)
    )


def _attributes(module: nn.Module, role: str) -> list[int]:
    names = (name for name in vars(module) if re.fullmatch(signatures.ARGUMENT_ROLES[role], name.lower()))
    return [value for name in names if isinstance(value := getattr(module, name), int) and not isinstance(value, bool)]


def _width(module: nn.Module) -> int:
    """The width of the inputs: a suitable attribute of the module, or else the smallest size of a matrix."""
    matrices = [p for p in module.parameters() if p.ndim == 2] or [p for p in module.parameters() if p.ndim > 1]
    sizes = [size for p in matrices for size in p.shape]
    return next((width for width in _attributes(module, "embed") if width in sizes), min(sizes))


def _head_counts(module: nn.Module, width: int) -> list[int]:
    counts = [count for count in _attributes(module, "heads") if count > 0 and width % count == 0]
    return counts[:1] or [count for count in (1, 2, 3, 4, 6, 8, 12, 16) if width % count == 0]


def _heads(products: list[Product], inner: Inner, width: int, experiment: Experiment) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value and the output of attention, from the products with parameters and the layer's output."""
    *before, last, output = products
    pieces = _projected_parts(before, inner, width)
    mixed = last.factor
    if len(pieces) != len(QKV):  # there may be no output projection
        pieces, mixed = _projected_parts([*before, last], inner, width), output.result
    if len(pieces) != len(QKV):
        seen = ", ".join(f"{product.name} {tuple(product.result.shape)}" for product in products[:-1])
        raise ValueError(f"expected three projections and an output, got: {seen or 'no product with a parameter'}")
    order = inner.order or _by_names([name for name, _ in pieces]) or tuple(range(len(QKV)))
    B, lengths = experiment.batch, (experiment.rows, experiment.keys, experiment.keys)
    heads = [_split(pieces[place][1], inner, B, length, width) for place, length in zip(order, lengths, strict=True)]
    is_output = mixed is output.result
    return (
        heads[0],
        heads[1],
        heads[2],
        _split(mixed, replace(inner, is_batch_first=True) if is_output else inner, B, experiment.rows, width),
    )


def _projected_parts(products: list[Product], inner: Inner, width: int) -> list[tuple[str, Tensor]]:
    """The projections. Fused projections are split."""
    pieces = []
    for name, result in ((entry.name, entry.result) for entry in products):
        count = result.shape[-1] // width
        if inner.is_per_head and count == len(QKV):
            split = result.unflatten(-1, (inner.heads, count, -1)).unbind(-2)
            pieces += [(name, part.flatten(-2)) for part in split]
        elif count > 1 and result.shape[-1] % width == 0:
            pieces += [(name, part) for part in result.split(width, dim=-1)]
        else:
            pieces.append((name, result))
    return pieces


def _by_names(names: list[str]) -> tuple[int, ...] | None:
    """The places of query, key and value among parameters, if their names show them."""
    patterns = [rf"(^|[^a-z]){letter}($|[^a-z])|{word}" for letter, word in (("q", "quer"), ("k", "key"), ("v", "val"))]
    places = [[place for place, name in enumerate(names) if re.search(pattern, name.lower())] for pattern in patterns]
    flat = tuple(matches[0] for matches in places if len(matches) == 1)
    return flat if len(set(flat)) == len(QKV) else None


def _split(piece: Tensor, inner: Inner, batch: int, length: int, width: int) -> Tensor:
    """Heads (B, H, length, D) from a projection with rows (B, length) or (length, B)."""
    size = width // inner.heads
    rows = piece.reshape(batch, length, -1) if inner.is_batch_first else piece.reshape(length, batch, -1).transpose(0, 1)
    return rows.unflatten(-1, (-1, size)).transpose(1, 2).detach().cpu()
