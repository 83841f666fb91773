"""What our Python costs beside plain torch on a CPU: a decoding step of a small model, and attention under a mask (P12).

**A decoding step.** 12 layers of width 64, 4 heads, one row, 64 tokens after a prompt of 64: ours with its cache, and the same sizes as a
plain ``nn.Module`` with a preallocated cache and no checks. Almost all of such a step is what Python and torch's dispatcher do.
Target: at most 1.3 of the plain model's time.

**Attention under a mask.** ``scaled_dot_product_attention`` with ``Causal() & Padding(...)``, as the 12 layers of a model share it, beside
torch's bare kernel with the same mask as a dense bool tensor; forward, and forward and backward. Ours hides NaN in padding and
gives zero for empty rows. Target: at most 1.10.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measure import compare, row, table, write
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn import Causal, DecoderLM, Padding, scaled_dot_product_attention

V, E, H, LAYERS, ROOM, PROMPT, NEW = 512, 64, 4, 12, 256, 64, 64
MASKED = ((4, 8, 128, 32), (4, 8, 256, 32), (2, 8, 512, 64), (1, 8, 1024, 64))


class PlainAttention(nn.Module):
    """What one would write for this model alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        B, L, _ = x.shape
        end = start + L
        q = self.q(x).view(B, L, H, E // H).transpose(1, 2)
        keys[:, :, start:end] = self.k(x).view(B, L, H, E // H).transpose(1, 2)
        values[:, :, start:end] = self.v(x).view(B, L, H, E // H).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], is_causal=L > 1)
        return self.o(out.transpose(1, 2).reshape(B, L, E))


class PlainBlock(nn.Module):
    """Pre-norm, with the dropout layers that a model for training has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.drop = nn.LayerNorm(E), nn.LayerNorm(E), PlainAttention(), nn.Dropout(0.0)
        self.mlp = nn.Sequential(nn.Linear(E, 4 * E), nn.GELU(), nn.Linear(4 * E, E), nn.Dropout(0.0))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), keys, values, start))
        return x + self.mlp(self.norm2(x))


class Plain(nn.Module):
    """The whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(V, E), nn.Embedding(ROOM, E)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(E), nn.Linear(E, V, bias=False)

    def forward(self, ids: Tensor, caches: list[tuple[Tensor, Tensor]], start: int) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(start, start + ids.shape[1]))
        for block, (keys, values) in zip(self.blocks, caches, strict=True):
            x = block(x, keys, values, start)
        return self.head(self.norm(x))


def decoding() -> tuple[Callable[[], object], Callable[[], object]]:
    """(plain, ours): a prompt, then ``NEW`` steps of one token; the prompt is a hundredth of the time."""
    ours = DecoderLM(TransformerConfig(vocab_size=V, embed_dim=E, num_heads=H, num_layers=LAYERS, max_len=ROOM)).eval()
    plain = Plain().eval()
    prompt, token = torch.randint(V, (1, PROMPT)), torch.tensor([[7]])

    @torch.no_grad()
    def run_ours() -> None:
        cache = ours.make_cache(PROMPT + NEW)
        ours(prompt, cache=cache)
        for _ in range(NEW):
            ours(token, cache=cache)

    @torch.no_grad()
    def run_plain() -> None:
        caches = [(torch.zeros(1, H, ROOM, E // H), torch.zeros(1, H, ROOM, E // H)) for _ in range(LAYERS)]
        plain(prompt, caches, 0)
        for step in range(NEW):
            plain(token, caches, PROMPT + step)

    return run_plain, run_ours


def masked(shape: tuple[int, int, int, int], *, backward: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """(bare, ours) for ``LAYERS`` calls under one mask, which ours lowers once."""
    B, heads, L, D = shape
    q, k, v = (torch.randn(B, heads, L, D, requires_grad=backward) for _ in range(3))
    key_mask = torch.arange(L)[None] < torch.linspace(L // 2, L, B).long()[:, None]
    dense = (Causal() & Padding(key_mask)).dense(L, L).clone()

    def finish(out: Tensor) -> None:
        if backward:
            out.sum().backward()

    def ours() -> None:
        mask = Causal() & Padding(key_mask)
        for _ in range(LAYERS):
            finish(scaled_dot_product_attention(q, k, v, mask))

    def bare() -> None:
        for _ in range(LAYERS):
            finish(F.scaled_dot_product_attention(q, k, v, attn_mask=dense))

    return bare, ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    common = {"threads": 1, "pairs": given.pairs}
    rows = [
        row(
            f"12 layers, width 64, {NEW} tokens after {PROMPT}: ours / plain torch",
            compare(*decoding(), pairs=given.pairs),
            "<= 1.3",
        )
    ]
    print(table(rows), flush=True)
    print(write("decode_step_cpu", {"target": "P12", "title": "A decoding step beside plain torch", "rows": rows, **common}))
    rows = []
    for shape in MASKED:
        for backward in (False, True):
            name = f"B, H, L, D = {shape}, forward{' and backward' * backward}"
            rows.append(row(name, compare(*masked(shape, backward=backward), pairs=given.pairs, block=0.3), "<= 1.10"))
            print(table(rows[-1:]), flush=True)
    title = "Causal attention with padding: ours / torch's kernel with the same dense mask"
    print(write("masked_attention_cpu", {"target": "P12", "title": title, "rows": rows, **common}))


if __name__ == "__main__":
    main()
