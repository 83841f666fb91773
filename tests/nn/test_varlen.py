"""varlen: what torch's kernel for packed documents is handed, and what is refused.

The kernel runs on CUDA only. Here a loop over the documents stands in its place.
"""

from inspect import signature

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from minitx.config import TransformerConfig
from minitx.nn import (
    Causal,
    DecoderLM,
    Documents,
    Padding,
    SlidingWindow,
    explain_backends,
    register_backend,
    scaled_dot_product_attention,
    unregister_backend,
)
from minitx.nn.backends import varlen
from minitx.nn.functional import make_call

B, H, HKV, L, D = 2, 4, 2, 7, 8
IDS = torch.tensor([[5, 5, 5, 1, 1, 9, 9], [9, 3, 3, 3, 3, 3, 0]])  # a row ends with the id with which the next begins


def loop(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """The contract of ``varlen_attn``, one document after the other."""
    assert torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    assert scale > 0.0  # FlashAttention takes the largest score before the scale
    assert enable_gqa or key.shape[1] == query.shape[1]
    outputs = []
    for start, stop in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        q, k, v = (tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value))
        is_causal = {(-1, 0): True, (-1, -1): False}[window_size]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def packed(monkeypatch):
    """A backend ``packed``: ours around the loop, wherever it is named."""
    monkeypatch.setattr(varlen, "_kernel", lambda: loop)
    register_backend("packed", varlen.run)
    yield
    unregister_backend("packed")


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("mask", [Documents(IDS), Causal() & Documents(IDS)], ids=str)
@pytest.mark.parametrize(("kv_heads", "scale"), [(H, None), (HKV, 0.3), (HKV, 0.0), (HKV, -0.7)])
def test_documents_laid_end_to_end_give_the_answer_and_gradients_of_math(mask, kv_heads, scale):
    heads = (H, kv_heads, kv_heads)
    leaves = [torch.randn(B, heads[i], L, D, dtype=torch.float64, requires_grad=True) for i in range(3)]
    got, want = (scaled_dot_product_attention(*leaves, mask, scale=scale, backend=name) for name in ("packed", "math"))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    cotangent = torch.randn_like(want)
    for mine, theirs in zip(*(torch.autograd.grad(out, leaves, cotangent) for out in (got, want)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)


@pytest.mark.usefixtures("packed")
def test_the_layers_of_a_model_share_one_packing_and_answer_as_math_does(monkeypatch):
    packings = []
    monkeypatch.setattr(varlen, "pack_documents", lambda ids, real=varlen.pack_documents: packings.append(ids) or real(ids))
    config = {"vocab_size": 11, "embed_dim": 16, "num_heads": 2, "num_layers": 3}
    models = [DecoderLM(TransformerConfig(**config, backend=name)).double().eval() for name in ("packed", "math")]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(11, (B, L))
    torch.testing.assert_close(*(model(ids, document_ids=IDS) for model in models), rtol=0, atol=1e-12)
    assert len(packings) == 1


def test_torchs_function_takes_what_it_is_handed():
    q, starts = torch.zeros(6, 2, 8), torch.tensor([0, 6], dtype=torch.int32)
    kernel = varlen._kernel()
    assert kernel is not None, "should torch lose an option, the backend refuses, and this test says so"
    signature(kernel).bind(q, q, q, starts, starts, 6, 6, scale=1.0, window_size=(-1, 0), enable_gqa=False)
    documents = Documents(IDS)
    varlen._packing(documents)
    with FakeTensorMode(allow_non_fake_inputs=True):  # torch's own shapes, without its kernel
        q = torch.zeros(B, H, L, D, dtype=torch.float16, device="cuda")
        assert varlen.run(make_call(q, q, q, documents)).shape == q.shape


def report(q, *, key=None, value=None, mask=None, **options):
    key = q if key is None else key
    lines = explain_backends(q, key, key if value is None else value, mask, **options)
    return {line.name: line for line in lines}


def test_on_a_cpu_it_is_refused_with_the_reason():
    q = torch.randn(B, H, L, D)
    assert "CUDA" in report(q, mask=Documents(IDS))["varlen"].reason
    with pytest.raises(NotImplementedError, match="varlen"):
        scaled_dot_product_attention(q, q, q, Documents(IDS), backend="varlen")


class TestOnCuda:
    """Tensors without values on a CUDA device; the ids have values."""

    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch):
        self.takes = True
        for kernel in ("flash", "efficient", "cudnn"):
            monkeypatch.setattr(varlen.cuda, f"can_use_{kernel}_attention", lambda parameters: self.takes)
        self.mask = Documents(IDS)
        self.split = Documents(torch.where(IDS == 0, 9, IDS))
        for documents in (self.mask, self.split):
            varlen._packing(documents)
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield

    def tensor(self, heads=H, length=L, width=D, dtype=torch.bfloat16):
        return torch.zeros(B, heads, length, width, dtype=dtype, device="cuda")

    def test_auto_takes_it_for_documents_and_flex_where_a_document_lies_in_several_places(self):
        for mask in (self.mask, self.mask & Causal()):
            found = report(self.tensor(), key=self.tensor(HKV), mask=mask)["varlen"]
            assert found.can and found.runs and found.fused
        found = report(self.tensor(), mask=self.split)
        assert found["flex"].runs and "several places" in found["varlen"].reason

    def test_every_other_call_is_refused_by_name(self):
        q, short = self.tensor(), self.tensor(length=3)
        for mask in (None, Causal(), self.mask & SlidingWindow(3), self.mask & self.split, self.mask | Causal()):
            assert "Documents" in report(q, mask=mask)["varlen"].reason
        assert "Documents" in report(q, mask=self.mask & Padding(torch.ones(B, L, dtype=torch.bool)))["varlen"].reason
        assert "self-attention" in report(short, key=q, mask=self.mask)["varlen"].reason
        options = {"dropout_p": 0.1, "attn_bias": torch.zeros(L, L, device="cuda"), "softcap": 2.0}
        for (name, value), said in zip(options.items(), ("dropout", "bias", "soft-cap"), strict=True):
            assert report(q, mask=self.mask, **{name: value})["varlen"].reason.endswith(f"no {said}")
        assert report(q, mask=self.mask, sinks=torch.zeros(H, device="cuda"))["varlen"].reason.endswith("no sinks")
        for tensor in (self.tensor(dtype=torch.float32), self.tensor(width=12)):
            assert "widths" in report(tensor, mask=self.mask)["varlen"].reason
        assert "widths" in report(q, value=self.tensor(width=16), mask=self.mask)["varlen"].reason

    def test_a_torch_a_device_or_a_graph_that_cannot_is_named(self, monkeypatch):
        without_values = Documents(torch.zeros(B, L, dtype=torch.long, device="cuda"))
        assert "graph" in report(self.tensor(), mask=without_values)["varlen"].reason
        self.takes = False
        assert "FlashAttention" in report(self.tensor(), mask=self.mask)["varlen"].reason
        monkeypatch.setattr(varlen, "_kernel", lambda: None)
        assert "this torch" in report(self.tensor(), mask=self.mask)["varlen"].reason
