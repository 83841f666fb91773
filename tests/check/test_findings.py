"""Each finding of a model that no other test shows, in a small model with that mistake; and the table of findings has no idle row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import minitx.check
from minitx.check import Severity, check_attention, check_model
from minitx.check.results import FINDINGS


class Model(nn.Module):
    """Ids in, logits out: the mean of the tokens so far. ``mistake`` is the one that the test names."""

    causal = True

    def __init__(self, mistake: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mistake, self.block_size = mistake, 24
        self.table, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        if mistake == "last-id-crashes":
            self.config = {"vocab_size": 40, "eos_token_id": 39}  # no ordinary row has the last id

    def forward(self, ids, attention_mask=None, position_ids=None):
        B, L = ids.shape
        mistake, x = self.mistake, self.table(ids.clamp(0, 39) if self.mistake == "ids-outside" else ids)
        kept = x.new_ones(B, L, 1) if attention_mask is None else attention_mask[..., None].to(x.dtype)
        if mistake == "no-effect":
            x = x * 0 + 1
        if mistake == "train-mode-differs" and self.training:
            x = x * 1.1
        if mistake == "last-id-crashes" and (ids == 39).any():
            raise IndexError("39")
        places = torch.arange(L).expand(B, L) if position_ids is None else position_ids
        starts = (places == 0).long().cumsum(1)
        first = x[:, :1].detach()
        seen = (torch.ones(L, L).tril() * (starts[:, :, None] == starts[:, None, :])).to(x.dtype) * kept.mT
        if mistake == "gradient-cut-in-part":
            seen[:, :, 0] = 0
        x = seen @ x / seen.sum(-1, keepdim=True).clamp(min=1)
        if mistake == "document-differs":
            x = x + torch.arange(L)[:, None] / 10
        if mistake == "nan-at-padding" and attention_mask is not None:
            x = x / kept
        if (mistake == "nan-at-its-limit" and L == 24) or (mistake == "nan-at-a-length" and L == 2) or mistake == "not-finite":
            x = x * torch.nan
        if mistake == "bfloat16-not-finite" and x.dtype == torch.bfloat16:
            x = x * torch.inf
        if mistake == "gradient-leaks":
            later = torch.cat((x[:, 1:], x[:, :1]), 1)
            x = x + later - later.detach()
        if mistake == "gradient-cut-in-part":
            x = x + first
        if mistake == "gradient-not-finite":
            x = x + (x.detach() - x).abs().sqrt()
        logits = self.head(x)
        return logits.detach() if mistake == "no-gradient" else logits


FRAGILE = ("train-mode-differs", "ids-outside", "nan-at-padding", "document-differs", "gradient-cut-in-part", "last-id-crashes")
ONLY = {
    "not-finite": "rows", "no-effect": "rows", "train-mode-differs": "train-mode", "last-id-crashes": "sizes", "ids-outside": "sizes",
    "nan-at-its-limit": "sizes", "nan-at-a-length": "sizes", "document-differs": "documents", "nan-at-padding": "padding",
    "bfloat16-not-finite": "bfloat16", "gradient-leaks": "causality", "gradient-cut-in-part": "causality", "no-gradient": "gradient",
    "gradient-not-finite": "gradient",
}  # fmt: skip


@pytest.mark.parametrize("mistake", ONLY)
def test_a_mistake_is_found_and_the_model_without_it_is_right(mistake):
    found = {finding.id: finding for finding in check_model(Model(mistake), only=ONLY[mistake]).findings}
    assert mistake in found, found
    assert (found[mistake].severity == Severity.WRONG) == (mistake not in FRAGILE)
    assert "{" not in f"{found[mistake].fault}{found[mistake].advice}{found[mistake].witness}"
    right = check_model(Model(""), only=ONLY[mistake])
    assert mistake not in {finding.id for finding in right.findings} and right.is_right, str(right)


def test_weights_that_are_tied_otherwise_than_stated_are_found():
    class Tied(Model):
        def get_input_embeddings(self):
            return self.table

        def get_output_embeddings(self):
            return self.head

    model = Tied("")
    model.config = type("Config", (), {"tie_word_embeddings": True})()
    (finding,) = check_model(model, only="weights").findings
    assert finding.id == "tied-otherwise" and "separate weights" in finding.fault
    model.head.weight = model.table.weight
    assert check_model(model, only="weights").findings == ()


def test_a_function_of_whole_rows_gets_the_number_of_heads():
    def attention(q, k, v, num_heads=2):
        q, k, v = (x.unflatten(2, (num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    report = check_attention(attention)
    assert report.is_right and "num_heads=4" in report.called_as, str(report)


def test_each_finding_of_the_table_is_found_somewhere():
    folder = Path(minitx.check.__file__).parent
    text = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py") if path.name != "results.py")
    assert [key for key in FINDINGS if f'"{key}"' not in text] == []
    used = set(re.findall(r'(?:finding|note|failed|demand)\([^"\n]*?(?:, )?"([a-z0-9{}-]+-[a-z0-9{}-]+)"', text))
    assert used and used <= {*FINDINGS}
