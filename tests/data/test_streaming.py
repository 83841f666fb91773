"""Documents that are streamed: full rows, every document once an epoch, and resuming at the place where a run stopped."""

import io
import itertools

import pytest
import torch

from minitx.config import ConfigError, HubDataConfig
from minitx.data import document_stream
from minitx.data.addressing import Address
from minitx.data.documents import load_documents
from minitx.data.load import load_task
from minitx.data.module import DataModule
from minitx.data.tokenizers import fingerprint, train_tokenizer

pytestmark = pytest.mark.usefixtures("offline_datasets")
DOCUMENTS = [f"{n}{'abc' * (n % 13)}" for n in range(211)]


@pytest.fixture
def folder(tmp_path):
    """Five files of documents, with blank lines between."""
    (tmp_path / "set").mkdir()
    for part in range(5):
        (tmp_path / "set" / f"{part}.txt").write_text("\n\n".join(DOCUMENTS[part * 43 : part * 43 + 43]))
    return str(tmp_path / "set")


def config(path, **values):
    path = path if path.endswith("txt") else f"{path}/*.txt"
    return HubDataConfig(**{"path": path, "tokenizer": "char", "context_len": 29, "streaming": True, "val_rows": 17, **values})


def module(path, *, seed=0, max_steps=40, batch_size=4, accumulate=1, **values):
    task = load_task(config(path, **values))
    return DataModule(task, batch_size=batch_size, seed=seed, max_steps=max_steps, accumulate=accumulate)


def all_same(some, others):
    assert len(some) == len(others)
    return all(torch.equal(one[key], other[key]) for one, other in zip(some, others, strict=True) for key in one)


def documents_of(task, batches):
    """The documents of full rows, in order: the end mark stands before each."""
    text = "".join(task.tokenizer.decode(row) for batch in batches for row in batch["input_ids"])
    return text.split("<eos>")[1:]


def test_rows_are_full_and_all_labels_count(folder):
    batches = list(module(folder).train_dataloader())
    assert len(batches) == 40
    for batch in batches:
        assert batch["input_ids"].shape == (4, 29) and (batch["labels"] != -100).all() and batch["num_targets"] == 4 * 29
        inside = batch["document_ids"][:, 1:] == batch["document_ids"][:, :-1]
        assert torch.equal(batch["input_ids"][:, 1:][inside], batch["labels"][:, :-1][inside])
        assert (batch["document_ids"][:, 0] == 0).all()
    assert "document_ids" not in next(iter(module(folder, packing=False).train_dataloader()))


def test_an_epoch_has_every_document_but_those_of_validation_once(folder):
    data = module(folder, max_steps=100)
    found = documents_of(data.task, data.train_dataloader())
    assert sorted(found[: 211 - 17]) == sorted(DOCUMENTS[17:])
    assert sorted(found[211 - 17 : 2 * (211 - 17)]) == sorted(DOCUMENTS[17:]), "the second epoch"
    assert found[: 211 - 17] != found[211 - 17 : 2 * (211 - 17)]


def test_validation_is_the_first_documents_or_a_file_of_its_own(folder, write_text):
    alone = load_task(config(folder, context_len=53))
    rows = [alone.tokenizer.decode(row["input_ids"]) for row in (alone.val[i] for i in range(len(alone.val)))]
    assert sorted(text for row in rows for text in row.split("<eos>")[1:]) == sorted(DOCUMENTS[:17])
    given = load_task(config(folder, val_path=write_text("one\ntwo\n" * 30, "val.txt")))
    assert sum(len(given.val[i]["labels"]) for i in range(len(given.val))) == 17 * 4
    found = documents_of(given, DataModule(given, batch_size=4, max_steps=60).train_dataloader())
    assert sorted(found[:211]) == sorted(DOCUMENTS)


@pytest.mark.parametrize(("stop", "accumulate"), [(0, 1), (14, 1), (3, 2), (40, 2)])
def test_a_resumed_stream_goes_on_where_it_stopped(folder, stop, accumulate):
    whole = list(module(folder, accumulate=accumulate).train_dataloader())
    first = module(folder, accumulate=accumulate).train_dataloader()
    seen = list(itertools.islice(first, stop * accumulate + (accumulate > 1 and stop < 40)))  # or in the midst of a step
    state = first.state_dict()
    assert state["step"] == stop
    rest = module(folder, accumulate=accumulate).train_dataloader()
    stored = io.BytesIO()
    torch.save(state, stored)
    rest.load_state_dict(torch.load(io.BytesIO(stored.getvalue()), weights_only=True))
    assert all_same(seen[: stop * accumulate] + list(rest), whole)


def test_ranks_share_the_documents_of_an_epoch(folder):
    world = 7
    data = module(folder, batch_size=world)
    found = []
    for rank in range(world):
        source = data.train_source(world)
        found.append(documents_of(data.task, [source[Address(step, rank=rank)] for step in range(10)])[:-1])
    assert all(found)
    assert sum(map(len, found)) == len(set(itertools.chain(*found))), "no document is read by two"


def test_the_state_of_several_processes_has_the_place_of_each(folder, monkeypatch):
    sources = [module(folder).train_source(2) for _ in range(2)]
    for rank, step in itertools.product(range(2), range(3)):
        sources[rank][Address(step, rank=rank)]
    own = [source.state_dict(3)["stream"] for source in sources]

    def gather(found, places):
        found[:] = [{rank: tuple(places[0])} for rank, places in enumerate(own)]

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    state = {"step": 3, **sources[0].state_dict(3)}
    assert state["stream"] == own[0] + own[1]
    for rank, source in enumerate(sources):
        resumed = module(folder).train_source(2)
        resumed.load_state_dict(state)
        assert all_same([resumed[Address(3, rank=rank)]], [source[Address(3, rank=rank)]])
    with pytest.raises(ConfigError, match=r"2 processes"):
        module(folder).train_source(3).load_state_dict(state)


def test_a_stream_takes_a_given_tokenizer_or_learns_one(folder, tmp_path, monkeypatch):
    given = train_tokenizer("char", ["abc0123456789"], marks=("eos",))
    task = load_documents(config(folder), tmp_path, given)
    assert task.tokenizer is given and task.model_fields == {"vocab_size": given.vocab_size}
    read, not_blank = [], document_stream.not_blank

    def noted(texts, column):
        return not_blank((read.append(text) or text for text in texts), column)

    with monkeypatch.context() as patch:  # a tokenizer of the config is known, too: one document shows that there are any
        patch.setattr(document_stream, "not_blank", noted)
        given.save(tmp_path / "tokenizer.json")
        task = load_task(config(folder, tokenizer=str(tmp_path / "tokenizer.json"), val_rows=7))
    assert fingerprint(task.tokenizer) == fingerprint(given) and len(read) < 20  # with the blank lines between
    assert set(load_task(config(folder)).tokenizer.characters) == set("abc0123456789")
    assert load_task(config(folder, tokenizer="bpe", bpe_vocab_size=300)).tokenizer.vocab_size > 257


def test_too_few_documents_and_a_checkpoint_without_a_place_are_refused(folder, write_text):
    with pytest.raises(ConfigError, match=r"data\.val_rows="):
        load_task(config(folder, val_rows=211))
    with pytest.raises(ConfigError, match="no documents"):
        module(write_text("a\nb\nc\nd", "few.txt"), val_rows=3).train_source(4)[Address(0)]
    with pytest.raises(ConfigError, match=r"^data\.path="):
        module(folder).train_source()[Address(5)]
