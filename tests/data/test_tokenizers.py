import itertools
import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitx.config import ConfigError
from minitx.data.tokenizers import (
    END_OF_TEXT,
    BPETokenizer,
    CharTokenizer,
    from_dict,
    load_tokenizer,
    require_marks,
    token_texts,
    train_tokenizer,
)

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


def joined(texts):
    """Texts of tokens put together again, parts of a character told once."""
    whole = [re.sub(r"(.)·1(-\d+)?/\d", r"\1", text, flags=re.DOTALL) for text in texts]
    return "".join(re.sub(r".·\d+(-\d+)?/\d", "", text, flags=re.DOTALL) for text in whole)


@pytest.mark.parametrize("text", ["你好，世界。", "🎉👩‍🚀 é", "e\u0301 क्षि", "naïve\n\t x", "שלום عربي", POEM])
def test_texts_of_tokens_make_the_text_whatever_a_token_cuts(text):
    for tokenizer in (BPE, BPETokenizer.train([text * 3], 300), CharTokenizer(text)):
        texts = token_texts(tokenizer, tokenizer.encode(text))
        assert len(texts) == len(tokenizer.encode(text))
        assert joined(texts) == text
        assert not any(wrong in shown for shown in texts for wrong in "\ufffdÃä½Ġ")


def test_a_part_of_a_character_is_shown_as_that_character_with_its_bytes():
    ids = BPE.encode("a你🎉e\u0301")
    assert token_texts(BPE, ids) == [
        "a",
        *(f"你·{i}/3" for i in (1, 2, 3)),
        *(f"🎉·{i}/4" for i in (1, 2, 3, 4)),
        "e",
        *("\u0301·1/2", "\u0301·2/2"),
    ]
    assert token_texts(BPE, ids[:3]) == ["a", "⟨E4⟩", "⟨BD⟩"]  # what is missing stands nowhere


def test_a_token_across_characters_says_what_it_holds_of_each():
    merged = BPETokenizer.train(["你好" * 9], 259)
    assert token_texts(merged, merged.encode("你好")) == ["你·1/3", "你·2-3/3", "好·1/3", "好·2-3/3"]
    text = "a你你é".encode()
    cut = SimpleNamespace(token_bytes=lambda ends: [text[a:b] for a, b in itertools.pairwise(ends)])
    assert token_texts(cut, [0, 3, 5, 8, 9]) == ["a你·1-2/3", "你·3/3你·1/3", "你·2-3/3é·1/2", "é·2/2"]


def test_marks_and_the_unknown_character_have_names():
    for tokenizer in MARKED:
        ids = [tokenizer.mark_ids["bos"], *tokenizer.encode("rav"), tokenizer.mark_ids["pad"]]
        assert token_texts(tokenizer, ids)[0] == "<bos>"
        assert token_texts(tokenizer, ids)[-1] == "<pad>"
    assert token_texts(CharTokenizer("ab"), [1, 0, 2]) == ["a", "<unk>", "b"]
    assert token_texts(BPE, []) == []


def test_pieces_that_are_no_bytes_stand_as_they_are():
    from tokenizers import Tokenizer, decoders, models

    theirs = Tokenizer(models.BPE({"▁the": 0, "<0xE4>": 1, "<0xBD>": 2, "<0xA0>": 3, "é": 4}, [], byte_fallback=True))
    theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert token_texts(BPETokenizer(theirs.to_str()), [0, 1, 2, 3, 4]) == [" the", "你·1/3", "你·2/3", "你·3/3", "é"]
    assert token_texts(BPETokenizer(wordpiece().to_str()), [2, 5, 6, 9, 7]) == ["[CLS]", "the", "rav", "##en", "<7>"]


MARKS = ("pad", "bos", "eos", "mask", "cls")
MARKED = [train_tokenizer(kind, [POEM], vocab_size=311, marks=MARKS) for kind in ("char", "bpe")]


@pytest.mark.parametrize("tokenizer", MARKED)
def test_marks_have_ids_that_no_text_has(tokenizer):
    ids = [tokenizer.mark_ids[mark] for mark in MARKS]
    assert len(set(ids)) == 5
    assert max(ids) < tokenizer.vocab_size
    assert require_marks(tokenizer, "eos", "pad") == [ids[2], ids[0]]
    for text in (POEM, "<pad><bos><eos><mask><cls>"):
        assert not set(tokenizer.encode(text).tolist()) & set(ids)


@pytest.mark.parametrize("tokenizer", MARKED)
def test_marks_decode_to_their_names_or_to_nothing(tokenizer):
    bos, eos = require_marks(tokenizer, "bos", "eos")
    ids = [bos, *tokenizer.encode("raven"), eos]
    assert tokenizer.decode(ids) == "<bos>raven<eos>"
    assert tokenizer.decode(ids, skip_marks=True) == "raven"


def test_marks_do_not_move_the_ids_of_characters():
    plain = CharTokenizer(POEM)
    assert np.array_equal(MARKED[0].encode(POEM), plain.encode(POEM))
    assert MARKED[0].vocab_size == plain.vocab_size + 5
    assert "marks" not in plain.to_dict()  # fingerprints of earlier checkpoints stay


def test_a_tokenizer_of_before_has_no_marks_but_its_end():
    assert CharTokenizer(POEM).mark_ids == {}
    assert BPE.mark_ids == {"eos": BPE.end_id}


def test_unknown_and_missing_marks_are_named():
    with pytest.raises(ValueError, match=r"marks=\['sep'\] are not known: pad, bos, eos, mask, cls"):
        CharTokenizer("a", ["sep"])
    with pytest.raises(ConfigError, match=r"^the tokenizer has no mask token, which this data needs; it has: eos$"):
        require_marks(BPE, "mask")


@pytest.mark.parametrize("tokenizer", MARKED)
def test_a_batch_is_encoded_as_its_texts_are(tokenizer):
    texts = ["raven", "", "never flitting ?"]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text).tolist() for text in texts]


@pytest.mark.parametrize("tokenizer", [*MARKED, BPE, CharTokenizer(POEM), CharTokenizer("<>a\n\r\0\\é😀\u2028", ["eos"])])
def test_what_we_save_loads_in_tokenizers_and_in_ours(tokenizer, tmp_path):
    import tokenizers

    tokenizer.save(tmp_path / "tokenizer.json")
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    assert ours.fingerprint() == tokenizer.fingerprint()
    assert theirs.get_vocab_size() == tokenizer.vocab_size
    for text in (POEM, "a\r\n\0é😀\u2028?", "never  flitting"):
        ids = tokenizer.encode(text).tolist()
        assert theirs.encode(text, add_special_tokens=False).ids == ids
        if CharTokenizer.unk_id not in ids or isinstance(tokenizer, BPETokenizer):
            assert theirs.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids) == text
    assert {mark: theirs.token_to_id(f"<{mark}>") for mark in tokenizer.mark_ids if tokenizer is not BPE} == (
        {} if tokenizer is BPE else tokenizer.mark_ids
    )


def wordpiece():
    """A tokenizer.json as BERT's, with all that its users set: marks around a text, padding, truncation, a gap in the ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "the": 5, "rav": 6, "##en": 9}
    theirs = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    theirs.pre_tokenizer, theirs.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    theirs.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    theirs.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    theirs.enable_padding(length=16)
    theirs.enable_truncation(3)
    return theirs


def test_a_tokenizer_of_others_loads_in_ours(tmp_path):
    theirs = wordpiece()
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert ours.encode("the raven the raven").tolist() == [5, 6, 9, 5, 6, 9]  # nothing around it, nothing cut or filled
    assert ours.decode([5, 6, 9]) == "the raven"
    assert ours.decode([2, 5, 3], skip_marks=True) == "the"
    assert ours.mark_ids == {"pad": 0, "eos": 3, "mask": 4, "cls": 2}
    assert ours.vocab_size == 10
    assert from_dict(json.loads(json.dumps(ours.to_dict()))).encode("the raven").tolist() == [5, 6, 9]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory; a tokenizer.json is wanted"),
        ("{nope", "is no tokenizer.json: Expecting property name .*"),
        ("{}", "is no tokenizer.json: .*"),
        ("[1]", "is no tokenizer.json: .*"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"^{path} {message}$"):
        load_tokenizer(tmp_path if content else path)
