"""Phi 3 as people write it, with the weights of transformers' Phi3ForCausalLM."""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.groups, self.dim = c.num_attention_heads, c.num_key_value_heads, c.hidden_size // c.num_attention_heads
        self.window = c.sliding_window
        self.qkv_proj = nn.Linear(c.hidden_size, (self.heads + 2 * self.groups) * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)

    def rotate(self, x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    def forward(self, x, cos, sin, seen):
        B, L, _ = x.shape
        q, k, v = self.qkv_proj(x).split([self.heads * self.dim, self.groups * self.dim, self.groups * self.dim], dim=-1)
        q, k, v = (t.view(B, L, -1, self.dim).transpose(1, 2) for t in (q, k, v))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        k, v = (t[:, :, None].expand(-1, -1, self.heads // self.groups, -1, -1).flatten(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(y.transpose(1, 2).reshape(B, L, -1))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = Attention(c)
        self.gate_up_proj = nn.Linear(c.hidden_size, 2 * c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)
        self.norm1, self.norm2 = RMSNorm(c.hidden_size, c.rms_norm_eps), RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x, *rest):
        x = x + self.self_attn(self.norm1(x), *rest)
        gate, up = self.gate_up_proj(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)


class Port(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids):
        D, L = self.config.hidden_size // self.config.num_attention_heads, input_ids.shape[1]
        inv_freq = 1.0 / (10000.0 ** (torch.arange(0, D, 2).float() / D))
        angles = torch.arange(L).float()[:, None] * inv_freq
        x = self.embed_tokens(input_ids)
        cos, sin = (torch.cat((t, t), -1).to(x.dtype) for t in (angles.cos(), angles.sin()))
        i, j = torch.arange(L)[:, None], torch.arange(L)
        seen = (j <= i) & (i - j < (self.config.sliding_window or L))
        for layer in self.layers:
            x = layer(x, cos, sin, seen)
        return self.lm_head(self.norm(x))


def weights(state):
    new = {}
    for name, tensor in state.items():
        name = name.removeprefix("model.").replace("mlp.", "")
        new[name.replace("input_layernorm", "norm1").replace("post_attention_layernorm", "norm2")] = tensor
    return new
