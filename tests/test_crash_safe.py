"""Files that are replaced as a whole."""

from contextlib import suppress

import pytest

from minitx.crash_safe import replacing


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, is_shared):
    path = tmp_path / "file"
    path.write_text("old")
    with suppress(KeyError), replacing(path, is_shared=is_shared) as part:
        part.write_text("half")
        raise KeyError
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
    with replacing(path, is_shared=is_shared) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert (path.read_text(), list(tmp_path.iterdir())) == ("new", [path])


def test_processes_that_share_a_file_write_different_ones(tmp_path):
    with replacing(tmp_path / "file", is_shared=True) as first, replacing(tmp_path / "file", is_shared=True) as second:
        assert first != second
        first.touch()
        second.touch()
