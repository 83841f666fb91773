"""Names on the hub, offline: a cache laid out as ``huggingface_hub`` does it is read, and what is not in it is one sentence."""

import shutil
import sys

import pytest
import torch
from foreign import saved

from minitx.interop import load_hf

COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Put a folder into an empty cache under a name; every file is a link to a blob, as there."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def put(folder, name):
        repo = cache / f"models--{name.replace('/', '--')}"
        snapshot = repo / "snapshots" / COMMIT
        for made in (repo / "blobs", repo / "refs", snapshot):
            made.mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        for path in folder.iterdir():
            shutil.copy(path, repo / "blobs" / path.name)
            (snapshot / path.name).symlink_to(repo / "blobs" / path.name)

    return put


def test_a_name_in_the_cache_loads_offline(cached, tmp_path):
    model = load_hf(saved("gpt2", tmp_path / "gpt2"))
    cached(tmp_path / "gpt2", "openai-community/gpt2")
    assert torch.equal(load_hf("openai-community/gpt2").head.weight, model.head.weight)


def test_a_name_that_is_not_in_the_cache_is_one_sentence(cached):
    with pytest.raises(FileNotFoundError, match="openai-community/gpt2") as error:
        load_hf("openai-community/gpt2")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gone", "a/b/c", "../up", "/nowhere/at-all", "./here"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *given, **options: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError):
        load_hf(name)


def test_a_folder_in_the_place_of_a_name_is_read_without_a_hub_and_without_transformers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved("llama", tmp_path / "openai-community" / "gpt2")
    for package in ("huggingface_hub", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    assert load_hf("openai-community/gpt2").config.norm == "rms"
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        load_hf("somebody/elses")
