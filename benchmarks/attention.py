"""Attention: P5, P6, P7.

- P5: forward and backward of causal attention over ``math``: seconds, and the most bytes at once.
- P6: what ``backend=auto`` takes over the best backend of each kind of call, its regret; and calls under a mask over torch's bare
  kernel with the same mask as a dense tensor.
- P7: training an encoder on rows of unequal length, 40 % of the padded batch being text: real tokens a second over others. They get
  the rows padded in their order; ours gets them packed (several rows in one), or sorted by length.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from harness import Row, compare, exact, measure, parser, peak, ratio_interval, row, seconds_of
from peers import TorchModel, hugging_face_encoder, loss_of
from torch import Tensor, nn

from minitx.config import TransformerConfig
from minitx.nn import ALiBi, Causal, Documents, Padding, SlidingWindow, T5RelativeBias
from minitx.nn import explain_backends as explain
from minitx.nn import scaled_dot_product_attention as attention
from minitx.nn.models import build_model

Work = Callable[[], object]
CALLS = 12  # under one mask, as in the layers of a model


def work(call: Callable[[], Tensor], calls: int = 1) -> Work:
    """Calls, with a backward pass where the tensors ask for it."""

    def run() -> None:
        for _ in range(calls):
            out = call()
            if out.requires_grad:
                out.sum().backward()

    return run


def fused(pairs: int, shape: tuple[int, ...], wanted: dict[str, str], dtype: torch.dtype = torch.float32) -> Iterator[Row]:
    """P5, each backend of ``wanted`` on (B, H, L, D)."""
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    math_ = work(partial(attention, *tensors, is_causal=True, backend="math"))
    label = f"causal, {shape[2]} tokens, forward and backward"
    for backend, speed in wanted.items():
        ours = work(partial(attention, *tensors, is_causal=True, backend=backend))
        found = compare(math_, ours, pairs=pairs)
        yield row("P5", f"{backend} over math, speed", label, found, speed)
        yield row("P5", f"{backend} over math, peak memory", label, exact(peak(ours) / peak(math_)), "<= 0.125")


# --- the choice of a kernel


def lengths(S: int, B: int = 4) -> Padding:
    return Padding(torch.arange(S)[None] < torch.linspace(S // 4, S, B).long()[:, None])


def documents(n: int) -> Documents:
    return Documents((torch.arange(n) * 5 // n).expand(4, -1))


# name of a kind of call -> (sizes that differ from 4 rows of 4 heads of 32 with gradients, n queries and n keys; options)
Kind = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
CAUSAL = {"is_causal": True}
KINDS: dict[str, Kind] = {
    **{f"causal {n}": ({"n": n, "B": max(1, min(16, 4096 // n))}, lambda: CAUSAL) for n in (16, 64, 256, 1024, 2048)},
    "full 512": ({"n": 512}, dict),
    **{f"padded {n}": ({"n": n}, lambda n=n: {"attn_mask": lengths(n)}) for n in (128, 512)},
    "documents 512": ({"n": 512}, lambda: {"attn_mask": documents(512), "is_causal": True}),
    **{
        f"window 64 of {n}": ({"n": n, "B": b}, lambda: {"attn_mask": SlidingWindow(64), "is_causal": True})
        for n, b in ((256, 4), (2048, 1))
    },
    "alibi 512": ({"n": 512}, lambda: {"attn_bias": ALiBi(4), "is_causal": True}),
    **{f"t5 {n}": ({"n": n, "B": b}, lambda: {"attn_bias": T5RelativeBias(4)}) for n, b in ((128, 4), (1024, 1))},
    "grouped 512": ({"n": 512, "Hkv": 1}, lambda: CAUSAL),
    **{f"dropout {n}": ({"n": n}, lambda: {"dropout_p": 0.1, "is_causal": True}) for n in (64, 512)},
    **{f"soft-cap {n}": ({"n": n, "B": b}, lambda: {"softcap": 30.0, "is_causal": True}) for n, b in ((128, 4), (1024, 1))},
    "wide values 512": ({"n": 512, "Dv": 64}, lambda: CAUSAL),
    "no gradient 512": ({"n": 512, "grad": False}, lambda: CAUSAL),
    "cross 64 to 512, padded": ({"n": 512, "L": 64}, lambda: {"attn_mask": lengths(512)}),
    "decoding 1 of 512, padded": ({"n": 512, "L": 1, "grad": False}, lambda: {"attn_mask": lengths(512)}),
    "decoding 1 of 512, sinks": ({"n": 512, "L": 1, "grad": False}, lambda: {"sinks": torch.zeros(4), "is_causal": True}),
}


def call_of(kind: Kind, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    """Tensors and options of a call."""
    sizes, options = kind
    n, B, D, grad = sizes["n"], sizes.get("B", 4), 32, sizes.get("grad", True)
    shapes = (4, sizes.get("L", n), D), (sizes.get("Hkv", 4), n, D), (sizes.get("Hkv", 4), n, sizes.get("Dv", D))
    return [torch.randn(B, *shape, dtype=dtype, requires_grad=grad) for shape in shapes], options()


def rounds_of(kind: Kind, rounds: int, block: float, dtype: torch.dtype) -> tuple[str, dict[str, list[float]]]:
    """What auto chooses, and the seconds of every backend that can serve the call; forwards and backwards through the list by turns."""
    tensors, options = call_of(kind, dtype)
    reports = [report for report in explain(*tensors, **options) if report.can]
    runs = {}
    for name in (report.name for report in reports):
        call = partial(attention, *tensors, **options, backend=name)
        work(call)()
        times = max(1, math.ceil(block / min(seconds_of(work(call)) for _ in range(3))))
        runs[name] = (work(call, times), times)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name in list(runs)[:: 1 if index % 2 == 0 else -1]:
            seconds[name].append(seconds_of(runs[name][0]) / runs[name][1])
    return next(report.name for report in reports if report.runs), seconds


def regret(auto: str, seconds: dict[str, list[float]]) -> tuple[list[float], list[str]]:
    """Auto's seconds over the seconds of the best backend of the other half of the rounds, a round; and the best of either half.

    The backend that looks best in some rounds looks better than it is in those (the winner's curse).
    """
    rounds = range(len(seconds[auto]))
    halves = [[i for i in rounds if i // 2 % 2 == half] for half in (0, 1)]  # rounds run forwards and backwards in each
    best = [min(seconds, key=lambda name: statistics.median(seconds[name][i] for i in half)) for half in halves]
    return [seconds[auto][i] / seconds[best[1 - half]][i] for half in (0, 1) for i in halves[half]], best


def choice(
    pairs: int, words: str = "", dtype: torch.dtype = torch.float32, is_over: Callable[[], bool] = lambda: False
) -> Iterator[Row]:
    """P6, regret. No kind of call is begun after ``is_over``."""
    found: dict[str, Any] = {}
    for name in [name for name in KINDS if words in name]:
        if found and is_over():
            break
        auto, seconds = rounds_of(KINDS[name], max(4, pairs // 4 * 4), 0.05, dtype)
        ratios, best = regret(auto, seconds)
        medians = {backend: statistics.median(values) for backend, values in seconds.items()}
        found[name] = {"auto": auto, "best": best, "median": statistics.median(ratios), "ratios": ratios, "seconds": medians}
    columns = zip(*(one["ratios"] for one in found.values()), strict=True)
    means = [math.exp(statistics.fmean(map(math.log, column))) for column in columns]
    label, worst = f"{len(found)} kinds of call", max(found, key=lambda name: found[name]["median"])
    yield row("P6", "regret of auto, geometric mean", label, ratio_interval(means), "<= 1.03", kinds=found)
    interval = ratio_interval(found[worst]["ratios"])
    yield row("P6", "regret of auto, the worst kind", label, interval, None, "lower", kind=worst)


def under_a_mask(tensors: list[Tensor], key_mask: Tensor) -> None:
    """Our calls under one causal and padded mask."""
    work(partial(attention, *tensors, Causal() & Padding(key_mask)), CALLS)()


def masked(pairs: int) -> Iterator[Row]:
    """P6, under a mask: ours hides NaN in padding and gives zero for empty rows; torch's bare kernel gets a dense tensor."""
    for B, H, L, D in ((4, 8, 128, 32), (4, 8, 256, 32), (2, 8, 512, 64), (1, 8, 1024, 64)):
        key_mask = torch.arange(L)[None] < torch.linspace(L // 2, L, B).long()[:, None]
        dense = (Causal() & Padding(key_mask)).dense(L, L).clone()
        for backward in (False, True):
            tensors = [torch.randn(B, H, L, D, requires_grad=backward) for _ in range(3)]
            bare = work(partial(F.scaled_dot_product_attention, *tensors, attn_mask=dense), CALLS)
            ours = partial(under_a_mask, tensors, key_mask)
            label = f"B, H, L, D = {B}, {H}, {L}, {D}, forward{' and backward' * backward}"
            what = "causal and padded over torch's kernel with the dense mask"
            yield row("P6", what, label, compare(bare, ours, pairs=pairs), "<= 1.10")


# --- rows of unequal length


def packed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The rows of a padded batch, several in one; ``document_ids`` number them, -1 is padding."""
    from minitx.data.documents import pack

    lengths = batch["key_mask"].sum(1)
    groups = pack(lengths.numpy(), batch["key_mask"].shape[1])
    ids = [torch.cat([batch["input_ids"][row, : lengths[row]] for row in rows]) for rows in groups]
    numbers = [torch.arange(len(rows)).repeat_interleave(lengths[rows]) for rows in groups]
    return {**padded(ids), "document_ids": nn.utils.rnn.pad_sequence(numbers, True, -1)}


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """A batch of rows of ids above 0; every token is its own label, as costly as any other label."""
    ids = nn.utils.rnn.pad_sequence(rows, True, 0)
    return {"input_ids": ids, "key_mask": ids > 0, "labels": ids.masked_fill(ids == 0, -100)}


def epoch(model: nn.Module, batches: list[dict[str, Tensor]]) -> Work:
    """One epoch of training a call."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=True)

    def train() -> None:
        for batch in batches:
            optimizer.zero_grad()
            logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
            loss_of(logits, batch["labels"]).backward()
            optimizer.step()

    return train


def ragged(pairs: int, batches: int = 2, longest: int = 128, size: int = 32) -> Iterator[Row]:
    """P7; ``size`` rows in a batch."""
    shape = {"vocab_size": 2048, "embed_dim": 128, "num_heads": 4, "num_layers": 4, "max_len": longest}
    config = TransformerConfig(**shape, architecture="encoder", norm_position="post", embed_norm=True, tie_embeddings=False)  # type: ignore[arg-type]
    share = torch.distributions.Beta(0.8, 1.2).sample((size * batches,))
    rows = [torch.randint(1, 2048, (int(n),)) for n in (share * longest).ceil().clamp(1, longest)]
    alike, sorted_ = ([padded(all_[i : i + size]) for i in range(0, len(rows), size)] for all_ in (rows, sorted(rows, key=len)))
    tokens = sum(map(len, rows))
    fill = tokens / sum(batch["key_mask"].numel() for batch in alike)
    others = {"nn.TransformerEncoder": TorchModel(config), "transformers' BERT": hugging_face_encoder(config)}
    ways = {"packed": ([packed(batch) for batch in alike], ">= 1.8"), "bucketed": (sorted_, None)}
    label = f"rows of 1 to {longest} tokens, about 40 % full"
    for name, theirs in others.items():
        for how, (ours, wanted) in ways.items():
            found = compare(epoch(theirs, alike), epoch(build_model(config), ours), pairs=pairs)
            known = {"tokens_per_second": round(tokens / found["seconds"][1]), "fill": fill}
            yield row("P7", f"real tokens/s over {name}, ours {how}", label, found, wanted, **known)


def main() -> None:
    given = parser(__doc__, ("P5", "P6", "P7")).parse_args()
    measure("attention", given, {
        "P5": lambda: fused(given.pairs, (4, 8, 1024, 32), {"sdpa": ">= 2.5", "chunked": ">= 2.5"}),
        "P6": lambda: chain(choice(given.pairs), masked(given.pairs)),
        "P7": lambda: ragged(given.pairs),
    })  # fmt: skip


if __name__ == "__main__":
    main()
