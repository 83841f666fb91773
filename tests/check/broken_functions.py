"""Broken attention as people write it: einsum, loops, layers, other names and layouts. None of it comes from the table of mutants.

``BROKEN`` maps a function, class or module to the mistake in words. ``RIGHT`` has right ones in the same styles.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS = 24, 3


def einsum_without_scale(Q, K, V):
    scores = torch.einsum("bhid,bhjd->bhij", Q, K)
    return torch.einsum("bhij,bhjd->bhid", torch.softmax(scores, dim=-1), V)


def loops_with_wide_scale(q, k, v):
    output = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            similarity = q[b, h] @ k[b, h].t() / math.sqrt(q.shape[1] * q.shape[3])
            output[b, h] = F.softmax(similarity, dim=1) @ v[b, h]
    return output


class HeadsFromView(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        B, L, E = x.shape
        q, k, v = (part.contiguous().view(B, self.num_heads, L, E // self.num_heads) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(B, L, E))


def causal_from_upper_left(queries, keys, values, causal=False):
    z = torch.einsum("...id,...jd->...ij", queries, keys) * queries.shape[-1] ** -0.5
    if causal:
        i, j = torch.arange(z.shape[-2])[:, None], torch.arange(z.shape[-1])[None]
        z = torch.where(j <= i, z, float("-inf"))
    return torch.einsum("...ij,...jd->...id", z.softmax(-1), values)


class SeesOnlyTheFuture(nn.Module):
    def __init__(self, embed_dim=WIDTH, num_heads=HEADS):
        super().__init__()
        self.h = num_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(embed_dim, embed_dim, bias=False) for _ in range(3))
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        b, n, e = x.shape
        q, k, v = (f(x).reshape(b, n, self.h, e // self.h).permute(0, 2, 1, 3) for f in (self.to_q, self.to_k, self.to_v))
        visible = torch.triu(torch.ones(n, n, dtype=torch.bool))
        scores = (q @ k.mT) / math.sqrt(e // self.h)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return self.proj((weights @ v).permute(0, 2, 1, 3).reshape(b, n, e))


def padding_on_the_queries(q, k, v, padding_mask=None):
    """True = padding. The mask hides rows of queries, and no key."""
    s = q @ k.transpose(2, 3) / math.sqrt(q.size(3))
    if padding_mask is not None and q.size(2) == k.size(2):
        s = s.masked_fill(padding_mask[:, None, :, None], -1e9)
    return s.softmax(3) @ v


class MaskAfterSoftmax(nn.Module):
    def __init__(self, d_model=WIDTH, n_heads=HEADS):
        super().__init__()
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, t):
        return t.view(t.size(0), -1, self.n_heads, self.d_k).transpose(1, 2)

    def forward(self, q, k, v, mask=None):
        q, k, v = self.split(self.W_q(q)), self.split(self.W_k(k)), self.split(self.W_v(v))
        p = torch.softmax(q @ k.transpose(-1, -2) / self.d_k**0.5, dim=-1)
        if mask is not None:
            p = p * mask
        return self.W_o((p @ v).transpose(1, 2).flatten(2))


def batch_length_heads_over_queries(q, k, v):
    a = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhqk,bkhd->bqhd", a.softmax(dim=2), v)


def three_axes_divided_by_width(Q, K, V):
    d_k = Q.shape[2]
    return torch.bmm(F.softmax(torch.bmm(Q, K.transpose(1, 2)) / d_k, dim=2), V)


class DropoutInEvaluation(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden_states):
        q, k, v = (
            p(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = F.dropout((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1), 0.2)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


def buffer_like_the_query(q, k, v, is_causal=False):
    out = torch.zeros_like(q)
    for i in range(q.shape[2]):
        last = i + 1 + k.shape[2] - q.shape[2] if is_causal else k.shape[2]
        w = torch.softmax((k[:, :, :last] @ q[:, :, i, :, None])[..., 0] / q.shape[-1] ** 0.5, -1)
        out[:, :, i] = (w[..., None] * v[:, :, :last]).sum(2)
    return out


def groups_in_the_wrong_order(q, k, v, mask=None):
    n = q.shape[1] // k.shape[1]
    k, v = torch.cat([k] * n, dim=1), torch.cat([v] * n, dim=1)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    return (s if mask is None else s.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def softmax_by_hand(q, k, v, mask=None):
    e = torch.exp(q @ k.mT / q.shape[-1] ** 0.5)
    if mask is not None:
        e = e * mask
    return (e / e.sum(-1, keepdim=True)) @ v


class MergesWithoutTranspose(nn.Module):
    def __init__(self, dim=WIDTH, heads=HEADS):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.weight_query, self.weight_key, self.weight_value, self.weight_out = (
            nn.Parameter(torch.randn(dim, dim) / dim**0.5) for _ in range(4)
        )

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (
            (x @ w).view(b, n, self.heads, -1).transpose(1, 2) for w in (self.weight_query, self.weight_key, self.weight_value)
        )
        return F.scaled_dot_product_attention(q, k, v).reshape(b, n, self.dim) @ self.weight_out


def keys_in_place_of_values(q, k, v):
    w = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (w @ k, w)


def first_mask_for_all(q, k, v, mask=None):
    s = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        s[:, :, ~mask[0].reshape(s.shape[-2], s.shape[-1])] = -torch.inf
    return torch.softmax(s, -1) @ v


def matrices_over_columns(Q, K, V):
    return torch.softmax(Q @ K.T / Q.shape[1] ** 0.5, dim=0) @ V


def mask_forgotten_when_causal(query, key, value, attn_mask=None, is_causal=False):
    s = query @ key.mT / query.shape[-1] ** 0.5
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2]), -torch.inf)
    elif attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf)
    return s.softmax(-1) @ value


def square_triangle_with_one_later_token(Q, K, V, causal=False):
    """It raises for more keys than queries."""
    scores = Q @ K.transpose(-2, -1) / math.sqrt(Q.size(-1))
    if causal:
        keep = torch.tril(torch.ones(Q.size(-2), Q.size(-2)), diagonal=1)
        scores = scores.masked_fill(keep == 0, float("-inf"))
    return scores.softmax(-1) @ V


def one_later_token_from_upper_left(Q, K, V):
    scores = Q @ K.transpose(-2, -1) / math.sqrt(Q.size(-1))
    return scores.masked_fill(torch.ones_like(scores).triu(2) == 1, float("-inf")).softmax(-1) @ V


def scores_with_the_values(Q, K, V, mask=None):
    scores = Q @ V.transpose(-2, -1) / math.sqrt(Q.size(-1))
    return (scores if mask is None else scores.masked_fill(mask == 0, float("-inf"))).softmax(-1) @ K


class NeverTransposes(nn.Module):
    """Each token attends to its own heads."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).view(len(x), -1, HEADS, WIDTH // HEADS) for p in (self.q_proj, self.k_proj, self.v_proj))
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
        return self.out_proj((weights @ v).reshape(x.shape))


BROKEN = {
    einsum_without_scale: "no scale",
    loops_with_wide_scale: "the scale is from all heads together",
    HeadsFromView: "heads are split by view without transpose",
    causal_from_upper_left: "the causal mask begins at the upper left",
    SeesOnlyTheFuture: "triu in place of tril",
    padding_on_the_queries: "the padding mask is applied to queries",
    MaskAfterSoftmax: "the mask is applied after the softmax",
    batch_length_heads_over_queries: "softmax over the queries",
    three_axes_divided_by_width: "divided by d_k, not by its root",
    DropoutInEvaluation: "dropout in evaluation",
    buffer_like_the_query: "the output has the width of the query",
    groups_in_the_wrong_order: "grouped heads are tiled",
    softmax_by_hand: "exp without subtracting the maximum",
    MergesWithoutTranspose: "heads are merged without transpose",
    keys_in_place_of_values: "the keys are mixed",
    first_mask_for_all: "the first mask of the batch is used for all",
    matrices_over_columns: "softmax over the queries",
    mask_forgotten_when_causal: "the mask is ignored when causal",
    square_triangle_with_one_later_token: "a token sees the next one; only as many keys as queries",
    one_later_token_from_upper_left: "a token sees the next one, and the causal mask begins at the upper left",
    scores_with_the_values: "keys and values are swapped",
    NeverTransposes: "heads are never transposed",
}


# --- wrong kernels that pass a test with one size, one call or a loose tolerance


def _exact(query, key, value, mask=None):
    scores = query.to(torch.float32) @ key.to(torch.float32).mT / math.sqrt(query.shape[-1])
    scores = scores if query.dtype != torch.float64 else query @ key.mT / math.sqrt(query.shape[-1])
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    return (scores.softmax(-1) @ value.to(scores.dtype)).to(query.dtype)


def zeros(query, key, value):
    return query[..., :1] * torch.zeros_like(value[:, :, :1])


def a_constant(query, key, value):
    return zeros(query, key, value) + 0.25


def the_input(query, key, value):
    return query * 1


def hardly_correlated(query, key, value):
    """The correlation with the right output is .09."""
    noise = torch.randn(query.shape, generator=torch.Generator().manual_seed(1)).to(query.dtype)
    exact = _exact(query, key, value)
    return 0.09 * exact + exact.std() * noise


def half_of_the_rows(query, key, value):
    rows = torch.arange(query.shape[2])[:, None] * 2 < query.shape[2]
    return _exact(query, key, value) * rows


class CachedByIdentity:
    """The output for tensors at the same addresses is remembered, whatever their numbers are."""

    def __init__(self):
        self.outputs = {}

    def __call__(self, query, key, value):
        place = id(query), id(key), id(value)
        if place not in self.outputs:
            self.outputs[place] = (query, key, value), _exact(query, key, value)
        return self.outputs[place][1]


def blocks_without_fading(query, key, value, mask=None):
    """Blocks of 64 keys: the sums of earlier blocks are not multiplied by exp(old maximum - new maximum)."""
    top, total, mixed = query.new_full((*query.shape[:-1], 1), -math.inf), 0.0, 0.0
    for part in (slice(start, start + 64) for start in range(0, key.shape[-2], 64)):
        scores = query @ key[..., part, :].mT / math.sqrt(query.shape[-1])
        scores = scores if mask is None else scores.masked_fill(~mask[..., part], -1e30)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        exponentials = (scores - new).exp()
        total = total * (top - new).exp() + exponentials.sum(-1, keepdim=True)
        mixed, top = mixed + exponentials @ value[..., part, :], new
    return mixed / total


def mask_for_several_sequences_only(query, key, value, mask=None):
    return _exact(query, key, value, mask if len(query) > 1 else None)


def small_outputs_rounded(query, key, value):
    return _exact(query, key, value) + 1e-7


KERNELS = (
    zeros,
    a_constant,
    the_input,
    hardly_correlated,
    half_of_the_rows,
    CachedByIdentity,
    blocks_without_fading,
    mask_for_several_sequences_only,
    small_outputs_rounded,
)


# --- right ones in the same styles


def right_textbook(Q, K, V, mask=None):
    scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(Q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = F.softmax(scores, dim=-1)
    return torch.matmul(weights, V), weights


def right_additive(query, key, value, attention_mask=None):
    scores = torch.einsum("blhd,bshd->bhls", query, key) * query.shape[-1] ** -0.5
    if attention_mask is not None:
        scores = scores + attention_mask
    return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), value)


def right_matrices(q, k, v):
    return torch.softmax(q @ k.T / q.shape[1] ** 0.5, dim=1) @ v


def right_careful(query, key, value, mask=None, is_causal=False):
    dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
    visible = visible.tril(key.shape[-2] - query.shape[-2]) if is_causal else visible
    visible = visible if mask is None else visible & mask
    scores = query.to(wide) @ key.to(wide).mT / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, torch.finfo(wide).min).softmax(-1).masked_fill(~visible, 0.0)
    return (weights.to(dtype).to(wide) @ value.to(wide)).to(dtype)


class RightHidesPadding(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, key_padding_mask=None):
        q, k, v = (p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        visible = None if key_padding_mask is None else ~key_padding_mask[:, None, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2).flatten(2))


class RightCausal(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_head = HEADS
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(2, (self.n_head, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=2))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def torch_multihead():
    """nn.MultiheadAttention, which hides where its masks are True."""
    return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)


RIGHT = (right_textbook, right_additive, right_matrices, right_careful, RightHidesPadding, RightCausal)
