"""An adopted Hugging Face model over the same model under ``sdpa``: P15.

GPT-2's shape with random weights, the same weights on both sides; logits, or ids, agree before anything is timed. A training step is
logits, mean cross-entropy, backward, fused AdamW. A token is one of ``generate`` with a cache, the prompt included.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from harness import Row, compare, parser, row, write
from peers import decoder, hugging_face, loss_of
from step import SIZES, SMALL, ids_and_labels, raw_step

from minitx.interop import adopt_hf


def training(pairs: int) -> Row:
    """Steps."""
    theirs = hugging_face(decoder(*SIZES[SMALL][:4])).module
    ours = adopt_hf(copy.deepcopy(theirs))
    ids, labels = ids_and_labels(SMALL)

    def loss(model: torch.nn.Module) -> torch.Tensor:
        return loss_of(model(input_ids=ids, use_cache=False).logits, labels)

    with torch.no_grad():
        torch.testing.assert_close(loss(ours), loss(theirs))
    found = compare(raw_step(theirs, partial(loss, theirs)), raw_step(ours, partial(loss, ours)), pairs=pairs)
    return row("P15", "a training step of an adopted GPT-2 over the same under sdpa", SMALL, found, "<= 1.03")


def decoding(pairs: int, start: int = 64, new: int = 64) -> Row:
    """Tokens."""
    theirs = hugging_face(decoder(*SIZES[SMALL][:3], start + new)).module.eval()
    ours, prompt = adopt_hf(copy.deepcopy(theirs)), torch.randint(SIZES[SMALL][0], (1, start))

    def ids(model: torch.nn.Module) -> torch.Tensor:
        options = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": new, "max_new_tokens": new}
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)  # type: ignore[operator]

    torch.testing.assert_close(ids(ours), ids(theirs))
    found = compare(partial(ids, theirs), partial(ids, ours), pairs=pairs)
    return row("P15", "a token of an adopted GPT-2 over the same under sdpa", f"E 128, {new} after {start}", found, "<= 1.05")


def main() -> None:
    given = parser(__doc__).parse_args()
    torch.manual_seed(0)
    rows: Iterator[Row] = (part(given.pairs) for part in (training, decoding))
    write("adopted", list(rows))


if __name__ == "__main__":
    main()
