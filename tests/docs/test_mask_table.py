"""The table of masks of other libraries in docs/attention.md: every conversion gives the other library's answer."""

import re

import pytest
import torch
from page_blocks import ROOT
from torch import nn
from torch.nn import functional as F

from minitx.nn import MultiHeadAttention, from_key_padding_mask

B, H, L, E = 2, 3, 5, 12
PAGE = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("### Masks of other libraries")[2].partition("```")[0]
ROWS = {
    row[0]: row[2].strip("`") for row in (line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| "))
}
ROWS.pop("mask")

HIDDEN = torch.tensor([[False, False, False, False, True], [False, False, True, True, True]])
VISIBLE = torch.ones(L, L).tril().bool()
RANDOM = (torch.rand(B, H, L, L, generator=torch.Generator().manual_seed(0)) < 0.5) | torch.eye(L).bool()


def floats(hidden, low=-torch.inf):
    return torch.zeros(hidden.shape).masked_fill(hidden, low)


def layer(**masks):
    """The mask, and how torch's layer is called with it."""
    return next(iter(masks.values())), lambda theirs, x, q: theirs(q, x, x, need_weights=False, **masks)[0]


def function(mask, visible=None, **options):
    """The mask, and torch's function with it or with what it means, between the projections of torch's layer."""

    def call(theirs, x, q):
        weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
        sides = zip((q, x, x), weights, biases, strict=True)
        heads = [F.linear(side, w, b).unflatten(-1, (H, -1)).transpose(1, 2) for side, w, b in sides]
        attn_mask = mask if visible is None else visible
        out = F.scaled_dot_product_attention(*heads, attn_mask=attn_mask, **options)
        return theirs.out_proj(out.transpose(1, 2).flatten(2))

    return mask, call


SUBSEQUENT = nn.Transformer.generate_square_subsequent_mask(L)
FOUR = (~HIDDEN)[:, None, None] & VISIBLE
CASES = {
    "`attention_mask` of a tokenizer": [
        function((~HIDDEN).to(dtype), (~HIDDEN)[:, None, None])
        for dtype in (torch.long, torch.int32, torch.uint8, torch.float32)
    ],
    "`key_padding_mask` of torch, bool": [layer(key_padding_mask=HIDDEN)],
    "`key_padding_mask` of torch, floats": [layer(key_padding_mask=floats(HIDDEN))],
    "`attn_mask` of torch's `scaled_dot_product_attention`": [function(VISIBLE), function(RANDOM), function(FOUR)],
    "`attn_mask` of `nn.MultiheadAttention`": [layer(attn_mask=~VISIBLE)],
    "the same for each head": [layer(attn_mask=~RANDOM.flatten(0, 1))],
    "floats of 0 and −inf": [
        layer(attn_mask=SUBSEQUENT),
        function(SUBSEQUENT),
        function(floats(~FOUR, torch.finfo(torch.float32).min)),
    ],
    "floats that are added": [function(torch.randn(B, H, L, L)), function(floats(~RANDOM))],
    "`is_causal` of torch, L = S": [function(None, is_causal=True)],
    "`is_causal` of torch, L < S": [function(None, is_causal=True)],
    "causal with a cache in transformers": [function(None, VISIBLE[-2:])],
}


def cases_of(row):
    return next(cases for start, cases in CASES.items() if row.startswith(start))


@pytest.mark.parametrize("row", ROWS)
def test_a_mask_of_another_library_converted_as_the_table_says_gives_its_answer(row):
    theirs = nn.MultiheadAttention(E, H, batch_first=True).eval()
    ours, x = MultiHeadAttention.from_torch(theirs).eval(), torch.randn(B, L, E)
    rows = 2 if "L < S" in row else L
    for mask, call in cases_of(row):
        places = {"torch": torch, "from_key_padding_mask": from_key_padding_mask, "m": mask, "B": B, "H": H, "L": rows, "S": L}
        arguments = eval(f"dict({ROWS[row]})", places)
        q = x[:, -rows:]
        torch.testing.assert_close(ours(q, x, **arguments), call(theirs, x, q), atol=1e-5, rtol=1e-5)


def test_every_case_is_a_row():
    assert len(CASES) == len(ROWS) and all(any(row.startswith(start) for row in ROWS) for start in CASES)


def test_the_place_that_refusals_name_is_there():
    from minitx.nn.rules import MASKS_PAGE

    path, _, title = re.fullmatch(r"see (\S+)(, )(\w+)", MASKS_PAGE).groups()
    assert re.search(rf"^## {title}$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
