"""Find the way to call an attention function: the roles of its arguments, the order of axes, and the meaning of True in the mask."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from minitx.check.experiments import HEADS, WIDTH

ARGUMENT_ROLES = {
    "query": r"(\w_)?(q|qs|query|queries|query_states|x_q|q_in)",
    "key": r"(\w_)?(k|ks|key|keys|key_states|x_k|k_in)",
    "value": r"(\w_)?(v|vs|value|values|value_states|x_v|v_in)",
    "x": r"x|xs|inputs?|hidden(_states)?|embeddings?|src|embeds?",
    "padding": r"(src_)?(key_)?padding_mask|key_mask|pad_mask|pad|padding",
    "mask": r"m|mask|attn_mask|attention_mask|src_mask|\w+_mask|keep|allowed|visible",
    "causal": r"(is_)?causal",
    "width": r"d_?k|d_?head|head_dim|head_size",
    "heads": r"(num|n)_?heads?|heads|nhead|h|num_attention_heads",
    "embed": r"embed_(dim|size)|d_model|n_embd|dim|hidden_size|emb_dim|d_in|d_out|model_dim",
    "dropout": r"dropout(_p|_rate|_prob)?|p_drop",
}
"""Patterns of argument names. The role is the first whose pattern matches."""

QKV = ("query", "key", "value")


@dataclass(frozen=True)
class MaskForm:
    """The meaning of a mask's values.

    Attributes:
        name: a readable name.
        make: makes the mask from a bool tensor, True = may attend.
        polarity: "keep", "hide" or "added".
        again: makes another mask with the same meaning, which must give the same output. None: there is none.
    """

    name: str
    make: Callable[[Tensor], Tensor]
    polarity: str
    again: Callable[[Tensor], Tensor] | None = None


def _hide_by_adding(number: float) -> Callable[[Tensor], Tensor]:
    return lambda allowed: torch.zeros(allowed.shape, dtype=torch.float64, device=allowed.device).masked_fill(~allowed, number)


FORMS = (
    MaskForm("True = keep", lambda allowed: allowed, "keep"),
    MaskForm("1 = keep", lambda allowed: allowed.int(), "keep"),
    MaskForm("1.0 = keep", lambda allowed: allowed.double(), "keep"),
    MaskForm("added, -inf = hide", _hide_by_adding(-torch.inf), "added", again=_hide_by_adding(-1e9)),
    MaskForm("True = hide", lambda allowed: ~allowed, "hide"),
    MaskForm("1.0 = hide", lambda allowed: (~allowed).double(), "hide"),
)


@dataclass(frozen=True)
class MaskShape:
    """The shape of a mask: a function that makes it from (B, 1, L, S), and the kind of mask that it can express (``HeadSizes.mask``)."""

    name: str
    make: Callable[[Tensor, int], Tensor]
    kind: str = "cells"


FOUR_AXES = (
    MaskShape("(B, 1, L, S)", lambda allowed, heads: allowed),
    MaskShape("(B, H, L, S)", lambda allowed, heads: allowed.expand(-1, heads, -1, -1)),
    MaskShape("(B, L, S)", lambda allowed, heads: allowed[:, 0]),
    MaskShape("(L, S)", lambda allowed, heads: allowed[0, 0], "shared"),
    MaskShape("(B, S)", lambda allowed, heads: allowed[:, 0, 0], "keys"),
)
THREE_AXES = (
    MaskShape("(B, L, S)", lambda allowed, heads: allowed.expand(-1, heads, -1, -1).flatten(0, 1)),
    MaskShape("(L, S)", lambda allowed, heads: allowed[0, 0], "shared"),
    MaskShape("(B, S)", lambda allowed, heads: allowed[:, 0, 0].repeat_interleave(heads, dim=0), "keys"),
)
LAYER_AXES = (*FOUR_AXES[:3], MaskShape("(B·H, L, S)", THREE_AXES[0].make), *FOUR_AXES[3:])
MATRICES = (MaskShape("(L, S)", lambda allowed, heads: allowed[:, 0]),)  # one call for each sequence and head
PADDING = (
    MaskShape("(B, S)", lambda allowed, heads: allowed[:, 0, 0], "keys"),
    MaskShape("(B, 1, 1, S)", lambda allowed, heads: allowed[:, :, :1], "keys"),
)


@dataclass(frozen=True)
class Layout:
    """The order of the axes of query, key and value. Inside the checker they are (B, H, L, D).

    Attributes:
        put: converts (B, H, L, D) to the layout.
        take: converts the layout to (B, H, L, D), given the number of heads.
        shapes: the shapes of masks to try.
    """

    name: str
    put: Callable[[Tensor], Tensor]
    take: Callable[[Tensor, int], Tensor]
    shapes: Sequence[MaskShape] = FOUR_AXES


HEADS_FIRST = Layout("(B, H, L, D)", lambda x: x, lambda x, heads: x)
AXES_3 = Layout("(B, L, D)", lambda x: x.flatten(0, 1), lambda x, heads: x.unflatten(0, (-1, heads)), THREE_AXES)
LENGTH_FIRST = Layout("(B, L, H, D)", lambda x: x.transpose(1, 2), lambda x, heads: x.transpose(1, 2))
AXES_2 = Layout("(L, D)", lambda x: x, lambda x, heads: x, MATRICES)
WHOLE_WIDTH = Layout(
    "(B, L, H·D)",
    lambda x: x.transpose(1, 2).flatten(2),
    lambda x, heads: x.unflatten(2, (heads, -1)).transpose(1, 2),
)
LAYOUTS = (HEADS_FIRST, AXES_3, LENGTH_FIRST, AXES_2)


@dataclass(frozen=True)
class Signature:
    """The arguments of a function, and their roles according to their names.

    Attributes:
        roles: the role of each argument that has one. No role occurs twice.
        required: the arguments without a default.
        names: the names of all arguments.
        positional: arguments that cannot be passed by name.
        switched_on: arguments whose default is True.
    """

    roles: Mapping[str, str]
    required: tuple[str, ...]
    names: tuple[str, ...]
    positional: tuple[str, ...] = ()
    switched_on: tuple[str, ...] = ()

    def named(self, role: str) -> str | None:
        """Return the argument with this role."""
        return next((name for name, its_role in self.roles.items() if its_role == role), None)

    @property
    def mask(self) -> str | None:
        """Return the argument for a mask, or else the argument for padding."""
        return self.named("mask") or self.named("padding")

    @property
    def is_padding(self) -> bool:
        """Return whether the mask is for padding only."""
        return self.named("mask") is None and self.named("padding") is not None

    def orders(self) -> Iterator[dict[str, str]]:
        """Yield possible roles of the inputs: by their names, or else every order of the first three arguments."""
        named = {role: name for role in QKV if (name := self.named(role))}
        x = self.named("x")
        if len(named) == len(QKV):
            yield named
        elif x is not None:
            yield {"x": x}
        elif len(self.required) >= len(QKV):
            free = [name for name in self.required if self.roles.get(name) in (None, *QKV)][: len(QKV)]
            if len(free) == len(QKV):
                yield from (dict(zip(order, free, strict=True)) for order in permutations(QKV))

    def unknown(self) -> list[str]:
        """Return the required arguments that are not inputs and have no known meaning."""
        inputs = {name for order in self.orders() for name in order.values()}
        return [name for name in self.required if name not in inputs and self.roles.get(name) is None]

    def fixed(self, order: Mapping[str, str], heads: int, width: int) -> dict[str, Any] | None:
        """Return values for all other required arguments, or None if one has no known meaning."""
        known = {
            "heads": heads,
            "width": width,
            "embed": heads * width,
            "dropout": 0.0,
            "mask": None,
            "padding": None,
            "causal": False,
        }
        values = {}
        for name in self.required:
            if name not in order.values():
                if self.roles.get(name) not in known:
                    return None
                values[name] = known[self.roles[name]]
        return values


def read_signature(function: Callable[..., Any]) -> Signature:
    """Read the signature of a function, class or module. The names of the arguments determine their roles."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except ValueError:  # a builtin: its docstring begins with a signature
        names = re.findall(r"(\w+)\s*(?:=[^,)]*)?[,)]", (function.__doc__ or "").strip().split("->")[0])
        return _signature(names, tuple(names[: len(QKV)]))
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)]
    positional = tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY)
    signature = _signature([p.name for p in named], tuple(p.name for p in named if p.default is p.empty), positional)
    return replace(signature, switched_on=tuple(p.name for p in named if p.default is True))


def _signature(names: Sequence[str], required: tuple[str, ...], positional: tuple[str, ...] = ()) -> Signature:
    roles: dict[str, str] = {}
    for name in names:
        role = next((role for role, pattern in ARGUMENT_ROLES.items() if re.fullmatch(pattern, name.lower())), None)
        if role is not None and role not in roles.values():
            roles[name] = role
    return Signature(roles, required, tuple(names), positional)


def instance_of(cls: type[Any]) -> tuple[Any, str]:
    """Return an instance of a class, and the call that made it. Arguments named like widths and numbers of heads get values.

    Raises:
        ValueError: the class needs an argument with another name.
    """
    signature = read_signature(cls)
    arguments = signature.fixed({}, HEADS, WIDTH)
    if arguments is None:
        unknown = [
            name for name in signature.required if signature.roles.get(name) not in ("heads", "width", "embed", "dropout")
        ]
        raise ValueError(
            f"{cls.__name__} cannot be created: no value is known for {', '.join(unknown)}; "
            f"pass an instance: write layer = {cls.__name__}(...) into the file, and check FILE.py:layer"
        )
    return cls(**arguments), f"{cls.__name__}({', '.join(f'{name}={value}' for name, value in arguments.items())})"


def chosen_forms(mask: str | None) -> tuple[MaskForm, ...]:
    """Return the forms of masks that ``mask="keep"`` or ``"hide"`` allows."""
    return FORMS if mask is None else tuple(form for form in FORMS if form.polarity == mask)
