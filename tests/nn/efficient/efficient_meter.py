"""Counts what a computation costs: operations and bytes, never seconds."""

import math
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Meter(TorchDispatchMode):
    """``cells``: elements written by all kernels; ``peak``: most bytes alive at once; ``largest``: elements of one tensor."""

    def __init__(self):
        super().__init__()
        self.cells = self.peak = self.live = self.largest = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in given:  # neither a view nor in place
                storage = leaf.untyped_storage()
                self.cells += leaf.numel()
                self.largest = max(self.largest, leaf.numel())
                if storage not in self.known:
                    self.known.add(storage)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _forget(self, nbytes):
        self.live -= nbytes


def measure(run):
    """The cost of ``run()``: flops of matrix products, cells, peak bytes, largest tensor."""
    with FlopCounterMode(display=False) as flops, Meter() as meter:
        run()
    return {"flops": flops.get_total_flops(), "cells": meter.cells, "peak": meter.peak, "largest": meter.largest}


def exponent(sizes, costs):
    """The least-squares slope of ln cost over ln size: 1 is linear, 2 quadratic."""
    x, y = ([math.log(number) for number in numbers] for numbers in (sizes, costs))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return products / sum((a - mean_x) ** 2 for a in x)
