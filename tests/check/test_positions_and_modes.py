"""What a report says of positions, of train mode and of arguments that ask for more results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minitx.check import Severity, check_model
from minitx.config import TransformerConfig
from minitx.nn import DecoderLM


class Decoder(nn.Module):
    """One causal layer with a bias of the distance, and a mistake."""

    causal = True

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mistake = mistake
        self.table, self.qkv, self.head = nn.Embedding(41, 12), nn.Linear(12, 36), nn.Linear(12, 41)
        self.norm = nn.BatchNorm1d(12) if mistake == "batch norm" else nn.Identity()

    def forward(self, ids, position_ids=None, output_attentions=False):
        q, k, v = self.qkv(self.table(ids)).chunk(3, -1)
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        if position_ids is not None and self.mistake != "position_ids ignored":
            places = position_ids
        distance = (places[:, :, None] - places[:, None, :]).to(q.dtype)
        if self.mistake == "positions of the keys alone":
            distance = places[:, None, :].sin().to(q.dtype) * 3
        bias = distance if self.mistake == "sign of the bias" else -distance
        scores = q @ k.mT / 12**0.5 + bias
        if not (output_attentions and self.mistake == "a second path without the mask"):
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
        weights = scores.softmax(-1)
        logits = self.head(self.norm((weights @ v).mT).mT)
        return (logits, weights) if output_attentions else logits


ALL = ("causality", "reach", "switches", "train-mode")
FAULTS = {
    "position_ids ignored": ("position-ids-ignored", Severity.FRAGILE),
    "positions of the keys alone": ("positions-not-relative", Severity.WRONG),
    "batch norm": ("not-causal-in-training", Severity.WRONG),
    "a second path without the mask": ("changes-with-output-attentions", Severity.WRONG),
}


@pytest.mark.parametrize("mistake", FAULTS)
def test_a_mistake_of_positions_or_of_a_mode_is_named(mistake):
    (finding,) = check_model(Decoder(mistake), only=ALL, expect="causal,relative").findings
    assert (finding.id, finding.severity) == FAULTS[mistake]


def test_nothing_is_wrong_with_a_bias_of_the_distance_and_the_first_lines_describe_it():
    report = check_model(Decoder(), only=ALL, expect="relative")
    assert not report.findings and report.taken_as.endswith("; positions are relative"), str(report)
    assert "far tokens" not in report.taken_as
    assert "far tokens move the output" in check_model(Decoder("sign of the bias"), only="causality").taken_as


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_learned_positions_are_not_relative_and_rotary_positions_are(position):
    sizes = {"vocab_size": 31, "embed_dim": 24, "num_heads": 3, "num_layers": 2, "position": position}
    model = DecoderLM(TransformerConfig(architecture="decoder", **sizes))
    assert check_model(model, only="reach").is_right
    declared = check_model(model, only="reach", expect="causal,relative")
    assert [finding.id for finding in declared.findings] == ["positions-not-relative"] * (position == "learned")


def test_padding_on_the_left_judges_relative_positions_where_there_are_no_position_ids():
    class Absolute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.place = nn.Embedding(41, 12), nn.Embedding(64, 12)
            self.layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)

        def forward(self, ids, key_padding_mask=None):
            x = self.table(ids) + self.place.weight[: ids.shape[1]]
            return self.layer(x, src_key_padding_mask=key_padding_mask)

    torch.manual_seed(0)
    model = Absolute()
    severities = {
        expect: [f.severity for f in check_model(model, only="padding", expect=expect).findings]
        for expect in (None, "relative")
    }
    assert severities == {None: [Severity.NOTE], "relative": [Severity.WRONG]}
    report = check_model(model, only="reach", expect="bidirectional,relative")
    assert any("padding on the left judges it" in check.reason for check in report.checks)


@pytest.mark.parametrize("expect", ["", "relative,causal", "window:0", "causal,"])
def test_an_unknown_declaration_is_refused(expect):
    with pytest.raises(ValueError, match="must be causal, bidirectional or window:4"):
        check_model(Decoder(), expect=expect)
