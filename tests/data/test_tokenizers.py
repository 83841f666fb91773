"""Tokenizers of ours and of others."""

import contextlib
import copy
import itertools
import json
import pickle
import re

import huggingface_hub
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from minitx.config import ConfigError
from minitx.data.token_labels import token_texts
from minitx.data.tokenizer import (
    LONGEST_WORD,
    NAMES_OF_MARKS,
    TextStream,
    Tokenizer,
    fingerprint,
    require_marks,
    train_tokenizer,
)
from minitx.data.tokenizer_choice import find_tokenizer
from minitx.data.tokenizer_folder import load_tokenizer

POEM = "the raven, never flitting, still is sitting, still is sitting\n" * 5
MARKS = ("pad", "bos", "eos", "mask", "cls")


def char(*texts, marks=()):
    return train_tokenizer("char", texts, marks=marks)


def bpe(*texts, vocab_size=307, marks=()):
    return train_tokenizer("bpe", texts, vocab_size=vocab_size, marks=marks)


BPE = bpe(POEM)
CHAR = char(POEM)
MARKED = [train_tokenizer(kind, [POEM], vocab_size=311, marks=MARKS) for kind in ("char", "bpe")]
OURS = [*MARKED, BPE, CHAR, char("<>a\n\r\0\\é😀\u2028", marks=["eos"])]


@settings(max_examples=30)
@given(st.text())
def test_every_string_comes_back_from_bpe_exactly(text):
    assert BPE.decode(BPE.encode(text)) == text


def test_bpe_learns_merges_up_to_the_size_asked_for():
    assert 263 == bpe(POEM, vocab_size=263).vocab_size < BPE.vocab_size <= 307
    assert len(BPE.encode("sitting")) < len("sitting")
    assert (bpe().vocab_size, len(bpe().encode("é"))) == (257, 2)
    with pytest.raises(ValueError, match="vocab_size"):
        bpe(POEM, vocab_size=256)


def test_bpe_refuses_a_word_over_which_it_would_take_hours():
    with pytest.raises(ConfigError, match=r"data\.tokenizer=bpe"):
        bpe("a b", "x" * (LONGEST_WORD + 1))
    assert bpe("x" * 1009).decode(bpe().encode("xx")) == "xx"
    assert char("x" * (LONGEST_WORD + 1)).vocab_size == 2


@given(st.text(), st.text())
def test_ids_of_characters_are_their_rank_as_the_saved_model_says_too(known, text):
    tokenizer, rank = char(known), {c: i for i, c in enumerate(sorted(set(known)), start=1)}
    model = tokenizers.Tokenizer.from_str(tokenizer.to_dict()["json"])
    for one in (text, known):
        ids = tokenizer.encode(one).tolist()
        assert ids == [rank.get(c, 0) for c in one] == model.encode(one).ids
        assert tokenizer.decode(ids) == "".join(c if c in rank else "\ufffd" for c in one) == model.decode(ids)
    assert tokenizer.vocab_size == len(rank) + 1
    assert tokenizer.characters == "".join(rank)


def test_what_is_not_known_is_refused():
    for tokenizer, bad in itertools.product((BPE, CHAR), (-1, -(1 << 20))):
        with pytest.raises(ValueError, match=f"ids must not be negative, got {bad}"):
            tokenizer.decode([1, bad])
    with pytest.raises(ValueError, match="kind=words"):
        Tokenizer.from_dict({"kind": "words"})
    with pytest.raises(ConfigError, match=r"data\.tokenizer .* mask"):
        require_marks(BPE, "mask")


@pytest.mark.parametrize("text", ["你好，世界。", "🎉👩‍🚀 é", "e\u0301 क्षि ▁", "naïve\n\t x", "שלום عربي", POEM])
def test_texts_of_tokens_show_no_byte_as_a_letter_whatever_a_token_cuts(text):
    for tokenizer in (BPE, bpe(text * 3, vocab_size=300), char(text)):
        texts = token_texts(tokenizer, tokenizer.encode(text))
        assert len(texts) == len(tokenizer.encode(text))
        assert {letter for shown in texts for letter in shown} - set("·-/123456789") <= set(text)


def test_a_token_says_what_it_holds_of_each_character():
    ids = BPE.encode("a你e\u0301")
    assert token_texts(BPE, ids) == ["a", *(f"你·{i}/3" for i in (1, 2, 3)), "e", "\u0301·1/2", "\u0301·2/2"]
    assert token_texts(BPE, ids[:3]) == ["a", "⟨E4⟩", "⟨BD⟩"]  # the third byte is missing
    assert token_texts(char("ab"), [1, 0, 2]) == ["a", "<unk>", "b"]
    assert token_texts(BPE, []) == []


def test_pieces_that_are_no_bytes_stand_as_they_are():
    pieces = {"▁the": 0, "<0xE4>": 1, "<0xBD>": 2, "<0xA0>": 3, "é": 4}
    theirs = tokenizers.Tokenizer(models.BPE(pieces, [], byte_fallback=True))
    theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert token_texts(Tokenizer(theirs.to_str()), [0, 1, 2, 3, 4]) == [" the", "你·1/3", "你·2/3", "你·3/3", "é"]


@pytest.mark.parametrize("tokenizer", MARKED)
def test_marks_have_ids_of_their_own_and_decode_to_their_names_or_to_nothing(tokenizer):
    ids = [tokenizer.mark_ids[mark] for mark in MARKS]
    assert len(set(ids)) == 5 and max(ids) < tokenizer.vocab_size
    assert require_marks(tokenizer, "eos", "pad") == [ids[2], ids[0]]
    row = [ids[1], *tokenizer.encode("raven"), ids[2]]
    assert tokenizer.decode(row) == "".join(token_texts(tokenizer, row)) == "<bos>raven<eos>"
    assert tokenizer.decode(row, skip_marks=True) == "raven"


@pytest.mark.parametrize("tokenizer", OURS)
def test_what_we_save_loads_in_tokenizers_and_in_ours(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    restored = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert fingerprint(restored) == fingerprint(ours) == fingerprint(tokenizer) == fingerprint(find_tokenizer(str(tmp_path)))
    assert restored.mark_ids == tokenizer.mark_ids
    assert theirs.get_vocab_size() == tokenizer.vocab_size
    for text in (POEM, "a\r\n\0é😀\u2028?"):
        ids = tokenizer.encode(text).tolist()
        assert theirs.encode(text, add_special_tokens=False).ids == ids
        assert theirs.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)


def wordpiece():
    """A tokenizer.json as BERT's, with all that its users set: marks around a text, padding, truncation, a gap in the ids."""
    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "the": 5, "rav": 6, "##en": 9}
    theirs = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    theirs.pre_tokenizer, theirs.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    theirs.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    theirs.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    theirs.enable_padding(length=16)
    theirs.enable_truncation(3)
    return theirs


def check_wordpiece(found):
    for ours in (found, Tokenizer.from_dict(json.loads(json.dumps(found.to_dict())))):
        assert ours.encode("the raven the raven").tolist() == [5, 6, 9, 5, 6, 9]  # nothing around it, nothing cut or filled
        assert ours.decode([5, 6, 9]) == "the raven"
        assert ours.decode([2, 5, 3], skip_marks=True) == "the"
        assert ours.mark_ids == {"pad": 0, "eos": 3, "mask": 4, "cls": 2}
        assert (ours.vocab_size, ours.characters) == (10, None)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """The hub's cache, as it is after ``someone/words`` was fetched."""
    repository = tmp_path / "models--someone--words"
    (repository / "snapshots" / "0123abc").mkdir(parents=True)
    wordpiece().save(str(repository / "snapshots" / "0123abc" / "tokenizer.json"))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))


def test_a_tokenizer_of_others_is_found_as_a_file_in_a_folder_and_in_the_cache_of_the_hub(hub_cache, tmp_path):
    assert (find_tokenizer("char"), find_tokenizer("bpe")) == (None, None)  # these are learnt
    wordpiece().save(str(tmp_path / "tokenizer.json"))
    for name in (str(tmp_path / "tokenizer.json"), str(tmp_path), "someone/words"):
        check_wordpiece(find_tokenizer(name))


@pytest.mark.parametrize("name", ["someone/else", "no/such/file.json", "", "folder", "broken.json"])
def test_a_tokenizer_that_cannot_be_found_or_read_is_refused_by_its_key(name, hub_cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"^data\.tokenizer={re.escape(name)} ") as refused:
        find_tokenizer(name)
    assert "\n" not in str(refused.value)


# --- what a user writes is text: no tokenizer reads one of its special tokens in it, whoever made it


NAMES = sorted({name for names in NAMES_OF_MARKS.values() for name in names} | {"<unk>", "[UNK]", "<|im_start|>"})
TEXTS = [*NAMES, *(f"a {name} b" for name in NAMES), *(f"a{name}{name}b" for name in NAMES), "".join(NAMES), " ".join(NAMES),
         "＜ｐａｄ＞ ［ＭＡＳＫ］ ＜/s＞", "<<pad>>", "<|endoftext|", "\0<eos>\0"]  # fmt: skip
LETTERS = sorted(set("".join(TEXTS)))


def finished(theirs: tokenizers.Tokenizer, *, special: bool = True) -> str:
    """A ``tokenizer.json`` with every name as an added token, some of which its model knows already."""
    added = [AddedToken(name, special=special, normalized=False) for name in NAMES]
    theirs.add_special_tokens(added) if special else theirs.add_tokens(added)
    return theirs.to_str()


def unigram(**options) -> str:
    """As T5's: the special tokens are pieces of the vocabulary, with the best score of all."""
    pieces = [*((name, 0.0) for name in NAMES), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    theirs = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=NAMES.index("<unk>")))
    theirs.normalizer, theirs.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    theirs.decoder = decoders.Metaspace()
    return finished(theirs, **options)


def merged_pairs(**options) -> str:
    """Byte-level; the merges make ``</s>``, and then ``</s>a``."""
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("</s>", "a")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *NAMES, *map("".join, merges)]
    theirs = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(dict.fromkeys(words))}, merges))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.decoder = decoders.ByteLevel()
    return finished(theirs, **options)


MADE = {
    "char": lambda: train_tokenizer("char", ["".join(TEXTS), "the raven"], marks=MARKS),
    "bpe": lambda: train_tokenizer("bpe", ["".join(TEXTS), "the raven"], vocab_size=290, marks=MARKS),
    **{f"{make.__name__} of others": lambda make=make: Tokenizer(make()) for make in (unigram, merged_pairs)},
    "merged_pairs of others, not special": lambda: Tokenizer(merged_pairs(special=False)),
}


def specials(tokenizer) -> set[int]:
    """Ids that no text may have. The unknown token may: it stands for what the model does not know."""
    added = tokenizers.Tokenizer.from_str(tokenizer.to_dict()["json"]).get_added_tokens_decoder().items()
    special = {i for i, token in added if token.special and token.content not in ("<unk>", "[UNK]")}
    return special | set(tokenizer.mark_ids.values())


WORD = {"unigram of others": "<eos>", "merged_pairs of others": "</s>", "merged_pairs of others, not special": "<eos>"}
"""A mark that the vocabulary has as a word, or that the tokenizer finds in any text."""


@pytest.mark.parametrize("made", MADE)
def test_no_special_token_is_read_in_a_text_and_marks_keep_their_names(made):
    tokenizer = MADE[made]()
    forbidden = specials(tokenizer)
    assert len(forbidden) >= len(MARKS)
    again = [
        tokenizer,
        Tokenizer.from_dict(tokenizer.to_dict()),
        pickle.loads(pickle.dumps(tokenizer)),
        copy.deepcopy(tokenizer),
    ]
    for one in again:
        read = {}
        for text in TEXTS:
            with contextlib.suppress(ConfigError):  # refused
                read[text] = one.encode(text)
        assert not forbidden & {i for ids in read.values() for i in ids.tolist()}
        if made in WORD:
            with pytest.raises(ConfigError, match=f"its special token {WORD[made]} in the text 'a {WORD[made]} b'"):
                one.encode_batch(["a b", f"a {WORD[made]} b"])
        assert (len(read) == len(TEXTS)) == (made not in WORD)
        if "unigram" not in made:
            assert [one.decode(ids) for ids in read.values()] == list(read)
    for mark, i in tokenizer.mark_ids.items():
        assert tokenizer.token_bytes([i])[0].decode() in NAMES_OF_MARKS[mark]


def test_other_added_tokens_are_still_read(tmp_path):
    """GPT-NeoX adds runs of spaces as ordinary tokens; they are text."""
    theirs = tokenizers.Tokenizer.from_str(merged_pairs(special=False))
    theirs.add_tokens([AddedToken("    ", special=False)])
    theirs.save(str(tmp_path / "tokenizer.json"))
    spaces = theirs.token_to_id("    ")
    assert load_tokenizer(tmp_path).encode("a    b").tolist()[1] == spaces


def test_a_mark_that_a_folder_names_may_be_a_word_and_marks_that_are_found_by_name_are_told(tmp_path, caplog):
    words = ["<pad>", "<s>", "</s>", "<|end|>", "the"]
    theirs = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="the"))
    theirs.add_special_tokens(words[:3])
    theirs.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "mask_token": "[M]"}))
    with caplog.at_level("INFO"):
        found = load_tokenizer(tmp_path)
    assert found.mark_ids == {"pad": 0, "bos": 1, "eos": 3, "cls": 1}
    assert "found by name: pad=<pad>, bos=<s>, cls=<s>" in caplog.text
    assert found.decode([3, 4], skip_marks=True) == "the"


def test_an_id_without_a_token_is_no_text_and_does_not_part_its_neighbours_from_their_spaces():
    theirs = tokenizers.Tokenizer(models.WordLevel({"on": 0, "the": 1}, unk_token="on"))
    ours = Tokenizer(theirs.to_str())
    stream = TextStream(ours.decode)
    assert "".join(map(stream.push, [0, 9, 1])) == ours.decode([0, 9, 1]) == "on the"
