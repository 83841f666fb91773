"""Qwen 3 as people write it, with the weights of transformers' Qwen3ForCausalLM."""

import torch
import torch.nn.functional as F
from torch import nn


def rope(x, angles):  # x (B, L, H, D)
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    z = torch.complex(a.contiguous(), b.contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((z.real, z.imag), -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(c.head_dim, eps=c.rms_norm_eps) for _ in range(2))

    def forward(self, x, angles):
        B, L, _ = x.shape
        q, k, v = (proj(x).view(B, L, -1, self.c.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope(q, angles), rope(k, angles)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, x, angles):
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Port(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids):
        D, theta = self.config.head_dim, self.config.rope_parameters["rope_theta"]
        freqs = theta ** (-torch.arange(0, D, 2).to(self.norm.weight.dtype) / D)
        angles = torch.outer(torch.arange(input_ids.shape[1]).to(freqs.dtype), freqs)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, angles)
        return self.lm_head(self.norm(x))


def weights(state):
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}
