"""Runs: command lines of ``train.py`` with tiny models, and what the files of a run must hold.

A point is a list of words of the command line. It is trained in this process for six steps, or in one, two or four others
(``several.py``). The oracles read the files of the run and what a callback of the user's recorded, in all processes together.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import csv
import functools
import gc
import json
import logging
import math
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:  # as a program
    sys.path.insert(0, ROOT)

from minitx.training.metrics_csv import OF_THE_MACHINE  # noqa: E402
from tests.lattice import engine, inside, run_parts, several  # noqa: E402
from tests.lattice.engine import KnownFault, Lattice, Oracle, Point, Refusal, matches  # noqa: E402
from tests.lattice.run_parts import PowerCut, Record  # noqa: E402

STEPS = 6
POEM = "Once upon a midnight dreary, while I pondered, weak and weary,\nOver many a quaint and curious volume\n"
OF_OTHERS = range(100, 120)
"""Numbers in the rows of the files for validation. Documents are written backwards there."""

PARTS = "tests.lattice.run_parts"
CALLBACKS = "lightning.pytorch.callbacks"

# --- the words of each value: HOME is the folder of prepared data

RECORDER = f"callbacks.recorder._target_={PARTS}.Recorder"
BASE = (
    "seed=3 data.batch_size=12 optimizer.lr=0.01 callbacks.progress=false trainer.accelerator=cpu trainer.threads=1 "
    f"trainer.max_steps={STEPS} trainer.ckpt_every=2 trainer.val_batches=2 trainer.val_batch_size=4 " + RECORDER
)
CACHED = "data.cache_dir=HOME/cache"
DATA = {
    "text": f"data=text data.path=HOME/text.txt data.context_len=7 {CACHED}",
    "drawn": "data=kv_lookup data.num_keys=5 data.num_values=3 data.num_pairs=4 data.val_size=8",
    "noisy": f"data._target_={PARTS}.noisy",
    "packed": f"data=hf data.path=HOME/documents.jsonl data.context_len=15 {CACHED}",
    "padded": f"data=hf data.path=HOME/documents.jsonl data.context_len=15 data.packing=false {CACHED}",
    "stream": f"data=hf data.path=HOME/documents.jsonl data.context_len=15 data.streaming=true data.val_rows=3 {CACHED}",
    "masked": f"data=masked data.path=HOME/text.txt data.context_len=7 {CACHED}",
    "classify": "data=classify data.path=HOME/table.csv",
    "pairs": "data=pairs data.path=HOME/pairs.tsv data.test_path=HOME/test.tsv",
    "pictures": "data=digits",
    "chat": "data=chat data.path=HOME/chats.jsonl data.context_len=31",
    "module": f"data._target_={PARTS}.OwnModule data.batch_size=SLICE",
}
OTHERS = {
    **dict.fromkeys(("packed", "padded", "stream"), "data.val_path=HOME/others.jsonl"),
    "classify": "data.val_path=HOME/others.csv",
    "pairs": "data.path=HOME/pairs.en data.target_path=HOME/pairs.de data.val_path=HOME/others.en "
    "data.val_target_path=HOME/others.de data.test_path=HOME/test.en data.test_target_path=HOME/test.de",
    "chat": "data.val_path=HOME/other_chats.jsonl",
}
"""Words for validation rows of a file of their own. Sentence pairs are then in two files of lines, which end in two ways."""

TORN = "data.path=HOME/torn.en data.target_path=HOME/pairs.de data.test_path=null"
"""Sentence pairs in two files of lines, with a carriage return within two lines of one of them."""

WITH_TOKENIZER = ("text", "packed", "padded", "stream", "masked", "classify", "pairs", "chat")
SHAPES = {
    "masked": "model.architecture=encoder",
    "classify": "model.architecture=encoder model.head=sequence",
    "pairs": "model.architecture=encoder_decoder",
    "pictures": "model.architecture=vision model.head=sequence model.image_size=8 model.patch_size=4",
}
SIZES = "model.embed_dim=8 model.num_heads=2 model.num_layers=2 model.ffn_dim=16 model.max_len=128 model.init=lecun"
NETWORKS = {"ours": SIZES, "own": f"model._target_={PARTS}.OwnModel", "hf": "model=hf"}
NETWORKS["normed"] = f"model._target_={PARTS}.Normed"
NETWORKS["lora"] = "model=hf model.adopt=true model.lora=2"
OF_TRANSFORMERS, OF_THE_TEST = ("hf", "lora"), ("own", "normed")
OPTIMIZERS = {name: f"optimizer={name} optimizer.weight_decay=0.1" for name in ("adamw", "sgd", "muon")}
OPTIMIZERS |= {name: f"optimizer._target_=torch.optim.{name}" for name in ("Adam", "NAdam", "SGD")}
OPTIMIZERS["two_modes"] = f"optimizer._target_={PARTS}.TwoModes"
RULES = {
    "none": "",
    "frozen": 'optimizer.rules=[{match: "token|patch_proj", trainable: false}]',
    "factor": 'optimizer.rules=[{match: "q_proj|head", lr: "head_dim^-0.5", weight_decay: 0}]',
}
SCHEDULES = {
    "cosine": "schedule=cosine schedule.warmup_steps=2",
    "constant": "schedule=constant",
    "StepLR": "schedule._target_=torch.optim.lr_scheduler.StepLR schedule.step_size=2",
    "plateau": "schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau schedule.patience=0",
}
STOP_AT = "trainer.stop_at={metric: train_loss, value: 1e9, window: 4, extra_steps: 1}"
CUTS = (*run_parts.SIGNALS, "crash_before", "crash_inside", "crash_after", "nonfinite")
ENDS = {"max_steps": "", "max_epochs": "trainer.max_epochs=1 trainer.max_steps=8", "stop_at": STOP_AT}
ENDS |= dict.fromkeys(CUTS, "")
ASKED = {
    "none": "",
    "probe": "callbacks.probe.every=2 callbacks.probe.batch_size=3",
    "film": "callbacks.probe.every=2 callbacks.probe.batch_size=3 callbacks.probe.weights_every=2 callbacks.probe.weights_rows=2",
    "samples": "callbacks.samples.every=2 callbacks.samples.max_new_tokens=4",
    "ema": "callbacks=[default,ema] callbacks.ema.decay=0.5",
    "early": "callbacks=[default,early_stopping] callbacks.early_stopping.patience=1 callbacks.early_stopping.min_delta=100",
    "top_k": "callbacks=[default,top_k] callbacks.top_k.save_top_k=2",
    "evaluated": "evaluation.at_end=true evaluation.num_rows=4",
    "tested": "evaluation.test=best",
    "ema_tested": "callbacks=[default,ema] callbacks.ema.decay=0.5 evaluation.test=best",
}
OBJECTIVES = {"plain": "", "smoothed": "objective.label_smoothing=0.1", "chunked": "objective.chunk_tokens=5"}
OBJECTIVES["own"] = f"objective._target_={PARTS}.own_objective"
OBJECTIVES["smoothed_chunked"] = f"{OBJECTIVES['smoothed']} {OBJECTIVES['chunked']}"
PRECISIONS = {name: f"trainer.precision={name}" for name in ("32-true", "64-true", "bf16-mixed", "bf16-true")}
SOURCE = "init_from.path=HOME/sources/NAME/checkpoints/last.ckpt"
STARTS = {"new": "", "init_from": SOURCE, "folded": f"{SOURCE} init_from.fold_scale=true model.scale=unscaled"}
PLACES = {"one": "", "ddp_cpu": "trainer=ddp_cpu", "fsdp": "trainer.strategy=sharded"}
PLACES["fsdp_named"] = "trainer.strategy=sharded trainer.shard=[Linear]"
PLACES["ddp_unused"] = "trainer.strategy=ddp_find_unused_parameters_true"
PLACES["pretended"] = "trainer.accelerator=pretend"  # tests/pretend.py
OF_THE_USER = {
    "none": "",
    "callback": f"+callbacks.counter._target_={PARTS}.Counter",
    "averager": f"+callbacks.averager._target_={PARTS}.Averager",
    "looker": f"+callbacks.looker._target_={PARTS}.Looker",
    "logger": f"+logger.diary._target_={PARTS}.Diary",
}
OPTIONS = {
    "none": "",
    "overfit": "trainer.overfit=true",
    "deterministic": "trainer.deterministic=true",
    "instruments": "trainer.profiler._target_=lightning.pytorch.profilers.SimpleProfiler trainer.peak_tflops=0.001 "
    "trainer.flush_denormal=true trainer.extra.detect_anomaly=true",
    "minutes": "trainer.ckpt_minutes=1e-9",
    "monitor": "trainer.monitor=train_accuracy trainer.monitor_mode=max",
    "all_rows": "trainer.val_batches=null trainer.val_batch_size=null",
}
AXES: dict[str, dict[str, str]] = {
    "data": DATA,
    "network": NETWORKS,
    "files": {"one": "", "others": "", "torn": TORN},
    "accumulate": {"1": "", "2": "trainer.accumulate=2", "3": "trainer.accumulate=3"},
    "precision": PRECISIONS,
    "compile": {"no": "", "yes": "trainer.compile=true"},
    "objective": OBJECTIVES,
    "optimizer": OPTIMIZERS,
    "rules": RULES,
    "schedule": SCHEDULES,
    "ends": ENDS,
    "asked": ASKED,
    "start": STARTS,
    "workers": {"0": "", "2": "data.num_workers=2", "pickled": "data.num_workers=1"},
    "place": PLACES,
    "processes": {number: f"trainer.devices={number}" for number in ("1", "2", "4")},
    "late": dict.fromkeys(("none", "writing", "reading"), ""),  # the first process writes late, or the others read late
    "user": OF_THE_USER,
    "dropout": {"no": "", "yes": "model.dropout=0.2"},
    "clip": {"off": "", ".5": "trainer.clip=0.5"},
    "checkpointing": {"no": "", "yes": "model.checkpointing=true"},
    "log_every": {"1": "trainer.log_every=1", "3": "trainer.log_every=3"},
    "validation": {"2": "trainer.val_every=2", "3": "trainer.val_every=3", "end": "trainer.val_every=0"},
    "option": OPTIONS,
    "rehearse": {"no": "trainer.rehearse=false", "yes": "trainer.rehearse=true"},
}


@functools.cache
def home() -> Path:
    """A folder with the data and the model of Hugging Face that the points read. It goes when the process ends."""
    from minitx.data.tokenizer import train_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="runs"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "text.txt").write_text((POEM * 5)[:475], encoding="utf-8")
    documents = [POEM[i : i + 5 + 7 * i % 19] for i in range(80)]
    write_lines(folder / "documents.jsonl", *(json.dumps({"text": text}) for text in documents))
    write_lines(folder / "others.jsonl", *(json.dumps({"text": text[::-1]}) for text in documents[:20]))
    words = re.findall(r"\w+", POEM)
    for name, (numbers, labels) in {
        "table": (range(60), "ab"),
        "source": (range(60), "0ab"),
        "others": (OF_OTHERS, "ab"),
    }.items():
        rows = [f"{words[i % 17]} {words[i % 13]} {i},{labels[i % len(labels)]}" for i in numbers]
        write_lines(folder / f"{name}.csv", "text,label", *rows)
    for name, numbers in {"pairs": range(60), "test": range(60, 70), "others": OF_OTHERS}.items():
        write_lines(folder / f"{name}.tsv", *(f"{i}\t{i * 7 % 97}" for i in numbers))
        write_lines(folder / f"{name}.en", *(f"{i}\r" for i in numbers))
        write_lines(folder / f"{name}.de", *(str(i * 7 % 97) for i in numbers))
    for name, numbers in {"chats": range(60), "other_chats": OF_OTHERS}.items():
        chats = [[{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": str(i * 7)}] for i in numbers]
        write_lines(folder / f"{name}.jsonl", *(json.dumps({"messages": chat}) for chat in chats))
    write_lines(folder / "torn.en", *("5\r5" if i in (20, 30) else str(i) for i in range(60)))
    train_tokenizer("char", [POEM + "0123456789:"], marks=["pad", "bos", "eos", "cls"]).save(folder / "tokenizer.json")
    for name, marks in NAMED.items():
        (folder / name).write_text(json.dumps(marks), encoding="utf-8")
    return folder


NAMED = {
    "tokenizer_config.json": {"bos_token": {"content": "<eos>"}, "eos_token": "<bos>"},
    "special_tokens_map.json": {"eos_token": "<cls>", "pad_token": {"content": "<cls>"}, "cls_token": "<pad>"},
}
"""The marks that the folder of the tokenizer names. None is the one that has this role by its name; the first file has priority."""

MARKS = {"begin": "<eos>", "end": "<bos>", "class": "<pad>", "pad": "<cls>"}
"""The marks of this tokenizer that begin and end a document, begin a text to be classified, and stand for padding."""


def write_lines(path: Path, *lines: str) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@functools.cache
def llama(kind: str, dropout: float) -> Path:
    """Makes a model of Hugging Face, and returns its folder. A classifier numbers the labels b and a."""
    import transformers

    folder = home() / f"{kind}_{dropout}"
    ids = json.loads((home() / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    marks = {"bos_token_id": ids[MARKS["begin"]], "eos_token_id": ids[MARKS["end"]], "pad_token_id": ids[MARKS["pad"]]}
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    labels = {"id2label": dict(enumerate(FOLDERS_LABELS)), "label2id": {name: i for i, name in enumerate(FOLDERS_LABELS)}}
    config = transformers.LlamaConfig(
        vocab_size=len(ids), **sizes, **marks, **labels, initializer_range=0.3, attention_dropout=dropout
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        getattr(transformers, kind)(config).save_pretrained(folder)
    for name in ("tokenizer.json", *NAMED):
        shutil.copy(home() / name, folder)
    return folder


FOLDERS_LABELS, STORED_LABELS = "ba", "0ab"
"""The labels of a head in its order: of the folder of a classifier, and of the checkpoint that a classifier starts from."""


# --- the subject


@dataclass
class Finished:
    """A run: its folder, ``result.json``, what its recorder saw, and what it changed in this process."""

    folder: Path
    result: dict[str, Any]
    record: Record | None
    changed: dict[str, Any]

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    def rows(self) -> list[dict[str, float | None]]:
        """The rows of ``metrics.csv``."""
        with (self.folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            return [{name: float(text) if text else None for name, text in row.items()} for row in csv.DictReader(file)]

    def column(self, name: str) -> dict[int, float]:
        """The values of a column of ``metrics.csv`` by step, without empty cells."""
        return {int(row["step"] or 0): value for row in self.rows() if (value := row.get(name)) is not None}


@dataclass
class Cut:
    """A run that was cut: how, its folder, the name of the error that ended it ("" for none), and what it changed."""

    how: str
    folder: Path
    error: str
    changed: dict[str, Any]


_CUTS: dict[tuple[str, ...], Cut] = {}
"""The latest run of this process that was cut."""

_FINISHED: OrderedDict[tuple[str, ...], Finished] = OrderedDict()
"""The latest whole runs of this process by their words: several oracles read one run."""

_KEPT = 6


class Run:
    """The subject of a point: its command line, which can be run whole, or cut and resumed."""

    def __init__(self, point: Point) -> None:
        self.point = point

    def words(self, **changes: str) -> list[str]:
        """The command line, with other values on some axes."""
        point = {**self.point, **changes}
        network, data, dropout = point["network"], point["data"], point["dropout"] == "yes"
        lines = [BASE, *(values[point[axis]] for axis, values in AXES.items())]
        if network == "ours":
            lines.append(SHAPES.get(data, ""))
            if self.point["place"] == "fsdp_named" and data not in TIED:
                lines.append("model.tie_embeddings=false")
        elif network in OF_TRANSFORMERS:
            kind = "LlamaForSequenceClassification" if data == "classify" else "LlamaForCausalLM"
            lines.append(f"model.path={llama(kind, 0.1 if dropout else 0.0)}")
        if data in WITH_TOKENIZER:
            lines.append(f"data.tokenizer={'HOME/tokenizer.json' if network in OF_TRANSFORMERS else 'char'}")
        if point["files"] == "others":
            lines.append(OTHERS[data])
        if point["start"] != "new":
            source(data, network)
        line = " ".join(lines).replace("NAME", f"{data}-{network}").replace("HOME", str(home()))
        line = line.replace("SLICE", str(12 // (int(point["accumulate"]) * int(point["processes"]))))
        if network in OF_TRANSFORMERS:  # its config has the dropout
            line = line.replace("model.dropout=0.2", "")
        return list({word.partition("=")[0]: word for word in _words_of(line)}.values())  # the last word of a key

    def whole(self, **changes: str) -> Finished:
        """The run from its first step to its last."""
        words = tuple(self.words(**changes))
        key = (*words, *({**self.point, **changes}[axis] for axis in ("place", "processes", "workers", "late")))
        if key not in _FINISHED:
            _FINISHED[key] = self._train(list(words), _new_folder(), **changes)
        _FINISHED.move_to_end(key)
        while len(_FINISHED) > _KEPT:
            shutil.rmtree(_FINISHED.popitem(last=False)[1].folder.parent, ignore_errors=True)
        return _FINISHED[key]

    def cut(self, how: str = "") -> Cut:
        """The run until ``Hit`` ends it: as the point says, or by SIGTERM."""
        how = how or (self.point["ends"] if self.point["ends"] in CUTS else "term")
        words = [*self.words(), f"+callbacks.hit._target_={PARTS}.Hit", f"+callbacks.hit.how={how}"]
        key = (*words, *(self.point[axis] for axis in ("place", "processes", "workers", "late")))
        if key not in _CUTS:
            for old in _CUTS.values():
                shutil.rmtree(old.folder.parent, ignore_errors=True)
            _CUTS.clear()
            _CUTS[key] = self._cut(how, words, _new_folder())
        return _CUTS[key]

    def _cut(self, how: str, words: list[str], folder: Path) -> Cut:
        before, name, changed = state_of_the_process(), "", {}
        try:
            changed = self._train(words, folder).changed
        except PowerCut:
            name = "PowerCut"
        except several.EndedError as error:
            name, changed = error.name, error.changed
        except Exception as error:
            name = type(error).__name__
            if name not in ("StoppedError", "NonFiniteError"):
                raise
        return Cut(how, folder, name, changes_between(before, state_of_the_process()) | changed)

    @contextlib.contextmanager
    def resumed(self, cut: Cut, **changes: str) -> Iterator[Finished]:
        """A run that was cut, resumed from its last checkpoint in its folder and trained to the end. Then the folder is as before."""
        kept = cut.folder.with_name("kept")
        shutil.copytree(cut.folder, kept)
        try:
            yield self._train([*self.words(**changes), "ckpt_path=last"], cut.folder, **changes)
        finally:
            shutil.rmtree(cut.folder)
            kept.rename(cut.folder)

    def _train(self, words: list[str], folder: Path, **changes: str) -> Finished:
        point = {**self.point, **changes}
        del run_parts.RECORDS[:]
        before = state_of_the_process()
        if point["place"] == "one":
            with _surroundings(point):
                result = inside.train_by(words, folder)
            record = run_parts.RECORDS[-1] if run_parts.RECORDS else None
            return Finished(folder, result, record, changes_between(before, state_of_the_process()))
        result, record, changed = several.train(int(point["processes"]), words, folder, point)
        if record is not None and record.start is None and "ckpt_path=last" not in words:
            of_one = self.whole(**{**changes, **ALONE}).record
            assert of_one is not None
            record.start = of_one.start
        return Finished(folder, result, record, changed)


def _words_of(line: str) -> list[str]:
    """The words of a line. A space inside of brackets separates nothing."""
    words, depth = [""], 0
    for letter in line:
        depth += (letter in "[{") - (letter in "]}")
        if letter == " " and not depth:
            words.append("")
        else:
            words[-1] += letter
    return [word for word in words if word]


def _new_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=home())) / "run"


@functools.cache
def source(data: str, network: str) -> None:
    """Trains two steps of the plain point, whose weights others start from. A classifier has one more label."""
    point = {**RUNS.plain, "data": data, "network": network}
    other = [f"data.path={home() / 'source.csv'}"] if data == "classify" else []
    inside.train_by([*Run(point).words(), *other, "trainer.max_steps=2"], home() / "sources" / f"{data}-{network}")


@contextlib.contextmanager
def _surroundings(point: Point) -> Iterator[None]:
    """What the words of a point do not say: a compiler that generates no code, workers that get the data pickled, and short reads of a stream.

    Such workers are those of macOS and Windows. They come from a server that has imported torch once. A stream is read in a few
    documents at a time, so that processes are at different places of it.
    """
    with contextlib.ExitStack() as stack:
        if point["compile"] == "yes":
            stack.enter_context(mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager")))
            stack.callback(torch.compiler.reset)
        if point["data"] == "stream":
            stack.enter_context(mock.patch("minitx.data.documents.DOCUMENTS_AT_ONCE", 3))
        if point["workers"] == "pickled":
            import tests.training.ranks  # noqa: F401 (what the server imports)

            stack.callback(multiprocessing.set_start_method, multiprocessing.get_start_method(allow_none=True), force=True)
            multiprocessing.set_start_method("forkserver", force=True)
        yield


# --- what a run leaves, and what it must not change

_OF_THE_COMMAND = ("config.yaml", "command.txt")


def left_by(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves but times, its command and its log, by file."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name.startswith(("logs/", "profile", "fit-", "test-")) or name in _OF_THE_COMMAND:
            continue
        if path.suffix == ".ckpt":
            found[name] = _of_checkpoint(path, folder)
        elif path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                found[name] = [_timeless(row) for row in csv.DictReader(file)]
        elif path.suffix == ".jsonl":
            found[name] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        elif path.suffix == ".json":
            found[name] = _timeless(json.loads(path.read_text(encoding="utf-8")))
        else:
            found[name] = path.read_bytes()
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _timeless(each) for name, each in value.items() if name not in OF_THE_MACHINE}
    return value


def _of_checkpoint(path: Path, folder: Path) -> dict[str, Any]:
    """What a checkpoint holds but config and progress, with ``FOLDER`` for the run's folder. ModelCheckpoint does not restore ``current_score``."""
    state = {name: value for name, value in inside.read(path).items() if name not in ("minitx", "loops")}
    return _without(state, str(folder))


def _without(value: Any, folder: str) -> Any:
    if isinstance(value, str):
        return value.replace(folder, "FOLDER")
    if isinstance(value, Mapping):
        return {_without(name, folder): _without(each, folder) for name, each in value.items() if name != "current_score"}
    return [_without(each, folder) for each in value] if isinstance(value, list | tuple) else value


def first_difference(one: Any, other: Any, place: str = "") -> str | None:
    """The first place at which two values differ, bit by bit, or None."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        return None if same else f"{place}: tensors differ"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            only = [sorted(map(str, keys)) for keys in (one.keys() - other.keys(), other.keys() - one.keys())]
            return f"{place}: only the first has {only[0]}, only the second {only[1]}"
        parts = ((one[key], other[key], f"{place}/{key}") for key in one)
    elif isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f"{place}: {len(one)} and {len(other)} entries"
        parts = ((a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
    else:
        same = one == other or (one != one and other != other)
        return None if same else f"{place}: {str(one)[:70]} and {str(other)[:70]}"
    return next((difference for part in parts if (difference := first_difference(*part))), None)


def state_of_the_process() -> dict[str, Any]:
    """What a run could change for the whole process."""
    loggers = ("root", "minitx", "lightning.pytorch", "lightning.fabric", "torch.distributed.tensor")
    return {
        "random state of torch": torch.get_rng_state(),
        "random state of NumPy": str(np.random.get_state()),
        "random state of Python": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cuDNN": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "matmul": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "denormal": bool(torch.tensor([1e-39]) * 1 != 0),
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "signals": [
            signal.getsignal(number) for number in (*(number for number, _ in run_parts.SIGNALS.values()), signal.SIGCHLD)
        ],
        "levels": {name: logging.getLogger(name).level for name in loggers},
        "handlers": {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).propagate) for name in loggers},
        "warnings": list(warnings.filters),
        "hook": sys.excepthook,
        "temporary": tempfile.tempdir,
        "csv": csv.field_size_limit(),
        "collector": gc.isenabled(),
        "start method": multiprocessing.get_start_method(allow_none=True),
    }


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The names of what differs, with both values."""
    return {name: (before[name], after[name]) for name in before if first_difference(before[name], after[name])}


# --- a plain training loop

NOT_FOR_THE_NETWORK = ("labels", "num_targets")
DTYPES = {"32-true": torch.float32, "64-true": torch.float64, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}


@dataclass
class Loop:
    """What a plain loop comes to: losses and gradient norms by step, and weights."""

    losses: dict[int, float]
    norms: dict[int, float]
    weights: dict[str, Tensor]


def logits_of(network: nn.Module, batch: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Logits of a batch. A model of transformers gets each document alone, without masks."""
    inputs = {name: value for name, value in batch.items() if name not in NOT_FOR_THE_NETWORK}
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    if not type(network).__module__.startswith(("transformers.", "peft.")):
        names = {name: inputs[name] for name in inputs if not isinstance(network, run_parts.OwnModel) or name == "input_ids"}
        return network(**names)
    ids, key_mask = inputs["input_ids"], inputs.get("key_mask")
    documents = inputs.get("document_ids", torch.zeros_like(ids))
    rows = []
    for row, own in enumerate(documents):
        real = torch.ones_like(own, dtype=torch.bool) if key_mask is None else key_mask[row].bool()
        if batch["labels"].dim() == 1:
            rows.append(network(input_ids=ids[row, real][None], use_cache=False).logits[0])
            continue
        pieces = [(own == document) & real for document in own[real].unique()]
        logits = [network(input_ids=ids[row, places][None], use_cache=False).logits[0] for places in pieces]
        whole = torch.zeros(len(own), logits[0].shape[-1], dtype=logits[0].dtype)
        for places, part in zip(pieces, logits, strict=True):
            whole = whole.index_put((places,), part)
        rows.append(whole)
    return torch.stack(rows)


def loss_of(logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The sum of the cross-entropy over labels that are not -100, in at least float32."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    flat = logits.flatten(0, -2).to(wide)
    return F.cross_entropy(flat, labels.flatten(), reduction="sum", ignore_index=-100, label_smoothing=smoothing)


def factor_of(schedule: str, step: int, steps: int) -> float:
    """The share of the peak learning rate in a step, counted from 0."""
    if schedule == "constant":
        return 1.0
    if step < 2:
        return (step + 1) / 2
    assert schedule == "cosine", f"factor_of has no formula for schedule={schedule}"
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - 2) / max(1, steps - 2))))


def optimizer_of(point: Point, network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a point by the classes of torch, with the rules of a point applied by hand."""
    name, rules, groups = point["optimizer"], point["rules"], []
    if name in ("Adam", "NAdam", "SGD"):
        return getattr(torch.optim, name)([p for p in network.parameters() if p.requires_grad], lr=0.01)
    for key, parameter in network.named_parameters():
        lr, decay = 0.01, 0.1 if parameter.dim() > 1 else 0.0
        if rules == "frozen" and re.search("token|patch_proj", key):
            parameter.requires_grad_(False)
        if rules == "factor" and re.search("q_proj|head", key):
            lr, decay = 0.01 * head_dim(point) ** -0.5, 0.0
        if parameter.requires_grad:
            groups.append({"params": [parameter], "lr": lr, "weight_decay": decay})
    if name == "adamw":
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    return torch.optim.SGD(groups, momentum=0.9)


def head_dim(point: Point) -> int:
    """The width of a head of our model. A model of others has 1."""
    return 4 if point["network"] == "ours" else 1


def plain_loop(point: Point, finished: Finished, precision: str, shaken: int | None = None) -> Loop:
    """Train the recorded first weights on the recorded batches, with torch alone.

    Args:
        shaken: change every weight in the last bit that a product reads before, by this seed.
    """
    assert finished.record is not None
    dtype, validated = DTYPES[precision], finished.column("val_loss")
    network = copy.deepcopy(finished.record.start).to(dtype).train()
    if shaken is not None:
        _shake(network, shaken, torch.finfo(torch.bfloat16).eps / 2 if precision == "bf16-mixed" else None)
    optimizer = optimizer_of(point, network)
    for group in optimizer.param_groups:
        group["peak"] = group["lr"]
    schedule = {
        "StepLR": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    }.get(point["schedule"], lambda: None)()
    average = (
        AveragedModel(network, avg_fn=get_ema_avg_fn(0.5), use_buffers=True) if point["asked"] in AVERAGED.split("|") else None
    )
    smoothing = 0.1 if "smoothed" in point["objective"] else 0.0
    steps, processes = finished.record.steps(), int(point["processes"])
    planned = planned_steps(point, finished)
    loop = Loop({}, {}, {})
    for step, batches in steps.items():
        targets = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        optimizer.zero_grad()
        total, buffers = 0.0, [_buffers(network)] * processes  # all processes begin a step with those of the first
        for number, batch in enumerate(batches):
            rank = number % processes
            _set_buffers(network, buffers[rank])
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                logits = logits_of(network, batch, dtype)
            loss = loss_of(logits, batch["labels"], smoothing) / targets
            loss.backward()
            total += loss.item()
            buffers[rank] = _buffers(network)
        _set_buffers(network, buffers[0])
        if schedule is None:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor_of(point["schedule"], step, planned)
        trained = [p for p in network.parameters() if p.requires_grad]
        limit = 0.5 if point["clip"] == ".5" else math.inf
        loop.norms[step + 1] = float(nn.utils.clip_grad_norm_(trained, limit))
        loop.losses[step + 1] = total
        optimizer.step()
        if average is not None:
            average.update_parameters(network)
        if point["schedule"] == "StepLR":
            schedule.step()
        elif point["schedule"] == "plateau" and step + 1 in validated:
            schedule.step(validated[step + 1])
    final: nn.Module = network if average is None else average.module
    loop.weights = {name: weight.detach().double() for name, weight in final.state_dict().items()}
    return loop


def _buffers(network: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in network.buffers()]


def _set_buffers(network: nn.Module, values: Sequence[Tensor]) -> None:
    for buffer, value in zip(network.buffers(), values, strict=True):
        buffer.copy_(value)


def _shake(network: nn.Module, seed: int = 0, eps: float | None = None) -> None:
    """Change each weight by ``eps`` of its size. Default: its last bit."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            signs = torch.randint(2, parameter.shape, generator=generator).to(parameter.dtype) * 2 - 1
            parameter.mul_(1 + signs * (eps or torch.finfo(parameter.dtype).eps))


def planned_steps(point: Point, finished: Finished) -> int:
    """The number of steps for which the schedule of a run is made."""
    if point["ends"] != "max_epochs":
        return STEPS
    if point["asked"] == "early":  # it may end inside the epoch
        finished = Run({**point, "asked": "none"}).whole()
    assert finished.record is not None
    return min(8, len(finished.record.steps()))


# --- the oracles


def equals_a_plain_loop(run: Run) -> None:
    """Losses, gradient norms and weights differ from a loop in float64 by at most twice what a loop in the run's precision does."""
    point, finished = run.point, run.whole()
    exact = plain_loop(point, finished, "64-true")
    shakes = (None, 0, 1) if point["precision"].startswith("bf16") else (None, 0)
    rounded = [plain_loop(point, finished, point["precision"], shaken) for shaken in shakes]
    eps = torch.finfo(DTYPES[point["precision"]]).eps
    for column, name in {"train_loss": "losses", "grad_norm": "norms"}.items():
        wanted, noisy = getattr(exact, name), [getattr(loop, name) for loop in rounded]
        noise = max(abs(loop[step] - wanted[step]) for loop in noisy for step in wanted)
        found = finished.column(column)
        assert found, f"no {column}"
        for step, value in found.items():
            limit = 2 * noise + 4 * eps * max(1.0, abs(wanted[step]))
            error = abs(value - wanted[step])
            assert error <= limit, f"step {step}: {column} {value}, {wanted[step]} in a plain loop, more than {limit:.1e} apart"
    trained = inside.weights_in(finished.last)
    assert trained.keys() == exact.weights.keys(), f"other weights: {sorted(trained.keys() ^ exact.weights.keys())}"
    errors = {name: max(_norm(loop.weights[name] - weight) for loop in rounded) for name, weight in exact.weights.items()}
    sizes = {name: max(1, weight.numel()) for name, weight in exact.weights.items()}
    usual = math.sqrt(sum(error**2 for error in errors.values()) / sum(sizes.values()))
    for name, weight in exact.weights.items():
        if name.endswith("k_proj.bias"):  # its gradient is rounding alone, which Adam makes as large as any
            continue
        limit = 2 * max(errors[name], usual * math.sqrt(sizes[name])) + 4 * eps * _norm(weight)
        error = _norm(trained[name].double() - weight)
        assert error <= limit, f"{name}: {error:.1e} from a plain loop, more than {limit:.1e}"


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def the_schedule_gives_the_rates(run: Run) -> None:
    finished = run.whole()
    point, planned = run.point, planned_steps(run.point, finished)
    found = finished.column("lr")
    assert found, "no lr"
    for step, rate in found.items():
        factor = 0.1 ** ((step - 1) // 2) if point["schedule"] == "StepLR" else factor_of(point["schedule"], step - 1, planned)
        assert math.isclose(rate, 0.01 * factor, rel_tol=1e-9), f"lr of step {step} is {rate}, not {0.01 * factor}"


def the_last_checkpoint_gives_the_last_val_loss(run: Run) -> None:
    finished = run.whole()
    assert finished.record is not None
    told = list(finished.column("val_loss").values())
    wanted, limit = stored_loss(run, finished.last, finished.record.validation)
    assert told and abs(told[-1] - wanted) <= limit, f"the last val_loss is {told[-1:]}, {wanted} of last.ckpt"
    assert finished.result["val_loss"] == told[-1], f"result.json has {finished.result['val_loss']}, metrics.csv {told[-1]}"


def validation_rows_are_of_their_own_file(run: Run) -> None:
    """The recorded rows, as texts: documents are pieces of the poem backwards, other rows have numbers from 100 on."""
    finished = run.whole()
    assert finished.record is not None and finished.record.validation
    tokenizer = inside.load_tokenizer(finished.last)
    for batch in finished.record.validation:
        documents = batch.get("document_ids", torch.zeros_like(batch["input_ids"]))
        for ids, parts, real in zip(batch["input_ids"], documents, batch.get("key_mask", documents >= 0), strict=True):
            for part in parts[real].unique():
                text = tokenizer.decode(ids[real & (parts == part)].tolist(), skip_marks=True)
                numbers = [int(number) for number in re.findall(r"\d+", text)]
                is_other = min(numbers) >= OF_OTHERS[0] if numbers else text in POEM[::-1]
                assert is_other, f"a row of validation is {text!r}"


def recorded(run: Run) -> list[Mapping[str, Tensor]]:
    """The batches of training and of validation."""
    record = run.whole().record
    assert record is not None
    return [batch for _, batch in record.batches] + record.validation


def mark_ids(run: Run) -> dict[str, int]:
    """The ids of the marks by role. A tokenizer that is learned has one mark for both ends of a document."""
    vocab = json.loads(inside.load_tokenizer(run.whole().last).to_dict()["json"])["model"]["vocab"]
    learned = {"begin": "<eos>", "end": "<eos>", "class": "<cls>", "pad": "<pad>"}
    names = MARKS if run.point["network"] in OF_TRANSFORMERS else learned
    return {role: vocab[name] for role, name in names.items() if name in vocab}


def documents_have_the_marks_that_the_folder_names(run: Run) -> None:
    """They are nowhere but at the begin of a document in the inputs, and at its end in the labels."""
    marks = mark_ids(run)
    special = {*marks.values()}
    for name, role in {"input_ids": "begin", "labels": "end"}.items():
        found = {
            id
            for batch in recorded(run)
            for row, real in zip(batch[name], batch.get("key_mask", batch["labels"] != -100), strict=True)
            for id in row[real].tolist()
        }
        assert found & special == {marks[role]}, f"{name} have {found & special}, and {role} is {marks[role]}"


def labels_are_numbered_as_in_the_trained_head(run: Run) -> None:
    """A row's text ends with a number, whose parity is its label. It begins with the class mark."""
    order = (
        FOLDERS_LABELS if run.point["network"] in OF_TRANSFORMERS else "ab" if run.point["start"] == "new" else STORED_LABELS
    )
    tokenizer, marks = inside.load_tokenizer(run.whole().last), mark_ids(run)
    for batch in recorded(run):
        for ids, real, label in zip(batch["input_ids"], batch["key_mask"], batch["labels"], strict=True):
            text = tokenizer.decode(ids[real].tolist(), skip_marks=True)
            assert ids[0] == marks["class"], f"{text!r} begins with {ids[0]}, not with {marks['class']}"
            assert (ids[~real] == marks["pad"]).all(), f"{text!r} is padded with {ids[~real].tolist()}, not {marks['pad']}"
            wanted = "ab"[int(text.split()[-1]) % 2]
            assert order[label] == wanted, f"{text!r} has the label {label}, and the head numbers {order}"


def lines_of_two_files_belong_together(run: Run) -> None:
    tokenizer = inside.load_tokenizer(run.whole().last)
    for batch in recorded(run):
        for ids, real, labels in zip(batch["input_ids"], batch["key_mask"], batch["labels"], strict=True):
            source, target = (tokenizer.decode(part.tolist(), skip_marks=True) for part in (ids[real], labels[labels != -100]))
            assert int(target) == int(source) * 7 % 97, f"{source!r} has the target {target!r}"


def a_prompt_begins_as_documents_do(run: Run) -> None:
    """With the mark that begins a document, if the data are documents: in generate.py, in the viewer, and in the samples of a run."""
    last, prompt, folder = run.whole().last, "weary", _new_folder()
    wanted = prompt_ids(run, prompt)
    programs = {"generate": [f"prompt={prompt}", "max_new_tokens=1"]}
    if run.point["network"] not in OF_THE_TEST:
        programs["view"] = [f"text={prompt}", f"output={folder.parent / 'view.html'}"]
    for name, words in programs.items():
        with inside.reading() as read:
            code, told = inside.program(name, [f"ckpt_path={last}", "trust=true", *words])
        assert code == 0, told
        assert read[-1] == wanted, f"{name} reads {read[-1]} for the prompt, not {wanted}"
    if run.point["asked"] == "samples" and run.point["place"] == "one":  # in this process
        with inside.reading() as read:
            run._train([*run.words(), f"callbacks.samples.prompts=[{prompt}]"], folder)
        assert wanted in read, f"no sample begins with {wanted}"
    shutil.rmtree(folder.parent)


def prompt_ids(run: Run, prompt: str) -> list[int]:
    """The ids of a prompt as it stands in the rows of the run."""
    first = [mark_ids(run)["begin"]] if run.point["data"] in DOCUMENTS.split("|") else []
    return [*first, *inside.load_tokenizer(run.whole().last).encode(prompt).tolist()]


def the_best_checkpoint_gives_the_test_loss(run: Run) -> None:
    finished = run.whole()
    assert finished.record is not None
    told = finished.result["metrics"]["test_loss"]
    wanted, limit = stored_loss(run, finished.folder / "checkpoints" / "best.ckpt", finished.record.test)
    assert abs(told - wanted) <= limit, f"test_loss is {told}, {wanted} of best.ckpt"


def stored_loss(run: Run, path: Path, batches: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The loss of the weights of a checkpoint in float64, and twice the rounding of the run's precision."""
    finished, precision = run.whole(), run.point["precision"]
    assert finished.record is not None
    network = copy.deepcopy(finished.record.start).double().eval()
    network.load_state_dict(inside.weights_in(path))
    losses = []
    for kind in ("64-true", precision):
        other, dtype = copy.deepcopy(network).to(DTYPES[kind]), DTYPES[kind]
        total, targets = 0.0, 0
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16-mixed"):
            for batch in batches:
                total += float(loss_of(logits_of(other, batch, dtype), batch["labels"]))
                targets += int((batch["labels"] != -100).sum())
        losses.append(total / targets)
    # one draw of rounding may be small by chance, and products of bf16-mixed are rounded to bfloat16
    epsilon = 8 * torch.finfo(DTYPES[precision]).eps + (torch.finfo(torch.bfloat16).eps if precision == "bf16-mixed" else 0.0)
    return losses[0], 2 * abs(losses[1] - losses[0]) + epsilon * abs(losses[0])


def load_model_returns_the_stored_weights(run: Run) -> None:
    finished = run.whole()
    stored, loaded = inside.weights_in(finished.last), inside.load_network(finished.last).state_dict()
    assert stored.keys() == loaded.keys()
    for name, weight in loaded.items():
        assert torch.equal(stored[name].to(weight.dtype), weight), f"{name} is another one"


def best_ckpt_is_of_the_least_val_loss(run: Run) -> None:
    finished = run.whole()
    told = finished.column("val_loss")
    step = inside.read(finished.folder / "checkpoints" / "best.ckpt")["global_step"]
    least = min(told, key=lambda key: (told[key], key))
    assert step == least, f"best.ckpt is of step {step}, the least val_loss of step {least}"


def every_file_has_the_last_step(run: Run) -> None:
    point, finished = run.point, run.whole()
    last = finished.result["steps"]
    assert last == expected_steps(point), f"{last} steps, not {expected_steps(point)}"
    found = left_by(finished.folder)
    steps = [int(row["step"]) for row in found["metrics.csv"]]
    assert steps == sorted(set(steps)), f"rows of steps {steps}"
    every = int(point["log_every"])
    assert set(steps) >= {1, last, *range(every, last + 1, every)}, f"rows of steps {steps}"
    stored = found["checkpoints/last.ckpt"]["global_step"]
    assert stored == last, f"last.ckpt is of step {stored}, the run ended after {last}"
    validated = list(finished.column("val_loss"))
    period = {"end": last}.get(point["validation"]) or int(point["validation"])
    assert validated == sorted({*range(period, last + 1, period), last}), f"validations after steps {validated}"
    every_second = set(range(2, last + 1, 2))
    if point["asked"] in ("probe", "film"):
        probed = [record["step"] for record in found["probes.jsonl"]]
        assert probed == sorted({0, 1} | every_second), f"probes.jsonl has steps {probed}"
    if point["asked"] == "samples":
        written = [record["step"] for record in found["samples.jsonl"]]
        assert sorted(set(written)) == sorted(every_second | {last}), f"samples.jsonl has steps {written}"
    if point["asked"] == "film":
        assert f"attention/step_{last - last % 2:08}.safetensors" in found, f"no weights of the last step in {sorted(found)}"
    if point["asked"] == "evaluated":
        assert "evaluation.json" in found
    if point["asked"] in TESTED.split("|"):
        assert "test_loss" in finished.result["metrics"]
    if point["user"] == "callback":
        assert {"rows": 12 * last} in stored_callbacks(found), "the user's callback counted other rows"
    if point["user"] == "logger":
        told = {step: found[f"diary/{step}.json"]["train_loss"] for step in finished.column("train_loss")}
        assert told == finished.column("train_loss"), "the user's logger was told other losses"
    assert "checkpoints/best.ckpt" in found
    assert not [name for name in found if name.endswith((".part", ".new"))], sorted(found)


def stored_callbacks(found: Mapping[str, Any]) -> list[Any]:
    """The states of callbacks in last.ckpt."""
    return list(found["checkpoints/last.ckpt"]["callbacks"].values())


def expected_steps(point: Point) -> int:
    """The number of steps after which a whole run ends."""
    ends = [8 if point["ends"] == "max_epochs" else STEPS]
    rows = {**ROWS, **(ROWS_WITH_OTHERS if point["files"] == "others" else {})}
    if point["ends"] == "max_epochs" and point["data"] in rows:
        ends.append(math.ceil(rows[point["data"]] / 12))
    if point["ends"] == "stop_at":
        ends.append(5)
    if point["asked"] == "early" and point["validation"] != "end":
        ends.append(2 * int(point["validation"]))  # the second validation is no better by 100
    return min(ends)


def stopped_and_resumed_is_bit_equal(run: Run) -> None:
    """What a run leaves that was cut and resumed is what the run leaves that was never cut, in all files."""
    whole, cut = left_by(run.whole().folder), run.cut()
    wanted = "StoppedError" if cut.how in run_parts.SIGNALS else "NonFiniteError" if cut.how == "nonfinite" else "PowerCut"
    assert cut.error == wanted, f"{cut.how} ended the run by {cut.error or 'nothing'}"
    with run.resumed(cut) as resumed:
        difference = first_difference(left_by(resumed.folder), whole)
    assert difference is None, f"resumed and whole differ at {difference}"


def a_run_that_is_over_changes_no_file(run: Run) -> None:
    """It is resumed from its last checkpoint, and has nothing to do."""
    folder, kept = run.whole().folder, _new_folder()
    before = left_by(folder)
    shutil.copytree(folder, kept)
    run._train([*run.words(), "ckpt_path=last"], folder)
    difference = first_difference(left_by(folder), before)
    shutil.rmtree(folder)
    shutil.move(kept, folder)
    shutil.rmtree(kept.parent)
    assert difference is None, f"resumed after its end, and before: {difference}"


def a_run_that_is_not_finite_keeps_the_last_good_checkpoint(run: Run) -> None:
    content = inside.read(run.cut().folder / "checkpoints" / "last.ckpt")
    wanted = 3 if run.point["option"] == "minutes" else 2
    assert content["global_step"] == wanted, f"last.ckpt is of step {content['global_step']}, not {wanted}"
    bad = [name for name, weight in content["state_dict"].items() if not torch.isfinite(weight).all()]
    assert not bad, f"not finite in last.ckpt: {bad}"
    recorded = _new_folder()
    words = [*run.words(), f"+callbacks.hit._target_={PARTS}.Hit", "+callbacks.hit.how=nonfinite", "on_nonfinite=record"]
    result = run._train(words, recorded).result
    assert (result["nonfinite_step"], result["steps"], result["val_loss"]) == (4, 3, None), result
    shutil.rmtree(recorded.parent)
    words = [*words, "+callbacks.hit.step=1"]
    result = run._train(words, recorded).result
    assert (result["nonfinite_step"], result["steps"], result["val_loss"]) == (1, 0, None), result
    shutil.rmtree(recorded.parent)


def micro_batches_and_processes_change_no_row(run: Run) -> None:
    """The slices of each step, put together, are the batch of one process that does not slice. Rows of validation: the same."""
    sliced, whole = run.whole().record, run.whole(accumulate="1", **ALONE).record
    assert sliced is not None and whole is not None
    slices_of_a_step = int(run.point["accumulate"]) * int(run.point["processes"])
    assert len(sliced.batches) == slices_of_a_step * len(sliced.steps()), "another number of slices"
    assert sliced.steps().keys() == whole.steps().keys()
    for step, (batch,) in whole.steps().items():
        slices = sliced.steps()[step]
        assert all(int(part["num_targets"]) == int(batch["num_targets"]) for part in slices), f"step {step + 1}: num_targets"
        for name in batch.keys() - {"num_targets"}:
            rows = [row for part in slices for row in part[name]]
            same = [_is_padded(row, other) for row, other in zip(rows, batch[name], strict=True)]
            assert all(same), f"step {step + 1}: {name} of a slice and of the whole batch differ in row {same.index(False)}"
    for split in ("validation", "test"):
        mine, theirs = (_counting_rows(getattr(record, split)) for record in (sliced, whole))
        assert len(mine) == len(theirs), f"{split}: {len(mine)} rows in all processes, {len(theirs)} in one"
        for number, (row, other) in enumerate(zip(mine, theirs, strict=True)):
            differ = [name for name in row if not _is_padded(row[name], other[name])]
            assert not differ, f"{split}: {', '.join(differ)} of row {number} is another one than in one process"


def slices_of_a_stream_have_other_rows(run: Run) -> None:
    """Two processes read other documents, and so do two micro-batches of a step."""
    record = run.whole().record
    assert record is not None
    for step, batches in record.steps().items():
        different = {str(batch["input_ids"].tolist()) for batch in batches}
        assert len(different) == len(batches), f"{len(batches)} slices of step {step + 1} have the rows of {len(different)}"


def _counting_rows(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
    """The rows of batches with a label that counts: a process without a row reads one without."""
    rows = []
    for batch in batches:
        columns = [name for name, value in batch.items() if isinstance(value, Tensor) and value.dim()]
        numbers = [number for number, labels in enumerate(batch["labels"]) if bool((labels != -100).any())]
        rows += [{name: batch[name][number] for name in columns} for number in numbers]
    return rows


def _is_padded(row: Tensor, other: Tensor) -> bool:
    """Whether two rows of tokens are equal but for the padding at the end: a slice is padded to its own longest row."""
    if row.dim() != 1:
        return torch.equal(row, other)
    length = min(len(row), len(other))
    rest = torch.cat([row[length:], other[length:]])
    return torch.equal(row[:length], other[:length]) and len(rest.unique()) <= 1


def workers_change_nothing(run: Run) -> None:
    difference = first_difference(left_by(run.whole().folder), left_by(run.whole(workers="0").folder))
    assert difference is None, f"with and without workers: {difference}"


def looking_changes_no_bit(run: Run) -> None:
    """Probes, samples, a film, an evaluation, rows, validations, checkpoints, a profiler and a rehearsal leave the weights as they are."""
    point = run.point
    changes = {"rehearse": "no", **({"asked": "none"} if point["asked"] in LOOKS else {})}
    if point["schedule"] != "plateau" and point["asked"] != "early":  # which read the validations
        changes["validation"] = "2"
        changes["option"] = "none" if point["option"] in IDLE else point["option"]
    plain, looked = (inside.read(run.whole(**more).last) for more in ({**changes, "log_every": "1"}, {}))
    for name in ("global_step", "state_dict", "optimizer_states", "lr_schedulers"):
        difference = first_difference(plain[name], looked[name], name)
        assert difference is None, f"without and with looking: {difference}"


def a_start_from_weights_is_the_same_function(run: Run) -> None:
    """The first logits are those of the source, within twice what the last bit of a stored weight changes."""
    finished = run.whole()
    assert finished.record is not None
    path = home() / "sources" / f"{run.point['data']}-{run.point['network']}" / "checkpoints" / "last.ckpt"
    origin = inside.load_network(path).double().eval()
    shaken = inside.load_network(path).to(torch.bfloat16 if run.point["precision"] == "bf16-true" else torch.float32).eval()
    _shake(shaken)
    started = copy.deepcopy(finished.record.start).double().eval()
    batch = finished.record.batches[0][1]
    with torch.no_grad():
        wanted, near, found = (logits_of(network.double(), batch, torch.float64) for network in (origin, shaken, started))
    error, noise = (found - wanted).abs().max(), (near - wanted).abs().max()
    assert error <= 2 * noise, (
        f"the logits differ by {error:.1e} from those of init_from.path; the last bit changes {noise:.1e}"
    )


def a_film_shows_every_recorded_step(run: Run) -> None:
    folder = run.whole().folder
    recorded = len(list((folder / "attention").glob("step_*.safetensors")))
    film = folder.with_name("film.gif")
    # block 0 of a decoder has a cross-attention, too
    layer = "blocks.0.attention.core" if run.point["data"] == "pairs" else "0"
    code, told = inside.program("view", ["trust=true", f"ckpt_path={folder}", f"layers={layer}", f"output={film}"])
    assert code == 0, told
    assert told.startswith(f"{recorded} steps"), f"{recorded} steps are recorded, and the film has: {told}"
    film.unlink()


def an_exported_folder_computes_what_the_checkpoint_does(run: Run) -> None:
    """As transformers reads it, within twice what the last bit of a weight changes. Its tokenizer has the same ids."""
    import transformers

    finished, folder = run.whole(), _new_folder()
    assert finished.record is not None
    code, told = inside.program("export", ["trust=true", f"ckpt_path={finished.last}", f"output={folder}"])
    assert code == 0, told
    [kind] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    theirs = (
        getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").double().eval()
    )
    network, shaken = (inside.load_network(finished.last).float().eval() for _ in range(2))
    _shake(shaken)
    batch = finished.record.validation[0]
    real = batch["labels"] != -100
    with torch.no_grad():
        wanted, near, found = (logits_of(each.double(), batch, torch.float64)[real] for each in (network, shaken, theirs))
    error, noise = (found - wanted).abs().max(), (near - wanted).abs().max()
    assert error <= 2 * noise, f"the logits of the folder differ by {error:.1e}; the last bit changes {noise:.1e}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(POEM).input_ids == prompt_ids(run, POEM), "the tokenizer of the folder has other ids"
    assert (tokenizer.chat_template is not None) == (run.point["data"] == "chat"), "only a chat has a template"
    shutil.rmtree(folder.parent)


def nothing_global_is_changed(run: Run) -> None:
    """A run that ends, and one that is cut, leave the process as it was."""
    finished = run.whole()
    if finished.changed:  # a first run imports what it needs
        finished = run._train(run.words(), _new_folder())
    assert not finished.changed, f"changed by the run: {str(finished.changed)[:300]}"
    changed = run.cut().changed
    assert not changed, f"changed by a run that was cut: {str(changed)[:300]}"


def several_processes_train_as_one(run: Run) -> None:
    """They give the weights and losses of one process, within the error of a plain loop against float64."""
    assert_equal_to_rounding(run, run.whole(**ALONE), run.whole())


def every_micro_batch_of_every_process_draws_its_own_numbers(run: Run) -> None:
    """The seeds of the generator differ, so that dropout in two processes is not the same."""
    record = run.whole().record
    assert record is not None
    steps = 1 if run.point["option"] == "overfit" else len(record.steps())
    expected = steps * int(run.point["accumulate"]) * int(run.point["processes"])
    assert len(set(record.seeds)) >= expected, f"{len(set(record.seeds))} seeds in {len(record.seeds)} micro-batches"


def a_run_goes_on_in_another_number_of_processes(run: Run) -> None:
    """Cut, and resumed in other processes with other micro-batches: equal to rounding to one process that was never cut."""
    with run.resumed(run.cut(), **elsewhere(run.point)) as resumed:
        assert_equal_to_rounding(run, run.whole(**ALONE), resumed)


def elsewhere(point: Point) -> dict[str, str]:
    """Where a run of several processes goes on, and with how many micro-batches."""
    place, processes = point["place"], point["processes"]
    if processes == "2":
        return {**ALONE, "accumulate": "3" if point["accumulate"] == "1" else "1"}
    if processes == "4":
        return {"processes": "2", "accumulate": "2" if point["accumulate"] == "1" else "1"}
    other = "fsdp_named" if place == "ddp_cpu" and point["optimizer"] != "muon" and point["asked"] in SHARDED else "ddp_cpu"
    return {"place": other, "processes": "2"}


def assert_equal_to_rounding(run: Run, one: Finished, two: Finished) -> None:
    """Losses, weights and moments of two runs are equal within the error of a plain loop against float64."""
    noise = [plain_loop(run.point, one, "64-true"), plain_loop(run.point, one, run.point["precision"], 0)]
    eps = torch.finfo(DTYPES[run.point["precision"]]).eps
    if matches({"place": "pretended", "precision": "bf16-mixed"}, run.point):
        eps = torch.finfo(torch.bfloat16).eps  # CUDA's autocast rounds elsewhere than the CPU's
    rounding_of_losses = max(abs(noise[0].losses[step] - noise[1].losses[step]) for step in noise[0].losses)
    columns = [name for name in one.rows()[-1] if name.startswith(("train_", "val_")) or name == "tokens"]
    assert not set(columns) - two.rows()[-1].keys(), f"other columns than {columns}"
    for name in columns:
        wanted, found = one.column(name), two.column(name)
        assert wanted.keys() == found.keys(), f"{name} of steps {sorted(found)}, of one process {sorted(wanted)}"
        if not wanted:
            continue
        error = max(abs(wanted[step] - found[step]) for step in wanted)
        limit = 4 * rounding_of_losses + 16 * eps * max(map(abs, wanted.values()))
        limit = 0.34 if name.endswith("accuracy") else limit  # of few tokens, some change sides by rounding
        assert error <= limit, f"{name}: {error:.1e} between one process and several, more than {limit:.1e}"
    first, second = (inside.weights_in(finished.last) for finished in (one, two))
    assert first.keys() == second.keys()
    rounding = math.sqrt(sum(_norm(noise[0].weights[name] - noise[1].weights[name]) ** 2 for name in first))
    error = math.sqrt(sum(_norm(first[name].double() - second[name].double()) ** 2 for name in first))
    limit = 4 * rounding + 16 * eps * math.sqrt(sum(_norm(weight) ** 2 for weight in first.values()))
    assert error <= limit, f"weights: {error:.1e} between one process and several, more than {limit:.1e}"
    first, second = (moments_in(finished.last) for finished in (one, two))
    eps = torch.finfo(torch.bfloat16).eps if run.point["precision"].startswith("bf16") else eps  # of a product's inputs
    assert first.keys() == second.keys(), f"moments of {sorted(first.keys() ^ second.keys())} on one side alone"
    for place, moment in first.items():
        assert moment.shape == second[place].shape, f"{place}: {tuple(moment.shape)} and {tuple(second[place].shape)}"
        kind = place.rpartition(" ")[2]
        largest = max(_norm(other) for name, other in first.items() if name.endswith(kind))  # a gradient of 0 is rounding
        error, most = _norm(moment - second[place]), _norm(moment) + _norm(second[place])
        limit = 0.5 * most + 16 * eps * largest
        assert error <= limit, f"{place}: {error:.1e} between the moments of one process and several, more than {limit:.1e}"

    losses = max(map(abs, one.column("train_loss").values()))
    kept = [_numbers(inside.read(finished.last)["callbacks"]) for finished in (one, two)]
    assert kept[0].keys() == kept[1].keys(), f"callbacks keep other numbers: {sorted(kept[0].keys() ^ kept[1].keys())}"
    for place, number in kept[0].items():
        limit = 4 * rounding_of_losses + 16 * eps * max(losses, abs(number))
        assert abs(number - kept[1][place]) <= limit, f"{place} is {number} in one process, and {kept[1][place]} in several"

    if run.point["asked"] == "evaluated":
        told = [json.loads((finished.folder / "evaluation.json").read_text(encoding="utf-8")) for finished in (one, two)]
        counts = [{name: metric["count"] for name, metric in each["metrics"].items()} for each in told]
        assert counts[0] == counts[1], f"an evaluation of {counts[0]} rows in one process, and of {counts[1]} in several"


def _numbers(state: Any, place: str = "callbacks") -> dict[str, float]:
    """The numbers in the states of callbacks, by their place.

    ModelCheckpoint does not restore ``current_score``; ``best_k_models`` has names of files with rounded losses.
    """
    if isinstance(state, Mapping):
        parts = ((f"{place}/{name}", each) for name, each in state.items() if name not in ("current_score", "best_k_models"))
    elif isinstance(state, list | tuple):
        parts = ((f"{place}[{number}]", each) for number, each in enumerate(state))
    else:
        is_number = isinstance(state, int | float) or (isinstance(state, Tensor) and state.numel() == 1)
        return {place: float(state)} if is_number and math.isfinite(state) else {}
    return {name: number for part in parts for name, number in _numbers(part[1], part[0]).items()}


def moments_in(path: Path) -> dict[str, Tensor]:
    """The state of the optimizer in a checkpoint, by the parameter's number and the name."""
    [state] = inside.read(path)["optimizer_states"]
    return {
        f"{number}: {name}": value.double()
        for number, of_one in sorted(state["state"].items())
        for name, value in of_one.items()
        if isinstance(value, Tensor) and value.dim()
    }


ROWS = {
    "noisy": 40,
    "module": 40,
    "text": 60,
    "packed": 71,
    "padded": 104,
    "masked": 61,
    "classify": 54,
    "pairs": 54,
    "pictures": 1438,
    "chat": 54,
}
"""Training rows, where they have a number."""

ROWS_WITH_OTHERS = {"packed": 80, "padded": 117, "classify": 60, "pairs": 60, "chat": 60}
"""Training rows if validation has a file of its own."""

TESTED, AVERAGED = "tested|ema_tested", "ema|ema_tested"
DOCUMENTS = "packed|padded|stream"
LOOKS = ("probe", "film", "samples", "evaluated", "tested")
IDLE = ("instruments", "minutes", "monitor", "all_rows")
SHARDED = ("none", "early", "top_k", "evaluated", "tested")
"""What a sharded model can be asked."""

SHARDED_PLACES = "fsdp|fsdp_named"
TIED = ("masked", "classify", "pictures")
"""Data whose model keeps one matrix for embeddings and head with ``trainer.shard``, or has no such head."""

ALONE = {"place": "one", "processes": "1"}
PRETENDED = {"place": "pretended"}
OWN_STATISTICS = {"network": "normed"}
"""Each slice of a step has its own: they are those of the first process."""

OTHERS_THAN_ONE = {"place": "!one"}
REFERENCE = ({"optimizer": "muon"}, {"dropout": "yes"}, {"data": "stream", "workers": "2|pickled"}, PRETENDED)
"""Where a plain loop says nothing: ``torch.optim.Muon`` computes in bfloat16, a loop draws other numbers, and CUDA's autocast, which
the pretended accelerator has, rounds elsewhere than the CPU's.
"""

ORACLES = (
    Oracle(equals_a_plain_loop, unless=(*REFERENCE, {"schedule": "plateau", "option": "monitor"})),
    Oracle(the_schedule_gives_the_rates, unless=({"schedule": "plateau"},)),
    Oracle(the_last_checkpoint_gives_the_last_val_loss, unless=(PRETENDED,)),
    Oracle(validation_rows_are_of_their_own_file, where=({"files": "others"},)),
    Oracle(documents_have_the_marks_that_the_folder_names, where=({"data": DOCUMENTS},)),
    Oracle(labels_are_numbered_as_in_the_trained_head, where=({"data": "classify"},)),
    Oracle(lines_of_two_files_belong_together, where=({"data": "pairs"},)),
    Oracle(a_prompt_begins_as_documents_do, where=({"data": f"text|{DOCUMENTS}"},)),
    Oracle(the_best_checkpoint_gives_the_test_loss, where=({"asked": TESTED},), unless=(PRETENDED,)),
    Oracle(load_model_returns_the_stored_weights, unless=({"precision": "64-true"},)),
    Oracle(best_ckpt_is_of_the_least_val_loss, unless=({"option": "monitor"},)),
    Oracle(every_file_has_the_last_step),
    Oracle(stopped_and_resumed_is_bit_equal),
    Oracle(a_run_that_is_over_changes_no_file),
    Oracle(a_run_that_is_not_finite_keeps_the_last_good_checkpoint, where=({"ends": "nonfinite"},)),
    Oracle(
        micro_batches_and_processes_change_no_row,
        where=({"accumulate": "2|3"}, {"processes": "2|4"}),
        # the parts of several workers take turns by micro-batch, and two processes read other documents than one
        unless=({"data": "stream", "workers": "2"}, {"data": "stream", "processes": "2|4"}),
    ),
    Oracle(
        slices_of_a_stream_have_other_rows,
        where=({"data": "stream", "processes": "2|4"}, {"data": "stream", "accumulate": "2|3"}),
    ),
    Oracle(workers_change_nothing, where=({"workers": "2|pickled"},), unless=({"data": "stream"},)),
    Oracle(
        looking_changes_no_bit,
        where=(
            {"asked": "|".join(LOOKS)},
            {"log_every": "3"},
            {"validation": "3|end"},
            {"option": "|".join(IDLE)},
            {"rehearse": "yes"},
        ),
    ),
    Oracle(a_start_from_weights_is_the_same_function, where=({"start": "init_from|folded"},)),
    Oracle(a_film_shows_every_recorded_step, where=({"asked": "film"},)),
    Oracle(
        an_exported_folder_computes_what_the_checkpoint_does,
        where=({"data": "text|packed|padded|stream|chat", "network": "!own|normed"},),
    ),
    Oracle(nothing_global_is_changed),
    Oracle(every_micro_batch_of_every_process_draws_its_own_numbers, unless=(PRETENDED,)),
    Oracle(
        several_processes_train_as_one,
        where=(OTHERS_THAN_ONE,),
        unless=(
            {"optimizer": "muon"},
            {"dropout": "yes"},
            {"data": "stream", "processes": "2|4"},
            {**OWN_STATISTICS, "processes": "2|4"},
        ),
    ),
    Oracle(
        a_run_goes_on_in_another_number_of_processes,
        where=({"place": "!one|pretended"},),
        unless=({"optimizer": "muon"}, {"dropout": "yes"}, {"data": "stream"}, OWN_STATISTICS),
    ),
)
OURS_ALONE = {"network": "!ours"}
MEANINGLESS: tuple[dict[str, str], ...] = (
    {"place": "one|pretended", "processes": "2|4"},
    {"processes": "1", "late": "writing|reading"},
    {"data": "module", "accumulate": "2", "processes": "4"},  # a step of 12 rows has no 8 equal parts
    {"asked": "early", "ends": "int|crash_after"},  # it ends before
    {"option": "instruments", "ends": "nonfinite"},  # anomaly detection raises first
    {"place": "pretended", "compile": "yes"},  # it has no compiler
    # torch 2.13 computes the CPU's fused SGD wrongly
    {"place": "pretended", "optimizer": "sgd", "precision": "bf16-true"},
    {**OURS_ALONE, "user": "looker"},
    {**OURS_ALONE, "checkpointing": "yes"},  # keys of our models
    {**OURS_ALONE, "rules": "frozen|factor"},
    {**OURS_ALONE, "start": "folded"},
    {"optimizer": "Adam|NAdam|SGD|two_modes", "rules": "frozen|factor"},  # a key of our optimizers
    {"network": "own|normed", "data": "drawn|classify|pairs|pictures"},  # the model answers each token of a text
    {"files": "others", "data": "text|drawn|noisy|masked|pictures|module"},
    {"files": "torn", "data": "!pairs"},
    {"network": "hf|lora", "data": "!text|packed|padded|stream|classify"},
    {"network": "hf|lora", "start": "init_from"},  # model.path names the weights
    {"asked": TESTED, "data": "!text|pairs"},  # pairs alone have a test split; text stands for the others
)
REFUSALS = (
    Refusal({"asked": TESTED, "data": "text"}, "the data has no test split"),
    Refusal({"accumulate": "2", "processes": "4"}, r"divisible by trainer\.accumulate=2 x trainer\.devices=4"),
    Refusal({"asked": "samples", "data": "drawn|noisy|module"}, "needs data with a tokenizer"),
    Refusal({"asked": "samples", "data": "pictures"}, "needs data with a tokenizer"),
    Refusal({"asked": "samples", "data": "masked|classify"}, "decoder or encoder-decoder of minitx, got encoder"),
    Refusal({"asked": "samples", **OURS_ALONE}, "decoder or encoder-decoder of minitx, got"),
    Refusal({"asked": "probe|film", "network": "own|normed|hf"}, "probe"),
    Refusal({"ends": "max_epochs", "data": "drawn|stream"}, "max_epochs=1 needs a fixed number of training rows"),
    Refusal({"objective": "chunked|smoothed_chunked", **OURS_ALONE}, "chunk_tokens=5 needs model.head=lm"),
    Refusal({"objective": "chunked|smoothed_chunked", "data": "classify|pictures"}, "chunk_tokens=5 needs model.head=lm"),
    Refusal({"network": "own|normed", "data": "packed|stream"}, "has no parameter document_ids"),
    Refusal({"optimizer": "two_modes"}, "has other weights for evaluation than for training"),
    Refusal({"files": "torn"}, "has a carriage return within line 21"),
    Refusal({"place": "fsdp", "network": "own|normed"}, "does not know the layers of (OwnModel|Normed)"),
    Refusal({"place": "fsdp_named", "network": "ours", "data": "masked"}, "and head.weight are one weight"),
    Refusal({"place": "fsdp_named", "objective": "chunked|smoothed_chunked"}, "shards the head"),
    Refusal({"place": SHARDED_PLACES, "optimizer": "muon"}, "needs whole matrices"),
    Refusal({"place": SHARDED_PLACES, "asked": "probe|film|samples|ema|ema_tested"}, "whole weights"),
)
KNOWN: tuple[KnownFault, ...] = ()
RUNS = Lattice(
    file="tests/lattice/runs.py",
    axes={axis: tuple(values) for axis, values in AXES.items()},
    make=Run,
    oracles=ORACLES,
    refusals=REFUSALS,
    known=KNOWN,
    meaningless=MEANINGLESS,
    costly={
        "optimizer": "muon",
        "dropout": "yes",
        "workers": "2|pickled",
        "option": "instruments",
        "compile": "yes",
        "network": "hf|lora",
        "place": "!one",
        "processes": "2|4",
        "late": "writing|reading",
    },
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    sys.exit(engine.run(RUNS))
