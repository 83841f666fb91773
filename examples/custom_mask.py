"""Write your own mask: the strided pattern of Sparse Transformers.

A mask is a rule: may query i attend to key j? It is written with index tensors that broadcast. In the pattern of Child et al. 2019
(arXiv:1904.10509, §4.2), a query sees the last ``stride`` positions, and every ``stride``-th position before them. ``Strided`` is the
rule for the second part. ``&`` and ``|`` combine it with two rules of minitx. The mask works on every backend that takes masks, in
training and with a cache.

    python examples/custom_mask.py

This prints the mask as a grid, the error of each backend against a float64 reference (or why it cannot compute the call), and the
largest difference between reading a row in one call and reading it in pieces with a cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minitx.config import TransformerConfig
from minitx.nn import Causal, DecoderLM, KVCache, Mask, SlidingWindow, explain_backends, scaled_dot_product_attention


@dataclass(frozen=True, eq=False)
class Strided(Mask):
    """A query sees keys at distances that are multiples of ``step``. Query row i has position i + offset, with offset = S - L."""

    step: int

    def visible(self, batch: Tensor, head: Tensor, row: Tensor, key: Tensor, offset: int) -> Tensor:
        return (row + offset - key) % self.step == 0


def sparse(stride: int) -> Mask:
    """Return the strided mask of Child et al., with both of its parts in each head."""
    return Causal() & (SlidingWindow(stride) | Strided(stride))


def errors(mask: Mask) -> dict[str, float | str]:
    """Return each backend's largest error in float32 against ``math`` in float64, or why it cannot compute the call."""
    torch.manual_seed(0)
    # grouped heads (6 and 3), and 4 keys before the first query
    query, key, value = torch.randn(2, 6, 37, 16), torch.randn(2, 3, 41, 16), torch.randn(2, 3, 41, 16)
    exact = scaled_dot_product_attention(query.double(), key.double(), value.double(), mask, backend="math")
    results: dict[str, float | str] = {}
    for line in explain_backends(query, key, value, mask):
        if line.can:
            out = scaled_dot_product_attention(query, key, value, mask, backend=line.name)
            results[line.name] = (out - exact).abs().max().item()
        else:
            results[line.name] = line.reason
    return results


@torch.no_grad()
def cache_difference(mask: Mask) -> float:
    """Return the largest difference of the logits of 24 tokens between one call and calls with 9, 1, 1 and 13 tokens and a cache."""
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=31, embed_dim=24, num_heads=4, num_layers=2, max_len=24)
    model, input_ids = DecoderLM(config).double().eval(), torch.randint(31, (2, 24))
    cache = KVCache(capacity=24, num_layers=2)
    pieces = [model(piece, mask=mask, cache=cache) for piece in input_ids.split([9, 1, 1, 13], dim=1)]
    return (torch.cat(pieces, dim=1) - model(input_ids, mask=mask)).abs().max().item()


def main() -> dict[str, float | str]:
    """Print and return the results."""
    mask = sparse(4)
    print(mask.grid(12))
    results = errors(mask)
    for name, error in results.items():
        print(f"{name:15}", error if isinstance(error, str) else f"{error:.1e}")
    results["cache"] = cache_difference(mask)
    print(f"with a cache, largest difference of the logits: {results['cache']:.1e}")
    return results


if __name__ == "__main__":
    main()
