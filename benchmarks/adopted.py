"""An adopted Hugging Face model over the same model under ``sdpa`` (P15), and its statistics over eager attention (P16).

P15: random weights, the same on both sides; logits, or ids, agree before anything is timed. A training step of GPT-2's shape is
logits, mean cross-entropy, backward, fused AdamW. A token is one of ``generate`` with a cache, the prompt included. P16 and the second
row of tokens need a folder of SmolLM2: python benchmarks/adopted.py --folder OUT/smollm2 (examples/real_models.py writes it).
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import torch
from harness import Row, compare, exact, parser, peak, row, write
from peers import decoder, hugging_face, loss_of
from step import SIZES, SMALL, ids_and_labels, raw_step
from torch import Tensor, nn

from minitx.analysis import capture
from minitx.interop import adopt_hf

SHARES = (0.90, 0.99)


def training(pairs: int) -> Row:
    """Steps."""
    theirs = hugging_face(decoder(*SIZES[SMALL][:4])).module
    ours = adopt_hf(copy.deepcopy(theirs))
    ids, labels = ids_and_labels(SMALL)

    def loss(model: nn.Module) -> Tensor:
        return loss_of(model(input_ids=ids, use_cache=False).logits, labels)

    with torch.no_grad():
        torch.testing.assert_close(loss(ours), loss(theirs))
    found = compare(raw_step(theirs, partial(loss, theirs)), raw_step(ours, partial(loss, ours)), pairs=pairs)
    return row("P15", "a training step of an adopted GPT-2 over the same under sdpa", SMALL, found, "<= 1.03")


def decoding(theirs: nn.Module, name: str, pairs: int, start: int = 64, new: int = 64, wanted: str | None = "<= 1.05") -> Row:
    """Tokens. The target is SmolLM2's: in a model of width 128 a layer's products take less time than its Python."""
    ours, prompt = adopt_hf(copy.deepcopy(theirs)), torch.randint(theirs.config.vocab_size, (1, start))

    def ids(model: nn.Module) -> Tensor:
        options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": new, "max_new_tokens": new}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # type: ignore[operator]

    torch.testing.assert_close(ids(ours), ids(theirs))
    found = compare(partial(ids, theirs), partial(ids, ours), pairs=pairs)
    return row("P15", f"a token of an adopted {name} over the same under sdpa", f"{new} after {start}", found, wanted, "lower")


def statistics(eager: nn.Module, ours: nn.Module, length: int, pairs: int) -> list[Row]:
    """Seconds and bytes of a forward pass with the statistics of all layers. Eager's are those that weights give: six of fourteen."""
    ids = torch.randint(eager.config.vocab_size, (1, length))

    @torch.no_grad()
    def theirs() -> list[dict[str, Tensor]]:
        return [of_weights(weights) for weights in eager(ids, use_cache=False, output_attentions=True).attentions]

    @torch.no_grad()
    def mine() -> list[dict[str, Tensor]]:
        with capture(ours) as seen:
            ours(ids, use_cache=False)
        return [records[0] for records in seen.values()]

    for wanted, got in zip(theirs(), mine(), strict=True):
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, atol=2e-3, rtol=2e-3)
    what, label = "of all statistics of an adopted SmolLM2 over eager attention with output_attentions", f"{length} tokens"
    found = compare(theirs, mine, pairs=pairs, warm=1)
    time = row("P16", f"time {what}", label, found, "<= 1.0" if length < 2048 else "<= 0.8")
    return [time, row("P16", f"peak memory {what}", label, exact(peak(mine) / peak(theirs)), "<= 0.3")]


def of_weights(weights: Tensor) -> dict[str, Tensor]:
    """Statistics of causal weights (B, H, L, L), as a user writes them: each (H,) in float64, over rows with two keys or more."""
    p = weights[:, :, 1:]
    largest, squares, cubes = p.amax(-1), p.square().sum(-1), p.pow(3).sum(-1)
    entropy = -torch.xlogy(p, p).sum(-1) / torch.arange(2.0, p.shape[2] + 2).log()
    found = {"entropy": entropy, "max_weight": largest, "ipr": squares, "jacobian_l1": 1 - squares}
    found |= {f"saturation_{round(100 * share)}": (largest > share).float() for share in SHARES}
    found["jacobian_fro"] = squares - 2 * cubes + squares.square()
    return {name: value.double().mean((0, 2)) for name, value in found.items()}


def main() -> None:
    arguments = parser(__doc__, ("P15", "P16"))
    arguments.add_argument("--folder", type=Path, help="a Hugging Face folder of SmolLM2")
    given = arguments.parse_args()
    torch.manual_seed(0)
    rows = []
    if "P15" in given.only:
        small = hugging_face(decoder(*SIZES[SMALL][:3], 128)).module.eval()
        rows += [training(given.pairs), decoding(small, f"GPT-2, {SMALL}", given.pairs, wanted=None)]
    if given.folder:
        from transformers import AutoModelForCausalLM

        real = AutoModelForCausalLM.from_pretrained(given.folder).eval()
        if "P15" in given.only:
            rows.append(decoding(real, "SmolLM2", given.pairs))
        if "P16" in given.only:
            eager = copy.deepcopy(real)
            eager.set_attn_implementation("eager")
            ours = adopt_hf(real)
            for length, pairs in ((512, given.pairs), (2048, min(given.pairs, 6))):  # eager needs seconds for a long row
                rows += statistics(eager, ours, length, pairs)
    write("adopted", rows)


if __name__ == "__main__":
    main()
