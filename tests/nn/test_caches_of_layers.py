"""A layer keeps no more than it needs: the keys of its window, or one sum."""

import pytest
import torch
from sizes import assert_same, tokens
from sizes import in_pieces as read
from sizes import small_model as model

from minitx.nn import EncoderDecoder, MultiHeadAttention
from minitx.nn.cache import StateCache
from minitx.nn.efficient import LinearAttention

E, H, L = 12, 3, 23
WINDOWS = {"one window": {"window": 4}, "by layer": {"window": (1, None)}, "wider than the text": {"window": 40}}
WAYS = {
    **{position: {"position": position} for position in ("alibi", "t5", "learned")},
    "grouped, soft-cap, sinks": {"position": "rotary", "num_kv_heads": 1, "softcap": 2.0, "sinks": True},
    "log length": {"position": "rotary", "scale": "log_length"},
}
SPLITS = {"token by token": [1] * L, "a prompt first": [13, *[1] * 10], "uneven": [2, 7, 1, 9, 4]}


# ---- a window


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_rolling_cache_gives_what_the_whole_forward_gives_and_reordered_rows_go_on(window, way):
    network, ids, rows = model(**WINDOWS[window], **WAYS[way]), tokens(2, L), torch.tensor([1, 1, 0])
    want = network(ids)
    for split in SPLITS.values() if way == "alibi" else [SPLITS["uneven"]]:
        assert_same(read(network, ids, split, network.make_cache(L)), want)
    cache = network.make_cache(L)
    read(network, ids[:, :9], [7, 1, 1], cache)
    cache.reorder(rows)
    assert_same(read(network, ids[rows, 9:], [1, 13], cache), want[rows, 9:])


@pytest.mark.parametrize("split", ["a prompt first", "uneven"])
@pytest.mark.parametrize("window", WINDOWS)
def test_padding_and_documents_lie_where_the_kept_keys_lie(window, split):
    network, ids = model(**WINDOWS[window], position="rotary"), tokens(2, L)
    real = torch.tensor([[t >= padding for t in range(L)] for padding in (0, 9)])
    got = read(network, ids, SPLITS[split], network.make_cache(L), key_mask=real)
    assert_same(got[real], network(ids, key_mask=real)[real])
    documents = torch.tensor([[0] * 4 + [1] * 19, [5] * 20 + [6] * 3])
    got = read(network, ids, SPLITS[split], network.make_cache(L), document_ids=documents)
    assert_same(got, network(ids, document_ids=documents))


def test_a_layer_with_a_window_keeps_twice_its_keys_at_most_and_others_keep_all():
    network, capacity = model(window=(3, None), position="rotary"), 29
    cache = network.make_cache(capacity)
    read(network, tokens(2, 7), [7], cache)
    sizes = []
    for _ in range(9):
        read(network, tokens(2, 1), [1], cache)
        sizes.append([layer.held[0].untyped_storage().nbytes() // (2 * H * 4 * 8) for layer in cache.layers])
    assert {rolling for rolling, _ in sizes} == {2 * 3 - 1}
    assert {whole for _, whole in sizes} == {capacity}


# ---- a sum instead of keys


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["linear", "performer"])
def test_a_state_gives_what_the_whole_forward_gives_padding_and_reordered_rows_too(kind, split):
    network, ids = model(attention=kind, position="rotary", num_kv_heads=1), tokens(3, L)
    real = torch.tensor([[t >= padding for t in range(L)] for padding in (0, 9, 14)])
    got = read(network, ids, SPLITS[split], network.make_cache(L), key_mask=real)
    assert_same(got[real], network(ids, key_mask=real)[real], tolerance=1e-10)
    cache, rows = network.make_cache(L), torch.tensor([1, 1, 0])
    read(network, ids[:, :9], [7, 1, 1], cache)
    assert all(isinstance(layer, StateCache) for layer in cache.layers)
    cache.reorder(rows)
    assert_same(read(network, ids[rows, 9:], [1, 13], cache), network(ids)[rows, 9:], tolerance=1e-10)


def test_a_state_keeps_its_precision_where_later_keys_are_far_larger():
    attention = MultiHeadAttention(E, H, core=LinearAttention(chunk_size=3)).double()
    x = torch.randn(2, L, E, dtype=torch.float64) * torch.logspace(-3, 3, L, dtype=torch.float64).unsqueeze(-1)
    cache = attention.make_cache(L)
    with torch.no_grad():
        got = torch.cat([attention(piece, is_causal=True, cache=cache) for piece in x.split(SPLITS["uneven"], dim=1)], dim=1)
        want = attention(x, is_causal=True)
    assert ((got - want).abs() <= 1e-10 * want.abs().max()).all()
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
    network = model(EncoderDecoder, architecture="encoder_decoder")
    first, second = (network.encode(tokens(2, 7)) for _ in range(2))
    ids, cache, broken = tokens(2, 5), network.make_cache(5), interrupted(network)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            network(None, ids, memory=first, cache=cache)
        broken.clear()
        memory, ids = second[:1], ids[:1]  # the next call may have another number of rows
        assert_same(network(None, ids, memory=memory, cache=cache), network(None, ids, memory=memory))


def test_a_core_that_runs_twice_on_one_call_adds_its_keys_once():
    class Twice(LinearAttention):
        def forward(self, call):
            super().forward(call)
            return super().forward(call)

    x = torch.randn(2, 7, E, dtype=torch.float64)
    attention = MultiHeadAttention(E, H, core=Twice()).double()
    cache = attention.make_cache(7)
    with torch.no_grad():
        got = torch.cat([attention(piece, is_causal=True, cache=cache) for piece in x.split([3, 4], dim=1)], dim=1)
        assert_same(got, attention(x, is_causal=True), tolerance=1e-10)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": (3, None)}, {"attention": "linear"}], ids=str)
def test_a_forward_that_fails_midway_changes_no_layer(options):
    network, ids = model(position="rotary", **options), tokens(2, L)
    cache, broken, pieces = network.make_cache(L), interrupted(network), []
    for piece in ids.split(SPLITS["uneven"], dim=1):
        broken.append(True)
        with pytest.raises(KeyboardInterrupt):
            read(network, piece, [piece.shape[1]], cache)
        assert cache.length == sum(done.shape[1] for done in pieces)
        broken.clear()
        pieces.append(read(network, piece, [piece.shape[1]], cache))
    assert_same(torch.cat(pieces, dim=1), network(ids), tolerance=1e-10)
