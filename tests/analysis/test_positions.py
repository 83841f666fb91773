"""A text is seen at the same positions alone, next to longer texts, and in pieces with a cache."""

from __future__ import annotations

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

import peft  # noqa: E402
from torch.nn.functional import pad  # noqa: E402

from minitx.analysis import capture, intervene, knock_out_heads, logit_lens, patch_heads, take_snapshot  # noqa: E402
from minitx.analysis.answers import Asked, Question  # noqa: E402
from minitx.analysis.intervene import answers_without_heads  # noqa: E402
from minitx.analysis.positions import with_positions  # noqa: E402
from minitx.analysis.viewer import view  # noqa: E402
from minitx.interop import adopt_hf  # noqa: E402
from tests.analysis.models import model_of  # noqa: E402
from tests.interop.families import BESIDE, DECODERS, ENCODERS, QUICK, build  # noqa: E402

ALONE = {"input_ids": torch.tensor([[3, 14, 15, 92, 65, 35]])}
PADDED = {"input_ids": pad(ALONE["input_ids"], (4, 0)), "attention_mask": torch.tensor([[0] * 4 + [1] * 6])}
COUNTED = ["GPT2", "GPTBigCode", "BioGpt", "Bert", "Electra", "Albert", "Ernie", "DistilBert"]
"""Families with a table of absolute positions whose ``forward`` counts columns."""


def as_peft(model):
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in (*QUICK, "BioGpt", "Roberta") else pytest.mark.slow)
        for name in ["GPT2", *DECODERS, *ENCODERS, *BESIDE]
    ],
)
def test_a_text_is_read_at_the_same_positions_alone_and_with_padding_on_the_left(name):
    model, given = build(name), with_positions(build(name), PADDED)
    with torch.no_grad():
        torch.testing.assert_close(model(**given).logits[:, 4:], model(**ALONE).logits, rtol=0, atol=2e-5)
    assert ("position_ids" in given) == (name in (*COUNTED, "OPT"))  # OPT would count the same itself


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # PEFT says so
@pytest.mark.parametrize("wrap", [lambda model: model, as_peft], ids=["plain", "PEFT"])
def test_every_tool_that_calls_a_model_shows_it_at_the_positions_of_the_text(wrap):
    model = wrap(adopt_hf(build("GPT2"))).eval()
    other = {**PADDED, "input_ids": PADDED["input_ids"].flip(1).roll(4, 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone, padded = take_snapshot(model, ALONE), take_snapshot(model, PADDED)
        lens = logit_lens(model, **PADDED)
        patched = [
            patch_heads(model, one, {**one, "input_ids": two["input_ids"]}, lambda logits: logits[:, -1, 4]).mean
            for one, two in ((ALONE, {"input_ids": other["input_ids"][:, 4:]}), (PADDED, other))
        ]
        knocked = []
        for at, inputs in ((2, ALONE), (6, PADDED)):
            asked = Asked("input_ids", [[Question("What follows?", at, right=5)]], 99, str)
            found = answers_without_heads(model, inputs, asked)
            knocked.append(torch.tensor([[rows[0][0].loss for rows in heads] for heads in found.values()]))
        view(model, PADDED)
    for one, two in zip(alone.maps, padded.maps, strict=True):
        torch.testing.assert_close(two.weights[..., 4:, 4:], one.weights, rtol=0, atol=1e-5)
    torch.testing.assert_close(lens[:, :, 4:], logit_lens(model, **ALONE), rtol=0, atol=2e-5)
    torch.testing.assert_close(patched[1], patched[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(knocked[1], knocked[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "look",
    [
        lambda model: capture(model),
        lambda model: capture(model, what="residual"),
        lambda model: intervene(model, "heads", 0.0),
    ],
)
def test_a_call_that_counts_padding_as_tokens_is_named_once_and_a_right_one_is_not(look):
    model = adopt_hf(build("GPT2"))
    with torch.no_grad(), warnings.catch_warnings(record=True) as said, look(model):
        warnings.simplefilter("always")
        for _ in range(2):
            model(**PADDED)
    assert ["GPT2Model counts the padding on the left as tokens" in str(one.message) for one in said] == [True]
    right = {"input_ids": pad(ALONE["input_ids"], (0, 4)), "attention_mask": torch.tensor([[1] * 6 + [0] * 4])}
    with torch.no_grad(), warnings.catch_warnings(), look(model):
        warnings.simplefilter("error")
        for inputs in (ALONE, right, with_positions(model, PADDED)):
            model(**inputs)
        model.generate(**PADDED, max_new_tokens=2, do_sample=False)


def test_a_loss_of_the_users_that_counts_padding_as_tokens_is_named():
    model = adopt_hf(build("GPT2"))
    with pytest.warns(UserWarning, match="counts the padding on the left as tokens"):
        knock_out_heads(model, lambda model: model(**PADDED).logits[:, -1, 4])


def test_models_of_ours_get_what_they_are_given():
    given = {"input_ids": PADDED["input_ids"], "key_mask": PADDED["attention_mask"] != 0}
    assert with_positions(model_of(), given) is given
