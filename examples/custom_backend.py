"""Write your own attention kernel: check it with ``minitx-check``, register it as a backend, and use it in a model.

The kernel computes the softmax in one pass over the keys (Milakov & Gimelshein 2018, arXiv:1805.02867). For each query it keeps the
largest score m so far, the sum of exp(score - m), and the sum of exp(score - m) · value. It is short and slow, and needs no L x S
matrix. It supports masks, any scale and grouped heads.

Two of its lines are easy to forget, and the check reports both. Without ``hide_unseen``, a NaN in a hidden key reaches the output as
0 · NaN. Without ``masked_fill`` of the total, the output of a query that sees no key is 0 / 0.

    python examples/custom_backend.py
    python scripts/check.py examples/custom_backend.py:attention strict=true     # names every case

The first command prints the number of cases that passed, what ``explain_backends`` reports for two calls, and the largest difference
between the logits of a model with this kernel and with the default one.
"""

from collections import Counter

import torch
from torch import Tensor

from minitx.check import check_attention
from minitx.config import TransformerConfig
from minitx.nn import AttentionCall, DecoderLM, backend_names, explain_backends, register_backend, scaled_dot_product_attention
from minitx.nn.functional import hide_unseen


def one_pass(call: AttentionCall) -> Tensor:
    """Compute attention (B, H, L, Dv), one key at a time."""
    B, H, L, S = call.shape
    group = H // call.key.shape[1]  # query head h uses key head h // group
    dtype = torch.promote_types(call.query.dtype, torch.float32)  # compute the softmax in at least float32
    query, key, value = (t.to(dtype) for t in (call.query * call.scale, call.key, call.value))
    largest = query.new_full((B, H, L, 1), torch.finfo(dtype).min)
    total, output = torch.zeros_like(largest), query.new_zeros(B, H, L, value.shape[-1])
    for j in range(S):
        sees = None
        if call.mask is not None:
            sees = call.mask.dense(L, S, batch_size=B, num_heads=H, keys=slice(j, j + 1), device=query.device)
        k, v = (hide_unseen(t[:, :, j : j + 1], sees).repeat_interleave(group, dim=1) for t in (key, value))  # (B, H, 1, D)
        score = (query * k).sum(-1, keepdim=True)
        if sees is not None:
            score = score.masked_fill(~sees, -torch.inf)
        new = torch.maximum(largest, score)
        shrink, weight = (largest - new).exp(), (score - new).exp()
        total, output, largest = total * shrink + weight, output * shrink + weight * v, new
    return (output / total.masked_fill(total == 0.0, 1.0)).to(call.query.dtype)


def why_not(call: AttentionCall) -> str | None:
    """Return why ``one_pass`` cannot compute a call, or None if it can. Error messages and ``explain_backends`` show the reason."""
    unsupported = {
        "dropout": call.dropout_p > 0,
        "bias": call.attn_bias is not None,
        "soft-cap": call.softcap,
        "sinks": call.sinks is not None,
    }
    missing = [name for name, is_used in unsupported.items() if is_used]
    return f"it has no {' and no '.join(missing)}" if missing else None


def falls_back(call: AttentionCall) -> str:
    """Return why this is not a fused kernel."""
    return "it computes one key at a time, in plain torch"


if "one_pass" not in backend_names():  # this file may be imported twice: as a program and by the check
    register_backend("one_pass", one_pass, why_not=why_not, falls_back=falls_back)


def attention(query, key, value, *, attn_mask=None, is_causal=False, scale=None):
    """The function that ``minitx-check`` checks. Its parameters are the options that the kernel supports."""
    return scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, scale=scale, backend="one_pass")


def main() -> dict[str, float]:
    """Print and return the results."""
    report = check_attention(attention, strict=True)
    results: dict[str, float] = dict(Counter(check.status.value for check in report.checks))
    print("checks:", ", ".join(f"{count} {status}" for status, count in results.items()))
    for finding in report.findings:
        print(f"  {finding.fault}")
    query = torch.randn(1, 2, 5, 8)
    for options in ({}, {"softcap": 30.0}):
        reasons = explain_backends(query, query, query, is_causal=True, backend="one_pass", **options)
        print(options or "causal", "|", next(str(line) for line in reasons if line.name == "one_pass"))

    config = {"vocab_size": 31, "embed_dim": 24, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}
    logits = []
    for backend in ("one_pass", "auto"):
        torch.manual_seed(0)
        model = DecoderLM(TransformerConfig(**config, backend=backend)).eval()
        logits.append(model(torch.arange(12).view(2, 6)))
    results["difference"] = (logits[0] - logits[1]).abs().max().item()
    print(f"model with backend=one_pass, largest difference of the logits: {results['difference']:.1e}")
    return results


if __name__ == "__main__":
    main()
