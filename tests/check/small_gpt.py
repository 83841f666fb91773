"""A small GPT as people write it, for the tests of the checker. ``FAULTS`` are edits of this file."""

import math

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask=None, past=None):
        B, L, E = x.shape
        q, k, v = self.qkv(x).split(E, dim=2)
        q, k, v = (t.view(B, L, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        S = k.shape[2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(E // self.heads)
        hidden = ~torch.ones(L, S, dtype=torch.bool, device=x.device).tril(S - L)
        if mask is not None:
            hidden = hidden | (mask[:, None, None, :] == 0)
        scores = scores.masked_fill(hidden, -1e9)
        weights = self.drop(scores.softmax(-1))
        y = (weights @ v).transpose(1, 2).reshape(B, L, E)
        return self.proj(y), (k, v)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask=None, past=None):
        y, past = self.attn(self.norm1(x), mask, past)
        x = x + y
        return x + self.mlp(self.norm2(x)), past


class GPT(nn.Module):
    def __init__(self, vocab=40, width=32, heads=4, depth=2, limit=48):
        super().__init__()
        self.block_size = limit
        self.token = nn.Embedding(vocab, width)
        self.place = nn.Embedding(limit, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids, attention_mask=None, past=None):
        B, L = input_ids.shape
        start = 0 if past is None else past[0][0].shape[2]
        if attention_mask is None:
            places = torch.arange(start, start + L, device=input_ids.device).expand(B, L)
        else:
            places = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -L:]
        if start + L > self.block_size:
            raise ValueError(f"{start + L} tokens, but {self.block_size} at most")
        x = self.token(input_ids) + self.place(places)
        pasts = []
        for number, block in enumerate(self.blocks):
            x, kept = block(x, attention_mask, None if past is None else past[number])
            pasts.append(kept)
        return self.head(self.norm(x)), pasts


FAULTS = {  # what is expected first, and what is replaced by what
    "no causal mask": ("not-causal", "~torch.ones(L, S, dtype=torch.bool, device=x.device).tril(S - L)", "torch.zeros(L, S, dtype=torch.bool)"),
    "causal mask one too wide": ("not-causal", ".tril(S - L)", ".tril(S - L + 1)"),
    "causal mask inverted": ("not-causal", "~torch.ones(L, S, dtype=torch.bool, device=x.device).tril(S - L)", "torch.ones(L, S, dtype=torch.bool).tril(S - L - 1)"),
    "causal mask dropped by the padding mask": ("not-causal-with-a-mask", "hidden = hidden | (mask", "hidden = (mask"),
    "a block of 32 sees the first key of the next block": ("not-causal-in-a-long-row", "if mask is not None:\n            hidden", "hidden = hidden & (torch.arange(S) != (torch.arange(S - L, S)[:, None] // 32 + 1) * 32)\n        if mask is not None:\n            hidden"),
    "padding mask ignored in a batch of one": ("mask-in-a-batch-of-one", "if mask is not None:\n            hidden", "if mask is not None and B > 1:\n            hidden"),
    "causal mask after the softmax": ("not-causal", "scores = scores.masked_fill(hidden, -1e9)\n        weights = self.drop(scores.softmax(-1))", "weights = self.drop(scores.softmax(-1).masked_fill(hidden, 0.0))"),
    "causal mask aligned to the upper left": ("cache-differs", ".tril(S - L)", ".tril()"),
    "padding mask ignored": ("mask-ignored", "B, L = input_ids.shape\n", "(B, L), attention_mask = input_ids.shape, None\n"),
    "padding mask for positions only": ("padding-leaks", "if mask is not None:\n            hidden", "if False:\n            hidden"),
    "padding mask inverted": ("mask-inverted", "(mask[:, None, None, :] == 0)", "(mask[:, None, None, :] != 0)"),
    "padding mask in the first layer only": ("padding-leaks", "block(x, attention_mask, None if", "block(x, attention_mask if number == 0 else None, None if"),
    "padding mask hides queries": ("padding-leaks", "(mask[:, None, None, :] == 0)", "(mask[:, None, -L:, None] == 0)"),
    "padding mask added as a number": ("padding-leaks", "hidden = hidden | (mask[:, None, None, :] == 0)", "scores = scores + mask[:, None, None, :]"),
    "positions counted from the padding": ("positions-of-left-padding", "(attention_mask.cumsum(-1) - 1).clamp(min=0)[:, -L:]", "torch.arange(start, start + L).expand(B, L)"),
    "positions start at 0 with a cache": ("cache-differs", "torch.arange(start, start + L, device=input_ids.device)", "torch.arange(L)"),
    "values not cached": ("cache-differs", "torch.cat((past[1], v), 2)", "torch.cat((torch.zeros_like(past[1]), v), 2)"),
    "heads mixed by a view": ("not-causal", "t.view(B, L, self.heads, -1).transpose(1, 2)", "t.reshape(B, self.heads, L, -1)"),
    "rows mixed by a view": ("rows-mixed", "(weights @ v).transpose(1, 2).reshape(B, L, E)", "(weights @ v).transpose(0, 2).reshape(B, L, E)"),
    "softmax over the rows": ("rows-mixed", "scores.softmax(-1)", "scores.softmax(0)"),
    "dropout in evaluation": ("random", "self.drop(scores.softmax(-1))", "nn.functional.dropout(scores.softmax(-1), 0.1)"),
    "weights detached": ("gradient-differs", "weights @ v)", "weights.detach() @ v)"),
    "keys detached": ("gradient-differs", "q @ k.transpose", "q @ k.detach().transpose"),
    "embedding without a gradient": ("gradient-cut", "self.token(input_ids)", "self.token(input_ids).detach()"),
    "blocks in a plain list": ("unregistered-modules", "nn.ModuleList([Block(width, heads) for _ in range(depth)])", "[Block(width, heads) for _ in range(depth)]"),
    "NaN where a query sees nothing": ("nan-left", "-1e9", "-math.inf"),
    "normalised over the length": ("prefix-differs", "self.head(self.norm(x))", "self.head(self.norm(x) * L**0.5)"),
    "one token loses an axis": ("loses-axis", "self.head(self.norm(x))", "self.head(self.norm(x).squeeze(1))"),
    "fails at its limit": ("crashes-at-its-limit", "nn.Embedding(limit, width)", "nn.Embedding(limit - 1, width)"),
    "attention's output unused": ("sees-no-other", "x = x + y", "x = x + 0 * y"),
}  # fmt: skip
