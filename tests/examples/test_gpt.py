"""examples/gpt.py: a model made of our blocks that our trainer trains."""

import csv

import pytest
import torch


@pytest.mark.slow
def test_a_few_steps_bring_the_loss_well_below_a_guess_and_the_model_goes_on_from_a_beginning(example, tmp_path):
    loss, text = example("gpt").main(steps=20, folder=tmp_path)
    with (tmp_path / "metrics.csv").open() as file:
        guess = float(next(csv.DictReader(file))["train_loss"])  # the table starts small: every character is as likely
    assert guess > 3.0 and loss < guess - 0.5
    assert text.startswith("And God said ")
    assert len(text) == len("And God said ") + 200  # more than the 64 positions that it knows


def test_no_position_sees_the_future(example):
    model = example("gpt").GPT(11).eval()
    torch.nn.init.normal_(model.token.weight)
    ids = torch.tensor([[1, 2, 3, 5, 7], [1, 2, 3, 9, 10]])
    with torch.no_grad():
        logits = model(ids)
    torch.testing.assert_close(logits[0, :3], logits[1, :3])
    assert (logits[0, 3:] - logits[1, 3:]).abs().max() > 0.1
