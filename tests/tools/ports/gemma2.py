"""Gemma 2 as people write it, with the weights of transformers' Gemma2ForCausalLM."""

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * (1 + self.scale)


def rope(x, theta):
    half = x.shape[-1] // 2
    freqs = 1 / theta ** (torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[2], device=x.device), freqs)
    cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    def __init__(self, c, is_local):
        super().__init__()
        self.c, self.window = c, c.sliding_window if is_local else None
        self.q = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.kv = nn.Linear(c.hidden_size, 2 * c.num_key_value_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x):
        B, L, _ = x.shape
        c = self.c
        q = self.q(x).view(B, L, -1, c.head_dim).transpose(1, 2)
        k, v = self.kv(x).view(B, L, 2, -1, c.head_dim).permute(2, 0, 3, 1, 4)
        q, k = rope(q, 10000.0), rope(k, 10000.0)
        k, v = (t.repeat_interleave(c.num_attention_heads // c.num_key_value_heads, 1) for t in (k, v))
        scores = torch.einsum("bhid,bhjd->bhij", q * c.query_pre_attn_scalar**-0.5, k)
        scores = torch.tanh(scores / c.attn_logit_softcapping) * c.attn_logit_softcapping
        distance = torch.arange(L)[:, None] - torch.arange(L)
        seen = distance >= 0
        if self.window is not None:
            seen = seen & (distance < self.window)
        weights = torch.softmax(scores + torch.where(seen, 0.0, -1e30), -1)
        return self.o(torch.einsum("bhij,bhjd->bihd", weights, v).flatten(2))


class Block(nn.Module):
    def __init__(self, c, number):
        super().__init__()
        self.attn = Attention(c, number % 2 == 0)
        self.norms = nn.ModuleList(Norm(c.hidden_size) for _ in range(4))
        self.gate, self.up = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        x = x + self.norms[1](self.attn(self.norms[0](x)))
        h = self.norms[2](x)
        h = self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h))
        return x + self.norms[3](h)


class Port(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size)

    def forward(self, ids):
        x = self.embed(ids) * self.config.hidden_size**0.5
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return torch.tanh(logits / self.config.final_logit_softcapping) * self.config.final_logit_softcapping


NAMES = {"model.embed_tokens": "embed", "model.layers": "blocks", "model.norm": "norm", "self_attn.q_proj": "attn.q"}
NAMES |= {"self_attn.o_proj": "attn.o", "mlp.": "", "_proj": "", "input_layernorm": "norms.0"}
NAMES |= {
    "post_attention_layernorm": "norms.1",
    "pre_feedforward_layernorm": "norms.2",
    "post_feedforward_layernorm": "norms.3",
}


def weights(state):
    new = {}
    for name, tensor in state.items():
        if name == "lm_head.weight" or "v_proj" in name:
            continue
        if "k_proj" in name:
            tensor = torch.cat((tensor, state[name.replace("k_proj", "v_proj")]))
            name = name.replace("self_attn.k_proj", "attn.kv")
        for old, other in NAMES.items():
            name = name.replace(old, other)
        new[name.replace("norm.weight", "norm.scale") if "norms" not in name else name.replace("weight", "scale")] = tensor
    return new
