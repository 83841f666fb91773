"""GPT-2 as people write it, with the weights of transformers' GPT2LMHeadModel."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x, mask=None):
        B, L, E = x.shape
        q, k, v = self.c_attn(x).split(E, dim=2)
        q, k, v = (t.view(B, L, self.heads, E // self.heads).transpose(1, 2) for t in (q, k, v))
        seen = torch.ones(L, L, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            seen = seen & mask.bool()[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.c_proj(y.transpose(1, 2).reshape(B, L, E))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Port(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok, self.pos = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(Block(config.n_embd, config.n_head) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, ids, mask=None):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.ln_f(x))


def weights(state):
    names = {"transformer.wte": "tok", "transformer.wpe": "pos", "transformer.h": "blocks", "transformer.ln_f": "ln_f"}
    names |= {"mlp.c_fc": "fc", "mlp.c_proj": "proj", "lm_head": "head"}
    new = {}
    for name, tensor in state.items():
        is_transposed = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        for old, other in names.items():
            name = name.replace(old, other)
        new[name] = tensor.T if is_transposed else tensor
    return new
