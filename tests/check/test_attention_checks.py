"""``check_attention`` names every mistake of the table and of other people, and passes what is right."""

import math
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from broken_functions import BROKEN, KERNELS, RIGHT, WIDTH, RightHidesPadding, right_careful, right_textbook, torch_multihead
from torch import nn

from minitx.check import Severity, Status, check_attention, mutant
from minitx.check.cases import CASES, DRAWS, drawn
from minitx.check.mutants import DEFINITION, MUTANTS, attention_in_steps
from minitx.check.reference import naive_attention
from minitx.config import TransformerConfig
from minitx.nn import DecoderLM, MultiHeadAttention, scaled_dot_product_attention


def wrong(report):
    return {finding.id for finding in report.findings if finding.severity == Severity.WRONG}


def found(report):
    return [finding.id for finding in report.findings if finding.severity != Severity.NOTE]


def by_id(report):
    return {check.id: check for check in report.checks}


class Grouped(nn.Module):
    """Causal self-attention of 4 heads with 2 key heads, and one input."""

    def __init__(self, is_tiled=False):
        super().__init__()
        self.is_tiled = is_tiled
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, width) for width in (16, 8, 8, 16))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        k, v = (x.repeat(1, 2, 1, 1) if self.is_tiled else x for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def test_a_layer_of_grouped_heads_is_compared_with_the_definition():
    report = check_attention(Grouped())
    assert not report.findings and by_id(report)["plain"].status == Status.PASSED, str(report)
    tiled = check_attention(Grouped(is_tiled=True))
    assert [finding.id for finding in tiled.findings] == ["grouped-heads-tiled"] and tiled.exit_code == 1, str(tiled)


class FusedGroups(nn.Module):
    """Self-attention of 4 heads with fewer key heads. One projection has all queries, then all keys and values, or each group's."""

    def __init__(self, key_heads, is_by_group, fault=""):
        super().__init__()
        self.num_heads, self.key_heads, self.is_by_group, self.fault = 4, key_heads, is_by_group, fault
        self.qkv, self.out = nn.Linear(32, 32 + 16 * key_heads), nn.Linear(32, 32)

    def forward(self, x):
        sizes = [32, 8 * self.key_heads, 8 * self.key_heads]
        projected = self.qkv(x)
        q, k, v = (part.unflatten(-1, (-1, 8)) for part in projected.split(sizes, -1))
        if self.is_by_group:
            groups = projected.unflatten(-1, (self.key_heads, -1, 8))
            q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        count = 4 // self.key_heads
        k, v = (part.repeat(1, count, 1, 1) if "tiled" in self.fault else part.repeat_interleave(count, 1) for part in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, scale=1.0 if self.fault == "no-scale" else None)
        return self.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_by_group", [False, True])
@pytest.mark.parametrize(
    ("key_heads", "fault"), [(1, ""), (2, ""), (1, "no-scale"), (2, "no-scale"), (2, "grouped-heads-tiled")]
)
def test_a_fused_projection_with_fewer_key_heads_is_compared_with_the_definition(key_heads, is_by_group, fault):
    report = check_attention(FusedGroups(key_heads, is_by_group, fault))
    assert found(report) == [fault] * bool(fault), str(report)
    assert by_id(report)["plain"].status == (Status.FAILED if fault else Status.PASSED)


class GatedValues(Grouped):
    """Causal self-attention. A gate of the input multiplies the values before, or the output after."""

    def __init__(self, is_before):
        super().__init__()
        self.is_before = is_before
        self.q, self.k, self.v, self.gate = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        gate = self.gate(x).sigmoid()
        q, k, v = self.q(x), self.k(x), self.v(x)
        out = F.scaled_dot_product_attention(q, k, v * gate if self.is_before else v, is_causal=True)
        return out if self.is_before else out * gate


@pytest.mark.parametrize("is_before", [True, False])
def test_a_layer_with_a_gate_is_checked_as_a_model_and_the_first_lines_say_that_the_definition_is_not(is_before):
    report = check_attention(GatedValues(is_before))
    assert report.exit_code == 0 and {"causality", "rows"} <= {check.id.partition("/")[0] for check in report.checks}, str(
        report
    )
    assert report.taken_as.endswith("; not compared with the definition")
    definition = by_id(report)["definition"]
    assert definition.status == Status.NOT_TRIED and "no way to call it was found" in definition.reason, str(report)


# the table


@pytest.mark.parametrize("experiment", [e for e in (*CASES, *DRAWS) if not e.dtypes], ids=lambda experiment: experiment.id)
def test_the_steps_are_the_definition(experiment):
    inputs = drawn(experiment)
    got = attention_in_steps(*inputs.heads, inputs.allowed, is_causal=inputs.is_causal)
    want = naive_attention(*inputs.heads, inputs.allowed, is_causal=inputs.is_causal)
    rounding = 4 * torch.finfo(torch.float64).eps * max(10.0, abs(experiment.low or 0.0))  # of the scores
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=rounding * max(1.0, other.abs().max().item()))


def test_a_mutant_replaces_one_or_two_of_twelve_steps_and_has_advice():
    assert len(vars(DEFINITION)) == 12 and len(MUTANTS) >= 50
    for entry in MUTANTS:
        assert 1 <= len(entry.instead) <= 2 and set(entry.instead) <= vars(DEFINITION).keys() and entry.advice
    assert len({entry.id for entry in MUTANTS}) == len(MUTANTS)


OF_LAYERS = {"heads-not-transposed"}  # as a function, it is right for (B, L, H, D)


@pytest.mark.parametrize("entry", [entry for entry in MUTANTS if entry.id not in OF_LAYERS], ids=lambda entry: entry.id)
def test_every_mutant_is_named(entry):
    report = check_attention(mutant(entry.name), mask="keep")
    assert found(report)[0] == entry.id, report
    assert report.mend_first.advice == entry.advice
    assert report.exit_code == (0 if entry.is_extreme else 1)


def test_an_unknown_mutant_is_refused_with_similar_names():
    with pytest.raises(ValueError, match="'no scales'; similar names: no scale"):
        mutant("no scales")


# what others write

NAMES = {
    "einsum_without_scale": "no-scale",
    "loops_with_wide_scale": "scale-by-embed-dim",
    "HeadsFromView": "heads-by-view",
    "causal_from_upper_left": "causal-mask-from-the-upper-left",
    "SeesOnlyTheFuture": "causal-mask-upside-down",
    "padding_on_the_queries": "padding-mask-on-the-queries",
    "MaskAfterSoftmax": "mask-after-the-softmax",
    "batch_length_heads_over_queries": "softmax-over-the-queries",
    "three_axes_divided_by_width": "scale-by-d-k",
    "DropoutInEvaluation": "random",
    "buffer_like_the_query": "zeros-like-q-for-d-v-d-k",
    "groups_in_the_wrong_order": "grouped-heads-tiled",
    "softmax_by_hand": "exp-without-the-maximum",
    "MergesWithoutTranspose": "heads-merged-by-view",
    "keys_in_place_of_values": "keys-mixed",
    "first_mask_for_all": "first-mask-for-the-whole-batch",
    "matrices_over_columns": "softmax-over-the-queries",
    "mask_forgotten_when_causal": "mask-ignored-when-causal",
    "square_triangle_with_one_later_token": "causal-mask-shows-one-later-token",
    "one_later_token_from_upper_left": "causal-mask-from-the-upper-left-shows-one-later-token",
    "scores_with_the_values": "keys-and-values-swapped",
    "NeverTransposes": "heads-not-transposed",
}
"""What is found in each. At the first try, before any of them had been run, 18 of the first 22 were named, and two passed."""


@pytest.mark.parametrize("function", BROKEN, ids=lambda function: function.__name__)
def test_a_broken_function_in_another_style_is_named(function):
    report = check_attention(function)
    assert NAMES[function.__name__] in found(report), report
    assert report.called_as


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_a_kernel_that_passes_other_tests_is_wrong(kernel):
    report = check_attention(kernel() if isinstance(kernel, type) else kernel)
    assert wrong(report) & {"differs", "other-shape"}, report


@pytest.mark.parametrize("function", [*RIGHT, torch_multihead], ids=lambda function: function.__name__)
def test_nothing_is_wrong_with_right_functions_and_layers(function):
    report = check_attention(function() if function is torch_multihead else function)
    assert wrong(report) == set(), report
    assert set(found(report)) <= {"nan-where-a-query-sees-nothing"}


@pytest.mark.parametrize("backend", ["math", "sdpa", "chunked", "auto"])
def test_our_backends_pass(backend):
    report = check_attention(partial(scaled_dot_product_attention, backend=backend))
    assert found(report) == [], report
    assert all(check.status == Status.PASSED for check in report.checks if not check.id.startswith("argument"))


def test_our_layer_passes():
    layer = MultiHeadAttention(WIDTH, 3)
    assert found(check_attention(layer)) == []


def test_the_verdict_does_not_depend_on_the_seed():
    assert found(check_attention(right_careful, seed=1)) == []
    assert found(check_attention(mutant("scale by embed_dim"), seed=1))[0] == "scale-by-embed-dim"


# how it is called


def test_unknown_names_are_tried_in_every_order():
    def attention(a, b, c):
        return (b @ c.mT / math.sqrt(c.shape[-1])).softmax(-1) @ a

    report = check_attention(attention)
    assert found(report) == []
    assert "query = b" in report.called_as and "value = a" in report.called_as


@pytest.mark.parametrize(("name", "make", "shown"), [
    ("True = keep", lambda m: m, "True = keep"),
    ("True = hide", lambda m: ~m, "True = hide"),
    ("floats", lambda m: m > 0.5, "1.0 = keep"),
    ("zeros hide", lambda m: m != 0, "True = keep"),
])  # fmt: skip
def test_the_meaning_of_the_mask_is_found(name, make, shown):
    def attention(q, k, v, mask=None):
        if name == "floats" and mask is not None and not mask.is_floating_point():
            raise TypeError("a mask of numbers is needed")
        hidden = None if mask is None else make(mask)
        return right_careful(q, k, v, hidden)

    report = check_attention(attention)
    assert wrong(report) == set() and shown in report.called_as
    assert ("mask-hides" in found(report)) == (name == "True = hide")


def test_only_the_author_can_tell_an_inverted_mask():
    def attention(q, k, v, mask=None):
        return right_careful(q, k, v, None if mask is None else ~mask)

    assert wrong(check_attention(attention)) == set()
    assert "mask-inverted" in wrong(check_attention(attention, mask="keep"))
    assert found(check_attention(attention, mask="hide")) == []


def test_a_mask_that_no_way_of_calling_reaches_is_not_passed():
    def attention(q, k, v, mask=None):
        if mask is not None:
            raise TypeError("a BlockMask is needed")
        return right_careful(q, k, v)

    report = check_attention(attention)
    assert by_id(report)["mask"].status == Status.NOT_TRIED
    assert "mask-not-accepted" in found(report)
    assert check_attention(attention, stage=2).exit_code == 1


def test_arguments_that_nobody_gives_are_listed():
    def attention(q, k, v, window=None, dropout=0.0):
        return right_careful(q, k, v)

    checks = by_id(check_attention(attention))
    assert checks["argument window"].status == checks["argument dropout"].status == Status.NOT_TRIED


def test_weights_that_are_not_those_of_the_output_are_wrong():
    def attention(q, k, v, mask=None):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        before = scores.softmax(-1)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v, before

    report = check_attention(attention)
    assert wrong(report) == {"other-weights"}


def test_changed_arguments_and_idle_parameters_are_found():
    def attention(q, k, v):
        q *= q.shape[-1] ** -0.5
        return (q @ k.mT).softmax(-1) @ v

    assert found(check_attention(attention)) == ["changes-its-arguments"]

    class Layer(RightHidesPadding):
        def __init__(self, d_model, num_heads):
            super().__init__(d_model, num_heads)
            self.other = nn.Linear(d_model, d_model)

    assert wrong(check_attention(Layer)) == {"idle-parameters"}


def test_a_mask_that_is_changed_in_place_is_wrong_and_changes_no_later_check():
    def flips(q, k, v, mask=None):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return (scores if mask is None else scores.masked_fill(mask.logical_not_(), -math.inf)).softmax(-1) @ v

    class FlipsPadding(RightHidesPadding):
        def forward(self, x, key_padding_mask=None):
            out = super().forward(x, key_padding_mask)
            if key_padding_mask is not None:
                key_padding_mask.zero_()
            return out

    def later():
        return str(check_attention(mutant("NaN where a query sees nothing"), mask="keep"))

    before = later()
    for function, stage in ((flips, None), (flips, 2), (FlipsPadding, None)):
        report = check_attention(function, stage=stage)
        assert "changes-the-mask" in wrong(report) and report.exit_code == 1, report
        assert check_attention(flips, stage=1).is_right
        assert later() == before


def test_a_check_changes_no_module_and_copies_those_that_python_does_not_copy():
    class Keeps(RightHidesPadding):
        def forward(self, x, key_padding_mask=None):
            self.last = super().forward(x, key_padding_mask)
            return self.last

    layer = Keeps(12, 2)
    layer(torch.randn(1, 3, 12))
    layer.lock = threading.Lock()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert check_attention(layer).is_right and layer.training
    assert all(value.dtype == before[name].dtype and value.equal(before[name]) for name, value in layer.state_dict().items())

    class WithoutWeights(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    module = WithoutWeights()
    assert check_attention(module).is_right and module.training


def test_a_mistake_without_a_name_is_found_with_a_witness():
    def attention(q, k, v):
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return weights @ v.roll(1, dims=0)

    report = check_attention(attention)
    assert wrong(report) == {"differs"}
    assert "the second sequence changes the output of the first sequence" in report.findings[0].witness


def test_an_axis_that_is_counted_from_the_front_is_found_beside_matrices():
    def attention(q, k, v):
        return F.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)), dim=1) @ v

    for stage in (None, 1):
        report = check_attention(attention, stage=stage)
        assert found(report) == ["few-axes"] and report.exit_code == 0, report
        assert "(L, D)" in report.called_as and "softmax over the heads" in report.findings[0].witness


def test_what_is_not_an_output_is_named():
    def nothing(q, k, v):
        (q @ k.mT).softmax(-1) @ v

    def weights(q, k, v):
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)

    def misspelt(q, k, v):
        return (q @ k.mT / math.sqrt(width)).softmax(-1) @ v  # noqa: F821

    faults = [check_attention(function).findings[0] for function in (nothing, weights, misspelt)]
    assert faults[0].fault == "it returns None"
    assert faults[1].fault == "the output has the shape (2, 4, 5, 5), not (2, 4, 5, 8)"
    assert (faults[2].fault, faults[2].witness) == (
        "it raises the same error in every call",
        "NameError: name 'width' is not defined",
    )


def test_random_weights_are_found_with_advice_for_a_function():
    report = check_attention(lambda q, k, v: F.dropout((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1), 0.1) @ v)
    assert wrong(report) == {"random"} and "training=False" in report.findings[0].advice


def test_a_note_on_equal_numbers_lists_only_mistakes_that_give_them_all():
    def inverted(q, k, v, mask=None):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return (scores if mask is None else scores.masked_fill(mask, -math.inf)).softmax(-1) @ v

    for stage in (1, 2):
        report = check_attention(inverted, stage=stage, mask="keep")
        assert [finding.id for finding in report.findings] == ["mask-inverted"][: stage - 1], report


def test_a_function_that_makes_tensors_of_float32_is_checked_in_float32():
    def attention(q, k, v):
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ torch.eye(k.shape[-2]) @ v

    report = check_attention(attention)
    assert report.called_as.endswith("float32") and wrong(report) == set()


@pytest.mark.parametrize("thing", [3, len, lambda: 0, nn.ReLU(), nn.Linear(8, 8)])
def test_what_is_not_attention_is_refused_or_cannot_be_called(thing):
    try:
        report = check_attention(thing)
    except (ValueError, TypeError):
        return
    assert report.called_as == "" and report.exit_code in (1, 2)
    assert all(check.status == Status.NOT_TRIED for check in report.checks)


def test_a_model_is_refused_in_one_sentence():
    model = DecoderLM(TransformerConfig(vocab_size=11, embed_dim=12, num_heads=2, num_layers=1))
    with pytest.raises(ValueError, match="is a model with the embedding"):
        check_attention(model)


@pytest.mark.parametrize("options", [{"stage": 6}, {"mask": "show"}, {"strict": True, "stage": 1}])
def test_options_that_do_not_exist_are_refused(options):
    with pytest.raises(ValueError, match=r"must be|cannot be combined"):
        check_attention(right_textbook, **options)


# an adapter


def in_one_tuple(batch):
    q, k, v, mask = batch
    scores = q @ k.mT
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1) @ v


def test_an_adapter_calls_what_no_signature_shows():
    def with_mask(function, query, key, value, mask=None):
        return function((query, key, value, mask))

    def without_mask(function, query, key, value):
        return function((query, key, value, None))

    report = check_attention(in_one_tuple, call=with_mask)
    assert report.mend_first.id == "no-scale" and report.called_as.startswith("with_mask(query, key, value, mask): "), str(
        report
    )
    assert by_id(report)["mask-and-causal"].status == Status.FAILED  # the causal mask is inside the mask
    report = check_attention(in_one_tuple, call=without_mask)
    assert wrong(report) == {"no-scale"} and by_id(report)["mask"].reason == "no argument for a mask was found"
    layer = WithoutProjections()
    assert check_attention(layer, call=lambda layer, q, k, v: layer({"q": q, "k": k, "v": v})).is_right and layer.training


class WithoutProjections(nn.Module):
    def forward(self, heads):
        return F.scaled_dot_product_attention(heads["q"], heads["k"], heads["v"])


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda function, query: query, "must take"),
        (lambda function, query, key, value: function(query, key, value), "does not call in_one_tuple: TypeError"),
        (lambda function, query, key, value: None, "does not call in_one_tuple: it returns None"),
    ],
)
def test_a_bad_adapter_is_refused_in_one_sentence(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_attention(in_one_tuple, call=call)


# more than the definition


def own_steps(name):
    """A function of attention with a step of its own."""

    def attention(q, k, v, is_causal=False):
        L, S = q.shape[-2], k.shape[-2]
        places = torch.arange(S - L, S)[:, None] - torch.arange(S)
        if name == "norm":
            q, k = F.layer_norm(q, q.shape[-1:]), F.layer_norm(k, k.shape[-1:])
        if name == "positions":
            q, k = (x * torch.arange(1, x.shape[-2] + 1)[:, None] for x in (q, k))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = 1.5 * torch.tanh(scores / 1.5) if name == "soft-cap" else scores
        if name == "ALiBi":
            scores = scores - places.abs() / torch.arange(1, q.shape[1] + 1)[:, None, None]
        hidden = (places < 0) & is_causal
        if "window" in name:
            hidden = hidden | (places.abs() >= int(name.split()[1]))
        scores = scores.masked_fill(hidden, -math.inf)
        if name == "sink":
            return torch.cat((scores, torch.zeros_like(scores[..., :1])), -1).softmax(-1)[..., :-1] @ v
        if name == "squares":
            return (scores.square() + 0.1) @ v
        if name == "positions, and a softmax over the queries":
            return (scores * torch.arange(1, S + 1)).softmax(-2) @ v
        return (scores * 0.9 if name == "another scale" else scores).softmax(-1) @ v

    return attention


@pytest.mark.parametrize(("name", "word"), [
    ("norm", "norm"), ("positions", "positions"), ("soft-cap", "soft-cap"), ("ALiBi", "ALiBi"), ("window 3", "window"),
    ("window 60", "window"), ("sink", "sink"),
])  # fmt: skip
def test_a_function_with_a_step_of_its_own_is_described(name, word):
    report = check_attention(own_steps(name))
    assert [(finding.id, finding.severity) for finding in report.findings] == [("more-than-the-definition", Severity.NOTE)], (
        report
    )
    assert word in report.findings[0].fault and report.exit_code == 0
    assert {check.status for check in report.with_status(Status.FAILED)} == set()


def test_a_function_that_refuses_long_rows_says_so_in_the_first_lines():
    def attention(q, k, v):
        assert q.shape[-2] <= 64, "too long"
        return right_textbook(q, k, v)

    report = check_attention(attention)
    assert [(f.id, f.severity) for f in report.findings] == [("refuses-65-queries-130-keys", Severity.FRAGILE)], str(report)
    assert "too long" in report.findings[0].witness and report.exit_code == 0


def test_the_sums_of_weights_are_judged_where_the_definition_is_not():
    assert by_id(check_attention(own_steps("norm")))["sums-of-weights"].status == Status.PASSED
    squares, wrong = (check_attention(own_steps(name)) for name in ("squares", "positions, and a softmax over the queries"))
    for report, severity, code in ((squares, Severity.FRAGILE, 0), (wrong, Severity.WRONG, 1)):
        found = [(finding.id, finding.severity) for finding in report.findings]
        assert found == [("sums-of-weights", severity), ("more-than-the-definition", Severity.NOTE)], str(report)
        assert report.exit_code == code and by_id(report)["sums-of-weights"].status == Status.FAILED
    assert "to 1 over the queries" in wrong.findings[0].witness


def hides(where):
    """A function that hides keys: ``where`` gets the places of queries and keys."""

    def attention(q, k, v):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        L, S = scores.shape[-2:]
        return scores.masked_fill(where(torch.arange(S - L, S)[:, None], torch.arange(S)), -math.inf).softmax(-1) @ v

    return attention


def test_a_scale_without_a_name_mixed_sequences_and_keys_that_a_window_shows_are_wrong():
    assert wrong(check_attention(own_steps("another scale"))) == {"differs"}
    assert wrong(check_attention(lambda q, k, v: own_steps("norm")(q.roll(1, 0), k, v))) == {"differs"}
    for where in (lambda i, j: j > i + 2, lambda i, j: j == i.max(), lambda i, j: j >= 128, lambda i, j: (i == j) & (i > 0)):
        assert wrong(check_attention(hides(where))) == {"differs"}
    for where in (lambda i, j: (i - j).abs() % 2 == 1, lambda i, j: i // 3 != j // 3, lambda i, j: (j > i) | (j < i - 70)):
        assert found(check_attention(hides(where))) == []
    assert found(check_attention(own_steps(""))) == []


def test_what_names_do_not_show_is_found_by_trying():
    def attention(one, two, three, size, later=True, visible_cells=None, autoregressive=False):
        scores = one @ two.mT / size**0.5
        L, S = scores.shape[-2:]
        hidden = ~torch.ones(L, S, dtype=torch.bool).tril(S - L) if autoregressive else torch.zeros(L, S, dtype=torch.bool)
        hidden = hidden if visible_cells is None else hidden | ~visible_cells
        return scores.masked_fill(hidden, -1e30).softmax(-1) @ three

    report = check_attention(attention)
    assert report.is_right, report
    assert report.called_as.startswith("attention(one, two, three, size=8, visible_cells, autoregressive): ")
    assert {"causal", "mask"} <= {check.id for check in report.with_status(Status.PASSED)}

    class Layer(RightHidesPadding):
        def __init__(self, e, h):
            super().__init__(e, h)

    assert check_attention(Layer).called_as.startswith("Layer(e=32, h=4); ")


# the stages of the exercise


def without_masks(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def with_a_number(q, k, v, mask=None):
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
    return scores.softmax(-1) @ v


def in_float32(q, k, v, mask=None):
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    if mask is None:
        return (scores.softmax(-1) @ v.float()).to(v.dtype)
    weights = scores.masked_fill(~mask, torch.finfo(torch.float32).min).softmax(-1).masked_fill(~mask, 0)
    return (weights @ v.float()).to(v.dtype)


REACHED = {  # points of a stage
    right_careful: {5: (8, 8)},
    right_textbook: {3: (0, 3)},
    in_float32: {5: (8, 8)},
    with_a_number: {3: (2, 3), 5: (6, 8)},
    without_masks: {1: (2, 2), 2: (0, 3), 3: (0, 3), 4: (1, 3), 5: (4, 8)},
}


@pytest.mark.parametrize(("function", "stage"), [(function, stage) for function, stages in REACHED.items() for stage in stages])
def test_a_stage_gives_a_point_for_each_check_that_passed_and_none_for_one_that_was_not_tried(function, stage):
    report = check_attention(function, stage=stage)
    assert report.points == REACHED[function][stage], report
    assert report.exit_code == (0 if report.points[0] == report.points[1] else 1)


def test_stage_3_names_nan_and_the_mean_of_hidden_values_and_says_how_to_write_it():
    for function, name in (
        (right_textbook, "nan-where-a-query-sees-nothing"),
        (with_a_number, "padding-mask-of-1e9-averages-hidden-values"),
    ):
        report = check_attention(function, stage=3)
        assert report.mend_first.id == name and report.mend_first.severity == Severity.WRONG
        assert ".softmax(-1).masked_fill(hidden, 0)" in report.mend_first.advice


def test_nan_in_the_gradient_alone_is_found():
    def attention(q, k, v, mask=None):
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        bias = torch.zeros(()) if mask is None else torch.where(mask, 0.0, -math.inf).to(q.dtype)
        return (scores + bias).softmax(-1).nan_to_num() @ v

    report = check_attention(attention, stage=3)
    assert report.points == (2, 3) and wrong(report) == {"nan-gradient-where-a-query-sees-nothing"}


# ways of writing it that users have


def test_a_causal_option_that_is_on_by_default_is_switched_off_where_it_is_not_asked_for():
    def attention(q, k, v, is_causal=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    report = check_attention(attention)
    assert by_id(report)["plain"].status == Status.PASSED
    assert report.mend_first.id == "causal-mask-from-the-upper-left", str(report)


def test_an_argument_without_a_known_meaning_is_named():
    report = check_attention(lambda q, k, v, table: q)
    assert report.findings[0].id == "cannot-be-called" and "table" in report.findings[0].witness


def test_a_layer_that_overflows_in_float64_alone_is_checked_in_float32():
    class Layer(nn.Module):
        def __init__(self, d_model, n_head):
            super().__init__()
            self.heads, self.qkv, self.out = n_head, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

        def forward(self, x, mask=None):
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            scores = q @ k.mT / q.shape[-1] ** 0.5
            if mask is not None:  # in float32 the largest number of float64 is infinity
                scores = scores + (1 - mask[:, None, None].float()) * torch.finfo(scores.dtype).min
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    report = check_attention(Layer, mask="keep")  # with one meaning of the mask to try
    assert report.called_as.endswith("float32") and report.is_right, str(report)


@pytest.mark.slow
def test_a_check_of_a_layer_does_not_import_the_compiler():
    code = """
import sys, torch
from minitx.check import check_attention
assert check_attention(torch.nn.MultiheadAttention(32, 4, batch_first=True)).called_as
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
