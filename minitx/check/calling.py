"""Find the way to call a function, a layer or a model by trying. Argument names only decide the order of the tries."""

from __future__ import annotations

import copy
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # documented in torch's notes on extending it

T = TypeVar("T")
Device = torch.device | str
Roles = Mapping[str, str]
Module = TypeVar("Module", bound=nn.Module)

ROLE_NAMES = {
    "query": r"(\w_)?(q|qs|query|queries|query_states|x_q|q_in)",
    "key": r"(\w_)?(k|ks|key|keys|key_states|x_k|k_in)",
    "value": r"(\w_)?(v|vs|value|values|value_states|x_v|v_in)",
    "pixels": r"pixel_values|images?|imgs?|pixels",
    "target": r"decoder_(input_)?ids|tgt(_ids)?|target_ids",
    "x": r"(input_|token_)?ids|idx|tokens|xb?|xs|inputs?|hidden(_states)?|embeddings?|src|embeds?",
    "target_padding": r"decoder_(attention|key)_mask|tgt_key_padding_mask",
    "target_mask": r"tgt_mask",
    "padding": r"(src_)?(key_)?padding_mask|key_mask|pad_mask|pad|padding",
    "kept": r"attention_mask",
    "mask": r"m|mask|attn_mask|src_mask|\w+_mask|keep|allowed|visible",
    "causal": r"(is_)?causal",
    "width": r"d_?k|d_?head|head_dim|head_size",
    "heads": r"(num|n)_?heads?|heads|nhead|h|num_attention_heads",
    "embed": r"embed_(dim|size)|d_model|n_embd|dim|hidden_size|emb_dim|d_in|d_out|model_dim",
    "dropout": r"dropout(_p|_rate|_prob)?|p_drop",
    "cache": r"past_key_values|cache(_params)?|kv_cache|past(_kv)?|state|hidden",
}
"""Patterns of argument names. The role of an argument is the first whose pattern matches, and that no earlier argument has."""

QKV = ("query", "key", "value")
_REGISTRIES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class Arguments:
    """The arguments of a function, a class or a module.

    Attributes:
        required: those without a default. positional: those that cannot be passed by name.
        defaults: the defaults of the others.
        roles: the argument of each role, by ``ROLE_NAMES``.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    positional: tuple[str, ...]
    defaults: Mapping[str, Any]
    roles: Roles

    def named(self, *roles: str) -> str | None:
        """Return the argument with the first of these roles that there is."""
        return next((self.roles[role] for role in roles if role in self.roles), None)

    def role_of(self, name: str) -> str | None:
        """Return the role of an argument."""
        return next((role for role, other in self.roles.items() if other == name), None)


def read_arguments(called: Any) -> Arguments:
    """Read the arguments, through the wrappers of ``torch.compile`` and PEFT, too."""
    while True:
        function = called.forward if isinstance(called, nn.Module) else called
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # a builtin: its docstring begins with a signature
            text = (function.__doc__ or "").strip().split("->")[0]
            names = re.findall(r"(\w+)\s*(?:=[^,)]*)?[,)]", text)
            return _with_roles(names, dict.fromkeys(names[len(QKV) :]))
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        children = list(called.children()) if isinstance(called, nn.Module) else []
        get_base = getattr(called, "get_base_model", None)
        base = get_base() if callable(get_base) else children[0] if not named and len(children) == 1 else called
        if base is called:
            break
        called = base
    if not named and parameters:  # *inputs
        return _with_roles(["inputs"], {}, ["inputs"])
    defaults = {p.name: p.default for p in named if p.default is not p.empty}
    return _with_roles([p.name for p in named], defaults, [p.name for p in named if p.kind is p.POSITIONAL_ONLY])


def _with_roles(names: Sequence[str], defaults: Mapping[str, Any], positional: Sequence[str] = ()) -> Arguments:
    roles: dict[str, str] = {}
    for name in names:
        matching = (role for role, pattern in ROLE_NAMES.items() if role not in roles and re.fullmatch(pattern, name.lower()))
        if (role := next(matching, None)) is not None:
            roles[role] = name
    required = tuple(name for name in names if name not in defaults)
    return Arguments(tuple(names), required, tuple(positional), defaults, roles)


def read_adapter(call: Callable[..., Any], must: str, *roles: str) -> Arguments:
    """Return the arguments of an adapter after its first, the subject. They have these roles; the last may be left out.

    Raises:
        ValueError: it takes more or fewer. ``must`` shows what it must take.
    """
    given = read_arguments(call).names
    names = given[1:]
    if not given or len(roles) - len(names) not in (0, 1):
        raise ValueError(f"call={call.__name__} must take {must}, or no mask, got ({', '.join(given)})")
    return Arguments(names, names, names, {}, dict(zip(roles, names, strict=False)))


def ways(
    arguments: Arguments, inputs: Iterable[Roles], forms: Iterable[T], values: Callable[[str, T], Sequence[Any]]
) -> Iterator[tuple[Roles, T, dict[str, Any]]]:
    """Yield ways to call anything, the most likely first: the argument of each input, the form of the inputs, and other arguments.

    Args:
        inputs: the arguments to try for the inputs, by role. forms: the forms of the inputs to try, such as an order of axes.
        values: (another argument, form) -> the values to try for it, the most likely first. None of them: it is not passed.
    """
    for roles, form in product(inputs, forms):
        free = [name for name in arguments.names if name not in roles.values() and values(name, form)]
        numbered = [enumerate(values(name, form)) for name in free]
        for chosen in sorted(product(*numbered), key=lambda chosen: sum(place for place, _ in chosen)):
            yield roles, form, dict(zip(free, (value for _, value in chosen), strict=True))


def first_that_works(values: Iterable[T], call: Callable[[T], Any], faults: dict[str, None]) -> T | None:
    """Return the first value with which the call does not raise. ``faults`` collects the errors of the values before it."""
    for value in values:
        try:
            call(value)
        except Exception as error:
            faults[fault_text(error)] = None
        else:
            return value
    return None


def invoke(
    function: Any, arguments: Mapping[str, Any], positional: Sequence[str] = (), *, is_copied: bool = True
) -> tuple[Any, list[str]]:
    """Call with copies of all tensors, and return the result and the names of the arguments that the call changed in place."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    given = {**arguments, **(copies if is_copied else {})}
    listed = [given.pop(name) for name in positional if name in given]
    with warnings.catch_warnings(action="ignore"):  # ways that do not fit may warn
        result = function(*listed, **given)
    return result, [name for name, tensor in tensors.items() if not _is_same(copies[name], tensor)]


def _is_same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def copied(module: Module) -> Module:
    """Return a deep copy. An attribute that cannot be copied, such as a lock or a tensor with a graph, is shared with the original.

    >>> layer = nn.Linear(2, 3)
    >>> layer.last = layer.weight * 2  # copy.deepcopy(layer) raises RuntimeError
    >>> twin = copied(layer)
    >>> twin.weight is layer.weight, twin.last is layer.last
    (False, True)
    """
    with suppress(Exception):
        return copy.deepcopy(module)
    shared = {id(part): part for part in (*module.modules(), *module.parameters(), *module.buffers())}
    values = [value for part in module.modules() for name, value in vars(part).items() if name not in _REGISTRIES]
    return copy.deepcopy(module, {id(value): value for value in values if not _can_be_copied(value, shared)})


def _can_be_copied(value: Any, shared: dict[int, Any]) -> bool:
    with suppress(Exception):
        copy.deepcopy(value, dict(shared))
        return True
    return False


class _Dispatch:
    """The method of ``Watch``. In a direct subclass, torch would wrap it and import its compiler, which takes seconds."""

    computed: Callable[..., Any]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.computed(func, args, kwargs or {})


class Watch(_Dispatch, TorchDispatchMode):
    """Every function of ATen goes through ``computed``, below autograd."""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested results."""
    if isinstance(value, Tensor):
        yield value
    for part in parts_of(value):
        yield from tensors_of(part)


def parts_of(value: Any) -> Sequence[Any]:
    """Return the values of a mapping, a list or a tuple, and nothing of any other object."""
    return list(value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ())


class NotTriedError(Exception):
    """A case or a check cannot be tried. The message is the reason."""


class DoesNotApplyError(NotTriedError):
    """A case does not apply to this subject, so a graded exercise does not require it."""


def need(condition: Any, reason: str, error: type[NotTriedError] = NotTriedError) -> None:
    """Raise ``NotTriedError`` unless the condition holds."""
    if not condition:
        raise error(reason)


class ReturnError(ValueError):
    """The result of a call has another type or another shape than the output."""


class OutputShapeError(RuntimeError):
    """An output has another shape than its tokens: a fault of the subject, though the check raises it."""


def fault_text(error: Exception) -> str:
    """Return the class and the first line of an error."""
    line = next(iter(str(error).strip().splitlines()), "")[:160]
    return line if isinstance(error, ReturnError) else f"{type(error).__name__}: {line}" if line else type(error).__name__


def is_refusal(error: Exception) -> bool:
    """Return whether an error reports an unsupported call. Such an error is not a fault."""
    return isinstance(error, ValueError | NotImplementedError | TypeError | AssertionError)


def is_own(error: Exception) -> bool:
    """Return whether this package raised an error in its own code, and not in a call of the subject or in its backward pass."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    is_inside = all(name.startswith((f"{__package__}.", "torch")) and name != "torch.autograd" for name in names)
    is_of_subject = isinstance(error, OutputShapeError) or any(frame.f_code is invoke.__code__ for frame in frames)
    return is_inside and not is_of_subject


@dataclass(frozen=True)
class MaskForm:
    """The dtype, the meaning and the shape of a mask.

    Attributes:
        hides: whether True means that a token is hidden.
        axes: the axes B, H, L and S, with "1" for an axis of size 1 and "-" for a missing one. "NH" stands for one axis B·H.
        added: the number that is added to hidden scores; 0 is added to the others. None: the mask is not added.
    """

    dtype: torch.dtype = torch.bool
    hides: bool = False
    axes: str = "B1LS"
    added: float | None = None

    @property
    def kind(self) -> str:
        """Return the kind of mask: "cells", "shared" (by the batch) or "keys" (the same for all queries)."""
        return "keys" if self.axes[2] in "1-" else "shared" if self.axes[0] == "-" else "cells"

    def write(self, allowed: Tensor, heads: int = 1) -> Tensor:
        """Return the mask for ``allowed``, (B, 1, L, S) or (B, S), True = may attend."""
        if allowed.dim() == 2:
            allowed = allowed[:, None, None].expand(-1, -1, allowed.shape[1], -1)
        places: dict[str, Any] = {"-": 0, "1": slice(0, 1)}
        mask = allowed.expand(-1, heads, -1, -1)[tuple(places.get(axis, slice(None)) for axis in self.axes)]
        mask = mask.flatten(0, 1) if self.axes[0] == "N" else mask
        if self.added is not None:
            return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill(~mask, self.added)
        return (~mask if self.hides else mask).to(self.dtype)

    def __str__(self) -> str:
        axes = [axis for axis in self.axes.replace("NH", "N") if axis != "-"]
        shape = f"({', '.join(axes).replace('N', 'B·H')})"
        true = "True" if self.dtype == torch.bool else "1.0" if self.dtype.is_floating_point else "1"
        meaning = f"{true} = {'hide' if self.hides else 'keep'}" if self.added is None else "added, -inf = hide"
        return f"{shape}, {meaning}"
