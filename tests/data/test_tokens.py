import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from minitx.data import corpus
from minitx.data.tokenizers import fingerprint, train_tokenizer

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
        record = read_tokens("abé!" * 50, tokenizer=tokenizer)[3]
        assert record["splits"]["train"]["unknown"] == (90 if tokenizer is given else 0)
        assert [" 0.5 " in message for message in caplog.messages if "<unk>" in message] == [True] * (tokenizer is given)


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


def test_a_given_tokenizer_is_used_instead_of_a_learned_one(read_tokens, cache):
    mine = train_tokenizer("char", ["abcdefghijklmnopqrstuvwxyz \n"], vocab_size=0)
    found = read_tokens(TEXT, tokenizer=mine)
    assert fingerprint(found[2]) == fingerprint(mine)
    assert text_of(found)[:3] == "\ufffdh\ufffd"


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
    assert not list(cache.glob("*.tmp"))
