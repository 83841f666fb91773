"""Decoding with a cache is the full forward, piece by piece, and a layer keeps no more than it needs."""

import copy
import functools
import itertools
import random
from contextlib import nullcontext

import pytest
import torch
from sizes import FUSED_CPU, OpRecorder, assert_same, in_pieces, tokens
from sizes import small_model as model

from minitx.nn import BlockSparse, Causal, DotProductAttention, KVCache, LayerCache, MultiHeadAttention, PrefixLM, SlidingWindow
from minitx.nn.efficient import LinearAttention

E, H, L = 12, 3, 23
LOG_LENGTH, WINDOWS = {"position": "rotary", "scale": "log_length"}, (4, (1, None), 40)
WAYS = [
    {"position": "learned"},
    {"position": "alibi", "window": 4},
    {**LOG_LENGTH, "window": (1, None)},
    {"position": "rotary", "rotary_interleaved": True, "rotary_scaling": "ntk", "rotary_factor": 4.0},
    {"position": "rotary", "num_kv_heads": 1, "softcap": 2.0, "sinks": True, "window": 40},
    {"position": "rotary", "num_kv_heads": 1, "attention": "linear"},
]
TOKEN_BY_TOKEN, UNEVEN = [1] * L, [2, 7, 1, 9, 4]


def caches(network):
    """The smallest cache, and one that keeps all keys where another can."""
    can_keep_all = network.config.attention == "exact"
    return [network.make_cache(L), *([KVCache(L, num_layers=2)] if can_keep_all else [])]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_decoding_with_a_cache_equals_the_full_forward_and_reordered_rows_go_on(options):
    network, ids, rows = model(**options), tokens(3, L), torch.tensor([1, 1, 0])
    near = 1e-10 if "attention" in options else 1e-12
    real = torch.arange(L) >= torch.tensor([[0], [4], [9]])
    mask = {"key_mask": real}
    want = network(ids, **mask)
    for split, cache in ((TOKEN_BY_TOKEN, network.make_cache(L)), *((UNEVEN, cache) for cache in caches(network))):
        assert_same(in_pieces(network, ids, split, cache, **mask)[real], want[real], near)
    cache = network.make_cache(L)
    in_pieces(network, ids[:, :9], [7, 1, 1], cache, **{name: given[:, :9] for name, given in mask.items()})
    cache.reorder(rows)
    assert_same(in_pieces(network, ids[rows, 9:], [1, 13], cache), want[rows, 9:], near)


def test_a_key_mask_may_begin_after_the_prompt():
    network, ids, cache = model(position="rotary"), tokens(2, 7), KVCache(7, num_layers=2)
    real = torch.tensor([[True, False, True], [True] * 3])
    with torch.no_grad():
        network(ids[:, :4], cache=cache)
        got = network(ids[:, 4:], key_mask=real, cache=cache)
    whole = torch.cat((torch.ones(2, 4, dtype=torch.bool), real), dim=1)
    assert_same(got[real], network(ids, key_mask=whole)[:, 4:][real])


@pytest.mark.parametrize(
    "options",
    [{"position": "learned"}, {"position": "t5"}, LOG_LENGTH, *({"position": "rotary", "window": w} for w in WINDOWS)],
    ids=str,
)
def test_packed_documents_decode_as_they_are_read_whole(options):
    network, ids = model(**options), tokens(2, L)
    documents = torch.tensor([[0] * 4 + [1] * 19, [5] * 20 + [6] * 3])
    for cache in caches(network):
        assert_same(in_pieces(network, ids, UNEVEN, cache, document_ids=documents), network(ids, document_ids=documents))


def test_a_mask_of_the_caller_counts_keys_from_the_beginning():
    network, ids = model(), tokens(1, 11)
    for mask in (SlidingWindow(2), PrefixLM(3)):  # the first piece holds the prefix, which is seen both ways
        cache = KVCache(L, num_layers=2)
        with torch.no_grad():
            got = torch.cat([network(piece, mask=mask, cache=cache) for piece in ids.split([5, 1, 5], dim=1)], dim=1)
        assert_same(got, network(ids, mask=mask))


@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("num_patterns", [1, H])
def test_a_block_pattern_reads_a_growing_cache_as_it_reads_the_whole_row(backend, num_patterns):
    """Also a pattern with more blocks than the row."""
    pattern, draw = torch.arange(num_patterns * 49).view(-1, 7, 7) % 3 > 0, random.Random(num_patterns)
    visible = torch.tensor([[[bool(p[i // 4, j // 4]) and j <= i for j in range(L)] for i in range(L)] for p in pattern])
    mask = BlockSparse(pattern if num_patterns > 1 else pattern[0], 4) & Causal()
    attention, x = MultiHeadAttention(E, H, core=DotProductAttention(backend=backend)).double(), torch.randn(2, L, E).double()
    for num_pieces in (1, 4, 11):
        edges = [0, *sorted(draw.sample(range(1, L), num_pieces - 1)), L]
        cache = LayerCache(L)
        with torch.no_grad():
            pieces = [attention(x[:, a:b], attn_mask=mask, cache=cache) for a, b in itertools.pairwise(edges)]
            assert_same(torch.cat(pieces, dim=1), attention(x, attn_mask=visible[None]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cache_takes_the_dtype_of_the_model(dtype):
    network, ids = model().to(dtype), tokens(1, 11)
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


def test_a_padded_prompt_may_be_longer_than_the_position_table_as_long_as_its_tokens_fit():
    network, ids, cache = model(max_len=8), tokens(1, 11), KVCache(16, num_layers=2)
    real = torch.arange(10)[None] >= 6  # four tokens
    with torch.no_grad():
        network(ids[:, :10], key_mask=real, cache=cache)
        assert_same(network(ids[:, 10:], cache=cache), network(ids[:, 6:])[:, -1:])


def test_decoding_one_token_runs_the_fused_kernel():
    network, cache = model(backend="sdpa"), KVCache(L, num_layers=2)
    with torch.no_grad(), OpRecorder() as recorder:
        network(tokens(1, 7), cache=cache)
        network(tokens(1, 1), cache=cache)
    assert recorder.ops.count(FUSED_CPU) == 4


def test_a_layer_with_a_window_keeps_twice_its_keys_at_most_and_others_keep_all():
    network = model(window=(3, None), position="rotary")
    cache = network.make_cache(29)
    in_pieces(network, tokens(2, 16), [7, *[1] * 9], cache)
    assert [layer.held[0].untyped_storage().nbytes() // (2 * H * 4 * 8) for layer in cache.layers] == [2 * 3 - 1, 29]


class Twice(LinearAttention):
    """A core that runs twice on one call."""

    def forward(self, call):
        super().forward(call)
        return super().forward(call)


@pytest.mark.parametrize("kind", [LinearAttention, Twice])
def test_a_state_adds_keys_once_and_keeps_its_precision_where_later_keys_are_far_larger(kind):
    attention = MultiHeadAttention(E, H, core=kind(chunk_size=3)).double()
    x = torch.randn(2, L, E, dtype=torch.float64) * torch.logspace(-3, 3, L, dtype=torch.float64).unsqueeze(-1)
    cache, causal = attention.make_cache(L), functools.partial(attention, is_causal=True)
    want = causal(x)
    assert ((in_pieces(causal, x, UNEVEN, cache) - want).abs() <= 1e-10 * want.abs().max()).all()
    assert [tuple(t.shape) for t in cache.state] == [(2, H, 4, 5), (2, H, 1)]


def test_what_a_state_cannot_read_is_named():
    attention, x = MultiHeadAttention(E, H, core=LinearAttention()), torch.randn(2, 5, E)
    with torch.no_grad(), pytest.raises(ValueError, match="is_causal"):
        attention(x, cache=attention.make_cache(8))
    cache = attention.make_cache(8)
    with torch.no_grad():
        attention(x, is_causal=True, cache=cache)
        with pytest.raises(ValueError, match="capacity for 8 positions"):
            attention(x, is_causal=True, cache=cache)
        with pytest.raises(ValueError, match=r"^key must"):
            attention(torch.randn(3, 1, E), is_causal=True, cache=cache)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        attention(x, is_causal=True, cache=attention.make_cache(8))


@pytest.mark.parametrize(
    ("options", "lost"), [({}, []), ({"window": 3}, [1, 2, 3, 4, 5]), ({"attention": "linear"}, [1, 2, 3, 4, 5, 6])], ids=str
)
def test_a_length_that_is_set_back_gives_the_full_forward_or_an_error(options, lost):
    network, ids = model(position="rotary", **options), tokens(2, 9)
    for back in range(9):
        cache = network.make_cache(9)
        in_pieces(network, ids[:, :8], [1] * 8, cache)
        cache.length = accepted = torch.tensor(back)  # as from a comparison of drafts
        with pytest.raises(ValueError, match=f"go back to length {back}") if back in lost else nullcontext(), torch.no_grad():
            assert_same(network(ids[:, back : back + 1], cache=cache), network(ids)[:, back : back + 1])
            assert (accepted, cache.length) == (back, back + 1)


# ---- a forward that fails


@pytest.mark.parametrize("core", [None, LinearAttention()])
def test_a_layer_that_refuses_a_call_leaves_the_cache_as_it_was(core):
    attention, x = MultiHeadAttention(E, H, core=core).double(), torch.randn(2, 5, E, dtype=torch.float64)
    cache, pieces = attention.make_cache(5), []
    with torch.no_grad():
        for piece in x.split([3, 2], dim=1):
            with pytest.raises(ValueError, match="key_mask"):
                attention(piece, is_causal=True, cache=cache, key_mask=torch.ones(2, 7, dtype=torch.bool))
            pieces.append(attention(piece, is_causal=True, cache=cache))
        torch.testing.assert_close(torch.cat(pieces, dim=1), attention(x, is_causal=True), rtol=0, atol=1e-12)
        cross = attention.make_cache(5)
        if core is None:
            with pytest.raises(ValueError, match="key_mask"):
                attention(x, x + 1, cache=cross, key_mask=torch.ones(2, 7, dtype=torch.bool))
            assert cross.memory is None


def interrupted(network):
    """A list: while there is something in it, the second block raises."""
    broken = [True]

    def fail(module, args):
        if broken:
            raise KeyboardInterrupt

    network.blocks[1].register_forward_pre_hook(fail)
    return broken


def test_after_a_failed_first_pass_every_layer_reads_the_memory_of_the_next_call():
    network = model(architecture="encoder_decoder")
    first, second = (network.encode(tokens(2, 7)) for _ in range(2))
    ids, cache, broken = tokens(2, 5), network.make_cache(5), interrupted(network)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            network(None, ids, memory=first, cache=cache)
        broken.clear()
        memory, ids = second[:1], ids[:1]  # the next call may have another number of rows
        assert_same(network(None, ids, memory=memory, cache=cache), network(None, ids, memory=memory))


def test_a_cache_takes_its_source_again_encoded_anew_or_in_other_rows():
    network, ids, target = model(architecture="encoder_decoder"), tokens(2, 7), tokens(2, 9)
    cache, rows, memory = network.make_cache(9), torch.tensor([1, 1, 0]), network.encode(ids)
    with torch.no_grad():
        want = network(ids, target)
        got = [network(ids, target[:, :3], cache=cache), network(None, target[:, 3:5], memory=memory, cache=cache)]
        cache = copy.deepcopy(cache)  # torch could not copy the graph of the memory
        assert_same(torch.cat(got, dim=1), want[:, :5])
        cache.reorder(rows)
        for step in (5, 6):
            got = network(None, target[rows, step : step + 1], memory=memory[rows], cache=cache)
            assert_same(got, want[rows, step : step + 1])


def test_cross_attention_reads_the_memory_that_it_is_given_and_projects_it_once():
    attention, x, cache = MultiHeadAttention(E, H), torch.randn(2, 5, E), LayerCache(8)
    projected = []
    attention.k_proj.register_forward_hook(lambda module, args, out: projected.append(args[0]))
    first, second, longer = torch.randn(2, 7, E), torch.randn(2, 7, E), torch.randn(2, 9, E)
    with torch.no_grad():
        for memory in (first, first, second, second, longer, first):
            assert_same(attention(x, memory, cache=cache), attention(x, memory), 1e-6)
    given = [first, first, first, second, second, second, longer, longer, first, first]  # without the cache, each call projects
    assert [tensor.data_ptr() for tensor in projected] == [tensor.data_ptr() for tensor in given]


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": (3, None)}, {"attention": "linear"}], ids=str)
def test_a_forward_that_fails_midway_changes_no_layer(options):
    network, ids = model(position="rotary", **options), tokens(2, L)
    cache, broken, pieces = network.make_cache(L), interrupted(network), []
    for piece in ids.split(UNEVEN, dim=1):
        broken.append(True)
        with pytest.raises(KeyboardInterrupt):
            in_pieces(network, piece, [piece.shape[1]], cache)
        assert cache.length == sum(done.shape[1] for done in pieces)
        broken.clear()
        cache.reorder(torch.arange(2))
        pieces.append(in_pieces(network, piece, [piece.shape[1]], cache))
    assert_same(torch.cat(pieces, dim=1), network(ids), tolerance=1e-10)
