"""No moment can lose a checkpoint, and no damaged, foreign or malicious one is believed or executed."""

import dataclasses
import io
import os
import shutil
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.serialization import set_crc32_options

from minitx.cli.exit_codes import sentence
from minitx.config import ConfigError, InitFrom
from minitx.nn import DecoderLM
from minitx.training.checkpoint_callbacks import LastCheckpoint
from minitx.training.checkpoint_files import FORMAT, CheckpointError, load_weights, read_checkpoint, write_checkpoint
from minitx.training.checkpoints import load_model
from minitx.training.init_from import load_start
from minitx.training.run import train
from minitx.training.trainer import AtomicCheckpointIO

WEIGHT = torch.arange(7.0)
SMALL = {"minitx": {"model": {"_target_": "torch.nn.Linear"}, "format": FORMAT}, "state_dict": {"weight": WEIGHT}}


@pytest.fixture
def path(tmp_path):
    """A small checkpoint."""
    write_checkpoint(SMALL, tmp_path / "last.ckpt")
    return tmp_path / "last.ckpt"


def test_what_is_written_is_read_by_us_and_by_other_programs(path):
    loaded = [read_checkpoint(path), torch.load(path, weights_only=True), torch.load(path, weights_only=True, mmap=True)]
    assert all(torch.equal(found["state_dict"]["weight"], WEIGHT) for found in loaded)
    assert sorted(p.name for p in path.parent.iterdir()) == ["last.ckpt"]


def assert_refused(path, *parts):
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(path)
    assert_sentence(caught.value, path, *parts)


def assert_sentence(error, path, *parts):
    text, code = sentence(error)
    assert (text, code) == (str(error), 2) and "\n" not in text
    assert text.startswith(f"ckpt_path={path} ")
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize("percent", [0, 1, 50, 99])
def test_a_file_that_was_cut_short_is_refused(path, percent):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * percent // 100])
    assert_refused(path, "cannot be read as a checkpoint of minitx", "empty" if percent == 0 else "cut short")


def flipped(content, bit):
    return content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def bits_of_records(content):
    """The bits of a zip file that are in a record, and all others: the directory, headers and padding."""
    found = set()
    with zipfile.ZipFile(io.BytesIO(content)) as records:
        for record in records.infolist():
            names = struct.unpack_from("<HH", content, record.header_offset + 26)  # the lengths of its name and of its padding
            start = record.header_offset + 30 + sum(names)
            found.update(range(8 * start, 8 * (start + record.file_size)))
    return sorted(found), sorted({*range(8 * len(content))} - found)


def test_a_flipped_bit_in_a_record_is_refused(path):
    content, path = path.read_bytes(), path.with_name("flipped")  # not *.ckpt: no other one is looked for
    for bit in bits_of_records(content)[0][::5]:
        path.write_bytes(flipped(content, bit))
        assert_refused(path, "damaged")


def test_a_flipped_bit_beside_the_records_is_refused_or_changes_nothing_that_is_read(path):
    """Padding, and the dates of records in the directory, have no meaning."""
    content, path, refused = path.read_bytes(), path.with_name("flipped"), 0
    for bit in bits_of_records(content)[1][::11]:
        path.write_bytes(flipped(content, bit))
        try:
            found = read_checkpoint(path)
        except ConfigError as error:
            assert_sentence(error, path, "damaged")
            refused += 1
        else:
            assert found["minitx"] == SMALL["minitx"] and torch.equal(found["state_dict"]["weight"], WEIGHT)
    assert refused > 100


def test_a_record_that_is_marked_as_a_folder_is_refused(path):
    """torch returns memory that nothing was written to for such a record."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as records:
        start, names = records.start_dir, records.namelist()
    for _ in names:
        one = bytearray(content)
        one[start + 38] ^= 0x10  # the low byte of its external attributes
        path.write_bytes(one)
        assert_refused(path, "damaged", "is marked as a folder")
        start += 46 + sum(struct.unpack_from("<HHH", content, start + 28))
    assert len(names) > 5 and start < len(content)


def of_another_program(path):
    """Files as other programs write them."""
    yield path.write_text("It was a bright cold day in April. " * 9, encoding="utf-8")
    yield save_file({"weight": torch.zeros(3)}, path)
    with path.open("wb") as file:
        yield np.savez(file, weight=np.zeros(3))  # another zip file
    for content in (SMALL["state_dict"], torch.zeros(3), [1], nn.Linear(2, 2), {"minitx": "model"}, {"minitx": {"model": 1}}):
        yield torch.save(content, path)
        yield torch.save(content, path, _use_new_zipfile_serialization=False)


def test_a_file_of_another_program_is_refused(path):
    for _ in of_another_program(path):
        assert_refused(path, "another program wrote it")


def test_a_file_of_another_version_is_refused(path):
    write_checkpoint({**SMALL, "minitx": {**SMALL["minitx"], "format": FORMAT + 1}}, path)
    assert_refused(path, f"format {FORMAT + 1}", "update minitx")
    write_checkpoint({**SMALL, "minitx": {"model": {"embed_dim": 8}, "format": FORMAT}}, path)
    assert_refused(path, "a version of minitx before 0.1 wrote it")


def test_what_is_read_is_what_was_checked_when_a_run_replaces_the_file_meanwhile(path, monkeypatch):
    load = torch.load

    def late(*arguments, **options):
        write_checkpoint({**SMALL, "state_dict": {"weight": -WEIGHT}}, path)
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", late)
    assert torch.equal(read_checkpoint(path)["state_dict"]["weight"], WEIGHT)
    monkeypatch.undo()
    assert torch.equal(read_checkpoint(path)["state_dict"]["weight"], -WEIGHT)


def test_a_checkpoint_has_its_crc_where_a_user_has_switched_it_off_for_torch(path):
    set_crc32_options(False)
    try:
        write_checkpoint(SMALL, path)
        torch.save(SMALL, path.with_name("theirs.ckpt"))
    finally:
        set_crc32_options(True)
    assert torch.equal(read_checkpoint(path)["state_dict"]["weight"], WEIGHT)
    assert_refused(path.with_name("theirs.ckpt"), "does not match its CRC-32")


def test_a_start_reads_the_file_that_is_on_disk(tmp_path, monkeypatch):
    """Also if another file was there before, or a relative path now leads to another folder."""
    for name, weight in {"a": 1.0, "b": 2.0}.items():
        (tmp_path / name).mkdir()
        checkpoint = {"minitx": {**SMALL["minitx"], "tokenizer": None}, "state_dict": {"network.weight": torch.tensor(weight)}}
        write_checkpoint(checkpoint, tmp_path / name / "last.ckpt")
    monkeypatch.chdir(tmp_path / "a")
    assert load_start(InitFrom(path="last.ckpt")).weights["weight"] == 1.0
    monkeypatch.chdir(tmp_path / "b")
    assert load_start(InitFrom(path="last.ckpt")).weights["weight"] == 2.0
    shutil.copy(tmp_path / "a" / "last.ckpt", "last.ckpt")
    assert load_start(InitFrom(path="last.ckpt")).weights["weight"] == 1.0


def test_the_newest_whole_one_is_offered(path):
    best, older = path.with_name("best.ckpt"), path.with_name("older.ckpt")
    for age, name in ((2e9, older), (3e9, best)):
        shutil.copy(path, name)
        os.utime(name, (age, age))
    path.with_name("lost.ckpt").symlink_to("nowhere")
    path.write_bytes(path.read_bytes()[:99])
    assert_refused(path, "cut short", f"resume from the newest intact checkpoint in this folder with ckpt_path={best}")
    path.unlink()
    assert_refused(path, "does not exist", f"ckpt_path={best}")
    assert_refused(path.parent, "is a folder", f"ckpt_path={best}")
    best.write_bytes(b"")
    assert_refused(path, f"ckpt_path={older}")
    older.unlink()
    with pytest.raises(ConfigError, match=r"best.ckpt cannot be read[^;]*$"):
        read_checkpoint(best)


# --- writing


def test_a_full_disk_keeps_the_checkpoint_before_and_the_run_goes_on_from_it(make_config, tmp_path, monkeypatch):
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    train(make_config(trainer__ckpt_every=3), tmp_path / "run")
    before, save = last.read_bytes(), torch.save

    def fails(checkpoint, file):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(CheckpointError, match=r"could not be written: No space left on device$"):  # there is no earlier one
        write_checkpoint(SMALL, tmp_path / "last.ckpt")
    longer = make_config(trainer__ckpt_every=3, trainer__max_steps=9, ckpt_path=str(last))
    with pytest.raises(
        CheckpointError, match=r"could not be written: No space left on device; the previous checkpoint is intact"
    ):
        train(longer, tmp_path / "run")
    assert last.read_bytes() == before
    assert sorted(p.name for p in last.parent.iterdir()) == ["best.ckpt", "last.ckpt"]
    (last.parent / "last.ckpt.part").write_bytes(b"half of it")  # as a killed save leaves it
    (last.parent / "best.ckpt.part").write_bytes(b"")
    monkeypatch.setattr(torch, "save", save)
    assert train(longer, tmp_path / "run")["steps"] == 9
    assert sorted(p.name for p in last.parent.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_two_weights_of_a_checkpoint_are_not_loaded_into_one_tensor_that_a_model_shares(make_config, tmp_path):
    train(make_config(trainer__max_steps=1, trainer__ckpt_every=1, model__tie_embeddings=False), tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    tied = dataclasses.replace(load_model(path)[0].config, tie_embeddings=True)
    said = r"embeddings\.token\.weight and head\.weight share a tensor in the model, but differ in the weights"
    with pytest.raises(ConfigError, match=said):
        load_model(path, model=DecoderLM(tied))
    with pytest.raises(ConfigError, match=rf"^init_from\.path=\S+ does not match the model: {said}"):
        train(make_config(init_from__path=str(path)), tmp_path / "next")
    assert not (tmp_path / "next").exists()


class Noted(nn.Linear):
    """A layer with extra state, which is no tensor."""

    def get_extra_state(self):
        return None

    def set_extra_state(self, state):
        pass


def test_a_tensor_with_two_names_is_compared_in_the_precision_of_the_model_and_other_state_is_left_alone():
    model = nn.Sequential(Noted(2, 2), Noted(2, 2))
    model[1].weight = model[0].weight
    weights = {name: None if value is None else value.bfloat16() for name, value in model.state_dict().items()}
    load_weights(model, {**weights, "0.weight": weights["0.weight"].float()})
    torch.testing.assert_close(model[1].weight.detach(), weights["1.weight"].float())
    with pytest.raises(ValueError, match=r"0\.weight and 1\.weight share a tensor"):
        load_weights(model, {**weights, "0.weight": weights["0.weight"] + 1})


def test_a_checkpoint_is_written_when_the_last_one_is_old(make_config, tmp_path, monkeypatch):
    saved, now = [], [0.0]
    monkeypatch.setattr("minitx.training.checkpoint_callbacks.time.monotonic", lambda: now[0])
    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", lambda self, found, path, **_: saved.append(found["global_step"]))  # fmt: skip
    on_step = LastCheckpoint.on_step
    monkeypatch.setattr(LastCheckpoint, "on_step", lambda *args: (now.insert(0, now[0] + 24.0), on_step(*args)))
    train(make_config(trainer__ckpt_every=100, trainer__ckpt_minutes=1.0, trainer__max_steps=7), tmp_path / "a")
    assert saved == [3, 6, 7, 7]  # after 72 s and 144 s, and best and last at the end
