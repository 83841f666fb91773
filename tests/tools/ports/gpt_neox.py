"""GPT-NeoX as people write it, with the weights of transformers' GPTNeoXForCausalLM."""

import torch
import torch.nn.functional as F
from torch import nn


def rotate(x, dims, theta):  # x (B, L, H, D)
    freqs = theta ** -(torch.arange(0, dims, 2, device=x.device) / dims)
    angles = (torch.arange(x.shape[1], device=x.device)[:, None] * freqs)[:, None]
    a, b, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos(), rest), -1)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        E, F_ = c.hidden_size, c.intermediate_size
        self.heads, self.dim = c.num_attention_heads, E // c.num_attention_heads
        self.dims = int(self.dim * c.rope_parameters["partial_rotary_factor"])
        self.ln1, self.ln2 = nn.LayerNorm(E, eps=c.layer_norm_eps), nn.LayerNorm(E, eps=c.layer_norm_eps)
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.up, self.down = nn.Linear(E, F_), nn.Linear(F_, E)

    def attend(self, x):
        B, L, E = x.shape
        q, k, v = self.qkv(x).view(B, L, self.heads, 3, self.dim).unbind(3)
        q, k = rotate(q, self.dims, 10000.0), rotate(k, self.dims, 10000.0)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.dim**-0.5
        scores = scores.masked_fill(torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1), -1e9)
        return self.out(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(B, L, E))

    def forward(self, x):
        attended = self.attend(self.ln1(x))
        return x + attended + self.down(F.gelu(self.up(self.ln2(x))))


class Port(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


NAMES = {"gpt_neox.layers": "blocks", "gpt_neox.embed_in": "embed", "gpt_neox.final_layer_norm": "norm", "lm_head": "head"}
NAMES |= {"attention.query_key_value": "qkv", "attention.dense": "out", "input_layernorm": "ln1"}
NAMES |= {"post_attention_layernorm": "ln2", "mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down"}


def weights(state):
    new = {}
    for name, tensor in state.items():
        for old, other in NAMES.items():
            name = name.replace(old, other)
        new[name] = tensor
    return new
