"""Right subjects are never accused: what is not declared is described, and what is more than the definition is not judged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from minitx.check import Status, check_attention, check_model
from minitx.nn import MultiHeadAttention


def severities(report):
    return {finding.id: finding.severity.value for finding in report.findings}


class Tagger(nn.Module):
    """Ids in, five labels for each token out. ``mix`` is between them."""

    def __init__(self, mix, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mix, self.head = nn.Embedding(60, width), mix, nn.Linear(width, 5)

    def forward(self, tokens):
        return self.head(self.mix(self.table(tokens)))


class Local(nn.Module):
    """Each token sees ``before`` tokens before it and ``after`` tokens after it."""

    def __init__(self, before, after):
        super().__init__()
        self.before, self.after, self.conv = before, after, nn.Conv1d(16, 16, before + after + 1)

    def forward(self, x):
        return self.conv(F.pad(x.mT, (self.before, self.after))).mT


class First(nn.Module):
    """The first output of a recurrent layer."""

    def __init__(self, **options):
        super().__init__()
        self.cell = nn.GRU(16, 16, **options)

    def forward(self, x):
        return self.cell(x)[0]


def test_a_bidirectional_convolution_is_described_and_accused_only_of_what_was_declared():
    model = Tagger(Local(1, 1))
    report = check_model(model, only="causality")
    assert report.findings == () and report.taken_as.startswith("bidirectional: 11 pairs"), str(report)
    assert str(report).splitlines()[2].startswith("taken as   bidirectional")
    assert severities(check_model(model, only="causality", expect="causal")) == {"not-causal": "wrong"}
    assert check_model(model, only="causality", expect="bidirectional").findings == ()


class Overlapping(nn.Module):
    """Sums of the tokens so far. From token 20 on, an output has token 32, too, if there is one."""

    def forward(self, x):
        return x.cumsum(1) + F.pad(x[:, 32:33], (0, 0, 20, 0)).sum(1, keepdim=True) * (torch.arange(x.shape[1]) >= 20)[:, None]


class Remembers(nn.Module):
    """A recurrent layer that returns its state. In pieces of more than 60 tokens, it forgets the state that it got."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.cell = nn.Embedding(60, 16), nn.GRU(16, 16, batch_first=True)

    def forward(self, tokens, state=None):
        return self.cell(self.table(tokens), state if tokens.shape[1] < 60 else None)


def test_a_long_row_accuses_only_what_declares_causality():
    model = Tagger(Overlapping())
    assert severities(check_model(model, only="causality")) == {"not-causal-in-a-long-row": "fragile"}
    assert severities(check_model(model, only="causality", expect="causal")) == {"not-causal-in-a-long-row": "wrong"}
    cached = Remembers()
    assert severities(check_model(cached, only="cache")) == {"cache-differs-and-a-long-row": "fragile"}
    assert severities(check_model(cached, only="cache", expect="causal")) == {"cache-differs-and-a-long-row": "wrong"}


def test_a_model_that_sees_few_later_tokens_and_declares_nothing_is_fragile():
    report = check_model(Tagger(Local(5, 1)), only="causality")
    assert severities(report) == {"not-causal": "fragile"} and "expect=bidirectional declares it" in report.findings[0].advice


@pytest.mark.parametrize(
    ("expect", "found"), [("window:4", set()), ("window:3", {"other-window"}), ("window:5", {"other-window"})]
)
def test_a_declared_window_is_exactly_what_an_output_depends_on(expect, found):
    assert set(severities(check_model(Tagger(Local(3, 0)), only="causality", expect=expect))) == found


def test_a_causal_model_that_is_declared_bidirectional_is_wrong():
    assert severities(check_model(Tagger(Local(3, 0)), only="causality", expect="bidirectional")) == {
        "not-bidirectional": "wrong"
    }
    with pytest.raises(ValueError, match="expect=windows must be causal, bidirectional"):
        check_model(Tagger(Local(3, 0)), expect="windows")


def test_layers_that_take_the_length_first_are_called_so():
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 2, enable_nested_tensor=False)
    report = check_model(stack, only=["rows", "causality", "padding"])
    assert report.mend_first is None and "src (L, B, 32)" in report.called_as, str(report)
    assert {"rows", "padding"} <= {check.id.partition("/")[0] for check in report.with_status(Status.PASSED)}
    report = check_model(Tagger(First()), only="rows")  # ids of (L, B), or batch_first was forgotten: nobody can tell
    assert severities(report) == {"length-first": "fragile"} and "tokens (L, B)" in report.called_as


def test_an_assertion_is_a_refusal():
    class Blocks(nn.Module):
        def forward(self, x):
            assert x.shape[1] % 4 == 0, "the length must be a multiple of 4"
            return x + x.unflatten(1, (-1, 4)).mean(2, keepdim=True).expand(-1, -1, 4, -1).flatten(1, 2)

    report = check_model(Tagger(Blocks()), only="sizes")
    assert report.findings == () and "multiple of 4" in str(report) and report.taken_as.endswith("tokens are refused")
    model = Tagger(Blocks())
    model.max_len = 32
    report = check_model(model, only="sizes")
    assert severities(report) == {"refuses-lengths": "fragile"} and "its limit is 32" in report.findings[0].fault


def test_padding_that_is_recognised_by_its_id_is_a_note():
    class Last(Tagger):
        def forward(self, tokens, attention_mask=None):
            ends = (tokens != 0).long().mul(torch.arange(tokens.shape[1])).argmax(1)
            kept = tokens.new_ones(tokens.shape) if attention_mask is None else attention_mask
            sums = (self.table(tokens) * kept[..., None] * (tokens != 0)[..., None]).cumsum(1)
            return self.head(sums[torch.arange(len(tokens)), ends] + self.table(tokens)[torch.arange(len(tokens)), ends])

    model = Last(nn.Identity())
    model.config = {"pad_token_id": 0}
    assert severities(check_model(model, only="padding")) == {"padding-by-id": "note"}


def test_an_output_that_is_read_at_the_first_token_asks_for_padding_on_the_right():
    class FirstToken(Tagger):
        def forward(self, tokens, attention_mask=None):
            kept = tokens.new_ones(tokens.shape) if attention_mask is None else attention_mask
            x = self.table(tokens)
            return self.head(x[:, 0] + (x * kept[..., None]).sum(1))

    assert severities(check_model(FirstToken(nn.Identity()), only="padding")) == {"reads-left-edge": "note"}


def test_a_mask_that_another_argument_completes_is_a_note():
    report = check_model(nn.Transformer(32, 4, 1, 1, 64, batch_first=True), only="padding")
    assert "source-needs-another-mask" in severities(report) and report.is_right, str(report)
    assert "memory_key_padding_mask" in str(report)


def test_randomness_by_design_is_not_judged_and_dropout_in_evaluation_is_wrong():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    class Dropout(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.1)

    assert severities(check_model(Tagger(Noise()), only="rows")) == {"random-by-itself": "fragile"}
    assert severities(check_model(Tagger(Dropout()), only="rows")) == {"random": "wrong"}


def test_one_number_for_each_token_has_positions():
    class Scores(Tagger):
        def forward(self, tokens):
            return super().forward(tokens)[..., 0]

    report = check_model(Scores(Local(3, 0)), only="causality")
    assert report.taken_as.startswith("causal") and report.with_status(Status.PASSED)


LAYERS = {
    "GRU": lambda: nn.GRU(16, 16, batch_first=True),
    "LSTM": lambda: nn.LSTM(64, 64, batch_first=True),
    "Conv1d": lambda: nn.Conv1d(64, 64, 5, padding=2),
    "MultiheadAttention": lambda: nn.MultiheadAttention(256, 4, batch_first=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_rounding_in_a_layer_alone_is_no_difference(name):
    torch.manual_seed(0)
    report = check_model(LAYERS[name](), only=["rows", "padding", "gradient", "bfloat16"])
    assert report.mend_first is None and report.with_status(Status.PASSED), str(report)


# layers and functions


class Layer(nn.Module):
    """A layer of attention with steps of its own between its projections and its softmax."""

    def __init__(self, extra, fault=False):
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.extra, self.fault = 4, extra, fault
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        if self.extra == "norm":
            q, k = self.norm(q), self.norm(k)
        if self.extra == "positions":
            q, k = (t * torch.arange(1, t.shape[2] + 1, device=t.device)[:, None] for t in (q, k))
        if "cosine" in self.extra:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = q @ k.mT * (1 if self.extra == "cosine" else 8**-0.5)
        if self.extra == "bias":
            scores = scores - (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs()
        weights = scores.relu() + 0.1 if self.extra == "no softmax" else scores.softmax(-1)
        out = weights @ (v.roll(1, 2) ** 3 if self.fault else v)
        return self.proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("extra", ["norm", "positions", "bias", "cosine", "cosine with a scale"])
def test_a_layer_that_is_more_than_the_definition_is_described(extra):
    report = check_attention(Layer(extra))
    assert severities(report) == {"more-than-the-definition": "note"} and report.exit_code == 0, str(report)
    (check,) = [check for check in report.checks if check.id == "plain"]
    assert check.status == Status.NOT_TRIED and "softmax" in check.reason


DESCRIBED = {
    "values times a vector": lambda weights, v, x: weights @ (v * torch.linspace(0.5, 1.5, 8)),
    "values through a function": lambda weights, v, x: weights @ F.silu(v),
    "values times a gate of their token": lambda weights, v, x: weights @ (v * x.sigmoid()),
    "outputs times a gate of their token": lambda weights, v, x: (weights @ v) * x.sigmoid(),
}
DIFFERENT = {
    "values times a gate of all tokens": lambda weights, v, x: weights @ (v * v.mean(2, keepdim=True).sigmoid()),
    "values of the token before": lambda weights, v, x: weights @ F.silu(v.roll(1, 2)),
    "other weights": lambda weights, v, x: weights.square() @ F.silu(v),
}


class GatedHeads(Layer):
    """A layer whose values or outputs are changed one by one, without a further product."""

    def __init__(self, gate):
        super().__init__("")
        self.mix = (DESCRIBED | DIFFERENT)[gate]

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return self.proj(self.mix((q @ k.mT * 8**-0.5).softmax(-1), v, heads).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("gate", [*DESCRIBED, *DIFFERENT])
def test_values_and_outputs_that_only_their_own_token_changes_are_described_and_others_differ(gate):
    report = check_attention(GatedHeads(gate))
    expected = {"more-than-the-definition": "note"} if gate in DESCRIBED else {"differs": "wrong"}
    assert severities(report) == expected and report.exit_code == (gate in DIFFERENT), str(report)


def test_a_function_that_changes_each_value_is_described_and_one_that_mixes_keys_into_the_values_differs():
    def changed(q, k, v):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v.tanh()

    def with_keys(q, k, v):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ (v + k[..., : v.shape[-1]])

    report = check_attention(changed)
    assert severities(report) == {"more-than-the-definition": "note"} and report.exit_code == 0, str(report)
    assert check_attention(with_keys).exit_code == 1


def test_a_layer_whose_weights_do_not_add_up_to_1_is_fragile():
    report = check_attention(Layer("no softmax"))
    assert severities(report) == {"more-than-the-definition": "note", "sums-of-weights": "fragile"}, str(report)
    assert report.exit_code == 0


class Gated(MultiHeadAttention):
    """A gate for each head: the product with the input is a fourth one, and the output is not that of the definition."""

    def __init__(self, embed_dim, num_heads, leaks=False):
        super().__init__(embed_dim, num_heads)
        self.gate, self.leaks = nn.Linear(embed_dim, num_heads), leaks

    def merge(self, heads, query):
        gates = self.gate(query).sigmoid()
        gates = gates.mean(1, keepdim=True) if self.leaks else gates  # hidden tokens count, too
        return super().merge(heads * gates.transpose(1, 2)[..., None], query)


def test_a_layer_with_a_product_more_is_checked_by_its_properties():
    found = check_attention(Gated)
    assert found.called_as.startswith("Gated(query, key_mask)") and severities(found) == {"no-order": "note"}
    assert "bidirectional" in found.taken_as and {"padding", "rows"} <= {check.id.partition("/")[0] for check in found.checks}
    leaking = check_attention(Gated(32, 4, leaks=True))
    assert leaking.exit_code == 1 and all("padding" in check.id for check in leaking.with_status(Status.FAILED))


def test_a_cache_of_a_layer_does_not_declare_causality():
    assert check_model(MultiHeadAttention(32, 4)).exit_code == 0
    assert check_model(MultiHeadAttention(32, 4), expect="causal").exit_code == 1


def test_a_layer_without_steps_of_its_own_is_compared_with_the_definition():
    assert check_attention(Layer("")).findings == ()
    assert severities(check_attention(Layer("", fault=True))) == {"differs": "wrong"}


def test_a_causal_mask_that_the_documentation_places_at_the_upper_left_is_fragile():
    assert severities(check_attention(F.scaled_dot_product_attention)) == {"causal-mask-from-the-upper-left": "fragile"}
