"""P8: greedy decoding with a cache on a CPU, GPT-2's shape with random weights, equal ids.

Over Hugging Face: ``generate`` of ``GPT2LMHeadModel`` (torch's fused attention, its default cache, no end token) against
``minitx.generation.generate``, same weights, same prompt; reading the prompt counts on both sides, and every call's ids must be
the same. Over no cache: ours against ours with ``use_cache=False``, which reads the whole text again for each token. That takes
minutes for a whole answer, so one token is timed on both sides, that after 384 others, the middle of 256 + 256; reading the
prompt does not count there.

A token of batch 1 reads every weight once: at float32 no implementation can be faster than memory. So a further row holds the
bound: the time of a sum over each of the model's matrices, which reads them and nothing else, over our time for a token.

With fewer new tokens than 256 the rows are judged by no target and go to a file of their own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from measure import compare, compared, in_pairs, judged, median_interval, ratio_interval, row, seconds_of, table, turns, write
from peers import Peer, decoder, hugging_face
from torch import Tensor, nn

from minitx.generation import generate

WANTED = (">= 2", ">= 15")  # over Hugging Face, over no cache
VOCABULARY = 50257


def hugging_face_ids(peer: Peer, prompt: Tensor, new: int) -> Tensor:
    """What Hugging Face writes."""
    options: dict[str, Any] = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        found = peer.module.generate(  # type: ignore[operator]
            prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=new, max_new_tokens=new, **options
        )
    return found[0, prompt.shape[1] :]


def our_ids(model: nn.Module, prompt: Tensor, new: int, use_cache: bool = True) -> Tensor:
    """What ours writes."""
    return generate(model, prompt, max_new_tokens=new, use_cache=use_cache, stop=())[0]


def same(a: Callable[[], Tensor], b: Callable[[], Tensor]) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Both, each of which ends the benchmark if it ever writes other ids than ``a`` wrote first."""
    wanted = a()

    def checked(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            found = work()
            if not torch.equal(found, wanted):
                raise SystemExit(f"error: other ids: {found.tolist()} instead of {wanted.tolist()}")
            return found

        return run

    return checked(a), checked(b)


def reading_bound(model: nn.Module) -> Callable[[], None]:
    """A sum over each matrix: what a token cannot do without."""
    matrices = [m.weight.detach() for m in model.modules() if isinstance(m, nn.Linear)]

    def run() -> None:
        for matrix in matrices:
            matrix.sum()

    return run


def token_seconds(model: nn.Module, prompt: Tensor, new: int, use_cache: bool = True) -> float:
    """Median seconds between two tokens of ours; the first, which needs the whole prompt, is left out."""
    clock: list[float] = []
    note = lambda row, token: clock.append(time.perf_counter())  # noqa: E731
    generate(model, prompt, max_new_tokens=new, stop=(), use_cache=use_cache, on_token=note)
    return median_interval([b - a for a, b in pairwise(clock)])["median"]


def bound_row(model: nn.Module, prompt: Tensor, pairs: int) -> dict[str, Any]:
    """Seconds of reading over those of a token of ours: the share of the time that no one can save."""
    bare = reading_bound(model)
    bare()
    a, b = in_pairs(lambda: seconds_of(bare), lambda: token_seconds(model, prompt, 9), pairs)
    share = ratio_interval([x / y for x, y in zip(a, b, strict=True)])
    seconds = {"a_seconds": median_interval(a)["median"], "b_seconds": median_interval(b)["median"]}
    return judged("reading every weight once / a token of ours", share, None, **seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    name, wanted = ("decoding", WANTED) if given.new >= 256 else ("decoding_short", (None, None))
    torch.manual_seed(0)
    context = given.prompt + given.new + 32
    prompt = torch.randint(VOCABULARY, (1, given.prompt))
    rows = []
    peer = hugging_face(decoder(VOCABULARY, given.width, given.layers, context))
    peer.module.eval()
    sides = same(lambda: hugging_face_ids(peer, prompt, given.new), lambda: our_ids(peer.ours, prompt, given.new))
    found = compare(*sides, pairs=given.pairs, warm=1)
    speed = {"b_tokens_per_second": round(given.new / found["b_seconds"], 1)}
    size = f"{sum(p.numel() for p in peer.ours.parameters()) / 1e6:.0f}M"
    rows.append(row(f"{size}, {given.prompt} + {given.new} tokens: over Hugging Face", found, wanted[0], **speed))
    rows.append(bound_row(peer.ours, prompt, given.pairs))
    print(table(rows), flush=True)
    middle = torch.randint(VOCABULARY, (1, given.prompt + given.new // 2))
    if not torch.equal(our_ids(peer.ours, middle, 2, use_cache=False), our_ids(peer.ours, middle, 2)):
        raise SystemExit("error: other ids without a cache")
    blocks = [
        (side, token_seconds(peer.ours, middle, 2 if side == 0 else 9, use_cache=side == 1)) for side in turns(given.pairs)
    ]
    rows.append(row(f"{size}, a token after {middle.shape[1]}: over no cache", compared(blocks), wanted[1]))
    print(table(rows[-1:]))
    title = "Greedy decoding with a cache on a CPU, float32, one row, equal ids"
    print(write(name, {"target": "P8", "title": title, "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
