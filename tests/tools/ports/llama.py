"""Llama as people write it, with the weights of transformers' LlamaForCausalLM."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rotate(x, theta):
    D, L = x.shape[-1], x.shape[-2]
    freqs = theta ** (-torch.arange(0, D, 2, device=x.device) / D)
    angles = torch.arange(L, device=x.device)[:, None] * freqs
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Attention(nn.Module):
    def __init__(self, width, heads, groups, theta):
        super().__init__()
        self.heads, self.groups, self.dim, self.theta = heads, groups, width // heads, theta
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, groups * self.dim, bias=False) for _ in range(2))

    def forward(self, x, mask):
        B, L, E = x.shape
        q, k, v = (t.view(B, L, -1, self.dim).transpose(1, 2) for t in (self.wq(x), self.wk(x), self.wv(x)))
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        k, v = (t.repeat_interleave(self.heads // self.groups, dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.dim)
        hidden = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
        if mask is not None:
            hidden = hidden | (mask == 0)[:, None, None, :]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.wo((weights.nan_to_num() @ v).transpose(1, 2).reshape(B, L, E))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.rope_parameters["rope_theta"])
        self.attn_norm, self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps), RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.w1, self.w3 = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x, mask):
        x = x + self.attn(self.attn_norm(x), mask)
        h = self.mlp_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Port(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids, mask=None):
        x = self.tok(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


NAMES = {"model.embed_tokens": "tok", "model.": "", "self_attn.q_proj": "attn.wq", "self_attn.k_proj": "attn.wk"}
NAMES |= {"self_attn.v_proj": "attn.wv", "self_attn.o_proj": "attn.wo", "mlp.gate_proj": "w1", "mlp.down_proj": "w2"}
NAMES |= {"mlp.up_proj": "w3", "input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm", "lm_head": "head"}


def weights(state):
    new = {}
    for name, tensor in state.items():
        for old, other in NAMES.items():
            name = name.replace(old, other)
        new[name] = tensor
    return new
