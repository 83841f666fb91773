"""The check of models: it finds each seeded fault of a small GPT, names it first, and finds nothing in right models."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tests.check.small_gpt as small_gpt
from minitx.check import (
    Severity,
    Status,
    assert_cache_changes_nothing,
    assert_causal,
    assert_deterministic,
    assert_documents_are_apart,
    assert_gradients_reach_everything,
    assert_ignores_padding,
    assert_rows_are_independent,
    check_model,
)
from minitx.check.model_checks import PROPERTIES
from minitx.config import TransformerConfig
from minitx.nn import DecoderLM, Encoder, EncoderDecoder, VisionTransformer

QUICK = [word for word in PROPERTIES if word != "compile"]
SOURCE = Path(small_gpt.__file__).read_text(encoding="utf-8").partition("FAULTS =")[0]
SIZES = {"vocab_size": 31, "embed_dim": 24, "num_heads": 3, "num_layers": 2}
PICTURES = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10, "head": "sequence"}
QUICK_FAULTS = (
    "no causal mask",
    "a block of 32 sees the first key of the next block",
    "padding mask ignored in a batch of one",
    "padding mask ignored",
    "values not cached",
    "keys detached",
)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def gpt(fault: str | None = None) -> nn.Module:
    """The small GPT, with a fault."""
    text = SOURCE
    if fault is not None:
        _, right, wrong = small_gpt.FAULTS[fault]
        assert right in text
        text = text.replace(right, wrong)
    scope: dict = {"__name__": "small_gpt"}
    exec(compile(text, "small_gpt", "exec"), scope)
    torch.manual_seed(0)
    return scope["GPT"]()


def our(architecture: str, **options) -> nn.Module:
    torch.manual_seed(0)
    kinds = {"decoder": DecoderLM, "encoder": Encoder, "encoder_decoder": EncoderDecoder, "vision": VisionTransformer}
    sizes = {**SIZES, **PICTURES, "vocab_size": None} if architecture == "vision" else SIZES
    return kinds[architecture](TransformerConfig(architecture=architecture, **{**sizes, **options}))


def test_nothing_is_wrong_with_the_small_gpt():
    report = check_model(gpt(), only=QUICK)
    assert not report.findings, str(report)
    assert {check.id for check in report.with_status(Status.NOT_TRIED)} == {"documents", "switches", "cache/cut-back", "loss"}
    assert report.called_as.startswith("GPT(input_ids, attention_mask)")
    tried = {check.id.partition("/")[0] for check in report.with_status(Status.PASSED)}
    assert tried == {"call", *QUICK} - {"documents", "switches", "loss"}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in QUICK_FAULTS else pytest.mark.slow) for name in small_gpt.FAULTS]
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_seeded_fault_is_found_and_comes_first(fault, seed):
    report = check_model(gpt(fault), only=QUICK, seed=seed)
    assert report.findings and report.findings[0].id == small_gpt.FAULTS[fault][0], str(report)
    is_note = report.findings[0].severity == Severity.NOTE
    assert is_note == (fault == "positions counted from the padding")  # a note, because the model takes no position_ids
    severe = report.findings[0].severity == Severity.WRONG
    assert (report.exit_code == 1) == severe
    assert not report.findings[0].witness.startswith(";"), str(report)


def test_the_witness_is_true():
    """The token, the output and the size are those that a call by hand shows."""
    model = gpt("causal mask one too wide").eval()
    (finding,) = check_model(model, only="causality").findings
    assert "the first module that moves is blocks.0.attn (Attention)" in finding.witness
    assert "tril(diagonal=S - L) without an extra 1" in finding.advice
    words = finding.witness.split()
    changed, moved = int(words[2]), int(words[8])
    assert changed == moved + 1
    ids = torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(5))
    other = ids.clone()
    other[:, changed] = (ids[:, changed] + 1) % 40
    with torch.no_grad():
        move = (model(ids)[0] - model(other)[0]).abs().amax(-1)
    assert (move[:, : max(0, changed - 2)] < 1e-5).all()  # one more in each of two layers
    assert (move[:, moved] > 1e-3).all()


def test_the_command_of_a_finding_repeats_it():
    report = check_model(gpt("no causal mask"), only="causality", seed=3)
    assert report.findings[0].repeat == 'check_model(model, only="causality", seed=3)'
    again = eval(report.findings[0].repeat, {"check_model": check_model, "model": gpt("no causal mask")})
    assert again == report


def test_the_model_and_all_random_states_stay_as_they_were():
    model = gpt().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check_model(model, only=QUICK)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


OURS = {
    "decoder": {},
    "decoder with rotary positions and a window": {"position": "rotary", "window": 4},
    "encoder": {"architecture": "encoder"},
    "encoder of one label": {"architecture": "encoder", "head": "sequence", "num_labels": 5, "pooling": "mean"},
    "encoder–decoder": {"architecture": "encoder_decoder"},
    "vision": {"architecture": "vision"},
    "decoder with linear attention": {"attention": "linear"},
    "decoder with T5's bias": {"position": "t5"},
    "decoder with ALiBi": {"position": "alibi"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("decoder", "vision") else pytest.mark.slow) for name in OURS]
)
def test_nothing_is_wrong_with_our_models(name):
    model = our(**{"architecture": "decoder", **OURS[name]})
    report = check_model(model, only=QUICK)
    assert report.mend_first is None, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "encoder–decoder"])
def test_compiled_models_equal_eager_ones(name):
    report = check_model(our(**{"architecture": "decoder", **OURS[name]}), only="compile")
    assert [check.status for check in report.checks if check.id == "compile"] == [Status.PASSED], str(report)


def test_what_the_asserts_of_a_test_suite_accept_and_what_they_refuse():
    right = our("decoder")
    for check in (
        assert_causal,
        assert_ignores_padding,
        assert_rows_are_independent,
        assert_cache_changes_nothing,
        assert_documents_are_apart,
        assert_deterministic,
        assert_gradients_reach_everything,
    ):
        check(right)
    wrong = {
        assert_causal: gpt("no causal mask"),
        assert_ignores_padding: gpt("padding mask ignored"),
        assert_rows_are_independent: gpt("softmax over the rows"),
        assert_cache_changes_nothing: gpt("values not cached"),
        assert_deterministic: gpt("dropout in evaluation"),
        assert_gradients_reach_everything: gpt("keys detached"),
        assert_documents_are_apart: gpt(),  # it has no argument for documents, so nothing was tried
    }
    for check, model in wrong.items():
        with pytest.raises(AssertionError, match="GPT, seed 0"):
            check(model)


class Bare(nn.Module):
    """Ids in, hidden states out; nothing else."""

    def __init__(self, mix):
        super().__init__()
        self.table, self.out, self.mix = nn.Embedding(40, 16), nn.Linear(16, 16), mix

    def forward(self, ids):
        return self.out(self.mix(self.table(ids)))


@pytest.mark.slow
def test_a_graph_break_is_not_logged(caplog):
    report = check_model(Bare(lambda hidden: hidden * (1 + (hidden.sum().item() > 1e9))), only="compile")
    assert [check.id for check in report.with_status(Status.PASSED)] == ["call/finite", "compile"]
    assert not caplog.records


def test_a_model_without_a_mask_passes_and_its_padding_is_not_counted_as_right():
    report = check_model(Bare(lambda x: x.cumsum(1)), only=QUICK)
    assert report.is_right, str(report)
    untried = {check.id: check.reason for check in report.with_status(Status.NOT_TRIED)}
    assert "no argument for a mask was found" in untried["padding"]
    assert {"cache", "documents"} <= untried.keys()


def test_a_bidirectional_model_is_wrong_only_if_it_must_be_causal():
    model = Bare(lambda x: x + x.mean(1, keepdim=True))
    assert check_model(model, only="causality").is_right
    assert [f.id for f in check_model(model, only="causality", expect="causal").findings] == ["not-causal"]


def test_a_model_that_reads_at_most_3_tokens_is_not_blamed_for_an_error_of_the_check():
    class Short(Bare):
        causal = True

        def forward(self, ids, attention_mask=None):
            if ids.shape[1] > 3:
                raise ValueError("at most 3 tokens")
            kept = 1 if attention_mask is None else attention_mask[..., None]
            return self.out((self.table(ids) * kept).cumsum(1))

    report = check_model(Short(None), only=[word for word in QUICK if word != "sizes"])
    assert report.mend_first is None, str(report)
    passed = {check.id for check in report.with_status(Status.PASSED)}
    assert {"causality/values", "causality/prefix", "causality/with-a-mask", "padding/left"} <= passed, str(report)


def test_an_error_of_the_check_itself_is_no_finding_and_one_of_the_model_is(monkeypatch):
    code = (lambda exam: torch.empty(0).argmax()).__code__
    broken = types.FunctionType(code, {"torch": torch, "__name__": "minitx.check.visibility"})

    class Crashes(Bare):
        def forward(self, ids):
            x = super().forward(ids)
            return x if ids.shape[1] != 9 else x.unflatten(1, (2, -1))

    monkeypatch.setitem(PROPERTIES, "reach", broken)
    report = check_model(Bare(lambda x: x.cumsum(1)), only="reach")
    assert not report.findings and report.exit_code == 2
    (check,) = [check for check in report.checks if check.id == "reach"]
    assert check.status == Status.NOT_TRIED and check.reason.startswith("the check itself raises IndexError"), str(report)
    report = check_model(Crashes(lambda x: x.cumsum(1)), only="causality")
    assert [finding.id for finding in report.findings] == ["raises-causality-prefix"], str(report)


def test_rows_that_are_too_short_for_pieces_are_no_fault_of_the_cache():
    shape = TransformerConfig(vocab_size=23, embed_dim=8, num_heads=2, num_layers=1, max_len=6)
    report = check_model(DecoderLM(shape), only=["causality", "cache"])
    assert report.is_right and report.exit_code == 2, "a property that was asked for was not tried"
    (check,) = [check for check in report.checks if check.id == "cache"]
    assert check.status == Status.NOT_TRIED and "too few tokens" in check.reason, str(report)


def test_a_token_that_sees_no_other_is_told_once():
    report = check_model(Bare(lambda x: x), only=["causality", "reach"])
    assert [finding.id for finding in report.findings] == ["sees-no-other"] and "window" not in report.taken_as, str(report)


@pytest.mark.parametrize(("name", "found"), [("mask", "mask-hides"), ("pad_mask", "padding-mask-keeps")])
def test_a_mask_of_the_meaning_that_its_name_does_not_show_is_fragile_as_in_a_function(name, found):
    space = {"Bare": Bare}
    keep = "1 - mask" if name == "mask" else "pad_mask"
    body = f"x = self.table(ids); return self.out((x if {name} is None else x * ({keep}.to(x))[..., None]).cumsum(1))"
    exec(f"class Masked(Bare):\n    def forward(self, ids, {name}=None):\n        {body}\n", space)
    report = check_model(space["Masked"](None), only="padding")
    assert [(f.id, f.severity, report.exit_code) for f in report.findings] == [(found, Severity.FRAGILE, 0)], str(report)
    assert "passed     call, padding" in str(report)


def test_batch_first_that_was_forgotten_is_named():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.attention = nn.Embedding(40, 16), nn.MultiheadAttention(16, 2)

        def forward(self, ids):
            x = self.table(ids)
            return self.attention(x, x, x)[0]

    (finding, *_) = check_model(Own(), only=QUICK).findings
    assert finding.id == "rows-mixed" and "unless batch_first=True" in finding.advice
    assert "attention (MultiheadAttention)" in finding.witness


def test_recurrent_models_are_checked_with_their_state():
    class Recurrent(nn.Module):
        def __init__(self, forgets):
            super().__init__()
            self.table, self.cell = nn.Embedding(40, 16), nn.GRU(16, 16, batch_first=True)
            self.forgets = forgets

        def forward(self, tokens, state=None):
            x, state = self.cell(self.table(tokens), None if self.forgets else state)
            return x, state

    assert check_model(Recurrent(False), only=QUICK).mend_first is None
    assert [f.id for f in check_model(Recurrent(True), only="cache").findings] == ["cache-differs"]


class ReadsDict(nn.Module):
    """Tokens and their mask in a dict; hidden tokens are 0."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, batch):
        return {"scores": self.head((self.table(batch["tokens"]) * batch["real"][..., None]).cumsum(1))}


def test_an_adapter_calls_a_model_that_no_trying_reaches_and_what_it_does_not_pass_is_not_tried():
    def adapter(model, ids, keep):
        return model({"tokens": ids, "real": keep})["scores"]

    report = check_model(ReadsDict(), only=QUICK, call=adapter, expect="causal")
    assert report.mend_first is None and report.called_as.startswith("ReadsDict by adapter(ids, keep): ids (B, L); "), str(
        report
    )
    untried = {check.id: check.reason for check in report.with_status(Status.NOT_TRIED)}
    assert untried["cache"] == "call= passes no cache" and {"documents", "loss"} <= untried.keys()
    assert {"causality", "padding"} <= {check.id.partition("/")[0] for check in report.with_status(Status.PASSED)}
    report = check_model(ReadsDict(), only="padding", call=lambda model, ids: adapter(model, ids, torch.ones_like(ids)))
    assert [(check.id, check.reason) for check in report.with_status(Status.NOT_TRIED)] == [("padding", "call= takes no mask")]
    leaky = check_model(gpt("padding mask ignored"), only="padding", call=lambda model, ids, keep: model(ids, keep.long())[0])
    assert leaky.mend_first.id == "mask-ignored"
    inverted = check_model(gpt(), only="padding", call=lambda model, ids, keep: model(ids, (~keep).long())[0])
    assert inverted.mend_first.id == "mask-inverted" and inverted.exit_code == 1, str(inverted)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda model: model, r"must take \(model, input_ids, keep\), or no mask, got \(model\)"),
        (lambda model, ids: model(ids), "does not call ReadsDict: "),
        (lambda model, ids, keep: None, "does not call ReadsDict: "),
    ],
)
def test_a_bad_adapter_of_a_model_is_refused_in_one_sentence(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        check_model(ReadsDict(), call=call)


def test_required_arguments_without_a_known_meaning_get_the_tokens():
    report = check_model(nn.MultiheadAttention(32, 4, batch_first=True), only=["rows", "causality"])
    assert "key = query; value = query" in report.called_as and report.is_right, str(report)


class Sums(nn.Module):
    """The sum of the tokens so far. Its cache has the tokens, and the sums."""

    class Cache:
        def __init__(self, forgets):
            self.tokens, self.forgets = torch.zeros(3, 0, 16), forgets

        def crop(self, removed):
            self.tokens = self.tokens[:, : removed - self.forgets]

    def __init__(self, forgets):
        super().__init__()
        self.table, self.forgets = nn.Embedding(40, 16), forgets

    def forward(self, tokens, cache=None):
        cache = self.Cache(self.forgets) if cache is None else cache
        x = self.table(tokens)
        kept = cache.tokens.shape[1]
        cache.tokens = torch.cat((cache.tokens[:1].expand(len(x), -1, -1) if kept == 0 else cache.tokens, x), 1)
        return cache.tokens.cumsum(1)[:, kept:], cache


def test_a_cache_that_is_cut_back_has_as_many_tokens_as_it_says():
    right, wrong = (check_model(Sums(forgets), only="cache") for forgets in (0, 1))
    assert not right.findings and "cache/cut-back" in {check.id for check in right.with_status(Status.PASSED)}, str(right)
    assert [finding.id for finding in wrong.findings] == ["cache-differs-that-is-cut-back-by-3-tokens"], str(wrong)


class Repeats(Sums):
    """Its outputs with a cache begin with those of the tokens in the cache."""

    def forward(self, tokens, cache=None):
        _, cache = super().forward(tokens, cache)
        return cache.tokens.cumsum(1), cache


def test_an_output_of_a_piece_with_another_length_is_a_fault_of_the_model():
    report = check_model(Repeats(0), only="cache")
    (shown,) = [finding for finding in report.findings if finding.id == "raises-cache-token-by-token"]
    assert "a piece of 1 tokens in 3 rows gives an output of shape (3, 2, 16)" in shown.witness, str(report)


class Fills(nn.Module):
    """A sum over the real tokens so far. Its calls fill the cache in place, and return the output alone."""

    def __init__(self, forgets=False, masks_all=True):
        super().__init__()
        self.table, self.forgets, self.masks_all = nn.Embedding(40, 16), forgets, masks_all

    def make_cache(self):
        return []

    def forward(self, tokens, mask=None, cache=None):
        """mask: (B, S) of all tokens, those in the cache, too; or (B, L) of the new ones."""
        x = self.table(tokens)
        kept = sum(piece.shape[1] for piece in cache or [])
        if cache is not None:
            cache.append(x)
        if mask is not None and not self.masks_all:  # a longer mask raises after the cache was filled
            x *= mask.unsqueeze(-1)
        if cache is not None:
            x = torch.cat(cache[-1:] if self.forgets else cache, 1)
        if mask is not None and self.masks_all:  # the mask of one new token broadcasts
            x = x * mask.unsqueeze(-1)
        return x.cumsum(1)[:, 0 if self.forgets else kept :]


def test_a_cache_that_calls_fill_in_place_is_tried_with_the_mask_that_the_model_takes():
    for masks_all in (True, False):
        right, wrong = (check_model(Fills(forgets, masks_all), only="cache") for forgets in (False, True))
        passed = {check.id for check in right.with_status(Status.PASSED)}
        assert not right.findings and {"cache/pieces", "cache/left-padding"} <= passed, str(right)
        assert wrong.mend_first.id == "cache-differs", str(wrong)
    without = check_model(type("Fills", (Fills,), {"make_cache": None})(), only="cache")
    assert {check.reason for check in without.with_status(Status.NOT_TRIED)} == {
        "the model returns no cache, and has no method make_cache() for one that its calls fill"
    }


class WithLoss(nn.Module):
    """A model of the last two tokens that returns its loss."""

    def __init__(self, shift=1, is_mean=True, narrow=False):
        super().__init__()
        self.table, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.shift, self.is_mean, self.narrow = shift, is_mean, narrow

    def forward(self, ids, labels=None):
        x = self.table(ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.narrow):
            logits = self.head(x + 0.5 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]).to(x.dtype)
        if labels is None:
            return logits
        parts = logits[:, : -self.shift or None].flatten(0, 1), labels[:, self.shift :].flatten()
        loss = (
            nn.functional.cross_entropy(*parts)
            if self.is_mean
            else nn.functional.cross_entropy(*parts, reduction="none").mean()
        )
        return logits, loss


@pytest.mark.parametrize(
    ("options", "finding"),
    [
        ({}, None),
        ({"shift": 0}, None),
        ({"shift": 2}, "labels-shifted-twice"),
        ({"is_mean": False}, "loss-of-hidden-targets"),
        ({"narrow": True}, "precision-lost"),
    ],
)
def test_a_loss_is_the_mean_over_its_targets_of_logits_in_float32(options, finding):
    report = check_model(WithLoss(**options), only=["causality", "loss", "gradient"])
    assert (report.mend_first and report.mend_first.id) == finding, str(report)


def test_the_cross_attention_to_padding_is_told_from_the_encoder():
    class Leaks(EncoderDecoder):
        def _run(self, *args, memory_mask=None, **options):
            return super()._run(*args, **options)

    torch.manual_seed(0)
    report = check_model(Leaks(TransformerConfig(architecture="encoder_decoder", **SIZES)), only="padding")
    assert [finding.id for finding in report.findings][:1] == ["source-padding-leaks"], str(report)
    assert "cross" in report.findings[0].witness


@pytest.mark.parametrize("name", ["decoder", "encoder–decoder"])
def test_a_model_of_ours_with_lora_is_checked(name):
    peft = pytest.importorskip("peft")
    kind = name.replace("–", "_")
    adapted = peft.get_peft_model(our(kind), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    report = check_model(adapted, only=QUICK)
    assert not [finding for finding in report.findings if finding.severity != Severity.NOTE], str(report)
    tried = {check.id.partition("/")[0] for check in report.with_status(Status.PASSED)}
    assert tried >= {"causality", "padding", "cache", "gradient"}, str(report)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft says so of itself
@pytest.mark.slow
def test_a_model_of_transformers_with_lora_is_checked():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 31, "n_positions": 48}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.3))
    report = check_model(adapted, only=QUICK)
    assert report.called_as.startswith("PeftModel(input_ids, attention_mask)") and report.is_right, str(report)
    assert {"cache", "gradient"} <= {check.id.partition("/")[0] for check in report.with_status(Status.PASSED)}


class WithPrompt(nn.Module):
    """Two learned positions in front of the tokens, as prompt tuning adds them; ``leaks`` adds the next token to each."""

    def __init__(self, leaks=False):
        super().__init__()
        self.model, self.prompt, self.leaks = gpt(), nn.Parameter(torch.randn(2, 32)), leaks

    def forward(self, input_ids):
        x = self.model.token(input_ids) + self.model.place(torch.arange(input_ids.shape[1]))
        x = torch.cat((self.prompt.expand(len(x), -1, -1), x), 1)
        for block in self.model.blocks:
            x, _ = block(x)
        return self.model.head(self.model.norm(x + x.roll(-1, 1) if self.leaks else x))


def test_positions_in_front_of_the_tokens_are_left_out():
    report = check_model(WithPrompt(), only=["rows", "causality", "reach", "gradient"])
    assert report.called_as.endswith("output (B, 2 + L, ·)") and report.is_right, str(report)
    assert check_model(WithPrompt(leaks=True), only="causality").mend_first.id == "not-causal"


def test_a_check_changes_neither_the_model_nor_what_it_gives_to_the_model():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head, self.gate = nn.Embedding(30, 8), nn.Linear(8, 30), nn.Parameter(torch.zeros(8))
            self.lock = threading.Lock()

        def forward(self, input_ids, attention_mask=None):
            x = self.table(input_ids)
            if attention_mask is not None:
                x = x * attention_mask[..., None]
                attention_mask.zero_()
            self.last = x + self.gate * x.cumsum(1)
            return self.head(self.last)

    model = Keeps()
    model(torch.randint(0, 30, (2, 5)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = check_model(model, only=["causality", "padding"], dtype=torch.float64)
    assert [finding.id for finding in report.findings] == ["changes-inputs"], str(report)
    assert "its argument attention_mask in place" in report.findings[0].fault
    assert model.training and model.last.grad_fn is not None
    assert all(value.dtype == before[name].dtype and value.equal(before[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_called_is_not_accused_but_never_passes_and_the_report_says_what_was_seen():
    class Odd(nn.Module):
        def forward(self, graph, nodes):
            raise RuntimeError("no graph")

    report = check_model(Odd())
    assert report.exit_code == 2 and report.is_right and report.findings[0].id == "cannot-be-called"
    assert "no graph" in str(report)
    assert all(check.status == Status.NOT_TRIED for check in report.checks)
    with pytest.raises(TypeError, match="must be a torch"):
        check_model(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only=causalty must be one of weights"):
        check_model(gpt(), only="causalty")


def test_the_ids_of_the_json_are_stable():
    report = json.loads(check_model(gpt(), only=QUICK).json())
    assert report["version"] == 1 and report["is_right"]
    assert [check["id"] for check in report["checks"]] == [
        "call/finite",
        "weights/registered",
        "determinism",
        "rows/others",
        "rows/alone",
        "causality/values",
        "causality/prefix",
        "causality/with-a-mask",
        "causality/long",
        "causality/gradient",
        "reach",
        "padding/mask-of-ones",
        "padding/left",
        "padding/left/one-row",
        "padding/left/alone",
        "padding/right",
        "padding/right/one-row",
        "padding/right/alone",
        "padding/inside",
        "padding/inside/one-row",
        "sizes/lengths",
        "sizes/limit",
        "sizes/ids",
        "cache/token-by-token",
        "cache/prefill-then-tokens",
        "cache/pieces",
        "cache/cut-back",
        "cache/long",
        "cache/left-padding",
        "documents",
        "switches",
        "loss",
        "gradient/all",
        "gradient/differences",
        "train-mode/causality",
        "train-mode",
        "bfloat16",
    ]


@pytest.mark.slow
def test_the_check_imports_torch_alone():
    code = (
        "import sys, minitx.check; print([m for m in ('transformers', 'lightning', 'hydra', 'omegaconf') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


EXAMPLES = {
    "gpt.py": ("GPT", {"vocab_size": 31}),
    "plain_torch.py": ("RecallModel", {}),
    "swap_vit.py": ("SmallViT", {}),
    "own_project/own.py": ("Net", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES)
def test_nothing_is_wrong_with_the_models_of_the_examples(file, monkeypatch):
    path = Path(__file__).parents[2] / "examples" / file
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    name, options = EXAMPLES[file]
    torch.manual_seed(0)
    report = check_model(getattr(module, name)(**options), only=QUICK)
    assert report.is_right and report.called_as, str(report)


class Noisy(nn.Module):
    """Its output has noise of two libraries' generators."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(31, 6)

    def forward(self, ids):
        return self.table(ids) * (1 + random.random()) + np.random.rand()


def test_a_seed_repeats_the_findings_of_a_model_that_draws_from_any_generator():
    states = random.getstate(), np.random.get_state()[1].tolist()
    first, second = (str(check_model(Noisy(), only="determinism", seed=5)) for _ in range(2))
    assert first == second and "determin" in first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
