"""``evaluate.py``: a checkpoint alone is enough."""

import json

import pytest


@pytest.mark.parametrize("run", ["text", "dates", "digits"])
def test_a_checkpoint_alone_gives_the_numbers_that_the_run_gave(cli, runs, last, place, run):
    said = cli(last(run), "output=found.json", program="evaluate")
    assert (said.code, said.err) == (0, "")
    at_end, found = (json.loads(path.read_text("utf-8")) for path in (runs / run / "evaluation.json", place / "found.json"))
    assert found["baselines"] == at_end["baselines"]
    assert found["examples"] == at_end["examples"]
    assert list(found["metrics"]) == list(at_end["metrics"])
    for name, metric in at_end["metrics"].items():
        assert found["metrics"][name] == pytest.approx(metric, rel=1e-6), name
        assert f"{name} " in said.out


def test_rows_beams_shown_answers_and_data_can_be_chosen(cli, last, place):
    said = cli(last("dates"), "num_rows=5", "num_beams=3", "num_shown=1", "batch_size=2", program="evaluate")
    assert (said.code, "5 rows" in said.out, said.out.count("source ")) == (0, True, 1)
    (place / "other.txt").write_text("🎉界世好你" * 300, encoding="utf-8")
    losses = []
    for words in ([], ["data.path=other.txt"]):
        assert cli(last("text"), *words, "output=found.json", program="evaluate").code == 0
        losses.append(json.loads((place / "found.json").read_text("utf-8"))["metrics"]["loss"]["value"])
    assert losses[0] < losses[1]
