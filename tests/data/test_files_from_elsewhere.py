"""Folders, archives and weights of others are data: nothing in them runs, and nothing is written outside of the caches."""

import contextlib
import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from minitx.config import ConfigError
from minitx.data.tables import load_table
from minitx.data.tokenizer_folder import load_tokenizer
from minitx.interop import load_hf

MARKER = "MARKER"
OUTSIDE = (f"../../../{MARKER}.txt", f"../{MARKER}.txt", f"/tmp/minitx-{os.getpid()}-{MARKER}.txt", f"a/../../{MARKER}.txt")


class Evil:
    """Pickles to a call that leaves the marker."""

    def __reduce__(self):
        return os.system, (f"touch {MARKER}",)


@pytest.fixture
def room(tmp_path, monkeypatch):
    """The current folder, with a folder of data in it, and caches beside it."""
    import datasets

    (tmp_path / "here" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for name in ("HF_DATASETS_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
        monkeypatch.setattr(datasets.config, name, str(tmp_path / "cache" / name))
    yield tmp_path / "here" / "data"
    assert list(tmp_path.rglob(f"*{MARKER}*")) == []
    assert not Path(OUTSIDE[2]).exists()


def object_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Evil()], dtype=object), allow_pickle=True)
    return file.getvalue()


def tarred(path: Path) -> None:
    contents = dict.fromkeys(OUTSIDE, b"x") | {"a.npy": object_array(), "a.pickle": pickle.dumps(Evil())}
    with tarfile.open(path, "w") as archive:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, f"../../{MARKER}"
        archive.addfile(link)


MADE = {
    "a script and data": lambda room: [(room / "data.py").write_text(f"open('{MARKER}', 'w')"), (room / "a.jsonl").write_text('{"text": "a"}')],
    "a pickle": lambda room: (room / "train.pkl").write_bytes(pickle.dumps(Evil())),
    "arrays of objects": lambda room: (room / "train.npy").write_bytes(object_array()),
    "a tar of pickles": lambda room: tarred(room / "train.tar"),
}  # fmt: skip


@pytest.mark.parametrize("made", MADE)
def test_a_folder_of_data_runs_nothing_and_writes_nowhere(room, made):
    MADE[made](room)
    before = {path: path.read_bytes() for path in room.iterdir()}
    with contextlib.suppress(ConfigError):  # most are refused
        load_table("data")
    assert {path: path.read_bytes() for path in room.iterdir()} == before  # and ``room`` looks for the marker everywhere


@pytest.mark.filterwarnings("ignore:The Pandas builder is deprecated:FutureWarning")
def test_the_name_of_a_reader_of_pickles_is_no_data(room, monkeypatch):
    """``datasets`` has readers that go by one word, ``pandas`` among them, and looks for their files in the current folder."""
    (room / "train.pkl").write_bytes(pickle.dumps(Evil()))
    monkeypatch.chdir(room)
    with pytest.raises(ConfigError, match=r"^data\.path=pandas"):
        load_table("pandas")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "tokenizer.json", "config.json"])
def test_a_pickle_in_a_folder_of_weights_is_refused_whatever_it_is_called(room, name):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "auto_map": {"AutoModel": "data.Evil"}}
    (room / "config.json").write_text(json.dumps(config))
    (room / "data.py").write_text(f"open('{MARKER}', 'w')")
    (room / name).write_bytes(pickle.dumps(Evil()))
    for read in (load_hf, load_tokenizer):
        with pytest.raises((ValueError, OSError)):
            read(room)


@pytest.mark.parametrize("shard", ["../MARKER.safetensors", "/etc/passwd"])
def test_shards_outside_of_the_folder_are_not_opened(room, shard):
    (room / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    (room / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": shard}}))
    with pytest.raises(FileNotFoundError, match="lists shards that are not in the folder"):
        load_hf(room)
