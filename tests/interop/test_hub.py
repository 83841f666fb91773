"""Names on the hub, offline: a cache laid out as ``huggingface_hub`` does it is read, and what is not in it is one sentence."""

import shutil
import subprocess
import sys

import pytest
import torch
from foreign import batch, build, save

from minitx.interop import from_pretrained, load_hf, save_pretrained

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
    theirs = build("gpt2")
    cached(save(theirs, tmp_path / "gpt2"), "openai-community/gpt2")
    ids, _ = batch("none")
    with torch.no_grad():
        assert (load_hf("openai-community/gpt2")(ids) - theirs(ids).logits).abs().max() < 1e-5


def test_a_model_of_ours_in_the_cache_loads_offline(cached, tmp_path):
    model = load_hf(save(build("gpt2"), tmp_path / "gpt2"))
    save_pretrained(model, tmp_path / "ours")
    cached(tmp_path / "ours", "me/mine")
    assert torch.equal(from_pretrained("me/mine").head.weight, model.head.weight)


def test_a_name_that_is_not_in_the_cache_is_one_sentence(cached):
    with pytest.raises(FileNotFoundError, match="openai-community/gpt2") as error:
        load_hf("openai-community/gpt2")
    assert "\n" not in str(error.value)


def test_a_folder_in_the_place_of_a_name_is_read_from_the_disk(cached, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(build("llama"), tmp_path / "openai-community" / "gpt2")
    assert load_hf("openai-community/gpt2").config.norm == "rms"


@pytest.mark.parametrize("name", ["gone", "a/b/c", "../up", "/nowhere/at-all", "./here"])
def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(name, cached, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *given, **options: pytest.fail("asked the hub"))
    with pytest.raises(FileNotFoundError):
        load_hf(name)


def test_without_huggingface_hub_a_name_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="pip install huggingface_hub"):
        load_hf("openai-community/gpt2")


def test_reading_a_folder_needs_neither_transformers_nor_a_network(tmp_path):
    folder = save(build("gpt2"), tmp_path)
    code = (
        "import socket, sys\nfrom minitx.interop import load_hf\n"
        f"socket.socket = None\nload_hf({str(folder)!r})\n"
        "print({'transformers', 'huggingface_hub', 'onnx'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
