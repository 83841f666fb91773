"""P1: training throughput on a CPU, one step forward, backward and AdamW, of other people's decoders against ours.

Both sides have the same architecture, number of parameters (those of both are printed; a peer without some biases meets ours
without them, norms apart), weights, batch and context; their losses agree before anything is timed. Both steps are the same
few lines: logits, ``F.cross_entropy`` (nanoGPT's own call of it), backward, fused AdamW over all parameters in one group, gradients dropped. Nobody has
dropout, a cache, a compiler or autocast; a peer's attention is torch's fused kernel, as ours is. What is left is what the two
libraries do around the same matrix products.

    python benchmarks/training_throughput.py [--nanogpt CHECKOUT]

nanoGPT is no package: its row is there where a checkout is given.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from measure import compare, row, table, write
from peers import Peer, check_equal, decoder, hugging_face, loss_of, nano_gpt, num_parameters, torch_encoder, x_transformers
from torch import Tensor, nn

WANTED = {"Hugging Face GPT-2": ">= 1.3", "x-transformers": ">= 1.2", "nanoGPT": ">= 1.05"}
TORCH = ">= 1.0"
SIZES = {"char": (65, 128, 4, 64, 12), "E 256": (65, 256, 4, 256, 8)}  # vocabulary, width, layers, context, batch


def training_step(module: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    """One step on the same batch, over and over."""
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def our_loss(peer: Peer, ids: Tensor, labels: Tensor) -> Tensor:
    return loss_of(peer.ours(ids), labels)


def peers_of(size: str, nanogpt: Path | None) -> Iterator[Peer]:
    vocab_size, width, layers, context, _ = SIZES[size]
    config = decoder(vocab_size, width, layers, context)
    yield hugging_face(config)
    yield x_transformers(config)
    yield torch_encoder(config)
    yield torch_encoder(dataclasses.replace(config, norm_position="post"))
    if nanogpt is not None:
        yield nano_gpt(config, nanogpt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    given = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for size in given.sizes:
        vocab_size, _, _, context, batch = SIZES[size]
        ids, labels = torch.randint(vocab_size, (2, batch, context)).unbind()
        for peer in peers_of(size, given.nanogpt):
            loss = check_equal(peer, ids, labels)
            counts = num_parameters(peer.module), num_parameters(peer.ours)
            assert abs(counts[0] / counts[1] - 1) < 0.01, counts
            theirs = training_step(peer.module, partial(peer.loss, ids, labels))
            ours = training_step(peer.ours, partial(our_loss, peer, ids, labels))
            found = compare(theirs, ours, pairs=given.pairs)
            more = {"a_parameters": counts[0], "b_parameters": counts[1], "loss": loss}
            more["b_tokens_per_second"] = round(batch * context / found["b_seconds"])
            rows.append(row(f"{size}: over {peer.name}", found, WANTED.get(peer.name, TORCH), **more))
            print(
                f"{size}, {peer.name}: {counts[0]} parameters there, {counts[1]} here, both with the loss {loss:.5f}",
                flush=True,
            )
    print("\n" + table(rows))
    title = "Training throughput on a CPU, float32: how many times as fast as others"
    about = {"target": "P1", "title": title, "threads": torch.get_num_threads(), "rows": rows}
    print(write("training_throughput", about))


if __name__ == "__main__":
    main()
