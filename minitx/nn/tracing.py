"""What surrounds a call: a compiler, a tracer, or transforms of ``torch.func``."""

from __future__ import annotations

import torch
from torch import Tensor


def transforms_around() -> list[str]:
    """Return the names of the transforms of ``torch.func`` around this call, outermost first: ``Grad``, ``Vmap``, ``Jvp`` …

    The compiler has its own transforms: call ``torch.compiler.is_compiling`` first.

    >>> torch.vmap(lambda x: x * len(transforms_around()))(torch.ones(2))
    tensor([1., 1.])
    """
    stack = torch._C._functorch.get_interpreter_stack()  # torch has no public way to see its transforms
    return [level.key().name for level in stack] if stack else []


def can_look(tensor: Tensor) -> bool:
    """Return whether the values of ``tensor`` can be read at no cost: on a CPU, outside of compilers, tracers and ``torch.func``."""
    return (
        type(tensor) is Tensor  # not FakeTensor, a subclass without values
        and tensor.device.type == "cpu"
        and not (torch.compiler.is_compiling() or torch.jit.is_tracing() or transforms_around())
    )
