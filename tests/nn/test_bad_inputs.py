"""Plain mistakes get one sentence that names the argument."""

import math
import re

import pytest
import torch

from minitx.config import TransformerConfig
from minitx.nn import (
    Causal,
    DecoderBlock,
    DecoderLM,
    Documents,
    DotProductAttention,
    EncoderBlock,
    FeedForward,
    KVCache,
    LayerCache,
    LayerScale,
    MixtureOfExperts,
    MultiHeadAttention,
    Padding,
    PrefixLM,
    QKNorm,
    Residual,
    Rotary,
    RotaryScaling,
    ScoreScale,
    SlidingWindow,
    StochasticDepth,
    explain_backends,
    from_key_padding_mask,
    init_weights,
    intersect,
    make_norm,
    scale_multiplier,
    scaled_dot_product_attention,
)
from minitx.nn.bias import ALiBi

B, H, L, S, D = 2, 6, 5, 7, 11
Q, K = torch.randn(B, H, L, D), torch.randn(B, 3, S, D)
X = torch.randn(B, L, 12)


def attend(query=Q, key=K, value=K, *args, **options):
    return scaled_dot_product_attention(query, key, value, *args, **options)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


ATTENTION = {
    "a float mask": (
        lambda: attend(attn_mask=torch.zeros(L, S)), TypeError,
        "attn_mask must be a bool tensor (True = may attend), got torch.float32; additive values belong in attn_bias",
    ),
    "an int mask": (
        lambda: attend(attn_mask=torch.ones(L, S, dtype=torch.long)), TypeError,
        "attn_mask must be a bool tensor (True = may attend), got torch.int64; additive values belong in attn_bias",
    ),
    "a list as mask": (lambda: attend(attn_mask=[[True]]), TypeError, "attn_mask must be a bool tensor, got list"),
    "a 3-D mask": (
        lambda: attend(attn_mask=bools(B, L, S)), ValueError,
        "attn_mask of shape (2, 5, 7) is ambiguous: a 3-D mask could be (B, L, S) or (H, L, S); give (B, 1, L, S) or (1, H, L, S)",
    ),
    "a 1-D mask": (lambda: attend(attn_mask=bools(S)), ValueError, "attn_mask must have shape (L, S) or (B, H, L, S), got (7,)"),
    "a mask of another size": (
        lambda: attend(attn_mask=bools(L, L)), ValueError,
        "attn_mask of shape (5, 5) does not broadcast to (B, H, L, S) = (2, 6, 5, 7)",
    ),
    "a mask of another batch": (
        lambda: attend(attn_mask=bools(3, 1, L, S)), ValueError, "attn_mask of shape (3, 1, 5, 7) does not broadcast",
    ),
    "a mask per key head": (lambda: attend(attn_mask=bools(1, 3, L, S)), ValueError, "(1, 3, 5, 7) does not broadcast"),
    "padding of another length": (
        lambda: attend(attn_mask=Padding(bools(B, L))), ValueError, "key_mask must have shape (B, S) = (2, 7), got (2, 5)",
    ),
    "padding of another batch": (
        lambda: attend(attn_mask=Padding(bools(1, S))), ValueError, "key_mask must have shape (B, S) = (2, 7), got (1, 7)",
    ),
    "padding inside a union": (
        lambda: attend(attn_mask=Padding(bools(B, L)) | Causal()), ValueError, "key_mask must have shape (B, S) = (2, 7)",
    ),
    "documents of another length": (
        lambda: attend(attn_mask=Documents(torch.zeros(B, L, dtype=torch.long))), ValueError,
        "document ids must have shape (B, S) = (2, 7) with L <= S, got (2, 5) and L = 5",
    ),
    "prefixes of another batch": (
        lambda: attend(attn_mask=PrefixLM(torch.tensor([1, 2, 3]))), ValueError, "prefix length must be an int or have shape (B,) = (2,)",
    ),
    "causal with more queries than keys": (
        lambda: attend(torch.randn(B, H, 9, D), is_causal=True), ValueError,
        "is_causal needs at least as many keys as queries (the last query sees the last key), got 9 queries and 7 keys",
    ),
    "a 3-D query": (
        lambda: attend(torch.randn(H, L, D)), ValueError, "query must have shape (batch, heads, length, width), got (6, 5, 11)",
    ),
    "a 5-D value": (lambda: attend(value=K[None]), ValueError, "value must have shape (batch, heads, length, width)"),
    "a list as key": (lambda: attend(key=[1.0]), TypeError, "key must be a tensor, got list"),
    "whole numbers": (lambda: attend(Q.long(), K.long(), K.long()), TypeError, "query must be a floating-point tensor, got torch.int64"),
    "mixed dtypes": (
        lambda: attend(value=K.double()), TypeError, "value is torch.float64 on cpu, but query is torch.float32 on cpu",
    ),
    "mixed devices": (
        lambda: attend(key=K.to("meta")), TypeError, "key is torch.float32 on meta, but query is torch.float32 on cpu",
    ),
    "no keys": (lambda: attend(key=K[:, :, :0], value=K[:, :, :0]), ValueError, "key must have at least one head, position and channel"),
    "no queries": (lambda: attend(Q[:, :, :0]), ValueError, "query must have at least one head, position and channel"),
    "no rows": (lambda: attend(Q[:0], K[:0], K[:0]), ValueError, "query must have at least one row in its batch"),
    "another width": (lambda: attend(key=K[..., :5]), ValueError, "key must have the query's width D = 11, got 5"),
    "another batch": (lambda: attend(key=K[:1]), ValueError, "query, key and value must have one batch size, got (2, 1, 2)"),
    "fewer values than keys": (
        lambda: attend(value=K[:, :, :3]), ValueError, "key and value must agree in heads and length, got (3, 7) and (3, 3)",
    ),
    "heads that do not divide": (
        lambda: attend(key=torch.randn(B, 4, S, D), value=torch.randn(B, 4, S, D)), ValueError,
        "the number of key heads must divide the number of query heads, got 4 and 6",
    ),
    "an int bias": (
        lambda: attend(attn_bias=torch.ones(L, S, dtype=torch.long)), TypeError,
        "attn_bias must be a floating-point tensor or a Bias, got torch.int64",
    ),
    "a number as bias": (lambda: attend(attn_bias=1.0), TypeError, "attn_bias must be a floating-point tensor or a Bias, got float"),
    "a 3-D bias": (
        lambda: attend(attn_bias=torch.ones(H, L, S)), ValueError,
        "attn_bias of shape (6, 5, 7) must be (L, S) or broadcast to (B, H, L, S) = (2, 6, 5, 7)",
    ),
    "a word as scale": (
        lambda: attend(scale="unscaled"), TypeError,
        "scale must be a number or None (1/sqrt(D)), got 'unscaled'; words belong to modules and configs",
    ),
    "a bool as scale": (lambda: attend(scale=True), TypeError, "scale must be a number or None (1/sqrt(D)), got True"),
    "nan as scale": (lambda: attend(scale=math.nan), ValueError, "scale must be finite, got nan"),
    "a negative soft-cap": (lambda: attend(softcap=-1.0), ValueError, "softcap must be positive and finite (or None for off), got -1.0"),
    "an infinite soft-cap": (lambda: attend(softcap=math.inf), ValueError, "softcap must be positive and finite"),
    "sinks for key heads": (lambda: attend(sinks=torch.zeros(3)), ValueError, "sinks must have shape (H,) = (6,), got (3,)"),
    "sinks as a list": (lambda: attend(sinks=[0.0] * H), TypeError, "sinks must be a floating-point tensor, got list"),
    "dropout of one": (lambda: attend(dropout_p=1.0), ValueError, "dropout_p must lie in [0, 1), got 1.0"),
    "dropout below zero": (lambda: attend(dropout_p=-0.1), ValueError, "dropout_p must lie in [0, 1), got -0.1"),
    "an unknown backend": (lambda: attend(backend="flash"), ValueError, "backend='flash' is not known; one of auto, "),
    "explaining a float mask": (
        lambda: explain_backends(Q, K, K, torch.zeros(L, S)), TypeError, "additive values belong in attn_bias",
    ),
}  # fmt: skip
MASKS = {
    "an int key_mask": (
        lambda: Padding(torch.ones(B, S, dtype=torch.long)), TypeError,
        "key_mask must be a bool tensor (True = may attend), got torch.int64",
    ),
    "a 4-D key_mask": (lambda: Padding(bools(B, 1, 1, S)), ValueError, "key_mask must have shape (B, S), got (2, 1, 1, 7)"),
    "an int key_padding_mask": (
        lambda: from_key_padding_mask(torch.zeros(B, S)), TypeError, "key_padding_mask must be a bool tensor",
    ),
    "a window of none": (
        lambda: SlidingWindow(0), ValueError, "window must be a positive whole number of visible keys, got 0",
    ),
    "half a window": (lambda: SlidingWindow(2.5), ValueError, "window must be a positive whole number of visible keys, got 2.5"),
    "a bool window": (lambda: SlidingWindow(True), ValueError, "window must be a positive whole number"),
    "bool documents": (
        lambda: Documents(bools(B, S)), ValueError, "document ids must be an integer tensor of shape (B, S), got torch.bool (2, 7)",
    ),
    "float documents": (lambda: Documents(torch.zeros(B, S)), ValueError, "document ids must be an integer tensor"),
    "flat documents": (
        lambda: Documents(torch.zeros(S, dtype=torch.long)), ValueError,
        "document ids must be an integer tensor of shape (B, S), got torch.int64 (7,)",
    ),
    "a negative prefix": (lambda: PrefixLM(-1), ValueError, "prefix length must be a whole number, zero or more, or a tensor"),
    "half a prefix": (lambda: PrefixLM(2.5), ValueError, "prefix length must be a whole number"),
    "bool prefixes": (lambda: PrefixLM(bools(B)), ValueError, "prefix length must be a whole number"),
    "a float in an intersection": (lambda: intersect(torch.zeros(L, S), Causal()), TypeError, "additive values belong in attn_bias"),
}  # fmt: skip


def lm(**options):
    return DecoderLM(
        TransformerConfig(**{"vocab_size": 13, "embed_dim": 12, "num_heads": 3, "num_layers": 1, "max_len": 9, **options})
    )


def mha(**options):
    return MultiHeadAttention(12, 3, **options)


IDS = torch.ones(B, L, dtype=torch.long)
MODULES = {
    "heads that do not divide the width": (
        lambda: MultiHeadAttention(12, 5), ValueError, "embed_dim=12 is not divisible by num_heads=5; give head_dim",
    ),
    "no heads": (lambda: MultiHeadAttention(12, 0), ValueError, "embed_dim and num_heads must be positive, got 12 and 0"),
    "key heads that do not divide": (lambda: mha(num_kv_heads=2), ValueError, "num_kv_heads=2 must divide num_heads=3"),
    "no key heads": (lambda: mha(num_kv_heads=0), ValueError, "num_kv_heads=0 must divide num_heads=3"),
    "no head_dim": (lambda: mha(head_dim=0), ValueError, "head_dim, kdim and vdim must be positive, got 0, 12 and 12"),
    "no kdim": (lambda: mha(kdim=0), ValueError, "head_dim, kdim and vdim must be positive, got 4, 0 and 12"),
    "scale None": (lambda: mha(scale=None), ValueError, "scale=None is not allowed: one of inv_sqrt, unscaled"),
    "a misspelt keyword": (lambda: mha(dropuot=0.1), TypeError, "unexpected keyword argument 'dropuot'"),
    "another width of query": (
        lambda: mha()(torch.randn(B, L, 11)), ValueError, "query must have shape (batch, length, 12), got (2, 5, 11)",
    ),
    "a query without batch": (lambda: mha()(X[0]), ValueError, "query must have shape (batch, length, 12), got (5, 12)"),
    "another width of key": (
        lambda: mha(kdim=7)(X, X), ValueError, "key must have shape (batch, length, 7), got (2, 5, 12)",
    ),
    "a key that does not serve as value": (
        lambda: mha(kdim=7)(X, torch.randn(B, S, 7)), ValueError, "value must have shape (batch, length, 12), got (2, 7, 7)",
    ),
    "self-attention with another kdim": (lambda: mha(kdim=7)(X), ValueError, "key must have shape (batch, length, 7)"),
    "a value without key": (
        lambda: mha()(X, value=X), ValueError, "value was given without key; give both, or neither for self-attention",
    ),
    "rotary cross-attention": (
        lambda: mha(rotary=Rotary(4))(X, torch.randn(B, S, 12)), ValueError,
        "rotary positions are for self-attention: queries and keys need one position axis",
    ),
    "an int key_mask in attention": (
        lambda: mha()(X, key_mask=torch.ones(B, L, dtype=torch.long)), TypeError, "key_mask must be a bool tensor (True = may attend)",
    ),
    "a key_mask of another length": (
        lambda: mha()(X, key_mask=bools(B, S)), ValueError, "key_mask must have shape (B, S) = (2, 5), got (2, 7)",
    ),
    "a key_mask of another length with log_length": (
        lambda: mha(scale=ScoreScale("log_length", head_dim=4, max_len=9))(X, key_mask=bools(B, S)), ValueError,
        "key_mask must have shape (B, S) = (2, 5), got (2, 7)",
    ),
    "causal cross-attention onto less, with log_length": (
        lambda: mha(scale=ScoreScale("log_length", head_dim=4, max_len=9))(X, X[:, :3], is_causal=True), ValueError,
        "got 5 queries and 3 keys",
    ),
    "an odd rotary width": (
        lambda: Rotary(5), ValueError, "rotary positions pair channels: head_dim must be even, got 5",
    ),
    "core dropout of one": (lambda: DotProductAttention(dropout=1.0), ValueError, "dropout must lie in [0, 1), got 1.0"),
    "a learned scale without heads": (
        lambda: ScoreScale("learned", head_dim=4), ValueError, "scale=learned keeps one scale per head and needs num_heads",
    ),
    "log_length without max_len": (
        lambda: ScoreScale("log_length", head_dim=4), ValueError, "scale=log_length divides by ln(max_len) and needs max_len > 1",
    ),
    "log_length with max_len 1": (lambda: ScoreScale("log_length", head_dim=4, max_len=1), ValueError, "got max_len=1"),
    "a multiplier of a learned scale": (
        lambda: scale_multiplier("learned", 4), ValueError, "scale=learned has no fixed multiplier; use ScoreScale",
    ),
    "an unknown qk_norm": (lambda: QKNorm("batch", 4), ValueError, "qk_norm='batch' must be 'rms', 'layer' or 'l2'"),
    "l2 without key heads": (lambda: QKNorm("l2", 4), ValueError, "needs num_kv_heads"),
    "an unknown norm": (lambda: make_norm("batch", 4), ValueError, "norm='batch' must be 'layer' or 'rms'"),
    "an unknown activation": (lambda: FeedForward(4, 8, activation="tanh"), ValueError, "activation='tanh' must be one of gelu"),
    "an unknown norm position": (
        lambda: Residual(torch.nn.Identity, "middle"), ValueError,
        "norm_position='middle' must be one of pre, post, sandwich, deepnorm",
    ),
    "parallel post-norm": (
        lambda: EncoderBlock(mha(), FeedForward(12, 8), norm=torch.nn.Identity, norm_position="post", parallel=True), ValueError,
        "parallel sublayers need norm_position='pre', got 'post'",
    ),
    "memory for nobody": (
        lambda: DecoderBlock(mha(), FeedForward(12, 8), norm=torch.nn.Identity)(X, memory=X), ValueError,
        "this DecoderBlock has no cross_attention; got memory=a tensor",
    ),
    "no memory": (
        lambda: DecoderBlock(mha(), FeedForward(12, 8), norm=torch.nn.Identity, cross_attention=mha())(X), ValueError,
        "has cross_attention and needs memory; got memory=None",
    ),
    "an unknown init": (lambda: init_weights(mha(), "he"), ValueError, "init='he' must be one of gpt2, lecun"),
    "an unknown fold": (lambda: init_weights(mha(), fold="key"), ValueError, "init_fold='key' must be None, 'query' or 'symmetric'"),
    "a model without vocabulary": (
        lambda: DecoderLM(TransformerConfig()), ValueError, "vocab_size=None: DecoderLM needs the number of token ids",
    ),
    "float ids": (lambda: lm()(IDS.float()), ValueError, "input_ids must be whole numbers of shape (B, L), got torch.float32 (2, 5)"),
    "bool ids": (lambda: lm()(IDS.bool()), ValueError, "input_ids must be whole numbers of shape (B, L), got torch.bool (2, 5)"),
    "one row of ids": (lambda: lm()(IDS[0]), ValueError, "input_ids must be whole numbers of shape (B, L), got torch.int64 (5,)"),
    "more tokens than positions": (
        lambda: lm(max_len=4)(IDS), ValueError, "input_ids has 5 tokens a row, but the position table ends at max_len=4",
    ),
    "types that the model lacks": (
        lambda: lm()(IDS, token_type_ids=IDS), ValueError, "token_type_ids: the model has none (type_vocab_size=0), got a tensor",
    ),
    "a model key_mask of another length": (
        lambda: lm()(IDS, key_mask=bools(B, S)), ValueError, "key_mask must have shape (B, S) = (2, 5), got (2, 7)",
    ),
    "a tokenizer's int attention mask": (lambda: lm()(IDS, key_mask=IDS), TypeError, "key_mask must be a bool tensor"),
    "documents of a model of another length": (
        lambda: lm()(IDS, document_ids=torch.ones(B, S, dtype=torch.long)), ValueError, "document ids must have shape (B, S) = (2, 5)",
    ),
    "flat documents of a model": (lambda: lm()(IDS, document_ids=IDS[0]), ValueError, "document ids must be an integer tensor"),
    "a float mask for a model": (lambda: lm()(IDS, mask=torch.zeros(L, L)), TypeError, "additive values belong in attn_bias"),
    "a softcap on sdpa": (
        lambda: lm(softcap=3.0, backend="sdpa")(IDS), RuntimeError, "backend 'sdpa' cannot serve this call: torch's kernels have no soft-cap; ",
    ),
}  # fmt: skip


def experts(**options):
    return MixtureOfExperts(12, 8, **{"num_experts": 4, **options})


def filled(*, layers=1, **described):
    """A model and a cache that has read five tokens of two rows."""
    network, cache = lm(position="rotary", head_dim=4), KVCache(16, num_layers=layers)
    with torch.no_grad():
        network(IDS, cache=cache, **described)
    return network, cache


def go_on(ids=IDS, *, before=None, **described):
    network, cache = filled(**(before or {}))
    with torch.no_grad():
        return network(ids, cache=cache, **described)


def appended(*shapes, dtypes=(torch.float32, torch.float32)):
    cache = LayerCache(8)
    for shape, dtype in zip(shapes, dtypes, strict=True):
        cache.append(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


def cross_with_another_memory():
    cache, cross = LayerCache(8), mha()
    with torch.no_grad():
        cross(X, torch.randn(B, S, 12), cache=cache)
        cross(X, torch.randn(B, L, 12), cache=cache)


BRICKS = {
    # attention
    "a backend that nobody registered": (
        lambda: DotProductAttention(backend="flsh"), ValueError, "backend='flsh' is not known; one of auto, ",
    ),
    "a backend of a config that nobody registered": (lambda: lm(backend="flsh"), ValueError, "backend='flsh' is not known; one of auto, "),
    "a soft-cap of zero in a core": (lambda: DotProductAttention(softcap=0.0), ValueError, "softcap must be positive and finite"),
    "heads of another layer": (
        lambda: mha()(X, head_mask=torch.ones(4)), ValueError, "head_mask must have shape (H,) or (B, H) = (3,) or (2, 3), got (4,)",
    ),
    "a head mask of another batch": (
        lambda: mha()(X, head_mask=torch.ones(5, 3)), ValueError, "head_mask must have shape (H,) or (B, H) = (3,) or (2, 3), got (5, 3)",
    ),
    "a query of no tokens": (lambda: mha()(X[:, :0]), ValueError, "query must have at least one head, position and channel"),
    "no rows of queries": (lambda: mha()(X[:0]), ValueError, "query must have at least one"),
    "no memory positions": (lambda: mha()(X, X[:, :0]), ValueError, "key must have at least one head, position and channel"),
    "memory of another batch": (lambda: mha()(X, X[:1]), ValueError, "query, key and value must have one batch size, got (2, 1, 1)"),
    "a bias for other heads": (
        lambda: mha()(X, attn_bias=ALiBi(4)), ValueError, "attn_bias ALiBi has slopes for 4 heads, but query has 3",
    ),
    "a bias of another length": (
        lambda: mha()(X, attn_bias=torch.zeros(L, S)), ValueError, "attn_bias of shape (5, 7) must be (L, S) or broadcast to",
    ),
    # caches
    "a cache for nothing": (lambda: LayerCache(0), ValueError, "capacity must be a positive whole number of positions, got 0"),
    "half a capacity": (lambda: KVCache(2.5, 1), ValueError, "capacity must be a positive whole number of positions, got 2.5"),
    "a cache without layers": (lambda: KVCache(8, 0), ValueError, "num_layers must be positive, got 0"),
    "a cache for another model": (
        lambda: filled(layers=2), ValueError, "cache has 2 layers, but the model has num_layers=1",
    ),
    "a full cache": (
        lambda: go_on(torch.ones(B, 12, dtype=torch.long)), ValueError,
        "cache has capacity for 16 positions: 5 are taken, 12 more do not fit",
    ),
    "a prompt beyond the capacity": (
        lambda: lm()(IDS, cache=KVCache(4, 1)), ValueError, "cache has capacity for 4 positions: 0 are taken, 5 more do not fit",
    ),
    "another batch after the prompt": (
        lambda: go_on(IDS[:1]), ValueError, "key must fit what the cache holds, (B, Hkv, D) = (2, 3, 4) torch.float32 on cpu, got (1, 3, 4)",
    ),
    "another width after the first": (
        lambda: appended((1, 2, 3, 4), (1, 2, 1, 5)), ValueError, "key must fit what the cache holds, (B, Hkv, D) = (1, 2, 4)",
    ),
    "another dtype after the first": (
        lambda: appended((1, 2, 3, 4), (1, 2, 1, 4), dtypes=(torch.float32, torch.bfloat16)), ValueError,
        "(1, 2, 4) torch.float32 on cpu, got (1, 2, 4) torch.bfloat16 on cpu",
    ),
    "gradients through a cache": (
        lambda: mha()(X, cache=LayerCache(8)), RuntimeError,
        "key requires grad, but a cache is for inference: call under torch.no_grad()",
    ),
    "a key_mask of all tokens beside a cache": (
        lambda: go_on(key_mask=bools(B, 10)), ValueError, "key_mask must describe the new tokens, (B, L) = (2, 5), got (2, 10)",
    ),
    "documents from the middle on": (
        lambda: go_on(document_ids=IDS), ValueError, "document_ids must be given for all tokens or for none",
    ),
    "documents up to the middle": (
        lambda: go_on(before={"document_ids": IDS}), ValueError, "document_ids must be given for all tokens or for none",
    ),
    "another memory": (
        cross_with_another_memory, ValueError, "key must be the memory that the cache was filled from, (B, S) = (2, 7), got (2, 5)",
    ),
    # positions
    "no rotary width": (lambda: Rotary(0), ValueError, "rotary positions pair channels: head_dim must be even, got 0"),
    "an unknown stretching": (
        lambda: RotaryScaling("dynamic", 2.0), ValueError, "rotary_scaling='dynamic' must be one of linear, ntk, yarn, llama3",
    ),
    "shrinking": (lambda: RotaryScaling("linear", 0.5), ValueError, "rotary_factor=0.5 must be a number from 1"),
    "yarn of no length": (
        lambda: RotaryScaling("yarn", 2.0), ValueError, "rotary_original_len=None must be positive with rotary_scaling=yarn",
    ),
    "rotary positions of another length": (
        lambda: mha(rotary=Rotary(4))(X, position_ids=torch.arange(4)[None]), ValueError,
        "position_ids must be whole numbers of shape (B or 1, L) = (2 or 1, 5), got torch.int64 (1, 4)",
    ),
    "flat rotary positions": (
        lambda: mha(rotary=Rotary(4))(X, position_ids=torch.arange(L)), ValueError, "(B or 1, L) = (2 or 1, 5), got torch.int64 (5,)",
    ),
    "float positions": (
        lambda: lm()(IDS, position_ids=torch.zeros(B, L)), ValueError, "position_ids must be whole numbers of shape (B or 1, L)",
    ),
    "positions of another batch": (
        lambda: lm()(IDS, position_ids=torch.zeros(3, L, dtype=torch.long)), ValueError, "(2 or 1, 5), got torch.int64 (3, 5)",
    ),
    "positions beyond the table": (
        lambda: lm()(IDS, position_ids=torch.arange(5, 10)[None]), ValueError,
        "position_ids must lie between 0 and 8, the end of the table; got 5 to 9",
    ),
    "negative positions": (lambda: lm()(IDS, position_ids=-IDS), ValueError, "the end of the table; got -1 to -1"),
    "positions for ALiBi": (
        lambda: lm(position="alibi")(IDS, position_ids=IDS), ValueError, "position_ids were given, but position=alibi does not read them",
    ),
    # models
    "ids beyond the vocabulary": (
        lambda: lm()(13 * IDS), ValueError, "input_ids must lie between 0 and 12, the end of the table; got 13 to 13",
    ),
    "ids of no tokens": (lambda: lm()(IDS[:, :0]), ValueError, "input_ids must have at least one row and one token, got shape (2, 0)"),
    "no rows of ids": (lambda: lm()(IDS[:0]), ValueError, "input_ids must have at least one row and one token, got shape (0, 5)"),
    "types of another length": (
        lambda: lm(type_vocab_size=2)(IDS, token_type_ids=IDS[:, :3]), ValueError,
        "token_type_ids must have the shape of input_ids, (2, 5), got (2, 3)",
    ),
    "types beyond their table": (
        lambda: lm(type_vocab_size=2)(IDS, token_type_ids=2 * IDS), ValueError, "token_type_ids must lie between 0 and 1, the end of the table",
    ),
    "a head mask of another depth": (
        lambda: lm()(IDS, head_mask=torch.ones(2, 3)), ValueError, "head_mask must have shape (num_layers, H) = (1, 3), got (2, 3)",
    ),
    "a head mask of a layer too far": (
        lambda: lm()(IDS, head_mask={1: torch.ones(3)}), ValueError, "head_mask names layers [1], but the model has 0 to 0",
    ),
    # feed-forward and blocks
    "no hidden width": (lambda: FeedForward(12, 0), ValueError, "embed_dim and ffn_dim must be positive, got 12 and 0"),
    "no width": (lambda: FeedForward(0, 8), ValueError, "embed_dim and ffn_dim must be positive, got 0 and 8"),
    "more experts a token than there are": (
        lambda: experts(experts_per_token=5), ValueError, "experts_per_token=5 must lie between 1 and num_experts=4",
    ),
    "no expert a token": (lambda: experts(experts_per_token=0), ValueError, "experts_per_token=0 must lie between 1 and num_experts=4"),
    "an unknown activation of experts": (lambda: experts(activation="glu"), ValueError, "activation='glu' must be one of gelu"),
    "a layer scale of zero": (lambda: LayerScale(12, 0.0), ValueError, "layer_scale must be a positive start (or None for off), got 0.0"),
    "dropping every sample": (lambda: StochasticDepth(1.0), ValueError, "stochastic_depth must lie in [0, 1), got 1.0"),
    "gains for an unknown role": (
        lambda: init_weights(mha(), gains={"queries": 2.0}), ValueError, "gains has unknown roles ['queries']; the roles are query, key",
    ),
    # configs
    "a factor without stretching": (
        lambda: TransformerConfig(position="rotary", rotary_factor=2.0), ValueError, "rotary_factor=2.0 needs rotary_scaling",
    ),
    "stretching what does not turn": (
        lambda: TransformerConfig(rotary_scaling="ntk"), ValueError, "rotary_scaling=ntk needs position=rotary, got position=learned",
    ),
    "llama3 without a length": (
        lambda: TransformerConfig(position="rotary", rotary_scaling="llama3", rotary_factor=8.0), ValueError,
        "rotary_original_len=null must be given with rotary_scaling=llama3",
    ),
    "too many experts a token in a config": (
        lambda: TransformerConfig(num_experts=2, experts_per_token=3), ValueError, "experts_per_token=3 must not exceed num_experts=2",
    ),
    "a stochastic depth of one": (lambda: TransformerConfig(stochastic_depth=1.0), ValueError, "stochastic_depth=1.0 must lie in [0, 1)"),
    "no experts": (lambda: TransformerConfig(num_experts=0), ValueError, "num_experts=0 must be positive"),
}  # fmt: skip
CASES = {**ATTENTION, **MASKS, **MODULES, **BRICKS}


@pytest.mark.parametrize("mistake", CASES)
def test_a_plain_mistake_is_answered_by_name(mistake):
    call, error, message = CASES[mistake]
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_no_case_shadows_another():
    assert len(CASES) == len(ATTENTION) + len(MASKS) + len(MODULES) + len(BRICKS) >= 150
