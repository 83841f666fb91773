"""Documents that are streamed: full rows, every document once an epoch, and resuming at the place where a run stopped."""

import io
import itertools
import json

import numpy as np
import pytest
import torch

from minitx.config import ConfigError
from minitx.data import documents, hf
from minitx.data.batches import Address
from minitx.data.datamodule import DataModule
from minitx.data.tokenizer import fingerprint, train_tokenizer

pytestmark = pytest.mark.usefixtures("offline_datasets")
DOCUMENTS = [f"{n}{'abc' * (n % 13)}" for n in range(211)]


@pytest.fixture
def folder(tmp_path):
    """Five files of documents, with blank lines between."""
    (tmp_path / "set").mkdir()
    for part in range(5):
        (tmp_path / "set" / f"{part}.txt").write_text("\n\n".join(DOCUMENTS[part * 43 : part * 43 + 43]))
    return str(tmp_path / "set")


def load(path, **values):
    path = f"{path}/*.txt" if path.endswith("set") else path
    return hf(**{"path": path, "tokenizer": "char", "context_len": 29, "streaming": True, "val_rows": 17, **values})


def module(path, *, seed=0, max_steps=40, batch_size=4, accumulate=1, num_workers=0, **values):
    task = load(path, **values)
    options = {"batch_size": batch_size, "seed": seed, "max_steps": max_steps, "accumulate": accumulate}
    return DataModule(task, num_workers=num_workers, **options)


def all_same(some, others):
    assert len(some) == len(others)
    return all(torch.equal(one[key], other[key]) for one, other in zip(some, others, strict=True) for key in one)


def documents_of(task, batches):
    """The documents of full rows, in order: the end mark stands before each."""
    text = "".join(task.tokenizer.decode(row) for batch in batches for row in batch["input_ids"])
    return text.split("<eos>")[1:]


def test_validation_is_the_first_documents_or_a_file_of_its_own(folder, write_text):
    alone = load(folder, context_len=53)
    rows = [alone.tokenizer.decode(row["input_ids"]) for row in (alone.val[i] for i in range(len(alone.val)))]
    assert sorted(text for row in rows for text in row.split("<eos>")[1:]) == sorted(DOCUMENTS[:17])
    given = load(folder, val_path=write_text("one\ntwo\n" * 30, "val.txt"))
    assert sum(len(given.val[i]["labels"]) for i in range(len(given.val))) == 17 * 4
    found = documents_of(given, DataModule(given, batch_size=4, max_steps=60).train_dataloader())
    assert sorted(found[:211]) == sorted(DOCUMENTS)


def test_rows_are_full_and_those_that_are_cut_by_hand_from_the_shards_in_their_order(folder):
    data = module(folder)
    batches = list(data.train_dataloader())
    assert len(batches) == 40 and "document_ids" not in next(iter(module(folder, packing=False).train_dataloader()))
    order = documents_of(data.task, module(folder, max_steps=100).train_dataloader())  # of more than an epoch
    epoch, second = order[: 211 - 17], order[211 - 17 : 2 * (211 - 17)]
    assert sorted(epoch) == sorted(second) == sorted(DOCUMENTS[17:]), "an epoch has every document but those of validation once"
    assert DOCUMENTS[17:] != epoch != second
    shards = [key for key, _ in itertools.groupby(epoch, key=lambda text: DOCUMENTS.index(text) // 43)]
    assert sorted(shards) == list(range(5)), "each file is read in one piece"
    end, encode = data.task.tokenizer.mark_ids["eos"], data.task.tokenizer.encode
    ids = np.concatenate([np.array([end]), *(np.append(encode(text), end) for text in order)])
    documents = np.repeat(np.arange(len(order)), [len(text) + 1 for text in order])
    for step, batch in enumerate(batches):
        assert batch["num_targets"] == 4 * 29
        for r in range(4):
            at = slice((4 * step + r) * 29, (4 * step + r + 1) * 29)
            assert batch["input_ids"][r].tolist() == ids[at].tolist()
            assert batch["labels"][r].tolist() == ids[at.start + 1 : at.stop + 1].tolist()
            assert batch["document_ids"][r].tolist() == (documents[at] - documents[at.start]).tolist()


@pytest.fixture
def any_folder(folder, tmp_path):
    """The same documents as files of another kind."""
    from datasets import Dataset

    def make(suffix):
        if suffix == "txt":
            return folder
        for part in range(5):
            table = Dataset.from_dict({"text": DOCUMENTS[part * 43 : part * 43 + 43]})
            writer = {"jsonl": table.to_json, "parquet": table.to_parquet}[suffix]
            writer(str(tmp_path / "set" / f"{part}.{suffix}"))
        return f"{folder}/*.{suffix}"

    return make


STOPS = [(0, 1, 0, "txt"), (14, 1, 0, "txt"), (3, 2, 0, "txt"), (40, 2, 0, "txt"), (11, 1, 0, "jsonl")]
STOPS += [(11, 1, 0, "parquet"), (0, 1, 2, "txt")]
STOPS += [pytest.param(*stop, marks=pytest.mark.slow) for stop in ((7, 1, 2, "txt"), (5, 3, 2, "txt"), (13, 1, 3, "parquet"))]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("stop", "accumulate", "num_workers", "suffix"), STOPS)
def test_a_resumed_stream_goes_on_where_it_stopped(any_folder, stop, accumulate, num_workers, suffix):
    def ready():
        options = {"accumulate": accumulate, "num_workers": num_workers, "batch_size": 4 * accumulate}
        return module(any_folder(suffix), **options).train_dataloader()

    whole = list(ready())
    run = iter(first := ready())
    seen = list(itertools.islice(run, stop * accumulate + (accumulate > 1 and stop < 40)))  # or in the midst of a step
    state = first.state_dict()
    assert state["step"] == stop
    rest, stored = ready(), io.BytesIO()
    torch.save(state, stored)
    rest.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    assert all_same(seen[: stop * accumulate] + list(rest), whole)


@pytest.mark.parametrize(("world", "num_workers"), [(1, 2), (1, 3), (2, 1), (3, 1), (5, 1), (7, 1), (2, 3)])
def test_ranks_and_workers_share_the_documents_of_an_epoch(folder, world, num_workers):
    data, found = module(folder, batch_size=world, num_workers=num_workers), []
    for rank, part in itertools.product(range(world), range(num_workers)):
        source = data.train_source(world)
        batches = [source[Address(step, rank=rank)] for step in range(part, 10, num_workers)]
        found.append(documents_of(data.task, batches)[:-1])
    assert all(found)
    assert sum(map(len, found)) == len(set(itertools.chain(*found))), "no document is read by two"


def test_the_state_of_several_processes_has_the_place_of_each(folder, monkeypatch):
    sources = [module(folder).train_source(2) for _ in range(2)]
    read = [[source[Address(step, rank=rank)]["position"] for step in range(3)] for rank, source in enumerate(sources)]
    positions = [dict(of_rank[-1:]) for of_rank in read]
    own = [sources[rank].state_dict(rank, positions[rank])["stream"][0] for rank in range(2)]
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda found, mine: found.__setitem__(slice(None), own))
    state = {"step": 3, **sources[0].state_dict(0, positions[0])}
    assert state["stream"] == own
    for rank, source in enumerate(sources):
        resumed = module(folder).train_source(2)
        resumed.load_state_dict(state)
        one, other = resumed[Address(3, rank=rank)], source[Address(3, rank=rank)]
        assert one.pop("position") == other.pop("position") and all_same([one], [other])
    for wrong in (module(folder).train_source(3), module(folder, num_workers=2).train_source(2)):
        with pytest.raises(ConfigError, match="same number of processes"):
            wrong.load_state_dict(state)


def test_rows_without_text_are_told_once(write_text, caplog):
    rows = [json.dumps({"text": text}) for text in ["one two", None, "three four", "", *DOCUMENTS]]
    data = module(write_text("\n".join(rows), "null.jsonl"), val_rows=1, max_steps=9)
    with caplog.at_level("INFO"):
        list(data.train_dataloader())
    assert len([message for message in caplog.messages if "without text" in message]) == 1


def test_a_stream_takes_a_given_tokenizer_or_learns_one(folder, tmp_path, monkeypatch):
    given = train_tokenizer("char", ["abc0123456789"], marks=("eos",))
    task = load(folder, tokenizer=given)
    end = given.mark_ids["eos"]
    assert task.tokenizer is given and task.model_fields == {"vocab_size": given.vocab_size, "eos_id": end}
    read, not_blank = [], documents.not_blank

    def noted(texts, column):
        return not_blank((read.append(text) or text for text in texts), column)

    with monkeypatch.context() as patch:  # a tokenizer of the config is known, too: one document shows that there are any
        patch.setattr(documents, "not_blank", noted)
        given.save(tmp_path / "tokenizer.json")
        task = load(folder, tokenizer=str(tmp_path / "tokenizer.json"), val_rows=7)
    assert fingerprint(task.tokenizer) == fingerprint(given) and len(read) < 20  # with the blank lines between
    assert set(load(folder).tokenizer.characters) == set("abc0123456789")
    assert load(folder, tokenizer="bpe", bpe_vocab_size=300).tokenizer.vocab_size > 257


def test_too_few_documents_and_a_checkpoint_without_a_place_are_refused(folder, write_text):
    with pytest.raises(ConfigError, match=r"data\.val_rows="):
        load(folder, val_rows=211)
    with pytest.raises(ConfigError, match="no documents"):
        module(write_text("a\nb\nc\nd", "few.txt"), val_rows=3).train_source(4)[Address(0, rank=1)]
    with pytest.raises(ConfigError, match=r"^data\.path="):
        module(folder).train_source()[Address(5)]
