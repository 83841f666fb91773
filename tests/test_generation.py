"""Generation: filters by hand and against transformers, greedy and beam search against brute force, cached against not."""

import itertools
import math
import re
from functools import partial

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from minitx.config import TransformerConfig
from minitx.data.tokenizer import TextStream
from minitx.generation import Sampler, beam_search, generate
from minitx.generation.decoding import length_norm
from minitx.generation.sampler import (
    apply_temperature,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repeats,
)
from minitx.nn import DecoderLM, EncoderDecoder
from minitx.nn.models import build_model

V, E, H = 13, 12, 3
PAIR = {"architecture": "encoder_decoder", "bos_id": 1}
SAMPLERS = {
    "greedy": Sampler(),
    "greedy with penalty": Sampler(repetition_penalty=1.7),
    "sampled": Sampler(temperature=1.3, top_k=7, top_p=0.9, min_p=0.05, repetition_penalty=1.1),
}
WAYS = {
    **{name: partial(generate, sampler=sampler) for name, sampler in SAMPLERS.items()},
    "beams": partial(beam_search, num_beams=3, repetition_penalty=1.3),
}


def language_model(**options):
    """Random weights large enough that texts vary; float64, eval."""
    options = {"vocab_size": V, "embed_dim": E, "num_heads": H, "num_layers": 2, "max_len": 31, "init": "lecun", **options}
    generator = torch.Generator().manual_seed(0)
    kind = EncoderDecoder if "architecture" in options else DecoderLM
    network = kind(TransformerConfig(**options, tie_embeddings=False), generator=generator).double().eval()
    for name, p in network.named_parameters():
        if name.endswith(("attn_bias.weight", "log_scale")):
            nn.init.normal_(p, generator=generator)
    with torch.no_grad():
        for p in network.parameters():
            p.mul_(2.0 if p.dim() == 2 else 1.0)
    nn.init.normal_(network.embeddings.token.weight, generator=generator)
    return network


def tokens(*shape):
    return torch.randint(1, V, shape)


def left_padded(lengths, width):
    return torch.tensor([[t >= width - length for t in range(width)] for length in lengths])


def as_lists(answers):
    assert {answer.dtype for answer in answers} == {torch.long}  # of an empty text, too
    return [answer.tolist() for answer in answers]


# ---- filters


def test_top_p_of_one_keeps_everything_where_rounding_would_not():
    logits = 5.0 * torch.randn(1, 20_000)
    probs = logits.softmax(-1).sort(descending=True).values
    assert (probs.cumsum(-1) - probs >= 1.0).any()
    assert torch.equal(keep_top_p(logits, 1.0), logits)


def test_filters_equal_those_of_transformers():
    import transformers as hf

    logits, ids = 3.0 * torch.randn(5, V, dtype=torch.float64), tokens(5, 7)
    seen = torch.zeros(5, V, dtype=torch.bool).scatter(1, ids, True)
    assert keep_top_k(torch.zeros(1, 4), 2).isfinite().tolist() == [[True, True, False, False]]  # theirs keeps all ties
    pairs = [(penalise_repeats(logits, seen, 1.4), hf.RepetitionPenaltyLogitsProcessor(1.4))]
    pairs += [(keep_top_k(logits, k), hf.TopKLogitsWarper(k)) for k in (1, 4, V + 2)]
    pairs += [(keep_top_p(logits, p), hf.TopPLogitsWarper(p)) for p in (0.01, 0.5, 0.8, 0.99)]
    pairs += [(keep_min_p(logits, p), hf.MinPLogitsWarper(p)) for p in (0.0, 0.01, 0.1, 1.0)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs(ids, logits), rtol=0, atol=0)
    torch.testing.assert_close(
        apply_temperature(logits, 0.7).softmax(-1), hf.TemperatureLogitsWarper(0.7)(ids, logits).softmax(-1)
    )


def test_draws_follow_the_distribution_and_never_take_what_was_left_out():
    probs = torch.tensor([0.0, 0.125, 0.0, 0.5, 0.375, 0.0])
    even = (torch.arange(800, dtype=torch.float64) + 0.5) / 800
    drawn = draw(probs.repeat(800, 1), even)
    assert drawn.bincount(minlength=6).tolist() == [0, 100, 0, 400, 300, 0]
    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw(probs.repeat(2, 1), ends).tolist() == [1, 4]


# ---- greedy and sampled


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy_takes_the_largest_logit_after_a_penalty_on_the_prompt_and_what_was_written(penalty):
    model, text = language_model(position="alibi"), tokens(3, 4)
    for _ in range(9):
        seen = torch.zeros(3, V, dtype=torch.bool).scatter(1, text, True)
        text = torch.cat((text, penalise_repeats(model(text)[:, -1], seen, penalty).argmax(-1, keepdim=True)), dim=1)
    answers = as_lists(generate(model, text[:, :4], max_new_tokens=9, sampler=Sampler(repetition_penalty=penalty)))
    assert answers == text[:, 4:].tolist()
    assert len(set(itertools.chain(*answers))) > 3  # the text is not one id again and again


CACHED = [
    *({"position": position} for position in ("learned", "sinusoidal")),
    *({"position": "rotary", **options} for options in ({"num_kv_heads": 1}, {"scale": "learned"}, {"scale": "log_length"})),
    {"position": "alibi", "window": 3},
    {"position": "t5", "num_kv_heads": 1},
    PAIR,
]


@pytest.mark.parametrize("options", CACHED, ids=str)
def test_cached_equals_uncached_and_alone_equals_left_padded_id_for_id(options):
    model, ids, real, seen = language_model(**options), tokens(3, 6), left_padded((6, 2, 4), 6), set()
    real = real.flip(1) if options is PAIR else real  # a source may be padded on the right
    for way in WAYS:
        given, answers = {"max_new_tokens": 9, "key_mask": real, "stop": [5]}, []
        for use_cache in (True, False):
            torch.manual_seed(7)
            answers.append(as_lists(WAYS[way](model, ids, use_cache=use_cache, **given)))
        cached, uncached = answers
        assert cached == uncached
        seen.update(*cached)
        for row in range(3 if way != "sampled" else 0):
            (alone,) = WAYS[way](model, ids[row, real[row]][None], max_new_tokens=9, stop=[5])
            assert cached[row] == alone.tolist()
    assert len(seen) > 4  # not one id again and again


def test_ids_of_another_integer_type_give_the_same_text():
    network, ids = language_model(position="rotary"), tokens(2, 5)
    for write in (generate, beam_search):
        assert as_lists(write(network, ids.int(), max_new_tokens=7)) == as_lists(write(network, ids, max_new_tokens=7))


def test_a_sampled_row_depends_on_its_seed_and_prompt_alone():
    model, ids = language_model(), tokens(3, 4)

    def sampled(prompts, seed, **options):
        options = {"max_new_tokens": 8, "generator": torch.Generator().manual_seed(seed), **options}
        return as_lists(generate(model, prompts, sampler=Sampler(temperature=1.0), **options))

    first = sampled(ids, 5)
    assert sampled(ids, 5) == first
    assert all(a != b for a, b in zip(sampled(ids, 6), first, strict=True))
    assert sampled(ids[:2], 5) == first[:2]
    other = torch.stack((ids[0], tokens(4), ids[2]))
    assert [sampled(other, 5)[row] for row in (0, 2)] == [first[0], first[2]]
    assert sampled(ids, 5, max_new_tokens=3) == [answer[:3] for answer in first]
    same = sampled(ids[:1].expand(3, -1), 5)
    assert len(set(map(tuple, same))) == 3  # equal prompts, streams of their own
    torch.manual_seed(2)  # the global generator is the default, and moves on
    first, second = (sampled(ids, 5, generator=None) for _ in range(2))
    torch.manual_seed(2)
    assert sampled(ids, 5, generator=None) == first != second


def test_extreme_filters_make_sampling_greedy():
    model, ids = language_model(), tokens(2, 4)
    greedy = as_lists(generate(model, ids, max_new_tokens=9))
    for one in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-9}):
        assert as_lists(generate(model, ids, max_new_tokens=9, sampler=Sampler(**{"temperature": 2.0, **one}))) == greedy
    assert as_lists(generate(model, ids, max_new_tokens=9, sampler=Sampler(temperature=2.0))) != greedy
    assert apply_temperature(torch.tensor([1.0, 2.0]), 1e-50).softmax(-1).tolist() == [0.0, 1.0]  # 0 in float32


def test_a_stop_id_ends_its_row_alone_and_is_left_out():
    model, ids = language_model(), tokens(3, 4)
    free = as_lists(generate(model, ids, max_new_tokens=12))
    stop = free[0][3]
    cut = [row[: row.index(stop)] if stop in row else row for row in free]
    assert as_lists(generate(model, ids, max_new_tokens=12, stop=[stop])) == cut
    assert len({len(row) for row in cut}) > 1
    own = Own(model).eval()
    assert as_lists(generate(own, ids, max_new_tokens=12, stop=[stop])) == cut
    assert len(own.lengths) == min(12, max(map(len, cut)) + 1)  # the model is not called after the last row has ended
    ends = [0, V - 1]  # the smallest and the largest id
    assert as_lists(generate(model, ids, max_new_tokens=12, stop=ends)) == [
        row[: min(row.index(id) if id in row else 12 for id in ends)] for row in free
    ]
    for ends in (stop, (stop,), (stop, free[0][4])):  # where the config has one or several, they are the default
        object.__setattr__(model.config, "eos_id", ends)
        want = as_lists(generate(model, ids, max_new_tokens=12, stop=ends if isinstance(ends, tuple) else [ends]))
        assert as_lists(generate(model, ids, max_new_tokens=12)) == want
    assert as_lists(generate(model, ids, max_new_tokens=12, stop=())) == free
    object.__setattr__(model.config, "eos_id", 50256)  # GPT-2's, whatever the vocabulary
    assert as_lists(generate(model, ids, max_new_tokens=12)) == free


@pytest.mark.parametrize("way", SAMPLERS)
def test_streamed_ids_are_the_answers(way):
    model, ids, streamed = language_model(), tokens(3, 4), [[], [], []]
    answers = WAYS[way](model, ids, max_new_tokens=12, stop=[5, 7], on_token=lambda row, id: streamed[row].append(id))
    assert streamed == as_lists(answers)
    assert any(streamed)


# ---- beam search


def log_prob(model, prompt, answer, repetition_penalty=1.0):
    """log P of ``answer`` after ``prompt`` (1, L), from one full forward."""
    ids, start = torch.cat((prompt, torch.tensor([answer])), dim=1), prompt.shape[1]
    with torch.no_grad():
        steps = model(ids)[0, start - 1 : -1]
    if repetition_penalty != 1.0:
        seen = [torch.zeros(model.config.vocab_size).scatter(0, ids[0, :end], 1.0) > 0 for end in range(start, ids.shape[1])]
        steps = penalise_repeats(steps, torch.stack(seen), repetition_penalty)
    steps = steps.log_softmax(-1)
    return float(steps[torch.arange(len(answer)), torch.tensor(answer)].sum())


class Chain(nn.Module):
    """The next id depends on the last alone, by a table of probabilities."""

    def __init__(self, table):
        super().__init__()
        self.log_probs = torch.tensor(table).log()
        self.eval()

    def forward(self, input_ids, *, key_mask=None):
        return self.log_probs[input_ids]


def test_a_beam_goes_on_while_an_open_text_may_still_win():
    # 0 begins, 1 goes on to itself, 2 stops; log P(1 1 1 ...) = ln 0.3 stays, so a long answer gains by its norm
    patient = Chain([[0.0, 0.3, 0.7], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    begin, options = torch.tensor([[0]]), {"num_beams": 2, "stop": [2], "use_cache": False}
    for penalty, wanted in ((0.0, []), (3.0, [1] * 6)):
        assert as_lists(beam_search(patient, begin, max_new_tokens=6, length_penalty=penalty, **options)) == [wanted]
    # with a norm that falls, the likelier answer of two tokens beats that of one, long before the norm of 20
    hasty = Chain([[0.0, 0.8, 0.2], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    assert as_lists(beam_search(hasty, begin, max_new_tokens=20, length_penalty=-3.0, **options)) == [[1]]
    assert (length_norm(1, 3.0), length_norm(7, 3.0), length_norm(7, 0.0)) == (1.0, 8.0, 1.0)


def narrow_beam(model, prompt, num_beams, length, stop, penalty, repetition_penalty):
    """Beam search over lists, to the end and without a batch."""
    live, ended = [((), 0.0)], []
    for n in range(1, length + 1):
        texts = [(*a, i) for a, _ in live for i in range(model.config.vocab_size)]
        longer = sorted(((log_prob(model, prompt, text, repetition_penalty), text) for text in texts), reverse=True)
        live = []
        for score, answer in longer[:num_beams]:
            if answer[-1] == stop or n == length:
                ended.append((score / length_norm(n, penalty), answer))
            else:
                live.append((answer, score))
    return [id for id in max(ended)[1] if id != stop]


@pytest.mark.parametrize(
    ("num_beams", "penalty", "repetition_penalty"), [(1, 0.6, 1.0), (2, 0.6, 1.0), (3, 3.0, 4.0), (7, -1.0, 1.0)]
)
def test_a_narrow_beam_equals_a_search_over_lists(num_beams, penalty, repetition_penalty):
    model, prompts = language_model(vocab_size=5), torch.randint(0, 5, (3, 2))
    options = {"num_beams": num_beams, "length_penalty": penalty, "repetition_penalty": repetition_penalty}
    answers = as_lists(beam_search(model, prompts, max_new_tokens=6, stop=[3], **options))
    assert answers == [narrow_beam(model, prompt[None], num_beams, 6, 3, penalty, repetition_penalty) for prompt in prompts]
    assert num_beams > 1 or answers == as_lists(generate(model, prompts, max_new_tokens=6, stop=[3]))


# ---- encoder-decoder


def test_an_encoder_decoder_reads_its_source_once(monkeypatch):
    model, ids, read = language_model(**PAIR), tokens(3, 6), []
    encode = model.encode
    monkeypatch.setattr(model, "encode", lambda *given, **options: read.append(given) or encode(*given, **options))
    for way in WAYS.values():
        way(model, ids, max_new_tokens=4)
    assert len(read) == len(WAYS)


def test_an_encoder_decoder_answers_what_its_full_forward_says():
    model, ids = language_model(**PAIR), tokens(2, 6)
    begun = torch.tensor([[1, 4], [1, 9]])
    for begin, text in ((None, torch.ones(2, 1, dtype=torch.long)), (begun, begun)):
        start = text.shape[1]
        for _ in range(7):
            text = torch.cat((text, model(ids, text)[:, -1].argmax(-1, keepdim=True)), dim=1)
        assert as_lists(generate(model, ids, decoder_input_ids=begin, max_new_tokens=7)) == text[:, start:].tolist()
    with pytest.raises(ValueError, match=r"^decoder_input_ids must have shape \(B, T\) = \(2, T\), got \(1, 2\)$"):
        generate(model, ids, decoder_input_ids=begun[:1])


# ---- users' models


class Own(nn.Module):
    """A causal model that has only the documented methods."""

    def __init__(self, network):
        super().__init__()
        self.network, self.lengths = network, []

    def forward(self, input_ids, **options):
        self.lengths.append((input_ids.shape[1], sorted(options)))
        return self.network(input_ids, **options)


class OwnWithCache(Own):
    def make_cache(self, capacity):
        return self.network.make_cache(capacity)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_ones_own_writes_the_same_text_and_its_cache_is_used_where_it_has_one(way):
    network, ids, answers = language_model(), tokens(2, 5), []
    wholes, pieces = [(5, []), (6, []), (7, [])], [(5, ["cache"]), (1, ["cache"]), (1, ["cache"])]
    models = [(network, None, True), (Own(network), wholes, True)]
    models += [(OwnWithCache(network), wholes, False), (OwnWithCache(network), pieces, True)]
    for model, lengths, use_cache in models:
        torch.manual_seed(7)
        options = {} if use_cache else {"use_cache": False}  # the default is True
        answers.append(as_lists(WAYS[way](model.eval(), ids, max_new_tokens=3, **options)))
        assert lengths is None or model.lengths == lengths
    assert answers == answers[:1] * 4
    seen = Own(network).eval()
    WAYS[way](seen, ids, max_new_tokens=1, key_mask=left_padded((5, 3), 5))
    assert seen.lengths == [(5, ["key_mask"])]


def test_a_model_with_adapters_writes_as_the_merged_model_does():
    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    model, ids = peft.get_peft_model(language_model(), peft.LoraConfig(**options)).eval(), tokens(2, 5)
    answer, beams = (as_lists(write(model, ids, max_new_tokens=9)) for write in (generate, beam_search))
    merged = model.merge_and_unload()
    assert (answer, beams) == tuple(as_lists(write(merged, ids, max_new_tokens=9)) for write in (generate, beam_search))
    with pytest.raises(AttributeError, match="prepare_inputs_for_generation"):  # so docs/weights.md says to leave it out
        peft.get_peft_model(language_model(), peft.LoraConfig(**options, task_type="CAUSAL_LM"))


class Says(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, input_ids):
        return self.answer(input_ids)


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (lambda ids: (torch.zeros(*ids.shape, V), None), "tuple"),
        (lambda ids: {"logits": torch.zeros(*ids.shape, V)}, "dict"),
        (lambda ids: torch.zeros(len(ids), V), r"\(1, 13\)"),
        (lambda ids: torch.zeros(ids.shape[1], len(ids), V), r"\(3, 1, 13\)"),
    ],
)
@pytest.mark.parametrize("write", [generate, beam_search])
def test_a_model_that_returns_something_else_than_logits_is_refused(write, answer, got):
    with pytest.raises(TypeError, match=rf"^model must return logits \(B, L, V\) for input_ids \(1, 3\), got {got}$"):
        write(Says(answer).eval(), IDS)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft calls transformers by an old name
@pytest.mark.parametrize("write", [generate, beam_search])
def test_a_hugging_face_model_is_referred_to_its_own_generate(write):
    import transformers as hf

    gpt2 = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=E, n_head=H, n_layer=1, vocab_size=V, bos_token_id=1, eos_token_id=2))
    adapted = peft.get_peft_model(gpt2, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True))
    for model in (gpt2, adapted):
        with pytest.raises(TypeError, match=rf"^model is a Hugging Face model, {type(model).__name__}: .*generate\(\)$"):
            write(model.eval(), IDS)


# ---- what is refused

IDS = torch.tensor([[1, 2, 3]])
WRONG = {
    "temperature=-1": {"temperature": -1},
    "top_k=0": {"temperature": 1.0, "top_k": 0},
    "top_p=1.5": {"temperature": 1.0, "top_p": 1.5},
    "min_p=-0.1": {"temperature": 1.0, "min_p": -0.1},
    "top_p=0.9": {"top_p": 0.9},
    "repetition_penalty=0": {"repetition_penalty": 0},
}
WRONG_PROMPTS = {
    "max_new_tokens=0": {"max_new_tokens": 0},
    "context=0": {"context": 0},
    "stop must": {"stop": "."},
    "stop must contain ids from 0 to 12, got 13": {"stop": [1, 13]},
    "input_ids of 3 tokens and max_new_tokens=30": {"max_new_tokens": 30},
    "input_ids of 32 tokens": {"input_ids": torch.ones(1, 32).long()},
    "input_ids must": {"input_ids": torch.ones(1, 0).long()},
    "key_mask must have the shape": {"key_mask": torch.ones(1, 2).bool()},
    "key_mask must be True": {"key_mask": torch.tensor([[True, True, False]])},
    "decoder_input_ids": {"decoder_input_ids": IDS},
}


WRONG_BEAMS = {
    "num_beams=1.5": {"num_beams": 1.5},
    "num_beams=0": {"num_beams": 0},
    "length_penalty=inf": {"length_penalty": math.inf},
    "length_penalty=-1000": {"length_penalty": -1000},
    "repetition_penalty=-1": {"repetition_penalty": -1},
}


@pytest.mark.parametrize("said", WRONG)
def test_what_no_sampler_can_do_is_refused_when_it_is_made(said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        Sampler(**WRONG[said])


@pytest.mark.parametrize("write", [generate, beam_search])
def test_a_wrong_argument_is_named(write):
    for said, options in (WRONG_PROMPTS | (WRONG_BEAMS if write is beam_search else {})).items():
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            write(language_model(), **{"input_ids": IDS, **options})


def of_another_kind(architecture, **options):
    sizes = {"embed_dim": E, "num_heads": H, "num_layers": 1}
    return build_model(TransformerConfig(architecture=architecture, **options, **sizes)).eval()


def broken():
    model = language_model()
    nn.init.constant_(model.head.weight, math.nan)
    return model


PICTURE = {"image_size": 6, "patch_size": 3, "num_labels": 5, "num_channels": 1, "head": "sequence"}
NO_MODELS = [
    (lambda: "a model", TypeError, "got str"),
    (lambda: of_another_kind("encoder", vocab_size=V), ValueError, "^model .*Encoder"),
    (lambda: of_another_kind("vision", **PICTURE), ValueError, "^model .*VisionTransformer"),
    (lambda: language_model().train(), ValueError, r"^model .*training.*model\.eval\(\)"),
    (broken, FloatingPointError, r"^the model's logits are not finite$"),
    (lambda: language_model(architecture="encoder_decoder"), ValueError, r"^decoder_input_ids=None .*bos_id"),
]


@pytest.mark.parametrize("write", [generate, beam_search])
@pytest.mark.parametrize(("make", "error", "said"), NO_MODELS)
def test_a_model_that_cannot_write_is_refused(make, error, said, write):
    with pytest.raises(error, match=said):
        write(make(), IDS)


def test_the_last_place_of_a_position_table_is_used_by_default_and_others_have_no_end():
    assert len(generate(language_model(), IDS, max_new_tokens=29)[0]) == 29
    assert len(generate(language_model(), IDS)[0]) == 29
    assert len(generate(language_model(position="rotary"), IDS)[0]) == 256


# ---- text


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", "replace")


@given(ids=st.lists(st.integers(0, 255), max_size=12))
def test_broken_bytes_are_shown_as_decoding_the_whole_would(ids):
    stream = TextStream(decode_bytes)
    assert "".join(map(stream.push, ids)) + stream.flush() == decode_bytes(ids)
    assert stream.push(65) == "A"  # after flush it begins anew


def decode_or_mark_each(ids):
    """As with the bytes of Llama's vocabulary."""
    return decode_bytes(ids) if "\ufffd" not in decode_bytes(ids) else "\ufffd" * len(ids)


@pytest.mark.parametrize("decode", [decode_bytes, decode_or_mark_each])
def test_text_comes_as_soon_as_it_is_certain(decode):
    stream = TextStream(decode)
    assert [stream.push(byte) for byte in "a你b🎉".encode()] == ["a", "", "", "你", "b", "", "", "", "🎉"]


def test_a_decoder_that_strips_the_first_space_keeps_the_others():
    words = [" in", " the", " be", "ginning"]
    stream = TextStream(lambda ids: "".join(words[id] for id in ids).removeprefix(" "))
    assert [stream.push(id) for id in range(4)] == ["in", " the", " be", "ginning"]


@pytest.mark.parametrize("position", ["learned", "rotary", "alibi", "none"])
def test_beyond_its_context_a_model_reads_the_newer_half_as_a_text_of_its_own(position):
    network, context = language_model(position=position), 8
    prompt, key_mask = torch.tensor([[1, 2, 3, 4, 5], [0, 0, 7, 6, 5]]), left_padded((5, 3), 5)
    options = {"key_mask": key_mask, "max_new_tokens": 17, "stop": (), "context": context}
    for write in (partial(beam_search, num_beams=3), generate):
        cached, plain = (as_lists(write(network, prompt, use_cache=use_cache, **options)) for use_cache in (True, False))
        assert cached == plain
    for row in range(2):  # by hand, without any cache
        view, length = prompt[row, key_mask[row]].tolist(), prompt.shape[1]
        for token in cached[row]:
            assert int(network(torch.tensor([view]))[0, -1].argmax()) == token
            view, length = [*view, token], length + 1
            if length > context:
                view, length = view[-(context // 2) :], context // 2


def test_a_prompt_longer_than_the_context_begins_with_its_last_tokens():
    network = language_model(position="learned")
    prompt = torch.randint(1, V, (1, 40))  # the table has 31 rows
    got = generate(network, prompt, max_new_tokens=3, stop=(), context=31)
    assert torch.equal(got[0], generate(network, prompt[:, -31:], max_new_tokens=3, stop=(), context=31)[0])
    with pytest.raises(ValueError, match=r"context=32 .*max_len=31"):
        generate(network, prompt, context=32)


def test_the_head_is_computed_for_the_last_position_only():
    model, seen = language_model(), []
    handle = model.head.register_forward_pre_hook(lambda head, args: seen.append(args[0].shape))
    generate(model, torch.randint(V, (2, 7)), max_new_tokens=3)
    handle.remove()
    assert seen == [(2, E)] * 3
