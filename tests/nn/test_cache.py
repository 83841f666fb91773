"""Decoding with a cache is the full forward, piece by piece."""

from functools import partial

import pytest
import torch
from sizes import FUSED_CPU, OpRecorder, assert_same, in_pieces, tokens
from sizes import small_model as model
from torch import nn

from minitx.nn import (
    Block,
    FeedForward,
    KVCache,
    LayerCache,
    MultiHeadAttention,
    Padding,
    PrefixLM,
    QKNorm,
    Rotary,
    SlidingWindow,
    StaticCache,
)

E, H, L = 12, 3, 11
POSITIONS = {
    **{position: {"position": position} for position in ("learned", "sinusoidal", "rotary", "alibi", "t5", "none")},
    "interleaved yarn": {
        "position": "rotary",
        "rotary_interleaved": True,
        "rotary_scaling": "yarn",
        "rotary_factor": 4.0,
        "rotary_original_len": 8,
    },
}
VARIANTS = {
    "default": {},
    **{f"{kind}-norm": {"norm_position": kind} for kind in ("post", "sandwich", "deepnorm")},
    "parallel": {"parallel": True},
    "window": {"window": 3},
    **{f"scale {word}": {"scale": word} for word in ("unscaled", "learned", "log_length")},
    "grouped": {"num_kv_heads": 1},
    "qk-norm": {"qk_norm": "layer"},
    "sinks and soft-cap": {"sinks": True, "softcap": 2.0},
    "experts": {"num_experts": 4, "activation": "swiglu"},
}  # fmt: skip
PAIRS = [
    *((position, "default") for position in POSITIONS),
    *(("rotary", variant) for variant in VARIANTS if variant != "default"),
]
# lengths of the pieces in which a prompt of 11 tokens is read
SPLITS = {"token by token": [1] * L, "prompt, then tokens": [7, 1, 1, 1, 1], "uneven pieces": [2, 5, 1, 3], "one piece": [L]}


def after_a_prompt(network, ids, length, static, key_mask=None):
    """The logits of ``ids`` after the first ``length``, which an ordinary cache reads, token by token from ``static``."""
    prompt = KVCache(length, num_layers=network.config.num_layers)
    with torch.no_grad():
        network(ids[:, :length], cache=prompt, key_mask=None if key_mask is None else key_mask[:, :length])
        static.fill(prompt)
        return torch.cat([network(token, cache=static) for token in ids[:, length:].split(1, dim=1)], dim=1)


@pytest.mark.parametrize(("position", "variant"), PAIRS)
def test_decoding_with_a_cache_equals_the_full_forward(position, variant):
    network, ids = model(**POSITIONS[position], **VARIANTS[variant]), tokens(2, L)
    for split in SPLITS.values() if variant == "default" else [SPLITS["uneven pieces"]]:
        assert_same(in_pieces(network, ids, split, KVCache(L, num_layers=2)), network(ids))


@pytest.mark.parametrize("backend", ["math", "sdpa", "chunked"])
@pytest.mark.parametrize("position", ["rotary", "alibi"])
def test_every_backend_decodes_alike(position, backend):
    options, ids, cache = {**POSITIONS[position], "num_kv_heads": 1}, tokens(2, L), KVCache(L, num_layers=2)
    got = in_pieces(model(**options, backend=backend), ids, [3, 1, 5, 2], cache)
    assert_same(got, model(**options, backend="math")(ids))


@pytest.mark.parametrize("variant", ["default", "window", "scale log_length"])
@pytest.mark.parametrize("position", POSITIONS)
def test_left_padded_prompts_decode_as_each_would_alone(position, variant):
    network, ids = model(**POSITIONS[position], **VARIANTS[variant]), tokens(3, L)
    real = torch.tensor([[t >= padding for t in range(L)] for padding in (0, 4, 7)])
    together = in_pieces(network, ids, SPLITS["uneven pieces"], KVCache(L, num_layers=2), key_mask=real)
    assert_same(together[real], network(ids, key_mask=real)[real])
    for row, padding in enumerate((0, 4, 7)):
        assert_same(together[row : row + 1, padding:], network(ids[row : row + 1, padding:]))


def test_a_key_mask_may_end_with_the_prompt_or_begin_after_it():
    network, ids = model(position="rotary"), tokens(2, L)
    prompt_mask = torch.tensor([[False, False, True, True], [True] * 4])
    whole = torch.cat((prompt_mask, torch.ones(2, L - 4, dtype=torch.bool)), dim=1)
    cache = KVCache(L, num_layers=2)
    with torch.no_grad():
        first = network(ids[:, :4], key_mask=prompt_mask, cache=cache)
        rest = network(ids[:, 4:], cache=cache)
        assert_same(torch.cat((first, rest), dim=1)[whole], network(ids, key_mask=whole)[whole])
        cache = KVCache(L, num_layers=2)
        network(ids[:, :4], cache=cache)
        late = torch.tensor([[True, False, True], [True] * 3])
        got = network(ids[:, 4:7], key_mask=late, cache=cache)
    both = torch.cat((torch.ones(2, 4, dtype=torch.bool), late), dim=1)
    assert_same(got[late], network(ids[:, :7], key_mask=both)[:, 4:][late])


@pytest.mark.parametrize(
    ("position", "variant"),
    [*((position, "default") for position in POSITIONS), ("rotary", "scale log_length"), ("rotary", "window")],
)
def test_packed_documents_decode_as_they_are_read_whole(position, variant):
    network, ids = model(**POSITIONS[position], **VARIANTS[variant]), tokens(2, L)
    documents = torch.tensor([[0] * 4 + [1] * 7, [5] * 9 + [6] * 2])
    got = in_pieces(network, ids, SPLITS["uneven pieces"], KVCache(L, num_layers=2), document_ids=documents)
    assert_same(got, network(ids, document_ids=documents))
    assert_same(got[:1, 4:], network(ids[:1, 4:]))


def test_a_mask_of_the_caller_counts_keys_from_the_beginning():
    network, ids = model(), tokens(1, L)
    for mask in (SlidingWindow(2), PrefixLM(3)):  # the first piece holds the prefix, which is seen both ways
        cache = KVCache(L, num_layers=2)
        with torch.no_grad():
            got = torch.cat([network(piece, mask=mask, cache=cache) for piece in ids.split([5, 1, 5], dim=1)], dim=1)
        assert_same(got, network(ids, mask=mask))


def test_reordered_rows_go_on_as_if_they_had_been_there_from_the_start():
    network, ids = model(position="rotary"), tokens(2, L)
    real = torch.tensor([[False] * 3 + [True] * 4, [True] * 7])
    rows = torch.tensor([1, 1, 0])
    cache = KVCache(L, num_layers=2)
    with torch.no_grad():
        network(ids[:, :7], key_mask=real, cache=cache)
        cache.reorder(rows)
        got = network(ids[rows, 7:], cache=cache)
    whole = torch.cat((real, torch.ones(2, 4, dtype=torch.bool)), dim=1)
    assert_same(got, network(ids, key_mask=whole)[rows, 7:])


def test_cross_attention_computes_keys_and_values_of_the_memory_once():
    cross = MultiHeadAttention(E, H, kdim=8, vdim=8, qk_norm=QKNorm("rms", 4))
    attention = MultiHeadAttention(E, H, rotary=Rotary(4))
    norm = partial(nn.LayerNorm, E)
    block = Block(attention, FeedForward(E, 16), norm=norm, causal=True, cross_attention=cross).double()
    x, memory = torch.randn(2, L, E, dtype=torch.float64), torch.randn(2, 7, 8, dtype=torch.float64)
    memory_mask = Padding(torch.tensor([[True] * 7, [True] * 3 + [False] * 4]))
    computed = []
    cross.k_proj.register_forward_hook(lambda *_: computed.append(1))
    cache = LayerCache(L)
    with torch.no_grad():
        want = block(x, memory=memory, memory_mask=memory_mask)
        computed.clear()
        pieces = x.split([4, 1, 1, 5], dim=1)
        got = [block(piece, memory=memory, memory_mask=memory_mask, cache=cache) for piece in pieces]
    assert len(computed) == 1
    assert_same(torch.cat(got, dim=1), want)
    cache.reorder(torch.tensor([1]))
    assert cache.memory[0].shape == (1, H, 7, 4)


@pytest.mark.parametrize("padding", [(0, 0, 0), (0, 2, 4)], ids=["whole", "left-padded"])
@pytest.mark.parametrize(("position", "variant"), PAIRS)
def test_tokens_from_a_static_cache_are_those_of_the_full_forward(position, variant, padding):
    network, ids = model(**POSITIONS[position], **VARIANTS[variant]), tokens(3, L)
    real = torch.tensor([[t >= missing for t in range(L)] for missing in padding])
    given = real if any(padding) else None
    got = after_a_prompt(network, ids, 5, StaticCache(17, num_layers=2), given)
    assert_same(got, network(ids, key_mask=given)[:, 5:])


def test_a_static_cache_keeps_shape_and_place_from_token_to_token_and_from_text_to_text():
    network, static, seen = model(num_kv_heads=1), StaticCache(13, num_layers=2), set()
    for length in (5, 2, 7):
        ids = tokens(2, L)
        assert_same(after_a_prompt(network, ids, length, static), network(ids)[:, length:])
        held = [static.key_mask, *(t for layer in static.layers for t in (layer._keys, layer._values))]
        seen.add(tuple((t.data_ptr(), t.shape) for t in held))
    assert len(seen) == 1


def test_what_a_static_cache_cannot_hold_is_named():
    network, ids, read = model(), tokens(2, L), KVCache(L, num_layers=2)
    with torch.no_grad():
        with pytest.raises(ValueError, match="static cache"):  # not filled
            network(ids[:, :1], cache=StaticCache(L, num_layers=2))
        network(ids[:, :5], cache=read)
        static = StaticCache(6, num_layers=2)
        static.fill(read)
        with pytest.raises(ValueError, match="one token"):
            network(ids[:, 5:7], cache=static)
        network(ids[:, 5:6], cache=static)
        with pytest.raises(ValueError, match="capacity for 6"):
            network(ids[:, 6:7], cache=static)
        with pytest.raises(ValueError, match="capacity for 4"):
            StaticCache(4, num_layers=2).fill(read)
        with pytest.raises(ValueError, match="read something"):
            static.fill(KVCache(3, num_layers=2))
        with pytest.raises(ValueError, match=r"capacity .* got 1"):
            StaticCache(1, num_layers=2)
        packed = KVCache(3, num_layers=2)
        network(ids[:, :3], cache=packed, document_ids=torch.tensor([[0, 0, 1]] * 2))
        with pytest.raises(ValueError, match="documents"):
            static.fill(packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cache_takes_the_dtype_of_the_model(dtype):
    network, ids = model().to(dtype), tokens(1, L)
    got = in_pieces(network, ids, [4, 7], KVCache(L, num_layers=2))
    assert got.dtype == dtype
    assert (got - network(ids)).abs().max() <= 32 * torch.finfo(dtype).eps * network(ids).abs().max()


def test_a_full_cache_or_position_table_refuses_tokens_and_takes_fewer_afterwards():
    for network, cache, named in (
        (model(), KVCache(8, num_layers=2), "capacity for 8"),
        (model(max_len=8), KVCache(16, num_layers=2), "max_len=8"),
    ):
        with torch.no_grad():
            network(tokens(1, 6), cache=cache)
            with pytest.raises(ValueError, match=named):
                network(tokens(1, 3), cache=cache)
            assert cache.length == 6  # and nothing was written
            network(tokens(1, 2), cache=cache)
        with pytest.raises(RuntimeError, match="no_grad"):
            network(tokens(1, 1), cache=KVCache(8, num_layers=2))


def test_decoding_one_token_runs_the_fused_kernel():
    network, cache = model(backend="sdpa"), KVCache(L, num_layers=2)
    with torch.no_grad(), OpRecorder() as recorder:
        network(tokens(1, 7), cache=cache)
        network(tokens(1, 1), cache=cache)
    assert recorder.ops.count(FUSED_CPU) == 4
