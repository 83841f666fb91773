"""An attention that shares no code with the package: plain loops, row by row. The judge of every other one.

It computes in the dtype of its inputs, so that run in float64 it is the reference, and run in a low precision it says
how much error that precision costs an honest implementation.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# primes where shapes matter; 6 query heads in 3 groups
B, H, HKV, L, S, D, DV = 2, 6, 3, 5, 7, 11, 13
FUSED_CPU = "_scaled_dot_product_flash_attention_for_cpu"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def naive(query, key, value, visible=None, *, scale, bias=None, softcap=None, sinks=None):
    """(output, weights) of one attention call; ``visible`` and ``bias`` are (B, H, L, S)."""
    batch, heads, rows, _ = query.shape
    group = heads // key.shape[1]
    outputs, weights = [], []
    for b in range(batch):
        for h in range(heads):
            keys, values = key[b, h // group], value[b, h // group]
            for i in range(rows):
                js = [j for j in range(key.shape[2]) if visible is None or visible[b, h, i, j]]
                row = query.new_zeros(key.shape[2])
                if not js:
                    outputs.append(query.new_zeros(value.shape[-1]))
                    weights.append(row)
                    continue
                z = (keys[js] @ query[b, h, i]) * scale
                if softcap is not None:
                    z = softcap * torch.tanh(z / softcap)
                if bias is not None:
                    z = z + bias[b, h, i, js]
                logits = z if sinks is None else torch.cat((z, sinks[h : h + 1]))
                exponentials = torch.exp(logits - logits.max().detach())
                p = (exponentials / exponentials.sum())[: len(js)]
                outputs.append(p @ values[js])
                weights.append(row.index_put((torch.tensor(js),), p))
    out = torch.stack(outputs).reshape(batch, heads, rows, -1)
    return out, torch.stack(weights).reshape(batch, heads, rows, -1)


def grids(predicate, shape=(B, H, L, S)):
    """(B, H, L, S) bool from a rule over plain numbers; ``t`` is the position of query row i among the keys."""
    b_, h_, l_, s_ = shape
    cells = [predicate(b, h, i + s_ - l_, j, i) for b in range(b_) for h in range(h_) for i in range(l_) for j in range(s_)]
    return torch.tensor(cells).reshape(shape)


def rounding_band(dtype, reference, size=1.0):
    """A few units in the last place of the largest entry, or of the terms (``size``) that nearly cancel in it."""
    return 4 * torch.finfo(dtype).eps * max(1.0, size, reference.abs().max().item())


def cancelling(leaves, cotangent, visible, scale):
    """By name, the size of the terms of which a gradient of the scores is a difference.

    It is p (dp - Σ p dp): zero for a row with one key, where each dp is as large as a dot product; times scale and key, or query.
    """
    query, key, value = (leaves[name].detach().double() for name in ("query", "key", "value"))
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    largest_dp = (cotangent.double() @ value.mT).masked_fill(~visible, 0.0).abs().max().item()
    return {
        "query": abs(scale) * largest_dp * key.abs().max().item(),
        "key": abs(scale) * largest_dp * query.abs().max().item(),
    }


def tolerance(dtype, reference, low, size=1.0):
    """Twice the error of an independent run in ``dtype`` plus a rounding band.

    Nothing here judges float64 from above; its error is taken from a float32 run, in proportion to the two eps.
    """
    error = (low.double() - reference).abs().max().item()
    if dtype == torch.float64:
        error *= torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return 2 * error + rounding_band(dtype, reference, size)


def assert_as_good_as_naive(got, reference, low, dtype, name="", size=1.0):
    """``got`` is as near to the float64 ``reference`` as the naive run ``low`` in the same dtype, twice over."""
    assert got.dtype == dtype, name
    assert torch.isfinite(got).all(), name
    error, allowed = (got.double() - reference).abs().max().item(), tolerance(dtype, reference, low, size)
    assert error <= allowed, f"{name}: error {error:.3g} exceeds {allowed:.3g}"


def low_dtype(dtype):
    """In which dtype the independent run is made."""
    return torch.float32 if dtype == torch.float64 else dtype


class OpRecorder(TorchDispatchMode):
    """The names of the kernels that run inside ``with``."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    @property
    def fused(self):
        return FUSED_CPU in self.ops
