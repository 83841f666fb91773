import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitx.data.tokenizers import END_OF_TEXT, BPETokenizer, CharTokenizer, from_dict

POEM = "the raven, never flitting, still is sitting, still is sitting\n" * 5
BPE = BPETokenizer.train([POEM], 307)


@given(st.text())
def test_every_string_comes_back_from_bpe_exactly(text):
    assert BPE.decode(BPE.encode(text)) == text


@given(st.lists(st.sampled_from([END_OF_TEXT, "<|", "|>", "endoftext", " ", "\n", "a"])).map("".join))
def test_special_tokens_in_a_text_are_ordinary_bytes(text):
    ids = BPE.encode(text)
    assert BPE.end_id not in ids
    assert BPE.decode(ids) == text


def test_special_tokens_in_the_training_text_are_ordinary_bytes():
    trained = BPETokenizer.train([f"ab{END_OF_TEXT}" * 31], 300)
    ids = trained.encode(f"ab{END_OF_TEXT}")
    assert trained.end_id not in ids
    assert trained.decode(ids) == f"ab{END_OF_TEXT}"


def test_a_restored_bpe_keeps_special_tokens_out_of_texts():
    restored = from_dict(json.loads(json.dumps(BPE.to_dict())))
    assert restored.end_id == BPE.end_id
    assert restored.end_id not in restored.encode(END_OF_TEXT)
    assert restored.decode([restored.end_id]) == END_OF_TEXT


def test_bpe_learns_merges_up_to_the_size_asked_for():
    assert 257 < BPE.vocab_size <= 307
    assert BPETokenizer.train([POEM], 263).vocab_size == 263
    assert len(BPE.encode("sitting")) < len("sitting")


def test_bpe_without_a_text_knows_the_bytes_and_the_end():
    bare = BPETokenizer.train([], 1024)
    assert bare.vocab_size == 257
    assert len(bare.encode("é")) == 2


def test_bpe_training_is_repeatable():
    assert BPETokenizer.train([POEM], 307).fingerprint() == BPE.fingerprint()


def test_bpe_refuses_a_vocabulary_without_room_for_the_bytes():
    with pytest.raises(ValueError, match="vocab_size=256 must be at least 257"):
        BPETokenizer.train([POEM], 256)


def test_bpe_leaves_the_environment_as_it_was(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    BPE.encode("text")
    assert "TOKENIZERS_PARALLELISM" not in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    BPE.encode("text")
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


@given(st.text(min_size=1))
def test_known_characters_come_back_exactly(text):
    tokenizer = CharTokenizer.train([text])
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == len(set(text)) + 1


@given(st.text(), st.text())
def test_ids_of_characters_are_their_rank_and_unknown_ones_are_zero(known, text):
    tokenizer, rank = CharTokenizer.train([known]), {c: i for i, c in enumerate(sorted(set(known)), start=1)}
    assert tokenizer.encode(text).tolist() == [rank.get(c, tokenizer.unk_id) for c in text]


def test_an_unknown_character_decodes_to_the_replacement_character():
    assert CharTokenizer("ab").decode(CharTokenizer("ab").encode("a?b")) == "a\ufffdb"


@pytest.mark.parametrize("tokenizer", [BPE, CharTokenizer(POEM)])
def test_a_tokenizer_survives_json(tokenizer):
    restored = from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert restored.fingerprint() == tokenizer.fingerprint()
    assert np.array_equal(restored.encode(POEM), tokenizer.encode(POEM))


def test_fingerprints_tell_tokenizers_apart():
    assert CharTokenizer("ab").fingerprint() == CharTokenizer("ba").fingerprint() != CharTokenizer("abc").fingerprint()


@pytest.mark.parametrize("tokenizer", [BPE, CharTokenizer("abc")])
@pytest.mark.parametrize("bad", [-1, 1 << 20])
def test_ids_outside_of_the_vocabulary_are_refused(tokenizer, bad):
    with pytest.raises(ValueError, match=rf"ids must lie in \[0, {tokenizer.vocab_size}\)"):
        tokenizer.decode([1, bad])


def test_a_tokenizer_of_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="tokenizer kind=words is not known: one of char, bpe"):
        from_dict({"kind": "words"})
