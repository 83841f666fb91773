"""A plain mistake gets a ValueError or a TypeError that names the argument. The names of the cases: ``argument: mistake``."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import minitx.nn as mx
from minitx.config import TransformerConfig
from minitx.generation import beam_search, generate
from minitx.nn.efficient import (
    AdditiveAttention,
    EfficientAttention,
    LinearAttention,
    LinformerAttention,
    PerformerAttention,
    build_core,
)
from minitx.nn.models import build_model

B, H, L, S, D = 2, 6, 5, 7, 11
Q, K = torch.randn(B, H, L, D), torch.randn(B, 3, S, D)
X, IDS = torch.randn(B, L, 12), torch.ones(B, L, dtype=torch.long)


def attend(query=Q, key=K, value=K, *args, **options):
    return mx.scaled_dot_product_attention(query, key, value, *args, **options)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def called(module, inputs, call=None):
    """``module``, called where there are inputs."""
    return module(*inputs, **(call or {})) if inputs else module


def mha(*inputs, call=None, **options):
    return called(mx.MultiHeadAttention(12, 3, **options), inputs, call)


def drop_in(**options):
    return mx.DropInAttention(nn.MultiheadAttention(12, 3, batch_first=True))(X, X, X, **options)


def block(*inputs, call=None, **options):
    return mx.Block(mha(), mx.FeedForward(12, 8), norm=nn.Identity, **options)(X, **(call or {}))


def build(architecture, *inputs, call=None, **options):
    sizes = {"vocab_size": 13, "embed_dim": 12, "num_heads": 3, "num_layers": 1, "max_len": 9, "architecture": architecture}
    return called(build_model(TransformerConfig(**{**sizes, **options})), inputs, call)


lm = partial(build, "decoder")


def picture(pixels, **options):
    return build("vision", pixels, **{"image_size": 8, "num_channels": 1, "num_labels": 5, "head": "sequence", **options})


def go_on(ids=IDS, *, layers=1, before=None, window=None, **described):
    """A model and a cache of 16 positions that reads five tokens of two rows, and then ``ids``."""
    model = lm(position="rotary", head_dim=4, window=window)
    cache = mx.KVCache(16, num_layers=layers) if window is None else model.make_cache(16)
    with torch.no_grad():
        model(IDS, cache=cache, **(before or {}))
        return model(ids, cache=cache, **described)


def appended(*dtypes):
    cache = mx.LayerCache(8)
    for new in (torch.zeros(1, 2, 3, 4, dtype=dtype) for dtype in dtypes):
        cache.append(new, new)
        cache.advance(3)


VALUE_ERRORS = {
    # masks
    "attn_mask: 3-D, which is ambiguous": lambda: attend(attn_mask=bools(B, L, S)),
    "attn_mask: 1-D": lambda: attend(attn_mask=bools(S)),
    "attn_mask: another size": lambda: attend(attn_mask=bools(L, L)),
    "key_mask: 4-D": lambda: mx.Padding(bools(B, 1, 1, S)),
    "key_mask: another batch, inside a union": lambda: attend(attn_mask=mx.Padding(bools(1, S)) | mx.Causal()),
    "document ids: another length": lambda: attend(attn_mask=mx.Documents(IDS)),
    "document ids: flat": lambda: lm(IDS, call={"document_ids": IDS[0]}),
    "pattern: no square": lambda: mx.BlockSparse(bools(2, 3), 4),
    "pattern: of other heads": lambda: attend(attn_mask=mx.BlockSparse(bools(H + 1, 2, 2), S)),
    "block_size: none": lambda: mx.BlockSparse(bools(2, 2), 0),
    "pattern: fewer positions than the call has": lambda: attend(attn_mask=mx.BlockSparse(bools(2, 2), 3)),
    "value: another length in a layer": lambda: mha(X, X, X[:, :3]),
    "query: no positions in a layer": lambda: mha(X[:, :0]),
    "key: no positions in a layer": lambda: mha(X, X[:, :0]),
    "prefix length: another batch": lambda: attend(attn_mask=mx.PrefixLM(torch.tensor([1, 2, 3]))),
    "prefix length: negative": lambda: mx.PrefixLM(-1),
    "window: none": lambda: mx.SlidingWindow(0),
    "is_causal: more queries than keys": lambda: attend(torch.randn(B, H, 9, D), is_causal=True),
    # tensors of a call
    "query: 3-D": lambda: attend(Q[0]),
    "key: no positions": lambda: attend(key=K[:, :, :0], value=K[:, :, :0]),
    "key: another width": lambda: attend(key=K[..., :5]),
    "key: another batch": lambda: attend(key=K[:1]),
    "key: heads that do not divide": lambda: attend(key=torch.randn(B, 4, S, D), value=torch.randn(B, 4, S, D)),
    "value: fewer than keys": lambda: attend(value=K[:, :, :3]),
    "attn_bias: 3-D": lambda: attend(attn_bias=torch.ones(H, L, S)),
    "attn_bias: another length": lambda: mha(X, call={"attn_bias": torch.zeros(L, S)}),
    "attn_bias: slopes of other heads": lambda: mha(X, call={"attn_bias": mx.ALiBi(4)}),
    "attn_bias: a table of other heads": lambda: mha(X, call={"attn_bias": mx.T5RelativeBias(4)}),
    "num_heads: neither heads nor slopes": lambda: mx.ALiBi(),
    "num_heads: none of ALiBi": lambda: mx.ALiBi(0),
    "max_distance: among the exact ones": lambda: mx.T5RelativeBias(2, num_buckets=32, max_distance=8),
    "scale: not a number": lambda: attend(scale=math.nan),
    "softcap: zero": lambda: attend(softcap=0.0),
    "sinks: one per key head": lambda: attend(sinks=torch.zeros(3)),
    "dropout_p: one": lambda: attend(dropout_p=1.0),
    "dropout: below zero in a layer": lambda: mha(dropout=-0.1),
    "backend: an unknown name": lambda: attend(backend="flash"),
    # the layer
    "embed_dim: not divisible": lambda: mx.MultiHeadAttention(12, 5),
    "num_heads: none": lambda: mx.MultiHeadAttention(12, 0),
    "num_kv_heads: does not divide": lambda: mha(num_kv_heads=2),
    "head_dim: none": lambda: mha(head_dim=0),
    "query: another width": lambda: mha(X[..., :11]),
    "query: without batch": lambda: mha(X[0]),
    "key: another width in a layer": lambda: mha(X, X, kdim=7),
    "value: the key does not serve as one": lambda: mha(X, torch.randn(B, S, 7), kdim=7),
    "value: without key": lambda: mha(X, call={"value": X}),
    "rotary: other heads": lambda: mha(rotary=mx.Rotary(2)),
    "num_kv_heads: gains of other heads": lambda: mha(qk_norm=mx.QKNorm("l2", 4, num_kv_heads=1)),
    "scale: other heads": lambda: mha(scale=mx.ScoreScale("learned", head_dim=4, num_heads=1)),
    "rotary: cross-attention": lambda: mha(X, torch.randn(B, S, 12), rotary=mx.Rotary(4)),
    "attn_mask: another size in torch's place": lambda: drop_in(attn_mask=bools(2, L, L)),
    "attn_mask: a causal hint alone in torch's place": lambda: drop_in(is_causal=True),
    # parts
    "num_heads: none for a learned scale": lambda: mx.ScoreScale("learned", head_dim=4),
    "max_len: none for log_length": lambda: mha(scale="log_length"),
    "scale: a learned one has no number": lambda: mx.scale_multiplier("learned", 4),
    "factor: not a number": lambda: mx.ScoreScale(head_dim=4, factor=math.nan),
    "factor: without end": lambda: mx.set_scale(mha(), "inv", factor=math.inf),
    "qk_norm: an unknown kind": lambda: mx.QKNorm("batch", 4),
    "num_kv_heads: none for l2": lambda: mx.QKNorm("l2", 4),
    "norm: an unknown kind": lambda: mx.make_norm("batch", 4),
    "norm_position: an unknown one": lambda: mx.Residual(nn.Identity, "middle"),
    "norm_position: parallel and post": lambda: block(norm_position="post", parallel=True),
    "memory: nobody reads it": lambda: block(call={"memory": X}),
    "memory: missing": lambda: block(cross_attention=mha()),
    "activation: an unknown one": lambda: mx.FeedForward(4, 8, activation="tanh"),
    "ffn_dim: none": lambda: mx.FeedForward(12, 0),
    "layer_scale: zero": lambda: mx.LayerScale(12, 0.0),
    "stochastic_depth: one": lambda: mx.StochasticDepth(1.0),
    "init: an unknown scheme": lambda: mx.init_weights(mha(), "he"),
    "init_fold: an unknown one": lambda: mx.init_weights(mha(), fold="key"),
    "gains: an unknown role": lambda: mx.init_weights(mha(), gains={"queries": 2.0}),
    # positions
    "head_dim: odd for rotary": lambda: mx.Rotary(5),
    "rotary_scaling: an unknown kind": lambda: mx.RotaryScaling("dynamic", 2.0),
    "rotary_factor: shrinks": lambda: mx.RotaryScaling("linear", 0.5),
    "rotary_original_len: none for yarn": lambda: mx.RotaryScaling("yarn", 2.0),
    "rotary_low: above the high one": lambda: mx.RotaryScaling("llama3", 8.0, 8192, low=4.0, high=1.0),
    "rotary_low: above the high one of the kind": lambda: mx.RotaryScaling("yarn", 8.0, 8192, low=33.0),
    "rotary_low: no turns": lambda: mx.RotaryScaling("yarn", 8.0, 8192, low=0.0),
    "position_ids: another length": lambda: mha(X, rotary=mx.Rotary(4), call={"position_ids": torch.arange(4)[None]}),
    "position_ids: no whole numbers": lambda: lm(IDS, call={"position_ids": torch.zeros(B, L)}),
    "position_ids: beyond the table": lambda: lm(IDS, call={"position_ids": torch.arange(5, 10)[None]}),
    "position_ids: negative": lambda: lm(IDS, call={"position_ids": -IDS}),
    "position_ids: ALiBi does not read them": lambda: lm(IDS, position="alibi", call={"position_ids": IDS}),
    # caches
    "capacity: none": lambda: mx.LayerCache(0),
    "num_layers: none": lambda: mx.KVCache(8, 0),
    "num_layers: a switch": lambda: mx.KVCache(8, True),
    "num_layers: two and a half": lambda: mx.KVCache(8, 2.5),
    "num_layers: a cache for another model": lambda: go_on(layers=2),
    "key: another batch after the prompt": lambda: go_on(IDS[:1]),
    "key: another dtype after the first": lambda: appended(torch.float32, torch.bfloat16),
    "position_ids: from the middle on": lambda: go_on(position_ids=torch.arange(5, 10)[None]),
    "position_ids: up to the middle": lambda: go_on(before={"position_ids": torch.arange(5)[None]}),
    "key_mask: of all tokens beside a cache": lambda: go_on(key_mask=bools(B, 10)),
    "document_ids: from the middle on": lambda: go_on(document_ids=IDS),
    "document_ids: up to the middle": lambda: go_on(before={"document_ids": IDS}),
    # models and configs
    "input_ids: flat": lambda: lm(IDS[0]),
    "input_ids: no tokens": lambda: lm(IDS[:, :0]),
    "input_ids: beyond the vocabulary": lambda: lm(13 * IDS),
    "max_len: more tokens than positions": lambda: lm(IDS, max_len=4),
    "token_type_ids: the model has none": lambda: lm(IDS, call={"token_type_ids": IDS}),
    "token_type_ids: beyond their table": lambda: lm(IDS, type_vocab_size=2, call={"token_type_ids": 2 * IDS}),
    "token_type_ids: another shape": lambda: lm(IDS, type_vocab_size=2, call={"token_type_ids": IDS[:, :3]}),
    "vocab_size: none": lambda: lm(vocab_size=None),
    "architecture: another": lambda: mx.Encoder(TransformerConfig(vocab_size=13)),
    "num_labels: none": lambda: build("encoder", head="token"),
    "image_size: none": lambda: picture(torch.zeros(2, 1, 8, 8), image_size=None),
    "pixel_values: no whole patches": lambda: picture(torch.zeros(2, 1, 8, 7)),
    "input_ids: none, and no memory": lambda: build("encoder_decoder", None, IDS),
    "memory: of other rows": lambda: build("encoder_decoder", None, IDS, call={"memory": X[:1]}),
    "mask: a cache that forgets": lambda: go_on(window=3, mask=mx.SlidingWindow(2)),
    # efficient cores
    "hidden_dim: none": lambda: AdditiveAttention(4, hidden_dim=0),
    "chunk_size: none": lambda: LinearAttention(chunk_size=0),
    "num_features: none": lambda: PerformerAttention(4, num_features=0),
    "num_slots: none": lambda: LinformerAttention(8, 0),
    "num_slots: of another core": lambda: build_core("linear", head_dim=4, max_len=8, num_slots=2),
    "num_slots=None: for a linformer": lambda: build_core("linformer", head_dim=D, max_len=S),
    "attention='flash': an unknown core": lambda: build_core("flash", head_dim=D, max_len=S),
    "head_dim = 4: heads of another width": lambda: PerformerAttention(4)(mx.functional.make_call(Q, K, K)),
    f"max_len={S - 1}: more keys than a linformer has slots for": lambda: LinformerAttention(S - 1, 3)(mx.functional.make_call(Q, K, K)),
    "backend: an unknown one": lambda: mx.DotProductAttention(backend="fast"),
    "rotary_factor: nothing to stretch": lambda: TransformerConfig(position="rotary", rotary_factor=2.0),
    "rotary_scaling: nothing turns": lambda: TransformerConfig(rotary_scaling="ntk"),
}  # fmt: skip
INTEGERS = (torch.int8, torch.int16, torch.uint8)
VALUE_ERRORS |= {f"input_ids: {dtype}": lambda dtype=dtype: lm(IDS.to(dtype)) for dtype in INTEGERS}
VALUE_ERRORS |= {
    f"position_ids: {dtype}": lambda dtype=dtype: lm(IDS, call={"position_ids": IDS.to(dtype)}) for dtype in INTEGERS
}
VALUE_ERRORS["token_type_ids: torch.uint8"] = lambda: lm(IDS, type_vocab_size=2, call={"token_type_ids": IDS.byte()})
TYPE_ERRORS = {
    "query: nested": lambda: attend(torch.nested.as_nested_tensor(list(Q), layout=torch.jagged)),
    "key: nested": lambda: mha(X, torch.nested.as_nested_tensor(list(X), layout=torch.jagged)),
    "input_ids: nested": lambda: lm(torch.nested.as_nested_tensor(list(IDS), layout=torch.jagged)),
    "cache: that of a model for a layer": lambda: mha(X, call={"cache": mx.KVCache(9, 2)}),
    "cache: that of a layer for a model": lambda: lm(IDS, call={"cache": mx.LayerCache(9)}),
    "pixel_values: whole numbers": lambda: picture(torch.zeros(2, 1, 8, 8, dtype=torch.long)),
    "attn_bias: where the floats of a mask belong": lambda: mha(X, call={"attn_mask": torch.zeros(L, L)}),
    "attn_mask: whole numbers": lambda: attend(attn_mask=torch.ones(L, S, dtype=torch.long)),
    "document ids: a list": lambda: mx.Documents([[1]]),
    "attn_mask: a list": lambda: attend(attn_mask=[[True]]),
    "key_mask: whole numbers": lambda: mha(X, call={"key_mask": IDS}),
    "key_padding_mask: floats": lambda: mx.from_key_padding_mask(torch.zeros(B, S)),
    "key_padding_mask: whole numbers in torch's place": lambda: drop_in(key_padding_mask=IDS),
    "attn_mask: whole numbers in torch's place": lambda: drop_in(attn_mask=IDS[:1].expand(L, L)),
    "norm: a norm in place of a function that builds norms": lambda: mx.Residual(nn.Identity()),
    "pattern: floats": lambda: mx.BlockSparse(torch.eye(2), 4),
    "query: whole numbers": lambda: attend(Q.long(), K.long(), K.long()),
    **{f"{name}: a list": lambda name=name: attend(**{name: [1.0]}) for name in ("query", "key", "value")},
    "query: a list in a layer": lambda: mha([1.0]),
    "key: an array in a layer": lambda: mha(X, X.numpy()),
    "value: an array in a layer": lambda: mha(X, X, X.numpy()),
    "query: a list in torch's place": lambda: mx.DropInAttention(nn.MultiheadAttention(12, 3))([1.0], X, X),
    "input_ids: a list": lambda: lm([[1, 2]]),
    "input_ids: a list to generate from": lambda: generate(lm().eval(), [[1, 2]]),
    "input_ids: a list to search from": lambda: beam_search(lm().eval(), [[1, 2]]),
    "decoder_input_ids: a list": lambda: build("encoder_decoder", IDS, [[1]]),
    "memory: a list": lambda: build("encoder_decoder", None, IDS, call={"memory": [1.0]}),
    "pixel_values: an array": lambda: picture(torch.zeros(2, 1, 8, 8).numpy()),
    **{
        f"{name}: a list": lambda name=name: lm(IDS, call={name: [[1] * L] * B})
        for name in ("position_ids", "token_type_ids", "document_ids", "key_mask", "mask")
    },
    "cache: a number for a layer": lambda: mha(X, call={"cache": 5}),
    "cache: a number for a model": lambda: lm(IDS, call={"cache": 5}),
    "stop: a number": lambda: generate(lm().eval(), IDS, stop=5),
    "softcap: a word": lambda: attend(softcap="5"),
    "softcap: a word in a layer": lambda: mha(softcap="5"),
    "dropout_p: none": lambda: attend(dropout_p=None),
    "dropout: none in a layer": lambda: mha(dropout=None),
    "sinks: a list": lambda: attend(sinks=[1.0] * H),
    "key: another device": lambda: attend(key=K.to("meta")),
    "value: another dtype": lambda: attend(value=K.double()),
    "attn_bias: whole numbers": lambda: attend(attn_bias=torch.ones(L, S, dtype=torch.long)),
    "slopes: whole numbers": lambda: mx.ALiBi(slopes=torch.ones(2, dtype=torch.long)),
    "scale: a word": lambda: attend(scale="unscaled"),
}  # fmt: skip
CASES = [(ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS)]


@pytest.mark.parametrize(
    ("error", "mistake", "call"), [(error, name, call) for error, cases in CASES for name, call in cases.items()]
)
def test_a_plain_mistake_is_answered_by_the_name_of_the_argument(error, mistake, call):
    with pytest.raises(error, match=rf"\b{mistake.partition(':')[0]}(?!\w)"):
        call()


@pytest.mark.parametrize("kind", [mx.Mask, mx.Bias, EfficientAttention])
def test_a_part_of_ones_own_without_its_method_is_named(kind):
    class Mine(kind):
        pass

    with pytest.raises(NotImplementedError, match="Mine must define"):
        Mine()(mx.functional.make_call(Q, K, K)) if kind is EfficientAttention else Mine().dense(2, 3)


WHOLE, FLOATS = torch.ones(B, L, dtype=torch.long), torch.ones(B, L)
SQUARE = torch.ones(L, L)
PAIR = partial(build, "encoder_decoder", IDS)
MASKS = {
    "key_mask of a layer": ("key_mask", lambda m: mha(X, call={"key_mask": m}), FLOATS),
    "key_mask of a rule": ("key_mask", mx.Padding, FLOATS),
    "key_mask of a decoder": ("key_mask", lambda m: lm(IDS, call={"key_mask": m}), FLOATS),
    "key_mask of a decoder with a cache": ("key_mask", lambda m: go_on(key_mask=m), FLOATS),
    "key_mask of an encoder": ("key_mask", lambda m: build("encoder", IDS, call={"key_mask": m}), FLOATS),
    "key_mask of a pair": ("key_mask", lambda m: PAIR(IDS, call={"key_mask": m}), FLOATS),
    "decoder_key_mask": ("decoder_key_mask", lambda m: PAIR(IDS, call={"decoder_key_mask": m}), FLOATS),
    "key_mask of generate": ("key_mask", lambda m: generate(lm().eval(), IDS, key_mask=m, max_new_tokens=1), FLOATS),
    "attn_mask of the function": ("attn_mask", lambda m: attend(Q, Q, Q, m), SQUARE),
    "attn_mask of a layer": ("attn_mask", lambda m: mha(X, call={"attn_mask": m}), SQUARE),
    "attn_mask of a block": ("attn_mask", lambda m: block(call={"attn_mask": m}), SQUARE),
    "memory_mask of a block": (
        "memory_mask",
        lambda m: block(cross_attention=mha(), call={"memory": X, "memory_mask": m}),
        SQUARE,
    ),
    "mask of a decoder": ("mask", lambda m: lm(IDS, call={"mask": m}), SQUARE),
    "mask of an encoder": ("mask", lambda m: build("encoder", IDS, call={"mask": m}), SQUARE),
    "mask of a pair": ("mask", lambda m: PAIR(IDS, call={"mask": m}), SQUARE),
    "key_padding_mask": ("key_padding_mask", mx.from_key_padding_mask, FLOATS),
    "pattern": ("pattern", lambda m: mx.BlockSparse(m, 4), SQUARE),
}


@pytest.mark.parametrize("dtype", [torch.long, torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", MASKS)
def test_a_mask_of_0_and_1_is_refused_by_its_own_name_with_the_way_to_a_bool_one_and_the_page(place, dtype):
    name, call, ones = MASKS[place]
    with pytest.raises(TypeError, match=rf"^{name} must .*{dtype}.*\.bool\(\).*docs/attention\.md, Masks\)$"):
        call(ones.to(dtype))
    call(ones.bool())


@pytest.mark.parametrize("name", ["key_padding_mask", "attn_mask"])
def test_whole_numbers_in_place_of_torchs_masks_are_refused_with_both_polarities(name):
    with pytest.raises(TypeError, match=rf"^{name} .*int64.*\.bool\(\).*{name} == 0.*docs/attention\.md, Masks\)$"):
        drop_in(**{name: (IDS if name == "key_padding_mask" else IDS[:1].expand(L, L))})


SHAPES = {
    "attn_mask: three axes": lambda: attend(attn_mask=bools(B, L, S)),
    "attn_mask: one axis": lambda: attend(attn_mask=bools(S)),
    "attn_mask: another length": lambda: attend(attn_mask=bools(L, S + 1)),
    "mask: three axes": lambda: lm(IDS, call={"mask": bools(B, L, L)}),
    "key_mask: three axes": lambda: mx.Padding(bools(B, 1, S)),
    "key_mask: another length": lambda: mha(X, call={"key_mask": bools(B, L + 1)}),
    "key_mask: padding at the end of a prompt": lambda: generate(lm().eval(), IDS, key_mask=bools(B, L).tril(L - 3)),
    "key_mask: of other prompts": lambda: generate(lm().eval(), IDS, key_mask=bools(B, L - 1)),
    "is_causal: more queries than keys": lambda: attend(Q, K[:, :, :3], K[:, :, :3], is_causal=True),
    "is_causal: without a mask in torch's place": lambda: drop_in(is_causal=True),
    "attn_mask: another length in torch's place": lambda: drop_in(attn_mask=bools(L, S)),
    "key_padding_mask: another length in torch's place": lambda: drop_in(key_padding_mask=bools(B, S)),
    "mask: of a core that sums over keys": lambda: mha(X, core=LinearAttention(), call={"attn_mask": bools(L, L).tril(1)}),
}  # fmt: skip


@pytest.mark.parametrize("mistake", SHAPES)
def test_every_refusal_of_a_mask_names_the_page_with_the_table(mistake):
    with pytest.raises(ValueError, match=rf"\b{mistake.partition(':')[0]}\b.*docs/attention\.md, Masks\)$"):
        SHAPES[mistake]()
