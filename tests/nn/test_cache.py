"""Decoding with a cache is the full forward, piece by piece."""

import pytest
import torch
from sizes import FUSED_CPU, OpRecorder, assert_same, in_pieces, tokens
from sizes import small_model as model
from test_models import PAIRS

from minitx.nn import KVCache, PrefixLM, SlidingWindow

L = 11
NTK = {"position": "rotary", "rotary_interleaved": True, "rotary_scaling": "ntk", "rotary_factor": 4.0}
WAYS = [*({"position": position, **options} for position, options in PAIRS), NTK, {"position": "rotary", "qk_norm": "layer"}]
# lengths of the pieces in which a prompt of 11 tokens is read
SPLITS = {"token by token": [1] * L, "prompt, then tokens": [7, 1, 1, 1, 1], "uneven pieces": [2, 5, 1, 3], "one piece": [L]}


@pytest.mark.parametrize("padding", [(0, 0, 0), (0, 4, 7)], ids=["whole", "left-padded"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_decoding_with_a_cache_equals_the_full_forward_and_each_padded_row_is_as_it_would_be_alone(options, padding):
    network, ids = model(**options), tokens(3, L)
    real = torch.arange(L) >= torch.tensor(padding).unsqueeze(1)
    mask = {"key_mask": real} if any(padding) else {}
    want = network(ids, **mask)
    for split in SPLITS.values() if options in (NTK, {"position": options["position"]}) else [SPLITS["uneven pieces"]]:
        got = in_pieces(network, ids, split, KVCache(L, num_layers=2), **mask)
        assert_same(got[real], want[real])
    for row, missing in enumerate(padding):
        assert_same(got[row : row + 1, missing:], network(ids[row : row + 1, missing:]))


def test_a_key_mask_may_end_with_the_prompt_or_begin_after_it():
    network, ids = model(position="rotary"), tokens(2, L)
    prompt = torch.tensor([[False, False, True, True], [True] * 4])
    late = torch.tensor([[True, False, True], [True] * 3])
    nothing = torch.ones(2, 7, dtype=torch.bool)
    for first, second in ((prompt, None), (None, late)):
        cache, (old, new) = KVCache(L, num_layers=2), ids[:, :7].split([4, 3], dim=1)
        whole = torch.cat((nothing[:, :4] if first is None else first, nothing[:, 4:] if second is None else second), dim=1)
        with torch.no_grad():
            got = torch.cat((network(old, key_mask=first, cache=cache), network(new, key_mask=second, cache=cache)), dim=1)
        assert_same(got[whole], network(ids[:, :7], key_mask=whole)[whole])


LOG_LENGTH, WINDOW = {"position": "rotary", "scale": "log_length"}, {"position": "rotary", "window": 3}


@pytest.mark.parametrize("options", [{"position": "learned"}, {"position": "t5"}, LOG_LENGTH, WINDOW], ids=str)
def test_packed_documents_decode_as_they_are_read_whole(options):
    network, ids = model(**options), tokens(2, L)
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
