"""``evaluate.py``: a checkpoint alone is enough."""

import json
import re

import pytest

from tests.cli.conftest import SHORT


@pytest.mark.parametrize("run", ["text", "dates", "digits"])
def test_a_checkpoint_alone_gives_the_numbers_that_the_run_gave(cli, runs, last, place, run):
    said = cli(last(run), "output=found.json", program="evaluate")
    assert (said.code, said.err) == (0, "")
    at_end, found = (json.loads(path.read_text("utf-8")) for path in (runs / run / "evaluation.json", place / "found.json"))
    assert found["baselines"] == at_end["baselines"]
    assert found["examples"] == at_end["examples"]
    assert found["rows"] == at_end["rows"] == found["of_rows"] > 0
    assert re.search(rf"^rows +{found['rows']:,}$", said.out, re.MULTILINE)
    assert list(found["metrics"]) == list(at_end["metrics"])
    for name, metric in at_end["metrics"].items():
        assert found["metrics"][name].pop("unit") == metric.pop("unit")
        expected = {key: pytest.approx(value, rel=1e-6) if value is not None else None for key, value in metric.items()}
        assert found["metrics"][name] == expected, name  # BLEU of 0 has no interval
        assert f"{name} " in said.out


def test_rows_beams_shown_answers_and_data_can_be_chosen(cli, last, place):
    said = cli(last("dates"), "num_rows=5", "num_beams=3", "num_shown=1", "batch_size=2", program="evaluate")
    assert (said.code, "5 rows" in said.out, said.out.count("source ")) == (0, True, 1)
    assert re.search(r"^rows +5 of 17$", said.out, re.MULTILINE)
    (place / "other.txt").write_text("🎉界世好你" * 300, encoding="utf-8")
    losses = []
    for words in ([], ["data.path=other.txt"]):
        assert cli(last("text"), *words, "output=found.json", program="evaluate").code == 0
        losses.append(json.loads((place / "found.json").read_text("utf-8"))["metrics"]["loss"]["value"])
    assert losses[0] < losses[1]


def test_what_is_left_out_of_a_split_is_told_before_the_first_step_and_beside_every_score(cli, place, caplog):
    caplog.set_level("INFO", "minitx")
    for name, count in (("train", 40), ("val", 20)):
        lines = [f"{n}\t{'' if n % 10 == 3 else 'ab' * (9 if n % 10 == 5 else 2)}" for n in range(count)]
        (place / f"{name}.tsv").write_text("\n".join(lines), encoding="utf-8")
    data = (
        "data=pairs data.path=train.tsv data.val_path=val.tsv data.tokenizer=char data.max_source_len=64 data.max_target_len=8"
    )
    assert cli(*SHORT, *data.split(), "model.architecture=encoder_decoder", "output_dir=run").code == 0
    log = "".join(f"{message}\n" for message in caplog.messages)
    limits = "longer than data.max_source_len=64 and data.max_target_len=8 allow"
    blank = {"train": "4 of 40 pairs are left out: a side is blank", "val": "2 of 20 pairs are left out: a side is blank"}
    long = {"train": f"4 of 36 pairs are left out: {limits}", "val": f"2 of 18 pairs are cut: they are {limits}"}
    for split in ("train", "val"):
        assert re.search(rf"^  {split} +{blank[split]}; {long[split]}$", log, re.MULTILINE)
    found = cli("ckpt_path=run", "output=found.json", program="evaluate")
    for text in (found.out, log):
        assert re.search(r"^rows +18$", text, re.MULTILINE) and f"  {blank['val']}\n" in text and f"  {long['val']}\n" in text
    numbers = json.loads((place / "found.json").read_text("utf-8"))
    assert (numbers["rows"], numbers["left_out"]) == (18, [blank["val"], long["val"]])
    assert numbers["metrics"]["exact_match"]["count"] == 18
    refused = cli("ckpt_path=run", "data.max_source_len=999", program="evaluate")
    assert (refused.code, refused.err.count("\n")) == (2, 1) and "model.max_len=" in refused.err


def test_pairs_in_a_test_file_are_evaluated_after_training_and_again_with_all_rows_and_the_signature(cli, place, caplog):
    caplog.set_level("INFO", "minitx")
    sizes = {"train": 40, "val": 7, "test": 11, "other": 5}
    for name, count in sizes.items():
        (place / f"{name}.tsv").write_text("\n".join(f"{n}\t{'ab' * (n % 3 + 1)}" for n in range(count)), encoding="utf-8")
    paths = ["data.path=train.tsv", "data.val_path=val.tsv", "data.test_path=test.tsv"]
    data = ["data=pairs", *paths, "data.tokenizer=char", "data.max_source_len=64", "data.max_target_len=64"]
    ends = ["evaluation.test=last", "evaluation.at_end=true", "output_dir=run"]
    chosen = [word for word in SHORT if not word.startswith("evaluation.")]
    assert cli(*chosen, *data, *ends, "model.architecture=encoder_decoder").code == 0
    assert any(re.match(r"test  .*test_loss .*\(11 rows\)$", line) for line in caplog.messages), caplog.messages
    files = {"val": "evaluation.json", "test": "evaluation_test.json"}
    for split, words, rows in (("val", [], 7), ("test", [], 11), ("test", ["data.test_path=other.tsv"], 5)):
        said = cli("ckpt_path=run", f"split={split}", *words, "output=found.json", program="evaluate")
        assert (said.code, said.err) == (0, "")
        found = json.loads((place / "found.json").read_text("utf-8"))
        assert (found["split"], found["rows"], found["of_rows"]) == (split, rows, rows)
        assert found["metrics"]["bleu"]["count"] == found["metrics"]["exact_match"]["count"] == rows
        assert re.fullmatch(r"nrefs:1\|case:mixed\|.*\|version:.*", found["signatures"]["bleu"])
        assert found["signatures"]["bleu"] in said.out and found["signatures"]["chrf"] in said.out
        if not words:
            at_end = json.loads((place / "run" / files[split]).read_text("utf-8"))
            assert at_end["signatures"] == found["signatures"] and at_end["rows"] == rows
            assert at_end["metrics"]["loss"]["value"] == pytest.approx(found["metrics"]["loss"]["value"], rel=1e-6)
            assert at_end["baselines"] == found["baselines"]


def test_a_test_split_that_the_data_do_not_have_is_refused(cli, last, place):
    said = cli(last("text"), "split=test", program="evaluate")
    assert (said.code, "split=test" in said.err, said.err.count("\n")) == (2, True, 1)
