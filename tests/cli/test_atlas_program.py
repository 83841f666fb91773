"""atlas.py: a checkpoint, a run's folder or a file of sentences; a plain mistake is one sentence."""

from __future__ import annotations

import csv
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minitx.analysis.snapshot import take_snapshot, write_snapshot
from minitx.cli.arguments import help_text
from minitx.cli.atlas import USAGE, AtlasConfig, dates_structure, known_structure, main
from minitx.config import CallbacksConfig, DatesDataConfig, KeyValueDataConfig, RunConfig, TextDataConfig, TrainerConfig
from minitx.config import TransformerConfig as ModelConfig
from minitx.data.module import build_data
from minitx.data.tokenizers import train_tokenizer
from minitx.training.stored import load_model
from minitx.training.run import train

FEW = Path(__file__).parents[1] / "analysis" / "data"
SMALL = {"embed_dim": 12, "num_heads": 3, "num_layers": 1, "max_len": 64}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of two steps; that of kv-lookup has recorded snapshots."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text("The old cat slept, and Ann left her boat early. " * 60, encoding="utf-8")
    runs = {
        "text": (TextDataConfig(name="text", path=str(folder / "text.txt"), context_len=24), {}),
        "dates": (
            DatesDataConfig(locales=("en", "de"), train_size=53, val_size=17, batch_size=6),
            {"architecture": "encoder_decoder"},
        ),
        "kv_lookup": (KeyValueDataConfig(num_keys=11, num_pairs=7, val_size=29), {}),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minitx.data.load.data_dir", lambda: folder)
        for name, (data, model) in runs.items():
            config = RunConfig(
                model=ModelConfig(**SMALL, **model),
                data=data,
                trainer=TrainerConfig(max_steps=2, accelerator="cpu", threads=1),
                callbacks=CallbacksConfig(progress=False),
            )
            train(config, folder / name)
    model, _, _ = load_model(folder / "kv_lookup" / "checkpoints" / "last.ckpt")
    data = build_data(runs["kv_lookup"][0], seed=0, max_steps=1)
    rows = data.probe_batch(13)
    inputs = {name: rows[name] for name in ("input_ids", "token_type_ids")}
    for step in (0, 2):
        write_snapshot(take_snapshot(model, inputs, step=step), folder / "kv_lookup" / "attention")
    return folder


@pytest.fixture
def cli(monkeypatch, capsys, trained):
    """``cli("ckpt_path=…")`` runs ``atlas.py`` in this process."""

    def run(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["atlas.py", *map(str, arguments)])
            patch.setattr("minitx.data.load.data_dir", lambda: trained)
            patch.setenv("MINITX_TRACEBACK", "0")
            code = main()
        return SimpleNamespace(code=code, **dict(zip(("out", "err"), capsys.readouterr(), strict=True)))

    return run


def test_a_checkpoint_alone_gives_the_table_and_the_files(cli, trained, tmp_path):
    said = cli(f"ckpt_path={trained / 'text' / 'checkpoints' / 'last.ckpt'}", f"output={tmp_path / 'found'}", "num_rows=11")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("11 validation rows of data=text\nlayer")
    assert sum(line.startswith("blocks.0.attention.core") for line in said.out.splitlines()) == 3
    assert sorted(path.name for path in (tmp_path / "found").iterdir()) == ["atlas.csv", "atlas.json", "atlas.png"]
    found = json.loads((tmp_path / "found" / "atlas.json").read_text(encoding="utf-8"))
    with (tmp_path / "found" / "atlas.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["heads"]) == 3 * 11
    assert {row["sentences"] for row in rows if row["score"] == "previous"} == {"11"}
    assert found["rows"] == "11 validation rows of data=text"


def test_an_encoder_decoder_is_compared_with_what_is_known_of_dates(cli, trained):
    said = cli(f"ckpt_path={trained / 'dates' / 'checkpoints' / 'last.ckpt'}", "batch_size=5")
    assert said.code == 0
    kinds = ("encoder.blocks.0.attention.core", "blocks.0.attention.core", "blocks.0.cross_attention.core")
    assert all(sum(line.startswith(kind) for line in said.out.splitlines()) == 3 for kind in kinds)
    assert "3 of 3 heads agree with the structure no better than position alone" in said.out


def test_a_run_folder_gives_its_last_checkpoint_and_its_steps(cli, trained, tmp_path):
    said = cli(f"ckpt_path={trained / 'kv_lookup'}", f"output={tmp_path}")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("29 validation rows of data=kv_lookup")
    assert "2 recorded snapshots of 13 rows, steps 0 to 2" in said.out
    assert said.out.count("since step 0") == 3
    names = {path.name for path in tmp_path.iterdir()}
    assert names > {"atlas_steps.csv", "atlas_steps.json", "atlas_steps_classes.png", "atlas_steps_scores.png"}
    steps = json.loads((tmp_path / "atlas_steps.json").read_text(encoding="utf-8"))["heads"]
    assert {row["step"] for row in steps} == {0, 2}
    assert any(row["score"] == "agreement" for row in steps), "where the answer stands is known of the task"


@pytest.mark.parametrize("run", ["text", "dates"])
@pytest.mark.parametrize(("name", "number"), [("few.conllu", 4), ("few.brackets", 3)])
def test_sentences_of_a_file_can_be_looked_at(cli, trained, run, name, number):
    said = cli(f"ckpt_path={trained / run / 'checkpoints' / 'last.ckpt'}", f"structure={FEW / name}")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"{number} sentences of {FEW / name}; unknown to the model: ")
    assert ("cross" in said.out, "encoder" in said.out) == (False, run == "dates"), "the encoder alone reads sentences"


def test_target_digits_point_at_the_characters_that_they_come_from():
    tokenizer = train_tokenizer("char", ["de: 7. März 1999", "-03"], marks=("pad", "bos", "eos"))
    source, target = (tokenizer.encode(text).tolist() for text in ("de: 7. März 1999", "1999-03-07"))
    ids = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([[tokenizer.mark_ids["bos"], *target]])}
    real = {axis: torch.ones_like(tensor).bool() for axis, tensor in ids.items()}
    (row,) = dates_structure(ids, real, tokenizer).rows
    named = {part: {(i, j) for i, j, name in row.arcs if name == part} for part in ("year", "month", "day")}
    assert named["year"] == {(0, 12), (1, 13), (2, 14), (3, 15)}  # the mark at 0 is followed by the first digit
    assert named["month"] == {(i, j) for i in (5, 6) for j in range(7, 11)}
    assert named["day"] == {(8, 4), (9, 4)}


def test_where_the_answers_of_the_recall_tasks_stand():
    ids = {"input_ids": torch.tensor([[7, 1, 8, 2, 8, 7, 1]])}

    def arcs(name, **options):
        run = SimpleNamespace(data=SimpleNamespace(name=name, **options))
        return [(i, j) for i, j, _ in known_structure(run, ids, {}, None).rows[0].arcs]

    assert arcs("kv_lookup") == [(6, 1)]
    assert arcs("multi_query_recall", num_queries=3) == [(4, 3), (5, 1), (6, 2)]
    assert arcs("induction") == [(4, 3), (5, 1), (6, 2)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "ckpt_path is missing"),
        (["ckpt_path=nowhere.ckpt"], "ckpt_path=nowhere.ckpt is not a file"),
        (["ckpt_path={folder}"], "ckpt_path={folder} is a folder without checkpoints/last.ckpt"),
        (["ckpt_path={broken}"], "{broken}/attention/step_00000001.safetensors is not a snapshot of attention"),
        (["ckpt_path={last}", "num_row=3"], "num_row is not a key; did you mean num_rows?"),
        (["ckpt_path={last}", "num_rows=0"], "num_rows=0 must be positive"),
        (["ckpt_path={last}", "seed=-1"], "seed=-1 must lie in [0, 2^63)"),
        (["ckpt_path={last}", "output=no/such/folder"], "output=no/such/folder is in a folder that does not exist"),
        (["ckpt_path={last}", "output={text}"], "output={text} is a file, but must name a folder"),
        (["ckpt_path={last}", "structure=nowhere"], "structure=nowhere is not a file"),
        (["ckpt_path={last}", "structure={text}"], "structure={text}, line 1: 1 columns, but CoNLL-U has 10"),
        (["ckpt_path={kv}", "structure={text}"], "structure={text} holds sentences, but ckpt_path={kv} reads no text"),
        (["ckpt_path={last}", "structure={long}"], "structure={long} has no sentence of at most 64 tokens (model.max_len)"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(cli, trained, tmp_path, arguments, sentence):
    (tmp_path / "long").write_text("[[" + "cat " * 40 + "] sat]", encoding="utf-8")
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention" / "step_00000001.safetensors").write_text("?", encoding="utf-8")
    names = {
        "broken": tmp_path,
        "folder": trained,
        "text": trained / "text.txt",
        "last": trained / "text" / "checkpoints" / "last.ckpt",
        "kv": trained / "kv_lookup" / "checkpoints" / "last.ckpt",
        "long": tmp_path / "long",
    }
    said = cli(*(argument.format(**names) for argument in arguments))
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith(f"error: {sentence.format(**names)}")
    assert said.err.count("\n") == 1


def test_where_files_cannot_be_written_the_table_is_shown_and_one_sentence(cli, trained, tmp_path):
    (tmp_path / "atlas.json").mkdir()
    said = cli(f"ckpt_path={trained / 'text' / 'checkpoints' / 'last.ckpt'}", f"output={tmp_path}", "num_rows=3")
    assert said.code == 2
    assert "blocks.0" in said.out
    assert said.err == f"error: output={tmp_path} cannot be written: Is a directory\n"


def test_help_names_every_key(cli):
    said = cli("--help")
    assert (said.code, said.out) == (0, help_text(AtlasConfig, USAGE))
    assert all(f"{field.name}=" in said.out for field in dataclasses.fields(AtlasConfig))


def test_the_script_answers_a_typo_before_torch_is_loaded():
    code = (
        "import sys\n"
        "from minitx.cli.atlas import main\n"
        "sys.argv = ['atlas.py', 'ckpt=1']\n"
        "assert main() == 2\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
