"""What a model answers: read off its logits, kept by snapshots and their files, and without one head."""

from __future__ import annotations

import math

import pytest
import torch

from minitx.analysis import intervene, read_snapshots, take_snapshot
from minitx.analysis.answers import Question, Questions, read_answers
from minitx.analysis.experiments import answers_without_heads
from minitx.analysis.snapshot import write_snapshot
from tests.analysis.models import IDS, model_of, translation_of

ASKED = Questions("input_ids", [[Question("a?", 1, 3, 0), Question("b?", 4)], [Question("c?", 0, 8)]], 11, lambda i: f"<{i}>")


def test_an_answer_is_the_largest_logit_and_its_loss_is_that_of_the_right_one():
    logits = model_of()(IDS)
    (first, second), (third,) = read_answers(logits, ASKED)
    logs = logits.log_softmax(-1)
    assert (first.text, first.at, first.key, first.right) == ("a?", 1, 0, "<3>")
    assert first.loss == pytest.approx(-logs[0, 1, 3].item())
    assert [word for word, _ in first.top] == [f"<{i}>" for i in logits[0, 1].argsort(descending=True)[:5].tolist()]
    assert first.top[0][1] == pytest.approx(logs[0, 1].max().exp().item())
    assert first.is_right == (logits[0, 1].argmax().item() == 3)
    assert (second.right, second.is_right, second.loss) == (None, None, None)
    assert third.loss == pytest.approx(-logs[1, 0, 8].item())
    sure = torch.zeros(2, 5, 11).index_fill(-1, torch.tensor(3), 50.0)
    assert [one.is_right for row in read_answers(sure, ASKED) for one in row] == [True, None, False]


def test_an_answer_for_a_whole_row_and_outputs_that_are_no_logits():
    whole = Questions("input_ids", [[Question("?", None, 2)], [Question("?", None, 0)]], 3, str)
    logits = torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 9.0]])
    assert [one.is_right for (one,) in read_answers({"logits": logits}, whole)] == [True, False]
    for output in (torch.zeros(2, 5, 7), torch.zeros(2, 11), None):
        assert read_answers(output, ASKED) is None
    assert read_answers(torch.zeros(2, 3, 3), whole) is None


def test_a_snapshot_keeps_the_answers_and_its_file_and_its_sentences_have_them(tmp_path):  # row 0 begins with padding
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    asked = Questions("input_ids", [[Question("a?", 2, 3, 1)], [Question("c?", 0, 8)]], 11, str)
    snapshot = take_snapshot(model_of(), {"input_ids": IDS, "key_mask": mask}, asked=asked, step=7)
    ((one,),) = snapshot.sentence(0).answers.rows
    assert (one.at, one.key, one.loss) == (1, 0, snapshot.answers.rows[0][0].loss)
    write_snapshot(snapshot, tmp_path)
    assert read_snapshots(tmp_path)[0].answers == snapshot.answers
    assert take_snapshot(model_of(), IDS).answers is None
    other = Questions("input_ids", ASKED.rows, 12, str)  # the model has 11
    assert take_snapshot(model_of(), IDS, asked=other).answers is None


def test_answers_of_a_decoder_are_left_out_where_its_positions_are_not_shown():
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS}
    asked = Questions("decoder_input_ids", [[Question("?", 1, 2)]] * 2, 11, str)
    assert take_snapshot(translation_of(), inputs, asked=asked).answers is not None
    assert take_snapshot(translation_of(), inputs, asked=asked, layers=["encoder"]).answers is None


def test_without_a_head_the_answers_are_those_of_the_model_whose_head_gives_zero():
    model = model_of()
    without = answers_without_heads(model, {"input_ids": IDS}, ASKED)
    assert {name: len(heads) for name, heads in without.items()} == {f"blocks.{i}.attention.core": 3 for i in range(2)}
    for layer, heads in enumerate(without.values()):
        for head, rows in enumerate(heads):
            with torch.no_grad(), intervene(model, "heads", 0.0, layers=[layer], heads=[head]):
                logs = model(IDS).log_softmax(-1)
            assert rows[0][0].loss == pytest.approx(-logs[0, 1, 3].item(), rel=1e-5)
            assert math.isclose(rows[1][0].top[0][1], logs[1, 0].max().exp().item(), rel_tol=1e-5)
    with pytest.raises(ValueError, match="returns no logits over 12 answers"):
        answers_without_heads(model, {"input_ids": IDS}, Questions("input_ids", ASKED.rows, 12, str))
    model.register_forward_pre_hook(lambda _, args, given: (args, {"input_ids": given["input_ids"]}), with_kwargs=True)
    # the heads are on other devices than the first input
    elsewhere = {"first": torch.zeros(2, device="meta"), "input_ids": IDS}
    assert answers_without_heads(model, elsewhere, ASKED) == without
