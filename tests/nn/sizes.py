"""Sizes and small helpers that several tests of attention share. The judge is ``minitx.check.reference``."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minitx.config import TransformerConfig
from minitx.nn.models import MODELS

# primes where shapes matter; 6 query heads in 3 groups
B, H, HKV, L, S, D, DV = 2, 6, 3, 5, 7, 11, 13
FUSED_CPU = "_scaled_dot_product_flash_attention_for_cpu"


def grids(predicate, shape=(B, H, L, S)):
    """(B, H, L, S) bool from a rule over plain numbers; ``t`` is the position of query row i among the keys."""
    b_, h_, l_, s_ = shape
    cells = [predicate(b, h, i + s_ - l_, j, i) for b in range(b_) for h in range(h_) for i in range(l_) for j in range(s_)]
    return torch.tensor(cells).reshape(shape)


VOCAB, LEARNED_APART = 13, ("attn_bias.weight", "sinks", "log_scale")


def small_model(**options):
    """Weights large enough that every path matters, learned numbers that start alike drawn apart; float64."""
    sizes = {"vocab_size": VOCAB, "embed_dim": 12, "num_heads": 3, "num_layers": 2, "max_len": 31, "init": "lecun"}
    generator = torch.Generator().manual_seed(0)
    config = TransformerConfig(**{**sizes, **options})
    network = MODELS[config.architecture](config, generator=generator).double()
    for name, parameter in network.named_parameters():
        if name.endswith(LEARNED_APART):
            nn.init.normal_(parameter, generator=generator)
    return network


def tokens(*shape):
    return torch.randint(1, VOCAB, shape)


def in_pieces(network, ids, lengths, cache, **described):
    """The logits of ``ids`` read piece by piece; ``described`` tensors (B, L) are split alike."""
    split = {name: tensor.split(lengths, dim=1) for name, tensor in described.items()}
    with torch.no_grad():
        pieces = [
            network(piece, cache=cache, **{name: parts[i] for name, parts in split.items()})
            for i, piece in enumerate(ids.split(lengths, dim=1))
        ]
    return torch.cat(pieces, dim=1)


def assert_same(got, want, tolerance=1e-12):
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def assert_same_with_gradients(got, want, leaves, tolerance=1e-12):
    """Equal, and so are the gradients of one random sum of them."""
    cotangent = torch.randn_like(want)
    answers = [(out, *torch.autograd.grad(out, leaves, cotangent, retain_graph=True)) for out in (got, want)]
    for ours, theirs in zip(*answers, strict=True):
        assert_same(ours, theirs, tolerance)


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
