"""A text is seen at the same positions alone, next to longer texts, and in pieces with a cache."""

from __future__ import annotations

import warnings
from functools import cache, partial

import pytest
import torch

transformers = pytest.importorskip("transformers")

import peft  # noqa: E402
from torch.nn.functional import pad  # noqa: E402
from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402

from minitx.analysis import capture, intervene, knock_out_heads, logit_lens, patch_heads, take_snapshot  # noqa: E402
from minitx.analysis.answers import Question, Questions  # noqa: E402
from minitx.analysis.experiments import answers_without_heads  # noqa: E402
from minitx.analysis.token_places import with_positions  # noqa: E402
from minitx.analysis.viewer import view  # noqa: E402
from minitx.generation import beam_search, generate  # noqa: E402
from minitx.interop import adopt_hf  # noqa: E402
from minitx.nn import MultiHeadAttention  # noqa: E402
from minitx.nn.cache import LayerCache  # noqa: E402
from tests.analysis.models import model_of, translation_of  # noqa: E402
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
            asked = Questions("input_ids", [[Question("What follows?", at, right=5)]], 99, str)
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


CHANGES = {what: lambda x: 0.5 * x + 0.1 for what in ("values", "heads", "feedforward", "residual")}
CHANGES |= {what: lambda x: 0.25 * x for what in ("scores", "weights")}
TEXT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [0, 0, 8, 2, 8, 1, 8, 2]])
REAL = torch.tensor([[1] * 8, [0, 0, *[1] * 6]])
PIECES = [slice(0, 5), slice(5, 6), slice(6, 8)]


def ours_in_pieces(**options):
    model = model_of(torch.float64, **options)
    cache = model.make_cache(8)
    whole = lambda: model(TEXT, key_mask=REAL.bool())  # noqa: E731
    pieces = [lambda at=at: model(TEXT[:, at], key_mask=REAL[:, at].bool(), cache=cache) for at in PIECES]
    return model, whole, pieces, REAL.bool()


def layer_in_pieces():
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(12, 3).double(), torch.randn(2, 8, 12, dtype=torch.float64)
    cache = LayerCache(8)
    pieces = [lambda at=at: layer(x[:, at], is_causal=True, cache=cache) for at in PIECES]
    return layer, lambda: layer(x, is_causal=True), pieces, torch.ones(2, 8, dtype=torch.bool)


def translation_in_pieces():
    model, source = translation_of().double(), TEXT[:, :6]
    cache = model.make_cache(8)
    pieces = [lambda at=at: model(source, TEXT[:, at], cache=cache) for at in PIECES]
    return model, lambda: model(source, TEXT), pieces, torch.ones(2, 8, dtype=torch.bool)


@cache
def adopted_once(name):
    """An adopted model, which nothing that looks at it changes."""
    return adopt_hf(build(name).double())


def adopted_in_pieces(name):
    model = adopted_once(name)
    if name == "T5":
        known = {"input_ids": TEXT[:, :6], "past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}
        whole = lambda: model(input_ids=TEXT[:, :6], decoder_input_ids=TEXT).logits  # noqa: E731
        pieces = [lambda at=at: model(**known, decoder_input_ids=TEXT[:, at]).logits for at in PIECES]
        return model, whole, pieces, torch.ones(2, 8, dtype=torch.bool)
    cache, places = DynamicCache(config=model.config), (REAL.cumsum(-1) - 1).clamp(min=0)
    whole = lambda: model(TEXT, attention_mask=REAL, position_ids=places).logits  # noqa: E731
    pieces = [
        lambda at=at: (
            model(TEXT[:, at], attention_mask=REAL[:, : at.stop], position_ids=places[:, at], past_key_values=cache).logits
        )
        for at in PIECES
    ]
    return model, whole, pieces, REAL.bool()


READERS = {
    "rotary": lambda: ours_in_pieces(position="rotary"),
    "window": lambda: ours_in_pieces(position="alibi", window=3),
    "layer": layer_in_pieces,
    "translation": translation_in_pieces,
    **{name: (lambda name=name: adopted_in_pieces(name)) for name in ("GPT2", "Llama", "Gemma2", "OPT", "T5")},
}


@pytest.mark.parametrize("positions", [2, [3, 2]])
@pytest.mark.parametrize(
    "reader", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("Gemma2", "OPT", "T5"))) for name in READERS]
)
def test_chosen_positions_are_those_of_the_text_also_where_a_cache_continues_it(reader, positions):
    for what in CHANGES:
        model, whole, pieces, real = READERS[reader]()
        if what in ("feedforward", "residual") and reader == "layer":
            continue
        with torch.no_grad():
            plain = whole()
            with intervene(model, what, CHANGES[what], positions=positions):
                changed = whole()
                found = torch.cat([piece() for piece in pieces], dim=1)
        assert not torch.allclose(changed[real], plain[real], rtol=0, atol=1e-4)
        torch.testing.assert_close(found[real], changed[real], rtol=0, atol=1e-9, msg=lambda said, what=what: f"{what}: {said}")


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("adopts", [False, True], ids=["ours", "adopted"])
def test_the_text_with_a_patched_prompt_is_the_same_with_and_without_a_cache(adopts, num_beams):
    ids, real = TEXT[:, :5], REAL[:, :5]
    model = adopt_hf(build("GPT2")) if adopts else model_of(position="rotary", vocab_size=99)

    def written(use_cache):
        if adopts:
            options = {"num_beams": num_beams, "do_sample": False, "eos_token_id": None}
            return model.generate(ids, attention_mask=real, max_new_tokens=8, use_cache=use_cache, **options)
        write = generate if num_beams == 1 else partial(beam_search, num_beams=num_beams)
        return write(model, ids, key_mask=real.bool(), max_new_tokens=8, use_cache=use_cache)

    torch.manual_seed(0)
    other = TEXT.flip(1)[:1, :5]
    with torch.no_grad(), capture(model, what="residual") as seen:
        model(other)
    push = 3 * torch.randn(2, seen[next(iter(seen))][0].shape[-1])
    plain = written(True)
    for to in (lambda x: x + push[0], push, seen):
        with intervene(model, "residual", to, layers=[0], positions=[4, 2]):
            patched = [written(use_cache) for use_cache in (False, True)]
        assert str(patched[0]) == str(patched[1])
        assert str(patched[0]) != str(plain)


def test_positions_of_a_call_that_continues_a_text_are_counted_from_its_start():
    model = model_of()
    cache = model.make_cache(8)
    with torch.no_grad():
        with pytest.raises(ValueError, match="there are 5 positions"), intervene(model, "residual", 0.0, positions=[5]):
            model(TEXT[:, :5], cache=model.make_cache(8))
        model(TEXT[:, :5], cache=cache)
        rows = torch.stack([torch.full((12,), float(i)) for i in range(3)])
        with intervene(model, "residual", rows, layers=[1], positions=[2, 6, 5]), capture(model, what="residual") as seen:
            model(TEXT[:, 5:7], cache=cache)
        assert seen["blocks.1"][0][0, :, 0].tolist() == [2.0, 1.0]
        with pytest.raises(ValueError, match="has no end yet"), intervene(model, "residual", 0.0, positions=-1):
            model(TEXT[:, 7:], cache=cache)
        held = pytest.warns(UserWarning, match="they were in a cache before the context was open")
        with held, intervene(model, "residual", 0.0, positions=[2]):
            model(TEXT[:, 7:], cache=cache)


def test_a_record_of_another_length_replaces_the_positions_that_it_has():
    model = model_of(torch.float64)
    with torch.no_grad():
        with capture(model, what="residual", layers=[0]) as seen:
            model(TEXT[:, :5])
        with intervene(model, "residual", seen, positions=[4, 1]), capture(model, what="residual", layers=[0]) as inside:
            model(TEXT.flip(1))
        assert torch.equal(inside["blocks.0"][0][:, [4, 1]], seen["blocks.0"][0][:, [4, 1]])
        for positions in ([5], [-1], None):
            with pytest.raises(ValueError, match=r"but \(2, 8, 12\)"), intervene(model, "residual", seen, positions=positions):
                model(TEXT)
