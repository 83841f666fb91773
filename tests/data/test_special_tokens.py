"""What a user writes is text: no tokenizer reads one of its special tokens in it, whoever made the tokenizer."""

import contextlib
import copy
import pickle

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from minitx.config import ConfigError
from minitx.data.tokenizers import NAMES_OF_MARKS, Tokenizer, from_dict, load_tokenizer, train_tokenizer

MARKS = ("pad", "bos", "eos", "mask", "cls")
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
    again = [tokenizer, from_dict(tokenizer.to_dict()), pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)]
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
