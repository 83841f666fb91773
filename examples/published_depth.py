"""Xiong et al. 2020: with pre-norm the gradients near the output shrink with depth, with post-norm they do not.

Claim (arXiv:2002.04745, Theorem 1): before training, the gradient of the second feed-forward matrix of the last of L layers, for the
loss of one position, has a norm of order d √(ln d) with post-norm and d √(ln d / L) with pre-norm. So log norm against log L has
slope 0 and −1/2.

Setting: ``DecoderLM`` of width d = 64, one head, ReLU, feed-forward of width d, variance 1/d (``init=lecun``), L from 4 to 128, random
tokens and targets, rows of 16. A seed draws model and rows. Its gradient is the mean norm over the last positions of 8 rows.

Limits: the paper's attention starts uniform (W_Q = W_K = 0) and ours does not. The theorem gives upper bounds. Two more settings are outside
of it: the mean loss of all positions, whose gradients can point the same way, and GPT-2's init, which divides what each layer
adds by √(2 L).

``python examples/published_depth.py`` takes minutes on one core.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from published import Record, markdown, run, slope, spread
from torch.nn.functional import cross_entropy

from minitx.config import TransformerConfig
from minitx.nn import DecoderLM

TOKENS, ROWS, LENGTH = 64, 8, 16
CASES = {
    ("pre", "lecun", "one position"): "-1/2",
    ("post", "lecun", "one position"): "0",
    ("pre", "lecun", "mean of all"): "none",
    ("post", "lecun", "mean of all"): "none",
    ("pre", "gpt2", "one position"): "none",
}
"""For each position of the norms, init and loss, the slope in the paper."""


def last_gradients(norm_position: str, init: str, num_layers: int, seed: int, width: int = 64) -> dict[str, float]:
    """Return the norm of the gradient of the last layer's second feed-forward matrix, for each loss."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": TOKENS,
        "embed_dim": width,
        "ffn_dim": width,
        "num_heads": 1,
        "num_layers": num_layers,
        "max_len": LENGTH,
    }
    plain = {"activation": "relu", "bias": False, "tie_embeddings": False, "init": init, "norm_position": norm_position}
    model = DecoderLM(TransformerConfig(**sizes, **plain))
    ids = torch.randint(TOKENS, (ROWS, LENGTH + 1))
    losses = cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")  # (ROWS, LENGTH)
    weight = model.blocks[-1].feedforward.down_proj.weight

    def norm(loss: torch.Tensor) -> float:
        return torch.autograd.grad(loss, weight, retain_graph=True)[0].norm().item()

    return {"one position": sum(map(norm, losses[:, -1])) / ROWS, "mean of all": norm(losses.mean())}


def measure(depths: Sequence[int] = (4, 8, 16, 32, 64, 128), seeds: int = 8, width: int = 64) -> Record:
    """Return the norms by case, each a list over the seeds of lists over ``depths``."""
    norms = {}
    for norm_position, init in dict.fromkeys(case[:2] for case in CASES):
        gradients = [[last_gradients(norm_position, init, depth, seed, width) for depth in depths] for seed in range(seeds)]
        for case in (case for case in CASES if case[:2] == (norm_position, init)):
            norms[", ".join(case)] = [[float(f"{by_loss[case[2]]:.5g}") for by_loss in row] for row in gradients]
    return {"depths": list(depths), "norms": norms}


def table(record: Record) -> str:
    """Return the table: medians over the seeds, and the slopes of the seeds."""
    depths, rows = record["depths"], list[list[str | float]]()
    for case, paper in CASES.items():
        norms = torch.tensor(record["norms"][", ".join(case)])
        slopes = [slope(depths, row) for row in norms.tolist()]
        rows.append([*case, *norms.quantile(0.5, dim=0).tolist(), spread(slopes), paper])
    headings = ["norm", "init", "loss", *(f"L = {depth}" for depth in depths), "slope (range of the seeds)", "paper"]
    return markdown(headings, rows)


QUICK = {"depths": (4, 16, 64), "seeds": 2, "width": 16}

if __name__ == "__main__":
    run("published_depth", measure, table, QUICK)
