"""Greedy decoding with a cache, one row: P8.

- GPT-2's shape with random weights over Hugging Face's ``generate`` with its default cache: same weights, same prompt, same ids; reading
  the prompt counts on both sides. And with bfloat16 weights, where the processor multiplies them, over Hugging Face in float32.
- The share of a token's time that reading weights takes: a sum over each matrix; every implementation must read them.
- A small model over a plain ``nn.Module`` of the same sizes with a preallocated cache and no checks, where only overhead counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, compare, measure, median_interval, parser, ratio_interval, row, seconds_of
from peers import Peer, decoder, hugging_face
from torch import Tensor, nn

from minitx.generation import generate
from minitx.nn import DecoderLM

VOCABULARY = 50257
NARROW = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def hugging_face_ids(peer: Peer, prompt: Tensor, new: int) -> Tensor:
    """What Hugging Face writes."""
    options: dict[str, Any] = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None}
    options |= {"attention_mask": torch.ones_like(prompt), "min_new_tokens": new, "max_new_tokens": new}
    with torch.no_grad():
        return peer.module.generate(prompt, **options)[0, prompt.shape[1] :]  # type: ignore[operator]


def our_ids(model: nn.Module, prompt: Tensor, new: int) -> Tensor:
    """What ours writes."""
    return generate(model, prompt, max_new_tokens=new, stop=())[0]


def checked(work: Callable[[], Tensor], wanted: Tensor) -> None:
    """``work``, as a function that ends the benchmark if it writes other ids than ``wanted``."""
    if not torch.equal(found := work(), wanted):
        raise SystemExit(f"error: other ids: {found.tolist()} instead of {wanted.tolist()}")


def token_seconds(model: nn.Module, prompt: Tensor, new: int = 9) -> float:
    """Median seconds between two of our tokens, without the first: it needs the whole prompt."""
    clock: list[float] = []
    generate(model, prompt, max_new_tokens=new, stop=(), on_token=lambda row, token: clock.append(time.perf_counter()))
    return median_interval([b - a for a, b in pairwise(clock)])["median"]


def large(pairs: int, new: int, start: int = 256) -> Iterator[Row]:
    """GPT-2's shape."""
    peer = hugging_face(decoder(VOCABULARY, 768, 12, start + new + 32))
    peer.module.eval()
    model, prompt = peer.ours.eval(), torch.randint(VOCABULARY, (1, start))
    label = f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M, {start} + {new} tokens"
    wanted = (">= 1.0", ">= 1.5") if new >= 256 else (None, None)  # the targets are for such texts
    theirs, ours = partial(hugging_face_ids, peer, prompt, new), partial(our_ids, model, prompt, new)
    ids = theirs()
    found = compare(partial(checked, theirs, ids), partial(checked, ours, ids), pairs=pairs, warm=1)
    speed = round(new / found["seconds"][1], 1)
    yield row("P8", "float32 over Hugging Face, equal ids", label, found, wanted[0], tokens_per_second=speed)
    matrices = [module.weight.detach() for module in model.modules() if isinstance(module, nn.Linear)]
    shares = [seconds_of(lambda: [m.sum() for m in matrices]) / token_seconds(model, prompt) for _ in range(pairs + 1)]
    share = ratio_interval(shares[1:])  # the first one warms up
    yield row("P8", "share of a token's time that reading the weights takes", label, share, None, "lower")
    if NARROW:
        model.to(torch.bfloat16)
        same = float((ours() == ids).float().mean())
        found = compare(theirs, ours, pairs=pairs, warm=1)
        yield row("P8", "bfloat16 weights over Hugging Face in float32", label, found, wanted[1], equal_ids=same)


class PlainBlock(nn.Module):
    """What one would write for this model alone: pre-norm, with the dropout layers that a model for training has."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2, self.drop = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(0.0)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.0))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        (B, L, E), y = x.shape, self.norm1(x)
        end = start + L
        q, k, v = (part(y).view(B, L, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        keys[:, :, start:end], values[:, :, start:end] = k, v
        out = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], is_causal=L > 1)
        x = x + self.drop(self.o(out.transpose(1, 2).reshape(B, L, E)))
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    """The whole model."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, room: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(room, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, caches: list[Tensor], start: int) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(start, start + ids.shape[1]))
        for block, (keys, values) in zip(self.blocks, caches, strict=True):
            x = block(x, keys, values, start)
        return self.head(self.norm(x))


def small(pairs: int, layers: int = 12, V: int = 512, E: int = 64, start: int = 64, new: int = 64) -> Iterator[Row]:
    """A prompt, then ``new`` steps of one token; the prompt is a hundredth of the time."""
    torch.set_num_threads(1)
    config = decoder(V, E, layers, start + new)
    ours, plain = DecoderLM(config).eval(), Plain(V, E, config.num_heads, layers, start + new).eval()
    prompt, token = torch.randint(V, (1, start)), torch.tensor([[7]])

    @torch.no_grad()
    def run_ours() -> None:
        cache = ours.make_cache(start + new)
        for ids in [prompt, *[token] * new]:
            ours(ids, cache=cache)

    @torch.no_grad()
    def run_plain() -> None:
        caches = [torch.zeros(2, 1, config.num_heads, start + new, E // config.num_heads) for _ in range(layers)]
        plain(prompt, caches, 0)
        for step in range(new):
            plain(token, caches, start + step)

    label = f"{layers} layers of width {E}, {new} tokens after {start}"
    yield row("P8", "a token over plain torch", label, compare(run_plain, run_ours, pairs=pairs), "<= 1.3")


def main() -> None:
    parse = parser(__doc__, ("P8",))
    parse.add_argument("--new", type=int, default=256, help="tokens that are decoded")
    given = parse.parse_args()
    measure("decode", given, {"P8": lambda: chain(large(given.pairs, given.new), small(given.pairs))})


if __name__ == "__main__":
    main()
